"""A parameter server whose processes, connections and workers can fail at any point.

The request handlers and clients are the real ones; connections and processes are simulated. Workers are greenlets. A
random generator chooses the message that arrives next.
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
from stretto.parameter_server.client_types import RunOverError, Sink, raise_refusals
from stretto.parameter_server.dispatcher_handler import DispatcherHandler
from stretto.parameter_server.framing import Chunks, FramingError, dtype_name
from stretto.parameter_server.handler import OutgoingMessage, RequestHandler
from stretto.parameter_server.incarnations import Incarnations
from stretto.parameter_server.shard_handler import ShardHandler
from stretto.parameter_server.snapshots import InMemoryStore

Request = tuple[m.Header, list[Chunks]]


class Service:
    """One request handler, and the incarnations whose requests it accepts, as in the real server."""

    def __init__(self, cluster: FaultyCluster, make: Callable[[], RequestHandler], workers: int) -> None:
        self._cluster, self._make, self._workers = cluster, make, workers
        self.channels: dict[tuple[int, int], FaultyChannel] = {}
        self.start()

    def start(self) -> None:
        """Start a process; the state of the previous one is lost."""
        self.handler = self._make()
        self._incarnations = Incarnations(self._workers)

    def receive(self, worker: int, incarnation: int, header: m.Header, tensors: list[Chunks]) -> None:
        if self._incarnations.is_over(worker, incarnation):
            return
        if (gone := self._incarnations.implied_end(worker, incarnation)) is not None:
            self._end_incarnation(gone)
        self._incarnations.note(worker, incarnation)
        if isinstance(header.body, m.Leave):
            self._send_all(self.handler.leave(worker))
            return
        try:
            self.handler.expects(worker, header)
            self._send_all(self.handler.take(worker, header, tensors))
        except (FramingError, TransportError) as error:
            self._send_all([OutgoingMessage(worker, header.request_id, m.Refused(str(error)))])

    def remove(self, gone: m.IncarnationEnded) -> m.CountedWork:
        left = (
            self.handler.work_of(gone.worker)
            if self._incarnations.is_last(gone.worker, gone.incarnation)
            else m.CountedWork(0, [])
        )
        if not self._incarnations.is_over(gone.worker, gone.incarnation):
            self._end_incarnation(gone)
        return left

    def _end_incarnation(self, gone: m.IncarnationEnded) -> None:
        if self._incarnations.end(gone.worker, gone.incarnation):
            self._send_all(self.handler.remove(gone.worker, gone.epoch_number, gone.batches, gone.is_partial))

    def _send_all(self, messages: Sequence[OutgoingMessage]) -> None:
        for message in messages:
            tensors = [tensor.clone() for tensor in message.tensors]
            if message.sent is not None:
                message.sent()
            channel = self.channels.get((message.worker, self._incarnations.current(message.worker)))
            if channel is not None and channel.is_up:
                channel.incoming.append((message.request_id, message.body, tensors))


class FaultyChannel:
    """A worker's channel to a service: messages arrive in order, one at each call of `arrive` or `arrive_reply`; broken
    connections lose some."""

    def __init__(self, cluster: FaultyCluster, service: Service, worker: int, incarnation: int) -> None:
        self._cluster, self.service, self.worker, self.incarnation = cluster, service, worker, incarnation
        self._numbers = 0
        self.pending: dict[int, tuple[m.Request, Sequence[Tensor]]] = {}
        self.replies: dict[int, tuple[m.Body, list[Tensor]]] = {}
        self.outgoing: deque[Request] = deque()
        self.incoming: deque[tuple[int, m.Body, list[Tensor]]] = deque()
        self.client: Any = None
        self.is_up = True
        service.channels[worker, incarnation] = self

    def send(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> int:
        self._numbers += 1
        if not isinstance(body, m.WITHOUT_REPLY):
            self.pending[self._numbers] = body, tensors
        self._send(self._numbers, body, tensors)
        return self._numbers

    def _send(self, number: int, body: m.Request, tensors: Sequence[Tensor]) -> None:
        header = m.Header(number, body, [(dtype_name(one), one.numel()) for one in tensors])
        self.outgoing.append((header, [[one.detach().clone()] if one.numel() else [] for one in tensors]))

    def wait(self, number: int, sink: Sink | None = None) -> tuple[m.Body, list[Chunks]]:
        while number not in self.replies:
            self._cluster.hub.switch()
        body, tensors = self.replies.pop(number)
        raise_refusals("the service", body)
        if sink is not None:
            for index, one in enumerate(tensors):
                sink(index, 0, one)
        return body, [[one] for one in tensors]

    def poll(self, number: int) -> bool:
        return number in self.replies

    def is_pending(self, number: int) -> bool:
        return number in self.pending

    def discard(self, number: int) -> None:
        self.pending.pop(number, None)
        self.replies.pop(number, None)

    def send_oneway(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> None:
        self._send(0, body, tensors)

    def abort(self) -> None:
        pass

    def reset(self) -> None:
        self.pending.clear()

    def traffic(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        self.wait(self.send(m.Finish()))
        self.send(m.Leave())

    def attach(self, client: Any) -> None:
        self.client = client

    def arrive(self) -> None:
        """Deliver the next request to the service."""
        header, tensors = self.outgoing.popleft()
        self.service.receive(self.worker, self.incarnation, header, tensors)

    def arrive_reply(self) -> None:
        """Deliver the next reply to the worker."""
        number, body, tensors = self.incoming.popleft()
        if self.pending.pop(number, None) is not None:
            self.replies[number] = body, tensors

    def break_connection(self) -> None:
        """Lose all messages under way, then repeat the requests without a reply."""
        self.outgoing.clear()
        self.incoming.clear()
        if self.client is not None:
            self.client.replay(self)
        for number, (body, tensors) in list(self.pending.items()):
            self._send(number, body, tensors)


class Worker:
    """One incarnation of a worker."""

    def __init__(self, cluster: FaultyCluster, number: int, incarnation: int, run: Callable[[Worker], None]) -> None:
        self.cluster, self.number, self.incarnation = cluster, number, incarnation
        self.channels = [FaultyChannel(cluster, one, number, incarnation) for one in cluster.services]
        self._run = run
        self._greenlet = greenlet.greenlet(self._work, cluster.hub)
        self.client: Any = None
        self.is_to_quit = False

    def _work(self) -> None:
        self.client = ParameterServerClient(
            self.number, self.cluster.workers, self.channels[0], self.channels[1:], elastic=True
        )
        if self._joins_in_time():
            self._run(self)

    def _joins_in_time(self) -> bool:
        """Join the run if this is a restart; return False if the run is over."""
        try:
            if self.incarnation:
                self.client.join()
        except RunOverError:
            return False
        return True

    @property
    def is_done(self) -> bool:
        return self._greenlet.dead

    def resume(self) -> None:
        if not self._greenlet.dead:
            self._greenlet.switch()

    def fail(self, lost: int) -> None:
        """End the process; its last `lost` messages are lost, the earlier ones may still arrive."""
        self._greenlet.throw(greenlet.GreenletExit)
        for channel in self.channels:
            channel.is_up = False
            channel.incoming.clear()
            for _ in range(min(lost, len(channel.outgoing))):
                channel.outgoing.pop()


class FaultyCluster:
    """All services and workers of one run, whose faults a test causes."""

    def __init__(
        self, workers: int, shards: int, seed: int, run: Callable[[Worker], None], snapshot_interval_s: int
    ) -> None:
        self.random, self.workers, self.now = random.Random(seed), workers, 0.0
        self.hub = greenlet.getcurrent()
        self._starts = 0
        stores, ends = [InMemoryStore() for _ in range(shards + 1)], InMemoryStore()

        def dispatcher() -> RequestHandler:
            return DispatcherHandler(workers, lambda: self.now, stores[0], snapshot_interval_s, ends)

        def shard(number: int) -> Callable[[], RequestHandler]:
            def make() -> RequestHandler:
                self._starts += 1
                return ShardHandler(workers, lambda: self.now, "stop", stores[number], self._starts)

            return make

        self.services = [Service(self, dispatcher, workers)]
        self.services += [Service(self, shard(number), workers) for number in range(1, shards + 1)]
        self._run = run
        self.workers_now = [Worker(self, number, 0, run) for number in range(workers)]
        self._channels_of_failed: list[FaultyChannel] = []
        self._failed: dict[int, int] = {}
        self._unreported: list[tuple[int, int]] = []
        self._to_restart: list[int] = []
        self.history: list[str] = []

    # --- events -------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Deliver one message, chosen at random; return False if none is under way."""
        self.now += 1.0
        channels = [channel for one in self.workers_now for channel in one.channels]
        deliveries: list[Callable[[], None]] = [
            channel.arrive for channel in [*channels, *self._channels_of_failed] if channel.outgoing
        ]
        deliveries += [channel.arrive_reply for channel in channels if channel.incoming]
        if not deliveries:
            return False
        self.random.choice(deliveries)()
        for one in self.workers_now:
            one.resume()
        return True

    def kill_worker(self, number: int) -> None:
        """End a worker's process; the services are notified later."""
        one = self.workers_now[number]
        if one.is_done or any(number == failed for failed, _ in self._unreported) or number in self._to_restart:
            return
        one.fail(self.random.randrange(4))
        self._channels_of_failed += one.channels
        self._unreported.append((number, one.incarnation))
        self.history.append(f"{self.now:g}: worker {number}.{one.incarnation} fails")

    def report_failure(self) -> None:
        """Notify all services of one failed worker, which is restarted later."""
        if self._unreported:
            number, incarnation = self._unreported.pop(0)
            self._failed[number] = incarnation
            self._notify_services(number, incarnation)
            self._to_restart.append(number)

    def restart_worker(self) -> None:
        """Restart one failed worker."""
        if self._to_restart:
            number = self._to_restart.pop(0)
            self._failed.pop(number, None)
            self.history.append(f"{self.now:g}: worker {number}.{self.workers_now[number].incarnation + 1} starts")
            self.workers_now[number] = Worker(self, number, self.workers_now[number].incarnation + 1, self._run)
            self.workers_now[number].resume()

    def ask_to_quit(self, number: int) -> None:
        """Ask a worker to leave gracefully, unless it is worker 0."""
        self.workers_now[number].is_to_quit = number > 0
        self.history.append(f"{self.now:g}: worker {number} is to quit")

    def kill_server(self, shard: int) -> None:
        """End the process of a shard, with the dispatcher if it is shard 0, and restart it immediately."""
        self.history.append(f"{self.now:g}: server {shard} fails")
        for service in [self.services[shard + 1], *([self.services[0]] if shard == 0 else [])]:
            service.start()
            for channel in service.channels.values():
                channel.outgoing.clear()
        for number, incarnation in self._failed.items():
            self._notify_services(number, incarnation)
        for one in self.workers_now:
            for channel in one.channels if not one.is_done else []:
                if channel.service.handler is self.services[shard + 1].handler or (
                    shard == 0 and channel is one.channels[0]
                ):
                    channel.break_connection()

    def break_connection(self) -> None:
        """Break a connection that is chosen at random."""
        channel = self.random.choice(
            [channel for one in self.workers_now if not one.is_done for channel in one.channels] or [None]
        )
        if channel is not None:
            channel.break_connection()

    def _notify_services(self, number: int, incarnation: int) -> None:
        found = [service.remove(m.IncarnationEnded(number, incarnation)) for service in self.services[1:]]
        self.services[0].remove(m.incarnation_ended(number, incarnation, found, len(found)))

    def start(self) -> None:
        for one in self.workers_now:
            one.resume()

    def report_and_restart_all(self) -> None:
        """Report all failures and restart all failed workers."""
        while self._unreported:
            self.report_failure()
        while self._to_restart:
            self.restart_worker()

    @property
    def is_done(self) -> bool:
        return all(one.is_done for one in self.workers_now)
