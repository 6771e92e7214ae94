"""Delayed scaling: the state against its specification over steps, in every layer, transformation and mesh."""

import dataclasses
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grouped_layers import normal
from products import refused
from trees import same_tree

import jax_fp4 as fp4
from jax_fp4 import delayed, reference_fp8
from jax_fp4.delayed import Delayed, State

K, N, G = 24, 48, 3
SIZES = np.int32([9, 0, 11])
RECIPE = fp4.DelayedScaling("default", amax_history_len=3)
RECIPES = {
    "hybrid": RECIPE,
    "e4m3": fp4.DelayedScaling("default", fp8_format="E4M3", amax_history_len=2, margin=1),
    "most recent": fp4.DelayedScaling("default", amax_history_len=3, amax_compute_algo="most_recent"),
    "two steps": fp4.DelayedScaling("default", amax_history_len=2, margin=3),
}


class Specification:
    """The states of a layer after each step, by the specification on NumPy."""

    def __init__(self, recipe, shape=()):
        self.recipe = recipe
        empty, one = np.zeros((*shape, recipe.amax_history_len), np.float32), np.ones(shape, np.float32)
        self.state = {name: Delayed(empty, one) for name in ("x", "kernel", "dy")}

    def sees(self, **amaxes):
        for name, amax in amaxes.items():
            largest = 57344 if name == "dy" and self.recipe.fp8_format == "HYBRID" else 448
            most_recent = self.recipe.amax_compute_algo == "most_recent"
            self.state[name] = reference_fp8.update_delayed(
                self.state[name], np.float32(amax), largest, self.recipe.margin, most_recent
            )

    def check(self, got: State):
        for name, want in self.state.items():
            for a, b in zip(getattr(got, name), want, strict=True):
                np.testing.assert_array_equal(np.asarray(a), b, strict=True)


def amax(a, axis=None):
    return np.max(np.abs(np.asarray(a, np.float32)), axis=axis, initial=0)


def by_group(a, sizes=SIZES):
    ends = np.cumsum(sizes)
    return np.stack([amax(np.asarray(a)[e - s : e]) for s, e in zip(sizes, ends, strict=True)])


def cotangent(layer, state, dy, *args):
    """What differentiation gives for the state, and for the other arguments."""
    y, pull = jax.vjp(lambda state, *args: layer(*args, state=state), state, *args)
    return pull(dy.astype(y.dtype))


# --- the state ---


@pytest.mark.parametrize("name", RECIPES)
def test_state_over_steps(name):
    """Amaxes that grow, shrink, vanish and are not finite: bit for bit what the specification says, step by step."""
    recipe = RECIPES[name]
    state, spec = delayed.init(recipe), Specification(recipe)
    spec.check(state)
    dense = partial(fp4.dense, recipe=recipe)
    for step, size in enumerate((1.0, 30.0, 0.25, 0.0, np.inf, 2.0, 3.0, 4.0, 5.0)):
        x, w, dy = normal(step, 8, K) * size, normal(step + 20, K, N) * (1 + step), normal(step + 40, 8, N) * size
        x, dy = jnp.nan_to_num(x, nan=1.0), jnp.nan_to_num(dy, nan=1.0)
        state = delayed.update(state, cotangent(dense, state, dy, x, w)[0])
        spec.sees(x=amax(x), kernel=amax(w), dy=amax(dy))
        spec.check(state)
        assert state.calls == 0


@pytest.mark.core
def test_a_step_quantizes_with_the_scale_it_was_given():
    """Not with that of its own amax: values beyond it saturate."""
    x, w = normal(1, 8, K), normal(2, K, N)
    state = delayed.init(RECIPE)
    x = x * 1000  # beyond 448 under scale 1
    got = fp4.dense(x, w, recipe=RECIPE, state=state)
    q = fp4.quantize(np.asarray(x), "float8", scale=np.float32(1), implementation="reference")
    qw = fp4.quantize(np.asarray(w), "float8", axis=0, scale=np.float32(1), implementation="reference")
    want = np.asarray(q.codes, np.float64) @ np.asarray(qw.codes, np.float64).T
    assert np.abs(np.asarray(q.codes, np.float64)).max() == 448
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-3)


