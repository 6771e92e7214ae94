"""Linen layers that take the place of Flax's: `from jax_fp4 import linen`, then linen.Dense for nn.Dense.

Signatures are Flax's and `recipe` at the end. Parameters, their names, initial values, metadata and the use of random
streams are Flax's, whether quantization is on or off; without a recipe, and without autocast, a layer runs Flax's code.
`linen.quantized` does the same for a model of Flax's own layers. Under autocast(Rules) the path of a layer is that of
its parameters, "block3/mlp/Dense_0".
Stochastic rounding draws from the stream "sr" (`model.apply(variables, x, rngs={"sr": key})`, and
`split_rngs={"sr": True}` in lifted transformations). Without the stream a layer can be evaluated; differentiated, it
says what is missing.
DelayedScaling keeps its state in the collection "fp4_state", one for each layer, which `init` makes and a step updates:

    grads = jax.grad(lambda v: loss(model.apply(v, batch)))({"params": params, "fp4_state": states})
    states = jax_fp4.delayed.update(states, grads["fp4_state"])    # the optimizer sees grads["params"] alone
"""

import contextlib
import inspect
import math
from typing import Any, no_type_check

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
from flax.linen.dtypes import canonicalize_dtype

from jax_fp4 import _dot_general, _record, checkpoints, delayed
from jax_fp4._activations import Activation, activation_of
from jax_fp4._choosing import Rules, autocast, resolve
from jax_fp4._dot_general import check_layer, increasing, layer_product, layer_recipe
from jax_fp4._errors import message
from jax_fp4._grouped_dense import grouped_dense
from jax_fp4._grouped_mlp import States, recipe_of_second
from jax_fp4._layernorm_dense import layernorm_dense
from jax_fp4._mlp import layernorm_mlp
from jax_fp4._moe import MoESpecs, drawing_recipe, expert_init, layer_moe
from jax_fp4._norm import has_norm_bias, norm_settings, scale_init_of
from jax_fp4._placement import Specs
from jax_fp4._recipe import HIGH_PRECISION, DelayedScaling, Recipe, RecipeChoice, check_recipe, draws

STATES = "fp4_state"

checkpoints.register_with(flax.serialization)

# Flax's own code. Without Flax's wrapper: ours runs already, a second one would capture intermediates twice.
_flax_dense = inspect.unwrap(nn.Dense.__call__)
_flax_dense_general = inspect.unwrap(nn.DenseGeneral.__call__)
_promote_dtype = nn.Dense.promote_dtype


@no_type_check  # Flax's annotations (protocols) are not for checking at run time, as our tests do
class Dense(nn.Dense):
    """`flax.linen.Dense` with a recipe: x [..., k] -> y [..., features].

    recipe: None takes autocast's, HIGH_PRECISION none. With one in force the three products are those of
    `jax_fp4.dense`: kernel and bias take part in their own dtype (a float32 kernel is rounded inside, its gradient is
    float32), the bias is added in float32, `precision` has no meaning. Raises TypeError for a wrong recipe and
    ValueError for a recipe beside dot_general or dot_general_cls when the layer is made (when it is called, for a
    recipe that comes from autocast), and what `jax_fp4.dense` raises.
    """

    recipe: RecipeChoice | None = None

    def __post_init__(self):
        check_layer(self, self.recipe, dot_general=self.dot_general, dot_general_cls=self.dot_general_cls)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs):
        return _dense(self, inputs)


@no_type_check
class DenseGeneral(nn.DenseGeneral):
    """`flax.linen.DenseGeneral` with a recipe: contracts `axis`, each entry of `batch_dims` with a kernel of its own.

    The recipe as in `Dense`; each batch entry has amaxes of its own. Contracted axes are blocked in increasing order.
    """

    recipe: RecipeChoice | None = None

    def __post_init__(self):
        check_layer(self, self.recipe, dot_general=self.dot_general, dot_general_cls=self.dot_general_cls)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs):
        return _dense_general(self, inputs)


