"""A model sharded over the ranks of a worker trains as the whole model does, in the script's own loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_runs import RECIPES, tolerance
from sharded_replicas import LOOPS, OPTIMIZERS, REFUSED, results

SINGLE = [
    *(f"plain/{make}/float32/allreduce" for make in OPTIMIZERS),
    *(f"{loop}/momentum/float64/allreduce" for loop in LOOPS if loop not in ("scaled", *REFUSED)),
    "scaled/adamw/float32/allreduce",
    "saved/adamw/float64/allreduce",
]
UNEVEN = [f"{job}/momentum/float64/allreduce" for job in ("plain", "accumulated", "saved", "streamed")]
"""Jobs in which one of four ranks has no sample of the last batch."""
SEVERAL = [f"clipped/momentum/float64/{recipe}" for recipe in RECIPES] + [
    "accumulated/momentum/float64/allreduce",
    "again/momentum/float64/diloco(every=2)",
    "plain/adamw/float32/local_sgd(every=2)",
]


@pytest.mark.parametrize(("ranks", "jobs"), [(2, SINGLE), (4, UNEVEN), pytest.param(4, SINGLE, marks=pytest.mark.long)])
def test_a_sharded_model_trains_as_in_one_process(ranks: int, jobs: list[str], tmp_path: Path) -> None:
    found = results(tmp_path, 1, ranks, jobs)
    wrong = {job: one for job, one in found.items() if max(one.values()) > (1e-5 if "float32" in job else 1e-12)}
    assert not wrong
    assert found.keys() == set(jobs)


def test_sharded_replicas_equal_whole_workers(tmp_path: Path) -> None:
    found = results(tmp_path, 2, 2, SEVERAL)
    tolerances = {job: 1e-5 if "float32" in job else tolerance(job) for job in SEVERAL}
    wrong = {job: one for job, one in found.items() if one["parameters"] > tolerances[job]}
    assert not wrong
    assert found.keys() == set(SEVERAL)
