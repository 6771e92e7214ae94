"""The native handlers: loads the extensions, registers their targets, one typed wrapper for each.

The only file that spells a target, and so longer than our files are. The wrappers take what the functions of the same
name of `reference`, or (those that end in _float8) of `reference_fp8`, take.
"""

import importlib.util
import math
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.export import DisabledSafetyCheck
from jaxtyping import Array, BFloat16, Float, Float8e4m3fn, Float32, Int32, UInt8, UInt32

from jax_fp4._errors import message
from jax_fp4._formats import (
    BLOCK,
    E4M3_MAX,
    INTERLEAVE,
    PACK,
    Float8Quantization,
    Quantization,
    amax_shape,
    codes_shape,
    grouped_extent,
    padded,
    scale_shape,
    stored,
)
from jax_fp4._lowering import choose

try:
    from jax_fp4 import _cpu
except ImportError as error:
    needs, why = "a build for this Python", "the handlers of every CPU program are in it"
    shown, fix = f"not loaded ({error})", "pip install . in the sources"
    raise ImportError(message("jax_fp4", "its extension _cpu", shown, needs, why, fix)) from error

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


# Every target that a program may call, of the CPU or of CUDA, whatever this installation has.
TARGETS = (
    "jax_fp4_quantize",
    "jax_fp4_quantize_transpose",
    "jax_fp4_activate",
    "jax_fp4_activate_quantize",
    "jax_fp4_activate_quantize_transpose",
    "jax_fp4_amax",
    "jax_fp4_dequantize",
    "jax_fp4_quantize_float8",
    "jax_fp4_quantize_transpose_float8",
    "jax_fp4_dequantize_float8",
    "jax_fp4_grouped_matmul",
    "jax_fp4_grouped_matmul_bf16",
    "jax_fp4_grouped_contraction",
)
SCALED_MATMUL = "__op$block_scaled_dot"  # XLA's, to which jax.nn.scaled_matmul is lowered for Blackwell
EXPORT_DISABLED_CHECKS = tuple(DisabledSafetyCheck.custom_call(target) for target in (*TARGETS, SCALED_MATMUL))
"""For `jax.export.export(jax.jit(f), disabled_checks=jax_fp4.EXPORT_DISABLED_CHECKS)`, which takes no custom call that
JAX does not promise to keep.

We keep ours within one version of this package: call a reloaded program where `jax_fp4` of that version is imported.
`serialize` needs the package flatbuffers. For CUDA a program is lowered as for this installation and its GPUs.
Rows may be symbolic: grouped layers then cut them into the longest tiles that any number of rows allows, so give it a
bound (`symbolic_shape("b", constraints=("b >= 256",))`), and their weight gradients are XLA's loops on CUDA too.
JAX cannot serialize a program over a mesh of Auto axes: use Explicit ones, or shard_map.
"""


def no_cuda() -> tuple[str, str] | None:
    """What implementation="cuda" lacks in this installation, and why; None where it lacks nothing."""
    return ("the CUDA extension", cuda_missing) if cuda_missing else None


def cuda_archs() -> str:
    """The GPU architectures of the CUDA kernels, "" without the extension."""
    return "" if _cuda is None else _cuda.archs()


def sm90a_missing() -> str:
    """Why this installation has no product kernels; "" where it has them."""
    if cuda_missing:
        return cuda_missing
    return "" if "90a" in cuda_archs() else f"the CUDA extension is built for {cuda_archs()}, not for sm_90a"


def hopper_missing() -> str:
    """Why a program that is lowered for CUDA now has no product kernels, which need sm_90a; "" where it has them.

    A lowering names its platform, not the architecture: all GPUs of the process must be Hopper's. Where it has none (a
    program lowered on one machine for another, jax.export) they are taken to be; on others such a program is refused
    by the handler when it runs.
    """
    if sm90a_missing():
        return sm90a_missing()
    return f"{gpu} is no Hopper GPU" if (gpu := other_gpu()) else ""


