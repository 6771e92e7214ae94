"""The arguments of the ops: what a user may pass, checked, and in the shape that the kernels take."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, UInt32

from jax_fp4._array import QuantizedTensor
from jax_fp4._errors import UnsupportedError, message
from jax_fp4._formats import BLOCK, E4M3_MAX, FORMATS, Quantization, amax_shape, exclusion, stored
from jax_fp4._lowering import Implementation
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
    """x as the kernels take it, [*batch, m, k], the leading shape it came with, and its groups of rows or None."""

    x: Array | np.ndarray
    leading: tuple[int, ...]
    batch_dims: int
    group_sizes: Array | np.ndarray | None

    @classmethod
    def of(cls, op: str, x, batch_dims: int, group_sizes, implementation: Implementation) -> "Tensor":
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
        *leading, k = x.shape
        batch = leading[:batch_dims]
        if implementation != "reference":  # NumPy in, NumPy out is the reference alone: the others take jax arrays
            x, group_sizes = jnp.asarray(x), None if group_sizes is None else jnp.asarray(group_sizes)
        elif group_sizes is not None:
            group_sizes = np.asarray(group_sizes) if isinstance(x, np.ndarray) else jnp.asarray(group_sizes)
        return cls(x.reshape(*batch, math.prod(leading[batch_dims:]), k), tuple(leading), batch_dims, group_sizes)

    @property
    def batch(self) -> tuple[int, ...]:
        return self.x.shape[:-2]

    @property
    def groups(self) -> int | None:
        return None if self.group_sizes is None else self.group_sizes.shape[0]

    def rows(self, axis: int) -> tuple[int, ...]:
        """The shape of the stored rows as the user sees them."""
        return self.leading if axis == -1 else (*self.batch, self.x.shape[-1])

    def amax_shape(self, q: Quantization, axis: int) -> tuple[int, ...]:
        """The shape of the amax as the user sees it."""
        if q.row_scaled and axis == -1:
            return self.leading
        return amax_shape(self.batch, stored(self.x.shape, axis)[0], replace(q, axis=axis), self.groups)

    def pack(self, arrays, q: Quantization, axis: Literal[-1, 0]) -> QuantizedTensor:
        codes, block_scale, amax = arrays
        rows = self.rows(axis)
        return QuantizedTensor(
            codes=codes.reshape(*rows, codes.shape[-1]),
            block_scale=block_scale.reshape(*rows, block_scale.shape[-1]),
            amax=amax.reshape(self.amax_shape(q, axis)),
            group_sizes=self.group_sizes,
            axis=axis,
            extent=stored(self.x.shape, axis)[1],
            dtype=jnp.dtype(q.compute_dtype),
            bound=q.bound_along(axis),
            block=(q.tile, BLOCK),
            row_scaled=q.row_scaled,
            hadamard=q.hadamard and axis == 0,
            grouped="" if self.group_sizes is None else "rows" if axis == -1 else "blocks",
        )


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
    numpy = np if isinstance(tensor.x, np.ndarray) else jnp
    rows = stored(tensor.x.shape, axis)[0]
    return numpy.asarray(amax).reshape(amax_shape(tensor.batch, rows, replace(q, axis=axis), tensor.groups))


def seed_words(op: str, key, tensor: Tensor) -> UInt32[Array, "*b 4"] | UInt32[np.ndarray, "*b 4"] | None:
    """The key's two words and the origin of x in the global tensor, for each batch entry the same."""
    if key is None:
        return None
    words = jnp.concatenate([key_words(op, key), jnp.zeros(2, jnp.uint32)])
    seed = jnp.broadcast_to(words, (*tensor.batch, 4))
    return np.asarray(seed) if isinstance(tensor.x, np.ndarray) else seed


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
