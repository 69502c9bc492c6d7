"""The simulated wire between workers without a centre: real tensors, the live wire's bytes, the network's time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from stretto.collective_ops import AllReduceMean, Answer, CollectiveOp, Messages, answer
from stretto.errors import BrokenTransportError, TransportError, explain
from stretto.membership.loop_positions import EVEN, named
from stretto.simulator.engine import Engine, Worker
from stretto.simulator.network import wire_bytes
from stretto.simulator.network.flows import ARRIVE, Transfer
from stretto.simulator.network.topology import Exchange, Links
from stretto.transport.interface import Message, Traffic, made

_mean_bytes = functools.lru_cache(wire_bytes.mean_bytes)
_mean_messages = functools.lru_cache(wire_bytes.mean_messages)
_tell_bytes = functools.lru_cache(wire_bytes.tell_bytes)


@dataclass(slots=True)
class _Round:
    """One exchange: what was laid down, and the answer once it is there."""

    laid: dict[int, Any] = field(default_factory=dict)
    takes: list[Worker] = field(default_factory=list)
    there: bool = False
    answer: Any = None
    problem: str = ""
    left: int = 0
    transfer: Transfer | None = None


class _Load(NamedTuple):
    """What an exchange is for each worker: so many messages, sent and received, and how often words are made of it."""

    messages: float
    tellings: int = 0


class SimGroup:
    """Where all workers of a world meet, or some `members`: exchange r begins when each has laid something down for it.

    Workers are called by their ranks among those that meet.
    """

    def __init__(self, world: Engine, links: Links, members: Sequence[int] | None = None) -> None:
        self._world, self.links = world, links
        self.members = tuple(range(len(world.workers))) if members is None else tuple(members)
        self.among = members
        self._ends = None if members is None else frozenset(members)
        self.workers = len(self.members)
        self._rounds: dict[int, _Round] = {}
        self._is_over = False
        """Whether nothing that has not ended will."""
        self._is_broken = False
        """Whether those who wait are told so."""

    def wire(self, worker: Worker, limit_s: float) -> SimWire:
        """One worker's end."""
        return SimWire(worker, self, limit_s)

    def lay(self, number: int, worker: int, thing: object) -> None:
        """A worker has come to an exchange."""
        round_ = self._round(number)
        round_.laid[worker] = thing
        if not self._is_over and len(round_.laid) == self.workers:
            self._begin(round_)

    def is_there(self, number: int) -> bool:
        """Whether the exchange is over, or never will be."""
        return self._round(number).there or self._is_broken

    def await_turn(self, number: int, worker: Worker) -> None:
        """Wake the worker when it is."""
        self._round(number).takes.append(worker)

    def take(self, number: int) -> Any:
        """The answer; the last worker to take it clears it away. Raises BrokenTransportError if there will be none."""
        round_ = self._rounds[number]
        if not round_.there:
            raise BrokenTransportError(f"exchange {number} was broken off")
        round_.left += 1
        if round_.left == self.workers:
            del self._rounds[number]
        if round_.problem:
            raise TransportError(round_.problem)
        return round_.answer

    def end(self) -> None:
        """Somebody is gone: no exchange ends any more, though those who wait have not been told."""
        self._is_over = True
        for round_ in self._rounds.values():
            if round_.transfer is not None:
                self._world.net.lose(round_.transfer)

    def abort(self) -> None:
        """Break off whatever is not over. Idempotent."""
        self.end()
        self._is_broken = True
        for round_ in self._rounds.values():
            self._wake(round_)

    def missing(self, number: int) -> str:
        """Who has not come, in words."""
        laid = self._round(number).laid
        absent = [str(one) for rank, one in enumerate(self.members) if rank not in laid]
        if not absent:
            return f"the network, in exchange {number}"
        return f"worker {', '.join(absent[:8])}{' and others' if len(absent) > 8 else ''} in exchange {number}"

    def _round(self, number: int) -> _Round:
        found = self._rounds.get(number)
        if found is None:
            found = self._rounds[number] = _Round()
        return found

    def _begin(self, round_: _Round) -> None:
        things = [round_.laid[worker] for worker in range(self.workers)]
        round_.laid.clear()
        round_.laid.update(dict.fromkeys(range(self.workers)))
        try:
            round_.answer, exchange, load = self._combined(things)
        except TransportError as error:
            round_.problem = str(error)
            exchange, load = (0.0, (), 0.0), _Load(0.0)
        round_.transfer = self._carry(exchange, load, lambda: self._end(round_))

    def _carry(self, exchange: Exchange, load: _Load, then: Callable[[], None]) -> Transfer:
        """Let the links carry the bytes while the processors of all work on them.

        Messages wait for each other, so nothing is gained from what is late; nobody works then.
        """
        world, tariff = self._world, self._world.tariff
        amount, path, latency_s = exchange
        work_s = tariff.wire_s(load.messages, 2 * amount, load.tellings)
        left = 1 + (work_s > 0) * (self.workers if world.processors is not None else 1)

        def part() -> None:
            nonlocal left
            left -= 1
            if not left:
                world.queue.at(world.queue.now + latency_s, then, ARRIVE)

        transfer = world.net.flow(amount, path, tariff.wire_s(load.messages, 0, load.tellings), part, self._ends)
        for worker in self.members[: left - 1]:
            world.busy(1 + worker, work_s, part)
        return transfer

    def _end(self, round_: _Round) -> None:
        round_.there = not self._is_broken
        self._wake(round_)

    def _wake(self, round_: _Round) -> None:
        for worker in round_.takes:
            worker.wake()

    def _combined(self, things: list[Any]) -> tuple[Any, Exchange, _Load]:
        if any(type(one) is not type(things[0]) for one in things):
            raise TransportError(_apart(dict(zip(self.members, (one.does for one in things), strict=True))))
        found: tuple[Any, Exchange, _Load] = things[0].combine(things, self)
        return found


