"""The specification of the 8-bit formats: against golden files, slow code that follows the text, and jnp."""

import functools
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_files import golden_files, load
from hypothesis import given

from jax_fp4 import reference_fp8
from jax_fp4._formats import Float8Quantization, padded
from jax_fp4._minifloat import cast_e5m2, decode_e5m2, quotient

F32 = np.float32
FMAX = np.finfo(F32).max
EVERY_BYTE = np.arange(256, dtype=np.uint8)
ULP = {"e4m3": 2.0**-4, "e5m2": 2.0**-3}  # half the distance of neighbours, relative to the smaller
SMALLEST = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}
DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
STATIC = {
    "quantize_mxfp8": 1,
    "dequantize_mxfp8": (2, 3),
    "quantize_float8_block": 1,
    "quantize_float8": 2,
    "quantize_float8_current": 2,
    "dequantize_float8": (2, 3, 4),
    "update_delayed": (2, 3, 4),
    "scale_e8m0": 1,
}
both_namespaces = pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jnp"])
both_codes = pytest.mark.parametrize("codes", ["e4m3", "e5m2"])
both_axes = pytest.mark.parametrize("axis", [-1, 0])


@functools.cache
def jitted(name):
    return jax.jit(getattr(reference_fp8, name), static_argnums=STATIC[name])


def run(name, xp, *arguments):
    """A function of the reference on NumPy, or jitted."""
    return jax.tree.map(np.asarray, jitted(name)(*arguments)) if xp is jnp else getattr(reference_fp8, name)(*arguments)


def bits(a):
    a = np.asarray(a)
    return a.view(f"u{a.dtype.itemsize}")


def assert_same(got, want, what=""):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype, what
        np.testing.assert_array_equal(bits(a), bits(b), err_msg=str(what), strict=True)


def normal(seed, *shape, spread=1.0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(spread * rng.standard_normal(shape))).astype(F32)


def quantized(x, q, xp=np):
    """(codes, scale) of any scaling."""
    if q.scaling == "float8":
        return run("quantize_float8_current", xp, x, None, q)[:2]
    return run(f"quantize_{q.scaling}", xp, x, q)


def decoded(result, q, shape, dtype=F32, xp=np):
    extent = shape[-1 if q.axis == -1 else -2]
    if q.scaling == "mxfp8":
        return run("dequantize_mxfp8", xp, *result, extent, dtype)
    return run("dequantize_float8", xp, *result, q.tile, extent, dtype)


# --- golden files ---


@pytest.mark.core
@both_namespaces
@pytest.mark.parametrize("path", golden_files("mxfp8_*"), ids=lambda p: p.stem)
def test_golden_mxfp8(path, xp):
    """Their column-wise form is not transposed: codes [m, k], scale [m/32, k]."""
    file, codes = load(path), re.match("mxfp8_(e4m3|e5m2)_", path.stem)[1]
    for axis, suffix in ((-1, ""), (0, "_col")):
        q = Float8Quantization("mxfp8", codes, axis, compute_dtype="bfloat16")
        got = [a.T if axis == 0 else a for a in quantized(file["x"], q, xp)]
        np.testing.assert_array_equal(bits(got[0]), file[f"data{suffix}"])
        np.testing.assert_array_equal(bits(got[1]), file[f"scale{suffix}"])


@pytest.mark.core
@both_namespaces
@pytest.mark.parametrize("path", golden_files("fp8cs_*"), ids=lambda p: p.stem)
def test_golden_current_scaling(path, xp):
    """The file's name gives the codes, the power-of-two option (p20 off, p21 on) and eps."""
    file = load(path)
    codes, option, eps = re.match(r"fp8cs_(e4m3|e5m2)_p2([01])_eps([\d.]+)__", path.stem).groups()
    q = Float8Quantization("float8", codes, power_of_two=option == "1", eps=float(eps))
    got, scale_inv, amax = run("quantize_float8_current", xp, file["x"], None, q)
    np.testing.assert_array_equal(bits(got), file["data"])
    np.testing.assert_array_equal(bits(scale_inv), bits(file["scale_inv"][0]))
    np.testing.assert_array_equal(bits(amax), bits(file["amax"][0]))
    np.testing.assert_array_equal(reference_fp8.scale_float8(amax, q), file["scale"][0])


