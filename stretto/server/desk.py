"""What each kind of service does with what it is told: the machines behind the sockets, still without a socket.

A desk takes a parcel from a worker and returns the parcels to send. Its clock is given, since replies that the bound
holds back say for how long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.errors import RecipeError, WireError
from stretto.how import Codec, Scene
from stretto.members.coordinator import Coordinator
from stretto.recipe import Recipe
from stretto.server import messages as m
from stretto.server.meeting import Meeting, Told
from stretto.server.parcels import DTYPES, ParcelError, Pieces, kind, whole
from stretto.server.shard import Reply, Shard, Update
from stretto.then import OnParameters
from stretto.typed import parse
from stretto.when import on_arrival
from stretto.words import Ask, Every, Mean, answer

NEWS = -1
"""Stands for an exchange's number where a worker waits for news of its update."""


@dataclass(frozen=True, slots=True)
class Post:
    """A parcel to send: to which worker, in reply to which of its parcels. `sent` is called when it has been read."""

    worker: int
    number: int
    body: m.Body
    tensors: Sequence[Tensor] = ()
    sent: Callable[[], None] | None = None


class Desk(Protocol):
    """Takes what a worker says; returns what is to be sent."""

    def expects(self, worker: int, head: m.Head) -> None:
        """Look at a head before its tensors are taken in. Raises ParcelError when they would not fit."""
        ...

    def streams(self, worker: int, head: m.Head) -> bool:
        """Whether a parcel that is still coming is to be given to `write` piece by piece."""
        ...

    def write(self, worker: int, index: int, at: int, piece: Tensor) -> None:
        """A piece of tensor `index` has come, which begins there."""
        ...

    def take(self, worker: int, head: m.Head, tensors: list[Pieces]) -> list[Post]:
        """A whole parcel, less what was written before. Raises ParcelError when it makes no sense."""
        ...

    def leave(self, worker: int) -> list[Post]:
        """A worker is gone."""
        ...


class _Asked:
    """Which parcels are waiting for an answer, and since when."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[tuple[int, int], tuple[int, float]] = {}

    def note(self, worker: int, op: int, number: int) -> None:
        self._waiting[worker, op] = number, self._clock()

    def waits(self, worker: int, op: int) -> bool:
        return (worker, op) in self._waiting

    def answer(self, worker: int, op: int) -> tuple[int, float]:
        """The parcel's number, and how many seconds it has waited."""
        number, since = self._waiting.pop((worker, op))
        return number, self._clock() - since


class _Together:
    """Exchanges of all workers, of whatever kind."""

    def __init__(self, workers: int, combine: Callable[[Sequence[Any]], Any], asked: _Asked) -> None:
        self._meeting: Meeting[Any, Any] = Meeting(workers, combine)
        self._asked = asked

    def lay(self, worker: int, op: int, number: int, thing: object) -> list[Post]:
        self._asked.note(worker, op, number)
        return self._posts(self._meeting.lay(worker, op, thing))

    def leave(self, worker: int) -> list[Post]:
        return self._posts(self._meeting.leave(worker))

    def _posts(self, told: Sequence[Told[Any]]) -> list[Post]:
        return [self._post(one) for one in told]

    def _post(self, told: Told[Any]) -> Post:
        number, _ = self._asked.answer(told.worker, told.op)
        if told.found is None:
            return Post(told.worker, number, m.Refused(told.problem))
        return Post(told.worker, number, m.Answered(), told.found)


