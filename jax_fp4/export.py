"""Trained weights as an NVFP4 checkpoint in the layout of NVIDIA ModelOpt, which inference servers read; and back.

    recipe = fp4.NVFP4BlockScaling()
    export.save("out", params, recipe, dtype=jnp.bfloat16)        # params of Linen, or nnx.state(model, nnx.Param)
    frozen = export.load("out", like=params)                      # a QuantizedTensor for each quantized kernel
    y = fp4.dense(x, frozen["Dense_0"]["kernel"], recipe=recipe)  # bit for bit what the trained model computes

The folder gets `model.safetensors` and `hf_quant_config.json`. Of each quantized kernel [k, n]:

    <name>.weight          uint8 [n, k/2]   two E2M1 codes a byte, even k in the low nibble
    <name>.weight_scale    e4m3  [n, k/16]
    <name>.weight_scale_2  f32   []         fl(amax / (6B)), B the bound of the recipe: 448, or 256 in four-over-six
    <name>.input_scale     f32   []         amax of what the layer gets / (6 * 448), where `input_amax` says it

A weight is code * weight_scale * weight_scale_2. Kernels that are not quantized are <name>.weight [n, k] in their own
dtype, as linear layers have them elsewhere; <name>.bias [n] is divided as its kernel is; all other parameters keep
shape and dtype. amax / (6B) is rounded, and two amaxes can give one scale, so the amax itself travels in the header of
the file, where other readers do not look.
"""

import difflib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jax_fp4._array import QuantizedTensor
from jax_fp4._choosing import Rules
from jax_fp4._errors import UnsupportedError, message
from jax_fp4._export_file import Stored, check_kept, library, tensors_of, write
from jax_fp4._export_layout import Layouts, Names, Parameter, first_match, parameters, refuse_unmatched
from jax_fp4._export_placement import placed, placed_packed
from jax_fp4._formats import BLOCK, E2M1_MAX, E4M3_MAX, PACK
from jax_fp4._grouped_mlp import recipe_of_second
from jax_fp4._ops import quantize
from jax_fp4._recipe import HIGH_PRECISION, Recipe, RecipeChoice, Scaling, check_choice, check_recipe, scaling_of

_WEIGHTS, _CONFIG = "model.safetensors", "hf_quant_config.json"
_INPUT_SCALE = E2M1_MAX * E4M3_MAX


