"""What some tests need and a machine may lack."""

import os

import pytest


def missing(name: str, why: str) -> None:
    """Skips the test, or fails it where JAX_FP4_REQUIRE names what is missing."""
    if name in os.environ.get("JAX_FP4_REQUIRE", "").split():
        pytest.fail(f"JAX_FP4_REQUIRE names {name}, and {why}")
    pytest.skip(why)
