"""CMake and Bazel build the same: sources, flags, headers, architectures; and Bazel's Python library has the ranks of
test_layering.py. Both builds are read here, neither is run."""

import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_layering import RANKS

ROOT = Path(__file__).resolve().parent.parent
BAZEL = (ROOT / "BUILD.bazel").read_text()
CMAKE = (ROOT / "CMakeLists.txt").read_text() + (ROOT / "xla_ffi" / "CMakeLists.txt").read_text()
MODULES = ("_cpu", "_cuda")


class Unit(NamedTuple):
    """One compilation."""

    source: str  # below the top
    flags: frozenset[str]
    defines: frozenset[str]


# ---- Bazel ----------------------------------------------------------------------------------------------------------
class Bazel:
    """The targets of a BUILD file, {name: arguments}, for x86-64. Ours is Python as well, so Python runs it."""

    RULES = ("cc_library", "cc_test", "genrule", "nanobind_extension", "py_library", "py_test")

    def __init__(self, text: str):
        self.targets: dict[str, dict[str, Any]] = {}
        ignored = {name: lambda *_, **__: None for name in ("load", "package")}
        exec(text, {"glob": glob, "select": x86} | ignored | dict.fromkeys(self.RULES, self._record))

    def _record(self, name: str, **arguments: Any) -> None:
        if name in self.targets:
            raise ValueError(f"BUILD.bazel has two targets {name}")
        self.targets[name] = arguments

    def below(self, name: str) -> list[dict[str, Any]]:
        """A target of this file and all targets that it needs."""
        seen: dict[str, dict[str, Any]] = {}
        left = [name]
        while left:
            at = left.pop()
            if at not in seen:
                seen[at] = self.targets[at]
                needs = [*seen[at].get("deps", []), *seen[at].get("srcs", [])]
                left += [need.removeprefix(":") for need in needs if need.startswith(":")]
                left += [rule for rule, a in self.targets.items() if set(a.get("outs", [])) & set(needs)]
        return list(seen.values())

    def units(self, module: str) -> set[Unit]:
        found = set()
        for target in self.below(f"jax_fp4/{module}"):
            flags = target.get("copts") or [f for f in shlex.split(target.get("cmd", "")) if re.match(r"-\w{2}|--", f)]
            defines = [shlex.split(define)[0] for define in target.get("local_defines", [])]
            for source in target.get("srcs", []):
                if source.endswith((".cc", ".cu")):
                    # CMake sets this for some libraries only; it changes no symbol that a module exports
                    own = host(flags) - {"-fvisibility-inlines-hidden"}
                    found.add(Unit(source, own, frozenset(defines)))
        return found

    def headers(self, module: str) -> set[str]:
        listed = (a.get("hdrs", []) + a.get("srcs", []) for a in self.below(f"jax_fp4/{module}"))
        return {path for paths in listed for path in paths if path.endswith((".h", ".cuh"))}


def glob(include: Iterable[str], exclude: Iterable[str] = ()) -> list[str]:
    def matches(patterns: Iterable[str]) -> set[Path]:  # to Python 3.11 and 3.12, `**` at the end is folders only
        return {path for pattern in patterns for path in ROOT.glob(re.sub(r"\*\*$", "**/*", pattern))}

    found = matches(include) - matches(exclude)
    return sorted(path.relative_to(ROOT).as_posix() for path in found if path.is_file())


def x86(cases: dict[str, Any]) -> Any:
    return cases.get("@platforms//cpu:x86_64", cases["//conditions:default"])


def host(flags: Iterable[str]) -> frozenset[str]:
    """-Xcompiler=a,b is a and b."""
    split = (
        flag.removeprefix("-Xcompiler=").split(",") if flag.startswith("-Xcompiler=") else [flag] for flag in flags
    )
    return frozenset(part for parts in split for part in parts)


