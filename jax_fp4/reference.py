"""NVFP4 quantization, dequantization and products: the specification (docs/numerics.md, sections 1 and 2).

Written over an array namespace. Given NumPy arrays a function runs on NumPy, keeps denormals and is exact: it is
what every kernel must equal, bit for bit. Given jax arrays or tracers it runs on jax.numpy and is the traceable
fallback where there is no kernel: the same bits on CPU, under jit and eager, while no value or scale is denormal
(XLA:CPU flushes those; all stay normal for an amax above 2e-32, or 1e-16 where four-over-six squares its errors).

Shapes: x is [*B, m, k]. The stored form has its blocks last: rows r and blocked extent b are (m, k) for axis=-1 and
(k, m) for axis=0. Codes are uint8 [*B, r, pad16(b)/2], block scales e4m3 [*B, r, pad16(b)/16], amaxes float32 [*B],
or [*B, r] under row scaling. A seed is uint32 [*B, 4]: the two key words, then the m and k at which x starts in the
global tensor. With group_sizes int32 [*B, g] (x is a stack of groups of rows), rows r of the column-wise form hold
`grouped_extent(m, g)` columns, amaxes are [*B, g] ([*B, r], column-wise [*B, g, r], under row scaling), and the third
word of the seed is the number of the first group. A seed [*B, 4 + 2 g] goes on, where x has a part of each group only:
g words of the row of the whole group at which the part starts, then g of the rows that the whole group has.

Every float operation below is one float32 rounding, in the order written; `_minifloat` says what keeps XLA to it.

Longer than our files are, because it is one page: numerics.md sections 1 and 2, paragraph after paragraph.
"""

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Float8e4m3fn, UInt8, UInt32

from jax_fp4 import _groups
from jax_fp4._errors import message
from jax_fp4._formats import (
    BLOCK,
    E2M1_MAX,
    HADAMARD_SIGNS,
    INF_BITS,
    NAN_SCALE,
    PACK,
    SWIZZLE_COLUMNS,
    SWIZZLE_ROWS,
    Quantization,
    amax_shape,
    exclusion,
    padded,
    stored,
)
from jax_fp4._minifloat import (
    E4M3,
    FMAX,
    AnyArray,
    canonical_amax,
    cast_e2m1,
    cast_e2m1_stochastic,
    cast_e4m3,
    decode_e2m1,
    decode_e4m3,
    divided,
    exact,
    magnitude_bits,
    namespace,
    pack,
    pad_last,
    pinned,
    rounded,
    unpack,
)

SIXTH = np.float32(1) / np.float32(6)
SEED_WORDS = 4  # of the key, and where x starts


# ---- amax and the tensor scales: 1.2 ----


def counted_amax(amax: Float[AnyArray, "*s"], bound: int) -> Float[AnyArray, "*s"]:
    """The amax as every formula reads it: a non-finite one counts as 6B, for which the tensor scale is 1."""
    xp = namespace(amax)
    return xp.where(magnitude_bits(amax) >= INF_BITS, np.float32(E2M1_MAX * bound), amax)


@exact
def tensor_scales(amax: Float[AnyArray, "*s"], bound: int) -> tuple[Float[AnyArray, "*s"], Float[AnyArray, "*s"]]:
    """(S_enc, S_dec) = (min(fl(6B / amax), FMAX), fl(1 / S_enc)); 1 for amax 0."""
    xp, amax = namespace(amax), counted_amax(amax, bound)
    encode = xp.minimum(np.float32(E2M1_MAX * bound) / amax, FMAX)
    encode = xp.where(amax == 0, np.float32(1), encode)
    return encode, np.float32(1) / encode


def _block_encode(xp, scale, decode):
    """What x of a block is multiplied by, from the stored bytes of its scale and S_dec."""
    return xp.minimum(np.float32(1) / (decode_e4m3(scale) * decode), FMAX)


def _reciprocal(bound: int):
    """fl(1 / (6B))."""
    return np.float32(1) / np.float32(E2M1_MAX * bound)


# ---- stochastic rounding's random bytes: 1.7 ----


