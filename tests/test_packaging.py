"""What users meet before any number is computed: versions, extras, an import that needs nothing optional; and what is
in the sdist and in the wheel, which `make wheel-test` builds."""

import ast
import email
import email.message
import os
import re
import shutil
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


def imports(folder: str) -> set[str]:
    """The modules from elsewhere that the Python files of a folder import, wherever in the file."""
    found, own = set(), {"jax_fp4", *sys.stdlib_module_names}
    for path in (ROOT / folder).glob("*.py"):
        own.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return found - own


def wanted(extra: str) -> set[str]:
    """The projects that `pip install jax_fp4[extra]` names, extras of ours that the extra names included."""
    needs = list(PROJECT["project"]["dependencies"]) if extra == "test" else []
    for need in PROJECT["project"]["optional-dependencies"][extra]:
        if own := re.fullmatch(r"jax_fp4\[([\w,]+)\]", need):
            needs += [name for one in own[1].split(",") for name in wanted(one)]
        else:
            needs.append(need)
    return {re.split(r"[^\w-]", need)[0] for need in needs}


def test_the_extra_for_tests_has_all_that_the_suite_imports():
    """So the suite runs on `pip install wheel[test]`; the examples are run by it. ml_dtypes comes with jax."""
    own = {path.stem for path in (ROOT / "examples").glob("*.py")}
    modules = (imports("tests") - own) | imports("examples")
    assert modules >= {"pytest", "matplotlib", "orbax", "safetensors"}
    projects = {"orbax": "orbax-checkpoint"}
    assert {projects.get(module, module) for module in modules} - {"ml_dtypes"} <= wanted("test")
    assert {"pytest-xdist", "beartype"} <= wanted("test")  # named by the options of pytest


# ---- the Makefile ---------------------------------------------------------------------------------------------------
def make(*arguments: str, folder: Path = ROOT, required: str = "") -> subprocess.CompletedProcess[str]:
    """As typed in a shell, also where the tests were started by make."""
    if shutil.which("make") is None:
        missing("make", "there is no make on PATH")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--no-print-directory", "-C", str(folder), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=clean | {"JAX_FP4_REQUIRE": required}, timeout=60
    )


def test_makefile_names_its_goals():
    """`make help` lists what the README and CI use, and nothing of the inside."""
    listed = re.findall(r"^  make ([\w-]+) +\w", make("help").stdout, re.MULTILINE)
    assert set(listed) == {
        "demo", "test", "test-full", "lint", "format", "docs", "core", "bazel", "wheel", "wheel-test", "wheel-cuda",
        "clean", "help",
    }  # fmt: skip


@pytest.mark.parametrize(("goal", "nothing"), [("core", "PYTHON312="), ("bazel", "BAZEL="), ("bazel", "BAZEL=echo")])
def test_what_ci_requires_must_run(goal, nothing):
    """`make` passes over what the machine lacks, and fails where JAX_FP4_REQUIRE names it."""
    for required, code in (("", 0), ("manylinux", 0), (f"manylinux {goal}", 2)):
        done = make(goal, nothing, required=required)
        assert "NOT RUN" in done.stdout
        assert done.returncode == code, done.stderr
        assert (f"JAX_FP4_REQUIRE names {goal}" in done.stderr) is bool(code)


def python(path: Path, version: str, does: str = "exit 3") -> Path:
    """A Python of that version, in all that the Makefile asks; it makes no environment, but `does` what it is told."""
    number = tuple(map(int, version.split(".")))
    ask = f"import sys; sys.version_info = {number}; exec(sys.argv[1])"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'#!/bin/sh\n[ "$1" != -c ] || exec {sys.executable} -c "{ask}" "$2"\necho "Python {version}"; {does}\n'
    )
    path.chmod(0o755)
    return path


def test_wheel_refuses_an_old_python(tmp_path):
    done = make("wheel", f"PYTHON={python(tmp_path / 'python', '3.10.1')}")
    assert done.returncode == 2
    assert done.stderr.startswith("jax_fp4 needs Python 3.11, 3.12 or 3.13, but ") and "Traceback" not in done.stderr
    assert "make wheel PYTHON=" in done.stderr


@pytest.mark.parametrize(("version", "kept"), [("3.11.9", False), ("3.12.0", True)])
def test_environment_of_the_wheel_is_of_the_python_asked_for(tmp_path, version, kept):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    old = python(tmp_path / ".venv-wheel/bin/python", version)
    make("wheel-environment", f"PYTHON={python(tmp_path / 'python', '3.12.1')}", folder=tmp_path)
    assert old.exists() is kept


def test_ci_requires_a_manylinux_wheel(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / ".venv-wheel/bin"
    interpreter = python(
        programs / "python", "3.12.0", "touch build/wheel/jax_fp4-0.tar.gz build/wheel/x-linux_x86_64.whl"
    )
    (programs / "auditwheel").write_text("#!/bin/sh\necho no policy fits; exit 1\n")
    for name in ("auditwheel", "../.installed"):
        (programs / name).touch()
        (programs / name).chmod(0o755)
    for required, code in (("", 0), ("manylinux", 2)):
        done = make("wheel", f"PYTHON={interpreter}", folder=tmp_path, required=required)
        assert "NOT tagged manylinux, auditwheel says: no policy fits" in done.stdout
        assert done.returncode == code, done.stderr


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
    """The files of this checkout that git does not ignore, but for those of CI."""
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return {name for name in found if (ROOT / name).is_file() and not name.startswith(".ci/")}


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
    assert {"docs/conf.py", "docs/guides/recipes.md", "docs/api/operations.md"} < names


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
    if sys.platform == "linux" and "manylinux" in os.environ.get("JAX_FP4_REQUIRE", "").split():
        assert all("-manylinux_" in tag for tag in tags)
