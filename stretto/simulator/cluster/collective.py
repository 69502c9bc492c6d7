"""Simulated collective transport: real tensors, the byte counts of a live transport, times of the simulated network."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeAlias

from torch import Tensor

from stretto.collective_ops import AllReduceMean, Answer, CollectiveOp, Exchange, Messages, answer, swapped
from stretto.errors import BrokenTransportError, StrettoError, TransportError, UnevenLoopsError, explain
from stretto.membership.loop_positions import EVEN, LoopPosition, are_apart, explained, named
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.network import wire_bytes
from stretto.simulator.network.flows import ARRIVAL, Transfer
from stretto.simulator.network.links import Exchange as Flow
from stretto.simulator.network.links import Links
from stretto.transport import gloo_ring
from stretto.transport.interface import Message, PairKey, PairNumbers, Traffic, Transport, check_peer, made

_all_reduce_bytes = gloo_ring.all_reduce_bytes
_all_reduce_messages = functools.lru_cache(gloo_ring.all_reduce_messages)
_sum_bytes = functools.lru_cache(wire_bytes.sum_bytes)
_broadcast_bytes = functools.lru_cache(wire_bytes.broadcast_bytes)

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


class _Work(NamedTuple):
    """Processor work of a collective for each worker: messages sent and received, and conversions from and to bytes."""

    messages: float
    conversions: int = 0


class SimGroup:
    """The group of all workers, or of some `members`.

    Collective r starts when every member has contributed to it, an exchange when both of its workers have.

    Workers are identified by their ranks within the group.
    """

    def __init__(self, engine: Engine, links: Links, members: Sequence[int] | None = None) -> None:
        self._engine, self.links = engine, links
        self.members = tuple(range(len(engine.workers))) if members is None else tuple(members)
        self.explicit_members = members
        self._endpoints = None if members is None else frozenset(members)
        self.workers = len(self.members)
        self._leaders = [host[0] for host in links.hosts(members)]
        """First worker of each host, which exchanges the sum of its workers; each worker if none shares a host."""
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
        """Return the bytes of a mean on a worker's sockets; within one host, as computed for memory."""
        leaders, worker = self._leaders, self.members[rank]
        if len(leaders) in (1, self.workers):
            return _all_reduce_bytes(rank, self.workers, nbytes, item_bytes)
        if worker not in leaders:
            return 0, 0
        return _sum_bytes(leaders.index(worker), len(leaders), nbytes, item_bytes)

    def mean_messages(self, nbytes: int, item_bytes: int) -> float:
        """Return the number of messages of a mean that a worker sends and receives."""
        if len(self._leaders) == self.workers:
            return _all_reduce_messages(0, self.workers, nbytes, item_bytes)
        return wire_bytes.sum_messages(len(self._leaders), nbytes, item_bytes)

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
            flows, work = [(0.0, (), 0.0)], _Work(0.0)
        self._transfer(collective, flows, work)

    def _transfer(self, collective: _Collective, flows: Sequence[Flow], work: _Work) -> None:
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

    def _combine(self, contributions: list[Any], ranks: Sequence[int]) -> tuple[Any, list[Flow], _Work]:
        if isinstance(contributions[0], _Paired):
            first, second = (self.members[rank] for rank in ranks)
            return contributions[0].combine_with(contributions[1], self.links, first, second)
        if any(type(contribution) is not type(contributions[0]) for contribution in contributions):
            operations = (contribution.operation for contribution in contributions)
            raise TransportError(_mismatch_error(dict(zip(self.members, operations, strict=True))))
        combined: tuple[Any, list[Flow], _Work] = contributions[0].combine(contributions, self)
        return combined


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
class _Submitted:
    operation: ClassVar[str] = "the collective of a step"
    op: CollectiveOp

    def combine(self, contributions: list[_Submitted], group: SimGroup) -> Any:
        ops = [op.op for op in contributions]
        if isinstance(self.op, AllReduceMean):
            tensor = self.op.tensor
            messages = group.mean_messages(tensor.nbytes, tensor.element_size())
            return answer(ops), group.links.all_reduce(tensor.nbytes, group.explicit_members), _Work(messages)
        gathered = Messages(answer(ops))
        sizes = [op.nbytes for op in gathered]
        busiest = max((len(sizes) - 1) * max(sizes), sum(sizes) - min(sizes))
        hops, path, latency_s = group.links.gather(wire_bytes.LENGTH_BYTES, group.explicit_members)
        exchange = (
            hops + busiest,
            path,
            latency_s + group.links.gather(0, group.explicit_members)[2] / max(len(sizes) - 1, 1),
        )
        return gathered, [exchange], _Work(6 * (len(contributions) - 1), 1)


@dataclass(frozen=True, slots=True)
class _Paired:
    """Contribution to an exchange: a frame and then the tensor, in each direction over the links of this direction."""

    op: Exchange

    def combine_with(
        self, other: _Paired, links: Links, worker: int, other_worker: int
    ) -> tuple[list[Tensor], list[Flow], _Work]:
        routes = links.path(worker, other_worker), links.path(other_worker, worker)
        sizes = [wire_bytes.EXCHANGE_FRAME_BYTES + paired.op.tensor.nbytes for paired in (self, other)]
        flows: list[Flow] = [(size, path, 2 * latency_s) for size, (path, latency_s) in zip(sizes, routes, strict=True)]
        return swapped([self.op, other.op]), flows, _Work(sum(map(wire_bytes.exchange_messages, sizes)), 1)


