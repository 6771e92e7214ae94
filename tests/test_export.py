"""Weights in the layout of ModelOpt: the bytes, read without this package; reloaded, the forward of the model (G6)."""

import dataclasses
import json
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jax_fp4 as fp4
from jax_fp4 import _export_file, export, linen
from jax_fp4 import nnx as fp4_nnx

pytestmark = pytest.mark.core

BF16 = jnp.bfloat16
RECIPE = fp4.NVFP4BlockScaling(stochastic_rounding=False)
VARIANTS = {
    "tiles": RECIPE,
    "rows": dataclasses.replace(RECIPE, two_dimensional_weights=False),
    "four_over_six": dataclasses.replace(RECIPE, four_over_six="weights", two_dimensional_weights=False),
    "four_over_six_448": dataclasses.replace(RECIPE, four_over_six="all", four_over_six_bound=448),
    "row_scaled_activation": dataclasses.replace(RECIPE, row_scaled_activation=True),
    "custom": fp4.CustomRecipe(forward=RECIPE, dgrad=fp4.HIGH_PRECISION, wgrad=fp4.HIGH_PRECISION),
}
K, N = 48, 40
X = jax.random.normal(jax.random.key(1), (8, K), BF16)
W = jax.random.normal(jax.random.key(0), (K, N)) * 0.3


def same_bits(a, b):
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def random_params(model, *args):
    """As `model.init` would make them, but fast."""
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *args)["params"])
    generator = np.random.default_rng(0)
    return jax.tree.map(lambda s: jnp.asarray(generator.normal(size=s.shape), s.dtype) / 8, shapes)


# --- the file, read by its published format, and decoded by ModelOpt's definition ---


def raw(folder):
    """(tensors as (dtype, shape, bytes), header) of model.safetensors: 8 bytes of length, JSON, and the arrays."""
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__")
    spans = {name: slice(*(start + offset for offset in entry["data_offsets"])) for name, entry in header.items()}
    return {
        name: (entry["dtype"], tuple(entry["shape"]), data[spans[name]]) for name, entry in header.items()
    }, metadata


def arrays(folder):
    """All tensors of a folder, and what `save` noted of them."""
    tensors, facts = _export_file.tensors_of("test", folder)
    return {name: stored.read() for name, stored in tensors.items()}, facts


