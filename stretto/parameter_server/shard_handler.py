"""The desk of a shard: the parameters, and the exchanges of all workers that go through it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from stretto.codecs import Codec, CodecContext
from stretto.collective_ops import AllGather, AllReduceMean, CollectiveOp, answer
from stretto.errors import RecipeError, TransportError
from stretto.parameter_server import messages as m
from stretto.parameter_server.framing import DTYPES, Chunks, FramingError, kind, whole
from stretto.parameter_server.handler import NEWS, Asked, CollectiveHandler, OutgoingMessage, shown
from stretto.parameter_server.shard import Reply, Shard, Update, named
from stretto.parameter_server.snapshots import SnapshotStore
from stretto.parameter_server.versioned_buffers import Version
from stretto.recipe.parser import parse
from stretto.recipe.recipe import Recipe
from stretto.recipe.then import OnParameters
from stretto.recipe.when import on_arrival


class Known:
    """What one worker knows of a shard's parameters, which replies in this encoding have told it."""

    def __init__(self, codec: Codec, theta: Sequence[Tensor], context: CodecContext) -> None:
        self._codec = codec
        self._theta = [one.clone() for one in theta]
        self._states = [codec.init_state(one, context) for one in theta]

    def tell(self, newest: Sequence[Tensor]) -> list[Tensor]:
        """The messages that bring the worker nearer to the newest parameters; what they leave out is told later."""
        return [
            self._tell(known, now, state) for known, now, state in zip(self._theta, newest, self._states, strict=True)
        ]

    def told(self, newest: Sequence[Tensor]) -> None:
        """The worker was given them as they are."""
        for known, now in zip(self._theta, newest, strict=True):
            known.copy_(now)

    def _tell(self, known: Tensor, now: Tensor, state: Any) -> Tensor:
        message = self._codec.encode(now - known, state)
        if message.numel():
            self._codec.add_to(known, message)
        return message


@dataclass(frozen=True, slots=True)
class _Told:
    """The last reply to a worker's update, which may be lost, and says what no other does.

    If it is not encoded the newest version will do as well, unless just this one had to be kept.
    """

    number: int
    body: m.Body
    messages: Sequence[Tensor] | None = None
    version: Version | None = None


