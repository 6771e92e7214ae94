"""NNX layers that take the place of Flax's: `from jax_fp4 import nnx`, then nnx.Linear for flax.nnx.Linear.

Signatures are Flax's and `recipe`; calls take `key` too. Parameters and their initial values are Flax's, whether
quantization is on or off; without a recipe, and without autocast, a layer runs Flax's code. `nnx.quantize_model` turns
the layers of a model of Flax's into these, with recipes chosen by path; a layer does not know its path by itself, so
one without a recipe raises ValueError under autocast(Rules).
"""

import contextlib
import difflib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, no_type_check

import flax.serialization
import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from flax.nnx.nn.dtypes import canonicalize_dtype, promote_dtype

from jax_fp4 import _record, checkpoints, delayed
from jax_fp4._activations import Activation, activation_of
from jax_fp4._choosing import Rules, resolve
from jax_fp4._dot_general import check_layer, layer_product, layer_recipe
from jax_fp4._errors import UnsupportedError, message
from jax_fp4._grouped_dense import grouped_dense
from jax_fp4._grouped_mlp import States, recipe_of_second
from jax_fp4._layernorm_dense import layernorm_dense
from jax_fp4._meshes import constrained
from jax_fp4._mlp import layernorm_mlp
from jax_fp4._moe import MoESpecs, drawing_recipe, expert_init, layer_moe
from jax_fp4._norm import has_norm_bias, norm_settings, scale_init_of
from jax_fp4._placement import Specs
from jax_fp4._recipe import HIGH_PRECISION, DelayedScaling, Recipe, RecipeChoice, check_recipe, draws

checkpoints.register_with(flax.serialization)


class DelayedState(nnx.Variable):
    """What DelayedScaling remembers of one product of a layer, a `jax_fp4.delayed.State`.

    No parameter, so optimizers do not see it. Its "gradient" is the state after the step:

        wrt = nnx.DiffState(0, nnx.Any(nnx.Param, DelayedState))
        grads = nnx.grad(loss, argnums=wrt)(model, batch)
        params, states = nnx.split_state(grads, nnx.Param, DelayedState)
        optimizer.update(model, params)
        nnx.update(model, jax_fp4.delayed.update(nnx.state(model, DelayedState), states))
    """


_SR = 0x7372  # "sr", folded into the key of a default stream


@dataclass(frozen=True)
class _Place:
    """Where `quantize_model` found a layer, and the rule that gave it its recipe. Only the report reads it.

    All places are equal: calls of one jitted function on several blocks share a trace, whatever their paths.
    """

    path: str = field(compare=False)
    rule: tuple[str, RecipeChoice] | None = field(compare=False)


def _placed(layer):
    """The events inside belong to this layer."""
    place = layer.place
    return contextlib.nullcontext() if place is None else _record.layer(place.path, place.rule, True)


def _signature_of(flax_class: type):
    """Give an __init__ that passes everything on the signature of Flax's, and `recipe`."""

    def decorate(init):
        signature = inspect.signature(flax_class.__init__)
        recipe = inspect.signature(init).parameters["recipe"]
        init.__signature__ = signature.replace(parameters=[*signature.parameters.values(), recipe])
        return init

    return decorate


