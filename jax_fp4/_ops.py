"""quantize, quantize_transpose, dequantize: check the arguments, choose an implementation, call it."""

import functools
import math
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_fp4 import _ffi, _float8, _groups, _record, reference
from jax_fp4._arguments import (
    Tensor,
    check_quantized,
    float_dtype,
    given_amax,
    key_words,
    quantization,
    refuse_borders,
    refuse_float8,
    refuse_padding,
    seed_words,
)
from jax_fp4._array import QuantizedTensor
from jax_fp4._errors import Support, is_strict, message
from jax_fp4._formats import BLOCK, FLOAT8_FORMATS, PACK, Quantization, grouped_extent, padded, stored
from jax_fp4._lowering import (
    IMPLEMENTATIONS,
    Implementation,
    choose,
    is_partitioned,
    local,
    native_or_reference,
    undifferentiable,
)
from jax_fp4._partition import partitioned
from jax_fp4._partition_rules import Layout, decode_rule, quantize_rule
from jax_fp4._placement import WHOLE, Part, Specs
from jax_fp4._recipe import FourOverSix, check_choice

NATIVE = ("quantize", "quantize_transpose", "dequantize")
OPS = (
    *NATIVE,
    "matmul",
    "grouped_matmul",
    "dense",
    "grouped_dense",
    "grouped_mlp",
    "layernorm_dense",
    "layernorm_mlp",
)


@jax.named_scope("fp4.quantize")
def quantize(
    x,
    format: str = "nvfp4",
    *,
    axis: Literal[-1, 0] = -1,
    block: tuple[int, int] | None = None,
    row_scaled: bool = False,
    hadamard: bool = False,
    key=None,
    four_over_six: FourOverSix | None = None,
    amax=None,
    group_sizes=None,
    batch_dims: int = 0,
    dtype=None,
    power_of_two: bool | None = None,
    eps: float = 0.0,
    scale=None,
    specs: Specs | Part | None = None,
    implementation: Implementation = None,
) -> QuantizedTensor:
    """Quantize x [..., k] along one axis, to NVFP4 or an 8-bit format.

    axis: -1, blocks along k; 0, "column-wise": blocks along m of x [*batch, m, k], equal to quantizing the transpose.
    format: "nvfp4"; with E4M3 codes "mxfp8", "float8_block" (a float32 scale a block) or "float8" (one for the tensor),
        each with E5M2 codes if "_e5m2" is added. These have handlers for the CPU alone: on CUDA too their specification
        runs, XLA's elementwise code. Of the arguments below only block, group_sizes, batch_dims, dtype and the last
        four concern them, and amax "float8".
    block: what shares a scale: None or (1, 16), or (16, 16) for weights, a tile; 32 for mxfp8, 128 for float8_block.
    row_scaled: an amax for each stored row. hadamard (axis=0 only): transform groups of 16 rows first.
    key: a JAX key; rounds stochastically. None rounds to nearest, ties to even.
    four_over_six: a FourOverSix, each block then maps its maximum to 4 or 6. Under row_scaled the column-wise form is
        made without it.
    amax: given absolute maximum, float32 [] (or the batch shape; [g] with groups; one for each stored row under
        row_scaled). Values beyond it saturate. None computes it. A negative one is refused; where it is traced, by the
        CPU handler when it runs, and by the reference not at all.
    group_sizes: int32 [g], may be traced: the rows of x [m, k] are g tensors one after another, each quantized as if
        alone. A negative size counts as 0, sizes that sum to more than m are cut there; rows beyond the sum are not
        read, and zero. Excludes tiles.
    batch_dims: so many leading dimensions index tensors of their own. The other leading dimensions count as rows.
    dtype: round x to this type first (a float32 master weight under bfloat16 compute); default x.dtype.
    power_of_two, eps: round float32 scales down to powers of two (None: in float8_block); the least amax.
    scale: "float8" only: multiply by this, float32 [] or the batch shape ([g] with groups), as delayed scaling does.
        amax is computed.
    specs: inside shard_map, Specs(x=PartitionSpec(...)) of the global tensor of which x is this device's part: amax is
        that tensor's, draws go by position in it, and a border inside a block is refused. None: x is a tensor.
    implementation: None chooses when the program is lowered (the CPU handler, the reference elsewhere). A named one
        runs or raises. "reference" on a NumPy array runs the specification in NumPy.

    A zero block is exactly zero; a block that holds a non-finite element decodes to NaN and leaves others alone (8-bit:
    a NaN stays one, in mxfp8 of its block; Inf is the largest code, in mxfp8 Inf). A blocked extent that is no whole
    number of blocks is rounded up with zeros. Not differentiable. Raises TypeError, ValueError
    or UnsupportedError for what is not described here.
    """
    op = "quantize"
    if isinstance(format, str) and format in FLOAT8_FORMATS:
        check_choice(op, "axis", axis, (-1, 0), "blocks run along the last axis, or along the rows before it")
        flags = dict(row_scaled=row_scaled, hadamard=hadamard, key=key, four_over_six=four_over_six)
        return _float8.quantize(
            op, x, format, (axis,), block, only_nvfp4=flags, power_of_two=power_of_two, eps=eps, amax=amax, scale=scale,
            group_sizes=group_sizes, batch_dims=batch_dims, dtype=dtype, specs=specs, implementation=implementation,
        )[0]  # fmt: skip
    refuse_float8(op, power_of_two=power_of_two, eps=eps or None, scale=scale)
    q = quantization(op, x, format, axis, block, row_scaled, hadamard, key, four_over_six, dtype, group_sizes)
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
    tensor = Tensor.of(op, x, batch_dims, group_sizes, implementation, specs)
    if isinstance(specs, Specs):
        refuse_borders(op, tensor, (axis,), BLOCK, q.tile)
    given = (given_amax(op, "amax", amax, tensor, q, axis),)
    given = tensor.amaxes(op, q, (axis,), given, implementation, is_strict())
    _note(op, tensor, q, (axis,), implementation)
    return tensor.pack(_quantized(op, tensor, q, (axis,), given, key, implementation), q, axis)


