"""diagnostics.collect: statistics from their definitions, all layers and modes, and what a program may contain."""

import csv
import itertools
import re
import sys
from functools import cache, partial, reduce
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explicit import decoded
from flax import nnx as flax_nnx
from jax.sharding import PartitionSpec as P
from sharded import KEY, MODES, jit, mesh, normal, nvfp4, same

import jax_fp4 as fp4
from jax_fp4 import _harvest, _observe, diagnostics, linen, nnx
from jax_fp4.diagnostics import collect

RECIPE = nvfp4("dequant")
F32 = partial(np.asarray, dtype=np.float64)


def loss(function):
    """Of function(free, *rest): a gradient in which every element of y counts differently."""
    return lambda free, *rest: jnp.sum(normal(9, *(y := function(free, *rest)).shape) * y.astype(jnp.float32))


def collected(function, *arguments):
    """(results, layers), and that collecting changes no bit of the results."""
    results, layers = jit(collect(function))(*arguments)
    same(results, jit(function)(*arguments))
    return results, layers


def of_gradient(function, *arguments):
    return look(jax.value_and_grad(loss(function)), *arguments)


def look(function, *arguments):
    """The layers alone: what is not returned, XLA leaves out."""
    collected = collect(function)
    return jit(lambda *arguments: collected(*arguments)[1])(*arguments)


def snr(value, reference) -> float:
    value, reference = F32(value), F32(reference)
    with np.errstate(divide="ignore", invalid="ignore"):
        return 10 * np.log10(np.sum(reference**2) / np.sum((reference - value) ** 2))


def cosine(a, b) -> float:
    a, b = F32(a).ravel(), F32(b).ravel()
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-4)


# ---- the definitions ----


def check_operand(got: diagnostics.Operand, q, a, tile=(1, 16)):
    """Of a [r, k], quantized along k (q in its stored orientation), by the definitions of `Operand`."""
    value, a = decoded(q)[: a.shape[0], : a.shape[1]], F32(a)
    scale = np.asarray(q.block_scale).astype(np.float64) * F32(q.amax).reshape(-1, 1) / (6 * 448)
    bound = np.repeat(6 * scale, 16, axis=-1)[: a.shape[0], : a.shape[1]]
    rows, columns = ([slice(i, i + t) for i in range(0, extent, t)] for extent, t in zip(a.shape, tile, strict=True))
    blocks = itertools.product(rows, columns)
    holds = [b for b in blocks if a[b].any()]
    close(got.amax, np.abs(a).max())
    close(got.saturated, np.mean((np.abs(a) > bound * (1 + 1e-6)) & (bound > 0)))
    close(got.flushed, sum(not value[b].any() for b in holds) / max(1, len(holds)))
    close(got.snr, snr(value, a))


@pytest.mark.core
def test_statistics_are_those_of_the_definitions():
    """Outliers, blocks that flush to zero and blocks of zeros, a kernel in tiles, and the three products."""
    x = normal(0, 32, 48).at[3, 5].set(2e4).at[:, 16:32].multiply(1e-4).at[8:16, 32:].set(0)
    w = normal(1, 48, 40).at[2, 2].set(50.0).at[16:32].multiply(1e-6)
    recipe = nvfp4("default", stochastic_rounding=False, random_hadamard_transform=False)
    run = lambda recipe: lambda w, x: fp4.dense(x, w, recipe=recipe)  # noqa: E731
    (_, (dw, dx)), layers = collected(jax.value_and_grad(loss(run(recipe)), (0, 1)), w, x)
    (layer,) = layers.values()

    quantize = partial(fp4.quantize, implementation="reference")
    dy = normal(9, 32, 40)
    check_operand(layer.x, quantize(np.asarray(x)), x)
    check_operand(layer.kernel, quantize(np.asarray(w), axis=0, block=(16, 16)), w.T, (16, 16))
    check_operand(layer.dy, quantize(np.asarray(dy)), dy)
    assert layer.x.flushed > 0 and layer.kernel.flushed > 0 and layer.x.saturated > 0

    high = jax.value_and_grad(loss(run(fp4.HIGH_PRECISION)), (0, 1))
    _, (dw_high, dx_high) = high(w, x)
    for product, value, reference in (
        (layer.forward, run(recipe)(w, x), run(fp4.HIGH_PRECISION)(w, x)),
        (layer.dgrad, dx, dx_high),
        (layer.wgrad, dw, dw_high),
    ):
        close(product.snr, snr(value, reference))
        close(product.cosine, cosine(value, reference))
    assert layer.tokens_per_expert is None


