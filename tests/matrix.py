"""The test matrix: its factors, which cells there are, which are refused, and the committed set that covers all pairs.

A cell is one choice of each factor. Nearly every cell is run (test_matrix.py, against explicit.py); those that the
library refuses are in REFUSED, with the error; those that cannot be written down are in `is_cell`. `python
tests/matrix.py` writes matrix_pairs.txt anew: cells that hold every pair of levels that any cell that runs holds.
"""

import functools
import itertools
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

import jax_fp4 as fp4

MODES = ("default", "unquant", "dequant")
OWN = "its own"  # the mode of a recipe that has one for each product

# --- recipes: what the library is given, and what it must do ---


class Part(NamedTuple):
    """How a recipe quantizes the operands: arguments of `quantize`. For dw both may be transformed, and dy rounded
    stochastically."""

    x: dict
    w: dict
    dy: dict
    hadamard: bool = False
    stochastic: bool = False
    x_along_rows: dict | None = None  # for dw, where that is not x


class Meaning(NamedTuple):
    """What the three products multiply: how the forward quantizes (None: high precision), and of dx and dw the mode and
    how they quantize, which counts in mode "default" alone."""

    forward: Part | None
    dx: tuple[str, Part | None]
    dw: tuple[str, Part | None]


class Level(NamedTuple):
    make: Callable[[str], Any]  # mode -> recipe
    parts: tuple[Part | None, Part | None, Part | None]  # of y, dx, dw
    modes: tuple[str, str] | None = None  # of dx and dw, where they are the recipe's own

    def meaning(self, mode: str) -> Meaning:
        of_dx, of_dw = self.modes or (mode, mode)
        forward, dx, dw = self.parts
        return Meaning(forward, (of_dx, dx), (of_dw, dw))


TILES, CHOICE = dict(block=(16, 16)), fp4.FourOverSix()
MX, MX_E5M2 = dict(format="mxfp8"), dict(format="mxfp8_e5m2")
FLOAT8, FLOAT8_E5M2 = (dict(format=f, power_of_two=False) for f in ("float8", "float8_e5m2"))
ROUNDED_DOWN = dict(format="float8", power_of_two=True, eps=0.5)
BLOCKS, ANY_BLOCKS = (dict(format="float8_block", power_of_two=p) for p in (True, False))
LARGE_TILES = dict(block=(128, 128))
DELAYED, DELAYED_E5M2 = dict(format="float8"), dict(format="float8_e5m2")  # and the scale of the state

NVFP4 = Part({}, TILES, {}, hadamard=True, stochastic=True)
ROW_SCALED = Part(dict(row_scaled=True), TILES, {}, stochastic=True)
BOTH = dict(row_scaled=True, four_over_six=CHOICE)
MXFP8 = Part(MX, MX, MX)
CURRENT = Part(FLOAT8, FLOAT8, FLOAT8_E5M2)
BY_BLOCKS = Part(BLOCKS, BLOCKS | LARGE_TILES, BLOCKS)
NOTHING = fp4.HIGH_PRECISION


def alike(make, part: Part | None, **settings) -> Level:
    return Level(lambda mode: make(mode, **settings), (part, part, part))


def custom(y, dx, dw, parts, modes) -> Level:
    return Level(lambda mode: fp4.CustomRecipe(forward=y, dgrad=dx, wgrad=dw), parts, modes)


