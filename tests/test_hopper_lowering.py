"""Which products become kernels where a program is lowered for CUDA: one trace, whatever GPU it is lowered for."""

import os
import subprocess
import sys
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from installations import HOPPER, called, calls, forget, installed, lowered, pretend

import jax_fp4 as fp4
from jax_fp4 import _hopper

ROWS, BF16, DW = "jax_fp4_grouped_matmul", "jax_fp4_grouped_matmul_bf16", "jax_fp4_grouped_contraction"
KERNELS = {ROWS, BF16, DW}
INSTALLATIONS = {
    "lowered without a GPU": (HOPPER, (), True),
    "on Hopper": (HOPPER, ("9.0", "9.0"), True),
    "on Ampere": (HOPPER, ("8.0",), False),
    "on Blackwell": (HOPPER, ("10.0",), False),
    "on two kinds of GPU": (HOPPER, ("9.0", "8.0"), False),
    "without sm_90a": ("sm_80, sm_90", ("9.0",), False),
    "without extension": (None, ("9.0",), False),
}
native = installed(INSTALLATIONS)


@pytest.fixture
def hopper(monkeypatch):
    pretend(monkeypatch, HOPPER)
    yield
    forget()


M, K, N, G = 40, 72, 20, 3
X, W, DY = jnp.ones((M, K), jnp.bfloat16), jnp.ones((G, K, N), jnp.bfloat16), jnp.ones((M, N), jnp.bfloat16)
SIZES = jnp.int32([10, 0, 22])
grouped, columns = partial(fp4.quantize, group_sizes=SIZES), partial(fp4.quantize, axis=0, group_sizes=SIZES)
weights, rows = partial(fp4.quantize, axis=0, batch_dims=1), partial(fp4.grouped_matmul, group_sizes=SIZES)
transformed, single = partial(fp4.quantize, axis=0, hadamard=True), partial(jnp.asarray, dtype=jnp.float32)
PRODUCTS = {
    "two quantized matrices": (lambda: fp4.matmul(fp4.quantize(X), fp4.quantize(W[0], axis=0)), [ROWS]),
    "... and leading axes": (lambda: fp4.matmul(fp4.quantize(X.reshape(4, 10, K)), fp4.quantize(W[0], axis=0)), [ROWS]),
    "... of float32": (lambda: fp4.matmul(fp4.quantize(single(X)), fp4.quantize(W[0], axis=0)), [ROWS]),
    "rows": (lambda: rows(X, W), [BF16]),
    "rows and quantized": (lambda: rows(X, weights(W)), [BF16]),
    "quantized rows": (lambda: rows(grouped(X), W), [BF16]),
    "quantized rows and quantized": (lambda: rows(grouped(X), weights(W)), [ROWS]),
    "contraction": (lambda: rows(X.mT, DY), [DW]),
    "contraction and quantized": (lambda: rows(X.mT, columns(DY)), [DW]),
    "contraction of two quantized": (lambda: rows(columns(X).mT, columns(DY)), [DW]),
    "derivatives": (lambda: jax.grad(lambda x, w: rows(x, w).sum(dtype=jnp.float32), (0, 1))(X, W), [BF16, DW]),
    "derivatives of the contraction": (
        lambda: jax.grad(lambda x, y: rows(x.mT, y).sum(dtype=jnp.float32), (0, 1))(X, DY), [BF16, BF16]),
}  # fmt: skip
# What XLA multiplies everywhere: other types, batches, transformed pairs, nothing at all, too many groups.
DOTS = {
    "one quantized matrix": lambda: fp4.matmul(fp4.quantize(X), W[0]),
    "two arrays": lambda: fp4.matmul(X, W[0]),
    "batches": lambda: fp4.matmul(fp4.quantize(W.mT, batch_dims=1), weights(W)),
    "a vmapped matmul": lambda: jax.vmap(lambda w: fp4.matmul(fp4.quantize(X), fp4.quantize(w, axis=0)))(W),
    "a transformed pair": lambda: fp4.matmul(transformed(X).mT, transformed(DY)),
    "float32": lambda: (rows(single(X), W), rows(X.mT, single(DY)), rows(single(X), weights(W))),
    "float16": lambda: rows(X.astype(jnp.float16), W.astype(jnp.float16)),
    "many groups": lambda: fp4.grouped_matmul(X, jnp.ones((1025, K, 8), jnp.bfloat16), jnp.zeros(1025, jnp.int32)),
}  # fmt: skip
EMPTY = {
    "k": lambda: (rows(X[:, :0], W[:, :0]), rows(grouped(X[:, :0]), weights(W[:, :0])), rows(X.mT[:0], DY)),
    "n": lambda: (rows(X, W[..., :0]), rows(X.mT, DY[:, :0])),
    "m": lambda: (rows(X[:0], W), rows(X[:0].mT, DY[:0]), rows(grouped(X[:0]), weights(W))),
    "g": lambda: fp4.grouped_matmul(X, W[:0], SIZES[:0]),
    "k of a matrix": lambda: fp4.matmul(fp4.quantize(X[:, :0]), fp4.quantize(W[0, :0], axis=0)),
}


