"""grouped_matmul whatever the sizes: against each group alone in float64, quantized operands after their definition."""

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouping import CASES, INT32_MAX, group_sizes, slices, total
from hypothesis import example, given, settings
from products import by_experts, contraction_by_experts, error_of, exact

import jax_fp4 as fp4
from jax_fp4 import _ragged, reference

KEY = jax.random.key(0)
FLAGS = {  # of x and dy; those of the pair that makes dw may have the transform
    "plain": {},
    "row_scaled": dict(row_scaled=True),
    "hadamard": dict(hadamard=True),
}
every_flag = pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
G, M, K, N = 4, 90, 40, 24


def arrays(seed: int, m: int, k: int, n: int, sizes):
    """x, w, dy, with NaN in the rows that belong to nobody."""
    rng = np.random.default_rng(seed)
    x, w, dy = (rng.standard_normal(s, np.float32) for s in ((m, k), (len(sizes), k, n), (m, n)))
    x[total(sizes, m) :] = dy[total(sizes, m) :] = np.nan
    return x, w, dy


def products(x, w, dy, sizes):
    """Forward, input gradient, weight gradient."""
    run = fp4.grouped_matmul
    return run(x, w, sizes), run(dy, w.mT, sizes), run(x.T, dy, sizes)


def quantized_products(x, w, dy, sizes, flags):
    qx, qx_t = fp4.quantize_transpose(x, group_sizes=sizes, **flags)
    qdy, qdy_t = fp4.quantize_transpose(dy, group_sizes=sizes, hadamard=flags.get("hadamard", False))
    qw, qw_t = fp4.quantize_transpose(w, block=(16, 16), batch_dims=1)
    run = fp4.grouped_matmul
    return run(qx, qw_t, sizes), run(qdy, qw.mT, sizes), run(qx_t.mT, qdy_t, sizes)


PRODUCTS = jax.jit(products)
QUANTIZED = {name: jax.jit(partial(quantized_products, flags=flags)) for name, flags in FLAGS.items()}


def values(x, axis, **flags):
    """What the specification makes of x alone, in its stored orientation and with its padding."""
    q = fp4.quantize(x, axis=axis, **flags, implementation="reference")
    codes, scale, amax = q.codes, q.block_scale, q.amax
    return exact(reference.dequantize(codes, scale, amax, q.bound, 2 * codes.shape[-1], np.float32))


def expected_of_quantized(x, w, dy, sizes, flags):
    (m, k), (groups, _, n) = x.shape, w.shape
    y, dx, dw = np.zeros((m, n)), np.zeros((m, k)), np.zeros((groups, k, n))
    rows, transform = {f: v for f, v in flags.items() if f != "hadamard"}, dict(hadamard=flags.get("hadamard", False))
    tile = dict(block=(16, 16))
    for e, r in enumerate(slices(sizes, m)):
        y[r] = values(x[r], -1, **rows) @ values(w[e], 0, **tile).T
        dx[r] = values(dy[r], -1) @ values(w[e], -1, **tile).T
        dw[e] = values(x[r], 0, **flags) @ values(dy[r], 0, **transform).T
    return y, dx, dw


def check(x, w, dy, sizes, got, want, tolerance=1e-6):
    """Within the bound, group by group; exactly zero where nothing is computed."""
    m = len(x)
    for a, b in zip(got[:2], want[:2], strict=True):
        a = np.asarray(a)
        assert not a[total(sizes, m) :].any()
        for r in slices(sizes, m):
            assert error_of(a[r], b[r]) <= tolerance, (sizes, r)
    for e, r in enumerate(slices(sizes, m)):
        assert error_of(got[2][e], want[2][e]) <= tolerance, (sizes, e)
        assert r.stop > r.start or not np.asarray(got[2][e]).any()


def check_arrays(x, w, dy, sizes):
    first, second, third = exact(x), exact(w), exact(dy)
    want = by_experts(first, second, sizes), by_experts(third, second.mT, sizes)
    check(x, w, dy, sizes, PRODUCTS(x, w, dy, sizes), (*want, contraction_by_experts(first.T, third, sizes)))


