// Both stored forms, or either, or the values of the row-wise one, from one reading of x: bfloat16
// values (of bfloat16 or float32 x), whole blocks of columns in pairs. Per element 2 or 4 bytes are
// read, 0.5625 written a form and 2 for the values.
//
// A tile is 4 row blocks (64 rows) by 128 columns. Its 128 threads hold a patch of 8 x 8 each,
// pairs of columns a register, which serves both directions; a block of sixteen is two patches, and
// one shuffle joins their maxima. Shared memory holds the tile that is on its way while its
// predecessor is under work in registers. Row-wise codes leave from registers, 32 bytes a row and
// warp; column-wise ones turn in shared memory. Scales are kept until a super-tile (2 x 2 tiles) is
// done, since many short stores cost more than they move.
//
// Thread blocks are persistent and draw units of work from a counter (tile_schedule.cuh): equal
// shares end at different times, by a tenth.
//
// A block whose scale comes out as 0x7F is not finite, or its tensor scale not calm (encode.cuh):
// its patch is done again by the words of nvfp4.h (tile_work.cuh).
#include "tile_four.cuh"
#include "tile_store.cuh"

namespace jax_fp4::cuda {
namespace {

// ---- Codes of a patch ---------------------------------------------------------------------------

// Scales of eight lines from their maxima: each of its own, or all of one.
template <class V>
__device__ __forceinline__ void choose_scales(const uint32_t most[4], const LineScale* lines,
                                              const LineScale& line, const float* table,
                                              EightScales& scales) {
  if constexpr (V::kScaling == Scaling::kLines)
    scales.choose(most, [&](int i) { return lines[i]; }, nullptr);
  else
    scales.choose(
        most, [&](int) { return line; }, V::kScaling == Scaling::kTensor ? table : nullptr);
}

// Of a patch's rows, or columns, kept for the end of the super-tile too.
template <class V>
__device__ __forceinline__ void choose_row_scales(const TileWork<V>& work, const uint32_t most[4],
                                                  EightScales& scales) {
  const TileMemory<V>& memory = work.memory;
  choose_scales<V>(most, memory.row_lines + work.row(), work.block.row, memory.row_table, scales);
  work.keep_rows(scales.bytes);
}
template <class V>
__device__ __forceinline__ void choose_column_scales(const TileWork<V>& work,
                                                     const uint32_t most[4], EightScales& scales) {
  const TileMemory<V>& memory = work.memory;
  choose_scales<V>(most, memory.column_lines + work.column(), work.block.column,
                   memory.column_table, scales);
  work.keep_columns(scales.bytes);
}

// The random words of a patch's rows or columns.
template <class V>
__device__ __forceinline__ void draw(const TileWork<V>& work, bool row_wise,
                                     uint32_t random[kPatch][2]) {
  const Place& place = work.place;
  const Origin origin = V::kScaling == Scaling::kTensor
                            ? (row_wise ? work.memory.row_origin : work.memory.column_origin)
                            : Origin::of(work.task.q, work.at.entry, work.block.rows.group,
                                         row_wise ? kRowDirection : kColumnDirection);
  const int32_t column = work.at.tile_column() + place.column;
  const uint32_t row = work.block.rows.place;
  const int64_t line = row_wise ? int64_t{row} + place.row % kBlock : int64_t{column};
  const int64_t block = row_wise ? int64_t{column / kBlock} : int64_t{row / kBlock};
  draw_eight(origin, line, block, row_wise ? place.column_half : place.row_half,
             row_wise ? kAcrossLanes : kDownLanes, random);
}

// Codes of a patch's rows or columns; `codes` holds the signs.
template <bool kRowWise, class V>
__device__ __forceinline__ void encode_lines(const TileWork<V>& work, const Patch& x,
                                             const EightScales& scales, uint32_t codes[kPatch]) {
  uint32_t random[kPatch][2];
  if (V::kStochastic) draw(work, kRowWise, random);
#pragma unroll
  for (int line = 0; line < kPatch; ++line) {
    const auto value = [&](int i) {
      return kRowWise ? value_of(x, line, i) : value_of(x, i, line);
    };
    codes[line] = encode_eight<V::kStochastic>(value, scales.multiplier[line], codes[line],
                                               work.task.places, random[line]);
  }
}

// Rows and columns together, so that an element is taken apart once.
__device__ __forceinline__ void encode_both(const Patch& x, const Places& places,
                                            const EightScales& row_scales,
                                            const EightScales& column_scales,
                                            uint32_t row_codes[kPatch],
                                            uint32_t column_codes[kPatch]) {
#pragma unroll
  for (int r = 0; r < kPatch; ++r)
#pragma unroll
    for (int c = 0; c < kPatch; ++c) {
      const float value = value_of(x, r, c);
      const float across = saturated_product(value, row_scales.multiplier[r]);
      const float down = saturated_product(value, column_scales.multiplier[c]);
      add_code(row_codes[r], nearest_bits(across), c, places);
      add_code(column_codes[c], nearest_bits(down), r, places);
    }
}

// Codes and values of a patch's rows, as they are asked for.
template <class V>
__device__ __forceinline__ void store_rows(const TileWork<V>& work, const Patch& x,
                                           const uint32_t scales[2], const uint32_t codes[kPatch]) {
  using Offset = typename TileWork<V>::Offset;
  const QuantizeProblem& p = work.task.q.p;
  const int rows = work.rows();
  const Offset width = static_cast<uint32_t>(work.task.k);
  if (p.row.codes != nullptr) {
    uint8_t* to = p.row.codes + work.corner() / 2;
    const Offset offset = work.offset() / 2;
    if (rows >= kPatch) {
#pragma unroll
      for (int r = 0; r < kPatch; ++r)
        *reinterpret_cast<uint32_t*>(to + (offset + r * (width / 2))) = codes[r];
    } else {
#pragma unroll
      for (int r = 0; r < kPatch; ++r)
        if (r < rows) *reinterpret_cast<uint32_t*>(to + (offset + r * (width / 2))) = codes[r];
    }
  }
  if (p.values != nullptr) {
    uint16_t* to = p.values + work.corner();
    const Offset offset = work.offset();
#pragma unroll
    for (int r = 0; r < kPatch; ++r) {
      const uint32_t byte = (scales[r / 4] >> (r % 4 * 8)) & 0x7Fu;
      const uint4 values = product_values(codes[r], e4m3_value(byte), x.pair[r]);
      if (r < rows) *reinterpret_cast<uint4*>(to + (offset + r * width)) = values;
    }
  }
}

// Codes of a patch's columns, to where they turn.
template <class V>
__device__ __forceinline__ void stage_columns(const TileWork<V>& work,
                                              const uint32_t codes[kPatch]) {
  uint32_t* to = work.column_codes();
#pragma unroll
  for (int c = 0; c < kPatch; ++c) to[c * kCodeStride] = codes[c];
}

// Which directions of a patch must be done again.
struct Again {
  bool rows, columns;
};

// Both directions, rounded to nearest.
template <class V>
__device__ __forceinline__ Again quantize_both(const TileWork<V>& work, const Patch& x) {
  const bool square = work.task.q.p.tile == kBlock;
  uint32_t row_codes[kPatch], column_codes[kPatch], most[4];
  EightScales row_scales, column_scales;
#pragma unroll
  for (int r = 0; r < kPatch; ++r) row_codes[r] = row_signs(x.pair[r]);
  row_maxima(x, most);
  if (square) square_maxima(most);
  choose_row_scales(work, most, row_scales);
  if (V::kScaling == Scaling::kTensor && square && work.memory.same) {
    // One scale for the tile in both directions, so the same codes.
    encode_lines<true>(work, x, row_scales, row_codes);
    work.keep_columns(row_scales.bytes);
    transpose_nibbles(row_codes, column_codes);
    column_scales = row_scales;
  } else {
    if (!square) column_maxima(x, most);
    choose_column_scales(work, most, column_scales);
    transpose_nibbles(row_codes, column_codes);
    encode_both(x, work.task.places, row_scales, column_scales, row_codes, column_codes);
  }
  store_rows(work, x, row_scales.bytes, row_codes);
  stage_columns(work, column_codes);
  return {any_nan_scale(row_scales.bytes) && work.rows() > 0,
          any_nan_scale(column_scales.bytes) && work.block_exists()};
}

// Either direction, or both one after the other.
template <class V>
__device__ __forceinline__ Again quantize_each(const TileWork<V>& work, Patch& x) {
  const QuantizeProblem& p = work.task.q.p;
  Again again = {false, false};
  EightScales scales;
  uint32_t codes[kPatch], most[4];
  if (p.row.wanted) {
    row_maxima(x, most);
    if (p.tile == kBlock) square_maxima(most);
    choose_row_scales(work, most, scales);
#pragma unroll
    for (int r = 0; r < kPatch; ++r) codes[r] = row_signs(x.pair[r]);
    encode_lines<true>(work, x, scales, codes);
    store_rows(work, x, scales.bytes, codes);
    again.rows = any_nan_scale(scales.bytes) && work.rows() > 0;
  }
  if (p.column.wanted) {
    if (V::kMixed) mix_columns(x, work.place.row_half);
    if (p.tile == kBlock) {
      row_maxima(x, most);
      square_maxima(most);
    } else {
      column_maxima(x, most);
    }
    choose_column_scales(work, most, scales);
    uint32_t signs[kPatch];
#pragma unroll
    for (int r = 0; r < kPatch; ++r) signs[r] = row_signs(x.pair[r]);
    transpose_nibbles(signs, codes);
    encode_lines<false>(work, x, scales, codes);
    stage_columns(work, codes);
    again.columns = any_nan_scale(scales.bytes) && work.block_exists();
  }
  return again;
}

// Either direction, or both, under four-over-six. The columns of a patch are tried as the rows of
// its transpose, by the same code; 16x16 tiles are tried by rows also for the columns.
template <class V>
__device__ __forceinline__ Again quantize_four_over_six(const TileWork<V>& work, Patch& x) {
  const QuantizeProblem& p = work.task.q.p;
  const TileMemory<V>& memory = work.memory;
  const bool square = p.tile == kBlock, once = square && memory.same;
  Again again = {false, false};
  uint32_t scales[2], codes[kPatch], most[4];
#pragma unroll 1
  for (int direction = 0; direction < 2; ++direction) {
    const bool row_wise = direction == 0;
    if (!(row_wise ? p.row : p.column).wanted) continue;
    const bool across = row_wise || square;
    if (!across) transpose(x);
    if (row_wise || !(once && p.row.wanted)) {
      row_maxima(x, most, across ? kAcrossLanes : kDownLanes);
      if (square) square_maxima(most);
#pragma unroll
      for (int r = 0; r < kPatch; ++r) codes[r] = row_signs(x.pair[r]);
      encode_four_over_six<V::kNorm>(x, across ? work.place.column_half : work.place.row_half,
                                     across ? kAcrossLanes : kDownLanes, most, square,
                                     row_wise ? memory.row_four : memory.column_four,
                                     row_wise ? memory.row_table : memory.column_table,
                                     work.task.places, scales, codes);
    }
    if (row_wise) {
      work.keep_rows(scales);
      store_rows(work, x, scales, codes);
      again.rows = any_nan_scale(scales) && work.rows() > 0;
    } else {
      if (square) transpose_nibbles(codes, codes);
      work.keep_columns(scales);
      stage_columns(work, codes);
      again.columns = any_nan_scale(scales) && work.block_exists();
    }
  }
  return again;
}

// ---- What tiles need ---------------------------------------------------------------------------

// The scale of a batch entry, and its table.
__device__ __forceinline__ float prepare_form(const StoredForm& form, int32_t entry,
                                              LineScale& line, float* table) {
  static_assert(kThreads == 128, "a thread an entry");
  if (!form.wanted) return 0.0f;
  const float amax = amax_at(form, entry), bound = static_cast<float>(form.bound);
  table[threadIdx.x] =
      encode_multiplier(e4m3_decode<float>(threadIdx.x), tensor_scale(amax, bound)) * 0.125f;
  if (threadIdx.x == 0) line = LineScale::of(amax, bound);
  return amax;
}
template <class V>
__device__ __noinline__ void prepare_entry(const TileTask& task, TileMemory<V>& memory,
                                           int32_t entry) {
  const QuantizeProblem& p = task.q.p;
  const float row = prepare_form(p.row, entry, memory.row, memory.row_table);
  const float column = prepare_form(p.column, entry, memory.column, memory.column_table);
  if (threadIdx.x != 0) return;
  memory.same = row == column && p.row.bound == p.column.bound;
  if constexpr (V::kNorm != ErrorNorm::kNone) {
    memory.row_four = FourOverSixScale::of(row, static_cast<float>(p.row.bound));
    memory.column_four = FourOverSixScale::of(column, static_cast<float>(p.column.bound));
  }
  if (!V::kStochastic) return;
  memory.row_origin = Origin::of(task.q, entry, 0, kRowDirection);
  memory.column_origin = Origin::of(task.q, entry, 0, kColumnDirection);
}

// Under row scaling, the scales of a super-tile's rows or columns.
__device__ __noinline__ void prepare_lines(const StoredForm& form, int64_t first, int64_t extent,
                                           LineScale* lines, int count) {
  if (!form.wanted) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kThreads)
    lines[i] =
        LineScale::of(i < extent ? amax_at(form, first + i) : 0.0f, static_cast<float>(form.bound));
}

// Scales and tables that a tile needs and the one before it did not. Others read them after the
// barrier that follows.
template <class V>
__device__ __forceinline__ void prepare(const TileTask& task, TileMemory<V>& memory,
                                        const Cursor& now, int32_t& entry) {
  if (V::kScaling == Scaling::kTensor && now.entry != entry)
    prepare_entry<V>(task, memory, entry = now.entry);
  if (V::kScaling == Scaling::kLines && now.sub == now.begin) {
    const QuantizeProblem& p = task.q.p;
    const int64_t row = now.block * kBlock, column = now.column;
    prepare_lines(p.row, now.entry * p.m + row, p.m - row, memory.row_lines, kSuperRows);
    prepare_lines(p.column, now.entry * p.k + column, p.k - column, memory.column_lines,
                  kSuperColumns);
  }
}

// ---- The kernel --------------------------------------------------------------------------------

// Both forms of a patch, to global memory or to where they turn.
template <class V>
__device__ __forceinline__ void quantize_patch(const TileTask& task, TileMemory<V>& memory,
                                               const Cursor& now, const ScaledBlock& found,
                                               Patch& x) {
  const TileWork<V> work = TileWork<V>::of(task, memory, now, found);
  const bool both = task.q.p.row.wanted && task.q.p.column.wanted;
  const auto quantized = [&] {
    if constexpr (V::kNorm != ErrorNorm::kNone) return quantize_four_over_six(work, x);
    return !V::kStochastic && !V::kMixed && both ? quantize_both(work, x) : quantize_each(work, x);
  };
  const Again again = quantized();
  __syncwarp();  // both halves of a block have kept its scales, which one of them replaces now
  if (again.rows) redo_rows<V>(task, memory, now);
  if (again.columns) redo_columns<V>(task, memory, now);
}

// Four thread blocks a multiprocessor measured better than three, five or six; four-over-six holds
// two sets of codes, for which their 128 registers are too few.
template <class V>
constexpr int kResident = V::kNorm == ErrorNorm::kNone ? 4 : 3;

template <class V>
__global__ void __launch_bounds__(kThreads, kResident<V>)
    quantize_tiles(const __grid_constant__ TileTask task) {
  __shared__ TileMemory<V> memory;
  // x comes early, unless a pass of the call makes it, or the table that tells where its tiles lie.
  // What made x before the call is done: the call's clear_amaxes or memset is an ordinary launch,
  // begins after that, and is or precedes the pass before this one (launch_quantize_transpose).
  const bool early = V::kScaling != Scaling::kGroups && task.q.p.x != task.q.made;
  if (!early) await_pass_before();
  const auto draw_unit = [&] { return gridDim.x + atomicAdd(task.q.units, 1u); };
  Cursor now;
  now.take(task, blockIdx.x);
  if (now.inside) fetch<V>(task, now, memory.stage);
  if (early) await_pass_before();
  if (threadIdx.x == 0) memory.unit[0] = draw_unit();
  store_given_amaxes(task.q.p);
  int32_t entry = -1;  // whose scales are there
  uint32_t slot = 0;   // of memory.unit
  await_copies();
  __syncthreads();
  while (now.exists(task.schedule)) {
    prepare(task, memory, now, entry);
    const ScaledBlock found = TileWork<V>::find_block(task, now);
    const Place place = Place::of(threadIdx.x);
    Patch x;
    load_patch(memory.stage, place.row, place.column, x);
    __syncthreads();  // the stage is free, what was prepared is there
    Cursor next = now;
    const bool last = next.advance(task);
    uint32_t drawn = 0;
    if (last) {
      next.take(task, memory.unit[slot]);
      if (threadIdx.x == 0) drawn = draw_unit();
    }
    if (next.inside) fetch<V>(task, next, memory.stage);
    if (now.inside) quantize_patch(task, memory, now, found, x);
    if (last) {
      slot ^= 1;
      if (threadIdx.x == 0) memory.unit[slot] = drawn;
    }
    await_copies();
    __syncthreads();  // codes and scales are staged, the next tile is there
    if (now.inside && task.q.p.column.wanted) store_column_codes<V>(task, memory, now);
    if (last) store_scales<V>(task, memory, now);
    now = next;
  }
}

template <class V>
cudaError_t launch(const QuantizeTask& q, cudaStream_t stream) {
  TileTask task = {};
  task.q = q;
  task.m = static_cast<int32_t>(q.p.m);
  task.k = static_cast<int32_t>(q.p.k);
  task.row_blocks = static_cast<int32_t>(q.row_blocks);
  task.places = Places::make();
  task.schedule.super_rows = static_cast<uint32_t>(ceil_div(q.row_blocks, kRowSpan * kTileBlocks));
  task.schedule.super_columns = static_cast<uint32_t>(ceil_div(q.p.k, kSuperColumns));
  task.schedule.supers =
      static_cast<uint32_t>(q.p.batch) * task.schedule.super_rows * task.schedule.super_columns;
  const auto kernel = quantize_tiles<V>;
  int processors = 0, resident = 0;
  cudaError_t error = multiprocessors(&processors);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, 0);
  if (error != cudaSuccess) return error;
  // The last tiles are drawn one by one, two or so a thread block.
  const auto slots = static_cast<uint32_t>(processors * (resident > 0 ? resident : 1));
  const uint32_t single = slots * 2 / kSuperTiles;
  task.schedule.whole = task.schedule.supers > single ? task.schedule.supers - single : 0;
  const uint32_t units = task.schedule.units(), blocks = units < slots ? units : slots;
  return launch_pass(kernel, blocks, kThreads, stream, task);
}

