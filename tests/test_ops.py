"""quantize, quantize_transpose, dequantize: the CPU handlers against the specification, and the arguments."""

import dataclasses
import os
import subprocess
import sys
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from golden_files import golden_files, load, without_negative_zero
from hypothesis import given, settings

import jax_fp4 as fp4

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
KEY = jax.random.key(3)


def bits(a):
    a = np.asarray(a)
    return a.view(f"u{a.dtype.itemsize}")


def assert_same(got: fp4.QuantizedTensor, want: fp4.QuantizedTensor, what=""):
    for name in ("codes", "block_scale", "amax"):
        a, b = bits(getattr(got, name)), bits(getattr(want, name))
        assert a.shape == b.shape, (what, name)
        np.testing.assert_array_equal(a, b, err_msg=f"{what} {name}")
    assert jax.tree.structure(got) == jax.tree.structure(want)


VARIANTS = {
    "plain": {},
    "row_scaled": dict(row_scaled=True),
    "tiles": dict(block=(16, 16)),
    "hadamard": dict(hadamard=True),
    "stochastic": dict(key=KEY),
    "hadamard+stochastic": dict(hadamard=True, key=KEY),
    "four_over_six": dict(four_over_six=fp4.FourOverSix()),
    "four_over_six_448_mse": dict(four_over_six=fp4.FourOverSix(448, "MSE")),
    "four_over_six_tiles": dict(four_over_six=fp4.FourOverSix(256, "MSE"), block=(16, 16)),
    "four_over_six_tiles_448": dict(four_over_six=fp4.FourOverSix(448, "MAE"), block=(16, 16)),
    "four_over_six_rows": dict(four_over_six=fp4.FourOverSix(), row_scaled=True),
    "tiles+stochastic": dict(block=(16, 16), key=KEY),
}


