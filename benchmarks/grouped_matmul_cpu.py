"""How fast is grouped_matmul on CPU? Against one dense dot of the same size and against jax.lax.ragged_dot, in one run.

    python benchmarks/grouped_matmul_cpu.py [--rows 4096] [--width 1024] [--repeats 9] [--quick]

bfloat16 [rows, width] x [groups, width, width], sizes even or after Zipf. The dense dot has the same total size and
orientation, and is measured again beside every row: calls alternate, so that noise meets both. "of dense" is its time
over ours, of medians (of minima in brackets), "x ragged_dot" the time of jax.lax.ragged_dot over ours; on CPU that
multiplies all rows by all matrices. Quantized operands are quantized beforehand. The input gradient of arrays is
jax.vjp's, which reads w as it lies; an explicit grouped_matmul(dy, w.mT) has XLA write w.mT first. Last comes the time
to make a result of zeros: less than that no weight gradient takes. --quick leaves ragged_dot to g = 16.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from tqdm import tqdm

import jax_fp4 as fp4

GROUPS = (4, 16, 64)
OF_DENSE, OF_RAGGED = 0.4, 3  # what is asked for: of every row, and at g = 16


def alternating(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call, taken in turns, after one that compiles it."""
    for call in calls.values():
        jax.block_until_ready(call())
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append((time.perf_counter() - start) * 1e3)
    return times


def zipf(groups: int, rows: int) -> np.ndarray:
    """Sizes proportional to 1, 1/2, 1/3, ...; the largest takes the rest."""
    sizes = np.floor(rows / np.arange(1, groups + 1) / (1 / np.arange(1, groups + 1)).sum()).astype(np.int32)
    sizes[0] += rows - sizes.sum()
    return sizes


def dense(lhs_axis: int, rhs_axis: int):
    """A dot of bfloat16 that sums in float32, contracted along one axis of each."""

    def dot(a, b):
        dims = (((lhs_axis,), (rhs_axis,)), ((), ()))
        return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    return jax.jit(dot)


DENSE = {"forward": dense(1, 0), "input gradient": dense(1, 1), "weight gradient": dense(0, 0)}
OURS = jax.jit(lambda a, b, s: fp4.grouped_matmul(a, b, s, preferred_element_type=jnp.bfloat16))
TRANSPOSED = jax.jit(lambda a, b, s: fp4.grouped_matmul(a, b.mT, s, preferred_element_type=jnp.bfloat16))
GRADIENT = jax.jit(lambda dy, w, s: jax.vjp(lambda x: fp4.grouped_matmul(x, w, s), dy)[1](dy)[0])  # square: dy for x
CONTRACTED = jax.jit(lambda a, b, s: fp4.grouped_matmul(a.mT, b, s, preferred_element_type=jnp.bfloat16))
RAGGED = jax.jit(lax.ragged_dot)
RAGGED_TRANSPOSED = jax.jit(lambda a, b, s: lax.ragged_dot(a, b.mT, s))
ROWS_CONTRACTED = lax.RaggedDotDimensionNumbers(
    (((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
RAGGED_CONTRACTED = jax.jit(lambda a, b, s: lax.ragged_dot_general(a, b, s, ROWS_CONTRACTED))


def rows_of(groups: int, sizes, x, w, dy, quick: bool) -> dict[tuple[str, str], dict[str, Callable]]:
    """(product, operands) -> what is timed for it."""
    qx, qx_t = fp4.quantize_transpose(x, group_sizes=sizes)
    qdy, qdy_t = fp4.quantize_transpose(dy, group_sizes=sizes)
    qw, qw_t = fp4.quantize_transpose(w, block=(16, 16), batch_dims=1)
    products = {
        "forward": (OURS, RAGGED, (x, w), (qx, qw_t), (x, w[0])),
        "input gradient": (GRADIENT, RAGGED_TRANSPOSED, (dy, w), (qdy, qw), (dy, w[0])),
        "weight gradient": (CONTRACTED, RAGGED_CONTRACTED, (x, dy), (qx_t, qdy_t), (x, dy)),
    }
    found: dict[tuple[str, str], dict[str, Callable]] = {}
    for name, (ours, ragged, arrays, quantized, one) in products.items():
        dot = DENSE[name]
        found[name, "bfloat16"] = {
            "dense": lambda dot=dot, one=one: dot(*one),
            "ours": lambda ours=ours, arrays=arrays: ours(*arrays, sizes),
        }
        if groups == 16 or not quick:
            found[name, "bfloat16"]["ragged_dot"] = lambda ragged=ragged, arrays=arrays: ragged(*arrays, sizes)
        ours = TRANSPOSED if ours is GRADIENT else ours
        found[name, "NVFP4"] = {
            "dense": lambda dot=dot, one=one: dot(*one),
            "ours": lambda ours=ours, quantized=quantized: ours(*quantized, sizes),
        }
    return found


def measure(rows: int, width: int, repeats: int, quick: bool) -> None:
    flops = 2 * rows * width * width
    print(f"\n[{rows}, {width}] x [g, {width}, {width}], {flops / 1e9:.1f} GFLOP a product")
    print(f"{'':52}{'ms':>8}{'GFLOP/s':>9}{'of dense':>16}{'needs':>7}{'x ragged_dot':>14}{'needs':>7}")
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = (jax.random.normal(key, (rows, width), jnp.bfloat16) for key in keys[:2])
    cases = [(groups, name) for groups in GROUPS for name in ("even", "Zipf")]
    for groups, name in tqdm(cases, desc="grouped_matmul", leave=False, disable=None):
        w = jax.random.normal(keys[2], (groups, width, width), jnp.bfloat16)
        sizes = jnp.asarray(zipf(groups, rows) if name == "Zipf" else np.full(groups, rows // groups, np.int32))
        for (product, operands), calls in rows_of(groups, sizes, x, w, dy, quick).items():
            slow = {"ragged_dot": calls.pop("ragged_dot")} if "ragged_dot" in calls else {}
            times = alternating(calls, repeats)
            ours, best = statistics.median(times["ours"]), min(times["ours"])
            ratio = f"{statistics.median(times['dense']) / ours:.2f} ({min(times['dense']) / best:.2f})"
            ragged = needs = ""
            if slow:
                both = alternating({"ours": calls["ours"], **slow}, 1 if groups > 16 else 3)
                ragged = f"{statistics.median(both['ragged_dot']) / statistics.median(both['ours']):.1f}"
                needs = OF_RAGGED if groups == 16 else ""
            label = f"{product}, {operands}, g = {groups}, {name}"
            tqdm.write(f"{label:52}{ours:8.1f}{flops / ours / 1e6:9.0f}{ratio:>16}{OF_DENSE:>7}{ragged:>14}{needs:>7}")


def zeros(width: int, repeats: int) -> None:
    """What the result of a weight gradient costs by itself: fresh memory, touched once."""
    print()
    for groups in GROUPS:
        make = jax.jit(lambda groups=groups: jnp.zeros((groups, width, width), jnp.bfloat16))
        times = alternating({"zeros": make}, repeats)["zeros"]
        size = 2 * groups * width * width / 1e6
        print(f"{f'zeros of {size:.0f} MB, the result of {groups} weight gradients':52}{statistics.median(times):8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="time ragged_dot at g = 16 only")
    options = parser.parse_args()
    support = fp4.supported("grouped_matmul", "cpu")
    print(f"jax {jax.__version__}, NumPy {np.__version__}, {os.cpu_count()} cores, {support.reason}")
    measure(options.rows, options.width, options.repeats, options.quick)
    zeros(options.width, options.repeats)


if __name__ == "__main__":
    main()
