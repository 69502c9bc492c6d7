"""A long time of seeded deaths: does every recipe come through, and lose nothing?

Recipes take turns until the time is over, each in a run of some minutes in which processes are killed and paused by
`--faults`, one every 15 s in the mean. Of each run: whether it completed, how many rounds, what died, how often each
sample was counted, the accuracy beside that of an undisturbed run, and the memory of its workers. A run that fails
keeps its folder.

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
PATIENCE_S, PAUSE_S = 4, 6
SCRIPT = ROOT / "benchmarks" / "scripts" / "mortal.py"
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
RUN_S, STEP_S, STEPS_A_PASS = 120.0, 0.1, 32
"""How long a run takes when nobody dies, roughly: a step of the script waits so long."""
SHORTEST_S = 30.0
LATE = 6.0
"""A run that takes so many times as long is ended, and has failed."""
LOOK_S = 2.0
WARM_S = 20.0
"""What a process holds at first is not looked at."""
STATE = re.compile(r"state ([0-9a-f]{16})")
COORDINATOR = -1000


@dataclass(frozen=True)
class Case:
    """A recipe, how it is asked for, and what is done to its processes."""

    name: str

    @property
    def options(self) -> list[str]:
        """What is typed for the recipe."""
        recipe = self.name.removesuffix(OVER_A_SERVER)
        return ["--recipe", recipe] + (["--servers", "2"] if recipe != self.name else [])

    @property
    def has_server(self) -> bool:
        """Whether there are shards to kill."""
        return "shards" in self.name or self.name.endswith(OVER_A_SERVER)

    @property
    def agrees(self) -> bool:
        """Whether its workers hold the same bits at the end."""
        return not self.name.startswith(("async", "stale"))

    @property
    def faults(self) -> str:
        """Faults that together come every 15 s in the mean."""
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
    """Of the worker that lived longest: megabytes in the first third of its life, in the last third, at most."""

    life_s: float
    early_mb: float
    late_mb: float
    most_mb: float


@dataclass(frozen=True)
class Outcome:
    """How a run went."""

    completed: bool
    why: str
    """It has not completed."""
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
        """Whether it is as it should be, but for the accuracy."""
        return self.completed and not self.seen["twice"] and not self.seen["never"] and self.equal is not False


def run(minutes: float | None = None) -> dict[str, Any]:
    """Take the figures, print them, keep them."""
    print(f"soak: {QUESTION}", flush=True)
    whole_s = 60 * (minutes or MINUTES)
    each_s = max(SHORTEST_S, min(RUN_S, whole_s / len(RECIPES)))
    place = Path(tempfile.mkdtemp(prefix="stretto-soak-"))
    began, calm = time.monotonic(), dict[str, float | None]()
    found: list[dict[str, Any]] = []
    for number, name in enumerate(cycle(RECIPES)):
        if time.monotonic() - began >= whole_s:
            break
        case = Case(name)
        if name not in calm:
            calm[name] = _one(case, place / f"{number:02d}-calm", each_s, None).accuracy
        found.append(_taken(case, number, place, each_s, calm[name]))
    record = {
        "question": QUESTION,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "every_s": EVERY_S,
        "workers": WORKERS,
        "failure_timeout_s": PATIENCE_S,
        "script": f"{SCRIPT.name} --pause {STEP_S}",
        "passes": passes(each_s),
        "runs": found,
    }
    print(f"  kept in {save('soak', record, trial=minutes is not None and minutes < MINUTES)}")
    if not any(place.iterdir()):
        place.rmdir()
    return record


def passes(seconds: float) -> int:
    """Passes that take about so long when nobody dies."""
    return max(2, round(seconds / (STEPS_A_PASS * STEP_S * 1.3)))


def _taken(case: Case, number: int, place: Path, each_s: float, calm: float | None) -> dict[str, Any]:
    folder = place / f"{number:02d}-{re.sub(r'[^a-z]+', '-', case.name).strip('-')}"
    outcome = _one(case, folder, each_s, number)
    if outcome.good:
        shutil.rmtree(folder)
    print(f"  {number:2} {'ok  ' if outcome.good else 'FAIL'} {case.name}: {_shown(outcome, calm)}", flush=True)
    if not outcome.good:
        print(f"     {outcome.why or 'see'} {folder}", flush=True)
    told = {"run": number, "recipe": case.name, "faults": case.faults, "seed": number}
    return {**told, **asdict(outcome), "good": outcome.good, "undisturbed": calm}


def _shown(outcome: Outcome, calm: float | None) -> str:
    seen, memory = outcome.seen, outcome.memory
    died = ", ".join(f"{count} {kind}" for kind, count in outcome.deaths.items()) or "nobody"
    facts = [f"{outcome.seconds:.0f} s, {outcome.rounds} rounds, {outcome.passes} passes", f"struck {outcome.struck}"]
    facts += [f"died: {died}", f"twice {seen['twice']}, never {seen['never']}, made up {seen['recovered_samples']}"]
    facts.append(f"accuracy {outcome.accuracy} (undisturbed {calm})")
    if memory is not None:
        facts.append(f"{memory.early_mb:.0f} to {memory.late_mb:.0f} MB in {memory.life_s:.0f} s")
    return "; ".join(facts) + ("" if outcome.equal is not False else "; REPLICAS DIFFER")


def _one(case: Case, folder: Path, each_s: float, seed: int | None) -> Outcome:
    """One run; without a seed it is not disturbed, and as quick as it can be."""
    disturbed = seed is not None
    count = passes(each_s)
    command = [sys.executable, "-m", "stretto.cli", "run", "-n", str(WORKERS), *case.options]
    command += [
        "--threads",
        "1",
        "--failure-timeout",
        f"{PATIENCE_S}s",
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
        samples, late = _watched(launcher, began + LATE * each_s + 60)
    seconds = time.monotonic() - began
    outcome = judged(folder, count, launcher.returncode, late, seconds, samples, case.agrees)
    if not disturbed and outcome.good:
        shutil.rmtree(folder)
    return outcome


def _watched(launcher: subprocess.Popen[bytes], limit: float) -> tuple[list[Sample], bool]:
    """The memory of the workers until the run ends, and whether it had to be ended."""
    samples: list[Sample] = []
    parent = psutil.Process(launcher.pid)
    while True:
        try:
            launcher.wait(timeout=LOOK_S)
            return samples, False
        except subprocess.TimeoutExpired:
            samples += _looked_at(parent)
        if time.monotonic() > limit:
            _end(launcher)
            return samples, True


def _looked_at(parent: psutil.Process) -> list[Sample]:
    found: list[Sample] = []
    try:
        for one in parent.children():
            if "stretto.launcher.worker_main" in one.cmdline():
                found.append(Sample(one.pid, time.monotonic(), one.memory_info().rss))
    except psutil.Error:
        pass  # one has just died
    return found


def _end(launcher: subprocess.Popen[bytes]) -> None:
    launcher.terminate()
    try:
        launcher.wait(timeout=20)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def judged(
    folder: Path, asked: int, code: int, late: bool, seconds: float, samples: Sequence[Sample], agrees: bool
) -> Outcome:
    """What a run's folder says of it."""
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
        deaths=deaths(events),
        regrouped=sum(one["event"] == "generation_changed" for one in events),
        passes=len(audits),
        seen=seen(list(audits.values())),
        equal=len(states) == 1 if agrees and states else None,
        accuracy=accuracy[-1] if accuracy else None,
        memory=memory_of(samples),
    )