NV, MXF, F8, F8B = fp4.NVFP4BlockScaling, fp4.MXFP8BlockScaling, fp4.Float8CurrentScaling, fp4.Float8BlockScaling
RECIPES: dict[str, Level] = {
    "nvfp4": alike(NV, NVFP4),
    "nvfp4 row-scaled": alike(NV, ROW_SCALED, row_scaled_activation=True),
    "nvfp4 four-over-six": alike(
        NV,
        Part(dict(four_over_six=CHOICE), TILES | dict(four_over_six=CHOICE), {}, stochastic=True),
        four_over_six="all",
    ),
    "nvfp4 row-scaled four-over-six": alike(
        NV,
        Part(BOTH, TILES | dict(four_over_six=CHOICE), {}, stochastic=True, x_along_rows=dict(row_scaled=True)),
        row_scaled_activation=True,
        four_over_six="all",
    ),
    "nvfp4 no tiles": alike(NV, NVFP4._replace(w={}), two_dimensional_weights=False),
    "nvfp4 nearest": alike(NV, Part({}, TILES, {}), stochastic_rounding=False, random_hadamard_transform=False),
    "mxfp8": alike(MXF, MXFP8),
    "mxfp8 tiles": alike(MXF, MXFP8._replace(w=MX | dict(block=(32, 32))), two_dimensional_weights=True),
    "mxfp8 hybrid": alike(MXF, MXFP8._replace(dy=MX_E5M2), fp8_format="HYBRID"),
    "float8": alike(F8, CURRENT),
    "float8 power of two": alike(F8, Part(*[ROUNDED_DOWN] * 3), fp8_format="E4M3", power_of_two=True, eps=0.5),
    "float8_block": alike(F8B, BY_BLOCKS),
    "float8_block any scale": alike(F8B, Part(ANY_BLOCKS, ANY_BLOCKS | LARGE_TILES, ANY_BLOCKS), power_of_two=False),
    "float8_block no tiles": alike(F8B, Part(*[BLOCKS] * 3), two_dimensional_weights=False),
    "delayed": alike(fp4.DelayedScaling, Part(DELAYED, DELAYED, DELAYED_E5M2), amax_history_len=4),
    "row-scaled, mxfp8, none": custom(
        NV("default", row_scaled_activation=True),
        MXF("default"),
        NOTHING,
        (ROW_SCALED, MXFP8, None),
        ("default", "unquant"),
    ),
    "none, nvfp4, float8": custom(
        NOTHING, NV("default"), F8("default"), (None, NVFP4, CURRENT), ("default", "default")
    ),
    "nvfp4, dequant, nvfp4": custom(
        NV("default"), NV("dequant"), NV("default"), (NVFP4, None, NVFP4), ("dequant", "default")
    ),
    "float8_block, unquant, mxfp8": custom(
        F8B("default"), F8B("unquant"), MXF("default"), (BY_BLOCKS, None, MXFP8), ("unquant", "default")
    ),
    "no recipe": Level(lambda mode: None, (None, None, None), ("unquant", "unquant")),
}

# --- the other factors ---

LAYERS = (
    "dense",
    "grouped_dense",
    "grouped_mlp",
    "layernorm_dense",
    "layernorm_mlp",
    "linen.Dense",
    "nnx.Linear",
    "DotGeneral",
)
THIN = LAYERS[5:]  # `dense` in other people's signatures
DTYPES = {  # of x, and of the parameters
    "float32": (jnp.float32, jnp.float32),
    "bfloat16, master": (jnp.bfloat16, jnp.float32),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16),
    "float16, master": (jnp.float16, jnp.float32),
    "float16": (jnp.float16, jnp.float16),
}
BIAS = ("bias", "none")
FREE = ("x and w", "x", "w")  # what is differentiated, beside the biases and what a norm has
FROZEN = ("frozen plane", "frozen pair", "frozen tiles")  # x is, beside a quantized kernel
WANTED = (*FREE, *FROZEN, "the frozen kernel")
RANKS = ("1", "2", "3", "0")
# m, k, n; the rows of three groups. No block fits "odd"; "wide" holds more than one block of each format, and of 16 and
# 32 some fit. n = 2 k, so that both products of an MLP have one shape and share what is compiled.
EXTENTS = {"odd": (35, 23, 46, (9, 20, 0)), "wide": (160, 144, 288, (1, 129, 0))}
EXTENTS_OF = dict(
    zip(DTYPES, ("odd", "wide", "odd", "odd", "wide"), strict=True)
)  # every further shape is compiled anew


class Cell(NamedTuple):
    recipe: str
    mode: str
    layer: str
    dtype: str
    bias: str
    wanted: str
    rank: str

    def __str__(self) -> str:
        return " | ".join(self)

    @property
    def extents(self) -> str:
        return EXTENTS_OF[self.dtype]

    @property
    def is_grouped(self) -> bool:
        return self.layer.startswith("grouped")

    @property
    def is_frozen(self) -> bool:
        return self.wanted not in FREE

    @property
    def meaning(self) -> Meaning:
        return RECIPES[self.recipe].meaning(self.mode)

    @property
    def frozen_format(self) -> dict:
        """What a frozen kernel is quantized with, beside tiles: as the forward would, in nvfp4 if it would not."""
        part = self.meaning.forward
        return {} if part is None else {name: value for name, value in part.w.items() if name != "block"}


