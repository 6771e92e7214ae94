"""layernorm_dense: a norm and the product after it. Two rules, of the norm and of `dense`: what one keeps, the other
does not, so one rule around both would save nothing."""

from typing import Any

import jax
from jaxtyping import Array, Float

from jax_fp4._dense import dense_as
from jax_fp4._norm import normalize
from jax_fp4._placement import Specs, WeightGather
from jax_fp4._recipe import RecipeChoice
from jax_fp4.delayed import State


@jax.named_scope("fp4.layernorm_dense")
def layernorm_dense(
    x: Any,
    scale: Any,
    norm_bias: Any,
    kernel: Any,
    bias: Any = None,
    *,
    norm: str = "layernorm",
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    recipe: RecipeChoice | None = None,
    key=None,
    state: State | None = None,
    gather: WeightGather | None = None,
    specs: Specs | None = None,
    preferred_element_type=None,
) -> Float[Array, "*b n"]:
    """y = norm(x) w + b: x [..., k], scale [k], norm_bias [k] or None, kernel [k, n], bias [n] -> y [..., n].

    norm: "layernorm", or "rmsnorm" (norm_bias=None). Statistics are float32, with Flax's formulas; zero_centered_scale:
    1 + scale multiplies, so that scale may start at, and decay to, 0. The normalized output has x's dtype.
    The rest: as in `dense`, whose operand the normalized output is. specs.x may not cut the last axis of x, which is
    normalized.

    Kept for the backward: of the product what `dense` keeps in each mode (the normalized output column-wise in default,
    in x's dtype in unquant, row-wise in dequant); of the norm x and two float32 numbers a row (rmsnorm: one). Gradients
    have the dtype of their primal. Raises TypeError, ValueError or UnsupportedError for what is not described here.
    """
    op = "layernorm_dense"
    normed = normalize(
        op, x, scale, norm_bias, norm=norm, epsilon=epsilon, zero_centered_scale=zero_centered_scale, specs=specs
    )
    return dense_as(op, normed, kernel, bias, recipe, key, state, preferred_element_type, gather, specs)
