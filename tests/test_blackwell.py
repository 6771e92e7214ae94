"""Products of two quantized operands where a program is lowered for Blackwell, of which no test here has one: what is
called, and that what is called gives the product."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from installations import HOPPER, called, forget, installed, lowered, pretend
from products import error_of

import jax_fp4 as fp4
from jax_fp4 import _blackwell, reference

ROWS = "jax_fp4_grouped_matmul"
INSTALLATIONS = {
    "on Blackwell": (HOPPER, ("10.0", "10.0"), True),
    "on Blackwell Ultra": (HOPPER, ("10.3",), True),
    "on Blackwell, without sm_90a": ("sm_100a", ("10.0",), True),
    "lowered without a GPU": (HOPPER, (), False),
    "on Hopper": (HOPPER, ("9.0",), False),
    "on Ampere": (HOPPER, ("8.0",), False),
    "on another Blackwell": (HOPPER, ("12.0",), False),
    "on two kinds of GPU": (HOPPER, ("10.0", "9.0"), False),
    "without extension": (None, ("10.0",), False),
}
native = installed(INSTALLATIONS)


@pytest.fixture
def blackwell(monkeypatch):
    pretend(monkeypatch, HOPPER, "10.0")
    yield
    forget()


def scaled(text: str) -> int:
    """How often a program calls the scaled product."""
    calls = len(re.findall(r"call @_scaled_matmul", text))
    assert (calls > 0) == ("@__op$block_scaled_dot" in text)
    return calls


M, K, N, G = 40, 96, 20, 3
X, W, DY = jnp.ones((M, K), jnp.bfloat16), jnp.ones((G, K, N), jnp.bfloat16), jnp.ones((M, N), jnp.bfloat16)
SIZES = jnp.int32([10, 0, 22])
weights = partial(fp4.quantize, axis=0, batch_dims=1)


def times(x, w, **flags):
    return fp4.matmul(fp4.quantize(x, **flags), fp4.quantize(w, axis=0))


# m of any size; float32 and bfloat16; the padding of a transformed operand is data.
PRODUCTS = {
    "two matrices": lambda: times(X, W[0]),
    "of float32, row-scaled": lambda: times(X[:1].astype(jnp.float32), W[0], row_scaled=True),
    "k padded": lambda: times(X[:, :90], W[0, :90]),
    "leading axes": lambda: times(X.reshape(4, 10, K), W[0]),
    "batches": lambda: fp4.matmul(fp4.quantize(W.mT, batch_dims=1), weights(W)),
    "a transformed pair": lambda: fp4.matmul(
        fp4.quantize(X[:20], axis=0, hadamard=True).mT, fp4.quantize(DY[:20], axis=0, hadamard=True)
    ),
}
DOTS = {
    "k no multiple of 32": lambda: times(X[:, :72], W[0, :72]),
    "n no multiple of 4": lambda: times(X, W[0, :, :18]),
    "vmap": lambda: jax.vmap(lambda w: times(X, w))(W),
    "one quantized": lambda: (fp4.matmul(fp4.quantize(X), W[0]), fp4.matmul(X, fp4.quantize(W[0], axis=0))),
    "two arrays": lambda: fp4.matmul(X, W[0]),
    "groups": lambda: fp4.grouped_matmul(fp4.quantize(X, group_sizes=SIZES), weights(W), SIZES),
}
EMPTY = {
    "k": lambda: times(X[:, :0], W[0, :0]),
    "n": lambda: times(X, W[0, :, :0]),
    "m": lambda: times(X[:0], W[0]),
    "batch": lambda: fp4.matmul(fp4.quantize(W[:0].mT, batch_dims=1), weights(W[:0])),
}


@pytest.mark.core
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(native, name):
    text = lowered(PRODUCTS[name])
    assert scaled(text) == native
    assert not native or ("dot_general" not in text and ROWS not in called(text))
    assert not scaled(lowered(PRODUCTS[name], platform="cpu"))


@pytest.mark.core
@pytest.mark.parametrize("name", PRODUCTS)
def test_each_platform_of_a_program_has_its_own(blackwell, name):
    program = jax.jit(PRODUCTS[name]).trace().lower(lowering_platforms=("cpu", "cuda"))
    text = program.as_text()
    assert scaled(text) == 1 and text.count("dot_general") == 1


@pytest.mark.parametrize("name", DOTS | EMPTY)
def test_what_remains_a_dot(blackwell, name):
    text = lowered((DOTS | EMPTY)[name])
    assert not scaled(text) and (name in EMPTY or "dot_general" in text)


@pytest.mark.core
@pytest.mark.parametrize(("mode", "count"), [("default", 3), ("unquant", 1), ("dequant", 1), (None, 0)])
def test_layers_and_their_gradients(blackwell, mode, count):
    recipe = fp4.HIGH_PRECISION if mode is None else fp4.NVFP4BlockScaling(mode)

    def loss(x, w, b):
        return fp4.dense(x, w, b, recipe=recipe, key=np.zeros(2, np.uint32)).sum(dtype=jnp.float32)

    text = lowered(jax.value_and_grad(loss, (0, 1, 2)), jnp.ones((64, K)), jnp.ones((K, 64)), jnp.ones(64))
    assert scaled(text) == count and text.count("dot_general") == 3 - count and ROWS not in called(text)


@pytest.mark.core
def test_other_programs_are_the_same(monkeypatch):
    """As text: without a GPU, or for the CPU, what is lowered has no trace of the choice."""
    texts = []
    for archs, platform, gpus in (
        ("sm_80", "cuda", []), ("sm_80", "cuda", ["8.0"]), ("sm_80", "cpu", ["10.0"]), (None, "cpu", [])
    ):  # fmt: skip
        pretend(monkeypatch, archs, *gpus)
        texts.append([lowered(f, platform=platform) for f in (PRODUCTS | DOTS | EMPTY).values()])
    forget()
    assert texts[0] == texts[1] and texts[2] == texts[3]


@pytest.mark.parametrize(("manual", "count"), [("", None), ("d", 0), ("de", 1)])
def test_meshes(blackwell, manual, count):
    """Inside a shard_map over some axes XLA's dots remain, also beside one axis of size 1. An abstract mesh: JAX lowers
    no program that holds its own primitive for one, nor one that XLA partitions, which needs devices."""
    mesh, function = jax.sharding.AbstractMesh((2, 1), ("d", "e"), axis_types=(jax.sharding.AxisType.Auto,) * 2), times
    if manual:
        specs = dict(in_specs=(jax.P("d"), jax.P()), out_specs=jax.P("d"), axis_names=set(manual))
        function = jax.shard_map(times, mesh=mesh, check_vma=False, **specs)
    x, w = (
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.NamedSharding(mesh, spec))
        for a, spec in ((X, jax.P("d")), (W[0], jax.P()))
    )
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(x, w)
        if count is None:
            with pytest.raises(ValueError, match="AbstractMesh cannot be used"):
                traced.lower(lowering_platforms=("cuda",))
            return
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert scaled(text) == count and ("dot_general" in text) is not bool(count)


def test_a_trace_asks_for_no_gpu(blackwell, monkeypatch):
    def asked(*_):
        raise AssertionError("asked for devices")

    monkeypatch.setattr(jax, "devices", asked)
    traced = jax.jit(PRODUCTS["two matrices"]).trace()
    assert traced.lower(lowering_platforms=("cpu",)) is not None
    with pytest.raises(AssertionError, match="asked"):
        traced.lower(lowering_platforms=("cuda",))


def test_supported(native):
    for op in ("matmul", "dense"):
        reason = fp4.supported(op, "cuda").reason
        assert ("two quantized operands with jax.nn.scaled_matmul" in reason) is native and len(reason) < 160
    for op in ("grouped_matmul", "grouped_dense", "grouped_mlp"):
        reason = fp4.supported(op, "cuda").reason
        assert "scaled_matmul" not in reason and (not native or "products with a loop of XLA's dot" in reason)


@pytest.mark.parametrize("op", ["quantize", "matmul", "grouped_matmul"])
@pytest.mark.parametrize("gpus", [("8.0",), ("8.9",), ("9.0",), ("9.0", "10.0"), ("10.0",), ("12.0",), ()])
def test_supported_says_what_is_untested(monkeypatch, op, gpus):
    pretend(monkeypatch, HOPPER, *gpus)
    other = [gpu for gpu in gpus if gpu != "9.0"]
    reason = fp4.supported(op, "cuda").reason
    assert reason.endswith(f"; untested on GPU {other[0]}") if other else "untested" not in reason


def definition(lhs, rhs, lhs_scales, rhs_scales, preferred_element_type):
    """jax.nn.scaled_matmul after its documentation."""
    assert lhs.dtype == rhs.dtype == jnp.float4_e2m1fn and lhs_scales.dtype == rhs_scales.dtype == jnp.float8_e4m3fn
    assert preferred_element_type == jnp.float32
    a, b = (
        x.astype(jnp.float32) * jnp.repeat(s.astype(jnp.float32), x.shape[-1] // s.shape[-1], axis=-1)
        for x, s in ((lhs, lhs_scales), (rhs, rhs_scales))
    )
    return jnp.einsum("bmk,bnk->bmn", a, b)


@pytest.fixture(params=[definition, *[None] * (jax.__version_info__ >= (0, 12))])  # before, JAX's runs on GPUs only
def multiplied(request, monkeypatch):
    """-> a function that compares what XLA's dots give with what scaled_matmul gives on the CPU."""
    if request.param is not None:
        monkeypatch.setattr(jax.nn, "scaled_matmul", request.param)

    def same(function, *arguments, tolerance=1e-6):
        want = jax.tree.map(np.asarray, jax.jit(function)(*arguments))
        with monkeypatch.context() as patch:
            pretend(patch, "sm_100a", "10.0")
            patch.setattr(_blackwell, "choose", lambda cuda, otherwise, **_: cuda)
            traced = jax.jit(function).trace(*arguments)
            got = jax.tree.map(np.asarray, jax.jit(function)(*arguments))
        forget()
        assert "jax_fp4_scaled_matmul" in str(traced.jaxpr)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            finite = ~np.isnan(b)
            assert a.dtype == b.dtype and error_of(np.where(finite, a, 0), np.where(finite, b, 0)) <= tolerance
            np.testing.assert_array_equal(np.isnan(a), ~finite)

    yield same
    forget()


