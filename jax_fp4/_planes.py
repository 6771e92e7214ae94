"""An operand of a layer quantized along both its axes, or made and quantized in one call."""

from typing import Any

import jax
from jaxtyping import Array, Float

from jax_fp4 import _record
from jax_fp4._array import QuantizedTensor
from jax_fp4._lowering import choose, is_partitioned
from jax_fp4._ops import Made, as_made, quantize, quantize_made, quantize_transpose
from jax_fp4._placement import UNFLATTENED, WHOLE
from jax_fp4._recipe import Scaling
from jax_fp4._rules import named


def quantized(
    a: Float[Array, "*g m k"],
    row: Scaling | None,
    column: Scaling | None,
    *,
    seed=None,
    made: Made | None = None,
    **flags,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """`a` blocked along its last axis as `row` says, and along its rows as `column` says: in one pass where they agree.

    made: what `a` is made of, where that is known.
    """
    part = flags.get("specs", WHOLE)
    of_row = a
    if row is not None and made is not None and row.format == "nvfp4":
        if part in (WHOLE, UNFLATTENED):
            both = row == column
            first, *rest = _quantized_made(a, row, both, made, flags)
            return named(first), named(rest[0]) if both else quantized(a, None, column, **flags)[1]
        # Of a part of a tensor the amax is that of all of it, which the call cannot know.
        of_row = as_made(a, made, flags["group_sizes"])
    if row is not None and row == column:
        key = seed if row.stochastic else None
        first, second = quantize_transpose(of_row, key=key, hadamard=row.hadamard, **row.flags, **flags)
        return named(first), named(second)
    first = second = None
    if row is not None:
        first = named(quantize(of_row, key=seed if row.stochastic else None, **row.flags, **flags))
    if column is not None:
        key = seed if column.stochastic else None
        second = named(quantize(a, axis=0, key=key, hadamard=column.hadamard, **column.flags, **flags))
    return first, second


def _quantized_made(a, row: Scaling, both: bool, made: Made, flags: dict[str, Any]) -> tuple[QuantizedTensor, ...]:
    """`a` of one device, made and quantized in one call on CUDA; but of rows without groups only where XLA does not
    partition the program: then their parts are quantized."""

    def in_one_call(a, h, weights):
        how = dict(row_scaled=row.row_scaled, four_over_six=row.four_over_six, group_sizes=flags["group_sizes"])
        return quantize_made(a, made._replace(h=h, weights=weights), both=both, hadamard=row.hadamard, **how)

    if flags["group_sizes"] is not None:
        return in_one_call(a, made.h, made.weights)

    def apart(a, h, weights):
        if both:
            return quantize_transpose(a, hadamard=row.hadamard, **row.flags, **flags)
        return (quantize(a, **row.flags, **flags),)

    def together(*operands):
        with _record.paused():
            leaves = jax.tree.leaves(in_one_call(*operands))
            stored = jax.eval_shape(apart, *operands)  # column-wise with the leading dimensions of `a`
        shaped = [leaf.reshape(like.shape) for leaf, like in zip(leaves, jax.tree.leaves(stored), strict=True)]
        return jax.tree.unflatten(jax.tree.structure(stored), shaped)

    usable = lambda context: not is_partitioned(context)  # noqa: E731
    return choose(together, apart, usable=usable, batched=False)(a, made.h, made.weights)
