"""How long do forward and backward of grouped_mlp take on a Hopper GPU? Against the same layer on bfloat16 products.

    python benchmarks/moe_layer.py [--rounds 9] [--experts 8] [--rows 16384] [--hidden 4096] [--ffn 14336] [--tiny]

swiglu, parameters and activations bfloat16 normal values, experts of even sizes, gradients of x and of both kernels.
"bfloat16" is grouped_mlp on our grouped products of arrays (recipe=HIGH_PRECISION), "ragged_dot" the layer written
with jax.lax.ragged_dot. Medians over rounds in which each is timed once, one after another, by the wall clock: a GPU
that gets hot throttles, and flatters whoever ran first. ragged_dot takes part in the first three. "error" is the
largest relative one of the results and gradients, against bfloat16; all must be finite. Memory is what XLA reserves for
results and temporaries.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rounds import SLOW_ROUNDS, attempt, compiled, interleaved, normal, of_program
from tqdm import tqdm

import jax_fp4 as fp4

MODES = {"unquant": 1.15, "dequant": 1.15, "default": 1.25}  # the time at most, in that of bfloat16
OF_RAGGED = 4  # times as fast at least
LEAST = 0.1  # seconds of one measurement: a few steps
SAME = 2e-2  # relative error between layers that round at other places

Layer = Callable[..., jax.Array]  # of x, w_in, w_out, group_sizes, key


def ours(recipe) -> Layer:
    def layer(x, w_in, w_out, sizes, key):
        return fp4.grouped_mlp(x, w_in, w_out, sizes, recipe=recipe, key=key)

    return layer


def on_ragged_dot(x, w_in, w_out, sizes, key):
    del key  # it rounds nothing at random
    gate, up = jnp.split(lax.ragged_dot(x, w_in, sizes).astype(jnp.float32), 2, axis=-1)
    return lax.ragged_dot((jax.nn.silu(gate) * up).astype(x.dtype), w_out, sizes)


def step(layer: Layer) -> Callable:
    """y, and the gradients of x, w_in and w_out for a given dy."""

    def forward_and_backward(arrays, dy, sizes, key):
        y, pull = jax.vjp(lambda *arrays: layer(*arrays, sizes, key), *arrays)
        return y, pull(dy)

    return forward_and_backward


def layers() -> dict[str, Layer]:
    found = {mode: ours(fp4.NVFP4BlockScaling(backward_mode=mode)) for mode in MODES}
    return {"bfloat16": ours(fp4.HIGH_PRECISION), **found, "ragged_dot": on_ragged_dot}


def operands(experts: int, rows: int, hidden: int, ffn: int) -> tuple:
    x, dy = (normal(seed, (rows, hidden)) for seed in (1, 2))
    w_in = normal(3, (experts, hidden, 2 * ffn), hidden**-0.5)
    w_out = normal(4, (experts, ffn, hidden), ffn**-0.5)
    return (x, w_in, w_out), dy, jnp.asarray(even_sizes(experts, rows)), jax.random.key(5)


def even_sizes(experts: int, rows: int) -> np.ndarray:
    ends = np.linspace(0, rows, experts + 1).astype(np.int32)
    return np.diff(ends)


@jax.jit
def finite(arrays) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(arrays)]).all()


@jax.jit
def errors(got, want) -> list[jax.Array]:
    """Relative Frobenius error of each array."""

    def error(a, b):
        a, b = (part.astype(jnp.float32) for part in (a, b))
        return jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2))

    return jax.tree.leaves(jax.tree.map(error, got, want))


def compiled_step(name: str, layer: Layer, arguments: tuple):
    return compiled({name: (step(layer), arguments)})[name]


def programs(arguments: tuple) -> dict:
    """Those that compile: ragged_dot is not ours, and may fail."""
    found = {}
    for name, layer in tqdm(layers().items(), desc="compiling", leave=False, disable=None):
        make = partial(compiled_step, name, layer, arguments)
        program = attempt(name, make) if layer is on_ragged_dot else make()
        if program is not None:
            found[name] = program
    return found


def check(found: dict, arguments: tuple) -> dict[str, float]:
    """The largest error of each layer's results against the bfloat16 layer's. Raises where one is not finite."""
    want = found["bfloat16"](*arguments)
    largest = {}
    for name, program in found.items():
        got = program(*arguments)
        if not finite(got):
            raise RuntimeError(f"{name}: results or gradients are not finite")
        largest[name] = max(map(float, errors(got, want)))
    if largest.get("ragged_dot", 0.0) > SAME:
        raise RuntimeError(f"the layer on ragged_dot differs from grouped_mlp by {largest['ragged_dot']:.1e}")
    return largest


def memory(program) -> str:
    """GiB of results and temporaries."""
    analysis = program.memory_analysis()
    if analysis is None:
        return "-"
    return f"{(analysis.output_size_in_bytes + analysis.temp_size_in_bytes) / 2**30:.2f}"


def verdict(mode: str, of_bfloat16: float, of_ragged: float | None) -> str:
    slowest = MODES[mode]
    asked = f"at most {slowest} of bfloat16: {'met' if of_bfloat16 <= slowest else 'NOT MET'}"
    if of_ragged is not None:
        asked += f"; {OF_RAGGED} times ragged_dot: {'met' if of_ragged >= OF_RAGGED else 'NOT MET'}"
    return asked


def measure(arguments: tuple, rounds: int, least: float) -> None:
    found = programs(arguments)
    largest = check(found, arguments)
    turns = {"ragged_dot": SLOW_ROUNDS}
    contenders = {name: of_program(found[name], arguments, rounds=turns.get(name, rounds)) for name in found}
    times = interleaved(contenders, rounds, least)
    print(f"\n{'':12}{'ms':>9}{'of bfloat16':>13}{'x ragged_dot':>14}{'error':>9}{'GiB':>8}  asked for")
    for name, seconds in times.items():
        of_bfloat16 = seconds / times["bfloat16"]
        of_ragged = times["ragged_dot"] / seconds if "ragged_dot" in times else None
        ragged = "-" if of_ragged is None else f"{of_ragged:.1f}"
        asked = verdict(name, of_bfloat16, of_ragged) if name in MODES else ""
        cells = f"{seconds * 1e3:9.2f}{of_bfloat16:13.3f}{ragged:>14}{largest[name]:9.1e}{memory(found[name]):>8}"
        print(f"{name:12}{cells}  {asked}")
    if peak := (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"):
        print(f"peak of the process, all layers and the operands: {peak / 2**30:.2f} GiB")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--tiny", action="store_true", help="sizes that run anywhere: a test of this script")
    options = parser.parse_args(arguments)
    shape = (4, 128, 64, 96) if options.tiny else (options.experts, options.rows, options.hidden, options.ffn)
    support = fp4.supported("grouped_mlp", "cuda")
    if not options.tiny and not (support and jax.default_backend() == "gpu"):
        sys.exit(f"moe_layer.py needs a GPU and the CUDA extension: {support.reason}")
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {support.reason}")
    print("{} experts, M={}, H={}, F={}, swiglu, forward + backward".format(*shape) + f", {options.rounds} rounds")
    measure(operands(*shape), options.rounds, 1e-4 if options.tiny else LEAST)


if __name__ == "__main__":
    main()
