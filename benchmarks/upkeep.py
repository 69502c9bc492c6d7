"""Cost of fault tolerance while no process fails.

`stretto run` of one script on two workers, which switch fault tolerance off in every third segment of steps, while
the coordinator is suspended: both sides are the same processes (see `benchmarks.fault_tolerance_switch`). Of three
segments, the first and the last have fault tolerance: their mean is compared with the middle one, and the difference
between the two shows the precision of the figure. One case clips its gradients, so that results of collectives have
to be copied for workers that may lack them.

Then the same between two runs that take turns, one with the coordinator, heartbeats, the ledger and its messages, one
without them. Two runs of one kind differ by up to a tenth for as long as they run, because of their memory layout:
this checks the switch, and is not precise enough for 1%.

Then checkpoints in the background: with a checkpoint every 3 s and without one; the cost of a checkpoint is the time
that its side takes longer, divided by the number of checkpoints written in its segments.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fault_tolerance_switch import BARE
from benchmarks.measure import Ratio, Spread, save
from benchmarks.pace import LIMIT_S, ROOT, Seconds, in_turns
from stretto.checkpoint.folder import NAME

QUESTION = "steps per second ready for a death against not ready for it, 2 workers"
WANTED, WANTED_SHARE = 0.99, 0.03
WORKERS = 2
RECIPES = ("allreduce", "local_sgd(every=16)")
STARTS, REPETITIONS = 3, 3
SWITCHED = (
    ("0.8 M", "allreduce", False),
    ("0.8 M", "local_sgd(every=16)", False),
    ("5 M", "allreduce", False),
    ("5 M", "allreduce", True),
    ("5 M", "local_sgd(every=16)", False),
)
"""Model, recipe, and True if the script clips its gradients."""
GROUPS, IN_A_GROUP = 8, 4
"""Number of groups in a run, and of turns in each group."""
SEGMENTS: Mapping[str, int] = {"0.8 M": 64, "5 M": 32}
"""Steps of a segment; a whole number of rounds."""
LONG_SEGMENTS: Mapping[str, int] = {"0.8 M": 640, "5 M": 256}
LONG_REPETITIONS, LONG_STARTS = 4, 1
EVERY_S, SHARE_EVERY_S = 3, 30
"""Seconds between checkpoints when measuring, and those for which the share of time is computed."""
REST_S = 1.0
"""Pause after a segment with checkpoints, in which the last one is written to disk in the background."""
SCRIPT = ROOT / "benchmarks" / "scripts" / "paced.py"


@dataclass(frozen=True)
class Segment:
    """Seconds of a segment, and number of checkpoints written in it."""

    took: Seconds
    checkpoints: int


@dataclass(frozen=True)
class Side:
    """Options of `stretto run`; `rests` is True if work continues after its segments."""

    elastic: bool
    options: Sequence[str] = ()
    rests: bool = False


READY, NOT_READY = "ready", "not ready"
BEFORE, AFTER = "ready before", "ready after"
SIDES: Mapping[str, Side] = {READY: Side(True), NOT_READY: Side(False)}
SAVING, NOT_SAVING = "checkpoints", "none"
CHECKPOINT_OPTIONS = ("--checkpoint-every", f"{EVERY_S}s", "--keep", "1000")
LONG_SIDES: Mapping[str, Side] = {SAVING: Side(True, CHECKPOINT_OPTIONS, rests=True), NOT_SAVING: Side(True)}


class Run:
    """`stretto run` of the script, which waits between segments."""

    def __init__(self, side: Side, recipe: str, case: str, segment: int, segments: int, *more: str) -> None:
        self._side = side
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="stretto-upkeep-")))
        self._log = self._stack.enter_context((self._folder / "log").open("wb"))
        self._go, self._took = self._pipes("go"), self._pipes("took")
        command = [
            sys.executable,
            "-m",
            "stretto.cli",
            "run",
            "-n",
            str(WORKERS),
            "--threads",
            "1",
            "--recipe",
            recipe,
        ]
        command += [
            "--quiet",
            "--out",
            str(self._folder / "run"),
            *side.options,
            *([] if side.elastic else ["--no-recovery"]),
        ]
        command += [str(SCRIPT), str(self._folder), case, str(segment), str(segments), *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment["OMP_NUM_THREADS"] = "1"
        self._launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=self._log, stderr=self._log)

    def _pipes(self, name: str) -> list[int]:
        """Create a pipe for each worker, open at both ends so that opening it does not block."""
        paths = [self._folder / f"{rank}.{name}" for rank in range(WORKERS)]
        for path in paths:
            os.mkfifo(path)
        pipes = [os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths]
        for pipe in pipes:
            self._stack.callback(os.close, pipe)
        return pipes

    def bare(self) -> Segment:
        """Run a segment without fault tolerance, while the coordinator is suspended."""
        coordinator = self._coordinator()
        coordinator.suspend()
        try:
            return self.segment(BARE)
        finally:
            coordinator.resume()

    def _coordinator(self) -> psutil.Process:
        children = psutil.Process(self._launcher.pid).children()
        return next(one for one in children if "stretto.launcher.coordinator_main" in one.cmdline())

    def segment(self, word: str = "go") -> Segment:
        """Let the run continue for a segment."""
        before = self._checkpoints()
        for pipe in self._go:
            os.write(pipe, f"{word}\n".encode())
        took = [self._report(pipe) for pipe in self._took]
        if self._side.rests:
            time.sleep(REST_S)
        total = Seconds(max(one.wall for one in took), sum(one.processor for one in took))
        return Segment(total, self._checkpoints() - before)

    def _checkpoints(self) -> int:
        folder = self._folder / "run" / "checkpoints"
        return sum(NAME.fullmatch(one.name) is not None for one in folder.iterdir()) if folder.is_dir() else 0

    def _report(self, pipe: int) -> Seconds:
        limit = time.monotonic() + LIMIT_S
        while not select.select([pipe], [], [], 0.5)[0]:
            if self._launcher.poll() is not None or time.monotonic() > limit:
                words = (self._folder / "log").read_text(errors="replace")[-2000:]
                raise SystemExit(f"upkeep: a run has ended, or sends no result; the end of its log:\n{words}")
        wall, processor = os.read(pipe, 4096).split()
        return Seconds(float(wall), float(processor))

    def close(self) -> None:
        """End the run."""
        self._launcher.terminate()
        try:
            self._launcher.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._launcher.kill()
            self._launcher.wait()
        self._stack.close()


Taken = Mapping[str, Sequence[Sequence[Segment]]]
"""Segments of each start, for each side."""


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all cases, print the figures and write them to the results."""
    print(f"upkeep: {QUESTION}", flush=True)
    aside = [_switched_case(*one, starts or GROUPS) for one in SWITCHED]
    cases, taken = [], []
    for case, recipe in [(case, recipe) for case in SEGMENTS for recipe in RECIPES]:
        taken.append(_take(SIDES, recipe, case, SEGMENTS[case], REPETITIONS, starts or STARTS))
        cases.append(_case(case, recipe, taken[-1]))
    total = _ratio({side: [start for one in taken for start in one[side]] for side in SIDES}, READY, NOT_READY, "wall")
    print(f"  all together: {total}", flush=True)
    saves = [_checkpoint_case(case, starts or LONG_STARTS) for case in LONG_SEGMENTS]
    record = {
        "question": QUESTION,
        "wanted": WANTED,
        "wanted_share": WANTED_SHARE,
        "workers": WORKERS,
        "threads": 1,
        "aside": aside,
        "cases": cases,
        "together": total.record(),
        "every_s": EVERY_S,
        "asked_s": SHARE_EVERY_S,
        "checkpoints": saves,
    }
    print(f"  kept in {save('upkeep', record, trial=starts is not None)}")
    return record


