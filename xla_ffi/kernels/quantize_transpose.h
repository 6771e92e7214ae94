// NVFP4 quantization on a CUDA device: x [batch, m, k] becomes its row-wise form, its column-wise
// form, the row-wise form as exact bfloat16 values, or several of them in one pass. Equal bit for
// bit to the CPU kernels (cpu/quantize.h); the words are numerics.md, sections 1 and 2.
//
// Every pointer is device memory and dense. x, codes, block_scale, values and the scratch are
// aligned to 16 bytes, the rest to its elements. A launch only puts kernels and cudaMemsetAsync on
// the stream of the current device: nothing is allocated, no value is read by the host, so it can
// be captured in a CUDA graph and replayed with other data. Every byte of the outputs that are
// asked for is written; the scratch needs no initial value.
//
// Bytes moved per element of x (width w): w if amaxes are computed, w for the codes, 0.5625 a form
// and 2 for the values. An activation first reads w, or 2 w with a gate, and writes x as `compute`
// into scratch; maxima of whole matrices are found on the way, so that these amaxes cost nothing.
#ifndef JAX_FP4_XLA_FFI_KERNELS_QUANTIZE_TRANSPOSE_H_
#define JAX_FP4_XLA_FFI_KERNELS_QUANTIZE_TRANSPOSE_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "types.h"

namespace jax_fp4::cuda {

// One stored form. Row-wise: codes [batch, m, blocks * 8], block_scale [batch, m, blocks], blocks =
// ceil(k / 16). Column-wise: m and k change places; grouped, blocks = grouped_blocks(m, groups)
// of nvfp4.h.
struct StoredForm {
  bool wanted;
  bool hadamard;            // column-wise only; not with tile 16 under four_over_six
  ErrorNorm four_over_six;  // neither with hadamard nor with a seed
  int32_t bound;            // E4M3 bound of the tensor scale: 448, or 256 with four_over_six
  int64_t blocks;           // of a stored row
  uint8_t* codes;           // may be null, with block_scale, in a row-wise form made for `values`
  uint8_t* block_scale;
  float* amax;              // amax_count values; always written if the form is wanted
  const float* given_amax;  // as many, not negative (unchecked); null = computed from x
};

// How x is made, in scratch, by a pass before the others. With one, QuantizeProblem's x is h:
// [batch, m, 2 k] for a gated activation, gate columns first, else [batch, m, k]; what is quantized
// is act(h) * weight in float32, by the formulas of jax_fp4/_activations.py in the order written
// there, rounded once to `compute`. Its bits are those of that composition up to the last bits of
// the platform's exp and tanh. Finite h gives NaN nowhere, and what is finite wherever it fits; NaN
// stays NaN, Inf may become NaN.
struct ActivatedInput {
  Activation kind;                           // kNone: the rest is not read
  float limit, alpha, offset, beta1, beta2;  // only those of the formula are read
  const float* weights;                      // [batch, m], of rows; null = none
  void* made;                                // [batch, m, k] of `compute`; null = scratch
};

struct QuantizeProblem {
  const void* x;
  DType x_dtype;
  DType compute;  // x is rounded to it first
  ActivatedInput activation;
  int64_t batch, m, k;
  int32_t tile;  // rows that share a scale: 1 or 16
  bool row_scaled;
  // [batch, 4]: two words of the key, m origin (grouped: number of the first group, m_total is
  // unread), k origin; null = nearest rounding. The totals are extents of the tensor of which x is
  // a shard.
  const uint32_t* seed;
  // x has a part of each group, and seed is [batch, 4 + 2 groups]: after the four words, the row of
  // each whole group at which x begins, then the rows that each has. Needs grouped and a seed.
  bool split_groups;
  int64_t m_total, k_total;
  // Groups split the m rows of each batch entry; group_sizes [batch, groups] is data, and any
  // values are legal: a negative size counts as 0, groups end at row m. Rows after the last group
  // are not read. A group is a matrix of its own: its blocks of the column-wise form follow those
  // of the group before it. Every other byte of the forms and of `values` becomes 0.
  bool grouped;
  int64_t groups;  // 1 if not grouped
  const int32_t* group_sizes;
  // The row-wise form (blocks along k), the column-wise one (blocks along m, stored transposed).
  // Both amaxes are given or none.
  StoredForm row, column;
  // Product form of the row-wise form: bfloat16 [batch, m, k], code times block scale, exact; NaN
  // where the block is NaN. Null = not wanted. Needs row.wanted.
  uint16_t* values;
};

// Values in the amaxes of a form: one a matrix (batch * groups of them); under row scaling
// batch * m of the row-wise form, and k a matrix of the column-wise one.
int64_t amax_count(const QuantizeProblem& problem, bool row_wise);

// Bytes of scratch, aligned to 16, that the launch needs; never 0. With an
// activation they hold x: batch * m * k values of `compute` beside what is always there.
int64_t scratch_bytes(const QuantizeProblem& problem);

// cudaErrorInvalidValue: the problem is none that the contract above describes.
cudaError_t launch_quantize_transpose(const QuantizeProblem& problem, void* scratch,
                                      cudaStream_t stream);

// The amaxes of the wanted forms alone, which nobody gives, of an x that no activation makes; codes
// and block_scale may be null.
cudaError_t launch_amax(const QuantizeProblem& problem, void* scratch, cudaStream_t stream);

// What the activation makes alone, where activation.made points; rows after the last group are not
// written. No form may be wanted.
cudaError_t launch_activation(const QuantizeProblem& problem, void* scratch, cudaStream_t stream);

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_QUANTIZE_TRANSPOSE_H_
