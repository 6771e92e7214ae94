"""DotGeneral: dense over any axes, in the shape of jax.lax.dot_general; and what the Flax layers of both APIs share."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jax_fp4 import _record
from jax_fp4._arguments import check_float
from jax_fp4._choosing import chosen_by, resolve
from jax_fp4._dense import dense
from jax_fp4._errors import UnsupportedError, message
from jax_fp4._meshes import constrained
from jax_fp4._recipe import Recipe, RecipeChoice, check_recipe
from jax_fp4.delayed import State

Axes = Sequence[int]
DimensionNumbers = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]  # ((lhs, rhs) contracted, (lhs, rhs) batch)


@no_type_check  # a wrong recipe is for check_recipe to refuse, in the tests too
@dataclass(frozen=True, eq=False)
class DotGeneral:
    """A callable with the signature of `jax.lax.dot_general`, quantized: lhs holds activations, rhs the weight.

    recipe: None takes autocast's, HIGH_PRECISION none. Without a recipe the call is `jax.lax.dot_general`, bit for bit.
    state: of DelayedScaling, for one call, as in `dense`; it counts as the key does where two are compared.
    key: the JAX key of stochastic rounding. One key gives the same draws at every call: make a DotGeneral for each step
        (`jax.random.fold_in(key, step)`), or use `jax_fp4.linen.DotGeneral`, which draws from a stream.

    Contracted axes are blocked in the order in which dimension_numbers names them; each batch entry has amaxes of its
    own. lhs and rhs of two dtypes promote as in `jax.lax.dot_general`; preferred_element_type is the result's dtype,
    rounded once from the float32 sum. `precision` says nothing about a quantized product, whose operands are exact and
    whose sum is float32: it is accepted and counts where nothing is quantized. out_sharding says where the result goes.
    Raises TypeError for operands that are not float32, bfloat16 or float16, and what `dense` raises.

    Two are equal, and hash alike, when their recipes are equal and their keys are the same object: usable as a static
    argument and as a field of a Flax module.
    """

    recipe: RecipeChoice | None = None
    key: Any = None
    state: Any = None

    def __post_init__(self):
        check_recipe("DotGeneral", self.recipe)

    def __eq__(self, other):
        same = isinstance(other, DotGeneral) and self.recipe == other.recipe
        return same and self.key is other.key and self.state is other.state

    def __hash__(self):
        return hash((self.recipe, id(self.key)))  # arrays have no hash

    def __call__(
        self,
        lhs,
        rhs,
        dimension_numbers: DimensionNumbers,
        precision=None,
        preferred_element_type=None,
        *,
        out_sharding=None,
    ):
        op = "DotGeneral"
        recipe = resolve(op, self.recipe)
        if recipe is None:
            reason = chosen_by(op, self.recipe)
            _record.record(_record.LayerEvent(_record.path(), "dense", jnp.shape(lhs), jnp.shape(rhs), None, reason))
            return lax.dot_general(
                lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
            )
        for name, operand in (("lhs", lhs), ("rhs", rhs)):
            check_float(op, name, operand)
        lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
        compute = jax.eval_shape(partial(lax.dot_general, dimension_numbers=dimension_numbers), lhs, rhs).dtype
        y = contract(
            lhs.astype(compute),
            rhs,
            None,
            dimension_numbers,
            recipe=self.recipe,
            key=self.key,
            state=self.state,
            preferred_element_type=preferred_element_type,
        )
        return constrained(y, out_sharding)


def contract(
    x,
    kernel,
    bias,
    dimension_numbers: DimensionNumbers,
    *,
    recipe: RecipeChoice | None,
    key=None,
    state: State | None = None,
    preferred_element_type=None,
) -> Float[Array, "..."]:
    """`dense` over any axes: x and kernel as `lax.dot_general` takes them, bias [*batch, *out] or None.

    Returns y [*batch, *rows, *out], computed in x's dtype. Raises lax.dot_general's own errors where axes do not fit.
    """
    (x_in, kernel_in), (x_batch, kernel_batch) = dimension_numbers
    # Also the check of every axis: below they are flattened, [2, 3] against [3, 2] would go unnoticed.
    y = jax.eval_shape(
        partial(lax.dot_general, dimension_numbers=dimension_numbers),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(kernel.shape, x.dtype),
    )
    rows, out = _others(x.ndim, x_in, x_batch), _others(kernel.ndim, kernel_in, kernel_batch)
    k, n = math.prod(kernel.shape[axis] for axis in kernel_in), math.prod(kernel.shape[axis] for axis in out)
    batch = (math.prod(x.shape[axis] for axis in x_batch),) if x_batch else ()
    x = x.transpose(*x_batch, *rows, *x_in).reshape(*batch, *(x.shape[axis] for axis in rows), k)
    kernel = kernel.transpose(*kernel_batch, *kernel_in, *out).reshape(*batch, k, n)
    bias = None if bias is None else bias.reshape(*batch, n)
    product = partial(dense, recipe=recipe, key=key, state=state, preferred_element_type=preferred_element_type)
    if batch:  # one call of each handler, with an amax for each entry
        if state is not None:
            why, fix = "a state is of one product, these are one for each batch entry", "Float8CurrentScaling()"
            raise UnsupportedError(message("dense", "batch_dims", batch, "none under DelayedScaling", why, fix))
        product = jax.vmap(product)
    return product(x, kernel, bias).reshape(y.shape)


def _others(ndim: int, *taken: Axes) -> list[int]:
    return [axis for axis in range(ndim) if not any(axis in axes for axes in taken)]


# --- what the layers of linen and nnx share. `layer` is a Flax layer, perhaps with a `recipe` ---


def check_layer(layer, recipe: object, **products) -> None:
    """What can be refused when a layer is made: what is no recipe, and a recipe beside a product of the user's own."""
    op = type(layer).__name__
    check_recipe(op, recipe)
    own = own_product(**products)
    if isinstance(recipe, Recipe) and own:
        _refuse_own_product(op, own, "a recipe")


