"""The map of the project, enforced: imports go strictly downward and each border is crossed in one place only."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "jax_fp4"

# A file may import files of a lower rank only. A file that is not here fails the test: give it a rank first.
# Files that do not exist yet keep their place.
RANKS = {
    rank: names.split()
    for rank, names in {
        0: "_formats _errors _record _version",
        1: "_recipe _array _placement _minifloat _figure checkpoint_policies",
        2: "_lowering _meshes",
        3: "_groups _partition",
        4: "_choosing reference reference_fp8 _ffi _ragged _partition_rules",
        5: "_amax",
        6: "_arguments",
        7: "_float8 _rules delayed _hopper _blackwell _operands",
        8: "_ops checkpoints _export_file _export_layout",
        9: "_export_placement _forms _gather _observe _planes",
        10: "_products _harvest",
        11: "_modes",
        12: "_watched _activations _norm",
        13: "_dense",
        14: "_grouped_dense _grouped_mlp _dot_general _layernorm_dense",
        15: "_routing _mlp",
        16: "_exchange",
        17: "_moe _doctor",
        18: "linen nnx export diagnostics report __main__",
        19: "__init__",
    }.items()
}
RANK = {name: rank for rank, names in RANKS.items() for name in names}

FLAX_ALLOWED = {"linen", "nnx"}  # Flax is optional at import
FFI_ALLOWED = {"_ffi"}  # the only file that spells a target, and so the only one that loads the extensions
EXTENSIONS = {"_cpu", "_cuda"}  # compiled; below every rank

# C++: a file may include files of its own rank and below. The first pattern that matches its path counts.
CPP_RANKS = [
    (r"(.*/)?module\w*\.cc", 3),  # registrations
    (r"(.*/)?(\w+_handler|handler\w*)\.(cc|h)", 2),  # unpack, check, launch; what they share
    (r"cpu/.*", 1),
    (r"kernels/.*", 0),
]
XLA = re.compile(r"^(xla|tsl|absl|jaxlib)/")
PYTHON = re.compile(r"^(nanobind/|pybind11/|Python\.h)")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def module(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, inside functions and under TYPE_CHECKING too.

    `from a import b` gives `a.b`: whether b is a module is for the caller to know. Relative imports are those of a
    file directly in `jax_fp4/`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["jax_fp4" if node.level else "", node.module or ""]))
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def own_modules(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) for every import of a file of the package; a name of the package itself is `__init__`."""
    for line, name in imported(tree):
        parts = name.split(".")
        if parts[0] == "jax_fp4":
            known = len(parts) > 1 and (
                parts[1] in RANK or parts[1] in EXTENSIONS or (PACKAGE / f"{parts[1]}.py").exists()
            )
            yield line, parts[1] if known else "__init__"


def violations(name: str, text: str) -> list[str]:
    """What is wrong with the imports of the package's file `name`."""
    tree = ast.parse(text)
    found = []
    for line, other in own_modules(tree):
        if other in EXTENSIONS:
            if name not in FFI_ALLOWED:
                found.append(f"{name}.py:{line}: imports {other}; only {sorted(FFI_ALLOWED)} may")
        elif other in RANK and RANK[other] >= RANK[name]:
            found.append(f"{name}.py:{line}: rank {RANK[name]} imports {other} of rank {RANK[other]}")
    for line, other in imported(tree):
        if other.split(".")[0] == "flax" and name not in FLAX_ALLOWED:
            found.append(f"{name}.py:{line}: imports flax; only {sorted(FLAX_ALLOWED)} may")
        if other.startswith("jax.ffi") and name not in FFI_ALLOWED:
            found.append(f"{name}.py:{line}: imports jax.ffi; only {sorted(FFI_ALLOWED)} may")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax.ffi" and name not in FFI_ALLOWED:
            found.append(f"{name}.py:{node.lineno}: uses jax.ffi; only {sorted(FFI_ALLOWED)} may")
    return found


