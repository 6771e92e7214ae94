"""layernorm_dense and layernorm_mlp: Flax's norms, then the products of each mode on the normalized output."""

import itertools
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_layers import KEY, MODES, NONE, close, gradients, in_numpy, kept, normal, packed, quantizations, recipe
from products import refused
from trees import same_tree

import jax_fp4 as fp4
from jax_fp4 import _planes

M, K, N, H = 40, 24, 10, 36  # no multiples of 16; h has 36 columns, the second input 18
ALL = (*MODES, NONE)
DEFAULT_IS_CORE = [pytest.param(mode, marks=pytest.mark.core if mode == "default" else ()) for mode in ALL]
NORMS = ("layernorm", "rmsnorm")
X = normal(1, M, K) * 3 + 1
SCALE, NORM_BIAS = normal(2, K) / 4 + 1, normal(3, K)
KERNEL, BIAS, DY = normal(4, K, N) / 4, normal(5, N), normal(6, M, N)
DENSE = dict(x=X, scale=SCALE, norm_bias=NORM_BIAS, kernel=KERNEL, bias=BIAS)
W_IN, W_OUT, B_IN = normal(7, K, H) / 4, normal(8, H // 2, N), normal(9, H)
MLP = dict(x=X, scale=SCALE, norm_bias=NORM_BIAS, w_in=W_IN, w_out=W_OUT, b_in=B_IN, b_out=BIAS)


def of_norm(arrays, norm):
    return arrays if norm == "layernorm" else arrays | dict(norm_bias=None)


def flax_norm(x, scale, norm_bias, norm="layernorm", epsilon=1e-6, zero_centered_scale=False):
    """By Flax, in x's dtype."""
    module = nn.LayerNorm(epsilon, x.dtype, use_bias=norm_bias is not None) if norm == "layernorm" else nn.RMSNorm(
        epsilon, x.dtype
    )  # fmt: skip
    params = {"scale": 1 + scale if zero_centered_scale else scale}
    return module.apply({"params": params if norm_bias is None else params | {"bias": norm_bias}}, x)


def run(layer, dy, arrays, **settings):
    """y and gradients, in NumPy."""
    return in_numpy(jax.jit(lambda dy, arrays: gradients(partial(layer, **settings), dy, **arrays)))(dy, arrays)


def flax_dense(x, scale, norm_bias, kernel, bias=None, **settings):
    y = flax_norm(x, scale, norm_bias, **settings) @ kernel.astype(x.dtype)
    return y if bias is None else y + bias.astype(x.dtype)


# --- against Flax ---


@pytest.mark.core
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("settings", "absent"),
    [({}, ()), (dict(epsilon=0.5), ("bias",)), (dict(zero_centered_scale=True), ("norm_bias",))],
)
def test_high_precision_is_flax(norm, settings, absent):
    """Every gradient; a row of zeros, a constant row and a huge one beside the others."""
    x = X.at[0].set(0).at[1].set(3).at[2].multiply(1e6)
    arrays = of_norm(DENSE | dict(x=x) | dict.fromkeys(absent), norm)
    got = run(fp4.layernorm_dense, DY, arrays, norm=norm, **settings)
    want = run(flax_dense, DY, arrays, norm=norm, **settings)
    for name, tolerance in (("x", 1e-5), ("y", 2e-6)):  # by rows: that of the constant row hides the others
        for rows in (slice(0, 1), slice(1, 2), slice(2, 3), slice(3, None)):
            if name == "y" or rows != slice(2, 3):  # the gradient of the huge row is a difference near 0
                close(got[name][rows], want[name][rows], tolerance, name)
    close({n: a for n, a in got.items() if n != "x"}, {n: a for n, a in want.items() if n != "x"}, 1e-5)


@pytest.mark.parametrize("norm", NORMS)
def test_a_constant_row_has_no_negative_variance(norm):
    """E[x^2] - E[x]^2 of 64 rows of one value each, some of which it leaves below -epsilon."""
    x = jnp.broadcast_to(1000 + normal(1, 64, 1), (64, K))
    y = jax.jit(partial(fp4.layernorm_dense, norm=norm))(x, SCALE, None, KERNEL)
    assert bool(jnp.isfinite(y).all())