@jax.named_scope("fp4.quantize_transpose")
def quantize_transpose(
    x,
    format: str = "nvfp4",
    *,
    block: tuple[int, int] | None = None,
    row_scaled: bool = False,
    hadamard: bool = False,
    key=None,
    four_over_six: FourOverSix | None = None,
    amax=None,
    group_sizes=None,
    batch_dims: int = 0,
    dtype=None,
    power_of_two: bool | None = None,
    eps: float = 0.0,
    scale=None,
    specs: Specs | Part | None = None,
    implementation: Implementation = None,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Quantize x [..., k] along both axes in one pass: (row-wise, column-wise), as `quantize` with axis -1 and 0.

    hadamard applies to the second only. amax: one for both, or a pair (row-wise, column-wise), which hadamard and
    row_scaled need because their two maxima differ. The rest as in `quantize`.
    """
    op = "quantize_transpose"
    if isinstance(format, str) and format in FLOAT8_FORMATS:
        flags = dict(row_scaled=row_scaled, hadamard=hadamard, key=key, four_over_six=four_over_six)
        row, column = _float8.quantize(
            op, x, format, (-1, 0), block, only_nvfp4=flags, power_of_two=power_of_two, eps=eps, amax=amax, scale=scale,
            group_sizes=group_sizes, batch_dims=batch_dims, dtype=dtype, specs=specs, implementation=implementation,
        )  # fmt: skip
        return row, column
    refuse_float8(op, power_of_two=power_of_two, eps=eps or None, scale=scale)
    q = quantization(op, x, format, -1, block, row_scaled, hadamard, key, four_over_six, dtype, group_sizes)
    tensor = Tensor.of(op, x, batch_dims, group_sizes, implementation, specs)
    if isinstance(specs, Specs):
        refuse_borders(op, tensor, (-1, 0), BLOCK, q.tile)
    row, column = _amax_pair(op, amax, q)
    given = given_amax(op, "amax[0]", row, tensor, q, -1), given_amax(op, "amax[1]", column, tensor, q, 0)
    given = tensor.amaxes(op, q, (-1, 0), given, implementation, is_strict())
    _note(op, tensor, q, (-1, 0), implementation)
    result = _quantized(op, tensor, q, (-1, 0), given, key, implementation)
    return tensor.pack(result[:3], q, -1), tensor.pack(result[3:], q, 0)


class Made(NamedTuple):
    """What an operand is made of: activation(h) in float32, times the weight of each row, rounded to h's dtype."""

    h: Float[Array, "m h"]
    weights: Float[Array, " m"] | None
    activation: _ffi.Activated


def quantize_made(
    x: Float[Array, "m k"], made: Made, *, both: bool, hadamard: bool = False, row_scaled, four_over_six, group_sizes
) -> tuple[QuantizedTensor, ...]:
    """(`quantize` of x,), or `quantize_transpose` of x if `both`, where x is what `made` says.

    On CUDA it is made of h in the call, in scratch that ends with it, together with its amax. x, where nothing else
    reads it, is then dead code: XLA never writes it. What is quantized has the bits of x up to the last bits of exp and
    tanh, of which a CUDA program has two. Elsewhere x is quantized.
    """
    op = "quantize_transpose" if both else "quantize"
    q = quantization(
        op, x, "nvfp4", -1, (1, BLOCK), row_scaled, hadamard and both, None, four_over_six, None, group_sizes
    )
    tensor = Tensor.of(op, x, 0, group_sizes, None)
    axes = (-1, 0) if both else (-1,)
    _note(op, tensor, q, axes, None)
    run = _made(op, is_strict(), q, made.activation)
    with jax.named_scope(f"fp4.{op}"):
        result = run(tensor.x, made.h, made.weights, tensor.group_sizes)
    return tuple(tensor.pack(result[3 * i : 3 * i + 3], q, axis) for i, axis in enumerate(axes))


def as_made(x: Float[Array, "*m k"], made: Made, group_sizes) -> Float[Array, "*m k"]:
    """x, on CUDA made of h as the call above makes it: for a part of a tensor, whose amax is found before it is
    quantized. Rows of no group may hold anything."""
    if _ffi.cuda_missing:
        return x

    def on_cuda(x, h, weights, group_sizes):
        weights = None if weights is None else weights.astype(jnp.float32)
        return _ffi.activate(h, weights, group_sizes, made.activation).reshape(x.shape)

    def otherwise(x, *_):
        return x

    usable = lambda context: not is_partitioned(context)  # noqa: E731
    return local(choose(on_cuda, otherwise, usable=usable))(x, made.h, made.weights, group_sizes)


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


@jax.named_scope("fp4.dequantize")
def dequantize(q: QuantizedTensor, dtype=None, *, implementation: Implementation = None):
    """The values of q, an array of q.shape: code x block scale x tensor scale, one rounding to `dtype` (q.dtype).

    Raises ValueError for a tensor that was Hadamard-transformed: its values are not those of the tensor it came from.
    Implementations are chosen as in `quantize`. Not differentiable.
    """
    op = "dequantize"
    check_quantized(op, "q", q)
    dtype = q.dtype if dtype is None else float_dtype(op, "dtype", dtype, "these hold the values")
    if q.format in FLOAT8_FORMATS:
        return _float8.dequantize(q, dtype, implementation)
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
    if q.grouped == "blocks":
        values = _decode_grouped_blocks(q, dtype, implementation)
        return values if q.axis == 0 else jnp.swapaxes(values, -1, -2)
    values = decode(q, dtype, q.extent, implementation)
    return jnp.swapaxes(values, -1, -2) if q.axis == 0 else values


def decode(q: QuantizedTensor, dtype, extent: int, implementation: Implementation = None, product_form: bool = False):
    """Values of q in its stored orientation, [..., r, extent]. Product form leaves the tensor scale out; only in it may
    the groups lie along the blocks."""
    form = replace(q, amax=None) if product_form else q
    decoded = _decoded if q.grouped or isinstance(q.codes, np.ndarray) else _split_decode
    return decoded(form, np.dtype(dtype), extent, implementation)


@partial(jax.jit, static_argnames=("dtype", "extent", "implementation"), inline=True)
def _split_decode(q: QuantizedTensor, dtype, extent: int, implementation: Implementation):
    function = partial(_decoded, dtype=dtype, implementation=implementation)
    return local(partitioned(partial(function, extent=extent), decode_rule(q, extent, function)))(q)


def _decoded(q: QuantizedTensor, dtype, extent: int, implementation: Implementation):
    codes, block_scale, amax = _stored_matrices(q)
    run = _choose("dequantize", implementation, bound=q.bound, extent=extent, dtype=np.dtype(dtype))
    return run(codes, block_scale, amax).reshape(*q.codes.shape[:-1], extent)


def _decode_grouped_blocks(q: QuantizedTensor, dtype, implementation: Implementation):
    """The values [m, k] of a tensor whose groups lie along its blocks: each column of blocks is decoded as a tensor of
    its own, [P/16, k, 16], under the amax of its group."""
    (k, blocks), m = q.block_scale.shape, q.extent
    if blocks == 0:  # no groups, and fewer rows than a block
        return jnp.zeros((m, k), dtype)
    group = _groups.columns(q.group_sizes, m).group
    codes = jnp.swapaxes(q.codes.reshape(k, blocks, BLOCK // PACK), 0, 1)
    run = _choose("dequantize", implementation, bound=q.bound, extent=BLOCK, dtype=np.dtype(dtype))
    values = run(codes, jnp.swapaxes(q.block_scale, 0, 1)[..., None], _groups.of_group(q.amax, group, 0))
    return _groups.rows_of_columns(jnp.swapaxes(values, 1, 2).reshape(blocks * BLOCK, k), q.group_sizes, m)


def supported(op: str, platform: str) -> Support:
    """Whether `op` has a native implementation on `platform` ("cpu", "cuda", ...); False says what runs instead.

    The reason of a product says what multiplies. Its kernels are for Hopper (sm_90a), and all GPUs of the process must
    be; without any, the answer is that for a program lowered here to run on one. Where all are Blackwell's (10.x),
    jax.nn.scaled_matmul multiplies two quantized operands. In programs that XLA partitions its dots remain for groups.
    The reason says "untested" where the process has a GPU of a kind on which nothing here was run: any but Hopper's. ok
    is for NVFP4; on CUDA the reason says what of the 8-bit formats has kernels too: they are quantized so without
    groups.
    """
    check_choice("supported", "op", op, OPS, "these are the operations")
    if platform == "cpu":
        dot = "" if op in NATIVE else " with XLA's dot"
        return Support(True, f"native handlers, {_ffi.isa()}{dot}")
    if platform == "cuda" and not _ffi.cuda_missing:
        rest = _float8_on_cuda(op) if op in NATIVE else _products_on_cuda(op.startswith("grouped"))
        untested = f"; untested on {gpu}" if (gpu := _ffi.other_gpu()) else ""
        return Support(True, f"native kernels for {_ffi.cuda_archs()}; {rest}{untested}")
    why = _ffi.cuda_missing if platform == "cuda" else f"no kernel for {platform} in this version"
    return Support(False, f"{why}: the traceable reference runs, strict() refuses it")


def _float8_on_cuda(op: str) -> str:
    if op == "dequantize":
        return "the 8-bit formats by XLA's elementwise code"
    return "the 8-bit formats too, but those of groups by XLA's code"


def _products_on_cuda(grouped: bool) -> str:
    dot = "a loop of XLA's dot" if grouped else "XLA's dot"
    if _ffi.on_blackwell() and not grouped:
        return f"two quantized operands with jax.nn.scaled_matmul, other products with {dot}"
    if why := _ffi.hopper_missing():
        return f"products with {dot} ({why})"
    native = "products on sm_90a" if grouped else "quantized rows times packed weights on sm_90a"
    rest = "those of float32 and float16 arrays" if grouped else "other products"
    return f"{native}, {rest} with {dot}"


# --- choosing and calling ---


def _choose(op: str, implementation: Implementation, **static):
    check_choice(op, "implementation", implementation, IMPLEMENTATIONS, "these implementations exist")
    return _implementation(op, implementation, is_strict(), **static)


@functools.cache
def _implementation(op: str, implementation: Implementation, strict: bool, **static):
    native, specification = (partial(function, **static) for function in _FUNCTIONS[op])
    return native_or_reference(op, native, specification, implementation, strict, _ffi.no_cuda())


@functools.cache
def _made(op: str, strict: bool, q: Quantization, activation: _ffi.Activated):
    """x, h, weights, group_sizes -> what `op` makes of x; on CUDA, of h."""
    absent = (None,) * (3 if op == "quantize_transpose" else 2)  # amaxes and seed
    quantized = _implementation(op, None, strict, q=q)

    def otherwise(x, h, weights, group_sizes):
        return quantized(x, *absent, group_sizes)

    if _ffi.cuda_missing:
        return otherwise
    native = _ffi.activate_quantize_transpose if op == "quantize_transpose" else _ffi.activate_quantize

    def fused(x, h, weights, group_sizes):
        weights = None if weights is None else weights.astype(jnp.float32)
        return native(h, weights, group_sizes, q, activation)

    either = partial(jax.lax.platform_dependent, cuda=fused, default=otherwise)
    return jax.jit(undifferentiable(op, either), inline=True)


# One name for an op everywhere: the handler's wrapper and the specification.
_FUNCTIONS = {
    "quantize": (_ffi.quantize, reference.quantize),
    "quantize_transpose": (_ffi.quantize_transpose, reference.quantize_transpose),
    "dequantize": (_ffi.dequantize, reference.dequantize),
}


def _quantized(op: str, tensor: Tensor, q: Quantization, axes, amaxes: tuple, key, implementation) -> tuple:
    """Codes, scales and amax along each of the axes."""
    if not tensor.is_split_by_xla:
        run = _choose(op, implementation, q=replace(q, **tensor.totals))
        return _called(op, run, tensor, amaxes, key, axes)
    words = None if key is None else key_words(op, key)
    amaxes = tuple(
        None if amax is None else amax.reshape(tensor.amax_shape(q, axis))
        for amax, axis in zip(amaxes, axes, strict=True)
    )
    run = _split(op, implementation, is_strict(), q, axes, tensor.batch_dims)
    return run(tensor.array, amaxes, words)


@functools.cache
def _split(op: str, implementation: Implementation, strict: bool, q: Quantization, axes, batch_dims: int):
    """x, amaxes, key words -> codes, scales and amax along each of the axes, partitioned by XLA."""

    def of_part(part: Part):
        return partial(
            _of_part, op=op, implementation=implementation, strict=strict, q=q, axes=axes, batch_dims=batch_dims,
            part=part,
        )  # fmt: skip

    def split(x, amaxes, words):
        layout = Layout.of(x.shape, batch_dims, axes, BLOCK, q.tile)
        of_amax = [layout.amax(axis, q.row_scaled) for axis in axes]
        more = [names for names, amax in zip(of_amax, amaxes, strict=True) if amax is not None]
        more += [] if words is None else [(None,)]
        results = [
            names
            for axis, amax in zip(axes, of_amax, strict=True)
            for names in (layout.stored(axis), layout.stored(axis), amax)
        ]
        rule = quantize_rule(layout, tuple(more), tuple(results), of_part)
        return partitioned(of_part(WHOLE), rule)(x, amaxes, words)

    return jax.jit(undifferentiable(op, split), inline=True)


def _of_part(x, amaxes, words, *, op, implementation, strict, q: Quantization, axes, batch_dims: int, part: Part):
    """Codes, scales and amax along each of the axes, of x, a part of a global tensor, in the shapes of `Layout`."""
    tensor = Tensor.of(op, x, batch_dims, None, implementation, part)
    given = tuple(given_amax(op, "amax", amax, tensor, q, axis) for amax, axis in zip(amaxes, axes, strict=True))
    given = tensor.amaxes(op, q, axes, given, implementation, strict)
    run = _implementation(op, implementation, strict, q=replace(q, **tensor.totals))
    arrays = list(_called(op, run, tensor, given, words, axes))
    layout = Layout.of(x.shape, batch_dims, axes, BLOCK, q.tile)
    for i, axis in enumerate(axes):
        shape = tensor.rows(axis) + (tensor.leading[batch_dims:-1] if axis == 0 and layout.unflattened else ())
        at = slice(3 * i, 3 * i + 2)
        last = tensor.leading[-1] // BLOCK if axis == 0 and layout.unflattened else arrays[3 * i + 1].shape[-1]
        arrays[at] = [a.reshape(*shape, n) for a, n in zip(arrays[at], (last * BLOCK // PACK, last), strict=True)]
        arrays[3 * i + 2] = arrays[3 * i + 2].reshape(tensor.amax_shape(q, axis))
    return tuple(arrays)


def _called(op: str, run, tensor: Tensor, amaxes: tuple, key, axes: tuple[int, ...]) -> tuple:
    """Codes, scales and amax along each of the axes. Draws go by global position, and kernels count rows from the first
    one: where the rows of a part do not follow one another, they are a batch of such that do; likewise columns."""
    if key is not None and tensor.part.halves:
        first, second = (_called(op, run, tensor.half(i), amaxes, key, axes) for i in (0, 1))
        joined = [-1 if axis == -1 else -2 for axis in axes for _ in range(3)]
        pairs = zip(first, second, joined, strict=True)
        both = tuple(a if i % 3 == 2 else _joined(a, b, at) for i, (a, b, at) in enumerate(pairs))
        return both
    if key is None or not tensor.scattered:
        return run(tensor.x, *amaxes, seed_words(op, key, tensor), tensor.group_sizes)
    entries, (batch, (m, k)) = tensor.by_entries(), (tensor.batch, tensor.shape[-2:])
    if 0 in axes and entries.shape[-2] % BLOCK:
        shown, why = f"{entries.shape[-2]} rows a device along its last leading axis", "blocks of rows are drawn for"
        fix = f"a multiple of {BLOCK}, stochastic_rounding=False, or backward_mode='unquant'"
        raise ValueError(message(op, "x", f"of {shown}", f"a multiple of {BLOCK}", why, fix))
    more = [1] * (len(entries.batch) - len(batch))
    of_entries = (jnp.broadcast_to(amax.reshape(*batch, *more), entries.batch) for amax in amaxes)
    result = run(entries.x, *of_entries, seed_words(op, key, entries), None)

    def whole(part, axis: int):
        if axis == 0:
            part = jnp.moveaxis(part, -2, len(batch))
        return part.reshape(*batch, m if axis == -1 else k, -1)

    parts = [[whole(result[3 * i + j], axis) for j in (0, 1)] + [amaxes[i]] for i, axis in enumerate(axes)]
    return tuple(part for of_axis in parts for part in of_axis)


def _joined(a, b, axis: int):
    words = (jax.lax.bitcast_convert_type(part, jnp.uint8) for part in (a, b))  # XLA:CPU widens 8-bit floats
    return jax.lax.bitcast_convert_type(jnp.concatenate(tuple(words), axis), a.dtype)


def _note(op: str, tensor: Tensor, q: Quantization, axes: tuple[int, ...], implementation: Implementation) -> None:
    """Record the call; under strict() refuse what it pads. Groups are padded as their sizes, which are data, say."""
    padding = 0
    for axis in axes:
        rows, extent = stored(tensor.shape, axis)
        by_group = axis == 0 and tensor.groups is not None
        blocks = grouped_extent(extent, tensor.groups or 0) if by_group else padded(extent)
        padding += math.prod(tensor.batch) * rows * (blocks - extent)
        if extent % BLOCK and is_strict() and not by_group:
            refuse_padding(op, "x", f"extent {extent} along axis {axis}")
        if q.tile > 1 and rows % q.tile and is_strict():
            refuse_padding(op, "x", f"{rows} rows under a tile of {q.tile}")
    _record.record(_record.CallEvent(_record.path(), op, tensor.shape, implementation or "chosen at lowering", padding))


def _stored_matrices(q: QuantizedTensor):
    """Codes, scales and amax as the kernels take them, [*batch, r, ...] with the batch that amax has."""
    batch = () if q.row_scaled or q.grouped or q.codes.ndim == 1 or q.amax is None else q.amax.shape
    rows = math.prod(q.codes.shape[len(batch) : -1])
    codes = q.codes.reshape(*batch, rows, q.codes.shape[-1])
    block_scale = q.block_scale.reshape(*batch, rows, q.block_scale.shape[-1])
    if q.amax is None:
        return codes, block_scale, None
    amax = amax_of_rows(q)
    return codes, block_scale, amax.reshape(rows) if q.row_scaled and q.grouped != "blocks" else amax


def amax_of_rows(q: QuantizedTensor):
    """The amax, for each row that of its group where rows are grouped."""
    if q.grouped != "rows" or q.row_scaled:
        return q.amax
    return _groups.of_group(q.amax, _groups.group_of_rows(q.group_sizes, math.prod(q.codes.shape[:-1])), 0)
