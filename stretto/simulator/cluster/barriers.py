"""Barriers of simulated scripts: the live positions, on virtual time, without messages."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from stretto.membership.barrier_client import late
from stretto.membership.barriers import EVERYBODY, Awaited, Position, Positions
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.network.flows import ARRIVE

FIRST_S, LONGEST_S = 0.05, 1.0
"""Virtual time after which a waiting worker looks again, at first and at most: who was missing may have failed."""


class _Trains(NamedTuple):
    """A life that takes part in training, and how it tells how far it has come."""

    life: int
    place: Callable[[], int]


class SimBarriers:
    """What all workers of a simulation know of each other's positions.

    `returning` gives the workers that have no process now, but will have one.
    """

    def __init__(self, world: Engine, returning: Callable[[], Collection[int]]) -> None:
        self.world, self._returning = world, returning
        self.positions = Positions()
        self._training: dict[int, _Trains] = {}
        self._blocked: dict[int, set[Worker]] = {}

    def begins(self, worker: Worker, place: Callable[[], int]) -> None:
        """A worker takes part in training from now on."""
        self._training[worker.number] = _Trains(worker.life, place)
        self._wake(worker.number)

    def note(self, worker: Worker, position: Position) -> None:
        """A worker has come to a position: those that it was missing at look again."""
        self.positions.note(worker.number, worker.life, position)
        self._wake(worker.number)

    def blocks(self, number: int, worker: Worker) -> None:
        """A worker waits until another one has come."""
        self._blocked.setdefault(number, set()).add(worker)

    def _wake(self, number: int) -> None:
        for one in sorted(self._blocked.pop(number, ()), key=lambda one: one.number):
            one.wake()

    def is_missing(self, number: int, position: Position) -> bool:
        """True if a worker can still come to a position, and has not."""
        other = self.world.workers[number]
        trains = self._training.get(number)
        in_training = trains is not None and trains.life == other.life
        if other.is_over or other.is_dead:
            return not position.section and number in self._returning()
        if not position.section:
            return not in_training and not self.positions.is_past(number, Awaited(other.life, -1), position)
        if trains is None or not in_training:
            return other.life == 0 and not self.positions.is_past(number, Awaited(0, -1), position)
        return not self.positions.is_past(number, Awaited(other.life, trains.place()), position)


class SimBarrier:
    """One worker's side."""

    def __init__(self, board: SimBarriers, worker: Worker, limit_s: float) -> None:
        self._board, self._worker, self._limit_s = board, worker, limit_s

    def begin(self, place: Callable[[], int]) -> None:
        """Training begins for this life."""
        self._board.begins(self._worker, place)

    def announce(self, position: Position) -> None:
        """Report a position."""
        self._worker.catch_up()
        self._board.note(self._worker, position)

    def wait(self, position: Position, of: int, mend: Callable[[], None]) -> None:
        """Report a position and wait, in virtual time."""
        self.announce(position)
        limit = self._worker.now() + self._limit_s
        numbers = [one.number for one in self._board.world.workers]
        for number in numbers if of == EVERYBODY else [of]:
            if number != self._worker.number:
                self._wait_for(number, position, mend, limit)

    def _wait_for(self, number: int, position: Position, mend: Callable[[], None], limit: float) -> None:
        worker, pause_s = self._worker, FIRST_S
        while self._board.is_missing(number, position):
            if worker.now() >= limit:
                raise late(worker.number, [number], self._limit_s)
            mend()
            self._board.blocks(number, worker)
            queue = self._board.world.queue
            queue.at(queue.now + pause_s, worker.wake, ARRIVE, worker.number)
            looks = iter((False, True))
            worker.until(lambda looks=looks: next(looks, True), lambda: f"worker {number} at a barrier")  # type: ignore[misc]
            pause_s = min(2 * pause_s, LONGEST_S)
