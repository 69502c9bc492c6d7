"""Logs of runs: `run.json` and the events of a run directory, by kind."""

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
from stretto.events import COORDINATOR, PHASES, RELAY, Event, counts_for_worker, process_name, read_events

Point = tuple[float, float]
PER_INCARNATION = (
    "samples",
    "bytes_sent",
    "bytes_received",
    "blocked_s",
    "time_breakdown",
    "traffic",
    "values_sent",
    "stage",
)
"""Fields of progress and end that each incarnation of a worker counts from zero."""
RUN_WIDE_KINDS = ("membership", "fault_injected", "error")
"""Kinds of events that go to the log of the whole run during every section."""
MEMBER_STATES = ("joined", "failed", "left")
"""Values of `what` in membership events that change whether a worker takes part."""


@dataclass(frozen=True)
class History:
    """Log of a run: `run` is the content of run.json, `events` maps each kind to its events in the order written."""

    folder: Path
    run: dict[str, Any]
    events: dict[str, list[Event]]

    def of(self, kind: str) -> list[Event]:
        """Return the events of one kind."""
        return self.events.get(kind, [])

    @cached_property
    def epochs(self) -> list[Event]:
        """Last `epoch` event of each epoch, in order: after a rollback an epoch ends a second time."""
        epochs: list[Event] = []
        for event in self.of("epoch"):
            while epochs and (epochs[-1].get("epoch") or 0) >= (event.get("epoch") or 0):
                epochs.pop()
            epochs.append(event)
        return epochs

    @property
    def counted(self) -> list[Event]:
        """The events with the counts of all workers: ends of epochs, and evaluations."""
        return [*self.epochs, *self.of("evaluation")]

    @cached_property
    def workers(self) -> int:
        """Number of workers, including workers that joined later."""
        started = (1 + int(event["worker"]) for event in self.of("start"))
        return max(int(self.run.get("workers") or 1), *started, 1)

    @cached_property
    def processes(self) -> list[tuple[int, int]]:
        """Worker and rank of each process of a worker."""
        ranks = dict.fromkeys(range(self.workers), 1)
        for event in self.of("start"):
            ranks[event["worker"]] = max(ranks[event["worker"]], int(event.get("ranks") or 1))
        return [(worker, rank) for worker, count in ranks.items() for rank in range(count)]

    @property
    def ended(self) -> bool:
        """True if every worker finished, apart from failed or departed workers that the others continued without.

        A section that is followed by another one has ended, because all workers start that one together.
        """
        if self.of("section"):
            return True
        ended = {event["worker"] for event in self.of("end") if not event.get("rank")}
        return bool(ended) and len(ended | self._absent()) >= self.workers

    def _absent(self) -> set[int]:
        """Return the workers that failed or left and did not come back."""
        last_changes = dict.fromkeys(self.run.get("absent", []), "failed")
        changes = (event for event in self.of("membership") if "worker" in event and event.get("what") in MEMBER_STATES)
        last_changes |= {event["worker"]: event["what"] for event in changes}
        return {worker for worker, change in last_changes.items() if change != "joined"}

    def counts(self, worker: int, rank: int = 0) -> list[Event]:
        """Return the progress and end events of one rank of a worker, totals over all incarnations, oldest first."""
        return self._counts.get((worker, rank), [])

    @cached_property
    def _counts(self) -> dict[tuple[int, int], list[Event]]:
        by_process: dict[tuple[int, int], list[Event]] = defaultdict(list)
        for event in [*self.of("progress"), *self.of("end")]:
            by_process[_place(event)].append(event)
        return {place: _over_incarnations(events, self._starts[place]) for place, events in by_process.items()}

    @cached_property
    def _starts(self) -> dict[tuple[int, int], list[float]]:
        """Start times of the incarnations of each rank of a worker, in order."""
        starts: dict[tuple[int, int], list[float]] = defaultdict(list)
        for event in sorted(self.of("start"), key=lambda event: event["t"]):
            starts[_place(event)].append(event["t"])
        return starts

    @property
    def has_returned(self) -> bool:
        """True if a failed worker was restarted."""
        return any(len(starts) > 1 for starts in self._starts.values())

    def last_counts(self) -> list[Event]:
        """Return the last totals of every worker, those of rank 0; an empty event for a worker that never wrote any."""
        return [(self.counts(worker) or [{}])[-1] for worker in range(self.workers)]

    def last_counts_by_process(self) -> list[Event]:
        """Return the last totals of each of `processes`; an empty event for a process that never wrote any."""
        return [(self.counts(*place) or [{}])[-1] for place in self.processes]

    @cached_property
    def trained(self) -> list[int] | None:
        """Number of samples that count, by worker; None unless each epoch of a run that ended has counted them.

        The totals that workers write themselves include work that was lost or repeated, and those of a killed worker
        lack its work since its last progress event. Here they count only for work after the last epoch that has ended.
        """
        by_epoch = [counts for event in self.epochs if isinstance(counts := event.get("trained"), dict)]
        if not self.ended or not by_epoch or len(by_epoch) < len(self.epochs):
            return None
        return [
            after + sum(int(counts.get(str(worker), 0)) for counts in by_epoch)
            for worker, after in enumerate(self.after_last_epoch)
        ]

    @cached_property
    def after_last_epoch(self) -> list[int]:
        """Number of samples of each worker after the last epoch that has ended: a run may end within one."""
        last: Event = self.epochs[-1] if self.epochs else {"t": -math.inf}
        at_end = {one["worker"]: int(one.get("samples") or 0) for one in last.get("workers") or ()}
        samples = [0] * self.workers
        for event in sorted([*self.of("progress"), *self.of("end")], key=lambda event: event["t"]):
            worker = event["worker"]
            if not event.get("rank") and event["t"] >= last["t"]:
                is_new = self._starts[_place(event)][-1:] >= [last["t"]]
                if at_end and worker not in at_end and not is_new:
                    continue  # it had failed before the epoch ended, and was stopped: when it continues, it writes
                samples[worker] = max(int(event.get("samples") or 0) - (0 if is_new else at_end.get(worker, 0)), 0)
        return samples

    @property
    def trained_before(self) -> int:
        """Number of samples that count and are of the state that the run continues from, of no worker of this run."""
        if self.trained is None:
            first_start = min(self.of("start"), key=lambda event: event["t"], default={})
            return int(first_start.get("samples") or 0)
        first, counts = self.epochs[0], self.epochs[0].get("sample_counts") or {}
        of_epoch, times = int(first.get("samples") or 0), {"once": 1, "twice": 2, "recovered_samples": 1}
        before, here = 0, of_epoch
        if counts:
            size = sum(int(counts.get(name) or 0) for name in ("once", "twice", "never"))
            before = of_epoch - size if (first.get("epoch") or 0) > 1 else 0
            here = sum(int(counts.get(name) or 0) * weight for name, weight in times.items())
        trained = sum(int(samples) for worker, samples in first["trained"].items() if int(worker) >= 0)
        return max(before + here - trained, 0)

    @property
    def failure(self) -> str | None:
        """Reason of the failure of the run, or None: the earliest error that is not a consequence of another.

        An error of a coordinator or a relay that was restarted is not a failure of the run.
        """
        harmless = [process_name(number) for number in (COORDINATOR, RELAY)] if self.ended else []
        relevant = [event for event in self.of("error") if event["process"] not in harmless]
        errors = sorted(relevant, key=lambda event: (bool(event.get("consequence")), event["t"]))
        if errors:
            first = errors[0]
            return f"{first['process']} failed: {first.get('kind')}: {first.get('text')}"
        return None if self.ended else "the run did not finish"


