"""dense: the three products of each mode, what is kept for them, and that transformations change nothing."""

import dataclasses
import itertools
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4

MODES = ("default", "unquant", "dequant")
KEY = jax.random.key(7)
M, K, N = 48, 64, 32


def recipe(mode="default", **settings):
    return fp4.NVFP4BlockScaling(mode, **settings)


def operands(m=M, k=K, n=N, dtype=jnp.bfloat16, kernel_dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    x, w = jax.random.normal(keys[0], (m, k), dtype), jax.random.normal(keys[1], (k, n), kernel_dtype)
    return x, w, jax.random.normal(keys[2], (n,), kernel_dtype), jax.random.normal(keys[3], (m, n), dtype)


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def close(a, b, tolerance):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def quantize_calls(fn, *args) -> int:
    """Custom calls that quantize, in the compiled program."""
    return jax.jit(fn).lower(*args).compile().as_text().count('custom_call_target="jax_fp4_quantize')


def gradients(x, w, b, dy, mode, key=KEY, **settings):
    y, vjp = jax.vjp(lambda x, w, b: fp4.dense(x, w, b, recipe=recipe(mode, **settings), key=key), x, w, b)
    return y, *vjp(dy)


@pytest.mark.core
@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_each_product_takes_the_operands_of_its_mode(mode, tiles):
    """D1: against products written out by hand."""
    x, w, b, dy = operands()
    settings = dict(two_dimensional_weights=tiles)
    block = (16, 16) if tiles else (1, 16)
    qx, qx_t = fp4.quantize_transpose(x, hadamard=True)
    qw_n, qw_k = fp4.quantize_transpose(w, block=block, dtype=x.dtype)
    y, dx, dw, db = gradients(x, w, b, dy, mode, **settings)
    expected_y = fp4.matmul(qx, qw_k, preferred_element_type=jnp.float32) + b
    close(y, expected_y.astype(x.dtype), 1e-3)
    wide = partial(jnp.matmul, preferred_element_type=jnp.float32)
    match mode:
        case "default":
            qdy, qdy_t = fp4.quantize_transpose(dy, hadamard=True, key=KEY)
            expected = fp4.matmul(qdy, qw_n.mT), fp4.matmul(qx_t.mT, qdy_t, preferred_element_type=jnp.float32)
        case "unquant":
            expected = wide(dy, w.astype(x.dtype).T), wide(x.T, dy)
        case "dequant":
            expected = wide(dy, fp4.dequantize(qw_k).T), wide(fp4.dequantize(qx).T, dy)
    close(dx, expected[0].astype(x.dtype), 4e-3)
    close(dw, expected[1], 1e-6)
    same(db, jnp.sum(dy, 0, dtype=jnp.float32))
    assert (y.dtype, dx.dtype, dw.dtype, db.dtype) == (x.dtype, x.dtype, w.dtype, b.dtype)


@pytest.mark.parametrize("mode", ["unquant", "dequant"])
def test_mode_is_the_gradient_of_the_function_it_names(mode):
    """D1: float32, coarse inputs; autodiff of the unquantized or of the dequantized (straight-through) forward."""
    x, w, b, dy = operands(dtype=jnp.float32)
    if mode == "unquant":
        u, v = x, w
    else:
        u = fp4.dequantize(fp4.quantize(x))
        v = fp4.dequantize(fp4.quantize(w, axis=0, block=(16, 16)))
    _, vjp = jax.vjp(lambda u, v, b: jnp.matmul(u, v, preferred_element_type=jnp.float32) + b, u, v, b)
    for got, want in zip(gradients(x, w, b, dy, mode)[1:], vjp(dy), strict=True):
        close(got, want, 1e-6)


def test_modes_differ_on_coarse_inputs():
    x, w, b, dy = operands(dtype=jnp.float32)
    results = {mode: gradients(x, w, b, dy, mode) for mode in MODES}
    for one, other in itertools.combinations(MODES, 2):
        same(results[one][0], results[other][0])  # one forward
        for i in (1, 2):
            a, b_ = np.asarray(results[one][i]), np.asarray(results[other][i])
            assert np.linalg.norm(a - b_) > 0.02 * np.linalg.norm(b_)


# --- residuals (D8) ---


def residual_leaves(fn, *args):
    return [leaf for leaf in jax.tree.leaves(jax.vjp(fn, *args)[1]) if hasattr(leaf, "nbytes")]


@pytest.mark.parametrize("mode", MODES)
def test_residual_bytes(mode):
    m, k, n = 512, 256, 128
    x, w, _, _ = operands(m, k, n)
    f = lambda x, w: fp4.dense(x, w, recipe=recipe(mode), key=KEY)  # noqa: E731
    packed = lambda count: count // 2 + count // 16  # noqa: E731
    small = 64  # amaxes, key
    for_dw = residual_leaves(lambda w: f(x, w), w)
    for_dx = residual_leaves(lambda x: f(x, w), x)
    both = residual_leaves(f, x, w)
    if mode == "unquant":
        expected_dw, expected_dx = 2 * x.size, 4 * w.size
    else:
        expected_dw, expected_dx = packed(x.size), packed(w.size)
        assert expected_dw <= 0.60 * x.size
    for leaves, expected in ((for_dw, expected_dw), (for_dx, expected_dx), (both, expected_dw + expected_dx)):
        total = sum(leaf.nbytes for leaf in leaves)
        assert expected <= total <= expected + small, [(leaf.shape, leaf.dtype) for leaf in leaves]


@pytest.mark.core
@pytest.mark.parametrize(
    ("mode", "counts"),
    # (one direction, both directions in one pass) for x alone, w alone, both, neither differentiated
    [
        ("default", [(2, 1), (2, 1), (0, 3), (2, 0)]),
        ("unquant", [(2, 0)] * 4),
        ("dequant", [(2, 0)] * 4),
    ],
)
def test_nothing_is_quantized_for_an_operand_nobody_differentiates(mode, counts):
    x, w, b, dy = operands()
    f = lambda x, w, b: fp4.dense(x, w, b, recipe=recipe(mode), key=KEY)  # noqa: E731
    x_only = lambda x, w, b, dy: jax.vjp(lambda x: f(x, w, b), x)[1](dy)  # noqa: E731
    w_only = lambda x, w, b, dy: jax.vjp(lambda w: f(x, w, b), w)[1](dy)  # noqa: E731
    both = lambda x, w, b, dy: jax.vjp(lambda x, w: f(x, w, b), x, w)[1](dy)  # noqa: E731
    forward = lambda x, w, b, dy: f(x, w, b)  # noqa: E731
    traced = [str(jax.make_jaxpr(step)(x, w, b, dy)) for step in (x_only, w_only, both, forward)]
    count = lambda text, op: len(re.findall(rf"target_name=jax_fp4_{op}\b", text))  # noqa: E731
    assert [(count(text, "quantize"), count(text, "quantize_transpose")) for text in traced] == counts
    kept = lambda g, *a: {leaf.shape for leaf in residual_leaves(g, *a)}  # noqa: E731
    plane_of_x, planes_of_w = (K, M // 2), {(N, K // 2), (K, N // 2)}
    assert plane_of_x not in kept(lambda x: f(x, w, b), x)
    assert not planes_of_w & kept(lambda w: f(x, w, b), w)


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_residual_tree_is_the_same_whatever_is_differentiated(mode):
    """One jitted function: vjp in w, vjp in x, then the first backward. A varying tree gave zeros without a word."""
    x, w, b, dy = operands()
    jitted = jax.jit(lambda x, w, b: fp4.dense(x, w, b, recipe=recipe(mode), key=KEY))
    _, vjp_w = jax.vjp(lambda w: jitted(x, w, b), w)
    _, vjp_x = jax.vjp(lambda x: jitted(x, w, b), x)
    _, vjp_b = jax.vjp(lambda b: jitted(x, w, b), b)
    _, dx, dw, db = gradients(x, w, b, dy, mode)
    close(vjp_w(dy)[0], dw, 1e-6)
    close(vjp_x(dy)[0], dx, 4e-3)
    close(vjp_b(dy)[0], db, 1e-6)


# --- transformations ---


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_jit_remat_and_scan_change_nothing(mode):
    x, w, b, dy = operands(n=K)
    f = lambda x, w, b: fp4.dense(x, w, b, recipe=recipe(mode), key=KEY)  # noqa: E731
    loss = lambda f: lambda *args: jnp.sum((f(*args) * dy[:, :1]).astype(jnp.float32))  # noqa: E731
    want = jax.grad(loss(f), (0, 1, 2))(x, w, b)
    for got in (jax.jit(jax.grad(loss(f), (0, 1, 2)))(x, w, b), jax.grad(loss(jax.checkpoint(f)), (0, 1, 2))(x, w, b)):
        for a, c in zip(got, want, strict=True):
            close(a, c, 1e-6)
    stack = lambda x, ws: jax.lax.scan(lambda x, w: (f(x, w, b), None), x, ws)[0]  # noqa: E731
    unrolled = lambda x, ws: f(f(x, ws[0], b), ws[1], b)  # noqa: E731
    ws = jnp.stack([w, w * 0.5]) / 8
    for a, c in zip(jax.grad(loss(stack), (0, 1))(x, ws), jax.grad(loss(unrolled), (0, 1))(x, ws), strict=True):
        close(a, c, 1e-5)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0)])
