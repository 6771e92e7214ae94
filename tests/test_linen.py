"""Linen layers: Flax's parameters and signatures, dense's bits."""

import inspect
import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from trees import same_tree

import jax_fp4 as fp4
from jax_fp4 import linen

MODES = ("default", "unquant", "dequant")
KEY = jax.random.key(0)


def recipe(mode="unquant", **kw):
    return fp4.NVFP4BlockScaling(backward_mode=mode, **kw)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def some(model, x, *more):
    """Variables of the model, of no particular values: initializers take longest to compile."""
    shapes = jax.eval_shape(lambda rngs, x: model.init(rngs, x, *more), KEY, x)
    return jax.tree.map(lambda leaf: (normal(leaf.size, *leaf.shape) / 4).astype(leaf.dtype), shapes)


def apply(model, variables, x, **kw):
    return jax.jit(lambda variables, x: model.apply(variables, x, **kw))(variables, x)


def function(chosen, variables, x, **kw):
    """What a layer with these parameters must compute."""
    params = variables["params"]
    return jax.jit(lambda params, x: fp4.dense(x, params["kernel"], params["bias"], recipe=chosen, **kw))(params, x)


def value_and_grads(model, variables, x, **kw):
    """y and the gradients of a sum that weighs every element of y differently."""

    def loss(variables, x):
        y = model.apply(variables, x, **kw)
        return jnp.sum(jnp.sin(y.astype(jnp.float32) * 3)), y

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(variables, x)


LAYERS = [
    pytest.param("Dense", dict(features=10), (4, 33), id="dense"),
    pytest.param("Dense", dict(features=10, use_bias=False, dtype=jnp.bfloat16), (2, 3, 32), id="bfloat16"),
    pytest.param("Dense", dict(features=8, bias_init=nn.initializers.normal()), (2, 32), id="bias"),
    pytest.param("DenseGeneral", dict(features=10), (4, 32), id="general"),
    pytest.param(
        "DenseGeneral",
        dict(features=(3, 5), axis=(-1, 1), bias_init=nn.initializers.normal()),
        (2, 4, 3, 6),
        id="several axes",
    ),
    pytest.param(
        "DenseGeneral",
        dict(features=(2, 4), axis=(1, -1), batch_dims=(0,), bias_init=nn.initializers.normal()),
        (3, 4, 5, 6),
        id="batch axis",
    ),
]


# --- without a recipe: Flax ---


@pytest.mark.parametrize(("name", "fields", "shape"), LAYERS)
@pytest.mark.parametrize("chosen", [pytest.param(None, marks=pytest.mark.core), fp4.HIGH_PRECISION])
def test_without_recipe_every_bit_is_flax(name, fields, shape, chosen):
    x = normal(1, *shape)
    flax, ours = getattr(nn, name)(**fields), getattr(linen, name)(**fields, recipe=chosen)
    with fp4.autocast(recipe() if chosen is fp4.HIGH_PRECISION else None):
        variables = ours.init(KEY, x)
        same_tree(variables, flax.init(KEY, x))
        same_tree(value_and_grads(ours, variables, x), value_and_grads(flax, variables, x))


@pytest.mark.parametrize("name", ["Dense", "DenseGeneral"])
def test_signature_is_flax_with_a_recipe(name):
    theirs = inspect.signature(getattr(nn, name)).parameters
    ours = inspect.signature(getattr(linen, name)).parameters
    assert {n: p for n, p in ours.items() if n != "recipe"} == theirs
    assert list(ours)[-3] == "recipe"  # before parent and name, as in any Flax layer
    assert ours["recipe"].default is None


class Net(nn.Module):
    """Two layers of any library, whose names Flax derives from the class."""

    layers: object
    fields: tuple = ()

    @nn.compact
    def __call__(self, x):
        fields = dict(self.fields)
        x = nn.relu(self.layers.Dense(32, **fields)(x))
        x = nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(x)
        return self.layers.DenseGeneral((2, 8), **fields)(x)


