"""dense: y = x w + b with quantized operands, one custom_vjp from quantization to product."""

import dataclasses
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

from jax_fp4 import _modes, _observe, _record, _watched
from jax_fp4._arguments import check_float, check_quantized, float_dtype, key_words, refuse_padding
from jax_fp4._array import QuantizedTensor
from jax_fp4._choosing import chosen_by, resolve
from jax_fp4._errors import UnsupportedError, is_strict, message
from jax_fp4._gather import check_payload
from jax_fp4._groups import group_of_rows, window
from jax_fp4._meshes import Plan, cut, over_mesh, plan, spec_of
from jax_fp4._modes import Kernel, Needs, Residuals, Scales, is_frozen
from jax_fp4._placement import (
    LOCAL,
    Axes,
    Placement,
    Specs,
    WeightGather,
    alike,
    index_of,
    place,
    size_of,
    vary,
    varying,
)
from jax_fp4._products import along_last, matmul, of_rows, sum_of_groups
from jax_fp4._recipe import DelayedScaling, Operand, Product, Recipe, RecipeChoice, draws, scaling_of
from jax_fp4._rules import is_kept, is_perturbed, keep, primals, refuse_perturbed
from jax_fp4._watched import Watch
from jax_fp4.checkpoint_policies import PRODUCT
from jax_fp4.delayed import State, check_state, is_used_again, merged_over, observed, refuse_used_again


class Static(NamedTuple):
    """What the forward captures for the backward: a later context changes nothing."""

    op: str
    recipe: Recipe | None
    dtype: np.dtype  # of x, and of every high-precision product
    y_dtype: np.dtype
    kernel_dtype: np.dtype
    bias_dtype: np.dtype | None
    used_again: bool = False  # whether the delayed-scaling state was given to an earlier call too
    placement: Placement = LOCAL
    state_over: Axes = ()  # mesh axes along which devices share the state
    site: _observe.Site | None = None  # while diagnostics are collected


@jax.named_scope("fp4.dense")
def dense(
    x: Any,
    kernel: Any,
    bias: Any = None,
    *,
    recipe: RecipeChoice | None = None,
    key=None,
    state: State | None = None,
    gather: WeightGather | None = None,
    specs: Specs | None = None,
    preferred_element_type=None,
) -> Float[Array, "*b n"]:
    """y = x w + b: x [..., k], kernel [k, n], bias [n] -> y [..., n] in x's dtype, which is the compute dtype.

    kernel: an array (float32 master weights are rounded to x's dtype on the way) or, frozen, a QuantizedTensor blocked
    along k (`quantize(w, axis=0)`) or the pair `quantize_transpose(w)`; differentiating a frozen kernel raises.
    recipe: None takes autocast's, HIGH_PRECISION none. Without a recipe this is the plain product. Under
        autocast(Rules) a call outside of a Linen layer has no path to match: ValueError.
    key: the JAX key of stochastic rounding, needed where a recipe that rounds dy stochastically is differentiated.
    state: of DelayedScaling, from `jax_fp4.delayed.init`, and for this call alone; its cotangent is the next state.
    gather, specs: inside shard_map, what gathers a kernel that is a shard, and how the operands lie; see WeightGather
        and Specs. Without specs x and the gathered kernel are whole tensors: their amaxes are those of this device, and
        draws count from their first element.
    preferred_element_type: y's dtype, rounded once from the float32 sum, if not x's.

    The three products and what is kept for them follow the recipe's backward mode. dx has x's dtype, dw and db those of
    their parameters; db is always the sum of the unquantized dy. Nothing is computed or kept for an operand that
    nobody differentiates. Raises TypeError, ValueError or UnsupportedError for what is not described here.
    """
    return dense_as("dense", x, kernel, bias, recipe, key, state, preferred_element_type, gather, specs)


