"""Updates that our parameter server applies per second: 0.1 M parameters, 1 to 16 workers, 1 and 2 shards.

The workers are processes that push as fast as they can and compute nothing, encrypted, as `stretto run` starts them,
and plain. Every figure is of a newly started server, and counts only if the server's parameters have become the sum of
all pushed updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from benchmarks.measure import Spread, save
from benchmarks.push import Team, team

QUESTION = "updates applied per second by a parameter server, by workers that only push"
PARAMETERS = 100_000
WORKERS = (1, 2, 4, 8, 16)
SHARDS = (1, 2)
CURVES = (False, True)
SECONDS = 2.0
STARTS = 2

Case = tuple[bool, int, int]
"""True if encrypted, number of shards, number of workers."""


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all cases, print the figures and write them to the results."""
    print(f"updates: {QUESTION}; {PARAMETERS} parameters, {SECONDS:g} s each", flush=True)
    speeds_by_case = take(starts or STARTS)
    record = {
        "question": QUESTION,
        "parameters": PARAMETERS,
        "seconds": SECONDS,
        "starts": starts or STARTS,
        "threads": 1,
        "cases": [_case(case, speeds) for case, speeds in speeds_by_case.items()],
    }
    for one in record["cases"]:
        print(f"  {_named(one)} {one['updates_per_s']['median']:8.0f} updates/s, {one['gb_per_s']:.2f} GB/s both ways")
    print(f"  kept in {save('updates', record, trial=starts is not None)}")
    return record


def take(starts: int) -> Mapping[Case, Sequence[float]]:
    """Return the updates per second of all cases in each start, in alternating order."""
    cases = list(product(CURVES, SHARDS, WORKERS))
    speeds_by_case: dict[Case, list[float]] = {case: [] for case in cases}
    for number in range(starts):
        with team(max(WORKERS)) as pushing:
            for case in cases if number % 2 == 0 else cases[::-1]:
                speeds_by_case[case].append(_pushed(pushing, case))
    return speeds_by_case


def _pushed(pushing: Team, case: Case) -> float:
    curve, shards, workers = case
    return pushing.run(PARAMETERS, workers, SECONDS, curve, shards).rate().updates_per_s


def _case(case: Case, speeds: Sequence[float]) -> dict[str, Any]:
    curve, shards, workers = case
    spread = Spread.of(speeds)
    both_ways = spread.median * 2 * 4 * PARAMETERS / 1e9
    return {
        "curve": curve,
        "shards": shards,
        "workers": workers,
        "updates_per_s": spread.record(),
        "gb_per_s": both_ways,
        "each": [round(one, 1) for one in speeds],
    }


def _named(case: Mapping[str, Any]) -> str:
    kind = "CURVE" if case["curve"] else "plain"
    return f"{kind}, {case['shards']} shards, {case['workers']:2} workers"
