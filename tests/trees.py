"""Comparisons of trees of arrays."""

from functools import partial

import jax
import numpy as np


def same_tree(a, b):
    """The same structure (boxes included), dtypes, shapes and bits; NaN counts."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for ours, theirs in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        np.testing.assert_array_equal(np.asarray(ours, np.float64), np.asarray(theirs, np.float64))


def close_tree(a, b):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), a, b)