@pytest.mark.core
def test_merge_is_one_update_with_the_larger_amax():
    state = delayed.init(RECIPE)
    dense = partial(fp4.dense, recipe=RECIPE)
    w = normal(2, K, N)
    first, second = ((normal(i, 8, K) * s, normal(i + 9, 8, N) / s) for i, s in ((1, 3.0), (2, 0.5)))
    news = [cotangent(dense, state, dy, x, w)[0] for x, dy in (first, second)]
    spec = Specification(RECIPE)
    spec.sees(x=max(amax(x) for x, _ in (first, second)), kernel=amax(w), dy=max(amax(d) for _, d in (first, second)))
    for merged in (delayed.merge(*news), delayed.merge(*news[::-1]), jax.jit(delayed.merge)(*news)):
        spec.check(delayed.update(state, merged))
    zero = jax.tree.map(jnp.zeros_like, state)  # of a microbatch that did not use it
    of_nothing = cotangent(dense, state, jnp.zeros((8, N)), jnp.zeros((8, K)), w)[0]  # amaxes are 0, scales are not
    for new in (news[0], of_nothing):
        for one, other in ((new, zero), (zero, new)):
            same_tree(delayed.merge(one, other), new)
    # and a stack of states of experts
    one = dataclasses.replace(advanced(delayed.init(RECIPE, (G,))), calls=jnp.ones(()))
    stack = jax.tree.map(lambda a: jnp.stack([a, a]), one)
    same_tree(delayed.merge(jax.tree.map(jnp.zeros_like, stack), stack), stack)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_merge_keeps_what_is_not_finite(bad):
    """The scale stays, and the history tells for as long as it is remembered."""
    state, dense, w = delayed.init(RECIPE), partial(fp4.dense, recipe=RECIPE), normal(2, K, N)
    good, broken = normal(1, 8, K), normal(1, 8, K).at[0, 0].set(bad)
    dy = normal(3, 8, N)
    a, b = (cotangent(dense, state, dy, x, w)[0] for x in (good, broken))
    for merged in (delayed.merge(a, b), delayed.merge(b, a)):
        x = delayed.update(state, merged).x
        assert x.scale == state.x.scale == 1
        np.testing.assert_array_equal(x.history[-1], np.float32(bad))
    later = delayed.update(state, b)
    for _ in range(RECIPE.amax_history_len - 1):
        assert later.x.scale == 1
        later = delayed.update(later, cotangent(dense, later, dy, good, w)[0])
    later = delayed.update(later, cotangent(dense, later, dy, good, w)[0])
    assert later.x.scale == np.float32(448) / amax(good)


@pytest.mark.core
def test_an_unused_state_stays():
    """One the loss did not read, and operands that were not quantized: dy where the layer is not differentiated for x
    or w, a frozen kernel."""
    states = {name: advanced(delayed.init(RECIPE)) for name in ("used", "unused")}
    x, w = normal(1, 8, K), normal(2, K, N)
    new = jax.grad(lambda s: jnp.sum(fp4.dense(x, w, recipe=RECIPE, state=s["used"])))(states)
    after = delayed.update(states, new)
    same_tree(after["unused"], states["unused"])
    same_tree(after["used"].dy, states["used"].dy)  # neither x nor w was differentiated: dy was not quantized
    assert after["used"].x.scale == np.float32(448) / max(amax(x), 2)
    frozen = fp4.quantize(w, "float8", axis=0)
    layer = lambda x, state: fp4.dense(x, frozen, recipe=RECIPE, state=state)  # noqa: E731
    after = delayed.update(states["used"], cotangent(layer, states["used"], jnp.ones((8, N)), x)[0])
    same_tree(after.kernel, states["used"].kernel)
    assert after.dy.history[-1] == 1