@no_type_check
class GroupedDense(nn.Module):
    """`jax_fp4.grouped_dense` as a layer: x [..., k], group_sizes int32 [num_groups] -> y [..., features].

    Parameters: kernel [num_groups, k, features] and bias [num_groups, features]. dtype is the compute dtype, as in
    nn.Dense. recipe: None takes autocast's, HIGH_PRECISION none. Draws from the stream "sr" where dy is rounded
    stochastically. specs: on a mesh of Auto axes, how x and the kernel are cut, as in `grouped_dense`. Raises TypeError
    for a wrong recipe when the layer is made, and what `grouped_dense` raises.
    """

    features: int
    num_groups: int
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = expert_init
    bias_init: Any = nn.initializers.zeros_init()
    recipe: RecipeChoice | None = None
    specs: Specs | None = None

    def __post_init__(self):
        check_recipe("GroupedDense", self.recipe)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs, group_sizes):
        shape = (self.num_groups, jnp.shape(inputs)[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = self.param("bias", self.bias_init, shape[::2], self.param_dtype) if self.use_bias else None
        x = jnp.asarray(inputs, canonicalize_dtype(inputs, kernel, bias, dtype=self.dtype))
        with _record.layer("/".join(self.path)):
            recipe = resolve("GroupedDense", self.recipe)
            key, state = _key(self, recipe), _state(self, recipe, shape=(self.num_groups,))
            how: dict[str, Any] = dict(recipe=self.recipe, key=key, state=state, specs=self.specs)
            return grouped_dense(x, kernel, group_sizes, bias, **how)


@no_type_check
class LayerNormDense(nn.Module):
    """`jax_fp4.layernorm_dense` as a layer: a norm and the nn.Dense after it, x [..., k] -> y [..., features].

    Parameters: scale [k], norm_bias [k] (use_norm_bias; None: where norm is "layernorm"), kernel [k, features] and bias
    [features] (use_bias). Initial values are those of nn.LayerNorm (or nn.RMSNorm) and nn.Dense; a zero-centered scale
    starts at 0. dtype is the compute dtype, as in nn.Dense; inputs are rounded to it before the norm, whose statistics
    are float32. recipe: None takes autocast's, HIGH_PRECISION none. Draws from the stream "sr" where dy is rounded
    stochastically. Raises TypeError for a wrong recipe when the layer is made, and what `layernorm_dense` raises.
    """

    features: int
    norm: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_scale: bool = False
    use_norm_bias: bool | None = None
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    scale_init: Any = None
    norm_bias_init: Any = nn.initializers.zeros_init()
    kernel_init: Any = nn.Dense.kernel_init
    bias_init: Any = nn.initializers.zeros_init()
    recipe: RecipeChoice | None = None

    def __post_init__(self):
        check_recipe("LayerNormDense", self.recipe)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs):
        shape = (jnp.shape(inputs)[-1], self.features)
        scale, norm_bias = _norm_parameters(self, shape[0])
        kernel = self.param("kernel", self.kernel_init, shape, self.param_dtype)
        bias = self.param("bias", self.bias_init, shape[1:], self.param_dtype) if self.use_bias else None
        x = jnp.asarray(inputs, canonicalize_dtype(inputs, scale, norm_bias, kernel, bias, dtype=self.dtype))
        with _record.layer("/".join(self.path)):
            recipe = resolve("LayerNormDense", self.recipe)
            how: dict[str, Any] = norm_settings(self) | dict(
                recipe=self.recipe, key=_key(self, recipe), state=_state(self, recipe)
            )
            return layernorm_dense(x, scale, norm_bias, kernel, bias, **how)


@no_type_check
class LayerNormMLP(nn.Module):
    """`jax_fp4.layernorm_mlp` as a layer: x [..., k] -> y [..., out_features], with `features` hidden units.

    Parameters: scale and norm_bias as in `LayerNormDense`; w_in [k, 2 features] (gate columns first; no factor 2 where
    the activation has no gate), w_out [features, out_features]; with use_bias b_in and b_out. out_features: None is k.
    recipe: of both products, unless out_recipe is given for the second. The rest as in `LayerNormDense`. Raises
    TypeError for a wrong recipe when the layer is made, and what `layernorm_mlp` raises.
    """

    features: int
    out_features: int | None = None
    activation: str | Activation = "swiglu"
    norm: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_scale: bool = False
    use_norm_bias: bool | None = None
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    scale_init: Any = None
    norm_bias_init: Any = nn.initializers.zeros_init()
    kernel_init: Any = nn.Dense.kernel_init
    out_kernel_init: Any = nn.Dense.kernel_init
    bias_init: Any = nn.initializers.zeros_init()
    recipe: RecipeChoice | None = None
    out_recipe: RecipeChoice | None = None

    def __post_init__(self):
        for name in ("recipe", "out_recipe"):
            check_recipe("LayerNormMLP", getattr(self, name), name)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs):
        k = jnp.shape(inputs)[-1]
        hidden = self.features * (2 if activation_of("LayerNormMLP", self.activation).gated else 1)
        out = k if self.out_features is None else self.out_features
        scale, norm_bias = _norm_parameters(self, k)
        w_in = self.param("w_in", self.kernel_init, (k, hidden), self.param_dtype)
        w_out = self.param("w_out", self.out_kernel_init, (self.features, out), self.param_dtype)
        b_in = self.param("b_in", self.bias_init, (hidden,), self.param_dtype) if self.use_bias else None
        b_out = self.param("b_out", self.bias_init, (out,), self.param_dtype) if self.use_bias else None
        x = jnp.asarray(inputs, canonicalize_dtype(inputs, scale, norm_bias, w_in, dtype=self.dtype))
        settings = norm_settings(self) | {n: getattr(self, n) for n in ("activation", "recipe", "out_recipe")}
        with _record.layer("/".join(self.path)):
            settings["key"] = _key(self, drawing_recipe("LayerNormMLP", self.recipe, self.out_recipe))
            settings["state"] = _states(self, ())
            return layernorm_mlp(x, scale, norm_bias, w_in, w_out, b_in=b_in, b_out=b_out, **settings)