@pytest.mark.parametrize("norm", NORMS)
def test_statistics_of_narrow_inputs_are_float32(norm):
    arrays = of_norm(DENSE | dict(x=X.astype(jnp.bfloat16)), norm)
    settings = dict(norm=norm, kernel=jnp.eye(K), bias=None)
    x, scale, norm_bias = (arrays[n] for n in ("x", "scale", "norm_bias"))
    same_tree(fp4.layernorm_dense(x, scale, norm_bias, **settings), flax_norm(x, scale, norm_bias, norm))
    got = run(fp4.layernorm_dense, DY.astype(x.dtype), arrays, norm=norm)
    assert {n: a.dtype.name for n, a in got.items()} == {
        n: "bfloat16" if n in ("x", "y") else "float32" for n in got
    }  # fmt: skip


@pytest.mark.core
@pytest.mark.parametrize("norm", NORMS)
def test_mlp_in_high_precision_is_flax(norm):
    def written(x, scale, norm_bias, w_in, w_out, b_in, b_out):
        gate, linear = jnp.split(flax_norm(x, scale, norm_bias, norm) @ w_in + b_in, 2, axis=-1)
        return (jax.nn.silu(gate) * linear) @ w_out + b_out

    arrays = of_norm(MLP, norm)
    close(run(fp4.layernorm_mlp, DY, arrays, norm=norm), run(written, DY, arrays), 1e-5)


# --- the operands of each mode ---


def operands_of(a, w, mode, tiles=True):
    """(Q(a), Q(w)) of the forward, (w for dx, a for dw) of the backward, decoded or quantized by hand."""
    qa, qa_t = fp4.quantize_transpose(a, hadamard=True)
    qw_n, qw_k = fp4.quantize_transpose(w, block=(16, 16) if tiles else (1, 16), dtype=a.dtype)
    forward = qa, qw_k
    match mode:
        case "default":
            return forward, (qw_n, qa_t)
        case "unquant":
            return forward, (w.astype(a.dtype), a)
        case "dequant":
            return forward, (fp4.dequantize(qw_k), fp4.dequantize(qa))


def products(a, w, dy, mode, key=KEY):
    """y, da, dw of one product by hand, y and dw in float32."""
    (qa, qw), (for_dx, for_dw) = operands_of(a, w, mode)
    along_n, along_m = fp4.quantize_transpose(dy, hadamard=True, key=key) if mode == "default" else (dy, dy)
    wide = partial(fp4.matmul, preferred_element_type=jnp.float32)
    return wide(qa, qw), wide(along_n, for_dx.mT).astype(a.dtype), wide(for_dw.mT, along_m)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("mode", DEFAULT_IS_CORE[:3])
@pytest.mark.parametrize("norm", NORMS)
def test_each_product_takes_the_operands_of_its_mode(norm, mode, dtype):
    """Against products written out by hand, and Flax's norm around them."""
    arrays = of_norm(DENSE | dict(x=X.astype(dtype)), norm)
    dy, free = DY.astype(dtype), {n: a for n, a in arrays.items() if n in ("x", "scale", "norm_bias") and a is not None}
    got = run(fp4.layernorm_dense, dy, arrays, norm=norm, recipe=recipe(mode), key=KEY)
    a, pull = jax.vjp(lambda free: flax_norm(**({"norm_bias": None} | free), norm=norm), free)
    y, da, dw = products(a, KERNEL, dy, mode)
    want = {"y": (y + BIAS).astype(dtype), "kernel": dw, "bias": jnp.sum(dy, 0, dtype=jnp.float32)} | pull(da)[0]
    close(got, in_numpy(lambda: want)(), 1e-5 if dtype == jnp.float32 else 1e-2)


PAIRS = [
    *((*pair, "float32") for pair in itertools.product(ALL, ALL)),
    *((mode, mode, dtype) for mode, dtype in zip(ALL, ("bfloat16", "float16") * 2, strict=True)),
]


@pytest.mark.parametrize("case", PAIRS, ids="-".join)
def test_mlp_equals_its_composition(case):
    """Every pair of modes: layernorm_dense, the activation, dense, each product with a key of its own."""
    *pair, dtype = case
    first, second = map(recipe, pair)
    arrays, dy = MLP | dict(x=X.astype(dtype)), DY.astype(dtype)

    def composition(x, scale, norm_bias, w_in, w_out, b_in, b_out):
        keys = [jax.random.fold_in(KEY, i) for i in (0, 1)]
        h = fp4.layernorm_dense(x, scale, norm_bias, w_in, b_in, recipe=first, key=keys[0])
        return fp4.dense(fp4.Activation("swiglu")(h), w_out, b_out, recipe=second, key=keys[1])

    got = run(fp4.layernorm_mlp, dy, arrays, recipe=first, out_recipe=second, key=KEY)
    close(got, run(composition, dy, arrays), 2e-5 if dtype == "float32" else 1e-2)


