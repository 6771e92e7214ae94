"""The examples about meshes: several processes against one, checkpoints across meshes, the bytes that FSDP sends."""

import re
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import fsdp_gather
import jax_fp4 as fp4
import train_distributed

STEPS, SAVED = 10, 6
TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--batch", "8", "--context", "32", "--experts", "1"]


# ---- train_distributed ----


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """(losses that two processes printed, their checkpoints)."""
    folder = tmp_path_factory.mktemp("checkpoints")
    options = [*TINY, "--steps", str(STEPS), "--save", folder, "--save-every", str(SAVED)]
    command = [sys.executable, train_distributed.__file__, "--processes", "2", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "2 processes, 4 devices (cpu): data=2, fsdp=2" in result.stdout
    return [float(loss) for loss in re.findall(r"^step +\d+  loss ([\d.]+)$", result.stdout, re.MULTILINE)], folder


@pytest.mark.slow
def test_processes_share_a_training(two_processes):
    """Two with two devices each train as one with four."""
    losses, _ = two_processes
    alone = train_distributed.main([*TINY, "--steps", str(STEPS)])
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.3
    np.testing.assert_allclose(losses, alone, rtol=1e-5)


@pytest.mark.core
def test_a_checkpoint_goes_on_anywhere(two_processes):
    """What two processes saved on data=2, fsdp=2, with one process on another mesh."""
    losses, folder = two_processes
    assert sorted(path.name for path in folder.iterdir()) == [str(STEPS), str(SAVED)]
    rest = ["--steps", str(STEPS - SAVED), "--restore", str(folder / str(SAVED))]
    np.testing.assert_allclose(train_distributed.main([*TINY, *rest, "--mesh", "fsdp=4"]), losses[SAVED:], rtol=1e-5)


def test_a_fresh_start_is_another_training(two_processes):
    """A restore that did nothing would be seen."""
    _, folder = two_processes
    args = train_distributed.parse([*TINY, "--mesh", "fsdp=2"])
    with jax.set_mesh(train_distributed.mesh_over_all(args.mesh, 1)):
        model, optimizer = train_distributed.first_state(args)
        fresh = [np.asarray(a) for a in jax.tree.leaves((model, optimizer))]
        train_distributed.restore(folder / str(SAVED), model, optimizer)
        restored = jax.tree.leaves((model, optimizer))
        assert optimizer.step[...] == SAVED
        kernel = model.blocks[0].qkv.kernel[...]
        assert kernel.sharding.spec == jax.P("fsdp", None) and len(kernel.addressable_shards) == 2
    assert all((a != b).any() for a, b in zip(fresh, restored, strict=True))


def test_experts_on_a_mesh():
    """Tokens travel to their experts, of which each device has a shard of some."""
    options = [*TINY, "--experts", "4", "--backward-mode", "dequant", "--mesh", "expert=2,fsdp=2"]
    losses = train_distributed.main([*options, "--steps", "8"])
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "model=2"], "'model' needs to be one of data, fsdp, tensor, expert, once"),
        (["--mesh", "data=2,data=2"], "'data' needs to be one of"),
        (["--mesh", "data=two"], "needs a whole number above 0, is 'two'"),
        (["--mesh", "data=3", "--processes", "2"], "--mesh is of 3 devices, which 2 --processes cannot share evenly"),
        (["--mesh", "data=3"], "--batch 16 needs to be a multiple of 3"),
        (["--mesh", "expert=8", "--experts", "4"], "--experts 4 needs to be a multiple of the mesh axis expert=8"),
        (["--heads", "3"], "--width 128 needs to be a multiple of 2 x --heads = 6"),
        (["--top-k", "3"], "--top-k 3 needs to be at most --experts and to divide 4 x --width"),
        (["--recipe", "float8-delayed"], "invalid choice"),
    ],
)
def test_a_wrong_option_says_what_to_do(arguments, message, capsys):
    with pytest.raises(SystemExit):
        train_distributed.parse(arguments)
    assert message in capsys.readouterr().err


def test_a_mesh_of_more_devices_than_there_are():
    with pytest.raises(SystemExit, match="--mesh is of 16 devices; 1 processes have 8"):
        train_distributed.main([*TINY, "--mesh", "data=16", "--batch", "16"])


