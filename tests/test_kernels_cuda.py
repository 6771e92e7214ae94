"""The CUDA kernels compile for every architecture that they promise, without a warning and, on Hopper, without spills.

No GPU is needed, only nvcc: the build of the extension asks for it, and a machine that tests on CPU may have it too.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from required import missing

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "xla_ffi" / "kernels").glob("*.cu"))
CMAKE = (ROOT / "xla_ffi" / "CMakeLists.txt").read_text()
CHECKED = [sys.executable, str(ROOT / "xla_ffi" / "nvcc_checked.py")]  # as the build launches nvcc


def setting(pattern: str, text: str = CMAKE) -> str:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return found[1]


ARCHS = setting(r'set\(JAX_FP4_CUDA_ARCHS "([^"]*)"', (ROOT / "CMakeLists.txt").read_text()).split(";")
# As CMake compiles them in a release; warnings of nvcc, ptxas and the host compiler are errors here.
FLAGS = [
    "-std=c++" + setting(r"set\(CMAKE_CUDA_STANDARD (\d+)\)"),
    *("-O3", "-DNDEBUG"),
    *setting(r"set\(cuda_exact ([^)]*)\)").split(),
    setting(r"target_compile_options\(jax_fp4_cuda_kernels PRIVATE \S+ (-Xcompiler=[^)]*)\)") + ",-Werror",
    "-Werror=all-warnings",
]


@pytest.fixture(scope="module")
def nvcc() -> str:
    found = shutil.which(os.environ.get("CUDACXX", "nvcc"))
    if found is None:
        missing("nvcc", "no nvcc (or CUDACXX) is on PATH, which the build of the CUDA extension needs too")
    return found


def test_the_architectures_are_those_of_the_wheel():
    # pip's defaults, which pass through pyproject.toml, and CMake's.
    assert f'default = "{";".join(ARCHS)}"' in (ROOT / "pyproject.toml").read_text()
    assert ARCHS == ["80", "89", "90a", "100a", "103a", "120a"]


# About 30 s of one core each: in `make test` the oldest and Hopper's, in `make test-full` and `make wheel-cuda` all.
# Down to machine code, since inline PTX is text to everything before ptxas; and optimised as in the build, since
# ptxas -O0 saves a tenth to a third only. What is saved is the host's half: its warnings are the same for every
# architecture, so one of them makes an object file.
@pytest.mark.slow
@pytest.mark.parametrize(
    "arch", [arch if arch in ("80", "90a") else pytest.param(arch, marks=pytest.mark.full) for arch in ARCHS]
)
def test_kernels_compile(nvcc, arch, tmp_path):
    assert SOURCES
    for source in SOURCES:
        hopper = arch == "90a"
        # The tile kernels are tuned to the registers they have there: a spill is the first sign of a slower kernel.
        spills = ["-Xptxas=-warn-spills"] if hopper and "tiles" in source.stem else []
        target = [f"-gencode=arch=compute_{arch},code=sm_{arch}", "-c" if hopper else "-cubin"]
        command = [nvcc, *FLAGS, *spills, *target, str(source), "-o", str(tmp_path / source.stem)]
        done = subprocess.run([*CHECKED, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{source.name} for sm_{arch}\n{done.stdout}{done.stderr}"


def test_a_spill_is_seen(nvcc, tmp_path):
    """The check above can fail: a kernel that needs more registers than its bounds leave it."""
    source = tmp_path / "spill.cu"
    source.write_text("""
        __global__ void __launch_bounds__(1024, 2) spill(float* p) {
          float a[64];
        #pragma unroll
          for (int i = 0; i < 64; ++i) a[i] = p[i * 1024 + threadIdx.x];
          __syncthreads();
        #pragma unroll
          for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = a[i] * a[(i + 31) % 64];
        }
    """)
    command = [nvcc, *FLAGS, "-gencode=arch=compute_90a,code=sm_90a", "-cubin", str(source), "-o", str(tmp_path / "o")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    done = subprocess.run([*command, "-Xptxas=-warn-spills"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "spill" in done.stderr


def test_a_serialised_product_is_seen(nvcc, tmp_path):
    """The build fails where ptxas cannot keep warpgroup products under way: here one is conditional."""
    source = tmp_path / "serialised.cu"
    source.write_text(f"""
        #include "{ROOT / "xla_ffi" / "kernels" / "wgmma.cuh"}"
        using namespace jax_fp4::cuda;
        __global__ void __launch_bounds__(128) products(float* out, uint32_t a, uint32_t b, int steps) {{
          float sums[32] = {{}};
          wgmma_fence();
        #pragma unroll
          for (int s = 0; s < 4; ++s)
            if (s < steps) Wgmma<64>::from_shared<false, false>(sums, a + s, b + s);
          wgmma_commit();
          wgmma_wait<0>();
          for (int i = 0; i < 32; ++i) out[i * 128 + threadIdx.x] = sums[i];
        }}
    """)
    assert "nvcc_checked.py" in CMAKE
    command = [nvcc, *FLAGS, "-gencode=arch=compute_90a,code=sm_90a", "-cubin", str(source), "-o", str(tmp_path / "o")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    done = subprocess.run([*CHECKED, *command], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "serialise" in done.stderr
