"""moe: against every expert on every token, and against the functions it is made of."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import refused

import jax_fp4 as fp4
from jax_fp4.checkpoint_policies import save_products, save_quantized

LEAD, D, F, N, E = (3, 4), 32, 8, 10, 6
T = 12
MODES = ("default", "unquant", "dequant")
KEY = jax.random.key(0)
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiling is most of what this takes


def recipe(mode="unquant", **kw):
    return fp4.NVFP4BlockScaling(backward_mode=mode, **kw)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32), dtype)


ARGUMENTS = dict(
    x=normal(0, *LEAD, D),
    logits=normal(1, *LEAD, E),
    w_in=normal(2, E, D, 2 * F) / 4,
    w_out=normal(3, E, F, N) / 3,
    b_in=normal(4, E, 2 * F),
    b_out=normal(5, E, N),
)


def same(a, b):
    """The same structure, dtypes and bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for got, want in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def step(function, **options):
    """What a training step takes of `function`: (y, routing), and the gradient of every argument for a loss in which
    each element of y, and the auxiliary loss, counts differently."""

    def loss(arguments, **more):
        y, routing = function(**arguments, **options, **more)
        return jnp.sum(normal(6, *y.shape) * y.astype(jnp.float32)) + 3 * routing.aux_loss, (y, routing)

    gradient = jax.value_and_grad(loss, has_aux=True)
    return lambda arguments, **more: (lambda value, grads: (value[1], grads))(*gradient(arguments, **more))


# --- without a recipe: every expert on every token ---


def chosen_by_hand(logits, top_k, score="softmax", expert_groups=1, top_expert_groups=1, bias=0.0, **_):
    """[..., e] booleans: the experts of each token, by loops."""
    mask = np.zeros(logits.shape, bool)
    for token in np.ndindex(logits.shape[:-1]):
        row = np.asarray(logits[token], np.float64)
        ranked = (np.exp(row) / np.exp(row).sum() if score == "softmax" else 1 / (1 + np.exp(-row))) + np.asarray(bias)
        parts = np.split(np.arange(E), expert_groups)
        parts.sort(key=lambda part: -np.sort(ranked[part])[-2:].sum())
        allowed = np.concatenate(parts[:top_expert_groups])
        mask[token][allowed[np.argsort(-ranked[allowed])[:top_k]]] = True
    return mask


def every_expert(x, logits, w_in, w_out, b_in, b_out, *, mask, score="softmax", normalize=True, scale=1.0):
    """The definition, E / top_k times the work: y and the auxiliary loss."""
    scores = jax.nn.softmax(logits) if score == "softmax" else jax.nn.sigmoid(logits)
    gate = jnp.where(mask, scores, 0)
    gate = scale * (gate / gate.sum(-1, keepdims=True) if normalize else gate)
    h = jnp.einsum("...d,edh->...eh", x, w_in) + b_in
    outputs = jnp.einsum("...ef,efn->...en", jax.nn.silu(h[..., :F]) * h[..., F:], w_out) + b_out
    share = jnp.mean(mask.reshape(-1, E), 0) / jnp.mean(jnp.sum(mask, -1))
    aux_loss = E * jnp.sum(share * jnp.mean((scores / scores.sum(-1, keepdims=True)).reshape(-1, E), 0))
    return jnp.einsum("...e,...en->...n", gate, outputs), fp4.route(logits, 1)._replace(aux_loss=aux_loss)


LOADS = {
    "mixed": ARGUMENTS["logits"],
    "all to one": ARGUMENTS["logits"].at[..., 4].set(8),
    "none to two": ARGUMENTS["logits"].at[..., jnp.array([0, 3])].set(-8),
}


