"""grouped_dense: each expert as if alone, what is kept, that contexts and transformations change nothing."""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_layers import (
    KEY,
    MODES,
    NONE,
    close,
    gradients,
    in_numpy,
    kept,
    nbytes,
    normal,
    packed,
    poisoned,
    quantizations,
    recipe,
)
from grouping import group_sizes, slices, total
from hypothesis import example, given
from hypothesis import strategies as st
from products import refused
from trees import same_tree

import jax_fp4 as fp4

M, K, N, G = 70, 40, 10, 4  # no extent is a multiple of 16
X, DY, W, B = normal(1, M, K), normal(2, M, N), normal(3, G, K, N), normal(4, G, N)
SIZES = jnp.int32([17, 0, 30, 11])  # and a tail of 12

FROZEN = {
    "array": lambda w: w,
    "tiles": partial(fp4.quantize, axis=0, block=(16, 16), batch_dims=1),
    "pair": partial(fp4.quantize_transpose, batch_dims=1),
}
SETTINGS = {  # mode, settings of the recipe, form of the kernel, whether there is a bias
    "default": ("default", {}, "array", True),
    "default, no Hadamard": ("default", dict(random_hadamard_transform=False), "array", False),
    "default, row-scaled": ("default", dict(row_scaled_activation=True), "array", True),
    "default, four-over-six": ("default", dict(four_over_six="all", two_dimensional_weights=False), "array", False),
    "default, tiles": ("default", {}, "tiles", True),
    "default, pair": ("default", dict(row_scaled_activation=True, four_over_six="all"), "pair", False),
    "unquant": ("unquant", {}, "array", True),
    "unquant, flags": ("unquant", dict(row_scaled_activation=True, four_over_six="all"), "array", False),
    "unquant, tiles": ("unquant", {}, "tiles", True),
    "dequant": ("dequant", {}, "array", True),
    "dequant, flags": ("dequant", dict(row_scaled_activation=True, two_dimensional_weights=False), "array", False),
    "dequant, pair": ("dequant", dict(four_over_six="activations"), "pair", True),
    NONE: (NONE, {}, "array", True),
    "high precision, tiles": (NONE, {}, "tiles", False),
}


def setting(name):
    """The recipe, without stochastic rounding, the kernel and the bias."""
    mode, settings, form, has_bias = SETTINGS[name]
    rounding = {} if mode == NONE else dict(stochastic_rounding=False)
    return recipe(mode, **settings, **rounding), FROZEN[form](W), B if has_bias else None


@cache
def grouped(chosen):
    """x, kernel, bias, dy, sizes -> y and gradients, in NumPy: one program for all sizes."""

    def step(x, kernel, bias, dy, sizes, key=None):
        layer = partial(fp4.grouped_dense, group_sizes=sizes, recipe=chosen, key=key)
        return gradients(layer, dy, x=x, kernel=kernel, bias=bias)

    return in_numpy(jax.jit(step))


@cache
def alone(chosen):
    def step(x, kernel, bias, dy):
        return gradients(partial(fp4.dense, recipe=chosen), dy, x=x, kernel=kernel, bias=bias)

    return in_numpy(jax.jit(step))


def check_experts(got, want_of, sizes):
    """got, of all experts, against want_of(e, rows) of each that has rows; the rest exactly zero."""
    end = total(sizes, M)
    for name in ("y", "x"):
        np.testing.assert_array_equal(got[name][end:], 0)
    for e, rows in enumerate(slices(sizes, M)):
        own = {name: a[rows] if name in ("y", "x") else a[e] for name, a in got.items()}
        if rows.start < rows.stop:
            close(own, want_of(e, rows))
        else:
            assert not any(a.any() for a in own.values())


