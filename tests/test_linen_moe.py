"""linen.GroupedDense and linen.MoE: parameters, the bits of grouped_dense and moe, random streams, Flax's lifts."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from moe_layers import MODES, SIZES, D, E, F, X, jit, recipe
from products import refused
from trees import close_tree, same_tree

import jax_fp4 as fp4
from jax_fp4 import linen

KEY = jax.random.key(0)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def shapes(model, *args, **kw):
    return jax.eval_shape(partial(model.init, **kw), KEY, *args)


def some(model, *args):
    """Variables of no particular values: initializers take long to compile."""
    return jax.tree.map(lambda a: (normal(a.size, *a.shape) / 4).astype(a.dtype), shapes(model, *args))


def gradients(function):
    """(result, gradients of the first two arguments) of a loss in which every element counts differently."""

    def loss(variables, x, *args, **kw):
        result = function(variables, x, *args, **kw)
        y, routing = result if isinstance(result, tuple) else (result, None)
        aux_loss = 0.0 if routing is None else routing.aux_loss
        return jnp.sum(jnp.sin(y.astype(jnp.float32) * 3)) + aux_loss, result

    gradient = jax.value_and_grad(loss, (0, 1), has_aux=True)
    return lambda *args, **kw: (lambda value, grads: (value[1], grads))(*gradient(*args, **kw))


LAYERS = [
    pytest.param(partial(linen.GroupedDense, 10, E), (SIZES,), id="grouped"),
    pytest.param(partial(linen.MoE, E, F, use_bias=True, bias_init=nn.initializers.normal()), (), id="moe"),
]


# --- parameters ---


@pytest.mark.core
@pytest.mark.parametrize(("make", "more"), LAYERS)
def test_tree_and_values_do_not_depend_on_the_recipe(make, more):
    """G3: parameters, and the state of an optimizer."""

    def params(model, **streams):
        return jit(lambda rngs: model.init(rngs, X, *more)["params"])({"params": KEY, **streams})

    plain = params(make())
    same_tree(params(make(recipe=recipe("default")), sr=jax.random.key(1)), plain)
    with fp4.autocast(recipe("default")):
        same_tree(params(make()), plain)
        model = make(router_recipe=None) if not more else make()
        assert shapes(model, X, *more) == shapes(make(), X, *more)
    optimizer = optax.adamw(1e-3)
    state = jax.eval_shape(optimizer.init, plain)
    assert state == jax.eval_shape(optimizer.init, shapes(make(recipe=recipe()), X, *more)["params"])


def test_shapes_and_dtypes():
    model = linen.MoE(E, F, out_features=10, use_bias=True, param_dtype=jnp.bfloat16)
    found = jax.tree.map(lambda a: (a.shape, a.dtype.name), shapes(model, X)["params"])
    want = dict(router=dict(kernel=(D, E)), w_in=(E, D, 2 * F), w_out=(E, F, 10), b_in=(E, 2 * F), b_out=(E, 10))
    assert found == jax.tree.map(lambda s: (s, "bfloat16"), want, is_leaf=lambda s: isinstance(s, tuple))
    found = jax.tree.map(lambda a: a.shape, shapes(linen.MoE(E, F, activation="relu"), X)["params"])
    assert found == dict(router=dict(kernel=(D, E)), w_in=(E, D, F), w_out=(E, F, D))  # no gate, no biases, d out
    found = jax.tree.map(lambda a: a.shape, shapes(linen.GroupedDense(10, E), X, SIZES)["params"])
    assert found == dict(kernel=(E, D, 10), bias=(E, 10))
    assert list(shapes(linen.GroupedDense(10, E, use_bias=False), X, SIZES)["params"]) == ["kernel"]


def test_each_expert_is_drawn_as_a_dense_layer():
    """The number of experts is no part of the fan-in; and the router is Flax's layer of that name."""
    params = jit(lambda key: linen.MoE(8, 64, activation="relu").init(key, jnp.ones((1, 32)))["params"])(KEY)
    np.testing.assert_allclose(np.std(params["w_in"], (1, 2)), 32**-0.5, rtol=0.1)
    np.testing.assert_allclose(np.std(params["w_out"], (1, 2)), 64**-0.5, rtol=0.1)
    assert not np.array_equal(params["w_in"][0], params["w_in"][1])

    class Router(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8, use_bias=False, name="router")(x)

    same_tree(jit(Router().init)(KEY, jnp.ones((1, 32)))["params"]["router"], params["router"])


