"""quantize, quantize_transpose and dequantize of the 8-bit formats: against their specification, and the arguments.
The handlers by themselves are tested in test_ffi_float8.py."""

import dataclasses
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from grouping import CASES, INT32_MAX, group_sizes, slices, total
from hypothesis import given, settings

import jax_fp4 as fp4
from jax_fp4 import reference_fp8
from jax_fp4._formats import FLOAT8_BLOCKS, FLOAT8_FORMATS, Float8Quantization, padded
from jax_fp4._record import CallEvent, recording

KEY = jax.random.key(3)
E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu
VARIANTS = {
    f"{name}{' tiles' if tiles else ''}": (name, (length, length) if tiles else None)
    for name, (scaling, _) in FLOAT8_FORMATS.items()
    for length in (FLOAT8_BLOCKS.get(scaling),)
    for tiles in (False, True)
    if length or not tiles
}
every_variant = pytest.mark.parametrize(("format", "block"), VARIANTS.values(), ids=VARIANTS)


def in_turn(shapes):
    """Every variant with every (shape, batch_dims), E4M3 along one axis and E5M2 along the other."""
    return pytest.mark.parametrize(
        ("format", "block", "shape", "batch_dims", "axis"),
        [
            pytest.param(*variant, *of, axis, id=f"{name}-{'x'.join(map(str, of[0]))}-{axis}")
            for name, variant in VARIANTS.items()
            for i, of in enumerate(shapes)
            for axis in ((-1, 0)[(i + ("e5m2" in name)) % 2],)
        ],
    )


def bits(a):
    a = np.asarray(a)
    return a.view(f"u{a.dtype.itemsize}")


def assert_same(got: fp4.QuantizedTensor, want: fp4.QuantizedTensor):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(bits(a), bits(b), strict=True)


def static(format, block, axis, **flags):
    scaling, codes = FLOAT8_FORMATS[format]
    flags = dict(power_of_two=scaling == "float8_block") | flags
    return Float8Quantization(scaling, codes, axis, 1 if block is None else block[0], **flags)