def advanced(state):
    """With a history."""
    history = jnp.broadcast_to(jnp.asarray([0.0, 1.0, 2.0]), state.x.history.shape)
    one = Delayed(history, jnp.full(state.x.scale.shape, 7.0))
    return State(one, one, one, state.calls)


# --- in the layers ---


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.core), jnp.bfloat16])
@pytest.mark.parametrize("jit", [False, True])
def test_the_cotangent_is_the_next_state(dtype, jit):
    """dense; grouped_dense, a state for each expert; and layernorm_dense, whose x is the normalized one."""
    x, dy, w, ws = normal(1, 22, K, dtype=dtype), normal(2, 22, N, dtype=dtype), normal(3, K, N), normal(4, G, K, N)
    rounded, all_rounded = (np.asarray(a.astype(dtype)) for a in (w, ws))
    run = jax.jit(cotangent, static_argnums=0) if jit else cotangent

    spec = Specification(RECIPE)
    spec.sees(x=amax(x), kernel=amax(rounded), dy=amax(dy))
    spec.check(run(partial(fp4.dense, recipe=RECIPE), delayed.init(RECIPE), dy, x, w)[0])

    spec = Specification(RECIPE, (G,))
    spec.sees(x=by_group(x), kernel=amax(all_rounded, (1, 2)), dy=by_group(dy))
    grouped = partial(fp4.grouped_dense, group_sizes=jnp.asarray(SIZES), recipe=RECIPE)
    poison = lambda a: a.at[20:].set(jnp.nan)  # noqa: E731  rows of no group
    spec.check(run(grouped, delayed.init(RECIPE, (G,)), poison(dy), poison(x), ws)[0])

    scale, bias = jnp.ones(K, dtype) * 3, jnp.ones(K, dtype)
    norm = lambda x, w, **how: fp4.layernorm_dense(x, scale, bias, w, **how)  # noqa: E731
    normed = norm(x, jnp.eye(K), recipe=fp4.HIGH_PRECISION)
    spec = Specification(RECIPE)
    spec.sees(x=amax(normed), kernel=amax(rounded), dy=amax(dy))
    spec.check(run(partial(norm, recipe=RECIPE), delayed.init(RECIPE), dy, x, w)[0])


@pytest.mark.core
@pytest.mark.parametrize("grouped", [True, False])
def test_the_cotangents_of_an_mlp(grouped):
    """The states of its products are those of two single layers; one product may have another recipe."""
    groups = (G,) if grouped else ()
    x, w_in, w_out, dy = normal(1, 20, K), normal(2, *groups, K, 2 * K), normal(3, *groups, K, N), normal(4, 20, N)
    states = tuple(advanced(delayed.init(RECIPE, groups)) for _ in range(2))
    act = fp4.Activation("swiglu")
    scale = jnp.ones(K)
    rest = (jnp.asarray(SIZES),) if grouped else ()
    if grouped:
        whole, one = (lambda x, *w, **how: fp4.grouped_mlp(x, *w, *rest, **how)), fp4.grouped_dense
    else:
        whole, one = (lambda x, *w, **how: fp4.layernorm_mlp(x, scale, None, *w, **how)), fp4.dense

    def steps(x, w_in, w_out, state, recipe, out_recipe):
        if not grouped:
            x = fp4.layernorm_dense(x, scale, None, jnp.eye(K), recipe=fp4.HIGH_PRECISION)
        a = act(one(x, w_in, *rest, recipe=recipe, state=state[0]))
        return one(a, w_out, *rest, recipe=out_recipe, state=state[1])

    for pair in ((RECIPE, RECIPE), (RECIPE, fp4.MXFP8BlockScaling("default")), (fp4.HIGH_PRECISION, RECIPE)):
        how = dict(zip(("recipe", "out_recipe"), pair, strict=True))
        mine = tuple(s if r is RECIPE else None for s, r in zip(states, pair, strict=True))
        got, *_ = cotangent(partial(whole, **how), mine, dy, x, w_in, w_out)
        want, *_ = cotangent(partial(steps, **how), mine, dy, x, w_in, w_out)
        assert jax.tree.leaves(got)
        same_tree(got, want)


