"""Time for which the failure of a worker stops the others: from a SIGKILL to the next round that the survivors commit.

4 workers on one machine; each records when its steps ended, by the clock that all processes of a machine share. The
figure of a kill is the time until the last survivor has ended a step in the generation that was formed without the
killed worker. In turns with it, torchrun, which ends and restarts all workers: the figure is the time until the last of
the new processes has ended its first step. Its script writes and reads no checkpoint. A paused worker (SIGSTOP) stands
for a host that stops responding: it is declared failed after the failure timeout. With a layout each worker is a
pipeline of two processes, of which one is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.measure import Spread, save
from benchmarks.pace import ROOT
from stretto.events import Event
from stretto.launcher.progress_display import Tail

QUESTION = "seconds from the death of one of 4 workers to the next round that the survivors have committed"
WANTED_S, WANTED_LAYOUT_S = 0.3, 0.1
WORKERS, VICTIMS = 4, (0, 2)
LAYOUT, REPLICAS, RANKS = "pipeline(2)", 3, 2
SMALL = "0.03 M"
MODELS: Mapping[str, int] = {SMALL: 128, "5 M": 2200}
KILLS, STARTS = 5, 2
"""Kills of each victim in a run; each restart of a process waits longer than the one before."""
FAILURE_TIMEOUT_S = 2.0
STEADY_S = 1.0
"""Seconds of undisturbed steps before the next kill."""
POLL_S = 0.05
LIMIT_S = 120.0
"""Limit of every wait."""
SCRIPT = ROOT / "benchmarks" / "scripts" / "clocked.py"
MAX_RESTARTS = 1000

Failure = tuple[int, float]
"""The worker that got the signal, and the seconds until recovery."""


@dataclass(frozen=True)
class Side:
    """A launcher's command, the script's arguments, and a function that returns the recovery time once it is over."""

    name: str
    command: Callable[[Path], list[str]]
    arguments: Sequence[str]
    recovery_s: Callable[[Group, int, float], float | None]
    workers: int = WORKERS


class Group:
    """A launcher and its workers, and the times at which their steps ended."""

    def __init__(self, side: Side, width: int, folder: Path) -> None:
        self.side, self.folder = side, folder
        self.steps = folder / "steps"
        self.steps.mkdir()
        self._tail, self._members = Tail(folder / "run" / "events.jsonl"), list[Event]()
        self._log = (folder / "log").open("wb")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        script = [str(SCRIPT), str(self.steps), "--width", str(width), *side.arguments]
        self._launcher = subprocess.Popen(
            [*side.command(folder), *script], cwd=ROOT, env=environment, stdout=self._log, stderr=self._log
        )

    def pids(self) -> dict[int, int]:
        """Return the pid of each worker's newest process."""
        return {rank: int(path.name.split("-")[-1]) for rank, path in self._newest().items()}

    def ends(self, rank: int) -> Sequence[float]:
        """Return the times at which the steps of a worker's newest process ended."""
        raw = self._newest()[rank].read_bytes()
        return array("d", raw[: len(raw) // 8 * 8])

    def _newest(self) -> dict[int, Path]:
        """Return each worker's newest file: names contain the start time, so the last in their order is the newest."""
        return {int(path.name.split("-")[0]): path for path in sorted(self.steps.iterdir())}

    def members(self) -> list[Event]:
        """Return the membership events of Stretto's run."""
        self._members += [one for one in self._tail.read() if one["event"] == "membership"]
        return self._members

    def wait(self, awaited: str, poll: Callable[[], Any]) -> Any:
        """Wait until `found` returns something else than None, and return it."""
        limit = time.monotonic() + LIMIT_S
        while (result := poll()) is None:
            if self._launcher.poll() is not None or time.monotonic() > limit:
                raise SystemExit(f"recovery: timed out waiting for {awaited}:\n{self._log_end()}")
            time.sleep(POLL_S)
        return result

    def wait_until_steady(self) -> None:
        """Wait until all workers have run undisturbed for a while."""

        def is_so() -> bool | None:
            now, steps = time.perf_counter(), [self.ends(rank) for rank in self.pids()]
            return True if len(steps) == self.side.workers and all(is_steady(one, now) for one in steps) else None

        self.wait("all workers", is_so)

    def _log_end(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-2000:]

    def close(self) -> None:
        """End the launcher, which ends its workers."""
        self._launcher.terminate()
        try:
            self._launcher.wait(timeout=40)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        self._log.close()


def is_steady(steps: Sequence[float], now: float) -> bool:
    """Return True if a process has ended its first step some time ago, and its last one just now."""
    return len(steps) > 1 and steps[0] < now - STEADY_S and steps[-1] > now - STEADY_S / 2


def with_stretto(*more: str, processes: int = WORKERS) -> Callable[[Path], list[str]]:
    """Return the function that makes the command up to the script."""

    def command(folder: Path) -> list[str]:
        started = [sys.executable, "-m", "stretto.cli", "run", "-n", str(processes), "--threads", "1"]
        return [*started, "--restarts", str(MAX_RESTARTS), "--out", str(folder / "run"), *more]

    return command


def with_torchrun(_folder: Path) -> list[str]:
    """Return the command up to the script."""
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
    return [*started, "--max-restarts", str(MAX_RESTARTS)]


def survivors_s(group: Group, victim: int, failed_at: float) -> float | None:
    """Return the seconds until the last survivor has ended a step in the first generation without the victim."""
    formed = formed_without(group.members(), victim, failed_at)
    if formed is None:
        return None
    return latest([group.ends(rank) for rank in group.pids() if rank != victim], formed, failed_at)


def formed_without(events: Sequence[Event], victim: int, failed_at: float) -> float | None:
    """Return when the first generation without the victim was formed after a failure."""
    formed = (event for event in events if event["what"] == "formed" and event["at"] > failed_at)
    return next((event["at"] for event in formed if victim not in event["members"]), None)


def latest(ends: Sequence[Sequence[float]], since: float, failed_at: float) -> float | None:
    """Return the seconds from a failure until all workers have ended a step after `since`; None if one has not."""
    later = [[one for one in steps if one > since] for steps in ends]
    return max(one[0] for one in later) - failed_at if later and all(later) else None


def restarted_s(group: Group, _victim: int, failed_at: float) -> float | None:
    """Return the seconds until the last of WORKERS new processes has ended its first step."""
    newest = [group.ends(rank) for rank in group.pids()]
    begun = [steps for steps in newest if steps and steps[0] > failed_at]
    return latest(begun, failed_at, failed_at) if len(begun) == WORKERS else None


STRETTO = Side("stretto", with_stretto(), (), survivors_s)
TORCHRUN = Side("torchrun", with_torchrun, ("--ddp",), restarted_s)
WHOLE = Side("whole", with_stretto(processes=REPLICAS), (), survivors_s, REPLICAS)
DIVIDED = Side(LAYOUT, with_stretto("--layout", LAYOUT, processes=REPLICAS * RANKS), (), survivors_s, REPLICAS)
PAUSED = Side("stretto", with_stretto("--failure-timeout", f"{FAILURE_TIMEOUT_S:g}s"), (), survivors_s)


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all cases, print the figures and write them to the results."""
    print(f"recovery: {QUESTION}", flush=True)
    repetitions = starts or STARTS
    cases = {model: _case(model, width, repetitions) for model, width in MODELS.items()}
    vanished, layouts = _paused(repetitions), _layouts(repetitions)
    record = {
        "question": QUESTION,
        "wanted_s": WANTED_S,
        "workers": WORKERS,
        "starts": repetitions,
        "cases": cases,
        "vanished": vanished,
        "layouts": layouts,
    }
    print(f"  kept in {save('recovery', record, trial=starts is not None)}")
    return record


def _case(model: str, width: int, starts: int) -> dict[str, Any]:
    """Measure both sides in turns."""
    costs: dict[str, list[Failure]] = {STRETTO.name: [], TORCHRUN.name: []}
    step_s: dict[str, list[float]] = {name: [] for name in costs}
    for _ in range(starts):
        for side in (STRETTO, TORCHRUN):
            found, pace = measure_failures(side, width, signal.SIGKILL, VICTIMS * KILLS)
            costs[side.name] += found
            step_s[side.name].append(pace)
    victims = {f"worker {one}": by_side(costs, one) for one in VICTIMS}
    step_ms = {name: 1000 * statistics.median(found) for name, found in step_s.items()}
    for victim, sides in victims.items():
        shown = "; ".join(f"{name} {_shown(one)}, of {one['deaths']}" for name, one in sides.items())
        print(f"  {model:7} {victim}: {shown}", flush=True)
    print(f"  {model:7} ms a step: " + ", ".join(f"{name} {ms:.1f}" for name, ms in step_ms.items()), flush=True)
    return {"victims": victims, "step_ms": step_ms}


def _paused(starts: int) -> dict[str, Any]:
    found: list[Failure] = []
    for _ in range(starts):
        found += measure_failures(PAUSED, MODELS[SMALL], signal.SIGSTOP, VICTIMS[1:] * KILLS)[0]
    one = by_side({"stretto": found}, VICTIMS[1])["stretto"]
    print(f"  paused, --failure-timeout {FAILURE_TIMEOUT_S:g}s: {_shown(one)}, of {one['deaths']}", flush=True)
    return {"model": SMALL, "victim": f"worker {VICTIMS[1]}", "failure_timeout_s": FAILURE_TIMEOUT_S, **one}


def _layouts(starts: int) -> dict[str, Any]:
    """Measure whole workers, and pipelines, in turns."""
    costs: dict[str, list[Failure]] = {WHOLE.name: [], DIVIDED.name: []}
    step_s: dict[str, list[float]] = {name: [] for name in costs}
    for _ in range(starts):
        for side in (WHOLE, DIVIDED):
            found, pace = measure_failures(side, MODELS[SMALL], signal.SIGKILL, VICTIMS * KILLS)
            costs[side.name] += found
            step_s[side.name].append(pace)
    sides = by_side({name: [(0, cost) for _, cost in found] for name, found in costs.items()}, 0)
    for name, one in sides.items():
        shown = f"{_shown(one)}, of {one['deaths']}; {1000 * statistics.median(step_s[name]):.1f} ms a step"
        print(f"  {REPLICAS} workers, {name}: {shown}; wanted at most {WANTED_LAYOUT_S:g} s", flush=True)
    return {"workers": REPLICAS, "model": SMALL, "wanted_s": WANTED_LAYOUT_S, "step_s": step_s, "sides": sides}


def by_side(costs: Mapping[str, Sequence[Failure]], victim: int) -> dict[str, Any]:
    """Return each side's median, quartiles, maximum and list of seconds for one victim."""
    found: dict[str, Any] = {}
    for name, failures in costs.items():
        seconds = [cost for worker, cost in failures if worker == victim]
        rounded = [round(one, 4) for one in seconds]
        found[name] = {
            "s": Spread.of(seconds).record(),
            "worst": max(rounded),
            "deaths": len(rounded),
            "all_s": rounded,
        }
    return found


def _shown(one: Mapping[str, Any]) -> str:
    return f"{one['s']['median']:.3f} s (worst {one['worst']:.3f})"


def measure_failures(
    side: Side, width: int, signal_number: signal.Signals, victims: Sequence[int]
) -> tuple[list[Failure], float]:
    """Return the recovery times of failures of these workers, one after another, and the seconds of a step."""
    with tempfile.TemporaryDirectory(prefix="stretto-recovery-") as folder:
        group = Group(side, width, Path(folder))
        with contextlib.closing(group):
            group.wait_until_steady()
            steps = group.ends(0)
            pace = statistics.median(after - before for before, after in pairwise(steps))
            return [_measure_failure(side, group, victim, signal_number) for victim in victims], pace


def _measure_failure(side: Side, group: Group, victim: int, signal_number: signal.Signals) -> Failure:
    """Send the signal to a worker when all have run undisturbed for a while, and wait for the others."""
    group.wait_until_steady()
    pid = group.pids()[victim]
    failed_at = time.perf_counter()
    os.kill(pid, signal_number)
    recovery_s = group.wait(
        f"survivors to continue without worker {victim}", lambda: side.recovery_s(group, victim, failed_at)
    )
    if signal_number == signal.SIGSTOP:  # the worker finds that it was removed from the membership, and restarts
        os.kill(pid, signal.SIGCONT)
    group.wait("a restarted worker", lambda: True if group.pids()[victim] != pid else None)
    return victim, recovery_s
