"""nnx.GroupedLinear and nnx.MoE: parameters, the bits of grouped_dense, moe and linen.MoE, streams, Flax's lifts."""

import copy
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx
from moe_layers import MODES, SIZES, D, E, F, X, jit, recipe
from products import refused
from trees import close_tree, same_tree

import jax_fp4 as fp4
from jax_fp4 import linen, nnx

KEY = jax.random.key(7)
Rngs, Param = flax_nnx.Rngs, flax_nnx.Param


def quick(key, shape, dtype=jnp.float32):
    """An initializer that compiles nothing, unless it is traced."""
    if isinstance(key, jax.core.Tracer):
        return 0.3 * jax.random.normal(key, shape, dtype)
    return jnp.asarray(np.random.default_rng(np.asarray(jax.random.key_data(key))).normal(0, 0.3, shape), dtype)


QUICK = dict(kernel_init=quick, bias_init=quick)


def moe(rngs=None, **kw):
    fields = QUICK | dict(out_kernel_init=quick, router_init=quick) | kw
    return nnx.MoE(E, D, F, rngs=Rngs(0) if rngs is None else rngs, **fields)


def grouped(rngs=None, **kw):
    return nnx.GroupedLinear(E, D, 10, rngs=Rngs(0) if rngs is None else rngs, **QUICK | kw)


LAYERS = [pytest.param(grouped, (SIZES,), id="grouped"), pytest.param(moe, (), id="moe")]


def params(model):
    return flax_nnx.state(model, Param).to_pure_dict()


def loss_of(result):
    """Every element of y counts differently."""
    y, routing = result if isinstance(result, tuple) else (result, None)
    return jnp.sum(jnp.sin(y.astype(jnp.float32) * 3)) + (0.0 if routing is None else routing.aux_loss)


def functional(model, *args):
    """A model as functions of its parameters, gradients first, and of the rest of its state: (grads, dx, result, the
    state afterwards)."""
    graph, weights, rest = flax_nnx.split(model, Param, ...)

    def loss(weights, rest, x, kw):
        model = flax_nnx.merge(graph, weights, rest, copy=True)
        result = model(x, *args, **kw)
        return loss_of(result), (result, flax_nnx.state(model, flax_nnx.Not(Param)))

    gradient = jax.grad(loss, (0, 2), has_aux=True)

    def call(weights, rest, x, kw):
        (grads, dx), (result, after) = gradient(weights, rest, x, kw)
        return grads.to_pure_dict(), dx, result, after

    return call, weights, rest


def traced(model, *args, x=X, **kw):
    """The shapes that `functional` gives, and the errors of a gradient; nothing is compiled."""
    call, weights, rest = functional(model, *args)
    return jax.eval_shape(call, weights, rest, x, kw)


# --- parameters ---


@pytest.mark.core
@pytest.mark.parametrize("streams", [lambda: Rngs(0), lambda: Rngs(params=0, sr=1)], ids=["default", "sr"])
@pytest.mark.parametrize(("make", "more"), LAYERS)
def test_tree_and_values_do_not_depend_on_the_recipe(make, more, streams):
    """G3: parameters, the rest of the state, the state of an optimizer, and the layer made next."""

    def made(**kw):
        rngs = streams()
        layer = make(rngs, use_bias=True, **kw)
        return layer, flax_nnx.Linear(3, 3, kernel_init=quick, rngs=rngs)

    plain, after = made()
    fields = dict(recipe=recipe("default")) | ({} if more else dict(router_recipe=recipe("default")))
    with fp4.autocast(recipe("default")):
        quantized, quantized_after = made(**fields)
    same_tree(params(quantized), params(plain))
    same_tree(params(quantized_after), params(after))
    rest = [jax.tree.structure(flax_nnx.state(model).to_pure_dict()) for model in (quantized, plain)]
    assert rest[0] == rest[1]
    state, want = (jax.eval_shape(optax.adamw(1e-3).init, flax_nnx.state(m, Param)) for m in (quantized, plain))
    assert jax.tree.structure(state) == jax.tree.structure(want)
    assert jax.tree.leaves(state) == jax.tree.leaves(want)