def _apart(does: dict[int, str]) -> str:
    """Return the error text for workers that take part in exchanges of different kinds."""
    groups = ((what, [worker for worker, its in does.items() if its == what]) for what in dict.fromkeys(does.values()))
    return explain(
        "the workers do different things at once",
        got="; ".join(f"{named(workers)} in {what}" for what, workers in groups),
        expected="the same steps on every worker",
        to_type=EVEN,
    )


@dataclass(frozen=True, slots=True)
class _Asked:
    does: ClassVar[str] = "the exchange of a step"
    ask: CollectiveOp

    def combine(self, things: list[_Asked], table: SimGroup) -> Any:
        asks = [one.ask for one in things]
        if isinstance(self.ask, AllReduceMean):
            tensor = self.ask.tensor
            messages = _mean_messages(0, len(things), tensor.nbytes, tensor.element_size())
            return answer(asks), table.links.all_reduce(tensor.nbytes, table.among), _Load(messages)
        found = Messages(answer(asks))
        sizes = [one.nbytes for one in found]
        busiest = max((len(sizes) - 1) * max(sizes), sum(sizes) - min(sizes))
        hops, path, latency_s = table.links.gather(wire_bytes.SIZE, table.among)
        exchange = hops + busiest, path, latency_s + table.links.gather(0, table.among)[2] / max(len(sizes) - 1, 1)
        return found, exchange, _Load(6 * (len(things) - 1), 1)


@dataclass(frozen=True, slots=True)
class _Gathered:
    does: ClassVar[str] = "a message of every worker"
    message: bytes

    def combine(self, things: list[_Gathered], table: SimGroup) -> Any:
        told = [one.message for one in things]
        longest = max(map(len, told))
        sent, path, latency_s = table.links.gather(wire_bytes.FRAME, table.among)
        is_long = longest > wire_bytes.FRAME - wire_bytes.SIZE
        if is_long:
            more, _, again_s = table.links.gather(longest, table.among)
            sent, latency_s = sent + more, latency_s + again_s
        load = _Load(4 * (1 + is_long) * (len(things) - 1), 1 + is_long)
        return told, (sent, path, latency_s), load


@dataclass(frozen=True, slots=True)
class _Told:
    does: ClassVar[str] = "a message of one worker"
    message: bytes
    root: int

    def combine(self, things: list[_Told], table: SimGroup) -> Any:
        message = things[self.root].message
        is_long = len(message) > wire_bytes.FRAME - wire_bytes.SIZE
        length = wire_bytes.FRAME + len(message) * is_long
        load = _Load(2 * (1 + is_long) * (1 - 1 / len(things)), 1 + is_long)
        return message, table.links.broadcast(table.members[self.root], length, table.among), load


