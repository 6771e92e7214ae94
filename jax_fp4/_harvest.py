"""Runs a jaxpr and takes what its tags saw out of it, from inside of jit, scan, remat, shard_map and derivative rules.

A value inside an inner trace cannot be handed to Python. So a jaxpr is evaluated equation by equation, and whatever
holds a tag is taken apart: calls are run in place, loops and shard_maps are built again with more results. Whatever
does not is bound as it is. Branches and while loops, whose records would depend on data, keep theirs: they are named.

The parameters of equations (jaxpr, in_shardings, differentiated, prevent_cse, newly_manual_axes, ...), the context and
the scopes of one are no documented API of JAX: they are those of jax 0.10 to 0.12. One that is missing raises
UnsupportedError.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core
from jax.extend.core import primitives
from jax.sharding import PartitionSpec, Sharding

from jax_fp4._errors import UnsupportedError, message
from jax_fp4._observe import Seen, Site, merged, observing, tag_p
from jax_fp4._placement import vary

Run = tuple[list[Any], list[Seen]]  # the results, and what the tags saw, in the order of the program

_CALLS = (
    primitives.jit_p,
    primitives.remat_p,
    primitives.call_p,
    primitives.closed_call_p,
    primitives.custom_jvp_call_p,
    primitives.custom_vjp_call_p,
)


def run(jaxpr: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], again: bool = False) -> Run:
    """again: the jaxpr repeats a forward that ran before, for its backward, and what it sees of that is known."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))
    seen: list[Seen] = []

    def read(atom):
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        results, more = _equation(jaxpr, equation, [read(atom) for atom in equation.invars], again)
        values.update(zip(equation.outvars, results, strict=True))
        seen += more
    return [read(atom) for atom in jaxpr.outvars], seen


def _equation(jaxpr: core.Jaxpr, equation, operands: list[Any], again: bool) -> Run:
    primitive, params = equation.primitive, equation.params
    again = again or _again(equation)
    if primitive is tag_p:
        count = params["count"]
        seen = jax.tree.unflatten(params["tree"], operands[count:])
        if again and seen.phase == "forward":
            return operands[:count], []
        # A collector around this one finds it too.
        return tag_p.bind(*operands, **params) if observing.value else operands[:count], [seen]
    if next(tags_in(equation), None) is not None:
        with _context_of(equation):
            if primitive in _CALLS:
                return _call(equation, operands, again)
            if primitive is primitives.scan_p:
                return _scan(equation, operands, again)
            if primitive.name == "shard_map":
                return _shard_map(equation, operands, again)
    # As a program of its own, which JAX knows how to run, whatever an equation has to be told.
    given = {v: a for v, a in zip(equation.invars, operands, strict=True) if not isinstance(v, core.Literal)}
    one = jaxpr.replace(constvars=[], invars=list(given), outvars=equation.outvars, eqns=[equation])
    return core.jaxpr_as_fun(core.ClosedJaxpr(one, []))(*given.values()), []


def _param(equation, name: str) -> Any:
    if name not in equation.params:
        raise _unknown(equation, name)
    return equation.params[name]


def _context_of(equation) -> Any:
    """What an equation was traced under: the mesh, and what users say about how to compile it."""
    if not hasattr(equation.ctx, "manager"):
        raise _unknown(equation, "ctx.manager")
    return equation.ctx.manager


def _again(equation) -> bool:
    """Whether remat computes it a second time. Its name is the one sign that is there wherever remat, scan and jit are
    nested (`differentiated` is true of first runs too, where a remat is in a loop), and profiles show it."""
    scopes = getattr(equation.source_info, "name_stack", None)
    if scopes is None:
        raise _unknown(equation, "source_info.name_stack")
    return "rematted_computation" in str(scopes)


def _unknown(equation, name: str) -> UnsupportedError:
    shown = f"a {equation.primitive} without {name!r} (jax {jax.__version__})"
    needs, why = "the parameters of jax 0.10 to 0.12", "a program is taken apart by them"
    return UnsupportedError(message("collect", "an equation", shown, needs, why, "one of these, or a later jax_fp4"))


