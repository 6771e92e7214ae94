"""NVFP4 in a model that is written with Flax, three ways.

    python examples/replace_flax_layers.py

1. Plain Flax, to compare with.
2. Another import: the layers of `jax_fp4.linen` or `jax_fp4.nnx` have Flax's signatures and Flax's parameters.
3. Flax's own layers, with `dot_general_cls=` (Linen) or `dot_general=` (NNX).

Ways 2 and 3 are quantized where a recipe is in force, here by `jax_fp4.autocast`; without one they are plain Flax, bit
for bit. A layer may also have a recipe of its own, `linen.Dense(128, recipe=recipe)`.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jax_fp4 as fp4
from jax_fp4 import linen as fp4_linen
from jax_fp4 import nnx as fp4_nnx

STEPS, RATE = 30, 0.3
RECIPE = fp4.NVFP4BlockScaling()  # mode "default": the backward is NVFP4 too, and rounds its gradients stochastically


class LinenModel(nn.Module):
    """Two layers. `layers` is `flax.linen` or what takes its place; a model of your own only changes an import."""

    layers: Any = nn
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.gelu(self.layers.Dense(128, dot_general_cls=self.dot_general_cls)(x))
        return self.layers.Dense(16, dot_general_cls=self.dot_general_cls)(x)


class NnxModel(nnx.Module):
    """The same model in NNX. `layers` is `flax.nnx` or `jax_fp4.nnx`."""

    def __init__(self, layers: Any, rngs: nnx.Rngs, **fields):
        self.up = layers.Linear(64, 128, rngs=rngs, **fields)
        self.down = layers.Linear(128, 16, rngs=rngs, **fields)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Run(NamedTuple):
    initial: Any  # parameters
    losses: list[float]
    quantized: int  # layer calls in the forward


def data():
    """x [256, 64], and y [256, 16] that a model of this size can learn."""
    keys = jax.random.split(jax.random.key(42), 3)
    x, a, b = (jax.random.normal(key, shape) for key, shape in zip(keys, [(256, 64), (64, 32), (32, 16)], strict=True))
    return x, jnp.tanh(x @ a / 8) @ b / 4


def descend(parameter, gradient):
    return parameter - RATE * gradient


def train_linen(model: Any, recipe) -> Run:  # Flax types what `apply` returns as an array or a tuple
    x, y = data()
    initial = variables = model.init(jax.random.key(0), x)

    def loss(variables, key):
        # Stochastic rounding draws from the stream "sr", as dropout does from "dropout".
        return jnp.mean((model.apply(variables, x, rngs={"sr": key}) - y) ** 2)

    @jax.jit
    def step(variables, key):
        value, grads = jax.value_and_grad(loss)(variables, key)
        return jax.tree.map(descend, variables, grads), value

    losses = []
    with fp4.autocast(recipe):
        report = fp4.report(model.apply, variables, x)
        for key in jax.random.split(jax.random.key(1), STEPS):
            variables, value = step(variables, key)
            losses.append(float(value))
    return Run(initial, losses, sum(row.quantized for row in report.rows))


def train_nnx(model: NnxModel, recipe) -> Run:
    x, y = data()
    initial = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param).to_pure_dict())

    @nnx.jit
    def step(model):
        value, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(model)
        nnx.update(model, jax.tree.map(descend, nnx.state(model, nnx.Param), grads))
        return value

    with fp4.autocast(recipe):
        report = fp4.report(model, x)
        losses = [float(step(model)) for _ in range(STEPS)]
    return Run(initial, losses, sum(row.quantized for row in report.rows))


def same_parameters(a: Any, b: Any) -> bool:
    """The same tree, names and initial values."""
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        bool(jnp.array_equal(p, q)) for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def main() -> dict[str, Run]:
    streams = dict(params=0, sr=1)  # NNX layers keep a stream `sr` of their own, if there is one
    # A plain function has no stream to draw from, and one key for all steps would round alike: a mode without a key.
    dot_general = fp4.DotGeneral(fp4.NVFP4BlockScaling(backward_mode="dequant"))
    runs = {
        "Linen: flax.linen.Dense": train_linen(LinenModel(), None),
        "Linen: jax_fp4.linen.Dense, no recipe": train_linen(LinenModel(fp4_linen), None),
        "Linen: jax_fp4.linen.Dense": train_linen(LinenModel(fp4_linen), RECIPE),
        "Linen: dot_general_cls=": train_linen(LinenModel(dot_general_cls=fp4_linen.DotGeneral), RECIPE),
        "NNX: flax.nnx.Linear": train_nnx(NnxModel(nnx, nnx.Rngs(**streams)), None),
        "NNX: jax_fp4.nnx.Linear, no recipe": train_nnx(NnxModel(fp4_nnx, nnx.Rngs(**streams)), None),
        "NNX: jax_fp4.nnx.Linear": train_nnx(NnxModel(fp4_nnx, nnx.Rngs(**streams)), RECIPE),
        "NNX: dot_general=": train_nnx(NnxModel(nnx, nnx.Rngs(**streams), dot_general=dot_general), RECIPE),
    }
    print(f"{'':38}  quantized  same parameters  first loss  after {STEPS} steps")
    for name, run in runs.items():
        flax = next(other for other_name, other in runs.items() if other_name.split(":")[0] == name.split(":")[0])
        same = "yes" if same_parameters(run.initial, flax.initial) else "no"
        print(f"{name:38}  {run.quantized:9}  {same:>15}  {run.losses[0]:10.4f}  {run.losses[-1]:14.4f}")
    return runs


if __name__ == "__main__":
    main()
