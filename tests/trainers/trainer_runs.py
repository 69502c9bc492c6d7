"""Runs of scripts of other libraries, by `python` and by `stretto run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from stretto.events import read_events

STOCK = Path(__file__).parent / "stock.py"
LIMIT_S = 400
EMBEDDING = "transformer.wte.weight"
ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass
class Trained:
    """Result of a run of the script: its files and its output."""

    code: int
    output: str
    folder: Path
    run: Path

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return found

    @property
    def model(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "final/model.safetensors")

    def apart(self, other: Trained) -> float:
        """Return the distance of two models, as a part of their norm."""
        mine, theirs = (torch.cat([one.flatten() for one in each.model.values()]) for each in (self, other))
        return float((mine - theirs).norm() / theirs.norm())

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in read_events(self.run / "events.jsonl") if one["event"] == kind]


def train(folder: Path, name: str, command: list[str], *script: str, stock: Path = STOCK) -> Trained:
    """Run the script by `python`, or by a command of Stretto."""
    out, run = folder / name, folder / f"run-{name}"
    line = [sys.executable]
    if command:
        line += ["-m", "stretto.cli", "run", "--threads", "1", "--out", str(run), *command]
    done = subprocess.run(
        [*line, str(stock), str(out), *script],
        env=os.environ | ALONE,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0 or command, done.stderr
    return Trained(done.returncode, done.stdout + done.stderr, out, run)
