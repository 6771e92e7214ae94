"""Programs that XLA partitions: arrays sharded outside of shard_map, on mesh axes of which types say nothing.

There the partitioner meets our custom calls, and of a custom call that it does not know it gathers every operand on
each device, without a word. `partitioned` tells it how a function is cut: which dimensions of operands and results
belong together (a `Rule`), and, once shardings are known, what each device does with its parts (a `Cut` for each array
and the local function, which is that of shard_map). In programs that nobody partitions it is the function itself.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jax_fp4 import _record
from jax_fp4._errors import UnsupportedError, is_strict, message, strict
from jax_fp4._lowering import NO_MESH, compiled, derivative, is_partitioned, kept_whole, lowered
from jax_fp4._placement import Axes

Names = tuple[str | None, ...]  # of the dimensions of an array; one without a name is never cut
Cut = dict[str, Axes]  # the mesh axes that cut the dimensions of a name, major first
Sizes = Mapping[str, int]  # of mesh axes


class Plan(NamedTuple):
    """How each operand and each result is cut, and the function of the parts. Collectives in it name mesh axes."""

    operands: list[Cut]
    results: list[Cut]
    function: Callable


@dataclass(frozen=True, eq=False)  # as a parameter of a primitive it is only itself
class Rule:
    """Dimensions of one name, of operands and results, are cut alike, between units: each consists of `units[name]`
    equal ones, or of none and is not cut. plan: the cuts that there are, of operands and results -> a Plan, whose
    function takes what the whole one does."""

    operands: tuple[Names, ...]
    results: tuple[Names, ...]
    units: dict[str, int]
    plan: Callable[[list[Cut], list[Cut], Sizes], Plan]


def trimmed(axes: Axes, units: int, sizes: Sizes) -> Axes:
    """The first of the axes, as many as cut so many units evenly."""
    while axes and units % math.prod(sizes[axis] for axis in axes):
        axes = axes[:-1]
    return axes if units else ()


def without(axes: Axes, used: Sequence[str]) -> Axes:
    return tuple(axis for axis in axes if axis not in used)


_partitioned_p = core.Primitive("jax_fp4_partitioned")
_partitioned_p.multiple_results = True


def partitioned(function: Callable, rule: Rule):
    """`function` of arrays, none of which is a constant of it, cut as `rule` says where XLA partitions the program."""

    def called(*arguments):
        leaves, tree = jax.tree.flatten(arguments)
        if not all(leaf.size for leaf in leaves) or _is_manual():
            return function(*arguments)

        def flat(*leaves):
            return function(*jax.tree.unflatten(tree, leaves))

        if any(cuts := [_typed_cut(leaf, names) for leaf, names in zip(leaves, rule.operands, strict=True)]):
            return _mapped(rule, leaves, tree, cuts)
        jaxpr, out = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        flat_rule = replace(rule, plan=partial(_flat_plan, rule.plan, tree))
        results = _partitioned_p.bind(*leaves, jaxpr=jaxpr, rule=flat_rule, strict=is_strict(), devices=_NEEDS_DEVICES)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return called


def _typed_cut(leaf, names: Names) -> Cut:
    """The axes that its type names: of kind Explicit."""
    spec, cut = jax.typeof(leaf).sharding.spec, {}
    for name, axes in zip(names, spec, strict=True):
        if axes:  # what has no name is gathered by the shard_map
            cut[name or ""] = (axes,) if isinstance(axes, str) else axes
    return cut


def _mapped(rule: Rule, leaves: list, tree, cuts: list[Cut]):
    """On axes that types know, where JAX cuts nothing by itself: the same parts, in a shard_map."""
    mesh, avals = jax.sharding.get_abstract_mesh(), [jax.typeof(leaf) for leaf in leaves]
    if auto := [axis for axis in mesh.auto_axes if mesh.shape[axis] > 1]:
        shown, why = f"cut by axes of kind Explicit, beside {', '.join(auto)} of kind Auto", "one of the two cuts it"
        fix = "axis_types of one kind, or jax.shard_map around the call"
        raise UnsupportedError(message("jax_fp4", "an operand", shown, "a mesh of one kind", why, fix))
    plan, structure = rule.plan(cuts, [{} for _ in rule.results], dict(mesh.shape)), []

    def function(*parts):
        results, out = jax.tree.flatten(plan.function(*jax.tree.unflatten(tree, _typed(parts, avals))))
        structure.append(out)
        return tuple(results)

    specs = [
        tuple(_spec(cut, names) for cut, names in zip(cuts, of, strict=True))
        for cuts, of in ((plan.operands, rule.operands), (plan.results, rule.results))
    ]
    placed = (jax.sharding.reshard(_bytes(leaf), spec) for leaf, spec in zip(leaves, specs[0], strict=True))
    results = jax.shard_map(function, in_specs=specs[0], out_specs=specs[1], check_vma=False)(*placed)
    return jax.tree.unflatten(structure[0], results)


def _flat_plan(plan, tree, *cuts) -> Plan:
    made: Plan = plan(*cuts)
    return made._replace(function=lambda *leaves: jax.tree.leaves(made.function(*jax.tree.unflatten(tree, leaves))))


def _is_manual() -> bool:
    """Inside a shard_map over all axes that have a size, where everything is local."""
    mesh = jax.sharding.get_abstract_mesh()
    return bool(mesh.axis_names) and all(mesh.shape[axis] == 1 or axis in mesh.manual_axes for axis in mesh.axis_names)


def _needs_devices():
    """A program which says to JAX that it cannot be lowered without knowing its devices, as a part of ours."""
    nothing = custom_partitioning(lambda x: x)
    nothing.def_partition(lambda *_: None, sharding_rule="i -> i")
    return jax.make_jaxpr(nothing)(jax.ShapeDtypeStruct((1,), jnp.float32))


_NEEDS_DEVICES = _needs_devices()


_partitioned_p.def_impl(partial(compiled, _partitioned_p))


@_partitioned_p.def_abstract_eval
def _(*_, jaxpr, **__):
    return [ShapedArray(a.shape, a.dtype) for a in jaxpr.out_avals]


def _batching(arguments, dimensions, *, jaxpr, rule: Rule, strict, devices):
    """A mapped dimension is the first one of every array that has it, and may be cut like any other."""
    arguments = [a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip(arguments, dimensions, strict=True)]
    axes = tuple(None if d is None else 0 for d in dimensions)
    name = f"mapped{sum(name.startswith('mapped') for name in rule.units)}"
    size = next(a.shape[0] for a, axis in zip(arguments, axes, strict=True) if axis == 0)
    jaxpr = jax.make_jaxpr(jax.vmap(core.jaxpr_as_fun(jaxpr), in_axes=axes))(*arguments)
    operands = tuple(names if axis is None else (name, *names) for names, axis in zip(rule.operands, axes, strict=True))
    results = tuple((name, *names) for names in rule.results)
    rule = Rule(operands, results, {**rule.units, name: size}, partial(_mapped_plan, rule.plan, name, size, axes))
    out = _partitioned_p.bind(*arguments, jaxpr=jaxpr, rule=rule, strict=strict, devices=devices)
    return out, [0] * len(out)


def _mapped_plan(plan, name: str, size: int, axes, operands: list[Cut], results: list[Cut], sizes: Sizes) -> Plan:
    """Entries are independent: what cuts them cuts nothing else."""
    along = next((cut[name] for cut in (*operands, *results) if cut.get(name)), ())
    along = trimmed(along, size, sizes)

    def rest(cut: Cut) -> Cut:
        return {of: without(cut[of], along) for of in cut if of != name}

    inner = plan([rest(cut) for cut in operands], [rest(cut) for cut in results], sizes)
    cut_operands = [
        cut if axis is None else {**cut, name: along} for cut, axis in zip(inner.operands, axes, strict=True)
    ]
    cut_results = [{**cut, name: along} for cut in inner.results]
    return Plan(cut_operands, cut_results, jax.vmap(inner.function, in_axes=axes))


def _jvp(primals, tangents, *, jaxpr, **static):
    return _partitioned_p.bind(*primals, jaxpr=jaxpr, **static), derivative(jaxpr, primals, tangents)


def _lowering(context, *arguments, jaxpr, rule: Rule, strict, devices):
    if not is_partitioned(context):
        return lowered(context, jaxpr, arguments)
    split = _split(jaxpr, rule, _mesh(context.module_context.axis_context), strict)
    results = mlir.lower_fun(split)(context, *arguments)
    _name_calls(results, hashlib.sha256(f"{jaxpr} {rule}".encode()).hexdigest())
    return results


def _name_calls(results, name: str) -> None:
    """In the key of JAX's persistent cache of programs there is nothing of a partitioned function but its shapes: say
    which it is."""
    for result in results:
        operation = result.owner
        while operation.name != "stablehlo.custom_call":
            operation = operation.operands[0].owner
        operation.attributes["mhlo.frontend_attributes"] = mlir.ir.DictAttr.get({"jax_fp4": mlir.ir_attribute(name)})


mlir.register_lowering(_partitioned_p, _lowering)
batching.primitive_batchers[_partitioned_p] = _batching
ad.primitive_jvps[_partitioned_p] = _jvp
partial_eval.dce_rules[_partitioned_p] = kept_whole


# --- what XLA is told ---


def _split(jaxpr, rule: Rule, mesh: Mesh, is_strict: bool):
    """The function of `jaxpr` as XLA partitions it. 8-bit floats cross its border as bytes: XLA:CPU gathers them as
    float16."""
    sizes = dict(mesh.shape)
    cut_by = _beside_manual(mesh) if mesh.manual_axes else mesh

    def partition(_, operands, results):
        cuts = [
            [_cut(cut_by, array, names) for array, names in zip(arrays, of, strict=True)]
            for arrays, of in ((operands, rule.operands), (results, rule.results))
        ]
        plan = rule.plan(cuts[0], cuts[1], sizes)

        def function(*parts):
            with _record.paused(), use_abstract_mesh(NO_MESH), strict() if is_strict else contextlib.nullcontext():
                out = plan.function(*_typed(parts, jaxpr.in_avals))
            return [_bytes(a) for a in out]

        placed = [
            [NamedSharding(cut_by, _spec(cut, names)) for cut, names in zip(cuts, of, strict=True)]
            for cuts, of in ((plan.results, rule.results), (plan.operands, rule.operands))
        ]
        return mesh, function, placed[0], tuple(placed[1])

    def whole(*_):  # for its shapes alone
        return [jnp.zeros(a.shape, jnp.uint8 if _is_small_float(a.dtype) else a.dtype) for a in jaxpr.out_avals]

    text, factors = _rule_text(rule, jaxpr)
    call = custom_partitioning(whole)
    call.def_partition(partition, decode_shardings=False, sharding_rule=text, **factors)
    return lambda *arrays: _typed(call(*(_bytes(a) for a in arrays)), jaxpr.out_avals)


def _bytes(a):
    return lax.bitcast_convert_type(a, jnp.uint8) if _is_small_float(a.dtype) else a


def _typed(arrays, avals) -> list:
    return [
        lax.bitcast_convert_type(a, aval.dtype) if _is_small_float(aval.dtype) else a
        for a, aval in zip(arrays, avals, strict=True)
    ]


def _is_small_float(dtype) -> bool:
    return dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating)


def _rule_text(rule: Rule, jaxpr) -> tuple[str, dict[str, int]]:
    """The rule in Shardy's notation, and the sizes of factors that are no whole dimension anywhere."""
    factors = {name: f"n{i}" for i, name in enumerate(name for name, units in rule.units.items() if units > 1)}
    partly, wholly, rests = {}, set(), []

    def dimension(name, size: int) -> str:
        rest = size
        if name in factors:
            units = rule.units[name]
            assert size % units == 0, (rule, name, size)
            if size == units:
                wholly.add(factors[name])
                return factors[name]
            partly[factors[name]], rest = units, size // units
        rests.append(f"r{len(rests)}")
        if name not in factors:
            return rests[-1]
        partly[rests[-1]] = rest
        return f"({factors[name]} {rests[-1]})"

    def arrays(of, avals) -> str:
        return ", ".join(" ".join(map(dimension, names, aval.shape)) for names, aval in zip(of, avals, strict=True))

    text = f"{arrays(rule.operands, jaxpr.in_avals)} -> {arrays(rule.results, jaxpr.out_avals)}"
    return text, {factor: size for factor, size in partly.items() if factor not in wholly}


