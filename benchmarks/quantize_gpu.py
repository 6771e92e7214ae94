"""How fast are the CUDA handlers, called through JAX? Against the jitted reference and a copy, on one GPU in one run.

    python benchmarks/quantize_gpu.py [--size 8192] [--repeats 15] [--quick]

Medians of wall-clock times on random data. A program goes through several inputs, together larger than the L2 cache,
and is enqueued several times before it is waited for: gaps between launches do not count. Amaxes, keys and group sizes
are arguments like x, so nothing is folded. "of copy" is the time of a device copy that moves as many bytes (half read,
half written) over ours, "x reference" the time of the jitted jax.numpy reference over ours.
benchmarks/quantize_cuda.cc times the same kernels without JAX.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import jax_fp4 as fp4

NEEDS = 4  # times the reference, asked of every row
INPUTS, ENQUEUED = 8, 10  # of ours and of the copy
SLOW_INPUTS, SLOW_ENQUEUED = 2, 2  # of the reference, whose programs take milliseconds
GROUPS = 64


def missing() -> str:
    """Why there is nothing to measure, or ""."""
    support = fp4.supported("quantize", "cuda")
    if not support:
        return support.reason
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        return f"JAX has no CUDA device: {error}"
    return ""


def microseconds(fn: Callable, inputs: list[tuple], enqueued: int, repeats: int) -> float:
    """Median time that one input takes."""
    program = jax.jit(lambda inputs: [fn(*arguments) for arguments in inputs])
    for _ in range(3):  # to compile, and for XLA to record a CUDA graph where it does
        jax.block_until_ready(program(inputs))
    times = []
    for _ in range(repeats):
        result, start = None, time.perf_counter()
        for _ in range(enqueued):
            result = program(inputs)
        jax.block_until_ready(result)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / (enqueued * len(inputs)) * 1e6


def copy_microseconds(size: int, repeats: int) -> float:
    """Time of a device copy that reads and writes `size` bytes in total."""
    sources = [(jnp.full(size // 2, i, jnp.uint8),) for i in range(INPUTS)]
    return microseconds(jnp.copy, sources, ENQUEUED, repeats)


def uneven_sizes(m: int) -> np.ndarray:
    """GROUPS sizes that add up to m, exponentially distributed."""
    ends = np.sort(np.random.default_rng(7).integers(0, m + 1, GROUPS - 1))
    return np.diff(ends, prepend=0, append=m).astype(np.int32)


def cases(size: int) -> dict[str, tuple[Callable, Callable, float]]:
    """Name -> (function of implementation and arrays, arrays of input number i, bytes moved an element of x).

    Bytes: x, once more where its amax is computed, 0.5625 for each form. The amax is computed unless the name says it
    is given.
    """
    x_bytes, form_bytes = 2, 0.5625
    sizes = jnp.asarray(uneven_sizes(size))

    def x(i, dtype=jnp.bfloat16):
        return jax.random.normal(jax.random.key(i), (size, size), dtype)

    def both(implementation, x, key=None, **flags):
        return fp4.quantize_transpose(x, key=key, **flags, implementation=implementation)

    def one(implementation, x, **flags):
        return fp4.quantize(x, **flags, implementation=implementation)

    def given(function):
        return lambda implementation, x, amax: function(implementation, x, amax=amax)

    plain = lambda i: (x(i),)  # noqa: E731
    with_amax = lambda i: (x(i), jnp.max(jnp.abs(x(i))).astype(jnp.float32))  # noqa: E731
    with_key = lambda i: (x(i), jax.random.key(100 + i))  # noqa: E731
    one_form, two_forms = x_bytes + form_bytes, x_bytes + 2 * form_bytes
    computed = 2 * x_bytes + 2 * form_bytes
    tiles = dict(block=(16, 16))
    return {
        "row-wise, amax given": (given(one), with_amax, one_form),
        "row-wise": (one, plain, one_form + x_bytes),
        "column-wise, amax given": (given(partial(one, axis=0)), with_amax, one_form),
        "both directions, amax given": (given(both), with_amax, two_forms),
        "both directions": (both, plain, computed),
        "both, 2-D tiles": (partial(both, **tiles), plain, computed),
        "both, row-scaled": (partial(both, row_scaled=True), plain, computed),
        "both, Hadamard": (partial(both, hadamard=True), plain, computed),
        "both, stochastic": (both, with_key, computed),
        "both, Hadamard + stochastic": (partial(both, hadamard=True), with_key, computed),
        "both, four-over-six": (partial(both, four_over_six=fp4.FourOverSix()), plain, computed),
        "both, four-over-six, 2-D tiles": (partial(both, four_over_six=fp4.FourOverSix(), **tiles), plain, computed),
        f"both, {GROUPS} uneven groups": (lambda i, x, s: both(i, x, group_sizes=s), lambda i: (x(i), sizes), computed),
        # A master weight under bfloat16 compute.
        "both, float32 x, 2-D tiles": (
            partial(both, dtype=jnp.bfloat16, **tiles),
            lambda i: (x(i, jnp.float32),),
            computed + 2 * x_bytes,
        ),
        "dequantize to bfloat16": (
            lambda i, q: fp4.dequantize(q, jnp.bfloat16, implementation=i),
            lambda i: (fp4.quantize(x(i)),),
            form_bytes + 2,
        ),
    }


def measure(size: int, repeats: int) -> None:
    copied = functools.cache(partial(copy_microseconds, repeats=repeats))  # a copy for each number of bytes
    print(f"\n[{size}, {size}], bfloat16 unless said otherwise")
    print(f"{'':34}{'us':>9}{'GB/s':>8}{'of copy':>9}{'x reference':>13}{'needs':>7}")
    for name, (fn, arrays, width) in tqdm(cases(size).items(), desc="quantizers", leave=False, disable=None):
        inputs = [arrays(i) for i in range(INPUTS)]
        moved = int(width * size * size)
        ours = microseconds(partial(fn, "cuda"), inputs, ENQUEUED, repeats)
        reference = microseconds(partial(fn, "reference"), inputs[:SLOW_INPUTS], SLOW_ENQUEUED, min(repeats, 5))
        rates = f"{moved / ours / 1e3:8.0f}{copied(moved) / ours:9.3f}{reference / ours:13.1f}"
        tqdm.write(f"{name:34}{ours:9.1f}{rates}{NEEDS:>7}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192, help="x is [size, size]; from 4096, to exceed the L2 cache")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="5 repeats of [4096, 4096]")
    options = parser.parse_args()
    if reason := missing():
        sys.exit(f"quantize_gpu.py needs a GPU and the CUDA extension: {reason}")
    device = jax.devices("cuda")[0]
    print(f"jax {jax.__version__}, {device.device_kind}, {fp4.supported('quantize', 'cuda').reason}")
    with jax.default_device(device):
        measure(*(4096, 5) if options.quick else (options.size, options.repeats))


if __name__ == "__main__":
    main()
