"""Comparison of runs by what they trained: metrics at equal numbers of samples.

A script that counts its own steps trains on N times the samples with N workers, so its final metrics and its training
times belong to different work. `samples` counts those of all workers.
"""

from __future__ import annotations

from collections.abc import Iterable

from stretto.report.run_log import number
from stretto.report.run_record import Record

SAME = 0.01
"""Relative difference below which two numbers of samples count as equal."""

NEAR = 0.25
"""Largest distance of an evaluation that is interpolated, as a share of the number of samples."""


def are_same(a: float, b: float) -> bool:
    """Return True if two numbers of samples count as equal."""
    return abs(a - b) <= SAME * max(a, b)


def all_same(records: Iterable[Record]) -> bool:
    """Return True if all runs that did not fail trained on equal numbers of samples."""
    samples = [record["samples"] for record in records if not record["failed"]]
    return not samples or are_same(min(samples), max(samples))


def value_at(record: Record, metric: str, samples: float) -> float | None:
    """Return a metric after this number of samples, interpolated between the evaluations on both sides of it.

    At the end of a run it is the final value. None if an evaluation on either side is missing, is not finite, or is
    farther away than NEAR.
    """
    if are_same(samples, record["samples"]):
        return number(record["metrics"].get(metric))
    evaluations = record.get("evaluations") or []
    before = next((e for e in reversed(evaluations) if e["samples"] <= samples), None)
    after = next((e for e in evaluations if e["samples"] >= samples), None)
    if before is None or after is None or max(samples - before["samples"], after["samples"] - samples) > NEAR * samples:
        return None
    low, high = (number(evaluation["metrics"].get(metric)) for evaluation in (before, after))
    if low is None or high is None:
        return None
    distance: int = after["samples"] - before["samples"]
    return low + (high - low) * (samples - before["samples"]) / distance if distance else low
