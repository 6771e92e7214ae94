"""Tests that need a GPU and the CUDA extension. JAX_FP4_REQUIRE=cuda turns their absence into a failure."""

import os

import jax
import pytest

from jax_fp4 import _ffi


def why_not() -> str:
    if _ffi.cuda_missing:
        return _ffi.cuda_missing
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"no CUDA device: {error}"
    return ""


@pytest.fixture(scope="session")
def gpu():
    """The first CUDA device."""
    if reason := why_not():
        if "cuda" in os.environ.get("JAX_FP4_REQUIRE", ""):
            pytest.fail(f"JAX_FP4_REQUIRE names cuda, and {reason}")
        pytest.skip(reason)
    return jax.devices("cuda")[0]


@pytest.fixture(scope="session")
def cpu():
    return jax.devices("cpu")[0]