def _place(event: Event) -> tuple[int, int]:
    """Return the worker and the rank of the process that wrote an event."""
    return event["worker"], event.get("rank") or 0


def _over_incarnations(events: list[Event], starts: Sequence[float]) -> list[Event]:
    """Return the totals of a worker over all its incarnations, in order of time; each incarnation counts from zero."""
    totals: list[Event] = []
    previous_totals: Event = {}
    incarnations = 1
    for event in sorted(events, key=lambda event: event["t"]):
        while incarnations < len(starts) and event["t"] >= starts[incarnations]:
            incarnations, previous_totals = incarnations + 1, (totals or [{}])[-1]
        totals.append(
            event
            | {name: _sum(previous_totals.get(name), event.get(name)) for name in PER_INCARNATION if name in event}
        )
    return totals


def _sum(a: Any, b: Any) -> Any:
    """Add two numbers, or two nested structures number by number; a missing or non-numeric value adds nothing."""
    if isinstance(a, dict) and isinstance(b, dict):
        return {name: _sum(a.get(name), b.get(name)) for name in {**a, **b}}
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [_sum(x, y) for x, y in zip(a, b, strict=True)]
    a_number, b_number = number(a), number(b)
    if a_number is None or b_number is None or isinstance(a, bool) or isinstance(b, bool):
        return a if b is None else b
    return a + b


