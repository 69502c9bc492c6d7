"""Delay of the other workers by a slow one: 4 workers, worker 1 computes 5 times slower.

Each recipe trains the unchanged examples with `stretto run --stragglers`: samples per second, and seconds to a test
accuracy, evaluations not counted. Four workers share this machine's cores, which alone limits the gain: on 2 cores
three workers that never wait compute no more than 2. So each example is run a second time as on four machines: the
computing of all workers is stretched, by sleeping, so far that the cores are idle most of the time, and worker 1's
five times as far. Other work, above all the exchange, is not stretched.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Ratio, save
from benchmarks.pace import ROOT
from examples import datasets
from stretto.events import read_events

QUESTION = "samples per second and seconds to a test accuracy with 4 workers, one of them 5 times slower"
WANTED, WANTED_BY_SPEED = 2.5, 3.6
"""Wanted samples per second, as a multiple of the barrier's: of recipes that do not wait, and of shares by speed."""
BARRIER = "allreduce"
SHARES = " --shares "
BY_SPEED = tuple(f"{recipe}{SHARES}speed" for recipe in (BARRIER, "local_sgd(every=16)"))
"""Recipes that wait, with shares by speed; 4 workers of which one is 5 times slower have 4 times the speed of even."""
ASYNCHRONOUS = ("soft_sync(collect=4)", "stale_synchronous(bound=4)", "async_sgd")
RECIPES = (BARRIER, "local_sgd(every=16)", *BY_SPEED, *ASYNCHRONOUS)
WORKERS = 4
SLOW_WORKER, TIMES = 1, 5.0
SEEDS = 1
LIMIT_S = 400.0
"""Limit of one run."""
END_S = 30.0


@dataclass(frozen=True)
class Case:
    """A script, and the factor by which the computing of all workers is stretched."""

    script: str
    arguments: Sequence[str]
    target: float
    stretch: float = 1.0

    @property
    def slow(self) -> str:
        """Argument of `stretto run --stragglers`."""
        factors = {worker: self.stretch * (TIMES if worker == SLOW_WORKER else 1) for worker in range(WORKERS)}
        return ",".join(f"{worker}:{factor}" for worker, factor in factors.items() if factor > 1)


MNIST = ("--samples", "20000", "--epochs", "3")
CASES = {
    "digits": Case("digits.py", ("--epochs", "30"), 0.95),
    "digits, as on 4 machines": Case("digits.py", ("--epochs", "30"), 0.95, 10.0),
    "mnist": Case("mnist.py", MNIST, 0.97),
    "mnist, as on 4 machines": Case("mnist.py", MNIST, 0.97, 8.0),
}


@dataclass(frozen=True)
class Outcome:
    """One run. `seconds` is None if the target was not reached; all values are None or empty if the run failed."""

    recipe: str
    seed: int
    samples_per_s: float | None
    seconds: float | None
    accuracy: float | None
    samples_by_worker: Sequence[int]
    computing: Sequence[float]
    """Each worker's share of the time, including its sleep."""
    staleness: float | None
    held_s: float | None
    """Seconds for which the staleness bound made workers wait, summed over workers."""
    failed: str | None = None


def run(starts: int | None = None, only: Sequence[str] = ()) -> dict[str, Any]:
    """Measure all cases, print the figures and write them to the results. `starts` is the number of seeds."""
    print(f"unequal: {QUESTION}", flush=True)
    record = {
        "question": QUESTION,
        "wanted": WANTED,
        "wanted_of": ASYNCHRONOUS,
        "against": BARRIER,
        "workers": WORKERS,
        "slow": {str(SLOW_WORKER): TIMES},
        "seeds": starts or SEEDS,
        "threads": 1,
        "cases": {name: _case(name, CASES[name], range(starts or SEEDS)) for name in only or available_cases()},
    }
    print(f"  kept in {save('unequal', record, trial=starts is not None or bool(only))}")
    return record


def available_cases() -> list[str]:
    """Return the cases whose data is on this machine; print the missing ones."""
    here = scripts()
    return [name for name, case in CASES.items() if case.script in here]


def scripts() -> list[str]:
    """Return the examples whose data is on this machine; print the missing ones."""
    missing = {"digits.py": _without_digits(), "mnist.py": _without_mnist()}
    for script, why in missing.items():
        if why:
            print(f"  without {script.removesuffix('.py')}: {why}", flush=True)
    return [script for script, why in missing.items() if not why]


def _without_digits() -> str:
    return "" if importlib.util.find_spec("sklearn") else 'python -m pip install "stretto[demo]" brings its data'


def _without_mnist() -> str:
    """Return why MNIST is missing: benchmarks download nothing."""
    places = [folder / datasets.TRAIN_IMAGES.name for folder in datasets.folders()]
    return "" if any(one.is_file() for one in places) else f"set STRETTO_DATA; looked for {places[-1]}"


def _case(name: str, case: Case, seeds: Sequence[int]) -> dict[str, Any]:
    print(f"  {name}: --stragglers {case.slow} {' '.join(case.arguments)}, to {case.target:g}", flush=True)
    outcomes = [_report(_race(case, recipe, seed)) for seed in seeds for recipe in _order(seed)]
    found = {recipe: summary(outcomes, recipe) for recipe in RECIPES}
    for recipe in RECIPES[1:]:
        print(f"    {recipe} / {BARRIER}: {_ratio(found[recipe])} of the samples/s{_wanted(recipe)}", flush=True)
    shown = {"script": case.script, "arguments": list(case.arguments), "target": case.target, "slow": case.slow}
    return {**shown, "recipes": found, "runs": [vars(one) for one in outcomes]}


