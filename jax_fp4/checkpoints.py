"""Quantized tensors in checkpoints: `to_state` before they are saved, `from_state` after they are restored.

A checkpoint keeps arrays, and what says how the arrays of a QuantizedTensor are read (its format, axis, extent, bound)
is none. Orbax, left alone, restores the arrays into whatever the target says, without a word: for another axis or bound
other numbers, for another dtype codes converted by value. Here the static fields travel as an array of their own, and
what comes back is checked against them:

    checkpointer.save(path, checkpoints.to_state(tree))
    like = jax.eval_shape(lambda: tree)                     # or with shardings
    tree = checkpoints.from_state(checkpointer.restore(path, checkpoints.to_state(like)), like)

Any library that keeps nested dicts of arrays will do. `flax.serialization` does this by itself once `jax_fp4.linen` or
`jax_fp4.nnx` is imported. Trees without a QuantizedTensor, states of delayed scaling among them, need nothing of this
file: all their leaves are arrays, and a layer refuses a state of another dtype or length. Parameters and optimizer
state are the same tree with quantization on or off; orbax leaves states that a model has no use for behind if it is
asked to (`partial_restore`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr, tree_flatten_with_path, tree_map_with_path

from jax_fp4._array import (
    STATIC_FIELDS,
    QuantizedTensor,
    scaling,
    static_from_bytes,
    static_to_bytes,
    stored_dtypes,
)
from jax_fp4._errors import message
from jax_fp4.delayed import State

# The key of the static fields: JSON, padded with blanks to one length, so that a target fits whatever was saved.
STATIC = "quantized_tensor"
_LENGTH = 512
_ARRAYS = tuple(f.name for f in dataclasses.fields(QuantizedTensor) if f.name not in STATIC_FIELDS)


def to_state(tree: Any) -> Any:
    """`tree` with a dict of arrays for every QuantizedTensor: codes, block_scale, where there are any amax and
    group_sizes, and "quantized_tensor" uint8 [512], the static fields as JSON.

    The arrays are those of the tensor, or whatever stands in their place: of a tree of `jax.ShapeDtypeStruct` this
    makes the target of a restore.
    """
    return jax.tree.map(lambda node: _saved(node) if _is_tensor(node) else node, tree, is_leaf=_is_tensor)


def from_state(state: Any, like: Any = None) -> Any:
    """The inverse of `to_state`: `state` with a QuantizedTensor for each of its dicts, bit for bit what was saved.

    like: the tree that is expected, of arrays or of `jax.ShapeDtypeStruct`: its leaves are those of `state`, by path.
    A QuantizedTensor in `state`, saved without `to_state`, is checked as far as its arrays tell.

    Raises ValueError, with the path, for a missing array, for one of another dtype than its format has (a restore that
    converted it), for a tensor that has other static fields than that of `like`, and for any leaf that `like` has not,
    or has of another shape or dtype; TypeError under jit, where the static fields have no values.
    """
    op = "checkpoints.from_state"
    tree = tree_map_with_path(lambda path, node: _restored(op, _name(path), node), state, is_leaf=_is_either)
    if like is not None:
        _check_alike(op, _tensors(tree), _tensors(like))
        _check_leaves(op, _others(tree), _others(like))
    return tree


def register_with(serialization: Any) -> None:
    """Teach `flax.serialization`, given as the module, both types of this package that have arrays: a QuantizedTensor
    and a `delayed.State`. What is restored is checked against its target; errors as in `from_state`."""

    def restored_tensor(target: QuantizedTensor, state: Any) -> QuantizedTensor:
        op, path = "flax.serialization.from_state_dict", serialization.current_path()
        tensors = {path: _restored(op, path, state)} if _is_either(state) else {}
        _check_alike(op, tensors, {path: target})
        return tensors[path]

    def saved_state(state: State) -> dict[str, Any]:
        return {f.name: serialization.to_state_dict(getattr(state, f.name)) for f in dataclasses.fields(state)}

    def restored_state(target: State, state: Any) -> State:
        op, path, whole = "flax.serialization.from_state_dict", serialization.current_path(), saved_state(target)
        _check_like(op, path, state, whole, "delayed.init(recipe) of the same amax_history_len")
        parts = {name: serialization.from_state_dict(getattr(target, name), state[name], name) for name in whole}
        return State(**parts)

    # Linen's and NNX's layers both ask for it.
    serialization.register_serialization_state(QuantizedTensor, _saved, restored_tensor, override=True)
    serialization.register_serialization_state(State, saved_state, restored_state, override=True)


def _is_tensor(node: Any) -> bool:
    return isinstance(node, QuantizedTensor)


def _is_saved(node: Any) -> bool:
    return isinstance(node, Mapping) and STATIC in node


def _is_either(node: Any) -> bool:
    return _is_tensor(node) or _is_saved(node)


def _name(path: tuple) -> str:
    return keystr(path, simple=True, separator="/") or "the tree"


def _tensors(tree: Any) -> dict[str, QuantizedTensor]:
    found = tree_flatten_with_path(tree, is_leaf=_is_tensor)[0]
    return {_name(path): node for path, node in found if _is_tensor(node)}


def _others(tree: Any) -> dict[str, Any]:
    found = tree_flatten_with_path(tree, is_leaf=_is_tensor)[0]
    return {_name(path): node for path, node in found if not _is_tensor(node)}


# --- one tensor ---


def _arrays(q: QuantizedTensor) -> dict[str, Any]:
    """Those that there are."""
    every = {name: getattr(q, name) for name in _ARRAYS}
    return {name: array for name, array in every.items() if array is not None}


def _saved(q: QuantizedTensor) -> dict[str, Any]:
    text = static_to_bytes(tuple(getattr(q, name) for name in STATIC_FIELDS)).ljust(_LENGTH)
    return _arrays(q) | {STATIC: np.frombuffer(text, np.uint8).copy()}


def _restored(op: str, path: str, node: Any) -> Any:
    if isinstance(node, QuantizedTensor):
        q, arrays = node, _arrays(node)
    elif _is_saved(node):
        arrays = {name: array for name, array in node.items() if name != STATIC}
        static = _static_fields(op, f"{path}/{STATIC}", node[STATIC])
        q = QuantizedTensor(**{name: arrays.get(name) for name in _ARRAYS}, **static)
    else:
        return node
    _check_arrays(op, path, arrays, q)
    return q


def _static_fields(op: str, path: str, array: Any) -> dict[str, Any]:
    if isinstance(array, Tracer):
        needs, why = "an array with values", "the static fields decide what is traced"
        raise TypeError(message(op, path, "traced", needs, why, "the call outside of jax.jit, right after the restore"))
    try:
        values = static_from_bytes(np.asarray(array).astype(np.uint8).tobytes())
        return dict(zip(STATIC_FIELDS, values, strict=True))
    except (ValueError, TypeError) as error:
        shown, needs = f"unreadable ({error})", "the static fields as `to_state` wrote them"
        why, fix = "they say how the arrays are read", "a checkpoint that was saved through `to_state`"
        raise ValueError(message(op, path, shown, needs, why, fix)) from None


def _check_arrays(op: str, path: str, arrays: Mapping[str, Any], q: QuantizedTensor) -> None:
    """All that the format has, in its dtypes."""
    codes, scale = stored_dtypes(q.format)
    needed = {"codes": codes, "block_scale": scale}
    if scaling(q) in ("nvfp4", "float8"):
        needed["amax"] = np.float32
    if q.grouped:
        needed["group_sizes"] = np.int32
    for name, dtype in needed.items():
        kind = np.dtype(dtype)
        if name not in arrays:
            why, fix = f"{q.format} has it", "a whole restore, with the target checkpoints.to_state(like)"
            raise ValueError(message(op, f"{path}/{name}", "missing", f"an array of {kind}", why, fix))
        if arrays[name].dtype != kind:
            shown, why = f"of {arrays[name].dtype}", f"the format is {q.format} and a restore converts codes by value"
            raise ValueError(message(op, f"{path}/{name}", shown, f"{kind}", why, f"a target whose {name} is {kind}"))


# --- against what is expected ---


def _check_alike(op: str, tensors: dict[str, QuantizedTensor], expected: dict[str, QuantizedTensor]) -> None:
    for path in sorted({*tensors, *expected}):
        if path not in tensors or path not in expected:
            have, need = ("no QuantizedTensor", "one") if path in expected else ("a QuantizedTensor", "none")
            why, fix = "`like` says so", "a `like` whose quantized tensors are those that were saved"
            raise ValueError(message(op, path, have, need, why, fix))
        saved, wanted = tensors[path], expected[path]
        for name in STATIC_FIELDS:
            given, need = getattr(saved, name), getattr(wanted, name)
            if given != need:
                why = "`like` has that, and the same codes would mean other numbers"
                fix = f"a `like` with {name}={given!r}, or the tensor quantized anew"
                raise ValueError(message(op, f"{name} of {path}", repr(given), repr(need), why, fix))
        _check_like(op, path, _arrays(saved), _arrays(wanted), "a `like` of the shapes that were saved")


def _check_leaves(op: str, given: dict[str, Any], expected: dict[str, Any]) -> None:
    fix = "a restore into, and a `like` of, the tree that was saved"
    for path in sorted({*given, *expected}):
        if path not in expected:
            needs, why = "none", "`like` has no such leaf"
            raise ValueError(message(op, path, f"a leaf, {_kind(given[path])}", needs, why, fix))
        _check_leaf(op, path, given, expected[path], fix)


def _check_like(op: str, path: str, state: Any, like: Any, fix: str) -> None:
    """The same arrays: none missing, and each of the same shape and dtype."""
    given = {f"{path}/{_name(p)}": leaf for p, leaf in tree_flatten_with_path(state)[0]}
    for p, leaf in tree_flatten_with_path(like)[0]:
        _check_leaf(op, f"{path}/{_name(p)}", given, leaf, fix)


def _check_leaf(op: str, path: str, given: Mapping[str, Any], like: Any, fix: str) -> None:
    needs = _kind(like)
    if path not in given:
        raise ValueError(message(op, path, "missing", needs, "it is part of the whole", fix))
    if (shown := _kind(given[path])) != needs:
        raise ValueError(message(op, path, shown, needs, "that is what it is restored into", fix))


def _kind(leaf: Any) -> str:
    """dtype and shape of an array, or of what stands in its place; the type of any other leaf."""
    array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return f"{leaf.dtype} {tuple(leaf.shape)}" if array else f"a {type(leaf).__name__}"
