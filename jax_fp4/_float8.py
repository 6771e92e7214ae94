"""quantize, quantize_transpose and dequantize of the 8-bit formats: check the arguments, choose an implementation, call
it.

On CUDA there are kernels for quantize and quantize_transpose of what has no group_sizes. Groups are quantized by the
specification as XLA's code, and codes are decoded by it everywhere there: it is elementwise, and becomes part of what
reads the values.
"""

import functools
import math
from dataclasses import replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_fp4 import _ffi, _groups, _record, reference_fp8
from jax_fp4._arguments import Tensor, compute_dtype, refuse_borders, refuse_padding
from jax_fp4._array import QuantizedTensor, scaling
from jax_fp4._errors import is_strict, message
from jax_fp4._formats import (
    FLOAT8_BLOCKS,
    FLOAT8_FORMATS,
    TILES_EXCLUDE_GROUPS,
    Float8Quantization,
    Quantization,
    grouped_extent,
    padded,
    stored,
)
from jax_fp4._lowering import IMPLEMENTATIONS, Implementation, local, native_or_reference, undifferentiable
from jax_fp4._partition import partitioned
from jax_fp4._partition_rules import Layout, decode_rule, quantize_rule
from jax_fp4._placement import WHOLE, Part, Specs, largest
from jax_fp4._recipe import check_choice, check_eps

Axes = tuple[Literal[-1, 0], ...]


def quantize(
    op: str, x, format: str, axes: Axes, block, *, only_nvfp4: dict, power_of_two, eps, amax, scale, group_sizes,
    batch_dims, dtype, specs: Specs | Part | None, implementation: Implementation,
) -> tuple[QuantizedTensor, ...]:  # fmt: skip
    """x in an 8-bit format along each of the axes, an independent quantization of x each.

    only_nvfp4: the flags that this format does not have, by name; any that is set is an error.
    """
    _refuse_foreign(op, format, only_nvfp4)
    q = _quantization(op, x, format, block, power_of_two, eps, amax, scale, group_sizes, dtype)
    tensor = Tensor.of(op, x, batch_dims, group_sizes, implementation, specs)
    if isinstance(specs, Specs):
        refuse_borders(op, tensor, axes, q.block, q.tile)
    given = [
        _per_tensor(op, name, value, tensor, positive=name == "scale")
        for name, value in (("amax", amax), ("scale", scale))
    ]
    check_choice(op, "implementation", implementation, IMPLEMENTATIONS, "these implementations exist")
    if q.scaling == "float8" and amax is None and scale is None:
        given[0] = _amax_of_whole(op, tensor, q, implementation, is_strict())
    _note(op, tensor, q, axes, implementation)
    if tensor.is_split_by_xla:
        result = _split(op, format, implementation, is_strict(), q, axes, batch_dims)(tensor.array, *given)
    else:
        result = _called(op, format, implementation, is_strict(), tensor, q, axes, *given)
    packed = partial(_packed, tensor=tensor, format=format)
    return tuple(packed(result[3 * i : 3 * i + 3], q=replace(q, axis=axis)) for i, axis in enumerate(axes))


def _amax_of_whole(op: str, tensor: Tensor, q: Float8Quantization, implementation: Implementation, strict: bool):
    return tensor.amaxes(op, Quantization(compute_dtype=q.compute_dtype), (-1,), (None,), implementation, strict)[0]