@pytest.mark.parametrize("mode", MODES)
def test_vmap_is_a_loop(mode, in_axes):
    """E4: the values of a loop, each entry with its own amax; one custom call a quantization, no loop."""
    x, w, _, _ = operands(dtype=jnp.float32)
    scale = jnp.array([1.0, 3.0, 0.1])[:, None, None]
    xs, ws = (x * scale if in_axes[0] == 0 else x), (w * scale if in_axes[1] == 0 else w)
    step = jax.value_and_grad(lambda x, w: jnp.sum(fp4.dense(x, w, recipe=recipe(mode), key=KEY) ** 2), (0, 1))
    batched = jax.vmap(step, in_axes)
    value, (dx, dw) = batched(xs, ws)
    for i in range(3):
        v, (a, c) = step(xs[i] if in_axes[0] == 0 else x, ws[i] if in_axes[1] == 0 else w)
        for got, want in ((value[i], v), (dx[i], a), (dw[i], c)):
            close(got, want, 1e-6)
    assert quantize_calls(batched, xs, ws) == quantize_calls(step, x, w)
    assert "while(" not in jax.jit(batched).lower(xs, ws).compile().as_text()


def test_nested_vmap_and_jacrev():
    x, w, _, _ = operands(16, 16, 16, dtype=jnp.float32)
    f = lambda x, w: fp4.dense(x, w, recipe=recipe("dequant"))  # noqa: E731
    xs, ws = jnp.stack([x, 2 * x]), jnp.stack([w, 3 * w, -w])
    nested = jax.vmap(jax.vmap(f, (None, 0)), (0, None))(xs, ws)
    for i, j in itertools.product(range(2), range(3)):
        same(nested[i, j], f(xs[i], ws[j]))
    jacobian = jax.jacrev(f)(x, w)
    want = jnp.einsum("ab,jc->ajbc", jnp.eye(16), fp4.dequantize(fp4.quantize(w, axis=0, block=(16, 16))).T)
    close(jacobian, want, 1e-6)


