"""Recipes: what they accept, what they refuse, the environment, and the contexts."""

import copy
import itertools
import pickle

import jax
import jax.numpy as jnp
import pytest

import jax_fp4 as fp4
from jax_fp4 import _record
from jax_fp4._choosing import chosen_by, resolve
from jax_fp4._recipe import BACKWARD_MODE_VARIABLE, draws, mode_of, scaling_of

R = fp4.NVFP4BlockScaling


@pytest.mark.core
@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ("default", fp4.BackwardMode.DEFAULT),
        ("unquant", fp4.BackwardMode.UNQUANT),
        ("high_precision", fp4.BackwardMode.UNQUANT),
        ("dequant", fp4.BackwardMode.DEQUANT),
        ("dequantized", fp4.BackwardMode.DEQUANT),
        (fp4.BackwardMode.DEQUANT, fp4.BackwardMode.DEQUANT),
        (None, fp4.BackwardMode.DEFAULT),
    ],
)
def test_backward_mode_and_its_aliases(given, mode, monkeypatch):
    monkeypatch.delenv(BACKWARD_MODE_VARIABLE, raising=False)
    assert R(given).backward_mode is mode
    assert R(given) == R(mode) and hash(R(given)) == hash(R(mode))


@pytest.mark.core
def test_environment_is_read_when_a_recipe_is_made(monkeypatch):
    monkeypatch.setenv(BACKWARD_MODE_VARIABLE, "dequantized")
    before = R()
    monkeypatch.setenv(BACKWARD_MODE_VARIABLE, "unquant")
    assert (before.backward_mode, R().backward_mode, R("default").backward_mode) == ("dequant", "unquant", "default")
    monkeypatch.setenv(BACKWARD_MODE_VARIABLE, "exact")
    with pytest.raises(ValueError, match=r"environment variable JAX_FP4_BACKWARD_MODE is 'exact'; needs one of"):
        R()
    assert R("default").backward_mode == "default"
    monkeypatch.setenv(BACKWARD_MODE_VARIABLE, "")
    assert R().backward_mode == "default"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (dict(backward_mode="exact"), "backward_mode is 'exact'; needs one of"),
        (dict(backward_mode=1), "backward_mode is 1"),
        (dict(row_scaled_activation=1), "row_scaled_activation is 1"),
        (dict(stochastic_rounding=None), "stochastic_rounding is None"),
        (dict(two_dimensional_weights="yes"), "two_dimensional_weights is 'yes'"),
        (dict(random_hadamard_transform="on"), "random_hadamard_transform is 'on'"),
        (dict(four_over_six=True), "four_over_six is True"),
        (dict(four_over_six="gradients"), "four_over_six is 'gradients'"),
        (dict(four_over_six_bound=128), "bound is 128; needs one of"),
        (dict(four_over_six_error="L2"), "error is 'L2'"),
        (dict(random_hadamard_transform=True, row_scaled_activation=True), "True with row_scaled_activation=True"),
        (dict(random_hadamard_transform=True, four_over_six="all"), "True with four_over_six='all'"),
        (dict(random_hadamard_transform=True, four_over_six="activations"), "at most one of the two"),
    ],
)
def test_bad_settings(settings, says):
    with pytest.raises(ValueError, match=says) as caught:
        R(**settings)
    assert "; needs " in str(caught.value) and " Try " in str(caught.value)


def test_hadamard_is_on_unless_excluded():
    which = ("none", "weights", "activations", "all")
    for row_scaled, four in itertools.product((False, True), which):
        assert R(row_scaled_activation=row_scaled, four_over_six=four).hadamard == (
            not row_scaled and four in which[:2]
        )
    assert not R(random_hadamard_transform=False).hadamard
    assert R(random_hadamard_transform=True, four_over_six="weights").hadamard


@pytest.mark.core
def test_order_is_layer_then_autocast():
    a, b = R("unquant"), R("dequant")
    assert resolve("dense", None) is None
    with fp4.autocast(a):
        assert resolve("dense", None) == a and resolve("dense", b) == b
        assert resolve("dense", fp4.HIGH_PRECISION) is None
        with fp4.autocast(fp4.HIGH_PRECISION):
            assert resolve("dense", None) is None
        with fp4.autocast(None):
            assert resolve("dense", None) is None
        assert resolve("dense", None) == a
    assert resolve("dense", None) is None


