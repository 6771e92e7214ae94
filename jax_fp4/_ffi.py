"""The native handlers: loads the extensions, registers their targets, one typed wrapper for each.

The only file that spells a target. The wrappers take what the functions of `reference` of the same name take.
"""

import importlib.util
from dataclasses import replace
from types import ModuleType
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import batching, mlir
from jaxtyping import Array, Float, Float32, Int32, UInt32

from jax_fp4 import _cpu
from jax_fp4._errors import UnsupportedError
from jax_fp4._formats import Quantization, amax_shape, codes_shape, grouped_extent, scale_shape, stored

for _name, _handler in _cpu.registrations().items():
    jax.ffi.register_ffi_target(_name, _handler, platform="cpu")


def _load_cuda() -> tuple[ModuleType | None, str]:
    """The optional second extension; without it, why: said where CUDA is asked for, since the CPU needs none of it."""
    if importlib.util.find_spec("jax_fp4._cuda") is None:
        return None, "this installation has no CUDA extension (JAX_FP4_CUDA=ON pip install . builds it)"
    try:
        return importlib.import_module("jax_fp4._cuda"), ""
    except ImportError as error:
        return None, f"the CUDA extension does not load: {error}"


_cuda, cuda_missing = _load_cuda()
if _cuda is not None:
    for _name, _handler in _cuda.registrations().items():
        jax.ffi.register_ffi_target(_name, _handler, platform="CUDA")


def cuda_archs() -> str:
    """The GPU architectures of the CUDA kernels, "" without the extension."""
    return "" if _cuda is None else _cuda.archs()


_COMPUTE = {"float32": 0, "bfloat16": 1, "float16": 2}
_FOUR_OVER_SIX = {"": 0, "MAE": 1, "MSE": 2}
_ACTIVATIONS = {
    name: number
    for number, name in enumerate(
        ("swiglu", "geglu", "clamped_qgeglu", "situ_glu", "silu", "gelu", "relu", "squared_relu"), start=1
    )
}


def quantize(
    x: Float[Array, "*b m k"],
    amax: Float[Array, "..."] | None,
    seed: UInt32[Array, "*b 4"] | None,
    group_sizes: Int32[Array, "*b g"] | None,
    q: Quantization,
):
    """-> codes, block_scale, amax of x along q.axis."""
    return _quantize("jax_fp4_quantize", x, (x,), {q.axis: amax}, seed, group_sizes, q, axis=np.int32(q.axis))


def quantize_transpose(
    x: Float[Array, "*b m k"],
    amax: Float[Array, "..."] | None,
    amax_t: Float[Array, "..."] | None,
    seed: UInt32[Array, "*b 4"] | None,
    group_sizes: Int32[Array, "*b g"] | None,
    q: Quantization,
):
    """-> codes, block_scale, amax row-wise, then the same column-wise, in one pass over x."""
    return _quantize("jax_fp4_quantize_transpose", x, (x,), {-1: amax, 0: amax_t}, seed, group_sizes, q)


@runtime_checkable
class Activated(Protocol):
    """An `_activations.Activation`: its name, and the constants that the name uses."""

    @property
    def name(self) -> str: ...
    @property
    def gated(self) -> bool: ...
    @property
    def limit(self) -> float | None: ...
    @property
    def alpha(self) -> float | None: ...
    @property
    def offset(self) -> float | None: ...
    @property
    def beta1(self) -> float | None: ...
    @property
    def beta2(self) -> float | None: ...


def activate_quantize(
    h: Float[Array, "*b m h"],
    weights: Float32[Array, "*b m"] | None,
    group_sizes: Int32[Array, "*b g"] | None,
    q: Quantization,
    activation: Activated,
):
    """-> codes, block_scale, amax along q.axis of the activation of h times the rows' weights. CUDA only."""
    x, more = _activated(h, activation), _activation_attributes(activation, weights)
    operands, amaxes = (h, _operand(weights, x, jnp.float32)), {q.axis: None}
    return _quantize(
        "jax_fp4_activate_quantize", x, operands, amaxes, None, group_sizes, q, axis=np.int32(q.axis), **more
    )


def activate_quantize_transpose(
    h: Float[Array, "*b m h"],
    weights: Float32[Array, "*b m"] | None,
    group_sizes: Int32[Array, "*b g"] | None,
    q: Quantization,
    activation: Activated,
):
    """-> the same row-wise, then column-wise."""
    x, more = _activated(h, activation), _activation_attributes(activation, weights)
    operands, amaxes = (h, _operand(weights, x, jnp.float32)), {-1: None, 0: None}
    return _quantize("jax_fp4_activate_quantize_transpose", x, operands, amaxes, None, group_sizes, q, **more)


