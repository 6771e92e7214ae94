"""grouped_mlp: equal to its composition of grouped_dense and the activation, with less kept."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_layers import (
    KEY,
    MODES,
    NONE,
    close,
    gradients,
    in_numpy,
    kept,
    nbytes,
    normal,
    packed,
    poisoned,
    quantizations,
    recipe,
)
from grouping import group_sizes, slices, total
from hypothesis import example, given
from products import refused
from trees import same_tree

import jax_fp4 as fp4

M, K, H, N, G = 70, 24, 40, 10, 3  # h has 40 columns, the second input 20 behind a gate and else 40
F = H // 2
ALL = (*MODES, NONE)
SIZES = jnp.int32([17, 0, 41])  # and a tail of 12
ARRAYS = dict(
    x=normal(1, M, K), w_in=normal(2, G, K, H) / 4, w_out=normal(3, G, F, N), b_in=normal(4, G, H),
    b_out=normal(5, G, N), probs=jax.random.uniform(jax.random.key(6), (M,)),
)  # fmt: skip
W_IN, W_OUT, DY = ARRAYS["w_in"], ARRAYS["w_out"], normal(7, M, N)
ROWS = ("y", "x", "probs")

ACTIVATIONS = {
    "swiglu": {},
    "geglu": dict(probs=None),
    "clamped_qgeglu": dict(b_in=None, b_out=None),
    "situ_glu": dict(b_out=None),
    "silu": {},
    "gelu": dict(b_in=None),
    "relu": dict(probs=None, b_out=None),
    "squared_relu": dict(b_in=None, b_out=None, probs=None),
}  # and what is absent beside each


@cache
def mlp(activation, first, second):
    """arrays, dy, sizes -> y and gradients, in NumPy: one program for all sizes."""
    layer = partial(fp4.grouped_mlp, activation=activation, recipe=first, out_recipe=second, key=KEY)
    return in_numpy(jax.jit(lambda arrays, dy, sizes: gradients(partial(layer, group_sizes=sizes), dy, **arrays)))


PRODUCT = jax.jit(fp4.grouped_dense, static_argnames="recipe")


def composition(arrays, dy, sizes, activation, first, second):
    """The same of grouped_dense and the activation: p (a W + b) = (p a) W + p b."""
    member = np.zeros((M, G), np.float32)
    for e, rows in enumerate(slices(sizes, M)):
        member[rows, e] = 1

    def layer(x, w_in, w_out, b_in, b_out, probs):
        none_in, none_out = jnp.zeros((G, H)), jnp.zeros((G, N))  # add nothing: few programs have it all
        weighted = probs is not None and b_out is not None
        h = PRODUCT(x, w_in, sizes, none_in if b_in is None else b_in, recipe=first, key=jax.random.fold_in(KEY, 0))
        a = activation(h.astype(jnp.float32))
        a = (a if probs is None else a * probs[:, None]).astype(x.dtype)
        bias = none_out if b_out is None or weighted else b_out
        y = PRODUCT(a, w_out, sizes, bias, recipe=second, key=jax.random.fold_in(KEY, 1))
        return y + probs[:, None] * (member @ b_out) if weighted else y

    return in_numpy(gradients)(layer, dy, **arrays)


def check(arrays, sizes, activation, first, second):
    """Equal to the composition, of which nothing sees the tail; the tail and what belongs to no row exactly zero."""
    bad = {n: poisoned(a, sizes, np.nan) if n in ROWS and a is not None else a for n, a in arrays.items()}
    got = mlp(activation, first, second)(bad, poisoned(DY, sizes, np.inf), sizes)
    clean = {n: poisoned(a, sizes, 0) if n in ROWS and a is not None else a for n, a in arrays.items()}
    act = activation if isinstance(activation, fp4.Activation) else fp4.Activation(activation)
    close(got, composition(clean, poisoned(DY, sizes, 0), sizes, act, first, second), 2e-6)
    for name, a in got.items():
        if name in ROWS:
            assert not a[total(sizes, M) :].any(), name
        else:
            assert not any(a[e].any() for e, r in enumerate(slices(sizes, M)) if r.start >= r.stop), name


EVEN, ODD = ("default", "dequant"), ("unquant", NONE)
MODES_OF = dict(
    geglu=EVEN, clamped_qgeglu=ODD, situ_glu=EVEN, silu=ALL, gelu=ODD, relu=EVEN, squared_relu=ODD
)  # swiglu: below


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=pytest.mark.core if name == "silu" else ())
        for name, modes in MODES_OF.items()
        for mode in modes
    ],
)
def test_equals_the_composition(name, mode):
    """Every activation, in every mode one with a gate and one without, and every pair of modes; each product rounds
    with a key of its own."""
    second = recipe(ALL[(list(ACTIVATIONS).index(name) + ALL.index(mode)) % 4])
    activation = fp4.Activation(name, limit=1.5) if name == "clamped_qgeglu" else name
    arrays = ARRAYS | ACTIVATIONS[name]
    if not fp4.Activation(name).gated:
        arrays |= dict(w_out=normal(3, G, H, N))
    check(arrays, np.asarray(SIZES), activation, recipe(mode), second)


@pytest.mark.parametrize("mode", ALL)
@given(sizes=group_sizes(G, M))
@example(sizes=np.int32([0, 0, 0]))
@example(sizes=np.int32([16, 17, 37]))
def test_any_sizes(mode, sizes):
    """C1-C8, C14."""
    check(ARRAYS, sizes, "swiglu", recipe(mode), recipe(mode))


@pytest.mark.core
@pytest.mark.parametrize("mode", ["default", "unquant"])
def test_frozen_kernels(mode):
    """One by tiles, one as the pair."""
    arrays = ARRAYS | dict(
        w_in=fp4.quantize(ARRAYS["w_in"], axis=0, block=(16, 16), batch_dims=1),
        w_out=fp4.quantize_transpose(ARRAYS["w_out"], batch_dims=1),
    )
    check(arrays, np.asarray(SIZES), "swiglu", recipe(mode), recipe(mode))


@pytest.mark.core
def test_unquantized_gradient_is_that_of_each_expert_written_out():
    def written(x, w_in, w_out, b_in, b_out, probs):
        parts = []
        for e, r in enumerate((slice(0, 17), slice(0), slice(17, 58))):
            gate, linear = jnp.split(x[r] @ w_in[e] + b_in[e], 2, axis=-1)
            parts.append(probs[r, None] * ((jax.nn.silu(gate) * linear) @ w_out[e] + b_out[e]))
        return jnp.concatenate([*parts, jnp.zeros((M - 58, N))])

    want = in_numpy(jax.jit(partial(gradients, written)))(DY, **ARRAYS)
    close(mlp("swiglu", recipe(NONE), recipe(NONE))(ARRAYS, DY, SIZES), want, 1e-5)


def test_one_group_no_rows_and_leading_axes():
    """C4, C5: g = 1 with a tail; m = 0; the leading axes of x and of probs are rows."""
    step = mlp("swiglu", recipe("default"), recipe("default"))
    got = step(ARRAYS, DY, jnp.int32([17, 0, 0]))
    one = {n: a if n in ROWS else a[:1] for n, a in ARRAYS.items()}
    one |= {n: ARRAYS[n].reshape(2, 35, *ARRAYS[n].shape[1:]) for n in ("x", "probs")}
    found = step(one, DY.reshape(2, 35, N), jnp.int32([17]))
    assert found["y"].shape == (2, 35, N)
    close({n: found[n].reshape(-1, *got[n].shape[1:]) for n in got},
          {n: a if n in ROWS else a[:1] for n, a in got.items()})  # fmt: skip
    none = step({n: a[:0] if n in ROWS else a for n, a in ARRAYS.items()}, DY[:0], SIZES)
    assert none["y"].shape == (0, N) and none["x"].shape == (0, K)
    assert not any(none[n].any() for n in ("w_in", "w_out", "b_in", "b_out"))


# --- the recipe is the forward's ---

JITTED = jax.jit(partial(fp4.grouped_mlp, group_sizes=SIZES, key=KEY))  # its recipes are autocast's
WITHOUT = {part: {n: a for n, a in ARRAYS.items() if n != part} for part in ARRAYS}


@pytest.mark.core
@pytest.mark.parametrize("mode", ALL)
def test_a_later_forward_changes_nothing(mode):
    """Other forwards, with another recipe and with none, come between a forward and its backward. One jitted function:
    vjp in w_out, vjp in x, then the first backward: one residual tree whatever is differentiated."""
    in_w, in_x = (partial(lambda a, n: JITTED(**WITHOUT[n], **{n: a}), n=n) for n in ("w_out", "x"))
    with fp4.autocast(recipe(mode)):
        y, pull_w = jax.vjp(in_w, ARRAYS["w_out"])
        pull_x = jax.vjp(in_x, ARRAYS["x"])[1]
    for context in (recipe("dequant" if mode == "unquant" else "unquant"), None):
        with fp4.autocast(context):
            JITTED(**ARRAYS)
            got = pull_w(DY)[0]
    want = mlp("swiglu", recipe(mode), recipe(mode))(ARRAYS, DY, SIZES)
    close({"y": y, "w_out": got}, {n: want[n] for n in ("y", "w_out")}, 2e-6)
    close(pull_x(DY)[0], want["x"], 2e-6)
    with fp4.autocast(recipe(mode)):
        same_tree(got, jax.vjp(in_w, ARRAYS["w_out"])[1](DY)[0])


@pytest.mark.core
def test_one_jitted_function_under_contexts_a_b_none_a():
    a, b = recipe("unquant"), recipe("unquant", two_dimensional_weights=False)
    explicit = jax.jit(partial(fp4.grouped_mlp, group_sizes=SIZES), static_argnames="recipe")
    want = {chosen: explicit(**ARRAYS, recipe=chosen) for chosen in (a, b, fp4.HIGH_PRECISION)}
    assert not np.array_equal(want[a], want[b])
    for context in (a, b, None, a):
        with fp4.autocast(context):
            close(JITTED(**ARRAYS), want[context or fp4.HIGH_PRECISION], 2e-6)


def test_out_recipe_is_that_of_the_second_product_alone():
    """Without one, recipe is of both; HIGH_PRECISION beside autocast means none."""
    layer = jax.jit(partial(fp4.grouped_mlp, group_sizes=SIZES), static_argnames=("recipe", "out_recipe"))
    q, high = recipe("unquant"), fp4.HIGH_PRECISION
    y = {
        pair: np.asarray(layer(**ARRAYS, recipe=pair[0], out_recipe=pair[1])) for pair in ((q, q), (q, high), (high, q))
    }
    same_tree(layer(**ARRAYS, recipe=q), y[q, q])
    with fp4.autocast(q):
        same_tree(layer(**ARRAYS, out_recipe=high), y[q, high])
    assert len({a.tobytes() for a in y.values()}) == 3


# --- what is kept, and what is computed (D8) ---


@pytest.mark.core
@pytest.mark.parametrize("g", [1, 4])
@pytest.mark.parametrize("mode", ALL)
def test_what_is_kept(mode, g):
    """Exactly the arrays of the mode, by shape and dtype. The second input never in high precision, h always in x's."""
    m, k, h, f, n = 512, 256, 384, 192, 128
    arrays = dict(x=normal(1, m, k, dtype=jnp.bfloat16), w_in=normal(2, g, k, h), w_out=normal(3, g, f, n),
                  b_in=normal(4, g, h))  # fmt: skip
    b_out, probs = normal(5, g, n), normal(6, m)
    layer = partial(fp4.grouped_mlp, group_sizes=jnp.zeros(g, jnp.int32), recipe=recipe(mode), key=KEY)
    positions = 16 * ((m + 15 * g) // 16)
    array = lambda *shape, dtype="float32": {(shape, dtype): 1}  # noqa: E731
    hidden = array(m, h, dtype="bfloat16")
    x, w_in, a, w_out = {
        "default": (packed((k,), positions), packed((g, k), h), packed((f,), positions), packed((g, f), n)),
        "unquant": (array(m, k, dtype="bfloat16"), array(g, k, h), hidden, array(g, f, n)),
        "dequant": (packed((m,), k), packed((g, h), k), packed((m,), f), packed((g, n), f)),
    }["unquant" if mode == NONE else mode]
    both = dict(b_out=b_out, probs=probs)
    extra = array(g, n) | array(m)
    wanted = (
        (("x",), {}, w_in | w_out | hidden),
        (("w_in",), {}, x | w_out | hidden),
        (("w_out",), {}, a),
        (("b_in",), {}, w_out | hidden),
        (("x", "w_in", "w_out", "b_in"), {}, x | w_in | a | w_out | hidden),
        (("b_out",), both, array(m)),
        (("probs",), both, w_out | hidden | extra),
        (tuple(arrays | both), both, x | w_in | a | w_out | hidden | extra),
    )
    for names, more, want in wanted:
        given = arrays | more
        fixed = {name: array for name, array in given.items() if name not in names}
        got = kept(partial(layer, **fixed), **{name: given[name] for name in names})
        assert got == want, (names, got)
    if mode in ("default", "dequant"):
        assert nbytes(x) + nbytes(a) <= 0.32 * 2 * m * (k + f)


@pytest.mark.core
@pytest.mark.parametrize("mode", ALL)
def test_nothing_is_quantized_for_what_nobody_differentiates(mode):
    """(one direction, both directions in one pass)."""
    counts = {"x": (4, 2), "w_in": (4, 2), "w_out": (4, 1), "b_in": (4, 1), "probs": (4, 1), "b_out": (4, 0),
              "": (4, 0), "all": (0, 6)}  # fmt: skip
    layer = partial(fp4.grouped_mlp, group_sizes=SIZES, recipe=recipe(mode), key=KEY)
    for names, want in counts.items():
        free = {n: a for n, a in ARRAYS.items() if names in (n, "all")}
        fixed = {n: a for n, a in ARRAYS.items() if n not in free}
        got = quantizations(lambda free, fixed=fixed: gradients(partial(layer, **fixed), DY, **free), free)
        assert got == (want if mode == "default" else (0, 0) if mode == NONE else (4, 0)), names


# --- dtypes and transformations ---


@pytest.mark.core
@pytest.mark.parametrize("mode", ALL)
def test_dtypes(mode):
    """D9: y and dx in x's, every other gradient in its parameter's."""
    want = dict(x="bfloat16", w_in="float32", w_out="bfloat16", b_in="float32", b_out="float16", probs="float32")
    arrays = {n: a.astype(want[n]) for n, a in ARRAYS.items()}
    layer = partial(fp4.grouped_mlp, group_sizes=SIZES, recipe=recipe(mode), key=KEY)
    found = jax.eval_shape(partial(gradients, layer), DY.astype(jnp.bfloat16), **arrays)
    assert {n: a.dtype.name for n, a in found.items()} == want | dict(y="bfloat16")


def test_bfloat16():
    """The activation and its gradient are in float32 and rounded once; float32 masters are rounded first."""
    arrays = ARRAYS | dict(x=ARRAYS["x"].astype(jnp.bfloat16), b_out=None)
    dy, first, second = DY.astype(jnp.bfloat16), recipe("dequant"), recipe("unquant")
    step = mlp("swiglu", first, second)
    got = step(arrays, dy, SIZES)
    close(got, composition(arrays, dy, np.asarray(SIZES), fp4.Activation("swiglu"), first, second), 1e-4)
    narrow = {n: ARRAYS[n].astype(jnp.bfloat16) for n in ("w_in", "w_out")}
    want = step(arrays | narrow, dy, SIZES)
    same_tree({n: got[n].astype(want[n].dtype) for n in got}, want)


def test_vmap_is_a_loop():
    """E4: over x, probs and the sizes."""
    layer = partial(fp4.grouped_mlp, w_out=ARRAYS["w_out"], recipe=recipe("default"), key=KEY)
    x, probs = ARRAYS["x"].reshape(2, 35, K), ARRAYS["probs"].reshape(2, 35)
    sizes = jnp.int32([[17, 0, 8], [-1, 1, 40]])
    loss = lambda x, w, probs, sizes: jnp.sum(jnp.sin(layer(x, w, group_sizes=sizes, probs=probs)))  # noqa: E731
    step = jax.grad(loss, (0, 1, 2))
    got, one = in_numpy(jax.jit(jax.vmap(step, (0, None, 0, 0))))(x, W_IN, probs, sizes), jax.jit(step)
    for i in range(2):
        for a, b in zip(got, one(x[i], W_IN, probs[i], sizes[i]), strict=True):
            close(a[i], b, 2e-6)


@pytest.mark.core
def test_checkpoint_and_scan():
    """Two layers under lax.scan, each made again in the backward, equal the two written out."""
    layer = partial(fp4.grouped_mlp, w_out=normal(3, G, F, K), group_sizes=SIZES, key=KEY,
                    recipe=recipe("default"), out_recipe=recipe("unquant"))  # fmt: skip
    ws = jnp.stack([W_IN, -W_IN])
    scanned = lambda x, ws: jax.lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, ws)[0]  # noqa: E731
    written = lambda x, ws: layer(layer(x, ws[0]), ws[1])  # noqa: E731
    got, want = (jax.jit(jax.grad(lambda *a, g=g: jnp.sum(g(*a) ** 2), (0, 1)))(ARRAYS["x"], ws)
                 for g in (scanned, written))  # fmt: skip
    for a, b in zip(got, want, strict=True):
        close(a, b, 1e-5)