def test_shapes_and_dtypes():
    def shapes(make, **kw):
        return jax.tree.map(lambda a: a.shape, params(flax_nnx.eval_shape(partial(make, **kw))))

    want = dict(router=dict(kernel=(D, E)), w_in=(E, D, 2 * F), w_out=(E, F, 10), b_in=(E, 2 * F), b_out=(E, 10))
    assert shapes(moe, out_features=10, use_bias=True) == want
    # No gate, no biases, d out.
    assert shapes(moe, activation="relu") == dict(router=dict(kernel=(D, E)), w_in=(E, D, F), w_out=(E, F, D))
    assert shapes(grouped) == dict(kernel=(E, D, 10), bias=(E, 10))
    assert shapes(grouped, use_bias=False) == dict(kernel=(E, D, 10))
    for make in (moe, grouped):
        model = flax_nnx.eval_shape(partial(make, param_dtype=jnp.bfloat16))
        assert {a.dtype for a in jax.tree.leaves(params(model))} == {jnp.dtype("bfloat16")}


def test_each_expert_is_drawn_as_a_linear_layer():
    model = nnx.MoE(8, 32, 64, activation="relu", rngs=Rngs(0))
    np.testing.assert_allclose(np.std(model.w_in[...], (1, 2)), 32**-0.5, rtol=0.1)
    np.testing.assert_allclose(np.std(model.w_out[...], (1, 2)), 64**-0.5, rtol=0.1)
    same_tree(model.router.kernel[...], flax_nnx.Linear(32, 8, rngs=Rngs(0)).kernel[...])


