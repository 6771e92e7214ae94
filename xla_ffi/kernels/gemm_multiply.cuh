// The kernel's two sides: a thread fetches tiles of both operands and a warp their block scales,
// two to four warpgroups multiply them.
#ifndef JAX_FP4_XLA_FFI_KERNELS_GEMM_MULTIPLY_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_GEMM_MULTIPLY_CUH_

#include "gemm_decode.cuh"
#include "gemm_plan.cuh"
#include "ptx.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

namespace jax_fp4::cuda {
namespace {

constexpr int kContractedTile = 64;  // a chunk: 128 bytes of bfloat16
constexpr int kStep = 16;            // of one instruction
constexpr int kBoxBytes = 64 * kContractedTile * 2;

// The tiles that the block takes: one thread draws them and finds where they lie, all that work on
// one take it from here.
struct Queue {
  static constexpr int kSlots = 2, kWords = sizeof(Tile) / 4;
  uint32_t slots, full, empty;  // addresses
  uint32_t turn = 0;

  __device__ __forceinline__ explicit Queue(uint32_t memory)
      : slots(memory), full(memory + kSlots * sizeof(Tile)), empty(full + 8 * kSlots) {}

  __device__ __forceinline__ void put(const Tile& tile) {
    const uint32_t slot = turn % kSlots;
    wait_idly(empty + 8 * slot, turn / kSlots % 2 ^ 1);
    const auto* words = reinterpret_cast<const uint32_t*>(&tile);
#pragma unroll
    for (int i = 0; i < kWords; ++i) store_word(slots + (slot * kWords + i) * 4, words[i]);
    arrive(full + 8 * slot);
    ++turn;
  }
  // By all lanes of a warp; false at the end, which is a tile without rows.
  __device__ __forceinline__ bool take(Tile& tile) {
    const uint32_t slot = turn % kSlots;
    wait(full + 8 * slot, turn / kSlots % 2);
    auto* words = reinterpret_cast<uint32_t*>(&tile);
#pragma unroll
    for (int i = 0; i < kWords; ++i)  // so that the compiler knows them to be those of the warp
      words[i] = __shfl_sync(~0u, load_word(slots + (slot * kWords + i) * 4), 0);
    if (threadIdx.x % 32 == 0) arrive(empty + 8 * slot);
    ++turn;
    return tile.rows > 0;
  }
};
constexpr int kQueueBytes = Queue::kSlots * (sizeof(Tile) + 16);
static_assert(Queue::kSlots * sizeof(Tile) % 8 == 0, "barriers follow the slots");

// How the operand with the columns lies in memory.
enum class Columns { kPacked, kAlong, kAcross };  // the contraction along its rows, or across them

// A kernel: its operands, its tiles, and how many warpgroups multiply, 64 columns each. `sharers`
// of them have the same columns and each its part of the chunks.
template <Columns columns, bool contraction, int tile_rows, int groups, int chunks, int stages,
          int round, int rounds, int sharers = 1>
struct GemmShape {
  static constexpr Columns kColumns = columns;
  static constexpr bool kPacked = columns == Columns::kPacked;
  static constexpr bool kContraction = contraction;
  static constexpr bool kRowsAcross = contraction && columns == Columns::kAcross;
  static constexpr int kTileRows = tile_rows, kGroups = groups;
  static constexpr int kChunks = chunks, kStages = stages;
  static constexpr int kSharers = sharers, kOwnChunks = chunks / sharers;
  static constexpr int kTileColumns = 64 * groups / sharers;
  static constexpr int kBoxRows = tile_rows < 64 ? tile_rows : 64;
  // Of the result, on their way out: rows that are staged at once, and rounds that there is room
  // for.
  static constexpr int kRoundRows = round, kRounds = rounds;
  static constexpr int kThreads = kGroupThreads * (1 + groups);
  // Registers of a thread that fetches and of one that multiplies; together those of the launch.
  static constexpr int kFew = groups == 4 ? 64 : 56;
  static constexpr int kMany = groups == 2 ? 224 : groups == 3 ? 152 : 104;
  // Of a chunk: rows of the one operand, columns of the other, block scales.
  static constexpr int kRowBytes = tile_rows * kContractedTile * 2;
  static constexpr int kColumnBytes = kTileColumns * kContractedTile * (kPacked ? 1 : 4) / 2;
  static constexpr int kScaleBytes = kPacked ? kTileColumns * kContractedTile / 16 : 0;
  // In a stage, of which each part has all chunks; and behind the stages.
  static constexpr int kColumnsAt = kRowBytes * chunks;
  static constexpr int kScalesAt = kColumnsAt + kColumnBytes * chunks;
  static constexpr int kStageBytes = (kScalesAt + kScaleBytes * chunks + 1023) / 1024 * 1024;
  static constexpr int kOutAt = stages * kStageBytes, kOutBytes = groups * round * rounds * 128;
  static constexpr int kSharedAt = kOutAt + kOutBytes;  // sums of those that share
  static constexpr int kSharedBytes = groups * 64 * tile_rows * 4 * (sharers - 1) / sharers;
  static constexpr int kTableAt = kSharedAt + kSharedBytes;
  static constexpr int kBarriersAt = kTableAt + (kPacked ? 4 * cuda::kScaleBytes : 0);
  static constexpr int kPlanAt = kBarriersAt + 16 * stages + kQueueBytes;
  static constexpr int kBytes = kPlanAt + 8 * (kMostGroups + 2);  // of shared memory
  static_assert(kBytes <= 227 * 1024, "a thread block has so much");
  static_assert(sharers == 1 || (sharers == groups && chunks % sharers == 0), "all or none");
  static_assert(round % 16 == 0 && (round < 32 || round % 32 == 0), "pairs of matrices, boxes");
  static_assert(kFew + groups * kMany <= 65536 / kThreads / 8 * 8 * (1 + groups), "registers");
};

// The stages, a ring that both sides go round.
struct Ring {
  uint32_t memory, full, empty;  // addresses
  int stage = 0;
  uint32_t parity = 0;

