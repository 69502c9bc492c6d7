"""The simulated parameter server: the live desks, at the ends of simulated links."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from stretto.errors import BrokenWireError, WireError
from stretto.server import messages as m
from stretto.server.coordinator_desk import CoordinatorDesk
from stretto.server.cuts import Memory
from stretto.server.desk import Desk, Post
from stretto.server.parcels import CHUNK_BYTES, ParcelError, Pieces, kind
from stretto.server.shard_desk import ShardDesk
from stretto.sim.costs import handshake_bytes, parcel_bytes
from stretto.sim.world import Worker, World
from stretto.wire.seam import Message, made
from stretto.wire.server import ServerWire, Sink

COORDINATOR = -1
"""The coordinator sits with the first shard, whose end this is."""


class _Said:
    """The tensors of a reply, looked at once though many workers are sent the same."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.kinds = [(kind(one), one.numel()) for one in tensors]
        self.pieces: list[Pieces] = [[one] for one in tensors]
        self._messages: list[bytes] | None = None
        self._nbytes: dict[int, int] = {}

    def nbytes(self, post: Post, encrypted: bool) -> int:
        """The bytes of the parcel, which differ by the length of its number alone."""
        length = post.number.bit_length()
        if length not in self._nbytes:
            self._nbytes[length] = parcel_bytes(post.number, post.body, self.kinds, encrypted)
        return self._nbytes[length]

    def messages(self) -> list[bytes]:
        """What the tensors say, as bytes."""
        if self._messages is None:
            self._messages = [bytes(one.numpy()) for one in self.tensors]
        return self._messages


class Office:
    """A desk, and whoever works at it: one parcel after the other."""

    def __init__(self, world: World, desk: Desk, end: int, share: int, called: str) -> None:
        self._world, self._desk, self.share = world, desk, share
        self.end, self.called = end, called
        self._free_at = 0.0
        self._said = _Said(())
        self._lives = [0] * len(world.workers)
        """The life of each worker that is heard; what an older one still says is not."""
        self._is_in = [True] * len(world.workers)

    def work_of(self, worker: int, life: int) -> m.Left:
        """What the desk has of the work of a life that is over."""
        return self._desk.work_of(worker) if life + 1 >= self._lives[worker] else m.Left(0, [])

    def bury(self, link: SimLink, life: int, number: int = 0, batches: Sequence[int] = ()) -> None:
        """The lives of a worker before this one are over."""
        worker = link.worker.number
        if life <= self._lives[worker]:
            return
        self._lives[worker] = life
        if self._is_in[worker]:
            self._is_in[worker] = False
            self._send(link, self._desk.gone(worker, number, batches))

    def said(self, tensors: Sequence[Tensor]) -> _Said:
        """The tensors of a reply; those of the last one are known."""
        if self._said.tensors is not tensors:
            self._said = _Said(tensors)
        return self._said

    def come(self, link: SimLink, head: m.Head, tensors: list[Pieces]) -> None:
        """A parcel has come; it is worked on when those before it are done."""
        work_s = self._world.tariff.take_s if isinstance(head.body, m.Push) else 0.0
        queue = self._world.queue
        if self._world.processors is not None and work_s:
            self._world.busy(self.share, work_s, lambda: self._take(link, head, tensors))
            return
        self._free_at = max(self._free_at, queue.now) + work_s
        queue.at(self._free_at, lambda: self._take(link, head, tensors), key=link.worker.number)

    def _take(self, link: SimLink, head: m.Head, tensors: list[Pieces]) -> None:
        worker = link.worker.number
        if link.life < self._lives[worker]:
            return
        self.bury(link, link.life)
        self._is_in[worker] = True
        stopclock = self._world.stopclock
        began = stopclock() if stopclock is not None else 0.0
        posts = self._posts(worker, head, tensors)
        if stopclock is not None and isinstance(head.body, m.Push):
            self._world.updates.append(stopclock() - began)
        self._send(link, posts)

    def _send(self, link: SimLink, posts: Sequence[Post]) -> None:
        for post in posts:
            link.beside[post.worker].reply(self, post)

    def _posts(self, worker: int, head: m.Head, tensors: list[Pieces]) -> list[Post]:
        if isinstance(head.body, m.Leave):
            return self._desk.leave(worker)
        try:
            self._desk.expects(worker, head)
            return self._desk.take(worker, head, tensors)
        except Exception as error:
            why = str(error) if isinstance(error, ParcelError) else f"{type(error).__name__}: {error}"
            return [Post(worker, head.number, m.Refused(why))]


