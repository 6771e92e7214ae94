"""What does each recipe cost? Quantizing, a dense step and a grouped step, against bfloat16 in the same run.

    python benchmarks/recipes.py [--rounds 7] [--rows 8192] [--width 4096] [--experts 8] [--tiny]

A step is a product and the gradients of both operands, of bfloat16 normal values [rows, width] and kernels
[width, width]. "bfloat16" is jax.numpy.matmul for the dense step and our own grouped products of arrays for the
grouped one. Quantizing is of both directions in one call, in units of the time that a copy of x takes. "kept" is what
the forward keeps for its backward. Medians over rounds in which each is timed once, one after another, by the wall
clock. "error"
is the largest relative one of y, dx and dw, against bfloat16; all must be finite.
"""

import argparse
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from rounds import compiled, interleaved, normal, of_program

import jax_fp4 as fp4

FORMATS = ("nvfp4", "mxfp8", "float8_block", "float8")
MODES = ("default", "unquant", "dequant")


def recipes() -> dict[str, object]:
    found: dict[str, object] = {}
    for made in (fp4.NVFP4BlockScaling, fp4.MXFP8BlockScaling, fp4.Float8CurrentScaling, fp4.Float8BlockScaling):
        found |= {f"{made.__name__} {mode}": made(mode) for mode in MODES}
    rows, mx = fp4.NVFP4BlockScaling("default", row_scaled_activation=True), fp4.MXFP8BlockScaling("default")
    mixed = {"row-scaled NVFP4, MXFP8 backward": fp4.CustomRecipe(rows, mx, mx)}
    any_scales = {"Float8BlockScaling(power_of_two=False)": fp4.Float8BlockScaling("default", power_of_two=False)}
    return found | {"DelayedScaling": fp4.DelayedScaling("default")} | any_scales | mixed


def step(layer: Callable, recipe: object, shape: tuple[int, ...]) -> Callable:
    """y, dx and dw, and the next state where there is one."""
    state = fp4.delayed.init(recipe, shape) if isinstance(recipe, fp4.DelayedScaling) else None

    def run(x, w, dy, key):
        def call(x, w, state):
            return layer(x, w, recipe=recipe, key=key, state=state)

        y, pull = jax.vjp(call, x, w, state)
        return y, pull(dy)

    return run


def plain(x, w, dy, key):
    del key
    y, pull = jax.vjp(jnp.matmul, x, w)
    return y, (*pull(dy), None)


def kept(layer: Callable, recipe: object, x, w, key, shape: tuple[int, ...]) -> int:
    """Bytes that the forward keeps, parameters as they are counted too."""
    state = fp4.delayed.init(recipe, shape) if isinstance(recipe, fp4.DelayedScaling) else None
    pull = jax.eval_shape(
        lambda x, w: jax.vjp(lambda x, w: layer(x, w, recipe=recipe, key=key, state=state), x, w)[1], x, w
    )
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull))


@jax.jit
def errors(got, want) -> jax.Array:
    def error(a, b):
        a, b = (part.astype(jnp.float32) for part in (a, b))
        return jnp.sqrt(jnp.sum((a - b) ** 2) / jnp.sum(b**2))

    return jnp.stack([error(a, b) for a, b in zip(got, want, strict=True)])


def quantizing(x, rounds: int, least: float) -> None:
    jobs = {"copy": (jnp.copy, (x,))}
    jobs |= {name: (lambda x, name=name: fp4.quantize_transpose(x, name), (x,)) for name in FORMATS}
    programs = compiled(jobs)
    times = interleaved({name: of_program(program, (x,)) for name, program in programs.items()}, rounds, least)
    print(f"\nquantize_transpose of {x.shape} {x.dtype}\n{'':40}{'us':>10}{'copies':>9}")
    for name, seconds in times.items():
        print(f"{name:40}{seconds * 1e6:10.0f}{seconds / times['copy']:9.2f}")


def steps(title: str, layer: Callable, arguments: tuple, shape: tuple[int, ...], rounds: int, least: float) -> None:
    x, w, _, key = arguments
    found = recipes()
    baseline = plain if w.ndim == 2 else step(layer, fp4.HIGH_PRECISION, shape)
    jobs = {"bfloat16": (baseline, arguments)}
    jobs |= {name: (step(layer, recipe, shape), arguments) for name, recipe in found.items()}
    programs = compiled(jobs)
    want = (lambda y, g: (y, *g[:2]))(*programs["bfloat16"](*arguments))
    largest = {}
    for name, program in programs.items():
        y, gradients = program(*arguments)
        largest[name] = float(errors((y, *gradients[:2]), want).max())
        if not math.isfinite(largest[name]):
            raise RuntimeError(f"{name}: results or gradients are not finite")
    times = interleaved({name: of_program(program, arguments) for name, program in programs.items()}, rounds, least)
    print(f"\n{title}\n{'':40}{'ms':>10}{'of bfloat16':>13}{'error':>9}{'kept MiB':>10}")
    for name, seconds in times.items():
        mib = kept(layer, found.get(name, fp4.HIGH_PRECISION), x, w, key, shape) / 2**20
        print(f"{name:40}{seconds * 1e3:10.3f}{seconds / times['bfloat16']:13.3f}{largest[name]:9.1e}{mib:10.1f}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--rounds", 7), ("--rows", 8192), ("--width", 4096), ("--experts", 8)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--tiny", action="store_true", help="sizes that run anywhere: a test of this script")
    options = parser.parse_args(arguments)
    rows, width, experts = (128, 64, 4) if options.tiny else (options.rows, options.width, options.experts)
    least = 1e-4 if options.tiny else 0.05
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {options.rounds} rounds")
    x, dy = (normal(seed, (rows, width)) for seed in (1, 2))
    w, key = normal(3, (width, width), width**-0.5), jax.random.key(4)
    sizes = jnp.full(experts, rows // experts, jnp.int32)
    quantizing(x, options.rounds, least)
    steps(f"dense, M={rows}, K=N={width}, forward + backward", fp4.dense, (x, w, dy, key), (), options.rounds, least)

    def grouped(x, w, **how):
        return fp4.grouped_dense(x, w, sizes, **how)

    stacked = normal(5, (experts, width, width), width**-0.5)
    title = f"grouped_dense, {experts} experts, M={rows}, K=N={width}, forward + backward"
    steps(title, grouped, (x, stacked, dy, key), (experts,), options.rounds, least)


if __name__ == "__main__":
    main()
