"""What each backward mode multiplies and keeps: the table of docs/numerics.md, section 4, as code."""

from collections.abc import Callable
from typing import Any, NamedTuple, assert_never

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from jax_fp4 import _record, reference
from jax_fp4._array import QuantizedTensor
from jax_fp4._errors import message
from jax_fp4._formats import BLOCK, padded
from jax_fp4._ops import decode, quantize, quantize_transpose
from jax_fp4._products import product
from jax_fp4._recipe import BackwardMode, Recipe

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


def keep(part: Any, shape_of: Callable[[], Any]) -> Any:
    """`part`, or where it is None the tree that shape_of() would give, of empty arrays. JAX keeps one residual tree for
    each traced function, so a tree that varied with what is differentiated would give silent wrong gradients."""
    if part is not None:
        return part
    with _record.paused():
        return jax.tree.map(lambda _: jnp.zeros(0), jax.eval_shape(shape_of))


def is_kept(part) -> bool:
    return jax.tree.leaves(part)[0].shape != (0,)


class Planes(NamedTuple):
    """An operand for the forward and, only in the default mode and where it is needed, for the backward."""

    forward: QuantizedTensor
    backward: QuantizedTensor | None = None


def planes_of_x(x: Float[Array, "m k"], recipe: Recipe, both: bool) -> Planes:
    """Q(x) row-wise and, in the same pass, column-wise for the default weight gradient."""
    flags: dict[str, Any] = dict(
        row_scaled=recipe.row_scaled_activation, four_over_six=recipe.four_over_six_of("activations")
    )
    return Planes(*quantize_transpose(x, hadamard=recipe.hadamard, **flags)) if both else Planes(quantize(x, **flags))


def planes_of_kernel(kernel: Any, recipe: Recipe, dtype, both: bool) -> Planes:
    """Q(w) blocked along k and, in the same pass, along n for the default input gradient. float32 master weights are
    rounded to the compute dtype on the way; a frozen kernel is what it is."""
    if is_frozen(kernel):
        return Planes(along_k(kernel), along_n("dense", kernel) if both else None)
    flags: dict[str, Any] = dict(
        block=(BLOCK, BLOCK) if recipe.two_dimensional_weights else (1, BLOCK),
        four_over_six=recipe.four_over_six_of("weights"),
        dtype=dtype,
    )
    return Planes(*reversed(quantize_transpose(kernel, **flags))) if both else Planes(quantize(kernel, axis=0, **flags))


def operands(x, kernel: Any, recipe: Recipe, needs: Needs) -> tuple[Planes, Planes]:
    """Q(x) and Q(w): what y = x w multiplies, and with it what only the default backward reads."""
    default = recipe.mode is BackwardMode.DEFAULT
    qx = planes_of_x(x, recipe, both=default and needs.kernel)
    return qx, planes_of_kernel(kernel, recipe, x.dtype, both=default and needs.x)


def residuals(x, kernel: Any, seed, qx: Planes, qw: Planes, recipe: Recipe, needs: Needs) -> Residuals:
    """What the backward will read, of the arguments and of what `operands` made of them."""
    mode = recipe.mode
    match mode:
        case BackwardMode.DEFAULT:
            for_dw = keep(qx.backward, lambda: planes_of_x(x, recipe, both=True).backward)
            for_dx = keep(qw.backward, lambda: _plane_along_n(kernel, recipe, x.dtype))
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
    return Residuals(for_dw, for_dx, draw)


def quantize_gradient(dy: Float[Array, "m n"], recipe: Recipe, seed, needs: Needs):
    """Q(dy) along n for dx and along m for dw: what is needed of the two, in one pass."""
    key = seed if recipe.stochastic_rounding else None
    if needs.x and needs.kernel:
        return quantize_transpose(dy, hadamard=recipe.hadamard, key=key)
    if needs.x:
        return quantize(dy, key=key), None
    return None, quantize(dy, axis=0, hadamard=recipe.hadamard, key=key)


def input_gradient(dy, w: Float[Array, "k n"] | QuantizedTensor, dtype) -> Float[Array, "m k"]:
    """dx = dy w^T. Beside a quantized dy, w is blocked along n; beside dy itself, high precision or blocked along k."""
    if not isinstance(w, QuantizedTensor):
        w = w.astype(dtype)  # [k,n]: master weights meet dy in the compute dtype
    elif not isinstance(dy, QuantizedTensor):
        # Decoded where it lies: stored [n,k], so that dx is a plain product.
        return product(dy, decode(w, dtype, w.extent), dtype)  # [m,k] = [m,n] @ [n,k]
    return product(dy, w.mT, dtype)  # [m,k] = [m,n] @ [n,k]


def weight_gradient(x: Float[Array, "m k"] | QuantizedTensor, dy, dtype) -> Float[Array, "k n"]:
    """dw = x^T dy. Beside a quantized dy, x is blocked along m; beside dy itself, high precision or blocked along k."""
    if isinstance(x, QuantizedTensor) and not isinstance(dy, QuantizedTensor):
        x = decode(x, dy.dtype, x.extent)  # [m,k]: the row-wise form is stored as x is
    return product(x.mT, dy, dtype)  # [k,n] = [k,m] @ [m,n]


def is_frozen(kernel: Any) -> bool:
    return isinstance(kernel, QuantizedTensor | tuple)


def along_k(kernel: FrozenKernel) -> QuantizedTensor:
    return kernel[1] if isinstance(kernel, tuple) else kernel


def along_n(op: str, kernel: FrozenKernel) -> QuantizedTensor:
    """The plane of a frozen kernel that the default input gradient reads: given, or the transposed codes of tiles."""
    if isinstance(kernel, tuple):
        return kernel[0]
    if kernel.block != (BLOCK, BLOCK):
        raise ValueError(
            message(
                op,
                "kernel",
                f"{kernel!r} with block={kernel.block}",
                "its plane blocked along n too",
                "backward_mode='default' multiplies dy by it, and only 16 x 16 tiles can be turned",
                "the pair quantize_transpose(kernel), block=(16, 16), or another backward mode",
            )
        )
    return transpose_tiles(kernel)


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


def _plane_along_n(kernel: Any, recipe: Recipe, dtype) -> QuantizedTensor | None:
    """The n-blocked plane of any kernel; only its shapes are ever asked for here (see `keep`)."""
    if is_frozen(kernel):
        return kernel[0] if isinstance(kernel, tuple) else transpose_tiles(kernel)
    return planes_of_kernel(kernel, recipe, dtype, both=True).backward
