"""The doctor: what it prints where all is well, and that it sees each thing that may be off."""

import importlib.machinery
import importlib.metadata
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from installations import HOPPER, forget, pretend

import jax_fp4 as fp4
from jax_fp4 import _doctor, _ffi
from jax_fp4.__main__ import main
from jax_fp4._doctor import Part


@pytest.fixture
def installation(monkeypatch):
    """pretend(...), of an installation without a file of the second extension."""
    monkeypatch.setattr(_doctor, "_origin", lambda name: "there" if name == "_cpu" else "")
    yield lambda archs, *capabilities: pretend(monkeypatch, archs, *capabilities)
    forget()


def only(part: Part) -> str:
    """What the one finding of a part says; each says what to do."""
    (finding,) = part.findings
    assert finding.fix
    return finding.what


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *code.split(" ", 1)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


# --- the page ---


@pytest.mark.core
def test_all_is_well(capsys):
    assert main([]) == 0
    page = capsys.readouterr().out
    assert page.endswith("\n\nAll is well.\n")
    assert f"jax_fp4 {fp4.__version__}, " in page and f"jax {jax.__version__}, jaxlib " in page
    assert f"_cpu: loaded, {_ffi.isa()} kernels" in page
    parts = re.findall(r"^(\w[^:\n]*)", page, re.MULTILINE)
    on = [f"{title} on {name}" for title in ("operations", "self-test") for name in ("cpu", "cuda")]
    assert set(parts) - {"self-test on cuda"} == {
        "versions",
        "environment",
        "devices",
        "extensions",
        *on[:3],
        "All is well.",
    }
    assert {op: f"  {op}" in page for op in _doctor.OPS} == dict.fromkeys(_doctor.OPS, True)
    assert page.count(" ok  (") >= 4 and "OFF" not in page


@pytest.mark.core
def test_as_a_module():
    """Exit code 1 and not one word of a traceback; JAX itself asserts there."""
    done = run("-m jax_fp4", JAX_PLATFORMS="cuda,nowhere", JAX_FP4_BACKWARD_MODE="sideways")
    assert done.returncode == 1 and not re.search("Traceback", done.stderr)
    assert "JAX_PLATFORMS=cuda,nowhere" in done.stdout
    assert "Off:\n  1. NVFP4BlockScaling: environment variable JAX_FP4_BACKWARD_MODE is 'sideways'" in done.stdout
    assert "\n  2. JAX starts no platform: JAX_PLATFORMS is cuda,nowhere, there are cpu and " in done.stdout
    assert done.stdout.count("\n     Next: ") == 2
    assert "self-test" not in done.stdout


def test_under_strict_promotion_of_dtypes():
    """The strictest settings that a user may have made for JAX."""
    done = run("-m jax_fp4", JAX_NUMPY_DTYPE_PROMOTION="strict", JAX_NUMPY_RANK_PROMOTION="raise", JAX_ENABLE_X64="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n\nAll is well.\n")


def test_a_reader_that_leaves_early():
    """`python -m jax_fp4 | head -1`."""
    command = [sys.executable, "-m", "jax_fp4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"versions\n"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


@pytest.mark.parametrize("plugins", [[], ["xla_cuda13"]])
@pytest.mark.parametrize("asked", ["cuda", None])
def test_no_platform(monkeypatch, asked, plugins):
    """JAX asserts without a word where the platform is known and its plugin is not installed."""

    def asserts():
        raise AssertionError

    found = [SimpleNamespace(name=name) for name in plugins]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found if group == "jax_plugins" else [])
    monkeypatch.setattr(jax, "devices", asserts)
    if asked:
        monkeypatch.setenv("JAX_PLATFORMS", asked)
    else:
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    what = only(_doctor.devices())
    assert what.startswith(f"JAX starts no platform: JAX_PLATFORMS is {asked or 'not set'}, there are cpu and ")
    assert ("the plugins xla_cuda13" if plugins else "no plugin") in what
    assert what.endswith("(it raises AssertionError)")


