"""The steps of the CUDA kernel of the 8-bit formats, run on the host: bit for bit the specification in NumPy, and no
byte outside its results. No GPU is needed, only nvcc, as for test_kernels_cuda."""

import ctypes
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from required import missing

from jax_fp4 import reference_fp8
from jax_fp4._formats import Float8Quantization

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["-std=c++17", "-O1", "--ftz=false", "--fmad=false", "-cudart=static", "-shared", "-arch=sm_90a"]
HOST = "-Xcompiler=-fPIC,-ffp-contract=off,-fno-strict-aliasing"
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SCALINGS = {
    "mxfp8": dict(scaling="mxfp8"),
    "mxfp8 tiles": dict(scaling="mxfp8", tile=32),
    "blocks": dict(scaling="float8_block", eps=1e-3),
    "blocks power": dict(scaling="float8_block", power_of_two=True),
    "tiles": dict(scaling="float8_block", tile=128, power_of_two=True),
    "tensor": dict(scaling="float8"),
}
SHAPES = [(1, 1), (3, 31, 33), (129, 127), (2, 130, 264), (7, 1000), (160, 96), (0, 40), (40, 0), (128, 128)]
GUARD, POISON = 64, 0x5A


@pytest.fixture(scope="module")
def emulate(tmp_path_factory):
    nvcc = shutil.which(os.environ.get("CUDACXX", "nvcc"))
    if nvcc is None:
        missing("nvcc", "no nvcc (or CUDACXX) is on PATH, which the build of the CUDA extension needs too")
    assert nvcc is not None  # `missing` does not return
    library = tmp_path_factory.mktemp("emulate") / "emulate_float8.so"
    source = ROOT / "tests" / "cpp" / "emulate_float8.cu"
    done = subprocess.run([nvcc, *FLAGS, HOST, str(source), "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library)).emulate_float8


def values(seed, shape, dtype):
    """Of all magnitudes; zeros of both signs, denormals, Inf and NaN of both signs, and ties."""
    rng = np.random.default_rng(seed)
    spread = 40 if dtype == "float32" else 6
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-spread, spread + 1, (*shape[:-1], 1)))).astype(np.float32)
    flat = x.reshape(-1)
    if flat.size:
        flat[rng.integers(0, flat.size, flat.size // 5)] = rng.integers(-40, 40, flat.size // 5) / 16
        flat[rng.integers(0, flat.size, flat.size // 9)] = -0.0
    if flat.size > 500 and seed % 2:
        odd = [np.inf, -np.inf, np.nan, -np.nan, 1e-45, 3e38, np.uint32(0x7F800001).view(np.float32)]
        flat[rng.integers(0, flat.size, len(odd))] = odd
    with np.errstate(all="ignore"):
        return x.astype(DTYPES[dtype])


class Guarded:
    """An array between guards that must survive."""

    def __init__(self, like):
        self.like, size = like, like.size * like.dtype.itemsize
        self.memory = np.full(size + 2 * GUARD + 16, POISON, np.uint8)
        start = -self.memory.ctypes.data % 16 + GUARD
        self.inside = self.memory[start : start + size]
        self.pointer = self.inside.ctypes.data if size else self.memory.ctypes.data + start

    def check(self):
        want = self.like.reshape(-1).view(np.uint8)
        np.testing.assert_array_equal(self.inside, want)
        self.inside[:] = POISON
        assert np.all(self.memory == POISON)


def check(emulate, x, dtype, q: Float8Quantization, axes):
    scale = None
    if q.scaling == "float8":
        scale = np.asarray(np.abs(np.random.default_rng(1).standard_normal(x.shape[:-2])), np.float32)
    want = {a: reference_fp8.quantize(x, None, scale, None, replace(q, axis=a)) for a in axes}
    out = {a: [Guarded(np.ascontiguousarray(v)) for v in want[a][:2]] for a in axes}
    pointers = [ctypes.c_void_p(g.pointer) for a in (-1, 0) for g in out.get(a, ())]
    pointers = pointers if len(axes) == 2 else pointers + [None] * 2 if axes == (-1,) else [None] * 2 + pointers
    scalings, names = ["mxfp8", "float8_block", "float8"], list(DTYPES)
    attributes = [
        names.index(dtype),
        names.index(q.compute_dtype),
        scalings.index(q.scaling),
        q.codes == "e5m2",
        q.tile,
    ]
    source = Guarded(np.ascontiguousarray(x))
    source.inside[:] = source.like.reshape(-1).view(np.uint8)
    *batch, m, k = x.shape
    amax = np.zeros(batch, np.float32)
    emulate(
        ctypes.c_void_p(source.pointer),
        (ctypes.c_int32 * 5)(*attributes),
        (ctypes.c_int64 * 3)(int(np.prod(batch)), m, k),
        ctypes.c_int32(q.power_of_two),
        ctypes.c_float(q.eps),
        None if scale is None else scale.ctypes.data_as(ctypes.c_void_p),
        *pointers,
        amax.ctypes.data_as(ctypes.c_void_p),
    )
    for axis in axes:
        out[axis][0].check()
        if q.scaling != "float8":
            out[axis][1].check()
    if q.scaling == "float8":
        np.testing.assert_array_equal(amax.view(np.uint32), np.asarray(want[axes[0]][2]).view(np.uint32))


@pytest.mark.parametrize("codes", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCALINGS)
def test_steps_equal_the_specification(emulate, name, dtype, codes):
    for seed, shape in enumerate(SHAPES):
        for compute in DTYPES:
            q = Float8Quantization(codes=codes, compute_dtype=compute, **SCALINGS[name])
            for odd, axes in enumerate(((-1, 0), (-1, 0), (-1,), (0,))):
                check(emulate, values(2 * seed + odd, shape, dtype), dtype, q, axes)