class Known:
    """What one worker knows of a shard's parameters, which replies in this encoding have told it."""

    def __init__(self, codec: Codec, theta: Sequence[Tensor], scene: Scene) -> None:
        self._codec = codec
        self._theta = [one.clone() for one in theta]
        self._memories = [codec.memory(one, scene) for one in theta]

    def tell(self, newest: Sequence[Tensor]) -> list[Tensor]:
        """The messages that bring the worker nearer to the newest parameters; what they leave out is told later."""
        return [
            self._tell(known, now, memory)
            for known, now, memory in zip(self._theta, newest, self._memories, strict=True)
        ]

    def told(self, newest: Sequence[Tensor]) -> None:
        """The worker was given them as they are."""
        for known, now in zip(self._theta, newest, strict=True):
            known.copy_(now)

    def _tell(self, known: Tensor, now: Tensor, memory: Any) -> Tensor:
        message = self._codec.encode(now - known, memory)
        if message.numel():
            self._codec.add_to(known, message)
        return message


class ShardDesk:
    """A shard of the parameters, and the exchanges of all workers that go through it."""

    def __init__(self, workers: int, clock: Callable[[], float], on_nan: str) -> None:
        self._workers, self._on_nan = workers, on_nan
        self._asked = _Asked(clock)
        self._together = _Together(workers, _answers, self._asked)
        self._shard: Shard | None = None
        self._recipe = Recipe()
        self._arena = 0
        self._wanted: list[tuple[str, int]] = []
        """The kind and length of each tensor of an update; the most that the length may be, if it varies."""
        self._known: dict[int, Known] = {}
        """What each worker knows of the parameters, if replies are encoded."""

    def expects(self, worker: int, head: m.Head) -> None:
        """An update must have the numbers of this shard's ranges, in the recipe's encoding."""
        if not isinstance(head.body, m.Push):
            return
        shard = self._opened(head.body.arena)
        if not math.isfinite(head.body.lr):
            raise ParcelError(f"an update with a learning rate of {head.body.lr}")
        if worker not in shard.members:
            raise ParcelError(f"worker {worker} has left")
        if not self._fits(head.tensors):
            raise ParcelError(f"an update of {_shown(head.tensors)} for a shard of {_shown(self._wanted)}")

    def _fits(self, tensors: Sequence[tuple[str, int]]) -> bool:
        if self._recipe.how.fixed:
            return list(tensors) == self._wanted
        return len(tensors) == len(self._wanted) and all(
            kind == wanted and length <= most
            for (kind, length), (wanted, most) in zip(tensors, self._wanted, strict=True)
        )

    def streams(self, worker: int, head: m.Head) -> bool:
        """Updates that are added one by one are worked on as they come in."""
        body = head.body
        if not isinstance(body, m.Push) or not self._recipe.how.elementwise or self._shard is None:
            return False
        return self._shard.draft(worker, body.seq, body.version)

    def write(self, worker: int, index: int, at: int, piece: Tensor) -> None:
        """A piece of an update."""
        assert self._shard is not None
        self._shard.write(worker, index, at, self._decoded_piece(piece, self._shard.current.ranges[index]))

    def take(self, worker: int, head: m.Head, tensors: list[Pieces]) -> list[Post]:
        """A whole parcel."""
        body = head.body
        if isinstance(body, m.Push):
            return self._push(worker, head.number, body, tensors)
        if isinstance(body, m.Ask):
            return self._ask(worker, head, body, tensors)
        if isinstance(body, m.Read):
            return self._read(worker, head.number, body.flush)
        if isinstance(body, m.Open):
            return self._open(worker, head, body, tensors)
        if isinstance(body, m.Rest):
            return [
                Post(worker, head.number, m.Answered()),
                *self._goes(self._shard.rest(worker, body.seq) if self._shard else []),
            ]
        raise ParcelError(f"a shard was told {type(body).__name__}")

    def leave(self, worker: int) -> list[Post]:
        """A worker is gone: nobody waits for it any more."""
        replies = self._shard.leave(worker) if self._shard else []
        return [*self._goes(replies), *self._together.leave(worker)]

    def _opened(self, arena: int) -> Shard:
        if self._shard is None or arena != self._arena:
            raise ParcelError(f"no parameters {arena} were given to this shard (it has {self._arena})")
        return self._shard

    def _open(self, worker: int, head: m.Head, body: m.Open, tensors: list[Pieces]) -> list[Post]:
        if worker != 0:
            raise ParcelError(f"worker {worker} gives parameters; worker 0 does")
        try:
            recipe = parse(body.recipe)
        except RecipeError as error:
            raise ParcelError(str(error)) from None
        if not isinstance(recipe.when, on_arrival) or not isinstance(recipe.then, OnParameters):
            raise ParcelError(f"{recipe} applies nothing on arrival")
        integers = [dtype for dtype, _ in head.tensors if not DTYPES[dtype].is_floating_point]
        if integers:
            raise ParcelError(f"parameters of {', '.join(integers)}, which can't be added to")
        theta = [whole(pieces, dtype).clone() for pieces, (dtype, _) in zip(tensors, head.tensors, strict=True)]
        self._shard = Shard(theta, recipe.when, recipe.then, self._workers)
        self._recipe, self._arena = recipe, body.arena
        self._wanted = [_wanted(recipe.how, one) for one in theta]
        reply = recipe.how.reply
        everyone = range(self._workers) if reply is not None else ()
        self._known = {one: Known(reply, theta, Scene(one, self._workers)) for one in everyone if reply is not None}
        return [Post(worker, head.number, m.Answered())]

    def _push(self, worker: int, number: int, body: m.Push, tensors: list[Pieces]) -> list[Post]:
        shard = self._opened(body.arena)
        numbers = [self._decoded(one, like) for one, like in zip(tensors, shard.current.ranges, strict=True)]
        if self._asked.waits(worker, NEWS):
            raise ParcelError(f"an update of worker {worker} while its last is held back")
        freed = shard.push(Update(worker, body.seq, body.version, body.samples, numbers, body.lr))
        replies = [*freed, *shard.pull(worker)]
        at_once = next((one for one in replies if one.worker == worker), None)
        if at_once is None:
            self._asked.note(worker, NEWS, number)
            return self._goes(replies)
        replies.remove(at_once)
        return [self._go(at_once, number, 0.0), *self._goes(replies)]

    def _decoded(self, pieces: Pieces, like: Tensor) -> Pieces:
        """What the pieces say; a codec may write into what it is given to be like."""
        how = self._recipe.how
        if how.elementwise:
            return [self._decoded_piece(one, like) for one in pieces]
        if not pieces:
            return [torch.zeros_like(like)]
        try:
            return [how.decode(torch.cat(pieces), torch.empty_like(like))]
        except (WireError, ValueError) as error:
            raise ParcelError(f"an update that does not say {like.numel()} numbers as {how}: {error}") from None

    def _decoded_piece(self, piece: Tensor, like: Tensor) -> Tensor:
        return self._recipe.how.decode(piece, piece if piece.dtype == like.dtype else like.new_empty(piece.numel()))

    def _goes(self, replies: Sequence[Reply]) -> list[Post]:
        """The replies to those that had to wait."""
        return [self._go(one, *self._asked.answer(one.worker, NEWS)) for one in replies]

    def _go(self, reply: Reply, number: int, held_s: float) -> Post:
        if reply.refused and self._on_nan == "stop":
            reply.version.done()
            return Post(reply.worker, number, m.Refused("the update holds NaN or infinity"))
        applied = [(one.seq, one.version, one.staleness, one.samples) for one in reply.applied]
        body = m.Go(reply.version.number, applied, list(reply.refused), held_s)
        if reply.worker in self._known:
            messages = self._known[reply.worker].tell(reply.version.ranges)
            reply.version.done()
            return Post(reply.worker, number, body, messages)
        return Post(reply.worker, number, body, reply.version.ranges, reply.version.done)

    def _read(self, worker: int, number: int, flush: bool) -> list[Post]:
        if self._shard is None:
            raise ParcelError("this shard has no parameters")
        if flush:
            self._shard.flush()
        version = self._shard.read(worker)
        if worker in self._known:
            self._known[worker].told(version.ranges)
        applied = self._shard.told(worker)
        body = m.Go(version.number, [(one.seq, one.version, one.staleness, one.samples) for one in applied])
        return [Post(worker, number, body, version.ranges, version.done)]

    def _ask(self, worker: int, head: m.Head, body: m.Ask, tensors: list[Pieces]) -> list[Post]:
        if len(tensors) != 1:
            raise ParcelError(f"{len(tensors)} tensors in an ask for one")
        flat = whole(tensors[0], head.tensors[0][0])
        return self._together.lay(worker, body.op, head.number, Mean(flat) if body.kind == "mean" else Every(flat))


