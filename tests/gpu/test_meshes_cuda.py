"""Two GPUs against one: codes of what is cut bit for bit, and layers on meshes. Skipped where there is one GPU, unless
JAX_FP4_REQUIRE names two-gpus."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from required import missing
from sharded import close, normal, nvfp4, same

import jax_fp4 as fp4
from jax_fp4 import Specs, WeightGather

KINDS = ("Auto", "Explicit")
CUTS = {"rows": P(None, "both", None), "columns": P(None, None, "both"), "experts": P("both")}
FORMS = {
    "blocks": {},
    "tiles": {"block": (16, 16)},
    "transformed": {"hadamard": True},
    "row-scaled": {"row_scaled": True},
    "drawn": {"key": jax.random.key_data(jax.random.key(3))},
}


@pytest.fixture(scope="module")
def gpus(gpu):
    found = jax.devices("cuda")[:2]
    if len(found) < 2:
        missing("two-gpus", "there is one GPU")
    return found


def mesh(gpus, kind="Auto"):
    return jax.make_mesh((2,), ("both",), devices=gpus, axis_types=(getattr(AxisType, kind),))


def on_one(gpus, function, *arguments):
    with jax.default_device(gpus[0]):
        return jax.jit(function)(*jax.device_put(arguments, gpus[0]))


def on_both(gpus, function, kind, specs, *arguments):
    both = mesh(gpus, kind)
    with jax.set_mesh(both):
        placed = jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(both, spec)), arguments, specs)
        return jax.jit(function)(*placed)


def experts_of(dtype):
    """Four matrices, with an outlier in a part of them."""
    return normal(0, 4, 1024, 768, dtype=dtype).at[3, 900, 700].set(50)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", CUTS)
def test_codes_of_a_cut_weight(gpus, cut, form, dtype):
    w = experts_of(dtype)
    quantize = partial(fp4.quantize_transpose, batch_dims=1, dtype=jnp.bfloat16, **FORMS[form])
    want = on_one(gpus, quantize, w)
    for kind in KINDS:
        same(on_both(gpus, quantize, kind, (CUTS[cut],), w), want, kind)

    def of_part(w):
        return jax.tree.leaves(quantize(w, specs=Specs(x=CUTS[cut])))

    rows, columns = CUTS[cut], P(*(*CUTS[cut], None, None)[:1], *(*CUTS[cut], None, None)[2:0:-1])
    amax = P(CUTS[cut][0]) if cut == "experts" else P()
    of_row, of_column = amax, amax
    if form == "row-scaled":
        of_row, of_column = P(*rows[:2]), P(*columns[:2])
    stored = [rows, rows, of_row, columns, columns, of_column]
    parts = jax.shard_map(of_part, mesh=mesh(gpus), in_specs=CUTS[cut], out_specs=stored, check_vma=False)
    same(jax.jit(parts)(w), jax.tree.leaves(want))


@pytest.mark.parametrize("mode", ["default", "dequant", "unquant"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_gathered_kernel(gpus, mode, dim):
    """The codes of the whole kernel: what our kernels multiply is the same to the bit. For fewer rows cuBLAS adds up in
    another order: dx of unquant and dequant."""
    x, kernel, dy = normal(1, 512, 1024, dtype=jnp.bfloat16), experts_of(jnp.float32)[3], normal(2, 512, 768)

    def layer(x, kernel, dy, **where):
        y, pull = jax.vjp(
            lambda x, w: fp4.dense(x, w, recipe=nvfp4(mode, stochastic_rounding=False), **where), x, kernel
        )
        return y, *pull(dy.astype(y.dtype))

    want = on_one(gpus, layer, x, kernel, dy)
    cut = P(*[None] * dim, "both")
    where = dict(gather=WeightGather("both", dim), specs=Specs(x=P("both"), kernel=cut))
    specs = dict(in_specs=(P("both"), cut, P("both")), out_specs=(P("both"), P("both"), cut))
    parts = jax.shard_map(partial(layer, **where), mesh=mesh(gpus), check_vma=False, **specs)
    y, dx, dw = jax.jit(parts)(x, kernel, dy)
    same(y, want[0])
    close(dx, want[1], 0 if mode == "default" else 1e-3)
    close(dw, want[2], 1e-6)


MOE = {
    "data": (P("both"), P(), P()),
    "fsdp, rows": (P("both"), P(None, "both"), P(None, "both")),
    "fsdp, columns": (P("both"), P(None, None, "both"), P(None, None, "both")),
    "expert": (P("both"), P("both"), P("both")),
    "tensor": (P(), P(None, None, "both"), P(None, "both")),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["default", "dequant", "unquant"])
@pytest.mark.parametrize("name", MOE)
def test_moe(gpus, name, mode, kind):
    """On a mesh as on one GPU, with uneven experts: y to the bit, unless it is a sum of both GPUs'. In default the
    gradients of kernels have other column-wise blocks where the rows of an expert lie on both."""
    d, f, experts = 512, 1024, 4
    free = dict(x=normal(0, 2048, d, dtype=jnp.bfloat16), logits=normal(1, 2048, experts) + jnp.arange(experts))
    free |= dict(w_in=normal(2, experts, d, 2 * f) * d**-0.5, w_out=normal(3, experts, f, d) * f**-0.5)
    dy = normal(4, 2048, d)
    of_x, of_in, of_out = MOE[name]
    specs = (Specs(x=of_x, kernel=of_in), Specs(kernel=of_out)) if kind == "Auto" else None

    def step(free, dy, specs=None):
        def loss(free):
            recipe = nvfp4(mode, stochastic_rounding=False)
            y, routing = fp4.moe(**free, top_k=2, recipe=recipe, specs=specs)
            return jnp.sum(y.astype(jnp.float32) * dy) + 10 * routing.aux_loss, y

        return jax.grad(loss, has_aux=True)(free)[::-1]

    want = on_one(gpus, step, free, dy)
    parts = dict(x=of_x, logits=of_x, w_in=of_in, w_out=of_out)
    y, grads = on_both(gpus, partial(step, specs=specs), kind, (parts, of_x), free, dy)
    tolerance = 1e-2 if name == "tensor" else 1e-5  # the former of partial sums in bfloat16
    close(y, want[0], tolerance * (name == "tensor"))
    other_blocks = mode == "default" and of_x == P("both") and name != "expert"
    for of_one, grad in grads.items():
        blocks = other_blocks and of_one in ("w_in", "w_out")
        close(grad, want[1][of_one], 0.25 if blocks else tolerance, of_one)  # of two roundings to four bits: 0.16