def dense_as(
    op: str, x: Any, kernel: Any, bias, recipe: RecipeChoice | None, key, state, preferred_element_type,
    gather: WeightGather | None = None, specs: Specs | None = None,
) -> Float[Array, "*b n"]:  # fmt: skip
    """`dense`, known by the name `op` to errors and to the report."""
    chosen = resolve(op, recipe)
    check_x(op, x)
    rows = jnp.asarray(x) if x.ndim > 1 else jnp.asarray(x)[None]
    if x.ndim == 1 and isinstance(specs, Specs):
        specs = dataclasses.replace(specs, x=PartitionSpec(None, *specs.x))
    cuts = cut_by_mesh(op, rows, kernel, gather, specs)
    placement = LOCAL if cuts else place(op, rows.ndim, kernel, 2, gather, specs)
    k, n = shape = check_kernel(op, "kernel", kernel, f"x {x.shape}", x.shape[-1], False, placement)
    check_bias(op, "bias", bias, shape)
    y_dtype = x.dtype
    if preferred_element_type is not None:
        y_dtype = float_dtype(op, "preferred_element_type", preferred_element_type, "y is written in it")
    check_state(op, chosen, state)
    reason, frozen = chosen_by(op, recipe), frozen_format(kernel)
    event = _record.LayerEvent(_record.path(), op, x.shape, (k, n), chosen, reason, frozen=frozen)
    if chosen is None and placement == LOCAL and not cuts:
        _record.record(event)
        return _high_precision(x, kernel, bias, y_dtype)
    check_padding(op, chosen, k, n, math.prod(x.shape[:-1]))
    operands = rows, kernel, bias, None if key is None else key_words(op, key), None, state
    settings = Settings(op, chosen, jnp.dtype(y_dtype), is_used_again(state), event)
    y = over_mesh_or_here(operands, settings, placement, cuts)
    return y[0] if x.ndim == 1 else y


class Settings(NamedTuple):
    """Of one call, whatever part of the operands a device has."""

    op: str
    recipe: Recipe | None
    y_dtype: np.dtype
    used_again: bool
    event: _record.LayerEvent


def cut_by_mesh(op: str, x, kernel, gather, specs: Specs | None) -> dict[str, Any] | None:
    """How x and kernel are cut at the level of jit; None where they are not, or inside the user's shard_map."""
    if specs is not None and not isinstance(specs, Specs):
        return None  # which `place` refuses
    if isinstance(kernel, tuple) and not _is_pair(kernel):
        return None  # which `check_kernel` refuses
    given = None if specs is None else {"x": specs.x, "kernel": specs.kernel}
    # A frozen kernel is gathered as it is: its bytes are packed.
    whole = np.broadcast_to(np.uint8(0), _modes.along_k(kernel).shape) if is_frozen(kernel) else kernel
    cuts = cut(op, {"x": x, "kernel": whole}, given) if hasattr(whole, "ndim") else None
    if cuts and gather is not None:
        why, fix = "outside of shard_map the kernel's own sharding says what is gathered", "gather=None"
        raise ValueError(message(op, "gather", repr(gather), "a shard_map around the call", why, fix))
    return cuts


def over_mesh_or_here(operands: tuple, settings: Settings, placement: Placement, cuts) -> Float[Array, "*m n"]:
    """`placed`, of operands (x, kernel, bias, seed, group_sizes, state); over the mesh where it cuts them."""
    if not cuts:
        return placed(*operands, settings=settings, placement=placement)
    _, kernel, bias, _, group_sizes, _ = operands
    how = planned(settings.op, settings.recipe, cuts, kernel)
    if group_sizes is not None:
        check_rows_of_groups(settings.op, how)

    def of_part(x, kernel, bias, seed, group_sizes, state):
        if group_sizes is not None:
            group_sizes = local_sizes(group_sizes, how.x[0], x)
        return placed(x, kernel, bias, seed, group_sizes, state, settings=settings, placement=how.placement)

    parts = spec_of(how.x), spec_of_kernel(kernel, how), spec_of_bias(bias, how), *[PartitionSpec()] * 3
    return over_mesh(of_part, parts, spec_of(how.y), *operands)


