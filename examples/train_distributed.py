"""A language model trained on a mesh of devices, in one process or several, with sharded parameters and checkpoints.

    python examples/train_distributed.py                                    one process, four devices of the CPU
    python examples/train_distributed.py --processes 2                      two processes, two devices each: same losses
    python examples/train_distributed.py --mesh data=2,expert=2             experts on different devices
    python examples/train_distributed.py --save checkpoints                 in checkpoints/50, say
    python examples/train_distributed.py --restore checkpoints/50 --mesh fsdp=4 --processes 4

Under a launcher that starts one process a host, each with accelerators, `--coordinator HOST:PORT --num-processes N
--process-id I` takes the place of --processes; the mesh is over all their devices.

A mesh axis means what its name says: "data" cuts the batch; "fsdp" the batch and every kernel, which is gathered,
packed, where it is multiplied; "tensor" the hidden units of the MLPs; "expert" the batch and the experts, to which
tokens travel. How a parameter is cut is metadata of the parameter (`Block` below), and that is all: the batch is cut,
and gradients, optimizer state and checkpoints follow. The text and the attention are those of `train_lm.py`.
"""

import argparse
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, get_abstract_mesh, get_mesh
from tqdm import tqdm

import byte_models
from jax_fp4 import nnx as fp4_nnx
from train_lm import BALANCE, MODES, RECIPES, attention

AXES = {"data": "batch", "fsdp": "batch and kernels", "tensor": "hidden units", "expert": "batch and experts"}
CUTS_BATCH = ("data", "fsdp", "expert")


# ---- the model ----


def on_mesh(*axes: str | None) -> tuple[str | None, ...]:
    """The entries of a PartitionSpec, without the axes that this mesh does not have."""
    return tuple(axis if axis in get_abstract_mesh().axis_names else None for axis in axes)


def of_batch() -> PartitionSpec:
    """Of any array that begins with the batch."""
    return PartitionSpec(tuple(axis for axis in get_abstract_mesh().axis_names if axis in CUTS_BATCH))


class Block(nnx.Module):
    """A pre-norm decoder layer, x -> (x, load-balancing loss)."""

    def __init__(self, args: argparse.Namespace, recipe: Any, rngs: nnx.Rngs):
        width, self.heads = args.width, args.heads

        def init(initializer, *axes):
            return nnx.with_partitioning(initializer, on_mesh(*axes))

        def linear(k, n, initializer, *axes):
            how: dict[str, Any] = dict(use_bias=False, dtype=jnp.bfloat16, recipe=recipe, rngs=rngs)
            return fp4_nnx.Linear(k, n, kernel_init=init(initializer, *axes), **how)

        drawn, zeros = nnx.initializers.lecun_normal(), nnx.initializers.zeros  # a layer starts as the identity
        self.norm1 = nnx.RMSNorm(width, dtype=jnp.bfloat16, rngs=rngs)
        self.norm2 = nnx.RMSNorm(width, dtype=jnp.bfloat16, rngs=rngs)
        self.qkv = linear(width, 3 * width, drawn, "fsdp", None)
        self.out = linear(width, width, zeros, None, "fsdp")
        if args.experts == 1:
            self.up = linear(width, 4 * width, drawn, "fsdp", "tensor")
            self.down = linear(4 * width, width, zeros, "tensor", "fsdp")
            return
        each = nnx.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=0)
        self.moe = fp4_nnx.MoE(
            args.experts,
            width,
            4 * width // args.top_k,
            top_k=args.top_k,
            activation="gelu",
            kernel_init=init(each, "expert", "fsdp", "tensor"),
            out_kernel_init=init(zeros, "expert", "tensor", "fsdp"),
            dtype=jnp.bfloat16,
            recipe=recipe,
            rngs=rngs,
        )

    def __call__(self, x, key):
        keys = jax.random.split(key, 4)
        *batch, width = x.shape
        qkv = self.qkv(self.norm1(x), key=keys[0])
        q, k, v = jnp.split(qkv.reshape(*batch, 3 * self.heads, width // self.heads), 3, axis=-2)
        x = x + self.out(attention(q, k, v).reshape(x.shape), key=keys[1])
        h = self.norm2(x)
        if hasattr(self, "up"):
            return x + self.down(nnx.gelu(self.up(h, key=keys[2])), key=keys[3]), jnp.zeros(())
        y, routing = self.moe(h, key=keys[2])
        return x + y, routing.aux_loss


class LanguageModel(nnx.Module):
    """bytes [b, t], key of stochastic rounding -> (float32 logits [b, t, 256], mean load-balancing loss)."""

    def __init__(self, args: argparse.Namespace, recipe: Any, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, args.width, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([Block(args, recipe, rngs) for _ in range(args.layers)])
        self.norm = nnx.RMSNorm(args.width, dtype=jnp.bfloat16, rngs=rngs)
        self.head = nnx.Linear(args.width, 256, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, text, key):
        x = self.embed(text, out_sharding=of_batch())
        balance = jnp.zeros(())
        for i, block in enumerate(self.blocks):
            x, aux_loss = block(x, jax.random.fold_in(key, i))
            balance += aux_loss / len(self.blocks)
        return self.head(self.norm(x)).astype(jnp.float32), balance


# ---- training ----


def first_state(args: argparse.Namespace) -> tuple[LanguageModel, nnx.Optimizer]:
    """Model and optimizer, made where they stay: no device holds a whole parameter that is cut."""
    recipe = RECIPES[args.recipe](backward_mode=args.backward_mode)
    schedule = optax.linear_schedule(0.0, args.learning_rate, 10)
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1))

    @nnx.jit
    def make():
        model = LanguageModel(args, recipe, nnx.Rngs(params=args.seed))
        return model, nnx.Optimizer(model, transformation, wrt=nnx.Param)

    return make()


def make_step(seed: int):
    """One compiled step: (model, optimizer, text [b, t + 1]) -> loss, in nats a byte."""

    def loss_of(model, text, key):
        logits, balance = model(text[:, :-1], key)
        targets = jax.nn.one_hot(text[:, 1:], 256)
        loss = -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1))
        return loss + BALANCE * balance, loss

    @nnx.jit
    def step(model, optimizer, text):
        key = jax.random.fold_in(jax.random.key(seed), optimizer.step[...])  # nothing random is kept between steps
        gradients, loss = nnx.grad(loss_of, has_aux=True)(model, text, key)
        optimizer.update(model, gradients)
        return loss

    return step


