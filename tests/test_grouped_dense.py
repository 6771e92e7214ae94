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
    "default, 1-D weights": ("default", dict(two_dimensional_weights=False), "array", True),
    "default, row-scaled": ("default", dict(row_scaled_activation=True), "array", False),
    "default, four-over-six": ("default", dict(four_over_six="all"), "array", True),
    "default, frozen tiles": ("default", {}, "tiles", True),
    "default, frozen pair": ("default", dict(two_dimensional_weights=False), "pair", False),
    "unquant": ("unquant", {}, "array", True),
    "unquant, flags": ("unquant", dict(row_scaled_activation=True, four_over_six="all"), "array", False),
    "unquant, frozen": ("unquant", {}, "tiles", True),
    "dequant": ("dequant", {}, "array", True),
    "dequant, flags": ("dequant", dict(row_scaled_activation=True, two_dimensional_weights=False), "array", False),
    "dequant, four-over-six": ("dequant", dict(four_over_six="all"), "array", True),
    "dequant, frozen": ("dequant", {}, "pair", False),
    NONE: (NONE, {}, "array", True),
    "high precision, no bias": (NONE, {}, "array", False),
    "high precision, frozen": (NONE, {}, "tiles", True),
}


def setting(name):
    """The recipe, without stochastic rounding, the kernel and the bias."""
    mode, settings, form, has_bias = SETTINGS[name]
    rounding = {} if mode == NONE else dict(stochastic_rounding=False)
    return recipe(mode, **settings, **rounding), FROZEN[form](W), B if has_bias else None


@cache
def grouped(chosen):
    """x, kernel, bias, dy, sizes -> y and gradients: one program for all sizes."""

    def step(x, kernel, bias, dy, sizes, key=None):
        layer = partial(fp4.grouped_dense, group_sizes=sizes, recipe=chosen, key=key)
        return gradients(layer, dy, x=x, kernel=kernel, bias=bias)

    return jax.jit(step)


@cache
def alone(chosen):
    def step(x, kernel, bias, dy):
        return gradients(partial(fp4.dense, recipe=chosen), dy, x=x, kernel=kernel, bias=bias)

    return jax.jit(step)


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
            assert not any(np.asarray(a).any() for a in own.values())


def expert(tree, e):
    return jax.tree.map(lambda a: a[e], tree)


@pytest.mark.core
@pytest.mark.parametrize("name", SETTINGS)
@given(sizes=group_sizes(G, M))
@example(sizes=np.int32([0, 0, 0, 0]))
@example(sizes=np.int32([1, 15, 16, 17]))
def test_every_expert_is_as_if_alone(name, sizes):
    """C1-C8, C14, A7: against `dense` of its rows. Those are followed by zero rows, so that all sizes share a program:
    zero rows change no amax, and no block of others."""
    chosen, kernel, bias = setting(name)
    got = grouped(chosen)(poisoned(X, sizes), kernel, bias, poisoned(DY, sizes, np.inf), jnp.asarray(sizes))

    def want(e, rows):
        count = rows.stop - rows.start
        x, dy = (jnp.asarray(np.pad(np.asarray(a)[rows], ((0, M - count), (0, 0)))) for a in (X, DY))
        found = alone(chosen)(x, expert(kernel, e), expert(bias, e), dy)
        return {n: a[:count] if n in ("y", "x") else a for n, a in found.items()}

    check_experts(got, want, sizes)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_expert_is_as_if_alone_without_padding(name):
    """C5: the rows themselves, and nothing else."""
    chosen, kernel, bias = setting(name)
    got = grouped(chosen)(poisoned(X, SIZES, np.inf), kernel, bias, poisoned(DY, SIZES), SIZES)
    check_experts(got, lambda e, r: alone(chosen)(X[r], expert(kernel, e), expert(bias, e), DY[r]), SIZES)


@pytest.mark.parametrize("name", ["default", "unquant", "dequant", NONE])
def test_a_group_does_not_see_the_others(name):
    """NaN in a row of the first group, in its kernel and bias: every other group keeps its bits."""
    chosen, kernel, bias = setting(name)
    clean = grouped(chosen)(X, kernel, bias, DY, SIZES)
    bad = [a.at[0].set(jnp.nan) for a in (X, kernel, bias, DY)]
    got = grouped(chosen)(*bad, SIZES)
    same({n: a[17 if n in ("x", "y") else 1 :] for n, a in got.items()},
         {n: a[17 if n in ("x", "y") else 1 :] for n, a in clean.items()})  # fmt: skip
    assert all(np.isnan(a[0]).any() for a in got.values())


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


CONTEXTS = [fp4.NVFP4BlockScaling(mode, two_dimensional_weights=mode != "dequant") for mode in MODES]
JITTED = jax.jit(partial(fp4.grouped_dense, group_sizes=SIZES, key=KEY))


