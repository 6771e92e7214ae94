"""What each backward mode multiplies and keeps: the table of docs/numerics.md, section 4, as code."""

import dataclasses
from typing import Any, NamedTuple, assert_never

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jax_fp4 import reference
from jax_fp4._array import QuantizedTensor
from jax_fp4._errors import message
from jax_fp4._formats import BLOCK, padded
from jax_fp4._ops import Made, quantize, quantize_made, quantize_transpose
from jax_fp4._products import grouped_product, product
from jax_fp4._recipe import BackwardMode, Recipe
from jax_fp4._rules import is_kept, keep

# A frozen kernel: blocked along k, or (blocked along n, blocked along k) as quantize_transpose returns it.
FrozenKernel = QuantizedTensor | tuple[QuantizedTensor, QuantizedTensor]
Kernel = Float[Array, "k n"] | FrozenKernel


class Residuals(NamedTuple):
    """What the backward reads. A part that nobody needs holds arrays of shape (0,): the tree never changes."""

    x: Float[Array, "m k"] | QuantizedTensor  # for dw
    kernel: Float[Array, "k n"] | QuantizedTensor  # for dx
    seed: UInt32[Array, "2"]  # of dy's stochastic rounding


class Needs(NamedTuple):
    """Which operands of the product are differentiated."""

    x: bool
    kernel: bool


class Planes(NamedTuple):
    """An operand for the forward (an array where nothing is quantized) and, only in the default mode and where it is
    needed, for the backward."""

    forward: Any
    backward: QuantizedTensor | None = None


def planes_of_x(
    x: Float[Array, "m k"], recipe: Recipe, both: bool, group_sizes=None, made: Made | None = None
) -> Planes:
    """Q(x) row-wise and, in the same pass, column-wise for the default weight gradient."""
    flags: dict[str, Any] = dict(
        row_scaled=recipe.row_scaled_activation,
        four_over_six=recipe.four_over_six_of("activations"),
        group_sizes=group_sizes,
    )
    if made is not None:
        return Planes(*quantize_made(x, made, both=both, hadamard=recipe.hadamard, **flags))
    return Planes(*quantize_transpose(x, hadamard=recipe.hadamard, **flags)) if both else Planes(quantize(x, **flags))


def planes_of_kernel(kernel: Any, recipe: Recipe, dtype, both: bool) -> Planes:
    """Q(w) blocked along k and, in the same pass, along n for the default input gradient. float32 master weights are
    rounded to the compute dtype on the way; a frozen kernel is what it is."""
    if is_frozen(kernel):
        return Planes(along_k(kernel), along_n(kernel) if both else None)
    flags: dict[str, Any] = dict(
        block=(BLOCK, BLOCK) if recipe.two_dimensional_weights else (1, BLOCK),
        four_over_six=recipe.four_over_six_of("weights"),
        batch_dims=kernel.ndim - 2,  # each expert's matrix is a tensor of its own
        dtype=dtype,
    )
    return Planes(*reversed(quantize_transpose(kernel, **flags))) if both else Planes(quantize(kernel, axis=0, **flags))


def mode_of(recipe: Recipe | None) -> BackwardMode:
    """Without a recipe all three products are in high precision, as the backward of `unquant` is."""
    return BackwardMode.UNQUANT if recipe is None else recipe.mode


def operands(
    x, kernel: Any, recipe: Recipe | None, needs: Needs, group_sizes=None, made: Made | None = None
) -> tuple[Planes, Planes]:
    """Q(x) and Q(w): what y = x w multiplies, and with it what only the default backward reads. made: what x is made
    of, where that is known."""
    if recipe is None:
        return Planes(x), Planes(along_k(kernel) if is_frozen(kernel) else kernel)
    default = recipe.mode is BackwardMode.DEFAULT
    qx = planes_of_x(x, recipe, default and needs.kernel, group_sizes, made)
    return qx, planes_of_kernel(kernel, recipe, x.dtype, both=default and needs.x)


def multiply(
    x: Planes, kernel: Planes, dtype, group_sizes=None, *, compute, bias=None, bias_weights=None
) -> Float[Array, "m n"]:
    """y = x w + b, [m,n] = [m,k] @ [k,n], or for each group [m,n] = [m,k] @ [g,k,n]."""
    lhs, rhs = x.forward, kernel.forward
    if group_sizes is None:
        return product(lhs, _computed(rhs, compute), dtype, bias)
    return grouped_product(lhs, rhs, group_sizes, dtype, compute=compute, bias=bias, bias_weights=bias_weights)


def residuals(
    x, kernel: Any, seed, qx: Planes, qw: Planes, recipe: Recipe | None, needs: Needs, group_sizes=None
) -> Residuals:
    """What the backward will read, of the arguments and of what `operands` made of them."""
    mode = mode_of(recipe)
    match mode:
        case BackwardMode.DEFAULT:
            assert recipe is not None
            for_dw = keep(qx.backward, lambda: planes_of_x(x, recipe, True, group_sizes).backward)
            for_dx = keep(qw.backward, lambda: planes_of_kernel(kernel, recipe, x.dtype, True).backward)
        case BackwardMode.UNQUANT:
            for_dw = keep(x if needs.kernel else None, lambda: x)
            # Not its cast to the compute dtype: the parameter is alive anyway, a cast would be a copy.
            w = qw.forward if is_frozen(kernel) else kernel
            for_dx = keep(w if needs.x else None, lambda: w)
        case BackwardMode.DEQUANT:
            for_dw = keep(qx.forward if needs.kernel else None, lambda: qx.forward)
            for_dx = keep(qw.forward if needs.x else None, lambda: qw.forward)
        case _:
            assert_never(mode)
    draw = seed if mode is BackwardMode.DEFAULT and seed is not None else jnp.zeros(0, jnp.uint32)
    return Residuals(_with_scale_type(for_dw, jnp.uint8), _with_scale_type(for_dx, jnp.uint8), draw)


