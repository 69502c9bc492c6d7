"""What survives: every family of recipes, whoever dies, in whatever phase, by whatever signal, in real processes.

Each case is a run of its own. It survives when it ends with exit code 0, every sample of every pass was counted
exactly once, the workers that were there at the end hold the same bits (where the recipe promises that), and the
accuracy is within a point of the undisturbed runs', of which there are some with other seeds: a death changes the order
of samples as another seed does, and that alone moves the accuracy. The laws of tests/test_survives.py are some of these
cases.
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

from benchmarks.measure import RESULTS, now, save
from stretto.events import read_events

QUESTION = "a process is struck: does the run go on, and is the result the same?"
SCRIPT = Path(__file__).with_name("scripts") / "mortal.py"
WORKERS = 3
LIMIT_S = 150
LATE = 124
"""The exit code of a run that was not over by then, as `timeout` has it."""
AT_ONCE = 3
"""Cases that run beside each other: they mostly wait."""
WORSE = 0.01
"""How much lower the accuracy may be than that of the undisturbed runs: a point."""
SEEDS = range(3)
FEW_EPOCHS, EPOCHS = 4, 12
"""Enough to go on after a death, and to learn the task so well that accuracies can be compared."""
RECIPES = ("allreduce", "local_sgd(every=4)", "power_sgd(rank=2)", "gradient_sharing(tau=0.001)", "async_sgd(shards=2)")
PHASES = ("start", "computing", "exchanging", "evaluating", "checkpointing", "epoch end")
SIGNALS = ("KILL", "STOP", "TERM")
WHO = ("worker 0", "another worker", "two at once", "server", "coordinator")
STATE = re.compile(r"state ([0-9a-f]{16})")


@dataclass(frozen=True)
class Case:
    """One way to be struck. Servers and the coordinator are struck from outside, at a moment of the run."""

    recipe: str
    who: str
    phase: str
    signal: str

    @property
    def options(self) -> list[str]:
        """What is typed for it."""
        if self.who in ("server", "coordinator"):
            when = {"start": 2, "computing": 6, "exchanging": 7, "evaluating": 8, "checkpointing": 9, "epoch end": 10}
            return ["--faults", f"kill {self.who} at {when[self.phase]}s"]
        return []

    @property
    def strike(self) -> list[str]:
        """What the script is told."""
        numbers = {"worker 0": "0", "another worker": "1", "two at once": "0,2"}
        if self.who not in numbers:
            return []
        who = "0" if self.phase == "evaluating" and self.who == "another worker" else numbers[self.who]
        return ["--strike", f"{who}:{self.signal}:{self.phase}"]

    def __str__(self) -> str:
        """What a person calls it."""
        return f"{self.recipe}: {self.who}, {self.phase}, SIG{self.signal}"


@dataclass(frozen=True)
class Outcome:
    """How a run has ended."""

    code: int
    once: bool
    equal: bool
    accuracy: float
    deaths: int
    told: str

    @property
    def survived(self) -> bool:
        """Whether all of it is as it should be, but for the accuracy, which is compared."""
        return self.code == 0 and self.once and self.equal


def cases(seed: int = 0) -> list[Case]:
    """All that make sense, in an order that is drawn: any beginning of it covers everything evenly."""
    every = [Case(*one) for one in itertools.product(RECIPES, WHO, PHASES, SIGNALS)]
    kept = [one for one in every if _makes_sense(one)]
    random.Random(seed).shuffle(kept)
    return kept


def _makes_sense(case: Case) -> bool:
    if case.who == "server" and "shards" not in case.recipe:
        return False
    return case.signal == "KILL" or case.who not in ("server", "coordinator")


def one(
    case: Case | None,
    recipe: str,
    folder: Path,
    environment: Mapping[str, str],
    epochs: int = FEW_EPOCHS,
    seed: int = 0,
) -> Outcome:
    """Run a case, or an undisturbed run when there is none."""
    options = ["--recipe", recipe, "--failure-timeout", "4s", "--restarts", "3", "--checkpoint-every", "1s"]
    options += ["--seed", str(seed), "--output", "all", "--out", str(folder), *(case.options if case else [])]
    command = [sys.executable, "-m", "stretto.cli", "run", "-n", str(WORKERS), *options, str(SCRIPT)]
    asked = [*command, "--epochs", str(epochs), *(case.strike if case else [])]
    try:
        done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as late:
        return _outcome(LATE, folder, "", f"not over after {late.timeout:g} s", "async" in recipe)
    return _outcome(done.returncode, folder, done.stdout, done.stderr, "async" in recipe)


def _outcome(code: int, folder: Path, out: str, said: str, differ: bool) -> Outcome:
    log = folder / "events.jsonl"
    events = list(read_events(log)) if log.exists() else []
    seen = [event["sample_counts"] for event in events if event["event"] == "epoch"]
    states = set(STATE.findall(out))
    accuracy = [event["metrics"]["test_accuracy"] for event in events if event["event"] == "evaluation"]
    gone = sum(event["event"] == "membership" and event.get("what") == "failed" for event in events)
    once = bool(seen) and all(not event["twice"] and not event["never"] for event in seen)
    return Outcome(code, once, differ or len(states) == 1, accuracy[-1] if accuracy else 0.0, gone, said[-600:])


def run(starts: int | None = None) -> dict[str, Any]:
    """Take so many cases that have not been taken (all of them otherwise), print them, keep them.

    What was taken is a trial until it is all: the next call goes on from it.
    """
    print(f"survival: {QUESTION}", flush=True)
    before = _before()
    taken = {_case_of(one): one for one in before.get("cases", ())}
    missing = [case for case in cases() if case not in taken][:starts]
    undisturbed: dict[str, list[float]] = before.get("undisturbed", {})
    with ThreadPoolExecutor(AT_ONCE) as pool, tempfile.TemporaryDirectory(prefix="stretto-survival-") as place:
        for recipe in sorted({case.recipe for case in missing} - undisturbed.keys()):
            calm = pool.map(lambda seed, recipe=recipe: _in_folder(None, recipe, Path(place), seed).accuracy, SEEDS)
            undisturbed[recipe] = list(calm)
        running = {pool.submit(_in_folder, case, case.recipe, Path(place)): case for case in missing}
        try:
            for done in as_completed(running):
                case = running[done]
                taken[case] = _kept(case, done.result(), min(undisturbed[case.recipe]))
                _write(undisturbed, taken)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    record = _write(undisturbed, taken)
    print(f"  {len(taken)} of {len(cases())} cases, {sum(one['survived'] for one in taken.values())} survived")
    return record


def _in_folder(case: Case | None, recipe: str, place: Path, seed: int = 0) -> Outcome:
    with tempfile.TemporaryDirectory(dir=place) as folder:
        return one(case, recipe, Path(folder) / "run", {**os.environ, "OMP_NUM_THREADS": "1"}, EPOCHS, seed)


def _kept(case: Case, outcome: Outcome, undisturbed: float) -> dict[str, Any]:
    """What is kept of a case; it is printed."""
    less = undisturbed - outcome.accuracy
    good = outcome.survived and less <= WORSE
    print(f"  {'ok  ' if good else 'FAIL'} {case}: {_shown(outcome, less)}", flush=True)
    kept = {name: value for name, value in asdict(outcome).items() if name != "told"}
    return {**asdict(case), **kept, "less": less, "survived": good, "taken": now()}


def _before() -> dict[str, Any]:
    """What was taken of a matrix that is not whole yet."""
    path = RESULTS / "survival-trial.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _case_of(kept: Mapping[str, Any]) -> Case:
    return Case(*(kept[field.name] for field in fields(Case)))


def _write(undisturbed: Mapping[str, Sequence[float]], taken: Mapping[Case, Mapping[str, Any]]) -> dict[str, Any]:
    every = cases()
    record = {
        "question": QUESTION,
        "workers": WORKERS,
        "worse": WORSE,
        "of": len(every),
        "undisturbed": undisturbed,
        "cases": [taken[case] for case in every if case in taken],
    }
    is_whole = len(taken) == len(every)
    save("survival", record, trial=not is_whole)
    if is_whole:
        (RESULTS / "survival-trial.json").unlink(missing_ok=True)
    return record


def _shown(outcome: Outcome, less: float) -> str:
    facts = [f"accuracy {outcome.accuracy:.3f} ({-less:+.3f})", f"{outcome.deaths} deaths"]
    wrong = [(outcome.code != 0, f"exit code {outcome.code}"), (not outcome.once, "not once each")]
    facts += [text for is_so, text in [*wrong, (not outcome.equal, "replicas differ")] if is_so]
    return ", ".join(facts) + (f"\n{outcome.told}" if outcome.code else "")
