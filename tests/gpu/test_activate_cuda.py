"""grouped_mlp's second input made in the quantizer, against the composition on the same GPU.

The two differ by the last bits of exp and tanh alone, so the second input differs by an ulp of its dtype here and
there; a value on the border of two codes, or of two scales, may then have either."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fp4 as fp4
from jax_fp4 import _ffi, _ops, _planes
from jax_fp4._activations import NAMES
from jax_fp4._formats import Quantization

M, SIZES = 150, np.asarray([40, 0, 17, 64], np.int32)  # and a tail of 29 rows
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
ULP = {"float32": 2.0**-19, "bfloat16": 2.0**-7, "float16": 2.0**-9}  # float32: several, of a product


def composed(h, weights, activation):
    a = activation(h.astype(jnp.float32))
    return (a if weights is None else a * weights[:, None]).astype(h.dtype)


@functools.cache
def both_ways(activation, both, **flags):
    """h, weights, sizes -> (fused, composed): forms of the second input."""

    def run(h, weights, sizes):
        flagged = dict(row_scaled=False, four_over_six=None) | flags
        hadamard = {"hadamard": flagged.pop("hadamard", False)} if both else {}
        a = composed(h, weights, activation)
        made = _ops.quantize_made(
            a, _ops.Made(h, weights, activation), both=both, group_sizes=sizes, **hadamard, **flagged
        )
        quantize = fp4.quantize_transpose if both else lambda *a, **k: (fp4.quantize(*a, **k),)
        return made, quantize(a, group_sizes=sizes, **hadamard, **flagged)

    return jax.jit(run)


def arguments(name, dtype, f, weighted, seed=0, tail=np.nan):
    rng = np.random.default_rng(seed)
    columns = 2 * f if fp4.Activation(name).gated else f
    h = 3 * rng.standard_normal((M, columns))
    h[SIZES.sum() :] = tail
    weights = rng.uniform(0.05, 1, M).astype(np.float32) if weighted else None
    if weighted:
        weights[SIZES.sum() :] = tail
    return np.asarray(jnp.asarray(h, jnp.float32).astype(dtype)), weights


def steps(q):
    """The value of one unit of each element's block, in the orientation of the codes."""
    amax = _ops.amax_of_rows(q) if q.grouped != "blocks" else None
    scale = np.asarray(q.block_scale, np.float32)
    if amax is not None:
        amax = np.asarray(amax).reshape(-1, 1)
        return np.repeat(scale * (amax / (6 * q.bound)), 16, axis=-1)
    return None


def assert_close(got, want, ulp):
    """Dequantized values within a step of their blocks, and nearly all equal; amaxes within ulps."""
    np.testing.assert_allclose(np.asarray(got.amax), np.asarray(want.amax), rtol=2 * ulp, atol=0)
    a, b = (np.asarray(fp4.dequantize(q, jnp.float32)) for q in (got, want))
    assert np.isfinite(a).all() and np.isfinite(b).all()
    if (unit := steps(want)) is not None:
        # Half of the largest step, 2 units, on either side; and the other's scale may be the next one.
        assert (np.abs(a - b) <= 2.2 * unit[:, : a.shape[-1]] + 4 * ulp * np.abs(b)).all()
    far = np.abs(a - b) > 4 * ulp * np.abs(b)
    # An amax that is another bfloat16 may move the scales of a tenth of its blocks.
    same = np.array_equal(np.asarray(got.amax), np.asarray(want.amax))
    assert far.mean() <= (0.02 if same else 0.3), far.mean()
    scales = [np.asarray(q.block_scale).view(np.uint8).astype(int) for q in (got, want)]
    assert np.abs(scales[0] - scales[1]).max(initial=0) <= 1


def assert_same_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = (np.atleast_1d(np.asarray(bits)).view(np.uint8) for bits in (a, b))
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_composition(gpu, name, dtype):
    activation, ulp = fp4.Activation(name), ULP[jnp.dtype(dtype).name]
    for f in (64, 50, 35, 208):
        for weighted in (False, True):
            for both in (False, True):
                for flags in ({}, {"row_scaled": True}):
                    h, weights = arguments(name, dtype, f, weighted, seed=f)
                    with jax.default_device(gpu):
                        made, plain = both_ways(activation, both, **flags)(h, weights, SIZES)
                    assert len(made) == len(plain) == 1 + both
                    for got, want in zip(made, plain, strict=True):
                        assert_close(got, want, ulp)


