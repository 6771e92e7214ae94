"""Arrays that are sharded at the level of jit: how a layer becomes a shard_map over the mesh.

Explicit axes say in every array's type how it is cut; for Auto axes `specs=` says it. Either way the operands of
y = x w are brought to where each device can multiply what it has, and activations stay where they are:

    rows of x cut by an axis that cuts the kernel too   the kernel is gathered, packed (FSDP)
    k of x cut                                          so is k of the kernel; y is summed over the axis (row parallel)
    columns of the kernel cut by another axis           so are those of y (column parallel)
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec, auto_axes, reshard

from jax_fp4._errors import UnsupportedError, message
from jax_fp4._placement import Axes, Part, Placement, WeightGather, by_dimension

Dims = tuple[Axes, ...]


class Plan(NamedTuple):
    """The parts that the devices multiply, before the gathers of the placement, and y's."""

    x: Dims
    kernel: Dims
    placement: Placement

    @property
    def y(self) -> Dims:
        return self.placement.y.dims


def plan(
    x: Dims, kernel: Dims, shape: tuple[int, ...], block: int | None, sizes: Mapping[str, int],
    gated: bool = False, experts: Axes = (),
) -> Plan:  # fmt: skip
    """How operands that are cut so are multiplied. shape: of the kernel, in all. block: the columns that share a scale,
    which no cut may divide; None: columns of y may not be cut. gated: they are two runs, and each is cut.
    experts: the axes along which rows have travelled to their group's kernel."""
    rows = {axis for axes in x[:-1] for axis in axes}
    *groups, cut_k, cut_n = kernel
    gathers, kept = [], []
    for dim, axes in enumerate(kernel):
        first = next((i for i, axis in enumerate(axes) if axis in rows), len(axes))
        gathers += [WeightGather(axes[first:], dim)] if set(axes[first:]) <= rows and axes[first:] else []
        kept.append(axes[:first])
    moved = {gather.dim: gather.axes for gather in gathers}
    *groups, _, cut_n = kept
    cut_k = x[-1]
    cut_n = tuple(axis for axis in cut_n if axis not in cut_k)
    groups = [experts] * len(groups)  # without any, each device has rows of all groups
    interleaved = gated and len(kernel) - 1 in moved  # gathered columns would be
    if block is None or interleaved or shape[-1] % (block * math.prod(sizes[axis] for axis in cut_n)):
        cut_n = ()
    after = (*groups, cut_k, cut_n)
    before = tuple(axes + moved.get(dim, ()) for dim, axes in enumerate(after))
    return Plan(x, before, Placement(Part(x, experts), Part(after), tuple(gathers), gated))


# --- the mesh around a call ---


def cut(op: str, operands: Mapping[str, Any], specs: Mapping[str, PartitionSpec] | None) -> dict[str, Dims] | None:
    """How each operand is cut by axes of the mesh that no shard_map has taken: as `specs` or, for Explicit axes, its
    type says. None where nothing is; the call is then of one device, or its specs are of the shard_map around it."""
    mesh = jax.sharding.get_abstract_mesh()
    free = _free(mesh)
    if not free:
        return None
    kinds = {kind for name, kind in free.items() if mesh.shape[name] > 1}
    types = {name: by_dimension(jax.typeof(operand).sharding.spec) for name, operand in operands.items()}
    if specs is not None:
        dims = {name: by_dimension(spec) for name, spec in specs.items()}
        _check(op, dims, operands, mesh)
        named = {axis for of_one in dims.values() for axes in of_one for axis in axes}
        if not named & set(free):
            return None
        if named - set(free):
            shown, why = (
                f"over {sorted(named)}",
                f"{sorted(named - set(free))} are axes of the shard_map around the call",
            )
            raise ValueError(message(op, "specs", shown, "axes of one kind", why, "the free axes, or the manual ones"))
        if AxisType.Explicit in kinds:
            _refuse_other_cuts(op, dims, types)
    elif AxisType.Explicit in free.values():
        dims = types
    else:
        return None
    dims = {name: of_one + ((),) * (operands[name].ndim - len(of_one)) for name, of_one in dims.items()}
    if not any(axes for of_one in dims.values() for axes in of_one):
        return None
    if len(kinds) > 1:
        shown, why = f"of axes {dict(mesh.shape)}, some Explicit and some Auto", "types tell of the former only"
        raise UnsupportedError(message(op, "the mesh", shown, "axes of one kind", why, "jax.make_mesh(axis_types=)"))
    return dims


def _check(op: str, dims: Mapping[str, Dims], operands: Mapping[str, Any], mesh) -> None:
    """That specs name axes of the mesh, for dimensions that there are."""
    for name, of_one in dims.items():
        if len(of_one) > operands[name].ndim:
            shown, needs = f"of {len(of_one)} dimensions for {name}", f"at most {operands[name].ndim}"
            why, fix = "there is an entry for each dimension of the operand", "a shorter PartitionSpec"
            raise ValueError(message(op, "specs", shown, needs, why, fix))
        if unknown := sorted({axis for axes in of_one for axis in axes} - set(mesh.axis_names)):
            why = f"the mesh has {mesh.axis_names}"
            raise ValueError(message(op, "specs", f"over {unknown}", "axes of the mesh", why, "one of those"))


def _refuse_other_cuts(op: str, dims: Mapping[str, Dims], types: Mapping[str, Dims]) -> None:
    for name, of_one in dims.items():
        typed = types[name]
        if of_one + ((),) * (len(typed) - len(of_one)) != typed:
            why = f"its type says {_shown(typed)}, and Explicit axes cut nothing unasked"
            fix = "specs=None, or jax.sharding.reshard"
            raise ValueError(message(op, "specs", f"{_shown(of_one)} for {name}", "what types say", why, fix))


def _shown(dims: Dims) -> str:
    return str(spec_of(dims))


def _free(mesh) -> dict[str, AxisType]:
    """The axes that no shard_map has taken, and their kinds."""
    return {name: kind for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Manual}


def over_mesh(function: Callable, in_specs: tuple[Any, ...], out_specs: Any, *operands: Any) -> Any:
    """function of each device's part of the operands: a shard_map over all axes that none has taken."""
    free = set(_free(jax.sharding.get_abstract_mesh()))
    operands = brought(in_specs, operands)
    # jitted: eager, a shard_map refuses rules with symbolic zeros
    return jax.jit(jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=free))(*operands)


def brought(specs: Any, operands: Any) -> Any:
    """The operands, cut as `specs` say: by resharding what is of Explicit axes. What is of Auto axes, XLA brings."""
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return operands

    def to(spec, operand):
        return jax.tree.map(lambda a: a if jax.typeof(a).sharding.spec == spec else reshard(a, spec), operand)

    return jax.tree.map(to, specs, operands, is_leaf=lambda node: isinstance(node, PartitionSpec))


def spec_of(dims: Dims) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in dims))


def reshaped(a: Any, shape: tuple[int, ...], spec: PartitionSpec) -> Any:
    """The array in another shape, cut as `spec` says: XLA finds out who has to send what."""
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return a.reshape(shape)
    return auto_axes(lambda a: a.reshape(shape), out_sharding=spec)(a)


def constrained(y: Any, out_sharding: Any) -> Any:
    """y, sharded so: a PartitionSpec or NamedSharding, None to leave it where it is."""
    if out_sharding is None:
        return y
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return reshard(y, out_sharding)
    return jax.lax.with_sharding_constraint(y, out_sharding)
