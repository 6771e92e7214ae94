"""The table of backward modes: what is not visible from `dense`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from jax_fp4 import _modes, _rules


@pytest.mark.core
@pytest.mark.parametrize(("k", "n"), [(64, 32), (40, 20), (16, 1), (7, 50)])
def test_tiles_turned_equal_the_other_plane(k, n):
    w = jax.random.normal(jax.random.key(k), (k, n))
    along_n, along_k = fp4.quantize_transpose(w, block=(16, 16))
    for got, want in ((_modes.transpose_tiles(along_k), along_n), (_modes.transpose_tiles(along_n), along_k)):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_keep_has_one_tree():
    make = lambda: fp4.quantize(jnp.ones((16, 32)))  # noqa: E731
    kept, empty = _rules.keep(make(), make), _rules.keep(None, make)
    assert jax.tree.structure(kept) == jax.tree.structure(empty)
    assert _rules.is_kept(kept) and not _rules.is_kept(empty)
    assert _rules.is_kept(fp4.quantize(jnp.ones((0, 32))))  # empty because x is, not because nobody needs it
