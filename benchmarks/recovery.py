"""How long does a death stop those who are left? From a SIGKILL to the next round that the survivors have committed.

4 workers on one machine; each writes down when a step of its has ended, by the clock that all processes of a machine
share. Of a kill, what counts is the survivor that is last to end a step in the generation that was formed without the
killed one. Beside it, in turns, torchrun: it ends everyone and starts all again, so what counts is the last of the
new processes to end its first step. Its script keeps no checkpoint, and reads none. A paused worker (SIGSTOP) is one
whose host has vanished without a word: it is taken for dead when the patience is over.
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
WANTED_S = 0.3
WORKERS, VICTIMS = 4, (0, 2)
SMALL = "0.03 M"
MODELS: Mapping[str, int] = {SMALL: 128, "5 M": 2200}
KILLS, STARTS = 5, 2
"""Of each victim in a run: each restart of a process waits longer than the one before."""
PATIENCE_S = 2.0
CALM_S = 1.0
"""All go on so long before the next kill."""
LOOK_S = 0.05
LIMIT_S = 120.0
"""Nothing that is waited for may take longer."""
SCRIPT = ROOT / "benchmarks" / "scripts" / "clocked.py"
AGAIN = 1000

Strike = tuple[int, float]
"""Who was struck, and the seconds it cost."""


@dataclass(frozen=True)
class Side:
    """A way to start the script, what that is told, and how to see that all who go on are past a strike."""

    name: str
    command: Callable[[Path], list[str]]
    arguments: Sequence[str]
    cost_s: Callable[[Group, int, float], float | None]


class Group:
    """A launcher and its workers, and when their steps ended."""

    def __init__(self, side: Side, width: int, folder: Path) -> None:
        self.folder = folder
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
        """Of each worker its newest process."""
        return {rank: int(path.name.split("-")[-1]) for rank, path in self._newest().items()}

    def ends(self, rank: int) -> Sequence[float]:
        """When the steps of a worker's newest process ended."""
        raw = self._newest()[rank].read_bytes()
        return array("d", raw[: len(raw) // 8 * 8])

    def _newest(self) -> dict[int, Path]:
        """The names hold when the processes began: the last in their order is the newest."""
        return {int(path.name.split("-")[0]): path for path in sorted(self.steps.iterdir())}

    def members(self) -> list[Event]:
        """What Stretto's run has written down of who is there."""
        self._members += [one for one in self._tail.read() if one["event"] == "membership"]
        return self._members

    def wait(self, what: str, found: Callable[[], Any]) -> Any:
        """What is found in the end, when it is something."""
        limit = time.monotonic() + LIMIT_S
        while (one := found()) is None:
            if self._launcher.poll() is not None or time.monotonic() > limit:
                raise SystemExit(f"recovery: waited in vain for {what}:\n{self._last_words()}")
            time.sleep(LOOK_S)
        return one

    def calm(self) -> None:
        """Wait until all workers have gone on for a while."""

        def so() -> bool | None:
            now, steps = time.perf_counter(), [self.ends(rank) for rank in self.pids()]
            return True if len(steps) == WORKERS and all(is_calm(one, now) for one in steps) else None

        self.wait("all workers", so)

    def _last_words(self) -> str:
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


def is_calm(steps: Sequence[float], now: float) -> bool:
    """Whether a process has ended steps for a while, and still does."""
    return len(steps) > 1 and steps[0] < now - CALM_S and steps[-1] > now - CALM_S / 2


def with_stretto(*more: str) -> Callable[[Path], list[str]]:
    """The command up to the script."""

    def command(folder: Path) -> list[str]:
        started = [sys.executable, "-m", "stretto.cli", "run", "-n", str(WORKERS), "--threads", "1"]
        return [*started, "--restarts", str(AGAIN), "--out", str(folder / "run"), *more]

    return command


def with_torchrun(_folder: Path) -> list[str]:
    """The command up to the script."""
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
    return [*started, "--max-restarts", str(AGAIN)]


def survivors_s(group: Group, victim: int, struck: float) -> float | None:
    """Seconds until the last survivor has ended a step in the first generation without the victim."""
    formed = formed_without(group.members(), victim, struck)
    if formed is None:
        return None
    return latest([group.ends(rank) for rank in group.pids() if rank != victim], formed, struck)


def formed_without(events: Sequence[Event], victim: int, struck: float) -> float | None:
    """When the first generation after a strike that has no such member was formed."""
    told = (one for one in events if one["what"] == "formed" and one["at"] > struck)
    return next((one["at"] for one in told if victim not in one["members"]), None)


def latest(ends: Sequence[Sequence[float]], since: float, struck: float) -> float | None:
    """Seconds from a strike until each has ended a step after `since`; None if one has not."""
    later = [[one for one in steps if one > since] for steps in ends]
    return max(one[0] for one in later) - struck if later and all(later) else None


def restarted_s(group: Group, _victim: int, struck: float) -> float | None:
    """Seconds until the last of as many new processes has ended its first step."""
    newest = [group.ends(rank) for rank in group.pids()]
    begun = [steps for steps in newest if steps and steps[0] > struck]
    return latest(begun, struck, struck) if len(begun) == WORKERS else None


STRETTO = Side("stretto", with_stretto(), (), survivors_s)
TORCHRUN = Side("torchrun", with_torchrun, ("--ddp",), restarted_s)
VANISHING = Side("stretto", with_stretto("--failure-timeout", f"{PATIENCE_S:g}s"), (), survivors_s)


def run(starts: int | None = None) -> dict[str, Any]:
    """Take the figures, print them, keep them."""
    print(f"recovery: {QUESTION}", flush=True)
    many = starts or STARTS
    cases = {model: _case(model, width, many) for model, width in MODELS.items()}
    vanished = _vanished(many)
    record = {
        "question": QUESTION,
        "wanted_s": WANTED_S,
        "workers": WORKERS,
        "starts": many,
        "cases": cases,
        "vanished": vanished,
    }
    print(f"  kept in {save('recovery', record, trial=starts is not None)}")
    return record


def _case(model: str, width: int, starts: int) -> dict[str, Any]:
    """Both sides in turns."""
    costs: dict[str, list[Strike]] = {STRETTO.name: [], TORCHRUN.name: []}
    step_s: dict[str, list[float]] = {name: [] for name in costs}
    for _ in range(starts):
        for side in (STRETTO, TORCHRUN):
            found, pace = strikes(side, width, signal.SIGKILL, VICTIMS * KILLS)
            costs[side.name] += found
            step_s[side.name].append(pace)
    victims = {f"worker {one}": by_side(costs, one) for one in VICTIMS}
    step_ms = {name: 1000 * statistics.median(found) for name, found in step_s.items()}
    for victim, sides in victims.items():
        said = "; ".join(f"{name} {_shown(one)}, of {one['deaths']}" for name, one in sides.items())
        print(f"  {model:7} {victim}: {said}", flush=True)
    print(f"  {model:7} ms a step: " + ", ".join(f"{name} {ms:.1f}" for name, ms in step_ms.items()), flush=True)
    return {"victims": victims, "step_ms": step_ms}


def _vanished(starts: int) -> dict[str, Any]:
    found: list[Strike] = []
    for _ in range(starts):
        found += strikes(VANISHING, MODELS[SMALL], signal.SIGSTOP, VICTIMS[1:] * KILLS)[0]
    one = by_side({"stretto": found}, VICTIMS[1])["stretto"]
    print(f"  paused, --failure-timeout {PATIENCE_S:g}s: {_shown(one)}, of {one['deaths']}", flush=True)
    return {"model": SMALL, "victim": f"worker {VICTIMS[1]}", "failure_timeout_s": PATIENCE_S, **one}


def by_side(costs: Mapping[str, Sequence[Strike]], victim: int) -> dict[str, Any]:
    """Median and quartiles of each side's seconds for one victim, the worst, and all of them."""
    found: dict[str, Any] = {}
    for name, strikes in costs.items():
        seconds = [cost for who, cost in strikes if who == victim]
        told = [round(one, 4) for one in seconds]
        found[name] = {"s": Spread.of(seconds).record(), "worst": max(told), "deaths": len(told), "all_s": told}
    return found


def _shown(one: Mapping[str, Any]) -> str:
    return f"{one['s']['median']:.3f} s (worst {one['worst']:.3f})"


def strikes(side: Side, width: int, what: signal.Signals, victims: Sequence[int]) -> tuple[list[Strike], float]:
    """What striking these workers one after the other costs in one run, and the seconds of a step before."""
    with tempfile.TemporaryDirectory(prefix="stretto-recovery-") as place:
        group = Group(side, width, Path(place))
        with contextlib.closing(group):
            group.calm()
            steps = group.ends(0)
            pace = statistics.median(after - before for before, after in pairwise(steps))
            return [_strike(side, group, victim, what) for victim in victims], pace


def _strike(side: Side, group: Group, victim: int, what: signal.Signals) -> Strike:
    """Strike a worker when all have gone on for a while, and wait for the others."""
    group.calm()
    pid = group.pids()[victim]
    struck = time.perf_counter()
    os.kill(pid, what)
    cost_s = group.wait(f"those who go on without worker {victim}", lambda: side.cost_s(group, victim, struck))
    if what == signal.SIGSTOP:  # it finds that it is no member any more, and comes again
        os.kill(pid, signal.SIGCONT)
    group.wait("a newcomer", lambda: True if group.pids()[victim] != pid else None)
    return victim, cost_s
