// The passes of a quantization, in order: where the groups lie, what an activation makes (no pass
// after it knows of h), the amaxes, what no group has, and then one kernel that makes all stored
// forms.
//
// The table of groups, the zeros of amaxes and those of task.units overwrite at once what an
// earlier call may still use, so they are put on the stream in the ordinary way and begin when all
// before them is done. What follows them may be launched early (launch_pass), since each such
// kernel waits before it writes; quantize_rows and quantize_any do not wait, and are launched like
// the former.
#include <limits.h>

#include <type_traits>

#include "quantize_task.cuh"

namespace jax_fp4::cuda {
namespace {

constexpr int kPlanThreads = 256, kClearThreads = 256;

__host__ __device__ bool amaxes_are_given(const QuantizeProblem& p) {
  return (p.row.wanted ? p.row : p.column).given_amax != nullptr;
}

// ---- Groups ------------------------------------------------------------------------------------

__host__ __device__ bool clears_amaxes(const QuantizeProblem& p) {
  return p.grouped && !p.row_scaled && !amaxes_are_given(p);
}

// Inclusive sum over the threads of the block.
__device__ int64_t scan(int64_t value, int64_t* shared) {
  shared[threadIdx.x] = value;
  for (int stride = 1; stride < kPlanThreads; stride *= 2) {
    __syncthreads();
    const bool far = static_cast<int>(threadIdx.x) >= stride;
    const int64_t before = far ? shared[threadIdx.x - stride] : 0;
    __syncthreads();
    shared[threadIdx.x] += before;
  }
  __syncthreads();
  const int64_t sum = shared[threadIdx.x];
  __syncthreads();
  return sum;
}

// Value of the last thread.
__device__ int64_t last(int64_t value, int64_t* shared) {
  if (threadIdx.x == kPlanThreads - 1) *shared = value;
  __syncthreads();
  const int64_t result = *shared;
  __syncthreads();
  return result;
}

// The last group that begins at `block` or before it: an empty one begins where the next begins.
__device__ int64_t group_of(const int32_t* first_block, int64_t groups, int64_t block) {
  int64_t low = 0, high = groups;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (first_block[middle] <= block ? low : high) = middle;
  }
  return low;
}

// One thread block makes the tables of one batch entry, and zeros of its amaxes if these will be
// computed for each group.
__global__ void __launch_bounds__(kPlanThreads) plan_groups(QuantizeTask task) {
  __shared__ int64_t shared[kPlanThreads];
  const QuantizeProblem& p = task.p;
  const int64_t entry = blockIdx.x, groups = p.groups;
  const int32_t* sizes = p.group_sizes + entry * groups;
  uint32_t* whole_rows = task.whole_rows + entry * groups;
  int32_t* first_block = task.first_block + entry * groups;
  int32_t* first_row = task.first_row + entry * (groups + 1);
  // Of split groups: where x begins in each, and after that how many rows each has.
  const uint32_t* places = p.split_groups ? task.seed_of(entry) + kSeedWords : nullptr;
  const bool clears = clears_amaxes(p);
  int64_t row = 0, block = 0;  // where the groups of earlier rounds end
  for (int64_t base = 0; base < groups; base += kPlanThreads) {
    const int64_t i = base + threadIdx.x;
    const int64_t size = i < groups && sizes[i] > 0 ? sizes[i] : 0;
    const int64_t sum = row + scan(size, shared);
    const int64_t begin = min(sum - size, p.m), end = min(sum, p.m);
    const int64_t blocks = ceil_div(end - begin, kBlock), after = block + scan(blocks, shared);
    if (i < groups) {
      first_row[i] = static_cast<int32_t>(begin);
      whole_rows[i] = places != nullptr ? places[groups + i] : static_cast<uint32_t>(end - begin);
      first_block[i] = static_cast<int32_t>(after - blocks);
      if (clears && p.row.wanted) p.row.amax[entry * groups + i] = 0.0f;
      if (clears && p.column.wanted) p.column.amax[entry * groups + i] = 0.0f;
    }
    row = last(end, shared);
    block = last(after, shared);
  }
  if (threadIdx.x == 0) first_row[groups] = static_cast<int32_t>(row);
  if (threadIdx.x == 0 && entry == 0) *task.units = 0;
  __syncthreads();
  for (int64_t b = threadIdx.x; b < task.row_blocks; b += kPlanThreads) {
    RowBlock found = {0, 0, 0, 0};
    if (b < block) {
      const int64_t group = group_of(first_block, groups, b), number = b - first_block[group];
      const int64_t begin = first_row[group] + number * kBlock;
      const int64_t rows = first_row[group + 1] - begin;
      const auto place = static_cast<uint32_t>(number * kBlock);
      found = {static_cast<int32_t>(begin), static_cast<int32_t>(rows < kBlock ? rows : kBlock),
               static_cast<int32_t>(group), places != nullptr ? places[group] + place : place};
    }
    task.blocks[entry * task.row_blocks + b] = found;
  }
}

__device__ void clear(uint8_t* bytes, int64_t begin, int64_t end) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kClearThreads;
  for (int64_t i = begin + blockIdx.x * kClearThreads + threadIdx.x; i < end; i += stride)
    bytes[i] = 0;
}

