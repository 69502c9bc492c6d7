"""Failures and recovery are reported from the log only: in the record, on the terminal and on the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from report.synthetic_runs import training, with_deaths, write_run

from stretto.report import time_series
from stretto.report.html_report import write
from stretto.report.incidents import in_lines, incidents
from stretto.report.run_log import read
from stretto.report.run_record import record


@pytest.fixture
def died(tmp_path: Path) -> Path:
    events = with_deaths(training(3, 0.02, 1000, 1, 0.9))
    return write_run(tmp_path / "run", recipe="allreduce()", workers=3, events=events)


def test_each_failure_is_reported_with_its_recovery(died: Path) -> None:
    back = "2 workers continued after 0.240 s as generation 2, restarted after 1.00 s"
    lost = "2 workers continued after 0.100 s as generation 4, did not rejoin"
    assert [str(fate) for fate in incidents(read(died))] == [
        f"worker 1, at 0.510 s: failed (killed by SIGKILL, injected); {back}",
        "worker 2, at 2.00 s: paused (injected)",
        "worker 2, at 2.30 s: slow (no heartbeat for 0.3 s)",
        f"worker 2, at 2.50 s: failed (no heartbeat for 0.5 s); {lost}",
    ]


def test_a_failure_before_the_first_generation_interrupts_no_training(tmp_path: Path) -> None:
    early = {
        "event": "membership",
        "what": "failed",
        "worker": 1,
        "incarnation": 0,
        "generation": 0,
        "why": "killed by SIGKILL",
    }
    events = with_deaths(training(3, 0.02, 1000, 1, 0.9))
    begun = next(one for one in events if one.get("what") == "formed")
    shift = {name: begun[name] - 2.0 for name in ("t", "at")}
    joined = {**begun, "what": "joined", "worker": 1, "process": "worker 1", "incarnation": 1}
    folder = write_run(tmp_path / "run", recipe="allreduce()", workers=3, events=[{**early, **shift}, joined, *events])
    told = str(incidents(read(folder))[0])
    assert told.startswith("worker 1, 2.50 s before training started: failed (killed by SIGKILL")
    assert told.endswith("); restarted after 2.00 s, then 3 workers started as generation 1")


def test_the_record_lists_the_failures(died: Path) -> None:
    found = record(died)
    assert [(one["process"], one["incarnation"], one["samples_redone"]) for one in found["failures"]] == [
        ("worker 1", 0, 24),
        ("worker 2", 0, None),
    ]
    assert found["failures"][0]["seconds"] == pytest.approx(0.51)
    assert found["failures"][0]["downtime_seconds"] == pytest.approx(1.0)
    assert found["failures"][1]["downtime_seconds"] is None


def test_a_run_that_continued_without_failed_workers_has_finished(died: Path, tmp_path: Path) -> None:
    assert record(died)["failed"] is None
    events = [one for one in with_deaths(training(3, 0.02, 1000, 1, 0.9)) if one["event"] != "end"]
    torn = write_run(tmp_path / "torn", recipe="allreduce()", workers=3, events=events)
    assert record(torn)["failed"] == "the run did not finish"


def test_a_restarted_worker_must_finish(tmp_path: Path) -> None:
    events = [
        one for one in with_deaths(training(3, 0.02, 1000, 1, 0.9)) if (one["event"], one["worker"]) != ("end", 1)
    ]
    folder = write_run(tmp_path / "run", recipe="allreduce()", workers=3, events=events)
    assert record(folder)["failed"] == "the run did not finish"


def test_times_are_those_of_the_workers_clock(died: Path) -> None:
    whole = [(one.seconds, one.text, one.lost) for one in time_series.moments(read(died))]
    lost = [(who, lost) for _, who, lost in whole]
    assert lost == [("worker 1", True), ("worker 1 joined", False), ("worker 2", True), ("worker 2", True)]
    assert [t for t, _, _ in whole] == pytest.approx([0.51, 1.41, 1.9, 2.3], abs=0.1)  # less the evaluations before


def test_without_a_common_clock_times_are_unchanged(tmp_path: Path) -> None:
    events = with_deaths(training(3, 0.02, 1000, 1, 0.9))
    for event in events:
        event.pop("at", None)
    folder = write_run(tmp_path / "run", recipe="allreduce()", workers=3, events=events)
    assert incidents(read(folder))[0].t == pytest.approx(2.01)


def test_the_page_has_a_table_and_marks(died: Path, tmp_path: Path) -> None:
    text = write(died).read_text()
    for word in (
        "Failures and recovery",
        "samples redone",
        "worker 1 joined",
        "Vertical lines: failures and pauses (red)",
    ):
        assert word in text
    assert ">24<" in text
    peaceful = write(write_run(tmp_path / "other", recipe="allreduce()", workers=3)).read_text()
    assert "Failures and recovery" not in peaceful
    assert "Upright lines" not in peaceful


def test_many_failures_are_truncated(tmp_path: Path) -> None:
    gone = {"event": "membership", "worker": 1, "what": "failed", "generation": 1, "why": "killed by SIGKILL"}
    many = [{**gone, "t": 0.01 * life, "incarnation": life} for life in range(200)]
    folder = write_run(tmp_path / "run", workers=2, recipe="allreduce()", events=training(2, 0.02, 1000, 1, 0.9) + many)
    text = write(folder).read_text()
    assert "The last 40 of 200" in text
    assert len(text.encode()) < 400_000
    assert in_lines(read(folder))[-1] == "and 195 more; the page lists all"
    assert len(in_lines(read(folder))) == 6


def test_failures_of_servers_are_reported(tmp_path: Path) -> None:
    gone = {
        "event": "membership",
        "t": 1.0,
        "process": "server 0",
        "incarnation": 0,
        "what": "failed",
        "why": "killed by SIGKILL",
    }
    back = {**gone, "t": 1.4, "incarnation": 1, "what": "joined"}
    other = [{**one, "process": "coordinator", "t": one["t"] + 0.1} for one in (gone, back)]
    events = [*training(2, 0.02, 1000, 1, 0.9), gone, back, *other]
    folder = write_run(tmp_path / "run", workers=2, recipe="allreduce()", events=events)
    assert in_lines(read(folder)) == [
        "server 0, at 1.00 s: failed (killed by SIGKILL); restarted after 0.400 s",
        "coordinator, at 1.10 s: failed (killed by SIGKILL); restarted after 0.400 s",
    ]
    assert record(folder)["failed"] is None


@pytest.mark.parametrize("process", ["coordinator", "relay"])
def test_an_error_of_a_restarted_coordinator_or_relay_is_not_a_failure(tmp_path: Path, process: str) -> None:
    error = {"event": "error", "t": 1.0, "process": process, "kind": "OSError", "text": "no space"}
    events = [*training(2, 0.02, 1000, 1, 0.9), error]
    assert record(write_run(tmp_path / "whole", workers=2, recipe="a()", events=events))["failed"] is None
    torn = [one for one in events if one["event"] != "end"]
    failed = record(write_run(tmp_path / "torn", workers=2, recipe="a()", events=torn))["failed"]
    assert failed == f"{process} failed: OSError: no space"


def test_a_log_with_odd_events_still_has_a_page(tmp_path: Path) -> None:
    odd = [
        {"event": "membership", "worker": 0, "t": 1.0},
        {"event": "membership", "worker": 0, "t": None, "what": "failed", "incarnation": None, "why": None},
        {"event": "membership", "worker": 5, "t": 2.0, "what": "unheard of"},
        {"event": "fault_injected", "worker": 0, "t": 1.0},
        {"event": "fault_injected", "worker": 0, "t": 1.0, "verb": "pause"},
    ]
    events = [*training(2, 0.02, 1000, 1, 0.9), *odd]
    assert (
        "Failures and recovery"
        in write(write_run(tmp_path / "run", workers=2, recipe="a()", events=events)).read_text()
    )
