"""report: what is quantized in a function, and why the rest is not."""

import warnings
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any, Literal

import jax

from jax_fp4._choosing import Rules, rules_in_force
from jax_fp4._ops import supported
from jax_fp4._recipe import (
    HIGH_PRECISION,
    BackwardMode,
    CustomRecipe,
    Product,
    Recipe,
    Scaling,
    mode_of,
    scaling_of,
)
from jax_fp4._record import CallEvent, Cost, Event, GatherEvent, LayerEvent, RulesEvent, recording

_HEADER = ("layer", "op", "x", "kernel", "forward", "dx", "dw", "padding", "kept", "note")


@dataclass(frozen=True)
class Row:
    """One call of a layer: the operand formats of its three products, or why it is not quantized."""

    layer: str
    op: str
    x_shape: tuple[int, ...]
    kernel_shape: tuple[int, ...]
    quantized: bool
    forward: str
    dx: str
    dw: str
    note: str
    implementation: str  # what multiplies on this platform, and quantizes
    padding: int  # zeros that round blocked extents up, in the forward and its backward
    residual_bytes: int  # kept for the backward, if all that can be is differentiated; of an MLP in its first row
    chosen_by: str  # the recipe of the layer, the rule or the autocast context that decided; or why there is none


@dataclass(frozen=True)
class Report:
    """Rows in the order of tracing, and the quantize calls of the program. str() is a table."""

    rows: tuple[Row, ...]
    calls: tuple[CallEvent, ...]
    unmatched: tuple[str, ...]  # the rules in force that matched no layer
    gathers: tuple[GatherEvent, ...] = ()  # the kernels that arrive as shards, and what is moved for each product

    def __str__(self) -> str:
        shape = "x".join
        cells: list[tuple[str, ...]] = [_HEADER]
        for row in self.rows:
            shapes = shape(map(str, row.x_shape)), shape(map(str, row.kernel_shape))
            products = row.forward, row.dx, row.dw
            amounts = str(row.padding), f"{_number(row.residual_bytes)} B"
            cells.append((row.layer, row.op, *shapes, *products, *amounts, row.note))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
        ]
        padding = sum(call.padding for call in self.calls)
        quantized = sum(row.quantized for row in self.rows)
        by = Counter(call.implementation for call in self.calls)
        how = f" ({', '.join(f'{count} {name}' for name, count in by.items())})" if by else ""
        calls = f"{len(self.calls)} quantize calls{how}, {padding} padded elements"
        lines += [
            f"  {op}: {how}" for op, how in {row.op: row.implementation for row in self.rows if row.quantized}.items()
        ]
        lines += [f"  {line}" for line in dict.fromkeys(map(_gather, self.gathers))]
        lines += [_unmatched(rule) for rule in self.unmatched]
        return "\n".join([*lines, f"{quantized} of {len(self.rows)} layer calls quantized, {calls}"])


def report(fn, *args, **kwargs) -> Report:
    """Trace fn(*args, **kwargs), without running it, and tell what each layer call in it does.

    Give the gradient of a loss, to see the quantize calls of the backward too. Layers that were traced once and run
    many times (under scan) have one row. Warns (UserWarning) of each rule of the autocast contexts around and inside fn
    whose expression matches none of the layers.
    """
    around = rules_in_force()
    with recording() as events:
        jax.eval_shape(fn, *args, **kwargs)
    unmatched = _unmatched_rules(around, events)
    for rule in unmatched:
        warnings.warn(_unmatched(rule), stacklevel=2)
    rows = tuple(_row(event) for event in events if isinstance(event, LayerEvent))
    calls = tuple(event for event in events if isinstance(event, CallEvent))
    return Report(rows, calls, unmatched, tuple(event for event in events if isinstance(event, GatherEvent)))


def _unmatched_rules(around: list[Rules], events: list[Event]) -> tuple[str, ...]:
    inside = [event.rules for event in events if isinstance(event, RulesEvent)]
    paths = [event.path for event in events if isinstance(event, LayerEvent)]
    rules = dict.fromkeys([*around, *inside])  # each once: entered at every trace of a function
    return tuple(dict.fromkeys(pattern for each in rules for pattern in each.unmatched(paths)))