def test_donated_buffers():
    x, w, b, _ = operands(n=K)
    f = lambda x, w, b: fp4.dense(x, w, b, recipe=recipe(), key=KEY)  # noqa: E731
    want, donated = f(x, w, b), jnp.array(x)
    same(jax.jit(f, donate_argnums=(0,))(donated, w, b), want)
    assert donated.is_deleted()


@pytest.mark.core
def test_one_jitted_function_under_contexts_a_b_none_a():
    x, w, b, _ = operands(dtype=jnp.float32)
    jitted = jax.jit(lambda x, w, b: fp4.dense(x, w, b))
    a, c = recipe("unquant"), recipe("unquant", two_dimensional_weights=False)
    want_a, want_c = fp4.dense(x, w, b, recipe=a), fp4.dense(x, w, b, recipe=c)
    assert not np.array_equal(want_a, want_c)
    with fp4.autocast(a):
        same(jitted(x, w, b), want_a)
        same(fp4.dense(x, w, b, recipe=fp4.HIGH_PRECISION), jnp.matmul(x, w) + b)
    with fp4.autocast(c):
        same(jitted(x, w, b), want_c)
    same(jitted(x, w, b), jnp.matmul(x, w) + b)
    with fp4.autocast(a):
        same(jitted(x, w, b), want_a)
        with fp4.autocast(None):
            same(jitted(x, w, b), jnp.matmul(x, w) + b)


