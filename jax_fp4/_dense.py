"""dense: y = x w + b with quantized operands, one custom_vjp from quantization to product."""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from jax_fp4 import _modes, _record
from jax_fp4._arguments import check_float, check_quantized, float_dtype, key_words, refuse_padding
from jax_fp4._array import QuantizedTensor
from jax_fp4._choosing import chosen_by, resolve
from jax_fp4._errors import is_strict, message
from jax_fp4._modes import Kernel, Needs, Residuals, Scales, is_frozen
from jax_fp4._products import along_last, matmul, sum_of_groups
from jax_fp4._recipe import DelayedScaling, Operand, Product, Recipe, RecipeChoice, draws, scaling_of
from jax_fp4._rules import is_kept, is_perturbed, keep, primals, refuse_perturbed
from jax_fp4.delayed import State, check_state, is_used_again, observed, refuse_used_again


class Static(NamedTuple):
    """What the forward captures for the backward: a later context changes nothing."""

    op: str
    recipe: Recipe | None
    dtype: np.dtype  # of x, and of every high-precision product
    y_dtype: np.dtype
    kernel_dtype: np.dtype
    bias_dtype: np.dtype | None
    used_again: bool = False  # whether the delayed-scaling state was given to an earlier call too


def dense(
    x: Any,
    kernel: Any,
    bias: Any = None,
    *,
    recipe: RecipeChoice | None = None,
    key=None,
    state: State | None = None,
    preferred_element_type=None,
) -> Float[Array, "*b n"]:
    """y = x w + b: x [..., k], kernel [k, n], bias [n] -> y [..., n] in x's dtype, which is the compute dtype.

    kernel: an array (float32 master weights are rounded to x's dtype on the way) or, frozen, a QuantizedTensor blocked
    along k (`quantize(w, axis=0)`) or the pair `quantize_transpose(w)`; differentiating a frozen kernel raises.
    recipe: None takes autocast's, HIGH_PRECISION none. Without a recipe this is the plain product. Under
        autocast(Rules) a call outside of a Linen layer has no path to match: ValueError.
    key: the JAX key of stochastic rounding, needed where a recipe that rounds dy stochastically is differentiated.
    state: of DelayedScaling, from `jax_fp4.delayed.init`, and for this call alone; its cotangent is the next state.
    preferred_element_type: y's dtype, rounded once from the float32 sum, if not x's.

    The three products and what is kept for them follow the recipe's backward mode. dx has x's dtype, dw and db those of
    their parameters; db is always the sum of the unquantized dy. Nothing is computed or kept for an operand that
    nobody differentiates. Raises TypeError, ValueError or UnsupportedError for what is not described here.
    """
    return dense_as("dense", x, kernel, bias, recipe, key, state, preferred_element_type)


def dense_as(
    op: str, x: Any, kernel: Any, bias, recipe: RecipeChoice | None, key, state, preferred_element_type
) -> Float[Array, "*b n"]:
    """`dense`, known by the name `op` to errors and to the report."""
    chosen = resolve(op, recipe)
    check_x(op, x)
    k, n = shape = check_kernel(op, "kernel", kernel, f"x {x.shape}", x.shape[-1], grouped=False)
    check_bias(op, "bias", bias, shape)
    y_dtype = x.dtype
    if preferred_element_type is not None:
        y_dtype = float_dtype(op, "preferred_element_type", preferred_element_type, "y is written in it")
    check_state(op, chosen, state)
    reason, frozen = chosen_by(op, recipe), frozen_format(kernel)
    event = _record.LayerEvent(_record.path(), op, x.shape, (k, n), chosen, reason, frozen=frozen)
    if chosen is None:
        _record.record(event)
        return _high_precision(x, kernel, bias, y_dtype)
    rows = jnp.asarray(x).reshape(math.prod(x.shape[:-1]), k)  # not -1: k may be 0
    check_padding(op, chosen, k, n, rows.shape[0])
    seed = None if key is None else key_words(op, key)
    bias_dtype = None if bias is None else bias.dtype
    static = Static(op, chosen, x.dtype, y_dtype, kernel_dtype(kernel), bias_dtype, is_used_again(state))
    _record.record(event._replace(cost=cost_of(rows, kernel, bias, seed, None, state, static)))
    y: Any = affine(rows, kernel, bias, seed, None, state, static)
    return y.reshape(*x.shape[:-1], n)


@partial(jax.custom_vjp, nondiff_argnums=(6,))
def affine(
    x: Float[Array, "m k"], kernel: Kernel, bias, seed, group_sizes, state, static: Static
) -> Float[Array, "m n"]:
    """y = x w + b, the layer itself: for `dense`, and with group_sizes, kernel [g, k, n] and bias [g, n] for
    `grouped_dense`."""
    planes = _modes.operands(x, kernel, static.recipe, Needs(False, False), group_sizes, scales=scales_of(state))
    return _modes.multiply(*planes, static.y_dtype, group_sizes, compute=static.dtype, bias=bias)


