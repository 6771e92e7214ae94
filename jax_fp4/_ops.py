"""quantize, quantize_transpose, dequantize, matmul: check the arguments, choose an implementation, call it."""

import functools
import math
from functools import partial
from typing import Literal, assert_never

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_fp4 import _ffi, _record, reference
from jax_fp4._arguments import (
    IMPLEMENTATIONS,
    Implementation,
    Tensor,
    check_operand,
    check_quantized,
    float_dtype,
    given_amax,
    quantization,
    seed_words,
)
from jax_fp4._array import QuantizedTensor
from jax_fp4._errors import Support, UnsupportedError, is_strict, message
from jax_fp4._formats import BLOCK, PACK, Quantization, padded, stored
from jax_fp4._recipe import FourOverSix, check_choice

OPS = ("quantize", "quantize_transpose", "dequantize", "matmul", "dense")


def quantize(
    x,
    format: str = "nvfp4",
    *,
    axis: Literal[-1, 0] = -1,
    block: tuple[int, int] = (1, 16),
    row_scaled: bool = False,
    hadamard: bool = False,
    key=None,
    four_over_six: FourOverSix | None = None,
    amax=None,
    batch_dims: int = 0,
    dtype=None,
    implementation: Implementation = None,
) -> QuantizedTensor:
    """Quantize x [..., k] to NVFP4 along one axis.

    axis: -1, blocks along k; 0, "column-wise": blocks along m of x [*batch, m, k], equal to quantizing the transpose.
    block: (1, 16), or (16, 16) for weights: one scale for a tile.
    row_scaled: an amax for each stored row. hadamard (axis=0 only): transform groups of 16 rows first.
    key: a JAX key; rounds stochastically. None rounds to nearest, ties to even.
    four_over_six: a FourOverSix, each block then maps its maximum to 4 or 6. Under row_scaled the column-wise form is
        made without it.
    amax: given absolute maximum, float32 [] (or the batch shape; one for each stored row under row_scaled). Values
        beyond it saturate. None computes it. A negative one is refused; where it is traced, by the CPU handler when it
        runs, and by the reference not at all.
    batch_dims: so many leading dimensions index tensors of their own. The other leading dimensions count as rows.
    dtype: round x to this type first (a float32 master weight under bfloat16 compute); default x.dtype.
    implementation: None chooses when the program is lowered (the CPU handler, the reference elsewhere). A named one
        runs or raises. "reference" on a NumPy array runs the specification in NumPy.

    A zero block is exactly zero; a block that holds a non-finite element decodes to NaN and leaves others alone. A
    blocked extent that is no multiple of 16 is rounded up with zeros. Not differentiable. Raises TypeError, ValueError
    or UnsupportedError for what is not described here.
    """
    op = "quantize"
    q = quantization(op, x, format, axis, block, row_scaled, hadamard, key, four_over_six, dtype)
    if hadamard and axis == -1:
        raise ValueError(
            message(
                op,
                "hadamard",
                "True with axis=-1",
                "axis=0",
                "the transform mixes 16 rows, and only the operands of the weight gradient are blocked along rows",
                "axis=0, or quantize_transpose",
            )
        )
    tensor = Tensor.of(op, x, batch_dims, implementation)
    given = given_amax(op, "amax", amax, tensor, q, axis)
    run = _choose(op, implementation, q=q)
    _note(op, tensor, q, (axis,), implementation)
    result = run(tensor.x, given, seed_words(op, key, tensor))
    return tensor.pack(result, q, axis)


