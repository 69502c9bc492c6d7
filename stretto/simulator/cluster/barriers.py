"""Barriers of simulated scripts: the position tracking of live runs in virtual time, without messages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from stretto.membership.barrier_client import late
from stretto.membership.barriers import EVERYBODY, Awaited, Position, Positions
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
        self.positions = Positions()
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

    def is_missing(self, number: int, position: Position) -> bool:
        """True if a worker has not reached a position and still can."""
        peer = self.engine.workers[number]
        trainee = self._training.get(number)
        in_training = trainee is not None and trainee.incarnation == peer.incarnation
        if peer.has_ended or peer.has_failed:
            return not position.section and number in self._returning()
        if not position.section:
            return not in_training and not self.positions.is_past(number, Awaited(peer.incarnation, -1), position)
        if trainee is None or not in_training:
            return peer.incarnation == 0 and not self.positions.is_past(number, Awaited(0, -1), position)
        return not self.positions.is_past(number, Awaited(peer.incarnation, trainee.place()), position)


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

    def wait(self, position: Position, of: int, mend: Callable[[], None]) -> None:
        """Report a position, and wait in virtual time until the other workers, or worker `of`, have reached it."""
        self.announce(position)
        limit = self._worker.now() + self._limit_s
        numbers = [worker.number for worker in self._barriers.engine.workers]
        for number in numbers if of == EVERYBODY else [of]:
            if number != self._worker.number:
                self._wait_for(number, position, mend, limit)

    def _wait_for(self, number: int, position: Position, mend: Callable[[], None], limit: float) -> None:
        worker, pause_s = self._worker, FIRST_S
        while self._barriers.is_missing(number, position):
            if worker.now() >= limit:
                raise late(worker.number, [number], self._limit_s)
            mend()
            self._barriers.register_waiting(number, worker)
            queue = self._barriers.engine.queue
            queue.schedule(queue.now + pause_s, worker.wake, ARRIVAL, worker.number)
            checks = iter((False, True))
            worker.wait_until(lambda checks=checks: next(checks, True), lambda: f"worker {number} at a barrier")  # type: ignore[misc]
            pause_s = min(2 * pause_s, LONGEST_S)
