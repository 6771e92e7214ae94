"""jax.checkpoint with our policies (docs/faults.md: D5, D6, D7): nothing is quantized twice, and no bit changes."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import linen as flax_linen
from flax import nnx as flax_nnx
from installations import HOPPER, forget, pretend
from jax.sharding import PartitionSpec as P
from products import refused
from sharded import KEY, MODES, compiled, gathers, jit, mesh, normal, nvfp4, same

import jax_fp4 as fp4
from jax_fp4 import Specs, WeightGather, _gather, _modes, _planes, checkpoint_policies, linen, nnx
from jax_fp4.checkpoint_policies import save_and_offload, save_products, save_quantized

JAX = jax.checkpoint_policies
M, K, N, G = 32, 32, 48, 2
SIZES = jnp.array([12, 20], jnp.int32)
X, W, ONES = normal(1, M, K, dtype=jnp.bfloat16), normal(2, K, N), jnp.ones(K)
WS, W_IN, W_OUT = normal(3, G, K, N), normal(4, G, K, 2 * N), normal(5, G, N, K)
DEVICES = 4
SHARDED_X, SHARDED_W = normal(6, DEVICES * M, DEVICES * 16, dtype=jnp.bfloat16), normal(7, DEVICES * 16, N)
NUMBERS = (((1,), (0,)), ((), ()))

LAYERS = {
    "dense": (lambda x, w, r: fp4.dense(x, w, recipe=r, key=KEY), W),
    "DotGeneral": (lambda x, w, r: fp4.DotGeneral(r, KEY)(x, w, NUMBERS), W),
    "layernorm_dense": (lambda x, w, r: fp4.layernorm_dense(x, w[1], None, w[0], recipe=r, key=KEY), (W, ONES)),
    "layernorm_mlp": (
        lambda x, w, r: fp4.layernorm_mlp(x, w[2], None, w[0], w[1], recipe=r, key=KEY),
        (W_IN[0], W_OUT[0], ONES),
    ),
    "grouped_dense": (lambda x, w, r: fp4.grouped_dense(x, w, SIZES, recipe=r, key=KEY), WS),
    "grouped_mlp": (lambda x, w, r: fp4.grouped_mlp(x, *w, SIZES, recipe=r, key=KEY), (W_IN, W_OUT)),
    "moe": (lambda x, w, r: fp4.moe(x, x[:, :G], *w, top_k=1, recipe=r, key=KEY)[0], (W_IN, W_OUT)),
}
# XLA may leave out a rounding to bfloat16 in one of two programs, here around the layers.
EXACTLY = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
REMAT = {
    "none": lambda f: f,
    "nothing": jax.checkpoint,
    "quantized": partial(jax.checkpoint, policy=save_quantized),
    "products": partial(jax.checkpoint, policy=save_products),
}


def block(name, recipe, remat):
    """y of two rounds, each with something after the layer that needs what it gave: so y is computed again."""
    layer, w = LAYERS[name]
    once = remat(lambda x, w: jnp.tanh(layer(jnp.sin(x), w, recipe)))
    return lambda x, w: once(x, w).astype(jnp.float32), w


def gradient(f):
    return jax.grad(lambda *a: jnp.sum(f(*a) ** 2), (0, 1))


def quantized(text: str) -> int:
    """Quantize calls of a program."""
    return len(re.findall(r"jax_fp4_(?:activate_)?quantize", text))


def calls(f, *a, platform="cpu") -> int:
    return quantized(jax.jit(f).trace(*a).lower(lowering_platforms=(platform,)).as_text())


def kept(f, *a) -> list[tuple]:
    """(dtype, shape) of the residuals of f."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(f, *a)[1], *a))
    return [(leaf.dtype.name, leaf.shape) for leaf in leaves if leaf.shape]


CELLS = [(name, mode) for name in LAYERS for mode in MODES if name != "moe" or mode == "default"]


@pytest.mark.core
@pytest.mark.parametrize(("name", "mode"), CELLS)
def test_nothing_is_quantized_twice(name, mode):
    found = {}
    for policy, remat in REMAT.items():
        f, w = block(name, nvfp4(mode), remat)
        found[policy] = calls(gradient(f), X, w)
    assert found["quantized"] == found["products"] == found["none"] > 0
    assert found["nothing"] > found["none"]


