"""Recipes: frozen, hashable statements of how a layer quantizes. Static under jit."""

import enum
import os
from dataclasses import dataclass, fields
from typing import Any, Final, Literal

from jax_fp4._errors import message
from jax_fp4._formats import BLOCK, FLOAT8_BLOCKS, FLOAT8_FORMATS, FOUR_OVER_SIX_BOUNDS

LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
BACKWARD_MODE_VARIABLE = "JAX_FP4_BACKWARD_MODE"


class BackwardMode(enum.StrEnum):
    """How precise the backward is.

    DEFAULT quantizes the gradient and multiplies quantized operands; UNQUANT is the gradient of the unquantized
    function; DEQUANT the straight-through gradient of what the forward computed. "high_precision" and
    "dequantized" are accepted for the last two.
    """

    DEFAULT = "default"
    UNQUANT = "unquant"
    DEQUANT = "dequant"

    @classmethod
    def _missing_(cls, value):
        aliases = {"high_precision": cls.UNQUANT, "dequantized": cls.DEQUANT}
        return aliases.get(value) if isinstance(value, str) else None


MODE_NAMES = tuple(mode.value for mode in BackwardMode)


def _backward_mode(op: str, value) -> BackwardMode:
    """The mode a recipe was given, or the environment's, read now and not at import."""
    argument = "backward_mode"
    if value is None:
        argument = f"environment variable {BACKWARD_MODE_VARIABLE}"
        value = os.environ.get(BACKWARD_MODE_VARIABLE) or BackwardMode.DEFAULT
    try:
        return BackwardMode(value)
    except ValueError:
        raise ValueError(
            message(op, argument, repr(value), f"one of {MODE_NAMES}", "a backward has no other meaning", "'default'")
        ) from None


def check_choice(op: str, argument: str, value: object, choices: tuple, because: str) -> None:
    if not any(_same(value, choice) for choice in choices):
        raise ValueError(message(op, argument, repr(value), f"one of {choices}", because, repr(choices[0])))


def _same(value: object, choice: object) -> bool:
    """Equal and of one type: True is not 1, and an array is compared with nothing."""
    if type(value) is not type(choice):
        return False
    if isinstance(value, tuple) and isinstance(choice, tuple):
        return len(value) == len(choice) and all(map(_same, value, choice))
    return value == choice


@dataclass(frozen=True)
class FourOverSix:
    """Op-level choice for `four_over_six=`: each block (or tile) maps its maximum to 4 or to 6, whichever errs less.

    `bound` is the E4M3 bound B of the tensor scale (256 leaves room for the larger scale), `error` the measure.
    """

    bound: Literal[256, 448] = 256
    error: Literal["MAE", "MSE"] = "MAE"

    def __post_init__(self):
        check_choice("FourOverSix", "bound", self.bound, FOUR_OVER_SIX_BOUNDS, "the scales are E4M3")
        check_choice("FourOverSix", "error", self.error, ("MAE", "MSE"), "these are the errors the kernels compare")


@dataclass(frozen=True)
class Scaling:
    """How a recipe quantizes one operand. `flags` are those of `quantize`."""

    format: str
    block: tuple[int, int] | None = None
    row_scaled: bool = False
    four_over_six: FourOverSix | None = None
    power_of_two: bool | None = None
    eps: float = 0.0
    hadamard: bool = False  # of the form blocked along rows
    stochastic: bool = False

    @property
    def flags(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("hadamard", "stochastic")}

    @property
    def length(self) -> int:
        """Elements along the blocked axis that share a scale; 1 where the whole tensor does."""
        return FLOAT8_BLOCKS.get(FLOAT8_FORMATS[self.format][0], 1) if self.format in FLOAT8_FORMATS else BLOCK

    @property
    def tile(self) -> int:
        """Rows that share a scale."""
        return self.block[0] if self.block is not None else 1


Operand = Literal["x", "kernel", "dy"]
Product = Literal["forward", "dgrad", "wgrad"]
Fp8Format = Literal["E4M3", "HYBRID"]