@st.composite
def arrays(draw):
    """Shapes of rank 1 to 4 with odd extents, three dtypes, magnitudes from denormal to overflow, some values odd."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=2))) + tuple(
        draw(st.lists(st.sampled_from([1, 2, 15, 16, 17, 31, 33, 48, 50, 64]), min_size=1, max_size=2))
    )
    dtype = draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = 2.0 ** draw(st.sampled_from([-149, -140, -126, -60, -20, -9, -2, 0, 3, 12, 60, 126]))
    spread = draw(st.sampled_from([0, 4, 20]))
    x = rng.standard_normal(shape) * scale * np.exp2(rng.integers(-spread, spread + 1, shape))
    if draw(st.booleans()):  # few distinct magnitudes: ties
        x = rng.integers(-12, 13, shape) * 0.25 * scale
    with np.errstate(over="ignore"):
        x = x.astype(np.float32).astype(dtype)
    for odd in draw(st.lists(st.sampled_from([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, 3e38]), max_size=2)):
        if x.size:
            with np.errstate(over="ignore"):
                x.reshape(-1)[rng.integers(x.size)] = odd
    return x


SOME = ("plain", "hadamard+stochastic", "four_over_six_tiles")


@pytest.mark.parametrize("variant", [pytest.param(v, marks=pytest.mark.core if v in SOME else ()) for v in VARIANTS])
@settings(max_examples=settings().max_examples // 2)  # each example compiles
@given(x=arrays(), data=st.data())
def test_cpu_handlers_equal_the_numpy_specification(variant, x, data):
    """G9, A23: every variant, any shape, dtype and value; computed and given amax."""
    flags = VARIANTS[variant]
    batch_dims = data.draw(st.integers(0, min(2, x.ndim - 1)))
    compute = data.draw(st.sampled_from([None, "bfloat16"])) if x.dtype == np.float32 else None
    call = dict(flags, batch_dims=batch_dims, dtype=compute)
    specification = partial(fp4.quantize_transpose, x, implementation="reference")
    want = specification(**call)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(want))
    factor = np.float32(data.draw(st.sampled_from([0.25, 1, 3])))
    with np.errstate(over="ignore"):
        amaxes = tuple(np.asarray(q.amax * factor, np.float32) for q in want)
    axes = [axis for axis in (-1, 0) if axis == 0 or not flags.get("hadamard")]
    dtypes = [data.draw(st.sampled_from(DTYPES)) for q in want]

    @jax.jit
    def handlers(x, amaxes):
        pairs = [fp4.quantize_transpose(x, **call, amax=a, implementation="cpu") for a in (None, amaxes)]
        each = [fp4.quantize(x, **call, axis=axis, implementation="cpu") for axis in axes]
        plain = [(q, dtype) for q, dtype in zip(pairs[0], dtypes, strict=True) if not q.hadamard]
        return *pairs, each, [fp4.dequantize(q, dtype, implementation="cpu") for q, dtype in plain]

    pair, of_given, each, decoded = handlers(x, amaxes)
    for got, expected in zip(pair, want, strict=True):
        assert_same(got, expected, variant)
    for got, expected in zip(of_given, specification(**call, amax=amaxes), strict=True):
        assert_same(got, expected, f"{variant}, given amax")
    for got, axis in zip(each, axes, strict=True):
        assert_same(got, want[axis + 1], f"{variant}, axis={axis} alone")
    plain = [(q, dtype) for q, dtype in zip(want, dtypes, strict=True) if not q.hadamard]
    for got, (q, dtype) in zip(map(np.asarray, decoded), plain, strict=True):
        with np.errstate(all="ignore"):
            expected = np.asarray(fp4.dequantize(q, dtype, implementation="reference"))
        assert got.dtype == expected.dtype
        known = ~np.isnan(expected.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), ~known)
        np.testing.assert_array_equal(bits(got)[known], bits(expected)[known])  # the sign of zero counts


@pytest.mark.parametrize("path", golden_files("nvfp4_*"), ids=lambda p: p.stem)
@pytest.mark.parametrize("run", [pytest.param("cpu", marks=pytest.mark.core), "numpy", "jnp"])
def test_golden_files(path, run):
    """The handlers, the specification, and for normal values its traceable form, which XLA flushes denormals of."""
    file = load(path)
    x, cfg = file["x"], file["cfg"]
    if run == "jnp" and file["amax"].size and file["amax"][file["amax"] > 0].min(initial=1) < 2e-32:
        pytest.skip("denormal scales: the jnp fallback flushes them on CPU")
    implementation = "cpu" if run == "cpu" else "reference"
    x = jnp.asarray(x) if run == "jnp" else x
    four = fp4.FourOverSix(cfg.get("e4m3", 256), cfg.get("mode", "MAE")) if cfg.get("f46") else None
    flags = dict(block=tuple(cfg["tile"]), row_scaled=cfg.get("row_scaled", False), four_over_six=four)
    if cfg.get("rht"):
        if not cfg.get("sign", True):
            pytest.skip("a transform without signs is not ours")
        flags["hadamard"] = True
    pair = fp4.quantize_transpose(x, **flags, implementation=implementation)
    for q, suffix in zip(pair, ("", "_t"), strict=True):
        if f"data{suffix}" in file:
            same_codes(q.codes, file[f"data{suffix}"])
            np.testing.assert_array_equal(bits(q.block_scale), file[f"scale{suffix}"])
            np.testing.assert_array_equal(bits(q.amax).reshape(-1), bits(file[f"amax{suffix}"]))
    got = np.asarray(fp4.dequantize(pair[0], np.float32, implementation=implementation))
    np.testing.assert_array_equal(got, file["dequant"])


def same_codes(got, want):
    got, want = np.asarray(got), np.asarray(want)
    np.testing.assert_array_equal(without_negative_zero(got), without_negative_zero(want))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_contraction_length(variant):
    """B6: all k with every flag of a quantizer."""
    rng, lengths = np.random.default_rng(0), (16, 32, 48, 64, 96, 112, 128, 192, 256, 384, 448, 512)
    xs = [rng.standard_normal((32, k)).astype(ml_dtypes.bfloat16) for k in lengths]
    call = partial(fp4.quantize_transpose, **VARIANTS[variant])
    every = jax.jit(lambda xs: [call(x, implementation="cpu") for x in xs])(xs)
    for k, x, got in zip(lengths, xs, every, strict=True):
        for a, b in zip(got, call(x, implementation="reference"), strict=True):
            assert_same(a, b, f"{variant}, k={k}")


def test_rank_is_that_of_the_two_dimensional_reshape():
    """A23, at the ops."""
    for shape in ((2, 3, 64), (1, 1, 16), (64,), (0, 64)):
        x = jax.random.normal(KEY, shape)
        for axis in (-1, 0):
            got, want = fp4.quantize(x, axis=axis), fp4.quantize(x.reshape(-1, shape[-1]), axis=axis)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_array_equal(bits(a).reshape(b.shape), bits(b))


# --- values (faults.md) ---


@pytest.mark.core
def test_scale_underflow():
    """A1: a zero block is exactly 0, a tiny block underflows to 0, nothing is NaN."""
    x = np.zeros((16, 64), np.float32)
    x[:, :16], x[:, 32:48] = 1, 1e-7
    got = np.asarray(fp4.dequantize(fp4.quantize(jnp.asarray(x, jnp.bfloat16)), jnp.float32))
    assert not got[:, 16:].any() and (got[:, :16] == 1).all()


def test_one_level_scaling():
    """A18."""
    x = jax.random.normal(KEY, (64, 64))
    error = lambda x: float(jnp.linalg.norm(fp4.dequantize(fp4.quantize(x)) - x) / jnp.linalg.norm(x))  # noqa: E731
    assert abs(error(x) - error(x * 2**-20)) < 1e-6
    assert 0.05 < error(x) < 0.15


def test_scale_candidate_above_the_e4m3_range():
    """A19: the given amax is too small, so the scale candidate passes 448."""
    q = fp4.quantize(jnp.full((1, 16), 470.0), amax=np.float32(448))
    assert (bits(q.block_scale) == 0x7E).all() and (np.asarray(q.codes) == 0x77).all()
    decoded = np.asarray(fp4.dequantize(q))
    assert np.isfinite(decoded).all()


@pytest.mark.core
@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_a_non_finite_element_makes_its_block_nan(odd, implementation):
    """A26."""
    x = np.ones((4, 64), np.float32)
    x[0, 3] = odd
    q = fp4.quantize(jnp.asarray(x), implementation=implementation)
    got = np.asarray(fp4.dequantize(q, implementation=implementation))
    assert np.isnan(got[0, :16]).all() and np.isfinite(got[0, 16:]).all() and np.isfinite(got[1:]).all()
    assert bits(q.amax) == (0x7FC00000 if np.isnan(odd) else 0x7F800000)
    y = np.asarray(fp4.matmul(q, fp4.quantize(jnp.ones((64, 16)), axis=0)))
    assert np.isnan(y[0]).all() and np.isfinite(y[1:]).all()


@pytest.mark.core
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_stochastic_rounding_is_unbiased(implementation):
    """B1: the mean over 4096 keys is x within 3 sigma; both implementations draw the same bits."""
    x = jnp.linspace(-5.9, 5.9, 32, dtype=jnp.float32).reshape(2, 16)
    amax = np.float32(6 * 448)  # block scales 1 for a block maximum of 6
    x = x.at[:, 0].set(6.0)
    keys = jax.random.split(KEY, 4096)
    draw = lambda key: fp4.dequantize(  # noqa: E731
        fp4.quantize(x, key=key, amax=amax, implementation=implementation), implementation=implementation
    )
    values = np.asarray(jax.jit(jax.vmap(draw))(keys), np.float64)
    sigma = values.std(0) / 64
    # Random bytes are a 256th of a step: the law is exact to half of that.
    assert (np.abs(values.mean(0) - np.asarray(x)) <= 3 * sigma + 2 / 512).all()
    assert_same(fp4.quantize(x, key=KEY), fp4.quantize(x, key=KEY, implementation="reference"))


def test_keys_of_any_implementation_and_form():
    x = jax.random.normal(KEY, (16, 32))
    assert_same(fp4.quantize(x, key=KEY), fp4.quantize(x, key=jax.random.key_data(KEY)))
    rbg = jax.random.key(3, impl="rbg")
    assert_same(fp4.quantize(x, key=rbg), fp4.quantize(x, key=jax.random.bits(rbg, (2,), "uint32")))
    assert not np.array_equal(fp4.quantize(x, key=KEY).codes, fp4.quantize(x, key=jax.random.fold_in(KEY, 1)).codes)
    batch = fp4.quantize(jnp.stack([x, x]), key=KEY, batch_dims=1)  # one key, the same draws
    np.testing.assert_array_equal(batch.codes[0], batch.codes[1])


# --- transformations ---


@pytest.mark.core
def test_vmap_lowers_to_one_custom_call_and_no_loop():
    x = jax.random.normal(KEY, (2, 3, 16, 32))
    f = jax.vmap(jax.vmap(lambda x: fp4.quantize_transpose(x, hadamard=True, key=KEY)))
    text = jax.jit(f).lower(x).compile().as_text()
    assert text.count('custom_call_target="jax_fp4_quantize_transpose"') == 1 and "while" not in text
    for got, want in zip(f(x), fp4.quantize_transpose(x, hadamard=True, key=KEY, batch_dims=2), strict=True):
        np.testing.assert_array_equal(got.codes, want.codes)
        np.testing.assert_array_equal(got.amax, want.amax)


def test_poisoned_outputs():
    """A6: fresh memory is filled with 0x7F by the allocator; every byte of the outputs is still the specification's."""
    script = """
import numpy as np, jax, jax.numpy as jnp, jax_fp4 as fp4
probe = np.empty(1 << 16, np.uint8)
assert (probe == 0x7F).mean() > 0.99, "the allocator does not poison"
key = jax.random.key(0)
for flags in ({}, dict(block=(16, 16)), dict(hadamard=True, key=key), dict(row_scaled=True)):
    for shape in ((5, 48), (5, 50), (17, 33), (300, 200)):
        x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        run = lambda x, i: fp4.quantize_transpose(x, **flags, implementation=i)
        for got, want in zip(run(jnp.asarray(x), None), run(x, "reference")):
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
print("same bits")
"""
    environment = dict(os.environ, MALLOC_PERTURB_=str(0xFF ^ 0x7F))
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "same bits" in done.stdout, done.stderr