def e4m3(byte):
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def decoded(tensors, name):
    """[out, in] in float64: e2m1(code) * e4m3(weight_scale) * weight_scale_2."""
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table = np.array([*magnitudes, *(-m for m in magnitudes)])
    (kind, (out, half), data), (scale_kind, scale_shape, scale), (kind_2, shape_2, scale_2) = (
        tensors[f"{name}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")
    )
    assert (kind, scale_kind, kind_2) == ("U8", "F8_E4M3", "F32")
    assert scale_shape == (out, half // 8) and shape_2 == ()
    packed = np.frombuffer(data, np.uint8).reshape(out, half)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(out, 2 * half)
    scales = np.array([e4m3(byte) for byte in scale]).reshape(scale_shape)
    return table[codes] * np.repeat(scales, 16, axis=1) * float(np.frombuffer(scale_2, "<f4")[0])


def test_the_bytes_of_a_known_matrix(tmp_path):
    """The sixteen codes in order, times 448: amax 2688 = 6 * 448, so the scales are 448 and 1."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    kernel = jnp.asarray(448 * np.stack([[*grid, *-grid], [*-grid, *grid]], axis=1), jnp.float32)  # [k 16, n 2]
    export.save(tmp_path, {"up": {"kernel": kernel}}, VARIANTS["rows"], dtype=jnp.float32)
    tensors, _ = raw(tmp_path)
    assert tensors == {
        "up.weight": ("U8", (2, 8), bytes.fromhex("1032547698badcfe 98badcfe10325476")),
        "up.weight_scale": ("F8_E4M3", (2, 1), b"\x7e\x7e"),
        "up.weight_scale_2": ("F32", (), np.float32(1).tobytes()),
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_decode_by_the_definition(tmp_path, variant):
    recipe = VARIANTS[variant]
    export.save(tmp_path, {"up": {"kernel": W}}, recipe, dtype=BF16)
    got = decoded(raw(tmp_path)[0], "up")
    scaling = {"custom": RECIPE}.get(variant, recipe).scaling("kernel")
    want = fp4.dequantize(fp4.quantize(W, axis=0, dtype=BF16, **scaling.flags), jnp.float32)
    np.testing.assert_allclose(got, np.asarray(want).T, rtol=2**-22, atol=0)
    largest = np.max(np.abs(np.asarray(W.T).reshape(N, -1, 16)), axis=-1, keepdims=True)
    if scaling.block is None:  # half of the widest step, 2 of 6, and an E4M3 scale that is off by 2^-4
        assert np.all(np.abs(got - W.T).reshape(N, -1, 16) <= largest / 6 * (1 + 2**-2))


# --- reloaded ---


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [BF16, jnp.float32])
def test_a_reloaded_kernel_computes_the_same_bits(tmp_path, variant, dtype):
    """Forward and, of tiles, the default backward, which reads the other plane too."""
    recipe, x = VARIANTS[variant], X.astype(dtype)
    params = {"up": {"kernel": W, "bias": jnp.arange(N, dtype=jnp.float32)}}
    export.save(tmp_path, params, recipe, dtype=dtype)
    up = export.load(tmp_path, jax.eval_shape(lambda: params))["up"]
    assert up["kernel"].shape == W.shape and up["kernel"].dtype == dtype
    same_bits(up["bias"], params["up"]["bias"])
    run = lambda kernel: fp4.dense(x, kernel, up["bias"], recipe=recipe)  # noqa: E731
    same_bits(run(up["kernel"]), run(W))
    if isinstance(recipe, fp4.NVFP4BlockScaling) and recipe.two_dimensional_weights:
        dx = lambda kernel: jax.grad(lambda x: jnp.sum(fp4.dense(x, kernel, recipe=recipe)))(x)  # noqa: E731
        same_bits(dx(up["kernel"]), dx(W))


def test_the_amax_is_the_one_that_was(tmp_path):
    """What weight_scale_2 alone does not give back."""
    next_ones = np.float32(1.4) + np.arange(9, dtype=np.float32) * np.float32(2**-23)
    amax = next(a for a in next_ones if a / np.float32(2688) * np.float32(2688) != a)
    kernel = jnp.clip(W, -1, 1).at[0, 0].set(amax)
    export.save(tmp_path, {"up": {"kernel": kernel}}, RECIPE, dtype=jnp.float32)
    same_bits(export.load(tmp_path, {"up": {"kernel": kernel}})["up"]["kernel"].amax, amax)


class Model(nn.Module):
    """Embedding, attention of DenseGeneral, an MLP and a head."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, K, dtype=BF16, name="embed")(tokens)
        heads = nn.DenseGeneral((4, 8), dtype=BF16, name="query")(x)
        x = x + nn.DenseGeneral(K, axis=(-2, -1), dtype=BF16, name="out")(heads)
        x = nn.RMSNorm(dtype=BF16, name="norm")(x)
        x = nn.relu(nn.Dense(N, dtype=BF16, name="up")(x))
        return nn.Dense(11, dtype=BF16, name="head")(x)


LAYOUTS = {"query/kernel": "knn", "out/kernel": "kkn"}
RULES = fp4.Rules([("head", fp4.HIGH_PRECISION), (".*", RECIPE)])


def frozen_model(params, tokens):
    """The same model as functions, of what `load` gives."""
    dense = lambda name, x: fp4.dense(x, params[name]["kernel"], params[name]["bias"].reshape(-1), recipe=RECIPE)  # noqa: E731
    x = jnp.asarray(params["embed"]["embedding"], BF16)[tokens]
    x = x + dense("out", dense("query", x))
    x = nn.RMSNorm(dtype=BF16).apply({"params": params["norm"]}, x)
    return nn.Dense(11, dtype=BF16).apply({"params": params["head"]}, nn.relu(dense("up", x)))


def test_a_linen_model_reloads_bit_for_bit(tmp_path):
    tokens = jnp.arange(8) % 11
    with linen.quantized(RULES):
        params = random_params(Model(), tokens)
        want = Model().apply({"params": params}, tokens)
    export.save(tmp_path, params, RULES, dtype=BF16, layouts=LAYOUTS)
    same_bits(frozen_model(export.load(tmp_path, params, layouts=LAYOUTS), tokens), want)

    tensors, metadata = raw(tmp_path)
    assert tensors["query.weight"][:2] == ("U8", (32, K // 2)) and tensors["out.weight"][:2] == ("U8", (K, 16))
    assert tensors["head.weight"] == ("F32", (11, N), np.asarray(params["head"]["kernel"]).T.tobytes())
    assert tensors["embed.weight"][:2] == ("F32", (11, K)) and tensors["norm.weight"][1] == (K,)
    assert tensors["query.bias"][1] == (32,)
    assert metadata["format"] == "pt"
    config = json.loads((tmp_path / "hf_quant_config.json").read_text())
    assert config["producer"]["name"] == "modelopt"
    quantization = {
        "quant_algo": "W4A16_NVFP4",
        "group_size": 16,
        "exclude_modules": ["head"],
        "kv_cache_quant_algo": None,
    }
    assert config["quantization"] == quantization


def test_an_nnx_state_reloads_bit_for_bit(tmp_path):
    model = nnx.Dict(blocks=nnx.List([nnx.Linear(K, N, dtype=BF16, rngs=nnx.Rngs(i)) for i in range(2)]))
    fp4_nnx.quantize_model(model, fp4.Rules([("blocks/1", RECIPE)]))
    state = nnx.state(model, nnx.Param)
    export.save(tmp_path, state, fp4.Rules([("blocks/1", RECIPE)]), dtype=BF16)
    got = export.load(tmp_path, nnx.to_pure_dict(state))["blocks"]
    same_bits(fp4.dense(X, got[1]["kernel"], got[1]["bias"], recipe=RECIPE), model["blocks"][1](X))
    same_bits(got[0]["kernel"], state["blocks"][0]["kernel"][...])
    boxed = export.load(tmp_path, state)  # in its boxes
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.to_pure_dict(boxed)["blocks"], got))


def test_experts_are_written_one_by_one(tmp_path):
    layer = linen.MoE(num_experts=3, features=32, dtype=BF16, recipe=RECIPE)
    params = random_params(layer, X)
    names = lambda name: ("mlp." + name).replace("w_out", "down_proj")  # noqa: E731
    split = lambda name: tuple(names(name).replace("w_in", part) for part in ("gate_proj", "up_proj"))  # noqa: E731
    both = lambda name: split(name) if "w_in" in name else names(name)  # noqa: E731
    amax = {"w_in": np.array([1.0, 2.0, 4.0]), "w_out": 3.0}
    export.save(tmp_path, params, RECIPE, dtype=BF16, names=both, input_amax=amax, quant_algo="W4A16_NVFP4")
    tensors, _ = raw(tmp_path)
    for e in range(3):
        halves = [decoded(tensors, f"mlp.experts.{e}.{part}_proj") for part in ("gate", "up")]
        want = fp4.dequantize(fp4.quantize(params["w_in"][e], axis=0, dtype=BF16, block=(16, 16)), jnp.float32)
        np.testing.assert_allclose(np.concatenate(halves).T, want, rtol=2**-22)
        for part, value in (("gate", 2.0**e), ("up", 2.0**e), ("down", 3.0)):
            assert tensors[f"mlp.experts.{e}.{part}_proj.input_scale"][2] == np.float32(value / 2688).tobytes()
    assert tensors["mlp.router.weight"][:2] == ("F32", (3, K))
    config = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]
    assert (config["exclude_modules"], config["quant_algo"]) == (["mlp.router"], "W4A16_NVFP4")

    got = export.load(tmp_path, params, names=both)
    sizes = jnp.array([3, 0, 5], jnp.int32)
    run = lambda p: fp4.grouped_mlp(X, p["w_in"], p["w_out"], sizes, recipe=RECIPE)  # noqa: E731
    same_bits(run(got), run(params))


