"""LayerNorm and RMSNorm over the last axis, statistics in float32, with no more kept than their gradient reads."""

import numbers
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Float32

from jax_fp4._arguments import check_float
from jax_fp4._errors import message
from jax_fp4._placement import Axes, Specs, alike, by_dimension
from jax_fp4._products import along_last
from jax_fp4._recipe import check_choice
from jax_fp4._rules import is_kept, keep, primals

NORMS = ("layernorm", "rmsnorm")


class Static(NamedTuple):
    """What is not differentiated."""

    norm: str
    epsilon: float
    zero_centered_scale: bool
    scale_dtype: np.dtype
    bias_dtype: np.dtype | None


class Kept(NamedTuple):
    """What the backward reads; parts that nobody needs hold arrays of shape (0,)."""

    x: Float[Array, "*m k"]
    mean: Float32[Array, "m 1"] | None  # None for rmsnorm
    rstd: Float32[Array, "m 1"]
    scale: Float[Array, " k"]  # for dx


@jax.named_scope("norm")
def normalize(
    op: str,
    x: Any,
    scale: Any,
    bias: Any,
    *,
    norm: str,
    epsilon: float,
    zero_centered_scale: bool,
    specs: Specs | None = None,
) -> Float[Array, "*b k"]:
    """y = (x - mean) / sqrt(var + epsilon) * scale + bias over the last axis, in x's dtype; rmsnorm: mean = 0, no bias.

    scale [k], bias [k] or None; zero_centered_scale: 1 + scale multiplies. Everything is float32, rounded once at the
    end, by the formulas of flax.linen.LayerNorm and RMSNorm (var = max(0, E[x^2] - E[x]^2)): a row whose squares
    overflow float32 gives what it gives there. Gradients have the dtype of their primal; kept for them are x and, for
    each row, rstd and (layernorm) the mean. Raises TypeError and ValueError, in the name of `op`, for what is not
    described here.
    """
    check_choice(op, "norm", norm, NORMS, "these are the norms with a formula here")
    check_choice(op, "zero_centered_scale", zero_centered_scale, (True, False), "it is a switch")
    epsilon = _checked_epsilon(op, epsilon)
    check_float(op, "x", x)
    if x.ndim == 0:
        raise ValueError(message(op, "x", "a scalar", "at least one axis", "its last axis is normalized", "x[None]"))
    k = x.shape[-1]
    refuse_cut_rows(op, x.ndim, specs)
    _check_vector(op, "scale", scale, k)
    if bias is not None:
        if norm == "rmsnorm":
            why, fix = "rmsnorm moves no mean", "norm_bias=None, or norm='layernorm'"
            raise ValueError(message(op, "norm_bias", "given beside norm='rmsnorm'", "None", why, fix))
        _check_vector(op, "norm_bias", bias, k)
    static = Static(norm, epsilon, zero_centered_scale, scale.dtype, None if bias is None else bias.dtype)
    return _normalize(*alike(jnp.asarray(x), scale, bias), static)


# --- of the layers with a norm: flat fields norm, epsilon, zero_centered_scale, use_norm_bias, scale_init ---


def norm_settings(layer: Any) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in ("norm", "epsilon", "zero_centered_scale")}


def has_norm_bias(layer: Any) -> bool:
    """use_norm_bias, or what Flax's norm of that name has by default."""
    return layer.norm == "layernorm" if layer.use_norm_bias is None else layer.use_norm_bias


def scale_init_of(layer: Any):
    """The layer's own initializer, or one by which the norm starts without a scale."""
    initializers = jax.nn.initializers
    default = initializers.zeros if layer.zero_centered_scale else initializers.ones
    return default if layer.scale_init is None else layer.scale_init


# --- checks ---


def refuse_cut_rows(op: str, ndim: int, specs: Specs | None) -> None:
    """Inside shard_map, of which each device would normalize its columns alone."""
    dims: tuple[Axes, ...] = by_dimension(specs.x) if isinstance(specs, Specs) else ()
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if dims and len(dims) == ndim and (axes := [axis for axis in dims[-1] if axis in manual]):
        why, fix = "the norm is over all of them", "x with all its columns on each device"
        raise ValueError(message(op, "specs.x", f"cut by {axes} along k", "whole rows", why, fix))