def spec_of_kernel(kernel: Any, how: Plan) -> PartitionSpec:
    return PartitionSpec() if is_frozen(kernel) else spec_of(how.kernel)


def spec_of_bias(bias: Any, how: Plan) -> PartitionSpec:
    return PartitionSpec() if bias is None else spec_of((*how.placement.kernel.dims[:-2], how.y[-1]))


def planned(
    op: str, recipe: Recipe | None, cuts, kernel, *, columns: bool = True, gated: bool = False, experts: Axes = ()
) -> Plan:
    """`plan` of a product whose operands are cut so. columns: whether those of y may be."""
    shape = _modes.along_k(kernel).shape if is_frozen(kernel) else kernel.shape
    if is_frozen(kernel):  # whole on each device
        cuts, columns = {**cuts, "kernel": ((),) * len(shape)}, False
        if cuts["x"][-1]:
            why, fix = (
                "the frozen kernel is whole on each device",
                "jax.sharding.reshard(x, ...) so that its columns are",
            )
            raise ValueError(message(op, "x", f"cut by {cuts['x'][-1]} along k", "whole rows", why, fix))
    of_dy, of_kernel = scaling_of(recipe, "dgrad", "dy"), scaling_of(recipe, "forward", "kernel")
    blocks = (1 if of_dy is None else of_dy.length, 1 if of_kernel is None else of_kernel.tile)
    block = math.lcm(*blocks) * (2 if gated else 1) if columns else None
    sizes = jax.sharding.get_abstract_mesh().shape
    how = plan(cuts["x"], cuts["kernel"], shape, block, sizes, gated, experts)
    used = {axis for axes in how.kernel for axis in axes}
    if idle := [axis for axes in cuts["kernel"] for axis in axes if axis not in used and sizes[axis] > 1]:
        reason = f"{', '.join(idle)} cuts it where this product has no use for that: brought by resharding"
        _record.record(_record.GatherEvent(_record.path(), op, "forward", shape, "high_precision", reason))
        if is_strict():
            why, fix = "strict() forbids to gather it in high precision", "another sharding of it, or of x alike"
            raise UnsupportedError(message(op, "the kernel", f"cut by {', '.join(idle)}", "a cut to use", why, fix))
    return how


def check_drawn_rows(op: str, shape: tuple[int, ...], recipe: Recipe | None, placement: Placement) -> None:
    """Refuse at the forward what the draws for dw could not number: blocks of rows that are not those of all rows."""
    scaling, dims = scaling_of(recipe, "wgrad", "dy"), placement.x.dims
    if scaling is None or not scaling.stochastic or len(dims) < 3:
        return
    last = max((i for i, axes in enumerate(dims[:-1]) if axes), default=0)
    if math.prod(shape[:last]) > 1 and shape[-2] % scaling.length:
        shown, why = f"of {shape[-2]} rows a device along its last leading axis", "dy is drawn by blocks of rows"
        fix = f"a multiple of {scaling.length}, stochastic_rounding=False, or backward_mode='unquant'"
        raise ValueError(message(op, "x", shown, f"a multiple of {scaling.length}", why, fix))


def check_rows_of_groups(op: str, how: Plan) -> None:
    if any(how.x[1:-1]):
        shown, why = f"cut by {how.x}", "groups are rows that follow one another"
        raise ValueError(message(op, "x", shown, "rows cut along the first dimension", why, "x [m, k], cut along m"))


def local_sizes(group_sizes, axes: Axes, x: Float[Array, "*m k"]):
    """Of the groups, in the rows that this device has of those that `axes` cut."""
    m = math.prod(x.shape[:-1])
    return window(group_sizes, index_of(axes) * np.uint32(m), m, m * size_of(axes))


