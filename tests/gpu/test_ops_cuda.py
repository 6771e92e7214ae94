"""The CUDA kernels through the public ops: the bits of the CPU handlers, for every variant, dtype and golden file."""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import golden_files, load

import jax_fp4 as fp4
from jax_fp4 import _ffi
from jax_fp4._formats import Quantization

VARIANTS = {
    "plain": {},
    "row-scaled": {"row_scaled": True},
    "hadamard": {"hadamard": True},
    "stochastic": {"key": 7},
    "hadamard stochastic": {"hadamard": True, "key": 7},
    "tiles": {"block": (16, 16)},
    "four-over-six": {"four_over_six": fp4.FourOverSix()},
    "four-over-six mse": {"four_over_six": fp4.FourOverSix(448, "MSE")},
    "four-over-six tiles": {"four_over_six": fp4.FourOverSix(), "block": (16, 16)},
    "row-scaled four-over-six": {"row_scaled": True, "four_over_six": fp4.FourOverSix()},
}
SHAPES = [(1, 16), (5, 48), (16, 64), (33, 50), (128, 256), (257, 272), (96, 1), (0, 32), (32, 0), (300, 4096)]


def bits(tree):
    return [np.atleast_1d(np.asarray(leaf)).view(np.uint8) for leaf in jax.tree.leaves(tree)]


def assert_same(got, want, what=""):
    for a, b in zip(bits(got), bits(want), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=str(what), strict=True)


def normal(shape, seed=0, dtype=jnp.float32, spread=1.0):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.exp(spread * rng.standard_normal((*shape[:-1], 1)))
    return np.asarray(jnp.asarray(values, jnp.float32).astype(dtype))


def flags_of(variant):
    flags = dict(VARIANTS[variant])
    return flags | ({"key": jax.random.key_data(jax.random.key(flags["key"]))} if "key" in flags else {})


def on(device, function, *arguments):
    with jax.default_device(device):
        return jax.block_until_ready(function(*jax.device_put(arguments, device)))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("variant", VARIANTS)
def test_both_directions_equal_the_cpu(gpu, cpu, variant, dtype):
    for seed, shape in enumerate(SHAPES):
        quantize = jax.jit(functools.partial(fp4.quantize_transpose, **flags_of(variant)))
        x = normal(shape, seed, dtype)
        assert_same(on(gpu, quantize, x), on(cpu, quantize, x), shape)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("axis", [-1, 0])
def test_one_direction_equals_the_cpu(gpu, cpu, variant, axis):
    flags = flags_of(variant)
    if axis == -1:
        flags.pop("hadamard", None)
    for seed, shape in enumerate(SHAPES):
        quantize = jax.jit(functools.partial(fp4.quantize, axis=axis, **flags))
        x = normal(shape, seed, jnp.bfloat16)
        assert_same(on(gpu, quantize, x), on(cpu, quantize, x), shape)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if "tiles" not in v])
