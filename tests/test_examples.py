"""The examples run, at sizes that take seconds, and the byte models they are compared with are right."""

import re
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import byte_models
import jax_fp4 as fp4
import replace_flax_layers
import train_lm

EXAMPLES = Path(train_lm.__file__).parent
TINY = ["--steps", "12", "--layers", "1", "--width", "32", "--batch", "4", "--context", "32"]


@pytest.fixture(autouse=True, scope="module")
def byte_models_of_the_text_are_fitted_once():
    """A fit of order 2 takes a second, and every training has the same."""
    fit, of_text = byte_models.fit, {}

    def once(train, order):
        if len(train) < 100_000:
            return fit(train, order)
        key = train.tobytes(), order
        if key not in of_text:
            of_text[key] = fit(train, order)
        return of_text[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_models, "fit", once)
        yield


def as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


# ---- byte models ----


def test_byte_models_match_a_case_computed_by_hand():
    """In "abab": a, b twice each; after a always b (twice), after b once a; after ab once a, after ba once b."""
    a, b, c = as_bytes("abc")
    order0, order1, order2 = (byte_models.fit(as_bytes("abab"), order) for order in range(3))

    p_a = p_b = (2 + 2 / 256) / (4 + 2)
    p_c = (0 + 2 / 256) / (4 + 2)
    np.testing.assert_allclose(order0[0, [a, b, c]], [p_a, p_b, p_c], rtol=1e-12)

    b_after_a = (2 + 1 * p_b) / (2 + 1)
    a_after_b = (1 + 1 * p_a) / (1 + 1)
    np.testing.assert_allclose([order1[a, b], order1[b, a], order1[c, a]], [b_after_a, a_after_b, p_a], rtol=1e-12)

    def after(first, second, byte):
        return order2[256 * int(first) + int(second), byte]

    expected = [(1 + a_after_b) / 2, (1 + b_after_a) / 2, b_after_a]  # "ca" was never seen: as after a alone
    np.testing.assert_allclose([after(a, b, a), after(b, a, b), after(c, a, b)], expected, rtol=1e-12)

    np.testing.assert_allclose(byte_models.loss(order1, as_bytes("aba")), -np.log([b_after_a, a_after_b]).mean())
    for model in (order0, order1, order2):
        np.testing.assert_allclose(model.sum(axis=1), 1, rtol=1e-12)


def test_text_is_split_without_loss():
    text = byte_models.load_text()
    assert len(text.train) // 9 == pytest.approx(len(text.held_out), rel=0.01)
    assert len(text.train) + len(text.held_out) > 400_000
    assert bytes(text.train[:20]).isascii()
    losses = [byte_models.loss(byte_models.fit(text.train, order), text.held_out) for order in range(3)]
    assert losses == sorted(losses, reverse=True)


# ---- train_lm ----


def test_compare_trains_every_mode_and_saves_the_plot(tmp_path, capsys):
    results = train_lm.main([*TINY, "--experts", "1", "--compare", "--out", str(tmp_path)])
    assert [r.name for r in results] == ["bfloat16", "nvfp4 default", "nvfp4 unquant", "nvfp4 dequant", "mixed"]
    for r in results:
        assert np.isfinite(r.losses).all()
        assert r.losses.shape == (12,)
        assert r.losses[-1] < r.losses[0]
        assert r.held_out < np.log(256)
    # The same seed and batches: all start from the same place, and the FP4 runs are none of them bfloat16 in disguise.
    first = [r.losses[0] for r in results]
    assert max(first) - min(first) < 0.02
    assert len({r.held_out for r in results}) == len(results) == 5
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    for word in ("sha256", "order-0", "order-1", "order-2", "nvfp4 dequant", "mixed", "bits/byte"):
        assert word in printed


@pytest.mark.parametrize("experts", ["1", "8"])
def test_packed_operands_take_less_memory(experts):
    """At the size of the demo, where there are more tokens than rows of weights."""
    args = train_lm.parse(["--compare", "--experts", experts])
    kept = {}
    for name, recipe in train_lm.runs(args).items():
        model = train_lm.LanguageModel(1, args.width, args.heads, args.experts, args.top_k, recipe)
        params = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, args.context), jnp.uint8))
        text = np.zeros((args.batch, args.context + 1), np.uint8)
        kept[name] = train_lm.residual_bytes(model, params, text)
    assert max(kept["nvfp4 default"], kept["nvfp4 dequant"]) < min(kept["bfloat16"], kept["nvfp4 unquant"])


