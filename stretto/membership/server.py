"""Network side of the membership coordinator: one socket, one coordinator, one write-ahead log.

Decisions on members are on disk before any worker is notified of them. While the log can't be written, the members
continue; a change of members that stays without a record for too long ends the run. Every message of a worker has a
reply, if only an empty frame, so that the worker knows that the coordinator runs.
"""

from __future__ import annotations

import contextlib
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import zmq

from stretto.errors import LogError
from stretto.events import Event
from stretto.interval import Interval
from stretto.membership.barriers import Arrive, Barriers
from stretto.membership.coordinator import MembershipCoordinator, Outgoing
from stretto.membership.messages import (
    EndRun,
    Heartbeat,
    LauncherEnded,
    LauncherMessage,
    LauncherReply,
    MembersView,
    ProcessExited,
    RunEnded,
    Save,
    WatchMembers,
    WorkerMessage,
    connection_name,
)
from stretto.membership.write_ahead_log import WriteAheadLog
from stretto.security import HEAD, PROOF, RunKeys, doorman, identity_of, name_in, router

LARGEST_MESSAGE = 1 << 16
_NAME = re.compile(rb"worker (0|[1-9]\d{0,6})\.(0|[1-9]\d{0,6})(?: rank (0|[1-9]\d{0,2}) of ([2-9]|[1-9]\d{1,2}))?")
"""Names that `connection_name` makes."""
_LAUNCHER = re.compile(HEAD + rb"(?: (0|[1-9]\d{0,6}))?")
_AT_BARRIER = re.compile(rb"barrier (0|[1-9]\d{0,6})\.(0|[1-9]\d{0,6})")
"""Socket identity of a worker's connection for barriers, beside its membership connection."""
_ENCODER = msgspec.msgpack.Encoder()
_WORKER_MESSAGE = msgspec.msgpack.Decoder(WorkerMessage)
_LAUNCHER_MESSAGE = msgspec.msgpack.Decoder(LauncherMessage)
_ARRIVAL = msgspec.msgpack.Decoder(Arrive)


class Service(Protocol):
    """Replies to the messages of some connections, beside those of the members."""

    @property
    def needs_log(self) -> bool:
        """True if no reply may be sent before the coordinator's records are on disk."""
        ...

    def reply(self, name: bytes, message: bytes) -> bytes | None:
        """Return the reply to a message of the connection of this name; None for the connection of another service.

        Raises ValueError for a message that no process sends. The message may come again.
        """
        ...


