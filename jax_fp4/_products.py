"""matmul and grouped_matmul: products of quantized and high-precision operands, accumulated in float32."""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from jax_fp4 import _blackwell, _groups, _hopper, _ragged, reference
from jax_fp4._arguments import check_group_sizes
from jax_fp4._array import QuantizedTensor, block_length
from jax_fp4._errors import message
from jax_fp4._forms import columns, common, decode, has_factor, is_exact, product_form, tensor_factor
from jax_fp4._lowering import local
from jax_fp4._operands import check_groups, check_operand, check_transforms, result_dtype
from jax_fp4._ops import dequantize
from jax_fp4._partition import partitioned
from jax_fp4._partition_rules import contraction_rule, product_rule, sum_rule
from jax_fp4._placement import alike
from jax_fp4._rules import is_kept, keep, primals, refuse_perturbed


def matmul(lhs, rhs, *, preferred_element_type=None):
    """lhs [..., m, k] @ rhs [k, n] (or batched alike, [..., k, n]), accumulated in float32.

    Each operand is a QuantizedTensor blocked along k (lhs axis=-1, rhs axis=0) or an array. Of two quantized operands
    the exact products of codes and block scales are summed and the tensor scales multiply afterwards; a quantized
    operand beside an array is dequantized to the array's dtype. The result has `preferred_element_type`, by default
    the promoted dtype of the operands. dx = matmul(dy, w.mT), dw = matmul(x.mT, dy).

    XLA's dot multiplies; on Hopper a kernel that reads rhs packed does, where both operands are quantized, rhs is one
    matrix and not transformed, nothing is empty and no jax.vmap is around it. On Blackwell `jax.nn.scaled_matmul`
    multiplies two quantized operands under the last two conditions, inside no shard_map or one over the whole mesh,
    where k, rounded up to 16, is a multiple of 32 and n of 4: untested on that hardware, and jax.export wants its check
    of "__op$block_scaled_dot" disabled. `supported` says which is there.

    In a program that XLA partitions each device multiplies its parts: rows of lhs stay where they are. rhs is gathered,
    packed, along axes of the mesh that cut rows of lhs too, and sums over parts of k are added in float32.

    Raises ValueError where the contracted extents differ, an operand is blocked along another axis, a format is not
    known, or one operand alone is Hadamard-transformed. Not differentiable in quantized operands.
    """
    op = "matmul"
    for name, operand, axis in (("lhs", lhs, -1), ("rhs", rhs, 0)):
        check_operand(op, name, operand, axis)
        if isinstance(operand, QuantizedTensor) and operand.grouped:
            why = "each of its groups has scales of its own"
            raise ValueError(message(op, name, "grouped", "one tensor", why, "grouped_matmul"))
    if lhs.shape[-1] != rhs.shape[-2]:
        why = f"lhs {lhs.shape} is contracted along its last axis"
        fix = "operands whose contracted extents are equal (dw = matmul(x.mT, dy), dx = matmul(dy, w.mT))"
        raise ValueError(message(op, "rhs", f"of shape {rhs.shape}", f"{lhs.shape[-1]} rows", why, fix))
    if rhs.ndim > 2 and rhs.shape[:-2] != lhs.shape[:-2]:
        shown, needs = f"of shape {rhs.shape}", f"two axes or the leading axes {lhs.shape[:-2]}"
        raise ValueError(message(op, "rhs", shown, needs, "batches pair up", "jax.vmap"))
    return product(lhs, rhs, result_dtype(op, lhs, rhs, preferred_element_type))