def own_product(dot_general=None, dot_general_cls=None) -> str:
    """The name of the argument by which the user gave the layer a product of their own, or ""."""
    if dot_general_cls is not None:
        return "dot_general_cls"
    return "dot_general" if dot_general not in (None, lax.dot_general) else ""


def layer_recipe(layer, x_shape: tuple[int, ...], kernel_shape: tuple[int, ...]) -> Recipe | None:
    """The recipe in force for a call of the layer. None, recorded for the report: the call is Flax's own."""
    op, given = type(layer).__name__, own_recipe(layer)
    recipe = resolve(op, given)
    own = own_product(layer.dot_general, getattr(layer, "dot_general_cls", None))
    if recipe is not None and own:
        # Ignoring the user's product would be as silent as ignoring the recipe.
        _refuse_own_product(op, own, "a recipe in force (autocast)")
    if recipe is None:
        reason = f"the layer's own {own} computes it" if own else chosen_by(op, given)
        _record.record(_record.LayerEvent(_record.path(), "dense", x_shape, kernel_shape, None, reason))
    return recipe


def own_recipe(layer) -> RecipeChoice | None:
    """What the layer was given. Flax's own layers have no recipe."""
    return getattr(layer, "recipe", None)


def layer_product(layer, operands, promoted, default_promote, axis: Axes, batch_axis: Axes, **how):
    """y of a Flax layer: `operands` (x, kernel, bias) as they are, `promoted` what layer.promote_dtype made of them.

    x takes part in the compute dtype, kernel and bias in their own: master weights are rounded on the way, their
    gradients are not. A promote_dtype of the user's own has the last word on all three.
    """
    _, kernel, bias = operands
    x = promoted[0]
    if layer.promote_dtype is not default_promote:
        x, kernel, bias = promoted
        x = x.astype(jnp.promote_types(x.dtype, kernel.dtype))
    out = getattr(layer, "preferred_element_type", None)  # nnx only
    if out is not None and bias is not None:
        out = jnp.promote_types(out, x.dtype)  # as Flax, which adds a bias of the compute dtype
    how |= dict(recipe=own_recipe(layer), preferred_element_type=out)
    return contract(x, kernel, bias, _dimension_numbers(x.ndim, axis, batch_axis), **how)


def _dimension_numbers(ndim: int, axis: Axes, batch_axis: Axes) -> DimensionNumbers:
    """For a kernel [*batch, *in, *out]. Flax contracts the axes of x in increasing order, however they are given."""
    contracted, batch = increasing(axis, ndim), increasing(batch_axis, ndim)
    first = len(batch)
    return (contracted, tuple(range(first, first + len(contracted)))), (batch, tuple(range(first)))


def increasing(axes: Axes, ndim: int) -> tuple[int, ...]:
    """The axes of an array of ndim dimensions counted from its first, in order."""
    return tuple(sorted(axis if axis >= 0 else ndim + axis for axis in axes))


def _refuse_own_product(op: str, argument: str, beside: str) -> None:
    raise ValueError(
        message(
            op,
            argument,
            f"given beside {beside}",
            "one of the two",
            "both say how to multiply",
            f"the layer without {argument}, or recipe=HIGH_PRECISION to keep it",
        )
    )