def batch(text: np.ndarray, step: int, args: argparse.Namespace) -> jax.Array:
    """Random crops [batch, context + 1], the same for the same seed and step; each process reads its rows alone."""
    shape = (args.batch, args.context + 1)
    sharding = NamedSharding(get_mesh(), of_batch())
    indices: Any = sharding.addressable_devices_indices_map(shape).values()
    mine = np.concatenate([np.arange(*part) for part in sorted({rows.indices(args.batch) for rows, _ in indices})])
    starts = np.random.default_rng([args.seed, step]).integers(0, len(text) - args.context, args.batch)
    crops = text[starts[mine, None] + np.arange(args.context + 1)]
    return jax.make_array_from_process_local_data(sharding, crops, shape)


def save(directory: Path, model: LanguageModel, optimizer: nnx.Optimizer) -> None:
    """Parameters and optimizer state; each process writes its shards."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.absolute(), nnx.state((model, optimizer)), force=True)


def restore(directory: Path, model: LanguageModel, optimizer: nnx.Optimizer) -> None:
    """What was saved on any mesh, cut as the model and optimizer are on this one."""
    state = nnx.state((model, optimizer))
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update((model, optimizer), checkpointer.restore(directory.absolute(), like))


def train(args: argparse.Namespace) -> list[float]:
    """The losses of the steps; process 0 prints them."""
    text = byte_models.load_text().train
    model, optimizer = first_state(args)
    first = 0
    if args.restore:
        restore(args.restore, model, optimizer)
        first = int(optimizer.step[...])
    step, losses = make_step(args.seed), []
    with tqdm(range(first, first + args.steps), disable=jax.process_index() > 0, dynamic_ncols=True) as bar:
        for i in bar:
            losses.append(float(step(model, optimizer, batch(text, i, args))))
            if jax.process_index() == 0:
                bar.write(f"step {i:4}  loss {losses[-1]:.8f}")
            if args.save and ((i + 1) % args.save_every == 0 or i + 1 == first + args.steps):
                save(args.save / str(i + 1), model, optimizer)
    return losses


# ---- processes ----


def launch(arguments: list[str], args: argparse.Namespace) -> int:
    """This script once more in each of several processes on this machine, over loopback. The first failure ends all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    flags = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")).strip()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    devices = np.prod(list(args.mesh.values())) // args.processes
    shared = ["--processes", "1", "--coordinator", coordinator, "--num-processes", str(args.processes)]
    command = [sys.executable, __file__, *arguments, *shared, "--cpu-devices", str(devices), "--process-id"]
    processes = []
    try:
        for i in range(args.processes):  # the others only print that they are connected
            heard = None if i == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen([*command, str(i)], env=environment, stdout=heard))
        codes = []
        while not any(codes) and None in (codes := [process.poll() for process in processes]):
            time.sleep(0.05)
        return next((code for code in codes if code), 0)
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def mesh_over_all(sizes: dict[str, int], processes: int):
    """The mesh of --mesh: of all devices, or of one process the first. Its axes are Explicit, JAX's default."""
    needed, devices = int(np.prod(list(sizes.values()))), jax.devices()
    if needed > len(devices) or (processes > 1 and needed < len(devices)):
        sys.exit(f"--mesh is of {needed} devices; {processes} processes have {len(devices)}")
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices[:needed])