def test_report():
    """D3: both products, each with its formats."""
    layer = partial(fp4.grouped_mlp, group_sizes=SIZES, recipe=recipe("dequant"), key=KEY)
    step = lambda arrays, **kwargs: jax.grad(lambda a: layer(**a, **kwargs).sum())(arrays)  # noqa: E731
    first, second = fp4.report(partial(step, out_recipe=recipe("default")), ARRAYS).rows
    assert first.op == second.op == "grouped_mlp"
    assert (first.kernel_shape, second.kernel_shape) == ((G, K, H), (G, F, N))
    assert (first.dx, first.dw) == ("high precision x nvfp4", "nvfp4 x high precision")
    assert (second.dx, second.dw) == ("nvfp4 x nvfp4", "nvfp4 x nvfp4")
    first, second = fp4.report(partial(step, out_recipe=fp4.HIGH_PRECISION), ARRAYS).rows
    assert first.quantized and not second.quantized and second.note == "not quantized: recipe=HIGH_PRECISION"
    first, second = fp4.report(lambda a: fp4.grouped_mlp(**a, group_sizes=SIZES), ARRAYS).rows
    assert first.note == second.note == "not quantized: no recipe given and no autocast context"


# --- bad input ---

FROZEN = fp4.quantize(W_OUT, axis=0, batch_dims=1)