@in_turn([((5, 50), 0), ((2, 3, 200), 0), ((2, 20, 64), 1), ((64,), 0), ((0, 64), 0), ((3, 0), 0)])
def test_layout(format, block, axis, shape, batch_dims):
    """The fields as `QuantizedTensor` says, the values those of the specification, in NumPy and jax."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    q = fp4.quantize(x, format, axis=axis, block=block, batch_dims=batch_dims, implementation="reference")
    assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(q))
    for call in (
        fp4.quantize,
        jax.jit(fp4.quantize, static_argnums=1, static_argnames=("axis", "block", "batch_dims")),
    ):
        assert_same(call(jnp.asarray(x), format, axis=axis, block=block, batch_dims=batch_dims), q)

    scaling, codes = FLOAT8_FORMATS[format]
    batch = shape[:batch_dims]
    matrix = x.reshape(*batch, -1 if x.size else int(np.prod(shape[batch_dims:-1])), shape[-1])
    want = reference_fp8.quantize(matrix, None, None, None, static(format, block, axis))
    rows = shape[:-1] if axis == -1 else (*batch, shape[-1])
    extent = matrix.shape[-1 if axis == -1 else -2]
    length = FLOAT8_BLOCKS.get(scaling, 1)
    p, count = padded(extent, length), int(np.prod(rows[batch_dims:]))
    scale_shape = {
        "mxfp8": (*rows, p // 32),
        "float8_block": (*rows, p // 128) if block is None else (*batch, padded(count, 128) // 128, p // 128),
        "float8": batch,
    }[scaling]
    assert (q.codes.shape, q.codes.dtype) == ((*rows, p), E4M3 if codes == "e4m3" else E5M2)
    assert (q.block_scale.shape, q.block_scale.dtype) == (scale_shape, E8M0 if scaling == "mxfp8" else np.float32)
    assert (q.format, q.axis, q.extent, q.dtype) == (format, axis, extent, np.float32)
    assert q.block == (None if length == 1 else block or (1, length))
    np.testing.assert_array_equal(bits(q.codes).reshape(-1), bits(want[0]).reshape(-1))
    np.testing.assert_array_equal(bits(q.block_scale).reshape(-1), bits(want[1]).reshape(-1))
    assert (q.amax is None) == (scaling != "float8")
    if scaling == "float8":
        np.testing.assert_array_equal(q.amax, want[2], strict=True)
    logical = shape if axis == -1 else matrix.shape
    assert q.shape == logical
    assert q.nbytes == q.codes.size + q.block_scale.nbytes + (0 if q.amax is None else q.amax.nbytes)


@in_turn([((5, 50), 0), ((2, 3, 200), 0), ((2, 140, 64), 1), ((64,), 0)])
def test_dequantize(format, block, axis, shape, batch_dims):
    """Of the logical shape, in the types asked for; near x; under jit, vmap and a transpose."""
    x = jax.random.normal(KEY, shape, jnp.bfloat16)

    @jax.jit
    def all_ways(x):
        q = fp4.quantize(x, format, axis=axis, block=block, batch_dims=batch_dims)
        narrow = fp4.dequantize(q), fp4.dequantize(q, implementation="reference")
        of_transpose = jnp.swapaxes(fp4.dequantize(q.mT), -1, -2) if len(shape) > 1 else None
        mapped = q_mapped = None
        if batch_dims:
            mapped = jax.vmap(fp4.dequantize)(q)
            q_mapped = jax.vmap(lambda x: fp4.quantize(x, format, axis=axis, block=block))(x)
        return q, narrow, fp4.dequantize(q, jnp.float32), of_transpose, mapped, q_mapped

    q, (values, by_reference), wide, of_transpose, mapped, q_mapped = all_ways(x)
    np.testing.assert_array_equal(fp4.dequantize(q), values)
    assert (values.shape, values.dtype) == (q.shape, jnp.bfloat16)
    error = np.abs(np.asarray(values, np.float32) - np.asarray(x, np.float32).reshape(q.shape))
    relative = 2.0 ** (-4 if "e5m2" not in format else -3)
    assert (error <= relative * 1.1 * np.abs(np.asarray(x, np.float32)).reshape(q.shape) + 2e-3).all()
    np.testing.assert_array_equal(by_reference, values)
    exact = fp4.dequantize(jax.tree.map(np.asarray, q), jnp.float32, implementation="reference")
    assert isinstance(exact, np.ndarray)
    np.testing.assert_array_equal(wide, exact)
    if len(shape) > 1:
        np.testing.assert_array_equal(of_transpose, values)
    if batch_dims:
        np.testing.assert_array_equal(mapped, values)
        assert_same(q_mapped, q)


@every_variant
def test_quantize_transpose_is_both(format, block):
    x = jax.random.normal(KEY, (3, 40, 130))
    for got, axis in zip(fp4.quantize_transpose(x, format, block=block, batch_dims=1), (-1, 0), strict=True):
        assert_same(got, fp4.quantize(x, format, axis=axis, block=block, batch_dims=1))


def test_options_of_float32_scales():
    x = jax.random.normal(KEY, (2, 130)) * 1e-3
    for format in ("float8", "float8_block_e5m2"):
        for flags in (dict(power_of_two=True), dict(power_of_two=False), dict(power_of_two=False, eps=0.5)):
            q = fp4.quantize(x, format, **flags)
            want = reference_fp8.quantize(np.asarray(x), None, None, None, static(format, None, -1, **flags))
            np.testing.assert_array_equal(bits(q.codes), bits(want[0]))
            np.testing.assert_array_equal(q.block_scale, want[1])


def test_a_given_amax_or_scale():
    """Current scaling under the maximum of all shards; delayed scaling under the scale of earlier steps."""
    x = jnp.asarray([[1.0, -2.0, 4.0]])
    q = fp4.quantize(x, "float8", amax=np.float32(2))
    np.testing.assert_array_equal(np.asarray(q.codes, np.float32), [[224, -448, 448]])
    assert (q.amax, q.block_scale) == (2, np.float32(1) / np.float32(224))
    q = fp4.quantize(x, "float8", scale=jnp.float32(16))
    np.testing.assert_array_equal(np.asarray(q.codes, np.float32), [[16, -32, 64]])
    assert (q.amax, q.block_scale) == (4, 1 / 16)
    np.testing.assert_array_equal(fp4.dequantize(q), x)
    batch = fp4.quantize(jnp.stack([x, x]), "float8", scale=np.array([1, 2], np.float32), batch_dims=1)
    np.testing.assert_array_equal(np.asarray(batch.codes[1], np.float32), [[2, -4, 8]])
    np.testing.assert_array_equal(batch.amax, [4, 4])


def test_the_call_is_recorded():
    with recording() as events:
        fp4.quantize_transpose(jnp.ones((2, 5, 50)), "mxfp8", batch_dims=1)
    padding = 2 * (5 * (64 - 50) + 50 * (32 - 5))
    assert events == [CallEvent("", "quantize_transpose", (2, 5, 50), "chosen at lowering", padding)]


def test_differentiation_is_refused():
    """D4."""
    f = lambda x: fp4.dequantize(fp4.quantize(x, "mxfp8")).sum()  # noqa: E731
    with pytest.raises(fp4.UnsupportedError, match="quantize: x is differentiated"):
        jax.grad(f)(jnp.ones((16, 16)))


@pytest.mark.core
@every_variant
def test_under_jit(format, block):
    x = jax.random.normal(KEY, (40, 130))
    row, column = jax.jit(lambda x: fp4.quantize_transpose(x, format, block=block))(x)
    assert_same(row, fp4.quantize(x, format, block=block))
    assert_same(column, fp4.quantize(x, format, axis=0, block=block))
    np.testing.assert_array_equal(jax.jit(fp4.dequantize)(column), fp4.dequantize(column))


def test_life_as_a_pytree():
    q = fp4.quantize(jnp.ones((3, 24, 48)), "mxfp8", axis=0, batch_dims=1, block=(32, 32))
    leaves, tree = jax.tree.flatten(q)
    assert len(leaves) == 2 and jax.tree.unflatten(tree, leaves).block == (32, 32)
    _, scanned = jax.lax.scan(lambda c, q: (c, fp4.dequantize(q)), 0, q)
    np.testing.assert_array_equal(scanned, np.ones((3, 24, 48)))
    assert "QuantizedTensor(mxfp8, axis=0, extent=24, dtype=float32, block=(32, 32)" in repr(q)
    assert "QuantizedTensor(float8, axis=-1" in repr(fp4.quantize(jnp.ones((2, 2)), "float8"))


def test_implementations():
    """What runs by itself and the named ones agree."""
    x = jax.random.normal(KEY, (32, 32))
    q = fp4.quantize(x, "mxfp8")
    for call in (lambda **how: fp4.quantize(x, "mxfp8", **how), lambda **how: fp4.dequantize(q, **how)):
        for implementation in ("cpu", "reference"):
            for got, want in zip(*map(jax.tree.leaves, (call(implementation=implementation), call())), strict=True):
                np.testing.assert_array_equal(bits(got), bits(want))


def test_what_cuda_has_no_kernel_for_cannot_be_named():
    x, sizes = jnp.ones((32, 32)), jnp.array([10, 22], jnp.int32)
    q = fp4.quantize(x, "mxfp8")
    for call, why in (
        (lambda **how: fp4.dequantize(q, **how), "mxfp8 is decoded by no CUDA kernel"),
        (lambda **how: fp4.quantize(x, "mxfp8", group_sizes=sizes, **how), "mxfp8 with group_sizes has no CUDA kernel"),
    ):
        with pytest.raises(fp4.UnsupportedError, match=rf"implementation is 'cuda'; needs 'cpu' or .*{why}"):
            call(implementation="cuda")


# --- groups: numerics.md, section 2 ---

every_format = pytest.mark.parametrize("format", FLOAT8_FORMATS)
few = settings(max_examples=settings().max_examples // 2)
G, M, K = 5, 300, 40


def rows(seed, m=M, k=K, sizes=None, dtype=np.float32):
    """Random rows of very different magnitudes; with sizes, NaN in the tail."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((m, k)) * np.exp2(rng.integers(-6, 7, (m, 1)))).astype(dtype)
    if sizes is not None:
        x[total(sizes, m) :] = np.nan
    return x


