"""The cumulative figures of one worker, for the events that carry them."""

from __future__ import annotations

from typing import Any, Protocol

from stretto.parallel.rank_parts import RankParts
from stretto.runtime.event_writer import EventWriter
from stretto.runtime.phase_timer import Stopwatch
from stretto.strategies.strategy import Strategy
from stretto.strategies.traffic_counters import Tally
from stretto.training.progress import LoopProgress
from stretto.training.section import Section
from stretto.transport import Transport


class MeasuredTrainer(Protocol):
    """The attributes of a trainer that its figures are computed from."""

    transport: Transport
    section: Section
    timer: Stopwatch
    events: EventWriter
    progress: LoopProgress
    strategy: Strategy
    rank_parts: RankParts


class Figures:
    """Seconds, bytes, exchanges and samples of one worker."""

    def __init__(self, trainer: MeasuredTrainer, tally: Tally) -> None:
        self._trainer, self._tally = trainer, tally

    def training_s(self) -> float:
        """Return the seconds since the start, without evaluations."""
        return round(self._trainer.events.t() - self._trainer.timer.split()["evaluating"], 6)

    def measured(self) -> dict[str, Any]:
        """Return this worker's cumulative figures."""
        trainer, traffic = self._trainer, self._trainer.transport.traffic() + self._trainer.rank_parts.traffic()
        blocked_s = trainer.strategy.blocked_s
        return {
            **({"blocked_s": round(blocked_s, 6)} if blocked_s is not None else {}),
            "rounds": trainer.progress.rounds,
            "time_breakdown": trainer.timer.split(),
            "bytes_sent": traffic.bytes_sent - trainer.section.sent,
            "bytes_received": traffic.bytes_received - trainer.section.received,
            "bytes_counted": traffic.counted,
            **self._tally.figures(),
            **trainer.rank_parts.figures(),
        }

    def write(self, kind: str, **fields: object) -> None:
        """Write an event with the figures, after this worker's applied updates and their staleness."""
        self.write_outcomes()
        progress, events, measured = self._trainer.progress, self._trainer.events, self.measured()
        at = self._trainer.timer.read_at  # the phases sum to the event's time, however late it is written
        events.write(kind, at, step=progress.steps, samples=progress.own_samples, **fields, **measured)

    def write_outcomes(self) -> None:
        """Write an event with this worker's applied updates and their staleness."""
        if outcomes := self._trainer.strategy.take_outcomes():
            self._trainer.events.write("update_applied", updates=outcomes)
