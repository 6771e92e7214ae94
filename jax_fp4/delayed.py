"""The state of delayed scaling: init, update, merge.

`dense(..., recipe=recipe, state=state)` quantizes with the scales of the state, and what `jax.grad` gives for the state
is no gradient: it is the state after this step.

    recipe = jax_fp4.DelayedScaling()
    state = delayed.init(recipe)                       # one for each call of a layer, beside the parameters
    grads, new = jax.grad(loss, argnums=(0, 1))(params, state, batch)
    state = delayed.update(state, new)

Optimizers see `grads` alone. With gradient accumulation the microbatches all start at one state, and `merge` makes one
of the states they end with, as if their amaxes had been one: `delayed.update(state, delayed.merge(new1, new2))`.
"""

import dataclasses
import functools
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.core import Tracer
from jaxtyping import Array, Float

from jax_fp4 import reference_fp8
from jax_fp4._errors import message
from jax_fp4._formats import FLOAT8_FORMATS, Float8Quantization
from jax_fp4._minifloat import NAN, magnitude_bits
from jax_fp4._recipe import DelayedScaling, Operand
from jax_fp4.reference_fp8 import Delayed

__all__ = ["State", "init", "merge", "update"]  # the rest is for the layers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What one call of a layer remembers: for each operand its last amaxes [*b, length] and the scale [*b] they gave.

    *b is () or, of a grouped layer, (g,): every expert is a tensor of its own. `calls` float32 [] is 0; in what is
    differentiated it counts the calls that the state was given to.
    """

    x: Delayed
    kernel: Delayed
    dy: Delayed
    calls: Float[Array, ""]


# For jax.export, which serializes what a program takes and gives.
export.register_namedtuple_serialization(Delayed, serialized_name="jax_fp4.delayed.Delayed")
export.register_pytree_node_serialization(
    State,
    serialized_name="jax_fp4.delayed.State",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: (),
)


def init(recipe: DelayedScaling, shape: tuple[int, ...] = ()) -> State:
    """A state without a history, whose scales are 1. shape: (g,) for a layer of g groups.

    Raises TypeError for another recipe.
    """
    if not isinstance(recipe, DelayedScaling):
        why, fix = "only delayed scaling has a state", "jax_fp4.DelayedScaling()"
        raise TypeError(message("delayed.init", "recipe", repr(recipe), "a DelayedScaling", why, fix))
    empty, one = jnp.zeros((*shape, recipe.amax_history_len), jnp.float32), jnp.ones(shape, jnp.float32)
    x, kernel, dy = (Delayed(jnp.copy(empty), jnp.copy(one)) for _ in range(3))  # copies: steps may donate them
    return State(x, kernel, dy, jnp.zeros((), jnp.float32))


def update(states: Any, gradients: Any, *, axis_name: Any = None) -> Any:
    """The states after a step: `gradients`, what differentiation gave for `states`, a State or a tree of them.

    A state that the loss did not use stays as it is, and so does each of a stack of states.
    axis_name: inside shard_map (check_vma=False), the mesh axes that share the batch; their amaxes become one. (Under
    jit, arrays are whole: their amaxes are too.)
    Raises ValueError where a state was used more than once, since the sum of two states is none; where that is only
    known at run time, the new scales are NaN.
    """
    if axis_name is not None:
        gradients = _each(functools.partial(merged_over, axis_name=axis_name), gradients)
    return _each(_updated, states, gradients)


def merge(first: Any, second: Any) -> Any:
    """One state of two that began as the same one: every amax is the larger of the two, and so is what the scale was
    made of. Trees of states in, a tree out."""
    return _each(_merged, first, second)


def _each(function, *trees):
    return jax.tree.map(function, *trees, is_leaf=lambda node: isinstance(node, State))


def _updated(state: State, new: State) -> State:
    if not isinstance(new.calls, Tracer) and (most := np.max(new.calls, initial=0)) > 1:
        given, why = f"used {int(most)} times", "each call sees other values, and the sum of two states is none"
        fix = "delayed.init for each call (and a stack of states under jax.vmap or jax.lax.scan)"
        raise ValueError(message("delayed.update", "a state", given, "one call", why, fix))
    if (shapes := jax.tree.map(np.shape, state)) != jax.tree.map(np.shape, new):
        shown, why = f"with the history {np.shape(new.x.history)}", "it is the state after the step"
        fix = "what jax.grad gave for this state"
        raise ValueError(message("delayed.update", "gradients", shown, f"{shapes.x.history}", why, fix))

    pick = functools.partial(_pick, new.calls)
    return dataclasses.replace(jax.tree.map(pick, state, new), calls=state.calls)


@jax.jit  # where the NaN that says so is no constant that jax_debug_nans would complain of
def _pick(calls, old, now):
    """The part of a state that was given to one call, or to none; NaN if to more."""
    calls = _along(calls, now)
    return jnp.where(calls == 1, now, jnp.where(calls == 0, old, NAN))


def _merged(first: State, second: State) -> State:
    calls = jnp.maximum(first.calls, second.calls)
    x, kernel, dy = (
        _larger(getattr(first, name), getattr(second, name), first.calls, second.calls)
        for name in ("x", "kernel", "dy")
    )
    return State(x, kernel, dy, calls)


def merged_over(state: State, axis_name) -> State:
    """`merge` of the states of all devices along the axes: that of the device which saw the largest amax."""
    index = jax.lax.axis_index(axis_name)

    def of(part: Delayed) -> Delayed:
        newest = magnitude_bits(part.history[..., -1]).astype(jnp.int32)
        newest = jnp.where(_along(state.calls, newest) > 0, newest, -1)
        largest = newest == jax.lax.pmax(newest, axis_name)
        first = jax.lax.pmin(jnp.where(largest, index, jnp.iinfo(jnp.int32).max), axis_name)
        mine = index == first
        scale = jax.lax.psum(jnp.where(mine, part.scale, 0), axis_name)
        return Delayed(jax.lax.psum(jnp.where(mine[..., None], part.history, 0), axis_name), scale)

    return State(of(state.x), of(state.kernel), of(state.dy), jax.lax.pmax(state.calls, axis_name))


def _larger(a: Delayed, b: Delayed, a_calls, b_calls) -> Delayed:
    """Of two histories that differ in their newest amax alone, the one that has the larger, and its scale."""
    newer, older = (magnitude_bits(d.history[..., -1]) for d in (b, a))  # of bits, so that NaN is the largest
    a_calls, b_calls = (_along(calls, newer) for calls in (a_calls, b_calls))
    second = (b_calls > 0) & ((a_calls == 0) | (newer > older))
    return Delayed(jnp.where(second[..., None], b.history, a.history), jnp.where(second, b.scale, a.scale))


def _along(calls, array):
    """The calls of each state of a stack, [*s], beside what each has, [*s, ...]."""
    return jnp.reshape(calls, (*np.shape(calls), *[1] * (np.ndim(array) - np.ndim(calls))))


# --- for the layers ---


def observed(state: Delayed, recipe: DelayedScaling, operand: Operand, amax: Any) -> Delayed:
    """The state of one operand after a call that saw `amax`; None if it was not quantized, then it stays."""
    if amax is None:
        return state
    largest = Float8Quantization(*FLOAT8_FORMATS[recipe.scaling(operand).format]).largest
    return reference_fp8.update_delayed(state, amax, largest, recipe.margin, recipe.amax_compute_algo == "most_recent")


def check_state(op: str, recipe: object, state: object, shape: tuple[int, ...] = (), argument: str = "state") -> None:
    """A state where the recipe is DelayedScaling, and only there, of the recipe's length and of the layer's shape."""
    if not isinstance(recipe, DelayedScaling):
        if state is not None:
            why, fix = "no other recipe reads it", "recipe=DelayedScaling(), or no state"
            shown = f"given beside {type(recipe).__name__ if recipe is not None else 'no recipe'}"
            raise ValueError(message(op, argument, shown, "DelayedScaling", why, fix))
        return
    made = f"jax_fp4.delayed.init(recipe{f', {shape}' if shape else ''})"
    if not isinstance(state, State):
        why, fix = (
            "DelayedScaling quantizes with the scales it holds",
            f"{argument}={made}, and its gradient (delayed.py)",
        )
        shown = "None" if state is None else f"a {type(state).__name__}"
        raise (ValueError if state is None else TypeError)(message(op, argument, shown, "a delayed.State", why, fix))
    need = jax.eval_shape(lambda: init(recipe, shape))
    kinds = [jax.tree.map(lambda a: (np.shape(a), np.dtype(a.dtype)), each) for each in (state, need)]
    if kinds[0] != kinds[1]:
        histories = ", ".join(str(part.history.shape) for part in (state.x, state.kernel, state.dy))
        shown = f"{state.x.scale.dtype} with histories {histories}"
        why = "each tensor (or expert) has amax_history_len amaxes"
        raise ValueError(message(op, argument, shown, f"float32 {need.x.history.shape}", why, made))


_seen: weakref.WeakValueDictionary[int, Tracer] = weakref.WeakValueDictionary()


def is_used_again(state: State | None) -> bool:
    """Whether this traced state was given to a call before: differentiated, the two would be added up."""
    if state is None or not isinstance(state.calls, Tracer):
        return False
    if _seen.get(id(state.calls)) is state.calls:
        return True
    _seen[id(state.calls)] = state.calls
    return False


def refuse_used_again(op: str) -> None:
    why = "its gradient is the next state, and two cannot be added"
    fix = "a layer, or delayed.init, for each call; under lax.cond the state as an operand of the branches"
    raise ValueError(message(op, "state", "that an earlier call was given", "a state of its own", why, fix))
