"""The fine-tuning examples under `stretto run`, as processes (`make test-trainers`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_runs import ALONE, LIMIT_S

for library in ("transformers", "trl", "peft", "lightning"):
    pytest.importorskip(library)
pytestmark = pytest.mark.trainers

FOLDER = Path(__file__).resolve().parents[2] / "examples/libraries"


@pytest.mark.parametrize(
    ("script", "options", "metric", "least", "most"),
    [
        ("lightning_digits.py", ["--epochs", "10"], "test_accuracy", 0.93, 1.0),
        ("lora.py", ["--steps", "12", "--samples", "200"], "'eval_loss'", 0.0, 5.2),
    ],
)
def test_an_example_learns_with_two_workers(
    script: str, options: list[str], metric: str, least: float, most: float, tmp_path: Path
) -> None:
    out, run = tmp_path / "out", tmp_path / "run"
    command = [sys.executable, "-m", "stretto.cli", "run", "-n", "2", "--threads", "1", "--out", str(run)]
    command += [str(FOLDER / script), *options, "--out", str(out)]
    done = subprocess.run(
        command, env=os.environ | ALONE, capture_output=True, text=True, timeout=LIMIT_S, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(rf"{metric}:? '?([\d.]+)", done.stdout + done.stderr)
    assert least <= float(found[-1]) <= most
    assert (run / "final.safetensors").is_file()
    assert list(out.rglob("adapter_model.safetensors" if script == "lora.py" else "*.ckpt"))
