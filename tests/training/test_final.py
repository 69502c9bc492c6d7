"""The trained model is saved at the end, even if the run directory was removed or its disk is full."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from own_disk import own_disk
from safetensors.torch import load_file
from thread_workers import regression, run_workers, sgd, small_net
from torch.utils.data import DataLoader

import stretto
from stretto.checkpoint.final_model import save_final
from stretto.checkpoint.run_files import LocalFiles
from stretto.errors import LogError

LIMIT_S = 240

FULL = """
import json, os, sys, tempfile, torch
from pathlib import Path
from safetensors.torch import load_file
from stretto.checkpoint.storage import Checkpoints, State
from stretto.checkpoint.final_model import save_final
from stretto.checkpoint.run_files import LocalFiles

disk, here = Path(sys.argv[1]), Path(sys.argv[2])
os.chdir(here)
found, notices = [], []
run = disk / "run"
run.mkdir()
checkpoints = Checkpoints(run / "checkpoints", keep=9)
for number in (1, 2, 3, 4):
    checkpoints.write(State({}, {"w": torch.full((25_000,), float(number))}), number)
try:
    with (disk / "junk").open("wb", buffering=0) as junk:
        while True:
            junk.write(bytes(4096))
except OSError:
    pass

def save(size):
    is_there = save_final(LocalFiles(run), {"w": torch.full((size,), 0.5)}, notices.append)
    found.append([is_there, sorted(one.name for one in checkpoints.folder.iterdir())])
    return is_there

assert save(30_000)
assert load_file(run / "final.safetensors")["w"].shape == (30_000,)
assert not save(150_000)
assert load_file(here / "run-final.safetensors")["w"].shape == (150_000,)
assert load_file(run / "final.safetensors")["w"].shape == (30_000,), "nothing was written over it"
assert not save(150_000)
assert (here / "run-final-2.safetensors").exists()
print(json.dumps([found, notices]))
"""


def test_on_a_full_disk_older_checkpoints_are_removed_before_the_model_is_saved_elsewhere(tmp_path: Path) -> None:
    disk, here = tmp_path / "disk", tmp_path / "here"
    disk.mkdir()
    here.mkdir()
    line = [*own_disk("700k", disk), sys.executable, "-c", FULL, str(disk), str(here)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    (first, second, _), notices = json.loads(done.stdout)
    assert first[0]
    assert 0 < len(first[1]) < 4
    assert second == [False, ["round-00000004"]], "the newest whole one stays"
    assert "removed to make room for the trained model: round-00000001" in notices[0]
    assert any(f"the trained model is in {here}/run-final.safetensors" in one for one in notices)


def test_model_that_cannot_be_written_anywhere_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LogError, match="the trained model is lost: .*final.safetensors cannot be written: No space"):
        save_final(LocalFiles(tmp_path), {"w": torch.ones(3)}, lambda _text: None)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_removed_run_directory_is_reported_and_the_model_is_saved(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()

    def work(worker: int) -> None:
        net = small_net()
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(40), batch_size=8))
        for step, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            optimizer.step()
            if step == 0:
                shutil.rmtree(run, ignore_errors=True)

    run_workers(2, work, recipe, run=run)
    assert load_file(run / "final.safetensors").keys() == small_net().state_dict().keys()
    assert capsys.readouterr().err.count(f"the run folder {run} was removed during the run") == 1