def test_groups_equal_the_cpu(gpu, cpu, variant):
    quantize = jax.jit(lambda x, s: fp4.quantize_transpose(x, group_sizes=s, **flags_of(variant)))
    for seed, sizes in enumerate(
        [[8, 0, 8, 0], [1, 17, 31, 33, 127, 129], [44, 20], [0, 0, 0], [2**31 - 1, 5, -7], [-(2**31), 70, 3], [200]]
    ):
        x = normal((160, 80), seed, jnp.bfloat16).copy()
        x[min(160, sum(max(0, s) for s in sizes)) :] = np.nan
        sizes = np.asarray(sizes, np.int32)
        assert_same(on(gpu, quantize, x, sizes), on(cpu, quantize, x, sizes), sizes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("flags", [{}, {"row_scaled": True}, {"hadamard": True}], ids=str)
@pytest.mark.parametrize("axes", [(-1,), (0,), (-1, 0)], ids=str)
def test_the_amax_alone_equals_the_cpu(gpu, cpu, flags, axes, dtype):
    """Of tensors, of groups and of a batch of grouped ones, with rows that are not read; twice in a program."""
    amax = functools.partial(_ffi.amax, q=Quantization(**flags, compute_dtype=jnp.dtype(dtype).name), axes=axes)
    twice = jax.jit(lambda x, sizes: (amax(x, sizes), amax(2 * x, sizes)))
    for seed, shape in enumerate([*SHAPES, (3, 40, 72), (2, 2, 17, 256)]):
        x = normal(shape, seed, dtype)
        assert_same(on(gpu, twice, x, None), on(cpu, twice, x, None), shape)
    sizes = np.int32([[100, 0, 33, 7, 100], [5, -3, 64, 0, 16]])
    for k in (96, 50, 4096):
        x = normal((2, 300, k), k, dtype).copy()
        x[0, 240:], x[1, 85:], x[0, 70, 3] = np.nan, np.nan, np.inf
        assert_same(on(gpu, twice, x, sizes), on(cpu, twice, x, sizes), k)
        assert_same(on(gpu, twice, x[0], sizes[0]), on(cpu, twice, x[0], sizes[0]), k)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize(
    ("k", "dtype"), [(96, jnp.bfloat16), (160, jnp.float32), (50, jnp.bfloat16)], ids=["tiles", "float32 tiles", "any"]
)
def test_parts_of_groups_equal_the_cpu(gpu, cpu, k, dtype, hadamard):
    """A seed with where the rows of each group begin in the whole group, and the rows of that.

    The tile kernel and the one for any problem, both forms and each, with blocks and groups that the former does
    again: not finite, or of an amax near the denormals.
    """
    rng = np.random.default_rng(k)
    q = Quantization(hadamard=hadamard, compute_dtype="bfloat16", k_total=5000)
    both = jax.jit(functools.partial(_ffi.quantize_transpose, q=q))
    each = [
        jax.jit(functools.partial(_ffi.quantize, q=replace(q, axis=a, hadamard=hadamard and a == 0))) for a in (-1, 0)
    ]
    for most in (40, 3000, 2**32 - 1000):
        x = normal((2, 300, k), k, dtype).copy()
        x[0, 70, 3], x[1, 200:] = np.inf, x[1, 200:] * 2.0**-120
        sizes = np.int32([[100, 0, 33, 7, 150], [5, 195, 64, 0, 16]])
        seed = rng.integers(0, most, (2, 4 + 2 * sizes.shape[1]), np.uint32)
        seed[:, 3] -= seed[:, 3] % 16
        assert_same(on(gpu, both, x, None, None, seed, sizes), on(cpu, both, x, None, None, seed, sizes), most)
        for one in each:
            assert_same(on(gpu, one, x, None, seed, sizes), on(cpu, one, x, None, seed, sizes), most)


def test_special_values_equal_the_cpu(gpu, cpu):
    x = normal((64, 96), 3).copy()
    x[0, 3], x[5, 40], x[20, 90], x[33, :], x[40:56, 16:32] = np.nan, np.inf, -np.inf, -0.0, 0
    for scale in (1.0, 1e-41, 1e-38, 1e38, 2.0**-130):
        for flags in ({}, {"row_scaled": True}, {"block": (16, 16)}, {"hadamard": True}):
            quantize = jax.jit(functools.partial(fp4.quantize_transpose, **flags))
            y = (x * np.float32(scale)).astype(np.float32)
            assert_same(on(gpu, quantize, y), on(cpu, quantize, y), (scale, flags))


@pytest.mark.parametrize("m", [1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025])
def test_any_row_count(gpu, cpu, m):
    quantize = jax.jit(fp4.quantize_transpose)
    x = normal((m, 2048), m, jnp.bfloat16)
    got = on(gpu, quantize, x)
    assert_same(got, on(cpu, quantize, x), m)
    assert (np.asarray(got[0].block_scale).view(np.uint8) != 0).all()


@pytest.mark.parametrize("k", [16, 32, 48, 64, 96, 112, 128, 192, 256, 384, 448, 512])
def test_any_column_count(gpu, cpu, k):
    """B6, and A9 with it: m=1025, k=512."""
    for variant in VARIANTS:
        quantize = jax.jit(functools.partial(fp4.quantize_transpose, **flags_of(variant)))
        x = normal((1025, k), k, jnp.bfloat16)
        assert_same(on(gpu, quantize, x), on(cpu, quantize, x), variant)


def test_a_large_tensor_equals_the_cpu(gpu, cpu):
    """More than the thread blocks of the amax pass take at once, so that each of them takes several pieces."""
    x = normal((4096, 8192), 9, jnp.bfloat16)
    for sizes in (None, np.asarray([1000, 0, 17, 2500], np.int32)):
        quantize = jax.jit(lambda x, s: fp4.quantize_transpose(x, group_sizes=s))
        assert_same(on(gpu, quantize, x, sizes), on(cpu, quantize, x, sizes), sizes)


def into_poisoned_memory(device, function, *arguments):
    """The outputs of jitted `function`, written over donated buffers full of 0x7F; scratch was full of them before."""

    def poison(like):
        count = like.size * like.dtype.itemsize
        return np.full(count, 0x7F, np.uint8).view(like.dtype).reshape(like.shape)

    donated = jax.tree.map(poison, jax.eval_shape(function, *arguments))
    over = jax.jit(lambda _, *arguments: function(*arguments), donate_argnums=0, keep_unused=True)
    jax.block_until_ready(jax.device_put(np.full(1 << 26, 0x7F, np.uint8), device)).delete()
    return on(device, over, donated, *arguments)


@pytest.mark.parametrize("variant", VARIANTS)
def test_poisoned_outputs(gpu, cpu, variant):
    """A6: every byte of the outputs is written."""
    for seed, shape in enumerate([(5, 48), (5, 50), (17, 33), (300, 200)]):
        x = normal(shape, seed, jnp.bfloat16)
        quantize = functools.partial(fp4.quantize_transpose, **flags_of(variant))
        assert_same(into_poisoned_memory(gpu, quantize, x), on(cpu, jax.jit(quantize), x), shape)


def test_poisoned_outputs_of_groups_and_of_dequantize(gpu, cpu):
    """A7: what belongs to no group is written as well."""
    x = normal((64, 80), 5, jnp.bfloat16)
    quantize = lambda x, s: fp4.quantize_transpose(x, group_sizes=s, hadamard=True)  # noqa: E731
    for sizes in ([1, 0, 31, 3], [8, 0, 8, 0], [0, 0, 0, 0]):
        sizes = np.asarray(sizes, np.int32)
        forms = on(cpu, jax.jit(quantize), x, sizes)
        assert_same(into_poisoned_memory(gpu, quantize, x, sizes), forms, sizes)
        decode = lambda q: fp4.dequantize(q, jnp.float32)  # noqa: E731
        values = on(cpu, jax.jit(decode), forms[0])
        assert np.isfinite(values).all()
        assert_same(into_poisoned_memory(gpu, decode, forms[0]), values, sizes)


def test_stochastic_rounding_is_unbiased(gpu):
    """B1: the mean over 4096 keys is x within 3 sigma, and a random byte is a 256th of a step."""
    x = np.linspace(-5.9, 5.9, 32, dtype=np.float32).reshape(2, 16)
    x[:, 0] = 6.0
    amax = np.float32(6 * 448)  # block scales 1 for a block maximum of 6
    draw = jax.vmap(lambda key, x: fp4.dequantize(fp4.quantize(x, key=key, amax=amax)), (0, None))
    values = np.asarray(on(gpu, jax.jit(draw), jax.random.split(jax.random.key(0), 4096), x), np.float64)
    assert (np.abs(values.mean(0) - x) <= 3 * values.std(0) / 64 + 2 / 512).all()


@pytest.mark.parametrize("path", golden_files("nvfp4_*"), ids=lambda p: p.stem)
def test_golden_files(gpu, cpu, path):
    """What the CPU handlers make of a golden file's x, which tests/test_ops.py holds to the file."""
    file = load(path)
    cfg = file["cfg"]
    four = fp4.FourOverSix(cfg.get("e4m3", 256), cfg.get("mode", "MAE")) if cfg.get("f46") else None
    flags = dict(block=tuple(cfg["tile"]), row_scaled=cfg.get("row_scaled", False), four_over_six=four)
    quantize = jax.jit(functools.partial(fp4.quantize_transpose, hadamard=cfg.get("rht", False), **flags))
    assert_same(on(gpu, quantize, file["x"]), on(cpu, quantize, file["x"]), path.stem)


def test_given_amax(gpu, cpu):
    x, amax = normal((70, 90), 1, jnp.bfloat16), np.float32(0.75)
    quantize = jax.jit(lambda x, a: fp4.quantize_transpose(x, amax=a))
    assert_same(on(gpu, quantize, x, amax), on(cpu, quantize, x, amax))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: jnp.dtype(d).name)
