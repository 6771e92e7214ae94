"""Where operands lie on a mesh: which part of a global tensor is local, inside shard_map, and what that asks for.

Everything sharded runs as the same code: each device has its part of every operand, and knows by which mesh axes it was
cut (`Placement`). Inside the user's shard_map `specs=` and `gather=` say so.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32

from jax_fp4._errors import message

Axes = tuple[str, ...]
_NOT_CUT = PartitionSpec()


@dataclass(frozen=True)
class Specs:
    """The PartitionSpecs of the global operands: over the manual axes of the shard_map around the call or, at the level
    of jit, over Auto axes of the mesh in force. (Explicit axes need none: types say it.)

    x: of x [..., k]. kernel: of the kernel [k, n] (grouped: [g, k, n]) as it is passed, so that the axes of a
    WeightGather are in it too. With them amaxes are those of the global tensors, stochastic rounding draws by global
    position, and y is complete where k is sharded. Without them each local operand is a tensor of its own.
    """

    x: PartitionSpec = _NOT_CUT
    kernel: PartitionSpec = _NOT_CUT

    def __post_init__(self):
        for name in ("x", "kernel"):
            spec = getattr(self, name)
            if not isinstance(spec, PartitionSpec):
                shown, why = f"a {type(spec).__name__}", "it names the mesh axes of each dimension"
                fix = f'Specs({name}=jax.sharding.PartitionSpec("data", None))'
                raise TypeError(message("Specs", name, shown, "a PartitionSpec", why, fix))
            _refuse_repeated("Specs", name, [axis for axes in by_dimension(spec) for axis in axes])


def by_dimension(spec: PartitionSpec) -> tuple[Axes, ...]:
    return tuple(() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec)


def _refuse_repeated(op: str, name: str, axes: list[str]) -> None:
    if repeated := sorted({axis for axis in axes if axes.count(axis) > 1}):
        why, fix = "a mesh axis cuts one dimension, once", "each axis once"
        raise ValueError(message(op, name, f"uses {', '.join(repeated)} twice", "different axes", why, fix))


class Part(NamedTuple):
    """The mesh axes that cut each dimension of a tensor, major first; of groups of rows, those that cut the groups.

    halves: the columns are two runs, a gate's and what it multiplies, each of them cut. half: of which of them x is.
    """

    dims: tuple[Axes, ...]
    groups: Axes = ()
    halves: bool = False
    half: Literal[0, 1] = 0
    unflattened: bool = False  # `UNFLATTENED`

    @classmethod
    def of(cls, op: str, name: str, spec: PartitionSpec, ndim: int) -> "Part":
        dims = by_dimension(spec)
        if len(dims) > ndim:
            shown, needs = f"{spec}, of {len(dims)} dimensions", f"at most {ndim}"
            why, fix = "there is an entry for each dimension of the operand", "a shorter PartitionSpec"
            raise ValueError(message(op, name, shown, needs, why, fix))
        for axis in (axis for axes in dims for axis in axes):
            require_manual(op, name, axis)
        return cls(dims + ((),) * (ndim - len(dims)))

    def axes(self, first: int = 0) -> Axes:
        """All axes, of the dimensions from `first` on."""
        return tuple(axis for axes in self.dims[first:] for axis in axes)


WHOLE = Part(())  # of a tensor that is not cut
# The same, of which column-wise codes keep the leading dimensions where they can: flattened, XLA could not cut them.
UNFLATTENED = Part((), unflattened=True)


@dataclass(frozen=True)
class WeightGather:
    """A kernel that arrives as the shard of each device along mesh axes, and is gathered where it is multiplied (FSDP).

    axis_name: the axis, or axes major first, of the shard_map around the call. dim: of the kernel, which they cut.
    payload: what is moved. "quantized": each shard is quantized, under the amax of all, and packed bytes are gathered:
        the bits of a gather that is quantized afterwards, where shards end on blocks (of 16, or of the format; of tiles
        where weights have them). "high_precision": the compute dtype. None: "quantized" where that is so, else, unless
        strict() forbids it, "high_precision"; the report says which.
    reduce_dtype: in what the weight gradient is summed over the devices, the transpose of `jax.lax.all_gather`; None:
        the kernel's dtype.

    The backward gathers again, what it reads; only the shard is kept. Raises TypeError or ValueError for what is not
    described here.
    """

    axis_name: str | Axes
    dim: int
    payload: Literal["quantized", "high_precision"] | None = None
    reduce_dtype: Any = None

    def __post_init__(self):
        op = "WeightGather"
        axes = (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name
        if not isinstance(axes, tuple) or not axes or not all(isinstance(axis, str) for axis in axes):
            why, fix = "the kernel is cut by mesh axes", 'axis_name="fsdp"'
            shown = repr(self.axis_name)
            raise TypeError(message(op, "axis_name", shown, "a mesh axis or a tuple of some", why, fix))
        _refuse_repeated(op, "axis_name", list(axes))
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            why, fix = "it counts the dimensions of the kernel", "dim=0 for the rows of a kernel [k, n]"
            raise TypeError(message(op, "dim", repr(self.dim), "an integer", why, fix))
        if self.payload not in (payloads := (None, "quantized", "high_precision")):
            why, fix = "these can be moved", "payload=None, which takes the smaller one that is right"
            raise ValueError(message(op, "payload", repr(self.payload), f"one of {payloads}", why, fix))
        if self.reduce_dtype is not None and not jnp.issubdtype(self.reduce_dtype, jnp.floating):
            why, fix = "gradients are summed in it", "reduce_dtype=jnp.float32"
            raise TypeError(message(op, "reduce_dtype", repr(self.reduce_dtype), "a float dtype", why, fix))

    @property
    def axes(self) -> Axes:
        return (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name


class Placement(NamedTuple):
    """How the operands of y = x w lie. `kernel` is what is multiplied: after the gathers."""

    x: Part = WHOLE
    kernel: Part = WHOLE
    gathers: tuple[WeightGather, ...] = ()
    gated: bool = False  # whether y's columns are a gate's and then those that it multiplies

    @property
    def y(self) -> Part:
        """Of y, and of dy. Without Specs nothing is known of either operand."""
        if not self.x.dims:
            return WHOLE
        cut = self.kernel.dims[-1]
        return Part((*self.x.dims[:-1], cut), self.x.groups, halves=self.gated and bool(cut))

    @property
    def contracted(self) -> Axes:
        """The axes that cut k: y is the sum over them."""
        return self.x.dims[-1] if self.x.dims else ()

    def of_rows(self) -> "Placement":
        """With the leading dimensions of x flattened to rows."""
        if len(self.x.dims) < 2:
            return self
        rows = tuple(axis for axes in self.x.dims[:-1] for axis in axes)
        return self._replace(x=self.x._replace(dims=(rows, self.x.dims[-1])))

    def shard(self, ndim: int) -> Part:
        """Of the kernel as it is passed."""
        dims = list(self.kernel.dims or ((),) * ndim)
        for gather in self.gathers:
            dims[gather.dim] += gather.axes
        return Part(tuple(dims))

    def gathered_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of a kernel passed in `shape`."""
        full = list(shape)
        for gather in self.gathers:
            full[gather.dim] *= size_of(gather.axes)
        return tuple(full)


