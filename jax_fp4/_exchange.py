"""Expert parallelism inside `jax.shard_map`: tokens to the devices of their experts, results back to those of tokens.

    rows, group_sizes, exchange = exchange_tokens(x, routing.experts, g, "expert")
    y = grouped_mlp(rows, w_in, w_out, group_sizes)       # w_in, w_out: the g/p experts of this device
    out = return_tokens(y, exchange, routing.weights)

Experts are split over a mesh axis (or several) of p devices: device i has experts i g/p to (i+1) g/p - 1. n = t k rows
leave each device, in the order of their experts, and N = p n may arrive at one of them, so that no token is dropped
whatever the routing. Arrived rows lie in the order of their expert, then their device, then that device's rows: as
`group_tokens` of all devices' tokens would have them, so that each expert computes what it would on one device.

Both movements permute rows, each is the transpose of the other, and what copies of a token add up to is summed at its
own device. On CUDA, rows travel by a ragged all-to-all straight to their place, and only those that exist; elsewhere
(XLA:CPU has none) by an all-to-all of slots for n rows between any two devices, with a gather at each end.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jax_fp4 import _groups
from jax_fp4._arguments import check_float
from jax_fp4._errors import message
from jax_fp4._lowering import choose, is_partitioned
from jax_fp4._placement import Axes, alike, axes_and_size, vary, varying
from jax_fp4._routing import (
    check_copies,
    check_tokens,
    check_weights,
    combine_tokens,
    group_tokens,
    group_weights,
    inverse,
    take,
)
from jax_fp4._rules import named_order

# XLA copies each slice of a ragged all-to-all by one thread block, and sends it by one message where it uses NCCL. Both
# ways of 134 MB in bfloat16 on each of two H200s took 51 ms in 2 slices, 15 in 8, 3.3 in 64, 2.5 in 128 and 1.9 in 256;
# a message is said to cost some 12 us (openxla/xla issue 46982).
SLICES = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Exchange:
    """Where the rows of this device went, for the way back. A pytree.

    order: as in `Grouped`, of the n rows that left. counts: the rows that each device sent to each expert.
    """

    order: Int32[Array, " n"]
    counts: Int32[Array, "p g"]
    axes: Axes = dataclasses.field(metadata={"static": True})


class Exchanged(NamedTuple):
    """Rows of all devices in the order of this device's experts. Those past the sum of group_sizes are zeros."""

    x: Float[Array, "N d"]
    group_sizes: Int32[Array, " g/p"]
    exchange: Exchange


@jax.named_scope("fp4.exchange_tokens")
def exchange_tokens(
    x: Float[Array, "*b d"], experts: Int32[Array, "*b k"], num_experts: int, axis_name: Any
) -> Exchanged:
    """Copies each token to the device of each of its experts: local x [..., d] -> rows [N, d] of the local experts.

    num_experts: g, of all devices together. axis_name: a mesh axis of the surrounding shard_map, or a tuple of several,
    over whose p devices the experts are split.
    Rows and choices out of range are as in `group_tokens`; so is the gradient of x, summed in float32 at the token's
    own device. Rows travel in x's dtype. N = p t k whatever the routing: memory for all tokens at one device.

    Raises TypeError or ValueError for wrong dtypes, for shapes that do not fit, and outside shard_map.
    """
    op = "exchange_tokens"
    axes, p = axes_and_size(op, "axis_name", axis_name)
    check_tokens(op, x, experts, num_experts)
    if num_experts % p:
        why, fix = "every device has as many experts", "more experts, or an axis of fewer devices"
        raise ValueError(message(op, "num_experts", num_experts, f"a multiple of {p}, the devices of {axes}", why, fix))
    rows, group_sizes, order = group_tokens(x, experts, num_experts)
    rows, group_sizes, order = _over(axes, rows, group_sizes, order)
    (counts,) = named_order(jax.lax.all_gather(group_sizes, axes))
    arrived = jnp.sum(_of_my_experts(counts, axes), axis=0)
    return Exchanged(_dispatch(rows, counts, axes), arrived, Exchange(order, counts, axes))


