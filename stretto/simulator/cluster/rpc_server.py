"""The simulated parameter server: the live desks, at the ends of simulated links."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from stretto.errors import BrokenTransportError
from stretto.launcher.process_specs import SNAPSHOT_INTERVAL_S
from stretto.parameter_server import messages as m
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.dispatcher_handler import DispatcherHandler
from stretto.parameter_server.framing import Chunks, FramingError
from stretto.parameter_server.handler import OutgoingMessage, RequestHandler
from stretto.parameter_server.incarnations import Incarnations
from stretto.parameter_server.shard_handler import ShardHandler
from stretto.parameter_server.snapshots import InMemoryStore
from stretto.simulator.cluster.rpc_channel import Said, SimLink
from stretto.simulator.engine import Engine, Worker
from stretto.transport.interface import Message, made

COORDINATOR = -1
"""The coordinator sits with the first shard, whose end this is."""


class SimServer:
    """A desk, and whoever works at it: one parcel after the other. One that is lost begins again at a new desk."""

    def __init__(self, world: Engine, make: Callable[[int], RequestHandler], end: int, share: int, called: str) -> None:
        self._world, self._make, self.share = world, make, share
        self.end, self.called = end, called
        self.is_away = False
        self._life = self._stops = 0
        """Which process it is, and how often that was stopped without going on."""
        self._waiting: list[Callable[[], None]] = []
        """What waits until the process goes on, if it is stopped."""
        self._begin()

    def _begin(self) -> None:
        self._desk = self._make(self._life)
        self._free_at = 0.0
        self._said = Said(())
        self._lives = Incarnations(len(self._world.workers))
        """What a life that is over still says is not heard."""

    # --- its process ----------------------------------------------------------------------------------------------

    def lose(self) -> None:
        """The process is gone, with what it knew, and with what is on its way to it and from it."""
        self.is_away, self._stops = True, 0
        self._waiting.clear()
        self._life += 1

    def begin_again(self) -> None:
        """Another process is there, and knows what the last one has kept."""
        self.is_away = False
        self._begin()

    def stop(self) -> None:
        """The process stands still: what comes waits."""
        self._stops += not self.is_away

    def go_on(self) -> None:
        """It does what has waited, unless it was stopped once more."""
        self._stops -= self._stops > 0
        if not self._stops:
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                one()

    def unless_lost(self, then: Callable[[], None]) -> Callable[[], None]:
        """What happens if the process is still the one of now."""
        life = self._life
        return lambda: then() if self._life == life else None

    # --- what comes -----------------------------------------------------------------------------------------------

    def work_of(self, worker: int, life: int) -> m.Left:
        """What the desk has of the work of a life that is over."""
        return self._desk.work_of(worker) if self._lives.is_last(worker, life) else m.Left(0, [])

    def bury(self, link: SimLink, gone: m.Gone) -> None:
        """A life of a worker is over, with all before it."""
        if self.is_away or self._lives.is_over(gone.worker, gone.life):
            return
        if self._lives.end(gone.worker, gone.life):
            self._send(link, self._desk.gone(gone.worker, gone.number, gone.batches, gone.torn))

    def said(self, tensors: Sequence[Tensor]) -> Said:
        """The tensors of a reply; those of the last one are known."""
        if self._said.tensors is not tensors:
            self._said = Said(tensors)
        return self._said

    def come(self, link: SimLink, head: m.Header, tensors: list[Chunks]) -> None:
        """A parcel has come; it is worked on when those before it are done."""
        work_s = self._world.tariff.take_s if isinstance(head.body, m.Push) else 0.0
        queue, take = self._world.queue, self.unless_lost(lambda: self._take(link, head, tensors))
        if self._world.processors is not None and work_s:
            self._world.busy(self.share, work_s, take)
            return
        self._free_at = max(self._free_at, queue.now) + work_s
        queue.at(self._free_at, take, key=link.worker.number)

    def _take(self, link: SimLink, head: m.Header, tensors: list[Chunks]) -> None:
        if self._stops:
            self._waiting.append(self.unless_lost(lambda: self._take(link, head, tensors)))
            return
        worker, life = link.worker.number, link.life
        if self._lives.is_over(worker, life):
            return
        if (gone := self._lives.untold(worker, life)) is not None:
            self.bury(link, gone)
        self._lives.hear(worker, life)
        stopclock = self._world.stopclock
        began = stopclock() if stopclock is not None else 0.0
        posts = self._posts(worker, head, tensors)
        if stopclock is not None and isinstance(head.body, m.Push):
            self._world.updates.append(stopclock() - began)
        self._send(link, posts)

    def _send(self, link: SimLink, posts: Sequence[OutgoingMessage]) -> None:
        for post in posts:
            link.beside[post.worker].reply(self, post)

    def _posts(self, worker: int, head: m.Header, tensors: list[Chunks]) -> list[OutgoingMessage]:
        if isinstance(head.body, m.Leave):
            return self._desk.leave(worker)
        try:
            self._desk.expects(worker, head)
            return self._desk.take(worker, head, tensors)
        except Exception as error:
            why = str(error) if isinstance(error, FramingError) else f"{type(error).__name__}: {error}"
            return [OutgoingMessage(worker, head.number, m.Refused(why))]


class SimServers:
    """All offices of one parameter server, and the workers' links to them.

    Where processes may die it `elastic` as live: there are cuts to go back to, and what was lost is asked again.
    """

    def __init__(
        self, world: Engine, shards: int, on_nan: str, encrypted: bool, limit_s: float, elastic: bool = False
    ) -> None:
        self._world, self._encrypted, self._limit_s, self._endures = world, encrypted, limit_s, elastic
        self._offices: list[SimServer] = []
        self._links: list[list[SimLink]] = []
        self._lives = [0] * shards
        self._dead: dict[int, int] = {}
        """The last life of each worker that is dead."""
        self._add("the coordinator", COORDINATOR, self._coordinator())
        for shard in range(shards):
            self._add(f"server {shard}", -1 - shard, self._shard(on_nan))

    def _add(self, called: str, end: int, make: Callable[[int], RequestHandler]) -> None:
        office = SimServer(self._world, make, end, self._world.share_of_service(len(self._offices)), called)
        beside: list[SimLink] = []
        beside += [self._link(one, office, beside) for one in self._world.workers]
        self._offices.append(office)
        self._links.append(beside)

    def _link(self, worker: Worker, office: SimServer, beside: list[SimLink], *before: Any) -> SimLink:
        return SimLink(self._world, worker, office, beside, self._encrypted, self._limit_s, self._endures, *before)

    def _coordinator(self) -> Callable[[int], RequestHandler]:
        """Desks that share what they keep."""
        workers = len(self._world.workers)
        kept, ends = (InMemoryStore(), InMemoryStore()) if self._endures else (None, None)
        return lambda _: DispatcherHandler(
            workers, self._clock, kept, SNAPSHOT_INTERVAL_S if self._endures else None, ends
        )

    def _shard(self, on_nan: str) -> Callable[[int], RequestHandler]:
        workers, kept = len(self._world.workers), InMemoryStore() if self._endures else None
        return lambda life: ShardHandler(workers, self._clock, on_nan, kept, life)

    def _clock(self) -> float:
        return self._world.queue.now

    def wire(self, worker: Worker, life: int = 0) -> ParameterServerClient:
        """One worker's end: the live one. The services know it by this `life`."""
        self._dead.pop(worker.number, None)
        for office, beside in zip(self._offices, self._links, strict=True):
            before = beside[worker.number]
            if before.worker is not worker or before.life != life:
                beside[worker.number] = self._link(worker, office, beside, before, life)
        links = [beside[worker.number] for beside in self._links]
        wire = _SimWire(worker.number, len(self._links[0]), links[0], links[1:], self._endures)
        for link in links:
            link.again = functools.partial(wire.say_again, link)
        return wire

    def lose(self, worker: int) -> None:
        """A worker was killed: nobody reads what was sent to it."""
        for beside in self._links:
            beside[worker].forget()

    def gone(self, worker: int, life: int) -> None:
        """The services are told that a life is over: first the shards, who know what its work came to."""
        self._dead[worker] = life
        links = [beside[worker] for beside in self._links]
        coordinator, *shards = zip(self._offices, links, strict=True)
        found = [office.work_of(worker, life) for office, _ in shards if not office.is_away]
        for office, link in shards:
            office.bury(link, m.Gone(worker, life))
        coordinator[0].bury(coordinator[1], m.told_of(worker, life, found, len(shards)))

    @property
    def shards(self) -> int:
        """How many servers there are."""
        return len(self._lives)

    # --- processes of servers -------------------------------------------------------------------------------------

    def is_there(self, shard: int) -> bool:
        """Whether a server has a process."""
        return not self._offices[1 + shard].is_away

    def server_lost(self, shard: int) -> int | None:
        """A server's process was killed: which life of it that was. None when it is not there."""
        if not self.is_there(shard):
            return None
        for number in self._of(shard):
            self._offices[number].lose()
        self._world.net.leave(-1 - shard)
        return self._lives[shard]

    def server_back(self, shard: int) -> int:
        """Another process is there, and is told of who is dead; which life of the server it is."""
        self._lives[shard] += 1
        for number in self._of(shard):
            self._offices[number].begin_again()
            for link in self._links[number]:
                link.ask_again()
        for worker, life in sorted(self._dead.items()):
            self.gone(worker, life)
        return self._lives[shard]

    def server_stops(self, shard: int) -> None:
        """A server's process is stopped."""
        for number in self._of(shard):
            self._offices[number].stop()

    def server_goes_on(self, shard: int) -> None:
        """It goes on."""
        for number in self._of(shard):
            self._offices[number].go_on()

    def _of(self, shard: int) -> list[int]:
        """The offices of a server's process; the first has the coordinator's desk, too."""
        return [1 + shard] if shard else [0, 1]


class _SimWire(ParameterServerClient):
    """The live wire, which need not read what others have read already."""

    @property
    def _link(self) -> SimLink:
        assert isinstance(self._coordinator, SimLink)
        return self._coordinator

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """The root's message, at every worker. Within a backward pass, where nobody can wait, all know it."""
        if not self._link.worker.in_backward:
            return super().broadcast_bytes(message, root)
        said = made(message)
        if not self._aborted:
            super().broadcast_bytes(said, root)
        return said

    def _hear(self, body: m.Gather | m.Keep | m.Barrier, number: int) -> list[Chunks]:
        """Within a backward pass nothing comes back, and it is heard behind it: till then nobody is told of it."""
        if not self._link.worker.in_backward:
            return super()._hear(body, number)
        self._link.worker.after_backward(lambda: self._hear_behind(body, number))
        return [[torch.empty(0, dtype=torch.uint8)]]

    def _hear_behind(self, body: m.Gather | m.Keep | m.Barrier, number: int) -> None:
        with suppress(BrokenTransportError):  # the next exchange says so to one who can wait
            self._hear(body, number)

    def _told(self, tensors: Sequence[Chunks]) -> list[bytes]:
        last = self._link.last
        return last.messages() if last.pieces is tensors else super()._told(tensors)
