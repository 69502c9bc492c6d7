"""The launcher's connection to the coordinator: exits are reported, and failures received, without a wait."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec

from stretto.launcher.endpoints import Servers
from stretto.membership.messages import (
    EndRun,
    Failures,
    LauncherEnded,
    LauncherReply,
    MembersView,
    ProcessExited,
    RunEnded,
    WatchFailures,
    WatchMembers,
)

RECONNECT_MS = 20
_REPLY = msgspec.msgpack.Decoder(LauncherReply)


class ExitNotifier:
    """Reports exits of workers to the coordinator, long before the failure timeout, and receives failures from it.

    A restarted coordinator gets all reports again.
    """

    def __init__(self, servers: Servers, first: int | None = None) -> None:
        """Connect; `first` is the lowest number of the workers of a launcher that has joined the run."""
        import zmq  # only where there is a coordinator

        from stretto.security import HEAD, use_keys, worker_keys

        assert servers.coordinator_at is not None
        self._context = zmq.Context()
        self._socket: Any = self._context.socket(zmq.DEALER)
        name = HEAD if first is None else b"launcher %d" % first
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.SNDTIMEO, 0)
        use_keys(self._socket, name, worker_keys(servers.keys_of(name)))
        self._socket.connect(f"tcp://{servers.coordinator_at}")
        self._reports: dict[int, bytes] = {}
        self._failures, self._members = Failures(), MembersView()
        self._run_ended: RunEnded | None = None
        self.replies = 0
        """Number of replies and notices of the coordinator."""
        self._again, self._no_wait = zmq.Again, zmq.NOBLOCK
        self.watch()

    def gone(self, worker: int, life: int, why: str, will_return: bool, rank: int = 0) -> None:
        """Report that a rank of this incarnation of a worker has exited, and whether the worker will be restarted."""
        self._reports[worker] = msgspec.msgpack.encode(ProcessExited(worker, life, why, will_return, rank))
        self._send(self._reports[worker])

    def repeat(self) -> None:
        """Report all exits again."""
        for report in self._reports.values():
            self._send(report)

    def watch(self) -> None:
        """Ask for failures; repeated, since the coordinator may have been restarted."""
        self._send(msgspec.msgpack.encode(WatchFailures()))

    def watch_members(self) -> None:
        """Ask for the workers of the run; the reply is in `members` later."""
        self._send(msgspec.msgpack.encode(WatchMembers()))

    def failures(self) -> Failures:
        """Return the failures of which the coordinator has notified this launcher."""
        self._receive()
        return self._failures

    def members(self) -> MembersView:
        """Return the workers of the run by the newest reply of the coordinator."""
        self._receive()
        return self._members

    def end_run(self) -> None:
        """Ask that all workers leave; repeated, since the coordinator may have been restarted."""
        self._send(msgspec.msgpack.encode(EndRun()))

    def report_end(self, why: str, limit_ms: int) -> None:
        """Let the coordinator notify the launchers that joined; wait until it has, within the limit."""
        self._send(msgspec.msgpack.encode(RunEnded(why)))
        limit = time.monotonic() + limit_ms / 1000
        while self.run_ended() is None and (left_s := limit - time.monotonic()) > 0:
            self._socket.poll(int(left_s * 1000) + 1)

    def run_ended(self) -> str | None:
        """Return the reason why the run has ended early; None if it has not."""
        self._receive()
        return self._run_ended.why if self._run_ended is not None else None

    def end_joined(self) -> None:
        """Report that this launcher, which joined the run, has ended."""
        self._send(msgspec.msgpack.encode(LauncherEnded()))

    def _receive(self) -> None:
        with contextlib.suppress(self._again):
            while True:
                reply: LauncherReply = _REPLY.decode(self._socket.recv(self._no_wait))
                self.replies += 1
                match reply:
                    case Failures():
                        self._failures = reply
                    case MembersView():
                        self._members = reply
                    case RunEnded():
                        self._run_ended = reply

    def _send(self, report: bytes) -> None:
        """Send without waiting. A coordinator that receives nothing detects the failure by its timeout."""
        with contextlib.suppress(self._again):
            self._socket.send(report)

    def close(self, limit_ms: int = 0) -> None:
        """Close the connection; drop reports that are not sent within the limit."""
        self._context.destroy(linger=limit_ms)
