"""Eight CPU devices, for meshes; and Hypothesis runs the same examples every time, HYPOTHESIS_MAX_EXAMPLES more."""

import os

import hypothesis

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"  # before jax

hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "16"))
)
hypothesis.settings.load_profile("default")
