"""What each backward mode multiplies and keeps: the table of docs/numerics.md, section 4, as code."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, UInt32

from jax_fp4 import reference
from jax_fp4._array import QuantizedTensor, block_length, scaling, stored_dtypes
from jax_fp4._errors import message
from jax_fp4._formats import padded
from jax_fp4._gather import (
    amax_of_kernel,
    gathered,
    packed_plane,
    quantized_plane,
    reduce_dtype,
    scatter_parts,
    scattered,
)
from jax_fp4._ops import Made
from jax_fp4._placement import LOCAL, UNFLATTENED, WHOLE, Part, Placement
from jax_fp4._planes import quantized
from jax_fp4._products import contraction, grouped_product, product
from jax_fp4._recipe import BackwardMode, Recipe, Scaling, draws, mode_of, scaling_of
from jax_fp4._rules import is_kept, keep
from jax_fp4.checkpoint_policies import HIGH_PRECISION, PRODUCT

# A frozen kernel: blocked along k, or (blocked along n, blocked along k) as quantize_transpose returns it.
FrozenKernel = QuantizedTensor | tuple[QuantizedTensor, QuantizedTensor]
Kernel = Float[Array, "k n"] | FrozenKernel


class Residuals(NamedTuple):
    """What the backward reads. A part that nobody needs holds arrays of shape (0,): the tree never changes."""

    x: Float[Array, "m k"] | QuantizedTensor  # for dw
    kernel: Float[Array, "k n"] | QuantizedTensor  # for dx
    seed: UInt32[Array, "2"]  # of dy's stochastic rounding
    amax: Float[Array, "*g"] | None = None  # of a kernel that is gathered and quantized again, if it is the forward's
    beside: Any = None  # while diagnostics are collected, what the same product in high precision keeps


class Needs(NamedTuple):
    """Which operands of the product are differentiated."""

    x: bool
    kernel: bool


class Planes(NamedTuple):
    """An operand for the forward (an array where nothing is quantized) and, only where a product of the backward
    quantizes it too and is needed, for that."""

    forward: Any
    backward: QuantizedTensor | None = None
    amax: Float[Array, "*g"] | None = None  # of a kernel, where the plane that is gathered again has the same


class Scales(NamedTuple):
    """What the three operands are multiplied by under delayed scaling, [] or [g]; None makes scales of the values."""

    x: Any = None
    kernel: Any = None
    dy: Any = None


def planes_of_x(
    x: Float[Array, "*m k"], recipe: Recipe, backward: bool, group_sizes=None, made: Made | None = None, scale=None,
    part: Part = WHOLE,
) -> Planes:  # fmt: skip
    """Q(x) row-wise and, if `backward`, column-wise where the weight gradient wants it."""
    column = scaling_of(recipe, "wgrad", "x") if backward else None
    part = _kept_apart(part, group_sizes)
    row, column = quantized(
        x, scaling_of(recipe, "forward", "x"), column, made=made, group_sizes=group_sizes, scale=scale, specs=part
    )
    return Planes(x if row is None else row, column)


def _kept_apart(part: Part, group_sizes) -> Part:
    """Of what `contraction` takes: its column-wise codes keep the leading dimensions."""
    return UNFLATTENED if part == WHOLE and group_sizes is None else part


def planes_of_kernel(
    kernel: Any, recipe: Recipe | None, dtype, backward: bool, scale=None, placement: Placement = LOCAL
) -> Planes:
    """Q(w) blocked along k and, if `backward`, along n where the input gradient wants it. float32 master weights are
    rounded to the compute dtype on the way; a frozen kernel is what it is. What a WeightGather gathers is blocked along
    k alone: the backward gathers again."""
    backward = backward and not placement.gathers
    along_rows = scaling_of(recipe, "dgrad", "kernel") if backward else None
    column = scaling_of(recipe, "forward", "kernel")
    if is_frozen(kernel):
        plane = packed_plane(along_k(kernel), placement)
        return Planes(plane, along_n(kernel) if along_rows is not None else None)
    if placement.gathers:
        if column is None:
            return Planes(gathered(kernel, placement, dtype))
        again, _ = _plane_for_dx(recipe)
        # one for both planes: to find it anew is to read the whole shard, and to ask the other devices
        alike = again is not None and all(s.format == "nvfp4" and not s.row_scaled for s in (column, again))
        amax = amax_of_kernel(kernel, placement, dtype) if alike else None
        return Planes(quantized_plane(kernel, column, 0, placement, dtype, scale, amax), amax=amax)
    # each expert's matrix is a tensor of its own
    flags: dict[str, Any] = dict(batch_dims=kernel.ndim - 2, dtype=dtype, scale=scale, specs=placement.kernel)
    row, column = quantized(kernel, along_rows, column, **flags)
    return Planes(kernel if column is None else column, row)


def gathered_again(
    shard: Any, recipe: Recipe | None, dtype, placement: Placement, scale=None, amax=None
) -> Float[Array, "*g k n"] | QuantizedTensor:
    """What the input gradient multiplies of a kernel of which a shard was kept."""
    if isinstance(shard, QuantizedTensor):  # frozen, and the right plane
        return packed_plane(shard, placement)
    scaling, axis = _plane_for_dx(recipe)
    if scaling is None:
        return gathered(shard, placement, dtype)
    return quantized_plane(shard, scaling, axis, placement, dtype, scale, amax)


@jax.named_scope("forward")
def operands(
    x, kernel: Any, recipe: Recipe | None, needs: Needs, group_sizes=None, made: Made | None = None,
    scales: Scales | None = None, placement: Placement = LOCAL,
) -> tuple[Planes, Planes]:  # fmt: skip
    """Q(x) and Q(w): what y = x w multiplies, and with it what only products of the backward that quantize read. made:
    what x is made of, where that is known."""
    scales = scales or Scales()
    qw = planes_of_kernel(kernel, recipe, x.dtype, needs.x, scales.kernel, placement)
    if recipe is None:
        return Planes(x), qw
    return planes_of_x(x, recipe, needs.kernel, group_sizes, made, scales.x, placement.x), qw


@jax.named_scope("forward")
def multiply(
    x: Planes, kernel: Planes, dtype, group_sizes=None, *, compute, bias=None, bias_weights=None
) -> Float[Array, "*m n"]:
    """y = x w + b, [m,n] = [m,k] @ [k,n], or for each group [m,n] = [m,k] @ [g,k,n]. Of two arrays in `compute`."""
    lhs, rhs = x.forward, kernel.forward
    if group_sizes is None:
        y = product(lhs, _computed(rhs, compute), dtype, bias)
    else:
        y = grouped_product(lhs, rhs, group_sizes, dtype, compute=compute, bias=bias, bias_weights=bias_weights)
    return checkpoint_name(y, PRODUCT)


def residuals(
    x, kernel: Any, seed, qx: Planes, qw: Planes, recipe: Recipe | None, needs: Needs, group_sizes=None,
    placement: Placement = LOCAL,
) -> Residuals:  # fmt: skip
    """What the backward will read, of the arguments and of what `operands` made of them."""
    match mode_of(recipe, "wgrad"):
        case BackwardMode.DEFAULT:
            assert recipe is not None
            for_dw = keep(qx.backward, lambda: planes_of_x(x, recipe, True, group_sizes, part=placement.x).backward)
        case BackwardMode.UNQUANT:
            for_dw = keep(checkpoint_name(x, HIGH_PRECISION) if needs.kernel else None, lambda: x)
        case BackwardMode.DEQUANT:
            for_dw = keep(qx.forward if needs.kernel else None, lambda: qx.forward)
    for_dx = _for_dx(x.dtype, kernel, qw, recipe, needs, placement)
    draw = seed if draws(recipe) and seed is not None else jnp.zeros(0, jnp.uint32)
    amax = None if qw.amax is None else keep(qw.amax if needs.x else None, lambda: qw.amax)
    return Residuals(_as_bytes(for_dw), _as_bytes(for_dx), draw, amax)


def _plane_for_dx(recipe: Recipe | None) -> tuple[Scaling | None, Literal[-1, 0]]:
    """How a kernel that is gathered again is quantized, and along which axis."""
    match mode_of(recipe, "dgrad"):
        case BackwardMode.DEFAULT:
            return scaling_of(recipe, "dgrad", "kernel"), -1
        case BackwardMode.UNQUANT:
            return None, 0
        case BackwardMode.DEQUANT:
            return scaling_of(recipe, "forward", "kernel"), 0


def _for_dx(dtype, kernel: Any, qw: Planes, recipe: Recipe | None, needs: Needs, placement: Placement) -> Any:
    mode = mode_of(recipe, "dgrad")
    if placement.gathers or mode is BackwardMode.UNQUANT:
        # Not its cast to the compute dtype: the parameter is alive anyway, a cast would be a copy.
        def w():
            if not is_frozen(kernel):
                return kernel
            return along_n(kernel) if mode is BackwardMode.DEFAULT else along_k(kernel)

        return keep(w() if needs.x else None, w)
    if mode is BackwardMode.DEQUANT:
        return keep(qw.forward if needs.x else None, lambda: qw.forward)
    return keep(qw.backward, lambda: planes_of_kernel(kernel, recipe, dtype, True).backward)


def _as_bytes(part: Any) -> Any:
    """A residual whose 8-bit floats are bytes. jax.checkpoint rounds the float residuals that its policy saves "to
    their own precision", which for float8_e4m3fn is one that ends at 240: larger values, and most tensors have one,
    would become NaN."""
    if not isinstance(part, QuantizedTensor):
        return part
    return jax.tree.map(lambda a: lax.bitcast_convert_type(a, jnp.uint8) if a.dtype.itemsize == 1 else a, part)


def _from_bytes(part: Any) -> Any:
    if not isinstance(part, QuantizedTensor):
        return part
    typed = dict(zip(("codes", "block_scale"), stored_dtypes(part.format), strict=True))
    return dataclasses.replace(
        part, **{name: lax.bitcast_convert_type(getattr(part, name), dtype) for name, dtype in typed.items()}
    )


def gradients(
    dy: Float[Array, "*m n"],
    kept: Residuals,
    recipe: Recipe | None,
    dtypes: tuple[Any, Any],
    group_sizes=None,
    scales: Scales | None = None,
    placement: Placement = LOCAL,
) -> tuple[Array | None, Array | None, Array | None]:
    """(dx, dw) of `multiply`, None for what nobody differentiates, and the amax of dy if it was quantized. dy has the
    compute dtype; products in `default` quantize it, once for both where they agree; others use it as it is, beside
    high-precision operands (unquant) or the values the forward multiplied (dequant)."""
    scales = scales or Scales()
    needs = Needs(is_kept(kept.kernel), is_kept(kept.x))
    with jax.named_scope("backward"):  # in a trace: once for both
        row, column = quantize_gradient(dy, recipe, kept.seed, needs, group_sizes, scales.dy, placement.y)
    amax = next((q.amax for q in (row, column) if q is not None), None)
    x_dtype, kernel_dtype = dtypes
    x, kernel = _from_bytes(kept.x), _from_bytes(kept.kernel)
    dx: Any = None
    dw: Any = None
    if needs.x:
        with jax.named_scope("dgrad"):
            if placement.gathers:
                # After dy: XLA would merge it with the gather of the forward, and keep the whole kernel from there on.
                kernel, dy = lax.optimization_barrier((kernel, dy))
                kernel = gathered_again(kernel, recipe, dy.dtype, placement, scales.kernel, kept.amax)
            dx = _backward_product(dy if row is None else row, kernel.mT, x_dtype, dy.dtype, group_sizes)
    if needs.kernel:
        along_m = dy if column is None else column
        of_sum = reduce_dtype(placement, kernel_dtype)
        with jax.named_scope("wgrad"):
            if group_sizes is None:
                dw = contraction(_computed(x, dy.dtype), _computed(along_m, dy.dtype), of_sum)
            else:
                parts = scatter_parts(placement)
                dw = grouped_product(x.mT, along_m, group_sizes, of_sum, compute=dy.dtype, parts=parts)
            dw = scattered(dw, placement, kernel_dtype)
    if placement.gathers and needs.x and needs.kernel:
        # The gather hides behind dw, the scatter behind dx. Left alone, XLA puts dw off to the end of the backward,
        # where the whole gradients of many layers wait for their turn to be scattered.
        dx, dw = lax.optimization_barrier((dx, dw))
    return dx, dw, amax


def quantize_gradient(
    dy: Float[Array, "*m n"], recipe: Recipe | None, seed, needs: Needs, group_sizes=None, scale=None,
    part: Part = WHOLE,
):  # fmt: skip
    """Q(dy) along n for dx and along m for dw: what is needed of the two, and quantized."""
    row = scaling_of(recipe, "dgrad", "dy") if needs.x else None
    column = scaling_of(recipe, "wgrad", "dy") if needs.kernel else None
    part = _kept_apart(part, group_sizes)
    return quantized(dy, row, column, seed=seed, group_sizes=group_sizes, scale=scale, specs=part)


def _backward_product(lhs, rhs, dtype, compute, group_sizes) -> Array:
    """dx = dy w^T, [m,k] = [m,n] @ [n,k]; with groups [m,n] @ [g,n,k]. What is no array is quantized along the
    contracted axis beside a quantized dy, and blocked along any axis beside dy itself, which it meets in the compute
    dtype."""
    if group_sizes is not None:
        return grouped_product(lhs, rhs, group_sizes, dtype, compute=compute, transposed=True)
    return product(_computed(lhs, compute), _computed(rhs, compute), dtype)


def _computed(operand: Any, compute) -> Any:
    """An operand as a product takes it: arrays, master weights among them, in the compute dtype."""
    return operand if isinstance(operand, QuantizedTensor) else operand.astype(compute)


def is_frozen(kernel: Any) -> bool:
    return isinstance(kernel, QuantizedTensor | tuple)


def along_k(kernel: FrozenKernel) -> QuantizedTensor:
    return kernel[1] if isinstance(kernel, tuple) else kernel


def along_n(kernel: FrozenKernel) -> QuantizedTensor:
    """The plane of a frozen kernel that the default input gradient reads: given, or the transposed codes of tiles."""
    return kernel[0] if isinstance(kernel, tuple) else transpose_tiles(kernel)


def require_along_n(op: str, name: str, kernel: Any, recipe: Recipe | None) -> None:
    """Where dx is needed: the default mode reads that plane of a frozen kernel."""
    if not has_along_n(kernel, recipe):
        raise ValueError(
            message(
                op,
                name,
                f"{kernel!r} with block={kernel.block}",
                "its plane blocked along n too",
                "backward_mode='default' multiplies dy by it, and only square tiles can be turned",
                f"the pair quantize_transpose({name}), tiles as `block`, or another backward mode",
            )
        )


def has_along_n(kernel: Any, recipe: Recipe | None) -> bool:
    """Whether a kernel has what the input gradient reads of it."""
    default = scaling_of(recipe, "dgrad", "kernel") is not None
    return not default or not isinstance(kernel, QuantizedTensor) or _turns(kernel)


def _turns(q: QuantizedTensor) -> bool:
    """Whether the plane blocked along the other axis holds the same codes: of tiles, or under one scale."""
    return q.block is None or q.block[0] == q.block[1]


def transpose_tiles(q: QuantizedTensor) -> QuantizedTensor:
    """The other plane of a tile-scaled kernel: the same codes and scales, transposed. [n, k/2] -> [k, n/2]."""
    rows, extent = q.codes.shape[-2], q.extent
    nvfp4 = q.format == "nvfp4"
    codes = reference.unpack(q.codes) if nvfp4 else q.codes
    turned = jnp.swapaxes(codes, -1, -2)[..., :extent, :]
    turned = jnp.pad(turned, [(0, 0)] * (turned.ndim - 1) + [(0, padded(rows, block_length(q)) - rows)])
    scale = q.block_scale
    if q.block is not None:
        scale = _transpose_scales(q, rows)
    return dataclasses.replace(
        q,
        codes=reference.pack(turned) if nvfp4 else turned,
        block_scale=scale,
        axis=-1 if q.axis == 0 else 0,
        extent=rows,
    )


def _transpose_scales(q: QuantizedTensor, rows: int) -> Array:
    """One scale for each tile; nvfp4 and mxfp8 repeat it over the rows of the plane."""
    assert q.block is not None
    if scaling(q) == "float8_block":
        return jnp.swapaxes(q.block_scale, -1, -2)
    scale = lax.bitcast_convert_type(q.block_scale, jnp.uint8)[..., :: q.block[0], :]
    scale = jnp.repeat(jnp.swapaxes(scale, -1, -2), q.block[0], axis=-2)[..., : q.extent, :]
    return lax.bitcast_convert_type(scale, q.block_scale.dtype)
