"""Cost of the newest model, which the first worker copies at the end of each epoch and writes in the background.

`stretto run` of one script on two workers, which keep the model in every other block of epochs: both sides are the same
processes, and take turns. What is left to write of a block is written during the next one, of the other side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import Ratio, Spread, save
from benchmarks.pace import LIMIT_S, ROOT

QUESTION = "epochs per second whose models are kept against not kept, 2 workers"
WANTED = 0.97
WORKERS = 2
CASES = {"0.8 M": 32, "5 M": 16}
"""Model, and steps of an epoch."""
EPOCHS, PAIRS, STARTS = 4, 5, 3
"""Epochs of a block, pairs of blocks of a run, and runs."""
RECIPES = ("allreduce", "local_sgd(every=16)")
SCRIPT = ROOT / "benchmarks" / "scripts" / "epochs.py"


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all cases, print the figures and write them to the results."""
    print(f"last_model: {QUESTION}", flush=True)
    cases = [_case(case, recipe, starts or STARTS) for case in CASES for recipe in RECIPES]
    record = {"question": QUESTION, "wanted": WANTED, "workers": WORKERS, "epochs": EPOCHS, "cases": cases}
    print(f"  kept in {save('last_model', record, trial=starts is not None)}")
    return record


def _case(case: str, recipe: str, starts: int) -> dict[str, Any]:
    taken = [_seconds(case, recipe) for _ in range(starts)]
    ratio = Ratio.of([one["kept"] for one in taken], [one["not kept"] for one in taken])
    epoch_s = Spread.of([s / EPOCHS for one in taken for s in one["not kept"]]).median
    print(f"  {case} {recipe}: {ratio}, epochs of {epoch_s:.3f} s", flush=True)
    return {"case": case, "recipe": recipe, "starts": starts, "ratio": ratio.record(), "epoch_s": epoch_s}


def _seconds(case: str, recipe: str) -> dict[str, list[float]]:
    """Return the seconds of the blocks of a run, by side."""
    with tempfile.TemporaryDirectory(prefix="stretto-last-model-") as folder:
        found = Path(folder) / "seconds.json"
        options = ["-n", str(WORKERS), "--threads", "1", "--recipe", recipe, "--quiet", "--out", f"{folder}/run"]
        arguments = [str(found), case, str(CASES[case]), str(EPOCHS), str(PAIRS)]
        command = [sys.executable, "-m", "stretto.cli", "run", *options, str(SCRIPT), *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, timeout=LIMIT_S, check=True)
        seconds: dict[str, list[float]] = json.loads(found.read_text())
        return seconds
