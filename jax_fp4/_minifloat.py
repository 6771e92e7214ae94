"""Exact arithmetic over an array namespace: what the specifications of all formats share.

Given NumPy arrays a function runs on NumPy, keeps denormals and is exact; given jax arrays or tracers it runs on
jax.numpy, with the same bits on CPU, under jit and eager, while no value is denormal (XLA:CPU flushes those).

Every float operation below is one float32 rounding, in the order written. NumPy executes it so. XLA does not:
  * it contracts a*b + c to an fma where both land in one fusion. `lax.optimization_barrier` does not stop it (on
    jax 0.10 the barrier is gone before fusion); a select between product and sum does: `pinned`;
  * it rewrites a / constant to a * (1 / constant), also eagerly and also where a barrier hides the constant: `divided`
    divides by a selected value;
  * it reassociates (a * c1) * c2 for constants, and an amax closed over under jit is one: `pinned` again;
  * it may drop the pair of a conversion to a narrower float and back: `rounded`.
Roundings to E2M1 and E4M3 are integer arithmetic on the float32 bits, so no compiler has a say in them.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float8e4m3fn, Float8e5m2, UInt8

from jax_fp4._formats import E2M1_MAX, INF_BITS, NAN_AMAX_BITS, NAN_SCALE, PACK

AnyArray = Array | np.ndarray
E4M3 = jnp.float8_e4m3fn
FMAX = np.finfo(np.float32).max
NAN = np.float32(np.nan)  # not jnp's, which jax_debug_nans would report when it is made
ABS_BITS = 0x7FFFFFFF
# Mantissa bits, the float32 exponent field of the smallest normal, and the float32 bits of the largest value.
E2M1_SHAPE = (1, 127, 0x40C00000)
E4M3_SHAPE = (3, 121, 0x43E00000)
E5M2_SHAPE = (2, 113, 0x47600000)

exact = np.errstate(all="ignore")  # overflow, 0/0 and NaN are part of the contract, so NumPy need not warn


# ---- the array namespace, and what keeps XLA from changing bits ----


def namespace(*arrays: Any) -> Any:
    """numpy if every array given is NumPy's, else jax.numpy."""
    return np if all(a is None or isinstance(a, (np.ndarray, np.generic)) for a in arrays) else jnp


def pinned(x):
    """x, and on jnp a value that neither XLA nor LLVM fuses with what follows: a select is in between."""
    return x if namespace(x) is np else jnp.where(x == x, x, NAN)


def divided(x, constant: int):
    """fl(x / constant). On jnp the divisor is selected by x, so it is no constant to anybody who compiles."""
    divisor = np.float32(constant)
    return x / divisor if namespace(x) is np else x / jnp.where(x == x, divisor, NAN)


def quotient(a, b):
    """fl(a / b) of float32 a >= 0 and b > 0, to the bit on every platform.

    XLA:GPU divides by an approximate reciprocal, which is off in the last bit for one quotient in four, and XLA may
    rewrite 1 / (c / a). So on jnp this is long division of the mantissas, in integers. NaN for a NaN b, Inf for 0.
    """
    xp = namespace(a, b)
    if xp is np:
        return np.asarray(np.float32(a) / np.asarray(b))
    a, b = jnp.broadcast_arrays(jnp.asarray(a, jnp.float32), b)
    (upper, a_exponent), (lower, b_exponent) = (_normalized(magnitude_bits(x)) for x in (a, b))
    less = upper < lower
    exponent = a_exponent - b_exponent + 127 - less.astype(jnp.int32)
    rest, digits = jnp.where(less, upper << 1, upper), jnp.zeros_like(upper)
    for _ in range(25):  # 24 bits of the mantissa and one to round by
        fits = rest >= lower
        digits = (digits << 1) | fits.astype(jnp.uint32)
        rest = jnp.where(fits, rest - lower, rest) << 1
    digits = (digits << 1) | (rest != 0).astype(jnp.uint32)
    # Nearest, ties to even. A result below 2^-126 loses more bits.
    drop = jnp.clip(3 - exponent, 2, 27).astype(jnp.uint32)
    kept, beyond, half = digits >> drop, digits & ((1 << drop) - 1), jnp.uint32(1) << (drop - 1)
    kept += ((beyond > half) | ((beyond == half) & (kept & 1 == 1))).astype(jnp.uint32)
    bits = ((jnp.clip(exponent, 1, 255) - 1).astype(jnp.uint32) << 23) + kept
    bits = jnp.where((exponent >= 255) | (bits > INF_BITS) | (magnitude_bits(b) == 0), jnp.uint32(INF_BITS), bits)
    bits = jnp.where((magnitude_bits(a) == 0) | (magnitude_bits(b) == INF_BITS), jnp.uint32(0), bits)
    return jnp.where(b != b, NAN, lax.bitcast_convert_type(bits, jnp.float32))