def call(mode="unquant", **changed):
    return fp4.grouped_mlp(**ARRAYS | dict(group_sizes=SIZES, recipe=recipe(mode)) | changed)


def shape(mode, **changed):
    return jax.eval_shape(lambda: call(mode, **changed)).shape


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        (dict(activation="swish"), ValueError, "activation is 'swish'; needs one of"),
        (dict(activation=jax.nn.silu), ValueError, "activation is <"),
        (dict(group_sizes=[17, 0, 41]), TypeError, "group_sizes is of type list; needs an int32 array"),
        (dict(group_sizes=jnp.ones(G)), TypeError, "group_sizes is of type float32; needs an int32 array"),
        (dict(group_sizes=SIZES[None]), ValueError, r"group_sizes is of shape \(1, 3\); needs \(3,\)"),
        (dict(group_sizes=SIZES[1:]), ValueError, r"group_sizes is of shape \(2,\); needs \(3,\)"),
        (dict(x=ARRAYS["x"].astype(int)), TypeError, "x is an array of int32"),
        (dict(x=jnp.ones(())), ValueError, "x is a scalar"),
        (dict(w_in=W_IN[0]), ValueError, r"w_in is of shape \(24, 40\); needs \[g, k, n\]"),
        (dict(w_in=W_IN.mT), ValueError, r"w_in is of shape \(3, 40, 24\); needs 24 rows"),
        (dict(w_in=W_IN[..., :39], b_in=None), ValueError, r"w_in is of shape \(3, 24, 39\); needs an even number"),
        (dict(w_in=W_IN.astype(int)), TypeError, "w_in is an array of int32"),
        (dict(w_in=fp4.quantize(W_IN, axis=0)), ValueError, "w_in is Quant.*one amax for each group.*batch_dims=1"),
        (dict(w_out=W_OUT[:2]), ValueError, r"w_out is of shape \(2, 20, 10\); needs 3 groups"),
        (dict(w_out=W_OUT[0]), ValueError, r"w_out is of shape \(20, 10\); needs \[g, k, n\]"),
        (dict(w_out=W_OUT.mT), ValueError, r"w_out is of shape \(3, 10, 20\); needs 20 rows because the act"),
        (dict(activation="silu"), ValueError, r"w_out is of shape \(3, 20, 10\); needs 40 rows"),
        (dict(w_out=fp4.quantize(W_OUT, axis=0)), ValueError, "w_out is Quant.*one amax for each group.*batch_dims=1"),
        (dict(w_out=(FROZEN,)), TypeError, "w_out is a tuple; needs the pair"),
        (dict(b_in=ARRAYS["b_in"][0]), ValueError, r"b_in is of shape \(40,\); needs \(3, 40\).*b_in=None"),
        (dict(b_out=ARRAYS["b_out"][:, 1:]), ValueError, r"b_out is of shape \(3, 9\); needs \(3, 10\).*b_out=None"),
        (dict(b_out=[0.0]), TypeError, "b_out is a list"),
        (dict(probs=jnp.ones((M, 1))), ValueError, r"probs is of shape \(70, 1\); needs \(70,\).*probs=None"),
        (dict(probs=jnp.ones(M, int)), TypeError, "probs is an array of int32"),
        (dict(recipe="nvfp4"), TypeError, "recipe is 'nvfp4'"),
        (dict(out_recipe="nvfp4"), TypeError, "out_recipe is 'nvfp4'"),
        (dict(key=3), TypeError, "key is a int"),
    ],
)  # fmt: skip
def test_bad_input(changed, error, says):
    """E12."""
    refused(lambda: call(**changed), error, "^grouped_mlp: " + says)


