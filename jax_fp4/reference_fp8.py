"""The 8-bit formats: the specification (docs/numerics.md, section 3).

MXFP8, Float8CurrentScaling, Float8BlockScaling and DelayedScaling over an array namespace, as `reference`: on NumPy
exact, what every kernel must equal bit for bit; on jax.numpy the traceable fallback, the same bits on CPU while no
input, scale or result is denormal (XLA:CPU flushes those). Denormal are: an MXFP8 scale below 2^-126, for a block
whose amax is below 448 * 2^-126 (E5M2: 57344 * 2^-126), and the inverse of a float32 scale above 2^126.

Shapes: x is [*B, m, k]. Stored, blocks lie last: rows r and blocked extent b are (m, k) for axis=-1 and (k, m) for
axis=0; p is b rounded up to whole blocks, with zeros. Codes are float8 [*B, r, p]; scales are
  mxfp8         e8m0 [*B, r, p/32], the 32 rows of a tile repeating theirs, so that products know no tiles
  float8_block  float32 [*B, r, p/128], or of tiles [*B, ceil(r/128), p/128]: the inverse scale, for decoding
  float8        float32 [*B], likewise; p = b.

With group_sizes int32 [*B, g] (section 2: x is a stack of groups of rows) each group is a tensor of its own: float8 has
[*B, g] amaxes and scales; the blocks of mxfp8 and float8_block begin anew with each group, so that for axis=0 p is
`grouped_extent(m, g, block)`. What belongs to no group is zero, codes and scales.
"""

from dataclasses import replace
from typing import Any, NamedTuple, assert_never

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Shaped, UInt8

from jax_fp4 import _groups
from jax_fp4._formats import E8M0_NAN, FLOAT8_BLOCKS, INF_BITS, Float8Quantization, padded, stored
from jax_fp4._minifloat import (
    E4M3,
    FMAX,
    NAN,
    AnyArray,
    canonical_amax,
    cast_e4m3,
    cast_e5m2,
    decode_e4m3,
    decode_e5m2,
    exact,
    magnitude_bits,
    namespace,
    pad_last,
    pinned,
    quotient,
    rounded,
)

E5M2, E8M0 = jnp.float8_e5m2, jnp.float8_e8m0fnu
CODES = {"e4m3": (E4M3, cast_e4m3, decode_e4m3), "e5m2": (E5M2, cast_e5m2, decode_e5m2)}

# Values are held as [*B, r/tile, tile, p/block, block], what belongs to a block or tile as [*B, r/tile, 1, p/block, 1].


