// Maxima of magnitudes as the kernels that look for amaxes share them: of words of eight elements,
// of pieces of 16 bytes, and of what a thread block has seen of a matrix; and the walk of a thread
// block over pieces.
#ifndef JAX_FP4_XLA_FFI_KERNELS_MAXIMA_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_MAXIMA_CUH_

#include "quantize_task.cuh"

namespace jax_fp4::cuda {

// Eight elements of a row as words whose magnitudes are compared as integers.
template <DType dtype>
struct Eight {
  static constexpr bool kPairs = dtype != DType::kF32;  // two elements a word
  static constexpr int kWords = kPairs ? 4 : 8;
  uint32_t word[kWords];

  __device__ __forceinline__ static uint32_t more(uint32_t a, uint32_t b) {
    return kPairs ? __vmaxu2(a, b) : max(a, b);
  }
  __device__ __forceinline__ uint32_t element(int i) const {
    return kPairs ? (word[i / 2] >> (i % 2 * 16)) & 0xFFFFu : word[i];
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = 0;
  }
  __device__ __forceinline__ void make_magnitudes() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] &= kPairs ? 0x7FFF7FFFu : kMagnitude;
  }
  __device__ __forceinline__ void raise(const Eight& other) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) word[i] = more(word[i], other.word[i]);
  }
  __device__ __forceinline__ uint32_t most() const {
    uint32_t all = word[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) all = more(all, word[i]);
    return kPairs ? max(all & 0xFFFFu, all >> 16) : all;
  }
};

template <DType dtype>
__device__ __forceinline__ float widen(uint32_t element) {
  if constexpr (dtype == DType::kF32) return __uint_as_float(element);
  if constexpr (dtype == DType::kBF16) return __uint_as_float(element << 16);
  return __half2float(__ushort_as_half(static_cast<uint16_t>(element)));
}

// What is stored for the largest word: rounding is monotone, so it is rounded once.
template <DType dtype>
__device__ __forceinline__ uint32_t stored_bits(DType compute, uint32_t word) {
  const uint32_t bits = __float_as_uint(round_to(compute, widen<dtype>(word))) & kMagnitude;
  return stored_amax<float>(bits);
}

__device__ __forceinline__ void raise_to(float* amax, uint32_t bits) {
  uint32_t* target = reinterpret_cast<uint32_t*>(amax);
  if (bits > __ldcg(target)) atomicMax(target, bits);  // what is seen may only be too small
}

// ---- Pieces of 16 bytes, in memory order -------------------------------------------------------

constexpr int kPieceThreads = 256;  // of a thread block that takes pieces

// The largest magnitude of a piece, under the order of its words.
template <DType dtype>
__device__ __forceinline__ uint32_t most_of_piece(const uint4& piece) {
  using Words = Eight<dtype>;
  constexpr uint32_t kMask = Words::kPairs ? 0x7FFF7FFFu : kMagnitude;
  return Words::more(Words::more(piece.x & kMask, piece.y & kMask),
                     Words::more(piece.z & kMask, piece.w & kMask));
}

// Raises the amaxes of a matrix to what the thread block, of kPieceThreads, has seen of it.
template <DType dtype>
__device__ void leave_matrix(const QuantizeProblem& p, int64_t matrix, uint32_t most) {
  __shared__ uint32_t warps[kPieceThreads / 32];
  most = __reduce_max_sync(~0u, Eight<dtype>::kPairs ? max(most & 0xFFFFu, most >> 16) : most);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
  __syncthreads();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 1; i < kPieceThreads / 32; ++i) most = max(most, warps[i]);
    const uint32_t bits = stored_bits<dtype>(p.compute, most);
    if (p.row.wanted && bits > 0) raise_to(p.row.amax + matrix, bits);
    if (p.column.wanted && bits > 0) raise_to(p.column.amax + matrix, bits);
  }
  __syncthreads();
}

// The last group that begins at `piece` or before it.
__device__ __forceinline__ int64_t group_at(const int32_t* first_row, int64_t groups, int64_t width,
                                            int64_t piece) {
  int64_t low = 0, high = groups;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (__ldg(first_row + middle) * width <= piece ? low : high) = middle;
  }
  return low;
}

// Hands make(begin, end) the pieces of batch entry gridDim.y - 1 - blockIdx.y, `width` of them a
// row, up to the end of its groups, in units of `unit` from the last to the first: it gives the
// largest magnitude that this thread has seen there, which raises the amaxes of the matrix if
// `raises`. Groups follow one another without a gap, so a unit is cut at their borders.
template <DType dtype, class Make>
__device__ __forceinline__ void walk_pieces(const QuantizeTask& task, int64_t width, int unit,
                                            bool grouped, bool raises, const Make& make) {
  const QuantizeProblem& p = task.p;
  const int64_t entry = gridDim.y - 1 - blockIdx.y;
  const int32_t* first_row = grouped ? task.first_row + entry * (p.groups + 1) : nullptr;
  const int64_t pieces = (grouped ? __ldg(first_row + p.groups) : p.m) * width;
  const int64_t units = ceil_div(pieces, unit);
  int64_t matrix = -1;
  uint32_t most = 0;  // of `matrix`, by this thread
  for (int64_t i = blockIdx.x; i < units; i += gridDim.x) {
    const int64_t begin = (units - 1 - i) * unit, end = min(begin + unit, pieces);
    int64_t group = grouped ? group_at(first_row, p.groups, width, begin) : 0;
    for (int64_t from = begin, to; from < end; from = to, ++group) {
      to = grouped ? min(end, __ldg(first_row + group + 1) * width) : end;
      if (from == to) continue;
      if (raises && matrix != entry * p.groups + group) {
        if (matrix >= 0) leave_matrix<dtype>(p, matrix, most);
        matrix = entry * p.groups + group;
        most = 0;
      }
      most = Eight<dtype>::more(most, make(from, to));
    }
  }
  if (matrix >= 0) leave_matrix<dtype>(p, matrix, most);
}

// Launches such a kernel, `blocks` thread blocks a multiprocessor.
template <class... Parameters, class... Arguments>
cudaError_t launch_walk(void (*kernel)(QuantizeTask, Parameters...), const QuantizeTask& task,
                        int64_t width, int unit, int blocks, cudaStream_t stream,
                        const Arguments&... arguments) {
  const QuantizeProblem& p = task.p;
  int processors = 0;
  const cudaError_t error = multiprocessors(&processors);
  if (error != cudaSuccess) return error;
  const int64_t units = ceil_div(p.m * width, unit);
  if (units == 0 || p.groups == 0) return cudaSuccess;
  const int64_t room = ceil_div(int64_t{blocks} * processors, p.batch);
  const dim3 grid(static_cast<unsigned>(units < room ? units : room),
                  static_cast<unsigned>(p.batch));
  return launch_pass(kernel, grid, kPieceThreads, stream, task, arguments...);
}

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_MAXIMA_CUH_
