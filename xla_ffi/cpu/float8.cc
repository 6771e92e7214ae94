#include "float8.h"

#include <algorithm>

#include "../kernels/float8.h"
#include "huge_pages.h"
#include "parts.h"
#include "quantize.h"

namespace jax_fp4 {
namespace {

bool by_tensor(const Float8Call& call) { return call.entry.scaling == Float8Scaling::kTensor; }

int64_t scale_bytes(const Float8Call& call) {
  return call.entry.scaling == Float8Scaling::kMxfp8 ? 1 : 4;
}

// Stored rows of scales in a batch entry: a float32 scale of a tile is stored once.
int64_t scale_rows(const Float8Call& call, const Float8Form& form) {
  return call.entry.scaling == Float8Scaling::kBlock ? ceil_div(form.rows, call.entry.tile)
                                                     : form.rows;
}

// What matrix i is multiplied by, once its amax is known.
float tensor_scale(const Float8Call& call, int64_t i) {
  if (call.given_scale != nullptr) return call.given_scale[i];
  const Float8Problem& p = call.entry;
  const float amax = p.row.wanted ? call.row_amax[i] : call.column_amax[i];
  return float8_scale<float>(Lanes<float>::bits(amax), largest_code(p.codes), p.eps,
                             p.power_of_two);
}

void advance(const Float8Call& call, Float8Form& form, int64_t entry, int64_t row, int64_t block) {
  if (!form.wanted) return;
  const int64_t length = float8_block(call.entry.scaling);
  form.codes += (entry * form.rows + row) * form.extent + block * length;
  if (by_tensor(call)) return;
  const int64_t scales = (entry * scale_rows(call, form) + row) * form.blocks + block;
  form.scale = static_cast<uint8_t*>(form.scale) + scales * scale_bytes(call);
}

Float8Problem matrix(const Float8Call& call, const Part& part) {
  Float8Problem p = call.entry;
  p.x = element(p.x, p.x_dtype, (part.entry * p.m + part.row) * p.k);
  advance(call, p.row, part.entry, part.row, 0);
  advance(call, p.column, part.entry, 0, part.block);
  p.m = part.rows;
  if (by_tensor(call)) p.tensor_scale = tensor_scale(call, part.number);
  return p;
}

// The amaxes, and what is stored of the scales.
void tensor_results(const Kernels& kernels, Executor& executor, const Float8Call& call,
                    Parts& parts) {
  const Float8Problem& p = call.entry;
  float* amax = p.row.wanted ? call.row_amax : call.column_amax;
  if (call.given_amax != nullptr)
    std::copy_n(call.given_amax, parts.count(), amax);
  else
    tensor_amaxes(kernels, executor, parts, p.x, p.x_dtype, p.compute, p.m, p.k, amax);
  store_amax(amax, parts.count());
  if (p.row.wanted && p.column.wanted) std::copy_n(amax, parts.count(), call.column_amax);
  const ExactFloatMode mode;  // the caller's may flush denormals
  for (const Float8Form& form : {p.row, p.column})
    for (int64_t i = 0; form.wanted && i < parts.count(); ++i)
      static_cast<float*>(form.scale)[i] = 1.0f / tensor_scale(call, i);
}

void prepare(Executor& executor, const Float8Call& call, const Parts& parts, bool row_wise) {
  const Float8Form& form = row_wise ? call.entry.row : call.entry.column;
  if (!form.wanted) return;
  prefer_huge_pages(form.codes, call.batch * form.rows * form.extent);
  if (!call.grouped) return;
  const int64_t length = float8_block(call.entry.scaling);
  clear_rest(executor, parts, {form.codes, form.rows, form.extent / length, length}, row_wise);
  if (by_tensor(call)) return;
  const Plane scales = {form.scale, form.rows, form.blocks, scale_bytes(call)};
  clear_rest(executor, parts, scales, row_wise);
}

}  // namespace

void quantize_float8(const Kernels& kernels, Executor& executor, const Float8Call& call) {
  const Float8Problem& p = call.entry;
  Parts parts(call.batch, p.m, call.grouped, call.groups, call.group_sizes,
              float8_block(p.scaling));
  if (by_tensor(call)) tensor_results(kernels, executor, call, parts);
  prepare(executor, call, parts, true);
  prepare(executor, call, parts, false);
  const auto pieces = [&p](int64_t m) {
    return ceil_div(m, kFloat8Piece) * ceil_div(p.k, kFloat8Piece);
  };
  parts.run(executor, pieces, [&](const Part& part, int64_t begin, int64_t end) {
    kernels.quantize_float8(matrix(call, part), begin, end);
  });
}

void dequantize_float8(const Kernels& kernels, Executor& executor,
                       const Float8DequantizeProblem& p) {
  const int64_t rows = p.batch * p.rows;
  prefer_huge_pages(p.out, rows * p.extent * bytes_of(p.out_dtype));
  const int64_t group = kFlatElements / (p.extent + 1) + 1;  // so that an item is worth taking
  executor.run(ceil_div(rows, group), [&](int64_t begin, int64_t end) {
    kernels.dequantize_float8(p, begin * group, std::min(end * group, rows));
  });
}

}  // namespace jax_fp4