@pytest.mark.parametrize("name", ["dense", "grouped_mlp"])
def test_nor_is_it_by_the_kernels_of_a_gpu(name, monkeypatch):
    pretend(monkeypatch, HOPPER)
    found = {}
    for policy in ("none", "nothing", "quantized"):
        f, w = block(name, nvfp4(), REMAT[policy])
        found[policy] = calls(gradient(f), X, w, platform="cuda")
    forget()
    assert found["nothing"] > found["quantized"] == found["none"] > 0


RECIPES = {
    "layernorm_mlp": nvfp4("unquant"),
    "grouped_dense": nvfp4("default"),
    "dense": fp4.MXFP8BlockScaling(),  # codes above 240, which jax.checkpoint's rounding would make NaN
    "DotGeneral": fp4.CustomRecipe(forward=nvfp4(), dgrad=fp4.HIGH_PRECISION, wgrad=fp4.Float8CurrentScaling()),
}


@pytest.mark.core
@pytest.mark.parametrize("name", RECIPES)
def test_no_bit_changes(name):
    """Stochastic rounding included; and what is compiled quantizes no more than without."""
    results, found = {}, {}
    for policy in ("none", "quantized", "products"):
        f, w = block(name, RECIPES[name], REMAT[policy])
        results[policy], text = compiled(gradient(f), X, w)
        found[policy] = quantized(text)
    same(results["quantized"], results["none"])
    same(results["products"], results["none"])
    assert found["quantized"] <= found["none"] and found["products"] <= found["none"]


@pytest.mark.core
def test_names_change_no_program(monkeypatch):
    """Where there is no jax.checkpoint, what is compiled is what it would be without them."""
    programs = []
    for named in (True, False):
        if not named:
            for module, name in ((_planes, "named"), (_gather, "named"), (_modes, "checkpoint_name")):
                monkeypatch.setattr(module, name, lambda value, *_: value)
        f, w = block("layernorm_mlp", nvfp4(), REMAT["none"])
        text = jit(gradient(f)).lower(X, w).compile().as_text()
        programs.append(re.findall(r"= \S+ ([\w-]+)\(", text))
    assert programs[0] == programs[1]


# --- what is kept ---