@jax.named_scope("fp4.exchange_weights")
def exchange_weights(weights: Float[Array, "*b k"], exchange: Exchange) -> Float[Array, " N"]:
    """The weights at the rows of `exchange_tokens`, 0 past them: for what weights inside the expert's MLP (`probs`).

    Differentiable; weights keep their dtype. Raises TypeError or ValueError for wrong dtypes and unequal sizes.
    """
    check_weights("exchange_weights", weights, exchange.order)
    rows = group_weights(weights, exchange.order)
    rows, counts = _over(exchange.axes, rows, exchange.counts)
    moved: Any = _dispatch(rows[:, None], counts, exchange.axes)
    return moved[:, 0]


@jax.named_scope("fp4.return_tokens")
def return_tokens(
    y: Float[Array, "N d"],
    exchange: Exchange,
    weights: Float[Array, "*b k"] | None = None,
    *,
    top_k: int | None = None,
) -> Float[Array, "*b d"]:
    """The inverse of `exchange_tokens`: rows back to the devices of their tokens, and there `combine_tokens`.

    weights [..., k], or top_k where y is weighted already, by `exchange_weights`: as in `combine_tokens`, the gradients
    and the dtypes too. Rows of y past the sum of group_sizes are never read, and their gradient is 0.

    Raises TypeError or ValueError for wrong dtypes, shapes that do not fit, both or neither of weights and top_k.
    """
    op, (n,), p = "return_tokens", exchange.order.shape, exchange.counts.shape[0]
    check_float(op, "y", y)
    if y.ndim != 2 or y.shape[0] != p * n:
        why, fix = f"{n} rows of each of {p} devices may have arrived", "exchange_tokens(...).x"
        raise ValueError(message(op, "y", f"of shape {y.shape}", f"[{p * n}, d]", why, fix))
    check_copies(op, exchange.order, weights, top_k)
    rows, counts = _over(exchange.axes, y, exchange.counts)
    rows: Any = _collect(rows, counts, exchange.axes)
    return combine_tokens(rows, exchange.order, weights, top_k=top_k)


def _over(axes: Axes, *arrays) -> tuple[Any, ...]:
    """The arrays, varying alike and over these axes, as far as that is known (not with check_vma=False)."""
    return vary(arrays, varying((arrays, jax.lax.axis_index(axes))))


# --- where rows lie ---


class _Places(NamedTuple):
    """For the rows of each device for each expert: their number, and the first one's place before and after."""

    counts: Int32[Array, "p g"]
    at_source: Int32[Array, "p g"]  # among the n rows of the device
    at_expert: Int32[Array, "p g"]  # among the N rows of the expert's device


