"""Rounds whose number of local steps is agreed by measured times, with real clocks: agreement and resumes."""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_workers import regression, run_workers, training

from stretto.interval import every
from stretto.recipe.when import overhead
from stretto.runtime.phase_timer import Stopwatch
from stretto.strategies.round_intervals import AgreedInterval

RECIPE = "local_sgd(every=overhead(0.3))"
STEPS = 60
"""Steps of an epoch of `run_training`."""


def facts(checkpoint: Path) -> dict[str, Any]:
    kept: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())["checkpoint"]["facts"]
    return kept


class Meeting:
    """All-gather of two threads."""

    def __init__(self) -> None:
        self._barrier, self._messages = threading.Barrier(2, timeout=30), dict[int, bytes]()

    def transport(self, worker: int) -> Any:
        gather = functools.partial(self._gather, worker)
        return SimpleNamespace(all_gather_bytes=gather, number=worker, members=(0, 1))

    def _gather(self, worker: int, message: bytes) -> list[bytes]:
        self._messages[worker] = message
        self._barrier.wait()
        found = [one for _, one in sorted(self._messages.items())]
        self._barrier.wait()
        return found


def rounds_of(transport: Any, clock_speed: float, step_s: float, events: list[tuple[int, int]]) -> list[int]:
    """Return the steps that rounds follow, each of which takes half a second."""
    now, found = 0.0, list[int]()
    timer = Stopwatch(lambda: now * clock_speed)
    noted: Any = SimpleNamespace(write=lambda _event, step, local_steps, **_: events.append((step, local_steps)))
    interval = AgreedInterval(overhead(0.1), 0, transport, timer, noted)
    for step in range(1, 400):
        timer.switch("computing")
        now += step_s
        timer.switch("other")
        if interval.is_due(step):
            found.append(step)
            interval.round_begins(step)
            timer.switch("exchanging")
            now += 0.5
            timer.switch("other")
            interval.round_ended(step)
    return found


def test_workers_whose_clocks_differ_agree_on_the_same_steps() -> None:
    """One worker's clock is three times as fast, and its steps take seven times as long: of 0.21 s by its clock."""
    meeting, noted = Meeting(), [list[tuple[int, int]](), list[tuple[int, int]]()]
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(rounds_of, meeting.transport(0), 1.0, 0.01, noted[0])
        other = pool.submit(rounds_of, meeting.transport(1), 3.0, 0.07, noted[1])
    assert one.result() == other.result()
    assert one.result()[-1] - one.result()[-2] == math.ceil(0.5 * 9 / 0.21)
    lengths = [later - step for step, later in itertools.pairwise(one.result())]
    changes = [length for before, length in itertools.pairwise([1, *lengths]) if length != before]
    assert ([steps for _, steps in noted[0]], noted[1]) == (changes, [])


@pytest.mark.parametrize("workers", [2, 3])
def test_rounds_of_workers_at_unequal_speeds_follow_the_same_steps(workers: int, tmp_path: Path) -> None:
    run_training(workers, tmp_path / "run", slow={1: 3.0})
    found = list(dict.fromkeys(number for _, number in rounds_of_run(tmp_path / "run")))
    assert len(found) > 3
    assert found == list(range(1, len(found) + 1))


def test_a_resumed_run_does_its_next_round_where_the_first_one_would_have(tmp_path: Path) -> None:
    run_training(2, tmp_path / "before")
    last, (_, due_at, number) = next(
        (one, interval)
        for one in reversed(checkpoints_of(tmp_path / "before"))
        for interval in facts(one)["strategy"]["intervals"]
        if interval[1] < STEPS  # later rounds are due after the epoch, at whose end there is a round in any case
    )
    shutil.copytree(last, tmp_path / "part/checkpoints" / last.name)
    run_training(2, tmp_path / "after", resume=tmp_path / "part")
    assert rounds_of_run(tmp_path / "after")[0] == (due_at, number)


def run_training(workers: int, run: Path, **options: Any) -> None:
    work = training(regression(STEPS * workers * 2), 2, epochs=1, shuffle=True)
    run.mkdir()
    found = run_workers(workers, work, RECIPE, run=run, checkpoint=every("1 rounds"), keep=99, **options)
    assert all(torch.equal(one, found[0]) for one in found)


def rounds_of_run(run: Path) -> list[tuple[int, int]]:
    """Return the step and number of each round after which a checkpoint was begun: a newer one may replace it."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [(one["step"], one["round"]) for one in events if one["event"] == "checkpoint"]


def checkpoints_of(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").iterdir())
