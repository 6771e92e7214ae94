"""diagnostics: how well each quantized product of a function does, beside the same product in high precision.

    step = diagnostics.collect(jax.value_and_grad(loss))
    (value, gradients), layers = step(params, batch)
    print(diagnostics.table(layers))
    diagnostics.plot(layers, "diagnostics.png")

Every product is compared by itself: with what `recipe=HIGH_PRECISION` makes of the same operands and, for gradients, of
the same incoming gradient dy. An error that came with the operands is not counted again.
"""

import csv
import functools
import os
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_fp4 import _figure, _harvest
from jax_fp4._errors import UnsupportedError, message
from jax_fp4._observe import Backward, Forward, OperandSums, Seen, Site, Sums, observing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operand:
    """How an operand fared when it was quantized. One that its mode leaves alone: snr inf, the fractions 0.

    amax       largest magnitude
    saturated  fraction of elements beyond the largest value that their block can hold under its scales
    flushed    fraction of the blocks that are not all zeros which became all zeros (formats with one scale for the
               tensor have no blocks: of elements)
    snr        10 log10(sum a^2 / sum (a - Q(a))^2) in dB; inf where Q(a) = a, also of zeros
    """

    amax: Float[Array, "*s"]
    saturated: Float[Array, "*s"]
    flushed: Float[Array, "*s"]
    snr: Float[Array, "*s"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Product:
    """A product beside the same one in high precision, r.

    snr     10 log10(sum r^2 / sum (r - y)^2) in dB; inf where y = r, also of zeros; -inf where only r is zero
    cosine  of the angle between the two; 1 where both are zero, 0 where one is
    """

    snr: Float[Array, "*s"]
    cosine: Float[Array, "*s"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layer:
    """One call of a quantized product: y = x w + b (`forward`), dx = dy w^T (`dgrad`), dw = x^T dy (`wgrad`).

    All float32. None: not part of the program, as a gradient that nobody needs. In layers that are stacked by scan or
    vmap each array has the axis of the stack. A NaN in an operand or a product makes its amax, snr and cosine NaN.
    tokens_per_expert: the group_sizes of products with groups, as they were given; inside shard_map, of all devices
        where specs say how rows and groups lie, else with an axis of devices before it.
    """

    forward: Product | None
    dgrad: Product | None
    wgrad: Product | None
    x: Operand | None
    kernel: Operand | None
    dy: Operand | None
    tokens_per_expert: Int[Array, "*s g"] | None


Layers = dict[str, Layer]
PARTS = ("forward", "dgrad", "wgrad", "x", "kernel", "dy")


def collect(fn: Callable) -> Callable[..., tuple[Any, Layers]]:
    """A function of the same arguments that returns (what fn returns, {name: Layer}).

    fn: any function, jitted or not: a loss, or its gradient for the products of the backward. It may contain jit, grad,
    scan, remat, vmap, shard_map and collect (which both see a layer); what a jit in it donates, is not. What collect
    returns is jitted, and may be part of a jitted function. Of its arguments, arrays of JAX and NumPy are traced.
    Everything else (Python's numbers too) is static: it reaches fn as it is, must be hashable, and another value
    compiles another program.
    Names are the paths of layers, or the function's name where there is none ("dense"), with "/w_in" and "/w_out" for
    the two products of an MLP; a second call under one name is "name#1". (Blocks under one nnx.jit trace share theirs.)
    Linen knows the paths of its layers; those of NNX have one after `jax_fp4.nnx.quantize_model`, not where they were
    made with recipe=. Layers come in the order of the program, which jit keeps (an OrderedDict). Those in high
    precision have no entry; `jax_fp4.report` lists them. While it collects, a program computes each product twice and
    keeps x and w for the backward beside what it keeps anyway.
    A backward belongs to its own call. Only of a trace that runs again (one jitted function, called twice) it is told
    by the order: backwards in the reverse order of their forwards, as a gradient has them.
    Inside shard_map, statistics are of all devices' parts together, and products those that a device makes, before they
    are summed over devices.

    Warns (UserWarning), when it is traced, of layers in a lax.cond or lax.while_loop, which are not collected. Raises
    UnsupportedError where the result is differentiated: collect the gradient instead. What fn does to NNX modules that
    it is given is lost, as under jax.jit: return what you need.
    """

    @functools.partial(jax.jit, static_argnums=1)
    def traced(arrays: list[Any], static: _Static):
        with observing(True):
            closed, shape = jax.make_jaxpr(lambda arrays: static.call(fn, arrays), return_shape=True)(arrays)
        _warn_of_missing(closed.jaxpr)

        @jax.custom_jvp
        def run(consts, leaves):
            return _harvest.run(closed.jaxpr, consts, leaves)

        run.defjvp(_refuse_differentiation)
        results, seen = run(closed.consts, arrays)
        return jax.tree.unflatten(jax.tree.structure(shape), results), _layers(seen)

    @functools.wraps(fn)
    def collected(*args, **kwargs):
        return traced(*_Static.split(args, kwargs))

    return collected


_ARRAYS = jax.Array | np.ndarray | np.number | np.bool_


class _Static(NamedTuple):
    """The arguments of a call without their arrays."""

    tree: Any
    others: tuple[tuple[type, Any] | None, ...]  # of each leaf; None for an array. With its type: 1 == True

    @classmethod
    def split(cls, args: tuple, kwargs: dict[str, Any]) -> "tuple[list[Any], _Static]":
        leaves, tree = jax.tree.flatten((args, kwargs))
        others = tuple(None if isinstance(leaf, _ARRAYS) else (type(leaf), _hashable(leaf)) for leaf in leaves)
        return [leaf for leaf in leaves if isinstance(leaf, _ARRAYS)], cls(tree, others)

    def call(self, fn: Callable, arrays: list[Any]) -> Any:
        rest = iter(arrays)
        leaves = [next(rest) if other is None else other[1] for other in self.others]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return fn(*args, **kwargs)


def _hashable(leaf: Any) -> Any:
    try:
        hash(leaf)
    except TypeError:
        shown, needs = f"a {type(leaf).__name__}", "an array, or what can be hashed"
        why, fix = "a program is compiled for each other value", "a function that has it: collect(lambda x: fn(x, it))"
        raise TypeError(message("collect", "an argument", shown, needs, why, fix)) from None
    return leaf


def _refuse_differentiation(*_):
    why, fix = "it is made of a gradient's program", "collect(jax.grad(fn)), or collect(jax.value_and_grad(fn))"
    raise UnsupportedError(message("collect", "its result", "differentiated", "the gradient inside", why, fix))


def _warn_of_missing(jaxpr) -> None:
    missing = dict.fromkeys(_harvest.kept_inside(jaxpr))
    if missing:
        names = ", ".join(f"{site} (in a {primitive})" for site, primitive in missing)
        shown, why = f"without {names}", "what runs there depends on data"
        fix = "lax.scan or fori_loop of a known length in place of a while loop, or the branch as a function of its own"
        text = message("collect", "the result", shown, "layers outside of branches and while loops", why, fix)
        warnings.warn(text, stacklevel=2)


def _layers(seen: list[Seen]) -> Layers:
    """Each backward with the forward of its site; of a trace that ran again, with the last one that has none."""
    calls: list[tuple[str, Forward | None, Backward | None]] = []
    alone: defaultdict[Site, list[int]] = defaultdict(list)  # the forwards without a backward
    for one in seen:
        if one.phase == "forward":
            alone[one.site].append(len(calls))
            calls.append((one.site.name, one.record, None))
        elif alone[one.site]:
            i = alone[one.site].pop()
            calls[i] = (*calls[i][:2], one.record)
        else:
            calls.append((one.site.name, None, one.record))
    layers, times = OrderedDict(), Counter()
    for name, forward, backward in calls:
        layers[f"{name}#{times[name]}" if times[name] else name] = _layer(forward, backward)
        times[name] += 1
    return layers


def _layer(forward: Forward | None, backward: Backward | None) -> Layer:
    return Layer(
        forward=None if forward is None else _product(forward.product),
        dgrad=None if backward is None else _product(backward.dgrad),
        wgrad=None if backward is None else _product(backward.wgrad),
        x=None if forward is None else _operand(forward.x),
        kernel=None if forward is None else _operand(forward.kernel),
        dy=None if backward is None else _operand(backward.dy),
        tokens_per_expert=None if forward is None else next((t for t in forward.tokens if t is not None), None),
    )


def _product(sums: Sums | None) -> Product | None:
    if sums is None:
        return None
    lengths = jnp.sqrt(sums.signal) * jnp.sqrt(sums.power)
    none = (sums.signal == 0) & (sums.power == 0)
    cosine = jnp.where(lengths == 0, none.astype(jnp.float32), sums.dot / jnp.where(lengths == 0, 1, lengths))
    return Product(_snr(sums), cosine)


def _snr(sums: Sums) -> Array:
    ratio = jnp.where(sums.noise == 0, jnp.inf, sums.signal / jnp.where(sums.noise == 0, 1, sums.noise))
    return 10 * jnp.log10(ratio)


def _operand(sums: OperandSums) -> Operand:
    saturated = sums.saturated / jnp.maximum(sums.elements, 1)
    return Operand(sums.amax, saturated, sums.flushed / jnp.maximum(sums.blocks, 1), _snr(sums.sums))


# --- for people ---


def rows(layers: Layers) -> dict[str, dict[str, float]]:
    """The numbers of each layer, {"block0/qkv": {"dgrad/cosine": 0.99, ...}}; of a stack there is a row for each index,
    "block[2]". Of tokens_per_expert: min, mean and max. Waits for the arrays."""
    table: dict[str, dict[str, float]] = {}
    for name, layer in jax.device_get(layers).items():
        parts = ((part, getattr(layer, part)) for part in PARTS)
        arrays = {f"{part}/{field}": a for part, seen in parts if seen is not None for field, a in vars(seen).items()}
        if (tokens := layer.tokens_per_expert) is not None:
            measures = {"min": np.min, "mean": np.mean, "max": np.max}
            arrays |= {f"tokens_per_expert/{measure}": of(tokens, axis=-1) for measure, of in measures.items()}
        for field, values in arrays.items():
            for index in np.ndindex(values.shape):
                row = f"{name}[{','.join(map(str, index))}]" if index else name
                table.setdefault(row, {})[field] = float(values[index])
    return table


def scalars(layers: Layers) -> dict[str, float]:
    """`rows`, with flat names: {"block0/qkv/dgrad/cosine": 0.99, ...}."""
    return {f"{name}/{field}": value for name, row in rows(layers).items() for field, value in row.items()}


class ScalarWriter(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


def write(layers: Layers, step: int, writer: ScalarWriter) -> None:
    """Every one of `scalars` to a TensorBoard writer (torch.utils.tensorboard, tensorboardX), or to a `CSVWriter`."""
    values = scalars(layers)
    if isinstance(writer, CSVWriter):  # which opens its file once for all
        writer.append((step, tag, value) for tag, value in values.items())
        return
    for tag, value in values.items():
        writer.add_scalar(tag, value, step)


class CSVWriter:
    """Lines step,tag,value (inf and nan as such) at the end of a file, which is made with a line of these names."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            self.append([("step", "tag", "value")])

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.append([(global_step, tag, scalar_value)])

    def append(self, lines: Iterable[tuple[Any, str, Any]]) -> None:
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerows(lines)


def table(layers: Layers) -> str:
    """A line for each layer: SNR in dB of operands and products, cosines of gradients, saturated and flushed in %."""
    columns = [
        ("x", "x/snr", ".1f"), ("kernel", "kernel/snr", ".1f"), ("dy", "dy/snr", ".1f"),
        ("y", "forward/snr", ".1f"), ("dx", "dgrad/snr", ".1f"), ("dw", "wgrad/snr", ".1f"),
        ("cos dx", "dgrad/cosine", ".5f"), ("cos dw", "wgrad/cosine", ".5f"),
        ("sat. x", "x/saturated", ".2%"), ("sat. dy", "dy/saturated", ".2%"), ("flushed dy", "dy/flushed", ".2%"),
    ]  # fmt: skip
    lines = [["layer", *(title for title, *_ in columns)]]
    for name, row in rows(layers).items():
        lines.append([name, *(format(row[field], form) if field in row else "-" for _, field, form in columns)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))])
        for name, *cells in lines
    )


def plot(history: Layers | Sequence[tuple[int, Layers]], path: str | os.PathLike[str], title: str = "") -> None:
    """A picture: what `collect` gave, layer by layer, and for a history of (step, what it gave) its course over steps.

    path: of the file, whose ending names the format; PNG where it has none. What is exact (snr inf, cosine 1) is not
    drawn, and NaN is a red cross.
    Needs matplotlib (`pip install matplotlib`), else ModuleNotFoundError. Raises ValueError where there is
    nothing to show.
    """
    steps = [(0, history)] if isinstance(history, Mapping) else list(history)
    if not steps or not steps[-1][1]:
        why, fix = "nothing was quantized", "a function with quantized layers (jax_fp4.report shows which are)"
        raise ValueError(message("plot", "history", "without a layer", "at least one", why, fix))
    _figure.draw([(step, rows(layers)) for step, layers in steps], Path(path), title)
