// What an activation makes of h, rounded to `compute` and written for the passes after this one,
// which know no activations; and the maxima of its matrices, if they are asked for. Of bfloat16
// with a gate: 4 bytes read and 2 written an element.
//
// A piece is what a thread makes at once: 16 bytes of bfloat16 made of bfloat16 where k % 8 == 0,
// else one element. Pieces are made in memory order, whatever the rows, up to the end of the
// groups: rows after it are neither read nor written. Units of them are taken from the last to the
// first: what the next pass reads first is then still in the L2 cache.
#include "activate.cuh"
#include "maxima.cuh"
#include "quantize_task.cuh"

namespace jax_fp4::cuda {
namespace {

constexpr int kBlocks = 4;                // of kPieceThreads, a multiprocessor
constexpr int kUnit = 8 * kPieceThreads;  // pieces that a thread block takes at once

// A row has `width` pieces; kPieceThreads pieces on, a thread is `rows` and `columns` further.
struct Step {
  uint32_t width, rows, columns;
};

// Where a piece is, in its batch entry.
struct Place {
  uint32_t row, column;

  __device__ static Place of(int64_t piece, const Step& step) {
    const auto row = static_cast<uint32_t>(piece / step.width);
    return {row, static_cast<uint32_t>(piece) - row * step.width};
  }
  __device__ __forceinline__ void advance(const Step& step) {
    row += step.rows;
    column += step.columns;
    if (column >= step.width) column -= step.width, ++row;
  }
  // The piece of h of which that piece is made, or with a gate the first of two, a width apart.
  __device__ __forceinline__ uint64_t source(const Step& step, bool gated) const {
    return static_cast<uint64_t>(gated ? 2 * row : row) * step.width + column;
  }
};

// ---- What makes a piece ------------------------------------------------------------------------
// read() begins it, write() ends it and gives its largest magnitude, under the order of kWords.
// kAtOnce pieces of a thread are under way. Pointers are those of a batch entry.

// Eight bfloat16 values, of as many or of twice as many.
template <Activation activation>
struct Eights {
  static constexpr DType kWords = DType::kBF16;
  static constexpr bool kGated = activation <= kLastGated;
  static constexpr int kAtOnce = kGated ? 2 : 4;
  struct Read {
    uint4 gate, linear;
    float weight;
  };

  const ActivatedInput& input;
  const uint4* h;
  const float* weights;
  uint4* made;

  __device__ Eights(const QuantizeTask& task, int64_t entry, const Step& step)
      : input(task.p.activation),
        h(static_cast<const uint4*>(task.p.x) + entry * task.p.m * step.width * (kGated ? 2 : 1)),
        weights(input.weights == nullptr ? nullptr : input.weights + entry * task.p.m),
        made(task.made + entry * task.p.m * step.width) {}

  __device__ __forceinline__ Read read(const Place& at, const Step& step) const {
    const uint4* from = h + at.source(step, kGated);
    Read read;
    read.gate = __ldcs(from);
    if constexpr (kGated) read.linear = __ldcs(from + step.width);
    read.weight = weights == nullptr ? 1.0f : __ldg(weights + at.row);
    return read;
  }

  __device__ __forceinline__ uint32_t write(const Read& read, int64_t piece) const {
    const auto make = [&](float g, float u) {
      return activate<activation>(input, g, u) * read.weight;
    };
    const auto pair = [&](uint32_t g, uint32_t u) {
      return pack_bfloat16(make(low_half(g), low_half(u)), make(high_half(g), high_half(u)));
    };
    const uint4& u = kGated ? read.linear : read.gate;
    const uint4 out = {pair(read.gate.x, u.x), pair(read.gate.y, u.y), pair(read.gate.z, u.z),
                       pair(read.gate.w, u.w)};
    made[piece] = out;
    return most_of_piece<kWords>(out);
  }
};

// One element, of any activation and dtypes.
struct Ones {
  static constexpr DType kWords = DType::kF32;
  static constexpr int kAtOnce = 4;
  struct Read {
    float gate, linear, weight;
  };

  const QuantizeProblem& p;
  int64_t first_row;
  void* made;
  bool gated;

  __device__ Ones(const QuantizeTask& task, int64_t entry, const Step&)
      : p(task.p),
        first_row(entry * task.p.m),
        made(task.made),
        gated(task.p.activation.kind <= kLastGated) {}

