"""Arrays sharded outside of shard_map: the bits of one device, and what moves between devices."""

import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fp4 as fp4
from jax_fp4._partition import _axes
from jax_fp4._placement import Specs

pytestmark = pytest.mark.core
KEY = jax.random.key(3)
RECIPES = {mode: fp4.NVFP4BlockScaling(mode) for mode in ("default", "unquant", "dequant")}
COLLECTIVE = re.compile(
    r"= \(?(.*?) (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", re.M
)


class Moved(NamedTuple):
    """A collective of a compiled program: what it is, and the type and elements of each of its results."""

    kind: str
    arrays: tuple[tuple[str, int], ...]


def moved(compiled) -> list[Moved]:
    text = compiled.as_text()
    assert "CustomSPMDPartitioning" not in text
    found = []
    for results, kind in COLLECTIVE.findall(text):
        shapes = re.findall(r"([a-z0-9]+)\[([\d,]*)\]", results)
        found.append(Moved(kind, tuple((t, math.prod(map(int, filter(None, s.split(","))))) for t, s in shapes)))
    return found


def kinds(compiled) -> set[str]:
    return {of.kind for of in moved(compiled)}


def mesh_of(**axes: int) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(axes.values())])
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def bits(tree):
    return [np.asarray(leaf).view(f"u{leaf.dtype.itemsize}") for leaf in jax.tree.leaves(tree)]


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for p, q in zip(bits(a), bits(b), strict=True):
        np.testing.assert_array_equal(p, q)


def close(a, b, tolerance=1e-5):
    for p, q in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
        assert np.linalg.norm(p - q) <= tolerance * np.linalg.norm(q)


def compiled_for(function, mesh, specs, *arrays, **how):
    placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]
    compiled = jax.jit(function, **how).lower(*placed).compile()
    return compiled, placed


def x_of(shape, seed=0):
    """With an outlier in one shard."""
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    x[tuple(n * 5 // 8 for n in shape)] = 99
    return jnp.asarray(x)


# --- quantize, quantize_transpose, dequantize ---

AXES = mesh_of(a=2, b=2, c=2)
X3, X2 = x_of((8, 128, 256)), x_of((256, 1024))
WAYS = [("a",), ("a", "b"), ("a", "b", "c")]
EACH = [P(*[None] * dimension, WAYS[i]) for dimension, i in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 2), (2, 1), (2, 2))]
SOME = [P(("a", "b")), P("c", ("a", "b")), P("a", "b", "c"), P(None, None, ("a", "b", "c"))]
MATRIX = [P(("a", "b")), P(None, ("a", "b", "c")), P("a", "b"), P("c", "a")]
QUANTIZERS = {
    "rows": (lambda x: fp4.quantize(x), X3, SOME),
    "transform": (lambda x: fp4.quantize_transpose(x, key=KEY, hadamard=True), X2, MATRIX),
    "scaled rows": (lambda x: fp4.quantize_transpose(x, row_scaled=True), X2, MATRIX),
    "tiles": (lambda x: fp4.quantize_transpose(x, block=(16, 16)), X2, MATRIX),
    "four over six": (lambda x: fp4.quantize_transpose(x, four_over_six=fp4.FourOverSix()), X2, MATRIX[:2]),
    "stacked": (lambda x: fp4.quantize_transpose(x, block=(16, 16), batch_dims=1), X3, SOME),
    "given amax": (lambda x: fp4.quantize(x, amax=jnp.float32(50), dtype=jnp.bfloat16), X3, SOME[:2]),
    "mxfp8": (lambda x: fp4.quantize_transpose(x, "mxfp8"), X2, MATRIX),
    "mxfp8 tiles": (lambda x: fp4.quantize(x, "mxfp8", block=(32, 32)), X2, MATRIX[2:]),
    "float8_block": (lambda x: fp4.quantize_transpose(x, "float8_block"), X2, [P("a"), P(None, ("a", "b", "c"))]),
    "float8_block tiles": (lambda x: fp4.quantize(x, "float8_block", block=(128, 128)), X2, [P("a", ("b", "c"))]),
    "float8": (lambda x: fp4.quantize_transpose(x, "float8_e5m2"), X2, MATRIX),
    "delayed": (lambda x: fp4.quantize(x, "float8", scale=jnp.float32(2)), X2, MATRIX[2:]),
    "dequantize": (lambda x: fp4.dequantize(fp4.quantize(x)), X3, SOME),
    "dequantize columns": (lambda x: fp4.dequantize(fp4.quantize(x, axis=0, row_scaled=True)), X2, MATRIX[2:]),
    "dequantize tiles": (lambda x: fp4.dequantize(fp4.quantize(x, "float8_block", block=(128, 128))), X2, MATRIX[2:]),
    "dequantize tiles of rows": (
        lambda x: fp4.dequantize(fp4.quantize(x, "float8_block", block=(128, 128))),
        X3,
        [P(None, None, "a")],
    ),
    "dequantize float8": (lambda x: fp4.dequantize(fp4.quantize(x, "float8_block", axis=0)), X2, [P("a", "b")]),
}


