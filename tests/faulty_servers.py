"""A parameter server whose processes, connections and workers can fail at any point.

The request handlers and clients are the real ones; connections and processes are simulated. Workers are greenlets. A
random generator chooses the message that arrives next.
"""

from __future__ import annotations

import random
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import greenlet
from torch import Tensor

from stretto.errors import TransportError
from stretto.parameter_server import messages as m
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import RunOverError, Sink, raise_refusals
from stretto.parameter_server.dispatcher_handler import DispatcherHandler
from stretto.parameter_server.framing import Chunks, FramingError, layout_of
from stretto.parameter_server.handler import OutgoingMessage
from stretto.parameter_server.service import Service
from stretto.parameter_server.sessions import ClientSession
from stretto.parameter_server.shard_handler import ShardHandler
from stretto.parameter_server.snapshots import InMemoryStore
from stretto.parameter_server.state_log import RecordedClock, StateLog

COMPACTED_BYTES = 2000
"""Length at which the dispatcher's log is replaced by its state: a fraction of a run's."""
Request = tuple[m.Header, list[Chunks]]


class Process:
    """A process of a service, and the channels to it."""

    def __init__(self, make: Callable[[], Service]) -> None:
        self._make = make
        self.service: Any = None
        self.channels: dict[tuple[int, int], FaultyChannel] = {}
        self.start()

    def start(self) -> None:
        """Start a process; the memory of the previous one is lost."""
        self.close()
        self.service = self._make()

    def close(self) -> None:
        if self.service is not None:
            self.service.close()

    @property
    def handler(self) -> Any:
        return self.service.handler

    def receive(self, worker: int, incarnation: int, header: m.Header, tensors: list[Chunks]) -> None:
        messages = self.service.admit(worker, incarnation)
        if messages is None:
            return
        try:
            self.handler.expects(worker, header)
            replies = self.service.take(worker, incarnation, header, tensors)
        except (FramingError, TransportError) as error:
            replies = [OutgoingMessage(worker, header.request_id, m.Refused(str(error)))]
        self._send_all([*messages, *replies])

    def remove(self, gone: m.IncarnationEnded) -> m.CountedWork:
        work, messages = self.service.end(gone)
        self._send_all(messages)
        return work

    def _send_all(self, messages: Sequence[OutgoingMessage]) -> None:
        for message in messages:
            tensors = [tensor.clone() for tensor in message.tensors]
            if message.sent is not None:
                message.sent()
            channel = self.channels.get((message.worker, self.service.incarnation(message.worker)))
            if channel is not None and channel.is_up and not channel.is_broken:
                channel.incoming.append((message.request_id, message.body, tensors))


