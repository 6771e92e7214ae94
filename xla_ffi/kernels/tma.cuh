// Copies of whole tiles between global and shared memory by sm_90's copy engine, and the barriers
// on which they arrive.
#ifndef JAX_FP4_XLA_FFI_KERNELS_TMA_CUH_
#define JAX_FP4_XLA_FFI_KERNELS_TMA_CUH_

#include <cuda.h>
#include <stdint.h>

namespace jax_fp4::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- Barriers, by address ----------------------------------------------------------------------

__device__ __forceinline__ void init_barrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and lets the barrier wait for so many bytes of copies.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Arrives when the copies that this thread has begun (cp.async) are complete.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool is_complete(uint32_t barrier, uint32_t parity) {
  uint32_t complete;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
      " selp.u32 %0, 1, 0, p; }"
      : "=r"(complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return complete != 0;
}
// Until the phase of that parity is complete.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  while (!is_complete(barrier, parity)) {
  }
}
// The same, leaving the issue slots to others: the wait may last a tenth of a microsecond longer.
__device__ __forceinline__ void wait_idly(uint32_t barrier, uint32_t parity) {
  while (!is_complete(barrier, parity)) __nanosleep(64);
}
// Makes what threads wrote to shared memory known to the tensor cores and the copy engine.
__device__ __forceinline__ void publish_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Among `threads` threads that name the same one of sixteen.
__device__ __forceinline__ void meet(int which, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(which), "r"(threads) : "memory");
}

// ---- Copies ------------------------------------------------------------------------------------

// The box of `map` at (x, y, z), zero where it lies outside.
__device__ __forceinline__ void copy_box(uint32_t shared, const CUtensorMap& map, int x, int y,
                                         int z, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
// The way back, in the background: what of the box lies inside.
__device__ __forceinline__ void store_box(const CUtensorMap& map, int x, int y, int z,
                                          uint32_t shared) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
      "r"(shared), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// Of one thread: its stores so far are a group; until at most `pending` groups have yet to read
// shared memory.
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
template <int pending>
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

}  // namespace jax_fp4::cuda

#endif  // JAX_FP4_XLA_FFI_KERNELS_TMA_CUH_
