"""grouped_mlp: y = p (act(x W_in + b_in) W_out + b_out) for each group, one custom_vjp around both products.

In one rule because the second input never has to exist outside it: `default` keeps it packed, blocked along rows, and
`unquant` makes it again from the first output, which the activation's gradient reads anyway.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jax_fp4 import _groups, _modes, _observe, _record, _watched
from jax_fp4._activations import Activation, activation_of
from jax_fp4._arguments import check_float, check_group_sizes, key_words
from jax_fp4._choosing import chosen_by, resolve
from jax_fp4._dense import (
    SOME_SEED,
    check_bias,
    check_drawn_rows,
    check_kernel,
    check_padding,
    check_placement,
    check_rows_of_groups,
    check_x,
    cut_by_mesh,
    frozen_format,
    keep_state,
    kernel_dtype,
    local_sizes,
    multiplied,
    planned,
    require_key,
    scales_of,
    seen_backward,
    spec_of_bias,
    spec_of_kernel,
    whole_sum,
)
from jax_fp4._errors import UnsupportedError, message
from jax_fp4._meshes import Dims, Plan, over_mesh, reshaped, spec_of
from jax_fp4._modes import Needs, Residuals, Scales, is_frozen
from jax_fp4._ops import Made
from jax_fp4._placement import LOCAL, Axes, Placement, Specs, WeightGather, alike, place, varying
from jax_fp4._products import dots_with_groups, sum_of_groups
from jax_fp4._recipe import BackwardMode, Recipe, RecipeChoice, check_recipe, mode_of
from jax_fp4._rules import is_kept, is_perturbed, keep, primals, refuse_perturbed
from jax_fp4.checkpoint_policies import PRODUCT
from jax_fp4.delayed import State, check_state, is_used_again, refuse_used_again

States = tuple[State | None, State | None]
Gathers = tuple[WeightGather | None, WeightGather | None] | None
PairOfSpecs = tuple[Specs, Specs] | None


class Arguments(NamedTuple):
    """What may be differentiated; an absent bias or probs is None."""

    x: Any  # [m, k]
    w_in: Any  # [g, k, 2f] or [g, k, f]
    w_out: Any  # [g, f, n]
    b_in: Any  # [g, 2f] or [g, f]
    b_out: Any  # [g, n]
    probs: Any  # [m]


class Static(NamedTuple):
    """What the forward captures for the backward: a later context changes nothing."""

    op: str
    recipes: tuple[Recipe | None, Recipe | None]  # of the first and of the second product
    activation: Activation
    dtype: np.dtype  # of x, of everything between the products, and of every high-precision product
    dtypes: tuple[np.dtype | None, ...]  # of the Arguments, and so of their gradients
    used_again: bool  # whether a delayed-scaling state was given to an earlier call too
    placements: tuple[Placement, Placement] = (LOCAL, LOCAL)
    states_over: tuple[Axes, Axes] = ((), ())  # mesh axes along which devices share the states
    sites: tuple[_observe.Site | None, _observe.Site | None] = (None, None)  # while diagnostics are collected


class Kept(NamedTuple):
    """What the backward reads; parts that nobody needs hold arrays of shape (0,)."""

    first: Residuals
    second: Residuals
    h: Float[Array, "m h"]  # the first product, in the compute dtype: the activation's input
    remake: Float[Array, " flag"]  # of shape (1,) where the second input is made again from h for dw_out, else (0,)
    b_out: Any  # for the gradient of probs
    probs: Any
    group_sizes: Any
    states: tuple[Any, Any]  # of delayed scaling, after what the forward quantized
    scales: tuple[Scales, Scales]  # what operands are multiplied by under it


def recipe_of_second(recipe: RecipeChoice | None, out_recipe: RecipeChoice | None) -> RecipeChoice | None:
    """What the second product was given: its own recipe, or the first one's."""
    return recipe if out_recipe is None else out_recipe