def grad(name, **changed):
    a = changed.pop(name, ARRAYS[name])
    return jax.eval_shape(jax.grad(lambda a: call(**changed, **{name: a}).sum(), allow_int=True), a)


def test_bad_input_of_a_gradient():
    """B7, D4: what only a backward needs is no matter of an evaluation."""
    assert shape("default") == shape("default", w_out=FROZEN) == (M, N)
    for name in ("x", "w_in", "w_out", "b_in", "probs"):
        refused(lambda name=name: grad(name, mode="default"), ValueError, "^grouped_mlp: key is None; needs a JAX key")
    grad("b_out", mode="default")  # draws nothing
    for name in ("x", "w_out"):
        grad(name, mode="default", recipe=recipe("default", stochastic_rounding=False))
    grad("w_out", out_recipe=recipe("dequant"), mode="default")  # the first product is not differentiated
    refused(lambda: grad("w_in", out_recipe=recipe("dequant"), mode="default"), ValueError, "key is None")
    says = r"^grouped_mlp: w_out is Quant.*its plane blocked along n.*quantize_transpose"
    refused(lambda: grad("x", mode="default", key=KEY, w_out=FROZEN), ValueError, says)
    refused(lambda: grad("w_out", w_out=FROZEN), fp4.UnsupportedError, "^grouped_mlp: w_out is a Quant.*differentiated")
    frozen = fp4.quantize(W_IN, axis=0, batch_dims=1)
    refused(lambda: grad("w_in", w_in=frozen), fp4.UnsupportedError, "^grouped_mlp: w_in is a Quant.*differentiated")