def alone(x, sizes, format, **flags):
    """Each group quantized by the specification without groups, its results put where section 2 says."""
    (m, k), groups = x.shape, len(sizes)
    scaling, codes = FLOAT8_FORMATS[format]
    length = FLOAT8_BLOCKS.get(scaling, 1)
    extent = length * ((m + (length - 1) * groups) // length)
    by_tensor, kind = scaling == "float8", E8M0 if scaling == "mxfp8" else np.float32
    results = []
    for axis, shape in ((-1, (m, padded(k, length))), (0, (k, extent))):
        scale_shape = (groups,) if by_tensor else (shape[0], shape[1] // length)
        values, scale = np.zeros(shape, E4M3 if codes == "e4m3" else E5M2), np.zeros(scale_shape, kind)
        amax, block = np.zeros(groups, np.float32) if by_tensor else None, 0
        if scaling == "mxfp8":
            scale = np.zeros(scale_shape, np.uint8).view(E8M0)
        for e, r in enumerate(slices(sizes, m)):
            own = {name: value[e] for name, value in flags.items() if name in ("amax", "scale")}
            one = fp4.quantize(x[r], format, axis=axis, **(flags | own), implementation="reference")
            n = one.codes.shape[-1] // length
            where = (r,) if axis == -1 else (slice(None), slice(block, block + n))
            values[r if axis == -1 else (slice(None), slice(block * length, (block + n) * length))] = one.codes
            if by_tensor:
                scale[e], amax[e] = one.block_scale, one.amax
            else:
                scale[where] = one.block_scale
            block += n
        results.append((values, scale, amax))
    return results


def arrays(pair):
    return [leaf for q in pair for leaf in (q.codes, q.block_scale, q.amax) if leaf is not None]


def check_groups(x, sizes, format, **flags):
    """The specification in NumPy and what runs by itself, both axes at once and each, against `alone`."""
    want = jax.tree.leaves(alone(x, sizes, format, **flags))
    pair = fp4.quantize_transpose(x, format, group_sizes=sizes, **flags, implementation="reference")
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(pair))
    for got, expected in zip(arrays(pair), want, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(bits(got), bits(expected), strict=True)
    both, *each = in_all_ways(x, sizes, format, **flags)
    for got in (both, each):
        for q, expected in zip(got, pair, strict=True):
            assert_same(q, expected)


@partial(jax.jit, static_argnames=("format", "power_of_two", "eps"))
def in_all_ways(x, sizes, format, **flags):
    """Both axes at once, and each."""
    each = (fp4.quantize(x, format, axis=axis, group_sizes=sizes, **flags) for axis in (-1, 0))
    return fp4.quantize_transpose(x, format, group_sizes=sizes, **flags), *each


@pytest.mark.core
@every_format
@few
@given(group_sizes(G, M), st.integers(0, 99), st.sampled_from([None, None, np.nan, np.inf, 0.0]))
def test_each_group_is_quantized_as_if_alone(format, sizes, seed, odd):
    """A7, C1-C8: bit for bit, with exact zeros in the tail and in unused columns, and NaN there read by nobody."""
    x = rows(seed, sizes=sizes)
    if odd is not None and total(sizes, M):
        x[0, seed % K] = odd
    check_groups(x, sizes, format)


def case_of_each_scaling(names):
    """E4M3 and E5M2 in turn: they have one layout."""
    scalings = [("mxfp8", "mxfp8_e5m2"), ("float8_block", "float8_block_e5m2"), ("float8", "float8_e5m2")]
    cases = [(both[i % 2], name) for both in scalings for i, name in enumerate(names)]
    assert {form for form, _ in cases} == set(FLOAT8_FORMATS)
    return pytest.mark.parametrize(("format", "case"), cases)


@case_of_each_scaling(CASES)
def test_cases_of_groups(format, case):
    """And of a narrow dtype, whose rows are one block less a few."""
    sizes, m = CASES[case]
    check_groups(rows(1, m, 13, sizes, ml_dtypes.bfloat16), np.int32(sizes), format)


def test_options_of_groups():
    """Options, and amaxes and scales given for each group."""
    sizes = np.int32([8, 0, 130, 1, 17])
    x, per_group = rows(2, sizes=sizes), np.exp2(np.arange(G, dtype=np.float32))
    for format in ("float8", "float8_block_e5m2"):
        check_groups(x, sizes, format, power_of_two=format == "float8", eps=1.0)
    check_groups(x, sizes, "float8", amax=per_group, power_of_two=True)
    check_groups(x, sizes, "float8_e5m2", scale=per_group)
    q = fp4.quantize(x, "float8", group_sizes=sizes)
    assert (q.amax[1], q.block_scale[1]) == (0, 1)


@pytest.mark.core
@every_format
def test_groups_under_jit_and_vmap(format):
    """C11: one program for all sizes; a stack of x with sizes of their own."""
    several = np.int32([[8, 0, 30, 1, 17], [0, 0, 300, 0, 0], [INT32_MAX, 3, -1, 4, 5], [0, 0, 0, 0, 0]])
    x = np.stack([rows(seed, sizes=sizes) for seed, sizes in enumerate(several)])
    one = lambda x, s: fp4.quantize_transpose(x, format, group_sizes=s)  # noqa: E731
    run = jax.jit(one)
    both = jax.vmap(one)(x, several)
    for i, sizes in enumerate(several):
        want = fp4.quantize_transpose(x[i], format, group_sizes=sizes, implementation="reference")
        assert_same(run(x[i], sizes), want)
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], both), want)
    assert run._cache_size() == 1


