"""Curves say where on each axis a value belongs."""

from __future__ import annotations

from pathlib import Path

import pytest
from report.synthetic_runs import training, write_run

from stretto.report import run_log, time_series


def test_the_loss_is_the_mean_over_workers_at_each_step(tmp_path: Path) -> None:
    events = [
        {"event": "log", "t": 0.1 * step, "worker": w, "step": step, "samples": 16 * step, "values": {"loss": step + w}}
        for step in (1, 2, 3)
        for w in (0, 1)
    ]
    read = run_log.read(write_run(tmp_path / "run", recipe="allreduce()", workers=2, events=events))
    curve = time_series.loss(read)
    assert [sample.value for sample in curve.samples] == [1.5, 2.5, 3.5]
    assert [sample.samples for sample in curve.samples] == [16, 32, 48]
    assert curve.steps == 1


def test_a_long_curve_is_thinned_to_means_and_says_so(tmp_path: Path) -> None:
    events = [
        {"event": "log", "t": step * 1.0, "worker": 0, "step": step, "samples": step, "values": {"loss": step}}
        for step in range(3000)
    ]
    curve = time_series.loss(run_log.read(write_run(tmp_path / "run", events=events)))
    assert len(curve.samples) <= time_series.MOST_POINTS
    assert curve.steps == 20
    assert curve.samples[0].value == pytest.approx(9.5)
    mean = sum(sample.value for sample in curve.samples) / len(curve.samples)
    assert mean == pytest.approx(sum(range(3000)) / 3000)


def test_training_time_stands_still_while_evaluating(tmp_path: Path) -> None:
    read = run_log.read(write_run(tmp_path / "run", step_s=0.02))
    last = time_series.loss(read).samples[-1]
    assert last.seconds == pytest.approx(3.0, abs=0.02)
    assert [sample.seconds for sample in time_series.metric(read, "test_loss").samples] == pytest.approx(
        [1.0, 2.0, 3.0]
    )


def test_megabytes_are_the_mean_of_what_workers_have_sent(tmp_path: Path) -> None:
    read = run_log.read(write_run(tmp_path / "run", recipe="allreduce()", workers=2, bytes_a_round=10_000))
    sent = [sample.megabytes for sample in time_series.metric(read, "test_accuracy").samples]
    assert sent[-1] == pytest.approx(1.5)
    assert sent == sorted(sent)


def test_values_that_are_not_finite_are_omitted_and_counted(tmp_path: Path) -> None:
    events = training(1, 0.02, 0, 0, 0.97)
    logs = [event for event in events if event["event"] == "log"]
    logs[3]["values"] = {"loss": None}
    read = run_log.read(write_run(tmp_path / "run", events=events))
    assert len(time_series.loss(read).samples) == 149
    assert time_series.not_finite(read) == 1


def test_a_run_without_losses_or_evaluations_has_empty_curves(tmp_path: Path) -> None:
    read = run_log.read(write_run(tmp_path / "run", events=[]))
    assert time_series.loss(read).samples == ()
    assert time_series.metric(read, "anything").samples == ()
