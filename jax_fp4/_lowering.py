"""What a program decides when it is lowered: `refuse`, which no platform can run, `choose`, which CUDA may run
otherwise, and `native_or_reference`, which of an op's functions runs. A program is traced once and lowered for any
platform, so none of these is known while it is traced. And what is refused where a program is differentiated."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, assert_never

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

from jax_fp4._errors import UnsupportedError, message
from jax_fp4._placement import vary, varying

# --- refuse ---

_refuse_p = core.Primitive("jax_fp4_refuse")
_refuse_p.multiple_results = True


def refuse(function, text: str):
    """A stand-in for `function` with its result shapes, which raises UnsupportedError(text) when it is lowered."""

    def refused(*arguments):
        shapes = jax.eval_shape(function, *arguments)
        leaves, tree = jax.tree.flatten(shapes)
        results = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        return jax.tree.unflatten(tree, _refuse_p.bind(*jax.tree.leaves(arguments), results=results, text=text))

    return refused


@_refuse_p.def_abstract_eval
def _(*_, results, text):
    return [ShapedArray(shape, dtype) for shape, dtype in results]


def _refuse_lowering(context, *_, results, text):
    platforms = context.platforms or context.module_context.platforms
    raise UnsupportedError(text.format(platform=", ".join(platforms)))


def _refuse_batching(arguments, dimensions, *, results, text):
    size = next(a.shape[d] for a, d in zip(arguments, dimensions, strict=True) if d is not None)
    batched = tuple(((size, *shape), dtype) for shape, dtype in results)
    return _refuse_p.bind(*arguments, results=batched, text=text), [0] * len(results)


mlir.register_lowering(_refuse_p, _refuse_lowering)
batching.primitive_batchers[_refuse_p] = _refuse_batching


# --- choose ---
# Not lax.platform_dependent: it knows no architectures, and leaves its switch in the text of every program.

_choose_p = core.Primitive("jax_fp4_choose")
_choose_p.multiple_results = True


def choose(cuda, otherwise, *, usable: Callable[[mlir.LoweringRuleContext], bool], batched: bool = True):
    """`cuda` where the program is lowered for CUDA and usable(the context of that lowering) is true, else `otherwise`,
    of which the program is what it would be without the choice.

    Both are functions of the same arrays (they close over none), with results of the same structure and types.
    Derivatives are those of `otherwise`. batched: under vmap both are mapped; False leaves `otherwise` alone, mapped.
    """

    def chosen(*arguments):
        leaves, tree = jax.tree.flatten(arguments)

        def flat(function):
            return lambda *leaves: function(*jax.tree.unflatten(tree, leaves))

        first, second = (jax.make_jaxpr(flat(function), return_shape=True)(*leaves) for function in (cuda, otherwise))
        shapes = [jax.tree.map(lambda a: (a.shape, a.dtype), out) for _, out in (first, second)]
        assert shapes[0] == shapes[1], shapes  # and not types, which on a mesh may name other shardings
        results = _choose_p.bind(*leaves, cuda=first[0], otherwise=second[0], usable=usable, batched=batched)
        return jax.tree.unflatten(jax.tree.structure(second[1]), results)

    return chosen


def compiled(primitive: core.Primitive, *arguments, **static):
    """What a primitive does when it is called: where an eager call or jax.disable_jit leads."""
    with jax.disable_jit(False):
        return jax.jit(partial(primitive.bind, **static))(*arguments)


_choose_p.def_impl(partial(compiled, _choose_p))


@_choose_p.def_abstract_eval
def _(*_, otherwise, **__):
    return otherwise.out_avals


def _choose_lowering(context, *arguments, cuda, otherwise, usable, batched):
    return lowered(context, otherwise, arguments)


def _choose_lowering_for_cuda(context, *arguments, cuda, otherwise, usable, batched):
    return lowered(context, cuda if usable(context) else otherwise, arguments)


def lowered(context, jaxpr, arguments):
    """Of several platforms each gets functions of its own: JAX shares those of jitted functions, of which one inside
    may be another choice."""
    module = context.module_context
    if len(module.platforms) > 1:
        context = context.replace(module_context=module.replace(cached_primitive_lowerings={}))
    return mlir.lower_fun(core.jaxpr_as_fun(jaxpr))(context, *arguments)


def is_partitioned(context) -> bool:
    """Whether XLA partitions the program that is lowered: it would gather all operands of a custom call on each device.
    Over the manual axes of a shard_map it does not."""
    axes = context.module_context.axis_context
    if (mesh := getattr(axes, "mesh", None)) is not None:
        return any(size > 1 for axis, size in mesh.shape.items() if axis not in axes.manual_axes)
    return getattr(axes, "num_devices", 1) > 1


def _choose_batching(arguments, dimensions, *, cuda, otherwise, usable, batched):
    cuda, otherwise = (jax.vmap(core.jaxpr_as_fun(jaxpr), in_axes=tuple(dimensions)) for jaxpr in (cuda, otherwise))
    if not batched:
        return (results := otherwise(*arguments)), [0] * len(results)
    cuda, otherwise = (jax.make_jaxpr(function)(*arguments) for function in (cuda, otherwise))
    results = _choose_p.bind(*arguments, cuda=cuda, otherwise=otherwise, usable=usable, batched=batched)
    return results, [0] * len(results)


def _choose_jvp(primals, tangents, *, otherwise, **static):
    return _choose_p.bind(*primals, otherwise=otherwise, **static), derivative(otherwise, primals, tangents)


def derivative(jaxpr, primals, tangents):
    """The tangents of what a jaxpr computes, along those that are not zero."""
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_moving(*values):
        arguments = list(primals)
        for i, value in zip(moving, values, strict=True):
            arguments[i] = value
        return core.jaxpr_as_fun(jaxpr)(*arguments)

    at, along = ([a[i] for i in moving] for a in (primals, tangents))
    return jax.jvp(of_moving, at, along)[1]


def _choose_dce(used, *more):
    """Where JAX removes from a program what nobody needs, it does so inside too; results stay together."""
    *_, equation = more  # jax 0.12 has another argument before it
    if not any(used):
        return [False] * len(equation.invars), None
    jaxprs = {name: equation.params[name] for name in ("cuda", "otherwise")}
    for name, jaxpr in jaxprs.items():
        jaxprs[name] = jaxpr.replace(jaxpr=partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(used), instantiate=True)[0])
    return [True] * len(equation.invars), equation.replace(params={**equation.params, **jaxprs})


mlir.register_lowering(_choose_p, _choose_lowering)
mlir.register_lowering(_choose_p, _choose_lowering_for_cuda, platform="cuda")
batching.primitive_batchers[_choose_p] = _choose_batching
ad.primitive_jvps[_choose_p] = _choose_jvp
partial_eval.dce_rules[_choose_p] = _choose_dce


# --- local ---

_local_p = core.Primitive("jax_fp4_local")
_local_p.multiple_results = True


def local(function):
    """`function`, which is of each device's arrays and moves nothing between devices, inside shard_map too.

    With check_vma=True JAX types every value there with the mesh axes over which it varies, and loops, branches and FFI
    calls want all types to agree. None of that is seen in here: all results vary over what any argument does.
    """

    def called(*arguments):
        leaves, tree = jax.tree.flatten(arguments)
        axes = varying(leaves)
        if not axes:
            return function(*arguments)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        with use_abstract_mesh(NO_MESH):
            jaxpr, out = jax.make_jaxpr(lambda *a: function(*jax.tree.unflatten(tree, a)), return_shape=True)(*shapes)
        results = _local_p.bind(*vary(leaves, axes), jaxpr=jaxpr)
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return called


NO_MESH = AbstractMesh((), ())


@_local_p.def_abstract_eval
def _(*arguments, jaxpr):
    mesh, kind = arguments[0].sharding.mesh, arguments[0].manual_axis_type

    def result(a):
        place = NamedSharding(mesh, PartitionSpec(*[None] * a.ndim))
        return ShapedArray(a.shape, a.dtype, sharding=place, manual_axis_type=kind)

    return [result(a) for a in jaxpr.out_avals]


def _local_lowering(context, *arguments, jaxpr):
    context = context.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals)
    with use_abstract_mesh(NO_MESH):
        return lowered(context, jaxpr, arguments)


def _local_batching(arguments, dimensions, *, jaxpr):
    results = local(jax.vmap(core.jaxpr_as_fun(jaxpr), in_axes=tuple(dimensions)))(*arguments)
    return results, [0] * len(results)


def kept_whole(used, *more):
    """For JAX's removal of what nobody needs: all of an equation is needed, or nothing."""
    *_, equation = more  # jax 0.12 has another argument before it
    if not any(used):
        return [False] * len(equation.invars), None
    return [True] * len(equation.invars), equation


