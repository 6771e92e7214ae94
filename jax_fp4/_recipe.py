"""Recipes: frozen, hashable statements of how a layer quantizes. Static under jit."""

import ast
import contextlib
import enum
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NoReturn

import jax

from jax_fp4 import _record
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
    if isinstance(recipe, Rules):
        return "Rules", "jax_fp4.autocast(rules) around the call: a layer of its own needs one recipe"
    return repr(recipe), "jax_fp4.NVFP4BlockScaling()"


# --- rules: a recipe by module path ---


@dataclass(frozen=True)
class Rules:
    """Recipes by module path: pairs (regular expression, recipe or HIGH_PRECISION).

    The first expression that matches the whole path ("decoder/block3/mlp", `re.fullmatch`) decides; HIGH_PRECISION
    leaves the layer alone. Where none matches, the autocast context around this one does, else high precision. A
    recipe that a layer was given itself comes before every rule.

    Raises TypeError for what is not a pair of a string and a recipe, ValueError for no rules at all, for an expression
    that `re` refuses, and for one given twice, of which the second would never decide.
    """

    rules: tuple[tuple[str, RecipeChoice], ...]

    def __post_init__(self):
        if isinstance(self.rules, str) or not hasattr(self.rules, "__iter__"):
            _refuse_rules("rules", repr(self.rules))
        rules = tuple(self.rules)
        if not rules:
            why, fix = "no rules would quantize nothing, silently", "jax_fp4.autocast(None)"
            raise ValueError(message("Rules", "rules", "empty", "at least one pair", why, fix))
        for i, rule in enumerate(rules):
            _check_rule(f"rule {i + 1}", rule)
        patterns = [pattern for pattern, _ in rules]
        for i, pattern in enumerate(patterns):
            if pattern in patterns[:i]:
                why, fix = "the first match wins", "one of them"
                given = f"{pattern!r}, as is rule {patterns.index(pattern) + 1}"
                raise ValueError(message("Rules", f"rule {i + 1}", given, "an expression of its own", why, fix))
        object.__setattr__(self, "rules", tuple(map(tuple, rules)))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "Rules":
        """Read rules, one a line: `expression = recipe`, the first " = " divides. Empty lines and those that begin
        with # are skipped; a recipe is written as in Python, with literal settings:

            head = HIGH_PRECISION
            .*/mlp/.* = NVFP4BlockScaling(backward_mode="dequant")

        Raises ValueError, with the number of the line, for what is none of these, and OSError as `open` does.
        """
        op, rules, lines = "Rules.from_file", [], {}
        for i, raw in enumerate(Path(path).read_bytes().splitlines(), 1):
            place = f"{path}, line {i}"
            if (line := _line(place, raw)) and not line.startswith("#"):
                pattern, recipe = _parse_rule(place, line)
                if lines.setdefault(pattern, i) != i:
                    given, why = f"{pattern!r}, as in line {lines[pattern]}", "the first match wins"
                    raise ValueError(message(op, place, given, "an expression of its own", why, "one of them"))
                rules.append((pattern, recipe))
        if not rules:
            why, fix = "no rules would quantize nothing, silently", "the line .* = NVFP4BlockScaling()"
            raise ValueError(message(op, str(path), "without a rule", "at least one line", why, fix))
        return cls(tuple(rules))

    def match(self, path: str) -> tuple[str, RecipeChoice] | None:
        """The rule that decides for the module at this path."""
        return next((rule for rule in self.rules if re.fullmatch(rule[0], path)), None)

    def unmatched(self, paths: list[str]) -> list[str]:
        """The expressions that match none of the paths."""
        return [pattern for pattern, _ in self.rules if not any(re.fullmatch(pattern, path) for path in paths)]


def _refuse_rules(argument: str, shown: str) -> NoReturn:
    fix = 'jax_fp4.Rules([(".*/mlp/.*", jax_fp4.NVFP4BlockScaling())])'
    needs = "pairs (regular expression, recipe or HIGH_PRECISION)"
    raise TypeError(message("Rules", argument, shown, needs, "a rule gives the layers at some paths a recipe", fix))


def _check_rule(argument: str, rule: object) -> None:
    if not isinstance(rule, tuple | list) or len(rule) != 2 or not isinstance(rule[0], str):
        _refuse_rules(argument, repr(rule))
    pattern, recipe = rule
    if recipe is None:
        why, fix = "None says nothing: a layer without a rule takes autocast's", "HIGH_PRECISION to leave it alone"
        raise TypeError(message("Rules", f"the recipe of {argument}", "None", "a recipe or HIGH_PRECISION", why, fix))
    check_recipe("Rules", recipe, f"the recipe of {argument}")
    _check_pattern("Rules", argument, pattern)