def _number(value: Any) -> str:
    """With its thousands apart, or as it is where a symbolic dimension is in it."""
    return f"{value:,}" if isinstance(value, int) else str(value)


def _unmatched(rule: str) -> str:
    return f"the rule {rule!r} matched no layer; it needs to match a whole path of the first column"


def _gather(event: GatherEvent) -> str:
    what = "packed" if event.payload == "quantized" else "in high precision"
    why = f": {event.reason}" if event.reason else ""
    shape = "x".join(map(str, event.shape))
    return f"{event.path or event.op}: shards {shape} of the kernel are gathered {what} ({event.product}){why}"


def _row(event: LayerEvent) -> Row:
    cost = event.cost() if event.cost is not None else Cost(0, 0)
    forward = dx = dw = "high precision"
    note, how = f"not quantized: {event.reason}", "XLA"
    if event.recipe is not None:
        assert isinstance(event.recipe, Recipe)
        forward, dx, dw = _formats(event.recipe, event.frozen)
        note, how = _note(event.recipe), supported(event.op, jax.default_backend()).reason
        if event.reason.startswith("rule "):
            note += f"; {event.reason}"
    return Row(
        layer=event.path or event.op,
        op=event.op,
        x_shape=event.x_shape,
        kernel_shape=event.kernel_shape,
        quantized=event.recipe is not None,
        forward=forward,
        dx=dx,
        dw=dw,
        note=note,
        implementation=how,
        padding=cost.padding,
        residual_bytes=cost.residual_bytes,
        chosen_by=event.reason,
    )


def _formats(recipe: Recipe, frozen: str) -> tuple[str, str, str]:
    """Operand formats of y = x w, dx = dy w^T, dw = x^T dy. frozen: that of a kernel that came quantized."""
    x, kernel = (_name(scaling_of(recipe, "forward", operand)) for operand in ("x", "kernel"))
    kernel = frozen or kernel
    dw = "none, the kernel is frozen" if frozen else _gradient(recipe, "wgrad", x, "")
    return f"{x} x {kernel}", _gradient(recipe, "dgrad", kernel, frozen), dw


def _gradient(recipe: Recipe, product: Literal["dgrad", "wgrad"], forward: str, frozen: str) -> str:
    """dy w^T or x^T dy, of an operand that the forward multiplied as `forward` says."""
    other: Literal["x", "kernel"] = "kernel" if product == "dgrad" else "x"
    match mode_of(recipe, product):
        case BackwardMode.DEFAULT:
            dy, forward = (_name(scaling_of(recipe, product, operand)) for operand in ("dy", other))
            forward = frozen or forward
        case BackwardMode.UNQUANT:
            dy = forward = _name(None)
            forward = frozen or forward
        case BackwardMode.DEQUANT:
            dy = _name(None)
    return f"{dy} x {forward}" if product == "dgrad" else f"{forward} x {dy}"


def _name(scaling: Scaling | None) -> str:
    if scaling is None:
        return "high precision"
    return f"row-scaled {scaling.format}" if scaling.row_scaled else scaling.format


def _note(recipe: Recipe) -> str:
    """Each recipe, with the settings that are not its defaults, what is tiled, transformed and stochastic."""
    if isinstance(recipe, CustomRecipe):
        return "; ".join(f"{name}: {_of_part(getattr(recipe, name), name)}" for name in ("forward", "dgrad", "wgrad"))
    return _of_part(recipe, "wgrad")


def _of_part(part: Any, product: Product) -> str:
    if part is HIGH_PRECISION:
        return repr(part)
    kernel, dy = part.scaling("kernel"), part.scaling("dy")
    default = part.mode is BackwardMode.DEFAULT and product != "forward"
    own = [(f.name, getattr(part, f.name)) for f in fields(part) if f.name != "backward_mode"]
    given = [f"{name}={value!r}" for name, value in own if value != getattr(type(part), name)]
    traits = [
        (f"backward_mode={part.mode}", product != "forward"),
        (f"{kernel.tile}x{kernel.tile} weight tiles", kernel.tile > 1),
        ("Hadamard in dw", default and dy.hadamard),
        ("stochastic dy", default and dy.stochastic),
    ]
    return ", ".join([type(part).__name__, *(name for name, present in traits if present), *given])