mlir.register_lowering(_local_p, _local_lowering)
batching.primitive_batchers[_local_p] = _local_batching
partial_eval.dce_rules[_local_p] = kept_whole


# --- undifferentiable ---


def undifferentiable(op: str, function):
    """`function`, raising where it would be differentiated: through packed bytes every gradient is zero."""
    guarded = jax.custom_jvp(local(function))
    operand = "q (or a quantized kernel)" if op == "dequantize" else "x"

    @guarded.defjvp
    def _(*_):
        raise UnsupportedError(
            message(
                op,
                operand,
                "differentiated",
                "a constant",
                "packed codes carry no gradient, and zeros would go unnoticed",
                "jax_fp4.dense, or jax.lax.stop_gradient of it",
            )
        )

    return guarded


# --- native or reference ---

IMPLEMENTATIONS = (None, "cpu", "cuda", "reference")
Implementation = Literal["cpu", "cuda", "reference"] | None


def native_or_reference(
    op: str, native, specification, implementation: Implementation, strict: bool, no_cuda: tuple[str, str] | None
):
    """The function of an op that runs: chosen when the program is lowered, or the named one.

    native is the wrapper of its handlers, for the CPU and CUDA, or without the latter where no_cuda says what
    implementation="cuda" lacks: (needs, because). specification takes the same arrays. To be cached by the caller, so
    that eager calls find their compiled program and the reference is traced once for each shape. inline: in a traced
    program there is no call around it, only the custom call.
    """
    platforms = ("cpu",) if no_cuda else ("cpu", "cuda")

    def fallback(*arguments):
        with jax.numpy_rank_promotion("allow"):  # the specification broadcasts as NumPy does, whatever the user forbids
            return specification(*arguments)

    match implementation:
        case "reference":
            compiled = jax.jit(undifferentiable(op, fallback), inline=True)
            return lambda x, *rest: (fallback if isinstance(x, np.ndarray) else compiled)(x, *rest)
        case "cuda" if no_cuda:
            raise UnsupportedError(message(op, "implementation", "'cuda'", *no_cuda, "implementation=None"))
        case "cpu" | "cuda":
            why = f"the handler named by implementation='{implementation}' runs on {implementation.upper()} only"
            otherwise = refuse(
                native, message(op, "platform", "{platform}", implementation, why, "implementation=None")
            )
            platforms = (implementation,)
        case None if strict:
            why, fix = "no kernel exists for it and strict() forbids the reference", "implementation='reference'"
            otherwise = refuse(native, message(op, "platform", "{platform}", " or ".join(platforms), why, fix))
        case None:
            otherwise = fallback
        case _:
            assert_never(implementation)
    return jax.jit(undifferentiable(op, _native_or(native, otherwise, platforms)), inline=True)