@pytest.mark.core
@every_format
@few
@given(group_sizes(G, M), st.sampled_from([np.float32, ml_dtypes.bfloat16]))
def test_dequantize_groups(format, sizes, dtype):
    """Both layouts, each group as alone, in NumPy and jax; the tail is zero."""
    x = rows(5, sizes=sizes)
    for q in fp4.quantize_transpose(x, format, group_sizes=sizes):
        got, by_reference, of_transpose = map(np.asarray, decoded(q, dtype))
        exact = fp4.dequantize(jax.tree.map(np.asarray, q), dtype, implementation="reference")
        assert isinstance(exact, np.ndarray)
        for values in (exact, by_reference, of_transpose.T):
            np.testing.assert_array_equal(bits(values), bits(got), strict=True)
        assert got.shape == x.shape and got.dtype == dtype and not bits(got)[total(sizes, M) :].any()
        for r in slices(sizes, M):
            one = fp4.quantize(x[r], format, axis=q.axis, implementation="reference")
            np.testing.assert_array_equal(bits(got[r]), bits(fp4.dequantize(one, dtype, implementation="reference")))


@partial(jax.jit, static_argnames="dtype")
def decoded(q, dtype):
    return fp4.dequantize(q, dtype), fp4.dequantize(q, dtype, implementation="reference"), fp4.dequantize(q.mT, dtype)