@pytest.mark.core
def test_operands_as_they_are_handed_over(monkeypatch):
    """Each alone: a product does not see an order of codes that both sides have."""
    given = []

    def noted(*operands, preferred_element_type):
        given.extend(operands)
        return definition(*operands, preferred_element_type=preferred_element_type)

    monkeypatch.setattr(jax.nn, "scaled_matmul", noted)
    x, w = fp4.quantize(normal(1, 2, 3, 64)), fp4.quantize(normal(2, 64, 8), axis=0)
    _blackwell.scaled_matmul(*(a.reshape(1, -1, a.shape[-1]) for a in (x.codes, w.codes, x.block_scale, w.block_scale)))
    for q, codes, scales in ((x, given[0], given[2]), (w, given[1], given[3])):
        want = reference.dequantize(np.asarray(q.codes), np.asarray(q.block_scale), None, 448, 64, np.float32)
        values = np.asarray(codes, np.float32) * np.repeat(np.asarray(scales, np.float32), 16, axis=-1)
        np.testing.assert_array_equal(values.reshape(want.shape), want)


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


FLAGS = {
    "tensor": {},
    "rows": dict(row_scaled=True),
    "bound 256": dict(four_over_six=fp4.FourOverSix()),
    "tiles": dict(block=(16, 16)),
}