@pytest.mark.parametrize("spec", EACH, ids=str)
def test_a_part_has_the_bits_of_the_whole(spec):
    """Every dimension, 2, 4 and 8 ways, both directions, with draws and a transform."""
    function = lambda x: fp4.quantize_transpose(x, key=KEY, hadamard=True)  # noqa: E731
    compiled, placed = compiled_for(function, AXES, [spec], X3)
    same(compiled(*placed), jax.jit(function)(X3))
    if len(spec) != 2:
        assert kinds(compiled) == {"all-reduce"}
    else:  # the leading dimensions of column-wise codes are flattened, of which XLA cannot cut the second: codes move
        gathered = [of.arrays for of in moved(compiled) if of.kind == "all-gather"]
        assert all(dtype == "u8" or size <= X3.size // 16 for arrays in gathered for dtype, size in arrays)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_quantizers(name):
    function, x, specs = QUANTIZERS[name]
    want = jax.jit(function)(x)
    for spec in specs:
        compiled, placed = compiled_for(function, AXES, [spec], x)
        same(compiled(*placed), want)
        assert kinds(compiled) <= {"all-reduce"}
        first = jax.tree.leaves(compiled(*placed))[0]
        assert not first.sharding.is_fully_replicated


BORDERS = {
    "k in blocks of 8": ((64, 64), P(None, ("a", "b", "c"))),
    "k with padding": ((64, 24), P(None, "a")),
    "m with padding": ((24, 64), P(("a", "b"))),
    "s of 24": ((8, 24, 64), P("a", "b")),
    "entries of 8 rows": ((8, 8, 64), P(("a", "b"))),
    "entries of 8 rows, 8 ways": ((8, 8, 64), P(("a", "b", "c"))),
}


@pytest.mark.parametrize("name", BORDERS)
def test_borders_inside_a_block(name):
    """Blocks are those of the global tensor: what they need moves."""
    shape, spec = BORDERS[name]
    function = lambda x: fp4.quantize_transpose(x, key=KEY)  # noqa: E731
    compiled, placed = compiled_for(function, AXES, [spec], x_of(shape))
    same(compiled(*placed), jax.jit(function)(x_of(shape)))
    assert ("all-gather" in kinds(compiled)) is (name != "entries of 8 rows")


def test_nothing_is_said_to_a_program_of_one_device():
    text = jax.jit(lambda x: fp4.dequantize(fp4.quantize(x))).lower(X3).as_text()
    assert "CustomSPMD" not in text and "sharding" not in text and text.count("stablehlo.custom_call") == 2


def test_eager():
    placed = jax.device_put(X3, NamedSharding(AXES, P("a", None, "b")))
    q = fp4.quantize(placed)
    same(q, fp4.quantize(X3))
    assert q.codes.sharding.spec == P("a", None, "b")


def test_undifferentiable_there_too():
    function = jax.grad(lambda x: fp4.dequantize(fp4.quantize(x)).sum())
    with pytest.raises(fp4.UnsupportedError, match="quantize: x is differentiated"):
        compiled_for(function, AXES, [P("a")], X3)


def test_a_cached_program_is_known_by_what_it_does():
    """JAX leaves the address of a partitioned function out of the key of its persistent cache."""

    def text(**how):
        placed = jax.device_put(X3, NamedSharding(AXES, P("a")))
        lowered = jax.jit(lambda x: fp4.quantize(x, axis=0, **how)).lower(placed).as_text()
        return re.sub(r'backend_config = "\d+"', "", lowered)

    assert text() == text()
    assert text() != text(hadamard=True)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("a",), ("b",), ()], ids=str)
