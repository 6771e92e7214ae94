"""FSDP: a kernel that each device has a shard of, gathered as packed bytes (docs/numerics.md, section 5).

A shard that ends on block borders, quantized under the amax of all shards, holds the very bytes of the gathered
kernel's blocks. So what is moved is what the product reads: one plane, blocked along its contracted axis.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jax_fp4 import _record
from jax_fp4._amax import amaxes_of_whole
from jax_fp4._array import QuantizedTensor
from jax_fp4._errors import UnsupportedError, is_strict, message
from jax_fp4._formats import Quantization
from jax_fp4._ops import quantize
from jax_fp4._placement import Axes, Placement, WeightGather, size_of
from jax_fp4._recipe import Recipe, Scaling, scaling_of
from jax_fp4._rules import named
from jax_fp4.checkpoint_policies import QUANTIZED

Shard = Float[Array, "*g k n"]


@jax.named_scope("gather")
def gathered(shard: Shard, placement: Placement, dtype) -> Float[Array, "*g k n"]:
    """The kernel in high precision, moved in the compute dtype."""
    kernel = shard.astype(dtype)
    for gather in placement.gathers:
        kernel = lax.all_gather(kernel, gather.axes, axis=gather.dim, tiled=True)
    return kernel


def quantized_plane(
    shard: Shard, scaling: Scaling, axis: int, placement: Placement, dtype, scale=None, amax=None
) -> QuantizedTensor:
    """The kernel quantized along `axis`, 0 (k) or -1 (n), whichever way it is moved. amax: its own, where known."""
    flags: dict[str, Any] = dict(
        axis=axis, batch_dims=shard.ndim - 2, dtype=dtype, scale=scale, amax=amax, **scaling.flags
    )
    if moves_packed(shard.shape, scaling, axis, placement):
        plane = named(quantize(shard, specs=placement.shard(shard.ndim), **flags))
        return packed_plane(plane, placement)
    return quantize(gathered(shard, placement, dtype), specs=placement.kernel, **flags)


@jax.named_scope("fp4.quantize")
def amax_of_kernel(shard: Shard, placement: Placement, dtype) -> Float[Array, "*g"] | None:
    """The gathered kernel's, found in the shards before any plane is made, under the name by which a policy of
    jax.checkpoint keeps it. None where each shard has experts of its own."""
    ndim, q = shard.ndim, Quantization(compute_dtype=jnp.dtype(dtype).name)
    if any(gather.dim < ndim - 2 for gather in placement.gathers):
        return None
    (amax,) = amaxes_of_whole("quantize", shard, None, placement.shard(ndim), ndim - 2, q, (-1,), None, is_strict())
    return None if amax is None else checkpoint_name(amax, QUANTIZED)


@jax.named_scope("gather")
def packed_plane(plane: QuantizedTensor, placement: Placement) -> QuantizedTensor:
    """A plane of the kernel from those of its shards: bytes of codes and scales."""
    for gather in placement.gathers:
        plane = _gather_plane(plane, gather)
    return plane


def _gather_plane(q: QuantizedTensor, gather: WeightGather) -> QuantizedTensor:
    ndim = q.ndim
    along_rows, of_groups = gather.dim == ndim - 2, gather.dim < ndim - 2
    blocked = along_rows == (q.axis == 0) and not of_groups

    def moved(part, axis: int):
        words = lax.bitcast_convert_type(part, jnp.uint8) if part.dtype.itemsize == 1 else part
        words = joined(words, gather.axes, axis)
        return lax.bitcast_convert_type(words, part.dtype)

    at = 0 if of_groups else -1 if blocked else -2  # in the stored form
    codes = moved(q.codes, at % ndim)
    scales, amax = q.block_scale, q.amax
    if of_groups or q.block is not None:  # otherwise one for the tensor, the same on all devices
        scales = moved(scales, at % scales.ndim)
    if of_groups and amax is not None:
        amax = moved(amax, 0)
    extent = q.extent * (size_of(gather.axes) if blocked else 1)
    return dataclasses.replace(q, codes=codes, block_scale=scales, amax=amax, extent=extent)


def joined(part: Any, axes: Axes, axis: int) -> Any:
    """The parts of all devices along `axes`, one after another along `axis`. Bytes are moved as they lie, then put in
    order four at a time where they can: XLA would transpose single bytes, on both sides of a gather along `axis`."""
    if axis == 0:
        return lax.all_gather(part, axes, tiled=True)
    parts = lax.all_gather(part, axes)
    of_words = part.dtype == jnp.uint8 and axis == part.ndim - 1 and part.shape[-1] % 4 == 0
    if of_words:
        parts = lax.bitcast_convert_type(parts.reshape(*parts.shape[:-1], -1, 4), jnp.uint32)
    parts = jnp.moveaxis(parts, 0, axis)
    parts = parts.reshape(*parts.shape[:axis], -1, *parts.shape[axis + 2 :])
    if not of_words:
        return parts
    return lax.bitcast_convert_type(parts, jnp.uint8).reshape(*parts.shape[:-1], -1)


def scatter_parts(placement: Placement) -> int:
    """In how many parts the weight gradient of groups is best made, of rows that end up on one device: as it is sent,
    which XLA would have to reorder it for. 1: in one, as everywhere else."""
    gathers = placement.gathers
    return size_of(gathers[0].axes) if [gather.dim for gather in gathers] == [1] else 1


@jax.named_scope("scatter")
def scattered(dw: Float[Array, "*g k n"] | Float[Array, "parts g p n"], placement: Placement, dtype) -> Shard:
    """The shard of the sum over the devices of dw (of groups, in `scatter_parts`), in the dtype that dw has."""
    if dw.ndim > 3:
        return lax.psum_scatter(dw, placement.gathers[0].axes).astype(dtype)
    for gather in reversed(placement.gathers):
        dw = lax.psum_scatter(dw, gather.axes, scatter_dimension=gather.dim, tiled=True)
    return dw.astype(dtype)


def reduce_dtype(placement: Placement, kernel_dtype) -> Any:
    """What the weight gradient is rounded to before it is summed over devices, if it is."""
    given = [gather.reduce_dtype for gather in placement.gathers if gather.reduce_dtype is not None]
    return jnp.dtype(given[0]) if given else kernel_dtype


# --- what can be moved ---


def moves_packed(shape: tuple[int, ...], scaling: Scaling, axis: int, placement: Placement) -> bool:
    """Whether a plane of shards of `shape` is moved packed."""
    wanted = placement.gathers[0].payload
    return wanted != "high_precision" and not _inside_a_block(shape, scaling, axis, placement)


def _inside_a_block(shape: tuple[int, ...], scaling: Scaling, axis: int, placement: Placement) -> str:
    """What of the shards ends inside a block; "" if nothing does."""
    ndim = len(shape)
    for gather in placement.gathers:
        if gather.dim < ndim - 2:
            continue
        blocked = (gather.dim == ndim - 2) == (axis == 0)
        length = scaling.length if blocked else scaling.tile
        if shape[gather.dim] % length:
            return f"{shape[gather.dim]} along dimension {gather.dim}, in blocks of {length}"
    return ""


def check_payload(
    op: str, name: str, shape: tuple[int, ...], recipe: Recipe | None, placement: Placement, frozen: bool
) -> None:
    """Refuse a payload that would not give the bits of the gathered kernel; record what is moved for each product that
    quantizes the kernel. shape: of the shard."""
    planes = {product: scaling_of(recipe, product, "kernel") for product in ("forward", "dgrad")}
    planes = {product: scaling for product, scaling in planes.items() if scaling is not None}
    gather = placement.gathers[0]
    if not planes and gather.payload == "quantized" and not frozen:
        why, fix = "nothing is quantized here", "payload=None, or a recipe"
        raise ValueError(message(op, f"{name}.payload", "'quantized'", "a recipe", why, fix))
    for product, scaling in planes.items():
        reason = _inside_a_block(shape, scaling, 0 if product == "forward" else -1, placement)
        if reason and (frozen or gather.payload == "quantized"):
            shown = f"'quantized' for a shard of {shape}" if not frozen else f"of a frozen shard of {shape}"
            fix = "shards that end on blocks" + ("" if frozen else ", or payload='high_precision'")
            why = f"the {product} product quantizes {reason}"
            raise ValueError(message(op, f"{name}.payload", shown, "shards of whole blocks", why, fix))
        if reason and gather.payload is None and is_strict():
            shown, needs = f"None for a shard of {shape}", "shards of whole blocks"
            why = f"the {product} product quantizes {reason}, and strict() forbids a gather in high precision"
            fix = "shards that end on blocks, or payload='high_precision'"
            raise UnsupportedError(message(op, f"{name}.payload", shown, needs, why, fix))
        packed = frozen or (gather.payload != "high_precision" and not reason)
        payload = "quantized" if packed else "high_precision"
        _record.record(_record.GatherEvent(_record.path(), op, product, shape, payload, reason))
