"""What this installation is and whether it works: the parts of the page that `python -m jax_fp4` prints.

A part says what happens, not what should: which handlers an operation calls is read from a program that was lowered for
the platform, and the self-test compares with numbers that are written here or computed in NumPy.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp4 import _ffi
from jax_fp4._dense import dense
from jax_fp4._grouped_dense import grouped_dense
from jax_fp4._grouped_mlp import grouped_mlp
from jax_fp4._layernorm_dense import layernorm_dense
from jax_fp4._mlp import layernorm_mlp
from jax_fp4._ops import OPS, dequantize, quantize, quantize_transpose, supported
from jax_fp4._products import grouped_matmul, matmul
from jax_fp4._recipe import NVFP4BlockScaling
from jax_fp4._version import __version__

LIBRARIES = ("jax", "jaxlib", "flax", "numpy")
VARIABLES = re.compile(r"(JAX|XLA)_\w+|CUDA_VISIBLE_DEVICES")  # those that this library and JAX read
BUILD = "JAX_FP4_CUDA=ON pip install ."
REBUILD = "build it anew (pip install --force-reinstall --no-deps .); if it stays, open an issue with this page"

# What jax.devices raises: it asserts where JAX_PLATFORMS names a known platform whose plugin is not installed.
NO_DEVICES = RuntimeError, AssertionError

# What an installation raises whose parts do not fit: XLA, the handlers and UnsupportedError (RuntimeError); a module of
# another version, whose names and signatures differ (all others but the last); JAX's own asserts.
BROKEN = RuntimeError, TypeError, ValueError, AttributeError, LookupError, ImportError, AssertionError


class Finding(NamedTuple):
    """Something that is off, and the next thing to do about it."""

    what: str
    fix: str


class Part(NamedTuple):
    """One part of the page."""

    title: str
    lines: list[str]
    findings: list[Finding]


def examine() -> Iterator[Part]:
    """Every part in turn; without a device those that need none."""
    yield versions()
    yield environment()
    found = devices()
    yield found
    yield extensions()
    if found.findings:
        return
    for name in ("cpu", "cuda"):
        yield operations(name)
    for name, named in (("cpu", ("cpu",)), ("cuda", ("reference",) if _ffi.cuda_missing else ("cuda",))):
        for device in devices_of(name)[:1]:
            yield self_test(name, device, named)


# --- what there is ---


def versions() -> Part:
    lines = [
        f"jax_fp4 {__version__}, {Path(__file__).parent}",
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        ", ".join(f"{name} {_version(name)}" for name in LIBRARIES),
    ]
    return Part("versions", lines, [])


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def environment() -> Part:
    """The variables that are set, and what a recipe makes of them."""
    lines, findings = [f"{name}={value}" for name, value in os.environ.items() if VARIABLES.fullmatch(name)], []
    try:
        lines.append(f"backward mode of a recipe that names none: {NVFP4BlockScaling().mode.value}")
    except ValueError as error:
        findings.append(Finding(str(error), "unset JAX_FP4_BACKWARD_MODE, or set it to one of these"))
    return Part("environment", lines, findings)


def devices_of(name: str) -> list[Any]:
    try:
        return jax.devices(name)
    except NO_DEVICES:
        return []


def devices() -> Part:
    try:
        found = jax.devices()
    except NO_DEVICES as error:
        return Part("devices", [], [_no_platform(error)])
    kinds = [_kind(device) for device in found]
    return Part("devices", [f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds)], [])


def _no_platform(error: Exception) -> Finding:
    """JAX may say nothing here: what was asked for, and what could have been."""
    asked = os.environ.get("JAX_PLATFORMS")
    plugins = sorted({plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")})
    there = f"there are cpu and {'the plugins ' + ', '.join(plugins) if plugins else 'no plugin for another'}"
    what = f"JAX starts no platform: JAX_PLATFORMS is {asked or 'not set'}, {there}"
    fix = "unset JAX_PLATFORMS, or set it to cpu, or install the plugin of that platform (pip install 'jax[cuda13]')"
    return Finding(f"{what} ({_raised(error)})", fix if asked else "install jaxlib and its plugins anew")


def _raised(error: Exception) -> str:
    return f"it raises {type(error).__name__}{f': {error}' if str(error) else ''}"


def _kind(device: Any) -> str:
    capability = getattr(device, "compute_capability", None)
    return f"{device.platform}: {device.device_kind}" + (f", compute capability {capability}" if capability else "")


def extensions() -> Part:
    """Both modules, and whether the GPUs of this process have kernels in the second."""
    gpus, missing = devices_of("cuda"), _ffi.cuda_missing
    lines = [f"_cpu: loaded, {_ffi.isa()} kernels, {_origin('_cpu')}"]
    if not missing:
        lines.append(f"_cuda: loaded, kernels for {_ffi.cuda_archs()}, {_origin('_cuda')}")
        return Part("extensions", lines, [_strange(gpu) for gpu in gpus if not runs_on(gpu.compute_capability)][:1])
    lines.append(f"_cuda: {missing}")
    findings = []
    if _origin("_cuda"):
        findings.append(Finding(missing, f"{BUILD} on this machine, or get what the text names"))
    elif gpus:
        findings.append(Finding(f"{gpus[0].device_kind} has no kernels here: {missing}", BUILD))
    return Part("extensions", lines, findings)


def _origin(name: str) -> str:
    spec = importlib.util.find_spec(f"jax_fp4.{name}")
    return "" if spec is None else str(spec.origin)


def runs_on(capability: str) -> bool:
    """Whether the kernels run on such a GPU: those of its own architecture, or of an earlier one, whose PTX the driver
    compiles. "sm_90a" is for that architecture alone."""
    own = int(capability.replace(".", ""))
    built = re.findall(r"sm_(\d+)(a?)", _ffi.cuda_archs())
    return any(int(number) == own or (int(number) < own and not exact) for number, exact in built)


def _strange(gpu: Any) -> Finding:
    what = f"{gpu.device_kind} has compute capability {gpu.compute_capability}, the kernels are for {_ffi.cuda_archs()}"
    number = gpu.compute_capability.replace(".", "")
    return Finding(what, f"JAX_FP4_CUDA_ARCHS={number} {BUILD} (8.0 is the earliest that they are written for)")


# --- what happens ---


def operations(name: str) -> Part:
    """What runs for each operation on the platform, and which handlers a program that is lowered for it calls."""
    lines, findings = [], []
    reasons = {op: supported(op, name) for op in OPS}
    for support in dict.fromkeys(reasons.values()):
        ops = [op for op in OPS if reasons[op] == support]
        lines.append(support.reason)
        if not support.ok:
            lines.append(f"  {', '.join(ops)}")
            continue
        calls = {op: _called(op, name) for op in ops}
        lines += [f"  {op:<20}{text}" for op, (text, _) in calls.items()]
        for problem in dict.fromkeys(problem for _, problem in calls.values() if problem):
            off = ", ".join(op for op, (_, one) in calls.items() if one == problem)
            findings.append(Finding(f"{off} on {name}: {problem}", REBUILD))
    return Part(f"operations on {name}: what runs, and the handlers that the forward calls", lines, findings)


def _called(op: str, name: str) -> tuple[str, str]:
    """The handlers that it calls as text, and what is off."""
    try:
        called = native_calls(op, name)
    except BROKEN as error:
        return "OFF", _raised(error)
    return (", ".join(called), "") if called else ("calls no handler", "calls no handler")


def native_calls(op: str, name: str) -> list[str]:
    """The handlers, and Blackwell's product, in a program of `op` that is lowered for the platform."""
    function, *arguments = _examples()[op]
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=(name,)).as_text()
    calls = re.findall(r"@(?:jax_fp4_(\w+)\(|__op\$(block_scaled_dot))", text)
    return list(dict.fromkeys("".join(names) for names in calls))


