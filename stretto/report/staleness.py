"""How late updates came: what workers say of each, counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from stretto.events import Event
from stretto.report.run_log import History


@dataclass(frozen=True)
class Update:
    """One update that became part of the model, by whom, and how many versions had passed it by."""

    t: float
    worker: int
    staleness: int


@dataclass(frozen=True)
class Tally:
    """How many updates had which staleness."""

    counts: Counter[int]

    @property
    def updates(self) -> int:
        """How many there were."""
        return self.counts.total()

    @property
    def mean(self) -> float | None:
        """Over all updates, each counting once."""
        return sum(value * times for value, times in self.counts.items()) / self.updates if self.updates else None

    @property
    def max(self) -> int | None:
        """The largest."""
        return max(self.counts, default=None)


def updates(history: History) -> list[Update]:
    """All updates of a run in the order of time. Those that a worker told of at once are spread over the time since."""
    found = chain.from_iterable(_of(history, worker) for worker in range(history.workers))
    return sorted(found, key=lambda update: update.t)


def _of(history: History, worker: int) -> Iterable[Update]:
    events = (event for event in history.of("update_applied") if event["worker"] == worker)
    before = 0.0
    for event in sorted(events, key=lambda event: event["t"]):
        found, t = _stalenesses(event), event["t"]
        yield from (Update(before + (t - before) * i / len(found), worker, one) for i, one in enumerate(found, 1))
        before = t


def _stalenesses(event: Event) -> list[int]:
    rows = event.get("updates")
    known = (_staleness(row) for row in (rows if isinstance(rows, list) else ()))
    return [one for one in known if one is not None]


def _staleness(row: object) -> int | None:
    """From a row of round, version, staleness and samples, unless it is none."""
    value: Any = row[2] if isinstance(row, list) and len(row) > 2 else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def tally(found: Iterable[Update]) -> Tally:
    """All of them counted together."""
    return Tally(Counter(update.staleness for update in found))


def by_worker(history: History) -> list[Tally]:
    """A count for each worker, empty for one whose updates nobody told of."""
    found = updates(history)
    counts: list[Counter[int]] = [Counter() for _ in range(history.workers)]
    for update in found:
        counts[update.worker][update.staleness] += 1
    return [Tally(one) for one in counts]


def together(tallies: Iterable[Tally]) -> Tally:
    """Several counts as one."""
    counts: Counter[int] = Counter()
    for one in tallies:
        counts.update(one.counts)
    return Tally(counts)


def summary(history: History) -> dict[str, Any] | None:
    """What the record of a run says of staleness, or None when no update was told of."""
    all_of_them = tally(updates(history))
    if not all_of_them.updates:
        return None
    histogram = {str(value): all_of_them.counts[value] for value in sorted(all_of_them.counts)}
    return {"mean": all_of_them.mean, "max": all_of_them.max, "histogram": histogram}


def held_share(record: dict[str, Any]) -> float | None:
    """The share of the time of all workers together that the bound made them wait."""
    whole = sum(sum(split.values()) for split in record["time_breakdown"])
    held = record.get("blocked_seconds")
    return sum(held) / whole if held is not None and whole else None


def held_shares(record: dict[str, Any]) -> list[float | None]:
    """The same for each worker alone."""
    wholes = (sum(split.values()) for split in record["time_breakdown"])
    held = record.get("blocked_seconds") or []
    return [lost / whole if whole else None for lost, whole in zip(held, wholes, strict=True)]