def test_axes_of_places(names):
    mesh = mesh_of(a=2, b=4)
    places = NamedSharding(mesh, P(names or None)).devices_indices_map((16,))
    starts = np.array([places[device][0].start or 0 for device in mesh.devices.flat]).reshape(2, 4)
    assert _axes(mesh, starts) == names
    assert _axes(mesh, np.array([[0, 0, 4, 4], [8, 8, 12, 12]])) == ()  # half of an axis


# --- dense ---

B, S, K, N = 8, 64, 128, 256
X, W, BIAS, DY = x_of((B, S, K), 1), x_of((K, N), 2) / 8, x_of((N,), 3), x_of((B, S, N), 4)


class Layout(NamedTuple):
    mesh: dict[str, int]
    x: P
    w: P
    bias: P
    y: P

    def compiled(self, function, *more, x=X):
        mesh = mesh_of(**self.mesh)
        sharded = tuple(NamedSharding(mesh, spec) for spec in (self.y, self.x, self.w, self.bias))
        specs = (self.x, self.w, self.bias, self.y)
        return compiled_for(function, mesh, specs, x, W, BIAS, DY.astype(x.dtype), *more, out_shardings=sharded)


LAYOUTS = {
    "data": Layout({"data": 8}, P("data"), P(), P(), P("data")),
    "fsdp rows": Layout({"fsdp": 8}, P("fsdp"), P("fsdp"), P("fsdp"), P("fsdp")),
    "fsdp columns": Layout({"fsdp": 8}, P("fsdp"), P(None, "fsdp"), P(), P("fsdp")),
    "data x fsdp": Layout(
        {"data": 2, "fsdp": 4}, P(("data", "fsdp")), P("fsdp"), P(), P(("data", "fsdp"))
    ),
    "columns": Layout({"tensor": 8}, P(), P(None, "tensor"), P("tensor"), P(None, None, "tensor")),
    "rows": Layout({"tensor": 8}, P(None, None, "tensor"), P("tensor"), P(), P()),
    "data x tensor": Layout(
        {"data": 2, "tensor": 4}, P("data"), P(None, "tensor"), P("tensor"), P("data", None, "tensor")
    ),
    "sequence": Layout({"data": 2, "seq": 4}, P("data", "seq"), P(), P(), P("data", "seq")),
    "all": Layout(
        {"data": 2, "fsdp": 2, "tensor": 2},
        P(("data", "fsdp"), None, "tensor"), P("tensor", "fsdp"), P("fsdp"), P(("data", "fsdp")),
    ),
}  # fmt: skip


def step(recipe):
    def gradients(x, w, bias, dy):
        y, vjp = jax.vjp(lambda *operands: fp4.dense(*operands, recipe=recipe, key=KEY), x, w, bias)
        return y, *vjp(dy)

    return gradients


@pytest.fixture(scope="module")
def on_one_device():
    return {mode: jax.jit(step(recipe))(X, W, BIAS, DY) for mode, recipe in RECIPES.items()}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name in LAYOUTS
        for mode in RECIPES
        if mode == "default" or name in ("data x fsdp", "sequence", "all")
    ],
)
def test_dense(name, mode, on_one_device):
    """y, dx, dw and db; and no activation is gathered, no weight but packed."""
    compiled, placed = LAYOUTS[name].compiled(step(RECIPES[mode]))
    close(compiled(*placed), on_one_device[mode])
    for of in moved(compiled):
        for dtype, size in of.arrays:
            assert of.kind in ("all-reduce", "reduce-scatter") or dtype == "u8" or size <= N or mode == "unquant"
    if mode == "unquant":  # of a plain product XLA gathers the weight, once
        wide = [of for of in moved(compiled) if of.kind == "all-gather" and of.arrays[0][0] != "u8"]
        assert sum(size for of in wide for _, size in of.arrays if size > N) <= K * N


@pytest.mark.parametrize("name", ["fsdp rows", "fsdp columns", "data x fsdp"])
def test_a_weight_is_gathered_packed(name):
    """Once for y and once for dx, codes and scales; dw is reduced to its shard."""
    compiled, _ = LAYOUTS[name].compiled(step(RECIPES["default"]))
    gathered = [size for of in moved(compiled) if of.kind == "all-gather" for dtype, size in of.arrays if dtype == "u8"]
    assert K * N < sum(gathered) <= 2 * 0.6 * K * N
    assert "reduce-scatter" in kinds(compiled)