@jax.named_scope("fp4.grouped_mlp")
def grouped_mlp(
    x: Any,
    w_in: Any,
    w_out: Any,
    group_sizes: Any,
    *,
    b_in: Any = None,
    b_out: Any = None,
    activation: str | Activation = "swiglu",
    probs: Any = None,
    recipe: RecipeChoice | None = None,
    out_recipe: RecipeChoice | None = None,
    key=None,
    state: States | None = None,
    gather: Gathers = None,
    specs: PairOfSpecs = None,
) -> Float[Array, "*b n"]:
    """y = p (act(x W_in + b_in) W_out + b_out) for each group of rows: x [..., k] -> y [..., n] in x's dtype.

    w_in: [g, k, 2f] for a gated activation, gate columns first, else [g, k, f]. w_out: [g, f, n]. b_in, b_out: a row
    for each group. Kernels may be frozen, and group_sizes int32 [g] is data, both as in `grouped_dense`.
    activation: a name or an Activation with its constants; computed in float32.
    probs: [...], a factor of each row (the weight of its expert), folded in before the second product; has a gradient.
    recipe: of the first product and, unless out_recipe is given, of the second: None takes autocast's, HIGH_PRECISION
        none. The two may have different backward modes.
    key: the JAX key of stochastic rounding; the products use fold_in(key, 0) and fold_in(key, 1).
    state: of DelayedScaling, a pair for the two products (None for one with another recipe), as in `grouped_dense`.
    gather, specs: as in `grouped_dense`, a pair for the two products (gather: None for a kernel that is no shard); the
        second Specs has in x how the activation lies. Where specs cut the hidden columns (tensor parallel: the last
        entry of the first kernel, k of the second), w_in has a device's columns of the gate, then those it multiplies.

    Kept for the backward: what `grouped_dense` keeps for each product, and x W_in + b_in in x's dtype. The second input
    is kept packed in `default` (column-wise) and `dequant` (row-wise), and made again in `unquant`. Gradients have the
    dtype of their parameters. Raises TypeError, ValueError or UnsupportedError for what is not described here.
    """
    return mlp_as(
        "grouped_mlp",
        x,
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
        gather=gather,
        specs=specs,
    )


def mlp_as(
    op: str,
    x: Any,
    w_in: Any,
    w_out: Any,
    group_sizes,
    *,
    grouped: bool,
    b_in,
    b_out,
    activation,
    probs=None,
    recipe,
    out_recipe,
    key,
    state,
    gather: Gathers = None,
    specs: PairOfSpecs = None,
    placements: tuple[Placement, Placement] | None = None,
) -> Float[Array, "*b n"]:
    """`grouped_mlp`, known by the name `op` to errors and to the report. Not grouped (group_sizes None), all rows go
    through the same kernels w_in [k, 2f], w_out [f, n] and biases [2f], [n]. placements: what gather and specs say,
    where it is known."""
    act = activation_of(op, activation)
    check_recipe(op, out_recipe, "out_recipe")
    first, second = resolve(op, recipe), resolve(op, recipe_of_second(recipe, out_recipe))
    check_x(op, x)
    rows = jnp.asarray(x) if x.ndim > 1 else jnp.asarray(x)[None]
    cuts = None if placements else _cut_by_mesh(op, rows, (w_in, w_out), gather, specs)
    placements = placements or (
        (LOCAL, LOCAL) if cuts else _place(op, rows, (w_in, w_out), grouped, act.gated, gather, specs)
    )
    in_shape, shape = _check_operands(op, x, w_in, w_out, b_in, b_out, probs, act, grouped, placements)
    *groups, _, _ = in_shape
    if grouped:
        check_group_sizes(op, group_sizes, groups[0])
        group_sizes = jnp.asarray(group_sizes)
    m = math.prod(x.shape[:-1])
    states = check_states(op, (first, second), state, tuple(groups))
    for chosen, kernel_shape, names in (
        (first, in_shape, ("x", "w_in")),
        (second, shape, ("w_out (rows)", "w_out")),
    ):
        check_padding(op, chosen, *kernel_shape[-2:], m=None if grouped else m, names=names)
    seeds = None
    if key is not None:
        key_words(op, key)  # refuses what is no key in our words, before fold_in does
        seeds = tuple(key_words(op, jax.random.fold_in(key, i)) for i in (0, 1))
    events: Any = tuple(
        _record.LayerEvent(
            _record.path(), op, (*x.shape[:-1], kernel_shape[-2]), kernel_shape, chosen, chosen_by(op, given),
            frozen=frozen_format(kernel),
        )
        for chosen, given, kernel, kernel_shape in (
            (first, recipe, w_in, in_shape),
            (second, recipe_of_second(recipe, out_recipe), w_out, shape),
        )
    )  # fmt: skip
    probs = probs[None] if probs is not None and x.ndim == 1 else probs
    operands = Arguments(rows, w_in, w_out, b_in, b_out, probs), seeds, group_sizes, states
    settings = Settings(op, (first, second), act, any(map(is_used_again, states)), events)
    y = _over_mesh(operands, settings, cuts) if cuts else _placed(*operands, settings, placements)
    return y[0] if x.ndim == 1 else y


