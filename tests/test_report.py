"""report: what it says is what the program does."""

import concurrent.futures

import jax
import jax.numpy as jnp
import pytest

import jax_fp4 as fp4
from jax_fp4 import _record

X, W = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((64, 20))
KEY = jax.random.key(0)


def loss(recipe):
    return lambda x, w: fp4.dense(x, w, recipe=recipe, key=KEY).astype(jnp.float32).sum()


@pytest.mark.core
def test_a_forgotten_recipe_is_visible():
    """E15."""
    report = fp4.report(loss(None), X, W)
    (row,) = report.rows
    assert not row.quantized and row.note == "not quantized: no recipe given and no autocast context"
    assert not report.calls and "0 of 1 layer calls quantized" in str(report)
    (row,) = fp4.report(loss(fp4.HIGH_PRECISION), X, W).rows
    assert row.note == "not quantized: recipe=HIGH_PRECISION"
    with fp4.autocast(fp4.HIGH_PRECISION):
        (row,) = fp4.report(loss(None), X, W).rows
    assert row.note == "not quantized: autocast(HIGH_PRECISION)"


@pytest.mark.core
@pytest.mark.parametrize(
    ("mode", "dx", "dw"),
    [
        ("default", "nvfp4 x nvfp4", "nvfp4 x nvfp4"),
        ("unquant", "high precision x high precision", "high precision x high precision"),
        ("dequant", "high precision x nvfp4", "nvfp4 x high precision"),
    ],
)
def test_operand_formats_of_the_three_products(mode, dx, dw):
    """D3."""
    (row,) = fp4.report(loss(fp4.NVFP4BlockScaling(mode)), X, W).rows
    assert (row.quantized, row.forward, row.dx, row.dw) == (True, "nvfp4 x nvfp4", dx, dw)
    assert f"backward_mode={mode}" in row.note
    (row,) = fp4.report(loss(fp4.NVFP4BlockScaling(mode, row_scaled_activation=True)), X, W).rows
    assert row.forward == "row-scaled nvfp4 x nvfp4"


@pytest.mark.core
@pytest.mark.parametrize("mode", ["default", "unquant", "dequant"])
def test_calls_are_the_custom_calls_of_the_program(mode):
    step = jax.jit(jax.grad(loss(fp4.NVFP4BlockScaling(mode)), (0, 1)))
    step(X, W)  # traced before: the report traces again
    report = fp4.report(step, X, W)
    text = str(jax.make_jaxpr(step)(X, W))
    for op in ("quantize", "quantize_transpose"):
        assert sum(call.op == op for call in report.calls) == text.count(f"target_name=jax_fp4_{op}\n")
    # w [64, 20] is padded along n, and dy [32, 20] too, where they are quantized along it.
    assert sum(call.padding for call in report.calls) == (64 * 12 + 32 * 12 if mode == "default" else 0)


NV, MX, HIGH = fp4.NVFP4BlockScaling, fp4.MXFP8BlockScaling("default"), fp4.HIGH_PRECISION
NONE = "high precision x high precision"
ROWS, FP8 = NV("default", row_scaled_activation=True), fp4.Float8CurrentScaling("default")


@pytest.mark.parametrize(
    ("recipe", "products"),
    [
        (
            fp4.MXFP8BlockScaling("default", fp8_format="HYBRID"),
            ("mxfp8 x mxfp8", "mxfp8_e5m2 x mxfp8", "mxfp8 x mxfp8_e5m2"),
        ),
        (
            fp4.Float8BlockScaling("dequant"),
            ("float8_block x float8_block", "high precision x float8_block", "float8_block x high precision"),
        ),
        (
            fp4.CustomRecipe(ROWS, MX, HIGH),
            ("row-scaled nvfp4 x nvfp4", "mxfp8 x mxfp8", NONE),
        ),
        (
            fp4.CustomRecipe(MX, NV("dequant"), FP8),
            ("mxfp8 x mxfp8", "high precision x mxfp8", "float8 x float8_e5m2"),
        ),
        (fp4.CustomRecipe(HIGH, FP8, HIGH), (NONE, "float8_e5m2 x float8", NONE)),
    ],
)
def test_operand_formats_of_every_recipe_are_those_of_the_program(recipe, products):
    """D3: the report says it, and the traced program quantizes so."""
    step = jax.grad(loss(recipe), (0, 1))
    report = fp4.report(step, X, W)
    (row,) = report.rows
    assert (row.forward, row.dx, row.dw) == products
    text = str(jax.make_jaxpr(step)(X, W))
    ops = ("quantize", "quantize_transpose", "quantize_float8", "quantize_transpose_float8")
    calls = {op: text.count(f"target_name=jax_fp4_{op}\n") for op in ops}
    assert sum(calls.values()) == len(report.calls)
    formats = {side.split()[-1] for product in products for side in product.split(" x ")} - {"precision"}
    assert bool(calls["quantize"] + calls["quantize_transpose"]) == ("nvfp4" in formats)
    assert bool(calls["quantize_float8"] + calls["quantize_transpose_float8"]) == bool(formats - {"nvfp4"})


