"""Does every recipe survive a long series of seeded faults without losing samples?

Recipes take turns until the time is over, each in a run of some minutes in which `--faults` kills and pauses processes,
one every 15 s on average. Recorded for each run: completion, number of rounds, failures, how often each sample was
counted, the accuracy beside that of an undisturbed run, and the memory of its workers. The folder of a failed run is
kept.

    python -m benchmarks soak --minutes 30
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import save
from benchmarks.pace import ROOT
from stretto.events import Event, read_events

QUESTION = "runs of every family of recipes under seeded kills and pauses: completed, and nothing lost?"
MINUTES = 30.0
EVERY_S = 15.0
WORKERS = 3
FAILURE_TIMEOUT_S, PAUSE_S = 4, 6
SCRIPT = ROOT / "benchmarks" / "scripts" / "failing_worker.py"
RECIPES = (
    "allreduce",
    "local_sgd(every=4)",
    "power_sgd(rank=2)",
    "gradient_sharing(tau=0.001)",
    "async_sgd(shards=2)",
    "stale_synchronous(bound=4, shards=2)",
    "allreduce over a server",
)
OVER_A_SERVER = " over a server"
RUN_S, STEP_S, STEPS_PER_EPOCH = 120.0, 0.1, 32
"""Approximate seconds of an undisturbed run, seconds that each step waits, and steps of an epoch."""
SHORTEST_S = 30.0
TIME_LIMIT_FACTOR = 6.0
"""A run that takes this multiple of the expected time is stopped, and has failed."""
POLL_S = 2.0
WARM_UP_S = 20.0
"""Seconds at the beginning of a process in which its memory is not counted."""
STATE = re.compile(r"state ([0-9a-f]{16})")


@dataclass(frozen=True)
class Case:
    """A recipe, its command-line options, and the faults of its processes."""

    name: str

    @property
    def options(self) -> list[str]:
        """Options of `stretto run` for the recipe."""
        recipe = self.name.removesuffix(OVER_A_SERVER)
        return ["--recipe", recipe] + (["--servers", "2"] if recipe != self.name else [])

    @property
    def has_server(self) -> bool:
        """True if the recipe has servers that can be killed."""
        return "shards" in self.name or self.name.endswith(OVER_A_SERVER)

    @property
    def agrees(self) -> bool:
        """True if the workers hold the same bits at the end."""
        return not self.name.startswith(("async", "stale"))

    @property
    def faults(self) -> str:
        """Faults that together occur every 15 s on average."""
        worker = "kill worker every 30s; kill server every 60s" if self.has_server else "kill worker every 20s"
        return f"{worker}; kill coordinator every 90s; pause worker for {PAUSE_S}s every 180s"


@dataclass(frozen=True)
class Sample:
    """The resident memory of a process at a moment."""

    pid: int
    at: float
    rss: int


@dataclass(frozen=True)
class Memory:
    """Median megabytes of the longest-running worker in the first and the last third of its time, and the maximum."""

    life_s: float
    early_mb: float
    late_mb: float
    most_mb: float


@dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    completed: bool
    why: str
    """Reason why it did not complete."""
    seconds: float
    rounds: int
    struck: int
    deaths: Mapping[str, int]
    regrouped: int
    passes: int
    seen: Mapping[str, int]
    equal: bool | None
    accuracy: float | None
    memory: Memory | None

    @property
    def good(self) -> bool:
        """True if nothing is wrong except possibly the accuracy, which is compared separately."""
        return self.completed and not self.seen["twice"] and not self.seen["never"] and self.equal is not False


def run(minutes: float | None = None) -> dict[str, Any]:
    """Run recipes until the time is over, print the results and write them to the results folder."""
    print(f"soak: {QUESTION}", flush=True)
    whole_s = 60 * (minutes or MINUTES)
    run_s = max(SHORTEST_S, min(RUN_S, whole_s / len(RECIPES)))
    folder = Path(tempfile.mkdtemp(prefix="stretto-soak-"))
    began, undisturbed = time.monotonic(), dict[str, float | None]()
    records: list[dict[str, Any]] = []
    for number, name in enumerate(cycle(RECIPES)):
        if time.monotonic() - began >= whole_s:
            break
        case = Case(name)
        if name not in undisturbed:
            undisturbed[name] = _run_case(case, folder / f"{number:02d}-calm", run_s, None).accuracy
        records.append(_record_run(case, number, folder, run_s, undisturbed[name]))
    record = {
        "question": QUESTION,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "every_s": EVERY_S,
        "workers": WORKERS,
        "failure_timeout_s": FAILURE_TIMEOUT_S,
        "script": f"{SCRIPT.name} --pause {STEP_S}",
        "passes": passes(run_s),
        "runs": records,
    }
    print(f"  kept in {save('soak', record, trial=minutes is not None and minutes < MINUTES)}")
    if not any(folder.iterdir()):
        folder.rmdir()
    return record


def passes(seconds: float) -> int:
    """Return the number of epochs that take about `seconds` without faults."""
    return max(2, round(seconds / (STEPS_PER_EPOCH * STEP_S * 1.3)))


def _record_run(case: Case, number: int, place: Path, run_s: float, undisturbed: float | None) -> dict[str, Any]:
    folder = place / f"{number:02d}-{re.sub(r'[^a-z]+', '-', case.name).strip('-')}"
    outcome = _run_case(case, folder, run_s, number)
    if outcome.good:
        shutil.rmtree(folder)
    print(f"  {number:2} {'ok  ' if outcome.good else 'FAIL'} {case.name}: {_shown(outcome, undisturbed)}", flush=True)
    if not outcome.good:
        print(f"     {outcome.why or 'see'} {folder}", flush=True)
    about = {"run": number, "recipe": case.name, "faults": case.faults, "seed": number}
    return {**about, **asdict(outcome), "good": outcome.good, "undisturbed": undisturbed}


def _shown(outcome: Outcome, undisturbed: float | None) -> str:
    seen, memory = outcome.seen, outcome.memory
    died = ", ".join(f"{count} {kind}" for kind, count in outcome.deaths.items()) or "nobody"
    facts = [f"{outcome.seconds:.0f} s, {outcome.rounds} rounds, {outcome.passes} passes", f"struck {outcome.struck}"]
    facts += [f"died: {died}", f"twice {seen['twice']}, never {seen['never']}, made up {seen['recovered_samples']}"]
    facts.append(f"accuracy {outcome.accuracy} (undisturbed {undisturbed})")
    if memory is not None:
        facts.append(f"{memory.early_mb:.0f} to {memory.late_mb:.0f} MB in {memory.life_s:.0f} s")
    return "; ".join(facts) + ("" if outcome.equal is not False else "; REPLICAS DIFFER")


def _run_case(case: Case, folder: Path, run_s: float, seed: int | None) -> Outcome:
    """Run a case once; without a seed there are no faults and no waits."""
    disturbed = seed is not None
    count = passes(run_s)
    command = [sys.executable, "-m", "stretto.cli", "run", "-n", str(WORKERS), *case.options]
    command += [
        "--threads",
        "1",
        "--failure-timeout",
        f"{FAILURE_TIMEOUT_S}s",
        "--restarts",
        "1000",
        "--checkpoint-every",
        "5s",
    ]
    command += ["--output", "all", "--out", str(folder / "run")]
    command += ["--faults", case.faults, "--seed", str(seed)] if disturbed else []
    command += [str(SCRIPT), "--epochs", str(count), "--pause", str(STEP_S if disturbed else 0.0)]
    folder.mkdir()
    (folder / "command").write_text(json.dumps(command[1:]) + "\n")
    began = time.monotonic()
    with (folder / "out").open("wb") as out:
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
        samples, late = _wait(launcher, began + TIME_LIMIT_FACTOR * run_s + 60)
    seconds = time.monotonic() - began
    outcome = outcome_of(folder, count, launcher.returncode, late, seconds, samples, case.agrees)
    if not disturbed and outcome.good:
        shutil.rmtree(folder)
    return outcome


def _wait(launcher: subprocess.Popen[bytes], limit: float) -> tuple[list[Sample], bool]:
    """Return the memory samples of the workers until the run ends, and True if it was stopped at the limit."""
    samples: list[Sample] = []
    parent = psutil.Process(launcher.pid)
    while True:
        try:
            launcher.wait(timeout=POLL_S)
            return samples, False
        except subprocess.TimeoutExpired:
            samples += _sample_memory(parent)
        if time.monotonic() > limit:
            _end(launcher)
            return samples, True


def _sample_memory(parent: psutil.Process) -> list[Sample]:
    samples: list[Sample] = []
    try:
        for child in parent.children():
            if "stretto.launcher.worker_main" in child.cmdline():
                samples.append(Sample(child.pid, time.monotonic(), child.memory_info().rss))
    except psutil.Error:
        pass  # a process has just ended
    return samples


def _end(launcher: subprocess.Popen[bytes]) -> None:
    launcher.terminate()
    try:
        launcher.wait(timeout=20)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def outcome_of(
    folder: Path, asked: int, code: int, late: bool, seconds: float, samples: Sequence[Sample], agrees: bool
) -> Outcome:
    """Return the outcome of a run from its folder."""
    log = folder / "run" / "events.jsonl"
    events = list(read_events(log)) if log.exists() else []
    audits = {one["epoch"]: one["sample_counts"] for one in events if one["event"] == "epoch"}
    accuracy = [one["metrics"]["test_accuracy"] for one in events if one["event"] == "evaluation"]
    states = set(STATE.findall((folder / "out").read_text(errors="replace")))
    whole = len(audits) == asked and all(audits.values())
    why = f"ended after {seconds:.0f} s" if late else f"exit code {code}" if code else f"{len(audits)} passes"
    return Outcome(
        completed=code == 0 and not late and whole,
        why="" if code == 0 and not late and whole else why,
        seconds=round(seconds, 1),
        rounds=max((one["rounds"] for one in events if "rounds" in one), default=0),
        struck=sum(one["event"] == "fault_injected" for one in events),
        deaths=count_failures(events),
        regrouped=sum(one["event"] == "generation_changed" for one in events),
        passes=len(audits),
        seen=seen(list(audits.values())),
        equal=len(states) == 1 if agrees and states else None,
        accuracy=accuracy[-1] if accuracy else None,
        memory=memory_growth(samples),
    )


def count_failures(events: Sequence[Event]) -> dict[str, int]:
    """Return the number of failures of each kind of process."""
    failed = (event["process"] for event in events if event["event"] == "membership" and event.get("what") == "failed")
    return dict(sorted(Counter(process.split()[0] for process in failed).items()))


def seen(audits: Sequence[Mapping[str, int] | None]) -> dict[str, int]:
    """Return the sample counts, summed over all epochs."""
    names = ("once", "twice", "never", "dropped", "recovered_samples")
    return {name: sum((one or {}).get(name, 0) for one in audits) for name in names}


def memory_growth(samples: Sequence[Sample]) -> Memory | None:
    """Return the memory of the process with the longest span of samples; None if the span is too short."""
    by_pid: dict[int, list[Sample]] = {}
    for one in samples:
        by_pid.setdefault(one.pid, []).append(one)
    longest = max(by_pid.values(), key=lambda span: span[-1].at - span[0].at, default=[])
    warm = [one for one in longest if one.at - longest[0].at >= WARM_UP_S]
    if len(warm) < 6:
        return None
    third = len(warm) // 3
    early, late = (statistics.median(one.rss for one in part) / 1e6 for part in (warm[:third], warm[-third:]))
    most = max(one.rss for one in warm) / 1e6
    return Memory(round(longest[-1].at - longest[0].at, 1), round(early, 1), round(late, 1), round(most, 1))
