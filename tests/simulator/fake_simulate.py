"""A fake of `stretto simulate`: takes the same arguments, trains nothing, and writes a run directory by a formula.

The script's argument `--mode` selects: `fail` ends with an error, `torn` without an error and without end events in
the log, `hang` runs until it is terminated, `stubborn` until it is killed. Every start adds a line to `starts`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import sys
from pathlib import Path

SAMPLES = 20_000
STEP_S = 0.001
ROUND_S = 0.0001


def seconds(workers: int, every: int) -> float:
    """Return the virtual seconds of a run: computing is divided, and a round costs more with more workers."""
    steps = SAMPLES / 20 / workers
    return steps * STEP_S + (steps / every * ROUND_S * workers**1.5 if workers > 1 else 0.0)


def accuracy(share: float, workers: int, every: int) -> float:
    """Return the accuracy after a share of the samples, which is lower for many workers with rare averaging."""
    return (0.99 - 0.002 * math.log2(workers) * math.log2(every + 1)) * (1 - math.exp(-8 * share))


def events(workers: int, every: int) -> list[dict[str, object]]:
    """Return the log of one simulation with ten evaluations."""
    whole = seconds(workers, every)
    computing = SAMPLES / 20 / workers * STEP_S
    found: list[dict[str, object]] = [{"event": "start", "t": 0.0, "worker": w} for w in range(workers)]
    for part in range(1, 11):
        at = {"t": whole * part / 10, "worker": 0, "epoch": 1, "step": part, "samples": SAMPLES * part // 10}
        metrics = {"test_accuracy": accuracy(part / 10, workers, every)}
        found.append({"event": "evaluation", **at, "training_s": whole * part / 10, "metrics": metrics})
    found.append({"event": "epoch", **at, "training_s": whole, "sample_counts": {}, "workers": []})
    split = {"computing": computing, "waiting": whole - computing}
    rounds = SAMPLES // 20 // workers // every
    counts = {"step": 10, "rounds": rounds, "bytes_sent": 1000 * rounds, "bytes_received": 0, "time_breakdown": split}
    for w in range(workers):
        updates = [[1, 1, workers - 1, 20]]
        found.append({"event": "update_applied", "t": whole, "worker": w, "updates": updates})
        found.append({"event": "end", "t": whole, "worker": w, "samples": SAMPLES // workers, **counts})
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--workers", "--seed"):
        parser.add_argument(name, type=int, default=1)
    for name in ("--recipe", "--network", "--out", "--mode", "--lr", "--step-time", "--failure-timeout"):
        parser.add_argument(name)
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("script")
    words = [word for word in sys.argv[1:] if word != "--"]
    asked = parser.parse_args(words)
    folder = Path(asked.out)
    with Path("starts").open("a") as starts:
        starts.write(f"{folder.name} {os.getpid()} {os.environ['OMP_NUM_THREADS']}\n")
    folder.mkdir()
    if asked.mode == "fail":
        print("a line before", file=sys.stderr)
        sys.exit("stretto: the loss is not finite\n  got: nan")
    if asked.mode in ("hang", "stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN if asked.mode == "stubborn" else signal.SIG_DFL)
        (folder / "began").touch()
        while True:
            signal.pause()
    found = re.search(r"every=(\d+)", asked.recipe or "")
    log = events(asked.workers, int(found[1]) if found else 1)
    run = {"workers": asked.workers, "recipe": asked.recipe, "seed": asked.seed, "args": words}
    (folder / "run.json").write_text(json.dumps(run))
    kept = [event for event in log if not (asked.mode == "torn" and event["event"] == "end")]
    (folder / "events.jsonl").write_text(
        "".join(json.dumps(event | {"process": f"worker {event['worker']}"}) + "\n" for event in kept)
    )


if __name__ == "__main__":
    main()
