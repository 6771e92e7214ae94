"""What FSDP sends over the wire for a layer, in bfloat16 and in NVFP4: counted in the compiled program.

    python examples/fsdp_gather.py                       a kernel [4096, 14336] and 8 experts of that, on 8 devices
    python examples/fsdp_gather.py --cut columns         shards of columns
    python examples/fsdp_gather.py --recipe mxfp8 --reduce-dtype bfloat16
    python examples/fsdp_gather.py --instructions        the collectives themselves, as the compiler left them

Each device has a shard of the kernel and tokens of its own. The forward gathers the kernel, the backward gathers what
it reads, and the weight gradient is scattered back to the shards. Under a recipe each shard is quantized first, so that
packed bytes travel. `layer_of` below is all it takes.

Nothing is run: the forward and the backward are compiled and their collectives are read. Without an accelerator this is
done for eight devices of the CPU. What a device sends is counted as for rings: (p - 1) / p of what is gathered or
scattered, twice that where it is an all-reduce.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_fp4 as fp4

RECIPES = {
    "nvfp4": fp4.NVFP4BlockScaling,
    "mxfp8": fp4.MXFP8BlockScaling,
    "float8-current": fp4.Float8CurrentScaling,
    "float8-block": fp4.Float8BlockScaling,
}
MODES = ("default", "unquant", "dequant")
AXIS = "fsdp"


# ---- the layer ----


def layer_of(mesh: Mesh, recipe: Any, shape: tuple[int, ...], cut: str, reduce_dtype: Any) -> Callable:
    """(x, kernel, key) -> y. A kernel [k, n] is a dense layer, [g, k, n] are experts; its rows or columns are cut."""
    rows = PartitionSpec(AXIS, None)  # of x and y: each device has tokens of its own
    shards = spec_of_shards(shape, cut)

    # In place of a whole kernel comes a shard, and how it is gathered. The payload None would be packed where that is
    # exact; "quantized" is an error where it is not. The specs tell how the global operands are cut: with them scales,
    # and the random bits that round gradients, are those that one device would have.
    payload = None if recipe is fp4.HIGH_PRECISION else "quantized"
    gather = fp4.WeightGather(AXIS, dim=shards.index(AXIS), payload=payload, reduce_dtype=reduce_dtype)
    how: dict[str, Any] = dict(recipe=recipe, gather=gather, specs=fp4.Specs(x=rows, kernel=shards))

    def local(x, kernel, key):
        if kernel.ndim == 2:
            return fp4.dense(x, kernel, key=key, **how)
        experts = shape[0]
        group_sizes = jnp.full((experts,), x.shape[0] // experts, jnp.int32)
        return fp4.grouped_dense(x, kernel, group_sizes, key=key, **how)

    return jax.shard_map(local, mesh=mesh, in_specs=(rows, shards, PartitionSpec()), out_specs=rows)


def spec_of_shards(shape: tuple[int, ...], cut: str) -> PartitionSpec:
    dim = len(shape) - (2 if cut == "rows" else 1)
    return PartitionSpec(*(AXIS if i == dim else None for i in range(len(shape))))


class Programs(NamedTuple):
    """One direction, as it was lowered and as it was compiled: HLO."""

    lowered: str
    compiled: str


def programs(mesh: Mesh, recipe: Any, shape: tuple[int, ...], args: argparse.Namespace) -> tuple[Programs, Programs]:
    """Of the forward, which keeps what the backward needs, and of the backward."""
    layer = layer_of(mesh, recipe, shape, args.cut, args.reduce_dtype)

    def described(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    x = described((args.tokens * mesh.size, shape[-2]), jnp.bfloat16, PartitionSpec(AXIS, None))
    kernel = described(shape, jnp.float32, spec_of_shards(shape, args.cut))  # master weights
    key = described((), jax.random.key(0).dtype, PartitionSpec())

    def forward(x, kernel, key):
        return jax.vjp(lambda x, kernel: layer(x, kernel, key), x, kernel)

    def of(function, *operands):
        lowered = jax.jit(function).lower(*operands)
        compiled = lowered.compile()
        results = jax.tree.map(
            lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
            lowered.out_info,
            compiled.output_shardings,
        )
        return Programs(lowered.as_text(dialect="hlo"), compiled.as_text() or ""), results

    there, (y, vjp) = of(forward, x, kernel, key)
    back, _ = of(lambda vjp, dy: vjp(dy), vjp, y)
    return there, back


# ---- reading HLO ----

COLLECTIVE = re.compile(r"^.*?= (\(?.*?) (all-gather|all-reduce|reduce-scatter)(-start)?\(.*$", re.MULTILINE)
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
BITS = re.compile(r"[a-z]+(\d+)")


class Collective(NamedTuple):
    """One array of a collective. shape: of the result."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    devices: int  # that take part together

    @property
    def counts(self) -> bool:
        """Whether these are integers: sizes of groups, and amaxes, whose bits are compared."""
        return self.dtype == "s32"

    @property
    def sent(self) -> float:
        """Bytes that a device sends, in a ring."""
        match self.op, self.devices:
            case "all-gather", p:
                share = (p - 1) / p
            case "reduce-scatter", p:
                share = p - 1  # of the result, a p-th of the operand
            case _, p:
                share = 2 * (p - 1) / p
        return share * prod(self.shape) * bytes_of(self.dtype)