class MembershipServer:
    """Carries messages between workers and the membership coordinator until it is stopped.

    `publish` receives the notices and events of each step, after they are on disk; `services` have connections of
    their own.
    """

    def __init__(
        self,
        listener: socket.socket,
        coordinator: MembershipCoordinator,
        log: WriteAheadLog,
        keys: RunKeys | None,
        publish: Callable[[Sequence[str], Sequence[Event]], None],
        services: Sequence[Service] = (),
        save_every: Interval | None = None,
        log_limit_s: float = math.inf,
    ) -> None:
        host, port = listener.getsockname()[:2]
        self.address = f"tcp://{host}:{port}"
        self._coordinator, self._log, self._publish, self._keys = coordinator, log, publish, keys
        self._services = (_AtBarriers(coordinator), *services)
        failure_timeout_s = coordinator.rules.failure_timeout_s
        self._tick_s = min(failure_timeout_s / 10, 0.2)
        self._paused_s = failure_timeout_s / 4
        self._save_every = save_every
        self._context = zmq.Context()
        self._door = doorman(self._context, keys) if keys else None
        self._socket = router(self._context, keys, LARGEST_MESSAGE)
        self._socket.setsockopt(zmq.USE_FD, listener.detach())
        self._socket.bind(self.address)
        self._log_error: LogError | None = None
        self._log_limit_s = log_limit_s
        """Longest time for which a change of members may wait until the log can be written."""
        self._logged, self._logged_at = 0, math.inf
        """Generation in the log, and the time until which the log had the current one."""
        self._launchers: dict[bytes, float] = {}
        """Launchers that are notified of failures, with the time of the last message of each."""
        self._has_watcher = False
        """True if the launcher of the run is notified of all changes of the workers."""
        self.refused = 0
        """Number of refused messages."""

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set."""
        try:
            self._send_logged([])  # writes the first record of the log
            due_s = time.monotonic()
            while not stop.is_set():
                if self._socket.poll(max(int((due_s - time.monotonic()) * 1000) + 1, 0)):
                    self._receive_all()
                now = time.monotonic()
                if now - due_s > self._paused_s:
                    self._coordinator.extend_timeouts(now - due_s)
                    due_s = now
                elif now >= due_s:
                    due_s = now + self._tick_s
                    self._send_logged(self._coordinator.tick(now))
                    self._save(now)
                    self._stop_without_log(now)
        finally:
            if self._door is not None:
                self._door.stop()
            self._context.destroy(linger=0)

    def _save(self, now: float) -> None:
        """Request a checkpoint when it is due; the interval begins with the first generation."""
        if self._save_every is not None and self._coordinator.generation and self._save_every.due(now, 0):
            self._send_logged(self._coordinator.save(now))

    def _stop_without_log(self, now: float) -> None:
        """End the run if its members wait for a change that can't be written."""
        coordinator = self._coordinator
        if self._log_error is None or coordinator.generation == self._logged or coordinator.rules.asynchronous:
            self._logged_at = now
        elif now - self._logged_at > self._log_limit_s:
            self._send_logged(coordinator.stop(f"{self._log_error}, and its members have changed", now))
            self._logged_at = math.inf

    def _receive_all(self) -> None:
        for _ in range(1000):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(identity, frames)

    def _receive(self, identity: bytes, frames: Sequence[bytes]) -> None:
        outgoing: list[Outgoing] = []
        reply, needs_log = b"", False
        try:
            if len(frames) != 1:
                raise ValueError(f"{len(frames)} frames")
            name, data = name_in(identity, self._keys), frames[0]
            if (match := _NAME.fullmatch(name)) is not None:
                worker, incarnation, rank, ranks = (int(number) for number in match.groups(default=b"0"))
                message = _WORKER_MESSAGE.decode(data)
                if self._save_every is not None and isinstance(message, Heartbeat) and message.checkpoint_s:
                    self._save_every.cost_s = message.checkpoint_s
                outgoing = self._coordinator.receive(
                    worker, incarnation, message, time.monotonic(), rank, max(ranks, 1)
                )
            elif (match := _LAUNCHER.fullmatch(name)) is not None:
                first = int(match[1]) if match[1] is not None else None
                from_launcher = _LAUNCHER_MESSAGE.decode(data)
                outgoing = self._receive_of_launcher(name, first, from_launcher)
                reply = _ENCODER.encode(self._reply_to_launcher(from_launcher))
            else:
                reply, needs_log = self._reply_of_service(name, data)
        except (ValueError, msgspec.MsgspecError) as error:
            self.refused += 1
            sender = identity.partition(PROOF)[0]
            self._publish([f"refused a message of {sender!r:.60}: {error} ({self.refused} so far)"], [])
            return
        self._send_logged(outgoing)
        if not (needs_log and self._log_error):
            self._send(name, reply)

    def _reply_of_service(self, name: bytes, message: bytes) -> tuple[bytes, bool]:
        for service in self._services:
            if (reply := service.reply(name, message)) is not None:
                return reply, service.needs_log
        raise ValueError("unknown sender")

    def _reply_to_launcher(self, message: LauncherMessage) -> LauncherReply:
        if isinstance(message, RunEnded):
            return message
        return self._coordinator.failures if message != WatchMembers() else self._view()

    def _view(self) -> MembersView:
        since = time.monotonic() - self._coordinator.rules.failure_timeout_s
        others = self._launchers.keys() - {HEAD}
        return self._coordinator.view(sum(self._launchers[name] > since for name in others))

    def _receive_of_launcher(self, name: bytes, first: int | None, message: LauncherMessage) -> list[Outgoing]:
        """Return what follows from a message of a launcher that joined with worker `first`; None for the run's own."""
        now = time.monotonic()
        self._launchers[name] = now
        match message:
            case LauncherEnded():
                del self._launchers[name]
            case WatchMembers():
                self._has_watcher = True
            case Save():
                return self._coordinator.save(now)
            case EndRun() | RunEnded() if first is not None:
                raise ValueError("only the launcher of the run may end it")
            case EndRun():
                return self._coordinator.end_run(now)
            case RunEnded():
                for joined in self._launchers.keys() - {HEAD}:
                    self._send(joined, _ENCODER.encode(message))
            case ProcessExited(worker, incarnation, why, will_restart, rank):
                if not self._coordinator.workers.may_report(first, worker):
                    raise ValueError(f"worker {worker} is not its own")
                return self._coordinator.process_exited(worker, incarnation, now, will_restart, why, rank)
        return []

    def _send_logged(self, outgoing: Sequence[Outgoing]) -> None:
        """Write the log, then send, then publish.

        Messages whose decisions can't be written are not sent; workers repeat theirs.
        """
        for record in self._coordinator.records():
            self._log.append(record)
        self._write_log()
        for post in outgoing:
            if self._log_error is None or not post.message.awaits_log(self._logged):
                name = connection_name(post.worker, post.incarnation, post.rank, post.ranks)
                self._send(name, _ENCODER.encode(post.message))
        notices, events = self._coordinator.announcements.take()
        if events and self._launchers:
            failures = _ENCODER.encode(self._coordinator.failures)
            for launcher in self._launchers:
                self._send(launcher, failures)
            if self._has_watcher:
                self._send(HEAD, _ENCODER.encode(self._view()))
        if notices or events:
            self._publish(notices, events)

    def _write_log(self) -> None:
        try:
            self._log.flush()
        except LogError as error:
            if self._log_error is None:
                self._publish([f"{error}; until it can be written, no worker joins and none is replaced"], [])
            self._log_error = error
        else:
            self._log_error, self._logged = None, self._coordinator.generation

    def _send(self, name: bytes, frame: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the worker has exited, or will reconnect
            self._socket.send_multipart([identity_of(name, self._keys), frame], zmq.NOBLOCK)


class _AtBarriers:
    """Service for the barriers of the script."""

    needs_log = False

    def __init__(self, coordinator: MembershipCoordinator) -> None:
        self._barriers = Barriers(coordinator.workers, coordinator)

    def reply(self, name: bytes, message: bytes) -> bytes | None:
        """Return the workers that have not reached the barrier."""
        match = _AT_BARRIER.fullmatch(name)
        if match is None:
            return None
        arrived = _ARRIVAL.decode(message)
        return _ENCODER.encode(self._barriers.receive(int(match[1]), int(match[2]), arrived, time.monotonic()))