def _product64(a, b):
    """(low, high) words of the 64-bit product of uint32 arrays: jax has no uint64 without x64, so by 16-bit halves."""
    a_low, a_high, b_low, b_high = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    cross = a_low * b_high
    middle = ((a_low * b_low) >> 16) + (cross & 0xFFFF) + a_high * b_low  # at most 2^32 - 1
    return a * b, a_high * b_high + (cross >> 16) + (middle >> 16)


@exact
def philox4x32(key: UInt32[AnyArray, "*key 2"], counter: UInt32[AnyArray, "*s 4"]) -> UInt32[AnyArray, "*s 4"]:
    """Philox4x32 with ten rounds (Salmon et al., 2011). The leading dimensions of the key broadcast."""
    xp = namespace(key, counter)

    def one_round(_, state):
        c0, c1, c2, c3, k0, k1 = state
        (low0, high0), (low2, high2) = _product64(c0, np.uint32(0xD2511F53)), _product64(c2, np.uint32(0xCD9E8D57))
        bump0, bump1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
        return high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0, k0 + bump0, k1 + bump1

    state = tuple(xp.broadcast_arrays(*(counter[..., i] for i in range(4)), key[..., 0], key[..., 1]))
    if (
        xp is jnp
    ):  # a loop: XLA:CPU of jax 0.10 fuses ten rounds into code that grows exponentially (minutes to compile)
        state = lax.fori_loop(0, 10, one_round, state)
    else:
        for i in range(10):
            state = one_round(i, state)
    return xp.stack(state[:4], axis=-1)