def other_gpu() -> str:
    """A GPU of this process that is not Hopper's; "" if there is none."""
    return next((gpu.device_kind for gpu in _gpus() if gpu.compute_capability != "9.0"), "")


def on_blackwell() -> bool:
    """Whether a program that is lowered for CUDA now runs on the FP4 tensor cores of compute capability 10: all GPUs of
    the process have them. Where it has none they are taken to be Hopper's, as above."""
    gpus = _gpus()
    return bool(gpus) and all(gpu.compute_capability.startswith("10.") for gpu in gpus)


def _gpus() -> list:
    try:
        return jax.devices("cuda")
    except RuntimeError:  # no such backend
        return []


Extent = Any  # an int, or what jax.export.symbolic_shape gives

_COMPUTE = {"float32": 0, "bfloat16": 1, "float16": 2}
_FOUR_OVER_SIX = {"": 0, "MAE": 1, "MSE": 2}
_SCALINGS = {"mxfp8": np.int32(0), "float8_block": np.int32(1), "float8": np.int32(2)}
_ACTIVATIONS = {
    name: number
    for number, name in enumerate(
        ("swiglu", "geglu", "clamped_qgeglu", "situ_glu", "silu", "gelu", "relu", "squared_relu"), start=1
    )
}


def quantize(
    x: Float[Array, "*b m k"],
    amax: Float[Array, "..."] | None,
    seed: UInt32[Array, "*b words"] | None,
    group_sizes: Int32[Array, "*b g"] | None,
    q: Quantization,
):
    """-> codes, block_scale, amax of x along q.axis."""
    return _quantize("jax_fp4_quantize", x, (x,), {q.axis: amax}, seed, group_sizes, q, axis=np.int32(q.axis))


def quantize_transpose(
    x: Float[Array, "*b m k"],
    amax: Float[Array, "..."] | None,
    amax_t: Float[Array, "..."] | None,
    seed: UInt32[Array, "*b words"] | None,
    group_sizes: Int32[Array, "*b g"] | None,
    q: Quantization,
):
    """-> codes, block_scale, amax row-wise, then the same column-wise, in one pass over x."""
    return _quantize("jax_fp4_quantize_transpose", x, (x,), {-1: amax, 0: amax_t}, seed, group_sizes, q)


def amax(
    x: Float[Array, "*b m k"], group_sizes: Int32[Array, "*b g"] | None, q: Quantization, axes: tuple[int, ...]
) -> tuple:
    """-> the amax of x along each of the axes, as the quantizers would compute it; hadamard is of axis 0 alone."""
    groups = None if group_sizes is None else group_sizes.shape[-1]

    def of(axis: int):
        rows, _ = stored(x.shape, axis)
        shape = amax_shape(x.shape[:-2], rows, replace(q, axis=axis), groups) if axis in axes else (*x.shape[:-2], 0)
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    names = ("row_scaled", "hadamard", "compute", "grouped")
    attributes = {name: value for name, value in _attributes(q, None, group_sizes).items() if name in names}
    attributes |= {"row": np.bool_(-1 in axes), "column": np.bool_(0 in axes)}
    results, operands = (of(-1), of(0)), (x, _operand(group_sizes, x, jnp.int32))
    scratch = _quantize_scratch(x, q, group_sizes, made=False)

    def on_cuda(*operands):
        return tuple(_call("jax_fp4_amax", (*results, scratch), operands, **attributes)[:-1])

    def on_cpu(*operands):
        return tuple(_call("jax_fp4_amax", results, operands, **attributes))

    row, column = _by_platform(on_cuda, on_cpu)(*operands)
    return tuple(row if axis == -1 else column for axis in axes)


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


def activate(
    h: Float[Array, "*b m h"],
    weights: Float32[Array, "*b m"] | None,
    group_sizes: Int32[Array, "*b g"] | None,
    activation: Activated,
) -> Float[Array, "*b m k"]:
    """-> the activation of h times the rows' weights, as made below; anything in rows of no group. CUDA only."""
    x, q = _activated(h, activation), Quantization(compute_dtype=h.dtype.name)
    attributes = _attributes(q, None, group_sizes) | _activation_attributes(activation, weights)
    operands = h, _operand(weights, x, jnp.float32), _operand(group_sizes, x, jnp.int32)
    results = x, _quantize_scratch(x, q, group_sizes, made=False)
    return _call("jax_fp4_activate", results, operands, **attributes)[0]


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