// Rows of the row-wise form after the last group of batch entry blockIdx.y. The column-wise blocks
// that no group has are made by the quantizing kernel, from no rows.
__device__ void clear_rest(const QuantizeTask& task) {
  const QuantizeProblem& p = task.p;
  const int64_t entry = blockIdx.y, end = (entry + 1) * p.m;
  const int64_t begin = entry * p.m + task.first_row[entry * (p.groups + 1) + p.groups];
  if (p.row.codes != nullptr) {
    const int64_t width = p.row.blocks * kBlockCodeBytes;
    clear(p.row.codes, begin * width, end * width);
    clear(p.row.block_scale, begin * p.row.blocks, end * p.row.blocks);
  }
  if (p.values != nullptr)
    clear(reinterpret_cast<uint8_t*>(p.values), begin * p.k * 2, end * p.k * 2);
}

// The row blocks of the entry, with the scales that their group's amaxes give them.
__device__ void scale_blocks(const QuantizeTask& task) {
  const QuantizeProblem& p = task.p;
  const int64_t entry = blockIdx.y, stride = static_cast<int64_t>(gridDim.x) * kClearThreads;
  for (int64_t b = static_cast<int64_t>(blockIdx.x) * kClearThreads + threadIdx.x;
       b < task.row_blocks; b += stride) {
    ScaledBlock out = {task.row_block(entry, b), {0.0f, 1.0f}, {0.0f, 1.0f}};
    if (out.rows.rows > 0 && p.row.wanted)
      out.row =
          LineScale::of(row_form_amax(task, entry, out.rows, 0), static_cast<float>(p.row.bound));
    if (out.rows.rows > 0 && p.column.wanted)
      out.column = LineScale::of(column_form_amax(task, entry, out.rows, 0),
                                 static_cast<float>(p.column.bound));
    task.scaled[entry * task.row_blocks + b] = out;
  }
}

__global__ void __launch_bounds__(kClearThreads) finish_groups(QuantizeTask task) {
  await_pass_before();
  if (task.p.row.wanted) clear_rest(task);
  if (!task.p.row_scaled) scale_blocks(task);
}

// ---- Before amaxes are computed -----------------------------------------------------------------

// Zeros in both amaxes, of which either count may be 0.
__global__ void __launch_bounds__(kClearThreads)
    clear_amaxes(float* row, int64_t row_count, float* column, int64_t column_count,
                 uint32_t* units) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kClearThreads + threadIdx.x;
  if (i == 0) *units = 0;
  if (i < row_count) row[i] = 0.0f;
  if (i < column_count) column[i] = 0.0f;
}

cudaError_t launch_clear_amaxes(const QuantizeTask& task, cudaStream_t stream) {
  const QuantizeProblem& p = task.p;
  const int64_t row = p.row.wanted ? amax_count(p, true) : 0;
  const int64_t column = p.column.wanted ? amax_count(p, false) : 0;
  const int64_t most = row < column ? column : row;
  if (most == 0) return cudaSuccess;
  clear_amaxes<<<static_cast<unsigned>(ceil_div(most, kClearThreads)), kClearThreads, 0, stream>>>(
      p.row.amax, row, p.column.amax, column, task.units);
  return cudaGetLastError();
}

