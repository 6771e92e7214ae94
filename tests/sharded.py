"""What the tests of sharded layers share: meshes of CPU devices, steps that are compiled once, what they move."""

import math
import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

import jax_fp4 as fp4

MODES = ("default", "unquant", "dequant")
KEY = jax.random.key(7)
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is most of what tests take


def mesh(kind="Auto", **axes):
    """Of the first devices: mesh(data=2, fsdp=4) has eight."""
    sizes = tuple(axes.values())
    devices = jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, tuple(axes), devices=devices, axis_types=(getattr(AxisType, kind),) * len(axes))


def nvfp4(mode="default", **settings):
    return fp4.NVFP4BlockScaling(mode, **settings)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def same(got, want, name=""):
    """Trees of the same dtypes, shapes and bits."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        wide = lambda v: np.asarray(v).astype(np.float32) if v.dtype.itemsize < 4 else np.asarray(v)  # noqa: E731
        np.testing.assert_array_equal(wide(a), wide(b), err_msg=name)


def close(got, want, tolerance=1e-5, name=""):
    """Relative, in the Frobenius norm of each leaf of a tree; exact where that is 0."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    named = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(named, jax.tree.leaves(want), strict=True):
        where = f"{name}{jax.tree_util.keystr(path)}"
        assert a.dtype == b.dtype and a.shape == b.shape, where
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        off = np.linalg.norm(a - b)
        assert off <= tolerance * np.linalg.norm(b), f"{where}: {off} of {np.linalg.norm(b)}"


def step(function):
    """(y, gradients) of function(free, rest), for a loss in which each element of y counts differently: as rest["dy"]
    says, where it is there. rest is not differentiated."""

    def of(free, rest):
        rest, dy = {name: a for name, a in rest.items() if name != "dy"}, rest.get("dy")

        def loss(free):
            y = function(free, rest)
            counts = normal(6, *y.shape) if dy is None else dy
            return jnp.sum(counts.astype(jnp.float32) * y.astype(jnp.float32)), y

        (_, y), grads = jax.value_and_grad(loss, has_aux=True)(free)
        return y, grads

    return of


def compiled(function, *args):
    """function(*args), and the text of the compiled program."""
    program = jit(function).lower(*args).compile()
    return program(*args), program.as_text()


# --- what a compiled program moves ---


class Moved(NamedTuple):
    kind: str
    dtype: str
    shape: tuple[int, ...]  # of the result

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def collectives(text: str) -> list[Moved]:
    """Each array that each collective of a compiled program results in."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found: list[Moved] = []
    for line in text.splitlines():
        if match := re.search(rf"= (.*?) ({kinds})(-start)?\(", line):
            results, kind, _ = match.groups()
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results):
                found.append(Moved(kind, dtype, tuple(map(int, shape.split(","))) if shape else ()))
    return found


def gathers(text: str) -> list[Moved]:
    return [moved for moved in collectives(text) if moved.kind == "all-gather"]


def leaves(tree: Any) -> list[tuple[tuple[int, ...], str]]:
    """(shape, dtype) of every array of a tree that is not empty."""
    return [(a.shape, a.dtype.name) for a in jax.tree.leaves(tree) if a.size]