  __device__ __forceinline__ Read read(const Place& at, const Step& step) const {
    const int64_t from =
        first_row * (gated ? 2 * p.k : p.k) + static_cast<int64_t>(at.source(step, gated));
    const float* weights = p.activation.weights;
    return {stored_element(p, from), gated ? stored_element(p, from + p.k) : 0.0f,
            weights == nullptr ? 1.0f : __ldg(weights + first_row + at.row)};
  }

  __device__ __forceinline__ uint32_t write(const Read& read, int64_t piece) const {
    const float made = activate(p.activation, read.gate, read.linear) * read.weight;
    const float value = round_to(p.compute, made);
    store(first_row * p.k + piece, value);
    return __float_as_uint(value) & kMagnitude;
  }

  __device__ __forceinline__ void store(int64_t index, float value) const {
    switch (p.compute) {
      case DType::kF32:
        static_cast<float*>(made)[index] = value;
        break;
      case DType::kBF16:
        static_cast<uint16_t*>(made)[index] = static_cast<uint16_t>(__float_as_uint(value) >> 16);
        break;
      case DType::kF16:
        static_cast<__half*>(made)[index] = __float2half_rn(value);
        break;
    }
  }
};

// ---- The pass ----------------------------------------------------------------------------------

// This thread's pieces from `begin` to `end`.
template <class Maker>
__device__ __forceinline__ uint32_t make_pieces(const Maker& maker, const Step& step, int64_t begin,
                                                int64_t end) {
  int64_t piece = begin + threadIdx.x;
  Place at = Place::of(piece, step);
  uint32_t most = 0;
#pragma unroll 1
  for (; piece < end; piece += Maker::kAtOnce * kPieceThreads) {
    typename Maker::Read read[Maker::kAtOnce];
#pragma unroll
    for (int i = 0; i < Maker::kAtOnce; ++i, at.advance(step))
      if (piece + i * kPieceThreads < end) read[i] = maker.read(at, step);
#pragma unroll
    for (int i = 0; i < Maker::kAtOnce; ++i)
      if (piece + i * kPieceThreads < end)
        most = Eight<Maker::kWords>::more(most, maker.write(read[i], piece + i * kPieceThreads));
  }
  return most;
}

template <class Maker>
__global__ void __launch_bounds__(kPieceThreads, kBlocks)
    make(const __grid_constant__ QuantizeTask task, Step step, bool with_maxima) {
  await_pass_before();
  const Maker maker(task, gridDim.y - 1 - blockIdx.y, step);
  walk_pieces<Maker::kWords>(
      task, step.width, kUnit, task.p.grouped, with_maxima,
      [&](int64_t begin, int64_t end) { return make_pieces(maker, step, begin, end); });
}

template <class Maker>
cudaError_t launch(const QuantizeTask& task, int64_t width, bool with_maxima, cudaStream_t stream) {
  if (width == 0) return cudaSuccess;
  const auto wide = static_cast<uint32_t>(width);
  const Step step = {wide, kPieceThreads / wide, kPieceThreads % wide};
  return launch_walk(make<Maker>, task, width, kUnit, kBlocks, stream, step, with_maxima);
}

template <Activation activation>
cudaError_t launch_eights(const QuantizeTask& task, bool with_maxima, cudaStream_t stream) {
  return launch<Eights<activation>>(task, task.p.k / 8, with_maxima, stream);
}

}  // namespace

cudaError_t launch_activate(const QuantizeTask& task, bool with_maxima, cudaStream_t stream) {
  const QuantizeProblem& p = task.p;
  const bool eights = p.x_dtype == DType::kBF16 && p.compute == DType::kBF16 && p.k % 8 == 0;
  if (!eights) return launch<Ones>(task, p.k, with_maxima, stream);
  switch (p.activation.kind) {
    case Activation::kNone:
      break;
    case Activation::kSwiglu:
      return launch_eights<Activation::kSwiglu>(task, with_maxima, stream);
    case Activation::kGeglu:
      return launch_eights<Activation::kGeglu>(task, with_maxima, stream);
    case Activation::kClampedQgeglu:
      return launch_eights<Activation::kClampedQgeglu>(task, with_maxima, stream);
    case Activation::kSituGlu:
      return launch_eights<Activation::kSituGlu>(task, with_maxima, stream);
    case Activation::kSilu:
      return launch_eights<Activation::kSilu>(task, with_maxima, stream);
    case Activation::kGelu:
      return launch_eights<Activation::kGelu>(task, with_maxima, stream);
    case Activation::kRelu:
      return launch_eights<Activation::kRelu>(task, with_maxima, stream);
    case Activation::kSquaredRelu:
      return launch_eights<Activation::kSquaredRelu>(task, with_maxima, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_fp4::cuda