@functools.cache
def _split(
    op: str,
    format: str,
    implementation: Implementation,
    strict: bool,
    q: Float8Quantization,
    axes: Axes,
    batch_dims: int,
):
    """x, amax, scale -> codes, scales and amax along each of the axes, partitioned by XLA."""
    of_tiles = q.tile > 1 and q.scaling == "float8_block"

    def of_part(part: Part):
        def function(x, amax, scale):
            tensor = Tensor.of(op, x, batch_dims, None, implementation, part)
            if q.scaling == "float8" and amax is None and scale is None:
                amax = _amax_of_whole(op, tensor, q, implementation, strict)
            arrays = list(_called(op, format, implementation, strict, tensor, q, axes, amax, scale))
            layout = Layout.of(x.shape, batch_dims, axes, q.block, q.tile)
            for i, axis in enumerate(axes):
                kept = axis == 0 and layout.unflattened
                shape = tensor.rows(axis) + (tensor.leading[batch_dims:-1] if kept else ())
                for j in (3 * i, 3 * i + 1)[: 1 if q.scaling == "float8" or of_tiles else 2]:
                    count = math.prod(tensor.leading[batch_dims:-1]) if kept else 1
                    arrays[j] = arrays[j].reshape(*shape, arrays[j].shape[-1] // count)
            return tuple(arrays)

        return function

    def split(x, amax, scale):
        layout = Layout.of(x.shape, batch_dims, axes, q.block, q.tile)
        per_tensor, results = q.scaling == "float8", []
        for axis in axes:
            scales = layout.batch if per_tensor else layout.of_tiles(axis) if of_tiles else layout.stored(axis)
            results += [layout.stored(axis), scales, *([layout.batch] if per_tensor else [])]
        more = [layout.batch for value in (amax, scale) if value is not None]
        return partitioned(of_part(WHOLE), quantize_rule(layout, tuple(more), tuple(results), of_part))(x, amax, scale)

    return jax.jit(undifferentiable(op, split), inline=True)


def _called(
    op: str, format: str, implementation, strict: bool, tensor: Tensor, q: Float8Quantization, axes, amax, scale
):
    grouped = tensor.group_sizes is not None
    run = _implementation(op, format, implementation, strict, grouped, q=replace(q, axis=axes[0]))
    result = list(run(tensor.x, amax, scale, tensor.group_sizes))
    if scale is not None:  # which is given, so that amax is the kernel's
        result[2::3] = (largest(of_part, tensor.part.axes(tensor.batch_dims)) for of_part in result[2::3])
    return tuple(result)


def dequantize(q: QuantizedTensor, dtype: np.dtype, implementation: Implementation):
    """The values of q, an array of q.shape: code times scale, one rounding to dtype."""
    if q.grouped == "blocks":
        values = _decoded_grouped_blocks(q, dtype, implementation)
        return values if q.axis == 0 else values.swapaxes(-1, -2)
    stored = replace(q, axis=-1, amax=None, inner=0)
    if q.grouped or isinstance(q.codes, np.ndarray):
        values = _decoded_part(stored, q.extent, dtype, implementation)
    else:
        values = _split_decode(stored, dtype, implementation)
    return values.swapaxes(-1, -2) if q.axis == 0 else values


@partial(jax.jit, static_argnames=("dtype", "implementation"), inline=True)
def _split_decode(q: QuantizedTensor, dtype: np.dtype, implementation: Implementation):
    function = partial(_decoded_part, dtype=dtype, implementation=implementation)
    return local(partitioned(partial(function, extent=q.extent), decode_rule(q, q.extent, function)))(q)


def _decoded_part(q: QuantizedTensor, extent: int, dtype: np.dtype, implementation: Implementation):
    codes, scale = _stored_matrices(q)
    return _decoded(q, codes, scale, extent, dtype, implementation).reshape(*q.codes.shape[:-1], extent)


def _decoded(q: QuantizedTensor, codes, scale, extent: int, dtype: np.dtype, implementation: Implementation):
    tile = 1 if q.block is None else q.block[0]
    static = dict(tile=tile, extent=extent, dtype=dtype)
    return _choose("dequantize", q.format, implementation, grouped=bool(q.grouped), **static)(codes, scale)


def _stored_matrices(q: QuantizedTensor):
    """Codes [*batch, r, p] and scales as the specification takes them, with the batch that the scales have."""
    if q.block is None and q.grouped:  # rows, which are tensors of their own here
        k = q.codes.shape[-1]
        codes = q.codes.reshape(math.prod(q.codes.shape[:-1]), 1, k)
        return codes, _groups.of_group(q.block_scale, _groups.group_of_rows(q.group_sizes, codes.shape[0]), 0)
    scale, batch = q.block_scale, ()
    of_tiles = q.block is not None and q.block[0] > 1 and scaling(q) == "float8_block"
    if q.block is None:
        batch = scale.shape
    elif of_tiles:
        batch = scale.shape[:-2]
    rows = math.prod(q.codes.shape[len(batch) : -1])
    if q.block is not None and not of_tiles:
        scale = scale.reshape(rows, scale.shape[-1])
    return q.codes.reshape(*batch, rows, q.codes.shape[-1]), scale


def _decoded_grouped_blocks(q: QuantizedTensor, dtype: np.dtype, implementation: Implementation):
    """The values [m, k] of a tensor whose groups lie along its blocks."""
    if q.block is None:  # there are none: the rows of x are the columns of codes [k, m]
        rows = replace(q, codes=q.codes.swapaxes(-1, -2), axis=-1, extent=q.codes.shape[0], grouped="rows")
        return dequantize(rows, dtype, implementation)
    values = _decoded(q, q.codes, q.block_scale, q.codes.shape[-1], dtype, implementation)
    return _groups.rows_of_columns(values.swapaxes(-1, -2), q.group_sizes, q.extent, q.block[1])


# --- arguments ---


def _refuse_foreign(op: str, format: str, flags: dict) -> None:
    """Errors for what the 8-bit formats do not have."""
    for name, value in flags.items():
        if value is not None and value is not False:
            why, shown = "only NVFP4 has it", f"given beside format='{format}'"
            raise ValueError(message(op, name, shown, "format='nvfp4'", why, f"a call without {name}"))


def _quantization(
    op: str, x, format: str, block, power_of_two, eps, amax, scale, group_sizes, dtype
) -> Float8Quantization:
    """Every flag of the call, checked one by one and in pairs. The axis is set later."""
    scaling, codes = FLOAT8_FORMATS[format]
    length = FLOAT8_BLOCKS.get(scaling)
    blocks = (None,) if length is None else (None, (1, length), (length, length))
    check_choice(op, "block", block, blocks, f"these share a scale in {format}, and None is the first of them")
    check_choice(op, "power_of_two", power_of_two, (None, False, True), "it is a switch, None the format's default")
    check_eps(op, eps)
    if scaling == "mxfp8" and (power_of_two is not None or eps):
        name, shown = ("eps", eps) if power_of_two is None else ("power_of_two", power_of_two)
        why = "E8M0 scales are powers of two, and follow from the block alone"
        raise ValueError(message(op, name, f"{shown} with format='{format}'", "a float32 scale", why, f"no {name}"))
    if scaling != "float8" and not (amax is None and scale is None):
        name = "scale" if amax is None else "amax"
        why = "here every block has its own scale"
        raise ValueError(message(op, name, f"given beside format='{format}'", "one scale a tensor", why, "'float8'"))
    if scale is not None and not (amax is None and power_of_two is None and not eps):
        why = "amax, power_of_two and eps make the scale that is given here"
        raise ValueError(message(op, "scale", "together with one of them", "neither of the three", why, "scale=None"))
    if group_sizes is not None and block is not None and block[0] > 1:
        shown, fix = "together with group_sizes", "a call without group_sizes"
        raise ValueError(message(op, f"block={block}", shown, "one of the two", TILES_EXCLUDE_GROUPS, fix))
    return Float8Quantization(
        scaling=scaling,
        codes=codes,
        tile=1 if block is None else block[0],
        power_of_two=scaling == "float8_block" if power_of_two is None else power_of_two,
        eps=float(eps),
        compute_dtype=compute_dtype(op, x, dtype),
    )


def _per_tensor(op: str, name: str, value, tensor: Tensor, *, positive: bool):
    """A given amax or scale: float32, one for the tensor, each batch entry or each group; checked where its values are
    known."""
    if value is None:
        return None
    if isinstance(value, float | int) and not isinstance(value, bool):
        value = np.float32(value)
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    need = tensor.batch if tensor.groups is None else (tensor.groups,)
    if dtype != np.float32 or shape != need:
        shown = f"{dtype} {shape}" if dtype is not None else f"a {type(value).__name__}"
        why = "there is one for the tensor, or for each batch entry or group"
        raise ValueError(message(op, name, shown, f"float32 {need}", why, f"{name}=None"))
    if not isinstance(value, Tracer):
        known = np.asarray(value)
        if np.any(known < 0) or (positive and not np.all((known > 0) & np.isfinite(known))):
            need, why = (
                ("positive finite values", "x is multiplied by it") if positive else ("values >= 0", "it is |x|")
            )
            raise ValueError(message(op, name, str(known), need, why, f"{name}=None"))
    return (np if isinstance(tensor.array, np.ndarray) else jnp).asarray(value)


# --- calling ---


def _packed(arrays, tensor: Tensor, format: str, q: Float8Quantization) -> QuantizedTensor:
    codes, scale, amax = arrays
    inner, rows, block = tensor.inner(codes, q.axis), tensor.rows(q.axis), FLOAT8_BLOCKS.get(q.scaling)
    by_row = block is not None and (q.tile == 1 or q.scaling == "mxfp8")
    if not inner:
        codes = codes.reshape(*rows, codes.shape[-1])
        scale = scale.reshape(*rows, scale.shape[-1]) if by_row else scale
    packed = QuantizedTensor(
        codes=codes,
        block_scale=scale,
        amax=amax,
        group_sizes=tensor.group_sizes,
        format=format,
        axis=q.axis,
        extent=tensor.leading[-1] if inner else stored(tensor.shape, q.axis)[1],
        inner=inner,
        dtype=jnp.dtype(q.compute_dtype),
        block=None if block is None else (q.tile, block),
        power_of_two=q.power_of_two,
        grouped="" if tensor.group_sizes is None else "rows" if q.axis == -1 else "blocks",
    )
    return packed if tensor.part.unflattened else packed.flattened


def _choose(op: str, format: str, implementation: Implementation, *, grouped: bool, **static):
    check_choice(op, "implementation", implementation, IMPLEMENTATIONS, "these implementations exist")
    return _implementation(op, format, implementation, is_strict(), grouped, **static)


@functools.cache
def _implementation(op: str, format: str, implementation: Implementation, strict: bool, grouped: bool, **static):
    """The function that runs; where CUDA has no kernel, it is the specification, as XLA's code."""
    native, specification = (partial(function, **static) for function in _FUNCTIONS[op])
    return native_or_reference(op, native, specification, implementation, strict, _no_cuda(op, format, grouped))


def _no_cuda(op: str, format: str, grouped: bool) -> tuple[str, str] | None:
    """What implementation="cuda" lacks for the call, and why; None where there is a kernel."""
    if op == "dequantize":
        return "'cpu' or 'reference'", f"{format} is decoded by no CUDA kernel in this version"
    if grouped:
        return "'cpu' or 'reference'", f"{format} with group_sizes has no CUDA kernel in this version"
    return _ffi.no_cuda()


# The handler's wrapper and the specification of each op.
_FUNCTIONS = {
    "quantize": (_ffi.quantize_float8, reference_fp8.quantize),
    "quantize_transpose": (_ffi.quantize_transpose_float8, reference_fp8.quantize_transpose),
    "dequantize": (_ffi.dequantize_float8, reference_fp8.dequantize),
}


def _note(op: str, tensor: Tensor, q: Float8Quantization, axes: Axes, implementation: Implementation) -> None:
    """Record the call and the zeros that round its blocked extents up; under strict() refuse those that are known."""
    padding = 0
    for axis in axes:
        rows, extent = stored(tensor.shape, axis)
        by_group = axis == 0 and tensor.groups is not None
        blocks = grouped_extent(extent, tensor.groups or 0, q.block) if by_group else padded(extent, q.block)
        padding += math.prod(tensor.batch) * rows * (blocks - extent)
        if extent % q.block and is_strict() and not by_group:
            refuse_padding(op, "x", f"extent {extent} along axis {axis}", q.block)
        if rows % q.tile and is_strict():
            refuse_padding(op, "x", f"{rows} rows under a tile of {q.tile}", q.tile)
    _record.record(_record.CallEvent(_record.path(), op, tensor.shape, implementation or "chosen at lowering", padding))
