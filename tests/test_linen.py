"""Linen layers: Flax's parameters and signatures, dense's bits."""

import inspect
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from jax_fp4 import linen

MODES = ("default", "unquant", "dequant")
KEY = jax.random.key(0)


def recipe(mode="unquant", **kw):
    return fp4.NVFP4BlockScaling(backward_mode=mode, **kw)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


# Jitted, all of it: hundreds of small programs would take longer to compile than what is tested.
def init(model, x, *more, rngs=KEY):
    return jax.jit(lambda rngs, x: model.init(rngs, x, *more))(rngs, x)


def apply(model, variables, x, **kw):
    return jax.jit(lambda variables, x: model.apply(variables, x, **kw))(variables, x)


def function(chosen, variables, x, **kw):
    """What a layer with these parameters must compute."""
    params = variables["params"]
    return jax.jit(lambda params, x: fp4.dense(x, params["kernel"], params["bias"], recipe=chosen, **kw))(params, x)


def same_tree(a, b):
    """The same structure (boxes included), dtypes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for ours, theirs in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(theirs, np.float32))


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


@pytest.mark.core
@pytest.mark.parametrize(("name", "fields", "shape"), LAYERS)
@pytest.mark.parametrize("chosen", [None, fp4.HIGH_PRECISION])
def test_without_recipe_every_bit_is_flax(name, fields, shape, chosen):
    x = normal(1, *shape)
    flax, ours = getattr(nn, name)(**fields), getattr(linen, name)(**fields, recipe=chosen)
    with fp4.autocast(recipe() if chosen is fp4.HIGH_PRECISION else None):
        variables = init(ours, x)
        same_tree(variables, init(flax, x))
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
    theirs = init(Net(nn), x, rngs=rngs)
    for fields in ((), (("recipe", recipe("default")),)):
        same_tree(init(Net(linen, fields), x, rngs=rngs), theirs)
    with fp4.autocast(recipe("default")):
        same_tree(init(Net(linen), x, rngs=rngs), theirs)


@pytest.mark.parametrize("box", [nn.with_partitioning, nn.with_logical_partitioning])
def test_metadata_boxes_do_not_change(box):
    x = normal(1, 3, 4, 6)
    fields = dict(
        features=(2, 4),
        axis=(-2, -1),
        kernel_init=box(nn.initializers.lecun_normal(), ("a", "b", "c", None)),
        bias_init=box(nn.initializers.normal(), ("c", None)),
    )
    theirs = init(nn.DenseGeneral(**fields), x)
    ours = linen.DenseGeneral(**fields, recipe=recipe())
    variables = init(ours, x)
    same_tree(variables, theirs)
    same_tree(ours.apply(variables, x), ours.apply(nn.unbox(variables), x))
    fields = dict(features=5, kernel_init=box(nn.initializers.lecun_normal(), ("a", "b")))
    same_tree(init(linen.Dense(**fields, recipe=recipe()), x), init(nn.Dense(**fields), x))


def test_intermediates_and_scopes_do_not_change():
    x = normal(1, 4, 16)
    variables = init(Net(nn), x)
    capture = dict(capture_intermediates=True, mutable=["intermediates"])
    _, theirs = Net(nn).apply(variables, x, **capture)
    for fields in ((), (("recipe", recipe()),)):
        _, ours = Net(linen, fields).apply(variables, x, **capture)
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)


# --- with a recipe: dense ---


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_dense_equals_the_function(mode):
    x, chosen = normal(1, 4, 32), recipe(mode)
    model = linen.Dense(10, bias_init=nn.initializers.normal(), recipe=chosen)
    variables = init(model, x)

    def function(variables, x):
        return fp4.dense(x, variables["params"]["kernel"], variables["params"]["bias"], recipe=chosen, key=KEY)

    class Function:
        apply = staticmethod(function)

    # With the key that the layer draws: only mode default reads it.
    key = nn.apply(lambda m: m.make_rng("sr"), model)(variables, rngs={"sr": KEY})
    Function.apply = staticmethod(
        lambda v, x: fp4.dense(x, v["params"]["kernel"], v["params"]["bias"], recipe=chosen, key=key)
    )
    same_tree(
        value_and_grads(model, variables, x, rngs={"sr": KEY}),
        value_and_grads(Function, variables, x),
    )


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
    variables = init(model, x)
    y = jax.jit(model.apply)(variables, x)
    params = variables["params"]
    inputs, kernel_axes = spec.split("->")[0].split(",")
    contracted = [a for a in kernel_axes if a in inputs and a not in "gh"]

    def dequantized(value, axes):  # as a matrix [batch, others, contracted]: no tiles, so both operands go row-wise
        order = [a for a in axes if a in "gh"], [a for a in axes if a not in contracted and a not in "gh"], contracted
        flat = [axis for part in order for axis in part]
        sizes = dict(zip(axes, value.shape, strict=True))
        turned = jnp.einsum(f"{axes}->{''.join(flat)}", value)
        matrix = turned.reshape(*(int(np.prod([sizes[a] for a in part])) for part in order))
        values = fp4.dequantize(fp4.quantize(matrix, batch_dims=1)).reshape(turned.shape)
        return np.einsum(f"{''.join(flat)}->{axes}", np.asarray(values, np.float64))

    bias = np.asarray(params["bias"], np.float64)
    batch, features = bias.shape[: len(fields.get("batch_dims", ()))], bias.shape[len(fields.get("batch_dims", ())) :]
    want = np.einsum(spec, dequantized(x, inputs), dequantized(params["kernel"], kernel_axes))
    want += bias.reshape(*batch, *(1,) * (want.ndim - bias.ndim), *features)
    assert y.shape == nn.DenseGeneral(**fields).apply(variables, x).shape
    assert np.linalg.norm(y - want) <= 1e-6 * np.linalg.norm(want)


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("features", [10, 16])
def test_every_width_has_a_backward(mode, features):
    """C9: nothing is legal in the forward and refused in the backward."""
    x, model = normal(1, 6, 64), linen.Dense(features, recipe=recipe(mode))
    (_, y), (dw, dx) = value_and_grads(model, init(model, x), x, rngs={"sr": KEY})
    assert y.shape == (6, features)
    assert dx.shape == x.shape
    assert all(bool(jnp.isfinite(leaf).all()) and bool(jnp.any(leaf)) for leaf in jax.tree.leaves((dw, dx)))


def test_bfloat16_compute_keeps_float32_masters():
    x = normal(1, 4, 32)
    model = linen.Dense(16, dtype=jnp.bfloat16, bias_init=nn.initializers.normal(), recipe=recipe())
    variables = init(model, x)
    (_, y), (dv, dx) = value_and_grads(model, variables, x)
    assert (y.dtype, dx.dtype) == (jnp.bfloat16, jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(dv)} == {jnp.dtype("float32")}
    # The gradient comes in float32, unrounded: some of it is no bfloat16 number.
    kernel = dv["params"]["kernel"]
    assert not np.array_equal(kernel, kernel.astype(jnp.bfloat16).astype(jnp.float32))
    params = variables["params"]
    same_tree(y, fp4.dense(x.astype(jnp.bfloat16), params["kernel"], params["bias"], recipe=recipe()))


def test_integers_promote_as_in_flax():
    x = jnp.arange(32).reshape(2, 16)
    model = linen.Dense(4, recipe=recipe())
    variables = init(model, x)
    same_tree(model.apply(variables, x), model.apply(variables, x.astype(jnp.float32)))


def test_own_promote_dtype_is_honoured():
    def promote(x, kernel, bias, *, dtype=None, inexact=True):
        return [x, 2 * kernel, bias]

    x = normal(1, 4, 32)
    model = linen.Dense(8, promote_dtype=promote, recipe=recipe())
    variables = init(model, x)
    params = variables["params"]
    same_tree(model.apply(variables, x), fp4.dense(x, 2 * params["kernel"], params["bias"], recipe=recipe()))


# --- contexts ---


@pytest.mark.core
@pytest.mark.parametrize("lift", [lambda module: module, nn.jit, nn.remat])
def test_contexts_on_one_jitted_module(lift):
    """One jitted function under A, B, none, A."""
    x = normal(1, 4, 32)
    model = lift(linen.Dense)(8)
    variables = init(model, x)
    apply = jax.jit(model.apply)
    a, b = recipe(), recipe(two_dimensional_weights=False, row_scaled_activation=True)
    for context in (a, b, None, a):
        with fp4.autocast(context):
            got = apply(variables, x)
        reference = nn.Dense(8) if context is None else linen.Dense(8, recipe=context)
        same_tree(got, jax.jit(reference.apply)(variables, x))


def test_layer_comes_before_autocast():
    x = normal(1, 4, 32)
    chosen = recipe(two_dimensional_weights=False)
    model = linen.Dense(8, recipe=chosen)
    variables = init(model, x)
    alone = model.apply(variables, x)
    with fp4.autocast(recipe(row_scaled_activation=True)):
        same_tree(model.apply(variables, x), alone)
    with fp4.autocast(fp4.HIGH_PRECISION):
        same_tree(model.apply(variables, x), alone)
        same_tree(linen.Dense(8).apply(variables, x), nn.Dense(8).apply(variables, x))


def test_flax_layers_under_autocast_are_untouched():
    x = normal(1, 4, 32)  # E13
    variables = init(nn.Dense(8), x)
    before = nn.Dense(8).apply(variables, x)
    with fp4.autocast(recipe()):
        same_tree(nn.Dense(8).apply(variables, x), before)


@pytest.mark.core
def test_report_names_layers_and_reasons():
    x = normal(1, 4, 16)
    model = Net(linen, (("recipe", recipe()),))
    rows = fp4.report(model.apply, init(model, x), x).rows
    assert [(row.layer, row.quantized) for row in rows] == [("Dense_0", True), ("DenseGeneral_0", True)]
    forgotten = Net(linen)  # E15
    rows = fp4.report(forgotten.apply, init(forgotten, x), x).rows
    assert [(row.layer, row.quantized) for row in rows] == [("Dense_0", False), ("DenseGeneral_0", False)]
    assert all("no recipe" in row.note for row in rows)


# --- randomness ---


@pytest.mark.core
def test_missing_stream_is_an_error_only_when_differentiated():
    x, model = normal(1, 4, 32), linen.Dense(8, recipe=recipe("default"))
    variables = init(model, x)
    model.apply(variables, x)
    with pytest.raises(ValueError, match=r"key is None; needs .* Try .*rngs=\{'sr': key\}"):
        value_and_grads(model, variables, x)
    value_and_grads(linen.Dense(8, recipe=recipe("default", stochastic_rounding=False)), variables, x)


def test_same_stream_same_bits_and_each_layer_its_own():
    x = normal(1, 8, 32)
    model = nn.Sequential([linen.Dense(32, recipe=recipe("default")) for _ in range(2)])
    variables = init(model, x)
    once, again, other = (
        value_and_grads(model, variables, x, rngs={"sr": jax.random.key(seed)})[1] for seed in (1, 1, 2)
    )
    same_tree(once, again)
    assert not np.array_equal(once[1], other[1])


@pytest.mark.parametrize(
    "chosen", [recipe("unquant"), recipe("dequant"), recipe("default", stochastic_rounding=False), None]
)
def test_a_stream_is_drawn_from_only_where_it_is_used(chosen):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return linen.Dense(8, name="layer", recipe=chosen)(x), self.get_key()

        def get_key(self):
            return None

    x = normal(1, 4, 32)

    class Drawing(linen.Dense):
        def make_rng(self, name="params"):
            raise AssertionError(f"drew from {name}")

    variables = init(nn.Dense(8), x)
    Drawing(8, recipe=chosen).apply(variables, x, rngs={"sr": KEY})


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

    variables = init(stacked(nn), x, None)
    with fp4.autocast(recipe(mode)):
        same_tree(stacked(linen).init({"params": KEY, "sr": KEY}, x, None), variables)

        def scanned(variables, x):
            return stacked(linen).apply(variables, x, None, rngs={"sr": KEY})[0]

        def loop(variables, x):
            for i in range(depth):
                params = jax.tree.map(lambda leaf, i=i: leaf[i], variables)
                x, _ = Block(linen).apply(params, x, None, rngs={"sr": KEY})
            return x

        y, pull = jax.vjp(scanned, variables, x)
        want, pull_want = jax.vjp(loop, variables, x)
        np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)
        if mode != "default":  # whose draws differ between the layers of the scan
            for ours, theirs in zip(*(jax.tree.leaves(f(y)) for f in (pull, pull_want)), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        else:
            assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(pull(y)))


def test_context_reaches_into_a_scan():
    x = normal(1, 4, 32)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return linen.Dense(32)(x), None

    model = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()
    variables = init(model, x, None)
    a, b = recipe(), recipe(row_scaled_activation=True, two_dimensional_weights=False)
    results = []
    for context in (a, b, None, a):
        with fp4.autocast(context):
            results.append(model.apply(variables, x, None)[0])
    same_tree(results[0], results[3])
    assert not any(np.array_equal(results[i], results[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_vmap_equals_a_loop():
    x, model = normal(1, 3, 4, 32), linen.Dense(8, recipe=recipe())
    variables = model.init(KEY, x[0])
    vmapped = jax.jit(jax.vmap(model.apply, (None, 0)))(variables, x)
    same_tree(vmapped, jnp.stack([jax.jit(model.apply)(variables, row) for row in x]))
    stacked = nn.vmap(linen.Dense, variable_axes={"params": 0}, split_rngs={"params": True})(8, recipe=recipe())
    theirs = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})(8)
    same_tree(init(stacked, x), init(theirs, x))


# --- dot_general ---


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_dot_general_cls_on_an_unmodified_layer(mode):
    x, chosen = normal(1, 4, 32), recipe(mode)
    plain = nn.Dense(8)
    variables = init(plain, x)
    plugged = nn.Dense(8, dot_general_cls=partial(linen.DotGeneral, recipe=chosen))
    same_tree(init(plugged, x, rngs={"params": KEY, "sr": KEY}), variables)
    want = fp4.dense(x, variables["params"]["kernel"], recipe=chosen) + variables["params"]["bias"]
    same_tree(plugged.apply(variables, x), want)
    (_, _), grads = value_and_grads(plugged, variables, x, rngs={"sr": KEY})
    assert jax.tree.structure(grads[0]) == jax.tree.structure(variables)
    if mode == "default":
        with pytest.raises(ValueError, match="key is None"):
            value_and_grads(plugged, variables, x)
    under = nn.Dense(8, dot_general_cls=linen.DotGeneral)
    same_tree(under.apply(variables, x), plain.apply(variables, x))
    with fp4.autocast(chosen):
        same_tree(under.apply(variables, x), want)


def test_dot_general_cls_in_attention():
    x = normal(1, 2, 5, 32)
    plain = nn.MultiHeadDotProductAttention(num_heads=4)
    fields = dict(qkv_dot_general_cls=linen.DotGeneral, out_dot_general_cls=linen.DotGeneral)
    plugged = nn.MultiHeadDotProductAttention(num_heads=4, **fields)
    variables = init(plain, x)
    same_tree(init(plugged, x), variables)
    same_tree(plugged.apply(variables, x), plain.apply(variables, x))
    with fp4.autocast(recipe()):
        rows = fp4.report(plugged.apply, variables, x).rows
    assert [row.layer for row in rows] == [f"{name}/DotGeneral_0" for name in ("query", "key", "value", "out")]
    assert all(row.quantized for row in rows)


def test_own_dot_general_beside_a_recipe_is_refused():
    x = normal(1, 4, 32)
    for fields in (dict(dot_general=jax.lax.dot_general), dict(dot_general_cls=linen.DotGeneral)):
        for layer in (linen.Dense, linen.DenseGeneral):
            if fields.get("dot_general") is jax.lax.dot_general:
                layer(8, **fields, recipe=recipe())  # says what is so anyway
                continue
            with pytest.raises(ValueError, match=r"dot_general_cls is given beside a recipe; needs .* Try"):
                layer(8, **fields, recipe=recipe())
            own = layer(8, **fields)
            variables = init(own, x)
            with fp4.autocast(recipe()), pytest.raises(ValueError, match=r"dot_general_cls is given .*autocast"):
                own.apply(variables, x)
            kept = layer(8, **fields, recipe=fp4.HIGH_PRECISION)
            with fp4.autocast(fp4.HIGH_PRECISION):
                same_tree(kept.apply(variables, x), nn.DenseGeneral(8).apply(variables, x))


# --- refusals ---


@pytest.mark.parametrize("layer", [partial(linen.Dense, 8), partial(linen.DenseGeneral, 8), linen.DotGeneral])
@pytest.mark.parametrize("wrong", ["nvfp4", fp4.NVFP4BlockScaling, 3])
def test_wrong_recipe_is_refused_when_the_layer_is_made(layer, wrong):
    with pytest.raises(TypeError, match=r"recipe is .*; needs a recipe object .* Try"):
        layer(recipe=wrong)


def test_bad_input():
    x = normal(1, 4, 32)
    model = linen.Dense(8, recipe=recipe())
    variables = init(model, x)
    with jax.enable_x64(True), pytest.raises(TypeError, match="float64"):
        model.apply(variables, x.astype(jnp.float64))
    with pytest.raises(TypeError, match="complex64"):
        model.apply(variables, x.astype(jnp.complex64))
    with pytest.raises(ValueError, match="batch_dims"):
        init(linen.DenseGeneral(8, batch_dims=(1,), recipe=recipe()), x)
    with pytest.raises(nn.module.errors.ScopeParamShapeError):
        linen.Dense(9, recipe=recipe()).apply(variables, x)