def test_metadata():
    mesh = jax.make_mesh((1, 1), ("expert", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    names = ("expert", "fsdp", None)
    with jax.set_mesh(mesh):
        fields = dict(kernel_metadata=dict(note="mine"), bias_metadata=dict(other=3), use_bias=True, recipe=recipe())
        fields |= dict(kernel_init=flax_nnx.with_partitioning(quick, names))
        model = moe(**fields, out_kernel_init=flax_nnx.with_partitioning(quick, names[::-1]))
        layer = grouped(**fields)
        specs = [kernel[...].sharding.spec for kernel in (model.w_in, model.w_out, layer.kernel)]
    assert specs == [jax.P(*names), jax.P(*names[::-1]), jax.P(*names)]
    assert model.w_in.note == model.w_out.note == layer.kernel.note == "mine"
    assert model.b_in.other == model.b_out.other == layer.bias.other == 3


# --- the functions ---


@pytest.mark.core
def test_grouped_linear_equals_the_function():
    layer = grouped(recipe=recipe("default"))

    def function(params, x):
        y = fp4.grouped_dense(x, params["kernel"], SIZES, params["bias"], recipe=layer.recipe, key=KEY)
        return loss_of(y), y

    call, *state = functional(layer, SIZES)
    grads, dx, y, _ = jit(call)(*state, X, dict(key=KEY))
    same_tree(((grads, dx), y), jit(jax.grad(function, (0, 1), has_aux=True))(params(layer), X))
    assert y.shape == (2, 6, 10)


@pytest.mark.core
def test_moe_equals_the_function_and_draws_from_its_stream():
    """Every setting reaches it; an explicit key is used for every product; without one, each call draws another."""
    options = dict(score="sigmoid", normalize=False, expert_groups=2, top_expert_groups=1, scale=2.5, top_k=1)
    products = dict(
        activation=fp4.Activation("clamped_qgeglu", limit=2.0),
        recipe=recipe("unquant", two_dimensional_weights=False),
        out_recipe=recipe("default"),
    )
    model = moe(out_features=10, use_bias=True, **options, **products)
    bias = jnp.float32([0.5, 0, -0.5, 0])

    def function(params, x):
        params = dict(params)
        logits = x @ params.pop("router")["kernel"]
        result = fp4.moe(x, logits, **params, bias=bias, **options, **products, key=KEY)
        return loss_of(result), result

    call, weights, rest = functional(model)
    keyed, unkeyed = jit(call), jit(call)
    grads, dx, result, after = keyed(weights, rest, X, dict(selection_bias=bias, key=KEY))
    same_tree(((grads, dx), result), jit(jax.grad(function, (0, 1), has_aux=True))(params(model), X))
    assert result[0].shape == (2, 6, 10) and result[1].experts.shape == (2, 6, 1)
    assert after["sr"].count[...] == 0  # left alone
    once, again = (unkeyed(weights, rest, X, dict(selection_bias=bias)) for _ in range(2))
    same_tree(once[:3], again[:3])
    assert once[3]["sr"].count[...] == 1
    next_call = unkeyed(weights, once[3], X, dict(selection_bias=bias))
    same_tree(next_call[2], result)
    drawn = [np.asarray(grads["w_out"]), *(np.asarray(c[0]["w_out"]) for c in (once, next_call))]
    assert len({g.tobytes() for g in drawn}) == 3


@pytest.mark.core
def test_linen_has_the_same_result():
    """And the same gradients, from the same parameters."""
    fields = dict(use_bias=True, recipe=recipe("dequant"), router_recipe=recipe("dequant"))
    model = moe(**fields)
    other = linen.MoE(E, F, **fields)

    def function(params, x):
        result = other.apply({"params": params}, x)
        return loss_of(result), result

    call, *state = functional(model)
    grads, dx, result, _ = jit(call)(*state, X, {})
    same_tree(((grads, dx), result), jit(jax.grad(function, (0, 1), has_aux=True))(params(model), X))
    shapes = jax.eval_shape(partial(other.init, KEY), X)["params"]
    assert nn.unbox(shapes) == jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params(model))


# --- dtypes and the router ---


@pytest.mark.core
def test_router_is_float32_and_left_alone():
    """Also under autocast and with bfloat16 compute; the report shows it (D3)."""
    model, x = moe(dtype=jnp.bfloat16), X.astype(jnp.bfloat16)
    with fp4.autocast(recipe()):
        y, routing = flax_nnx.jit(model)(x)
        rows = fp4.report(model, x).rows
    logits = np.asarray(x, np.float64) @ np.asarray(model.router.kernel[...], np.float64)
    np.testing.assert_allclose(routing.weights, fp4.route(jnp.float32(logits), 2).weights, rtol=1e-5)
    assert y.dtype == jnp.bfloat16 and routing.weights.dtype == jnp.float32
    assert [(row.op, row.quantized) for row in rows] == [("dense", False), ("grouped_mlp", True), ("grouped_mlp", True)]
    assert rows[0].note == "not quantized: recipe=HIGH_PRECISION"


def test_router_recipe():
    """A recipe of its own, or autocast's where it says None."""
    fields = dict(recipe=recipe(), out_recipe=fp4.HIGH_PRECISION)
    rows = fp4.report(moe(router_recipe=recipe("dequant"), **fields), X).rows
    assert [row.quantized for row in rows] == [True, True, False]
    assert "dequant" in rows[0].note
    with fp4.autocast(recipe("unquant")):
        assert [row.quantized for row in fp4.report(moe(router_recipe=None), X).rows] == [True, True, True]
    assert not any(row.quantized for row in fp4.report(moe(), X).rows)


@pytest.mark.parametrize("mode", [None, *MODES])
def test_dtypes(mode):
    """D9: bfloat16 x gives bfloat16 y and dx; parameter gradients have their own dtype."""
    x, chosen = X.astype(jnp.bfloat16), None if mode is None else recipe(mode)
    for param_dtype, router in ((jnp.float32, fp4.HIGH_PRECISION), (jnp.bfloat16, chosen)):
        fields = dict(param_dtype=param_dtype, recipe=chosen, router_recipe=router, use_bias=True)
        grads, dx, (y, routing), _ = traced(moe(dtype=jnp.bfloat16, **fields), x=x)
        assert y.dtype == dx.dtype == jnp.bfloat16 and routing.weights.dtype == jnp.float32
        assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(param_dtype)}
    assert flax_nnx.eval_shape(moe(), x)[0].dtype == jnp.float32  # as flax.nnx.Linear
    assert flax_nnx.eval_shape(moe(), jnp.arange(2 * D).reshape(2, D))[0].dtype == jnp.float32


