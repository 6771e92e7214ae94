// What the kernels of quantize_transpose.h share: the problem with its row blocks, and how one
// element is loaded.
//
// A row block is a block of the column-wise form seen from x: up to 16 consecutive rows of one
// matrix. Without groups it is arithmetic; with groups a table in scratch, made by plan_groups, so
// that no other kernel searches. Blocks after the last group have no rows: x is zero there, and so
// are the codes and scales that follow.
#ifndef JAX_FP4_XLA_FFI_KERNELS_QUANTIZE_TASK_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_QUANTIZE_TASK_CUH_

#include <cuda_fp16.h>

#include "device.h"
#include "nvfp4.h"
#include "ptx.cuh"
#include "quantize_transpose.h"

namespace jax_fp4::cuda {

constexpr uint32_t kRowDirection = 0, kColumnDirection = 1;  // Philox counter word 2

struct alignas(16) RowBlock {
  int32_t row, rows;  // of the batch entry
  int32_t group;
  uint32_t place;  // the row of its matrix, of a split group the whole one, at which it begins
};

// m and S_dec of a tensor, row or column. The scale is calm if no multiplier of a block, no eighth
// of one and no product float(s) * S_dec comes near the denormals; otherwise m is NaN, which makes
// every block of it 0x7F here.
struct LineScale {
  float per_block, decode;

  __device__ static bool is_calm(float amax) {
    return amax == 0.0f || (amax > 0x1p-90f && amax < 0x1p100f);
  }
  __device__ static LineScale of(float amax, float bound) {
    const TensorScale<float> scale = tensor_scale(amax, bound);
    return {is_calm(scale.amax) ? scale.per_block : __uint_as_float(kNanBits), scale.decode};
  }
};

// A row block with the scales of its group, as the tile kernel reads them.
struct alignas(16) ScaledBlock {
  RowBlock rows;
  LineScale row, column;
};
static_assert(sizeof(RowBlock) == 16 && sizeof(ScaledBlock) == 32, "read in pieces of 16 bytes");

struct QuantizeTask {
  QuantizeProblem p;
  int64_t row_blocks;    // of a batch entry
  int32_t seed_words;    // likewise
  RowBlock* blocks;      // [batch, row_blocks] if grouped
  ScaledBlock* scaled;   // the same, once the amaxes are known
  uint32_t* whole_rows;  // [batch, groups] if grouped: of each group, of a split one the whole
  int32_t* first_block;  // [batch, groups] if grouped
  int32_t* first_row;    // [batch, groups + 1] if grouped: the last is where the groups end
  uint32_t* units;       // what the tile kernel has drawn; the first pass, or a memset, makes it 0
  uint4* made;           // [batch, m, k] of `compute` if there is an activation: what it makes

  __device__ RowBlock row_block(int64_t entry, int64_t block) const {
    if (p.grouped) {
      const int4 from = __ldg(reinterpret_cast<const int4*>(blocks + entry * row_blocks + block));
      return {from.x, from.y, from.z, static_cast<uint32_t>(from.w)};
    }
    const int64_t row = block * kBlock;
    const int64_t rows = p.m - row < kBlock ? p.m - row : kBlock;
    return {static_cast<int32_t>(row), static_cast<int32_t>(rows), 0, static_cast<uint32_t>(row)};
  }

  __device__ __forceinline__ const uint32_t* seed_of(int64_t entry) const {
    return p.seed + int64_t{static_cast<int32_t>(entry)} * seed_words;
  }

  // The matrix of which a row block is part, as amaxes count them.
  __device__ int64_t matrix(int64_t entry, const RowBlock& block) const {
    return entry * p.groups + block.group;
  }
};

// Whether what is quantized are bfloat16 values, of bfloat16 or of float32 x.
inline bool holds_bfloat16(const QuantizeProblem& p) {
  return p.x_dtype == DType::kBF16 ? p.compute != DType::kF16
                                   : p.x_dtype == DType::kF32 && p.compute == DType::kBF16;
}

// Host: the table's pointers into scratch. With null, only the size counts.
int64_t lay_out_scratch(QuantizeTask& task, void* scratch);

// Where the blocks of one stored form of one matrix lie in the global tensor, for the random bytes:
// along m from RowBlock::place on, in which the part of a split group has its origin already.
struct Origin {
  uint32_t key0, key1, direction, expert;
  uint64_t row, block, blocks;

  __device__ static Origin of(const QuantizeTask& task, int64_t entry, int32_t group,
                              uint32_t direction) {
    const QuantizeProblem& p = task.p;
    const uint32_t* seed = task.seed_of(entry);
    const int64_t m_total = p.grouped ? task.whole_rows[entry * p.groups + group] : p.m_total;
    const uint32_t m_origin = p.grouped ? 0 : seed[2], k_origin = seed[3];
    const bool rows = direction == kRowDirection;
    return {seed[0],
            seed[1],
            direction,
            p.grouped ? seed[2] + static_cast<uint32_t>(group) : 0,
            rows ? m_origin : k_origin,
            (rows ? k_origin : m_origin) / kBlock,
            static_cast<uint64_t>(ceil_div(rows ? p.k_total : m_total, kBlock))};
  }

  // Number of a block, of which the local row and block are given.
  __device__ __forceinline__ uint64_t index(int64_t local_row, int64_t local_block) const {
    return (row + static_cast<uint64_t>(local_row)) * blocks + block +
           static_cast<uint64_t>(local_block);
  }
  // The counter of a block.
  __device__ __forceinline__ void count(uint64_t index, uint32_t word[4]) const {
    word[0] = static_cast<uint32_t>(index);
    word[1] = static_cast<uint32_t>(index >> 32);
    word[2] = direction;
    word[3] = expert;
  }

