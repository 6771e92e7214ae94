"""Products on a GPU, by the kernels for Hopper or, where the GPU is another, by XLA's; beside those on the CPU."""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_layers import gradients, poisoned
from grouping import CASES, total
from products import by_experts, contraction_by_experts, error_of

import jax_fp4 as fp4
from jax_fp4 import _ffi, _products

TAIL = 5  # rows that no group has


def normal(seed, *shape, dtype=jnp.bfloat16):
    return np.asarray(jax.random.normal(jax.random.key(seed), shape, dtype))


def on(device, function, *arguments):
    with jax.default_device(device):
        return jax.block_until_ready(jax.jit(function)(*jax.device_put(arguments, device)))


def values(q):
    """In float64, of the codes themselves."""
    return np.asarray(fp4.dequantize(q, jnp.float32), np.float64)


@pytest.fixture(scope="module")
def hopper(gpu):
    if missing := _ffi.hopper_missing():
        pytest.skip(missing)
    return gpu


def split(groups, m, seed=0):
    """Sizes that leave TAIL rows over, one of them 0."""
    cuts = np.sort(np.random.default_rng(seed).integers(0, m - TAIL, groups - 1)) if groups > 1 else np.zeros(0, int)
    sizes = np.diff(np.concatenate([[0], cuts, [m - TAIL]])).astype(np.int32)
    if groups > 2:
        sizes[1] += sizes[2]
        sizes[2] = 0
    return sizes


QUANTIZED = {"tensor": {}, "rows": dict(row_scaled=True), "bound 256": dict(four_over_six=fp4.FourOverSix())}
SHAPES = [(40, 64, 8, 3), (300, 128, 136, 4), (333, 100, 7, 4), (900, 1024, 264, 2), (64, 320, 500, 9), (2, 48, 30, 1)]


@pytest.mark.parametrize("form", QUANTIZED)
@pytest.mark.parametrize("out", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: jnp.dtype(d).name)
def test_rows_times_quantized_matrices(gpu, cpu, form, out):
    """numerics.md, 1.10: against a float64 product of the dequantized operands; both planes of the matrices."""

    def quantized(x, w, dy, sizes):
        qx = fp4.quantize(x, group_sizes=sizes, **QUANTIZED[form])
        qdy = fp4.quantize(dy, group_sizes=sizes, **QUANTIZED[form])
        return qx, qdy, *fp4.quantize_transpose(w, batch_dims=1, **QUANTIZED[form])

    def products(qx, qdy, row, column, sizes):
        run = functools.partial(fp4.grouped_matmul, group_sizes=sizes, preferred_element_type=out)
        return run(qx, column), run(qdy, row.mT)

    for seed, (m, k, n, groups) in enumerate(SHAPES):
        sizes = split(max(groups, 1), m + TAIL, seed)[:groups]
        x, dy = (poisoned(normal(seed + i, m + TAIL, width), sizes) for i, width in enumerate((k, n)))
        qx, qdy, row, column = on(cpu, quantized, x, normal(seed + 7, groups, k, n), dy, sizes)
        got = on(gpu, products, qx, qdy, row, column, sizes)
        used = total(sizes, len(x))
        for y, a, b in zip(
            got, (values(qx), values(qdy)), (values(column), np.swapaxes(values(row), 1, 2)), strict=True
        ):
            want = by_experts(np.nan_to_num(a), b, sizes)
            assert error_of(y, want) <= {jnp.float32: 1e-6, jnp.bfloat16: 3e-3, jnp.float16: 4e-4}[out], (m, k, n)
            assert not np.any(np.asarray(y[used:], np.float32))


