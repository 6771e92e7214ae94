"""The main job, whole: `make demo`'s four trainings, held to what the README says of them. Not part of `make test`."""

import pytest

import train_lm
from byte_models import fit, load_text, loss


@pytest.mark.demo
def test_held_out_losses(tmp_path, capsys):
    text = load_text()
    results = train_lm.main(["--compare", "--out", str(tmp_path)])
    with capsys.disabled():
        print(f"\n{train_lm.table(results, [])}")
    bfloat16, default, unquant, dequant = (result.held_out for result in results)
    assert [result.name for result in results] == ["bfloat16", "nvfp4 default", "nvfp4 unquant", "nvfp4 dequant"]
    assert bfloat16 < loss(fit(text.train, 1), text.held_out)
    assert unquant <= 1.015 * bfloat16
    assert dequant <= 1.015 * bfloat16
    assert default <= 1.03 * bfloat16
    assert results[1].residual_bytes < results[3].residual_bytes * 1.01 < results[2].residual_bytes