def grouped_matmul(lhs, rhs, group_sizes, *, preferred_element_type=None):
    """The products of `jax.lax.ragged_dot`, of g groups of rows one after another, accumulated in float32.

    lhs [m, k], rhs [g, k, n] -> [m, n]: the rows of each group times its matrix. Rows beyond the sum are zero.
    lhs [k, m], rhs [m, n] -> [g, k, n]: the contraction of each group's rows. Zero for an empty group.
    With y = grouped_matmul(x, w, sizes): dx = grouped_matmul(dy, w.mT, sizes), dw = grouped_matmul(x.mT, dy, sizes).

    group_sizes: int32 [g], may be traced. A negative size counts as 0, sizes that sum to more than m are cut there;
    rows beyond the sum are not read: NaN there does not leak (but it has decided the amax of an operand that was
    quantized without these group_sizes).
    Each operand is an array or a QuantizedTensor blocked along the contracted axis: rows of lhs quantized alone or with
    these group_sizes, rhs [g, k, n] with batch_dims=1, and for the contraction both column-wise (axis=0) with these
    group_sizes. Of two quantized operands the exact products are summed and the scales of the group multiply
    afterwards; a quantized operand beside an array is dequantized to the array's dtype. The result has
    `preferred_element_type`, by default the promoted dtype of the operands.

    A loop of XLA's dot multiplies; on Hopper a kernel does, where both operands are quantized or the promoted dtype is
    bfloat16, nothing is empty, there are at most 1024 groups and XLA does not partition the program (inside shard_map
    it does not); `supported` says whether it is there. jax.vmap then calls it once for each entry.

    Differentiable in arrays, in reverse mode; the gradient's products round dy to the dtype of the forward's operands.
    Raises TypeError and ValueError for operands that do not fit each other.
    """
    op = "grouped_matmul"
    for name, operand, axis in (("lhs", lhs, -1), ("rhs", rhs, 0)):
        check_operand(op, name, operand, axis)
    if lhs.ndim != 2 or rhs.ndim not in (2, 3):
        shown, needs = f"of shapes {lhs.shape} and {rhs.shape}", "[m, k] and [g, k, n], or [k, m] and [m, n]"
        why, fix = "rows or their contraction are grouped", "x.reshape(-1, k)"
        raise ValueError(message(op, "lhs and rhs", shown, needs, why, fix))
    check_group_sizes(op, group_sizes, rhs.shape[0] if rhs.ndim == 3 else None)
    if lhs.shape[-1] != rhs.shape[-2]:
        why = f"lhs {lhs.shape} is contracted along its last axis"
        fix = "operands whose contracted extents are equal (dw: x.mT and dy, dx: dy and w.mT)"
        raise ValueError(message(op, "rhs", f"of shape {rhs.shape}", f"{lhs.shape[-1]} rows", why, fix))
    check_groups(op, lhs, rhs, group_sizes)
    out = result_dtype(op, lhs, rhs, preferred_element_type)
    return grouped_product(lhs, rhs, jnp.asarray(group_sizes), out)


@jax.named_scope("fp4.matmul")
def product(lhs, rhs, dtype, bias=None, *, weights: bool = True):
    """`matmul` without its checks, with a bias [n] added in float32 before the cast to `dtype`. A quantized operand
    beside an array may be blocked along either axis. weights: rhs may be weights, for which Hopper has a kernel; the
    operands of a weight gradient (`contraction`) are both decoded, and multiplied by XLA's dot.
    """
    check_transforms("matmul", lhs, rhs)
    if not isinstance(lhs, QuantizedTensor) and not isinstance(rhs, QuantizedTensor):
        return _product(lhs, rhs, bias, np.dtype(dtype))
    if isinstance(lhs, QuantizedTensor) and lhs.axis == 0 and not isinstance(rhs, QuantizedTensor):
        return _product(lhs, rhs, bias, np.dtype(dtype))
    return _split_product(lhs, rhs, bias, dtype=np.dtype(dtype), weights=weights)


@jax.named_scope("fp4.matmul")
def contraction(x, dy, dtype) -> Float[Array, "k n"]:
    """x^T dy, [k,n] = [k,*m] @ [*m,n], over all rows: the weight gradient. Each operand is an array [*m, k] or [*m, n]
    or a quantized one, two quantized ones blocked along the rows (axis=0)."""
    check_transforms("matmul", x, dy)
    arrays = not any(isinstance(a, QuantizedTensor) for a in (x, dy))
    if arrays and (x.ndim == 2 or not isinstance(x, Tracer)):  # XLA cuts a dot by itself, but not what flattens to one
        return _contracted(x, dy, np.dtype(dtype))
    return _split_contraction(x, dy, dtype=np.dtype(dtype))