def test_lowering_elsewhere_uses_the_reference_unless_refused():
    x = jnp.ones((16, 16))
    lower = lambda f: jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()  # noqa: E731
    assert "jax_fp4_quantize" not in lower(lambda x: fp4.quantize(x).codes)
    with pytest.raises(
        fp4.UnsupportedError, match=r"quantize: platform is cuda; needs cpu because .*'cpu' runs on CPU"
    ):
        lower(lambda x: fp4.quantize(x, implementation="cpu").codes)
    with fp4.strict(), pytest.raises(fp4.UnsupportedError, match=r"quantize: platform is cuda; .*strict"):
        lower(lambda x: fp4.quantize(x).codes)
    assert fp4.supported("quantize", "cpu") and not fp4.supported("quantize", "cuda")


def test_strict_refuses_padding():
    with fp4.strict():
        with pytest.raises(fp4.UnsupportedError, match="extent 50 along axis -1; needs a multiple of 16"):
            fp4.quantize(jnp.ones((16, 50)))
        with pytest.raises(fp4.UnsupportedError, match="20 rows under a tile of 16"):
            fp4.quantize(jnp.ones((20, 64)), block=(16, 16))
        fp4.quantize(jnp.ones((16, 64)))


@pytest.mark.parametrize("implementation", [None, "cpu", "reference"])
def test_differentiation_is_refused(implementation):
    """D4: packed codes carry no gradient, and zeros would go unnoticed."""
    f = lambda x: fp4.dequantize(fp4.quantize(x, implementation=implementation)).sum()  # noqa: E731
    with pytest.raises(fp4.UnsupportedError, match="quantize: x is differentiated"):
        jax.grad(f)(jnp.ones((16, 16)))
    jax.grad(lambda x: (x * f(jax.lax.stop_gradient(x))).sum())(jnp.ones((16, 16)))


