"""The picture of `diagnostics.plot`: each layer as it is now and, of a history, the course over the steps."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jax_fp4._errors import importing

Rows = dict[str, dict[str, float]]


class Panel(NamedTuple):
    title: str
    series: dict[str, tuple[str, str]]  # what of a row is drawn: its label and color
    scale: str = "linear"
    from_zero: bool = False


def _series(field: str, **colors: str) -> dict[str, tuple[str, str]]:
    labels = {"forward": "y", "dgrad": "dx", "wgrad": "dw"}
    return {f"{part}/{field}": (labels.get(part, part), color) for part, color in colors.items()}


_GRADIENTS = {"dgrad": "#d1495b", "wgrad": "#edae49"}
_OPERANDS = {"x": "#00798c", "kernel": "#7b4ea3", "dy": "#5fad56"}
_TOKENS = {"min": "#9aa5b1", "mean": "#52606d", "max": "#1f2933"}
PANELS = (
    Panel("SNR of products, dB", _series("snr", forward="#1d3557", **_GRADIENTS)),
    Panel("1 - cosine of gradients", _series("cosine", **_GRADIENTS), "log"),
    Panel("SNR of operands, dB", _series("snr", **_OPERANDS)),
    Panel("saturated elements, %", _series("saturated", **_OPERANDS), from_zero=True),
    Panel("flushed blocks, %", _series("flushed", **_OPERANDS), from_zero=True),
    Panel(
        "tokens of an expert",
        {f"tokens_per_expert/{of}": (f"{of} tokens", color) for of, color in _TOKENS.items()},
        from_zero=True,
    ),
)


def _figure_of_matplotlib() -> Any:
    with importing("plot", "matplotlib", "it draws the picture"):
        from matplotlib.figure import Figure  # optional, and slow to import
    return Figure


def draw(history: list[tuple[int, Rows]], path: Path, title: str) -> None:
    Figure = _figure_of_matplotlib()
    step, last = history[-1]
    over_time = len(history) > 1
    panels = [panel for panel in PANELS if any(field in row for row in last.values() for field in panel.series)]
    heights = [0.24 * len(last) + 1.0] + [2.6] * over_time
    figure = Figure(figsize=(3.4 * len(panels), sum(heights) + 0.8), layout="constrained")
    grid = figure.subplots(len(heights), len(panels), squeeze=False, gridspec_kw={"height_ratios": heights})
    for panel, (axes, *below) in zip(panels, grid.T, strict=True):
        _by_layer(axes, last, panel)
        for over in below:
            _over_steps(over, history, panel)
    for axes in grid[0, 1:]:
        axes.tick_params(labelleft=False)
    handles = {dots.get_label(): dots for axes in grid[0] for dots in axes.collections}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(", ".join(filter(None, [title, f"step {step}" if over_time else ""])), fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format=path.suffix[1:] or "png")  # without format it would add an ending


def _values(rows: Rows, field: str) -> np.ndarray:
    """As drawn, one for each layer: NaN, which is not drawn, where there is none or it is infinite."""
    values = np.array([row.get(field, math.nan) for row in rows.values()])
    if field.endswith("cosine"):
        values = 1 - values
        values[values <= 0] = math.nan
    values[np.isinf(values)] = math.nan
    return 100 * values if field.endswith(("saturated", "flushed")) else values


def _by_layer(axes: Any, rows: Rows, panel: Panel) -> None:
    places, drawn = np.arange(len(rows)), False
    for field, (label, color) in panel.series.items():
        values = _values(rows, field)
        drawn |= not np.isnan(values).all()
        axes.scatter(values, places, s=26, color=color, label=label, alpha=0.85, zorder=3)
        if lost := [i for i, row in enumerate(rows.values()) if math.isnan(row.get(field, 0.0))]:
            at_the_left = dict(transform=axes.get_yaxis_transform(), clip_on=False)
            axes.scatter([0] * len(lost), lost, s=60, marker="X", color="red", label="NaN", zorder=4, **at_the_left)
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_yticks(places, list(rows), fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="both", color="0.92")
    _frame(axes, axes.xaxis, axes.set_xscale, axes.set_xlim, panel, drawn)


def _over_steps(axes: Any, history: list[tuple[int, Rows]], panel: Panel) -> None:
    """A band over all layers, and their median."""
    steps, drawn = np.array([step for step, _ in history]), False
    for field, (_, color) in panel.series.items():
        values = [_values(rows, field) for _, rows in history]
        values = [one[~np.isnan(one)] for one in values]
        x = steps[[one.size > 0 for one in values]]
        drawn |= x.size > 0
        low, middle, high = ([of(one) for one in values if one.size] for of in (np.min, np.median, np.max))
        axes.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        axes.plot(x, middle, color=color, linewidth=1.6)
    axes.update_datalim([(step, 0) for step in steps], updatey=False)  # also of steps at which nothing is drawn
    axes.set_xlabel("step (line: median, band: all layers)", fontsize=8)
    axes.grid(axis="y", color="0.92")
    _frame(axes, axes.yaxis, axes.set_yscale, axes.set_ylim, panel, drawn)


def _frame(axes: Any, along: Any, set_scale, set_limits, panel: Panel, drawn: bool) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if not drawn:  # all exact, or no number: an axis without values, which could not be logarithmic
        along.set_ticks([])
        return
    set_scale(panel.scale)
    if panel.scale == "log":  # whole decades, so that two labels at least have room
        along.set_minor_formatter("")
        low, high = np.log10(along.get_view_interval())
        set_limits(10 ** np.floor(low), 10 ** np.ceil(high))
    if panel.from_zero:
        set_limits(0, None)