def test_padding_and_what_is_kept_of_each_layer():
    """G7. Of [32,64] @ [64,20]: without a gradient in the program too, since a report is read before training."""
    rows = {mode: fp4.report(loss(fp4.NVFP4BlockScaling(mode)), X, W).rows[0] for mode in ("default", "unquant")}
    assert rows["default"].padding == 64 * 12 + 32 * 12 and rows["unquant"].padding == 0
    assert rows["unquant"].residual_bytes == X.nbytes + W.nbytes
    packed = 64 * (32 // 2 + 32 // 16) + 64 * (32 // 2 + 32 // 16)  # x along rows, w along its 20 columns, as 32
    assert rows["default"].residual_bytes == packed + 4 + 4 + 8  # two amaxes, a key
    (row,) = fp4.report(loss(fp4.MXFP8BlockScaling("default")), X, W).rows
    assert row.padding == 64 * 12 + 32 * 12 and row.residual_bytes == 64 * (32 + 1) + 64 * (32 + 1)
    assert "XLA's dot" in row.implementation and row.implementation in str(
        fp4.report(loss(fp4.MXFP8BlockScaling()), X, W)
    )


def test_an_mlp_has_a_row_for_each_product():
    sizes, w_in, w_out = jnp.array([20, 12], jnp.int32), jnp.ones((2, 64, 32)), jnp.ones((2, 16, 64))
    recipes = dict(recipe=fp4.MXFP8BlockScaling("default"), out_recipe=fp4.HIGH_PRECISION)
    first, second = fp4.report(lambda x: fp4.grouped_mlp(x, w_in, w_out, sizes, **recipes), X).rows
    assert (first.forward, second.forward) == ("mxfp8 x mxfp8", "high precision")
    assert first.residual_bytes > 0 == second.residual_bytes


def test_a_frozen_kernel_has_the_format_it_came_in():
    frozen = fp4.quantize(W, "mxfp8", axis=0, block=(32, 32))
    for mode, dx in (("default", "nvfp4 x mxfp8"), ("dequant", "high precision x mxfp8")):
        (row,) = fp4.report(lambda x, mode=mode: fp4.dense(x, frozen, recipe=NV(mode), key=KEY), X).rows
        assert (row.forward, row.dx, row.dw) == ("nvfp4 x mxfp8", dx, "none, the kernel is frozen")
    (row,) = fp4.report(loss(fp4.Float8BlockScaling("default", power_of_two=False, eps=1.0)), X, W).rows
    assert row.note.endswith("power_of_two=False, eps=1.0")


def test_a_state_that_nobody_differentiates_is_not_kept():
    recipe = fp4.DelayedScaling("default")
    state = fp4.delayed.init(recipe)
    (row,) = fp4.report(lambda x, w: fp4.dense(x, w, recipe=recipe, state=state), X, W).rows
    assert X.size + W.size <= row.residual_bytes <= X.size + W.size + 64  # codes, and a few scales


def test_a_frozen_kernel_that_is_only_evaluated():
    """Its other plane is not there to differentiate with; the report of an evaluation needs none."""
    frozen = fp4.quantize(W, axis=0)
    (row,) = fp4.report(lambda x: fp4.dense(x, frozen, recipe=NV("default")), X).rows
    assert row.quantized and (row.padding, row.residual_bytes) == (0, 0)
    sizes, stacked = jnp.array([32], jnp.int32), fp4.quantize(W[None], axis=0, batch_dims=1)
    w_out = jnp.ones((1, 20, 16))
    mlp = lambda x: fp4.grouped_mlp(x, stacked, w_out, sizes, activation="relu", recipe=NV("default"))  # noqa: E731
    assert all(row.quantized for row in fp4.report(mlp, X).rows)


def test_a_refusal_is_visible():
    """E14: a named implementation runs or raises; nothing catches."""
    with pytest.raises(fp4.UnsupportedError, match="implementation is 'cuda'"):
        fp4.report(lambda x: fp4.quantize(x, implementation="cuda").codes, X)
    with fp4.strict(), pytest.raises(fp4.UnsupportedError, match="multiple of 16"):
        fp4.report(loss(fp4.NVFP4BlockScaling()), X, W)


def test_nothing_is_recorded_outside_a_report():
    jax.make_jaxpr(loss(fp4.NVFP4BlockScaling("unquant")))(X, W)
    report = fp4.report(lambda x: x + 1, X)
    assert report.rows == () and report.calls == ()


def test_every_thread_traces_again():
    step = jax.jit(loss(fp4.NVFP4BlockScaling("unquant")))
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        assert len(fp4.report(step, X, W).rows) == 1
        assert len(other.submit(fp4.report, step, X, W).result().rows) == 1


def rules_of(*patterns):
    return fp4.Rules([(pattern, fp4.NVFP4BlockScaling("unquant")) for pattern in patterns])


def named(path):
    """A layer without a framework."""

    def call(x, w):
        with _record.layer(path):
            return fp4.dense(x, w)

    return call


def test_what_chose_the_recipe():
    (row,) = fp4.report(loss(fp4.NVFP4BlockScaling("unquant")), X, W).rows
    assert row.chosen_by == "recipe=NVFP4BlockScaling" and "rule" not in row.note
    with fp4.autocast(rules_of("a")):
        (row,) = fp4.report(named("a"), X, W).rows
        assert row.layer == "a" and row.chosen_by == "rule 'a' = NVFP4BlockScaling" and row.chosen_by in row.note


@pytest.mark.core
def test_rules_that_match_nothing_are_warned_of():
    step = jax.jit(named("a"))
    with fp4.autocast(rules_of("a")):
        step(X, W)

    def inside(x, w):
        with fp4.autocast(rules_of("a", "b")):
            return step(x, w) + step(x, w)

    with fp4.autocast(rules_of("c", ".*")), pytest.warns(UserWarning, match="matched no layer") as caught:
        report = fp4.report(inside, X, W)
    assert report.unmatched == ("c", "b")
    assert [str(each.message).split(";")[0] for each in caught] == [
        "the rule 'c' matched no layer",
        "the rule 'b' matched no layer",
    ]
    assert all(each.filename == __file__ for each in caught)
    assert "the rule 'c' matched no layer; it needs to match a whole path" in str(report)
    with fp4.autocast(rules_of("a")):
        assert fp4.report(step, X, W).unmatched == ()  # and no warning, which would be an error here