@pytest.mark.parametrize("name", ["relu", "squared_relu"])
def test_activations_without_exp_have_the_bits_of_the_composition(gpu, name):
    for dtype in DTYPES:
        for f in (64, 35):
            for flags in ({}, {"row_scaled": True}, {"hadamard": True}, {"four_over_six": fp4.FourOverSix()}):
                h, weights = arguments(name, dtype, f, True, seed=f)
                with jax.default_device(gpu):
                    made, plain = both_ways(fp4.Activation(name), True, **flags)(h, weights, SIZES)
                assert_same_bits(made, plain)


def test_an_input_of_many_units_has_the_bits_of_the_composition(gpu):
    """A thread block takes several units of it, of several groups."""
    rng = np.random.default_rng(0)
    sizes = np.asarray([3000, 0, 1, 2, 5100], np.int32)  # and a tail of 89 rows
    for f, flags in ((4096, {}), (4096, {"hadamard": True}), (515, {})):
        rows = np.repeat(2.0 ** np.arange(8), 1024)[:, None]  # amaxes are of their last units
        h = np.asarray(jnp.asarray(rows * rng.standard_normal((8192, f)), jnp.float32).astype(jnp.bfloat16))
        weights = rng.uniform(0.05, 1, 8192).astype(np.float32)
        with jax.default_device(gpu):
            made, plain = both_ways(fp4.Activation("squared_relu"), True, **flags)(h, weights, sizes)
        assert_same_bits(made, plain)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_values_are_finite_where_they_fit_and_nan_stays(gpu, name):
    """One group whose every block has its own extremes; each row is one."""
    points = [-1e17, -1e13, -200.0, -89.0, -88.0, -20.0, -1e-38, -0.0, 0.0, 1e-38, 20.0, 88.0, 200.0, 1e13, 1e17]
    activation = fp4.Activation(name)
    x = np.repeat(np.asarray(points, np.float32)[:, None], 16, axis=1)
    h = np.concatenate([x, np.ones_like(x)], axis=1) if activation.gated else x
    h = np.concatenate([h, np.full_like(h[:1], np.nan)])
    sizes = np.asarray([len(h)], np.int32)
    with jax.default_device(gpu):
        (made,), _ = both_ways(activation, False, row_scaled=True)(h, None, sizes)
        values = np.asarray(fp4.dequantize(made, jnp.float32))
    assert np.isfinite(values[:-1]).all()
    assert np.isnan(values[-1]).all()


@pytest.mark.parametrize("mode", ["default", "unquant", "dequant"])
def test_grouped_mlp_equals_itself_unfused(gpu, monkeypatch, mode):
    recipe, key = fp4.NVFP4BlockScaling(mode), jax.random.key_data(jax.random.key(0))
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((M, 96)), jnp.bfloat16)
    w_in, w_out = (jnp.asarray(rng.standard_normal(s) / 8, jnp.float32) for s in ((4, 96, 128), (4, 64, 48)))
    probs = jnp.asarray(rng.uniform(0.1, 1, M), jnp.float32)

    def loss(x, w_in, w_out, probs):
        y = fp4.grouped_mlp(x, w_in, w_out, SIZES, probs=probs, recipe=recipe, key=key)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def step():
        with jax.default_device(gpu):
            return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(x, w_in, w_out, probs)

    fused = step()

    def unfused(op, strict, q, activation):
        absent = (None,) * (3 if op == "quantize_transpose" else 2)
        return lambda x, h, weights, sizes: _ops._implementation(op, None, strict, q=q)(x, *absent, sizes)

    monkeypatch.setattr(_ops, "_made", unfused)
    jax.clear_caches()
    for a, b in zip(jax.tree.leaves(fused), jax.tree.leaves(step()), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)


