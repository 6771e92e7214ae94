"""grouped_dense: `dense` for groups of rows, each with a kernel of its own."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_fp4 import _record
from jax_fp4._arguments import check_group_sizes, float_dtype, key_words
from jax_fp4._choosing import chosen_by, resolve
from jax_fp4._dense import (
    Settings,
    check_bias,
    check_kernel,
    check_padding,
    check_x,
    cut_by_mesh,
    frozen_format,
    over_mesh_or_here,
)
from jax_fp4._placement import LOCAL, Specs, WeightGather, place
from jax_fp4._recipe import RecipeChoice
from jax_fp4.delayed import State, check_state, is_used_again


@jax.named_scope("fp4.grouped_dense")
def grouped_dense(
    x: Any,
    kernel: Any,
    group_sizes: Any,
    bias: Any = None,
    *,
    recipe: RecipeChoice | None = None,
    key=None,
    state: State | None = None,
    gather: WeightGather | None = None,
    specs: Specs | None = None,
    preferred_element_type=None,
) -> Float[Array, "*b n"]:
    """y = x w + b for each group: x [..., k], kernel [g, k, n], bias [g, n] -> y [..., n] in x's dtype.

    The leading axes of x are flattened to m rows. group_sizes: int32 [g], may be traced; the rows of the groups lie
    one after another. A negative size counts as 0, sizes that sum to more than m are cut there. Rows of x beyond the
    sum are not read, and zero in y and dx; the gradients of a group without rows are zero.
    kernel: an array or, frozen, a QuantizedTensor blocked along k (`quantize(w, axis=0, batch_dims=1)`) or the pair
    `quantize_transpose(w, batch_dims=1)`.
    state: of DelayedScaling, from `jax_fp4.delayed.init(recipe, (g,))`, as in `dense`.
    gather, specs: as in `dense`; specs.kernel cuts the groups in its first entry, specs.x the rows of these groups.
        group_sizes are those of the local rows and groups.
    recipe, key, preferred_element_type, the three products, what is kept for them and the dtypes of gradients: as in
    `dense`; every group is quantized as if alone, with amaxes of its own. Without a recipe this is a product in x's
    dtype, differentiable, whose work does not grow with g. Raises TypeError, ValueError or UnsupportedError for what is
    not described here.
    """
    op = "grouped_dense"
    chosen = resolve(op, recipe)
    check_x(op, x)
    vector, x = x.ndim == 1, jnp.asarray(x)
    x = x[None] if vector else x
    cuts = cut_by_mesh(op, x, kernel, gather, specs)
    placement = LOCAL if cuts else place(op, x.ndim, kernel, 3, gather, specs)
    g, k, n = shape = check_kernel(op, "kernel", kernel, f"x {x.shape}", x.shape[-1], True, placement)
    check_bias(op, "bias", bias, shape)
    check_group_sizes(op, group_sizes, g)
    reason, frozen = chosen_by(op, recipe), frozen_format(kernel)
    event = _record.LayerEvent(_record.path(), op, x.shape, shape, chosen, reason, frozen=frozen)
    check_state(op, chosen, state, (g,))
    check_padding(op, chosen, k, n)
    y_dtype = x.dtype
    if preferred_element_type is not None:
        y_dtype = float_dtype(op, "preferred_element_type", preferred_element_type, "y is written in it")
    operands = x, kernel, bias, None if key is None else key_words(op, key), jnp.asarray(group_sizes), state
    settings = Settings(op, chosen, jnp.dtype(y_dtype), is_used_again(state), event)
    y = over_mesh_or_here(operands, settings, placement, cuts)
    return y[0] if vector else y
