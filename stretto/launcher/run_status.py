"""Live status of a run, updated from its events."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stretto.events import Event, counts_for_worker
from stretto.membership.loop_positions import COMING
from stretto.membership.worker_status import ProcessRecord
from stretto.report import formatting, traffic

RECENT_S = 10.0
"""Period over which the displayed rate of samples is taken."""
MEGABYTE = 1e6


@dataclass
class Progress:
    """Status of a run. `take` reads an event, `facts` returns what to display; `notices` is True if notices are shown.

    `staleness` is the sum over all `updates`, `stalest` the largest.
    """

    notices: bool = True
    recipe: str = ""
    epoch: int = 0
    step: int = 0
    values: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    counts: dict[tuple[int, int], Event] = field(default_factory=dict)
    """Last totals by worker and rank."""
    updates: int = 0
    staleness: int = 0
    stalest: int = 0
    state: str = ""
    """State of workers that have joined the run from this machine and wait."""
    _members: int = 0
    """Number of those that take part."""
    _ended_at: int | None = None
    """Step at the end of the last epoch that has ended; None in the first epoch."""
    _recent: dict[int, deque[tuple[float, int]]] = field(default_factory=dict)
    _shown: set[str] = field(default_factory=set)

    def take(self, event: Event) -> str | None:
        """Update the status; return the line to print for this event, if any."""
        handler = getattr(self, f"_on_{event.get('event')}", None)
        return handler(event) if handler is not None and counts_for_worker(event) else None

    def follow(self, records: Sequence[ProcessRecord]) -> str | None:
        """Update the status from the records of workers whose events are not seen here; return the line to print."""
        places = [record.place for record in records if record.joined and record.place.phase != COMING]
        self.epoch = max([self.epoch, *(place.epoch for place in places)])
        self.step = max([self.step, *(place.step for place in places)])
        members = sum(record.joined for record in records)
        self.state = "waiting for the run to begin, or to admit its workers" if records and not members else ""
        if members == self._members:
            return None
        self._members = members
        return f"in the run: {members} of {len(records)} worker{'s' * (len(records) != 1)} of this machine"

    def facts(self) -> list[str]:
        """Return the facts to display, the most important first."""
        has_begun_another = self._ended_at is not None and self.step > self._ended_at
        epoch = self.epoch + has_begun_another
        facts = [self.state, f"epoch {epoch}" if epoch else "", f"step {self.step}" if self.step else ""]
        if (rate := self.samples_per_second()) is not None:
            facts.append(f"{rate:,.0f} samples/s")
        facts += [f"{name} {_number(value)}" for name, value in {**self.values, **self.metrics}.items()]
        if (waiting := self.waiting()) is not None:
            facts.append(f"waiting {waiting:.0%}")
        if self.updates:
            facts.append(f"staleness {self.staleness / self.updates:.1f} mean, {self.stalest} max")
        if sent := sum(event.get("bytes_sent", 0) for event in self.counts.values()):
            workers = len({worker for worker, _ in self.counts})
            facts.append(f"sent {sent / workers / MEGABYTE:,.1f} MB per worker")
        if (compression := self.compression()) is not None:
            facts.append(f"encoded in {formatting.times(compression)} fewer bytes")
        return [fact for fact in facts if fact]

    def samples_per_second(self) -> float | None:
        """Return samples of all workers per second of training, over the last RECENT_S; None before the first one."""
        rates = [_rate(points) for points in self._recent.values()]
        known_rates = [rate for rate in rates if rate is not None]
        has_trained = any(points[-1][1] for points in self._recent.values())
        return sum(known_rates) if known_rates and has_trained else None

    def waiting(self) -> float | None:
        """Return the share of their time that workers waited for others."""
        splits = [event["time_breakdown"] for event in self.counts.values() if event.get("time_breakdown")]
        total_s = sum(sum(split.values()) for split in splits)
        return sum(split.get("waiting", 0.0) for split in splits) / total_s if total_s else None

    def compression(self) -> float | None:
        """Return the compression ratio of the traffic; None where nothing was encoded."""
        exchanged = [traffic.accounts(event) for event in self.counts.values()]
        raw, sent = traffic.total(exchanged, "raw_sent"), traffic.total(exchanged, "sent")
        return traffic.ratio(raw, sent) if raw != sent else None

    def _on_start(self, event: Event) -> None:
        """Begin the rate of a worker again: each incarnation counts its samples from zero.

        A run that is resumed shows the last epoch that has ended, until its first step.
        """
        self.recipe = str(event.get("recipe") or self.recipe)
        if not self.epoch and event.get("epochs"):
            self.epoch, self.step = event["epochs"], event.get("step", 0)
            self._ended_at = self.step
        self.epoch = self.epoch or 1
        if "t" in event:
            self._recent[event["worker"]] = deque([(event["t"], 0)])

    def _on_warning(self, event: Event) -> str | None:
        """Return a notice; worker 0 prints its own."""
        text = str(event.get("text", ""))
        if text in self._shown or not (self.notices or event.get("worker")):
            return None
        self._shown.add(text)
        return f"note: {text}"

    def _on_section(self, event: Event) -> str:
        """Reset the counts: each section counts its own."""
        self._ended_at = None
        self.epoch = self.step = self.updates = self.staleness = self.stalest = 0
        for records in (self.values, self.metrics, self.counts, self._recent):
            records.clear()
        return f"section {event.get('section')} begins: {event.get('folder')}"

    def _on_fault_injected(self, event: Event) -> str:
        return f"fault: {event.get('text')}"

    def _on_log(self, event: Event) -> None:
        self.step = max(self.step, event.get("step", 0))
        self.values |= event.get("values", {})

    def _on_progress(self, event: Event) -> None:
        worker, rank = event["worker"], event.get("rank", 0)
        self.counts[worker, rank] = event
        if rank:  # rank 0 counts the samples of its worker
            return
        self.step = max(self.step, event.get("step", 0))
        points = self._recent.setdefault(worker, deque([(0.0, 0)]))
        points.append((event["t"] - event.get("time_breakdown", {}).get("evaluating", 0.0), event.get("samples", 0)))
        while len(points) > 2 and points[-1][0] - points[1][0] > RECENT_S:
            points.popleft()

    def _on_update_applied(self, event: Event) -> None:
        stalenesses = [update[2] for update in event.get("updates", [])]
        self.updates += len(stalenesses)
        self.staleness += sum(stalenesses)
        self.stalest = max(self.stalest, *stalenesses, 0)

    def _on_end(self, event: Event) -> None:
        self._on_progress(event)

    def _on_evaluation(self, event: Event) -> str:
        step = event.get("step", self.step)
        self.step = max(self.step, step)
        self.metrics |= event.get("metrics", {})
        metrics = ", ".join(f"{name} {_number(value)}" for name, value in event.get("metrics", {}).items())
        training = f"after {event.get('training_s', 0.0):.1f} s of training"
        return f"epoch {event.get('epoch')}, step {step}: {metrics} ({training})"

    def _on_epoch(self, event: Event) -> str:
        """Report the end of an epoch. The next one starts with its first step: there may be none."""
        ended, step = event.get("epoch", self.epoch), event.get("step", self.step)
        self.step = max(self.step, step)
        self.epoch, self._ended_at = ended, self.step
        progress = f"{event.get('samples', 0):,} samples in {event.get('training_s', 0.0):.1f} s of training"
        return f"epoch {ended} ended: step {step}, {progress}"


def _rate(points: deque[tuple[float, int]]) -> float | None:
    (first_s, first_samples), (last_s, last_samples) = points[0], points[-1]
    return (last_samples - first_samples) / (last_s - first_s) if last_s > first_s else None


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
