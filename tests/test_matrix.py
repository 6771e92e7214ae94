"""Every recipe in every mode, layer and dtype, with and without bias, kernels frozen or not, of every rank: y and the
gradients equal explicit products (explicit.py) of the captured operands, or the refusal that matrix.py lists is raised.

Of compositions the operands between the stages (what a norm or an activation made, and the cotangents there) are taken
from the same functions in single steps: the norm, `dense` or `grouped_dense`, which have cells of their own, and the
activation. Then every product is explicit again.
"""

import functools
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explicit import Products, Scales, products, wide
from flax import nnx as flax_nnx
from matrix import (
    DTYPES,
    EXTENTS,
    FACTORS,
    PAIRS,
    RECIPES,
    REFUSED,
    THIN,
    Cell,
    committed,
    each_refusal,
    is_cell,
    pairs_of,
    parts_of_whole,
    refusal,
    wanted_pairs,
    whole,
    written,
)
from products import error_of

import jax_fp4 as fp4
from jax_fp4 import delayed, linen, nnx

KEY = jax.random.key(7)
GROUPS = 3


# --- operands ---


@functools.cache
def normal(name: str, shape: tuple[int, ...], dtype) -> jax.Array:
    """The same values wherever a test asks for them."""
    drawn = np.random.default_rng([ord(c) for c in name]).standard_normal(shape)
    return jnp.asarray(drawn.astype(dtype))


@functools.cache
def eye(k: int) -> jax.Array:
    return jnp.asarray(np.eye(k, dtype=np.float32))


@functools.cache
def state_with_history(shape: tuple[int, ...], length: int) -> delayed.State:
    """Scales that saturate some values of x and of dy and none of w, and that differ between experts."""
    rng = np.random.default_rng(5)

    def one(scale):
        spread = np.asarray(scale * 1.25 ** np.arange(math.prod(shape)), np.float32).reshape(shape)
        return delayed.Delayed(jnp.asarray(rng.random((*shape, length)).astype(np.float32)), jnp.asarray(spread))

    return delayed.State(one(200.0), one(61.0), one(30000.0), jnp.zeros((), jnp.float32))


class Call(NamedTuple):
    """A layer as a function of named arrays, and what is differentiated."""

    layer: Any
    arrays: dict
    free: tuple[str, ...]
    dy: jax.Array
    recipe: Any
    sizes: tuple[int, ...] | None
    states: tuple


def frozen(cell: Cell, w, dtype):
    flags = dict(dtype=dtype, batch_dims=w.ndim - 2) | cell.frozen_format
    length = {"mxfp8": 32, "float8_block": 128}.get(flags.get("format"), 16)
    match cell.wanted:
        case "frozen pair":
            return fp4.quantize_transpose(w, **flags)
        case "frozen tiles":
            return fp4.quantize(w, axis=0, block=(length, length), **flags)
        case _:
            return fp4.quantize(w, axis=0, **flags)


def kernels(cell: Cell) -> dict[str, tuple[int, ...]]:
    """Names and shapes."""
    _, k, n, _ = EXTENTS[cell.extents]
    groups = (GROUPS,) if cell.is_grouped else ()
    if cell.layer.endswith("mlp"):
        return dict(w_in=(*groups, k, 2 * k), w_out=(*groups, k, n))
    return dict(kernel=(*groups, k, n))