def test_dequantize_equals_the_cpu(gpu, cpu, dtype):
    for seed, shape in enumerate(SHAPES):
        for row_scaled in (False, True):
            q = on(cpu, jax.jit(functools.partial(fp4.quantize, row_scaled=row_scaled)), normal(shape, seed))
            dequantize = jax.jit(functools.partial(fp4.dequantize, dtype=dtype))
            np.testing.assert_array_equal(*(np.asarray(on(d, dequantize, q), np.float32) for d in (gpu, cpu)))


def test_vmap_is_one_call(gpu, cpu):
    x = normal((3, 40, 64), 2, jnp.bfloat16)
    quantize = jax.jit(jax.vmap(fp4.quantize_transpose))
    assert_same(on(gpu, quantize, x), on(cpu, quantize, x))


def test_replay_honours_new_sizes(gpu, cpu):
    """A jitted loop is captured as a CUDA graph once and replayed; its sizes are data."""

    @jax.jit
    def last(x, sizes):
        def body(_, carry):
            q = fp4.quantize(x, axis=0, group_sizes=sizes)
            return carry[0] + jnp.sum(q.codes.astype(jnp.int32)), q.amax

        return jax.lax.fori_loop(0, 5, body, (jnp.int32(0), jnp.zeros(3)))

    x = normal((96, 64), 4, jnp.bfloat16)
    for sizes in itertools.permutations([10, 30, 50]):
        sizes = np.asarray(sizes, np.int32)
        assert_same(on(gpu, last, x, sizes), on(cpu, last, x, sizes), sizes)


