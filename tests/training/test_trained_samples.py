"""The record of a run against its model: an embedding counts how often each sample was really trained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.counting_model import Counted, run_counted

SLOW = ["--pause", "0.05"]


def assert_record_is_true(run: Counted) -> None:
    """Compare the record with the model, and its numbers of samples with each other."""
    assert run.code == 0, run.text
    assert run.recorded == run.epochs[-len(run.recorded) :]
    record = run.record
    assert record["samples"] == record["samples_before"] + sum(record["samples_by_worker"])
    assert record["samples"] == sum(times * samples for epoch in run.epochs for times, samples in epoch.items())
    assert record["samples_per_second"] * record["seconds"] == pytest.approx(record["samples"])
    lines = re.findall(r"epoch (\d+) ended: step \d+, ([\d,]+) samples", run.text)
    assert lines
    for epoch, samples in lines:
        trained = [times * each for counts in run.epochs[: int(epoch)] for times, each in counts.items()]
        assert int(samples.replace(",", "")) == sum(trained)


@pytest.mark.parametrize(
    "recipe", ["async_sgd", pytest.param("local_sgd(every=1)", marks=pytest.mark.long), "allreduce"]
)
def test_samples_that_an_epoch_leaves_without_a_step_do_not_count(recipe: str, tmp_path: Path) -> None:
    run = run_counted(tmp_path, recipe, options=["-n", "2"], script=["--accumulate", "4", "--drop"])
    assert_record_is_true(run)
    assert all(0 < epoch[0] < 60 for epoch in run.epochs)


@pytest.mark.parametrize("recipe", ["local_sgd(every=3)", pytest.param("allreduce", marks=pytest.mark.long)])
def test_samples_of_the_last_step_of_an_accumulating_loop_count_at_every_worker(recipe: str, tmp_path: Path) -> None:
    """Each of 4 workers has a share of all 8 steps of an epoch, though there are 30 batches."""
    run = run_counted(tmp_path, recipe, options=["-n", "4"], script=["--accumulate", "2", "--tail", "--drop"])
    assert_record_is_true(run)
    assert run.epochs == [{1: 240}] * 2


@pytest.mark.parametrize(
    ("recipe", "strike"),
    [
        ("async_sgd(shards=2)", "1:KILL:stepped:9:shard"),
        ("async_sgd", "1:KILL:computed:4"),
        pytest.param("async_sgd", "0:KILL:stepped:5:coordinator", marks=pytest.mark.long),
        ("local_sgd(every=3)", "1:KILL:stepped:5"),
        pytest.param("local_sgd(every=3)", "1:KILL:stepped:11", marks=pytest.mark.long),
        pytest.param("allreduce", "0:KILL:computed:4", marks=pytest.mark.long),
    ],
)
def test_work_that_was_lost_and_repeated_counts_once(recipe: str, strike: str, tmp_path: Path) -> None:
    run = run_counted(tmp_path, recipe, options=["-n", "3"], script=[*SLOW, "--strike", strike])
    assert_record_is_true(run)
    assert run.epochs == [{1: 240}] * 2
    assert run.record["failures"]


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        ("local_sgd(every=3)", "pipeline(stages=2)"),
        pytest.param("allreduce", "sharded(over=2)", marks=pytest.mark.long),
        pytest.param("async_sgd", "pipeline(stages=2)", marks=pytest.mark.long),
    ],
)
def test_worker_of_two_processes_of_which_one_is_killed_loses_no_sample(
    recipe: str, layout: str, tmp_path: Path
) -> None:
    script = [*SLOW, "--divided", "--strike", "1.1:KILL:stepped:5"]
    run = run_counted(tmp_path, recipe, options=["-n", "4", "--layout", layout], script=script)
    assert_record_is_true(run)
    assert run.epochs == [{1: 240}] * 2
    assert run.record["failures"]


@pytest.mark.parametrize("recipe", ["local_sgd(every=3)", "async_sgd"])
def test_resumed_run_counts_each_sample_once_and_names_those_of_its_checkpoint(recipe: str, tmp_path: Path) -> None:
    options = ["-n", "2", "--checkpoint-every", "2 rounds"]
    script = [*SLOW, "--strike", "1:KILL:stepped:12:launcher"]
    assert run_counted(tmp_path, recipe, options=options, script=script).code == -9
    resume = ["--resume", str(tmp_path / "run-1")]
    assert_record_is_true(run := run_counted(tmp_path, recipe, options=[*options, *resume], script=script))
    assert run.epochs == [{1: 240}] * 2
    assert run.record["samples_before"] > 0
