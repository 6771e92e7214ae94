// The products of grouped_gemm.h on Hopper. The columns of the result are the 64-wide side of a
// warpgroup product, so that packed weights, decoded in registers, can be that operand; its rows
// are the other side, of any multiple of eight. One thread block a multiprocessor, in which tiles
// follow one another without a gap but for the stores that threads make.
#include "device.h"
#include "gemm_multiply.cuh"
#include "gemm_store.cuh"

namespace jax_fp4::cuda {
namespace {

// Tiles for many rows a group, some, a few, and a few whose columns would fill a part of the GPU.
using PackedMany = GemmShape<Columns::kPacked, false, 256, 2, 1, 4, 128, 2>;
using PackedSome = GemmShape<Columns::kPacked, false, 128, 3, 2, 4, 64, 1>;
using PackedFew = GemmShape<Columns::kPacked, false, 16, 4, 4, 4, 16, 1>;
using PackedAlone = GemmShape<Columns::kPacked, false, 16, 4, 4, 8, 16, 1, 4>;
using RowsAlong = GemmShape<Columns::kAlong, false, 256, 2, 1, 4, 64, 1>;
using RowsAcross = GemmShape<Columns::kAcross, false, 256, 2, 1, 4, 64, 1>;
using ContractionAlong = GemmShape<Columns::kAlong, true, 256, 2, 1, 3, 128, 2>;
using ContractionAcross = GemmShape<Columns::kAcross, true, 256, 2, 1, 3, 128, 2>;
static_assert(ContractionAlong::kTileRows == kPartRows &&
              ContractionAcross::kTileRows == kPartRows);

// How both operands and the result lie in memory.
struct Maps {
  CUtensorMap columns, rows, out;
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class S, class Store, int kRows, bool kByColumnAlone>
__device__ __forceinline__ void store_part(const float* sums, const GemmTask& task,
                                           const CUtensorMap& map, const Tile& tile,
                                           const Finish& finish, int column, int warpgroup,
                                           uint32_t out_stage, typename Store::Word* out) {
  if constexpr (sizeof(typename Store::Word) == 4)
    store_floats<kRows, kByColumnAlone>(sums, task, tile, finish, column, out);
  else
    store_staged<S, Store, kRows, kByColumnAlone>(sums, task, map, tile, finish, column, out_stage,
                                                  1 + warpgroup, out);
}

// The tile, with the matrix of the result as its group and its first row there.
template <bool kContraction>
__device__ __forceinline__ Tile in_result(const GemmTask& task, const Tile& tile) {
  Tile placed = tile;
  placed.group = 0;
  if constexpr (kContraction) {
    const int32_t part = tile.row / task.part_rows;
    placed.group = part * task.groups + tile.group;
    placed.row = tile.row - part * task.part_rows;
  }
  return placed;
}

// Of the warpgroup's 64 columns of the tile.
template <class S, class Store, int kRows>
__device__ __forceinline__ void store(const float* sums, const GemmTask& task,
                                      const CUtensorMap& map, const Tile& tile, int warpgroup,
                                      uint32_t memory) {
  const int column = warpgroup * 64;
  const uint32_t stage = memory + S::kOutAt + warpgroup * S::kRoundRows * S::kRounds * 128;
  const int lane_column = column + threadIdx.x % kGroupThreads / 32 * 16 + threadIdx.x % 32 / 4;
  const Tile placed = in_result<S::kContraction>(task, tile);
  const int64_t first = int64_t{placed.group} * task.part_rows + placed.row;
  auto* out =
      static_cast<typename Store::Word*>(task.out) + first * task.columns + tile.column + column;
  const Finish finish(task, tile, lane_column, S::kContraction, S::kPacked ? kDecodedUnit : 1.0f);
  if (finish.by_column_alone)
    store_part<S, Store, kRows, true>(sums, task, map, placed, finish, column, warpgroup, stage,
                                      out);
  else
    store_part<S, Store, kRows, false>(sums, task, map, placed, finish, column, warpgroup, stage,
                                       out);
}

template <class S, class Store, int kRows>
__device__ __forceinline__ void multiply_and_store(const GemmTask& task, const CUtensorMap& out,
                                                   const Tile& tile, int warpgroup, Ring& ring) {
  float sums[Wgmma<kRows>::kSums];
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  if (kRows == 16 && tile.rows <= 8) {
    if constexpr (kRows == 16) multiply_few<S>(task, tile, warpgroup, ring, sums);
  } else if constexpr (S::kPacked) {
    multiply_packed<S, kRows>(task, tile, warpgroup, ring, sums);
  } else {
    multiply_shared<S, kRows>(tile, warpgroup, ring, sums);
  }
  if constexpr (S::kSharers > 1) {
    gather_sums<S, Wgmma<kRows>::kSums>(sums, warpgroup, ring.memory);
    if (warpgroup > 0) return;
  }
  store<S, Store, kRows>(sums, task, out, tile, warpgroup, ring.memory);
}

// By the rows that a tile has: products of fewer rows, where they are enough.
template <class S, class Store, int kRows>
__device__ __forceinline__ void multiply_tile(const GemmTask& task, const CUtensorMap& out,
                                              const Tile& tile, int warpgroup, Ring& ring) {
  constexpr int kQuarter = S::kTileRows / 4;
  if constexpr (S::kTileRows >= 128 && kRows > kQuarter) {
    if (tile.rows <= kRows - kQuarter) {
      multiply_tile<S, Store, kRows - kQuarter>(task, out, tile, warpgroup, ring);
      return;
    }
  }
  multiply_and_store<S, Store, kRows>(task, out, tile, warpgroup, ring);
}

template <class S>
__device__ __forceinline__ void start_barriers(const Ring& ring, const Queue& queue) {
  constexpr int kWarps = S::kGroups * kGroupThreads / 32;
  for (int i = 0; i < S::kStages; ++i) {
    init_barrier(ring.full + 8 * i, S::kPacked ? 1 + 32 : 1);
    init_barrier(ring.empty + 8 * i, kWarps);
  }
  for (int i = 0; i < Queue::kSlots; ++i) {
    init_barrier(queue.full + 8 * i, 1);
    init_barrier(queue.empty + 8 * i, kWarps + (S::kPacked ? 1 : 0));
  }
  publish_barriers();
}

// A thread draws tiles and fetches both operands of each.
template <class S>
__device__ __forceinline__ void fetch(const GemmTask& task, const Plan& plan, const Maps& maps,
                                      Ring& ring, Queue& queue) {
  Tiles<S::kTileRows, S::kTileColumns, S::kContraction> tiles(task, plan);
  const uint32_t count = tiles.count();
  for (uint32_t i = blockIdx.x; i < count;) {
    const Tile tile = tiles.at(i);
    queue.put(tile);
    i = task.drawn == nullptr ? i + gridDim.x : gridDim.x + atomicAdd(task.drawn, 1u);
    if (!tile.is_tail) fetch_tile<S>(maps.columns, maps.rows, tile, ring);
  }
  queue.put({});
}

template <class S, class Store>
__device__ __forceinline__ void multiply(const GemmTask& task, const CUtensorMap& out_map,
                                         Ring& ring, Queue& queue) {
  const int warpgroup = threadIdx.x / kGroupThreads - 1;
  for (Tile tile; queue.take(tile);) {
    if (!tile.is_tail) {
      multiply_tile<S, Store, S::kTileRows>(task, out_map, tile, warpgroup, ring);
    } else {
      auto* out = static_cast<typename Store::Word*>(task.out);
      store_zeros(task, tile, S::kTileColumns, threadIdx.x - kGroupThreads,
                  S::kGroups * kGroupThreads, out + int64_t{tile.row} * task.columns + tile.column);
    }
  }
  wait_for_stores<0>();  // which read the block's memory
}

template <class S, class Store>
__device__ __forceinline__ void run(const GemmTask& task, const Maps& maps, uint8_t* memory) {
  Ring ring = Ring::of<S>(shared_address(memory));
  Queue queue(ring.memory + S::kPlanAt - kQueueBytes);
  auto* numbers = reinterpret_cast<int32_t*>(memory + S::kPlanAt);
  const Plan plan = {numbers, numbers + task.groups + 2};
  if (threadIdx.x < 32) make_plan<S::kContraction ? 0 : S::kTileRows>(task, plan, threadIdx.x);
  if (threadIdx.x == 32) start_barriers<S>(ring, queue);
  if (S::kPacked && threadIdx.x < kScaleBytes)
    reinterpret_cast<uint32_t*>(memory + S::kTableAt)[threadIdx.x] = widen_scale(threadIdx.x);
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    give_registers<S::kFew>();
    if (threadIdx.x == 0) fetch<S>(task, plan, maps, ring, queue);
    if constexpr (S::kPacked) {
      if (threadIdx.x / 32 != 1) return;
      for (Tile tile; queue.take(tile);)
        if (!tile.is_tail) fetch_scales<S>(task, tile, ring, threadIdx.x % 32);
    }
  } else {
    take_registers<S::kMany>();
    multiply<S, Store>(task, maps.out, ring, queue);
  }
}

#endif

template <class S, class Store>
__global__ void __launch_bounds__(S::kThreads, 1)
    grouped_gemm(const __grid_constant__ GemmTask task, const __grid_constant__ Maps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) uint8_t memory[];
  run<S, Store>(task, maps, memory);
#else
  __trap();
#endif
}

// ---- The host's side ---------------------------------------------------------------------------

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                                 const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                                 const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// From the driver that is there, so that nothing is linked.
cudaError_t find_encode(EncodeTiled& encode) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                             12000, cudaEnableDefault, &result);
  if (error != cudaSuccess) return error;
  encode = reinterpret_cast<EncodeTiled>(found);
  return result == cudaDriverEntryPointSuccess ? cudaSuccess : cudaErrorCallRequiresNewerDriver;
}

