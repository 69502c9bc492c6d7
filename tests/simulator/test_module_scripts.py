"""A module of a package is simulated as `python -m` would run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.cli.main import command

TRAINS = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import stretto
from .words import WORD
from pkg import words

torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(16, 2)), batch_size=4)
loader = stretto.distribute(model, optimizer, loader)
for (x,) in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
print(__name__, __package__, __spec__.name, sys.argv, words.WORD is WORD)
"""


def test_a_module_is_simulated_as_python_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "words.py").write_text("WORD = 'found'")
    (tmp_path / "pkg" / "train.py").write_text(TRAINS)
    line = ["simulate", "-n", "2", "--step-time", "1ms", "--quiet", "--out", "here", "-m", "pkg.train", "-n"]
    assert command(line) == 0
    assert capfd.readouterr().out == (
        f"__main__ pkg pkg.train ['{tmp_path}/here/.files/tree{tmp_path}/pkg/train.py', '-n'] True\n"
    )
    asked = json.loads(Path("here/run.json").read_text())
    assert (asked["script"], asked["module"], asked["args"]) == ("pkg.train", True, ["-n"])