@pytest.mark.core
@pytest.mark.parametrize(
    "options",
    [
        dict(top_k=1, normalize=False),
        dict(top_k=2),
        dict(top_k=E),
        dict(top_k=1, score="sigmoid", normalize=False, scale=2.5),
        dict(top_k=3, score="sigmoid", expert_groups=3, top_expert_groups=2, bias=normal(7, E) / 4),
    ],
    ids=lambda options: " ".join(options),
)
def test_without_recipe_equals_every_expert_on_every_token(options):
    """y, the loss that balances, and all gradients, at each load of the experts; one without tokens has none (C1)."""
    weighing = {name: options[name] for name in ("score", "normalize", "scale") if name in options}
    got, by_hand = jit(step(fp4.moe, **options)), jit(step(every_expert, **weighing))
    for logits in LOADS.values():
        arguments, mask = ARGUMENTS | dict(logits=logits), chosen_by_hand(np.asarray(logits), **options)
        (y, routing), grads = got(arguments)
        (want, wanted), want_grads = by_hand(arguments, mask=mask)
        assert y.shape == (*LEAD, N) and routing.weights.shape == (*LEAD, options["top_k"])
        np.testing.assert_array_equal(np.sort(routing.experts.ravel()), np.sort(np.nonzero(mask)[-1]))
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(routing.aux_loss, wanted.aux_loss, rtol=1e-5)
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, want_grads[name], rtol=1e-4, atol=1e-4, err_msg=name)
        assert np.abs(grads["logits"]).max() > 1e-3 and np.abs(grads["x"]).max() > 1e-3
        idle = ~mask.reshape(-1, E).any(0)
        for name in ("w_in", "w_out", "b_in", "b_out"):
            assert (np.asarray(grads[name])[idle] == 0).all()
            assert (np.abs(np.asarray(grads[name])[~idle]).reshape((~idle).sum(), -1).max(1) > 0).all()


def test_the_loads_are_what_they_say():
    idle = {name: (~chosen_by_hand(np.asarray(x), 1).reshape(-1, E).any(0)).sum() for name, x in LOADS.items()}
    assert idle["all to one"] == E - 1 and idle["none to two"] >= 2


# --- with recipes: the composition ---


def composition(x, logits, w_in, w_out, *, top_k, b_in=None, b_out=None, score="softmax", **mlp):
    routing = fp4.route(logits, top_k, score=score)
    grouped = fp4.group_tokens(x, routing.experts, w_in.shape[0])
    probs = fp4.group_weights(routing.weights, grouped.order)
    y = fp4.grouped_mlp(grouped.x, w_in, w_out, grouped.group_sizes, b_in=b_in, b_out=b_out, probs=probs, **mlp)
    return fp4.combine_tokens(y, grouped.order, top_k=top_k).reshape(*x.shape[:-1], -1), routing


@pytest.mark.core
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (jnp.float32, dict(top_k=2, recipe=recipe("default"))),
        (jnp.bfloat16, dict(top_k=1, recipe=recipe("unquant"), out_recipe=recipe("dequant"), score="sigmoid")),
    ],
    ids=["default", "two recipes"],
)
def test_with_recipes_equals_the_composition(dtype, options):
    """Bit for bit, and the key decides on the gradients alone."""
    activation = fp4.Activation("clamped_qgeglu", limit=2.0)
    arguments = ARGUMENTS | dict(x=ARGUMENTS["x"].astype(dtype))

    @jit
    def both(arguments, key):
        return [step(f, activation=activation, **options)(arguments, key=key) for f in (fp4.moe, composition)]

    got, want = both(arguments, KEY)
    same(got, want)
    assert got[0][0].shape == (*LEAD, N)
    same(both(arguments, KEY)[0], got)
    (other_y, grads), drawn = both(arguments, jax.random.key(1))[0], options["recipe"].mode == "default"
    same(other_y, got[0])
    assert np.array_equal(grads["w_in"], got[1]["w_in"]) is not drawn
    assert np.array_equal(grads["x"], got[1]["x"]) is not drawn


@pytest.mark.core
def test_frozen_kernels():
    """A plane or the pair: the y of an array that is quantized on the way."""
    arguments = {name: ARGUMENTS[name] for name in ("x", "logits", "w_in", "w_out")}
    tiles = dict(axis=0, block=(16, 16), batch_dims=1)
    w_out = fp4.quantize(arguments["w_out"], **tiles)
    pair = fp4.quantize_transpose(arguments["w_in"], block=(16, 16), batch_dims=1)
    call = jit(partial(fp4.moe, top_k=2, recipe=recipe("default")))
    y, _ = call(**arguments)
    same(call(**arguments | dict(w_in=pair, w_out=w_out))[0], y)


@pytest.mark.core
@pytest.mark.parametrize(("tokens", "mode"), [((0,), None), ((2, 0), "default")], ids=str)
def test_no_tokens(tokens, mode):
    """C4."""
    arguments = ARGUMENTS | dict(x=normal(0, *tokens, D), logits=normal(1, *tokens, E))
    chosen = None if mode is None else recipe(mode)
    (y, routing), grads = jit(step(fp4.moe, top_k=2, recipe=chosen, key=KEY))(arguments)
    assert y.shape == (*tokens, N) and routing.experts.shape == (*tokens, 2)
    assert routing.aux_loss == 0
    same(grads, jax.tree.map(jnp.zeros_like, arguments))