def placed(
    x, kernel, bias, seed, group_sizes, state, *, settings: Settings, placement: Placement
) -> Float[Array, "*m n"]:  # fmt: skip
    """`affine` of operands that lie as `placement` says, recorded. Of groups, x is flattened to rows."""
    op, recipe, y_dtype, used_again, event = settings
    leading = x.shape[:-1]
    if group_sizes is not None:
        x, placement = x.reshape(math.prod(leading), x.shape[-1]), placement.of_rows()
    shard = _modes.along_k(kernel).shape if is_frozen(kernel) else kernel.shape
    check_placement(op, kernel, placement.gathered_shape(shard), recipe, placement)
    if group_sizes is None:
        check_drawn_rows(op, x.shape, recipe, placement)
    axes, of_sum = placement.contracted, (bias, group_sizes)
    if axes:  # the bias is added to the whole sum
        bias = None
    x, kernel, bias, seed, group_sizes = alike(x, kernel, bias, seed, group_sizes)
    dtypes = x.dtype, jnp.dtype(jnp.float32) if axes else y_dtype, kernel_dtype(kernel)
    over = tuple(sorted(varying(x) - varying(state)))
    bias_dtype = None if bias is None else bias.dtype
    static = Static(op, recipe, *dtypes, bias_dtype, used_again, placement, over, _observe.site(op, recipe))
    arguments = x, kernel, bias, seed, group_sizes, state, static
    _record.record(event._replace(cost=cost_of(*arguments) if recipe is not None else None))
    y: Any = affine(*arguments)
    y = checkpoint_name(whole_sum(y, axes, *of_sum, y_dtype), PRODUCT) if axes else y
    return y.reshape(*leading, y.shape[-1])


def whole_sum(
    y: Float[Array, "*m n"], axes: Axes, bias, group_sizes, dtype, row_weights=None
) -> Float[Array, "*m n"]:  # fmt: skip
    """y = x w + b of float32 sums over the local part of k. row_weights: of the bias."""
    y = jax.lax.psum(y, axes)
    if bias is None:
        return y.astype(dtype)
    bias = bias.astype(jnp.float32)
    if group_sizes is None:
        return (y + along_last(bias, y.ndim)).astype(dtype)
    rows: Any = of_rows(*alike(bias, group_sizes), y.shape[0])
    if row_weights is not None:  # those of the tail may be NaN
        live = group_of_rows(group_sizes, y.shape[0]) < group_sizes.shape[0]
        rows = jnp.where(live, row_weights.astype(jnp.float32), 0)[:, None] * rows
    return (y + rows).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def affine(
    x: Float[Array, "*m k"], kernel: Kernel, bias, seed, group_sizes, state, static: Static
) -> Float[Array, "*m n"]:
    """y = x w + b, the layer itself: for `dense`, and with group_sizes, kernel [g, k, n] and bias [g, n] for
    `grouped_dense`."""
    scales, none = scales_of(state), Needs(False, False)
    planes = _modes.operands(x, kernel, static.recipe, none, group_sizes, scales=scales, placement=static.placement)
    watch = Watch.of(static.site, x, kernel, static.placement)
    return _watched.multiply(watch, *planes, static.y_dtype, group_sizes, compute=static.dtype, bias=bias)


def _affine_fwd(x: Any, kernel: Any, bias, seed, group_sizes, state, static: Static):
    """Residuals for what is differentiated, and the errors that only differentiation can make."""
    if is_frozen(kernel):
        refuse_perturbed(static.op, "kernel", kernel)
    if static.used_again and is_perturbed(state):
        refuse_used_again(static.op)
    needs, wanted = Needs(x.perturbed, not is_frozen(kernel) and kernel.perturbed), is_perturbed(state)
    x, kernel, bias, seed, group_sizes, state = primals((x, kernel, bias, seed, group_sizes, state))
    recipe = static.recipe
    if any(needs):
        require_key(static.op, recipe, seed)
    if needs.x:
        _modes.require_along_n(static.op, "kernel", kernel, recipe)
    scales, placement = scales_of(state), static.placement
    how = needs, group_sizes, state, placement, static.site
    y, kept, seen = multiplied(x, kernel, seed, recipe, *how, static.y_dtype, static.dtype, bias=bias)
    return y, (kept, group_sizes, (keep_state(seen, wanted), scales))


