"""What the tests of grouped_dense and grouped_mlp share: recipes, gradients by name, what is kept and called."""

import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from grouping import total

import jax_fp4 as fp4

NONE = "high precision"  # no recipe
MODES = ("default", "unquant", "dequant")
KEY = jax.random.key(7)


def recipe(mode, **settings):
    return fp4.HIGH_PRECISION if mode == NONE else fp4.NVFP4BlockScaling(mode, **settings)


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def gradients(layer, dy, **arrays):
    """y, and by name the gradient of every argument that is an array (None and frozen kernels have none)."""
    free = {name: a for name, a in arrays.items() if isinstance(a, jax.Array | np.ndarray)}
    y, pull = jax.vjp(lambda free: layer(**(arrays | free)), free)
    return {"y": y} | pull(dy)[0]


def poisoned(a, sizes, value=np.nan):
    """`a` with `value` in every row that no group has."""
    a = np.array(a)
    a[total(sizes, len(a)) :] = value
    return a


def in_numpy(fn):
    """`fn` with its results in NumPy, where a slice compiles nothing."""
    return lambda *args, **kwargs: jax.tree.map(np.asarray, fn(*args, **kwargs))


def close(got, want, tolerance=1e-6, name=""):
    """Relative, in the Frobenius norm of each leaf; exact where the norm is 0."""
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            close(got[key], want[key], tolerance, key)
        return
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert a.shape == b.shape and got.dtype == want.dtype, name
    difference = np.linalg.norm(a - b)
    assert difference <= tolerance * np.linalg.norm(b), f"{name}: {difference} of {np.linalg.norm(b)}"


def kept(layer, **arrays) -> dict[tuple, int]:
    """(shape, dtype) of what a forward keeps for the gradient in `arrays`, and how often: all of 256 bytes or more.
    The rest (amaxes, sizes, keys, and parts of shape (0,)) is small: 256 bytes for each of eight groups together."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda arrays: jax.vjp(lambda a: layer(**a), arrays)[1], arrays))
    nbytes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]
    assert sum(n for n in nbytes if n < 256) <= 256
    return dict(Counter((leaf.shape, leaf.dtype.name) for leaf, n in zip(leaves, nbytes, strict=True) if n >= 256))


def packed(rows: tuple[int, ...], blocked: int) -> dict[tuple, int]:
    """One array of codes and one of scales."""
    return {((*rows, blocked // 2), "uint8"): 1, ((*rows, blocked // 16), "uint8"): 1}


def nbytes(arrays: dict[tuple, int]) -> int:
    return sum(count * math.prod(shape) * jnp.dtype(dtype).itemsize for (shape, dtype), count in arrays.items())


def quantizations(fn, *args) -> tuple[int, int]:
    """Custom calls of a traced program: one direction, both directions in one pass."""
    text = str(jax.make_jaxpr(fn)(*args))
    one, both = (len(re.findall(rf"target_name=jax_fp4_{op}\b", text)) for op in ("quantize", "quantize_transpose"))
    return one, both
