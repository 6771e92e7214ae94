"""Saved and restored, by orbax and by flax.serialization: models, states of delayed scaling, quantized tensors."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1

import jax_fp4 as fp4
from jax_fp4 import checkpoints, linen
from jax_fp4 import nnx as fp4_nnx

# Orbax: of a target without a sharding, where that of the saved array will do.
pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:Sharding info not provided")]

K, N, M = 40, 24, 8
RECIPE = fp4.NVFP4BlockScaling(stochastic_rounding=False)
DELAYED = fp4.DelayedScaling(amax_history_len=4)
X = jax.random.normal(jax.random.key(1), (M, K), jnp.bfloat16)


def tensors() -> dict[str, Any]:
    """Every format and every layout of a QuantizedTensor; one block holds a NaN, whose bits count too."""
    x = jax.random.normal(jax.random.key(0), (K, N), jnp.bfloat16).at[3, 5].set(jnp.nan)
    sizes = jnp.array([17, 0, 21], jnp.int32)
    kinds: dict[str, dict[str, Any]] = {
        "rows": {},
        "columns": dict(axis=0),
        "tiles": dict(axis=0, block=(16, 16)),
        "row_scaled": dict(row_scaled=True),
        "four_over_six": dict(four_over_six=fp4.FourOverSix(256)),
        "hadamard": dict(axis=0, hadamard=True),
        "grouped_rows": dict(group_sizes=sizes),
        "grouped_columns": dict(axis=0, group_sizes=sizes),
        "mxfp8": dict(format="mxfp8"),
        "mxfp8_e5m2": dict(format="mxfp8_e5m2", axis=0),
        "float8_block": dict(format="float8_block", block=(128, 128)),
        "float8": dict(format="float8"),
        "float8_grouped": dict(format="float8_e5m2", group_sizes=sizes),
    }
    made: dict[str, Any] = {name: fp4.quantize(x, **flags) for name, flags in kinds.items()}
    made["experts"] = fp4.quantize(jnp.stack([x, 2 * x]), axis=0, batch_dims=1)
    made["pair"] = fp4.quantize_transpose(x)
    return {"kernels": made, "bias": jnp.ones(N)}


TREE = tensors()


def one(**other) -> dict[str, Any]:
    return {"w": dataclasses.replace(TREE["kernels"]["tiles"], **other)}


def abstract(tree):
    """As orbax wants a target: shapes, dtypes and where the arrays belong."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=getattr(a, "sharding", here)), tree)


def same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)  # static fields included
    for ours, theirs in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def standard(path, tree, target):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(path, target)


def py_tree(path, tree, target):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
        return checkpointer.restore(path, target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))


def version_1(path, tree, target):
    v1.save(path, tree)
    return v1.load(path, target)


def restored(path, tree, like):
    """Saved and restored as the documentation says."""
    state = standard(path / "one", checkpoints.to_state(tree), checkpoints.to_state(like))
    return checkpoints.from_state(state, like)


# --- quantized tensors ---


@pytest.mark.parametrize("through", [standard, py_tree, version_1])
def test_every_format_round_trips_through_orbax(tmp_path, through):
    like = abstract(TREE)
    state = through(tmp_path / "one", checkpoints.to_state(TREE), checkpoints.to_state(like))
    same_bits(checkpoints.from_state(state, like), TREE)


def test_what_was_saved_is_known_without_a_target(tmp_path):
    state = standard(tmp_path / "one", checkpoints.to_state(TREE), None)
    got = checkpoints.from_state(state)
    pair = got["kernels"].pop("pair")  # orbax makes lists of tuples
    same_bits({**got, "kernels": {**got["kernels"], "pair": tuple(pair)}}, TREE)


