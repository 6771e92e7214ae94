"""Where the rows of each group lie: docs/numerics.md, section 2, as index arithmetic over NumPy or jax.numpy.

group_sizes is int32 [*B, g] and data: a negative size counts as 0, offsets clip at m. Rows from the last offset on
are the tail; they belong to "group" g. Column-wise every group begins at a block of its own, of 16 (NVFP4), 32 or 128.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int, Shaped

from jax_fp4._formats import BLOCK, grouped_extent
from jax_fp4._lowering import local

AnyArray = Array | np.ndarray


class Bounds(NamedTuple):
    """First row of each group, and the row after its last."""

    starts: Int[AnyArray, "*B g"]
    ends: Int[AnyArray, "*B g"]


class Columns(NamedTuple):
    """The column-wise layout in blocks of B: P positions, of which each holds a row of x or padding."""

    row: Int[AnyArray, "*B P"]  # of x, m where the position is padding
    first_block: Int[AnyArray, "*B g"]
    blocks: Int[AnyArray, "*B g"]  # of each group
    group: Int[AnyArray, "*B P/B"]  # of each block, g for the unused ones


def bounds(group_sizes: Int[AnyArray, "*B g"], m: int) -> Bounds:
    if isinstance(group_sizes, np.ndarray):
        ends = np.minimum(np.cumsum(np.clip(group_sizes, 0, m), axis=-1, dtype=np.int64), m).astype(np.int32)
        return Bounds(np.concatenate([np.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1), ends)

    def of(group_sizes):
        # Sums that stop at m: jax has no int64, and two sizes of 2^31 - 1 are somebody's data.
        sizes = jnp.clip(group_sizes, 0, m).astype(jnp.uint32)
        ends = lax.associative_scan(lambda a, b: jnp.minimum(a + b, m), sizes, axis=-1).astype(jnp.int32)
        return Bounds(jnp.concatenate([jnp.zeros_like(ends[..., :1]), ends[..., :-1]], axis=-1), ends)

    return local(of)(group_sizes)


def group_of(ends: Int[AnyArray, "*B g"], count: int) -> Int[AnyArray, "*B {count}"]:
    """The group of each of `count` rows (or blocks), g for those from the last end on."""
    if isinstance(ends, np.ndarray):
        return (ends[..., None, :] <= np.arange(count)[:, None]).sum(-1).astype(np.int32)

    def of(ends):
        # One step at each end, then a running sum: not m x g comparisons.
        steps = jnp.zeros((*ends.shape[:-1], count + 1), jnp.int32)
        at = (*jnp.indices(ends.shape, jnp.int32)[:-1], ends)
        return jnp.cumsum(steps.at[at].add(1)[..., :count], axis=-1, dtype=jnp.int32)

    return local(of)(ends)


def group_of_rows(group_sizes: Int[AnyArray, "*B g"], m: int) -> Int[AnyArray, "*B {m}"]:
    """The group of each of m rows, g in the tail."""
    return group_of(bounds(group_sizes, m).ends, m)


def columns(group_sizes: Int[AnyArray, "*B g"], m: int, block: int = BLOCK) -> Columns:
    xp: Any = np if isinstance(group_sizes, np.ndarray) else jnp
    starts, ends = bounds(group_sizes, m)
    blocks = (ends - starts + (block - 1)) // block
    last = xp.cumsum(blocks, axis=-1, dtype=np.int32)
    first = last - blocks
    extent = grouped_extent(m, group_sizes.shape[-1], block)
    group = group_of(last, extent // block)
    by_position = xp.repeat(group, block, axis=-1)
    within = xp.arange(extent, dtype=np.int32) - of_group(block * first, by_position, 0)
    row = of_group(starts, by_position, 0) + within
    return Columns(xp.where(row < of_group(ends, by_position, 0), row, m), first, blocks, group)


def window(group_sizes: Int[Array, " g"], first: Any, m: int, total: int) -> Int[Array, " g"]:
    """The sizes of the groups within rows first to first + m, of `total` that they cut."""
    starts, ends = (jnp.clip(at - first.astype(jnp.int32), 0, m) for at in bounds(group_sizes, total))
    return ends - starts


class Layout(NamedTuple):
    """The groups of one stored form: its rows (axis=-1) or its blocks (axis=0) each belong to one, or to none.

    Column-wise without blocks (block=1) the rows of x stay where they are, and are what `group` tells of.
    """

    axis: int
    bounds: Bounds
    columns: Columns | None  # axis=0 only
    group: Any  # of each row or block

    @classmethod
    def of(cls, group_sizes: Int[AnyArray, "*B g"], m: int, axis: int, block: int = BLOCK):
        where = bounds(group_sizes, m)
        by_block = columns(group_sizes, m, block) if axis == 0 and block > 1 else None
        return cls(axis, where, by_block, group_of(where.ends, m) if by_block is None else by_block.group)

    @property
    def groups(self) -> int:
        return self.bounds.ends.shape[-1]

    def arrange(self, x: AnyArray) -> AnyArray:
        """x with zeros in the tail; column-wise each group at a block of its own, with zeros up to the next."""
        xp: Any = np if isinstance(x, np.ndarray) else jnp
        if self.columns is None:
            return xp.where((self.group < self.groups)[..., None], x, xp.zeros((), x.dtype))
        x = xp.concatenate([x, xp.zeros_like(x[..., :1, :], shape=(*x.shape[:-2], 1, x.shape[-1]))], axis=-2)
        return xp.take_along_axis(x, self.columns.row[..., None], axis=-2)


def rows_of_columns(
    values: Shaped[AnyArray, "P k"], group_sizes: Int[AnyArray, " g"], m: int, block: int = BLOCK
) -> Any:
    """Array [m, k]: what lies at the P positions of the column-wise layout, at the rows of x; zero in the tail."""
    extent, k = values.shape
    where, layout = bounds(group_sizes, m), columns(group_sizes, m, block)
    group = group_of(where.ends, m)
    shift = of_group(block * layout.first_block - where.starts, group, 0)
    xp: Any = np if isinstance(group, np.ndarray) else jnp
    position = xp.where(group < group_sizes.shape[0], xp.arange(m, dtype=np.int32) + shift, extent)
    if extent == 0:  # no groups, and fewer rows than a block
        return (np if isinstance(values, np.ndarray) else jnp).zeros((m, k), values.dtype)
    if isinstance(values, np.ndarray):
        return np.concatenate([values, np.zeros((1, k), values.dtype)])[position]
    return jnp.take(values, position, axis=0, mode="fill", fill_value=0)


def of_group(values: AnyArray, group: Int[AnyArray, "*B n"], tail: Any) -> AnyArray:
    """values [*B, g, *rest] of the group of each row, [*B, n, *rest]; `tail` for the rows that have none."""
    xp: Any = np if isinstance(values, np.ndarray) else jnp
    axis = group.ndim - 1

    def taken(values, group):
        beyond = xp.full_like(values, tail, shape=(*values.shape[:axis], 1, *values.shape[axis + 1 :]))
        index = group.reshape(*group.shape, *[1] * (values.ndim - group.ndim))
        return xp.take_along_axis(xp.concatenate([values, beyond], axis=axis), index, axis=axis)

    return (taken if xp is np else local(taken))(values, group)


def largest(values: AnyArray, group: Int[AnyArray, "*B n"], groups: int) -> AnyArray:
    """The maximum of unsigned values [*B, n, *rest] over each group, [*B, g, *rest]; 0 for an empty one."""
    xp: Any = np if isinstance(values, np.ndarray) else jnp
    *batch, n = group.shape
    rest = values.shape[group.ndim :]
    entry = xp.arange(math.prod(batch), dtype=np.int32)[:, None]
    index = (entry * (groups + 1) + group.reshape(math.prod(batch), n)).reshape(-1)
    values = values.reshape(math.prod(batch) * n, *rest)
    out = xp.zeros((math.prod(batch) * (groups + 1), *rest), values.dtype)
    if xp is np:
        np.maximum.at(out, index, values)
    else:
        out = out.at[index].max(values)
    return out.reshape(*batch, groups + 1, *rest)[(*[slice(None)] * len(batch), slice(groups))]
