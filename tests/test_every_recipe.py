"""What is asked of recipes beside the test matrix: that contexts leave a layer's own recipe alone, microbatches, every
contraction length, and what users of other libraries met (faults.md)."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explicit import products
from grouped_layers import KEY, normal
from matrix import MODES, OWN, RECIPES
from products import error_of
from test_matrix import scales, state_with_history
from trees import same_tree

import jax_fp4 as fp4
from jax_fp4 import linen

NVFP4, MXFP8, FLOAT8 = (
    make("default") for make in (fp4.NVFP4BlockScaling, fp4.MXFP8BlockScaling, fp4.Float8CurrentScaling)
)
SIZES = np.int32([32, 0, 21])


def explicit(name, x, w, dy, sizes=None, mode="default"):
    """y, dx, dw in float64."""
    found = products(RECIPES[name].meaning(mode), np.asarray(x), w, np.asarray(dy), sizes=sizes, key=KEY)
    return found.y, found.dx, found.dw


def close(got, want):
    for a, b in zip(got, want, strict=True):
        assert error_of(a, b) <= 1e-6


# --- a recipe of one's own inside a context ---


@pytest.mark.core
@pytest.mark.parametrize("jit", [False, True])
def test_an_mxfp8_expert_inside_nvfp4(jit):
    """Forward and backward are MXFP8's, whatever the context of either is and whatever runs in between."""
    x, w, dy = normal(1, 60, 40), normal(2, 3, 40, 24), normal(3, 60, 24)
    sizes = jnp.asarray(SIZES)
    expert = lambda x, w: fp4.grouped_dense(x, w, sizes, recipe=MXFP8)  # noqa: E731
    other = lambda x, w: fp4.grouped_dense(x, w, sizes, key=KEY)  # noqa: E731  of the context
    expert, other = (jax.jit(f) if jit else f for f in (expert, other))
    with fp4.autocast(NVFP4):
        y, pull = jax.vjp(expert, x, w)
        y_other, pull_other = jax.vjp(other, x, w)
    with fp4.autocast(FLOAT8):
        expert(x, w)
        other(x, w)
        with fp4.autocast(None):
            got = y, *pull(dy)
        got_other = y_other, *pull_other(dy)
    close(got, explicit("mxfp8", x, w, dy, SIZES))
    close(got_other, explicit("nvfp4", x, w, dy, SIZES))


class Model(nn.Module):
    """A dense layer, then experts."""

    recipe: object = None  # of the experts

    @nn.compact
    def __call__(self, x, sizes):
        x = linen.Dense(40, use_bias=False, name="dense")(x)
        return linen.GroupedDense(24, 3, use_bias=False, recipe=self.recipe, name="experts")(x, sizes)


@pytest.mark.core
@pytest.mark.parametrize("chosen", ["by the layer", "by a rule"])
def test_an_mxfp8_expert_inside_an_nvfp4_model(chosen):
    x, dy, sizes = normal(1, 60, 32), normal(3, 60, 24), jnp.asarray(SIZES)
    model = Model(MXFP8 if chosen == "by the layer" else None)
    params = model.init(KEY, x, sizes)["params"]
    kernels = params["dense"]["kernel"], params["experts"]["kernel"]
    apply = lambda params, x: model.apply({"params": params}, x, sizes, rngs={"sr": KEY})  # noqa: E731
    rules = fp4.Rules([("experts", MXFP8)])
    with fp4.autocast(NVFP4), fp4.autocast(rules if chosen == "by a rule" else NVFP4):
        y, pull = jax.vjp(apply, params, x)
    with fp4.autocast(FLOAT8):
        apply(params, x)
        grads, dx = pull(dy)
    h = fp4.dense(x, kernels[0], recipe=NVFP4)
    want_y, dh, d_experts = explicit("mxfp8", h, kernels[1], dy, SIZES)
    close((y, grads["experts"]["kernel"]), (want_y, d_experts))
    # The dense layer is NVFP4: it draws with Linen's key, so only its y above and its deterministic part are compared.
    plain = fp4.NVFP4BlockScaling("default", stochastic_rounding=False)
    near = jax.vjp(partial(fp4.dense, recipe=plain), x, kernels[0])[1](jnp.asarray(dh, jnp.float32))
    for got, other in zip((dx, grads["dense"]["kernel"]), near, strict=True):
        assert 0 < error_of(got, other) < 0.2


# --- microbatches ---


@pytest.mark.core
def test_microbatches_of_whole_blocks_are_one_batch_in_mxfp8():
    """No scale is a tensor's: four of 32 rows have the codes of one of 128, and dw adds up."""
    x, w, dy = normal(1, 128, 40), normal(2, 40, 24), normal(3, 128, 24)
    step = lambda x, dy: jax.vjp(partial(fp4.dense, recipe=MXFP8), x, w)[1](dy)  # noqa: E731
    dx, dw = step(x, dy)
    parts = [step(x[i : i + 32], dy[i : i + 32]) for i in range(0, 128, 32)]
    same_tree(jnp.concatenate([part[0] for part in parts]), dx)
    close((sum(part[1] for part in parts),), (dw,))


