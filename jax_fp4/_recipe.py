"""Recipes: frozen, hashable statements of how a layer quantizes. Static under jit."""

import enum
import os
from dataclasses import dataclass
from typing import Final, Literal

import jax

from jax_fp4._errors import message
from jax_fp4._formats import FOUR_OVER_SIX_BOUNDS

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
class NVFP4BlockScaling:
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
        op = type(self).__name__
        object.__setattr__(self, "backward_mode", _backward_mode(op, self.backward_mode))
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
    def mode(self) -> BackwardMode:
        assert isinstance(self.backward_mode, BackwardMode)
        return self.backward_mode

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


class _HighPrecision:
    """The type of HIGH_PRECISION: leave this layer alone, also under autocast."""

    def __repr__(self) -> str:
        return "HIGH_PRECISION"

    def __reduce__(self) -> str:  # pickles and copies to the one instance
        return "HIGH_PRECISION"


HIGH_PRECISION: Final = _HighPrecision()

Recipe = NVFP4BlockScaling
RecipeChoice = Recipe | _HighPrecision


def draws(recipe: Recipe) -> bool:
    """Whether the backward rounds stochastically, so that a call needs a key. Otherwise no stream is touched."""
    return recipe.mode is BackwardMode.DEFAULT and recipe.stochastic_rounding


_autocast = jax.make_user_context(default_value=None)


def check_recipe(op: str, recipe: object, argument: str = "recipe") -> None:
    """TypeError unless `recipe` is a recipe, HIGH_PRECISION or None."""
    if recipe is None or isinstance(recipe, RecipeChoice):
        return
    shown = f"the class {recipe.__name__}" if isinstance(recipe, type) else repr(recipe)
    fix = f"{recipe.__name__}()" if isinstance(recipe, type) else "jax_fp4.NVFP4BlockScaling()"
    raise TypeError(message(op, argument, shown, "a recipe object or HIGH_PRECISION", "recipes carry settings", fix))


def autocast(recipe: RecipeChoice | None):
    """Context: layers and functions without a recipe of their own use `recipe`. None switches it off again.

    The context is part of jit's cache key, so one jitted function under two recipes is traced twice.
    """
    check_recipe("autocast", recipe)
    return _autocast(recipe)


def resolve(op: str, recipe: RecipeChoice | None) -> Recipe | None:
    """The recipe in force: the layer's own, else autocast's; None means high precision."""
    check_recipe(op, recipe)
    chosen = _autocast.value if recipe is None else recipe
    return None if chosen is None or isinstance(chosen, _HighPrecision) else chosen


def why_unquantized(recipe: RecipeChoice | None) -> str:
    """The reason `resolve` gave None, for the report."""
    if isinstance(recipe, _HighPrecision):
        return "recipe=HIGH_PRECISION"
    if isinstance(_autocast.value, _HighPrecision):
        return "autocast(HIGH_PRECISION)"
    return "no recipe given and no autocast context"