def test_one_recipe_as_a_script(tmp_path):
    """NVFP4 and experts, as it is without options."""
    command = [sys.executable, EXAMPLES / "train_lm.py", *TINY, "--out", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "nvfp4 default" in result.stdout
    assert "tokens/s" in result.stderr


@pytest.mark.parametrize("name", [name for name in train_lm.RECIPES if name != "nvfp4"])
def test_every_recipe_trains(name, tmp_path):
    options = ["--recipe", name, "--experts", "1", "--layers", "1", "--out", str(tmp_path)]
    (result,) = train_lm.main([*TINY, *options])
    assert result.name.startswith(name) and result.losses[-1] < result.losses[0]


def test_diagnostics_are_printed_and_saved(tmp_path, capsys):
    options = ["--diagnostics", "--steps", "3", "--experts", "1", "--out", str(tmp_path)]
    (watched,) = train_lm.main([*TINY, *options])
    assert np.isfinite(watched.losses).all()
    printed = capsys.readouterr().out
    assert "nvfp4 default, step 2: SNR" in printed and re.search(r"block0/qkv +\d\d\.\d", printed)
    assert (tmp_path / "diagnostics.png").stat().st_size > 10_000
    lines = (tmp_path / "diagnostics.csv").read_text().splitlines()
    assert lines[0] == "step,tag,value" and {line.split(",")[0] for line in lines[1:]} == {"0", "1", "2"}
    assert any(line.startswith("2,block0/up/dgrad/cosine,0.9") for line in lines)


def test_mixed_alone_is_that_of_compare():
    (alone,) = train_lm.runs(train_lm.parse(["--recipe", "mixed"])).items()
    assert alone in train_lm.runs(train_lm.parse(["--compare"])).items()


def test_delayed_scaling_by_rules(tmp_path):
    """Its states are made where a rule chooses it."""
    path = tmp_path / "rules.txt"
    path.write_text("block0/.* = DelayedScaling('default', amax_history_len=8)\n")
    options = ["--rules", str(path), "--recipe", "mxfp8", "--experts", "1", "--out", str(tmp_path)]
    (result,) = train_lm.main([*TINY, *options])
    assert result.name == "rules, mxfp8 default" and result.losses[-1] < result.losses[0]


@pytest.mark.core
def test_rules_choose_by_path(tmp_path, capsys):
    path = tmp_path / "rules.txt"
    path.write_text("block0/qkv = HIGH_PRECISION\n.*/moe = NVFP4BlockScaling('dequant')\n")
    options = ["--rules", str(path), "--recipe", "bfloat16", "--experts", "2", "--out", str(tmp_path)]
    (result,) = train_lm.main([*TINY, *options])
    assert result.name == "rules, bfloat16" and result.losses[-1] < result.losses[0]
    printed = capsys.readouterr().out
    for word in (
        "rule 'block0/qkv' = HIGH_PRECISION",
        "rule '.*/moe' = NVFP4BlockScaling",
        "2 of 6 layer calls quantized",
    ):
        assert word in printed


def test_what_no_rule_matches_follows_the_recipe(tmp_path):
    path = tmp_path / "rules.txt"
    path.write_text("block0/.* = HIGH_PRECISION\n")
    options = ["--rules", str(path), "--experts", "1", "--out", str(tmp_path), "--layers", "2"]
    args = train_lm.parse([*TINY, *options])
    model = train_lm.LanguageModel(args.layers, args.width, args.heads, args.experts, args.top_k)
    text = jnp.zeros((1, args.context), jnp.uint8)
    ((_, recipe),) = train_lm.runs(args).items()
    with fp4.autocast(recipe), fp4.autocast(args.rules):
        rows = fp4.report(lambda: model.init(jax.random.key(0), text)).rows
    assert {row.layer.split("/")[0] for row in rows if row.quantized} == {"block1"} and len(rows) == 9


def test_a_file_that_is_no_file_of_rules(tmp_path, capsys):
    path = tmp_path / "rules.txt"
    path.write_text("head = NVFP4\n")
    for given, says in ((path, "line 1 is 'NVFP4'; needs one of"), (tmp_path / "absent", "No such file")):
        with pytest.raises(SystemExit):
            train_lm.parse(["--rules", str(given)])
        assert says in capsys.readouterr().err
    path.write_text("head = HIGH_PRECISION\n")
    with pytest.raises(SystemExit):
        train_lm.parse(["--rules", str(path), "--compare"])
    assert "--rules has no meaning beside it" in capsys.readouterr().err


def test_the_environment_chooses_the_backward_mode(monkeypatch):
    monkeypatch.setenv("JAX_FP4_BACKWARD_MODE", "unquant")
    assert list(train_lm.runs(train_lm.parse([]))) == ["nvfp4 unquant"]
    assert list(train_lm.runs(train_lm.parse(["--backward-mode", "dequant"]))) == ["nvfp4 dequant"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps: needs a whole number above 0"),
        (["--heads", "3"], "--width 256 needs to be a multiple of 2 x --heads = 6"),
        (["--context", "31"], "--context 31 needs to be even"),
        (["--experts", "2", "--top-k", "3"], "--top-k 3 needs to be at most --experts 2"),
        (["--top-k", "3"], "--top-k 3 needs to divide 4 x --width = 1024"),
        (["--compare", "--backward-mode", "default"], "leave one of them out"),
        (["--recipe", "bfloat16", "--backward-mode", "default"], "--backward-mode has no meaning beside --recipe bf"),
        (["--recipe", "float8-delayed", "--backward-mode", "unquant"], "which has one backward only"),
        (["--learning-rate", "-1"], "--learning-rate -1.0 needs to be above 0"),
    ],
)
def test_a_wrong_option_says_what_to_do(arguments, message, capsys):
    with pytest.raises(SystemExit):
        train_lm.parse(arguments)
    assert message in capsys.readouterr().err


