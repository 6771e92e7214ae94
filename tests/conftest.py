"""Eight CPU devices, for meshes; Hypothesis runs the same examples every time, HYPOTHESIS_MAX_EXAMPLES more; and no
file leaves its compiled programs to the next."""

import os

import hypothesis
import pytest

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"  # before jax

hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "16"))
)
hypothesis.settings.load_profile("default")


@pytest.fixture(scope="module", autouse=True)
def no_programs_left():
    """A program that XLA compiled for the CPU keeps some memory maps, and Linux gives a process 65,530: whole test runs
    were aborted at that border, in whichever test came last."""
    yield
    import jax  # here, since the flag above must be set before

    jax.clear_caches()
