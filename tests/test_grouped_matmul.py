"""grouped_matmul: its operands, derivatives and refusals, for one choice of sizes. test_ragged.py has the others."""

import dataclasses
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouping import slices
from products import by_experts, contraction_by_experts, error_of, exact, refused

import jax_fp4 as fp4

M, K, N = 70, 40, 24
SIZES, OTHER = jnp.int32([8, 0, 33, 20]), jnp.int32([8, 0, 32, 21])  # and a tail of 9
G, END = len(SIZES), int(SIZES.sum())
LIVE = (np.arange(M) < END)[:, None]


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


PRODUCT = jax.jit(fp4.grouped_matmul, static_argnames="preferred_element_type")
X, W, DY = normal(1, M, K), normal(2, G, K, N), normal(3, M, N)
QX, QW = fp4.quantize(X, group_sizes=SIZES), fp4.quantize(W, axis=0, batch_dims=1)
COLUMNS = fp4.quantize(X, axis=0, group_sizes=SIZES)


OPERANDS = {  # of a product beside w, and w's forms
    "array": (lambda x: x, lambda w: w),
    "quantized": (partial(fp4.quantize, group_sizes=SIZES), partial(fp4.quantize, axis=0, batch_dims=1)),
    "row-scaled": (partial(fp4.quantize, group_sizes=SIZES, row_scaled=True),
                   partial(fp4.quantize, axis=0, batch_dims=1, row_scaled=True)),
    "other": (fp4.quantize, lambda w: fp4.quantize(w.mT, batch_dims=1, block=(16, 16)).mT),
    "other rows": (partial(fp4.quantize, row_scaled=True), lambda w: fp4.quantize(w.mT, row_scaled=True).mT),
}  # fmt: skip


def value(operand):
    return fp4.dequantize(operand) if isinstance(operand, fp4.QuantizedTensor) else operand


@pytest.mark.core
@pytest.mark.parametrize("right", OPERANDS)
@pytest.mark.parametrize("left", OPERANDS)
def test_every_mix_of_operands(left, right):
    """Rows quantized in groups, as one tensor or row by row; matrices by tile, row or column: each with its scales."""
    x, w = OPERANDS[left][0](X), OPERANDS[right][1](W)
    got = PRODUCT(x, w, SIZES)
    want = by_experts(exact(value(x)), exact(value(w)), SIZES)
    assert error_of(got, want) <= 1e-6 and got.dtype == jnp.float32
    np.testing.assert_array_equal(got[END:], 0)


@pytest.mark.core
@pytest.mark.parametrize("right", ["array", "quantized", "row-scaled"])
@pytest.mark.parametrize("left", ["array", "quantized", "row-scaled"])
def test_every_mix_of_operands_in_the_contraction(left, right):
    flags = {"quantized": {}, "row-scaled": dict(row_scaled=True)}
    a, b = (
        operand if name == "array" else fp4.quantize(operand, axis=0, group_sizes=SIZES, **flags[name])
        for name, operand in ((left, X), (right, DY))
    )
    got = PRODUCT(a.mT, b, SIZES)
    want = contraction_by_experts(exact(value(a)).T, exact(value(b)), SIZES)
    assert got.shape == (G, K, N) and error_of(got, want) <= 1e-6
    np.testing.assert_array_equal(got[1], 0)


@pytest.mark.core
def test_transposes_meet_in_groups():
    """dx = dy w^T of the two row-wise forms; dw of a Hadamard pair, whose transform cancels."""
    sizes = jnp.int32([20, 0, 20, 20])  # alike: each shape compiles
    qx, qx_t = fp4.quantize_transpose(X, hadamard=True, group_sizes=sizes)
    qdy, qdy_t = fp4.quantize_transpose(DY, hadamard=True, group_sizes=sizes)
    qw, qw_t = fp4.quantize_transpose(W, block=(16, 16), batch_dims=1)
    y, dx = fp4.grouped_matmul(qx, qw_t, sizes), fp4.grouped_matmul(qdy, qw.mT, sizes)
    dw = fp4.grouped_matmul(qx_t.mT, qdy_t, sizes)
    for e, r in enumerate(slices(sizes, M)):
        if r.start == r.stop:
            continue
        one = lambda a: fp4.quantize_transpose(a, hadamard=True)  # noqa: E731
        (x, x_t), (dy, dy_t), (w, w_t) = one(X[r]), one(DY[r]), fp4.quantize_transpose(W[e], block=(16, 16))
        assert error_of(y[r], fp4.matmul(x, w_t)) <= 1e-6
        assert error_of(dx[r], fp4.matmul(dy, w.mT)) <= 1e-6
        assert error_of(dw[e], fp4.matmul(x_t.mT, dy_t)) <= 1e-6
    assert not np.asarray(y[60:]).any() and not np.asarray(dx[60:]).any()