class _Work:
    """What a worker's updates of the pass were about."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._number = 0
        self._batches: dict[int, list[int]] = {}
        self._left: m.Left | None = None

    def note(self, body: m.Push) -> None:
        """An update has come, which may have to wait."""
        if body.number != self._number:
            self._number, self._batches = body.number, {}
        if body.batches:  # a stream has none, and no end
            self._batches[body.seq] = body.batches

    def left(self, shard: Shard | None) -> m.Left:
        """The batches whose work is in the parameters, or will be though the worker is gone."""
        if self._left is not None:
            return self._left
        member = shard.members.get(self._worker) if shard is not None else None
        taken = [one for seq, found in self._batches.items() if member and member.knows(seq) for one in found]
        return m.Left(self._number, taken)

    def end(self, shard: Shard | None) -> None:
        """The worker is gone, and soon forgotten: remember what it left."""
        self._left = self.left(shard)


class ShardHandler:
    """A shard of the parameters, and the exchanges of all workers that go through it."""

    def __init__(
        self,
        workers: int,
        clock: Callable[[], float],
        on_nan: str,
        shelf: SnapshotStore | None = None,
        birth: int = 0,
    ) -> None:
        self._workers, self._on_nan = workers, on_nan
        self._shelf, self._birth = shelf, birth
        self._age = -1 if shelf is not None and shelf.cuts() else 0
        """How often the servers went back to a cut; -1 for a process that has not been told yet."""
        self._members = set(range(workers))
        self._works = {worker: _Work(worker) for worker in range(workers)}
        self._asked = Asked(clock)
        self._together = CollectiveHandler(workers, _answers, self._asked)
        if self._age < 0:
            self._together.tell_anew()
        self._shard: Shard | None = None
        self._recipe = Recipe()
        self._arena = 0
        self._wanted: list[tuple[str, int]] = []
        """The kind and length of each tensor of an update; the most that the length may be, if it varies."""
        self._cut_at = -1
        """The newest cut that this process has made."""
        self._is_kept = True
        """Whether there was room for it."""
        self._known: dict[int, Known] = {}
        """What each worker knows of the parameters, if replies are encoded."""
        self._told: dict[int, _Told] = {}

    def expects(self, worker: int, head: m.Header) -> None:
        """An update must have the numbers of this shard's ranges, in the recipe's encoding."""
        if not isinstance(head.body, m.Push) or head.body.age != self._age:
            return
        shard = self._opened(head.body.arena)
        if not math.isfinite(head.body.lr):
            raise FramingError(f"an update with a learning rate of {head.body.lr}")
        if worker not in shard.members:
            raise FramingError(f"worker {worker} has left")
        if not self._fits(head.tensors):
            raise FramingError(f"an update of {shown(head.tensors)} for a shard of {shown(self._wanted)}")

    def _fits(self, tensors: Sequence[tuple[str, int]]) -> bool:
        if self._recipe.how.fixed_size:
            return list(tensors) == self._wanted
        return len(tensors) == len(self._wanted) and all(
            kind == wanted and length <= most
            for (kind, length), (wanted, most) in zip(tensors, self._wanted, strict=True)
        )

    def streams(self, worker: int, head: m.Header) -> bool:
        """Updates that are added one by one are worked on as they come in."""
        body = head.body
        if not isinstance(body, m.Push) or not self._recipe.how.elementwise or self._shard is None:
            return False
        if body.age != self._age:
            return False
        return self._shard.draft(worker, body.seq, body.version)

    def write(self, worker: int, index: int, at: int, piece: Tensor) -> None:
        """A piece of an update."""
        assert self._shard is not None
        self._shard.write(worker, index, at, self._decoded_piece(piece, self._shard.current.ranges[index]))

    def take(self, worker: int, head: m.Header, tensors: list[Chunks]) -> list[OutgoingMessage]:
        """A whole parcel."""
        body, number = head.body, head.number
        if self._is_of_another_age(body):
            return [OutgoingMessage(worker, number, m.StaleRequest(self._age))]
        if isinstance(body, m.Push):
            return self._push(worker, number, body, tensors)
        if isinstance(body, m.Contribute):
            return self._ask(worker, head, body, tensors)
        if isinstance(body, m.Read):
            return self._read(worker, number, body.flush)
        if isinstance(body, m.Recall):
            return self._recall(worker, number)
        if isinstance(body, m.Open):
            return self._open(worker, head, body, tensors)
        if isinstance(body, m.EnterBarrier):
            is_now = self._shard is not None and body.age == self._age  # of another age: it is outside until it hears
            replies = self._shard.rest(worker, body.seq, body.meeting) if self._shard and is_now else []
            return [OutgoingMessage(worker, number, m.Result()), *self._goes(replies)]
        if isinstance(body, m.Group):
            self._together.group(body.generation, body.members)
            return []
        return self._of_members(worker, number, body)

    def _is_of_another_age(self, body: m.Body) -> bool:
        """Whether it was said before all went back to a cut. A process that was told no age takes parameters of any."""
        if isinstance(body, m.Open):
            return body.age < self._age
        return isinstance(body, m.Push | m.Read | m.Recall | m.Snapshot) and body.age != self._age

    def _of_members(self, worker: int, number: int, body: m.Body) -> list[OutgoingMessage]:
        """What is said of who is there, and of going back."""
        if isinstance(body, m.Finish | m.Quit):
            go_without = self.gone if isinstance(body, m.Quit) else self.leave
            return [OutgoingMessage(worker, number, m.Result()), *go_without(worker)]
        if isinstance(body, m.Join):
            return self._join(worker, number)
        if isinstance(body, m.ResumeClock):
            if self._shard is not None:
                self._shard.enter(worker, body.clock)
            return [OutgoingMessage(worker, number, m.Result())]
        if isinstance(body, m.Snapshot):
            self._cut(body.op)
            return [OutgoingMessage(worker, number, m.Has([body.op] * self._is_kept, self._birth, self._age))]
        if isinstance(body, m.ListSnapshots):
            return [
                OutgoingMessage(
                    worker, number, m.Has(self._shelf.cuts() if self._shelf else [], self._birth, self._age)
                )
            ]
        if isinstance(body, m.RequestRollback):
            age = self._age
            reply = self._go_back(body)
            return [OutgoingMessage(worker, number, reply), *(self._anew() if self._age != age else [])]
        raise FramingError(f"a shard was told {type(body).__name__}")

    def leave(self, worker: int) -> list[OutgoingMessage]:
        """A worker has left: nobody waits for its updates any more."""
        replies = self._shard.leave(worker) if self._shard else []
        return [*self._goes(replies), *self._together.leave(worker)]

    def gone(
        self, worker: int, number: int = 0, batches: Sequence[int] = (), torn: bool = False
    ) -> list[OutgoingMessage]:
        """A worker is gone: nobody waits for it any more."""
        self._works[worker].end(self._shard)
        self._forget_told(worker)
        self._members.discard(worker)
        replies = self._shard.leave(worker) if self._shard else []
        return [*self._together.gone(worker), *self._goes(replies)]

    def work_of(self, worker: int) -> m.Left:
        """What the worker's updates of this pass were about, as far as they are in the parameters."""
        return self._works[worker].left(self._shard)

    # --- who is there -------------------------------------------------------------------------------------------

    def _join(self, worker: int, number: int) -> list[OutgoingMessage]:
        """A newcomer: what was known of its last life is forgotten."""
        self._asked.forget(worker)
        self._members.add(worker)
        self._works[worker] = _Work(worker)
        self._together.join(worker)
        if self._shard is None:
            return [OutgoingMessage(worker, number, m.Joined(self._age))]
        replies = self._shard.join(worker)
        self._know(worker, self._shard.current.ranges)
        body = m.Joined(self._age, arena=self._arena, clock=self._shard.slowest())
        return [OutgoingMessage(worker, number, body), *self._goes(replies)]

    def _know(self, worker: int, theta: Sequence[Tensor]) -> None:
        reply = self._recipe.how.reply
        self._forget_told(worker)
        if reply is not None:
            self._known[worker] = Known(reply, theta, CodecContext(worker, self._workers))

    # --- going back ---------------------------------------------------------------------------------------------

    def _cut(self, cut: int) -> None:
        """Keep what there is, once."""
        if self._shelf is None or self._shard is None or cut <= self._cut_at:
            return
        facts, tensors = self._shard.state()
        about = {"arena": self._arena, "recipe": self._recipe.spelled(), **facts}
        self._cut_at, self._is_kept = cut, self._shelf.put(cut, about, tensors)

    def _go_back(self, body: m.RequestRollback) -> m.Body:
        """A new age begins, once. A process that was started meanwhile is not the one that was counted on."""
        if body.birth != self._birth or body.age < self._age:
            return m.StaleRequest(self._age)
        if body.age == self._age:
            return m.Result()
        if self._shelf is not None and body.cut < 0:  # nobody has gone on from what was given
            self._shelf.forget(body.cut)
            self._age = body.age
            return m.Result()
        kept = self._shelf.get(body.cut) if self._shelf is not None else None
        if self._shelf is None or kept is None:
            return m.StaleRequest(self._age)
        facts, tensors = kept
        self._shelf.forget(body.cut)
        self._age, self._cut_at = body.age, body.cut
        theta = [one.clone() for one in tensors[: facts["ranges"]]]
        self._begin_anew(parse(facts["recipe"]), facts["arena"], theta)
        assert self._shard is not None
        self._shard.restore(facts, tensors)
        self._shard.all_outside()
        return m.Result()

    def _anew(self) -> list[OutgoingMessage]:
        """Tell those whose update was held back that it is of an age that is over."""
        held = [worker for worker in range(self._workers) if self._asked.waits(worker, NEWS)]
        return [
            OutgoingMessage(worker, self._asked.answer(worker, NEWS)[0], m.StaleRequest(self._age)) for worker in held
        ]

    def _begin_anew(self, recipe: Recipe, arena: int, theta: list[Tensor]) -> None:
        assert isinstance(recipe.when, on_arrival)
        assert isinstance(recipe.then, OnParameters)
        self._shard = Shard(theta, recipe.when, recipe.then, self._workers)
        for worker in set(range(self._workers)) - self._members:
            self._shard.leave(worker)
        self._recipe, self._arena = recipe, arena
        self._wanted = [_wanted(recipe.how, one) for one in theta]
        self._known, self._works = {}, {worker: _Work(worker) for worker in range(self._workers)}
        for worker in sorted(self._members):
            self._know(worker, theta)

    def _opened(self, arena: int) -> Shard:
        if self._shard is None or arena != self._arena:
            raise FramingError(f"no parameters {arena} were given to this shard (it has {self._arena})")
        return self._shard

    def _open(self, worker: int, head: m.Header, body: m.Open, tensors: list[Chunks]) -> list[OutgoingMessage]:
        if self._shard is not None and (body.arena, self._shard.is_untouched) < (self._arena, True):
            raise FramingError(f"parameters {body.arena} where work on parameters {self._arena} has come")
        try:
            recipe = parse(body.recipe)
        except RecipeError as error:
            raise FramingError(str(error)) from None
        if not isinstance(recipe.when, on_arrival) or not isinstance(recipe.then, OnParameters):
            raise FramingError(f"{recipe} applies nothing on arrival")
        integers = [dtype for dtype, _ in head.tensors if not DTYPES[dtype].is_floating_point]
        if integers:
            raise FramingError(f"parameters of {', '.join(integers)}, which can't be added to")
        found = [whole(pieces, dtype).clone() for pieces, (dtype, _) in zip(tensors, head.tensors, strict=True)]
        parts = len(found) // (1 + len(body.names))
        self._begin_anew(recipe, body.arena, found[:parts])
        assert self._shard is not None
        self._shard.take_up(named(body.names, found[parts:], parts), body.arrivals)
        self._age = body.age
        self._cut(body.cut)
        return [OutgoingMessage(worker, head.number, m.Result())]

    def _push(self, worker: int, number: int, body: m.Push, tensors: list[Chunks]) -> list[OutgoingMessage]:
        shard = self._opened(body.arena)
        if (told := self._told.get(worker)) is not None and told.number == number:
            return [self._told_again(worker, told)]
        numbers = [self._decoded(one, like) for one, like in zip(tensors, shard.current.ranges, strict=True)]
        if self._asked.waits(worker, NEWS) and shard.has(worker, body.seq):
            self._asked.note(worker, NEWS, number)
            return []
        if self._asked.waits(worker, NEWS):
            raise FramingError(f"an update of worker {worker} while its last is held back")
        freed = shard.push(Update(worker, body.seq, body.version, body.samples, numbers, body.lr))
        self._works[worker].note(body)
        replies = [*freed, *shard.pull(worker)]
        at_once = next((one for one in replies if one.worker == worker), None)
        if at_once is None:
            self._asked.note(worker, NEWS, number)
            return self._goes(replies)
        replies.remove(at_once)
        return [self._go(at_once, number, 0.0), *self._goes(replies)]

    def _decoded(self, pieces: Chunks, like: Tensor) -> Chunks:
        """What the pieces say; a codec may write into what it is given to be like."""
        how = self._recipe.how
        if how.elementwise:
            return [self._decoded_piece(one, like) for one in pieces]
        if not pieces:
            return [torch.zeros_like(like)]
        try:
            return [how.decode(torch.cat(pieces), torch.empty_like(like))]
        except (TransportError, ValueError) as error:
            raise FramingError(f"an update that does not say {like.numel()} numbers as {how}: {error}") from None

    def _decoded_piece(self, piece: Tensor, like: Tensor) -> Tensor:
        return self._recipe.how.decode(piece, piece if piece.dtype == like.dtype else like.new_empty(piece.numel()))

    def _goes(self, replies: Sequence[Reply]) -> list[OutgoingMessage]:
        """The replies to those that had to wait."""
        return [self._go(one, *self._asked.answer(one.worker, NEWS)) for one in replies]

    def _go(self, reply: Reply, number: int, held_s: float) -> OutgoingMessage:
        self._forget_told(reply.worker)
        if reply.refused and self._on_nan == "stop":
            reply.version.done()
            refused = m.Refused("the update holds NaN or infinity")
            self._told[reply.worker] = _Told(number, refused, ())
            return OutgoingMessage(reply.worker, number, refused)
        applied = [(one.seq, one.version, one.staleness, one.samples) for one in reply.applied]
        body = m.PushReply(reply.version.number, applied, list(reply.refused), held_s)
        if reply.worker in self._known:
            messages = self._known[reply.worker].tell(reply.version.ranges)
            reply.version.done()
            self._told[reply.worker] = _Told(number, body, messages)
            return OutgoingMessage(reply.worker, number, body, messages)
        assert self._shard is not None
        kept = reply.version.kept() if self._shard.moves_both else None
        self._told[reply.worker] = _Told(number, body, version=kept)
        return OutgoingMessage(reply.worker, number, body, reply.version.ranges, reply.version.done)

    def _told_again(self, worker: int, told: _Told) -> OutgoingMessage:
        """The same reply once more."""
        if told.messages is not None:
            return OutgoingMessage(worker, told.number, told.body, told.messages)
        assert self._shard is not None
        assert isinstance(told.body, m.PushReply)
        version = told.version.kept() if told.version is not None else self._shard.read(worker)
        body = msgspec.structs.replace(told.body, version=version.number)
        return OutgoingMessage(worker, told.number, body, version.ranges, version.done)

    def _forget_told(self, worker: int) -> None:
        told = self._told.pop(worker, None)
        if told is not None and told.version is not None:
            told.version.done()

    def _read(self, worker: int, number: int, flush: bool) -> list[OutgoingMessage]:
        if self._shard is None:
            raise FramingError("this shard has no parameters")
        if flush:
            self._shard.flush()
        version = self._shard.read(worker)
        if worker in self._known:
            self._known[worker].told(version.ranges)
        applied = self._shard.told(worker)
        body = m.PushReply(version.number, [(one.seq, one.version, one.staleness, one.samples) for one in applied])
        return [OutgoingMessage(worker, number, body, version.ranges, version.done)]

    def _recall(self, worker: int, number: int) -> list[OutgoingMessage]:
        if self._shard is None:
            raise FramingError("this shard has no parameters")
        self._shard.flush()
        kept = self._shard.memory()
        body = m.Remembers(list(kept), self._shard.arrivals)
        return [OutgoingMessage(worker, number, body, [one.clone() for tensors in kept.values() for one in tensors])]

    def _ask(self, worker: int, head: m.Header, body: m.Contribute, tensors: list[Chunks]) -> list[OutgoingMessage]:
        if len(tensors) != 1:
            raise FramingError(f"{len(tensors)} tensors in an ask for one")
        flat = whole(tensors[0], head.tensors[0][0])
        ask = AllReduceMean(flat) if body.kind == "mean" else AllGather(flat)
        return self._together.lay(worker, body.op, head.number, ask, body.heard)


def _wanted(how: Codec, theta: Tensor) -> tuple[str, int]:
    """The kind and the length, at most, of the message about a range."""
    message = (
        how.encode(theta[:0].clone(), None) if how.linear and how.elementwise else theta.new_empty(0, dtype=torch.uint8)
    )
    return kind(message), how.bytes_of(theta) // message.element_size()


def _answers(asks: Mapping[int, CollectiveOp]) -> list[Tensor]:
    found = answer(list(asks.values()))
    return [found] if isinstance(found, Tensor) else list(found)
