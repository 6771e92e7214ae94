"""The module that Bazel built: it is the one imported, it has every CPU target, and its bits are the reference's."""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp4
from jax_fp4 import _cpu


def main() -> None:
    runfiles = os.environ["TEST_SRCDIR"]
    for module in (jax_fp4, _cpu):
        if not os.path.abspath(module.__file__).startswith(runfiles):
            sys.exit(f"{module.__name__} came from {module.__file__}, not from Bazel's {runfiles}")
    print(f"{_cpu.__file__}: {', '.join(_cpu.registrations())}")
    x = jax.random.normal(jax.random.key(0), (40, 64), jnp.bfloat16)
    for row_scaled in (False, True):
        got = jax_fp4.quantize(x, row_scaled=row_scaled, implementation="cpu")
        expected = jax_fp4.quantize(x, row_scaled=row_scaled, implementation="reference")
        for name in ("codes", "block_scale", "amax"):
            a, b = (np.asarray(getattr(q, name)) for q in (got, expected))
            if a.tobytes() != b.tobytes():
                sys.exit(f"quantize(row_scaled={row_scaled}): {name} differs from the reference")


if __name__ == "__main__":
    main()
