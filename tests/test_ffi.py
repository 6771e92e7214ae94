"""The border: handlers refuse what would read or write outside a buffer, whatever Python sends them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp4 import _ffi, reference
from jax_fp4._formats import Quantization

X = jnp.ones((16, 32))
F32, U8, U32, S32, E4M3 = jnp.float32, jnp.uint8, jnp.uint32, jnp.int32, jnp.float8_e4m3fn
RESULTS = [((16, 16), U8), ((16, 2), E4M3), ((), F32)]
# Of X in three groups, row-wise and column-wise: (16 + 15 * 3) // 16 blocks hold the columns.
ROWS = [*RESULTS[:2], ((3,), F32)]
COLUMNS = [((32, 24), U8), ((32, 3), E4M3), ((3,), F32)]


def quantize(
    x=X, amax=((0,), F32), seed=((0,), U32), groups=((0,), S32), results=None, target="jax_fp4_quantize", **attributes
):
    """A raw call of the handler, with one thing wrong."""
    shapes = [jax.ShapeDtypeStruct(*r) for r in (results or RESULTS)]
    attributes = {"axis": np.int32(-1), **_ffi._attributes(Quantization(), None, None), **attributes}
    operands = [x, jnp.zeros(*amax), jnp.zeros(*seed), jnp.zeros(*groups)]
    jax.block_until_ready(jax.ffi.ffi_call(target, shapes)(*operands, **attributes))


def grouped(**arguments):
    """The arguments of a raw call with three groups."""
    return dict(groups=((3,), S32), results=ROWS, grouped=np.bool_(True)) | arguments


@pytest.mark.core
def test_a_right_call_passes():
    quantize()
    quantize(**grouped())
    quantize(**grouped(results=COLUMNS, axis=np.int32(0)))
    for words in (4, 10):
        quantize(**grouped(seed=((words,), U32)))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(x=jnp.ones((16, 32), jnp.int32)), "x must be float32, bfloat16 or float16"),
        (dict(x=jnp.ones(32)), "x has rank below 2"),
        (dict(amax=((3,), F32)), r"amax is \[3\]; needs \[0\]"),
        (dict(amax=((0,), U32)), "amax has another element type"),
        (dict(given_amax=np.bool_(True)), r"amax is \[0\]; needs \[\]"),
        (dict(seed=((3,), U32)), r"seed is \[3\]; needs \[4\]"),
        (dict(seed=((4,), F32)), "seed has another element type"),
        (dict(seed=((6,), U32)), r"seed is \[6\]; needs \[4\](?! or)"),
        (grouped(seed=((9,), U32)), r"seed is \[9\]; needs \[4\] or \[10\]"),
        (grouped(seed=((11,), U32)), r"seed is \[11\]; needs \[4\] or \[10\]"),
        (grouped(seed=((1, 10), U32)), r"seed is \[1,10\]; needs \[4\] or \[10\]"),
        (grouped(seed=((10,), F32)), "seed has another element type"),
        (dict(results=[((16, 15), U8), *RESULTS[1:]]), r"codes is \[16,15\]; needs \[16,16\]"),
        (dict(results=[RESULTS[0], ((2, 16), E4M3), RESULTS[2]]), r"block_scale is \[2,16\]; needs \[16,2\]"),
        (dict(results=[RESULTS[0], ((16, 2), U8), RESULTS[2]]), "block_scale has another element type"),
        (dict(results=[*RESULTS[:2], ((16,), F32)]), r"result amax is \[16\]; needs \[\]"),
        (dict(axis=np.int32(0)), r"codes is \[16,16\]; needs \[32,8\]"),
        (dict(tile=np.int32(3)), "attribute tile"),
        (dict(bound=np.int32(3)), "attribute bound"),
        (dict(compute=np.int32(9)), "attribute compute"),
        (dict(four_over_six=np.int32(9)), "attribute four_over_six"),
        (dict(groups=((3,), S32)), r"group_sizes is \[3\]; needs \[0\]"),
        (dict(groups=((), S32)), r"group_sizes is \[\]; needs \[0\]"),
        (dict(groups=((0,), U32)), "group_sizes has another element type"),
        (grouped(groups=((3,), F32)), "group_sizes has another element type"),
        (grouped(groups=((), S32)), r"group_sizes is \[\]; needs \[0\]"),
        (grouped(groups=((2, 3), S32)), r"group_sizes is \[2,3\]; needs \[3\]"),
        (grouped(groups=((4,), S32)), r"result amax is \[3\]; needs \[4\]"),
        (grouped(amax=((), F32), given_amax=np.bool_(True)), r"amax is \[\]; needs \[3\]"),
        (grouped(results=RESULTS), r"result amax is \[\]; needs \[3\]"),
        (grouped(row_scaled=np.bool_(True)), r"result amax is \[3\]; needs \[16\]"),
        (grouped(axis=np.int32(0), results=[((32, 8), U8), *COLUMNS[1:]]), r"codes is \[32,8\]; needs \[32,24\]"),
        (grouped(axis=np.int32(0), results=[COLUMNS[0], ((32, 1), E4M3), COLUMNS[2]]), r"block_scale is \[32,1\]"),
        (grouped(axis=np.int32(0), results=COLUMNS, row_scaled=np.bool_(True)), r"amax is \[3\]; needs \[3,32\]"),
        (grouped(tile=np.int32(16)), "group_sizes exclude tile 16"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_call_is_refused_by_name(wrong, says):
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jax_fp4_quantize: .*{says}"):
        quantize(**wrong)


def test_dequantize_refuses_more_than_the_codes_hold():
    codes, scale = jnp.zeros((16, 16), U8), jnp.zeros((16, 2), E4M3)
    assert _ffi.dequantize(codes, scale, jnp.float32(1), 448, 32, F32).shape == (16, 32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="jax_fp4_dequantize: "):
        jax.block_until_ready(_ffi.dequantize(codes, scale, jnp.float32(1), 448, 33, F32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="jax_fp4_dequantize: "):
        jax.block_until_ready(_ffi.dequantize(codes, scale[:, :1], jnp.float32(1), 448, 32, F32))


@pytest.mark.core
def test_every_target_is_registered_under_the_name_of_its_op():
    from jax_fp4 import _cpu, _float8, _ops

    float8 = {f"jax_fp4_{op}_float8" for op in _float8._FUNCTIONS}
    assert set(_cpu.registrations()) == {f"jax_fp4_{op}" for op in (*_ops._FUNCTIONS, "amax")} | float8
    assert _cpu.isa() in ("baseline", "avx2", "avx512")


@pytest.mark.parametrize("bits", [0x80000001, 0x800116C2, 0xBF800000, 0xFF7FFFFF, 0xFF800000], ids=hex)
def test_a_given_amax_below_zero_is_refused_even_where_denormals_are_zeros(bits):
    # Once a call of these shapes has succeeded, jax raises the same error as a ValueError.
    refused = (jax.errors.JaxRuntimeError, ValueError)
    with pytest.raises(refused, match="jax_fp4_quantize: amax has a negative element"):
        jax.block_until_ready(_ffi.quantize(X, amax_of(bits), None, None, Quantization()))


@pytest.mark.parametrize("bits", [0x80000000, 0x00000001, 0x7F800000, 0xFFC00000, 0xFF800001], ids=hex)
def test_a_given_amax_may_be_minus_zero_or_any_nan(bits):
    _, _, amax = _ffi.quantize(X, amax_of(bits), None, None, Quantization())
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    assert np.asarray(amax).view(np.uint32) == (0x7FC00000 if is_nan else bits)


def amax_of(bits):
    return jnp.asarray(np.uint32(bits).view(np.float32))


SIZES = [[3, 0, 40, 16], [0, 0, 0, 0], [-5, 2**31 - 1, 7, -(2**31)], [64, 0, 0, 0], [1, 1, 1, 70]]
FLAGS = [{}, dict(row_scaled=True), dict(hadamard=True), dict(four_over_six="MAE", bound=256)]


@pytest.mark.parametrize("flags", [*FLAGS, dict(seed=True), dict(seed=True, hadamard=True)], ids=str)
def test_each_group_equals_the_reference_of_that_group_alone(flags):
    """Whatever the sizes; under stochastic rounding the group is an expert, of number seed[2] + its own."""
    rng, flags = np.random.default_rng(0), dict(flags)
    seed = np.tile(np.uint32([1, 2, 5, 16]), (len(SIZES), 1)) if flags.pop("seed", False) else None
    q, sizes = Quantization(**flags), np.int32(SIZES)
    x = rng.standard_normal((len(SIZES), 64, 40), np.float32)
    arguments = jax.tree.map(jnp.asarray, (x, None, None, seed, sizes))
    got = jax.tree.map(np.asarray, _ffi.quantize_transpose(*arguments, q))
    row, column = got[:3], got[3:]
    for b, of_groups in enumerate(SIZES):
        ends = np.minimum(np.cumsum(np.maximum(of_groups, 0)), 64)
        begin = block = 0
        for e, end in enumerate(ends):
            blocks = -(-(end - begin) // 16)
            own, only = (None, None) if seed is None else (np.uint32([1, 2, 5 + e, 16]), np.int32([end - begin]))
            alone = reference.quantize_transpose(x[b, begin:end], None, None, own, only, q)
            rows = slice(begin, end)
            same(alone[0], row[0][b, rows])
            same(alone[1], row[1][b, rows])
            same(alone[2], row[2][b, rows] if q.row_scaled else row[2][b, e : e + 1])
            same(alone[3][:, : 8 * blocks], column[0][b, :, 8 * block : 8 * (block + blocks)])
            same(alone[4][:, :blocks], column[1][b, :, block : block + blocks])
            same(alone[5], column[2][b, e])
            begin, block = end, block + blocks
        rest = (row[0][b, begin:], row[1][b, begin:], column[0][b, :, 8 * block :], column[1][b, :, block:])
        assert not any(part.view(np.uint8).any() for part in rest)


def same(expected, got):
    """Equal bit for bit; one amax may come as [] or [1]."""
    expected, got = np.atleast_1d(expected), np.atleast_1d(got)
    np.testing.assert_array_equal(expected.view(np.uint8), got.view(np.uint8))


@pytest.mark.parametrize("flags", [dict(k_total=4000), dict(hadamard=True, compute_dtype="bfloat16")], ids=str)
def test_parts_of_groups_equal_the_reference(flags):
    """Of random sizes, which begin at random rows of groups of random extents: in both directions and in each."""
    rng, q = np.random.default_rng(1), Quantization(**flags)
    traced = jax.jit(partial(reference.quantize_transpose, q=q))
    both = jax.jit(partial(_ffi.quantize_transpose, q=q))
    row, column = (
        jax.jit(partial(_ffi.quantize, q=replace(q, axis=axis, hadamard=q.hadamard and axis == 0))) for axis in (-1, 0)
    )
    for shape, groups, runs in (((3, 150, 40), 5, (both, traced)), ((1, 64, 33), 1, (both,))):
        for most in (40, 3000, 2**32 - 1000, 2**32 - 1000):
            x = rng.standard_normal(shape, np.float32)
            seed = rng.integers(0, most, (shape[0], 4 + 2 * groups), np.uint32)
            seed[:, 3] -= seed[:, 3] % 16
            sizes = rng.integers(-5, 2 * shape[1] // groups, (shape[0], groups), np.int32)
            want = reference.quantize_transpose(x, None, None, seed, sizes, q)
            for run in runs:
                jax.tree.map(same, want, run(x, None, None, seed, sizes))
            jax.tree.map(same, want[:3], row(x, None, seed, sizes))
            jax.tree.map(same, want[3:], column(x, None, seed, sizes))


def test_vmap_maps_the_group_sizes_too():
    x, sizes = jnp.stack([X, 2 * X]), jnp.array([[3, 5], [16, 0]])
    q = Quantization(axis=0)
    mapped = jax.vmap(lambda x, g: _ffi.quantize(x, None, None, g, q))(x, sizes)
    jax.tree.map(same, mapped, _ffi.quantize(x, None, None, sizes, q))
    shared = jax.vmap(lambda x: _ffi.quantize(x, None, None, sizes[0], q))(x)
    jax.tree.map(same, shared, _ffi.quantize(x, None, None, jnp.stack([sizes[0]] * 2), q))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("amax", [np.float32(3.7), np.float32(1e-38), None], ids=["amax", "tiny amax", "product form"])
def test_dequantize_equals_the_reference_for_every_scale_byte_and_every_code(amax, dtype):
    """A scale with the sign bit set is negative; 0x7F and 0xFF are NaN."""
    scale = np.arange(256, dtype=np.uint8)[:, None].view(E4M3)
    codes = np.broadcast_to(reference.pack(np.arange(16, dtype=np.uint8)), (256, 8))
    for bound in (256, 448):
        expected = reference.dequantize(codes, scale, amax, bound, 16, dtype)
        word = np.uint16 if expected.dtype.itemsize == 2 else np.uint32
        got = np.asarray(_ffi.dequantize(codes, scale, amax, bound, 16, dtype))
        np.testing.assert_array_equal(np.isnan(got).nonzero(), np.isnan(expected).nonzero())
        finite = ~np.isnan(expected)
        np.testing.assert_array_equal(got.view(word)[finite], expected.view(word)[finite])
