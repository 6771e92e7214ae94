"""Layers at the level of jit, on meshes of eight CPU devices against one: Explicit axes, and Auto axes with specs."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as flax_nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from products import refused
from sharded import KEY, MODES, close, collectives, compiled, gathers, jit, mesh, normal, nvfp4, same, step

import jax_fp4 as fp4
from jax_fp4 import Specs, linen, nnx

KINDS = ("Explicit", "Auto")


class Case(NamedTuple):
    """A mesh, and how x and the kernels lie on it."""

    axes: tuple[tuple[str, int], ...]
    x: P
    kernel: P
    out: P = P()  # of the second kernel of two

    def on(self, kind):
        return mesh(kind, **dict(self.axes))


def on_mesh(function, case: Case, kind: str, free, rest, **parts):
    """What function(free, rest) is where its arguments are cut as `parts` say, and the text of the program."""
    where = case.on(kind)

    def put(tree):
        return {name: jax.device_put(a, NamedSharding(where, parts.get(name, P()))) for name, a in tree.items()}

    with jax.set_mesh(where):
        return compiled(function, put(free), put(rest))


def each_kind(function, case: Case, free, rest, specs, **parts):
    """`on_mesh` for Explicit axes, which say how arrays lie, and Auto ones, of which specs do: the same bits."""
    out = [
        on_mesh(partial_specs(function, specs if kind == "Auto" else None), case, kind, free, rest, **parts)
        for kind in KINDS
    ]
    (first, text), (second, other) = out
    same(first, second)
    return first, (text, other)


def partial_specs(function, specs):
    return step(partial(function, specs=specs))


def entry(spec: P, i: int):
    return spec[i] if len(spec) > i else None


# --- dense ---

B, S, K, N = 8, 64, 128, 192
SMALL = (("data", 2), ("tensor", 4))
CASES = {
    "data": Case((("data", 8),), P("data"), P()),
    "fsdp, k": Case((("fsdp", 8),), P("fsdp"), P("fsdp")),
    "fsdp, n": Case((("fsdp", 4),), P("fsdp"), P(None, "fsdp")),
    "data x fsdp": Case((("data", 2), ("fsdp", 4)), P(("data", "fsdp")), P("fsdp")),
    "column": Case(SMALL, P("data"), P(None, "tensor")),
    "row": Case(SMALL, P("data", None, "tensor"), P("tensor")),
    "fsdp x tensor": Case((("fsdp", 2), ("tensor", 4)), P("fsdp"), P("fsdp", "tensor")),
    "tensor x fsdp": Case((("fsdp", 2), ("tensor", 4)), P("fsdp", None, "tensor"), P("tensor", "fsdp")),
    "sequence": Case((("data", 2), ("seq", 4)), P("data", "seq"), P()),
    "sequence, fsdp": Case((("data", 2), ("seq", 4)), P("data", "seq"), P("data")),
    "kernel alone": Case(SMALL, P("data"), P("tensor")),
    "everything": Case((("data", 2), ("fsdp", 2), ("tensor", 2)), P(("data", "fsdp")), P("fsdp", "tensor")),
}
# y and its gradient lie as x and the columns of the kernel do: of those that the rows are not cut by
COLUMNS = {"column": "tensor", "fsdp x tensor": "tensor", "everything": "tensor"}


@cache
def operands(k=K, n=N):
    x = normal(0, B, S, k).at[3, 5, k - 3].set(30)
    return dict(x=x, kernel=normal(1, k, n).at[k * 2 // 3, 3].set(40), bias=normal(2, n)), dict(dy=normal(9, B, S, n))


def dense(free, rest, chosen=None, specs=None):
    return fp4.dense(free["x"], free["kernel"], free["bias"], recipe=chosen, key=KEY, specs=specs)


@cache
def dense_on_one(chosen, shape=(K, N)):
    return jit(step(partial(dense, chosen=chosen)))(*operands(*shape))


def check_dense(name, chosen, shape=(K, N)):
    case, columns = CASES[name], COLUMNS.get(name)
    parts = dict(x=case.x, kernel=case.kernel, bias=P(entry(case.kernel, 1)))
    parts["dy"] = P(entry(case.x, 0), entry(case.x, 1), columns)
    specs = Specs(x=case.x, kernel=case.kernel)
    out, texts = each_kind(partial(dense, chosen=chosen), case, *operands(*shape), specs, **parts)
    close(out, dense_on_one(chosen, shape))
    return texts


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(
            name, MODES[(i + more) % 3], marks=[pytest.mark.core] * (name in ("data x fsdp", "row") and not more)
        )
        for i, name in enumerate(CASES)
        for more in ((0, 1) if i % 3 == 0 else (0,))
    ],
)
def test_dense(name, mode):
    """y and all gradients, and Explicit and Auto the same bits: with the draws of the global position."""
    texts = check_dense(name, nvfp4(mode))
    for text in texts:
        moved = [gather for gather in gathers(text) if len(gather.shape) > 1]  # but of the bias
        if name in ("data", "sequence"):  # E1: nobody gathers activations
            assert not moved
        if "fsdp" in name and mode != "unquant":  # F3
            assert moved and {gather.dtype for gather in moved} == {"u8"}
            elements = K * N // (4 if "tensor" in name else 1)
            assert sum(gather.size for gather in moved) <= 0.6 * 2 * elements


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("data x fsdp", fp4.MXFP8BlockScaling()),
        ("fsdp x tensor", fp4.Float8CurrentScaling()),
        ("fsdp x tensor", fp4.HIGH_PRECISION),
    ],
    ids=["mxfp8", "float8", "high precision"],
)
def test_dense_of_other_recipes(name, chosen):
    check_dense(name, chosen, (K, 128))


@pytest.mark.parametrize(
    ("name", "shape"), [("column", (K, 72)), ("column", (K, 24)), ("fsdp, k", (192, 64)), ("kernel alone", (96, 64))]
)
def test_a_border_inside_a_block(name, shape):
    """Of columns of a kernel, which are then not cut; of its shards, which are then moved in high precision."""
    case = CASES[name]
    parts = dict(x=case.x, kernel=case.kernel)
    out, _ = each_kind(
        partial(dense, chosen=nvfp4()), case, *operands(*shape), Specs(x=case.x, kernel=case.kernel), **parts
    )
    close(out, dense_on_one(nvfp4(), shape))


def traced(function, case: Case, kind, **arrays):
    where = case.on(kind)
    with jax.set_mesh(where):
        jax.eval_shape(function, *(jax.device_put(a, NamedSharding(where, spec)) for a, spec in arrays.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_border_inside_a_block_of_k(kind):
    """Each device would sum over other blocks."""
    case = CASES["row"]
    specs = Specs(x=case.x, kernel=case.kernel) if kind == "Auto" else None
    function = partial(fp4.dense, recipe=nvfp4(), specs=specs)
    arrays = dict(x=(normal(0, 8, 2, 96), case.x), kernel=(normal(1, 96, 32), case.kernel))
    says = "^dense: .* is of 24 of 96 a device, along tensor; needs a multiple of 16 .* Try a multiple of 16, or"
    refused(lambda: traced(function, case, kind, **arrays), ValueError, says)


def test_rows_that_do_not_divide():
    """JAX says which axis: an array that lies so there is none of."""
    case = CASES["data"]
    function = partial(fp4.dense, recipe=nvfp4("unquant"), specs=Specs(x=case.x))
    with jax.set_mesh(case.on("Auto")), pytest.raises(ValueError, match="divi"):
        jax.eval_shape(function, normal(0, 12, K), normal(1, K, N))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gather_outside_of_shard_map(kind):
    """The kernel's own sharding says what is gathered."""
    case = CASES["fsdp, k"]
    specs = Specs(x=case.x, kernel=case.kernel) if kind == "Auto" else None
    function = partial(fp4.dense, recipe=nvfp4(), specs=specs, gather=fp4.WeightGather("fsdp", 0))
    arrays = dict(x=(normal(0, 8, K), P("fsdp")), kernel=(normal(1, K, N), case.kernel))
    refused(lambda: traced(function, case, kind, **arrays), ValueError, "^dense: gather is .*needs a shard_map around")