def save(
    directory: str | Path, params: Any, recipe: RecipeChoice | Rules, *, dtype: Any,
    out_recipe: RecipeChoice | Rules | None = None, router_recipe: RecipeChoice | Rules | None = HIGH_PRECISION,
    names: Names | None = None, layouts: Layouts | None = None, input_amax: Mapping[str, Any] | None = None,
    quant_algo: Literal["NVFP4", "W4A16_NVFP4"] | None = None,
) -> None:  # fmt: skip
    """Write parameters into `directory`, which is made if need be.

    params: a tree of Linen's parameters or an nnx.State. Kernels are the leaves called kernel, w_in and w_out; frozen
        ones (`quantize(w, axis=0)`) are written as they are. Sharded arrays are gathered, a kernel at a time.
    recipe: what the model was trained with, also Rules: the path of a layer is matched as in `linen.quantized` and
        `nnx.quantize_model`, and a layer that no rule matches is not quantized.
    out_recipe, router_recipe: as the layers had them: of w_out (None: that of w_in), and of the router of an MoE (None:
        by its own path as any other kernel). Where layers differ, Rules over the paths of layers, of "moe/router" for a
        router; a layer that none of them matches is as with the default.
    dtype: the compute dtype of the model, to which its layers round kernels before they quantize them. Another one
        gives other bits, so there is no default. Routers compute in float32 whatever it is.
    names: what a tensor is called, a function of our name: "blocks.3.mlp.up.weight" for blocks/3/mlp/up/kernel,
        "moe.experts.7.w_in.weight", "up.bias", "embed.weight", and "norm.weight" for its scale. Where it gives several,
        the outputs of the kernel are divided among them equally, and those of its bias: gate and up; query, key, value.
    layouts: what the dimensions of a kernel mean, by regular expression on its path: "kn" (k contracted, n outputs),
        "gkn" (a matrix for each expert, or each layer of a scan), "knn", "kkn" (DenseGeneral); None keeps the array as
        it is. Known without it: "kn" of two dimensions, "gkn" of w_in and w_out. The first that matches counts.
    input_amax: by regular expression on the path of a quantized kernel (the first match counts), the largest |x| that
        its layer meets, [] or one for each expert: the static scale of a server that quantizes activations.
    quant_algo: "NVFP4" has a server do that, and each packed kernel needs an input_amax; "W4A16_NVFP4" has it leave x
        alone. None is "NVFP4" where each has one, else "W4A16_NVFP4".

    Raises TypeError for what is no recipe, tree of arrays or floating-point dtype, UnsupportedError for weights in
    another form than NVFP4 with an amax for each matrix, ValueError for k that is no multiple of 16, NaN or Inf in a
    quantized kernel, a rule, layout or input_amax that matches nothing, an input_amax that "NVFP4" lacks, a kernel of
    unknown layout and two tensors of one name, ModuleNotFoundError without the package safetensors. Nothing is written
    then.
    """
    op = "export.save"
    library(op)
    _check_dtype(op, dtype)
    found, _ = parameters(op, "params", params, names, layouts)
    scalings = _scalings(op, found, recipe, out_recipe, router_recipe)
    refuse_unmatched(op, "input_amax", input_amax or {}, [*scalings])
    amaxes = {path: first_match(input_amax or {}, path) for path in scalings}
    algorithm = _quant_algo(op, quant_algo, [path for path, amax in amaxes.items() if amax is None])
    tensors: dict[str, np.ndarray] = {}
    facts, excluded, routers = {}, [], _routers(found)
    for p in found:
        if p.path in scalings:
            q = _quantized(op, p, scalings[p.path], jnp.float32 if p.layer in routers else dtype)
            made = _packed(p, q) | _input_scales(op, p, amaxes[p.path])
            facts |= _facts(p, q)
        else:
            made = dict(zip(p.flat_names, p.dense(op), strict=True))
            excluded += [name.removesuffix(".weight") for name in made if p.is_kernel]
        if twice := sorted({*made} & {*tensors}):
            why, fix = "a file has each name once", "`names` that gives each parameter a name of its own"
            raise ValueError(message(op, "names", f"{twice[0]!r} for two parameters", "two names", why, fix))
        tensors |= made
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    write(op, folder / _WEIGHTS, tensors, facts)
    (folder / _CONFIG).write_text(json.dumps(_config(algorithm, excluded), indent=2) + "\n")


