"""report: what is quantized in a function, and why the rest is not."""

import warnings
from collections import Counter
from dataclasses import dataclass
from typing import assert_never

import jax

from jax_fp4._recipe import BackwardMode, Recipe, Rules, rules_in_force
from jax_fp4._record import CallEvent, Event, LayerEvent, RulesEvent, recording

_HEADER = ("layer", "op", "x", "kernel", "forward", "dx", "dw", "note")


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
    chosen_by: str  # the recipe of the layer, the rule or the autocast context that decided; or why there is none


@dataclass(frozen=True)
class Report:
    """Rows in the order of tracing, and the quantize calls of the program. str() is a table."""

    rows: tuple[Row, ...]
    calls: tuple[CallEvent, ...]
    unmatched: tuple[str, ...]  # the rules in force that matched no layer

    def __str__(self) -> str:
        shape = "x".join
        cells: list[tuple[str, ...]] = [_HEADER]
        for row in self.rows:
            shapes = shape(map(str, row.x_shape)), shape(map(str, row.kernel_shape))
            cells.append((row.layer, row.op, *shapes, row.forward, row.dx, row.dw, row.note))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
        ]
        padding = sum(call.padding for call in self.calls)
        quantized = sum(row.quantized for row in self.rows)
        by = Counter(call.implementation for call in self.calls)
        how = f" ({', '.join(f'{count} {name}' for name, count in by.items())})" if by else ""
        calls = f"{len(self.calls)} quantize calls{how}, {padding} padded elements"
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
    return Report(rows, tuple(event for event in events if isinstance(event, CallEvent)), unmatched)


def _unmatched_rules(around: list[Rules], events: list[Event]) -> tuple[str, ...]:
    inside = [event.rules for event in events if isinstance(event, RulesEvent)]
    paths = [event.path for event in events if isinstance(event, LayerEvent)]
    rules = dict.fromkeys([*around, *inside])  # each once: entered at every trace of a function
    return tuple(dict.fromkeys(pattern for each in rules for pattern in each.unmatched(paths)))


def _unmatched(rule: str) -> str:
    return f"the rule {rule!r} matched no layer; it needs to match a whole path of the first column"


def _row(event: LayerEvent) -> Row:
    name = event.path or event.op
    if event.recipe is None:
        forward = dx = dw = "high precision"
        note = f"not quantized: {event.reason}"
    else:
        assert isinstance(event.recipe, Recipe)
        forward, dx, dw = _formats(event.recipe)
        note = _note(event.recipe)
        if event.reason.startswith("rule "):
            note += f"; {event.reason}"
    shapes, quantized = (event.x_shape, event.kernel_shape), event.recipe is not None
    return Row(name, event.op, *shapes, quantized, forward, dx, dw, note, event.reason)


def _formats(recipe: Recipe) -> tuple[str, str, str]:
    """Operand formats of y = x w, dx = dy w^T, dw = x^T dy."""
    x = "row-scaled nvfp4" if recipe.row_scaled_activation else "nvfp4"
    match recipe.mode:
        case BackwardMode.DEFAULT:
            return f"{x} x nvfp4", "nvfp4 x nvfp4", f"{x} x nvfp4"
        case BackwardMode.UNQUANT:
            return f"{x} x nvfp4", "high precision x high precision", "high precision x high precision"
        case BackwardMode.DEQUANT:
            return f"{x} x nvfp4", "high precision x nvfp4", f"{x} x high precision"
        case _:
            assert_never(recipe.mode)


def _note(recipe: Recipe) -> str:
    default = recipe.mode is BackwardMode.DEFAULT
    traits = [
        ("16x16 weight tiles", recipe.two_dimensional_weights),
        (f"four-over-six of {recipe.four_over_six}", recipe.four_over_six != "none"),
        ("Hadamard in dw", default and recipe.hadamard),
        ("stochastic dy", default and recipe.stochastic_rounding),
    ]
    return ", ".join([f"backward_mode={recipe.mode}", *(name for name, present in traits if present)])