def _mesh(axes) -> Mesh:
    """Of the program that is lowered: that of its shardings, or inside shard_map; where they name none, one that has an
    axis for each prime factor of the number of devices, over which every sharding is one of a mesh."""
    if (mesh := getattr(axes, "mesh", None)) is not None:
        kinds = (AxisType.Manual if axis in axes.manual_axes else AxisType.Auto for axis in mesh.axis_names)
        return Mesh(mesh.devices, mesh.axis_names, axis_types=tuple(kinds))
    devices, mesh = np.array(axes.device_assignment), axes.abstract_mesh
    if mesh is not None and mesh.axis_names:
        return Mesh(devices.reshape(mesh.axis_sizes), mesh.axis_names)
    primes, rest = [], devices.size
    while rest > 1:
        primes.append(next(p for p in range(2, rest + 1) if rest % p == 0))
        rest //= primes[-1]
    return Mesh(devices.reshape(primes), tuple(f"devices{i}" for i in range(len(primes))))


def _spec(cut: Cut, names: Names) -> PartitionSpec:
    return PartitionSpec(*(cut.get(name) or None if name is not None else None for name in names))


def _cut(mesh: Mesh, array, names: Names) -> Cut:
    """The mesh axes along which an array lies; none for a dimension that lies otherwise."""
    if array.sharding.is_fully_replicated:
        return {}
    starts = _starts(mesh, array).reshape(*mesh.devices.shape, -1)
    return {name: _axes(mesh, starts[..., i]) for i, name in enumerate(names) if name is not None}


