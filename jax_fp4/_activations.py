"""Activations of the MLPs: a name and its constants, frozen, computed in float32 and rounded once.

A gated activation is a product of two functions of one variable, G(gate) * L(linear). Each function here gives its
value and its derivative side by side, so that every formula is written, and can be read, in one place.
"""

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from jax_fp4._arguments import check_float
from jax_fp4._errors import message
from jax_fp4._recipe import check_choice


@dataclass(frozen=True)
class Activation:
    """An activation by name, callable: h [..., 2f] -> [..., f] if gated, gate columns first, else [..., f] -> [..., f].

    With s the logistic sigmoid, g the gate and u the linear columns (x where there is no gate):

        swiglu          g s(g) u
        geglu           gelu(g) u, the tanh form of gelu
        clamped_qgeglu  g' s(alpha g') (u' + offset), g' = min(g, limit), u' = clip(u, -limit, limit): gpt-oss, with
                        limit=7, alpha=1.702, offset=1
        situ_glu        beta1 tanh(g / beta1) s(g) * beta2 tanh(u / beta2): Kimi K3 technical report, equation 12,
                        with beta1=4, beta2=25
        silu            x s(x)
        gelu            x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), the default of flax.linen.gelu
        relu            max(x, 0)
        squared_relu    max(x, 0)^2

    A constant left at None takes the value above; one that the name does not use is refused. Two activations of the
    same values are equal and hash alike.

    Computed in float32, rounded once to h's dtype; NaN stays NaN, Inf may become NaN. Finite h gives a finite result
    and gradient wherever these fit the dtype, and never NaN. Reverse mode only (`jax.vjp`, `jax.grad`); kept for the
    backward is h alone. On its bounds a clamp passes the gradient whole, as torch.clamp does; relu has none at 0.

    Raises ValueError for an unknown name, a constant that is out of range or not used, a gated h with an odd last axis;
    TypeError for a constant that is no number and an h that is no float array.
    """

    name: str
    limit: float | None = None
    alpha: float | None = None
    offset: float | None = None
    beta1: float | None = None
    beta2: float | None = None

    def __post_init__(self):
        check_choice("Activation", "name", self.name, NAMES, "these are the activations with a formula here")
        defaults = _ACTIVATIONS[self.name].constants
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name in defaults:
                value = defaults[field.name] if value is None else _constant(field.name, value, defaults[field.name])
                object.__setattr__(self, field.name, value)
            elif value is not None:
                uses = ", ".join(defaults) or "no constants"
                raise ValueError(
                    message("Activation", field.name, repr(value), "None", f"{self.name} uses {uses}", "None")
                )

    @property
    def gated(self) -> bool:
        return _ACTIVATIONS[self.name].linear is not None

    @jax.named_scope("activation")
    def __call__(self, h: Float[Array, "*b h"]) -> Float[Array, "*b f"]:
        check_float(self.name, "h", h)
        if self.gated and (h.ndim == 0 or h.shape[-1] % 2):
            raise ValueError(
                message(
                    self.name,
                    "h",
                    f"of shape {h.shape}",
                    "an even last axis",
                    "its first half is the gate and its second half the linear part",
                    "the product with a kernel [k, 2f]",
                )
            )
        return _apply(jnp.asarray(h), self)


def activation_of(op: str, choice: str | Activation) -> Activation:
    """The activation that `op` was given: an Activation, or a name, which stands for its usual constants."""
    if isinstance(choice, Activation):
        return choice
    check_choice(op, "activation", choice, NAMES, "it is a name or a jax_fp4.Activation")
    return Activation(choice)