# ---- CMake ----------------------------------------------------------------------------------------------------------
class CMake:
    """The targets of our CMake files: the commands that decide what is compiled are carried out, with every `if` taken
    but that of JAX_FP4_WERROR; others are passed over."""

    def __init__(self, text: str):
        self.variables: dict[str, str] = {}
        self.targets: dict[str, dict[str, list[str]]] = {}
        self._run(list(commands(text)))

    def _run(self, left: list[tuple[str, str]]) -> None:
        while left:
            command, arguments = left.pop(0)
            if command == "foreach":
                body = taken(left, "endforeach")
                variable, *_, items = arguments.split()
                for item in self.variables[items].split(";"):
                    self.variables[variable] = item
                    self._run(list(body))
            elif command == "if" and arguments == "JAX_FP4_WERROR":
                taken(left, "endif")
            elif carry_out := getattr(self, f"_{command}", None):
                carry_out(*self._expanded(arguments))

    def _expanded(self, arguments: str) -> Iterator[str]:
        for word in re.findall(r'(?:"[^"]*"|[^\s"])+', arguments):
            while found := re.search(r"\$\{(\w+)\}", word):  # the innermost first
                word = word.replace(found[0], self.variables.get(found[1], ""))
            if word.startswith('"'):
                yield word.strip('"')
            else:
                yield from filter(None, word.split(";"))

    def _set(self, name: str, *values: str) -> None:
        self.variables[name] = ";".join(values[: values.index("CACHE")] if "CACHE" in values else values)

    def _list(self, _append: str, name: str, *values: str) -> None:
        self.variables[name] = ";".join(filter(None, [self.variables[name], *values]))

    def _string(self, _replace: str, old: str, new: str, name: str, text: str) -> None:
        self.variables[name] = text.replace(old, new)

    def _file(self, _glob: str, name: str, _depends: str, pattern: str) -> None:
        self.variables[name] = ";".join(path.removeprefix("xla_ffi/") for path in glob([f"xla_ffi/{pattern}"]))

    def _add_library(self, name: str, _object: str, *sources: str) -> None:
        self.targets[name] = {"sources": list(sources), "flags": [], "defines": []}

    _nanobind_add_module = _add_library

    def _target_compile_options(self, name: str, _private: str, *flags: str) -> None:
        self.targets[name]["flags"] += flags

    def _target_compile_definitions(self, name: str, _private: str, *defines: str) -> None:
        self.targets[name]["defines"] += defines

    def _set_target_properties(self, name: str, _properties: str, *pairs: str) -> None:
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if re.fullmatch(r"(CXX|CUDA)_VISIBILITY_PRESET", key):
                self.targets[name]["flags"] += [f"-fvisibility={value}"]
            if key == "CXX_VISIBILITY_PRESET":  # nanobind sees to it for modules
                self.targets[name]["flags"] += [f"-std=c++{self.variables['CMAKE_CXX_STANDARD']}"]

    def units(self, module: str) -> set[Unit]:
        found = set()
        objects = re.findall(r"\$<TARGET_OBJECTS:(\w+)>", " ".join(self.targets[module]["sources"]))
        for name in [module, *objects]:
            target = self.targets[name]
            for source in target["sources"]:
                if not source.startswith("$"):
                    flags = host(target["flags"]) | (self._of_nvcc() if source.endswith(".cu") else set())
                    found.add(Unit(f"xla_ffi/{source}", flags, frozenset(target["defines"])))
        return found

    def _of_nvcc(self) -> set[str]:
        """What CMake adds by itself for a release."""
        archs = self.variables["CMAKE_CUDA_ARCHITECTURES"].split(";")
        flags = {f"--generate-code=arch=compute_{a},code=[compute_{a},sm_{a}]" for a in archs}
        return flags | {f"-std=c++{self.variables['CMAKE_CUDA_STANDARD']}", "-O3", "-DNDEBUG", "-fPIC"}


def commands(text: str) -> Iterator[tuple[str, str]]:
    bare = re.sub(r"#.*", "", text)
    return ((m[1], m[2].strip()) for m in re.finditer(r'(\w+)\s*\(((?:"[^"]*"|[^()"])*)\)', bare))