def _normalized(bits):
    """(mantissa of 24 bits, biased exponent) of a float32 that is not 0; denormals too."""
    shift = jnp.where(bits >> 23 == 0, lax.clz(bits) - 8, 0).astype(jnp.uint32)
    mantissa = jnp.where(bits >> 23 == 0, bits << shift, (bits & 0x7FFFFF) | 0x800000)
    return mantissa, jnp.maximum(bits >> 23, 1).astype(jnp.int32) - shift.astype(jnp.int32)


def rounded(x, dtype: str):
    """x rounded to `dtype` (nearest-even, denormals kept), as float32."""
    x = x.astype(np.float32)
    if dtype == "float32":
        return x
    if namespace(x) is np:
        return x.astype(jnp.dtype(dtype)).astype(np.float32)
    if dtype == "bfloat16":
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    # reduce_precision would flush float16 denormals, which are ordinary values (below 6e-5).
    return lax.optimization_barrier(x.astype(dtype)).astype(np.float32)


def pad_last(xp, x, rows: int, columns: int):
    """Zeros appended to the last two dimensions."""
    return xp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows), (0, columns)]) if rows or columns else x


# ---- minifloats: 1.1 and the E4M3 scale ----


def narrowed(xp, bits, shape: tuple[int, int, int]):
    """Magnitude code of the float32 whose bits (sign cleared) are given: nearest, ties to even, saturating.

    A binade's significand is shifted right by what the format lacks, and by one more for each binade below its
    smallest normal. From 25 places on everything is below half a code, float32 denormals included.
    """
    mantissa, smallest, largest = shape
    bits = xp.minimum(bits, np.uint32(largest))
    exponent = bits >> 23
    binade = xp.maximum(exponent, np.uint32(smallest))
    shift = xp.minimum(binade - exponent + (23 - mantissa), np.uint32(25))
    significand = (bits & 0x7FFFFF) | 0x800000
    below_half = (np.uint32(1) << (shift - 1)) - 1  # and one more if the code below is odd, for a tie
    return ((binade - smallest) << mantissa) + ((significand + below_half + ((significand >> shift) & 1)) >> shift)


def widened(xp, code, shape: tuple[int, int, int]):
    """The float32 that a magnitude code stands for, exactly."""
    mantissa, smallest, _ = shape
    normal = ((code + ((smallest - 1) << mantissa)) << (23 - mantissa)).view(np.float32)
    subnormal = code.astype(np.float32) * np.float32(2.0 ** (smallest - 127 - mantissa))
    return xp.where(code < (1 << mantissa), subnormal, normal)


def cast_e2m1(v: Float[AnyArray, "*s"]) -> UInt8[AnyArray, "*s"]:
    """E2M1 codes: nearest, ties to the even code, saturating at 6, sign copied from the sign bit.

    So -0.0 and tiny negatives give 8. NaN saturates (no NaN reaches this from `quantize`).
    """
    xp, bits = namespace(v), v.view(np.uint32)
    return (narrowed(xp, bits & ABS_BITS, E2M1_SHAPE) | ((bits >> 28) & 8)).astype(np.uint8)


@exact
def cast_e2m1_stochastic(v: Float[AnyArray, "*s"], byte: UInt8[AnyArray, "*s"]) -> UInt8[AnyArray, "*s"]:
    """E2M1 codes rounded up with probability proportional to the distance, by one random byte each (1.7).

    The fma of the specification is written as a product and a sum: byte has 8 significant bits and the other factors
    are powers of two, so the product is exact and a contraction by the compiler would change nothing either.
    """
    xp, f32 = namespace(v, byte), np.float32
    a = xp.minimum(xp.abs(v), f32(E2M1_MAX))
    step = xp.where(a < 2, f32(0.5), xp.where(a < 4, f32(1), f32(2)))
    t = byte.astype(f32) * f32(1 / 256) * step + a
    value = xp.minimum(xp.floor(t / step) * step, f32(E2M1_MAX))
    return cast_e2m1(xp.copysign(value, v))


