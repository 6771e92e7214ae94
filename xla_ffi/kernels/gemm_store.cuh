// Sums to the result: factors, bias, rounding, and a turn in shared memory, since a lane's sums lie
// along a column and the result along rows.
#ifndef JAX_FP4_XLA_FFI_KERNELS_GEMM_STORE_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_GEMM_STORE_CUH_

#include <cuda_fp16.h>

#include "gemm_plan.cuh"
#include "ptx.cuh"
#include "tma.cuh"

namespace jax_fp4::cuda {
namespace {

// The result's type, and of narrow ones two of consecutive rows in a word.
struct StoreF32 {
  using Word = float;
};
struct StoreBF16 {
  using Word = uint16_t;
  __device__ __forceinline__ static uint32_t pair(float low, float high) {
    return pack_bfloat16(low, high);
  }
};
struct StoreF16 {
  using Word = uint16_t;
  __device__ __forceinline__ static uint32_t pair(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
};

// What multiplies the sums of a lane's two columns, and what is added.
struct Finish {
  const float* by_row;       // of the tile's rows; null = 1
  const float* row_weights;  // of the tile's rows; null = 1
  float lhs, rhs[2], bias[2];
  int rows;
  bool by_column_alone;  // neither by_row nor a bias

  __device__ __forceinline__ Finish(const GemmTask& task, const Tile& tile, int column,
                                    bool contraction, float unit) {
    const int64_t group = tile.group, first = contraction ? group * task.rows : 0;
    const auto of_rows = [&](const float* values, bool has) {
      return has && values != nullptr ? values + first + tile.row : nullptr;
    };
    by_row = of_rows(task.lhs_factor, task.lhs_by_row);
    row_weights = of_rows(task.row_weights, true);
    rows = tile.rows;
    by_column_alone = by_row == nullptr && task.bias == nullptr;
    lhs = task.lhs_factor != nullptr && !task.lhs_by_row ? task.lhs_factor[group] : 1.0f;
    lhs *= unit;  // a power of two, exact: so are the sums and their products with it
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int at = tile.column + column + 8 * c;
      const bool inside = at < task.columns;
      const int64_t of_column = group * task.columns + at;
      rhs[c] = task.rhs_factor == nullptr ? 1.0f
               : !task.rhs_by_column      ? task.rhs_factor[group]
               : inside                   ? task.rhs_factor[of_column]
                                          : 1.0f;
      bias[c] = task.bias != nullptr && inside ? task.bias[of_column] : 0.0f;
    }
  }
  // The result's element of a sum of column c; values of rows beyond the tile are not read.
  template <bool kByColumnAlone>
  __device__ __forceinline__ float operator()(float sum, int row, int c) const {
    const float value = sum * lhs;
    if (kByColumnAlone) return value * rhs[c];
    const bool inside = row < rows;
    const float scaled = (by_row != nullptr && inside ? value * by_row[row] : value) * rhs[c];
    return scaled + (row_weights != nullptr && inside ? row_weights[row] : 1.0f) * bias[c];
  }
};

// Rows of a stage [.., 64] to the result, from the first on, by threads; `columns` of them exist.
template <class Word>
__device__ __forceinline__ void copy_rows(uint32_t stage, int first, int rows, int columns,
                                          const GemmTask& task, Word* out) {
  const bool whole = task.columns % 8 == 0;  // so that eight columns are stored or none
  for (int i = first * 8 + threadIdx.x % kGroupThreads; i < rows * 8; i += kGroupThreads) {
    const int row = i / 8, piece = i % 8;
    if (piece * 8 >= columns) continue;
    const uint4 v = load_pieces(stage + row * 128 + ((piece ^ (row % 8)) << 4));
    Word* to = out + static_cast<int64_t>(row) * task.columns + piece * 8;
    if (whole) {
      *reinterpret_cast<uint4*>(to) = v;
    } else {
      const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (piece * 8 + e < columns) to[e] = static_cast<uint16_t>(pairs[e / 2] >> (16 * (e % 2)));
    }
  }
}

constexpr int kOutBoxRows = 32;

// The sums of a warpgroup's 64 columns at `column_of_tile`, kRows rows of them, of which sums [4 j]
// to [4 j + 3] are rows 8 j + 2 t and the next of the lane's column, and the same of that 8
// further. Rows are staged in rounds, 128 bytes each, in the warpgroup's own memory. From there the
// copy engine stores them while the next product is under way, but not where a box has rows that
// are another group's.
template <class S, class Store, int kRows, bool kByColumnAlone>
__device__ __forceinline__ void store_staged(const float* sums, const GemmTask& task,
                                             const CUtensorMap& map, const Tile& tile,
                                             const Finish& finish, int column_of_tile,
                                             uint32_t memory, int barrier,
                                             typename Store::Word* out) {
  const int thread = threadIdx.x % kGroupThreads, warp = thread / 32, lane = thread % 32;
  constexpr int kRound = S::kRoundRows;
#pragma unroll
  for (int begin = 0; begin < kRows; begin += kRound) {
    if (begin >= tile.rows) break;
    const uint32_t stage = memory + begin / kRound % S::kRounds * kRound * 128;
    if (thread == 0 && begin == 0) wait_for_stores<0>();  // of the tile before, of any rounds
    if (thread == 0 && begin > 0) wait_for_stores<S::kRounds - 1>();
    meet(barrier, kGroupThreads);  // the stage is free
#pragma unroll
    for (int j = begin / 8; j < (begin + kRound) / 8 && j < kRows / 8; j += 2) {
      uint32_t words[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int c = q % 2, row = 8 * (j + q / 2) + 2 * (lane % 4);
        float value[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
          value[r] =
              finish.operator()<kByColumnAlone>(sums[4 * (j + q / 2) + 2 * c + r], row + r, c);
        words[q] = Store::pair(value[0], value[1]);
      }
      const int row = 8 * (j + lane / 16) + lane % 8 - begin;
      const int piece = 2 * warp + lane / 8 % 2;
      store_matrices(stage + row * 128 + ((piece ^ (row % 8)) << 4), words);
    }
    publish_writes();
    meet(barrier, kGroupThreads);
    const int rows = min(tile.rows - begin, kRound);
    const int boxes = task.columns % 8 == 0 ? rows / kOutBoxRows : 0;
    if (thread == 0) {
      for (int i = 0; i < boxes; ++i)
        store_box(map, tile.column + column_of_tile, tile.row + begin + i * kOutBoxRows, tile.group,
                  stage + i * kOutBoxRows * 128);
      commit_stores();
    }
    copy_rows(stage, boxes * kOutBoxRows, rows, task.columns - tile.column - column_of_tile, task,
              out + int64_t{begin} * task.columns);
  }
}

// The same of float32, which eight lanes store as whole sectors without a turn.
template <int kRows, bool kByColumnAlone>
__device__ __forceinline__ void store_floats(const float* sums, const GemmTask& task,
                                             const Tile& tile, const Finish& finish,
                                             int column_of_tile, float* out) {
  const int thread = threadIdx.x % kGroupThreads, lane = thread % 32;
  const int column = thread / 32 * 16 + lane / 4;
  const int left = task.columns - tile.column - column_of_tile;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 8 * j + 2 * (lane % 4) + r;
      if (row >= tile.rows) continue;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float value = finish.operator()<kByColumnAlone>(sums[4 * j + 2 * c + r], row, c);
        if (column + 8 * c < left)
          out[static_cast<int64_t>(row) * task.columns + column + 8 * c] = value;
      }
    }
  }
}

// Zeros in a tile of `columns` columns, by `threads` threads.
template <class Word>
__device__ __forceinline__ void store_zeros(const GemmTask& task, const Tile& tile, int columns,
                                            int thread, int threads, Word* out) {
  const int wide = min(columns, task.columns - tile.column);
  constexpr int kVector = 16 / sizeof(Word);
  if (task.columns % kVector == 0) {
    for (int i = thread; i < tile.rows * (columns / kVector); i += threads) {
      const int row = i / (columns / kVector), column = i % (columns / kVector) * kVector;
      if (column < wide)
        *reinterpret_cast<uint4*>(out + static_cast<int64_t>(row) * task.columns + column) =
            make_uint4(0, 0, 0, 0);
    }
    return;
  }
  for (int i = thread; i < tile.rows * columns; i += threads)
    if (i % columns < wide)
      out[static_cast<int64_t>(i / columns) * task.columns + i % columns] = Word(0);
}

}  // namespace
}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_GEMM_STORE_CUH_