  // Its sixteen bytes.
  __device__ __forceinline__ void draw(int64_t local_row, int64_t local_block,
                                       uint32_t word[4]) const {
    count(index(local_row, local_block), word);
    philox<float>(word, key0, key1);
  }
};

__device__ __forceinline__ float round_to(DType compute, float value) {
  switch (compute) {
    case DType::kF32:
      return value;
    case DType::kBF16:
      return round_to_bfloat16(value);
    case DType::kF16:
      return __half2float(__float2half_rn(value));
  }
  return value;
}

// Element `index` of what p.x points to.
__device__ __forceinline__ float stored_element(const QuantizeProblem& p, int64_t index) {
  switch (p.x_dtype) {
    case DType::kF32:
      return static_cast<const float*>(p.x)[index];
    case DType::kBF16:
      return __uint_as_float(static_cast<uint32_t>(static_cast<const uint16_t*>(p.x)[index]) << 16);
    case DType::kF16:
      return __half2float(static_cast<const __half*>(p.x)[index]);
  }
  return 0.0f;
}

// Element `index` of x, rounded to the compute dtype.
__device__ __forceinline__ float load_element(const QuantizeProblem& p, int64_t index) {
  return round_to(p.compute, stored_element(p, index));
}

// amax_count (quantize_transpose.h), for the device as well.
__host__ __device__ __forceinline__ int64_t amaxes_of(const QuantizeProblem& p, bool row_wise) {
  const int64_t matrices = p.batch * p.groups;
  if (!p.row_scaled) return matrices;
  return row_wise ? p.batch * p.m : matrices * p.k;
}

// The amax that a form is quantized with. A given one is read where it is: what is stored of it is
// written by the same kernel.
__device__ __forceinline__ float amax_at(const StoredForm& form, int64_t i) {
  return form.given_amax != nullptr ? form.given_amax[i] : form.amax[i];
}

// Every thread of the grid: copies given amaxes to where they are stored.
__device__ __forceinline__ void store_given_amaxes(const QuantizeProblem& p) {
  const int64_t thread =
      (static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * gridDim.y * blockDim.x;
  for (int row_wise = 0; row_wise < 2; ++row_wise) {
    const StoredForm& form = row_wise ? p.row : p.column;
    if (!form.wanted || form.given_amax == nullptr) continue;
    const int64_t count = amaxes_of(p, row_wise);
    for (int64_t i = thread; i < count; i += threads) {
      const float amax = form.given_amax[i];
      form.amax[i] = amax != amax ? __uint_as_float(kNanBits) : amax;
    }
  }
}

// The amax of the blocks of a stored row of a form: under row scaling the row counts.
__device__ __forceinline__ float row_form_amax(const QuantizeTask& task, int64_t entry,
                                               const RowBlock& block, int64_t row) {
  return amax_at(task.p.row,
                 task.p.row_scaled ? entry * task.p.m + row : task.matrix(entry, block));
}
__device__ __forceinline__ float column_form_amax(const QuantizeTask& task, int64_t entry,
                                                  const RowBlock& block, int64_t column) {
  const int64_t matrix = task.matrix(entry, block);
  return amax_at(task.p.column, task.p.row_scaled ? matrix * task.p.k + column : matrix);
}

// Host: launches a pass that follows another one of the same call, and whose kernel waits for it
// (await_pass_before): its thread blocks may come to the multiprocessors as those of the other
// leave, or, while it runs, where it leaves room and says so (let_next_pass_begin: the maxima do).
template <class... Parameters, class... Arguments>
cudaError_t launch_pass(void (*kernel)(Parameters...), dim3 grid, unsigned threads,
                        cudaStream_t stream, const Arguments&... arguments) {
  // Only code of compute capability 9.0 on waits. That is the virtual architecture for which the
  // kernel was compiled: binaryVersion would be the GPU's also of older PTX that the driver
  // compiled for it, in which there is no wait.
  cudaFuncAttributes code = {};
  cudaError_t error = cudaFuncGetAttributes(&code, kernel);
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = code.ptxVersion >= 90 ? 1 : 0;
  if (error == cudaSuccess) error = cudaLaunchKernelEx(&config, kernel, arguments...);
  if (error != cudaSuccess) cudaGetLastError();  // it is returned, and not left for the next call
  return error;
}

// ---- Launchers of the passes -------------------------------------------------------------------

// Makes task.made of h; `with_maxima`, raises the amaxes of both forms to those of the matrices.
cudaError_t launch_activate(const QuantizeTask& task, bool with_maxima, cudaStream_t stream);

// Raises the amaxes of both forms, which are 0 before. This and what follows know no activation.
cudaError_t launch_amaxes(const QuantizeTask& task, cudaStream_t stream);

// Any problem.
cudaError_t launch_quantize_any(const QuantizeTask& task, cudaStream_t stream);

// Whole rows of blocks, the row-wise form alone.
bool quantize_rows_supports(const QuantizeProblem& p);
cudaError_t launch_quantize_rows(const QuantizeTask& task, cudaStream_t stream);

// bfloat16 values in tiles.
bool quantize_tiles_supports(const QuantizeProblem& p);
cudaError_t launch_quantize_tiles(const QuantizeTask& task, cudaStream_t stream);

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_QUANTIZE_TASK_CUH_
