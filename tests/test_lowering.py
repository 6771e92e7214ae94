"""choose: two functions, of which a program is lowered to one. refuse is tested where the ops need it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from installations import lowered

from jax_fp4._lowering import choose

pytestmark = pytest.mark.core
X, W = jnp.arange(6.0).reshape(2, 3), jnp.ones((3, 2))


def product(x, w):
    return jnp.sin(x) @ w


def minus(x, w):
    return -product(x, w)


CHOICES = {"usable": True, "not usable": False}


def chosen(usable=True, **how):
    return choose(minus, product, usable=lambda _: usable, **how)


@pytest.mark.parametrize("usable", CHOICES.values(), ids=CHOICES)
def test_what_is_lowered(usable):
    """One of the two, with nothing around it."""
    for platform in ("cuda", "rocm", "cpu"):
        text = lowered(lambda *a: chosen(usable)(*a), X, W, platform=platform)
        expected = minus if usable and platform == "cuda" else product
        assert text == lowered(lambda *a, f=expected: f(*a), X, W, platform=platform)


def test_one_trace_for_several_platforms():
    traced = jax.jit(chosen()).trace(X, W)
    for platforms, negations in ((("cpu",), 0), (("cuda",), 1), (("cpu", "cuda"), 1)):
        assert traced.lower(lowering_platforms=platforms).as_text().count("stablehlo.negate") == negations


def test_it_is_asked_when_it_is_lowered():
    asked = []
    traced = jax.jit(choose(minus, product, usable=lambda _: bool(asked.append(0)))).trace(X, W)
    assert not asked
    traced.lower(lowering_platforms=("cpu",))
    assert not asked
    traced.lower(lowering_platforms=("cuda",))
    assert asked


def test_values_eager_jitted_and_with_jit_disabled():
    want = product(X, W)
    np.testing.assert_array_equal(chosen()(X, W), want)
    np.testing.assert_array_equal(jax.jit(chosen())(X, W), want)
    with jax.disable_jit():
        np.testing.assert_array_equal(chosen()(X, W), want)
    np.testing.assert_array_equal(chosen()(np.asarray(X), W), want)


def test_trees_and_absent_arguments():
    of_tree = lambda both, absent: both["x"] @ both["w"]  # noqa: E731
    np.testing.assert_array_equal(choose(of_tree, of_tree, usable=lambda _: True)({"x": X, "w": W}, None), X @ W)


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 2)], ids=str)
def test_vmap(axes):
    x, w = (jnp.stack([a, 2 * a, 3 * a], axis) if axis is not None else a for a, axis in zip((X, W), axes, strict=True))
    want = jax.vmap(product, axes)(x, w)
    for batched in (True, False):
        mapped = jax.vmap(chosen(batched=batched), axes)
        np.testing.assert_allclose(mapped(x, w), want, rtol=1e-6)
        assert ("negate" in lowered(mapped, x, w)) is batched


def test_nested_vmap():
    x = jnp.stack([jnp.stack([X, -X]), jnp.stack([2 * X, 3 * X])])
    for batched in (True, False):
        mapped = jax.vmap(jax.vmap(chosen(batched=batched), (0, None)), (0, None))
        np.testing.assert_allclose(mapped(x, W), product(x, W), rtol=1e-6)


def test_derivatives_are_those_of_the_second():
    """Both ways, of all arguments and of one, twice; and the value keeps its choice."""
    for transform in (
        partial(jax.jacobian, argnums=(0, 1)),
        partial(jax.jacfwd, argnums=0),
        partial(jax.jacrev, argnums=1),
        jax.hessian,
        lambda f: lambda *a: jax.jvp(f, a, (X, W)),
        lambda f: jax.jacobian(jax.checkpoint(f)),
        lambda f: jax.vmap(jax.grad(lambda x, w: f(x, w).sum()), (0, None)),
    ):
        got, want = (transform(f)(X, W) for f in (chosen(), product))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), got, want)
    text = lowered(jax.value_and_grad(lambda x: chosen()(x, W).sum()), X)
    assert text.count("stablehlo.negate") == 1


def test_what_nobody_needs_is_removed():
    def wasteful(x, w):
        jnp.cos(x).sum()
        return product(x, w)

    text = lowered(lambda x, w: (choose(wasteful, wasteful, usable=lambda _: True)(x, w), chosen()(x, w))[0], X, W)
    assert "cosine" not in text and text.count("dot_general") == 1


def test_in_loops_and_branches():
    def loop(x, w):
        step = lambda x, _: (chosen()(x, w) @ W.T, None)  # noqa: E731
        return jax.lax.cond(x.sum() > 0, lambda x: jax.lax.scan(step, x, None, length=2)[0], lambda x: x, x)

    want = product(product(X, W) @ W.T, W) @ W.T
    np.testing.assert_allclose(jax.jit(loop)(X, W), want, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: loop(x, W).sum())(X).shape, X.shape)


def test_two_types_are_no_choice():
    with pytest.raises(AssertionError):
        choose(lambda x: x, lambda x: x.astype(jnp.bfloat16), usable=lambda _: True)(X)
