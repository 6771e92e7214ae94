"""Product forms: every format multiplies every other, alone and in groups, within the bound of numerics 1.10."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import by_experts, contraction_by_experts, error_of, refused

import jax_fp4 as fp4
from jax_fp4 import _hopper, _products
from jax_fp4._array import block_length

FORMATS = {
    "nvfp4": {},
    "mxfp8": dict(format="mxfp8"),
    "mxfp8_e5m2": dict(format="mxfp8_e5m2"),
    "float8_block": dict(format="float8_block"),
    "float8_block, any scales": dict(format="float8_block", power_of_two=False),
    "float8": dict(format="float8"),
    "float8_e5m2": dict(format="float8_e5m2"),
}
PAIRS = list(itertools.product(FORMATS, FORMATS))
SIZES = jnp.array([37, 0, 5, 50], jnp.int32)  # of 100 rows: a tail of 8


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) * 3


exact = partial(fp4.dequantize, dtype=jnp.float32)


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_every_pair_of_formats(left, right):
    """[30,200] @ [200,24]: k is no multiple of any block, and formats pad it differently."""
    lhs = fp4.quantize(normal(0, 30, 200), **FORMATS[left])
    rhs = fp4.quantize(normal(1, 200, 24), axis=0, **FORMATS[right])
    want = np.asarray(exact(lhs), np.float64) @ np.asarray(exact(rhs), np.float64)
    assert error_of(fp4.matmul(lhs, rhs, preferred_element_type=jnp.float32), want) <= 1e-6


@pytest.mark.parametrize("name", FORMATS)
def test_tiles_and_batches(name):
    flags = dict(FORMATS[name])
    length = block_length(fp4.quantize(jnp.ones((2, 2)), **flags))
    tiles = flags if length == 1 else flags | dict(block=(length, length))
    x, w = normal(2, 3, 10, 140), normal(3, 3, 140, 50)
    lhs, rhs = fp4.quantize(x, batch_dims=1, **flags), fp4.quantize(w, axis=0, batch_dims=1, **tiles)
    want = np.einsum("bmk,bkn->bmn", *(np.asarray(exact(q), np.float64) for q in (lhs, rhs)))
    assert error_of(fp4.matmul(lhs, rhs), want) <= 1e-6
    assert error_of(fp4.matmul(x, rhs), np.asarray(x, np.float64) @ np.asarray(exact(rhs), np.float64)) <= 1e-6
    assert error_of(fp4.matmul(lhs, w), np.asarray(exact(lhs), np.float64) @ np.asarray(w, np.float64)) <= 1e-6


@pytest.mark.parametrize("left", FORMATS)
@pytest.mark.parametrize("right", ["same", "nvfp4", "float8"])
def test_rows_of_groups(left, right):
    right = left if right == "same" else right
    x = normal(4, 100, 72).at[92:].set(jnp.nan)
    lhs = fp4.quantize(x, group_sizes=SIZES, **FORMATS[left])
    rhs = fp4.quantize(normal(5, 4, 72, 24), axis=0, batch_dims=1, **FORMATS[right])
    got = fp4.grouped_matmul(lhs, rhs, SIZES)
    want = by_experts(*(np.asarray(exact(q), np.float64) for q in (lhs, rhs)), SIZES)
    assert error_of(got, want) <= 1e-6 and not np.any(got[92:])


@pytest.mark.parametrize("left", FORMATS)
def test_contractions_of_groups(left):
    x, dy = (normal(seed, 100, columns).at[92:].set(jnp.nan) for seed, columns in ((6, 40), (7, 24)))
    lhs, rhs = (fp4.quantize(a, axis=0, group_sizes=SIZES, **FORMATS[left]) for a in (x, dy))
    got = fp4.grouped_matmul(lhs.mT, rhs, SIZES)
    x, dy = (np.asarray(exact(q), np.float64) for q in (lhs, rhs))
    assert error_of(got, contraction_by_experts(x.T, dy, SIZES)) <= 1e-6 and not np.any(got[1])


def test_contractions_want_one_layout():
    x, dy = (fp4.quantize(jnp.ones((100, 32)), f, axis=0, group_sizes=SIZES) for f in ("mxfp8", "nvfp4"))
    refused(lambda: fp4.grouped_matmul(x.mT, dy, SIZES), ValueError, "^grouped_matmul: rhs is nvfp4, in blocks of 16")


@pytest.mark.parametrize("name", FORMATS)
def test_no_scale_is_applied_twice_or_lost(name):
    """The magnitudes of the operands are far from 1 and from each other; a scale counted wrongly is a factor."""
    x, w = normal(8, 8, 160) * 2.0**20, normal(9, 160, 16) * 2.0**-30
    lhs, rhs = fp4.quantize(x, **FORMATS[name]), fp4.quantize(w, axis=0, **FORMATS[name])
    assert error_of(fp4.matmul(lhs, rhs), np.asarray(x, np.float64) @ np.asarray(w, np.float64)) <= 0.2


def test_nan_and_inf_reach_the_product():
    for name in FORMATS:
        x = jnp.ones((4, 256)).at[1, 3].set(jnp.nan)
        y = fp4.matmul(fp4.quantize(x, **FORMATS[name]), fp4.quantize(jnp.ones((256, 2)), axis=0, **FORMATS[name]))
        assert np.isnan(y[1]).all(), name
        assert name == "nvfp4" or np.isfinite(y[2]).all(), name


@pytest.mark.parametrize(
    ("left", "right"), [pair for pair in PAIRS if pair != ("nvfp4", "nvfp4") and "any" not in "".join(pair)]
)
def test_what_xla_adds_to_a_kernel_of_exact_rows(monkeypatch, left, right):
    """On Hopper a kernel multiplies bfloat16 rows, and XLA scales the sums; here a loop stands in for the kernel."""

    def added(bias, row_weights):
        each = np.asarray(jnp.concatenate([bias, 0 * bias[:1]]), np.float64)[np.repeat(np.arange(5), [*SIZES, 8])]
        return each if row_weights is None else np.asarray(row_weights, np.float64)[:, None] * each

    def rows(x, w, bias, row_weights, sizes, dtype, *, transposed):
        assert transposed
        y = by_experts(*(np.asarray(a, np.float64) for a in (x, w.mT)), SIZES)
        return jnp.asarray(y if bias is None else y + added(bias, row_weights)).astype(dtype)

    monkeypatch.setattr(_hopper, "rows", rows)
    lhs = fp4.quantize(normal(4, 100, 72), group_sizes=SIZES, **FORMATS[left])
    rhs = fp4.quantize(normal(5, 4, 72, 24), axis=0, batch_dims=1, **FORMATS[right])
    product = by_experts(*(np.asarray(exact(q), np.float64) for q in (lhs, rhs)), SIZES)
    static = _products._Static(*[jnp.dtype(jnp.float32)] * 3, rows=True, transposed=False)
    for bias, weights in ((None, None), (normal(6, 4, 24), None), (normal(6, 4, 24), jnp.arange(100.0))):
        want = product if bias is None else product + added(bias, weights)
        # Every pair of the loops is in test_rows_of_groups; with a bias they are compiled for one.
        loops = (_products._rows_by_loops,) if left == right else ()
        for function in (_products._forms_on_hopper, *loops):
            got = function(lhs, rhs, bias, weights, SIZES, static)
            assert error_of(got[:92], want[:92]) <= 1e-6