@pytest.mark.core
@pytest.mark.parametrize("streams", [("params",), ("params", "sr"), ("params", "dropout", "sr")])
def test_tree_values_and_other_streams_do_not_change(streams):
    """G3. Also the dropout mask drawn beside a layer is Flax's."""
    x, rngs = normal(1, 4, 16), {name: jax.random.key(i) for i, name in enumerate(streams)}
    theirs = Net(nn).init(rngs, x)
    for fields in ((), (("recipe", recipe("default")),)):
        same_tree(Net(linen, fields).init(rngs, x), theirs)
    with fp4.autocast(recipe("default")):
        ours = Net(linen).init(rngs, x)
    same_tree(ours, theirs)
    same_tree(*(optax.adamw(1e-3).init(variables["params"]) for variables in (ours, theirs)))


@pytest.mark.parametrize("box", [nn.with_partitioning, nn.with_logical_partitioning])
def test_metadata_boxes_do_not_change(box):
    x = normal(1, 3, 4, 6)
    fields = dict(
        features=(2, 4),
        axis=(-2, -1),
        kernel_init=box(nn.initializers.lecun_normal(), ("a", "b", "c", None)),
        bias_init=box(nn.initializers.normal(), ("c", None)),
    )
    theirs = nn.DenseGeneral(**fields).init(KEY, x)
    ours = linen.DenseGeneral(**fields, recipe=recipe())
    variables = ours.init(KEY, x)
    same_tree(variables, theirs)
    same_tree(apply(ours, variables, x), apply(ours, nn.unbox(variables), x))
    fields = dict(features=5, kernel_init=box(nn.initializers.lecun_normal(), ("a", "b")))
    same_tree(linen.Dense(**fields, recipe=recipe()).init(KEY, x), nn.Dense(**fields).init(KEY, x))


def test_intermediates_and_scopes_do_not_change():
    x = normal(1, 4, 16)
    variables = some(Net(nn), x)
    capture = dict(capture_intermediates=True, mutable=["intermediates"])
    _, theirs = apply(Net(nn), variables, x, **capture)
    for fields in ((), (("recipe", recipe()),)):
        _, ours = apply(Net(linen, fields), variables, x, **capture)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)


# --- with a recipe: dense ---


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_dense_equals_the_function(mode):
    x, chosen = normal(1, 4, 32), recipe(mode)
    model = linen.Dense(10, bias_init=nn.initializers.normal(), recipe=chosen)
    variables = some(model, x)

    # The key that the layer draws: only mode default reads it.
    key = nn.apply(lambda layer: layer.make_rng("sr"), model)(variables, rngs={"sr": KEY})

    class Function:
        @staticmethod
        def apply(variables, x):
            params = variables["params"]
            return fp4.dense(x, params["kernel"], params["bias"], recipe=chosen, key=key)

    same_tree(value_and_grads(model, variables, x, rngs={"sr": KEY}), value_and_grads(Function, variables, x))