LOCAL = Placement()  # each operand is whole, as far as anybody says


def require_manual(op: str, name: str, axis: str) -> None:
    """An axis of the shard_map around the call."""
    try:
        lax.axis_size(axis)
    except NameError:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        why = f"inside shard_map here are the axes {manual}" if manual else "there is no shard_map around this call"
        fix = "a call inside jax.shard_map over a mesh that has it"
        raise ValueError(
            message(op, name, f"names the mesh axis {axis!r}", "an axis of the shard_map", why, fix)
        ) from None


def axes_and_size(op: str, name: str, axis_name: Any) -> tuple[Axes, int]:
    """The axes as a tuple, and how many devices they have together: of the shard_map that is being traced."""
    axes = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    mesh = jax.sharding.get_abstract_mesh()
    bound = mesh.manual_axes
    if not axes or any(axis not in bound for axis in axes):
        needs = f"one or more of {bound}" if bound else "a mesh axis of a surrounding shard_map"
        why = "it splits what is here over its devices" + ("" if bound else ", and there is none around this call")
        fix = "jax.shard_map(f, mesh=mesh, in_specs=..., out_specs=...) with that axis among its manual ones"
        raise ValueError(message(op, name, repr(axis_name), needs, why, fix))
    if len(set(axes)) < len(axes):
        why, fix = "each splits the experts once more", repr(tuple(dict.fromkeys(axes)))
        raise ValueError(message(op, name, repr(axis_name), "axes that differ", why, fix))
    return axes, math.prod(mesh.shape[axis] for axis in axes)


