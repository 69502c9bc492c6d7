"""Groups of records that differ only in their seed, with medians and ranges of measures over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.report.run_record import GLOBAL_BATCH, SINGLE_PROCESS, Record

Measure = Callable[[Record], float | None]


@dataclass(frozen=True)
class Spread:
    """Median over seeds, with the range and the number of values."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Group:
    """Runs of one recipe on one number of workers, one per seed; `asked` includes failed runs."""

    recipe: str
    workers: int
    global_batch_of: int
    asked: tuple[Record, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        """Records of the runs that did not fail."""
        return tuple(record for record in self.asked if not record["failed"])

    @property
    def complete(self) -> bool:
        """True if no run of the group failed."""
        return len(self.records) == len(self.asked)

    @property
    def single_process(self) -> bool:
        """True for a baseline: a single process, with the script's batch or the global batch."""
        return self.recipe in (SINGLE_PROCESS, GLOBAL_BATCH)

    @property
    def label(self) -> str:
        """Name of the group in tables and plots."""
        return f"single process (global batch ×{self.global_batch_of})" if self.recipe == GLOBAL_BATCH else self.recipe

    def spread(self, measure: Measure) -> Spread | None:
        """Return the median and range of a measure over the runs that have it, or None when no run has it."""
        values = [value for record in self.records if (value := measure(record)) is not None]
        if not values:
            return None
        return Spread(statistics.median(values), min(values), max(values), len(values))

    def median(self, measure: Measure) -> float | None:
        """Return the median of a measure, or None when no run has it."""
        spread = self.spread(measure)
        return spread.median if spread else None


def grouped(records: Iterable[Record]) -> list[Group]:
    """Return all groups: single process, single process with global batches, then recipes by number of workers."""
    members: dict[tuple[str, int, int], list[Record]] = {}
    for record in records:
        key = (str(record["recipe"]), int(record["workers"]), int(record.get("global_batch_of") or 1))
        members.setdefault(key, []).append(record)
    groups = [Group(*key, tuple(of_key)) for key, of_key in members.items()]
    return sorted(groups, key=_order)


def _order(group: Group) -> tuple[int, int]:
    if group.recipe == SINGLE_PROCESS:
        return (0, 0)
    return (1, group.global_batch_of) if group.recipe == GLOBAL_BATCH else (2, group.workers)


def worker_counts(groups: Sequence[Group]) -> list[int]:
    """Return the numbers of workers that recipes were run with."""
    return sorted({group.workers for group in groups if not group.single_process})


def at(groups: Sequence[Group], workers: int) -> list[Group]:
    """Return the groups of a plot for a number of workers: its recipes and both baselines."""
    return [
        group for group in groups if workers in (group.workers, group.global_batch_of) or group.recipe == SINGLE_PROCESS
    ]


class Baselines:
    """Runs in a single process that records are compared with."""

    def __init__(self, records: Iterable[Record]) -> None:
        finished = [record for record in records if not record["failed"]]
        self._by_seed = {record["seed"]: record for record in finished if record["recipe"] == SINGLE_PROCESS}
        self._by_folder = {Path(record["folder"]).name: record for record in finished}

    def single_process(self, record: Record) -> Record | None:
        """Return the run in a single process with the script's batch and the same seed."""
        return self._by_seed.get(record["seed"])

    def reference(self, record: Record) -> Record | None:
        """Return the run that a record's final model is compared with: a single process with the global batch."""
        return self._by_folder.get(record.get("compared_with") or "")
