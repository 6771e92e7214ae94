"""What users meet before any number is computed: versions, extras, an import that needs nothing optional; and what is
in the sdist and in the wheel, which `make wheel-test` builds."""

import email
import email.message
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from required import missing

import jax_fp4

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def run_python(code: str, **environment: str) -> str:
    """The output of a fresh interpreter."""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.core
def test_version_is_one():
    assert jax_fp4.__version__ == PROJECT["project"]["version"]


def test_extras_are_those_promised():
    assert set(PROJECT["project"]["optional-dependencies"]) == {
        "examples", "export", "test", "dev", "docs", "wheel", "nvcc",
    }  # fmt: skip


def test_handlers_are_built_with_the_oldest_supported_jaxlib():
    """A handler built with newer FFI headers is refused by an older runtime."""
    oldest = next(
        re.fullmatch(r"jax>=([\d.]+),.*", d) for d in PROJECT["project"]["dependencies"] if d.startswith("jax>")
    )
    assert oldest is not None
    assert f"jaxlib=={oldest[1]}.*" in PROJECT["build-system"]["requires"]


def test_linters_are_pinned():
    assert all("==" in tool for tool in PROJECT["project"]["optional-dependencies"]["dev"])


@pytest.mark.core
def test_import_needs_neither_flax_nor_cuda():
    """E8. What is said where CUDA is asked for: tests/test_ops.py."""
    loaded = run_python("import sys, jax_fp4; print(*sys.modules)").split()
    assert "jax_fp4" in loaded
    optional = {"flax", "optax", "orbax", "safetensors", "nvidia", "jax_cuda12_plugin"}
    assert [name for name in loaded if name.split(".")[0] in optional] == []
    assert "jax_fp4._cuda" not in loaded


@pytest.mark.core
def test_import_starts_no_backend():
    """Devices are the user's to set up after the import (XLA flags, distributed initialisation)."""
    code = "import jax, jax_fp4; jax.config.update('jax_num_cpu_devices', 3); print(len(jax.devices('cpu')))"
    assert run_python(code, JAX_PLATFORMS="cpu") == "3"


def test_import_tolerates_a_bad_backward_mode_in_the_environment():
    """The variable is read when a recipe is made; the error then names it."""
    code = """if True:
        import jax_fp4
        try:
            jax_fp4.NVFP4BlockScaling()
        except ValueError as error:
            print(error)
    """
    assert "JAX_FP4_BACKWARD_MODE" in run_python(code, JAX_FP4_BACKWARD_MODE="sideways")


def test_typing_marker_is_installed():
    assert (Path(jax_fp4.__file__).parent / "py.typed").exists()


def test_makefile_names_its_goals():
    """`make help` lists what the README and CI use."""
    makefile = (ROOT / "Makefile").read_text()
    for goal in ("demo", "test", "lint", "core", "bazel", "wheel", "wheel-test", "wheel-cuda", "clean", "help"):
        assert re.search(rf"^{goal}:.*## \w", makefile, re.MULTILINE), goal


def test_wheel_and_changelog_agree():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog or f"## [{jax_fp4.__version__}]" in changelog
    assert "### Numerics" in changelog


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel that is installed; the sdist it was built from lies beside it."""
    name = os.environ.get("JAX_FP4_WHEEL")
    if name is None:
        missing("wheel", "JAX_FP4_WHEEL names no wheel: needs `make wheel-test`, which builds and installs one")
    return Path(str(name))


@pytest.fixture(scope="module")
def sdist(wheel) -> Path:
    [path] = wheel.parent.glob("jax_fp4-*.tar.gz")
    return path


def sources() -> set[str]:
    """The files of this checkout, but for what is made from them."""
    folders = ("jax_fp4", "xla_ffi", "tests", "docs", "examples", "benchmarks")
    found = [path for path in ROOT.iterdir() if path.name != ".git"]
    found += [path for folder in folders for path in (ROOT / folder).rglob("*")]
    made = re.compile(r"__pycache__|\.so$")
    return {path.relative_to(ROOT).as_posix() for path in found if path.is_file() and not made.search(str(path))}


def metadata(text: bytes) -> email.message.Message:
    return email.message_from_string(text.decode())


def read(wheel: Path, name: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        [path] = [path for path in archive.namelist() if path.endswith(f".dist-info/{name}")]
        return archive.read(path)


def test_the_tests_run_on_the_installed_wheel(wheel):
    assert Path(sys.prefix) in Path(jax_fp4.__file__).parents
    with zipfile.ZipFile(wheel) as archive:
        for name in ("__init__.py", "_ffi.py", "nnx.py"):
            assert archive.read(f"jax_fp4/{name}") == (Path(jax_fp4.__file__).parent / name).read_bytes()


def test_sdist_has_what_the_build_and_the_tests_need_and_no_more(sdist):
    with tarfile.open(sdist) as archive:
        names = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
    assert names == sources() | {"PKG-INFO"}
    assert {"LICENSE", "README.md", "CMakeLists.txt", "Makefile", "BUILD.bazel", "jax_fp4/py.typed"} < names


def test_wheel_has_the_package_the_cpu_module_and_the_license(wheel):
    files = {name for name in sources() if name.startswith("jax_fp4/")}
    with zipfile.ZipFile(wheel) as archive:
        names = {info.filename for info in archive.infolist() if not info.is_dir()}
    assert {name for name in names if not re.search(r"\.dist-info/|\.so$", name)} == files
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}"
    [module] = [name for name in names if name.endswith(".so")]
    assert re.match(rf"jax_fp4/_cpu\.{tag}-.*\.so$", module)
    assert read(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_metadata_is_that_of_the_project(wheel, sdist):
    project, found = PROJECT["project"], metadata(read(wheel, "METADATA"))
    assert (found["Name"], found["Version"]) == (project["name"], project["version"])
    assert found["License-Expression"] == project["license"] and found.get_all("License-File") == ["LICENSE"]
    assert set(str(found["Requires-Python"]).split(",")) == set(project["requires-python"].split(","))
    assert set(found.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    needs = [need for need in found.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert sorted(re.split(r"\W", need)[0] for need in needs) == sorted(
        re.split(r"\W", need)[0] for need in project["dependencies"]
    )
    assert found.get_payload() == (ROOT / "README.md").read_text()
    with tarfile.open(sdist) as archive:
        [info] = [member for member in archive if member.name.endswith("/PKG-INFO")]
        own = archive.extractfile(info)
        assert own is not None and own.read() == read(wheel, "METADATA")


def test_wheel_is_tagged_for_this_python(wheel):
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tags = metadata(read(wheel, "WHEEL")).get_all("Tag", [])
    assert tags and all(tag.startswith(f"{python}-{python}-") for tag in tags)
    assert wheel.name.split("-", 2)[2] == f"{python}-{python}-{'.'.join(tag.split('-')[2] for tag in tags)}.whl"
