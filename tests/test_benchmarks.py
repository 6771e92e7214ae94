"""The GPU benchmarks of products do what they say, at sizes for any machine; what they measure means nothing here."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


def load(name, module_name=None):
    """benchmarks/name.py. It may import those that are loaded before it."""
    spec = importlib.util.spec_from_file_location(module_name or name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


rounds = load("rounds")
grouped_cases = load("grouped_cases")
grouped_matmul = load("grouped_matmul")
moe_layer = load("moe_layer")
recipes = load("recipes")
fsdp_gather = load("fsdp_gather", "gathering")  # an example has its name
fsdp_step = load("fsdp_step")


def test_uneven_sizes_fill_the_rows():
    for case in grouped_cases.all_cases():
        sizes = grouped_cases.sizes_of(case)
        assert sizes.sum() == case.rows and len(sizes) == case.experts and sizes.min() >= 0
        assert (sizes.min() == 0) != case.even
        np.testing.assert_array_equal(sizes, grouped_cases.sizes_of(case))


def test_what_recipes_cost(capsys):
    recipes.main(["--tiny", "--rounds", "1"])
    out = capsys.readouterr().out
    assert all(out.count(f"\n{name} ") == 2 for name in recipes.recipes())
    assert all(f"\n{name} " in out for name in recipes.FORMATS)


def test_gathering_a_weight(capsys):
    fsdp_gather.main(["--tiny", "--rounds", "1", "--devices", "2"])
    assert capsys.readouterr().out.count("\nquantized and packed ") == 2
    with pytest.raises(SystemExit, match="one device"):
        fsdp_gather.main(["--tiny", "--devices", "1"])


def test_a_step_of_fsdp(capsys):
    fsdp_step.main(["--tiny", "--rounds", "1", "--devices", "2"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(tuple(fsdp_step.RECIPES))]
    assert [row[0] for row in rows] == list(fsdp_step.RECIPES)
    packed, unpacked = (float(next(row[-2] for row in rows if row[0] == name)) for name in ("dequant", "bfloat16"))
    assert 0 < packed < 0.4 * unpacked
    with pytest.raises(SystemExit, match="one device"):
        fsdp_step.main(["--tiny", "--devices", "1"])


def test_bytes_of_all_gathers():
    hlo = """
      %a = u8[4,64]{1,0} all-gather(%x), channel_id=1
      %b = ((u8[2,64]{1,0}, bf16[2,8]{1,0}), (u8[4,64]{1,0}, bf16[4,8]{1,0})) all-gather-start(%y, %z), channel_id=2
      %c = f32[100] all-reduce(%w)"""
    assert fsdp_step.gathered(hlo) == 256 + 256 + 64


def test_labels_are_unique():
    labels = [case.label for case in grouped_cases.all_cases()]
    assert len(set(labels)) == len(labels)


def test_products_in_every_kind_of_case(capsys):
    grouped_matmul.main(["--tiny", "--rounds", "1"])
    table = capsys.readouterr().out
    rows = [line for line in table.splitlines() if line.startswith(("forward", "weight gradient"))]
    assert len(rows) == 3 * 3 + 2
    assert all("NaN" not in row for row in rows)


def test_cases_are_chosen_by_name(capsys):
    grouped_matmul.main(["--tiny", "--rounds", "1", "--cases", "weight gradient, 4 experts, M=512, even"])
    assert capsys.readouterr().out.count("weight gradient") == 1
    with pytest.raises(SystemExit, match="no case has 'nothing' in its name"):
        grouped_matmul.main(["--tiny", "--cases", "nothing"])


@pytest.mark.parametrize("wrong", [1.01, np.nan])
def test_a_wrong_result_is_refused(wrong):
    want = np.ones((3, 4))
    grouped_matmul.check("product", want * 1.001, want)
    with pytest.raises(RuntimeError, match="product: relative error"):
        grouped_matmul.check("product", want * wrong, want)


def test_verdicts():
    """Twice as fast as torch's faster layout, 1.5 times as fast as bmm; half the bandwidth of a copy."""
    case = next(case for case in grouped_cases.all_cases() if case.few)
    asks = grouped_cases.Ask("torch", 2.0), grouped_cases.Ask("all", 2.0), grouped_cases.Ask("copy", 0.4)
    times = {"FP4": 1.0, "torch row": 2.0, "torch column": 3.0, "bmm": 1.5, "copy": 1.0}
    copied = round(2 * 0.5625 * case.elements)
    measured = rounds.Measured(times, set())
    line = grouped_matmul.line(replace(case, asks=asks), "FP4", measured, copied)
    assert line.endswith("2.0 of torch: 2.00, met; 2.0 of all: 1.50, NOT MET; 0.4 of copy: 0.50, met")


def test_without_torch_its_verdict_is_open():
    case = next(case for case in grouped_cases.all_cases() if case.asks == (grouped_cases.Ask("grouped", 1.0),))
    measured = rounds.Measured({"FP4": 1.0, "ragged_dot": 9.0, "copy": 1.0}, {"FP4"})
    line = grouped_matmul.line(case, "FP4", measured, 1)
    assert line.endswith("1.0 of grouped: not measured") and "1000000.0!" in line


def test_the_slow_take_part_in_fewer_rounds():
    calls = []

    def clock(name):
        return lambda runs: calls.append(name) or 1.0 * runs

    slow = rounds.Contender(clock("slow"), rounds=1)
    times = rounds.interleaved({"a": rounds.Contender(clock("a"), products=4), "slow": slow}, 3, 1.0)
    assert times == {"a": 0.25, "slow": 1.0}
    assert calls[4:] == ["a", "slow", "a", "a"]  # after two calls of each to warm up


def test_results_in_flight_are_bounded():
    batches = []
    contender = rounds.Contender(lambda runs: batches.append(runs) or 1.0 * runs, at_once=3)
    assert contender.seconds(7) == 1.0
    assert batches == [3, 3, 1]


def test_layer(capsys):
    moe_layer.main(["--tiny", "--rounds", "1"])
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "e-" in line or "e+" in line]
    assert rows == ["bfloat16", "unquant", "dequant", "default", "ragged_dot"]