def _checked_epsilon(op: str, epsilon: object) -> float:
    because, fix = "it keeps the root of a zero row's variance above zero", "epsilon=1e-6"
    if isinstance(epsilon, bool) or not isinstance(epsilon, numbers.Real):
        raise TypeError(message(op, "epsilon", f"a {type(epsilon).__name__}", "a number", because, fix))
    # In float32, where it is added: 1e-50 is zero there.
    if not np.finfo(np.float32).tiny <= float(epsilon) <= np.finfo(np.float32).max:
        raise ValueError(message(op, "epsilon", repr(epsilon), "a positive finite float32", because, fix))
    return float(epsilon)


def _check_vector(op: str, name: str, value, k: int) -> None:
    check_float(op, name, value)
    if value.shape != (k,):
        why, fix = "x has that many columns", f"{name} of shape {(k,)}"
        raise ValueError(message(op, name, f"of shape {value.shape}", f"{(k,)}", why, fix))


# --- value and gradient ---


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _normalize(x, scale, bias, static: Static) -> Float[Array, "*m k"]:
    return _forward(x, scale, bias, static)[0]


def _forward(x, scale, bias, static: Static):
    """y, mean, rstd."""
    mean, rstd = _statistics(x.astype(jnp.float32), static)
    y = _centered(x, mean) * (rstd * _gain(scale, static, x.ndim))
    if bias is not None:
        y += along_last(bias.astype(jnp.float32), x.ndim)
    return y.astype(x.dtype), mean, rstd


def _statistics(x: Float32[Array, "*m k"], static: Static):
    square = jnp.mean(x * x, axis=-1, keepdims=True)
    if static.norm == "rmsnorm":
        return None, jax.lax.rsqrt(square + static.epsilon)
    mean = jnp.mean(x, axis=-1, keepdims=True)
    # Rounding can make the difference negative.
    return mean, jax.lax.rsqrt(jnp.maximum(0.0, square - mean * mean) + static.epsilon)


def _centered(x, mean) -> Float32[Array, "*m k"]:
    x = x.astype(jnp.float32)
    return x if mean is None else x - mean


def _gain(scale, static: Static, ndim: int) -> Float32[Array, "*ones k"]:
    """What multiplies."""
    gain = along_last(scale.astype(jnp.float32), ndim)
    return 1 + gain if static.zero_centered_scale else gain


def _normalize_fwd(x: Any, scale: Any, bias, static: Static):
    needs_x, needs_scale = x.perturbed, scale.perturbed
    x, scale, bias = primals((x, scale, bias))
    y, mean, rstd = _forward(x, scale, bias, static)
    either = needs_x or needs_scale

    def part(value, needed):
        return keep(value if needed else None, lambda: value)

    mean = None if mean is None else part(mean, either)
    return y, Kept(part(x, either), mean, part(rstd, either), part(scale, needs_x))


def _normalize_bwd(static: Static, kept: Kept, dy):
    """With u = (x - mean) rstd and g = dy scale: dx = rstd (g - E[g] - u E[g u]), without E[g] for rmsnorm."""
    if isinstance(dy, SymbolicZero):
        return None, None, None
    wide, rows = dy.astype(jnp.float32), tuple(range(dy.ndim - 1))
    d_bias = None if static.bias_dtype is None else jnp.sum(wide, rows).astype(static.bias_dtype)
    if not is_kept(kept.x):
        return None, None, d_bias
    u = _centered(kept.x, kept.mean) * kept.rstd
    d_scale = jnp.sum(wide * u, rows).astype(static.scale_dtype)
    if not is_kept(kept.scale):
        return None, d_scale, d_bias
    g = wide * _gain(kept.scale, static, dy.ndim)
    dx = g - u * jnp.mean(g * u, axis=-1, keepdims=True)
    if static.norm == "layernorm":
        dx -= jnp.mean(g, axis=-1, keepdims=True)
    return (kept.rstd * dx).astype(kept.x.dtype), d_scale, d_bias


_normalize.defvjp(_normalize_fwd, _normalize_bwd, symbolic_zeros=True)
