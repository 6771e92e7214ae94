"""The arguments of the ops: what a user may pass, checked, and in the shape that the kernels take."""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, UInt32

from jax_fp4._amax import amaxes_of_whole
from jax_fp4._array import QuantizedTensor
from jax_fp4._errors import UnsupportedError, message
from jax_fp4._formats import BLOCK, E4M3_MAX, FORMATS, Quantization, amax_shape, exclusion, stored
from jax_fp4._groups import bounds
from jax_fp4._lowering import IMPLEMENTATIONS, Implementation
from jax_fp4._placement import WHOLE, Axes, Part, Specs, alike, index_of, size_of
from jax_fp4._recipe import FourOverSix, check_choice

FLOATS = ("float32", "bfloat16", "float16")


def quantization(
    op, x, format, axis, block, row_scaled, hadamard, key, four_over_six, dtype, group_sizes
) -> Quantization:
    """Every flag of a quantize call, checked one by one and in pairs."""
    check_choice(op, "format", format, FORMATS, "this version quantizes to no other")
    check_choice(op, "axis", axis, (-1, 0), "blocks run along the last axis, or along the rows before it")
    check_choice(op, "block", block, (None, (1, 16), (16, 16)), "NVFP4 scales 16 elements, or 16 x 16 of a weight")
    for name, flag in (("row_scaled", row_scaled), ("hadamard", hadamard)):
        check_choice(op, name, flag, (False, True), "it is a switch")
    if four_over_six is not None and not isinstance(four_over_six, FourOverSix):
        raise TypeError(
            message(
                op,
                "four_over_six",
                repr(four_over_six),
                "a FourOverSix or None",
                "it carries a bound and an error",
                "FourOverSix()",
            )
        )
    compute = compute_dtype(op, x, dtype)
    q = Quantization(
        axis=axis,
        tile=16 if block == (16, 16) else 1,
        row_scaled=row_scaled,
        hadamard=hadamard,
        four_over_six=four_over_six.error if four_over_six else "",
        bound=four_over_six.bound if four_over_six else E4M3_MAX,
        compute_dtype=compute,
    )
    if pair := exclusion(q, stochastic=key is not None, grouped=group_sizes is not None):
        first, second, why = pair
        fix = f"a call without {second}"
        raise ValueError(message(op, first, f"together with {second}", "one of the two", why, fix))
    return q


def float_dtype(op: str, argument: str, dtype, because: str) -> np.dtype:
    """`dtype` as one of the three float types that the kernels know."""
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
    if known is None or known.name not in FLOATS:
        shown = known.name if known is not None else repr(dtype)
        raise TypeError(message(op, argument, shown, f"one of {FLOATS}", because, "jnp.bfloat16"))
    return known


def compute_dtype(op: str, x, dtype) -> str:
    check_float(op, "x", x)
    return x.dtype.name if dtype is None else float_dtype(op, "dtype", dtype, "x is rounded to it").name


