"""Staleness of updates, and the time that workers were blocked by the staleness bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from stretto.events import Event, process_name
from stretto.report.run_log import History


@dataclass(frozen=True)
class Update:
    """An applied update: its time in seconds, its worker and its staleness in versions."""

    t: float
    worker: int
    staleness: int


@dataclass(frozen=True)
class StalenessCounts:
    """Number of updates for each staleness."""

    counts: Counter[int]

    @property
    def updates(self) -> int:
        """Number of updates."""
        return self.counts.total()

    @property
    def mean(self) -> float | None:
        """Mean staleness over all updates, or None without updates."""
        return sum(value * count for value, count in self.counts.items()) / self.updates if self.updates else None

    @property
    def max(self) -> int | None:
        """Largest staleness, or None without updates."""
        return max(self.counts, default=None)


def updates(history: History) -> list[Update]:
    """Return all updates of a run in order of time.

    The updates in one event are taken to be evenly spread over the time since the previous event of the worker.
    """
    applied = chain.from_iterable(_of(history, worker) for worker in range(history.workers))
    return sorted(applied, key=lambda update: update.t)


def _of(history: History, worker: int) -> Iterable[Update]:
    events = (event for event in history.of("update_applied") if event["worker"] == worker)
    previous_t = 0.0
    for event in sorted(events, key=lambda event: event["t"]):
        values, t = _stalenesses(event), event["t"]
        yield from (
            Update(previous_t + (t - previous_t) * i / len(values), worker, value) for i, value in enumerate(values, 1)
        )
        previous_t = t


def _stalenesses(event: Event) -> list[int]:
    rows = event.get("updates")
    values = (_staleness(row) for row in (rows if isinstance(rows, list) else ()))
    return [value for value in values if value is not None]


def _staleness(row: object) -> int | None:
    """Return the staleness in a row [round, version, staleness, samples], or None if the row is malformed."""
    value: Any = row[2] if isinstance(row, list) and len(row) > 2 else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def count(applied: Iterable[Update]) -> StalenessCounts:
    """Count updates by staleness."""
    return StalenessCounts(Counter(update.staleness for update in applied))


def by_worker(history: History) -> list[StalenessCounts]:
    """Return the counts of each worker, empty for a worker without known updates."""
    counts: list[Counter[int]] = [Counter() for _ in range(history.workers)]
    for update in updates(history):
        counts[update.worker][update.staleness] += 1
    return [StalenessCounts(of_worker) for of_worker in counts]


def merged(several: Iterable[StalenessCounts]) -> StalenessCounts:
    """Return the sum of several counts."""
    counts: Counter[int] = Counter()
    for part in several:
        counts.update(part.counts)
    return StalenessCounts(counts)


def summary(history: History) -> dict[str, Any] | None:
    """Return the staleness field of a run record, or None when no update is known."""
    total = count(updates(history))
    if not total.updates:
        return None
    histogram = {str(value): total.counts[value] for value in sorted(total.counts)}
    return {"mean": total.mean, "max": total.max, "histogram": histogram}


def blocked_share(record: dict[str, Any]) -> float | None:
    """Return the share of the time of all workers for which the staleness bound blocked them."""
    blocked = record.get("blocked_seconds") or []
    total = sum(_totals(record, len(blocked)))
    return sum(blocked) / total if total else None


def blocked_shares(record: dict[str, Any]) -> list[float | None]:
    """Return the share of its time for which the staleness bound blocked each worker."""
    blocked = record.get("blocked_seconds") or []
    totals = _totals(record, len(blocked))
    return [seconds / total if total else None for seconds, total in zip(blocked, totals, strict=True)]


def _totals(record: dict[str, Any], workers: int) -> list[float]:
    """Return the seconds of each worker: those of its rank 0."""
    phases = dict(zip(record["processes"], record["time_breakdown"], strict=True))
    return [sum(phases[process_name(worker)].values()) for worker in range(workers)]