class Linear(nnx.Linear):
    """`flax.nnx.Linear` with a recipe: x [..., in_features] -> y [..., out_features].

    recipe: None takes autocast's, HIGH_PRECISION none. With one in force the three products are those of
    `jax_fp4.dense`: kernel and bias take part in their own dtype (a float32 kernel is rounded inside, its gradient is
    float32), the bias is added in float32 and `precision` has no meaning.

    Stochastic rounding of dy takes the `key` of the call, or else draws from `self.sr`, a stream of the layer's own,
    there if `rngs` has a stream `sr` or a default one. (The default stream is not advanced: later layers get Flax's
    initial values.) Where there is no key (no stream, or one of another trace level, as when jax.jit closes over the
    layer) the layer can be evaluated; differentiated, it raises ValueError.

    Raises TypeError for a wrong recipe and ValueError for a recipe beside dot_general when the layer is made (when it
    is called, for a recipe that comes from autocast), and what `jax_fp4.dense` raises.
    """

    place: _Place | None = None
    state: Any = None

    @no_type_check  # a wrong recipe is for check_layer to refuse, in the tests too
    @_signature_of(nnx.Linear)
    def __init__(self, *args, rngs: nnx.Rngs, recipe: RecipeChoice | None = None, **kwargs):
        check_layer(self, recipe, dot_general=kwargs.get("dot_general"))
        super().__init__(*args, rngs=rngs, **kwargs)
        self.recipe = recipe
        self.sr = _stream(rngs)
        _add_states(self)

    def __call__(self, inputs, out_sharding=None, *, key=None):
        with _placed(self):
            recipe = layer_recipe(self, jnp.shape(inputs), self.kernel.shape)
            if recipe is None:
                return super().__call__(inputs, out_sharding)
            return _product(self, recipe, inputs, (-1,), (), out_sharding, key)


