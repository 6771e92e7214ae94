"""The specification: against the golden files, against slow code that follows the text, and jnp against NumPy."""

import itertools
import math
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_files import golden_files, load, quantization, without_negative_zero
from hypothesis import example, given

from jax_fp4 import reference
from jax_fp4._formats import BLOCK, E2M1_VALUES, HADAMARD_SIGNS, Quantization, padded

F32 = np.float32
FMAX = np.finfo(F32).max
TINY = F32(2.0**-149)
GRID = np.array(E2M1_VALUES, F32)
EVERY_BYTE = np.arange(256, dtype=np.uint8)
FLAGS = {
    "plain": {},
    "row_scaled": dict(row_scaled=True),
    "tiles": dict(tile=16),
    "hadamard": dict(hadamard=True),
    "mae": dict(four_over_six="MAE", bound=256),
    "mse": dict(four_over_six="MSE", bound=256),
    "mse_448": dict(four_over_six="MSE", bound=448),
    "mae_tiles": dict(four_over_six="MAE", bound=448, tile=16),
    "mse_tiles": dict(four_over_six="MSE", bound=256, tile=16),
    "mae_rows": dict(four_over_six="MAE", bound=256, row_scaled=True),
}
every_flag = pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
both_axes = pytest.mark.parametrize("axis", [-1, 0])


def bits(a):
    a = np.asarray(a)
    return a.view(f"u{a.dtype.itemsize}")


