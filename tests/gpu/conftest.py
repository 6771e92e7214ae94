"""Tests that need a GPU and the CUDA extension. JAX_FP4_REQUIRE=cuda turns their absence into a failure."""

import jax
import pytest
from required import missing

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
        missing("cuda", reason)
    return jax.devices("cuda")[0]


@pytest.fixture(scope="session")
def cpu():
    return jax.devices("cpu")[0]