def test_a_process_that_fails_ends_the_others(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text("import sys, time\nif sys.argv[-1] == '1': sys.exit(3)\ntime.sleep(100)\n")
    monkeypatch.setattr(train_distributed, "__file__", str(script))
    begin = time.perf_counter()
    with pytest.raises(SystemExit, match="3"):
        train_distributed.main([*TINY, "--processes", "2"])
    assert time.perf_counter() - begin < 50


# ---- fsdp_gather ----


@pytest.mark.core
def test_nvfp4_weights_are_gathered_packed(capsys):
    """0.5 bytes of codes and a sixteenth of scales an element, in the forward and where the backward reads them."""
    tables = fsdp_gather.main(["--k", "256", "--n", "512", "--experts", "2", "--tokens", "64"])
    assert list(tables) == [(256, 512), (2, 256, 512)]
    for shape, rows in tables.items():
        assert [row.name for row in rows] == ["bfloat16", "nvfp4 default", "nvfp4 unquant", "nvfp4 dequant"]
        bfloat16, default, unquant, dequant = rows
        elements = np.prod(shape)
        for part in (bfloat16.forward, bfloat16.backward, unquant.backward):
            assert (part.dtype, part.per_element, part.sent) == ("bf16", 2, 2 * elements * 7 / 8)
        for part in (default.forward, default.backward, unquant.forward, dequant.forward, dequant.backward):
            assert (part.dtype, part.compiled) == ("u8", "u8") and part.per_element == 0.5625 <= 0.60
            assert part.sent == 0.5625 * elements * 7 / 8
        for row in rows:
            assert (row.gradient.compiled, row.gradient.per_element) == ("f32", 4)
            assert row.other < 1000  # amaxes and sizes of groups
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("nvfp4 default")]
    assert len(lines) == 2 and all(
        re.search(r"u8  0\.5625 .* u8  0\.5625 .* f32  4\.0000 .* 0\.281x$", x) for x in lines
    )


def test_shards_of_columns_and_another_recipe():
    args = fsdp_gather.parse(["--cut", "columns", "--tokens", "32", "--reduce-dtype", "bfloat16"])
    mesh, shape = jax.make_mesh((2,), ("fsdp",), devices=jax.devices()[:2]), (64, 128)
    recipe = fp4.MXFP8BlockScaling(backward_mode="dequant")
    row = fsdp_gather.row("mxfp8", fsdp_gather.programs(mesh, recipe, shape, args), shape)
    assert (row.forward.compiled, row.backward.compiled, row.gradient.dtype) == ("u8", "u8", "bf16")
    assert row.forward.per_element == row.backward.per_element == 1 + 1 / 32
    assert row.gradient.sent == 64 * 128 * 2 / 2


def test_shards_that_end_inside_a_block():
    for options, message in (
        (["--k", "200"], "needs shards of whole blocks because"),
        (["--k", "201"], "--k 201 needs to be a multiple of the 8 devices that share the rows"),
        (["--devices", "9"], "--devices 9 needs as many devices; here are 8"),
    ):
        with pytest.raises(SystemExit, match=message):
            fsdp_gather.main([*options, "--n", "32"])


@pytest.mark.parametrize(
    ("line", "expected", "sent"),
    [
        (
            "  %g = u8[64,32]{1,0} all-gather(%a), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}",
            [("all-gather", "u8", (64, 32), 4)],
            64 * 32 * 3 / 4,
        ),
        (
            "  %s = ((bf16[8,32], u8[4]), (bf16[32,32], u8[16])) all-gather-start(%a, %b), replica_groups=[2,4]<=[8]",
            [("all-gather", "bf16", (32, 32), 4), ("all-gather", "u8", (16,), 4)],
            (32 * 32 * 2 + 16) * 3 / 4,
        ),
        (
            "  r = f32[8,32]{1,0} reduce-scatter(d), replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}, dimensions={0}",
            [("reduce-scatter", "f32", (8, 32), 4)],
            8 * 32 * 4 * 3,
        ),
        (
            "  ROOT %m = (s32[], s32[2]) all-reduce(%a, %b), replica_groups={{0,1},{2,3}}, to_apply=%max",
            [("all-reduce", "s32", (), 2), ("all-reduce", "s32", (2,), 2)],
            3 * 4,
        ),
        ("  %x = f32[8]{0} add(%all-gather.1, %b)", [], 0),
    ],
)
def test_collectives_are_read_from_hlo(line, expected, sent):
    found = list(fsdp_gather.collectives(f"HloModule m\n{line}\n"))
    assert found == expected
    assert sum(one.sent for one in found) == sent