def quantize_transpose(
    x,
    format: str = "nvfp4",
    *,
    block: tuple[int, int] = (1, 16),
    row_scaled: bool = False,
    hadamard: bool = False,
    key=None,
    four_over_six: FourOverSix | None = None,
    amax=None,
    batch_dims: int = 0,
    dtype=None,
    implementation: Implementation = None,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Quantize x [..., k] along both axes in one pass: (row-wise, column-wise), as `quantize` with axis -1 and 0.

    hadamard applies to the second only. amax: one for both, or a pair (row-wise, column-wise), which hadamard and
    row_scaled need because their two maxima differ. The rest as in `quantize`.
    """
    op = "quantize_transpose"
    q = quantization(op, x, format, -1, block, row_scaled, hadamard, key, four_over_six, dtype)
    tensor = Tensor.of(op, x, batch_dims, implementation)
    row, column = _amax_pair(op, amax, q)
    given = given_amax(op, "amax[0]", row, tensor, q, -1), given_amax(op, "amax[1]", column, tensor, q, 0)
    run = _choose(op, implementation, q=q)
    _note(op, tensor, q, (-1, 0), implementation)
    result = run(tensor.x, *given, seed_words(op, key, tensor))
    return tensor.pack(result[:3], q, -1), tensor.pack(result[3:], q, 0)


def _amax_pair(op: str, amax, q: Quantization):
    """The given amaxes of the two forms, one for both where they have the same maximum."""
    if amax is None:
        return None, None
    if isinstance(amax, tuple) and len(amax) == 2 and all(a is not None for a in amax):
        return amax
    if isinstance(amax, tuple) or q.hadamard or q.row_scaled:
        shown = f"a tuple {amax}" if isinstance(amax, tuple) else "one array"
        why = "the two forms have different maxima under hadamard and row_scaled"
        fix = "amax=(row_amax, column_amax)"
        raise ValueError(message(op, "amax", shown, "a pair (row-wise, column-wise) of arrays", why, fix))
    return amax, amax


def dequantize(q: QuantizedTensor, dtype=None, *, implementation: Implementation = None):
    """The values of q, an array of q.shape: code x block scale x tensor scale, one rounding to `dtype` (q.dtype).

    Raises ValueError for a tensor that was Hadamard-transformed: its values are not those of the tensor it came from.
    Not differentiable.
    """
    op = "dequantize"
    check_quantized(op, "q", q)
    dtype = q.dtype if dtype is None else float_dtype(op, "dtype", dtype, "these hold the values")
    if q.hadamard:
        raise ValueError(
            message(
                op,
                "q.hadamard",
                True,
                "an untransformed tensor",
                "the transform cancels only in a product of two transformed operands",
                "matmul of both, or quantize without hadamard",
            )
        )
    return _logical(q, decode(q, dtype, q.extent, implementation))


def decode(q: QuantizedTensor, dtype, extent: int, implementation: Implementation = None, product_form: bool = False):
    """Values of q in its stored orientation, [..., r, extent]. Product form leaves the tensor scale out."""
    codes, block_scale, amax = _stored_matrices(q)
    run = _choose("dequantize", implementation, bound=q.bound, extent=extent, dtype=np.dtype(dtype))
    values = run(codes, block_scale, None if product_form else amax)
    return values.reshape(*q.codes.shape[:-1], extent)


def matmul(lhs, rhs, *, preferred_element_type=None):
    """lhs [..., m, k] @ rhs [k, n] (or batched alike, [..., k, n]), accumulated in float32.

    Each operand is a QuantizedTensor blocked along k (lhs axis=-1, rhs axis=0) or an array. Of two quantized operands
    the exact products of codes and block scales are summed and the tensor scales multiply afterwards; a quantized
    operand beside an array is dequantized to the array's dtype. The result has `preferred_element_type`, by default
    the promoted dtype of the operands. dx = matmul(dy, w.mT), dw = matmul(x.mT, dy).

    Raises ValueError where the contracted extents differ, an operand is blocked along another axis, a format is not
    known, or one operand alone is Hadamard-transformed. Not differentiable in quantized operands.
    """
    op = "matmul"
    for name, operand, axis in (("lhs", lhs, -1), ("rhs", rhs, 0)):
        check_operand(op, name, operand, axis)
    if lhs.shape[-1] != rhs.shape[-2]:
        why = f"lhs {lhs.shape} is contracted along its last axis"
        fix = "operands whose contracted extents are equal (dw = matmul(x.mT, dy), dx = matmul(dy, w.mT))"
        raise ValueError(message(op, "rhs", f"of shape {rhs.shape}", f"{lhs.shape[-1]} rows", why, fix))
    if rhs.ndim > 2 and rhs.shape[:-2] != lhs.shape[:-2]:
        raise ValueError(
            message(
                op,
                "rhs",
                f"of shape {rhs.shape}",
                f"two axes or the leading axes {lhs.shape[:-2]}",
                "batches pair up",
                "jax.vmap",
            )
        )
    out = jnp.promote_types(lhs.dtype, rhs.dtype)
    if preferred_element_type is not None:
        out = float_dtype(op, "preferred_element_type", preferred_element_type, "a float32 sum is rounded to it")
    return product(lhs, rhs, out)


def product(lhs, rhs, dtype, bias=None):
    """`matmul` without its checks, with a bias [n] added in float32 before the cast to `dtype`."""
    transformed = [isinstance(operand, QuantizedTensor) and operand.hadamard for operand in (lhs, rhs)]
    if transformed[0] != transformed[1]:
        shown = f"{transformed[0]} of lhs and {transformed[1]} of rhs"
        why, fix = (
            "the transform cancels only between two transformed operands",
            "quantize both with the same hadamard=",
        )
        raise ValueError(message("matmul", "hadamard", shown, "both or neither", why, fix))
    batch = rhs.ndim - 2
    if isinstance(lhs, QuantizedTensor) and isinstance(rhs, QuantizedTensor):
        # val x scale has at most 6 significant bits: exact in bfloat16, and a product of two is exact in float32. The
        # padding is multiplied too: it is zero, or after a transform belongs to the data.
        length = PACK * lhs.codes.shape[-1]
        a, b = (decode(q, jnp.bfloat16, length, product_form=True) for q in (lhs, rhs))
        column, row = (reference.tensor_factor(q.amax, q.codes.ndim, q.bound) for q in (lhs, rhs))
        acc = _dot(a, b, batch, rhs_contracts=-1)
        with jax.numpy_rank_promotion("allow"):
            return reference.epilogue(acc, column, jnp.swapaxes(row, -1, -2), dtype, bias)
    compute = lhs.dtype if isinstance(rhs, QuantizedTensor) else rhs.dtype
    a = dequantize(lhs, compute) if isinstance(lhs, QuantizedTensor) else lhs
    # In its stored orientation, so that no transpose of a weight is written.
    b = decode(rhs, compute, rhs.extent) if isinstance(rhs, QuantizedTensor) else rhs
    acc = _dot(a, b, batch, rhs_contracts=-1 if isinstance(rhs, QuantizedTensor) else -2)
    return (acc if bias is None else acc + along_last(bias.astype(jnp.float32), acc.ndim)).astype(dtype)


def along_last(bias: Float[Array, " n"], ndim: int):
    """bias [1, ..., 1, n]: rank promotion may be forbidden."""
    return bias.reshape((1,) * (ndim - 1) + bias.shape)


def supported(op: str, platform: str) -> Support:
    """Whether `op` has a native implementation on `platform` ("cpu", "cuda", ...); False says what runs instead."""
    check_choice("supported", "op", op, OPS, "these are the operations")
    if platform == "cpu":
        return Support(True, f"native handlers, {_ffi.isa()}" + (" with XLA's dot" if op in OPS[3:] else ""))
    return Support(
        False, f"no kernel for {platform} in this version: the traceable reference runs, strict() refuses it"
    )


# --- choosing and calling ---


def _choose(op: str, implementation: Implementation, **static):
    check_choice(op, "implementation", implementation, IMPLEMENTATIONS, "these implementations exist")
    return _implementation(op, implementation, is_strict(), **static)


@functools.cache
def _implementation(op: str, implementation: Implementation, strict: bool, **static):
    """The function that runs: chosen when the program is lowered, or the named one.

    Cached, so that eager calls find their compiled program and the reference is traced once for each shape. inline:
    in a traced program there is no call around it, only the custom call.
    """
    native, specification = (partial(function, **static) for function in _FUNCTIONS[op])

    def fallback(*arguments):
        with jax.numpy_rank_promotion("allow"):  # the specification broadcasts as NumPy does, whatever the user forbids
            return specification(*arguments)

    match implementation:
        case "reference":
            compiled = jax.jit(_undifferentiable(op, fallback), inline=True)
            return lambda x, *rest: (fallback if isinstance(x, np.ndarray) else compiled)(x, *rest)
        case "cuda":
            raise UnsupportedError(
                message(op, "implementation", "'cuda'", "a CUDA build", "this version has CPU handlers only", "None")
            )
        case "cpu":
            why = "the handler named by implementation='cpu' runs on CPU only"
            otherwise = _ffi.refuse(native, message(op, "platform", "{platform}", "cpu", why, "implementation=None"))
        case None if strict:
            why, fix = "no kernel exists for it and strict() forbids the reference", "implementation='reference'"
            otherwise = _ffi.refuse(native, message(op, "platform", "{platform}", "cpu", why, fix))
        case None:
            otherwise = fallback
        case _:
            assert_never(implementation)
    choose = partial(jax.lax.platform_dependent, cpu=native, default=otherwise)
    return jax.jit(_undifferentiable(op, choose), inline=True)


# One name for an op everywhere: the handler's wrapper and the specification.
_FUNCTIONS = {
    "quantize": (_ffi.quantize, reference.quantize),
    "quantize_transpose": (_ffi.quantize_transpose, reference.quantize_transpose),
    "dequantize": (_ffi.dequantize, reference.dequantize),
}


def _undifferentiable(op: str, function):
    """`function`, raising where it would be differentiated: through packed bytes every gradient is zero."""
    guarded = jax.custom_jvp(function)
    operand = "q (or a quantized kernel)" if op == "dequantize" else "x"

    @guarded.defjvp
    def _(*_):
        raise UnsupportedError(
            message(
                op,
                operand,
                "differentiated",
                "a constant",
                "packed codes carry no gradient, and zeros would go unnoticed",
                "jax_fp4.dense, or jax.lax.stop_gradient of it",
            )
        )

    return guarded


def _note(op: str, tensor: Tensor, q: Quantization, axes: tuple[int, ...], implementation: Implementation) -> None:
    """Record the call; under strict() refuse what it pads."""
    padding = 0
    for axis in axes:
        rows, extent = stored(tensor.x.shape, axis)
        padding += math.prod(tensor.batch) * rows * (padded(extent) - extent)
        if extent % BLOCK and is_strict():
            refuse_padding(op, "x", f"extent {extent} along axis {axis}")
        if q.tile > 1 and rows % q.tile and is_strict():
            refuse_padding(op, "x", f"{rows} rows under a tile of {q.tile}")
    _record.record(
        _record.CallEvent(_record.path(), op, tensor.x.shape, implementation or "chosen at lowering", padding)
    )


def refuse_padding(op: str, name: str, shown: str) -> None:
    raise UnsupportedError(
        message(
            op,
            name,
            f"of {shown}",
            f"a multiple of {BLOCK}",
            "strict() forbids padding",
            "another size, or no strict()",
        )
    )


def _stored_matrices(q: QuantizedTensor):
    """Codes, scales and amax as the kernels take them, [*batch, r, ...] with the batch that amax has."""
    batch = () if q.row_scaled or q.codes.ndim == 1 else q.amax.shape
    rows = math.prod(q.codes.shape[len(batch) : -1])
    codes = q.codes.reshape(*batch, rows, q.codes.shape[-1])
    block_scale = q.block_scale.reshape(*batch, rows, q.block_scale.shape[-1])
    return codes, block_scale, q.amax.reshape(rows) if q.row_scaled else q.amax


def _logical(q: QuantizedTensor, values):
    return jnp.swapaxes(values, -1, -2) if q.axis == 0 else values


def _dot(a, b, batch: int, rhs_contracts: int):
    contract, batches = ((a.ndim - 1,), (b.ndim + rhs_contracts,)), (tuple(range(batch)), tuple(range(batch)))
    return jax.lax.dot_general(a, b, (contract, batches), preferred_element_type=jnp.float32)