def test_a_stack_of_layers_has_a_name_for_each(tmp_path):
    """As nn.scan makes it."""
    stack = {"blocks": {"up": {"kernel": jnp.stack([W, 2 * W])}}}
    layouts = {".*/up/kernel": "gkn"}
    export.save(tmp_path, stack, RECIPE, dtype=BF16, layouts=layouts)
    assert {"blocks.up.0.weight", "blocks.up.1.weight_scale_2"} < {*raw(tmp_path)[0]}
    got = export.load(tmp_path, stack, layouts=layouts)["blocks"]["up"]["kernel"]
    want = fp4.quantize(stack["blocks"]["up"]["kernel"], axis=0, batch_dims=1, dtype=BF16, block=(16, 16))
    jax.tree.map(same_bits, got, want)  # static fields included


def test_frozen_kernels_are_written_as_they_are(tmp_path):
    frozen = {"up": {"kernel": fp4.quantize(W, axis=0, dtype=BF16, four_over_six=fp4.FourOverSix())}}
    export.save(tmp_path, frozen, fp4.HIGH_PRECISION, dtype=BF16)
    jax.tree.map(same_bits, export.load(tmp_path, frozen), frozen)


def test_sharded_parameters_give_the_same_file(tmp_path):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    cut = jax.device_put({"up": {"kernel": W}}, NamedSharding(mesh, PartitionSpec("x", "y")))
    for name, params in (("cut", cut), ("whole", {"up": {"kernel": W}})):
        export.save(tmp_path / name, params, RECIPE, dtype=BF16)
    assert raw(tmp_path / "cut") == raw(tmp_path / "whole")


