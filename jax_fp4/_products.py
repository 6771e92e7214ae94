"""matmul and grouped_matmul: products of quantized and high-precision operands, accumulated in float32."""

from functools import partial
from typing import Any

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
from jax_fp4._errors import UnsupportedError, message
from jax_fp4._formats import BLOCK, PACK
from jax_fp4._ops import decode, dequantize


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
    rows of lhs beyond the sum are not read (NaN there does not leak).
    Each operand is an array or a QuantizedTensor blocked along the contracted axis: rows of lhs quantized alone or with
    these group_sizes, rhs [g, k, n] with batch_dims=1, and for the contraction both column-wise (axis=0) with these
    group_sizes. Of two quantized operands the exact products are summed and the scales of the group multiply
    afterwards; a quantized operand beside an array is dequantized to the array's dtype. The result has
    `preferred_element_type`, by default the promoted dtype of the operands.

    Differentiable in arrays. Raises TypeError and ValueError for operands that do not fit each other.
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
    """`matmul` without its checks, with a bias [n] added in float32 before the cast to `dtype`."""
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
    acc = _dot(a, b, batch, rhs_contracts=-1 if isinstance(rhs, QuantizedTensor) else -2)
    return (acc if bias is None else acc + along_last(bias.astype(jnp.float32), acc.ndim)).astype(dtype)


def along_last(bias: Float[Array, " n"], ndim: int):
    """bias [1, ..., 1, n]: rank promotion may be forbidden."""
    return bias.reshape((1,) * (ndim - 1) + bias.shape)


def grouped_product(lhs, rhs, group_sizes, dtype, bias=None):
    """`grouped_matmul` without its checks, with a bias [g, n] added in float32 before the cast to `dtype`."""
    _check_transforms("grouped_matmul", lhs, rhs)
    return _grouped(lhs, rhs, bias, group_sizes, jnp.dtype(dtype))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _grouped(lhs, rhs, bias, group_sizes, dtype):
    return _rows(lhs, rhs, bias, group_sizes, dtype) if rhs.ndim == 3 else _contraction(lhs, rhs, group_sizes, dtype)


def _grouped_fwd(lhs, rhs, bias, group_sizes, dtype):
    for q in (lhs, rhs):
        if isinstance(q, QuantizedTensor):
            refuse_perturbed("grouped_matmul", "a quantized operand", q)
    primals = jax.tree.map(lambda leaf: leaf.value, (lhs, rhs, bias, group_sizes), is_leaf=is_primal)
    return _grouped(*primals, dtype), primals


def _grouped_bwd(dtype, residuals, dy):
    """dy is one of two arrays in products of the other kind; a quantized operand takes part with its values."""
    lhs, rhs, bias, group_sizes = residuals
    if isinstance(dy, SymbolicZero):
        return None, None, None, None
    arrays = [not isinstance(q, QuantizedTensor) for q in (lhs, rhs)]
    d_lhs = d_rhs = d_bias = None
    if rhs.ndim == 3:
        if arrays[0]:  # [m,k] = [m,n] @ [g,n,k]
            other = rhs.mT if arrays[1] else dequantize(rhs, lhs.dtype).mT
            d_lhs = _rows(dy.astype(lhs.dtype), other, None, group_sizes, lhs.dtype)
        if arrays[1]:  # [g,k,n] = [k,m] @ [m,n]
            d_rhs = _contraction(_values(lhs, rhs.dtype).mT, dy.astype(rhs.dtype), group_sizes, rhs.dtype)
        if bias is not None:
            d_bias = sum_of_groups(dy, group_sizes).astype(bias.dtype)
    else:
        if arrays[0]:  # [m,k] = [m,n] @ [g,n,k]
            d_lhs = _rows(_values(rhs, lhs.dtype), dy.astype(lhs.dtype).mT, None, group_sizes, lhs.dtype).mT
        if arrays[1]:  # [m,n] = [m,k] @ [g,k,n]
            d_rhs = _rows(_values(lhs, rhs.dtype).mT, dy.astype(rhs.dtype), None, group_sizes, rhs.dtype)
    return d_lhs, d_rhs, d_bias, None


_grouped.defvjp(_grouped_fwd, _grouped_bwd, symbolic_zeros=True)


def sum_of_groups(x: Float[Array, "m n"], group_sizes) -> Float[Array, "g n"]:
    """The float32 sum of the rows of each group."""
    groups = group_sizes.shape[0]
    group = _groups.group_of(_groups.bounds(group_sizes, x.shape[0]).ends, x.shape[0])
    sums = jnp.zeros((groups + 1, x.shape[1]), jnp.float32).at[group].add(x.astype(jnp.float32))
    return sums[:groups]