# Jitted for eager calls, which find their compiled program; inline: in a traced one nothing is around it.
@partial(jax.jit, static_argnames=("dtype", "weights"), inline=True)
def _split_product(lhs, rhs, bias, dtype: np.dtype, weights: bool):
    multiply = partial(_product, weights=weights)
    whole = partial(multiply, dtype=dtype)
    return local(partitioned(whole, product_rule(lhs, rhs, bias, dtype, multiply)))(lhs, rhs, bias)


@partial(jax.jit, static_argnames="dtype", inline=True)
def _split_contraction(x, dy, dtype: np.dtype):
    whole = partial(_contracted, dtype=dtype)
    return local(partitioned(whole, contraction_rule(x, dy, dtype, _contracted)))(x, dy)


def _contracted(x, dy, dtype: np.dtype):
    return _product(_matrix(x).mT, _matrix(dy), None, dtype, weights=False)


def _matrix(x: Any) -> Any:
    """x [*m, k] as the matrix [m, k]. Column-wise it is one."""
    if not isinstance(x, QuantizedTensor):
        return x.reshape(-1, x.shape[-1]) if x.ndim != 2 else x
    if x.axis == 0 or x.codes.ndim == 2:
        return x.flattened
    rows = x.codes.size // x.codes.shape[-1] if x.codes.shape[-1] else 0
    by_row = ("codes",) if x.block is None else ("codes", "block_scale")
    flat = {name: getattr(x, name).reshape(rows, -1) for name in by_row}
    return dataclasses.replace(x, **flat, amax=x.amax.reshape(-1) if x.row_scaled else x.amax)


def _product(lhs, rhs, bias, dtype: np.dtype, weights: bool = True):
    """`product` on one device."""
    if _both_quantized(lhs, rhs):
        weights = weights and rhs.ndim == 2 and not rhs.hadamard
        extents = math.prod(lhs.shape[:-1]), rhs.shape[-1], lhs.shape[-1]
        if weights and _both_nvfp4(lhs, rhs) and _hopper.takes(1, *extents):
            # Under vmap a dot has batches, the kernel has none.
            return _hopper.chosen(_quantized_on_hopper, _quantized, dtype, lhs, rhs, bias, batched=False)
        return _quantized(lhs, rhs, bias, dtype)
    compute = lhs.dtype if isinstance(rhs, QuantizedTensor) else rhs.dtype
    a = dequantize(lhs, compute) if isinstance(lhs, QuantizedTensor) else lhs
    # In its stored orientation, so that no transpose of a weight is written.
    b = decode(rhs, compute) if isinstance(rhs, QuantizedTensor) else rhs
    contracts = -1 if isinstance(rhs, QuantizedTensor) and rhs.axis == 0 else -2
    acc = _dot(a, b, rhs.ndim - 2, contracts)
    return (acc if bias is None else acc + along_last(bias.astype(jnp.float32), acc.ndim)).astype(dtype)


def _quantized(lhs: QuantizedTensor, rhs: QuantizedTensor, bias, static: np.dtype):
    """In the dtype `static`: on Blackwell by its tensor cores, elsewhere by XLA's dot."""
    if _both_nvfp4(lhs, rhs) and _blackwell.takes(lhs, rhs):
        return _blackwell.chosen(_quantized_on_blackwell, _quantized_by_dot, static, lhs, rhs, bias)
    return _quantized_by_dot(lhs, rhs, bias, static)


def _quantized_by_dot(lhs: QuantizedTensor, rhs: QuantizedTensor, bias, static: np.dtype):
    # The padding is multiplied too: it is zero, or after a transform belongs to the data.
    form = common(lhs, rhs)
    acc = _dot(product_form(lhs, form), product_form(rhs, form), rhs.ndim - 2, -1, form.precision)
    return _with_tensor_factors(acc, lhs, rhs, bias, static)


def _quantized_on_blackwell(lhs: QuantizedTensor, rhs: QuantizedTensor, bias, static: np.dtype):
    return _with_tensor_factors(_blackwell.product(lhs, rhs), lhs, rhs, bias, static)


def _with_tensor_factors(acc, lhs: QuantizedTensor, rhs: QuantizedTensor, bias, dtype):
    column, row = tensor_factor(lhs), tensor_factor(rhs)
    return _epilogue(acc, column, jnp.swapaxes(row, -1, -2), dtype, bias)