  template <class S>
  __device__ __forceinline__ static Ring of(uint32_t memory) {
    const uint32_t barriers = memory + S::kBarriersAt;
    return {memory, barriers, barriers + 8 * S::kStages};
  }
  template <class S>
  __device__ __forceinline__ uint32_t stage_memory() const {
    return memory + stage * S::kStageBytes;
  }
  template <class S>
  __device__ __forceinline__ void advance() {
    if (++stage == S::kStages) stage = 0, parity ^= 1;
  }
};

// ---- The side that fetches ---------------------------------------------------------------------

// Boxes of one operand, at most `most`, from `at` on, where nothing is contracted; `c` is the place
// in what is.
template <bool kAcross, int most>
__device__ __forceinline__ void fetch_boxes(uint32_t memory, const CUtensorMap& map, int at, int c,
                                            int group, int boxes, int lines, uint32_t barrier) {
#pragma unroll
  for (int i = 0; i < most; ++i) {
    if (i >= boxes) break;
    const int line = at + i * lines;
    const uint32_t to = memory + i * lines * kContractedTile * 2;
    if (kAcross) copy_box(to, map, line, c, group, barrier);
    if (!kAcross) copy_box(to, map, c, line, group, barrier);
  }
}

template <class S>
__device__ __forceinline__ void fetch_tile(const CUtensorMap& columns, const CUtensorMap& rows,
                                           const Tile& tile, Ring& ring) {
  const int boxes = (tile.rows + S::kBoxRows - 1) / S::kBoxRows;
  const uint32_t bytes = S::kChunks * (S::kColumnBytes + boxes * S::kBoxRows * kContractedTile * 2);
  const int group = S::kContraction ? 0 : tile.group, end = tile.begin + tile.length;
  for (int c = tile.begin; c < end; c += S::kChunks * kContractedTile, ring.advance<S>()) {
    const uint32_t memory = ring.stage_memory<S>(), full = ring.full + 8 * ring.stage;
    const uint32_t to = memory + S::kColumnsAt;
    wait_idly(ring.empty + 8 * ring.stage, ring.parity ^ 1);
    arrive_expecting(full, bytes);
    if (S::kPacked)
      copy_box(to, columns, c / 2, tile.column, group, full);
    else if (S::kColumns == Columns::kAlong)
      copy_box(to, columns, c, tile.column, group, full);
    else
      fetch_boxes<true, S::kTileColumns / 64>(to, columns, tile.column, c, group,
                                              S::kTileColumns / 64, 64, full);
#pragma unroll
    for (int i = 0; i < S::kChunks; ++i)
      fetch_boxes<S::kRowsAcross, S::kTileRows / S::kBoxRows>(memory + i * S::kRowBytes, rows,
                                                              tile.row, c + i * kContractedTile, 0,
                                                              boxes, S::kBoxRows, full);
  }
}

// The block scales of a tile, by a warp: of each column four bytes a chunk, zeros beyond the
// operand, since what lies there is multiplied with zeros and must not be NaN.
template <class S>
__device__ __forceinline__ void fetch_scales(const GemmTask& task, const Tile& tile, Ring& ring,
                                             int lane) {
  constexpr int kLines = S::kTileColumns / 32, kBytes = 4 * S::kChunks;
  const int width = task.contracted / 16;
  const bool together = width % kBytes == 0;            // what a stage has of a column is aligned
  const int lines = task.columns - tile.column - lane;  // of which every 32nd is this lane's
  const uint8_t* from =
      task.block_scale + (int64_t{tile.group} * task.columns + tile.column + lane) * width;
  const int64_t step = int64_t{32} * width;  // from one of a lane's lines to the next
  for (int block = 0; block < width; block += kBytes, ring.advance<S>(), from += kBytes) {
    const uint32_t to = ring.stage_memory<S>() + S::kScalesAt + lane * kBytes;
    wait_idly(ring.empty + 8 * ring.stage, ring.parity ^ 1);
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const bool exists = 32 * i < lines;
      const uint8_t* line = from + (exists ? i * step : 0);
      if (together) {
        copy_few<kBytes>(to + 32 * kBytes * i, exists ? line : task.block_scale, exists);
        continue;
      }
#pragma unroll
      for (int j = 0; j < kBytes; j += 4) {
        const bool inside = exists && block + j < width;
        copy_few<4>(to + 32 * kBytes * i + j, inside ? line + j : task.block_scale, inside);
      }
    }
    arrive_after_copies(ring.full + 8 * ring.stage);
  }
}

// ---- The side that multiplies ------------------------------------------------------------------

__device__ __forceinline__ void release(const Ring& ring, int stage, int lane) {
  if (lane == 0) arrive(ring.empty + 8 * stage);
}

// Where a lane's part of a stage begins: codes and scales, in lines of columns, swizzled where they
// are of 128 bytes; and the rows of the warpgroup's chunks.
struct LaneOffsets {
  uint32_t codes, scales, rows;