def _widened_kernel(*operands, dtype=None, inexact=True) -> list[Any]:
    """For a product of x as it is and a float32 kernel: in float32, and what is kept for its backward is x as it is."""
    x, kernel, bias = operands
    return [x, kernel.astype(jnp.float32), bias]


@no_type_check
class MoE(nn.Module):
    """A dropless mixture of experts: x [..., d] -> (y [..., out_features], Routing).

    Each token goes through top_k of num_experts two-layer MLPs with `features` hidden units (`jax_fp4.moe`).
    Parameters: router/kernel [d, num_experts]; w_in [num_experts, d, 2 features] (gate columns first; no factor 2 where
    the activation has no gate), w_out [num_experts, features, out_features]; with use_bias b_in and b_out.
    out_features: None is d. score, normalize, expert_groups, top_expert_groups, scale: how `jax_fp4.route` chooses and
        weighs.
    recipe, out_recipe: of the two products of the experts. router_recipe: of the router, which is computed in float32
        and left alone by default, under autocast too.
    specs: on a mesh of Auto axes, how tokens and kernels are cut, a pair as in `jax_fp4.moe`. Explicit axes need none.
    selection_bias, of the call: [num_experts], added to the scores for choosing only.

    Add the aux_loss of the returned Routing, times a small factor, to the loss. Draws from the stream "sr" where dy is
    rounded stochastically. Raises TypeError for a wrong recipe when the layer is made, and what `jax_fp4.moe` raises.
    """

    num_experts: int
    features: int
    top_k: int = 2
    out_features: int | None = None
    activation: str | Activation = "swiglu"
    use_bias: bool = False
    score: str = "softmax"
    normalize: bool = True
    expert_groups: int | None = None
    top_expert_groups: int | None = None
    scale: float = 1.0
    dtype: Any = None
    param_dtype: Any = jnp.float32
    router_init: Any = nn.Dense.kernel_init
    kernel_init: Any = expert_init
    out_kernel_init: Any = expert_init
    bias_init: Any = nn.initializers.zeros_init()
    recipe: RecipeChoice | None = None
    out_recipe: RecipeChoice | None = None
    router_recipe: RecipeChoice | None = HIGH_PRECISION
    specs: MoESpecs = None

    def __post_init__(self):
        for name in ("recipe", "out_recipe", "router_recipe"):
            check_recipe("MoE", getattr(self, name), name)
        super().__post_init__()

    @nn.compact
    def __call__(self, inputs, *, selection_bias=None):
        d, g = jnp.shape(inputs)[-1], self.num_experts
        hidden = self.features * (2 if activation_of("MoE", self.activation).gated else 1)
        out = d if self.out_features is None else self.out_features
        w_in = self.param("w_in", self.kernel_init, (g, d, hidden), self.param_dtype)
        w_out = self.param("w_out", self.out_kernel_init, (g, self.features, out), self.param_dtype)
        b_in = self.param("b_in", self.bias_init, (g, hidden), self.param_dtype) if self.use_bias else None
        b_out = self.param("b_out", self.bias_init, (g, out), self.param_dtype) if self.use_bias else None
        router = Dense(
            g,
            use_bias=False,
            promote_dtype=_widened_kernel,
            precision="highest",
            param_dtype=self.param_dtype,
            kernel_init=self.router_init,
            recipe=self.router_recipe,
            name="router",
        )
        logits = router(inputs)
        x = jnp.asarray(inputs, canonicalize_dtype(inputs, w_in, dtype=self.dtype))
        with _record.layer("/".join(self.path)):
            key = _key(self, drawing_recipe("MoE", self.recipe, self.out_recipe))
            return layer_moe(self, x, logits, w_in, w_out, b_in, b_out, key, _states(self, (g,)), selection_bias)


