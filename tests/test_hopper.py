"""The operands that products hand to the kernels for Hopper: multiplied as the border says, they give what XLA's dots
give. No kernel runs here; tests/gpu has those."""

from functools import partial

import hopper_border
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouping import CASES, total
from hopper_border import INTERLEAVED
from products import error_of

import jax_fp4 as fp4
from jax_fp4 import _products


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def same(monkeypatch, function, *arguments, tolerance=1e-6):
    """function's results by dots, and by the calls."""
    want = jax.tree.map(np.asarray, jax.jit(function)(*arguments))
    with monkeypatch.context() as patch:
        called = hopper_border.stand_in(patch)
        got = jax.tree.map(np.asarray, jax.jit(function)(*arguments))
    jax.clear_caches()
    assert called
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and error_of(a, b) <= tolerance
        np.testing.assert_array_equal(np.isnan(a), np.isnan(b))


def test_the_interleaved_order():
    """A permutation of 64: position 16s + 2t + h + 8i holds element 16t + 8(s >> 1) + 2(s & 1) + i + 4h."""
    assert sorted(INTERLEAVED) == list(range(64))
    for s, t, h, i in np.ndindex(4, 4, 2, 2):
        assert INTERLEAVED[16 * s + 2 * t + h + 8 * i] == 16 * t + 8 * (s >> 1) + 2 * (s & 1) + i + 4 * h


ROW_FLAGS = {"tensor": {}, "rows": dict(row_scaled=True), "bound 256": dict(four_over_six=fp4.FourOverSix())}
OF_RHS = {**ROW_FLAGS, "tiles": dict(block=(16, 16))}


SHAPES = ((5, 64, 16), (33, 100, 7), (1, 16, 1))  # m, k, n


@pytest.mark.parametrize(
    ("left", "right"), [("tensor", "tensor"), ("rows", "tiles"), ("bound 256", "rows"), ("rows", "bound 256")]
)
def test_two_quantized_matrices(monkeypatch, left, right):
    def products(operands):
        for x, w in operands:
            w = fp4.quantize(w.mT, **OF_RHS[right]).mT
            yield fp4.matmul(fp4.quantize(x, **ROW_FLAGS[left]), w)
            stacked = jnp.stack([x, 3 * x])
            own = 0 if left == "rows" else 1  # an amax for each of the two, or for all rows
            for batch_dims in {0, own}:
                many = fp4.quantize(stacked, **ROW_FLAGS[left], batch_dims=batch_dims)
                yield fp4.matmul(many, w, preferred_element_type=jnp.float32)

    operands = [(normal(1, m, k), normal(2, k, n)) for m, k, n in SHAPES]
    same(monkeypatch, lambda operands: list(products(operands)), operands)


def test_each_row_is_a_tensor_of_its_own(monkeypatch):
    """An amax [m] without row scaling: batch_dims."""
    products = lambda x, w: fp4.matmul(fp4.quantize(x, batch_dims=1), fp4.quantize(w.mT, batch_dims=1).mT)  # noqa: E731
    same(monkeypatch, products, normal(1, 9, 48), normal(2, 48, 5))


M, K, N = 70, 40, 20  # k and n are no multiples of 64 and of 8
SIZES = jnp.int32([8, 0, 33, 20])
OPERANDS = {  # of a product beside w, and w's forms, as in test_grouped_matmul.py
    "array": (lambda x, _: x, lambda w: w),
    "quantized": (lambda x, s: fp4.quantize(x, group_sizes=s), partial(fp4.quantize, axis=0, batch_dims=1)),
    "row-scaled": (lambda x, s: fp4.quantize(x, group_sizes=s, row_scaled=True),
                   partial(fp4.quantize, axis=0, batch_dims=1, row_scaled=True)),
    "other": (lambda x, _: fp4.quantize(x), lambda w: fp4.quantize(w.mT, batch_dims=1, block=(16, 16)).mT),
}  # fmt: skip


@pytest.mark.parametrize("right", OPERANDS)
@pytest.mark.parametrize("left", OPERANDS)
def test_every_mix_of_operands(monkeypatch, left, right):
    def product(x, w, sizes):
        x, w = OPERANDS[left][0](x, sizes), OPERANDS[right][1](w)
        return fp4.grouped_matmul(x, w, sizes, preferred_element_type=jnp.float32)

    same(monkeypatch, product, normal(1, M, K, dtype=jnp.bfloat16), normal(2, 4, K, N, dtype=jnp.bfloat16), SIZES)


@pytest.mark.parametrize("right", ["array", "quantized", "row-scaled"])
@pytest.mark.parametrize("left", ["array", "quantized", "row-scaled"])
def test_every_mix_of_operands_in_the_contraction(monkeypatch, left, right):
    def form(name, x, sizes):
        rows = name == "row-scaled"
        return x if name == "array" else fp4.quantize(x, axis=0, group_sizes=sizes, row_scaled=rows)

    def product(x, dy, sizes):
        lhs, rhs = form(left, x, sizes).mT, form(right, dy, sizes)
        return fp4.grouped_matmul(lhs, rhs, sizes, preferred_element_type=jnp.float32)

    same(monkeypatch, product, normal(1, M, K, dtype=jnp.bfloat16), normal(3, M, N, dtype=jnp.bfloat16), SIZES)