// An operand or result [depth, lines, width], of bytes or of 16-bit values, in boxes of
// [box_lines, box_width].
struct Operand {
  const void* data;
  bool bytes;
  int64_t width, lines, depth;
  int box_width, box_lines;
};

cudaError_t make_map(EncodeTiled encode, const Operand& o, CUtensorMap& map) {
  const int64_t size = o.bytes ? 1 : 2;
  const cuuint64_t extents[3] = {static_cast<cuuint64_t>(o.width), static_cast<cuuint64_t>(o.lines),
                                 static_cast<cuuint64_t>(o.depth)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(o.width * size),
                                 static_cast<cuuint64_t>(o.width * o.lines * size)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(o.box_width),
                             static_cast<cuuint32_t>(o.box_lines), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(&map, o.bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3,
             const_cast<void*>(o.data), extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             o.box_width * size == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class S>
Operand columns_operand(const GemmProblem& p) {
  if (S::kPacked) return {p.rhs, true, p.k / 2, p.n, p.groups, 32 * S::kChunks, S::kTileColumns};
  const bool along = S::kColumns == Columns::kAlong;
  if (S::kContraction)
    return along ? Operand{p.rhs, false, p.stored, p.n, 1, kContractedTile, S::kTileColumns}
                 : Operand{p.rhs, false, p.n, p.m, 1, 64, kContractedTile};
  return along ? Operand{p.rhs, false, p.k, p.n, p.groups, kContractedTile, S::kTileColumns}
               : Operand{p.rhs, false, p.n, p.k, p.groups, 64, kContractedTile};
}

template <class S>
Operand rows_operand(const GemmProblem& p) {
  if (!S::kContraction) return {p.lhs, false, p.k, p.m, 1, kContractedTile, S::kBoxRows};
  return S::kRowsAcross ? Operand{p.lhs, false, p.k, p.m, 1, 64, kContractedTile}
                        : Operand{p.lhs, false, p.stored, p.k, 1, kContractedTile, S::kBoxRows};
}

template <class S>
Operand out_operand(const GemmProblem& p) {
  if (S::kContraction)
    return {p.out, false, p.n, p.k / p.parts, p.parts * p.groups, 64, kOutBoxRows};
  return {p.out, false, p.n, p.m, 1, 64, kOutBoxRows};
}

// There is none of a result that threads store: of few rows, of float32, or whose rows are not
// whole vectors.
template <class S>
cudaError_t make_maps(const GemmProblem& p, Maps& maps) {
  EncodeTiled encode = nullptr;
  cudaError_t error = find_encode(encode);
  if (error == cudaSuccess) error = make_map(encode, columns_operand<S>(p), maps.columns);
  if (error == cudaSuccess) error = make_map(encode, rows_operand<S>(p), maps.rows);
  if (error == cudaSuccess && S::kRoundRows >= kOutBoxRows && p.out_dtype != DType::kF32 &&
      p.n % 8 == 0)
    error = make_map(encode, out_operand<S>(p), maps.out);
  return error;
}

GemmTask make_task(const GemmProblem& p) {
  GemmTask task = {};
  const bool contraction = p.kind == Gemm::kContraction;
  task.m = static_cast<int32_t>(p.m);
  task.rows = static_cast<int32_t>(contraction ? p.k : 0);
  task.part_rows = static_cast<int32_t>(contraction ? p.k / p.parts : 0);
  task.columns = static_cast<int32_t>(p.n);
  task.contracted = static_cast<int32_t>(p.k);
  task.groups = static_cast<int32_t>(p.groups);
  task.padded = p.contracts_last;
  task.block_scale = p.block_scale;
  task.lhs_factor = p.lhs_factor, task.rhs_factor = p.rhs_factor;
  task.lhs_by_row = p.lhs_by_row, task.rhs_by_column = p.rhs_by_column;
  task.bias = p.bias, task.row_weights = p.row_weights;
  task.group_sizes = p.group_sizes;
  task.out = p.out;
  task.places[0] = kFirstPlaces, task.places[1] = kSecondPlaces;
  return task;
}

// At most so many tiles have work.
template <class S>
int64_t most_tiles(const GemmProblem& p) {
  const int64_t across = ceil_div(p.n, S::kTileColumns);
  if (S::kContraction) return p.groups * ceil_div(p.k, S::kTileRows) * across;
  return (ceil_div(p.m, S::kTileRows) + p.groups + 1) * across;
}

// What the slowest multiprocessor does, in columns: tiles come in waves.
template <class S>
int64_t longest(const GemmProblem& p, int processors) {
  const int64_t rows = ceil_div(p.m, p.groups), across = ceil_div(p.n, S::kTileColumns);
  const int64_t tiles = p.groups * ceil_div(rows, S::kTileRows) * across;
  return ceil_div(tiles, processors) * S::kTileColumns;
}

template <class S, class Store>
cudaError_t launch(const GemmProblem& p, void* scratch, cudaStream_t stream) {
  Maps maps = {};
  int processors = 0;
  cudaError_t error = make_maps<S>(p, maps);
  if (error == cudaSuccess) error = multiprocessors(&processors);
  const auto kernel = grouped_gemm<S, Store>;
  const int64_t tiles = most_tiles<S>(p);
  if (tiles >= int64_t{1} << 31) return cudaErrorInvalidValue;
  // The same for all calls, since it is the function's and threads may launch at once.
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kBytes);
  if (error != cudaSuccess) return error;
  const unsigned blocks = static_cast<unsigned>(tiles < processors ? tiles : processors);
  GemmTask task = make_task(p);
  // Tiles of uneven groups take unequal times; drawing them costs the clearing of a number.
  if (p.groups > 1 && S::kTileRows >= 128 && tiles > 2 * processors) {
    task.drawn = static_cast<uint32_t*>(scratch);
    error = cudaMemsetAsync(scratch, 0, sizeof(*task.drawn), stream);
    if (error != cudaSuccess) return error;
  }
  kernel<<<blocks, S::kThreads, S::kBytes, stream>>>(task, maps);
  return cudaGetLastError();
}

template <class S>
cudaError_t launch_dtype(const GemmProblem& p, void* scratch, cudaStream_t stream) {
  switch (p.out_dtype) {
    case DType::kF32:
      return launch<S, StoreF32>(p, scratch, stream);
    case DType::kBF16:
      return launch<S, StoreBF16>(p, scratch, stream);
    case DType::kF16:
      return launch<S, StoreF16>(p, scratch, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

const char* why_not(const GemmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 31;
  if (p.m <= 0 || p.n <= 0 || p.k <= 0 || p.groups <= 0) return "an extent is not positive";
  if (p.groups > kMostGroups) return "more than 1024 groups";
  if (p.m >= kMost - 1024 || p.n >= kMost - 1024 || p.k >= kMost - 1024 || p.stored >= kMost - 1024)
    return "an extent is beyond 2^31";
  if (p.parts != 1 && (p.kind != Gemm::kContraction || p.parts < 1 || p.k % (p.parts * kPartRows)))
    return "a part of k is no multiple of 256";
  if (p.kind == Gemm::kPacked && p.k % kContractedTile != 0)
    return "the contracted extent is no multiple of 64";
  if (p.kind == Gemm::kContraction && p.contracts_last)
    return p.stored % 16 != 0 ? "the stored extent is no multiple of 16" : "";
  if (p.kind == Gemm::kRows && p.k % 8 != 0) return "k is no multiple of 8";
  if (p.kind == Gemm::kRows && !p.contracts_last && p.n % 8 != 0) return "n is no multiple of 8";
  if (p.kind == Gemm::kContraction && (p.k % 8 != 0 || p.n % 8 != 0))
    return "k or n is no multiple of 8";
  return "";
}

cudaError_t launch_grouped_gemm(const GemmProblem& p, void* scratch, cudaStream_t stream) {
  if (*why_not(p) != '\0') return cudaErrorInvalidValue;
  bool hopper = false;
  const cudaError_t error = is_hopper(&hopper);
  if (error != cudaSuccess) return error;
  if (!hopper) return cudaErrorNotSupported;
  switch (p.kind) {
    case Gemm::kPacked: {
      const int64_t mean = ceil_div(p.m, p.groups);
      int processors = 0;
      const cudaError_t error = multiprocessors(&processors);
      if (error != cudaSuccess) return error;
      if (mean <= 16) {
        if (4 * longest<PackedAlone>(p, processors) <= 3 * longest<PackedFew>(p, processors))
          return launch_dtype<PackedAlone>(p, scratch, stream);
        return launch_dtype<PackedFew>(p, scratch, stream);
      }
      // Three warpgroups hide more of the decoding of columns that few rows share; two may fill the
      // last wave so much better that it is worth more.
      const bool some = mean <= 128 && 3 * longest<PackedSome>(p, processors) <=
                                           4 * longest<PackedMany>(p, processors);
      if (some) return launch_dtype<PackedSome>(p, scratch, stream);
      return launch_dtype<PackedMany>(p, scratch, stream);
    }
    case Gemm::kRows:
      return p.contracts_last ? launch_dtype<RowsAlong>(p, scratch, stream)
                              : launch_dtype<RowsAcross>(p, scratch, stream);
    case Gemm::kContraction:
      return p.contracts_last ? launch_dtype<ContractionAlong>(p, scratch, stream)
                              : launch_dtype<ContractionAcross>(p, scratch, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_fp4::cuda
