"""The products of `_modes` and, while diagnostics are collected, beside each of them the same one in high precision.

`site` (or `watch`) None, as it is without a collector, is `_modes` alone.
"""

from typing import Any, NamedTuple

from jaxtyping import Array, Float

from jax_fp4 import _modes, _observe, _record
from jax_fp4._modes import Needs, Planes, Residuals, Scales
from jax_fp4._observe import Site
from jax_fp4._placement import LOCAL, Placement
from jax_fp4._recipe import Recipe, scaling_of


class Watch(NamedTuple):
    """A product, and its operands before they were quantized."""

    site: Site
    x: Any
    kernel: Any
    placement: Placement

    @classmethod
    def of(cls, site: Site | None, *operands: Any) -> "Watch | None":
        return None if site is None else cls(site, *operands)


def multiply(
    watch: Watch | None, x: Planes, kernel: Planes, dtype, group_sizes=None, **how: Any
) -> Float[Array, "*m n"]:  # fmt: skip
    y = _modes.multiply(x, kernel, dtype, group_sizes, **how)
    if watch is None:
        return y
    with _record.paused():
        high_x, high_kernel = _modes.operands(
            watch.x, watch.kernel, None, Needs(False, False), placement=watch.placement
        )
    reference = _modes.multiply(high_x, high_kernel, dtype, group_sizes, **how)
    operands = high_x.forward, high_kernel.forward, x.forward, kernel.forward
    record = _observe.of_forward(operands, y, reference, group_sizes, watch.placement.x)
    return _observe.tag([y], record, watch.site)[0]


def residuals(
    site: Site | None, x, kernel: Any, seed, qx: Planes, qw: Planes, recipe: Recipe | None, needs: Needs,
    group_sizes=None, placement: Placement = LOCAL,
) -> Residuals:  # fmt: skip
    kept = _modes.residuals(x, kernel, seed, qx, qw, recipe, needs, group_sizes, placement)
    if site is None:
        return kept
    high = _modes.residuals(x, kernel, None, Planes(x), Planes(kernel), None, needs, group_sizes, placement)
    return kept._replace(beside=high)


def gradients(
    site: Site | None, dy: Float[Array, "*m n"], kept: Residuals, recipe: Recipe | None, dtypes: tuple[Any, Any],
    group_sizes=None, scales: Scales | None = None, placement: Placement = LOCAL,
) -> tuple[Array | None, Array | None, Array | None]:  # fmt: skip
    dx, dw, amax = _modes.gradients(dy, kept, recipe, dtypes, group_sizes, scales, placement)
    if site is None or (dx is None and dw is None):
        return dx, dw, amax
    with _record.paused():
        high_dx, high_dw, _ = _modes.gradients(dy, kept.beside, None, dtypes, group_sizes, placement=placement)
        q = _codes_along_n(dy, kept, recipe, group_sizes, scales, placement)
    record = _observe.of_backward(dy, q, group_sizes, (dx, high_dx), (dw, high_dw))
    tagged = iter(_observe.tag([gradient for gradient in (dx, dw) if gradient is not None], record, site))
    dx, dw = (None if gradient is None else next(tagged) for gradient in (dx, dw))
    return dx, dw, amax


def _codes_along_n(dy, kept: Residuals, recipe, group_sizes, scales: Scales | None, placement: Placement) -> Any:
    """Q(dy) as dx reads it (the same call, which XLA finds out); where only dw quantizes dy, as dx would. None in a
    mode that leaves dy alone. Those of dw are along m, and transformed."""
    scaling = scaling_of(recipe, "dgrad", "dy") or scaling_of(recipe, "wgrad", "dy")
    flags: dict[str, Any] = dict(seed=kept.seed, group_sizes=group_sizes, specs=placement.y)
    return _modes.quantized(dy, scaling, None, scale=(scales or Scales()).dy, **flags)[0]
