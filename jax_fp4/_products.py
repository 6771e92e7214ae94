"""matmul and grouped_matmul: products of quantized and high-precision operands, accumulated in float32."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from jax_fp4 import _groups, _ragged, reference
from jax_fp4._arguments import check_float, check_group_sizes, check_quantized, float_dtype
from jax_fp4._array import QuantizedTensor
from jax_fp4._errors import message
from jax_fp4._formats import BLOCK, PACK
from jax_fp4._ops import amax_of_rows, decode, dequantize
from jax_fp4._rules import is_kept, keep, primals, refuse_perturbed


def matmul(lhs, rhs, *, preferred_element_type=None):
    """lhs [..., m, k] @ rhs [k, n] (or batched alike, [..., k, n]), accumulated in float32.

    Each operand is a QuantizedTensor blocked along k (lhs axis=-1, rhs axis=0) or an array. Of two quantized operands
    the exact products of codes and block scales are summed and the tensor scales multiply afterwards; a quantized
    operand beside an array is dequantized to the array's dtype. The result has `preferred_element_type`, by default
    the promoted dtype of the operands. dx = matmul(dy, w.mT), dw = matmul(x.mT, dy).

    Raises ValueError where the contracted extents differ, an operand is blocked along another axis, a format is not
    known, or one operand alone is Hadamard-transformed. Not differentiable in quantized operands.
    """
    op = "matmul"
    for name, operand, axis in (("lhs", lhs, -1), ("rhs", rhs, 0)):
        _check_operand(op, name, operand, axis)
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
    return product(lhs, rhs, _result_dtype(op, lhs, rhs, preferred_element_type))


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

    Differentiable in arrays, in reverse mode; the gradient's products round dy to the dtype of the forward's operands.
    Raises TypeError and ValueError for operands that do not fit each other.
    """
    op = "grouped_matmul"
    for name, operand, axis in (("lhs", lhs, -1), ("rhs", rhs, 0)):
        _check_operand(op, name, operand, axis)
    if lhs.ndim != 2 or rhs.ndim not in (2, 3):
        shown, needs = f"of shapes {lhs.shape} and {rhs.shape}", "[m, k] and [g, k, n], or [k, m] and [m, n]"
        why, fix = "rows or their contraction are grouped", "x.reshape(-1, k)"
        raise ValueError(message(op, "lhs and rhs", shown, needs, why, fix))
    check_group_sizes(op, group_sizes, rhs.shape[0] if rhs.ndim == 3 else None)
    if lhs.shape[-1] != rhs.shape[-2]:
        why = f"lhs {lhs.shape} is contracted along its last axis"
        fix = "operands whose contracted extents are equal (dw: x.mT and dy, dx: dy and w.mT)"
        raise ValueError(message(op, "rhs", f"of shape {rhs.shape}", f"{lhs.shape[-1]} rows", why, fix))
    _check_groups(op, lhs, rhs, group_sizes)
    out = _result_dtype(op, lhs, rhs, preferred_element_type)
    return grouped_product(lhs, rhs, jnp.asarray(group_sizes), out)


def product(lhs, rhs, dtype, bias=None):
    """`matmul` without its checks, with a bias [n] added in float32 before the cast to `dtype`. A quantized operand
    beside an array may be blocked along either axis."""
    _check_transforms("matmul", lhs, rhs)
    batch = rhs.ndim - 2
    if isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor):
        # val x scale has at most 6 significant bits: exact in bfloat16, and a product of two is exact in float32. The
        # padding is multiplied too: it is zero, or after a transform belongs to the data.
        length = PACK * lhs.codes.shape[-1]
        a, b = (decode(q, jnp.bfloat16, length, product_form=True) for q in (lhs, rhs))
        column, row = (reference.tensor_factor(q.amax, q.codes.ndim, q.bound) for q in (lhs, rhs))
        acc = _dot(a, b, batch, rhs_contracts=-1)
        return _epilogue(acc, column, jnp.swapaxes(row, -1, -2), dtype, bias)
    compute = lhs.dtype if isinstance(rhs, QuantizedTensor) else rhs.dtype
    a = dequantize(lhs, compute) if isinstance(lhs, QuantizedTensor) else lhs
    # In its stored orientation, so that no transpose of a weight is written.
    b = decode(rhs, compute, rhs.extent) if isinstance(rhs, QuantizedTensor) else rhs
    acc = _dot(a, b, batch, rhs_contracts=-1 if isinstance(rhs, QuantizedTensor) and rhs.axis == 0 else -2)
    return (acc if bias is None else acc + along_last(bias.astype(jnp.float32), acc.ndim)).astype(dtype)


