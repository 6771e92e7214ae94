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
dtype, as linear layers have them elsewhere; all other parameters keep shape and dtype. amax / (6B) is rounded, and two
amaxes can give one scale, so the amax itself travels in the header of the file, where other readers do not look.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jax_fp4._array import QuantizedTensor
from jax_fp4._choosing import Rules
from jax_fp4._errors import UnsupportedError, message
from jax_fp4._export_layout import Layouts, Names, Parameter, parameters, refuse_unmatched
from jax_fp4._formats import BLOCK, E2M1_MAX, E4M3_MAX, PACK
from jax_fp4._ops import quantize
from jax_fp4._recipe import Recipe, RecipeChoice, Scaling, check_choice, check_recipe, scaling_of

_WEIGHTS, _CONFIG = "model.safetensors", "hf_quant_config.json"
_HEADER = "jax_fp4"  # what is ours in the header of the file: the facts that the tensors do not tell
_INPUT_SCALE = E2M1_MAX * E4M3_MAX


def save(
    directory: str | Path, params: Any, recipe: RecipeChoice | Rules, *, dtype: Any, names: Names | None = None,
    layouts: Layouts | None = None, input_amax: Mapping[str, Any] | None = None,
    quant_algo: Literal["NVFP4", "W4A16_NVFP4"] = "NVFP4",
) -> None:  # fmt: skip
    """Write parameters into `directory`, which is made if need be.

    params: a tree of Linen's parameters or an nnx.State. Kernels are the leaves called kernel, w_in and w_out; frozen
        ones (`quantize(w, axis=0)`) are written as they are. Sharded arrays are gathered, a kernel at a time.
    recipe: what the model was trained with, also Rules: the path of a layer is matched as in `linen.quantized` and
        `nnx.quantize_model`, and a layer that no rule matches is not quantized. The router of an MoE never is.
    dtype: the compute dtype of the model, to which its layers round kernels before they quantize them. Another one
        gives other bits, so there is no default.
    names: what a tensor is called, a function of our name: "blocks.3.mlp.up.weight" for blocks/3/mlp/up/kernel,
        "moe.experts.7.w_in.weight", "embed.weight", and "norm.weight" for its scale. Where it gives several, the
        outputs of the kernel are divided among them equally: gate and up of w_in; query, key and value.
    layouts: what the dimensions of a kernel mean, by regular expression on its path: "kn" (k contracted, n outputs),
        "gkn" (a matrix for each expert, or each layer of a scan), "knn", "kkn" (DenseGeneral); None keeps the array as
        it is. Known without it: "kn" of two dimensions, "gkn" of w_in and w_out.
    input_amax: by path of a quantized kernel, the largest |x| that its layer meets, [] or one for each expert. Servers
        that quantize activations by a static scale need it. quant_algo: "W4A16_NVFP4" has them leave x alone.

    Raises TypeError for what is no recipe, UnsupportedError for weights in another form than NVFP4 with an amax for
    each matrix, ValueError for k that is no multiple of 16, NaN or Inf in a quantized kernel, a rule, layout or
    input_amax that matches nothing, a kernel of unknown layout and two tensors of one name, ModuleNotFoundError without
    the package safetensors. Nothing is written then.
    """
    op = "export.save"
    safetensors = _library(op)
    check_choice(op, "quant_algo", quant_algo, ("NVFP4", "W4A16_NVFP4"), "servers choose their kernels by it")
    found, _ = parameters(op, params, names, layouts)
    scalings = _scalings(op, found, recipe)
    refuse_unmatched(op, "input_amax", input_amax or {}, [*scalings])
    tensors: dict[str, np.ndarray] = {}
    facts, excluded = {}, []
    for p in found:
        if p.path in scalings:
            q = _quantized(op, p, scalings[p.path], dtype)
            made = _packed(p, q) | _input_scales(op, p, (input_amax or {}).get(p.path))
            facts |= _facts(p, q)
        else:
            made = dict(zip(p.flat_names, p.dense(op), strict=True))
            excluded += [name.removesuffix(".weight") for name in made if p.layout]
        if twice := sorted({*made} & {*tensors}):
            why, fix = "a file has each name once", "`names` that gives each parameter a name of its own"
            raise ValueError(message(op, "names", f"{twice[0]!r} for two parameters", "two names", why, fix))
        tensors |= made
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    # "format" is what transformers asks of every file. In C order, or the library takes the bytes as if they were.
    ordered = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    header = {"format": "pt", _HEADER: json.dumps(facts)}
    safetensors.numpy.save_file(ordered, folder / _WEIGHTS, header)
    (folder / _CONFIG).write_text(json.dumps(_config(quant_algo, excluded), indent=2) + "\n")