# --- what is kept ---


@pytest.mark.core
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("mode", ALL)
def test_what_dense_keeps(mode, norm):
    """Exactly the arrays of the mode: of the norm x and its statistics, the normalized output in one form."""
    m, k, n = 512, 256, 128
    arrays = dict(x=normal(1, m, k, dtype=jnp.bfloat16), scale=normal(2, k), kernel=normal(4, k, n))
    if norm == "layernorm":
        arrays |= dict(norm_bias=normal(3, k))
    layer = partial(fp4.layernorm_dense, norm=norm, recipe=recipe(mode), key=KEY)
    layer = layer if norm == "layernorm" else partial(layer, norm_bias=None)
    x, statistics, scale = ((m, k), "bfloat16"), ((m, 1), "float32"), ((k,), "float32")
    want = {x: 1, statistics: 1 + (norm == "layernorm"), scale: 1}
    match mode:
        case "default":
            want |= packed((k,), m) | packed((k,), n)
        case "dequant":
            want |= packed((m,), k) | packed((n,), k)
        case "unquant":
            want |= {x: 2, ((k, n), "float32"): 1}  # x, and the normalized output
        case _:  # the product's own autodiff keeps the kernel in the compute dtype
            want |= {x: 2, ((k, n), "bfloat16"): 1}
    assert kept(layer, **arrays) == want
    kernel = dict(kernel=arrays.pop("kernel"))
    assert x not in (kept(partial(layer, **arrays), **kernel) if mode in ("default", "dequant") else {})
    x_alone = kept(partial(layer, **(arrays | kernel | dict(x=arrays["x"]))), x=arrays["x"])
    assert x_alone[x] == 1  # for the norm; the kernel is not differentiated
    if norm == "layernorm":  # its own gradient reads nothing of the norm
        bias_alone = kept(partial(layer, **{n: a for n, a in (arrays | kernel).items() if n != "norm_bias"}),
                          norm_bias=arrays["norm_bias"])  # fmt: skip
        assert not bias_alone.keys() & {x, statistics}


@pytest.mark.core
@pytest.mark.parametrize("mode", ALL)
def test_what_mlp_keeps(mode):
    """h once; the second input packed or not at all."""
    m, k, h, f, n = 512, 256, 384, 192, 128
    arrays = dict(x=normal(1, m, k, dtype=jnp.bfloat16), scale=normal(2, k), norm_bias=normal(3, k),
                  w_in=normal(4, k, h), w_out=normal(5, f, n))  # fmt: skip
    x = ((m, k), "bfloat16")
    want = {x: 1, ((m, 1), "float32"): 2, ((k,), "float32"): 1, ((m, h), "bfloat16"): 1}
    match mode:
        case "default":
            want |= packed((k,), m) | packed((k,), h) | packed((f,), m) | packed((f,), n)
        case "dequant":
            want |= packed((m,), k) | packed((h,), k) | packed((m,), f) | packed((n,), f)
        case _:
            want |= {x: 2, ((k, h), "float32"): 1, ((f, n), "float32"): 1}
    assert kept(partial(fp4.layernorm_mlp, recipe=recipe(mode), key=KEY), **arrays) == want


@pytest.mark.parametrize(("mode", "counts"), [("default", [(2, 1), (2, 1), (0, 3), (2, 0)]), ("unquant", [(2, 0)] * 4)])
def test_nothing_is_quantized_for_an_operand_nobody_differentiates(mode, counts):
    def step(*names):
        fixed = {n: a for n, a in DENSE.items() if n not in names}
        f = lambda free: fp4.layernorm_dense(**fixed, **free, recipe=recipe(mode), key=KEY)  # noqa: E731
        return lambda free, dy: jax.vjp(f, free)[1](dy) if names else f(free)

    for names, want in zip((("x",), ("kernel",), ("scale", "kernel"), ()), counts, strict=True):
        assert quantizations(step(*names), {n: DENSE[n] for n in names}, DY) == want, names


# --- what is differentiated ---

FUNCTIONS = [(fp4.layernorm_dense, DENSE), (fp4.layernorm_mlp, MLP)]