  template <class S>
  __device__ __forceinline__ static LaneOffsets of(int warpgroup) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    const int column = warpgroup / S::kSharers * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4;
    const int chunk = warpgroup % S::kSharers * S::kOwnChunks;
    const int swizzle = S::kChunks == 4 ? column % 8 << 4 : 0;
    LaneOffsets at = {static_cast<uint32_t>(S::kColumnsAt + column * 32 * S::kChunks +
                                            ((chunk * 32 + t * 8) ^ swizzle)),
                      static_cast<uint32_t>(S::kScalesAt + (column * S::kChunks + chunk) * 4 + t),
                      S::kSharers > 1 ? __shfl_sync(~0u, chunk * S::kRowBytes, 0) : 0u};
    asm volatile("" : "+r"(at.codes), "+r"(at.scales));  // else computed for every load
    return at;
  }
};

// A lane's part of 64 columns and a chunk: a block of each of two columns, eight apart.
struct LaneBlocks {
  uint64_t codes[2];
  uint32_t scale[2];

  // Of a chunk from there on; `table` is that of scales.
  template <class S>
  __device__ __forceinline__ void load(uint32_t codes_from, uint32_t scales_from, uint32_t table,
                                       int chunk) {
    const uint32_t from = codes_from ^ chunk * 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale[i] = load_byte(scales_from + (8 * i * S::kChunks + chunk) * 4);
      codes[i] = load_double_word(from + 8 * i * 32 * S::kChunks);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[i] = load_word(table + 4 * scale[i]);
  }
  // The registers of two steps.
  template <int half>
  __device__ __forceinline__ void decode(const uint32_t places[2], uint32_t a[8]) const {
    uint32_t pairs[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      decode_word(static_cast<uint32_t>(codes[i] >> (32 * half)), scale[i], places, pairs[i]);
#pragma unroll
    for (int j = 0; j < 4; ++j) a[2 * j] = pairs[0][j], a[2 * j + 1] = pairs[1][j];
  }
};

// sums += kRows rows times columns that are decoded on the way, a part of a chunk at a time, while
// the products of the one before are under way and the codes after it are loaded. Products of few
// rows are short: a part is the whole chunk then, if the next one has registers of its own, else a
// half.
template <class S, int kRows>
__device__ __forceinline__ void multiply_packed(const GemmTask& task, const Tile& tile,
                                                int warpgroup, Ring& ring, float* sums) {
  const int lane = threadIdx.x % 32;
  const LaneOffsets at = LaneOffsets::of<S>(warpgroup);
  constexpr int kParts = kRows <= 16 && S::kOwnChunks > 1 ? 1 : 2;
  constexpr int kSteps = kContractedTile / kStep / kParts;
  uint32_t a[2][4 * kSteps];
  int before = -1;  // the stage that is to be released
  LaneBlocks blocks[2];
  const auto load = [&](uint32_t stage, int chunk) {
    blocks[chunk % 2].load<S>(stage + at.codes, stage + at.scales, ring.memory + S::kTableAt,
                              chunk);
  };
  wait(ring.full + 8 * ring.stage, ring.parity);
  load(ring.stage_memory<S>(), 0);
  int left = tile.length;
  do {  // at least once (wgmma_finish)
    const int now = ring.stage;
    const uint32_t stage = __shfl_sync(~0u, ring.stage_memory<S>(), 0);  // in a uniform register
#pragma unroll
    for (int chunk = 0; chunk < S::kOwnChunks; ++chunk) {
      const uint32_t rows = describe(stage + at.rows + chunk * S::kRowBytes);
      const bool last = chunk + 1 == S::kOwnChunks;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        uint32_t* registers = a[kParts == 1 ? chunk % 2 : part];
        if (part == 0) blocks[chunk % 2].decode<0>(task.places, registers);
        if (part == kParts - 1)
          blocks[chunk % 2].decode<1>(task.places, registers + (kParts == 1 ? 8 : 0));
        wgmma_fence();
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
          Wgmma<kRows>::from_registers(sums, registers + 4 * s,
                                       rows + (part * kSteps + s) * (kStep * 2 >> 4));
        wgmma_commit();
        if (part == 0 && !last) load(stage, chunk + 1);
        if (part == kParts - 1 && last) {
          ring.advance<S>();
          if (left > S::kChunks * kContractedTile) {
            wait(ring.full + 8 * ring.stage, ring.parity);
            load(ring.stage_memory<S>(), 0);
          }
        }
        wgmma_wait<1>();
        if (chunk == 0 && part == 0 && before >= 0) release(ring, before, lane);
      }
    }
    before = now;
  } while ((left -= S::kChunks * kContractedTile) > 0);
  wgmma_finish<Wgmma<kRows>::kSums>(sums);
  release(ring, before, lane);
}

