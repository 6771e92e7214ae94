"""QuantizedTensor: codes with their scales, as one value."""

import dataclasses
import json
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jax_fp4._errors import message
from jax_fp4._formats import FLOAT8_FORMATS, FORMATS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A tensor in NVFP4 or an 8-bit format, blocked along one axis, which is stored last. NVFP4:

    codes        uint8 [..., r, b/2]   two E2M1 codes a byte, even index in the low nibble
    block_scale  e4m3  [..., r, b/16]  one scale for 16 codes
    amax         f32   [] for the tensor, its batch shape where entries are tensors of their own, [..., r] row-scaled
    group_sizes  int32 [g] or None     rows of x [m, k] that are tensors of their own: amax [g], row-scaled column-wise
                                       [g, r]. Column-wise every group begins at a block of its own: codes
                                       [k, P/2] with P = 16 * ((m + 15 g) // 16). Rows beyond the sum are zero

    The 8-bit formats, codes e4m3 or e5m2 [..., r, b], nothing packed:

    "mxfp8"         block_scale e8m0 [..., r, b/32], the rows of a 32 x 32 tile repeating theirs; no amax
    "float8_block"  block_scale f32 [..., r, b/128], of tiles [*batch, ceil(r/128), b/128]: inverse scales; no amax
    "float8"        block_scale f32 [], of its batch shape, or [g]: the inverse scale; amax f32, likewise; `block` None

    with group_sizes as above, P = B * ((m + (B-1) g) // B) for blocks of B, and m for "float8", which has none.

    `axis` -1: blocks along the last axis of x [..., k] (codes [..., k/2]). `axis` 0: "column-wise", blocks along m of
    x [*batch, m, k] (codes [*batch, k, m/2]). `extent` is the blocked length without padding, `dtype` the type the
    values came from, `bound` the E4M3 bound B of the tensor scale, `block` (1, 16) or (16, 16) for weight tiles,
    `power_of_two` whether all float32 scales are (of "float8_block", whose values then are exact in bfloat16),
    `row_scaled` whether each stored row has an amax, `hadamard` whether the values were transformed along the blocks,
    `grouped` where the groups lie in the stored form: "" (there are none), "rows" or "blocks". A pytree whose arrays
    are the leaves; unflattening never validates, so transformations may put anything in their place. It never turns
    into a dense array by itself: call `dequantize`.
    """

    codes: Any
    block_scale: Any
    amax: Any
    group_sizes: Any = None
    format: str = dataclasses.field(metadata={"static": True}, default="nvfp4")
    axis: Literal[-1, 0] = dataclasses.field(metadata={"static": True}, default=-1)
    extent: int = dataclasses.field(metadata={"static": True}, default=0)
    dtype: np.dtype = dataclasses.field(metadata={"static": True}, default=np.dtype(np.float32))
    bound: int = dataclasses.field(metadata={"static": True}, default=448)
    block: tuple[int, int] | None = dataclasses.field(metadata={"static": True}, default=(1, 16))
    row_scaled: bool = dataclasses.field(metadata={"static": True}, default=False)
    power_of_two: bool = dataclasses.field(metadata={"static": True}, default=False)
    hadamard: bool = dataclasses.field(metadata={"static": True}, default=False)
    grouped: Literal["", "rows", "blocks"] = dataclasses.field(metadata={"static": True}, default="")
    # Inside a layer: so many dimensions before the last one are leading dimensions of x too, [k, *leading[:-1], s/2].
    inner: int = dataclasses.field(metadata={"static": True}, default=0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape; under axis=0 the leading dimensions that were flattened stay flat."""
        if self.inner:
            *rest, last = self.codes.shape[: -1 - self.inner]
            contracted = self.extent * math.prod(self.codes.shape[-1 - self.inner : -1])
            return (*rest, contracted, last) if self.axis == 0 else (*rest, last, contracted)
        *rest, last = self.codes.shape[:-1] if self.codes.ndim > 1 else (1,)
        if self.axis == 0:
            return (*rest, self.extent, last)
        return (*self.codes.shape[:-1], self.extent)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, block scales and amax."""
        leaves = jax.tree.leaves((self.codes, self.block_scale, self.amax))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    @property
    def flattened(self) -> "QuantizedTensor":
        """With its leading dimensions flattened to the blocked axis, as everybody but a layer has it."""
        if not self.inner:
            return self
        rows, count = self.codes.shape[: -1 - self.inner], math.prod(self.codes.shape[-1 - self.inner : -1])
        by_row = ("codes",) if self.block is None else ("codes", "block_scale")
        # not -1: there may be no rows
        flat = {name: (a := getattr(self, name)).reshape(*rows, count * a.shape[-1]) for name in by_row}
        return dataclasses.replace(self, **flat, extent=count * self.extent, inner=0)

    @property
    def mT(self) -> "QuantizedTensor":
        """The matrix transpose. Free: what was blocked along the last axis is blocked along the one before it."""
        if self.codes.ndim < 2:
            raise ValueError(
                message("QuantizedTensor.mT", "shape", self.shape, "two axes", "it swaps the last two", "x[None, :]")
            )
        return dataclasses.replace(self, axis=0 if self.axis == -1 else -1)

    def __repr__(self) -> str:
        # Of what there is: under transformations the leaves may be shapes, axes, shardings or None.
        codes, amax = (getattr(leaf, "shape", leaf) for leaf in (self.codes, self.amax))
        block = "" if self.block is None or self.block[0] == 1 else f", block={self.block}"
        groups = f", grouped={self.grouped!r}" if self.grouped else ""
        kind = f"{self.format}, axis={self.axis}, extent={self.extent}, dtype={self.dtype.name}{block}{groups}"
        return f"QuantizedTensor({kind}, codes={codes}, amax={amax})"

    def __array__(self, dtype=None, copy=None):
        raise TypeError(
            message(
                "numpy.asarray",
                "argument",
                repr(self),
                "a dense array",
                "a quantized tensor never turns into one silently",
                "jax_fp4.dequantize(q)",
            )
        )


def scaling(q: QuantizedTensor) -> str:
    """How it scales: "nvfp4", "mxfp8", "float8_block" or "float8"."""
    return FLOAT8_FORMATS[q.format][0] if q.format in FLOAT8_FORMATS else q.format


def block_length(q: QuantizedTensor) -> int:
    """Elements along the blocked axis that share a scale; 1 where the whole tensor does."""
    return 1 if q.block is None else q.block[1]


def stored_dtypes(format: str) -> tuple[Any, Any]:
    """Of codes and block scales."""
    if format not in FLOAT8_FORMATS:
        return jnp.uint8, jnp.float8_e4m3fn
    scaling, codes = FLOAT8_FORMATS[format]
    scale = jnp.float8_e8m0fnu if scaling == "mxfp8" else jnp.float32
    return jnp.float8_e5m2 if codes == "e5m2" else jnp.float8_e4m3fn, scale


# --- what its arrays mean, as bytes: for checkpoints, and for jax.export, which serializes what a program takes ---

STATIC_FIELDS = tuple(f.name for f in dataclasses.fields(QuantizedTensor) if f.metadata.get("static"))


def static_to_bytes(values: tuple) -> bytes:
    """JSON of the static fields, in the order of STATIC_FIELDS."""
    fields = dict(zip(STATIC_FIELDS, values, strict=True))
    return json.dumps(fields | {"dtype": fields["dtype"].name}).encode()


def static_from_bytes(data: bytes | bytearray) -> tuple:
    """The inverse. Raises ValueError or TypeError for other bytes."""
    fields = json.loads(data)
    if set(fields) != set(STATIC_FIELDS) or fields["format"] not in FORMATS:
        raise ValueError(f"the fields are {fields}")
    fields |= {"dtype": np.dtype(fields["dtype"]), "block": fields["block"] and tuple(fields["block"])}
    return tuple(fields[name] for name in STATIC_FIELDS)


export.register_pytree_node_serialization(
    QuantizedTensor,
    serialized_name="jax_fp4.QuantizedTensor",
    serialize_auxdata=static_to_bytes,
    deserialize_auxdata=static_from_bytes,
)