FACTORS: dict[str, tuple[str, ...]] = dict(
    recipe=tuple(RECIPES),
    mode=(*MODES, OWN),
    layer=LAYERS,
    dtype=tuple(DTYPES),
    bias=BIAS,
    wanted=WANTED,
    rank=RANKS,
)


def is_cell(c: Cell) -> bool:
    """Whether it can be written down."""
    if (RECIPES[c.recipe].modes is None) == (c.mode == OWN):
        return False  # recipes of one mode have none of their own, the others have no other
    if c.layer == "DotGeneral" and c.bias == "bias":
        return False  # lax.dot_general has none
    if c.layer in ("linen.Dense", "nnx.Linear") and c.is_frozen:
        return False  # Flax's parameters are arrays
    if c.layer in THIN and c.rank == "0":
        return False  # Flax and lax refuse a scalar themselves
    scale_of_tensor = c.frozen_format.get("format") in ("float8", "float8_e5m2")
    return not (c.wanted == "frozen tiles" and scale_of_tensor)  # which has no blocks


class Refusal(NamedTuple):
    applies: Callable[[Cell], bool]
    error: type[Exception]
    says: str


REFUSED = {  # the first that applies is raised
    "a backward mode of delayed scaling": Refusal(
        lambda c: c.recipe == "delayed" and c.mode != "default",
        ValueError,
        r"DelayedScaling: backward_mode is '(unquant|dequant)'; needs 'default'",
    ),
    "x without an axis": Refusal(lambda c: c.rank == "0", ValueError, "x is a scalar"),
    "a frozen kernel for lax.dot_general": Refusal(
        lambda c: c.layer == "DotGeneral" and c.is_frozen and c.recipe != "no recipe",
        TypeError,
        "DotGeneral: rhs is a (QuantizedTensor|tuple); needs an array",
    ),
    "the same without a recipe, to lax itself": Refusal(
        lambda c: c.layer == "DotGeneral" and c.is_frozen,
        TypeError,
        "to dot_general as a JAX value|a quantized tensor never turns into one silently",
    ),
    "the gradient of packed codes": Refusal(
        lambda c: c.wanted == "the frozen kernel", fp4.UnsupportedError, "differentiated; needs a constant"
    ),
    "dx in default without the other plane": Refusal(
        lambda c: (
            c.wanted == "frozen plane"
            and c.meaning.dx[0] == "default"
            and c.frozen_format.get("format") not in ("float8", "float8_e5m2")
        ),
        ValueError,
        "needs its plane blocked along n too",
    ),
}


def refusal(c: Cell) -> str | None:
    return next((name for name, refused in REFUSED.items() if refused.applies(c)), None)


# --- the whole matrix ---


# One row is a shape of its own, which takes minutes to compile for everything.
WITH_ONE_ROW = ("float32", "bfloat16, master")


def whole(recipe: str, mode: str, layer: str) -> Iterator[Cell]:
    """The cells of these three levels: every dtype with every choice of what is differentiated, under bias and rank in
    turn; and a scalar."""
    for dtype in DTYPES:
        ranks = RANKS[:3] if dtype in WITH_ONE_ROW else RANKS[1:3]
        turns = itertools.cycle(itertools.product(BIAS, ranks))
        for wanted in WANTED:
            found = (Cell(recipe, mode, layer, dtype, bias, wanted, rank) for bias, rank in turns)
            found = itertools.islice(found, len(BIAS) * len(ranks))
            yield from itertools.islice(filter(is_cell, found), 1)
    scalar = Cell(recipe, mode, layer, "float32", "none", "x and w", "0")
    if is_cell(scalar):
        yield scalar


def parts_of_whole() -> list[tuple[str, str, str]]:
    triples = itertools.product(FACTORS["recipe"], FACTORS["mode"], FACTORS["layer"])
    return [triple for triple in triples if any(True for _ in whole(*triple))]


