"""What users meet before any number is computed: versions, extras, and an import that needs nothing optional."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

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
    assert set(PROJECT["project"]["optional-dependencies"]) == {"examples", "export", "test", "dev", "nvcc"}


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
    for goal in ("demo", "test", "lint", "core", "wheel-cuda", "clean", "help"):
        assert re.search(rf"^{goal}:.*## \w", makefile, re.MULTILINE), goal


def test_wheel_and_changelog_agree():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog or f"## [{jax_fp4.__version__}]" in changelog
    assert "### Numerics" in changelog