def kernels(text: str) -> list[str]:
    return [call for call in called(text) if call in KERNELS]


@pytest.mark.core
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(native, name):
    """Either kernels or dots: what is not called is not in the program."""
    function, expected = PRODUCTS[name]
    text = lowered(function)
    assert kernels(text) == expected * native
    assert ("dot_general" in text) is not native
    assert not native or "stablehlo.while" not in text


@pytest.mark.parametrize("name", DOTS)
def test_products_without_a_kernel(hopper, name):
    text = lowered(DOTS[name])
    assert kernels(text) == [] and "dot_general" in text


@pytest.mark.parametrize("name", EMPTY)
def test_empty_products_call_nothing(hopper, name):
    """k = 0 gives the bias, the others an empty array or zeros: all known before anything runs."""
    assert kernels(lowered(EMPTY[name])) == []


def layer(mode, name, dtype=jnp.bfloat16):
    """value_and_grad of a layer in everything it takes."""
    recipe = fp4.HIGH_PRECISION if mode is None else fp4.NVFP4BlockScaling(mode)
    x, w, given = X.astype(dtype), jnp.ones((G, K, 48)), dict(recipe=recipe, key=np.zeros(2, np.uint32))

    def loss(x, w, b):
        if name == "dense":
            return fp4.dense(x, w[0], b[0], **given).sum(dtype=jnp.float32)
        if name == "grouped_dense":
            return fp4.grouped_dense(x, w, SIZES, b, **given).sum(dtype=jnp.float32)
        w_out, probs = jnp.ones((G, 24, K)), jnp.ones(M)
        y = fp4.grouped_mlp(x, w, w_out, SIZES, b_in=b, b_out=jnp.ones((G, K)), probs=probs, **given)
        return y.sum(dtype=jnp.float32)

    return lambda: jax.value_and_grad(loss, (0, 1, 2))(x, w, jnp.ones((G, 48)))


# Of one product with its gradients. In the MLP w_out is no argument of the gradient, so the second has no dw.
LAYERS = {
    ("default", "dense"): {ROWS: 2},  # y, dx; dw is a dot
    ("unquant", "dense"): {ROWS: 1},
    ("dequant", "dense"): {ROWS: 1},
    (None, "dense"): {},
    ("default", "grouped_dense"): {ROWS: 2, DW: 1},
    ("unquant", "grouped_dense"): {ROWS: 1, BF16: 1, DW: 1},
    ("dequant", "grouped_dense"): {ROWS: 1, BF16: 1, DW: 1},
    (None, "grouped_dense"): {BF16: 2, DW: 1},
    ("default", "grouped_mlp"): {ROWS: 4, DW: 1},
    ("unquant", "grouped_mlp"): {ROWS: 2, BF16: 2, DW: 1},
    ("dequant", "grouped_mlp"): {ROWS: 2, BF16: 2, DW: 1},
    (None, "grouped_mlp"): {BF16: 4, DW: 1},
}


@pytest.mark.core
@pytest.mark.parametrize(("mode", "name"), LAYERS)
def test_layers_and_their_gradients(hopper, mode, name):
    text = lowered(layer(mode, name))
    assert Counter(kernels(text)) == LAYERS[mode, name]
    dots = 3 - sum(LAYERS[mode, name].values()) if name == "dense" else 0
    assert text.count("dot_general") == dots and "stablehlo.while" not in text


def test_the_weight_gradient_of_dense_is_a_dot(hopper):
    """Only its place tells it from a product of rows and weights, where its operands are not transformed."""
    recipe = fp4.NVFP4BlockScaling("default", random_hadamard_transform=False)
    loss = lambda w: fp4.dense(X, w, recipe=recipe, key=np.zeros(2, np.uint32)).sum(dtype=jnp.float32)  # noqa: E731
    text = lowered(jax.value_and_grad(loss), W[0])
    assert kernels(text) == [ROWS] and text.count("dot_general") == 1