def test_shards_are_restored_on_any_mesh(tmp_path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q = fp4.quantize(jax.random.normal(jax.random.key(0), (64, 128), jnp.bfloat16))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    cut = dataclasses.replace(q, codes=jax.device_put(q.codes, rows), block_scale=jax.device_put(q.block_scale, rows))
    got = restored(tmp_path, {"w": q}, abstract({"w": cut}))["w"]
    assert got.codes.sharding == got.block_scale.sharding == rows
    same_bits(got, q)
    same_bits(restored(tmp_path / "back", {"w": cut}, abstract({"w": q}))["w"], q)


def test_orbax_alone_restores_into_whatever_the_target_says(tmp_path):
    """Why `to_state` is needed. Where this fails, orbax has learned it: say so in checkpoints.py."""
    got = standard(tmp_path / "one", one(), abstract(one(bound=256)))
    assert got["w"].bound == 256
    assert not np.array_equal(fp4.dequantize(got["w"])[:2], fp4.dequantize(one()["w"])[:2])


@pytest.mark.parametrize(
    ("name", "value"),
    [("axis", -1), ("extent", 41), ("bound", 256), ("dtype", np.dtype("float32")), ("block", (1, 16)),
     ("row_scaled", True), ("hadamard", True), ("grouped", "blocks"), ("power_of_two", True)],
)  # fmt: skip
def test_another_static_field_is_an_error(tmp_path, name, value):
    state = checkpoints.to_state(one())
    with pytest.raises(ValueError, match=rf"from_state: {name} of w is .* needs .*Try"):
        checkpoints.from_state(state, one(**{name: value}))
    target = flax.serialization.to_state_dict(one())
    with pytest.raises(ValueError, match=f"{name} of ./w is "):
        flax.serialization.from_state_dict(one(**{name: value}), target)


def test_another_format_or_shape_is_an_error(tmp_path):
    kernels = TREE["kernels"]
    with pytest.raises(ValueError, match="format of w is 'mxfp8'; needs 'nvfp4'"):
        checkpoints.from_state(checkpoints.to_state({"w": kernels["mxfp8"]}), {"w": kernels["rows"]})
    half = dataclasses.replace(kernels["rows"], codes=kernels["rows"].codes[:20])
    with pytest.raises(ValueError, match=r"w/codes is uint8 \(40, 16\); needs uint8 \(20, 16\)"):
        checkpoints.from_state(checkpoints.to_state({"w": kernels["rows"]}), {"w": half})


def test_quantized_where_an_array_was_saved_and_the_other_way(tmp_path):
    array = {"w": jnp.ones((K, N))}
    with pytest.raises(ValueError, match="w is no QuantizedTensor; needs one"):
        checkpoints.from_state(array, one())
    with pytest.raises(ValueError, match="w is a QuantizedTensor; needs none"):
        checkpoints.from_state(checkpoints.to_state(one()), array)
    with pytest.raises(ValueError, match=r"\./w is no QuantizedTensor"):
        flax.serialization.from_bytes(one(), flax.serialization.to_bytes(array))


@pytest.mark.parametrize(
    ("leaf", "dtype"), [("codes", jnp.float8_e4m3fn), ("block_scale", jnp.float32), ("amax", "f2")]
)
@pytest.mark.parametrize("raw", [False, True])
def test_a_restore_that_changes_a_dtype_is_an_error(tmp_path, leaf, dtype, raw):
    """Orbax converts by value, without a word; also of a tensor that was saved as it is."""
    array = getattr(one()["w"], leaf)
    target = abstract(one(**{leaf: jax.ShapeDtypeStruct(array.shape, dtype)}))
    if raw:
        state = standard(tmp_path / "one", one(), target)
    else:
        state = standard(tmp_path / "one", checkpoints.to_state(one()), checkpoints.to_state(target))
    with pytest.raises(ValueError, match=f"w/{leaf} is of {jnp.dtype(dtype).name}; needs {array.dtype}.*Try"):
        checkpoints.from_state(state)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"b": jnp.ones(3, jnp.bfloat16)}, r"layer/b is bfloat16 \(3,\); needs float32 \(4,\)"),
        ({"b": jnp.ones((4, 1))}, r"layer/b is float32 \(4, 1\); needs float32 \(4,\)"),
        ({}, r"layer/b is missing; needs float32 \(4,\)"),
        ({"b": jnp.ones(4), "c": jnp.ones(2)}, r"layer/c is a leaf, float32 \(2,\); needs none"),
        ({"b": 3}, r"layer/b is a int; needs float32 \(4,\)"),
    ],
)
def test_any_leaf_that_is_not_as_like_has_it_is_an_error(state, text):
    like = {"layer": {"b": jax.ShapeDtypeStruct((4,), jnp.float32)}, **one()}
    same_bits(
        checkpoints.from_state(checkpoints.to_state({"layer": {"b": jnp.ones(4)}, **one()}), like)["w"], one()["w"]
    )
    with pytest.raises(ValueError, match=f"from_state: {text}.*Try"):
        checkpoints.from_state(checkpoints.to_state({"layer": state, **one()}), like)


def test_under_jit_nothing_is_said_of_the_checkpoint():
    with pytest.raises(TypeError, match=r"from_state: w/quantized_tensor is traced; needs.*outside of jax.jit"):
        jax.jit(checkpoints.from_state)(checkpoints.to_state(one()))


