"""Trace-time events: what was quantized, by which implementation, with how much padding. For reports."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax


class LayerEvent(NamedTuple):
    """One call of a layer function while it was traced. `recipe` is None where it ran in high precision."""

    path: str
    op: str
    x_shape: tuple[int, ...]
    kernel_shape: tuple[int, ...]
    recipe: object | None
    reason: str  # what chose the recipe, or why there is none
    cost: "Callable[[], Cost] | None" = None
    frozen: str = ""  # the format of a kernel that came quantized


class CallEvent(NamedTuple):
    """One quantization of one operand. `padding` counts the zeros that round the blocked extents up."""

    path: str
    op: str
    shape: tuple[int, ...]
    implementation: str
    padding: int


class GatherEvent(NamedTuple):
    """A kernel that will be gathered for one product: `payload` is what is moved, `reason` why it is not packed."""

    path: str
    op: str
    product: str
    shape: tuple[int, ...]  # of the shard
    payload: str
    reason: str


class RulesEvent(NamedTuple):
    """Rules that came into force."""

    rules: Any


class Cost(NamedTuple):
    """What one call of a layer takes, if all that can be is differentiated."""

    padding: int  # zeros that round the blocked extents of its operands up
    residual_bytes: int  # kept from the forward for the backward


Event = LayerEvent | CallEvent | GatherEvent | RulesEvent

# A fresh value in jit's cache key, which threads share, makes a recorded function trace again: its events happen.
_recording = jax.make_user_context(default_value=0)
_runs = itertools.count(1)


class Layer(NamedTuple):
    """The module whose call is traced. `rule`: (expression, recipe), if a rule gave it its recipe before the call."""

    path: str
    rule: tuple[str, object] | None = None
    matched: bool = False  # whether rules were matched before the call, so that none is now


class _State(threading.local):
    def __init__(self):
        self.recorders: list[list[Event]] = []
        self.layers: list[Layer] = []


_state = _State()


def record(event: Event) -> None:
    for events in _state.recorders:
        events.append(event)


def current() -> Layer | None:
    """The innermost layer that its framework gave a path, if any."""
    return _state.layers[-1] if _state.layers else None


def path() -> str:
    """The module path of the current layer, "" outside one (and of the outermost module)."""
    return _state.layers[-1].path if _state.layers else ""


@contextlib.contextmanager
def layer(*where: Any) -> Iterator[None]:
    """The events inside belong to Layer(*where)."""
    _state.layers.append(Layer(*where))
    try:
        yield
    finally:
        _state.layers.pop()


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


def cost_of(at_once: bool, function: Callable, differentiated: Any, *rest: Any) -> Callable[[], Cost] | None:
    """How to learn the cost of function(differentiated, *rest), later: of these it keeps the shapes alone. None where
    nobody records. at_once: it is learnt now, by a function that can only be traced here."""
    if not _state.recorders:
        return None

    arguments = differentiated, *rest
    if not at_once:
        arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)

    def there_and_back(differentiated, *rest):
        y, pull = jax.vjp(lambda d: function(d, *rest), differentiated)
        return pull, pull(y)

    def measure() -> Cost:
        with paused(), recording() as events:
            pull, _ = jax.eval_shape(there_and_back, *arguments)
        padding = sum(event.padding for event in events if isinstance(event, CallEvent))
        return Cost(padding, sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pull)))

    if at_once:
        cost = measure()
        return lambda: cost
    return measure


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """What is traced inside, only to learn its shapes, is no event."""
    recorders, _state.recorders = _state.recorders, []
    try:
        yield
    finally:
        _state.recorders = recorders
