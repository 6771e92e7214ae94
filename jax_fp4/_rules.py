"""What the custom_vjp rules of this package share: symbolic zeros, and residuals of one tree whatever is needed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jax_fp4 import _record
from jax_fp4._array import QuantizedTensor
from jax_fp4._errors import UnsupportedError, message
from jax_fp4.checkpoint_policies import QUANTIZED


def is_primal(leaf) -> bool:
    """Whether it is a leaf as a forward rule with symbolic zeros gets it: a value, and whether it is perturbed."""
    return hasattr(leaf, "perturbed")


def is_perturbed(tree: Any) -> bool:
    """In a forward rule: whether any leaf is differentiated."""
    return any(leaf.perturbed for leaf in jax.tree.leaves(tree, is_leaf=is_primal))


def primals(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.value, tree, is_leaf=is_primal)


def refuse_perturbed(op: str, argument: str, quantized: Any) -> None:
    """In a forward rule: a quantized operand is a constant."""
    leaves = jax.tree.leaves(quantized, is_leaf=is_primal)
    if any(leaf.perturbed and jnp.issubdtype(leaf.value.dtype, jnp.floating) for leaf in leaves):
        why = "packed codes carry no gradient: what is quantized is frozen"
        fix = "the high-precision array, or jax.lax.stop_gradient of the quantized one"
        raise UnsupportedError(
            message(op, argument, "a QuantizedTensor that is differentiated", "a constant", why, fix)
        )


def keep(part: Any, shape_of: Callable[[], Any]) -> Any:
    """`part`, or where it is None the tree that shape_of() would give, of empty arrays. JAX keeps one residual tree for
    each traced function, so a tree that varied with what is differentiated would give silent wrong gradients."""
    if part is not None:
        return part
    with _record.paused():
        return jax.tree.map(_empty, jax.eval_shape(shape_of))


def named(q: QuantizedTensor) -> QuantizedTensor:
    """What was quantized, under the name by which policies of jax.checkpoint keep it: 8-bit floats as bytes, which it
    does not round (see `_modes._as_bytes`)."""

    def leaf(a):
        if a.dtype.itemsize > 1:
            return checkpoint_name(a, QUANTIZED)
        return lax.bitcast_convert_type(checkpoint_name(lax.bitcast_convert_type(a, jnp.uint8), QUANTIZED), a.dtype)

    codes, block_scale, amax = jax.tree.map(leaf, (q.codes, q.block_scale, q.amax))
    return dataclasses.replace(q, codes=codes, block_scale=block_scale, amax=amax)


def named_order(*indices: Any) -> tuple[Any, ...]:
    """The integers that packed rows are ordered by, under the name of the rows: a policy keeps both or neither. Logits
    that are computed again may differ in a last bit, and then choose other experts than the rows that were kept."""
    return tuple(checkpoint_name(each, QUANTIZED) for each in indices)


def _empty(leaf) -> Any:
    # 8-bit floats from bytes: E8M0 has no zero, and of none of them jax_debug_nans would still complain.
    small = jnp.zeros(0, jnp.uint8 if leaf.dtype.itemsize == 1 else leaf.dtype)
    return jax.lax.bitcast_convert_type(small, leaf.dtype) if leaf.dtype.itemsize == 1 else small


def is_kept(part: Any) -> bool:
    return jax.tree.leaves(part)[0].shape != (0,)
