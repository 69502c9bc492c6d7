"""A wire through a parameter server: what all say together, and what a worker says to the server alone.

It speaks over links, and does not know what those are made of: sockets, or a simulated network.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from stretto.errors import WireError
from stretto.server import messages as m
from stretto.server.parcels import Pieces, kind, placed, whole
from stretto.wire.seam import Traffic, as_bytes
from stretto.words import Answer, Every, Mean
from stretto.words import Ask as Asked

ALIGNED = 64
"""Shards begin at multiples of so many numbers."""


Sink = Callable[[int, int, Tensor], None]
"""Takes a piece: of which tensor, where it begins, and its numbers."""


class Link(Protocol):
    """A worker's connection to the coordinator, or to a shard: parcels out, their replies in."""

    def send(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> int:
        """Send a parcel; returns its number, to wait for the reply with. Tensors may not change until that is there."""
        ...

    def wait(self, number: int, sink: Sink | None = None) -> tuple[m.Body, list[Pieces]]:
        """The reply to a parcel. Raises WireError when it is a refusal, does not come in time, or never will.

        With a `sink` its tensors go there piece by piece as they come, and are not returned.
        """
        ...

    def is_there(self, number: int) -> bool:
        """Whether the reply has come; never waits."""
        ...

    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received."""
        ...

    def close(self) -> None:
        """Say good-bye, and let go. Idempotent."""
        ...


def ranges(length: int, shards: int) -> list[tuple[int, int]]:
    """Where each shard's part of a flat tensor begins and ends."""
    step = -(-length // shards // ALIGNED) * ALIGNED
    bounds = [min(shard * step, length) for shard in range(shards)] + [length]
    return list(itertools.pairwise(bounds))


def shared_out(parts: Sequence[Tensor], shards: int) -> list[list[Tensor]]:
    """For each shard its range of every part."""
    bounds = [ranges(one.numel(), shards) for one in parts]
    return [[one[slice(*each[shard])] for one, each in zip(parts, bounds, strict=True)] for shard in range(shards)]


@dataclass(slots=True)
class _MeanTicket:
    wire: ServerWire
    tensor: Tensor
    numbers: list[int]

    def wait(self) -> Answer:
        flat = self.tensor
        found = [self.wire.answered(shard, number)[0] for shard, number in enumerate(self.numbers)]
        for (start, stop), pieces in zip(ranges(flat.numel(), len(found)), found, strict=True):
            _write(flat[start:stop], pieces)
        return flat


@dataclass(slots=True)
class _EveryTicket:
    wire: ServerWire
    like: Tensor
    shard: int
    number: int

    def wait(self) -> Answer:
        found = self.wire.answered(self.shard, self.number)
        return [whole(pieces, kind(self.like)).to(self.like.device) for pieces in found]


@dataclass(frozen=True, slots=True)
class Update:
    """What a worker pushes, and what stands behind it: for each shard an encoded message for each part of its range."""

    seq: int
    versions: Sequence[int]
    samples: int
    lr: float
    messages: Sequence[Sequence[Tensor]]

    @property
    def nbytes(self) -> int:
        """The bytes of all messages."""
        return sum(one.nbytes for messages in self.messages for one in messages)


@dataclass(frozen=True, slots=True)
class News:
    """What the shards reply: their versions, and what became of this worker's updates."""

    versions: list[int]
    applied: list[tuple[int, int, int, int]]
    """Updates of this worker that were applied at the first shard: (seq, version, staleness, samples)."""
    refused: set[int]
    held_s: float


@dataclass(slots=True)
class Ticket:
    """A push or a read that is under way."""

    wire: ServerWire
    numbers: list[int]
    lengths: Sequence[int] = ()
    kept: Sequence[Sequence[Tensor]] = field(default_factory=list)
    """What is being sent, kept until it is."""

    def is_there(self) -> bool:
        """Whether all shards have replied; never waits."""
        return all(link.is_there(number) for link, number in zip(self.wire.links, self.numbers, strict=True))

    def wait(self, take: Sink) -> News:
        """Wait for all shards; `take` gets the newest numbers, as they come: of which part, where they begin.

        Raises WireError when a shard refuses, is gone, or is too late.
        """
        pairs = enumerate(zip(self.wire.links, self.numbers, strict=True))
        return _news([link.wait(number, self._into(shard, take))[0] for shard, (link, number) in pairs])

    def messages(self) -> tuple[News, list[list[Tensor]]]:
        """The same where replies are encoded: each shard's message for each part of its range."""
        replies = [link.wait(number) for link, number in zip(self.wire.links, self.numbers, strict=True)]
        return _news([body for body, _ in replies]), [[whole(one, "uint8") for one in found] for _, found in replies]

    def _into(self, shard: int, take: Sink) -> Sink:
        starts = [ranges(length, self.wire.shards)[shard][0] for length in self.lengths]
        return lambda part, at, piece: take(part, starts[part] + at, piece)


def _news(replies: Sequence[m.Body]) -> News:
    goes = [body for body in replies if isinstance(body, m.Go)]
    refused = {seq for one in goes for seq in one.refused}
    held_s = max(one.held_s for one in goes)
    return News([one.version for one in goes], goes[0].applied, refused, held_s)


class ServerWire:
    """One worker's end of a parameter server, over links to the coordinator and to every shard."""

    def __init__(self, worker: int, workers: int, coordinator: Link, shards: Sequence[Link]) -> None:
        self.worker, self.workers = worker, workers
        self._coordinator, self.links = coordinator, shards
        self._op = 0
        self._on_close: list[Callable[[], None]] = []

    def when_closed(self, then: Callable[[], None]) -> None:
        """What is to be done once this end is closed."""
        self._on_close.append(then)

    @property
    def shards(self) -> int:
        """How many shards the server has."""
        return len(self.links)

    # --- all together -------------------------------------------------------------------------------------------

    def start(self, ask: Asked) -> _MeanTicket | _EveryTicket:
        """Begin an ask: of a mean every shard adds up its range, of messages one shard gives all to all."""
        self._op += 1
        flat = ask.tensor.detach()
        sent = flat.cpu().contiguous()
        if isinstance(ask, Mean):
            numbers = [
                link.send(m.Ask(self._op, "mean"), [sent[start:stop]])
                for link, (start, stop) in zip(self.links, ranges(sent.numel(), self.shards), strict=True)
            ]
            return _MeanTicket(self, flat, numbers)
        assert isinstance(ask, Every)
        shard = self._op % self.shards
        return _EveryTicket(self, flat, shard, self.links[shard].send(m.Ask(self._op, "every"), [sent]))

    def gather(self, message: bytes) -> list[bytes]:
        """The message of every worker."""
        return self._gathered(message, None)

    def tell(self, message: bytes, teller: int = 0) -> bytes:
        """The teller's message, at every worker."""
        return self._gathered(message if self.worker == teller else b"", teller)[0]

    def traffic(self) -> Traffic:
        """The bytes of this worker's connections, as its links count them."""
        pairs = [link.traffic() for link in (self._coordinator, *self.links)]
        return Traffic(sum(sent for sent, _ in pairs), sum(received for _, received in pairs), counted=True)

    def close(self) -> None:
        """Leave: nobody waits for this worker any more."""
        for link in (self._coordinator, *self.links):
            link.close()
        while self._on_close:
            self._on_close.pop(0)()

    # --- one by one ---------------------------------------------------------------------------------------------

    def open(self, arena: int, recipe: str, parts: Sequence[Tensor]) -> None:
        """Give the shards their ranges of the parameters, and the rule."""
        body = m.Open(arena, recipe, self.workers)
        for link, found in zip(self.links, shared_out(parts, self.shards), strict=True):
            link.wait(link.send(body, [one.detach().cpu() for one in found]))

    def push(self, arena: int, update: Update, lengths: Sequence[int]) -> Ticket:
        """Send an update to all shards; the ticket brings the newest version once this worker may go on.

        `lengths` are those of the parts of the parameters.
        """
        numbers = []
        for shard, link in enumerate(self.links):
            body = m.Push(arena, update.seq, update.versions[shard], update.samples, update.lr)
            numbers.append(link.send(body, [one.detach().cpu() for one in update.messages[shard]]))
        return Ticket(self, numbers, lengths, update.messages)

    def rest(self, seq: int) -> None:
        """Come to a meeting of all after update `seq`: no shard lets others wait for this worker till all have come."""
        for link, number in [(link, link.send(m.Rest(seq))) for link in self.links]:
            link.wait(number)

    def read(self, lengths: Sequence[int], flush: bool = False) -> Ticket:
        """Ask for the newest version; `flush` applies what was being collected."""
        return Ticket(self, [link.send(m.Read(flush)) for link in self.links], lengths)

    def begin(self, number: int, sizes: Sequence[int], meet: int | None, dealt: bool) -> None:
        """Pass `number` begins, with batches of these sizes; workers meet after every `meet` of them.

        They go to whoever is free, or are `dealt` in turn.
        """
        flat = torch.tensor(sizes, dtype=torch.int64)
        self._coordinator.wait(self._coordinator.send(m.Begin(number, meet, dealt), [flat]))

    def ask_lease(self, number: int) -> int:
        """Ask for a batch; `lease` waits for the answer."""
        return self._coordinator.send(m.Lease(number))

    def lease(self, asked: int) -> m.Leased:
        """The batch that was asked for."""
        body, _ = self._coordinator.wait(asked)
        if not isinstance(body, m.Leased):
            raise WireError(f"the coordinator answered {type(body).__name__} to an ask for a batch")
        return body

    def settle(self, number: int, batches: Sequence[int]) -> None:
        """The work on these batches is in the server's parameters."""
        self._coordinator.send(m.Settle(number, list(batches)))

    def answered(self, shard: int, number: int) -> list[Pieces]:
        """The tensors of a reply."""
        return self.links[shard].wait(number)[1]

    def _gathered(self, message: bytes, teller: int | None) -> list[bytes]:
        self._op += 1
        number = self._coordinator.send(m.Gather(self._op, teller), [as_bytes(message)])
        return self._told(self._coordinator.wait(number)[1])

    def _told(self, tensors: Sequence[Pieces]) -> list[bytes]:
        """The bytes in the tensors of a reply."""
        return [bytes(whole(pieces, "uint8").numpy()) for pieces in tensors]


def _write(flat: Tensor, pieces: Pieces) -> None:
    for at, piece in placed(pieces):
        flat[at : at + piece.numel()].copy_(piece)
