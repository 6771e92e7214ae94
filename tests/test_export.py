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
from jax_fp4 import export, linen
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
    assert tensors["query.bias"][1] == (4, 8)
    assert metadata["format"] == "pt"
    config = json.loads((tmp_path / "hf_quant_config.json").read_text())
    assert config["producer"]["name"] == "modelopt"
    quantization = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["head"], "kv_cache_quant_algo": None}
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
    tensors, _ = export._read("test", tmp_path)
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
        (PARAMS, RECIPE, dict(names=lambda name: 3), TypeError, "names is 3 for 'norm.weight'"),
        (PARAMS, RECIPE, dict(names=lambda name: "w.weight"), ValueError, "names is 'w.weight' for two parameters"),
        (PARAMS, RECIPE, dict(names=lambda name: name + "s"), ValueError, "names is 'up.weights' for 'up/kernel'"),
        (PARAMS, RECIPE, dict(names=lambda name: (name, "b")), ValueError, "names is several for 'norm/scale'"),
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
        export.save(tmp_path / "out", params, recipe, dtype=BF16, **flags)
    assert ". Try " in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def saved(tmp_path):
    export.save(tmp_path, PARAMS, RECIPE, dtype=BF16)
    return tmp_path


def changed(folder, **tensors):
    """Other tensors, under the header that was there; None takes one away."""
    have, facts = export._read("test", folder)
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
    split = lambda name: tuple(name.replace("up", part) for part in ("gate", "up")) if name == "up.weight" else name  # noqa: E731
    export.save(tmp_path, PARAMS, RECIPE, dtype=BF16, names=split)
    tensors, _ = export._read("test", tmp_path)
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
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jax_fp4\[export\]'"):
        call(tmp_path, PARAMS, **flags)
