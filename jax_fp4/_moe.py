"""moe: a layer of experts without a framework: route, group, grouped_mlp, combine."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jax_fp4 import _modes
from jax_fp4._activations import Activation, activation_of
from jax_fp4._arguments import check_float
from jax_fp4._choosing import resolve
from jax_fp4._dense import check_kernel, check_x, spec_of_bias
from jax_fp4._errors import UnsupportedError, message
from jax_fp4._exchange import exchange_tokens, exchange_weights, return_tokens
from jax_fp4._grouped_mlp import Gathers, PairOfSpecs, States, halves_of, mlp_as, one_run, plan_mlp, recipe_of_second
from jax_fp4._meshes import brought, cut, over_mesh, spec_of
from jax_fp4._modes import is_frozen
from jax_fp4._placement import Axes, Part, Placement, Specs, WeightGather, alike, axes_and_size, by_dimension, size_of
from jax_fp4._recipe import Recipe, RecipeChoice, check_recipe, draws
from jax_fp4._routing import Routing, combine_tokens, group_tokens, group_weights, route

MoESpecs = tuple[Specs, Specs] | None


def drawing_recipe(op: str, recipe: RecipeChoice | None, out_recipe: RecipeChoice | None) -> Recipe | None:
    """Of the recipes in force for the two products, one that needs a key; None if none does."""
    in_force = resolve(op, recipe), resolve(op, recipe_of_second(recipe, out_recipe))
    return next((chosen for chosen in in_force if chosen is not None and draws(chosen)), None)


@jax.named_scope("fp4.moe")
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
    expert_axis: Any = None,
    gather: Gathers = None,
    specs: MoESpecs = None,
    **routing: Any,
) -> tuple[Float[Array, "*b n"], Routing]:
    """Every token through top_k of g experts, dropless: x [..., d], router logits [..., g] -> (y [..., n], Routing).

    w_in [g, d, 2f] ([g, d, f] where the activation has no gate), w_out [g, f, n], biases, activation, recipes, key and
    state: as in `grouped_mlp`. routing: options of `route` (score, normalize, expert_groups, top_expert_groups, bias,
    scale).

    The weights of the experts multiply the second input (`probs` of grouped_mlp), so that nothing as large as its
    output is kept for their gradient. y has x's dtype. Add `routing.aux_loss`, times a small factor, to the loss.

    On a mesh, at the level of jit: types say how x, w_in and w_out are cut where axes are Explicit, specs where they
    are Auto: (Specs(x=of the tokens, kernel=of w_in), Specs(kernel=of w_out)). An axis that cuts the experts makes
    tokens travel to their experts' devices and back (expert parallel); one that cuts tokens and another dimension of a
    kernel makes this be gathered, packed (FSDP); one that cuts the hidden units is tensor parallel. Everything is then
    as on one device, but for column-wise blocks of experts whose rows lie on several (docs/numerics.md, section 5), and
    for draws of stochastic rounding unless tokens are cut along their first dimension, last by the axes of the experts:
    they are numbered in the order in which an expert's rows arrive.

    expert_axis: inside jax.shard_map, the mesh axis (or a tuple of several) of p devices over which the experts are
        split. x and logits are then those of this device's tokens, logits over all g experts; w_in, w_out, biases and
        state are those of its own g/p experts, the i-th device's from i g/p on. Rows travel to their experts and back
        (`exchange_tokens`); none is dropped. y and the routing are those of the local tokens. With specs, as above,
        aux_loss and amaxes are those of all tokens, without those of this device's (and its experts' rows). gather: a
        pair for the two kernels, as in `grouped_mlp`. A gradient taken inside shard_map is that of the sum of the
        devices' losses.

    Raises TypeError, ValueError or UnsupportedError as the four functions do.
    """
    op = "moe"
    check_recipe(op, recipe)
    check_recipe(op, out_recipe, "out_recipe")
    check_x(op, x)
    settings: dict[str, Any] = dict(
        top_k=top_k, activation=activation, recipe=recipe, out_recipe=out_recipe, routing=routing
    )
    operands = x, logits, w_in, w_out, b_in, b_out, key, state, routing.pop("bias", None)
    cuts = _cut_by_mesh(op, x, w_in, w_out, specs)
    if cuts is None:
        where = _Where(op, expert_axis, gather, _specs_of_rows(op, x, specs, expert_axis, gather))
        return _moe(*operands, **settings, where=where, tokens=_axes_of_tokens(specs))
    for name, given in (("expert_axis", expert_axis), ("gather", gather)):
        if given is not None:
            why, fix = "outside of shard_map the arrays' own sharding says it", f"{name}=None"
            raise ValueError(message(op, name, repr(given), "a shard_map around the call", why, fix))
    return _over_mesh(operands, settings, cuts)


class _Where(NamedTuple):
    """Over which axis the experts are split, and how the operands of the experts' products lie: as a user says, or as
    it was planned."""

    op: str
    expert_axis: Any = None
    gather: Gathers = None
    specs: PairOfSpecs = None
    placements: tuple[Placement, Placement] | None = None


def _moe(
    x, logits, w_in, w_out, b_in, b_out, key, state, bias, *, top_k: int, activation, recipe, out_recipe, routing: dict,
    where: _Where, tokens: Axes,
) -> tuple[Any, Routing]:  # fmt: skip
    """Of what one device has: tokens, cut by the axes `tokens`, and experts."""
    g = _check_logits(where, x, logits, w_in)
    x, logits = alike(x, logits)
    chosen = route(logits, top_k, bias=bias, axis_name=tokens or None, **routing)
    if where.expert_axis is None:
        rows, group_sizes, order = group_tokens(x, chosen.experts, g)
        probs, back = group_weights(chosen.weights, order), partial(combine_tokens, order=order)
    else:
        rows, group_sizes, exchange = exchange_tokens(x, chosen.experts, g, where.expert_axis)
        probs, back = exchange_weights(chosen.weights, exchange), partial(return_tokens, exchange=exchange)
    y = jax.named_scope("fp4.grouped_mlp")(mlp_as)(
        "grouped_mlp",
        rows,
        w_in,
        w_out,
        group_sizes,
        grouped=True,
        b_in=b_in,
        b_out=b_out,
        activation=activation,
        probs=probs,
        recipe=recipe,
        out_recipe=out_recipe,
        key=key,
        state=state,
        gather=where.gather,
        specs=where.specs,
        placements=where.placements,
    )
    y = back(y, top_k=top_k)
    return y.reshape(*x.shape[:-1], y.shape[-1]), chosen


# --- meshes ---


def _axes_of_tokens(specs: MoESpecs) -> Axes:
    if specs is None:
        return ()
    dims = by_dimension(specs[0].x)
    return tuple(axis for axes in dims for axis in axes)


def _check_specs(op: str, specs: MoESpecs) -> None:
    pair = isinstance(specs, tuple) and len(specs) == 2 and all(isinstance(one, Specs) for one in specs)
    if specs is not None and not pair:
        why, fix = "there are two kernels", "(Specs(x=of the tokens, kernel=of w_in), Specs(kernel=of w_out))"
        raise TypeError(message(op, "specs", f"a {type(specs).__name__}", "a pair of Specs", why, fix))


def _less(axes: Axes, gather: Any, dim: int) -> Axes:
    """Without those along which that dimension is gathered."""
    gathers = isinstance(gather, WeightGather) and gather.dim % 3 == dim
    return axes[: -len(gather.axes)] if gathers else axes


def _specs_of_rows(op: str, x, specs: MoESpecs, expert_axis, gather: Gathers) -> PairOfSpecs:
    """Of the experts' products, whose rows have travelled along the expert axis."""
    if specs is None:
        return None
    part = Part.of(op, "specs[0].x", specs[0].x, x.ndim)
    if part.dims[-1]:
        why, fix = "experts multiply whole rows", "x with all its columns on each device"
        raise ValueError(message(op, "specs[0].x", f"cut by {part.dims[-1]} along d", "whole rows", why, fix))
    experts = () if expert_axis is None else axes_and_size(op, "expert_axis", expert_axis)[0]
    for i, name in enumerate(("w_in", "w_out")):
        gathered = gather[i] if gather is not None else None
        dims = (*by_dimension(specs[i].kernel), (), (), ())
        of_groups = _less(dims[0], gathered, 0)
        if of_groups != experts:
            shown, why = f"cut by {of_groups} along the experts of {name}", f"expert_axis is {expert_axis!r}"
            raise ValueError(
                message(op, f"specs[{i}].kernel", shown, f"{experts}", why, "the PartitionSpec of the shard")
            )
    rows = tuple(axis for axis in _axes_of_tokens(specs) if axis not in experts) or None
    hidden = _less((*by_dimension(specs[0].kernel), (), (), ())[2], None if gather is None else gather[0], 2) or None
    first = Specs(x=PartitionSpec(rows, None), kernel=specs[0].kernel)
    return first, Specs(x=PartitionSpec(rows, hidden), kernel=specs[1].kernel)


