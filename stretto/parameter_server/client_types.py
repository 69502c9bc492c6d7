"""What a worker and the shards of a server say to each other over links: whose range is what, what is under way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor

from stretto.collective_ops import Answer
from stretto.errors import BrokenTransportError, TransportError, UnevenLoopsError
from stretto.parameter_server import messages as m
from stretto.parameter_server.framing import Chunks, kind, placed, whole

ALIGNED = 64
"""Shards begin at multiples of so many numbers."""


Sink = Callable[[int, int, Tensor], None]
"""Takes a piece: of which tensor, where it begins, and its numbers."""


class RollbackRequiredError(TransportError):
    """A server was lost, and begins anew from a cut: `ServerWire.recover`, and go on from there."""


def refuse_refusals(called: str, body: m.Body) -> None:
    """Raise TransportError for a reply that refuses what was asked, AnewError when a server has to be gone back from.

    Raise UnevenLoopsError where the script is at fault.
    """
    if isinstance(body, m.Refused) and body.uneven:
        raise UnevenLoopsError(body.text)
    if isinstance(body, m.Refused):
        raise TransportError(f"{called} refused: {body.text}")
    if isinstance(body, m.StaleRequest):
        raise RollbackRequiredError(f"{called} was lost, and begins anew")


class Channel(Protocol):
    """A worker's connection to the coordinator, or to a shard: parcels out, their replies in."""

    def send(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> int:
        """Send a parcel; returns its number, to wait for the reply with. Tensors may not change until that is there."""
        ...

    def wait(self, number: int, sink: Sink | None = None) -> tuple[m.Body, list[Chunks]]:
        """The reply to a parcel. Raises TransportError when it is a refusal, does not come in time, or never will.

        With a `sink` its tensors go there piece by piece as they come, and are not returned.
        """
        ...

    def is_there(self, number: int) -> bool:
        """Whether the reply has come; never waits."""
        ...

    def awaits(self, number: int) -> bool:
        """Whether a parcel has had no reply yet."""
        ...

    def drop(self, number: int) -> None:
        """Nobody waits for the reply to this parcel any more, if there still is one."""
        ...

    def mutter(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> None:
        """Send a parcel whose reply nobody waits for."""
        ...

    def abort(self) -> None:
        """Break off what is waited for; from any thread."""
        ...

    def forget(self) -> None:
        """Nothing that was asked is waited for any more, and what comes now is."""
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


@dataclass(frozen=True, slots=True)
class _Spoken:
    link: Channel
    number: int
    body: m.Contribute
    tensors: list[Tensor]


class Spoken:
    """What one worker said to shards in exchanges of all. Another may lack the answer of a shard that is lost then."""

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps
        self._all: list[_Spoken] = []

    def say(self, link: Channel, op: int, kind: Literal["mean", "every"], tensor: Tensor) -> int:
        """Say something to a shard; returns the number of the parcel."""
        unheard = (one.body.op for one in self._all if one.link is link and link.awaits(one.number))
        body = m.Contribute(op, kind, min(unheard, default=op) - 1)
        number = link.send(body, [tensor])
        if self._keeps:
            self._all.append(_Spoken(link, number, body, [tensor.clone()]))
        return number

    def hear(self, link: Channel, number: int) -> tuple[m.Body, list[Chunks]]:
        """What came of it. What nobody lacks an answer to is forgotten."""
        body, found = link.wait(number)
        if isinstance(body, m.Result | m.Among):
            self._all = [one for one in self._all if one.link is not link or one.body.op > body.heard]
        return body, found

    def again(self, link: Channel) -> None:
        """Say it once more to a shard that was lost; what it has not answered yet its link asks again."""
        for one in self._all:
            if one.link is link and not link.awaits(one.number):
                link.mutter(one.body, one.tensors)

    def forget(self) -> None:
        """It is of a generation that is over."""
        self._all.clear()


@dataclass(slots=True)
class AllReduceHandle:
    spoken: Spoken
    links: Sequence[Channel]
    tensor: Tensor
    numbers: list[int]
    expected: int
    """How many were to give; each gave its share of the mean of so many."""

    def wait(self) -> Answer:
        flat = self.tensor
        found = [self.spoken.hear(link, number) for link, number in zip(self.links, self.numbers, strict=True)]
        bounds = ranges(flat.numel(), len(found))
        for (start, stop), (body, (pieces, *_)) in zip(bounds, found, strict=True):
            _write(flat[start:stop], pieces)
            if isinstance(body, m.Among) and len(body.members) < self.expected:
                flat[start:stop] *= self.expected / len(body.members)
        return flat


@dataclass(slots=True)
class BrokenHandle:
    """An ask on a wire that was broken off."""

    def wait(self) -> Answer:
        raise BrokenTransportError("the exchange was broken off")


@dataclass(slots=True)
class AllGatherHandle:
    spoken: Spoken
    link: Channel
    like: Tensor
    number: int

    def wait(self) -> Answer:
        found = self.spoken.hear(self.link, self.number)[1]
        return [whole(pieces, kind(self.like)).to(self.like.device) for pieces in found]


@dataclass(frozen=True, slots=True)
class Update:
    """What a worker pushes, and what stands behind it: for each shard an encoded message for each part of its range."""

    seq: int
    versions: Sequence[int]
    samples: int
    lr: float
    messages: Sequence[Sequence[Tensor]]
    batches: Sequence[int] = ()
    """The work in it: batches of the pass."""

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
class PushHandle:
    """A push or a read that is under way."""

    links: Sequence[Channel]
    numbers: list[int]
    lengths: Sequence[int] = ()
    kept: Sequence[Sequence[Tensor]] = field(default_factory=list)
    """What is being sent, kept until it is."""

    def is_there(self) -> bool:
        """Whether all shards have replied; never waits."""
        return all(link.is_there(number) for link, number in zip(self.links, self.numbers, strict=True))

    def wait(self, take: Sink) -> News:
        """Wait for all shards; `take` gets the newest numbers, as they come: of which part, where they begin.

        Raises TransportError when a shard refuses, is gone, or is too late.
        """
        replies = self._replies(lambda shard: self._into(shard, take))
        return _news([body for body, _ in replies])

    def messages(self) -> tuple[News, list[list[Tensor]]]:
        """The same where replies are encoded: each shard's message for each part of its range."""
        replies = self._replies(lambda _: None)
        return _news([body for body, _ in replies]), [[whole(one, "uint8") for one in found] for _, found in replies]

    def drop(self) -> None:
        """Nobody waits for it any more."""
        for link, number in zip(self.links, self.numbers, strict=True):
            link.drop(number)

    def _replies(self, into: Callable[[int], Sink | None]) -> list[tuple[m.Body, list[Chunks]]]:
        pairs = enumerate(zip(self.links, self.numbers, strict=True))
        try:
            return [link.wait(number, into(shard)) for shard, (link, number) in pairs]
        except RollbackRequiredError:
            self.drop()  # what other shards reply is void as well
            raise

    def _into(self, shard: int, take: Sink) -> Sink:
        starts = [ranges(length, len(self.links))[shard][0] for length in self.lengths]
        return lambda part, at, piece: take(part, starts[part] + at, piece)


@dataclass(frozen=True, slots=True)
class RuleMemory:
    """What the servers' rule keeps besides the parameters: under each name a flat tensor for each part of them."""

    tensors: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    arrivals: list[int] = field(default_factory=list)
    """What has arrived of each part's momentum since it was last refreshed."""


def _news(replies: Sequence[m.Body]) -> News:
    goes = [body for body in replies if isinstance(body, m.PushReply)]
    refused = {seq for one in goes for seq in one.refused}
    held_s = max(one.held_s for one in goes)
    return News([one.version for one in goes], goes[0].applied, refused, held_s)


def _write(flat: Tensor, pieces: Chunks) -> None:
    for at, piece in placed(pieces):
        flat[at : at + piece.numel()].copy_(piece)
