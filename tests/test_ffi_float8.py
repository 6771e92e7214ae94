"""The CPU handlers of the 8-bit formats: bit for bit the specification in NumPy, and the border."""

import itertools
import re
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_files import golden_files, load
from grouping import group_sizes
from hypothesis import example, given
from installations import called, forget, lowered, pretend

import jax_fp4 as fp4
from jax_fp4 import _ffi, reference_fp8
from jax_fp4._formats import Float8Quantization

F32 = np.float32
FLOATS = {"float32": F32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SCALINGS = {
    "mxfp8": dict(scaling="mxfp8"),
    "mxfp8 tiles": dict(scaling="mxfp8", tile=32),
    "blocks": dict(scaling="float8_block"),
    "blocks power": dict(scaling="float8_block", power_of_two=True, eps=1e-3),
    "tiles": dict(scaling="float8_block", tile=128, power_of_two=True),
    "tensor": dict(scaling="float8"),
    "tensor power": dict(scaling="float8", power_of_two=True, eps=1e-3),
}
every_scaling = pytest.mark.parametrize("flags", SCALINGS.values(), ids=SCALINGS)
both_codes = pytest.mark.parametrize("codes", ["e4m3", "e5m2"])
SHAPES = [(1, 1), (33, 50), (130, 257), (128, 128), (2, 3, 40), (0, 40), (40, 0), (2, 0, 5), (5, 300), (300, 5)]


def bits(a):
    a = np.asarray(a)
    return a.view(f"u{a.dtype.itemsize}")


def assert_same(got, want):
    """Equal structure, shapes, types and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b), strict=True)


def values(seed, shape, magnitude=0, odd=None, dtype=F32):
    """Random values around 2^magnitude, of which one may be odd."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(3 * rng.standard_normal(shape) + magnitude)
    x = np.clip(x, -np.finfo(F32).max, np.finfo(F32).max).astype(F32)
    if odd is not None and x.size:
        x.reshape(-1)[seed % x.size] = odd
    with np.errstate(over="ignore"):
        return x.astype(dtype)


# Denormals, in float32 and in the codes; the largest numbers; what is no number.
magnitudes = st.sampled_from([0, 0, -20, -60, -120, -130, -145, 60, 100, 126])
payload = np.uint32(0xFFC00123).view(F32)
odds = st.sampled_from([None, None, 0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, payload, F32(1e-45)])
seeds = st.integers(0, 999)


def check(x, amax, scale, sizes, q):
    """Both forms in one call and each by itself, and what they decode to in every dtype."""
    want = reference_fp8.quantize_transpose(x, amax, scale, sizes, q)
    both, each = quantized(x, amax, scale, sizes, q)
    assert_same(both, want)
    for form, got in zip((want[:3], want[3:]), each, strict=True):
        assert_same(got, form)
        if sizes is None or q.scaling != "float8":
            check_decoded(*form[:2], q.tile)


@partial(jax.jit, static_argnames="q")
def quantized(x, amax, scale, sizes, q):
    """Both forms in one call, and each."""
    each = [Float8Quantization(**{**vars(q), "axis": axis}) for axis in (-1, 0)]
    arguments = x, amax, scale, sizes
    return _ffi.quantize_transpose_float8(*arguments, q), [_ffi.quantize_float8(*arguments, one) for one in each]


@partial(jax.jit, static_argnames=("tile", "every"))
def decoded(codes, scale, tile, every):
    return [_ffi.dequantize_float8(codes, scale, tile, *how) for how in every]


def check_decoded(codes, scale, tile):
    extents = sorted({codes.shape[-1], codes.shape[-1] - codes.shape[-1] % 32 // 3})
    every = tuple(itertools.product(extents, FLOATS.values()))
    for how, got in zip(every, map(np.asarray, decoded(codes, scale, tile, every)), strict=True):
        want = reference_fp8.dequantize(codes, scale, tile, *how)
        number = ~np.isnan(want)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_array_equal(~np.isnan(got), number)
        np.testing.assert_array_equal(bits(got)[number], bits(want)[number])


@pytest.mark.core
@every_scaling
@both_codes
@example((33, 50), 0, 0, payload, "float32", "float32")
@given(st.sampled_from(SHAPES), seeds, magnitudes, odds, st.sampled_from([*FLOATS]), st.sampled_from([*FLOATS]))
def test_handlers_equal_the_specification(flags, codes, shape, seed, magnitude, odd, dtype, compute):
    q = Float8Quantization(codes=codes, compute_dtype=compute, **flags)
    check(values(seed, shape, magnitude, odd, FLOATS[dtype]), None, None, None, q)


@every_scaling
@given(group_sizes(5, 300), seeds, magnitudes, odds, st.sampled_from([F32, ml_dtypes.bfloat16]))
def test_handlers_equal_the_specification_of_groups(flags, sizes, seed, magnitude, odd, dtype):
    if flags.get("tile", 1) == 1:
        x = values(seed, (2, 300, 40), magnitude, odd, dtype)
        check(x, None, None, np.stack([sizes, sizes[::-1]]), Float8Quantization(compute_dtype="bfloat16", **flags))


@example(0, 0, payload, False)
@example(0, 0, payload, True)
@given(seeds, magnitudes, odds, st.booleans())
def test_given_amaxes_and_scales(seed, magnitude, odd, grouped):
    """Any that a handler takes: scales are multiplied by as they are."""
    x, count = values(seed, (3, 40, 70), magnitude), (3, 2) if grouped else (3,)
    given = np.abs(values(seed + 1, count, magnitude, odd))
    sizes = np.int32([[10, 20], [0, 50], [-1, 3]]) if grouped else None
    for codes in ("e4m3", "e5m2"):
        q = Float8Quantization("float8", codes, power_of_two=seed % 2 == 0)
        check(x, given, None, sizes, q)
        check(x, None, given, sizes, q)


@pytest.mark.core
@both_codes
def test_every_code_under_every_scale(codes):
    every = np.arange(256, dtype=np.uint8)
    dtype = ml_dtypes.float8_e4m3fn if codes == "e4m3" else ml_dtypes.float8_e5m2
    rows = np.broadcast_to(every.view(dtype), (256, 256))
    e8m0 = np.repeat(every[:, None], 8, axis=1).view(ml_dtypes.float8_e8m0fnu)
    check_decoded(rows, e8m0, 1)
    floats = np.array([0, 1e-45, 1e-38, 3.7, 3e38, np.inf, np.nan], F32)
    check_decoded(rows[: len(floats)], np.repeat(floats[:, None], 2, axis=1), 1)
    check_decoded(rows[: len(floats), None], floats, 1)


@both_codes
@every_scaling
def test_amaxes_at_powers_of_two(flags, codes):
    """Of every binade, at largest * 2^j, a step below and a step above: where an E8M0 scale changes."""
    q = Float8Quantization(codes=codes, **flags)
    with np.errstate(all="ignore"):
        powers = np.exp2(np.arange(-149, 128, dtype=np.float64)) * [[1], [q.largest]]
        powers = powers[powers <= np.finfo(F32).max].astype(F32)
        amax = np.concatenate([np.nextafter(powers, F32(0)), powers, np.nextafter(powers, F32(np.inf))])
    # A tensor or a tile for each amax; of a tile most is padding.
    x = np.zeros((len(amax), 1, q.block) if q.tile == 1 else (len(amax), 2, 2), F32)
    x[:, 0, 0] = amax
    alone = q.scaling == "float8" or q.tile > 1
    check(x if alone else x[:, 0], None, None, None, q)


@both_codes
@pytest.mark.parametrize("scaling", ["mxfp8", "float8"])
def test_ties_of_every_code(codes, scaling):
    """Each code, the middles between them and the neighbours of these, under scale 1 and 2^-127 to 2^127."""
    q = Float8Quantization(scaling, codes)
    every = np.arange(0x7B if codes == "e5m2" else 0x7E, dtype=np.uint8)
    kind = ml_dtypes.float8_e4m3fn if codes == "e4m3" else ml_dtypes.float8_e5m2
    low, high = (a.view(kind).astype(F32) for a in (every, every + np.uint8(1)))
    middle = low / 2 + high / 2
    x = np.concatenate([low, middle, np.nextafter(middle, F32(0)), np.nextafter(middle, F32(np.inf))])
    x = np.stack([np.concatenate([x, -x])] * 3) * np.array([[1], [2.0**-120], [2.0**110]], F32)
    x = np.pad(x, [(0, 0), (0, -x.shape[1] % 31)]).reshape(3, -1, 31)
    largest = np.full((*x.shape[:2], 1), q.largest, F32) * np.array([[[1]], [[2.0**-120]], [[2.0**110]]], F32)
    check(np.concatenate([x, largest], axis=-1), None, None, None, q)


# --- golden files, through the operations ---


def through_handlers(x, format, **flags):
    return fp4.quantize_transpose(jnp.asarray(x), format, implementation="cpu", **flags)


@pytest.mark.core
@pytest.mark.parametrize("path", golden_files("mxfp8_*"), ids=lambda p: p.stem)
def test_golden_mxfp8(path):
    file, codes = load(path), re.match("mxfp8_(e4m3|e5m2)_", path.stem)[1]
    row, column = through_handlers(file["x"], "mxfp8" if codes == "e4m3" else "mxfp8_e5m2")
    for q, suffix in ((row, ""), (column.mT, "_col")):
        turn = (lambda a: a) if suffix == "" else np.transpose
        np.testing.assert_array_equal(turn(bits(q.codes)), file[f"data{suffix}"])
        np.testing.assert_array_equal(turn(bits(q.block_scale)), file[f"scale{suffix}"])


@pytest.mark.core
@pytest.mark.parametrize("path", golden_files("fp8cs_*"), ids=lambda p: p.stem)
def test_golden_current_scaling(path):
    file = load(path)
    codes, option, eps = re.match(r"fp8cs_(e4m3|e5m2)_p2([01])_eps([\d.]+)__", path.stem).groups()
    format = "float8" if codes == "e4m3" else "float8_e5m2"
    row, column = through_handlers(file["x"], format, power_of_two=option == "1", eps=float(eps))
    for q, data in ((row, file["data"]), (column, file["data"].T)):
        np.testing.assert_array_equal(bits(q.codes), data)
        np.testing.assert_array_equal(bits(q.block_scale), bits(file["scale_inv"][0]))
        np.testing.assert_array_equal(bits(q.amax), bits(file["amax"][0]))


@pytest.mark.core
@pytest.mark.parametrize("path", golden_files("fp8block_*"), ids=lambda p: p.stem)
def test_golden_block_scaling(path):
    file, (rows, option) = load(path), re.match(r"fp8block_(\d+)x128_p2([01])__", path.stem).groups()
    pair = through_handlers(file["x"], "float8_block", block=(int(rows), 128), power_of_two=option == "1")
    for q, suffix in zip(pair, ("", "_t"), strict=True):
        theirs = file[f"scale_inv{suffix}"]
        theirs = theirs.T if rows == "1" else theirs[:, : q.block_scale.shape[1]]
        np.testing.assert_array_equal(bits(q.codes), file[f"data{suffix}"])
        np.testing.assert_array_equal(bits(q.block_scale), bits(theirs))


@pytest.mark.core
def test_golden_delayed_scaling():
    file = load("fp8delayed_MAX")
    state = reference_fp8.Delayed(np.zeros(file["history_after"].shape[1], F32), np.ones((), F32))
    for x, data, scale in zip(file["x"], file["data"], file["scale_after"], strict=True):
        q, _ = through_handlers(x, "float8", scale=state.scale)
        np.testing.assert_array_equal(bits(q.codes), data)
        state = reference_fp8.update_delayed(state, np.asarray(q.amax), 448, 1, False)
        np.testing.assert_array_equal(bits(state.scale), bits(scale[0]))


# --- what is lowered ---

X, SIZES = jnp.ones((160, 256)), jnp.int32([30, 100])
OPS = {
    "jax_fp4_quantize_float8": lambda x, **how: fp4.quantize(x, "float8", **how),
    "jax_fp4_quantize_transpose_float8": lambda x, **how: fp4.quantize_transpose(x, "mxfp8", group_sizes=SIZES, **how),
    "jax_fp4_dequantize_float8": lambda x, **how: fp4.dequantize(QUANTIZED, **how) + x,
}
QUANTIZED = fp4.quantize(X, "float8_block_e5m2", block=(128, 128))
every_op = pytest.mark.parametrize("target", OPS)


@pytest.fixture
def no_extension(monkeypatch):
    """What is lowered for CUDA with the extension is in test_cuda_lowering."""
    pretend(monkeypatch, None)
    yield
    forget()


@pytest.mark.core
@every_op
def test_the_handler_on_the_cpu_and_the_specification_elsewhere(no_extension, target):
    """One call; on CUDA none; and a program for both."""
    op = OPS[target]
    assert called(lowered(op, X, platform="cpu")) == [target]
    assert called(lowered(op, X, platform="cuda")) == []
    traced = jax.jit(op).trace(X)
    assert called(traced.lower(lowering_platforms=("cpu", "cuda")).as_text()) == [target]
    named = lambda x: op(x, implementation="cpu")  # noqa: E731
    assert called(lowered(named, X, platform="cpu")) == [target]
    with pytest.raises(fp4.UnsupportedError, match="platform is cuda; needs cpu because the handler named"):
        lowered(named, X)


@every_op
def test_strict_takes_the_handler(no_extension, target):
    with fp4.strict():
        assert called(lowered(lambda x: OPS[target](x), X, platform="cpu")) == [target]
        with pytest.raises(fp4.UnsupportedError, match=r"platform is cuda; needs cpu because .*strict\(\) forbids"):
            lowered(lambda x: OPS[target](x), X)


def test_padding_under_strict():
    """As in NVFP4: of blocks and tiles it is refused, of groups it cannot be known."""
    with fp4.strict():
        fp4.quantize(X, "mxfp8", axis=0, group_sizes=SIZES)
        fp4.quantize(X[:3, :5], "float8")
        fp4.quantize(X[:3], "float8_block")
        for flags, says in (
            (dict(format="mxfp8"), "extent 40 along axis -1; needs a multiple of 32"),
            (dict(format="float8_block", axis=0), "extent 96 along axis 0; needs a multiple of 128"),
            (dict(format="mxfp8", group_sizes=SIZES), "extent 40 along axis -1"),
        ):
            with pytest.raises(fp4.UnsupportedError, match=f"quantize: x is of {says}"):
                fp4.quantize(X[:96, :40], **flags)
        with pytest.raises(fp4.UnsupportedError, match="96 rows under a tile of 128; needs a multiple of 128"):
            fp4.quantize(X[:96], "float8_block", block=(128, 128))


@every_scaling
def test_vmap_is_one_custom_call_and_no_loop(flags):
    x, sizes = values(3, (3, 2, 40, 70)), np.int32([[[3, 9], [40, 0]]] * 3)
    for groups in (None, sizes) if flags.get("tile", 1) == 1 else (None,):
        q = Float8Quantization(axis=0, **flags)
        f = jax.jit(jax.vmap(lambda x, s, q=q: _ffi.quantize_float8(x, None, None, s, q)))
        want = reference_fp8.quantize(x, None, None, groups, q)
        assert_same(f(x, groups), want)
        text = f.lower(x, groups).compile().as_text()
        assert text.count('custom_call_target="jax_fp4_quantize_float8"') == 1 and "while" not in text
        if groups is None:
            decode = jax.vmap(lambda c, s, q=q: _ffi.dequantize_float8(c, s, q.tile, 40, F32))
            assert_same(decode(*want[:2]), reference_fp8.dequantize(*want[:2], q.tile, 40, F32))


# --- the border ---

F8, E8M0, S32 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu, jnp.int32
MX = [((16, 64), F8), ((16, 2), E8M0), ((0,), F32)]
BLOCKS = [((16, 128), F8), ((16, 1), F32), ((0,), F32)]
TENSOR = [((16, 40), F8), ((), F32), ((), F32)]
COLUMNS = [((40, 96), F8), ((40, 3), E8M0), ((0,), F32)]  # (16 + 31 * 3) // 32 blocks hold three groups
ATTRIBUTES = dict(
    axis=np.int32(-1), scaling=np.int32(0), codes=np.int32(0), tile=np.int32(1), compute=np.int32(0), eps=F32(0),
    power_of_two=np.bool_(False), given_amax=np.bool_(False), given_scale=np.bool_(False), grouped=np.bool_(False),
)  # fmt: skip
YES, NO = np.bool_(True), np.bool_(False)


def raw(x=X[:16, :40], amax=((0,), F32), scale=((0,), F32), groups=((0,), S32), results=MX, **attributes):
    """A raw call of the handler, with one thing wrong."""
    shapes = [jax.ShapeDtypeStruct(*r) for r in results]
    operands = [x, jnp.zeros(*amax), jnp.zeros(*scale), jnp.zeros(*groups)]
    call = jax.ffi.ffi_call("jax_fp4_quantize_float8", shapes)
    jax.block_until_ready(call(*operands, **{**ATTRIBUTES, **attributes}))


def of_tensor(**arguments):
    return dict(results=TENSOR, scaling=np.int32(2)) | arguments


def grouped(**arguments):
    return dict(groups=((3,), S32), grouped=YES) | arguments


@pytest.mark.core
def test_a_right_call_passes():
    raw()
    raw(**of_tensor())
    raw(results=BLOCKS, scaling=np.int32(1))
    raw(**grouped())
    raw(**grouped(axis=np.int32(0), results=COLUMNS))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(x=jnp.ones((16, 40), S32)), "x must be float32, bfloat16 or float16"),
        (dict(x=jnp.ones(40)), "x has rank below 2"),
        (dict(axis=np.int32(1)), "attribute axis"),
        (dict(scaling=np.int32(3)), "attribute scaling"),
        (dict(codes=np.int32(2)), "attribute codes"),
        (dict(compute=np.int32(3)), "attribute compute"),
        (dict(tile=np.int32(16)), "attribute tile"),
        (dict(eps=F32(np.nan)), "attribute eps"),
        (dict(eps=F32(-1)), "attribute eps"),
        (dict(given_amax=YES), "amax and scale are for one scale a tensor"),
        (of_tensor(given_amax=YES), r"amax is \[0\]; needs \[\]"),
        (of_tensor(given_scale=YES, scale=((1,), F32)), r"scale is \[1\]; needs \[\]"),
        (of_tensor(given_scale=YES, given_amax=YES), "both given"),
        (of_tensor(amax=((3,), F32)), r"amax is \[3\]; needs \[0\]"),
        (of_tensor(results=[*TENSOR[:2], ((0,), F32)]), r"result amax is \[0\]; needs \[\]"),
        (of_tensor(results=[TENSOR[0], ((1,), F32), TENSOR[2]]), r"block_scale is \[1\]; needs \[\]"),
        (dict(results=[((16, 40), F8), *MX[1:]]), r"codes is \[16,40\]; needs \[16,64\]"),
        (dict(results=[((16, 64), jnp.float8_e5m2), *MX[1:]]), "codes has another element type"),
        (dict(results=[MX[0], ((16, 1), E8M0), MX[2]]), r"block_scale is \[16,1\]; needs \[16,2\]"),
        (dict(results=[MX[0], ((16, 2), F32), MX[2]]), "block_scale has another element type"),
        (dict(results=MX, axis=np.int32(0)), r"codes is \[16,64\]; needs \[40,32\]"),
        (dict(results=BLOCKS, scaling=np.int32(1), tile=np.int32(128)), r"block_scale is \[16,1\]; needs \[1,1\]"),
        (dict(groups=((3,), S32)), r"group_sizes is \[3\]; needs \[0\]"),
        (grouped(groups=((3,), F32)), "group_sizes has another element type"),
        (grouped(groups=((2, 3), S32)), r"group_sizes is \[2,3\]; needs \[3\]"),
        (grouped(tile=np.int32(32)), "group_sizes exclude tiles"),
        (grouped(axis=np.int32(0), results=[((40, 32), F8), *COLUMNS[1:]]), r"codes is \[40,32\]; needs \[40,96\]"),
        (grouped(**of_tensor()), r"block_scale is \[\]; needs \[3\]"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_call_is_refused_by_name(wrong, says):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jax_fp4_quantize_float8: .*{says}"):
        raw(**wrong)


@pytest.mark.parametrize(
    ("codes", "scale", "out", "attributes", "says"),
    [
        ((16, 64), ((16, 2), E8M0), (16, 65), (0, 1), "out is wider than the codes"),
        ((16, 64), ((16, 2), E8M0), (15, 64), (0, 1), r"out is \[15,64\]; needs \[16,64\]"),
        ((16, 40), ((16, 1), E8M0), (16, 40), (0, 1), "codes are no whole blocks"),
        ((16, 64), ((16, 1), E8M0), (16, 64), (0, 1), r"block_scale is \[16,1\]; needs \[16,2\]"),
        ((16, 64), ((16, 2), F32), (16, 64), (0, 1), "block_scale has another element type"),
        ((16, 128), ((16, 1), F32), (16, 128), (1, 128), r"block_scale is \[16,1\]; needs \[1,1\]"),
        ((16, 128), ((1,), F32), (16, 128), (2, 1), r"block_scale is \[1\]; needs \[\]"),
        ((16, 128), ((), F32), (16, 128), (3, 1), "attribute scaling"),
        ((16, 128), ((), F32), (16, 128), (2, 2), "attribute tile"),
    ],
)
def test_dequantize_refuses_what_the_codes_do_not_hold(codes, scale, out, attributes, says):
    scaling, tile = map(np.int32, attributes)
    call = jax.ffi.ffi_call("jax_fp4_dequantize_float8", jax.ShapeDtypeStruct(out, F32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jax_fp4_dequantize_float8: .*{says}"):
        jax.block_until_ready(call(jnp.zeros(codes, F8), jnp.zeros(*scale), scaling=scaling, tile=tile))


@pytest.mark.parametrize("bits", [0x80000001, 0xBF800000, 0xFF800000], ids=hex)
def test_a_given_amax_below_zero_is_refused(bits):
    amax, q = jnp.asarray(np.uint32(bits).view(F32)), Float8Quantization("float8")
    refused = (jax.errors.JaxRuntimeError, ValueError)
    with pytest.raises(refused, match="jax_fp4_quantize_float8: amax has a negative element"):
        jax.block_until_ready(_ffi.quantize_float8(X, amax, None, None, q))