def _cut_by_mesh(op: str, x, w_in, w_out, specs: MoESpecs) -> dict[str, Any] | None:
    """How tokens and kernels are cut at the level of jit; None where they are not, or inside the user's shard_map."""
    _check_specs(op, specs)
    given = None if specs is None else {"x": specs[0].x, "w_in": specs[0].kernel, "w_out": specs[1].kernel}
    operands = {"x": x, "w_in": w_in, "w_out": w_out}
    if any(is_frozen(kernel) for kernel in (w_in, w_out)):
        tokens = {"x": x}
        if hasattr(x, "ndim") and cut(op, tokens, None if given is None else {"x": given["x"]}):
            shown, why = "frozen, and tokens are cut", "frozen experts do not lie on a mesh in this version"
            fix = "arrays, or jax.shard_map around the call, with the experts of each device"
            raise UnsupportedError(message(op, "w_in or w_out", shown, "arrays", why, fix))
        return None
    return cut(op, operands, given) if all(hasattr(a, "ndim") for a in operands.values()) else None


def _over_mesh(operands: tuple, settings: dict, cuts) -> tuple[Any, Routing]:
    """`_moe` over the mesh: tokens travel along the axes of the experts, which cut them too."""
    x, logits, w_in, w_out, b_in, b_out, key, state, bias = operands
    *lead, _ = cuts["x"]
    mesh = jax.sharding.get_abstract_mesh()
    experts = cuts["w_in"][0]
    tokens = {axis for axes in lead for axis in axes}
    if missing := tuple(axis for axis in experts if axis not in tokens):
        devices = math.prod(mesh.shape[axis] for axis in (*lead[0], *missing))
        if x.shape[0] % devices:
            shown, why = (
                f"of {x.shape[0]} along its first dimension",
                f"{', '.join(missing)} cuts the experts, and so tokens",
            )
            fix = "tokens in one dimension, x.reshape(-1, d), or experts that are not cut"
            raise ValueError(message("moe", "x", shown, f"a multiple of {devices}", why, fix))
        lead[0] = (*lead[0], *missing)
    tokens = tuple(axis for axes in lead for axis in axes)
    rows = tuple(axis for axis in tokens if axis not in experts)
    recipes = (
        resolve("moe", settings["recipe"]),
        resolve("moe", recipe_of_second(settings["recipe"], settings["out_recipe"])),
    )
    gated = activation_of("moe", settings["activation"]).gated
    how = plan_mlp("moe", recipes, ((rows, cuts["x"][-1]), cuts["w_in"], cuts["w_out"]), (w_in, w_out), gated, experts)
    first, second = how
    where = _Where("moe", experts or None, placements=(first.placement, second.placement))

    def of_part(x, logits, w_in, w_out, b_in, b_out, *rest):
        if first.placement.y.halves:
            w_in, b_in = one_run(w_in), one_run(b_in)
        return _moe(x, logits, w_in, w_out, b_in, b_out, *rest, **settings, where=where, tokens=tokens)

    of_tokens, whole = spec_of((*lead, ())), PartitionSpec()
    kernels = dict(w_in=(w_in, spec_of(first.kernel)), w_out=(w_out, spec_of(second.kernel)))
    kernels |= dict(b_in=(b_in, spec_of_bias(b_in, first)), b_out=(b_out, spec_of_bias(b_out, second)))
    if first.placement.y.halves:
        kernels |= {name: halves_of(*kernels[name]) for name in ("w_in", "b_in")}
    (w_in, of_w_in), (w_out, of_w_out), (b_in, of_b_in), (b_out, of_b_out) = kernels.values()
    of_state = jax.tree.map(lambda leaf: spec_of((experts,)) if leaf.ndim else whole, state)
    in_specs = of_tokens, of_tokens, of_w_in, of_w_out, of_b_in, of_b_out, whole, of_state, whole
    out_specs = of_tokens, Routing(*(of_tokens, of_tokens, whole))  # pyright: ignore[reportArgumentType]
    operands = x, logits, w_in, w_out, b_in, b_out, key, state, bias
    results = over_mesh(of_part, in_specs, out_specs, *operands)
    if missing and experts:  # every device along them had a part of the tokens
        of_x = spec_of((*cuts["x"][:-1], ()))
        results = brought((of_x, Routing(*(of_x, of_x, whole))), results)  # pyright: ignore[reportArgumentType]
    return results