@pytest.mark.core
@pytest.mark.parametrize("mode", ["default", "unquant", NONE])
@pytest.mark.parametrize(("function", "arrays"), FUNCTIONS)
def test_one_argument_alone_has_the_gradient_it_has_among_all(function, arrays, mode):
    """One jitted function, differentiated in each argument in turn, backwards after all forwards: one residual tree."""
    layer = jax.jit(partial(function, recipe=recipe(mode), key=KEY))
    pulls = {n: jax.vjp(lambda a, n=n: layer(**(arrays | {n: a})), arrays[n])[1] for n in arrays}
    want = run(function, DY, arrays, recipe=recipe(mode), key=KEY)
    close({n: np.asarray(pull(DY)[0]) for n, pull in pulls.items()}, {n: want[n] for n in arrays}, 1e-5)


@pytest.mark.parametrize("mode", ALL)
def test_frozen_kernels(mode):
    """A frozen kernel gives the results of its quantized values; where it is differentiated it is refused."""
    q = fp4.quantize(KERNEL, axis=0, block=(16, 16))
    got = run(fp4.layernorm_dense, DY, DENSE | dict(kernel=q), recipe=recipe(mode), key=KEY)
    kernel = KERNEL if mode == "default" else fp4.dequantize(q)
    want = run(fp4.layernorm_dense, DY, DENSE | dict(kernel=kernel), recipe=recipe(mode), key=KEY)
    close(got, {n: a for n, a in want.items() if n != "kernel"}, 1e-5)
    frozen = dict(w_in=fp4.quantize(W_IN, axis=0, block=(16, 16)), w_out=fp4.quantize(W_OUT, axis=0, block=(16, 16)))
    got = run(fp4.layernorm_mlp, DY, MLP | frozen, recipe=recipe(mode), key=KEY)
    if mode != "default":
        frozen = {n: fp4.dequantize(q) for n, q in frozen.items()}
    want = run(fp4.layernorm_mlp, DY, MLP | (frozen if mode != "default" else {}), recipe=recipe(mode), key=KEY)
    close(got, {n: a for n, a in want.items() if n not in ("w_in", "w_out")}, 1e-5)
    for layer, arrays, name, frozen in (
        (fp4.layernorm_dense, DENSE, "kernel", q),
        (fp4.layernorm_mlp, MLP, "w_out", fp4.quantize(W_OUT, axis=0, block=(16, 16))),
    ):
        call = lambda q, layer=layer, arrays=arrays, name=name: layer(  # noqa: E731
            **(arrays | {name: q}), recipe=recipe(mode), key=KEY
        ).sum()
        op = "dequantize" if mode == NONE and name == "kernel" else layer.__name__
        refused(partial(jax.grad(call, allow_int=True), frozen), fp4.UnsupportedError, f"{op}: .* is differentiated")


# --- transformations and shapes ---