def _quantized_on_hopper(lhs: QuantizedTensor, rhs: QuantizedTensor, bias, static: np.dtype):
    """The same as one group of rows."""
    m, n = math.prod(lhs.shape[:-1]), rhs.shape[1]
    bias = None if bias is None else bias.astype(jnp.float32)[None]
    y = _hopper.quantized_rows(lhs, rhs, bias, None, jnp.full(1, m, jnp.int32), static)
    return y.reshape(*lhs.shape[:-1], n)


def along_last(bias: Float[Array, " n"], ndim: int):
    """bias [1, ..., 1, n]: rank promotion may be forbidden."""
    return bias.reshape((1,) * (ndim - 1) + bias.shape)


@jax.named_scope("fp4.grouped_matmul")
def grouped_product(
    lhs,
    rhs,
    group_sizes,
    dtype,
    *,
    compute=None,
    bias=None,
    bias_weights=None,
    transposed: bool = False,
    parts: int = 1,
):
    """`grouped_matmul` without its checks. compute: what operands of a high-precision product are rounded to. A bias
    [g, n] is added in float32 before the cast to `dtype`, times the float32 weight [m] of each row if there are any.
    A quantized operand beside an array may be blocked along either axis. transposed: rhs is the transpose of an array
    in memory (dx = dy @ w.mT), which is then read as it lies; otherwise XLA writes the transpose of all experts.
    parts: of the contraction of rows, more than one give [parts, g, k/parts, n]: what a scatter of k sends, as it lies.
    """
    check_transforms("grouped_matmul", lhs, rhs)
    if compute is None:
        compute = jnp.promote_types(lhs.dtype, rhs.dtype)
        for operand, other in ((lhs, rhs), (rhs, lhs)):
            compute = operand.dtype if isinstance(other, QuantizedTensor) else compute
    bias_dtype = None if bias is None else bias.dtype
    static = _Static(jnp.dtype(dtype), jnp.dtype(compute), bias_dtype, rhs.ndim == 3, transposed, parts)
    lhs, rhs, bias, bias_weights, group_sizes = alike(lhs, rhs, bias, bias_weights, group_sizes)
    return _grouped(lhs, rhs, bias, bias_weights, group_sizes, static)


class _Static(NamedTuple):
    dtype: np.dtype
    compute: np.dtype
    bias_dtype: np.dtype | None
    rows: bool  # rows of lhs with matrices of the groups, else the contraction of rows
    transposed: bool
    parts: int = 1


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _grouped(lhs, rhs, bias, bias_weights, group_sizes, static: _Static):
    if static.rows:
        return _rows(lhs, rhs, bias, bias_weights, group_sizes, static)
    return _contraction(lhs, rhs, group_sizes, static)


def _grouped_fwd(lhs, rhs, bias, bias_weights, group_sizes, static: _Static):
    for q in (lhs, rhs):
        if isinstance(q, QuantizedTensor):
            refuse_perturbed("grouped_matmul", "a quantized operand", q)
    perturbed = [not isinstance(a, QuantizedTensor | None) and a.perturbed for a in (lhs, rhs, bias, bias_weights)]
    lhs, rhs, bias, bias_weights, group_sizes = primals((lhs, rhs, bias, bias_weights, group_sizes))
    y = _grouped(lhs, rhs, bias, bias_weights, group_sizes, static)
    kept = (
        keep(lhs if perturbed[1] else None, lambda: lhs),
        keep(rhs if perturbed[0] else None, lambda: rhs),
        keep(bias if perturbed[3] else None, lambda: bias),
        bias_weights,
        group_sizes,
        jnp.zeros(int(perturbed[2])),
    )
    return y, kept


