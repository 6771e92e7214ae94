"""layernorm_mlp: a norm, and around both products after it the rule of `grouped_mlp`, without groups."""

from typing import Any

import jax
from jaxtyping import Array, Float

from jax_fp4._activations import Activation
from jax_fp4._grouped_mlp import Gathers, PairOfSpecs, States, mlp_as
from jax_fp4._norm import normalize
from jax_fp4._recipe import RecipeChoice


@jax.named_scope("fp4.layernorm_mlp")
def layernorm_mlp(
    x: Any,
    scale: Any,
    norm_bias: Any,
    w_in: Any,
    w_out: Any,
    *,
    b_in: Any = None,
    b_out: Any = None,
    activation: str | Activation = "swiglu",
    norm: str = "layernorm",
    epsilon: float = 1e-6,
    zero_centered_scale: bool = False,
    recipe: RecipeChoice | None = None,
    out_recipe: RecipeChoice | None = None,
    key=None,
    state: States | None = None,
    gather: Gathers = None,
    specs: PairOfSpecs = None,
) -> Float[Array, "*b n"]:
    """y = act(norm(x) W_in + b_in) W_out + b_out: x [..., k] -> y [..., n] in x's dtype.

    scale, norm_bias, norm, epsilon, zero_centered_scale: as in `layernorm_dense`.
    w_in: [k, 2f] for a gated activation, gate columns first, else [k, f]. w_out: [f, n]. b_in [2f] or [f], b_out [n].
    Kernels may be frozen, as in `dense`.
    activation: a name or an Activation with its constants; computed in float32.
    recipe: of the first product and, unless out_recipe is given, of the second: None takes autocast's, HIGH_PRECISION
        none. The two may have different backward modes.
    key: the JAX key of stochastic rounding; the products use fold_in(key, 0) and fold_in(key, 1).
    state: of DelayedScaling, a pair for the two products (None for one with another recipe), as in `dense`.
    gather, specs: a pair for the two products, as in `grouped_mlp`.

    Kept for the backward: what `layernorm_dense` keeps for norm and first product; norm(x) W_in + b_in in x's dtype;
    the second input packed in `default` (column-wise) and `dequant` (row-wise), and in `unquant` nothing: it is made
    again. Gradients have the dtype of their primal. Raises TypeError, ValueError or UnsupportedError for what is not
    described here.
    """
    op = "layernorm_mlp"
    normed = normalize(
        op,
        x,
        scale,
        norm_bias,
        norm=norm,
        epsilon=epsilon,
        zero_centered_scale=zero_centered_scale,
        specs=specs[0] if isinstance(specs, tuple) and specs else None,
    )
    return mlp_as(
        op,
        normed,
        w_in,
        w_out,
        None,
        grouped=False,
        b_in=b_in,
        b_out=b_out,
        activation=activation,
        recipe=recipe,
        out_recipe=out_recipe,
        key=key,
        state=state,
        gather=gather,
        specs=specs,
    )