def _affine_fwd(x: Any, kernel: Any, bias, seed, group_sizes, state, static: Static):
    """Residuals for what is differentiated, and the errors that only differentiation can make."""
    if is_frozen(kernel):
        refuse_perturbed(static.op, "kernel", kernel)
    if static.used_again and is_perturbed(state):
        refuse_used_again(static.op)
    needs, wanted = Needs(x.perturbed, not is_frozen(kernel) and kernel.perturbed), is_perturbed(state)
    x, kernel, bias, seed, group_sizes, state = primals((x, kernel, bias, seed, group_sizes, state))
    recipe = static.recipe
    if any(needs):
        require_key(static.op, recipe, seed)
    if needs.x:
        _modes.require_along_n(static.op, "kernel", kernel, recipe)
    qx, qw = _modes.operands(x, kernel, recipe, needs, group_sizes, scales=scales_of(state))
    y = _modes.multiply(qx, qw, static.y_dtype, group_sizes, compute=static.dtype, bias=bias)
    seen = seen_forward(state, recipe, qx.forward, None if is_frozen(kernel) else qw.forward)
    kept = keep_state(seen, wanted), scales_of(state).dy
    return y, (_modes.residuals(x, kernel, seed, qx, qw, recipe, needs, group_sizes), group_sizes, kept)


def _affine_bwd(static: Static, residuals: tuple[Residuals, Any, Any], dy):
    kept, group_sizes, (state, scale) = residuals
    if isinstance(dy, SymbolicZero):
        return (None,) * 6
    dtypes = static.dtype, static.kernel_dtype
    # y may be wider than the compute dtype
    dx, dw, amax = _modes.gradients(dy.astype(static.dtype), kept, static.recipe, dtypes, group_sizes, scale)
    db = None
    if static.bias_dtype is not None:
        db = sum_of_groups(dy, group_sizes).astype(static.bias_dtype)
    return dx, dw, db, None, None, seen_backward(state, static.recipe, amax)


affine.defvjp(_affine_fwd, _affine_bwd, symbolic_zeros=True)


# For the report, which differentiates to learn what a call takes: where that, only evaluated, has no key.
SOME_SEED = jax.ShapeDtypeStruct((2,), jnp.uint32)


def cost_of(x, kernel, bias, seed, group_sizes, state, static: Static) -> Any:
    """What `affine` takes, for the report: only evaluated, where it cannot be differentiated."""
    rest = bias, SOME_SEED if seed is None else seed, group_sizes, state
    if not _modes.has_along_n(kernel, static.recipe):
        return _record.cost_of(lambda _, *arguments: affine(*arguments, static), (), x, kernel, *rest)
    if is_frozen(kernel):
        return _record.cost_of(lambda x, *rest: affine(x, *rest, static), x, kernel, *rest)
    return _record.cost_of(lambda both, *rest: affine(*both, *rest, static), (x, kernel), *rest)


def scales_of(state: State | None) -> Scales:
    return Scales() if state is None else Scales(state.x.scale, state.kernel.scale, state.dy.scale)


def keep_state(state: Any, wanted: bool) -> Any:
    """As a residual: nothing where nobody differentiates it."""
    return None if state is None else keep(state if wanted else None, lambda: state)


def seen_forward(state: Any, recipe: Recipe | None, qx: Any, qw: Any) -> Any:
    """The state after what the forward quantized (None for a frozen kernel)."""
    if state is None:
        return None
    assert isinstance(recipe, DelayedScaling)
    kernel = observed(state.kernel, recipe, "kernel", None if qw is None else qw.amax)
    return dataclasses.replace(state, x=observed(state.x, recipe, "x", qx.amax), kernel=kernel)


def seen_backward(state: Any, recipe: Recipe | None, amax: Any) -> Any:
    """And after what the backward quantized: the cotangent of the state that the forward was given."""
    if state is None or not is_kept(state):
        return None
    assert isinstance(recipe, DelayedScaling)
    state = dataclasses.replace(state, dy=observed(state.dy, recipe, "dy", amax))
    # One, of a value that has a batch where a batch shares this state: vmap adds up those only, as it does the rest.
    seen = [jnp.any(part.scale > 0) for part in (state.x, state.kernel, state.dy)]
    once = jnp.where(seen[0] & seen[1] & seen[2], jnp.float32(1), jnp.float32(1))
    return dataclasses.replace(state, calls=once)


def require_key(op: str, recipe: Recipe | None, seed) -> None:
    """Where a layer is differentiated: its stochastic rounding needs a key."""
    if recipe is not None and draws(recipe) and seed is None:
        raise ValueError(
            message(
                op,
                "key",
                None,
                "a JAX key where the layer is differentiated",
                "backward_mode='default' rounds dy stochastically",
                "key=jax.random.key(0) (linen: rngs={'sr': key}; nnx: nnx.Rngs(0, sr=1), nnx.jit and nnx.grad for "
                "jax's, nnx.merge(..., copy=True)), stochastic_rounding=False, or backward_mode='unquant'",
            )
        )