def load(directory: str | Path, like: Any, *, names: Names | None = None, layouts: Layouts | None = None) -> Any:
    """Read what `save`, or ModelOpt, wrote: the tree `like` with a frozen QuantizedTensor for each quantized kernel.

    like: parameters, or `jax.ShapeDtypeStruct` in their place: what there is, of which shapes, and on which devices
    where it has a sharding (or is committed to one). A packed kernel lies as the kernel would: codes and scales
    [*g, n, k/..] are cut as [*g, k, n] is. dtypes are those of the file. names, layouts: as they were for `save`. All
    files *.safetensors of the folder are read, tensor by tensor.

    A quantized kernel is [*g, k, n], blocked along k, as `dense` and `grouped_dense` take it, with the bits that `save`
    wrote, its amax included: a forward under the same recipe is that of the trained model. A file of other origin has
    no amax. Then it is fl(2688 * weight_scale_2) with B = 448, which decodes to the same weights up to float32
    rounding, whatever B was, and its compute dtype is that of `like`. input_scale is not read.

    Raises FileNotFoundError for a folder without such files; ValueError for a tensor that is missing, of another dtype
    or shape than `like` and the layout need, of 64 bits without jax_enable_x64, or without a place in `like`, for parts
    of one kernel whose scales differ, and for a sharding that cuts a block of scales or has no devices;
    UnsupportedError for one that is no NamedSharding of a kernel's dimensions; ModuleNotFoundError without the package
    safetensors.
    """
    op = "export.load"
    tensors, facts = tensors_of(op, Path(directory))
    found, unflatten = parameters(op, "like", like, names, layouts)
    used: set[str] = set()

    def take(name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        used.add(name)
        return _tensor(op, tensors, name, dtype, shape)

    leaves = []
    for p in found:
        if p.is_kernel and f"{p.flat_names[0]}_scale" in tensors:
            leaves.append(placed_packed(op, p, _frozen(op, p, take, facts)))
        else:
            leaves.append(placed(op, p, p.from_dense([take(name, None, p.part_shape) for name in p.flat_names])))
    if rest := sorted(name for name in {*tensors} - used if not name.endswith(".input_scale")):
        shown = f"without a place for {rest[0]!r}, and {len(rest) - 1} more"
        why, fix = "what is left out would be missing in the model", "the whole model, or `names` that says what it is"
        raise ValueError(message(op, "like", shown, "one for each tensor of the file", why, fix))
    return unflatten(leaves)


# --- what is quantized, and how ---


def _check_dtype(op: str, dtype: Any) -> None:
    # NumPy takes None for float64.
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        why, fix = "layers round kernels to it before they quantize them", "the `dtype` of the model's layers"
        raise TypeError(message(op, "dtype", repr(dtype), "a floating-point dtype", why, fix))


def _quant_algo(op: str, given: object, without: list[str]) -> str:
    """without: the packed kernels that have no input_amax."""
    if given is None:
        return "W4A16_NVFP4" if without else "NVFP4"
    check_choice(op, "quant_algo", given, ("NVFP4", "W4A16_NVFP4"), "servers choose their kernels by it")
    if given == "NVFP4" and without:
        needs, why = f"an input_amax for {', '.join(without)}", "a server quantizes x by the scale that comes of it"
        raise ValueError(message(op, "quant_algo", "'NVFP4'", needs, why, "'W4A16_NVFP4', or input_amax={path: amax}"))
    return str(given)


def _check_rules(op: str, argument: str, recipe: RecipeChoice | Rules | None, layers: list[str]) -> None:
    if not isinstance(recipe, Rules):
        check_recipe(op, recipe, argument)
    elif unmatched := recipe.unmatched(layers):
        near = difflib.get_close_matches(unmatched[0], layers, 3, 0.0)
        shown, why = f"with {unmatched[0]!r}, which matches nothing", f"the nearest paths are {near}"
        fix = "the rules without it, out_recipe for w_out, router_recipe for a router"
        raise ValueError(message(op, argument, shown, "the whole path of a layer", why, fix))


def _scalings(
    op: str, found: list[Parameter], recipe: RecipeChoice | Rules, out_recipe: RecipeChoice | Rules | None,
    router_recipe: RecipeChoice | Rules | None,
) -> dict[str, Scaling | None]:  # fmt: skip
    """By path of each kernel that is quantized; None where it is frozen already."""
    if recipe is None:
        why, fix = "it says what is quantized", "the recipe of the model, or HIGH_PRECISION"
        raise TypeError(message(op, "recipe", "None", "a recipe, HIGH_PRECISION or Rules", why, fix))
    kernels = [p for p in found if p.is_kernel]
    mlps, routers = {p.layer for p in kernels if p.leaf == "w_out"}, _routers(found)
    _check_rules(op, "recipe", recipe, [p.layer for p in kernels])
    _check_rules(op, "out_recipe", out_recipe, [*mlps])
    _check_rules(op, "router_recipe", router_recipe, [*routers])
    scalings: dict[str, Scaling | None] = {}
    for p in kernels:
        chosen = _chosen(recipe, p.layer)
        if p.leaf == "w_out":
            chosen = recipe_of_second(chosen, _chosen(out_recipe, p.layer))
        elif p.layer in routers:
            own = _chosen(router_recipe, p.layer, HIGH_PRECISION)
            chosen = chosen if own is None else own
        scaling = scaling_of(chosen, "forward", "kernel") if isinstance(chosen, Recipe) else None
        if isinstance(p.value, QuantizedTensor):
            scalings[p.path] = _check_frozen(op, p)
        elif scaling is not None:
            scalings[p.path] = _check_scaling(op, p, scaling)
    return scalings


def _routers(found: list[Parameter]) -> set[str]:
    """The layers that choose the experts beside which they lie."""
    beside = {f"{p.layer}/router".lstrip("/") for p in found if p.leaf == "w_out"}
    return {p.layer for p in found if p.leaf == "kernel" and p.layer in beside}


def _chosen(recipe: RecipeChoice | Rules | None, layer: str, otherwise: RecipeChoice | None = None) -> Any:
    if not isinstance(recipe, Rules):
        return recipe
    rule = recipe.match(layer)
    return otherwise if rule is None else rule[1]


def _check_scaling(op: str, p: Parameter, scaling: Scaling) -> Scaling:
    if scaling.format != "nvfp4":
        why, fix = "that is what the names and the layout are of", "an NVFP4 recipe, or a rule with HIGH_PRECISION"
        raise UnsupportedError(message(op, p.path, f"quantized to {scaling.format}", "NVFP4", why, fix))
    if p.k % BLOCK:
        why, fix = "readers take k from the packed width", f"a rule ({p.layer!r}, HIGH_PRECISION) before the others"
        raise ValueError(message(op, p.path, f"of k = {p.k}", f"a multiple of {BLOCK}", why, fix))
    return scaling


def _check_frozen(op: str, p: Parameter) -> None:
    q = p.value
    if q.format != "nvfp4" or q.axis != 0 or q.row_scaled or q.hadamard or q.grouped or q.inner:
        shown = f"{q!r}{', row-scaled' if q.row_scaled else ''}{', transformed' if q.hadamard else ''}"
        why, fix = "a matrix has one weight_scale_2 and is blocked along k", "jax_fp4.quantize(kernel, axis=0)"
        raise UnsupportedError(message(op, p.path, shown, "NVFP4 along axis 0 with one amax", why, fix))
    _check_scaling(op, p, Scaling("nvfp4"))


def _quantized(op: str, p: Parameter, scaling: Scaling | None, dtype: Any) -> QuantizedTensor:
    """Q(w) of the forward: codes [*g, n, k/2]."""
    q = p.value
    if scaling is not None:
        q = quantize(jnp.asarray(p.matrices(op)), axis=0, batch_dims=len(p.groups), dtype=dtype, **scaling.flags)
    if not np.all(np.isfinite(q.amax)):
        why, fix = "a NaN or Inf is no weight", "an earlier checkpoint: this run has diverged"
        raise ValueError(message(op, p.path, f"of amax {np.asarray(q.amax)}", "finite numbers", why, fix))
    return q


# --- writing ---


def _packed(p: Parameter, q: QuantizedTensor) -> dict[str, np.ndarray]:
    made = dict(zip(p.flat_names, p.divided(q.codes), strict=True))
    made |= zip((f"{name}_scale" for name in p.flat_names), p.divided(q.block_scale), strict=True)
    for names, amax in zip(p.names, np.ravel(q.amax), strict=True):
        made |= {f"{name}_scale_2": np.asarray(amax / np.float32(E2M1_MAX * q.bound)) for name in names}
    return made


def _facts(p: Parameter, q: QuantizedTensor) -> dict[str, dict[str, Any]]:
    static = {"bound": q.bound, "block": q.block, "dtype": q.dtype.name}
    amaxes = np.ravel(q.amax).tolist()  # a float32 as a float64, which JSON gives back
    return {name: {"amax": amax, **static} for names, amax in zip(p.names, amaxes, strict=True) for name in names}


def _input_scales(op: str, p: Parameter, amax: Any) -> dict[str, np.ndarray]:
    if amax is None:
        return {}
    amaxes = np.asarray(amax, np.float32)
    if amaxes.shape not in ((), p.groups) or not np.all((amaxes > 0) & np.isfinite(amaxes)):
        needs, why = f"positive numbers, () or {p.groups}", "a layer (or expert) has one scale"
        raise ValueError(message(op, f"input_amax of {p.path}", amaxes, needs, why, "the largest |x| of calibration"))
    scales = np.ravel(np.broadcast_to(amaxes / np.float32(_INPUT_SCALE), p.groups))
    by_matrix = zip(p.names, scales, strict=True)
    return {f"{name[: -len('weight')]}input_scale": np.asarray(scale) for names, scale in by_matrix for name in names}


def _config(quant_algo: str, excluded: list[str]) -> dict[str, Any]:
    # The producer names the layout: TensorRT-LLM refuses every other one.
    return {
        "producer": {"name": "modelopt", "written_by": "jax_fp4"},
        "quantization": {
            "quant_algo": quant_algo,
            "kv_cache_quant_algo": None,
            "group_size": BLOCK,
            "exclude_modules": sorted(excluded),
        },
    }


# --- reading ---


def _tensor(op: str, tensors: dict[str, Stored], name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    if name not in tensors:
        near = difflib.get_close_matches(name, tensors, 3, 0.0)
        needs, why, fix = "in the file", f"`like` has it; the nearest there are {near}", "`names` that says what it is"
        raise ValueError(message(op, name, "missing", needs, why, fix))
    stored = tensors[name]
    # weight_scale_2 is [] in the files of most writers, [1] in those of some
    scalar = name.endswith("_scale_2") and math.prod(stored.shape) == 1
    have = () if scalar else stored.shape
    if have != shape or (dtype is not None and stored.dtype != dtype):
        shown, needs = f"{stored.dtype} {have}", f"{np.dtype(dtype) if dtype else ''} {shape}".strip()
        why, fix = "`like` and NVFP4's layout say so", "the parameters and the layouts of the model that was saved"
        raise ValueError(message(op, name, shown, needs, why, fix))
    check_kept(op, name, stored.dtype)
    return stored.read().reshape(have)


def _frozen(op: str, p: Parameter, take: Callable[..., np.ndarray], facts: dict[str, Any]) -> QuantizedTensor:
    n, k = p.part_shape
    codes = [take(name, np.uint8, (n, k // PACK)) for name in p.flat_names]
    scale = [take(f"{name}_scale", jnp.float8_e4m3fn, (n, k // BLOCK)) for name in p.flat_names]
    amaxes = []
    static = _fact(op, p, p.flat_names[0], take, facts)[1:]
    for names in p.names:
        amaxes.append(_fact(op, p, names[0], take, facts)[0])
        for name in names:
            if (fact := _fact(op, p, name, take, facts)) != (amaxes[-1], *static):
                why = "a matrix has one amax, and the matrices of a kernel one bound, block and dtype"
                fix = "`names` and `like` that keep them apart"
                shown, needs = (f"amax, bound, block, dtype {each}" for each in (fact, (amaxes[-1], *static)))
                raise ValueError(message(op, f"{name}_scale_2", f"of {shown}", needs, why, fix))
    bound, block, dtype = static
    amax = np.reshape(np.array(amaxes, np.float32), p.groups)
    return QuantizedTensor(
        p.joined(codes), p.joined(scale), amax, axis=0, extent=k, dtype=dtype, bound=bound, block=block
    )


def _fact(op: str, p: Parameter, name: str, take: Callable[..., np.ndarray], facts: dict[str, Any]) -> tuple:
    """amax, bound, block and dtype of one packed weight: noted by `save`, or what can be known without."""
    scale_2 = take(f"{name}_scale_2", np.float32, ())
    if name not in facts:
        return np.float32(scale_2 * np.float32(E2M1_MAX * E4M3_MAX)), E4M3_MAX, (1, BLOCK), np.dtype(p.value.dtype)
    fact = facts[name]
    amax, bound = np.float32(fact["amax"]), fact["bound"]
    if amax / np.float32(E2M1_MAX * bound) != scale_2:
        needs, why = f"{amax} / {E2M1_MAX * bound}", "its amax is in the header"
        raise ValueError(message(op, f"{name}_scale_2", scale_2, needs, why, "the file as export.save wrote it"))
    return amax, bound, tuple(fact["block"]), np.dtype(fact["dtype"])
