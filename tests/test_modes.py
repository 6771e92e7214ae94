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


@pytest.mark.parametrize(
    ("recipe", "one", "both"),
    [
        (fp4.MXFP8BlockScaling("default"), 0, 3),
        (fp4.Float8CurrentScaling("default"), 0, 3),
        (fp4.MXFP8BlockScaling("dequant"), 2, 0),
        (fp4.CustomRecipe(fp4.MXFP8BlockScaling("default")), 0, 3),  # of one recipe: as that alone
        (fp4.CustomRecipe(fp4.MXFP8BlockScaling("default"), wgrad=fp4.HIGH_PRECISION), 2, 1),  # x one way, dy one way
        (fp4.CustomRecipe(fp4.Float8BlockScaling("default"), *[fp4.MXFP8BlockScaling("default")] * 2), 4, 1),
    ],
)
def test_what_agrees_is_quantized_in_one_pass(recipe, one, both):
    """x for y and dw, w for y and dx, dy for dx and dw."""
    step = jax.grad(lambda x, w: fp4.dense(x, w, recipe=recipe).sum(), (0, 1))
    text = str(jax.make_jaxpr(step)(jnp.ones((32, 64)), jnp.ones((64, 32))))
    calls = [text.count(f"target_name=jax_fp4_{op}\n") for op in ("quantize_float8", "quantize_transpose_float8")]
    assert calls == [one, both]


@pytest.mark.parametrize("format", ["mxfp8", "float8_block", "float8", "float8_e5m2"])
@pytest.mark.parametrize(("k", "n"), [(64, 32), (40, 300), (130, 1)])
def test_8_bit_tiles_turned_equal_the_other_plane(format, k, n):
    w = jax.random.normal(jax.random.key(k), (2, k, n))
    block = {"mxfp8": (32, 32), "float8_block": (128, 128)}.get(format)
    along_n, along_k = fp4.quantize_transpose(w, format, block=block, batch_dims=1)
    for got, want in ((_modes.transpose_tiles(along_k), along_n), (_modes.transpose_tiles(along_n), along_k)):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(*(np.asarray(x).view(f"u{x.dtype.itemsize}") for x in (a, b)))