@pytest.mark.parametrize(("recipe", "flushed"), [(fp4.Float8CurrentScaling, 31 / 64), (fp4.MXFP8BlockScaling, 0)])
def test_flushed_of_eight_bit_formats(recipe, flushed):
    """MXFP8 scales each block; under one scale for the tensor, elements are flushed."""
    x, w = jnp.ones((32, 64)).at[:, 1:32].set(1e-20), jnp.ones((64, 32))
    (layer,) = look(lambda w: fp4.dense(x, w, recipe=recipe("unquant")), w).values()
    close(layer.x.flushed, flushed)
    close(layer.x.amax, 1)


@pytest.mark.core
def test_zeros_and_what_is_not_a_number():
    run = lambda x, w: fp4.dense(x, w, recipe=nvfp4("dequant"))  # noqa: E731
    w = normal(1, 32, 32)
    see = jit(lambda x: collect(run)(x, w)[1]["dense"])
    zero = see(jnp.zeros((16, 32)))
    assert (zero.x.amax, zero.x.saturated, zero.x.flushed) == (0, 0, 0)
    assert zero.x.snr == zero.forward.snr == np.inf and zero.forward.cosine == 1

    nan = see(normal(0, 16, 32).at[3, 4].set(jnp.nan))
    for value in (nan.x.amax, nan.x.snr, nan.forward.snr, nan.forward.cosine):
        assert np.isnan(value)
    assert np.isfinite(nan.kernel.snr)

    # Squares of these are no float32 numbers: nothing may be lost by that.
    small, plain = (see(x) for x in (2.0**-90 * normal(0, 16, 32), normal(0, 16, 32)))
    close(small.forward.snr, plain.forward.snr)
    close(small.forward.cosine, plain.forward.cosine)


# ---- layers and modes ----

X, SIZES = normal(0, 24, 32, dtype=jnp.bfloat16), jnp.int32([5, 0, 12])
W, STACK = normal(1, 32, 32) / 4, normal(2, 3, 32, 32) / 4
NORM, GELU = jnp.ones(32), dict(activation="gelu")
BATCHED = dict(dimension_numbers=(((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
GROUPED, NORMED = ([f"{op}/w_in", f"{op}/w_out"] for op in ("grouped_mlp", "layernorm_mlp"))
FUNCTIONS = {
    "dense": (lambda w, x, **how: fp4.dense(x, w[0], **how), ["dense"]),
    "layernorm_dense": (lambda w, x, **how: fp4.layernorm_dense(x, NORM, NORM, w[0], **how), ["layernorm_dense"]),
    "grouped_dense": (lambda w, x, **how: fp4.grouped_dense(x, w, SIZES, **how), ["grouped_dense"]),
    "grouped_mlp": (lambda w, x, **how: fp4.grouped_mlp(x, w, w, SIZES, **GELU, **how), GROUPED),
    "layernorm_mlp": (lambda w, x, **how: fp4.layernorm_mlp(x, NORM, NORM, w[0], w[1], **GELU, **how), NORMED),
    "moe": (lambda w, x, **how: fp4.moe(x, x[:, :3], w, w, top_k=2, **GELU, **how)[0], GROUPED),
    "DotGeneral": (lambda w, x, **how: fp4.DotGeneral(**how)(jnp.stack([x] * 3), w, **BATCHED), ["dense"]),
}  # fmt: skip


OTHERS = dict(
    grouped_dense="default", layernorm_dense="default", layernorm_mlp="dequant", moe="dequant", DotGeneral="default"
)


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, mode) for name in ("dense", "grouped_mlp") for mode in MODES), *OTHERS.items()]
)
def test_layers_and_modes(name, mode):
    function, names = FUNCTIONS[name]
    how = dict(recipe=nvfp4(mode)) | (dict(key=KEY) if mode == "default" else {})
    layers = of_gradient(lambda both: function(*both, **how), (STACK, X))
    assert list(layers) == names
    for layer in layers.values():
        assert np.all((layer.x.snr > 14) & (layer.x.snr < 30))
        assert np.all((layer.forward.snr > 10) & np.isfinite(layer.forward.snr) & (layer.forward.cosine > 0.95))
        exact = [bool(np.all(np.isinf(a))) for a in (layer.dy.snr, layer.dgrad.snr, layer.wgrad.snr)]
        assert exact == {"default": [False] * 3, "unquant": [True] * 3, "dequant": [True, False, False]}[mode]
        assert np.all((layer.dgrad.cosine > 0.9) & (layer.wgrad.cosine > 0.9) & (layer.dgrad.cosine <= 1.001))
        shape = (3,) if name == "DotGeneral" else ()
        assert {leaf.shape for leaf in jax.tree.leaves(layer) if leaf.dtype == jnp.float32} == {shape}
        if name in ("grouped_dense", "grouped_mlp"):
            np.testing.assert_array_equal(layer.tokens_per_expert, SIZES)
        if name == "moe":
            assert layer.tokens_per_expert.sum() == 2 * X.shape[0]


