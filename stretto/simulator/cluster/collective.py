"""Simulated collective transport: real tensors, the byte counts of a live transport, times of the simulated network."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from stretto.collective_ops import AllReduceMean, Answer, CollectiveOp, Exchange
from stretto.errors import BrokenTransportError, StrettoError, TransportError, UnevenLoopsError, explain
from stretto.membership.loop_positions import EVEN, LoopPosition, are_apart, explained, named
from stretto.recipe.layout import whole
from stretto.simulator.cluster.contributions import (
    BroadcastBytes,
    Combined,
    Exchanging,
    GatherBytes,
    Paired,
    Rendezvous,
    Submitted,
    Work,
)
from stretto.simulator.cluster.rank_peers import RankPeers
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.layouts.replica import Replica
from stretto.simulator.network import wire_bytes
from stretto.simulator.network.flows import ARRIVAL, Transfer
from stretto.simulator.network.links import Exchange as Flow
from stretto.simulator.network.links import Links
from stretto.transport.interface import Message, PairKey, PairNumbers, Traffic, Transport, check_peer, made

_broadcast_bytes = functools.lru_cache(wire_bytes.broadcast_bytes)

Found = TypeVar("Found")
Key: TypeAlias = int | PairKey
"""Number of a collective of all workers, or key of an exchange."""


@dataclass(slots=True)
class _Collective:
    """One collective, or exchange: the contributions by rank, and the result once it is complete."""

    ranks: Sequence[int]
    contributions: dict[int, Any] = field(default_factory=dict)
    waiting: list[Worker] = field(default_factory=list)
    is_complete: bool = False
    result: Any = None
    places: dict[int, LoopPosition] = field(default_factory=dict)
    """Positions of the workers in their loops, by rank."""
    error: StrettoError | None = None
    taken_count: int = 0
    transfers: list[Transfer] = field(default_factory=list)


class SimGroup:
    """The group of all workers, or of some `members`.

    Collective r starts when every member has contributed to it, an exchange when both of its workers have.

    Workers are identified by their ranks within the group.
    """

    def __init__(
        self, engine: Engine, links: Links, members: Sequence[int] | None = None, replica: Replica | None = None
    ) -> None:
        self._engine = engine
        self.replica = replica or Replica(whole(), links, engine.cost_model, lambda _: None)
        self.members = tuple(range(len(engine.workers))) if members is None else tuple(members)
        self._endpoints = None if members is None else frozenset(members)
        self.workers = len(self.members)
        self._peers = [RankPeers(links, rank, members) for rank in range(self.replica.ranks)]
        self._collectives: dict[Key, _Collective] = {}
        self._has_failed = False
        """True if no unfinished collective will complete, since a member has failed."""
        self._is_aborted = False
        """True if waiting workers raise an error."""

    def transport(self, worker: Worker, limit_s: float) -> SimTransport:
        """Return one worker's transport."""
        return SimTransport(worker, self, limit_s)

    def contribute(self, number: Key, worker: int, contribution: object, place: LoopPosition) -> None:
        """Record a worker's contribution to a collective, and its position; the last one starts it."""
        collective = self._collective(number)
        collective.places[worker] = place
        collective.contributions[worker] = contribution
        if not self._has_failed and len(collective.contributions) == len(collective.ranks):
            self._start(collective)

    def mean_bytes(self, rank: int, nbytes: int, item_bytes: int) -> tuple[int, int]:
        """Return the bytes of a mean on the sockets of all ranks of a worker."""
        parts = zip(self._peers, self.replica.parts(nbytes, item_bytes), strict=True)
        return _added(peers.mean_bytes(rank, part, item_bytes) for peers, part in parts)

    def is_done(self, number: Key) -> bool:
        """True if the collective is complete or the group is aborted."""
        return self._collective(number).is_complete or self._is_aborted

    def wake_when_done(self, number: Key, worker: Worker) -> None:
        """Wake the worker when the collective is complete or aborted."""
        self._collective(number).waiting.append(worker)

    def take(self, number: Key) -> Any:
        """Return the result, which the last worker deletes. Raises BrokenTransportError if the group is aborted."""
        collective = self._collectives[number]
        if not collective.is_complete:
            raise BrokenTransportError(f"{_shown(number)} was aborted")
        collective.taken_count += 1
        if collective.taken_count == len(collective.ranks):
            del self._collectives[number]
        if collective.error:
            raise type(collective.error)(str(collective.error))
        return collective.result

    def stop(self) -> None:
        """Stop all collectives since a member has failed; waiting workers keep waiting until `abort`."""
        self._has_failed = True
        for collective in self._collectives.values():
            for transfer in collective.transfers:
                self._engine.network.drop(transfer)

    def abort(self) -> None:
        """Abort all unfinished collectives: waiting workers raise BrokenTransportError. Idempotent."""
        self.stop()
        self._is_aborted = True
        for collective in self._collectives.values():
            self._wake_waiting(collective)

    def missing(self, number: Key) -> str:
        """Return a description of the workers that have not contributed."""
        collective = self._collective(number)
        missing_workers = [str(self.members[rank]) for rank in collective.ranks if rank not in collective.contributions]
        if not missing_workers:
            return f"the network, in {_shown(number)}"
        others = " and others" if len(missing_workers) > 8 else ""
        return f"worker {', '.join(missing_workers[:8])}{others} in {_shown(number)}"

    def _collective(self, number: Key) -> _Collective:
        collective = self._collectives.get(number)
        if collective is None:
            ranks = range(self.workers) if isinstance(number, int) else number[:2]
            collective = self._collectives[number] = _Collective(ranks)
        return collective

    def _start(self, collective: _Collective) -> None:
        contributions = [collective.contributions[worker] for worker in collective.ranks]
        collective.contributions.clear()
        collective.contributions.update(dict.fromkeys(collective.ranks))
        try:
            self._check_positions(collective.places)
            collective.result, flows, work = self._combine(contributions, collective.ranks)
        except (TransportError, UnevenLoopsError) as error:
            collective.error = error
            flows, work = [(0.0, (), 0.0)], Work(0.0)
        self._transfer(collective, flows, work)

    def _transfer(self, collective: _Collective, flows: Sequence[Flow], work: Work) -> None:
        """Start the transfer over the links and, concurrently, the work of its workers' processors on it.

        The messages of a collective depend on each other, so the latency is added at the end and no processor works in
        it.
        """
        engine, cost_model = self._engine, self._engine.cost_model
        work_s = cost_model.collective_s(work.messages, 2 * max(amount for amount, _, _ in flows), work.conversions)
        workers = [self.members[rank] for rank in collective.ranks][: None if engine.processors is not None else 1]
        workers = workers if work_s > 0 else []
        remaining_parts = len(flows) + len(workers)

        def finish_part() -> None:
            nonlocal remaining_parts
            remaining_parts -= 1
            if not remaining_parts:
                at = engine.queue.now + max(latency_s for _, _, latency_s in flows)
                engine.queue.schedule(at, lambda: self._complete(collective), ARRIVAL)

        link_latency_s = cost_model.collective_s(work.messages, 0, work.conversions)
        in_all = len(collective.ranks) == self.workers
        endpoints = self._endpoints if in_all else frozenset(self.members[rank] for rank in collective.ranks)
        collective.transfers = [
            engine.network.collective(amount, path, link_latency_s, finish_part, endpoints) for amount, path, _ in flows
        ]
        for worker in workers:
            engine.use_processor(1 + worker, work_s, finish_part)

    def _complete(self, collective: _Collective) -> None:
        collective.is_complete = not self._is_aborted
        self._wake_waiting(collective)

    def _wake_waiting(self, collective: _Collective) -> None:
        for worker in collective.waiting:
            worker.wake()

    def _check_positions(self, positions: dict[int, LoopPosition]) -> None:
        """Raise UnevenLoopsError if the workers are at different positions of their loops."""
        if are_apart(positions.values()):
            raise UnevenLoopsError(explained({self.members[rank]: position for rank, position in positions.items()}))

    def _combine(self, contributions: list[Any], ranks: Sequence[int]) -> Combined:
        among = Exchanging(self._peers, self.replica.parts)
        if isinstance(contributions[0], Paired):
            return contributions[0].combine_with(contributions[1], among, *ranks)
        if any(type(contribution) is not type(contributions[0]) for contribution in contributions):
            operations = (contribution.operation for contribution in contributions)
            raise TransportError(_mismatch_error(dict(zip(self.members, operations, strict=True))))
        combined: Combined = contributions[0].combine(contributions, among)
        return combined