class FaultyChannel:
    """A worker's channel to a service: messages arrive in order, one at each call of `arrive` or `arrive_reply`; broken
    connections lose some."""

    def __init__(self, cluster: FaultyCluster, process: Process, worker: int, incarnation: int) -> None:
        self._cluster, self.process, self.worker, self.incarnation = cluster, process, worker, incarnation
        self.session: ClientSession[tuple[m.Request, Sequence[Tensor]]] = ClientSession()
        self.replies: dict[int, tuple[m.Body, list[Tensor]]] = {}
        self.outgoing: deque[Request] = deque()
        self.incoming: deque[tuple[int, m.Body, list[Tensor]]] = deque()
        self.client: Any = None
        self.is_up = True
        self.is_broken = False
        """True until the worker notices that the connection is lost, which it does when it waits or polls."""
        process.channels[worker, incarnation] = self

    def send(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> int:
        number = self.session.number((body, tensors), not isinstance(body, m.WITHOUT_REPLY))
        self._send(number, body, tensors)
        return number

    def _send(self, number: int, body: m.Request, tensors: Sequence[Tensor]) -> None:
        if self.is_broken:
            return
        header = m.Header(number, body, layout_of(tensors), self.session.answered_below)
        self.outgoing.append((header, [[one.detach().clone()] if one.numel() else [] for one in tensors]))

    def wait(self, number: int, sink: Sink | None = None) -> tuple[m.Body, list[Chunks]]:
        while number not in self.replies:
            self.tend()
            self.client.tend(self)
            self._cluster.hub.switch()
        body, tensors = self.replies.pop(number)
        raise_refusals("the service", body)
        if sink is not None:
            for index, one in enumerate(tensors):
                sink(index, 0, one)
        return body, [[one] for one in tensors]

    def poll(self, number: int) -> bool:
        self.tend()
        return number in self.replies

    def is_pending(self, number: int) -> bool:
        return self.session.is_pending(number)

    def discard(self, number: int) -> None:
        self.session.discard(number)
        self.replies.pop(number, None)

    def send_oneway(self, body: m.Request, tensors: Sequence[Tensor] = ()) -> None:
        self._send(0, body, tensors)

    def abort(self) -> None:
        pass

    def reset(self) -> None:
        self.session.reset()

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
        self.process.receive(self.worker, self.incarnation, header, tensors)

    def arrive_reply(self) -> None:
        """Deliver the next reply to the worker."""
        number, body, tensors = self.incoming.popleft()
        if self.session.answer(number):
            self.replies[number] = body, tensors

    def break_connection(self) -> None:
        """Lose all messages under way, and later ones until the worker has connected again."""
        self.outgoing.clear()
        self.incoming.clear()
        self.is_broken = True

    def tend(self) -> None:
        """Repeat the requests without a reply over a new connection, if the last one is lost."""
        if not self.is_broken:
            return
        self.is_broken = False
        if self.client is not None:
            self.client.replay(self)
        for number, (body, tensors) in self.session.unanswered():
            self._send(number, body, tensors)


class Worker:
    """One incarnation of a worker."""

    def __init__(self, cluster: FaultyCluster, number: int, incarnation: int, run: Callable[[Worker], None]) -> None:
        self.cluster, self.number, self.incarnation = cluster, number, incarnation
        self.channels = [FaultyChannel(cluster, one, number, incarnation) for one in cluster.processes]
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
        """Join the run if this is a restart or a guest; return False if the run is over."""
        try:
            if self.incarnation or self.number >= self.cluster.workers:
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
        stores = [InMemoryStore() for _ in range(shards)]
        self._folder = tempfile.TemporaryDirectory()

        def dispatcher() -> Service:
            clock = RecordedClock(lambda: self.now)
            handler = DispatcherHandler(workers, clock, snapshot_interval_s)
            log = StateLog(Path(self._folder.name) / "dispatcher.wal", handler, clock, compacted_bytes=COMPACTED_BYTES)
            return Service(handler, log)

        def shard(number: int) -> Callable[[], Service]:
            def make() -> Service:
                self._starts += 1
                return Service(ShardHandler(workers, lambda: self.now, "stop", stores[number], self._starts))

            return make

        self.processes = [Process(dispatcher), *(Process(shard(number)) for number in range(shards))]
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
        deliveries = self._deliveries()
        if not deliveries:  # workers notice lost connections
            self.start()
            deliveries = self._deliveries()
        if not deliveries:
            return False
        self.random.choice(deliveries)()
        for one in self.workers_now:
            one.resume()
        return True

    def _deliveries(self) -> list[Callable[[], None]]:
        channels = [channel for one in self.workers_now for channel in one.channels]
        outgoing = [channel.arrive for channel in [*channels, *self._channels_of_failed] if channel.outgoing]
        return outgoing + [channel.arrive_reply for channel in channels if channel.incoming]

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

    def add_guest(self) -> None:
        """Start a worker that joins the run."""
        self.history.append(f"{self.now:g}: worker {len(self.workers_now)} joins")
        self.workers_now.append(Worker(self, len(self.workers_now), 0, self._run))
        self.workers_now[-1].resume()

    def ask_to_quit(self, number: int) -> None:
        """Ask a worker to leave gracefully, unless it is worker 0."""
        self.workers_now[number].is_to_quit = self.workers_now[number].is_to_quit or number > 0
        self.history.append(f"{self.now:g}: worker {number} is to quit")

    def kill_server(self, shard: int) -> None:
        """End the process of a shard, and restart it immediately."""
        self.history.append(f"{self.now:g}: server {shard} fails")
        self._restart(self.processes[shard + 1])
        for number, incarnation in self._failed.items():
            self._notify_services(number, incarnation)

    def kill_coordinator(self) -> None:
        """End the process of the dispatcher, and restart it immediately."""
        self.history.append(f"{self.now:g}: the coordinator fails")
        self._restart(self.processes[0])

    def _restart(self, process: Process) -> None:
        process.start()
        for channel in process.channels.values():
            channel.outgoing.clear()
        for one in self.workers_now:
            for channel in one.channels if not one.is_done else []:
                if channel.process is process:
                    channel.break_connection()

    def close(self) -> None:
        """Remove the dispatcher's log."""
        self.processes[0].close()
        self._folder.cleanup()

    def break_connection(self) -> None:
        """Break a connection that is chosen at random."""
        channel = self.random.choice(
            [channel for one in self.workers_now if not one.is_done for channel in one.channels] or [None]
        )
        if channel is not None:
            channel.break_connection()

    def _notify_services(self, number: int, incarnation: int) -> None:
        found = [process.remove(m.IncarnationEnded(number, incarnation)) for process in self.processes[1:]]
        self.processes[0].remove(m.incarnation_ended(number, incarnation, found, len(found)))

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
