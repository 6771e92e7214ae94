"""The CPU kernels under sanitizers, each compiled instruction set against the others; and what their objects export."""

import os
import platform
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from required import missing

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "xla_ffi" / "cpu"
PROGRAMS = ("fuzz_kernels", "fuzz_float8")  # in tests/cpp
# The flags of xla_ffi/CMakeLists.txt that decide bits; -O1 keeps the build short.
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
FLAGS = ["-std=c++17", "-O1", "-g", *WARNINGS, "-ffp-contract=off", "-fno-fast-math", "-pthread"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# Instruction set -> its flags, as CMake passes them.
ISA_FLAGS = {
    isa: flags.split()
    for isa, flags in re.findall(r"set\(isa_flags_(\w+)([^)]*)\)", (ROOT / "xla_ffi" / "CMakeLists.txt").read_text())
}
ISAS = list(ISA_FLAGS) if platform.machine() in {"x86_64", "AMD64"} else ["baseline"]


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        missing(
            "g++", "there is no g++ on PATH: needs g++ (or CXX) on PATH, which the build of the extension needs too"
        )
    return found


def run(*command) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kernels(isa: str) -> list:
    """What compiles the kernels of one instruction set."""
    return [*ISA_FLAGS[isa], f"-DJAX_FP4_ISA={isa}", "-c", KERNELS / "kernels.cc"]


@pytest.fixture(scope="module")
def programs(compiler, tmp_path_factory) -> Path:
    """The folder that holds them."""
    folder = tmp_path_factory.mktemp("cpp")
    mains = [ROOT / "tests" / "cpp" / f"{name}.cc" for name in PROGRAMS]
    common = [*map(kernels, ISAS), *(["-c", KERNELS / f"{name}.cc"] for name in ("dispatch", "quantize", "float8"))]
    sources = [*common, *(["-c", main] for main in mains)]
    objects = [folder / f"{i}.o" for i in range(len(sources))]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda source, obj: run(compiler, *FLAGS, *SANITIZERS, *source, "-o", obj), sources, objects))
    for name, main in zip(PROGRAMS, objects[len(common) :], strict=True):
        run(compiler, *FLAGS, *SANITIZERS, *objects[: len(common)], main, "-o", folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("program", PROGRAMS)
def test_kernels_agree_and_stay_inside_their_buffers(programs, program, seed):
    assert run(programs / program, 500, seed).startswith(f"{program}: 500 cases on ")


def test_the_instruction_sets_are_those_that_cmake_builds():
    assert list(ISA_FLAGS) == ["baseline", "avx2", "avx512"]
    assert ISA_FLAGS["baseline"] == []
    assert "-mavx512f" in ISA_FLAGS["avx512"]


@pytest.mark.parametrize("isa", ISAS)
def test_an_instruction_set_exports_its_table_only(compiler, isa, tmp_path):
    # Anything else could be merged by the linker with the copy of another instruction set. -O0 inlines least.
    obj = tmp_path / "kernels.o"
    run(compiler, *FLAGS, "-O0", *kernels(isa), "-o", obj)
    symbols = run("nm", "--defined-only", "--extern-only", "-C", obj).splitlines()
    names = [line.split(" ", 2)[2] for line in symbols]
    # DW.ref: the pointer to the exception personality, data that is the same everywhere
    assert [name for name in names if not name.startswith("DW.ref.")] == [f"jax_fp4::kernels_{isa}"]
