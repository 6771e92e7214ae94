"""What is lowered for CUDA, seen without a GPU: one trace has the custom calls of the platform it is lowered for."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from installations import calls, forget, lowered, pretend
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_fp4 as fp4
from jax_fp4 import _ffi
from jax_fp4._activations import NAMES
from jax_fp4._ops import OPS


@pytest.fixture(params=[True, False], ids=["with extension", "without"])
def extension(request, monkeypatch):
    """As an installation with the CUDA extension would lower, and as one without."""
    pretend(monkeypatch, "sm_80" if request.param else None)
    yield request.param
    forget()


X = jnp.ones((32, 64), jnp.bfloat16)
SIZES = jnp.array([10, 22], jnp.int32)


def test_quantizers(extension):
    for function, name in (
        (fp4.quantize, "jax_fp4_quantize"),
        (fp4.quantize_transpose, "jax_fp4_quantize_transpose"),
        (lambda x: fp4.quantize(x, axis=0, group_sizes=SIZES), "jax_fp4_quantize"),
    ):
        assert calls(function, X) == [name] * extension
        assert calls(function, X, platform="cpu") == [name]
    q = fp4.quantize(X)
    assert calls(fp4.dequantize, q) == ["jax_fp4_dequantize"] * extension


FLOAT8: dict[str, dict] = {
    "mxfp8": {},
    "mxfp8_e5m2": dict(block=(32, 32)),
    "float8_block": dict(block=(128, 128)),
    "float8": dict(amax=np.float32(3)),
    "float8_e5m2": dict(scale=np.float32(2)),
}


@pytest.mark.parametrize("format", FLOAT8)
def test_quantizers_of_the_8_bit_formats(extension, format):
    """Kernels on CUDA for what has no groups; decoding is XLA's."""
    for function, name in (
        (lambda x, **how: fp4.quantize(x, format, **how), "jax_fp4_quantize_float8"),
        (lambda x, **how: fp4.quantize(x, format, axis=0, **how), "jax_fp4_quantize_float8"),
        (lambda x, **how: fp4.quantize_transpose(x, format, **how), "jax_fp4_quantize_transpose_float8"),
    ):
        for how in ({}, FLOAT8[format]):
            of_x = lambda x, function=function, how=how: function(x, **how)  # noqa: E731
            assert calls(of_x, X) == [name] * extension
            assert calls(jax.vmap(lambda x, f=function: f(x)), jnp.ones((3, 32, 64))) == [name] * extension
            assert calls(of_x, X, platform="cpu") == [name]
        of_groups = lambda x, function=function: function(x, group_sizes=SIZES)  # noqa: E731
        assert calls(of_groups, X) == []
        assert calls(of_groups, X, platform="cpu") == [name]
    q = fp4.quantize(X, format)
    assert calls(fp4.dequantize, q) == []


def test_8_bit_layers_quantize_in_the_kernels(extension):
    recipe = fp4.MXFP8BlockScaling("default")
    loss = lambda w, x: jnp.sum(fp4.dense(x, w, recipe=recipe).astype(jnp.float32))  # noqa: E731
    found = calls(jax.grad(loss, argnums=(0, 1)), jnp.ones((64, 32)), X)
    assert set(found) == {"jax_fp4_quantize_transpose_float8"} if extension else not found


def test_8_bit_kernels_by_name_and_under_strict(extension):
    named = lambda x, **how: fp4.quantize(x, "mxfp8", implementation="cuda", **how)  # noqa: E731
    with fp4.strict():
        if extension:
            assert calls(lambda x: fp4.quantize(x, "mxfp8"), X) == ["jax_fp4_quantize_float8"]
            assert calls(named, X) == ["jax_fp4_quantize_float8"]
        else:
            with pytest.raises(fp4.UnsupportedError, match="platform is cuda; needs cpu because"):
                calls(lambda x: fp4.quantize(x, "mxfp8"), X)
            with pytest.raises(fp4.UnsupportedError, match="needs the CUDA extension because"):
                calls(named, X)
        with pytest.raises(fp4.UnsupportedError, match="platform is cuda; needs cpu because"):
            calls(lambda x: fp4.quantize(x, "mxfp8", group_sizes=SIZES), X)
    with pytest.raises(fp4.UnsupportedError, match="mxfp8 with group_sizes has no CUDA kernel"):
        calls(lambda x: named(x, group_sizes=SIZES), X)


