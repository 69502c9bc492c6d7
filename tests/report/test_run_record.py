"""A record is what the log says, summed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report.synthetic_runs import training, write_run

from stretto.errors import LogError
from stretto.report.run_record import BEYOND_ONE_RUN, record, unstarted


def test_samples_bytes_and_rounds_sum_over_workers(tmp_path: Path) -> None:
    found = record(write_run(tmp_path / "run", recipe="local_sgd(every=5)", workers=3, every=5, bytes_a_round=700))
    assert found["samples"] == 3 * 150 * 8
    assert found["rounds"] == 30
    assert found["bytes_sent"] == [30 * 700] * 3
    assert found["bytes_received"] == [30 * 700] * 3
    assert found["steps"] == 150


def test_seconds_are_training_time_and_give_the_rate(tmp_path: Path) -> None:
    found = record(write_run(tmp_path / "run", step_s=0.02))
    assert found["seconds"] == pytest.approx(3.0)
    assert found["wall_seconds"] == pytest.approx(3.3)
    assert found["samples_per_second"] == pytest.approx(1200 / 3.0)


def test_the_parts_of_each_workers_time_sum_to_the_whole(tmp_path: Path) -> None:
    found = record(write_run(tmp_path / "run", recipe="allreduce()", workers=2))
    assert len(found["time_breakdown"]) == 2
    for split in found["time_breakdown"]:
        assert sum(split.values()) == pytest.approx(found["wall_seconds"], rel=1e-6)


def test_every_epoch_has_sample_counts(tmp_path: Path) -> None:
    found = record(write_run(tmp_path / "run", recipe="allreduce()", workers=2))
    assert found["sample_counts"] == [{"once": 800, "twice": 0, "never": 0, "dropped": 0}] * 3
    assert sum(seen["once"] for seen in found["sample_counts"]) == found["samples"]


def test_metrics_are_the_last_of_each(tmp_path: Path) -> None:
    events = training(1, 0.02, 0, 0, 0.97)
    early = {"event": "evaluation", "t": 0.1, "worker": 0, "samples": 8, "training_s": 0.1, "metrics": {"early": 1.0}}
    found = record(write_run(tmp_path / "run", events=[early, *events]))
    assert set(found["metrics"]) == {"early", "test_accuracy", "test_loss"}
    assert found["metrics"]["test_loss"] == pytest.approx(0.2 + 30 / 150 / 10)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({}, "single process"),
        ({"global_batch_of": 4}, "single process (global batch)"),
        ({"recipe": "allreduce()", "workers": 2}, "allreduce()"),
    ],
)
def test_a_run_has_the_name_of_its_recipe_or_baseline(tmp_path: Path, asked: dict[str, object], name: str) -> None:
    assert record(write_run(tmp_path / "run", **asked))["recipe"] == name


def test_a_cut_off_last_line_is_skipped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    whole = record(folder)
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"event": "end", "t": 99')
    assert record(folder) == whole


def test_a_failed_run_has_partial_results_and_its_reason(tmp_path: Path) -> None:
    until = [event for event in training(2, 0.02, 1000, 1, 0.97) if event["t"] <= 1.51]
    boom = {"event": "error", "t": 1.6, "worker": 1, "kind": "ValueError", "text": "boom", "consequence": False}
    lost = {"event": "error", "t": 1.5, "worker": 0, "kind": "TransportError", "text": "gone", "consequence": True}
    found = record(write_run(tmp_path / "run", recipe="allreduce()", workers=2, events=[*until, lost, boom]))
    assert found["failed"] == "worker 1 failed: ValueError: boom"
    assert 0 < found["samples"] < 2 * 1200
    assert found["samples"] == 2 * 8 * 70
    assert found["seconds"] == pytest.approx(1.4)
    assert found["bytes_sent"] == [70_000, 70_000]


def test_a_run_without_end_events_has_failed(tmp_path: Path) -> None:
    events = [event for event in training(2, 0.02, 0, 1, 0.97) if event["event"] != "end"]
    assert record(write_run(tmp_path / "run", recipe="allreduce()", workers=2, events=events))["failed"]


def test_a_run_without_events_has_a_record(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe="allreduce()", workers=2, events=[])
    (folder / "events.jsonl").unlink()
    found = record(folder)
    assert found["samples"] == 0
    assert found["seconds"] is None
    assert found["failed"]


def test_values_that_are_not_finite_are_no_numbers(tmp_path: Path) -> None:
    events = training(1, 0.02, 0, 0, 0.97)
    evaluation = next(event for event in reversed(events) if event["event"] == "evaluation")
    evaluation["metrics"] = {"test_accuracy": None, "test_loss": float("inf")}
    folder = write_run(tmp_path / "run", events=events)
    text = (folder / "events.jsonl").read_text().replace("Infinity", "null")
    (folder / "events.jsonl").write_text(text)
    assert record(folder)["metrics"] == {"test_accuracy": None, "test_loss": None}


def test_a_record_is_plain_json_and_has_the_promised_keys(tmp_path: Path) -> None:
    found = record(write_run(tmp_path / "run"))
    assert json.loads(json.dumps(found)) == found
    promised = (
        "recipe workers seed metrics seconds steps samples bytes_sent parameter_distance time_breakdown sample_counts"
    )
    promised += " prediction_disagreement reached staleness bytes_received failures samples_by_worker blocked_seconds"
    assert set(promised.split()) <= set(found)


def test_a_run_that_never_started_has_the_same_keys(tmp_path: Path) -> None:
    asked = {"recipe": "x()", "workers": 2, "global_batch_of": 1, "seed": 0, "script": "train.py", "folder": tmp_path}
    assert set(unstarted(**asked, failed="no")) == set(record(write_run(tmp_path / "run")))
    assert set(BEYOND_ONE_RUN) <= set(unstarted(**asked, failed="no"))


def test_a_folder_without_run_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"run\.json"):
        record(tmp_path)
    (tmp_path / "run.json").write_text("[1, 2")
    with pytest.raises(LogError, match="expected"):
        record(tmp_path)


def test_evaluations_are_sorted_by_samples_and_repeated_ones_count_once(tmp_path: Path) -> None:
    """Evaluations of several data sets after equal samples are one."""
    events = training(1, 0.02, 0, 0, 0.97)
    again = {"event": "evaluation", "t": 9.0, "worker": 0, "samples": 400, "training_s": 8.0}
    more = [again | {"metrics": {"test_accuracy": 1.0}}, again | {"metrics": {"test_loss": 2.0}}]
    found = record(write_run(tmp_path / "run", events=[*events, *more]))["evaluations"]
    assert [one["samples"] for one in found] == [400, 800, 1200]
    assert found[0] == {"samples": 400, "training_s": 8.0, "metrics": {"test_accuracy": 1.0, "test_loss": 2.0}}
