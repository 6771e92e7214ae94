"""jax.export with the published list of checks (docs/faults.md: E11): serialized, reloaded, run: the same bits."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from installations import HOPPER, forget, pretend
from jax import export
from jax.sharding import PartitionSpec as P
from products import refused
from sharded import KEY, mesh, normal, nvfp4, same

import jax_fp4 as fp4
from jax_fp4 import _cpu, _ffi

ROOT = Path(__file__).resolve().parent.parent
M, K, N, G = 32, 32, 48, 2
SIZES = jnp.array([12, 20], jnp.int32)
X, W = normal(1, M, K, dtype=jnp.bfloat16), normal(2, K, N)
W_OUT, WS = normal(3, N, K), normal(4, G, K, N)
exported = partial(export.export, disabled_checks=fp4.EXPORT_DISABLED_CHECKS)


def dense(x, w):
    return fp4.dense(x, w, recipe=nvfp4(), key=KEY)


def model(x, w, w_out):
    return fp4.dense(jnp.tanh(dense(x, w)), w_out, recipe=fp4.MXFP8BlockScaling())


def called(program) -> set[str]:
    """Our targets, and those that JAX does not keep."""
    found = re.findall(r'custom_call @"?([\w$.]+)', program.mlir_module())
    return {name for name in found if name != "shape_assertion"}


def targets() -> list[str]:
    return [check.is_custom_call() for check in fp4.EXPORT_DISABLED_CHECKS]


@pytest.mark.core
def test_the_list_is_what_the_extensions_register():
    """And XLA's own product for Blackwell; and the wrappers spell no other."""
    sources = {name: (ROOT / "xla_ffi" / name).read_text() for name in ("module.cc", "module_cuda.cc")}
    registered = {name: set(re.findall(r'targets\["(\w+)"\]', text)) for name, text in sources.items()}
    assert registered["module.cc"] == set(_cpu.registrations())
    want = registered["module.cc"] | registered["module_cuda.cc"] | {"__op$block_scaled_dot"}
    assert sorted(targets()) == sorted(want)
    assert set(re.findall(r'"(jax_fp4_\w+)"', Path(_ffi.__file__).read_text())) == set(_ffi.TARGETS)


@pytest.mark.core
def test_without_the_list_jax_refuses():
    with pytest.raises(ValueError, match="no compatibility guarantees"):
        export.export(jax.jit(dense))(X, W)
    without = [check for check in fp4.EXPORT_DISABLED_CHECKS if check.is_custom_call() != "jax_fp4_quantize"]
    with pytest.raises(ValueError, match="jax_fp4_quantize"):
        export.export(jax.jit(dense), disabled_checks=without)(X, W)


RUN = """
import sys
import numpy as np, jax, jax.numpy as jnp
from jax import export
import jax_fp4
program = export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
arguments = [jnp.asarray(a) for a in np.load(sys.argv[2]).values()]
arguments[0] = arguments[0].astype(jnp.bfloat16)
y, pull = jax.vjp(program.call, *arguments)
np.savez(sys.argv[3], *(np.asarray(a, np.float32) for a in (y, *pull(y))))
"""


@pytest.mark.core
def test_another_process_gets_the_same_bits(tmp_path):
    """Forward and gradients, stochastic rounding included."""
    arguments = X, W, W_OUT
    program, operands, results = (tmp_path / name for name in ("program.bin", "operands.npz", "results.npz"))
    program.write_bytes(exported(jax.jit(model))(*arguments).serialize(vjp_order=1))
    np.savez(operands, *(np.asarray(a, np.float32) for a in arguments))
    command = [sys.executable, "-c", RUN, program, operands, results]
    subprocess.run(command, check=True, cwd=tmp_path, env={"PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu"})
    y, pull = jax.vjp(jax.jit(model), *arguments)
    got, want = np.load(results).values(), (y, *pull(y))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, np.asarray(b, np.float32))


@pytest.mark.core
@pytest.mark.parametrize(
    ("archs", "capabilities", "want"),
    [
        (None, (), set()),
        ("sm_80", (), {"jax_fp4_quantize", "jax_fp4_dequantize"}),
        (HOPPER, (), {"jax_fp4_quantize", "jax_fp4_dequantize", "jax_fp4_grouped_matmul"}),
        (HOPPER, ("10.0",), {"jax_fp4_quantize", "__op$block_scaled_dot"}),
    ],
    ids=["no extension", "a GPU", "Hopper", "Blackwell"],
)
def test_for_cuda_without_a_gpu(archs, capabilities, want, monkeypatch):
    pretend(monkeypatch, archs, *capabilities)
    cuda = exported(jax.jit(dense), platforms=("cuda",))(X, W)
    both = exported(jax.jit(dense), platforms=("cpu", "cuda"))(X, W)
    monkeypatch.undo()
    forget()
    assert called(cuda) == want
    assert called(both) >= want | {"jax_fp4_quantize", "jax_fp4_dequantize"}
    assert export.deserialize(cuda.serialize()).platforms == ("cuda",)
    same(export.deserialize(both.serialize()).call(X, W), dense(X, W))