def test_without_the_first_extension():
    """Nothing can be imported then, the doctor neither: the error says what to do."""
    done = run("-c import sys; sys.modules['jax_fp4._cpu'] = None; import jax_fp4.__main__")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: jax_fp4: its extension _cpu is not loaded (")
    assert "; needs a build for this Python because " in last and "Try pip install ." in last


def test_help(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert "python -m jax_fp4" in capsys.readouterr().out


def test_without_flax(monkeypatch):
    def version(name):
        if name == "flax":
            raise importlib.metadata.PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert _doctor.versions().lines[-1] == "jax 1.0, jaxlib 1.0, flax not installed, numpy 1.0"


def test_environment(monkeypatch):
    monkeypatch.setenv("JAX_FP4_BACKWARD_MODE", "dequant")
    monkeypatch.setenv("SECRET_TOKEN", "of somebody else")
    lines = _doctor.environment().lines
    assert "JAX_FP4_BACKWARD_MODE=dequant" in lines
    assert "backward mode of a recipe that names none: dequant" in lines
    assert not any("SECRET" in line for line in lines)


def test_devices(monkeypatch):
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [gpu, gpu])
    assert _doctor.devices() == Part("devices", ["2 x gpu: NVIDIA H200, compute capability 9.0"], [])


# --- extensions ---


def test_an_extension_that_does_not_load(monkeypatch, tmp_path, capsys):
    """A file of the right name that is none: what the loader says is on the page."""
    (tmp_path / f"_cuda{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_text("no machine code")
    monkeypatch.setattr(fp4, "__path__", [str(tmp_path), *fp4.__path__])
    monkeypatch.delitem(sys.modules, "jax_fp4._cuda", raising=False)
    module, why = _ffi._load_cuda()
    assert module is None and str(tmp_path) in why
    monkeypatch.setattr(_ffi, "cuda_missing", why)
    monkeypatch.setattr("jax_fp4.__main__.examine", lambda: [_doctor.extensions()])
    assert main([]) == 1
    assert f"Off:\n  1. {why}\n     Next: JAX_FP4_CUDA=ON pip install ." in capsys.readouterr().out


def test_a_gpu_without_the_extension(installation):
    installation(None, "9.0")
    assert only(_doctor.extensions()) == "GPU 9.0 has no kernels here: this installation has no CUDA extension"
    installation(None)
    assert not _doctor.extensions().findings


def test_a_gpu_that_has_no_kernels_in_the_extension(installation):
    installation("sm_90a, sm_100a", "12.0", "12.0")
    assert only(_doctor.extensions()) == "GPU 12.0 has compute capability 12.0, the kernels are for sm_90a, sm_100a"
    installation("sm_90a, sm_100a", "9.0")
    assert not _doctor.extensions().findings


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ("9.0", HOPPER, True),
        ("8.0", HOPPER, True),
        ("8.9", HOPPER, True),  # sm_80, by its PTX
        ("12.0", HOPPER, True),  # likewise
        ("7.5", HOPPER, False),
        ("9.0", "sm_90a", True),
        ("10.0", "sm_90a", False),
        ("8.0", "sm_89", False),
        ("10.3", "sm_100a", False),
    ],
)
def test_what_kernels_run_on(installation, capability, archs, runs):
    installation(archs)
    assert _doctor.runs_on(capability) is runs


# --- operations ---


def test_operations_on_hopper(installation):
    """Read from programs lowered for it, which needs no GPU."""
    installation(HOPPER, "9.0")
    part = _doctor.operations("cuda")
    assert not part.findings
    calls = {line.split()[0]: line.split(maxsplit=1)[1] for line in part.lines if line.startswith("  ")}
    assert calls["quantize_transpose"] == "quantize_transpose"
    assert calls["matmul"] == calls["grouped_matmul"] == "dequantize, grouped_matmul"
    assert calls["grouped_mlp"] == "quantize, dequantize, grouped_matmul, activate_quantize"
    assert any("products on sm_90a" in line for line in part.lines)


def test_operations_without_the_extension(installation):
    installation(None)
    part = _doctor.operations("cuda")
    assert part.lines[0].startswith("this installation has no CUDA extension: the traceable reference runs")
    assert part.lines[1].split(", ")[-1] == "layernorm_mlp" and not part.findings


