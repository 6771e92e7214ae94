"""The amax alone: the handler against the specification, and against what the quantizers compute of the same tensor."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouping import CASES
from jax.sharding import PartitionSpec as P
from sharded import mesh

import jax_fp4 as fp4
from jax_fp4 import _ffi, reference
from jax_fp4._amax import amaxes_of_whole
from jax_fp4._formats import Quantization
from jax_fp4._placement import WHOLE, Part

FLAGS = {"plain": {}, "row-scaled": {"row_scaled": True}, "hadamard": {"hadamard": True}}
AXES = [(-1,), (0,), (-1, 0)]


def x_of(shape, seed=0, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.standard_normal(shape) * np.exp(rng.standard_normal((*shape[:-1], 1))), dtype)


def of_quantizer(x, sizes, q: Quantization, axes):
    found = _ffi.quantize_transpose(x, None, None, None, sizes, q)
    return [found[2 if axis == -1 else 5] for axis in axes]


def of_specification(x, sizes, q: Quantization, axes):
    """In NumPy, which compiles nothing."""
    x, sizes = np.asarray(x), None if sizes is None else np.asarray(sizes)
    return [reference.amax(x, sizes, replace(q, axis=axis, hadamard=q.hadamard and axis == 0)) for axis in axes]


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        a, b = (np.atleast_1d(np.asarray(amax)) for amax in (a, b))
        np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32), strict=True)


def agree(x, sizes, flags, axes, dtype=None):
    q = Quantization(**flags, compute_dtype=jnp.dtype(dtype or x.dtype).name)
    got, of_q = (jax.jit(partial(function, q=q, axes=axes))(x, sizes) for function in (_ffi.amax, of_quantizer))
    assert_same(got, of_q)
    assert_same(got, of_specification(x, sizes, q, axes))


@pytest.mark.core
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_any_shape_and_dtype(flags, axes):
    for seed, shape in enumerate(
        [(1, 16), (5, 48), (33, 50), (2, 130, 272), (3, 2, 17, 1), (0, 32), (32, 0), (0, 4, 4)]
    ):
        for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
            agree(x_of(shape, seed, dtype), None, FLAGS[flags], axes)
    agree(x_of((40, 70), 9, jnp.float32), None, FLAGS[flags], axes, jnp.bfloat16)  # master weights


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("case", CASES)
def test_groups(flags, case):
    """Rows of no group are not read."""
    sizes, m = CASES[case]
    x = x_of((m, 40)).at[min(m, sum(max(size, 0) for size in sizes)) :].set(jnp.nan)
    for axes in AXES:
        agree(x, jnp.int32(sizes), FLAGS[flags], axes)


@pytest.mark.parametrize("flags", FLAGS)
def test_special_values(flags):
    x = x_of((64, 96), 3, jnp.float32)
    agree(x.at[5, 40].set(jnp.inf), None, FLAGS[flags], (-1, 0))
    agree(jnp.zeros((20, 30)).at[3].set(-0.0), None, FLAGS[flags], (-1, 0))
    agree(x * 1e-41, None, FLAGS[flags], (-1, 0))
    for bits in (0x7FC00000, 0xFFC00001, 0x7F800001):
        nan = jax.lax.bitcast_convert_type(jnp.uint32(bits), jnp.float32)
        agree(x.at[7, 9].set(nan), None, FLAGS[flags], (-1, 0))


@pytest.mark.parametrize("flags", FLAGS)
def test_under_vmap(flags):
    x, sizes = x_of((3, 50, 32)), jnp.int32([[50, 0], [20, 20], [0, 7]])
    q = Quantization(**FLAGS[flags], compute_dtype="bfloat16")
    amaxes = partial(_ffi.amax, q=q, axes=(-1, 0))
    for i, each in enumerate(zip(*jax.vmap(amaxes)(x, sizes), strict=True)):
        assert_same(each, amaxes(x[i], sizes[i]))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(row=((2,), "float32")), r"result amax is \[2\]; needs \[\]"),
        (dict(column=((), "float32")), r"result amax_t is \[\]; needs \[0\]"),
        (dict(x=jnp.ones(32)), "x has rank below 2"),
        (dict(x=jnp.ones((4, 4), jnp.int32)), "x must be float32"),
        (dict(row_scaled=np.bool_(True), hadamard=np.bool_(True)), "row_scaled excludes hadamard"),
        (dict(compute=np.int32(7)), "attribute compute"),
        (dict(sizes=jnp.zeros(3, jnp.int32)), r"group_sizes is \[3\]; needs \[0\]"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_wrong_call_is_refused_by_name(wrong, says):
    no, yes = np.bool_(False), np.bool_(True)
    attributes = dict(row=yes, column=no, row_scaled=no, hadamard=no, compute=np.int32(0), grouped=no)
    wrong = dict(wrong)
    x, sizes = wrong.pop("x", jnp.ones((4, 16))), wrong.pop("sizes", jnp.zeros(0, jnp.int32))
    results = [((), "float32"), ((0,), "float32")]
    for i, name in enumerate(("row", "column")):
        results[i] = wrong.pop(name, results[i])
    call = jax.ffi.ffi_call("jax_fp4_amax", [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results])
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"jax_fp4_amax: .*{says}"):
        jax.block_until_ready(call(x, sizes, **attributes | wrong))


CUTS = {"rows": P("a"), "columns": P(None, "a"), "both": P("a", "b"), "rows by two axes": P(("a", "b"))}


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("cut", CUTS)
def test_parts(flags, cut):
    """Of each device's part, then the largest: those of the whole, on every device that has part of a row or column."""
    x = x_of((128, 64), 5).at[100, 50].set(1000)
    q = Quantization(**FLAGS[flags], compute_dtype="bfloat16")

    def of_part(x):
        part = Part.of("quantize", "specs.x", CUTS[cut], 2)
        return amaxes_of_whole("quantize", x, None, part, 0, q, (-1, 0), None, False)

    rows, columns = (*CUTS[cut], None)[:2]
    stored = (P(rows), P(columns)) if q.row_scaled else (P(), P())
    several = jax.shard_map(of_part, mesh=mesh(a=2, b=2), in_specs=CUTS[cut], out_specs=stored, check_vma=True)
    assert_same(jax.jit(several)(x), of_specification(x, None, q, (-1, 0)))


def test_what_is_whole_is_left_to_the_quantizer():
    q = Quantization(compute_dtype="bfloat16")
    for part in (WHOLE, Part(((), ()))):
        assert amaxes_of_whole("quantize", x_of((16, 32)), None, part, 0, q, (-1, 0), None, False) == (None, None)


@pytest.mark.parametrize("op", ["quantize", "quantize_transpose"])
@pytest.mark.parametrize("format", ["nvfp4", "float8"])
def test_errors_name_the_op(op, format):
    """Also those that the amax of a part meets first."""

    def of_part(implementation):
        function = partial(getattr(fp4, op), specs=fp4.Specs(x=P("a")), implementation=implementation)
        run = jax.shard_map(lambda x: jax.tree.leaves(function(x, format)), mesh=mesh(a=2), in_specs=P("a"),
                            out_specs=P("a"), check_vma=False)  # fmt: skip
        return jax.jit(run).lower(x_of((64, 32)))

    with pytest.raises(ValueError, match=f"^{op}: implementation is 'bogus'"):
        of_part("bogus")
    if _ffi.cuda_missing:
        with pytest.raises(fp4.UnsupportedError, match=f"^{op}: implementation is 'cuda'"):
            of_part("cuda")