def _as_blocks(xp, x, q: Float8Quantization):
    """The values that get quantized, oriented and zero-padded to whole blocks and tiles."""
    v = rounded(x, q.compute_dtype)
    v = v.swapaxes(-1, -2) if q.axis == 0 else v
    *batch, r, b = v.shape
    rows, extent = padded(r, q.tile), padded(b, q.block)
    return pad_last(xp, v, rows - r, extent - b).reshape(*batch, rows // q.tile, q.tile, extent // q.block, q.block)


def _peaks(xp, v):
    """The largest |v| of each block, an integer maximum of the bits, so that NaN and Inf survive."""
    return xp.max(magnitude_bits(v), axis=(-3, -1), keepdims=True).view(np.float32)


def _encoded(v, rows: int, q: Float8Quantization):
    """Float8 codes of scaled blocks, [*B, rows, p]: saturating, nearest-even."""
    *batch, tiles, tile, blocks, block = v.shape
    dtype, cast, _ = CODES[q.codes]
    return cast(v).reshape(*batch, tiles * tile, blocks * block)[..., :rows, :].view(dtype)


# ---- MXFP8 ----


def scale_e8m0(amax: Float[AnyArray, "*s"], largest: int) -> UInt8[AnyArray, "*s"]:
    """E8M0 bytes e, for 2^(e-127): fl(amax * fl(1/largest)) rounded up to a power of two, on its bits.

    Inf gives 254 (2^127), NaN 255, zero 0. Below 2^-126, where float32 is denormal: 0 up to 2^-127, then 1.
    """
    xp = namespace(amax)
    bits = magnitude_bits(amax * (np.float32(1) / np.float32(largest)))
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    stays = (mantissa == 0) | (exponent == 254) | ((exponent == 0) & (mantissa <= 0x400000))
    e = xp.where(stays, exponent, exponent + 1)
    e = xp.where(bits == INF_BITS, np.uint32(254), e)
    return xp.where(bits > INF_BITS, np.uint32(E8M0_NAN), e).astype(np.uint8)


def _scaled_by_two(xp, v, power):
    """v * 2^power for int32 -127 <= power <= 127: by two powers, since 2^-127 is denormal, which XLA:CPU would flush.

    The rounding is that of one product: the first is exact unless the result is far below every float8.
    """
    half = power >> 1
    first, second = (((127 + p).astype(np.uint32) << 23).view(np.float32) for p in (half, power - half))
    return pinned(v * first) * second


@exact
def quantize_mxfp8(
    x: Float[AnyArray, "*B m k"], q: Float8Quantization
) -> tuple[Float[AnyArray, "*B r p"], Shaped[AnyArray, "*B r blocks"]]:
    """Codes and E8M0 scales of x, rounded to q.compute_dtype first, in the stored form of q.axis.

    Codes are x * 2^(127-e). A block that holds a NaN is NaN codes under a NaN scale; one that holds an Inf has the
    largest scale, 2^127, and decodes to Inf there. A zero block is zeros under scale 2^-127.
    """
    xp = namespace(x)
    v = _as_blocks(xp, xp.asarray(x), q)
    rows, _ = stored(x.shape, q.axis)
    e = scale_e8m0(_peaks(xp, v), q.largest)
    v = xp.where(e == E8M0_NAN, NAN, _scaled_by_two(xp, v, 127 - e.astype(np.int32)))
    scale = xp.broadcast_to(e, (*v.shape[:-1], 1)).reshape(*v.shape[:-4], v.shape[-4] * q.tile, v.shape[-2])
    return _encoded(v, rows, q), scale[..., :rows, :].view(E8M0)


@exact
def dequantize_mxfp8(codes: Any, scale: Any, extent: int, dtype: Any) -> Float[AnyArray, "*B r {extent}"]:
    """val * 2^(e-127), one rounding to float32 and one to dtype, in the stored orientation; NaN under scale 255."""
    xp = namespace(codes, scale)
    e = xp.asarray(scale).view(np.uint8)[..., None]
    value = _decoded(xp, codes).reshape(*scale.shape, FLOAT8_BLOCKS["mxfp8"])
    value = xp.where(e == E8M0_NAN, NAN, _scaled_by_two(xp, value, e.astype(np.int32) - 127))
    return value.reshape(codes.shape)[..., :extent].astype(jnp.dtype(dtype))


def _decoded(xp, codes):
    codes = xp.asarray(codes)
    return (decode_e5m2 if codes.dtype == E5M2 else decode_e4m3)(codes)


# ---- Float8: one float32 scale a tensor, a block of 128, or a tile of 128 x 128 ----


@exact
def scale_float8(amax: Float[AnyArray, "*s"], q: Float8Quantization) -> Float[AnyArray, "*s"]:
    """What x is multiplied by: fl(largest / max(amax, eps)), at most FMAX; 1 where that maximum is 0 or not finite.

    power_of_two rounds it down to one, by clearing the mantissa.
    """
    xp = namespace(amax)
    counted = xp.where(amax < np.float32(q.eps), np.float32(q.eps), amax)  # NaN stays
    scale = xp.minimum(quotient(np.float32(q.largest), counted), FMAX)
    scale = xp.where((counted == 0) | (magnitude_bits(counted) >= INF_BITS), np.float32(1), scale)
    return xp.asarray((scale.view(np.uint32) & INF_BITS).view(np.float32)) if q.power_of_two else scale


def _inverse(xp, scale):
    """fl(1 / scale), what is stored."""
    return xp.asarray(quotient(np.float32(1), scale))


@exact
def quantize_float8_block(
    x: Float[AnyArray, "*B m k"], q: Float8Quantization
) -> tuple[Float[AnyArray, "*B r p"], Float[AnyArray, "*B rows blocks"]]:
    """Codes and inverse scales of x, rounded to q.compute_dtype first, in the stored form of q.axis.

    Codes are fl(x * scale). A block with a non-finite element has scale 1: NaN stays NaN, Inf becomes the largest code.
    """
    xp = namespace(x)
    v = _as_blocks(xp, xp.asarray(x), q)
    rows, _ = stored(x.shape, q.axis)
    scale = scale_float8(_peaks(xp, v), q)
    return _encoded(v * scale, rows, q), _inverse(xp, scale)[..., 0, :, 0]


@exact
def amax_float8(
    x: Float[AnyArray, "*B m k"], q: Float8Quantization, layout: _groups.Layout | None = None
) -> Float[AnyArray, "*B"] | Float[AnyArray, "*B g"]:
    """The largest |x| after rounding to q.compute_dtype, of each group if there are any; of nothing 0; NaN is
    0x7FC00000."""
    xp = namespace(x)
    bits = magnitude_bits(rounded(xp.asarray(x), q.compute_dtype))
    if layout is None:
        bits = xp.max(bits, axis=(-2, -1), initial=np.uint32(0))
    else:
        bits = _groups.largest(xp.max(bits, axis=-1, initial=np.uint32(0)), layout.group, layout.groups)
    return canonical_amax(xp, xp.asarray(bits).view(np.float32))


@exact
def quantize_float8(
    x: Float[AnyArray, "*B m k"], scale: Any, q: Float8Quantization, layout: _groups.Layout | None = None
) -> tuple[Float[AnyArray, "*B r b"], Float[AnyArray, "..."]]:
    """Codes of fl(x * scale), and the inverse scale: under the scale of this tensor's amax it is current scaling, under
    one from the history delayed scaling. NaN stays NaN, Inf becomes the largest code."""
    xp = namespace(x, scale)
    v, scale = _as_blocks(xp, xp.asarray(x), q), xp.asarray(scale)
    rows, _ = stored(x.shape, q.axis)
    if layout is None:
        factor = scale[..., None, None, None, None]
    else:
        factor = _groups.of_group(scale, layout.group, 1)  # of each row of x
        factor = factor[..., :, None, None, None] if q.axis == -1 else factor[..., None, None, :, None]
    return _encoded(v * factor, rows, q), _inverse(xp, scale)


@exact
def quantize_float8_current(
    x: Float[AnyArray, "*B m k"], amax: Any, q: Float8Quantization, layout: _groups.Layout | None = None
) -> tuple[Float[AnyArray, "*B r b"], Float[AnyArray, "..."], Float[AnyArray, "..."]]:
    """Codes, inverse scale and amax, which is given (values beyond it saturate) or, None, computed."""
    xp = namespace(x, amax)
    amax = amax_float8(x, q, layout) if amax is None else canonical_amax(xp, xp.asarray(amax, dtype=np.float32))
    return *quantize_float8(x, scale_float8(amax, q), q, layout), amax


@exact
def dequantize_float8(codes: Any, scale_inv: Any, tile: int, extent: int, dtype: Any) -> Float[AnyArray, "*B r b"]:
    """fl(val * scale_inv), then one rounding to dtype, in the stored orientation.

    scale_inv [*B, r/tile, p/128] is for blocks, [*B] for tensors.
    """
    xp = namespace(codes, scale_inv)
    value, factor = _decoded(xp, codes), xp.asarray(scale_inv)
    if factor.ndim == value.ndim:
        factor = xp.repeat(
            xp.repeat(factor, tile, axis=-2)[..., : codes.shape[-2], :], FLOAT8_BLOCKS["float8_block"], axis=-1
        )
    else:
        factor = factor[..., None, None]
    return (value * factor)[..., :extent].astype(jnp.dtype(dtype))


# ---- any of them ----


def quantize(x: Float[AnyArray, "*B m k"], amax: Any, scale: Any, group_sizes: Any, q: Float8Quantization) -> tuple:
    """Codes, stored scale, and amax (None where every block has its own scale). amax and scale, of which at most one
    is given, concern "float8" only: what the tensor's scale is computed from, and the scale itself. group_sizes, which
    exclude tiles: each group of rows is a tensor of its own."""
    xp = namespace(x, amax, scale, group_sizes)
    x, layout = xp.asarray(x), None
    if group_sizes is not None:
        layout = _groups.Layout.of(xp.asarray(group_sizes), x.shape[-2], q.axis, q.block)
        x = layout.arrange(x)
    match q.scaling:
        case "mxfp8":
            return *quantize_mxfp8(x, q), None
        case "float8_block":
            codes, scale_inv = quantize_float8_block(x, q)
            if layout is not None:
                used = layout.group < layout.groups
                used = used[..., None] if q.axis == -1 else used[..., None, :]
                scale_inv = xp.where(used, scale_inv, np.float32(0))
            return codes, scale_inv, None
        case "float8" if scale is None:
            return quantize_float8_current(x, amax, q, layout)
        case "float8":
            return *quantize_float8(x, scale, q, layout), amax_float8(x, q, layout)
        case _:
            assert_never(q.scaling)


def quantize_transpose(
    x: Float[AnyArray, "*B m k"], amax: Any, scale: Any, group_sizes: Any, q: Float8Quantization
) -> tuple:
    """`quantize` row-wise, then column-wise; q.axis is ignored."""
    rowwise = quantize(x, amax, scale, group_sizes, replace(q, axis=-1))
    return *rowwise, *quantize(x, amax, scale, group_sizes, replace(q, axis=0))


def dequantize(codes: Any, scale: Any, tile: int, extent: int, dtype: Any) -> Float[AnyArray, "*B r {extent}"]:
    """The values that `quantize` stored, in the stored orientation. E8M0 scales are MXFP8's."""
    if scale.dtype == E8M0:
        return dequantize_mxfp8(codes, scale, extent, dtype)
    return dequantize_float8(codes, scale, tile, extent, dtype)


# ---- delayed scaling ----


class Delayed(NamedTuple):
    """The state of one tensor: its last amaxes, where position 0 is free for the next, and the scale they gave."""

    history: Float[AnyArray, "*B length"]
    scale: Float[AnyArray, "*B"]


@exact
def update_delayed(state: Delayed, amax: Any, largest: int, margin: int, most_recent: bool) -> Delayed:
    """The state after a step that saw `amax`, to be called when its tensor was quantized with state.scale.

    The amax goes to position 0; a, the maximum of the history (or the amax itself, if most_recent), gives the scale
    fl(fl(largest * 2^-margin) / a), at most FMAX, if it is finite and positive; else the scale stays. Then the history
    moves on by one position and position 0 is zero. So an Inf or NaN stops the scale for as long as it is remembered.
    """
    xp = namespace(*state, amax)
    history = xp.concatenate([xp.asarray(amax)[..., None], xp.asarray(state.history)[..., 1:]], axis=-1)
    # Integers, so that NaN is the largest on every platform.
    a = xp.asarray(amax) if most_recent else xp.max(magnitude_bits(history), axis=-1).view(np.float32)
    scale = xp.minimum(quotient(np.float32(largest * 2.0**-margin), a), FMAX)
    bits = magnitude_bits(a)  # a denormal amax counts, also where its comparison with 0 would flush it
    scale = xp.where((bits > 0) & (bits < INF_BITS), scale, state.scale)
    history = xp.roll(history, -1, axis=-1)
    return Delayed(xp.concatenate([xp.zeros_like(history[..., :1]), history[..., 1:]], axis=-1), scale)
