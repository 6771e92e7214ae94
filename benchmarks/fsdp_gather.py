"""How long does gathering a weight take, packed against bfloat16?

    NCCL_NVLS_ENABLE=0 python benchmarks/fsdp_gather.py [--rounds 11] [--devices 2] [--tiny]

Each of the devices has a shard of a kernel [4096, 14336] (cut along its rows) and of eight experts of that, and all get
the whole: its bfloat16 values, or the NVFP4 codes and block scales of its plane for the forward, already quantized
("packed") or quantized in the program, with the amax of all shards ("quantized and packed"). GB/s are bytes that each
device receives in a second. The ratio is the time of bfloat16 by it, of the same elements; 2 bytes against 0.5625 bound
it by 3.56. A copy of the gathered bytes on one device is timed beside them. Medians over rounds in which each is
timed once, by the wall clock. That the packed bytes are gathered as u8, and are those of the whole kernel, is checked.
"""

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rounds import interleaved, of_devices, of_program

import jax_fp4 as fp4

SHAPES = ((4096, 14336), (8, 4096, 14336))


def programs(mesh, shape: tuple[int, ...]) -> dict[str, tuple]:
    """What is timed, compiled, with its arguments."""
    rows, last = P(*[None] * (len(shape) - 2), "fsdp", None), len(shape) - 1

    def over(function, *specs):
        out_specs = P(*[None] * last, "fsdp") if function is cut else P()  # of codes [..., n, k/2] and their scales
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False))

    def cut(w):
        return plane(w, fp4.Specs(x=rows))

    def whole(*parts):
        """As a WeightGather gathers: parts travel as they lie, and are put in order by words of four bytes."""
        return [joined(part) for part in parts]

    def joined(part):
        gathered = jax.lax.all_gather(part, "fsdp")
        words = jax.lax.bitcast_convert_type(gathered.reshape(*gathered.shape[:-1], -1, 4), jnp.uint32)
        words = jnp.moveaxis(words, 0, last).reshape(*part.shape[:last], -1)
        return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(*part.shape[:last], -1)

    draw = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16), out_shardings=NamedSharding(mesh, rows))
    w = draw(jax.random.key(0))
    found = {
        "bfloat16": (over(lambda w: jax.lax.all_gather(w, "fsdp", axis=last - 1, tiled=True), rows), (w,)),
        "packed": (over(whole, *[P(*[None] * last, "fsdp")] * 2), over(cut, rows)(w)),
        "quantized and packed": (over(lambda w: whole(*cut(w)), rows), (w,)),
    }
    return {name: (function.lower(*arguments).compile(), arguments) for name, (function, arguments) in found.items()}


def plane(w, specs=None) -> tuple[jax.Array, jax.Array]:
    """Codes and block scales that y = x w reads, as bytes."""
    q = fp4.quantize(w, axis=0, block=(16, 16), batch_dims=w.ndim - 2, specs=specs)
    return q.codes, _bits(q.block_scale)


def check(made: dict[str, tuple], whole: tuple) -> None:
    """Raises RuntimeError unless codes and scales are those of the whole kernel, and travelled as bytes."""
    for name in ("packed", "quantized and packed"):
        program, arguments = made[name]
        moved = set(re.findall(r"= [( ]*(\w+)\[.* all-gather(?:-start)?\(", program.as_text()))
        same = all(np.array_equal(a, b) for a, b in zip(program(*arguments), whole, strict=True))
        if moved != {"u8"} or not same:
            whose = "the kernel's" if same else "not the kernel's"
            raise RuntimeError(f"{name}: gathered as {sorted(moved)}, {whose} bytes")


def _bits(a):
    return jax.lax.bitcast_convert_type(a, jnp.dtype(f"uint{8 * a.dtype.itemsize}"))


def main(arguments: Sequence[str] | None = None) -> None:
    options, devices = of_devices(__doc__, arguments, rounds=11)
    p = len(devices)
    mesh = jax.make_mesh((p,), ("fsdp",), axis_types=(AxisType.Auto,), devices=devices)
    for shape in [(128, 64), (2, 128, 64)] if options.tiny else SHAPES:
        made = programs(mesh, shape)
        check(made, plane(jax.device_put(made["bfloat16"][1][0], devices[0])))
        contenders = {name: of_program(*each) for name, each in made.items()}
        for name in ("bfloat16", "packed"):
            program, own = made[name]
            parts = jax.device_put(jax.tree.leaves(program(*own)), devices[0])
            contenders[f"a copy of that, {name}"] = of_program(
                jax.jit(lambda *all: [~_bits(a) for a in all]), tuple(parts)
            )
        times = interleaved(contenders, options.rounds, 1e-3 if options.tiny else 0.05)
        print(f"\n{' x '.join(map(str, shape))}\n{'':28}      ms   GB/s  bfloat16's time by it")
        for name, seconds in times.items():
            received = (p - 1) / p * np.prod(shape) * (2 if name.endswith("bfloat16") else 0.5625)
            rate = 2 * received * p / (p - 1) if name.startswith("a copy") else received
            print(f"{name:28}{seconds * 1e3:8.3f}{rate / seconds / 1e9:7.0f}  {times['bfloat16'] / seconds:8.2f}")


if __name__ == "__main__":
    main()
