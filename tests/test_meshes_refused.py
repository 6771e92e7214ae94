"""What cannot be multiplied as it lies on a mesh is refused by name, or noted where it is brought elsewhere; and a NaN
beyond the groups stays there."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp4 as fp4

UNQUANT, DEFAULT = fp4.NVFP4BlockScaling("unquant"), fp4.NVFP4BlockScaling("default")

mesh, auto_mesh = partial(sharded.mesh, "Explicit"), partial(sharded.mesh, "Auto")


def normal(*shape):
    return sharded.normal(sum(shape), *shape)


def refuse(on, function, *operands, match, error=ValueError):
    """operands: pairs of an array and its PartitionSpec."""
    with jax.set_mesh(on):
        placed = [jax.device_put(a, NamedSharding(on, spec)) for a, spec in operands]
        with pytest.raises(error, match=match + ".* Try "):
            jax.jit(function).lower(*placed)


def test_a_frozen_kernel_is_whole():
    """Each device has the whole of it, beside its part of k."""
    frozen = fp4.quantize(normal(64, 32), axis=0)
    refuse(mesh(tensor=2), lambda x: fp4.dense(x, frozen, recipe=UNQUANT), (normal(32, 64), P(None, "tensor")),
           match="dense: x is cut by .*tensor.* along k; needs whole rows because the frozen kernel")  # fmt: skip


def test_a_frozen_second_kernel_leaves_the_first_whole():
    x, scale, w_in = normal(32, 64), jnp.ones(64), normal(64, 64)
    frozen = fp4.quantize(normal(32, 64), axis=0)

    def layer(x, w_in):
        return fp4.layernorm_mlp(x, scale, None, w_in, frozen, norm="rmsnorm", recipe=UNQUANT)

    on = mesh(tensor=2)
    with jax.set_mesh(on):
        cut = jax.device_put(w_in, P(None, "tensor"))
        np.testing.assert_allclose(jax.jit(layer)(x, cut), jax.jit(layer)(x, w_in), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", ["layernorm_dense", "layernorm_mlp"])
def test_a_norm_over_a_part(layer):
    specs = fp4.Specs(x=P(None, "tensor"), kernel=P("tensor", None))

    def local(x, scale, w):
        if layer == "layernorm_dense":
            return fp4.layernorm_dense(x, scale, None, w, norm="rmsnorm", recipe=UNQUANT, specs=specs)
        return fp4.layernorm_mlp(x, scale, None, w, w, norm="rmsnorm", recipe=UNQUANT, specs=(specs, specs))

    function = jax.shard_map(local, in_specs=(P(None, "tensor"), P("tensor"), P("tensor")), out_specs=P())
    operands = (normal(32, 64), P()), (jnp.ones(64), P()), (normal(64, 32), P())
    refuse(auto_mesh(tensor=2), function, *operands, match=f"{layer}: specs.x is cut by .*tensor")


def test_nan_beyond_the_groups():
    """probs of the tail, under tensor parallelism, where the bias is added outside."""
    sizes, probs = jnp.array([8, 8], jnp.int32), jnp.ones(32).at[16:].set(jnp.nan)
    operands = normal(32, 64), normal(2, 64, 64), normal(2, 32, 64), normal(2, 64)

    def layer(x, w_in, w_out, b_out):
        return fp4.grouped_mlp(x, w_in, w_out, sizes, b_out=b_out, probs=probs, recipe=UNQUANT)

    with jax.set_mesh(mesh(tensor=2)):
        specs = P(), P(None, None, "tensor"), P(None, "tensor"), P()
        y = jax.jit(layer)(*(jax.device_put(a, spec) for a, spec in zip(operands, specs, strict=True)))
    assert np.isfinite(y).all() and not np.asarray(y[16:]).any()


def test_blocks_of_rows_to_draw_for():
    """Said at the forward, though only dw quantizes them."""

    def layer(x, w):
        return jax.vjp(lambda x, w: fp4.dense(x, w, recipe=DEFAULT, key=sharded.KEY), x, w)[0]

    refuse(mesh(seq=2), layer, (normal(2, 16, 32), P(None, "seq")), (normal(32, 32), P()),
           match="dense: x is of 8 rows a device")  # fmt: skip


def test_a_cut_of_no_use_is_noted():
    """The kernel is brought whole, in high precision: the report says so, strict() refuses it."""
    x, w, on = normal(32, 64), normal(64, 32), mesh(tensor=2)

    def layer(x, w):
        return fp4.dense(x, w, recipe=UNQUANT)

    with jax.set_mesh(on):
        report = fp4.report(layer, x, jax.device_put(w, P("tensor")))
    assert [gather.payload for gather in report.gathers] == ["high_precision"] and "resharding" in str(report)
    with fp4.strict():
        refuse(on, layer, (x, P()), (w, P("tensor")), match="dense: the kernel is cut by tensor",
               error=fp4.UnsupportedError)  # fmt: skip


def test_specs_that_types_deny():
    x, w = (normal(32, 64), P("tensor")), (normal(64, 32), P())
    specs = fp4.Specs(kernel=P(None, "tensor"))
    refuse(
        mesh(tensor=2), lambda x, w: fp4.dense(x, w, recipe=UNQUANT, specs=specs), x, w, match="dense: specs is .* for"
    )


def test_a_mesh_of_two_kinds():
    kinds = AxisType.Explicit, AxisType.Auto
    on = jax.make_mesh((2, 2), ("data", "other"), axis_types=kinds, devices=jax.devices()[:4])
    refuse(on, lambda x, w: fp4.dense(x, w, recipe=UNQUANT), (normal(32, 64), P("data")), (normal(64, 32), P()),
           match="dense: the mesh is", error=fp4.UnsupportedError)  # fmt: skip


@pytest.mark.parametrize(
    ("specs", "match"),
    [
        (fp4.Specs(x=P(None, None, "data")), "specs is of 3 dimensions for x; needs at most 2"),
        (fp4.Specs(x=P("modle")), re.escape("specs is over ['modle']; needs axes of the mesh")),
    ],
)
def test_specs_at_the_level_of_jit(specs, match):
    on = auto_mesh(data=2)
    refuse(on, lambda x, w: fp4.dense(x, w, recipe=UNQUANT, specs=specs), (normal(32, 64), P()), (normal(64, 32), P()),
           match=match)  # fmt: skip


def moe(x, logits, w_in, w_out, **how):
    return fp4.moe(x, logits, w_in, w_out, top_k=1, recipe=UNQUANT, **how)[0]


def test_too_few_tokens_to_travel():
    operands = normal(1, 64, 32), normal(1, 64, 4), normal(4, 32, 64), normal(4, 32, 32)
    cuts = P(), P(), P("expert"), P("expert")
    refuse(
        mesh(data=2, expert=2), moe, *zip(operands, cuts, strict=True), match="moe: x is of 1 along its first dimension"
    )


def test_experts_that_specs_leave_whole():
    specs = fp4.Specs(x=P("expert")), fp4.Specs()
    over = P("expert")

    def local(*operands):
        return moe(*operands, expert_axis="expert", specs=specs)

    function = jax.shard_map(local, in_specs=(over,) * 4, out_specs=over, check_vma=False)
    operands = normal(64, 32), normal(64, 4), normal(4, 32, 64), normal(4, 32, 32)
    refuse(
        auto_mesh(expert=2),
        function,
        *((a, P()) for a in operands),
        match=r"moe: specs\[0\].kernel is cut by",
    )


def test_hidden_units_that_are_gathered():
    """A gather along the last dimension of w_in, which specs have cut: y is one device's."""
    operands = normal(64, 32), normal(64, 4), normal(4, 32, 64), normal(4, 32, 32)
    w_in = P(None, None, "fsdp")
    specs = fp4.Specs(x=P("fsdp"), kernel=w_in), fp4.Specs()

    def local(*operands):
        return moe(*operands, gather=(fp4.WeightGather("fsdp", 2), None), specs=specs)

    on = auto_mesh(fsdp=2)
    function = jax.shard_map(local, mesh=on, in_specs=(P("fsdp"), P("fsdp"), w_in, P()), out_specs=P("fsdp"))
    np.testing.assert_allclose(jax.jit(function)(*operands), jax.jit(moe)(*operands), rtol=1e-6, atol=1e-6)