// The places of 8 rows and a chunk: what one matrix of eight lines needs of them for four steps.
__device__ __forceinline__ void load_rows(uint32_t rows, int lane, uint32_t b[8]) {
  const int row = lane % 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t from = rows + row * 128 + ((4 * i + lane / 8 ^ row) << 4);
    load_matrices(from, b + 4 * i);
  }
}
// The same for at most 8 rows, warp by warp: warpgroup products of so few take longer to wait for
// than to do.
template <class S>
__device__ __forceinline__ void multiply_few(const GemmTask& task, const Tile& tile, int warpgroup,
                                             Ring& ring, float* sums) {
  const int lane = threadIdx.x % 32;
  const LaneOffsets at = LaneOffsets::of<S>(warpgroup);
  LaneBlocks blocks[2];
  uint32_t b[2][8];
  for (int left = tile.length; left > 0; left -= S::kChunks * kContractedTile, ring.advance<S>()) {
    wait(ring.full + 8 * ring.stage, ring.parity);
    const uint32_t stage = __shfl_sync(~0u, ring.stage_memory<S>(), 0);  // in a uniform register
    const auto load = [&](int chunk) {
      blocks[chunk % 2].load<S>(stage + at.codes, stage + at.scales, ring.memory + S::kTableAt,
                                chunk);
      load_rows(stage + at.rows + chunk * S::kRowBytes, lane, b[chunk % 2]);
    };
    load(0);
#pragma unroll
    for (int chunk = 0; chunk < S::kOwnChunks; ++chunk) {
      if (chunk + 1 < S::kOwnChunks) load(chunk + 1);
      uint32_t a[16];
      blocks[chunk % 2].decode<0>(task.places, a);
      blocks[chunk % 2].decode<1>(task.places, a + 8);
#pragma unroll
      for (int s = 0; s < 4; ++s) multiply_warp(sums, a + 4 * s, b[chunk % 2] + 2 * s);
    }
    __syncwarp();
    release(ring, ring.stage, lane);
  }
}

