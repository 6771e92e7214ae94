// The 8 x 8 patch that a thread of quantize_tiles.cu holds in registers: maxima and scales of its
// rows and columns, their signs, their random bytes, and the transform.
#ifndef JAX_FP4_XLA_FFI_KERNELS_TILE_PATCH_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_TILE_PATCH_CUH_

#include "tile_stage.cuh"

namespace jax_fp4::cuda {
namespace {  // of the one kernel file that includes it

// ---- Patches -----------------------------------------------------------------------------------

struct Patch {
  uint32_t pair[kPatch][kPatch / 2];
};

__device__ __forceinline__ void load_patch(const uint16_t* stage, int row, int column, Patch& x) {
#pragma unroll
  for (int r = 0; r < kPatch; ++r) {
    const uint4 v = *reinterpret_cast<const uint4*>(stage + (row + r) * kTileColumns + column);
    x.pair[r][0] = v.x, x.pair[r][1] = v.y, x.pair[r][2] = v.z, x.pair[r][3] = v.w;
  }
}
__device__ __forceinline__ void load_patch(const float* stage, int row, int column, Patch& x) {
  const int low = swizzled<float>(column / 4) * 4, high = swizzled<float>(column / 4 + 1) * 4;
#pragma unroll
  for (int r = 0; r < kPatch; ++r) {
    const float* from = stage + (row + r) * kTileColumns;
    const float4 a = *reinterpret_cast<const float4*>(from + low);
    const float4 b = *reinterpret_cast<const float4*>(from + high);
    x.pair[r][0] = pack_bfloat16(a.x, a.y), x.pair[r][1] = pack_bfloat16(a.z, a.w);
    x.pair[r][2] = pack_bfloat16(b.x, b.y), x.pair[r][3] = pack_bfloat16(b.z, b.w);
  }
}

__device__ __forceinline__ float value_of(const Patch& x, int r, int c) {
  const uint32_t pair = x.pair[r][c / 2];
  return c % 2 == 0 ? low_half(pair) : high_half(pair);
}

// Rows become columns.
__device__ __forceinline__ void transpose(Patch& x) {
#pragma unroll
  for (int r = 0; r < kPatch; r += 2)
#pragma unroll
    for (int c = r; c < kPatch; c += 2) {
      // Two squares of 2 x 2 change places, each transposed.
      const uint32_t a = x.pair[r][c / 2], b = x.pair[r + 1][c / 2];
      const uint32_t d = x.pair[c][r / 2], e = x.pair[c + 1][r / 2];
      x.pair[c][r / 2] = __byte_perm(a, b, 0x5410),
                    x.pair[c + 1][r / 2] = __byte_perm(a, b, 0x7632);
      x.pair[r][c / 2] = __byte_perm(d, e, 0x5410),
                    x.pair[r + 1][c / 2] = __byte_perm(d, e, 0x7632);
    }
}

// Where a thread's patch lies: lanes 8 columns apart first, then 8 rows.
struct Place {
  int row, column;            // of the tile
  int row_half, column_half;  // which half of its blocks it is

  __device__ static Place of(int thread) {
    const int lane = thread % 32, warp = thread / 32;
    const int row = warp / 2 * 32 + lane / 8 * kPatch;
    const int column = warp % 2 * 64 + lane % 8 * kPatch;
    return {row, column, row / kPatch % 2, column / kPatch % 2};
  }
};
constexpr int kAcrossLanes = 1, kDownLanes = 8;  // lanes that hold the other half of a block

// Scales of eight lines, a byte each, and an eighth of their multipliers.
struct EightScales {
  uint32_t bytes[2];
  float multiplier[kPatch];

