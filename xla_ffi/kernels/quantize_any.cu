// The stored forms of any problem: every dtype, extent and variant, at the price of speed. The
// faster kernels are held to its results.
//
// Sixteen threads take a 16x16 tile of x (a row block by sixteen columns), lane i its row i and
// then its column i; the tile passes through shared memory. Stored rows are written in pieces of
// 8 + 1 bytes.
#include "quantize_task.cuh"

namespace jax_fp4::cuda {
namespace {

constexpr int kTilesAtOnce = 8;  // of a thread block

// A tile as its sixteen threads see it.
struct TileView {
  const float (*x)[kBlock + 1];
  uint32_t lanes;  // the mask of the sixteen threads
  int lane;

  __device__ void row(float v[kBlock]) const {
    for (int i = 0; i < kBlock; ++i) v[i] = x[lane][i];
  }
  __device__ void column(float v[kBlock]) const {
    for (int i = 0; i < kBlock; ++i) v[i] = x[i][lane];
  }
};

__device__ uint32_t block_amax(const float v[kBlock]) {
  uint32_t amax = 0;
  for (int i = 0; i < kBlock; ++i) amax = max(amax, __float_as_uint(v[i]) & kMagnitude);
  return amax;
}

// Of the whole tile: a tree over the errors of its rows.
__device__ float tile_error(const TileView& tile, float error) {
  for (int stride = kBlock / 2; stride > 0; stride /= 2)
    error = error + __shfl_down_sync(tile.lanes, error, stride, kBlock);
  return __shfl_sync(tile.lanes, error, 0, kBlock);
}

template <ErrorNorm norm>
__device__ uint32_t four_over_six_scale(const TileView& tile, const float v[kBlock], bool tiled,
                                        uint32_t amax, const TensorScale<float>& tensor,
                                        float six_bound) {
  const FourOverSixScales<float> scales = four_over_six_scales<float>(amax, tensor);
  float error[2];
  for (int i = 0; i < 2; ++i) {
    const float scale = e4m3_decode<float>(i == 0 ? scales.six : scales.four);
    const float multiplier = encode_multiplier(scale, tensor);
    error[i] = 0.0f;
    for (int j = 0; j < kBlock; ++j)
      error[i] +=
          four_over_six_error<norm>(magnitude(v[j]), multiplier, scale, tensor.amax, six_bound);
    if (tiled) error[i] = tile_error(tile, error[i]);
  }
  const uint32_t chosen = error[1] < error[0] ? scales.four : scales.six;
  return amax >= kInfBits ? kNanScale : chosen;
}

// The scale of the block v of each lane; of the tile if `tiled`, and then the lanes hold rows (the
// orientation in which four-over-six chooses).
__device__ uint32_t choose_scale(const TileView& tile, const float v[kBlock], bool tiled,
                                 const StoredForm& form, const TensorScale<float>& tensor) {
  uint32_t amax = block_amax(v);
  for (int stride = 1; tiled && stride < kBlock; stride *= 2)
    amax = max(amax, __shfl_xor_sync(tile.lanes, amax, stride, kBlock));
  const float six_bound = kE2M1Max * static_cast<float>(form.bound);
  switch (form.four_over_six) {
    case ErrorNorm::kNone:
      return block_scale<float>(amax, tensor);
    case ErrorNorm::kMae:
      return four_over_six_scale<ErrorNorm::kMae>(tile, v, tiled, amax, tensor, six_bound);
    case ErrorNorm::kMse:
      return four_over_six_scale<ErrorNorm::kMse>(tile, v, tiled, amax, tensor, six_bound);
  }
  return kNanScale;
}

// The codes of a block, element 0 in the low bits; `random` is null for nearest rounding.
__device__ uint64_t encode(const float v[kBlock], uint32_t scale, const TensorScale<float>& tensor,
                           const uint32_t* random) {
  if (scale == kNanScale) return 0;
  const float multiplier = encode_multiplier(e4m3_decode<float>(scale), tensor);
  uint64_t codes = 0;
  for (int i = 0; i < kBlock; ++i) {
    const float value = v[i] * multiplier;
    const uint64_t code = random == nullptr
                              ? e2m1_nearest(value)
                              : e2m1_stochastic(value, (random[i / 4] >> (8 * (i % 4))) & 0xFFu);
    codes |= code << (4 * i);
  }
  return codes;
}

__device__ void store_block(const StoredForm& form, int64_t index, uint32_t scale, uint64_t codes) {
  if (form.codes == nullptr) return;
  reinterpret_cast<uint64_t*>(form.codes)[index] = codes;
  form.block_scale[index] = static_cast<uint8_t>(scale);
}

// `count` values of a block of the product form.
__device__ void store_values(uint16_t* to, int64_t count, uint32_t scale, uint64_t codes) {
  const float factor = e4m3_decode<float>(scale);
  for (int i = 0; i < kBlock && i < count; ++i) {
    const float code = e2m1_decode<float>(static_cast<uint32_t>(codes >> (4 * i)) & 15u);
    to[i] = static_cast<uint16_t>(__float_as_uint(round_to_bfloat16(code * factor)) >> 16);
  }
}

__device__ void quantize_row_form(const QuantizeTask& task, const TileView& tile, int64_t entry,
                                  const RowBlock& rows, int64_t column_block) {
  const QuantizeProblem& p = task.p;
  const int64_t row = entry * p.m + rows.row + tile.lane;
  const bool exists = tile.lane < rows.rows;
  const float amax = exists ? row_form_amax(task, entry, rows, rows.row + tile.lane) : 0.0f;
  const TensorScale<float> tensor = tensor_scale(amax, static_cast<float>(p.row.bound));
  float v[kBlock];
  tile.row(v);
  // The rows that do not exist take part in a 2-D tile: they are zero, but need the tensor's scale.
  const bool tiled = p.tile == kBlock;
  const TensorScale<float> shared = tiled && rows.rows > 0
                                        ? tensor_scale(row_form_amax(task, entry, rows, rows.row),
                                                       static_cast<float>(p.row.bound))
                                        : tensor;
  const uint32_t scale = choose_scale(tile, v, tiled, p.row, shared);
  if (!exists) return;
  uint32_t random[4];
  if (p.seed != nullptr)
    Origin::of(task, entry, rows.group, kRowDirection)
        .draw(rows.place + tile.lane, column_block, random);
  const uint64_t codes = encode(v, scale, tensor, p.seed == nullptr ? nullptr : random);
  store_block(p.row, row * p.row.blocks + column_block, scale, codes);
  if (p.values != nullptr)
    store_values(p.values + row * p.k + column_block * kBlock, p.k - column_block * kBlock, scale,
                 codes);
}

__device__ void quantize_column_form(const QuantizeTask& task, const TileView& tile, int64_t entry,
                                     const RowBlock& rows, int64_t block, int64_t column_block) {
  const QuantizeProblem& p = task.p;
  const int64_t column = column_block * kBlock + tile.lane;
  const bool tiled = p.tile == kBlock, exists = column < p.k;
  // A block without rows has no matrix; its zeros need no amax.
  const float amax = (exists || !p.row_scaled) && rows.rows > 0
                         ? column_form_amax(task, entry, rows, column)
                         : 0.0f;
  const TensorScale<float> tensor = tensor_scale(amax, static_cast<float>(p.column.bound));
  float v[kBlock];
  uint32_t scale = 0;
  const bool derived = tiled && !p.column.hadamard;
  if (derived) {
    tile.row(v);
    scale = choose_scale(tile, v, true, p.column, tensor);
  }
  tile.column(v);
  if (p.column.hadamard) {
    for (int i = 0; i < kBlock; ++i) v[i] = round_to_bfloat16(v[i]);
    hadamard16(v);
  }
  if (!derived) scale = choose_scale(tile, v, tiled, p.column, tensor);
  if (!exists) return;
  uint32_t random[4];
  const bool drawn = p.seed != nullptr && rows.rows > 0;
  if (drawn)
    Origin::of(task, entry, rows.group, kColumnDirection).draw(column, rows.place / kBlock, random);
  const uint64_t codes = encode(v, scale, tensor, drawn ? random : nullptr);
  store_block(p.column, (entry * p.k + column) * p.column.blocks + block, scale, codes);
}

__global__ void __launch_bounds__(kTilesAtOnce* kBlock) quantize_any(QuantizeTask task) {
  __shared__ float tiles[kTilesAtOnce][kBlock][kBlock + 1];
  const QuantizeProblem& p = task.p;
  store_given_amaxes(p);
  const int slot = threadIdx.x / kBlock, lane = threadIdx.x % kBlock;
  const TileView tile = {tiles[slot], 0xFFFFu << (slot % 2 * kBlock), lane};
  const int64_t across = ceil_div(p.k, kBlock), total = p.batch * task.row_blocks * across;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kTilesAtOnce;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kTilesAtOnce + slot; i < total; i += stride) {
    const int64_t column_block = i % across, block = i / across % task.row_blocks;
    const int64_t entry = i / across / task.row_blocks;
    const RowBlock rows = task.row_block(entry, block);
    const int64_t column = column_block * kBlock + lane;
    __syncwarp(tile.lanes);
    for (int r = 0; r < kBlock; ++r) {
      const bool exists = r < rows.rows && column < p.k;
      tiles[slot][r][lane] =
          exists ? load_element(p, (entry * p.m + rows.row + r) * p.k + column) : 0.0f;
    }
    __syncwarp(tile.lanes);
    if (p.row.wanted) quantize_row_form(task, tile, entry, rows, column_block);
    if (p.column.wanted) quantize_column_form(task, tile, entry, rows, block, column_block);
  }
}

}  // namespace

cudaError_t launch_quantize_any(const QuantizeTask& task, cudaStream_t stream) {
  const int64_t tiles = task.p.batch * task.row_blocks * ceil_div(task.p.k, kBlock);
  // Without tiles there may still be amaxes to store.
  const int64_t needed = tiles > 0 ? ceil_div(tiles, kTilesAtOnce) : 1, most = 1 << 20;
  const auto grid = static_cast<unsigned>(needed < most ? needed : most);
  quantize_any<<<grid, kTilesAtOnce * kBlock, 0, stream>>>(task);
  return cudaGetLastError();
}

}  // namespace jax_fp4::cuda