// The sums of all warpgroups that share columns, in their order, to the first of them.
template <class S, int kSums>
__device__ __forceinline__ void gather_sums(float* sums, int warpgroup, uint32_t memory) {
  constexpr int kPart = kSums * 4 * kGroupThreads;
  const uint32_t from = memory + S::kSharedAt + threadIdx.x % kGroupThreads * 16;
  meet(S::kGroups + 1, S::kGroups * kGroupThreads);  // the sums before have been read
  if (warpgroup > 0) {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      uint32_t words[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) words[e] = __float_as_uint(sums[4 * i + e]);
      store_pieces(from + (warpgroup - 1) * kPart + i * 16 * kGroupThreads,
                   make_uint4(words[0], words[1], words[2], words[3]));
    }
  }
  meet(S::kGroups + 1, S::kGroups * kGroupThreads);
  if (warpgroup > 0) return;
  for (int other = 0; other < S::kSharers - 1; ++other) {
#pragma unroll
    for (int i = 0; i < kSums / 4; ++i) {
      const uint4 v = load_pieces(from + other * kPart + i * 16 * kGroupThreads);
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[4 * i + e] += __uint_as_float(words[e]);
    }
  }
}

// Zeros beyond what a group has of its last chunk, on both sides: there another group's values lie,
// which may be NaN. A line of 128 bytes is a place in the contraction, or has it in eight pieces.
template <class S>
__device__ __forceinline__ void clear_beyond(uint32_t stage, int length, int boxes) {
  const int lines = S::kTileColumns + boxes * 64;
  const int thread = threadIdx.x - kGroupThreads;
  for (int i = thread; i < lines * 8; i += S::kGroups * kGroupThreads) {
    const int line = i / 8, piece = i % 8;
    const bool beyond =
        S::kColumns == Columns::kAcross ? line % 64 >= length : (piece ^ line % 8) * 8 >= length;
    if (!beyond) continue;
    const uint32_t memory = line < S::kTileColumns ? stage + S::kColumnsAt + line * 128
                                                   : stage + (line - S::kTileColumns) * 128;
    store_pieces(memory + piece * 16, make_uint4(0, 0, 0, 0));
  }
  publish_writes();
  meet(S::kGroups + 1, S::kGroups * kGroupThreads);
}

// sums += kRows rows times columns, both in shared memory.
template <class S, int kRows>
__device__ __forceinline__ void multiply_shared(const Tile& tile, int warpgroup, Ring& ring,
                                                float* sums) {
  constexpr bool kAcross = S::kColumns == Columns::kAcross, kRowsAcross = S::kRowsAcross;
  constexpr int kAlongStep = kStep * 2 >> 4, kAcrossStep = kStep * 128 >> 4;
  int before = -1;
  int left = tile.length;
  if (left <= 0) return;
  do {  // at least once (wgmma_finish)
    wait(ring.full + 8 * ring.stage, ring.parity);
    const uint32_t stage = __shfl_sync(~0u, ring.stage_memory<S>(), 0);  // in a uniform register
    if (S::kContraction && left < kContractedTile)
      clear_beyond<S>(stage, left, (tile.rows + 63) / 64);
    const uint32_t rows = describe(stage, kRowsAcross ? kBoxBytes : 16);
    const uint32_t columns = describe(stage + S::kColumnsAt + warpgroup * kBoxBytes);
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kContractedTile / kStep; ++s)
      Wgmma<kRows>::template from_shared<kAcross, kRowsAcross>(
          sums, columns + s * (kAcross ? kAcrossStep : kAlongStep),
          rows + s * (kRowsAcross ? kAcrossStep : kAlongStep));
    wgmma_commit();
    wgmma_wait<1>();
    if (before >= 0) release(ring, before, threadIdx.x % 32);
    before = ring.stage;
    ring.advance<S>();
  } while ((left -= kContractedTile) > 0);
  wgmma_finish<Wgmma<kRows>::kSums>(sums);
  release(ring, before, threadIdx.x % 32);
}

}  // namespace
}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_GEMM_MULTIPLY_CUH_