# --- pairs ---

PAIRS = pathlib.Path(__file__).with_name("matrix_pairs.txt")
FREELY = ("dtype",)  # factors that decide nothing about a cell's existence or refusal

Pair = frozenset[tuple[str, str]]


def pairs_of(cell: Cell) -> set[Pair]:
    return {frozenset(two) for two in itertools.combinations(cell._asdict().items(), 2)}


@functools.cache
def runnable() -> tuple[Cell, ...]:
    """Every cell that runs, up to the factors FREELY."""
    levels = [FACTORS[name][:1] if name in FREELY else FACTORS[name] for name in FACTORS]
    return tuple(c for c in map(Cell._make, itertools.product(*levels)) if is_cell(c) and refusal(c) is None)


def wanted_pairs() -> list[Pair]:
    """All that a cell that runs may hold, in the order of the factors."""
    found: dict[Pair, None] = {}
    for cell in runnable():
        fixed = {name: level for name, level in cell._asdict().items() if name not in FREELY}
        found |= dict.fromkeys(map(frozenset, itertools.combinations(fixed.items(), 2)))
    held = dict.fromkeys(level for pair in found for level in sorted(pair))
    free = [(name, level) for name in FREELY for level in FACTORS[name]]
    for one in free:
        found |= {frozenset((one, other)): None for other in [*held, *free] if other[0] != one[0]}
    return sorted(found, key=lambda pair: [(list(FACTORS).index(f), FACTORS[f].index(v)) for f, v in sorted(pair)])


def cover() -> list[Cell]:
    """Greedily: each cell begins with a pair that is missing, then takes level by level what adds most."""
    missing = dict.fromkeys(wanted_pairs())
    used: dict[tuple[str, str], int] = {}
    cells = []
    while missing:
        cell = dict(next(iter(missing)))
        rest = _those_with(runnable(), cell)
        for name in FACTORS:
            if name in cell:
                continue
            possible = FACTORS[name] if name in FREELY else [v for v in FACTORS[name] if _those_with(rest, {name: v})]

            def gain(level, name=name, cell=cell):
                new = sum(frozenset(((name, level), other)) in missing for other in cell.items())
                return new, -used.get((name, level), 0)

            cell[name] = max(possible, key=gain)
            rest = rest if name in FREELY else _those_with(rest, {name: cell[name]})
        cells.append(Cell(**cell))
        for level in cell.items():
            used[level] = used.get(level, 0) + 1
        for pair in pairs_of(cells[-1]):
            missing.pop(pair, None)
    return cells


def _those_with(cells: Iterable[Cell], levels: dict[str, str]) -> list[Cell]:
    where = [(Cell._fields.index(name), level) for name, level in levels.items() if name not in FREELY]
    return [c for c in cells if all(c[i] == level for i, level in where)]


def each_refusal() -> list[Cell]:
    """One cell for every refusal and layer that it concerns."""
    levels = [FACTORS[name][:1] if name in FREELY else FACTORS[name] for name in FACTORS]
    found: dict[tuple, Cell] = {}
    for cell in map(Cell._make, itertools.product(*levels)):
        if is_cell(cell) and (why := refusal(cell)):
            found.setdefault((why, cell.layer), cell)
    return list(found.values())


def committed() -> list[Cell]:
    lines = (line for line in PAIRS.read_text().splitlines() if line and not line.startswith("#"))
    return [Cell._make(line.split(" | ")) for line in lines]


def written() -> str:
    """The text of the committed file."""
    cells = sorted([*cover(), *each_refusal()], key=lambda c: [FACTORS[f].index(v) for f, v in c._asdict().items()])
    head = "# Written by `python tests/matrix.py`: every pair of levels that a cell which runs can hold; every refusal."
    return "\n".join([head, f"# {' | '.join(Cell._fields)}", *map(str, cells)]) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--count"]:
        PAIRS.write_text(written())
    cells = [cell for part in parts_of_whole() for cell in whole(*part)]
    refused = sum(refusal(cell) is not None for cell in cells)
    print(f"{len(committed())} cells in {PAIRS.name}; the whole matrix: {len(cells) - refused} run, {refused} refused")