class CoordinatorDesk:
    """Hands out batches, and lets workers tell each other bytes."""

    def __init__(self, workers: int, clock: Callable[[], float]) -> None:
        self._together = _Together(workers, _gathered, _Asked(clock))
        self.coordinator = Coordinator(workers)

    def expects(self, worker: int, head: m.Head) -> None:
        """Anything: what it brings is all the memory that it takes."""

    def streams(self, worker: int, head: m.Head) -> bool:
        """Nothing is of use before it is whole."""
        return False

    def write(self, worker: int, index: int, at: int, piece: Tensor) -> None:
        """Never asked for."""

    def take(self, worker: int, head: m.Head, tensors: list[Pieces]) -> list[Post]:
        """A whole parcel."""
        body, number = head.body, head.number
        if isinstance(body, m.Lease):
            return [Post(worker, number, self._lease(worker, body))]
        if isinstance(body, m.Settle):
            self.coordinator.settle(worker, body.number, body.batches)
            return []
        if isinstance(body, m.Gather):
            return self._together.lay(worker, body.op, number, (body.teller, _flat(head, tensors, torch.uint8)))
        if isinstance(body, m.Begin):
            if body.meet is not None and body.meet < 1:
                raise ParcelError(f"a meeting after every {body.meet} batches")
            self.coordinator.begin(body.number, _flat(head, tensors, torch.int64).tolist(), body.meet, body.dealt)
            return [Post(worker, number, m.Answered())]
        raise ParcelError(f"the coordinator was told {type(body).__name__}")

    def leave(self, worker: int) -> list[Post]:
        """A worker is gone: its batches go back."""
        self.coordinator.leave(worker)
        return self._together.leave(worker)

    def _lease(self, worker: int, body: m.Lease) -> m.Leased:
        handed = self.coordinator.lease(worker, body.number)
        return m.Leased(handed.lease.batch if handed.lease else None, handed.samples, handed.meet)