def _check_logits(where: _Where, x, logits, w_in) -> int:
    """The number of experts, of all devices, and that there is a logit for each."""
    op, expert_axis = where.op, where.expert_axis
    if where.gather is None and where.placements is None:
        check_kernel(op, "w_in", w_in, f"x {x.shape}", x.shape[-1], grouped=True)
    shape = _modes.along_k(w_in).shape if is_frozen(w_in) else w_in.shape
    axes, p = ((), 1) if expert_axis is None else axes_and_size(op, "expert_axis", expert_axis)
    local = shape[0]
    for gather in (where.gather or ())[:1]:
        if gather is not None and gather.dim % len(shape) == 0:
            local *= size_of(gather.axes)
    check_float(op, "logits", logits)
    if logits.shape != (*x.shape[:-1], local * p):
        of = "" if expert_axis is None else f" on each of the {p} devices of {axes}"
        why = f"each token of x {x.shape} has one for each expert of w_in {shape}{of}"
        needs, fix = f"{(*x.shape[:-1], local * p)}", "logits = x @ router [d, g]"
        raise ValueError(message(op, "logits", f"of shape {logits.shape}", needs, why, fix))
    return local * p


# --- what the layers of linen and nnx share ---

# Each expert's matrix is drawn as a dense layer's would be: the leading axis is no part of the fan-in.
expert_init = jax.nn.initializers.variance_scaling(
    1.0, "fan_in", "truncated_normal", in_axis=-2, out_axis=-1, batch_axis=0
)


def layer_moe(layer: Any, x, logits, w_in, w_out, b_in, b_out, key, state, selection_bias):
    """`moe` with the settings of a layer."""
    names = ("top_k", "activation", "recipe", "out_recipe")
    routing = ("score", "normalize", "expert_groups", "top_expert_groups", "scale")
    settings = {name: getattr(layer, name) for name in (*names, *routing, "specs")}
    return moe(x, logits, w_in, w_out, b_in=b_in, b_out=b_out, key=key, state=state, bias=selection_bias, **settings)
