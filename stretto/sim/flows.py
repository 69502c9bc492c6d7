"""Shared resources on the virtual clock: flows begin, share what there is, and tell when they have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import isfinite

from stretto.sim.clock import Event, Queue
from stretto.sim.fluid import Fluid
from stretto.sim.network import Links

ARRIVE, GO_ON, SETTLE = 1, 2, 3
"""What goes first at one time: what arrives, then workers, then what they have begun is shared out anew."""
Then = Callable[[], None]


class Flows:
    """A fluid that lives on a queue of events."""

    def __init__(self, queue: Queue, capacities: Sequence[float]) -> None:
        self._queue, self._fluid = queue, Fluid(capacities)
        self._then: dict[int, tuple[Then, int]] = {}
        self._number = 0
        self._next: Event | None = None
        self._unsettled = False

    def start(self, amount: float, path: Sequence[int], then: Then, key: int = 0) -> None:
        """Begin a flow now; `then` is called when it has ended."""
        self._fluid.advance(self._queue.now)
        self._number += 1
        self._then[self._number] = then, key
        self._fluid.start(self._number, amount, path)
        self._settle_later()

    def capacity(self, resource: int, per_s: float) -> None:
        """From now on a resource has this capacity."""
        self._fluid.advance(self._queue.now)
        self._fluid.capacity(resource, per_s)
        self._settle_later()

    def _settle_later(self) -> None:
        """Once for all that begins at one time."""
        if not self._unsettled:
            self._unsettled = True
            self._queue.at(self._queue.now, self._settle, SETTLE)

    def _settle(self) -> None:
        self._unsettled = False
        if self._next is not None:
            self._queue.cancel(self._next)
        end = self._fluid.next_end()
        self._next = self._queue.at(max(end, self._queue.now), self._end, ARRIVE) if isfinite(end) else None

    def _end(self) -> None:
        self._next = None
        self._fluid.advance(self._queue.now)
        for number in self._fluid.ended():
            then, key = self._then.pop(number)
            self._queue.at(self._queue.now, then, ARRIVE, key)
        self._settle_later()


class Net:
    """Messages and exchanges over links. What one end says to another arrives in the order in which it was said."""

    def __init__(self, queue: Queue, links: Links) -> None:
        self._queue, self._links = queue, links
        self._flows = Flows(queue, links.capacities)
        self._lines: dict[tuple[int, int], deque[tuple[float, Then]]] = {}
        self._factors: dict[int, list[float]] = {}
        """By which its links are slower now, for each end that has slow links; infinity is a cut."""

    def send(self, source: int, target: int, nbytes: float, then: Then) -> None:
        """Send so many bytes from one end to another (workers from 0, shards from -1 down)."""
        path, _ = self._links.path(source, target)
        if not path:
            self._arrive(source, target, then)
            return
        line = self._lines.setdefault((source, target), deque())
        line.append((nbytes, then))
        if len(line) == 1:
            self._leave(source, target)

    def flow(self, amount: float, path: Sequence[int], latency_s: float, then: Then) -> None:
        """An exchange of all, as one flow over all links that it uses."""
        if not path or not amount:
            self._queue.at(self._queue.now + latency_s, then, ARRIVE)
            return
        self._flows.start(amount, path, lambda: self._later(latency_s, then))

    def slow(self, ends: Iterable[int], factor: float) -> None:
        """The links of these ends are slower by a factor; infinity cuts them off."""
        for end in ends:
            self._factors.setdefault(end, []).append(factor)
            self._set(end)

    def restore(self, ends: Iterable[int], factor: float) -> None:
        """One such slowness has ended."""
        for end in ends:
            self._factors[end].remove(factor)
            self._set(end)

    def _set(self, end: int) -> None:
        slower = 1.0
        for factor in self._factors[end]:
            slower *= factor
        for resource in {self._links.up(end), self._links.down(end)}:
            if resource is not None:
                self._flows.capacity(resource, self._links.capacities[resource] / slower)

    def _leave(self, source: int, target: int) -> None:
        nbytes, _ = self._lines[source, target][0]
        path, _ = self._links.path(source, target)
        self._flows.start(nbytes, path, lambda: self._left(source, target), key=source)

    def _left(self, source: int, target: int) -> None:
        line = self._lines[source, target]
        _, then = line.popleft()
        self._arrive(source, target, then)
        if line:
            self._leave(source, target)

    def _arrive(self, source: int, target: int, then: Then) -> None:
        _, latency_s = self._links.path(source, target)
        self._queue.at(self._queue.now + latency_s, then, ARRIVE, source)

    def _later(self, latency_s: float, then: Then) -> None:
        self._queue.at(self._queue.now + latency_s, then, ARRIVE)
