"""moe: a layer of experts without a framework: route, group, grouped_mlp, combine."""

from typing import Any

import jax
from jaxtyping import Array, Float

from jax_fp4._activations import Activation
from jax_fp4._arguments import check_float
from jax_fp4._choosing import resolve
from jax_fp4._dense import check_kernel, check_x
from jax_fp4._errors import message
from jax_fp4._grouped_mlp import States, grouped_mlp, recipe_of_second
from jax_fp4._recipe import Recipe, RecipeChoice, check_recipe, draws
from jax_fp4._routing import Routing, combine_tokens, group_tokens, group_weights, route


def drawing_recipe(op: str, recipe: RecipeChoice | None, out_recipe: RecipeChoice | None) -> Recipe | None:
    """Of the recipes in force for the two products, one that needs a key; None if none does."""
    in_force = resolve(op, recipe), resolve(op, recipe_of_second(recipe, out_recipe))
    return next((chosen for chosen in in_force if chosen is not None and draws(chosen)), None)


def moe(
    x: Any,
    logits: Any,
    w_in: Any,
    w_out: Any,
    *,
    top_k: int,
    b_in: Any = None,
    b_out: Any = None,
    activation: str | Activation = "swiglu",
    recipe: RecipeChoice | None = None,
    out_recipe: RecipeChoice | None = None,
    key=None,
    state: States | None = None,
    **routing: Any,
) -> tuple[Float[Array, "*b n"], Routing]:
    """Every token through top_k of g experts, dropless: x [..., d], router logits [..., g] -> (y [..., n], Routing).

    w_in [g, d, 2f] ([g, d, f] where the activation has no gate), w_out [g, f, n], biases, activation, recipes, key and
    state: as in `grouped_mlp`. routing: options of `route` (score, normalize, expert_groups, top_expert_groups, bias,
    scale).

    The weights of the experts multiply the second input (`probs` of grouped_mlp), so that nothing as large as its
    output is kept for their gradient. y has x's dtype. Add `routing.aux_loss`, times a small factor, to the loss.
    Raises TypeError, ValueError or UnsupportedError as the four functions do.
    """
    op = "moe"
    check_recipe(op, recipe)
    check_recipe(op, out_recipe, "out_recipe")
    check_x(op, x)
    g, *_ = shape = check_kernel(op, "w_in", w_in, f"x {x.shape}", x.shape[-1], grouped=True)
    check_float(op, "logits", logits)
    if logits.shape != (*x.shape[:-1], g):
        why = f"each token of x {x.shape} has one for each expert of w_in {shape}"
        needs, fix = f"{(*x.shape[:-1], g)}", "logits = x @ router [d, g]"
        raise ValueError(message(op, "logits", f"of shape {logits.shape}", needs, why, fix))
    chosen = route(logits, top_k, **routing)
    rows, group_sizes, order = group_tokens(x, chosen.experts, g)
    y = grouped_mlp(
        rows,
        w_in,
        w_out,
        group_sizes,
        b_in=b_in,
        b_out=b_out,
        activation=activation,
        probs=group_weights(chosen.weights, order),
        recipe=recipe,
        out_recipe=out_recipe,
        key=key,
        state=state,
    )
    y = combine_tokens(y, order, top_k=top_k)
    return y.reshape(*x.shape[:-1], y.shape[-1]), chosen


# --- what the layers of linen and nnx share ---

# Each expert's matrix is drawn as a dense layer's would be: the leading axis is no part of the fan-in.
expert_init = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", in_axis=-2, out_axis=-1, batch_axis=0
)


def layer_moe(layer: Any, x, logits, w_in, w_out, b_in, b_out, key, state, selection_bias):
    """`moe` with the settings of a layer."""
    names = ("top_k", "activation", "recipe", "out_recipe")
    routing = ("score", "normalize", "expert_groups", "top_expert_groups", "scale")
    settings = {name: getattr(layer, name) for name in (*names, *routing)}
    return moe(x, logits, w_in, w_out, b_in=b_in, b_out=b_out, key=key, state=state, bias=selection_bias, **settings)