def _grouped_bwd(static: _Static, residuals, dy):
    """dy is an operand of the products of the other kind; a quantized operand takes part with its values."""
    lhs, rhs, bias, bias_weights, group_sizes, wants_bias = residuals
    if isinstance(dy, SymbolicZero):
        return (None,) * 5
    if static.parts > 1:
        dy = jnp.moveaxis(dy, 0, 1).reshape(dy.shape[1], -1, dy.shape[-1])
        static = static._replace(parts=1)
    d_lhs = d_rhs = d_bias = d_weights = None
    to_lhs, to_rhs = (static._replace(dtype=jnp.dtype(a.dtype), bias_dtype=None) for a in (lhs, rhs))
    # Through _grouped: the loops themselves carry words, of which every derivative would silently be zero.
    if static.rows and is_kept(rhs):  # [m,k] = [m,n] @ [g,n,k]
        d_lhs = _grouped(dy, rhs.mT, None, None, group_sizes, to_lhs._replace(transposed=not static.transposed))
    if static.rows and is_kept(lhs):  # [g,k,n] = [k,m] @ [m,n]
        d_rhs = _grouped(lhs.mT, dy, None, None, group_sizes, to_rhs._replace(rows=False, transposed=False))
    if not static.rows and is_kept(rhs):  # [m,k] = [m,n] @ [g,n,k]
        d_lhs = jnp.matrix_transpose(_grouped(rhs, dy.mT, None, None, group_sizes, to_lhs._replace(rows=True)))
    if not static.rows and is_kept(lhs):  # [m,n] = [m,k] @ [g,k,n]
        d_rhs = _grouped(lhs.mT, dy, None, None, group_sizes, to_rhs._replace(rows=True))
    if wants_bias.size:
        weighted = dy if bias_weights is None else dy.astype(jnp.float32) * bias_weights[:, None]
        d_bias = sum_of_groups(weighted, group_sizes).astype(static.bias_dtype)
    if bias_weights is not None and is_kept(bias):
        d_weights = dots_with_groups(dy, bias, group_sizes).astype(bias_weights.dtype)
    return d_lhs, d_rhs, d_bias, d_weights, None


_grouped.defvjp(_grouped_fwd, _grouped_bwd, symbolic_zeros=True)


@jax.named_scope("bgrad")
def sum_of_groups(x: Float[Array, "*m n"], group_sizes) -> Float[Array, "g n"] | Float[Array, " n"]:
    """The float32 sum of the rows of each group, or of all rows, which then may have any number of dimensions. No
    product with zeros and ones: one group's NaN is not another's."""
    if group_sizes is None:
        return _sum(x) if x.ndim == 2 else partitioned(_sum, sum_rule(x, _sum))(x)

    def sums(x, group_sizes):
        group, groups = _groups.group_of_rows(group_sizes, x.shape[0]), group_sizes.shape[0]
        sums = jnp.zeros((groups, x.shape[1]), jnp.float32)
        return sums.at[group].add(x.astype(jnp.float32), mode="drop", indices_are_sorted=True)

    return local(sums)(x, group_sizes)


def _sum(x: Any) -> Any:
    """[n] of x [*m, n]."""
    return jnp.sum(x.reshape(-1, x.shape[-1]), 0, dtype=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def of_rows(values: Float[Array, "g n"], group_sizes, m: int) -> Any:
    """Each row's own of the values of the groups, [m, n], zeros in the tail."""
    return _groups.of_group(values, _groups.group_of_rows(group_sizes, m), 0)


def _of_rows_fwd(values, group_sizes, m: int):
    return of_rows(values, group_sizes, m), (group_sizes, jnp.zeros(0, values.dtype))


def _of_rows_bwd(m: int, kept, rows):
    group_sizes, like = kept
    return sum_of_groups(rows, group_sizes).astype(like.dtype), None


of_rows.defvjp(_of_rows_fwd, _of_rows_bwd)


def dots_with_groups(x: Float[Array, "m n"], bias: Float[Array, "g n"], group_sizes) -> Float[Array, " m"]:
    """Each row's float32 dot product with its group's row of `bias`, 0 in the tail."""
    group, groups = _groups.group_of_rows(group_sizes, x.shape[0]), group_sizes.shape[0]
    dots = jnp.sum(x.astype(jnp.float32) * _groups.of_group(bias.astype(jnp.float32), group, 0), axis=-1)
    return jnp.where(group < groups, dots, 0)


# --- groups: on Hopper one call, elsewhere a loop of XLA's dots ---


def _rows(lhs, rhs, bias, bias_weights, group_sizes, static: _Static):
    """[m,n] = [m,k] @ [g,k,n] for each group."""
    operands = lhs, rhs, bias, bias_weights, group_sizes
    if _has_kernel(lhs, rhs, group_sizes, static):
        return _hopper.chosen(_rows_on_hopper, _rows_by_loops, static, *operands)
    return local(partial(_rows_by_loops, static=static))(*operands)


def _contraction(lhs, rhs, group_sizes, static: _Static):
    """[g,k,n] = [k,m] @ [m,n] over the rows of each group."""
    if _has_kernel(lhs, rhs, group_sizes, static) and not is_symbolic_dim(lhs.shape[-1]):  # of which it must be told
        return _hopper.chosen(_contraction_on_hopper, _contraction_by_loops, static, lhs, rhs, group_sizes)
    return local(partial(_contraction_by_loops, static=static))(lhs, rhs, group_sizes)


def _has_kernel(lhs, rhs, group_sizes, static: _Static) -> bool:
    """Tensor cores multiply bfloat16, in which the codes of two quantized operands are exact."""
    quantized = _both_quantized(lhs, rhs)
    exact = is_exact(lhs) and is_exact(rhs) if quantized else static.compute == jnp.bfloat16
    return exact and _hopper.takes(group_sizes.shape[0], *lhs.shape, rhs.shape[-1])


def _both_quantized(lhs, rhs) -> bool:
    return isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor)