@pytest.mark.parametrize("leaf", ["codes", "block_scale", "amax", checkpoints.STATIC])
def test_a_missing_leaf_is_an_error(tmp_path, leaf):
    whole = checkpoints.to_state(one())
    partial = {"w": {name: array for name, array in whole["w"].items() if name != leaf}}
    needs = "w is no QuantizedTensor" if leaf == checkpoints.STATIC else f"w/{leaf} is missing; needs an array of"
    with pytest.raises(ValueError, match=needs):
        checkpoints.from_state(partial, one())
    with pytest.raises(ValueError, match=needs):
        flax.serialization.from_state_dict(one(), partial)
    with pytest.raises(ValueError, match=leaf):  # orbax itself, of a target that has it
        standard(tmp_path / "one", partial, abstract(whole))


def test_a_raw_tensor_that_lost_a_leaf(tmp_path):
    """Orbax drops what the target has not."""
    state = standard(tmp_path / "one", one(), abstract(one(amax=None)))
    with pytest.raises(ValueError, match="w/amax is missing"):
        checkpoints.from_state(state)


@pytest.mark.parametrize("text", [b"{}", b"\xff", b'{"format": "nvfp5"}', b"3"])
def test_unreadable_static_fields_are_an_error(text):
    state = checkpoints.to_state(one())
    state["w"][checkpoints.STATIC] = np.frombuffer(text, np.uint8)
    with pytest.raises(ValueError, match=r"w/quantized_tensor is unreadable.*Try"):
        checkpoints.from_state(state)


def test_static_fields_have_one_length():
    """Or a target would not fit."""
    state = checkpoints.to_state(one(extent=2**62, inner=2**62, format="float8_block_e5m2", dtype=np.dtype("float16")))
    assert state["w"][checkpoints.STATIC].shape == checkpoints.to_state(one())["w"][checkpoints.STATIC].shape


def test_flax_serialization_round_trips():
    same_bits(flax.serialization.from_bytes(abstract(TREE), flax.serialization.to_bytes(TREE)), TREE)


# --- models, with quantization switched on or off (G3) ---