@pytest.mark.parametrize("mode", ["default", "unquant"])
def test_float32_layers(hopper, mode):
    """Codes are exact in bfloat16 whatever was quantized; float32 values are not."""
    expected = {"default": {ROWS: 2, DW: 1}, "unquant": {ROWS: 1}}
    assert Counter(kernels(lowered(layer(mode, "grouped_dense", jnp.float32)))) == expected[mode]


EVERYTHING = {name: function for name, (function, _) in PRODUCTS.items()} | DOTS | EMPTY
EVERYTHING |= {f"{name}, {mode}": layer(mode, name) for mode, name in LAYERS}


@pytest.mark.core
def test_cpu_programs_are_the_same(monkeypatch):
    """As text: with the kernels, and with an extension that has none."""
    texts = {}
    for archs in (HOPPER, "sm_80"):
        pretend(monkeypatch, archs)
        texts[archs] = {name: lowered(function, platform="cpu") for name, function in EVERYTHING.items()}
    forget()
    for name in EVERYTHING:
        assert texts[HOPPER][name] == texts["sm_80"][name], name
        assert not kernels(texts[HOPPER][name])


def test_programs_without_the_kernels_are_those_of_other_gpus(monkeypatch):
    texts = []
    for archs, gpus in ((HOPPER, ["8.0"]), ("sm_80", [])):
        pretend(monkeypatch, archs, *gpus)
        texts.append({name: lowered(function) for name, function in EVERYTHING.items()})
    forget()
    for name in EVERYTHING:
        assert texts[0][name] == texts[1][name], name


def test_one_program_for_both_platforms(hopper):
    traced = jax.jit(PRODUCTS["rows"][0]).trace()
    for platforms, count in ((("cuda",), 1), (("cpu",), 0), (("cpu", "cuda"), 1)):
        assert len(kernels(traced.lower(lowering_platforms=platforms).as_text())) == count


def test_a_trace_asks_for_no_gpu(hopper, monkeypatch):
    """Devices are the user's to set up until a program is lowered."""

    def asked(*_):
        raise AssertionError("asked for devices")

    monkeypatch.setattr(jax, "devices", asked)
    traced = jax.jit(PRODUCTS["quantized rows and quantized"][0]).trace()
    assert traced.lower(lowering_platforms=("cpu",)) is not None
    with pytest.raises(AssertionError, match="asked"):
        traced.lower(lowering_platforms=("cuda",))


def test_attributes(hopper):
    """Every CUDA call of the decoder says whether it interleaves; the CPU handler does not know the word."""
    text = lowered(lambda: (rows(grouped(X), weights(W)), rows(grouped(X), W)))
    decoders = [line for line in text.splitlines() if "@jax_fp4_dequantize" in line]
    assert sorted("interleaved = true" in line for line in decoders) == [False, True]
    assert sum("interleaved = false" in line for line in decoders) == 1
    text = lowered(lambda: (rows(grouped(X), weights(W)), rows(grouped(X), W)), platform="cpu")
    assert "@jax_fp4_dequantize" in text and "interleaved" not in text


def test_operands_are_padded_to_what_kernels_read(hopper):
    """k = 72 to 128 beside packed weights; rows of 20 bfloat16 to 24, and the result cut again."""
    text = lowered(PRODUCTS["quantized rows and quantized"][0])
    assert "(tensor<40x128xbf16>, tensor<3x20x64xui8>, tensor<3x20x8xf8E4M3FN>, tensor<3xf32>, tensor<3xf32>" in text
    text = lowered(PRODUCTS["rows"][0])
    assert "(tensor<40x72xbf16>, tensor<3x72x24xbf16>, tensor<0xf32>, tensor<0xf32>, tensor<3xi32>" in text
    text = lowered(PRODUCTS["contraction"][0])
    assert "(tensor<40x72xbf16>, tensor<40x24xbf16>, tensor<0xf32>, tensor<0xf32>, tensor<3xi32>" in text
    text = lowered(PRODUCTS["contraction of two quantized"][0])  # P = 16 * ((40 + 45) // 16)
    assert "(tensor<72x80xbf16>, tensor<20x80xbf16>, tensor<3xf32>, tensor<3xf32>, tensor<3xi32>" in text


@pytest.mark.parametrize("name", ["grouped_dense", "grouped_matmul"])
def test_transposed_weights_are_read_as_they_lie(hopper, name):
    """dx = dy w^T reads w [g, k, n] itself: XLA cancels the transposes of it, of which there are two."""
    recipe = fp4.NVFP4BlockScaling("unquant")
    forward = rows if name == "grouped_matmul" else lambda x, w: fp4.grouped_dense(x, w, SIZES, recipe=recipe)
    text = lowered(jax.grad(lambda x, w: forward(x, w).sum(dtype=jnp.float32)), X, W)
    (call,) = [line for line in text.splitlines() if f"@{BF16}(" in line]
    assert "transposed = true" in call and "tensor<3x72x24xbf16>" in call and text.count("dims = [0, 2, 1]") == 2


