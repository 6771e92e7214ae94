"""matmul: products of quantized and other operands. test_grouped_matmul.py has those of groups."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_files import golden_files, load, without_negative_zero
from products import refused

import jax_fp4 as fp4

KEY = jax.random.key(3)
FLAGS = {"plain": {}, "row_scaled": dict(row_scaled=True), "four_over_six": dict(four_over_six=fp4.FourOverSix())}


def bits(a):
    a = np.asarray(a)
    return a.view(f"u{a.dtype.itemsize}")


def same_codes(got, want):
    np.testing.assert_array_equal(without_negative_zero(np.asarray(got)), without_negative_zero(np.asarray(want)))


@pytest.mark.parametrize("path", golden_files("gemm_*"), ids=lambda p: p.stem)
def test_golden_products(path):
    """Codes and scales of the three operands bit for bit; the three products within their bound."""
    file = load(path)
    cfg = file["cfg"]
    pairs = {}
    for name in ("x", "w", "dy"):
        c = cfg[name]
        four = fp4.FourOverSix(c.get("e4m3", 256), c.get("mode", "MAE")) if c.get("f46") else None
        flags = dict(block=tuple(c["tile"]), row_scaled=c.get("row_scaled", False), hadamard=c.get("rht", False))
        array = jnp.asarray(file[name], jnp.bfloat16)
        pairs[name] = fp4.quantize_transpose(array, **flags, four_over_six=four)
        for q, suffix in zip(pairs[name], ("", "_t"), strict=True):
            same_codes(q.codes, file[f"{name}_data{suffix}"])
            np.testing.assert_array_equal(bits(q.block_scale), file[f"{name}_scale{suffix}"])
            np.testing.assert_array_equal(bits(q.amax).reshape(-1), bits(file[f"{name}_amax{suffix}"]))
    (x, x_t), (w, w_t), (dy, dy_t) = pairs["x"], pairs["w"], pairs["dy"]  # w is [n, k] there
    products = {"y": (x, w.mT), "dx": (dy, w_t), "dw": (dy_t.mT, x_t)}
    for name, (lhs, rhs) in products.items():
        for dtype, suffix, tolerance in ((jnp.float32, "f32", 1e-6), (jnp.bfloat16, "bf16", 2**-8)):
            got = np.asarray(fp4.matmul(lhs, rhs, preferred_element_type=dtype), np.float64)
            want = file[f"{name}_{suffix}"].astype(np.float64)
            assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want), name


def test_doubled_amax_doubles_the_product():
    """A16."""
    q = fp4.quantize(jax.random.normal(KEY, (32, 64)))
    w = fp4.quantize(jax.random.normal(KEY, (64, 16)), axis=0)
    doubled = jax.tree.map(lambda leaf: leaf * 2 if leaf is q.amax else leaf, q)
    np.testing.assert_array_equal(2 * fp4.matmul(q, w), fp4.matmul(doubled, w))


@pytest.mark.core
@pytest.mark.parametrize(("m", "k", "n"), [(5, 48, 7), (64, 1024, 32), (16, 8192, 16), (1, 16, 1), (33, 130, 17)])
@pytest.mark.parametrize("variant", FLAGS)
def test_product_error(m, k, n, variant):
    """Relative Frobenius error against a float64 product of the dequantized operands, float32 output: 1e-6 on CPU."""
    flags = FLAGS[variant]
    lhs = fp4.quantize(jax.random.normal(KEY, (m, k)), **flags)
    rhs = fp4.quantize(jax.random.normal(jax.random.key(1), (k, n)), axis=0)
    exact = partial(fp4.dequantize, dtype=jnp.float32)
    want = np.asarray(exact(lhs), np.float64) @ np.asarray(exact(rhs), np.float64)
    got = np.asarray(fp4.matmul(lhs, rhs), np.float64)
    assert np.linalg.norm(got - want) <= 1e-6 * np.linalg.norm(want)
    narrow = np.asarray(fp4.matmul(lhs, rhs, preferred_element_type=jnp.bfloat16), np.float64)
    assert (np.abs(narrow - want) <= 2**-8 * np.abs(want) + 1e-5 * np.abs(want).max()).all()


@pytest.mark.parametrize("k", [0, 16])
def test_empty_products(k):
    lhs, rhs = fp4.quantize(jnp.ones((3, k))), fp4.quantize(jnp.ones((k, 2)), axis=0)
    np.testing.assert_array_equal(fp4.matmul(lhs, rhs), np.full((3, 2), k))
    assert fp4.matmul(fp4.quantize(jnp.ones((0, 16))), fp4.quantize(jnp.ones((16, 2)), axis=0)).shape == (0, 2)


def test_mixed_and_batched_products():
    x, w = jax.random.normal(KEY, (3, 8, 32)), jax.random.normal(KEY, (3, 32, 16))
    qx, qw = fp4.quantize(x, batch_dims=1), fp4.quantize(w, axis=0, batch_dims=1)
    got = fp4.matmul(qx, qw)
    for i in range(3):
        one = fp4.matmul(fp4.quantize(x[i]), fp4.quantize(w[i], axis=0))
        np.testing.assert_array_equal(got[i], one)
    np.testing.assert_allclose(fp4.matmul(x, qw), x @ fp4.dequantize(qw), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(fp4.matmul(qx, w), fp4.dequantize(qx) @ w, rtol=1e-5, atol=1e-5)
    shared = fp4.matmul(fp4.quantize(x), fp4.quantize(w[0], axis=0))
    want = fp4.dequantize(fp4.quantize(x)) @ fp4.dequantize(fp4.quantize(w[0], axis=0))
    np.testing.assert_allclose(shared, want, rtol=1e-5, atol=1e-5)


def test_transposes_are_free_and_meet():
    x, dy = jax.random.normal(KEY, (40, 32)), jax.random.normal(KEY, (40, 16))
    w = jax.random.normal(KEY, (32, 16))
    dx = fp4.matmul(fp4.quantize(dy), fp4.quantize(w).mT)
    dw = fp4.matmul(fp4.quantize(x, axis=0).mT, fp4.quantize(dy, axis=0))
    assert dx.shape == (40, 32) and dw.shape == (32, 16)
    q = fp4.quantize(w)
    assert q.mT.shape == (16, 32) and q.mT.codes is q.codes and q.mT.mT.axis == q.axis


def test_tensor_scales_are_applied_one_after_the_other():
    """numerics 1.10: their product may be denormal; under jit too, where both are constants."""
    lhs = fp4.quantize(jax.random.normal(KEY, (16, 64)) * 1e-20)
    rhs = fp4.quantize(jax.random.normal(KEY, (64, 16)) * 1e-14, axis=0)
    eager = np.asarray(fp4.matmul(lhs, rhs))
    assert (np.abs(eager) > 1e-38).any()
    np.testing.assert_array_equal(jax.jit(lambda: fp4.matmul(lhs, rhs))(), eager)


ONES = jnp.ones((16, 32))
MIXED = fp4.quantize(ONES, axis=0, hadamard=True).mT
FOREIGN = dataclasses.replace(fp4.quantize(ONES), format="nf4")
GROUPED = fp4.quantize(ONES, group_sizes=jnp.int32([3, 5]))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: fp4.matmul(fp4.quantize(ONES), fp4.quantize(ONES, axis=0)), ValueError, "needs 32 rows"),
        (lambda: fp4.matmul(fp4.quantize(ONES, axis=0), ONES), ValueError, "lhs is blocked along axis 0; needs"),
        (lambda: fp4.matmul(fp4.quantize(ONES), fp4.quantize(ONES.T)), ValueError, "rhs is blocked along axis -1"),
        (lambda: fp4.matmul(MIXED, fp4.quantize(ONES, axis=0)), ValueError, "both or neither"),
        (lambda: fp4.matmul(ONES.astype(int), ONES), TypeError, "lhs is an array of int32"),
        (lambda: fp4.matmul(ONES.T, fp4.quantize(ONES, axis=0, hadamard=True)), ValueError, "both or neither"),
        (lambda: fp4.matmul(MIXED, ONES), ValueError, "both or neither"),
        (lambda: fp4.matmul(FOREIGN, ONES.T), ValueError, "lhs.format is 'nf4'"),
        (lambda: fp4.matmul(ONES, ONES.T, preferred_element_type=jnp.int8), TypeError, "element_type is int8"),
        (lambda: fp4.matmul(ONES[0], ONES), ValueError, "two axes"),
        (lambda: fp4.matmul(GROUPED, ONES.T), ValueError, "lhs is grouped; needs one tensor .* Try grouped_matmul"),
        (lambda: fp4.matmul(ONES, GROUPED.mT), ValueError, "rhs is grouped; needs one tensor .* Try grouped_matmul"),
    ],
)  # fmt: skip
def test_bad_input(call, error, says):
    """E12."""
    refused(call, error, says)