def model(free, rest, chosen=None):
    h = jax.nn.relu(fp4.dense(free["x"], free["first"], recipe=chosen, key=KEY))
    return fp4.dense(h, free["second"], recipe=chosen, key=jax.random.key(8))


def test_collectives_of_a_data_parallel_step():
    """Those of the gradients, as without a recipe; besides an amax of each x and dy, and of both transformed."""
    case = CASES["data"]
    free = dict(x=normal(0, 8, 16, K), first=normal(1, K, 64), second=normal(2, 64, N))
    rest = dict(dy=normal(9, 8, 16, N))
    texts = [
        on_mesh(step(partial(model, chosen=chosen)), case, "Explicit", free, rest, x=case.x, dy=case.x)[1]
        for chosen in (fp4.HIGH_PRECISION, nvfp4())
    ]
    plain, ours = map(collectives, texts)
    amaxes = [moved for moved in ours if moved.dtype == "s32"]
    assert sorted(moved for moved in ours if moved.dtype != "s32") == sorted(plain)
    assert {moved.kind for moved in ours} == {"all-reduce"}
    assert {moved.shape for moved in amaxes} == {()} and 2 <= len(amaxes) <= 2 * 4


@pytest.mark.parametrize("stacked", [False, True])
def test_vmap(stacked):
    """Of x alone, and of kernels too, one layer each."""
    case = CASES["fsdp, k"]
    free = dict(x=normal(0, 3, 8, 16, K), kernel=normal(1, *[3] * stacked, K, N))
    spec = P(None, *case.kernel) if stacked else case.kernel

    def function(free, rest):
        layer = partial(fp4.dense, recipe=nvfp4("dequant"))
        return jax.vmap(layer, (0, 0 if stacked else None))(free["x"], free["kernel"])

    dims = P(None, *case.x)
    out, _ = on_mesh(step(function), case, "Explicit", free, {}, x=dims, kernel=spec)
    close(out, jit(step(function))(free, {}))


