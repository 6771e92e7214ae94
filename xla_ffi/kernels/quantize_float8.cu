// Both forms of x in an 8-bit format: a thread block reads a tile of 128 x 128 elements once and
// makes all of its scales and codes (float8_tile.cuh). Whole lines of 128 bytes are written, of
// which a warp has 64 of a row and 32 of a column; scales are 4 bytes a line and tile.
//
// One scale a tensor: the amax is found by a pass before, which leaves the beginning of x in the L2
// cache, or under a given scale by this one, and x is read once.
#include <limits.h>

#include "float8_tile.cuh"
#include "maxima.cuh"

namespace jax_fp4::cuda {
namespace {

constexpr int kClearThreads = 256;

// ---- One scale a tensor
// --------------------------------------------------------------------------

bool finds_amaxes(const Float8Problem& p) {
  return p.scaling == Float8Scaling::kTensor && p.given_amax == nullptr;
}

__global__ void __launch_bounds__(kClearThreads) clear_amaxes(const Float8Problem p) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kClearThreads + threadIdx.x;
  if (i >= p.batch) return;
  if (p.row.wanted) p.row.amax[i] = 0.0f;
  if (p.column.wanted) p.column.amax[i] = 0.0f;
}

// Raises the amaxes of the batch entry to the peaks that threads 0 to 127 have found of all rows.
__device__ __forceinline__ void raise_amaxes(const Float8Problem& p, int64_t entry, uint32_t peak) {
  if (threadIdx.x >= kFloat8Tile) return;
  const uint32_t most = stored_amax<float>(__reduce_max_sync(~0u, peak));
  if (threadIdx.x % 32 != 0 || most == 0) return;
  if (p.row.wanted) raise_to(p.row.amax + entry, most);
  if (p.column.wanted) raise_to(p.column.amax + entry, most);
}

// What the batch entry is multiplied by, once its amax is known.
__device__ __forceinline__ float multiplier_of(const Float8Problem& p, int64_t entry) {
  if (p.given_scale != nullptr) return p.given_scale[entry];
  const float* found = p.row.wanted ? p.row.amax : p.column.amax;
  const float amax = p.given_amax != nullptr ? p.given_amax[entry] : __ldcg(found + entry);
  return float8_scale<float>(__float_as_uint(amax), largest_code(p.codes), p.eps, p.power_of_two);
}

// One thread for each batch entry: what is stored beside the codes, but amaxes that were found.
__device__ void store_of_tensor(const Float8Problem& p, int64_t entry, float multiplier) {
  for (int form = 0; form < 2; ++form) {
    const StoredFloat8& stored = form == 0 ? p.row : p.column;
    if (!stored.wanted) continue;
    static_cast<float*>(stored.scale)[entry] = 1.0f / multiplier;
    if (p.given_amax == nullptr) continue;
    const float amax = p.given_amax[entry];
    stored.amax[entry] = amax != amax ? __uint_as_float(kNanBits) : amax;
  }
}

// ---- The kernel
// ----------------------------------------------------------------------------------

template <class Thread>
__device__ __forceinline__ void quantize_by_tensor(const Float8Problem& p, Thread& thread,
                                                   typename Thread::Shared& shared) {
  const int64_t entry = thread.tile.entry;
  if (p.given_scale != nullptr) {
    thread.note_peaks(shared);
    __syncthreads();
    thread.find_peaks(shared);
  }
  await_pass_before();  // x was there before that pass
  if (p.given_scale != nullptr) raise_amaxes(p, entry, thread.peak[0]);
  const float multiplier = multiplier_of(p, entry);
  if (threadIdx.x == 0 && thread.tile.row == 0 && thread.tile.column == 0)
    store_of_tensor(p, entry, multiplier);
  thread.encode(p, multiplier);
}

template <class Thread>
__device__ __forceinline__ void quantize_by_block(const Float8Problem& p, Thread& thread,
                                                  typename Thread::Shared& shared) {
  thread.note_peaks(shared);
  __syncthreads();
  thread.find_peaks(shared);
  if (p.tile > 1) {
    thread.share_peaks(shared);
    __syncthreads();
    thread.join_peaks(shared);
  }
  thread.make_scales(p, shared);
  __syncthreads();
  thread.encode(p, shared);
}

// Thread blocks of a multiprocessor: a patch of float32 is 64 registers.
template <DType dtype>
constexpr int kResident = dtype == DType::kF32 ? 2 : 3;

template <DType dtype, Float8Codes codes, int kLength>
__global__ void __launch_bounds__(kFloat8Threads, kResident<dtype>)
    quantize_float8(const __grid_constant__ Float8Problem p) {
  __shared__ Float8Shared<dtype> shared;
  Float8Thread<dtype, codes, kLength> thread;
  thread.begin(p, blockIdx.x, threadIdx.x);
  if constexpr (kLength == 0)
    quantize_by_tensor(p, thread, shared);
  else
    quantize_by_block(p, thread, shared);
}

// ---- The problem
// ---------------------------------------------------------------------------------

bool form_is_valid(const Float8Problem& p, const StoredFloat8& form, int64_t along) {
  const int64_t block = float8_block(p.scaling), blocks = ceil_div(along, block);
  return !form.wanted || (form.blocks == blocks && form.extent == blocks * block);
}

bool is_valid(const Float8Problem& p) {
  const bool tensor = p.scaling == Float8Scaling::kTensor;
  // Rows and columns are counted in 32 bits inside the kernel, as batch entries by the amax pass.
  return p.batch >= 0 && p.m >= 0 && p.k >= 0 && p.batch <= 65535 && p.m <= INT_MAX - 256 &&
         p.k <= INT_MAX - 256 && (p.tile == 1 || p.tile == float8_block(p.scaling)) &&
         (tensor || (p.given_amax == nullptr && p.given_scale == nullptr)) &&
         !(p.given_amax != nullptr && p.given_scale != nullptr) && form_is_valid(p, p.row, p.k) &&
         form_is_valid(p, p.column, p.m);
}

// ---- Launching
// -----------------------------------------------------------------------------------

// The amaxes of the forms, which are 0 before, by the maxima of quantize_transpose.h.
cudaError_t launch_amax_pass(const Float8Problem& p, cudaStream_t stream) {
  QuantizeTask task = {};
  QuantizeProblem& of = task.p;
  of.x = p.x;
  of.x_dtype = p.x_dtype;
  of.compute = p.compute;
  of.batch = p.batch;
  of.m = p.m;
  of.k = p.k;
  of.tile = 1;
  of.groups = 1;
  of.row.wanted = p.row.wanted;
  of.row.amax = p.row.amax;
  of.column.wanted = p.column.wanted;
  of.column.amax = p.column.amax;
  task.row_blocks = ceil_div(p.m, kBlock);
  return launch_amaxes(task, stream);
}

// What is launched early follows a pass of this call, which began when all before it was done.
template <DType dtype, Float8Codes codes, int kLength>
cudaError_t launch_tiles(const Float8Problem& p, cudaStream_t stream) {
  int64_t down = tiles_of(p.m), across = tiles_of(p.k);
  if (kLength == 0) {  // also for what is stored beside no codes
    down = down == 0 ? 1 : down;
    across = across == 0 ? 1 : across;
  }
  const int64_t grid = p.batch * down * across;
  if (grid == 0) return cudaSuccess;
  if (grid > 0x7FFFFFFF) return cudaErrorInvalidValue;
  const auto kernel = quantize_float8<dtype, codes, kLength>;
  if (finds_amaxes(p))
    return launch_pass(kernel, static_cast<unsigned>(grid), kFloat8Threads, stream, p);
  kernel<<<static_cast<unsigned>(grid), kFloat8Threads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <DType dtype, Float8Codes codes>
cudaError_t launch_scaling(const Float8Problem& p, cudaStream_t stream) {
  switch (p.scaling) {
    case Float8Scaling::kMxfp8:
      return launch_tiles<dtype, codes, 32>(p, stream);
    case Float8Scaling::kBlock:
      return launch_tiles<dtype, codes, 128>(p, stream);
    case Float8Scaling::kTensor:
      return launch_tiles<dtype, codes, 0>(p, stream);
  }
  return cudaErrorInvalidValue;
}

template <DType dtype>
cudaError_t launch_codes(const Float8Problem& p, cudaStream_t stream) {
  switch (p.codes) {
    case Float8Codes::kE4M3:
      return launch_scaling<dtype, Float8Codes::kE4M3>(p, stream);
    case Float8Codes::kE5M2:
      return launch_scaling<dtype, Float8Codes::kE5M2>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int64_t scratch_bytes(const Float8Problem&) { return 0; }

cudaError_t launch_quantize_float8(const Float8Problem& p, void*, cudaStream_t stream) {
  if (!is_valid(p)) return cudaErrorInvalidValue;
  if (p.batch == 0 || !(p.row.wanted || p.column.wanted)) return cudaSuccess;
  if (finds_amaxes(p)) {
    const auto blocks = static_cast<unsigned>(ceil_div(p.batch, kClearThreads));
    clear_amaxes<<<blocks, kClearThreads, 0, stream>>>(p);
    cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess && p.given_scale == nullptr) error = launch_amax_pass(p, stream);
    if (error != cudaSuccess) return error;
  }
  switch (held_dtype(p.x_dtype, p.compute)) {
    case DType::kF32:
      return launch_codes<DType::kF32>(p, stream);
    case DType::kBF16:
      return launch_codes<DType::kBF16>(p, stream);
    case DType::kF16:
      return launch_codes<DType::kF16>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jax_fp4::cuda