def _constant(name: str, value: object, default: float) -> float:
    """A constant that float32 holds; every one but `offset` is a bound or a slope, and positive."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        needs, because = "a number", "constants are static"
        raise TypeError(message("Activation", name, f"a {type(value).__name__}", needs, because, str(default)))
    number, limits = float(value), np.finfo(np.float32)
    positive = name != "offset"
    if not math.isfinite(number) or abs(number) > float(limits.max) or (positive and number < float(limits.tiny)):
        needs = f"a {'positive ' if positive else ''}finite number"
        raise ValueError(message("Activation", name, repr(value), needs, "it scales in float32", str(default)))
    return number


# --- value and gradient ---


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _apply(h: Float[Array, "*b h"], activation: Activation):
    function = _ACTIVATIONS[activation.name]
    if function.linear is None:
        return function.gate(h.astype(jnp.float32), activation)[0].astype(h.dtype)
    gate, linear = jnp.split(h.astype(jnp.float32), 2, axis=-1)
    return (function.gate(gate, activation)[0] * function.linear(linear, activation)[0]).astype(h.dtype)


def _apply_fwd(h, activation: Activation):
    return _apply(h, activation), h


def _apply_bwd(activation: Activation, h, dy):
    """Derivatives are multiplied before dy is: a derivative of 0 then meets nothing that overflowed. Nor does a dy of
    0, as that of a masked row."""
    function, dy = _ACTIVATIONS[activation.name], dy.astype(jnp.float32)

    def pulled_back(slope):
        return jnp.where(dy == 0, 0, dy * slope)

    if function.linear is None:
        return (pulled_back(function.gate(h.astype(jnp.float32), activation)[1]).astype(h.dtype),)
    gate, linear = jnp.split(h.astype(jnp.float32), 2, axis=-1)
    value, slope = function.gate(gate, activation)
    linear_value, linear_slope = function.linear(linear, activation)
    both = pulled_back(slope * linear_value), pulled_back(value * linear_slope)
    return (jnp.concatenate(both, axis=-1).astype(h.dtype),)


_apply.defvjp(_apply_fwd, _apply_bwd)


# --- functions of one variable: float32 x -> (value, derivative) ---
# x is always the last factor beside a term that underflows to 0: finite x then gives 0, where Inf would give NaN.

Values = Float32[Array, "*b"]
Pair = tuple[Values, Values]


def _identity(x: Values, _: Activation) -> Pair:
    return x, jnp.ones_like(x)


def _silu(x: Values, _: Activation) -> Pair:
    return _sloped_silu(x, 1.0)


def _sloped_silu(x: Values, alpha: float) -> Pair:
    s = jax.nn.sigmoid(alpha * x)
    return x * s, s + x * (alpha * (s * (1 - s)))


def _gelu(x: Values, _: Activation) -> Pair:
    """With (1 + tanh(z)) / 2 = sigmoid(2 z), which loses no digits where tanh nears -1. Past 20 the sigmoid is 0 or 1
    in float32, and the bound keeps powers of x finite."""
    c, bounded = 2 * math.sqrt(2 / math.pi), jnp.clip(x, -20, 20)
    s = jax.nn.sigmoid(c * (bounded + 0.044715 * bounded**3))
    return x * s, s + x * (s * (1 - s) * (c * (1 + 3 * 0.044715 * bounded**2)))


def _relu(x: Values, _: Activation) -> Pair:
    return jnp.maximum(x, 0), (x > 0).astype(x.dtype)


def _squared_relu(x: Values, _: Activation) -> Pair:
    positive = jnp.maximum(x, 0)
    return positive * positive, 2 * positive


def _clamped_quick_gelu(x: Values, activation: Activation) -> Pair:
    assert activation.limit is not None and activation.alpha is not None
    value, slope = _sloped_silu(jnp.minimum(x, activation.limit), activation.alpha)
    return value, jnp.where(x <= activation.limit, slope, 0)


def _clamped_shift(x: Values, activation: Activation) -> Pair:
    assert activation.limit is not None and activation.offset is not None
    inside = jnp.abs(x) <= activation.limit
    return jnp.clip(x, -activation.limit, activation.limit) + activation.offset, inside.astype(x.dtype)


def _capped_silu(x: Values, activation: Activation) -> Pair:
    assert activation.beta1 is not None
    cap, slope = _softcap(x, activation.beta1)
    s = jax.nn.sigmoid(x)
    return cap * s, slope * s + cap * (s * (1 - s))


def _capped(x: Values, activation: Activation) -> Pair:
    assert activation.beta2 is not None
    return _softcap(x, activation.beta2)


def _softcap(x: Values, beta: float) -> Pair:
    """beta tanh(x / beta); its derivative 1 - tanh(z)^2 = 4 sigmoid(2 z) sigmoid(-2 z) in the form without
    cancellation."""
    z = x / beta
    return beta * jnp.tanh(z), 4 * jax.nn.sigmoid(2 * z) * jax.nn.sigmoid(-2 * z)


class _Functions(NamedTuple):
    gate: Callable[[Values, Activation], Pair]
    linear: Callable[[Values, Activation], Pair] | None
    constants: dict[str, float]


_ACTIVATIONS = {
    "swiglu": _Functions(_silu, _identity, {}),
    "geglu": _Functions(_gelu, _identity, {}),
    "clamped_qgeglu": _Functions(_clamped_quick_gelu, _clamped_shift, {"limit": 7.0, "alpha": 1.702, "offset": 1.0}),
    "situ_glu": _Functions(_capped_silu, _capped, {"beta1": 4.0, "beta2": 25.0}),
    "silu": _Functions(_silu, None, {}),
    "gelu": _Functions(_gelu, None, {}),
    "relu": _Functions(_relu, None, {}),
    "squared_relu": _Functions(_squared_relu, None, {}),
}
NAMES = tuple(_ACTIVATIONS)