def _both_nvfp4(lhs: QuantizedTensor, rhs: QuantizedTensor) -> bool:
    return lhs.format == rhs.format == "nvfp4"


def _rows_on_hopper(lhs, rhs, bias, bias_weights, group_sizes, static: _Static):
    bias = None if bias is None else bias.astype(jnp.float32)
    weights = None if bias_weights is None else bias_weights.astype(jnp.float32)
    if _both_quantized(lhs, rhs):
        if _both_nvfp4(lhs, rhs):
            return _hopper.quantized_rows(lhs, rhs, bias, weights, group_sizes, static.dtype)
        return _forms_on_hopper(lhs, rhs, bias, weights, group_sizes, static)
    if isinstance(rhs, QuantizedTensor):  # in its stored orientation
        w, transposed = decode(rhs, static.compute), rhs.axis == 0
    else:
        w, transposed = (rhs.mT if static.transposed else rhs).astype(static.compute), static.transposed
    x = _values(lhs, static.compute)
    return _hopper.rows(x, w, bias, weights, group_sizes, static.dtype, transposed=transposed)


def _forms_on_hopper(lhs, rhs, bias, weights, group_sizes, static: _Static):
    """Of formats whose weights no kernel decodes: both sides as bfloat16. The kernel multiplies, XLA scales."""
    form = common(lhs, rhs)
    a, b = product_form(lhs, form), product_form(rhs, form)
    scaled = has_factor(lhs) or has_factor(rhs)
    dtype, of_sum = (jnp.float32, None) if scaled else (static.dtype, bias)
    y = _hopper.rows(a, b, of_sum, None if scaled else weights, group_sizes, dtype, transposed=True)
    if not scaled:
        return y
    group = _groups.group_of_rows(group_sizes, y.shape[0])
    row = tensor_factor(rhs)[..., 0]
    row = _groups.of_group(jnp.broadcast_to(row, (group_sizes.shape[0], row.shape[1])), group, 0)
    if bias is not None:
        bias = _groups.of_group(bias, group, 0)
        bias = bias if weights is None else weights[:, None] * bias
    return _epilogue(y, tensor_factor(lhs), row, static.dtype, bias)


def _contraction_on_hopper(lhs, rhs, group_sizes, static: _Static):
    if not _both_quantized(lhs, rhs):
        a, b = _values(lhs, static.compute).mT, _values(rhs, static.compute)
        return _hopper.contraction(a, b, group_sizes, static.dtype, static.parts)
    form = common(lhs, rhs)
    a, b, column, row = product_form(lhs, form), product_form(rhs, form), tensor_factor(lhs), tensor_factor(rhs)
    if block_length(lhs) == 1:  # row by row: no group begins at a block of its own
        return _hopper.contraction(a.mT, b.mT, group_sizes, static.dtype, static.parts, column, row)
    m, sizes = lhs.shape[-1], group_sizes
    if not _both_nvfp4(lhs, rhs):  # groups of whole blocks, for the kernel sizes like others
        m, where = a.shape[-1], columns(lhs)
        sizes = where.ends - where.starts
    return _hopper.quantized_contraction(a, b, column, row, sizes, m, static.dtype, static.parts)