def dequantize(codes, block_scale, amax, bound: int, extent: int, dtype):
    """-> values [*b, r, extent] in the stored orientation; amax None: code times block scale, exact in bfloat16."""
    batch = codes.shape[:-2]
    out = jax.ShapeDtypeStruct((*codes.shape[:-1], extent), dtype)
    return _call(
        "jax_fp4_dequantize",
        out,
        (codes, block_scale, jnp.zeros((*batch, 0), jnp.float32) if amax is None else amax),
        bound=np.int32(bound),
        row_scaled=np.bool_(amax is not None and amax.ndim == codes.ndim - 1),
        product_form=np.bool_(amax is None),
    )


def _call(target: str, results, operands, **attributes):
    # broadcast_all: under vmap every operand gains the same leading dimension, which the handlers count as batch.
    return jax.ffi.ffi_call(target, results, vmap_method="broadcast_all")(*operands, **attributes)


def _quantize(target: str, x, operands, amaxes: dict, seed, group_sizes, q: Quantization, **attributes):
    """x, or its shape and dtype, in one form for each axis that `amaxes` has; None there is computed."""
    given = next(iter(amaxes.values()))
    return _call(
        target,
        tuple(result for axis in amaxes for result in _results(x, q, axis, group_sizes)),
        (
            *operands,
            *(_operand(amax, x, jnp.float32) for amax in amaxes.values()),
            _operand(seed, x, jnp.uint32),
            _operand(group_sizes, x, jnp.int32),
        ),
        **attributes,
        **_attributes(q, given, group_sizes),
    )


def _operand(value, x, dtype):
    """What an absent operand looks like at the border: no elements, with x's batch dimensions."""
    return jnp.zeros((*x.shape[:-2], 0), dtype) if value is None else value


def _results(x, q: Quantization, axis: int, group_sizes):
    batch = x.shape[:-2]
    rows, extent = stored(x.shape, axis)
    groups = None if group_sizes is None else group_sizes.shape[-1]
    if groups is not None and axis == 0:
        extent = grouped_extent(extent, groups)
    return (
        jax.ShapeDtypeStruct(codes_shape(batch, rows, extent), jnp.uint8),
        jax.ShapeDtypeStruct(scale_shape(batch, rows, extent), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct(amax_shape(batch, rows, replace(q, axis=axis), groups), jnp.float32),
    )


def _activated(h, activation: Activated) -> jax.ShapeDtypeStruct:
    """What is quantized in the place of h."""
    columns = h.shape[-1] // 2 if activation.gated else h.shape[-1]
    return jax.ShapeDtypeStruct((*h.shape[:-1], columns), h.dtype)


def _activation_attributes(activation: Activated, weights) -> dict[str, np.generic]:
    names = ("limit", "alpha", "offset", "beta1", "beta2")
    return {
        "activation": np.int32(_ACTIVATIONS[activation.name]),
        **{name: np.float32(getattr(activation, name) or 0) for name in names},
        "weighted": np.bool_(weights is not None),
    }


def _attributes(q: Quantization, amax, group_sizes) -> dict[str, np.generic]:
    return {
        "tile": np.int32(q.tile),
        "row_scaled": np.bool_(q.row_scaled),
        "hadamard": np.bool_(q.hadamard),
        "four_over_six": np.int32(_FOUR_OVER_SIX[q.four_over_six]),
        "bound": np.int32(q.bound),
        "compute": np.int32(_COMPUTE[q.compute_dtype]),
        "m_total": np.int64(q.m_total),
        "k_total": np.int64(q.k_total),
        "given_amax": np.bool_(amax is not None),
        "grouped": np.bool_(group_sizes is not None),
    }


# A primitive that no platform can run: it may be traced, and raises when it is lowered. So a program traced once is
# refused only where it is lowered for a platform that lacks what was asked for.
_refuse_p = core.Primitive("jax_fp4_refuse")
_refuse_p.multiple_results = True


@_refuse_p.def_abstract_eval
def _(*_, results, text):
    return [ShapedArray(shape, dtype) for shape, dtype in results]


def _refuse_lowering(context, *_, results, text):
    platforms = context.platforms or context.module_context.platforms
    raise UnsupportedError(text.format(platform=", ".join(platforms)))


def _refuse_batching(arguments, dimensions, *, results, text):
    size = next(a.shape[d] for a, d in zip(arguments, dimensions, strict=True) if d is not None)
    batched = tuple(((size, *shape), dtype) for shape, dtype in results)
    return _refuse_p.bind(*arguments, results=batched, text=text), [0] * len(results)


mlir.register_lowering(_refuse_p, _refuse_lowering)
batching.primitive_batchers[_refuse_p] = _refuse_batching


def refuse(function, text: str):
    """A stand-in for `function` with its result shapes, which raises UnsupportedError(text) when it is lowered."""

    def refused(*arguments):
        shapes = jax.eval_shape(function, *arguments)
        leaves, tree = jax.tree.flatten(shapes)
        results = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        return jax.tree.unflatten(tree, _refuse_p.bind(*jax.tree.leaves(arguments), results=results, text=text))

    return refused


isa = _cpu.isa