def _examples() -> dict[str, tuple]:
    """Each operation and arguments for it: of one dtype, for users who set jax_numpy_dtype_promotion to strict."""
    shape = jax.ShapeDtypeStruct
    x, scale, sizes = shape((64, 64), jnp.float32), shape((64,), jnp.float32), shape((2,), jnp.int32)
    w, ws = shape((64, 64), jnp.float32), shape((2, 64, 64), jnp.float32)
    q, qw = jax.eval_shape(quantize, x), jax.eval_shape(partial(quantize, axis=0), w)
    qws = jax.eval_shape(partial(quantize, axis=0, batch_dims=1), ws)
    recipe = NVFP4BlockScaling("default")
    return {
        "quantize": (quantize, x),
        "quantize_transpose": (quantize_transpose, x),
        "dequantize": (dequantize, q),
        "matmul": (matmul, q, qw),
        "grouped_matmul": (grouped_matmul, q, qws, sizes),
        "dense": (partial(dense, recipe=recipe), x, w),
        "grouped_dense": (partial(grouped_dense, recipe=recipe), x, ws, sizes),
        "grouped_mlp": (partial(grouped_mlp, activation="silu", recipe=recipe), x, ws, ws, sizes),
        "layernorm_dense": (lambda x, scale, w: layernorm_dense(x, scale, None, w, recipe=recipe), x, scale, w),
        "layernorm_mlp": (partial(_mlp, recipe=recipe), x, scale, w),
    }


def _mlp(x, scale, w, recipe):
    return layernorm_mlp(x, scale, None, w, w, activation="silu", recipe=recipe)


# --- whether it works ---