@pytest.mark.parametrize(
    ("left", "right"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16"), ("bfloat16", "float16")],
)
def test_dtypes(left, right):
    """The result is rounded once from a float32 sum of the operands as they are; its type is the promoted one."""
    x, w, dy = X.astype(left), W.astype(right), DY.astype(right)
    products = (
        (lambda t: PRODUCT(x, w, SIZES, preferred_element_type=t), by_experts(exact(x), exact(w), SIZES)),
        (lambda t: PRODUCT(x.T, dy, SIZES, preferred_element_type=t),
         contraction_by_experts(exact(x).T, exact(dy), SIZES)),
    )  # fmt: skip
    for product, want in products:
        assert product(None).dtype == jnp.promote_types(left, right)
        for dtype, half_ulp in ((jnp.float32, 0), (jnp.float16, 2**-11)):
            got = product(dtype)
            assert got.dtype == dtype
            assert error_of(got, want) <= half_ulp + 1e-6


def test_a_quantized_operand_beside_an_array_takes_its_dtype():
    x, w = X.astype(jnp.bfloat16), fp4.quantize(W, axis=0, batch_dims=1)
    got = PRODUCT(x, w, SIZES, preferred_element_type=jnp.float32)
    want = by_experts(exact(x), exact(fp4.dequantize(w, jnp.bfloat16)), SIZES)
    assert error_of(got, want) <= 1e-6


# --- derivatives and transformations ---


@pytest.mark.core
def test_gradients_are_those_of_ragged_dot():
    """C14: also under jit and jax.checkpoint; an empty group's gradient is zero."""

    def gradients(product):
        return jax.grad(lambda x, w: (product(x, w, SIZES) * DY).sum(), (0, 1))

    want = gradients(jax.lax.ragged_dot)(X, W)
    for product in (fp4.grouped_matmul, jax.checkpoint(fp4.grouped_matmul)):
        got = jax.jit(gradients(product))(X, W)
        assert all(error_of(a, b) <= 1e-6 for a, b in zip(got, want, strict=True))
        np.testing.assert_array_equal(got[1][1], 0)
        np.testing.assert_array_equal(got[0][END:], 0)
    jax.tree.map(np.testing.assert_array_equal, gradients(fp4.grouped_matmul)(X, W), got)


def test_gradients_of_the_contraction():
    seed = normal(4, G, K, N)
    dx_t, ddy = jax.jit(jax.grad(lambda x_t, dy: (fp4.grouped_matmul(x_t, dy, SIZES) * seed).sum(), (0, 1)))(X.T, DY)
    assert error_of(dx_t, by_experts(exact(DY), exact(seed).mT, SIZES).T) <= 1e-6
    assert error_of(ddy, by_experts(exact(X), exact(seed), SIZES)) <= 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_second_derivatives(dtype):
    """They were silently zero: the loops carry words."""
    x, w = X.astype(dtype), W.astype(dtype)

    def squares(product):
        inner = jax.grad(lambda x, w: (product(x, w, SIZES).astype(jnp.float32) ** 3).sum(), (0, 1))
        return jax.jit(jax.grad(lambda x, w: sum((d.astype(jnp.float32) ** 2).sum() for d in inner(x, w)), (0, 1)))(
            x, w
        )

    tolerance = 1e-5 if dtype == "float32" else 0.02
    for got, want in zip(squares(fp4.grouped_matmul), squares(by_experts), strict=True):
        assert np.linalg.norm(exact(want)) > 1 and error_of(got, want) <= tolerance


def test_gradients_beside_a_quantized_operand():
    """The array's; the quantized operand is frozen, and takes part with its values."""
    qx, qw, q = QX, QW, COLUMNS
    dx = jax.jit(jax.grad(lambda x: (fp4.grouped_matmul(x, qw, SIZES) * DY).sum()))(X)
    assert error_of(dx, by_experts(exact(DY), exact(value(qw)).mT, SIZES)) <= 1e-6
    dw = jax.jit(jax.grad(lambda w: (fp4.grouped_matmul(qx, w, SIZES) * DY).sum()))(W)
    assert error_of(dw, contraction_by_experts(exact(value(qx)).T, exact(DY), SIZES)) <= 1e-6
    ddy = jax.jit(jax.grad(lambda dy: (fp4.grouped_matmul(q.mT, dy, SIZES) * W).sum()))(DY)
    assert error_of(ddy, by_experts(exact(value(q)), exact(W), SIZES)) <= 1e-6


def test_differentiating_a_quantized_operand_is_refused():
    """D4."""
    qw = fp4.quantize(W, axis=0, batch_dims=1)
    with pytest.raises(fp4.UnsupportedError, match="a quantized operand is a QuantizedTensor that is differentiated"):
        jax.grad(lambda a: fp4.grouped_matmul(X, dataclasses.replace(qw, amax=a), SIZES).sum())(qw.amax)


@pytest.mark.core
@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0)], ids=str)
def test_vmap(axes):
    """E4."""
    x, w = normal(5, 3, M, K), normal(6, 3, G, K, N)
    sizes = jnp.int32([[8, 0, 33, 20], [70, 0, 0, 0], [-1, 3, 2**31 - 1, 9]])
    arguments = [a if axis == 0 else a[0] for a, axis in zip((x, w, sizes), axes, strict=True)]
    got = jax.jit(jax.vmap(fp4.grouped_matmul, axes))(*arguments)
    for i in range(3):
        own = [a[i] if axis == 0 else a for a, axis in zip(arguments, axes, strict=True)]
        assert error_of(got[i], PRODUCT(*own)) <= 1e-6


