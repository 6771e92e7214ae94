"""Delayed scaling in Linen and NNX: where the states live, what a step makes of them, what is refused.

test_delayed.py has the states themselves and the functions.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from products import refused
from trees import same_tree

import jax_fp4 as fp4
from jax_fp4 import linen
from jax_fp4 import nnx as fp4_nnx

RECIPE = fp4.DelayedScaling("default", amax_history_len=4)
X = jax.random.normal(jax.random.key(0), (24, 16))
SIZES = jnp.array([10, 0, 12], jnp.int32)
LINEN = {
    "Dense": (lambda recipe: linen.Dense(8, recipe=recipe), ()),
    "DenseGeneral": (lambda recipe: linen.DenseGeneral((2, 4), recipe=recipe), ()),
    "DotGeneral": (lambda recipe: nn.Dense(8, dot_general=None, dot_general_cls=lambda: linen.DotGeneral(recipe)), ()),
    "GroupedDense": (lambda recipe: linen.GroupedDense(8, 3, recipe=recipe), (SIZES,)),
    "LayerNormDense": (lambda recipe: linen.LayerNormDense(8, recipe=recipe), ()),
    "LayerNormMLP": (lambda recipe: linen.LayerNormMLP(8, recipe=recipe), ()),
    "MoE": (lambda recipe: linen.MoE(4, 8, recipe=recipe), ()),
}


def is_state(node):
    return isinstance(node, fp4.delayed.State)


def first(y):
    return y[0] if isinstance(y, tuple) else y


def step_of(model, more):
    @jax.jit
    def step(variables, x):
        loss = lambda v: jnp.sum(jnp.sin(first(model.apply(v, x, *more)).astype(jnp.float32)))  # noqa: E731
        return jax.grad(loss)(variables)

    return step


@pytest.mark.parametrize("name", LINEN)
def test_linen_states_are_a_collection_of_their_own(name):
    make, more = LINEN[name]
    plain, delayed = (make(recipe).init(jax.random.key(1), X, *more) for recipe in (None, RECIPE))
    same_tree(delayed["params"], plain["params"])
    assert set(delayed) - set(plain) == {linen.STATES}

    step = step_of(make(RECIPE), more)
    gradients = step(delayed, X)
    states = fp4.delayed.update(delayed[linen.STATES], gradients[linen.STATES])
    assert jax.tree.structure(states) == jax.tree.structure(delayed[linen.STATES])
    for state in jax.tree.leaves(states, is_leaf=is_state):
        for tensor in (state.x, state.kernel, state.dy):
            newest, scale = np.asarray(tensor.history[..., -1]), np.asarray(tensor.scale)
            assert np.any(newest > 0) and not np.any(tensor.history[..., :-1]) and state.calls == 0
            largest = 57344 if tensor is state.dy else 448
            np.testing.assert_array_equal(scale[newest > 0], np.float32(largest) / newest[newest > 0])
    # evaluated, a state does not change, and the scales it holds are those that count
    y, after = make(RECIPE).apply(delayed, X, *more, mutable=[linen.STATES])
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), after[linen.STATES], delayed[linen.STATES]))
    assert np.any(first(y) != first(make(RECIPE).apply(delayed | {linen.STATES: states}, X, *more)))


def test_linen_layers_without_a_state_say_so():
    model = linen.Dense(8, recipe=RECIPE)
    params = model.init(jax.random.key(0), X)["params"]
    says = r"Dense: the collection 'fp4_state' is without state; needs a state"
    refused(lambda: model.apply({"params": params}, X), ValueError, says)
    with fp4.autocast(RECIPE), linen.quantized(RECIPE):  # a model of Flax's own layers gets states as well
        variables = nn.Dense(8).init(jax.random.key(0), X)
    assert set(variables) == {"params", linen.STATES}


class Twice(nn.Module):
    @nn.compact
    def __call__(self, x):
        layer = linen.Dense(16, recipe=RECIPE)
        return layer(layer(x))


@pytest.mark.parametrize("jitted", [False, True])
def test_a_shared_layer_is_refused_where_it_is_differentiated(jitted):
    variables = Twice().init(jax.random.key(0), X)
    Twice().apply(variables, X)
    step = lambda v: jax.grad(lambda v: Twice().apply(v, X).sum())(v)  # noqa: E731
    refused(lambda: (jax.jit(step) if jitted else step)(variables), ValueError, "^dense: state is that an earlier call")
    only = lambda params: Twice().apply(variables | {"params": params}, X).sum()  # noqa: E731
    jax.grad(only)(variables["params"])  # of the parameters alone nothing is added up


class Deep(nn.Module):
    """Blocks under scan and remat: stacked parameters, stacked states."""

    @nn.compact
    def __call__(self, x):
        block = nn.remat(linen.LayerNormMLP)
        scan = nn.scan(
            lambda module, carry, _: (module(carry), None),
            variable_axes={"params": 0, linen.STATES: 0},
            split_rngs={"params": True},
            length=3,
        )
        return scan(block(8, recipe=RECIPE, name="mlp"), x, None)[0]


def test_states_are_stacked_under_scan():
    variables = Deep().init(jax.random.key(0), X)
    state = variables[linen.STATES]["mlp"]["state_in"]
    assert state.x.history.shape == (3, 4) and state.calls.shape == (3,)
    gradients = step_of(Deep(), ())(variables, X)
    states = fp4.delayed.update(variables[linen.STATES], gradients[linen.STATES])
    newest = np.asarray(states["mlp"]["state_in"].x.history[:, -1])
    assert len(set(newest.tolist())) == 3 and (newest > 0).all()  # each block saw values of its own
    merged = fp4.delayed.merge(gradients[linen.STATES], gradients[linen.STATES])
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), merged, gradients[linen.STATES]))


def test_a_linen_step_with_gradient_accumulation():
    """The states after four microbatches are those of amaxes over all of them; the optimizer never sees one."""
    model = linen.Dense(8, recipe=RECIPE)
    variables = model.init(jax.random.key(0), X)
    optimizer = optax.adam(1e-2)
    parts = X.reshape(4, 6, 16) * jnp.array([1.0, 3.0, 0.5, 2.0])[:, None, None]
    step = step_of(model, ())
    each = [step(variables, part) for part in parts]
    new = each[0][linen.STATES]
    for gradients in each[1:]:
        new = fp4.delayed.merge(new, gradients[linen.STATES])
    states = fp4.delayed.update(variables[linen.STATES], new)
    assert states["state"].x.history[-1] == jnp.abs(parts).max()
    gradients = jax.tree.map(lambda *g: sum(g) / 4, *(g["params"] for g in each))
    updates, memory = optimizer.update(gradients, optimizer.init(variables["params"]))
    params = optax.apply_updates(variables["params"], updates)
    assert jax.tree.structure(params) == jax.tree.structure(variables["params"])
    assert not [leaf for leaf in jax.tree.leaves(memory) if leaf.shape == (4,)]


# --- NNX ---

RNGS = lambda: nnx.Rngs(0)  # noqa: E731
NNX = {
    "Linear": (lambda recipe: fp4_nnx.Linear(16, 8, recipe=recipe, rngs=RNGS()), ()),
    "LinearGeneral": (lambda recipe: fp4_nnx.LinearGeneral(16, (2, 4), recipe=recipe, rngs=RNGS()), ()),
    "GroupedLinear": (lambda recipe: fp4_nnx.GroupedLinear(3, 16, 8, recipe=recipe, rngs=RNGS()), (SIZES,)),
    "LayerNormLinear": (lambda recipe: fp4_nnx.LayerNormLinear(16, 8, recipe=recipe, rngs=RNGS()), ()),
    "LayerNormMLP": (lambda recipe: fp4_nnx.LayerNormMLP(16, 8, recipe=recipe, rngs=RNGS()), ()),
    "MoE": (lambda recipe: fp4_nnx.MoE(4, 16, 8, recipe=recipe, rngs=RNGS()), ()),
}
STATES = fp4_nnx.DelayedState
BOTH = nnx.DiffState(0, nnx.Any(nnx.Param, STATES))


def train(model, optimizer, x, *more):
    """One step, as the docstring of DelayedState has it."""
    loss = lambda model: jnp.sum(jnp.sin(first(model(x, *more)).astype(jnp.float32)))  # noqa: E731
    gradients = nnx.grad(loss, argnums=BOTH)(model)
    params, states = nnx.split_state(gradients, nnx.Param, STATES)
    optimizer.update(model, params)
    nnx.update(model, fp4.delayed.update(nnx.state(model, STATES), states))


@pytest.mark.parametrize("name", NNX)
def test_nnx_states_are_variables_of_their_own(name):
    make, more = NNX[name]
    plain, model = make(None), make(RECIPE)
    same_tree(nnx.to_pure_dict(nnx.state(model, nnx.Param)), nnx.to_pure_dict(nnx.state(plain, nnx.Param)))
    assert not jax.tree.leaves(nnx.state(plain, STATES))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    step = nnx.jit(train)
    for count in (1, 2):
        step(model, optimizer, X, *more)
        for state in jax.tree.leaves(nnx.state(model, STATES), is_leaf=lambda n: isinstance(n, fp4.delayed.State)):
            for tensor in (state.x, state.kernel, state.dy):
                filled = (np.asarray(tensor.history) > 0).sum(-1)
                assert filled.max() == count and state.calls == 0


def test_nnx_layers_without_a_state_say_so():
    layer = fp4_nnx.Linear(16, 8, rngs=RNGS())
    with fp4.autocast(RECIPE):
        refused(lambda: layer(X), ValueError, "^Linear: state is None; needs an nnx.DelayedState")
    model = nnx.Sequential(nnx.Linear(16, 16, rngs=RNGS()), fp4_nnx.MoE(4, 16, 8, rngs=RNGS()))
    fp4_nnx.quantize_model(model, fp4.Rules([(".*/router", fp4.HIGH_PRECISION), (".*", RECIPE)]))
    assert len(nnx.to_flat_state(nnx.state(model, STATES))) == 3
    first(model(X))
    fp4_nnx.quantize_model(model, fp4.Rules([(".*", fp4.MXFP8BlockScaling("default"))]))  # other rules: no states left
    assert not nnx.to_flat_state(nnx.state(model, STATES))
    first(model(X))


def test_the_same_rules_again_keep_the_states():
    model = nnx.Sequential(nnx.Linear(16, 8, rngs=RNGS()))
    rules = fp4.Rules([(".*", RECIPE)])
    fp4_nnx.quantize_model(model, rules)
    train(model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), X)
    before = model.layers[0].state.get_value().x.scale
    fp4_nnx.quantize_model(model, rules)
    assert model.layers[0].state.get_value().x.scale == before != 1


def test_a_state_is_of_one_product():
    """Batch entries have amaxes of their own, which one state cannot hold."""
    layer = fp4_nnx.LinearGeneral(16, 8, batch_axis={0: 24}, recipe=RECIPE, rngs=RNGS())
    refused(lambda: layer(X), fp4.UnsupportedError, "^dense: batch_dims is .*needs none under DelayedScaling")
