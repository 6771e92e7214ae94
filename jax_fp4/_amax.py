"""The amax of a tensor of which a device has a part: of its own part, then the largest over the mesh axes that cut it.

A quantizer computes the amax of what is whole by itself.
"""

import functools
from dataclasses import replace
from functools import partial
from typing import Any

from jax_fp4 import _ffi, reference
from jax_fp4._formats import Quantization
from jax_fp4._lowering import Implementation, native_or_reference
from jax_fp4._placement import Axes, Part, largest

Stored = tuple[int, ...]  # the axes of stored forms, -1 or 0


def amaxes_of_whole(
    op: str, x: Any, group_sizes: Any, part: Part, batch_dims: int, q: Quantization, axes: Stored,
    implementation: Implementation, strict: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Of each stored form the amax that the tensor has of which x is a part, in the shape that kernels take. All None
    where x is all that they are of: the quantizer then computes them. x: [*b, m, k]."""
    over = [_axes_of_amax(part, batch_dims, q, axis) for axis in axes]
    if not any(over):
        return (None,) * len(axes)
    alike = not (q.hadamard or q.row_scaled)  # one maximum for all forms
    wanted = (-1,) if alike else axes
    found = _local_amaxes(op, implementation, strict, replace(q, axis=-1), wanted)(x, group_sizes)
    whole = tuple(largest(amax, of_one) for amax, of_one in zip(found, over, strict=False))
    return whole * len(axes) if alike else whole


def _axes_of_amax(part: Part, batch_dims: int, q: Quantization, axis: int) -> Axes:
    """The mesh axes over whose devices the maximum of a stored form, or of each of its rows, is spread."""
    if not q.row_scaled:
        return part.axes(batch_dims)
    if axis == -1:
        return part.dims[-1] if part.dims else ()
    return tuple(name for of_dim in part.dims[batch_dims:-1] for name in of_dim)


@functools.cache
def _local_amaxes(op: str, implementation: Implementation, strict: bool, q: Quantization, axes: Stored):
    native, specification = (partial(function, q=q, axes=axes) for function in (_ffi.amax, _specified))
    return native_or_reference(op, native, specification, implementation, strict, _ffi.no_cuda())


def _specified(x, group_sizes, q: Quantization, axes: Stored) -> tuple:
    each = (replace(q, axis=axis, hadamard=q.hadamard and axis == 0) for axis in axes)
    return tuple(reference.amax(x, group_sizes, one) for one in each)
