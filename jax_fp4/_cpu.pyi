"""The compiled CPU handlers (xla_ffi/module.cc)."""

from typing import Any

def registrations() -> dict[str, Any]:
    """FFI target name -> capsule of its handler."""

def isa() -> str:
    """The instruction set that was chosen when the module was loaded."""