# --- a number of rows that is known when the program runs ---


def rows(symbol: str, **how):
    return jax.ShapeDtypeStruct((*export.symbolic_shape(symbol, **how), K), jnp.bfloat16)


@pytest.mark.core
def test_what_a_layer_takes_and_gives_is_serialized():
    """A frozen kernel, and the state of delayed scaling."""
    recipe = fp4.DelayedScaling(amax_history_len=4)
    frozen = fp4.quantize(W, axis=0, block=(16, 16))

    def step(x, q, w, state):
        def loss(w, state):
            y = fp4.dense(fp4.dense(x, q, recipe=nvfp4("dequant")), w, recipe=recipe, state=state)
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return fp4.quantize(x), jax.grad(loss, argnums=(0, 1))(w, state)

    arguments = X, frozen, W_OUT, fp4.delayed.init(recipe)
    reloaded = export.deserialize(exported(jax.jit(step))(*arguments).serialize())
    got, want = reloaded.call(*arguments), jax.jit(step)(*arguments)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        same(a, b)


@pytest.mark.core
def test_symbolic_rows():
    step = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(dense(x, w).astype(jnp.float32)), (0, 1)))
    program = exported(step)(rows("b"), W)
    for m in (5, 32):
        same(program.call(X[:m], W)[1], step(X[:m], W)[1])


@pytest.mark.core
@pytest.mark.parametrize("symbols", ["b", "b, s", "b, 8"])
@pytest.mark.parametrize("recipe", [nvfp4("dequant"), nvfp4("unquant"), fp4.Float8CurrentScaling()], ids=str)
def test_symbolic_leading_dimensions(recipe, symbols):
    def loss(x, w):
        return jnp.sum(fp4.dense(x, w, recipe=recipe).astype(jnp.float32) ** 2)

    step, x = jax.jit(jax.grad(loss, (0, 1))), X if symbols == "b" else X.reshape(4, 8, K)
    for got, want in zip(exported(step)(rows(symbols), W).call(x, W), step(x, W), strict=True):
        same(got, want)


def grouped(x, w):
    return fp4.grouped_dense(x, w, SIZES, recipe=nvfp4("unquant"))


@pytest.mark.core
def test_symbolic_rows_in_groups():
    loss = lambda x, w: jnp.sum(grouped(x, w).astype(jnp.float32) ** 2)  # noqa: E731
    step = jax.jit(jax.grad(loss, (0, 1)))
    for symbol, how in (("16*b", {}), ("b", dict(constraints=("b >= 32",)))):
        program = exported(step)(rows(symbol, **how), WS)
        got, want = program.call(X, WS), step(X, WS)
        same(got[0], want[0])
        np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5)  # sums over other tiles
    refused(lambda: exported(step)(rows("b"), WS), fp4.UnsupportedError, "x is of b rows")


def test_symbolic_rows_on_hopper(monkeypatch):
    """The kernels take them, but for the weight gradient of groups, which XLA's loops compute."""
    pretend(monkeypatch, HOPPER)
    try:
        forward = exported(jax.jit(dense), platforms=("cuda",))(rows("b"), W)
        loss = lambda x, w: jnp.sum(grouped(x, w).astype(jnp.float32))  # noqa: E731
        of = lambda x: exported(jax.jit(jax.grad(loss, 1)), platforms=("cuda",))(x, WS)  # noqa: E731
        assert "jax_fp4_grouped_matmul" in called(forward)
        assert "jax_fp4_grouped_contraction" in called(of(X)) - called(of(rows("16*b")))
    finally:
        forget()


# --- a mesh ---


@pytest.mark.core
def test_over_a_mesh_of_explicit_axes():
    how = mesh("Explicit", data=4)
    with jax.set_mesh(how):
        x, w = jax.device_put(X, jax.NamedSharding(how, P("data"))), jax.device_put(W, jax.NamedSharding(how, P()))
        layer = jax.jit(lambda x, w: fp4.dense(x, w, recipe=nvfp4("unquant")))
        program = export.deserialize(exported(layer)(x, w).serialize())
        assert program.nr_devices == 4
        same(jax.jit(program.call)(x, w), layer(x, w))