def private_jax(text: str) -> list[int]:
    """Lines that import or reach into jax._src."""
    tree = ast.parse(text)
    lines = [line for line, name in imported(tree) if f"{name}.".startswith("jax._src.")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "jax._src":
            lines.append(node.lineno)
    return lines


def cpp_rank(path: str) -> int | None:
    return next((rank for pattern, rank in CPP_RANKS if re.fullmatch(pattern, path)), None)


def cpp_violations(path: str, text: str, files: set[str]) -> list[str]:
    """What is wrong with the includes of `path` (below xla_ffi/), given the paths of all files there."""
    rank = cpp_rank(path)
    if rank is None:
        return [f"{path}: no rank; it belongs in kernels/ or cpu/, or is a *_handler.cc or module.cc"]
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', line)
        if match is None:
            continue
        name = match[1]
        if XLA.match(name) and (rank == 0 or path.endswith((".cu", ".cuh"))):
            found.append(f"{path}:{number}: includes {name}: kernels never see XLA")
        if PYTHON.match(name) and rank < 3:
            found.append(f"{path}:{number}: includes {name}: only module.cc sees Python")
        beside = os.path.normpath(Path(path).parent / name)
        for own in {name, beside} & files:
            own_rank = cpp_rank(own)
            if own_rank is not None and own_rank > rank:
                found.append(f"{path}:{number}: rank {rank} includes {own} of rank {own_rank}")
    return found


@pytest.mark.parametrize("path", sources("jax_fp4"), ids=module)
def test_imports_go_strictly_downward(path):
    assert module(path) in RANK, f"{path.name} has no rank: add it to RANKS in {Path(__file__).name}"
    assert violations(module(path), path.read_text()) == []


def test_ranks_name_each_file_once():
    assert len(RANK) == sum(map(len, RANKS.values()))


def test_no_private_jax():
    for path in sources("jax_fp4", "tests", "examples", "benchmarks"):
        assert private_jax(path.read_text()) == [], path


def test_examples_use_the_public_api():
    for path in sources("examples", "benchmarks"):
        private = [
            name for _, name in own_modules(ast.parse(path.read_text())) if name.startswith("_") and name != "__init__"
        ]
        assert private == [], path


def test_cpp_includes_go_downward():
    top = ROOT / "xla_ffi"
    files = {p.relative_to(top).as_posix(): p for p in top.rglob("*") if p.suffix in {".cc", ".h", ".cu", ".cuh"}}
    assert files, "no C++ sources found"
    for name, path in files.items():
        assert cpp_violations(name, path.read_text(), set(files)) == []


# The checks see what they are for.
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("_ops", "from jax_fp4 import linen"),
        ("_ops", "from . import linen"),
        ("_ops", "import jax_fp4._dense"),
        ("_ops", "from jax_fp4._dense import dense"),
        ("_ops", "from ._dense import dense"),
        ("_ops", "def f():\n    from jax_fp4._dense import dense"),
        ("_ops", "import jax_fp4"),
        ("_dense", "from jax_fp4._grouped_dense import grouped_dense"),
        ("__init__", "import flax.linen"),
        ("_moe", "from flax import nnx"),
        ("_ops", "import jax\njax.ffi.ffi_call('x', None)"),
        ("_ops", "from jax import ffi"),
        ("_ops", "from jax_fp4 import _cpu"),
    ],
)
def test_python_violation_is_seen(name, text):
    assert len(violations(name, text)) == 1


@pytest.mark.parametrize("text", ["import jax._src.core", "from jax._src import core", "import jax\njax._src.core.f()"])
def test_private_jax_is_seen(text):
    assert len(private_jax(text)) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("kernels/nvfp4.h", '#include "xla/ffi/api/ffi.h"'),
        ("kernels/nvfp4.h", "#include <Python.h>"),
        ("kernels/nvfp4.h", '#include "../cpu/quantize.h"'),
        ("cpu/quantize.cu", '#include "xla/ffi/api/ffi.h"'),
        ("cpu/quantize.cc", "#include <nanobind/nanobind.h>"),
        ("quantize_handler.cc", "# include <nanobind/nanobind.h>"),
        ("elsewhere.cc", ""),
    ],
)
def test_cpp_violation_is_seen(path, line):
    assert len(cpp_violations(path, line, {"cpu/quantize.h", "kernels/nvfp4.h"})) == 1
