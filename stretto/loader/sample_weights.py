"""The side of a recipe that the trainer sees: when something is exchanged, and the weights it is exchanged with."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from stretto.loader.global_step import Parts
from stretto.runtime.phase_timer import Stopwatch
from stretto.transport import Transport


class Weights:
    """The samples behind what the workers are about to exchange: everyone knows its own and the sum."""

    def __init__(self, wire: Transport) -> None:
        self._wire = wire
        self._own = self._total = 0
        self._hands: list[tuple[int, int]] = []
        """Samples of this worker and of all workers, by global step."""
        self._parts: list[Parts] = []
        self._lost: dict[int, int] = {}
        """By worker that was lost: how many of the parts have been taken off."""
        self._spent = False

    def add(self, own: int, total: int, parts: Parts | None) -> None:
        """A hand was dealt. What an exchange has carried before does not weigh again."""
        if self._spent:
            self._own = self._total = 0
            self._hands.clear()
            self._parts.clear()
            self._lost.clear()
            self._spent = False
        self._own += own
        self._total += total
        self._hands.append((own, total))
        if parts is not None:
            self._parts.append(parts)

    def lose(self, gone: Sequence[int]) -> None:
        """These workers can't bring what they were dealt any more."""
        for worker in gone:
            self._total -= sum(part(worker) for part in self._parts[self._lost.get(worker, 0) :])
            self._lost[worker] = len(self._parts)

    def forget(self, hands: int) -> None:
        """Remove the samples of the last global steps, which made no gradient, from the next exchange's weights."""
        for _ in range(0 if self._spent else min(hands, len(self._hands))):
            own, total = self._hands.pop()
            self._own -= own
            self._total -= total
            if len(self._parts) > len(self._hands):
                part = self._parts.pop()
                self._total += sum(part(worker) for worker, lost in self._lost.items() if lost > len(self._parts))
                self._lost = {worker: min(lost, len(self._parts)) for worker, lost in self._lost.items()}

    @property
    def is_carried(self) -> bool:
        """Whether an exchange has carried all there is."""
        return self._spent or not self._total

    def share(self) -> float:
        """This worker's part of the samples since the last exchange; the same for all when there were none."""
        return self._own / self._total if self._total else 1 / self._wire.workers

    def carried(self) -> None:
        """An exchange was done; a second one in the same hand has the same weights."""
        self._spent = True


class Arrivals:
    """When this worker was ready for each exchange and how long it was blocked: what it waited for is known later."""

    def __init__(self, wire: Transport) -> None:
        self._wire = wire
        self._notes: list[tuple[float, float]] = []

    def note(self, now: float, blocked_s: float) -> None:
        """An exchange ended at `now`, which blocked this worker for a while."""
        self._notes.append((now - blocked_s, blocked_s))

    def settle(self, watch: Stopwatch) -> None:
        """Tell the others when one was ready, and book as waiting what the last to be ready made this worker wait."""
        notes, self._notes = self._notes, []
        told = self._wire.all_gather_bytes(struct.pack(f"<{len(notes)}d", *(ready for ready, _ in notes)))
        if self._wire.workers == 1 or len({len(one) for one in told}) > 1:
            return
        last = np.frombuffer(b"".join(told)).reshape(len(told), len(notes)).max(0).tolist()
        waited = sum(min(blocked, max(late - mine, 0.0)) for (mine, blocked), late in zip(notes, last, strict=True))
        watch.move("exchanging", "waiting", waited)