def _rows(lhs, rhs, bias, group_sizes, dtype):
    """[m,n] = [m,k] @ [g,k,n] for each group."""
    out = jax.ShapeDtypeStruct((lhs.shape[0], rhs.shape[-1]), dtype)
    both = isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor)
    compute = jnp.bfloat16 if both else lhs.dtype if isinstance(rhs, QuantizedTensor) else rhs.dtype
    column = row = None
    if both:
        a = decode(lhs, jnp.bfloat16, PACK * lhs.codes.shape[-1], product_form=True)
        column = reference.tensor_factor(_amax_of_rows(lhs), 2, lhs.bound)
        row = jnp.swapaxes(reference.tensor_factor(rhs.amax, rhs.codes.ndim, rhs.bound), -1, -2)
    else:
        a = _values(lhs, compute)
    of_groups = rhs, row, None if bias is None else bias.astype(jnp.float32)
    if both and column.shape[0] == 1:
        column = jnp.broadcast_to(column, (out.shape[0], 1))

    def weight(group):
        w = group[0]
        if not isinstance(w, QuantizedTensor):
            return w.astype(compute), 0
        return decode(w, compute, a.shape[-1], product_form=both), 1  # stored [n, k]

    def finish(acc, column, group):
        _, row, bias = group
        if row is not None:
            return _epilogue(acc, column, row, dtype, bias)
        return (acc if bias is None else acc + bias[None]).astype(dtype)

    return _ragged.rows(a, column, of_groups, group_sizes, out, weight, finish)


def _contraction(lhs, rhs, group_sizes, dtype):
    """[g,k,n] = [k,m] @ [m,n] over the rows of each group."""
    groups, m = group_sizes.shape[0], lhs.shape[-1]
    out = jax.ShapeDtypeStruct((groups, lhs.shape[0], rhs.shape[-1]), dtype)
    if isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor):
        a, b = (decode(q, jnp.bfloat16, PACK * q.codes.shape[-1], product_form=True) for q in (lhs, rhs))
        # Each group's columns, with the padding of its last block: zero, or after a transform part of the data.
        layout, where = _groups.columns(group_sizes, m), _groups.bounds(group_sizes, m)
        first, blocks = layout.first_block, (where.ends - where.starts + (BLOCK - 1)) // BLOCK
        columns = _groups.Bounds(BLOCK * first, BLOCK * (first + blocks))
        column, row = (reference.tensor_factor(q.amax, 3, q.bound) for q in (lhs, rhs))
        factors = column, jnp.swapaxes(row, -1, -2)
        finish = lambda acc, group: _epilogue(acc, *group, dtype, None)  # noqa: E731
        return _ragged.contraction(a, b, columns, factors, out, finish, rows_last=True)
    compute = lhs.dtype if isinstance(rhs, QuantizedTensor) else rhs.dtype
    a, b = _values(lhs, compute).astype(compute).mT, _values(rhs, compute)
    where = _groups.bounds(group_sizes, m)
    return _ragged.contraction(a, b, where, None, out, lambda acc, _: acc.astype(dtype))


def _values(operand, dtype):
    return dequantize(operand, dtype) if isinstance(operand, QuantizedTensor) else operand


def _amax_of_rows(q: QuantizedTensor):
    """The amax of each row of a row-wise tensor, or the one of all."""
    if q.grouped and not q.row_scaled:
        m = q.codes.shape[0]
        return _groups.of_group(q.amax, _groups.group_of(_groups.bounds(q.group_sizes, m).ends, m), 0)
    return q.amax


def _epilogue(acc, column, row, dtype, bias):
    with jax.numpy_rank_promotion("allow"):
        return reference.epilogue(acc, column, row, dtype, bias)


def _dot(a, b, batch: int, rhs_contracts: int):
    contract, batches = ((a.ndim - 1,), (b.ndim + rhs_contracts,)), (tuple(range(batch)), tuple(range(batch)))
    return lax.dot_general(a, b, (contract, batches), preferred_element_type=jnp.float32)


def is_primal(leaf) -> bool:
    """Whether it is a leaf as a forward rule with symbolic zeros gets it."""
    return hasattr(leaf, "perturbed")


def refuse_perturbed(op: str, argument: str, quantized) -> None:
    """In a forward rule: a quantized operand is a constant."""
    leaves = jax.tree.leaves(quantized, is_leaf=is_primal)
    if any(leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.floating) for leaf in leaves):
        why = "packed codes carry no gradient: what is quantized is frozen"
        fix = "the high-precision array, or jax.lax.stop_gradient of the quantized one"
        raise UnsupportedError(
            message(op, argument, "a QuantizedTensor that is differentiated", "a constant", why, fix)
        )


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


def _check_same_sizes(op: str, name: str, own, given) -> None:
    """The sizes that an operand was quantized with are those of the product; values, where they are known."""
    known = own is not given and not isinstance(own, Tracer) and not isinstance(given, Tracer)
    if own.shape != given.shape or (known and not np.array_equal(np.asarray(own), np.asarray(given))):
        shown = f"{given} beside {name}.group_sizes {own}" if known else f"of shape {given.shape}"
        why = f"{name} was quantized in these groups"
        raise ValueError(message(op, "group_sizes", shown, "the sizes of the operand", why, f"{name}.group_sizes"))
