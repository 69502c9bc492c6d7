"""A run folder read once: what was asked for, and its events by kind."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from stretto.errors import LogError, explain
from stretto.events import PHASES, Event, read_events

Point = tuple[float, float]
COORDINATOR = -1000
OWN = ("samples", "bytes_sent", "bytes_received", "blocked_s", "time_breakdown", "traffic", "values_sent")
"""What a process of a worker counts from its own beginning."""
OF_THE_RUN = ("membership", "fault_injected", "error")
"""The kinds of events that are written into the log of the whole run, whatever section is under way."""
FATES = ("joined", "failed", "left")
"""What events of members say of who is in, and who is not."""


@dataclass(frozen=True)
class History:
    """`run` is run.json; `events` maps a kind to its events in the order written."""

    folder: Path
    run: dict[str, Any]
    events: dict[str, list[Event]]

    def of(self, kind: str) -> list[Event]:
        """The events of one kind."""
        return self.events.get(kind, [])

    @cached_property
    def passes(self) -> list[Event]:
        """The end of each pass. What all had to go back across is done again, and counts as it ends then."""
        found: list[Event] = []
        for event in self.of("epoch"):
            while found and (found[-1].get("epoch") or 0) >= (event.get("epoch") or 0):
                found.pop()
            found.append(event)
        return found

    @cached_property
    def workers(self) -> int:
        """How many workers were asked for, and joined later."""
        there = (1 + int(event["worker"]) for event in self.of("start"))
        return max(int(self.run.get("workers") or 1), *there, 1)

    @property
    def ended(self) -> bool:
        """Whether every worker came to its end, but for those that the others have gone on without.

        A section that another one follows has ended: all have begun that together.
        """
        if self.of("section"):
            return True
        ended = {event["worker"] for event in self.of("end") if event["worker"] >= 0}
        return bool(ended) and len(ended | self._away()) >= self.workers

    def _away(self) -> set[int]:
        """Workers that died or left, and did not come back."""
        last = dict.fromkeys(self.run.get("absent", []), "failed")
        last |= {event["worker"]: event.get("what") for event in self.of("membership") if event.get("what") in FATES}
        return {worker for worker, what in last.items() if worker >= 0 and what != "joined"}

    def counts(self, worker: int) -> list[Event]:
        """The running counts of one worker over all its lives, its ends included, oldest first."""
        return self._counts.get(worker, [])

    @cached_property
    def _counts(self) -> dict[int, list[Event]]:
        found: dict[int, list[Event]] = defaultdict(list)
        for event in [*self.of("progress"), *self.of("end")]:
            found[event["worker"]].append(event)
        return {worker: _over_lives(events, self._starts[worker]) for worker, events in found.items()}

    @cached_property
    def _starts(self) -> dict[int, list[float]]:
        """When each life of a worker began, in order."""
        found: dict[int, list[float]] = defaultdict(list)
        for event in sorted(self.of("start"), key=lambda event: event["t"]):
            found[event["worker"]].append(event["t"])
        return found

    @property
    def has_returned(self) -> bool:
        """Whether a worker that was dead came back."""
        return any(len(starts) > 1 for worker, starts in self._starts.items() if worker >= 0)

    def last_counts(self) -> list[Event]:
        """The last counts of every worker; an empty event for one that never counted."""
        return [(self.counts(worker) or [{}])[-1] for worker in range(self.workers)]

    @property
    def trained(self) -> list[int] | None:
        """Samples that count, by worker; None where no coordinator has counted, or not to the end of the run.

        The counts of a worker that was killed lack what it did since it wrote them last.
        """
        found = [event.get("trained") for event in self.passes]
        if not self.ended or not all(found):
            return None
        return [sum(int((one or {}).get(str(worker), 0)) for one in found) for worker in range(self.workers)]

    @property
    def failure(self) -> str | None:
        """Why the run is not whole: the error that came first and was no consequence of another.

        A coordinator that was started again after its own is none.
        """
        found = [event for event in self.of("error") if not (event["worker"] == COORDINATOR and self.ended)]
        errors = sorted(found, key=lambda event: (bool(event.get("consequence")), event["t"]))
        if errors:
            first = errors[0]
            return f"{called(first['worker'])} failed: {first.get('kind')}: {first.get('text')}"
        return None if self.ended else "the run did not come to its end"


def _over_lives(events: list[Event], starts: Sequence[float]) -> list[Event]:
    """Counts in order of time. Each life of a worker begins to count anew; what those before it had is added."""
    found: list[Event] = []
    before: Event = {}
    lives = 1
    for event in sorted(events, key=lambda event: event["t"]):
        while lives < len(starts) and event["t"] >= starts[lives]:
            lives, before = lives + 1, (found or [{}])[-1]
        found.append(event | {name: _sum(before.get(name), event.get(name)) for name in OWN if name in event})
    return found


def _sum(one: Any, other: Any) -> Any:
    """Of numbers, or of all numbers at the same place; what is not there, or no number, adds nothing."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _sum(one.get(name), other.get(name)) for name in {**one, **other}}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_sum(a, b) for a, b in zip(one, other, strict=True)]
    first, second = number(one), number(other)
    if first is None or second is None or isinstance(one, bool) or isinstance(other, bool):
        return one if other is None else other
    return one + other


