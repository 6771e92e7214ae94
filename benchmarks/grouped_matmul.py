"""How fast are the grouped products on a Hopper GPU? Against torch._grouped_mm, ragged_dot, a dense product and a copy.

    python benchmarks/grouped_matmul.py [--rounds 9] [--cases "64 experts"] [--tiny]

Medians over rounds. In a round every contender is timed once, for about 20 ms of launches one after another: a GPU that
gets hot throttles, and flatters whoever ran first. torch is timed by CUDA events, JAX by the wall clock around programs
of several products, enqueued before they are waited for; "!" marks times that their dispatch limits.

Operands are normal values: bfloat16, or NVFP4 quantized from them. Each product of a program has group sizes in an
array of its own, or XLA would make one of them all. "FP4" is the product: its program decodes one x, once for at least
16 products. "FP4, decode" is fp4.grouped_matmul as it is called, with an x to decode each time. Packed weights come in
sets, together larger than the L2 cache.

Columns are a peer's time over ours: "torch" is the faster of two layouts of the weights, "bf16" our own product of
arrays, "dense" one matrix product of as many FLOP. GB/s are those of the weights' bytes, or of their gradient's, and
"copy" is their share of the bandwidth of a device copy. What is asked for names the fastest of torch, ragged_dot and
tokamax "grouped", and the fastest of these and torch.bmm "all". ragged_dot is timed for K = N = 4096, with 8 experts or
few tokens. All results of ours are first compared with products in float64 of their operands, in some 2,000 places.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from grouped_cases import Case, all_cases, shrunk, sizes_of
from jax import lax
from rounds import (
    SLOW_ROUNDS,
    Contender,
    Measured,
    attempt,
    compared,
    compiled,
    dense,
    many,
    module,
    normal,
    note_calls,
    of_program,
    of_torch,
    torch_with_gpu,
)
from tqdm import tqdm

import jax_fp4 as fp4

LEAST = 20e-3  # seconds of one measurement
PROGRAM = 1.5e-3  # seconds of one program: many times what it takes to dispatch it
MOST_PRODUCTS = 32  # in a program
SHARED_DECODE = 16  # products at least to one decode of x, where that is not to be measured
SETS = 256 << 20  # bytes of packed weights, several times the L2 cache
ROWS, COLUMNS = 64, 32  # places that are checked
TOLERANCE = 5e-3  # relative Frobenius error; rounding to bfloat16 makes 1.7e-3
PEERS = ("torch", "bmm", "ragged_dot", "tokamax", "bf16", "dense")


# --- are they right? ---


@jax.jit
def places(lhs, rhs, y, rows, groups, columns):
    """Rows of lhs, columns of the matrices they are multiplied with, and the results y there."""
    if isinstance(lhs, fp4.QuantizedTensor):
        x = replace(lhs, codes=lhs.codes[rows], block_scale=lhs.block_scale[rows])
        codes, block_scale = (part[groups[:, None], columns[None]] for part in (rhs.codes, rhs.block_scale))
        w = replace(rhs, codes=codes, block_scale=block_scale, amax=rhs.amax[groups])
    else:
        x, w = lhs[rows], jnp.swapaxes(rhs[groups[:, None], :, columns[None]], 1, 2)
    return x, w, y[rows[:, None], columns[None]]


def float64(a) -> np.ndarray:
    """Decoded by the specification, if it is quantized."""
    if isinstance(a, fp4.QuantizedTensor):
        a = fp4.dequantize(a, jnp.float32, implementation="reference")
    return np.asarray(a, np.float64)


def check_forward(name: str, lhs: list, rhs: list, results: list, sizes: np.ndarray) -> None:
    """The first result of a program and the last."""
    random = np.random.default_rng(1)
    rows = random.integers(sizes.sum(), size=ROWS)
    columns = random.integers(results[0].shape[1], size=COLUMNS)
    groups = np.repeat(np.arange(len(sizes)), sizes)[rows]
    for i in {0, len(results) - 1}:
        found = places(lhs[i % len(lhs)], rhs[i % len(rhs)], results[i], rows, groups, columns)
        x, w, y = map(float64, found)
        check(name, y, np.einsum("rk,rkc->rc", x, w))


@jax.jit
def places_of_gradient(x, dy, dw, ks, ns):
    return x[:, ks], dy[:, ns], dw[:, ks[:, None], ns[None]]


def check_gradient(name: str, x, dy, dw, sizes: np.ndarray) -> None:
    random = np.random.default_rng(2)
    count = math.ceil(math.sqrt(ROWS * COLUMNS / len(sizes)))
    ks, ns = (random.integers(extent, size=count) for extent in dw.shape[1:])
    x, dy, dw = map(float64, places_of_gradient(x, dy, dw, ks, ns))
    ends = np.cumsum(sizes)
    groups = zip(ends - sizes, ends, strict=True)
    check(name, dw, np.stack([x[start:end].T @ dy[start:end] for start, end in groups]))


def check(name: str, got: np.ndarray, want: np.ndarray) -> None:
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    if not error <= TOLERANCE:  # nor NaN
        raise RuntimeError(f"{name}: relative error {error:.2e} in {want.size} places, at most {TOLERANCE} is right")


# --- what is measured ---


@dataclass(frozen=True)
class Bench:
    rounds: int
    tiny: bool
    torch: Any  # the module, or None
    tokamax: Any
    copy: Contender
    copied: int  # bytes that it reads and writes

    def measure(self, ours: dict[str, Contender], peers: dict[str, Callable]) -> Measured:
        return compared(ours, peers | {"copy": lambda: self.copy}, self.rounds, 1e-4 if self.tiny else LEAST)

    def products(self, case: Case, weight_bytes: float) -> int:
        """In a program of PROGRAM seconds, from what an H200 can do at best."""
        seconds = max(case.flops / 7e14, weight_bytes / 4e12)
        return 2 if self.tiny else min(MOST_PRODUCTS, math.ceil(PROGRAM / seconds))


class Weights(NamedTuple):
    w: jax.Array  # bfloat16 [g, k, n]
    packed: list[fp4.QuantizedTensor]  # of the same values in sets, the experts in other orders
    torch_row: Any  # w without a copy; None without torch
    torch_column: Any


@jax.jit
def rolled(q: fp4.QuantizedTensor, by: int) -> fp4.QuantizedTensor:
    return jax.tree.map(lambda leaf: jnp.roll(leaf, by, axis=0), q)


def make_weights(bench: Bench, case: Case) -> Weights:
    w = normal(1, (case.experts, case.k, case.n), case.k**-0.5)
    packed = [fp4.quantize(w, axis=0, batch_dims=1)]
    sets = 2 if bench.tiny else math.ceil(SETS / packed[0].nbytes)
    packed += [rolled(packed[0], i) for i in range(1, sets)]
    jax.block_until_ready((w, packed))
    if bench.torch is None:
        return Weights(w, packed, None, None)
    row = bench.torch.from_dlpack(w)
    return Weights(w, packed, row, row.transpose(1, 2).contiguous().transpose(1, 2))


class Job(NamedTuple):
    """A program of many products."""

    product: Callable
    lhs: list
    rhs: list
    products: int
    decodes: int = 0  # of lhs

    def arguments(self, sizes: np.ndarray) -> tuple[list, list, list]:
        return self.lhs, self.rhs, [jnp.array(sizes) for _ in range(self.products)]


def our_jobs(bench: Bench, case: Case, x, weights: Weights) -> dict[str, Job]:
    """What runs on our kernels."""
    qx, count = fp4.quantize(x), bench.products(case, weights.packed[0].nbytes)
    shared, many_x = max(count, SHARED_DECODE), [jax.tree.map(jnp.copy, qx) for _ in range(count)]
    return {
        "FP4": Job(fp4.grouped_matmul, [qx], weights.packed[:shared], shared, 1),
        "FP4, decode": Job(fp4.grouped_matmul, many_x, weights.packed[:count], count, count),
        "bf16": Job(fp4.grouped_matmul, [x], [weights.w], bench.products(case, weights.w.nbytes)),
    }


def jax_jobs(bench: Bench, case: Case, x, weights: Weights) -> dict[str, Job]:
    jobs = {"ragged_dot": Job(lax.ragged_dot, [x], [weights.w], 1)} if case.ragged else {}
    if bench.tokamax is not None:
        jobs["tokamax"] = Job(bench.tokamax.ragged_dot, [x], [weights.w], 1)
    return jobs


def torch_calls(bench: Bench, case: Case, x, weights: Weights, sizes: np.ndarray) -> dict[str, Callable]:
    if (torch := bench.torch) is None:
        return {}
    x, row, column = torch.from_dlpack(x), weights.torch_row, weights.torch_column
    offs = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device=x.device)
    calls = {
        "torch row": lambda: torch._grouped_mm(x, row, offs=offs),
        "torch column": lambda: torch._grouped_mm(x, column, offs=offs),
        "dense": lambda: torch.mm(x, row[0]),
    }
    if case.few:
        calls["bmm"] = lambda: torch.bmm(x.view(case.experts, -1, case.k), row)
    return calls


def measure_forward(bench: Bench, cases: Sequence[Case], weights: Weights) -> Iterator[tuple[Case, Measured]]:
    """Cases that differ in nothing but sizes, which the programs take as data."""
    first, sizes = cases[0], sizes_of(cases[0])
    x = jax.block_until_ready(normal(2, (first.rows, first.k)))
    ours, others = our_jobs(bench, first, x, weights), jax_jobs(bench, first, x, weights)
    programs = compiled({name: (many(job.product), job.arguments(sizes)) for name, job in ours.items()})
    for name, job in ours.items():
        if not bench.tiny:
            note_calls(f"{first.label}: {name}", programs[name], job.products, job.decodes)
    for name, job in others.items():
        one = {name: (many(job.product), job.arguments(sizes))}
        programs |= attempt(name, partial(compiled, one)) or {}
    for case in cases:
        sizes = sizes_of(case)
        contenders, peers = {}, {}
        for name, job in ours.items():
            arguments = job.arguments(sizes)
            check_forward(f"{case.label}: {name}", job.lhs, job.rhs, programs[name](*arguments), sizes)
            contenders[name] = of_program(programs[name], arguments, job.products)
        for name in others.keys() & programs.keys():
            peers[name] = partial(of_program, programs[name], others[name].arguments(sizes), 1, SLOW_ROUNDS)
        for name, call in torch_calls(bench, case, x, weights, sizes).items():
            peers[name] = partial(of_torch, bench.torch, call)
        if bench.torch is None:
            peers["dense"] = partial(dense, x, weights.w[0])
        yield case, bench.measure(contenders, peers)


def measure_gradient(bench: Bench, cases: Sequence[Case]) -> Iterator[tuple[Case, Measured]]:
    """The same of the contraction of rows."""
    first = cases[0]
    x, dy = jax.block_until_ready([normal(2, (first.rows, first.k)), normal(3, (first.rows, first.n))])
    job = Job(lambda x, dy, sizes: fp4.grouped_matmul(x.mT, dy, sizes), [x], [dy], 1)
    program = compiled({"": (many(job.product), job.arguments(sizes_of(first)))})[""]
    if not bench.tiny:
        note_calls(first.label, program, job.products, job.decodes)
    for case in cases:
        sizes = sizes_of(case)
        arguments = job.arguments(sizes)
        check_gradient(case.label, x, dy, program(*arguments)[0], sizes)
        peers = {"dense": partial(dense, x.T, dy)}
        if bench.torch is not None:
            calls = torch_gradient_calls(bench.torch, x, dy, sizes)
            peers = {name: partial(of_torch, bench.torch, call) for name, call in calls.items()}
        yield case, bench.measure({"bf16": of_program(program, arguments, job.products)}, peers)


def torch_gradient_calls(torch, x, dy, sizes: np.ndarray) -> dict[str, Callable]:
    x, dy = torch.from_dlpack(x), torch.from_dlpack(dy)
    offs = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device=x.device)
    return {
        "torch row": lambda: torch._grouped_mm(x.t(), dy, offs=offs),
        "dense": lambda: torch.mm(x.t(), dy),
    }


def measure(bench: Bench, cases: Sequence[Case]) -> Iterator[tuple[Case, Measured]]:
    for _, group in itertools.groupby(cases, key=lambda case: (case.experts, case.k, case.n)):
        alike = list(group)
        forward = [case for case in alike if case.kind == "forward"]
        if forward:
            weights = make_weights(bench, forward[0])
            for _, same in itertools.groupby(forward, key=lambda case: case.rows):
                yield from measure_forward(bench, list(same), weights)
            del weights  # up to 17 GB, before the gradients are made
        if gradients := [case for case in alike if case.kind == "weight gradient"]:
            yield from measure_gradient(bench, gradients)
        if bench.torch is not None:
            bench.torch.cuda.empty_cache()


# --- what is printed ---


def combined(times: dict[str, float]) -> dict[str, float]:
    """With the faster of torch's layouts as "torch" and, if there is one, the fastest peers."""
    found = dict(times)
    if layouts := [found[name] for name in ("torch row", "torch column") if name in found]:
        found["torch"] = min(layouts)
        found["grouped"] = min(found[name] for name in ("torch", "ragged_dot", "tokamax") if name in found)
        found["all"] = min(found["grouped"], found.get("bmm", math.inf))
    return found