@pytest.mark.parametrize(
    ("fields", "shape", "spec"),
    [
        (dict(features=10, axis=-1), (4, 32), "mk,kn->mn"),
        (dict(features=(2, 5), axis=(-2, -1)), (3, 4, 8), "mab,abcd->mcd"),
        (dict(features=(2, 5), axis=(1, -1)), (3, 4, 7, 8), "manb,abcd->mncd"),
        (dict(features=(2, 5), axis=(-1, 1)), (3, 4, 7, 8), "manb,abcd->mncd"),
        (dict(features=6, axis=(2,), batch_dims=(0,)), (3, 4, 32), "gmk,gkn->gmn"),
        (dict(features=(6,), axis=(2, -1), batch_dims=(1, 0)), (2, 3, 4, 8), "ghab,ghabn->ghn"),
    ],
)
def test_dense_general_is_the_product_of_what_it_quantizes(fields, shape, spec):
    """Against an einsum of dequantized operands: axes, batches, bias; each batch entry quantized alone."""
    x, chosen = normal(1, *shape), recipe(two_dimensional_weights=False)
    model = linen.DenseGeneral(**fields, bias_init=nn.initializers.normal(), recipe=chosen)
    variables = some(model, x)
    y = apply(model, variables, x)
    inputs, kernel_axes = spec.split("->")[0].split(",")
    contracted = [a for a in kernel_axes if a in inputs and a not in "gh"]

    def dequantized(value, axes):
        """Quantized along the contracted axes as [batch, others, contracted]: there are no tiles, so w goes like x."""
        batch, others = [a for a in axes if a in "gh"], [a for a in axes if a not in [*contracted, *"gh"]]
        size = dict(zip(axes, value.shape, strict=True))
        order = "".join([*batch, *others, *contracted])
        turned = np.einsum(f"{axes}->{order}", np.asarray(value))
        matrix = turned.reshape([math.prod(size[a] for a in part) for part in (batch, others, contracted)])
        quantized = fp4.quantize(matrix, batch_dims=1, implementation="reference")
        values = fp4.dequantize(quantized, implementation="reference").reshape(turned.shape)
        return np.einsum(f"{order}->{axes}", values.astype(np.float64))

    want = np.einsum(spec, dequantized(x, inputs), dequantized(variables["params"]["kernel"], kernel_axes))
    bias, batch = np.asarray(variables["params"]["bias"]), len(fields.get("batch_dims", ()))
    want += bias.reshape(*bias.shape[:batch], *(1,) * (want.ndim - bias.ndim), *bias.shape[batch:])
    assert y.shape == jax.eval_shape(nn.DenseGeneral(**fields).apply, variables, x).shape
    assert np.linalg.norm(y - want) <= 1e-6 * np.linalg.norm(want)


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("features", [10, 16])
def test_every_width_has_a_backward(mode, features):
    """C9: nothing is legal in the forward and refused in the backward."""
    x, model = normal(1, 6, 64), linen.Dense(features, recipe=recipe(mode))
    (_, y), (dw, dx) = value_and_grads(model, some(model, x), x, rngs={"sr": KEY})
    assert y.shape == (6, features)
    assert dx.shape == x.shape
    assert all(bool(jnp.isfinite(leaf).all()) and bool(jnp.any(leaf)) for leaf in jax.tree.leaves((dw, dx)))


def test_bfloat16_compute_keeps_float32_masters():
    x = normal(1, 4, 32)
    model = linen.Dense(16, dtype=jnp.bfloat16, bias_init=nn.initializers.normal(), recipe=recipe())
    variables = some(model, x)
    (_, y), (dv, dx) = value_and_grads(model, variables, x)
    assert (y.dtype, dx.dtype) == (jnp.bfloat16, jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(dv)} == {jnp.dtype("float32")}
    # The gradient comes in float32, unrounded: some of it is no bfloat16 number.
    kernel = dv["params"]["kernel"]
    assert not np.array_equal(kernel, kernel.astype(jnp.bfloat16).astype(jnp.float32))
    same_tree(y, function(recipe(), variables, x.astype(jnp.bfloat16)))


def test_integers_promote_as_in_flax():
    x = jnp.arange(32).reshape(2, 16)
    model = linen.Dense(4, recipe=recipe())
    variables = some(model, x)
    same_tree(apply(model, variables, x), apply(model, variables, x.astype(jnp.float32)))


def test_own_promote_dtype_is_honoured():
    def promote(x, kernel, bias, *, dtype=None, inexact=True):
        return [x, 2 * kernel, bias]

    x = normal(1, 4, 32)
    model = linen.Dense(8, promote_dtype=promote, recipe=recipe())
    variables = some(model, x)
    kernel, bias = variables["params"]["kernel"], variables["params"]["bias"]
    doubled = {"params": {"kernel": 2 * kernel, "bias": bias}}
    same_tree(apply(model, variables, x), function(recipe(), doubled, x))


# --- contexts ---