def decode_e2m1(codes: UInt8[AnyArray, "*s"]) -> Float[AnyArray, "*s"]:
    """The values of unpacked codes 0..15; 8 is -0.0."""
    xp, codes = namespace(codes), codes.astype(np.uint32)
    magnitude = widened(xp, codes & 7, E2M1_SHAPE)
    return (magnitude.view(np.uint32) | (codes & 8) << 28).view(np.float32)


def cast_e4m3(v: Float[AnyArray, "*s"]) -> UInt8[AnyArray, "*s"]:
    """E4M3 bytes: clamped to +-448, then nearest-even, subnormals kept, sign copied, NaN to 0x7F."""
    xp, bits = namespace(v), v.view(np.uint32)
    magnitude = narrowed(xp, bits & ABS_BITS, E4M3_SHAPE) | ((bits >> 24) & 0x80)
    return xp.where((bits & ABS_BITS) > INF_BITS, np.uint32(NAN_SCALE), magnitude).astype(np.uint8)


def decode_e4m3(scale: UInt8[AnyArray, "*s"] | Float8e4m3fn[AnyArray, "*s"]) -> Float[AnyArray, "*s"]:
    """The values of E4M3 bytes, of which 0x7F and 0xFF are NaN."""
    xp, byte = namespace(scale), scale.view(np.uint8).astype(np.uint32)
    magnitude = widened(xp, byte & 0x7F, E4M3_SHAPE)
    signed = (magnitude.view(np.uint32) | (byte & 0x80) << 24).view(np.float32)
    return xp.where((byte & 0x7F) == NAN_SCALE, np.float32(np.nan), signed)


def cast_e5m2(v: Float[AnyArray, "*s"]) -> UInt8[AnyArray, "*s"]:
    """E5M2 bytes: clamped to +-57344 (Inf too), then nearest-even, subnormals kept, sign copied, NaN to 0x7F."""
    xp, bits = namespace(v), v.view(np.uint32)
    magnitude = narrowed(xp, bits & ABS_BITS, E5M2_SHAPE) | ((bits >> 24) & 0x80)
    return xp.where((bits & ABS_BITS) > INF_BITS, np.uint32(NAN_SCALE), magnitude).astype(np.uint8)


def decode_e5m2(codes: UInt8[AnyArray, "*s"] | Float8e5m2[AnyArray, "*s"]) -> Float[AnyArray, "*s"]:
    """The values of E5M2 bytes: the upper half of a float16, of which 0x7C is Inf and what is above NaN."""
    xp, byte = namespace(codes), codes.view(np.uint8).astype(np.uint32)
    magnitude = widened(xp, byte & 0x7F, E5M2_SHAPE)
    magnitude = xp.where((byte & 0x7F) == 0x7C, np.float32(np.inf), magnitude)
    signed = (magnitude.view(np.uint32) | (byte & 0x80) << 24).view(np.float32)
    return xp.where((byte & 0x7F) > 0x7C, NAN, signed)


def pack(codes: UInt8[AnyArray, "*s b"]) -> UInt8[AnyArray, "*s bytes"]:
    """Two codes a byte, even index in the low nibble."""
    return codes[..., 0::PACK] | (codes[..., 1::PACK] << 4)


def unpack(packed: UInt8[AnyArray, "*s bytes"]) -> UInt8[AnyArray, "*s b"]:
    """Inverse of `pack`."""
    xp = namespace(packed)
    return xp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], packed.shape[-1] * PACK)


# ---- amaxes ----


def magnitude_bits(x):
    return x.view(np.uint32) & ABS_BITS


def canonical_amax(xp, amax):
    """The amax with every NaN as 0x7FC00000 and every other bit as it is."""
    bits = amax.view(np.uint32)
    return xp.where((bits & ABS_BITS) > INF_BITS, np.uint32(NAN_AMAX_BITS), bits).view(np.float32)
