"""Trace-time events: what was quantized, by which implementation, with how much padding. For reports."""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import NamedTuple

import jax


class LayerEvent(NamedTuple):
    """One call of a layer function while it was traced. `recipe` is None where it ran in high precision."""

    path: str
    op: str
    x_shape: tuple[int, ...]
    kernel_shape: tuple[int, ...]
    recipe: object | None
    reason: str  # why it was not quantized; empty where it was


class CallEvent(NamedTuple):
    """One quantization of one operand. `padding` counts the zeros that round the blocked extents up."""

    path: str
    op: str
    shape: tuple[int, ...]
    implementation: str
    padding: int


Event = LayerEvent | CallEvent

# A fresh value in jit's cache key, which threads share, makes a recorded function trace again: its events happen.
_recording = jax.make_user_context(default_value=0)
_runs = itertools.count(1)


class _State(threading.local):
    def __init__(self):
        self.recorders: list[list[Event]] = []
        self.path: list[str] = []


_state = _State()


def record(event: Event) -> None:
    for events in _state.recorders:
        events.append(event)


def path() -> str:
    """The module path the current layer was given by its framework, "" outside one."""
    return _state.path[-1] if _state.path else ""


@contextlib.contextmanager
def layer(name: str) -> Iterator[None]:
    """The events inside belong to the module at this path."""
    _state.path.append(name)
    try:
        yield
    finally:
        _state.path.pop()


@contextlib.contextmanager
def recording() -> Iterator[list[Event]]:
    """Collect the events of everything that is traced inside."""
    events: list[Event] = []
    _state.recorders.append(events)
    try:
        with _recording(next(_runs)):
            yield events
    finally:
        _state.recorders.pop()


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """What is traced inside, only to learn its shapes, is no event."""
    recorders, _state.recorders = _state.recorders, []
    try:
        yield
    finally:
        _state.recorders = recorders
