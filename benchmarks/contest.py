"""A contest: several sides run one loop in turns, and the first is compared with the second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from benchmarks.measure import Ratio, Spread, save
from benchmarks.pace import Seconds, take_turns, worker_groups
from benchmarks.tasks import TASKS, Task

Taken = Mapping[str, Sequence[Sequence[Seconds]]]
"""Segments of each start, for each side."""


@dataclass(frozen=True)
class Contest:
    """A question, its cases, and the sides to compare: ours first, then the one to compare it with, then any others."""

    name: str
    question: str
    wanted: float
    workers: int
    sides: Sequence[str]
    cases: Sequence[str]
    wanted_of: Mapping[str, float] = field(default_factory=dict)
    """Wanted ratio of cases that differ from `wanted`."""

    def run(self, starts: int | None = None, **beside: Any) -> dict[str, Any]:
        """Measure all cases, print the figures and write them to the results, together with the entries of `beside`.

        `starts`: replaces each case's own number of starts; the record is then a trial.
        """
        print(f"{self.name}: {self.question}", flush=True)
        record = {
            "question": self.question,
            "wanted": self.wanted,
            "against": self.sides[1],
            "workers": self.workers,
            "threads": 1,
            "cases": {case: self._case(case, starts or TASKS[case].starts) for case in self.cases},
            **beside,
        }
        print(f"  kept in {save(self.name, record, trial=starts is not None)}")
        return record

    def _case(self, case: str, starts: int) -> dict[str, Any]:
        task = TASKS[case]
        taken = self._take(case, task, starts)
        speeds = {side: self._ratio(taken, side, "wall") for side in self.sides}
        savings = {side: self._ratio(taken, side, "processor") for side in self.sides}
        segments = f"{starts} x {task.repetitions} segments of {task.segment} steps a side"
        print(f"  {case} parameters, workers: {self.workers}, {segments}")
        sides = {side: _record(task, taken[side], speeds[side], savings[side]) for side in self.sides}
        wanted = self.wanted_of.get(case, self.wanted)
        self._show(sides, speeds, savings, wanted)
        count = {"starts": starts, "segments": task.repetitions, "steps": task.segment}
        return {**count, "wanted": wanted, "ratio": speeds[self.sides[0]].record(), "sides": sides}

    def _take(self, case: str, task: Task, starts: int) -> Taken:
        taken: dict[str, list[Sequence[Seconds]]] = {side: [] for side in self.sides}
        for _ in range(starts):
            with worker_groups(f"benchmarks.{self.name}", self.sides, case, task.segment, self.workers) as started:
                for side, seconds in take_turns(started, task.repetitions).items():
                    taken[side].append(seconds)
        return taken

    def _ratio(self, taken: Taken, side: str, clock: str) -> Ratio:
        ours, theirs = ([_read(start, clock) for start in taken[one]] for one in (side, self.sides[1]))
        return Ratio.of(ours, theirs)

    def _show(
        self, sides: Mapping[str, Any], speeds: Mapping[str, Ratio], savings: Mapping[str, Ratio], wanted: float
    ) -> None:
        for side, one in sides.items():
            wall, processor = one["ms_a_step"]["median"], one["processor_ms_a_step"]["median"]
            print(f"    {side:20} {wall:9.3f} ms a step, {processor:9.3f} ms of processors")
        for side in (self.sides[0], *self.sides[2:]):
            asked = f", wanted at least {wanted:g}" if side == self.sides[0] else ""
            print(f"    speed of {side} / {self.sides[1]}: {speeds[side]}{asked}; by processor {savings[side]}")


def _record(task: Task, starts: Sequence[Sequence[Seconds]], speed: Ratio, saving: Ratio) -> dict[str, Any]:
    wall = [one.wall for one in chain(*starts)]
    processor = [one.processor for one in chain(*starts)]
    return {
        "steps_a_second": task.segment / Spread.of(wall).median,
        "ms_a_step": _ms(task, wall).record(),
        "processor_ms_a_step": _ms(task, processor).record(),
        "speed_ratio": speed.record(),
        "processor_ratio": saving.record(),
        "segments_s": [[round(one.wall, 5) for one in start] for start in starts],
    }


def _read(start: Sequence[Seconds], clock: str) -> list[float]:
    return [one.wall if clock == "wall" else one.processor for one in start]


def _ms(task: Task, seconds: Sequence[float]) -> Spread:
    return Spread.of([1000 * one / task.segment for one in seconds])