def _switched_case(case: str, recipe: str, clips: bool, groups: int) -> dict[str, Any]:
    """Return the speed ratio of the same processes with and without fault tolerance."""
    turns, more = groups * IN_A_GROUP, ["--aside", *["--clip"] * clips]
    with contextlib.closing(Run(Side(True), recipe, case, SEGMENTS[case], 3 * turns + 3, *more)) as one:
        taken = in_turns({BEFORE: one.segment, NOT_READY: one.bare, AFTER: one.segment}, turns)
    taken[READY] = [_mean(*pair) for pair in zip(taken[BEFORE], taken[AFTER], strict=True)]
    starts = range(0, turns, IN_A_GROUP)
    grouped = {name: [found[at : at + IN_A_GROUP] for at in starts] for name, found in taken.items()}
    shown = f"{case} {recipe}{', clipped' * clips}"
    found: dict[str, Any] = {"case": case, "recipe": recipe, "clips": clips, "groups": groups, "turns": turns}
    for clock, name in (("wall", "ratio"), ("processor", "processor_ratio")):
        speed = _ratio(grouped, READY, NOT_READY, clock)
        same = _ratio(grouped, BEFORE, AFTER, clock)
        print(f"  {shown}: {speed} by {clock} in the same processes (ready against ready {same})", flush=True)
        found |= {name: speed.record(), f"{name}_of_the_same": same.record()}
    return found