@pytest.mark.parametrize("variant", ["rows", "four_over_six"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_file_of_other_origin(tmp_path, variant, shape):
    """No amax in the header, B unknown, [1] for a scale: the same weights up to rounding."""
    params = {"up": {"kernel": W.astype(BF16)}}
    export.save(tmp_path, params, VARIANTS[variant], dtype=BF16)
    tensors, _ = arrays(tmp_path)
    ours = fp4.dequantize(export.load(tmp_path, params)["up"]["kernel"], jnp.float32)
    tensors["up.weight_scale_2"] = np.array(tensors["up.weight_scale_2"]).reshape(shape)
    tensors["up.input_scale"] = np.ones((), np.float32)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    got = export.load(tmp_path, params)["up"]["kernel"]
    assert (got.bound, got.block, got.dtype) == (448, (1, 16), BF16)
    np.testing.assert_allclose(fp4.dequantize(got, jnp.float32), ours, rtol=2**-21)


def test_a_model_in_several_files(tmp_path):
    params = {"up": {"kernel": W}, "down": {"kernel": W.T[:32]}}
    for name in params:
        export.save(tmp_path / name, {name: params[name]}, RECIPE, dtype=BF16)
        (tmp_path / name / "model.safetensors").rename(tmp_path / f"{name}.safetensors")
    got = export.load(tmp_path, params)
    jax.tree.map(same_bits, got["down"]["kernel"], fp4.quantize(W.T[:32], axis=0, dtype=BF16, block=(16, 16)))


# --- settings of the layers ---

OTHER = VARIANTS["four_over_six"]


@pytest.mark.parametrize("out_recipe", [OTHER, fp4.HIGH_PRECISION, fp4.Rules([("mlp", OTHER)])])
def test_the_second_product_has_its_own_recipe(tmp_path, out_recipe):
    own = OTHER if isinstance(out_recipe, fp4.Rules) else out_recipe
    layer = linen.LayerNormMLP(32, N, dtype=BF16, recipe=RECIPE, out_recipe=own)
    params = random_params(layer, X)
    export.save(tmp_path, {"mlp": params}, RECIPE, dtype=BF16, out_recipe=out_recipe)
    got = export.load(tmp_path, {"mlp": params})["mlp"]
    assert isinstance(got["w_out"], fp4.QuantizedTensor) == (own is OTHER)
    arrays = {name: got[name] for name in ("w_in", "w_out", "b_in", "b_out")}
    how = dict(recipe=RECIPE, out_recipe=own)
    y = fp4.layernorm_mlp(X, got["scale"], got["norm_bias"], **arrays, **how)
    same_bits(y, layer.apply({"params": params}, X))


@pytest.mark.parametrize("framework", ["linen", "nnx"])
@pytest.mark.parametrize("router_recipe", [OTHER, None, fp4.Rules([("router", OTHER)])])
def test_a_router_has_its_own_recipe(tmp_path, framework, router_recipe):
    own = RECIPE if router_recipe is None else OTHER
    how = dict(dtype=BF16, recipe=RECIPE, router_recipe=own, use_bias=True)
    if framework == "linen":
        layer = linen.MoE(num_experts=3, features=32, **how)
        params = random_params(layer, X)
        want, _ = layer.apply({"params": params}, X)
    else:
        layer = fp4_nnx.MoE(3, K, 32, rngs=nnx.Rngs(0), **how)
        params, (want, _) = nnx.to_pure_dict(nnx.state(layer, nnx.Param)), layer(X)
    export.save(tmp_path, params, RECIPE, dtype=BF16, router_recipe=router_recipe)
    got = export.load(tmp_path, params)
    logits = fp4.dense(X.astype(jnp.float32), got["router"]["kernel"], recipe=own)
    y, _ = fp4.moe(X, logits, got["w_in"], got["w_out"], b_in=got["b_in"], b_out=got["b_out"], top_k=2, recipe=RECIPE)
    same_bits(y, want)


def test_input_amax_by_regular_expression_and_what_a_server_is_told(tmp_path):
    params = {"up": {"kernel": W}, "down": {"kernel": W}}

    def saved(**amax):
        export.save(tmp_path, params, RECIPE, dtype=BF16, input_amax=amax)
        tensors, config = raw(tmp_path)[0], json.loads((tmp_path / "hf_quant_config.json").read_text())
        scales = {name: np.frombuffer(value[2], "<f4")[0] * 2688 for name, value in tensors.items() if "input" in name}
        return scales, config["quantization"]["quant_algo"]

    assert saved(**{"up/.*": 2, ".*": 4}) == ({"up.input_scale": 2, "down.input_scale": 4}, "NVFP4")  # the first match
    assert saved(**{"u.*": 2}) == ({"up.input_scale": 2}, "W4A16_NVFP4")
    assert saved() == ({}, "W4A16_NVFP4")


# --- biases ---


def test_a_bias_is_divided_as_its_kernel_is(tmp_path):
    heads = {"qkv": {"kernel": W.reshape(K, 5, 8), "bias": jnp.arange(40.0).reshape(5, 8)}}
    experts = {"w_in": jnp.stack([W, W]), "b_in": jnp.arange(80.0).reshape(2, N)}
    stack = {"kernel": jnp.stack([W, W]), "bias": jnp.arange(80.0).reshape(2, N)}
    params = {**heads, "moe": experts, "stack": stack, "alone": {"bias": jnp.ones((2, 3))}}
    halves = lambda name: [name.replace("qkv", part) for part in "qk"] if "qkv" in name else name  # noqa: E731
    how = dict(names=halves, layouts={"qkv/kernel": "knn", "stack/kernel": "gkn"})
    export.save(tmp_path, params, RECIPE, dtype=BF16, **how)
    biases = {name: array for name, array in arrays(tmp_path)[0].items() if name.endswith("bias")}
    want = {"q": np.arange(20), "k": np.arange(20, 40), "alone": np.ones((2, 3))}
    for e in range(2):
        want |= {
            f"{name}.{e}{leaf}": np.arange(40 * e, 40 * e + 40)
            for name, leaf in (("stack", ""), ("moe.experts", ".w_in"))
        }
    assert {*biases} == {f"{name}.bias" for name in want}
    for name, value in want.items():
        np.testing.assert_array_equal(biases[f"{name}.bias"], value)
    got = export.load(tmp_path, params, **how)
    for part, leaf in (("qkv", "bias"), ("moe", "b_in"), ("stack", "bias"), ("alone", "bias")):
        same_bits(got[part][leaf], params[part][leaf])


# --- where it is put, and what is read ---


def shapes(tree, **shardings):
    """As `like`, with a sharding for leaves of these names."""
    leaf = lambda path, a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=shardings.get(path[-1].key))  # noqa: E731
    return jax.tree_util.tree_map_with_path(leaf, tree)


def mesh_of(kind="Auto"):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(getattr(jax.sharding.AxisType, kind),) * 2)