def _check_pattern(op: str, argument: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        why, fix = f"of {error}", f"{re.escape(pattern)!r} for these characters themselves"
        raise ValueError(message(op, argument, repr(pattern), "a regular expression", why, fix)) from None


def _line(place: str, raw: bytes) -> str:
    try:
        return raw.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise ValueError(message("Rules.from_file", place, repr(raw), "UTF-8", "it is text", "a text file")) from None


def _parse_rule(place: str, line: str) -> tuple[str, RecipeChoice]:
    op, example = "Rules.from_file", ".*/mlp/.* = NVFP4BlockScaling()"
    # A lookahead (?=...) has an equals sign too, but not between spaces.
    pattern, *rest = re.split(r"\s+=\s+", line, maxsplit=1)
    if not rest:
        why = "an expression chooses layers and a recipe is for them"
        raise ValueError(message(op, place, repr(line), "expression = recipe", why, example))
    _check_pattern(op, place, pattern)
    return pattern, _parse_recipe(place, rest[0])


_RECIPES = {"NVFP4BlockScaling": NVFP4BlockScaling}  # those that a file can name


def _parse_recipe(place: str, text: str) -> RecipeChoice:
    """HIGH_PRECISION, or a recipe's name called with literals. Nothing is evaluated."""
    if text == "HIGH_PRECISION":
        return HIGH_PRECISION
    try:
        call = ast.parse(text, mode="eval").body
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in _RECIPES:
            given = [ast.literal_eval(argument) for argument in call.args]
            settings = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in call.keywords}
            return _RECIPES[call.func.id](*given, **settings)
    except (SyntaxError, TypeError, ValueError) as error:
        why, fix = f"it says: {error}", "settings that the recipe has, as literals"
        raise ValueError(message("Rules.from_file", place, repr(text), "a recipe", why, fix)) from None
    needs = f"one of {(*_RECIPES, 'HIGH_PRECISION')}, a recipe with its settings in parentheses"
    fix = f"{text}()" if text in _RECIPES else "NVFP4BlockScaling()"
    raise ValueError(message("Rules.from_file", place, repr(text), needs, "a layer needs one recipe", fix))


# --- the contexts, and the choice ---

# Innermost first: Rules, and at the end what there is where none of them matches.
_autocast = jax.make_user_context(default_value=())


def autocast(recipe: RecipeChoice | Rules | None):
    """Context: layers and functions without a recipe of their own use `recipe`. None switches it off again.

    Rules decide by the path of a module, and where none matches the context around them does. Linen layers know their
    path. A function called outside of a Linen layer, and an NNX layer, do not: they raise ValueError under Rules
    (`jax_fp4.nnx.quantize_model` applies rules to an NNX model).

    The context is part of jit's cache key, so one jitted function under two recipes is traced twice.
    """
    if not isinstance(recipe, Rules):
        check_recipe("autocast", recipe)
    return _entered(recipe)


@contextlib.contextmanager
def _entered(recipe: RecipeChoice | Rules | None) -> Iterator[None]:
    """What surrounds the rules is known on entry only: a context can be made before another is entered."""
    if isinstance(recipe, Rules):
        _record.record(_record.RulesEvent(recipe))
        choices = (recipe, *_autocast.value)
    else:
        choices = () if recipe is None else (recipe,)
    with _autocast(choices):
        yield


def rules_in_force() -> list[Rules]:
    return [choice for choice in _autocast.value if isinstance(choice, Rules)]


def resolve(op: str, recipe: RecipeChoice | None) -> Recipe | None:
    """The recipe in force: the layer's own, else that of a rule, else autocast's; None means high precision.

    Raises ValueError where rules are to decide and nobody said for which module.
    """
    check_recipe(op, recipe)
    chosen, _ = _choose(op, recipe)
    return None if isinstance(chosen, _HighPrecision) else chosen


def chosen_by(op: str, recipe: RecipeChoice | None) -> str:
    """What made `resolve` choose, for the report."""
    return _choose(op, recipe)[1]


def _choose(op: str, recipe: RecipeChoice | None) -> tuple[RecipeChoice | None, str]:
    """What is in force, and the words for what decided it."""
    layer = _record.current()
    if recipe is not None:
        earlier = layer.rule if layer is not None else None
        if earlier is not None and earlier[1] == recipe:
            return recipe, _decided_by(earlier[0], recipe)
        return recipe, f"recipe={_name(recipe)}"
    for choice in _autocast.value:
        if not isinstance(choice, Rules):
            return choice, f"autocast({_name(choice)})"
        if layer is None or layer.matched:
            _refuse_without_path(op)
        if rule := choice.match(layer.path):
            return rule[1], _decided_by(*rule)
    if rules_in_force() or (layer is not None and layer.matched):
        return None, "no rule matches and no autocast context is around the rules"
    return None, "no recipe given and no autocast context"


def _name(recipe: RecipeChoice) -> str:
    return "HIGH_PRECISION" if isinstance(recipe, _HighPrecision) else type(recipe).__name__


def _decided_by(pattern: str, recipe: RecipeChoice) -> str:
    return f"rule {pattern!r} = {_name(recipe)}"


def _refuse_without_path(op: str) -> NoReturn:
    raise ValueError(
        message(
            op,
            "recipe",
            "None under autocast(Rules)",
            "a recipe, or a module path",
            "rules match paths, which functions and NNX layers do not know",
            "jax_fp4.nnx.quantize_model(model, rules) for an NNX model, a layer of jax_fp4.linen, or recipe=",
        )
    )
