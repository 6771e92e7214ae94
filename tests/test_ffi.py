"""The border: handlers refuse what would read or write outside a buffer, whatever Python sends them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_fp4 import _ffi
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