def test_the_forward_captures_the_recipe():
    x, w, b, dy = operands()
    f = lambda x, w, b: fp4.dense(x, w, b, key=KEY)  # noqa: E731
    with fp4.autocast(recipe("dequant")):
        _, vjp = jax.vjp(f, x, w, b)
    with fp4.autocast(recipe("unquant")):
        f(x, w, b)
        got = vjp(dy)
    for a, c in zip(got, gradients(x, w, b, dy, "dequant")[1:], strict=True):
        same(a, c)


# --- shapes and values ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(2, 3, 64), (1, 1, 16), (64,), (0, 64), (5, 0)])
def test_rank_is_that_of_the_two_dimensional_reshape(mode, shape):
    """A23, and m = 0, k = 0."""
    k = shape[-1]
    x = jax.random.normal(KEY, shape, jnp.bfloat16)
    w, b = jax.random.normal(KEY, (k, 24)), jnp.ones(24)
    f = lambda x, w, b: fp4.dense(x, w, b, recipe=recipe(mode), key=KEY)  # noqa: E731
    y, vjp = jax.vjp(f, x, w, b)
    rows, flat_vjp = jax.vjp(f, x.reshape(-1, k) if x.size else x, w, b)
    assert y.shape == (*shape[:-1], 24)
    same(y.reshape(rows.shape), rows)
    for a, c in zip(vjp(y), flat_vjp(rows), strict=True):
        same(a.reshape(c.shape), c)
    if k == 0:
        same(y, jnp.broadcast_to(b, y.shape).astype(y.dtype))


FLAGS = [
    {},
    dict(row_scaled_activation=True),
    dict(random_hadamard_transform=False),
    dict(stochastic_rounding=False),
    dict(two_dimensional_weights=False),
    dict(four_over_six="weights"),
    dict(four_over_six="activations", four_over_six_error="MSE"),
    dict(four_over_six="all", four_over_six_bound=448),
    dict(row_scaled_activation=True, four_over_six="all"),
]


@pytest.mark.parametrize("settings", FLAGS, ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) or "plain")
def test_every_flag(settings):
    """B6, C9 (n = 10): forward and backward work and stay near the plain product. Every flag in every mode and extent,
    every mode in every extent."""

    def step(recipe, x, w, dy):
        y, vjp = jax.vjp(lambda *args: fp4.dense(*args, recipe=recipe, key=KEY), x, w)
        return y, *vjp(dy)

    for i, mode in enumerate(MODES):
        k, n = ((16, 16), (48, 10), (112, 32))[(i + FLAGS.index(settings)) % 3]
        x, w, _, dy = operands(40, k, n, dtype=jnp.float32)
        y, dx, dw = jax.jit(partial(step, recipe(mode, **settings)))(x, w, dy)
        for got, want in ((y, x @ w), (dx, dy @ w.T), (dw, x.T @ dy)):
            close(got, want, 0.35)