# Jitted, so that eager calls find their compiled loops; inline: in a traced program there is no call around them.
@partial(jax.jit, static_argnames="static", inline=True)
def _rows_by_loops(lhs, rhs, bias, bias_weights, group_sizes, static: _Static):
    out = jax.ShapeDtypeStruct((lhs.shape[0], rhs.shape[-1]), static.dtype)
    both = _both_quantized(lhs, rhs)
    column = row = form = None
    if both:
        form = common(lhs, rhs)
        a = product_form(lhs, form)
        column = jnp.broadcast_to(tensor_factor(lhs), (out.shape[0], 1))
        row = jnp.swapaxes(tensor_factor(rhs), -1, -2)
        row = jnp.broadcast_to(row, (group_sizes.shape[0], 1, row.shape[-1]))
    else:
        a = _values(lhs, static.compute)
    of_rows = column, None if bias_weights is None else bias_weights[:, None]
    contracted = 0
    if static.transposed and not isinstance(rhs, QuantizedTensor):
        rhs, contracted = rhs.mT, 1  # of a transpose: XLA cancels the two
    of_groups = rhs, row, None if bias is None else bias.astype(jnp.float32)[:, None]

    def weight(group):
        w = group[0]
        if not isinstance(w, QuantizedTensor):
            return w.astype(static.compute), contracted
        if form is not None:
            return product_form(w, form), 1  # stored [n, k]
        return decode(w, static.compute), 1 if w.axis == 0 else 0

    def finish(acc, rows, group):
        (column, weights), (_, row, bias) = rows, group
        with jax.numpy_rank_promotion("allow"):
            bias = bias if weights is None else weights * bias
            if both:
                return reference.epilogue(acc, column, row, static.dtype, bias)
            return (acc if bias is None else acc + bias).astype(static.dtype)

    precision = None if form is None else form.precision
    return _ragged.rows(a, of_rows, of_groups, group_sizes, out, weight, finish, precision)


@partial(jax.jit, static_argnames="static", inline=True)
def _contraction_by_loops(lhs, rhs, group_sizes, static: _Static):
    return _hopper.rows_in_parts(_contracted_by_loops(lhs, rhs, group_sizes, static), static.parts)


def _contracted_by_loops(lhs, rhs, group_sizes, static: _Static):
    groups, m = group_sizes.shape[0], lhs.shape[-1]
    out = jax.ShapeDtypeStruct((groups, lhs.shape[0], rhs.shape[-1]), static.dtype)
    if _both_quantized(lhs, rhs):
        form = common(lhs, rhs)
        a, b = product_form(lhs, form), product_form(rhs, form)
        column, row = (
            jnp.broadcast_to(factor, (groups, *factor.shape[1:])) for factor in (tensor_factor(lhs), tensor_factor(rhs))
        )
        factors = column, jnp.swapaxes(row, -1, -2)

        def finish(acc, group):
            column, row = group
            return _epilogue(acc, column, row, static.dtype, None)

        return _ragged.contraction(a, b, columns(lhs), factors, out, finish, rows_last=True, precision=form.precision)
    a, b = _values(lhs, static.compute).mT, _values(rhs, static.compute)
    where = _groups.bounds(group_sizes, m)
    return _ragged.contraction(a, b, where, None, out, lambda acc, _: acc.astype(static.dtype))


def _values(operand, dtype):
    return dequantize(operand, dtype) if isinstance(operand, QuantizedTensor) else operand.astype(dtype)


def _epilogue(acc, column, row, dtype, bias):
    with jax.numpy_rank_promotion("allow"):
        return reference.epilogue(acc, column, row, dtype, bias)


def _dot(a, b, batch: int, rhs_contracts: int, precision=None):
    contract, batches = ((a.ndim - 1,), (b.ndim + rhs_contracts,)), (tuple(range(batch)), tuple(range(batch)))
    return lax.dot_general(a, b, (contract, batches), precision, preferred_element_type=jnp.float32)
