"""Which failures do runs survive? Each family of recipes, process, phase and signal, in real processes.

Each case is a run of its own. It survives if it ends with exit code 0, every sample of every epoch was counted exactly
once, by the record and, where the recipe allows it, by a table in the model, the workers at the end hold the same bits
(where the recipe promises that), and the accuracy is within a point of that of undisturbed runs with several seeds: a
failure changes the order of samples as another seed does, and that alone changes the accuracy. tests/test_recovery.py
runs some of these cases.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.counting_model import counted_epochs, unit_of
from benchmarks.measure import RESULTS, now, save
from stretto.events import read_events

QUESTION = "a process is struck: does the run go on, and is the result the same?"
SCRIPT = Path(__file__).with_name("scripts") / "failing_worker.py"
WORKERS = 3
LIMIT_S = 150
TIMEOUT_EXIT_CODE = 124
"""Exit code of a run stopped at the limit, as `timeout` has it."""
CONCURRENT = 3
"""Cases that run concurrently: they mostly wait."""
ALLOWED_LOSS = 0.01
"""Allowed loss of accuracy against undisturbed runs: a point."""
SEEDS = range(3)
FEW_EPOCHS, EPOCHS = 4, 12
"""Enough epochs to continue after a failure, and enough to learn the task so well that accuracies can be compared."""
RECIPES = ("allreduce", "local_sgd(every=4)", "power_sgd(rank=2)", "gradient_sharing(tau=0.001)", "async_sgd(shards=2)")
PHASES = ("start", "computing", "exchanging", "evaluating", "checkpointing", "epoch end")
SIGNALS = ("KILL", "STOP", "TERM")
WHO = ("worker 0", "another worker", "two at once", "server", "coordinator")
STATE = re.compile(r"state ([0-9a-f]{16})")
TRAINED = 1200
"""Samples of an epoch of the script."""


@dataclass(frozen=True)
class Case:
    """One failure. Servers and the coordinator get their signal from the launcher, at a fixed time of the run."""

    recipe: str
    who: str
    phase: str
    signal: str

    @property
    def options(self) -> list[str]:
        """Options of `stretto run`."""
        if self.who in ("server", "coordinator"):
            when = {"start": 2, "computing": 6, "exchanging": 7, "evaluating": 8, "checkpointing": 9, "epoch end": 10}
            return ["--faults", f"kill {self.who} at {when[self.phase]}s"]
        return []

    @property
    def script_arguments(self) -> list[str]:
        """Arguments of the script."""
        numbers = {"worker 0": "0", "another worker": "1", "two at once": "0,2"}
        if self.who not in numbers:
            return []
        who = "0" if self.phase == "evaluating" and self.who == "another worker" else numbers[self.who]
        return ["--strike", f"{who}:{self.signal}:{self.phase}"]

    def __str__(self) -> str:
        return f"{self.recipe}: {self.who}, {self.phase}, SIG{self.signal}"


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    code: int
    once: bool
    equal: bool
    accuracy: float
    deaths: int
    log_end: str

    @property
    def survived(self) -> bool:
        """True if nothing is wrong except possibly the accuracy, which is compared separately."""
        return self.code == 0 and self.once and self.equal


def cases(seed: int = 0) -> list[Case]:
    """Return all sensible cases in random order, so that any first part of them covers everything evenly."""
    every = [Case(*case) for case in itertools.product(RECIPES, WHO, PHASES, SIGNALS)]
    selected = [case for case in every if _is_sensible(case)]
    random.Random(seed).shuffle(selected)
    return selected


def _is_sensible(case: Case) -> bool:
    if case.who == "server" and "shards" not in case.recipe:
        return False
    return case.signal == "KILL" or case.who not in ("server", "coordinator")


def run_case(
    case: Case | None,
    recipe: str,
    folder: Path,
    environment: Mapping[str, str],
    epochs: int = FEW_EPOCHS,
    seed: int = 0,
) -> Outcome:
    """Run a case, or an undisturbed run if `case` is None."""
    options = ["--recipe", recipe, "--failure-timeout", "4s", "--restarts", "3", "--checkpoint-every", "1s"]
    options += ["--seed", str(seed), "--output", "all", "--out", str(folder), *(case.options if case else [])]
    command = [sys.executable, "-m", "stretto.cli", "run", "-n", str(WORKERS), *options, str(SCRIPT)]
    asked = [*command, "--epochs", str(epochs), *(case.script_arguments if case else [])]
    asked += ["--count", str(folder.with_suffix(".counts"))] if unit_of(recipe) is not None else []
    try:
        done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as late:
        return _outcome(TIMEOUT_EXIT_CODE, folder, "", f"not over after {late.timeout:g} s", recipe, epochs)
    return _outcome(done.returncode, folder, done.stdout, done.stderr, recipe, epochs)


def _outcome(code: int, folder: Path, out: str, log_text: str, recipe: str, epochs: int) -> Outcome:
    log = folder / "events.jsonl"
    events = list(read_events(log)) if log.exists() else []
    seen = [event["sample_counts"] for event in events if event["event"] == "epoch"]
    states = set(STATE.findall(out))
    accuracy = [event["metrics"]["test_accuracy"] for event in events if event["event"] == "evaluation"]
    failures = sum(event["event"] == "membership" and event.get("what") == "failed" for event in events)
    once = bool(seen) and all(not event["twice"] and not event["never"] for event in seen)
    if (unit := unit_of(recipe)) is not None:
        try:
            once &= counted_epochs(folder.with_suffix(".counts"), unit) == [{1: TRAINED}] * epochs
        except ValueError as error:
            once, log_text = False, f"{log_text}\n{error}"
    return Outcome(
        code, once, "async" in recipe or len(states) == 1, accuracy[-1] if accuracy else 0.0, failures, log_text[-600:]
    )


def run(starts: int | None = None) -> dict[str, Any]:
    """Run the given number of missing cases (by default all), print the results and store them.

    The record is a trial until it is complete; the next call continues it.
    """
    print(f"survival: {QUESTION}", flush=True)
    before = _load_trial()
    records = {_case_of(one): one for one in before.get("cases", ())}
    missing = [case for case in cases() if case not in records][:starts]
    undisturbed: dict[str, list[float]] = before.get("undisturbed", {})
    with ThreadPoolExecutor(CONCURRENT) as pool, tempfile.TemporaryDirectory(prefix="stretto-survival-") as place:
        for recipe in sorted({case.recipe for case in missing} - undisturbed.keys()):
            accuracies = pool.map(
                lambda seed, recipe=recipe: _in_folder(None, recipe, Path(place), seed).accuracy, SEEDS
            )
            undisturbed[recipe] = list(accuracies)
        running = {pool.submit(_in_folder, case, case.recipe, Path(place)): case for case in missing}
        try:
            for done in as_completed(running):
                case = running[done]
                records[case] = _record(case, done.result(), min(undisturbed[case.recipe]))
                _write(undisturbed, records)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    record = _write(undisturbed, records)
    print(f"  {len(records)} of {len(cases())} cases, {sum(one['survived'] for one in records.values())} survived")
    return record


def _in_folder(case: Case | None, recipe: str, folder: Path, seed: int = 0) -> Outcome:
    with tempfile.TemporaryDirectory(dir=folder) as folder:
        return run_case(case, recipe, Path(folder) / "run", {**os.environ, "OMP_NUM_THREADS": "1"}, EPOCHS, seed)


def _record(case: Case, outcome: Outcome, undisturbed: float) -> dict[str, Any]:
    """Print the result of a case, and return its record."""
    less = undisturbed - outcome.accuracy
    good = outcome.survived and less <= ALLOWED_LOSS
    print(f"  {'ok  ' if good else 'FAIL'} {case}: {_shown(outcome, less)}", flush=True)
    record = {name: value for name, value in asdict(outcome).items() if name != "log_end"}
    return {**asdict(case), **record, "less": less, "survived": good, "taken": now()}


def _load_trial() -> dict[str, Any]:
    """Return the record of the incomplete trial, if there is one."""
    path = RESULTS / "survival-trial.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _case_of(record: Mapping[str, Any]) -> Case:
    return Case(*(record[field.name] for field in fields(Case)))


def _write(undisturbed: Mapping[str, Sequence[float]], records: Mapping[Case, Mapping[str, Any]]) -> dict[str, Any]:
    every = cases()
    record = {
        "question": QUESTION,
        "workers": WORKERS,
        "worse": ALLOWED_LOSS,
        "of": len(every),
        "undisturbed": undisturbed,
        "cases": [records[case] for case in every if case in records],
    }
    is_whole = len(records) == len(every)
    save("survival", record, trial=not is_whole)
    if is_whole:
        (RESULTS / "survival-trial.json").unlink(missing_ok=True)
    return record


def _shown(outcome: Outcome, less: float) -> str:
    facts = [f"accuracy {outcome.accuracy:.3f} ({-less:+.3f})", f"{outcome.deaths} deaths"]
    wrong = [(outcome.code != 0, f"exit code {outcome.code}"), (not outcome.once, "not once each")]
    facts += [text for is_so, text in [*wrong, (not outcome.equal, "replicas differ")] if is_so]
    return ", ".join(facts) + (f"\n{outcome.log_end}" if outcome.code else "")