def _with_scale_type(part: Any, dtype) -> Any:
    """A residual with its E4M3 block scales as bytes, or as E4M3 again. jax.checkpoint rounds the float residuals that
    its policy saves "to their own precision", which for float8_e4m3fn is one that ends at 240: larger scales, and most
    tensors have one, would become NaN."""
    if not isinstance(part, QuantizedTensor):
        return part
    return dataclasses.replace(part, block_scale=jax.lax.bitcast_convert_type(part.block_scale, dtype))


def gradients(
    dy: Float[Array, "m n"], kept: Residuals, recipe: Recipe | None, dtypes: tuple[Any, Any], group_sizes=None
) -> tuple[Array | None, Array | None]:
    """(dx, dw) of `multiply`, None for what nobody differentiates. dy has the compute dtype; `default` quantizes it
    once, for both products; the other modes use it as it is, beside high-precision operands (unquant) or the values
    the forward multiplied (dequant)."""
    needs = Needs(is_kept(kept.kernel), is_kept(kept.x))
    along_n = along_m = dy
    if mode_of(recipe) is BackwardMode.DEFAULT and any(needs):
        assert recipe is not None
        along_n, along_m = quantize_gradient(dy, recipe, kept.seed, needs, group_sizes)
    x_dtype, kernel_dtype = dtypes
    x, kernel = (_with_scale_type(part, jnp.float8_e4m3fn) for part in (kept.x, kept.kernel))
    dx = dw = None
    if needs.x:
        dx = _backward_product(along_n, kernel.mT, x_dtype, dy.dtype, group_sizes)
    if needs.kernel:
        dw = _backward_product(x.mT, along_m, kernel_dtype, dy.dtype, group_sizes, weights=False)
    return dx, dw


def quantize_gradient(dy: Float[Array, "m n"], recipe: Recipe, seed, needs: Needs, group_sizes=None):
    """Q(dy) along n for dx and along m for dw: what is needed of the two, in one pass."""
    key = seed if recipe.stochastic_rounding else None
    flags: dict[str, Any] = dict(key=key, group_sizes=group_sizes)
    if needs.x and needs.kernel:
        return quantize_transpose(dy, hadamard=recipe.hadamard, **flags)
    if needs.x:
        return quantize(dy, **flags), None
    return None, quantize(dy, axis=0, hadamard=recipe.hadamard, **flags)


def _backward_product(lhs, rhs, dtype, compute, group_sizes, *, weights: bool = True) -> Array:
    """dx = dy w^T, [m,k] = [m,n] @ [n,k], or dw = x^T dy, [k,n] = [k,m] @ [m,n]; with groups [m,n] @ [g,n,k] and
    [g,k,n]. What is no array is quantized along the contracted axis beside a quantized dy, and blocked along any axis
    beside dy itself, which it meets in the compute dtype. weights: rhs is w."""
    if group_sizes is not None:
        return grouped_product(lhs, rhs, group_sizes, dtype, compute=compute, transposed=rhs.ndim == 3)
    return product(_computed(lhs, compute), _computed(rhs, compute), dtype, weights=weights)


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
    default = recipe is not None and recipe.mode is BackwardMode.DEFAULT
    if default and isinstance(kernel, QuantizedTensor) and kernel.block != (BLOCK, BLOCK):
        raise ValueError(
            message(
                op,
                name,
                f"{kernel!r} with block={kernel.block}",
                "its plane blocked along n too",
                "backward_mode='default' multiplies dy by it, and only 16 x 16 tiles can be turned",
                f"the pair quantize_transpose({name}), block=(16, 16), or another backward mode",
            )
        )


def transpose_tiles(q: QuantizedTensor) -> QuantizedTensor:
    """The other plane of a tile-scaled kernel: the same codes and scales, transposed. [n, k/2] -> [k, n/2]."""
    rows, extent = q.codes.shape[-2], q.extent
    turned = jnp.swapaxes(reference.unpack(q.codes), -1, -2)[..., :extent, :]
    codes = reference.pack(jnp.pad(turned, [(0, 0)] * (turned.ndim - 1) + [(0, padded(rows) - rows)]))
    # One scale for each tile, replicated over the 16 rows of the other plane.
    scale = jax.lax.bitcast_convert_type(q.block_scale, jnp.uint8)[..., ::BLOCK, :]
    scale = jnp.repeat(jnp.swapaxes(scale, -1, -2), BLOCK, axis=-2)[..., :extent, :]
    return QuantizedTensor(
        codes=codes,
        block_scale=jax.lax.bitcast_convert_type(scale, jnp.float8_e4m3fn),
        amax=q.amax,
        axis=-1 if q.axis == 0 else 0,
        extent=rows,
        dtype=q.dtype,
        bound=q.bound,
        block=q.block,
    )
