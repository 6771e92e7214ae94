"""Routing and grouping: against loops over tokens in NumPy, and gradients against a dense one-hot formulation."""

import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import PartitionSpec as P

from jax_fp4._routing import combine_tokens, group_tokens, group_weights, route

T, K, D, E = 12, 2, 5, 4
NAN, INF = float("nan"), float("inf")


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def normal(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


# --- route, by a loop over tokens ---


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def best(values, k):
    """Indices of the k largest, the lowest index first among equals."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def route_by_loop(
    logits, k, score="softmax", normalize=True, expert_groups=None, top_expert_groups=None, bias=None, scale=1.0
):
    logits = np.asarray(logits, np.float64)
    e, weights, experts, share = logits.shape[-1], [], [], []
    for row in logits:
        scores = softmax(row) if score == "softmax" else 1 / (1 + np.exp(-row))
        ranked = scores + (0 if bias is None else np.asarray(bias, np.float64))
        allowed = range(e)
        if expert_groups:
            size = e // expert_groups
            sums = [np.sort(ranked[g * size : (g + 1) * size])[-2:].sum() for g in range(expert_groups)]
            kept = best(sums, top_expert_groups)
            allowed = [i for i in range(e) if i // size in kept]
        chosen = [allowed[i] for i in best([ranked[i] for i in allowed], k)]
        w = scores[chosen]
        weights.append(scale * (w / w.sum() if normalize else w))
        experts.append(chosen)
        share.append(scores / scores.sum())
    counts = np.bincount(np.ravel(experts), minlength=e)
    aux_loss = e * np.sum(counts / counts.sum() * np.mean(share, 0))
    return np.array(weights), np.array(experts), aux_loss


OPTIONS = [
    {},
    dict(normalize=False),
    dict(score="sigmoid"),
    dict(score="sigmoid", normalize=False, scale=2.5),
    dict(bias=True),
    dict(expert_groups=4, top_expert_groups=2),
    dict(score="sigmoid", expert_groups=4, top_expert_groups=3, bias=True, scale=2.5),
    dict(expert_groups=8, top_expert_groups=3),  # groups of one
    dict(expert_groups=1, top_expert_groups=1),
]


@pytest.mark.core
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_route(options, k):
    logits = normal(64, 8)
    if options.get("bias"):
        options = options | dict(bias=normal(8, seed=1) / 4)
    routing = jax.jit(lambda x: route(x, k, **options))(logits)
    weights, experts, aux_loss = route_by_loop(logits, k, **options)
    np.testing.assert_array_equal(routing.experts, experts)
    np.testing.assert_allclose(routing.weights, weights, rtol=3e-6)
    np.testing.assert_allclose(routing.aux_loss, aux_loss, rtol=1e-5)
    assert [leaf.dtype for leaf in routing] == [jnp.float32, jnp.int32, jnp.float32]


def test_options_matter():
    """The groups and the bias of the test above change what is chosen."""
    logits = normal(64, 8)
    plain = route(logits, 3).experts
    for options in (dict(bias=normal(8, seed=1) / 4), dict(expert_groups=4, top_expert_groups=2)):
        assert (route(logits, 3, **options).experts != plain).any()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_route_computes_in_float32(score, dtype):
    logits = normal(16, 8, dtype=dtype)
    for got, want in zip(route(logits, 2, score=score), route(logits.astype(jnp.float32), 2, score=score), strict=True):
        same(got, want)
    assert jax.grad(lambda x: route(x, 2, score=score).weights[:, 0].sum())(logits).dtype == dtype


def test_leading_axes():
    logits = normal(2, 3, 4, 8)
    flat = route(logits.reshape(24, 8), 2)
    nested = route(logits, 2)
    assert nested.weights.shape == nested.experts.shape == (2, 3, 4, 2)
    np.testing.assert_array_equal(nested.experts.reshape(24, 2), flat.experts)
    np.testing.assert_allclose(nested.aux_loss, flat.aux_loss, rtol=1e-6)
    assert route(logits[0, 0, 0], 2).weights.shape == (2,)


def test_aux_loss():
    """1 when uniform, e when everything goes to one expert, 0 without tokens."""
    uniform = route(10 * jnp.tile(jnp.eye(4), (3, 1)), 1)
    np.testing.assert_allclose(uniform.aux_loss, 1, rtol=1e-6)
    np.testing.assert_allclose(route(jnp.tile(jnp.array([50.0, 0, 0, 0]), (3, 1)), 1).aux_loss, 4, rtol=1e-6)
    assert route(jnp.zeros((0, 4)), 2).aux_loss == 0


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_aux_loss_has_the_gradient_of_the_mean_scores(score):
    logits = normal(T, E)
    share = jnp.bincount(route(logits, K, score=score).experts.ravel(), length=E) / (T * K)

    def by_hand(logits):
        scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
        return E * jnp.sum(share * jnp.mean(scores / scores.sum(-1, keepdims=True), 0))

    got = jax.grad(lambda x: route(x, K, score=score).aux_loss)(logits)
    np.testing.assert_allclose(got, jax.grad(by_hand)(logits), atol=1e-6)
    assert np.abs(got).max() > 1e-3


@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
def test_gradient_of_weights(options):
    """Of the scores at the chosen experts; none to the bias."""
    logits, c = normal(T, E), normal(T, K, seed=2)
    bias = normal(E, seed=1) / 4
    options = options | (dict(bias=bias) if options.get("bias") else {})
    experts = route(logits, K, **options).experts

    def by_hand(logits):
        scores = jax.nn.sigmoid(logits) if options.get("score") == "sigmoid" else jax.nn.softmax(logits)
        w = jnp.sum(jax.nn.one_hot(experts, E) * scores[:, None], -1)
        w = w / w.sum(-1, keepdims=True) if options.get("normalize", True) else w
        return jnp.sum(c * w) * options.get("scale", 1.0)

    got = jax.grad(lambda x: jnp.sum(c * route(x, K, **options).weights))(logits)
    np.testing.assert_allclose(got, jax.grad(by_hand)(logits), atol=1e-6)
    if "bias" in options:
        db = jax.grad(lambda b: jnp.sum(c * route(logits, K, bias=b).weights) + route(logits, K, bias=b).aux_loss)(bias)
        np.testing.assert_array_equal(db, 0)


def test_ties_take_the_lowest_index():
    np.testing.assert_array_equal(route(jnp.zeros((2, 6)), 3).experts, [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(route(jnp.array([[-0.0, 0.0, 0.0]]), 2).experts, [[0, 1]])
    tied = jnp.array([[0.0, 1, 1, 0, 1, 1]])
    np.testing.assert_array_equal(
        route(tied, 2, expert_groups=3, top_expert_groups=2).experts, [[1, 4]]
    )  # groups 2 and 0
    np.testing.assert_array_equal(
        route(jnp.zeros((1, 6)), 4, expert_groups=3, top_expert_groups=2).experts, [[0, 1, 2, 3]]
    )


def test_scores_that_underflow_still_rank_and_sum_to_one():
    logits = jnp.array([[0.0, -300, -200, -250]])
    np.testing.assert_array_equal(route(logits, 3).experts, [[0, 2, 3]])
    low = route(logits - 400, 2, score="sigmoid")
    np.testing.assert_array_equal(low.experts, [[0, 2]])
    np.testing.assert_allclose(low.weights, [[1, 0]])
    assert np.isfinite(jax.grad(lambda x: route(x, 2, score="sigmoid").weights[0, 0])(logits - 400)).all()


@pytest.mark.parametrize("nan", [NAN, -NAN])
@pytest.mark.parametrize("options", [{}, dict(score="sigmoid"), dict(expert_groups=2, top_expert_groups=1)], ids=str)
def test_nan_logits(options, nan):
    logits = jnp.array([[0.0, 1, nan, 3], [0.0, 1, 2, 3]])
    routing = route(logits, 2, **options)
    assert ((routing.experts >= 0) & (routing.experts < 4)).all()
    assert routing.experts[0, 0] == 2 or "expert_groups" in options
    assert np.isnan(routing.weights[0]).all() and np.isfinite(routing.weights[1]).all()


@pytest.mark.parametrize("options", [{}, dict(score="sigmoid"), dict(expert_groups=2, top_expert_groups=2)], ids=str)
def test_minus_infinity_excludes(options):
    logits = jnp.array([[-INF, 1, -INF, 0]])
    routing, vjp = jax.vjp(lambda x: route(x, 2, **options).weights, logits)
    np.testing.assert_array_equal(route(logits, 2, **options).experts, [[1, 3]])
    assert np.isfinite(routing).all() and np.isfinite(vjp(jnp.array([[1.0, 2]]))[0]).all()
    masked = route(jnp.zeros((1, 4)), 2, bias=jnp.array([0, -INF, 0, 0]), **options)
    np.testing.assert_array_equal(masked.experts, [[0, 2]])


# --- group_tokens and combine_tokens, by a loop over rows ---


def group_by_loop(x, experts, g):
    t, k = experts.shape
    rows = [(e, i) for e in range(g) for i in range(t * k) if experts.ravel()[i] == e]
    order = [i for _, i in rows] + [t * k] * (t * k - len(rows))
    grouped = np.zeros((t * k, x.shape[-1]), np.float32)
    for row, (_, i) in enumerate(rows):
        grouped[row] = x[i // k]
    return grouped, [sum(e == e_ for e_, _ in rows) for e in range(g)], order


def combine_by_loop(y, order, weights):
    t, k = weights.shape
    out = np.zeros((t, y.shape[-1]))
    for row, i in enumerate(order):
        if i < t * k:
            out[i // k] += np.float64(weights[i // k, i % k]) * y[row]
    return out


# Traced experts; and one compilation for a shape.
GROUP, COMBINE = jax.jit(group_tokens, static_argnums=2), jax.jit(combine_tokens, static_argnames="top_k")


@st.composite
def choices(draw):
    """experts [t, k], some out of range, and g."""
    t, k, g = draw(st.sampled_from([(0, 2, 3), (1, 3, 1), (7, 1, 4), (7, 3, 4)]))
    values = draw(
        st.lists(st.integers(-2, g + 1) | st.sampled_from([-(2**31), 2**31 - 1]), min_size=t * k, max_size=t * k)
    )
    return np.array(values, np.int32).reshape(t, k), g


@given(choices())
def test_grouping(case):
    experts, g = case
    t, k = experts.shape
    x, weights = normal(t, D), normal(t, k, seed=1)
    grouped = GROUP(x, jnp.asarray(experts), g)
    rows, sizes, order = group_by_loop(np.asarray(x), experts, g)
    np.testing.assert_array_equal(grouped.x, rows)
    np.testing.assert_array_equal(grouped.group_sizes, sizes)
    np.testing.assert_array_equal(grouped.order, order)
    assert grouped.group_sizes.dtype == grouped.order.dtype == jnp.int32
    y = jnp.where(jnp.arange(t * k)[:, None] < sum(sizes), normal(t * k, D, seed=2), NAN)  # nobody reads the tail
    out = combine_by_loop(np.asarray(y), order, np.asarray(weights))
    np.testing.assert_allclose(COMBINE(y, grouped.order, weights), out, rtol=1e-5, atol=1e-6)
    probs = np.append(np.asarray(weights).ravel(), 0)[order]
    np.testing.assert_array_equal(group_weights(weights, grouped.order), probs)
    weighted = COMBINE(y * probs[:, None], grouped.order, top_k=k)
    np.testing.assert_allclose(weighted, out, rtol=1e-5, atol=1e-6)


def kernels():
    return normal(E, D, D, seed=3)


def experts_for(t=T, k=K, low=-1, high=E + 1, seed=4):
    return jax.random.randint(jax.random.key(seed), (t, k), low, high, jnp.int32)


def moe(x, w, weights, experts, fold=False):
    """Through groups; the expert is a matrix and a tanh. `fold` weights the rows before combining."""
    grouped = group_tokens(x, experts, w.shape[0])
    owner = jnp.repeat(jnp.arange(w.shape[0]), grouped.group_sizes, total_repeat_length=grouped.x.shape[0])
    y = jnp.tanh(jnp.einsum("nd,ndf->nf", grouped.x, w[owner]))
    if fold:
        y = y * group_weights(weights, grouped.order)[:, None]
        return combine_tokens(y, grouped.order, top_k=weights.shape[-1]).reshape(x.shape)
    return combine_tokens(y, grouped.order, weights)


def dense_routing(x, w, weights, experts):
    """Every expert for every token, and a one-hot mask."""
    gate = jnp.einsum("tke,tk->te", jax.nn.one_hot(experts, w.shape[0]), weights)
    return jnp.einsum("te,tef->tf", gate, jnp.tanh(jnp.einsum("td,edf->tef", x, w)))


@pytest.mark.core
@pytest.mark.parametrize("fold", [False, True])
def test_gradients(fold):
    """Of x, kernels and weights, with choices out of range."""
    args, experts, c = (normal(T, D), kernels(), normal(T, K, seed=1)), experts_for(), normal(T, D, seed=5)
    assert (experts < 0).any() and (experts >= E).any()
    y, vjp = jax.vjp(lambda *args: moe(*args, experts, fold), *args)
    expected, expected_vjp = jax.vjp(lambda *args: dense_routing(*args, experts), *args)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    for got, want in zip(vjp(c), expected_vjp(c), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    outside = np.asarray((experts < 0) | (experts >= E))
    assert (np.asarray(vjp(c)[2])[outside] == 0).all()


def test_tail_has_no_gradient_and_nan_there_reaches_nothing():
    experts = jnp.array([[0, 9], [-1, 1]], jnp.int32)
    grouped, vjp = jax.vjp(lambda x: group_tokens(x, experts, 2).x, jnp.ones((2, D)))
    np.testing.assert_array_equal(grouped[2:], 0)
    np.testing.assert_array_equal(vjp(jnp.full((4, D), NAN).at[:2].set(3.0))[0], 3.0)
    y = jnp.ones((4, D)).at[2:].set(NAN)
    weights = jnp.array([[2.0, NAN], [NAN, 5.0]])
    out, vjp = jax.vjp(lambda y, w: combine_tokens(y, group_tokens(y[:2], experts, 2).order, w), y, weights)
    np.testing.assert_array_equal(out, [[2.0] * D, [5.0] * D])
    dy, dw = vjp(jnp.ones((2, D)))
    np.testing.assert_array_equal(dy[:, 0], [2, 5, 0, 0])
    np.testing.assert_array_equal(dw, [[D, 0], [0, D]])


def test_sums_are_float32_and_rounded_once():
    """D9: bfloat16 rows with float32 weights; eight copies whose bfloat16 sum would lose every term but the first."""
    experts = jnp.arange(8, dtype=jnp.int32)[None]
    x = jnp.ones((1, D), jnp.bfloat16)
    dgrouped = jnp.full((8, D), 0.75, jnp.bfloat16).at[0].set(256)
    _, vjp = jax.vjp(lambda x: group_tokens(x, experts, 8).x, x)
    same(vjp(dgrouped)[0], jnp.full((1, D), 256 + 7 * 0.75).astype(jnp.bfloat16))
    order = group_tokens(x, experts, 8).order
    same(combine_tokens(dgrouped, order, top_k=8), jnp.full((1, D), 256 + 7 * 0.75).astype(jnp.bfloat16))
    weights = jnp.full((1, 8), 1 + 2**-12)
    out, vjp = jax.vjp(lambda y, w: combine_tokens(y, order, w), dgrouped, weights)
    same(out, ((256 + 7 * 0.75) * weights[:, :1] * jnp.ones((1, D))).astype(jnp.bfloat16))
    dout = normal(1, D, dtype=jnp.bfloat16)
    dy, dw = vjp(dout)
    same(dy, (jnp.tile(dout, (8, 1)).astype(jnp.float32) * weights[0, 0]).astype(jnp.bfloat16))
    assert dw.dtype == jnp.float32
    wide = np.asarray(dgrouped, np.float64) @ np.asarray(dout, np.float64)[0]
    np.testing.assert_allclose(dw[0], wide, rtol=1e-6)


@pytest.mark.parametrize("weights_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes(dtype, weights_dtype):
    x, experts, weights = normal(T, D, dtype=dtype), experts_for(), normal(T, K, dtype=weights_dtype)
    grouped, group_vjp = jax.vjp(lambda x: group_tokens(x, experts, E).x, x)
    order = group_tokens(x, experts, E).order
    out, combine_vjp = jax.vjp(lambda y, w: combine_tokens(y, order, w), grouped, weights)
    probs, probs_vjp = jax.vjp(lambda w: group_weights(w, order), weights)
    dy, dw = combine_vjp(out)
    assert grouped.dtype == out.dtype == dy.dtype == group_vjp(dy)[0].dtype == dtype
    assert dw.dtype == probs.dtype == probs_vjp(probs)[0].dtype == weights_dtype


def test_leading_axes_of_tokens():
    x, experts, weights = normal(2, 3, D), experts_for(6).reshape(2, 3, K), normal(2, 3, K)
    grouped = group_tokens(x, experts, E)
    same(grouped.x, group_tokens(x.reshape(6, D), experts.reshape(6, K), E).x)
    assert combine_tokens(grouped.x, grouped.order, weights).shape == x.shape
    one = group_tokens(x[0, 0], experts[0, 0], E)
    assert combine_tokens(one.x, one.order, weights[0, 0]).shape == (D,)


def layer(x, logits, w):
    """Everything, with a loss: for what transformations must not change."""
    routing = route(logits, K)
    return jnp.sum(moe(x, w, routing.weights, routing.experts) ** 2) + routing.aux_loss


def close(a, b):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), a, b)


def test_transformations():
    """vmap, remat and scan give what a loop over a jitted step gives (everything traced), under strict promotion."""
    x, logits, w = normal(3, T, D), normal(3, T, E, seed=1), kernels()
    step = jax.value_and_grad(layer, argnums=(0, 1, 2))
    jitted = jax.jit(step)
    looped = [jitted(x[i], logits[i], w) for i in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *looped)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        close(jax.jit(jax.vmap(step, (0, 0, None)))(x, logits, w), stacked)
        remat = jax.value_and_grad(jax.checkpoint(layer), argnums=(0, 1, 2))
        close(jax.jit(remat)(x[0], logits[0], w), looped[0])
        close(jax.lax.scan(lambda _, args: (None, step(*args, w)), None, (x, logits))[1], stacked)


def test_options_under_strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        route(
            normal(2, 3, 8),
            3,
            score="sigmoid",
            expert_groups=4,
            top_expert_groups=2,
            bias=normal(8, dtype=jnp.bfloat16),
            scale=2,
        )


def test_second_derivative():
    x, experts, weights = normal(T, D), experts_for(), normal(T, K, seed=1)
    hessian = lambda f: jax.jvp(jax.grad(f), (weights,), (jnp.ones_like(weights),))[1]  # noqa: E731
    got = jax.grad(lambda w: jnp.sum(jax.grad(lambda w: jnp.sum(moe(x, kernels(), w, experts) ** 3))(w)))(weights)
    want = hessian(lambda w: jnp.sum(dense_routing(x, kernels(), w, experts) ** 3))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("split", ["tokens", "experts"])
def test_inside_shard_map(split, check_vma):
    """Tokens on many devices, or replicated tokens and experts on many: gradients as without (one device has all)."""
    mesh = jax.make_mesh((1,), ("axis",), axis_types=(jax.sharding.AxisType.Auto,))
    args = normal(T, D), kernels(), normal(T, K, seed=1)
    experts = experts_for()
    tokens, kernel = (P("axis"), P()) if split == "tokens" else (P(), P("axis"))

    def whole(x, w, weights, experts):
        grouped = group_tokens(x, experts, w.shape[0])
        y = grouped.x * jnp.sum(w) * group_weights(weights, grouped.order)[:, None]
        return combine_tokens(y, grouped.order, weights) + combine_tokens(y, grouped.order, top_k=K)

    def local(x, w, weights, experts):
        if split == "tokens":
            return whole(x, w, weights, experts)
        return jax.lax.psum(whole(x, w, weights, experts - jax.lax.axis_index("axis") * w.shape[0]), "axis")

    specs = (tokens, kernel, tokens, tokens)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=check_vma)
    gradient = lambda f: jax.grad(lambda *args: jnp.sum(f(*args, experts) ** 2), argnums=(0, 1, 2))  # noqa: E731
    close(jax.jit(gradient(sharded))(*args), jax.jit(gradient(whole))(*args))


def test_no_scatter_of_rows():
    """Both directions gather: what is scattered is indices."""
    experts = experts_for()

    def loss(x, weights):
        grouped = group_tokens(x, experts, E)
        probs = group_weights(weights, grouped.order)
        return jnp.sum(combine_tokens(jnp.tanh(grouped.x) * probs[:, None], grouped.order, weights))

    text = str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(normal(T, D), normal(T, K)))
    assert set(re.findall(r"(\w+)\[[\d,]*\] = scatter", text)) == {"i32"}


@pytest.mark.parametrize(("t", "k", "g"), [(0, 2, 4), (3, 1, 1), (0, 1, 1)])
def test_corners(t, k, g):
    logits, x, w = normal(t, g), normal(t, D), normal(g, D, D)
    routing = route(logits, min(k, g))

    def loss(x, weights):
        return jnp.sum(moe(x, w, weights, routing.experts))

    value, (dx, dw) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, routing.weights)
    assert np.isfinite(value) and dx.shape == x.shape and dw.shape == routing.weights.shape
    assert np.isfinite(routing.aux_loss)


# --- errors ---

X, EXPERTS, ORDER = jnp.ones((T, D)), jnp.zeros((T, K), jnp.int32), jnp.arange(T * K, dtype=jnp.int32)
Y, WEIGHTS, LOGITS = jnp.ones((T * K, D)), jnp.ones((T, K)), jnp.ones((T, 8))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: route(LOGITS, 9), ValueError, "route: top_k is 9; needs an integer from 1 to 8 because there are 8"),
        (lambda: route(LOGITS, 0), ValueError, "top_k is 0"),
        (lambda: route(LOGITS, True), ValueError, "top_k is True"),
        (lambda: route(LOGITS, 2.0), ValueError, "top_k is 2.0"),
        (lambda: route(LOGITS, 2, score="tanh"), ValueError, r"score is 'tanh'; needs one of \('softmax', 'sigmoid'\)"),
        (lambda: route(LOGITS, 2, normalize=1), ValueError, "normalize is 1"),
        (lambda: route(LOGITS, 2, scale=NAN), ValueError, "scale is nan"),
        (lambda: route(LOGITS, 2, scale="1"), ValueError, "scale is '1'"),
        (
            lambda: route(LOGITS, 2, expert_groups=3, top_expert_groups=1),
            ValueError,
            "expert_groups is 3; needs a divisor of 8",
        ),
        (lambda: route(LOGITS, 2, expert_groups=9, top_expert_groups=1), ValueError, "expert_groups is 9"),
        (
            lambda: route(LOGITS, 2, expert_groups=4, top_expert_groups=5),
            ValueError,
            "top_expert_groups is 5; needs an integer from 1 to 4",
        ),
        (
            lambda: route(LOGITS, 3, expert_groups=4, top_expert_groups=1),
            ValueError,
            "top_k is 3; .* 1 groups hold 2 experts",
        ),
        (
            lambda: route(LOGITS, 2, expert_groups=4),
            ValueError,
            "top_expert_groups is None; needs a number because expert_groups is given",
        ),
        (lambda: route(LOGITS, 2, top_expert_groups=4), ValueError, "expert_groups is None"),
        (lambda: route(LOGITS, 2, bias=jnp.ones(7)), ValueError, r"bias is of shape \(7,\); needs \(8,\)"),
        (lambda: route(LOGITS, 2, bias=jnp.ones(8, jnp.int32)), TypeError, "bias is an array of int32"),
        (lambda: route(jnp.ones((T, 8), jnp.int32), 2), TypeError, "logits is an array of int32"),
        (lambda: route([[1.0]], 1), TypeError, "logits is a list"),
        (lambda: route(jnp.ones(()), 1), ValueError, r"logits is of shape \(\)"),
        (lambda: route(jnp.ones((T, 0)), 1), ValueError, r"logits is of shape \(12, 0\)"),
        (lambda: group_tokens(X, EXPERTS[1:], E), ValueError, r"experts is of shape \(11, 2\); needs \(12, 'k'\)"),
        (lambda: group_tokens(X, EXPERTS[0], E), ValueError, r"experts is of shape \(2,\)"),
        (lambda: group_tokens(X, EXPERTS[:, :0], E), ValueError, r"experts.shape\[-1\] is 0"),
        (lambda: group_tokens(jnp.ones(()), EXPERTS[0, 0], E), ValueError, r"experts is of shape \(\)"),
        (lambda: group_tokens(X, EXPERTS.astype(jnp.int16), E), TypeError, "experts is an array of int16; needs"),
        (lambda: group_tokens(X, X, E), TypeError, "experts is an array of float32"),
        (lambda: group_tokens(X, [[0]], E), TypeError, "experts is a list"),
        (lambda: group_tokens(EXPERTS, EXPERTS, E), TypeError, "x is an array of int32"),
        (lambda: group_tokens(X, EXPERTS, 0), ValueError, "num_experts is 0"),
        (lambda: group_tokens(X, EXPERTS, jnp.int32(4)), ValueError, "num_experts is Array"),
        (lambda: combine_tokens(Y, ORDER), ValueError, "weights is None without top_k"),
        (lambda: combine_tokens(Y, ORDER, WEIGHTS, top_k=2), ValueError, "weights is given with top_k"),
        (lambda: combine_tokens(Y, ORDER, WEIGHTS[1:]), ValueError, r"weights is of shape \(11, 2\)"),
        (lambda: combine_tokens(Y, ORDER, ORDER), TypeError, "weights is an array of int32"),
        (lambda: combine_tokens(Y, ORDER[1:], WEIGHTS), ValueError, r"order is of shape \(23,\); needs \(24,\)"),
        (lambda: combine_tokens(Y, WEIGHTS, WEIGHTS), TypeError, "order is an array of float32"),
        (lambda: combine_tokens(Y[None], ORDER, WEIGHTS), ValueError, r"y is of shape \(1, 24, 5\); needs \[n, d\]"),
        (lambda: combine_tokens(Y, ORDER, top_k=5), ValueError, "top_k is 5; needs a divisor"),
        (lambda: combine_tokens(Y, ORDER, top_k=0), ValueError, "top_k is 0"),
        (lambda: group_weights(WEIGHTS, ORDER[1:]), ValueError, r"group_weights: weights is of shape \(12, 2\)"),
        (lambda: group_weights(WEIGHTS, ORDER[None]), ValueError, r"order is of shape \(1, 24\)"),
    ],
)
def test_errors(call, error, says):
    with pytest.raises(error, match=says) as caught:
        call()
    assert "; needs " in str(caught.value) and " because " in str(caught.value) and " Try " in str(caught.value)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_bias_brings_no_excluded_expert_back(score):
    logits, bias = jnp.array([[1.0, 2.0, -jnp.inf, 0.0]]), jnp.array([0.0, 0.0, 1.5, 0.0])
    assert 2 not in np.asarray(route(logits, 2, score=score, bias=bias).experts)