def test_leaves_are_put_where_like_says(tmp_path):
    mesh = mesh_of()
    on = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))  # noqa: E731
    params = {
        "w_in": jnp.stack([W[:32], W[:32]]),
        "b_in": jnp.ones((2, N)),
        "up": {"kernel": W[:32], "bias": jnp.ones(N)},
    }
    export.save(tmp_path, params, RECIPE, dtype=BF16)
    like = shapes(params, w_in=on("x", None, "y"), b_in=on("x"), kernel=on("x", "y"))
    got = export.load(tmp_path, like)
    kernel, experts = got["up"]["kernel"], got["w_in"]
    assert kernel.codes.sharding == kernel.block_scale.sharding == on("y", "x")  # [n, k/..] of [k, n]
    assert kernel.amax.sharding.is_fully_replicated and kernel.amax.sharding.device_set == {*mesh.devices.flat}
    assert experts.codes.sharding == experts.block_scale.sharding == on("x", "y", None)
    assert experts.amax.sharding == got["b_in"].sharding == on("x")
    jax.tree.map(same_bits, got, export.load(tmp_path, params))
    jax.tree.map(same_bits, export.load(tmp_path, got), got)
    again = export.load(tmp_path, got)  # like: with quantized tensors
    assert again["w_in"].codes.sharding == experts.codes.sharding
    assert not got["up"]["bias"].committed

    explicit = mesh_of("Explicit")
    like = shapes(params, w_in=NamedSharding(explicit.abstract_mesh, PartitionSpec("x")))
    with pytest.raises(ValueError, match=r"the sharding of w_in is .* needs a mesh of devices.*jax.set_mesh"):
        export.load(tmp_path, like)
    with jax.set_mesh(explicit):
        assert export.load(tmp_path, like)["w_in"].codes.sharding.mesh == explicit


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        (("y",), ValueError, r"needs equal shards of whole blocks because 16 values"),
        ((None, None, "x"), NotImplementedError, r"by \['x'\]; needs a cut along the first of them"),
    ],
)
def test_a_cut_that_packed_weights_cannot_have(tmp_path, spec, error, text):
    params, layouts = {"kernel": W.reshape(K, 4, 10)}, {"kernel": "knn"}
    export.save(tmp_path, params, RECIPE, dtype=BF16, layouts=layouts)
    like = shapes(params, kernel=NamedSharding(mesh_of(), PartitionSpec(*spec)))
    with pytest.raises(error, match=f"load: the sharding of kernel is .*{text}.*Try"):
        export.load(tmp_path, like, layouts=layouts)


