"""Rounds and uplink bits of GD-SEC and other methods on convex problems, beside an independent implementation.

Logistic regression with l2 = 0.01 and steps of 1/L over workers in memory, as `python -m experiments convex` runs it:
gradients and parameters in float64, encoded messages in float32. Only the rounding of sums depends on the machine, so
no measurement is repeated. Needs $STRETTO_DATA with the folders a9a and mnist.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import save
from experiments.convex import data, problem
from experiments.convex.descent import Settings, descend
from experiments.convex.methods import GD, method
from experiments.convex.optimum import optimum
from experiments.convex.records import record

QUESTION = "rounds and uplink bits to the target, against gradient descent"
L2 = 0.01
LATE = 2
"""Limit of rounds of a method, as a multiple of the rounds of gradient descent."""

METHODS = (
    GD,
    "gd_sec(beta=0.01, xi=100)",
    "gd_sec(beta=0.01, xi=30)",
    "quantised_gd_sec(beta=0.01, xi=100)",
    "ef21(top_k(0.05))",
    "censoring(xi=1)",
    "Recipe(how=quantise(8))",
    "Recipe(how=error_feedback(top_k(0.1)))",
)


@dataclass(frozen=True)
class Case:
    """A problem; for some methods also the rounds and the share of bits saved of an independent implementation."""

    file: str
    rows: int
    workers: int
    target: float
    labels: data.Labels | None
    field: Mapping[str, tuple[int | None, float | None]]
    wanted: float


CASES = {
    "MNIST, even or odd": Case(
        "mnist",
        2000,
        5,
        1e-6,
        "even",
        {GD: (3760, None), METHODS[1]: (3760, 0.9902), METHODS[2]: (None, 0.9812)},
        wanted=0.985,
    ),
    "a9a": Case(
        "a9a/a9a",
        5000,
        10,
        1e-8,
        None,
        {GD: (756, None), METHODS[1]: (918, 0.9689), METHODS[2]: (847, 0.9337)},
        wanted=0.96,
    ),
}


def run(starts: int | None = None) -> dict[str, Any]:  # noqa: ARG001
    """Run all methods on all problems, print the figures and write them to the results."""
    print(f"convex: {QUESTION}", flush=True)
    cases = {name: _case(name, case) for name, case in CASES.items()}
    results = {"question": QUESTION, "l2": L2, "late": LATE, "cases": cases}
    print(f"  kept in {save('convex', results)}")
    return results


def _case(name: str, case: Case) -> dict[str, Any]:
    objective = problem.build("logistic", data.read(_folder() / case.file, case.rows), labels=case.labels, l2=L2)
    best = optimum(objective, case.target)
    gd = descend(objective, best, method(GD, objective.smoothness), Settings(case.workers, case.target, float64=True))
    settings = Settings(case.workers, case.target, LATE * gd.rounds, float64=True)
    records = []
    for text in METHODS:
        ran = gd if text == GD else descend(objective, best, method(text, objective.smoothness), settings)
        one = record(ran, gd)
        saved = "" if one["saved"] is None else f", {one['saved']:.2%} saved"
        print(f"  {name}: {text}: {ran.rounds} rounds{'' if ran.reached else ', not reached'}{saved}", flush=True)
        rounds, share = case.field.get(text, (None, None))
        records.append({**one, "field_rounds": rounds, "field_saved": share})
    return {
        "rows": case.rows,
        "features": objective.features,
        "workers": case.workers,
        "target": case.target,
        "smoothness": objective.smoothness,
        "wanted": case.wanted,
        "wanted_of": METHODS[1],
        "methods": records,
    }


def _folder() -> Path:
    folder = os.environ.get("STRETTO_DATA")
    if not folder:
        raise SystemExit(
            "convex needs data: STRETTO_DATA=FOLDER python -m benchmarks convex, with FOLDER/a9a and FOLDER/mnist"
        )
    return Path(folder)