# One row of four blocks under the amax 2688 = 6 * 448, which makes the scale of the tensor 1: all 16 codes; what lies
# half-way between two, and goes to the even code; what lies beside the middle, under the largest scale; and a largest
# value of 6.6, whose scale 1.1 is not in E4M3 and becomes 1.125.
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # of the codes; those from 8 on are negative
_MIDDLES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], np.float32)
_BESIDE = [0.24, 0.26, 0.74, 0.76, 1.24, 1.26, 1.74, 1.76, 2.49, 2.51, 3.49, 3.51, 4.99, 5.01, 6, -6]
_UNEVEN = [6.6, -6.6, 3.3, -3.3, 1.65, -1.65, 0.825, -0.825, 0.3, -0.3, 0.2, -0.2, 1e-9, -1e-9, 0, 0]
_LAST = np.array([[448 * value for value in _BESIDE], _UNEVEN], np.float32)
X = np.concatenate([VALUES, -VALUES, _MIDDLES, -_MIDDLES, _LAST.ravel()])[None]
CODES = bytes.fromhex("1032547698badcfe20426476a8caecfe10213243546576f7f7d5b39191808000")
BLOCK_SCALE = np.array([[1, 1, 448, 1.125]], np.float32)
AMAX = np.float32(2688)

BOUND = 1e-6  # of products of k <= 1024, docs/numerics.md, section 1.10


def self_test(name: str, device: Any, implementations: tuple) -> Part:
    """About a second: a golden vector by each implementation, a product and a gradient, on the device."""
    checks: dict[str, Callable[[], str]] = {"golden vector, specification in NumPy": partial(golden, "reference", X)}
    checks |= {f"golden vector, implementation={one!r}": partial(golden, one) for one in implementations}
    checks |= {"product of two quantized matrices": product, "gradients of dense": gradients}
    lines, findings = [], []
    with jax.default_device(device):
        for title, check in checks.items():
            start = time.perf_counter()
            off = _outcome(check)
            lines.append(f"{title:<40}{'OFF' if off else 'ok'}  ({time.perf_counter() - start:.2f} s)")
            if off:
                findings.append(Finding(f"{title} on {name}: {off}", REBUILD))
    return Part(f"self-test on {name}", lines, findings)


def _outcome(check: Callable[[], str]) -> str:
    try:
        return check()
    except BROKEN as error:
        return _raised(error)


def golden(implementation, x: Any = None) -> str:
    """What of the quantized X is not as it must be, bit for bit; "" where all is. x: X where it is to stay in NumPy."""
    q = quantize(jnp.asarray(X) if x is None else x, implementation=implementation)
    pairs = {
        "amax": (q.amax, AMAX),
        "block_scale": (np.asarray(q.block_scale, np.float32), BLOCK_SCALE),
        "codes": (q.codes, np.frombuffer(CODES, np.uint8)[None]),
        "dequantize": (dequantize(q, jnp.float32, implementation=implementation), _decoded()),
    }
    for part, (got, want) in pairs.items():
        got = np.asarray(got)
        if got.shape != want.shape or got.tobytes() != want.tobytes():
            return f"{part} is {got.ravel().tolist()}, must be {want.ravel().tolist()}"
    return ""


def _decoded() -> np.ndarray:
    codes = np.frombuffer(CODES, np.uint8)
    codes = np.stack([codes & 15, codes >> 4], -1).reshape(4, 16)
    return (np.concatenate([VALUES, -VALUES])[codes] * BLOCK_SCALE.T).reshape(1, 64)


def _operands() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [32, 64], a kernel [64, 48] and dy [32, 48]."""
    random = np.random.default_rng(0)
    x, w, dy = (random.standard_normal(shape, np.float32) for shape in ((32, 64), (64, 48), (32, 48)))
    return x, w, dy


def _values(a: np.ndarray, **how: Any) -> np.ndarray:
    """Those of the quantized `a`, by the specification in NumPy."""
    q = quantize(a, implementation="reference", **how)
    return np.asarray(dequantize(q, np.dtype(np.float32), implementation="reference"), np.float64)


def product() -> str:
    x, w, _ = _operands()
    y = jax.jit(lambda x, w: matmul(quantize(x), quantize(w, axis=0)))(x, w)
    return _beyond("y", y, _values(x) @ _values(w, axis=0))


def gradients() -> str:
    x, w, dy = _operands()
    recipe = NVFP4BlockScaling("default", random_hadamard_transform=False, stochastic_rounding=False)
    pulled = jax.jit(lambda x, w, dy: jax.vjp(partial(dense, recipe=recipe), x, w)[1](dy))
    dx, dw = pulled(x, w, dy)
    of_x = _beyond("dx", dx, _values(dy) @ _values(w, block=(16, 16)).T)
    return of_x or _beyond("dw", dw, _values(x, axis=0).T @ _values(dy, axis=0))


def _beyond(name: str, got: Any, want: np.ndarray) -> str:
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    return "" if error <= BOUND else f"{name} is off by {error:.1e} of its norm, the bound is {BOUND:.0e}"