@pytest.mark.parametrize("mode", DEFAULT_IS_CORE)
@pytest.mark.parametrize(("function", "arrays"), FUNCTIONS)
def test_leading_axes_remat_and_eager_change_nothing(function, arrays, mode):
    layer = partial(function, recipe=recipe(mode), key=KEY)
    want = run(layer, DY, arrays)
    close(in_numpy(gradients)(layer, DY, **arrays), want, 1e-5)
    close(run(jax.checkpoint(layer), DY, arrays), want, 1e-5)
    shaped = run(layer, DY.reshape(2, M // 2, N), arrays | dict(x=X.reshape(2, M // 2, K)))
    close(shaped | {n: shaped[n].reshape(want[n].shape) for n in ("x", "y")}, want, 1e-6)


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize(("function", "arrays"), FUNCTIONS)
def test_vmap_is_a_loop(function, arrays, mode):
    step = partial(gradients, partial(function, recipe=recipe(mode), key=KEY))
    xs, dys = jnp.stack([X, 2 * X + 1]), jnp.stack([DY, DY / 3])
    of_one = lambda x, dy: step(dy, **(arrays | dict(x=x)))  # noqa: E731
    got, of_one = in_numpy(jax.jit(jax.vmap(of_one)))(xs, dys), in_numpy(jax.jit(of_one))
    for i in range(2):
        close({n: a[i] for n, a in got.items()}, of_one(xs[i], dys[i]), 1e-5)


IN_SHARD_MAP = """
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import PartitionSpec as P
from test_norm import ALL, DY, FUNCTIONS, KEY, close, gradients, in_numpy, recipe, run

mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
half = len(DY) // 2
for function, arrays in FUNCTIONS:
    for mode in ALL:
        layer = partial(function, recipe=recipe(mode), key=KEY)
        specs = {name: P("d") if name == "x" else P() for name in arrays}
        spread = jax.shard_map(
            lambda arrays: layer(**arrays), mesh=mesh, in_specs=(specs,), out_specs=P("d"), check_vma=False
        )
        got = run(lambda **arrays: spread(arrays), DY, arrays)
        alone = in_numpy(jax.jit(lambda dy, arrays: gradients(layer, dy, **arrays)))
        parts = [alone(DY[r], arrays | dict(x=arrays["x"][r])) for r in (slice(half), slice(half, None))]
        of_rows = {name: np.concatenate([part[name] for part in parts]) for name in ("x", "y")}
        close(got, {name: sum(part[name] for part in parts) for name in got} | of_rows, 1e-5)
"""


@pytest.mark.slow
def test_rows_on_two_devices_and_weights_on_both():
    """In shard_map: each device's rows are a tensor of its own, and the gradients of the weights are summed."""
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", IN_SHARD_MAP], capture_output=True, text=True, env=os.environ | flags, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", ALL)
@pytest.mark.parametrize(("function", "arrays"), FUNCTIONS)
def test_no_rows_and_rows_of_zeros(function, arrays, mode):
    layer = partial(function, recipe=recipe(mode), key=KEY)
    none = run(layer, DY[:0], arrays | dict(x=X[:0]))
    assert none["y"].shape == (0, N) and not any(a.any() for a in none.values())
    zeros = run(layer, DY, arrays | dict(x=0 * X))
    assert all(np.isfinite(a).all() for a in zeros.values())


def test_a_huge_row_leaves_the_others_their_digits():
    """Its normalized values are as large as those of any row, and so is the tensor scale."""
    layer = jax.jit(partial(fp4.layernorm_dense, recipe=recipe("dequant"), norm="rmsnorm"))
    arrays = of_norm(DENSE, "rmsnorm")
    close(np.asarray(layer(**(arrays | dict(x=X.at[3].multiply(1e8))))), np.asarray(layer(**arrays)), 1e-5)


@pytest.mark.core
@pytest.mark.parametrize(("function", "arrays"), FUNCTIONS)
def test_autocast_is_the_recipe(function, arrays):
    want = np.asarray(function(**arrays, recipe=recipe("dequant")))
    with fp4.autocast(recipe("dequant")):
        same_tree(function(**arrays), want)
        assert not np.array_equal(function(**arrays, recipe=fp4.HIGH_PRECISION), want)


# --- errors ---


@pytest.mark.core
@pytest.mark.parametrize(("op", "arrays"), [("layernorm_dense", DENSE), ("layernorm_mlp", MLP)])
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (dict(norm="batchnorm"), ValueError, "norm is 'batchnorm'"),
        (dict(norm="rmsnorm"), ValueError, "norm_bias is given"),
        (dict(scale=SCALE[:3]), ValueError, "scale is of shape"),
        (dict(scale=None), TypeError, "scale is a NoneType"),
        (dict(norm_bias=SCALE[None]), ValueError, "norm_bias is of shape"),
        (dict(epsilon=0.0), ValueError, "epsilon is 0.0"),
        (dict(epsilon=1e-50), ValueError, "epsilon is 1e-50"),
        (dict(epsilon="small"), TypeError, "epsilon is a str"),
        (dict(zero_centered_scale=2), ValueError, "zero_centered_scale is 2"),
        (dict(x=np.float32(1) + np.zeros((), np.float32)), TypeError, "x is a "),
        (dict(x=jnp.float32(1)), ValueError, "x is a scalar"),
        (dict(x=jnp.zeros((4, K), jnp.int32)), TypeError, "x is an array of int32"),
        (dict(recipe="nvfp4"), TypeError, "recipe is 'nvfp4'"),
    ],
)
def test_errors_name_the_argument(op, arrays, change, error, says):
    refused(lambda: getattr(fp4, op)(**(arrays | change)), error, f"{op}: {says}")


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: fp4.layernorm_dense(**(DENSE | dict(kernel=KERNEL[1:]))), ValueError, "layernorm_dense: kernel is"),
        (lambda: fp4.layernorm_dense(**(DENSE | dict(bias=BIAS[1:]))), ValueError, "layernorm_dense: bias is"),
        (lambda: fp4.layernorm_mlp(**(MLP | dict(w_in=W_IN[None]))), ValueError, "layernorm_mlp: w_in is"),
        (lambda: fp4.layernorm_mlp(**(MLP | dict(w_in=W_IN[:, 1:]))), ValueError, "layernorm_mlp: w_in is"),
        (lambda: fp4.layernorm_mlp(**(MLP | dict(w_out=W_OUT[1:]))), ValueError, "layernorm_mlp: w_out is"),
        (lambda: fp4.layernorm_mlp(**MLP, activation="tanh"), ValueError, "layernorm_mlp: activation is 'tanh'"),
        (lambda: fp4.grouped_mlp(X, W_IN[None], W_OUT[None], None), TypeError, "grouped_mlp: group_sizes is"),
    ],
)
def test_errors_of_shapes(call, error, says):
    refused(call, error, says)