@pytest.mark.parametrize("bad", ["nvfp4", R, 3, jnp.ones(2)], ids=["string", "class", "number", "array"])
def test_what_is_no_recipe(bad):
    for use in (fp4.autocast, lambda r: resolve("dense", r), lambda r: fp4.Rules([("a", r)])):
        with pytest.raises(TypeError, match=r"recipe (of rule 1 )?is .*; needs a recipe object or HIGH_PRECISION"):
            use(bad)


def test_recipes_are_values():
    recipe = R("dequant", four_over_six="weights")
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert pickle.loads(pickle.dumps(fp4.HIGH_PRECISION)) is fp4.HIGH_PRECISION
    assert copy.deepcopy(fp4.HIGH_PRECISION) is fp4.HIGH_PRECISION and repr(fp4.HIGH_PRECISION) == "HIGH_PRECISION"
    assert jax.jit(lambda x, r: x, static_argnums=1)(1.0, recipe) == 1.0
    with pytest.raises(AttributeError):
        recipe.stochastic_rounding = False
    assert fp4.FourOverSix() == fp4.FourOverSix(256, "MAE")


# --- the 8-bit recipes, and a recipe for each product ---

FP8 = (fp4.MXFP8BlockScaling, fp4.Float8CurrentScaling, fp4.Float8BlockScaling, fp4.DelayedScaling)


@pytest.mark.core
@pytest.mark.parametrize("made", FP8)
def test_fp8_recipes_are_values_and_refuse_e5m2(made, monkeypatch):
    recipe = made()
    assert pickle.loads(pickle.dumps(recipe)) == recipe == made("default") and hash(recipe) == hash(made("default"))
    assert recipe.scaling("x").format == recipe.scaling("kernel").format
    assert made(fp8_format="HYBRID").scaling("dy").format.endswith("_e5m2")
    assert not made(fp8_format="E4M3").scaling("dy").format.endswith("_e5m2")
    with pytest.raises(ValueError, match=r"fp8_format is 'E5M2'; needs one of .* because the forward needs E4M3"):
        made(fp8_format="E5M2")
    with pytest.raises(ValueError, match="backward_mode is 'exact'"):
        made("exact")
    monkeypatch.setenv(BACKWARD_MODE_VARIABLE, "dequant")
    if made is fp4.DelayedScaling:
        with pytest.raises(ValueError, match="JAX_FP4_BACKWARD_MODE is 'dequant'; needs 'default'"):
            made()
    else:
        assert made().backward_mode == "dequant"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: fp4.MXFP8BlockScaling(two_dimensional_weights=1), "two_dimensional_weights is 1"),
        (lambda: fp4.Float8CurrentScaling(power_of_two=0), "power_of_two is 0"),
        (lambda: fp4.Float8CurrentScaling(eps=-1.0), "eps is -1.0; needs a number >= 0"),
        (lambda: fp4.Float8CurrentScaling(eps=True), "eps is True"),
        (lambda: fp4.Float8CurrentScaling(eps=1e39), "eps is .*; needs a number >= 0, finite in float32"),
        (lambda: fp4.DelayedScaling(amax_history_len=1), "amax_history_len is 1; needs a whole number, 2 to"),
        (lambda: fp4.DelayedScaling(margin=101), "margin is 101; needs a whole number, 0 to 100"),
        (lambda: fp4.Float8BlockScaling(eps=float("nan")), "eps is nan"),
        (lambda: fp4.Float8BlockScaling(two_dimensional_weights=None), "two_dimensional_weights is None"),
        (lambda: fp4.DelayedScaling("unquant"), "backward_mode is 'unquant'; needs 'default'"),
        (lambda: fp4.DelayedScaling("dequant"), "Try backward_mode='default', or Float8CurrentScaling"),
        (lambda: fp4.DelayedScaling(amax_history_len=0), "amax_history_len is 0; needs a whole number, 2 to"),
        (lambda: fp4.DelayedScaling(amax_history_len=1.0), "amax_history_len is 1.0"),
        (lambda: fp4.DelayedScaling(margin=-1), "margin is -1"),
        (lambda: fp4.DelayedScaling(amax_compute_algo="mean"), "amax_compute_algo is 'mean'"),
    ],
)
def test_bad_fp8_settings(make, says):
    with pytest.raises(ValueError, match=says) as caught:
        make()
    assert "; needs " in str(caught.value) and " Try " in str(caught.value)


