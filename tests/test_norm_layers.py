"""The layers with a norm, Linen and NNX: Flax's initial values under the functions' names, the functions' bits."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from grouped_layers import KEY, NONE, normal, recipe
from products import refused
from trees import same_tree

import jax_fp4 as fp4
from jax_fp4 import linen, nnx

K, F, N = 24, 18, 10
X = normal(1, 2, 7, K)
RNGS = {"params": KEY, "sr": KEY}
SETTINGS = [
    {},
    dict(norm="rmsnorm", use_bias=False, epsilon=0.5),
    dict(zero_centered_scale=True, dtype=jnp.bfloat16),
    dict(use_norm_bias=False, param_dtype=jnp.bfloat16),
]


def dense_of(p, x, chosen, key=None, **settings):
    return fp4.layernorm_dense(
        x, p["scale"], p.get("norm_bias"), p["kernel"], p.get("bias"), recipe=chosen, key=key, **settings
    )


def mlp_of(p, x, chosen, key=None, **settings):
    arrays = {name: p.get(name) for name in ("scale", "norm_bias", "w_in", "w_out", "b_in", "b_out")}
    return fp4.layernorm_mlp(x, **arrays, recipe=chosen, key=key, **settings)


def layers(settings, chosen):
    """(Linen module, NNX module, function of parameters) of both layers. No bias is zero."""
    settings = settings | dict.fromkeys(("bias_init", "norm_bias_init"), nn.initializers.normal(1.0))
    rngs = lambda: flax_nnx.Rngs(0, sr=1)  # noqa: E731
    yield linen.LayerNormDense(N, **settings, recipe=chosen), nnx.LayerNormLinear(
        K, N, **settings, rngs=rngs(), recipe=chosen
    ), dense_of  # fmt: skip
    yield linen.LayerNormMLP(F, N, **settings, recipe=chosen), nnx.LayerNormMLP(
        K, F, out_features=N, **settings, rngs=rngs(), recipe=chosen
    ), mlp_of  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(s) or "plain")
def test_layers_have_the_bits_of_their_functions(settings):
    chosen = recipe("dequant")
    for module, layer, function in layers(settings, chosen):
        params = module.init(KEY, X)["params"]
        state = flax_nnx.state(layer, flax_nnx.Param).to_pure_dict()
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, state)
        dtype = settings.get("dtype") or jnp.float32
        how = {n: settings[n] for n in ("norm", "epsilon", "zero_centered_scale") if n in settings}
        for tree, y in ((params, module.apply({"params": params}, X)), (state, layer(X))):
            assert ("norm_bias" in tree) == (settings.get("use_norm_bias", "norm" not in settings))
            assert all(a.dtype == settings.get("param_dtype", jnp.float32) for a in tree.values())
            same_tree(y, function(tree, X.astype(dtype), chosen, **how))
            assert np.all(np.asarray(tree["scale"]) == (0 if "zero_centered_scale" in settings else 1))


@pytest.mark.core
def test_high_precision_is_flax_and_the_tree_does_not_change():
    """Without a recipe the layers are a norm and Dense, with Flax's distribution of kernels."""
    module = linen.LayerNormDense(N)
    params = module.init(KEY, X)["params"]
    normed = nn.LayerNorm().apply({"params": {"scale": params["scale"], "bias": params["norm_bias"]}}, X)
    want = nn.Dense(N).apply({"params": {"kernel": params["kernel"], "bias": params["bias"]}}, normed)
    np.testing.assert_allclose(module.apply({"params": params}, X), want, rtol=1e-5, atol=1e-5)
    for (plain, first, _), (quantized, second, _) in zip(layers({}, None), layers({}, recipe("default")), strict=True):
        same_tree(plain.init(RNGS, X), quantized.init(RNGS, X))
        same_tree(flax_nnx.state(first, flax_nnx.Param), flax_nnx.state(second, flax_nnx.Param))


@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_initial_values_are_those_of_flax(library):
    """Kernels of variance 1 / fan-in, the others zeros and ones."""
    k, f, n = 256, 128, 512
    if library == "linen":
        modules = linen.LayerNormDense(n), linen.LayerNormMLP(f, n)
        trees = [module.init(KEY, jnp.ones((1, k)))["params"] for module in modules]
    else:
        rngs = flax_nnx.Rngs(0)
        modules = nnx.LayerNormLinear(k, n, rngs=rngs), nnx.LayerNormMLP(k, f, out_features=n, rngs=rngs)
        trees = [flax_nnx.state(module, flax_nnx.Param).to_pure_dict() for module in modules]
    for tree in trees:
        for name, a in tree.items():
            value = dict(scale=1).get(name, 0)
            if a.ndim == 1:
                assert np.all(np.asarray(a) == value), name
            else:
                np.testing.assert_allclose(np.var(a), 1 / len(a), rtol=0.05, err_msg=name)


