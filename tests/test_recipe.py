"""Recipes: what they accept, what they refuse, the environment, and the contexts."""

import copy
import itertools
import pickle

import jax
import jax.numpy as jnp
import pytest

import jax_fp4 as fp4
from jax_fp4._recipe import BACKWARD_MODE_VARIABLE, resolve

R = fp4.NVFP4BlockScaling


@pytest.mark.core
@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ("default", fp4.BackwardMode.DEFAULT),
        ("unquant", fp4.BackwardMode.UNQUANT),
        ("high_precision", fp4.BackwardMode.UNQUANT),
        ("dequant", fp4.BackwardMode.DEQUANT),
        ("dequantized", fp4.BackwardMode.DEQUANT),
        (fp4.BackwardMode.DEQUANT, fp4.BackwardMode.DEQUANT),
        (None, fp4.BackwardMode.DEFAULT),
    ],
)
def test_backward_mode_and_its_aliases(given, mode, monkeypatch):
    monkeypatch.delenv(BACKWARD_MODE_VARIABLE, raising=False)
    assert R(given).backward_mode is mode
    assert R(given) == R(mode) and hash(R(given)) == hash(R(mode))


@pytest.mark.core
def test_environment_is_read_when_a_recipe_is_made(monkeypatch):
    monkeypatch.setenv(BACKWARD_MODE_VARIABLE, "dequantized")
    before = R()
    monkeypatch.setenv(BACKWARD_MODE_VARIABLE, "unquant")
    assert (before.backward_mode, R().backward_mode, R("default").backward_mode) == ("dequant", "unquant", "default")
    monkeypatch.setenv(BACKWARD_MODE_VARIABLE, "exact")
    with pytest.raises(ValueError, match=r"environment variable JAX_FP4_BACKWARD_MODE is 'exact'; needs one of"):
        R()
    assert R("default").backward_mode == "default"
    monkeypatch.setenv(BACKWARD_MODE_VARIABLE, "")
    assert R().backward_mode == "default"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (dict(backward_mode="exact"), "backward_mode is 'exact'; needs one of"),
        (dict(backward_mode=1), "backward_mode is 1"),
        (dict(row_scaled_activation=1), "row_scaled_activation is 1"),
        (dict(stochastic_rounding=None), "stochastic_rounding is None"),
        (dict(two_dimensional_weights="yes"), "two_dimensional_weights is 'yes'"),
        (dict(random_hadamard_transform="on"), "random_hadamard_transform is 'on'"),
        (dict(four_over_six=True), "four_over_six is True"),
        (dict(four_over_six="gradients"), "four_over_six is 'gradients'"),
        (dict(four_over_six_bound=128), "bound is 128; needs one of"),
        (dict(four_over_six_error="L2"), "error is 'L2'"),
        (dict(random_hadamard_transform=True, row_scaled_activation=True), "True with row_scaled_activation=True"),
        (dict(random_hadamard_transform=True, four_over_six="all"), "True with four_over_six='all'"),
        (dict(random_hadamard_transform=True, four_over_six="activations"), "at most one of the two"),
    ],
)
def test_bad_settings(settings, says):
    with pytest.raises(ValueError, match=says) as caught:
        R(**settings)
    assert "; needs " in str(caught.value) and " Try " in str(caught.value)


def test_hadamard_is_on_unless_excluded():
    which = ("none", "weights", "activations", "all")
    for row_scaled, four in itertools.product((False, True), which):
        assert R(row_scaled_activation=row_scaled, four_over_six=four).hadamard == (
            not row_scaled and four in which[:2]
        )
    assert not R(random_hadamard_transform=False).hadamard
    assert R(random_hadamard_transform=True, four_over_six="weights").hadamard


@pytest.mark.core
def test_order_is_layer_then_autocast():
    a, b = R("unquant"), R("dequant")
    assert resolve("dense", None) is None
    with fp4.autocast(a):
        assert resolve("dense", None) == a and resolve("dense", b) == b
        assert resolve("dense", fp4.HIGH_PRECISION) is None
        with fp4.autocast(fp4.HIGH_PRECISION):
            assert resolve("dense", None) is None
        with fp4.autocast(None):
            assert resolve("dense", None) is None
        assert resolve("dense", None) == a
    assert resolve("dense", None) is None


@pytest.mark.parametrize("bad", ["nvfp4", R, 3, jnp.ones(2)], ids=["string", "class", "number", "array"])
def test_what_is_no_recipe(bad):
    for use in (fp4.autocast, lambda r: resolve("dense", r)):
        with pytest.raises(TypeError, match="recipe is"):
            use(bad)


def test_recipes_are_values():
    recipe = R("dequant", four_over_six="weights")
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert pickle.loads(pickle.dumps(fp4.HIGH_PRECISION)) is fp4.HIGH_PRECISION
    assert copy.deepcopy(fp4.HIGH_PRECISION) is fp4.HIGH_PRECISION and repr(fp4.HIGH_PRECISION) == "HIGH_PRECISION"
    assert jax.jit(lambda x, r: x, static_argnums=1)(1.0, recipe) == 1.0
    with pytest.raises(AttributeError):
        recipe.stochastic_rounding = False
    assert fp4.FourOverSix() == fp4.FourOverSix(256, "MAE")