def called(worker: int) -> str:
    """What a process is called: server s has the number -1-s, which no worker has, and the coordinator one of its own.

    >>> called(2), called(-1), called(-1000)
    ('worker 2', 'server 0', 'the coordinator')
    """
    if worker == COORDINATOR:
        return "the coordinator"
    return f"worker {worker}" if worker >= 0 else f"server {-1 - worker}"


def read(folder: Path) -> History:
    """Read a run folder. A missing log is an empty one: the run died before it wrote anything."""
    events: dict[str, list[Event]] = defaultdict(list)
    path = folder / "events.jsonl"
    for event in read_events(path) if path.exists() else ():
        if isinstance(event.get("event"), str) and isinstance(event.get("worker"), int):
            events[event["event"]].append({**event, "t": number(event.get("t")) or 0.0})
    run = read_json(folder / "run.json")
    if isinstance(run.get("section"), int):
        _add_of_the_run(events, folder.parent / "events.jsonl", run["section"])
    elif events.get("section"):
        _keep_between(events, None, number(events["section"][0].get("at")))
    _on_one_clock(events)
    return History(folder, run, dict(events))


def _add_of_the_run(events: dict[str, list[Event]], path: Path, section: int) -> None:
    """Add what the log of the whole run says of its members, faults and errors while a section was under way."""
    run: dict[str, list[Event]] = defaultdict(list)
    for event in read_events(path) if path.exists() else ():
        if event.get("event") in (*OF_THE_RUN, "section") and isinstance(event.get("worker"), int):
            run[event["event"]].append({**event, "t": number(event.get("t")) or 0.0})
    begun = run.pop("section", [])
    began = {event.get("section"): number(event.get("at")) for event in begun}
    run["section"] = [event for event in begun if event.get("section") == section + 1]
    _keep_between(run, began.get(section), began.get(section + 1))
    for kind, found in run.items():
        events[kind] += found


def _keep_between(events: dict[str, list[Event]], first: float | None, last: float | None) -> None:
    """Keep those events of members, faults and errors that lie between two readings of the machine's clock."""
    begin, end = (-math.inf if first is None else first), (math.inf if last is None else last)
    for kind in OF_THE_RUN:
        if kind in events:
            events[kind] = [event for event in events[kind] if begin <= (number(event.get("at")) or 0.0) < end]


def _on_one_clock(events: dict[str, list[Event]]) -> None:
    """Who does not train counts time from another zero; by the machine's clock it is told in the workers' time."""
    zeros = (event["at"] - event["t"] for event in events.get("start", []) if number(event.get("at")) is not None)
    zero = next(zeros, None)
    for kind in OF_THE_RUN:
        for event in events.get(kind, []):
            if zero is not None and number(event.get("at")) is not None:
                event["t"] = event["at"] - zero
        events.get(kind, []).sort(key=lambda event: event["t"])


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a run folder, or a LogError that says what the file should have been."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise LogError(_unreadable(path, error.strerror or error)) from error
    except msgspec.DecodeError as error:
        raise LogError(_unreadable(path, error)) from error


def _unreadable(path: Path, reason: object) -> str:
    return explain(
        f"{path.parent} cannot be read as a run folder",
        got=f"{path.name}: {reason}",
        expected="a folder that `stretto run` or `stretto compare` wrote",
        to_type="stretto report runs/*",
    )


def number(value: object) -> float | None:
    """A finite number, or None: the log writes NaN and infinities as null."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def split_of(event: Event) -> dict[str, float]:
    """A time split with every phase in it."""
    split = event.get("time_breakdown") or {}
    return {phase: number(split.get(phase)) or 0.0 for phase in PHASES}


def interpolate(points: list[Point]) -> Callable[[float], float]:
    """The line through points sorted by x, kept constant beyond both ends."""
    xs = [x for x, _ in points]

    def at(x: float) -> float:
        after = bisect_left(xs, x)
        if after == 0 or after == len(points):
            return points[min(after, len(points) - 1)][1]
        (x0, y0), (x1, y1) = points[after - 1], points[after]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    return at