def expert(tree, e):
    return jax.tree.map(lambda a: np.asarray(a)[e], tree)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.core if name in (*MODES, NONE) else ()) for name in SETTINGS]
)
@given(sizes=group_sizes(G, M), followed=st.just(True))
@example(sizes=np.int32([0, 0, 0, 0]), followed=True)
@example(sizes=np.int32([1, 15, 16, 17]), followed=True)
@example(sizes=np.int32([17, 0, 17, 17]), followed=False)
def test_every_expert_is_as_if_alone(name, sizes, followed):
    """C1-C8, C14, A7: against `dense` of its rows and nothing else, or of its rows followed by zero rows, so that all
    sizes share a program: zero rows change no amax, and no block of others."""
    chosen, kernel, bias = setting(name)
    got = grouped(chosen)(poisoned(X, sizes), kernel, bias, poisoned(DY, sizes, np.inf), sizes)

    def want(e, rows):
        count = rows.stop - rows.start
        x, dy = (np.pad(np.asarray(a)[rows], ((0, M - count if followed else 0), (0, 0))) for a in (X, DY))
        found = alone(chosen)(x, expert(kernel, e), expert(bias, e), dy)
        return {n: a[:count] if n in ("y", "x") else a for n, a in found.items()}

    check_experts(got, want, sizes)


@pytest.mark.parametrize("name", ["default", NONE])
def test_a_group_does_not_see_the_others(name):
    """NaN in the first one's row, kernel and bias, Inf in its dy: the others keep their bits."""
    chosen, *_ = setting(name)
    x, kernel, bias = (np.array(a) for a in (X, W, B))
    want = grouped(chosen)(x, kernel, bias, DY, SIZES)
    x[0] = kernel[0] = bias[0] = np.nan
    got = grouped(chosen)(x, kernel, bias, DY, SIZES)
    for n, first in (("y", 17), ("x", 17), ("kernel", 1)):
        same_tree(got[n][first:], want[n][first:])
        assert np.isnan(got[n][0]).any()
    dy = np.array(DY)
    dy[0, 0] = np.inf
    got = grouped(chosen)(X, W, B, dy, SIZES)
    for n, first in (("y", 0), ("x", 17), ("kernel", 1), ("bias", 1)):
        same_tree(got[n][first:], grouped(chosen)(X, W, B, DY, SIZES)[n][first:])
    assert not np.isfinite(got["bias"][0]).all()


def quantized_composition(x, kernel, bias, dy, sizes, key):
    """default mode, of public functions."""
    qx, qx_t = fp4.quantize_transpose(x, hadamard=True, group_sizes=sizes)
    qw, qw_t = fp4.quantize_transpose(kernel, block=(16, 16), batch_dims=1)
    qdy, qdy_t = fp4.quantize_transpose(dy, hadamard=True, group_sizes=sizes, key=key)
    member = jnp.stack([jnp.zeros(M).at[r].set(1) for r in slices(SIZES, M)], -1)
    return {
        "y": fp4.grouped_matmul(qx, qw_t, sizes) + member @ bias,
        "x": fp4.grouped_matmul(qdy, qw.mT, sizes),
        "kernel": fp4.grouped_matmul(qx_t.mT, qdy_t, sizes),
        "bias": member.T @ jnp.where(member.any(-1, keepdims=True), dy, 0),
    }


@pytest.mark.core
def test_stochastic_rounding_draws_by_the_key():
    """B2: dy alone is rounded stochastically, with this key; another key gives other gradients and the same y."""
    step = grouped(recipe("default"))
    arguments = poisoned(X, SIZES), W, B, poisoned(DY, SIZES), SIZES
    got = step(*arguments, KEY)
    close(got, in_numpy(jax.jit(quantized_composition))(*arguments, KEY))
    same_tree(got, step(*arguments, KEY))
    other = step(*arguments, jax.random.key(8))
    same_tree({n: got[n] for n in ("y", "bias")}, {n: other[n] for n in ("y", "bias")})
    assert all(np.mean(got[n] != other[n]) > 0.1 for n in ("x", "kernel"))


# --- the recipe is the forward's ---


JITTED = jax.jit(partial(fp4.grouped_dense, group_sizes=SIZES, key=KEY))  # its recipe is autocast's