def _high_precision(x, kernel, bias, y_dtype):
    """The plain product, in x's dtype. A quantized kernel takes part with its dequantized values."""
    if is_frozen(kernel):
        rows = jnp.asarray(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])
        y = matmul(rows, _modes.along_k(kernel), preferred_element_type=y_dtype)
        y = y.reshape(*x.shape[:-1], y.shape[-1])
    else:
        y = jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=y_dtype)
    return y if bias is None else y + along_last(bias.astype(y_dtype), y.ndim)


def frozen_format(kernel: Any) -> str:
    """For the report: "" for a kernel that is an array."""
    return _modes.along_k(kernel).format if is_frozen(kernel) else ""


def kernel_dtype(kernel: Any):
    return _modes.along_k(kernel).dtype if is_frozen(kernel) else kernel.dtype


# --- checks, of the layers made of `affine` ---


def check_x(op: str, x) -> None:
    check_float(op, "x", x)
    if x.ndim == 0:
        raise ValueError(message(op, "x", "a scalar", "[..., k]", "its last axis is contracted", "x[None]"))


def check_kernel(op: str, name: str, kernel: Any, of: str, rows: int, grouped: bool) -> tuple[int, ...]:
    """The shape of a kernel [k, n], or [g, k, n], whose k is the last axis of what `of` names."""
    if is_frozen(kernel):
        _check_frozen(op, name, kernel, grouped)
    else:
        check_float(op, name, kernel)
    shape = _modes.along_k(kernel).shape if is_frozen(kernel) else kernel.shape
    if len(shape) != 2 + grouped:
        needs, why = ("[g, k, n]", "each group has a matrix") if grouped else ("[k, n]", "it is one matrix")
        fix = "jnp.stack of the matrices" if grouped else "jax_fp4.grouped_dense or jax.vmap for stacked kernels"
        raise ValueError(message(op, name, f"of shape {shape}", needs, why, fix))
    if shape[-2] != rows:
        fix = f"a kernel of shape {(*shape[:-2], rows, shape[-1])}"
        raise ValueError(
            message(op, name, f"of shape {shape}", f"{rows} rows", f"{of} is contracted along its last axis", fix)
        )
    return shape


def check_bias(op: str, name: str, bias, shape: tuple[int, ...]) -> None:
    """A bias [n], or [g, n], for a kernel of `shape`; or None."""
    if bias is None:
        return
    check_float(op, name, bias)
    need = (*shape[:-2], shape[-1])
    if bias.shape != need:
        why = "it is added to every row of y" + (" of its group" if len(need) > 1 else "")
        raise ValueError(message(op, name, f"of shape {bias.shape}", f"{need}", why, f"{name}=None"))


def _check_frozen(op: str, name: str, kernel, grouped: bool) -> None:
    pair = kernel if isinstance(kernel, tuple) else (None, kernel)
    if len(pair) != 2 or (isinstance(kernel, tuple) and not all(isinstance(q, QuantizedTensor) for q in pair)):
        needs, why = "the pair (blocked along n, blocked along k)", "these are the two planes of a frozen kernel"
        raise TypeError(message(op, name, "a tuple", needs, why, "quantize_transpose(w)"))
    batch = ", batch_dims=1" if grouped else ""
    for q, axis in zip(pair, (-1, 0), strict=True):
        if q is None:
            continue
        check_quantized(op, name, q)
        amax = q.amax if q.format == "nvfp4" else q.block_scale
        own_amax = not grouped or (len(q.shape) == 3 and amax.shape[:1] == q.shape[:1])
        if q.axis != axis or q.hadamard or q.row_scaled or q.grouped or not own_amax:
            shown = f"{q!r}{' (Hadamard-transformed)' if q.hadamard else ''}"
            needs = f"axis={axis}, one amax{' for each group' if grouped else ''} and no transform"
            fix = f"quantize(w, axis=0{batch}), or the pair quantize_transpose(w{batch})"
            raise ValueError(message(op, name, shown, needs, "the forward contracts k", fix))
    if pair[0] is not None and pair[0].shape != pair[1].shape:
        shown = f"a pair of shapes {pair[0].shape} and {pair[1].shape}"
        why, fix = "they are two planes of one kernel", f"quantize_transpose(w{batch})"
        raise ValueError(message(op, name, shown, "one shape", why, fix))


def check_padding(
    op: str, recipe: Recipe | None, k: int, n: int, m: int | None = None, names: tuple[str, str] = ("x", "kernel")
) -> None:
    """Under strict(), every extent that the forward or the backward would pad, said at the forward. The rows of groups
    are data, and padded as they come. names: of the arguments with the extents k and n."""
    if recipe is None or not is_strict():
        return
    extents = {names[0]: k, names[1]: n, "x (rows)": m}
    products: tuple[tuple[str, Product, Operand], ...] = (
        (names[0], "forward", "x"),
        (names[1], "dgrad", "dy"),
        ("x (rows)", "wgrad", "dy"),
    )
    for name, product, operand in products:
        scaling, extent = scaling_of(recipe, product, operand), extents[name]
        if scaling is not None and extent is not None and extent % scaling.length:
            refuse_padding(op, name, f"extent {extent}", scaling.length)
