"""Products on Blackwell: two quantized operands by `jax.nn.scaled_matmul`. Never run on such a GPU yet.

For CUDA that is a call which XLA hands to cuDNN where that has the product, and elsewhere writes out as a dot of code
times block scale in float32: the same product, slower.

Numerics 1.10 holds since each side's tensor factor is constant along the contraction ([], or one for each stored row)
and left to the epilogue: float32, one after the other. The one global scale that cuDNN knows would be their product.
Taken on trust until it runs there: that a NaN scale over codes 0 gives NaN, and that sums are as near as those of other
tensor cores. These read scales without a sign: `quantize` makes no negative one, and for one made by hand there is no
promise.
"""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import mlir
from jaxtyping import Array, Float8e4m3fn, Float32, UInt8

from jax_fp4 import _ffi
from jax_fp4._array import QuantizedTensor
from jax_fp4._formats import PACK
from jax_fp4._lowering import choose, is_partitioned

# Of k and n, so that rows of codes and of the float32 sums are whole vectors of 16 bytes. JAX's own tests on Blackwell
# know no others.
WHOLE_K, WHOLE_N = 32, 4


def takes(lhs: QuantizedTensor, rhs: QuantizedTensor) -> bool:
    """Whether lhs [..., m, k] @ rhs [..., k, n] may be one, of the installations that have a CUDA extension."""
    k, n = PACK * lhs.codes.shape[-1], rhs.shape[-1]
    whole = k % WHOLE_K == 0 and n % WHOLE_N == 0 and lhs.codes.size > 0 and rhs.codes.size > 0
    return whole and not _ffi.cuda_missing


@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def chosen(native, otherwise, static, *operands) -> Array:
    """native(*operands, static=static) where the program is lowered for CUDA, for one device or inside a shard_map over
    the whole mesh, and the GPUs are Blackwell's, else `otherwise`: also under vmap, for which JAX 0.10 has half a rule
    of scaled_matmul. Jitted as `_hopper.chosen` is."""
    functions = (partial(function, static=static) for function in (native, otherwise))
    return choose(*functions, usable=_on_blackwell, batched=False)(*operands)


def _on_blackwell(context) -> bool:
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    whole = mesh is None or set(mesh.axis_names) == set(axes.manual_axes)  # JAX fails to partition it over some axes
    return whole and not is_partitioned(context) and _ffi.on_blackwell()


def product(lhs: QuantizedTensor, rhs: QuantizedTensor) -> Float32[Array, "*b m n"]:
    """lhs [..., m, k] @ rhs [k, n], or batched alike, [..., k, n]: the sums of code times block scale, padding and all,
    without the tensor factors."""
    *batch, n, _ = rhs.codes.shape
    operands = lhs.codes, rhs.codes, lhs.block_scale, rhs.block_scale
    acc = _scaled_matmul_p.bind(*(a.reshape(math.prod(batch), -1, a.shape[-1]) for a in operands))
    return acc.reshape(*lhs.codes.shape[:-1], n)


def scaled_matmul(
    lhs: UInt8[Array, "b m bytes"],
    rhs: UInt8[Array, "b n bytes"],
    lhs_scale: Float8e4m3fn[Array, "b m blocks"],
    rhs_scale: Float8e4m3fn[Array, "b n blocks"],
) -> Float32[Array, "b m n"]:
    # A byte becomes two codes, its low nibble first. XLA swizzles the scales.
    a, b = (lax.bitcast_convert_type(codes, jnp.float4_e2m1fn).reshape(*codes.shape[:2], -1) for codes in (lhs, rhs))
    return jax.nn.scaled_matmul(a, b, lhs_scale, rhs_scale, preferred_element_type=jnp.float32)


# A primitive, so that JAX's own is in a program only from its lowering for Blackwell on: whatever holds that one cannot
# be lowered for an abstract mesh, on any platform.
_scaled_matmul_p = core.Primitive("jax_fp4_scaled_matmul")


@_scaled_matmul_p.def_abstract_eval
def _(lhs, rhs, lhs_scale, rhs_scale):
    return ShapedArray((*lhs.shape[:2], rhs.shape[1]), jnp.float32)


def _lowering(context, *operands):
    module, axes = context.module_context, context.module_context.axis_context
    if getattr(axes, "device_assignment", ()) is None:  # JAX counts the devices to know that it need not partition
        axes = dataclasses.replace(axes, device_assignment=tuple(jax.devices()[:1]))
    context = context.replace(module_context=module.replace(axis_context=axes))
    return mlir.lower_fun(scaled_matmul, multiple_results=False)(context, *operands)


mlir.register_lowering(_scaled_matmul_p, _lowering)
