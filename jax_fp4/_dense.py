"""dense: y = x w + b with NVFP4 operands, one custom_vjp from quantization to product."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from jax_fp4 import _modes, _record
from jax_fp4._arguments import check_float, check_quantized, float_dtype, key_words
from jax_fp4._array import QuantizedTensor
from jax_fp4._errors import is_strict, message
from jax_fp4._formats import BLOCK
from jax_fp4._modes import Kernel, Needs, Residuals, is_frozen
from jax_fp4._ops import refuse_padding
from jax_fp4._products import along_last, is_primal, matmul, product, refuse_perturbed
from jax_fp4._recipe import BackwardMode, Recipe, RecipeChoice, resolve, why_unquantized


class _Static(NamedTuple):
    """What the forward captures for the backward: a later context changes nothing."""

    recipe: Recipe
    dtype: np.dtype  # of x, and of every high-precision product
    y_dtype: np.dtype
    kernel_dtype: np.dtype
    bias_dtype: np.dtype | None


def dense(
    x: Any, kernel: Any, bias: Any = None, *, recipe: RecipeChoice | None = None, key=None, preferred_element_type=None
) -> Float[Array, "*b n"]:
    """y = x w + b: x [..., k], kernel [k, n], bias [n] -> y [..., n] in x's dtype, which is the compute dtype.

    kernel: an array (float32 master weights are rounded to x's dtype on the way) or, frozen, a QuantizedTensor blocked
    along k (`quantize(w, axis=0)`) or the pair `quantize_transpose(w)`; differentiating a frozen kernel raises.
    recipe: None takes autocast's, HIGH_PRECISION none. Without a recipe this is the plain product.
    key: the JAX key of stochastic rounding, needed where a recipe that rounds dy stochastically is differentiated.
    preferred_element_type: y's dtype, rounded once from the float32 sum, if not x's.

    The three products and what is kept for them follow the recipe's backward mode. dx has x's dtype, dw and db those of
    their parameters; db is always the sum of the unquantized dy. Nothing is computed or kept for an operand that
    nobody differentiates. Raises TypeError, ValueError or UnsupportedError for what is not described here.
    """
    op = "dense"
    chosen = resolve(op, recipe)
    _check(op, x, kernel, bias)
    k, n = _modes.along_k(kernel).shape if is_frozen(kernel) else kernel.shape
    reason = why_unquantized(recipe) if chosen is None else ""
    _record.record(_record.LayerEvent(_record.path(), op, x.shape, (k, n), chosen, reason))
    y_dtype = x.dtype
    if preferred_element_type is not None:
        y_dtype = float_dtype(op, "preferred_element_type", preferred_element_type, "y is written in it")
    if chosen is None:
        return _high_precision(x, kernel, bias, y_dtype)
    rows = x.reshape(math.prod(x.shape[:-1]), k)  # not -1: k may be 0
    if is_strict():
        _refuse_padding(op, chosen, rows.shape[0], k, n)
    seed = None if key is None else key_words(op, key)
    static = _Static(
        chosen,
        x.dtype,
        y_dtype,
        _modes.along_k(kernel).dtype if is_frozen(kernel) else kernel.dtype,
        None if bias is None else bias.dtype,
    )
    y: Any = _dense(rows, kernel, bias, seed, static)
    return y.reshape(*x.shape[:-1], n)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _dense(x: Float[Array, "m k"], kernel: Kernel, bias: Float[Array, " n"] | None, seed, static: _Static):
    qx, qw = _modes.operands(x, kernel, static.recipe, Needs(False, False))
    return product(qx.forward, qw.forward, static.y_dtype, bias)  # [m,n] = [m,k] @ [k,n]


def _dense_fwd(x: Any, kernel: Any, bias, seed, static: _Static):
    """Residuals for what is differentiated, and the errors that only differentiation can make."""
    if is_frozen(kernel):
        refuse_perturbed("dense", "kernel", kernel)
    needs = Needs(x.perturbed, not is_frozen(kernel) and kernel.perturbed)
    x, kernel, bias, seed = jax.tree.map(lambda leaf: leaf.value, (x, kernel, bias, seed), is_leaf=is_primal)
    recipe = static.recipe
    if recipe.mode is BackwardMode.DEFAULT and recipe.stochastic_rounding and any(needs) and seed is None:
        raise ValueError(
            message(
                "dense",
                "key",
                None,
                "a JAX key where the layer is differentiated",
                "backward_mode='default' rounds dy stochastically",
                "key=jax.random.key(0) (linen: rngs={'sr': key}; nnx: nnx.Rngs(0, sr=1), nnx.jit and nnx.grad for "
                "jax's, nnx.merge(..., copy=True)), stochastic_rounding=False, or backward_mode='unquant'",
            )
        )
    qx, qw = _modes.operands(x, kernel, recipe, needs)
    y = product(qx.forward, qw.forward, static.y_dtype, bias)  # [m,n] = [m,k] @ [k,n]
    return y, _modes.residuals(x, kernel, seed, qx, qw, recipe, needs)


def _dense_bwd(static: _Static, residuals: Residuals, dy):
    """dy arrives in high precision. default quantizes it once, for both products; the other modes use it as it is,
    beside high-precision operands (unquant) or the values the forward multiplied (dequant)."""
    if isinstance(dy, SymbolicZero):
        return None, None, None, None
    needs = Needs(_modes.is_kept(residuals.kernel), _modes.is_kept(residuals.x))
    rounded = along_n = along_m = dy.astype(static.dtype)  # y may be wider than the compute dtype
    if static.recipe.mode is BackwardMode.DEFAULT and any(needs):
        along_n, along_m = _modes.quantize_gradient(rounded, static.recipe, residuals.seed, needs)
    dx = _modes.input_gradient(along_n, residuals.kernel, static.dtype) if needs.x else None
    dw = _modes.weight_gradient(residuals.x, along_m, static.kernel_dtype) if needs.kernel else None
    db = None if static.bias_dtype is None else jnp.sum(dy, 0, dtype=jnp.float32).astype(static.bias_dtype)
    return dx, dw, db, None


_dense.defvjp(_dense_fwd, _dense_bwd, symbolic_zeros=True)


def _high_precision(x, kernel, bias, y_dtype):
    """The plain product, in x's dtype. A quantized kernel takes part with its dequantized values."""
    if is_frozen(kernel):
        y = matmul(x, _modes.along_k(kernel), preferred_element_type=y_dtype)
    else:
        y = jnp.matmul(x, kernel.astype(x.dtype), preferred_element_type=y_dtype)
    return y if bias is None else y + along_last(bias.astype(y_dtype), y.ndim)


# --- checks ---


def _check(op: str, x, kernel: Any, bias) -> None:
    check_float(op, "x", x)
    if x.ndim == 0:
        raise ValueError(message(op, "x", "a scalar", "[..., k]", "its last axis is contracted", "x[None]"))
    if is_frozen(kernel):
        _check_frozen(op, kernel)
    else:
        check_float(op, "kernel", kernel)
    shape = _modes.along_k(kernel).shape if is_frozen(kernel) else kernel.shape
    if len(shape) != 2:
        raise ValueError(
            message(op, "kernel", f"of shape {shape}", "[k, n]", "it is one matrix", "jax.vmap for stacked kernels")
        )
    k, n = shape
    if x.shape[-1] != k:
        raise ValueError(
            message(
                op,
                "kernel",
                f"of shape {shape}",
                f"{x.shape[-1]} rows",
                f"x {x.shape} is contracted along its last axis",
                f"a kernel of shape ({x.shape[-1]}, {n})",
            )
        )
    if bias is not None:
        check_float(op, "bias", bias)
        if bias.shape != (n,):
            raise ValueError(
                message(op, "bias", f"of shape {bias.shape}", f"({n},)", "it is added to every row of y", "bias=None")
            )


def _check_frozen(op: str, kernel) -> None:
    pair = kernel if isinstance(kernel, tuple) else (None, kernel)
    if len(pair) != 2 or (isinstance(kernel, tuple) and not all(isinstance(q, QuantizedTensor) for q in pair)):
        raise TypeError(
            message(
                op,
                "kernel",
                "a tuple",
                "the pair (blocked along n, blocked along k)",
                "these are the two planes of a frozen kernel",
                "quantize_transpose(w)",
            )
        )
    for q, axis in zip(pair, (-1, 0), strict=True):
        if q is not None:
            check_quantized(op, "kernel", q)
        if q is not None and (q.axis != axis or q.hadamard or q.row_scaled):
            raise ValueError(
                message(
                    op,
                    "kernel",
                    f"{q!r}{' (Hadamard-transformed)' if q.hadamard else ''}",
                    f"axis={axis}, one amax and no transform",
                    "the forward contracts k",
                    "quantize(w, axis=0), or the pair quantize_transpose(w)",
                )
            )
    if pair[0] is not None and pair[0].shape != pair[1].shape:
        raise ValueError(
            message(
                op,
                "kernel",
                f"a pair of shapes {pair[0].shape} and {pair[1].shape}",
                "one shape",
                "they are two planes of one matrix",
                "quantize_transpose(w)",
            )
        )


def _refuse_padding(op: str, recipe: Recipe, m: int, k: int, n: int) -> None:
    """Under strict(), every extent that the forward or the backward would pad, said at the forward."""
    extents = {"x": k, **({"kernel": n, "x (rows)": m} if recipe.mode is BackwardMode.DEFAULT else {})}
    for name, extent in extents.items():
        if extent % BLOCK:
            refuse_padding(op, name, f"extent {extent}")
