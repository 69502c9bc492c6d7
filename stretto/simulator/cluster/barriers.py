"""Barriers of simulated scripts: the position tracking of live runs in virtual time, without messages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from stretto.membership.barrier_client import late
from stretto.membership.barriers import EVERYBODY, NOBODY, PAST, Awaited, FirstValues, Position, Positions
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.network.flows import ARRIVAL

FIRST_S, LONGEST_S = 0.05, 1.0
"""First and longest interval, in virtual seconds, at which a waiting worker checks if a missing worker has failed."""


class _Trainee(NamedTuple):
    """An incarnation that takes part in training, and the function that returns its current position number."""

    incarnation: int
    place: Callable[[], int]


class SimBarriers:
    """Positions of all workers of a simulation.

    `returning` returns the workers that have no process now but will be restarted.
    """

    def __init__(self, engine: Engine, returning: Callable[[], Collection[int]]) -> None:
        self.engine, self._returning = engine, returning
        self.positions, self.values = Positions(), FirstValues()
        self._training: dict[int, _Trainee] = {}
        self._blocked: dict[int, set[Worker]] = {}

    def register_training(self, worker: Worker, place: Callable[[], int]) -> None:
        """Register a worker that begins to train."""
        self._training[worker.number] = _Trainee(worker.incarnation, place)
        self._wake(worker.number)

    def note(self, worker: Worker, position: Position) -> None:
        """Record that a worker has reached a position, and wake the workers that wait for it."""
        self.positions.note(worker.number, worker.incarnation, position)
        self._wake(worker.number)

    def register_waiting(self, number: int, worker: Worker) -> None:
        """Register a worker that waits for worker `number`."""
        self._blocked.setdefault(number, set()).add(worker)

    def _wake(self, number: int) -> None:
        for worker in sorted(self._blocked.pop(number, ()), key=lambda worker: worker.number):
            worker.wake()

    def awaited(self) -> dict[int, Awaited]:
        """Return the workers that a barrier in training waits for, unless they are past it."""
        found = {}
        for peer in self.engine.workers:
            trainee = self._training.get(peer.number)
            is_training = trainee is not None and trainee.incarnation == peer.incarnation
            if not peer.has_failed and (is_training or not peer.incarnation):
                place = trainee.place() if trainee is not None and is_training else -1
                found[peer.number] = Awaited(peer.incarnation, PAST if peer.has_ended else place)
        return found

    def is_missing(self, number: int, position: Position) -> bool:
        """True if a worker has not reached a position and still can."""
        peer, known = self.engine.workers[number], self.awaited().get(number)
        if position.section:
            return known is not None and not self.positions.is_past(number, known, position)
        if peer.has_ended or peer.has_failed:
            return number in self._returning()
        is_training = number in self._training and self._training[number].incarnation == peer.incarnation
        return not is_training and not self.positions.is_past(number, Awaited(peer.incarnation, -1), position)


class SimBarrier:
    """One worker's side of the barriers; it waits at most `limit_s` virtual seconds."""

    def __init__(self, barriers: SimBarriers, worker: Worker, limit_s: float) -> None:
        self._barriers, self._worker, self._limit_s = barriers, worker, limit_s

    def begin(self, place: Callable[[], int]) -> None:
        """Register the begin of training of this incarnation."""
        self._barriers.register_training(self._worker, place)

    def announce(self, position: Position) -> None:
        """Report a position."""
        self._worker.catch_up()
        self._barriers.note(self._worker, position)

    def wait(self, position: Position, of: int, mend: Callable[[], None]) -> bool:
        """Wait in virtual time until the other workers, or worker `of` or the one in its place, have reached it."""
        barriers, own, limit = self._barriers, self._worker.number, self._worker.now() + self._limit_s
        self._worker.catch_up()
        if of == EVERYBODY:
            barriers.note(self._worker, position)
            for worker in barriers.engine.workers:
                self._wait_for(worker.number, position, mend, limit)
            return False
        waited_for = NOBODY
        while waited_for != of:
            self._wait_for(waited_for := of, position, mend, limit)
            of = barriers.positions.acting_for(of, own, barriers.awaited(), position)
        return of == own

    def give(self, position: Position, of: int, value: bytes, mend: Callable[[], None]) -> bytes:
        """Wait for worker `of`, or the one in its place, and return its value; it gives its own."""
        barriers, found = self._barriers, None
        if of != self._worker.number and not self.wait(position, of, mend):
            found = barriers.values.give(position, None)
        if found is None:
            found = barriers.values.give(position, value)
            self.announce(position)
        assert found is not None
        return found

    def _wait_for(self, number: int, position: Position, mend: Callable[[], None], limit: float) -> None:
        worker, pause_s = self._worker, FIRST_S
        while number != worker.number and self._barriers.is_missing(number, position):
            if worker.now() >= limit:
                raise late(worker.number, [number], self._limit_s)
            mend()
            self._barriers.register_waiting(number, worker)
            queue = self._barriers.engine.queue
            queue.schedule(queue.now + pause_s, worker.wake, ARRIVAL, worker.number)
            checks = iter((False, True))
            worker.wait_until(lambda checks=checks: next(checks, True), lambda: f"worker {number} at a barrier")  # type: ignore[misc]
            pause_s = min(2 * pause_s, LONGEST_S)