def _wanted(how: Codec, theta: Tensor) -> tuple[str, int]:
    """The kind and the length, at most, of the message about a range."""
    message = (
        how.encode(theta[:0].clone(), None) if how.linear and how.elementwise else theta.new_empty(0, dtype=torch.uint8)
    )
    return kind(message), how.bytes_of(theta) // message.element_size()


def _flat(head: m.Head, tensors: list[Pieces], dtype: torch.dtype) -> Tensor:
    """The one tensor of a parcel."""
    if len(tensors) != 1 or DTYPES[head.tensors[0][0]] is not dtype:
        raise ParcelError(f"{_shown(head.tensors)} where one tensor of {dtype} belongs")
    return whole(tensors[0], head.tensors[0][0])


def _shown(tensors: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{length} {dtype}" for dtype, length in tensors) or "nothing"


def _answers(asks: Sequence[Ask]) -> list[Tensor]:
    found = answer(asks)
    return [found] if isinstance(found, Tensor) else list(found)


def _gathered(said: Sequence[tuple[int | None, Tensor]]) -> list[Tensor]:
    """Everyone's bytes, or the teller's."""
    tellers = {teller for teller, _ in said}
    if len(tellers) > 1:
        raise ValueError("the workers do different things: some gather, some tell")
    teller = tellers.pop()
    if teller is not None and not 0 <= teller < len(said):
        raise ValueError(f"there is no worker {teller} to tell anything")
    return [one for _, one in said] if teller is None else [said[teller][1]]