def test_a_context_longer_than_the_text_is_refused():
    with pytest.raises(SystemExit, match="--context 60000 is too long"):
        train_lm.main(["--context", "60000"])


def tiny_model(recipe, experts=1):
    return train_lm.LanguageModel(layers=1, width=32, heads=2, experts=experts, top_k=2, recipe=recipe)


@pytest.mark.parametrize("experts", [1, 4])
def test_parameters_do_not_depend_on_the_recipe(experts):
    text = jnp.zeros((1, 8), jnp.uint8)
    recipes = None, fp4.NVFP4BlockScaling()
    trees = [jax.jit(tiny_model(recipe, experts).init)(jax.random.key(0), text) for recipe in recipes]
    jax.tree.map(np.testing.assert_array_equal, *trees)
    assert {leaf.dtype for leaf in jax.tree.leaves(trees[0])} == {jnp.dtype("float32")}


@pytest.mark.parametrize("experts", [1, 4])
def test_a_byte_sees_only_what_is_before_it(experts):
    model = tiny_model(None, experts)
    text = np.arange(16, dtype=np.uint8)[None]
    params = jax.jit(model.init)(jax.random.key(0), text)
    params = jax.tree.map(lambda p: p + 0.1 * np.random.default_rng(0).normal(size=p.shape), params)  # no layer is 0
    changed = text.copy()
    changed[0, 8] = 200
    a, b = jax.jit(jax.vmap(lambda params, text: model.apply(params, text)[0], (None, 0)))(
        params, np.stack([text, changed])
    )
    np.testing.assert_array_equal(a[0, :8], b[0, :8])
    assert (a[0, 8:] != b[0, 8:]).any(axis=-1).all()


def test_residual_bytes_leave_parameters_out():
    """One Dense keeps its input, and its weight only as a copy in another dtype."""

    class Linear(nn.Module):
        @nn.compact
        def __call__(self, text):
            return nn.Dense(256, use_bias=False)(jax.nn.one_hot(text, 256)), 0.0  # no experts to balance

    model, text = Linear(), np.zeros((2, 9), np.uint8)
    params = jax.jit(model.init)(jax.random.key(0), text[:, :-1])
    kept = train_lm.residual_bytes(model, params, text)
    x = 2 * 8 * 256 * 4
    assert x <= kept < 256 * 256 * 4


@pytest.mark.core
def test_three_ways_to_replace_flax_layers(capsys):
    runs = replace_flax_layers.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(runs)
    assert all("yes" in line for line in lines[1:])
    for library in ("Linen", "NNX"):
        flax, unquantized, *quantized = (run for name, run in runs.items() if name.startswith(library))
        assert unquantized.losses == flax.losses  # bit for bit
        for run in quantized:
            assert run.quantized == 2
            assert run.losses != flax.losses
            assert run.losses[-1] < 0.7 * run.losses[0]
            assert run.losses[-1] == pytest.approx(flax.losses[-1], rel=0.2)


def test_every_example_is_tested():
    tested = "".join(Path(__file__).with_name(f"test_{name}.py").read_text() for name in ("examples", "distributed"))
    assert [path.stem for path in EXAMPLES.glob("*.py") if path.stem not in tested] == []
