"""What a program decides when it is lowered: `refuse`, which no platform can run, `choose`, which CUDA may run
otherwise, and `native_or_reference`, which of an op's functions runs. A program is traced once and lowered for any
platform, so none of these is known while it is traced. And what is refused where a program is differentiated."""

from collections.abc import Callable
from functools import partial
from typing import Literal, assert_never

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import ad, batching, mlir, partial_eval

from jax_fp4._errors import UnsupportedError, message

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
        assert first[1] == second[1], (first[1], second[1])
        results = _choose_p.bind(*leaves, cuda=first[0], otherwise=second[0], usable=usable, batched=batched)
        return jax.tree.unflatten(jax.tree.structure(second[1]), results)

    return chosen


@_choose_p.def_impl
def _(*arguments, **static):
    with jax.disable_jit(False):  # which is what leads here, or an eager call
        return jax.jit(partial(_choose_p.bind, **static))(*arguments)


@_choose_p.def_abstract_eval
def _(*_, otherwise, **__):
    return otherwise.out_avals


def _choose_lowering(context, *arguments, cuda, otherwise, usable, batched):
    return _lowered(context, otherwise, arguments)


def _choose_lowering_for_cuda(context, *arguments, cuda, otherwise, usable, batched):
    return _lowered(context, cuda if usable(context) else otherwise, arguments)


def _lowered(context, jaxpr, arguments):
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
    result = _choose_p.bind(*primals, otherwise=otherwise, **static)
    moving = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_moving(*values):
        arguments = list(primals)
        for i, value in zip(moving, values, strict=True):
            arguments[i] = value
        return core.jaxpr_as_fun(otherwise)(*arguments)

    at, along = ([a[i] for i in moving] for a in (primals, tangents))
    return result, jax.jvp(of_moving, at, along)[1]


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


# --- undifferentiable ---


def undifferentiable(op: str, function):
    """`function`, raising where it would be differentiated: through packed bytes every gradient is zero."""
    guarded = jax.custom_jvp(function)
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
    choose = partial(jax.lax.platform_dependent, **dict.fromkeys(platforms, native), default=otherwise)
    return jax.jit(undifferentiable(op, choose), inline=True)