@pytest.mark.parametrize("k", [32, 48, 96, 112, 192, 256, 448, 512])
def test_contraction_lengths(k):
    """B6; 16, 64, 128 and 384 are in test_every_recipe.py."""
    x, w, b, dy = operands(32, k, 32)
    y, dx, dw, _ = jax.jit(partial(gradients, mode="default"))(x, w, b, dy)
    close(y, x.astype(jnp.float32) @ w + b, 0.2)
    close(dw, x.astype(jnp.float32).T @ dy.astype(jnp.float32), 0.3)
    close(dx, dy.astype(jnp.float32) @ w.T, 0.3)


@pytest.mark.parametrize("n", [10, 16])
@pytest.mark.parametrize("mode", MODES)
def test_illegal_only_in_the_backward(mode, n):
    """C9."""
    x, w, b, dy = operands(7, 64, n)
    for value in gradients(x, w, b, dy, mode):
        assert np.isfinite(np.asarray(value, np.float32)).all()


@pytest.mark.parametrize("settings", FLAGS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_zeros_give_zeros(mode, settings):
    """A2."""
    x, w = jnp.zeros((32, 64)), jnp.zeros((64, 16))
    y, dx, dw, db = gradients(x, w, jnp.zeros(16), jnp.ones((32, 16)), mode, **settings)
    for value in (y, dx, dw):
        assert not np.asarray(value).any()
    assert (np.asarray(db) == 32).all()
    for value in gradients(x, w, jnp.zeros(16), jnp.zeros((32, 16)), mode, **settings):
        assert not np.asarray(value).any()


def test_master_weights_are_rounded_to_the_compute_dtype_first():
    x, w, _, _ = operands()
    for mode in MODES:
        f = partial(fp4.dense, recipe=recipe(mode), key=KEY)
        same(f(x, w), f(x, w.astype(jnp.bfloat16)))


def test_dy_is_rounded_to_the_compute_dtype_first():
    """y may be asked for in float32: its cotangent is float32 too."""
    x, w, _, dy = operands()
    wide = dy.astype(jnp.float32) * 1.001
    for mode in MODES:
        f = partial(fp4.dense, recipe=recipe(mode), key=KEY, preferred_element_type=jnp.float32)
        vjp = jax.vjp(f, x, w)[1]
        for a, c in zip(vjp(wide), vjp(wide.astype(x.dtype).astype(jnp.float32)), strict=True):
            same(a, c)


def test_same_key_same_bits_other_key_other_bits():
    """B2."""
    x, w, b, dy = operands()
    first, again = gradients(x, w, b, dy, "default"), gradients(x, w, b, dy, "default")
    for a, c in zip(first, again, strict=True):
        same(a, c)
    other = gradients(x, w, b, dy, "default", key=jax.random.fold_in(KEY, 1))
    same(first[0], other[0])
    assert np.mean(np.asarray(first[2]) != np.asarray(other[2])) > 0.1


# --- frozen kernels ---


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("form", ["tiles", "pair"])
@pytest.mark.parametrize("k", [64, 40])
def test_frozen_kernel_gives_the_bits_of_its_high_precision_original(mode, form, k):
    x, w, b, dy = operands(k=k)
    tiles = form == "tiles"
    block = (16, 16) if tiles else (1, 16)
    kernel = fp4.quantize(w, axis=0, block=block, dtype=x.dtype)
    if form == "pair":
        kernel = fp4.quantize_transpose(w, block=block, dtype=x.dtype)
    f = lambda kernel: jax.vjp(  # noqa: E731
        lambda x, b: fp4.dense(x, kernel, b, recipe=recipe(mode, two_dimensional_weights=tiles), key=KEY), x, b
    )
    (y, vjp), (want_y, want_vjp) = f(kernel), f(w)
    same(y, want_y)
    dx, db = vjp(dy)
    same(db, want_vjp(dy)[1])
    if mode == "unquant":  # the high-precision original is gone: dequantized values
        qw = kernel[1] if form == "pair" else kernel
        close(dx, jnp.matmul(dy, fp4.dequantize(qw).T, preferred_element_type=jnp.float32), 4e-3)
    else:
        same(dx, want_vjp(dy)[0])


def test_users_debugging_flags():
    """A finite step under jax_debug_nans, and with rank promotion forbidden, eagerly: no false alarm, no error."""
    x, w, b, dy = operands()
    with jax.debug_nans(True), jax.numpy_rank_promotion("raise"):
        for mode in MODES:
            gradients(x, w, b, dy, mode)
            for made in (fp4.MXFP8BlockScaling, fp4.Float8BlockScaling, fp4.Float8CurrentScaling):
                of_one_operand = partial(fp4.dense, x, bias=b, recipe=made(mode))
                jax.grad(lambda w, f=of_one_operand: f(kernel=w).sum())(w)
        delayed = fp4.DelayedScaling("default")
        state = fp4.delayed.init(delayed)
        new = jax.grad(lambda s: fp4.dense(x, w, b, recipe=delayed, state=s).sum())(state)
        fp4.delayed.update(state, fp4.delayed.merge(jax.device_get(new), new))
        fp4.dense(x[None], fp4.quantize(w, axis=0), b)
        for flags in (dict(row_scaled=True), dict(four_over_six=fp4.FourOverSix(), block=(16, 16)), dict(key=KEY)):
            fp4.quantize_transpose(x, **flags, implementation="reference")


def test_frozen_kernel_errors():
    x, w, _, _ = operands()
    q = fp4.quantize(w, axis=0)
    with pytest.raises(ValueError, match=r"dense: kernel is .*quantize_transpose"):
        jax.grad(lambda x: fp4.dense(x, q, recipe=recipe(), key=KEY).sum())(x)
    with pytest.raises(ValueError, match=r"axis=-1.*needs axis=0"):
        fp4.dense(x, fp4.quantize(w), recipe=recipe())
    with pytest.raises(fp4.UnsupportedError, match="frozen"):
        jax.grad(lambda q: fp4.dense(x, q, recipe=recipe("unquant")).sum(), allow_int=True)(q)
    for pair in ((None, q), (q, None), (q,), (w, q)):
        with pytest.raises(TypeError, match=r"dense: kernel is a tuple; needs the pair"):
            fp4.dense(x, pair, recipe=recipe())
    assert fp4.dense(x, q, recipe=recipe()).shape == (M, N)  # evaluation needs neither plane nor key
    assert fp4.dense(x, q).dtype == x.dtype


# --- bad input ---

FOREIGN = dataclasses.replace(fp4.quantize(jnp.ones((32, 8)), axis=0), format="nf4")


def test_missing_key_is_an_error_only_when_differentiated():
    """B7."""
    x, w, b, dy = operands()
    f = lambda x, w, b: fp4.dense(x, w, b, recipe=recipe()).astype(jnp.float32).sum()  # noqa: E731
    f(x, w, b)
    for wanted in (0, 1, (0, 1, 2)):
        with pytest.raises(ValueError, match=r"dense: key is None; needs a JAX key .* Try key=key"):
            jax.grad(f, wanted)(x, w, b)
    for free in (recipe("unquant"), recipe("dequant"), recipe(stochastic_rounding=False)):
        jax.vjp(lambda *a, free=free: fp4.dense(*a, recipe=free), x, w, b)[1](dy)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "says"),
    [
        ((jnp.ones((4, 32)), jnp.ones((16, 8))), {}, ValueError, r"kernel is of shape \(16, 8\); needs 32 rows"),
        ((jnp.ones((4, 32)), jnp.ones((2, 32, 8))), {}, ValueError, r"kernel is of shape \(2, 32, 8\); needs \[k, n\]"),
        ((jnp.ones((4, 32)), jnp.ones(32)), {}, ValueError, r"kernel is of shape \(32,\)"),
        ((jnp.ones(()), jnp.ones((1, 8))), {}, ValueError, "x is a scalar"),
        ((jnp.ones((4, 32), jnp.int32), jnp.ones((32, 8))), {}, TypeError, "x is an array of int32"),
        ((np.ones((4, 32)), jnp.ones((32, 8))), {}, TypeError, "x is an array of float64"),
        ((jnp.ones((4, 32), jnp.complex64), jnp.ones((32, 8))), {}, TypeError, "x is an array of complex64"),
        ((jnp.ones((4, 32)), jnp.ones((32, 8), jnp.int8)), {}, TypeError, "kernel is an array of int8"),
        (([[1.0]], jnp.ones((1, 8))), {}, TypeError, "x is a list"),
        ((jnp.ones((4, 32)), FOREIGN), {}, ValueError, "kernel.format is 'nf4'"),
        ((jnp.ones((4, 32)), jnp.ones((32, 8)), jnp.ones(4)), {}, ValueError, r"bias is of shape \(4,\); needs \(8,\)"),
        ((jnp.ones((4, 32)), jnp.ones((32, 8))), dict(recipe="nvfp4"), TypeError, "recipe is 'nvfp4'"),
        ((jnp.ones((4, 32)), jnp.ones((32, 8))), dict(recipe=fp4.NVFP4BlockScaling), TypeError, "recipe is the class"),
        ((jnp.ones((4, 32)), jnp.ones((32, 8))), dict(key=3), TypeError, "key is a int"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_bad_input(args, kwargs, error, says):
    """E12: names argument, value, need and fix, at trace time."""
    kwargs = dict(recipe=recipe()) | kwargs
    with pytest.raises(error, match=says) as caught:
        fp4.dense(*args, **kwargs)
    assert str(caught.value).startswith("dense: ") and "; needs " in str(caught.value) and " Try " in str(caught.value)


def test_strict_refuses_padding_at_the_forward():
    x, w, _, _ = operands(m=24)
    with fp4.strict():
        with pytest.raises(fp4.UnsupportedError, match=r"dense: x \(rows\) is of extent 24; needs a multiple of 16"):
            fp4.dense(x, w, recipe=recipe())
        assert fp4.dense(x, w, recipe=recipe("dequant")).shape == (24, N)


@pytest.mark.core
@pytest.mark.parametrize("mode", ["default", "unquant", "dequant"])
def test_saving_checkpoint_policies_keep_the_scales(mode):
    """JAX rounds saved float residuals "to their own precision", for float8_e4m3fn one that ends at 240."""
    recipe = fp4.NVFP4BlockScaling(backward_mode=mode, stochastic_rounding=False)
    x, w = jax.random.normal(jax.random.key(1), (16, 16)), jax.random.normal(jax.random.key(2), (16, 16))

    def loss(x, w):
        return jnp.sum(jnp.sin(fp4.dense(x, w, recipe=recipe)))

    want = jax.grad(loss, (0, 1))(x, w)
    for policy in (jax.checkpoint_policies.everything_saveable, jax.checkpoint_policies.nothing_saveable):
        for a, b in zip(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1))(x, w), want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_mesh_of_one_device():
    """Where types name axes, of size 1 too, each device works on its part as arrays without any."""
    x, w, _, _ = operands()

    def loss(x, w):
        return jnp.sum(fp4.dense(x, w, recipe=recipe(), key=KEY).astype(jnp.float32) ** 2)

    want = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    mesh = jax.make_mesh((1, 1), ("data", "fsdp"), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        parts = jax.device_put(x, jax.P(("data", "fsdp"))), jax.device_put(w, jax.P("fsdp"))
        got = jax.jit(jax.grad(loss, (0, 1)))(*parts)
        y = fp4.dense(*parts, recipe=recipe())
    same(y, fp4.dense(x, w, recipe=recipe()))
    for a, b in zip(got, want, strict=True):
        same(a, b)