def place(
    op: str, x_ndim: int, kernel: Any, ndim: int, gather: WeightGather | None, specs: Specs | None,
    names: tuple[str, str, str] = ("gather", "specs", "kernel"),
) -> Placement:  # fmt: skip
    """The Placement of operands x, of x_ndim dimensions, and a kernel of ndim, as a user describes them."""
    gather_name, specs_name, kernel_name = names
    if specs is not None and not isinstance(specs, Specs):
        shown, why = f"a {type(specs).__name__}", "it says by which mesh axes the operands are cut"
        raise TypeError(message(op, specs_name, shown, "Specs", why, "Specs(x=PartitionSpec(...))"))
    of_x = of_kernel = WHOLE
    if specs is not None:
        of_x = Part.of(op, f"{specs_name}.x", specs.x, x_ndim)
        of_kernel = Part.of(op, f"{specs_name}.kernel", specs.kernel, ndim)
    gathers = ()
    if gather is not None:
        gather = _checked_gather(op, gather, kernel, ndim, of_kernel, gather_name, kernel_name)
        gathers = (gather,)
        if of_kernel.dims:
            dims = list(of_kernel.dims)
            dims[gather.dim] = dims[gather.dim][: -len(gather.axes)]
            of_kernel = Part(tuple(dims))
    if specs is not None:
        _check_product(op, specs_name, of_x, of_kernel)
        groups = of_kernel.dims[0] if ndim == 3 else ()
        of_x = of_x._replace(groups=groups)
    return Placement(of_x, of_kernel, gathers)


def _checked_gather(op, gather, kernel, ndim: int, part: Part, name: str, kernel_name: str) -> WeightGather:
    """`gather` with a dim that is not negative."""
    if not isinstance(gather, WeightGather):
        why, fix = "it says what gathers the kernel", "WeightGather('fsdp', dim=0), or a pair for two kernels"
        raise TypeError(message(op, name, f"a {type(gather).__name__}", "a WeightGather or None", why, fix))
    for axis in gather.axes:
        require_manual(op, f"{name}.axis_name", axis)
    if not -ndim <= gather.dim < ndim:
        shown, needs = f"{gather.dim}", f"{-ndim} to {ndim - 1}"
        raise ValueError(message(op, f"{name}.dim", shown, needs, f"the kernel has {ndim} dimensions", "dim=0"))
    gather = replace(gather, dim=gather.dim % ndim)
    known = varying(lax.axis_index(gather.axes))  # of a value that differs: nothing with check_vma=False
    if missing := [axis for axis in gather.axes if axis in known - varying(kernel)]:
        shown, why = f"the same on all devices along {', '.join(missing)}", f"{name} gathers its shards along that axis"
        raise ValueError(message(op, kernel_name, shown, "cut by it", why, f"{name}=None, or another in_specs"))
    if part.dims and part.dims[gather.dim][-len(gather.axes) :] != gather.axes:
        shown = f"PartitionSpec{part.dims}, of the kernel"
        needs = f"{gather.axes} as the last axes of dimension {gather.dim}"
        why = f"{name} gathers along them what specs say is cut"
        raise ValueError(message(op, "specs.kernel", shown, needs, why, "the PartitionSpec of the shard"))
    return gather


def _check_product(op: str, name: str, x: Part, kernel: Part) -> None:
    """Refuse parts of which there is no product without more movement."""
    *rows, k = x.dims
    if k != kernel.dims[-2]:
        shown, needs = f"cut by {k} along the contracted axis of x and by {kernel.dims[-2]} of the kernel", "the same"
        why, fix = "each device multiplies what it has", "a WeightGather of the kernel, or another in_specs"
        raise ValueError(message(op, name, shown, needs, why, fix))
    free = [axis for axes in (*kernel.dims[:-2], *kernel.dims[-1:]) for axis in axes]
    if both := sorted({axis for axes in rows for axis in axes} & set(free)):
        shown, why = f"cut by {', '.join(both)} along rows of x and of the kernel", "y would be cut twice by it"
        fix = "a WeightGather of the kernel along that axis"
        raise ValueError(message(op, name, shown, "different axes", why, fix))


def size_of(axes: Iterable[str]) -> int:
    return lax.axis_size(tuple(axes)) if (axes := tuple(axes)) else 1


def index_of(axes: Axes) -> Any:
    """The place of this device along `axes`, major first."""
    return lax.axis_index(axes).astype(jnp.uint32) if axes else jnp.uint32(0)


def largest(amax: Float32[Array, "..."], axes: Axes) -> Float32[Array, "..."]:
    """The largest over the devices along `axes`, by its bits: NaN above Inf above the rest."""
    if not axes:
        return amax
    return lax.bitcast_convert_type(lax.pmax(lax.bitcast_convert_type(amax, jnp.int32), axes), jnp.float32)


# --- inside shard_map with check_vma=True every value is typed with the mesh axes over which it varies ---


def varying(tree: Any) -> frozenset[str]:
    """The axes over which any leaf varies; none with check_vma=False, where JAX does not know."""
    return frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(tree)))


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """The same values, varying over `axes` too. The gradient of what did not is then summed over them."""

    def cast(leaf):
        missing = axes - varying(leaf)
        return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def alike(*trees: Any) -> tuple[Any, ...]:
    """The trees, all leaves varying over the same axes."""
    return vary(trees, varying(trees))
