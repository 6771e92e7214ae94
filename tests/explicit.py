"""The three products of a layer, written out: docs/numerics.md, sections 1.10, 3 and 4, in NumPy and float64.

Every operand is quantized by the specification (`fp4.quantize(..., implementation="reference")` of NumPy arrays) with
the flags that matrix.py lists, decoded here, and multiplied in float64, group by group. Nothing of the library's modes,
recipes or products takes part.
"""

from typing import Any, NamedTuple

import numpy as np
from matrix import Meaning

import jax_fp4 as fp4

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BLOCK = {"nvfp4": 16, "mxfp8": 32, "float8_block": 128, "float8": 1}


def format_of(q) -> str:
    return q.format.removesuffix("_e5m2")


def wide(a, dtype=None) -> np.ndarray:
    """float64 values, of `dtype`."""
    a = np.asarray(a)
    return (a if dtype is None else a.astype(dtype)).astype(np.float64)


class Slices(NamedTuple):
    """Of groups: their rows in x, and where their blocks begin."""

    rows: list[slice]
    sizes: Any

    @classmethod
    def of(cls, sizes, m: int) -> "Slices":
        if sizes is None:
            return cls([slice(0, m)], None)
        ends = np.cumsum(sizes)
        return cls([slice(e - s, e) for s, e in zip(sizes, ends, strict=True)], np.int32(sizes))

    def blocks(self, length: int) -> list[slice]:
        """Positions of each group where blocks of `length` run along the rows."""
        counts = [-(-(r.stop - r.start) // length) * length for r in self.rows]
        ends = np.cumsum(counts)
        return [slice(e - c, e) for c, e in zip(counts, ends, strict=True)]


def decoded(q, slices: Slices | None = None) -> np.ndarray:
    """Values in the stored orientation, padding and all, [..., r, p], rounded as section 1.9 says (of "float8": code
    times inverse scale), so that a further rounding, to a narrow compute dtype, falls to the same side."""
    form, codes = format_of(q), np.asarray(q.codes)
    if form == "nvfp4":
        nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
        values = np.where(nibbles & 8, -1, 1) * E2M1[nibbles & 7]
    else:
        values = wide(codes)
    scale = np.asarray(q.block_scale).astype(np.float32)
    if form == "float8":
        scale = _spread(scale, q, values, slices)
    else:
        if form == "float8_block" and q.block[0] > 1:
            scale = np.repeat(scale, q.block[0], -2)[..., : values.shape[-2], :]
        scale = np.repeat(scale, BLOCK[form], -1)
    if form == "nvfp4":
        of_tensor = _spread(np.asarray(q.amax), q, values, slices)
        scale = (scale * of_tensor) * (np.float32(1) / np.float32(6 * q.bound))
    assert scale.dtype == np.float32
    return wide(values.astype(np.float32) * scale)


def _spread(factor, q, values, slices: Slices | None):
    """A factor of the tensor, of its rows, of its batch or of its groups, as it multiplies [..., r, p]."""
    if not q.grouped:
        return factor[..., None] if q.row_scaled else factor[..., None, None]
    assert slices is not None
    if q.grouped == "rows":
        if q.row_scaled:
            return factor[:, None]
        spread = np.zeros((values.shape[0], 1), np.float32)
        for e, rows in enumerate(slices.rows):
            spread[rows] = factor[e]
        return spread
    spread = np.zeros_like(values, np.float32)
    for e, columns in enumerate(slices.blocks(BLOCK[format_of(q)])):
        spread[:, columns] = factor[e][:, None] if q.row_scaled else factor[e]
    return spread


def quantized(a, flags: dict, axis: int, **more):
    """What `quantize` of the specification gives; empty where there is nothing to quantize."""
    return fp4.quantize(np.asarray(a), axis=axis, implementation="reference", **flags, **more)


def planes(a, flags: dict, axis: int, slices: Slices, **more) -> list[np.ndarray]:
    """x or dy quantized along its columns (axis -1), as [rows, p] of each group, or its rows (axis 0), as [k, p]."""
    q = quantized(a, flags, axis, group_sizes=slices.sizes, **more)
    values = decoded(q, slices)
    if slices.sizes is None:
        return [values]
    if axis == -1:
        return [values[rows] for rows in slices.rows]
    return [values[:, columns] for columns in slices.blocks(BLOCK[format_of(q)])]


def kernel_planes(w, flags: dict, axis: int, dtype, **more) -> list[np.ndarray]:
    """The kernel [k, n] or [g, k, n], rounded to `dtype` and quantized: [n, p] of each expert for axis 0, [k, p]."""
    values = decoded(quantized(w, flags, axis, dtype=dtype, batch_dims=w.ndim - 2, **more))
    return list(values) if w.ndim == 3 else [values]


def dot(a, b) -> np.ndarray:
    """[r, c] = [r, p] @ [c, p]: formats pad to blocks of their own."""
    length = max(a.shape[-1], b.shape[-1])
    a, b = (np.pad(v, ((0, 0), (0, length - v.shape[-1]))) for v in (a, b))
    return a @ b.T


class Products(NamedTuple):
    y: np.ndarray  # [m, n], without bias
    dx: np.ndarray  # [m, k]
    dw: np.ndarray  # [k, n] or [g, k, n]
    db: np.ndarray  # [n] or [g, n]


class Scales(NamedTuple):
    """Of delayed scaling, what the operands are multiplied by."""

    x: Any
    w: Any
    dy: Any

    def of(self, operand: str) -> dict:
        return dict(scale=getattr(self, operand))


def products(meaning: Meaning, x, w, dy, *, sizes=None, key=None, scales: Scales | None = None) -> Products:
    """y = x w, dx = dy w^T, dw = x^T dy and db of x [m, k], w and dy [m, n], which are in the compute dtype but for w.

    w: [k, n] or [g, k, n], or a frozen kernel (one plane, or the pair), of which there is no dw.
    """
    x, dy = np.asarray(x), np.asarray(dy)
    (m, k), n, dtype = x.shape, dy.shape[1], x.dtype
    slices = Slices.of(sizes, m)
    frozen = not hasattr(w, "dtype") or hasattr(w, "codes")
    along_k = along_n = None
    if frozen:
        along_n, along_k = w if isinstance(w, tuple) else (None, w)
    else:
        w = np.asarray(w)
    given = (lambda operand: {}) if scales is None else scales.of

    def matrices(a) -> list[np.ndarray]:
        return list(a) if a.ndim == 3 else [a]

    # what the forward multiplies: x as [rows, p], w as [n, p]
    part = meaning.forward
    w_known = [v[:, :k] for v in matrices(decoded(along_k))] if frozen else None
    if part is None:
        of_x = [wide(x[rows]) for rows in slices.rows]
        of_w = [wide(v, dtype) for v in w_known] if w_known else [wide(v.T, dtype) for v in matrices(w)]
    else:
        of_x = planes(x, part.x, -1, slices, **given("x"))
        of_w = matrices(decoded(along_k)) if frozen else kernel_planes(w, part.w, 0, dtype, **given("w"))
    y = [dot(a, b) for a, b in zip(of_x, of_w, strict=True)]

    # dx = dy w^T: dy as [rows, p], w as [k, p]
    mode, part = meaning.dx
    dy_rows = [wide(dy[rows]) for rows in slices.rows]
    if mode == "default":
        dy_rows = planes(dy, part.dy, -1, slices, **given("dy"), **_drawn(part, key))
        if not frozen:
            for_dx = kernel_planes(w, part.w, -1, dtype, **given("w"))
        else:
            for_dx = matrices(decoded(along_n)) if along_n is not None else [v.T for v in w_known]
    elif mode == "unquant" and not frozen:
        for_dx = [wide(v, dtype) for v in matrices(w)]
    else:  # dequant; of a frozen kernel nothing else is left
        for_dx = [wide(v[:, :k].T, dtype) for v in of_w]
    dx = [dot(a, b) for a, b in zip(dy_rows, for_dx, strict=True)]

    # dw = x^T dy: x as [k, p], dy as [n, p]
    mode, part = meaning.dw
    dy_columns = [wide(dy[rows].T) for rows in slices.rows]
    if mode == "default":
        mixed = dict(hadamard=True) if part.hadamard else {}
        for_dw = planes(
            x, (part.x if part.x_along_rows is None else part.x_along_rows) | mixed, 0, slices, **given("x")
        )
        dy_columns = planes(dy, part.dy | mixed, 0, slices, **given("dy"), **_drawn(part, key))
    elif mode == "unquant":
        for_dw = [wide(x[rows].T) for rows in slices.rows]
    else:
        for_dw = [wide(v[:, :k].T, dtype) for v in of_x]
    dw = [dot(a, b) for a, b in zip(for_dw, dy_columns, strict=True)]
    db = [wide(dy[rows]).sum(0) for rows in slices.rows]

    def whole(parts, columns):
        a = np.zeros((m, columns))
        for rows, part in zip(slices.rows, parts, strict=True):
            a[rows] = part
        return a

    one = (lambda parts: parts[0]) if sizes is None else np.stack
    return Products(whole(y, n), whole(dx, k), one(dw), one(db))


def _drawn(part, key) -> dict:
    return dict(key=key) if part.stochastic else {}