def test_keys_and_autocast():
    """Linen draws from "sr", NNX from its stream or the key of the call; autocast is as a recipe of the layer's own."""
    chosen = recipe("default")
    for (module, layer, function), (plain, free, _) in zip(layers({}, chosen), layers({}, None), strict=True):
        params = module.init(RNGS, X)["params"]
        loss = lambda apply: lambda p: jnp.sum(jnp.sin(apply(p)))  # noqa: E731
        apply = lambda p, m=module, **kw: m.apply({"params": p}, X, **kw)  # noqa: E731
        refused(partial(jax.grad(loss(apply)), params), ValueError, "key is None")
        one, other = (jax.grad(loss(partial(apply, rngs={"sr": jax.random.key(i)})))(params) for i in (1, 2))
        assert not all(np.array_equal(one[n], other[n]) for n in one)
        with fp4.autocast(chosen):
            same_tree(plain.apply({"params": params}, X), function(params, X, chosen))
            same_tree(free(X), layer(X))
        state = flax_nnx.state(layer, flax_nnx.Param).to_pure_dict()
        grads = flax_nnx.grad(lambda layer: jnp.sum(jnp.sin(layer(X, key=KEY))))(layer).to_pure_dict()
        same_tree(grads, jax.grad(loss(lambda p, f=function: f(p, X, chosen, KEY)))(state))
        flax_nnx.grad(lambda layer: jnp.sum(layer(X)))(layer)  # its own stream


@pytest.mark.parametrize("choice", ["nvfp4", fp4.NVFP4BlockScaling])
def test_a_wrong_recipe_is_refused_when_the_layer_is_made(choice):
    rngs = flax_nnx.Rngs(0)
    for make in (
        lambda: linen.LayerNormDense(N, recipe=choice),
        lambda: linen.LayerNormMLP(F, out_recipe=choice),
        lambda: nnx.LayerNormLinear(K, N, rngs=rngs, recipe=choice),
        lambda: nnx.LayerNormMLP(K, F, rngs=rngs, out_recipe=choice),
    ):
        refused(make, TypeError, "LayerNorm(Dense|Linear|MLP): (out_)?recipe is")


def test_a_bias_beside_rmsnorm_is_refused():
    wrong = dict(norm="rmsnorm", use_norm_bias=True)
    refused(lambda: linen.LayerNormDense(N, **wrong).init(KEY, X), ValueError, "layernorm_dense: norm_bias is given")
    layer = nnx.LayerNormMLP(K, F, **wrong, rngs=flax_nnx.Rngs(0), recipe=recipe(NONE))
    refused(lambda: layer(X), ValueError, "layernorm_mlp: norm_bias is given")


def test_the_report_names_the_layers():
    module = linen.LayerNormMLP(F, recipe=recipe("unquant"))
    variables = module.init(KEY, X)
    assert "layernorm_mlp" in str(fp4.report(module.apply, variables, X))
    module = linen.LayerNormDense(N, recipe=recipe("default"))  # evaluated, it needs no key; nor does its report
    (row,) = fp4.report(module.apply, module.init(KEY, X), X).rows
    assert row.op == "layernorm_dense" and row.residual_bytes > 0
    module = linen.LayerNormMLP(F, recipe=recipe("default"))
    assert fp4.report(module.apply, module.init(KEY, X), X).rows[0].residual_bytes > 0


# --- rules ---


def rows_of(f, *args):
    rows = fp4.report(f, *args).rows
    assert [row.quantized for row in rows] == ["HIGH_PRECISION" not in row.chosen_by for row in rows]
    return [(row.layer, row.op, row.chosen_by) for row in rows]