def deaths(events: Sequence[Event]) -> dict[str, int]:
    """How many of each kind were gone."""
    gone = (one["worker"] for one in events if one["event"] == "membership" and one.get("what") == "failed")
    kinds = ("worker" if one >= 0 else "coordinator" if one == COORDINATOR else "server" for one in gone)
    return dict(sorted(Counter(kinds).items()))


def seen(audits: Sequence[Mapping[str, int] | None]) -> dict[str, int]:
    """How often samples were counted, over all passes."""
    names = ("once", "twice", "never", "dropped", "recovered_samples")
    return {name: sum((one or {}).get(name, 0) for one in audits) for name in names}


def memory_of(samples: Sequence[Sample]) -> Memory | None:
    """Of the process that was looked at for the longest time; None if no one lived long enough to tell."""
    lives: dict[int, list[Sample]] = {}
    for one in samples:
        lives.setdefault(one.pid, []).append(one)
    longest = max(lives.values(), key=lambda life: life[-1].at - life[0].at, default=[])
    warm = [one for one in longest if one.at - longest[0].at >= WARM_S]
    if len(warm) < 6:
        return None
    third = len(warm) // 3
    early, late = (statistics.median(one.rss for one in part) / 1e6 for part in (warm[:third], warm[-third:]))
    most = max(one.rss for one in warm) / 1e6
    return Memory(round(longest[-1].at - longest[0].at, 1), round(early, 1), round(late, 1), round(most, 1))