@pytest.mark.parametrize("form", ["array", "quantized", "row by row"])
@pytest.mark.parametrize("k", [512, 40, 44])
def test_a_contraction_in_parts(monkeypatch, form, k):
    """What a scatter of k sends: the elements of [g, k, n] in other places, and their gradients. Of whole tiles (512)
    the kernel writes it so."""

    def parts_of(dw):
        return jnp.moveaxis(dw.reshape(4, 2, k // 2, N), 1, 0)

    def product(x, dy, sizes, parts):
        if form == "array":
            lhs, rhs = x.mT, dy
        else:
            flags = dict(row_scaled=True) if form == "row by row" else {}
            lhs, rhs = (fp4.quantize(a, axis=0, group_sizes=sizes, **flags) for a in (x, dy))
            lhs = lhs.mT
        return _products.grouped_product(lhs, rhs, sizes, jnp.float32, parts=parts)

    x, dy = normal(1, M, k, dtype=jnp.bfloat16), normal(3, M, N, dtype=jnp.bfloat16)
    same(monkeypatch, lambda *a: product(*a, parts=2), x, dy, SIZES)
    np.testing.assert_array_equal(product(x, dy, SIZES, 2), parts_of(product(x, dy, SIZES, 1)))
    if form == "array":
        weights = normal(5, 2, 4, k // 2, N)
        direct, moved = (
            jax.grad(lambda x, dy, f=f: jnp.sum(f(x, dy) * weights), (0, 1))(x, dy)
            for f in (lambda x, dy: product(x, dy, SIZES, 2), lambda x, dy: parts_of(product(x, dy, SIZES, 1)))
        )
        jax.tree.map(np.testing.assert_array_equal, direct, moved)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("no rows", "no groups")])
def test_sizes(monkeypatch, case):
    """Whatever the sizes; NaN beyond them; the padding of a transformed group's last block is multiplied."""
    sizes, m = CASES[case]
    x, dy = normal(1, m, 24, dtype=jnp.bfloat16), normal(2, m, 17, dtype=jnp.bfloat16)
    x, dy = (a.at[total(sizes, m) :].set(jnp.nan) for a in (x, dy))
    w = normal(3, len(sizes), 24, 17, dtype=jnp.bfloat16)

    def products(x, w, dy, sizes):
        run = partial(fp4.grouped_matmul, group_sizes=sizes, preferred_element_type=jnp.float32)
        qx, qx_t = fp4.quantize_transpose(x, group_sizes=sizes, hadamard=True)
        qdy, qdy_t = fp4.quantize_transpose(dy, group_sizes=sizes, hadamard=True)
        qw, qw_t = fp4.quantize_transpose(w, block=(16, 16), batch_dims=1)
        exact = run(x, w), run(dy, w.mT), run(x.mT, dy)
        return exact, run(qx, qw_t), run(qdy, qw.mT), run(qx_t.mT, qdy_t)

    same(monkeypatch, products, x, w, dy, np.int32(sizes))


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("default", "bfloat16"),
        ("unquant", "bfloat16"),
        ("dequant", "bfloat16"),
        (None, "bfloat16"),
        ("default", "float32"),
    ],
)
def test_layers_and_their_gradients(monkeypatch, mode, dtype):
    """Biases, weights of rows, transposed kernels: through the layers that have them."""
    recipe = fp4.HIGH_PRECISION if mode is None else fp4.NVFP4BlockScaling(mode)
    given = dict(recipe=recipe, key=np.zeros(2, np.uint32))
    x, w, w_out, b_in, b_out = (
        normal(1, M, K),
        normal(2, 4, K, 24),
        normal(3, 4, 12, N),
        normal(4, 4, 24),
        normal(5, 4, N),
    )
    probs = jax.nn.sigmoid(normal(6, M))

    def loss(x, w, w_out, b_in, b_out, probs):
        y = fp4.grouped_mlp(x, w, w_out, SIZES, b_in=b_in, b_out=b_out, probs=probs, **given)
        h = fp4.grouped_dense(x, w, SIZES, b_in, **given)
        z = fp4.dense(x, w[0], b_in[0], preferred_element_type=jnp.float32, **given)
        return sum((a.astype(jnp.float32) * normal(7, *a.shape)).sum() for a in (y, h, z))

    gradients = jax.value_and_grad(loss, tuple(range(6)))
    # Sums in another order now and then round to another bfloat16, and that to another code.
    same(monkeypatch, gradients, x.astype(dtype), w, w_out, b_in, b_out, probs, tolerance=1e-2)


def test_a_frozen_kernel(monkeypatch):
    def products(x, w):
        frozen = fp4.quantize_transpose(w, batch_dims=1, block=(16, 16))
        run = lambda x, mode: fp4.grouped_dense(x, frozen, SIZES, recipe=fp4.NVFP4BlockScaling(mode))  # noqa: E731
        return [jax.vjp(partial(run, mode=mode), x)[1](jnp.ones((M, N), x.dtype)) for mode in ("unquant", "dequant")]

    same(monkeypatch, products, normal(1, M, K, dtype=jnp.bfloat16), normal(2, 4, K, N), tolerance=2**-8)