@pytest.mark.core
@pytest.mark.parametrize("lift", [lambda module: module, nn.jit, nn.remat])
def test_contexts_on_one_jitted_module(lift):
    """One jitted function under A, B, none, A."""
    x = normal(1, 4, 32)
    model = lift(linen.Dense)(8)
    variables = some(model, x)
    jitted = jax.jit(model.apply)
    a, b = recipe(), recipe(two_dimensional_weights=False, row_scaled_activation=True)
    for context in (a, b, None, a):
        with fp4.autocast(context):
            got = jitted(variables, x)
        reference = nn.Dense(8) if context is None else linen.Dense(8, recipe=context)
        same_tree(got, apply(reference, variables, x))


def test_layer_comes_before_autocast():
    x = normal(1, 4, 32)
    chosen = recipe(two_dimensional_weights=False)
    model = linen.Dense(8, recipe=chosen)
    variables = some(model, x)
    alone = apply(model, variables, x)
    with fp4.autocast(recipe(row_scaled_activation=True)):
        same_tree(apply(model, variables, x), alone)
    with fp4.autocast(fp4.HIGH_PRECISION):
        same_tree(apply(model, variables, x), alone)
        same_tree(apply(linen.Dense(8), variables, x), apply(nn.Dense(8), variables, x))


def test_flax_layers_under_autocast_are_untouched():
    x = normal(1, 4, 32)  # E13
    variables = some(nn.Dense(8), x)
    before = apply(nn.Dense(8), variables, x)
    with fp4.autocast(recipe()):
        same_tree(apply(nn.Dense(8), variables, x), before)


@pytest.mark.core
def test_report_names_layers_and_reasons():
    x = normal(1, 4, 16)
    model = Net(linen, (("recipe", recipe()),))
    rows = fp4.report(model.apply, some(model, x), x).rows
    assert [(row.layer, row.quantized) for row in rows] == [("Dense_0", True), ("DenseGeneral_0", True)]
    forgotten = Net(linen)  # E15
    rows = fp4.report(forgotten.apply, some(forgotten, x), x).rows
    assert [(row.layer, row.quantized) for row in rows] == [("Dense_0", False), ("DenseGeneral_0", False)]
    assert all("no recipe" in row.note for row in rows)


# --- rules, and models of Flax's own layers ---

COARSE = recipe(row_scaled_activation=True, two_dimensional_weights=False)


class Blocks(nn.Module):
    """Two blocks of any library, lifted or not, and a head."""

    layers: object
    lift: object = staticmethod(lambda module: module)

    @nn.compact
    def __call__(self, x):
        for name in ("a", "b"):
            x = self.lift(Net)(self.layers, name=name)(x).reshape(*x.shape[:-1], -1)
        return self.layers.Dense(8, name="head")(x)


def layer_paths(variables):
    """Paths of the modules that have a kernel."""
    leaves = jax.tree_util.tree_leaves_with_path(variables["params"])
    return sorted({"/".join(key.key for key in path[:-1]) for path, _ in leaves})


def chosen(model, variables, *args, **kw):
    """{path: what decided} for the calls of a model."""
    return {row.layer: row.chosen_by for row in fp4.report(model.apply, variables, *args, **kw).rows}


@pytest.mark.core
@pytest.mark.parametrize("context", [fp4.autocast, linen.quantized])
@pytest.mark.parametrize("lift", [lambda module: module, nn.jit, nn.remat])
def test_a_rule_matches_the_path_of_the_parameters(context, lift):
    x = normal(1, 4, 16)
    model = Blocks(linen if context is fp4.autocast else nn, lift)
    variables = some(model, x)
    rules = fp4.Rules([("a/Dense_0", recipe()), ("b/.*", COARSE), ("head", fp4.HIGH_PRECISION)])
    with context(rules):
        assert chosen(model, variables, x) == {
            "a/Dense_0": "rule 'a/Dense_0' = NVFP4BlockScaling",
            "a/DenseGeneral_0": "no rule matches and no autocast context is around the rules",
            "b/Dense_0": "rule 'b/.*' = NVFP4BlockScaling",
            "b/DenseGeneral_0": "rule 'b/.*' = NVFP4BlockScaling",
            "head": "rule 'head' = HIGH_PRECISION",
        }
        got = apply(model, variables, x)
    params = variables["params"]
    plain, first = Net(nn), params["a"]
    y = function(recipe(), {"params": first["Dense_0"]}, x)
    y = nn.DenseGeneral((2, 8)).apply({"params": first["DenseGeneral_0"]}, nn.relu(y)).reshape(4, 16)
    with linen.quantized(COARSE):
        y = plain.apply({"params": params["b"]}, y).reshape(4, 16)
    same_tree(got, nn.Dense(8).apply({"params": params["head"]}, y))


