"""WeightGather and Specs inside the user's shard_map, on eight CPU devices against one."""

import re
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from products import refused
from sharded import (
    KEY,
    MODES,
    Moved,
    close,
    collectives,
    compiled,
    gathers,
    jit,
    leaves,
    mesh,
    normal,
    nvfp4,
    same,
    step,
)

import jax_fp4 as fp4
from jax_fp4 import Specs, WeightGather, _record, checkpoint_policies, delayed

M, K, N, G = 256, 128, 192, 4  # m: 32 rows a device, blocks of every format but one
BOTH = ("data", "fsdp")
SIZES = np.int32([[32, 0, 16, 16], [16, 16, 16, 0], [0, 16, 32, 16], [16, 16, 0, 32]])  # of each device of four
BF16 = jnp.bfloat16


class Where(NamedTuple):
    """How the operands of one product lie."""

    gather: WeightGather | None = WeightGather("fsdp", 0)
    kernel: P = P("fsdp")  # of the shard
    x: P = P(BOTH)
    y: P = P(BOTH)
    axes: tuple[tuple[str, int], ...] = (("data", 2), ("fsdp", 4))
    check_vma: bool = True

    @property
    def mesh(self):
        return mesh(**dict(self.axes))

    @property
    def specs(self):
        return Specs(x=self.x, kernel=self.kernel)


def along(dim, payload=None, axes="fsdp", **rest) -> Where:
    """Of a kernel [k, n], shards along `dim`."""
    return Where(WeightGather(axes, dim, payload), P(*[None] * (dim % 2), axes), **rest)


def sharded(function, where: Where, **parts):
    """function(free, rest), each argument cut as `parts` say, the others whole."""

    def of(free, rest):
        cut = {name: parts.get(name, P()) for name in (*free, *rest)}
        ins = {name: cut[name] for name in free}, {name: cut[name] for name in rest}
        return jax.shard_map(function, mesh=where.mesh, in_specs=ins, out_specs=where.y, check_vma=where.check_vma)(
            free, rest
        )

    return of


def label(value) -> str:
    """Of a recipe, with what it was given; of a Where."""
    if isinstance(value, Where):
        gather = value.gather
        moved = f"{gather.axis_name}, {gather.dim}, {gather.payload}" if gather else "no gather"
        return f"{moved}, check_vma={value.check_vma}"
    if not isinstance(value, fp4.NVFP4BlockScaling | fp4.MXFP8BlockScaling | fp4.Float8CurrentScaling):
        return repr(value)[:12]
    own = {name: getattr(value, name) for name in value.__dataclass_fields__}
    plain = type(value)("default")
    return f"{type(value).__name__[:8]} {[str(v) for name, v in own.items() if v != getattr(plain, name)]}"


# --- dense ---


