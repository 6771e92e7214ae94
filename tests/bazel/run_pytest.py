"""Runs pytest on the files named, from the top of what Bazel laid out, on the package that Bazel built."""

import importlib.util
import os
import sys

import pytest

spec = importlib.util.find_spec("jax_fp4")  # found, not imported: pytest's own hooks come before that
if spec is None or not os.path.abspath(str(spec.origin)).startswith(os.environ["TEST_SRCDIR"]):
    sys.exit(f"jax_fp4 would come from {spec and spec.origin}, not from Bazel's {os.environ['TEST_SRCDIR']}")
sys.exit(pytest.main(["-c", "pyproject.toml", "--rootdir=.", "-p", "no:cacheprovider", "-q", *sys.argv[1:]]))