@pytest.mark.parametrize(("op", "arrays"), [("layernorm_dense", DENSE), ("layernorm_mlp", MLP)])
def test_a_missing_key_and_strict_name_the_function(op, arrays):
    layer = partial(getattr(fp4, op), recipe=recipe("default"))
    layer(**arrays)  # evaluation needs none
    refused(lambda: gradients(layer, DY, **arrays), ValueError, f"{op}: key is None")
    with fp4.strict():
        refused(lambda: layer(**arrays), fp4.UnsupportedError, f"{op}: x is of extent 24")


@pytest.mark.core
def test_delayed_scaling_has_its_state_or_is_refused():
    """The state after a step is that of `dense` on the normalized output, and the MLP's are those of its parts."""
    delayed = fp4.DelayedScaling()
    state = fp4.delayed.init(delayed)

    def step(layer, state, arrays):
        """The new state, where the arrays are differentiated too."""
        loss = lambda state, arrays: jnp.sum(layer(**arrays, recipe=delayed, state=state) * DY)  # noqa: E731
        return in_numpy(jax.jit(jax.grad(loss, (0, 1))))(state, arrays)[0]

    def dense_after_norm(x, scale, norm_bias, kernel, bias, **how):
        return fp4.dense(flax_norm(x, scale, norm_bias), kernel, bias, **how)

    def parts(x, scale, norm_bias, w_in, w_out, b_in, b_out, recipe, state):
        h = fp4.layernorm_dense(x, scale, norm_bias, w_in, b_in, recipe=recipe, state=state[0])
        return fp4.dense(fp4.Activation("swiglu")(h), w_out, b_out, recipe=recipe, state=state[1])

    pair = state, fp4.delayed.init(delayed)
    for layer, written, before, arrays in (
        (fp4.layernorm_dense, dense_after_norm, state, DENSE),
        (fp4.layernorm_mlp, parts, pair, MLP),
    ):
        new = step(layer, before, arrays)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), new, step(written, before, arrays))
        for one in new if isinstance(new, tuple) else (new,):
            assert all(operand.history[-1] > 0 for operand in (one.x, one.kernel, one.dy))
    refused(lambda: fp4.layernorm_dense(**DENSE, recipe=delayed), ValueError, "layernorm_dense: state is None")
    refused(lambda: fp4.layernorm_mlp(**MLP, out_recipe=delayed), ValueError, r"layernorm_mlp: state\[1\] is None")


@pytest.mark.parametrize("mode", ["default", "dequant"])
@pytest.mark.parametrize("leading", [(2, 16), (2, 10), (32,)], ids=str)
def test_codes_made_in_one_call_lie_as_those_made_apart(monkeypatch, leading, mode):
    """On CUDA one call makes them, of rows that were flattened. Here that call quantizes its first operand."""
    x = jax.random.normal(jax.random.key(0), (*leading, 64), jnp.bfloat16)
    kernels = [jax.random.normal(jax.random.key(i), shape) / 8 for i, shape in ((1, (64, 192)), (2, (96, 48)))]
    recipe = fp4.NVFP4BlockScaling(mode)

    def step(x, *kernels):
        def loss(x, *kernels):
            y = fp4.layernorm_mlp(x, jnp.ones(64), None, *kernels, norm="rmsnorm", recipe=recipe, key=jax.random.key(3))
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(x, *kernels)

    apart = jax.jit(step)(x, *kernels)
    monkeypatch.setattr(_planes, "choose", lambda together, apart, **_: together)
    jax.clear_caches()
    for got, want in zip(jax.tree.leaves(jax.jit(step)(x, *kernels)), jax.tree.leaves(apart), strict=True):
        np.testing.assert_array_equal(got, want)