# ---- the command line ----


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        if not text.isdigit() or int(text) == 0:
            raise argparse.ArgumentTypeError(f"needs a whole number above 0, is {text!r}")
        return int(text)

    def mesh(text: str) -> dict[str, int]:
        pairs = [part.partition("=") for part in text.split(",")]
        for axis, _, size in pairs:
            if axis not in AXES or [name for name, _, _ in pairs].count(axis) > 1:
                raise argparse.ArgumentTypeError(f"{axis!r} needs to be one of {', '.join(AXES)}, once")
            positive(size)
        return {axis: int(size) for axis, _, size in pairs}

    parser = argparse.ArgumentParser(
        description="Train a byte-level transformer on a mesh of devices, in one process or several.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    axes = "; ".join(f"{axis} cuts {what}" for axis, what in AXES.items())
    add("--mesh", type=mesh, default="data=2,fsdp=2", help=f"axes and their sizes: {axes}")
    add(
        "--processes", type=positive, default=1, help="processes to start here, which share the CPU devices of the mesh"
    )
    add("--coordinator", help="HOST:PORT of process 0, if a launcher starts the processes")
    add("--num-processes", type=positive, help="how many the launcher starts")
    add("--process-id", type=int, help="which of them this one is")
    add(
        "--cpu-devices", type=positive, help="CPU devices of this process; unset: as many as --mesh has, in one process"
    )
    stateless = [name for name in RECIPES if name != "float8-delayed"]
    add("--recipe", choices=stateless, default="nvfp4", help="numerics of the layers' products")
    add("--backward-mode", choices=MODES, help='unset: JAX_FP4_BACKWARD_MODE, else "default"')
    add("--steps", type=positive, default=50, help="optimizer steps, after those of what is restored")
    add("--layers", type=positive, default=2, help="decoder layers")
    add("--width", type=positive, default=128, help="width of the residual stream")
    add("--heads", type=positive, default=4, help="attention heads")
    add("--experts", type=positive, default=4, help="MLPs of a layer; 1 is a dense layer")
    add("--top-k", type=positive, default=2, help="experts of a token; together they are 4 x width wide")
    add("--batch", type=positive, default=16, help="sequences a step, on all devices")
    add("--context", type=positive, default=64, help="bytes a sequence")
    add("--learning-rate", type=float, default=2e-3, help="after ten steps")
    add("--seed", type=int, default=0, help="of parameters, batches and stochastic rounding")
    add("--save", type=Path, help="folder for checkpoints, one after another in it, each named by its step")
    add("--save-every", type=positive, default=1000, help="steps between two checkpoints; the last step has one too")
    add("--restore", type=Path, help="the checkpoint to go on from, of any mesh and number of processes")
    args = parser.parse_args(arguments)

    size, rows = int(np.prod(list(args.mesh.values()))), int(np.prod([args.mesh.get(axis, 1) for axis in CUTS_BATCH]))
    if size % args.processes:
        parser.error(f"--mesh is of {size} devices, which {args.processes} --processes cannot share evenly")
    if args.batch % rows:
        parser.error(
            f"--batch {args.batch} needs to be a multiple of {rows}: so many devices have their own part of it"
        )
    if args.experts % args.mesh.get("expert", 1):
        parser.error(f"--experts {args.experts} needs to be a multiple of the mesh axis expert={args.mesh['expert']}")
    if args.width % (2 * args.heads):
        parser.error(f"--width {args.width} needs to be a multiple of 2 x --heads = {2 * args.heads}")
    if args.experts > 1 and (args.top_k > args.experts or 4 * args.width % args.top_k):
        parser.error(f"--top-k {args.top_k} needs to be at most --experts and to divide 4 x --width")
    return args


def main(arguments: list[str] | None = None) -> list[float]:
    """The losses of the steps; where processes are started, these have them."""
    arguments = sys.argv[1:] if arguments is None else arguments
    args = parse(arguments)
    if args.processes > 1:
        if code := launch(arguments, args):
            sys.exit(code)
        return []
    # Before the first question for a device, and read by the CPU's alone.
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", args.cpu_devices or int(np.prod(list(args.mesh.values()))))
    if args.coordinator:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    mesh = mesh_over_all(args.mesh, jax.process_count())
    if jax.process_index() == 0:
        shape = ", ".join(f"{axis}={size}" for axis, size in args.mesh.items())
        print(
            f"{jax.process_count()} processes, {mesh.size} devices ({jax.devices()[0].platform}): {shape}", flush=True
        )
    with jax.set_mesh(mesh):
        losses = train(args)
    if args.coordinator:
        jax.distributed.shutdown()
    return losses


if __name__ == "__main__":
    main()
