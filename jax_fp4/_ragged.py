"""Products over groups of rows, as loops of XLA's own dot over tiles of rows: the work of the rows, whatever g is.

Sizes are data, so both loops run as often as the sizes say. A group that has no rows costs nothing; the last tile of a
group is masked, at most one tile's work is wasted for each. On CPU three things decide the speed, all measured:
  * slices of a loop's constants are taken behind an optimization_barrier that the loop's counter passes too. XLA:CPU
    has no 16-bit slices: it widens the operand to float32, and without the barrier it would widen all of it, once,
    before the loop (for 64 experts of [1024, 1024] 75 of 95 ms);
  * 16-bit results are carried as integers, for the same reason;
  * a group's weight is decoded once, in the outer loop, and its tiles follow in the inner one.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float, Int

from jax_fp4._errors import UnsupportedError, message
from jax_fp4._groups import Bounds, bounds
from jax_fp4._placement import alike

SMALLEST, LARGEST = 64, 256  # rows of a tile: below, the dot is slow; above, most of a tile may be mask
FEW = 32  # rows of the last tile of a group, where they are enough: many small groups gain a sixth


def tile_rows(m: int, groups: int) -> int:
    """Rows of a tile: about the mean group, a power of two."""
    if is_symbolic_dim(m):
        return _rows_within(m)
    rows = SMALLEST
    while rows < LARGEST and rows * groups < m:
        rows *= 2
    return min(rows, m)


def _rows_within(m: Any) -> int:
    """Of a tile where m is symbolic (jax.export): as many as there are whenever the program runs."""
    for rows in (LARGEST, LARGEST // 2, SMALLEST, SMALLEST // 2, SMALLEST // 4):
        with contextlib.suppress(jax.errors.InconclusiveDimensionOperation):
            if m >= rows:
                return rows
    why = "groups are multiplied in tiles of rows, and no tile may be longer than all of them"
    fix = f"jax.export.symbolic_shape(..., constraints=('{m} >= {LARGEST}',))"
    raise UnsupportedError(message("grouped product", "x", f"of {m} rows", f"at least {SMALLEST // 4}", why, fix))


def rows(
    lhs: Float[Array, "m k"],
    of_rows: Any,
    of_groups: Any,
    group_sizes: Int[Array, " g"],
    out: jax.ShapeDtypeStruct,
    weight: Callable[[Any], tuple[Array, int]],
    finish: Callable[[Float[Array, "t n"], Any, Any], Float[Array, "t n"]],
    precision: lax.Precision | None = None,
) -> Float[Array, "m n"]:
    """[m,n] = [m,k] @ [g,k,n]: the rows of each group times its weight, zeros in the tail.

    of_rows, of_groups: trees of arrays [m, ...] and [g, ...]. weight(of_group) -> (w, the axis of w that is contracted)
    and finish(acc, of_tile, of_group), from float32 to `out.dtype`, get their rows or their group of them.
    """
    (m, n), groups = out.shape, group_sizes.shape[0]
    if m == 0 or groups == 0 or n == 0:
        return jnp.zeros(out.shape, out.dtype)
    result, lhs, of_rows, of_groups, group_sizes = alike(_zeros(out), lhs, of_rows, of_groups, group_sizes)
    tile, where = tile_rows(m, groups), bounds(group_sizes, m)
    few = min(FEW, tile)

    def of_group(e, y):
        group = _at(of_groups, e)
        w, contracted = weight(group)

        def of_tile(tile, at, y):
            first, live = _tile(at, where.ends[e], tile, m)
            a, rest = _slices((lhs, of_rows), first, tile)
            acc = lax.dot_general(a, w, (((1,), (contracted,)), ((), ())), precision, jnp.float32)
            new = _as_words(finish(acc, rest, group).astype(out.dtype))
            old = lax.dynamic_slice_in_dim(y, first, tile)  # of other groups, where the tile reaches over
            return lax.dynamic_update_slice_in_dim(y, jnp.where(live, new, old), first, 0)

        start, end = where.starts[e], where.ends[e]
        if few < tile:
            start, y = _tiles(start, end - few, tile, partial(of_tile, tile), y)
        return _tiles(start, end, few, partial(of_tile, few), y)[1]

    return _as_floats(_filled(where, of_group, result), out.dtype)


def contraction(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "m n"],
    where: Bounds,
    of_groups: Any,
    out: jax.ShapeDtypeStruct,
    finish: Callable[[Float[Array, "k n"], Any], Float[Array, "k n"]],
    rows_last: bool = False,
    precision: lax.Precision | None = None,
) -> Float[Array, "g k n"]:
    """[g,k,n]: for each group, the transpose of its rows of lhs times its rows of rhs; zeros for an empty one.

    rows_last: lhs [k, m] and rhs [n, m] have their rows last. of_groups and finish as in `rows`.
    """
    axis = 1 if rows_last else 0
    m, groups = lhs.shape[axis], out.shape[0]
    if m == 0 or 0 in out.shape:
        return jnp.zeros(out.shape, out.dtype)
    tile = tile_rows(m, groups)
    result, lhs, rhs, where, of_groups = alike(_zeros(out), lhs, rhs, where, of_groups)

    def of_group(e, dw):
        start, end = where.starts[e], where.ends[e]

        def of_tile(at):
            first, live = _tile(at, end, tile, m)
            # Both are masked: what lies beyond may be NaN, and NaN times 0 is NaN.
            live = live.T if rows_last else live
            a, b = (jnp.where(live, part, 0) for part in _slices((lhs, rhs), first, tile, axis))
            return lax.dot_general(a, b, (((axis,), (axis,)), ((), ())), precision, jnp.float32)

        _, acc = _tiles(start + tile, end, tile, lambda at, acc: acc + of_tile(at), of_tile(start))
        new = _as_words(finish(acc, _at(of_groups, e)).astype(out.dtype))
        return lax.dynamic_update_slice_in_dim(dw, new[None], e, 0)

    return _as_floats(_filled(where, of_group, result), out.dtype)


def _filled(where: Bounds, body, result):
    """body(e, result) for the groups that have rows."""
    empty = where.starts == where.ends
    order, count = jnp.argsort(empty, stable=True).astype(jnp.int32), jnp.sum(~empty, dtype=jnp.int32)
    order, _ = alike(order, empty)  # which JAX takes for the same on all devices: argsort sorts an iota along
    return lax.fori_loop(jnp.int32(0), count, lambda i, result: body(order[i], result), result)


def _tiles(start, end, tile: int, body, result):
    """body(at, result) for the tiles from `start` on, and where they end."""
    return lax.while_loop(lambda s: s[0] < end, lambda s: (s[0] + tile, body(*s)), (start, result))


def _tile(at, end, tile: int, m: int):
    """Where the tile that holds rows `at` on is cut, at most at m - tile, and which of its rows are meant."""
    first = jnp.minimum(at, m - tile)
    row = first + jnp.arange(tile, dtype=jnp.int32)
    return first, ((row >= at) & (row < end))[:, None]


def _together(tree, index):
    """The tree and the index that slices it, behind a barrier on CPU. Elsewhere there is nothing to hold back, and
    XLA:GPU of jax 0.11 fails to compile a loop over constants that holds a barrier."""
    return lax.platform_dependent(
        tree, index, cpu=lambda *both: lax.optimization_barrier(both), default=lambda *both: both
    )


def _at(tree, e):
    tree, e = _together(tree, e)
    return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, e, 0, keepdims=False), tree)


def _slices(tree, first, size: int, axis: int = 0):
    tree, first = _together(tree, first)
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, first, size, axis), tree)


def _words(dtype):
    return jnp.uint16 if jnp.dtype(dtype).itemsize == 2 else dtype


def _zeros(out: jax.ShapeDtypeStruct):
    return jnp.zeros(out.shape, _words(out.dtype))


def _as_words(x):
    return lax.bitcast_convert_type(x, _words(x.dtype))


def _as_floats(words, dtype):
    return lax.bitcast_convert_type(words, dtype)
