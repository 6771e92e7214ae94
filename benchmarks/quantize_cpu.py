"""How fast are the CPU handlers? Against the jitted reference, a copy and a plain bfloat16 step, in one run.

    python benchmarks/quantize_cpu.py [--size 4096] [--repeats 9] [--quick]

Medians of wall-clock times on random data; elements are those of x, each counted once. "x fallback" is the time of the
traceable reference (jitted jax.numpy) over ours. --quick leaves the slow fallbacks of the other variants out.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jax_fp4 as fp4

KEY = jax.random.key(0)
VARIANTS = {
    "1-D": {},
    "row-scaled": dict(row_scaled=True),
    "2-D tiles": dict(block=(16, 16)),
    "Hadamard": dict(hadamard=True),
    "stochastic": dict(key=KEY),
    "Hadamard + stochastic": dict(hadamard=True, key=KEY),
    "four-over-six": dict(four_over_six=fp4.FourOverSix()),
    "four-over-six 2-D": dict(four_over_six=fp4.FourOverSix(), block=(16, 16)),
}


def milliseconds(fn: Callable, *args, repeats: int) -> float:
    """Median time of a call of jitted fn, after some that compile it and fill the allocator with pages."""
    jitted = jax.jit(fn)
    for _ in range(5):
        jax.block_until_ready(jitted(*args))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(jitted(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def cases(x) -> dict[str, tuple[Callable, tuple]]:
    """Name -> (function of implementation and arrays, arrays). amax is computed unless the name says it is given."""
    amax = jnp.max(jnp.abs(x.astype(jnp.float32)))
    both = lambda implementation, x, **flags: fp4.quantize_transpose(x, **flags, implementation=implementation)  # noqa: E731
    row = lambda implementation, x, **flags: fp4.quantize(x, **flags, implementation=implementation)  # noqa: E731
    q = fp4.quantize(x)
    return {
        "both directions, 1-D, amax given": (lambda i, x, a: both(i, x, amax=a), (x, amax)),
        "row-wise, 1-D, amax given": (lambda i, x, a: row(i, x, amax=a), (x, amax)),
        "row-wise, 1-D": (row, (x,)),
        "dequantize to bfloat16": (lambda i, q: fp4.dequantize(q, jnp.bfloat16, implementation=i), (q,)),
    } | {f"both directions, {name}": (partial(both, **flags), (x,)) for name, flags in VARIANTS.items()}


# What is asked of a row: Gelement/s on two cores, and times the fallback.
REQUIRED = {
    "both directions, 1-D, amax given": (0.5, 8),
    "both directions, 1-D": (0.5, 8),
    "row-wise, 1-D, amax given": (1.0, None),
    "row-wise, 1-D": (1.0, None),
}


def bytes_an_element(name: str) -> float:
    """bfloat16 in, codes and block scales out; each counted once, and x once more where its amax is computed."""
    planes = 2 if name.startswith("both") else 1
    return 2 + 0.5625 * planes + (0 if "given" in name or name.startswith("dequantize") else 2)


def quantizers(size: int, repeats: int, quick: bool) -> None:
    x = jax.random.normal(KEY, (size, size), jnp.bfloat16)
    copy = milliseconds(lambda x: x + jnp.bfloat16(1), x, repeats=repeats)
    bandwidth = 4 * x.size / copy / 1e6
    print(f"\nbfloat16 [{size}, {size}]; a pass that reads and writes x: {copy:.1f} ms, {bandwidth:.1f} GB/s")
    print(f"{'':40}{'ms':>8}{'GB/s':>8}{'Gelement/s':>12}{'needs':>7}{'x fallback':>12}{'needs':>7}")
    for name, (fn, args) in tqdm(cases(x).items(), desc="quantizers", leave=False, disable=None):
        ours = milliseconds(partial(fn, None), *args, repeats=repeats)
        speed, times = REQUIRED.get(name, ("", ""))
        ratio = ""
        if times or not quick:
            ratio = f"{milliseconds(partial(fn, 'reference'), *args, repeats=3) / ours:.1f}"
        rates = f"{bytes_an_element(name) * x.size / ours / 1e6:8.1f}{x.size / ours / 1e6:12.2f}"
        tqdm.write(f"{name:40}{ours:8.1f}{rates}{speed:>7}{ratio:>12}{times or '':>7}")


def dense_steps(repeats: int) -> None:
    """One forward and backward of a dense layer, [4096,1024] x [1024,1024], float32 master weights."""
    x = jax.random.normal(KEY, (4096, 1024), jnp.bfloat16)
    dy = jax.random.normal(jax.random.fold_in(KEY, 1), (4096, 1024), jnp.bfloat16)
    w = jax.random.normal(jax.random.fold_in(KEY, 2), (1024, 1024))

    def step(recipe, x, w, dy):
        y, vjp = jax.vjp(lambda x, w: fp4.dense(x, w, recipe=recipe, key=KEY), x, w)
        return y, *vjp(dy)

    recipes = {"bfloat16": fp4.HIGH_PRECISION}
    recipes |= {mode: fp4.NVFP4BlockScaling(mode) for mode in ("default", "unquant", "dequant")}
    print("\none dense step, [4096, 1024] x [1024, 1024], bfloat16 compute")
    times = {name: milliseconds(partial(step, r), x, w, dy, repeats=repeats) for name, r in recipes.items()}
    for name, ms in times.items():
        needs = "  (needs at most 2)" if name == "default" else ""
        print(f"{name:40}{ms:8.1f} ms {ms / times['bfloat16']:8.2f} x bfloat16{needs}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096, help="x is [size, size]")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="time the fallback for the two required rows only")
    options = parser.parse_args()
    support = fp4.supported("quantize", "cpu")
    print(f"jax {jax.__version__}, NumPy {np.__version__}, {os.cpu_count()} cores, {support.reason}")
    quantizers(options.size, options.repeats, options.quick)
    dense_steps(options.repeats)


if __name__ == "__main__":
    main()
