"""Where what is read from a file is put: onto the devices that hold the parameter in whose place it comes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, Sharding

from jax_fp4._array import QuantizedTensor
from jax_fp4._errors import UnsupportedError, message
from jax_fp4._export_layout import Parameter

_FIX = "jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec)) in `like`"


def placed(op: str, p: Parameter, array: np.ndarray) -> jax.Array:
    return _put(array, _sharding(op, p.path, p.value))


def placed_packed(op: str, p: Parameter, q: QuantizedTensor) -> QuantizedTensor:
    """Leaf by leaf as that of a QuantizedTensor in `like`; else as the dense kernel in its place is cut."""
    names = ("codes", "block_scale", "amax")
    if isinstance(p.value, QuantizedTensor):
        where = [_sharding(op, f"{p.path}/{name}", getattr(p.value, name)) for name in names]
    else:
        where = _packed_shardings(op, p, q)
    return dataclasses.replace(q, **{name: _put(getattr(q, name), s) for name, s in zip(names, where, strict=True)})


def _put(array: np.ndarray, sharding: Sharding | None) -> jax.Array:
    # A process makes only the shards of its own devices.
    return jnp.asarray(array) if sharding is None else jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index]
    )  # fmt: skip


def _sharding(op: str, path: str, value: Any) -> Sharding | None:
    """Where a shape says its array belongs, or an array was put; one that nobody put anywhere says nothing."""
    sharding = getattr(value, "sharding", None)
    if sharding is None or (isinstance(value, jax.Array) and not value.committed):
        return None
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
        mesh = jax.sharding.get_mesh()
        if mesh.empty or mesh.abstract_mesh != sharding.mesh:
            why, fix = "arrays lie on devices", f"the call under jax.set_mesh(mesh), or {_FIX}"
            raise ValueError(message(op, f"the sharding of {path}", sharding, "a mesh of devices", why, fix))
        return NamedSharding(mesh, sharding.spec)
    return sharding


def _packed_shardings(op: str, p: Parameter, q: QuantizedTensor) -> list[Sharding | None]:
    """Of codes [*g, n, k/2], scales [*g, n, k/16] and amax [*g], of a kernel [*g, *k, *n]."""
    sharding = _sharding(op, p.path, p.value)
    if sharding is None or sharding.is_fully_replicated:
        return [sharding] * 3
    if not isinstance(sharding, NamedSharding):
        needs, why = "a NamedSharding", "codes are cut along the dimensions that it names"
        raise UnsupportedError(message(op, f"the sharding of {p.path}", sharding, needs, why, _FIX))
    g, layout = len(p.groups), p.layout or ""
    dims = [*sharding.spec, *[None] * (len(layout) - len(sharding.spec))]
    flat = {letter: [cut for cut, its in zip(dims, layout, strict=True) if its == letter] for letter in "kn"}
    if inner := [cut for cuts in flat.values() for cut in cuts[1:] if cut is not None]:
        needs, why = "a cut along the first of them", f"{layout!r} is stored as one matrix, whose dimensions they share"
        raise UnsupportedError(message(op, f"the sharding of {p.path}", f"by {inner}", needs, why, _FIX))
    spec = PartitionSpec(*dims[:g], flat["n"][0], flat["k"][0])
    packed = sharding.update(spec=spec)
    _check_even(op, p, q, packed)
    return [packed, packed, sharding.update(spec=PartitionSpec(*dims[:g]))]


def _check_even(op: str, p: Parameter, q: QuantizedTensor, packed: NamedSharding) -> None:
    try:
        packed.shard_shape(q.block_scale.shape)
    except ValueError as error:
        shown, needs = f"{packed.spec} of scales {q.block_scale.shape} [*g, n, k/16]", "equal shards of whole blocks"
        why = f"16 values of k share a scale ({error})"
        raise ValueError(message(op, f"the sharding of {p.path}", shown, needs, why, _FIX)) from None