@pytest.mark.parametrize("mode", ["default", "unquant", "dequant"])
def test_layernorm_mlp_equals_itself_in_a_partitioned_program(gpu, monkeypatch, mode):
    """Rows of two dimensions, as a batch of sequences has."""
    recipe, key = fp4.NVFP4BlockScaling(mode), jax.random.key_data(jax.random.key(0))
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((4, 32, 96)), jnp.bfloat16)
    scale, w_in, w_out = (jnp.asarray(rng.standard_normal(s) / 8, jnp.float32) for s in ((96,), (96, 128), (64, 48)))

    def loss(x, scale, w_in, w_out):
        y = fp4.layernorm_mlp(x, scale, None, w_in, w_out, norm="rmsnorm", recipe=recipe, key=key)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    def step():
        with jax.default_device(gpu):
            program = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3))).lower(x, scale, w_in, w_out).compile()
            return program(x, scale, w_in, w_out), "activate_quantize" in program.as_text()

    fused, in_one_call = step()
    monkeypatch.setattr(_planes, "is_partitioned", lambda context: True)
    jax.clear_caches()
    apart, still_in_one_call = step()
    assert in_one_call and not still_in_one_call
    for a, b in zip(jax.tree.leaves(fused), jax.tree.leaves(apart), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(b)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("name", NAMES)
def test_made_alone_has_the_bits_of_what_the_quantizers_make(gpu, name, dtype):
    """For parts of a tensor: codes, scales and amaxes under the amax that the fused call finds."""
    activation, q = fp4.Activation(name), Quantization(compute_dtype=jnp.dtype(dtype).name)

    def run(h, weights, sizes):
        x = _ffi.activate(h, weights, sizes, activation)
        apart = _ffi.quantize_transpose(x, None, None, None, sizes, q)
        return apart, _ffi.activate_quantize_transpose(h, weights, sizes, q, activation)

    for f, weighted, sizes in ((64, True, SIZES), (50, False, SIZES), (4096, True, None)):
        h, weights = arguments(name, dtype, f, weighted, tail=np.nan if sizes is not None else 1.0)
        with jax.default_device(gpu):
            apart, fused = jax.jit(run)(*jax.device_put((h, weights, sizes), gpu))
        for a, b in zip(apart, fused, strict=True):
            a, b = (np.atleast_1d(np.asarray(part)).view(np.uint8) for part in (a, b))
            np.testing.assert_array_equal(a, b, strict=True)


def test_vmap_is_one_call(gpu):
    activation, q = fp4.Activation("swiglu"), Quantization(compute_dtype="bfloat16")
    run = lambda h, w: _ffi.activate_quantize(h, w, None, q, activation)  # noqa: E731
    h = jax.random.normal(jax.random.key(0), (3, 40, 64), jnp.bfloat16)
    w = jax.random.uniform(jax.random.key(1), (3, 40))
    with jax.default_device(gpu):
        h, w = jax.device_put((h, w), gpu)
        got = jax.jit(jax.vmap(run))(h, w)
        for i in range(3):
            for a, b in zip(got, jax.jit(run)(h[i], w[i]), strict=True):
                np.testing.assert_array_equal(np.asarray(a[i], np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize(
    ("h", "weights", "says"),
    [
        ((16, 33), ((0,), jnp.float32), "h has an odd last axis"),
        ((16, 64), ((15,), jnp.float32), r"weights is \[15\]; needs \[0\]"),
        ((16, 64), ((0,), jnp.bfloat16), "weights has another element type"),
        ((16, 32), ((0,), jnp.float32), r"codes is \[16,16\]; needs \[16,8\]"),
    ],
)
def test_the_handler_refuses_what_would_read_outside(gpu, h, weights, says):
    q, activation, f32 = Quantization(), fp4.Activation("swiglu"), jnp.float32
    results = [((16, 16), jnp.uint8), ((16, 2), jnp.float8_e4m3fn), ((), f32)]
    results = [*(jax.ShapeDtypeStruct(*r) for r in results), _ffi._scratch(1 << 16)]
    call = jax.ffi.ffi_call("jax_fp4_activate_quantize", results)
    attributes = _ffi._attributes(q, None, None) | _ffi._activation_attributes(activation, None)
    none = jnp.zeros(0, f32), jnp.zeros(0, jnp.uint32), jnp.zeros(0, jnp.int32)
    run = jax.jit(lambda h, w: call(h, w, *none, axis=np.int32(-1), **attributes))
    operands = jax.device_put((jnp.ones(h, f32), jnp.zeros(*weights)), gpu)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jax_fp4_activate_quantize: .*{says}"):
        jax.block_until_ready(run(*operands))
