"""Files of tensors, as the package safetensors makes them: written in one go, read tensor by tensor."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp4._errors import importing, message

_FACTS = "jax_fp4"  # what is ours in the header of the file: the facts that the tensors do not tell

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "BOOL": np.bool_,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, of which nothing is read yet."""

    file: Path
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        # The library's own get_tensor looks for the 8-bit floats in NumPy. As bytes, which NumPy reads of any dtype.
        count = math.prod(self.shape) * self.dtype.itemsize
        return np.fromfile(self.file, np.uint8, count, offset=self.offset).view(self.dtype).reshape(self.shape)


def library(op: str) -> Any:
    with importing(op, "safetensors", "the weights are written and read by it"):
        import safetensors.numpy
    return safetensors


def write(op: str, file: Path, tensors: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
    # "format" is what transformers asks of every file. In C order, or the library takes the bytes as if they were.
    ordered = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    library(op).numpy.save_file(ordered, file, {"format": "pt", _FACTS: json.dumps(facts)})


def tensors_of(op: str, folder: Path) -> tuple[dict[str, Stored], dict[str, dict[str, Any]]]:
    """All tensors of a folder, and what `write` was told of them."""
    safetensors = library(op)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        why, fix = "weights are read from them", "the folder that export.save wrote"
        raise FileNotFoundError(message(op, "directory", repr(str(folder)), "files *.safetensors", why, fix))
    tensors: dict[str, Stored] = {}
    facts: dict[str, dict[str, Any]] = {}
    for file in files:
        with safetensors.safe_open(file, "numpy"):  # which checks that header and file are whole and agree
            start, header = _header(file)
        facts |= json.loads(header.pop("__metadata__", {}).get(_FACTS, "{}"))
        for name, entry in header.items():
            if entry["dtype"] not in _DTYPES or name in tensors:
                shown = "in two files" if name in tensors else f"of {entry['dtype']}"
                needs, why = f"one array, of one of {(*_DTYPES,)}", "all files of the folder make one model"
                raise ValueError(message(op, name, shown, needs, why, "a folder with this checkpoint alone"))
            dtype, shape = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"])
            tensors[name] = Stored(file, start + entry["data_offsets"][0], dtype, shape)
    return tensors, facts


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the bytes of tensors begin, and the entry of each: 8 bytes of length, JSON, and the arrays."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return 8 + length, json.loads(opened.read(length))


def check_kept(op: str, name: str, dtype: np.dtype) -> None:
    """JAX makes 64-bit arrays 32-bit, without a word, unless it is told not to."""
    if (small := jax.dtypes.canonicalize_dtype(dtype)) != dtype:
        why, fix = "without jax_enable_x64 JAX has no other", "jax.config.update('jax_enable_x64', True)"
        raise ValueError(message(op, name, f"{dtype}", f"{small}", why, fix))
