"""QuantizedTensor: shapes, transposes, and life as a pytree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4


@pytest.mark.core
@pytest.mark.parametrize(
    ("shape", "axis", "batch_dims", "logical", "codes", "scale", "amax", "row_amax"),
    [
        ((5, 50), -1, 0, (5, 50), (5, 32), (5, 4), (), (5,)),
        ((5, 50), 0, 0, (5, 50), (50, 8), (50, 1), (), (50,)),
        ((2, 3, 64), -1, 0, (2, 3, 64), (2, 3, 32), (2, 3, 4), (), (2, 3)),
        ((2, 3, 64), 0, 0, (6, 64), (64, 8), (64, 1), (), (64,)),
        ((2, 20, 64), 0, 1, (2, 20, 64), (2, 64, 16), (2, 64, 2), (2,), (2, 64)),
        ((2, 3, 20, 64), -1, 2, (2, 3, 20, 64), (2, 3, 20, 32), (2, 3, 20, 4), (2, 3), (2, 3, 20)),
        ((64,), -1, 0, (64,), (32,), (4,), (), ()),
        ((64,), 0, 0, (1, 64), (64, 8), (64, 1), (), (64,)),
        ((0, 64), -1, 0, (0, 64), (0, 32), (0, 4), (), (0,)),
    ],
)
def test_shapes(shape, axis, batch_dims, logical, codes, scale, amax, row_amax):
    x = jnp.ones(shape, jnp.bfloat16)
    for row_scaled, expected_amax in ((False, amax), (True, row_amax)):
        q = fp4.quantize(x, axis=axis, batch_dims=batch_dims, row_scaled=row_scaled)
        assert (q.codes.shape, q.block_scale.shape, q.amax.shape) == (codes, scale, expected_amax)
        assert (q.codes.dtype, q.block_scale.dtype, q.amax.dtype) == (jnp.uint8, jnp.float8_e4m3fn, jnp.float32)
        assert q.shape == logical and q.ndim == len(logical) and q.size == np.prod(logical) and q.dtype == x.dtype
        assert fp4.dequantize(q).shape == logical
        assert q.nbytes == q.codes.size + q.block_scale.size + 4 * q.amax.size
        np.testing.assert_array_equal(fp4.dequantize(q), np.ones(logical))


def test_transpose_is_free():
    x = jax.random.normal(jax.random.key(0), (24, 48))
    q = fp4.quantize(x)
    assert q.mT.codes is q.codes and (q.mT.shape, q.mT.axis, q.mT.mT) == ((48, 24), 0, q)
    np.testing.assert_array_equal(fp4.dequantize(q.mT), fp4.dequantize(q).T)
    with pytest.raises(ValueError, match=r"QuantizedTensor.mT: shape is \(64,\); needs two axes"):
        _ = fp4.quantize(jnp.ones(64)).mT


@pytest.mark.core
def test_life_as_a_pytree():
    x = jax.random.normal(jax.random.key(0), (3, 24, 48))
    q = fp4.quantize(x, axis=0, batch_dims=1, block=(16, 16))
    leaves, tree = jax.tree.flatten(q)
    assert len(leaves) == 3 and jax.tree.unflatten(tree, leaves).block == (16, 16)
    assert jax.tree.unflatten(tree, [None, object(), 3]).codes is None  # never validates
    one = jax.vmap(lambda q: fp4.dequantize(q))(q)
    np.testing.assert_array_equal(one, fp4.dequantize(q))
    _, scanned = jax.lax.scan(lambda c, q: (c, fp4.dequantize(q)), 0, q)
    np.testing.assert_array_equal(scanned, fp4.dequantize(q))
    assert jax.jit(lambda q: q)(q).extent == 24
    assert "axis=0, extent=24" in repr(q)
    for put in (lambda _: None, jnp.shape, lambda _: 0):
        assert "QuantizedTensor(nvfp4" in repr(jax.tree.map(put, q))


@pytest.mark.parametrize("use", [np.asarray, jnp.asarray, lambda q: q + 1, lambda q: jnp.dot(q, q)])
def test_never_densifies_silently(use):
    with pytest.raises(TypeError):
        use(fp4.quantize(jnp.ones((16, 16))))
