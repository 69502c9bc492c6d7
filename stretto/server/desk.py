"""What each kind of service does with what it is told: the machines behind the sockets, still without a socket.

A desk takes a parcel from a worker and returns the parcels to send. Its clock is given, since replies that the bound
holds back say for how long.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.errors import RecipeError, WireError
from stretto.how import Codec, Scene
from stretto.members.coordinator import Coordinator
from stretto.recipe import Recipe
from stretto.server import messages as m
from stretto.server.cuts import Shelf
from stretto.server.meeting import Meeting, Told
from stretto.server.parcels import DTYPES, ParcelError, Pieces, kind, whole
from stretto.server.shard import Reply, Shard, Update
from stretto.then import OnParameters
from stretto.typed import parse
from stretto.when import on_arrival
from stretto.words import Ask, Every, Mean, answer

REMEMBERED, SMALL_BYTES = 64, 1 << 16
"""So many answers are remembered, if they are no larger."""
SKIPPED = 1000
"""Nobody knows how far the dead had come; the exchanges of those who come after them have numbers far beyond."""
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
        """A worker has left on purpose: those who wait for it are told that it won't come."""
        ...

    def gone(self, worker: int, number: int = 0, batches: Sequence[int] = (), torn: bool = False) -> list[Post]:
        """A worker is gone: the others go on without it. `batches` of pass `number` are its work that counts.

        Its last update is `torn` if only some shards have it.
        """
        ...

    def work_of(self, worker: int) -> m.Left:
        """What this desk has of a worker's work."""
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

    def forget(self, worker: int) -> None:
        """Nobody is there to be answered."""
        self._waiting = {asked: since for asked, since in self._waiting.items() if asked[0] != worker}


class _Together:
    """Exchanges of all members, of whatever kind."""

    def __init__(
        self, workers: int, combine: Callable[[Mapping[int, Any]], Any], asked: _Asked, keeps_last: bool = False
    ) -> None:
        self._keeps_last = keeps_last
        self._meeting: Meeting[Any, Any] = Meeting(range(workers), combine)
        self._asked = asked
        self._says_who = False
        """Whether answers say who gave: once members have changed all do, for nobody may have heard the last."""
        self._answers: dict[int, tuple[m.Body, list[Tensor]]] = {}
        """The last answers, if they are small: an answer that was lost may be asked for again."""
        self.last: tuple[int, m.Body, list[Tensor]] = 0, m.Answered(), []
        """The very last, if it is to be kept, however large; and the number of its exchange."""

    @property
    def members(self) -> set[int]:
        return self._meeting.members

    @property
    def left(self) -> set[int]:
        return self._meeting.left

    def lay(self, worker: int, op: int, number: int, thing: object) -> list[Post]:
        if op in self._answers:
            return [Post(worker, number, *self._answers[op])] if worker in self._meeting.members else []
        self._asked.note(worker, op, number)
        return self._posts(self._meeting.lay(worker, op, thing))

    def leave(self, worker: int) -> list[Post]:
        return self._posts(self._meeting.leave(worker))

    def gone(self, worker: int) -> list[Post]:
        self._asked.forget(worker)
        self._says_who = True
        return self._posts(self._meeting.drop(worker))

    def join(self, worker: int) -> None:
        self._meeting.join(worker)

    def tell_anew(self) -> None:
        """Answers say who gave from now on."""
        self._says_who = True

    def take_up(self, op: int, body: m.Body, found: list[Tensor]) -> None:
        """This was the last answer of another process."""
        self._answers[op] = body, found
        self.last = op, body, found

    def group(self, generation: int, members: Sequence[int]) -> None:
        if self._meeting.group(generation, members):
            self._says_who = False
            self._answers.clear()

    def _posts(self, told: Sequence[Told[Any]]) -> list[Post]:
        """The answers of one exchange or several; all of one exchange come together."""
        posts = []
        for _, answers in itertools.groupby(told, key=lambda one: one.op):
            together = list(answers)
            gave = sorted(one.worker for one in together)
            found = together[0].found
            body: m.Body = m.Answered()
            if found is not None and self._says_who:
                body = m.Among(gave)
            if found is not None and sum(one.nbytes for one in found) <= SMALL_BYTES:
                self._answers[together[0].op] = body, found
            if found is not None and self._keeps_last:
                self.last = together[0].op, body, found
            posts += [self._post(one, body) for one in together]
        while len(self._answers) > REMEMBERED:
            del self._answers[min(self._answers)]
        return posts

    def _post(self, told: Told[Any], body: m.Body) -> Post:
        number, _ = self._asked.answer(told.worker, told.op)
        if told.found is None:
            return Post(told.worker, number, m.Refused(told.problem))
        return Post(told.worker, number, body, told.found)