@pytest.mark.parametrize("name", ["float8", "float8 power of two", "nvfp4"])
def test_microbatches_under_a_scale_of_the_tensor(name):
    """Each has scales of its own: dw is the sum of their products, not that of the whole batch."""
    x, w, dy = normal(1, 32, 40), normal(2, 40, 24), normal(3, 32, 24)
    x = x * (1 + jnp.arange(32)[:, None])  # amaxes differ
    recipe = RECIPES[name].make("default")
    step = lambda x, dy: jax.vjp(partial(fp4.dense, recipe=recipe, key=KEY), x, w)[1](dy)[1]  # noqa: E731
    rows = [slice(i, i + 8) for i in range(0, 32, 8)]
    got = sum(step(x[r], dy[r]) for r in rows)
    close((got,), (sum(explicit(name, x[r], w, dy[r])[2] for r in rows),))
    # (Under powers of two nearly every code is the same, and it is that as well.)
    assert (error_of(got, explicit(name, x, w, dy)[2]) > 1e-4) == (name != "float8 power of two")


# --- extents ---

LENGTHS = (16, 32, 48, 64, 96, 112, 128, 192, 256, 384, 448, 512)
EVERY = [(name, mode) for name, level in RECIPES.items() for mode in ([OWN] if level.modes else MODES)]
EVERY = [(name, mode) for name, mode in EVERY if name != "no recipe" and (name, mode) not in
         (("delayed", "unquant"), ("delayed", "dequant"))]  # fmt: skip


def check_extents(name, mode, m, k, n):
    """y, dx, dw of float32 against explicit products."""
    x, w, dy = normal(k, m, k), normal(n, k, n), normal(m, m, n)
    recipe, how, of_state = RECIPES[name].make(mode), {}, None
    if name == "delayed":
        states = (state_with_history((), recipe.amax_history_len),)
        how, of_state = dict(state=states[0]), scales(states, 0)
    y, pull = jax.vjp(lambda x, w: fp4.dense(x, w, recipe=recipe, key=KEY, **how), x, w)
    found = products(RECIPES[name].meaning(mode), np.asarray(x), w, np.asarray(dy), key=KEY, scales=of_state)
    close((y, *pull(dy)), (found.y, found.dx, found.dw))


@pytest.mark.parametrize(
    ("name", "mode", "k", "n"),
    # Every length and both of C9's layers, one for each recipe and mode.
    [(*of, LENGTHS[i % 12], (10, 16, 24)[i % 3]) for i, of in enumerate(EVERY) if of[1] in ("default", OWN)],
)
def test_contraction_lengths(name, mode, k, n):
    """B6: some length with each recipe; test_every_contraction_length has all of them."""
    check_extents(name, mode, 20, k, n)


@pytest.mark.core
@pytest.mark.parametrize("name", [name for name, mode in EVERY if mode in ("default", OWN) and "nvfp4" not in name[:5]])
def test_a_layer_that_only_the_backward_could_refuse(name):
    """C9: 64 -> 10; NVFP4's are in test_dense.py."""
    check_extents(name, OWN if RECIPES[name].modes else "default", 20, 64, 10)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mode"), EVERY)
def test_every_contraction_length(name, mode):
    """B6 and C9, whole."""
    for k in LENGTHS:
        check_extents(name, mode, 20, k, 24)
    for n in (10, 16):
        check_extents(name, mode, 20, 64, n)


# --- scales ---


@pytest.mark.parametrize("axis", [-1, 0])
@pytest.mark.parametrize("block", [(1, 32), (32, 32)])
def test_mxfp8_codes_follow_from_the_stored_scale(axis, block):
    """A14: amaxes of 1.9 * 2^j."""
    x = np.clip(np.asarray(normal(4, 128, 128)), -1.9, 1.9)
    x[::32, ::32] = 1.9
    x *= np.kron(np.exp2(np.arange(16.0).reshape(4, 4) * 3 - 20), np.ones((32, 32))).astype(np.float32)
    q = fp4.quantize(jnp.asarray(x), "mxfp8", axis=axis, block=block)
    scale = np.repeat(np.asarray(q.block_scale).astype(np.float32), 32, -1)
    oriented = x if axis == -1 else x.T
    codes = np.clip(oriented / scale, -448, 448).astype(q.codes.dtype)
    np.testing.assert_array_equal(np.asarray(q.codes).view(np.uint8), codes.view(np.uint8))
    assert (np.log2(scale) % 1 == 0).all()


@pytest.mark.core
@pytest.mark.parametrize(("format", "largest"), [("mxfp8", 448), ("mxfp8_e5m2", 57344)])
def test_a_block_that_ends_at_the_largest_code_has_scale_one(format, largest):
    """A15."""
    x = jnp.zeros((2, 64)).at[0, 3].set(largest).at[1, 40].set(np.nextafter(np.float32(largest), np.float32(1e9)))
    q = fp4.quantize(x, format)
    np.testing.assert_array_equal(np.asarray(q.block_scale).astype(np.float32), [[1, 2.0**-127], [2.0**-127, 2]])
    assert q.codes[0, 3] == largest
