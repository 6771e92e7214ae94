"""Groups of rows: where they lie, and each of them quantized and decoded as if it were alone."""

import itertools
from functools import partial
from unittest import mock

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from grouping import CASES, INT32_MAX, INT32_MIN, group_sizes, slices, total
from hypothesis import example, given, settings

import jax_fp4 as fp4
from jax_fp4 import _groups, reference
from jax_fp4._formats import BLOCK, Quantization

KEY = jax.random.key(3)
FOUR, FOUR_MSE = fp4.FourOverSix(), fp4.FourOverSix(448, "MSE")
VARIANTS = {  # all that a call with groups may say
    "plain": {},
    "row_scaled": dict(row_scaled=True),
    "hadamard": dict(hadamard=True),
    "stochastic": dict(key=KEY),
    "hadamard+stochastic": dict(hadamard=True, key=KEY),
    "four_over_six": dict(four_over_six=FOUR),
    "four_over_six_448_mse": dict(four_over_six=FOUR_MSE),
    "four_over_six_rows": dict(four_over_six=FOUR, row_scaled=True),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
few = settings(max_examples=settings().max_examples // 2)
G, M, K = 5, 90, 40
SMALL = ["no rows", "no groups", "one row"]


def bits(a):
    a = np.asarray(a)
    return a.view(f"u{a.dtype.itemsize}")


def assert_same(got, want, what=""):
    """Equal structure and bits."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(bits(a), bits(b), err_msg=str(what), strict=True)


def rows(seed: int, m: int = M, k: int = K, sizes=None, dtype=np.float32):
    """Random rows of very different magnitudes; with sizes, NaN in the tail."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((m, k)) * np.exp2(rng.integers(-6, 7, (m, 1)))).astype(dtype)
    if sizes is not None:
        x[total(sizes, m) :] = np.nan
    return x


# --- where the groups lie ---


def columns_by_hand(sizes, m, block=16):
    """The row of every position of the column-wise form and the group of every block."""
    extent = block * ((m + (block - 1) * len(sizes)) // block)
    positions, first, group = [], [], []
    for e, r in enumerate(slices(sizes, m)):
        first.append(len(positions) // block)
        positions += [*range(r.start, r.stop), *[m] * (-(r.stop - r.start) % block)]
        group += [e] * (len(positions) // block - first[-1])
    group += [len(sizes)] * (extent // block - len(group))
    blocks = [group.count(e) for e in range(len(sizes))]
    return positions + [m] * (extent - len(positions)), first, blocks, group


def check_layout(sizes, m, bounds, columns, group):
    where = slices(sizes, m)
    np.testing.assert_array_equal(bounds.starts, [r.start for r in where])
    np.testing.assert_array_equal(bounds.ends, [r.stop for r in where])
    of_rows = [next((e for e, r in enumerate(where) if r.start <= i < r.stop), len(sizes)) for i in range(m)]
    np.testing.assert_array_equal(group, of_rows)
    for got, want in zip(columns, columns_by_hand(sizes, m), strict=True):
        np.testing.assert_array_equal(got, want)
    assert all(np.asarray(a).dtype == np.int32 for a in (*bounds, *columns, group))


def layout(sizes, m):
    bounds = _groups.bounds(sizes, m)
    return bounds, _groups.columns(sizes, m), _groups.group_of(bounds.ends, m)


@pytest.mark.core
@example(np.int32([INT32_MAX] * G))
@example(np.int32([INT32_MIN, 3, INT32_MAX, -1, INT32_MAX]))
@given(group_sizes(G, M))
def test_layout(sizes):
    """C12: NumPy, jitted with traced sizes and eager are the plain loop; sums that overflow int32 stop at m."""
    check_layout(sizes, M, *layout(sizes, M))
    check_layout(sizes, M, *LAYOUT(sizes, M))


LAYOUT = jax.jit(layout, static_argnums=1)


@pytest.mark.parametrize("case", CASES)
def test_layout_of_the_cases(case):
    sizes, m = CASES[case]
    check_layout(sizes, m, *layout(np.int32(sizes), m))
    check_layout(sizes, m, *LAYOUT(np.int32(sizes), m))


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("case", CASES)
def test_longer_blocks(case, block):
    """Those of the 8-bit formats."""
    sizes, m = CASES[case]
    for got, want in zip(_groups.columns(np.int32(sizes), m, block), columns_by_hand(sizes, m, block), strict=True):
        np.testing.assert_array_equal(got, want)


def test_layout_of_a_batch():
    sizes = np.int32([[3, 0, 40], [90, 1, 1], [-1, INT32_MAX, 2], [0, 0, 0]]).reshape(2, 2, 3)
    for got in (layout(sizes, M), LAYOUT(sizes, M)):
        for index in np.ndindex(2, 2):
            check_layout(sizes[index], M, *jax.tree.map(lambda a, i=index: a[i], got))


@given(st.lists(st.integers(0, 4), min_size=12, max_size=12), st.integers(0, 99))
def test_largest_and_of_group(group, seed):
    """Group 4 is the tail: it counts for nobody and gets what is said."""
    group = np.int32(group)
    values = np.random.default_rng(seed).integers(0, 2**32, (12, 3), np.uint32)
    want = np.stack([values[group == e].max(axis=0, initial=0) for e in range(4)])
    assert_same(_groups.largest(values, group, 4), want)
    assert_same(LARGEST(values, group), jnp.asarray(want))
    of_groups = values[:4]
    spread = np.stack([of_groups[e] if e < 4 else np.full(3, 7, np.uint32) for e in group])
    assert_same(_groups.of_group(of_groups, group, 7), spread)
    assert_same(OF_GROUP(of_groups, group), jnp.asarray(spread))


LARGEST = jax.jit(partial(_groups.largest, groups=4))
OF_GROUP = jax.jit(partial(_groups.of_group, tail=7))


# --- quantize ---


def alone(x, sizes, amaxes=None, **flags):
    """Each group quantized by the specification without groups, its results put where section 2 says."""
    (m, k), groups = x.shape, len(sizes)
    blocks = (m + 15 * groups) // 16
    scaled, amax_t = ((m,), (groups, k)) if flags.get("row_scaled") else ((groups,), (groups,))
    shapes = [(m, -(-k // 16) * 8), (m, -(-k // 16)), scaled, (k, 8 * blocks), (k, blocks), amax_t]
    out = [np.zeros(s, t) for s, t in zip(shapes, 2 * [np.uint8, ml_dtypes.float8_e4m3fn, np.float32], strict=True)]
    if amaxes and flags.get("row_scaled"):
        out[2][:] = amaxes[0]  # a given amax is returned, that of the tail as well
    block = 0
    for e, r in enumerate(slices(sizes, m)):
        of_group = r if flags.get("row_scaled") else e
        own = (amaxes[0][of_group], amaxes[1][e]) if amaxes else None
        with mock.patch.object(reference, "random_bytes", partial(reference.random_bytes, expert=e)):
            row, column = fp4.quantize_transpose(x[r], amax=own, **flags, implementation="reference")
        n = column.block_scale.shape[-1]
        out[0][r], out[1][r], out[2][of_group] = row.codes, row.block_scale, row.amax
        out[3][:, 8 * block : 8 * (block + n)], out[4][:, block : block + n] = column.codes, column.block_scale
        out[5][e] = column.amax
        block += n
    return out


def arrays(pair):
    return [leaf for q in pair for leaf in (q.codes, q.block_scale, q.amax)]


def check_quantizers(x, sizes, **flags):
    """NumPy specification, the handlers (both axes at once and each) and the given amax, against `alone`."""
    for amaxes in (None, tuple(q.amax / 2 for q in SPECIFICATION(x, group_sizes=sizes, **flags))):
        given_amax = {} if amaxes is None else dict(amax=amaxes)
        want = alone(x, sizes, amaxes, **flags)
        pair = SPECIFICATION(x, group_sizes=sizes, **given_amax, **flags)
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(pair))
        assert_same(arrays(pair), want, "specification")
        got = fp4.quantize_transpose(x, group_sizes=sizes, **given_amax, **flags)
        assert_same(got, pair, "handlers")
        for axis in (-1, 0):
            if axis == 0 or not flags.get("hadamard"):
                one = {} if amaxes is None else dict(amax=amaxes[axis + 1])
                assert_same(fp4.quantize(x, axis=axis, group_sizes=sizes, **one, **flags), pair[axis + 1], axis)


SPECIFICATION = partial(fp4.quantize_transpose, implementation="reference")


@pytest.mark.core
@every_variant
@few
@given(group_sizes(G, M), st.integers(0, 99), st.sampled_from([None, None, np.nan, np.inf, 0.0]))
def test_each_group_is_quantized_as_if_alone(variant, sizes, seed, odd):
    """A7, C1-C8: bit for bit, with exact zeros in the tail and in unused columns, and NaN there read by nobody."""
    x = rows(seed, sizes=sizes)
    if odd is not None and total(sizes, M):
        x[0, seed % K] = odd
    check_quantizers(x, sizes, **VARIANTS[variant])


@pytest.mark.parametrize("case", ["one group with a tail", "straddling blocks", "scale padding", *SMALL])
@pytest.mark.parametrize("variant", ["hadamard+stochastic", "row_scaled"])
def test_cases(case, variant):
    """And with rows of one block less a few, of another dtype."""
    sizes, m = CASES[case]
    x = rows(1, m, 13, sizes, ml_dtypes.bfloat16)
    check_quantizers(x, np.int32(sizes), **VARIANTS[variant])


@pytest.mark.core
@every_variant
def test_the_traceable_reference_is_the_numpy_one(variant):
    """C11: one program for all sizes; and eager is jitted."""
    flags = VARIANTS[variant]
    run = jax.jit(lambda x, s: SPECIFICATION(x, group_sizes=s, **flags))
    for sizes in ([8, 0, 30, 1, 17], [0, 0, 90, 0, 0], [INT32_MAX, 3, -1, 4, 5], [0, 0, 0, 0, 0], [1, 15, 16, 17, 33]):
        x, sizes = rows(2, sizes=sizes), np.int32(sizes)
        assert_same(run(x, sizes), SPECIFICATION(x, group_sizes=sizes, **flags), sizes)
    assert run._cache_size() == 1


@pytest.mark.core
@every_variant
def test_jit_with_traced_sizes(variant):
    """C11."""
    flags = VARIANTS[variant]
    run = jax.jit(lambda x, s: fp4.quantize_transpose(x, group_sizes=s, **flags))
    for sizes in ([8, 0, 30, 1, 17], [0, 0, 90, 0, 0], [INT32_MAX, 3, -1, 4, 5]):
        x, sizes = jnp.asarray(rows(3, sizes=sizes)), jnp.int32(sizes)
        assert_same(run(x, sizes), fp4.quantize_transpose(x, group_sizes=sizes, **flags), sizes)
    assert run._cache_size() == 1


@pytest.mark.core
def test_vmap_is_one_custom_call_and_no_loop():
    x = jnp.stack([rows(seed) for seed in range(3)])
    sizes = jnp.int32([[8, 0, 30, 1, 17], [0, 0, 90, 0, 0], [INT32_MAX, 3, -1, 4, 5]])
    one = lambda x, s: fp4.quantize_transpose(x, group_sizes=s, hadamard=True, key=KEY)  # noqa: E731
    f = jax.jit(jax.vmap(one))
    got = f(x, sizes)
    for i in range(3):
        assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], got), one(x[i], sizes[i]))
    text = f.lower(x, sizes).compile().as_text()
    assert text.count('custom_call_target="jax_fp4_quantize_transpose"') == 1 and "while" not in text
    for axes in ((0, None), (None, 0)):
        arguments = [a if axis == 0 else a[1] for a, axis in zip((x, sizes), axes, strict=True)]
        got = jax.vmap(one, in_axes=axes)(*arguments)
        for i in range(3):
            own = [a[i] if axis == 0 else a for a, axis in zip(arguments, axes, strict=True)]
            assert_same(jax.tree.map(lambda leaf, i=i: leaf[i], got), one(*own))


def test_groups_draw_differently_and_as_their_number():
    """Numerics 1.7: an expert's counter counts from its own first row, with its own number."""
    x = np.tile(rows(4, 16), (2, 1))
    codes = fp4.quantize(x, key=KEY, group_sizes=np.int32([16, 16])).codes
    assert (np.asarray(codes[:16]) != codes[16:]).any()
    moved = fp4.quantize(x[8:], key=KEY, group_sizes=np.int32([8, 16])).codes  # the second begins elsewhere
    np.testing.assert_array_equal(moved[8:], codes[16:])


@pytest.mark.parametrize("unit", [16, 5])
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("hadamard", [False, True])
def test_groups_whose_rows_lie_on_several_devices(devices, hadamard, unit):
    """Numerics 1.7: a seed that says where its rows of each group lie gives each device its part of the whole's codes.

    Column-wise if blocks stay whole. A device may have no row of a group, and a group may be on one device.
    """
    sizes, q = np.int32([100, 3, 0, 48, 33]), Quantization(hadamard=hadamard, k_total=32 + K)
    x, seed = rows(11, 190, sizes=sizes), np.uint32([1, 2, 6, 32])
    whole = reference.quantize_transpose(x, None, None, seed, sizes, q)
    starts, units = np.cumsum(sizes) - sizes, -(-sizes // unit)
    first_block = np.cumsum(-(-sizes // 16)) - -(-sizes // 16)
    first = [np.minimum(units * d // devices * unit, sizes) for d in range(devices + 1)]
    assert any((a == b)[sizes > 0].any() for a, b in itertools.pairwise(first))
    for a, b in itertools.pairwise(first):
        part = np.concatenate([x[s + i : s + j] for s, i, j in zip(starts, a, b, strict=True)] + [x[-2:]])
        place = np.concatenate([seed, a.astype(np.uint32), sizes.astype(np.uint32)])
        got = reference.quantize_transpose(part, whole[2], whole[5], place, b - a, q)
        row = block = 0
        for s, first_of, i, j in zip(starts, first_block, a, b, strict=True):
            for own, of_whole in zip(got[:2], whole[:2], strict=True):
                assert_same(own[row : row + j - i], of_whole[s + i : s + j])
            n = -(-(j - i) // 16)
            for own, of_whole, width in zip(got[3:5], whole[3:5], (8, 1), strict=True):
                at = first_of + i // 16
                if unit == 16:
                    assert_same(own[:, width * block : width * (block + n)], of_whole[:, width * at : width * (at + n)])
            row, block = row + j - i, block + n


@pytest.mark.parametrize(("words", "sizes"), [(5, [3, 4]), (10, [3, 4]), (8, None), (6, [])])
def test_a_seed_of_another_width_is_refused(words, sizes):
    sizes = None if sizes is None else np.int32(sizes)
    with pytest.raises(ValueError, match=f"seed is of {words} words; needs 4{' or 8' if words in (5, 10) else ' '}"):
        reference.quantize(rows(12, 7), None, np.zeros(words, np.uint32), sizes, Quantization())


# --- dequantize, and what a grouped tensor is ---


@pytest.mark.core
@pytest.mark.parametrize(
    ("variant", "dtype"),
    [("plain", np.float32), ("row_scaled", ml_dtypes.bfloat16), ("four_over_six_rows", np.float16)],
)
@few
@given(group_sizes(G, M))
def test_dequantize(variant, dtype, sizes):
    """Both layouts, per group, both implementations; the tail is zero."""
    flags, x = VARIANTS[variant], rows(5, sizes=sizes)
    for q in fp4.quantize_transpose(x, group_sizes=sizes, **flags):
        got = np.asarray(DEQUANTIZE(q, dtype))
        assert_same(DEQUANTIZE(q, dtype, implementation="reference"), DEQUANTIZE(q, dtype))
        assert got.shape == x.shape and got.dtype == dtype and not got[total(sizes, M) :].any()
        for r in slices(sizes, M):
            if r.stop > r.start:
                one = fp4.quantize(x[r], axis=q.axis, **flags, implementation="reference")
                want = np.asarray(fp4.dequantize(one, dtype, implementation="reference"))
                np.testing.assert_array_equal(bits(got[r]), bits(want))


DEQUANTIZE = jax.jit(fp4.dequantize, static_argnames=("dtype", "implementation"))


@pytest.mark.parametrize("case", [*SMALL, "one group with a tail"])
def test_dequantize_the_cases(case):
    sizes, m = CASES[case]
    x = rows(6, m, 20, sizes)
    for row_scaled in (False, True):
        for q in fp4.quantize_transpose(x, group_sizes=np.int32(sizes), row_scaled=row_scaled):
            got = np.asarray(DEQUANTIZE(q))
            assert got.shape == (m, 20) and not got[total(sizes, m) :].any()
            assert (np.abs(got - x)[: total(sizes, m)] <= 0.2 * np.abs(x[: total(sizes, m)]).max(initial=1)).all()


def test_transposed_and_shown():
    """.mT, .shape and repr of both layouts; the column-wise one has room for 5 ragged groups."""
    sizes = np.int32([8, 0, 30, 1, 17])
    row, column = fp4.quantize_transpose(rows(10), group_sizes=sizes)
    assert (row.codes.shape, column.codes.shape) == ((M, 24), (K, 80)) and row.shape == column.shape == (M, K)
    assert (row.mT.shape, column.mT.shape) == ((K, M), (K, M))
    assert "grouped='rows', codes=(90, 24), amax=(5,)" in repr(row) and "grouped='blocks', codes=(40, 80)" in repr(
        column
    )
    for q in (row, column):
        np.testing.assert_array_equal(DEQUANTIZE(q.mT), DEQUANTIZE(q).T)
        assert q.mT.grouped == q.grouped and q.mT.mT.axis == q.axis and q.mT.group_sizes is q.group_sizes


def test_a_non_finite_element_stays_in_its_group():
    """A26: the blocks that hold it are NaN, and no other group loses its scale."""
    x, sizes = rows(7), np.int32([20, 30, 40, 0, 0])
    x[25, 3] = np.inf
    row, column = fp4.quantize_transpose(x, group_sizes=sizes)
    bad = np.zeros(x.shape, bool)
    bad[25, :16] = True
    np.testing.assert_array_equal(np.isnan(fp4.dequantize(row)), bad)
    bad = np.zeros(x.shape, bool)
    bad[20:36, 3] = True
    np.testing.assert_array_equal(np.isnan(fp4.dequantize(column)), bad)
    np.testing.assert_array_equal(np.isinf(row.amax), [False, True, False, False, False])


def test_leading_axes_are_rows():
    x, sizes = rows(8, 24).reshape(2, 3, 4, K), np.int32([5, 0, 12])
    flat = fp4.quantize(x.reshape(24, K), group_sizes=sizes)
    q = fp4.quantize(x, group_sizes=sizes)
    assert q.shape == x.shape and q.codes.shape == (2, 3, 4, 24)
    np.testing.assert_array_equal(fp4.dequantize(q).reshape(24, K), fp4.dequantize(flat))
    scaled = fp4.quantize(x, group_sizes=sizes, row_scaled=True)
    assert scaled.amax.shape == (2, 3, 4)
    assert fp4.dequantize(scaled).shape == x.shape
    assert_same(fp4.quantize(x, axis=0, group_sizes=sizes), fp4.quantize(x.reshape(24, K), axis=0, group_sizes=sizes))


def test_padding_under_strict():
    """Groups are padded as their sizes say, which nobody knows at trace time; the last axis is as without groups."""
    with fp4.strict():
        fp4.quantize(jnp.ones((20, 32)), axis=0, group_sizes=np.int32([7, 13]))
        with pytest.raises(fp4.UnsupportedError, match="extent 20 along axis -1"):
            fp4.quantize(jnp.ones((32, 20)), group_sizes=np.int32([7, 13]))


# --- bad input ---

X, SIZES = np.ones((32, 48), np.float32), np.int32([10, 20])


@pytest.mark.parametrize("quantizer", [fp4.quantize, fp4.quantize_transpose])
@pytest.mark.parametrize(
    ("flags", "error", "says"),
    [
        (dict(group_sizes=[10, 20]), TypeError, "group_sizes is of type list; needs an int32 array"),
        (dict(group_sizes=np.array([10, 20])), TypeError, "group_sizes is of type int64; needs an int32 array"),
        (dict(group_sizes=np.float32([10, 20])), TypeError, "group_sizes is of type float32"),
        (dict(group_sizes=3), TypeError, "group_sizes is of type int; needs"),
        (dict(group_sizes=np.int32(3)), TypeError, "group_sizes is of type int32; needs an int32 array"),
        (dict(group_sizes=jnp.int32(3)), ValueError, r"group_sizes is of shape \(\); needs \[g\]"),
        (dict(group_sizes=SIZES[None]), ValueError, r"group_sizes is of shape \(1, 2\); needs \[g\]"),
        (dict(group_sizes=SIZES, block=(16, 16)), ValueError, r"block=\(16, 16\) is together with group_sizes"),
        (dict(group_sizes=SIZES, batch_dims=1), ValueError, "batch_dims is 1 beside group_sizes; needs 0 .*jax.vmap"),
        (dict(group_sizes=SIZES, amax=np.float32(1)), ValueError, r"needs float32 \(2,\)"),
        (dict(group_sizes=SIZES, amax=np.ones(3, np.float32)), ValueError, r"float32 \(3,\); needs float32 \(2,\)"),
        (dict(group_sizes=SIZES, amax=np.float32([1, -1])), ValueError, "is negative; needs values >= 0"),
    ],
)  # fmt: skip
def test_bad_input(quantizer, flags, error, says):
    """E12."""
    with pytest.raises(error, match=says) as caught:
        quantizer(X, **flags)
    text = str(caught.value)
    assert text.startswith(quantizer.__name__ + ": ") and "; needs " in text and " because " in text and " Try " in text


def test_a_given_amax_of_rows_has_the_shape_of_its_layout():
    flags = dict(group_sizes=SIZES, row_scaled=True)
    row, column = fp4.quantize_transpose(X, **flags)
    assert (row.amax.shape, column.amax.shape) == ((32,), (2, 48))
    assert_same(fp4.quantize(X, axis=0, amax=column.amax, **flags), column)
    with pytest.raises(ValueError, match=r"float32 \(32,\); needs float32 \(2, 48\)"):
        fp4.quantize(X, axis=0, amax=row.amax, **flags)


def test_differentiation_is_refused():
    with pytest.raises(fp4.UnsupportedError, match="quantize: x is differentiated"):
        jax.grad(lambda x: fp4.dequantize(fp4.quantize(x, group_sizes=SIZES)).sum())(X)


def test_blocks_of_the_layout_are_whole():
    """Unused columns are zero bytes, whatever memory held before (codes and scales, both layouts)."""
    for sizes in ([3, 0, 2], [0, 0, 0], [32, 0, 0], [1, 1, 1]):
        _, column = fp4.quantize_transpose(rows(9, 32), group_sizes=np.int32(sizes), hadamard=True)
        used = sum(-(-size // BLOCK) for size in sizes)
        assert not bits(column.codes)[:, used * BLOCK // 2 :].any() and not bits(column.block_scale)[:, used:].any()