def test_rows_of_no_group_count_for_nothing():
    x = X.astype(jnp.float32).at[17:].set(jnp.nan)
    run = lambda x: fp4.grouped_dense(x, STACK, SIZES, recipe=RECIPE)  # noqa: E731
    with_tail, without = (look(run, rows)["grouped_dense"] for rows in (x, x[:17]))
    jax.tree.map(close, with_tail.x, without.x)
    jax.tree.map(close, with_tail.forward, without.forward)


def test_frozen_kernels_delayed_scaling_and_mixed_recipes():
    frozen = fp4.quantize_transpose(W, block=(16, 16))
    layer = of_gradient(lambda x: fp4.dense(x, frozen, recipe=nvfp4("default"), key=KEY), X)["dense"]
    assert layer.wgrad is None and np.isinf(layer.kernel.snr) and np.isfinite(layer.dgrad.snr)

    recipe = fp4.DelayedScaling("default", amax_history_len=4)
    state = fp4.delayed.init(recipe)
    layer = of_gradient(lambda w: fp4.dense(100 * X, w, recipe=recipe, state=state), W)["dense"]
    largest = np.abs(np.asarray(100 * X, np.float32)) > 448  # the scale of a new state is 1
    close(layer.x.saturated, largest.mean())

    mixed = fp4.CustomRecipe(forward=fp4.HIGH_PRECISION, dgrad=fp4.HIGH_PRECISION, wgrad=nvfp4("default"))
    layer = of_gradient(lambda w: fp4.dense(X, w, recipe=mixed, key=KEY), W)["dense"]
    assert np.isinf(layer.forward.snr) and layer.dgrad is None and 10 < layer.wgrad.snr < 40 and 10 < layer.dy.snr < 25


def test_layers_in_high_precision_have_no_entry():
    for recipe in (None, fp4.HIGH_PRECISION):
        assert look(lambda w: fp4.dense(X, w[0], recipe=recipe), STACK) == {}  # noqa: B023
        assert look(lambda w: fp4.grouped_dense(X, w, SIZES, recipe=recipe), STACK) == {}  # noqa: B023


# ---- what a program may contain ----


def dense(w, x):
    return fp4.dense(x, w, recipe=RECIPE)


def loop(body):
    return partial(jax.lax.scan, body)


def two_layers(x, w):
    return fp4.dense(jnp.tanh(fp4.dense(x, w, recipe=RECIPE)), w.T, recipe=RECIPE)


@pytest.mark.core
def test_scan_stacks_what_a_loop_gives_one_by_one():
    """With remat in remat, too."""
    x, layers = X.astype(jnp.float32), jax.jit(jax.checkpoint(jax.checkpoint(jax.jit(two_layers))))

    def scanned(stack, x):
        return loop(lambda x, w: (layers(x, w), None))(x, stack)[0]

    _, stacked = collected(jax.value_and_grad(loss(scanned), (0, 1)), STACK, x)
    single = look(jax.grad(loss(partial(reduce, two_layers)), (0, 1)), STACK, x)
    assert list(stacked) == ["dense", "dense#1"] and len(single) == 6
    for number, one in enumerate(single.values()):
        step, name = number // 2, list(stacked)[number % 2]
        jax.tree.map(lambda leaf, want: close(leaf[step], want), stacked[name], one)  # noqa: B023