@pytest.mark.core
@pytest.mark.parametrize(("mode", "jit"), [("default", False), (NONE, False), *((m, True) for m in (*MODES, NONE))])
def test_a_later_forward_changes_nothing(mode, jit):
    """Forwards under every other recipe, and none, come between a forward and its backward: same bits."""
    layer = JITTED if jit else partial(fp4.grouped_dense, group_sizes=SIZES, key=KEY)
    layer = partial(layer)
    with fp4.autocast(recipe(mode)):
        y, pull = jax.vjp(lambda x, kernel, bias: layer(x, kernel, bias=bias), X, W, B)
    for context in (*CONTEXTS, None) if jit else (recipe("dequant"), None):
        with fp4.autocast(context):
            layer(X, W, bias=B)
    with fp4.autocast(recipe("unquant")):
        got = pull(DY)
    want = grouped(recipe(mode))(X, W, B, DY, SIZES, KEY)
    if jit:
        with fp4.autocast(recipe(mode)):
            y_again, pull = jax.vjp(lambda x, kernel, bias: layer(x, kernel, bias=bias), X, W, B)
            same((y, got), (y_again, pull(DY)))
    close(dict(zip(("y", "x", "kernel", "bias"), (y, *got), strict=True)), want)


@pytest.mark.core
def test_one_jitted_function_under_contexts_a_b_none_a():
    a, b = CONTEXTS[1:]
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
    x, w, b = normal(1, m, k, dtype=jnp.bfloat16), normal(2, g, k, n), normal(3, g, n)[:, :n]
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


@pytest.mark.core
@pytest.mark.parametrize("mode", [*MODES, NONE])
def test_one_residual_tree_whatever_is_differentiated(mode):
    """One jitted function: vjp in the kernel, in x, in the bias, and then the first backward."""
    with fp4.autocast(recipe(mode)):
        pulls = [
            jax.vjp(f, a)[1]
            for f, a in (
                (lambda w: JITTED(X, w, bias=B), W),
                (lambda x: JITTED(x, W, bias=B), X),
                (lambda b: JITTED(X, W, bias=b), B),
            )
        ]
    want = grouped(recipe(mode))(X, W, B, DY, SIZES, KEY)
    for pull, name in zip(pulls, ("kernel", "x", "bias"), strict=True):
        close(pull(DY)[0], want[name])


# --- dtypes ---


@pytest.mark.core
@pytest.mark.parametrize("mode", [*MODES, NONE])
def test_dtypes(mode):
    """D9: bfloat16 x, float32 masters, which are rounded to bfloat16 first; y may be asked for in float32, and its
    cotangent is rounded to bfloat16 for the products."""
    x, dy = X.astype(jnp.bfloat16), DY.astype(jnp.bfloat16)
    step = grouped(recipe(mode))
    got = step(x, W, B, dy, SIZES, KEY)
    assert {n: a.dtype.name for n, a in got.items()} == dict(y="bfloat16", x="bfloat16", kernel="float32", bias="float32")
    narrow = step(x, W.astype(jnp.bfloat16), B, dy, SIZES, KEY)
    same(narrow["y"], got["y"])
    same(narrow["x"], got["x"])
    same(narrow["kernel"], got["kernel"].astype(jnp.bfloat16))
    layer = partial(fp4.grouped_dense, group_sizes=SIZES, recipe=recipe(mode), key=KEY,
                    preferred_element_type=jnp.float32)  # fmt: skip
    wide = jax.jit(lambda dy: gradients(layer, dy, x=x, kernel=W, bias=B))(dy.astype(jnp.float32) * (1 + 2**-12))
    assert wide["y"].dtype == jnp.float32
    same(wide["y"].astype(jnp.bfloat16), got["y"])
    same({n: wide[n] for n in ("x", "kernel")}, {n: got[n] for n in ("x", "kernel")})
    close(wide["bias"], got["bias"], 1e-3)


# --- shapes and transformations ---


@pytest.mark.parametrize("mode", [*MODES, NONE])
@pytest.mark.parametrize("shape", [(2, 35, K), (0, K), (3, 0, K), (K,), (70, 0)])
def test_leading_axes_are_rows(mode, shape):
    """C4: and m = 0, k = 0; one row without an axis of its own."""
    k = shape[-1]
    w, x = W[:, :k], X.reshape(-1)[: np.prod(shape, dtype=int)].reshape(shape)
    m = int(np.prod(shape[:-1], dtype=int))
    dy, step = DY[:m].reshape(*shape[:-1], N), grouped(recipe(mode))
    got, flat = step(x, w, B, dy, SIZES, KEY), step(x.reshape(m, k), w, B, dy.reshape(m, N), SIZES, KEY)
    assert got["y"].shape == (*shape[:-1], N)
    same({n: got[n].reshape(flat[n].shape) for n in got}, flat)
    if m == 0:
        assert not any(np.asarray(got[n]).any() for n in ("kernel", "bias"))
    if k == 0 and m:
        for e, r in enumerate(slices(SIZES, m)):
            same(got["y"][r], jnp.broadcast_to(B[e], got["y"][r].shape))
