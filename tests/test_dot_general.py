"""DotGeneral: lax.dot_general's contract, dense's bits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jax_fp4 as fp4

MODES = ("default", "unquant", "dequant")
MATRIX = (((1,), (0,)), ((), ()))
KEY = jax.random.key(7)


def recipe(mode="unquant", **kw):
    return fp4.NVFP4BlockScaling(backward_mode=mode, **kw)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32)).astype(dtype)


def equal(a, b):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@partial(jax.jit, static_argnums=2)
def loop(x, w, chosen, key=None):
    """y [batch, m, n], one dense for each entry of the batch."""
    return jnp.stack([fp4.dense(xi, wi, recipe=chosen, key=key) for xi, wi in zip(x, w, strict=True)])


def same_values_and_gradients(f, g, x, w, dy):
    def both(function):
        y, pull = jax.vjp(function, x, w)
        return y, *pull(dy)

    for ours, theirs in zip(jax.jit(lambda: both(f))(), jax.jit(lambda: both(g))(), strict=True):
        equal(ours, theirs)


# Each: lhs shape, rhs shape, dimension_numbers, einsum to [b, m, k], to [b, k, n], result shape.
CASES = [
    pytest.param((6, 32), (32, 10), MATRIX, "mk->mk", "kn->kn", (6, 10), id="matrix"),
    pytest.param((32, 6), (10, 32), (((0,), (1,)), ((), ())), "km->mk", "nk->kn", (6, 10), id="transposed"),
    pytest.param((2, 3, 5), (5, 3, 4), (((2, 1), (0, 1)), ((), ())), "abc->acb", "cbd->cbd", (2, 4), id="two axes"),
    pytest.param((3, 4, 20), (3, 20, 6), (((2,), (1,)), ((0,), (0,))), "bmk->bmk", "bkn->bkn", (3, 4, 6), id="batch"),
    pytest.param(
        (4, 2, 20, 3),
        (6, 3, 20, 2, 5),
        (((2,), (2,)), ((3, 1), (1, 3))),
        "mbka->abmk",
        "nakbp->abknp",
        (3, 2, 4, 6, 5),
        id="two batch axes",
    ),
    pytest.param((33,), (33,), (((0,), (0,)), ((), ())), "k->k", "k->k", (), id="vectors"),
    pytest.param((4,), (5,), (((), ()), ((), ())), "m->m", "n->n", (4, 5), id="outer"),
]


@pytest.mark.parametrize(("lhs", "rhs", "numbers", "to_mk", "to_kn", "shape"), CASES)
def test_any_axes_equal_dense_on_the_matrices(lhs, rhs, numbers, to_mk, to_kn, shape):
    x, w = normal(0, *lhs), normal(1, *rhs)
    y = jax.jit(partial(fp4.DotGeneral(recipe()), dimension_numbers=numbers))(x, w)
    assert y.shape == shape == lax.dot_general(x, w, numbers).shape
    batch = int(np.prod([lhs[a] for a in numbers[1][0]]))
    k = int(np.prod([lhs[a] for a in numbers[0][0]]))
    xs = jnp.einsum(to_mk, x).reshape(batch, -1, k)
    ws = jnp.einsum(to_kn, w).reshape(batch, k, -1)
    equal(y.reshape(batch, xs.shape[1], ws.shape[2]), loop(xs, ws, recipe()))


@pytest.mark.core
@pytest.mark.parametrize("mode", MODES)
def test_gradients_equal_dense(mode):
    x, w, dy, chosen = normal(0, 6, 64), normal(1, 64, 10), normal(2, 6, 10), recipe(mode)
    dot = partial(fp4.DotGeneral(chosen, key=KEY), dimension_numbers=MATRIX)
    same_values_and_gradients(dot, lambda x, w: fp4.dense(x, w, recipe=chosen, key=KEY), x, w, dy)


@pytest.mark.parametrize("mode", MODES)
def test_each_batch_entry_is_a_tensor_of_its_own(mode):
    # Scales far apart: one amax for all would leave nothing of the small entry.
    x = normal(0, 2, 8, 32) * jnp.array([1e-6, 1e6])[:, None, None]
    w, dy, chosen = normal(1, 2, 32, 12), normal(2, 2, 8, 12), recipe(mode)
    dot = partial(fp4.DotGeneral(chosen, key=KEY), dimension_numbers=(((2,), (1,)), ((0,), (0,))))
    same_values_and_gradients(dot, lambda x, w: loop(x, w, chosen, KEY), x, w, dy)


@pytest.mark.core
def test_batch_is_one_call_and_no_loop():
    x, w = normal(0, 3, 8, 32), normal(1, 3, 32, 16)
    dot = fp4.DotGeneral(recipe())
    batched = jax.jit(lambda x, w: dot(x, w, (((2,), (1,)), ((0,), (0,))))).lower(x, w).as_text()
    single = jax.jit(lambda x, w: dot(x, w, MATRIX)).lower(x[0], w[0]).as_text()
    assert batched.count("custom_call @jax_fp4") == single.count("custom_call @jax_fp4") > 0
    assert "stablehlo.while" not in batched


def test_no_batch_entries():
    x, w = jnp.zeros((0, 4, 32)), jnp.zeros((0, 32, 6))
    assert fp4.DotGeneral(recipe())(x, w, (((2,), (1,)), ((0,), (0,)))).shape == (0, 4, 6)


# --- without a recipe ---


@pytest.mark.core
@pytest.mark.parametrize("chosen", [None, fp4.HIGH_PRECISION])
def test_without_recipe_it_is_lax_dot_general(chosen):
    x, w = normal(0, 6, 33, dtype=jnp.bfloat16), normal(1, 33, 7, dtype=jnp.bfloat16)
    options = dict(precision="highest", preferred_element_type=jnp.float32)
    context = fp4.autocast(recipe() if chosen is fp4.HIGH_PRECISION else None)
    with context:
        equal(fp4.DotGeneral(chosen)(x, w, MATRIX), lax.dot_general(x, w, MATRIX))
        equal(fp4.DotGeneral(chosen)(x, w, MATRIX, **options), lax.dot_general(x, w, MATRIX, **options))
        ints = jnp.arange(6).reshape(2, 3)
        equal(fp4.DotGeneral(chosen)(ints, ints.T, MATRIX), lax.dot_general(ints, ints.T, MATRIX))


def test_report_says_what_is_not_quantized():
    x, w = normal(0, 6, 32), normal(1, 32, 16)
    rows = fp4.report(lambda x, w: fp4.DotGeneral(None)(x, w, MATRIX), x, w).rows
    assert [row.quantized for row in rows] == [False]
    assert "no recipe" in rows[0].note
    rows = fp4.report(lambda x, w: fp4.DotGeneral(recipe())(x, w, MATRIX), x, w).rows
    assert [row.quantized for row in rows] == [True]


@pytest.mark.core
def test_contexts_on_one_jitted_function():
    x, w = normal(0, 6, 64), normal(1, 64, 10)
    a, b = recipe(), recipe(two_dimensional_weights=False, row_scaled_activation=True)
    dot = jax.jit(lambda x, w: fp4.DotGeneral()(x, w, MATRIX))
    for context in (a, b, None, a):
        with fp4.autocast(context):
            got = dot(x, w)
        # Jitted as well: a plain product may be fused otherwise.
        want = jax.jit(lambda x, w, c=context: fp4.dense(x, w, recipe=c))(x, w)
        equal(got, want)


@pytest.mark.core
def test_users_own_dot_general_is_untouched():
    x, w = normal(0, 6, 64), normal(1, 64, 10)
    before, bits = lax.dot_general, lax.dot_general(x, w, MATRIX)
    with fp4.autocast(recipe()):
        assert lax.dot_general is before
        equal(lax.dot_general(x, w, MATRIX), bits)
        equal(jnp.dot(x, w), bits)
        assert not np.array_equal(fp4.DotGeneral()(x, w, MATRIX), bits)


# --- dtypes ---


@pytest.mark.parametrize("lhs", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rhs", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("preferred", [None, "float32", "bfloat16"])
def test_dtypes_are_those_of_lax(lhs, rhs, preferred):
    x, w = normal(0, 4, 32, dtype=lhs), normal(1, 32, 6, dtype=rhs)
    ours, lax_own = (
        jax.eval_shape(lambda x, w, f=f: f(x, w, MATRIX, preferred_element_type=preferred), x, w)
        for f in (fp4.DotGeneral(recipe()), lax.dot_general)
    )
    assert (ours.shape, ours.dtype) == (lax_own.shape, lax_own.dtype)
    grads = jax.eval_shape(
        jax.grad(lambda x, w: fp4.DotGeneral(recipe())(x, w, MATRIX).astype(jnp.float32).sum(), (0, 1)), x, w
    )
    assert [g.dtype.name for g in grads] == [lhs, rhs]


def test_preferred_element_type_rounds_once():
    x, w = normal(0, 4, 64, dtype=jnp.bfloat16), normal(1, 64, 6, dtype=jnp.bfloat16)
    dot = fp4.DotGeneral(recipe())
    wide, narrow = dot(x, w, MATRIX, preferred_element_type=jnp.float32), dot(x, w, MATRIX)
    equal(wide.astype(jnp.bfloat16), narrow)
    assert not np.array_equal(wide, narrow.astype(jnp.float32))


@pytest.mark.parametrize("mode", MODES)
def test_wide_result_of_narrow_operands_has_a_backward(mode):
    x, w = normal(0, 4, 32, dtype=jnp.bfloat16), normal(1, 32, 16)
    dot = fp4.DotGeneral(recipe(mode), key=KEY)
    dx, dw = jax.grad(lambda x, w: dot(x, w.astype(x.dtype), MATRIX, preferred_element_type=jnp.float32).sum(), (0, 1))(
        x, w
    )
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    assert bool(jnp.isfinite(dw).all())


# --- refusals ---


def test_bad_input():
    x, w, dot = normal(0, 4, 32), normal(1, 32, 6), fp4.DotGeneral(recipe())
    for wrong in ("nvfp4", fp4.NVFP4BlockScaling, 3):
        with pytest.raises(TypeError, match=r"DotGeneral: recipe is .* needs a recipe object"):
            fp4.DotGeneral(wrong)
    with pytest.raises(TypeError, match=r"DotGeneral: lhs is an array of int32; needs"):
        dot(jnp.ones((4, 32), jnp.int32), w, MATRIX)
    with pytest.raises(TypeError, match=r"DotGeneral: rhs is"):
        dot(x, fp4.quantize(w, axis=0), MATRIX)
    with pytest.raises(TypeError, match="preferred_element_type is int32"):
        dot(x, w, MATRIX, preferred_element_type=jnp.int32)
    # As many elements, other axes: jax's own error, never a product of flattened axes.
    with pytest.raises(TypeError, match="contracting"):
        dot(normal(0, 4, 2, 3), normal(1, 3, 2, 5), (((1, 2), (0, 1)), ((), ())))


def test_out_sharding():
    """Where the result goes; on Explicit axes an operand's columns do not stay whole otherwise."""
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    x, w, dot = normal(0, 8, 32), normal(1, 32, 64), fp4.DotGeneral(recipe())
    want, spec = dot(x, w, MATRIX), jax.sharding.PartitionSpec("data", "model")
    with jax.set_mesh(mesh):
        there = [jax.device_put(a, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())) for a in (x, w)]
        y = jax.jit(lambda x, w: dot(x, w, MATRIX, out_sharding=spec))(*there)
    assert y.sharding.spec == spec
    equal(y, want)


def test_missing_key_is_an_error_only_when_differentiated():
    x, w, dot = normal(0, 4, 32), normal(1, 32, 6), fp4.DotGeneral(recipe("default"))
    dot(x, w, MATRIX)
    with pytest.raises(ValueError, match="key is None"):
        jax.grad(lambda w: dot(x, w, MATRIX).sum())(w)


def test_equality_and_hash():
    a, b = fp4.DotGeneral(recipe()), fp4.DotGeneral(recipe())
    assert a == b
    assert hash(a) == hash(b)
    assert a != fp4.DotGeneral(recipe("dequant"))
    keyed = fp4.DotGeneral(recipe(), key=KEY)
    assert keyed == fp4.DotGeneral(recipe(), key=KEY)
    assert keyed != fp4.DotGeneral(recipe(), key=jax.random.key(7))
    traces = []

    def f(dot, x, w):
        traces.append(1)
        return dot(x, w, MATRIX)

    jitted = jax.jit(f, static_argnums=0)
    jitted(a, normal(0, 4, 32), normal(1, 32, 6))
    jitted(b, normal(0, 4, 32), normal(1, 32, 6))
    assert len(traces) == 1