@dataclass(frozen=True, slots=True)
class _GatherBytes:
    operation: ClassVar[str] = "an all-gather of messages"
    message: bytes

    def combine(self, contributions: list[_GatherBytes], group: SimGroup) -> Any:
        messages = [contribution.message for contribution in contributions]
        longest = max(map(len, messages))
        sent, path, latency_s = group.links.gather(wire_bytes.FRAME_BYTES, group.explicit_members)
        is_long = longest > wire_bytes.FRAME_BYTES - wire_bytes.LENGTH_BYTES
        if is_long:
            sent_again, _, again_s = group.links.gather(longest, group.explicit_members)
            sent, latency_s = sent + sent_again, latency_s + again_s
        work = _Work(4 * (1 + is_long) * (len(contributions) - 1), 1 + is_long)
        return messages, [(sent, path, latency_s)], work


@dataclass(frozen=True, slots=True)
class _BroadcastBytes:
    operation: ClassVar[str] = "a broadcast of a message"
    message: bytes
    root: int

    def combine(self, contributions: list[_BroadcastBytes], group: SimGroup) -> Any:
        message = contributions[self.root].message
        is_long = len(message) > wire_bytes.FRAME_BYTES - wire_bytes.LENGTH_BYTES
        length = wire_bytes.FRAME_BYTES + len(message) * is_long
        work = _Work(2 * (1 + is_long) * (1 - 1 / len(contributions)), 1 + is_long)
        return message, [group.links.broadcast(group.members[self.root], length, group.explicit_members)], work


@dataclass(frozen=True, slots=True)
class _Rendezvous:
    """Contribution to the rendezvous of a generation, which takes `seconds` after all members have arrived."""

    operation: ClassVar[str] = "the rendezvous of a group"
    seconds: float

    def combine(self, contributions: list[_Rendezvous], group: SimGroup) -> Any:
        return None, [(0.0, (), self.seconds)], _Work(0.0)


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
            self.transport.count_exchanged(self.op.tensor.nbytes, received.nbytes)
            return received
        if isinstance(self.op, AllReduceMean):
            return self.op.tensor.copy_(result)
        self.transport.count_gathered([message.nbytes for message in result])
        answered: list[Tensor] = result
        return answered


class SimTransport(Transport):
    """One worker's transport in a group. It counts the bytes that a live transport would put on its sockets."""

    def __init__(self, worker: Worker, group: SimGroup, limit_s: float) -> None:
        self._sim_worker, self._group, self._limit_s = worker, group, limit_s
        super().__init__(group.members.index(worker.number), group.workers)
        self._number = 0
        self._pair_numbers = PairNumbers()
        self._sent, self._received = wire_bytes.connect_bytes(self.workers)

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
            return _Handle(self, self._contribute_to(key, _Paired(op)), op)
        if isinstance(op, AllReduceMean):
            self._count(self._group.mean_bytes(self.worker, op.tensor.nbytes, op.tensor.element_size()))
        return _Handle(self, self._contribute(_Submitted(op)), op)

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the message of every worker, in order of ranks."""
        messages: list[bytes] = self.wait_result(self._contribute(_GatherBytes(made(message))))
        self._count(wire_bytes.all_gather_message_bytes(self.workers, max(map(len, messages))))
        return messages

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the root's message. Within a backward pass, which cannot wait, `message` is equal at all workers."""
        if self._sim_worker.in_backward:
            payload = made(message)
            number = self._contribute(_BroadcastBytes(payload, root))
            self._sim_worker.after_backward(lambda: self._count_broadcast(number, root))
            return payload
        number = self._contribute(_BroadcastBytes(made(message) if self.worker == root else b"", root))
        received: bytes = self.wait_result(number)
        self._count(_broadcast_bytes(self.worker, self.workers, root, len(received)))
        return received

    def _count_broadcast(self, number: Key, root: int) -> None:
        with suppress(BrokenTransportError):  # the next collective, which can wait, raises it
            self._count(_broadcast_bytes(self.worker, self.workers, root, len(self.wait_result(number))))

    def rendezvous(self, seconds: float) -> None:
        """Wait for all members and then `seconds` of virtual time. Raises BrokenTransportError."""
        self.wait_result(self._contribute(_Rendezvous(seconds)))

    def abort(self) -> None:
        """Abort all unfinished collectives of the group, for all members."""
        self._group.abort()

    def traffic(self) -> Traffic:
        """Return the bytes so far, as a live transport would count them."""
        return Traffic(self._sent, self._received, counted=False)

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def spend_codec_time(self) -> None:
        """Spend this worker's time for one encoding or decoding."""
        self._sim_worker.codec_calls += 1
        self._sim_worker.compute(self._sim_worker.cost_model.codec_s)

    def count_gathered(self, sizes: list[int]) -> None:
        """Count the bytes of an all-gather of messages of these sizes."""
        self._count(wire_bytes.all_gather_bytes(self.worker, sizes))

    def count_exchanged(self, sent: int, received: int) -> None:
        """Count the bytes of an exchange of tensors of these sizes."""
        self._count(wire_bytes.exchange_bytes(sent, received))

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

    def _count(self, moved: tuple[int, int]) -> None:
        self._sent += moved[0]
        self._received += moved[1]