@pytest.mark.core
def test_rules_decide_in_linen_by_the_path_of_the_parameters():
    """Keys are drawn where a rule rounds stochastically."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = linen.LayerNormDense(K, name="dense")(x)
            return linen.LayerNormMLP(F, name="mlp", out_recipe=fp4.HIGH_PRECISION)(linen.LayerNormMLP(F)(x))

    model, rngs = Model(), {"sr": KEY}
    params = model.init(KEY, X)["params"]
    rules = fp4.Rules(
        [("dense", recipe("default")), ("LayerNormMLP.*", fp4.HIGH_PRECISION), ("mlp", recipe("default"))]
    )

    def loss(params):
        return jnp.sum(jnp.sin(model.apply({"params": params}, X, rngs=rngs)))

    with fp4.autocast(rules):
        rows = rows_of(loss, params)
        y = model.apply({"params": params}, X)
        jax.grad(loss)(params)
        refused(lambda: jax.grad(lambda p: model.apply({"params": p}, X).sum())(params), ValueError, "key is None")
    assert rows == [
        ("dense", "layernorm_dense", "rule 'dense' = NVFP4BlockScaling"),
        *[("LayerNormMLP_0", "layernorm_mlp", "rule 'LayerNormMLP.*' = HIGH_PRECISION")] * 2,
        ("mlp", "layernorm_mlp", "rule 'mlp' = NVFP4BlockScaling"),
        ("mlp", "layernorm_mlp", "recipe=HIGH_PRECISION"),
    ]
    h = mlp_of(params["LayerNormMLP_0"], dense_of(params["dense"], X, recipe("default")), fp4.HIGH_PRECISION)
    same_tree(y, mlp_of(params["mlp"], h, recipe("default"), out_recipe=fp4.HIGH_PRECISION))


class Pair(flax_nnx.Module):
    def __init__(self, recipe=None):
        self.dense = nnx.LayerNormLinear(K, K, recipe=recipe, rngs=flax_nnx.Rngs(0, sr=1))
        self.mlp = nnx.LayerNormMLP(K, F, rngs=flax_nnx.Rngs(2, sr=3))

    def __call__(self, x):
        return self.mlp(self.dense(x))


@pytest.mark.core
def test_rules_decide_in_nnx_by_path():
    model, want = Pair(), Pair()
    nnx.quantize_model(model, fp4.Rules([("dense", recipe("default")), ("mlp", recipe("dequant"))]))
    assert [model.dense.recipe, model.mlp.recipe] == [recipe("default"), recipe("dequant")]
    assert rows_of(model, X) == [
        ("dense", "layernorm_dense", "rule 'dense' = NVFP4BlockScaling"),
        *[("mlp", "layernorm_mlp", "rule 'mlp' = NVFP4BlockScaling")] * 2,
    ]
    want.dense.recipe, want.mlp.recipe = recipe("default"), recipe("dequant")
    same_tree(model(X), want(X))
    flax_nnx.grad(lambda model: jnp.sum(model(X)))(model)  # draws from the layer's own stream

    nnx.quantize_model(model, fp4.Rules([("mlp", recipe("unquant"))]))  # again, and no rule for one of them
    with fp4.autocast(fp4.HIGH_PRECISION):
        assert rows_of(model, X) == [
            ("dense", "layernorm_dense", "autocast(HIGH_PRECISION)"),
            *[("mlp", "layernorm_mlp", "rule 'mlp' = NVFP4BlockScaling")] * 2,
        ]
    own = Pair(recipe("unquant"))
    nnx.quantize_model(own, fp4.Rules([(".*", recipe("dequant"))]))
    assert own.dense.recipe == recipe("unquant") and own.mlp.recipe == recipe("dequant")
    assert rows_of(own.dense, X) == [("dense", "layernorm_dense", "recipe=NVFP4BlockScaling")]


def test_an_nnx_layer_without_a_path_raises_under_rules():
    for layer in (Pair().dense, Pair().mlp):
        with fp4.autocast(fp4.Rules([(".*", recipe("dequant"))])):
            refused(partial(layer, X), ValueError, r"LayerNorm(Linear|MLP): recipe is None under autocast\(Rules\)")
    no_layers = "the model has no Linear, LinearGeneral, GroupedLinear, LayerNormLinear, LayerNormMLP, MoE"
    rules = fp4.Rules([(".*", recipe("dequant"))])
    refused(lambda: nnx.quantize_model(flax_nnx.Dropout(0.5), rules), ValueError, no_layers)
    refused(lambda: nnx.quantize_model(Pair(), fp4.Rules([("mpl", recipe("dequant"))])), ValueError, "nearest.*'mlp'")
