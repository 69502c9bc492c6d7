"""Faults that happen in a world: what is due is drawn as the clock comes to it, or as a worker runs ahead of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from math import inf

from stretto.errors import LaunchError
from stretto.faults.plan import SAID, Happening
from stretto.simulator.event_queue import Queue
from stretto.simulator.network.flows import Net

FAULT = 0
"""At one time a fault goes before all else."""


class FaultInjector:
    """What goes wrong, as a plan has it in order of time."""

    def __init__(self, queue: Queue, net: Net, plan: Iterable[tuple[float, Happening]]) -> None:
        self._queue, self._net = queue, net
        self._plan = iter(plan)
        self._next = next(self._plan, None)
        self._pauses: dict[int, list[tuple[float, float]]] = {}
        """Of each worker, from when to when it was stopped; the last may have no end yet."""
        self.tell: Callable[[float, Happening], None] = lambda *_: None
        """Called with all that happens."""
        self.settle: Callable[[float, Happening], Happening | None] = lambda _, one: one
        """Called first: who is meant may not have been known when it was drawn. None if it happens later."""
        self.strike: Callable[[float, Happening], None] = refuse
        """Called with what is done to processes, but for pauses of workers."""
        self._look_ahead()

    def end_of_work(self, worker: int, start: float, seconds: float) -> float:
        """When work of so many seconds ends that begins at `start`: pauses make it longer."""
        at, left = self.awake(worker, start), seconds
        while True:
            self._draw(at + left)
            pause = next(((a, b) for a, b in self._pauses.get(worker, ()) if at <= a < min(b, at + left)), None)
            if pause is None:
                return at + left
            left -= pause[0] - at
            at = self._end_of_pause(worker, pause[0])

    def paused(self, worker: int, start: float, stop: float) -> float:
        """For how long the worker was stopped between two moments."""
        return sum(max(min(b, stop) - max(a, start), 0.0) for a, b in self._pauses.get(worker, ()))

    def awake(self, worker: int, now: float) -> float:
        """The first moment from `now` on at which the worker is not stopped."""
        self._draw(now)
        for a, b in self._pauses.get(worker, ()):
            if a <= now < b:
                return self._end_of_pause(worker, a)
        return now

    def _end_of_pause(self, worker: int, began: float) -> float:
        while True:
            end = next(b for a, b in self._pauses[worker] if a == began)
            if end < inf or self._next is None:
                return end
            self._draw(self._next[0])

    def _draw(self, until: float) -> None:
        """Take all that happens until then into account; it becomes so when the clock comes to it."""
        while self._next is not None and self._next[0] <= until:
            time, happening = self._next
            self._next = next(self._plan, None)
            self._note(time, happening)
            self._queue.at(max(time, self._queue.now), functools.partial(self.happen, time, happening), FAULT)

    def _look_ahead(self) -> None:
        """Have the clock come to what happens next, even if nobody asks before."""
        if self._next is not None:
            time = self._next[0]
            self._queue.at(max(time, self._queue.now), lambda: self._come_to(time), FAULT)

    def _come_to(self, time: float) -> None:
        self._draw(time)
        self._look_ahead()

    def _note(self, time: float, happening: Happening) -> None:
        if happening.kind != "worker":
            return
        for worker in happening.numbers:
            pauses = self._pauses.setdefault(worker, [])
            if happening.verb == "pause":
                pauses.append((time, inf))
            elif happening.verb in ("go_on", "kill") and pauses and pauses[-1][1] == inf:
                pauses[-1] = pauses[-1][0], time

    def happen(self, time: float, drawn: Happening) -> None:
        """What a plan has for this time is so."""
        happening = self.settle(time, drawn)
        if happening is None:
            return
        self.tell(time, happening)
        ends = [one if happening.kind == "worker" else -1 - one for one in happening.numbers]
        net = self._net
        if happening.verb == "kill" and happening.kind == "worker":
            net.go_on(ends)
        if happening.verb in ("kill", "back") or (happening.kind != "worker" and happening.verb in ("pause", "go_on")):
            self.strike(time, happening)
        elif happening.verb == "pause":
            net.stop(ends)
        elif happening.verb == "go_on":
            net.go_on(ends)
        elif happening.verb == "cut":
            net.cut(ends)
        elif happening.verb == "heal":
            net.heal(ends)
        elif happening.verb == "slow":
            if happening.kind == "server":
                self.strike(time, happening)
            net.slow(ends, happening.factor)
        elif happening.verb == "restore":
            net.restore(ends, happening.factor)


def refuse(time: float, happening: Happening, why: str = "nobody could go on after it") -> None:
    """Raise LaunchError for what cannot happen in this run."""
    if happening.verb in ("back", "go_on"):
        return
    who = happening.who()
    done = SAID[happening.verb].rstrip(":")
    if happening.verb == "slow":
        who, done = f"the link of {who}", "slowed"
    raise LaunchError(f"{who} was {done} at {time:g} s of virtual time, as --faults asked, and {why}")
