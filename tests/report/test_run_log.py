"""Totals of a run include the work of earlier incarnations of restarted workers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from report.synthetic_runs import named

from stretto.report import html_report
from stretto.report.run_log import read
from stretto.report.run_record import record


def counted(worker: int, t: float, samples: int, kind: str = "progress") -> dict[str, object]:
    split = {"computing": t / 2, "other": t / 2}
    exchanged = {"gradients": [2 * samples, samples, 2 * samples, samples]}
    carries = {
        "step": samples,
        "samples": samples,
        "rounds": samples,
        "time_breakdown": split,
        "bytes_sent": 10 * samples,
    }
    return {"event": kind, "t": t, "worker": worker, **carries, "traffic": exchanged, "values_sent": [samples, samples]}


def begun(worker: int, t: float) -> dict[str, object]:
    return {"event": "start", "t": t, "worker": worker}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Worker 1 has three lives; the second ends before it counts anything."""
    events = [
        *(begun(worker, 0.0) for worker in range(2)),
        counted(0, 1.0, 100),
        counted(1, 1.0, 100),
        begun(1, 2.0),
        begun(1, 3.0),
        counted(1, 3.5, 5),
        {"event": "epoch", "t": 4.0, "worker": 0, "epoch": 1, "samples": 420, "training_s": 4.0},
        counted(1, 4.0, 30, "end"),
        counted(0, 4.0, 320, "end"),
    ]
    (tmp_path / "run.json").write_bytes(msgspec.json.encode({"workers": 2, "recipe": "allreduce"}))
    (tmp_path / "events.jsonl").write_bytes(b"".join(msgspec.json.encode(named(one)) + b"\n" for one in events))
    return tmp_path


def test_totals_add_up_over_incarnations_of_a_worker(folder: Path) -> None:
    found = read(folder).counts(1)
    assert [one["samples"] for one in found] == [100, 105, 130]
    assert [one["bytes_sent"] for one in found] == [1000, 1050, 1300]
    assert found[-1]["traffic"] == {"gradients": [260, 130, 260, 130]}
    assert found[-1]["time_breakdown"] == {"computing": 2.5, "other": 2.5}
    assert found[-1]["step"] == 30, "which it was told when it came"


def test_an_epoch_repeated_after_a_rollback_counts_once(folder: Path) -> None:
    """The second epoch is not repeated after the rollback, because the run ended before."""
    with (folder / "events.jsonl").open("ab") as file:
        for epoch, once in ((2, 9753), (1, 8642)):
            end = {
                "event": "epoch",
                "t": 5.0,
                "worker": 0,
                "epoch": epoch,
                "samples": 420,
                "sample_counts": {"once": once},
            }
            file.write(msgspec.json.encode(named(end)) + b"\n")
    assert record(folder)["sample_counts"] == [{"once": 8642}]
    shown = html_report.write(folder).read_text()
    assert "8,642" in shown
    assert "9,753" not in shown


def test_the_record_counts_all_bytes_and_each_sample_once(folder: Path) -> None:
    found = record(folder)
    assert found["bytes_sent"] == [3200, 1300]
    assert found["samples_by_worker"] == [320, 130]
    assert found["samples"] == 420


def test_late_event_of_a_worker_that_had_failed_before_the_last_epoch_ended_counts_nothing(tmp_path: Path) -> None:
    """Worker 1 was stopped and declared failed; the epoch has its 40 samples of the 64 that it had noted itself."""
    at_end = {"workers": [{"worker": 0, "samples": 200}], "trained": {"0": 200, "1": 40}}
    sums = {"sample_counts": {"once": 240, "twice": 0, "never": 0}}
    events = [
        *(begun(worker, 0.0) for worker in range(2)),
        counted(1, 1.0, 64),
        {"event": "membership", "t": 3.0, "worker": 1, "what": "failed", "generation": 1, "why": "no heartbeat"},
        {"event": "epoch", "t": 4.0, "worker": 0, "epoch": 1, "samples": 240, "training_s": 4.0, **at_end, **sums},
        counted(0, 4.0, 200, "end"),
        counted(1, 4.5, 80),
    ]
    (tmp_path / "run.json").write_bytes(msgspec.json.encode({"workers": 2, "recipe": "async_sgd"}))
    (tmp_path / "events.jsonl").write_bytes(b"".join(msgspec.json.encode(named(one)) + b"\n" for one in events))
    found = record(tmp_path)
    assert (found["samples"], found["samples_before"], found["samples_by_worker"]) == (240, 0, [200, 40])