def call_of(cell: Cell) -> Call:
    m, k, n, sizes = EXTENTS[cell.extents]
    dtype, kernel_dtype = DTYPES[cell.dtype]
    recipe = RECIPES[cell.recipe].make(cell.mode)
    shape = {"0": (), "1": (), "2": (m,), "3": (m // 5, 5)}[cell.rank]
    if cell.rank in "01":
        sizes = (0, 1, 0)
    arrays = dict(x=normal("x", shape if cell.rank == "0" else (*shape, k), dtype))
    weights = {name: normal(name, s, kernel_dtype) * k**-0.5 for name, s in kernels(cell).items()}
    biases = {}
    if cell.bias == "bias":
        for name, w in weights.items():
            shape_of_bias = (*w.shape[:-2], w.shape[-1])
            biases[name.replace("kernel", "bias").replace("w_", "b_")] = normal(f"b{name}", shape_of_bias, kernel_dtype)
    if cell.layer.startswith("layernorm"):
        biases |= {name: normal(name, (k,), kernel_dtype) for name in ("scale", "norm_bias")}
    free = {"x": ("x",), "w": tuple(weights), "x and w": ("x", *weights)}.get(cell.wanted, ("x",))
    if cell.is_frozen:
        weights = {name: frozen(cell, w, dtype) for name, w in weights.items()}
        free = tuple(weights) if cell.wanted == "the frozen kernel" else free
    groups = (GROUPS,) if cell.is_grouped else ()
    states = ()
    how = dict(recipe=recipe, key=KEY)
    if cell.recipe == "delayed":
        states = tuple(state_with_history(groups, recipe.amax_history_len) for _ in weights)
        how["state"] = states if len(states) == 2 else states[0]
    if cell.is_grouped:
        how["group_sizes"] = jnp.int32(sizes)
    thin = cell.layer in THIN
    layer = (
        partial(THIN_LAYERS[cell.layer], recipe, how.get("state")) if thin else partial(getattr(fp4, cell.layer), **how)
    )
    if cell.layer == "layernorm_dense" and cell.bias == "none":
        layer = partial(layer, bias=None)
    dy = normal("dy", (*shape, n), dtype)
    return Call(layer, arrays | weights | biases, (*free, *biases), dy, recipe, sizes if groups else None, states)


# --- dense, in other people's signatures ---


def linen_dense(recipe, state, x, kernel, bias=None):
    module = linen.Dense(kernel.shape[1], bias is not None, x.dtype, kernel.dtype, recipe=recipe)
    params = {"kernel": kernel} | ({} if bias is None else {"bias": bias})
    states = {} if state is None else {linen.STATES: {"state": state}}
    return module.apply({"params": params} | states, x, rngs={"sr": KEY})


def nnx_linear(recipe, state, x, kernel, bias=None):
    how = dict(dtype=x.dtype, param_dtype=kernel.dtype, rngs=flax_nnx.Rngs(0), recipe=recipe)
    layer = nnx.Linear(*kernel.shape, use_bias=bias is not None, **how)
    layer.kernel[...] = kernel
    if bias is not None:
        layer.bias[...] = bias
    if state is not None:
        layer.state = nnx.DelayedState(state)
    return layer(x, key=KEY)


def dot_general(recipe, state, x, kernel):
    # Cast as Flax does for its dot_general; of two dtypes lax would take the wider.
    kernel = kernel.astype(x.dtype) if isinstance(kernel, jax.Array) else kernel
    return fp4.DotGeneral(recipe, KEY, state)(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


THIN_LAYERS = {"linen.Dense": linen_dense, "nnx.Linear": nnx_linear, "DotGeneral": dot_general}


@functools.cache
def key_of(layer: str):
    """Linen folds the path of the module into its stream."""
    if layer != "linen.Dense":
        return KEY
    return linen.Dense(1).apply({}, rngs={"sr": KEY}, method=lambda module: module.make_rng("sr"))


# --- what must come out ---


def scales(states, i: int) -> Scales | None:
    return Scales(*(np.asarray(getattr(states[i], n).scale) for n in ("x", "kernel", "dy"))) if states else None


def rows(a):
    """[m, k] in NumPy."""
    a = np.asarray(a)
    return a.reshape(math.prod(a.shape[:-1]), a.shape[-1])


def with_bias(y, bias, sizes):
    if bias is None:
        return y
    bias = wide(bias)
    if sizes is None:
        return y + bias
    each = np.repeat(bias, sizes, axis=0)
    return y + np.pad(each, ((0, len(y) - len(each)), (0, 0)))


def expected(cell: Cell, call: Call) -> dict[str, np.ndarray]:
    """By name, y and every gradient there may be, in float64."""
    arrays, x, norm = dict(call.arrays), call.arrays["x"], None
    if cell.layer.startswith("layernorm"):
        # Times the unit matrix in high precision, it is the norm alone: as it was rounded, and exact.
        def norm(x, scale, norm_bias):
            return fp4.layernorm_dense(x, scale, norm_bias, eye(x.shape[-1]), recipe=fp4.HIGH_PRECISION)

        x, pull_norm = jax.vjp(norm, x, arrays["scale"], arrays["norm_bias"])
    if cell.layer.endswith("mlp"):
        result = expected_mlp(cell, call, x)
    else:
        found = products(cell.meaning, rows(x), arrays["kernel"], rows(call.dy), sizes=call.sizes,
                         key=key_of(cell.layer), scales=scales(call.states, 0))  # fmt: skip
        y = with_bias(found.y, arrays.get("bias"), call.sizes)
        result = dict(y=y, x=found.dx, kernel=found.dw, bias=found.db)
    if norm is not None:
        made = pull_norm(jnp.asarray(result["x"].reshape(x.shape).astype(x.dtype)))
        result |= zip(("x", "scale", "norm_bias"), map(np.asarray, made), strict=True)
    return result


def expected_mlp(cell: Cell, call: Call, x) -> dict[str, np.ndarray]:
    """Both products explicit, of captured operands between them."""
    arrays, dtype, keys = call.arrays, x.dtype, [jax.random.fold_in(KEY, i) for i in (0, 1)]

    def alone(i, x, kernel, bias):
        how = dict(recipe=call.recipe, key=keys[i], state=call.states[i] if call.states else None)
        if call.sizes is None:
            return fp4.dense(x, kernel, bias, **how)
        return fp4.grouped_dense(x, kernel, jnp.int32(call.sizes), bias, **how)

    flat = jnp.asarray(rows(x))
    h = alone(0, flat, arrays["w_in"], arrays.get("b_in"))
    values, pull_activation = jax.vjp(fp4.Activation("swiglu"), h.astype(jnp.float32))
    a = values.astype(dtype)
    da = jax.vjp(lambda a: alone(1, a, arrays["w_out"], arrays.get("b_out")), a)[1](jnp.asarray(rows(call.dy)))[0]
    dh = pull_activation(da.astype(jnp.float32))[0].astype(dtype)

    def explicit(i, x, kernel, dy) -> Products:
        return products(cell.meaning, np.asarray(x), kernel, np.asarray(dy), sizes=call.sizes, key=keys[i],
                        scales=scales(call.states, i))  # fmt: skip

    first = explicit(0, flat, arrays["w_in"], dh)
    second = explicit(1, a, arrays["w_out"], rows(call.dy))
    y = with_bias(second.y, arrays.get("b_out"), call.sizes)
    return dict(y=y, x=first.dx, w_in=first.dw, b_in=first.db, w_out=second.dw, b_out=second.db)


def tolerance(cell: Cell, name: str, dtype) -> float:
    """Half an ulp of what is narrow, and 1e-6 for the order of summation. Gradients through a norm pass two such
    roundings, of which a few may fall to the other side."""
    half = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
    compute = half[jnp.dtype(DTYPES[cell.dtype][0]).name]
    bound = 1e-6 + half[jnp.dtype(dtype).name]
    if cell.layer == "DotGeneral" and name == "kernel":
        bound = 1e-6 + compute  # its gradient too passes the cast
    if cell.recipe == "no recipe" and name == "y" and cell.bias == "bias":
        bound += compute  # the bias is added as Flax adds it, after the rounding of the product
    if cell.recipe == "no recipe" and name not in ("x", "y"):
        bound += 4 * compute  # and gradients of parameters are summed up and rounded as autodiff does, then cast
    if cell.layer.startswith("layernorm") and name in ("x", "scale", "norm_bias"):
        bound = 2 * bound + compute
    return bound


def run(cell: Cell) -> None:
    """Compute it and its explicit products, or see it refused."""
    if why := refusal(cell):
        refused = REFUSED[why]
        with pytest.raises(refused.error, match=refused.says):
            got_of(call_of(cell))
        return
    call = call_of(cell)
    got, want = got_of(call), expected(cell, call)
    assert got["y"].dtype == call.dy.dtype
    for name, a in got.items():
        assert name == "y" or (a.dtype == call.arrays[name].dtype and a.shape == call.arrays[name].shape)
        error, bound = error_of(a, want[name].reshape(a.shape)), tolerance(cell, name, a.dtype)
        assert error <= bound, f"{name} of {cell}: off by {error:.2e}, {bound:.2e} is allowed"


def got_of(call: Call) -> dict:
    fixed = {name: a for name, a in call.arrays.items() if name not in call.free}
    free = {name: a for name, a in call.arrays.items() if name in call.free}
    y, pull = jax.vjp(lambda free: call.layer(**fixed, **free), free)
    return {"y": y} | pull(call.dy)[0]


def by_program(cell: Cell):
    """Neighbours share what is compiled."""
    return cell.extents, cell.dtype, cell.rank == "1", cell.recipe


@pytest.mark.parametrize("cell", sorted(committed(), key=by_program), ids=str)
def test_cell(cell):
    run(cell)


@pytest.mark.full
@pytest.mark.parametrize("part", parts_of_whole(), ids=" | ".join)
def test_whole(part):
    """All cells of a recipe, mode and layer; every one that fails is named."""
    failed = []
    for cell in sorted(whole(*part), key=by_program):
        try:
            run(cell)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001
            failed.append(f"{cell}: {type(error).__name__}: {error}".splitlines()[0])
    assert not failed, "\n".join(failed)


# --- the matrix itself ---


def test_the_committed_cells_cover_every_pair():
    """Of levels that a cell which runs can hold; a refused cell covers none. And every refusal, in each layer."""
    cells = committed()
    covered = set().union(*(pairs_of(c) for c in cells if refusal(c) is None))
    missing = [sorted(pair) for pair in wanted_pairs() if pair not in covered]
    assert not missing, f"not covered: {missing[:5]}; `python tests/matrix.py` writes {PAIRS.name}"
    refused = {(refusal(c), c.layer) for c in cells} - {(None, c.layer) for c in cells}
    assert refused == {(refusal(c), c.layer) for c in each_refusal()} and {why for why, _ in refused} == set(REFUSED)


def test_the_committed_cells_are_cells():
    cells = committed()
    assert len(set(cells)) == len(cells)
    for cell in cells:
        assert all(level in FACTORS[name] for name, level in cell._asdict().items()), cell
        assert is_cell(cell), cell


def test_the_committed_file_is_what_is_written():
    assert PAIRS.read_text() == written(), "`python tests/matrix.py` writes it anew"
