"""A byte-level mixture-of-experts language model, trained in bfloat16 or under a recipe and backward mode of choice.

    python examples/train_lm.py                                          NVFP4, backward mode "default"
    python examples/train_lm.py --recipe mxfp8 --backward-mode dequant
    python examples/train_lm.py --recipe float8-delayed                  with a state that every step updates
    python examples/train_lm.py --experts 1                              dense: as many active parameters a token
    python examples/train_lm.py --rules rules.txt                        a recipe for each layer, by its path
    python examples/train_lm.py --compare                                bfloat16, NVFP4 in three modes, and a mix
    python examples/train_lm.py --diagnostics                            how well each quantized product does

The text is Python's own help (`pydoc_data.topics`), so nothing is downloaded. What makes this an NVFP4 training is the
class of the layers and their `recipe`; parameters, optimizer and train step are those of any Flax model. A file of
rules has one a line, the first match wins, and what none matches follows --recipe:

    block0/.* = HIGH_PRECISION
    .*/moe = NVFP4BlockScaling(backward_mode="dequant")
"""

import argparse
import functools
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Var
from matplotlib.figure import Figure
from tqdm import tqdm

import byte_models
import jax_fp4 as fp4
from jax_fp4 import diagnostics
from jax_fp4 import linen as fp4_linen

MODES = ("default", "unquant", "dequant")
RECIPES = {
    "nvfp4": fp4.NVFP4BlockScaling,
    "mxfp8": fp4.MXFP8BlockScaling,
    "float8-current": fp4.Float8CurrentScaling,
    "float8-block": fp4.Float8BlockScaling,
    "float8-delayed": fp4.DelayedScaling,
}
BALANCE = 0.01  # weight of the load-balancing loss, as in Switch Transformer


# ---- the model ----