@pytest.mark.core
@pytest.mark.parametrize(
    "nested",
    [
        lambda f: loop(jax.checkpoint(jax.checkpoint(f))),
        lambda f: jax.checkpoint(loop(jax.checkpoint(f))),
        lambda f: loop(jax.checkpoint(lambda x, w: loop(jax.checkpoint(f))(x, w[None]))),
        lambda f: jax.checkpoint(jax.jit(jax.checkpoint(loop(f)))),
    ],
)
def test_what_remat_computes_again_is_seen_once(nested):
    """Of one trace that runs twice, and of a layer that has no gradient of its own."""
    once = jax.checkpoint(two_layers)

    def body(x, w):
        x = once(once(x, w), w)
        return x + w[0] * dense(*jax.lax.stop_gradient((w, x))), None

    gradient = jax.grad(loss(lambda w, x: nested(body)(x, w)[0]))
    layers = jax.eval_shape(collect(gradient), STACK, X.astype(jnp.float32))[1].values()
    assert [layer.forward.snr.size for layer in layers] == [3] * 5
    assert [layer.wgrad is None for layer in layers] == [False] * 4 + [True]


@pytest.mark.core
def test_a_collector_inside_another():
    """Both see the layers."""
    inner = collect(jax.grad(loss(lambda w, x: loop(lambda x, w: (two_layers(x, w), None))(x, w)[0])))
    (_, seen), seen_around = jax.eval_shape(collect(inner), STACK, X.astype(jnp.float32))
    assert list(seen) == ["dense", "dense#1"] and seen == seen_around


@pytest.mark.core
def test_calls_of_one_function_are_told_apart():
    """One trace, used twice, and two gradients in one function: each backward goes with its forward."""
    layer = jax.jit(dense)

    def run(w, x):
        return layer(8 * w, layer(w, x))

    def twice(w, x):
        gradient = jax.value_and_grad(loss(run))
        return gradient(w, x), gradient(w, 2 * x), run(w, 4 * x)

    _, layers = collected(twice, W, X)
    assert list(layers) == ["dense", *(f"dense#{i}" for i in range(1, 6))]
    calls = list(layers.values())
    close([call.kernel.amax for call in calls[1::2]], [8 * calls[0].kernel.amax] * 3)
    close([call.x.amax for call in calls[::2]], np.abs(F32(X)).max() * np.float64([1, 2, 4]))
    dy = np.abs(normal(9, 24, 32)).max()
    close([calls[1].dy.amax, calls[3].dy.amax], np.asarray([dy, dy], jnp.bfloat16).astype(np.float64))
    assert calls[4].dy is None and calls[4].wgrad is None and calls[0].dy.amax > 2 * dy


@pytest.mark.core
def test_a_backward_goes_with_its_own_call():
    """A student beside a teacher that nobody differentiates, and pullbacks in the order of their forwards."""

    def distilled(w, x):
        return jnp.sum((dense(w, x) - jax.lax.stop_gradient(dense(w, 100 * x))) ** 2)

    def both(w, x):
        (y, first), (_, second) = (jax.vjp(partial(dense, x=scale * x), w) for scale in (2, 4))
        return jax.grad(distilled)(w, x), first(jnp.ones_like(y)), second(3 * jnp.ones_like(y))

    calls = list(look(both, W, X.astype(jnp.float32)).values())
    close([call.x.amax / jnp.abs(X).max() for call in calls], [2, 4, 1, 100])
    first, second, student, teacher = calls
    assert (first.dy.amax, second.dy.amax) == (1, 3)
    assert teacher.dy is None and teacher.wgrad is None and student.wgrad is not None


@pytest.mark.core
def test_layers_are_in_the_order_of_the_program():
    def run(w, x):
        for i in range(11):
            x = dense(w[i], x)
        return x

    shapes = jax.ShapeDtypeStruct((11, 16, 16), jnp.float32), jax.ShapeDtypeStruct((16, 16), jnp.float32)
    assert list(jax.eval_shape(collect(run), *shapes)[1]) == ["dense", *(f"dense#{i}" for i in range(1, 11))]


