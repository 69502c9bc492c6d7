"""Records that differ only in their seed belong together; what is said of them is a median with its range."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stretto.report.run_record import GLOBAL_BATCH, SINGLE_PROCESS, Record

Measure = Callable[[Record], float | None]


@dataclass(frozen=True)
class Spread:
    """The median over seeds and the range."""

    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True)
class Group:
    """One recipe on one number of workers, over the seeds. `asked` counts the failed runs too."""

    recipe: str
    workers: int
    global_batch_of: int
    asked: tuple[Record, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        """The runs that came to their end."""
        return tuple(record for record in self.asked if not record["failed"])

    @property
    def whole(self) -> bool:
        """Whether no run of it failed."""
        return len(self.records) == len(self.asked)

    @property
    def single_process(self) -> bool:
        """Whether it is one machine without any exchange."""
        return self.recipe in (SINGLE_PROCESS, GLOBAL_BATCH)

    @property
    def label(self) -> str:
        """Its name in tables and plots."""
        return f"single process (global batch ×{self.global_batch_of})" if self.recipe == GLOBAL_BATCH else self.recipe

    def spread(self, measure: Measure) -> Spread | None:
        """A measure over the runs that have it, or None when none has."""
        values = [value for record in self.records if (value := measure(record)) is not None]
        if not values:
            return None
        return Spread(statistics.median(values), min(values), max(values), len(values))

    def median(self, measure: Measure) -> float | None:
        """The median alone."""
        spread = self.spread(measure)
        return spread.median if spread else None


def grouped(records: Iterable[Record]) -> list[Group]:
    """All groups: alone, alone with the joined batches, then the recipes by number of workers."""
    found: dict[tuple[str, int, int], list[Record]] = {}
    for record in records:
        key = (str(record["recipe"]), int(record["workers"]), int(record.get("global_batch_of") or 1))
        found.setdefault(key, []).append(record)
    groups = [Group(*key, tuple(members)) for key, members in found.items()]
    return sorted(groups, key=_place)


def _place(group: Group) -> tuple[int, int]:
    if group.recipe == SINGLE_PROCESS:
        return (0, 0)
    return (1, group.global_batch_of) if group.recipe == GLOBAL_BATCH else (2, group.workers)


def worker_counts(groups: Sequence[Group]) -> list[int]:
    """The numbers of workers that recipes were tried with."""
    return sorted({group.workers for group in groups if not group.single_process})


def at(groups: Sequence[Group], workers: int) -> list[Group]:
    """What belongs in a picture of so many workers: alone, its joined batch and the recipes."""
    return [
        group for group in groups if workers in (group.workers, group.global_batch_of) or group.recipe == SINGLE_PROCESS
    ]


class Peers:
    """Finds, for a record, the runs alone that it is measured against."""

    def __init__(self, records: Iterable[Record]) -> None:
        whole = [record for record in records if not record["failed"]]
        self._alone = {record["seed"]: record for record in whole if record["recipe"] == SINGLE_PROCESS}
        self._by_folder = {Path(record["folder"]).name: record for record in whole}

    def alone(self, record: Record) -> Record | None:
        """The run alone of the same seed."""
        return self._alone.get(record["seed"])

    def reference(self, record: Record) -> Record | None:
        """The run that it ought to end in the same state as: one machine with the joined batch."""
        return self._by_folder.get(record.get("compared_with") or "")