def test_supported_says_what_has_kernels(extension):
    for op, says in (("quantize", "those of groups by XLA's code"), ("dequantize", "8-bit formats by XLA's")):
        assert (says in fp4.supported(op, "cuda").reason) is extension


def test_one_trace_serves_both_platforms(extension):
    traced = jax.jit(fp4.quantize).trace(X)
    for platform, count in (("cuda", int(extension)), ("cpu", 1)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("custom_call @jax_fp4_quantize") == count
    assert "@jax_fp4_quantize" in traced.lower(lowering_platforms=("cpu", "cuda")).as_text()


def test_a_layer_and_its_gradient(extension):
    recipe, w = fp4.NVFP4BlockScaling(), jnp.ones((64, 32))

    def loss(w, x):
        return jnp.sum(fp4.dense(x, w, recipe=recipe, key=np.zeros(2, np.uint32)).astype(jnp.float32))

    found = calls(jax.grad(loss, argnums=(0, 1)), w, X)
    assert found.count("jax_fp4_quantize_transpose") == 3 * extension


# One layer with a second input [32, 96], which nothing else has the shape of.
MLP = dict(w_in=jnp.ones((2, 64, 192)), w_out=jnp.ones((2, 96, 80)), probs=jnp.ones(32))


def mlp(mode, x, w_in, w_out, probs):
    recipe, key = fp4.NVFP4BlockScaling(mode), np.zeros(2, np.uint32)
    y = fp4.grouped_mlp(x, w_in, w_out, SIZES, probs=probs, recipe=recipe, key=key)
    return jnp.sum(y.astype(jnp.float32))


@pytest.mark.parametrize("mode", ["default", "unquant", "dequant"])
def test_grouped_mlp_makes_its_second_input_in_the_quantizer(extension, mode):
    """On CUDA one call reads h in the place of the one that reads the second input, of which nothing is left; on CPU
    there are the calls of before, in their order."""
    both = "_transpose" * (mode == "default")
    for function, suffix in (
        (lambda *a: mlp(mode, *a), ""),
        (jax.value_and_grad(lambda *a: mlp(mode, *a), argnums=(0, 1, 2, 3)), both),
    ):
        text = {platform: lowered(function, X, *MLP.values(), platform=platform) for platform in ("cuda", "cpu")}
        fused, plain = f"jax_fp4_activate_quantize{suffix}", f"jax_fp4_quantize{suffix}"
        quantized = {p: re.findall(r"custom_call @(jax_fp4_\w*quantize\w*)\(.*: \(tensor<([^>]*)>", t)
                     for p, t in text.items()}  # fmt: skip
        assert quantized["cpu"].count((plain, "32x96xbf16")) == 1
        assert not any("activate" in target for target, _ in quantized["cpu"])
        wanted = [(fused, "32x192xbf16") if call == (plain, "32x96xbf16") else call for call in quantized["cpu"]]
        if extension:
            assert quantized["cuda"] == wanted
        else:
            assert not quantized["cuda"]


def test_xla_writes_no_second_input_on_cuda(extension):
    """Its value is read by no instruction of the forward: XLA removes it. The call makes its own, in scratch."""
    text = lowered(lambda *a: mlp("dequant", *a), X, *MLP.values())
    made = re.search(r"(%\w+) = stablehlo.convert .*tensor<32x96xf32>\) -> tensor<32x96xbf16>", text)
    assert made is not None
    rest = text[made.end() :].split("func.func")[0]  # names are those of one function
    assert (re.search(rf"{made[1]}\b", rest) is None) is extension


@pytest.mark.parametrize("mode", ["default", "dequant"])
def test_a_part_of_the_second_input_is_made_before_its_amax_is_known(extension, mode):
    """On CUDA by the kernel too, or a mesh would change bits: the largest amax of all parts comes between the calls."""
    parts = (fp4.Specs(x=P("data")), fp4.Specs(x=P("data")))
    arguments = MLP["w_in"], MLP["w_out"]

    def forward(x, w_in, w_out, sizes):
        return fp4.grouped_mlp(x, w_in, w_out, sizes, recipe=fp4.NVFP4BlockScaling(mode), specs=parts)

    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    function = jax.shard_map(forward, mesh=mesh, in_specs=(P("data"), P(), P(), P()), out_specs=P("data"))
    text = lowered(function, jnp.concatenate([X, X]), *arguments, SIZES)
    found = [
        f"{name} {shape}" for name, shape in re.findall(r"custom_call @jax_fp4_(\w+)\(.*?: \(tensor<([^>]*)>", text)
    ]
    second = [call for call in found if "x192xbf16" in call or call.endswith("32x96xbf16")]
    assert second == ["activate 32x192xbf16", "amax 32x96xbf16", "quantize 32x96xbf16"] * extension


@pytest.mark.parametrize("mode", ["default", "dequant"])
def test_layernorm_mlp_makes_its_second_input_in_the_quantizer(extension, mode):
    """Rows of two dimensions, whose column-wise codes keep both. Not in a program that XLA partitions."""

    def layer(x, w_in, w_out):
        recipe, key = fp4.NVFP4BlockScaling(mode), np.zeros(2, np.uint32)
        y = fp4.layernorm_mlp(x, jnp.ones(64), None, w_in, w_out, norm="rmsnorm", recipe=recipe, key=key)
        return jnp.sum(y.astype(jnp.float32))

    operands = [jax.ShapeDtypeStruct((2, 16, 64), jnp.bfloat16), *(jnp.ones(s) for s in ((64, 192), (96, 64)))]
    function = jax.value_and_grad(layer, argnums=(0, 1, 2))
    both = "_transpose" * (mode == "default")
    text = lowered(function, *operands)
    assert text.count(f"custom_call @jax_fp4_activate_quantize{both}(") == int(extension)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    cut = jax.NamedSharding(mesh, jax.P("data"))
    split = jax.jit(function, in_shardings=(cut, None, None)).trace(*operands).lower(lowering_platforms=("cuda",))
    assert "activate_quantize" not in split.as_text()


def test_a_second_product_that_is_not_quantized_is_as_before(extension):
    recipe = fp4.NVFP4BlockScaling("dequant")
    layer = lambda x: fp4.grouped_mlp(  # noqa: E731
        x, group_sizes=SIZES, recipe=recipe, out_recipe=fp4.HIGH_PRECISION, **MLP
    )
    assert not any("activate" in call for call in calls(layer, X))


def test_the_kernels_cut_contractions_as_python_does():
    text = (Path(__file__).parent.parent / "xla_ffi/kernels/grouped_gemm.h").read_text()
    assert re.findall(r"kPartRows = (\d+);", text) == [str(_ffi.PART_ROWS)]


def test_the_kernels_number_the_activations_as_python_does():
    header = (Path(__file__).resolve().parent.parent / "xla_ffi" / "kernels" / "types.h").read_text()
    enum = re.search(r"enum class Activation[^{]*{([^}]*)}", header)
    assert enum is not None
    numbers = {name: int(number) for name, number in re.findall(r"k(\w+) = (\d+)", enum[1])}
    assert numbers.pop("None") == 0
    assert {re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower(): number for name, number in numbers.items()} == (
        _ffi._ACTIVATIONS
    )
    assert tuple(_ffi._ACTIVATIONS) == NAMES
    last = re.search(r"kLastGated = Activation::k(\w+);", header)
    assert last is not None
    gated = [fp4.Activation(name).gated for name in NAMES]
    assert gated == [number <= numbers[last[1]] for number in _ffi._ACTIVATIONS.values()]


def test_strict_and_named_implementations(extension):
    with fp4.strict():
        if extension:
            assert calls(fp4.quantize, X) == ["jax_fp4_quantize"]
        else:
            with pytest.raises(fp4.UnsupportedError, match="platform is cuda; needs cpu because"):
                calls(fp4.quantize, X)
    named = lambda x: fp4.quantize(x, implementation="cuda")  # noqa: E731
    if extension:
        assert calls(named, X) == ["jax_fp4_quantize"]
        with pytest.raises(fp4.UnsupportedError, match="platform is cpu; needs cuda because"):
            calls(named, X, platform="cpu")
    else:
        with pytest.raises(fp4.UnsupportedError, match="implementation is 'cuda'; needs the CUDA extension because"):
            calls(named, X)
    with pytest.raises(fp4.UnsupportedError, match="platform is cuda; needs cpu because"):
        calls(lambda x: fp4.quantize(x, implementation="cpu"), X)
    assert bool(fp4.supported("quantize", "cuda")) is extension


KEY, W, STACKED = np.zeros(2, np.uint32), jnp.ones((64, 32), jnp.bfloat16), jnp.ones((2, 64, 32), jnp.bfloat16)
NV = fp4.NVFP4BlockScaling("default")
MLP_OF = dict(activation="relu", recipe=NV, key=jax.random.key(0))
SUPPORTED = {
    "quantize": lambda x: fp4.quantize(x),
    "quantize_transpose": lambda x: fp4.quantize_transpose(x),
    "dequantize": lambda x: fp4.dequantize(fp4.quantize(x)),
    "matmul": lambda x: fp4.matmul(fp4.quantize(x), fp4.quantize(W, axis=0)),
    "grouped_matmul": lambda x: fp4.grouped_matmul(fp4.quantize(x), fp4.quantize(STACKED, axis=0, batch_dims=1), SIZES),
    "dense": lambda x: fp4.dense(x, W, recipe=NV, key=KEY),
    "grouped_dense": lambda x: fp4.grouped_dense(x, STACKED, SIZES, recipe=NV, key=KEY),
    "grouped_mlp": lambda x: fp4.grouped_mlp(x, STACKED, STACKED.mT, SIZES, **MLP_OF),
    "layernorm_dense": lambda x: fp4.layernorm_dense(x, jnp.ones(64), None, W, recipe=NV, key=KEY),
    "layernorm_mlp": lambda x: fp4.layernorm_mlp(x, jnp.ones(64), None, W, W.T, **MLP_OF),
}


@pytest.mark.parametrize("op", SUPPORTED)
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_every_cell_of_supported_is_true(extension, op, platform):
    """Under strict(), which refuses whatever falls back, exactly what is said to be supported is lowered; the gradient
    of a layer too."""
    call = SUPPORTED[op]
    if op in ("dense", "grouped_dense", "grouped_mlp", "layernorm_dense", "layernorm_mlp"):
        forward = call
        call = jax.grad(lambda x: forward(x).astype(jnp.float32).sum())
    support = fp4.supported(op, platform)
    assert bool(support) is (platform == "cpu" or (platform == "cuda" and extension)) and support.reason
    with fp4.strict():
        if support:
            assert any(name.startswith("jax_fp4_") for name in calls(call, X, platform=platform))
        else:
            with pytest.raises(fp4.UnsupportedError, match=f"platform is {platform}"):
                calls(call, X, platform=platform)


def test_every_op_has_a_cell():
    assert tuple(SUPPORTED) == OPS


@pytest.mark.parametrize("format", ["float8", "float8_e5m2", "mxfp8", "float8_block"])
def test_no_dot_is_of_converted_8_bit_floats(format):
    """XLA:GPU would hand it to tensor cores for these, which keep too few bits of a sum (numerics 1.10)."""
    lhs, rhs = fp4.quantize(X, format), fp4.quantize(W, format, axis=0)
    products = {
        "matmul": lambda: fp4.matmul(lhs, rhs),
        "grouped": lambda: fp4.grouped_matmul(lhs, fp4.quantize(STACKED, format, axis=0, batch_dims=1), SIZES),
    }
    for product in products.values():
        text = lowered(product, platform="cuda")
        assert not re.search(r"convert .*xf8E\w+>\) -> tensor<\w+x(bf16|f32|f16)>", text)