# --- groups ---

G, M = 4, 256
SIZES = jnp.int32([96, 0, 96, 32])  # each device's rows of a group are a multiple of 16
GROUPED = {
    "data": Case((("data", 8),), P("data"), P()),
    "fsdp": Case((("fsdp", 4),), P("fsdp"), P(None, "fsdp"), P(None, None, "fsdp")),
    "expert": Case((("expert", 4),), P("expert"), P("expert"), P("expert")),
    "expert x fsdp": Case((("fsdp", 2), ("expert", 4)), P(("fsdp", "expert")), P("expert", "fsdp"), P("expert")),
    "tensor": Case(SMALL, P("data"), P(None, None, "tensor"), P(None, "tensor")),
}


@cache
def grouped_operands():
    free = dict(x=normal(0, M, 64).at[77, 5].set(30), kernel=normal(1, G, 64, 128), bias=normal(2, G, 128))
    free |= dict(w_in=normal(3, G, 64, 128) / 8, w_out=normal(4, G, 64, 64) / 8, probs=jnp.abs(normal(5, M)))
    return free | dict(b_in=normal(6, G, 128), b_out=normal(7, G, 64))


def grouped_layers(free, rest, chosen=None, specs=None):
    """Both at once."""
    first, *pair = (None, None) if specs is None else specs
    how, sizes = dict(recipe=chosen, key=KEY), rest["group_sizes"]
    dense_y = fp4.grouped_dense(free["x"], free["kernel"], sizes, free["bias"], specs=first, **how)
    mlp = {name: free[name] for name in ("w_in", "w_out", "b_in", "b_out", "probs")}
    mlp_y = fp4.grouped_mlp(free["x"], group_sizes=sizes, specs=tuple(pair) if specs else None, **mlp, **how)
    return dense_y, mlp_y


def grouped_step(function):
    def of(free, rest):
        def loss(free):
            first, second = function(free, rest)
            return jnp.sum(first * rest["dy"]) + jnp.sum(second * rest["dz"]), (first, second)

        (_, y), grads = jax.value_and_grad(loss, has_aux=True)(free)
        return y, grads

    return of


@cache
def grouped_rest():
    return dict(group_sizes=SIZES, dy=normal(9, M, 128), dz=normal(8, M, 64))


@cache
def grouped_on_one(chosen):
    return jit(grouped_step(partial(grouped_layers, chosen=chosen)))(grouped_operands(), grouped_rest())


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("data", "default"),
        ("fsdp", "unquant"),
        pytest.param("expert", "dequant", marks=pytest.mark.core),
        ("expert x fsdp", "default"),
        ("tensor", "dequant"),
    ],
)
def test_grouped_layers(name, mode):
    case, chosen = GROUPED[name], nvfp4(mode)
    columns = entry(case.kernel, 2)
    rows, expert = case.x[0], entry(case.kernel, 0)
    hidden = P(expert, columns)
    parts = dict(x=case.x, kernel=case.kernel, bias=hidden, b_in=hidden, b_out=P(expert), probs=P(rows))
    parts |= dict(w_in=case.kernel, w_out=case.out, dy=P(rows, columns), dz=P(rows))
    specs = (Specs(x=case.x, kernel=case.kernel),) * 2 + (Specs(x=P(rows, columns), kernel=case.out),)
    outs = []
    for kind in KINDS:
        function = grouped_step(partial(grouped_layers, chosen=chosen, specs=specs if kind == "Auto" else None))
        outs.append(on_mesh(function, case, kind, grouped_operands(), grouped_rest(), **parts)[0])
    same(*outs)
    close(outs[0], grouped_on_one(chosen))