def test_vmap_of_quantized_operands():
    x, sizes = normal(5, 3, M, K), jnp.int32([[8, 0, 33, 20], [70, 0, 0, 0], [-1, 3, 2**31 - 1, 9]])
    w = fp4.quantize(W, axis=0, batch_dims=1)

    def step(x, sizes):
        row, column = fp4.quantize_transpose(x, group_sizes=sizes)
        return fp4.grouped_matmul(row, w, sizes), fp4.grouped_matmul(column.mT, column, sizes)

    step = jax.jit(step)
    got = jax.jit(jax.vmap(step))(x, sizes)
    for i in range(3):
        for a, b in zip(got, step(x[i], sizes[i]), strict=True):
            assert error_of(a[i], b) <= 1e-6


@pytest.mark.core
def test_whatever_the_user_forbids():
    """Rank promotion, implicit dtype promotion; and with 64-bit types on."""

    def step():
        row, column = fp4.quantize_transpose(X, group_sizes=SIZES)
        w = fp4.quantize(W, axis=0, batch_dims=1)
        return fp4.grouped_matmul(row, w, SIZES), fp4.grouped_matmul(column.mT, DY, SIZES)

    want = jax.jit(step)()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.tree.map(np.testing.assert_array_equal, jax.jit(step)(), want)
    with jax.enable_x64(True):
        for got, same in zip(jax.jit(step)(), want, strict=True):
            assert got.dtype == jnp.float32 and error_of(got, same) <= 1e-6


def test_numpy_operands():
    x, w, sizes = np.asarray(X), np.asarray(W), np.asarray(SIZES)
    assert error_of(fp4.grouped_matmul(x, w, sizes), fp4.grouped_matmul(X, W, SIZES)) == 0
    q = fp4.quantize(x, group_sizes=sizes, implementation="reference")
    assert isinstance(q.codes, np.ndarray)
    assert error_of(fp4.grouped_matmul(q, w, sizes), fp4.grouped_matmul(jax.tree.map(jnp.asarray, q), W, SIZES)) == 0


# --- bad input ---

