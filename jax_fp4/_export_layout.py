"""Where each parameter of a tree lies in an exported file: under which names, and as which matrices [n, k]."""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import GetAttrKey, keystr, tree_flatten_with_path

from jax_fp4._array import QuantizedTensor
from jax_fp4._errors import message

Names = Callable[[str], str | Sequence[str]]
Layouts = Mapping[str, str | None]

_KERNELS = ("kernel", "w_in", "w_out")
_BIASES = dict(bias="kernel", b_in="w_in", b_out="w_out")  # of which kernel


@dataclass(frozen=True)
class Parameter:
    """An array, a QuantizedTensor, or a shape in their place. layout: a letter for each dimension, "g" of stacked
    matrices, "k" contracted, "n" outputs; that of a bias has no "k", and None is anything else. names: for each matrix,
    those of the parts [n / parts, k] that its outputs are divided among; of a bias [n / parts]."""

    path: str
    value: Any
    layout: str | None
    names: tuple[tuple[str, ...], ...]

    @property
    def layer(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def leaf(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def is_kernel(self) -> bool:
        return "k" in (self.layout or "")

    @property
    def groups(self) -> tuple[int, ...]:
        return self.value.shape[: self._count("g")]

    @property
    def k(self) -> int:
        g = len(self.groups)
        return math.prod(self.value.shape[g : g + self._count("k")])

    @property
    def n(self) -> int:
        return math.prod(self.value.shape[len(self.groups) + self._count("k") :])

    @property
    def flat_names(self) -> tuple[str, ...]:
        return tuple(itertools.chain(*self.names))

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Of each array in high precision in the file."""
        if self.layout is None:
            return self.value.shape
        rows = self.n // len(self.names[0])
        return (rows, self.k) if self.is_kernel else (rows,)

    def matrices(self, op: str) -> np.ndarray:
        """On this host: [*g, k, n]."""
        return _host(op, self.path, self.value).reshape(*self.groups, self.k, self.n)

    def dense(self, op: str) -> list[np.ndarray]:
        """The arrays in high precision, one for each name."""
        if self.layout is None:
            return [_host(op, self.path, self.value)]
        matrices = self.matrices(op)
        return self.divided(np.swapaxes(matrices, -1, -2) if self.is_kernel else matrices[..., 0, :])

    def from_dense(self, parts: list[np.ndarray]) -> np.ndarray:
        if self.layout is None:
            return parts[0]
        joined = self.joined(parts)
        return (np.swapaxes(joined, -1, -2) if self.is_kernel else joined).reshape(self.value.shape)

    def divided(self, array: Any) -> list[np.ndarray]:
        """[*g, n, *s] -> [n / parts, *s] for each name."""
        array = np.asarray(array)
        matrices = array.reshape(-1, *array.shape[len(self.groups) :])
        return [part for matrix in matrices for part in np.split(matrix, len(self.names[0]))]

    def joined(self, parts: list[np.ndarray]) -> np.ndarray:
        """[n / parts, *s] for each name -> [*g, n, *s]."""
        return np.concatenate(parts).reshape(*self.groups, self.n, *parts[0].shape[1:])

    def _count(self, letter: str) -> int:
        return (self.layout or "").count(letter)


def parameters(
    op: str, argument: str, tree: Any, names: Names | None, layouts: Layouts | None
) -> tuple[list[Parameter], Callable[[list], Any]]:
    """All of a tree, and what puts other leaves into their places."""
    flat, structure = tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, QuantizedTensor))
    parts = [_parts(path) for path, _ in flat]
    values = {"/".join(each): value for each, (_, value) in zip(parts, flat, strict=True)}
    _check_arrays(op, argument, values)
    refuse_unmatched(op, "layouts", layouts or {}, [*values])
    shapes = {path: _layout(op, path, value, layouts or {}) for path, value in values.items()}
    found: dict[str, Parameter] = {}
    # Kernels first: a bias is divided as its kernel is.
    for path, each in sorted(zip(values, parts, strict=True), key=lambda pair: shapes[pair[0]] is None):
        layer, _, leaf = path.rpartition("/")
        kernel = found.get(f"{layer}/{_BIASES.get(leaf)}".lstrip("/"))
        layout = shapes[path] or _layout_of_bias(path, values[path], kernel, layouts or {})
        groups = values[path].shape[: (layout or "").count("g")]
        beside = {f"{layer}/{name}".lstrip("/") for name in _KERNELS} & {*values}
        given = (_given_names(op, name, names) for name in _default_names(each, layout, groups, bool(beside)))
        found[path] = Parameter(path, values[path], layout, tuple(given))
        _check_names(op, found[path], kernel)
    return [found[path] for path in values], structure.unflatten


def _check_arrays(op: str, argument: str, values: Mapping[str, Any]) -> None:
    for path, value in values.items():
        if not path:
            why, fix = "a tensor is named after its path", "{'kernel': array}"
            raise TypeError(message(op, argument, f"a bare {type(value).__name__}", "a tree", why, fix))
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            why, fix = "a file keeps arrays", "the parameters alone, without what else a state holds"
            raise TypeError(message(op, f"{path} of {argument}", f"a {type(value).__name__}", "an array", why, fix))


def refuse_unmatched(op: str, argument: str, patterns: Mapping[str, Any], paths: list[str]) -> None:
    """A key that matches no path would do nothing, silently."""
    for pattern in patterns:
        if not any(re.fullmatch(pattern, path) for path in paths):
            shown, why = f"with {pattern!r}, which matches nothing", f"paths are like {paths[:3]}"
            raise ValueError(message(op, argument, shown, "the whole path of a kernel", why, "one of the paths"))


def first_match(by_pattern: Mapping[str, Any], path: str) -> Any:
    """None where there is none."""
    return next((value for pattern, value in by_pattern.items() if re.fullmatch(pattern, path)), None)


def _parts(path: tuple) -> tuple[str, ...]:
    # The last key of a boxed array (nnx.Param, nn.Partitioned) is its attribute `value`.
    keys = path[:-1] if path and path[-1] == GetAttrKey("value") else path
    return tuple(keystr((key,), simple=True) for key in keys)


def _layout(op: str, path: str, value: Any, layouts: Layouts) -> str | None:
    leaf = path.rpartition("/")[2]
    if isinstance(value, QuantizedTensor):
        return "g" * (value.ndim - 2) + "kn"
    given = [layout for pattern, layout in layouts.items() if re.fullmatch(pattern, path)]
    if not given:
        if leaf not in _KERNELS:
            return None
        if value.ndim == 2 or (value.ndim == 3 and leaf != "kernel"):
            return "gkn"[-value.ndim :]
        why = "stacked matrices and several contracted or output dimensions look alike"
        needs, fix = "a layout", f"layouts={{{path!r}: 'gkn'}}, 'knn', 'kkn', or None to keep it as it is"
        raise ValueError(message(op, path, f"of shape {value.shape}", needs, why, fix))
    layout = given[0]
    if layout is not None and (not re.fullmatch("g*k+n+", layout) or len(layout) != value.ndim):
        needs, why = f"{value.ndim} letters, g* k+ n+", f"that of {path!r} is {value.shape}"
        raise ValueError(message(op, "layouts", f"with {layout!r}", needs, why, "'gkn', a matrix for each expert"))
    return layout


def _layout_of_bias(path: str, value: Any, kernel: Parameter | None, layouts: Layouts) -> str | None:
    """The part of its kernel's layout that a bias has too: a vector for each matrix."""
    if kernel is None or not kernel.is_kernel or any(re.fullmatch(pattern, path) for pattern in layouts):
        return None
    g = len(kernel.groups)
    fits = value.shape[:g] == kernel.groups and len(value.shape) > g and math.prod(value.shape[g:]) == kernel.n
    return "g" * g + "n" * (len(value.shape) - g) if fits else None


def _default_names(parts: tuple[str, ...], layout: str | None, groups: tuple[int, ...], beside: bool) -> Iterator[str]:
    """One for each matrix. beside: a kernel has the name "weight" in this layer."""
    *layer, leaf = parts
    if layout is None:
        weight = leaf == "embedding" or (leaf == "scale" and not beside)
        yield ".".join((*layer, "weight" if weight else leaf))
        return
    kernel, kind = (leaf, "weight") if "k" in layout else (_BIASES[leaf], "bias")
    for index in np.ndindex(*groups):
        numbers = [str(i) for i in index]
        within = numbers if kernel == "kernel" else [*(["experts"] if numbers else []), *numbers, kernel]
        yield ".".join((*layer, *within, kind))


def _given_names(op: str, name: str, names: Names | None) -> tuple[str, ...]:
    if names is None:
        return (name,)
    given = names(name)
    given = (given,) if isinstance(given, str) else given
    if not isinstance(given, tuple | list) or not given or not all(isinstance(each, str) for each in given):
        needs, why = "a name, or a tuple of them", "that is what the tensor is called"
        raise TypeError(message(op, "names", f"{given!r} for {name!r}", needs, why, "lambda name: name"))
    return tuple(given)


def _check_names(op: str, p: Parameter, kernel: Parameter | None) -> None:
    """kernel: that of a bias."""
    counts = {len(names) for names in p.names}
    if p.layout is None:
        if counts != {1}:
            shown, why = f"several for {p.path!r}", "only the outputs of a kernel are divided"
            raise ValueError(message(op, "names", shown, "one name", why, "one name, or a layout for it"))
        return
    if p.is_kernel and (wrong := [name for name in p.flat_names if not re.fullmatch(r"(.*\.)?weight", name)]):
        shown, why = f"{wrong[0]!r} for {p.path!r}", "weight_scale and weight_scale_2 are named after it"
        raise ValueError(message(op, "names", shown, "a name that ends with .weight", why, f"'{wrong[0]}.weight'"))
    if len(counts) > 1 or (counts and p.n % max(counts)):
        shown, why = f"{sorted(counts)} names for {p.path!r}", f"its {p.n} outputs are divided equally"
        raise ValueError(message(op, "names", shown, "a number that divides them", why, "one name"))
    if not p.is_kernel and kernel is not None and counts != (needed := {len(names) for names in kernel.names}):
        shown, needs = f"{sorted(counts)} names for {p.path!r}", f"{sorted(needed)}, as for {kernel.path!r}"
        fix = f"lambda name: ... for {p.flat_names[0]!r} too"
        raise ValueError(message(op, "names", shown, needs, "a bias is divided as its kernel is", fix))


def _host(op: str, path: str, array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        why = "other processes hold parts of it"
        fix = "jax.experimental.multihost_utils.process_allgather(params, tiled=True), and one process that writes"
        raise ValueError(message(op, path, "sharded over processes", "all of it in this one", why, fix))
    return np.asarray(array)