@pytest.mark.parametrize("kind", KINDS)
def test_an_mlp_of_columns_of_x(kind):
    """The activation is of whole sums."""
    case = Case(SMALL, P("data", "tensor"), P(None, "tensor"))
    specs = (Specs(x=case.x, kernel=case.kernel), Specs(x=P("data"))) if kind == "Auto" else None
    function = partial(fp4.grouped_mlp, recipe=nvfp4("unquant"), specs=specs)
    arrays = dict(x=(normal(0, 32, 64), case.x), w_in=(normal(1, 2, 64, 64), case.kernel))
    arrays |= dict(w_out=(normal(2, 2, 32, 64), P()), sizes=(jnp.int32([16, 16]), P()))
    says = r"^grouped_mlp: x is cut by \('tensor',\) along k; needs whole rows"
    refused(lambda: traced(function, case, kind, **arrays), fp4.UnsupportedError, says)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_groups_are_cut_along_the_first_dimension(kind):
    case = CASES["sequence"]
    specs = Specs(x=case.x) if kind == "Auto" else None
    function = partial(fp4.grouped_dense, recipe=nvfp4("unquant"), specs=specs)
    arrays = dict(x=(normal(0, 2, 64, 32), case.x), w=(normal(1, 2, 32, 32), P()), sizes=(jnp.int32([64, 64]), P()))
    says = "^grouped_dense: x is cut by .*; needs rows cut along the first dimension"
    refused(lambda: traced(function, case, kind, **arrays), ValueError, says)


# --- experts ---

E, D, F = 8, 64, 32
MOE = {
    "data": Case((("data", 8),), P("data"), P(), P()),
    "fsdp": Case((("fsdp", 8),), P("fsdp"), P(None, "fsdp"), P(None, None, "fsdp")),
    "expert": Case((("expert", 8),), P("expert"), P("expert"), P("expert")),
    "data x expert": Case((("data", 2), ("expert", 4)), P(("data", "expert")), P("expert"), P("expert")),
    "tokens are not cut by the experts' axis": Case((("data", 2), ("expert", 4)), P("data"), P("expert"), P("expert")),
    "C17": Case(
        (("expert", 2), ("fsdp", 2)), P(("fsdp", "expert")), P("expert", "fsdp", None), P("expert", "fsdp", None)
    ),
    "expert x tensor": Case(
        (("expert", 4), ("tensor", 2)), P("expert"), P("expert", None, "tensor"), P("expert", "tensor")
    ),
    "tensor": Case(SMALL, P("data"), P(None, None, "tensor"), P(None, "tensor")),
}


@cache
def moe_operands():
    free = dict(x=normal(0, 8, 16, D), logits=normal(1, 8, 16, E).at[..., 2].set(-100))  # an expert without tokens
    free |= dict(w_in=normal(2, E, D, 2 * F) / 8, w_out=normal(3, E, F, D) / 6)
    return free | dict(b_in=normal(4, E, 2 * F), b_out=normal(5, E, D)), dict(dy=normal(9, 8, 16, D))


def moe_step(chosen, specs=None):
    def of(free, rest):
        def loss(free):
            y, routing = fp4.moe(**free, top_k=2, recipe=chosen, key=KEY, specs=specs)
            return jnp.sum(y * rest["dy"]) + 10 * routing.aux_loss, (y, routing.aux_loss)

        (value, (y, aux)), grads = jax.value_and_grad(loss, has_aux=True)(free)
        return dict(y=y, loss=value, aux=aux), grads

    return of


@cache
def moe_on_one(chosen):
    return jit(moe_step(chosen))(*moe_operands())


