"""What is lowered for CUDA, seen without a GPU: one trace has the custom calls of the platform it is lowered for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from jax_fp4 import _ffi, _ops


@pytest.fixture(params=[True, False], ids=["with extension", "without"])
def extension(request, monkeypatch):
    """As an installation with the CUDA extension would lower, and as one without."""
    monkeypatch.setattr(_ffi, "cuda_missing", "" if request.param else "this installation has no CUDA extension")
    _forget()
    yield request.param
    _forget()


def _forget():
    """Traces made for the other kind of installation."""
    _ops._implementation.cache_clear()
    jax.clear_caches()


def calls(function, *arguments, platform="cuda"):
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    return re.findall(r"custom_call @(jax_fp4_\w+)", text)


X = jnp.ones((32, 64), jnp.bfloat16)
SIZES = jnp.array([10, 22], jnp.int32)


def test_quantizers(extension):
    for function, name in (
        (fp4.quantize, "jax_fp4_quantize"),
        (fp4.quantize_transpose, "jax_fp4_quantize_transpose"),
        (lambda x: fp4.quantize(x, axis=0, group_sizes=SIZES), "jax_fp4_quantize"),
    ):
        assert calls(function, X) == [name] * extension
        assert calls(function, X, platform="cpu") == [name]
    q = fp4.quantize(X)
    assert calls(fp4.dequantize, q) == ["jax_fp4_dequantize"] * extension


def test_one_trace_serves_both_platforms(extension):
    traced = jax.jit(fp4.quantize).trace(X)
    for platform, count in (("cuda", int(extension)), ("cpu", 1)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("custom_call @jax_fp4_quantize") == count
    assert "@jax_fp4_quantize" in traced.lower(lowering_platforms=("cpu", "cuda")).as_text()


def test_a_layer_and_its_gradient(extension):
    recipe, w = fp4.NVFP4BlockScaling(), jnp.ones((64, 32))

    def loss(w, x):
        return jnp.sum(fp4.dense(x, w, recipe=recipe, key=np.zeros(2, np.uint32)).astype(jnp.float32))

    found = calls(jax.grad(loss, argnums=(0, 1)), w, X)
    assert found.count("jax_fp4_quantize_transpose") == 3 * extension


def test_strict_and_named_implementations(extension):
    with fp4.strict():
        if extension:
            assert calls(fp4.quantize, X) == ["jax_fp4_quantize"]
        else:
            with pytest.raises(fp4.UnsupportedError, match="platform is cuda; needs cpu because"):
                calls(fp4.quantize, X)
    named = lambda x: fp4.quantize(x, implementation="cuda")  # noqa: E731
    if extension:
        assert calls(named, X) == ["jax_fp4_quantize"]
        with pytest.raises(fp4.UnsupportedError, match="platform is cpu; needs cuda because"):
            calls(named, X, platform="cpu")
    else:
        with pytest.raises(fp4.UnsupportedError, match="implementation is 'cuda'; needs the CUDA extension because"):
            calls(named, X)
    with pytest.raises(fp4.UnsupportedError, match="platform is cuda; needs cpu because"):
        calls(lambda x: fp4.quantize(x, implementation="cpu"), X)
    assert bool(fp4.supported("quantize", "cuda")) is extension
