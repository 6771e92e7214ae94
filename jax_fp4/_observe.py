"""What `diagnostics.collect` sees of a product: sums over its operands and results, tied to the values themselves.

While a collector is active a rule passes its results through `tag`, an identity that carries the sums as further
operands: whatever keeps the result in a program keeps them too, through jit, scan, remat and derivatives. Without a
collector nothing of this is traced. The context is part of jit's cache key.

All is kept as sums and maxima, which can be added up over devices; ratios are taken at the end.

`partial_eval.dce_rules`, which says that a tag lives as long as its values, is no documented API of JAX; nor is what
`_harvest` reads of equations.
"""

import dataclasses
import itertools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import batching, mlir, partial_eval
from jaxtyping import Array, Float, Int

from jax_fp4 import _record
from jax_fp4._array import QuantizedTensor, block_length
from jax_fp4._groups import group_of_rows
from jax_fp4._lowering import kept_whole, local
from jax_fp4._ops import dequantize
from jax_fp4._placement import Part, vary

observing = jax.make_user_context(default_value=False)

Phase = Literal["forward", "backward"]


class Sums(NamedTuple):
    """Of a value and what it stands for, both divided by `scale`, the largest magnitude of the latter: squares of small
    gradients would be 0 in float32. Where that is 0, they are not divided."""

    scale: Float[Array, ""]
    signal: Float[Array, ""]  # reference^2
    noise: Float[Array, ""]  # (reference - value)^2
    power: Float[Array, ""]  # value^2
    dot: Float[Array, ""]  # reference * value


class OperandSums(NamedTuple):
    amax: Float[Array, ""]
    saturated: Float[Array, ""]  # elements
    elements: Float[Array, ""]
    flushed: Float[Array, ""]  # blocks
    blocks: Float[Array, ""]  # that are not all zeros
    sums: Sums


class Tokens(NamedTuple):
    """The rows of each group: of all devices, where it is known how rows and groups lie on them, else of this one."""

    whole: Int[Array, " g"] | None = None
    local: Int[Array, " g"] | None = None


class Forward(NamedTuple):
    x: OperandSums
    kernel: OperandSums
    product: Sums
    tokens: Tokens


class Backward(NamedTuple):
    dy: OperandSums
    dgrad: Sums | None
    wgrad: Sums | None


class Site(NamedTuple):
    """A call in Python, whose forward and backward are one layer. A trace that runs again is the same call."""

    name: str  # the path of its layer, or the op, and which kernel of several
    number: int  # in this process


_numbers = itertools.count()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seen:
    """What one run of a tag saw."""

    record: Any  # Forward or Backward
    site: Site = dataclasses.field(metadata={"static": True})
    phase: Phase = dataclasses.field(metadata={"static": True})


def site(op: str, recipe: object | None, kernel: str = "") -> Site | None:
    """Of a call that is traced now. None where nobody collects and for what is not quantized."""
    if not observing.value or recipe is None:
        return None
    return Site("/".join(filter(None, [_record.path() or op, kernel])), next(_numbers))


# --- the tag ---

tag_p = core.Primitive("jax_fp4_observe")
tag_p.multiple_results = True


def tag(values: list[Any], record: Forward | Backward, site: Site) -> list[Any]:
    """The values, which from here on bring the record with them."""
    seen = Seen(record, site, "forward" if isinstance(record, Forward) else "backward")
    leaves, tree = jax.tree.flatten(seen)
    return tag_p.bind(*values, *leaves, count=len(values), tree=tree)


@tag_p.def_abstract_eval
def _(*operands, count, tree):
    return operands[:count]


def _batching(operands, dimensions, *, count, tree):
    """Of a batch there is a record for each entry, along the first axis."""
    size = next(a.shape[d] for a, d in zip(operands, dimensions, strict=True) if d is not None)
    leaves = [batching.bdim_at_front(a, d, size) for a, d in zip(operands[count:], dimensions[count:], strict=True)]
    return tag_p.bind(*operands[:count], *leaves, count=count, tree=tree), dimensions[:count]


mlir.register_lowering(tag_p, lambda context, *operands, count, tree: operands[:count])
batching.primitive_batchers[tag_p] = _batching
partial_eval.dce_rules[tag_p] = kept_whole


# --- sums ---


def of_forward(operands: tuple[Any, Any, Any, Any], y, reference, group_sizes, part: Part) -> Forward:
    """operands: x and kernel in high precision, as they were multiplied for the reference, and for y. part: x's."""
    x, kernel, product = local(_forward)(*operands, y, reference, group_sizes)
    return Forward(x, kernel, product, _tokens(group_sizes, part))


def _tokens(group_sizes, part: Part) -> Tokens:
    if group_sizes is None or not (part.dims or part.groups):
        return Tokens(local=group_sizes)
    rows = part.dims[0] if part.dims else ()
    if rows:
        group_sizes = jax.lax.psum(vary(group_sizes, frozenset(rows)), rows)
    if part.groups:
        group_sizes = jax.lax.all_gather(vary(group_sizes, frozenset(part.groups)), part.groups, tiled=True)
    return Tokens(whole=group_sizes)


