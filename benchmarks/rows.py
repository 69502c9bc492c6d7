"""A table of a million rows under `async_sgd`: the bytes and the time of a step, with sparse and with dense gradients.

Two workers and two shards, all on this machine. Time is that between the first and the last logged step of a worker,
without the start, and without the reading of the whole table at the end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.measure import Spread, save
from benchmarks.pace import ROOT
from stretto.events import read_events

SCRIPT = Path(__file__).with_name("scripts") / "table.py"
ROWS, WIDTH, BATCH, WORKERS, STARTS = 1_000_000, 32, 256, 2, 3
STEPS = {"sparse": 400, "dense": 16}
"""Steps of all workers together: enough for a second or more."""


def figures(kind: str) -> dict[str, float]:
    """Return the bytes that a step sends and receives, and the steps a second of all workers."""
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        options = [
            "-n",
            str(WORKERS),
            "--recipe",
            "async_sgd(shards=2)",
            "--threads",
            "1",
            "--quiet",
            "--out",
            str(run),
        ]
        sizes = ["--rows", str(ROWS), "--width", str(WIDTH), "--batch", str(BATCH), "--steps", str(STEPS[kind])]
        command = [sys.executable, "-m", "stretto.cli", "run", *options, str(SCRIPT), *sizes]
        subprocess.run([*command, *["--sparse"] * (kind == "sparse")], cwd=ROOT, check=True, timeout=600)
        events = list(read_events(run / "events.jsonl"))
    times: dict[int, list[float]] = defaultdict(list)
    for event in events:
        if event["event"] == "log":
            times[event["worker"]].append(event["t"])
    traffic = [event["traffic"]["updates"] for event in events if event["event"] == "end"]
    return {
        "sent": sum(one[1] for one in traffic) / STEPS[kind],
        "received": sum(one[3] for one in traffic) / STEPS[kind],
        "steps_per_s": sum((len(each) - 1) / (each[-1] - each[0]) for each in times.values() if len(each) > 1),
    }


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure both kinds in turns; print the figures and write them to the results."""
    question = f"bytes and time of a step of a table of {ROWS:,} rows of {WIDTH}, of which a batch uses {BATCH}"
    print(f"rows: {question}", flush=True)
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in STEPS}
    for _ in range(starts or STARTS):
        for kind, each in found.items():
            each.append(figures(kind))
    record: dict[str, Any] = {"question": question}
    for kind, each in found.items():
        medians = {name: Spread.of([one[name] for one in each]).record() for name in each[0]}
        sent, received, rate = (medians[name]["median"] for name in ("sent", "received", "steps_per_s"))
        print(f"    {kind}: {sent:,.0f} bytes sent and {received:,.0f} received a step, {rate:.1f} steps/s", flush=True)
        record[kind] = medians
    print(f"  kept in {save('rows', record, trial=starts is not None)}")
    return record