@pytest.mark.core
def test_what_is_no_array_stays_what_it_is():
    """A count, a flag and a name choose a program, of `collect` as of a jit inside."""

    @collect
    @partial(jax.jit, static_argnames=("times", "train", "name"))
    def run(x, w, times, *, train, name):
        for _ in range(times if train else 1):
            x = getattr(jax.nn, name)(fp4.dense(x, w["kernel"], recipe=RECIPE))
        return x

    def names(times, train):
        see = lambda x, w: run(x, {"kernel": w}, times, train=train, name="relu")  # noqa: E731
        return list(jax.eval_shape(see, X, np.asarray(W, X.dtype))[1])

    assert names(2, True) == ["dense", "dense#1"] and names(2, False) == ["dense"]
    assert names(1, True) == names(True, True) == ["dense"]  # which are equal, and not the same
    with pytest.raises(TypeError, match=r"collect: an argument is a set; needs .* Try"):
        run(X, {"kernel": W}, 2, train={1}, name="relu")


@pytest.mark.core
def test_the_report_is_that_of_the_function():
    def run(w, x):
        y = fp4.layernorm_mlp(x, NORM, NORM, w, w, **GELU, recipe=RECIPE)
        return dense(w, y)

    gradient = jax.grad(loss(run), (0, 1))
    assert str(fp4.report(collect(gradient), W, X)) == str(fp4.report(gradient, W, X))
    rows = jax.export.symbolic_shape("m")[0]
    assert re.search(r"mx32 .*\*m \+ \d+ B", str(fp4.report(run, W, jax.ShapeDtypeStruct((rows, 32), X.dtype))))


@pytest.mark.core
@pytest.mark.parametrize("name", ["differentiated", "jaxpr", "source_info.name_stack"])
def test_a_jax_that_names_things_otherwise(name):
    """The parameters of equations are no documented API."""
    with _observe.observing(True):
        jaxpr = jax.make_jaxpr(jax.checkpoint(partial(fp4.dense, recipe=RECIPE)))(X, W).jaxpr
    (equation,) = jaxpr.eqns
    params = {f"new_{key}" if key == name else key: value for key, value in equation.params.items()}
    changed = equation.replace(params=params, source_info=object() if "name_stack" in name else equation.source_info)
    with pytest.raises(fp4.UnsupportedError, match=f"collect: an equation is a .* without '{name}' .*; needs .* Try"):
        _harvest.run(jaxpr.replace(eqns=[changed]), [], [X, W])


@pytest.mark.core
def test_off_nothing_is_traced():
    gradient = jax.jit(jax.value_and_grad(loss(two_layers)))
    x = X.astype(jnp.float32)
    before = gradient.lower(x, W).as_text(), str(jax.make_jaxpr(gradient)(x, W))
    assert jax.eval_shape(collect(gradient), x, W)[1]
    assert (gradient.lower(x, W).as_text(), str(jax.make_jaxpr(gradient)(x, W))) == before
    assert "observe" not in before[1]
    assert "observe" not in str(jax.make_jaxpr(collect(gradient))(x, W))


@pytest.mark.core
def test_branches_and_while_loops_are_named():
    def run(x, w):
        y = jax.lax.cond(x[0, 0] > 0, lambda x: two_layers(x, w), lambda x: x, x)
        y = jax.lax.while_loop(
            lambda y: y[0, 0] > 1e6, lambda y: fp4.grouped_dense(y, w[None], SIZES[:1], recipe=RECIPE), y
        )
        return fp4.dense(y, w, recipe=RECIPE)

    x = X.astype(jnp.float32)
    with pytest.warns(UserWarning, match=r"without dense \(in a cond\), grouped_dense \(in a while\); needs"):
        _, layers = collected(run, x, W)
    assert list(layers) == ["dense"]


@pytest.mark.core
def test_a_gradient_around_it_is_refused():
    with pytest.raises(fp4.UnsupportedError, match=r"collect: its result is differentiated; .* Try collect\(jax.grad"):
        jax.grad(lambda w: collect(loss(two_layers))(w, W)[0])(X)