def _mean(one: Segment, other: Segment) -> Segment:
    took = ((getattr(one.took, clock) + getattr(other.took, clock)) / 2 for clock in ("wall", "processor"))
    return Segment(Seconds(*took), one.checkpoints + other.checkpoints)


def _case(case: str, recipe: str, taken: Taken) -> dict[str, Any]:
    speed, processor = (_ratio(taken, READY, NOT_READY, clock) for clock in ("wall", "processor"))
    steps = {name: SEGMENTS[case] / Spread.of(_flat(one)).median for name, one in taken.items()}
    shown = ", ".join(f"{name} {one:.1f} steps/s" for name, one in steps.items())
    print(f"  {case} {recipe}: {speed} (by processor {processor}); {shown}", flush=True)
    return {
        "case": case,
        "recipe": recipe,
        "starts": len(taken[READY]),
        "segments": REPETITIONS,
        "steps": SEGMENTS[case],
        "ratio": speed.record(),
        "processor_ratio": processor.record(),
        "steps_a_second": steps,
    }


def _checkpoint_case(case: str, starts: int) -> dict[str, Any]:
    taken = _take(LONG_SIDES, RECIPES[0], case, LONG_SEGMENTS[case], LONG_REPETITIONS, starts)
    one = cost(taken[SAVING], taken[NOT_SAVING], SHARE_EVERY_S)
    taken_s = f"{one['s_with']:.0f} s with {one['checkpoints']} checkpoints, {one['s_without']:.0f} s without"
    costs = f": {shown_s(one)} s each, {one['share']:.1%} of {SHARE_EVERY_S} s" if one["checkpoints"] else ""
    print(f"  {case} {RECIPES[0]}: {taken_s}{costs}", flush=True)
    return {"case": case, "recipe": RECIPES[0], "starts": starts, **one}


def cost(with_s: Sequence[Sequence[Segment]], without: Sequence[Sequence[Segment]], every_s: float) -> dict[str, Any]:
    """Return the seconds that a checkpoint costs, and their share of `every_s` seconds.

    The error is computed from pairs of segments. All three are None when no checkpoint was written.
    """
    written = sum(one.checkpoints for start in with_s for one in start)
    longer = [ours - theirs for ours, theirs in zip(_flat(with_s), _flat(without), strict=True)]
    found: dict[str, Any] = {"checkpoints": written, "s_with": sum(_flat(with_s)), "s_without": sum(_flat(without))}
    found |= {"s_a_checkpoint": None, "error_s": None, "share": None}
    if written:
        each, error = sum(longer) / written, math.nan
        if len(longer) > 1:
            error = statistics.stdev(longer) * math.sqrt(len(longer)) / written
        found |= {"s_a_checkpoint": each, "error_s": None if math.isnan(error) else error, "share": each / every_s}
    return found


def shown_s(one: Mapping[str, Any]) -> str:
    """Return the seconds of a checkpoint, with their error."""
    error = one["error_s"]
    return f"{one['s_a_checkpoint']:.3f}" + (f" ± {error:.3f}" if error is not None else "")


def _take(
    sides: Mapping[str, Side], recipe: str, case: str, segment: int, repetitions: int, starts: int
) -> dict[str, list[list[Segment]]]:
    """Run all sides at the same time, one of them computing at a time."""
    taken: dict[str, list[list[Segment]]] = {name: [] for name in sides}
    for _ in range(starts):
        with ExitStack() as stack:
            runs = {
                name: stack.enter_context(contextlib.closing(Run(side, recipe, case, segment, repetitions + 1)))
                for name, side in sides.items()
            }
            for name, segments in in_turns({name: one.segment for name, one in runs.items()}, repetitions).items():
                taken[name].append(segments)
    return taken


def _ratio(taken: Taken, ours: str, theirs: str, clock: str) -> Ratio:
    sides = ([[getattr(one.took, clock) for one in start] for start in taken[name]] for name in (ours, theirs))
    return Ratio.of(*sides)


def _flat(starts: Sequence[Sequence[Segment]]) -> list[float]:
    return [one.took.wall for start in starts for one in start]