template <class X, Scaling scaling>
cudaError_t launch_scaling(const QuantizeTask& task, cudaStream_t stream) {
  const bool random = task.p.seed != nullptr;
  const bool mixed = task.p.column.wanted && task.p.column.hadamard;
  if (random && mixed) return launch<Variant<X, scaling, true, true>>(task, stream);
  if (random) return launch<Variant<X, scaling, true, false>>(task, stream);
  if (mixed) return launch<Variant<X, scaling, false, true>>(task, stream);
  return launch<Variant<X, scaling, false, false>>(task, stream);
}

// Of the forms that are wanted.
ErrorNorm norm_of(const QuantizeProblem& p) {
  return (p.row.wanted ? p.row : p.column).four_over_six;
}

template <class X>
cudaError_t launch_dtype(const QuantizeTask& task, cudaStream_t stream) {
  constexpr Scaling kTensor = Scaling::kTensor;
  switch (norm_of(task.p)) {
    case ErrorNorm::kNone:
      // Row scaling knows neither random bytes nor the transform.
      if (task.p.row_scaled) return launch<Variant<X, Scaling::kLines, false, false>>(task, stream);
      if (task.p.grouped) return launch_scaling<X, Scaling::kGroups>(task, stream);
      return launch_scaling<X, kTensor>(task, stream);
    case ErrorNorm::kMae:
      return launch<Variant<X, kTensor, false, false, ErrorNorm::kMae>>(task, stream);
    case ErrorNorm::kMse:
      return launch<Variant<X, kTensor, false, false, ErrorNorm::kMse>>(task, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

bool quantize_tiles_supports(const QuantizeProblem& p) {
  // Under four-over-six there is a variant only for tensors with one amax, and if two forms are
  // wanted, for the same norm in both.
  const ErrorNorm norm = norm_of(p);
  const bool known = norm == ErrorNorm::kNone || !(p.grouped || p.row_scaled);
  const bool alike = !p.row.wanted || !p.column.wanted || p.column.four_over_six == norm;
  const int64_t row_blocks = p.grouped ? grouped_blocks(p.m, p.groups) : ceil_div(p.m, kBlock);
  const int64_t tiles = p.batch * ceil_div(row_blocks, kTileBlocks) * ceil_div(p.k, kTileColumns);
  return holds_bfloat16(p) && known && alike && p.groups > 0 && tiles > 0 &&
         p.k % (2 * kBlock) == 0 &&       // rows of codes in 16-byte steps
         !(p.row_scaled && p.grouped) &&  // lines would change inside a tile
         !(p.tile == kBlock && p.column.wanted && p.column.hadamard) &&  // a tile of mixed values
         // In 32 bits: kTileRows * k and kTileColumns * row_blocks * kBlockCodeBytes, numbers of
         // stored rows, and units.
         p.k < (1 << 26) && row_blocks < (1 << 22) && p.batch * (p.m + p.k) < (int64_t{1} << 30) &&
         tiles < (int64_t{1} << 28);
}

cudaError_t launch_quantize_tiles(const QuantizeTask& task, cudaStream_t stream) {
  return task.p.x_dtype == DType::kF32 ? launch_dtype<float>(task, stream)
                                       : launch_dtype<uint16_t>(task, stream);
}

}  // namespace jax_fp4::cuda