def _starts(mesh: Mesh, array) -> np.ndarray:
    """Where the part of each device begins, [devices, dimensions]."""
    if array.sharding.num_devices == mesh.size:
        places = array.sharding.devices_indices_map(array.shape)
        return np.array([[at.start or 0 for at in places[device]] for device in mesh.devices.flat])
    tiles = array.sharding._to_xla_hlo_sharding(len(array.shape))  # of fewer devices, which JAX knows no way to tell
    counts = tiles.tile_assignment_dimensions()
    order = np.argsort(tiles.tile_assignment_devices())
    places = np.stack(np.unravel_index(order, counts), -1)[:, : len(array.shape)]
    return places * [n // count for n, count in zip(array.shape, counts, strict=False)]


def _beside_manual(mesh: Mesh) -> Mesh:
    """Of the axes over which nobody mapped: inside a shard_map over the others XLA partitions the program of such a
    part of the devices, and numbers them from 0."""
    free = tuple(axis for axis in mesh.axis_names if axis not in mesh.manual_axes)
    return Mesh(mesh.devices[tuple(slice(None) if axis in free else 0 for axis in mesh.axis_names)], free)


def _axes(mesh: Mesh, starts: np.ndarray) -> Axes:
    """The axes, major first, along which parts that begin at `starts` follow one another."""
    first = {
        axis: int(np.take(starts, 1, i).flat[0] - starts.flat[0]) if mesh.shape[axis] > 1 else 0
        for i, axis in enumerate(mesh.axis_names)
    }
    axes = tuple(sorted((axis for axis, step in first.items() if step), key=lambda axis: -first[axis]))
    index, step = np.zeros(mesh.devices.shape, int), 1
    for axis in reversed(axes):
        at = mesh.axis_names.index(axis)
        along = np.arange(mesh.shape[axis]).reshape([-1 if i == at else 1 for i in range(index.ndim)])
        index, step = index + step * along, step * mesh.shape[axis]
    part = first[axes[-1]] if axes else 1
    return axes if np.array_equal(index * part, starts) else ()