# ---- models ----


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + linen.Dense(32, dtype=x.dtype, recipe=RECIPE, name="up")(x), None


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        stack = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = stack(name="blocks")(x, None)
        return linen.LayerNormMLP(16, dtype=x.dtype, recipe=RECIPE, name="mlp")(x)


@pytest.mark.core
def test_linen_model():
    shapes = jax.eval_shape(Model().init, jax.random.key(0), X)
    params = jax.tree.map(lambda leaf: normal(0, *leaf.shape, dtype=leaf.dtype) / 4, shapes)
    layers = of_gradient(Model().apply, params, X)
    assert list(layers) == ["blocks/up", "mlp/w_in", "mlp/w_out"]
    assert layers["blocks/up"].wgrad.cosine.shape == (2,) and layers["mlp/w_in"].wgrad.cosine.shape == ()
    kernel = params["params"]["blocks"]["up"]["kernel"].astype(X.dtype)  # as it is quantized
    close(layers["blocks/up"].kernel.amax, jnp.abs(kernel).max((1, 2)))


@pytest.mark.core
def test_nnx_model():
    rngs = flax_nnx.Rngs(0)
    model = flax_nnx.Sequential(flax_nnx.Linear(32, 32, rngs=rngs), flax_nnx.Linear(32, 16, rngs=rngs))
    nnx.quantize_model(model, fp4.Rules([("layers/.*", RECIPE)]))
    step = flax_nnx.jit(flax_nnx.value_and_grad(lambda model, x: jnp.square(model(x)).mean()))
    (value, _), layers = jit(collect(step))(model, X.astype(jnp.float32))
    assert list(layers) == ["layers/0", "layers/1"] and np.isfinite(value)
    assert layers["layers/0"].dgrad is None and np.isfinite(layers["layers/1"].dgrad.snr)


# ---- meshes ----


def test_a_mesh_of_explicit_axes():
    """What devices have, together: as of one device, but for products that are sums over devices."""
    w = normal(3, 32, 64) / 4
    want = of_gradient(dense, w, X)["dense"]
    with jax.set_mesh(mesh("Explicit", fsdp=2, tensor=2)):
        put = jax.device_put(w, P("fsdp", "tensor")), jax.device_put(X, P("fsdp"))
        got = look(jax.grad(lambda w, x: jnp.sum(dense(w, x).astype(jnp.float32) ** 2)), *put)["dense"]
    jax.tree.map(close, (got.x, got.kernel, got.forward), (want.x, want.kernel, want.forward))
    assert got.wgrad.snr.shape == () and 10 < got.wgrad.snr < 40


def test_experts_on_a_mesh():
    x, w = normal(4, 16, 16), normal(5, 4, 16, 16)
    run = lambda w, x: fp4.moe(x, x[:, :4], w, w, top_k=2, **GELU, recipe=RECIPE)[0]  # noqa: E731
    with jax.set_mesh(mesh("Explicit", data=2, expert=2)):
        got = look(run, jax.device_put(w, P("expert")), jax.device_put(x, P(("data", "expert"))))
    tokens = np.bincount(np.argsort(-x[:, :4], axis=1)[:, :2].ravel(), minlength=4)
    for layer in got.values():
        np.testing.assert_array_equal(layer.tokens_per_expert, tokens)
        close(layer.kernel.amax, jnp.abs(w).max())
    close(got["grouped_mlp/w_in"].x.amax, jnp.abs(x).max())


@pytest.mark.core
def test_inside_shard_map():
    """Without specs each device quantizes what it has; statistics are of all of them."""
    run = lambda w, x: fp4.dense(x, w, recipe=nvfp4("default"), key=KEY)  # noqa: E731
    sharded = jax.shard_map(run, mesh=mesh("Auto", data=2), in_specs=(P(), P("data")), out_specs=P("data"))
    got, want = of_gradient(sharded, W, X)["dense"], look(run, W, X)["dense"]
    jax.tree.map(close, got.kernel, want.kernel)
    close(got.x.amax, want.x.amax)
    assert abs(got.x.snr - want.x.snr) < 0.5 and 10 < got.wgrad.snr < 40