@dataclass(frozen=True, slots=True)
class _Came:
    """A worker has come to where the others of its generation meet, which takes so long when all have."""

    does: ClassVar[str] = "the next group"
    seconds: float

    def combine(self, things: list[_Came], table: SimGroup) -> Any:
        return None, (0.0, (), self.seconds), _Load(0.0)


@dataclass(frozen=True, slots=True)
class _Ticket:
    wire: SimWire
    number: int
    ask: CollectiveOp

    def wait(self) -> Answer:
        found = self.wire.taken(self.number)
        self.wire.worked()
        if isinstance(self.ask, AllReduceMean):
            return self.ask.tensor.copy_(found)
        self.wire.heard([one.nbytes for one in found])
        answered: list[Tensor] = found
        return answered


class SimWire:
    """One worker's end of a table. Its bytes are those that the live wire would put on its sockets."""

    def __init__(self, worker: Worker, table: SimGroup, limit_s: float) -> None:
        self._self, self._table, self._limit_s = worker, table, limit_s
        self.worker, self.workers = table.members.index(worker.number), table.workers
        self._number = 0
        self._sent, self._received = wire_bytes.forming_bytes(self.workers)

    @property
    def begun(self) -> int:
        """Number of exchanges among all that this worker has begun."""
        return self._number

    def submit(self, op: CollectiveOp) -> _Ticket:
        """Lay the ask down for the others, when this worker's time has come."""
        self.worked()
        if isinstance(op, AllReduceMean):
            self._count(_mean_bytes(self.worker, self.workers, op.tensor.nbytes, op.tensor.element_size()))
        return _Ticket(self, self._lay(_Asked(op)), op)

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """The message of every worker."""
        found: list[bytes] = self.taken(self._lay(_Gathered(made(message))))
        self._count(wire_bytes.gather_bytes(self.workers, max(map(len, found))))
        return found

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """The root's message, at every worker. Within a backward pass, where nobody can wait, all know it."""
        if self._self.in_backward:
            said = made(message)
            number = self._lay(_Told(said, root))
            self._self.after_backward(lambda: self._forget(number, root))
            return said
        number = self._lay(_Told(made(message) if self.worker == root else b"", root))
        found: bytes = self.taken(number)
        self._count(_tell_bytes(self.worker, self.workers, root, len(found)))
        return found

    def _forget(self, number: int, root: int) -> None:
        with suppress(BrokenTransportError):  # the next exchange says so to one who can wait
            self._count(_tell_bytes(self.worker, self.workers, root, len(self.taken(number))))

    def meet(self, seconds: float) -> None:
        """Wait for the others to come, which takes so long when all have. Raises BrokenTransportError."""
        self.taken(self._lay(_Came(seconds)))

    def abort(self) -> None:
        """Break off whatever waits, at all that meet here."""
        self._table.abort()

    def traffic(self) -> Traffic:
        """The bytes so far, as the live wire would count them."""
        return Traffic(self._sent, self._received, counted=False)

    def close(self) -> None:
        """Nothing to let go of."""

    def worked(self) -> None:
        """This worker encodes or decodes one side of an ask."""
        self._self.asks += 1
        self._self.work(self._self.tariff.ask_s)

    def heard(self, sizes: list[int]) -> None:
        """Everyone's message, of these sizes, has come."""
        self._count(wire_bytes.every_bytes(self.worker, sizes))

    def taken(self, number: int) -> Any:
        """Wait for an exchange to be over."""
        table, worker = self._table, self._self
        if not table.is_there(number):
            table.await_turn(number, worker)
            worker.until(lambda: table.is_there(number), lambda: table.missing(number), self._limit_s)
        return table.take(number)

    def _lay(self, thing: object) -> int:
        self._number += 1
        number = self._number
        self._self.act(lambda: self._table.lay(number, self.worker, thing))
        return number

    def _count(self, moved: tuple[int, int]) -> None:
        self._sent += moved[0]
        self._received += moved[1]
