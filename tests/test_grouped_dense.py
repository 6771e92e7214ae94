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
    same,
)
from grouping import CASES, group_sizes, slices, total
from hypothesis import example, given
from products import refused

import jax_fp4 as fp4

M, K, N, G = 70, 40, 10, 4  # no extent is a multiple of 16
X, DY, W, B = (np.asarray(normal(*a)) for a in ((1, M, K), (2, M, N), (3, G, K, N), (4, G, N)))
SIZES = np.int32([17, 0, 30, 11])  # and a tail of 12

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


@pytest.mark.core
@pytest.mark.parametrize("name", SETTINGS)
@given(sizes=group_sizes(G, M))
@example(sizes=np.int32([0, 0, 0, 0]))
@example(sizes=np.int32([1, 15, 16, 17]))
def test_every_expert_is_as_if_alone(name, sizes):
    """C1-C8, C14, A7: against `dense` of its rows. Those are followed by zero rows, so that all sizes share a program:
    zero rows change no amax, and no block of others."""
    chosen, kernel, bias = setting(name)
    got = grouped(chosen)(poisoned(X, sizes), kernel, bias, poisoned(DY, sizes, np.inf), sizes)

    def want(e, rows):
        count = rows.stop - rows.start
        x, dy = (np.pad(a[rows], ((0, M - count), (0, 0))) for a in (X, DY))
        found = alone(chosen)(x, expert(kernel, e), expert(bias, e), dy)
        return {n: a[:count] if n in ("y", "x") else a for n, a in found.items()}

    check_experts(got, want, sizes)


@pytest.mark.parametrize("name", [*MODES, NONE])
def test_every_expert_is_as_if_alone_without_padding(name):
    """C5: its rows and nothing else. NaN in the first group is no matter of the others, which keep their bits."""
    chosen, kernel, bias = setting(name)
    sizes = np.int32([17, 0, 17, 17])
    got = grouped(chosen)(poisoned(X, sizes, np.inf), kernel, bias, poisoned(DY, sizes), sizes)
    check_experts(got, lambda e, r: alone(chosen)(X[r], kernel[e], bias[e], DY[r]), sizes)
    x, kernel, bias, dy = (np.array(a) for a in (X, kernel, bias, DY))
    for a in (x, kernel, bias):
        a[0] = np.nan
    bad = grouped(chosen)(x, kernel, bias, dy, sizes)
    same({n: bad[n][17:] for n in ("y", "x")}, {n: got[n][17:] for n in ("y", "x")})
    same(bad["kernel"][1:], got["kernel"][1:])
    assert all(np.isnan(bad[n][0]).any() for n in ("y", "x", "kernel"))


def quantized_composition(x, kernel, bias, dy, sizes, key, hadamard):
    """default mode, of public functions."""
    qx, qx_t = fp4.quantize_transpose(x, hadamard=hadamard, group_sizes=sizes)
    qw, qw_t = fp4.quantize_transpose(kernel, block=(16, 16), batch_dims=1)
    qdy, qdy_t = fp4.quantize_transpose(dy, hadamard=hadamard, group_sizes=sizes, key=key)
    member = jnp.stack([jnp.zeros(M).at[r].set(1) for r in slices(SIZES, M)], -1)
    return {
        "y": fp4.grouped_matmul(qx, qw_t, sizes) + member @ bias,
        "x": fp4.grouped_matmul(qdy, qw.mT, sizes),
        "kernel": fp4.grouped_matmul(qx_t.mT, qdy_t, sizes),
        "bias": member[: len(dy)].T @ jnp.where(member.any(-1, keepdims=True), dy, 0),
    }


@pytest.mark.core
@pytest.mark.parametrize("hadamard", [True, False])
def test_stochastic_rounding_draws_by_the_key(hadamard):
    """B2: dy alone is rounded stochastically, with this key; another key gives other gradients and the same y."""
    step = grouped(recipe("default", random_hadamard_transform=hadamard))
    arguments = poisoned(X, SIZES), W, B, poisoned(DY, SIZES), SIZES
    got = step(*arguments, KEY)
    close(got, jax.jit(partial(quantized_composition, hadamard=hadamard))(*arguments, KEY))
    same(got, step(*arguments, KEY))
    other = step(*arguments, jax.random.key(8))
    same({n: got[n] for n in ("y", "bias")}, {n: other[n] for n in ("y", "bias")})
    assert all(np.mean(np.asarray(got[n]) != np.asarray(other[n])) > 0.1 for n in ("x", "kernel"))


def test_modes_differ():
    """D1."""
    results = [grouped(setting(name)[0])(X, W, B, DY, SIZES) for name in (*MODES, NONE)]
    for i, one in enumerate(results):
        for j, other in enumerate(results[:i]):
            for name in ("y", "x", "kernel"):
                difference = np.linalg.norm(one[name] - other[name]) / np.linalg.norm(other[name])
                # The quantized forward is one, and unquant's backward is that of no recipe.
                alike = (i < 3) if name == "y" else (i, j) == (3, 1)
                assert difference <= 1e-6 if alike else difference > 0.02, (i, j, name, difference)


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
        want = jax.vjp(in_kernel, W)[1](DY) if jit else None
        y, pull_kernel = jax.vjp(in_kernel, W)
        pull_x = jax.vjp(in_x, X)[1] if jit else None
    for context in (recipe("dequant" if mode == "unquant" else "unquant"), None):
        with fp4.autocast(context):
            layer(X, W, bias=B)
            got = pull_kernel(DY)
    if want is not None:
        same(got, want)
    want = grouped(recipe(mode))(X, W, B, DY, SIZES, KEY)
    close({"y": y, "kernel": got[0]}, {n: want[n] for n in ("y", "kernel")})
    if pull_x is not None:
        close(pull_x(DY)[0], want["x"])


@pytest.mark.core
def test_one_jitted_function_under_contexts_a_b_none_a():
    a, b = recipe("unquant"), recipe("unquant", two_dimensional_weights=False)
    want = [grouped(chosen)(X, W, B, DY, SIZES, KEY)["y"] for chosen in (a, b, fp4.HIGH_PRECISION, a)]
    assert not np.array_equal(want[0], want[1])
    for context, y in zip((a, b, None, a), want, strict=True):
        with fp4.autocast(context):
            close(JITTED(X, W, bias=B), y)


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
    same({"y": got["y"].astype(jnp.bfloat16), "x": got["x"]}, {n: want[n] for n in ("y", "x")})
    same(got["kernel"].astype(jnp.bfloat16), want["kernel"])
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
    same({n: got[n].reshape(flat[n].shape) for n in got}, flat)
    if m == 0:
        assert not got["kernel"].any() and not got["bias"].any()
    if k == 0:
        for e, r in enumerate(slices(SIZES, m)):
            same(got["y"][r], np.broadcast_to(B[e], got["y"][r].shape))