def multiplied(
    x, kernel, seed, recipe, needs: Needs, group_sizes, state, place: Placement, site, dtype, compute, made=None, **bias
):
    """y = x w, what a backward with these needs reads of it, and the state after it."""
    qx, qw = _modes.operands(x, kernel, recipe, needs, group_sizes, made, scales_of(state), place)
    state = seen_forward(state, recipe, qx.forward, None if is_frozen(kernel) else qw.forward)
    watch = Watch.of(site, x, kernel, place)
    y = _watched.multiply(watch, qx, qw, dtype, group_sizes, compute=compute, **bias)
    return y, _watched.residuals(site, x, kernel, seed, qx, qw, recipe, needs, group_sizes, place), state


def _affine_bwd(static: Static, residuals: tuple[Residuals, Any, Any], dy):
    kept, group_sizes, (state, scales) = residuals
    if isinstance(dy, SymbolicZero):
        return (None,) * 6
    dtypes = static.dtype, static.kernel_dtype
    # y may be wider than the compute dtype
    narrow, where = dy.astype(static.dtype), (scales, static.placement)
    dx, dw, amax = _watched.gradients(static.site, narrow, kept, static.recipe, dtypes, group_sizes, *where)
    db = None
    if static.bias_dtype is not None:
        db = sum_of_groups(dy, group_sizes).astype(static.bias_dtype)
    return dx, dw, db, None, None, seen_backward(state, static.recipe, amax, static.state_over)


affine.defvjp(_affine_fwd, _affine_bwd, symbolic_zeros=True)


# For the report, which differentiates to learn what a call takes: where that, only evaluated, has no key.
SOME_SEED = jax.ShapeDtypeStruct((2,), jnp.uint32)


def cost_of(x, kernel, bias, seed, group_sizes, state, static: Static) -> Any:
    """What `affine` takes, for the report: only evaluated, where it cannot be differentiated."""
    static = static._replace(site=None)  # what is kept for diagnostics is no part of it
    rest = bias, SOME_SEED if seed is None else seed, group_sizes, state
    at_once = static.placement != LOCAL  # where the mesh axes are known
    if not _modes.has_along_n(kernel, static.recipe):
        return _record.cost_of(at_once, lambda _, *arguments: affine(*arguments, static), (), x, kernel, *rest)
    if is_frozen(kernel):
        return _record.cost_of(at_once, lambda x, *rest: affine(x, *rest, static), x, kernel, *rest)
    return _record.cost_of(at_once, lambda both, *rest: affine(*both, *rest, static), (x, kernel), *rest)


def scales_of(state: State | None) -> Scales:
    return Scales() if state is None else Scales(state.x.scale, state.kernel.scale, state.dy.scale)


def keep_state(state: Any, wanted: bool) -> Any:
    """As a residual: nothing where nobody differentiates it."""
    return None if state is None else keep(state if wanted else None, lambda: state)


def seen_forward(state: Any, recipe: Recipe | None, qx: Any, qw: Any) -> Any:
    """The state after what the forward quantized (None for a frozen kernel)."""
    if state is None:
        return None
    assert isinstance(recipe, DelayedScaling)
    kernel = observed(state.kernel, recipe, "kernel", None if qw is None else qw.amax)
    return dataclasses.replace(state, x=observed(state.x, recipe, "x", qx.amax), kernel=kernel)


def seen_backward(state: Any, recipe: Recipe | None, amax: Any, over: Axes = ()) -> Any:
    """And after what the backward quantized: the cotangent of the state that the forward was given, one for all devices
    along the axes `over`, which share it."""
    if state is None or not is_kept(state):
        return None
    assert isinstance(recipe, DelayedScaling)
    state = dataclasses.replace(state, dy=observed(state.dy, recipe, "dy", amax))
    # One, of a value that has a batch where a batch shares this state: vmap adds up those only, as it does the rest.
    seen = [jnp.any(part.scale > 0) for part in (state.x, state.kernel, state.dy)]
    once = jnp.where(seen[0] & seen[1] & seen[2], jnp.float32(1), jnp.float32(1))
    state = dataclasses.replace(state, calls=once)
    return merged_over(vary(state, frozenset(over)), over) if over else state


