"""Network side of the membership coordinator: one socket, one coordinator, one write-ahead log.

Decisions are on disk before any worker is notified of them. Every message of a worker has a reply, if only an empty
frame, so that the worker knows that the coordinator runs.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from stretto.errors import LogError
from stretto.membership.barriers import Arrive, Barriers
from stretto.membership.coordinator import Event, Gone, MembershipCoordinator, Outgoing, Save
from stretto.membership.messages import Said
from stretto.membership.write_ahead_log import WriteAheadLog
from stretto.security import ServerKeys, doorman, router

LARGEST_SAID = 1 << 16
_NAME = re.compile(rb"worker (0|[1-9]\d{0,6})\.(0|[1-9]\d{0,6})")
_LAUNCHER = re.compile(rb"launcher (0|[1-9]\d{0,6})")
_AT_BARRIER = re.compile(rb"barrier (0|[1-9]\d{0,6})\.(0|[1-9]\d{0,6})")
"""Socket identity of a worker's connection for barriers, beside its membership connection."""
_ENCODER = msgspec.msgpack.Encoder()
_SAID = msgspec.msgpack.Decoder(Said)
_REPORTED = msgspec.msgpack.Decoder(Gone | Save)
_ARRIVED = msgspec.msgpack.Decoder(Arrive)

__all__ = ["Gone", "MembershipServer", "Save"]


class MembershipServer:
    """Carries messages between workers and the membership coordinator until it is stopped.

    `publish` receives the notices and events of each step, after they are on disk.
    """

    def __init__(
        self,
        listener: socket.socket,
        roll: MembershipCoordinator,
        journal: WriteAheadLog,
        keys: ServerKeys | None,
        failure_timeout_s: float,
        publish: Callable[[Sequence[str], Sequence[Event]], None],
        save_every_s: float | None = None,
    ) -> None:
        host, port = listener.getsockname()[:2]
        self.address = f"tcp://{host}:{port}"
        self._roll, self._journal, self._publish = roll, journal, publish
        self._barriers = Barriers(roll)
        self._every_s = min(failure_timeout_s / 10, 0.2)
        self._drowsy_s = failure_timeout_s / 4
        self._save_every_s = save_every_s
        self._saved = time.monotonic()
        self._context = zmq.Context()
        self._door = doorman(self._context, keys) if keys else None
        self._socket = router(self._context, keys, LARGEST_SAID)
        for option, value in {zmq.ROUTER_HANDOVER: 1, zmq.HANDSHAKE_IVL: 0}.items():
            self._socket.setsockopt(option, value)
        self._socket.setsockopt(zmq.USE_FD, listener.detach())
        self._socket.bind(self.address)
        self._is_stuck = False
        self.refused = 0
        """Number of refused messages."""

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set."""
        try:
            self._tell([])  # the journal has its first record
            due = time.monotonic()
            while not stop.is_set():
                if self._socket.poll(max(int((due - time.monotonic()) * 1000) + 1, 0)):
                    self._hear_all()
                now = time.monotonic()
                if now - due > self._drowsy_s:
                    self._roll.slept(now - due)
                    due = now
                elif now >= due:
                    due = now + self._every_s
                    self._tell(self._roll.tick(now))
                    self._save(now)
        finally:
            if self._door is not None:
                self._door.stop()
            self._context.destroy(linger=0)

    def _save(self, now: float) -> None:
        """Request a checkpoint when it is due."""
        if self._save_every_s is not None and now - self._saved >= self._save_every_s:
            self._saved = now
            self._tell(self._roll.save(now))

    def _hear_all(self) -> None:
        for _ in range(1000):
            try:
                name, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._hear(name, frames)

    def _hear(self, name: bytes, frames: Sequence[bytes]) -> None:
        match = _NAME.fullmatch(name)
        reply = b""
        try:
            if len(frames) != 1:
                raise ValueError(f"{len(frames)} frames")
            if (at := _AT_BARRIER.fullmatch(name)) is not None:
                arrived = _ARRIVED.decode(frames[0])
                missing = self._barriers.hear(int(at[1]), int(at[2]), arrived, time.monotonic())
                posts, reply = [], _ENCODER.encode(missing)
            elif match is not None:
                worker, life = int(match[1]), int(match[2])
                posts = self._roll.hear(worker, life, _SAID.decode(frames[0]), time.monotonic())
            elif _LAUNCHER.fullmatch(name):
                posts = self._report(_REPORTED.decode(frames[0]))
            else:
                raise ValueError("nobody's name")
        except (ValueError, msgspec.MsgspecError) as error:
            self.refused += 1
            self._publish([f"refused a message of {name!r:.60}: {error} ({self.refused} so far)"], [])
            return
        self._tell(posts)
        self._send(name, reply)

    def _report(self, said: Gone | Save) -> list[Outgoing]:
        now = time.monotonic()
        if isinstance(said, Save):
            return self._roll.save(now)
        return self._roll.gone(said.worker, said.life, now, said.will_return, said.why)

    def _tell(self, posts: Sequence[Outgoing]) -> None:
        """Write the log, then send, then publish. Messages whose records cannot be written are not sent; workers repeat
        theirs."""
        for one in self._roll.records():
            self._journal.append(one)
        if self._is_journalled():
            for post in posts:
                self._send(b"worker %d.%d" % (post.worker, post.life), _ENCODER.encode(post.told))
        notices, self._roll.notices = self._roll.notices, []
        events, self._roll.events = self._roll.events, []
        if notices or events:
            self._publish(notices, events)

    def _is_journalled(self) -> bool:
        try:
            self._journal.flush()
        except LogError as error:
            if not self._is_stuck:
                self._publish([f"{error}; until it can be, nobody comes in and nobody is replaced"], [])
            self._is_stuck = True
        else:
            self._is_stuck = False
        return not self._is_stuck

    def _send(self, name: bytes, frame: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the worker has exited, or will reconnect
            self._socket.send_multipart([name, frame], zmq.NOBLOCK)