@cache
def operands(dtype=BF16, m=M, k=K, n=N):
    """An outlier of each in another shard than the first."""
    x, w = normal(0, m, k, dtype=dtype).at[m * 2 // 3, 5].set(30), normal(1, k, n).at[k * 2 // 3, n - 3].set(40)
    return dict(x=x, kernel=w, bias=normal(2, n))


def dense(free, rest, chosen=None, **how):
    return fp4.dense(**free, **rest, recipe=chosen, key=KEY, **how)


@cache
def dense_on_one(chosen, dtype=BF16, shape=(M, K, N)):
    return jit(step(partial(dense, chosen=chosen)))(operands(dtype, *shape), {})


def check_dense(chosen, where: Where, dtype=BF16, shape=(M, K, N), bias=None):
    layer = partial(dense, chosen=chosen, gather=where.gather, specs=where.specs)
    parts = dict(x=where.x, kernel=where.kernel, bias=bias or P())
    (y, grads), text = compiled(step(sharded(layer, where, **parts)), operands(dtype, *shape), {})
    want, want_grads = dense_on_one(chosen, dtype, shape)
    if any(where.x[1:]) or dtype == jnp.float32:
        close(y, want, 1e-6)  # sums in another order
    else:
        same(y, want)
    close(grads, want_grads)
    return text


MIXED = fp4.CustomRecipe(forward=nvfp4(), dgrad=fp4.MXFP8BlockScaling(), wgrad=fp4.Float8CurrentScaling())
PARTLY = fp4.CustomRecipe(
    forward=fp4.MXFP8BlockScaling(), dgrad=fp4.HIGH_PRECISION, wgrad=nvfp4("dequant", two_dimensional_weights=False)
)
ROWS = dict(two_dimensional_weights=False)
TUPLE = dict(axes=BOTH)
SWAPPED = ("fsdp", "data")


@pytest.mark.parametrize(
    ("chosen", "where"),
    [
        pytest.param(nvfp4(), along(0), marks=pytest.mark.core),
        (nvfp4(), along(1, "quantized", check_vma=False)),
        (nvfp4(), along(-1, "high_precision")),
        (nvfp4(), along(0, "quantized", BOTH, check_vma=False)),
        (nvfp4(**ROWS), along(1, None, SWAPPED)),
        (nvfp4(**ROWS), along(-2, "quantized")),
        (nvfp4(row_scaled_activation=True), along(0, check_vma=False)),
        (nvfp4(four_over_six="weights"), along(1)),
        (nvfp4(four_over_six="all", **ROWS), along(0)),
        pytest.param(nvfp4("unquant"), along(1, check_vma=False), marks=pytest.mark.core),
        (nvfp4("unquant"), along(0, "high_precision", BOTH)),
        (nvfp4("dequant"), along(0, "quantized", SWAPPED, check_vma=False)),
        (nvfp4("dequant", **ROWS), along(1)),
        (fp4.MXFP8BlockScaling(), along(0, "quantized")),
        (fp4.MXFP8BlockScaling(), along(1)),  # 48 columns: the plane of the backward in high precision
        (fp4.MXFP8BlockScaling(two_dimensional_weights=True), along(0, check_vma=False)),
        (fp4.MXFP8BlockScaling("dequant", "HYBRID"), along(0, None, BOTH, check_vma=False)),
        (fp4.Float8CurrentScaling(), along(0)),
        (fp4.Float8CurrentScaling("dequant", "E4M3"), along(1, "quantized", BOTH, check_vma=False)),
        (MIXED, along(0)),
        (PARTLY, along(0, check_vma=False)),
        (PARTLY, along(1)),
    ],
    ids=label,
)
def test_dense(chosen, where):
    """float32 master weights under bfloat16."""
    check_dense(chosen, where)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", [0, 1])
def test_dense_of_blocks_of_128(mode, dim):
    pair = (("fsdp", 2),)
    where = along(dim, None, axes="fsdp", x=P("fsdp"), y=P("fsdp"))._replace(axes=pair, check_vma=bool(dim))
    check_dense(fp4.Float8BlockScaling(mode), where, shape=(256, 256, 256))


@pytest.mark.parametrize("where", [along(0), along(1, "high_precision", BOTH, check_vma=False)], ids=label)
@pytest.mark.parametrize("mode", ["high precision", "default", "unquant", "dequant"])
def test_dense_of_float32(mode, where):
    """Without a recipe too, for which nothing is packed."""
    check_dense(fp4.HIGH_PRECISION if mode == "high precision" else nvfp4(mode), where, jnp.float32)


TENSOR = (("fsdp", 4), ("tensor", 2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("where", "bias"),
    [
        pytest.param(Where(None, P(None, "tensor"), P("fsdp"), P("fsdp", "tensor"), TENSOR), P("tensor"), id="column"),
        pytest.param(Where(None, P("tensor"), P("fsdp", "tensor"), P("fsdp"), TENSOR), P(), id="row"),
        pytest.param(
            Where(WeightGather("fsdp", 0), P("fsdp", "tensor"), P("fsdp"), P("fsdp", "tensor"), TENSOR),
            P("tensor"),
            id="column, gathered along k",
        ),
        pytest.param(
            Where(WeightGather("fsdp", 1), P(None, ("tensor", "fsdp")), P("fsdp"), P("fsdp", "tensor"), TENSOR, False),
            P("tensor"),
            id="column, gathered along n",
        ),
        pytest.param(
            Where(WeightGather("fsdp", 0), P(("tensor", "fsdp")), P("fsdp", "tensor"), P("fsdp"), TENSOR, False),
            P(),
            id="row, gathered along k",
        ),
        pytest.param(
            Where(WeightGather("fsdp", 1), P("tensor", "fsdp"), P("fsdp", "tensor"), P("fsdp"), TENSOR),
            P(),
            id="row, gathered along n",
        ),
    ],
)
def test_tensor_parallel_dense(where, bias, mode):
    """The other part of a kernel stays where it is. A bias is added once to a sum over devices. dx is a sum of what
    devices round to x's dtype: float32."""
    check_dense(nvfp4(mode), where, jnp.float32, (M, 128, 128), bias)


def test_sums_over_devices_are_rounded_once():
    """y and dw of bfloat16 where k is cut: those of one device."""
    where = Where(None, P("tensor"), P("fsdp", "tensor"), P("fsdp"), TENSOR)
    check_dense(nvfp4("dequant"), where, shape=(M, 128, 128))


@pytest.mark.parametrize("mode", MODES)
def test_sequences_cut_below_the_batch(mode):
    """The rows of a device do not follow one another in the global tensor: its draws do."""
    dims = P("data", "fsdp")
    where = Where(WeightGather("fsdp", 1), P(None, "fsdp"), dims, dims)
    arguments = operands(jnp.float32)
    arguments |= dict(x=arguments["x"].reshape(4, M // 4, K))
    layer = partial(dense, chosen=nvfp4(mode))
    function = partial(layer, gather=where.gather, specs=where.specs)
    got, _ = compiled(step(sharded(function, where, x=dims, kernel=where.kernel)), arguments, {})
    close(got, jit(step(layer))(arguments, {}))


@pytest.mark.parametrize("mode", MODES)
def test_without_specs_every_device_has_a_tensor_of_its_own(mode):
    """Amaxes and draws are those of its rows; those of the kernel are still those of all shards."""
    where = along(0, "quantized", check_vma=False)
    layer = partial(dense, chosen=nvfp4(mode))

    def local(free, rest, whole):
        kernel = free["kernel"]
        how = dict(gather=where.gather)
        if whole:
            kernel, how = jax.lax.all_gather(kernel, "fsdp", tiled=True), {}
        return layer(free | dict(kernel=kernel), rest, **how)

    parts = dict(x=where.x, kernel=where.kernel)
    got, want = (jit(step(sharded(partial(local, whole=whole), where, **parts)))(operands(), {}) for whole in (0, 1))
    same(got[0], want[0])
    close(got[1], want[1])
    assert not np.array_equal(np.asarray(got[0], np.float32), np.asarray(dense_on_one(nvfp4(mode))[0], np.float32))


# --- what is quantized already, and what remembers ---


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize(
    ("chosen", "dim", "check_vma"),
    [
        (nvfp4(), 0, True),
        (nvfp4("unquant"), 1, False),
        (nvfp4("dequant"), 0, False),
        (fp4.MXFP8BlockScaling(), 0, True),
        (fp4.Float8CurrentScaling(), 1, True),
    ],
    ids=label,
)
def test_frozen_shards(chosen, dim, check_vma, pair):
    """A kernel that was quantized before, from its shards, is moved as it is; with tiles, or as the pair of planes, it
    has what the default mode reads."""
    if isinstance(chosen, fp4.MXFP8BlockScaling) and not pair:
        chosen = fp4.MXFP8BlockScaling("dequant")
    scaling = chosen.scaling("kernel")
    of_rows = pair and scaling.format == "nvfp4"  # with the pair, tiles are not needed
    flags = dict(format=scaling.format, block=None if of_rows or scaling.block is None else scaling.block, dtype=BF16)
    where = along(dim, None, check_vma=check_vma)

    def layer(free, rest, specs=None, **how):
        function = fp4.quantize_transpose if pair else partial(fp4.quantize, axis=0)
        frozen = function(rest["kernel"], specs=specs and Specs(x=specs.kernel), **flags)
        return fp4.dense(free["x"], frozen, free["bias"], recipe=chosen, key=KEY, specs=specs, **how)

    arguments = operands()
    free, rest = {name: arguments[name] for name in ("x", "bias")}, dict(kernel=arguments["kernel"])
    function = partial(layer, specs=where.specs, gather=where.gather)
    (y, grads), text = compiled(step(sharded(function, where, x=where.x, kernel=where.kernel)), free, rest)
    want, want_grads = jit(step(layer))(free, rest)
    same(y, want)
    close(grads, want_grads)
    assert {moved.dtype for moved in gathers(text)} == {"u8"}


DELAYED = fp4.DelayedScaling(amax_history_len=4)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_delayed_scaling(dim, check_vma):
    """The cotangent of the state is that of one device. Without check_vma nobody knows that devices share it:
    `delayed.update` merges what they have."""
    where = along(dim, check_vma=check_vma)
    layer = partial(dense, chosen=DELAYED)
    function = partial(layer, gather=where.gather, specs=where.specs)
    parts, rest = dict(x=where.x, kernel=where.kernel, dy=where.y), dict(dy=normal(9, M, N, dtype=BF16))

    def after(free, out, axis_name=None):
        return out[0], delayed.update(free["state"], out[1]["state"], axis_name=axis_name)

    def inside(free, rest):
        return after(free, step(function)(free, rest), BOTH)

    if check_vma:
        outside = step(sharded(function, where, **parts))
        several = jit(lambda free, rest: after(free, outside(free, rest)))
    else:
        several = jit(sharded(inside, where._replace(y=(where.y, P())), **parts))
    one = jit(lambda free, rest: after(free, step(layer)(free, rest)))
    got = want = (None, delayed.init(DELAYED))
    for factor in (1, 2):  # the second step multiplies by what the first saw
        arguments = operands() | dict(x=operands()["x"] * factor)
        got, want = several(arguments | dict(state=got[1]), rest), one(arguments | dict(state=want[1]), rest)
        same(got, want)
    assert all(float(part.scale) != 1 for part in (got[1].x, got[1].kernel, got[1].dy))


# --- groups: each device has rows of all of them ---

FOUR = (("data", 2), ("fsdp", 2))
ROWS_OF_DEVICE, GK, GF, GN = 128, 64, 32, 96
SIZES = np.int32([[64, 0, 32, 32], [32, 32, 32, 0], [0, 32, 64, 32], [32, 32, 0, 64]])  # of each device
_FIRST = np.arange(4)[:, None] * ROWS_OF_DEVICE + np.cumsum(SIZES, 1) - SIZES
# the rows in the order of one device: those of a group one after another, device by device, and then the unused
ORDER = np.concatenate([np.arange(_FIRST[d, e], _FIRST[d, e] + SIZES[d, e]) for e in range(G) for d in range(4)])
ORDER = np.concatenate([ORDER, np.setdiff1d(np.arange(4 * ROWS_OF_DEVICE), ORDER)])


def grouped(gather, kernel, check_vma=True, **rest) -> Where:
    return Where(gather, kernel, axes=FOUR, check_vma=check_vma, **rest)


@cache
def grouped_operands(dtype=BF16):
    rows = 4 * ROWS_OF_DEVICE
    x = normal(0, rows, GK, dtype=dtype).at[_FIRST[3, 1] + 4, 5].set(30)
    return dict(x=x, kernel=normal(1, G, GK, GN).at[2, 40, 90].set(40), bias=normal(2, G, GN))


def check_groups(layer, free, where: Where, chosen, how, parts, tolerance=1e-5, one=None):
    """layer(free, rest, chosen, **how) of rows that are spread over devices, against `one` of the rows in order."""
    rows = [name for name in ("x", "probs") if name in free]
    rest = dict(group_sizes=jnp.asarray(SIZES.ravel()), dy=normal(9, len(ORDER), layer.columns, dtype=free["x"].dtype))
    function = sharded(partial(layer, chosen=chosen, **how), where, group_sizes=P(BOTH), **parts)
    (y, grads), text = compiled(step(function), free, rest)
    want, want_grads = (one or layer.on_one)(chosen)
    y, grads = y[ORDER], grads | {name: grads[name][ORDER] for name in rows}
    same(y, want)
    close(grads, want_grads, tolerance)
    return text


def in_order(free, columns):
    rows = {name: free[name][ORDER] for name in ("x", "probs") if name in free}
    rest = dict(group_sizes=jnp.asarray(SIZES.sum(0)), dy=normal(9, len(ORDER), columns, dtype=free["x"].dtype)[ORDER])
    return free | rows, rest


def grouped_dense(free, rest, chosen=None, **how):
    return fp4.grouped_dense(**free, **rest, recipe=chosen, key=KEY, **how)


@cache
def grouped_dense_on_one(chosen):
    return jit(step(partial(grouped_dense, chosen=chosen)))(*in_order(grouped_operands(), GN))


grouped_dense.columns, grouped_dense.on_one = GN, grouped_dense_on_one


@pytest.mark.parametrize(
    ("chosen", "where"),
    [
        pytest.param(nvfp4(), grouped(WeightGather("fsdp", 1), P(None, "fsdp")), marks=pytest.mark.core),
        (nvfp4(), grouped(WeightGather("fsdp", 0, "quantized"), P("fsdp"), False)),
        (nvfp4(**ROWS), grouped(WeightGather(BOTH, 2), P(None, None, BOTH))),  # 24 columns: one plane is not packed
        (nvfp4(four_over_six="weights"), grouped(WeightGather(BOTH, 1, "quantized"), P(None, BOTH), False)),
        (nvfp4("unquant"), grouped(WeightGather(BOTH, 0), P(BOTH))),
        (nvfp4("dequant"), grouped(WeightGather("fsdp", 2, "quantized"), P(None, None, "fsdp"))),
        (nvfp4("dequant", row_scaled_activation=True), grouped(WeightGather("fsdp", 0), P("fsdp"), False)),
        (fp4.MXFP8BlockScaling(), grouped(WeightGather("fsdp", 1), P(None, "fsdp"), False)),
        (fp4.Float8CurrentScaling(), grouped(WeightGather(BOTH, 1), P(None, BOTH), False)),
        (MIXED, grouped(WeightGather("fsdp", 1), P(None, "fsdp"))),
    ],
    ids=label,
)
def test_grouped_dense(chosen, where):
    """A group's rows on each device are a multiple of a block in number, or none."""
    how = dict(gather=where.gather, specs=where.specs)
    check_groups(grouped_dense, grouped_operands(), where, chosen, how, dict(x=where.x, kernel=where.kernel))


def test_row_scaled_groups():
    """In default every device's amaxes of columns are those of all rows of a group."""
    where = grouped(WeightGather("fsdp", 1), P(None, "fsdp"))
    how = dict(gather=where.gather, specs=where.specs)
    parts = dict(x=where.x, kernel=where.kernel)
    check_groups(grouped_dense, grouped_operands(), where, nvfp4(row_scaled_activation=True), how, parts)


@pytest.mark.parametrize("axis", [-1, 0])
def test_draws_of_groups(axis):
    """Of dy they go by the row in its group, whichever device has it."""
    x = grouped_operands()["x"]
    quantize = partial(fp4.quantize, axis=axis, key=KEY)

    def local(x, sizes):
        q = quantize(x, group_sizes=sizes, specs=Specs(x=P(BOTH)))
        return q.codes[None], q.block_scale[None], q.amax[None]

    outs = P(BOTH)
    function = jax.shard_map(local, mesh=mesh(**dict(FOUR)), in_specs=(P(BOTH), P(BOTH)), out_specs=outs)
    codes, scales, amax = jit(function)(x, jnp.asarray(SIZES.ravel()))
    want = jit(lambda x: quantize(x, group_sizes=jnp.asarray(SIZES.sum(0))))(x[ORDER])
    assert (np.asarray(amax) == np.asarray(want.amax)).all()
    for got, one, per in ((codes, want.codes, 2), (scales, want.block_scale, 16)):
        got, one = (np.asarray(a).astype(np.float32) for a in (got, one))
        if axis == -1:
            np.testing.assert_array_equal(got.reshape(len(ORDER), -1)[ORDER], one)
            continue
        used = [got[d, :, a // per : (a + SIZES[d, e]) // per] for e, d, a in _columns()]
        used = np.concatenate(used, axis=1)
        np.testing.assert_array_equal(used, one[:, : used.shape[1]])
        assert not one[:, used.shape[1] :].any()


def _columns():
    """(group, device, where its rows begin among the device's)."""
    return [(e, d, SIZES[d, :e].sum()) for e in range(G) for d in range(4)]


# --- MLPs ---


@cache
def mlp_operands():
    more = dict(w_in=normal(3, G, GK, 2 * GF) / 8, w_out=normal(4, G, GF, GN) / 6)
    more |= dict(b_in=normal(5, G, 2 * GF), b_out=normal(6, G, GN), probs=jnp.abs(normal(7, 4 * ROWS_OF_DEVICE)))
    return dict(x=grouped_operands()["x"]) | more


def grouped_mlp(free, rest, chosen=None, **how):
    """chosen: one recipe, the pair of the products', or (recipe of the layer, recipe of the context)."""
    first, *out = chosen if isinstance(chosen, tuple) else (chosen,)
    return fp4.grouped_mlp(**free, **rest, recipe=first, out_recipe=out[0] if out else None, key=KEY, **how)


@cache
def grouped_mlp_on_one(chosen):
    return jit(step(partial(grouped_mlp, chosen=chosen)))(*in_order(mlp_operands(), GN))


grouped_mlp.columns, grouped_mlp.on_one = GN, grouped_mlp_on_one


@pytest.mark.parametrize(
    ("chosen", "gathers", "kernels", "check_vma"),
    [
        (nvfp4(), (WeightGather("fsdp", 1), WeightGather("fsdp", 2)), (P(None, "fsdp"), P(None, None, "fsdp")), True),
        (nvfp4(**ROWS), (WeightGather("fsdp", 0), None), (P("fsdp"), P()), False),
        (
            nvfp4("unquant"),
            (WeightGather(BOTH, 1, "quantized"), WeightGather("fsdp", 0)),
            (P(None, BOTH), P("fsdp")),
            True,
        ),
        (
            nvfp4("dequant"),
            (WeightGather("fsdp", 2), WeightGather(BOTH, 0, "high_precision")),
            (P(None, None, "fsdp"), P(BOTH)),
            False,
        ),
        (
            (fp4.MXFP8BlockScaling(), nvfp4("dequant")),
            (None, WeightGather("fsdp", 1)),
            (P(), P(None, "fsdp")),
            True,
        ),
        (
            fp4.MXFP8BlockScaling("unquant"),
            (WeightGather("fsdp", 1), WeightGather("fsdp", 0)),
            (P(None, "fsdp"), P("fsdp")),
            False,
        ),
        (
            (nvfp4("unquant"), fp4.HIGH_PRECISION),
            (WeightGather("fsdp", 0), WeightGather("fsdp", 1)),
            (P("fsdp"), P(None, "fsdp")),
            True,
        ),
    ],
    ids=["default", "rows", "unquant", "dequant", "mxfp8, then nvfp4", "mxfp8", "nvfp4, then high precision"],
)
def test_grouped_mlp(chosen, gathers, kernels, check_vma):
    """Under an autocast of another recipe: each product has its own."""
    where = grouped(None, P(), check_vma)
    specs = tuple(Specs(x=where.x, kernel=kernel) for kernel in kernels)
    parts = dict(x=where.x, probs=where.x, w_in=kernels[0], w_out=kernels[1])
    with fp4.autocast(fp4.Float8CurrentScaling()):
        check_groups(grouped_mlp, mlp_operands(), where, chosen, dict(gather=gathers, specs=specs), parts)


def layernorm_dense(free, rest, chosen=None, **how):
    return fp4.layernorm_dense(**free, norm="rmsnorm", norm_bias=None, recipe=chosen, key=KEY, **how)


def layernorm_mlp(free, rest, chosen=None, **how):
    return fp4.layernorm_mlp(**free, recipe=chosen, key=KEY, **how)


@pytest.mark.parametrize(
    ("mode", "dims", "payload", "check_vma"),
    [
        ("default", (0, 1), None, True),
        ("unquant", (1, 0), "quantized", False),
        ("dequant", (0, 0), "high_precision", True),
    ],
)
def test_norm_layers(mode, dims, payload, check_vma):
    """The weights of the norm are whole: their gradients are summed over the devices."""
    x, scale = operands()["x"], 1 + normal(3, K) / 8
    cases = [
        (layernorm_dense, dict(x=x, scale=scale, kernel=operands()["kernel"]), ("kernel",)),
        (
            layernorm_mlp,
            dict(x=x, scale=scale, norm_bias=normal(8, K), w_in=normal(4, K, 128) / 11, w_out=normal(5, 64, 96) / 8),
            ("w_in", "w_out"),
        ),
    ]
    for layer, free, names in cases:
        wheres = [along(dim, payload, check_vma=check_vma) for dim in dims][: len(names)]
        gather, specs = tuple(where.gather for where in wheres), tuple(where.specs for where in wheres)
        how = dict(gather=gather, specs=specs) if len(names) > 1 else dict(gather=gather[0], specs=specs[0])
        parts = dict(x=P(BOTH)) | {name: where.kernel for name, where in zip(names, wheres, strict=True)}
        function = sharded(partial(layer, chosen=nvfp4(mode), **how), wheres[0], **parts)
        y, grads = jit(step(function))(free, {})
        want, want_grads = jit(step(partial(layer, chosen=nvfp4(mode))))(free, {})
        same(y, want)
        close(grads, want_grads)


@pytest.mark.parametrize("mode", MODES)
def test_tensor_parallel_mlp(mode):
    """A device has columns of the gate and those that these multiply, and the rows of w_out that they meet; the shards
    of both kernels are gathered."""
    free = dict(x=normal(0, M, K), scale=jnp.ones(K), norm_bias=jnp.zeros(K), w_in=normal(4, K, 256) / 11)
    free |= dict(w_out=normal(5, 128, 96) / 8, b_in=normal(6, 256), b_out=normal(8, 96))
    kernels = P("fsdp", "tensor"), P("tensor", "fsdp")
    hidden = P("fsdp", "tensor")
    specs = Specs(x=P("fsdp"), kernel=kernels[0]), Specs(x=hidden, kernel=kernels[1])
    gather = WeightGather("fsdp", 0), WeightGather("fsdp", 1)

    def halves(a):
        """[..., 2f] with the two halves of each device beside one another."""
        return a.reshape(*a.shape[:-1], 2, 2, -1).swapaxes(-3, -2).reshape(a.shape)

    where = Where(None, P(), P("fsdp"), P("fsdp"), TENSOR)
    parts = dict(x=P("fsdp"), w_in=kernels[0], w_out=kernels[1], b_in=P("tensor"))
    function = sharded(partial(layernorm_mlp, chosen=nvfp4(mode), gather=gather, specs=specs), where, **parts)
    y, grads = jit(step(function))(free | {name: halves(free[name]) for name in ("w_in", "b_in")}, {})
    want, want_grads = jit(step(partial(layernorm_mlp, chosen=nvfp4(mode))))(free, {})
    close(y, want)
    close(grads | {name: halves(grads[name]) for name in ("w_in", "b_in")}, want_grads)


# --- quantize, of a part ---

X = normal(0, 4, 256, 256, dtype=BF16).at[3, 100, 130].set(50)


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize(("dim", "shards"), [(0, 1), (0, 4), (1, 2), (1, 8), (2, 4), (2, 8)])
def test_codes_and_scales_are_those_of_the_whole(dim, shards, axis):
    """F7: whatever dimension is cut, though only one shard has the outlier; draws too."""
    spec = P(*[None] * dim, "a")
    flags = {"plain": {}, "draws": dict(key=KEY), "row-scaled": dict(row_scaled=True), "tiles": dict(block=(16, 16))}
    flags["8 bits"] = dict(format="float8")
    flags["blocks of 32"] = dict(format="mxfp8")
    if axis == 0:
        flags["hadamard"] = dict(hadamard=True, key=KEY)

    def whole(x):
        return {name: _arrays(fp4.quantize(x, axis=axis, **kw)) for name, kw in flags.items()}

    def local(x):
        specs = Specs(x=spec)
        return {name: _arrays(fp4.quantize(x, axis=axis, specs=specs, **kw)) for name, kw in flags.items()}

    got = jit(jax.shard_map(lambda x: jax.tree.map(lambda a: a[None], local(x)), mesh=mesh(a=shards), in_specs=spec,
                            out_specs=P("a"), check_vma=False))(X)  # fmt: skip
    want = jax.tree.map(np.asarray, jit(whole)(X))
    for name, (codes, scales, amax) in jax.tree.map(np.asarray, got).items():
        for part, one in ((codes, want[name][0]), (scales, want[name][1])):
            np.testing.assert_array_equal(_joined(part, one.shape, dim, axis), one, err_msg=f"{name}: {part.shape}")
        if name == "row-scaled":
            np.testing.assert_array_equal(_joined_rows(amax, want[name][2], dim, axis), want[name][2], err_msg=name)
        elif amax.size:
            assert (amax == want[name][2]).all(), name


def _arrays(q):
    """As integers: codes, scales, amax."""
    bits = lambda a: a if a.dtype.itemsize > 1 else jax.lax.bitcast_convert_type(a, jnp.uint8)  # noqa: E731
    return bits(q.codes), bits(q.block_scale), jnp.zeros(0) if q.amax is None else q.amax


def _joined(parts, shape, dim, axis):
    """[devices, ...] of a stored array, cut along dimension `dim` of x, as one of `shape`."""
    if not shape:  # one scale for all
        assert (parts == parts[0]).all()
        return parts[0]
    if axis == -1:
        return np.concatenate(list(parts), axis=dim)
    if dim == 2:  # the rows of what is stored
        return np.concatenate(list(parts), axis=0)
    count, (b, m) = parts.shape[0], X.shape[:2]
    k, per = shape[0], b * m // shape[1]  # elements that share what is stored
    b, m = (b // count, m) if dim == 0 else (b, m // count)
    each = [part.reshape(k, b, m // per) for part in parts]
    return np.concatenate(each, axis=1 + dim).reshape(shape)


def _joined_rows(parts, one, dim, axis):
    """Likewise of an amax for each stored row."""
    if dim == 2 if axis == -1 else dim != 2:  # all have the same
        assert (parts == parts[0]).all()
        return parts[0]
    return np.concatenate(list(parts), axis=dim if axis == -1 else 0)


@pytest.mark.core
@pytest.mark.parametrize("row_scaled", [False, True])
def test_both_directions_at_once(row_scaled):
    """Row-scaled, one of the two has amaxes of a device alone."""
    flags = dict(row_scaled=row_scaled) if row_scaled else dict(hadamard=True, key=KEY)
    for spec in (P(None, None, "a"), P("a")):
        local = lambda x, spec=spec: fp4.quantize_transpose(x, specs=Specs(x=spec), **flags)  # noqa: E731
        one = [fp4.quantize(X, **{name: v for name, v in flags.items() if name != "hadamard"})]
        one += [fp4.quantize(X, axis=0, **flags)]
        cut = lambda x, local=local: jax.tree.map(lambda q: q[None], [_arrays(q) for q in local(x)])  # noqa: E731
        got = jit(jax.shard_map(cut, mesh=mesh(a=4), in_specs=spec, out_specs=P("a"), check_vma=False))(X)
        for q, whole, axis in zip(got, one, (-1, 0), strict=True):
            for part, want in zip(q[:2], _arrays(whole)[:2], strict=True):
                dim = 2 if spec != P("a") else 0
                np.testing.assert_array_equal(_joined(np.asarray(part), want.shape, dim, axis), np.asarray(want))


# --- gradients, what is kept and what is moved ---


@pytest.mark.parametrize("mode", MODES)
def test_small_gradients_of_a_shard(mode):
    """D4: a loss scale of 1e-6 does not vanish on the way to the shard."""
    where, chosen = along(0, "quantized"), nvfp4(mode)
    rest = dict(dy=normal(9, M, N) * 1e-6)
    layer = partial(dense, chosen=chosen)
    function = sharded(partial(layer, gather=where.gather, specs=where.specs), where, x=where.x, kernel=where.kernel)
    (_, grads), (_, want) = (jit(step(f))(operands(), rest) for f in (function, layer))
    close(grads, want)
    assert all(float(jnp.linalg.norm(grads[name].astype(jnp.float32))) > 1e-5 for name in grads)


KEPT = {  # of a layer [256, 128] x [128, 192] on eight devices, its kernel on four: of x, in the mode
    "default": [((K, 16), "uint8"), ((K, 2), "uint8")],
    "unquant": [((32, K), "bfloat16")],
    "dequant": [((32, K // 2), "uint8"), ((32, K // 16), "uint8")],
}


@pytest.mark.parametrize("mode", MODES)
def test_only_the_shard_is_kept(mode):
    """And of x what the mode reads; amaxes and the seed besides."""
    where, seen = along(0, "quantized"), []

    def local(free, rest):
        layer = lambda free: dense(free, rest, nvfp4(mode), gather=where.gather, specs=where.specs)  # noqa: E731
        y, pull = jax.vjp(layer, free)
        seen.extend(leaves(pull))
        return y

    jax.eval_shape(sharded(local, where, x=where.x, kernel=where.kernel), operands(), {})
    large = sorted(leaf for leaf in seen if len(leaf[0]) > 1)
    assert large == sorted([*KEPT[mode], ((K // 4, N), "float32")])
    assert {shape for shape, _ in seen if len(shape) < 2} <= {(), (2,), (N,)}


def moved_by(where: Where, chosen, wanted=("x", "kernel")):
    """What the forward alone moves, and a step that differentiates `wanted`: of all-gathers (dtype, shape)."""
    layer = partial(dense, chosen=chosen, gather=where.gather, specs=where.specs)
    function = sharded(layer, where, x=where.x, kernel=where.kernel)
    free = {name: operands()[name] for name in wanted}
    rest = {name: a for name, a in operands().items() if name not in wanted}
    forward = compiled(function, free, rest)[1]
    return forward, compiled(step(function), free, rest)[1]


def packed(blocked: int, rows: int, cut: int) -> list[Moved]:
    """Codes and scales [rows, blocked / 2 or 16], cut along an axis: parts travel as they lie."""
    shapes = ((rows, blocked // 2), (rows, blocked // 16))
    return [Moved("all-gather", "u8", (n, b) if cut == 0 else (4, n, b // 4)) for n, b in shapes]


@pytest.mark.parametrize(
    ("mode", "dim", "plane"), [("default", 0, (N, K)), ("default", 1, (N, K)), ("dequant", 0, (K, N))]
)
def test_each_pass_moves_the_plane_that_it_reads(mode, dim, plane):
    """F3, F5: packed codes and their scales, 0.5625 bytes an element; the forward that blocked along k, the default
    backward that blocked along n, dequant's again the first."""
    forward, both = moved_by(along(dim), nvfp4(mode))
    of_forward = packed(K, N, 1 - dim)
    assert sorted(gathers(forward)) == sorted(of_forward)
    assert sum(moved.size for moved in gathers(forward)) <= 0.6 * K * N
    back = packed(*plane, dim if mode == "default" else 1 - dim)
    assert set(gathers(both)) == {*of_forward, *back}
    assert len(gathers(both)) <= 4  # XLA finds those that are the same
    # a shard of dw is what arrives
    scattered = [moved for moved in collectives(both) if moved.kind == "reduce-scatter"]
    assert scattered == [Moved("reduce-scatter", "f32", (K // 4, N) if dim == 0 else (K, N // 4))]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("settings", [{}, {"two_dimensional_weights": False}], ids=str)
def test_the_amax_of_a_kernel_is_found_once(mode, settings):
    """Both its planes have it: the backward, which gathers again, does not read the shard for it. The other amaxes are
    those of x and, in default, of dy, each of both its forms."""
    where = along(0)
    layer = partial(dense, chosen=nvfp4(mode, **settings), gather=where.gather, specs=where.specs)
    function = sharded(layer, where, x=where.x, kernel=where.kernel)
    forward, both = (jax.jit(each).lower(operands(), {}).as_text() for each in (function, step(function)))
    found = [text.count("@jax_fp4_amax") for text in (forward, both)]
    assert found == [2, 3 if mode == "default" else 2]


@pytest.mark.parametrize(
    ("mode", "policy", "quantized", "found"),
    [
        ("default", checkpoint_policies.save_quantized, 4, 3),
        ("dequant", checkpoint_policies.save_quantized, 3, 2),
        ("default", None, 5, 5),  # x, in the forward's form too, and its amaxes; the kernel's amax
        ("dequant", None, 4, 4),
    ],
)
@pytest.mark.parametrize("payload", [None, "high_precision"])
def test_remat_brings_no_plane_back_for_its_amax(mode, policy, quantized, found, payload):
    """D5: the amax kept for the backward is found by a call of its own, and has the name of what is quantized. As part
    of the forward's plane it would have the kernel gathered and quantized once more."""
    where = along(0, payload)
    layer = partial(dense, chosen=nvfp4(mode), gather=where.gather, specs=where.specs)

    def remat(free, rest):
        return jax.checkpoint(lambda free: layer(free, rest), policy=policy)(free)

    text = jax.jit(step(sharded(remat, where, x=where.x, kernel=where.kernel))).lower(operands(), {}).as_text()
    assert len(re.findall(r"@jax_fp4_quantize\w*\(", text)) == quantized
    assert text.count("@jax_fp4_amax(") == found
    of_kernel = f"tensor<{K}x{N}xbf16>" if payload else f"tensor<4x{N}x{K // 8}xui8>"
    moved = [line for line in text.splitlines() if "all_gather" in line and f"-> {of_kernel}" in line]
    assert len(moved) == (1 if mode == "default" and not payload else 2)  # default's backward reads the other plane


@pytest.mark.parametrize("mode", MODES)
def test_dx_and_dw_leave_the_backward_together(mode):
    """So that no later product's gather begins before dw is scattered, and the whole gradients of many layers never
    exist side by side."""
    where = along(0)
    layer = partial(dense, chosen=nvfp4(mode), gather=where.gather, specs=where.specs)
    function = sharded(layer, where, x=where.x, kernel=where.kernel)
    text = jax.jit(step(function)).lower(operands(), {}).as_text()
    together = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert any(f"tensor<{M // 8}x{K}xbf16>, tensor<{K // 4}x{N}xf32>" in line for line in together), together
    assert (
        "optimization_barrier" not in jax.jit(step(partial(dense, chosen=nvfp4(mode)))).lower(operands(), {}).as_text()
    )


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_gathered_again_for_dw_alone(mode):
    _, both = moved_by(along(0), nvfp4(mode), ("kernel",))
    assert sorted(gathers(both)) == sorted(packed(K, N, 1))


@pytest.mark.parametrize("payload", [None, "high_precision"])
def test_high_precision_moves_the_compute_dtype(payload):
    """What unquant reads in its backward, and everything where the payload says so. In the lowered program: XLA:CPU
    moves float32 for bfloat16."""
    where = along(0, payload)
    layer = partial(dense, chosen=nvfp4("unquant"), gather=where.gather, specs=where.specs)
    function = jax.jit(step(sharded(layer, where, x=where.x, kernel=where.kernel)))
    text = function.lower(operands(), {}).as_text()
    moved = [line.split("-> ")[-1] for line in text.splitlines() if "all_gather" in line]
    assert sorted(moved) == sorted(
        [f"tensor<{K}x{N}xbf16>"] * (1 + (payload is not None))
        + ([] if payload else [f"tensor<4x{N}x{K // 8}xui8>", f"tensor<4x{N}x{K // 64}xui8>"])
    )


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("dim", [0, 1])
def test_dw_is_summed_in_reduce_dtype(dim, dtype):
    """The transpose of all_gather(tiled=True) in it; the gradient has the kernel's dtype."""
    kernel_dtype = jnp.float32 if dtype == jnp.bfloat16 else BF16
    where = along(dim)
    gather = WeightGather("fsdp", dim, "quantized", dtype)
    free = operands() | dict(kernel=operands()["kernel"].astype(kernel_dtype))
    layer = partial(dense, chosen=nvfp4("unquant"), gather=gather, specs=where.specs)
    function = jax.jit(step(sharded(layer, where, x=where.x, kernel=where.kernel)))
    text = function.lower(free, {}).as_text()
    of = jnp.dtype(dtype or kernel_dtype)
    shape = (K // 4, N) if dim == 0 else (K, N // 4)
    reduced = text.split('"stablehlo.reduce_scatter"')[1].split("-> ")[1].splitlines()[0]
    assert reduced == f"tensor<{shape[0]}x{shape[1]}x{ {2: 'bf16', 4: 'f32'}[of.itemsize] }>"
    grad = function(free, {})[1]["kernel"]
    assert grad.dtype == kernel_dtype
    close(grad.astype(jnp.float32), dense_on_one(nvfp4("unquant"))[1]["kernel"], 1e-2)


# --- what is refused, and where nothing can be packed ---


def traced(call, where=None, **arguments):
    """call(x, kernel) of one device's part of x [256, 128] and a kernel, traced."""
    where = where or along(0)
    free = dict(x=operands()["x"], kernel=operands()["kernel"]) | arguments
    function = lambda free, rest: call(free["x"], free["kernel"])  # noqa: E731
    jax.eval_shape(sharded(function, where, x=where.x, kernel=where.kernel), free, {})


def call(gather=None, specs=None, chosen=None, layer=fp4.dense):
    return lambda x, kernel: layer(x, kernel, recipe=chosen or nvfp4("unquant"), gather=gather, specs=specs)


FSDP = WeightGather("fsdp", 0)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: WeightGather(("fsdp", "fsdp"), 0), ValueError, "^WeightGather: axis_name is uses fsdp twice"),
        (lambda: WeightGather(3, 0), TypeError, "^WeightGather: axis_name is 3; needs a mesh axis"),
        (lambda: WeightGather((), 0), TypeError, r"^WeightGather: axis_name is \(\)"),
        (lambda: WeightGather("fsdp", 0.5), TypeError, "^WeightGather: dim is 0.5; needs an integer"),
        (lambda: WeightGather("fsdp", True), TypeError, "^WeightGather: dim is True"),
        (lambda: WeightGather("fsdp", 0, "packed"), ValueError, "^WeightGather: payload is 'packed'; needs one of"),
        (lambda: WeightGather("fsdp", 0, None, jnp.int8), TypeError, "^WeightGather: reduce_dtype is .*int8"),
        (lambda: Specs(x=("fsdp",)), TypeError, "^Specs: x is a tuple; needs a PartitionSpec"),
        (lambda: Specs(kernel=P("a", "a")), ValueError, "^Specs: kernel is uses a twice"),
    ],
)
def test_what_is_no_gather(make, error, says):
    refused(make, error, says)


@pytest.mark.parametrize(
    ("function", "error", "says"),
    [
        (call(WeightGather("model", 0)), ValueError, "^dense: gather.axis_name is names the mesh axis 'model'"),
        (call(WeightGather("fsdp", 2)), ValueError, "^dense: gather.dim is 2; needs -2 to 1"),
        (call(WeightGather("fsdp", -3)), ValueError, "^dense: gather.dim is -3"),
        (call("fsdp"), TypeError, "^dense: gather is a str; needs a WeightGather or None"),
        (call((FSDP, FSDP)), TypeError, "^dense: gather is a tuple"),
        (call(FSDP, P("fsdp")), TypeError, "^dense: specs is a P.*; needs Specs"),
        (call(FSDP, Specs(x=P(("data", "model")))), ValueError, "^dense: specs.x is names the mesh axis 'model'"),
        (
            call(FSDP, Specs(x=P(None, None, "data"))),
            ValueError,
            "^dense: specs.x is .* of 3 dimensions; needs at most 2",
        ),
        (call(FSDP, Specs(x=P(BOTH))), ValueError, r"^dense: specs.kernel is .*; needs \('fsdp',\) as the last axes"),
        (
            call(None, Specs(x=P("data"), kernel=P("fsdp"))),
            ValueError,
            r"^dense: specs is cut by \(\) along the contracted axis of x and by \('fsdp',\) of the kernel",
        ),
        (
            call(None, Specs(x=P("data", "fsdp"))),
            ValueError,
            r"^dense: specs is cut by \('fsdp',\) along the contracted axis of x and by \(\) of the kernel",
        ),
        (
            call(None, Specs(x=P(BOTH), kernel=P(None, "fsdp"))),
            ValueError,
            "^dense: specs is cut by fsdp along rows of x and of the kernel; needs different axes",
        ),
        (
            call(WeightGather("fsdp", 0, "quantized"), Specs(x=P(BOTH), kernel=P("fsdp")), fp4.HIGH_PRECISION),
            ValueError,
            "^dense: gather.payload is 'quantized'; needs a recipe",
        ),
        (
            lambda x, kernel: fp4.quantize(x[:, :24], specs=Specs(x=P(None, "fsdp"))),
            ValueError,
            "^quantize: x is of 24 columns a device, along fsdp; needs a multiple of 16",
        ),
        (lambda x, kernel: fp4.quantize(x, specs=P(BOTH)), TypeError, "^quantize: specs is a P"),
        (
            lambda x, kernel: fp4.grouped_mlp(x, kernel, kernel, jnp.int32([1]), gather=FSDP, recipe=nvfp4()),
            TypeError,
            "^grouped_mlp: gather is a WeightGather; needs a pair",
        ),
    ],
)
def test_errors(function, error, says):
    whole_rows = along(0)._replace(x=P(BOTH))
    refused(lambda: traced(function, whole_rows), error, says)


def test_no_shard_map():
    x, kernel = normal(0, 32, K), normal(1, K // 4, N)
    says = "^dense: gather.axis_name is names the mesh axis 'fsdp'; .* there is no shard_map around this call"
    refused(lambda: call(FSDP)(x, kernel), ValueError, says)
    refused(lambda: call(None, Specs(x=P("fsdp")))(x, kernel), ValueError, "^dense: specs.x is names the mesh axis")


def test_a_kernel_that_all_devices_share():
    """Where JAX knows: with check_vma. A gather of it would be four kernels."""
    where = along(0)._replace(kernel=P())
    says = "^dense: kernel is the same on all devices along fsdp; needs cut by it"
    refused(lambda: traced(call(FSDP), where), ValueError, says)


@pytest.mark.parametrize("x", [P("fsdp", None), P(None, "fsdp")])
def test_an_mlp_whose_activation_lies_elsewhere(x):
    def function(x, kernel):
        specs = Specs(x=P(BOTH)), Specs(x=P("data"))
        w_in, w_out = kernel[None, :, :64], kernel[None, :32]
        return fp4.grouped_mlp(x, w_in, w_out, jnp.int32([32]), specs=specs, recipe=nvfp4("unquant"))

    where = along(0)._replace(kernel=P())
    refused(lambda: traced(function, where), ValueError, r"^grouped_mlp: specs\[1\].x is an activation cut by")


def shard_of_24(payload, chosen=None):
    where = along(0, payload)
    free = {name: a[:, :96] if name == "x" else a[:96] for name, a in operands().items() if name != "bias"}
    layer = partial(dense, chosen=chosen or nvfp4(), gather=where.gather, specs=where.specs)
    return layer, sharded(layer, where, x=where.x, kernel=where.kernel), free


def test_a_shard_that_ends_inside_a_block():
    """F10: k of 24 a device. Moved in high precision, and the record says why; asked for by name it is refused."""
    _, function, free = shard_of_24(None)
    with _record.recording() as events:
        (y, grads), text = compiled(step(function), free, {})
    gathered = {(e.product, e.payload, e.reason) for e in events if isinstance(e, _record.GatherEvent)}
    reason = "24 along dimension 0, in blocks of 16"
    assert gathered == {("forward", "high_precision", reason), ("dgrad", "high_precision", reason)}
    assert {moved.dtype for moved in gathers(text)} == {"f32"}
    want, want_grads = jit(step(partial(dense, chosen=nvfp4())))(free, {})
    same(y, want)
    close(grads, want_grads)
    says = r"^dense: gather.payload is 'quantized' for a shard of \(24, 192\); .*blocks of 16.* Try .*high_precision"
    refused(lambda: jax.eval_shape(*shard_of_24("quantized")[1:], {}), ValueError, says)
    says = r"^dense: gather.payload is None for a shard of \(24, 192\); .*blocks of 16, and strict\(\) forbids"
    with fp4.strict():
        refused(lambda: jax.eval_shape(*shard_of_24(None)[1:], {}), fp4.UnsupportedError, says)
        jax.eval_shape(*shard_of_24("high_precision")[1:], {})


@pytest.mark.parametrize("check_vma", [True, False])
def test_report_of_a_step(check_vma):
    """What a call takes is learnt where its mesh axes are known."""
    where = along(0, check_vma=check_vma)
    layer = partial(dense, chosen=nvfp4(), gather=where.gather, specs=where.specs)
    (row,) = fp4.report(step(sharded(layer, where, x=where.x, kernel=where.kernel)), operands(), {}).rows
    assert row.quantized and row.kernel_shape == (K, N) and row.x_shape == (M // 8, K)
    assert 4 * K * N // 4 < row.residual_bytes < 4 * K * N // 3  # the shard in float32, and packed x


def test_a_frozen_shard_that_ends_inside_a_block():
    """Its bytes are no blocks of the kernel."""

    def function(x, kernel):
        return call(FSDP)(x[:, :96], fp4.quantize(kernel[:24], axis=0))

    says = r"^dense: gather.payload is of a frozen shard of \(24, 192\); needs shards of whole blocks"
    refused(lambda: traced(function), ValueError, says)