@pytest.mark.core
@pytest.mark.parametrize(("mode", "jit"), [("default", False), *((mode, True) for mode in (*MODES, NONE))])
def test_a_later_forward_changes_nothing(mode, jit):
    """Other forwards, with another recipe and with none, come between a forward and its backward. One jitted function:
    vjp in the kernel, vjp in x, then the first backward (a residual tree that varied gave zeros without a word)."""
    layer = JITTED if jit else partial(fp4.grouped_dense, group_sizes=SIZES, key=KEY)
    in_kernel, in_x = (lambda w: layer(X, w, bias=B)), (lambda x: layer(x, W, bias=B))
    with fp4.autocast(recipe(mode)):
        y, pull_kernel = jax.vjp(in_kernel, W)
        pull_x = jax.vjp(in_x, X)[1] if jit else None
    for context in (recipe("dequant" if mode == "unquant" else "unquant"), None) if jit else (None,):
        with fp4.autocast(context):
            layer(X, W, bias=B)
            got = pull_kernel(DY)[0]
    want = grouped(recipe(mode))(X, W, B, DY, SIZES, KEY)
    close({"y": y, "kernel": got}, {n: want[n] for n in ("y", "kernel")})
    if pull_x is not None:
        close(pull_x(DY)[0], want["x"])
        with fp4.autocast(recipe(mode)):
            same_tree(got, jax.vjp(in_kernel, W)[1](DY)[0])


@pytest.mark.core
def test_one_jitted_function_under_contexts_a_b_none_a():
    a, b = recipe("unquant"), recipe("unquant", two_dimensional_weights=False)
    explicit = jax.jit(partial(fp4.grouped_dense, group_sizes=SIZES), static_argnames="recipe")
    want = {chosen: explicit(X, W, bias=B, recipe=chosen) for chosen in (a, b, fp4.HIGH_PRECISION)}
    assert not np.array_equal(want[a], want[b])
    for context in (a, b, None, a):
        with fp4.autocast(context):
            close(JITTED(X, W, bias=B), want[context or fp4.HIGH_PRECISION])


@pytest.mark.parametrize("mode", [*MODES, NONE])
def test_a_second_eager_call_compiles_nothing(mode, caplog):
    """The loops over the groups are found again, forward and backward."""

    def step(x):
        layer = partial(fp4.grouped_dense, group_sizes=SIZES, recipe=recipe(mode), key=KEY)
        return gradients(layer, DY, x=x, kernel=W, bias=B)

    step(X)
    with jax.log_compiles():
        step(X)
    assert "ompil" not in caplog.text


# --- what is kept, and what is computed (D8) ---