# --- random streams ---


@pytest.mark.core
@pytest.mark.parametrize(("make", "more"), LAYERS)
def test_missing_stream_is_an_error_only_when_differentiated(make, more):
    model = make(Rngs(params=0), recipe=recipe("default"))
    assert model.sr is None
    flax_nnx.eval_shape(model, X, *more)
    refused(lambda: traced(model, *more), ValueError, r"key is None; needs .* Try .*sr=1")
    traced(model, *more, key=KEY)
    for chosen in (recipe("unquant"), recipe("dequant"), recipe("default", stochastic_rounding=False)):
        traced(make(Rngs(params=0), recipe=chosen), *more)


def test_the_key_of_a_call_reaches_the_router():
    """It needs no stream then, and leaves one alone; without the key it draws from the router's own."""
    missing = moe(Rngs(params=0), router_recipe=recipe("default"))
    refused(lambda: traced(missing), ValueError, "^dense: key is None")
    traced(missing, key=KEY)
    model = moe(router_recipe=recipe("default"))
    model(X[:, :0], key=KEY)
    assert int(model.router.sr.count[...]) == 0
    model(X[:, :0])
    assert int(model.router.sr.count[...]) == 1


@pytest.mark.parametrize("streams", [lambda: Rngs(0), lambda: Rngs(params=0, sr=1)], ids=["default", "sr"])
def test_each_layer_has_a_stream_of_its_own(streams):
    rngs = streams()
    models = [moe(rngs), moe(rngs), grouped(rngs)]
    layers = [models[0], models[0].router, models[1], models[1].router, models[2]]
    drawn = [tuple(jax.random.key_data(layer.sr()).tolist()) for layer in layers for _ in range(2)]
    assert len(set(drawn)) == len(drawn)
    assert [int(layer.sr.count[...]) for layer in layers] == [2] * len(layers)


@pytest.mark.parametrize(("make", "more"), LAYERS)
def test_a_stream_is_drawn_from_only_where_it_is_used(make, more):
    counts = []
    for chosen in (None, recipe(), recipe("dequant"), recipe("default", stochastic_rounding=False), recipe("default")):
        model = make(recipe=chosen)
        model(X[:, :0], *more)
        counts.append(int(model.sr.count[...]))
    assert counts == [0, 0, 0, 0, 1]


# --- lifts and copies ---


@pytest.mark.core
def test_scan_of_remat_equals_a_loop_without():
    """Layers stacked by nnx.vmap, in unquant, whose backward draws nothing."""
    depth = 2

    @flax_nnx.split_rngs(splits=depth)
    @flax_nnx.vmap
    def make(rngs):
        return moe(rngs, recipe=recipe("unquant"))

    @flax_nnx.scan(in_axes=(0, flax_nnx.Carry), out_axes=flax_nnx.Carry)
    @flax_nnx.remat
    def scanned(layer, x):
        return x + layer(x)[0]

    model = make(Rngs(0, sr=1))
    assert model.w_in.shape == (depth, E, D, 2 * F)
    assert not np.array_equal(model.w_in[0], model.w_in[1])
    assert not np.array_equal(*jax.random.key_data(model.sr.key[...]))
    graph, weights, rest = flax_nnx.split(model, Param, ...)

    @jit
    def gradient(weights, rest):
        loss = flax_nnx.value_and_grad(lambda model: jnp.sum(jnp.sin(scanned(model, X))))
        return loss(flax_nnx.merge(graph, weights, rest, copy=True))

    value, grads = gradient(weights, rest)

    @jit
    def pullback(weights, rest, x, d):
        out, pull = jax.vjp(lambda w, x: x + flax_nnx.merge(graph, w, rest, copy=True)(x)[0], weights, x)
        return out, pull(d)

    layers = [jax.tree.map(lambda a, i=i: a[i], (weights, rest)) for i in range(depth)]
    xs = [X]
    for layer in layers:
        xs.append(pullback(*layer, xs[-1], X)[0])
    close_tree(value, jnp.sum(jnp.sin(xs[-1])))
    d = jnp.cos(xs[-1])
    for i in reversed(range(depth)):
        _, (want, d) = pullback(*layers[i], xs[i], d)
        close_tree(jax.tree.map(lambda a, i=i: a[i], grads.to_pure_dict()), want.to_pure_dict())