@pytest.mark.core
def test_vmap(hopper):
    """A vmapped layer is a batched dot, as it always was: no loop, no call. Groups have one call for each entry."""
    dense = jax.vmap(lambda x, w: fp4.dense(x, w, recipe=fp4.NVFP4BlockScaling("dequant")))
    text = lowered(dense, X.reshape(2, 20, K), W[:2])
    assert not kernels(text) and "stablehlo.while" not in text and "dot_general" in text
    many = jax.vmap(fp4.grouped_matmul, (0, None, 0))
    text = lowered(many, X.reshape(2, 20, K), W, jnp.stack([SIZES] * 2))
    assert kernels(text) == [BF16] and text.count("stablehlo.while") == 1


@pytest.mark.core
def test_under_checkpoint_scan_and_the_second_derivative(hopper):
    recipe = fp4.NVFP4BlockScaling("dequant")

    def loss(x, w):
        step = jax.checkpoint(lambda x, _: (fp4.grouped_dense(x, w, SIZES, recipe=recipe), None))
        return jax.lax.scan(step, x, None, length=2)[0].sum(dtype=jnp.float32)

    square = jnp.ones((G, K, K), jnp.bfloat16)
    assert Counter(kernels(lowered(jax.grad(loss, (0, 1)), X, square))) == {ROWS: 1, BF16: 1, DW: 1}
    twice = jax.grad(lambda x: jax.grad(lambda x: (rows(x, W).astype(jnp.float32) ** 3).sum())(x).sum(dtype="float32"))
    assert Counter(calls(twice, X)).keys() == {BF16}


def test_the_bias_of_dense_is_differentiated_as_before(hopper):
    """Also twice and forward, where the rule of `dense` itself is differentiated."""
    recipe, x = fp4.NVFP4BlockScaling("dequant"), X[:4].astype(jnp.float32)

    def cubes(b):
        return (fp4.dense(x, W[0].astype(jnp.float32), b, recipe=recipe) ** 3).sum()

    b = jnp.arange(N, dtype=jnp.float32)
    y = fp4.dense(x, W[0].astype(jnp.float32), b, recipe=recipe)
    np.testing.assert_allclose(jax.jit(jax.hessian(cubes))(b), jnp.diag(6 * y.sum(0)), rtol=1e-6)


def test_supported_says_what_multiplies(native):
    for op in ("matmul", "dense", "grouped_matmul", "grouped_dense", "grouped_mlp"):
        support = fp4.supported(op, "cuda")
        assert ("on sm_90a" in support.reason) is native
        if support:
            dot = "a loop of XLA's dot" if op.startswith("grouped") else "with XLA's dot"
            assert dot in support.reason and len(support.reason) < 160


def test_limits(hopper):
    assert _hopper.takes(1, 1) and _hopper.takes(1024, 2**31 - 2**15)
    assert not _hopper.takes(1025, 1) and not _hopper.takes(0, 1) and not _hopper.takes(1, 2**31)
    assert not _hopper.takes(1, 1, 0)


@pytest.mark.parametrize("manual", [True, False])
def test_a_program_that_xla_partitions_keeps_its_dots(request, monkeypatch, manual):
    """A custom call is not partitioned: every device would gather all operands. Inside shard_map each has its own."""
    devices = np.array(jax.devices("cpu")[:2])
    if len(devices) < 2:  # their number is fixed before the first test: once more, in a process with two
        flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", request.node.nodeid]
        done = subprocess.run(
            command, env=os.environ | {"XLA_FLAGS": flags}, cwd=request.config.rootpath, capture_output=True, text=True
        )
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
        return
    mesh, of_rows, everywhere = jax.sharding.Mesh(devices, "d"), jax.P("d"), jax.P()
    pretend(monkeypatch, HOPPER)
    if manual:
        own = lambda x, w: fp4.grouped_matmul(x, w, SIZES)  # noqa: E731
        found = calls(
            jax.shard_map(own, mesh=mesh, in_specs=(of_rows, everywhere), out_specs=of_rows, check_vma=False), X, W
        )
    else:
        sharding = jax.sharding.NamedSharding(mesh, of_rows)
        found = called(
            jax.jit(rows, in_shardings=(sharding, None)).trace(X, W).lower(lowering_platforms=("cuda",)).as_text()
        )
    forget()
    assert found == [BF16] * manual