def require_key(op: str, recipe: Recipe | None, seed) -> None:
    """Where a layer is differentiated: its stochastic rounding needs a key."""
    if recipe is not None and draws(recipe) and seed is None:
        raise ValueError(
            message(
                op,
                "key",
                None,
                "a JAX key where the layer is differentiated",
                "backward_mode='default' rounds dy stochastically",
                "key=key, a new one each step (Linen: model.apply(..., rngs={'sr': key}); NNX: a layer made with "
                "nnx.Rngs(0, sr=1), under nnx.jit and nnx.grad, or nnx.merge(..., copy=True) under jax's own), or "
                "backward_mode='dequant' or 'unquant', which need none",
            )
        )


def _high_precision(x, kernel, bias, y_dtype):
    """The plain product, in x's dtype. A quantized kernel takes part with its dequantized values."""
    if is_frozen(kernel):
        rows = jnp.asarray(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])
        y = matmul(rows, _modes.along_k(kernel), preferred_element_type=y_dtype)
        y = y.reshape(*x.shape[:-1], y.shape[-1])
    else:
        y = jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=y_dtype)
    return y if bias is None else y + along_last(bias.astype(y_dtype), y.ndim)


def frozen_format(kernel: Any) -> str:
    """For the report: "" for a kernel that is an array."""
    return _modes.along_k(kernel).format if is_frozen(kernel) else ""


def kernel_dtype(kernel: Any):
    return _modes.along_k(kernel).dtype if is_frozen(kernel) else kernel.dtype


# --- checks, of the layers made of `affine` ---


def check_x(op: str, x) -> None:
    check_float(op, "x", x)
    if x.ndim == 0:
        raise ValueError(message(op, "x", "a scalar", "[..., k]", "its last axis is contracted", "x[None]"))


def check_kernel(
    op: str, name: str, kernel: Any, of: str, rows: int, grouped: bool, placement: Placement = LOCAL
) -> tuple[int, ...]:
    """The shape of a kernel [k, n], or [g, k, n], gathered, whose k is the last axis of what `of` names."""
    if is_frozen(kernel):
        _check_frozen(op, name, kernel, grouped)
    else:
        check_float(op, name, kernel)
    shape = _modes.along_k(kernel).shape if is_frozen(kernel) else kernel.shape
    if len(shape) != 2 + grouped:
        needs, why = ("[g, k, n]", "each group has a matrix") if grouped else ("[k, n]", "it is one matrix")
        fix = "jnp.stack of the matrices" if grouped else "jax_fp4.grouped_dense or jax.vmap for stacked kernels"
        raise ValueError(message(op, name, f"of shape {shape}", needs, why, fix))
    shape = placement.gathered_shape(shape)
    if shape[-2] != rows:
        fix = f"a kernel of shape {(*shape[:-2], rows, shape[-1])}"
        raise ValueError(
            message(op, name, f"of shape {shape}", f"{rows} rows", f"{of} is contracted along its last axis", fix)
        )
    return shape


