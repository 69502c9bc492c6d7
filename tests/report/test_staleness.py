"""Staleness is counted from what workers say of their updates, and shown."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report.synthetic_runs import asynchronous, write_run
from report.test_html_report import Well

from stretto.report import run_log, staleness, time_series
from stretto.report.histograms import MOST_BINS, Bins, bins
from stretto.report.html_report import write
from stretto.report.run_record import record
from stretto.report.staleness import StalenessCounts, updates
from stretto.report.summary import _summary

FAST, SLOW = [1, 2, 3, 2] * 5, [7, 9, 8, 0]
"""Write a run with twenty updates of worker 0 and four of worker 1, which is five times slower."""


def run(tmp_path: Path, events: list[dict[str, Any]], workers: int = 2) -> Path:
    return write_run(tmp_path / "run", recipe="stale_synchronous(bound=4)", workers=workers, events=events)


def two(tmp_path: Path, held: tuple[float, float] | None = (0.1, 0.0)) -> Path:
    return run(tmp_path, asynchronous([FAST, SLOW], step_s=(0.02, 0.1), held=held))


def cells(page: str) -> list[list[str]]:
    """All rows of all tables of a page, as text."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, flags=re.DOTALL)
    return [[re.sub("<[^>]*>", "", one) for one in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows]


# The record


def test_the_record_counts_every_update_of_every_worker(tmp_path: Path) -> None:
    found = record(two(tmp_path))
    assert found["staleness"]["histogram"] == {"0": 1, "1": 5, "2": 10, "3": 5, "7": 1, "8": 1, "9": 1}
    assert found["staleness"]["mean"] == pytest.approx((5 * 8 + 24) / 24)
    assert found["staleness"]["max"] == 9
    assert found["samples_by_worker"] == [160, 32]
    assert found["blocked_seconds"] == [0.1, 0.0]
    assert json.loads(json.dumps(found)) == found


def test_a_run_without_a_bound_has_no_blocked_seconds(tmp_path: Path) -> None:
    assert record(two(tmp_path, held=None))["blocked_seconds"] is None


def test_a_synchronous_run_has_samples_of_each_worker_and_no_staleness(tmp_path: Path) -> None:
    found = record(write_run(tmp_path / "run", recipe="allreduce()", workers=2))
    assert (found["staleness"], found["blocked_seconds"]) == (None, None)
    assert found["samples_by_worker"] == [1200, 1200]


def test_malformed_updates_are_skipped(tmp_path: Path) -> None:
    wrong = [[1, 1, None, 8], [1, 1, -3, 8], [1, 1, 2.5, 8], [1], "four", 3, [2, 2, 1, 8]]
    events: list[dict[str, Any]] = [{"event": "update_applied", "t": 1.0, "worker": 0, "updates": wrong}]
    events += [{"event": "update_applied", "t": 1.0, "worker": w, "updates": [[1, 1, 5, 8]]} for w in (-1, 2)]
    events += [{"event": "update_applied", "t": 1.0, "worker": 0, "updates": nothing} for nothing in (None, 3, "x")]
    found = record(run(tmp_path, events))
    assert found["staleness"] == {"mean": 1.0, "max": 1, "histogram": {"1": 1}}


@given(st.lists(st.integers(0, 400), min_size=1))
def test_counts_match_the_list_of_values(values: list[int]) -> None:
    tally = StalenessCounts(Counter(values))
    assert (tally.updates, tally.max) == (len(values), max(values))
    assert tally.mean == pytest.approx(sum(values) / len(values))


def test_updates_of_one_event_lie_between_it_and_the_one_before(tmp_path: Path) -> None:
    found = updates(run_log.read(two(tmp_path)))
    assert [one.t for one in found if one.worker == 1] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert [one.t for one in found] == sorted(one.t for one in found)


# Bins


@given(st.dictionaries(st.integers(0, 5000), st.integers(1, 100), min_size=1))
def test_bins_are_few_and_hold_everything_once(counts: dict[int, int]) -> None:
    found = bins(Counter(counts))
    assert len(found.edges) - 1 <= MOST_BINS + 1
    assert list(found.edges) == sorted(set(found.edges))
    assert sum(found.fill(Counter(counts))) == pytest.approx(1.0)


def test_few_values_have_a_bin_each_from_zero() -> None:
    found = bins(Counter({3: 4, 5: 1}))
    assert found.edges == (0, 1, 2, 3, 4, 5, 6)
    assert found.fill(Counter({3: 4, 5: 1})) == [0, 0, 0, 0.8, 0, 0.2]
    assert found.single


def test_many_values_share_bins_of_one_round_width() -> None:
    found = bins(Counter(dict.fromkeys(range(120, 300), 1)))
    assert {after - before for before, after in zip(found.edges, found.edges[1:], strict=False)} == {10}
    assert (found.edges[0], found.edges[-1]) == (120, 300)
    assert not found.single


def test_bins_grow_where_most_updates_would_share_one() -> None:
    found = bins(Counter({0: 50, 1: 60, 2: 40, 400: 3}))
    assert found.edges[:8] == (0, 1, 2, 3, 4, 6, 8, 12)
    assert found.fill(Counter({1: 1, 400: 1}))[1] == 0.5
    assert found.edges[-1] > 400


def test_empty_counts_fill_no_bin() -> None:
    assert Bins((0, 1, 2)).fill(Counter()) == [0, 0]


# Curves


def test_mean_and_maximum_over_time_come_from_every_update(tmp_path: Path) -> None:
    mean, most = time_series.staleness(run_log.read(two(tmp_path)))
    assert max(sample.value for sample in most.samples) == 9
    assert len(mean.samples) == 3
    assert mean.samples[0].value < mean.samples[1].value
    assert [s.seconds for s in mean.samples] == [s.seconds for s in most.samples]
    assert [s.seconds for s in mean.samples] == sorted(s.seconds for s in mean.samples)
    assert all(m.value <= x.value for m, x in zip(mean.samples, most.samples, strict=True))


def test_every_point_includes_updates_of_slow_workers(tmp_path: Path) -> None:
    """Else the mean would jump whenever one of its few updates came."""
    events = asynchronous([[1] * 400, [40] * 40], step_s=(0.01, 0.1))
    mean, _ = time_series.staleness(run_log.read(run(tmp_path, events)))
    assert len(mean.samples) == 20
    assert all(2 < sample.value < 8 for sample in mean.samples)


def test_a_long_run_is_thinned_without_losing_its_maximum(tmp_path: Path) -> None:
    long = [3] * 4000
    long[1717] = 99
    mean, most = time_series.staleness(run_log.read(run(tmp_path, asynchronous([long, long[:800]], (0.01, 0.05)))))
    assert len(mean.samples) <= time_series.MOST_POINTS
    assert max(sample.value for sample in most.samples) == 99


def test_the_loss_of_asynchronous_workers_is_averaged_by_time(tmp_path: Path) -> None:
    """The same step is early on one worker and late on another: values logged at the same time are averaged."""
    curve = time_series.loss(run_log.read(two(tmp_path)))
    seconds = [sample.seconds for sample in curve.samples]
    assert seconds == pytest.approx([0.16, 0.32, 0.4])
    assert [sample.value for sample in curve.samples] == pytest.approx([9.88, 9.72, 9.6])


# The page and the terminal


def test_the_page_of_a_run_has_a_row_for_each_worker(tmp_path: Path) -> None:
    text = write(two(tmp_path)).read_text()
    Well(text)
    assert "Staleness" in text
    rows = cells(text)
    assert ["worker 0", "160", "20", "2.00", "3", "0.100 s", "25%"] in rows
    assert ["worker 1", "32", "4", "6.00", "9", "0 s", "0"] in rows
    assert ["all", "192", "24", "2.67", "9", "0.100 s", "12%"] in rows
    assert "6.00 mean, 9 max" in text
    assert "Largest" in text


def test_without_a_bound_there_is_no_blocked_time(tmp_path: Path) -> None:
    text = write(two(tmp_path, held=None)).read_text()
    assert ["worker 0", "160", "20", "2.00", "3"] in cells(text)
    assert "bound" not in text[text.index("Staleness") :].partition("Time breakdown")[0]


def test_a_synchronous_run_has_no_staleness_section(tmp_path: Path) -> None:
    assert "stale" not in write(write_run(tmp_path / "run", recipe="allreduce()", workers=2)).read_text()


@pytest.mark.parametrize("workers", [1, 3, 16, 40])
def test_pages_of_any_number_of_workers_are_valid_and_small(tmp_path: Path, workers: int) -> None:
    stale = [[(i * 37 + w) % 300 for i in range(200)] for w in range(workers)]
    text = write(run(tmp_path, asynchronous(stale, held=[0.5] * workers), workers)).read_text()
    Well(text)
    assert len(text.encode()) < 700_000
    panels = text.count(" mean, 299 max") if workers == 40 else len(re.findall(r"[\d.]+ mean, \d+ max", text))
    assert panels == (1 if workers == 40 else workers)
    rows = [row[0] for row in cells(text) if row and row[0].startswith(("worker", "all"))]
    assert len(rows) == min(workers, 32) + 1
    assert ("The 32 of 40 workers" in text) is (workers == 40)


def test_a_worker_without_updates_is_shown_with_nothing(tmp_path: Path) -> None:
    text = write(run(tmp_path, asynchronous([FAST, []]))).read_text()
    assert ["worker 1", "0", "0", "–", "–"] in cells(text)
    assert "no updates" in text


def test_a_run_that_failed_early_has_a_page(tmp_path: Path) -> None:
    events = asynchronous([FAST, SLOW], held=(0.0, 0.0))
    for keep in (3, 4, 6):
        folder = write_run(tmp_path / str(keep), recipe="async_sgd()", workers=2, events=events[:keep])
        assert "did not finish" in write(folder).read_text()


def test_the_page_reports_the_largest_number_of_rounds_as_such(tmp_path: Path) -> None:
    assert "up to 20 rounds" in write(two(tmp_path)).read_text()


def test_the_summary_has_one_more_line(tmp_path: Path) -> None:
    assert "staleness 2.67 mean, 9 max, 0.100 s blocked by the staleness bound (12% of the time)" in _summary(
        record(two(tmp_path))
    )
    whole = write_run(tmp_path / "whole", recipe="allreduce()", workers=2)
    assert not [line for line in _summary(record(whole)) if "stale" in line]


def test_the_summary_mentions_only_an_existing_bound(tmp_path: Path) -> None:
    assert "staleness 2.67 mean, 9 max" in _summary(record(two(tmp_path, held=None)))


def test_the_blocked_share_is_over_all_workers() -> None:
    splits = [{"computing": 3.0, "waiting": 1.0}, {"computing": 4.0, "waiting": 0.0}]
    found = {"processes": ["worker 0", "worker 1"], "time_breakdown": splits}
    assert staleness.blocked_share({"blocked_seconds": [1.0, 0.0], **found}) == pytest.approx(0.125)
    assert staleness.blocked_share({"blocked_seconds": None, **found}) is None


def test_the_blocked_share_of_a_worker_of_several_ranks_is_that_of_its_rank_0() -> None:
    splits = [{"computing": 3.0, "waiting": 1.0}, {"computing": 9.0}, {"computing": 4.0}, {"computing": 9.0}]
    processes = ["worker 0", "worker 0 rank 1", "worker 1", "worker 1 rank 1"]
    found = {"blocked_seconds": [1.0, 0.0], "processes": processes, "time_breakdown": splits}
    assert staleness.blocked_shares(found) == [0.25, 0.0]
    assert staleness.blocked_share(found) == pytest.approx(0.125)