@pytest.mark.core
@both_namespaces
@pytest.mark.parametrize("path", golden_files("fp8block_*"), ids=lambda p: p.stem)
def test_golden_block_scaling(path, xp):
    """Their scales of rows are stored [b/128, r], those of tiles padded to 4 columns."""
    file, (rows, option) = load(path), re.match(r"fp8block_(\d+)x128_p2([01])__", path.stem).groups()
    for axis, suffix in ((-1, ""), (0, "_t")):
        q = Float8Quantization("float8_block", "e4m3", axis, int(rows), option == "1", compute_dtype="bfloat16")
        codes, scale_inv = quantized(file["x"], q, xp)
        theirs = file[f"scale_inv{suffix}"]
        theirs = theirs.T if q.tile == 1 else theirs[:, : scale_inv.shape[1]]
        np.testing.assert_array_equal(bits(codes), file[f"data{suffix}"])
        np.testing.assert_array_equal(bits(scale_inv), bits(theirs))


@pytest.mark.core
@both_namespaces
@pytest.mark.parametrize("path", golden_files("fp8delayed_MAX*"), ids=lambda p: p.stem)
def test_golden_delayed_scaling(path, xp):
    """Six steps under E4M3, margin 1 and a history of 4: each quantizes with the scale of the step before."""
    file, q = load(path), Float8Quantization("float8")
    state = reference_fp8.Delayed(np.zeros(file["history_after"].shape[1], F32), np.ones((), F32))
    for x, data, scale, history in zip(
        file["x"], file["data"], file["scale_after"], file["history_after"], strict=True
    ):
        codes, scale_inv = run("quantize_float8", xp, x, state.scale, q)
        np.testing.assert_array_equal(bits(codes), data)
        np.testing.assert_array_equal(scale_inv, F32(1) / state.scale)
        state = run("update_delayed", xp, state, reference_fp8.amax_float8(x, q), q.largest, 1, False)
        np.testing.assert_array_equal(bits(state.scale), bits(scale[0]))
        np.testing.assert_array_equal(bits(state.history), bits(history))


# --- the text, written again as slowly as it reads ---


@np.errstate(all="ignore")
def e8m0_by_hand(a, largest):
    """The least e with 2^(e-127) >= fl(a * fl(1/largest)), by comparison of values."""
    t = float(F32(a) * (F32(1) / F32(largest)))
    if np.isnan(t):
        return 255
    return min(next(e for e in range(256) if e == 255 or 2.0 ** (e - 127) >= t), 254)


@both_codes
def test_e8m0_follows_the_text(codes):
    largest = Float8Quantization("mxfp8", codes).largest
    with np.errstate(all="ignore"):
        powers = F32(largest) * np.exp2(np.arange(-140, 119, dtype=np.float64)).astype(F32)
        a = np.concatenate([powers, np.nextafter(powers, F32(0)), np.nextafter(powers, F32(np.inf)), powers * F32(1.9)])
        a = np.concatenate([a, [0, 2.0**-149, FMAX, np.inf, np.nan]]).astype(F32)
    want = [e8m0_by_hand(v, largest) for v in a]
    np.testing.assert_array_equal(reference_fp8.scale_e8m0(a, largest), want)
    ordinary = ~(a < largest * 2.0**-126)  # below, t is denormal
    got = run("scale_e8m0", jnp, a[ordinary], largest)
    np.testing.assert_array_equal(got, np.array(want)[ordinary])


def test_a_block_at_the_largest_code_has_scale_one():
    """A15."""
    for codes, largest in (("e4m3", 448), ("e5m2", 57344)):
        x = np.zeros((1, 32), F32)
        x[0, 5] = -largest
        got, scale = quantized(x, Float8Quantization("mxfp8", codes))
        assert bits(scale).item() == 127 and F32(got[0, 5]) == -largest