def read(folder: Path) -> History:
    """Read a run directory. A missing log counts as empty: the run failed before it wrote any event."""
    events: dict[str, list[Event]] = defaultdict(list)
    path = folder / "events.jsonl"
    for event in read_events(path) if path.exists() else ():
        if isinstance(event.get("event"), str) and _names_process(event) and counts_for_worker(event):
            events[event["event"]].append({**event, "t": number(event.get("t")) or 0.0})
    run = read_json(folder / "run.json")
    if isinstance(run.get("section"), int):
        _add_run_wide_events(events, folder.parent / "events.jsonl", run["section"])
    elif events.get("section"):
        _keep_between(events, None, number(events["section"][0].get("at")))
    _on_one_clock(events)
    return History(folder, run, dict(events))


def _names_process(event: Event) -> bool:
    """Return True if an event names its process, and the worker unless the kind may be of another process."""
    is_of_worker = isinstance(event.get("worker"), int) and isinstance(event.get("rank", 0), int)
    return isinstance(event.get("process"), str) and (is_of_worker or event["event"] in RUN_WIDE_KINDS)


def _add_run_wide_events(events: dict[str, list[Event]], path: Path, section: int) -> None:
    """Add membership, fault and error events of a section from the log of the whole run."""
    run: dict[str, list[Event]] = defaultdict(list)
    for event in read_events(path) if path.exists() else ():
        if event.get("event") in (*RUN_WIDE_KINDS, "section") and _names_process(event):
            run[event["event"]].append({**event, "t": number(event.get("t")) or 0.0})
    sections = run.pop("section", [])
    starts = {event.get("section"): number(event.get("at")) for event in sections}
    run["section"] = [event for event in sections if event.get("section") == section + 1]
    _keep_between(run, starts.get(section), starts.get(section + 1))
    for kind, of_kind in run.items():
        events[kind] += of_kind


def _keep_between(events: dict[str, list[Event]], first: float | None, last: float | None) -> None:
    """Keep membership, fault and error events between two readings of the machine's clock."""
    begin, end = (-math.inf if first is None else first), (math.inf if last is None else last)
    for kind in RUN_WIDE_KINDS:
        if kind in events:
            events[kind] = [event for event in events[kind] if begin <= (number(event.get("at")) or 0.0) < end]


def _on_one_clock(events: dict[str, list[Event]]) -> None:
    """Convert the times of processes that do not train, which have a zero of their own, to the zero of the workers."""
    zeros = (event["at"] - event["t"] for event in events.get("start", []) if number(event.get("at")) is not None)
    zero = next(zeros, None)
    for kind in RUN_WIDE_KINDS:
        for event in events.get(kind, []):
            if zero is not None and number(event.get("at")) is not None:
                event["t"] = event["at"] - zero
        events.get(kind, []).sort(key=lambda event: event["t"])


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a run directory. Raises LogError when there is none."""
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
    """Return a finite number as float, or None for anything else: NaN and infinities are null in the log."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def split_of(event: Event) -> dict[str, float]:
    """Return the time breakdown of an event with every phase."""
    split = event.get("time_breakdown") or {}
    return {phase: number(split.get(phase)) or 0.0 for phase in PHASES}


def interpolate(points: list[Point]) -> Callable[[float], float]:
    """Return the piecewise linear function through points sorted by x, constant beyond both ends."""
    xs = [x for x, _ in points]

    def at(x: float) -> float:
        after = bisect_left(xs, x)
        if after == 0 or after == len(points):
            return points[min(after, len(points) - 1)][1]
        (x0, y0), (x1, y1) = points[after - 1], points[after]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    return at
