"""Activations: each against its definition in float64, at ordinary and at extreme values, and its gradient."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp4._activations import NAMES, Activation, activation_of

GATED = ("swiglu", "geglu", "clamped_qgeglu", "situ_glu")
PLAIN = ("silu", "gelu", "relu", "squared_relu")
MAX = 3.38e38  # of bfloat16, about that of float32


def sigmoid(x):
    return np.where(x < 0, np.exp(-np.logaddexp(0, -x)), 1 / (1 + np.exp(-np.abs(x))))


def gelu(x):
    x = np.clip(x, -30, None)  # 1 + tanh(-inf) is 0, and so is what float64 has below -30
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2


def clamped_qgeglu(g, u, limit=7.0, alpha=1.702, offset=1.0):
    g = np.minimum(g, limit)
    return g * sigmoid(alpha * g) * (np.clip(u, -limit, limit) + offset)


def situ_glu(g, u, beta1=4.0, beta2=25.0):
    return beta1 * np.tanh(g / beta1) * sigmoid(g) * beta2 * np.tanh(u / beta2)


# Float64, from the definitions: functions of (gate, linear) or of x.
DEFINITIONS = {
    "swiglu": lambda g, u: g * sigmoid(g) * u,
    "geglu": lambda g, u: gelu(g) * u,
    "clamped_qgeglu": clamped_qgeglu,
    "situ_glu": situ_glu,
    "silu": lambda x: x * sigmoid(x),
    "gelu": gelu,
    "relu": lambda x: np.maximum(x, 0),
    "squared_relu": lambda x: np.maximum(x, 0) ** 2,
}


def definition(name, h, **constants):
    parts = np.split(h, 2, axis=-1) if name in GATED else [h]
    return DEFINITIONS[name](*parts, **constants)


def central_difference(name, h, dy, step=1e-5, **constants):
    """dh [..., h] in float64, one column at a time."""
    dh = np.zeros_like(h)
    for column in range(h.shape[-1]):
        e = np.zeros(h.shape[-1])
        e[column] = step
        slope = (definition(name, h + e, **constants) - definition(name, h - e, **constants)) / (2 * step)
        dh[..., column] = (slope * dy).sum(-1)
    return dh


def inputs(dtype, scale=3.0, seed=0):
    """h [64, 12] without points at the kinks of the clamps and of relu."""
    h = np.random.default_rng(seed).normal(size=(64, 12)) * scale
    for kink in (-7, 0, 7):
        h = np.where(np.abs(h - kink) < 1e-2, h + 0.05, h)
    return jnp.asarray(h, dtype)


def test_every_name_is_tested():
    assert set(NAMES) == set(DEFINITIONS) == set(GATED + PLAIN)


@pytest.mark.core
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient(name, scale):
    h = inputs(jnp.float32, scale)
    activation = Activation(name)
    assert activation.gated == (name in GATED)
    y, vjp = jax.vjp(activation, h)
    assert y.shape == ((64, 6) if activation.gated else (64, 12))
    dy = np.random.default_rng(1).normal(size=y.shape)
    wide = np.asarray(h, np.float64)
    cancelled = 1e-12 if name in ("gelu", "geglu") else 1e-30  # by the definition, in 1 + tanh
    np.testing.assert_allclose(y, definition(name, wide), rtol=2e-5, atol=cancelled)
    expected = central_difference(name, wide, dy)
    np.testing.assert_allclose(vjp(jnp.asarray(dy, jnp.float32))[0], expected, rtol=2e-5, atol=3e-6 * scale)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", NAMES)
def test_rounded_once(name, dtype):
    """The float32 result, rounded: values and gradients."""
    h = inputs(dtype)
    y, vjp = jax.vjp(Activation(name), h)
    wide, wide_vjp = jax.vjp(Activation(name), h.astype(jnp.float32))
    dy = jax.random.normal(jax.random.key(0), y.shape, dtype)
    (dh,), (wide_dh,) = vjp(dy), wide_vjp(dy.astype(jnp.float32))
    assert y.dtype == dh.dtype == dtype
    np.testing.assert_array_equal(np.asarray(y), np.asarray(wide.astype(dtype)))
    np.testing.assert_array_equal(np.asarray(dh), np.asarray(wide_dh.astype(dtype)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_values_are_finite(name, dtype):
    """Everything whose value fits float32; a product of two huge numbers does not, for anyone."""
    top = 1e18 if name == "squared_relu" else MAX
    points = np.array([-top, -1e20, -1e13, -200, -89, -88, -20, -1e-38, -0.0, 0.0, 1e-38, 20, 88, 200, 1e13, top])
    points = points[np.abs(points) <= top]
    if name in GATED:
        gate, linear = (a.reshape(-1, 1) for a in np.meshgrid(points, points))
        fits = (gate < 0) | (gate * np.abs(linear) < MAX / 4)
        h = np.concatenate([gate, linear], -1)[fits[:, 0]]
    else:
        h = points[:, None]
    h = jnp.asarray(h, dtype)
    y, vjp = jax.vjp(Activation(name), h)
    (dh,) = vjp(jnp.full(y.shape, 0.5, dtype))
    assert np.isfinite(np.asarray(y, np.float32)).all() and np.isfinite(np.asarray(dh, np.float32)).all()
    wide = np.asarray(h, np.float64)
    expected = definition(name, wide)
    # float32 flushes a sigmoid below its normal range, which only a gate past -87 has
    lost = np.finfo(np.float32).tiny * 100 * np.abs(wide).max(-1, keepdims=True).clip(1)
    rounding = 1e-5 if dtype == jnp.float32 else 2**-8
    assert (np.abs(np.asarray(y, np.float64) - expected) <= rounding * np.abs(expected) + lost).all()


def slopes(activation, *h):
    y, vjp = jax.vjp(activation, jnp.asarray([h], jnp.float32))
    return np.asarray(vjp(jnp.ones_like(y))[0])[0]


@pytest.mark.parametrize("limit", [7.0, 2.0])
def test_clamps_pass_the_gradient_on_their_bounds_and_none_beyond(limit):
    clamped = Activation("clamped_qgeglu", limit=limit)
    beyond = np.nextafter(np.float32(limit), np.float32(100))
    assert slopes(clamped, limit, 0.5)[0] > 0 and slopes(clamped, beyond, 0.5)[0] == 0
    assert slopes(clamped, -1.5 * limit, 0.5)[0] != 0  # the gate has no lower bound
    assert slopes(clamped, 1.0, limit)[1] == slopes(clamped, 1.0, -limit)[1] == slopes(clamped, 1.0, 0.0)[1] > 0
    assert slopes(clamped, 1.0, beyond)[1] == slopes(clamped, 1.0, -beyond)[1] == 0


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_relu_has_no_gradient_at_zero(zero):
    assert slopes(Activation("relu"), zero) == 0 and slopes(Activation("squared_relu"), zero) == 0


@pytest.mark.parametrize(
    ("name", "constants"),
    [("clamped_qgeglu", dict(limit=1.5, alpha=0.7, offset=-0.25)), ("situ_glu", dict(beta1=0.5, beta2=2.0))],
)
def test_constants(name, constants):
    h, activation = inputs(jnp.float32), Activation(name, **constants)
    h = jnp.where(jnp.abs(jnp.abs(h) - 1.5) < 1e-2, h + 0.05, h)
    y, vjp = jax.vjp(activation, h)
    wide = np.asarray(h, np.float64)
    np.testing.assert_allclose(y, definition(name, wide, **constants), rtol=2e-5, atol=1e-30)
    expected = central_difference(name, wide, np.ones(y.shape), **constants)
    np.testing.assert_allclose(vjp(jnp.ones_like(y))[0], expected, rtol=2e-5, atol=1e-5)


def test_gelu_is_the_default_of_flax():
    nn = pytest.importorskip("flax.linen")
    h = inputs(jnp.float32)
    np.testing.assert_allclose(Activation("gelu")(h), nn.gelu(h), rtol=1e-5, atol=1e-6)


def test_nan_stays():
    for name in NAMES:
        assert np.isnan(Activation(name)(jnp.full((1, 2), jnp.nan))).all()


@pytest.mark.parametrize("name", ["clamped_qgeglu", "gelu"])
def test_transformations(name):
    """jit, vmap, remat and scan change nothing; kept for the backward is h alone."""
    h, activation = inputs(jnp.bfloat16), Activation(name)

    def loss(h):
        return jnp.sum(activation(h).astype(jnp.float32))

    expected = np.asarray(jax.grad(loss)(h))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        for gradient in (
            jax.jit(jax.grad(loss)),
            jax.vmap(jax.grad(loss)),
            jax.grad(jax.checkpoint(loss)),
            lambda h: jax.lax.scan(lambda _, row: (None, jax.grad(loss)(row)), None, h)[1],
        ):
            np.testing.assert_allclose(np.asarray(gradient(h), np.float32), np.asarray(expected, np.float32), rtol=1e-2)
    kept = [leaf for leaf in jax.tree.leaves(jax.vjp(activation, h)[1]) if hasattr(leaf, "nbytes")]
    assert sum(leaf.nbytes for leaf in kept) == h.nbytes


def test_empty():
    assert Activation("swiglu")(jnp.zeros((0, 8))).shape == (0, 4)
    assert Activation("swiglu")(jnp.zeros((3, 0))).shape == (3, 0)


# --- the value object ---


def test_equal_and_hashable():
    one, same, other = (
        Activation("situ_glu"),
        Activation("situ_glu", beta1=4, beta2=25.0),
        Activation("situ_glu", beta2=9),
    )
    assert one == same and hash(one) == hash(same) and one != other and len({one, same, other}) == 2
    assert (one.beta1, one.beta2, one.limit) == (4.0, 25.0, None)
    assert dataclasses.replace(one, beta2=9.0) == other
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.beta1 = 1.0  # type: ignore[misc]
    traces = []

    @jax.jit
    def f(h):
        traces.append(1)
        return h

    g = jax.jit(lambda h, activation: f(activation(h)), static_argnums=1)
    g(jnp.ones((2, 4)), one), g(jnp.ones((2, 4)), same)
    assert len(traces) == 1


def test_activation_of():
    custom = Activation("clamped_qgeglu", limit=3)
    assert activation_of("op", custom) is custom
    assert activation_of("op", "geglu") == Activation("geglu")


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: activation_of("grouped_mlp", "swish"), ValueError, r"grouped_mlp: activation is 'swish'.*'swiglu', "),
        (lambda: activation_of("grouped_mlp", jax.nn.silu), ValueError, "grouped_mlp: activation is <"),
        (lambda: activation_of("grouped_mlp", None), ValueError, "activation is None"),
        (lambda: Activation("swish"), ValueError, r"Activation: name is 'swish'; needs one of \('swiglu', 'geglu',"),
        (lambda: Activation(["swiglu"]), ValueError, "name is "),
        (
            lambda: Activation("swiglu", limit=7.0),
            ValueError,
            "limit is 7.0; needs None because swiglu uses no constants",
        ),
        (
            lambda: Activation("situ_glu", alpha=1),
            ValueError,
            "alpha is 1; needs None because situ_glu uses beta1, beta2",
        ),
        (lambda: Activation("situ_glu", beta1=0.0), ValueError, "beta1 is 0.0; needs a positive finite number"),
        (lambda: Activation("situ_glu", beta1=1e-42), ValueError, "beta1 is 1e-42"),
        (lambda: Activation("clamped_qgeglu", limit=-7), ValueError, "limit is -7; needs a positive"),
        (lambda: Activation("clamped_qgeglu", limit=1e39), ValueError, r"limit is 1e\+39"),
        (lambda: Activation("clamped_qgeglu", alpha=float("nan")), ValueError, "alpha is nan"),
        (lambda: Activation("clamped_qgeglu", offset=float("inf")), ValueError, "offset is inf; needs a finite number"),
        (lambda: Activation("clamped_qgeglu", offset=True), TypeError, "offset is a bool; needs a number"),
        (lambda: Activation("clamped_qgeglu", limit="7"), TypeError, "limit is a str"),
        (lambda: Activation("swiglu")(jnp.ones((2, 3))), ValueError, r"swiglu: h is of shape \(2, 3\); needs an even"),
        (lambda: Activation("swiglu")(jnp.ones(())), ValueError, r"h is of shape \(\)"),
        (lambda: Activation("relu")(jnp.ones(4, jnp.int32)), TypeError, "relu: h is an array of int32"),
        (lambda: Activation("relu")([1.0]), TypeError, "h is a list"),
    ],
)
def test_errors(call, error, says):
    with pytest.raises(error, match=says) as caught:
        call()
    assert "; needs " in str(caught.value) and " because " in str(caught.value) and " Try " in str(caught.value)