class Settings(NamedTuple):
    """Of one call, whatever part of the operands a device has."""

    op: str
    recipes: tuple[Recipe | None, Recipe | None]
    activation: Activation
    used_again: bool
    events: tuple[_record.LayerEvent, _record.LayerEvent]


def _cut_by_mesh(op: str, x, kernels, gather, specs) -> tuple[Any, Any] | None:
    """How x and the two kernels are cut at the level of jit, as `_dense.cut_by_mesh` says of each product."""
    gathers, pair = (_pair(op, name, given) for name, given in (("gather", gather), ("specs", specs)))
    cuts = [cut_by_mesh(op, x, kernel, *of_one) for kernel, *of_one in zip(kernels, gathers, pair, strict=True)]
    if not any(cuts):
        return None
    first, second = (
        one or {"x": ((),) * x.ndim, "kernel": ((),) * _ndim(w)} for one, w in zip(cuts, kernels, strict=True)
    )
    return first, second


def _ndim(kernel: Any) -> int:
    return _modes.along_k(kernel).ndim if is_frozen(kernel) else kernel.ndim


def _over_mesh(operands: tuple, settings: Settings, cuts) -> Float[Array, "*m n"]:
    """`_placed`, over the mesh that cuts the operands."""
    arguments, _, group_sizes, _ = operands
    kernels = arguments.w_in, arguments.w_out
    dims = cuts[0]["x"], cuts[0]["kernel"], cuts[1]["kernel"]
    first, second = plan_mlp(settings.op, settings.recipes, dims, kernels, settings.activation.gated)
    if group_sizes is not None:
        check_rows_of_groups(settings.op, first)
    placements, halves = (first.placement, second.placement), first.placement.y.halves

    def of_part(arguments, seeds, group_sizes, states):
        if group_sizes is not None:
            group_sizes = local_sizes(group_sizes, first.x[0], arguments.x)
        if halves:
            arguments = arguments._replace(w_in=one_run(arguments.w_in), b_in=one_run(arguments.b_in))
        return _placed(arguments, seeds, group_sizes, states, settings, placements)

    parts = Arguments(
        spec_of(first.x),
        spec_of_kernel(arguments.w_in, first),
        spec_of_kernel(arguments.w_out, second),
        spec_of_bias(arguments.b_in, first),
        spec_of_bias(arguments.b_out, second),
        spec_of(first.x[:-1]),
    )
    if halves:
        (w_in, of_w_in), (b_in, of_b_in) = (
            halves_of(getattr(arguments, n), getattr(parts, n)) for n in ("w_in", "b_in")
        )
        arguments, parts = arguments._replace(w_in=w_in, b_in=b_in), parts._replace(w_in=of_w_in, b_in=of_b_in)
        operands = arguments, *operands[1:]
    return over_mesh(of_part, (parts, *[PartitionSpec()] * 3), spec_of(second.y), *operands)