@pytest.mark.parametrize("box", [nn.with_partitioning, nn.with_logical_partitioning])
def test_metadata_boxes(box):
    normal, names = nn.initializers.normal(), ("expert", "embed", None)
    fields = dict(kernel_init=box(normal, names), out_kernel_init=box(normal, names[::-1]), bias_init=box(normal, "eh"))
    model = linen.MoE(E, F, use_bias=True, router_init=box(normal, ("embed", "e")), recipe=recipe(), **fields)
    boxed = shapes(model, X)
    found = {name: spec for name, spec in nn.get_partition_spec(boxed)["params"].items() if name != "router"}
    assert found == dict(w_in=jax.P(*names), w_out=jax.P(*names[::-1]), b_in=jax.P("e", "h"), b_out=jax.P("e", "h"))
    assert nn.get_partition_spec(boxed)["params"]["router"]["kernel"] == jax.P("embed", "e")
    assert nn.unbox(boxed) == shapes(linen.MoE(E, F, use_bias=True), X)
    _, (grads, _) = jax.eval_shape(gradients(model.apply), boxed, X)
    assert jax.tree.structure(grads) == jax.tree.structure(boxed)
    grouped = linen.GroupedDense(10, E, kernel_init=box(normal, names), bias_init=box(normal, "eh"))
    specs = nn.get_partition_spec(shapes(grouped, X, SIZES))["params"]
    assert specs == dict(kernel=jax.P(*names), bias=jax.P("e", "h"))


# --- the functions ---


def drawn(model, variables):
    """The key that the layer draws from its stream KEY."""
    return nn.apply(lambda layer: layer.make_rng("sr"), model)(variables, rngs={"sr": KEY})


@pytest.mark.core
def test_grouped_dense_equals_the_function():
    model = linen.GroupedDense(10, E, recipe=recipe("default"))
    variables = some(model, X, SIZES)

    def function(variables, x, key):
        params = variables["params"]
        return fp4.grouped_dense(x, params["kernel"], SIZES, params["bias"], recipe=model.recipe, key=key)

    got = jit(gradients(lambda v, x, rngs: model.apply(v, x, SIZES, rngs=rngs)))(variables, X, {"sr": KEY})
    same_tree(got, jit(gradients(function))(variables, X, drawn(model, variables)))
    assert got[0].shape == (2, 6, 10)


@pytest.mark.core
def test_moe_equals_the_function_and_draws_from_its_stream():
    """Every setting reaches it; and the same key gives the same bits, another other gradients."""
    options = dict(score="sigmoid", normalize=False, expert_groups=2, top_expert_groups=1, scale=2.5, top_k=1)
    products = dict(
        activation=fp4.Activation("clamped_qgeglu", limit=2.0),
        recipe=recipe("unquant", two_dimensional_weights=False),
        out_recipe=recipe("default"),
    )
    model = linen.MoE(E, F, out_features=10, use_bias=True, **options, **products)
    variables, bias = some(model, X), jnp.float32([0.5, 0, -0.5, 0])

    def function(variables, x, key):
        params = dict(variables["params"])
        logits = x @ params.pop("router")["kernel"]
        return fp4.moe(x, logits, **params, bias=bias, **options, **products, key=key)

    layer = jit(gradients(lambda v, x, rngs: model.apply(v, x, selection_bias=bias, rngs=rngs)))
    got = layer(variables, X, {"sr": KEY})
    same_tree(got, jit(gradients(function))(variables, X, drawn(model, variables)))
    assert got[0][0].shape == (2, 6, 10) and got[0][1].experts.shape == (2, 6, 1)
    same_tree(layer(variables, X, {"sr": KEY}), got)
    result, (grads, _) = layer(variables, X, {"sr": jax.random.key(1)})
    same_tree(result, got[0])
    assert not np.array_equal(grads["params"]["w_out"], got[1][0]["params"]["w_out"])


def test_without_recipe():
    """Also an activation without a gate, by name."""
    model = linen.MoE(E, F, activation="relu")
    variables = some(model, X)

    def function(variables, x):
        params = dict(variables["params"])
        logits = x @ params.pop("router")["kernel"]
        return fp4.moe(x, logits, **params, top_k=2, activation=fp4.Activation("relu"))

    close_tree(jit(model.apply)(variables, X), jit(function)(variables, X))


# --- dtypes and the router ---


