"""The operands of products: what may be multiplied by what, checked."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_fp4._arguments import check_float, check_quantized, float_dtype
from jax_fp4._array import QuantizedTensor, block_length
from jax_fp4._errors import message


def result_dtype(op: str, lhs, rhs, preferred) -> np.dtype:
    if preferred is None:
        return jnp.promote_types(lhs.dtype, rhs.dtype)
    return float_dtype(op, "preferred_element_type", preferred, "a float32 sum is rounded to it")


def check_operand(op: str, name: str, operand: Any, axis: int) -> None:
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


def check_transforms(op: str, lhs, rhs) -> None:
    transformed = [isinstance(operand, QuantizedTensor) and operand.hadamard for operand in (lhs, rhs)]
    if transformed[0] != transformed[1]:
        shown = f"{transformed[0]} of lhs and {transformed[1]} of rhs"
        why = "the transform cancels only between two transformed operands"
        raise ValueError(
            message(op, "hadamard", shown, "both or neither", why, "quantize both with the same hadamard=")
        )


def check_groups(op: str, lhs, rhs, group_sizes) -> None:
    """Quantized operands are grouped as their place in the product needs, and with the same sizes."""
    rows = rhs.ndim == 3
    for name, q in (("lhs", lhs), ("rhs", rhs)):
        if not isinstance(q, QuantizedTensor):
            continue
        if rows and name == "rhs":
            scale = q.amax if q.format == "nvfp4" else q.block_scale
            if scale.shape[:1] != q.shape[:1] or q.grouped:
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
    if not rows and isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor):
        of_lhs, of_rhs = block_length(lhs), block_length(rhs)
        if of_lhs != of_rhs:
            why = f"each group begins at a block of its own, in lhs ({lhs.format}) at blocks of {of_lhs}"
            shown = f"{rhs.format}, in blocks of {of_rhs} rows"
            raise ValueError(message(op, "rhs", shown, f"blocks of {of_lhs}", why, "two operands of one format"))


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
