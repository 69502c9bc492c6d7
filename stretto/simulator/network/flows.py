"""Shared resources on the virtual clock: flows begin, share what there is, and tell when they have ended."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, prod

from stretto.simulator.event_queue import Event, Queue
from stretto.simulator.network.max_min_fairness import Fluid
from stretto.simulator.network.topology import Links

ARRIVE, GO_ON, SETTLE = 1, 2, 3
"""What goes first at one time: what arrives, then workers, then what they have begun is shared out anew."""
PACKET_BYTES = 1448
"""What fits into one packet goes between the packets of others, at the speed of the links, and shares nothing."""
Then = Callable[[], None]


class Flows:
    """A fluid that lives on a queue of events."""

    def __init__(self, queue: Queue, capacities: Sequence[float]) -> None:
        self._queue, self._fluid = queue, Fluid(capacities)
        self._then: dict[int, tuple[Then, int]] = {}
        self._number = 0
        self._next: Event | None = None
        self._unsettled = False

    def start(self, amount: float, path: Sequence[int], then: Then, key: int = 0, weight: float = 1.0) -> int:
        """Begin a flow now, and return its number; `then` is called when it has ended."""
        self._fluid.advance(self._queue.now)
        self._number += 1
        self._then[self._number] = then, key
        self._fluid.start(self._number, amount, path, weight)
        self._settle_later()
        return self._number

    def stop(self, number: int) -> float:
        """Take a flow out; returns what is left of it, nothing of one that has just ended."""
        self._fluid.advance(self._queue.now)
        if self._then.pop(number, None) is None:
            return 0.0
        self._settle_later()
        return self._fluid.stop(number)

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


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes on their way: from one end to another, or `among` workers, None for all of them (`source` is None)."""

    left: float
    path: Sequence[int]
    latency_s: float
    then: Then
    source: int | None = None
    target: int | None = None
    among: frozenset[int] | None = None
    flow: int | None = None
    is_begun: bool = False
    has_left: bool = False
    is_lost: bool = False


class Buckets:
    """What links may carry at once: tokens come in at a link's own rate while it rests, up to a burst of bytes.

    A link that carries something spends what comes in. Over several links at once goes no more than the emptiest has.
    """

    def __init__(self, queue: Queue, burst: float, rate: Callable[[int], float]) -> None:
        self._queue, self._burst, self._rate = queue, burst, rate
        self._held: dict[int, float] = {}
        self._rested: dict[int, float] = {}
        self._busy: Counter[int] = Counter()

    def begin(self, path: Sequence[int], nbytes: float) -> float:
        """These links begin to carry so much; returns how much of it goes at once."""
        for link in path if self._burst else ():
            if not self._busy[link] and link in self._held:
                came = (self._queue.now - self._rested[link]) * self._rate(link)
                self._held[link] = min(self._held[link] + came, self._burst)
            self._busy[link] += 1
        free = min((self._held.setdefault(link, self._burst) for link in path), default=0.0) if self._burst else 0.0
        free = min(free, nbytes)
        for link in path if free else ():
            self._held[link] -= free
        return free

    def end(self, path: Sequence[int]) -> None:
        """It has been carried."""
        for link in path if self._burst else ():
            self._busy[link] -= 1
            self._rested[link] = self._queue.now