def _places(counts: Int32[Array, "p g"]) -> _Places:
    p, g = counts.shape
    at_source = jnp.cumsum(counts, axis=1) - counts
    by_place = counts.reshape(p, p, g // p).transpose(1, 2, 0).reshape(p, g)  # device of the expert; expert, source
    at_expert = jnp.cumsum(by_place, axis=1) - by_place
    return _Places(counts, at_source, at_expert.reshape(p, g // p, p).transpose(2, 0, 1).reshape(p, g))


def _of_my_tokens(values: Int32[Array, "p g"], axes: Axes) -> Int32[Array, " g"]:
    """What is said of this device's rows for each expert."""
    return values[jax.lax.axis_index(axes)]


def _of_my_experts(values: Int32[Array, "p g"], axes: Axes) -> Int32[Array, "p g/p"]:
    """What is said of each device's rows for each of this device's experts."""
    p, g = values.shape
    return values.reshape(p, p, g // p)[:, jax.lax.axis_index(axes)]


# --- moving them ---


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dispatch(rows: Float[Array, "n d"], counts: Int32[Array, "p g"], axes: Axes) -> Float[Array, "N d"]:
    """Rows of this device to those of their experts; zeros where none arrives."""
    return _move(_ragged_dispatch, _dense_dispatch, rows, counts, axes)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _collect(rows: Float[Array, "N d"], counts: Int32[Array, "p g"], axes: Axes) -> Float[Array, "n d"]:
    """The inverse and the transpose of `_dispatch`; zeros for rows that went nowhere."""
    return _move(_ragged_collect, _dense_collect, rows, counts, axes)


def _dispatch_fwd(rows, counts, axes: Axes):
    return _dispatch(rows, counts, axes), counts


def _dispatch_bwd(axes: Axes, counts, d_rows):
    return _collect(*alike(d_rows, counts), axes), None


def _collect_fwd(rows, counts, axes: Axes):
    return _collect(rows, counts, axes), counts


def _collect_bwd(axes: Axes, counts, d_rows):
    return _dispatch(*alike(d_rows, counts), axes), None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)
_collect.defvjp(_collect_fwd, _collect_bwd)


def _move(ragged, dense, rows, counts, axes: Axes):
    """On CUDA ragged, unless XLA partitions the program over other axes too, where only dense is sure to be right."""
    if counts.shape[0] == 1 or rows.shape[0] == 0:
        return rows
    ways = (partial(way, axes=axes) for way in (ragged, dense))
    return choose(*ways, usable=lambda context: not is_partitioned(context))(rows, counts)


def _ragged_dispatch(rows, counts, axes: Axes):
    p, n = counts.shape[0], rows.shape[0]
    places = _cut(_places(counts))
    out = jnp.zeros_like(rows, shape=(p * n, *rows.shape[1:]))
    sizes, here, there = (_of_my_tokens(values, axes) for values in places)
    arriving = _of_my_experts(places.counts, axes).reshape(-1)
    return jax.lax.ragged_all_to_all(rows, out, here, sizes, there, arriving, axis_name=axes)


def _ragged_collect(rows, counts, axes: Axes):
    n = rows.shape[0] // counts.shape[0]
    places = _cut(_places(counts))
    out = jnp.zeros_like(rows, shape=(n, *rows.shape[1:]))
    sizes, there, here = (_of_my_experts(values, axes).reshape(-1) for values in places)
    arriving = _of_my_tokens(places.counts, axes)
    return jax.lax.ragged_all_to_all(rows, out, here, sizes, there, arriving, axis_name=axes)


def _cut(places: _Places) -> _Places:
    """Each expert's rows in so many equal parts that all experts have SLICES together: [p, g] -> [p, g parts]."""
    p, g = places.counts.shape
    counts, part = places.counts[..., None], jnp.arange(-(-SLICES // g), dtype=jnp.int32)
    size = -(-counts // part.size)
    first = jnp.minimum(part * size, counts)
    parts = _Places(jnp.minimum(counts - first, size), *(place[..., None] + first for place in places[1:]))
    return jax.tree.map(lambda values: values.reshape(p, g * part.size), parts)


def _dense_dispatch(rows, counts, axes: Axes):
    leaving, arrived = _slots(counts, rows.shape[0], axes)
    return take(_all_to_all(take(rows, leaving), counts.shape[0], axes), arrived)


def _dense_collect(rows, counts, axes: Axes):
    p = counts.shape[0]
    leaving, arrived = _slots(counts, rows.shape[0] // p, axes)
    slots = _all_to_all(take(rows, inverse(arrived)), p, axes)
    n, total = rows.shape[0] // p, rows.shape[0]
    slot = jnp.full_like(leaving, total, shape=(n,)).at[leaving].set(jnp.arange(total, dtype=jnp.int32), mode="drop")
    return take(slots, slot)


def _all_to_all(slots: Float[Array, "N d"], p: int, axes: Axes) -> Float[Array, "N d"]:
    return jax.lax.all_to_all(slots.reshape(p, -1, *slots.shape[1:]), axes, 0, 0).reshape(slots.shape)


def _slots(counts: Int32[Array, "p g"], n: int, axes: Axes) -> tuple[Int32[Array, " N"], Int32[Array, " N"]]:
    """Of p x n slots, n for each other device, filled from the first on: for those that leave, the row that is in each
    (n: none); and for the rows in the order of this device's experts, the slot in which each arrives (N: none)."""
    p, g = counts.shape
    sizes, at_source, at_expert = _places(counts)
    within = jnp.arange(n, dtype=jnp.int32)
    first = _of_my_tokens(at_source, axes)[:: g // p, None]
    filled = jnp.sum(_of_my_tokens(sizes, axes).reshape(p, g // p), axis=1)[:, None]
    leaving = jnp.where(within[None] < filled, first + within[None], n)

    came, place = _of_my_experts(at_source, axes), _of_my_experts(at_expert, axes)
    slot = n * jnp.arange(p, dtype=jnp.int32)[:, None] + came - came[:, :1]
    shift = (slot - place).T.reshape(g)  # of each expert's rows from each device, as they lie
    part = _groups.group_of_rows(_of_my_experts(sizes, axes).T.reshape(g), p * n)
    arrived = jnp.where(part < g, jnp.arange(p * n, dtype=jnp.int32) + _groups.of_group(shift, part, 0), p * n)
    return leaving.reshape(p * n), arrived