def tags_in(equation) -> Iterator[Site]:
    """The sites of all tags inside an equation."""
    for jaxpr in _jaxprs(equation.params):
        for inner in jaxpr.eqns:
            if inner.primitive is tag_p:
                yield _site(inner)
            yield from tags_in(inner)


def kept_inside(jaxpr: core.Jaxpr) -> Iterator[tuple[str, str]]:
    """(name, primitive) of all tags that `run` cannot reach."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if equation.primitive in (*_CALLS, primitives.scan_p) or name == "shard_map":
            for inner in _jaxprs(equation.params):
                yield from kept_inside(inner)
        else:
            yield from ((site.name, name) for site in tags_in(equation))


def _site(equation) -> Site:
    return jax.tree.unflatten(equation.params["tree"], [None] * equation.params["tree"].num_leaves).site


def _jaxprs(params: dict[str, Any]) -> Iterator[core.Jaxpr]:
    for param in params.values():
        for part in param if isinstance(param, tuple | list) else (param,):
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part


def _opened(equation, name: str) -> tuple[core.Jaxpr, Sequence[Any]]:
    jaxpr = _param(equation, name)
    return (jaxpr.jaxpr, jaxpr.consts) if isinstance(jaxpr, core.ClosedJaxpr) else (jaxpr, ())


def _call(equation, operands: list[Any], again: bool) -> Run:
    """In place. Shardings that jit was given stay, and remat still forbids to use the first run's values."""
    if equation.primitive is primitives.jit_p:
        operands = _constrained(operands, _param(equation, "in_shardings"))
        results, seen = run(*_opened(equation, "jaxpr"), operands, again)
        return _constrained(results, _param(equation, "out_shardings")), seen
    if equation.primitive is not primitives.remat_p:
        return run(*_opened(equation, "call_jaxpr"), operands, again)
    if _param(equation, "differentiated") and _param(equation, "prevent_cse") is not False:
        operands = jax.lax.optimization_barrier(operands)
    return run(*_opened(equation, "jaxpr"), operands, again)


def _constrained(values: list[Any], shardings) -> list[Any]:
    pairs = zip(values, shardings, strict=True)
    return [jax.lax.with_sharding_constraint(v, s) if isinstance(s, Sharding) else v for v, s in pairs]


def _ndim(atom) -> int:
    return len(atom.aval.shape)


def _scan(equation, operands: list[Any], again: bool) -> Run:
    """With the records of each step stacked, as other results are."""
    body, consts = _opened(equation, "jaxpr")
    # What jax 0.10 and 0.12 say differently of operands (constants, carry, xs) and results (carry, ys): xs and ys have
    # one dimension more outside.
    carried = sum(_ndim(o) == _ndim(i) for o, i in zip(equation.outvars, body.outvars, strict=True))
    scanned = sum(_ndim(o) != _ndim(i) for o, i in zip(equation.invars, body.invars, strict=True))
    first = len(operands) - scanned - carried
    fixed, carry, xs = operands[:first], operands[first : first + carried], operands[first + carried :]

    def step(carry, x):
        results, seen = run(body, consts, [*fixed, *carry, *x], again)
        return results[:carried], (results[carried:], seen)

    how = {name: _param(equation, name) for name in ("length", "reverse", "unroll")}
    carry, (ys, seen) = jax.lax.scan(step, carry, xs, **how)
    return [*carry, *ys], seen


def _shard_map(equation, operands: list[Any], again: bool) -> Run:
    """With the records of all devices, added up."""
    axes, mesh = _param(equation, "newly_manual_axes"), _param(equation, "mesh")

    def part(*arguments):
        results, seen = run(*_opened(equation, "jaxpr"), arguments, again)
        return tuple(results), jax.tree.map(lambda leaf: vary(leaf, axes)[None], seen)

    over = PartitionSpec(tuple(axis for axis in mesh.axis_names if axis in axes))
    results, seen = jax.shard_map(
        part,
        mesh=mesh,
        in_specs=tuple(_param(equation, "in_specs")),
        out_specs=(tuple(_param(equation, "out_specs")), over),
        axis_names=axes,
        check_vma=_param(equation, "check_vma"),
    )(*operands)
    return list(results), [dataclasses.replace(one, record=merged(one.record)) for one in seen]