RUN = fp4.grouped_matmul
TRANSFORMED = fp4.quantize(X, axis=0, group_sizes=SIZES, hadamard=True)
CHANGED = jax.jit(lambda s: RUN(QX, QW, s))  # other values may hide in a traced argument: not seen, not refused


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: RUN(X.astype(int), W, SIZES), TypeError, "lhs is an array of int32"),
        (lambda: RUN(X, W.astype(jnp.int8), SIZES), TypeError, "rhs is an array of int8"),
        (lambda: RUN(np.ones((3, 4)), W, SIZES), TypeError, "lhs is an array of float64"),
        (lambda: RUN([1.0], W, SIZES), TypeError, "lhs is a list; needs an array"),
        (lambda: RUN(X, W, SIZES, preferred_element_type=jnp.int8), TypeError, "element_type is int8"),
        (lambda: RUN(X, W, [8, 0, 33, 20]), TypeError, "group_sizes is of type list; needs an int32 array"),
        (lambda: RUN(X, W, SIZES.astype(jnp.float32)), TypeError, "group_sizes is of type float32"),
        (lambda: RUN(X, W, SIZES.astype(jnp.uint32)), TypeError, "group_sizes is of type uint32"),
        (lambda: RUN(X, W, SIZES[:3]), ValueError, r"group_sizes is of shape \(3,\); needs \(4,\)"),
        (lambda: RUN(X, W, SIZES[None]), ValueError, r"group_sizes is of shape \(1, 4\); needs \(4,\)"),
        (lambda: RUN(X.T, DY, SIZES[None]), ValueError, r"group_sizes is of shape \(1, 4\); needs \[g\]"),
        (lambda: RUN(X[0], W, SIZES), ValueError, r"lhs is of shape \(40,\); needs at least two axes"),
        (lambda: RUN(X[None], W, SIZES), ValueError, r"lhs and rhs is of shapes \(1, 70, 40\).*x.reshape"),
        (lambda: RUN(X, W[None], SIZES), ValueError, r"and \(1, 4, 40, 24\); needs \[m, k\] and \[g, k, n\]"),
        (lambda: RUN(X[:, 1:], W, SIZES), ValueError, r"rhs is of shape \(4, 40, 24\); needs 39 rows"),
        (lambda: RUN(X.T, DY[1:], SIZES), ValueError, r"rhs is of shape \(69, 24\); needs 70 rows"),
        (lambda: RUN(QX.mT, W, SIZES), ValueError, "lhs is blocked along axis 0; needs axis=-1"),
        (lambda: RUN(X, fp4.quantize(W, batch_dims=1), SIZES), ValueError, "rhs is blocked along axis -1; needs"),
        (lambda: RUN(X, fp4.quantize(W.mT).mT, SIZES), ValueError, "needs an amax for each group.*batch_dims=1"),
        (lambda: RUN(fp4.quantize(X, axis=0).mT, COLUMNS, SIZES), ValueError, "lhs is Quan.*groups along its blo"),
        (lambda: RUN(X.T, fp4.quantize(X, axis=0), SIZES), ValueError, "rhs is Quant.*; needs groups along its b"),
        (lambda: RUN(X.T, QX.mT, SIZES), ValueError, "needs 70 rows|groups along its blocks"),
        (lambda: RUN(COLUMNS.mT, normal(0, G, M, N), SIZES), ValueError, "lhs is Quan.*needs groups along its row"),
        (lambda: RUN(QX, W, OTHER), ValueError, r"is \[ 8  0 32 21\] beside lhs.group_sizes \[ 8  0 33"),
        (lambda: RUN(X.T, COLUMNS, OTHER), ValueError, "beside rhs.group_sizes .*needs the sizes of the operand"),
        (lambda: RUN(QX, W[:3], SIZES[:3]), ValueError, "group_sizes is .*needs the sizes of the operand"),
        (lambda: RUN(TRANSFORMED.mT, COLUMNS, SIZES), ValueError, "hadamard is True of lhs and False of rhs"),
        (lambda: RUN(TRANSFORMED.mT, DY, SIZES), ValueError, "both or neither"),
        (lambda: RUN(X.T, TRANSFORMED, SIZES), ValueError, "both or neither"),
        (lambda: RUN(dataclasses.replace(QX, format="nf4"), W, SIZES), ValueError, "lhs.format is 'nf4'"),
    ],
)  # fmt: skip
def test_bad_input(call, error, says):
    """E12."""
    refused(call, error, says)


def test_traced_sizes_are_trusted():
    np.testing.assert_array_equal(CHANGED(SIZES), RUN(QX, QW, SIZES))
    assert CHANGED(OTHER).shape == (M, N)


EMPTY_RANK = """
import jax, jax.numpy as jnp, numpy as np
import jax_fp4 as fp4
from jax.sharding import PartitionSpec as P

assert jax.device_count() == 2
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
x, w = jax.random.normal(jax.random.key(0), (12, 32)), jax.random.normal(jax.random.key(1), (2, 32, 16))
sizes = jnp.array([[4, 2], [0, 0]], jnp.int32)  # the second device has no tokens
for recipe in (fp4.HIGH_PRECISION, fp4.NVFP4BlockScaling(backward_mode="dequant")):

    def local(x, w, sizes):
        return fp4.grouped_dense(x, w, sizes[0], recipe=recipe)

    spread = jax.shard_map(
        local, mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=P("d"), check_vma=False
    )
    y, pull = jax.vjp(jax.jit(lambda x, w: spread(x, w, sizes)), x, w)
    dx, dw = pull(jnp.ones_like(y))
    want, pull = jax.vjp(lambda x, w: local(x, w, sizes), x[:6], w)
    want_dx, want_dw = pull(jnp.ones_like(want))
    for got, expected in ((y[:6], want), (dx[:6], want_dx), (dw, want_dw)):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    assert not np.any(y[6:]) and not np.any(dx[6:])
"""


def test_a_rank_without_tokens_in_shard_map():
    """C4. check_vma=True is refused by JAX itself for now, in every op: its custom calls name no varying axes."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", EMPTY_RANK], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