def test_files_are_read_tensor_by_tensor(saved, monkeypatch):
    read, whole = [], np.fromfile
    monkeypatch.setattr(np, "fromfile", lambda *a, **how: read.append(a[2]) or whole(*a, **how))
    export.load(saved, PARAMS)
    assert max(read) == N * K // 2  # bytes of the codes
    del read[:]
    with pytest.raises(ValueError, match="missing"):
        export.load(saved, {"a": jnp.ones(1), **PARAMS})
    assert not read


def test_64_bit_tensors_are_not_narrowed(saved):
    changed(saved, count=np.arange(3))
    like = {**PARAMS, "count": np.arange(3)}
    with pytest.raises(ValueError, match=r"load: count is int64; needs int32 because .*jax_enable_x64.*Try"):
        export.load(saved, like)
    with jax.enable_x64(True):
        same_bits(export.load(saved, like)["count"], like["count"])


# --- refused ---

PARAMS = {"up": {"kernel": W, "bias": jnp.ones(N)}, "norm": {"scale": jnp.ones(N)}}


def kernel(value):
    return {"up": {"kernel": value}}


@pytest.mark.parametrize(
    ("params", "recipe", "flags", "error", "text"),
    [
        (PARAMS, None, {}, TypeError, "recipe is None; needs a recipe"),
        (PARAMS, fp4.NVFP4BlockScaling, {}, TypeError, "recipe is the class NVFP4BlockScaling"),
        (PARAMS, fp4.MXFP8BlockScaling(), {}, NotImplementedError, "up/kernel is quantized to mxfp8; needs NVFP4"),
        (PARAMS, fp4.Rules([("UP", RECIPE)]), {}, ValueError, "recipe is with 'UP', which matches nothing.*'up'"),
        (PARAMS, RECIPE, dict(quant_algo="FP8"), ValueError, "quant_algo is 'FP8'; needs one of"),
        (
            PARAMS,
            RECIPE,
            dict(quant_algo="NVFP4"),
            ValueError,
            "quant_algo is 'NVFP4'; needs an input_amax for up/kernel",
        ),
        (PARAMS, RECIPE, dict(out_recipe=3), TypeError, "out_recipe is 3; needs a recipe"),
        (
            PARAMS,
            RECIPE,
            dict(router_recipe=fp4.Rules([("up", RECIPE)])),
            ValueError,
            "router_recipe is with 'up', which",
        ),
        (PARAMS, RECIPE, dict(dtype=None), TypeError, "dtype is None; needs a floating-point dtype"),
        (PARAMS, RECIPE, dict(dtype=jnp.int8), TypeError, "dtype is .*int8.*; needs a floating-point dtype"),
        (W, RECIPE, {}, TypeError, "params is a bare ArrayImpl; needs a tree"),
        ({"count": 3}, RECIPE, {}, TypeError, "count of params is a int; needs an array"),
        (PARAMS, RECIPE, dict(names=lambda n: (n, f"2{n}") if n == "up.weight" else n), ValueError, "up/bias'; needs"),
        (PARAMS, RECIPE, dict(layouts={"x": "kn"}), ValueError, "layouts is with 'x', which matches nothing"),
        (PARAMS, RECIPE, dict(layouts={"up/kernel": "nk"}), ValueError, r"layouts is with 'nk'; needs 2 letters"),
        (PARAMS, RECIPE, dict(input_amax={"up": 1}), ValueError, "input_amax is with 'up', which matches nothing"),
        (
            PARAMS,
            RECIPE,
            dict(input_amax={"up/kernel": 0}),
            ValueError,
            "input_amax of up/kernel is 0.0; needs positive",
        ),
        (PARAMS, RECIPE, dict(names=lambda name: 3), TypeError, "names is 3 for 'up.weight'"),
        (PARAMS, RECIPE, dict(names=lambda name: "w.weight"), ValueError, "names is 'w.weight' for two parameters"),
        (PARAMS, RECIPE, dict(names=lambda name: name + "s"), ValueError, "names is 'up.weights' for 'up/kernel'"),
        (
            PARAMS,
            RECIPE,
            dict(names=lambda n: (n, "b") if "norm" in n else n),
            ValueError,
            "names is several for 'norm/scale'",
        ),
        (kernel(W), RECIPE, dict(names=lambda n: [f"{i}.weight" for i in "abc"]), ValueError, "its 40 outputs"),
        (kernel(W[:40]), RECIPE, {}, ValueError, "up/kernel is of k = 40; needs a multiple of 16.*HIGH_PRECISION"),
        (kernel(W.at[0, 0].set(jnp.nan)), RECIPE, {}, ValueError, "up/kernel is of amax nan; needs finite"),
        (kernel(W[None]), RECIPE, {}, ValueError, "up/kernel is of shape.*needs a layout.*'gkn'"),
        (kernel(fp4.quantize(W)), RECIPE, {}, NotImplementedError, "needs NVFP4 along axis 0 with one amax"),
        (kernel(fp4.quantize(W, axis=0, row_scaled=True)), RECIPE, {}, NotImplementedError, "row-scaled; needs"),
        (kernel(fp4.quantize(W, axis=0, hadamard=True)), RECIPE, {}, NotImplementedError, "transformed; needs"),
        (kernel(fp4.quantize(W, "mxfp8", axis=0)), RECIPE, {}, NotImplementedError, "needs NVFP4 along axis 0"),
    ],
)
def test_refused_and_nothing_is_written(tmp_path, params, recipe, flags, error, text):
    with pytest.raises(error, match=f"export.save: .*{text}") as raised:
        export.save(tmp_path / "out", params, recipe, **{"dtype": BF16, **flags})
    assert ". Try " in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def saved(tmp_path):
    export.save(tmp_path, PARAMS, RECIPE, dtype=BF16)
    return tmp_path