@pytest.mark.parametrize("out", [jnp.float32, jnp.bfloat16], ids=lambda d: jnp.dtype(d).name)
def test_arrays(gpu, out):
    """bfloat16 operands of any extent, forward, to the input, and over the rows of each group."""

    def products(x, w, dy, sizes):
        run = functools.partial(fp4.grouped_matmul, group_sizes=sizes, preferred_element_type=out)
        return run(x, w), run(dy, w.mT), run(x.mT, dy)

    for seed, (m, k, n, groups) in enumerate(SHAPES):
        sizes = split(groups, m + TAIL, seed)
        x, dy = (poisoned(normal(seed + i, m + TAIL, width), sizes) for i, width in enumerate((k, n)))
        w = normal(seed + 7, groups, k, n)
        got = on(gpu, products, x, w, dy, sizes)
        x, dy, w = (np.nan_to_num(np.asarray(a, np.float64)) for a in (x, dy, w))
        wants = (
            by_experts(x, w, sizes),
            by_experts(dy, np.swapaxes(w, 1, 2), sizes),
            contraction_by_experts(x.T, dy, sizes),
        )
        for y, want in zip(got, wants, strict=True):
            assert error_of(y, want) <= {jnp.float32: 1e-6, jnp.bfloat16: 3e-3}[out], (m, k, n)


@pytest.mark.parametrize(("groups", "n"), [(1, 328), (5, 328), (45, 768)])
@pytest.mark.parametrize("rows", [1, 8, 9, 16])
def test_few_rows(gpu, cpu, rows, groups, n):
    """Few tiles, which several warpgroups add up: one or none for a multiprocessor, or several after one another."""
    x, w = normal(0, rows * groups + TAIL, 448), normal(1, groups, 448, n)
    sizes = split(groups, rows * groups + TAIL)
    qx, qw = on(cpu, lambda x, w: (fp4.quantize(x), fp4.quantize(w, axis=0, batch_dims=1)), x, w)
    for out, bound in ((jnp.float32, 1e-6), (jnp.bfloat16, 3e-3)):
        y = on(gpu, functools.partial(fp4.grouped_matmul, preferred_element_type=out), qx, qw, sizes)
        want = by_experts(values(qx), values(qw), sizes)
        assert error_of(y, want) <= bound and not np.any(np.asarray(y)[-TAIL:])


@pytest.mark.parametrize("k", [96, 112, 256])
def test_contractions_of_short_groups(gpu, k):
    """Tiles that follow one another at once, the result of the one on its way out under the product of the next."""
    sizes = np.random.default_rng(k).integers(0, 2, 400).astype(np.int32)
    x, dy = normal(0, sizes.sum(), k), normal(1, sizes.sum(), 568)
    got = on(gpu, lambda x, dy, sizes: fp4.grouped_matmul(x.T, dy, sizes), x, dy, sizes)
    want = contraction_by_experts(x.T.astype(np.float64), dy.astype(np.float64), sizes)
    np.testing.assert_array_equal(np.asarray(got), want.astype(got.dtype))