DEQUANTIZE = jax.jit(fp4.dequantize, static_argnames=("dtype", "implementation"))


@case_of_each_scaling(["no rows", "no groups", "one row"])
def test_dequantize_the_cases_of_groups(format, case):
    sizes, m = CASES[case]
    for q in fp4.quantize_transpose(rows(6, m, 20, sizes), format, group_sizes=np.int32(sizes)):
        for got in (DEQUANTIZE(q), fp4.dequantize(jax.tree.map(np.asarray, q), implementation="reference")):
            assert got.shape == (m, 20) and not np.asarray(got)[total(sizes, m) :].any()


def test_fields_of_groups():
    sizes, x = np.int32([5, 0, 12]), rows(8, 24).reshape(2, 3, 4, K)
    for format, extent in (("mxfp8", 96), ("float8_block", 384), ("float8", 24)):
        row, column = fp4.quantize_transpose(x, format, group_sizes=sizes)
        assert (row.grouped, column.grouped, row.extent, column.extent) == ("rows", "blocks", K, 24)
        assert (row.shape, column.shape, column.codes.shape) == (x.shape, (24, K), (K, extent))
        assert row.group_sizes is not None and column.group_sizes is not None
        np.testing.assert_array_equal(
            fp4.dequantize(row).reshape(24, K)[:5], fp4.dequantize(fp4.quantize(x.reshape(24, K)[:5], format))
        )
    with recording() as events:
        fp4.quantize(x, "mxfp8", axis=0, group_sizes=sizes)
    assert events == [CallEvent("", "quantize", (24, K), "chosen at lowering", K * (96 - 24))]


ONES = jnp.ones((16, 32))
ONE = np.float32(1)
SIZES = np.int32([4, 8])
MXFP8 = fp4.quantize(ONES, "mxfp8")