def changed(folder, **tensors):
    """Other tensors, under the header that was there; None takes one away."""
    have, facts = arrays(folder)
    have |= {name.replace("__", "."): value for name, value in tensors.items()}
    have = {name: np.array(value, order="C") for name, value in have.items() if value is not None}
    safetensors.numpy.save_file(have, folder / "model.safetensors", {"jax_fp4": json.dumps(facts)})


def test_a_file_that_does_not_fit_is_refused(saved):
    def refuses(like, text):
        with pytest.raises(ValueError, match=rf"export.load: {text}.*Try"):
            export.load(saved, like)

    refuses({**PARAMS, "down": kernel(W)["up"]}, "down.weight is missing; needs .*nearest there are")
    refuses({"up": PARAMS["up"]}, "like is without a place for 'norm.weight', and 0 more")
    refuses({**PARAMS, "norm": {"scale": jnp.ones(3)}}, r"norm.weight is float32 \(40,\); needs \(3,\)")
    refuses(
        {**PARAMS, "up": {**PARAMS["up"], "kernel": W[:32]}}, r"up.weight is uint8 \(40, 24\); needs uint8 \(40, 16\)"
    )


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (dict(up__weight_scale_2=None), "up.weight_scale_2 is missing"),
        (dict(up__weight_scale=np.ones((N, 3), np.float32)), r"up.weight_scale is float32 .*needs float8_e4m3fn"),
        (
            dict(up__weight_scale_2=np.ones((), np.float32)),
            "up.weight_scale_2 is 1.0; needs .* / 2688",
        ),
        (dict(up__weight_scale=None), "up.weight is uint8"),
    ],
)
def test_a_changed_file_is_refused(saved, tensors, text):
    changed(saved, **tensors)
    with pytest.raises(ValueError, match=rf"export.load: {text}.*Try"):
        export.load(saved, PARAMS)


