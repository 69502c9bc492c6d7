"""Gain and cost of overlap: exchanges in the background against exchanges that block the worker.

Two workers train the MNIST example with Downpour SGD through a network namespace whose loopback is limited to a given
rate, once a fast one, once one at which an exchange takes about as long as the computing. Needs root, tc and MNIST
(STRETTO_DATA).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Ratio, Spread, save
from benchmarks.pace import ROOT

QUESTION = "samples per second of downpour(every=8) with overlap against without, 2 workers"
RATES = {"loopback as it is": None, "1 Gbit/s": "1gbit", "200 Mbit/s": "200mbit"}
STARTS = 3
SCRIPT = ("examples/mnist.py", "--samples", "6400", "--epochs", "2")
SIDES = {True: "downpour(every=8, overlap=True)", False: "downpour(every=8)"}
LIMIT_S = 300.0


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all rates, print the figures and write them to the results."""
    _refuse_unless_able()
    print(f"overlap: {QUESTION}", flush=True)
    cases = {name: _case(name, rate, starts or STARTS) for name, rate in RATES.items()}
    record = {"question": QUESTION, "script": " ".join(SCRIPT), "starts": starts or STARTS, "cases": cases}
    print(f"  kept in {save('overlap', record, trial=starts is not None)}")
    return record


def _refuse_unless_able() -> None:
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in ("unshare", "tc", "ip")):
        raise SystemExit("overlap: needs root, unshare, ip and tc to limit the rate of a separate loopback")


def _case(name: str, rate: str | None, starts: int) -> dict[str, Any]:
    records_by_side: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for start in range(starts):
        for overlap in (True, False) if start % 2 else (False, True):
            records_by_side[overlap].append(_train(SIDES[overlap], rate))
    ratio = Ratio.of(*([[1 / one["samples_per_second"]] for one in records_by_side[side]] for side in (True, False)))
    sides = {SIDES[overlap]: _side(records) for overlap, records in records_by_side.items()}
    print(f"  {name:<18} {ratio} of without; " + "; ".join(f"{side}: {_shown(one)}" for side, one in sides.items()))
    return {"ratio": ratio.record(), "sides": sides}


def _side(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "samples_per_s": Spread.of([one["samples_per_second"] for one in records]).record(),
        "staleness": statistics.median(one["staleness"]["mean"] for one in records),
        "accuracy": statistics.median(one["metrics"]["test_accuracy"] for one in records),
    }


def _shown(side: dict[str, Any]) -> str:
    speed = side["samples_per_s"]["median"]
    return f"{speed:.0f} samples/s, staleness {side['staleness']:.2f}, accuracy {side['accuracy']:.3f}"


def _train(recipe: str, rate: str | None) -> dict[str, Any]:
    """Run the script once in its own network namespace, and return the run record."""
    shape = f"tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 200ms && " if rate else ""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "record.json"
        command = [sys.executable, "-m", "stretto.cli", "run", "-n", "2", "--recipe", recipe, "--threads", "1"]
        command += ["--quiet", "--json", str(target), "--out", f"{folder}/run", *SCRIPT]
        inside = ["unshare", "--net", "sh", "-c", f'ip link set lo up && {shape}exec "$@"', "sh", *command]
        done = subprocess.run(inside, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise SystemExit(f"overlap: {recipe} failed:\n{done.stderr[-2000:]}")
        record: dict[str, Any] = json.loads(target.read_text())
        return record