// ---- The problem -------------------------------------------------------------------------------

bool form_is_valid(const QuantizeProblem& p, const StoredForm& form, bool row_wise) {
  if (!form.wanted) return true;
  const int64_t along = row_wise ? p.k : p.m;
  const int64_t blocks =
      !row_wise && p.grouped ? grouped_blocks(p.m, p.groups) : ceil_div(along, kBlock);
  const bool four_over_six = form.four_over_six != ErrorNorm::kNone;
  return form.blocks == blocks && (form.bound == 448 || form.bound == 256) &&
         !(form.hadamard && (row_wise || p.row_scaled || four_over_six)) &&
         !(four_over_six && p.seed != nullptr);
}

bool is_valid(const QuantizeProblem& p) {
  const Activation activation = p.activation.kind;
  const bool given_row = p.row.wanted && p.row.given_amax != nullptr;
  const bool given_column = p.column.wanted && p.column.given_amax != nullptr;
  const bool given_agree = !p.row.wanted || !p.column.wanted || given_row == given_column;
  // Rows and columns are counted in 32 bits inside the kernels, and tiles on the grid.
  return p.batch >= 0 && p.m >= 0 && p.k >= 0 && p.groups >= 0 && p.batch <= 65535 &&
         p.m <= INT_MAX - 16 * (p.groups + 16) && p.k <= INT_MAX - 256 &&
         (p.tile == 1 || p.tile == kBlock) && (p.grouped || p.groups == 1) &&
         (!p.split_groups || (p.grouped && (p.seed != nullptr || p.batch == 0))) &&
         !(p.row_scaled && (p.tile != 1 || p.seed != nullptr)) && activation >= Activation::kNone &&
         activation <= Activation::kSquaredRelu && (p.values == nullptr || p.row.wanted) &&
         given_agree && form_is_valid(p, p.row, true) && form_is_valid(p, p.column, false);
}

cudaError_t launch_groups(const QuantizeTask& task, cudaStream_t stream) {
  plan_groups<<<static_cast<unsigned>(task.p.batch), kPlanThreads, 0, stream>>>(task);
  return cudaGetLastError();
}

// Whether the activation's pass finds the amaxes too: those that are maxima of matrices.
bool makes_maxima(const QuantizeProblem& p) {
  return p.activation.kind != Activation::kNone && !p.row_scaled &&
         !(p.column.wanted && p.column.hadamard);
}

// Makes what is quantized of h; the problem is then one without an activation.
cudaError_t launch_made(QuantizeTask& task, bool with_maxima, cudaStream_t stream) {
  const cudaError_t error = launch_activate(task, with_maxima, stream);
  task.p.x = task.made;
  task.p.x_dtype = task.p.compute;
  task.p.activation = {};
  return error;
}

cudaError_t launch_finish(const QuantizeTask& task, cudaStream_t stream) {
  const int64_t work = 1 + task.p.m * task.p.k / (1 << 16);
  const dim3 grid(static_cast<unsigned>(work < 512 ? work : 512),
                  static_cast<unsigned>(task.p.batch));
  return launch_pass(finish_groups, grid, kClearThreads, stream, task);
}

}  // namespace

int64_t lay_out_scratch(QuantizeTask& task, void* scratch) {
  const QuantizeProblem& p = task.p;
  task.row_blocks = p.grouped ? grouped_blocks(p.m, p.groups) : ceil_div(p.m, kBlock);
  task.seed_words = static_cast<int32_t>(seed_words(p.split_groups, p.groups));
  int64_t end = 0;
  const auto take = [&](auto*& pointer, int64_t count) {
    using Item = std::remove_reference_t<decltype(*pointer)>;
    if (scratch != nullptr) pointer = reinterpret_cast<Item*>(static_cast<uint8_t*>(scratch) + end);
    end += count * static_cast<int64_t>(sizeof(Item));
  };
  take(task.units, 4);  // whose number keeps the rest aligned
  const int64_t width = p.compute == DType::kF32 ? 4 : 2;
  task.made = static_cast<uint4*>(p.activation.made);
  if (p.activation.kind != Activation::kNone && task.made == nullptr)
    take(task.made, ceil_div(p.batch * p.m * p.k * width, sizeof(*task.made)));
  if (!p.grouped) return end;
  take(task.blocks, p.batch * task.row_blocks);
  take(task.scaled, p.batch * task.row_blocks);
  take(task.whole_rows, p.batch * p.groups);
  take(task.first_block, p.batch * p.groups);
  take(task.first_row, p.batch * (p.groups + 1));
  return end;
}