@pytest.mark.core
@pytest.mark.parametrize(
    ("left", "right"), [("tensor", "tensor"), ("rows", "tiles"), ("bound 256", "rows"), ("rows", "bound 256")]
)
def test_two_matrices(multiplied, left, right):
    def products(x, w):
        q = fp4.quantize(w.mT, **FLAGS[right]).mT
        yield fp4.matmul(fp4.quantize(x, **FLAGS[left]), q)
        yield fp4.matmul(fp4.quantize(x[:, None], **FLAGS[left]), q, preferred_element_type=jnp.bfloat16)

    for m, k, n in ((5, 64, 16), (33, 90, 8), (1, 32, 4), (3, 1024, 12)):
        multiplied(lambda x, w: list(products(x, w)), normal(1, m, k), normal(2, k, n))


def test_batches(multiplied):
    def product(x, w, rows):
        return fp4.matmul(fp4.quantize(x, batch_dims=0 if rows else 1, row_scaled=rows), weights(w))

    x, w = normal(1, 3, 10, 64) * jnp.array([1.0, 30, 0.01])[:, None, None], normal(2, 3, 64, 8)
    multiplied(lambda x, w: [product(x, w, rows) for rows in (False, True)], x, w)


@pytest.mark.core
def test_every_code_and_scale(multiplied):
    """All bytes of codes, -0 among them, and all scales that `quantize` makes, NaN the last, over codes that are 0."""
    codes = jnp.tile(jnp.arange(256, dtype=jnp.uint8), (128, 1))
    scales = jnp.arange(127, dtype=jnp.uint8)[:, None] ^ jnp.arange(32, dtype=jnp.uint8)
    scales = jax.lax.bitcast_convert_type(jnp.where(scales == 127, 126, scales), jnp.float8_e4m3fn)
    nan = jnp.full((1, 32), 127, jnp.uint8).at[0, 1:].set(8)
    scales = jnp.concatenate([scales, jax.lax.bitcast_convert_type(nan, jnp.float8_e4m3fn)])
    lhs = fp4.QuantizedTensor(codes.at[-1].set(0), scales, jnp.float32(3), extent=512)
    rhs = fp4.quantize(normal(2, 512, 4), axis=0)
    multiplied(lambda lhs, rhs: fp4.matmul(lhs, rhs), lhs, rhs)


def test_tensor_factors_one_after_the_other(multiplied):
    """numerics 1.10: their product is denormal."""
    multiplied(times, normal(1, 16, 64) * 1e-24, normal(2, 64, 16) * 1e-9)
    multiplied(times, jnp.zeros((16, 64)), normal(2, 64, 16))


def test_dense_and_its_gradients(multiplied):
    """A bias; the transformed pair of the weight gradient, also with rows that are padded."""
    key, recipe = np.zeros(2, np.uint32), fp4.NVFP4BlockScaling("default")

    def loss(x, w, b):
        y = fp4.dense(x, w, b, recipe=recipe, key=key)
        return (y * normal(7, *y.shape)).sum()

    for m in (64, 60):
        arguments = normal(1, m, 96), normal(2, 96, 32), normal(3, 32)
        multiplied(jax.value_and_grad(loss, (0, 1, 2)), *arguments, tolerance=2e-6)