class _OneRecipe:
    """What the recipes have in common that say the same for all three products."""

    backward_mode: BackwardMode | str | None

    @property
    def mode(self) -> BackwardMode:
        assert isinstance(self.backward_mode, BackwardMode)
        return self.backward_mode

    def _set_mode(self) -> str:
        op = type(self).__name__
        object.__setattr__(self, "backward_mode", _backward_mode(op, self.backward_mode))
        return op

    def scaling(self, operand: Operand) -> Scaling:
        raise NotImplementedError


@dataclass(frozen=True)
class NVFP4BlockScaling(_OneRecipe):
    """NVFP4: E2M1 codes, an E4M3 scale for 16 elements, a float32 scale for the tensor (or its rows).

    backward_mode: a BackwardMode or its name; None takes JAX_FP4_BACKWARD_MODE, else "default".
    row_scaled_activation: x has an amax per row instead of one per tensor.
    random_hadamard_transform: transform both operands of the default weight gradient. None means on unless row
        scaling or activation four-over-six, which exclude it, is chosen.
    stochastic_rounding: dy is rounded stochastically in the default backward, which then needs a key.
    two_dimensional_weights: weights are scaled in 16 x 16 tiles, so that both planes hold the same values.
    four_over_six: which operands choose their block maximum ("none", "weights", "activations", "all").

    Raises ValueError for an unknown value or an excluded pair. Source: arXiv 2509.25149 (NVFP4 training),
    arXiv 2512.02010 (four-over-six); the bits are those of docs/numerics.md.
    """

    backward_mode: BackwardMode | str | None = None
    row_scaled_activation: bool = False
    random_hadamard_transform: bool | None = None
    stochastic_rounding: bool = True
    two_dimensional_weights: bool = True
    four_over_six: Literal["none", "weights", "activations", "all"] = "none"
    four_over_six_bound: Literal[256, 448] = 256
    four_over_six_error: Literal["MAE", "MSE"] = "MAE"

    def __post_init__(self):
        op = self._set_mode()
        for name in ("row_scaled_activation", "stochastic_rounding", "two_dimensional_weights"):
            check_choice(op, name, getattr(self, name), (True, False), "it is a switch")
        check_choice(
            op, "random_hadamard_transform", self.random_hadamard_transform, (None, True, False), "it is a switch"
        )
        which = ("none", "weights", "activations", "all")
        check_choice(op, "four_over_six", self.four_over_six, which, "these are the operands of the forward")
        FourOverSix(self.four_over_six_bound, self.four_over_six_error)
        if self.random_hadamard_transform and (excluded := self._excludes_hadamard()):
            raise ValueError(
                message(
                    op,
                    "random_hadamard_transform",
                    f"True with {excluded}",
                    "at most one of the two",
                    "the transform mixes the rows that the other one scales or chooses by",
                    "random_hadamard_transform=None",
                )
            )

    def _excludes_hadamard(self) -> str:
        if self.row_scaled_activation:
            return "row_scaled_activation=True"
        return f"four_over_six={self.four_over_six!r}" if self.four_over_six in ("activations", "all") else ""

    @property
    def hadamard(self) -> bool:
        """Whether the weight gradient's operands are transformed: `random_hadamard_transform` with None resolved."""
        if self.random_hadamard_transform is None:
            return not self._excludes_hadamard()
        return self.random_hadamard_transform

    def four_over_six_of(self, operand: Literal["weights", "activations"]) -> FourOverSix | None:
        if self.four_over_six in (operand, "all"):
            return FourOverSix(self.four_over_six_bound, self.four_over_six_error)
        return None

    def scaling(self, operand: Operand) -> Scaling:
        match operand:
            case "x":
                chosen = self.four_over_six_of("activations")
                return Scaling("nvfp4", None, self.row_scaled_activation, chosen, hadamard=self.hadamard)
            case "kernel":
                tiles = (BLOCK, BLOCK) if self.two_dimensional_weights else None
                return Scaling("nvfp4", tiles, four_over_six=self.four_over_six_of("weights"))
            case "dy":
                return Scaling("nvfp4", hadamard=self.hadamard, stochastic=self.stochastic_rounding)


def _check_fp8(op: str, fp8_format: str) -> None:
    because = "the forward needs E4M3's three bits of mantissa: E5M2 is for gradients alone"
    check_choice(op, "fp8_format", fp8_format, ("E4M3", "HYBRID"), because)


