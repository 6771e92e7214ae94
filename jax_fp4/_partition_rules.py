"""How quantizers, dequantizers and products are cut where XLA partitions a program: what `partitioned` is told of them.

What moves: amaxes (their maximum), sums of products over parts of the contracted axis, and packed codes of weights
where an axis of the mesh cuts both the weights and rows of what they multiply. Rows of activations never do; a border
inside a block is the exception: blocks are those of the global tensor.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from jax_fp4._array import QuantizedTensor, block_length
from jax_fp4._partition import Cut, Names, Plan, Rule, Sizes, trimmed, without
from jax_fp4._placement import Axes, Part

# --- quantize, quantize_transpose ---


class Layout(NamedTuple):
    """The names of the dimensions of x [*batch, *leading, k], and the units between which they may be cut."""

    batch: Names
    leading: Names
    units: dict[str, int]
    flat: str | None  # of the leading dimensions as one
    unflattened: bool  # whether column-wise codes can keep the leading dimensions: the last one is a number of blocks

    @property
    def of_x(self) -> Names:
        return (*self.batch, *self.leading, "k")

    @classmethod
    def of(cls, shape: tuple[int, ...], batch_dims: int, axes: tuple[int, ...], block: int, tile: int) -> "Layout":
        *outer, k = shape
        batch, leading = outer[:batch_dims], outer[batch_dims:]
        of_rows, of_columns = block if 0 in axes else tile, block if -1 in axes else tile
        units = {f"batch{i}": _units(n) for i, n in enumerate(batch)} | {"k": _whole_blocks(k, of_columns)}
        names, flat = tuple(f"rows{i}" for i in range(len(leading))), None
        units |= dict.fromkeys(names, 0)
        unflattened = 0 in axes and tile == 1 and len(leading) > 1 and leading[-1] % block == 0
        if unflattened or (of_rows == 1 and leading):
            units |= dict(zip(names, map(_units, leading), strict=True))
            units[names[-1]] = _units(leading[-1] // of_rows)
            flat = names[0] if len(leading) == 1 else None
        elif leading:  # so many entries along the first one are whole blocks
            entries = of_rows // math.gcd(of_rows, math.prod(map(_units, leading[1:])))
            units[flat := names[0]] = _whole_blocks(leading[0], entries)
        return cls(tuple(f"batch{i}" for i in range(batch_dims)), names, units, flat, unflattened)

    def stored(self, axis: int) -> Names:
        """Of codes."""
        if axis == -1:
            return self.of_x
        return (*self.batch, "k", *(self.leading if self.unflattened else (self.flat,)))

    def of_tiles(self, axis: int) -> Names:
        """Of scales that tiles share."""
        return (*self.batch, *((self.flat, "k") if axis == -1 else ("k", self.flat)))

    def amax(self, axis: int, row_scaled: bool) -> Names:
        if not row_scaled:
            return self.batch
        return self.of_x[:-1] if axis == -1 else (*self.batch, "k")


def _units(extent: int) -> int:
    """A symbolic extent (of jax.export) is one unit: it is not cut."""
    return extent if isinstance(extent, int) else 1


def _whole_blocks(extent: int, block: int) -> int:
    return 0 if _units(extent) % block else _units(extent) // block


def quantize_rule(layout: Layout, more: tuple[Names, ...], results: tuple[Names, ...], of_part: Callable) -> Rule:
    """of_part(part) quantizes x, and what else there is, where x lies so."""
    names = layout.of_x

    def plan(operands: list[Cut], _: list[Cut], sizes: Sizes) -> Plan:
        cut = {name: trimmed(operands[0].get(name, ()), layout.units[name], sizes) for name in layout.units}
        function = of_part(Part(tuple(cut[str(name)] for name in names)))
        return Plan([cut] * (1 + len(more)), [cut] * len(results), function)

    return Rule((names, *more), results, layout.units, plan)


# --- dequantize ---


def decode_rule(q: QuantizedTensor, extent: int, function: Callable) -> Rule:
    """function(q, extent=...) -> values [..., r, extent] in the stored orientation, cut as the codes are."""
    names = tuple(f"rows{i}" for i in range(q.codes.ndim - 1))
    of_q = operand(dataclasses.replace(q, axis=-1, extent=extent, inner=0), (*names, "k"))

    def plan(cuts: list[Cut], _: list[Cut], sizes: Sizes) -> Plan:
        cut = {name: trimmed(cuts[0].get(name, ()), units, sizes) for name, units in of_q.units.items()}
        parts = math.prod(sizes[axis] for axis in cut["k"])
        return Plan([cut] * len(of_q.leaves), [cut], partial(function, extent=extent // parts))

    return Rule(tuple(of_q.leaves), ((*names, "k"),), of_q.units, plan)


# --- products ---


class Operand(NamedTuple):
    """The names of the leaves of an operand, and in how many units each dimension of it can be cut."""

    leaves: list[Names]
    units: dict[str, int]


def operand(value: Any, names: Names) -> Operand:
    """names: of its logical dimensions; of a quantized one with `inner` dimensions, those of the contracted ones are
    the last, or where axis=0 all but the last."""
    if not isinstance(value, QuantizedTensor):
        return Operand([names], {name: _units(n) for name, n in zip(names, value.shape, strict=True) if name})
    q = value
    stored = names if q.axis == -1 else (*names[: -2 - q.inner], names[-1], *names[-2 - q.inner : -1])
    blocked, length = stored[-1], block_length(q)
    tile = 1 if q.block is None or q.format == "nvfp4" or q.format.startswith("mxfp8") else q.block[0]
    units = {name: _units(n) for name, n in zip(stored[:-1], q.codes.shape[:-1], strict=True) if name is not None}
    if blocked is not None:
        units[blocked] = _whole_blocks(q.extent, length)
    scales = stored if q.block is not None else stored[: q.block_scale.ndim]
    if tile > 1:  # scales of tiles have one dimension for all rows
        batch = q.block_scale.ndim - 2
        whole = batch == q.codes.ndim - 2
        units |= {
            str(n): _whole_blocks(q.codes.shape[-2], tile) if whole else 0 for n in stored[batch:-1] if n is not None
        }
        scales = (*stored[:batch], stored[-2] if whole else None, stored[-1])
    leaves = [stored, scales]
    if q.amax is not None:
        leaves.append(stored[: q.amax.ndim])
    return Operand(leaves, units)


def _common(*of_operands: dict[str, int]) -> dict[str, int]:
    units: dict[str, int] = {}
    for of_operand in of_operands:
        for name, n in of_operand.items():
            units[name] = math.gcd(units[name], n) if name in units else n
            if n == 0:
                units[name] = 0
    for of_operand in of_operands:
        units |= {name: 0 for name, n in of_operand.items() if n == 0}
    return units


def of_local(q: Any, whole: Any) -> Any:
    """An operand of which the leaves are local, with its extent."""
    if not isinstance(q, QuantizedTensor):
        return q
    return dataclasses.replace(q, extent=whole[1] // (whole[0] // q.codes.shape[-1]))


def measure(q: Any) -> Any:
    return (q.codes.shape[-1], q.extent) if isinstance(q, QuantizedTensor) else None


def product_rule(lhs: Any, rhs: Any, bias, dtype, multiply: Callable) -> Rule:
    """multiply(lhs, rhs, bias, dtype) -> [*rows, n], lhs [*rows, k], rhs weights [k, n], or batches of both."""
    batch = rhs.ndim - 2
    outer = tuple(f"batch{i}" for i in range(batch))
    rows = (*outer, *(f"rows{i}" for i in range(lhs.ndim - 1 - batch)))
    a, b = operand(lhs, (*rows, "k")), operand(rhs, (*outer, "k", "n"))
    units = _common(a.units, b.units)
    biases = [] if bias is None else [("n",)]
    sizes_of = measure(lhs), measure(rhs)

    def plan(operands: list[Cut], results: list[Cut], sizes: Sizes) -> Plan:
        left, right = operands[0], operands[len(a.leaves)]
        cut = {name: trimmed(left.get(name, ()), units[name], sizes) for name in (*rows, "k")}
        used = [axis for axes in cut.values() for axis in axes]
        free = without(right.get("n", ()), used)
        if not free:  # then every device has these columns
            held = [axis for axes in right.values() for axis in axes]
            free = without(results[0].get("n", ()), [*used, *held])
        columns = trimmed(free, units["n"], sizes)
        y = {name: cut[name] for name in rows} | {"n": columns}
        sums = _Sums.of(cut["k"], y, results[0], (*rows, "n"), units, sizes)

        def function(lhs, rhs, bias):
            lhs, rhs = of_local(lhs, sizes_of[0]), of_local(rhs, sizes_of[1])
            if not sums.axes:
                return multiply(lhs, rhs, bias, dtype)
            y = sums(multiply(lhs, rhs, None, jnp.dtype(jnp.float32)))
            if bias is not None:
                y = y + bias.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + bias.shape)
            return y.astype(dtype)

        of_weights = {name: cut[name] for name in (*outer, "k")} | {"n": columns}
        operands = [cut] * len(a.leaves) + [of_weights] * len(b.leaves) + [sums.result] * len(biases)
        return Plan(operands, [sums.result], function)

    return Rule((*a.leaves, *b.leaves, *biases), ((*rows, "n"),), units, plan)


def contraction_rule(x: Any, dy: Any, dtype, multiply: Callable) -> Rule:
    """multiply(x, dy, dtype) -> [k, n], of x [*rows, k] and dy [*rows, n]."""
    named = [_contracted(q) for q in (x, dy)]
    rows = named[0] if named[0] == named[1] else tuple(None for _ in named[0])
    others = named[1] if named[0] == named[1] else tuple(None for _ in named[1])
    a, b = operand(x, (*rows, "k")), operand(dy, (*others, "n"))
    units = _common(a.units, b.units)
    sizes_of = measure(x), measure(dy)

    def plan(operands: list[Cut], results: list[Cut], sizes: Sizes) -> Plan:
        left, right = operands[0], operands[len(a.leaves)]
        cut: Cut = {}
        used: list[str] = []

        def take(name: str, axes: Axes) -> None:
            cut[name] = trimmed(without(axes, used), units[name], sizes)
            used.extend(cut[name])

        for name in (name for name in rows if name is not None):
            take(name, left.get(name) or right.get(name, ()))
        contracted = tuple(used)
        take("k", left.get("k", ()))
        take("n", right.get("n", ()))
        sums = _Sums.of(contracted, {"k": cut["k"], "n": cut["n"]}, results[0], ("k", "n"), units, sizes)

        def function(x, dy):
            x, dy = of_local(x, sizes_of[0]), of_local(dy, sizes_of[1])
            if not sums.axes:
                return multiply(x, dy, dtype)
            return sums(multiply(x, dy, jnp.dtype(jnp.float32))).astype(dtype)

        return Plan([cut] * (len(a.leaves) + len(b.leaves)), [sums.result], function)

    return Rule((*a.leaves, *b.leaves), (("k", "n"),), units, plan)


def _contracted(q: Any) -> Names:
    """The names of the rows of an operand [*rows, k]."""
    if not isinstance(q, QuantizedTensor) or q.axis == -1:
        ndim = (q.codes if isinstance(q, QuantizedTensor) else q).ndim
        return tuple(f"rows{i}" for i in range(ndim - 1))
    return tuple(f"rows{i}" for i in range(q.inner + 1))


def sum_rule(x: Any, sum_of_rows: Callable) -> Rule:
    """sum_of_rows(x) -> [n], of x [*rows, n]."""
    rows = tuple(f"rows{i}" for i in range(x.ndim - 1))
    units = operand(x, (*rows, "n")).units

    def plan(cuts: list[Cut], results: list[Cut], sizes: Sizes) -> Plan:
        cut = {name: trimmed(cuts[0].get(name, ()), units[name], sizes) for name in units}
        summed = tuple(axis for name in rows for axis in cut[name])
        sums = _Sums.of(summed, {"n": cut["n"]}, results[0], ("n",), units, sizes)
        return Plan([cut], [sums.result], lambda x: sums(sum_of_rows(x)))

    return Rule(((*rows, "n"),), (("n",),), units, plan)


class _Sums(NamedTuple):
    """The sum of partial products over the devices along `axes`: whole, or scattered where the result is cut so."""

    axes: Axes  # all of them
    whole: Axes
    scattered: tuple[tuple[int, Axes], ...]
    result: Cut

    @classmethod
    def of(cls, axes: Axes, y: Cut, wanted: Cut, names: Names, units: dict[str, int], sizes: Sizes) -> "_Sums":
        rest, scattered, result = axes, [], dict(y)
        for i, name in enumerate(names):
            if name is None:
                continue
            held, more = y[name], wanted.get(name, ())
            if more[: len(held)] != held:
                continue
            more = tuple(axis for axis in more[len(held) :] if axis in rest)
            fits = trimmed((*held, *more), units[name], sizes) == (*held, *more)
            if more and fits and wanted[name][len(held) : len(held) + len(more)] == more:
                scattered.append((i, more))
                result[name] = (*held, *more)
                rest = without(rest, more)
        return cls(axes, rest, tuple(scattered), result)

    def __call__(self, part):
        for dimension, axes in self.scattered:
            part = lax.psum_scatter(part, axes, scatter_dimension=dimension, tiled=True)
        return lax.psum(part, self.whole) if self.whole else part
