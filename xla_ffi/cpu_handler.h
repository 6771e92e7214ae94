// From checked operands to a call of the CPU kernels.
#ifndef JAX_FP4_XLA_FFI_CPU_HANDLER_H_
#define JAX_FP4_XLA_FFI_CPU_HANDLER_H_

#include "common_handler.h"
#include "cpu/quantize.h"

namespace jax_fp4 {

// The call without its stored forms.
QuantizeCall cpu_call(const QuantizeOperands& operands, const QuantizeAttributes& attributes);

// Adds a form. No element of a given amax may be below zero: complains.
void add_form(Checks& checks, QuantizeCall& call, const FormBuffers& form, bool along_k,
              const char* suffix);

// Complains if one of the values of a given amax is below zero.
void require_not_negative(Checks& checks, const std::string& name, const float* values,
                          int64_t count);

ffi::Error no_memory_for_groups(const char* op);

// quantize() for a handler, which no exception may leave: memory for the groups may run out.
ffi::Error run_quantize(const char* op, ffi::ThreadPool pool, const QuantizeCall& call);

// amaxes() for a handler.
ffi::Error run_amax(const char* op, ffi::ThreadPool pool, const QuantizeCall& call);

}  // namespace jax_fp4

#endif  // JAX_FP4_XLA_FFI_CPU_HANDLER_H_