def check_quantized(x, w, dy, sizes, name="plain"):
    got = QUANTIZED[name](x, w, dy, sizes)
    check(x, w, dy, sizes, got, expected_of_quantized(x, w, dy, sizes, FLAGS[name]))


@pytest.mark.core
@example(np.int32([INT32_MAX] * G), 0)
@example(np.int32([0, M, 0, 0]), 0)
@given(group_sizes(G, M), st.integers(0, 99))
def test_any_sizes(sizes, seed):
    """C1-C8, C11: one program for all of them."""
    check_arrays(*arrays(seed, M, K, N, sizes), sizes)


@pytest.mark.core
@pytest.mark.parametrize("name", FLAGS)
@settings(max_examples=settings().max_examples // 2)
@given(group_sizes(G, M), st.integers(0, 99))
def test_any_sizes_of_quantized_operands(name, sizes, seed):
    """Codes, block scales, tensor scales of each group: all as if it were alone; only the sum is rounded."""
    check_quantized(*arrays(seed, M, K, N, sizes), sizes, name)


@pytest.mark.parametrize("case", CASES)
def test_cases(case):
    sizes, m = CASES[case]
    operands, sizes = arrays(1, m, 20, 17, sizes), np.int32(sizes)
    check_arrays(*operands, sizes)
    if case not in (
        "empty between",
        "empty first",
        "all empty",
        "two",
        "everything in one",
    ):  # among those of test_any_sizes, and each compiles
        check_quantized(*operands, sizes)


@pytest.mark.parametrize("m", [1, 33, 63, 64, 65, 128, 129, 256, 257, 300])
def test_at_the_borders_of_tiles(m):
    """A8: one group, and one that begins and ends beside a border."""
    for sizes in ([m, 0], [m - 1, 1], [1, m - 1], [m // 2, m // 2 - 1], [0, min(m, 64)]):
        check_arrays(*arrays(m, m, 16, 8, sizes), np.int32(sizes))


@pytest.mark.parametrize(("k", "n"), [(0, 5), (5, 0), (1, 1), (1, 40)])
def test_thin_matrices(k, n):
    sizes = np.int32([8, 0, 11])
    operands = arrays(2, 24, k, n, sizes)
    check_arrays(*operands, sizes)
    check_quantized(*operands, sizes)


@pytest.mark.parametrize("m", [0, 5])
def test_no_groups_and_no_rows(m):
    """C4: under jit and grad too."""
    sizes = np.int32([0, 0])
    x, w, dy = arrays(3, m, 16, 8, sizes)
    loss = lambda x, w: (fp4.grouped_matmul(x, w, sizes) * np.nan_to_num(dy)).sum()  # noqa: E731
    for gradient in (jax.grad(loss, (0, 1)), jax.jit(jax.grad(loss, (0, 1)))):
        dx, dw = gradient(x, w)
        assert dx.shape == x.shape and dw.shape == w.shape
        assert not np.asarray(dx).any() and not np.asarray(dw).any()


@pytest.mark.core
def test_one_group_and_a_tail():
    """C5, C6: g = 1 is no special case; NaN in the tail reaches neither results nor gradients."""
    sizes = np.int32([40])
    x, w, dy = arrays(4, 96, K, N, sizes)
    y, vjp = jax.vjp(lambda x, w: fp4.grouped_matmul(x, w, sizes), x, w)
    dx, dw = vjp(jnp.asarray(dy))
    assert error_of(y[:40], fp4.matmul(x[:40], w[0])) <= 1e-6
    assert error_of(dx[:40], fp4.matmul(dy[:40], w[0].T)) <= 1e-6
    assert error_of(dw[0], fp4.matmul(x[:40].T, dy[:40])) <= 1e-6
    assert not np.asarray(y[40:]).any() and not np.asarray(dx[40:]).any()


@pytest.mark.core
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_results(dtype):
    """Half an ulp, and the sum's own error, element by element."""
    sizes = np.int32([1, 0, 31, 50])
    operands = arrays(5, M, K, N, sizes)
    narrow = [a.astype(dtype) for a in operands]
    got = PRODUCTS(*narrow, sizes)
    x, w, dy = (exact(a) for a in narrow)
    want = by_experts(x, w, sizes), by_experts(dy, w.mT, sizes), contraction_by_experts(x.T, dy, sizes)
    half_ulp = 2.0 ** -(jnp.finfo(dtype).nmant + 1)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert (np.abs(exact(a) - b) <= half_ulp * np.abs(b) * 1.01 + 1e-5).all()


@pytest.mark.core
def test_values_that_are_not_finite_stay_in_their_group():
    """NaN and Inf of one group beside another in the same tile."""
    sizes = np.int32([10, 30, 20, 5])
    x, w, dy = arrays(6, M, K, N, sizes)
    x[12, 3], dy[45, 2], w[3, 1, 1] = np.nan, np.inf, np.inf
    y, dx, dw = (np.asarray(a) for a in PRODUCTS(x, w, dy, sizes))
    assert [sorted({int(i) for i in np.argwhere(~np.isfinite(a))[:, 0]}) for a in (y, dx, dw)] == [
        [12, *range(60, 65)],
        [45, *range(60, 65)],
        [1, 2],
    ]


def test_the_tile_is_about_a_mean_group():
    """A power of two between the two limits, never more rows than there are."""
    assert [_ragged.tile_rows(m, 4) for m in (1, 40, 64, 300, 600, 4096)] == [1, 40, 64, 128, 256, 256]
    assert _ragged.tile_rows(4096, 64) == 64
    for m in range(1, 600, 7):
        for groups in (1, 2, 5, 64, 1000):
            rows = _ragged.tile_rows(m, groups)
            assert rows == m or (m > rows >= _ragged.SMALLEST and rows in (64, 128, 256))


@pytest.mark.parametrize("kind", ["arrays", "gradients", "quantized"])
def test_no_operand_is_rewritten_as_a_whole(kind):
    """XLA:CPU slices 16-bit and 8-bit floats in float32, and a dot likes its operands one way round. Outside the loops
    either would be done to all experts."""
    g, m, k, n = 8, 256, 48, 80
    x, w, dy, sizes = *(jnp.ones(s, jnp.bfloat16) for s in ((m, k), (g, k, n), (m, n))), jnp.full(g, m // g, jnp.int32)
    wide = [f"{t}[{g},{a},{b}]" for t in ("f32", "f16") for a, b in ((k, n), (n, k), (n, k // 16))]
    if kind == "arrays":
        text = compiled(products, x, w, dy, sizes)
        wide.append(f"f32[{m}")
    elif kind == "gradients":
        text = compiled(lambda x, w, dy, s: jax.vjp(lambda x: fp4.grouped_matmul(x, w, s), x)[1](dy), x, w, dy, sizes)
        wide += [f"bf16[{g},{n},{k}]", f"bf16[{g},{k},{n}]{{1,2,0}}"]
    else:
        w, x = fp4.quantize(w, axis=0, batch_dims=1), fp4.quantize(x, group_sizes=sizes)
        text = compiled(fp4.grouped_matmul, x, w, sizes)
    fused = False
    for line in text.splitlines():
        if line.endswith("{"):  # inside a fusion only what is asked for is computed
            fused = "fused" in line or "wrapped" in line
        assert fused or not any(f"= {shape}" in line for shape in wide), line


def compiled(f, *arguments) -> str:
    return jax.jit(f).lower(*arguments).compile().as_text()


@pytest.mark.core
def test_sizes_are_data():
    """C11: one program, called with other sizes."""
    traces = []

    @jax.jit
    def step(x, w, dy, sizes):
        traces.append(sizes)
        return quantized_products(x, w, dy, sizes, {})

    for sizes in ([5, 0, 60, 1], [0, 0, 0, 0], [0, M, 0, 0], [30, 30, 30, 30]):
        x, w, dy = arrays(7, M, K, N, sizes)
        check(x, w, dy, sizes, step(x, w, dy, np.int32(sizes)), expected_of_quantized(x, w, dy, sizes, {}))
    assert len(traces) == 1
