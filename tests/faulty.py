"""A parameter server whose desks, links and workers can die at any point: real machines, a model of all around them.

Workers are greenlets; one random number after another says which message arrives next, and what dies.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import greenlet
from torch import Tensor

from stretto.errors import TransportError
from stretto.parameter_server import messages as m
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import RollbackRequiredError, Sink
from stretto.parameter_server.dispatcher_handler import DispatcherHandler
from stretto.parameter_server.framing import Chunks, FramingError, dtype_name
from stretto.parameter_server.handler import OutgoingMessage, RequestHandler
from stretto.parameter_server.incarnations import Incarnations
from stretto.parameter_server.shard_handler import ShardHandler
from stretto.parameter_server.snapshots import InMemoryStore

Parcel = tuple[m.Header, list[Chunks]]


class Service:
    """One desk, and the lives that it listens to, as the real service does."""

    def __init__(self, crew: Crew, make: Callable[[], RequestHandler], workers: int) -> None:
        self._crew, self._make, self._workers = crew, make, workers
        self.links: dict[tuple[int, int], FaultyLink] = {}
        self.start()

    def start(self) -> None:
        """A process begins; what another knew is lost."""
        self.desk = self._make()
        self._lives = Incarnations(self._workers)

    def hear(self, worker: int, life: int, head: m.Header, tensors: list[Chunks]) -> None:
        if self._lives.is_over(worker, life):
            return
        if (gone := self._lives.implied_end(worker, life)) is not None:
            self._bury(gone)
        self._lives.note(worker, life)
        if isinstance(head.body, m.Leave):
            self._post(self.desk.leave(worker))
            return
        try:
            self.desk.expects(worker, head)
            self._post(self.desk.take(worker, head, tensors))
        except (FramingError, TransportError) as error:
            self._post([OutgoingMessage(worker, head.request_id, m.Refused(str(error)))])

    def remove(self, gone: m.IncarnationEnded) -> m.CountedWork:
        left = (
            self.desk.work_of(gone.worker)
            if self._lives.is_last(gone.worker, gone.incarnation)
            else m.CountedWork(0, [])
        )
        if not self._lives.is_over(gone.worker, gone.incarnation):
            self._bury(gone)
        return left

    def _bury(self, gone: m.IncarnationEnded) -> None:
        if self._lives.end(gone.worker, gone.incarnation):
            self._post(self.desk.remove(gone.worker, gone.epoch_number, gone.batches, gone.is_partial))

    def _post(self, posts: Sequence[OutgoingMessage]) -> None:
        for post in posts:
            pieces = [one.clone() for one in post.tensors]
            if post.sent is not None:
                post.sent()
            link = self.links.get((post.worker, self._lives.current(post.worker)))
            if link is not None and link.is_up:
                link.coming.append((post.request_id, post.body, pieces))


class FaultyLink:
    """A worker's link to a service: messages arrive in order, when the crew says so; a break loses some."""

    def __init__(self, crew: Crew, service: Service, worker: int, life: int) -> None:
        self._crew, self.service, self.worker, self.life = crew, service, worker, life
        self._numbers = 0
        self.asked: dict[int, tuple[m.Request, Sequence[Tensor]]] = {}
        self.replies: dict[int, tuple[m.Body, list[Tensor]]] = {}
        self.going: deque[Parcel] = deque()
        self.coming: deque[tuple[int, m.Body, list[Tensor]]] = deque()
        self.again: Callable[[], None] = lambda: None
        self.is_up = True
        service.links[worker, life] = self

    def send(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> int:
        self._numbers += 1
        if not isinstance(body, m.WITHOUT_REPLY):
            self.asked[self._numbers] = body, tensors
        self._send(self._numbers, body, tensors)
        return self._numbers

    def _send(self, number: int, body: m.Request, tensors: Sequence[Tensor]) -> None:
        head = m.Header(number, body, [(dtype_name(one), one.numel()) for one in tensors])
        self.going.append((head, [[one.detach().clone()] if one.numel() else [] for one in tensors]))

    def wait(self, number: int, sink: Sink | None = None) -> tuple[m.Body, list[Chunks]]:
        while number not in self.replies:
            self._crew.hub.switch()
        body, tensors = self.replies.pop(number)
        if isinstance(body, m.Refused):
            raise TransportError(f"refused: {body.text}")
        if isinstance(body, m.StaleRequest):
            raise RollbackRequiredError("anew")
        if sink is not None:
            for index, one in enumerate(tensors):
                sink(index, 0, one)
        return body, [[one] for one in tensors]

    def poll(self, number: int) -> bool:
        return number in self.replies

    def is_pending(self, number: int) -> bool:
        return number in self.asked

    def discard(self, number: int) -> None:
        self.asked.pop(number, None)
        self.replies.pop(number, None)

    def send_oneway(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> None:
        self._send(0, body, tensors)

    def abort(self) -> None:
        pass

    def reset(self) -> None:
        self.asked.clear()

    def traffic(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        self.wait(self.send(m.Finish()))
        self.send(m.Leave())

    def arrive(self) -> None:
        """The next message reaches the service."""
        head, tensors = self.going.popleft()
        self.service.hear(self.worker, self.life, head, tensors)

    def come(self) -> None:
        """The next reply reaches the worker."""
        number, body, tensors = self.coming.popleft()
        if self.asked.pop(number, None) is not None:
            self.replies[number] = body, tensors

    def snap(self) -> None:
        """What is under way is lost; what had no reply is asked again."""
        self.going.clear()
        self.coming.clear()
        self.again()
        for number, (body, tensors) in list(self.asked.items()):
            self._send(number, body, tensors)


class Worker:
    """One life of a worker."""

    def __init__(self, crew: Crew, number: int, life: int, run: Callable[[Worker], None]) -> None:
        self.crew, self.number, self.life = crew, number, life
        self.links = [FaultyLink(crew, one, number, life) for one in crew.services]
        self._run = run
        self._greenlet = greenlet.greenlet(self._work, crew.hub)
        self.wire: Any = None
        self.is_to_quit = False

    def _work(self) -> None:
        self.wire = ParameterServerClient(self.number, self.crew.workers, self.links[0], self.links[1:], elastic=True)
        for one in self.links:
            one.again = lambda one=one: self.wire.replay(one)  # type: ignore[misc]
        if self._comes_in_time():
            self._run(self)

    def _comes_in_time(self) -> bool:
        """Whether the run is not over yet."""
        try:
            if self.life:
                self.wire.join()
        except TransportError as error:
            if "the run is over" not in str(error):
                raise
            return False
        return True

    @property
    def is_done(self) -> bool:
        return self._greenlet.dead

    def go_on(self) -> None:
        if not self._greenlet.dead:
            self._greenlet.switch()

    def die(self, lost: int) -> None:
        """Some of the last words are lost, the others may still arrive."""
        self._greenlet.throw(greenlet.GreenletExit)
        for link in self.links:
            link.is_up = False
            link.coming.clear()
            for _ in range(min(lost, len(link.going))):
                link.going.pop()


class Crew:
    """All services and workers of one run."""

    def __init__(self, workers: int, shards: int, seed: int, run: Callable[[Worker], None], cut_every: int) -> None:
        self.random, self.workers, self.now = random.Random(seed), workers, 0.0
        self.hub = greenlet.getcurrent()
        self._births = 0
        shelves, ends = [InMemoryStore() for _ in range(shards + 1)], InMemoryStore()

        def coordinator() -> RequestHandler:
            return DispatcherHandler(workers, lambda: self.now, shelves[0], cut_every, ends)

        def shard(number: int) -> Callable[[], RequestHandler]:
            def make() -> RequestHandler:
                self._births += 1
                return ShardHandler(workers, lambda: self.now, "stop", shelves[number], self._births)

            return make

        self.services = [Service(self, coordinator, workers)]
        self.services += [Service(self, shard(number), workers) for number in range(1, shards + 1)]
        self._run = run
        self.crew = [Worker(self, number, 0, run) for number in range(workers)]
        self._old: list[FaultyLink] = []
        self._dead: dict[int, int] = {}
        self._news: list[tuple[int, int]] = []
        self._returning: list[int] = []
        self.happened: list[str] = []

    # --- what happens -------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One message arrives somewhere; False when none is under way."""
        self.now += 1.0
        links = [link for one in self.crew for link in one.links]
        acts: list[Callable[[], None]] = [link.arrive for link in [*links, *self._old] if link.going]
        acts += [link.come for link in links if link.coming]
        if not acts:
            return False
        self.random.choice(acts)()
        for one in self.crew:
            one.go_on()
        return True

    def kill(self, number: int) -> None:
        """A worker's process dies; who tells of it does so later."""
        one = self.crew[number]
        if one.is_done or any(number == dead for dead, _ in self._news) or number in self._returning:
            return
        one.die(self.random.randrange(4))
        self._old += one.links
        self._news.append((number, one.life))
        self.happened.append(f"{self.now:g}: worker {number}.{one.life} dies")

    def tell(self) -> None:
        """A death is told, and the worker comes back later."""
        if self._news:
            number, life = self._news.pop(0)
            self._dead[number] = life
            self._herald(number, life)
            self._returning.append(number)

    def come_back(self) -> None:
        """A dead worker is started again."""
        if self._returning:
            number = self._returning.pop(0)
            self._dead.pop(number, None)
            self.happened.append(f"{self.now:g}: worker {number}.{self.crew[number].life + 1} begins")
            self.crew[number] = Worker(self, number, self.crew[number].life + 1, self._run)
            self.crew[number].go_on()

    def ask_to_quit(self, number: int) -> None:
        """A worker is to leave in good order; the first stays."""
        self.crew[number].is_to_quit = number > 0
        self.happened.append(f"{self.now:g}: worker {number} is to quit")

    def kill_server(self, shard: int) -> None:
        """The process of a shard dies, with the coordinator if it is the first, and is started again at once."""
        self.happened.append(f"{self.now:g}: server {shard} dies")
        for service in [self.services[shard + 1], *([self.services[0]] if shard == 0 else [])]:
            service.start()
            for link in service.links.values():
                link.going.clear()
        for number, life in self._dead.items():
            self._herald(number, life)
        for one in self.crew:
            for link in one.links if not one.is_done else []:
                if link.service.desk is self.services[shard + 1].desk or (shard == 0 and link is one.links[0]):
                    link.snap()

    def snap(self) -> None:
        """A connection breaks."""
        link = self.random.choice([link for one in self.crew if not one.is_done for link in one.links] or [None])
        if link is not None:
            link.snap()

    def _herald(self, number: int, life: int) -> None:
        found = [service.remove(m.IncarnationEnded(number, life)) for service in self.services[1:]]
        self.services[0].remove(m.incarnation_ended(number, life, found, len(found)))

    def start(self) -> None:
        for one in self.crew:
            one.go_on()

    def settle_all(self) -> None:
        """Whatever is still to be told is told."""
        while self._news:
            self.tell()
        while self._returning:
            self.come_back()

    @property
    def is_done(self) -> bool:
        return all(one.is_done for one in self.crew)