def check_eps(op: str, eps: float) -> None:
    if isinstance(eps, bool) or not isinstance(eps, float | int) or not 0 <= eps <= LARGEST_FLOAT32:
        needs = "a number >= 0, finite in float32"
        raise ValueError(message(op, "eps", repr(eps), needs, "it is the least amax", "eps=0.0"))


def _format(scaling: str, operand: Operand, fp8_format: Fp8Format) -> str:
    return f"{scaling}_e5m2" if operand == "dy" and fp8_format == "HYBRID" else scaling


@dataclass(frozen=True)
class MXFP8BlockScaling(_OneRecipe):
    """MXFP8: 8-bit codes, a power of two (E8M0) for each 32 elements.

    backward_mode: as in NVFP4BlockScaling.
    fp8_format: "E4M3" codes everywhere, or "HYBRID", E5M2 for dy.
    two_dimensional_weights: weights are scaled in 32 x 32 tiles, so that both planes hold the same values.

    Raises ValueError for an unknown value. Source: the OCP Microscaling specification 1.0, with scales rounded up as
    arXiv 2506.08027 does; the bits are those of docs/numerics.md.
    """

    backward_mode: BackwardMode | str | None = None
    fp8_format: Fp8Format = "E4M3"
    two_dimensional_weights: bool = False

    def __post_init__(self):
        op = self._set_mode()
        _check_fp8(op, self.fp8_format)
        check_choice(op, "two_dimensional_weights", self.two_dimensional_weights, (False, True), "it is a switch")

    def scaling(self, operand: Operand) -> Scaling:
        length = FLOAT8_BLOCKS["mxfp8"]
        tiles = (length, length) if operand == "kernel" and self.two_dimensional_weights else None
        return Scaling(_format("mxfp8", operand, self.fp8_format), tiles)


@dataclass(frozen=True)
class Float8CurrentScaling(_OneRecipe):
    """FP8 with one float32 scale a tensor (or expert), made of its own amax.

    backward_mode: as in NVFP4BlockScaling.
    fp8_format: "HYBRID", E4M3 for x and w and E5M2 for dy, or "E4M3" everywhere.
    power_of_two: round scales down to powers of two. eps: the least amax that counts.

    Raises ValueError for an unknown value. Source: arXiv 2209.05433 (FP8 formats); bits: docs/numerics.md.
    """

    backward_mode: BackwardMode | str | None = None
    fp8_format: Fp8Format = "HYBRID"
    power_of_two: bool = False
    eps: float = 0.0

    def __post_init__(self):
        op = self._set_mode()
        _check_fp8(op, self.fp8_format)
        check_choice(op, "power_of_two", self.power_of_two, (False, True), "it is a switch")
        check_eps(op, self.eps)

    def scaling(self, operand: Operand) -> Scaling:
        return Scaling(_format("float8", operand, self.fp8_format), power_of_two=self.power_of_two, eps=self.eps)


@dataclass(frozen=True)
class Float8BlockScaling(_OneRecipe):
    """FP8 with a float32 scale for each 128 elements of x and dy, and for each 128 x 128 tile of weights.

    backward_mode: as in NVFP4BlockScaling.
    fp8_format: "E4M3" everywhere, or "HYBRID", E5M2 for dy.
    power_of_two: round scales down to powers of two; without it products are multiplied in float32, more slowly.
    eps: the least amax that counts. two_dimensional_weights: False scales weights by rows of 128 too.

    Raises ValueError for an unknown value. Source: arXiv 2412.19437 (DeepSeek-V3); bits: docs/numerics.md.
    """

    backward_mode: BackwardMode | str | None = None
    fp8_format: Fp8Format = "E4M3"
    power_of_two: bool = True
    eps: float = 0.0
    two_dimensional_weights: bool = True

    def __post_init__(self):
        op = self._set_mode()
        _check_fp8(op, self.fp8_format)
        for name in ("power_of_two", "two_dimensional_weights"):
            check_choice(op, name, getattr(self, name), (True, False), "it is a switch")
        check_eps(op, self.eps)

    def scaling(self, operand: Operand) -> Scaling:
        length = FLOAT8_BLOCKS["float8_block"]
        tiles = (length, length) if operand == "kernel" and self.two_dimensional_weights else None
        format = _format("float8_block", operand, self.fp8_format)
        return Scaling(format, tiles, power_of_two=self.power_of_two, eps=self.eps)