_native_p = core.Primitive("jax_fp4_native")
_native_p.multiple_results = True


class _Flat(NamedTuple):
    """A function of leaves."""

    function: Callable
    tree: Any

    def __call__(self, *leaves):
        return jax.tree.leaves(self.function(*jax.tree.unflatten(self.tree, leaves)))


class _Mapped(NamedTuple):
    function: Callable
    axes: tuple[int | None, ...]

    def __call__(self, *leaves):
        return jax.vmap(self.function, in_axes=self.axes)(*leaves)


def _native_or(native, otherwise, platforms: tuple[str, ...]):
    """native(*arrays) in a program that is lowered for one of the platforms, elsewhere `otherwise`, which is traced
    only then: lax.platform_dependent would trace the specification into every program, for longer than all the rest."""

    def run(*arguments):
        leaves, tree = jax.tree.flatten(arguments)
        jaxpr, shapes = jax.make_jaxpr(lambda *a: native(*jax.tree.unflatten(tree, a)), return_shape=True)(*leaves)
        results = _native_p.bind(*leaves, native=jaxpr, otherwise=_Flat(otherwise, tree), platforms=platforms)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return run


_native_p.def_impl(partial(compiled, _native_p))


@_native_p.def_abstract_eval
def _(*_, native, **__):
    return native.out_avals


def _native_lowering(platform: str | None, context, *arguments, native, otherwise, platforms):
    if platform in platforms:
        return lowered(context, native, arguments)
    return mlir.lower_fun(otherwise)(context, *arguments)


def _native_batching(arguments, dimensions, *, native, otherwise, platforms):
    axes = tuple(dimensions)
    jaxpr = jax.make_jaxpr(jax.vmap(core.jaxpr_as_fun(native), in_axes=axes))(*arguments)
    results = _native_p.bind(*arguments, native=jaxpr, otherwise=_Mapped(otherwise, axes), platforms=platforms)
    return results, [0] * len(results)


mlir.register_lowering(_native_p, partial(_native_lowering, None))
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(_native_p, partial(_native_lowering, _platform), platform=_platform)
batching.primitive_batchers[_native_p] = _native_batching
partial_eval.dce_rules[_native_p] = kept_whole