@pytest.mark.core
@pytest.mark.parametrize("g", [1, 4])
@pytest.mark.parametrize("mode", [*MODES, NONE])
def test_what_is_kept(mode, g):
    """Exactly the arrays of the mode, by shape and dtype, for dw, dx, both and db."""
    m, k, n = 512, 256, 128
    x, w, b = normal(1, m, k, dtype=jnp.bfloat16), normal(2, g, k, n), normal(3, g, n)
    sizes = jnp.zeros(g, jnp.int32)
    layer = partial(fp4.grouped_dense, group_sizes=sizes, recipe=recipe(mode), key=KEY)
    for_dw, for_dx = {
        "default": (packed((k,), 16 * ((m + 15 * g) // 16)), packed((g, k), n)),
        "unquant": ({((m, k), "bfloat16"): 1}, {((g, k, n), "float32"): 1}),
        "dequant": (packed((m,), k), packed((g, n), k)),
        NONE: ({((m, k), "bfloat16"): 1}, {((g, k, n), "float32"): 1}),
    }[mode]
    assert kept(lambda kernel: layer(x, kernel, bias=b), kernel=w) == for_dw
    assert kept(lambda x: layer(x, w, bias=b), x=x) == for_dx
    assert kept(layer, x=x, kernel=w, bias=b) == for_dw | for_dx
    assert kept(lambda bias: layer(x, w, bias=bias), bias=b) == {}
    if mode in ("default", "dequant"):
        assert nbytes(for_dw) <= 0.32 * x.nbytes and nbytes(for_dx) <= 0.16 * w.nbytes


@pytest.mark.core
@pytest.mark.parametrize("mode", [*MODES, NONE])
def test_nothing_is_quantized_for_what_nobody_differentiates(mode):
    """(one direction, both directions in one pass) for x, the kernel, the bias, all, and an evaluation."""
    layer = partial(fp4.grouped_dense, group_sizes=SIZES, recipe=recipe(mode), key=KEY)
    wanted = [("x",), ("kernel",), ("bias",), ("x", "kernel", "bias"), ()]
    arrays = dict(x=X, kernel=W, bias=B)
    counts = []
    for names in wanted:
        fixed = {n: a for n, a in arrays.items() if n not in names}
        step = lambda free, fixed=fixed: gradients(partial(layer, **fixed), DY, **free)  # noqa: E731
        counts.append(quantizations(step, {n: arrays[n] for n in names}))
    two = (0, 0) if mode == NONE else (2, 0)
    assert counts == ([(2, 1), (2, 1), (2, 0), (0, 3), (2, 0)] if mode == "default" else [two] * 5)


# --- dtypes, shapes and transformations ---


@pytest.mark.core
@pytest.mark.parametrize("mode", [*MODES, NONE])
def test_dtypes(mode):
    """D9: bfloat16 x, float32 masters."""
    layer = partial(fp4.grouped_dense, group_sizes=SIZES, recipe=recipe(mode), key=KEY)
    x, dy = X.astype(jnp.bfloat16), DY.astype(jnp.bfloat16)
    for y_dtype in ("bfloat16", "float32"):
        step = partial(gradients, partial(layer, preferred_element_type=y_dtype))
        found = jax.eval_shape(lambda dy, step=step, **a: step(dy, **a), dy.astype(y_dtype), x=x, kernel=W, bias=B)
        dtypes = {name: a.dtype.name for name, a in found.items()}
        assert dtypes == dict(y=y_dtype, x="bfloat16", kernel="float32", bias="float32")


@pytest.mark.parametrize("mode", ["default", NONE])
def test_what_is_rounded_to_the_compute_dtype(mode):
    """A float32 kernel under bfloat16 x, and the float32 cotangent of a y asked for in float32: for every product."""
    x, dy = X.astype(jnp.bfloat16), DY.astype(jnp.bfloat16)
    layer = partial(fp4.grouped_dense, group_sizes=SIZES, recipe=recipe(mode), key=KEY)
    narrow = partial(gradients, layer, dy, x=x, bias=B)
    wide = partial(gradients, partial(layer, preferred_element_type=jnp.float32), x=x, kernel=W, bias=B)
    want = in_numpy(jax.jit(narrow))(kernel=W.astype(jnp.bfloat16))
    got = in_numpy(jax.jit(wide))(dy.astype(np.float32) * np.float32(1 + 2**-12))
    same_tree({"y": got["y"].astype(jnp.bfloat16), "x": got["x"]}, {n: want[n] for n in ("y", "x")})
    same_tree(got["kernel"].astype(jnp.bfloat16), want["kernel"])
    close(got["bias"], want["bias"], 1e-3)


@pytest.mark.parametrize(("mode", "shape"), [
    ("default", (2, 35, K)), ("default", (K,)), ("default", (70, 0)),
    *((mode, (3, 0, K)) for mode in (*MODES, NONE)), (NONE, (70, 0)),
])  # fmt: skip
def test_leading_axes_are_rows(mode, shape):
    """C4: m = 0 and k = 0 too; one row without an axis of its own."""
    k, m = shape[-1], int(np.prod(shape[:-1], dtype=int))
    w, x, dy = W[:, :k], X.reshape(-1)[: m * k].reshape(shape), DY[:m].reshape(*shape[:-1], N)
    step = grouped(recipe(mode))
    got, flat = step(x, w, B, dy, SIZES, KEY), step(x.reshape(m, k), w, B, dy.reshape(m, N), SIZES, KEY)
    assert got["y"].shape == (*shape[:-1], N)
    same_tree({n: got[n].reshape(flat[n].shape) for n in got}, flat)
    if m == 0:
        assert not got["kernel"].any() and not got["bias"].any()
    if k == 0:
        for e, r in enumerate(slices(SIZES, m)):
            same_tree(got["y"][r], np.broadcast_to(B[e], got["y"][r].shape))


def loss(mode, **fixed):
    layer = partial(fp4.grouped_dense, recipe=recipe(mode), key=KEY, **fixed)
    return lambda x, w, sizes: jnp.sum(jnp.sin(layer(x, w, sizes)))


@pytest.mark.core
@pytest.mark.parametrize("mode", ["default", NONE])
def test_vmap_is_a_loop(mode):
    """E4: over x and the sizes."""
    x, sizes = X.reshape(2, 35, K), jnp.int32([[17, 0, 8, 3], [-1, 1, 40, 2]])
    step = jax.jit(jax.grad(loss(mode), (0, 1)))
    got = in_numpy(jax.jit(jax.vmap(jax.grad(loss(mode), (0, 1)), (0, None, 0))))(x, W, sizes)
    for i in range(2):
        for a, b in zip(got, step(x[i], W, sizes[i]), strict=True):
            close(a[i], b)


@pytest.mark.core
def test_checkpoint_and_scan():
    """Two square layers under lax.scan, each made again in the backward, against the two written out."""
    w = normal(5, 2, G, K, K) / 8
    layer = partial(fp4.grouped_dense, group_sizes=SIZES, recipe=recipe("default"), key=KEY)
    scanned = lambda x, w: jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, w)[0]  # noqa: E731
    written = lambda x, w: layer(layer(x, w[0]), w[1])  # noqa: E731
    got, want = (jax.jit(jax.grad(lambda *a, f=f: jnp.sum(f(*a) ** 2), (0, 1)))(X, w) for f in (scanned, written))
    for a, b in zip(got, want, strict=True):
        close(a, b, 1e-5)


def test_report():
    """D3."""
    (row,) = fp4.report(jax.grad(loss("dequant"), (0, 1)), X, W, SIZES).rows
    assert (row.op, row.x_shape, row.kernel_shape) == ("grouped_dense", X.shape, W.shape)
    assert (row.forward, row.dx, row.dw) == ("nvfp4 x nvfp4", "high precision x nvfp4", "nvfp4 x high precision")
    (row,) = fp4.report(loss(NONE), X, W, SIZES).rows
    assert not row.quantized and row.note == "not quantized: recipe=HIGH_PRECISION"


# --- bad input ---

QW = FROZEN["tiles"](W)


def call(x=X, kernel=W, sizes=SIZES, bias=None, mode="unquant", **kwargs):
    return fp4.grouped_dense(x, kernel, sizes, bias, **dict(recipe=recipe(mode)) | kwargs)


def shape(**kwargs):
    return jax.eval_shape(lambda: call(**kwargs)).shape


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        (dict(sizes=[17, 0, 30, 11]), TypeError, "group_sizes is of type list; needs an int32 array"),
        (dict(sizes=jnp.ones(G)), TypeError, "group_sizes is of type float32; needs an int32 array"),
        (dict(sizes=np.ones(G, np.int64)), TypeError, "group_sizes is of type int64; needs an int32 array"),
        (dict(sizes=SIZES[None]), ValueError, r"group_sizes is of shape \(1, 4\); needs \(4,\)"),
        (dict(sizes=SIZES[1:]), ValueError, r"group_sizes is of shape \(3,\); needs \(4,\)"),
        (dict(kernel=W[0]), ValueError, r"kernel is of shape \(40, 10\); needs \[g, k, n\]"),
        (dict(kernel=W[None]), ValueError, r"kernel is of shape \(1, 4, 40, 10\); needs \[g, k, n\]"),
        (dict(kernel=W.mT), ValueError, r"kernel is of shape \(4, 10, 40\); needs 40 rows"),
        (dict(kernel=W.astype(int)), TypeError, "kernel is an array of int32"),
        (dict(kernel=fp4.quantize(W[0], axis=0)), ValueError, "kernel is Quant.*one amax for each group.*batch_dims=1"),
        (dict(kernel=fp4.quantize(W, axis=0)), ValueError, r"kernel is Quant.*one amax for each group.*batch_dims=1"),
        (dict(kernel=fp4.quantize(W, batch_dims=1)), ValueError, "kernel is Quant.*needs axis=0.*quantize_transpose"),
        (dict(kernel=fp4.quantize_transpose(W)), ValueError, "kernel is Quant.*batch_dims=1"),
        (dict(kernel=FROZEN["pair"](W)[::-1]), ValueError, "kernel is Quant.*needs axis=-1"),
        (dict(kernel=(FROZEN["pair"](W[:, :8])[0], QW)), ValueError, r"kernel is a pair of shapes \(4, 8, 10\) and"),
        (dict(kernel=(QW,)), TypeError, r"kernel is a tuple; needs the pair \(blocked along n, blocked along k\)"),
        (dict(kernel=dataclasses.replace(QW, format="nf4")), ValueError, "kernel.format is 'nf4'"),
        (dict(bias=B[0]), ValueError, r"bias is of shape \(10,\); needs \(4, 10\)"),
        (dict(bias=B[1:]), ValueError, r"bias is of shape \(3, 10\); needs \(4, 10\)"),
        (dict(bias=B.astype(int)), TypeError, "bias is an array of int32"),
        (dict(x=X.astype(int)), TypeError, "x is an array of int32"),
        (dict(x=jnp.ones(())), ValueError, "x is a scalar"),
        (dict(x=[1.0]), TypeError, "x is a list"),
        (dict(recipe="nvfp4"), TypeError, "recipe is 'nvfp4'"),
        (dict(key=3), TypeError, "key is a int"),
        (dict(preferred_element_type=jnp.int8), TypeError, "preferred_element_type is int8"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)  # fmt: skip
def test_bad_input(changed, error, says):
    """E12."""
    refused(lambda: call(**changed), error, "^grouped_dense: " + says)


def test_bad_input_of_a_gradient():
    """B7, D4: what only a backward needs is no matter of an evaluation."""
    no_plane = fp4.quantize(W, axis=0, batch_dims=1)
    assert shape(mode="default", bias=B) == shape(kernel=no_plane, mode="default") == (M, N)
    for name, a in (("x", X), ("kernel", W)):
        f = lambda a, name=name: call(**{name: a}, mode="default").sum()  # noqa: E731
        refused(lambda f=f, a=a: jax.grad(f)(a), ValueError, "^grouped_dense: key is None; needs a JAX key")
    jax.eval_shape(jax.grad(lambda b: call(bias=b, mode="default").sum()), B)  # db draws nothing
    for free in (recipe("unquant"), recipe("dequant"), recipe("default", stochastic_rounding=False)):
        jax.eval_shape(jax.grad(lambda x, free=free: call(x, recipe=free).sum()), X)
    f = lambda x: call(x, no_plane, mode="default", key=KEY).sum()  # noqa: E731
    refused(
        lambda: jax.grad(f)(X),
        ValueError,
        r"^grouped_dense: kernel is Quant.*its plane blocked along n.*quantize_transpose",
    )
    for mode in (*MODES, NONE):
        f = lambda q, mode=mode: call(kernel=q, mode=mode, key=KEY).sum()  # noqa: E731
        refused(
            lambda f=f: jax.grad(f, allow_int=True)(QW), fp4.UnsupportedError, "that is differentiated; needs a con"
        )


def test_strict_refuses_padding_at_the_forward():
    """Of k, and in the default mode of n; the rows of a group are data, and padded as they come."""
    wide, narrow = (jnp.ones((G, 48, n)) for n in (32, 10))
    x = jnp.ones((M, 48))
    with fp4.strict():
        refused(lambda: call(), fp4.UnsupportedError, "^grouped_dense: x is of extent 40; needs a multiple of 16")
        f = lambda: call(x, narrow, mode="default")  # noqa: E731
        refused(f, fp4.UnsupportedError, "^grouped_dense: kernel is of extent 10; needs a multiple of 16")
        assert shape(x=x, kernel=wide, mode="default") == (M, 32)
        assert shape(mode=NONE) == (M, N)
        step = lambda x, w: jax.grad(lambda *a: call(*a, mode="default", key=KEY).sum(), (0, 1))(x, w)  # noqa: E731
        jax.eval_shape(step, x, wide)
