"""Mixture of experts without a framework: choose experts, bring tokens into groups, bring results back.

    routing = route(logits, top_k)                        # which experts, with what weight
    grouped = group_tokens(x, routing.experts, g)         # rows in the order of their experts
    y = grouped_mlp(grouped.x, w_in, w_out, grouped.group_sizes)
    out = combine_tokens(y, grouped.order, routing.weights)

t tokens with k choices each make n = t k rows, whatever the routing: shapes are static, group sizes are data, and no
token is dropped. Both directions of both movements are gathers, by `order` or by its inverse: deterministic, with sums
over the k copies of a token in float32 and one rounding.
"""

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import max_dim
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Float32, Int32

from jax_fp4._arguments import check_float
from jax_fp4._errors import message
from jax_fp4._placement import Axes, alike, axes_and_size, size_of
from jax_fp4._recipe import check_choice
from jax_fp4._rules import is_kept, keep, named_order, primals


class Routing(NamedTuple):
    """What `route` chose. experts are in descending order of what they were chosen by."""

    weights: Float32[Array, "*b k"]
    experts: Int32[Array, "*b k"]
    aux_loss: Float32[Array, ""]


class Grouped(NamedTuple):
    """Rows in the order of their experts.

    group_sizes: the rows of each expert. Rows past their sum, the tail, are zeros and belong to nobody.
    order: for each row its flat index, token * k + choice; in the tail n, one past the last.
    """

    x: Float[Array, "n d"]
    group_sizes: Int32[Array, " g"]
    order: Int32[Array, " n"]


@jax.named_scope("fp4.route")
def route(
    logits: Float[Array, "*b e"],
    top_k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    expert_groups: int | None = None,
    top_expert_groups: int | None = None,
    bias: Float[Array, " e"] | None = None,
    scale: float = 1.0,
    axis_name: Any = None,
) -> Routing:
    """Chooses top_k of e experts for each token: logits [..., e] -> weights and experts [..., k], aux_loss [].

    score: how logits become scores in [0, 1], "softmax" over all experts or "sigmoid" of each.
    normalize: the weights of a token sum to 1 (times scale); with softmax this is the softmax of the chosen logits.
        False leaves the scores as they are, what a top_k of 1 wants (Switch): normalized, its weight is constant.
    expert_groups, top_expert_groups: experts form so many equal groups of neighbours; only those of the
        top_expert_groups groups with the largest sum of two best scores can be chosen.
    bias: [e], added to the scores for choosing groups and experts, not in the weights and without a gradient.
    scale: a constant factor of the weights.
    axis_name: inside jax.shard_map, the mesh axis (or a tuple of several) over which tokens are split: aux_loss is then
        that of all of them.

    aux_loss is e * sum_e f_e P_e over all tokens of this call, 1 when both are uniform: f_e is the share of e among the
    choices (no gradient), P_e the mean score of e, scores summing to 1 over the experts. For one per sequence, vmap;
    under shard_map the tokens are the local ones. Without tokens it is 0.

    Everything is computed in float32 and returned so. Of equal experts, or groups, the lowest index comes first. A NaN
    logit makes the weights of its token NaN and leaves the indices in range; with sigmoid it is chosen first, and
    without normalize only its own weight is NaN. Inf with softmax is as NaN; aux_loss is NaN with any token's weights.
    -Inf excludes an expert, as long as top_k others are left.
    Raises TypeError or ValueError for what is not described here.

    Sources: Switch Transformer, arXiv 2101.03961 (aux_loss, equations 4 to 6); DeepSeek-V3, arXiv 2412.19437 (sigmoid
    scores, groups and bias; its routed scaling factor is `scale`).
    """
    _check_route(logits, top_k, score, normalize, expert_groups, top_expert_groups, bias, scale)
    logits = jnp.asarray(logits, jnp.float32)
    # Logarithms: a normalized weight is then a softmax, exact where every score of a token underflows.
    log_scores = jax.nn.log_softmax(logits) if score == "softmax" else jax.nn.log_sigmoid(logits)
    scores = jnp.exp(log_scores)
    experts = _choose(*jax.lax.stop_gradient((logits, scores, bias)), top_k, expert_groups, top_expert_groups)
    (experts,) = named_order(experts)
    chosen = jnp.take_along_axis(log_scores, experts, axis=-1)
    weights = jax.nn.softmax(chosen) if normalize else jnp.exp(chosen)
    share = scores if score == "softmax" else jax.nn.softmax(log_scores)
    axes = () if axis_name is None else axes_and_size("route", "axis_name", axis_name)[0]
    return Routing(weights * scale, experts, _balance(share, experts, axes))