def dequantize(codes, block_scale, amax, bound: int, extent: Extent, dtype):
    """-> values [*b, r, extent] in the stored orientation; amax None: code times block scale, exact in bfloat16."""
    out = jax.ShapeDtypeStruct((*codes.shape[:-1], extent), dtype)
    operands = codes, block_scale, _operand(amax, codes, jnp.float32)
    attributes = dict(
        bound=np.int32(bound),
        row_scaled=np.bool_(amax is not None and amax.ndim == codes.ndim - 1),
        product_form=np.bool_(amax is None),
    )

    def call(*operands, **more):
        return _call("jax_fp4_dequantize", out, operands, **attributes, **more)

    return _by_platform(partial(call, interleaved=np.bool_(False)), call)(*operands)


def _by_platform(on_cuda, on_cpu):
    """One of two calls that differ in what the handlers of the platforms want."""
    return on_cpu if cuda_missing else choose(on_cuda, on_cpu, usable=lambda _: True)


def dequantize_interleaved(
    codes: UInt8[Array, "m bytes"], block_scale: Float8e4m3fn[Array, "m blocks"]
) -> BFloat16[Array, "m c"]:
    """-> code times block scale, each 64 in the order of gemm_decode.cuh, zeros up to a multiple of 64. CUDA only."""
    out = jax.ShapeDtypeStruct((codes.shape[0], padded(PACK * codes.shape[1], INTERLEAVE)), jnp.bfloat16)
    form = dict(row_scaled=np.bool_(False), product_form=np.bool_(True), interleaved=np.bool_(True))
    return _call(
        "jax_fp4_dequantize",
        out,
        (codes, block_scale, _operand(None, codes, jnp.float32)),
        bound=np.int32(E4M3_MAX),
        **form,
    )


# --- the 8-bit formats: on CUDA without group_sizes, and no dequantize ---


def quantize_float8(
    x: Float[Array, "*b m k"],
    amax: Float32[Array, "..."] | None,
    scale: Float32[Array, "..."] | None,
    group_sizes: Int32[Array, "*b g"] | None,
    q: Float8Quantization,
):
    """-> codes, block_scale, amax (None where every block has its own scale) of x along q.axis."""
    return _quantize_float8("jax_fp4_quantize_float8", x, amax, scale, group_sizes, q, (q.axis,), axis=np.int32(q.axis))


def quantize_transpose_float8(
    x: Float[Array, "*b m k"],
    amax: Float32[Array, "..."] | None,
    scale: Float32[Array, "..."] | None,
    group_sizes: Int32[Array, "*b g"] | None,
    q: Float8Quantization,
):
    """-> the same row-wise, then column-wise, in one pass over x."""
    return _quantize_float8("jax_fp4_quantize_transpose_float8", x, amax, scale, group_sizes, q, (-1, 0))


def _quantize_float8(target: str, x, amax, scale, group_sizes, q: Float8Quantization, axes, **attributes):
    operands = (
        x,
        _operand(amax, x, jnp.float32),
        _operand(scale, x, jnp.float32),
        _operand(group_sizes, x, jnp.int32),
    )
    results = tuple(result for axis in axes for result in _float8_results(x, replace(q, axis=axis), group_sizes))
    attributes |= {
        "scaling": _SCALINGS[q.scaling],
        "codes": np.int32(q.codes == "e5m2"),
        "tile": np.int32(q.tile),
        "compute": np.int32(_COMPUTE[q.compute_dtype]),
        "power_of_two": np.bool_(q.power_of_two),
        "eps": np.float32(q.eps),
        "given_amax": np.bool_(amax is not None),
        "given_scale": np.bool_(scale is not None),
        "grouped": np.bool_(group_sizes is not None),
    }
    arrays = _call(target, results, operands, **attributes)
    absent = q.scaling != "float8"
    return tuple(None if absent and i % 3 == 2 else array for i, array in enumerate(arrays))