class SimLink:
    """A connection of a worker's `life` to an office. `beside` are those of all workers to the same.

    Its parcels are numbered behind those of the life `before`, whose replies are nobody's.
    """

    def __init__(
        self,
        world: World,
        worker: Worker,
        office: Office,
        beside: list[SimLink],
        encrypted: bool,
        limit_s: float,
        before: SimLink | None = None,
        life: int = 0,
    ) -> None:
        self._world, self.worker, self._office, self.life = world, worker, office, life
        self.beside = beside
        self._encrypted, self._limit_s = encrypted, limit_s
        self._numbers: int = before._numbers if before is not None else 0
        self._first = self._numbers
        """Replies to parcels up to the first number are not waited for."""
        self._replies: dict[int, tuple[Post, _Said]] = {}
        self._unread: dict[int, Callable[[], None]] = {}
        """What is to be called when a reply has been read, or never will be."""
        self._is_aborted = False
        self.last = _Said(())
        """What the last reply that was waited for said."""
        self._sent, self._received = handshake_bytes(worker.number, encrypted)
        self._open = True

    def send(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> int:
        """Send a parcel when this worker's time has come. What it holds is kept as it is now."""
        self._numbers += 1
        kinds = [(kind(one), one.numel()) for one in tensors]
        head = m.Head(self._numbers, body, kinds)
        nbytes = parcel_bytes(head.number, body, kinds, self._encrypted)
        self._sent += nbytes
        pieces: list[Pieces] = [[one.detach().clone()] if one.numel() else [] for one in tensors]
        if isinstance(body, m.Push | m.Ask):
            self._worked()
        self.worker.act(lambda: self._leave(nbytes, head, pieces))
        return head.number

    def wait(self, number: int, sink: Sink | None = None) -> tuple[m.Body, list[Pieces]]:
        """The reply to a parcel. Within a backward pass, where nobody can wait, nothing comes back of what is told."""
        if self.worker.in_backward:
            self.worker.after_backward(lambda: self._forget(number))
            return m.Answered(), [[torch.empty(0, dtype=torch.uint8)]]
        if number not in self._replies:
            self.worker.until(
                lambda: number in self._replies or self._is_aborted, lambda: self._office.called, self._limit_s
            )
        if number not in self._replies:
            raise BrokenWireError(f"the exchange at {self._office.called} was broken off")
        post, self.last = self._replies.pop(number)
        if isinstance(post.body, m.Refused):
            raise WireError(f"{self._office.called} refused: {post.body.text}")
        if isinstance(post.body, m.Go | m.Answered | m.Among) and post.tensors:
            self._worked()
        for index, one in enumerate(post.tensors if sink is not None else ()):
            sink(index, 0, one)  # type: ignore[misc]
        if (read := self._unread.pop(number, None)) is not None:
            read()
        return post.body, [] if sink is not None else self.last.pieces

    def is_there(self, number: int) -> bool:
        """Whether the reply has come by this worker's time."""
        self.worker.catch_up()
        return number in self._replies

    def reply(self, office: Office, post: Post) -> None:
        """The office sends something back."""
        if self.worker.is_dead or post.number <= self._first:
            if post.sent is not None:
                post.sent()
            return
        if post.sent is not None:
            self._unread[post.number] = post.sent
        said = office.said(post.tensors)
        same = isinstance(post.body, m.Answered)
        encrypted = self._encrypted
        nbytes = said.nbytes(post, encrypted) if same else parcel_bytes(post.number, post.body, said.kinds, encrypted)
        self._received += nbytes
        self._carry(office.end, self.worker.number, nbytes, lambda: self._come(post, said))

    def traffic(self) -> tuple[int, int]:
        """The bytes so far, as the live connection would count them."""
        return self._sent, self._received

    def awaits(self, number: int) -> bool:
        """Nothing is lost between here and there."""
        return False

    def mutter(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> None:
        """Nothing is said again."""

    def abort(self) -> None:
        """Break off what is waited for."""
        self._is_aborted = True
        self.worker.wake()

    def forget(self) -> None:
        """Nothing that was asked is waited for any more, and what comes now is."""
        self._is_aborted, self._first = False, self._numbers
        self._replies.clear()
        for read in self._unread.values():
            read()
        self._unread.clear()

    def close(self) -> None:
        """Say good-bye."""
        if self._open:
            self._open, sent = False, self._sent
            self.send(m.Leave())
            self._sent = sent  # the live connection is counted before its last word

    def _worked(self) -> None:
        self.worker.asks += 1
        self.worker.work(self._world.tariff.ask_s)

    def _forget(self, number: int) -> None:
        with suppress(BrokenWireError):  # the next exchange says so to one who can wait
            self.wait(number)

    def _leave(self, nbytes: int, head: m.Head, pieces: list[Pieces]) -> None:
        office = self._office
        self._carry(self.worker.number, office.end, nbytes, lambda: office.come(self, head, pieces))

    def _carry(self, source: int, target: int, nbytes: int, then: Callable[[], None]) -> None:
        """One end works on it, the links carry it, the other end works on it; each end takes one after another.

        It goes in chunks: from the first one on all three are at work at once, until the last one has come.
        """
        world, office = self._world, self._office
        rest = max(nbytes - CHUNK_BYTES, 0)
        chunk_s = world.tariff.post_s(nbytes - rest)
        rest_s = world.tariff.post_s(nbytes) - chunk_s
        left = 2

        def share(end: int) -> int:
            return 1 + end if end >= 0 else office.share

        def part() -> None:
            nonlocal left
            left -= 1
            if not left:
                world.handle(target, share(target), chunk_s, then)

        def set_off() -> None:
            if self.worker.is_dead:
                return
            world.handle(target, share(target), rest_s, lambda: None)
            world.net.send(source, target, nbytes, part)

        world.handle(source, share(source), chunk_s, set_off)
        world.handle(source, share(source), rest_s, part)

    def _come(self, post: Post, said: _Said) -> None:
        if post.number > self._first:
            self._replies[post.number] = post, said
            self.worker.wake()


class Offices:
    """All offices of one parameter server, and the workers' links to them.

    Where workers may die it `endures` as live: there are cuts to go back to.
    """

    def __init__(
        self, world: World, shards: int, on_nan: str, encrypted: bool, limit_s: float, endures: bool = False
    ) -> None:
        def clock() -> float:
            return world.queue.now

        workers = len(world.workers)
        desks: list[Any] = [CoordinatorDesk(workers, clock, Memory() if endures else None)]
        desks += [ShardDesk(workers, clock, on_nan, Memory() if endures else None) for _ in range(shards)]
        names = ["the coordinator", *(f"server {shard}" for shard in range(shards))]
        ends = [COORDINATOR, *(-1 - shard for shard in range(shards))]
        self._world, self._encrypted, self._limit_s, self._endures = world, encrypted, limit_s, endures
        self._offices: list[Office] = []
        self._links: list[list[SimLink]] = []
        for number, (desk, end, name) in enumerate(zip(desks, ends, names, strict=True)):
            office = Office(world, desk, end, world.shares + number, name)
            beside: list[SimLink] = []
            beside += [SimLink(world, one, office, beside, encrypted, limit_s) for one in world.workers]
            self._offices.append(office)
            self._links.append(beside)

    def wire(self, worker: Worker, life: int = 0) -> ServerWire:
        """One worker's end: the live one. The services know it by this `life`."""
        for office, beside in zip(self._offices, self._links, strict=True):
            before = beside[worker.number]
            if before.worker is not worker or before.life != life:
                beside[worker.number] = SimLink(
                    self._world, worker, office, beside, self._encrypted, self._limit_s, before, life
                )
        links = [beside[worker.number] for beside in self._links]
        return _SimWire(worker.number, len(self._links[0]), links[0], links[1:], self._endures)

    def lose(self, worker: int) -> None:
        """A worker was killed: nobody reads what was sent to it."""
        for beside in self._links:
            beside[worker].forget()

    def gone(self, worker: int, life: int) -> None:
        """The services are told that a life is over: first the shards, who know what its work came to."""
        links = [beside[worker] for beside in self._links]
        coordinator, *shards = zip(self._offices, links, strict=True)
        found = [office.work_of(worker, life) for office, _ in shards]
        for office, link in shards:
            office.bury(link, life + 1)
        told = m.told_of(worker, life, found, len(shards))
        coordinator[0].bury(coordinator[1], life + 1, told.number, told.batches)


class _SimWire(ServerWire):
    """The live wire, which need not read what others have read already."""

    def tell(self, message: Message, teller: int = 0) -> bytes:
        """The teller's message, at every worker. Within a backward pass, where nobody can wait, all know it."""
        link = self._coordinator
        assert isinstance(link, SimLink)
        if not link.worker.in_backward:
            return super().tell(message, teller)
        said = made(message)
        if not self._aborted:
            super().tell(said, teller)
        return said

    def _told(self, tensors: Sequence[Pieces]) -> list[bytes]:
        link = self._coordinator
        assert isinstance(link, SimLink)
        return link.last.messages() if link.last.pieces is tensors else super()._told(tensors)