def assert_same(got, want, what=""):
    """Arrays, or tuples of them, equal in type, shape and every bit."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, what
        np.testing.assert_array_equal(bits(a), bits(b), err_msg=str(what), strict=True)


JITTED = {
    "matmul": jax.jit(reference.matmul, static_argnums=(2, 3)),
    "quantize": jax.jit(reference.quantize, static_argnums=4),
    "cast_e2m1": jax.jit(reference.cast_e2m1),
    "cast_e2m1_stochastic": jax.jit(reference.cast_e2m1_stochastic),
    "cast_e4m3": jax.jit(reference.cast_e4m3),
    "decode_e2m1": jax.jit(reference.decode_e2m1),
    "decode_e4m3": jax.jit(reference.decode_e4m3),
    "philox4x32": jax.jit(reference.philox4x32),
    "random_bytes": jax.jit(reference.random_bytes, static_argnums=(1, 2, 3, 4)),
    "dequantize": jax.jit(reference.dequantize, static_argnums=(3, 4, 5)),
    "swizzle": jax.jit(reference.swizzle),
    "unswizzle": jax.jit(reference.unswizzle, static_argnums=(1, 2)),
}
both_namespaces = pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jnp"])


def run(name, xp, *arguments):
    """A function of the reference on NumPy, or jitted."""
    return jax.tree.map(np.asarray, JITTED[name](*arguments)) if xp is jnp else getattr(reference, name)(*arguments)


def decoded(result, q, shape):
    codes, scale, amax = result
    return reference.dequantize(codes, scale, amax, q.bound_along(q.axis), shape[-1 if q.axis == -1 else -2], F32)


def normal(seed, *shape, spread=1.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(spread * rng.standard_normal(shape))).astype(F32)


# --- golden files ---


@pytest.mark.core
@pytest.mark.parametrize("path", golden_files("nvfp4_*"), ids=lambda p: p.stem)
def test_golden_quantize(path):
    file = load(path)
    x = file["x"]
    for axis, suffix in ((-1, ""), (0, "_t")):
        if f"data{suffix}" not in file:
            continue
        q = quantization(file["cfg"], axis, x.dtype.name)
        if q.hadamard and not file["cfg"].get("sign", True):  # signs twice are none
            x = (x * np.resize(np.array(HADAMARD_SIGNS, F32), len(x))[:, None]).astype(x.dtype)
        codes, scale, amax = reference.quantize(x, None, None, None, q)
        np.testing.assert_array_equal(without_negative_zero(codes), without_negative_zero(file[f"data{suffix}"]))
        np.testing.assert_array_equal(bits(scale), file[f"scale{suffix}"])
        np.testing.assert_array_equal(bits(amax).reshape(-1), bits(file[f"amax{suffix}"]))
        if axis == -1:
            np.testing.assert_array_equal(decoded((codes, scale, amax), q, x.shape), file["dequant"])
        if q.hadamard and "rht_t" in file:
            np.testing.assert_array_equal(reference.hadamard_transform(x.T), file["rht_t"])


@pytest.mark.parametrize("path", golden_files("gemm_*"), ids=lambda p: p.stem)
def test_golden_products(path):
    file = load(path)
    operands = {}
    for name, axis in itertools.product(("x", "w", "dy"), (-1, 0)):
        q, suffix = quantization(file["cfg"][name], axis), "_t" if axis == 0 else ""
        operands[name + suffix] = codes, scale, amax = reference.quantize(file[name], None, None, None, q)
        want = without_negative_zero(file[f"{name}_data{suffix}"])
        np.testing.assert_array_equal(without_negative_zero(codes), want)
        np.testing.assert_array_equal(bits(scale), file[f"{name}_scale{suffix}"])
        np.testing.assert_array_equal(bits(amax).reshape(-1), bits(file[f"{name}_amax{suffix}"]))
    # The weight and its gradient are [n, k] there.
    for product, lhs, rhs in (("y", "x", "w"), ("dx", "dy", "w_t"), ("dw", "dy_t", "x_t")):
        a, b = operands[lhs], operands[rhs]
        bounds = tuple(
            quantization(file["cfg"][n[:2].strip("_")], 0).bound_along(0 if "_t" in n else -1) for n in (lhs, rhs)
        )
        for dtype, name, tolerance in ((F32, "f32", 1e-6), (ml_dtypes.bfloat16, "bf16", 2**-8)):
            want = file[f"{product}_{name}"].astype(np.float64)
            for xp in (np, jnp):
                y = run("matmul", xp, a, b, bounds, dtype).astype(np.float64)
                assert np.linalg.norm(y - want) <= tolerance * np.linalg.norm(want), (product, name, xp)


@pytest.mark.parametrize("path", golden_files("cast_e2m1*"), ids=lambda p: p.stem)
def test_golden_cast_e2m1(path):
    file = load(path)
    got = reference.pack(reference.cast_e2m1(file["x"]))
    np.testing.assert_array_equal(without_negative_zero(got), without_negative_zero(file["packed"]))


@pytest.mark.parametrize("path", golden_files("cast_e4m3*"), ids=lambda p: p.stem)
def test_golden_cast_e4m3(path):
    file = load(path)
    np.testing.assert_array_equal(reference.cast_e4m3(file["x"]), file["code"])


@pytest.mark.parametrize("path", golden_files("sr_software*"), ids=lambda p: p.stem)
def test_golden_stochastic_rounding(path):
    """Every random byte."""
    file = load(path)
    x, byte = np.broadcast_arrays(file["x"][:, None], EVERY_BYTE)
    for xp in (np, jnp):
        np.testing.assert_array_equal(run("decode_e2m1", xp, run("cast_e2m1_stochastic", xp, x, byte)), file["out"])


@pytest.mark.parametrize("path", golden_files("philox*"), ids=lambda p: p.stem)
def test_golden_philox(path):
    """There: key = the two words of the seed; counter = (offset + i, subsequence), two words each."""
    file = load(path)
    seed, subsequence, offset = file["seed_sub_off"].T[:, :, None] + np.zeros(4, np.uint64)
    words = lambda v: [(v & 0xFFFFFFFF).astype(np.uint32), (v >> 32).astype(np.uint32)]  # noqa: E731
    key = np.stack(words(seed), -1)
    counter = np.stack(words(offset + np.arange(4, dtype=np.uint64)) + words(subsequence), -1)
    for xp in (np, jnp):
        np.testing.assert_array_equal(run("philox4x32", xp, key, counter), file["out"])


@pytest.mark.parametrize("path", golden_files("swizzle_*"), ids=lambda p: p.stem)
def test_golden_swizzle(path):
    file = load(path)
    got = reference.swizzle(file["compact"])
    np.testing.assert_array_equal(got, file["swizzled"])
    np.testing.assert_array_equal(reference.unswizzle(got, *file["padded"].shape), file["padded"])


# --- the text, written again as slowly as it reads ---


def e2m1_by_intervals(v):
    """The table of 1.1."""
    a = min(abs(float(v)), 6.0)
    upper = [(0.25, True), (0.75, False), (1.25, True), (1.75, False), (2.5, True), (3.5, False), (5, True)]
    code = sum(a > edge or (a == edge and not included) for edge, included in upper)
    return code + 8 * bool(np.signbit(v))


def e4m3_by_search(t):
    """The nearest of all E4M3 values, of two equally near the one with the even code."""
    t = min(float(t), 448.0)
    values = [((8 + c % 8) * 2.0 ** (c // 8 - 10)) if c >= 8 else c * 2.0**-9 for c in range(127)]
    return min(range(127), key=lambda c: (abs(values[c] - t), c % 2))


@np.errstate(all="ignore")
def by_hand(x, q):
    """1.2 and 1.8 for a 2-D float32 x along its rows, block after block: unpacked codes, scale bytes, amax."""
    t = q.tile
    x = np.pad(x, [(0, -x.shape[0] % t), (0, -x.shape[1] % BLOCK)])
    whole = F32(np.abs(x).max(initial=0))
    amax = np.abs(x).max(-1) if q.row_scaled else np.full(x.shape[0], whole)
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((x.shape[0], x.shape[1] // BLOCK), np.uint8)
    value = lambda s: F32(((8 + s % 8) * 2.0 ** (s // 8 - 10)) if s >= 8 else s * 2.0**-9)  # noqa: E731
    for i, j in itertools.product(range(0, x.shape[0], t), range(scales.shape[1])):
        block = x[i : i + t, BLOCK * j : BLOCK * (j + 1)]
        a, tensor = np.abs(block).max(), amax[i]
        encode = F32(1) if tensor == 0 else min(F32(6 * q.bound) / tensor, FMAX)
        decode = F32(1) / encode

        def candidate(s, block=block, decode=decode):
            enc = min(F32(1) / (value(s) * decode), FMAX)
            return s, np.array([[e2m1_by_intervals(v * enc) for v in row] for row in block], np.uint8)

        if not q.four_over_six:
            s, c = candidate(e4m3_by_search(min(a * (encode * (F32(1) / F32(6))), FMAX)))
        else:
            base, errors, tried = (a / F32(6)) * encode, [], []
            for scale in (base, base * F32(1.5)):
                s, c = candidate(e4m3_by_search(scale))
                sums = []
                for row, numbers in zip(block, c, strict=True):
                    total = F32(0)
                    for v, code in zip(row, numbers, strict=True):
                        signed = -GRID[code & 7] if code & 8 else GRID[code & 7]
                        d = ((signed * value(s)) * tensor) / F32(6 * q.bound) - v
                        total = total + (abs(d) if q.four_over_six == "MAE" else d * d)
                    sums.append(total)
                while len(sums) > 1:
                    half = len(sums) // 2
                    sums = [sums[r] + sums[r + half] for r in range(half)]
                errors.append(sums[0])
                tried.append((s, c))
            s, c = tried[1] if errors[1] < errors[0] else tried[0]
        scales[i : i + t, j], codes[i : i + t, BLOCK * j : BLOCK * (j + 1)] = s, c
    return codes, scales, amax if q.row_scaled else whole


@every_flag
@pytest.mark.parametrize("magnitude", [0, -30, -110, -128, -140, 100, 126])
def test_quantize_follows_the_text(flags, magnitude):
    """Scale by scale and element by element, from denormals to the largest numbers."""
    q = Quantization(**{**flags, "hadamard": False})
    x = np.clip(normal(magnitude + 200, 19, 37, spread=2.0) * np.float64(2.0**magnitude), -FMAX, FMAX).astype(F32)
    x[3, 16:32] = 0
    codes, scales, amax = by_hand(x, q)
    got = reference.quantize(x, None, None, None, q)
    np.testing.assert_array_equal(reference.unpack(got[0]), codes[:19])
    np.testing.assert_array_equal(bits(got[1]), scales[:19])
    np.testing.assert_array_equal(got[2], amax[:19] if q.row_scaled else amax)


@pytest.mark.core
def test_cast_e2m1_at_every_tie_and_its_neighbours():
    edges = np.array([*GRID, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, FMAX, TINY, 2.0**-126], F32)
    with np.errstate(over="ignore"):
        v = np.concatenate([edges, np.nextafter(edges, F32(0)), np.nextafter(edges, F32(np.inf))])
    v = np.concatenate([v, -v, [F32(-0.0), F32(np.inf)]])
    want = [e2m1_by_intervals(x) for x in v]
    for xp in (np, jnp):
        np.testing.assert_array_equal(run("cast_e2m1", xp, v), want)


def test_cast_e2m1_of_every_bfloat16():
    v = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(F32)
    v = v[~np.isnan(v)]
    np.testing.assert_array_equal(reference.cast_e2m1(v), [e2m1_by_intervals(x) for x in v])


def test_e2m1_codes():
    codes = np.arange(16, dtype=np.uint8)
    for xp in (np, jnp):
        values = run("decode_e2m1", xp, codes)
        assert_same(values, np.concatenate([GRID, -GRID]))
        np.testing.assert_array_equal(run("cast_e2m1", xp, values), codes)
        packed = reference.pack(xp.asarray(codes))
        assert packed[1] == 0x32  # even index in the low nibble
        np.testing.assert_array_equal(reference.unpack(packed), codes)


def test_every_e4m3_code_and_midpoint():
    """A19: above 448 it is 448, not NaN."""
    values = reference.decode_e4m3(EVERY_BYTE)
    np.testing.assert_array_equal(values, EVERY_BYTE.view(ml_dtypes.float8_e4m3fn).astype(F32))
    np.testing.assert_array_equal(run("decode_e4m3", jnp, EVERY_BYTE), values)
    finite = EVERY_BYTE[~np.isnan(values)]
    np.testing.assert_array_equal(reference.cast_e4m3(values[finite]), finite)
    assert reference.cast_e4m3(np.array([np.nan, -np.nan], F32)).tolist() == [0x7F, 0x7F]
    low, high = values[:126], values[1:127]
    middle = (low + high) / 2
    even = np.arange(126) + np.arange(126) % 2
    big = np.array([448, 449, 464, 465, 470, 1e9, FMAX, np.inf], F32)
    below, above = np.nextafter(middle, F32(0)), np.nextafter(middle, F32(500))
    v = np.concatenate([middle, below, above, big, -big])
    want = np.concatenate([even, np.arange(126), np.arange(126) + 1, [0x7E] * 8, [0xFE] * 8])
    for xp in (np, jnp):
        np.testing.assert_array_equal(run("cast_e4m3", xp, v), want)


# --- shapes, directions, tiles ---


@every_flag
@both_axes
@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0), (1, 1), (5, 48), (16, 17), (2, 3, 33, 20), (0, 16, 16)])
def test_shapes(shape, axis, flags):
    """A6, A23: any extent, any leading dimensions, each a tensor of its own; the type of every result."""
    q = Quantization(axis=axis, **flags)
    *batch, m, k = shape
    r, b = (m, k) if axis == -1 else (k, m)
    x = normal(0, *shape)
    codes, scale, amax = result = reference.quantize(x, None, None, None, q)
    assert (codes.shape, codes.dtype) == ((*batch, r, padded(b) // 2), np.uint8)
    assert (scale.shape, scale.dtype) == ((*batch, r, padded(b) // 16), ml_dtypes.float8_e4m3fn)
    assert (amax.shape, amax.dtype) == ((*batch, r) if q.row_scaled else tuple(batch), F32)
    assert decoded(result, q, shape).shape == (*batch, r, b)
    for index in np.ndindex(*batch):
        assert_same(jax.tree.map(lambda a, i=index: a[i], result), reference.quantize(x[index], None, None, None, q))
    if not q.hadamard:  # the transform fills the padding
        assert not reference.unpack(codes)[..., b:].any()


@example((33, 50), "bfloat16", 0)
@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.integers(0, 99),
)
def test_column_wise_is_the_transpose_quantized_along_rows(shape, compute_dtype, seed):
    """1.3. A four-over-six tile, which decides along the rows of x, is the exception."""
    x = normal(seed, *shape)
    for name, flags in FLAGS.items():
        if not (flags.get("four_over_six") and flags.get("tile")):
            q = Quantization(axis=0, compute_dtype=compute_dtype, **flags)
            along_rows = replace(q, axis=-1, bound=q.bound_along(0), four_over_six=q.column_four_over_six)
            transposed = np.ascontiguousarray(x.T)
            assert_same(
                reference.quantize(x, None, None, None, q),
                reference.quantize(transposed, None, None, None, along_rows),
                name,
            )


@pytest.mark.parametrize("flags", [f for f in FLAGS.values() if f.get("tile")])
@given(st.tuples(st.integers(1, 40), st.integers(1, 40)), st.integers(0, 99))
def test_tiles_have_one_scale_and_the_same_codes_both_ways(flags, shape, seed):
    """1.5, and 1.8: the column-wise copy takes the row-wise choice."""
    q, (m, k) = Quantization(**flags), shape
    codes, scale, amax, codes_t, scale_t, amax_t = reference.quantize_transpose(
        normal(seed, m, k), None, None, None, None, q
    )
    np.testing.assert_array_equal(reference.unpack(codes)[:, :k], reference.unpack(codes_t)[:, :m].T)
    for tile_rows in range(0, m, 16):
        for tile_columns in range(0, k, 16):
            one = bits(scale)[tile_rows : tile_rows + 16, tile_columns // 16]
            other = bits(scale_t)[tile_columns : tile_columns + 16, tile_rows // 16]
            assert set(one) == set(other)
            assert len(set(one)) == 1
    assert amax == amax_t


@every_flag
def test_quantize_transpose_is_both_quantize_calls(flags):
    x, q = normal(1, 2, 33, 40), Quantization(**flags)
    row = reference.quantize(x, None, None, None, replace(q, hadamard=False))
    column = reference.quantize(x, None, None, None, replace(q, axis=0))
    assert_same(reference.quantize_transpose(x, None, None, None, None, q), (*row, *column))
    if q.row_scaled:  # the column-wise copy is made without four-over-six
        assert_same(column, reference.quantize(x, None, None, None, Quantization(axis=0, row_scaled=True)))


@every_flag
@pytest.mark.parametrize("k", [16, 32, 48, 64, 96, 112, 128, 192, 256, 384, 448, 512])
def test_every_usual_extent(flags, k):
    """B6: the error of each element is below half a step of its block."""
    x = normal(k, 32, k)
    q = Quantization(**{**flags, "hadamard": False})
    error = np.abs(decoded(reference.quantize(x, None, None, None, q), q, x.shape) - x).reshape(2, 16, k // 16, 16)
    axes = (1, 3) if q.tile == 16 else (3,)
    peak = np.abs(x).reshape(error.shape).max(axes, keepdims=True)
    assert (error <= peak * (1 / 6 + 1 / 8)).all()  # half of the step 4..6, and the scale's own rounding


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
@every_flag
def test_master_weights_are_rounded_first(flags, compute_dtype):
    x = normal(2, 40, 50) * F32(1e-5)  # float16 denormals
    x[0, 0] = 1e38  # infinite in float16
    q = Quantization(compute_dtype=compute_dtype, **flags)
    with np.errstate(over="ignore"):
        rounded = x.astype(compute_dtype)
    assert_same(reference.quantize(x, None, None, None, q), reference.quantize(rounded, None, None, None, q))
    assert_same(
        reference.quantize(rounded.astype(F32), None, None, None, q), reference.quantize(rounded, None, None, None, q)
    )


# --- values (faults.md) ---


def test_scale_underflow():
    """A1: a zero block is exactly 0; a tiny block underflows, saturates its codes and decodes to 0."""
    x = np.zeros((16, 64), F32)
    x[:, :16], x[:, 32:48] = 1, 1e-7
    q = Quantization(compute_dtype="bfloat16")
    codes, scale, amax = reference.quantize(x.astype(ml_dtypes.bfloat16), None, None, None, q)
    got = reference.dequantize(codes, scale, amax, 448, 64, F32)
    assert (got[:, :16] == 1).all()
    assert not got[:, 16:].any()
    assert not bits(scale)[:, 1:].any()
    assert (reference.unpack(codes)[:, 32:48] == 7).all()
    assert not reference.unpack(codes)[:, 16:32].any()


@every_flag
def test_zeros(flags):
    """A2: and a negative zero keeps its sign."""
    q = Quantization(**flags)
    x = np.zeros((32, 64), F32)
    codes, scale, amax = reference.quantize(x, None, None, None, q)
    assert not codes.any()
    assert not bits(scale).any()
    assert not amax.any()
    assert not decoded((codes, scale, amax), q, x.shape).any()
    if not q.hadamard:
        assert (reference.quantize(-x, None, None, None, q)[0] == 0x88).all()


def test_tensor_scale_is_in_the_result():
    """A16: the same codes under twice the amax decode to exactly twice the values."""
    codes, scale, amax = reference.quantize(normal(3, 16, 64), None, None, None, Quantization())
    a, b = (reference.dequantize(codes, scale, f * amax, 448, 64, F32) for f in (F32(1), F32(2)))
    np.testing.assert_array_equal(b, 2 * a)
    one, two = (
        reference.matmul((codes, scale, f * amax), (codes, scale, amax), (448, 448), F32) for f in (F32(1), F32(2))
    )
    np.testing.assert_array_equal(two, 2 * one)


@every_flag
def test_scale_invariance(flags):
    """A18: x and x * 2^-20 have the same codes, scales and relative error."""
    x, q = normal(4, 32, 64), Quantization(**flags)
    a, b = (reference.quantize(v, None, None, None, q) for v in (x, x * F32(2.0**-20)))
    assert_same(a[:2], b[:2])
    np.testing.assert_array_equal(decoded(b, q, x.shape), decoded(a, q, x.shape) * F32(2.0**-20))


@every_flag
@both_axes
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_broken_block_is_seen_and_the_others_stay_finite(flags, axis, value):
    """A26."""
    q = Quantization(axis=axis, **flags)
    x = normal(5, 48, 64)
    x[17, 3] = value
    codes, scale, amax = result = reference.quantize(x, None, None, None, q)
    broken = bits(scale) == 0x7F
    assert not reference.unpack(codes).reshape(*scale.shape, 16)[broken].any()
    expected = np.zeros(x.shape, bool)
    rows, columns = (slice(16, 32), slice(0, 16)) if q.tile == 16 else (17, slice(0, 16))
    if axis == 0 and q.tile == 1:
        rows, columns = slice(16, 32), 3
    elif q.hadamard:
        rows, columns = 17, slice(0, 16)
    expected[rows, columns] = True
    expected = expected if axis == -1 else expected.T
    got = decoded(result, q, x.shape)
    np.testing.assert_array_equal(np.isnan(got), expected)
    assert np.isfinite(got[~expected]).all()
    where = (17 if axis == -1 else 3) if q.row_scaled else ()
    assert bits(amax)[where] == (0x7F800000 if np.isinf(value) else 0x7FC00000)
    if q.row_scaled:
        assert np.isfinite(np.delete(amax, where)).all()
    # A non-finite amax counts as 6B: the tensor scale is 1.
    rest = np.where(expected if axis == -1 else expected.T, F32(0), x)
    given = np.where(np.isfinite(amax), amax, F32(6 * q.bound_along(axis)))
    other = reference.quantize(rest, given, None, None, q)
    assert_same(codes, other[0])
    np.testing.assert_array_equal(bits(scale)[~broken], bits(other[1])[~broken])


@every_flag
@both_axes
def test_a_given_amax(flags, axis):
    q, x = Quantization(axis=axis, **flags), normal(6, 33, 40)
    result = reference.quantize(x, None, None, None, q)
    assert_same(reference.quantize(x, result[2], None, None, q), result)
    assert_same(reference.amax(x, None, q), result[2])
    half = result[2] / 2
    codes, scale, returned = reference.quantize(x, half, None, None, q)
    assert_same(returned, half)
    assert np.abs(reference.dequantize(codes, scale, half, q.bound_along(axis), 1, F32)).max() <= half.max() * F32(1.75)
    payload = np.full(half.shape, 0x7F812345, np.uint32).view(F32)
    assert set(bits(reference.quantize(x, payload, None, None, q)[2]).reshape(-1)) == {0x7FC00000}


def test_refusals():
    x, seed = normal(7, 16, 32), np.zeros(4, np.uint32)
    for flags, key in (
        (dict(row_scaled=True, hadamard=True), None),
        (dict(row_scaled=True, tile=16), None),
        (dict(row_scaled=True), seed),
        (dict(four_over_six="MAE", hadamard=True), None),
        (dict(four_over_six="MAE"), seed),
    ):
        with pytest.raises(ValueError, match="needs one of the two"):
            reference.quantize(x, None, key, None, Quantization(**flags))
    with pytest.raises(ValueError, match="needs values >= 0"):
        reference.quantize(x, np.array(-1, F32), None, None, Quantization())
    with pytest.raises(ValueError, match=r"amax is of shape \(16,\); needs \(\)"):
        reference.quantize(x, np.ones(16, F32), None, None, Quantization())


def test_dequantize_overflows_as_the_golden_files_do():
    """1.9: above FMAX/448 a non-zero code decodes to Inf and a zero code to NaN. The product form never does."""
    codes = reference.pack(np.arange(16, dtype=np.uint8)[None])
    scale, amax = np.array([[0x7E]], np.uint8).view(ml_dtypes.float8_e4m3fn), np.array(8e35, F32)
    got = reference.dequantize(codes, scale, amax, 448, 16, F32)[0]
    assert np.isnan(got[[0, 8]]).all()
    assert np.isinf(np.delete(got, [0, 8])).all()
    product = reference.dequantize(codes, scale, None, 448, 16, ml_dtypes.bfloat16)
    np.testing.assert_array_equal(product[0].astype(F32), np.concatenate([GRID, -GRID]) * 448)


def test_code_times_scale_is_exact_in_every_dtype():
    codes = reference.pack(np.tile(np.arange(16, dtype=np.uint8), (127, 1)))
    scale = np.arange(127, dtype=np.uint8)[:, None].view(ml_dtypes.float8_e4m3fn)
    want = np.concatenate([GRID, -GRID]).astype(np.float64) * scale.astype(np.float64)
    for xp, dtype in itertools.product((np, jnp), (F32, ml_dtypes.bfloat16, np.float16)):
        got = run("dequantize", xp, codes, scale, None, 448, 16, dtype)
        np.testing.assert_array_equal(got.astype(np.float64), want)


# --- Hadamard ---


def test_hadamard_transform_is_the_matrix():
    """1.6, on integers, where every sum is exact; and of the identity it is the matrix itself."""
    popcount = np.array([[(i & j).bit_count() for j in range(16)] for i in range(16)])
    matrix = np.diag(HADAMARD_SIGNS) @ np.where(popcount % 2, -0.25, 0.25)
    np.testing.assert_array_equal(reference.hadamard_transform(np.eye(16, dtype=F32)), matrix)
    x = np.random.default_rng(8).integers(-16, 16, (5, 40)).astype(F32)
    want = (np.pad(x, [(0, 0), (0, 8)]).reshape(5, 3, 16) @ matrix).reshape(5, 48)
    np.testing.assert_array_equal(reference.hadamard_transform(x), want.astype(ml_dtypes.bfloat16).astype(F32))
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(16))


def test_hadamard_cancels_in_the_product():
    x, dy = (normal(seed, 40, n).astype(ml_dtypes.bfloat16) for seed, n in ((9, 32), (10, 24)))
    want = x.astype(np.float64).T @ dy.astype(np.float64)
    errors = []
    for hadamard in (False, True):
        q = Quantization(axis=0, hadamard=hadamard)
        dw = reference.matmul(*(reference.quantize(v, None, None, None, q) for v in (x, dy)), (448, 448), F32)
        errors.append(np.linalg.norm(dw - want) / np.linalg.norm(want))
    assert max(errors) < 0.2


# --- stochastic rounding ---


def seed_of(*words):
    return np.array([*words, 0, 0], np.uint32)


@given(st.lists(st.floats(-7, 7, width=32), min_size=1, max_size=8))
def test_stochastic_rounding_law(values):
    """1.7 with u*step + a rounded to float32 once: Python floats hold the exact sum where |v| > 2^-20."""
    v = np.array([x if abs(x) > 2**-20 else 0 for x in values], F32)
    got = reference.decode_e2m1(reference.cast_e2m1_stochastic(*np.broadcast_arrays(v[:, None], EVERY_BYTE)))
    for x, row in zip(v, got, strict=True):
        a = min(abs(float(x)), 6.0)
        step = 0.5 if a < 2 else 1.0 if a < 4 else 2.0
        want = [min(math.floor(float(F32(r / 256 * step + a)) / step) * step, 6.0) for r in range(256)]
        np.testing.assert_array_equal(np.abs(row), want)
        assert (np.signbit(row) == np.signbit(x)).all()


def test_stochastic_rounding_keeps_the_grid_and_the_mean():
    grid = np.concatenate([GRID, -GRID])
    codes = reference.cast_e2m1_stochastic(*np.broadcast_arrays(grid[:, None], EVERY_BYTE))
    np.testing.assert_array_equal(codes, np.broadcast_to(np.arange(16)[:, None], (16, 256)))
    v = np.arange(-6, 6, 1 / 128, dtype=F32)  # multiples of step/256 up to 2; beyond, within a byte of it
    mean = reference.decode_e2m1(reference.cast_e2m1_stochastic(*np.broadcast_arrays(v[:, None], EVERY_BYTE))).mean(1)
    assert np.abs(mean - v).max() <= 1 / 128
    np.testing.assert_array_equal(mean[np.abs(v) < 4], v[np.abs(v) < 4])


@both_axes
def test_unbiased_over_keys(axis):
    """B1. Bytes have 256 values, so the mean may be off by step/256 besides."""
    x = np.random.default_rng(11).uniform(-6, 6, (16, 16)).astype(F32)
    np.fill_diagonal(x, 6)  # in each block, so that x itself is what gets rounded to E2M1
    keys = np.zeros((4096, 4), np.uint32)
    keys[:, :2] = np.random.default_rng(12).integers(0, 2**32, (4096, 2))
    q = Quantization(axis=axis)
    got = decoded(reference.quantize(np.broadcast_to(x, (4096, 16, 16)), None, keys, None, q), q, x.shape)
    oriented = x if axis == -1 else x.T
    step = np.where(np.abs(oriented) < 2, 0.5, np.where(np.abs(oriented) < 4, 1, 2))
    off = np.abs(got.mean(0) - oriented) > 3 * got.std(0) / 64 + step / 256 + 1e-6
    assert off.sum() <= 3  # of 256; 0.7 expected beyond three sigma


def test_same_key_same_bits():
    """B2, and the directions draw differently."""
    x, q = normal(13, 64, 64), Quantization()
    first, again, other = (reference.quantize(x, None, seed_of(1, w), None, q)[0] for w in (2, 2, 3))
    assert_same(first, again)
    assert (reference.unpack(first) != reference.unpack(other)).mean() > 0.1
    square = (x + x.T) / 2
    row, column = (reference.quantize(square, None, seed_of(1, 2), None, Quantization(axis=a))[0] for a in (-1, 0))
    assert (row != column).any()


@both_axes
@pytest.mark.parametrize("flags", [{}, dict(tile=16), dict(hadamard=True)], ids=str)
def test_a_sharded_draw_equals_the_unsharded_one(axis, flags):
    q = Quantization(axis=axis, m_total=64, k_total=96, **flags)
    x = normal(14, 64, 96)
    whole = reference.quantize(x, None, seed_of(5, 6), None, q)
    for m, k in itertools.product(range(0, 64, 32), range(0, 96, 48)):
        seed = np.array([5, 6, m, k], np.uint32)
        codes, scale, _ = reference.quantize(x[m : m + 32, k : k + 48], whole[2], seed, None, q)
        r, b, rows, extent = (m, k, 32, 48) if axis == -1 else (k, m, 48, 32)
        assert_same(codes, whole[0][r : r + rows, b // 2 : (b + extent) // 2])
        assert_same(scale, whole[1][r : r + rows, b // 16 : (b + extent) // 16])


def philox_by_integers(key, counter):
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0, p2 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = p2 >> 32 ^ c1 ^ k0, p2 % 2**32, p0 >> 32 ^ c3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


@both_namespaces
@given(st.tuples(*[st.integers(0, 2**32 - 1)] * 4), st.integers(0, 2**31 - 100))
def test_random_bytes_of_a_global_index_beyond_32_bits(xp, words, row):
    """key words, rows' and blocks' origins, and the expert; the low byte of the low word first."""
    k0, k1, column, expert = words
    total = 2**31 - 17
    seed = np.array([k0, k1, row, column // 2], np.uint32)
    got = run("random_bytes", xp, seed, 2, 3, -1, total, np.uint32(expert))
    for i, j in itertools.product(range(2), range(3)):
        index = (row + i) * -(-total // 16) + (column // 2) // 16 + j
        out = philox_by_integers((k0, k1), (index % 2**32, index >> 32, 0, expert))
        assert got[i, j].tobytes() == np.array(out, "<u4").tobytes()


# --- products ---


@both_namespaces
@pytest.mark.parametrize("shape", [(17, 70, 20), (3, 0, 4), (0, 32, 5), (5, 48, 0), (2, 1024, 3)])
@pytest.mark.parametrize("dtype", [F32, ml_dtypes.bfloat16, np.float16])
def test_product_of_the_dequantized_operands(shape, dtype, xp):
    """1.10: the bound, k = 0, empty results, bias."""
    m, k, n = shape
    x, w = normal(k, m, k) * F32(1e20), normal(k + 1, n, k) * F32(1e-20)
    for row_scaled, with_bias in ((False, True), (True, False)):
        qx, qw = Quantization(row_scaled=row_scaled), Quantization(four_over_six="MAE", bound=256)
        a, b = reference.quantize(x, None, None, None, qx), reference.quantize(w, None, None, None, qw)
        bias = normal(k + 2, n) if with_bias else None
        first, second = (reference.dequantize(*t, q.bound, k, F32).astype(np.float64) for t, q in ((a, qx), (b, qw)))
        want = first @ second.T + (0 if bias is None else bias)
        got = run("matmul", xp, a, b, (448, 256), dtype, bias)
        assert (got.shape, got.dtype) == ((m, n), dtype)
        tolerance = {F32: 1e-6, ml_dtypes.bfloat16: 2**-9 + 1e-6, np.float16: 2**-11 + 1e-6}[dtype]
        scale = np.linalg.norm(want) + (0 if bias is None else np.linalg.norm(bias))
        assert np.linalg.norm(got.astype(np.float64) - want) <= tolerance * scale


def test_tensor_scales_multiply_one_after_the_other():
    """A single alpha would be denormal here; and the epilogue is two products and a sum, each rounded."""
    x, w = normal(15, 16, 32) * F32(1e-20), normal(16, 8, 32) * F32(1e-14)
    a, b = (reference.quantize(v, None, None, None, Quantization()) for v in (x, w))
    bias = normal(17, 8) * F32(1e-33)
    codes = [reference.dequantize(t[0], t[1], None, 448, 32, F32).astype(np.float64) for t in (a, b)]
    acc = (codes[0] @ codes[1].T).astype(F32)
    sixth = F32(1) / F32(2688)
    want = (acc * (a[2] * sixth)) * (b[2] * sixth) + bias
    assert_same(reference.matmul(a, b, (448, 448), F32, bias), want)
    np.testing.assert_allclose(run("matmul", jnp, a, b, (448, 448), F32, bias), want, rtol=1e-5, atol=1e-38)


@pytest.mark.core
def test_the_bias_is_added_to_a_rounded_product():
    """No contraction: with one element along k the sum is exact, so jnp equals NumPy bit for bit."""
    x, w, bias = normal(18, 64, 1), normal(19, 48, 1), normal(20, 48)
    for row_scaled in (False, True):
        a, b = (reference.quantize(v, None, None, None, Quantization(row_scaled=row_scaled)) for v in (x, w))
        want = reference.matmul(a, b, (448, 448), F32, bias)
        assert_same(run("matmul", jnp, a, b, (448, 448), F32, bias), want)
        assert_same(reference.matmul(*jax.tree.map(jnp.asarray, (a, b)), (448, 448), F32, jnp.asarray(bias)), want)


@both_namespaces
def test_zero_and_broken_operands(xp):
    zeros, x = np.zeros((4, 32), F32), normal(21, 6, 32)
    x[2, 5] = np.inf
    a, b = (reference.quantize(v, None, None, None, Quantization()) for v in (zeros, x))
    y = run("matmul", xp, a, b, (448, 448), F32)
    np.testing.assert_array_equal(y, np.where(np.arange(6) == 2, np.nan, np.zeros((4, 6))))
    y = run("matmul", xp, b, b, (448, 448), F32)
    np.testing.assert_array_equal(np.isfinite(y), np.outer(np.arange(6) != 2, np.arange(6) != 2))


# --- swizzle ---


@both_namespaces
@pytest.mark.parametrize("shape", [(130, 5), (128, 4), (1, 1), (300, 9), (2, 3, 65, 6), (0, 4), (4, 0)])
def test_swizzle(shape, xp):
    """A10: m=130, k=80 and back; the offset of every byte."""
    *batch, r, c = shape
    compact = np.random.default_rng(22).integers(1, 256, shape).astype(np.uint8)
    swizzled = run("swizzle", xp, compact)
    size = padded(r, 128) * padded(c, 4)
    assert swizzled.shape == (*batch, size)
    i, j = np.indices((r, c))
    offset = ((i // 128 * (padded(c, 4) // 4) + j // 4) * 32 + i % 32) * 16 + (i % 128) // 32 * 4 + j % 4
    want = np.zeros((*batch, size), np.uint8)
    want[..., offset.reshape(-1)] = compact.reshape(*batch, -1)
    np.testing.assert_array_equal(swizzled, want)
    np.testing.assert_array_equal(run("unswizzle", xp, swizzled, r, c), compact)


# --- jnp is NumPy ---


@st.composite
def calls(draw):
    """An x of normal values, some of them broken, and what to quantize it with."""
    shape = draw(st.sampled_from([(16, 16), (33, 50), (2, 17, 40), (1, 1), (5, 48)]))
    flags = draw(st.sampled_from([*FLAGS.values(), dict(hadamard=True), {}]))
    stochastic = not flags.get("four_over_six") and not flags.get("row_scaled") and draw(st.booleans())
    q = Quantization(
        axis=draw(st.sampled_from([-1, 0])),
        compute_dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        **flags,
    )
    x = normal(draw(st.integers(0, 99)), *shape, spread=draw(st.sampled_from([0.0, 1.0, 4.0])))
    tiny = 0 if q.four_over_six == "MSE" else -60  # a squared error would be denormal, which XLA:CPU flushes
    x = (x * F32(2.0 ** draw(st.sampled_from([0, 0, tiny, 60])))).astype(
        draw(st.sampled_from([F32, ml_dtypes.bfloat16]))
    )
    if draw(st.integers(0, 3)) == 0:
        x.reshape(-1)[-1] = draw(st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0]))
    seed = np.zeros((*shape[:-2], 4), np.uint32) + np.array([7, 8, 32, 16], np.uint32) if stochastic else None
    return x, seed, q


@pytest.mark.core
@given(calls())
@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 2)
def test_jitted_quantize_equals_numpy(call):
    x, seed, q = call
    assert_same(run("quantize", jnp, x, None, seed, None, q), reference.quantize(x, None, seed, None, q), q)


@pytest.mark.core
@pytest.mark.parametrize("compiled", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_what_keeps_xla_from_changing_bits(compiled):
    """Each guard against what XLA does without it: contraction, reciprocals, reassociation."""
    a, b, c = normal(26, 3, 1 << 16)
    guarded = {
        "a*b + c": lambda a, b, c: reference.pinned(a * b) + c,
        "c - a*b": lambda a, b, c: c - reference.pinned(a * b),
        "sum of squares": lambda a, b, c: sum(reference.pinned(v * v) for v in (a, b, c)),
        "a/6": lambda a, b, c: reference.divided(a, 6),
        "a/1536 - c": lambda a, b, c: reference.divided(a, 1536) - c,
        "(a * 3.3) / 2688": lambda a, b, c: reference.pinned(a * F32(3.3)) * (F32(1) / F32(2688)),
    }
    for what, function in guarded.items():
        assert_same(compiled(function)(*map(jnp.asarray, (a, b, c))), function(a, b, c), what)
    for dtype in ("bfloat16", "float16"):
        rounded = compiled(lambda a: reference.rounded(a * F32(1e-4), dtype) * F32(3))(jnp.asarray(a))  # noqa: B023
        assert_same(rounded, (a * F32(1e-4)).astype(dtype).astype(F32) * F32(3), dtype)


@pytest.mark.core
@pytest.mark.parametrize("name", [name for name in FLAGS if FLAGS[name].get("four_over_six")])
def test_jitted_choice_equals_numpy_on_many_blocks(name):
    """Where two errors nearly agree, one contracted or reciprocal rounding would turn the choice."""
    x, q = normal(26, 256, 512), Quantization(**FLAGS[name])
    assert_same(run("quantize", jnp, x, None, None, None, q), reference.quantize(x, None, None, None, q))


@pytest.mark.core
@pytest.mark.parametrize(
    "flags", [{}, dict(tile=16), FLAGS["row_scaled"], FLAGS["mse_tiles"], FLAGS["mae_rows"]], ids=str
)
def test_constants_are_not_folded_into_other_roundings(flags):
    """An amax, a seed, codes closed over are constants of the program, which XLA would combine with ours."""
    x, q = normal(24, 33, 50), Quantization(**flags)
    seed = None if q.row_scaled or q.four_over_six else np.array([7, 8, 32, 16], np.uint32)
    codes, scale, amax = want = reference.quantize(x, None, seed, None, q)
    known = jax.tree.map(jnp.asarray, (amax, seed))
    assert_same(jax.jit(lambda x: reference.quantize(x, *known, None, q))(x), want)
    values = reference.dequantize(codes, scale, amax, q.bound, 50, F32)
    assert_same(jax.jit(lambda c, s: reference.dequantize(c, s, known[0], q.bound, 50, F32))(codes, scale), values)


@pytest.mark.parametrize("flags", [{}, dict(hadamard=True), FLAGS["mse_tiles"], FLAGS["mae_rows"]], ids=str)
def test_eager_equals_numpy(flags):
    x, q = normal(25, 17, 20), Quantization(compute_dtype="float16", **flags)
    seed = None if q.row_scaled or q.four_over_six else np.array([7, 8, 32, 16], np.uint32)
    want = reference.quantize_transpose(x, None, None, seed, None, q)
    got = reference.quantize_transpose(jnp.asarray(x), None, None, None if seed is None else jnp.asarray(seed), None, q)
    assert all(isinstance(a, jax.Array) for a in got)
    assert_same(got, want)
    assert_same(
        reference.dequantize(*got[:3], q.bound, 20, np.float16),
        reference.dequantize(*want[:3], q.bound, 20, np.float16),
    )


@given(calls(), st.sampled_from([F32, ml_dtypes.bfloat16, np.float16]), st.booleans())
@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 2)
def test_jitted_dequantize_equals_numpy(call, dtype, product_form):
    x, seed, q = call
    codes, scale, amax = reference.quantize(x, None, seed, None, q)
    static = q.bound_along(q.axis), x.shape[-1 if q.axis == -1 else -2], dtype
    operands = codes, scale, None if product_form else amax
    want, got = reference.dequantize(*operands, *static), run("dequantize", jnp, *operands, *static)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~number)
    np.testing.assert_array_equal(bits(got)[number], bits(want)[number])


@pytest.mark.parametrize("flags", [{}, dict(hadamard=True), FLAGS["mse_tiles"]], ids=str)
def test_vmap_is_a_batch(flags):
    x, q = normal(23, 3, 17, 40), Quantization(axis=0, **flags)
    got = jax.jit(jax.vmap(lambda v: reference.quantize(v, None, None, None, q)))(x)
    assert_same(got, reference.quantize(x, None, None, None, q))