# --- used more than once ---


def twice(state, x, w):
    return jnp.sum(fp4.dense(x, w, recipe=RECIPE, state=state) + fp4.dense(2 * x, w, recipe=RECIPE, state=state))


@pytest.mark.core
def test_a_state_for_two_calls_is_refused():
    """Where it is differentiated: the sum of two states is none. Evaluation may read it as often as it likes."""
    state, x, w = delayed.init(RECIPE), normal(1, 8, K), normal(2, K, N)
    twice(state, x, w)
    jax.jit(twice)(state, x, w)
    jax.grad(twice, (1, 2))(state, x, w)
    says = "state is that an earlier call was given; needs a state of its own"
    refused(lambda: jax.grad(twice)(state, x, w), ValueError, says)
    refused(lambda: jax.jit(jax.grad(twice))(state, x, w), ValueError, says)
    refused(lambda: jax.grad(jax.jit(twice))(state, x, w), ValueError, says)
    sizes = jnp.int32([8])
    mlp = lambda s, x: fp4.grouped_mlp(x, jnp.ones((1, K, 2)), jnp.ones((1, 1, N)), sizes, recipe=RECIPE, state=(s, s))  # noqa: E731
    refused(lambda: jax.grad(lambda s: mlp(s, x).sum())(delayed.init(RECIPE, (1,))), ValueError, says)


@pytest.mark.core
def test_what_only_run_time_knows_is_loud_too():
    """One program called twice with a state, or a vmap over one: `update` raises, under jit the scales are NaN."""
    state, xs, w = delayed.init(RECIPE), normal(1, 2, 8, K), normal(2, K, N)
    once = jax.jit(lambda state, x: jnp.sum(fp4.dense(x, w, recipe=RECIPE, state=state)))
    losses = (
        lambda s: once(s, xs[0]) + once(s, xs[1]),
        lambda s: jnp.sum(jax.vmap(once, (None, 0))(s, xs)),
        lambda s: jax.lax.scan(lambda total, x: (total + once(s, x), None), 0.0, xs)[0],
    )
    for loss in losses:
        new = jax.grad(loss)(state)
        refused(lambda new=new: delayed.update(state, new), ValueError, "a state is used 2 times; needs one call")
        after = jax.jit(lambda s, loss=loss: delayed.update(s, jax.grad(loss)(s)))(state)
        for name in ("x", "kernel", "dy"):
            assert np.isnan(getattr(after, name).scale)


# --- transformations ---


@pytest.mark.core
@pytest.mark.parametrize("remat", [False, True])
def test_scan_and_vmap_over_stacked_states(remat):
    """As a loop over layers (or over members of an ensemble), each with its state."""
    layers, x, ws = 2, normal(1, 8, K), normal(2, 2, K, K) / 5
    states = jax.tree.map(lambda a: jnp.stack([a] * layers), delayed.init(RECIPE))
    one = lambda x, w, s: jnp.sin(fp4.dense(x, w, recipe=RECIPE, state=s))  # noqa: E731
    one = jax.checkpoint(one) if remat else one

    def scanned(states, ws, x):
        return jnp.sum(jax.lax.scan(lambda x, of: (one(x, *of), None), x, (ws, states))[0])

    def unrolled(states, ws, x):
        for i in range(layers):
            x = one(x, ws[i], jax.tree.map(lambda a, i=i: a[i], states))
        return jnp.sum(x)

    def members(states, ws, x):
        return jnp.sum(jax.vmap(one, (None, 0, 0))(x, ws, states))

    def looped(states, ws, x):
        return sum(jnp.sum(one(x, ws[i], jax.tree.map(lambda a, i=i: a[i], states))) for i in range(layers))

    for fast, slow in ((scanned, unrolled), (members, looped)):
        news = [jax.jit(jax.grad(f, (0, 1)))(states, ws, x)[0] for f in (fast, slow)]
        got, want = (delayed.update(states, new) for new in news)
        same_tree(delayed.merge(news[0], jax.tree.map(jnp.zeros_like, states)), news[0])
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), got, want)
        assert (np.asarray(got.x.scale) != 1).all() and (np.asarray(got.dy.scale) != 1).all()