class Model(nn.Module):
    """Flax's own layers; `linen.quantized` chooses."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, dtype=jnp.bfloat16)(nn.relu(nn.Dense(N, dtype=jnp.bfloat16)(x)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(K, N, rngs=rngs), nnx.Linear(N, 16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def trained_linen(recipe):
    """The forward of variables; variables and optimizer state after a step."""
    optimizer = optax.adam(1e-2)

    @jax.jit
    def apply(variables):
        with linen.quantized(recipe):
            return Model().apply(variables, X)

    @jax.jit
    def first_step():
        with linen.quantized(recipe):
            variables = Model().init(jax.random.key(0), X)
        grads = jax.grad(lambda v: jnp.sum(apply(v).astype(jnp.float32) ** 2))(variables)
        updates, state = optimizer.update(grads["params"], optimizer.init(variables["params"]))
        new = {"params": optax.apply_updates(variables["params"], updates)}
        if "fp4_state" in variables:
            new["fp4_state"] = fp4.delayed.update(variables["fp4_state"], grads["fp4_state"])
        return new, state

    variables, state = first_step()
    return SimpleNamespace(apply=apply, variables=variables, optimizer=state)


@pytest.fixture(scope="module")
def linens():
    return {"off": trained_linen(fp4.HIGH_PRECISION), "on": trained_linen(RECIPE), "delayed": trained_linen(DELAYED)}


@pytest.mark.parametrize(("saved", "into"), [("off", "on"), ("on", "off"), ("on", "delayed")])
def test_linen_parameters_and_optimizer_go_on_or_off(tmp_path, linens, saved, into):
    tree = linens[saved].variables["params"], linens[saved].optimizer
    target = abstract((linens[into].variables["params"], linens[into].optimizer))
    params, optimizer = standard(tmp_path / "one", tree, target)
    same_bits((params, optimizer), tree)
    for kind in (saved, into):  # what each computes is a matter of the recipe, not of the checkpoint
        states = {name: value for name, value in linens[kind].variables.items() if name != "params"}
        same_bits(linens[kind].apply({"params": params, **states}), linens[kind].apply({"params": tree[0], **states}))


def test_linen_delayed_state_round_trips(tmp_path, linens):
    delayed = linens["delayed"]
    got = standard(tmp_path / "one", delayed.variables, abstract(delayed.variables))
    same_bits(got, delayed.variables)
    assert isinstance(got["fp4_state"]["Dense_0"]["state"], fp4.delayed.State)
    assert np.any(got["fp4_state"]["Dense_0"]["state"].x.history > 0)  # it has seen a step
    same_bits(delayed.apply(got), delayed.apply(delayed.variables))


def test_a_delayed_state_of_another_dtype_is_refused_by_the_layer(tmp_path, linens):
    delayed = linens["delayed"]
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=a.sharding), delayed.variables)
    got = standard(tmp_path / "one", delayed.variables, like)
    with pytest.raises(ValueError, match=r"state is bfloat16 .*needs float32 \(4,\).*Try"):
        delayed.apply(got)


def test_a_missing_delayed_state_is_an_error(tmp_path, linens):
    """Of orbax, where the target has it; of the layer, where it was not restored."""
    params = {"params": linens["on"].variables["params"]}
    with pytest.raises(ValueError, match="fp4_state"):
        standard(tmp_path / "one", params, abstract(linens["delayed"].variables))
    with pytest.raises(ValueError, match="'fp4_state' is without Dense_1/state; needs"):
        linens["delayed"].apply(params)


def test_delayed_scaling_is_switched_off(tmp_path, linens):
    """Its states are left in the checkpoint, but not without being asked."""
    variables = linens["delayed"].variables
    like = abstract({"params": linens["off"].variables["params"]})
    with pytest.raises(ValueError, match="fp4_state"):
        standard(tmp_path / "one", variables, like)
    arguments = ocp.checkpoint_utils.construct_restore_args(like)
    with ocp.PyTreeCheckpointer() as checkpointer:
        how = ocp.args.PyTreeRestore(like, restore_args=arguments, partial_restore=True)
        same_bits(checkpointer.restore(tmp_path / "one", args=how), {"params": variables["params"]})


def nnx_model(recipe):
    model = Block(nnx.Rngs(0))
    fp4_nnx.quantize_model(model, fp4.Rules([(".*", recipe)]))
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


@pytest.mark.parametrize(("saved", "into"), [(fp4.HIGH_PRECISION, RECIPE), (RECIPE, fp4.HIGH_PRECISION)])
def test_nnx_models_go_on_or_off(tmp_path, saved, into):
    source, target = nnx_model(saved), nnx_model(into)
    nnx.update(target, jax.tree.map(lambda a: a + jnp.ones_like(a), nnx.state(target)))
    nnx.update(target, standard(tmp_path / "one", nnx.state(source), abstract(nnx.state(target))))
    same_bits(nnx.state(target), nnx.state(source))


def test_nnx_delayed_state_round_trips(tmp_path):
    source, fresh = nnx_model(DELAYED), nnx_model(DELAYED)
    model, _ = source
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, fp4_nnx.DelayedState))
    grads = nnx.jit(nnx.grad(lambda model: jnp.sum(model(X).astype(jnp.float32)), argnums=wrt))(model)
    _, states = nnx.split_state(grads, nnx.Param, fp4_nnx.DelayedState)
    nnx.update(model, fp4.delayed.update(nnx.state(model, fp4_nnx.DelayedState), states))
    nnx.update(fresh, standard(tmp_path / "one", nnx.state(source), abstract(nnx.state(fresh))))
    same_bits(nnx.state(fresh), nnx.state(source))
    same_bits(fresh[0](X), model(X))


def test_nnx_state_holds_quantized_tensors(tmp_path):
    state = nnx.State({"layers": {0: {"kernel": nnx.Param(one()["w"])}}})
    got = restored(tmp_path, state, abstract(state))
    same_bits(got, state)
    with pytest.raises(ValueError, match="bound of layers/0/kernel/value is 448; needs 256"):
        checkpoints.from_state(checkpoints.to_state(state), {"layers": {0: {"kernel": nnx.Param(one(bound=256)["w"])}}})


def test_flax_serialization_of_delayed_states(linens):
    variables = linens["delayed"].variables
    same_bits(flax.serialization.from_bytes(abstract(variables), flax.serialization.to_bytes(variables)), variables)

    state = flax.serialization.to_state_dict(fp4.delayed.init(DELAYED))
    with pytest.raises(ValueError, match=r"dy/history is float32 \(4,\); needs float32 \(8,\).*amax_history_len"):
        flax.serialization.from_state_dict(fp4.delayed.init(fp4.DelayedScaling(amax_history_len=8)), state)
    del state["kernel"]["scale"]
    with pytest.raises(ValueError, match="kernel/scale is missing; needs float32"):
        flax.serialization.from_state_dict(fp4.delayed.init(DELAYED), state)
    state["kernel"]["scale"] = jnp.ones((), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"kernel/scale is bfloat16 \(\); needs float32"):
        flax.serialization.from_state_dict(fp4.delayed.init(DELAYED), state)
