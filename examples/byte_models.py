"""The text that ships with Python, and byte models of order 0 to 2 fitted on it: the losses that are to be beaten."""

import hashlib
import pydoc_data.topics
from typing import NamedTuple

import numpy as np


class Text(NamedTuple):
    train: np.ndarray  # uint8, the first nine tenths
    held_out: np.ndarray  # uint8, the last tenth
    sha256: str  # of all of it


def load_text() -> Text:
    """Python's own help topics in sorted order, as bytes. The text differs a little between Python versions."""
    topics = pydoc_data.topics.topics
    data = "\n".join(topics[name] for name in sorted(topics)).encode()
    text = np.frombuffer(data, np.uint8)
    border = len(text) * 9 // 10
    return Text(text[:border], text[border:], hashlib.sha256(data).hexdigest())


def contexts(text: np.ndarray, order: int) -> np.ndarray:
    """For every byte that has `order` bytes before it, those bytes as one number."""
    code = np.zeros(len(text) - order, np.int64)
    for i in range(order):
        code = 256 * code + text[i : len(text) - order + i]
    return code


def fit(train: np.ndarray, order: int) -> np.ndarray:
    """P(byte | the `order` bytes before it), float64 [256**order, 256], with Witten-Bell smoothing.

    In a context h that was seen c(h) times, followed by t(h) different bytes, the counts are mixed with the model of
    the next lower order, down to the uniform distribution:

        P(b | h) = (c(h b) + t(h) P(b | h without its oldest byte)) / (c(h) + t(h))

    A context never seen takes the lower order as it is. No probability is zero, and no constant is to be tuned.
    """
    lower = np.full((1, 256), 1 / 256) if order == 0 else fit(train, order - 1)
    lower = np.tile(lower, (256**order // len(lower), 1))
    counts = np.zeros((256**order, 256))
    np.add.at(counts, (contexts(train, order), train[order:]), 1)
    total = counts.sum(axis=1, keepdims=True)
    kinds = (counts > 0).sum(axis=1, keepdims=True)
    return np.where(total > 0, (counts + kinds * lower) / np.maximum(total + kinds, 1), lower)


def loss(model: np.ndarray, text: np.ndarray) -> float:
    """Mean of -log P in nats a byte, over the bytes of `text` that have a whole context."""
    order = {1: 0, 256: 1, 65536: 2}[len(model)]
    return float(-np.log(model[contexts(text, order), text[order:]]).mean())
