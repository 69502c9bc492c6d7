"""Real processes are struck, and the run goes on: some of the cases of `python -m benchmarks survival`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.survival import Case, one

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
CASES = [
    Case("allreduce", "worker 0", "exchanging", "KILL"),
    Case("local_sgd(every=4)", "another worker", "epoch end", "TERM"),
    Case("allreduce", "another worker", "start", "STOP"),
    Case("async_sgd(shards=2)", "server", "computing", "KILL"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_run_goes_on(case: Case, tmp_path: Path) -> None:
    outcome = one(case, case.recipe, tmp_path / "run", ENVIRONMENT)
    assert outcome.code == 0, outcome.told
    assert outcome.once
    assert outcome.equal
    assert outcome.accuracy > 0.6
    assert outcome.deaths or case.signal == "TERM" or case.who in ("server", "coordinator")
