"""Products on Hopper: which ones the kernels for sm_90a take, and their operands as these want them.

Group sizes are data. Extents are not: what is no multiple of what a kernel reads at once is padded here with zeros, and
cut off again.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from jax_fp4 import _ffi, reference
from jax_fp4._array import QuantizedTensor
from jax_fp4._formats import BLOCK, INTERLEAVE, PACK, grouped_extent, padded
from jax_fp4._lowering import choose, is_partitioned, local

MOST_GROUPS = 1024
MOST = 2**31 - 1 - BLOCK * MOST_GROUPS  # of any extent: positions are int32, and groups of rows may be padded to blocks
VECTOR = 8  # bfloat16 values in 16 bytes: rows in memory are whole vectors


def takes(groups: int, *extents: int) -> bool:
    """Whether this installation has the kernels, and they take a product with these extents, of which none may be 0. A
    symbolic one (jax.export) never is, and beyond the largest the handler refuses it when the program runs."""
    fit = all(0 < extent <= MOST for extent in extents if not is_symbolic_dim(extent))
    return fit and 0 < groups <= MOST_GROUPS and not _ffi.sm90a_missing()


@partial(jax.jit, static_argnums=(0, 1, 2), static_argnames="batched", inline=True)
def chosen(native, otherwise, static, *operands, batched: bool = True) -> Array:
    """native(*operands, static=static) where the program is lowered for CUDA, for one device or inside shard_map, and
    the GPUs are Hopper's, else `otherwise`. Jitted for eager calls, which find their compiled program; in a traced one
    nothing is around it."""
    functions = (partial(function, static=static) for function in (native, otherwise))
    return local(choose(*functions, usable=_on_hopper, batched=batched))(*operands)


def _on_hopper(context) -> bool:
    return not (_ffi.hopper_missing() or is_partitioned(context))


def quantized_rows(lhs: QuantizedTensor, rhs: QuantizedTensor, bias, row_weights, group_sizes, dtype) -> Array:
    """[m,n] = [m,k] @ [g,k,n] of two quantized operands: the rows of lhs [..., k] as exact bfloat16, rhs [g, k, n] or,
    of one group, [k, n] packed as it lies. bias float32 [g, n], times row_weights [m] if there are any."""
    groups, (n, size) = group_sizes.shape[0], rhs.codes.shape[-2:]
    values = _ffi.dequantize_interleaved(*(_matrix(a) for a in (lhs.codes, lhs.block_scale)))
    extent = padded(PACK * size, INTERLEAVE)
    codes = _up_to(rhs.codes.reshape(groups, n, -1), 2, extent // PACK)
    block_scale = _up_to(rhs.block_scale.reshape(groups, n, -1), 2, extent // BLOCK)
    column, row = (reference.tensor_factor(q.amax, q.codes.ndim, q.bound)[..., 0] for q in (lhs, rhs))
    of_rows = column.size > 1 and (lhs.row_scaled or not lhs.grouped)
    shape = lhs.codes.shape[:-1] if of_rows else (groups,)
    column = jnp.broadcast_to(column if of_rows else column.reshape(-1), shape).reshape(-1)
    row = _by_group(row.reshape(groups, -1), groups)
    return _ffi.grouped_matmul(
        values, codes, block_scale, column, row, bias, row_weights, group_sizes, dtype, lhs_of_rows=of_rows
    )


def rows(
    x: Float[Array, "m k"], w: Float[Array, "g i j"], bias, row_weights, group_sizes, dtype, *, transposed: bool
) -> Array:
    """[m,n] = [m,k] @ [g,k,n] in bfloat16, w [g, k, n] or, transposed, [g, n, k]; bias as in `quantized_rows`."""
    n = w.shape[1 if transposed else 2]
    x, w = _whole(x, 1), _whole(w, 2 if transposed else 1)
    if not transposed:
        w, bias = _whole(w, 2), None if bias is None else _whole(bias, 1)
    y = _ffi.grouped_matmul_bf16(x, w, bias, row_weights, group_sizes, dtype, transposed=transposed)
    return y[:, :n]


def quantized_contraction(
    lhs: Float[Array, "k P"], rhs: Float[Array, "n P"], column, row, group_sizes, m: int, dtype, parts: int
) -> Array:
    """[g,k,n] = [k,m] @ [m,n] over the rows of each group, of operands stored column-wise, as exact bfloat16. column,
    row: their `tensor_factor`, [g, 1, 1] or [g, k, 1] and [g, n, 1]. parts: more than one give [parts, g, k/parts, n].
    """
    groups = group_sizes.shape[0]
    column, row = (_by_group(factor[..., 0], groups) for factor in (column, row))
    lhs, rhs = (_up_to(a, 1, grouped_extent(m, groups)) for a in (lhs, rhs))
    k = lhs.shape[0]
    return _in_parts(lhs, rhs, column, row, group_sizes, m, dtype, rows_last=True, k=k, parts=parts)


def contraction(
    lhs: Float[Array, "m k"], rhs: Float[Array, "m n"], group_sizes, dtype, parts: int, column=None, row=None
) -> Array:
    """The same in bfloat16, of operands stored row by row; their factors, if there are any, are those of groups."""
    (m, k), n = lhs.shape, rhs.shape[1]
    lhs, rhs = _whole(lhs, 1), _whole(rhs, 1)
    column, row = (None if factor is None else factor.reshape(-1) for factor in (column, row))
    return _in_parts(lhs, rhs, column, row, group_sizes, m, dtype, rows_last=False, k=k, parts=parts)[..., :n]


def _in_parts(*operands, rows_last: bool, k: int, parts: int) -> Array:
    """Written as parts where these are of whole tiles, which are whole vectors too."""
    whole = k % (parts * _ffi.PART_ROWS) == 0
    dw = _ffi.grouped_contraction(*operands, rows_last=rows_last, parts=parts if whole else 1)
    return dw if whole else rows_in_parts(dw[:, :k], parts)


def rows_in_parts(dw: Any, parts: int) -> Array:
    """[g,k,n] as [parts, g, k/parts, n]; of one part, as it is."""
    if parts == 1:
        return dw
    g, k, n = dw.shape
    return jnp.moveaxis(dw.reshape(g, parts, k // parts, n), 1, 0)


def _matrix(a: Array) -> Array:
    return a.reshape(-1, a.shape[-1])


def _by_group(factor: Any, groups: int) -> Array:
    """[g | 1, r] as [g, r], or [g] where r is 1."""
    factor = jnp.broadcast_to(factor, (groups, factor.shape[1]))
    return factor[:, 0] if factor.shape[1] == 1 else factor


def _whole(a: Array, axis: int) -> Array:
    """With zeros up to whole vectors."""
    return _up_to(a, axis, padded(a.shape[axis], VECTOR))


def _up_to(a: Array, axis: int, extent: int) -> Array:
    """With zeros up to `extent`."""
    edges = [(0, extent - a.shape[i] if i == axis else 0, 0) for i in range(a.ndim)]
    return a if extent == a.shape[axis] else lax.pad(a, jnp.zeros((), a.dtype), edges)