def line(case: Case, subject: str, measured: Measured, copied: int) -> str:
    """A row of the table."""
    times = combined(measured.times)
    fp4_weights = subject.startswith("FP4")
    moved = case.elements * (0.5625 if fp4_weights else 2)
    ratios = {name: seconds / times[subject] for name, seconds in times.items()}
    ratios["copy"] = moved / copied * ratios["copy"]
    cells = "".join(f"{ratios[peer]:11.2f}" if peer in ratios else f"{'-':>11}" for peer in PEERS)
    asks = case.asks if fp4_weights else case.asks_bf16
    rates = f"{case.flops / times[subject] / 1e12:9.1f}{moved / times[subject] / 1e9:8.0f}"
    verdicts = "; ".join(ask.verdict(ratios) for ask in asks)
    us = f"{times[subject] * 1e6:.1f}{'!' * (subject in measured.limited)}"
    return f"{case.label:62}{subject:12}{us:>10}{rates}{cells}{ratios['copy']:7.2f}  {verdicts}"


def report(bench: Bench, cases: Sequence[Case]) -> None:
    uneven = {(case.experts, case.rows): sizes_of(case) for case in cases if not case.even}
    for experts, rows in sorted(uneven):
        print(f"uneven sizes, {experts} experts, M={rows}: {' '.join(map(str, uneven[experts, rows]))}")
    heads = "".join(f"{peer:>11}" for peer in PEERS)
    print(f"\n{'':62}{'':12}{'us':>10}{'TFLOP/s':>9}{'GB/s':>8}{heads}{'copy':>7}  asked for")
    with tqdm(total=len(cases), desc="cases", leave=False, disable=None) as bar:
        for case, measured in measure(bench, cases):
            for subject in ("FP4", "FP4, decode", "bf16"):
                if subject in measured.times:
                    tqdm.write(line(case, subject, measured, bench.copied))
            bar.update()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cases", default="", help="only those whose name has this in it")
    parser.add_argument("--tiny", action="store_true", help="sizes that run anywhere: a test of this script")
    options = parser.parse_args(arguments)
    support = fp4.supported("grouped_matmul", "cuda")
    if not options.tiny and not (support and jax.default_backend() == "gpu"):
        sys.exit(f"grouped_matmul.py needs a GPU and the CUDA extension: {support.reason}")
    cases = shrunk(all_cases()) if options.tiny else all_cases()
    cases = [case for case in cases if options.cases in case.label]
    if not cases:
        sys.exit(f"no case has {options.cases!r} in its name")
    torch, tokamax = torch_with_gpu(), module("tokamax")
    versions = [f"{each.__name__} {each.__version__}" for each in (jax, torch) if each is not None]
    print(f"{', '.join(versions)}, {jax.devices()[0].device_kind}, {support.reason}, {options.rounds} rounds")
    source = jnp.zeros(1 << (16 if options.tiny else 30), jnp.uint8)
    copy = of_program(compiled({"": (jnp.copy, (source,))})[""], (source,))
    report(Bench(options.rounds, options.tiny, torch, tokamax, copy, 2 * source.nbytes), cases)


if __name__ == "__main__":
    main()