def packed(*rows: int, blocked: int) -> list[tuple]:
    """Codes and block scales of an operand, as bytes."""
    return [("uint8", (*rows, blocked // 2)), ("uint8", (*rows, blocked // 16))]


FORWARD = packed(M, blocked=K) + packed(N, blocked=K)  # what makes y again
BACKWARD = packed(K, blocked=M) + packed(K, blocked=N)
DOTS = JAX.dots_saveable


@pytest.mark.core
@pytest.mark.parametrize(
    ("mode", "policy", "want"),
    [
        ("default", save_quantized, FORWARD + BACKWARD),
        ("default", JAX.save_from_both_policies(DOTS, save_quantized), FORWARD + BACKWARD),
        ("default", JAX.save_from_both_policies(DOTS, save_products), [*BACKWARD, ("bfloat16", (M, N))]),
        ("default", DOTS, []),  # the control: of itself it keeps nothing of ours
        ("dequant", save_quantized, FORWARD),
        ("unquant", save_quantized, FORWARD),  # and x, w, which are arguments
        ("unquant", save_products, [("bfloat16", (M, N))]),
    ],
)
def test_kept_is_what_the_policy_says(mode, policy, want):
    arguments = [("bfloat16", (M, K)), ("float32", (K, N))]
    f, w = block("dense", nvfp4(mode), partial(jax.checkpoint, policy=policy))
    got = kept(f, X, w)
    assert sorted(one for one in got if one not in arguments) == sorted(want)


@pytest.mark.core
def test_high_precision_residuals_have_a_name():
    """x of unquant, which here is computed inside: with the name it is kept, else it is computed again."""
    for name, times in ((checkpoint_policies.HIGH_PRECISION, 1), (checkpoint_policies.QUANTIZED, 0)):
        policy = JAX.save_only_these_names(name, checkpoint_policies.PRODUCT)
        f, w = block("dense", nvfp4("unquant"), partial(jax.checkpoint, policy=policy))
        arguments = kept(f, X, w).count(("bfloat16", (M, K)))
        assert arguments == 1 + times


@pytest.mark.core
def test_jax_lists_them_by_name(capsys):
    f, w = block("dense", nvfp4(), REMAT["quantized"])
    jax.ad_checkpoint.print_saved_residuals(f, X, w)
    listed = capsys.readouterr().out
    assert f"u8[{K},{M // 2}] named '{checkpoint_policies.QUANTIZED}'" in listed


# --- Flax ---


class Block(flax_linen.Module):
    recipe: object
    scanned: bool = False

    @flax_linen.compact
    def __call__(self, x, *_):
        x = jnp.tanh(linen.Dense(K, recipe=self.recipe, dtype=x.dtype)(jnp.sin(x)))
        x = jnp.tanh(linen.LayerNormMLP(N, K, recipe=self.recipe, dtype=x.dtype)(x))
        return (x, None) if self.scanned else x


def linen_stack(kind: str, policy, depth=2):
    """(loss of parameters, parameters) of a Linen model of Blocks; policy "none": without remat."""
    splits = dict(variable_axes={"params": 0}, split_rngs={"params": True, "sr": True})
    block = Block if policy == "none" else flax_linen.remat(Block, policy=policy)
    if kind == "remat":
        model = block(nvfp4())
    elif kind == "scan" or policy == "none":
        model = flax_linen.scan(block, length=depth, **splits)(nvfp4(), scanned=True)
    else:
        model = flax_linen.remat_scan(Block, lengths=(1, depth), policy=policy, **splits)(nvfp4())
    arguments = (X, None) if getattr(model, "scanned", False) else (X,)
    shapes = jax.eval_shape(model.init, {"params": KEY, "sr": KEY}, *arguments)
    variables = jax.tree.map(lambda leaf: normal(leaf.size, *leaf.shape) / 8, shapes)

    def apply(variables, x):
        y = model.apply(variables, x, *arguments[1:], rngs={"sr": KEY})
        return (y[0] if arguments[1:] else y).astype(jnp.float32)

    return apply, variables


@pytest.mark.core
@pytest.mark.parametrize("kind", ["remat", "scan", "remat_scan"])
def test_linen(kind):
    results, found = {}, {}
    for name, policy in (("none", "none"), ("nothing", None), ("quantized", save_quantized)):
        f, variables = linen_stack(kind, policy)
        found[name] = calls(gradient(f), variables, X)
        if kind == "scan" and name != "nothing":
            results[name] = jax.jit(gradient(f), compiler_options=EXACTLY)(variables, X)
    assert found["nothing"] > found["quantized"] == found["none"] > 0
    if results:
        same(results["quantized"], results["none"])


@pytest.mark.core
@pytest.mark.parametrize("scanned", [False, True])
def test_nnx(scanned):
    def step(remat, x):
        def once(layers, x):
            return jnp.tanh(layers[1](jnp.tanh(layers[0](jnp.sin(x)))))

        def make(rngs):
            how = dict(rngs=rngs, recipe=nvfp4(), dtype=jnp.bfloat16)
            return flax_nnx.List([nnx.Linear(K, K, **how), nnx.LayerNormMLP(K, N, **how)])

        rngs, once = flax_nnx.Rngs(0, sr=1), remat(once)
        if scanned:
            make = flax_nnx.split_rngs(splits=2)(flax_nnx.vmap(make))
            once = flax_nnx.scan(once, in_axes=(0, flax_nnx.Carry), out_axes=flax_nnx.Carry)
        loss = lambda layers: jnp.sum(once(layers, x).astype(jnp.float32) ** 2)  # noqa: E731
        return flax_nnx.grad(loss)(make(rngs))

    policies = dict(nothing=None, quantized=save_quantized)
    kinds = {"none": REMAT["none"]} | {name: partial(flax_nnx.remat, policy=p) for name, p in policies.items()}
    found = {name: calls(partial(step, remat), X) for name, remat in kinds.items()}
    assert found["nothing"] > found["quantized"] == found["none"] > 0
    if not scanned:
        same(*(jit(partial(step, kinds[name]))(X) for name in ("quantized", "none")))


# --- meshes ---


def sharded_block(remat, kind: str, payload=None):
    """A dense block on four devices, of a kernel that each has a shard of: FSDP by a WeightGather inside of shard_map,
    or on an Explicit mesh. And its operands."""
    how, recipe = mesh("Explicit" if kind == "Explicit" else "Auto", fsdp=DEVICES), nvfp4()
    if kind == "Explicit":
        once = remat(lambda x, w: jnp.tanh(fp4.dense(jnp.sin(x), w, recipe=recipe, key=KEY)))
        place = lambda a: jax.device_put(a, jax.NamedSharding(how, P("fsdp")))  # noqa: E731
        return how, once, (place(SHARDED_X), place(SHARDED_W))
    gather, specs = WeightGather("fsdp", 0, payload), Specs(x=P("fsdp"), kernel=P("fsdp"))
    layer = partial(fp4.dense, recipe=recipe, key=KEY, gather=gather, specs=specs)
    once = lambda x, w: jnp.tanh(layer(jnp.sin(x), w))  # noqa: E731
    cut = partial(jax.shard_map, mesh=how, in_specs=(P("fsdp"), P("fsdp")), out_specs=P("fsdp"))
    # the one around the other, either way
    f = cut(remat(once)) if kind == "inside" else remat(cut(once))
    return how, f, (SHARDED_X, SHARDED_W)


@pytest.mark.core
@pytest.mark.parametrize("kind", ["inside", "around", "Explicit"])
def test_sharded(kind):
    """Neither a quantized operand twice nor a gathered kernel kept: a shard of it, packed, moved twice."""
    results, found, moved = {}, {}, {}
    for policy in ("none", "nothing", "quantized"):
        how, f, arguments = sharded_block(REMAT[policy], kind)
        with jax.set_mesh(how):
            wide = lambda *a, f=f: f(*a).astype(jnp.float32)  # noqa: E731
            found[policy] = calls(gradient(wide), *arguments)
            if policy == "nothing":
                continue
            results[policy], text = compiled(gradient(wide), *arguments)
            moved[policy] = {(one.dtype, one.size) for one in gathers(text) if one.size >= SHARDED_W.size // 16}
            if policy == "quantized":
                residuals = jax.tree.leaves(jax.eval_shape(lambda *a, f=f: jax.vjp(f, *a)[1], *arguments))
    assert found["nothing"] > found["quantized"] == found["none"] > 0
    same(results["quantized"], results["none"])
    assert moved["quantized"] == moved["none"] and all(dtype == "u8" for dtype, _ in moved["none"])
    # As global arrays, a whole kernel of each device would count as many times as there are devices.
    codes = SHARDED_W.size // 2
    sizes = [leaf.size for leaf in residuals if leaf.dtype == jnp.uint8]
    assert codes in sizes and DEVICES * codes not in sizes


@pytest.mark.core
def test_a_sum_over_devices_is_kept():
    """Of a product whose k is cut: with the whole sum kept, no backward adds the parts up again."""
    how, found = mesh("Explicit", fsdp=DEVICES), {}
    x, w = (
        jax.device_put(a, jax.NamedSharding(how, P(*cut)))
        for a, cut in ((SHARDED_X, (None, "fsdp")), (SHARDED_W, ("fsdp",)))
    )
    for policy in ("none", "quantized", "products"):
        once = REMAT[policy](lambda x, w: jnp.tanh(fp4.dense(jnp.sin(x), w, recipe=nvfp4("unquant"))))
        with jax.set_mesh(how):
            text = jax.jit(gradient(lambda *a, f=once: f(*a).astype(jnp.float32))).lower(x, w).as_text()
        found[policy] = text.count("stablehlo.all_reduce")
    assert found["quantized"] > found["products"] == found["none"]


# --- the host's memory ---


@pytest.mark.core
def test_offload():
    results, found = {}, {}
    for name, remat in (("none", REMAT["none"]), ("host", partial(jax.checkpoint, policy=save_and_offload))):
        f, w = block("dense", nvfp4(), remat)
        results[name], found[name] = jit(gradient(f))(X, w), calls(gradient(f), X, w)
    same(results["host"], results["none"])
    assert found["host"] == found["none"]
    leaves = jax.tree.leaves(jax.vjp(f, X, w)[1])
    where = {(leaf.dtype.name, leaf.shape): leaf.sharding.memory_kind for leaf in leaves}
    assert {where[one] for one in FORWARD + BACKWARD} == {"pinned_host"}
    text = jax.jit(gradient(f)).trace(X, w).lower(lowering_platforms=("cuda",)).as_text()
    to_host = re.findall(r"annotate_device_placement.*pinned_host", text)
    assert len(to_host) >= len(FORWARD + BACKWARD)


def test_policies_by_name():
    for name in ("save_quantized", "save_products", "save_and_offload"):
        assert checkpoint_policies.named(name) is getattr(checkpoint_policies, name)
    refused(lambda: checkpoint_policies.named("save_quantised"), ValueError, "named: name is 'save_quantised'")
    refused(lambda: checkpoint_policies.named(["a"]), ValueError, r"named: name is \['a'\]")