int64_t amax_count(const QuantizeProblem& p, bool row_wise) { return amaxes_of(p, row_wise); }

int64_t scratch_bytes(const QuantizeProblem& problem) {
  QuantizeTask task = {};
  task.p = problem;
  return lay_out_scratch(task, nullptr);
}

cudaError_t launch_amax(const QuantizeProblem& problem, void* scratch, cudaStream_t stream) {
  if (!is_valid(problem) || amaxes_are_given(problem) ||
      problem.activation.kind != Activation::kNone)
    return cudaErrorInvalidValue;
  QuantizeTask task = {};
  task.p = problem;
  if (lay_out_scratch(task, scratch) > 0 && scratch == nullptr) return cudaErrorInvalidValue;
  if (problem.batch == 0 || !(problem.row.wanted || problem.column.wanted)) return cudaSuccess;
  cudaError_t error = problem.grouped ? launch_groups(task, stream) : cudaSuccess;
  if (error == cudaSuccess && !clears_amaxes(problem)) error = launch_clear_amaxes(task, stream);
  return error == cudaSuccess ? launch_amaxes(task, stream) : error;
}

cudaError_t launch_activation(const QuantizeProblem& problem, void* scratch, cudaStream_t stream) {
  const ActivatedInput& input = problem.activation;
  if (!is_valid(problem) || problem.row.wanted || problem.column.wanted ||
      input.kind == Activation::kNone || input.made == nullptr)
    return cudaErrorInvalidValue;
  QuantizeTask task = {};
  task.p = problem;
  if (lay_out_scratch(task, scratch) > 0 && scratch == nullptr) return cudaErrorInvalidValue;
  if (problem.batch == 0) return cudaSuccess;
  // As the first pass of a call this is launched in the ordinary way, and clears nothing that is
  // used.
  const cudaError_t error = problem.grouped
                                ? launch_groups(task, stream)
                                : cudaMemsetAsync(task.units, 0, sizeof(*task.units), stream);
  return error == cudaSuccess ? launch_activate(task, false, stream) : error;
}

cudaError_t launch_quantize_transpose(const QuantizeProblem& problem, void* scratch,
                                      cudaStream_t stream) {
  if (!is_valid(problem)) return cudaErrorInvalidValue;
  QuantizeTask task = {};
  task.p = problem;
  if (lay_out_scratch(task, scratch) > 0 && scratch == nullptr) return cudaErrorInvalidValue;
  const QuantizeProblem& p = task.p;
  if (p.batch == 0 || !(p.row.wanted || p.column.wanted)) return cudaSuccess;
  const bool given = amaxes_are_given(p), maxima_made = !given && makes_maxima(p);
  cudaError_t error = cudaSuccess;
  const auto pass = [&](bool needed, auto launch) {
    if (needed && error == cudaSuccess) error = launch();
  };
  pass(p.grouped, [&] { return launch_groups(task, stream); });
  pass(!given && !clears_amaxes(p), [&] { return launch_clear_amaxes(task, stream); });
  pass(p.activation.kind != Activation::kNone,
       [&] { return launch_made(task, maxima_made, stream); });
  pass(!given && !maxima_made, [&] { return launch_amaxes(task, stream); });
  pass(p.grouped, [&] { return launch_finish(task, stream); });
  if (error != cudaSuccess) return error;
  if (quantize_rows_supports(p)) return launch_quantize_rows(task, stream);
  if (!quantize_tiles_supports(p)) return launch_quantize_any(task, stream);
  // The tile kernel counts on this memset, or else on launch_clear_amaxes: it fetches the first of
  // an x that no pass makes before it waits, and so what made x before the call must be done by
  // then.
  pass(given && !p.grouped,
       [&] { return cudaMemsetAsync(task.units, 0, sizeof(*task.units), stream); });
  pass(true, [&] { return launch_quantize_tiles(task, stream); });
  return error;
}

}  // namespace jax_fp4::cuda
