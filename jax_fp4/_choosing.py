"""Which recipe a call gets: its own, a rule's, or that of an autocast context."""

import ast
import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax

from jax_fp4 import _record
from jax_fp4._errors import message
from jax_fp4._recipe import HIGH_PRECISION, RECIPES, Recipe, RecipeChoice, check_recipe

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


def _parse_recipe(place: str, text: str) -> RecipeChoice:
    """HIGH_PRECISION, or a recipe's name called with literals (or, in CustomRecipe, recipes). Nothing is evaluated."""
    op, names = "Rules.from_file", (*RECIPES, "HIGH_PRECISION")
    try:
        recipe = _recipe_of(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError) as error:
        why, fix = f"it says: {error}", "settings that the recipe has, as literals"
        raise ValueError(message(op, place, repr(text), "a recipe", why, fix)) from None
    if recipe is None:
        needs = f"one of {names}, a recipe with its settings in parentheses"
        fix = f"{text}()" if text in RECIPES else "NVFP4BlockScaling()"
        raise ValueError(message(op, place, repr(text), needs, "a layer needs one recipe", fix))
    return recipe


def _recipe_of(node: ast.expr) -> RecipeChoice | None:
    """The recipe that an expression spells, None where it spells none."""
    if isinstance(node, ast.Name) and node.id == "HIGH_PRECISION":
        return HIGH_PRECISION
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RECIPES):
        return None
    given = [_setting(argument) for argument in node.args]
    settings = {keyword.arg or "**": _setting(keyword.value) for keyword in node.keywords}
    return RECIPES[node.func.id](*given, **settings)


def _setting(node: ast.expr) -> Any:
    recipe = _recipe_of(node)
    return ast.literal_eval(node) if recipe is None else recipe


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
    return chosen if isinstance(chosen, Recipe) else None


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
    return "HIGH_PRECISION" if recipe is HIGH_PRECISION else type(recipe).__name__


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