def _added(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    sent, received = zip(*pairs, strict=True)
    return sum(sent), sum(received)


def _shown(number: Key) -> str:
    if isinstance(number, int):
        return f"collective {number}"
    return f"exchange {number[3]} of ranks {number[0]} and {number[1]}"


def _mismatch_error(operations: dict[int, str]) -> str:
    """Return the error text for workers that call different collectives at the same position."""
    names = dict.fromkeys(operations.values())
    groups = ((name, [worker for worker, called in operations.items() if called == name]) for name in names)
    return explain(
        "the workers call different collective operations at the same position",
        got="; ".join(f"{named(workers)} in {name}" for name, workers in groups),
        expected="the same steps on every worker",
        to_type=EVEN,
    )


@dataclass(frozen=True, slots=True)
class _Handle:
    transport: SimTransport
    number: Key
    op: CollectiveOp

    def wait(self) -> Answer:
        result = self.transport.wait_result(self.number)
        self.transport.spend_codec_time()
        if isinstance(self.op, Exchange):
            received: Tensor = result[self.op.peer < self.transport.worker]
            self.transport.count_exchanged(self.op.tensor, received)
            return received
        if isinstance(self.op, AllReduceMean):
            return self.op.tensor.copy_(result)
        self.transport.count_gathered(result)
        answered: list[Tensor] = result
        return answered


class SimTransport(Transport):
    """One worker's transport in a group. It counts the bytes that a live transport would put on its sockets."""

    def __init__(self, worker: Worker, group: SimGroup, limit_s: float) -> None:
        self._sim_worker, self._group, self._limit_s = worker, group, limit_s
        super().__init__(group.members.index(worker.number), group.workers)
        self._number = 0
        self._pair_numbers = PairNumbers()
        self._replica, self._between_ranks = group.replica, -worker.rank_bytes
        self._sent = self._received = 0
        self._count(wire_bytes.connect_bytes(self.workers), self._replica.ranks)

    @property
    def begun(self) -> int:
        """Number of collectives that this worker has started."""
        return self._number

    def submit(self, op: CollectiveOp) -> _Handle:
        """Contribute to an operation at this worker's virtual time, and return its handle."""
        if isinstance(op, Exchange):
            check_peer(op, self.worker, self.workers)
        self.spend_codec_time()
        if isinstance(op, Exchange):
            key = self._pair_numbers.next_key(op, self.worker)
            return _Handle(self, self._contribute_to(key, Paired(op)), op)
        if isinstance(op, AllReduceMean):
            self._count(self._group.mean_bytes(self.worker, op.tensor.nbytes, op.tensor.element_size()))
        return _Handle(self, self._contribute(Submitted(op)), op)

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the message of every worker, in order of ranks."""
        messages: list[bytes] = self.wait_result(self._contribute(GatherBytes(made(message))))
        moved = wire_bytes.all_gather_message_bytes(self.workers, max(map(len, messages)))
        self._count(moved, self._replica.ranks)
        return messages

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the root's message. Within a backward pass, which cannot wait, `message` is equal at all workers."""
        if self._sim_worker.in_backward:
            payload = made(message)
            number = self._contribute(BroadcastBytes(payload, root))
            self._sim_worker.after_backward(lambda: self._count_broadcast(number, root))
            return payload
        number = self._contribute(BroadcastBytes(made(message) if self.worker == root else b"", root))
        received: bytes = self.wait_result(number)
        self._count(_broadcast_bytes(self.worker, self.workers, root, len(received)), self._replica.ranks)
        return received

    def _count_broadcast(self, number: Key, root: int) -> None:
        with suppress(BrokenTransportError):  # the next collective, which can wait, raises it
            moved = _broadcast_bytes(self.worker, self.workers, root, len(self.wait_result(number)))
            self._count(moved, self._replica.ranks)

    def attempt(
        self, act: Callable[[], Found], again: Callable[[], Found] | None = None, in_pairs: bool = False
    ) -> Found:
        """Run operations that belong together. Ranks of a worker agree at their end, and then all workers."""
        found = act()
        if self._replica.ranks > 1:
            self._sim_worker.count_rank_bytes(self._replica.agreement_bytes)
            self._sim_worker.sleep(self._replica.agreement_s)
            self.all_gather_bytes(b"")
        return found

    def rendezvous(self, seconds: float) -> None:
        """Wait for all members and then `seconds` of virtual time. Raises BrokenTransportError."""
        self.wait_result(self._contribute(Rendezvous(seconds)))

    def abort(self) -> None:
        """Abort all unfinished collectives of the group, for all members."""
        self._group.abort()

    def traffic(self) -> Traffic:
        """Return the bytes so far, as a live transport would count them."""
        between_ranks = self._between_ranks + self._sim_worker.rank_bytes
        return Traffic(self._sent + between_ranks, self._received + between_ranks, counted=False)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def spend_codec_time(self) -> None:
        """Spend this worker's time for one encoding or decoding."""
        self._sim_worker.codec_calls += 1
        self._sim_worker.compute(self._sim_worker.cost_model.codec_s * self._replica.largest_share)

    def count_gathered(self, tensors: Sequence[Tensor]) -> None:
        """Count the bytes of an all-gather of these tensors."""
        for sizes in self._sizes(tensors):
            self._count(wire_bytes.all_gather_bytes(self.worker, sizes))

    def count_exchanged(self, sent: Tensor, received: Tensor) -> None:
        """Count the bytes of an exchange of these tensors."""
        for sizes in self._sizes([sent, received]):
            self._count(wire_bytes.exchange_bytes(*sizes))

    def _sizes(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, ...]]:
        """Yield, for each rank, the bytes of its parts of these tensors."""
        yield from zip(*(self._replica.parts(one.nbytes, one.element_size()) for one in tensors), strict=True)

    def wait_result(self, number: Key) -> Any:
        """Wait for the result of a collective, and return it."""
        group, worker = self._group, self._sim_worker
        if not group.is_done(number):
            group.wake_when_done(number, worker)
            worker.wait_until(lambda: group.is_done(number), lambda: group.missing(number), self._limit_s)
        return group.take(number)

    def _contribute(self, contribution: object) -> Key:
        self._number += 1
        return self._contribute_to(self._number, contribution)

    def _contribute_to(self, number: Key, contribution: object) -> Key:
        place = self._loop.place() or LoopPosition()
        self._sim_worker.schedule(lambda: self._group.contribute(number, self.worker, contribution, place))
        return number

    def _count(self, moved: tuple[int, int], times: int = 1) -> None:
        self._sent += moved[0] * times
        self._received += moved[1] * times