def taken(left: list[tuple[str, str]], end: str) -> list[tuple[str, str]]:
    """The commands up to `end`, which are taken off `left`."""
    at = [command for command, _ in left].index(end)
    body = left[:at]
    del left[: at + 1]
    return body


# ---- Both -----------------------------------------------------------------------------------------------------------
def differences(bazel: str = BAZEL, cmake: str = CMAKE) -> list[str]:
    """What one of the builds compiles and the other does not, or not so."""
    by_bazel, by_cmake = Bazel(bazel), CMake(cmake)
    found = []
    for module in MODULES:
        a, b = by_bazel.units(module), by_cmake.units(module)
        found += [f"{module}: only Bazel has {unit}" for unit in a - b]
        found += [f"{module}: only CMake has {unit}" for unit in b - a]
        needed = included({unit.source for unit in a | b})
        found += [f"{module}: Bazel does not list {path}" for path in needed - by_bazel.headers(module)]
    return found


def included(sources: Iterable[str]) -> set[str]:
    """Our headers that these files include, or that those include."""
    seen: set[str] = set()
    left = list(sources)
    while left:
        path = left.pop()
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', (ROOT / path).read_text(), re.MULTILINE):
            for header in {
                os.path.normpath(os.path.join(folder, name)) for folder in (os.path.dirname(path), "xla_ffi")
            }:
                if (ROOT / header).is_file() and header not in seen:
                    seen.add(header)
                    left.append(header)
    return seen


def ranks(bazel: str = BAZEL) -> list[list[str]]:
    """The Python files of each rank, from the top target down; every rank needs the next lower one only."""
    targets = Bazel(bazel).targets
    found, at = [], "jax_fp4"
    while deps := targets[at].get("deps", []):
        [dep] = deps
        at = dep.removeprefix(":")
        found.append([Path(source).stem for source in targets[at]["srcs"]])
    return found[::-1]


def test_the_builds_agree():
    assert differences() == []


def test_both_were_read():
    """Neither reader passed over something."""
    units = CMake(CMAKE).units("_cpu")
    assert {unit.source for unit in units} >= {"xla_ffi/module.cc", "xla_ffi/cpu/kernels.cc", "xla_ffi/cpu_handler.cc"}
    kernels = {next(iter(u.defines)): u.flags for u in units if u.source.endswith("kernels.cc")}
    assert set(kernels) == {f"JAX_FP4_ISA={isa}" for isa in ("baseline", "avx2", "avx512")}
    assert kernels["JAX_FP4_ISA=avx512"] >= {"-mavx512vl", "-ffp-contract=off", "-Werror=switch", "-std=c++17"}
    archs = next(iter(CMake(CMAKE).targets["_cuda"]["defines"]))
    assert archs == 'JAX_FP4_ARCHS="sm_80, sm_89, sm_90a, sm_100a, sm_103a, sm_120a"'


def test_every_file_of_xla_ffi_is_built():
    bazel = Bazel(BAZEL)
    listed = {unit.source for module in MODULES for unit in bazel.units(module)}
    listed |= {path for module in MODULES for path in bazel.headers(module)}
    assert {path for path in glob(["xla_ffi/**/*"]) if path.endswith((".cc", ".cu", ".h", ".cuh"))} == listed


def test_python_is_listed_by_rank():
    """A new file of jax_fp4/ has its rank in test_layering.py and in BUILD.bazel."""
    files = {path.stem for path in (ROOT / "jax_fp4").glob("*.py")}
    assert ranks() == [sorted(files & set(names)) for _, names in sorted(RANKS.items())]


def test_every_test_file_has_a_target():
    targets = Bazel(BAZEL).targets
    assert {path.stem for path in (ROOT / "tests").glob("test_*.py")} < set(targets)
    assert {"import_test", "fuzz_kernels", "fuzz_float8"} < set(targets)


