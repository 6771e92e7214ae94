#include "cpu_handler.h"

#include <new>

#include "cpu/dispatch.h"
#include "kernels/nvfp4.h"

namespace jax_fp4 {

// -0.0 and every NaN may come, and bits decide: a thread of XLA takes denormals for zeros.
void require_not_negative(Checks& checks, const std::string& name, const float* values,
                          int64_t count) {
  bool negative = false;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = Lanes<float>::bits(values[i]), magnitude = bits & kMagnitude;
    negative |= bits != magnitude && magnitude != 0 && magnitude <= kInfBits;
  }
  checks.require(!negative,
                 name +
                     " has a negative element; needs values >= 0 because it is an absolute "
                     "maximum. Try jnp.abs(amax).");
}

QuantizeCall cpu_call(const QuantizeOperands& o, const QuantizeAttributes& a) {
  QuantizeCall call = {};
  QuantizeProblem& p = call.entry;
  p.x = o.x;
  p.x_dtype = o.x_dtype;
  p.compute = o.compute;
  p.m = o.m;
  p.k = o.k;
  p.m_total = o.m_total;
  p.k_total = o.k_total;
  p.tile = a.tile;
  p.row_scaled = a.row_scaled;
  call.batch = o.batch;
  call.seed = o.seed;
  call.split_groups = o.split_groups;
  call.grouped = a.grouped;
  call.groups = o.groups;
  call.group_sizes = o.group_sizes;
  return call;
}

void add_form(Checks& checks, QuantizeCall& call, const FormBuffers& from, bool along_k,
              const char* suffix) {
  StoredForm& form = along_k ? call.entry.row : call.entry.column;
  form.wanted = true;
  form.rows = from.rows;
  form.blocks = from.blocks;
  form.hadamard = from.hadamard;
  form.four_over_six = from.four_over_six;
  form.bound = from.bound;
  form.codes = from.codes;
  form.block_scale = from.block_scale;
  form.amax = from.amax;
  if (from.given_amax == nullptr || !checks.ok()) return;
  require_not_negative(checks, std::string("amax") + suffix, from.given_amax,
                       amax_count(call, along_k));
  (along_k ? call.given_row_amax : call.given_column_amax) = from.given_amax;
}

ffi::Error no_memory_for_groups(const char* op) {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                    std::string(op) + ": no memory for the table of groups");
}

namespace {

ffi::Error run(const char* op, ffi::ThreadPool pool, const QuantizeCall& call,
               void (*work)(const Kernels&, Executor&, const QuantizeCall&)) {
  try {
    PoolExecutor<ffi::ThreadPool> executor(pool);
    work(kernels(), executor, call);
    return ffi::Error::Success();
  } catch (const std::bad_alloc&) {
    return no_memory_for_groups(op);
  }
}

}  // namespace

ffi::Error run_quantize(const char* op, ffi::ThreadPool pool, const QuantizeCall& call) {
  return run(op, pool, call, quantize);
}

ffi::Error run_amax(const char* op, ffi::ThreadPool pool, const QuantizeCall& call) {
  return run(op, pool, call, amaxes);
}

}  // namespace jax_fp4
