"""What a product reads of a quantized operand: the values without the scale of the tensor, and that scale.

Code times block scale is exact in bfloat16, and a product of two is exact in float32; what scales whole tensors (or
groups, or rows) multiplies the float32 sums afterwards. float8_block under scales that are no powers of two is the
exception: its values are float32.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jax_fp4 import _float8, _groups, _ops, reference
from jax_fp4._array import QuantizedTensor, block_length, scaling
from jax_fp4._formats import PACK


@jax.named_scope("fp4.dequantize")
def decode(q: QuantizedTensor, dtype) -> Float[Array, "..."]:
    """The values in the stored orientation, without padding, [..., r, extent]; no groups."""
    if scaling(q) == "nvfp4":
        return _ops.decode(q, dtype, q.extent)
    return _float8.dequantize(dataclasses.replace(q, axis=-1), np.dtype(dtype), None)


class Common(NamedTuple):
    """What two product forms share: the contracted extent, the dtype, and the precision of their dot."""

    extent: int
    dtype: Any
    precision: lax.Precision | None


def common(lhs: QuantizedTensor, rhs: QuantizedTensor) -> Common:
    """Formats pad to blocks of their own: of two different ones the shorter gets zeros."""
    extent = max(_padded_extent(q) for q in (lhs, rhs))
    if is_exact(lhs) and is_exact(rhs):
        return Common(extent, jnp.bfloat16, None)
    return Common(extent, jnp.float32, lax.Precision.HIGHEST)


@jax.named_scope("fp4.dequantize")
def product_form(q: QuantizedTensor, of: Common) -> Float[Array, "*b r extent"]:
    """Code times block scale, padding and all, in the stored orientation."""
    match scaling(q):
        case "nvfp4":
            form = _ops.decode(q, of.dtype, _padded_extent(q), product_form=True)
        case _:
            whole = dataclasses.replace(q, axis=-1, extent=_padded_extent(q), group_sizes=None, grouped="")
            if scaling(q) == "float8":
                # Under scale 1, and not `astype`: XLA:GPU hands a dot of converted 8-bit floats to tensor cores for
                # these, which keep so few bits of a sum that it is off by 1e-3.
                whole = dataclasses.replace(whole, block_scale=jnp.ones((), jnp.float32), amax=None)
            form = _float8.dequantize(whole, np.dtype(of.dtype), None)
    missing = of.extent - form.shape[-1]
    return jnp.pad(form, [(0, 0)] * (form.ndim - 1) + [(0, missing)]) if missing else form


def _padded_extent(q: QuantizedTensor) -> int:
    return q.codes.shape[-1] * (PACK if scaling(q) == "nvfp4" else 1)


def is_exact(q: QuantizedTensor) -> bool:
    """Whether its product form is exact in bfloat16."""
    return scaling(q) != "float8_block" or q.power_of_two


def has_factor(q: QuantizedTensor) -> bool:
    return scaling(q) in ("nvfp4", "float8")


def tensor_factor(q: QuantizedTensor) -> Any:
    """What the product form lacks, float32: [*batch, 1, 1], one for each stored row, [*batch, r, 1], where rows are
    scaled or grouped, or, where the groups lie along the blocks, [g, 1 | r, 1]."""
    match scaling(q):
        case "nvfp4":
            ndim = q.codes.ndim + (q.grouped == "blocks")
            return reference.tensor_factor(_ops.amax_of_rows(q), ndim, q.bound)
        case "float8":
            factor = q.block_scale
            if q.grouped == "rows":
                factor = _groups.of_group(factor, _groups.group_of_rows(q.group_sizes, q.codes.shape[0]), 0)
            missing = q.codes.ndim + (q.grouped == "blocks") - factor.ndim
            return factor.reshape(*factor.shape, *[1] * missing)
        case _:
            return jnp.ones([1] * (q.codes.ndim + (q.grouped == "blocks")), jnp.float32)


def columns(q: QuantizedTensor) -> _groups.Bounds:
    """Where the columns of each group lie, with the padding of its last block: zero, or after a transform part of the
    data. For groups along the blocks."""
    length = block_length(q)
    if length == 1:
        return _groups.bounds(q.group_sizes, q.extent)
    layout = _groups.columns(q.group_sizes, q.extent, length)
    return _groups.Bounds(length * layout.first_block, length * (layout.first_block + layout.blocks))