def along_last(bias: Float[Array, " n"], ndim: int):
    """bias [1, ..., 1, n]: rank promotion may be forbidden."""
    return bias.reshape((1,) * (ndim - 1) + bias.shape)


def grouped_product(
    lhs, rhs, group_sizes, dtype, *, compute=None, bias=None, bias_weights=None, transposed: bool = False
):
    """`grouped_matmul` without its checks. compute: what operands of a high-precision product are rounded to. A bias
    [g, n] is added in float32 before the cast to `dtype`, times the float32 weight [m] of each row if there are any.
    A quantized operand beside an array may be blocked along either axis. transposed: rhs is the transpose of an array
    in memory (dx = dy @ w.mT), which is then read as it lies; otherwise XLA writes the transpose of all experts."""
    _check_transforms("grouped_matmul", lhs, rhs)
    if compute is None:
        compute = jnp.promote_types(lhs.dtype, rhs.dtype)
        for operand, other in ((lhs, rhs), (rhs, lhs)):
            compute = operand.dtype if isinstance(other, QuantizedTensor) else compute
    bias_dtype = None if bias is None else bias.dtype
    static = _Static(jnp.dtype(dtype), jnp.dtype(compute), bias_dtype, rhs.ndim == 3, transposed)
    return _grouped(lhs, rhs, bias, bias_weights, group_sizes, static)


class _Static(NamedTuple):
    dtype: np.dtype
    compute: np.dtype
    bias_dtype: np.dtype | None
    rows: bool  # rows of lhs with matrices of the groups, else the contraction of rows
    transposed: bool


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


def sum_of_groups(x: Float[Array, "m n"], group_sizes) -> Float[Array, "g n"]:
    """The float32 sum of the rows of each group. No product with zeros and ones: one group's NaN is not another's."""
    group, groups = _groups.group_of_rows(group_sizes, x.shape[0]), group_sizes.shape[0]
    sums = jnp.zeros((groups, x.shape[1]), jnp.float32)
    return sums.at[group].add(x.astype(jnp.float32), mode="drop", indices_are_sorted=True)


def dots_with_groups(x: Float[Array, "m n"], bias: Float[Array, "g n"], group_sizes) -> Float[Array, " m"]:
    """Each row's float32 dot product with its group's row of `bias`, 0 in the tail."""
    group, groups = _groups.group_of_rows(group_sizes, x.shape[0]), group_sizes.shape[0]
    dots = jnp.sum(x.astype(jnp.float32) * _groups.of_group(bias.astype(jnp.float32), group, 0), axis=-1)
    return jnp.where(group < groups, dots, 0)


def _rows(lhs, rhs, bias, bias_weights, group_sizes, static: _Static):
    """[m,n] = [m,k] @ [g,k,n] for each group."""
    out = jax.ShapeDtypeStruct((lhs.shape[0], rhs.shape[-1]), static.dtype)
    both = isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor)
    column = row = None
    if both:
        a = decode(lhs, jnp.bfloat16, PACK * lhs.codes.shape[-1], product_form=True)
        column = reference.tensor_factor(amax_of_rows(lhs), 2, lhs.bound)
        column = jnp.broadcast_to(column, (out.shape[0], 1))
        row = jnp.swapaxes(reference.tensor_factor(rhs.amax, rhs.codes.ndim, rhs.bound), -1, -2)
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
        if both:
            return decode(w, jnp.bfloat16, PACK * w.codes.shape[-1], product_form=True), 1  # stored [n, k]
        return decode(w, static.compute, w.extent), 1 if w.axis == 0 else 0

    def finish(acc, rows, group):
        (column, weights), (_, row, bias) = rows, group
        with jax.numpy_rank_promotion("allow"):
            bias = bias if weights is None else weights * bias
            if both:
                return reference.epilogue(acc, column, row, static.dtype, bias)
            return (acc if bias is None else acc + bias).astype(static.dtype)

    return _ragged.rows(a, of_rows, of_groups, group_sizes, out, weight, finish)


def _contraction(lhs, rhs, group_sizes, static: _Static):
    """[g,k,n] = [k,m] @ [m,n] over the rows of each group."""
    groups, m = group_sizes.shape[0], lhs.shape[-1]
    out = jax.ShapeDtypeStruct((groups, lhs.shape[0], rhs.shape[-1]), static.dtype)
    if isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor):
        a, b = (decode(q, jnp.bfloat16, PACK * q.codes.shape[-1], product_form=True) for q in (lhs, rhs))
        # Each group's columns, with the padding of its last block: zero, or after a transform part of the data.
        layout = _groups.columns(group_sizes, m)
        columns = _groups.Bounds(BLOCK * layout.first_block, BLOCK * (layout.first_block + layout.blocks))
        column, row = (reference.tensor_factor(q.amax, 3, q.bound) for q in (lhs, rhs))
        factors = column, jnp.swapaxes(row, -1, -2)

        def finish(acc, group):
            column, row = group
            return _epilogue(acc, column, row, static.dtype, None)

        return _ragged.contraction(a, b, columns, factors, out, finish, rows_last=True)
    a, b = _values(lhs, static.compute).mT, _values(rhs, static.compute)
    where = _groups.bounds(group_sizes, m)
    return _ragged.contraction(a, b, where, None, out, lambda acc, _: acc.astype(static.dtype))


