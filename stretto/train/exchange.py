"""The side of a recipe that the trainer sees: when something is exchanged, and the weights it is exchanged with."""

from __future__ import annotations

import struct

from stretto.train.stopwatch import Stopwatch
from stretto.wire import Wire


class Weights:
    """The samples behind what the workers are about to exchange: everyone knows everyone's."""

    def __init__(self, wire: Wire) -> None:
        self._worker, self._workers = wire.worker, wire.workers
        self._pending = [0] * wire.workers
        self._spent = False

    def add(self, weights: tuple[int, ...]) -> None:
        """A hand was dealt. What an exchange has carried before does not weigh again."""
        if self._spent:
            self._pending = [0] * self._workers
            self._spent = False
        self._pending = [before + more for before, more in zip(self._pending, weights, strict=True)]

    def share(self) -> float:
        """This worker's part of the samples since the last exchange; the same for all when there were none."""
        total = sum(self._pending)
        return self._pending[self._worker] / total if total else 1 / self._workers

    def carried(self) -> None:
        """An exchange was done; a second one in the same hand has the same weights."""
        self._spent = True


class Arrivals:
    """When this worker was ready for each exchange and how long it was blocked: what it waited for is known later."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._notes: list[tuple[float, float]] = []

    def note(self, now: float, blocked_s: float) -> None:
        """An exchange ended at `now`, which blocked this worker for a while."""
        self._notes.append((now - blocked_s, blocked_s))

    def settle(self, watch: Stopwatch) -> None:
        """Tell the others when one was ready, and book as waiting what the last to be ready made this worker wait."""
        notes, self._notes = self._notes, []
        told = self._wire.gather(struct.pack(f"<{len(notes)}d", *(ready for ready, _ in notes)))
        if self._wire.workers == 1 or len({len(one) for one in told}) > 1:
            return
        ready = [struct.unpack(f"<{len(notes)}d", one) for one in told]
        last = [max(times) for times in zip(*ready, strict=True)]
        waited = sum(min(blocked, max(late - mine, 0.0)) for (mine, blocked), late in zip(notes, last, strict=True))
        watch.move("exchanging", "waiting", waited)
