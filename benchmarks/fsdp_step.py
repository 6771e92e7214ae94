"""What does a step of FSDP take in NVFP4, against bfloat16: time, memory, bytes gathered?

    NCCL_NVLS_ENABLE=0 python benchmarks/fsdp_step.py [--rounds 5] [--devices 2] [--tiny]

Two layers of experts (width 4096, 8 experts of 14336 hidden units, swiglu, two of them a token; 8192 tokens a device),
float32 master weights cut over the devices by rows, compute in bfloat16: forward, backward, a step of SGD. All runs are
`fp4.moe` on a mesh of Explicit axes, in bfloat16 with `HIGH_PRECISION`. Time: medians over rounds in which each is
timed once, by the wall clock. Memory: what XLA allots the program on a device, its arguments included. Gathered: what a
device receives in all-gathers, counted in the compiled program.
"""

import argparse
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rounds import Contender, interleaved, of_devices

import jax_fp4 as fp4

RECIPES = {"bfloat16": fp4.HIGH_PRECISION} | {
    mode: fp4.NVFP4BlockScaling(backward_mode=mode) for mode in ("unquant", "dequant", "default")
}
LAYERS, EXPERTS, TOP_K = 2, 8, 2
Layer = dict[str, jax.Array]


def model(sizes: tuple[int, int], key: jax.Array) -> list[Layer]:
    width, hidden = sizes

    def normal(i: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.fold_in(key, i), shape) * shape[-2] ** -0.5

    return [
        {
            "router": normal(3 * i, width, EXPERTS),
            "w_in": normal(3 * i + 1, EXPERTS, width, 2 * hidden),
            "w_out": normal(3 * i + 2, EXPERTS, hidden, width),
        }
        for i in range(LAYERS)
    ]


CUT = {"router": P(), "w_in": P(None, "fsdp"), "w_out": P(None, "fsdp")}


def step_of(recipe: Any):
    def loss(layers: list[Layer], x: jax.Array, key: jax.Array) -> jax.Array:
        auxiliary = jnp.float32(0)
        for i, layer in enumerate(layers):
            h = x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)).astype(x.dtype)
            logits = h.astype(jnp.float32) @ layer["router"]
            kernels = layer["w_in"], layer["w_out"]
            y, routing = fp4.moe(h, logits, *kernels, top_k=TOP_K, recipe=recipe, key=jax.random.fold_in(key, i))
            x, auxiliary = x + y, auxiliary + routing.aux_loss
        return jnp.mean(jnp.square(x.astype(jnp.float32))) + 0.01 * auxiliary

    def step(layers, x, key):
        value, gradients = jax.value_and_grad(loss)(layers, x, key)
        return jax.tree.map(lambda w, dw: w - 1e-3 * dw, layers, gradients), value

    return jax.jit(step, donate_argnums=0)


def gathered(hlo: str) -> float:
    """Bytes that a device receives in all-gathers, of any size that counts."""
    total = 0.0
    for result, start in re.findall(r"= (\(?.*?) all-gather(-start)?\(", hlo):
        arrays = re.findall(r"\b[a-z]+(\d+)\w*\[([\d,]+)\]", result)
        for bits, shape in arrays[len(arrays) // 2 :] if start else arrays:
            total += int(bits) / 8 * prod(map(int, shape.split(",")))
    return total


def timed(program: Any, layers: list[Layer], *rest: Any) -> Contender:
    """Steps one after another, each on the parameters that the one before made; the first ones are consumed."""
    held = [jax.tree.map(jnp.copy, layers)]

    def clock(runs: int) -> float:
        jax.block_until_ready(held)
        start = time.perf_counter()
        for _ in range(runs):
            held[0], _ = program(held[0], *rest)
        jax.block_until_ready(held)
        return time.perf_counter() - start

    return Contender(clock)


def main(arguments: Sequence[str] | None = None) -> None:
    options, devices = of_devices(__doc__, arguments, rounds=5)
    mesh = jax.make_mesh((len(devices),), ("fsdp",), devices=devices)
    width, hidden, tokens = (64, 128, 64) if options.tiny else (4096, 14336, 8192)
    with jax.set_mesh(mesh):
        report(mesh, (width, hidden), tokens * len(devices), options)


def report(mesh: Mesh, sizes: tuple[int, int], tokens: int, options: argparse.Namespace) -> None:
    shardings = [{name: jax.NamedSharding(mesh, spec) for name, spec in CUT.items()}] * LAYERS
    draw = jax.jit(lambda key: model(sizes, key), out_shardings=shardings)
    layers = draw(jax.random.key(0))
    x = jax.device_put(jax.random.normal(jax.random.key(1), (tokens, sizes[0]), jnp.bfloat16), P("fsdp"))
    key = jax.random.key(2)
    lowered = [step_of(recipe).lower(layers, x, key) for recipe in RECIPES.values()]
    with ThreadPoolExecutor() as pool:
        programs = dict(zip(RECIPES, pool.map(lambda each: each.compile(), lowered), strict=True))
    losses = {name: float(program(jax.tree.map(jnp.copy, layers), x, key)[1]) for name, program in programs.items()}
    contenders = {name: timed(program, layers, x, key) for name, program in programs.items()}
    times = interleaved(contenders, options.rounds, 1e-3 if options.tiny else 0.5)
    print(f"{'':12}{'ms':>10}{'of bfloat16':>13}{'memory, GB':>12}{'of bfloat16':>13}{'gathered, GB':>14}{'loss':>10}")
    memory = {name: _memory(program) for name, program in programs.items()}
    for name, seconds in times.items():
        ratios = seconds / times["bfloat16"], memory[name] / memory["bfloat16"]
        received = gathered(programs[name].as_text()) * (mesh.size - 1) / mesh.size
        print(
            f"{name:12}{seconds * 1e3:10.2f}{ratios[0]:13.3f}{memory[name] / 1e9:12.3f}{ratios[1]:13.3f}"
            f"{received / 1e9:14.6f}{losses[name]:10.5f}"
        )


def _memory(program: Any) -> int:
    of = program.memory_analysis()
    return of.argument_size_in_bytes + of.output_size_in_bytes - of.alias_size_in_bytes + of.temp_size_in_bytes


if __name__ == "__main__":
    main()