def test_as_many_collectives_as_without_quantization():
    """Beside the maxima of x, w and dy."""

    def plain(x, w, bias, dy):
        y, vjp = jax.vjp(lambda x, w, bias: x @ w + bias, x, w, bias)
        return y, *vjp(dy)

    def sums(function):
        found = moved(LAYOUTS["data"].compiled(function)[0])
        assert {of.kind for of in found} == {"all-reduce"}
        return sum(1 for of in found if of.arrays[0][0] == "f32"), len(found)

    (quantized, of_all), (want, _) = sums(step(RECIPES["default"])), sums(plain)
    assert quantized <= want and of_all <= want + 3


def test_sums_are_float32():
    """A contracted axis that is cut: partial products are added before they are rounded."""
    dtype = jnp.bfloat16
    compiled, placed = LAYOUTS["rows"].compiled(step(RECIPES["default"]), x=X.astype(dtype))
    want = jax.jit(step(RECIPES["default"]))(X.astype(dtype), W, BIAS, DY.astype(dtype))
    close(compiled(*placed)[0], want[0], 1e-4)
    assert not any(t in ("bf16", "f16") for of in moved(compiled) if of.kind == "all-reduce" for t, _ in of.arrays)


def test_set_mesh_and_constraints(on_one_device):
    """Shardings that nobody gives as arguments."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def constrained(x, w, bias, dy):
        x, dy = (jax.lax.with_sharding_constraint(a, P("data")) for a in (x, dy))
        w = jax.lax.with_sharding_constraint(w, P(None, "data"))
        y, dx, *rest = step(RECIPES["default"])(x, w, bias, dy)
        return *(jax.lax.with_sharding_constraint(a, P("data")) for a in (y, dx)), *rest

    with jax.set_mesh(mesh):
        compiled = jax.jit(constrained, in_shardings=P()).lower(X, W, BIAS, DY).compile()
        close(compiled(*(jax.device_put(a, P()) for a in (X, W, BIAS, DY))), on_one_device["default"])
    found = [of for of in moved(compiled) if of.kind == "all-gather"]
    assert "u8" in {of.arrays[0][0] for of in found}


def test_layers_in_a_scan():
    """Stacked weights, sharded; x donated, activations constrained."""
    mesh, layers = mesh_of(data=2, fsdp=4), 3
    stacked = jnp.stack([W[:, :K] * (i + 1) for i in range(layers)])
    rows, shards = NamedSharding(mesh, P(("data", "fsdp"))), NamedSharding(mesh, P(None, "fsdp"))

    def gradients(constrain, x, weights):
        def layer(h, w_and_i):
            w, i = w_and_i
            h = fp4.dense(h, w, recipe=RECIPES["default"], key=jax.random.fold_in(KEY, i))
            return constrain(h), None

        def loss(x, weights):
            h, _ = jax.lax.scan(layer, x, (weights, jnp.arange(layers)))
            return jnp.sum(h * h)

        return jax.grad(loss, (0, 1))(x, weights)

    def constrained(x, weights):
        return gradients(lambda h: jax.lax.with_sharding_constraint(h, rows), x, weights)

    specs = (rows.spec, shards.spec)
    how = dict(donate_argnums=0, out_shardings=(rows, shards))
    compiled, placed = compiled_for(constrained, mesh, specs, X, stacked, **how)
    close(compiled(*placed), jax.jit(lambda *a: gradients(lambda h: h, *a))(X, stacked))
    assert all(t == "u8" for of in moved(compiled) if of.kind == "all-gather" for t, _ in of.arrays)


@pytest.mark.parametrize(
    ("x_spec", "w_spec"), [(P("g", "data"), P("g")), (P("g"), P("g", None, "data")), (P(None, "data"), P("g"))]
)
def test_vmap(x_spec, w_spec):
    """What is mapped may be sharded too."""
    x, w = x_of((4, 128, K)), jnp.stack([W * (i + 1) for i in range(4)])

    def gradients(x, w):
        layer = jax.vmap(lambda x, w: fp4.dense(x, w, recipe=RECIPES["default"], key=KEY))
        return jax.grad(lambda x, w: jnp.sum(layer(x, w) ** 2), (0, 1))(x, w)

    mesh = mesh_of(g=4, data=2)
    sharded = tuple(NamedSharding(mesh, spec) for spec in (x_spec, w_spec))
    compiled, placed = compiled_for(gradients, mesh, (x_spec, w_spec), x, w, out_shardings=sharded)
    close(compiled(*placed), jax.jit(gradients)(x, w))
    if x_spec[0] == "g":
        wide = [t for of in moved(compiled) if of.kind == "all-gather" for t, _ in of.arrays if t != "u8"]
        assert not wide


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map_over_other_axes(check_vma):
    """The part of each is a tensor of its own, and XLA partitions its program."""
    mesh, recipe = mesh_of(data=2, tensor=4), RECIPES["default"]

    def of_part(x, w):
        return fp4.quantize(x).codes, fp4.dense(x, w, recipe=recipe)

    how = dict(in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check_vma)
    function = jax.shard_map(of_part, mesh=mesh, axis_names={"data"}, **how)
    compiled, placed = compiled_for(function, mesh, (P("data", None, "tensor"), P("tensor")), X, W)
    want = [jax.jit(of_part)(x, W) for x in jnp.split(X, 2)]
    codes, y = compiled(*placed)
    same(codes, jnp.concatenate([codes for codes, _ in want]))
    close(y, jnp.concatenate([y for _, y in want]))
    assert kinds(compiled) == {"all-reduce"}


def test_inside_a_shard_map_over_all_axes_nothing_changes():
    mesh = mesh_of(data=8)
    function = jax.shard_map(
        lambda x: fp4.quantize(x, specs=Specs(x=P("data"))), mesh=mesh, in_specs=P("data"),
        out_specs=jax.tree.map(lambda leaf: P("data") if leaf.ndim else P(), fp4.quantize(X3)), check_vma=False,
    )  # fmt: skip
    traced = jax.jit(function).trace(X3)
    assert "jax_fp4_partitioned" not in str(traced.jaxpr)
    same(jax.jit(function)(X3), fp4.quantize(X3))


@pytest.mark.parametrize("spec", [P(), P("a", None, "b"), P(("a", "b")), P("a", "b")], ids=str)
def test_axes_that_types_know(spec):
    """The same parts, in a shard_map."""
    function = lambda x: fp4.quantize_transpose(x, key=KEY)  # noqa: E731
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        compiled, placed = compiled_for(function, mesh, [spec], X3)
        q = compiled(*placed)
        same(q, jax.jit(function)(X3))
        assert tuple(q[0].codes.sharding.spec)[: len(spec)] == tuple(spec)
        assert kinds(compiled) <= ({"all-reduce", "all-to-all"} if spec == P("a", "b") else {"all-reduce"})


def test_axes_of_two_kinds():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Explicit, AxisType.Auto))
    with jax.set_mesh(mesh), pytest.raises(fp4.UnsupportedError, match="a mesh of one kind"):
        jax.jit(fp4.quantize)(jax.device_put(X3, NamedSharding(mesh, P("a"))))


# --- matmul ---


def test_matmul():
    """Both operands quantized, or one; differentiated in the array."""
    mesh, q = mesh_of(data=2, tensor=4), fp4.quantize(W, axis=0)
    functions = {
        "both": lambda x, w: fp4.matmul(fp4.quantize(x), fp4.quantize(w, axis=0)),
        "one": lambda x, w: fp4.matmul(x, fp4.quantize(w, axis=0)),
        "gradient": lambda x, w: jax.grad(lambda x: jnp.sum(fp4.matmul(x, q) ** 2))(x),
        "other formats": lambda x, w: fp4.matmul(fp4.quantize(x, "mxfp8"), fp4.quantize(w, "float8", axis=0)),
    }
    for function in functions.values():
        for specs in ((P("data", None, "tensor"), P("tensor")), (P("data"), P("tensor", "data"))):
            compiled, placed = compiled_for(function, mesh, specs, X, W)
            close(compiled(*placed), jax.jit(function)(X, W))
            assert all(size <= K * N for of in moved(compiled) if of.kind == "all-gather" for _, size in of.arrays)


@pytest.mark.parametrize(
    "recipe", [fp4.MXFP8BlockScaling(), fp4.Float8CurrentScaling()], ids=lambda r: type(r).__name__
)
def test_other_recipes(recipe):
    """Codes and scales that are 8-bit floats move as bytes."""
    want = jax.jit(step(recipe))(X, W, BIAS, DY)
    for name in ("data x fsdp", "data x tensor"):
        compiled, placed = LAYOUTS[name].compiled(step(recipe))
        close(compiled(*placed), want)
        gathered = [of.arrays for of in moved(compiled) if of.kind == "all-gather"]
        assert all(t == "u8" or size <= N for arrays in gathered for t, size in arrays)