@pytest.mark.core
@pytest.mark.parametrize("library", [nn, linen])
def test_one_jitted_model_under_rules_in_turn(library):
    x = normal(1, 4, 16)
    model = Blocks(library)
    variables = some(model, x)
    jitted = jax.jit(model.apply)
    rules = [fp4.Rules([("a/.*", each)]) for each in (recipe(), COARSE)]
    results = []
    for each in (rules[0], rules[1], None, rules[0]):
        with linen.quantized(each):
            results.append(jitted(variables, x))
    same_tree(results[0], results[3])
    same_tree(results[2], jax.jit(Blocks(nn).apply)(variables, x))
    assert not any(np.array_equal(results[i], results[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_a_function_traced_under_autocast_is_traced_again_with_its_layers_replaced():
    x, rules = normal(1, 4, 16), fp4.Rules([(".*", recipe())])
    model = nn.Dense(8)
    variables = some(model, x)
    jitted = jax.jit(model.apply)
    with fp4.autocast(rules):
        same_tree(jitted(variables, x), apply(model, variables, x))  # E13
    with linen.quantized(rules):
        same_tree(jitted(variables, x), function(recipe(), variables, x))


@pytest.mark.core
def test_paths_in_a_scan_of_remat():
    x = normal(1, 4, 32)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(32)(nn.tanh(nn.Dense(32, name="up")(x))), None

    scanned = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
    model = scanned(name="blocks")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(scanned(name="blocks")(x, None)[0])

    model = Model()
    variables = some(model, x)
    with linen.quantized(fp4.Rules([("blocks/up", recipe()), ("Dense_0", COARSE)])):
        by = chosen(model, variables, x)
        y = apply(model, variables, x)
    assert sorted(by) == layer_paths(variables) == ["Dense_0", "blocks/Dense_0", "blocks/up"]
    assert by["blocks/up"].startswith("rule 'blocks/up'") and by["blocks/Dense_0"].startswith("no rule")
    for i in range(3):
        params = jax.tree.map(lambda leaf, i=i: leaf[i], variables["params"]["blocks"])
        x = nn.Dense(32).apply({"params": params["Dense_0"]}, nn.tanh(function(recipe(), {"params": params["up"]}, x)))
    np.testing.assert_allclose(y, function(COARSE, {"params": variables["params"]["Dense_0"]}, x), rtol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize(("name", "fields", "shape"), LAYERS)
def test_a_flax_layer_becomes_ours(name, fields, shape):
    x, rngs = normal(1, *shape), {"sr": KEY}
    theirs, ours = getattr(nn, name)(**fields), getattr(linen, name)(**fields, recipe=recipe("default"))
    variables = ours.init(KEY, x)
    with linen.quantized(fp4.Rules([(".*", recipe("default"))])):
        same_tree(theirs.init(KEY, x), variables)
        got = value_and_grads(theirs, variables, x, rngs=rngs)
    same_tree(got, value_and_grads(ours, variables, x, rngs=rngs))
    with linen.quantized(fp4.Rules([(".*", fp4.HIGH_PRECISION)])):
        got = apply(theirs, variables, x)
    same_tree(got, apply(theirs, variables, x))


def test_replacing_changes_no_tree_and_no_other_stream():
    """G3."""
    x, rngs = normal(1, 4, 16), {name: jax.random.key(i) for i, name in enumerate(("params", "dropout", "sr"))}
    with linen.quantized(recipe("default")):
        ours = Net(nn).init(rngs, x)
        _, seen = Net(nn).apply(ours, x, capture_intermediates=True, mutable=["intermediates"])
    same_tree(ours, Net(nn).init(rngs, x))
    _, theirs = Net(nn).apply(ours, x, capture_intermediates=True, mutable=["intermediates"])
    assert jax.tree.structure(seen) == jax.tree.structure(theirs)


def test_a_subclass_is_replaced_where_it_uses_the_call_of_flax():
    class Scaled(nn.Dense):
        @nn.compact
        def __call__(self, x):
            return 2 * super().__call__(x)

    x = normal(1, 4, 16)
    variables = some(Scaled(8), x)
    with linen.quantized(recipe()):
        same_tree(apply(Scaled(8), variables, x), 2 * function(recipe(), variables, x))


def test_attention_by_rules():
    x = normal(1, 2, 6, 16)
    model = nn.MultiHeadDotProductAttention(num_heads=2)
    variables = some(model, x)
    with linen.quantized(fp4.Rules([("query|key", recipe()), ("out", fp4.HIGH_PRECISION)])):
        by = chosen(model, variables, x)
    assert {path: why.split(" ")[0] for path, why in by.items()} == dict(
        query="rule", key="rule", value="no", out="rule"
    )


def test_a_shared_layer_has_the_path_of_its_parameters():
    class Tied(nn.Module):
        def setup(self):
            self.dense = nn.Dense(16)

        def __call__(self, x):
            return self.dense(self.dense(x))

    x = normal(1, 4, 16)
    variables = some(Tied(), x)
    with linen.quantized(fp4.Rules([("dense", recipe())])):
        rows = fp4.report(Tied().apply, variables, x).rows
        assert [(row.layer, row.quantized) for row in rows] == [("dense", True)] * 2


def test_the_recipe_of_a_layer_comes_before_rules():
    x = normal(1, 4, 32)
    model = linen.Dense(8, recipe=COARSE)
    variables = some(model, x)
    alone = apply(model, variables, x)
    for context in (fp4.autocast, linen.quantized):
        with context(fp4.Rules([(".*", recipe())])):
            same_tree(apply(model, variables, x), alone)
            assert chosen(model, variables, x) == {"dense": "recipe=NVFP4BlockScaling"}


def test_a_rule_that_matches_nothing_is_in_the_report():
    x = normal(1, 4, 16)
    model = Net(nn)
    variables = some(model, x)
    rules = fp4.Rules([("dense_0", recipe()), (".*", recipe())])
    with linen.quantized(rules), pytest.warns(UserWarning, match="the rule 'dense_0' matched no layer"):
        report = fp4.report(model.apply, variables, x)
    assert report.unmatched == ("dense_0",) and "the rule 'dense_0' matched no layer" in str(report)
    assert "; rule '.*' = NVFP4BlockScaling" in str(report)


def test_replacing_refuses_what_it_would_ignore():
    x = normal(1, 4, 16)
    model = nn.Dense(8, dot_general=lambda *args, **kw: jax.lax.dot_general(*args, **kw))
    variables = some(model, x)
    with linen.quantized(recipe()), pytest.raises(ValueError, match="Dense: dot_general is given beside a recipe"):
        model.apply(variables, x)
    with linen.quantized(fp4.Rules([(".*", fp4.HIGH_PRECISION)])):
        model.apply(variables, x)
    for wrong in ("nvfp4", fp4.NVFP4BlockScaling):
        with pytest.raises(TypeError, match="recipe is"), linen.quantized(wrong):
            pass


def test_replacing_ends_with_its_context():
    x = normal(1, 4, 16)
    variables = some(nn.Dense(8), x)
    plain = apply(nn.Dense(8), variables, x)
    with pytest.raises(RuntimeError), linen.quantized(recipe()):
        raise RuntimeError
    same_tree(apply(nn.Dense(8), variables, x), plain)


# --- randomness ---


@pytest.mark.core
def test_missing_stream_is_an_error_only_when_differentiated():
    x, model = normal(1, 4, 32), linen.Dense(8, recipe=recipe("default"))
    variables = some(model, x)
    apply(model, variables, x)
    with pytest.raises(ValueError, match=r"key is None; needs .* Try .*rngs=\{'sr': key\}"):
        value_and_grads(model, variables, x)
    value_and_grads(linen.Dense(8, recipe=recipe("default", stochastic_rounding=False)), variables, x)


def test_same_stream_same_bits_and_each_layer_its_own():
    x = normal(1, 8, 32)
    model = nn.Sequential([linen.Dense(32, recipe=recipe("default")) for _ in range(2)])
    variables = some(model, x)
    once, again, other = (
        value_and_grads(model, variables, x, rngs={"sr": jax.random.key(seed)})[1] for seed in (1, 1, 2)
    )
    same_tree(once, again)
    assert not np.array_equal(once[1], other[1])


@pytest.mark.parametrize(
    "chosen", [recipe("unquant"), recipe("dequant"), recipe("default", stochastic_rounding=False), None]
)
def test_a_stream_is_drawn_from_only_where_it_is_used(chosen):
    x = normal(1, 4, 32)

    class Refusing(linen.Dense):
        def make_rng(self, name="params"):
            raise AssertionError(f"drew from {name}")

    apply(Refusing(8, recipe=chosen), some(nn.Dense(8), x), x, rngs={"sr": KEY})
    with pytest.raises(AssertionError, match="drew from sr"):
        apply(Refusing(8, recipe=recipe("default")), some(nn.Dense(8), x), x, rngs={"sr": KEY})


# --- transformations ---


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_scan_over_layers_equals_a_loop(mode):
    x, depth = normal(1, 4, 32), 3

    class Block(nn.Module):
        layers: object

        @nn.compact
        def __call__(self, x, _):
            return nn.tanh(self.layers.Dense(32)(x)), None

    def stacked(layers):
        scanned = nn.scan(
            nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True, "sr": True}, length=depth
        )
        return scanned(layers)

    variables = stacked(nn).init(KEY, x, None)
    with fp4.autocast(recipe(mode)):
        same_tree(stacked(linen).init({"params": KEY, "sr": KEY}, x, None), variables)

        def scanned(variables, x):
            return stacked(linen).apply(variables, x, None, rngs={"sr": KEY})[0]

        def loop(variables, x):
            for i in range(depth):
                params = jax.tree.map(lambda leaf, i=i: leaf[i], variables)
                x, _ = Block(linen).apply(params, x, None, rngs={"sr": KEY})
            return x

        def gradients(f):
            return jax.jit(jax.value_and_grad(lambda v, x: jnp.sum(jnp.sin(3 * f(v, x))), (0, 1)))(variables, x)

        (y, ours), (want, theirs) = gradients(scanned), gradients(loop)
        np.testing.assert_allclose(y, want, rtol=1e-5)
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert bool(jnp.isfinite(a).all())
            if mode != "default":  # whose draws differ between the layers of the scan
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_context_reaches_into_a_scan():
    x = normal(1, 4, 32)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return linen.Dense(32)(x), None

    model = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()
    variables = some(model, x, None)
    a, b = recipe(), recipe(row_scaled_activation=True, two_dimensional_weights=False)
    results = []
    for context in (a, b, None, a):
        with fp4.autocast(context):
            results.append(jax.jit(model.apply, static_argnums=2)(variables, x, None)[0])
    same_tree(results[0], results[3])
    assert not any(np.array_equal(results[i], results[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_vmap_equals_a_loop():
    x, model = normal(1, 3, 4, 32), linen.Dense(8, recipe=recipe())
    jitted = jax.jit(model.apply)
    variables = some(model, x[0])
    vmapped = jax.jit(jax.vmap(model.apply, (None, 0)))(variables, x)
    same_tree(vmapped, jnp.stack([jitted(variables, row) for row in x]))
    stacked = nn.vmap(linen.Dense, variable_axes={"params": 0}, split_rngs={"params": True})(8, recipe=recipe())
    theirs = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})(8)
    same_tree(stacked.init(KEY, x), theirs.init(KEY, x))


# --- dot_general ---


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_dot_general_cls_on_an_unmodified_layer(mode):
    x, chosen = normal(1, 4, 32), recipe(mode)
    plain = nn.Dense(8)
    variables = plain.init(KEY, x)
    plugged = nn.Dense(8, dot_general_cls=partial(linen.DotGeneral, recipe=chosen))
    same_tree(plugged.init({"params": KEY, "sr": KEY}, x), variables)
    params = variables["params"]
    want = jax.jit(lambda: fp4.dense(x, params["kernel"], recipe=chosen) + params["bias"])()
    same_tree(apply(plugged, variables, x), want)
    (_, _), grads = value_and_grads(plugged, variables, x, rngs={"sr": KEY})
    assert jax.tree.structure(grads[0]) == jax.tree.structure(variables)
    if mode == "default":
        with pytest.raises(ValueError, match="key is None"):
            value_and_grads(plugged, variables, x)
    under = nn.Dense(8, dot_general_cls=linen.DotGeneral)
    same_tree(apply(under, variables, x), apply(plain, variables, x))
    with fp4.autocast(chosen):
        same_tree(apply(under, variables, x), want)


def test_dot_general_cls_in_attention():
    x = normal(1, 2, 5, 32)
    plain = nn.MultiHeadDotProductAttention(num_heads=4)
    fields = dict(qkv_dot_general_cls=linen.DotGeneral, out_dot_general_cls=linen.DotGeneral)
    plugged = nn.MultiHeadDotProductAttention(num_heads=4, **fields)
    variables = some(plain, x)
    assert jax.tree.structure(some(plugged, x)) == jax.tree.structure(variables)
    same_tree(apply(plugged, variables, x), apply(plain, variables, x))
    with fp4.autocast(recipe()):
        rows = fp4.report(plugged.apply, variables, x).rows
    assert [row.layer for row in rows] == [f"{name}/DotGeneral_0" for name in ("query", "key", "value", "out")]
    assert all(row.quantized for row in rows)


def test_own_dot_general_beside_a_recipe_is_refused():
    def own(*args, **kwargs):
        return jax.lax.dot_general(*args, **kwargs)

    x = normal(1, 4, 32)
    variables = some(nn.Dense(8), x)
    plain = apply(nn.Dense(8), variables, x)
    for layer in (linen.Dense, linen.DenseGeneral):
        for name, value in (("dot_general", own), ("dot_general_cls", lambda: own)):
            make = partial(layer, 8, **{name: value})
            with pytest.raises(ValueError, match=rf"{name} is given beside a recipe; needs .* Try"):
                make(recipe=recipe())
            with fp4.autocast(recipe()):
                with pytest.raises(ValueError, match=rf"{name} is given .*autocast"):
                    make().apply(variables, x)
                same_tree(apply(make(recipe=fp4.HIGH_PRECISION), variables, x), plain)
        layer(8, dot_general=jax.lax.dot_general, recipe=recipe())  # no product of their own


# --- refusals ---


@pytest.mark.parametrize("layer", [partial(linen.Dense, 8), partial(linen.DenseGeneral, 8), linen.DotGeneral])
@pytest.mark.parametrize("wrong", ["nvfp4", fp4.NVFP4BlockScaling, 3])
def test_wrong_recipe_is_refused_when_the_layer_is_made(layer, wrong):
    with pytest.raises(TypeError, match=r"recipe is .*; needs a recipe object .* Try"):
        layer(recipe=wrong)


def test_bad_input():
    x = normal(1, 4, 32)
    model = linen.Dense(8, recipe=recipe())
    variables = some(model, x)
    with jax.enable_x64(True), pytest.raises(TypeError, match="float64"):
        model.apply(variables, x.astype(jnp.float64))
    with pytest.raises(TypeError, match="complex64"):
        model.apply(variables, x.astype(jnp.complex64))
    with pytest.raises(ValueError, match="batch_dims"):
        some(linen.DenseGeneral(8, batch_dims=(1,), recipe=recipe()), x)
    with pytest.raises(nn.module.errors.ScopeParamShapeError):
        linen.Dense(9, recipe=recipe()).apply(variables, x)