class LinearGeneral(nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral` with a recipe: contracts `axis`, each entry of `batch_axis` with a kernel of its own.

    The recipe and the key as in `Linear`; each batch entry has amaxes of its own. Contracted axes are blocked in
    increasing order.
    """

    place: _Place | None = None
    state: Any = None

    @no_type_check
    @_signature_of(nnx.LinearGeneral)
    def __init__(self, *args, rngs: nnx.Rngs, recipe: RecipeChoice | None = None, **kwargs):
        own = {name: kwargs.get(name) for name in ("dot_general", "dot_general_cls")}
        check_layer(self, recipe, **own)
        super().__init__(*args, rngs=rngs, **kwargs)
        self.recipe = recipe
        self.sr = _stream(rngs)
        _add_states(self)

    def __call__(self, inputs, out_sharding=None, *, key=None):
        with _placed(self):
            recipe = layer_recipe(self, jnp.shape(inputs), self.kernel.shape)
            if recipe is None:
                return super().__call__(inputs, out_sharding)
            return _product(self, recipe, inputs, self.axis, tuple(self.batch_axis), out_sharding, key)


_lecun_normal, _zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros_init()


@no_type_check
class GroupedLinear(nnx.Module):
    """`jax_fp4.grouped_dense` as a layer: x [..., in_features], group_sizes int32 [num_groups] -> [..., out_features].

    Parameters: kernel [num_groups, in_features, out_features] and bias [num_groups, out_features]. dtype is the compute
    dtype, as in nnx.Linear. The recipe and the key as in `Linear`. specs: on a mesh of Auto axes, how x and the
    kernel are cut, as in `grouped_dense`. Raises TypeError for a wrong recipe when the layer is made, and what
    `grouped_dense` raises.
    """

    place: _Place | None = None
    state: Any = None

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = expert_init,
        bias_init: Any = _zeros,
        rngs: nnx.Rngs,
        kernel_metadata: Any = None,
        bias_metadata: Any = None,
        recipe: RecipeChoice | None = None,
        specs: Specs | None = None,
    ):
        check_recipe("GroupedLinear", recipe)
        shape = (num_groups, in_features, out_features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype), **(kernel_metadata or {}))
        self.bias = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), shape[::2], param_dtype), **(bias_metadata or {}))
        self.num_groups, self.in_features, self.out_features = shape
        self.dtype, self.recipe, self.specs, self.sr = dtype, recipe, specs, _stream(rngs)
        _add_states(self)

    def __call__(self, inputs, group_sizes, *, key=None):
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        x = jnp.asarray(inputs, canonicalize_dtype(inputs, kernel, bias, dtype=self.dtype))
        with _placed(self):
            recipe = resolve("GroupedLinear", self.recipe)
            if key is None and recipe is not None and draws(recipe):
                key = _draw(self.sr)
            state = _state(self, recipe)
            how: dict[str, Any] = dict(recipe=self.recipe, key=key, state=state, specs=self.specs)
            return grouped_dense(x, kernel, group_sizes, bias, **how)


@no_type_check
class LayerNormLinear(nnx.Module):
    """`jax_fp4.layernorm_dense` as a layer: a norm and the nnx.Linear after it, x [..., in_features] ->
    [..., out_features].

    Parameters: scale [in_features], norm_bias [in_features] (use_norm_bias; None: where norm is "layernorm"), kernel
    [in_features, out_features] and bias [out_features] (use_bias). Initial values are those of nnx.LayerNorm (or
    nnx.RMSNorm) and nnx.Linear, made in this order; a zero-centered scale starts at 0. dtype is the compute dtype, as
    in nnx.Linear; inputs are rounded to it before the norm, whose statistics are float32. The recipe and the key as in
    `Linear`. Raises TypeError for a wrong recipe when the layer is made, and what `layernorm_dense` raises.
    """

    place: _Place | None = None
    state: Any = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        norm: str = "layernorm",
        epsilon: float = 1e-6,
        zero_centered_scale: bool = False,
        use_norm_bias: bool | None = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        scale_init: Any = None,
        norm_bias_init: Any = _zeros,
        kernel_init: Any = _lecun_normal,
        bias_init: Any = _zeros,
        rngs: nnx.Rngs,
        kernel_metadata: Any = None,
        bias_metadata: Any = None,
        scale_metadata: Any = None,
        norm_bias_metadata: Any = None,
        recipe: RecipeChoice | None = None,
    ):
        check_recipe("LayerNormLinear", recipe)
        self.in_features, self.out_features, self.param_dtype = in_features, out_features, param_dtype
        self.norm, self.epsilon, self.zero_centered_scale = norm, epsilon, zero_centered_scale
        self.use_norm_bias, self.scale_init, self.norm_bias_init = use_norm_bias, scale_init, norm_bias_init
        _add_norm(self, in_features, rngs, scale_metadata, norm_bias_metadata)
        self.kernel = _param(self, kernel_init, (in_features, out_features), rngs, kernel_metadata)
        self.bias = _param(self, bias_init, (out_features,), rngs, bias_metadata) if use_bias else nnx.data(None)
        self.dtype, self.recipe, self.sr = dtype, recipe, _stream(rngs)
        _add_states(self)

    def __call__(self, inputs, *, key=None):
        parameters = _values(self, "scale", "norm_bias", "kernel", "bias")
        x = jnp.asarray(inputs, canonicalize_dtype(inputs, *parameters, dtype=self.dtype))
        with _placed(self):
            recipe = resolve("LayerNormLinear", self.recipe)
            if key is None and recipe is not None and draws(recipe):
                key = _draw(self.sr)
            how: dict[str, Any] = norm_settings(self) | dict(recipe=self.recipe, key=key, state=_state(self, recipe))
            return layernorm_dense(x, *parameters, **how)


@no_type_check
class LayerNormMLP(nnx.Module):
    """`jax_fp4.layernorm_mlp` as a layer: x [..., in_features] -> y [..., out_features], with `features` hidden units.

    Parameters: scale and norm_bias as in `LayerNormLinear`; w_in [in_features, 2 features] (gate columns first; no
    factor 2 where the activation has no gate), w_out [features, out_features]; with use_bias b_in and b_out.
    out_features: None is in_features. recipe: of both products, unless out_recipe is given for the second. The rest as
    in `LayerNormLinear`. Raises TypeError for a wrong recipe when the layer is made, and what `layernorm_mlp` raises.
    """

    place: _Place | None = None
    state_in: Any = None
    state_out: Any = None

    def __init__(
        self,
        in_features: int,
        features: int,
        *,
        out_features: int | None = None,
        activation: str | Activation = "swiglu",
        norm: str = "layernorm",
        epsilon: float = 1e-6,
        zero_centered_scale: bool = False,
        use_norm_bias: bool | None = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        scale_init: Any = None,
        norm_bias_init: Any = _zeros,
        kernel_init: Any = _lecun_normal,
        out_kernel_init: Any = _lecun_normal,
        bias_init: Any = _zeros,
        rngs: nnx.Rngs,
        kernel_metadata: Any = None,
        bias_metadata: Any = None,
        scale_metadata: Any = None,
        norm_bias_metadata: Any = None,
        recipe: RecipeChoice | None = None,
        out_recipe: RecipeChoice | None = None,
    ):
        for name, choice in dict(recipe=recipe, out_recipe=out_recipe).items():
            check_recipe("LayerNormMLP", choice, name)
        hidden = features * (2 if activation_of("LayerNormMLP", activation).gated else 1)
        out = in_features if out_features is None else out_features
        self.activation, self.param_dtype, self.dtype = activation, param_dtype, dtype
        self.norm, self.epsilon, self.zero_centered_scale = norm, epsilon, zero_centered_scale
        self.use_norm_bias, self.scale_init, self.norm_bias_init = use_norm_bias, scale_init, norm_bias_init
        _add_norm(self, in_features, rngs, scale_metadata, norm_bias_metadata)
        self.w_in = _param(self, kernel_init, (in_features, hidden), rngs, kernel_metadata)
        self.w_out = _param(self, out_kernel_init, (features, out), rngs, kernel_metadata)
        self.b_in = _param(self, bias_init, (hidden,), rngs, bias_metadata) if use_bias else nnx.data(None)
        self.b_out = _param(self, bias_init, (out,), rngs, bias_metadata) if use_bias else nnx.data(None)
        self.recipe, self.out_recipe, self.sr = recipe, out_recipe, _stream(rngs)
        _add_states(self)

    def __call__(self, inputs, *, key=None):
        scale, norm_bias, w_in, w_out, b_in, b_out = _values(
            self, "scale", "norm_bias", "w_in", "w_out", "b_in", "b_out"
        )
        x = jnp.asarray(inputs, canonicalize_dtype(inputs, scale, norm_bias, w_in, dtype=self.dtype))
        settings = norm_settings(self) | {n: getattr(self, n) for n in ("activation", "recipe", "out_recipe")}
        with _placed(self):
            if key is None and drawing_recipe("LayerNormMLP", self.recipe, self.out_recipe) is not None:
                key = _draw(self.sr)
            settings |= dict(key=key, state=_states(self))
            return layernorm_mlp(x, scale, norm_bias, w_in, w_out, b_in=b_in, b_out=b_out, **settings)


def _widened_kernel(operands, *, dtype=None):
    """For a product of x as it is and a float32 kernel: in float32, and what is kept for its backward is x as it is."""
    x, kernel, bias = operands
    return x, kernel.astype(jnp.float32), bias


@no_type_check
class MoE(nnx.Module):
    """A dropless mixture of experts: x [..., in_features] -> (y [..., out_features], Routing).

    Each token goes through top_k of num_experts two-layer MLPs with `features` hidden units (`jax_fp4.moe`).
    Parameters: router.kernel [in_features, num_experts]; w_in [num_experts, in_features, 2 features] (gate columns
    first; no factor 2 where the activation has no gate), w_out [num_experts, features, out_features]; with use_bias
    b_in and b_out. out_features: None is in_features. score, normalize, expert_groups, top_expert_groups, scale: how
    `jax_fp4.route` chooses and weighs. recipe, out_recipe: of the two products of the experts. router_recipe: of the
    router, which is computed in float32 and left alone by default, under autocast too. selection_bias, of the call:
    [num_experts], added to the scores for choosing only. specs: on a mesh of Auto axes, how tokens and kernels are cut,
    a pair as in `jax_fp4.moe`; Explicit axes need none. The key as in `Linear`.

    Add the aux_loss of the returned Routing, times a small factor, to the loss. Raises TypeError for a wrong recipe
    when the layer is made, and what `jax_fp4.moe` raises.
    """

    place: _Place | None = None
    state_in: Any = None
    state_out: Any = None

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        features: int,
        *,
        top_k: int = 2,
        out_features: int | None = None,
        activation: str | Activation = "swiglu",
        use_bias: bool = False,
        score: str = "softmax",
        normalize: bool = True,
        expert_groups: int | None = None,
        top_expert_groups: int | None = None,
        scale: float = 1.0,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        router_init: Any = _lecun_normal,
        kernel_init: Any = expert_init,
        out_kernel_init: Any = expert_init,
        bias_init: Any = _zeros,
        rngs: nnx.Rngs,
        kernel_metadata: Any = None,
        bias_metadata: Any = None,
        recipe: RecipeChoice | None = None,
        out_recipe: RecipeChoice | None = None,
        router_recipe: RecipeChoice | None = HIGH_PRECISION,
        specs: MoESpecs = None,
    ):
        for name, choice in dict(recipe=recipe, out_recipe=out_recipe, router_recipe=router_recipe).items():
            check_recipe("MoE", choice, name)
        hidden = features * (2 if activation_of("MoE", activation).gated else 1)
        out = in_features if out_features is None else out_features
        self.router = Linear(
            in_features,
            num_experts,
            use_bias=False,
            param_dtype=param_dtype,
            promote_dtype=_widened_kernel,
            precision="highest",
            kernel_init=router_init,
            rngs=rngs,
            recipe=router_recipe,
        )

        def param(init, shape, metadata):
            return nnx.Param(init(rngs.params(), shape, param_dtype), **(metadata or {}))

        self.w_in = param(kernel_init, (num_experts, in_features, hidden), kernel_metadata)
        self.w_out = param(out_kernel_init, (num_experts, features, out), kernel_metadata)
        self.b_in = param(bias_init, (num_experts, hidden), bias_metadata) if use_bias else nnx.data(None)
        self.b_out = param(bias_init, (num_experts, out), bias_metadata) if use_bias else nnx.data(None)
        self.num_experts, self.top_k, self.activation, self.dtype = num_experts, top_k, activation, dtype
        self.score, self.normalize, self.expert_groups, self.top_expert_groups, self.scale = (
            score,
            normalize,
            expert_groups,
            top_expert_groups,
            scale,
        )
        self.recipe, self.out_recipe, self.sr = recipe, out_recipe, _stream(rngs)
        self.specs = specs
        _add_states(self)

    def __call__(self, inputs, *, selection_bias=None, key=None):
        w_in, w_out, b_in, b_out = (
            None if p is None else p[...] for p in (self.w_in, self.w_out, self.b_in, self.b_out)
        )
        x = jnp.asarray(inputs, canonicalize_dtype(inputs, w_in, dtype=self.dtype))
        # `moe` folds in 0 and 1
        logits = self.router(inputs, key=None if key is None else jax.random.fold_in(key, 2))
        with _placed(self):
            if key is None and drawing_recipe("MoE", self.recipe, self.out_recipe) is not None:
                key = _draw(self.sr)
            return layer_moe(self, x, logits, w_in, w_out, b_in, b_out, key, _states(self), selection_bias)


def _product(layer: Any, recipe: Recipe, inputs, axis, batch_axis, out_sharding, key):
    operands = inputs, layer.kernel[...], None if layer.bias is None else layer.bias[...]
    promoted = layer.promote_dtype(operands, dtype=layer.dtype)
    if key is None and draws(recipe):
        key = _draw(layer.sr)
    how = dict(key=key, state=_state(layer, recipe))
    y = layer_product(layer, operands, promoted, promote_dtype, axis, batch_axis, **how)
    return constrained(y, out_sharding)


# --- models of Flax's own layers ---


def quantize_model(model: nnx.Module, rules: Rules, *, rngs: nnx.Rngs | None = None) -> None:
    """Choose the recipes of a model's layers by path, in place: "blocks/3/mlp/up" is model.blocks[3].mlp.up.

    Every `flax.nnx.Linear` and `LinearGeneral` becomes a layer of this module, the same object with the same
    parameters, so what is shared stays shared; layers of this module get a recipe if they were given none. A layer that
    no rule matches takes autocast's recipe when it is called. Called again, with other rules, it chooses again.

    rngs: what the stochastic rounding of the layers that it changes draws from, its stream `sr` or else its default
        one. Without it their calls need `key` where dy is rounded stochastically.

    Raises, before anything is changed, TypeError for rules that are none, and ValueError for a rule that matches no
    layer, rules that disagree over a layer with several paths, a recipe for a layer with a dot_general of its own, and
    rngs without a stream to draw from; UnsupportedError for a recipe for another subclass of Flax's layers.
    """
    op = "quantize_model"
    if not isinstance(rules, Rules):
        why, fix = "recipes are chosen by path", 'jax_fp4.Rules([(".*", recipe)])'
        raise TypeError(message(op, "rules", repr(rules), "jax_fp4.Rules", why, fix))
    if rngs is not None and not {"sr", "default"} & set(rngs):
        why, fix = "stochastic rounding draws from it", "nnx.Rngs(sr=0)"
        raise ValueError(message(op, "rngs", f"with the streams {(*rngs,)}", "sr or a default stream", why, fix))
    layers = _layers(model)
    _refuse_unmatched(op, rules, [path for _, paths in layers for path in paths])
    places = [_place(op, layer, paths, rules) for layer, paths in layers]
    for (layer, _), place in zip(layers, places, strict=True):
        _install(layer, place, rngs)


_REPLACEMENTS = {nnx.Linear: Linear, nnx.LinearGeneral: LinearGeneral}
_OWN = (Linear, LinearGeneral, GroupedLinear, LayerNormLinear, LayerNormMLP, MoE)


def _layers(model: nnx.Module) -> list[tuple[Any, list[str]]]:
    """Every layer that can have a recipe, once, and all its paths."""
    found: dict[int, tuple[Any, list[str]]] = {}
    for path, node in _nodes(model, (), ()):
        if isinstance(node, (*_REPLACEMENTS, *_OWN)):
            found.setdefault(id(node), (node, []))[1].append("/".join(map(str, path)))
    return list(found.values())


def _nodes(node: Any, path: tuple, above: tuple) -> Iterator[tuple[tuple, Any]]:
    """(path, node) of all modules and plain containers, once for each path. A cycle is not followed."""
    if any(node is other for other in above):
        return
    yield path, node
    if isinstance(node, nnx.Module):
        plain = ((name, value) for name, value in vars(node).items() if isinstance(value, dict | list | tuple))
        children = [*nnx.iter_children(node), *plain]
    elif isinstance(node, dict | list | tuple):
        children = list(node.items() if isinstance(node, dict) else enumerate(node))
    else:
        return
    for name, child in children:
        yield from _nodes(child, (*path, name), (*above, node))


def _refuse_unmatched(op: str, rules: Rules, paths: list[str]) -> None:
    if unmatched := rules.unmatched(paths):
        near = difflib.get_close_matches(unmatched[0], paths, 3, 0.0)
        kinds = ", ".join(each.__name__ for each in _OWN)
        why = f"the nearest paths are {near}" if near else f"the model has no {kinds}"
        needs, fix = "the whole path of a layer", "one of them, or the rules without it"
        raise ValueError(message(op, "rules", f"with {unmatched[0]!r}, which matches nothing", needs, why, fix))


def _place(op: str, layer: Any, paths: list[str], rules: Rules) -> _Place:
    """What the rules say of a layer, and that it can be done."""
    matches = [(path, rule) for path in paths if (rule := rules.match(path))]
    if not matches:
        return _Place(paths[0], None)
    path, rule = matches[0]
    for other, contrary in matches:
        if contrary[1] != rule[1]:
            why, fix = f"{contrary[0]!r} gives it another at {other!r}", "rules that agree on all its paths"
            raise ValueError(message(op, f"{path!r}, a shared layer,", f"given {rule}", "one recipe", why, fix))
    own = {name: getattr(layer, name, None) for name in ("dot_general", "dot_general_cls")}
    check_layer(layer, rule[1], **own)
    if not isinstance(layer, _OWN) and type(layer) not in _REPLACEMENTS and rule[1] is not HIGH_PRECISION:
        shown, needs = f"a {type(layer).__name__}, a subclass", "flax.nnx.Linear or LinearGeneral itself"
        fix = "a rule with HIGH_PRECISION before the others, or a subclass of jax_fp4.nnx's layer"
        raise UnsupportedError(message(op, f"the layer at {path!r}", shown, needs, "its own code would be lost", fix))
    return _Place(path, rule)


def _install(layer: Any, place: _Place, rngs: nnx.Rngs | None) -> None:
    if type(layer) in _REPLACEMENTS:
        # The object stays: whoever refers to it, a second path or an attribute that is no module, sees the new layer.
        layer.__class__ = _REPLACEMENTS[type(layer)]
        layer.recipe, layer.sr = None, nnx.data(None)
        if rngs is not None:
            layer.sr = nnx.RngStream(rngs.sr(), tag="sr")
    if not isinstance(layer, _OWN):
        return
    earlier = layer.place.rule if layer.place is not None else None
    own = layer.recipe is not None and (earlier is None or layer.recipe != earlier[1])
    chosen = None if place.rule is None else place.rule[1]
    if not own and layer.recipe != chosen:
        layer.recipe = chosen
        _add_states(layer)
    layer.place = place


def _add_states(layer: Any) -> None:
    """Give a layer new states where its recipes have any, and take away others."""
    count = getattr(layer, "num_groups", None) or getattr(layer, "num_experts", None)
    for name, recipe in _recipes_by_state(layer).items():
        if isinstance(recipe, DelayedScaling):
            setattr(layer, name, DelayedState(delayed.init(recipe, () if count is None else (count,))))
        elif getattr(layer, name) is not None:
            setattr(layer, name, nnx.data(None))


def _recipes_by_state(layer: Any) -> dict[str, RecipeChoice | None]:
    if hasattr(layer, "state"):
        return {"state": layer.recipe}
    return {"state_in": layer.recipe, "state_out": recipe_of_second(layer.recipe, layer.out_recipe)}


def _state(layer: Any, recipe: Recipe | None, name: str = "state"):
    if not isinstance(recipe, DelayedScaling):
        return None
    variable = getattr(layer, name)
    if variable is None:
        op, why = type(layer).__name__, "DelayedScaling quantizes with the scales that it holds"
        fix = f"{op}(..., recipe=recipe) or quantize_model, which make one; autocast does not"
        raise ValueError(message(op, name, "None", "an nnx.DelayedState", why, fix))
    return variable.get_value()


def _states(layer: Any) -> States:
    """Of the two products of an MLP."""
    op = type(layer).__name__
    first, second = resolve(op, layer.recipe), resolve(op, recipe_of_second(layer.recipe, layer.out_recipe))
    return _state(layer, first, "state_in"), _state(layer, second, "state_out")


def _param(layer: Any, init, shape: tuple[int, ...], rngs: nnx.Rngs, metadata) -> nnx.Param:
    return nnx.Param(init(rngs.params(), shape, layer.param_dtype), **(metadata or {}))


def _add_norm(layer: Any, k: int, rngs: nnx.Rngs, scale_metadata, bias_metadata) -> None:
    """Give a layer its scale, and its norm_bias or None."""
    layer.scale = _param(layer, scale_init_of(layer), (k,), rngs, scale_metadata)
    has_bias = has_norm_bias(layer)
    layer.norm_bias = _param(layer, layer.norm_bias_init, (k,), rngs, bias_metadata) if has_bias else nnx.data(None)


def _values(layer: Any, *names: str) -> list[Any]:
    """The arrays of these parameters, None for one that the layer does not have."""
    return [None if getattr(layer, name) is None else getattr(layer, name)[...] for name in names]


def _stream(rngs: nnx.Rngs):
    """The stream of one layer, or None."""
    if "sr" in rngs:
        return rngs["sr"].fork()
    if "default" not in rngs:
        return nnx.data(None)
    # Not a fork, which would advance the stream that the next layer's parameters may come from. The count of the
    # parameter stream makes it another key for each layer.
    key = jax.random.fold_in(rngs["default"].key[...], rngs.params.count[...])
    return nnx.RngStream(jax.random.fold_in(key, _SR), tag="sr")


def _draw(stream: nnx.RngStream | None):
    """The next key. None where there is none: `dense` raises, but only where it is differentiated."""
    if stream is None:
        return None
    try:
        return stream()
    except TraceContextError:
        return None  # a trace that may not advance the stream, for example jax.jit over a closure
