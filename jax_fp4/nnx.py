"""NNX layers that take the place of Flax's: `from jax_fp4 import nnx`, then nnx.Linear for flax.nnx.Linear.

Signatures are Flax's and `recipe`; calls take `key` too. Parameters and their initial values are Flax's, whether
quantization is on or off; without a recipe, and without autocast, a layer runs Flax's code.
"""

import inspect
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from flax.nnx.nn.dtypes import promote_dtype

from jax_fp4._dot_general import check_layer, draws, layer_product, layer_recipe, refuse_out_sharding
from jax_fp4._recipe import Recipe, RecipeChoice

_SR = 0x7372  # "sr", folded into the key of a default stream


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
    float32), the bias is added in float32, `precision` has no meaning and out_sharding raises UnsupportedError.

    Stochastic rounding of dy takes the `key` of the call, or else draws from `self.sr`, a stream of the layer's own,
    there if `rngs` has a stream `sr` or a default one. (The default stream is not advanced: later layers get Flax's
    initial values.) Where there is no key (no stream, or one of another trace level, as when jax.jit closes over the
    layer) the layer can be evaluated; differentiated, it raises ValueError.

    Raises TypeError for a wrong recipe and ValueError for a recipe beside dot_general when the layer is made (when it
    is called, for a recipe that comes from autocast), and what `jax_fp4.dense` raises.
    """

    @no_type_check  # a wrong recipe is for check_layer to refuse, in the tests too
    @_signature_of(nnx.Linear)
    def __init__(self, *args, rngs: nnx.Rngs, recipe: RecipeChoice | None = None, **kwargs):
        check_layer(self, recipe, dot_general=kwargs.get("dot_general"))
        super().__init__(*args, rngs=rngs, **kwargs)
        self.recipe = recipe
        self.sr = _stream(rngs)

    def __call__(self, inputs, out_sharding=None, *, key=None):
        recipe = layer_recipe(self, jnp.shape(inputs), self.kernel.shape)
        if recipe is None:
            return super().__call__(inputs, out_sharding)
        return _product(self, recipe, inputs, (-1,), (), out_sharding, key)


class LinearGeneral(nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral` with a recipe: contracts `axis`, each entry of `batch_axis` with a kernel of its own.

    The recipe and the key as in `Linear`; each batch entry has amaxes of its own. Contracted axes are blocked in
    increasing order.
    """

    @no_type_check
    @_signature_of(nnx.LinearGeneral)
    def __init__(self, *args, rngs: nnx.Rngs, recipe: RecipeChoice | None = None, **kwargs):
        own = {name: kwargs.get(name) for name in ("dot_general", "dot_general_cls")}
        check_layer(self, recipe, **own)
        super().__init__(*args, rngs=rngs, **kwargs)
        self.recipe = recipe
        self.sr = _stream(rngs)

    def __call__(self, inputs, out_sharding=None, *, key=None):
        recipe = layer_recipe(self, jnp.shape(inputs), self.kernel.shape)
        if recipe is None:
            return super().__call__(inputs, out_sharding)
        return _product(self, recipe, inputs, self.axis, tuple(self.batch_axis), out_sharding, key)


def _product(layer: Any, recipe: Recipe, inputs, axis, batch_axis, out_sharding, key):
    refuse_out_sharding(type(layer).__name__, out_sharding)
    operands = inputs, layer.kernel[...], None if layer.bias is None else layer.bias[...]
    promoted = layer.promote_dtype(operands, dtype=layer.dtype)
    if key is None and draws(recipe):
        key = _draw(layer.sr)
    return layer_product(layer, operands, promoted, promote_dtype, axis, batch_axis, recipe=recipe, key=key)


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
