// What a thread of quantize_float8.cu holds of x: 8 x 8 elements as words, of which two-byte
// elements fill a half each; and how they are loaded. Nothing here knows of other threads, and all
// of it compiles for the host too, where tests/cpp/emulate_float8.cu runs it.
#ifndef JAX_FP4_XLA_FFI_KERNELS_FLOAT8_PATCH_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_FLOAT8_PATCH_CUH_

#include <cuda_fp16.h>

#include "ptx.cuh"
#include "ptx_float8.cuh"
#include "quantize_float8.h"

namespace jax_fp4::cuda {

constexpr int kPatch = 8;  // rows and columns of a patch

#if defined(__CUDA_ARCH__)
#define JAX_FP4_ROLLED _Pragma("unroll 1")
#else
#define JAX_FP4_ROLLED
#endif

// ---- Words -------------------------------------------------------------------------------------

JAX_FP4_FN float half_value(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
}
JAX_FP4_FN uint32_t half_bits(float value) { return __half_as_ushort(__float2half_rn(value)); }

template <DType dtype>
struct Words {
  static constexpr int kPer = dtype == DType::kF32 ? 1 : 2;  // elements of each
  static constexpr int kRow = kPatch / kPer;                 // of a row, or a column, of a patch
  static constexpr uint32_t kMask = kPer == 1 ? kMagnitude : 0x7FFF7FFFu;

  // The larger of each two magnitudes, as integers, so that NaN and Inf win.
  JAX_FP4_MEMBER uint32_t more(uint32_t a, uint32_t b) {
    if constexpr (kPer == 1) return a < b ? b : a;
#if defined(__CUDA_ARCH__)
    return __vmaxu2(a, b);
#else
    const uint32_t low = (a & 0xFFFFu) < (b & 0xFFFFu) ? b : a;
    const uint32_t high = (a >> 16) < (b >> 16) ? b : a;
    return (low & 0xFFFFu) | (high & 0xFFFF0000u);
#endif
  }

  // Element i of a word.
  JAX_FP4_MEMBER float value(uint32_t word, int i) {
    using L = Lanes<float>;
    if constexpr (dtype == DType::kF32) return L::from_bits(word);
    if constexpr (dtype == DType::kBF16) return L::from_bits(i ? word & 0xFFFF0000u : word << 16);
    return half_value(i ? word >> 16 : word & 0xFFFFu);
  }

  // The bits of a value, rounded, as element 0 of a word.
  JAX_FP4_MEMBER uint32_t rounded(float value) {
    if constexpr (dtype == DType::kF32) return Lanes<float>::bits(value);
    if constexpr (dtype == DType::kBF16) return Lanes<float>::bits(round_to_bfloat16(value)) >> 16;
    return half_bits(value);
  }
  JAX_FP4_MEMBER uint32_t rounded_pair(float low, float high) {
#if defined(__CUDA_ARCH__)
    if constexpr (dtype == DType::kBF16) return pack_bfloat16(low, high);
#endif
    return rounded(low) | rounded(high) << 16;
  }
};

// The dtype of x once it is rounded to `compute`: float32 would hold any of them as they are.
JAX_FP4_FN DType held_dtype(DType x, DType compute) { return compute == DType::kF32 ? x : compute; }

// ---- Pieces of 16 bytes ------------------------------------------------------------------------

struct alignas(16) Piece {
  uint32_t word[4];
};

JAX_FP4_FN Piece load_piece(const void* from) {
#if defined(__CUDA_ARCH__)
  const uint4 v = __ldg(static_cast<const uint4*>(from));
  return {{v.x, v.y, v.z, v.w}};
#else
  Piece piece;
  memcpy(&piece, from, sizeof(piece));
  return piece;
#endif
}

// ---- The patch ---------------------------------------------------------------------------------

// Where a patch begins in x. Launches keep all of it, and 128 more, in 32 bits.
struct Corner {
  int32_t entry, row, column;

  JAX_FP4_MEMBER int64_t element(int64_t m, int64_t k, const Corner& c) {
    return (c.entry * m + c.row) * k + c.column;
  }
};

// x [batch, m, k], element by element.
struct Matrices {
  const void* x;
  DType dtype;
  int64_t m, k;

  __host__ __device__ __forceinline__ float at(const Corner& corner) const {
    const int64_t index = Corner::element(m, k, corner);
    switch (dtype) {
      case DType::kF32:
        return static_cast<const float*>(x)[index];
      case DType::kBF16:
        return Words<DType::kBF16>::value(static_cast<const uint16_t*>(x)[index], 0);
      case DType::kF16:
        return half_value(static_cast<const uint16_t*>(x)[index]);
    }
    return 0.0f;
  }
};

template <DType dtype>
struct Patch {
  using W = Words<dtype>;
  uint32_t word[kPatch][W::kRow];