def test_one_token_without_leading_axes():
    arguments = ARGUMENTS | dict(x=normal(0, D), logits=normal(1, E))
    y, routing = jax.eval_shape(partial(fp4.moe, top_k=2, recipe=recipe()), **arguments)
    assert y.shape == (N,) and routing.weights.shape == (2,)


# --- dtypes, residuals, what is recorded ---


@pytest.mark.parametrize("mode", [None, *MODES])
def test_dtypes(mode):
    """D9: a float32 router widens nothing, and every gradient has the dtype of its parameter."""
    dtypes = dict(zip(ARGUMENTS, ["bfloat16", "float32", "float32", "bfloat16", "float32", "float16"], strict=True))
    arguments = {name: a.astype(dtypes[name]) for name, a in ARGUMENTS.items()}
    chosen = None if mode is None else recipe(mode)
    (y, routing), grads = jax.eval_shape(step(fp4.moe, top_k=2, recipe=chosen, key=KEY), arguments)
    assert y.dtype == jnp.bfloat16
    assert [leaf.dtype for leaf in routing] == [jnp.float32, jnp.int32, jnp.float32]
    assert {name: grad.dtype for name, grad in grads.items()} == dtypes


@pytest.mark.parametrize(
    ("mode", "rows"),
    [("unquant", {(2 * T, D), (2 * T, 2 * F)}), ("default", {(2 * T, 2 * F)}), ("dequant", {(2 * T, 2 * F)})],
)
def test_kept_for_the_backward(mode, rows):
    """D8: of what has a row for each choice, the activation's input and in unquant the tokens; never the output or the
    second input."""

    def pullback(arguments):
        return jax.vjp(lambda a: fp4.moe(**a, top_k=2, recipe=recipe(mode), key=KEY)[0], arguments)[1]

    leaves = jax.tree.leaves(jax.eval_shape(pullback, ARGUMENTS))
    kept = [a.shape for a in leaves if a.shape[:1] == (2 * T,) and a.ndim == 2 and a.dtype == jnp.float32]
    assert sorted(kept) == sorted(rows)


def test_report():
    """D3: two products, each with its own precision."""
    for options, want in [
        (dict(recipe=recipe("dequant")), ["dequant", "dequant"]),
        (dict(recipe=recipe("default"), out_recipe=recipe("unquant")), ["default", "unquant"]),
        (dict(recipe=fp4.HIGH_PRECISION, out_recipe=recipe("unquant")), ["HIGH_PRECISION", "unquant"]),
        (dict(out_recipe=fp4.HIGH_PRECISION), ["unquant", "HIGH_PRECISION"]),
    ]:
        with fp4.autocast(recipe()):
            rows = fp4.report(partial(fp4.moe, top_k=2, **options), **ARGUMENTS).rows
        assert [row.kernel_shape for row in rows] == [(E, D, 2 * F), (E, F, N)]
        assert all(name in row.note for name, row in zip(want, rows, strict=True)), rows
        assert [row.quantized for row in rows] == [name != "HIGH_PRECISION" for name in want]


# --- keys ---


@pytest.mark.parametrize("drawing", ["recipe", "out_recipe"])
def test_a_key_is_missed_only_where_a_gradient_draws(drawing):
    recipes = dict(recipe=recipe(), out_recipe=recipe()) | {drawing: recipe("default")}
    jax.eval_shape(partial(fp4.moe, top_k=2, **recipes), **ARGUMENTS)
    refused(lambda: jax.eval_shape(step(fp4.moe, top_k=2, **recipes), ARGUMENTS), ValueError, "key is None")
    recipes[drawing] = recipe("default", stochastic_rounding=False)
    jax.eval_shape(step(fp4.moe, top_k=2, **recipes), ARGUMENTS)
    jax.eval_shape(step(fp4.moe, top_k=2, recipe=recipe("dequant")), ARGUMENTS)