@pytest.mark.core
@pytest.mark.parametrize(("make", "more"), LAYERS)
def test_copies_and_state(make, more):
    """Clone, deepcopy, split and merge, and a state dict read into a layer of other values."""
    model = make(use_bias=True, recipe=recipe("default"))
    call = jit(lambda state, graph: flax_nnx.merge(graph, state, copy=True)(X, *more), static_argnums=1)
    result = lambda model: call(*reversed(flax_nnx.split(model)))  # noqa: E731
    want = result(model)
    for twin in (flax_nnx.clone(model), copy.deepcopy(model), flax_nnx.merge(*flax_nnx.split(model), copy=True)):
        assert twin is not model and twin.recipe == model.recipe
        same_tree(result(twin), want)
        twin.sr()
        assert int(model.sr.count[...]) == 0
    other = make(Rngs(1), use_bias=True, recipe=recipe("default"))
    assert not np.array_equal(jax.tree.leaves(result(other))[0], jax.tree.leaves(want)[0])
    flax_nnx.update(other, flax_nnx.state(model))
    same_tree(result(other), want)
    state = flax_nnx.state(make(Rngs(2), use_bias=True))
    flax_nnx.replace_by_pure_dict(state, flax_nnx.state(model).to_pure_dict())
    flax_nnx.update(other, state)
    same_tree(result(other), want)


# --- refusals ---


@pytest.mark.parametrize("wrong", ["nvfp4", fp4.NVFP4BlockScaling, 3])
@pytest.mark.parametrize("name", ["recipe", "out_recipe", "router_recipe"])
def test_wrong_recipe_is_refused_when_the_layer_is_made(name, wrong):
    rngs = Rngs(0)
    refused(lambda: moe(rngs, **{name: wrong}), TypeError, rf"^MoE: {name} is .*; needs a recipe object")
    if name == "recipe":
        refused(lambda: grouped(rngs, recipe=wrong), TypeError, "^GroupedLinear: recipe is .*; needs a recipe")
    assert int(rngs.default.count[...]) == 0


def test_bad_input():
    for fields, says in [
        (dict(top_k=5), "top_k is 5; needs an integer from 1 to 4 because there are 4 experts"),
        (dict(expert_groups=3, top_expert_groups=1), "expert_groups is 3; needs a divisor of 4"),
        (dict(score="tanh"), "score is 'tanh'"),
        (dict(activation="swishglu"), "^MoE: activation is 'swishglu'; needs one of"),
    ]:
        refused(lambda fields=fields: moe(**fields)(X), ValueError, says)
    refused(lambda: moe()(X, selection_bias=jnp.ones(3)), ValueError, r"bias is of shape \(3,\)")
    sizes = jnp.ones(E + 1, jnp.int32)
    refused(lambda: grouped()(X, sizes), ValueError, r"group_sizes is of shape \(5,\); needs \(4,\)")
    refused(lambda: grouped()(X, jnp.ones(E)), TypeError, "group_sizes is of type float32; needs an int32")
    refused(lambda: grouped()(X[..., :8], SIZES), ValueError, r"kernel is of shape \(4, 16, 10\); needs 8 rows")