def check_moe(name, mode, kind):
    case, chosen = MOE[name], nvfp4(mode)
    specs = (Specs(x=case.x, kernel=case.kernel), Specs(kernel=case.out)) if kind == "Auto" else None
    experts, columns = entry(case.kernel, 0), entry(case.kernel, 2)
    parts = dict(x=case.x, logits=case.x, dy=case.x, w_in=case.kernel, w_out=case.out)
    parts |= dict(b_in=P(experts, columns), b_out=P(experts))
    out, text = on_mesh(moe_step(chosen, specs), case, kind, *moe_operands(), **parts)
    want = moe_on_one(chosen)
    close(out[0], want[0])
    other_blocks = mode == "default" and name != "expert"
    for name, grad in out[1].items():
        if not (other_blocks and name in ("w_in", "w_out")):
            close(grad, want[1][name], 1e-5, name)
        assert not np.asarray(grad)[2].any() or name not in ("w_in", "w_out", "b_in", "b_out")
    return out, text


@pytest.mark.parametrize(
    ("name", "mode", "kind"),
    [
        ("data", "default", "Explicit"),
        ("fsdp", "dequant", "Auto"),
        ("expert", "default", "Explicit"),
        ("data x expert", "unquant", "Auto"),
        ("tokens are not cut by the experts' axis", "default", "Auto"),
        ("C17", "default", "Explicit"),
        pytest.param("C17", "dequant", "Auto", marks=pytest.mark.core),
        ("expert x tensor", "dequant", "Explicit"),
        ("tensor", "unquant", "Auto"),
    ],
)
def test_moe(name, mode, kind):
    """y, the loss with the aux_loss of all tokens, and gradients: those of one device; an expert without tokens has
    none. In default the kernels' have other column-wise blocks where the rows of an expert are on several devices."""
    text = check_moe(name, mode, kind)[1]
    if name == "C17" and mode == "dequant":
        large = [moved for moved in gathers(text) if moved.size >= D * F]
        assert large and {moved.dtype for moved in large} == {"u8"}


def test_moe_has_the_same_bits_either_way():
    same(*(check_moe("C17", "default", kind)[0] for kind in KINDS))


# --- models ---


class Experts(flax_nnx.Module):
    """Two residual layers of experts and a head."""

    def __init__(self, chosen, rngs, of_in=None, of_out=None, of_head=None):
        def init(plain, names):
            return plain if names is None else flax_nnx.with_partitioning(plain, names)

        lecun = flax_nnx.initializers.lecun_normal()
        self.layers = flax_nnx.List(
            nnx.MoE(
                E, D, F, rngs=rngs, recipe=chosen, kernel_init=init(lecun, of_in), out_kernel_init=init(lecun, of_out)
            )
            for _ in range(2)
        )
        self.head = nnx.Linear(D, 16, rngs=rngs, recipe=chosen, kernel_init=init(lecun, of_head), use_bias=False)

    def __call__(self, x):
        aux = 0.0
        for layer in self.layers:
            y, routing = layer(x)
            x, aux = x + y, aux + routing.aux_loss
        return self.head(x), aux


def nnx_loss(model, x, dy):
    y, aux = model(x)
    return jnp.mean(y * dy) + 0.01 * aux


WANTED = (("expert", "fsdp", None), ("expert", None, "fsdp"), ("fsdp", None))


def test_nnx_model_on_an_explicit_mesh():
    """F11: parameters lie as with_partitioning says, gradients as their parameters; loss and gradients are those of one
    device, for several seeds."""
    where, chosen = mesh("Explicit", fsdp=2, expert=4), nvfp4("dequant")
    step = flax_nnx.jit(flax_nnx.value_and_grad(nnx_loss))
    for seed in range(2):
        x, dy = normal(seed, 8, 16, D), normal(9, 8, 16, 16)
        one = Experts(chosen, flax_nnx.Rngs(seed, sr=1))
        want, want_grads = step(one, x, dy)
        with jax.set_mesh(where):
            model = Experts(chosen, flax_nnx.Rngs(seed, sr=1), *WANTED)
            own, structure = jax.tree.flatten(flax_nnx.state(model))
            given = [
                jax.device_put(a, b.sharding) for a, b in zip(jax.tree.leaves(flax_nnx.state(one)), own, strict=True)
            ]
            flax_nnx.update(model, jax.tree.unflatten(structure, given))
            cut = NamedSharding(where, P(("fsdp", "expert")))
            value, grads = step(model, jax.device_put(x, cut), jax.device_put(dy, cut))
        close(value, want, 1e-4)
        for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
            close(ours, theirs, 1e-2)
        for layer, of_grads in zip(model.layers, grads["layers"].values(), strict=True):
            for name, spec in zip(("w_in", "w_out"), WANTED, strict=False):
                expected = NamedSharding(where, P(*spec))
                assert getattr(layer, name)[...].sharding.is_equivalent_to(expected, 3)
                assert of_grads[name][...].sharding.is_equivalent_to(expected, 3)