def test_parts_of_one_kernel_need_one_scale(tmp_path):
    split = lambda name: tuple(name.replace("up", part) for part in ("gate", "up")) if name[:2] == "up" else name  # noqa: E731
    export.save(tmp_path, PARAMS, RECIPE, dtype=BF16, names=split)
    tensors, _ = arrays(tmp_path)
    safetensors.numpy.save_file(
        tensors | {"gate.weight_scale_2": np.ones((), np.float32)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"up.weight_scale_2 is of amax.*a matrix has one amax.*Try"):
        export.load(tmp_path, PARAMS, names=split)


def test_a_name_in_two_files_is_refused(saved):
    (saved / "old.safetensors").write_bytes((saved / "model.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"export.load: .* is in two files.*Try"):
        export.load(saved, PARAMS)


def test_no_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"directory is .*needs files \*.safetensors.*Try"):
        export.load(tmp_path, PARAMS)


@pytest.mark.parametrize("call", [export.save, export.load])
def test_without_safetensors(tmp_path, monkeypatch, call):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "safetensors.numpy", raising=False)
    flags = dict(recipe=RECIPE, dtype=BF16) if call is export.save else {}
    with pytest.raises(ModuleNotFoundError, match=r"pip install safetensors"):
        call(tmp_path, PARAMS, **flags)