  // Rows and columns that x does not have are zeros. In whole pieces where k is a multiple of 8 and
  // x is held as it is stored, or is float32; element by element otherwise.
  JAX_FP4_MEMBER Patch load(const Float8Problem& p, const Corner& corner) {
    if (p.k % kPatch == 0 && p.x_dtype == dtype) return load_whole(p, corner);
    if constexpr (dtype != DType::kF32)
      if (p.k % kPatch == 0 && p.x_dtype == DType::kF32) return load_floats(p, corner);
    return load_elements(p, corner);
  }

  JAX_FP4_MEMBER Patch load_whole(const Float8Problem& p, const Corner& corner) {
    constexpr int kBytes = 4 / W::kPer;
    const uint8_t* from =
        static_cast<const uint8_t*>(p.x) + Corner::element(p.m, p.k, corner) * kBytes;
    Patch patch;
    JAX_FP4_UNROLL
    for (int i = 0; i < kPatch; ++i) {
      const bool exists = corner.row + i < p.m && corner.column < p.k;
      JAX_FP4_UNROLL
      for (int j = 0; j < W::kRow; j += 4) {
        const Piece piece = exists ? load_piece(from + i * p.k * kBytes + 4 * j) : Piece{};
        JAX_FP4_UNROLL
        for (int n = 0; n < 4; ++n) patch.word[i][j + n] = piece.word[n];
      }
    }
    return patch;
  }

  JAX_FP4_MEMBER Patch load_floats(const Float8Problem& p, const Corner& corner) {
    const float* from = static_cast<const float*>(p.x) + Corner::element(p.m, p.k, corner);
    Patch patch;
    JAX_FP4_UNROLL
    for (int i = 0; i < kPatch; ++i) {
      const bool exists = corner.row + i < p.m && corner.column < p.k;
      JAX_FP4_UNROLL
      for (int j = 0; j < W::kRow; j += 2) {
        const Piece piece = exists ? load_piece(from + i * p.k + j * W::kPer) : Piece{};
        const auto value = [&](int n) { return Lanes<float>::from_bits(piece.word[n]); };
        patch.word[i][j] = W::rounded_pair(value(0), value(1));
        patch.word[i][j + 1] = W::rounded_pair(value(2), value(3));
      }
    }
    return patch;
  }

  // Any k, any dtypes. By way of memory: only the copy has indices that the compiler knows.
  JAX_FP4_MEMBER Patch load_elements(const Float8Problem& p, const Corner& corner) {
    uint32_t words[kPatch * W::kRow];
    gather({p.x, p.x_dtype, p.m, p.k}, corner, words);
    Patch patch;
    JAX_FP4_UNROLL
    for (int i = 0; i < kPatch * W::kRow; ++i) patch.word[i / W::kRow][i % W::kRow] = words[i];
    return patch;
  }
  // No part of its caller, whose registers its loop would take; by value, or the caller would have
  // a copy of p in memory.
  __host__ __device__ static __noinline__ void gather(const Matrices x, const Corner corner,
                                                      uint32_t* words) {
    JAX_FP4_ROLLED
    for (int i = 0; i < kPatch * kPatch; i += W::kPer) {
      uint32_t word = 0;
      JAX_FP4_UNROLL
      for (int n = 0; n < W::kPer; ++n) {
        const Corner at = {corner.entry, corner.row + i / kPatch, corner.column + i % kPatch + n};
        if (at.row < x.m && at.column < x.k) word |= W::rounded(x.at(at)) << (16 * n);
      }
      words[i / W::kPer] = word;
    }
  }

  JAX_FP4_MEMBER float at(const Patch& patch, int row, int column) {
    return W::value(patch.word[row][column / W::kPer], column % W::kPer);
  }

  // The magnitudes of each row's and each column's largest element, kPer lines a word.
  JAX_FP4_MEMBER void peaks(const Patch& patch, uint32_t rows[W::kRow], uint32_t columns[W::kRow]) {
    JAX_FP4_UNROLL
    for (int j = 0; j < W::kRow; ++j) columns[j] = 0;
    uint32_t before = 0;
    JAX_FP4_UNROLL
    for (int i = 0; i < kPatch; ++i) {
      uint32_t most = 0;
      JAX_FP4_UNROLL
      for (int j = 0; j < W::kRow; ++j) {
        const uint32_t magnitudes = patch.word[i][j] & W::kMask;
        most = W::more(most, magnitudes);
        columns[j] = W::more(columns[j], magnitudes);
      }
      if (W::kPer == 1)
        rows[i] = most;
      else if (i % 2 == 1)
        rows[i / 2] = W::more((before & 0xFFFFu) | most << 16, before >> 16 | (most & 0xFFFF0000u));
      before = most;
    }
  }
};

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_FLOAT8_PATCH_CUH_