@dataclass(frozen=True)
class Tensor:
    """An array [*batch, *m, k], the leading shape it came with, its groups of rows or None, and what part it is of a
    global tensor."""

    array: Array | np.ndarray
    leading: tuple[int, ...]
    batch_dims: int
    group_sizes: Array | np.ndarray | None
    part: Part = WHOLE
    entries: bool = False  # `by_entries`

    @classmethod
    def of(
        cls, op: str, x, batch_dims: int, group_sizes, implementation: Implementation, specs: Specs | Part | None = None
    ) -> "Tensor":
        if x.ndim == 0:
            raise ValueError(message(op, "x", "a scalar", "at least one axis", "blocks run along an axis", "x[None]"))
        if isinstance(batch_dims, bool) or not isinstance(batch_dims, int) or not 0 <= batch_dims < x.ndim:
            raise ValueError(
                message(
                    op, "batch_dims", repr(batch_dims), f"0 to {x.ndim - 1}", f"x has shape {x.shape}", "batch_dims=0"
                )
            )
        if group_sizes is not None:
            check_group_sizes(op, group_sizes)
            if batch_dims:
                why = "group_sizes [g] cut the rows of one x"
                raise ValueError(message(op, "batch_dims", f"{batch_dims} beside group_sizes", "0", why, "jax.vmap"))
        leading = x.shape[:-1]
        if implementation != "reference":  # NumPy in, NumPy out is the reference alone: the others take jax arrays
            x, group_sizes = jnp.asarray(x), None if group_sizes is None else jnp.asarray(group_sizes)
        elif group_sizes is not None:
            group_sizes = np.asarray(group_sizes) if isinstance(x, np.ndarray) else jnp.asarray(group_sizes)
        part = part_of(op, specs, x)
        if part.dims or part.groups:
            x, group_sizes = alike(x, group_sizes)
        return cls(x, tuple(leading), batch_dims, group_sizes, part)

    @functools.cached_property
    def x(self) -> Array | np.ndarray:
        """As the kernels take it, [*batch, m, k]."""
        return self.array.reshape(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of x."""
        return (*self.batch, math.prod(self.leading[len(self.batch) :]), self.array.shape[-1])

    @property
    def batch(self) -> tuple[int, ...]:
        return self.leading[:-1] if self.entries else self.leading[: self.batch_dims]

    @property
    def is_split_by_xla(self) -> bool:
        """Whether XLA may partition what is made of it: nobody says how it lies, and there are no groups."""
        whole = not (self.part.dims or self.part.groups) and self.group_sizes is None
        return whole and not isinstance(self.array, np.ndarray)

    @property
    def dims(self) -> tuple[Axes, ...]:
        """The mesh axes that cut each dimension that x came with."""
        return self.part.dims or ((),) * (len(self.leading) + 1)

    @property
    def scattered(self) -> bool:
        """Whether the rows of x do not follow one another in the global tensor: a dimension below others is cut."""
        last = max((i for i, axes in enumerate(self.dims[self.batch_dims : -1]) if axes), default=0)
        return math.prod(self.leading[self.batch_dims :][:last]) > 1

    def by_entries(self) -> "Tensor":
        """x as a batch of rows that do: those along its last leading dimension."""
        return replace(self, entries=True)

    def half(self, number: Literal[0, 1]) -> "Tensor":
        """Of a part whose columns are two runs, one of them."""
        k = self.array.shape[-1] // 2
        array = self.array[..., number * k : (number + 1) * k]
        return replace(self, array=array, part=self.part._replace(halves=False, half=number))

    def first_row(self) -> Any:
        """The global number of the first row, uint32 [], or of each entry, [*leading[:-1]]."""
        ndim, first, below = len(self.batch), jnp.uint32(0), 1
        for i in reversed(range(self.batch_dims, len(self.leading))):
            n, axes = self.leading[i], self.dims[i]
            at = index_of(axes) * np.uint32(n) if axes else None  # n may be symbolic where it is whole
            if self.entries and i < ndim:
                rows = jnp.arange(n, dtype=jnp.uint32).reshape(*[1] * i, n, *[1] * (ndim - 1 - i))
                at = rows if at is None else at + rows
            first = first if at is None else first + at * np.uint32(below)
            below *= n * size_of(axes)
        return first

    @property
    def totals(self) -> dict[str, int]:
        """The extents of the global tensor; nothing where x is all of it."""
        if not self.part.dims:
            return {}
        sizes = [n * size_of(axes) for n, axes in zip((*self.leading, self.shape[-1]), self.dims, strict=True)]
        return {"m_total": math.prod(sizes[self.batch_dims : -1]), "k_total": sizes[-1]}

    @property
    def groups(self) -> int | None:
        return None if self.group_sizes is None else self.group_sizes.shape[0]

    def amaxes(
        self,
        op: str,
        q: Quantization,
        axes: tuple[int, ...],
        given: tuple,
        implementation: Implementation,
        strict: bool,
    ) -> tuple:
        """Those of the global tensor, of each stored form: as given; all None where the quantizer computes them."""
        check_choice(op, "implementation", implementation, IMPLEMENTATIONS, "these implementations exist")
        if given[0] is not None:
            return given
        whole = self.x, self.group_sizes, self.part, self.batch_dims
        return amaxes_of_whole(op, *whole, q, axes, implementation, strict)

    def rows(self, axis: int) -> tuple[int, ...]:
        """The shape of the stored rows as the user sees them."""
        return self.leading if axis == -1 else (*self.batch, self.shape[-1])

    def amax_shape(self, q: Quantization, axis: int) -> tuple[int, ...]:
        """The shape of the amax as the user sees it."""
        if q.row_scaled and axis == -1:
            return self.leading
        return amax_shape(self.batch, stored(self.shape, axis)[0], replace(q, axis=axis), self.groups)

    def pack(self, arrays, q: Quantization, axis: Literal[-1, 0]) -> QuantizedTensor:
        """Of codes and scales in the stored form, with rows in any number of dimensions."""
        codes, block_scale, amax = arrays
        inner, rows = self.inner(codes, axis), self.rows(axis)
        if not inner:
            codes, block_scale = (a.reshape(*rows, a.shape[-1]) for a in (codes, block_scale))
        packed = QuantizedTensor(
            codes=codes,
            block_scale=block_scale,
            amax=amax.reshape(self.amax_shape(q, axis)),
            group_sizes=self.group_sizes,
            axis=axis,
            extent=self.leading[-1] if inner else stored(self.shape, axis)[1],
            inner=inner,
            dtype=jnp.dtype(q.compute_dtype),
            bound=q.bound_along(axis),
            block=(q.tile, BLOCK),
            row_scaled=q.row_scaled,
            hadamard=q.hadamard and axis == 0,
            grouped="" if self.group_sizes is None else "rows" if axis == -1 else "blocks",
        )
        return packed if self.part.unflattened else packed.flattened

    def inner(self, codes, axis: int) -> int:
        """How many leading dimensions column-wise codes keep beside the last one."""
        return codes.ndim - len(self.batch) - 2 if axis == 0 else 0


def part_of(op: str, specs: Specs | Part | None, x) -> Part:
    """What part x is of a global tensor: Specs are those of a user, whose mistakes they may be."""
    if specs is None or isinstance(specs, Part):
        return specs or WHOLE
    if not isinstance(specs, Specs):
        shown, why = f"a {type(specs).__name__}", "it says by which mesh axes x is cut"
        raise TypeError(message(op, "specs", shown, "Specs", why, "jax_fp4.Specs(x=PartitionSpec(...))"))
    return Part.of(op, "specs.x", specs.x, x.ndim)


def check_group_sizes(op: str, group_sizes, groups: int | None = None) -> None:
    """int32 [g], of JAX or NumPy; their values are data and may be anything."""
    if not isinstance(group_sizes, jax.Array | np.ndarray) or group_sizes.dtype != np.int32:
        kind = group_sizes.dtype if hasattr(group_sizes, "dtype") else type(group_sizes).__name__
        why, fix = "they are read as int32 on every platform", "jnp.asarray(group_sizes, jnp.int32)"
        raise TypeError(message(op, "group_sizes", f"of type {kind}", "an int32 array", why, fix))
    if group_sizes.ndim != 1 or (groups is not None and group_sizes.shape != (groups,)):
        need = "[g]" if groups is None else f"({groups},)"
        why = "each is the number of rows of a group" if groups is None else f"there are {groups} weights"
        shown, fix = f"of shape {group_sizes.shape}", "one size a group (jnp.bincount(experts, length=g))"
        raise ValueError(message(op, "group_sizes", shown, need, why, fix))


def given_amax(op: str, name: str, amax, tensor: Tensor, q: Quantization, axis: int):
    """The given amax as the kernels take it; its values are checked where they are known."""
    if amax is None:
        return None
    need = tensor.amax_shape(q, axis)
    if isinstance(amax, float | int) and not isinstance(amax, bool):
        amax = np.float32(amax)
    dtype, shape = getattr(amax, "dtype", None), getattr(amax, "shape", None)
    if dtype != np.float32 or shape != need:
        shown = f"{dtype} {shape}" if dtype is not None else f"a {type(amax).__name__}"
        why = "it is the absolute maximum of the tensor (or of its groups or rows)"
        raise ValueError(message(op, name, shown, f"float32 {need}", why, "amax=None"))
    if not isinstance(amax, Tracer) and np.any(np.asarray(amax) < 0):
        raise ValueError(message(op, name, "negative", "values >= 0", "it is an absolute maximum", "jnp.abs(amax)"))
    numpy = np if isinstance(tensor.array, np.ndarray) else jnp
    rows = stored(tensor.shape, axis)[0]
    return numpy.asarray(amax).reshape(amax_shape(tensor.batch, rows, replace(q, axis=axis), tensor.groups))


def refuse_borders(op: str, tensor: Tensor, axes: tuple[int, ...], block: int, tile: int = 1) -> None:
    """Refuse parts whose border falls inside a block, which would be another block than the global tensor's."""
    *rows, last = tensor.dims
    m, k = tensor.shape[-2:]
    row_axes = tuple(axis for of_dim in rows[tensor.batch_dims :] for axis in of_dim)
    m = m if not tensor.scattered else tensor.leading[-1]
    for name, extent, cut, length in (
        ("columns", k, last, block if -1 in axes else tile),
        ("rows", m, row_axes, block if 0 in axes and tensor.group_sizes is None else tile),
    ):
        if cut and extent % length:
            shown, why = f"{extent} {name} a device, along {', '.join(cut)}", "no block may lie on two devices"
            fix = f"{name} that are a multiple of {length * size_of(cut)} in all, or not cut"
            raise ValueError(message(op, "x", f"of {shown}", f"a multiple of {length}", why, fix))


def seed_words(op: str, key, tensor: Tensor) -> UInt32[Array, "*b 4"] | UInt32[np.ndarray, "*b 4"] | None:
    """The key's two words and where x begins in the global tensor: its row, or with groups the number of the first
    group, and its column. Of groups whose rows lie on several devices, also where theirs begin, and how many there are.
    """
    if key is None:
        return None
    part, k, sizes = tensor.part, tensor.shape[-1], tensor.group_sizes
    first = tensor.first_row() if sizes is None else index_of(part.groups) * np.uint32(sizes.shape[0])
    cut = tensor.dims[-1]
    column = index_of(cut) * np.uint32(k) + np.uint32(part.half * k * size_of(cut))
    words = alike(*key_words(op, key), first, column)
    seed = jnp.stack([jnp.broadcast_to(word, tensor.batch) for word in words], axis=-1)
    rows = tuple(axis for axes in tensor.dims[:-1] for axis in axes)
    if sizes is not None and rows:
        seed = jnp.concatenate(alike(seed, *_rows_of_groups(sizes, tensor.shape[0], rows)))
    return np.asarray(seed) if isinstance(tensor.array, np.ndarray) else seed


def _rows_of_groups(group_sizes, m: int, axes: Axes) -> tuple[UInt32[Array, " g"], UInt32[Array, " g"]]:
    """Of each group, the rows on the devices before this one along `axes`, and on all."""
    where = bounds(group_sizes, m)
    each = jax.lax.all_gather(where.ends - where.starts, axes).astype(jnp.uint32)
    before = jnp.arange(each.shape[0], dtype=jnp.uint32) < index_of(axes)
    return jnp.sum(jnp.where(before[:, None], each, 0), 0, dtype=jnp.uint32), jnp.sum(each, 0, dtype=jnp.uint32)


def key_words(op: str, key) -> UInt32[Array, "2"]:
    """The two words of a threefry key; keys of other implementations are reduced to two words."""
    if isinstance(key, (jax.Array, np.ndarray)) and key.dtype == np.uint32 and key.shape == (2,):
        return jnp.asarray(key)
    if isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
        data = jax.random.key_data(key)
        return data if data.shape == (2,) else jax.random.bits(key, (2,), "uint32")
    shown = f"{key.dtype} {key.shape}" if hasattr(key, "shape") else f"a {type(key).__name__}"
    raise TypeError(
        message(
            op,
            "key",
            shown,
            "one JAX key, typed or uint32[2]",
            "stochastic rounding draws from it",
            "jax.random.key(0)",
        )
    )


def refuse_float8(op: str, **given) -> None:
    """Refuse, beside format="nvfp4", the arguments that only the 8-bit formats have. None is absent."""
    for name, value in given.items():
        if value is not None:
            why = "NVFP4 has E4M3 scales under that of the tensor"
            raise ValueError(
                message(op, name, "given beside format='nvfp4'", "an 8-bit format", why, f"a call without {name}")
            )


def refuse_padding(op: str, name: str, shown: str, multiple: int = BLOCK) -> None:
    why, fix = "strict() forbids padding", "another size, or no strict()"
    raise UnsupportedError(message(op, name, f"of {shown}", f"a multiple of {multiple}", why, fix))


def check_quantized(op: str, name: str, q) -> None:
    if not isinstance(q, QuantizedTensor):
        raise TypeError(
            message(op, name, f"a {type(q).__name__}", "a QuantizedTensor", "it is decoded", "jax_fp4.quantize(x)")
        )
    if q.format not in FORMATS:
        why = "nobody else knows how to decode it"
        raise ValueError(message(op, f"{name}.format", repr(q.format), f"one of {FORMATS}", why, "jax_fp4.quantize(x)"))


def check_float(op: str, name: str, value) -> None:
    """An array, of JAX or NumPy, whose dtype the kernels read."""
    if not isinstance(value, jax.Array | np.ndarray):
        fix = f"jax_fp4.dequantize({name})" if isinstance(value, QuantizedTensor) else f"jnp.asarray({name})"
        raise TypeError(message(op, name, f"a {type(value).__name__}", "an array", "its values are read", fix))
    if value.dtype not in [jnp.dtype(known) for known in FLOATS]:  # not by name: big-endian is "float32" too
        shown, fix = f"an array of {value.dtype}", f"{name}.astype(jnp.float32)"
        raise TypeError(message(op, name, shown, f"one of {FLOATS}", "the kernels read these", fix))