def test_strict_refuses_padding_at_the_forward():
    x, w_in, w_out = jnp.ones((M, 32)), jnp.ones((G, 32, 64)), jnp.ones((G, 32, 48))
    whole = dict(x=x, w_in=w_in, w_out=w_out, b_in=None, b_out=None, key=KEY)
    with fp4.strict():
        assert shape("default", **whole) == (M, 48)
        jax.eval_shape(jax.grad(lambda x: call("default", **whole | dict(x=x)).sum()), x)
        refused(lambda: call(), fp4.UnsupportedError, "^grouped_mlp: x is of extent 24; needs a multiple of 16")
        narrow = whole | dict(w_in=w_in[..., :40], w_out=w_out[:, :20])
        refused(lambda: call("default", **narrow), fp4.UnsupportedError, "^grouped_mlp: w_in is of extent 40")
        refused(
            lambda: call("default", **whole | dict(w_out=w_out[..., :10])),
            fp4.UnsupportedError,
            "^grouped_mlp: w_out is of extent 10",
        )
        assert shape(NONE) == (M, N)


def test_second_derivatives_without_a_recipe():
    """With biases and probs: every rule inside has one of its own."""
    sizes = jnp.int32([3, 0, 2])
    x, w_in, w_out = normal(1, 6, 4), normal(2, 3, 4, 6), normal(3, 3, 3, 5)
    more = dict(b_in=normal(4, 3, 6), b_out=normal(5, 3, 5), probs=normal(6, 6))
    group = jnp.array([0, 0, 0, 2, 2, 0])

    def layer(x, b_out, probs):
        return jnp.sum(fp4.grouped_mlp(x, w_in, w_out, sizes, **(more | dict(b_out=b_out, probs=probs))) ** 2)

    def plain(x, b_out, probs):
        gate, linear = jnp.split(jnp.einsum("mk,mkh->mh", x, w_in[group]) + more["b_in"][group], 2, -1)
        y = jnp.einsum("mf,mfn->mn", jax.nn.silu(gate) * linear, w_out[group]) + b_out[group]
        return jnp.sum((probs[:, None] * y)[:5] ** 2)

    arguments = x, more["b_out"], more["probs"]
    both = [jax.jit(jax.jacrev(jax.grad(f, (0, 1, 2)), (0, 1, 2)))(*arguments) for f in (layer, plain)]
    for a, b in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