def test_every_e5m2_code_and_midpoint():
    values = decode_e5m2(EVERY_BYTE)
    np.testing.assert_array_equal(values, EVERY_BYTE.view(ml_dtypes.float8_e5m2).astype(F32))
    np.testing.assert_array_equal(jax.jit(decode_e5m2)(EVERY_BYTE), values)
    finite = EVERY_BYTE[np.isfinite(values)]
    np.testing.assert_array_equal(cast_e5m2(values[finite]), finite)
    low, high = values[:123], values[1:124]
    middle = (low + high) / 2
    even = np.arange(123) + np.arange(123) % 2
    big = np.array([57344, 61440, 65536, FMAX, np.inf], F32)
    v = np.concatenate([middle, np.nextafter(middle, F32(0)), np.nextafter(middle, F32(1e5)), big, -big])
    v = np.concatenate([v, np.array([np.nan, -np.nan], F32)])
    want = np.concatenate([even, np.arange(123), np.arange(123) + 1, [0x7B] * 5, [0xFB] * 5, [0x7F] * 2])
    for cast in (cast_e5m2, jax.jit(cast_e5m2)):
        np.testing.assert_array_equal(cast(v), want)


@np.errstate(all="ignore")
def by_hand(x, q):
    """Codes and scales of x [m, k] block after block, along its rows, with ml_dtypes' casts after a clamp."""
    block = q.block if q.scaling != "float8" else max(x.shape[1], 1)
    tile = q.tile if q.scaling != "float8" else max(x.shape[0], 1)
    x = np.pad(x, [(0, -x.shape[0] % tile), (0, -x.shape[1] % block)])
    codes = np.zeros(x.shape, DTYPES[q.codes])
    scales = np.zeros((x.shape[0] // tile, x.shape[1] // block), F32)
    for i, j in np.ndindex(scales.shape):
        part = np.s_[i * tile : (i + 1) * tile, j * block : (j + 1) * block]
        a = np.abs(x[part]).max()
        if q.scaling == "mxfp8":
            e = e8m0_by_hand(a, q.largest)
            scale, scales[i, j] = F32(2.0 ** (127 - e)), e
        else:
            a = np.maximum(a, F32(q.eps))
            scale = F32(1) if a == 0 or not np.isfinite(a) else min(F32(q.largest) / a, FMAX)
            scale = F32(2.0 ** np.floor(np.log2(np.float64(scale)))) if q.power_of_two else scale
            scales[i, j] = F32(1) / scale
        codes[part] = np.clip(x[part] * scale, -q.largest, q.largest).astype(DTYPES[q.codes])
    return codes, scales


SCALINGS = {
    "mxfp8": dict(scaling="mxfp8"),
    "mxfp8 tiles": dict(scaling="mxfp8", tile=32),
    "blocks": dict(scaling="float8_block"),
    "blocks power": dict(scaling="float8_block", power_of_two=True),
    "tiles": dict(scaling="float8_block", tile=128),
    "tiles power": dict(scaling="float8_block", tile=128, power_of_two=True),
    "tensor": dict(scaling="float8"),
    "tensor power": dict(scaling="float8", power_of_two=True),
}
every_scaling = pytest.mark.parametrize("flags", SCALINGS.values(), ids=SCALINGS)


@every_scaling
@both_codes
@pytest.mark.parametrize("magnitude", [0, -60, -120, -135, -145, 100, 126])
def test_quantize_follows_the_text(flags, codes, magnitude):
    """From denormals to the largest numbers; extents that are no whole blocks."""
    q = Float8Quantization(codes=codes, **flags)
    x = np.clip(normal(magnitude + 200, 35, 200, spread=2.0) * np.float64(2.0**magnitude), -FMAX, FMAX).astype(F32)
    x[:32, 32:64] = 0
    want, scales = by_hand(x, q)
    got, scale = quantized(x, q)
    assert_same(got, want[: x.shape[0]])
    if q.scaling == "mxfp8":
        np.testing.assert_array_equal(bits(scale), np.repeat(scales, q.tile, axis=0)[: x.shape[0]])
    else:
        np.testing.assert_array_equal(scale, scales.reshape(scale.shape))


# --- shapes and directions ---


@every_scaling
@both_axes
@pytest.mark.parametrize("shape", [(0, 32), (32, 0), (0, 0), (1, 1), (5, 48), (33, 130), (2, 3, 33, 20), (0, 16, 16)])
def test_shapes(shape, axis, flags):
    """Any extent, any leading dimensions, each a tensor of its own; the type of every result; zero padding."""
    q = Float8Quantization(axis=axis, **flags)
    *batch, m, k = shape
    r, b = (m, k) if axis == -1 else (k, m)
    x = normal(0, *shape)
    codes, scale = result = quantized(x, q)
    p = padded(b, q.block)
    assert (codes.shape, codes.dtype) == ((*batch, r, p), ml_dtypes.float8_e4m3fn)
    if q.scaling == "mxfp8":
        assert (scale.shape, scale.dtype) == ((*batch, r, p // 32), ml_dtypes.float8_e8m0fnu)
    elif q.scaling == "float8_block":
        assert (scale.shape, scale.dtype) == ((*batch, padded(r, q.tile) // q.tile, p // 128), F32)
    else:
        assert (scale.shape, scale.dtype) == (tuple(batch), F32)
    assert decoded(result, q, shape).shape == (*batch, r, b)
    assert not bits(codes)[..., b:].any()
    for index in np.ndindex(*batch):
        assert_same(jax.tree.map(lambda a, i=index: a[i], result), quantized(x[index], q))


@every_scaling
@given(st.tuples(st.integers(1, 150), st.integers(1, 150)), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_column_wise_is_the_transpose_quantized_along_rows(flags, shape, compute_dtype):
    x = normal(sum(shape), *shape)
    along_rows = Float8Quantization(compute_dtype=compute_dtype, **flags)
    along_columns = Float8Quantization(axis=0, compute_dtype=compute_dtype, **flags)
    result = quantized(x, along_columns)
    assert_same(result, quantized(np.ascontiguousarray(x.T), along_rows))
    if along_rows.tile > 1 or along_rows.scaling == "float8":  # one direction is the transpose of the other
        m, k = shape
        assert_same(result[0][:k, :m], quantized(x, along_rows)[0][:m, :k].T)


@every_scaling
@both_axes
def test_x_is_rounded_to_the_compute_type_first(flags, axis):
    x = normal(8, 33, 140)
    for dtype in (ml_dtypes.bfloat16, np.float16):
        got = quantized(x, Float8Quantization(axis=axis, compute_dtype=np.dtype(dtype).name, **flags))
        assert_same(got, quantized(x.astype(dtype), Float8Quantization(axis=axis, **flags)))
        assert not np.array_equal(got[0], quantized(x, Float8Quantization(axis=axis, **flags))[0])


# --- values ---


def unscaled(scale, q, shape):
    """What one unit of code is worth at each element of the stored form."""
    ones = np.ones((*shape[:-2], shape[-2], padded(shape[-1], q.block)), DTYPES[q.codes])
    return decoded((ones, scale), q, shape)


@every_scaling
@both_codes
@given(
    seed=st.integers(0, 99), shape=st.tuples(st.integers(1, 40), st.integers(1, 140)), magnitude=st.integers(-40, 40)
)
def test_error_bound(flags, codes, seed, shape, magnitude):
    """Half a distance of neighbouring codes: relative to the value, or of the subnormals; scales never clip."""
    q = Float8Quantization(codes=codes, **flags)
    x = normal(seed, *shape, spread=3.0) * F32(2.0**magnitude)
    result = quantized(x, q)
    error = np.abs(decoded(result, q, shape).astype(np.float64) - x)
    step = unscaled(result[1], q, shape).astype(np.float64) * SMALLEST[codes] / 2
    assert (error <= np.maximum(np.abs(x) * ULP[codes], step) * (1 + 2.0**-20)).all()


@every_scaling
@both_codes
def test_codes_follow_from_the_stored_scale(flags, codes):
    """A14: amaxes of 1.9 * 2^j. Quantizing with what is stored gives the codes; powers of two exactly."""
    q = Float8Quantization(codes=codes, **flags)
    x = np.clip(normal(4, 128, 256), -1.9, 1.9) * np.exp2(np.arange(256) // 32 * 3.0).astype(F32)
    x[:, ::32] = np.abs(x[:, ::32]) / np.abs(x[:, ::32]) * F32(1.9) * np.exp2(np.arange(8) * 3.0).astype(F32)
    got, scale = quantized(x, q)
    worth = unscaled(scale, q, x.shape)
    if not q.power_of_two and q.scaling != "mxfp8":
        np.testing.assert_allclose(
            got.astype(F32) * worth, x, rtol=ULP[codes] * 1.01, atol=worth.max() * SMALLEST[codes]
        )
        return
    np.testing.assert_array_equal(got, np.clip(x / worth, -q.largest, q.largest).astype(DTYPES[codes]))


@every_scaling
@both_namespaces
@both_codes
def test_zero_and_signed_zero(flags, xp, codes):
    """A2: a zero block decodes to zeros that keep their sign."""
    q = Float8Quantization(codes=codes, **flags)
    x = np.zeros((130, 260), F32)
    x[::2, ::3] = -0.0
    result = quantized(x, q, xp)
    np.testing.assert_array_equal(bits(result[0])[:, :260], np.where(np.signbit(x), 0x80, 0))
    assert_same(decoded(result, q, x.shape, xp=xp) if xp is np else decoded(result, q, x.shape), x)


@every_scaling
@both_namespaces
@both_codes
@pytest.mark.parametrize("broken", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_broken_element_is_seen_and_leaves_other_blocks_alone(flags, xp, codes, broken):
    """A26. MXFP8: NaN is NaN throughout its block, Inf decodes to Inf. Float32 scales: NaN is NaN, Inf the largest."""
    q = Float8Quantization(codes=codes, **flags)
    x = normal(5, 256, 256)
    clean = quantized(x, q, xp)
    x[3, 5] = broken
    result = quantized(x, q, xp)
    values = decoded(result, q, x.shape)
    block = np.zeros(x.shape, bool)
    if q.scaling == "float8":
        block[:] = True
    else:
        block[3 // q.tile * q.tile : (3 // q.tile + 1) * q.tile, : q.block] = True
    np.testing.assert_array_equal(values[~block], decoded(clean, q, x.shape)[~block])
    if np.isnan(broken):
        assert np.isnan(values[block]).all() if q.scaling == "mxfp8" else np.isnan(values).sum() == 1
        assert np.isnan(values[3, 5])
        if q.scaling == "mxfp8":
            assert np.isnan(result[0].astype(F32)[block]).all()
    elif q.scaling == "mxfp8":
        assert values[3, 5] == broken and np.isfinite(values).sum() == values.size - 1
    else:
        assert values[3, 5] == np.copysign(q.largest, broken) and np.isfinite(values).all()


@both_namespaces
def test_any_code_under_a_nan_scale_is_nan(xp):
    codes, scale = np.zeros((1, 64), DTYPES["e4m3"]), np.array([[255, 127]], np.uint8).view(ml_dtypes.float8_e8m0fnu)
    np.testing.assert_array_equal(
        np.isnan(run("dequantize_mxfp8", xp, codes, scale, 64, F32)), [[True] * 32 + [False] * 32]
    )


def test_eps_and_extreme_amaxes():
    """The scale of amax 0, below eps, not finite, and so small that the quotient is infinite."""
    amax = np.array([0, 1e-5, 1e-3, 1, 1e-44, np.inf, np.nan], F32)
    for eps, want in (
        (0, [1, 448 / 1e-5, 448 / 1e-3, 448, FMAX, 1, 1]),
        (1e-3, [448 / 1e-3] * 3 + [448, 448 / 1e-3, 1, 1]),
    ):
        scale = reference_fp8.scale_float8(amax, Float8Quantization("float8", eps=eps))
        np.testing.assert_allclose(scale, np.array(want, np.float64), rtol=1e-7)
        power = reference_fp8.scale_float8(amax, Float8Quantization("float8", eps=eps, power_of_two=True))
        np.testing.assert_array_equal(power, np.exp2(np.floor(np.log2(scale.astype(np.float64)))))


def test_a_given_amax_saturates():
    x = np.array([[1.0, -4.0, 2.0]], F32)
    codes, scale_inv, amax = reference_fp8.quantize_float8_current(x, F32(2), Float8Quantization("float8"))
    np.testing.assert_array_equal(codes.astype(F32), [[224, -448, 448]])
    assert (scale_inv, amax) == (F32(1) / F32(224), 2)


# --- delayed scaling ---


@pytest.mark.parametrize("margin", [0, 1, 3])
@pytest.mark.parametrize("most_recent", [False, True])
@both_namespaces
def test_delayed_scaling_follows_the_text(margin, most_recent, xp):
    """A queue of the last L amaxes. Zero, Inf and NaN leave the scale as it is while they are the one that counts."""
    amaxes = np.array([1.5, 0, 3, np.inf, 2, 0.1, 0.2, np.nan, 0.3, 7, 0, 0, 0, 0, 5], F32)
    length, scale = 4, F32(1)
    state, seen = reference_fp8.Delayed(np.zeros(length, F32), scale), []
    for amax in amaxes:
        state = run("update_delayed", xp, state, amax, 448, margin, most_recent)
        seen.append(amax)
        a = amax if most_recent else np.max(seen[-length:])
        scale = F32(448 * 2.0**-margin) / a if np.isfinite(a) and a > 0 else scale
        assert state.scale == scale
        assert_same(state.history, np.array([0, *([0] * length + seen)[1 - length :]], F32))


def test_delayed_scaling_of_a_tiny_amax_is_finite():
    state = reference_fp8.Delayed(np.zeros(2, F32), F32(1))
    assert reference_fp8.update_delayed(state, F32(1e-40), 57344, 0, False).scale == FMAX


def test_delayed_scaling_of_a_batch():
    """Each entry has its own history."""
    history, scale, amax = np.abs(normal(6, 3, 5)), np.ones(3, F32), np.abs(normal(7, 3))
    together = reference_fp8.update_delayed(reference_fp8.Delayed(history, scale), amax, 448, 0, False)
    for i in range(3):
        one = reference_fp8.update_delayed(reference_fp8.Delayed(history[i], scale[i]), amax[i], 448, 0, False)
        assert_same(jax.tree.map(lambda a, i=i: a[i], together), one)


# --- jnp is NumPy ---


@st.composite
def calls(draw):
    q = Float8Quantization(
        codes=draw(st.sampled_from(["e4m3", "e5m2"])),
        axis=draw(st.sampled_from([-1, 0])),
        compute_dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        **draw(st.sampled_from(list(SCALINGS.values()))),
    )
    x = normal(
        draw(st.integers(0, 99)), *draw(st.sampled_from([(33, 50), (2, 17, 40), (1, 1), (130, 130)])), spread=4.0
    )
    x = x * F32(2.0 ** draw(st.sampled_from([0, 0, -60, 60])))
    if draw(st.integers(0, 3)) == 0:
        x.reshape(-1)[-1] = draw(st.sampled_from([np.nan, np.inf, -np.inf, 0.0, -0.0]))
    return x.astype(draw(st.sampled_from([F32, ml_dtypes.bfloat16]))), q


@pytest.mark.core
@given(calls(), st.sampled_from([F32, ml_dtypes.bfloat16, np.float16]))
def test_jitted_equals_numpy(call, dtype):
    """No scale of these is denormal, except that of an MXFP8 block of zeros, whose byte is exact all the same."""
    x, q = call
    result = quantized(x, q)
    assert_same(quantized(x, q, jnp), result, q)
    want, got = (decoded(result, q, x.shape, dtype, xp) for xp in (np, jnp))
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), ~number)
    np.testing.assert_array_equal(bits(got)[number], bits(want)[number])


@pytest.mark.core
@every_scaling
def test_constants_are_not_folded_into_other_roundings(flags):
    """Scales, codes or x closed over are constants of the program, which XLA would combine with ours."""
    x, q = normal(24, 33, 50, spread=3.0), Float8Quantization(**flags)
    codes, scale = want = quantized(x, q)
    assert_same(jax.jit(lambda: reference_fp8.quantize(jnp.asarray(x), None, None, None, q)[:2])(), want)
    values = decoded(want, q, x.shape)
    for known in (jnp.asarray(scale), jnp.full(scale.shape, scale.reshape(-1)[0])):
        result = jax.jit(lambda codes, known=known: reference_fp8.dequantize(codes, known, q.tile, 50, F32))(codes)
        assert_same(result, decoded((codes, np.asarray(known)), q, x.shape))
    assert_same(jax.jit(lambda s: reference_fp8.dequantize(jnp.asarray(codes), s, q.tile, 50, F32))(scale), values)
    if q.scaling == "mxfp8":  # 2^-127 as one constant would be denormal, and flushed
        largest, tiny = np.full((1, 32), 448, DTYPES["e4m3"]), np.zeros((1, 1), np.uint8)
        got = jax.jit(lambda c: reference_fp8.dequantize_mxfp8(c, jnp.asarray(tiny.view(scale.dtype)), 32, F32))(
            largest
        )
        assert_same(got, np.full((1, 32), 448 * 2.0**-127, F32))
    if q.scaling == "float8":
        amax, given = np.abs(x).max(), np.float32(3.7)
        got = jax.jit(lambda x: reference_fp8.quantize(x, jnp.asarray(amax), None, None, q)[:2])(x)
        assert_same(got, want)
        got = jax.jit(lambda x: reference_fp8.quantize(x, None, jnp.asarray(given), None, q)[:2])(x)
        assert_same(got, reference_fp8.quantize(x, None, given, None, q)[:2])


@every_scaling
def test_vmap_is_a_batch(flags):
    x, q = normal(23, 3, 33, 140), Float8Quantization(axis=0, **flags)
    name = "quantize_float8_current" if q.scaling == "float8" else f"quantize_{q.scaling}"
    rest = (None, q) if q.scaling == "float8" else (q,)
    function = getattr(reference_fp8, name)
    assert_same(jax.jit(jax.vmap(lambda v: function(v, *rest)))(x), function(x, *rest))


@pytest.mark.core
def test_quotients_are_numpys_to_the_bit():
    """On jnp by long division: XLA:GPU's own is off in the last bit, and XLA rewrites 1 / (c / a)."""
    rng = np.random.default_rng(0)
    anything = rng.integers(1, 0x7F800000, 20000, dtype=np.uint32).view(np.float32)
    ones = (rng.integers(0, 1 << 23, 5000, dtype=np.uint32) | 0x3F800000).view(np.float32)
    edges = np.array([0, np.inf, np.nan, 1e-45, 2**-149, 2**-126, 2**127, 1, 3, 448, 3.4e38], np.float32)
    b = np.concatenate([anything, ones, edges])
    divide = jax.jit(quotient)
    with np.errstate(all="ignore"):
        for a in (np.float32([448, 57344, 56, 1, 1e-40, 3e38])[:, None], anything[:, None][:7]):
            np.testing.assert_array_equal(np.asarray(divide(a, b)).view(np.uint32) & 0x7FFFFFFF, bits_of(a / b))
        np.testing.assert_array_equal(divide(np.float32(0), b[b > 0]), np.zeros(np.sum(b > 0)))
        ties = np.arange(1, 9, dtype=np.uint32).view(np.float32)  # halves of these denormals
        np.testing.assert_array_equal(bits_of(np.asarray(divide(ties, np.float32(2)))), [0, 1, 2, 2, 2, 3, 4, 4])


def bits_of(x):
    """Of |x|, with one NaN."""
    return np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32) & 0x7FFFFFFF)
