"""What the tests of the mixture-of-experts layers share, Linen and NNX: a small layer, its input, a recipe."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

import jax_fp4 as fp4

MODES = ("default", "unquant", "dequant")
E, D, F = 4, 16, 8
X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, D), np.float32))
SIZES = jnp.int32([3, 0, 6, 2])
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is most of what this takes


def recipe(mode="unquant", **kw):
    return fp4.NVFP4BlockScaling(backward_mode=mode, **kw)
