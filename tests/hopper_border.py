"""The CUDA calls of products after their definition at the FFI border, in jax.numpy and slowly: what a kernel does with
its operands, and what it may demand of them."""

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp4 import _ffi, _groups, _hopper, reference
from jax_fp4._formats import INTERLEAVE, grouped_extent

# The order of each 64 values of a row: position 16s + 2t + h + 8i holds element 16t + 8(s >> 1) + 2(s & 1) + i + 4h,
# with s, t below 4 and h, i below 2.
INTERLEAVED = tuple(
    16 * (p >> 1 & 3) + 8 * (p >> 5) + 2 * (p >> 4 & 1) + (p >> 3 & 1) + 4 * (p & 1) for p in range(INTERLEAVE)
)


def stand_in(monkeypatch) -> list[str]:
    """From now on programs call these, on any platform. -> the names of those that are called."""
    called = []

    def noted(function):
        def call(*operands, **attributes):
            called.append(function.__name__)
            return function(*operands, **attributes)

        return call

    for function in (dequantize_interleaved, grouped_matmul, grouped_matmul_bf16, grouped_contraction):
        monkeypatch.setattr(_ffi, function.__name__, noted(function))
    monkeypatch.setattr(_ffi, "sm90a_missing", lambda: "")
    monkeypatch.setattr(_hopper, "choose", lambda cuda, otherwise, **_: cuda)
    jax.clear_caches()
    return called


def dequantize_interleaved(codes, block_scale):
    m, size = codes.shape
    assert block_scale.shape == (m, size // 8) and size % 8 == 0
    values = reference.dequantize(codes, block_scale, None, 448, 2 * size, jnp.bfloat16)
    values = jnp.pad(values, [(0, 0), (0, -2 * size % 64)])
    return values.reshape(m, -1, 64)[..., np.array(INTERLEAVED)].reshape(m, -1)


def grouped_matmul(
    values, codes, block_scale, lhs_factor, rhs_factor, bias, row_weights, group_sizes, dtype, *, lhs_of_rows
):
    (m, c), (groups, n, size) = values.shape, codes.shape
    assert values.dtype == jnp.bfloat16 and c % 64 == 0 and 2 * size == c
    assert block_scale.shape == (groups, n, c // 16) and block_scale.dtype == jnp.float8_e4m3fn
    assert lhs_factor.shape == ((m,) if lhs_of_rows else (groups,)) and lhs_factor.dtype == jnp.float32
    assert rhs_factor.shape in ((groups,), (groups, n)) and rhs_factor.dtype == jnp.float32
    group = _groups.group_of_rows(group_sizes, m)
    x = jnp.zeros_like(values).reshape(m, -1, 64).at[..., np.array(INTERLEAVED)].set(values.reshape(m, -1, 64))
    w = reference.dequantize(codes, block_scale, None, 448, c, jnp.bfloat16)
    acc = _rows(x.reshape(m, c), w, group)
    acc = acc * (lhs_factor if lhs_of_rows else _groups.of_group(lhs_factor, group, 0))[:, None]
    by_group = _groups.of_group(rhs_factor, group, 0)
    return _finish(acc * (by_group[:, None] if by_group.ndim == 1 else by_group), bias, row_weights, group, dtype)


def grouped_matmul_bf16(x, w, bias, row_weights, group_sizes, dtype, *, transposed):
    assert x.dtype == w.dtype == jnp.bfloat16
    assert x.shape[1] % 8 == 0 and w.shape[2] % 8 == 0 and x.shape[1] == w.shape[2 if transposed else 1]
    group = _groups.group_of_rows(group_sizes, len(x))
    return _finish(_rows(x, w if transposed else w.mT, group), bias, row_weights, group, dtype)


def grouped_contraction(lhs, rhs, lhs_factor, rhs_factor, group_sizes, m, dtype, *, rows_last, parts=1):
    assert lhs.dtype == rhs.dtype == jnp.bfloat16 and (lhs_factor is None) == (rhs_factor is None)
    groups = len(group_sizes)
    if rows_last:
        assert lhs.shape[1] == rhs.shape[1] == grouped_extent(m, groups)
        lhs, rhs = lhs.T, rhs.T
        group = jnp.repeat(_groups.columns(group_sizes, m).group, 16)
    else:
        assert len(lhs) == len(rhs) == m and lhs.shape[1] % 8 == rhs.shape[1] % 8 == 0
        group = _groups.group_of_rows(group_sizes, m)
    mine = (group == jnp.arange(groups)[:, None])[..., None]
    a, b = (jnp.where(mine, part.astype(jnp.float32), 0) for part in (lhs, rhs))
    acc = jnp.einsum("gmk,gmn->gkn", a, b)
    for factor, shape in ((lhs_factor, (groups, -1, 1)), (rhs_factor, (groups, 1, -1))):
        extent = lhs.shape[1] if shape[-1] == 1 else rhs.shape[1]
        assert factor is None or factor.shape in ((groups,), (groups, extent))
        acc = acc if factor is None else acc * factor.reshape(shape)
    if parts > 1:
        assert acc.shape[1] % (_ffi.PART_ROWS * parts) == 0
        acc = jnp.moveaxis(acc.reshape(groups, parts, -1, acc.shape[-1]), 1, 0)
    return acc.astype(dtype)


def _rows(x, w, group):
    """[m,n] = [m,k] @ [g,n,k] of the group of each row, in float32; rows of no group are not read."""
    w = jnp.concatenate([w, jnp.zeros_like(w[:1])]).astype(jnp.float32)
    live = (group < len(w) - 1)[:, None]
    return jnp.einsum("mk,mnk->mn", jnp.where(live, x, 0).astype(jnp.float32), w[group])


def _finish(acc, bias, row_weights, group, dtype):
    assert row_weights is None or (bias is not None and row_weights.dtype == jnp.float32)
    if bias is not None:
        assert bias.dtype == jnp.float32 and bias.shape[1] == acc.shape[1]
        added = _groups.of_group(bias, group, 0)
        acc = acc + (added if row_weights is None else row_weights[:, None] * added)
    return acc.astype(dtype)