@no_type_check
class DotGeneral(nn.Module):
    """`jax_fp4.DotGeneral` as a module, for the `dot_general_cls` of any Flax layer. It has no parameters.

    Under autocast the class itself will do, `nn.Dense(64, dot_general_cls=linen.DotGeneral)`; with a recipe,
    `dot_general_cls=functools.partial(linen.DotGeneral, recipe=recipe)`. Draws from the stream "sr" where dy is rounded
    stochastically. Rules match its own path, "Dense_0/DotGeneral_0".
    """

    recipe: RecipeChoice | None = None

    def __post_init__(self):
        check_recipe("linen.DotGeneral", self.recipe)
        super().__post_init__()

    @nn.compact
    def __call__(self, lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None, *, out_sharding=None):
        with _record.layer("/".join(self.path)):
            recipe = resolve("linen.DotGeneral", self.recipe)
            dot_general = _dot_general.DotGeneral(self.recipe, _key(self, recipe), _state(self, recipe))
            return dot_general(
                lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
            )


# --- models of Flax's own layers ---

# Part of jit's cache key: a function traced under autocast(rules) alone is traced again with its layers replaced.
_replaced = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def quantized(recipe: RecipeChoice | Rules):
    """Context: `flax.linen.Dense` and `DenseGeneral` in any model compute as the layers of this module, as chosen by
    autocast(recipe).

        with linen.quantized(fp4.Rules([(".*/mlp/.*", recipe)])):
            variables = model.init(rngs, x)
            y = model.apply(variables, x, rngs={"sr": key})

    Parameters, their names and initial values, and other random streams are those of the model without it; the path of
    a layer is that of its parameters. Subclasses are included as far as they use Flax's `__call__`. Other layers
    (Conv, Einsum, Embed) are left alone and are not in the report. Functions that were jitted by the caller are traced
    again inside. Raises ValueError for a layer with a dot_general of its own, unless HIGH_PRECISION is chosen for it.
    """
    with autocast(recipe), _replaced(True), nn.intercept_methods(_replace):
        yield


def _replace(next_function, args, kwargs, context):
    """What a method call of any module becomes."""
    ours = _REPLACEMENTS.get(getattr(context.orig_method, "func", None))
    return next_function(*args, **kwargs) if ours is None else ours(context.module, *args, **kwargs)


def _dense(layer: Any, inputs):
    """The call of a Dense, Flax's or ours, inside its compact method."""
    shape = (jnp.shape(inputs)[-1], layer.features)
    with _record.layer("/".join(layer.path)):
        recipe = layer_recipe(layer, jnp.shape(inputs), shape)
        if recipe is None:
            return _flax_dense(layer, inputs)
        kernel = layer.param("kernel", layer.kernel_init, shape, layer.param_dtype)
        bias = layer.param("bias", layer.bias_init, shape[1:], layer.param_dtype) if layer.use_bias else None
        return _product(layer, recipe, (inputs, kernel, bias), (-1,), ())