NOBODY: list[Tensor] = []
"""What is answered when the teller was lost."""


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


class ShardDesk:
    """A shard of the parameters, and the exchanges of all workers that go through it."""

    def __init__(
        self, workers: int, clock: Callable[[], float], on_nan: str, shelf: Shelf | None = None, birth: int = 0
    ) -> None:
        self._workers, self._on_nan = workers, on_nan
        self._shelf, self._birth = shelf, birth
        self._age = -1 if shelf is not None and shelf.cuts() else 0
        """How often the servers went back to a cut; -1 for a process that has not been told yet."""
        self._members = set(range(workers))
        self._works = {worker: _Work(worker) for worker in range(workers)}
        self._asked = _Asked(clock)
        self._together = _Together(workers, _answers, self._asked)
        if self._age < 0:
            self._together.tell_anew()
        self._shard: Shard | None = None
        self._recipe = Recipe()
        self._arena = 0
        self._wanted: list[tuple[str, int]] = []
        """The kind and length of each tensor of an update; the most that the length may be, if it varies."""
        self._cut_at = -1
        """The newest cut that this process has made."""
        self._known: dict[int, Known] = {}
        """What each worker knows of the parameters, if replies are encoded."""

    def expects(self, worker: int, head: m.Head) -> None:
        """An update must have the numbers of this shard's ranges, in the recipe's encoding."""
        if not isinstance(head.body, m.Push) or head.body.age != self._age:
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
        if body.age != self._age:
            return False
        return self._shard.draft(worker, body.seq, body.version)

    def write(self, worker: int, index: int, at: int, piece: Tensor) -> None:
        """A piece of an update."""
        assert self._shard is not None
        self._shard.write(worker, index, at, self._decoded_piece(piece, self._shard.current.ranges[index]))

    def take(self, worker: int, head: m.Head, tensors: list[Pieces]) -> list[Post]:
        """A whole parcel."""
        body, number = head.body, head.number
        if isinstance(body, m.Push | m.Read | m.Cut) and body.age != self._age:
            return [Post(worker, number, m.Anew(self._age))]
        if isinstance(body, m.Push):
            return self._push(worker, number, body, tensors)
        if isinstance(body, m.Ask):
            return self._ask(worker, head, body, tensors)
        if isinstance(body, m.Read):
            return self._read(worker, number, body.flush)
        if isinstance(body, m.Open):
            return self._open(worker, head, body, tensors)
        if isinstance(body, m.Rest):
            is_now = self._shard is not None and body.age == self._age  # of another age: it is outside until it hears
            replies = self._shard.rest(worker, body.seq, body.meeting) if self._shard and is_now else []
            return [Post(worker, number, m.Answered()), *self._goes(replies)]
        if isinstance(body, m.Group):
            self._together.group(body.generation, body.members)
            return []
        return self._of_members(worker, number, body)

    def _of_members(self, worker: int, number: int, body: m.Body) -> list[Post]:
        """What is said of who is there, and of going back."""
        if isinstance(body, m.End | m.Quit):
            return [Post(worker, number, m.Answered()), *(self.gone(worker) if isinstance(body, m.Quit) else [])]
        if isinstance(body, m.Join):
            return self._join(worker, number)
        if isinstance(body, m.Enter):
            if self._shard is not None:
                self._shard.enter(worker, body.clock)
            return [Post(worker, number, m.Answered())]
        if isinstance(body, m.Cut):
            self._cut(body.op)
            return [Post(worker, number, m.Answered())]
        if isinstance(body, m.Cuts):
            return [Post(worker, number, m.Has(self._shelf.cuts() if self._shelf else [], self._birth, self._age))]
        if isinstance(body, m.GoBack):
            age = self._age
            reply = self._go_back(body)
            return [Post(worker, number, reply), *(self._anew() if self._age != age else [])]
        raise ParcelError(f"a shard was told {type(body).__name__}")

    def leave(self, worker: int) -> list[Post]:
        """A worker has left: nobody waits for its updates any more."""
        replies = self._shard.leave(worker) if self._shard else []
        return [*self._goes(replies), *self._together.leave(worker)]

    def gone(self, worker: int, number: int = 0, batches: Sequence[int] = (), torn: bool = False) -> list[Post]:
        """A worker is gone: nobody waits for it any more."""
        self._works[worker].end(self._shard)
        self._members.discard(worker)
        replies = self._shard.leave(worker) if self._shard else []
        return [*self._together.gone(worker), *self._goes(replies)]

    def work_of(self, worker: int) -> m.Left:
        """What the worker's updates of this pass were about, as far as they are in the parameters."""
        return self._works[worker].left(self._shard)

    # --- who is there -------------------------------------------------------------------------------------------

    def _join(self, worker: int, number: int) -> list[Post]:
        """A newcomer: what was known of its last life is forgotten."""
        self._asked.forget(worker)
        self._members.add(worker)
        self._works[worker] = _Work(worker)
        self._together.join(worker)
        if self._shard is None:
            return [Post(worker, number, m.Joined(self._age))]
        replies = self._shard.join(worker)
        self._know(worker, self._shard.current.ranges)
        body = m.Joined(self._age, arena=self._arena, clock=self._shard.slowest())
        return [Post(worker, number, body), *self._goes(replies)]

    def _know(self, worker: int, theta: Sequence[Tensor]) -> None:
        reply = self._recipe.how.reply
        if reply is not None:
            self._known[worker] = Known(reply, theta, Scene(worker, self._workers))

    # --- going back ---------------------------------------------------------------------------------------------

    def _cut(self, cut: int) -> None:
        """Keep what there is, once."""
        if self._shelf is None or self._shard is None or cut <= self._cut_at:
            return
        facts, tensors = self._shard.state()
        self._shelf.put(cut, {"arena": self._arena, "recipe": self._recipe.spelled(), **facts}, tensors)
        self._cut_at = cut

    def _go_back(self, body: m.GoBack) -> m.Body:
        """A new age begins, once. A process that was started meanwhile is not the one that was counted on."""
        if body.birth != self._birth or body.age < self._age:
            return m.Anew(self._age)
        if body.age == self._age:
            return m.Answered()
        kept = self._shelf.get(body.cut) if self._shelf is not None else None
        if self._shelf is None or kept is None:
            return m.Anew(self._age)
        facts, tensors = kept
        self._shelf.forget(body.cut)
        self._age, self._cut_at = body.age, body.cut
        theta = [one.clone() for one in tensors[: facts["ranges"]]]
        self._begin_anew(parse(facts["recipe"]), facts["arena"], theta)
        assert self._shard is not None
        self._shard.restore(facts, tensors)
        self._shard.all_outside()
        return m.Answered()

    def _anew(self) -> list[Post]:
        """Tell those whose update was held back that it is of an age that is over."""
        held = [worker for worker in range(self._workers) if self._asked.waits(worker, NEWS)]
        return [Post(worker, self._asked.answer(worker, NEWS)[0], m.Anew(self._age)) for worker in held]

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
            raise ParcelError(f"no parameters {arena} were given to this shard (it has {self._arena})")
        return self._shard

    def _open(self, worker: int, head: m.Head, body: m.Open, tensors: list[Pieces]) -> list[Post]:
        if worker != min(self._together.members, default=0):
            raise ParcelError(f"worker {worker} gives parameters; worker {min(self._together.members)} does")
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
        self._begin_anew(recipe, body.arena, theta)
        self._age = body.age
        self._cut(body.cut)
        return [Post(worker, head.number, m.Answered())]

    def _push(self, worker: int, number: int, body: m.Push, tensors: list[Pieces]) -> list[Post]:
        shard = self._opened(body.arena)
        numbers = [self._decoded(one, like) for one, like in zip(tensors, shard.current.ranges, strict=True)]
        if self._asked.waits(worker, NEWS) and shard.has(worker, body.seq):
            self._asked.note(worker, NEWS, number)
            return []
        if self._asked.waits(worker, NEWS):
            raise ParcelError(f"an update of worker {worker} while its last is held back")
        freed = shard.push(Update(worker, body.seq, body.version, body.samples, numbers, body.lr))
        self._works[worker].note(body)
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
    """Hands out batches, lets workers tell each other bytes, and lets newcomers in when nobody is in a meeting."""

    def __init__(
        self,
        workers: int,
        clock: Callable[[], float],
        shelf: Shelf | None = None,
        cut_every_s: float | None = None,
        ends: Shelf | None = None,
    ) -> None:
        self._clock, self._shelf, self._cut_every_s = clock, shelf, cut_every_s
        self._ends = ends
        """Keeps who has come to an end, and the last answer that those who are left may lack."""
        self._together = _Together(workers, _gathered, _Asked(clock), keeps_last=ends is not None)
        self.coordinator = Coordinator(workers)
        self._age = -1 if shelf is not None and shelf.cuts() else 0
        if self._age < 0:
            self._together.tell_anew()
        self._begun = m.Begun(0, -1, [])
        """How the age began."""
        self._is_torn = False
        """Whether all have to go back, for only some shards have an update."""
        self._cut_at, self._called_at = -1, clock()
        self._is_over = False
        """Whether the pass was over at the last cut."""
        self._order: tuple[int, Tensor] = 0, torch.empty(0, dtype=torch.uint8)
        """The order of a pass, as it was told, and which pass that is."""
        self._begin_said: tuple[int, list[int], int | None, bool] = 0, [], None, False
        self._seen = set(range(workers)) if self._age == 0 else set()
        """The members that this process has heard of: the others may have been called to a meeting."""
        self._ending: set[int] = set()
        """The members that are in the meeting at the end of the pass, or on their way to it."""
        self._apart: set[int] = set()
        """The members that are in no meeting."""
        self._op = self._met = 0
        self._joining: dict[int, int] = {}
        self._closing: dict[int, int] = {}
        self._last: dict[int, tuple[int, m.Leased]] = {}
        """The last lease of each worker, which may be asked for again."""
        self._ended: dict[int, bool] = {}
        """The workers that have come to an end, and whether they quit: the others go on, and others may come."""
        self._take_up_ends()

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
        if isinstance(body, m.Lease | m.Close | m.Cut | m.Count) and (self._is_torn or body.age != self._age):
            return [Post(worker, number, m.Anew(self._age))]
        if isinstance(body, m.Lease):
            return [Post(worker, number, self._lease(worker, number, body)), *self._release()]
        if isinstance(body, m.Settle):
            if body.age == self._age:
                self.coordinator.settle(worker, body.number, body.batches)
            return self._release()
        if isinstance(body, m.Gather | m.Keep | m.Meet):
            return self._meet(worker, head, tensors)
        if isinstance(body, m.Begin):
            return self._begin(worker, head, body, tensors)
        if isinstance(body, m.Close) and body.number != self.coordinator.number:
            return [Post(worker, number, m.Closed(True))]
        if isinstance(body, m.Close):
            self._closing[worker] = number
            self.coordinator.wait(worker, body.number)
            return self._release()
        return [*self._of_members(worker, head, tensors), *self._admit()]

    def _of_members(self, worker: int, head: m.Head, tensors: list[Pieces]) -> list[Post]:
        """What is said of who is there, and of going back."""
        body, number = head.body, head.number
        if isinstance(body, m.Apart):
            self._op = max(self._op, body.op)
            self._apart.add(worker)
            return []
        if isinstance(body, m.Kept):
            self._keep(body.number, _flat(head, tensors, torch.uint8))
            return []
        if isinstance(body, m.Group):
            self._together.group(body.generation, body.members)
            return []
        if isinstance(body, m.Join):
            before = self.gone(worker) if worker in self._together.members else []
            self._joining[worker] = number
            return before
        if isinstance(body, m.End | m.Quit):
            self._note_end(worker, isinstance(body, m.Quit))
            return [Post(worker, number, m.Answered()), *self._go_without(worker)]
        if isinstance(body, m.Count):
            counted = self.coordinator.ledger.counted() if body.number == self.coordinator.number else ()
            return [Post(worker, number, m.Answered(), [torch.tensor(counted, dtype=torch.uint8)])]
        if isinstance(body, m.Cut):
            self._cut(body.op)
            return [Post(worker, number, m.Closed(self._is_over))]
        if isinstance(body, m.Back):
            posts = self._back(worker, body)
            return [*posts, Post(worker, number, self._begun), *self._release()]
        raise ParcelError(f"the coordinator was told {type(body).__name__}")

    def leave(self, worker: int) -> list[Post]:
        """A worker has left: its batches go back."""
        self.coordinator.leave(worker)
        self._closing.pop(worker, None)
        return [*self._together.leave(worker), *self._release(), *self._admit()]

    def gone(self, worker: int, number: int = 0, batches: Sequence[int] = (), torn: bool = False) -> list[Post]:
        """A worker is gone: what it did counts, what it had not done goes back, and the others go on without it.

        Where some shards have its last update and others do not, all go back to the last cut: there all have the same.
        """
        self._is_torn = self._is_torn or (torn and self._shelf is not None)
        self.coordinator.settle(worker, number, batches)
        self.coordinator.leave(worker)
        for kept in (self._closing, self._joining, self._last):
            kept.pop(worker, None)
        self._apart.discard(worker)
        self._ending.discard(worker)
        return [*self._together.gone(worker), *self._release(), *self._admit()]

    def work_of(self, worker: int) -> m.Left:
        """Nothing is worked on here."""
        return m.Left(0, [])

    # --- batches ------------------------------------------------------------------------------------------------

    def _lease(self, worker: int, number: int, body: m.Lease) -> m.Leased:
        asked, leased = self._last.get(worker, (0, None))
        if leased is not None and asked == number:
            return leased
        self._ending.discard(worker)
        self.coordinator.may_call = not self._ending and self._together.members <= self._seen
        self._call_due(worker)
        handed = self.coordinator.lease(worker, body.number)
        leased = m.Leased(handed.lease.batch if handed.lease else None, handed.samples, handed.meet, handed.cut)
        self._last[worker] = number, leased
        return leased

    def _call_due(self, worker: int) -> None:
        """Call all to a cut, when it is time and no other meeting makes one."""
        if self._shelf is None or self._cut_every_s is None or self._begin_said[2] is not None:
            return
        if self._clock() - self._called_at >= self._cut_every_s:
            self._called_at = self._clock()
            self.coordinator.call(worker)

    def _release(self) -> list[Post]:
        """Answer those that wait for the end of the pass, if it has come, or if there are batches again."""
        told = self.coordinator.release(self._together.members <= self._seen)
        self._ending |= {one for one, over in told.items() if over}
        return [Post(one, self._closing.pop(one), m.Closed(over)) for one, over in told.items() if one in self._closing]

    def _begin(self, worker: int, head: m.Head, body: m.Begin, tensors: list[Pieces]) -> list[Post]:
        if body.meet is not None and body.meet < 1:
            raise ParcelError(f"a meeting after every {body.meet} batches")
        sizes = _flat(head, tensors, torch.int64).tolist()
        if body.number > self.coordinator.number:
            self.coordinator.begin(body.number, sizes, body.meet, body.dealt)
            self._begin_said = body.number, sizes, body.meet, body.dealt
        return [Post(worker, head.number, m.Answered())]

    # --- meetings, and who may come -----------------------------------------------------------------------------

    def _meet(self, worker: int, head: m.Head, tensors: list[Pieces]) -> list[Post]:
        """Everyone's bytes, or the teller's."""
        body = head.body
        assert isinstance(body, m.Gather | m.Keep | m.Meet)
        self._op = max(self._op, body.op)
        self._apart.discard(worker)
        if head.number:  # what is said again tells nothing of where it stands now
            self._seen.add(worker)
            self._ending.discard(worker)
            self._ending |= {worker} if isinstance(body, m.Meet) and not body.call else set()
        if isinstance(body, m.Meet):
            self.coordinator.called_at_least(body.call, body.cut)
            self._met = max(self._met, body.call)
            posts = self._together.lay(worker, body.op, head.number, (None, torch.empty(0, dtype=torch.uint8)))
            return [*[Post(one.worker, one.number, one.body) for one in posts], *self._release()]
        flat = _flat(head, tensors, torch.uint8)
        posts = self._together.lay(worker, body.op, head.number, (body.teller, flat))
        if isinstance(body, m.Keep) and posts and posts[0].tensors:
            self._keep(body.number, posts[0].tensors[0])
        return posts

    def _keep(self, number: int, order: Tensor) -> None:
        if number > self._order[0]:
            self._order = number, order.clone()

    def _admit(self) -> list[Post]:
        """Let newcomers in while no member is in a meeting, so that all are at the same exchange."""
        members, left = self._together.members, self._together.left
        is_over = False in self._ended.values() or (bool(members) and members <= left)
        if not self._joining or (members and not is_over and (self._age < 0 or members - left - self._apart)):
            return []
        joining, self._joining = self._joining, {}
        if is_over or self._age < 0:  # if nobody is left to say that a server was lost those who come do
            body: m.Body = m.Refused(m.OVER) if is_over else m.Anew(self._age)
            return [Post(one, parcel, body) for one, parcel in joining.items()]
        number, order = self._order
        if not members:
            self._op += SKIPPED
        for worker in joining:
            self._together.join(worker)
            self.coordinator.join(worker, self._met)
            self._last.pop(worker, None)
            self._seen.add(worker)
            self._ended.pop(worker, None)
            if number:
                self._apart.add(worker)
        here = sorted(self._together.members)
        self._together.tell_anew()
        joined = m.Joined(self._age, number, self._op, self._met, here, self.coordinator.called[: self._met])
        return [Post(worker, parcel, joined, [order]) for worker, parcel in joining.items()]

    # --- who has come to an end ---------------------------------------------------------------------------------

    def _note_end(self, worker: int, quits: bool) -> None:
        """Keep who has come to an end: it says nothing again to a process that is started after this one."""
        self._ended.setdefault(worker, quits)
        if self._ends is None:
            return
        op, body, found = self._together.last
        gave = body.members if isinstance(body, m.Among) else None
        number = max(self._ends.cuts(), default=0) + 1
        self._ends.put(number, {"ended": sorted(self._ended.items()), "op": op, "gave": gave}, found)

    def _go_without(self, worker: int) -> list[Post]:
        """A worker has come to an end."""
        return self.gone(worker) if self._ended[worker] else self.leave(worker)

    def _take_up_ends(self) -> None:
        """What was kept of them by another process."""
        kept = self._ends.get(max(self._ends.cuts(), default=0)) if self._ends is not None else None
        if kept is None:
            return
        facts, found = kept
        self._ended = dict(facts["ended"])
        for worker in self._ended:
            self._seen.add(worker)
            self._go_without(worker)
        body = m.Answered() if facts["gave"] is None else m.Among(facts["gave"])
        self._together.take_up(facts["op"], body, found)

    # --- going back ---------------------------------------------------------------------------------------------

    def _cut(self, cut: int) -> None:
        """Keep what there is, once."""
        if self._shelf is None or cut <= self._cut_at:
            return
        number, sizes, meet, dealt = self._begin_said
        self._is_over = self.coordinator.is_over
        facts = {"begin": [number, meet, dealt], "order": self._order[0], "age": self._age, "over": self._is_over}
        facts |= self.coordinator.state()
        self._shelf.put(cut, facts, [torch.tensor(sizes, dtype=torch.int64), self._order[1]])
        self._cut_at = cut

    def _back(self, worker: int, body: m.Back) -> list[Post]:
        """A server was lost: the first to say so says to which cut all go back. All that wait for a batch are told."""
        self._met = max(self._met, body.met)
        self._seen.add(worker)
        self.coordinator.heard(worker, body.calls)
        if self._shelf is None or body.age < self._age:
            return []
        usable = [cut for cut in body.cuts if cut in self._shelf.cuts()]
        if not body.cuts and body.least == 0 and len(self._shelf.cuts()) < 2:  # no shard has got its parameters yet
            self._age, self._begun, self._is_torn = 0, m.Begun(0, -1, body.births), False
            return []
        if not usable:
            raise ParcelError("a server was lost, and there is no cut that all of them have")
        kept = self._shelf.get(usable[-1])
        assert kept is not None
        facts, (sizes, order) = kept
        number, meet, dealt = facts["begin"]
        if number > self.coordinator.number:
            self.coordinator.begin(number, sizes.tolist(), meet, dealt)
            self._begin_said = number, sizes.tolist(), meet, dealt
        self._keep(facts["order"], order)
        self._shelf.forget(usable[-1])
        self.coordinator.go_back(facts)
        self._is_over = facts["over"]
        self._age, self._cut_at = max(body.age, body.least, facts["age"]) + 1, usable[-1]
        self._shelf.put(usable[-1], {**facts, "age": self._age}, [sizes, order])
        self._begun, self._is_torn = m.Begun(self._age, usable[-1], body.births), False
        waiting, self._closing = self._closing, {}
        self._last.clear()
        return [Post(one, parcel, m.Anew(self._age)) for one, parcel in waiting.items()]


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


def _answers(asks: Mapping[int, Ask]) -> list[Tensor]:
    found = answer(list(asks.values()))
    return [found] if isinstance(found, Tensor) else list(found)


def _gathered(said: Mapping[int, tuple[int | None, Tensor]]) -> list[Tensor]:
    """Everyone's bytes, or the teller's; `NOBODY` when that is gone."""
    tellers = {teller for teller, _ in said.values()}
    if len(tellers) > 1 and (None in tellers or tellers <= said.keys()):  # some may not have heard who is gone
        raise ValueError("the workers do different things: some gather, some tell")
    teller = tellers.pop() if len(tellers) == 1 else -1
    if teller is None:
        return [one for _, one in said.values()]
    if teller in said:
        return [said[teller][1]]
    return next(([one] for _, one in said.values() if one.numel()), NOBODY)  # some may have heard it