@pytest.mark.core
@pytest.mark.parametrize("expert_axis", [None, "e"])
def test_a_policy_keeps_rows_with_the_order_they_lie_in(expert_axis):
    """Nothing is routed twice under jax.checkpoint: logits made again may differ in a last bit."""
    found, spec = {}, jax.P(expert_axis)
    for policy in (save_quantized, save_products, jax.checkpoint_policies.everything_saveable, None):

        @partial(jax.checkpoint, policy=policy)
        def once(x, *w):
            x = jnp.sin(x)
            y, _ = fp4.moe(x, x[..., :E], *w, top_k=2, recipe=recipe("unquant", stochastic_rounding=False),
                           expert_axis=expert_axis)  # fmt: skip
            return jnp.tanh(y)

        mesh = jax.make_mesh((2,), ("e",), axis_types=(jax.sharding.AxisType.Auto,))
        cut = once if expert_axis is None else jax.shard_map(once, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
        gradient = jax.grad(lambda *a, cut=cut: jnp.sum(cut(*a)), (0, 1, 2))
        text = str(jax.make_jaxpr(gradient)(normal(0, 4, D), ARGUMENTS["w_in"], ARGUMENTS["w_out"]))
        # the choice, the order, and what the devices tell each other of it
        counted = r"= top_k\[", r":i32\S+ \w+:i32\S+ = sort\[", r"= all_gather\S*\["
        found[policy] = [len(re.findall(name, text)) for name in counted]
    once_each = [1, 1, int(expert_axis is not None)]
    assert [*found.values()] == [once_each, once_each, once_each, [2 * n for n in once_each]]


def test_checkpoint_changes_nothing():
    call = partial(fp4.moe, top_k=2, recipe=recipe("default"), key=KEY)
    (y, routing), grads = jit(step(jax.checkpoint(call)))(ARGUMENTS)
    (want, wanted), want_grads = jit(step(call))(ARGUMENTS)
    np.testing.assert_array_equal(routing.experts, wanted.experts)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), grads, want_grads)


# --- refusals ---


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        (dict(top_k=7), ValueError, "top_k is 7; needs an integer from 1 to 6"),
        (dict(top_k=0), ValueError, "top_k is 0"),
        (dict(top_k=3, expert_groups=3, top_expert_groups=1), ValueError, "top_k is 3; .* 1 groups hold 2 experts"),
        (dict(score="tanh"), ValueError, "score is 'tanh'"),
        (dict(bias=jnp.ones(E + 1)), ValueError, r"bias is of shape \(7,\); needs \(6,\)"),
        (dict(logits=normal(1, *LEAD, E + 1)), ValueError, r"logits is of shape \(3, 4, 7\); needs \(3, 4, 6\)"),
        (dict(logits=normal(1, 4, E)), ValueError, r"^moe: logits is of shape \(4, 6\); needs \(3, 4, 6\)"),
        (dict(logits=normal(1, T, E)), ValueError, r"^moe: logits is of shape \(12, 6\)"),
        (dict(logits=jnp.float32(1)), ValueError, r"^moe: logits is of shape \(\)"),
        (dict(logits=[[1.0]]), TypeError, "^moe: logits is a list"),
        (dict(logits=jnp.ones((*LEAD, E), jnp.int32)), TypeError, "logits is an array of int32"),
        (dict(x=[[1.0]]), TypeError, "^moe: x is a list"),
        (dict(x=jnp.float32(1)), ValueError, "^moe: x is a scalar"),
        (dict(x=normal(0, *LEAD, D + 1)), ValueError, r"w_in is of shape \(6, 32, 16\); needs 33 rows"),
        (dict(w_in=ARGUMENTS["w_in"][0]), ValueError, r"^moe: w_in is of shape \(32, 16\); needs \[g, k, n\]"),
        (dict(w_in=jnp.float32(1)), ValueError, r"^moe: w_in is of shape \(\)"),
        (dict(w_in=(ARGUMENTS["w_in"],)), TypeError, "^moe: w_in is a tuple; needs the pair"),
        (dict(w_in=ARGUMENTS["w_in"][..., :5]), ValueError, "w_in is .*; needs an even number of columns"),
        (dict(w_out=ARGUMENTS["w_out"][1:]), ValueError, r"w_out is of shape \(5, 8, 10\); needs 6 groups"),
        (dict(w_out=ARGUMENTS["w_out"][:, 1:]), ValueError, r"w_out is of shape \(6, 7, 10\); needs 8 rows"),
        (dict(b_in=ARGUMENTS["b_in"][1:]), ValueError, r"b_in is of shape \(5, 16\); needs \(6, 16\)"),
        (dict(b_out=ARGUMENTS["b_out"][:, 1:]), ValueError, r"b_out is of shape \(6, 9\); needs \(6, 10\)"),
        (dict(activation="swishglu"), ValueError, "activation is 'swishglu'; needs one of"),
        (dict(recipe="nvfp4"), TypeError, "^moe: recipe is 'nvfp4'; needs a recipe object"),
        (dict(recipe=recipe(), out_recipe=fp4.NVFP4BlockScaling), TypeError, "^moe: out_recipe is the class NVFP4"),
    ],
)
def test_bad_input(changed, error, says):
    refused(lambda: jax.eval_shape(lambda: fp4.moe(**dict(top_k=2) | ARGUMENTS | changed)), error, says)
