"""The tables say what the records say, and fit a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from report.synthetic import write_comparison
from rich.console import Console

from stretto.report import figures
from stretto.report.table import Sheet, share, sheets, show
from stretto.report.target import Target


def records(tmp_path: Path, seeds: int = 1, **more: Any) -> list[dict[str, Any]]:
    folder = write_comparison(tmp_path / "comparison", seeds=seeds)
    return [one | more for one in json.loads((folder / "compare.json").read_text())["runs"]]


def cell(sheet: Sheet, row: str, column: str) -> tuple[str, str]:
    found = next(cells for cells in sheet.rows if cells[0].text == row)
    at = found[sheet.columns.index(column)]
    return at.text, at.range


def by_title(found: list[Sheet]) -> dict[str, Sheet]:
    return {sheet.title: sheet for sheet in found}


def test_speed_up_is_over_alone_and_efficiency_per_worker(tmp_path: Path) -> None:
    fast = by_title(sheets(records(tmp_path)))["How fast?"]
    assert cell(fast, "alone", "speed-up") == ("1.00×", "")
    assert cell(fast, "allreduce()", "speed-up") == ("3.00×", "")
    assert cell(fast, "allreduce()", "efficiency") == ("150%", "")
    assert cell(fast, "allreduce()", "samples/s") == ("800", "")


def test_the_state_is_measured_against_the_joined_batch(tmp_path: Path) -> None:
    found = by_title(sheets(records(tmp_path)))
    assert cell(found["Same state?"], "alone (batch ×2)", "parameter distance") == ("reference", "")
    assert cell(found["Same state?"], "allreduce()", "parameter distance") == ("0.0300", "")
    assert cell(found["Same state?"], "allreduce()", "predictions that differ")[0] == figures.NOTHING
    assert cell(found["Same quality?"], "local_sgd(every=16)", "difference")[0] == "-0.0040"


def test_the_shares_of_time_sum_to_one(tmp_path: Path) -> None:
    from stretto.events import PHASES

    for one in records(tmp_path):
        assert sum(share(one, phase) or 0.0 for phase in PHASES) == pytest.approx(1.0)


def test_several_seeds_give_medians_with_their_range(tmp_path: Path) -> None:
    found = records(tmp_path, seeds=3)
    for one in found:
        one["samples_per_second"] = 100.0 * (one["seed"] + 1)
    assert cell(by_title(sheets(found))["How fast?"], "alone", "samples/s") == ("200", "100…300")


def test_a_target_gets_its_table_and_misses_are_said(tmp_path: Path) -> None:
    found = records(tmp_path)
    found[0]["reached"] = {"seconds": 1.0, "samples": 800}
    found[2]["reached"] = {"seconds": 0.5, "samples": 900}
    target = Target("test_accuracy", ">=", 0.9)
    reached = by_title(sheets(found, target))["When was test_accuracy>=0.9 reached?"]
    assert cell(reached, "allreduce()", "speed-up")[0] == "2.00×"
    assert cell(reached, "allreduce()", "samples")[0] == "900"
    assert cell(reached, "local_sgd(every=16)", "time")[0] == "not reached"


def test_failed_runs_are_marked_and_the_others_stay(tmp_path: Path) -> None:
    found = records(tmp_path, seeds=2)
    found[2]["failed"] = "boom"
    for one in found:
        if one["recipe"].startswith("local"):
            one["failed"] = "boom"
    fast = by_title(sheets(found))["How fast?"]
    assert cell(fast, "allreduce()", "run") == ("allreduce()", "1 of 2 runs failed")
    assert cell(fast, "local_sgd(every=16)", "samples/s")[0] == "failed"
    assert cell(fast, "alone", "samples/s")[0] == "267"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("seeds", [1, 3])
def test_the_terminal_tables_stay_within_their_width_and_lose_nothing(tmp_path: Path, width: int, seeds: int) -> None:
    found = records(tmp_path, seeds=seeds)
    for one in found:
        if one["recipe"] == "allreduce()":
            one["recipe"] = "diloco(every=50, outer_lr=0.4, outer_momentum=0.8)"
        one["samples_per_second"] *= 1 + 0.1 * one["seed"]
    file = io.StringIO()
    show(Console(file=file, width=width), found, Target("test_accuracy", ">=", 0.9))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for word in ("training", "outer_momentum=0.8)", "other", "samples", "speed-up"):
        assert any(word in line for line in lines), word
