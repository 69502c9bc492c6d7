"""Fault injection in virtual time: faults are drawn when the event queue or a worker reaches their time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from math import inf

from stretto.errors import LaunchError
from stretto.faults.plan import SAID, Happening
from stretto.simulator.event_queue import EventQueue
from stretto.simulator.network.flows import SimNetwork

FAULT = 0
"""Priority of faults: before all other events of the same time."""


class FaultInjector:
    """Injects the faults of a plan, which yields them in order of time."""

    def __init__(self, queue: EventQueue, network: SimNetwork, plan: Iterable[tuple[float, Happening]]) -> None:
        self._queue, self._network = queue, network
        self._plan = iter(plan)
        self._next = next(self._plan, None)
        self._pauses: dict[int, list[tuple[float, float]]] = {}
        """Begin and end of the pauses of each worker, in virtual seconds; infinity for an end that is not drawn yet."""
        self.on_fault: Callable[[float, Happening], None] = lambda *_: None
        """Function called with each fault."""
        self.resolve: Callable[[float, Happening], Happening | None] = lambda _, number: number
        """Function called first, which resolves a target unknown at the time of drawing; returns None to postpone the
        fault."""
        self.apply_to_process: Callable[[float, Happening], None] = refuse
        """Function that applies faults of processes, other than pauses of workers."""
        self._schedule_next()

    def end_of_computing(self, worker: int, start: float, seconds: float) -> float:
        """Return the end of `seconds` of computing that begins at `start`; pauses delay it."""
        at, remaining = self.next_running_time(worker, start), seconds
        while True:
            self._draw(at + remaining)
            next_pause = next(
                ((a, b) for a, b in self._pauses.get(worker, ()) if at <= a < min(b, at + remaining)), None
            )
            if next_pause is None:
                return at + remaining
            remaining -= next_pause[0] - at
            at = self._pause_end(worker, next_pause[0])

    def paused_s(self, worker: int, start: float, stop: float) -> float:
        """Return the seconds in which the worker was paused between two times."""
        return sum(max(min(b, stop) - max(a, start), 0.0) for a, b in self._pauses.get(worker, ()))

    def next_running_time(self, worker: int, now: float) -> float:
        """Return the first time from `now` on at which the worker is not paused."""
        self._draw(now)
        for a, b in self._pauses.get(worker, ()):
            if a <= now < b:
                return self._pause_end(worker, a)
        return now

    def _pause_end(self, worker: int, began: float) -> float:
        while True:
            end = next(b for a, b in self._pauses[worker] if a == began)
            if end < inf or self._next is None:
                return end
            self._draw(self._next[0])

    def _draw(self, until: float) -> None:
        """Draw all faults up to a time and schedule their application."""
        while self._next is not None and self._next[0] <= until:
            time, happening = self._next
            self._next = next(self._plan, None)
            self._record_pause(time, happening)
            self._queue.schedule(max(time, self._queue.now), functools.partial(self.apply, time, happening), FAULT)

    def _schedule_next(self) -> None:
        """Schedule the drawing of the next fault, in case no worker runs ahead of it."""
        if self._next is not None:
            time = self._next[0]
            self._queue.schedule(max(time, self._queue.now), lambda: self._draw_and_schedule_next(time), FAULT)

    def _draw_and_schedule_next(self, time: float) -> None:
        self._draw(time)
        self._schedule_next()

    def _record_pause(self, time: float, happening: Happening) -> None:
        if happening.kind != "worker":
            return
        for worker in happening.numbers:
            pauses = self._pauses.setdefault(worker, [])
            if happening.verb == "pause":
                pauses.append((time, inf))
            elif happening.verb in ("go_on", "kill") and pauses and pauses[-1][1] == inf:
                pauses[-1] = pauses[-1][0], time

    def apply(self, time: float, drawn: Happening) -> None:
        """Apply a fault."""
        happening = self.resolve(time, drawn)
        if happening is None:
            return
        self.on_fault(time, happening)
        endpoints = [number if happening.kind == "worker" else -1 - number for number in happening.numbers]
        network = self._network
        if happening.verb == "kill" and happening.kind == "worker":
            network.resume(endpoints)
        if happening.verb in ("kill", "back") or (happening.kind != "worker" and happening.verb in ("pause", "go_on")):
            self.apply_to_process(time, happening)
        elif happening.verb == "pause":
            network.pause(endpoints)
        elif happening.verb == "go_on":
            network.resume(endpoints)
        elif happening.verb == "cut":
            network.partition(endpoints)
        elif happening.verb == "heal":
            network.heal(endpoints)
        elif happening.verb == "slow":
            if happening.kind == "server":
                self.apply_to_process(time, happening)
            network.slow(endpoints, happening.factor)
        elif happening.verb == "restore":
            network.restore(endpoints, happening.factor)


def refuse(time: float, happening: Happening, why: str = "the run could not continue after it") -> None:
    """Raise LaunchError for a fault that this run cannot survive or does not support."""
    if happening.verb in ("back", "go_on"):
        return
    who = happening.who()
    done = SAID[happening.verb].rstrip(":")
    if happening.verb == "slow":
        who, done = f"the link of {who}", "slowed"
    raise LaunchError(f"{who} was {done} at {time:g} s of virtual time, as --faults asked, and {why}")
