"""The main job, whole: trainings of 150 steps, held to what the README says of them. Not part of `make test`."""

import pytest

import train_lm
from byte_models import fit, load_text, loss


@pytest.mark.demo
def test_held_out_losses(tmp_path, capsys):
    text = load_text()
    results = train_lm.main(["--compare", "--out", str(tmp_path)])
    with capsys.disabled():
        print(f"\n{train_lm.table(results, [])}")
    bfloat16, default, unquant, dequant, mixed = (result.held_out for result in results)
    names = ["bfloat16", "nvfp4 default", "nvfp4 unquant", "nvfp4 dequant", "mixed"]
    assert [result.name for result in results] == names
    assert bfloat16 < loss(fit(text.train, 1), text.held_out)
    assert unquant <= 1.015 * bfloat16
    assert dequant <= 1.015 * bfloat16
    assert default <= 1.03 * bfloat16
    assert mixed <= 1.03 * bfloat16
    assert results[1].residual_bytes < results[3].residual_bytes * 1.01 < results[2].residual_bytes


@pytest.mark.full
def test_held_out_losses_of_the_8_bit_recipes(tmp_path, capsys):
    """Within 1.5 % of bfloat16, of the same batches from the same seed."""
    results = []
    for name in ("bfloat16", *(name for name in train_lm.RECIPES if name != "nvfp4")):
        results += train_lm.main(["--recipe", name, "--out", str(tmp_path)])
    with capsys.disabled():
        print(f"\n{train_lm.table(results, [])}")
    for result in results[1:]:
        assert result.held_out <= 1.015 * results[0].held_out, result.name
