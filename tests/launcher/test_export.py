"""`stretto export` writes the newest complete model of a run, and overwrites nothing unless asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from stretto.checkpoint.storage import Checkpoints, State
from stretto.cli.export import command, export
from stretto.errors import LaunchError, LogError, StrettoError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with two checkpoints and without a final model."""
    folder = tmp_path / "run"
    folder.mkdir()
    for number in (10, 20):
        tensors = {f"model/{name}": one for name, one in model(number).items()}
        state = State(
            {}, {**tensors, "optimizer/0/exp_avg": torch.ones(3)}, {0: ({}, {"model/residual": torch.ones(1)})}
        )
        Checkpoints(folder / "checkpoints").write(state, number)
    return folder


def model(number: float) -> dict[str, Tensor]:
    made = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    for parameter in made.parameters():
        nn.init.constant_(parameter, number)
    return made.state_dict()


def same(path: Path, number: float) -> bool:
    """Return True if a file is the complete state of a model, and can be loaded into it."""
    found, wanted = load_file(path), model(number)
    nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).load_state_dict(found)
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def damage(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def test_newest_checkpoint_is_exported_as_a_state_dict(run: Path, tmp_path: Path) -> None:
    exported = export(run, tmp_path / "model.safetensors", notice=pytest.fail)
    assert same(tmp_path / "model.safetensors", 20)
    assert (exported.round, exported.tensors) == (20, 7)
    assert exported.bytes == (tmp_path / "model.safetensors").stat().st_size


@pytest.mark.parametrize("name", ["model.pt", "model.pth"])
def test_a_name_of_torch_gets_a_file_that_torch_loads(name: str, run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / name, notice=pytest.fail)
    found, wanted = torch.load(tmp_path / name, weights_only=True), model(20)
    assert found.keys() == wanted.keys() and all(torch.equal(found[one], wanted[one]) for one in wanted)


def test_final_model_takes_precedence_over_checkpoints(run: Path, tmp_path: Path) -> None:
    save_file(model(30), run / "final.safetensors")
    assert export(run, tmp_path / "out", notice=pytest.fail).round is None
    assert same(tmp_path / "out", 30)


@pytest.mark.parametrize("end", [True, False])
def test_damaged_files_are_reported_and_skipped(run: Path, tmp_path: Path, end: bool) -> None:
    notices: list[str] = []
    if end:
        save_file(model(30), run / "final.safetensors")
        damage(run / "final.safetensors")
    else:
        damage(run / "checkpoints" / "round-00000020" / "state.safetensors")
    assert export(run, tmp_path / "out", notice=notices.append).round == (20 if end else 10)
    (notice,) = notices
    assert ("final.safetensors" if end else "round-00000020/state.safetensors") in notice


def test_run_with_only_damaged_files_has_no_model(run: Path, tmp_path: Path) -> None:
    for number in (10, 20):
        damage(run / "checkpoints" / f"round-000000{number}" / "manifest.json")
    notices: list[str] = []
    with pytest.raises(LogError, match=r"all states in .*run are damaged: .*round-00000020.*round-00000010"):
        export(run, tmp_path / "out", notice=notices.append)
    assert len(notices) == 2 and not (tmp_path / "out").exists()


def test_nothing_is_overwritten_unless_asked(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("mine")
    with pytest.raises(LaunchError, match="--force"):
        export(run, out)
    assert out.read_text() == "mine"
    export(run, out, force=True)
    assert same(out, 20)


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        ("nowhere", "out", "there is no run"),
        ("empty", "out", "has no model"),
        ("run", "missing/out", "there is no folder"),
        ("run", "empty", "is not a file"),
    ],
)
def test_invalid_source_or_target_is_refused(run: Path, tmp_path: Path, source: str, target: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(LaunchError, match=says) as error:
        export(tmp_path / source, tmp_path / target, force=True)
    assert all(word in str(error.value) for word in ("got: ", "expected: ", "try: stretto "))


def test_device_is_not_replaced_by_a_file(run: Path, tmp_path: Path) -> None:
    (tmp_path / "device").symlink_to("/dev/null")
    with pytest.raises(LaunchError, match="is not a file"):
        export(run, tmp_path / "device", force=True)
    assert Path("/dev/null").is_char_device()


def test_failed_write_is_reported(run: Path, tmp_path: Path) -> None:
    out = tmp_path / ("x" * 250)  # the target's name fits the limit, the longer temporary name does not
    with pytest.raises(LogError, match="cannot be written: File name too long"):
        export(run, out)
    assert not out.exists()


def test_the_command(run: Path, tmp_path: Path) -> None:
    app = typer.Typer()
    app.command("export")(command)
    out, found = tmp_path / "out", tmp_path / "found.json"
    done = CliRunner().invoke(app, [str(run), str(out), "--json", str(found)])
    assert done.exit_code == 0
    assert done.stdout == f"{out}: 7 tensors, 22 numbers, from the checkpoint of round 20\n"
    wanted = {"run": str(run), "file": str(out), "round": 20, "tensors": 7, "numbers": 22, "bytes": out.stat().st_size}
    wanted |= dict.fromkeys(("epoch", "step", "cause"))
    assert json.loads(found.read_text()) == wanted
    again = CliRunner().invoke(app, [str(run), str(out), "--force", "--json", "-"])
    assert json.loads(again.stdout) == wanted
    assert isinstance(CliRunner().invoke(app, [str(run), str(out)]).exception, StrettoError)