@pytest.mark.core
def test_a_training_step():
    """Two layers, Adam, two microbatches: parameters and optimizer state have the tree they have without quantization,
    and the loss falls."""
    params = {"a": normal(1, K, N) / 5, "b": normal(2, N, K) / 7}
    states = {name: delayed.init(RECIPE) for name in params}
    optimizer = optax.adam(1e-2)

    def loss(params, states, batch):
        h = jnp.tanh(fp4.dense(batch, params["a"], recipe=RECIPE, state=states["a"]))
        return jnp.mean((fp4.dense(h, params["b"], recipe=RECIPE, state=states["b"]) - batch) ** 2)

    @jax.jit
    def step(params, states, opt_state, batches):
        total, news = None, None
        for batch in batches:
            grads, new = jax.grad(loss, (0, 1))(params, states, batch)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
            news = new if news is None else delayed.merge(news, new)
        states = delayed.update(states, news)
        updates, opt_state = optimizer.update(jax.tree.map(lambda g: g / len(batches), total), opt_state, params)
        return optax.apply_updates(params, updates), states, opt_state

    opt_state = optimizer.init(params)
    trees = jax.tree.structure((params, states, opt_state))
    batches = normal(3, 2, 16, K)
    before, spec = loss(params, states, batches[0]), Specification(RECIPE)
    for _ in range(20):
        spec.sees(x=amax(batches), kernel=amax(params["a"]))
        params, states, opt_state = step(params, states, opt_state, batches)
        assert jax.tree.structure((params, states, opt_state)) == trees
        for name in ("x", "kernel"):
            same_tree(getattr(states["a"], name), Delayed(*map(jnp.asarray, spec.state[name])))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(states))
    assert loss(params, states, batches[0]) < 0.7 * before


@pytest.mark.core
def test_microbatches_are_one_batch_to_the_amax():
    """Four of eight rows, merged, against one of 32: the same histories and scales."""
    x, dy, w = normal(1, 32, K), normal(2, 32, N), normal(3, K, N)
    state, dense = advanced(delayed.init(RECIPE)), partial(fp4.dense, recipe=RECIPE)
    whole = cotangent(dense, state, dy, x, w)
    parts = [cotangent(dense, state, dy[i : i + 8], x[i : i + 8], w) for i in range(0, 32, 8)]
    merged = parts[0][0]
    for part in parts[1:]:
        merged = delayed.merge(merged, part[0])
    same_tree(delayed.update(state, merged), delayed.update(state, whole[0]))
    # and one scale for all, the state's: the gradients are those of the whole batch
    np.testing.assert_allclose(sum(part[2] for part in parts), whole[2], rtol=1e-5, atol=1e-5)


# --- meshes ---

ON_A_MESH = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jax_fp4 as fp4
from jax_fp4 import delayed
assert jax.device_count() == 8
mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
recipe = fp4.DelayedScaling("default", amax_history_len=3)
x, w = jax.random.normal(jax.random.key(1), (32, 24)), jax.random.normal(jax.random.key(2), (24, 16))
x = x.at[25, 3].set(50.0)  # in the seventh shard alone
state = delayed.init(recipe)

def after(state, x, w):
    loss = lambda state, w: jnp.mean(jnp.sin(fp4.dense(x, w, recipe=recipe, state=state)))
    new, dw = jax.grad(loss, (0, 1))(state, w)
    return new, dw

new, dw = jax.jit(after)(state, x, w)
want = delayed.update(state, new)
assert want.x.scale == np.float32(448) / np.float32(50)
sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
replicated = jax.device_put((state, w), NamedSharding(mesh, P()))
new, dw_sharded = jax.jit(after)(replicated[0], sharded, replicated[1])
got = delayed.update(state, new)
def compare(a, b): np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-7)
jax.tree.map(compare, got, want)
assert got.x.scale == want.x.scale and got.kernel.scale == want.kernel.scale
compare(dw_sharded, dw)

