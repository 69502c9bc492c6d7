"""Flow-level network in virtual time: transfers share links by max-min fairness and call back when they have ended."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, prod

from stretto.simulator.event_queue import Event, EventQueue
from stretto.simulator.network.links import Links
from stretto.simulator.network.max_min_fairness import FluidModel

ARRIVAL, RESUME, SETTLE = 1, 2, 3
"""Priorities of events of the same time: arrivals, then workers, then the new rates of the flows they started."""
PACKET_BYTES = 1448
"""Payload of one TCP packet. Transfers up to this size are sent at the full speed of the links, between the packets
of other flows, and do not take part in the sharing."""
Callback = Callable[[], None]


class Flows:
    """A fluid model whose flows end as events of an event queue."""

    def __init__(self, queue: EventQueue, capacities: Sequence[float]) -> None:
        self._queue, self._model = queue, FluidModel(capacities)
        self._callbacks: dict[int, tuple[Callback, int]] = {}
        self._number = 0
        self._next: Event | None = None
        self._unsettled = False

    def start(self, amount: float, path: Sequence[int], callback: Callback, key: int = 0, weight: float = 1.0) -> int:
        """Start a flow now, and return its number; `callback` is called when the flow has ended."""
        self._model.advance(self._queue.now)
        self._number += 1
        self._callbacks[self._number] = callback, key
        self._model.start(self._number, amount, path, weight)
        self._settle_later()
        return self._number

    def stop(self, number: int) -> float:
        """Stop a flow, and return its remaining amount: 0 if it has just ended."""
        self._model.advance(self._queue.now)
        if self._callbacks.pop(number, None) is None:
            return 0.0
        self._settle_later()
        return self._model.stop(number)

    def set_capacity(self, resource: int, per_s: float) -> None:
        """Change the capacity of a resource, per second, from now on."""
        self._model.advance(self._queue.now)
        self._model.set_capacity(resource, per_s)
        self._settle_later()

    def _settle_later(self) -> None:
        """Schedule one computation of the rates for all changes of the same time."""
        if not self._unsettled:
            self._unsettled = True
            self._queue.schedule(self._queue.now, self._settle, SETTLE)

    def _settle(self) -> None:
        self._unsettled = False
        if self._next is not None:
            self._queue.cancel(self._next)
        end = self._model.next_end()
        self._next = self._queue.schedule(max(end, self._queue.now), self._end, ARRIVAL) if isfinite(end) else None

    def _end(self) -> None:
        self._next = None
        self._model.advance(self._queue.now)
        for number in self._model.ended():
            callback, key = self._callbacks.pop(number)
            self._queue.schedule(self._queue.now, callback, ARRIVAL, key)
        self._settle_later()


@dataclass(slots=True, eq=False)
class Transfer:
    """Bytes in transit from one endpoint to another, or a collective of `members` (None: all workers; no `source`)."""

    remaining: float
    path: Sequence[int]
    latency_s: float
    callback: Callback
    source: int | None = None
    target: int | None = None
    members: frozenset[int] | None = None
    flow: int | None = None
    started: bool = False
    sent: bool = False
    dropped: bool = False


class TokenBuckets:
    """A token bucket for each link: an idle link gains tokens at its own rate, up to a burst of bytes.

    A busy link spends its tokens as they come in. A transfer over several links has the burst of the emptiest bucket.
    """

    def __init__(self, queue: EventQueue, burst: float, rate: Callable[[int], float]) -> None:
        self._queue, self._burst, self._rate = queue, burst, rate
        self._tokens: dict[int, float] = {}
        self._idle_since: dict[int, float] = {}
        self._busy: Counter[int] = Counter()

    def begin(self, path: Sequence[int], nbytes: float) -> float:
        """Mark links as busy with a transfer, and return how many of its bytes the burst carries immediately."""
        for link in path if self._burst else ():
            if not self._busy[link] and link in self._tokens:
                gained = (self._queue.now - self._idle_since[link]) * self._rate(link)
                self._tokens[link] = min(self._tokens[link] + gained, self._burst)
            self._busy[link] += 1
        burst_bytes = (
            min((self._tokens.setdefault(link, self._burst) for link in path), default=0.0) if self._burst else 0.0
        )
        burst_bytes = min(burst_bytes, nbytes)
        for link in path if burst_bytes else ():
            self._tokens[link] -= burst_bytes
        return burst_bytes

    def end(self, path: Sequence[int]) -> None:
        """Mark a transfer over these links as done."""
        for link in path if self._burst else ():
            self._busy[link] -= 1
            self._idle_since[link] = self._queue.now


class SimNetwork:
    """Messages and collectives over links. Messages from one endpoint to another arrive in the order sent.

    Endpoints are numbered: workers from 0, shards from -1 down.
    """

    def __init__(self, queue: EventQueue, links: Links) -> None:
        self._queue, self._links = queue, links
        self._flows = Flows(queue, links.capacities)
        self._queued: dict[tuple[int, int], deque[Transfer]] = {}
        self._in_transit: dict[int, Transfer] = {}
        self._factors: dict[int, list[float]] = {}
        """Factors by which each slowed link is slower now."""
        self._slowed: dict[int, float] = {}
        """Capacity in bytes/s of each slowed link."""
        self._partitions: list[frozenset[int]] = []
        """Endpoints of each network partition: no data passes between them and all others."""
        self._paused: set[int] = set()
        """Workers that are paused: a collective with a paused member stops."""
        self._stopped_transfers: list[Transfer] = []
        self._token_buckets = TokenBuckets(queue, links.burst, self._capacity)
        self._active_s = self._active_since = 0.0

    def active_s(self) -> float:
        """Return the seconds of virtual time until now in which any transfer was in transit."""
        return self._active_s + (self._queue.now - self._active_since if self._in_transit else 0.0)

    def crosses_link(self, source: int, target: int) -> bool:
        """True if a link connects two endpoints; there is none within a machine."""
        return self._links.machine(source) != self._links.machine(target)

    def _start_flow(self, flow: int, transfer: Transfer) -> None:
        self._active_s, self._active_since = self.active_s(), self._queue.now
        self._in_transit[flow] = transfer

    def _stop_flow(self, flow: int) -> None:
        self._active_s, self._active_since = self.active_s(), self._queue.now
        del self._in_transit[flow]

    def send(self, source: int, target: int, nbytes: float, callback: Callback) -> None:
        """Send bytes from one endpoint to another, and call back when they have arrived."""
        path, latency_s = self._links.path(source, target)
        transfer = Transfer(nbytes, path, latency_s, callback, source, target)
        if not path and not self._partitions:
            self._schedule_arrival(transfer)
            return
        queued = self._queued.setdefault((source, target), deque())
        queued.append(transfer)
        if len(queued) == 1:
            self._begin(transfer)

    def collective(
        self,
        amount: float,
        path: Sequence[int],
        latency_s: float,
        callback: Callback,
        members: frozenset[int] | None = None,
    ) -> Transfer:
        """Start a collective of all workers, or of `members`, as one flow over all links that it uses."""
        transfer = Transfer(amount, path, latency_s, callback, members=members)
        self._begin(transfer)
        return transfer

    def drop(self, transfer: Transfer) -> None:
        """Drop a transfer unless it has been sent. Idempotent."""
        if transfer.dropped:
            return
        transfer.dropped = True
        if transfer.flow in self._in_transit:
            self._stop_flow(transfer.flow)
            self._flows.stop(transfer.flow)
        if transfer in self._stopped_transfers:
            self._stopped_transfers.remove(transfer)
        if transfer.started and not transfer.sent:
            self._token_buckets.end(transfer.path)

    def disconnect(self, endpoint: int) -> None:
        """Drop all transfers from and to an endpoint that failed, unless they have been sent."""
        for pair, queued in self._queued.items():
            for transfer in queued if endpoint in pair else ():
                self.drop(transfer)
            if endpoint in pair:
                queued.clear()

    def is_partitioned(self, endpoint: int) -> bool:
        """True if a partition separates an endpoint from the coordinator, which runs beside the first shard."""
        return self._are_separated(endpoint, -1)

    def slow(self, endpoints: Iterable[int], factor: float) -> None:
        """Slow the links of these endpoints by a factor."""
        for resource in self._resources(endpoints):
            self._factors.setdefault(resource, []).append(factor)
            self._update_capacity(resource)

    def restore(self, endpoints: Iterable[int], factor: float) -> None:
        """End one slowdown by this factor."""
        for resource in self._resources(endpoints):
            self._factors[resource].remove(factor)
            self._update_capacity(resource)

    def partition(self, endpoints: Iterable[int]) -> None:
        """Partition these endpoints from all others; transfers between them stop until `heal`."""
        self._partitions.append(frozenset(endpoints))
        self._stop_separated()

    def heal(self, endpoints: Iterable[int]) -> None:
        """End one partition of these endpoints, and resume the transfers that it stopped."""
        self._partitions.remove(frozenset(endpoints))
        self._restart_stopped()

    def pause(self, endpoints: Iterable[int]) -> None:
        """Pause workers: their collectives stop, their messages to and from servers do not."""
        self._paused.update(endpoints)
        self._stop_separated()

    def resume(self, endpoints: Iterable[int]) -> None:
        """Resume paused workers."""
        self._paused.difference_update(endpoints)
        self._restart_stopped()

    def _stop_separated(self) -> None:
        for flow, transfer in list(self._in_transit.items()):
            if self._is_stopped(transfer):
                self._stop_flow(flow)
                transfer.remaining, transfer.flow = self._flows.stop(flow), None
                self._stopped_transfers.append(transfer)

    def _restart_stopped(self) -> None:
        stopped, self._stopped_transfers = self._stopped_transfers, []
        for transfer in stopped:
            self._begin(transfer)

    def _is_stopped(self, transfer: Transfer) -> bool:
        if transfer.source is None:
            members = transfer.members
            if members is None:
                return bool(self._partitions or self._paused)
            separated = any(members - group and members & group for group in self._partitions)
            return not members.isdisjoint(self._paused) or separated
        assert transfer.target is not None
        return self._are_separated(transfer.source, transfer.target)

    def _are_separated(self, source: int, target: int) -> bool:
        """True if a partition separates two endpoints; endpoints of one machine are never separated."""
        source_machine, target_machine = self._links.machine(source), self._links.machine(target)
        return any((source_machine in group) != (target_machine in group) for group in self._partitions)

    def _resources(self, endpoints: Iterable[int]) -> list[int]:
        """Return the uplinks and downlinks of these endpoints, with repetitions where endpoints share them."""
        return [
            resource
            for endpoint in endpoints
            for process in self._links.processes(endpoint)
            for resource in {self._links.up(process), self._links.down(process)}
        ]

    def _update_capacity(self, resource: int) -> None:
        slower = prod(self._factors[resource])
        self._slowed[resource] = self._links.capacities[resource] / slower
        self._flows.set_capacity(resource, self._slowed[resource])
        if slower == 1.0:
            del self._slowed[resource]

    def _begin(self, transfer: Transfer) -> None:
        if (self._partitions or self._paused) and self._is_stopped(transfer):
            self._stopped_transfers.append(transfer)
            return
        if not transfer.started:
            transfer.started = True
            transfer.remaining -= self._token_buckets.begin(transfer.path, transfer.remaining)
        if transfer.path and (transfer.remaining > PACKET_BYTES or (transfer.remaining and self._slowed)):
            key = transfer.source if transfer.source is not None else 0
            flow = self._flows.start(transfer.remaining, transfer.path, lambda: self._finish_sending(transfer), key)
            transfer.flow = flow
            self._start_flow(flow, transfer)
        elif transfer.path and transfer.remaining and not self._slowed:
            last_s = transfer.remaining / min(self._capacity(resource) for resource in transfer.path)
            self._queue.schedule(
                self._queue.now + last_s, lambda: self._finish_sending(transfer), ARRIVAL, transfer.source or 0
            )
        else:
            self._finish_sending(transfer)

    def _capacity(self, resource: int) -> float:
        return self._slowed.get(resource, self._links.capacities[resource])

    def _finish_sending(self, transfer: Transfer) -> None:
        """Mark a transfer as sent, and start the next one of the same pair of endpoints."""
        if transfer.dropped:
            return
        transfer.sent = True
        self._token_buckets.end(transfer.path)
        if transfer.flow is not None:
            self._stop_flow(transfer.flow)
        self._schedule_arrival(transfer)
        if transfer.source is not None and transfer.target is not None:
            queued = self._queued[transfer.source, transfer.target]
            queued.popleft()
            if queued:
                self._begin(queued[0])

    def _schedule_arrival(self, transfer: Transfer) -> None:
        key = transfer.source if transfer.source is not None else 0
        self._queue.schedule(self._queue.now + transfer.latency_s, transfer.callback, ARRIVAL, key)