@pytest.mark.core
def test_router_is_float32_and_left_alone():
    """Also under autocast and with bfloat16 compute; the report shows it (D3)."""
    model = linen.MoE(E, F, dtype=jnp.bfloat16)
    variables, x = some(model, X), X.astype(jnp.bfloat16)
    with fp4.autocast(recipe()):
        y, routing = jit(model.apply)(variables, x)
        rows = fp4.report(model.apply, variables, x).rows
    logits = np.asarray(x, np.float64) @ np.asarray(variables["params"]["router"]["kernel"], np.float64)
    np.testing.assert_allclose(routing.weights, fp4.route(jnp.float32(logits), 2).weights, rtol=1e-5)
    assert y.dtype == jnp.bfloat16 and routing.weights.dtype == jnp.float32
    assert [(row.layer, row.op, row.quantized) for row in rows] == [
        ("router", "dense", False),
        ("grouped_mlp", "grouped_mlp", True),
        ("grouped_mlp", "grouped_mlp", True),
    ]
    assert rows[0].note == "not quantized: recipe=HIGH_PRECISION"


def test_router_recipe():
    """A recipe of its own, or autocast's where it says None."""
    variables = some(linen.MoE(E, F), X)
    for model, quantized in [
        (linen.MoE(E, F, router_recipe=recipe("dequant"), recipe=recipe()), [True, True, True]),
        (linen.MoE(E, F, recipe=recipe(), out_recipe=fp4.HIGH_PRECISION), [False, True, False]),
    ]:
        rows = fp4.report(model.apply, variables, X).rows
        assert [row.quantized for row in rows] == quantized
        assert not quantized[0] or "dequant" in rows[0].note
    with fp4.autocast(recipe("unquant")):
        rows = fp4.report(linen.MoE(E, F, router_recipe=None).apply, variables, X).rows
        assert [row.quantized for row in rows] == [True, True, True]
    # The quantized logits are those of the function.
    routing = jit(linen.MoE(E, F, router_recipe=recipe()).apply)(variables, X)[1]
    logits = jit(partial(fp4.dense, recipe=recipe()))(X, variables["params"]["router"]["kernel"])
    np.testing.assert_allclose(routing.weights, fp4.route(logits, 2).weights, rtol=1e-5)


@pytest.mark.parametrize("mode", [None, *MODES])
def test_dtypes(mode):
    """D9: bfloat16 x gives bfloat16 y and dx; parameter gradients have their own dtype."""
    chosen = None if mode is None else recipe(mode)
    fields = dict(recipe=chosen, use_bias=True)
    for param_dtype, router in ((jnp.float32, fp4.HIGH_PRECISION), (jnp.bfloat16, chosen)):
        model = linen.MoE(E, F, dtype=jnp.bfloat16, param_dtype=param_dtype, router_recipe=router, **fields)
        x = X.astype(jnp.bfloat16)
        variables = shapes(model, x)
        call = gradients(lambda v, x, model=model: model.apply(v, x, rngs={"sr": KEY}))
        (y, routing), (grads, dx) = jax.eval_shape(call, variables, x)
        assert y.dtype == dx.dtype == jnp.bfloat16 and routing.weights.dtype == jnp.float32
        assert grads == variables


def test_inputs_promote_as_in_flax():
    model = linen.MoE(E, F)
    variables, x = shapes(model, X), X.astype(jnp.bfloat16)
    assert jax.eval_shape(model.apply, variables, x)[0].dtype == nn.Dense(3).init_with_output(KEY, x)[0].dtype
    for other in (jnp.arange(2 * D).reshape(2, D), np.ones((2, D), np.float16)):
        assert jax.eval_shape(model.apply, variables, other)[0].dtype == jnp.float32
        assert jax.eval_shape(linen.GroupedDense(3, E).init_with_output, KEY, other, SIZES)[0].dtype == jnp.float32


# --- random streams ---


@pytest.mark.core
@pytest.mark.parametrize(("make", "more"), LAYERS)
def test_missing_stream_is_an_error_only_when_differentiated(make, more):
    def differentiate(model, **kw):
        variables = shapes(model, X, *more)
        return jax.eval_shape(gradients(lambda v, x: model.apply(v, x, *more, **kw)), variables, X)

    model = make(recipe=recipe("default"))
    jax.eval_shape(model.apply, shapes(model, X, *more), X, *more)
    refused(lambda: differentiate(model), ValueError, r"key is None; needs .* Try .*rngs=\{'sr': key\}")
    differentiate(model, rngs={"sr": KEY})
    for chosen in (recipe("unquant"), recipe("dequant"), recipe("default", stochastic_rounding=False)):
        differentiate(make(recipe=chosen))
    if not more:
        refused(lambda: differentiate(make(router_recipe=recipe("default"))), ValueError, "dense: key is None")
        refused(lambda: differentiate(make(out_recipe=recipe("default"))), ValueError, "grouped_mlp: key is None")