def load(directory: str | Path, like: Any, *, names: Names | None = None, layouts: Layouts | None = None) -> Any:
    """Read what `save`, or ModelOpt, wrote: the tree `like` with a frozen QuantizedTensor for each quantized kernel.

    like: parameters, or `jax.ShapeDtypeStruct` in their place: what there is and of which shapes. dtypes are those of
    the file. names, layouts: as they were for `save`. All files *.safetensors of the folder are read.

    A quantized kernel is [*g, k, n], blocked along k, as `dense` and `grouped_dense` take it, with the bits that `save`
    wrote, its amax included: a forward under the same recipe is that of the trained model. A file of other origin has
    no amax. Then it is fl(2688 * weight_scale_2) with B = 448, which decodes to the same weights up to float32
    rounding, whatever B was, and its compute dtype is that of `like`. input_scale is not read.

    Raises FileNotFoundError for a folder without such files; ValueError for a tensor that is missing, of another dtype
    or shape than `like` and the layout need, or without a place in `like`, and for parts of one kernel whose scales
    differ; ModuleNotFoundError without the package safetensors.
    """
    op = "export.load"
    tensors, facts = _read(op, Path(directory))
    found, unflatten = parameters(op, like, names, layouts)
    used: set[str] = set()

    def take(name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
        used.add(name)
        return _tensor(op, tensors, name, dtype, shape)

    leaves = []
    for p in found:
        if p.layout and f"{p.flat_names[0]}_scale" in tensors:
            leaves.append(_frozen(op, p, take, facts))
        else:
            leaves.append(jnp.asarray(p.from_dense([take(name, None, p.part_shape) for name in p.flat_names])))
    if rest := sorted(name for name in {*tensors} - used if not name.endswith(".input_scale")):
        shown = f"without a place for {rest[0]!r}, and {len(rest) - 1} more"
        why, fix = "what is left out would be missing in the model", "the whole model, or `names` that says what it is"
        raise ValueError(message(op, "like", shown, "one for each tensor of the file", why, fix))
    return unflatten(leaves)


# --- what is quantized, and how ---


def _scalings(op: str, found: list[Parameter], recipe: RecipeChoice | Rules) -> dict[str, Scaling | None]:
    """By path of each kernel that is quantized; None where it is frozen already."""
    if not isinstance(recipe, Rules):
        check_recipe(op, recipe)
    if recipe is None:
        why, fix = "it says what is quantized", "the recipe of the model, or HIGH_PRECISION"
        raise TypeError(message(op, "recipe", "None", "a recipe, HIGH_PRECISION or Rules", why, fix))
    kernels = [p for p in found if p.layout]
    if isinstance(recipe, Rules) and (unmatched := recipe.unmatched([p.layer for p in kernels])):
        near = difflib.get_close_matches(unmatched[0], [p.layer for p in kernels], 3, 0.0)
        shown, why = f"with {unmatched[0]!r}, which matches nothing", f"the nearest paths are {near}"
        raise ValueError(message(op, "recipe", shown, "the whole path of a layer", why, "the rules without it"))
    routers = {f"{p.layer}/router".lstrip("/") for p in kernels if p.path.endswith("w_in")}
    scalings: dict[str, Scaling | None] = {}
    for p in kernels:
        rule = recipe.match(p.layer) if isinstance(recipe, Rules) else ("", recipe)
        chosen = rule[1] if rule is not None and p.layer not in routers else None
        scaling = scaling_of(chosen, "forward", "kernel") if isinstance(chosen, Recipe) else None
        if isinstance(p.value, QuantizedTensor):
            scalings[p.path] = _check_frozen(op, p)
        elif scaling is not None:
            scalings[p.path] = _check_scaling(op, p, scaling)
    return scalings


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

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8,
    "U16": np.uint16, "U32": np.uint32, "U64": np.uint64, "BOOL": np.bool_,
}  # fmt: skip


def _read(op: str, folder: Path) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Any]]]:
    """All tensors, and what `save` noted of them."""
    safetensors = _library(op)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        why, fix = "weights are read from them", "the folder that export.save wrote"
        raise FileNotFoundError(message(op, "directory", repr(str(folder)), "files *.safetensors", why, fix))
    tensors, facts = {}, {}
    for file in files:
        with safetensors.safe_open(file, "numpy") as opened:
            facts |= json.loads((opened.metadata() or {}).get(_HEADER, "{}"))
        # Not opened.get_tensor, which looks for the 8-bit floats in NumPy.
        for name, view in safetensors.deserialize(file.read_bytes()):
            if view["dtype"] not in _DTYPES or name in tensors:
                shown = "in two files" if name in tensors else f"of {view['dtype']}"
                needs, why = f"one array, of one of {(*_DTYPES,)}", "all files of the folder make one model"
                raise ValueError(message(op, name, shown, needs, why, "a folder with this checkpoint alone"))
            tensors[name] = np.frombuffer(view["data"], _DTYPES[view["dtype"]]).reshape(view["shape"])
    return tensors, facts


def _tensor(op: str, tensors: dict[str, np.ndarray], name: str, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    if name not in tensors:
        near = difflib.get_close_matches(name, tensors, 3, 0.0)
        needs, why, fix = "in the file", f"`like` has it; the nearest there are {near}", "`names` that says what it is"
        raise ValueError(message(op, name, "missing", needs, why, fix))
    array = tensors[name]
    if name.endswith("_scale_2") and array.size == 1:  # [] of most writers, [1] of some
        array = array.reshape(())
    if array.shape != shape or (dtype is not None and array.dtype != dtype):
        shown, needs = f"{array.dtype} {array.shape}", f"{np.dtype(dtype) if dtype else ''} {shape}".strip()
        why, fix = "`like` and NVFP4's layout say so", "the parameters and the layouts of the model that was saved"
        raise ValueError(message(op, name, shown, needs, why, fix))
    return array


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
    whole = QuantizedTensor(
        p.joined(codes), p.joined(scale), amax, axis=0, extent=k, dtype=dtype, bound=bound, block=block
    )
    return jax.tree.map(jnp.asarray, whole)


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


def _library(op: str) -> Any:
    try:
        import safetensors.numpy
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "safetensors":
            raise
        why, fix = "the weights are written and read by it", "pip install 'jax_fp4[export]'"
        raise ModuleNotFoundError(message(op, "safetensors", "not installed", "the package", why, fix)) from None
    return safetensors