  // From the maxima of four pairs of lines. line(i) is the scale of line i; `table` may be null.
  template <class Line>
  __device__ __forceinline__ void choose(const uint32_t most[4], const Line& line,
                                         const float* table) {
    uint32_t two[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      two[i] = scale_pair(most[i], line(2 * i).per_block, line(2 * i + 1).per_block);
    bytes[0] = __byte_perm(two[0], two[1], 0x5410);
    bytes[1] = __byte_perm(two[2], two[3], 0x5410);
#pragma unroll
    for (int i = 0; i < kPatch; ++i) {
      const uint32_t byte = i % 2 == 0 ? two[i / 2] & 0xFFu : two[i / 2] >> 8;  // at most 0x7F
      multiplier[i] = table != nullptr ? table[byte] : eighth_multiplier(byte, line(i).decode);
    }
  }
};
__device__ __forceinline__ bool any_nan_scale(const uint32_t bytes[2]) {
  return has_nan_scale(bytes[0]) || has_nan_scale(bytes[1]);
}

// Maxima of pairs of rows, low half the even one, over whole blocks, of which `partner` has the
// other half.
__device__ __forceinline__ void row_maxima(const Patch& x, uint32_t most[4],
                                           int partner = kAcrossLanes) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t row[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t* pair = x.pair[2 * i + h];
      row[h] = max_magnitude(max_magnitude(pair[0], pair[1]), max_magnitude(pair[2], pair[3]));
    }
    most[i] =
        max_magnitude(__byte_perm(row[0], row[1], 0x5410), __byte_perm(row[0], row[1], 0x7632));
    most[i] = max_magnitude(most[i], __shfl_xor_sync(~0u, most[i], partner));
  }
}

__device__ __forceinline__ void column_maxima(const Patch& x, uint32_t most[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    most[j] = x.pair[0][j];
#pragma unroll
    for (int r = 1; r < kPatch; ++r) most[j] = max_magnitude(most[j], x.pair[r][j]);
    most[j] = max_magnitude(most[j], __shfl_xor_sync(~0u, most[j], kDownLanes));
  }
}

// From the maxima of rows: those of the 16x16 tile, everywhere.
__device__ __forceinline__ void square_maxima(uint32_t most[4]) {
  uint32_t all = max_magnitude(max_magnitude(most[0], most[1]), max_magnitude(most[2], most[3]));
  all = max_magnitude(all, __byte_perm(all, all, 0x1032));
  all = max_magnitude(all, __shfl_xor_sync(~0u, all, kDownLanes));
#pragma unroll
  for (int i = 0; i < 4; ++i) most[i] = all;
}

// The random words of this patch's halves of eight lines' blocks, of which two lanes hold the two
// halves. Each draws four whole blocks, together so that they share the keys and the loop stays
// short, and gives the other lane its half.
__device__ __forceinline__ void draw_eight(const Origin& origin, int64_t line, int64_t block,
                                           int half, int partner, uint32_t random[kPatch][2]) {
  uint32_t word[kPatch / 2][4];
  uint64_t index = origin.index(line + half, block);
#pragma unroll
  for (int i = 0; i < kPatch / 2; ++i, index += 2 * origin.blocks) origin.count(index, word[i]);
  uint32_t key0 = origin.key0, key1 = origin.key1;
#pragma unroll 5
  for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma unroll
    for (int i = 0; i < kPatch / 2; ++i) philox_round<float>(word[i], key0, key1);
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
#pragma unroll
  for (int i = 0; i < kPatch / 2; ++i)
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const uint32_t mine = half ? word[i][2 + w] : word[i][w];
      const uint32_t other = __shfl_xor_sync(~0u, half ? word[i][w] : word[i][2 + w], partner);
      random[2 * i][w] = half ? other : mine;
      random[2 * i + 1][w] = half ? mine : other;
    }
}

// The transform of eight columns, of which this lane holds the upper or lower eight rows.
__device__ __forceinline__ void mix_columns(Patch& x, int half) {
  const uint32_t signs = half ? kHadamardSigns >> kPatch : kHadamardSigns & 0xFFu;
  const float own = half ? -1.0f : 1.0f;
  uint32_t flip[kPatch];
#pragma unroll
  for (int r = 0; r < kPatch; ++r) flip[r] = (signs >> r) << 31;
#pragma unroll
  for (int j = 0; j < kPatch / 2; ++j) {
    float v[2][kPatch];
#pragma unroll
    for (int r = 0; r < kPatch; ++r) {
      v[0][r] = __uint_as_float(x.pair[r][j] * 0x10000u + flip[r]);
      v[1][r] = __uint_as_float((x.pair[r][j] & 0xFFFF0000u) ^ flip[r]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int stride = 1; stride < kPatch; stride *= 2)
#pragma unroll
        for (int r = 0; r < kPatch; ++r)
          if ((r & stride) == 0) {
            const float a = v[h][r], b = v[h][r + stride];
            v[h][r] = a + b;
            v[h][r + stride] = a - b;
          }
      // Stride 8: a + b here, a - b there; a product with +-1 is exact, so the fma rounds the sum.
#pragma unroll
      for (int r = 0; r < kPatch; ++r)
        v[h][r] = __fmaf_rn(v[h][r], own, __shfl_xor_sync(~0u, v[h][r], kDownLanes)) * 0.25f;
    }
#pragma unroll
    for (int r = 0; r < kPatch; ++r) x.pair[r][j] = pack_bfloat16(v[0][r], v[1][r]);
  }
}

}  // namespace
}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_TILE_PATCH_CUH_