def rotary(x: jax.Array) -> jax.Array:
    """Rotary position embedding of x [b, t, h, d]: halves of d turn by an angle that grows with position."""
    t, half = x.shape[1], x.shape[-1] // 2
    angle = np.arange(t)[:, None] * 1e4 ** (-np.arange(half) / half)
    cos, sin = (jnp.asarray(f(angle)[:, None, :], x.dtype) for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


# Attention, norms and activation are recomputed in the backward, as their fused kernels do: what a layer keeps is then
# mostly what its dense products keep.
RMSNorm = nn.remat(nn.RMSNorm)
gelu = jax.checkpoint(nn.gelu)


@jax.checkpoint
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(rotary(q), rotary(k), v, is_causal=True)


class Block(nn.Module):
    """A pre-norm decoder layer, x -> (x, load-balancing loss). All its products but the router's follow the recipe.

    With one expert the MLP is dense; with more, each token goes through top_k of them, which together are as wide.
    """

    heads: int
    experts: int
    top_k: int
    recipe: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        *batch, width = x.shape
        dense = functools.partial(fp4_linen.Dense, use_bias=False, dtype=x.dtype, recipe=self.recipe)
        last = functools.partial(dense, width, kernel_init=nn.initializers.zeros)  # a layer starts as the identity
        norm = functools.partial(RMSNorm, dtype=x.dtype)

        qkv = dense(3 * width, name="qkv")(norm(name="norm1")(x))
        q, k, v = jnp.split(qkv.reshape(*batch, 3 * self.heads, width // self.heads), 3, axis=-2)
        x = x + last(name="out")(attention(q, k, v).reshape(x.shape))
        h = norm(name="norm2")(x)
        if self.experts == 1:
            return x + last(name="down")(gelu(dense(4 * width, name="up")(h))), jnp.zeros(())
        mlp = fp4_linen.MoE(
            self.experts,
            4 * width // self.top_k,
            self.top_k,
            activation="gelu",
            out_kernel_init=nn.initializers.zeros,
            dtype=x.dtype,
            recipe=self.recipe,
            name="moe",
        )
        y, routing = mlp(h)
        return x + y, routing.aux_loss


class LanguageModel(nn.Module):
    """bytes [b, t] -> (float32 logits [b, t, 256], mean load-balancing loss of the layers). Embedding, head and routers
    stay in high precision, as FP4 training does."""

    layers: int
    width: int
    heads: int
    experts: int
    top_k: int
    recipe: Any = None

    @nn.compact
    def __call__(self, text: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.Embed(256, self.width, dtype=jnp.bfloat16, name="embed")(text)
        balance = jnp.zeros(())
        for i in range(self.layers):
            x, aux_loss = Block(self.heads, self.experts, self.top_k, self.recipe, name=f"block{i}")(x)
            balance += aux_loss / self.layers
        x = RMSNorm(dtype=jnp.bfloat16, name="norm")(x)
        head = fp4_linen.Dense(256, use_bias=False, dtype=jnp.bfloat16, recipe=fp4.HIGH_PRECISION, name="head")
        return head(x).astype(jnp.float32), balance


def apply(model: LanguageModel, params: Any, text: jax.Array, **how: Any) -> tuple[jax.Array, jax.Array]:
    outputs: Any = model.apply(params, text, **how)
    return outputs


def cross_entropy(logits: jax.Array, text: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, text.astype(jnp.int32)).mean()


def loss_of(model: LanguageModel, params: Any, text: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(what is minimised, mean loss in nats a byte) of text [b, t + 1]; `key` is for the stochastic rounding of
    gradients."""
    logits, balance = apply(model, params, text[:, :-1], rngs={"sr": key})
    loss = cross_entropy(logits, text[:, 1:])
    return loss + BALANCE * balance, loss


# ---- training ----


class State(NamedTuple):
    params: Any  # float32 master weights
    scaling: Any  # the states of delayed scaling; without it, nothing
    optimizer: Any
    step: jax.Array


def first_state(variables: Any, optimizer: optax.GradientTransformation) -> State:
    scaling = {name: variables[name] for name in variables if name == fp4_linen.STATES}
    params = {"params": variables["params"]}
    return State(params, scaling, optimizer.init(params), jnp.zeros((), jnp.int32))


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    warmup = min(args.steps // 10, 100)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, args.learning_rate, warmup, args.steps, 0.05 * args.learning_rate
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1))


def make_step(model: LanguageModel, optimizer: optax.GradientTransformation, seed: int):
    """One compiled step: (state, text [b, t + 1]) -> (state, loss). The old state is donated."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, text: jax.Array) -> tuple[State, jax.Array]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        both = jax.grad(lambda params, scaling: loss_of(model, params | scaling, text, key), (0, 1), has_aux=True)
        (gradients, scaling), loss = both(state.params, state.scaling)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params, scaling = optax.apply_updates(state.params, updates), fp4.delayed.update(state.scaling, scaling)
        return State(params, scaling, optimizer_state, state.step + 1), loss

    return step


def batches(text: np.ndarray, args: argparse.Namespace):
    """Random crops [batch, context + 1], the same for the same seed."""
    rng = np.random.default_rng(args.seed)
    for _ in range(args.steps):
        starts = rng.integers(0, len(text) - args.context, args.batch)
        yield text[starts[:, None] + np.arange(args.context + 1)]


def held_out_loss(model: LanguageModel, variables: Any, text: np.ndarray, args: argparse.Namespace) -> float:
    """Nats a byte over windows that overlap by half. The second half of each counts: every byte has a long context.

    The last few windows, which do not fill a batch, are left out.
    """
    half = args.context // 2
    starts = np.arange(0, len(text) - args.context, half)

    @jax.jit
    def loss(variables, windows):
        logits, _ = apply(model, variables, windows[:, :-1])
        return cross_entropy(logits[:, half:], windows[:, half + 1 :])

    count = max(1, len(starts) // args.batch)
    crops = starts[: count * args.batch].reshape(count, -1, 1) + np.arange(args.context + 1)
    return float(np.mean([loss(variables, text[crop]) for crop in crops]))


def residual_bytes(model: LanguageModel, variables: Any, text: np.ndarray) -> int:
    """Bytes that the forward of one loss keeps for its backward: the leaves of `jax.vjp`'s result.

    Leaves that are the parameters themselves take no memory of their own and are not counted; copies of them (a weight
    cast to bfloat16, a quantized weight) are.
    """

    def residuals(variables):
        key = jax.random.key(0)
        return jax.tree.leaves(jax.vjp(lambda v: loss_of(model, v, jnp.asarray(text), key)[0], variables)[1])

    jaxpr = jax.make_jaxpr(residuals)(variables).jaxpr
    kept = {v for v in jaxpr.outvars if isinstance(v, Var)} - set(jaxpr.invars)  # a constant is not kept
    avals: list[Any] = [v.aval for v in kept]
    return sum(aval.size * aval.dtype.itemsize for aval in avals)


class Watch:
    """Ten times in a training: how each quantized product does, beside itself in high precision. A program of its own,
    the gradient once more; the step stays as it is."""

    def __init__(self, name: str, model: LanguageModel, args: argparse.Namespace):
        self.name, self.every, self.history = name, max(1, (args.steps - 1) // 9), []
        key = jax.random.key(args.seed)

        def gradient(state: State, text: jax.Array):
            return jax.grad(lambda params: loss_of(model, params | state.scaling, text, key)[0])(state.params)

        collected = diagnostics.collect(gradient)
        self.look = jax.jit(lambda state, text: collected(state, text)[1])  # XLA drops what is not returned

    def __call__(self, step: int, state: State, text: np.ndarray) -> float:
        """The seconds that it took."""
        begin = time.perf_counter()
        if step % self.every == 0:
            self.history.append((step, jax.block_until_ready(self.look(state, text))))
        return time.perf_counter() - begin

    def save(self, folder: Path, alone: bool) -> None:
        if not self.history[-1][1]:
            print(f"\n{self.name}: no layer is quantized, no diagnostics")
            return
        step, last = self.history[-1]
        print(f"\n{self.name}, step {step}: SNR in dB, cosines, saturated and flushed\n{diagnostics.table(last)}")
        path = folder / ("diagnostics" if alone else f"diagnostics {self.name}".replace(" ", "-"))
        path.with_suffix(".csv").unlink(missing_ok=True)
        writer = diagnostics.CSVWriter(path.with_suffix(".csv"))
        for step, layers in self.history:
            diagnostics.write(layers, step, writer)
        diagnostics.plot(self.history, path.with_suffix(".png"), self.name)
        print(f"diagnostics: {path}.png, {path}.csv")


class Result(NamedTuple):
    name: str
    losses: np.ndarray  # of each step
    held_out: float
    residual_bytes: int
    ms_per_step: float
    seconds: float  # compilation and evaluation included


def train(name: str, recipe: Any, text: byte_models.Text, args: argparse.Namespace) -> Result:
    begin = time.perf_counter()
    model = LanguageModel(args.layers, args.width, args.heads, args.experts, args.top_k, recipe)
    optimizer = make_optimizer(args)
    variables = jax.jit(model.init)(jax.random.key(args.seed), jnp.zeros((1, args.context), jnp.uint8))
    state = first_state(variables, optimizer)
    kept = residual_bytes(model, variables, next(batches(text.train, args)))

    step = make_step(model, optimizer, args.seed)
    watch = Watch(name, model, args) if args.diagnostics else None
    losses, start = [], 0.0
    every = 0.5 if sys.stderr.isatty() else 15.0  # seconds between two lines: a log file wants few
    with tqdm(batches(text.train, args), name, args.steps, mininterval=every, dynamic_ncols=True) as bar:
        for i, batch in enumerate(bar):
            if watch:
                start += watch(i, state, batch)  # not part of a step
            state, loss = step(state, batch)
            losses.append(loss)
            if i % 10 == 0:
                shown = float(loss)  # waits for the step
                start = start if i else time.perf_counter()  # the first step compiles
                rate = i * args.batch * args.context / (time.perf_counter() - start)
                bar.set_postfix_str(f"loss {shown:.3f}, {rate / 1e3:.1f}k tokens/s", refresh=False)
    losses = np.asarray(jnp.stack(losses))
    ms = 1e3 * (time.perf_counter() - start) / max(1, args.steps - 1)
    if watch:
        watch.save(args.out, alone=not args.compare)
    held_out = held_out_loss(model, state.params | state.scaling, text.held_out, args)
    return Result(name, losses, held_out, kept, ms, time.perf_counter() - begin)


# ---- reporting ----


def table(results: list[Result], orders: list[float]) -> str:
    """The results, one run a line; the first is what the others are compared with."""
    lines = [f"{'':16}{'held-out loss':>22}{'':10}{'kept for':>10}{'':10}"]
    lines += [
        f"{'run':16}{'nats/byte':>11}{'bits/byte':>11}{'change':>10}{'backward':>10}{'ms/step':>10}{'total s':>9}"
    ]
    for r in results:
        change = "" if r is results[0] else f"{100 * (r.held_out / results[0].held_out - 1):+.2f} %"
        lines.append(
            f"{r.name:16}{r.held_out:11.4f}{r.held_out / np.log(2):11.4f}{change:>10}"
            f"{r.residual_bytes / 1e6:7.1f} MB{r.ms_per_step:10.1f}{r.seconds:9.1f}"
        )
    for order, loss in enumerate(orders):
        lines.append(f"{f'order-{order} bytes':16}{loss:11.4f}{loss / np.log(2):11.4f}")
    return "\n".join(lines)


def smooth(losses: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(steps, moving average over `width` steps)."""
    width = max(1, min(width, len(losses)))
    return np.arange(width, len(losses) + 1), np.convolve(losses, np.full(width, 1 / width), "valid")


def plot(results: list[Result], orders: list[float], path: Path) -> None:
    """Training loss of each run, over the losses of the byte models."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for order, loss in enumerate(orders):
        axes.axhline(loss, color="0.6", linewidth=0.9, linestyle=(0, (4, 3)))
        axes.annotate(
            f"order-{order}\nbyte model", (1.01, loss), xycoords=("axes fraction", "data"), va="center", fontsize=8
        )
    for result, color in zip(results, ("black", "#d1495b", "#00798c", "#edae49", "#7b4ea3"), strict=False):
        axes.plot(
            *smooth(result.losses, 20),
            color=color,
            linewidth=1.3,
            label=f"{result.name}: held out {result.held_out:.3f}",
        )
    axes.set(
        xlabel="step",
        ylabel="training loss, nats a byte (mean of 20 steps)",
        title="A byte-level mixture of experts on Python's help texts",
    )
    axes.set_ylim(top=min(axes.get_ylim()[1], orders[0] * 1.15))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper right", framealpha=1, edgecolor="none")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


# ---- the command line ----


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        if not text.isdigit() or int(text) == 0:
            raise argparse.ArgumentTypeError(f"needs a whole number above 0, is {text!r}")
        return int(text)

    def rules_file(path: str) -> fp4.Rules:
        try:
            return fp4.Rules.from_file(path)
        except (OSError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    parser = argparse.ArgumentParser(
        description="Train a byte-level mixture-of-experts transformer in bfloat16, NVFP4 or FP8 on the English text "
        "that ships with Python.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--recipe",
        choices=["bfloat16", *RECIPES, "mixed"],
        default="nvfp4",
        help="numerics of the layers' products; mixed: row-scaled NVFP4, and MXFP8 in the backward",
    )
    add(
        "--backward-mode",
        choices=MODES,
        help='what the backward multiplies (unset: JAX_FP4_BACKWARD_MODE, else "default")',
    )
    add("--rules", type=rules_file, help="a file of recipes by layer path; what no rule matches follows --recipe")
    add(
        "--compare",
        action="store_true",
        help="train bfloat16, all NVFP4 modes and mixed on the same batches from the same seed",
    )
    add(
        "--diagnostics",
        action="store_true",
        help="collect SNR, cosines and saturation of each layer ten times, and save diagnostics.png and .csv",
    )
    add("--steps", type=positive, default=150, help="optimizer steps")
    add("--layers", type=positive, default=2, help="decoder layers")
    add("--width", type=positive, default=256, help="width of the residual stream")
    add("--heads", type=positive, default=4, help="attention heads")
    add("--experts", type=positive, default=8, help="MLPs of a layer; 1 is a dense layer")
    add("--top-k", type=positive, default=2, help="experts of a token; together they are 4 x width wide")
    add("--batch", type=positive, default=16, help="sequences a step")
    add("--context", type=positive, default=128, help="bytes a sequence")
    add("--learning-rate", type=float, default=1.5e-3, help="peak, after the warm-up")
    add("--seed", type=int, default=0, help="of parameters, batches and stochastic rounding")
    add("--out", type=Path, default=Path("out"), help="folder for loss.png, and for diagnostics.png and .csv")
    args = parser.parse_args(arguments)

    if args.compare and args.backward_mode:
        parser.error(
            "--compare trains every backward mode, so --backward-mode has no meaning beside it: leave one of them out"
        )
    if args.compare and args.rules:
        parser.error(
            "--compare trains one recipe in all layers, so --rules has no meaning beside it: leave one of them out"
        )
    one_backward = ("bfloat16", "mixed", "float8-delayed")
    if args.recipe in one_backward and args.backward_mode:
        parser.error(f"--backward-mode has no meaning beside --recipe {args.recipe}, which has one backward only")
    if args.width % (2 * args.heads):
        parser.error(
            f"--width {args.width} needs to be a multiple of 2 x --heads = {2 * args.heads}: a head has an even width"
        )
    if args.experts > 1 and args.top_k > args.experts:
        parser.error(f"--top-k {args.top_k} needs to be at most --experts {args.experts}: a token's experts differ")
    if args.experts > 1 and 4 * args.width % args.top_k:
        parser.error(
            f"--top-k {args.top_k} needs to divide 4 x --width = {4 * args.width}: experts share that width evenly"
        )
    if args.context % 2:
        parser.error(f"--context {args.context} needs to be even: evaluation windows overlap by half")
    if not args.learning_rate > 0:
        parser.error(f"--learning-rate {args.learning_rate} needs to be above 0")
    return args


def runs(args: argparse.Namespace) -> dict[str, Any]:
    """Name and recipe of each training."""
    mixed = fp4.CustomRecipe(
        forward=fp4.NVFP4BlockScaling("default", row_scaled_activation=True),
        dgrad=fp4.MXFP8BlockScaling("default"),
        wgrad=fp4.MXFP8BlockScaling("default"),
    )
    if args.compare:
        modes = {f"nvfp4 {mode}": fp4.NVFP4BlockScaling(backward_mode=mode) for mode in MODES}
        return {"bfloat16": None} | modes | {"mixed": mixed}
    if args.recipe in ("bfloat16", "mixed"):
        return {args.recipe: mixed if args.recipe == "mixed" else None}
    recipe = RECIPES[args.recipe](backward_mode=args.backward_mode)
    return {f"{args.recipe} {recipe.backward_mode}": recipe}


def train_by_rules(name: str, recipe: Any, text: byte_models.Text, args: argparse.Namespace) -> Result:
    """The layers have no recipe of their own: rules choose, and the recipe where none matches."""
    with fp4.autocast(recipe), fp4.autocast(args.rules):
        model = LanguageModel(args.layers, args.width, args.heads, args.experts, args.top_k)
        key, shape = jax.random.key(args.seed), jnp.zeros((1, args.context + 1), jnp.uint8)
        params = jax.eval_shape(model.init, key, shape)
        print(fp4.report(lambda params: loss_of(model, params, shape, key)[0], params), end="\n\n")
        return train(f"rules, {name}", None, text, args)


def main(arguments: list[str] | None = None) -> list[Result]:
    args = parse(arguments)
    text = byte_models.load_text()
    if len(text.held_out) <= args.context:
        sys.exit(f"--context {args.context} is too long: it needs to be below the {len(text.held_out)} bytes held out")
    print(f"text: pydoc_data.topics, {len(text.train) + len(text.held_out)} bytes, sha256 {text.sha256}")
    print(f"      {len(text.train)} bytes to train on, the last {len(text.held_out)} held out")
    orders = [byte_models.loss(byte_models.fit(text.train, order), text.held_out) for order in range(3)]
    run = train_by_rules if args.rules else train
    results = [run(name, recipe, text, args) for name, recipe in runs(args).items()]
    print(f"\n{table(results, orders)}")
    plot(results, orders, args.out / "loss.png")
    print(f"\ntraining curves: {args.out / 'loss.png'}")
    return results


if __name__ == "__main__":
    main()