def test_tests_have_the_files_that_they_read():
    """Under Bazel a test sees what its target lists: all of the checkout's top but WORKSPACE.bazel and dot files."""
    data = set(Bazel(BAZEL).targets["test_packaging"]["data"])
    read = {"BUILD.bazel", "CHANGELOG.md", "CMakeLists.txt", "CONTRIBUTING.md", "LICENSE", "MODULE.bazel", "Makefile"}
    assert data >= {*read, "README.md", "pyproject.toml", "docs/conf.py", "tests/required.py", "xla_ffi/CMakeLists.txt"}
    assert all((ROOT / name).is_file() for name in data)


def test_cuda_targets_are_manual():
    """`bazel build //...` needs no nvcc."""
    bazel = Bazel(BAZEL)
    cpu = bazel.below("jax_fp4/_cpu")
    cuda = [target for target in bazel.below("jax_fp4/_cuda") if target not in cpu]
    assert len(cuda) > 3 and all("manual" in target["tags"] for target in cuda)
    assert "cuda" not in str(cpu)


def test_module_has_the_version_of_the_project():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f'module(\n    name = "jax_fp4",\n    version = "{version}",\n)' in (ROOT / "MODULE.bazel").read_text()


# The checks see what they are for.
@pytest.mark.parametrize(
    ("build", "old", "new", "says"),
    [
        ("bazel", '"xla_ffi/quantize_handler.cc",', "", "only CMake has Unit(source='xla_ffi/quantize_handler.cc'"),
        ("cmake", "cpu/quantize.cc", "", "only Bazel has Unit(source='xla_ffi/cpu/quantize.cc'"),
        ("cmake", "grouped_gemm_handler.cc", "", "_cuda: only Bazel has Unit(source='xla_ffi/grouped_gemm_handler.cc'"),
        ("bazel", '"-ffp-contract=off",', "", "only Bazel has Unit(source='xla_ffi/cpu/kernels.cc'"),
        ("cmake", "-mavx512dq", "", "only CMake has Unit(source='xla_ffi/cpu/kernels.cc'"),
        ("bazel", '"--fmad=false",', "", "only CMake has Unit(source='xla_ffi/kernels/quantize_rows.cu'"),
        (
            "cmake",
            "-Xcompiler=-Wall,-Wextra",
            "-Xcompiler=-Wall",
            "only CMake has Unit(source='xla_ffi/kernels/amax.cu'",
        ),
        ("cmake", "80;89;", "80;", "only CMake has Unit(source='xla_ffi/module_cuda.cc'"),
        ("bazel", '["JAX_FP4_ISA=" + isa]', '["JAX_FP4_ISA=avx"]', "JAX_FP4_ISA=avx'"),
        ("bazel", 'glob(["xla_ffi/cpu/*.h"])', "[]", "_cpu: Bazel does not list xla_ffi/cpu/tile.h"),
        ("bazel", '"xla_ffi/kernels/*.cuh",', "", "_cuda: Bazel does not list xla_ffi/kernels/wgmma.cuh"),
        ("bazel", '        "xla_ffi/cuda_handler.h",', "", "_cuda: Bazel does not list xla_ffi/cuda_handler.h"),
        ("cmake", "CUDA_STANDARD 17", "CUDA_STANDARD 20", "only CMake has Unit(source='xla_ffi/kernels/amax.cu'"),
    ],
)
def test_a_difference_is_seen(build, old, new, says):
    text = {"bazel": BAZEL, "cmake": CMAKE}
    assert old in text[build]
    found = differences(**text | {build: text[build].replace(old, new)})
    assert any(says in line for line in found), found


@pytest.mark.parametrize(("old", "new"), [(" _ops ", " "), (" _ops ", " _dense _ops "), (" nnx ", " gone ")])
def test_a_wrong_rank_is_seen(old, new):
    assert old in BAZEL
    assert ranks(BAZEL.replace(old, new)) != ranks()