@exact
def random_bytes(
    seed: UInt32[AnyArray, "*B 4"], rows: int, blocks: int, axis: int, total: int, expert: Any = 0
) -> UInt8[AnyArray, "*B {rows} {blocks} 16"]:
    """One byte a code of the stored form, a function of the key and the code's place in the *global* tensor.

    `total` is the blocked extent of that tensor; `expert` an int or uint32 [*B]. Counter: (index low, index high,
    direction, expert), index = row * ceil(total / 16) + block.
    """
    xp = namespace(seed, None if isinstance(expert, int) else expert)
    row, column = (seed[..., 2], seed[..., 3]) if axis == -1 else (seed[..., 3], seed[..., 2])
    row = row[..., None, None] + xp.arange(rows, dtype=np.uint32)[:, None]
    block = (column >> 4)[..., None, None] + xp.arange(blocks, dtype=np.uint32)
    expert = xp.asarray(expert, dtype=np.uint32)[..., None, None]
    return _bytes_at(xp, seed, axis, row, block, np.uint32(padded(total) // BLOCK), expert)


def _bytes_at(xp, seed, axis: int, row, block, blocks, expert):
    """The bytes of the blocks at uint32 `row` and `block` of tensors whose rows have `blocks` blocks: they broadcast
    to [*B, r, b], the result is [*B, r, b, 16]."""
    low, high = _product64(row, blocks)
    index = low + block
    high = high + (index < block).astype(np.uint32)
    words = xp.broadcast_arrays(index, high, xp.asarray(0 if axis == -1 else 1, dtype=np.uint32), expert)
    random = philox4x32(seed[..., None, None, :2], xp.stack(words, axis=-1))
    by_byte = random[..., None] >> xp.asarray([0, 8, 16, 24], dtype=np.uint32)
    return by_byte.astype(np.uint8).reshape(*random.shape[:-1], BLOCK)


# ---- Hadamard: 1.6 ----


@exact
def hadamard_transform(x_t: Float[AnyArray, "*B r b"]) -> Float[AnyArray, "*B r padded_b"]:
    """Groups of 16 along the last dimension times diag(sign) H16 / 4, as float32 that holds bfloat16 values.

    Rounded to bfloat16; zero-padded to 16; signs; butterflies of strides 1, 2, 4, 8 in float32; times 0.25; bfloat16.
    """
    xp, b = namespace(x_t), x_t.shape[-1]
    v = pad_last(xp, rounded(x_t, "bfloat16"), 0, padded(b) - b)
    shape, groups = v.shape, (*v.shape[:-1], padded(b) // BLOCK)
    v = v.reshape(*groups, BLOCK) * np.asarray(HADAMARD_SIGNS, np.float32)
    for stride in (1, 2, 4, 8):
        v = v.reshape(*groups, BLOCK // (2 * stride), 2, stride)
        v = xp.stack([v[..., 0, :] + v[..., 1, :], v[..., 0, :] - v[..., 1, :]], axis=-2)
    return rounded(v.reshape(shape) * np.float32(0.25), "bfloat16")


# ---- quantize: 1.2 to 1.8 ----
# Values are held as [*B, r/tile, tile, b/16, 16], what belongs to a block or tile as [*B, r/tile, 1, b/16, 1].


def _check(amax, seed, group_sizes, q: Quantization) -> None:
    """Refuse excluded pairs, a seed of another width and (on NumPy, where values are known) a negative amax."""
    if pair := exclusion(q, stochastic=seed is not None, grouped=group_sizes is not None):
        first, second, why = pair
        raise ValueError(message("quantize", first, f"together with {second}", "one of the two", why, f"no {second}"))
    groups = 0 if group_sizes is None else group_sizes.shape[-1]
    if seed is not None and seed.shape[-1] not in (SEED_WORDS, SEED_WORDS + 2 * groups):
        need = f"{SEED_WORDS}" + (f" or {SEED_WORDS + 2 * groups}" if groups else "")
        why, fix = "it says where x lies in the global tensor", "the key and two zeros"
        raise ValueError(message("quantize", "seed", f"of {seed.shape[-1]} words", need, why, fix))
    if amax is not None and namespace(amax) is np and (amax < 0).any():
        raise ValueError(message("quantize", "amax", amax.min(), "values >= 0", "it is the largest |x|", "amax=None"))


def _as_blocks(xp, x, q: Quantization):
    """The values that get quantized, oriented, transformed and zero-padded to whole blocks and tiles."""
    v = rounded(x, q.compute_dtype)
    v = v.swapaxes(-1, -2) if q.axis == 0 else v
    v = hadamard_transform(v) if q.hadamard else v
    *batch, r, b = v.shape
    v = pad_last(xp, v, padded(r, q.tile) - r, padded(b) - b)
    return v.reshape(*batch, padded(r, q.tile) // q.tile, q.tile, padded(b) // BLOCK, BLOCK)


def _peaks(xp, v):
    """Bits of the largest |v| of each block."""
    return xp.max(magnitude_bits(v), axis=(-3, -1), keepdims=True)


def _amax_of_peaks(xp, peak, q: Quantization, layout: "_Layout | None" = None):
    """The amax, of its shape (`amax_shape`), from the largest |bits| of each block: an integer maximum, so NaN and Inf
    survive; of nothing: 0."""
    if layout is None:
        bits = xp.max(peak, axis=(-3, -2, -1) if q.row_scaled else (-4, -3, -2, -1), initial=np.uint32(0))
    else:
        bits = layout.largest(xp, xp.max(peak, axis=(-3, -1), initial=np.uint32(0)), q)
    return canonical_amax(xp, xp.asarray(bits).view(np.float32))


def amax(x: Float[AnyArray, "*B m k"], group_sizes: Any, q: Quantization) -> Float[AnyArray, "..."]:
    """The amax that `quantize` computes; shards of one tensor take the integer maximum of its bits."""
    xp, layout = namespace(x, group_sizes), None
    x = xp.asarray(x)
    if group_sizes is not None:
        layout = _Layout.of(xp.asarray(group_sizes), x.shape[-2], q.axis)
        x = layout.arrange(x)
    return _amax_of_peaks(xp, _peaks(xp, _as_blocks(xp, x, q)), q, layout)


def _four_over_six(xp, v, a, tensor_amax, q: Quantization):
    """Scale bytes of blocks that put their maximum on 6, or on 4 where that error is smaller (1.8).

    Errors add up sequentially along a row of x, then over the 16 rows of a tile as a tree with strides 8, 4, 2, 1; the
    column-wise form of a tile adds them in the same order, so it makes the same choice.
    """
    encode, decode = tensor_scales(tensor_amax, q.bound)
    base = pinned(divided(a, 6) * encode)
    scales, errors = [], []
    for candidate in (base, base * np.float32(1.5)):
        scale = cast_e4m3(candidate)
        codes = cast_e2m1(v * _block_encode(xp, scale, decode))
        scaled = pinned(decode_e2m1(codes) * decode_e4m3(scale)) * counted_amax(tensor_amax, q.bound)
        d = divided(scaled, E2M1_MAX * q.bound) - v
        d = xp.abs(d) if q.four_over_six == "MAE" else pinned(d * d)
        d = d.swapaxes(-3, -1) if q.axis == 0 and q.tile > 1 else d
        error = d[..., 0]
        for i in range(1, BLOCK):
            error = error + d[..., i]
        rows = q.tile
        while rows > 1:
            rows //= 2
            error = error[..., :rows, :] + error[..., rows:, :]
        scales.append(scale)
        errors.append(error[..., None])
    return xp.where(errors[1] < errors[0], scales[1], scales[0])


@exact
def quantize(
    x: Float[AnyArray, "*B m k"], amax: Any, seed: Any, group_sizes: Any, q: Quantization
) -> tuple[UInt8[AnyArray, "*B r bytes"], Float8e4m3fn[AnyArray, "*B r blocks"], Float[AnyArray, "..."]]:
    """Codes, block scales and amax of x in the stored form of q.axis.

    x is rounded to q.compute_dtype first. amax None: computed; given: returned as it is (NaN canonical), and data above
    it saturates. seed None: nearest-even; given: stochastic. A block with a non-finite element is zero codes under a
    NaN scale; a zero block is zeros. The blocked extent is padded with zeros, which the Hadamard transform then fills;
    it mixes along the blocked axis, whichever that is, so that 1.3 holds for it too (the operation allows axis=0 only).
    group_sizes int32 [*B, g]: each group of rows is a tensor of its own (section 2), of which the seed may say that x
    has a part. Raises ValueError for flags that exclude each other, for a seed of another width and for an amax that is
    negative or has a wrong shape.
    """
    _check(amax, seed, group_sizes, q)
    xp = namespace(x, amax, seed, group_sizes)
    if q.axis == 0:
        q = replace(q, four_over_six=q.column_four_over_six, bound=q.column_bound)
    x, layout = xp.asarray(x), None
    if group_sizes is not None:
        layout = _Layout.of(xp.asarray(group_sizes), x.shape[-2], q.axis)
        x = layout.arrange(x)
    rows, extent = stored(x.shape, q.axis)
    v = _as_blocks(xp, x, q)
    *batch, tiles, _, blocks, _ = v.shape
    peak = _peaks(xp, v)
    if amax is None:
        amax = _amax_of_peaks(xp, peak, q, layout)
    else:
        amax = canonical_amax(xp, xp.asarray(amax, dtype=np.float32))
        if amax.shape != (expected := amax_shape(tuple(batch), rows, q, layout and layout.groups)):
            why = "there is one for the tensor, for each group, or for each row"
            raise ValueError(message("quantize", "amax", f"of shape {amax.shape}", str(expected), why, "amax=None"))
    by_rows = (..., *[None] * (3 if q.row_scaled else 4))
    tensor_amax = amax[by_rows] if layout is None else layout.of_blocks(xp, amax, q)

    broken = peak >= INF_BITS
    v, a = xp.where(broken, np.float32(0), v), xp.where(broken, np.uint32(0), peak).view(np.float32)
    encode, decode = tensor_scales(tensor_amax, q.bound)
    scale = _four_over_six(xp, v, a, tensor_amax, q) if q.four_over_six else cast_e4m3(a * (encode * SIXTH))
    v = v * _block_encode(xp, scale, decode)
    if seed is None:
        codes = cast_e2m1(v)
    else:
        total = extent if (given := (q.m_total, q.k_total)[q.axis]) < 0 else given
        seed, shape = xp.asarray(seed), (tiles * q.tile, blocks)
        if layout is None:
            random = random_bytes(seed, *shape, q.axis, total)
        else:
            random = layout.random_bytes(xp, seed, *shape, total)
        codes = cast_e2m1_stochastic(v, random.reshape(v.shape))
    codes = xp.where(broken, np.uint8(0), codes).reshape(*batch, tiles * q.tile, blocks * BLOCK)
    scale = xp.broadcast_to(xp.where(broken, np.uint8(NAN_SCALE), scale), (*v.shape[:-1], 1))
    scale = scale.reshape(*batch, tiles * q.tile, blocks)
    return pack(codes[..., :rows, :]), scale[..., :rows, :].view(E4M3), amax


def quantize_transpose(
    x: Float[AnyArray, "*B m k"], amax: Any, amax_t: Any, seed: Any, group_sizes: Any, q: Quantization
) -> tuple:
    """Row-wise (codes, block_scale, amax), then column-wise: two independent quantizations of x.

    q.axis is ignored, q.hadamard concerns the second only. Each amax is given or computed by itself.
    """
    rowwise = quantize(x, amax, seed, group_sizes, replace(q, axis=-1, hadamard=False))
    return *rowwise, *quantize(x, amax_t, seed, group_sizes, replace(q, axis=0))


# ---- groups: section 2 ----


class _Layout(_groups.Layout):
    """What NVFP4 does with the groups of a stored form."""

    def largest(self, xp, peak, q: Quantization):
        """The amax bits of the groups, or of rows of them, from those of blocks [*B, r, b]."""
        if self.axis == -1:
            peak = xp.max(peak, axis=-1, initial=np.uint32(0))
            return peak if q.row_scaled else _groups.largest(peak, self.group, self.groups)
        by_block = peak.swapaxes(-1, -2)
        by_block = by_block if q.row_scaled else xp.max(by_block, axis=-1, initial=np.uint32(0))
        return _groups.largest(by_block, self.group, self.groups)

    def of_blocks(self, xp, amax, q: Quantization):
        """The amax that each block is scaled by, broadcast against [*B, r, 1, b, 1]."""
        if self.axis == -1:
            return (amax if q.row_scaled else _groups.of_group(amax, self.group, 0))[..., None, None, None]
        amax = _groups.of_group(amax, self.group, 0)
        return (amax.swapaxes(-1, -2) if q.row_scaled else amax[..., None, :])[..., None, :, None]

    def whole(self, xp, seed):
        """The row at which each group starts in the whole group, and the rows of that: uint32 [*B, g]."""
        if seed.shape[-1] > SEED_WORDS:
            return seed[..., SEED_WORDS : SEED_WORDS + self.groups], seed[..., SEED_WORDS + self.groups :]
        extent = (self.bounds.ends - self.bounds.starts).astype(np.uint32)
        return xp.zeros_like(extent), extent

    def random_bytes(self, xp, seed, rows: int, blocks: int, total: int):
        """`random_bytes`, with indices that count within each whole group; seed[2] is the number of the first one."""

        def words(values):
            return (values[..., None] if self.axis == -1 else values[..., None, :]).astype(np.uint32)

        origin = seed[..., 3, None, None]
        row = xp.arange(rows, dtype=np.uint32)[:, None]
        block = xp.arange(blocks, dtype=np.uint32)
        expert = seed[..., 2, None, None] + words(self.group)
        first, extent = self.whole(xp, seed)
        if self.columns is None:
            shift = first - self.bounds.starts.astype(np.uint32)
            row = row + words(_groups.of_group(shift, self.group, 0))
            return _bytes_at(xp, seed, -1, row, (origin >> 4) + block, np.uint32(padded(total) // BLOCK), expert)
        block = block + words(
            _groups.of_group((first >> 4) - self.columns.first_block.astype(np.uint32), self.group, 0)
        )
        of_row = words(_groups.of_group((extent >> 4) + ((extent & 15) != 0), self.group, 0))
        return _bytes_at(xp, seed, 0, origin + row, block, of_row, expert)


# ---- dequantize, products, swizzle: 1.9 to 1.11 ----


def _per_row(amax, ndim: int):
    """A stored amax [*B] or [*B, r] as [*B, 1, 1] or [*B, r, 1], for codes of `ndim` dimensions."""
    return amax[(..., *[None] * (ndim - amax.ndim))]


def tensor_factor(amax, ndim: int, bound: int):
    """fl(amax * fl(1/(6B))), which code times block scale lacks: [*B, 1 | r, 1] for codes of `ndim` dimensions."""
    return counted_amax(_per_row(amax, ndim), bound) * _reciprocal(bound)


def epilogue(acc, column, row, dtype: Any, bias: Any = None):
    """What a float32 sum of products [..., m, n] lacks: in float32, times lhs' tensor factor (a column if row-scaled),
    times rhs' (a row), one after the other because their product may be denormal; plus bias [n]; one rounding to dtype.
    """
    acc = pinned(pinned(acc * column) * row)
    return (acc if bias is None else acc + bias.astype(np.float32)).astype(jnp.dtype(dtype))


@exact
def dequantize(
    codes: UInt8[AnyArray, "*B r bytes"],
    block_scale: Float8e4m3fn[AnyArray, "*B r blocks"],
    amax: Any,
    bound: int,
    extent: int,
    dtype: Any,
) -> Float[AnyArray, "*B r {extent}"]:
    """fl(val * fl(fl(float(s) * A) * fl(1/(6B)))), then one rounding to dtype, in the stored orientation.

    amax None: the product form, code times block scale, at most 6 significant bits below 4096: exact in every dtype.
    """
    xp = namespace(codes, block_scale, amax)
    value, factor = decode_e2m1(unpack(xp.asarray(codes))), decode_e4m3(xp.asarray(block_scale))
    if amax is not None:
        factor = pinned(factor * counted_amax(_per_row(xp.asarray(amax), codes.ndim), bound)) * _reciprocal(bound)
    value = value.reshape(*factor.shape, BLOCK) * factor[..., None]
    return value.reshape(*value.shape[:-2], value.shape[-2] * BLOCK)[..., :extent].astype(jnp.dtype(dtype))


@exact
def matmul(lhs: tuple, rhs: tuple, bounds: tuple[int, int], dtype: Any, bias: Any = None) -> Float[AnyArray, "*B m n"]:
    """lhs [*B, m, k] times the transpose of rhs [*B, n, k]: what `quantize` returned for each, both blocked along k.

    Code times block scale is exact in bfloat16, and a product of two is exact in float32, so only the sum rounds: in
    float64, then once to float32, on NumPy (the oracle); in float32, in the order of XLA's dot, on jnp. The rest is
    `epilogue`.
    """
    xp = namespace(*lhs, *rhs, bias)
    form, sums = (np.float64, {}) if xp is np else (jnp.bfloat16, {"preferred_element_type": np.float32})
    a, b = (dequantize(q[0], q[1], None, 0, q[0].shape[-1] * PACK, np.float32).astype(form) for q in (lhs, rhs))
    acc = xp.matmul(a, b.swapaxes(-1, -2), **sums).astype(np.float32)
    column, row = (
        tensor_factor(xp.asarray(q[2]), q[0].ndim, bound) for q, bound in zip((lhs, rhs), bounds, strict=True)
    )
    return epilogue(acc, column, row.swapaxes(-1, -2), dtype, None if bias is None else xp.asarray(bias))


def swizzle(compact: UInt8[AnyArray, "*B r c"]) -> UInt8[AnyArray, "*B size"]:
    """Scales in the order Blackwell's tensor cores read: tiles of 128 x 4, in each the byte of (row, column) at
    (row % 32) * 16 + (row / 32) * 4 + column. Padding is zero. Any type of one byte an element."""
    xp, dtype, bytes_ = namespace(compact), compact.dtype, compact.view(np.uint8)
    *batch, r, c = compact.shape
    height, width = padded(r, SWIZZLE_ROWS), padded(c, SWIZZLE_COLUMNS)
    tiles = pad_last(xp, bytes_, height - r, width - c).reshape(*batch, height // 128, 4, 32, width // 4, 4)
    tiles = xp.moveaxis(tiles, (-5, -4, -3, -2, -1), (-5, -2, -3, -4, -1))
    return tiles.reshape(*batch, height * width).view(dtype)


def unswizzle(swizzled: UInt8[AnyArray, "*B size"], rows: int, columns: int) -> UInt8[AnyArray, "*B {rows} {columns}"]:
    """Inverse of `swizzle`, for the compact shape [rows, columns]."""
    xp, batch = namespace(swizzled), swizzled.shape[:-1]
    height, width = padded(rows, SWIZZLE_ROWS), padded(columns, SWIZZLE_COLUMNS)
    tiles = swizzled.view(np.uint8).reshape(*batch, height // 128, width // 4, 32, 4, 4)
    tiles = xp.moveaxis(tiles, (-5, -2, -3, -4, -1), (-5, -4, -3, -2, -1))
    return tiles.reshape(*batch, height, width)[..., :rows, :columns].view(swizzled.dtype)
