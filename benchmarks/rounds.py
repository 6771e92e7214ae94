"""Contenders timed in rounds, one after another, and the programs and peers that the GPU benchmarks make them of.

A GPU that gets hot throttles, and flatters whoever ran first: so in a round each is timed once, and medians over rounds
count. torch is timed by CUDA events, JAX by the wall clock around programs enqueued before they are waited for.
"""

import argparse
import functools
import importlib
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from tqdm import tqdm

IN_FLIGHT = 24 << 30  # bytes of results: the programs that are enqueued at once hold them all
SLOW_ROUNDS = 3  # in which a peer takes part that takes long


# --- timing ---


@dataclass(frozen=True)
class Contender:
    clock: Callable[[int], float]  # the seconds that so many runs take, one after another
    products: int = 1  # in a run
    at_once: int = 1 << 20  # runs enqueued before they are waited for
    rounds: int = 1 << 20  # in how many it takes part
    dispatch: float = 0.0  # seconds until a run is enqueued

    def seconds(self, runs: int) -> float:
        """Of one product."""
        batches = (min(self.at_once, runs - done) for done in range(0, runs, self.at_once))
        return sum(map(self.clock, batches)) / (runs * self.products)


def of_program(program, arguments: tuple, products: int = 1, rounds: int = 1 << 20) -> Contender:
    """A compiled JAX program."""

    def clock(runs: int) -> float:
        result, start = None, time.perf_counter()
        for _ in range(runs):
            result = program(*arguments)
        jax.block_until_ready(result)
        return time.perf_counter() - start

    held = sum(leaf.nbytes for leaf in jax.tree.leaves(jax.block_until_ready(program(*arguments))))
    start = time.perf_counter()
    result = program(*arguments)
    dispatch = time.perf_counter() - start
    jax.block_until_ready(result)
    return Contender(clock, products, max(1, IN_FLIGHT // held), rounds, dispatch)


def of_torch(torch, call: Callable[[], object]) -> Contender:
    def clock(runs: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(runs):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    clock(1)  # a product that torch refuses is refused here
    return Contender(clock)


def interleaved(contenders: dict[str, Contender], rounds: int, least: float) -> dict[str, float]:
    """Median seconds of one product of each, measured in turns, each time for about `least` seconds."""
    runs = {}
    for name, contender in contenders.items():
        contender.clock(1)
        one = contender.clock(1)
        if one < least / 10:  # of which most may be the launch
            one = contender.clock(10) / 10
        runs[name] = math.ceil(least / one)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in tqdm(range(rounds), desc="rounds", leave=False, disable=None):
        for name, contender in contenders.items():
            if turn < contender.rounds:
                times[name].append(contender.seconds(runs[name]))
    return {name: statistics.median(measured) for name, measured in times.items()}


class Measured(NamedTuple):
    times: dict[str, float]  # seconds of a product
    limited: set[str]  # those whose programs take longer to dispatch than to run


def compared(ours: dict[str, Contender], peers: dict[str, Callable], rounds: int, least: float) -> Measured:
    """Ours, and the peers that can be made, by the functions given for them."""
    found = {name: attempt(name, make) for name, make in peers.items()}
    contenders = ours | {name: peer for name, peer in found.items() if peer is not None}
    times = interleaved(contenders, rounds, least)
    runs = {name: times[name] * contender.products for name, contender in contenders.items()}
    return Measured(times, {name for name, each in contenders.items() if each.dispatch > 0.9 * runs[name]})


def of_devices(doc: str | None, arguments: Sequence[str] | None, rounds: int) -> tuple[argparse.Namespace, list]:
    """The command line of what several devices do together, and these devices."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--devices", type=int, default=None, help="all by default")
    parser.add_argument("--tiny", action="store_true", help="sizes for any machine, to try the script")
    options = parser.parse_args(arguments)
    devices = jax.devices()[: options.devices]
    if len(devices) < 2:
        raise SystemExit("there is one device here, and nothing to gather: more GPUs, or --tiny on eight of the CPU")
    print(f"jax {jax.__version__}, {len(devices)} x {devices[0].device_kind}, {options.rounds} rounds")
    return options, devices


# --- programs ---


def many(product: Callable) -> Callable:
    """A function of lists that makes a product for each of the sizes, going round the operands."""

    def products(lhs: list, rhs: list, sizes: list) -> list:
        return [product(lhs[i % len(lhs)], rhs[i % len(rhs)], each) for i, each in enumerate(sizes)]

    return products


def compiled(jobs: dict[str, tuple[Callable, tuple]]) -> dict[str, Any]:
    """Programs for functions and the arguments they are lowered for. XLA compiles them side by side."""
    lowered = [jax.jit(function).lower(*arguments) for function, arguments in jobs.values()]
    with ThreadPoolExecutor() as pool:
        return dict(zip(jobs, pool.map(lambda each: each.compile(), lowered), strict=True))


def note_calls(name: str, program, products: int, decodes: int) -> None:
    """Fails where a program is not made of our kernels, and says so where XLA decodes x more often than is assumed."""
    calls = Counter(re.findall(r'custom_call_target="jax_fp4_(\w+)"', program.as_text()))
    of_products = sum(count for call, count in calls.items() if call.startswith("grouped"))
    if of_products != products:
        raise RuntimeError(f"{name}: {products} products, but the compiled program calls {dict(calls)}")
    if calls["dequantize"] != decodes:
        note(f"{name} decodes x {calls['dequantize']} times in {products} products, not {decodes}")


@functools.cache  # which says everything once
def note(text: str) -> None:
    tqdm.write(f"note: {text}")


def dense(a: jax.Array, b: jax.Array) -> Contender:
    return of_program(compiled({"": (jnp.matmul, (a, b))})[""], (a, b))


@partial(jax.jit, static_argnames="shape")
def normal(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) * jnp.bfloat16(scale)


# --- peers ---


def attempt(name: str, make: Callable[[], Any]):
    """What `make` makes, None where it fails."""
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - other people's code may fail as it likes, without ending the run
        note(f"without {name}: {type(error).__name__}: {str(error).strip()[:200]}")
        return None


def module(name: str):
    """A peer's, or None: then says so."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: of its libraries
        print(f"without {name}: {error}")
        return None


def torch_with_gpu():
    torch = module("torch")
    if torch is not None and not torch.cuda.is_available():
        print("without torch: it has no GPU")
        return None
    return torch