def plan_mlp(
    op: str, recipes, dims: tuple[Dims, Dims, Dims], kernels, gated: bool, experts: Axes = ()
) -> tuple[Plan, Plan]:  # fmt: skip
    """`planned` of both products; dims of x, w_in and w_out. experts: the axes that cut them, rows being where theirs
    are."""
    x, w_in, w_out = dims
    columns = not is_frozen(kernels[1])  # which is whole on each device, and so is what it multiplies
    first = planned(op, recipes[0], {"x": x, "kernel": w_in}, kernels[0], columns=columns, gated=gated, experts=experts)
    _refuse_contracted(op, first.placement)
    # y's columns whole: the activation's gradient would be a sum over devices, and is quantized
    second = planned(op, recipes[1], {"x": first.y, "kernel": w_out}, kernels[1], columns=False, experts=experts)
    return first, second


def halves_of(a: Any, spec: PartitionSpec) -> tuple[Any, PartitionSpec]:
    """[..., 2 f] as [..., 2, f], both halves cut as `spec` says of the whole: a device has its part of each."""
    if a is None:
        return a, spec
    spec = PartitionSpec(*spec[:-1], None, spec[-1])
    return reshaped(a, (*a.shape[:-1], 2, a.shape[-1] // 2), spec), spec


def one_run(a: Any) -> Any:
    return None if a is None else a.reshape(*a.shape[:-2], -1)


def _placed(
    arguments: Arguments, seeds, group_sizes, states, settings: Settings, placements
) -> Float[Array, "*m n"]:  # fmt: skip
    """`_mlp` of operands that lie as `placements` say, recorded. Of groups, x is flattened to rows."""
    op, recipes, activation, used_again, events = settings
    leading = arguments.x.shape[:-1]
    if group_sizes is not None:
        rows, probs = _matrix(arguments.x), arguments.probs
        probs = None if probs is None else probs.reshape(rows.shape[0])
        arguments, placements = arguments._replace(x=rows, probs=probs), tuple(one.of_rows() for one in placements)
    if group_sizes is None:
        for recipe, placement in zip(recipes, placements, strict=True):
            check_drawn_rows(op, arguments.x.shape, recipe, placement)
    axes, of_sum = placements[1].contracted, (arguments.b_out, group_sizes, arguments.x.dtype, arguments.probs)
    if axes:  # the bias is added to the whole sum
        arguments = arguments._replace(b_out=None)
    for i, kernel in enumerate((arguments.w_in, arguments.w_out)):
        shard = _modes.along_k(kernel).shape if is_frozen(kernel) else kernel.shape
        names = f"gather[{i}]", f"specs[{i}]"
        check_placement(op, kernel, placements[i].gathered_shape(shard), recipes[i], placements[i], names)
    arguments, seeds, group_sizes = alike(arguments, seeds, group_sizes)
    dtypes = tuple(None if a is None else kernel_dtype(a) for a in arguments)
    over: Any = tuple(tuple(sorted(varying(arguments) - varying(one))) for one in states)
    sites: Any = tuple(map(_observe.site, (op, op), recipes, ("w_in", "w_out")))
    static = Static(op, recipes, activation, arguments.x.dtype, dtypes, used_again, placements, over, sites)
    cost = _cost_of(arguments, seeds, group_sizes, states, static)
    for event, whole in zip(events, (cost, None), strict=True):
        _record.record(event._replace(cost=whole))
    y: Any = _mlp(arguments, seeds, group_sizes, states, static)
    if axes:
        y = checkpoint_name(whole_sum(y, axes, *of_sum), PRODUCT)
    return y.reshape(*leading, y.shape[-1])


def _pair(op: str, name: str, given) -> tuple[Any, Any]:
    pair = (None, None) if given is None else given
    if not isinstance(pair, tuple) or len(pair) != 2:
        why, fix = "there are two products", f"{name}=(of w_in, of w_out)"
        raise TypeError(message(op, name, f"a {type(given).__name__}", "a pair", why, fix))
    return pair


def _place(op: str, x, kernels, grouped: bool, gated: bool, gather, specs) -> tuple[Placement, Placement]:
    """How the operands of the two products lie, inside the user's shard_map."""
    gathers, pair = (_pair(op, name, given) for name, given in (("gather", gather), ("specs", specs)))
    placements = []
    for i, (kernel, of_kernel, of_both) in enumerate(zip(kernels, gathers, pair, strict=True)):
        names = f"gather[{i}]", f"specs[{i}]", ("w_in", "w_out")[i]
        placements.append(place(op, x.ndim, kernel, 2 + grouped, of_kernel, of_both, names))
    first, second = placements
    if first.y != second.x:
        shown, needs = f"an activation cut by {second.x.dims}", f"{first.y.dims}, as the first product leaves it"
        raise ValueError(message(op, "specs[1].x", shown, needs, "it is what lies there", "that PartitionSpec"))
    _refuse_contracted(op, first)
    if pair[1] is not None and (cut := second.kernel.dims[-1]):
        why, fix = "the activation's gradient is quantized, and would be a sum over devices", "a WeightGather of w_out"
        raise UnsupportedError(message(op, "specs[1].kernel", f"cut by {cut} along n", "whole columns", why, fix))
    return first._replace(gated=gated), second


def _refuse_contracted(op: str, first: Placement) -> None:
    if first.contracted:
        why = "the activation is of whole sums, which would have to be added up between the products"
        fix = "x with all its columns on each device (jax.sharding.reshard, or another in_specs)"
        raise UnsupportedError(message(op, "x", f"cut by {first.contracted} along k", "whole rows", why, fix))


def _check_operands(op: str, x, w_in, w_out, b_in, b_out, probs, act: Activation, grouped: bool, placements):
    """The shapes of the two kernels, and that everything fits them."""
    check_x(op, x)
    in_shape = check_kernel(op, "w_in", w_in, f"x {x.shape}", x.shape[-1], grouped, placements[0])
    *groups, _, hidden = in_shape
    if act.gated and hidden % 2:
        why, fix = f"{act.name} is gated: half of them are the gate", "w_in [..., k, 2f], gate columns first"
        raise ValueError(message(op, "w_in", f"of shape {in_shape}", "an even number of columns", why, fix))
    f = hidden // 2 if act.gated else hidden
    shape = check_kernel(op, "w_out", w_out, f"the activation {(*x.shape[:-1], f)}", f, grouped, placements[1])
    if [*shape[:-2]] != groups:
        why = f"w_in {in_shape} has {groups[0]} groups"
        fix = "kernels of the same experts"
        raise ValueError(message(op, "w_out", f"of shape {shape}", f"{groups[0]} groups", why, fix))
    check_bias(op, "b_in", b_in, in_shape)
    check_bias(op, "b_out", b_out, shape)
    if probs is not None:
        check_float(op, "probs", probs)
        if probs.shape != x.shape[:-1]:
            why = f"x {x.shape} has a factor for each row"
            raise ValueError(message(op, "probs", f"of shape {probs.shape}", f"{x.shape[:-1]}", why, "probs=None"))
    return in_shape, shape


def check_states(op: str, recipes: tuple[Recipe | None, Recipe | None], state, groups: tuple[int, ...]) -> States:
    """The states of the two products, None where there is none to have."""
    pair = (None, None) if state is None else state
    if not isinstance(pair, tuple) or len(pair) != 2:
        fix = "(delayed.init(recipe), delayed.init(out_recipe)), with (g,) where there are groups"
        raise TypeError(message(op, "state", f"a {type(state).__name__}", "a pair", "each product has its own", fix))
    for recipe, one, name in zip(recipes, pair, ("state[0]", "state[1]"), strict=True):
        check_state(op, recipe, one, groups, name)
    return pair


def _cost_of(arguments: Arguments, seeds, group_sizes, states, static: Static):
    """What `_mlp` takes, for the report: only evaluated, where it cannot be differentiated."""
    static = static._replace(sites=(None, None))  # what is kept for diagnostics is no part of it
    kernels = zip((arguments.w_in, arguments.w_out), static.recipes, strict=True)
    free = {name: a for name, a in arguments._asdict().items() if a is not None and not is_frozen(a)}
    if not all(_modes.has_along_n(kernel, recipe) for kernel, recipe in kernels):
        free = {}

    def call(free, rest, *more):
        return _mlp(rest._replace(**free), *more, static)

    rest = arguments._replace(**dict.fromkeys(free))
    return _record.cost_of(
        static.placements != (LOCAL, LOCAL), call, free, rest, seeds or (SOME_SEED, SOME_SEED), group_sizes, states
    )


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _mlp(arguments: Arguments, seeds, group_sizes, states, static: Static) -> Float[Array, "m n"]:
    return _forward(arguments, seeds, group_sizes, states, static, Needs(False, False), Needs(False, False))[0]


def _mlp_fwd(arguments: Any, seeds, group_sizes, states, static: Static):
    """Residuals for what is differentiated, and the errors that only differentiation can make."""
    for name, kernel in (("w_in", arguments.w_in), ("w_out", arguments.w_out)):
        if is_frozen(kernel):
            refuse_perturbed(static.op, name, kernel)
    perturbed = Arguments(*(a is not None and not is_frozen(a) and a.perturbed for a in arguments))
    wanted = [is_perturbed(state) for state in states]
    if static.used_again and any(wanted):
        refuse_used_again(static.op)
    arguments, seeds, group_sizes, states = primals((arguments, seeds, group_sizes, states))
    before = perturbed.x or perturbed.w_in or perturbed.b_in  # whatever the first product depends on
    needs = Needs(perturbed.x, perturbed.w_in), Needs(before or perturbed.probs, perturbed.w_out)
    kernels = ("w_in", arguments.w_in), ("w_out", arguments.w_out)
    for recipe, needed, (name, kernel) in zip(static.recipes, needs, kernels, strict=True):
        if any(needed):
            require_key(static.op, recipe, seeds)
        if needed.x:
            _modes.require_along_n(static.op, name, kernel, recipe)
    y, kept = _forward(arguments, seeds, group_sizes, states, static, *needs)
    kept = kept._replace(states=tuple(map(keep_state, kept.states, wanted)))
    return y, kept._replace(b_out=keep(kept.b_out if perturbed.probs else None, lambda: kept.b_out))


def _forward(arguments: Arguments, seeds, group_sizes, states, static: Static, needs_in: Needs, needs_out: Needs):
    """y, and what a backward with these needs reads."""
    x, w_in, w_out, b_in, b_out, probs = arguments
    (recipe, out_recipe), dtype = static.recipes, static.dtype
    seed, out_seed = (None, None) if seeds is None else seeds
    if probs is not None:  # those of the tail may be NaN
        probs = jnp.where(_groups.group_of_rows(group_sizes, x.shape[0]) < group_sizes.shape[0], probs, 0)
    (state, out_state), (place_in, place_out), (site, out_site) = states, static.placements, static.sites
    with jax.named_scope("w_in"):
        how = needs_in, group_sizes, state, place_in, site
        h, first, state = multiplied(x, w_in, seed, recipe, *how, dtype, dtype, bias=b_in)  # [m,h] = [m,k] @ [g,k,h]

    a = _weighted(static.activation(h.astype(jnp.float32)), probs).astype(dtype)
    # Where it is quantized, CUDA makes it of h in the same call; no mode keeps it, so nothing outside reads it there.
    made = Made(_matrix(h), probs, static.activation)
    weights = None if probs is None or b_out is None else probs.astype(jnp.float32)
    y_dtype = jnp.float32 if place_out.contracted else dtype  # of a partial sum
    with jax.named_scope("w_out"):
        how, biases = (needs_out, group_sizes, out_state, place_out, out_site), dict(bias=b_out, bias_weights=weights)
        y, second, out_state = multiplied(a, w_out, out_seed, out_recipe, *how, y_dtype, dtype, made, **biases)
    # unquant's dw_out reads a, which h gives again
    remake = needs_out.kernel and mode_of(out_recipe, "wgrad") is BackwardMode.UNQUANT
    if mode_of(out_recipe, "wgrad") is BackwardMode.UNQUANT:
        second = second._replace(x=keep(None, lambda: a))
    h = keep(h if needs_out.x or remake else None, lambda: h)
    return y, Kept(
        first,
        second,
        h,
        jnp.zeros(int(remake)),
        b_out,
        probs,
        group_sizes,
        (state, out_state),
        (scales_of(state), scales_of(out_state)),
    )


def _mlp_bwd(static: Static, kept: Kept, dy):
    if isinstance(dy, SymbolicZero):
        return None, None, None, None
    (recipe, out_recipe), dtype, dtypes = static.recipes, static.dtype, Arguments(*static.dtypes)
    second, sizes, probs, b_out = kept.second, kept.group_sizes, kept.probs, kept.b_out
    if kept.remake.size:
        a = _weighted(static.activation(kept.h.astype(jnp.float32)), probs).astype(dtype)
        second = second._replace(x=a)
    (state, out_state), (scales, out_scales) = kept.states, kept.scales
    (place_in, place_out), (over, out_over) = static.placements, static.states_over
    dy = dy.astype(dtype)
    (site, out_site), out_dtypes = static.sites, (dtype, dtypes.w_out)
    with jax.named_scope("w_out"):
        how = out_recipe, out_dtypes, sizes, out_scales, place_out
        da, dw_out, amax = _watched.gradients(out_site, dy, second, *how)
    out_state = seen_backward(out_state, out_recipe, amax, out_over)
    db_out = None if b_out is None else sum_of_groups(_matrix(_weighted(dy, probs)), sizes).astype(dtypes.b_out)
    if da is None:
        states = seen_backward(state, recipe, None, over), out_state
        return Arguments(None, None, dw_out, None, db_out, None), None, None, states

    value, pull = jax.vjp(static.activation, kept.h.astype(jnp.float32))
    d_probs = None
    if probs is not None:
        d_probs = jnp.sum(da.astype(jnp.float32) * value, axis=-1)
        if b_out is not None and is_kept(b_out):
            d_probs += dots_with_groups(dy, b_out, sizes)
        d_probs = d_probs.astype(probs.dtype)
    dh = pull(_weighted(da.astype(jnp.float32), probs))[0].astype(dtype)
    with jax.named_scope("w_in"):
        how = recipe, (dtype, dtypes.w_in), sizes, scales, place_in
        dx, dw_in, amax = _watched.gradients(site, dh, kept.first, *how)
    db_in = None if dtypes.b_in is None else sum_of_groups(_matrix(dh), sizes).astype(dtypes.b_in)
    states = seen_backward(state, recipe, amax, over), out_state
    return Arguments(dx, dw_in, dw_out, db_in, db_out, d_probs), None, None, states


_mlp.defvjp(_mlp_fwd, _mlp_bwd, symbolic_zeros=True)


def _matrix(values: Float[Array, "*m n"]) -> Float[Array, "m n"]:
    return values.reshape(math.prod(values.shape[:-1]), values.shape[-1])


def _weighted(values: Float[Array, "m f"], probs) -> Float[Array, "m f"]:
    """Each row times its factor, in float32."""
    return values if probs is None else values.astype(jnp.float32) * probs.astype(jnp.float32)[:, None]
