"""Simulated collective transport: real tensors, the byte counts of a live transport, times of the simulated network."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from stretto.collective_ops import AllReduceMean, Answer, CollectiveOp, Messages, answer
from stretto.errors import BrokenTransportError, StrettoError, TransportError, UnevenLoopsError, explain
from stretto.membership.loop_positions import EVEN, LoopPosition, are_apart, explained, named
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.network import wire_bytes
from stretto.simulator.network.flows import ARRIVAL, Transfer
from stretto.simulator.network.topology import Exchange, Links
from stretto.transport import gloo_ring
from stretto.transport.interface import Message, Traffic, Transport, made

_all_reduce_bytes = gloo_ring.all_reduce_bytes
_all_reduce_messages = functools.lru_cache(gloo_ring.all_reduce_messages)
_broadcast_bytes = functools.lru_cache(wire_bytes.broadcast_bytes)


@dataclass(slots=True)
class _Collective:
    """One collective: the contributions by rank, and the result once it is complete."""

    contributions: dict[int, Any] = field(default_factory=dict)
    waiting: list[Worker] = field(default_factory=list)
    is_complete: bool = False
    result: Any = None
    places: dict[int, LoopPosition] = field(default_factory=dict)
    """Positions of the workers in their loops, by rank."""
    error: StrettoError | None = None
    taken_count: int = 0
    transfer: Transfer | None = None


class _Work(NamedTuple):
    """Processor work of a collective for each worker: messages sent and received, and conversions from and to bytes."""

    messages: float
    conversions: int = 0


class SimGroup:
    """The group of all workers, or of some `members`: collective r starts when every member has contributed to it.

    Workers are identified by their ranks within the group.
    """

    def __init__(self, engine: Engine, links: Links, members: Sequence[int] | None = None) -> None:
        self._engine, self.links = engine, links
        self.members = tuple(range(len(engine.workers))) if members is None else tuple(members)
        self.explicit_members = members
        self._endpoints = None if members is None else frozenset(members)
        self.workers = len(self.members)
        self._collectives: dict[int, _Collective] = {}
        self._has_failed = False
        """True if no unfinished collective will complete, since a member has failed."""
        self._is_aborted = False
        """True if waiting workers raise an error."""

    def transport(self, worker: Worker, limit_s: float) -> SimTransport:
        """Return one worker's transport."""
        return SimTransport(worker, self, limit_s)

    def contribute(self, number: int, worker: int, contribution: object, place: LoopPosition) -> None:
        """Record a worker's contribution to a collective, and its position; the last one starts it."""
        collective = self._collective(number)
        collective.places[worker] = place
        collective.contributions[worker] = contribution
        if not self._has_failed and len(collective.contributions) == self.workers:
            self._start(collective)

    def is_done(self, number: int) -> bool:
        """True if the collective is complete or the group is aborted."""
        return self._collective(number).is_complete or self._is_aborted

    def wake_when_done(self, number: int, worker: Worker) -> None:
        """Wake the worker when the collective is complete or aborted."""
        self._collective(number).waiting.append(worker)

    def take(self, number: int) -> Any:
        """Return the result, which the last worker deletes. Raises BrokenTransportError if the group is aborted."""
        collective = self._collectives[number]
        if not collective.is_complete:
            raise BrokenTransportError(f"collective {number} was aborted")
        collective.taken_count += 1
        if collective.taken_count == self.workers:
            del self._collectives[number]
        if collective.error:
            raise type(collective.error)(str(collective.error))
        return collective.result

    def stop(self) -> None:
        """Stop all collectives since a member has failed; waiting workers keep waiting until `abort`."""
        self._has_failed = True
        for collective in self._collectives.values():
            if collective.transfer is not None:
                self._engine.network.drop(collective.transfer)

    def abort(self) -> None:
        """Abort all unfinished collectives: waiting workers raise BrokenTransportError. Idempotent."""
        self.stop()
        self._is_aborted = True
        for collective in self._collectives.values():
            self._wake_waiting(collective)

    def missing(self, number: int) -> str:
        """Return a description of the workers that have not contributed."""
        contributions = self._collective(number).contributions
        missing_workers = [str(number) for rank, number in enumerate(self.members) if rank not in contributions]
        if not missing_workers:
            return f"the network, in collective {number}"
        others = " and others" if len(missing_workers) > 8 else ""
        return f"worker {', '.join(missing_workers[:8])}{others} in collective {number}"

    def _collective(self, number: int) -> _Collective:
        collective = self._collectives.get(number)
        if collective is None:
            collective = self._collectives[number] = _Collective()
        return collective

    def _start(self, collective: _Collective) -> None:
        contributions = [collective.contributions[worker] for worker in range(self.workers)]
        collective.contributions.clear()
        collective.contributions.update(dict.fromkeys(range(self.workers)))
        try:
            self._check_positions(collective.places)
            collective.result, exchange, work = self._combine(contributions)
        except (TransportError, UnevenLoopsError) as error:
            collective.error = error
            exchange, work = (0.0, (), 0.0), _Work(0.0)
        collective.transfer = self._transfer(exchange, work, lambda: self._complete(collective))

    def _transfer(self, exchange: Exchange, work: _Work, callback: Callable[[], None]) -> Transfer:
        """Start the transfer over the links and, concurrently, the work of all workers' processors on it.

        The messages of a collective depend on each other, so the latency is added at the end and no processor works in
        it.
        """
        engine, cost_model = self._engine, self._engine.cost_model
        amount, path, latency_s = exchange
        work_s = cost_model.collective_s(work.messages, 2 * amount, work.conversions)
        remaining_parts = 1 + (work_s > 0) * (self.workers if engine.processors is not None else 1)

        def finish_part() -> None:
            nonlocal remaining_parts
            remaining_parts -= 1
            if not remaining_parts:
                engine.queue.schedule(engine.queue.now + latency_s, callback, ARRIVAL)

        link_latency_s = cost_model.collective_s(work.messages, 0, work.conversions)
        transfer = engine.network.collective(amount, path, link_latency_s, finish_part, self._endpoints)
        for worker in self.members[: remaining_parts - 1]:
            engine.use_processor(1 + worker, work_s, finish_part)
        return transfer

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

    def _combine(self, contributions: list[Any]) -> tuple[Any, Exchange, _Work]:
        if any(type(contribution) is not type(contributions[0]) for contribution in contributions):
            operations = (contribution.operation for contribution in contributions)
            raise TransportError(_mismatch_error(dict(zip(self.members, operations, strict=True))))
        combined: tuple[Any, Exchange, _Work] = contributions[0].combine(contributions, self)
        return combined


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
            messages = _all_reduce_messages(0, len(contributions), tensor.nbytes, tensor.element_size())
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
        return gathered, exchange, _Work(6 * (len(contributions) - 1), 1)


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
        return messages, (sent, path, latency_s), work


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
        return message, group.links.broadcast(group.members[self.root], length, group.explicit_members), work


