"""NNX layers: Flax's parameters and signatures, dense's bits, and the stream of stochastic rounding."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from trees import same_tree

import jax_fp4 as fp4
from jax_fp4 import nnx

MODES = ("default", "unquant", "dequant")
KEY = jax.random.key(7)
Rngs, Param = flax_nnx.Rngs, flax_nnx.Param


def recipe(mode="unquant", **kw):
    return fp4.NVFP4BlockScaling(backward_mode=mode, **kw)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def params(model):
    return flax_nnx.state(model, Param).to_pure_dict()


@flax_nnx.jit
def loss_and_grads(model, x, **kw):
    """Loss, and gradients of the parameters; every element of y has a weight of its own."""

    def loss(model, x):
        return jnp.sum(jnp.sin(model(x, **kw).astype(jnp.float32) * 3))

    value, grads = flax_nnx.value_and_grad(loss)(model, x)
    return value, grads.to_pure_dict()


NORMAL = flax_nnx.initializers.normal()
LAYERS = [
    pytest.param("Linear", (33, 10), {}, (4, 33), id="linear"),
    pytest.param("Linear", (32, 10), dict(use_bias=False, dtype=jnp.bfloat16), (2, 3, 32), id="bfloat16"),
    pytest.param(
        "Linear", (32, 8), dict(bias_init=NORMAL, preferred_element_type=jnp.float32), (2, 32), id="preferred"
    ),
    pytest.param("LinearGeneral", (32, 10), {}, (4, 32), id="general"),
    pytest.param(
        "LinearGeneral", ((3, 6), (2, 5)), dict(axis=(1, -1), bias_init=NORMAL), (2, 3, 4, 6), id="several axes"
    ),
    pytest.param(
        "LinearGeneral", (6, (2, 4)), dict(axis=-1, batch_axis={0: 3}, bias_init=NORMAL), (3, 4, 6), id="batch axis"
    ),
]


# --- without a recipe: Flax ---


@pytest.mark.parametrize(("name", "sizes", "fields", "shape"), LAYERS)
@pytest.mark.parametrize("chosen", [pytest.param(None, marks=pytest.mark.core), fp4.HIGH_PRECISION])
def test_without_recipe_every_bit_is_flax(name, sizes, fields, shape, chosen):
    x = normal(1, *shape)
    theirs = getattr(flax_nnx, name)(*sizes, **fields, rngs=Rngs(0))
    ours = getattr(nnx, name)(*sizes, **fields, rngs=Rngs(0), recipe=chosen)
    same_tree(params(ours), params(theirs))
    with fp4.autocast(recipe() if chosen is fp4.HIGH_PRECISION else None):
        same_tree(flax_nnx.jit(ours)(x), flax_nnx.jit(theirs)(x))
        same_tree(loss_and_grads(ours, x), loss_and_grads(theirs, x))


@pytest.mark.parametrize("name", ["Linear", "LinearGeneral"])
def test_signature_is_flax_with_a_recipe(name):
    theirs = inspect.signature(getattr(flax_nnx, name).__init__).parameters
    ours = inspect.signature(getattr(nnx, name).__init__).parameters
    assert {n: p for n, p in ours.items() if n != "recipe"} == theirs
    assert ours["recipe"].default is None
    call = inspect.signature(getattr(nnx, name).__call__).parameters
    assert list(call) == ["self", "inputs", "out_sharding", "key"]
    assert call["key"].kind is inspect.Parameter.KEYWORD_ONLY


class Net(flax_nnx.Module):
    """Two layers of any library and a dropout between them."""

    def __init__(self, layers, rngs, **fields):
        self.first = layers.Linear(16, 32, rngs=rngs, **fields)
        self.dropout = flax_nnx.Dropout(0.5, rngs=rngs)
        self.second = layers.LinearGeneral(32, (2, 8), rngs=rngs, **fields)

    def __call__(self, x):
        return self.second(self.dropout(jax.nn.relu(self.first(x))))


STREAMS = {
    "default": lambda: Rngs(0),
    "params": lambda: Rngs(params=0, dropout=1),
    "sr": lambda: Rngs(params=0, dropout=1, sr=2),
    "default and params": lambda: Rngs(0, params=1),
    "default and sr": lambda: Rngs(0, sr=1),
}


@pytest.mark.core
@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
def test_parameters_and_other_streams_do_not_change(streams):
    """G3. Also the dropout mask drawn beside a layer is Flax's."""
    x, theirs = normal(1, 4, 16), Net(flax_nnx, streams())
    plain = Net(nnx, streams())
    same_tree(params(plain), params(theirs))
    same_tree(plain(x), theirs(x))
    quantized = Net(nnx, streams(), recipe=recipe("default"))
    same_tree(params(quantized), params(theirs))
    quantized(x)
    same_tree(quantized.dropout.rngs.count[...], theirs.dropout.rngs.count[...])
    same_tree(jax.random.key_data(quantized.dropout.rngs.key[...]), jax.random.key_data(theirs.dropout.rngs.key[...]))