@pytest.mark.parametrize("out", [jnp.float32, jnp.bfloat16], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("quantized", [False, True])
def test_contractions_in_parts(gpu, quantized, out):
    """The elements of the whole contraction, in the places of its parts: those that the kernel writes so (256 rows) and
    others."""
    sizes = split(7, 500 + TAIL)

    def contraction(x, dy, sizes, parts):
        if quantized:
            x, dy = (fp4.quantize(a, axis=0, group_sizes=sizes) for a in (x, dy))
        return _products.grouped_product(x.mT, dy, sizes, out, parts=parts)

    for k, parts in ((512, 2), (1536, 3), (768, 2), (40, 4)):
        x, dy = (poisoned(normal(i, 500 + TAIL, width), sizes) for i, width in enumerate((k, 328)))
        whole, cut = (on(gpu, functools.partial(contraction, parts=n), x, dy, sizes) for n in (1, parts))
        moved = np.moveaxis(np.asarray(whole, np.float32).reshape(7, parts, k // parts, 328), 1, 0)
        np.testing.assert_array_equal(np.asarray(cut, np.float32), moved)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("hadamard", [False, True])
def test_sizes(gpu, cpu, case, hadamard):
    """Every pattern of groups, quantized: rows, and their contraction, whose last blocks are padded."""
    sizes, m = CASES[case]
    sizes = np.asarray(sizes, np.int32)
    x, dy = (poisoned(normal(i, m, width), sizes) for i, width in enumerate((72, 40)))
    w = normal(3, len(sizes), 72, 40)

    def products(x, w, dy, sizes):
        run = functools.partial(fp4.grouped_matmul, group_sizes=sizes, preferred_element_type=jnp.float32)
        qx, qx_t = fp4.quantize_transpose(x, group_sizes=sizes, hadamard=hadamard)
        qdy, qdy_t = fp4.quantize_transpose(dy, group_sizes=sizes, hadamard=hadamard)
        row, column = fp4.quantize_transpose(w, block=(16, 16), batch_dims=1)
        return run(qx, column), run(qdy, row.mT), run(qx_t.mT, qdy_t)

    for y, want in zip(on(gpu, products, x, w, dy, sizes), on(cpu, products, x, w, dy, sizes), strict=True):
        assert error_of(y, want) <= 1e-6


@pytest.mark.parametrize("k", [1024, 4096, 8192])
def test_error_of_long_sums(gpu, cpu, k, record_property):
    """Tensor cores truncate while they accumulate: 1e-6 up to k = 1024, 2e-5 up to 8192."""
    x, w = (on(cpu, fp4.quantize, normal(i, 256, k)) for i in range(2))
    y = on(gpu, functools.partial(fp4.matmul, preferred_element_type=jnp.float32), x, w.mT)
    error = error_of(y, values(x) @ values(w).T)
    record_property("error", error)
    print(f"k {k}: relative Frobenius error {error:.2e}")
    assert error <= (1e-6 if k <= 1024 else 2e-5)


def test_a_nan_scale_is_nan(gpu):
    """In its row or column, and nowhere else."""
    x, w = np.array(normal(0, 20, 256)), np.array(normal(1, 256, 24))
    x[3, 70], w[200, 5] = np.inf, np.nan
    y = np.asarray(on(gpu, lambda x, w: fp4.matmul(fp4.quantize(x), fp4.quantize(w, axis=0)), x, w), np.float32)
    want = np.zeros((20, 24), bool)
    want[3], want[:, 5] = True, True
    np.testing.assert_array_equal(np.isnan(y), want)


@pytest.mark.parametrize("mode", ["default", "unquant", "dequant", "high precision"])
@pytest.mark.parametrize("layer", ["dense", "grouped_dense", "grouped_mlp"])
def test_layers(gpu, cpu, layer, mode):
    """y and every gradient beside the CPU's, whose codes are the same: sums differ in their order."""
    recipe = fp4.HIGH_PRECISION if mode == "high precision" else fp4.NVFP4BlockScaling(mode)
    more = dict(recipe=recipe, key=jax.random.key(3) if mode == "default" else None)
    sizes = np.int32([30, 0, 65, 20])
    m, k, f, groups = 128, 96, 80, 4
    biases = [normal(10 + i, groups, width, dtype=jnp.float32) for i, width in enumerate((f, 2 * f, k))]
    w_in, w_out, probs = normal(1, groups, k, 2 * f), normal(2, groups, f, k), normal(5, m, dtype=jnp.float32)
    arrays = (
        dict(x=normal(0, m, k))
        | {
            "dense": dict(kernel=normal(1, k, f), bias=biases[0][0]),
            "grouped_dense": dict(kernel=normal(1, groups, k, f), bias=biases[0]),
            "grouped_mlp": dict(w_in=w_in, w_out=w_out, b_in=biases[1], b_out=biases[2], probs=probs),
        }[layer]
    )
    function = getattr(fp4, layer)
    if layer != "dense":
        function = functools.partial(function, group_sizes=sizes)

    def run(dy, arrays):
        return gradients(functools.partial(function, **more), dy, **arrays)

    dy = normal(9, m, k if layer == "grouped_mlp" else f)
    got, want = (on(device, run, dy, arrays) for device in (gpu, cpu))
    for name in want:
        # A code of the second operand may flip where the first product differs in its last bit. In high precision the
        # bias of dense is JAX's own, summed in bfloat16.
        room = 2e-2 if layer == "grouped_mlp" or (layer, mode) == ("dense", "high precision") else 4e-3
        assert error_of(got[name], want[name]) <= room, name


def test_replay_honours_new_sizes(gpu):
    """A jitted loop is captured as a CUDA graph once and replayed; its sizes are data."""

    def last(x, w, dy, sizes):
        def body(_, carry):
            y = fp4.grouped_matmul(fp4.quantize(x, group_sizes=sizes), fp4.quantize(w, axis=0, batch_dims=1), sizes)
            dw = fp4.grouped_matmul(x.mT, dy, sizes, preferred_element_type=jnp.float32)
            return carry[0] + jnp.sum(y.astype(jnp.float32)), y, dw

        start = jnp.float32(0), jnp.zeros((96, 40), jnp.bfloat16), jnp.zeros((3, 64, 40), jnp.float32)
        return jax.lax.fori_loop(0, 5, body, start)[1:]

    x, w, dy = normal(0, 96, 64), normal(1, 3, 64, 40), normal(2, 96, 40)
    jitted = jax.jit(last)
    for sizes in itertools.permutations([10, 30, 50]):
        sizes = np.asarray(sizes, np.int32)
        with jax.default_device(gpu):
            y, dw = jax.block_until_ready(jitted(*jax.device_put((x, w, dy, sizes), gpu)))
        exact = (np.asarray(a, np.float64) for a in (x, dy))
        assert error_of(dw, contraction_by_experts(next(exact).T, next(exact), sizes)) <= 1e-6
        assert not np.any(np.asarray(y[90:], np.float32)) and np.all(np.any(np.asarray(y[:90], np.float32), axis=1))


def test_a_replay_writes_in_its_own_memory(gpu):
    """What a call uses for itself is XLA's for as long as the graph lives: others get none of it between replays."""

    @jax.jit
    def program(x, w, sizes):
        qx, qx_t = fp4.quantize_transpose(x, group_sizes=sizes)
        y = fp4.grouped_matmul(qx, fp4.quantize(w, axis=0, batch_dims=1), sizes)
        return y, fp4.grouped_matmul(qx_t.mT, fp4.quantize(y, axis=0, group_sizes=sizes), sizes)

    with jax.default_device(gpu):
        sizes = np.full(8, 512, np.int32)
        arguments = jax.device_put((normal(0, 4096, 1024), normal(1, 8, 1024, 2048), sizes), gpu)
        want = [np.asarray(a, np.float32) for a in program(*arguments)]
        for _ in range(4):  # until the addresses repeat
            jax.block_until_ready(program(*arguments))
        sevens = [jax.device_put(np.full(4, 7, np.uint32), gpu) for _ in range(4000)]
        for _ in range(4):
            got = jax.block_until_ready(program(*arguments))
        assert all(np.all(np.asarray(a) == 7) for a in sevens)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), b)


def test_programs_in_flight_share_nothing(gpu):
    sizes, w = np.int32([100, 0, 7, 90]), normal(1, 4, 256, 128)
    inputs = [normal(seed, 200, 256) for seed in range(6)]
    product = jax.jit(
        lambda x: fp4.grouped_matmul(fp4.quantize(x, group_sizes=sizes), fp4.quantize(w, axis=0, batch_dims=1), sizes)
    )
    want = [np.asarray(on(gpu, product, x), np.float32) for x in inputs]
    with ThreadPoolExecutor(len(inputs)) as pool:
        got = list(pool.map(lambda x: [np.asarray(on(gpu, product, x), np.float32) for _ in range(5)][-1], inputs))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_kernels_run(hopper):
    """What the tests above measure: the programs hold the calls, and supported() says so."""
    sizes = np.int32([3, 5])
    x, w = normal(0, 8, 64), normal(1, 2, 64, 32)
    lowered = jax.jit(lambda x, w: fp4.grouped_matmul(fp4.quantize(x), fp4.quantize(w, axis=0, batch_dims=1), sizes))
    assert "jax_fp4_grouped_matmul" in lowered.lower(x, w).as_text()
    assert fp4.supported("grouped_matmul", "cuda").ok
