// Products of groups of rows, each with a matrix of its own, on a CUDA device (numerics.md, 1.10
// and 2), and the contraction of each group's rows: bfloat16 operands, of which the matrices may be
// packed NVFP4, with float32 sums. Group sizes are read on the device: a negative one counts as 0,
// offsets are cut at m, rows beyond the sum are not read and come out zero. One product is a group.
//
// The rules for pointers, streams and capture are those of quantize_transpose.h.
#ifndef JAX_FP4_XLA_FFI_KERNELS_GROUPED_GEMM_H_
#define JAX_FP4_XLA_FFI_KERNELS_GROUPED_GEMM_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "types.h"

namespace jax_fp4::cuda {

enum class Gemm : int32_t {
  kPacked = 0,       // out[m, n]: values[m, k] times codes, block_scale [groups, n, k]
  kRows = 1,         // out[m, n]: lhs[m, k] times rhs[groups, k, n]
  kContraction = 2,  // out[groups, k, n]: lhs[m, k] transposed times rhs[m, n], by group; in parts
                     // of k, out[parts, groups, k / parts, n]
};

struct GemmProblem {
  Gemm kind;
  // The contracted axis is the last one of rhs in memory: [groups, n, k]; of both operands under
  // kContraction: [k, stored], [n, stored] with each group's positions from a block of 16 on.
  bool contracts_last;
  int64_t m, n, k, groups;
  int64_t parts;    // of a contraction's k, each of whole tiles of kPartRows; otherwise 1
  int64_t stored;   // positions in memory of a contraction, kContraction and contracts_last
  const void* lhs;  // under kPacked in interleaved order (launch_interleave)
  const void* rhs;  // codes under kPacked
  const uint8_t* block_scale;
  // The sums are multiplied by lhs_factor, then by rhs_factor. Null is one. [groups], or
  // lhs_by_row [m] ([groups, k] of a contraction), rhs_by_column [groups, n].
  const float *lhs_factor, *rhs_factor;
  bool lhs_by_row, rhs_by_column;
  const float* bias;         // [groups, n], added after the factors; null for none
  const float* row_weights;  // [m], of the bias; null is one
  const int32_t* group_sizes;
  void* out;
  DType out_dtype;
};

constexpr int kMostGroups = 1024;  // fit in shared memory
constexpr int kPartRows = 256;     // a tile of a contraction lies in one part of the result

// Why the kernels do not take a problem, "" where they do: what they need is said in the text.
const char* why_not(const GemmProblem& problem);

inline int64_t scratch_bytes(const GemmProblem&) { return 16; }  // a number of tiles

// cudaErrorNotSupported on a GPU that is no Hopper.
cudaError_t launch_grouped_gemm(const GemmProblem& problem, void* scratch, cudaStream_t stream);

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_GROUPED_GEMM_H_
