"""Hypothesis runs the same examples every time; HYPOTHESIS_MAX_EXAMPLES asks for more of them."""

import os

import hypothesis

hypothesis.settings.register_profile(
    "default", deadline=None, derandomize=True, max_examples=int(os.environ.get("HYPOTHESIS_MAX_EXAMPLES", "16"))
)
hypothesis.settings.load_profile("default")
