// The CPU kernels for one instruction set. CMake compiles this file once for each, with its flags
// and JAX_FP4_ISA, the name of the table; nothing else leaves the translation unit. No standard
// library header is included here: an inline function of it, compiled with wide instructions, could
// be the copy that the linker keeps for everybody.
#include "kernels.h"

#include "amax_kernel.h"
#include "dequantize_kernel.h"
#include "float8_kernel.h"
#include "quantize_kernel.h"

#define JAX_FP4_STRING_(name) #name
#define JAX_FP4_STRING(name) JAX_FP4_STRING_(name)
#define JAX_FP4_TABLE_(name) kernels_##name
#define JAX_FP4_TABLE(name) JAX_FP4_TABLE_(name)

namespace jax_fp4 {

extern const Kernels JAX_FP4_TABLE(JAX_FP4_ISA);

const Kernels JAX_FP4_TABLE(JAX_FP4_ISA) = {
    JAX_FP4_STRING(JAX_FP4_ISA),
    &quantize,
    &amax,
    &column_amax,
    &hadamard_amax,
    &dequantize,
    &quantize_float8,
    &dequantize_float8,
};

}  // namespace jax_fp4
