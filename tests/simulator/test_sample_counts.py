"""Samples by worker in the record of a simulated run sum to the samples trained, when workers were killed, too."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from example_counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulator.failures import FREE, SAMPLES, faults, is_whole, lived
from simulator.harness import Ended

from stretto.report.run_record import record

EPOCHS = 2


def trained(folder: Path, recipe: str, fault: str, workers: int) -> list[int]:
    ended: Ended = lived(recipe, fault, workers, EPOCHS, folder=folder)
    is_whole(ended, recipe, EPOCHS)
    found = record(folder / "run")
    assert found["samples"] == EPOCHS * SAMPLES
    return list(found["samples_by_worker"])


@settings(max_examples=examples(16))
@given(st.sampled_from(FREE), faults())
@example("async_sgd", (2, "kill worker 1 at 0.2s"))
def test_samples_of_all_workers_sum_to_those_that_were_trained(recipe: str, drawn: tuple[int, str]) -> None:
    workers, fault = drawn
    with TemporaryDirectory() as folder:
        found = trained(Path(folder), recipe, fault, workers)
    assert sum(found) == EPOCHS * SAMPLES
    assert len(found) == workers


@pytest.mark.parametrize("at", ["50ms", "120ms"])
def test_a_worker_that_was_killed_keeps_the_samples_that_it_has_trained(at: str, tmp_path: Path) -> None:
    found = trained(tmp_path, "async_sgd", f"kill worker 1 at {at}, back after 10s", 3)
    assert all(found)
    assert found[1] < min(found[0], found[2])


@pytest.mark.parametrize("at", ["70ms", "79ms", "82ms"])
def test_what_a_worker_had_at_the_end_of_an_epoch_counts_once_in_the_next(at: str, tmp_path: Path) -> None:
    """The worker fails before the exchange that would have carried it: the next epoch begins without it."""
    found = trained(tmp_path, "local_sgd(every=3)", f"kill worker 0 at {at}", 3)
    assert sum(found) == EPOCHS * SAMPLES