@dataclass(frozen=True)
class DelayedScaling(_OneRecipe):
    """FP8 with one float32 scale a tensor, made of the amaxes of earlier steps: `state=` of the layers holds them.

    backward_mode: "default" alone. fp8_format: as in Float8CurrentScaling.
    amax_history_len: how many steps count. amax_compute_algo: "max" of the history, or the "most_recent" amax.
    margin: the scale is divided by 2 to this power, which leaves room for values that grow.

    Raises ValueError for an unknown value and for another backward mode. Source: arXiv 2209.05433, and the recipe of
    the same name in TransformerEngine; bits: docs/numerics.md.
    """

    backward_mode: BackwardMode | str | None = None
    fp8_format: Fp8Format = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    margin: int = 0

    def __post_init__(self):
        op = type(self).__name__
        argument = "backward_mode"
        if self.backward_mode is None:
            argument = f"environment variable {BACKWARD_MODE_VARIABLE}"
        self._set_mode()
        if self.mode is not BackwardMode.DEFAULT:
            why = "its scale of dy comes from the dy of earlier steps, which only that mode quantizes"
            fix = "backward_mode='default', or Float8CurrentScaling, which has all modes"
            raise ValueError(message(op, argument, repr(self.mode.value), "'default'", why, fix))
        _check_fp8(op, self.fp8_format)
        check_choice(op, "amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"), "these are known")
        for name, least, most, why, fix in (
            ("amax_history_len", 2, 2**20, "one position is for the newest amax", "amax_compute_algo='most_recent'"),
            ("margin", 0, 100, "the scale is divided by 2 to its power", "margin=0"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ValueError(message(op, name, repr(value), f"a whole number, {least} to {most}", why, fix))

    def scaling(self, operand: Operand) -> Scaling:
        return Scaling(_format("float8", operand, self.fp8_format))


@dataclass(frozen=True)
class CustomRecipe:
    """A recipe, or HIGH_PRECISION, for each of the three products: y = x w, dx = dy w^T (dgrad), dw = x^T dy (wgrad).

    Of each recipe count the settings of the operands of its product. The backward mode of `dgrad` and of `wgrad` says
    what that product multiplies, as for a recipe alone: "default" its two operands quantized as it says, "unquant"
    high precision (as HIGH_PRECISION does), "dequant" dy and what the forward multiplied. None is the forward's recipe.

    Row-scaled activations, and a backward in MXFP8 and in high precision:

        CustomRecipe(forward=NVFP4BlockScaling(row_scaled_activation=True), dgrad=MXFP8BlockScaling(),
                     wgrad=HIGH_PRECISION)

    Raises TypeError for what is no recipe and for DelayedScaling, whose state belongs to a whole layer; ValueError for
    three times HIGH_PRECISION, for "dequant" beside a forward in high precision, and for a backward mode of `forward`
    that neither gradient product has.
    """

    forward: Any
    dgrad: Any = None
    wgrad: Any = None

    def __post_init__(self):
        op = "CustomRecipe"
        for name in ("forward", "dgrad", "wgrad"):
            if getattr(self, name) is None and name != "forward":
                object.__setattr__(self, name, self.forward)
            _check_part(op, name, getattr(self, name))
        modes = {name: mode_of(self, name) for name in ("dgrad", "wgrad")}
        if self.forward is HIGH_PRECISION:
            if self.dgrad is HIGH_PRECISION and self.wgrad is HIGH_PRECISION:
                why, fix = "nothing is left to quantize", "recipe=HIGH_PRECISION of the layer"
                raise ValueError(message(op, "forward, dgrad and wgrad", "HIGH_PRECISION", "a recipe", why, fix))
            for name, mode in modes.items():
                if mode is BackwardMode.DEQUANT:
                    shown, why = "'dequant' beside forward=HIGH_PRECISION", "the forward has no quantized operand"
                    raise ValueError(message(op, f"{name}.backward_mode", shown, "'default'", why, "HIGH_PRECISION"))
        elif self.forward.mode not in (BackwardMode.DEFAULT, *modes.values()):
            shown = f"{self.forward.mode.value!r} (given, or from {BACKWARD_MODE_VARIABLE})"
            why, fix = "the modes of dgrad and wgrad decide, and they differ", "backward_mode='default' of forward"
            raise ValueError(message(op, "forward.backward_mode", shown, "'default'", why, fix))


def _check_part(op: str, name: str, part: object) -> None:
    if part is HIGH_PRECISION:
        return
    if part is None or isinstance(part, CustomRecipe):
        shown, why = "None" if part is None else "a CustomRecipe", "each product has one recipe"
        raise TypeError(message(op, name, shown, "a recipe or HIGH_PRECISION", why, "NVFP4BlockScaling()"))
    check_recipe(op, part, name)
    if isinstance(part, DelayedScaling):
        why, fix = "its state belongs to a whole layer", "Float8CurrentScaling(), or recipe=DelayedScaling() of a layer"
        raise TypeError(message(op, name, "DelayedScaling", "a recipe without a state", why, fix))


class _HighPrecision:
    """The type of HIGH_PRECISION: leave this layer alone, also under autocast."""

    def __repr__(self) -> str:
        return "HIGH_PRECISION"

    def __reduce__(self) -> str:  # pickles and copies to the one instance
        return "HIGH_PRECISION"


HIGH_PRECISION: Final = _HighPrecision()

# Those that a file of rules can name.
RECIPES = {
    cls.__name__: cls
    for cls in (
        NVFP4BlockScaling,
        MXFP8BlockScaling,
        Float8CurrentScaling,
        Float8BlockScaling,
        DelayedScaling,
        CustomRecipe,
    )
}
Recipe = (
    NVFP4BlockScaling | MXFP8BlockScaling | Float8CurrentScaling | Float8BlockScaling | DelayedScaling | CustomRecipe
)
RecipeChoice = Recipe | _HighPrecision


# --- what a recipe says of each product ---


def part_of(recipe: Recipe | None, product: Product) -> Any:
    """The recipe of one product, None for high precision."""
    part = getattr(recipe, product) if isinstance(recipe, CustomRecipe) else recipe
    return None if part is HIGH_PRECISION else part


def mode_of(recipe: Recipe | None, product: Literal["dgrad", "wgrad"]) -> BackwardMode:
    """The backward mode of one gradient product; in high precision it is that of `unquant`."""
    part = part_of(recipe, product)
    return BackwardMode.UNQUANT if part is None else part.mode


def scaling_of(recipe: Recipe | None, product: Product, operand: Operand) -> Scaling | None:
    """How `operand` is quantized for `product`; None where it is not quantized for it."""
    part = part_of(recipe, product)
    if part is None or (product != "forward" and part.mode is not BackwardMode.DEFAULT):
        return None
    return part.scaling(operand)


def draws(recipe: Recipe | None) -> bool:
    """Whether the backward rounds stochastically, so that a call needs a key. Otherwise no stream is touched."""
    scalings = (scaling_of(recipe, "dgrad", "dy"), scaling_of(recipe, "wgrad", "dy"))
    return any(scaling is not None and scaling.stochastic for scaling in scalings)


def check_recipe(op: str, recipe: object, argument: str = "recipe") -> None:
    """TypeError unless `recipe` is a recipe, HIGH_PRECISION or None."""
    if recipe is None or isinstance(recipe, RecipeChoice):
        return
    shown, fix = _shown(recipe)
    raise TypeError(message(op, argument, shown, "a recipe object or HIGH_PRECISION", "recipes carry settings", fix))


def _shown(recipe: object) -> tuple[str, str]:
    """What is no recipe, as an error shows it, and what to try instead."""
    if isinstance(recipe, type):
        return f"the class {recipe.__name__}", f"{recipe.__name__}()"
    if type(recipe).__name__ == "Rules":
        return "Rules", "jax_fp4.autocast(rules) around the call: a layer of its own needs one recipe"
    return repr(recipe), "jax_fp4.NVFP4BlockScaling()"
