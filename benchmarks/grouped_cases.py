"""The cases of grouped_matmul.py: shapes, group sizes, and how fast the products are asked to be."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

SEED = 7  # of uneven sizes
SHAPES = ((4096, 4096), (7168, 2048), (2048, 7168), (4096, 14336))  # k, n


class Ask(NamedTuple):
    """At least so many times as fast as a peer, or at that share of a copy's bandwidth."""

    against: str
    ratio: float

    def verdict(self, ratios: dict[str, float]) -> str:
        if self.against not in ratios:
            return f"{self.ratio} of {self.against}: not measured"
        ratio = ratios[self.against]
        return f"{self.ratio} of {self.against}: {ratio:.2f}, {'met' if ratio >= self.ratio else 'NOT MET'}"


@dataclass(frozen=True)
class Case:
    kind: str  # "forward" or "weight gradient"
    experts: int
    rows: int
    even: bool
    k: int
    n: int
    asks: tuple[Ask, ...] = ()  # of the product with FP4 weights
    asks_bf16: tuple[Ask, ...] = ()
    ragged: bool = False  # whether ragged_dot takes part: it takes long

    @property
    def few(self) -> bool:
        return self.rows <= 16 * self.experts

    @property
    def label(self) -> str:
        each = self.rows // self.experts
        tokens = f"{each} token{'s' * (each > 1)} each" if self.few else f"M={self.rows}"
        sizes = "even" if self.even else "uneven"
        experts = f"{self.experts} expert{'s' * (self.experts > 1)}"
        return f"{self.kind}, {experts}, {tokens}, {sizes}, {self.k}x{self.n}"

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.k * self.n

    @property
    def elements(self) -> int:
        """Of the weights."""
        return self.experts * self.k * self.n


FORWARD = (  # experts, rows, even, what is asked of FP4 weights
    (1, 16, True, ()),
    (1, 1, True, ()),
    (8, 16384, True, (Ask("grouped", 1.0),)),
    (8, 16384, False, (Ask("grouped", 1.0),)),
    (64, 16384, True, (Ask("grouped", 1.0),)),
    (64, 16384, False, (Ask("grouped", 1.15),)),
    (64, 8192, True, (Ask("torch", 1.35),)),
    (64, 8192, False, (Ask("torch", 1.5),)),
    (8, 8 * 16, True, (Ask("torch", 4.0), Ask("all", 2.8))),
    (64, 64 * 16, True, (Ask("torch", 4.0), Ask("all", 2.8), Ask("copy", 0.85))),
    (64, 64 * 4, True, (Ask("copy", 0.85),)),
    (64, 64, True, (Ask("grouped", 3.2), Ask("copy", 0.85))),
)


def all_cases() -> list[Case]:
    """Those with the same weights follow one another, and among them those that differ in their sizes only."""
    of_bf16 = (Ask("torch", 1.0),)
    cases = []
    for (k, n), experts in itertools.product(SHAPES, (1, 8, 64)):
        for _, rows, even, asks in (row for row in FORWARD if row[0] == experts):
            ragged = (k, n) == SHAPES[0] and (rows <= 16 * experts or experts == 8)
            cases.append(Case("forward", experts, rows, even, k, n, asks, of_bf16 if rows == 16384 else (), ragged))
        for even in (True, False) if experts > 1 else ():
            cases.append(Case("weight gradient", experts, 16384, even, k, n, (), of_bf16))
    return cases


def shrunk(cases: Sequence[Case]) -> list[Case]:
    """The first shape's cases of 8 experts at sizes for any machine: the logic is the same."""
    chosen = [case for case in cases if (case.experts, case.k, case.n) == (8, *SHAPES[0])]
    return [replace(case, experts=4, rows=case.rows // 32, k=64, n=96) for case in chosen]


def sizes_of(case: Case) -> np.ndarray:
    """Group sizes that add up to the rows; uneven ones are exponentially distributed, and one expert has none."""
    if case.even:
        return np.full(case.experts, case.rows // case.experts, np.int32)
    weights = np.random.default_rng(SEED).exponential(size=case.experts)
    weights[case.experts // 3] = 0
    sizes = np.floor(weights / weights.sum() * case.rows).astype(np.int32)
    sizes[sizes.argmax()] += case.rows - sizes.sum()
    return sizes