def test_custom_recipes():
    nv, mx, high = R("dequant"), fp4.MXFP8BlockScaling("default"), fp4.HIGH_PRECISION
    recipe = fp4.CustomRecipe(forward=nv, dgrad=mx, wgrad=nv)
    assert [mode_of(recipe, product) for product in ("dgrad", "wgrad")] == ["default", "dequant"]
    assert scaling_of(recipe, "forward", "x").format == "nvfp4" and scaling_of(recipe, "dgrad", "dy").format == "mxfp8"
    assert scaling_of(recipe, "wgrad", "dy") is None  # dequant: dy is not quantized
    assert fp4.CustomRecipe(mx) == fp4.CustomRecipe(mx, mx, mx) and hash(fp4.CustomRecipe(mx))
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert mode_of(fp4.CustomRecipe(mx, high, mx), "dgrad") == "unquant"
    assert draws(fp4.CustomRecipe(mx, mx, R("default"))) and not draws(fp4.CustomRecipe(R("default"), mx, high))


@pytest.mark.parametrize(
    ("parts", "error", "says"),
    [
        ((R,), TypeError, "forward is the class NVFP4BlockScaling"),
        (("mxfp8",), TypeError, "forward is 'mxfp8'"),
        ((None,), TypeError, "forward is None; needs a recipe or HIGH_PRECISION"),
        ((R("unquant"), fp4.CustomRecipe(R("unquant"))), TypeError, "dgrad is a CustomRecipe"),
        ((fp4.DelayedScaling("default"),), TypeError, "forward is DelayedScaling; needs a recipe without a state"),
        ((fp4.HIGH_PRECISION,) * 3, ValueError, "nothing is left to quantize"),
        ((fp4.HIGH_PRECISION, R("dequant")), ValueError, "dgrad.backward_mode is 'dequant' beside forward=HIGH"),
        ((R("dequant"), R("default"), R("default")), ValueError, "forward.backward_mode is 'dequant'"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_bad_custom_recipes(parts, error, says):
    with pytest.raises(error, match=says) as caught:
        fp4.CustomRecipe(*parts)
    assert "; needs " in str(caught.value) and " Try " in str(caught.value)


def test_a_file_names_every_recipe(tmp_path):
    path = tmp_path / "rules.txt"
    path.write_text(
        "a = MXFP8BlockScaling(fp8_format='HYBRID')\n"
        "b = Float8BlockScaling('unquant', eps=1e-3)\n"
        "c = DelayedScaling('default', amax_history_len=16)\n"
        "d = CustomRecipe(NVFP4BlockScaling('default'), dgrad=MXFP8BlockScaling('default'), wgrad=HIGH_PRECISION)\n"
    )
    assert [recipe for _, recipe in fp4.Rules.from_file(path).rules] == [
        fp4.MXFP8BlockScaling(fp8_format="HYBRID"),
        fp4.Float8BlockScaling("unquant", eps=1e-3),
        fp4.DelayedScaling("default", amax_history_len=16),
        fp4.CustomRecipe(R("default"), fp4.MXFP8BlockScaling("default"), fp4.HIGH_PRECISION),
    ]
    path.write_text("a = CustomRecipe(NVFP4BlockScaling(MXFP8BlockScaling()))\n")
    with pytest.raises(ValueError, match=r"rules.txt, line 1 is .*it says: NVFP4BlockScaling: backward_mode"):
        fp4.Rules.from_file(path)


# --- rules ---

A, B = R("unquant"), R("dequant")


def at(path, given=None):
    """What a layer at this path resolves to."""
    with _record.layer(path):
        return resolve("Dense", given)


@pytest.mark.core
def test_the_first_rule_that_matches_the_whole_path_decides():
    rules = fp4.Rules([("head", fp4.HIGH_PRECISION), (r"block\d/mlp", A), (r"block1/.*", B), ("", B)])
    with fp4.autocast(rules):
        assert at("head") is None and at("block1/mlp") == A and at("block1/qkv") == at("") == B
        assert at("heads") is at("a/head") is at("block12/mlp") is at("block2/mlp/up") is None  # re.match would
        assert at("head", A) == A and at("block1/mlp", fp4.HIGH_PRECISION) is None  # the layer comes first


@pytest.mark.core
def test_where_no_rule_matches_the_context_around_the_rules_does():
    inner, outer = fp4.Rules([("a", A)]), fp4.Rules([("a|b", B), ("c", fp4.HIGH_PRECISION)])
    made_outside = fp4.autocast(outer)
    with fp4.autocast(A), made_outside:
        assert (at("a"), at("b"), at("c"), at("d")) == (B, B, None, A)
        with fp4.autocast(inner):
            assert (at("a"), at("b"), at("c"), at("d")) == (A, B, None, A)
            with fp4.autocast(B):
                assert at("a") == at("c") == B
            with fp4.autocast(None):
                assert at("a") is None
                with fp4.autocast(inner):
                    assert (at("a"), at("d")) == (A, None)
        with fp4.autocast(fp4.HIGH_PRECISION), fp4.autocast(inner):
            assert (at("a"), at("b")) == (A, None)
        assert (at("a"), at("d")) == (B, A)


def test_what_decided_is_said():
    rules = fp4.Rules([("a", A), ("b", fp4.HIGH_PRECISION)])
    with fp4.autocast(rules), _record.layer("a"):
        assert chosen_by("Dense", None) == "rule 'a' = NVFP4BlockScaling"
        assert chosen_by("Dense", A) == "recipe=NVFP4BlockScaling"
    with fp4.autocast(B), fp4.autocast(rules):
        with _record.layer("b"):
            assert chosen_by("Dense", None) == "rule 'b' = HIGH_PRECISION"
        with _record.layer("c"):
            assert chosen_by("Dense", None) == "autocast(NVFP4BlockScaling)"
    with fp4.autocast(rules), _record.layer("c"):
        assert "no rule matches" in chosen_by("Dense", None)


@pytest.mark.core
def test_a_function_knows_no_path():
    x, w = jnp.ones((2, 16)), jnp.ones((16, 8))
    with fp4.autocast(fp4.Rules([(".*", A)])):
        with pytest.raises(
            ValueError, match=r"dense: recipe is None under autocast\(Rules\).*quantize_model.* recipe="
        ):
            fp4.dense(x, w)
        assert fp4.dense(x, w, recipe=A).shape == (2, 8)
        with fp4.autocast(A):
            assert fp4.dense(x, w).shape == (2, 8)


def test_rules_are_values():
    pairs = [("a", A), ["b", fp4.HIGH_PRECISION]]
    rules = fp4.Rules(pairs)
    pairs.clear()
    assert rules == fp4.Rules((("a", A), ("b", fp4.HIGH_PRECISION))) != fp4.Rules([("a", A)])
    assert hash(rules) == hash(pickle.loads(pickle.dumps(rules))) and rules == copy.deepcopy(rules)
    with pytest.raises(AttributeError):
        rules.rules = ()


@pytest.mark.core
def test_rules_are_part_of_the_cache_key():
    traces = []

    @jax.jit
    def f(x):
        traces.append(at("a"))
        return x

    for context in (fp4.Rules([("a", A)]), fp4.Rules([("a", B)]), None, A, fp4.Rules([("a", A)])):
        with fp4.autocast(context):
            f(1.0)
    assert traces == [A, B, None, A]  # the fifth is the first


@pytest.mark.parametrize(
    ("rules", "error", "says"),
    [
        ([], ValueError, "rules is empty"),
        ("a", TypeError, "rules is 'a'; needs pairs"),
        (A, TypeError, "rules is NVFP4BlockScaling"),
        ([A], TypeError, "rule 1 is NVFP4BlockScaling"),
        ([("a", A), ("b",)], TypeError, r"rule 2 is \('b',\)"),
        ([(1, A)], TypeError, "rule 1 is "),
        ({"ab": A}, TypeError, "rule 1 is 'ab'"),
        ([("a", A), ("*", B)], ValueError, r"rule 2 is '\*'; needs a regular expression because of nothing to repeat"),
        ([("a", None)], TypeError, "the recipe of rule 1 is None"),
        ([("a", A), ("a", B)], ValueError, "rule 2 is 'a', as is rule 1"),
    ],
)
def test_bad_rules(rules, error, says):
    with pytest.raises(error, match=says) as caught:
        fp4.Rules(rules)
    assert "; needs " in str(caught.value) and " Try " in str(caught.value)


def test_rules_are_no_recipe_of_a_layer():
    rules = fp4.Rules([("a", A)])
    for use in (lambda: resolve("dense", rules), lambda: fp4.Rules([("b", rules)])):
        with pytest.raises(TypeError, match=r"is Rules; .*autocast\(rules\)"):
            use()


def test_a_file_of_rules(tmp_path):
    path = tmp_path / "rules.txt"
    path.write_text(
        "# a comment\n\nhead = HIGH_PRECISION\n"
        "(?=b)b.*/a=b   =  NVFP4BlockScaling('unquant', four_over_six=\"all\", four_over_six_bound = 448)\n"
        "  .* = NVFP4BlockScaling(random_hadamard_transform=None, stochastic_rounding=False)\n"
    )
    recipes = R("unquant", four_over_six="all", four_over_six_bound=448), R(stochastic_rounding=False)
    want = fp4.Rules([("head", fp4.HIGH_PRECISION), ("(?=b)b.*/a=b", recipes[0]), (".*", recipes[1])])
    assert fp4.Rules.from_file(path) == fp4.Rules.from_file(str(path)) == want


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("head", "'head'; needs expression = recipe"),
        ("head=HIGH_PRECISION", "needs expression = recipe"),
        ("= HIGH_PRECISION", "needs expression = recipe"),
        ("head =", "needs expression = recipe"),
        ("head = NVFP4", r"'NVFP4'; needs one of .*Try NVFP4BlockScaling\(\)"),
        ("head = NVFP4BlockScaling", r"Try NVFP4BlockScaling\(\)"),
        ("head = NVFP4BlockScaling(", "it says: "),
        ("head = NVFP4BlockScaling(mode='unquant')", "it says: .*'mode'"),
        ("head = NVFP4BlockScaling('exact')", "it says: .*backward_mode is 'exact'"),
        ("head = NVFP4BlockScaling(open('x'))", "it says: malformed"),
        ("head = NVFP4BlockScaling(**{'backward_mode': 'unquant'})", r"it says: .*'\*\*'"),
        ("head = print('x')", "needs one of"),
        ("he(ad = HIGH_PRECISION", r"'he\(ad'; needs a regular expression"),
        ("a = HIGH_PRECISION", "'a', as in line 2"),
    ],
)
def test_a_malformed_line_is_named(line, says, tmp_path):
    path = tmp_path / "rules.txt"
    path.write_text(f"# first\na = HIGH_PRECISION\n\n{line}\n")
    with pytest.raises(ValueError, match=f"rules.txt, line 4 is .*{says}") as caught:
        fp4.Rules.from_file(path)
    assert "; needs " in str(caught.value) and " Try " in str(caught.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "rules.txt"
    path.write_bytes(b"\xef\xbb\xbfa = HIGH_PRECISION\n")
    assert fp4.Rules.from_file(path) == fp4.Rules([("a", fp4.HIGH_PRECISION)])
    path.write_bytes(b"a = HIGH_PRECISION\n\xff = HIGH_PRECISION\n")
    with pytest.raises(ValueError, match=r"rules.txt, line 2 is .*; needs UTF-8 .* Try "):
        fp4.Rules.from_file(path)


def test_a_file_without_rules(tmp_path):
    path = tmp_path / "rules.txt"
    path.write_text("# none\n\n")
    with pytest.raises(ValueError, match=r"rules.txt is without a rule; .* Try .*NVFP4BlockScaling\(\)"):
        fp4.Rules.from_file(path)
    with pytest.raises(FileNotFoundError):
        fp4.Rules.from_file(tmp_path / "absent")