def test_metadata_does_not_change():
    fields = dict(
        kernel_init=flax_nnx.with_metadata(flax_nnx.initializers.lecun_normal(), note="mine"),
        bias_metadata=dict(other=3),
        rngs=Rngs(0),
    )
    layer = nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), recipe=recipe(), **fields)
    theirs = flax_nnx.LinearGeneral((2, 3), (4, 5), axis=(-2, -1), **fields)
    for name in ("kernel", "bias"):
        assert getattr(layer, name).get_metadata() == getattr(theirs, name).get_metadata()
    assert layer.kernel.note == "mine"
    assert layer(normal(1, 6, 2, 3)).shape == (6, 4, 5)


# --- with a recipe: dense ---


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_linear_equals_the_function(mode):
    x, chosen = normal(1, 4, 32), recipe(mode)
    layer = nnx.Linear(32, 10, bias_init=NORMAL, rngs=Rngs(0), recipe=chosen)

    def loss(params, x):
        y = fp4.dense(x, params["kernel"], params["bias"], recipe=chosen, key=KEY)
        return jnp.sum(jnp.sin(y * 3))

    same_tree(loss_and_grads(layer, x, key=KEY), jax.jit(jax.value_and_grad(loss))(params(layer), x))


@pytest.mark.parametrize(
    ("sizes", "fields", "shape"),
    [
        ((32, 10), {}, (4, 32)),
        (((4, 8), (2, 5)), dict(axis=(-2, -1)), (3, 4, 8)),
        (((4, 8), (2, 5)), dict(axis=(1, -1)), (3, 4, 7, 8)),
        ((32, 6), dict(batch_axis={0: 3}), (3, 4, 32)),
        ((8, (6,)), dict(batch_axis={0: 2, 1: 3}), (2, 3, 4, 8)),
    ],
)
def test_linear_general_equals_the_function(sizes, fields, shape):
    """Bias included: the layer is one dense for each batch entry, on operands flattened to matrices."""
    x = normal(1, *shape)
    layer = nnx.LinearGeneral(*sizes, **fields, bias_init=NORMAL, rngs=Rngs(0), recipe=recipe())
    y = flax_nnx.jit(layer)(x)
    theirs = flax_nnx.LinearGeneral(*sizes, **fields, rngs=Rngs(0))
    assert y.shape == theirs(x).shape
    axis = [a % x.ndim for a in layer.axis]
    batch = list(layer.batch_axis)
    rows = [a for a in range(x.ndim) if a not in axis + batch]
    b, k, n = (int(np.prod(s)) for s in ([x.shape[a] for a in batch], layer.in_features, layer.out_features))
    xs = x.transpose(*batch, *rows, *axis).reshape(b, -1, k)
    want = [
        jax.jit(partial(fp4.dense, recipe=recipe()))(xi, kernel, bias)
        for xi, kernel, bias in zip(xs, layer.kernel[...].reshape(b, k, n), layer.bias[...].reshape(b, n), strict=True)
    ]
    same_tree(y.reshape(b, -1, n), jnp.stack(want))


