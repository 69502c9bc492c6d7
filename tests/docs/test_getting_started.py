"""The script of docs/getting-started.md trains alone what it trained before the lines were added."""

from __future__ import annotations

import contextvars
import re
import runpy
from pathlib import Path

import pytest
import torch
from documents import ROOT, blocks


def test_the_added_lines_change_no_bit_of_what_one_process_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (change,) = blocks(ROOT / "docs" / "getting-started.md", "diff")
    models = []
    for name, other in (("before", "+"), ("after", "-")):
        kept = [line[1:] for line in change.splitlines() if not line.startswith(other)]
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        Path("train.py").write_text(re.sub(r"range\(5\)", "range(2)", "\n".join(kept)))
        contextvars.copy_context().run(runpy.run_path, "train.py", run_name="__main__")
        models.append(torch.load("model.pt", weights_only=True))
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