class Net:
    """Messages and exchanges over links. What one end says to another arrives in the order in which it was said."""

    def __init__(self, queue: Queue, links: Links) -> None:
        self._queue, self._links = queue, links
        self._flows = Flows(queue, links.capacities)
        self._lines: dict[tuple[int, int], deque[Transfer]] = {}
        self._under_way: dict[int, Transfer] = {}
        self._factors: dict[int, list[float]] = {}
        """By which its links are slower now, for each end that has slow links."""
        self._slowed: dict[int, float] = {}
        """What of their capacity is left to links that were slowed."""
        self._cuts: list[frozenset[int]] = []
        """The ends of each cut: between them and all others nothing goes."""
        self._stopped: set[int] = set()
        """The workers that are stopped: those that exchange with others hold all of them up."""
        self._held: list[Transfer] = []
        self._buckets = Buckets(queue, links.burst, self._capacity)
        self._moved_s = self._moves_since = 0.0

    def moved_s(self) -> float:
        """For how long something was on its way, until now."""
        return self._moved_s + (self._queue.now - self._moves_since if self._under_way else 0.0)

    def has_link(self, source: int, target: int) -> bool:
        """Whether there is a link on the way from one end to another; there is none within a machine."""
        return self._links.machine(source) != self._links.machine(target)

    def _set_off(self, flow: int, transfer: Transfer) -> None:
        self._moved_s, self._moves_since = self.moved_s(), self._queue.now
        self._under_way[flow] = transfer

    def _halt(self, flow: int) -> None:
        self._moved_s, self._moves_since = self.moved_s(), self._queue.now
        del self._under_way[flow]

    def send(self, source: int, target: int, nbytes: float, then: Then) -> None:
        """Send so many bytes from one end to another (workers from 0, shards from -1 down)."""
        path, latency_s = self._links.path(source, target)
        transfer = Transfer(nbytes, path, latency_s, then, source, target)
        if not path and not self._cuts:
            self._arrive(transfer)
            return
        line = self._lines.setdefault((source, target), deque())
        line.append(transfer)
        if len(line) == 1:
            self._begin(transfer)

    def flow(
        self, amount: float, path: Sequence[int], latency_s: float, then: Then, among: frozenset[int] | None = None
    ) -> Transfer:
        """An exchange of all workers, or of those `among` them, as one flow over all links that it uses."""
        transfer = Transfer(amount, path, latency_s, then, among=among)
        self._begin(transfer)
        return transfer

    def lose(self, transfer: Transfer) -> None:
        """What has not left of it never will."""
        if transfer.is_lost:
            return
        transfer.is_lost = True
        if transfer.flow in self._under_way:
            self._halt(transfer.flow)
            self._flows.stop(transfer.flow)
        if transfer in self._held:
            self._held.remove(transfer)
        if transfer.is_begun and not transfer.has_left:
            self._buckets.end(transfer.path)

    def leave(self, end: int) -> None:
        """An end is gone: what has not left it is lost, and so is what is on its way there."""
        for pair, line in self._lines.items():
            for transfer in line if end in pair else ():
                self.lose(transfer)
            if end in pair:
                line.clear()

    def is_cut_off(self, end: int) -> bool:
        """Whether there is a cut between an end and the coordinator, which is with the first shard."""
        return self._are_apart(end, -1)

    def slow(self, ends: Iterable[int], factor: float) -> None:
        """The links of these ends are slower by a factor."""
        for resource in self._resources(ends):
            self._factors.setdefault(resource, []).append(factor)
            self._set(resource)

    def restore(self, ends: Iterable[int], factor: float) -> None:
        """One such slowness has ended."""
        for resource in self._resources(ends):
            self._factors[resource].remove(factor)
            self._set(resource)

    def cut(self, ends: Iterable[int]) -> None:
        """Nothing goes between these ends and all others; what is under way waits where it is."""
        self._cuts.append(frozenset(ends))
        self._hold()

    def heal(self, ends: Iterable[int]) -> None:
        """One such cut has ended: what waited goes on."""
        self._cuts.remove(frozenset(ends))
        self._go_on()

    def stop(self, ends: Iterable[int]) -> None:
        """Workers stand still: no exchange with them goes on. What they have sent to a server is under way."""
        self._stopped.update(ends)
        self._hold()

    def go_on(self, ends: Iterable[int]) -> None:
        """They go on."""
        self._stopped.difference_update(ends)
        self._go_on()

    def _hold(self) -> None:
        for flow, transfer in list(self._under_way.items()):
            if self._is_cut(transfer):
                self._halt(flow)
                transfer.left, transfer.flow = self._flows.stop(flow), None
                self._held.append(transfer)

    def _go_on(self) -> None:
        held, self._held = self._held, []
        for transfer in held:
            self._begin(transfer)

    def _is_cut(self, transfer: Transfer) -> bool:
        if transfer.source is None:
            among = transfer.among
            if among is None:
                return bool(self._cuts or self._stopped)
            return not among.isdisjoint(self._stopped) or any(among - cut and among & cut for cut in self._cuts)
        assert transfer.target is not None
        return self._are_apart(transfer.source, transfer.target)

    def _are_apart(self, one: int, other: int) -> bool:
        """Whether there is a cut between two ends: it goes between machines, with all that is on them."""
        here, there = self._links.machine(one), self._links.machine(other)
        return any((here in cut) != (there in cut) for cut in self._cuts)

    def _resources(self, ends: Iterable[int]) -> list[int]:
        """What carries bytes to and from these ends, which some of them may share."""
        return [resource for end in ends for resource in {self._links.up(end), self._links.down(end)}]

    def _set(self, resource: int) -> None:
        slower = prod(self._factors[resource])
        self._slowed[resource] = self._links.capacities[resource] / slower
        self._flows.capacity(resource, self._slowed[resource])
        if slower == 1.0:
            del self._slowed[resource]

    def _begin(self, transfer: Transfer) -> None:
        if (self._cuts or self._stopped) and self._is_cut(transfer):
            self._held.append(transfer)
            return
        if not transfer.is_begun:
            transfer.is_begun = True
            transfer.left -= self._buckets.begin(transfer.path, transfer.left)
        if transfer.path and (transfer.left > PACKET_BYTES or (transfer.left and self._slowed)):
            key = transfer.source if transfer.source is not None else 0
            flow = self._flows.start(transfer.left, transfer.path, lambda: self._leave(transfer), key)
            transfer.flow = flow
            self._set_off(flow, transfer)
        elif transfer.path and transfer.left and not self._slowed:
            last_s = transfer.left / min(self._capacity(one) for one in transfer.path)
            self._queue.at(self._queue.now + last_s, lambda: self._leave(transfer), ARRIVE, transfer.source or 0)
        else:
            self._leave(transfer)

    def _capacity(self, resource: int) -> float:
        return self._slowed.get(resource, self._links.capacities[resource])

    def _leave(self, transfer: Transfer) -> None:
        """Its last byte has left: behind it goes the next in the line."""
        if transfer.is_lost:
            return
        transfer.has_left = True
        self._buckets.end(transfer.path)
        if transfer.flow is not None:
            self._halt(transfer.flow)
        self._arrive(transfer)
        if transfer.source is not None and transfer.target is not None:
            line = self._lines[transfer.source, transfer.target]
            line.popleft()
            if line:
                self._begin(line[0])

    def _arrive(self, transfer: Transfer) -> None:
        key = transfer.source if transfer.source is not None else 0
        self._queue.at(self._queue.now + transfer.latency_s, transfer.then, ARRIVE, key)