def local(state, x, w):
    loss = lambda state: jnp.sum(jnp.sin(fp4.dense(x, w, recipe=recipe, state=state))) / 512
    return delayed.update(state, jax.grad(loss)(state), axis_name="data")

f = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P(), check_vma=False)
got = jax.jit(f)(state, x, w)
loss = lambda state, x: jnp.sum(jnp.sin(fp4.dense(x, w, recipe=recipe, state=state))) / 512
parts = [jax.grad(loss)(state, part) for part in jnp.split(x, 8)]
merged = parts[0]
for part in parts[1:]:
    merged = delayed.merge(merged, part)
jax.tree.map(compare, got, delayed.update(state, merged))
assert got.x.scale == want.x.scale and got.kernel.scale == want.kernel.scale
"""


@pytest.mark.core
@pytest.mark.slow
def test_on_a_mesh_of_eight():
    """Under jit an amax is that of the whole array; inside shard_map `update(axis_name=)` makes one of the shards'."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", ON_A_MESH], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


# --- what is refused ---

X, W = normal(1, 4, K), normal(2, K, N)
ONE = delayed.init(RECIPE)


@pytest.mark.core
@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: fp4.dense(X, W, recipe=RECIPE), ValueError, "dense: state is None; needs a delayed.State"),
        (lambda: fp4.dense(X, W, recipe=RECIPE, state=(ONE,)), TypeError, "dense: state is a tuple"),
        (lambda: fp4.dense(X, W, state=ONE), ValueError, "state is given beside no recipe; needs DelayedScaling"),
        (
            lambda: fp4.dense(X, W, recipe=fp4.MXFP8BlockScaling("default"), state=ONE),
            ValueError,
            "state is given beside MXFP8BlockScaling; needs DelayedScaling",
        ),
        (
            lambda: fp4.dense(X, W, recipe=RECIPE, state=delayed.init(RECIPE, (2,))),
            ValueError,
            r"state is float32 with histories \(2, 3\), .*; needs float32 \(3,\)",
        ),
        (
            lambda: fp4.dense(X, W, recipe=fp4.DelayedScaling("default", amax_history_len=5), state=ONE),
            ValueError,
            r"state is float32 with histories \(3,\), .*; needs float32 \(5,\)",
        ),
        (
            lambda: fp4.grouped_dense(X, W[None], jnp.int32([4]), recipe=RECIPE, state=ONE),
            ValueError,
            r"grouped_dense: state is float32 with histories \(3,\), .*; needs float32 \(1, 3\).*recipe, \(1,\)",
        ),
        (
            lambda: fp4.grouped_mlp(X, W[None], W[None], jnp.int32([4]), recipe=RECIPE, state=ONE),
            TypeError,
            "grouped_mlp: state is a State; needs a pair",
        ),
        (
            lambda: fp4.layernorm_mlp(
                X, jnp.ones(K), None, W, W.T, recipe=RECIPE, state=(ONE, None), activation="relu"
            ),
            ValueError,
            r"layernorm_mlp: state\[1\] is None; needs a delayed.State",
        ),
        (
            lambda: fp4.layernorm_dense(X, jnp.ones(K), None, W, recipe=RECIPE),
            ValueError,
            "layernorm_dense: state is None",
        ),
        (lambda: delayed.init(fp4.MXFP8BlockScaling("default")), TypeError, "delayed.init: recipe is MXFP8"),
        (lambda: fp4.DelayedScaling("unquant"), ValueError, "backward_mode is 'unquant'; needs 'default'"),
        (lambda: fp4.DelayedScaling("default", amax_history_len=0), ValueError, "amax_history_len is 0; needs a whole"),
        (lambda: fp4.DelayedScaling("default", margin=-1), ValueError, "margin is -1; needs a whole"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_what_is_refused(call, error, says):
    refused(call, error, says)
