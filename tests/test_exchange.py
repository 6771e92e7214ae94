"""Expert parallelism, on eight CPU devices against one: the functions that move rows, then moe."""

import re
from functools import cache, partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from products import refused

import jax_fp4 as fp4
from jax_fp4 import _exchange
from jax_fp4._exchange import exchange_tokens, exchange_weights, return_tokens
from jax_fp4._routing import combine_tokens, group_tokens, group_weights

T, K, D, G = 40, 3, 5, 16  # tokens and experts of all devices together
NAN = float("nan")
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is most of what this takes


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


def mesh(**axes):
    count = int(np.prod(list(axes.values())))
    kinds = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:count], axis_types=kinds)


def shard(function, axes, check_vma=True, over=None, outs=None):
    """`function` with every argument and result split along its first axis over `axes` of a 4 x 2 mesh."""
    spec = P(axes)
    over = mesh(a=4, b=2) if over is None else over
    return jax.shard_map(function, mesh=over, in_specs=spec, out_specs=outs or spec, check_vma=check_vma)


def same(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


# --- the functions, against group_tokens and its inverse on one device ---


def expert(rows, group_sizes, scale):
    """Of which every bit is known; NaN past the last group."""
    owner = jnp.repeat(jnp.arange(scale.shape[0]), group_sizes, total_repeat_length=rows.shape[0])
    inside = jnp.arange(rows.shape[0]) < jnp.sum(group_sizes)
    return jnp.where(inside[:, None], rows * scale[owner].astype(rows.dtype), NAN)


def on_many(x, weights, scale, experts, axes):
    rows, group_sizes, exchange = exchange_tokens(x, experts, G, axes)
    probs, y = exchange_weights(weights, exchange), expert(rows, group_sizes, scale)
    weighted = y * probs.astype(y.dtype)[:, None]
    return (return_tokens(y, exchange, weights), return_tokens(weighted, exchange, top_k=K)), rows, probs, group_sizes


def on_one(x, weights, scale, experts):
    rows, group_sizes, order = group_tokens(x, experts, G)
    probs, y = group_weights(weights, order), expert(rows, group_sizes, scale)
    weighted = y * probs.astype(y.dtype)[:, None]
    return (combine_tokens(y, order, weights), combine_tokens(weighted, order, top_k=K)), rows, probs, group_sizes


def with_gradients(function):
    """What it returns, and the gradients of all but the experts for a loss in which each element counts differently."""

    def loss(x, weights, scale, count, experts):
        out = function(x, weights, scale, experts)
        return sum(jnp.sum(count * jnp.sin(y.astype(jnp.float32))) for y in out[0]), out

    gradient = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    return lambda *args: (lambda value, grads: (value[1], grads))(*gradient(*args))


COUNT = normal(3, T, D)
ONE = cache(lambda: jit(with_gradients(on_one)))


@cache
def many(axes, check_vma, inside):
    """The gradients are taken inside shard_map, or outside."""
    local = partial(on_many, axes=axes)
    function = (
        shard(with_gradients(local), axes, check_vma) if inside else with_gradients(shard(local, axes, check_vma))
    )
    return jit(function)


def of_experts(rows, group_sizes, axes):
    """The rows of each device that are in use, one after the other; the others are zeros."""
    devices = {"a": 4}.get(axes, 8)
    parts = np.split(np.asarray(rows), devices)
    used = np.asarray(group_sizes).reshape(devices, -1).sum(1)
    assert all((part[n:] == 0).all() for part, n in zip(parts, used, strict=True))
    return np.concatenate([part[:n] for part, n in zip(parts, used, strict=True)])


def choices(low, high, seed=0):
    return np.random.default_rng(seed).integers(low, high, (T, K)).astype(np.int32)


ROUTINGS = {
    "mixed": choices(-1, G + 1),
    "all to the first": choices(0, 2),
    "all to the last expert": choices(G - 1, G),
    "none to the middle": np.where(choices(0, G) < 8, choices(0, 4), choices(12, G, 1)),
    "nobody": np.full((T, K), -1, np.int32),
    "some devices send nothing": np.where(np.arange(T)[:, None] < 22, G, choices(0, G)),
    "far out of range": np.where(choices(0, 2) == 0, -(2**31), choices(0, G)).astype(np.int32),
}


def check(function, axes, dtype, experts):
    x, weights, scale = normal(0, T, D, dtype=dtype), normal(1, T, K), normal(2, G, D)
    arguments = x, weights, scale, COUNT, jnp.asarray(experts, jnp.int32)
    (got, rows, probs, group_sizes), grads = function(*arguments)
    (want, want_rows, want_probs, want_sizes), want_grads = ONE()(*arguments)
    n = int(want_sizes.sum())
    same(group_sizes, want_sizes)
    for moved, one in ((rows, want_rows), (probs, want_probs)):
        assert moved.dtype == one.dtype
        np.testing.assert_array_equal(of_experts(moved, group_sizes, axes), np.asarray(one)[:n])
    for y, one in zip((*got, *grads[:2]), (*want, *want_grads[:2]), strict=True):
        same(y, one)
    np.testing.assert_allclose(grads[2], want_grads[2], rtol=1e-5, atol=1e-5)
    outside = (experts < 0) | (experts >= G)
    assert (np.asarray(grads[1])[outside] == 0).all() and (np.asarray(grads[1])[~outside] != 0).all()


@pytest.mark.core
@pytest.mark.parametrize(
    ("axes", "check_vma", "inside", "dtype"),
    [
        (("a", "b"), True, False, jnp.float32),
        (("a", "b"), False, True, jnp.bfloat16),
        ("a", True, True, jnp.float32),
    ],
    ids=str,
)
def test_equals_one_device(axes, check_vma, inside, dtype):
    """Rows, results and the gradients of tokens and weights bit for bit, that of the experts up to the order of its
    sum. The tail is NaN on its way back."""
    for experts in ROUTINGS.values():
        check(many(axes, check_vma, inside), axes, dtype, experts)


@given(
    st.lists(st.integers(-2, G + 1), min_size=1, max_size=G),
    st.integers(0, 2**32 - 1),
)
def test_any_routing(some, seed):
    """Whatever part of the experts is chosen from."""
    experts = np.random.default_rng(seed).choice(np.array(some, np.int32), (T, K))
    check(many(("a", "b"), True, False), ("a", "b"), jnp.float32, experts)


def test_the_routings_are_what_they_say():
    per_device = {name: np.bincount(e[(e >= 0) & (e < G)] // 2, minlength=8) for name, e in ROUTINGS.items()}
    assert per_device["all to the first"][0] == per_device["all to the last expert"][7] == T * K
    assert (per_device["none to the middle"][2:6] == 0).all() and per_device["nobody"].sum() == 0
    sent = ((ROUTINGS["some devices send nothing"] < G).reshape(8, -1)).sum(1)
    assert (sent[:4] == 0).all() and (sent[4:] > 0).all()


def test_sums_are_float32_and_rounded_once():
    """Each of eight devices has one expert, and a token a copy at each; a bfloat16 sum would lose all but the first."""
    terms = jnp.full((8, 8, 3), 0.75, jnp.bfloat16).at[0].set(256)  # of each expert, for the token of each device
    experts = jnp.tile(jnp.arange(8, dtype=jnp.int32), (8, 1))

    def local(x, terms, experts):
        exchange = exchange_tokens(x, experts, 8, "a").exchange
        pull = jax.vjp(lambda x: exchange_tokens(x, experts, 8, "a").x, x)[1]
        return return_tokens(terms[0], exchange, top_k=8), pull(terms[0])[0]

    x = jnp.ones((8, 3), jnp.bfloat16)
    padded = jnp.concatenate([terms, jnp.full((8, 64 - 8, 3), NAN, jnp.bfloat16)], axis=1)
    for got in jit(shard(local, "a", over=mesh(a=8)))(x, padded, experts):
        same(got, jnp.full((8, 3), 256 + 7 * 0.75).astype(jnp.bfloat16))


def test_tokens_that_all_devices_have():
    """Under check_vma the gradient of replicated tokens is the sum over the devices, which all send them."""
    x, experts = normal(0, 4, D), jnp.asarray(choices(0, 8)[:4])

    def local(x, experts):
        rows, _, exchange = exchange_tokens(x, experts, 8, "a")
        return return_tokens(rows * rows, exchange, top_k=K)

    sharded = jax.shard_map(local, mesh=mesh(a=4), in_specs=P(), out_specs=P("a"))
    value, grad = jit(jax.value_and_grad(lambda x: jnp.sum(sharded(x, experts))))(x)
    np.testing.assert_allclose(value, 4 * K * jnp.sum(x * x), rtol=1e-5)
    np.testing.assert_allclose(grad, 4 * K * 2 * x, rtol=1e-5)


def test_one_device_moves_nothing():
    """On no platform, and it has what group_tokens gives."""
    experts = jnp.asarray(ROUTINGS["mixed"])
    function = jax.jit(shard(lambda x, e: exchange_tokens(x, e, G, ("a", "b"))[:2], ("a", "b"), over=mesh(a=1, b=1)))
    x = normal(0, T, D)
    for got, want in zip(function(x, experts), group_tokens(x, experts, G), strict=False):
        same(got, want)
    for platform in ("cpu", "cuda"):
        text = function.trace(x, experts).lower(lowering_platforms=(platform,)).as_text()
        assert collectives(text) == [("all_gather", f"1x{G}xi32")]


def test_each_row_leaves_in_one_slot():
    """And slots beyond are empty: their zeros, not somebody's rows, fill the all-to-all."""

    def local(experts):
        counts = exchange_tokens(jnp.zeros((T // 4, 1)), experts, G, "a").exchange.counts
        return _exchange._slots(counts, T // 4 * K, ("a",))[0]

    slots = jit(shard(local, "a", over=mesh(a=4), check_vma=False))(jnp.asarray(ROUTINGS["mixed"]))
    n = T // 4 * K
    for device, experts in zip(np.split(np.asarray(slots), 4), np.split(ROUTINGS["mixed"].ravel(), 4), strict=True):
        sent = ((experts >= 0) & (experts < G)).sum()
        np.testing.assert_array_equal(np.sort(device), [*range(sent), *[n] * (4 * n - sent)])


def test_no_tokens():
    """Without any other operand XLA itself fails: it folds what is empty, and finds a shard_map of nothing."""

    def local(x, weights, scale, experts):
        rows, group_sizes, exchange = exchange_tokens(x, experts, G, "a")
        return return_tokens(expert(rows, group_sizes, scale), exchange, weights), group_sizes, 2 * scale

    arguments = jnp.zeros((0, D)), jnp.zeros((0, K)), normal(2, G, D), jnp.zeros((0, K), jnp.int32)
    y, group_sizes, doubled = jit(shard(local, "a"))(*arguments)
    assert y.shape == (0, D) and (np.asarray(group_sizes) == 0).all() and (doubled == 2 * arguments[2]).all()


def test_leading_axes_and_second_derivative():
    """Tokens [..., d] with weights [..., k]; the movements are differentiated twice."""
    x, experts, weights = normal(0, 8, 2, D), jnp.asarray(ROUTINGS["mixed"][:16].reshape(8, 2, K)), normal(1, 8, 2, K)

    def local(x, weights, experts):
        rows, _, exchange = exchange_tokens(x, experts, G, "a")
        return return_tokens(rows**3, exchange, weights)

    def one(x, weights, experts):
        rows, _, order = group_tokens(x, experts, G)
        return combine_tokens(rows**3, order, weights)

    def second(function):
        first = jax.grad(lambda x, w: jnp.sum(function(x, w, experts) ** 2))
        return jit(jax.grad(lambda x: jnp.sum(first(x, weights) ** 2)))(x)

    sharded = shard(local, "a", over=mesh(a=8))
    assert jax.eval_shape(sharded, x, weights, experts).shape == x.shape
    np.testing.assert_allclose(second(sharded), second(one), rtol=1e-4, atol=1e-3)


# --- what travels ---


def collectives(text):
    """(kind, shape and type of the result) of each."""
    found = r'"stablehlo\.(all_to_all|all_gather|all_reduce|collective_permute|reduce_scatter)".*-> tensor<([^>]+)>'
    ragged = r"stablehlo.custom_call @(ragged_all_to_all)\(.*-> tensor<([^>]+)>"
    lines = text.splitlines()
    return sorted(
        match.groups() for line in lines for match in [re.search(f"{found}", line) or re.search(ragged, line)] if match
    )


def travelling(platform, function=None, dtype=jnp.bfloat16):
    """Of the rows of bfloat16 tokens, of their float32 weights, and of the gradients of both."""

    def local(x, weights, experts):
        rows, _, exchange = exchange_tokens(x, experts, G, "a")
        probs = exchange_weights(weights, exchange)
        return return_tokens(rows * probs.astype(rows.dtype)[:, None], exchange, top_k=K)

    sharded = function or shard(local, "a", over=mesh(a=4))
    gradient = jax.jit(jax.grad(lambda x, w, e: jnp.sum(sharded(x, w, e).astype(jnp.float32) ** 2), argnums=(0, 1)))
    arguments = normal(0, T, D, dtype=dtype), normal(1, T, K), jnp.asarray(ROUTINGS["mixed"])
    return collectives(gradient.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()), local


def test_collectives():
    """One all-gather of counts; rows travel as they are, once in each direction, each time differentiated once back."""
    n = T // 4 * K
    counts = ("all_gather", f"4x{G}xi32")
    dense = [("all_to_all", f"4x{n}x1xf32")] * 2 + [("all_to_all", f"4x{n}x{D}xbf16")] * 4
    assert travelling("cpu")[0] == [counts, *dense]
    ragged = [f"{4 * n}x1xf32", f"{4 * n}x{D}xbf16", f"{4 * n}x{D}xbf16"], [f"{n}x1xf32", *[f"{n}x{D}xbf16"] * 2]
    want = [counts, *(("ragged_all_to_all", shape) for shape in sorted([*ragged[0], *ragged[1]]))]
    assert travelling("cuda")[0] == want


def test_beside_an_axis_of_the_compiler_rows_travel_dense():
    """XLA partitions over the other axis: no custom call then."""
    local = travelling("cpu")[1]
    sharded = jax.shard_map(local, mesh=mesh(a=4, b=2), in_specs=P("a"), out_specs=P("a"), axis_names={"a"})
    kinds = {kind for kind, _ in travelling("cuda", sharded)[0]}
    assert kinds == {"all_gather", "all_to_all"}


def by_the_book(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """jax.lax.ragged_all_to_all as its documentation has it, which no CPU runs; NaN where its conditions are broken."""
    assert len({a.shape for a in (input_offsets, send_sizes, output_offsets, recv_sizes)}) == 1
    here = jax.lax.axis_index(axis_name)
    sent, *slices = (jax.lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets))
    p, n, d = sent.shape
    begin, size, place = (a.reshape(p, p, -1)[:, here, :, None] for a in slices)  # [source, slice, 1]
    row = jnp.arange(output.shape[0])
    inside = (row >= place) & (row < place + size)
    source = jnp.arange(p)[:, None, None]
    index = jnp.sum(jnp.where(inside, source * n + begin + row - place, 0), axis=(0, 1))
    right = (size >= 0) & (place >= 0) & (place + size <= output.shape[0]) & (begin >= 0) & (begin + size <= n)
    right &= size == recv_sizes.reshape(p, -1, 1)
    written = jnp.sum(inside, axis=(0, 1))[:, None]
    output = jnp.where(written > 0, sent.reshape(p * n, d)[index], output)
    return jnp.where(jnp.all(right) & (written < 2), output, NAN)


def test_ragged_equals_one_device(monkeypatch):
    """What CUDA runs, with each expert's rows in 3 parts, over axes in another order than the mesh's."""
    monkeypatch.setattr(_exchange, "choose", lambda cuda, otherwise, usable: cuda)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", by_the_book)
    monkeypatch.setattr(_exchange, "SLICES", 40)
    function = many.__wrapped__(("b", "a"), True, False)
    for experts in ROUTINGS.values():
        check(function, ("b", "a"), jnp.float32, experts)
    cut = _exchange._cut(_exchange._places(jnp.full((8, G), 7, jnp.int32)))
    np.testing.assert_array_equal(cut.counts, np.tile([3, 3, 1], (8, G)))
    assert (jax.jit(_exchange._cut)(_exchange._places(jnp.zeros((8, 64), jnp.int32))).counts == 0).all()


# --- moe ---

F, N = 8, 10
LEAD = (8, 3)
DM = 32
ARGUMENTS = dict(
    x=normal(0, *LEAD, DM),
    logits=normal(1, *LEAD, G),
    w_in=normal(2, G, DM, 2 * F) / 4,
    w_out=normal(3, G, F, N) / 3,
    b_in=normal(4, G, 2 * F),
    b_out=normal(5, G, N),
)


def recipe(mode, **kw):
    return fp4.NVFP4BlockScaling(backward_mode=mode, **kw)


def step(function):
    """What it returns, and the gradient of every argument for a loss in which each element of y counts differently."""

    def loss(arguments):
        y, *more = function(arguments)
        return jnp.sum(normal(6, *y.shape) * y), (y, *more)

    gradient = jax.value_and_grad(loss, has_aux=True)
    return jit(lambda arguments: (lambda value, grads: (value[1], grads))(*gradient(arguments)))


def layer(arguments, expert_axis=None, **options):
    y, routing = fp4.moe(**arguments, top_k=2, score="sigmoid", expert_axis=expert_axis, **options)
    return y, routing.experts, routing.aux_loss[None]


aux_losses = jit(jax.vmap(lambda logits: fp4.route(logits, 2, score="sigmoid").aux_loss))
moe_on_one = cache(lambda chosen: step(partial(layer, recipe=chosen)))


@pytest.mark.core
@pytest.mark.parametrize(
    ("chosen", "expert_axis", "check_vma"),
    [
        (fp4.HIGH_PRECISION, "a", True),
        (fp4.HIGH_PRECISION, ("a", "b"), False),
        (recipe("default", stochastic_rounding=False), ("a", "b"), False),
    ],
    ids=["high precision, shared experts", "high precision", "default"],
)
def test_moe_equals_one_device(chosen, expert_axis, check_vma):
    """y and all gradients, at different loads of the experts; one without tokens has none (C1). Tokens are split over
    both axes, experts over both or over one: then two devices have the same. aux_loss is that of the local tokens."""
    specs = {name: P(("a", "b")) if name in ("x", "logits") else P(expert_axis) for name in ARGUMENTS}
    local = partial(layer, expert_axis=expert_axis, recipe=chosen)
    sharded = jax.shard_map(local, mesh=mesh(a=4, b=2), in_specs=(specs,), out_specs=P(("a", "b")), check_vma=check_vma)
    got, want = step(sharded), moe_on_one(chosen)
    for logits in (ARGUMENTS["logits"].at[..., 4].set(8), ARGUMENTS["logits"].at[..., :6].set(-8)):
        arguments = ARGUMENTS | dict(logits=logits)
        ((y, experts, losses), grads), ((want_y, want_experts, _), want_grads) = got(arguments), want(arguments)
        same(experts, want_experts)
        np.testing.assert_allclose(y, want_y, rtol=1e-6, atol=1e-6)
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, want_grads[name], rtol=1e-6, atol=2e-6, err_msg=name)
            assert np.abs(grad).max() > 1e-3
        np.testing.assert_allclose(losses, aux_losses(logits), rtol=1e-6)
        idle = ~np.isin(np.arange(G), experts)
        assert all((np.asarray(grads[name])[idle] == 0).all() for name in ("w_in", "w_out", "b_in", "b_out"))
    assert idle[:6].all()


LOADS = {  # of four devices with four experts each
    "uneven": ARGUMENTS["logits"],
    "one device has none": ARGUMENTS["logits"].at[..., 4:8].set(-8),
    "all on one device": ARGUMENTS["logits"].at[..., 8:12].add(8),
}
BY_TOKENS = P(("b", "a"))  # so that the rows of an expert lie as on one device: those of the first b, of each a


@pytest.mark.parametrize(
    ("mode", "check_vma"),
    [pytest.param("dequant", True, marks=pytest.mark.core), ("unquant", False), ("default", True), ("default", False)],
)
def test_moe_with_gathered_experts(mode, check_vma):
    """Experts over one axis, their shards over the other, in NVFP4: y, the aux_loss of all tokens, and gradients, as on
    one device; amaxes and draws are those of all rows of an expert. In default its column-wise blocks are not."""
    kernels = dict(w_in=P("a", "b"), w_out=P("a", None, "b"), b_in=P("a"), b_out=P("a"))
    specs = dict.fromkeys(("x", "logits"), BY_TOKENS) | kernels
    lies = fp4.Specs(x=BY_TOKENS, kernel=kernels["w_in"]), fp4.Specs(kernel=kernels["w_out"])
    gather = fp4.WeightGather("b", 1, "quantized"), fp4.WeightGather("b", 2)
    key, chosen = jax.random.key(3), recipe(mode)
    local = partial(layer, expert_axis="a", gather=gather, specs=lies, recipe=chosen, key=key)
    outs = BY_TOKENS, BY_TOKENS, BY_TOKENS
    sharded = jax.shard_map(local, mesh=mesh(a=4, b=2), in_specs=(specs,), out_specs=outs, check_vma=check_vma)
    got, want = step(sharded), step(partial(layer, recipe=chosen, key=key))
    for name, logits in LOADS.items():
        arguments = ARGUMENTS | dict(logits=logits)
        ((y, experts, losses), grads), ((want_y, want_experts, aux), want_grads) = got(arguments), want(arguments)
        same(experts, want_experts)
        np.testing.assert_allclose(losses, np.full(8, aux[0]), rtol=1e-6)
        np.testing.assert_allclose(y, want_y, rtol=1e-5, atol=1e-5, err_msg=name)
        for of, grad in grads.items():
            if mode != "default" or of not in ("w_in", "w_out"):
                close = 1e-5 * np.linalg.norm(want_grads[of])
                assert np.linalg.norm(grad - want_grads[of]) <= close, (name, of)
            assert np.isfinite(grad).all() and np.abs(grad).max() > 0
        per_device = np.bincount(np.asarray(experts).ravel() // 4, minlength=4)
        assert {"uneven": per_device.min() > 0, "one device has none": per_device[1] == 0}.get(
            name, per_device[2] == 48
        )


# --- refusals ---

X, EXPERTS, WEIGHTS = normal(0, T, D), jnp.asarray(ROUTINGS["mixed"]), normal(1, T, K)


def inside(call, axis_names=("a", "b")):
    """Traces call(x, experts, weights) with the tokens of one device of four."""
    spec = P("a") if "a" in axis_names else P("b")
    local = lambda *args: (call(*args), args[0])[1]  # noqa: E731
    over = dict(mesh=mesh(a=4, b=2), axis_names={*axis_names})
    sharded = jax.shard_map(local, in_specs=spec, out_specs=spec, **over)
    jax.eval_shape(sharded, X, EXPERTS, WEIGHTS)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda x, e, _: exchange_tokens(x, e, G, "c"),
            ValueError,
            r"^exchange_tokens: axis_name is 'c'; needs one or more of \('a', 'b'\)",
        ),
        (lambda x, e, _: exchange_tokens(x, e, G, ("a", "c")), ValueError, r"axis_name is \('a', 'c'\); needs"),
        (lambda x, e, _: exchange_tokens(x, e, G, ()), ValueError, r"axis_name is \(\); needs"),
        (lambda x, e, _: exchange_tokens(x, e, G, None), ValueError, "axis_name is None"),
        (
            lambda x, e, _: exchange_tokens(x, e, G, ("a", "b", "a")),
            ValueError,
            r"axis_name is \('a', 'b', 'a'\); needs axes that differ .* Try \('a', 'b'\)",
        ),
        (
            lambda x, e, _: exchange_tokens(x, e, 18, "a"),
            ValueError,
            r"^exchange_tokens: num_experts is 18; needs a multiple of 4, the devices of \('a',\)",
        ),
        (lambda x, e, _: exchange_tokens(x, e, 0, "a"), ValueError, "^exchange_tokens: num_experts is 0"),
        (lambda x, e, _: exchange_tokens(x, e[1:], G, "a"), ValueError, "^exchange_tokens: experts is of shape"),
        (lambda x, e, w: exchange_tokens(x, w, G, "a"), TypeError, "^exchange_tokens: experts is an array of float32"),
        (lambda x, e, _: exchange_tokens(e, e, G, "a"), TypeError, "^exchange_tokens: x is an array of int32"),
        (
            lambda x, e, w: exchange_weights(w[1:], exchange_tokens(x, e, G, "a").exchange),
            ValueError,
            r"^exchange_weights: weights is of shape \(9, 3\)",
        ),
        (
            lambda x, e, w: return_tokens(x, exchange_tokens(x, e, G, "a").exchange, w),
            ValueError,
            r"^return_tokens: y is of shape \(10, 5\); needs \[120, d\]",
        ),
        (
            lambda x, e, w: return_tokens(e, exchange_tokens(x, e, G, "a").exchange, w),
            TypeError,
            "^return_tokens: y is an array of int32",
        ),
        (
            lambda x, e, w: return_tokens(*exchange_tokens(x, e, G, "a")[::2]),
            ValueError,
            "^return_tokens: weights is None without top_k",
        ),
        (
            lambda x, e, w: return_tokens(*exchange_tokens(x, e, G, "a")[::2], w[1:]),
            ValueError,
            r"^return_tokens: weights is of shape \(9, 3\)",
        ),
        (
            lambda x, e, w: return_tokens(*exchange_tokens(x, e, G, "a")[::2], top_k=7),
            ValueError,
            "^return_tokens: top_k is 7; needs a divisor",
        ),
    ],
)
def test_errors(call, error, says):
    refused(lambda: inside(call), error, says)


def test_an_axis_that_is_not_bound():
    """Outside shard_map there is none, and one of the compiler's is no axis of it."""
    refused(lambda: exchange_tokens(X, EXPERTS, G, "a"), ValueError, "axis_name is 'a'; .* there is none around this")
    call = partial(fp4.moe, **ARGUMENTS, top_k=2, expert_axis="a")
    refused(call, ValueError, "^moe: expert_axis is 'a'; needs a mesh axis of a surrounding shard_map")
    outer = lambda x, e, _: exchange_tokens(x, e, G, "a")  # noqa: E731
    refused(lambda: inside(outer, ("b",)), ValueError, r"axis_name is 'a'; needs one or more of \('b',\)")


def test_moe_has_a_logit_for_each_expert_of_all_devices():
    """w_in has the local ones."""

    def call(logits):
        arguments = ARGUMENTS | dict(logits=jnp.ones((*LEAD, logits)))
        inside(lambda *_: fp4.moe(**arguments, top_k=2, expert_axis="a", recipe=fp4.HIGH_PRECISION))

    call(4 * G)
    says = r"^moe: logits is of shape \(8, 3, 16\); needs \(8, 3, 64\) .* w_in \(16, 32, 16\) on each of the 4 devices"
    refused(lambda: call(G), ValueError, says)
