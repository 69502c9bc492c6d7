"""The tables say what the records say, and fit a terminal."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from report.synthetic_runs import write_comparison
from rich.console import Console

from stretto.report import formatting
from stretto.report.tables import Sheet, share, sheets, show
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


def test_speed_up_is_over_a_single_process_and_efficiency_per_process(tmp_path: Path) -> None:
    fast = by_title(sheets(records(tmp_path)))["Speed"]
    assert cell(fast, "single process", "speed-up") == ("1.00×", "")
    assert cell(fast, "allreduce()", "speed-up") == ("3.00×", "")
    assert cell(fast, "allreduce()", "efficiency") == ("150%", "")
    assert cell(fast, "allreduce()", "samples/s") == ("800", "")


def test_distances_are_measured_against_the_global_batch(tmp_path: Path) -> None:
    found = by_title(sheets(records(tmp_path)))
    assert cell(found["Model distance"], "single process (global batch ×2)", "parameter distance") == ("reference", "")
    assert cell(found["Model distance"], "allreduce()", "parameter distance") == ("0.0300", "")
    assert cell(found["Model distance"], "allreduce()", "predictions that differ")[0] == formatting.NOTHING
    assert cell(found["Final metrics"], "local_sgd(every=16)", "difference")[0] == "-0.0040"


def test_the_shares_of_time_sum_to_one(tmp_path: Path) -> None:
    from stretto.events import PHASES

    for one in records(tmp_path):
        assert sum(share(one, phase) or 0.0 for phase in PHASES) == pytest.approx(1.0)


def test_several_seeds_give_medians_with_their_range(tmp_path: Path) -> None:
    found = records(tmp_path, seeds=3)
    for one in found:
        one["samples_per_second"] = 100.0 * (one["seed"] + 1)
    assert cell(by_title(sheets(found))["Speed"], "single process", "samples/s") == ("200", "100…300")


def test_a_target_has_a_table_that_shows_runs_that_missed_it(tmp_path: Path) -> None:
    found = records(tmp_path)
    found[0]["reached"] = {"seconds": 1.0, "samples": 800}
    found[2]["reached"] = {"seconds": 0.5, "samples": 900}
    target = Target("test_accuracy", ">=", 0.9)
    reached = by_title(sheets(found, target))["Time to test_accuracy>=0.9"]
    assert cell(reached, "allreduce()", "speed-up")[0] == "2.00×"
    assert cell(reached, "allreduce()", "samples")[0] == "900"
    assert cell(reached, "local_sgd(every=16)", "time")[0] == "not reached"


def test_failed_runs_are_marked_and_the_others_stay(tmp_path: Path) -> None:
    found = records(tmp_path, seeds=2)
    found[2]["failed"] = "boom"
    for one in found:
        if one["recipe"].startswith("local"):
            one["failed"] = "boom"
    fast = by_title(sheets(found))["Speed"]
    assert cell(fast, "allreduce()", "run") == ("allreduce()", "1 of 2 runs failed")
    assert cell(fast, "local_sgd(every=16)", "samples/s")[0] == "failed"
    assert cell(fast, "single process", "samples/s")[0] == "267"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("seeds", [1, 3])
def test_the_terminal_tables_stay_within_their_width_and_lose_nothing(tmp_path: Path, width: int, seeds: int) -> None:
    found = records(tmp_path, seeds=seeds)
    for one in found:
        if one["recipe"] == "allreduce()":
            one["recipe"] = "diloco(every=50, outer_lr=0.4, outer_momentum=0.8)"
        one["samples_per_second"] *= 1 + 0.1 * one["seed"]
    file = io.StringIO()
    show(Console(file=file, width=width), sheets(found, Target("test_accuracy", ">=", 0.9)))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    for word in ("training", "outer_momentum=0.8)", "other", "samples", "speed-up"):
        assert any(word in line for line in lines), word


def test_staleness_has_its_columns_only_where_there_is_some(tmp_path: Path) -> None:
    found = records(tmp_path)
    assert not [column for sheet in sheets(found) for column in sheet.columns if "stale" in column]
    found[2]["staleness"] = {"mean": 2.875, "max": 7, "histogram": {}}
    found[2]["samples_by_worker"] = [2000, 400]
    stale = by_title(sheets(found))["Staleness"]
    assert [row[0].text for row in stale.rows] == ["allreduce()"]
    assert cell(stale, "allreduce()", "mean staleness") == ("2.88", "")
    assert cell(stale, "allreduce()", "largest staleness") == ("7", "")
    assert cell(stale, "allreduce()", "fewest samples") == ("400", "")
    assert cell(stale, "allreduce()", "most samples") == ("2,000", "")


def test_blocked_time_has_a_column_only_with_a_bound(tmp_path: Path) -> None:
    found = records(tmp_path)
    found[2]["staleness"] = {"mean": 2.875, "max": 7, "histogram": {}}
    assert "blocked by bound" not in by_title(sheets(found))["Staleness"].columns
    found[2] |= {"blocked_seconds": [0.66, 0.0], "time_breakdown": [{"waiting": 3.3}, {"computing": 3.3}]}
    assert cell(by_title(sheets(found))["Staleness"], "allreduce()", "blocked by bound")[0] == "10%"


def test_steps_and_rounds_of_asynchronous_workers_are_labelled_as_the_largest(tmp_path: Path) -> None:
    found = records(tmp_path)
    assert "most" not in by_title(sheets(found))["Bytes and rounds"].note
    found[2]["staleness"] = {"mean": 2.875, "max": 7, "histogram": {}}
    assert "the largest of any worker" in by_title(sheets(found))["Bytes and rounds"].note


def test_records_of_an_earlier_version_are_still_shown(tmp_path: Path) -> None:
    found = records(tmp_path)
    for one in found:
        for later in ("samples_by_worker", "blocked_seconds", "staleness"):
            del one[later]
    assert len(sheets(found)) == 5


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_tables_of_asynchronous_runs_fit_a_terminal(tmp_path: Path, seeds: int) -> None:
    found = records(tmp_path, seeds=seeds)
    for one in found[2::4]:
        one["staleness"] = {"mean": 123.456 + one["seed"], "max": 1234 + one["seed"], "histogram": {}}
        one["samples_by_worker"] = [123_456_789_012 + one["seed"] * 10**9, 1000]
        one["blocked_seconds"] = [0.1 * one["seed"], 0.0]
    file = io.StringIO()
    show(Console(file=file, width=80), sheets(found))
    assert max(map(len, file.getvalue().splitlines())) <= 80
    assert "staleness" in file.getvalue()
    assert "123" in file.getvalue()


def test_unequal_samples_are_named_and_no_times_of_different_work_are_listed(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "comparison", counts_steps=True)
    found = json.loads((folder / "compare.json").read_text())["runs"]
    tables = by_title(sheets(found, Target("test_accuracy", ">=", 0.999)))
    assert "training time" not in tables["Speed"].columns
    assert cell(tables["Speed"], "single process", "samples")[0] == "1,200"
    assert cell(tables["Final metrics"], "allreduce()", "samples")[0] == "2,400"
    assert cell(tables["Time to test_accuracy>=0.999"], "single process", "samples")[0] == "not in 1,200"
    assert "training time" in by_title(sheets(records(tmp_path / "equal")))["Speed"].columns


def test_a_difference_is_that_after_equal_samples(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "comparison", counts_steps=True)
    found = json.loads((folder / "compare.json").read_text())["runs"]
    alone, joined = found[0] | {"compared_with": "joined-0"}, found[1]
    joined["evaluations"] = [
        {"samples": at, "training_s": 1.0, "metrics": {"test_accuracy": at / 2400}} for at in (1000, 1400, 2400)
    ]
    difference = cell(by_title(sheets([alone, *found[1:]]))["Final metrics"], "single process", "difference")[0]
    assert difference == formatting.signed(alone["metrics"]["test_accuracy"] - 0.5)
    joined["evaluations"] = joined["evaluations"][-1:]
    difference = cell(by_title(sheets([alone, *found[1:]]))["Final metrics"], "single process", "difference")[0]
    assert difference == formatting.NOTHING