def test_axes_in_an_order_that_flax_does_not_contract_are_refused():
    # As many elements, so that flattened axes would fit. Flax contracts in increasing order, and raises too.
    for layers, fields in ((flax_nnx, {}), (nnx, dict(recipe=recipe()))):
        layer = layers.LinearGeneral((3, 2), 5, axis=(-1, 1), rngs=Rngs(0), **fields)
        with pytest.raises(TypeError, match="contracting"):
            layer(normal(1, 4, 2, 3))


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("features", [10, 16])
def test_every_width_has_a_backward(mode, features):
    """C9: nothing is legal in the forward and refused in the backward."""
    layer = nnx.Linear(64, features, rngs=Rngs(0), recipe=recipe(mode))
    _, grads = loss_and_grads(layer, normal(1, 6, 64))
    assert grads["kernel"].shape == (64, features)
    assert all(bool(jnp.isfinite(g).all()) and bool(jnp.any(g)) for g in jax.tree.leaves(grads))


def test_bfloat16_compute_keeps_float32_masters():
    x = normal(1, 4, 32)
    layer = nnx.Linear(32, 16, dtype=jnp.bfloat16, rngs=Rngs(0), recipe=recipe())
    y = layer(x)
    assert y.dtype == jnp.bfloat16
    same_tree(y, fp4.dense(x.astype(jnp.bfloat16), layer.kernel[...], layer.bias[...], recipe=recipe()))
    kernel = loss_and_grads(layer, x)[1]["kernel"]
    assert kernel.dtype == jnp.float32
    assert not np.array_equal(kernel, kernel.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("preferred", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("use_bias", [True, False])
def test_result_dtype_is_flax(dtype, preferred, use_bias):
    fields = dict(dtype=dtype, preferred_element_type=preferred, use_bias=use_bias, rngs=Rngs(0))
    ours, theirs = nnx.Linear(32, 8, recipe=recipe(), **fields), flax_nnx.Linear(32, 8, **fields)
    x = jnp.ones((2, 32))
    assert flax_nnx.eval_shape(ours, x).dtype == flax_nnx.eval_shape(theirs, x).dtype


# --- contexts ---


@pytest.mark.core
def test_contexts_on_one_jitted_module():
    """One jitted function under A, B, none, A."""
    x, layer = normal(1, 4, 32), nnx.Linear(32, 8, rngs=Rngs(0))
    apply = flax_nnx.jit(lambda layer, x: layer(x))
    a, b = recipe(), recipe(two_dimensional_weights=False, row_scaled_activation=True)
    for context in (a, b, None, a):
        with fp4.autocast(context):
            got = apply(layer, x)
        fields = dict(rngs=Rngs(0))
        one = flax_nnx.Linear(32, 8, **fields) if context is None else nnx.Linear(32, 8, recipe=context, **fields)
        same_tree(got, flax_nnx.jit(lambda layer, x: layer(x))(one, x))


def test_layer_comes_before_autocast_and_flax_layers_are_untouched():
    x, layer = normal(1, 4, 32), nnx.Linear(32, 8, rngs=Rngs(0), recipe=recipe(two_dimensional_weights=False))
    plain = flax_nnx.Linear(32, 8, rngs=Rngs(0))
    alone, untouched = layer(x), plain(x)
    for context in (recipe(row_scaled_activation=True), fp4.HIGH_PRECISION):
        with fp4.autocast(context):
            same_tree(layer(x), alone)
            same_tree(plain(x), untouched)


def test_report_says_what_is_not_quantized():
    x, layer = normal(1, 4, 32), nnx.Linear(32, 8, rngs=Rngs(0))
    rows = fp4.report(layer, x).rows
    assert [row.quantized for row in rows] == [False]
    assert "no recipe" in rows[0].note
    with fp4.autocast(recipe()):
        assert [row.quantized for row in fp4.report(layer, x).rows] == [True]


# --- rules, and models of Flax's own layers ---

COARSE = recipe(row_scaled_activation=True, two_dimensional_weights=False)


class Model(flax_nnx.Module):
    """Two nets, a layer in each kind of container, one layer under two names."""

    def __init__(self, layers, rngs):
        self.nets = flax_nnx.List([Net(layers, rngs), Net(layers, rngs)])
        self.tail = flax_nnx.Sequential(layers.Linear(16, 16, rngs=rngs), jax.nn.relu)
        self.plain = flax_nnx.data({"up": (layers.Linear(16, 16, rngs=rngs),)})
        self.tied = self.plain["up"][0]

    def __call__(self, x):
        for net in self.nets:
            x = net(x).reshape(*x.shape[:-1], -1)
        return self.plain["up"][0](self.tied(self.tail(x)))


@pytest.fixture
def model():
    made = Model(flax_nnx, Rngs(0, params=1))
    made.eval()  # no dropout
    return made


def chosen(model, x):
    return {row.layer: row.chosen_by for row in fp4.report(model, x).rows}


@pytest.mark.core
def test_quantize_model_chooses_by_path_and_keeps_what_is_shared(model):
    """G3."""
    before, layers = params(model), [model.nets[0].first, model.tied]
    structure, kernel = jax.tree.structure(flax_nnx.state(model)), model.tied.kernel
    rules = [("nets/0/.*", recipe()), ("nets/1/second|tied", COARSE), ("tail/.*", fp4.HIGH_PRECISION)]
    assert nnx.quantize_model(model, fp4.Rules(rules)) is None
    same_tree(params(model), before)
    assert jax.tree.structure(flax_nnx.state(model)) == structure
    assert model.nets[0].first is layers[0] and model.tied is model.plain["up"][0] is layers[1]
    assert model.tied.kernel is kernel
    assert type(model.tied) is nnx.Linear and type(model.nets[0].second) is nnx.LinearGeneral
    assert [net.first.recipe for net in model.nets] == [recipe(), None]
    assert [net.second.recipe for net in model.nets] == [recipe(), COARSE]
    assert model.tail.layers[0].recipe is fp4.HIGH_PRECISION and model.tied.recipe == COARSE
    assert chosen(model, normal(1, 4, 16)) == {
        "nets/0/first": "rule 'nets/0/.*' = NVFP4BlockScaling",
        "nets/0/second": "rule 'nets/0/.*' = NVFP4BlockScaling",
        "nets/1/first": "no rule matches and no autocast context is around the rules",
        "nets/1/second": "rule 'nets/1/second|tied' = NVFP4BlockScaling",
        "tail/layers/0": "rule 'tail/.*' = HIGH_PRECISION",
        "tied": "rule 'nets/1/second|tied' = NVFP4BlockScaling",
    }


@pytest.mark.core
@pytest.mark.parametrize(("name", "sizes", "fields", "shape"), LAYERS)
def test_a_flax_layer_becomes_ours(name, sizes, fields, shape):
    """Also a model that is one layer, whose path is ""."""
    x, layer = normal(1, *shape), getattr(flax_nnx, name)(*sizes, **fields, rngs=Rngs(0))
    ours = getattr(nnx, name)(*sizes, **fields, rngs=Rngs(0), recipe=recipe("default"))
    nnx.quantize_model(layer, fp4.Rules([("", recipe("default"))]))
    same_tree(params(layer), params(ours))
    same_tree(loss_and_grads(layer, x, key=KEY), loss_and_grads(ours, x, key=KEY))


def test_without_a_match_flax_computes_unless_autocast_says_otherwise(model):
    x = normal(1, 4, 16)
    before, only = model(x), fp4.Rules([("tied", fp4.HIGH_PRECISION)])
    nnx.quantize_model(model, only)
    same_tree(model(x), before)
    with fp4.autocast(recipe()):
        rows = fp4.report(model, x).rows
    assert [row.layer for row in rows if not row.quantized] == ["tied", "tied"] and len(rows) == 7


@pytest.mark.core
def test_a_layer_without_a_recipe_raises_under_rules(model):
    x, rules = normal(1, 4, 16), fp4.Rules([(".*", recipe())])
    layers = [nnx.Linear(16, 8, rngs=Rngs(0)), nnx.LinearGeneral(16, 8, rngs=Rngs(0))]
    grouped = nnx.GroupedLinear(2, 16, 8, rngs=Rngs(0))
    moe = nnx.MoE(2, 16, 8, rngs=Rngs(0))
    nnx.quantize_model(model, fp4.Rules([("tied", recipe())]))
    with fp4.autocast(rules):
        for layer in (*layers, lambda x: grouped(x, jnp.int32([2, 2])), moe, model):
            with pytest.raises(
                ValueError, match=r"recipe is None under autocast\(Rules\).*nnx.quantize_model\(model, rules"
            ):
                layer(x)
        layers[0].recipe = recipe()
        layers[0](x)
        nnx.quantize_model(model, rules)
        model(x)


def test_our_layers_get_a_recipe_unless_they_have_one():
    class Mixed(flax_nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 16, rngs=rngs)
            self.own = nnx.Linear(16, 16, rngs=rngs, recipe=COARSE)
            self.grouped = nnx.GroupedLinear(2, 16, 16, rngs=rngs)
            self.moe = nnx.MoE(2, 16, 8, rngs=rngs)

        def __call__(self, x):
            return self.moe(self.grouped(self.own(self.linear(x)), jnp.int32([2, 2])))[0]

    model = Mixed(Rngs(0))
    sr = model.linear.sr
    nnx.quantize_model(model, fp4.Rules([("moe", COARSE), (".*", recipe())]), rngs=Rngs(5))
    assert model.linear.sr is sr and model.moe.router.recipe is fp4.HIGH_PRECISION
    assert [m.recipe for m in (model.linear, model.own, model.grouped, model.moe)] == [
        recipe(),
        COARSE,
        recipe(),
        COARSE,
    ]
    assert [(row.layer, row.chosen_by) for row in fp4.report(model, normal(1, 4, 16)).rows] == [
        ("linear", "rule '.*' = NVFP4BlockScaling"),
        ("own", "recipe=NVFP4BlockScaling"),
        ("grouped", "rule '.*' = NVFP4BlockScaling"),
        ("moe/router", "recipe=HIGH_PRECISION"),
        ("moe", "rule 'moe' = NVFP4BlockScaling"),
        ("moe", "rule 'moe' = NVFP4BlockScaling"),
    ]


def test_rules_can_be_applied_again(model):
    nnx.quantize_model(model, fp4.Rules([(".*", recipe())]))
    model.tail.layers[0].recipe = COARSE  # the user's own now
    nnx.quantize_model(model, fp4.Rules([("nets/.*", fp4.HIGH_PRECISION), ("tail/.*", recipe())]))
    assert model.nets[0].first.recipe is fp4.HIGH_PRECISION
    assert model.tied.recipe is None and model.tail.layers[0].recipe == COARSE


def test_rngs_give_each_layer_a_stream(model):
    rules = fp4.Rules([(".*", recipe("default"))])
    nnx.quantize_model(model, rules)
    x = normal(1, 4, 16)
    with pytest.raises(ValueError, match="key is None"):
        loss_and_grads(model, x)
    for rngs in (Rngs(3), Rngs(sr=3), Rngs(0, sr=3)):
        again = Model(flax_nnx, Rngs(0, params=1))
        before = params(again)
        nnx.quantize_model(again, rules, rngs=rngs)
        same_tree(params(again), before)
        layers = again.nets[0].first, again.nets[0].second, again.nets[1].first, again.tied
        assert len({tuple(jax.random.key_data(layer.sr()).tolist()) for layer in layers}) == 4
    again.eval()
    _, grads = loss_and_grads(again, x)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(grads))


def test_blocks_share_a_trace(model):
    """The path that the report reads makes no block another function."""
    nnx.quantize_model(model, fp4.Rules([("nets/.*", recipe())]))
    traces = []

    @flax_nnx.jit
    def call(net, x):
        traces.append(1)
        return net(x)

    for net in model.nets:
        call(net, normal(1, 4, 16))
    assert len(traces) == 1


def test_one_jitted_model_under_rules_in_turn(model):
    x, jitted, results = normal(1, 4, 16), flax_nnx.jit(lambda model, x: model(x)), []
    for each in (recipe(), COARSE, fp4.HIGH_PRECISION, recipe()):
        nnx.quantize_model(model, fp4.Rules([("nets/.*", each)]))
        results.append(jitted(model, x))
    same_tree(results[0], results[3])
    assert not any(np.array_equal(results[i], results[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


class Loop(flax_nnx.Module):
    def __init__(self, rngs):
        self.linear = flax_nnx.Linear(16, 16, rngs=rngs)
        self.me = self


def test_a_module_that_holds_itself():
    model = Loop(Rngs(0))
    nnx.quantize_model(model, fp4.Rules([("linear", recipe())]))
    assert model.linear.recipe == recipe()


class Special(flax_nnx.Linear):
    pass


@pytest.mark.parametrize(
    ("rules", "error", "says"),
    [
        (
            [("tied", recipe()), ("nets/0/frist", COARSE)],
            ValueError,
            r"'nets/0/frist', which matches nothing.*'nets/0/first'",
        ),
        ([("tied", recipe()), ("plain/.*", COARSE)], ValueError, "a shared layer, is given .* one recipe"),
        ([("special", recipe())], fp4.UnsupportedError, "'special' is a Special, a subclass"),
        ([("product", recipe())], ValueError, "dot_general is given beside a recipe"),
        (recipe(), TypeError, "rules is NVFP4BlockScaling"),
    ],
)
def test_what_quantize_model_refuses(rules, error, says, model):
    model.special = Special(16, 16, rngs=Rngs(0))
    model.product = flax_nnx.Linear(
        16, 16, rngs=Rngs(0), dot_general=lambda *args, **kw: jax.lax.dot_general(*args, **kw)
    )
    rules = fp4.Rules([*rules, ("nets/1/.*", recipe())]) if isinstance(rules, list) else rules
    with pytest.raises(error, match=says) as caught:
        nnx.quantize_model(model, rules)
    assert "; needs " in str(caught.value) and " Try " in str(caught.value)
    assert type(model.nets[1].first) is flax_nnx.Linear  # nothing is changed
    nnx.quantize_model(model, fp4.Rules([("special|product", fp4.HIGH_PRECISION)]))
    assert type(model.special) is Special


def test_quantize_model_needs_something_to_draw_from(model):
    with pytest.raises(ValueError, match=r"rngs is with the streams \('params',\)"):
        nnx.quantize_model(model, fp4.Rules([(".*", recipe())]), rngs=Rngs(params=0))
    with pytest.raises(ValueError, match="the model has no Linear"):
        nnx.quantize_model(flax_nnx.Dropout(0.5), fp4.Rules([(".*", recipe())]))


# --- randomness ---


@pytest.mark.core
def test_missing_stream_is_an_error_only_when_differentiated():
    x, layer = normal(1, 4, 32), nnx.Linear(32, 8, rngs=Rngs(params=0), recipe=recipe("default"))
    assert layer.sr is None
    layer(x)
    with pytest.raises(ValueError, match=r"key is None; needs .* Try .*sr=1"):
        loss_and_grads(layer, x)
    loss_and_grads(layer, x, key=KEY)


@pytest.mark.core
def test_closed_over_by_jax_the_layer_evaluates_and_never_repeats_draws():
    """A plain JAX transformation may not advance the stream: no key, which is an error only when differentiated."""
    x, layer = normal(1, 4, 32), nnx.Linear(32, 8, rngs=Rngs(0), recipe=recipe("default"))
    same_tree(jax.jit(lambda x: layer(x))(x), layer(x))
    jax.vmap(lambda x: layer(x))(x)
    with pytest.raises(ValueError, match="key is None"):
        jax.grad(lambda x: layer(x).sum())(x)
    jax.grad(lambda x: layer(x, key=KEY).sum())(x)


@pytest.mark.parametrize("streams", [lambda: Rngs(0), lambda: Rngs(params=0, sr=1)])
def test_streams_differ_by_layer_and_by_call(streams):
    rngs = streams()
    layers = [nnx.Linear(32, 8, rngs=rngs, recipe=recipe("default")) for _ in range(2)]
    drawn = [jax.random.key_data(layer.sr()).tolist() for layer in layers for _ in range(2)]
    assert len(set(map(tuple, drawn))) == 4
    # Independent of the keys that parameters come from.
    fresh, again = streams(), streams()
    keys = [jax.random.key_data(again.params()).tolist() for _ in range(8)]
    assert jax.random.key_data(nnx.Linear(32, 8, rngs=fresh).sr.key[...]).tolist() not in keys


def test_same_stream_same_bits_and_an_explicit_key_wins():
    x = normal(1, 8, 32)

    def fresh(seed):
        return nnx.Linear(32, 32, rngs=Rngs(params=0, sr=seed), recipe=recipe("default"))

    once, again, other = (loss_and_grads(fresh(seed), x) for seed in (1, 1, 2))
    same_tree(once, again)
    assert not np.array_equal(once[1]["kernel"], other[1]["kernel"])
    layer = fresh(1)
    same_tree(loss_and_grads(layer, x, key=KEY), loss_and_grads(fresh(2), x, key=KEY))
    assert int(layer.sr.count[...]) == 0  # left alone
    first, second = loss_and_grads(layer, x), loss_and_grads(layer, x)
    same_tree(first, once)
    assert not np.array_equal(first[1]["kernel"], second[1]["kernel"])
    assert int(layer.sr.count[...]) == 2


@pytest.mark.parametrize(
    "chosen", [None, recipe("unquant"), recipe("dequant"), recipe("default", stochastic_rounding=False)]
)
def test_a_stream_is_drawn_from_only_where_it_is_used(chosen):
    layer = nnx.Linear(32, 8, rngs=Rngs(0, sr=1), recipe=chosen)
    loss_and_grads(layer, normal(1, 4, 32))
    assert int(layer.sr.count[...]) == 0


# --- transformations ---


@pytest.mark.core
def test_split_and_merge_under_jax():
    x, layer = normal(1, 4, 32), nnx.Linear(32, 8, rngs=Rngs(0), recipe=recipe("default"))
    graph, weights, rest = flax_nnx.split(layer, Param, ...)

    @jax.jit
    def gradient(weights, rest):
        def loss(weights):
            model = flax_nnx.merge(graph, weights, rest, copy=True)  # which any stream needs here: Dropout's too
            return jnp.sum(jnp.sin(model(x) * 3)), flax_nnx.state(model, flax_nnx.Not(Param))

        return jax.value_and_grad(loss, has_aux=True)(weights)

    (value, after), grads = gradient(weights, rest)
    same_tree((value, grads.to_pure_dict()), loss_and_grads(layer, x))
    flax_nnx.update(layer, after)
    assert int(layer.sr.count[...]) == 1


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_scan_over_layers_equals_a_loop(mode):
    x, depth = normal(1, 4, 32), 3

    def stack(layers, **fields):
        @flax_nnx.split_rngs(splits=depth)
        @flax_nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return layers.Linear(32, 32, rngs=rngs, **fields)

        return make(Rngs(0, sr=1))

    @flax_nnx.scan(in_axes=(0, flax_nnx.Carry), out_axes=flax_nnx.Carry)
    @flax_nnx.remat
    def scanned(layer, x):
        return jnp.tanh(layer(x))

    model = stack(nnx, recipe=recipe(mode))
    same_tree(params(model), params(stack(flax_nnx)))
    value, grads = flax_nnx.jit(flax_nnx.value_and_grad(lambda model, x: jnp.sum(jnp.sin(scanned(model, x)))))(model, x)
    if mode == "default":
        np.testing.assert_array_equal(model.sr.count[...], np.ones(depth))
    graph, state = flax_nnx.split(stack(nnx, recipe=recipe(mode)))

    def loop(model_params):
        y = x
        for i in range(depth):
            layer = flax_nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))
            flax_nnx.update(layer, jax.tree.map(lambda leaf, i=i: leaf[i], model_params))
            y = jnp.tanh(layer(y))
        return jnp.sum(jnp.sin(y))

    want, want_grads = jax.jit(jax.value_and_grad(loop))(flax_nnx.state(model, Param))
    np.testing.assert_allclose(value, want, rtol=1e-6)
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_vmap_over_layers():
    x, size = normal(1, 3, 4, 32), 3

    @flax_nnx.split_rngs(splits=size)
    @flax_nnx.vmap
    def make(rngs):
        return nnx.Linear(32, 8, rngs=rngs, recipe=recipe("default"))

    model = make(Rngs(0))
    y = flax_nnx.jit(flax_nnx.vmap(lambda layer, x: layer(x)))(model, x)
    dense = jax.jit(partial(fp4.dense, recipe=recipe("default")))
    same_tree(y, jnp.stack([dense(x[i], model.kernel[i], model.bias[i]) for i in range(size)]))
    assert len({tuple(row) for row in jax.random.key_data(model.sr.key[...]).tolist()}) == size


def test_clone_and_recipe_of_a_copy():
    layer = nnx.Linear(32, 8, rngs=Rngs(0), recipe=fp4.HIGH_PRECISION)
    copy = flax_nnx.clone(layer)
    assert copy.recipe is fp4.HIGH_PRECISION
    copy.recipe = recipe()
    x = normal(1, 4, 32)
    same_tree(copy(x), fp4.dense(x, layer.kernel[...], layer.bias[...], recipe=recipe()))


# --- dot_general, refusals ---


@pytest.mark.core
def test_dot_general_plugs_into_unmodified_layers():
    x, chosen = normal(1, 4, 32), recipe()
    plain = flax_nnx.Linear(32, 8, rngs=Rngs(0))
    plugged = flax_nnx.Linear(32, 8, rngs=Rngs(0), dot_general=fp4.DotGeneral(chosen))
    same_tree(params(plugged), params(plain))
    same_tree(plugged(x), fp4.dense(x, plain.kernel[...], recipe=chosen) + plain.bias[...])
    general = flax_nnx.LinearGeneral(32, 8, rngs=Rngs(0), dot_general_cls=fp4.DotGeneral)
    same_tree(general(x), plain(x))
    with fp4.autocast(chosen):
        same_tree(general(x), plugged(x))
    same_tree(flax_nnx.jit(plugged)(x), jax.jit(lambda x: plugged(x))(x))


def test_own_dot_general_beside_a_recipe_is_refused():
    def own(*args, **kwargs):
        return jax.lax.dot_general(*args, **kwargs)

    x = normal(1, 4, 32)
    for layer in (nnx.Linear, nnx.LinearGeneral):
        make = partial(layer, 32, 8, rngs=Rngs(0), dot_general=own)
        with pytest.raises(ValueError, match=r"dot_general is given beside a recipe; needs .* Try"):
            make(recipe=recipe())
        with fp4.autocast(recipe()), pytest.raises(ValueError, match=r"dot_general is given .*autocast"):
            make()(x)
        with fp4.autocast(recipe()):
            make(recipe=fp4.HIGH_PRECISION)(x)
    with pytest.raises(ValueError, match="dot_general_cls is given"):
        nnx.LinearGeneral(32, 8, rngs=Rngs(0), dot_general_cls=fp4.DotGeneral, recipe=recipe())


@pytest.mark.parametrize("layer", [nnx.Linear, nnx.LinearGeneral])
def test_bad_input(layer):
    rngs = Rngs(0)
    for wrong in ("nvfp4", fp4.NVFP4BlockScaling, 3):
        with pytest.raises(TypeError, match=r"recipe is .*; needs a recipe object .* Try"):
            layer(32, 8, rngs=rngs, recipe=wrong)
    assert int(rngs.default.count[...]) == 0
    made = layer(32, 8, rngs=rngs, recipe=recipe())
    x = normal(1, 4, 32)
    with pytest.raises(TypeError, match=r"key is .*; needs one JAX key"):
        made(x, key=3)
    with jax.enable_x64(True), pytest.raises(TypeError, match="float64"):
        made(x.astype(jnp.float64))


@pytest.mark.parametrize("layer", [nnx.Linear, nnx.LinearGeneral])
def test_out_sharding(layer):
    """Where the result goes, as in the layers of Flax."""
    mesh, spec = jax.make_mesh((2, 4), ("data", "model")), jax.sharding.PartitionSpec("data", "model")
    made, x = layer(32, 8, rngs=Rngs(0), recipe=recipe()), normal(1, 4, 32)
    want = made(x)
    with jax.set_mesh(mesh):
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        graph, state = flax_nnx.split(made)
        state, x = jax.device_put((state, x), whole)
        y = jax.jit(lambda state, x: flax_nnx.merge(graph, state)(x, spec))(state, x)
    assert y.sharding.spec == spec
    same_tree(y, want)