@pytest.mark.parametrize("layer", [linen.GroupedDense, linen.MoE])
def test_a_stream_is_drawn_from_only_where_it_is_used(layer):
    class Refusing(layer):
        def make_rng(self, name="params"):
            raise AssertionError(f"drew from {name}")

    more = (SIZES,) if layer is linen.GroupedDense else ()
    variables = shapes(layer(8, E), X, *more)
    for chosen in (None, recipe("unquant"), recipe("dequant"), recipe("default", stochastic_rounding=False)):
        jax.eval_shape(partial(Refusing(8, E, recipe=chosen).apply, rngs={"sr": KEY}), variables, X, *more)
    with pytest.raises(AssertionError, match="drew from sr"):
        jax.eval_shape(partial(Refusing(8, E, recipe=recipe("default")).apply, rngs={"sr": KEY}), variables, X, *more)


# --- lifts ---


class Block(nn.Module):
    recipe: object

    @nn.compact
    def __call__(self, carry, _=None):
        x, aux_loss = carry
        y, routing = linen.MoE(E, F, recipe=self.recipe)(x)
        return (x + y, aux_loss + routing.aux_loss), None


@pytest.mark.core
def test_scan_of_remat_equals_a_loop_without():
    """Forward and gradients, in unquant, whose backward draws nothing."""
    depth, block = 2, Block(recipe("unquant"))
    stack = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True, "sr": True}, length=depth)
    model, start, end = stack(block.recipe), (X, jnp.float32(0)), (jnp.cos(X), jnp.float32(3))
    variables = some(model, start, None)

    def pullback(f):
        return jit(lambda v, carry, d: (lambda out, pull: (out, pull(d)))(*jax.vjp(f, v, carry)))

    got, (grads, dx) = pullback(lambda v, carry: model.apply(v, carry, None)[0])(variables, start, end)
    layers = [{"params": jax.tree.map(lambda a, i=i: a[i], variables["params"])} for i in range(depth)]
    one, carries = pullback(lambda v, carry: block.apply(v, carry)[0]), [start]
    for layer in layers:
        carries.append(one(layer, carries[-1], end)[0])
    close_tree(got, carries[-1])
    for i in reversed(range(depth)):
        _, (want, end) = one(layers[i], carries[i], end)
        close_tree(jax.tree.map(lambda a, i=i: a[i], grads), want)
    close_tree(dx, end)


