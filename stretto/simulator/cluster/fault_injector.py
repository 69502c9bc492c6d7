"""Fault injection in virtual time: faults are drawn when the event queue or a worker reaches their time."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from math import inf
from typing import Protocol

from stretto.errors import LaunchError
from stretto.faults.plan import SAID, FaultEvent
from stretto.simulator.event_queue import EventQueue
from stretto.simulator.network.flows import SimNetwork

FAULT = 0
"""Priority of faults: before all other events of the same time."""


class Processes(Protocol):
    """The processes of a simulation, which faults hit."""

    def resolve(self, time: float, event: FaultEvent) -> FaultEvent | None:
        """Resolve a target that was unknown at the time of drawing; return None to postpone the fault."""
        ...

    def on_fault(self, time: float, event: FaultEvent) -> None:
        """Note a fault, before it is applied."""
        ...

    def apply_fault(self, time: float, event: FaultEvent) -> None:
        """Apply a fault of a process, other than a pause of a worker."""
        ...


class FaultInjector:
    """Injects the faults of a plan, which yields them in order of time."""

    def __init__(self, queue: EventQueue, network: SimNetwork, plan: Iterable[tuple[float, FaultEvent]]) -> None:
        self._queue, self._network = queue, network
        self._plan = iter(plan)
        self._next = next(self._plan, None)
        self._pauses: dict[int, list[tuple[float, float]]] = {}
        """Begin and end of the pauses of each worker, in virtual seconds; infinity for an end that is not drawn yet."""
        self._processes: Processes | None = None
        self._schedule_next()

    def attach(self, processes: Processes) -> None:
        """Let these processes have the faults."""
        self._processes = processes

    def end_of_computing(self, worker: int, start: float, seconds: float) -> float:
        """Return the end of `seconds` of computing that begins at `start`; pauses delay it."""
        resumed_s, remaining = self.next_running_time(worker, start), seconds
        while True:
            self._draw(resumed_s + remaining)
            next_pause = next(
                ((a, b) for a, b in self._pauses.get(worker, ()) if resumed_s <= a < min(b, resumed_s + remaining)),
                None,
            )
            if next_pause is None:
                return resumed_s + remaining
            remaining -= next_pause[0] - resumed_s
            resumed_s = self._pause_end(worker, next_pause[0])

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

    def _draw(self, until_s: float) -> None:
        """Draw all faults up to a time and schedule their application."""
        while self._next is not None and self._next[0] <= until_s:
            time, event = self._next
            self._next = next(self._plan, None)
            self._record_pause(time, event)
            self._queue.schedule(max(time, self._queue.now), functools.partial(self.apply, time, event), FAULT)

    def _schedule_next(self) -> None:
        """Schedule the drawing of the next fault, in case no worker runs ahead of it."""
        if self._next is not None:
            time = self._next[0]
            self._queue.schedule(max(time, self._queue.now), lambda: self._draw_and_schedule_next(time), FAULT)

    def _draw_and_schedule_next(self, time: float) -> None:
        self._draw(time)
        self._schedule_next()

    def _record_pause(self, time: float, event: FaultEvent) -> None:
        if event.kind != "worker":
            return
        for worker in event.numbers:
            pauses = self._pauses.setdefault(worker, [])
            if event.verb == "pause":
                pauses.append((time, inf))
            elif event.verb in ("resume", "kill") and pauses and pauses[-1][1] == inf:
                pauses[-1] = pauses[-1][0], time

    def apply(self, time: float, drawn: FaultEvent) -> None:
        """Apply a fault."""
        event = self._processes.resolve(time, drawn) if self._processes is not None else drawn
        if event is None:
            return
        if self._processes is not None:
            self._processes.on_fault(time, event)
        endpoints = [number if event.kind == "worker" else -1 - number for number in event.numbers]
        network = self._network
        if event.verb == "kill" and event.kind == "worker":
            network.resume(endpoints)
        if event.verb in ("kill", "back") or (event.kind != "worker" and event.verb in ("pause", "resume")):
            self._apply_to_process(time, event)
        elif event.verb == "pause":
            network.pause(endpoints)
        elif event.verb == "resume":
            network.resume(endpoints)
        elif event.verb == "cut":
            network.partition(endpoints)
        elif event.verb == "heal":
            network.heal(endpoints)
        elif event.verb == "slow":
            if event.kind == "server":
                self._apply_to_process(time, event)
            network.slow(endpoints, event.factor)
        elif event.verb == "restore":
            network.restore(endpoints, event.factor)

    def _apply_to_process(self, time: float, event: FaultEvent) -> None:
        if self._processes is None:
            refuse(time, event)
        else:
            self._processes.apply_fault(time, event)


def refuse(time: float, event: FaultEvent, why: str = "the run could not continue after it") -> None:
    """Raise LaunchError for a fault that this run cannot survive or does not support."""
    if event.verb in ("back", "resume"):
        return
    target = event.who()
    action = SAID[event.verb].rstrip(":")
    if event.verb == "slow":
        target, action = f"the link of {target}", "slowed"
    raise LaunchError(f"{target} was {action} at {time:g} s of virtual time, as --faults asked, and {why}")
