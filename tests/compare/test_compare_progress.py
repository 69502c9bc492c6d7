"""Progress of a comparison and the estimated time left."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from stretto.compare.progress import Progress, estimate
from stretto.compare.trials import Question, trials
from stretto.run_config import RunConfig

QUESTION = Question(RunConfig(Path("train.py")), (2,), ("a()",), seeds=2)
RECORD = {"failed": None, "seconds": 1.0, "samples": 19200, "metrics": {"acc": 0.5}}


def test_no_estimate_before_the_first_run() -> None:
    assert estimate(trials(QUESTION), []) is None


def test_estimate_uses_similar_trials_or_else_all_trials() -> None:
    plan = trials(QUESTION)
    assert estimate(plan[1:], [(plan[0], 3.0)]) == pytest.approx(15.0)
    costs = list(zip(plan[:3], (1.0, 2.0, 6.0), strict=True))
    assert estimate(plan[3:], costs) == pytest.approx(9.0)
    assert estimate([], costs) == 0


def test_every_run_gets_a_line_with_the_time_left() -> None:
    now = iter((0.0, 10.0, 10.0, 30.0))
    file = io.StringIO()
    plan = trials(QUESTION)
    progress = Progress(plan, Console(file=file, width=80, get_time=lambda: next(now)), quiet=False)
    progress.begin(plan[0])
    progress.end(plan[0], RECORD)
    progress.begin(plan[1])
    progress.end(plan[1], {**RECORD, "failed": "boom"})
    lines = file.getvalue().splitlines()
    trained = "10.0 s, 1.00 s of training on 19,200 samples, acc 0.5000"
    assert lines[1] == f"[1 of 6] single process, 1 worker, seed 0: {trained}; about 50 s left"
    assert lines[3].startswith("[2 of 6] single process (global batch) ×2, 1 worker, seed 0: failed; about 1 min left")


def test_quiet_prints_nothing() -> None:
    file = io.StringIO()
    plan = trials(QUESTION)
    progress = Progress(plan, Console(file=file), quiet=True)
    progress.begin(plan[0])
    progress.end(plan[0], RECORD)
    assert file.getvalue() == ""