def check_placement(
    op: str, kernel: Any, shape: tuple[int, ...], recipe: Recipe | None, placement: Placement,
    names: tuple[str, str] = ("gather", "specs"),
) -> None:  # fmt: skip
    """Refuse what would quantize other blocks than those of the global operands. shape: of the gathered kernel."""
    if placement.gathers:
        shard = _modes.along_k(kernel).shape if is_frozen(kernel) else kernel.shape
        check_payload(op, names[0], shard, recipe, placement, is_frozen(kernel))
    if not placement.kernel.dims:
        return
    k, n = shape[-2:]
    cut_k, cut_n = placement.kernel.dims[-2:]
    products: tuple[tuple[Product, Operand], ...] = (
        ("forward", "x"),
        ("forward", "kernel"),
        ("dgrad", "dy"),
        ("dgrad", "kernel"),
    )
    runs = 2 if placement.y.halves else 1
    for product, operand in products:
        scaling = scaling_of(recipe, product, operand)
        if scaling is None:
            continue
        along_k, along_n = (scaling.length, scaling.tile) if product == "forward" else (scaling.tile, scaling.length)
        for extent, axes, length in ((k, cut_k, along_k), (n, cut_n, along_n * runs)):
            if axes and extent % length:
                shown = f"{extent} of {extent * size_of(axes)} a device, along {', '.join(axes)}"
                why = f"{operand} is quantized in blocks of {length}, and none may lie on two devices"
                fix = f"a multiple of {length}, or an operand that is not cut there"
                raise ValueError(message(op, f"{names[1]}.kernel", f"of {shown}", f"a multiple of {length}", why, fix))


def check_bias(op: str, name: str, bias, shape: tuple[int, ...]) -> None:
    """A bias [n], or [g, n], for a kernel of `shape`; or None."""
    if bias is None:
        return
    check_float(op, name, bias)
    need = (*shape[:-2], shape[-1])
    if bias.shape != need:
        why = "it is added to every row of y" + (" of its group" if len(need) > 1 else "")
        raise ValueError(message(op, name, f"of shape {bias.shape}", f"{need}", why, f"{name}=None"))


def _is_pair(kernel: tuple) -> bool:
    return len(kernel) == 2 and all(isinstance(q, QuantizedTensor) for q in kernel)


def _check_frozen(op: str, name: str, kernel, grouped: bool) -> None:
    pair = kernel if isinstance(kernel, tuple) else (None, kernel)
    if isinstance(kernel, tuple) and not _is_pair(kernel):
        needs, why = "the pair (blocked along n, blocked along k)", "these are the two planes of a frozen kernel"
        raise TypeError(message(op, name, "a tuple", needs, why, "quantize_transpose(w)"))
    batch = ", batch_dims=1" if grouped else ""
    for q, axis in zip(pair, (-1, 0), strict=True):
        if q is None:
            continue
        check_quantized(op, name, q)
        amax = q.amax if q.format == "nvfp4" else q.block_scale
        own_amax = not grouped or (len(q.shape) == 3 and amax.shape[:1] == q.shape[:1])
        if q.axis != axis or q.hadamard or q.row_scaled or q.grouped or not own_amax:
            shown = f"{q!r}{' (Hadamard-transformed)' if q.hadamard else ''}"
            needs = f"axis={axis}, one amax{' for each group' if grouped else ''} and no transform"
            fix = f"quantize(w, axis=0{batch}), or the pair quantize_transpose(w{batch})"
            raise ValueError(message(op, name, shown, needs, "the forward contracts k", fix))
    if pair[0] is not None and pair[0].shape != pair[1].shape:
        shown = f"a pair of shapes {pair[0].shape} and {pair[1].shape}"
        why, fix = "they are two planes of one kernel", f"quantize_transpose(w{batch})"
        raise ValueError(message(op, name, shown, "one shape", why, fix))


def check_padding(
    op: str, recipe: Recipe | None, k: int, n: int, m: int | None = None, names: tuple[str, str] = ("x", "kernel")
) -> None:
    """Under strict(), every extent that the forward or the backward would pad, said at the forward. The rows of groups
    are data, and padded as they come. names: of the arguments with the extents k and n."""
    if recipe is None or not is_strict():
        return
    extents = {names[0]: k, names[1]: n, "x (rows)": m}
    products: tuple[tuple[str, Product, Operand], ...] = (
        (names[0], "forward", "x"),
        (names[1], "dgrad", "dy"),
        ("x (rows)", "wgrad", "dy"),
    )
    for name, product, operand in products:
        scaling, extent = scaling_of(recipe, product, operand), extents[name]
        if scaling is not None and extent is not None and extent % scaling.length:
            refuse_padding(op, name, f"extent {extent}", scaling.length)
