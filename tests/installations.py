"""Installations that this machine is not, and what a program lowered on them calls."""

import re
from types import SimpleNamespace

import jax
import pytest

from jax_fp4 import _amax, _ffi, _float8, _ops

HOPPER = "sm_80, sm_90a, sm_100a"


def pretend(monkeypatch, archs: str | None, *capabilities: str) -> None:
    """As an installation whose CUDA extension was built for `archs` (None: without one) lowers, in a process that has
    GPUs of these compute capabilities."""
    monkeypatch.setattr(_ffi, "cuda_missing", "this installation has no CUDA extension" if archs is None else "")
    monkeypatch.setattr(_ffi, "cuda_archs", lambda: archs or "")
    monkeypatch.setattr(jax, "devices", lambda *_: _gpus(capabilities))
    forget()


def installed(cases: dict):
    """A fixture: in turn each of the installations {name: (archs, capabilities, what is expected there)}."""

    @pytest.fixture(params=cases)
    def expected(request, monkeypatch):
        archs, capabilities, what = cases[request.param]
        pretend(monkeypatch, archs, *capabilities)
        yield what
        forget()

    return expected


def _gpus(capabilities):
    if not capabilities:
        raise RuntimeError("Unknown backend cuda")
    return [SimpleNamespace(compute_capability=c, device_kind=f"GPU {c}") for c in capabilities]


def forget() -> None:
    """Traces made for another installation."""
    _ops._implementation.cache_clear()
    _float8._implementation.cache_clear()
    _ops._made.cache_clear()
    _amax._local_amaxes.cache_clear()
    jax.clear_caches()


def calls(function, *arguments, platform="cuda"):
    return called(lowered(function, *arguments, platform=platform))


def called(text: str) -> list[str]:
    return re.findall(r"custom_call @(jax_fp4_\w+)", text)


def lowered(function, *arguments, platform="cuda"):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
