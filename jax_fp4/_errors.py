"""The one shape of an error message, what "supported" means, and strict mode."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import jax


class UnsupportedError(NotImplementedError):
    """A combination that is legal to ask for and that this version, or this platform, does not have."""


@dataclass(frozen=True)
class Support:
    """Whether an operation runs natively on a platform, and why, or why not."""

    ok: bool
    reason: str

    def __bool__(self) -> bool:
        return self.ok


def message(op: str, argument: str, value: object, needs: str, because: str, fix: str) -> str:
    """`op: argument is value; needs ... because ... . Try ... .`, the form of every error a user meets."""
    return f"{op}: {argument} is {value}; needs {needs} because {because}. Try {fix}."


@contextlib.contextmanager
def importing(op: str, package: str, because: str) -> Iterator[None]:
    """Around the import of a package that few users need: says so where it is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        text = message(op, package, "not installed", "the package", because, f"pip install {package}")
        raise ModuleNotFoundError(text) from None


# Part of jit's cache key: a function traced without strict is traced again under it.
_strict = jax.make_user_context(default_value=False)


def strict():
    """Context: whatever would fall back to the reference, or pad a blocked extent, raises UnsupportedError."""
    return _strict(True)


def is_strict() -> bool:
    return bool(_strict.value)