def _float8_results(x, q: Float8Quantization, group_sizes):
    batch, (rows, extent) = x.shape[:-2], stored(x.shape, q.axis)
    groups = None if group_sizes is None else group_sizes.shape[-1]
    p = padded(extent, q.block) if groups is None or q.axis == -1 else grouped_extent(extent, groups, q.block)
    matrices = batch if groups is None else (*batch, groups)
    scale_shape, amax_shape = {
        "mxfp8": ((*batch, rows, p // q.block), (*batch, 0)),
        "float8_block": ((*batch, padded(rows, q.tile) // q.tile, p // q.block), (*batch, 0)),
        "float8": (matrices, matrices),
    }[q.scaling]
    return (
        jax.ShapeDtypeStruct((*batch, rows, p), jnp.float8_e5m2 if q.codes == "e5m2" else jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct(scale_shape, jnp.float8_e8m0fnu if q.scaling == "mxfp8" else jnp.float32),
        jax.ShapeDtypeStruct(amax_shape, jnp.float32),
    )


def dequantize_float8(codes, scale, tile: int, extent: Extent, dtype):
    """-> values [*b, r, extent] in the stored orientation."""
    of_blocks = "mxfp8" if scale.dtype == jnp.float8_e8m0fnu else "float8_block"
    scaling = of_blocks if scale.ndim == codes.ndim else "float8"
    out = jax.ShapeDtypeStruct((*codes.shape[:-1], extent), dtype)
    # The rows of an MXFP8 tile each have their scale.
    attributes = dict(scaling=_SCALINGS[scaling], tile=np.int32(tile if scaling == "float8_block" else 1))
    return _call("jax_fp4_dequantize_float8", out, (codes, scale), **attributes)


# --- products: CUDA only, for sm_90a ---
# group_sizes are cut as everywhere; rows beyond their sum are not read, and zero in the result. Extents are not zero.


def grouped_matmul(
    values: BFloat16[Array, "m c"],
    codes: UInt8[Array, "g n bytes"],
    block_scale: Float8e4m3fn[Array, "g n blocks"],
    lhs_factor: Float32[Array, " factors"],
    rhs_factor: Float32[Array, " g"] | Float32[Array, "g n"],
    bias: Float32[Array, "g n"] | None,
    row_weights: Float32[Array, " m"] | None,
    group_sizes: Int32[Array, " g"],
    dtype,
    *,
    lhs_of_rows: bool,
) -> Float[Array, "m n"]:
    """-> acc * lhs_factor * rhs_factor + row_weights * bias: rows of values, as `dequantize_interleaved` gives them,
    times the packed weights of their group. c is a multiple of 64; lhs_factor [m] if lhs_of_rows, else [g]."""
    out = jax.ShapeDtypeStruct((values.shape[0], codes.shape[1]), dtype)
    optional = (_operand(value, values, jnp.float32) for value in (bias, row_weights))
    operands = values, codes, block_scale, lhs_factor, rhs_factor, *optional, group_sizes
    return _product("jax_fp4_grouped_matmul", out, operands, lhs_of_rows=np.bool_(lhs_of_rows))


def grouped_matmul_bf16(
    x: BFloat16[Array, "m k"],
    w: BFloat16[Array, "g i j"],
    bias: Float32[Array, "g n"] | None,
    row_weights: Float32[Array, " m"] | None,
    group_sizes: Int32[Array, " g"],
    dtype,
    *,
    transposed: bool,
) -> Float[Array, "m n"]:
    """-> x w + row_weights * bias for the rows of each group, w [g, k, n] or, transposed, [g, n, k]. k and the last
    axis of w are multiples of 8."""
    out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1 if transposed else 2]), dtype)
    operands = x, w, *(_operand(value, x, jnp.float32) for value in (bias, row_weights)), group_sizes
    return _product("jax_fp4_grouped_matmul_bf16", out, operands, transposed=np.bool_(transposed))


def grouped_contraction(
    lhs: BFloat16[Array, "..."],
    rhs: BFloat16[Array, "..."],
    lhs_factor: Float32[Array, " g"] | Float32[Array, "g k"] | None,
    rhs_factor: Float32[Array, " g"] | Float32[Array, "g n"] | None,
    group_sizes: Int32[Array, " g"],
    m: int,
    dtype,
    *,
    rows_last: bool,
    parts: int = 1,
) -> Float[Array, "g k n"] | Float[Array, "parts g p n"]:
    """-> acc * lhs_factor * rhs_factor, acc of each group the transpose of its rows of lhs [m, k] times its rows of rhs
    [m, n], both multiples of 8. rows_last: lhs [k, P] and rhs [n, P] stored column-wise, padding and all. Sizes are cut
    at m. parts: of k, each a multiple of PART_ROWS; those of all groups lie together."""
    rows = 0 if rows_last else 1
    shape = (group_sizes.shape[0], lhs.shape[rows] // parts, rhs.shape[rows])
    out = jax.ShapeDtypeStruct((parts, *shape) if parts > 1 else shape, dtype)
    factors = (_operand(factor, lhs, jnp.float32) for factor in (lhs_factor, rhs_factor))
    operands = lhs, rhs, *factors, group_sizes
    attributes = dict(rows_last=np.bool_(rows_last), m=np.int64(m), parts=np.int64(parts))
    return _product("jax_fp4_grouped_contraction", out, operands, **attributes)


def _product(target: str, out, operands, **attributes):
    # One call takes one set of sizes, and has no batch.
    results = out, _scratch(COUNTER)
    return jax.ffi.ffi_call(target, results, vmap_method="sequential")(*operands, **attributes)[0]


# CUDA handlers get their scratch as a result that nobody reads: it is XLA's like any other buffer, also while a CUDA
# graph replays the call. They check that it is enough.
COUNTER = 16  # bytes of what thread blocks count in
PART_ROWS = 256  # a part of a contraction's result has whole multiples: kPartRows of grouped_gemm.h


def _scratch(size: Extent) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size,), jnp.uint8)


def _quantize_scratch(x, q: Quantization, group_sizes, made: bool) -> jax.ShapeDtypeStruct:
    """As `lay_out_scratch` of quantize_transpose.cu counts: the counter, what an activation makes, tables of groups."""
    *batch, m, k = x.shape
    entries, size = math.prod(batch), COUNTER
    if made:
        size += padded(entries * m * k * np.dtype(q.compute_dtype).itemsize)
    if group_sizes is not None:
        groups = group_sizes.shape[-1]
        size += entries * (48 * (grouped_extent(m, groups) // BLOCK) + 4 * (3 * groups + 1))
    return _scratch(size)


def _call(target: str, results, operands, **attributes):
    # broadcast_all: under vmap every operand gains the same leading dimension, which the handlers count as batch.
    return jax.ffi.ffi_call(target, results, vmap_method="broadcast_all")(*operands, **attributes)


def _quantize(target: str, x, operands, amaxes: dict, seed, group_sizes, q: Quantization, **attributes):
    """x, or its shape and dtype, in one form for each axis that `amaxes` has; None there is computed."""
    given = next(iter(amaxes.values()))
    results = tuple(result for axis in amaxes for result in _results(x, q, axis, group_sizes))
    operands = (
        *operands,
        *(_operand(amax, x, jnp.float32) for amax in amaxes.values()),
        _operand(seed, x, jnp.uint32),
        _operand(group_sizes, x, jnp.int32),
    )
    attributes |= _attributes(q, given, group_sizes)
    made = "activation" in attributes
    scratch = _quantize_scratch(x, q, group_sizes, made)

    def on_cuda(*operands):
        return tuple(_call(target, (*results, scratch), operands, **attributes)[:-1])

    def on_cpu(*operands):
        return tuple(_call(target, results, operands, **attributes))

    if made:
        return on_cuda(*operands)
    return _by_platform(on_cuda, on_cpu)(*operands)


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


isa = _cpu.isa