# --- bad input ---

ONES = jnp.ones((16, 32))
FOUR = fp4.FourOverSix()
FOREIGN = dataclasses.replace(fp4.quantize(ONES), format="int4")
BOTH = fp4.quantize_transpose


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: fp4.quantize(np.ones((4, 16))), TypeError, "quantize: x is an array of float64"),
        (lambda: fp4.quantize(jnp.ones((4, 16), jnp.int32)), TypeError, "x is an array of int32"),
        (lambda: fp4.quantize(jnp.ones((4, 16), jnp.complex64)), TypeError, "x is an array of complex64"),
        (lambda: fp4.quantize(jnp.float32(3)), ValueError, "x is a scalar"),
        (lambda: fp4.quantize([1.0]), TypeError, "x is a list"),
        (lambda: fp4.quantize(ONES, "int4"), ValueError, "format is 'int4'"),
        (lambda: fp4.quantize(ONES, axis=1), ValueError, r"axis is 1; needs one of \(-1, 0\)"),
        (lambda: fp4.quantize(ONES, block=(1, 32)), ValueError, r"block is \(1, 32\)"),
        (lambda: fp4.quantize(ONES, row_scaled=1), ValueError, "row_scaled is 1"),
        (lambda: fp4.quantize(ONES, hadamard=True), ValueError, "hadamard is True with axis=-1; needs axis=0"),
        (lambda: fp4.quantize(ONES, axis=0, hadamard=True, row_scaled=True), ValueError, "row_scaled=True is together"),
        (lambda: fp4.quantize(ONES, block=(16, 16), row_scaled=True), ValueError, "together with block"),
        (lambda: fp4.quantize(ONES, key=KEY, row_scaled=True), ValueError, "together with a key"),
        (lambda: fp4.quantize(ONES, key=KEY, four_over_six=FOUR), ValueError, "together with a key"),
        (lambda: fp4.quantize(ONES, four_over_six=True), TypeError, "four_over_six is True; needs a FourOverSix"),
        (lambda: fp4.quantize(ONES, amax=np.float32(-1)), ValueError, "amax is negative"),
        (lambda: fp4.quantize(ONES, amax=np.ones(3, np.float32)), ValueError, r"float32 \(3,\); needs float32 \(\)"),
        (lambda: fp4.quantize(ONES, amax=np.float32(1), row_scaled=True), ValueError, r"needs float32 \(16,\)"),
        (lambda: fp4.quantize(ONES, amax=np.ones(())), ValueError, "amax is float64"),
        (lambda: BOTH(ONES, amax=np.float32(1), hadamard=True), ValueError, "amax is one array; needs a pair"),
        (lambda: fp4.quantize(ONES, batch_dims=2), ValueError, "batch_dims is 2; needs 0 to 1"),
        (lambda: fp4.quantize(ONES, key=jnp.ones(3)), TypeError, r"key is float32 \(3,\)"),
        (lambda: fp4.quantize(ONES, implementation="gpu"), ValueError, "implementation is 'gpu'"),
        (lambda: fp4.quantize(ONES, implementation="cuda"), fp4.UnsupportedError, "implementation is 'cuda'"),
        (lambda: fp4.quantize(ONES, dtype=jnp.int8), TypeError, "dtype is int8"),
        (lambda: fp4.dequantize(ONES), TypeError, "dequantize: q is a .*Array"),
        (lambda: fp4.dequantize(fp4.quantize(ONES, axis=0, hadamard=True)), ValueError, "q.hadamard is True"),
        (lambda: fp4.dequantize(fp4.quantize(ONES), jnp.int8), TypeError, "dtype is int8"),
        (lambda: fp4.dequantize(FOREIGN), ValueError, "q.format is 'int4'"),
        (lambda: fp4.quantize(ONES, dtype="blah"), TypeError, "dtype is 'blah'"),
        (lambda: fp4.quantize(ONES, batch_dims=True), ValueError, "batch_dims is True"),
        (lambda: fp4.quantize(ONES, amax="a"), ValueError, "amax is a str"),
        (lambda: fp4.quantize(ONES, amax=[1.0]), ValueError, "amax is a list"),
        (lambda: fp4.quantize(ONES, implementation=["cpu"]), ValueError, "implementation is"),
        (lambda: fp4.quantize(ONES, axis=np.array([0, 1])), ValueError, "axis is array"),
        (lambda: fp4.quantize(ONES, block=(True, 16.0)), ValueError, "block is"),
        (lambda: fp4.quantize(jax.ShapeDtypeStruct((4, 16), jnp.float32)), TypeError, "x is a ShapeDtypeStruct"),
        (lambda: fp4.quantize(fp4.quantize(ONES)), TypeError, "x is a QuantizedTensor"),
        (lambda: fp4.quantize(np.ones((2, 16), ">f4"), implementation="reference"), TypeError, "x is an array of >f4"),
        (lambda: BOTH(ONES, amax=(np.float32(1), None)), ValueError, "needs a pair"),
        (lambda: BOTH(ONES, amax=(np.float32(1),) * 3), ValueError, "needs a pair"),
        (lambda: np.asarray(fp4.quantize(ONES)), TypeError, "never turns into one silently"),
    ],
)  # fmt: skip
def test_bad_input(call, error, says):
    """E12."""
    with pytest.raises(error, match=says) as caught:
        call()
    assert "; needs " in str(caught.value) and " Try " in str(caught.value)


def test_a_traced_negative_amax_is_refused_by_the_handler():
    with pytest.raises(jax.errors.JaxRuntimeError, match="quantize: amax"):
        jax.block_until_ready(jax.jit(lambda a: fp4.quantize(ONES, amax=a).codes)(np.float32(-1)))


@pytest.mark.parametrize("shape", [(1, 1), (17, 33), (48, 64), (70, 5)])
def test_axis_zero_is_the_transpose_quantized_along_rows(shape):
    """numerics 1.3."""
    x = jax.random.normal(KEY, shape, jnp.bfloat16)
    for flags in ({}, dict(row_scaled=True), dict(block=(16, 16))):
        run = partial(fp4.quantize, implementation="cpu", **flags)
        column, row = run(x, axis=0), run(x.T)
        for a, b in zip(jax.tree.leaves(column), jax.tree.leaves(row), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))