def test_a_handler_that_is_not_called(monkeypatch):
    monkeypatch.setattr(_doctor, "native_calls", lambda op, name: [] if op == "matmul" else ["quantize"])
    part = _doctor.operations("cpu")
    assert only(part) == "matmul on cpu: calls no handler"
    assert f"  {'matmul':<20}calls no handler" in part.lines


@pytest.mark.parametrize(
    "error", [TypeError, ValueError, AttributeError, KeyError, ImportError, jax.errors.JaxRuntimeError]
)
def test_an_operation_that_cannot_be_lowered(monkeypatch, error):
    """Such an installation still gets its page."""

    def native_calls(op, name):
        if op in ("dense", "matmul"):
            raise error("of another version")
        return ["quantize"]

    monkeypatch.setattr(_doctor, "native_calls", native_calls)
    part = _doctor.operations("cpu")
    assert only(part).startswith(f"matmul, dense on cpu: it raises {error.__name__}: ")
    assert [line for line in part.lines if "OFF" in line] == [f"  {op:<20}OFF" for op in ("matmul", "dense")]


# --- the self-test ---


def self_test() -> Part:
    return _doctor.self_test("cpu", jax.devices("cpu")[0], ("cpu",))


@pytest.mark.parametrize(
    ("name", "wrong", "says"),
    [
        ("CODES", _doctor.CODES[:-1] + b"\x01", "codes is [16, 50"),
        ("BLOCK_SCALE", _doctor.BLOCK_SCALE + np.float32(1), "block_scale is [1.0, 1.0, 448.0, 1.125], must be [2.0, "),
        ("AMAX", np.float32(2687), "amax is [2688.0], must be [2687.0]"),
        ("VALUES", _doctor.VALUES + np.float32(1), "dequantize is [0.0, 0.5"),
    ],
)
def test_a_wrong_golden_vector(monkeypatch, name, wrong, says):
    monkeypatch.setattr(_doctor, name, wrong)
    part = self_test()
    assert [finding.what.split(" on cpu: ")[0] for finding in part.findings] == [
        "golden vector, specification in NumPy",
        "golden vector, implementation='cpu'",
    ]
    assert all(says in finding.what for finding in part.findings)
    assert sum("OFF" in line for line in part.lines) == 2


def test_one_wrong_bit_of_an_implementation(monkeypatch):
    def quantize(x, implementation=None, **how):
        q = fp4.quantize(x, implementation=implementation, **how)
        return q if implementation == "reference" else jax.tree.map(lambda a: a ^ 1 if a.dtype == np.uint8 else a, q)

    monkeypatch.setattr(_doctor, "quantize", quantize)
    whats = [finding.what for finding in self_test().findings]
    assert len(whats) == 2
    assert whats[0].startswith("golden vector, implementation='cpu' on cpu: codes is [17, ")
    assert re.fullmatch(r"product of .* on cpu: y is off by \S+ of its norm, the bound is 1e-06", whats[1])


def test_a_wrong_gradient(monkeypatch):
    def dense(x, w, **how):
        return fp4.dense(jax.lax.stop_gradient(x), w, **how)

    monkeypatch.setattr(_doctor, "dense", dense)
    assert only(self_test()) == "gradients of dense on cpu: dx is off by 1.0e+00 of its norm, the bound is 1e-06"
    monkeypatch.setattr(_doctor, "dense", lambda x, w, **how: fp4.dense(x, w, **how) + 1e-5 * (x @ w))
    assert "dx is off by" in only(self_test())


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError, TypeError, ValueError, AttributeError])
def test_a_handler_that_raises(monkeypatch, error):
    def fails(*_):
        raise error("INVALID_ARGUMENT: FFI handler API version")

    monkeypatch.setattr(_doctor, "matmul", fails)
    says = f"it raises {error.__name__}: INVALID_ARGUMENT: FFI handler API version"
    assert only(self_test()) == f"product of two quantized matrices on cpu: {says}"