def quantize(format, **flags):
    return lambda: fp4.quantize(ONES, format, **flags)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (quantize("fp8"), ValueError, "format is 'fp8'; needs one of .*'mxfp8_e5m2'"),
        (quantize("mxfp8", axis=1), ValueError, "axis is 1"),
        (quantize("mxfp8", block=(1, 16)), ValueError, r"block is \(1, 16\); needs one of .*\(1, 32\), \(32, 32\)"),
        (quantize("float8_block", block=(1, 32)), ValueError, r"block is \(1, 32\)"),
        (quantize("float8", block=(1, 128)), ValueError, r"block is \(1, 128\); needs one of \(None,\)"),
        (quantize("nvfp4", block=(1, 32)), ValueError, r"block is \(1, 32\)"),
        (quantize("mxfp8", row_scaled=True), ValueError, "row_scaled is given beside format='mxfp8'"),
        (quantize("float8", axis=0, hadamard=True), ValueError, "hadamard is given"),
        (quantize("mxfp8", key=KEY), ValueError, "key is given"),
        (quantize("mxfp8", four_over_six=fp4.FourOverSix()), ValueError, "four_over_six is given"),
        (quantize("mxfp8", group_sizes=[16]), TypeError, "group_sizes is of type list"),
        (quantize("float8", group_sizes=SIZES, batch_dims=1), ValueError, "batch_dims is 1 beside group_sizes"),
        (quantize("mxfp8", group_sizes=SIZES, block=(32, 32)), ValueError, r"block=\(32, 32\) is together with"),
        (quantize("float8", group_sizes=SIZES, amax=ONE), ValueError, r"amax is float32 \(\); needs float32 \(2,\)"),
        (quantize("float8", group_sizes=SIZES, scale=np.float32([1, 0])), ValueError, "scale is .*; needs positive"),
        (quantize("mxfp8", amax=ONE), ValueError, "amax is given beside format='mxfp8'; needs one scale a tensor"),
        (quantize("float8_block", scale=ONE), ValueError, "scale is given"),
        (quantize("mxfp8", power_of_two=True), ValueError, "power_of_two is True with format='mxfp8'"),
        (quantize("mxfp8", eps=1e-3), ValueError, "eps is 0.001 with format='mxfp8'"),
        (quantize("float8", power_of_two=1), ValueError, "power_of_two is 1"),
        (quantize("float8", eps=-1), ValueError, "eps is -1; needs a number >= 0"),
        (quantize("float8", eps=float("nan")), ValueError, "eps is nan"),
        (quantize("float8", eps=True), ValueError, "eps is True"),
        (quantize("float8", scale=ONE, amax=ONE), ValueError, "scale is together with one of them"),
        (quantize("float8", scale=ONE, power_of_two=False), ValueError, "scale is together with"),
        (quantize("float8", scale=np.float32(0)), ValueError, "scale is 0.0; needs positive finite"),
        (quantize("float8", scale=np.float32(np.inf)), ValueError, "scale is inf"),
        (quantize("float8", amax=np.float32(-1)), ValueError, "amax is -1.0; needs values >= 0"),
        (quantize("float8", amax=np.ones(2, np.float32)), ValueError, r"amax is float32 \(2,\); needs float32 \(\)"),
        (quantize("float8", scale="a"), ValueError, "scale is a str"),
        (quantize("float8", batch_dims=2), ValueError, "batch_dims is 2"),
        (quantize("float8", dtype=jnp.int8), TypeError, "dtype is int8"),
        (quantize("float8", implementation="gpu"), ValueError, "implementation is 'gpu'"),
        (quantize("nvfp4", power_of_two=True), ValueError, "power_of_two is given beside format='nvfp4'"),
        (quantize("nvfp4", eps=1.0), ValueError, "eps is given"),
        (quantize("nvfp4", scale=ONE), ValueError, "scale is given"),
        (lambda: fp4.quantize([1.0], "mxfp8"), TypeError, "x is a list"),
        (lambda: fp4.quantize_transpose(ONES, "float8", amax=(ONE, ONE)), ValueError, "amax is a tuple"),
        (lambda: fp4.quantize_transpose(ONES, "mxfp8", hadamard=True), ValueError, "quantize_transpose: hadamard"),
        (lambda: fp4.dequantize(MXFP8, jnp.int8), TypeError, "dtype is int8"),
        (lambda: fp4.dequantize(dataclasses.replace(MXFP8, format="x")), ValueError, "q.format is 'x'"),
    ],
)  # fmt: skip
def test_bad_input(call, error, says):
    """E12: whatever has no meaning in a format names the argument and the fix."""
    with pytest.raises(error, match=says) as caught:
        call()
    assert "; needs " in str(caught.value) and " Try " in str(caught.value)