def test_threads_share_nothing(gpu, cpu):
    quantize = jax.jit(functools.partial(fp4.quantize_transpose, hadamard=True))
    inputs = [normal((256, 512), seed, jnp.bfloat16) for seed in range(6)]
    want = [on(cpu, quantize, x) for x in inputs]
    with ThreadPoolExecutor(len(inputs)) as pool:
        got = list(pool.map(lambda x: [on(gpu, quantize, x) for _ in range(5)][-1], inputs))
    for a, b in zip(got, want, strict=True):
        assert_same(a, b)


def test_programs_in_flight_share_nothing(gpu, cpu):
    """Two threads enqueue different programs, each with scratch of its own, and wait at the end only.

    JAX has one stream for each device and process; tests/cpp/fuzz_cuda.cu runs two at once.
    """
    sizes = np.asarray([100, 0, 7, 90], np.int32)
    grouped = jax.jit(lambda x: fp4.quantize_transpose(x, group_sizes=sizes))
    transformed = jax.jit(functools.partial(fp4.quantize_transpose, hadamard=True))
    inputs = [normal((200, 512), seed, jnp.bfloat16) for seed in range(20)]
    programs = grouped, transformed

    def run(program):
        return [program(x) for x in jax.device_put(inputs, gpu)]

    with ThreadPoolExecutor(len(programs)) as pool:
        got = list(pool.map(run, programs))
    for program, results in zip(programs, got, strict=True):
        for x, result in zip(inputs, results, strict=True):
            assert_same(result, on(cpu, program, x))


def test_the_device_is_that_of_the_call(gpu, cpu):
    """Work for the second device while the first is the default one, with and without scratch."""
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.skip("needs two CUDA devices")
    sizes = np.asarray([100, 0, 7, 90], np.int32)
    x = normal((200, 512), 1, jnp.bfloat16)
    with jax.default_device(devices[0]):
        for flags in ({}, {"hadamard": True}, {"group_sizes": sizes}):
            quantize = jax.jit(functools.partial(fp4.quantize_transpose, **flags))
            want = on(cpu, quantize, x)
            for device in (devices[1], devices[0], devices[1]):
                got = quantize(jax.device_put(x, device))
                assert all(leaf.devices() == {device} for leaf in (got[0].codes, got[1].codes))
                assert_same(got, want, flags)
                back = jax.jit(fp4.dequantize)(got[0])
                assert back.devices() == {device}
                assert_same(back, on(cpu, jax.jit(fp4.dequantize), want[0]))


def test_a_named_handler_runs_or_raises(gpu, cpu):
    x = normal((16, 32))
    assert_same(
        on(gpu, functools.partial(fp4.quantize, implementation="cuda"), x),
        on(cpu, functools.partial(fp4.quantize, implementation="cpu"), x),
    )
    with pytest.raises(fp4.UnsupportedError, match="needs cuda because"):
        on(cpu, jax.jit(functools.partial(fp4.quantize, implementation="cuda")), x)
    with pytest.raises(fp4.UnsupportedError, match="needs cpu because"):
        on(gpu, jax.jit(functools.partial(fp4.quantize, implementation="cpu")), x)
    assert fp4.supported("quantize", "cuda")
    assert _ffi.cuda_archs() in fp4.supported("quantize", "cuda").reason


@pytest.mark.parametrize("mode", ["default", "unquant", "dequant"])
def test_dense_and_grouped_mlp_train(gpu, cpu, mode):
    """The layers as they are: XLA's products on decoded operands, the quantizers native."""
    recipe, key = fp4.NVFP4BlockScaling(backward_mode=mode), jax.random.key_data(jax.random.key(0))
    x, w = normal((64, 96), 0, jnp.bfloat16), normal((96, 32), 1)
    dense = jax.jit(jax.grad(lambda w, x: jnp.sum(fp4.dense(x, w, recipe=recipe, key=key).astype(jnp.float32) ** 2)))
    w1, w2, sizes = normal((3, 96, 64), 2), normal((3, 32, 48), 3), np.asarray([20, 0, 30], np.int32)

    def loss(w1, x):
        return jnp.sum(fp4.grouped_mlp(x, w1, w2, sizes, recipe=recipe, key=key).astype(jnp.float32) ** 2)

    for function, arguments in ((dense, (w, x)), (jax.jit(jax.grad(loss)), (w1, x))):
        a, b = (np.asarray(on(device, function, *arguments), np.float64) for device in (gpu, cpu))
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)  # a product may flip a code of the next operand
