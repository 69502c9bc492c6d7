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
from stretto.parameter_server.handler import OutgoingMessage, RequestHandler
from stretto.parameter_server.incarnations import Incarnations
from stretto.parameter_server.shard_handler import ShardHandler
from stretto.parameter_server.snapshots import InMemoryStore
from stretto.simulator.cluster.rpc_channel import ChannelSettings, ReplyTensors, SimChannel
from stretto.simulator.engine import Engine, Worker
from stretto.transport.interface import Message, made

COORDINATOR = -1
"""Endpoint of the batch dispatcher, which runs beside the first shard."""


class SimServer:
    """A server process, whose handler processes one message at a time. A restart creates a new handler."""

    def __init__(
        self, engine: Engine, make_handler: Callable[[int], RequestHandler], endpoint: int, resource: int, name: str
    ) -> None:
        self._engine, self._make_handler, self.resource = engine, make_handler, resource
        self.endpoint, self.name = endpoint, name
        self.is_down = False
        self._incarnation = self._pauses = 0
        """Incarnation of the process, and number of its pauses that are not ended."""
        self._waiting: list[Callable[[], None]] = []
        """Messages that wait until the process resumes."""
        self._start_process()

    def _start_process(self) -> None:
        self._handler = self._make_handler(self._incarnation)
        self._idle_at = 0.0
        self._last_reply = ReplyTensors(())
        self._incarnations = Incarnations()
        """Filter for messages of worker incarnations that have ended."""

    # --- process --------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """Fail the process: its state and all messages to and from it are lost."""
        self.is_down, self._pauses = True, 0
        self._waiting.clear()
        self._incarnation += 1

    def restart(self) -> None:
        """Start another process, which loads the snapshots of the previous one."""
        self.is_down = False
        self._start_process()

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
        incarnation = self._incarnation
        return lambda: callback() if self._incarnation == incarnation else None

    # --- messages -------------------------------------------------------------------------------------------------

    def work_of(self, worker: int, incarnation: int) -> m.CountedWork:
        """Return the handler's record of the work of a worker incarnation that has ended."""
        return (
            self._handler.work_of(worker) if self._incarnations.is_last(worker, incarnation) else m.CountedWork(0, [])
        )

    def worker_ended(self, channel: SimChannel, notice: m.IncarnationEnded) -> None:
        """Process the end of a worker incarnation, and of all earlier ones."""
        if self.is_down or self._incarnations.is_over(notice.worker, notice.incarnation):
            return
        if self._incarnations.end(notice.worker, notice.incarnation):
            self._send(
                channel, self._handler.remove(notice.worker, notice.epoch_number, notice.batches, notice.is_partial)
            )

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
        if self._incarnations.is_over(worker, incarnation):
            return
        if (notice := self._incarnations.implied_end(worker, incarnation)) is not None:
            self.worker_ended(channel, notice)
        self._incarnations.note(worker, incarnation)
        wall_clock = self._engine.wall_clock
        began = wall_clock() if wall_clock is not None else 0.0
        replies = self._replies_to(worker, header, tensors)
        if wall_clock is not None and isinstance(header.body, m.Push):
            self._engine.update_seconds.append(wall_clock() - began)
        self._send(channel, replies)

    def _send(self, channel: SimChannel, replies: Sequence[OutgoingMessage]) -> None:
        for reply in replies:
            channel.channels[reply.worker].reply(self, reply)

    def _replies_to(self, worker: int, header: m.Header, tensors: list[Chunks]) -> list[OutgoingMessage]:
        if isinstance(header.body, m.Leave):
            return self._handler.leave(worker)
        try:
            self._handler.expects(worker, header)
            return self._handler.take(worker, header, tensors)
        except Exception as error:
            why = str(error) if isinstance(error, FramingError) else f"{type(error).__name__}: {error}"
            return [OutgoingMessage(worker, header.request_id, m.Refused(why))]


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
        self._channels: list[list[SimChannel]] = []
        self._incarnations = [0] * shards
        self._failed_workers: dict[int, int] = {}
        """Last incarnation of each worker that has failed."""
        self._add_server("the coordinator", COORDINATOR, self._make_dispatcher())
        for shard in range(shards):
            self._add_server(f"server {shard}", -1 - shard, self._make_shard(on_nan))

    def _add_server(self, name: str, endpoint: int, make_handler: Callable[[int], RequestHandler]) -> None:
        server = SimServer(
            self._engine, make_handler, endpoint, self._engine.resource_of_service(len(self._servers)), name
        )
        channels: list[SimChannel] = []
        channels += [self._make_channel(worker, server, channels) for worker in self._engine.workers]
        self._servers.append(server)
        self._channels.append(channels)

    def _make_channel(
        self, worker: Worker, server: SimServer, channels: list[SimChannel], *previous: Any
    ) -> SimChannel:
        return SimChannel(self._engine, worker, server, channels, self._settings, *previous)

    def _make_dispatcher(self) -> Callable[[int], RequestHandler]:
        """Return a constructor of dispatcher handlers that share their snapshots."""
        workers = len(self._engine.workers)
        snapshots, final = (InMemoryStore(), InMemoryStore()) if self._can_fail else (None, None)
        every_s = SNAPSHOT_INTERVAL_S if self._can_fail else None
        return lambda _: DispatcherHandler(workers, self._now, snapshots, every_s, final)

    def _make_shard(self, on_nan: str) -> Callable[[int], RequestHandler]:
        workers, snapshots = len(self._engine.workers), InMemoryStore() if self._can_fail else None
        return lambda incarnation: ShardHandler(workers, self._now, on_nan, snapshots, incarnation)

    def _now(self) -> float:
        return self._engine.queue.now

    def client(self, worker: Worker, incarnation: int = 0) -> ParameterServerClient:
        """Return a live client of one worker over simulated channels; the servers identify it by this `incarnation`."""
        self._failed_workers.pop(worker.number, None)
        for server, channels in zip(self._servers, self._channels, strict=True):
            previous = channels[worker.number]
            if previous.worker is not worker or previous.incarnation != incarnation:
                channels[worker.number] = self._make_channel(worker, server, channels, previous, incarnation)
        channels = [channels[worker.number] for channels in self._channels]
        return _SimServerClient(worker.number, len(self._channels[0]), channels[0], channels[1:], self._can_fail)

    def drop_replies(self, worker: int) -> None:
        """Drop the replies to a worker that was killed."""
        for channels in self._channels:
            channels[worker].reset()

    def worker_failed(self, worker: int, incarnation: int) -> None:
        """Notify the servers of the end of a worker incarnation: the shards first, which know what it contributed."""
        self._failed_workers[worker] = incarnation
        worker_channels = [worker_channels[worker] for worker_channels in self._channels]
        coordinator, *shards = zip(self._servers, worker_channels, strict=True)
        work = [server.work_of(worker, incarnation) for server, _ in shards if not server.is_down]
        for server, channel in shards:
            server.worker_ended(channel, m.IncarnationEnded(worker, incarnation))
        coordinator[0].worker_ended(coordinator[1], m.incarnation_ended(worker, incarnation, work, len(shards)))

    @property
    def shards(self) -> int:
        """Number of shards."""
        return len(self._incarnations)

    # --- processes of servers -------------------------------------------------------------------------------------

    def is_running(self, shard: int) -> bool:
        """True if the process of a shard runs."""
        return not self._servers[1 + shard].is_down

    def fail_shard(self, shard: int) -> int | None:
        """Fail the process of a shard, and return its incarnation; None if it does not run."""
        if not self.is_running(shard):
            return None
        for number in self._servers_of(shard):
            self._servers[number].fail()
        self._engine.network.disconnect(-1 - shard)
        return self._incarnations[shard]

    def restart_shard(self, shard: int) -> int:
        """Restart the process of a shard, notify it of failed workers, and return its incarnation."""
        self._incarnations[shard] += 1
        for number in self._servers_of(shard):
            self._servers[number].restart()
            for channel in self._channels[number]:
                channel.resend()
        for worker, incarnation in sorted(self._failed_workers.items()):
            self.worker_failed(worker, incarnation)
        return self._incarnations[shard]

    def pause_shard(self, shard: int) -> None:
        """Pause the process of a shard."""
        for number in self._servers_of(shard):
            self._servers[number].pause()

    def resume_shard(self, shard: int) -> None:
        """Resume the process of a shard."""
        for number in self._servers_of(shard):
            self._servers[number].resume()

    def _servers_of(self, shard: int) -> list[int]:
        """Return the indices of the servers in a shard's process; the first process also runs the batch dispatcher."""
        return [1 + shard] if shard else [0, 1]


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
        return [[torch.empty(0, dtype=torch.uint8)]]

    def _await_after_backward(self, body: m.Gather | m.BroadcastOrder | m.Barrier, number: int) -> None:
        with suppress(BrokenTransportError):  # the next request, which can wait, raises it
            self._await_result(body, number)

    def _bytes_of(self, tensors: Sequence[Chunks]) -> list[bytes]:
        last = self._channel.last
        return last.messages() if last.pieces is tensors else super()._bytes_of(tensors)