@dataclass(frozen=True, slots=True)
class _Rendezvous:
    """Contribution to the rendezvous of a generation, which takes `seconds` after all members have arrived."""

    operation: ClassVar[str] = "the rendezvous of a group"
    seconds: float

    def combine(self, contributions: list[_Rendezvous], group: SimGroup) -> Any:
        return None, (0.0, (), self.seconds), _Work(0.0)


@dataclass(frozen=True, slots=True)
class _Handle:
    transport: SimTransport
    number: int
    op: CollectiveOp

    def wait(self) -> Answer:
        result = self.transport.wait_result(self.number)
        self.transport.spend_codec_time()
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
        self._sent, self._received = wire_bytes.connect_bytes(self.workers)

    @property
    def begun(self) -> int:
        """Number of collectives that this worker has started."""
        return self._number

    def submit(self, op: CollectiveOp) -> _Handle:
        """Contribute to a collective operation at this worker's virtual time, and return its handle."""
        self.spend_codec_time()
        if isinstance(op, AllReduceMean):
            self._count(_all_reduce_bytes(self.worker, self.workers, op.tensor.nbytes, op.tensor.element_size()))
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

    def _count_broadcast(self, number: int, root: int) -> None:
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

    def wait_result(self, number: int) -> Any:
        """Wait for the result of a collective, and return it."""
        group, worker = self._group, self._sim_worker
        if not group.is_done(number):
            group.wake_when_done(number, worker)
            worker.wait_until(lambda: group.is_done(number), lambda: group.missing(number), self._limit_s)
        return group.take(number)

    def _contribute(self, contribution: object) -> int:
        self._number += 1
        number, place = self._number, self._loop.place() or LoopPosition()
        self._sim_worker.schedule(lambda: self._group.contribute(number, self.worker, contribution, place))
        return number

    def _count(self, moved: tuple[int, int]) -> None:
        self._sent += moved[0]
        self._received += moved[1]