def _order(seed: int) -> Sequence[str]:
    """Return all recipes, in alternating order for successive seeds."""
    return RECIPES if seed % 2 == 0 else RECIPES[::-1]


def _race(case: Case, recipe: str, seed: int) -> Outcome:
    """Run a script once, from the start of its processes to their end."""
    with tempfile.TemporaryDirectory(prefix="stretto-unequal-") as folder:
        run_folder = Path(folder)
        log_end = _run_to_end(_command(case, recipe, seed, run_folder), run_folder / "words.log")
        path = run_folder / "record.json"
        if not path.exists():
            raise SystemExit(f"{recipe} left no record; the end of its log:\n{log_end}")
        record = json.loads(path.read_text())
        if record["failed"]:
            return Outcome(recipe, seed, None, None, None, [], [], None, None, record["failed"])
        return outcome(recipe, seed, record, reached(run_folder / "run" / "events.jsonl", case.target))


def _command(case: Case, recipe: str, seed: int, folder: Path) -> list[str]:
    script = str(ROOT / "examples" / case.script)
    recipe, _, shares = recipe.partition(SHARES)
    shared = ["--shares", shares] if shares else []
    asked = [
        "-n",
        str(WORKERS),
        "--recipe",
        recipe,
        *shared,
        "--stragglers",
        case.slow,
        "--seed",
        str(seed),
        "--threads",
        "1",
    ]
    kept = ["--quiet", "--json", str(folder / "record.json"), "--out", str(folder / "run")]
    return [sys.executable, "-m", "stretto.cli", "run", *asked, *kept, script, *case.arguments]


def _run_to_end(command: Sequence[str], log: Path) -> str:
    """Run the command to its end and return the end of its log. At the time limit end it, with its workers."""
    with log.open("w+b") as log_end:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log_end,
            stderr=log_end,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"{command} took longer than {LIMIT_S:g} s") from None
        finally:
            _end(process)
    return log.read_text(errors="replace")[-2000:]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Terminate a launcher, which ends its workers; the workers of a killed launcher end without it."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()
        process.wait(END_S)


def reached(log: Path, target: float) -> float | None:
    """Return the seconds of training until the first evaluation at the target."""
    evaluations = [event for event in read_events(log) if event["event"] == "evaluation"]
    reached_s = [one["training_s"] for one in evaluations if one["metrics"]["test_accuracy"] >= target]
    return min(reached_s, default=None)


def outcome(recipe: str, seed: int, record: Mapping[str, Any], seconds: float | None) -> Outcome:
    """Return the outcome from a run's record."""
    return Outcome(
        recipe=recipe,
        seed=seed,
        samples_per_s=record["samples_per_second"],
        seconds=seconds,
        accuracy=record["metrics"]["test_accuracy"],
        samples_by_worker=record["samples_by_worker"],
        computing=[one["computing"] / sum(one.values()) for one in record["time_breakdown"]],
        staleness=(record["staleness"] or {}).get("mean"),
        held_s=sum(record["blocked_seconds"]) if record["blocked_seconds"] else None,
    )


def _report(outcome: Outcome) -> Outcome:
    if outcome.failed:
        print(f"    {outcome.recipe:28} failed: {outcome.failed}", flush=True)
        return outcome
    to_target = "-" if outcome.seconds is None else f"{outcome.seconds:.1f}"
    shares = " ".join(f"{share:.0%}" for share in outcome.computing)
    print(
        f"    {outcome.recipe:28} {outcome.samples_per_s or 0:8.0f} samples/s, {to_target:>6} s to the target, "
        f"{outcome.accuracy:.3f} in the end, computing {shares}",
        flush=True,
    )
    return outcome


def summary(outcomes: Sequence[Outcome], recipe: str) -> dict[str, Any]:
    """Return medians over the seeds, and the ratio to the barrier's samples per second with the same seed."""
    mine = [one for one in outcomes if one.recipe == recipe]
    base = {one.seed: one.samples_per_s for one in outcomes if one.recipe == BARRIER}
    pairs = [(one.samples_per_s, base.get(one.seed)) for one in mine]
    both = [([1 / ours], [1 / theirs]) for ours, theirs in pairs if ours and theirs]
    return {
        "samples_per_s": _median([one.samples_per_s for one in mine]),
        "seconds_to_target": _median([one.seconds for one in mine]),
        "reached": sum(one.seconds is not None for one in mine),
        "runs": len(mine),
        "accuracy": _median([one.accuracy for one in mine]),
        "staleness": _median([one.staleness for one in mine]),
        "ratio": Ratio.of(*map(list, zip(*both, strict=True))).record() if both else None,
    }


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median, or None if a value is missing."""
    known = [one for one in values if one is not None]
    return float(statistics.median(known)) if known and len(known) == len(values) else None


def _ratio(found: Mapping[str, Any]) -> str:
    return f"{found['ratio']['median']:.2f}" if found["ratio"] else "-"


def _wanted(recipe: str) -> str:
    wanted = WANTED if recipe in ASYNCHRONOUS else WANTED_BY_SPEED if recipe in BY_SPEED else None
    return f" (wanted at least {wanted:g})" if wanted is not None else ""