def _forward(x, kernel, qx, qw, y, reference, group_sizes) -> tuple[OperandSums, OperandSums, Sums]:
    if isinstance(kernel, QuantizedTensor):  # frozen: the values are what it says
        kernel, qw = dequantize(kernel, x.dtype), None
    of_kernel = _operand(kernel.astype(x.dtype), qw, None)
    return _operand(x, qx, group_sizes), of_kernel, _sums(y, reference)


def of_backward(dy, q, group_sizes, dgrad: tuple[Any, Any], wgrad: tuple[Any, Any]) -> Backward:
    """dgrad, wgrad: (gradient, reference), of None where it is not needed."""
    return local(_backward)(dy, q, group_sizes, dgrad, wgrad)


def _backward(dy, q, group_sizes, dgrad, wgrad) -> Backward:
    products = (None if value is None else _sums(value, reference) for value, reference in (dgrad, wgrad))
    of_dx, of_dw = products
    return Backward(_operand(dy, q, group_sizes), of_dx, of_dw)


def _sums(value: Array, reference: Array) -> Sums:
    value, reference = value.astype(jnp.float32), reference.astype(jnp.float32)
    scale = jnp.max(jnp.abs(reference), initial=0)
    v, r = (a / jnp.where(scale == 0, 1, scale) for a in (value, reference))
    return Sums(scale, jnp.sum(r * r), jnp.sum(jnp.square(r - v)), jnp.sum(v * v), jnp.sum(r * v))


def _operand(a: Float[Array, "*b r k"], q: Any, group_sizes) -> OperandSums:
    """q: `a` quantized, or what is not quantized."""
    elements = jnp.float32(a.size)
    if group_sizes is not None:  # the tail may hold anything
        live = group_of_rows(group_sizes, a.shape[0]) < group_sizes.shape[0]
        a, elements = jnp.where(live[:, None], a, 0), jnp.sum(live, dtype=jnp.float32) * a.shape[1]
    a = a.astype(jnp.float32)
    amax, none = jnp.max(jnp.abs(a), initial=0), jnp.float32(0)
    if not isinstance(q, QuantizedTensor):
        return OperandSums(amax, none, elements, none, none, _sums(a, a))
    value, bound = dequantize(q, jnp.float32).reshape(a.shape), _bound(q).reshape(a.shape)
    saturated = (jnp.abs(a) > bound) & (bound > 0)
    holds, left = (_any_in_blocks(v != 0, q) for v in (a, value))
    beyond, flushed, blocks = (jnp.sum(flags, dtype=jnp.float32) for flags in (saturated, holds & ~left, holds))
    return OperandSums(amax, beyond, elements, flushed, blocks, _sums(value, a))


def _bound(q: QuantizedTensor) -> Array:
    """The largest value that each element could have under its scales."""
    if q.codes.dtype == jnp.uint8:  # two codes of 6
        largest = jnp.full_like(q.codes, 0x77)
    else:
        largest = jnp.full_like(q.codes, jnp.finfo(q.codes.dtype).max)
    return dequantize(dataclasses.replace(q, codes=largest), jnp.float32)


def _any_in_blocks(flags: Array, q: QuantizedTensor) -> Array:
    """Whether any element of a block is set. Where one scale is for the whole tensor, an element is a block."""
    flags = jnp.swapaxes(flags, -1, -2) if q.axis == 0 else flags
    tile, length = 1 if q.block is None else q.block[0], block_length(q)
    *lead, rows, extent = flags.shape
    if tile == 1:  # rows may be of any number of dimensions
        lead, rows = [], math.prod([*lead, rows])
    flags = flags.reshape(*lead, rows, extent)
    padding = [(0, 0)] * len(lead) + [(0, -rows % tile), (0, -extent % length)]
    flags = jnp.pad(flags, padding)
    shape = *lead, flags.shape[-2] // tile, tile, flags.shape[-1] // length, length
    return jnp.any(flags.reshape(shape), axis=(-3, -1))


# --- of several devices ---


def merged(seen: Any) -> Any:
    """Records stacked along their first axis, as one: of a tensor whose parts they were. Tokens of which only the local
    ones are known stay stacked."""

    def of(node):
        if isinstance(node, Sums):
            top = jnp.max(node.scale, axis=0)
            # Of parts that are all zeros, which have no scale, a factor may be inf, and the terms are 0.
            scale, whole = (jnp.where(a == 0, 1, a) for a in (node.scale, top))
            factor = jnp.square(scale / whole)
            terms = {n: jnp.sum(jnp.where(a == 0, 0, a * factor), axis=0) for n, a in node._asdict().items()}
            return Sums(**(terms | {"scale": top}))
        if isinstance(node, OperandSums):
            counts = {name: jnp.sum(getattr(node, name), axis=0) for name in node._fields[1:5]}
            return OperandSums(amax=jnp.max(node.amax, axis=0), sums=of(node.sums), **counts)
        if isinstance(node, Tokens) and node.whole is not None:
            return Tokens(whole=jnp.max(node.whole, axis=0))
        return node

    return jax.tree.map(of, seen, is_leaf=lambda node: isinstance(node, Sums | OperandSums | Tokens))
