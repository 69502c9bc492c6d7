"""The benchmark of GPUs runs on the CPU, so that the first GPU does not find its errors; without a GPU it refuses."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from docs.documents import ROOT

from benchmarks.gpu import CODECS, MEANS, NO_GPU, Scale, measure

SMALL = Scale(cases=("0.03 M",), starts=1, repetitions=1, segment=2, numbers=64 * 64)


def numbers(record: Any) -> list[float]:
    """Return all numbers of a record."""
    if isinstance(record, dict):
        return [one for value in record.values() for one in numbers(value)]
    return [] if record is None else [float(record)]


def test_every_measure_runs_on_the_cpu() -> None:
    record = measure("cpu", ("shared",), SMALL)
    (case,) = record["speed"]
    assert record["speed"][case].keys() == {"stretto", "torch DDP"}
    assert record["means"]["shared"].keys() == {f"mean, {kind}" for kind in MEANS}
    assert record["memory"][case]["ratio"] > 0.1
    assert record["codecs"].keys() == set(CODECS)
    assert all(math.isfinite(one) for one in numbers(record))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_benchmark_refuses_in_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 1
    assert done.stderr == NO_GPU + "\n"