@pytest.mark.core
def test_scan_splits_the_stream():
    """Layers of equal parameters that see equal tokens and cotangents draw apart."""

    class Same(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return x, linen.MoE(E, F, recipe=recipe("default"))(x)[0]

    model = nn.scan(Same, variable_axes={"params": 0}, split_rngs={"params": True, "sr": True}, length=2)()
    one = some(linen.MoE(E, F), X)["params"]
    variables = {"params": {"MoE_0": jax.tree.map(lambda a: jnp.stack([a, a]), one)}}

    def loss(variables):
        y = model.apply(variables, X, None, rngs={"sr": KEY})[1]
        return jnp.sum(jnp.sin(3 * y)), y

    grads, y = jit(jax.grad(loss, has_aux=True))(variables)
    first, second = grads["params"]["MoE_0"]["w_in"]
    same_tree(y[0], y[1])
    assert not np.array_equal(first, second)


def test_report_of_a_model_names_its_layers():
    variables = shapes(Block(None), (X, jnp.float32(0)))
    rows = fp4.report(Block(recipe()).apply, variables, (X, jnp.float32(0))).rows
    assert [row.layer for row in rows] == ["MoE_0/router", "MoE_0", "MoE_0"]


# --- training ---


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_learns(mode):
    """Eight experts, two a token: the loss of a teacher of four linear pieces falls to a tenth."""
    x = normal(1, 256, D)
    piece = jnp.argmax(x[:, :4], -1)
    target = jnp.einsum("td,tdn->tn", x, normal(2, 4, D, 8)[piece]) / 4
    model = linen.MoE(8, 32, out_features=8, recipe=recipe(mode))
    optimizer = optax.adamw(2e-2)
    variables = jit(lambda key: model.init(key, x[:1]))(KEY)

    @jit
    def train(variables):
        def step(carry, i):
            variables, state = carry

            def loss(variables):
                y, routing = model.apply(variables, x, rngs={"sr": jax.random.fold_in(KEY, i)})
                error = jnp.mean((y - target) ** 2)
                return error + 0.01 * routing.aux_loss, error

            grads, error = jax.grad(loss, has_aux=True)(variables)
            updates, state = optimizer.update(grads, state, variables)
            return (optax.apply_updates(variables, updates), state), error

        return jax.lax.scan(step, (variables, optimizer.init(variables)), jnp.arange(60))[1]

    losses = train(variables)
    assert np.isfinite(losses).all()
    assert losses[-5:].mean() < losses[0] / 10


# --- refusals ---


@pytest.mark.parametrize("wrong", ["nvfp4", fp4.NVFP4BlockScaling, 3])
@pytest.mark.parametrize("name", ["recipe", "out_recipe", "router_recipe"])
def test_wrong_recipe_is_refused_when_the_layer_is_made(name, wrong):
    refused(lambda: linen.MoE(E, F, **{name: wrong}), TypeError, rf"^MoE: {name} is .*; needs a recipe object")
    if name == "recipe":
        refused(
            lambda: linen.GroupedDense(8, E, recipe=wrong), TypeError, "^GroupedDense: recipe is .*; needs a recipe"
        )


def test_bad_input():
    for fields, says in [
        (dict(top_k=5), "top_k is 5; needs an integer from 1 to 4 because there are 4 experts"),
        (dict(expert_groups=3, top_expert_groups=1), "expert_groups is 3; needs a divisor of 4"),
        (dict(score="tanh"), "score is 'tanh'"),
        (dict(activation="swishglu"), "^MoE: activation is 'swishglu'; needs one of"),
    ]:
        refused(lambda fields=fields: shapes(linen.MoE(E, F, **fields), X), ValueError, says)
    refused(lambda: shapes(linen.MoE(E, F), X, selection_bias=jnp.ones(3)), ValueError, r"bias is of shape \(3,\)")
    grouped, sizes = linen.GroupedDense(8, E), jnp.ones(E + 1, jnp.int32)
    refused(lambda: shapes(grouped, X, sizes), ValueError, r"group_sizes is of shape \(5,\); needs \(4,\)")
    refused(lambda: shapes(grouped, X, jnp.ones(E)), TypeError, "group_sizes is of type float32; needs an int32")


# --- rules ---


@pytest.mark.core
def test_rules_choose_for_experts_and_leave_the_router_alone():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = linen.GroupedDense(D, E, name="grouped")(x.reshape(-1, D), SIZES)
            y, _ = linen.MoE(E, F, 2, name="moe")(x)
            return nn.Dense(8, dot_general_cls=linen.DotGeneral, name="head")(y)

    model = Model()
    variables = some(model, X)
    rules = fp4.Rules([("grouped", recipe("default")), ("moe/?.*", recipe()), ("head/DotGeneral_0", recipe())])
    with fp4.autocast(rules):
        rows = fp4.report(partial(model.apply, rngs={"sr": KEY}), variables, X).rows
        y = jax.eval_shape(model.apply, variables, X)
    assert y.shape == (12, 8)
    assert [(row.layer, row.chosen_by) for row in rows] == [
        ("grouped", "rule 'grouped' = NVFP4BlockScaling"),
        ("moe/router", "recipe=HIGH_PRECISION"),
        ("moe", "rule 'moe/?.*' = NVFP4BlockScaling"),
        ("moe", "rule 'moe/?.*' = NVFP4BlockScaling"),
        ("head/DotGeneral_0", "rule 'head/DotGeneral_0' = NVFP4BlockScaling"),
    ]


def test_a_layer_under_a_rule_has_the_bits_of_its_recipe():
    own, ruled = linen.MoE(E, F, 2, recipe=recipe()), linen.MoE(E, F, 2)
    variables = some(own, X)
    want = jit(own.apply)(variables, X)[0]
    with fp4.autocast(fp4.Rules([("", recipe())])):
        same_tree(jit(ruled.apply)(variables, X)[0], want)
