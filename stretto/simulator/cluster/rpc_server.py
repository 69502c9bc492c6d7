"""Simulated parameter server: the live request handlers behind simulated channels."""

from __future__ import annotations

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
from stretto.parameter_server.handler import OutgoingMessage
from stretto.parameter_server.service import Service
from stretto.parameter_server.shard_handler import ShardHandler
from stretto.parameter_server.snapshots import InMemoryStore
from stretto.simulator.cluster.membership import COORDINATOR_ENDPOINT
from stretto.simulator.cluster.rpc_channel import ChannelSettings, ReplyTensors, SimChannel
from stretto.simulator.engine import Engine, Worker
from stretto.transport.interface import Message, made


class SimServer:
    """A server process, whose service processes one message at a time. `channels` are the workers' to it.

    A restart makes the service of its next incarnation: a new one, or with a log the same.
    """

    def __init__(
        self,
        engine: Engine,
        make_service: Callable[[int], Service],
        endpoint: int,
        resource: int,
        name: str,
        channels: list[SimChannel],
    ) -> None:
        self._engine, self._make_service, self.resource = engine, make_service, resource
        self.endpoint, self.name, self.channels = endpoint, name, channels
        self.is_down = False
        self.incarnation = self._pauses = 0
        """Number of earlier starts of the process, and number of its pauses that are not ended."""
        self._waiting: list[Callable[[], None]] = []
        """Messages that wait until the process resumes."""
        self._start_process()

    def _start_process(self) -> None:
        self._service = self._make_service(self.incarnation)
        self._idle_at = 0.0
        self._last_reply = ReplyTensors(())

    # --- process --------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Fail the process: its memory and all messages to and from it are lost."""
        self.is_down, self._pauses = True, 0
        self._waiting.clear()
        self.incarnation += 1

    def restart(self) -> None:
        """Start another process, with the snapshots or the log of the previous one; workers send requests again."""
        self.is_down = False
        self._start_process()
        self.reconnect()

    def reconnect(self) -> None:
        """Let the workers connect again, and send the requests without a reply."""
        for channel in self.channels:
            channel.resend()

    def pause(self) -> None:
        """Pause the process: messages to it wait."""
        self._pauses += not self.is_down

    def resume(self) -> None:
        """End one pause; after the last, process the waiting messages."""
        self._pauses -= self._pauses > 0
        if not self._pauses:
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback()

    def unless_restarted(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls `callback` only if the process is not restarted in between."""
        incarnation = self.incarnation
        return lambda: callback() if self.incarnation == incarnation else None

    # --- messages -------------------------------------------------------------------------------------------------

    def worker_ended(self, notice: m.IncarnationEnded) -> m.CountedWork:
        """Process the end of a worker incarnation, and of all earlier ones; return its work at this server."""
        work, messages = self._service.end(notice)
        self._send(messages)
        return work

    def reply_tensors(self, tensors: Sequence[Tensor]) -> ReplyTensors:
        """Return the wrapped tensors of a reply; those of the last reply are cached."""
        if self._last_reply.tensors is not tensors:
            self._last_reply = ReplyTensors(tensors)
        return self._last_reply

    def receive(self, channel: SimChannel, header: m.Header, tensors: list[Chunks]) -> None:
        """Receive a message, which is processed after those before it."""
        work_s = self._engine.cost_model.update_s if isinstance(header.body, m.Push) else 0.0
        queue, process = self._engine.queue, self.unless_restarted(lambda: self._process(channel, header, tensors))
        if self._engine.processors is not None and work_s:
            self._engine.use_processor(self.resource, work_s, process)
            return
        self._idle_at = max(self._idle_at, queue.now) + work_s
        queue.schedule(self._idle_at, process, key=channel.worker.number)

    def _process(self, channel: SimChannel, header: m.Header, tensors: list[Chunks]) -> None:
        if self._pauses:
            self._waiting.append(self.unless_restarted(lambda: self._process(channel, header, tensors)))
            return
        worker, incarnation = channel.worker.number, channel.incarnation
        messages = self._service.admit(worker, incarnation)
        if messages is None:
            return
        wall_clock = self._engine.wall_clock
        began = wall_clock() if wall_clock is not None else 0.0
        replies = self._replies_to(worker, incarnation, header, tensors)
        if wall_clock is not None and isinstance(header.body, m.Push):
            self._engine.update_seconds.append(wall_clock() - began)
        self._send([*messages, *replies])

    def _send(self, replies: Sequence[OutgoingMessage]) -> None:
        for reply in replies:
            self.channels[reply.worker].reply(self, reply)

    def _replies_to(
        self, worker: int, incarnation: int, header: m.Header, tensors: list[Chunks]
    ) -> list[OutgoingMessage]:
        try:
            self._service.handler.expects(worker, header)
        except FramingError as error:
            return [OutgoingMessage(worker, header.request_id, m.Refused(str(error)))]
        return self._service.take(worker, incarnation, header, tensors)


class SimServers:
    """All servers of one parameter server, and the workers' channels to them.

    If processes can fail (`can_fail`), there are snapshots to roll back to and unanswered requests are sent again, as
    live.
    """

    def __init__(
        self, engine: Engine, shards: int, on_nan: str, encrypted: bool, limit_s: float, can_fail: bool = False
    ) -> None:
        self._engine, self._can_fail = engine, can_fail
        self._settings = ChannelSettings(encrypted, limit_s, can_fail)
        self._servers: list[SimServer] = []
        self._failed_workers: dict[int, int] = {}
        """Last incarnation of each worker that has failed."""
        self._add_server("the coordinator", COORDINATOR_ENDPOINT, self._make_dispatcher())
        for shard in range(shards):
            self._add_server(f"server {shard}", -1 - shard, self._make_shard(on_nan))

    def _add_server(self, name: str, endpoint: int, make_service: Callable[[int], Service]) -> None:
        resource, channels = self._engine.resource_of_service(len(self._servers)), list[SimChannel]()
        server = SimServer(self._engine, make_service, endpoint, resource, name, channels)
        channels += [self._make_channel(worker, server) for worker in self._engine.workers]
        self._servers.append(server)

    def _make_channel(self, worker: Worker, server: SimServer, *previous: Any) -> SimChannel:
        return SimChannel(self._engine, worker, server, self._settings, *previous)

    def _make_dispatcher(self) -> Callable[[int], Service]:
        """Return a function that returns the same dispatcher for each process: its log restores the state."""
        interval_s = SNAPSHOT_INTERVAL_S if self._can_fail else None
        handler = DispatcherHandler(len(self._engine.workers), self._now, interval_s)
        service = Service(handler)
        return lambda _: service

    def _make_shard(self, on_nan: str) -> Callable[[int], Service]:
        workers, snapshots = len(self._engine.workers), InMemoryStore() if self._can_fail else None
        return lambda incarnation: Service(ShardHandler(workers, self._now, on_nan, snapshots, incarnation))

    def _now(self) -> float:
        return self._engine.queue.now

    def client(self, worker: Worker, incarnation: int = 0) -> ParameterServerClient:
        """Return a live client of one worker over simulated channels; the servers identify it by this `incarnation`."""
        self._failed_workers.pop(worker.number, None)
        for server in self._servers:
            previous = server.channels[worker.number]
            if previous.worker is not worker or previous.incarnation != incarnation:
                server.channels[worker.number] = self._make_channel(worker, server, previous, incarnation)
        channels = [server.channels[worker.number] for server in self._servers]
        workers = len(self._engine.workers)
        return _SimServerClient(worker.number, workers, channels[0], channels[1:], self._can_fail)

    def drop_replies(self, worker: int) -> None:
        """Drop the replies to a worker that was killed."""
        for server in self._servers:
            server.channels[worker].reset()

    def worker_failed(self, worker: int, incarnation: int) -> None:
        """Notify the servers of the end of a worker incarnation: the shards first, which know what it contributed."""
        self._failed_workers[worker] = incarnation
        ended = m.IncarnationEnded(worker, incarnation)
        work = [shard.worker_ended(ended) for shard in self._servers[1:] if not shard.is_down]
        if not self.dispatcher.is_down:
            self.dispatcher.worker_ended(m.incarnation_ended(worker, incarnation, work, self.shards))

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self._servers) - 1

    # --- processes of servers -------------------------------------------------------------------------------------

    def is_running(self, shard: int) -> bool:
        """True if the process of a shard runs."""
        return not self.shard(shard).is_down

    @property
    def dispatcher(self) -> SimServer:
        """The batch dispatcher, which runs in the coordinator's process."""
        return self._servers[0]

    def shard(self, number: int) -> SimServer:
        """Return the server of a shard."""
        return self._servers[1 + number]

    def fail_shard(self, number: int) -> int | None:
        """Fail the process of a shard, and return its incarnation; None if it does not run."""
        shard = self.shard(number)
        if shard.is_down:
            return None
        incarnation = shard.incarnation
        shard.fail()
        self._engine.network.disconnect(shard.endpoint)
        if shard.endpoint == self.dispatcher.endpoint and not self.dispatcher.is_down:
            self.dispatcher.reconnect()  # its messages under way were dropped, too
        return incarnation

    def restart_shard(self, number: int) -> None:
        """Restart the process of a shard, and notify it of failed workers."""
        self.shard(number).restart()
        for worker, incarnation in sorted(self._failed_workers.items()):
            self.worker_failed(worker, incarnation)


class _SimServerClient(ParameterServerClient):
    """The live client; replies that many workers receive are decoded once."""

    @property
    def _channel(self) -> SimChannel:
        assert isinstance(self._dispatcher, SimChannel)
        return self._dispatcher

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the root's message. Within a backward pass, which cannot wait, `message` is equal at all workers."""
        if not self._channel.worker.in_backward:
            return super().broadcast_bytes(message, root)
        payload = made(message)
        if not self._aborted:
            super().broadcast_bytes(payload, root)
        return payload

    def _await_result(self, body: m.Gather | m.BroadcastOrder | m.Barrier, number: int) -> list[Chunks]:
        """Wait for messages; within a backward pass return empty ones and wait after the pass."""
        if not self._channel.worker.in_backward:
            return super()._await_result(body, number)
        self._channel.worker.after_backward(lambda: self._await_after_backward(body, number))
        return [[torch.empty(0, dtype=torch.uint8, device="cpu")]]

    def _await_after_backward(self, body: m.Gather | m.BroadcastOrder | m.Barrier, number: int) -> None:
        with suppress(BrokenTransportError):  # the next request, which can wait, raises it
            self._await_result(body, number)

    def _bytes_of(self, tensors: Sequence[Chunks]) -> list[bytes]:
        last = self._channel.last
        return last.messages() if last.pieces is tensors else super()._bytes_of(tensors)