class LinenExperts(nn.Module):
    recipe: Any
    specs: Any = None

    @nn.compact
    def __call__(self, x):
        aux = 0.0
        for i in range(2):
            init = nn.initializers.lecun_normal()
            of_in, of_out = (nn.with_logical_partitioning(init, ("experts", *names)) for names in
                             (("embed", "hidden"), ("hidden", "embed")))  # fmt: skip
            layer = linen.MoE(E, F, recipe=self.recipe, specs=self.specs, kernel_init=of_in, out_kernel_init=of_out,
                              name=f"layer_{i}")  # fmt: skip
            y, routing = layer(x)
            x, aux = x + y, aux + routing.aux_loss
        return x, aux


RULES = (("experts", "expert"), ("embed", "fsdp"), ("hidden", None))


def test_linen_model_on_an_auto_mesh():
    """F11: parameters lie as logical names and rules say, gradients as their parameters."""
    where, chosen = mesh("Auto", fsdp=2, expert=4), nvfp4("unquant")
    tokens = P(("fsdp", "expert"))
    specs = Specs(x=tokens, kernel=P("expert", "fsdp")), Specs(kernel=P("expert", None, "fsdp"))
    one, model = LinenExperts(chosen), LinenExperts(chosen, specs)

    def of(module):
        def loss(variables, x, dy):
            y, aux = module.apply(variables, x, rngs={"sr": KEY})
            return jnp.mean(y * dy) + 0.01 * aux

        return jax.value_and_grad(loss)

    x = normal(0, 8, 16, D)
    boxed = one.init(jax.random.key(0), x)
    variables = nn.meta.unbox(boxed)
    shardings = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), where, RULES)
    alone = jit(of(one))
    with jax.set_mesh(where):
        cut = NamedSharding(where, tokens)
        step = jax.jit(of(model), out_shardings=(None, shardings))
        put = jax.device_put(variables, shardings)
        for seed in range(2):
            x, dy = normal(seed, 8, 16, D), normal(9, 8, 16, D)
            value, grads = step(put, jax.device_put(x, cut), jax.device_put(dy, cut))
            want, want_grads = alone(variables, x, dy)
            close(value, want, 1e-4)
            close(grads, want_grads, 1e-2)
    for i in range(2):
        for name, spec in (("w_in", P("expert", "fsdp")), ("w_out", P("expert", None, "fsdp"))):
            expected = NamedSharding(where, spec)
            for tree in (put, grads):
                assert tree["params"][f"layer_{i}"][name].sharding.is_equivalent_to(expected, 3)


@pytest.mark.parametrize("layer", ["Linear", "DotGeneral"])
def test_out_sharding(layer):
    """Where the result is to lie; the numbers do not change."""
    where = mesh("Explicit", data=2, tensor=4)
    x, w = normal(0, 8, 32), normal(1, 32, 64)
    want = jit(partial(fp4.dense, recipe=nvfp4("unquant")))(x, w)
    with jax.set_mesh(where):
        x = jax.device_put(x, NamedSharding(where, P("data")))
        w = jax.device_put(w, NamedSharding(where, P(None, "tensor")))
        if layer == "Linear":
            made = nnx.Linear(32, 64, rngs=flax_nnx.Rngs(0), recipe=nvfp4("unquant"), use_bias=False)
            made.kernel.set_value(w)
            function = lambda x, w, spec: made(x, spec)  # noqa: E731
        else:
            dot = fp4.DotGeneral(nvfp4("unquant"))
            function = lambda x, w, spec: dot(x, w, (((1,), (0,)), ((), ())), out_sharding=spec)  # noqa: E731
        for spec in (P("data", "tensor"), P(("data", "tensor")), P(None, "tensor")):
            y = jax.jit(partial(function, spec=spec))(x, w)
            assert y.sharding.is_equivalent_to(NamedSharding(where, spec), 2)
            close(y, want, 1e-6)
