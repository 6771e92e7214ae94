"""The 8-bit formats on a GPU, where kernels quantize what has no groups: the bits of the CPU, and products within the
bound of 1.10."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import by_experts, contraction_by_experts, error_of

import jax_fp4 as fp4

FORMATS = ("mxfp8", "float8_block", "float8")
SETTINGS = {
    "plain": {},
    "power_of_two": dict(power_of_two=True),
    "any scales": dict(power_of_two=False),
    "eps": dict(eps=0.5),
    "tiles": dict(block="square"),
}
RECIPES = {
    "mxfp8": lambda mode: fp4.MXFP8BlockScaling(mode),
    "mxfp8 hybrid tiles": lambda mode: fp4.MXFP8BlockScaling(mode, "HYBRID", two_dimensional_weights=True),
    "float8 current": lambda mode: fp4.Float8CurrentScaling(mode),
    "float8 block": lambda mode: fp4.Float8BlockScaling(mode),
    "float8 block, any scales": lambda mode: fp4.Float8BlockScaling(mode, power_of_two=False),
    "mixed": lambda mode: fp4.CustomRecipe(
        fp4.NVFP4BlockScaling("default", row_scaled_activation=True), fp4.MXFP8BlockScaling(mode), fp4.HIGH_PRECISION
    ),
}
SIZES = np.array([37, 0, 5, 150], np.int32)  # of 200 rows


def on(device, function, *arguments):
    with jax.default_device(device):
        return jax.block_until_ready(jax.jit(function)(*jax.device_put(arguments, device)))


def awkward(seed, *shape):
    """Values of all magnitudes, with zeros, Inf, NaN and what rounds at ties."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32) * 2.0 ** rng.integers(-60, 60, (shape[0], 1))
    flat = x.reshape(-1)
    flat[rng.integers(0, flat.size, flat.size // 20)] = 0
    flat[rng.integers(0, flat.size, flat.size // 9)] = rng.integers(-40, 40, flat.size // 9) / 16
    flat[:3] = np.inf, -np.inf, np.nan
    return x


def bits(q):
    return [np.asarray(leaf).view(f"u{leaf.dtype.itemsize}") for leaf in jax.tree.leaves(q)]


def settings_of(format, name) -> dict:
    settings = dict(SETTINGS[name])
    if format == "mxfp8" and set(settings) & {"power_of_two", "eps"}:
        pytest.skip("its scales are powers of two anyway")
    if settings.get("block") == "square":
        if format == "float8":
            pytest.skip("it has one scale")
        settings["block"] = (32, 32) if format == "mxfp8" else (128, 128)
    return settings


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("format", FORMATS)
def test_codes_and_scales_are_those_of_the_cpu(gpu, cpu, format, name, dtype):
    settings = settings_of(format, name)
    x = awkward(0, 200, 144)
    x = np.asarray(jnp.asarray(x if dtype == jnp.float32 else np.clip(x, -100, 100), dtype))
    for codes in ("", "_e5m2"):
        quantize = lambda x, codes=codes: fp4.quantize_transpose(x, format + codes, **settings)  # noqa: E731
        got, want = (on(device, quantize, x) for device in (gpu, cpu))
        for a, b in zip(got, want, strict=True):
            for ours, theirs in zip(bits(a), bits(b), strict=True):
                np.testing.assert_array_equal(ours, theirs)
            back = [np.asarray(on(device, lambda q: fp4.dequantize(q, jnp.float32), b)) for device in (gpu, cpu)]
            np.testing.assert_array_equal(*back)


def assert_same(gpu, cpu, function, *arguments):
    """Bits of the CPU's results."""
    got, want = (on(device, function, *arguments) for device in (gpu, cpu))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(bits(got), bits(want), strict=True):
        np.testing.assert_array_equal(ours, theirs)


EXTENTS = (1, 31, 33, 127, 129, 1000)


@pytest.mark.parametrize("format", [f + codes for f in FORMATS for codes in ("", "_e5m2")])
def test_any_extents_in_one_direction_and_in_both(gpu, cpu, format):
    """One kernel each: columns that are no multiple of 8 are read one by one, and per tensor so written."""
    shapes = [(m, k) for m in EXTENTS for k in (EXTENTS if m in (33, 129) else (40, 136))]
    for shape in [*shapes, (0, 40), (40, 0), (0, 0)]:
        x = awkward(2, *shape) if min(shape) > 0 and shape != (1, 1) else np.ones(shape, np.float32)
        for dtype in (jnp.float32, jnp.bfloat16):
            cast = lambda x, dtype=dtype: x.astype(dtype)  # noqa: E731
            assert_same(gpu, cpu, lambda x, c=cast: fp4.quantize_transpose(c(x), format), x)
            for axis in (-1, 0):
                assert_same(gpu, cpu, lambda x, c=cast, a=axis: fp4.quantize(c(x), format, axis=a), x)


@pytest.mark.parametrize("name", ["plain", "tiles"])
@pytest.mark.parametrize("format", FORMATS)
def test_batches(gpu, cpu, format, name):
    settings = settings_of(format, name)
    x = awkward(3, 5, 2 * 70 * 136).reshape(5, 2, 70, 136)
    assert_same(gpu, cpu, lambda x: fp4.quantize_transpose(x, format, batch_dims=2, **settings), x)
    assert_same(gpu, cpu, jax.vmap(lambda x: fp4.quantize(x, format, axis=0, batch_dims=1, **settings)), x)
    none = np.ones((0, 70, 136), np.float32)
    assert_same(gpu, cpu, lambda x: fp4.quantize_transpose(x, format, batch_dims=1, **settings), none)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_quantized_is_x_in_the_compute_dtype(gpu, cpu, format, x_dtype, dtype):
    for shape in ((70, 136), (70, 135)):
        x = np.asarray(jnp.asarray(np.clip(awkward(4, *shape), -6e4, 6e4)).astype(x_dtype))
        assert_same(gpu, cpu, lambda x: fp4.quantize_transpose(x, format, dtype=dtype), x)


@pytest.mark.parametrize("shape", [(3, 70, 136), (3, 70, 131), (3, 0, 1000), (3, 1000, 0)], ids=str)
@pytest.mark.parametrize("name", ["amax", "scale"])
@pytest.mark.parametrize("format", ["float8", "float8_e5m2"])
def test_given_amaxes_and_scales(gpu, cpu, format, name, shape):
    """Under a scale the amax is that of x, found on the way."""
    x = awkward(5, 3, shape[1] * shape[2]).reshape(shape) if 0 not in shape else np.ones(shape, np.float32)
    for given in ([1.0, 3.7, 1e-3], [448.0, 2.0**-130, 3e38], [0.0, np.inf, np.nan]):
        if name == "scale" and not np.all(np.isfinite(given) & (np.array(given) > 0)):
            continue
        given = np.array(given, np.float32)
        call = lambda x, given: fp4.quantize_transpose(x, format, batch_dims=1, **{name: given})  # noqa: E731
        assert_same(gpu, cpu, call, x, given)
        for axis in (-1, 0):
            alone = lambda x, given, a=axis: fp4.quantize(x, format, axis=a, batch_dims=1, **{name: given})  # noqa: E731
            assert_same(gpu, cpu, alone, x, given)


@pytest.mark.parametrize("codes", ["", "_e5m2"])
def test_every_code_of_the_conversion(gpu, cpu, codes):
    """Under scale 1 codes are the conversion itself, an instruction where there is one: all bfloat16 and float16, and
    float32 of each exponent and sign with the bits that rounding looks at, and random ones."""
    scale = np.float32(1)
    every = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    rest = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    near = ((every.astype(np.uint32) << 16)[..., None] | rest).reshape(256, -1).view(np.float32)
    some = np.random.default_rng(6).integers(0, 1 << 32, (1024, 4096), np.uint32).view(np.float32)
    for x in (every.view(jnp.bfloat16), every.view(np.float16), near, some):
        assert_same(gpu, cpu, lambda x: fp4.quantize_transpose(x, "float8" + codes, scale=scale), x)


@pytest.mark.parametrize("format", FORMATS)
def test_calls_in_a_loop_reuse_their_memory(gpu, cpu, format):
    """The amax starts anew in each, also where XLA replays a graph."""
    x = np.abs(awkward(7, 64, 136))[3:]
    step = lambda i, x: fp4.dequantize(fp4.quantize(x * 0.5, format), jnp.float32)  # noqa: E731
    assert_same(gpu, cpu, lambda x: jax.lax.fori_loop(0, 6, step, x), x)


@pytest.mark.parametrize("format", FORMATS)
def test_groups_are_those_of_the_cpu(gpu, cpu, format):
    x = awkward(1, 200, 96)
    x[192:] = np.nan
    quantize = lambda x, sizes: fp4.quantize_transpose(x, format, group_sizes=sizes)  # noqa: E731
    got, want = (on(device, quantize, x, SIZES) for device in (gpu, cpu))
    for ours, theirs in zip(bits(got), bits(want), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def operands():
    """x, w and dy of four groups."""
    shapes = (200, 96), (4, 96, 72), (200, 72)
    return [np.array(jax.random.normal(jax.random.key(seed), shape)) for seed, shape in enumerate(shapes)]


def values(q):
    return np.asarray(fp4.dequantize(q, jnp.float32), np.float64)


@pytest.mark.parametrize(("m", "k", "bound"), [(256, 1024, 1e-6), (256, 8192, 2e-5), (4096, 4096, 2e-5)])
@pytest.mark.parametrize("format", [*FORMATS, "float8_e5m2", "any scales"])
def test_products(gpu, cpu, format, m, k, bound):
    """numerics 1.10. XLA may hand products of 8-bit operands to 8-bit tensor cores, which keep fewer bits of a sum."""
    flags = dict(format="float8_block", power_of_two=False) if format == "any scales" else dict(format=format)
    x, w = (np.asarray(jax.random.normal(jax.random.key(i), s)) for i, s in ((0, (m, k)), (1, (k, m // 2))))
    with jax.default_device(cpu):
        lhs, rhs = fp4.quantize(x, **flags), fp4.quantize(w, axis=0, **flags)
        want = values(lhs)[::16] @ values(rhs)
    got = on(gpu, lambda a, b: fp4.matmul(a, b, preferred_element_type=jnp.float32), lhs, rhs)
    error = error_of(got[::16], want)
    print(f"{format} m={m} k={k}: {error:.1e}")
    assert error <= bound


@pytest.mark.parametrize("format", [*FORMATS, "any scales"])
def test_products_of_groups(gpu, cpu, format):
    flags = dict(format="float8_block", power_of_two=False) if format == "any scales" else dict(format=format)
    x, w, dy = (
        np.array(jax.random.normal(jax.random.key(i), s)) for i, s in enumerate(((200, 96), (4, 96, 72), (200, 72)))
    )
    x[192:] = dy[192:] = np.nan
    with jax.default_device(cpu):
        sizes = jnp.asarray(SIZES)
        lhs, rhs = fp4.quantize(x, group_sizes=sizes, **flags), fp4.quantize(w, axis=0, batch_dims=1, **flags)
        across = [fp4.quantize(a, axis=0, group_sizes=sizes, **flags) for a in (x, dy)]
        rows, columns = (
            by_experts(values(lhs), values(rhs), SIZES),
            contraction_by_experts(values(across[0]).T, values(across[1]), SIZES),
        )
    got = on(gpu, fp4.grouped_matmul, lhs, rhs, SIZES)
    assert error_of(got, rows) <= 1e-6 and not np.any(got[192:])
    assert error_of(on(gpu, lambda a, b, s: fp4.grouped_matmul(a.mT, b, s), *across, SIZES), columns) <= 1e-6


@pytest.mark.parametrize("mode", ["default", "unquant", "dequant"])
@pytest.mark.parametrize("name", RECIPES)
def test_layers_are_those_of_the_cpu(gpu, cpu, name, mode):
    """dense and grouped_dense: y and gradients; float32 operands, so that no rounding of bfloat16 hides anything."""
    recipe = RECIPES[name](mode)
    x, w, dy = (
        np.asarray(jax.random.normal(jax.random.key(i), s)) for i, s in enumerate(((200, 96), (4, 96, 72), (200, 72)))
    )
    x, w, dy = (a.astype(jnp.bfloat16) for a in (x, w, dy))

    def grouped(x, w, dy, sizes):
        y, pull = jax.vjp(lambda x, w: fp4.grouped_dense(x, w, sizes, recipe=recipe), x, w)
        return y, pull(dy)

    def dense(x, w, dy):
        y, pull = jax.vjp(lambda x, w: fp4.dense(x, w, recipe=recipe), x, w)
        return y, pull(dy)

    for function, arguments in ((grouped, (x, w, dy, SIZES)), (dense, (x, w[0], dy))):
        got, want = (on(device, function, *arguments) for device in (gpu, cpu))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert error_of(a, b) <= 2**-8  # bfloat16 results: a code of a gradient may hang on the last bit of another


def test_delayed_scaling(gpu, cpu):
    recipe = fp4.DelayedScaling("default", amax_history_len=3)
    x, w = (np.asarray(jax.random.normal(jax.random.key(i), s)) for i, s in enumerate(((64, 96), (96, 72))))

    def steps(x, w):
        state = fp4.delayed.init(recipe)
        for _ in range(3):
            loss = lambda w, s: jnp.sum(jnp.sin(fp4.dense(x, w, recipe=recipe, state=s)))  # noqa: E731
            dw, new = jax.grad(loss, (0, 1))(w, state)
            state = fp4.delayed.update(state, new)
        return dw, state

    (dw, got), (same, want) = (on(device, steps, x, w) for device in (gpu, cpu))
    for ours, theirs in ((got.x, want.x), (got.kernel, want.kernel)):
        np.testing.assert_array_equal(*(np.asarray(tensor.scale) for tensor in (ours, theirs)))
        np.testing.assert_array_equal(*(np.asarray(tensor.history) for tensor in (ours, theirs)))
    assert error_of(dw, same) <= 0.02
