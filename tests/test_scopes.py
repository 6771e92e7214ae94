"""Names in a trace: whose product each custom call and each dot belongs to, read from the compiled program."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from installations import HOPPER, forget, pretend
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp4 as fp4

MODES = ("default", "unquant", "dequant")
KEY = np.zeros(2, np.uint32)
SIZES = jnp.array([10, 6], jnp.int32)
X, SCALE = jnp.ones((16, 32), jnp.bfloat16), jnp.ones(32)
KERNEL, KERNELS = jnp.ones((32, 48)), jnp.ones((2, 32, 48))
IN, OUT, INS, OUTS = jnp.ones((32, 64)), jnp.ones((32, 48)), jnp.ones((2, 32, 64)), jnp.ones((2, 32, 48))

# Each layer as a function of what is differentiated; all of them are one training step below.
LAYERS = {
    "fp4.dense": (fp4.dense, X, KERNEL),
    "fp4.grouped_dense": (lambda x, w, **how: fp4.grouped_dense(x, w, SIZES, **how), X, KERNELS),
    "fp4.layernorm_dense": (lambda x, w, **how: fp4.layernorm_dense(x, SCALE, None, w, **how), X, KERNEL),
    "fp4.layernorm_mlp": (lambda x, *w, **how: fp4.layernorm_mlp(x, SCALE, None, *w, **how), X, IN, OUT),
    "fp4.grouped_mlp": (lambda x, *w, **how: fp4.grouped_mlp(x, *w, SIZES, **how), X, INS, OUTS),
    "fp4.moe": (lambda x, *w, **how: fp4.moe(x, x[:, :2], *w, top_k=2, **how)[0], X, INS, OUTS),
}
PRODUCTS = {"forward", "dgrad", "wgrad"}
INSIDE = {"w_in", "w_out", "norm", "activation", "gather", "scatter", "backward", "bgrad", *PRODUCTS}
# What quantizes and what multiplies: one layer, one product, one operation.
PATH = re.compile(
    r"(fp4\.moe/)?fp4\.(?P<layer>(layernorm_|grouped_)?(dense|mlp))(?(layer)(/w_in|/w_out)?)/"
    r"(?P<product>forward|backward|dgrad|wgrad)(/gather)?/fp4\.(?P<op>quantize(_transpose)?|(grouped_)?matmul(/fp4\.dequantize)?)"
)


def scopes(name: str) -> str:
    """Ours among the names of an instruction, without what JAX puts around them (jit, transpose(jvp())) or after."""
    return "/".join(part for part in re.findall(r"[\w.]+", name) if part.startswith("fp4.") or part in INSIDE)


def names(text: str, instruction: str) -> list[str]:
    """The scopes of every such instruction of a compiled program."""
    lines = [line for line in text.splitlines() if re.search(rf" (?:{instruction})\(", line)]
    found = [re.search(r'op_name="([^"]*)"', line) for line in lines]
    assert all(found), [line for line, name in zip(lines, found, strict=True) if name is None]
    return [scopes(name[1]) for name in found if name is not None]


def products(text: str) -> list[str]:
    return names(text, "dot|custom-call")


def step(layers: dict, recipe):
    """Loss and gradients of all layers together, in x and the kernels of each."""

    def loss(operands):
        outputs = [f(*operands[name], recipe=recipe, key=KEY) for name, (f, *_) in layers.items()]
        return sum(jnp.sum(jnp.square(y.astype(jnp.float32))) for y in outputs)

    return jax.value_and_grad(loss), {name: operands for name, (_, *operands) in layers.items()}


def compiled(function, *arguments) -> str:
    return jax.jit(function).lower(*arguments).compile().as_text()


@pytest.fixture(scope="module", params=MODES)
def mode_and_program(request):
    function, operands = step(LAYERS, fp4.NVFP4BlockScaling(request.param))
    return request.param, compiled(function, operands)


@pytest.mark.core
def test_each_call_and_each_dot_has_one_path(mode_and_program):
    mode, text = mode_and_program
    found = [name for name in products(text) if not name.endswith("fp4.route")]  # which sorts, by a call of XLA's
    assert len(found) > 50
    assert [name for name in found if PATH.fullmatch(name) is None] == []
    handlers = re.findall(r'custom_call_target="jax_fp4_(\w+)".*op_name="([^"]*)"', text)
    assert [(op, name) for op, name in handlers if not scopes(name).endswith(f"/fp4.{op}")] == []
    quantized = {name for name in found if "/backward/" in name}
    assert all("/fp4.quantize" in name for name in quantized)
    assert bool(quantized) is (mode == "default")  # the others multiply dy as it is


@pytest.mark.core
@pytest.mark.parametrize("layer", LAYERS)
def test_each_layer_has_its_three_products(mode_and_program, layer):
    _, text = mode_and_program
    of_mlp = ("/w_in", "/w_out") if layer.endswith(("mlp", "moe")) else ("",)
    inside = layer + "/fp4.grouped_mlp" * (layer == "fp4.moe")
    multiplied = set(names(text, "dot"))
    for which in of_mlp:
        for product in PRODUCTS:
            op = "grouped_matmul" if "grouped" in inside else "matmul"
            assert f"{inside}{which}/{product}/fp4.{op}" in multiplied
        of_forward = {name for name in names(text, "custom-call") if name.startswith(f"{inside}{which}/forward/")}
        assert any("/fp4.quantize" in name for name in of_forward)


def test_what_is_around_the_products_has_names_too(mode_and_program):
    _, text = mode_and_program
    every = {scopes(name) for name in re.findall(r'op_name="([^"]*)"', text)}
    moe = {f"fp4.moe/fp4.{op}" for op in ("route", "group_tokens", "group_weights", "combine_tokens")}
    norms = {"fp4.layernorm_dense/norm", "fp4.layernorm_mlp/norm"}
    assert moe | norms | {"fp4.layernorm_mlp/activation", "fp4.moe/fp4.grouped_mlp/activation"} <= every


@pytest.mark.core
def test_functions_called_by_themselves():
    def function(x, w, kernels):
        q = fp4.quantize(x)
        y = fp4.matmul(q, fp4.quantize_transpose(w)[1])
        return fp4.dequantize(q), y, fp4.grouped_matmul(x, kernels, SIZES)

    plain = {"fp4.quantize", "fp4.quantize_transpose", "fp4.matmul", "fp4.dequantize", "fp4.grouped_matmul"}
    assert set(products(compiled(function, X, KERNEL, KERNELS))) == {*plain, "fp4.matmul/fp4.dequantize"}


# --- meshes ---


def on_mesh(kind: str, mode: str) -> str:
    """The training step of `dense`, rows and kernel cut over two devices."""
    of_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2,), ("data",), axis_types=(of_type,), devices=jax.devices()[:2])

    def manual(x, w, **how):
        how |= dict(gather=fp4.WeightGather("data", 0), specs=fp4.Specs(P("data"), P("data")))
        layer = lambda x, w: fp4.dense(x, w, **how)  # noqa: E731
        return jax.shard_map(layer, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x, w)

    layer = manual if kind == "manual" else fp4.dense
    function, operands = step({"fp4.dense": (layer, X, KERNEL)}, fp4.NVFP4BlockScaling(mode))
    with jax.set_mesh(mesh):
        return compiled(function, jax.device_put(operands, NamedSharding(mesh, P("data"))))


@pytest.mark.core
@pytest.mark.parametrize(("kind", "mode"), [("manual", "default"), ("explicit", "unquant"), ("auto", "default")])
def test_sharded(kind, mode):
    text = on_mesh(kind, mode)
    found = products(text)
    assert [name for name in found if PATH.fullmatch(name) is None] == []
    assert {PATH.fullmatch(name)["product"] for name in found} == PRODUCTS | (
        {"backward"} if mode == "default" else set()
    )
    if kind != "auto":  # where XLA moves the kernel as it likes
        assert set(names(text, "all-gather")) == {"fp4.dense/forward/gather", "fp4.dense/dgrad/gather"}
        assert set(names(text, "reduce-scatter")) == {"fp4.dense/wgrad/scatter"}


def test_tokens_that_travel():
    """Experts on two devices: what moves tokens between them."""
    mesh = jax.make_mesh((2,), ("expert",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    function, operands = step({"fp4.moe": LAYERS["fp4.moe"]}, fp4.NVFP4BlockScaling("unquant"))
    with jax.set_mesh(mesh):
        text = compiled(function, jax.device_put(operands, NamedSharding(mesh, P("expert"))))
    moves = {f"fp4.moe/fp4.{op}" for op in ("exchange_tokens", "exchange_weights", "return_tokens")}
    assert set(names(text, "all-to-all")) == moves
    assert [name for name in names(text, "dot") if PATH.fullmatch(name) is None] == []


# --- CUDA ---


@pytest.fixture
def hopper(monkeypatch):
    pretend(monkeypatch, HOPPER)
    yield
    forget()


@pytest.mark.usefixtures("hopper")
def test_lowered_for_hopper():
    """The calls of the CUDA handlers: the activation that is made and quantized in one is where it is quantized."""
    layers = {name: LAYERS[name] for name in ("fp4.grouped_mlp", "fp4.dense")}
    function, operands = step(layers, fp4.NVFP4BlockScaling("dequant"))
    text = jax.jit(function).trace(operands).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    where = dict(re.findall(r'^(#loc\d+) = loc\("([^"]*)"', text, re.MULTILINE))
    calls = re.findall(r"custom_call @(jax_fp4_\w+)\(.*loc\((#loc\d+)\)", text)
    found = {(target, scopes(where[loc])) for target, loc in calls}
    assert len(calls) == text.count("custom_call @jax_fp4_") > 10
    layer = "fp4.grouped_mlp/w_out"
    assert ("jax_fp4_activate_quantize", f"{layer}/forward/fp4.quantize") in found
    assert ("jax_fp4_grouped_matmul", f"{layer}/forward/fp4.grouped_matmul") in found
    assert ("jax_fp4_grouped_contraction", f"{layer}/wgrad/fp4.grouped_matmul") in found
    assert ("jax_fp4_grouped_matmul", "fp4.dense/forward/fp4.matmul") in found
    assert [name for _, name in found if PATH.fullmatch(name) is None] == []


# --- the checks see what they are for ---


@pytest.mark.parametrize(
    "name",
    [
        "jit(f)/jvp(fp4.dense)/fp4.dense/forward/fp4.matmul/dot_general",
        "jit(f)/transpose(jvp(fp4.dense))/dgrad/dot_general",
        "jit(f)/jvp(fp4.dense)/fp4.matmul/dot_general",
        "jit(f)/jvp()/forward/fp4.matmul/dot_general",
        "jit(f)/jvp(fp4.dense)/forward/dgrad/fp4.matmul/dot_general",
        "jit(f)/dot_general",
    ],
)
def test_a_wrong_path_is_seen(name):
    assert PATH.fullmatch(scopes(name)) is None


def test_an_instruction_without_a_name_is_seen():
    with pytest.raises(AssertionError):
        names("%dot.1 = f32[] dot(%a, %b), lhs_contracting_dims={}", "dot")