def bytes_of(dtype: str) -> float:
    bits = BITS.match(dtype)
    return int(bits[1]) / 8 if bits else 1  # pred


def collectives(hlo: str) -> Iterator[Collective]:
    for line in COLLECTIVE.finditer(hlo):
        result, op, start = line.groups()
        arrays = ARRAY.findall(result)
        if start and op == "all-gather":  # its result is a pair: the operands and what they become
            arrays = arrays[len(arrays) // 2 :]
        for dtype, shape in arrays:
            yield Collective(op, dtype, tuple(map(int, filter(None, shape.split(",")))), _devices(line[0]))


def _devices(line: str) -> int:
    """Of one group: replica_groups={{0,1},{2,3}}, or [2,2]<=[4], or of a mesh, mesh['data'=2,'fsdp'=2] {'fsdp'}."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return listed[1].count(",") + 1
    if shape := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(shape[1])
    if of_mesh := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", of_mesh[1]))
        return prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", of_mesh[2]))
    raise ValueError(f"no replica_groups in {line}")


class Sum(NamedTuple):
    """The arrays of one kind of collective that hold weights or gradients, together."""

    dtype: str  # of the largest
    compiled: str  # what the compiler made of that
    per_element: float  # bytes, of the kernel
    sent: float  # bytes, by each device

    @classmethod
    def of(cls, op: str, program: Programs, elements: int) -> "Sum":
        """XLA:CPU has no bfloat16 collectives and sends float32 in their place. Counted is then what was lowered."""
        asked, made = (
            sorted((c for c in collectives(hlo) if c.op == op and not c.counts), key=lambda c: -c.sent)
            for hlo in program
        )
        widened = [c.dtype for c in asked[:1]] == ["bf16"] and [c.dtype for c in made[:1]] == ["f32"]
        counted = asked if widened else made
        if not counted:
            return cls("", "", 0, 0)
        sent, p = sum(c.sent for c in counted), counted[0].devices
        return cls(counted[0].dtype, made[0].dtype, sent * p / (p - 1) / elements, sent)

    def __str__(self):
        dtype = self.dtype + ("*" if self.dtype != self.compiled else "")
        return f"{dtype:>6}{self.per_element:8.4f}{self.sent / 1e6:9.1f}"


class Row(NamedTuple):
    name: str
    forward: Sum
    backward: Sum
    gradient: Sum
    other: float  # bytes: amaxes, sizes of groups

    @property
    def sent(self) -> float:
        return self.forward.sent + self.backward.sent + self.gradient.sent + self.other


def row(name: str, directions: tuple[Programs, Programs], shape: tuple[int, ...]) -> Row:
    there, back = directions
    parts = [
        Sum.of(op, program, prod(shape))
        for op, program in (("all-gather", there), ("all-gather", back), ("reduce-scatter", back))
    ]
    every = [c for program in directions for c in collectives(program.compiled)]
    return Row(name, *parts, other=sum(c.sent for c in every if c.counts or c.op == "all-reduce"))


# ---- the command line ----


def parse(arguments: list[str] | None) -> argparse.Namespace:
    def positive(text: str) -> int:
        if not text.isdigit() or int(text) == 0:
            raise argparse.ArgumentTypeError(f"needs a whole number above 0, is {text!r}")
        return int(text)

    parser = argparse.ArgumentParser(
        description="Count the bytes that FSDP sends for a layer, in bfloat16 and quantized.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--recipe", choices=RECIPES, default="nvfp4", help="what is compared with bfloat16, in its backward modes")
    add("--k", type=positive, default=4096, help="rows of the kernel, which are contracted")
    add("--n", type=positive, default=14336, help="columns of the kernel")
    add("--experts", type=positive, default=8, help="kernels of the second table")
    add("--tokens", type=positive, default=1024, help="of each device; what is sent does not depend on it")
    add("--cut", choices=["rows", "columns"], default="rows", help="dimension of the kernel that devices share")
    add("--reduce-dtype", choices=["float32", "bfloat16"], default="float32", help="in what gradients are summed")
    add("--devices", type=positive, help="how many; unset: 8 of a CPU, or all accelerators")
    add("--instructions", action="store_true", help="show the collectives of the compiled programs")
    return parser.parse_args(arguments)


def table(rows: list[Row]) -> str:
    head = f"{'':6}{'bytes an':>8}{'MB':>9}"
    lines = [f"{'':23}{'forward all-gather':>23}  {'backward all-gather':>23}  {'reduce-scatter of dw':>23}"]
    lines += [f"{'':23}" + "  ".join([head] * 3)]
    lines += [f"{'':23}" + "  ".join([f"{'':6}{'element':>8}{'':9}"] * 3) + f"{'MB a step':>12}{'gathers':>9}"]
    gathered = rows[0].forward.sent + rows[0].backward.sent
    for r in rows:
        share = f"{(r.forward.sent + r.backward.sent) / gathered:8.3f}x"
        lines.append(f"{r.name:23}{r.forward}  {r.backward}  {r.gradient}{r.sent / 1e6:12.1f}{share}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> dict[tuple[int, ...], list[Row]]:
    """The rows of each table, by the shape of the kernel."""
    args = parse(arguments)
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", args.devices or 8)  # before the first question for a device
    devices = jax.devices()[: args.devices]
    if args.devices and len(devices) < args.devices:
        sys.exit(f"--devices {args.devices} needs as many devices; here are {len(devices)}")
    for name, extent in (("k", args.k), ("n", args.n)):
        if name == ("k" if args.cut == "rows" else "n") and extent % len(devices):
            sys.exit(
                f"--{name} {extent} needs to be a multiple of the {len(devices)} devices that share the {args.cut}"
            )
    mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices)
    print(f"compiled for {len(devices)} devices: {devices[0].platform}, {devices[0].device_kind}; nothing is run")

    recipes = {"bfloat16": fp4.HIGH_PRECISION}
    recipes |= {f"{args.recipe} {mode}": RECIPES[args.recipe](backward_mode=mode) for mode in MODES}
    tables = {}
    for shape in ((args.k, args.n), (args.experts, args.k, args.n)):
        tables[shape] = rows = []
        for name, recipe in recipes.items():
            try:
                directions = programs(mesh, recipe, shape, args)
            except ValueError as error:  # of shards that end inside a block
                sys.exit(str(error))
            rows.append(row(name, directions, shape))
            if args.instructions:
                for direction, program in zip(("forward", "backward"), directions, strict=True):
                    for c in collectives(program.compiled):
                        print(f"  {name}, {direction}: {c.op} {c.dtype}{list(c.shape)} of {c.devices} devices")
        what = f"{args.experts} experts" if len(shape) == 3 else "a kernel"
        print(f"\n{what} {list(shape)}, shards of {args.cut}; a device sends\n{table(rows)}")
    parts = [part for rows in tables.values() for r in rows for part in (r.forward, r.backward, r.gradient)]
    if any(part.dtype != part.compiled for part in parts):
        print("\n* compiled as f32 here, as XLA:CPU has no bfloat16 collectives; counted is bf16, which was asked for")
    packed = sorted({part.per_element for part in parts if part.compiled == "u8"})
    print("packed weights are u8, bytes an element:", *(f"{size:.4f}" for size in packed))
    return tables


if __name__ == "__main__":
    main()