def _values(operand, dtype):
    return dequantize(operand, dtype) if isinstance(operand, QuantizedTensor) else operand.astype(dtype)


def _epilogue(acc, column, row, dtype, bias):
    with jax.numpy_rank_promotion("allow"):
        return reference.epilogue(acc, column, row, dtype, bias)


def _dot(a, b, batch: int, rhs_contracts: int):
    contract, batches = ((a.ndim - 1,), (b.ndim + rhs_contracts,)), (tuple(range(batch)), tuple(range(batch)))
    return lax.dot_general(a, b, (contract, batches), preferred_element_type=jnp.float32)


# --- checks ---


def _result_dtype(op: str, lhs, rhs, preferred) -> np.dtype:
    if preferred is None:
        return jnp.promote_types(lhs.dtype, rhs.dtype)
    return float_dtype(op, "preferred_element_type", preferred, "a float32 sum is rounded to it")


def _check_operand(op: str, name: str, operand: Any, axis: int) -> None:
    """An operand of a product: an array, or quantized along the contracted axis."""
    if not isinstance(operand, QuantizedTensor):
        check_float(op, name, operand)
    else:
        check_quantized(op, name, operand)
        if operand.axis != axis:
            why = "both operands are blocked along the contracted dimension"
            fix = f"{name}.mT, or quantize(x, axis={axis})"
            raise ValueError(message(op, name, f"blocked along axis {operand.axis}", f"axis={axis}", why, fix))
    if operand.ndim < 2:
        shown, fix = f"of shape {operand.shape}", "x[None, :]"
        raise ValueError(message(op, name, shown, "at least two axes", "it is a matrix product", fix))


def _check_transforms(op: str, lhs, rhs) -> None:
    transformed = [isinstance(operand, QuantizedTensor) and operand.hadamard for operand in (lhs, rhs)]
    if transformed[0] != transformed[1]:
        shown = f"{transformed[0]} of lhs and {transformed[1]} of rhs"
        why = "the transform cancels only between two transformed operands"
        raise ValueError(
            message(op, "hadamard", shown, "both or neither", why, "quantize both with the same hadamard=")
        )


def _check_groups(op: str, lhs, rhs, group_sizes) -> None:
    """Quantized operands are grouped as their place in the product needs, and with the same sizes."""
    rows = rhs.ndim == 3
    for name, q in (("lhs", lhs), ("rhs", rhs)):
        if not isinstance(q, QuantizedTensor):
            continue
        if rows and name == "rhs":
            if q.amax.shape[:1] != q.shape[:1] or q.grouped:
                why = "each group has a matrix of its own"
                shown, fix = repr(q), "quantize(w, axis=0, batch_dims=1)"
                raise ValueError(message(op, name, shown, "an amax for each group", why, fix))
        elif (rows and q.grouped == "blocks") or (not rows and q.grouped != "blocks"):
            needs = "groups along its rows, or none" if rows else "groups along its blocks"
            why = "blocks run along the contracted axis" if rows else "the contracted rows of a group fill whole blocks"
            fix = f"quantize(x, axis={-1 if rows else 0}, group_sizes=group_sizes)"
            raise ValueError(message(op, name, repr(q), needs, why, fix))
        elif q.grouped:
            _check_same_sizes(op, name, q.group_sizes, group_sizes)


def _on_host(a) -> bool:
    """Whether a's values can be read without waiting for an accelerator."""
    return isinstance(a, np.ndarray) or (
        not isinstance(a, Tracer) and all(device.platform == "cpu" for device in a.devices())
    )


def _check_same_sizes(op: str, name: str, own, given) -> None:
    """The sizes that an operand was quantized with are those of the product; values, where they are known."""
    known = own is not given and all(_on_host(sizes) for sizes in (own, given))
    if own.shape != given.shape or (known and not np.array_equal(np.asarray(own), np.asarray(given))):
        shown = f"{given} beside {name}.group_sizes {own}" if known else f"of shape {given.shape}"
        why = f"{name} was quantized in these groups"
        raise ValueError(message(op, "group_sizes", shown, "the sizes of the operand", why, f"{name}.group_sizes"))