@jax.named_scope("fp4.group_tokens")
def group_tokens(x: Float[Array, "*b d"], experts: Int32[Array, "*b k"], num_experts: int) -> Grouped:
    """Copies each token once for each of its experts, in the order of the experts: x [..., d] -> Grouped, x [n, d].

    Leading axes are flattened to t tokens, so n = t k. Within an expert, rows keep the order of tokens and choices. A
    choice outside 0..num_experts - 1, negative ones too, goes to the tail: it takes part in nothing and has no
    gradient (so the experts of another device are those whose index, less this device's first, is out of range).
    The gradient of x is the sum over a token's copies, in float32 and rounded once to x's dtype.

    Raises TypeError or ValueError for wrong dtypes and for shapes that do not fit.
    """
    check_tokens("group_tokens", x, experts, num_experts)
    top_k = experts.shape[-1]
    flat, n = jnp.asarray(experts).reshape(-1), math.prod(experts.shape)
    key = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    key, order = jax.lax.sort((key, jnp.arange(n, dtype=jnp.int32)), num_keys=1, is_stable=True)
    order = jnp.where(key < num_experts, order, n)
    group_sizes = jnp.zeros(num_experts, jnp.int32).at[key].add(1, mode="drop")
    group_sizes, order = named_order(group_sizes, order)
    tokens = jnp.asarray(x).reshape(n // top_k, x.shape[-1])
    return Grouped(_spread(*alike(tokens, order), top_k), group_sizes, order)


@jax.named_scope("fp4.combine_tokens")
def combine_tokens(
    y: Float[Array, "n d"],
    order: Int32[Array, " n"],
    weights: Float[Array, "*b k"] | None = None,
    *,
    top_k: int | None = None,
) -> Float[Array, "*b d"]:
    """The inverse of `group_tokens`: each token's sum over its k rows of y, times their weights -> [..., d].

    weights: [..., k], any float dtype; the leading axes are those of the result. None: y is weighted already (by
        `group_weights`), top_k says how many rows a token has, and the result is [t, d].
    The sum is in float32 in the order of the choices, rounded once to y's dtype. Rows of the tail, and the weights of
    their choices, are never read: NaN in either reaches nothing, and their gradients are 0. The gradients of y and
    weights are exact float32 products, rounded once to the dtype of each.

    Raises TypeError or ValueError for wrong dtypes, shapes that do not fit, both or neither of weights and top_k.
    """
    leading, k = _check_combine("combine_tokens", y, order, weights, top_k)
    flat = None if weights is None else jnp.asarray(weights).reshape(-1)
    rows, flat, order = alike(jnp.asarray(y), flat, jnp.asarray(order))
    out: Any = _combine(rows, flat, order, k)
    return out.reshape(*leading, y.shape[1])


@jax.named_scope("fp4.group_weights")
def group_weights(weights: Float[Array, "*b k"], order: Int32[Array, " n"]) -> Float[Array, " n"]:
    """The weights in the order of the rows, 0 in the tail: for what weights inside the expert's MLP (its `probs`).

    Differentiable; weights keep their dtype. Raises TypeError or ValueError for wrong dtypes and unequal sizes.
    """
    _check_order("group_weights", order, None)
    check_weights("group_weights", weights, order)
    rows: Any = _spread(*alike(jnp.asarray(weights).reshape(-1, 1), jnp.asarray(order)), 1)
    return rows[:, 0]


# --- choosing ---


def _choose(
    logits, scores, bias, top_k: int, expert_groups: int | None, top_expert_groups: int | None
) -> Int32[Array, "*b k"]:
    """Experts by their scores; without a bias by the logits, in the same order and with no ties from underflow."""
    biased = scores
    if bias is not None:  # which brings no excluded expert back
        biased = scores + jnp.broadcast_to(jnp.asarray(bias, jnp.float32), scores.shape)
        biased = jnp.where(logits == -jnp.inf, -jnp.inf, biased)
    ranked = logits if bias is None else biased
    if expert_groups is None or top_expert_groups is None:
        return _top(ranked, top_k)
    size = scores.shape[-1] // expert_groups
    grouped = _rankable(biased).reshape(*biased.shape[:-1], expert_groups, size)
    best = jnp.sum(jax.lax.top_k(grouped, min(2, size))[0], axis=-1)
    kept = jnp.sort(_top(best, top_expert_groups), axis=-1)  # ascending, so that equal experts stay in order
    within = jnp.arange(size, dtype=jnp.int32).reshape((1,) * kept.ndim + (size,))
    members = (kept[..., None] * size + within).reshape(*kept.shape[:-1], top_expert_groups * size)
    place = _top(jnp.take_along_axis(ranked, members, axis=-1), top_k)
    return jnp.take_along_axis(members, place, axis=-1)


def _top(values, k: int) -> Int32[Array, "*b k"]:
    return jax.lax.top_k(_rankable(values), k)[1]


def _rankable(values):
    """Without NaN, which sorts first or last by its sign bit, and without -0, which sorts below 0."""
    return jnp.where(jnp.isnan(values), jnp.inf, jnp.where(values == 0, 0.0, values))


def _balance(share: Float32[Array, "*b e"], experts: Int32[Array, "*b k"], axes: Axes) -> Float32[Array, ""]:
    """Over the tokens of all devices along `axes`."""
    e, devices = share.shape[-1], size_of(axes)
    counts, scores = jnp.zeros(e, jnp.int32).at[experts.reshape(-1)].add(1), jnp.sum(share.reshape(-1, e), axis=0)
    if axes:
        counts, scores = jax.lax.psum((counts, scores), axes)
    chosen = counts.astype(jnp.float32) / max_dim(1, devices * math.prod(experts.shape))
    mean = scores / max_dim(1, devices * math.prod(share.shape[:-1]))
    return e * jnp.sum(chosen * mean)


# --- moving rows ---


def take(rows: Array, index: Int32[Array, " m"]) -> Array:
    """rows[index], zeros where the index is past the end."""
    return rows.at[index].get(mode="fill", fill_value=0)


def inverse(order: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """For each flat index its row; n for a choice in the tail, which has none."""
    n = order.shape[0]
    return jnp.full(n, n, jnp.int32).at[order].set(jnp.arange(n, dtype=jnp.int32), mode="drop")


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _spread(x: Float[Array, "t d"], order: Int32[Array, " n"], top_k: int) -> Float[Array, "n d"]:
    return take(x, order // top_k)


def _spread_fwd(x, order, top_k: int):
    return _spread(x, order, top_k), order


def _spread_bwd(top_k: int, order, dy):
    return _combine(dy, None, order, top_k), None


_spread.defvjp(_spread_fwd, _spread_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _combine(y: Float[Array, "n d"], weights: Float[Array, " n"] | None, order: Int32[Array, " n"], top_k: int):
    (n, d), rows = y.shape, inverse(order)
    terms = take(y, rows).astype(jnp.float32)
    if weights is not None:
        terms = terms * jnp.where(rows < n, weights.astype(jnp.float32), 0)[:, None]
    return jnp.sum(terms.reshape(n // top_k, top_k, d), axis=1).astype(y.dtype)


def _combine_fwd(y, weights, order, top_k: int):
    """Kept are y for the gradient of the weights, the weights for that of y."""
    wants_y, wants_weights = y.perturbed, weights is not None and weights.perturbed
    y, weights, order = primals((y, weights, order))
    kept = keep(y if wants_weights else None, lambda: y), keep(weights if wants_y else None, lambda: weights)
    return _combine(y, weights, order, top_k), (*kept, order)


def _combine_bwd(top_k: int, residuals, dout):
    y, weights, order = residuals
    if isinstance(dout, SymbolicZero):
        return None, None, None
    if weights is None:
        return _spread(dout, order, top_k), None, None
    spread, dy, d_weights = take(dout, order // top_k).astype(jnp.float32), None, None
    if is_kept(weights):
        dy = (spread * take(weights, order).astype(jnp.float32)[:, None]).astype(y.dtype)
    if is_kept(y):  # NaN in the tail stays there: the inverse never names it
        dots = jnp.sum(spread * y.astype(jnp.float32), axis=-1)
        d_weights = take(dots, inverse(order)).astype(weights.dtype)
    return dy, d_weights, None


_combine.defvjp(_combine_fwd, _combine_bwd, symbolic_zeros=True)


# --- checks ---


def _check_count(op: str, name: str, value: object, low: int, high: int | None, because: str, fix: str) -> None:
    """A static integer from low to high."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        needs = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
        raise ValueError(message(op, name, repr(value), needs, because, fix))


def _check_route(logits, top_k, score, normalize, expert_groups, top_expert_groups, bias, scale) -> None:
    op = "route"
    check_float(op, "logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        shown, why = f"of shape {logits.shape}", "its last axis is the experts"
        raise ValueError(message(op, "logits", shown, "[..., e]", why, "x @ kernel [d, e]"))
    e = logits.shape[-1]
    check_choice(op, "score", score, ("softmax", "sigmoid"), "these make scores of logits")
    check_choice(op, "normalize", normalize, (True, False), "it is a switch")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) <= jnp.finfo(jnp.float32).max:
        raise ValueError(message(op, "scale", repr(scale), "a finite number", "it is a constant factor", "scale=1.0"))
    if bias is not None:
        check_float(op, "bias", bias)
        if bias.shape != (e,):
            shown, why = f"of shape {bias.shape}", "each expert has one"
            raise ValueError(message(op, "bias", shown, f"({e},)", why, "bias=None"))
    available, of = e, f"there are {e} experts"
    if expert_groups is not None or top_expert_groups is not None:
        _check_groups(op, e, expert_groups, top_expert_groups)
        available = e // expert_groups * top_expert_groups
        of = f"{top_expert_groups} groups hold {available} experts"
    _check_count(
        op, "top_k", top_k, 1, available, of, "top_k=1" if expert_groups is None else "a larger top_expert_groups"
    )


def _check_groups(op: str, e: int, expert_groups, top_expert_groups) -> None:
    if expert_groups is None or top_expert_groups is None:
        name, other = (
            ("expert_groups", "top_expert_groups") if expert_groups is None else ("top_expert_groups", "expert_groups")
        )
        why, fix = f"{other} is given and one means nothing without the other", f"{other}=None"
        raise ValueError(message(op, name, None, "a number", why, fix))
    _check_count(op, "expert_groups", expert_groups, 1, e, f"there are {e} experts", "expert_groups=None")
    if e % expert_groups:
        raise ValueError(
            message(
                op,
                "expert_groups",
                expert_groups,
                f"a divisor of {e}",
                "groups of experts are equal",
                "expert_groups=1",
            )
        )
    fix = f"top_expert_groups={expert_groups}"
    _check_count(op, "top_expert_groups", top_expert_groups, 1, expert_groups, f"there are {expert_groups} groups", fix)


def _check_indices(op: str, name: str, value) -> None:
    dtype = getattr(value, "dtype", None)
    if dtype != jnp.int32:
        shown = f"an array of {dtype}" if dtype is not None else f"a {type(value).__name__}"
        fix = f"jnp.asarray({name}, jnp.int32)"
        raise TypeError(message(op, name, shown, "an array of int32", "indices are int32 throughout", fix))


def check_tokens(op: str, x, experts, num_experts) -> None:
    check_float(op, "x", x)
    _check_indices(op, "experts", experts)
    _check_count(op, "num_experts", num_experts, 1, None, "there is a group for each expert", "kernel.shape[0]")
    if x.ndim == 0 or x.shape[:-1] != experts.shape[:-1] or experts.ndim == 0:
        needs = f"{(*x.shape[:-1], 'k')}" if x.ndim else "x [..., d] and experts [..., k]"
        why, fix = f"each token of x {x.shape} has k experts", "route(logits [..., e], k).experts"
        raise ValueError(message(op, "experts", f"of shape {experts.shape}", needs, why, fix))
    _check_count(op, "experts.shape[-1]", experts.shape[-1], 1, None, "a token has at least one expert", "top_k=1")


def _check_order(op: str, order, shape: tuple[int, ...] | None) -> None:
    _check_indices(op, "order", order)
    if order.ndim != 1 or (shape is not None and order.shape != shape):
        needs, why = "[n]" if shape is None else f"{shape}", "it has an entry for each row"
        raise ValueError(message(op, "order", f"of shape {order.shape}", needs, why, "group_tokens(...).order"))


def _check_combine(op: str, y, order, weights, top_k) -> tuple[tuple[int, ...], int]:
    """The leading shape of the result, and k."""
    check_float(op, "y", y)
    if y.ndim != 2:
        why, fix = "it has a row for each choice", "group_tokens(...).x"
        raise ValueError(message(op, "y", f"of shape {y.shape}", "[n, d]", why, fix))
    _check_order(op, order, y.shape[:1])
    return check_copies(op, order, weights, top_k)


def check_copies(op: str, order, weights, top_k) -> tuple[tuple[int, ...], int]:
    """Of one of weights and top_k: the leading shape of the result, and k."""
    if (weights is None) == (top_k is None):
        shown = "None without top_k" if weights is None else "given with top_k"
        raise ValueError(message(op, "weights", shown, "one of the two", "either says what k is", "weights alone"))
    if weights is not None:
        check_weights(op, weights, order)
        return weights.shape[:-1], weights.shape[-1]
    _check_count(op, "top_k", top_k, 1, None, "a token has at least one row", "experts.shape[-1]")
    n = order.shape[0]
    if n % top_k:
        why = f"there are {n} rows, top_k for each token"
        raise ValueError(message(op, "top_k", top_k, "a divisor of the number of rows", why, "experts.shape[-1]"))
    return (n // top_k,), top_k


def check_weights(op: str, weights, order) -> None:
    check_float(op, "weights", weights)
    if weights.ndim == 0 or weights.shape[-1] == 0 or math.prod(weights.shape) != order.shape[0]:
        why, fix = f"there is one for each of the {order.shape[0]} rows", "route(...).weights"
        raise ValueError(message(op, "weights", f"of shape {weights.shape}", "[..., k] with t k = n", why, fix))
