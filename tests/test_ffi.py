"""The border: handlers refuse what would read or write outside a buffer, whatever Python sends them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp4 import _ffi, reference
from jax_fp4._formats import Quantization

X = jnp.ones((16, 32))
F32, U8, U32, E4M3 = jnp.float32, jnp.uint8, jnp.uint32, jnp.float8_e4m3fn
RESULTS = [((16, 16), U8), ((16, 2), E4M3), ((), F32)]


def quantize(x=X, amax=((0,), F32), seed=((0,), U32), results=None, target="jax_fp4_quantize", **attributes):
    """A raw call of the handler, with one thing wrong."""
    shapes = [jax.ShapeDtypeStruct(*r) for r in (results or RESULTS)]
    attributes = {"axis": np.int32(-1), **_ffi._attributes(Quantization(), None), **attributes}
    operands = [x, jnp.zeros(*amax), jnp.zeros(*seed)]
    jax.block_until_ready(jax.ffi.ffi_call(target, shapes)(*operands, **attributes))


@pytest.mark.core
def test_a_right_call_passes():
    quantize()


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
        (dict(results=[((16, 15), U8), *RESULTS[1:]]), r"codes is \[16,15\]; needs \[16,16\]"),
        (dict(results=[RESULTS[0], ((2, 16), E4M3), RESULTS[2]]), r"block_scale is \[2,16\]; needs \[16,2\]"),
        (dict(results=[RESULTS[0], ((16, 2), U8), RESULTS[2]]), "block_scale has another element type"),
        (dict(results=[*RESULTS[:2], ((16,), F32)]), r"result amax is \[16\]; needs \[\]"),
        (dict(axis=np.int32(0)), r"codes is \[16,16\]; needs \[32,8\]"),
        (dict(tile=np.int32(3)), "attribute tile"),
        (dict(bound=np.int32(3)), "attribute bound"),
        (dict(compute=np.int32(9)), "attribute compute"),
        (dict(four_over_six=np.int32(9)), "attribute four_over_six"),
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
    from jax_fp4 import _cpu, _ops

    assert set(_cpu.registrations()) == {f"jax_fp4_{op}" for op in _ops._FUNCTIONS}
    assert _cpu.isa() in ("baseline", "avx2", "avx512")


@pytest.mark.parametrize("bits", [0x80000001, 0x800116C2, 0xBF800000, 0xFF7FFFFF, 0xFF800000], ids=hex)
def test_a_given_amax_below_zero_is_refused_even_where_denormals_are_zeros(bits):
    # Once a call of these shapes has succeeded, jax raises the same error as a ValueError.
    refused = (jax.errors.JaxRuntimeError, ValueError)
    with pytest.raises(refused, match="jax_fp4_quantize: amax has a negative element"):
        jax.block_until_ready(_ffi.quantize(X, amax_of(bits), None, Quantization()))


@pytest.mark.parametrize("bits", [0x80000000, 0x00000001, 0x7F800000, 0xFFC00000, 0xFF800001], ids=hex)
def test_a_given_amax_may_be_minus_zero_or_any_nan(bits):
    _, _, amax = _ffi.quantize(X, amax_of(bits), None, Quantization())
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    assert np.asarray(amax).view(np.uint32) == (0x7FC00000 if is_nan else bits)


def amax_of(bits):
    return jnp.asarray(np.uint32(bits).view(np.float32))


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