def _dense_general(layer: Any, inputs):
    """The call of a DenseGeneral, Flax's or ours, inside its compact method."""
    x_shape = jnp.shape(inputs)
    features, axis, batch_dims = map(_tuple, (layer.features, layer.axis, layer.batch_dims))
    if sorted(batch_dims) != list(range(len(batch_dims))):
        why, fix = "the kernel leads with them", "a transpose"
        raise ValueError(message("DenseGeneral", "batch_dims", batch_dims, "0, 1, ...", why, fix))
    batch = tuple(x_shape[a] for a in increasing(batch_dims, len(x_shape)))
    contracted = tuple(x_shape[a] for a in increasing(axis, len(x_shape)))
    with _record.layer("/".join(layer.path)):
        recipe = layer_recipe(layer, x_shape, (*batch, *contracted, *features))
        if recipe is None:
            return _flax_dense_general(layer, inputs)
        k, n, b = map(math.prod, (contracted, features, batch))
        kernel = layer.param(
            "kernel", _flat(layer.kernel_init, (b * k, n)), (*batch, *contracted, *features), layer.param_dtype
        )
        bias = None
        if layer.use_bias:
            bias = layer.param("bias", _flat(layer.bias_init, (b * n,)), (*batch, *features), layer.param_dtype)
        return _product(layer, recipe, (inputs, kernel, bias), axis, batch_dims)


_REPLACEMENTS = {_flax_dense: _dense, _flax_dense_general: _dense_general}


def _product(layer: Any, recipe: Recipe, operands, axis, batch_dims):
    promoted = layer.promote_dtype(*operands, dtype=layer.dtype)
    how = dict(key=_key(layer, recipe), state=_state(layer, recipe))
    return layer_product(layer, operands, promoted, _promote_dtype, axis, batch_dims, **how)


def _norm_parameters(layer: Any, k: int):
    """scale, and norm_bias or None."""
    scale = layer.param("scale", scale_init_of(layer), (k,), layer.param_dtype)
    has_bias = has_norm_bias(layer)
    return scale, layer.param("norm_bias", layer.norm_bias_init, (k,), layer.param_dtype) if has_bias else None


def _key(module: nn.Module, recipe: Recipe | None):
    """A key of the stream "sr" where the recipe rounds stochastically. None without the stream: `dense` raises, but
    only where it is differentiated."""
    return module.make_rng("sr") if recipe is not None and draws(recipe) and module.has_rng("sr") else None


def _state(module: nn.Module, recipe: Recipe | None, name: str = "state", shape: tuple[int, ...] = ()):
    """The module's own of the collection "fp4_state", where the recipe has a state; made by `init`."""
    if not isinstance(recipe, DelayedScaling):
        return None
    if not (module.has_variable(STATES, name) or module.is_mutable_collection(STATES)):
        given, fix = f"without {'/'.join((*module.path, name))}", "what model.init gave under the same recipe"
        why = "DelayedScaling quantizes with the scales that it holds"
        raise ValueError(message(type(module).__name__, f"the collection {STATES!r}", given, "a state", why, fix))
    return module.variable(STATES, name, delayed.init, recipe, shape).value


def _states(module: Any, shape: tuple[int, ...]) -> States:
    """Of the two products of an MLP."""
    op = type(module).__name__
    first, second = resolve(op, module.recipe), resolve(op, recipe_of_second(module.recipe, module.out_recipe))
    return _state(module, first, "state_in", shape), _state(module, second, "state_out", shape)


def _flat(init, flat_shape: tuple[int, ...]):
    """Flax draws the kernel of DenseGeneral as the matrix [batch x in, out] (fan-in counts), and then reshapes it."""

    def wrapped(rng, shape, dtype=jnp.float32):
        value = init(rng, flat_shape, dtype)
        if isinstance(value, nn.meta.AxisMetadata):
            return nn.meta.replace_boxed(value, jnp.reshape(value.unbox(), shape))
        return jnp.reshape(value, shape)

    return wrapped


def _tuple(axes) -> tuple[int, ...]:
    return tuple(axes) if hasattr(axes, "__iter__") else (axes,)