def test_a_device_that_has_zeros_alone():
    """Beside small numbers, whose squares are no float32 numbers."""
    run = partial(dense, W)
    x = jnp.asarray(X, jnp.float32).at[12:].set(0) * 1e-25
    sharded = jax.shard_map(run, mesh=mesh("Auto", data=2), in_specs=P("data"), out_specs=P("data"))
    jax.tree.map(close, look(sharded, x), look(run, x))


@cache
def on_one_device():
    return look(dense, W, X)["dense"]


@pytest.mark.core
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_gathered_kernel(check_vma):
    """Packed, inside shard_map: beside it the kernel that is gathered in high precision."""
    how = dict(recipe=RECIPE, gather=fp4.WeightGather("data", 0), specs=fp4.Specs(x=P("data"), kernel=P("data")))
    on = dict(mesh=mesh("Auto", data=2), in_specs=(P("data"), P("data")), out_specs=P("data"), check_vma=check_vma)
    sharded = jax.shard_map(lambda w, x: fp4.dense(x, w, **how), **on)
    got, want = of_gradient(sharded, W, X)["dense"], on_one_device()
    jax.tree.map(close, (got.x, got.kernel, got.forward), (want.x, want.kernel, want.forward))
    assert got.wgrad.snr.shape == () and 10 < got.wgrad.snr < 40


# ---- for people ----


def test_scalars_table_csv_and_plot(tmp_path, monkeypatch):
    def layer(*shape, snr=20.0, tokens=None):
        cosine = 1 - 0.01 * jnp.arange(1.0, 4.0) if shape else jnp.float32(1)
        product = diagnostics.Product(jnp.full(shape, snr), cosine)
        operand = diagnostics.Operand(*(jnp.full(shape, value) for value in (1.0, 0.03, 0.01, 19.0)))
        return diagnostics.Layer(product, product, None, operand, operand, operand, tokens)

    layers = {"dense": layer(3, snr=np.nan), "moe": layer(snr=np.inf, tokens=jnp.int32([5, 0, 12]))}
    flat = diagnostics.scalars(layers)
    close([flat[f"dense[{i}]/dgrad/cosine"] for i in range(3)], [0.99, 0.98, 0.97])
    assert flat["moe/dgrad/snr"] == np.inf and np.isnan(flat["dense[0]/forward/snr"]) and "moe/wgrad/snr" not in flat
    assert [flat[f"moe/tokens_per_expert/{of}"] for of in ("min", "mean", "max")] == [0, 17 / 3, 12]
    lines = diagnostics.table(layers).splitlines()
    assert [line.split()[0] for line in lines] == ["layer", *diagnostics.rows(layers)]
    assert len({len(line) for line in lines}) == 1 and "inf" in lines[-1]

    path, opened = tmp_path / "folder" / "diagnostics.csv", []
    writer, open_path = diagnostics.CSVWriter(path), Path.open
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *args, **how: opened.append(args) or open_path(*args, **how))
        for step in (0, 10):
            diagnostics.write(layers, step, writer)
    assert len(opened) == 2
    with path.open() as file:
        read = [(int(row["step"]), row["tag"], float(row["value"])) for row in csv.DictReader(file)]
    assert len(read) == 2 * len(flat)
    np.testing.assert_array_equal([value for step, _, value in read if step == 10], list(flat.values()))

    diagnostics.plot(layers, tmp_path / "one.png", "a title")
    diagnostics.plot([(0, layers), (10, layers)], tmp_path / "two.png")
    exact = {"nothing for a log axis": layer(snr=np.nan)}  # cosine 1
    diagnostics.plot([(0, exact), (10, exact)], tmp_path / "without an ending")
    for name in ("one.png", "two.png", "without an ending"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG") and (tmp_path / name).stat().st_size > 20_000
    with pytest.raises(ValueError, match=r"plot: history is without a layer; needs"):
        diagnostics.plot({}, tmp_path / "none.png")


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    layer = diagnostics.Layer(*[None] * 7)
    with pytest.raises(ModuleNotFoundError, match=r"plot: matplotlib is not .*pip install matplotlib"):
        diagnostics.plot({"dense": layer}, tmp_path / "none.png")
