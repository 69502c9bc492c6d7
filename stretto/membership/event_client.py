"""A worker's connection for its events, where it does not see the run directory.

It never ends or stops the training: events that the coordinator has not taken stay in memory, as for a full disk.
"""

from __future__ import annotations

import functools
import threading
import time
from typing import Any

import msgspec
import zmq

from stretto.errors import LogError
from stretto.membership.client import side_connection
from stretto.membership.event_lines import AppendEvents, EventsAppended, LineSender, Writer
from stretto.process_config import WorkerConfig
from stretto.security import WorkerKeys, worker_keys

WAIT_S = 0.05
"""Longest time in seconds that training waits for replies to its events."""
CLOSE_S = 10.0
"""Longest time in seconds that the end of a log waits for them."""
POLL_MS = 20
ANSWER_S = 1.0
"""Time in seconds after which a message without a reply is repeated."""
SILENT_S = 5.0
"""Time in seconds without a reply after which the user is notified."""

_ENCODER = msgspec.msgpack.Encoder()
_REPLY = msgspec.msgpack.Decoder(EventsAppended)


class RemoteLog:
    """Event log of a process at the coordinator. Lines are in the log once the coordinator has replied.

    Hooks of the backward pass write events in threads of their own, hence the lock.
    """

    def __init__(self, writer: Writer, address: str, keys: WorkerKeys | None, failure_timeout_s: float) -> None:
        self._writer, self._address = writer, address
        self._keys, self._failure_timeout_s = keys, failure_timeout_s
        self._sender, self._lock = LineSender(writer), threading.RLock()
        self._dealer: Any = None
        self._sent_at = -ANSWER_S
        self._unanswered_since: float | None = None

    def drain(self, lines: bytearray) -> None:
        """Send lines and remove them from the buffer; after a late reply, without a wait. May raise LogError."""
        with self._lock:
            self._exchange(lines, WAIT_S, is_late=self._silent_s() > WAIT_S)
            if self._sender.problem or self._silent_s() > SILENT_S:
                raise self._error()

    def finish(self, lines: bytearray) -> None:
        """Send lines, wait until they are in the log, and disconnect. Raises LogError if they cannot be written."""
        with self._lock:
            try:
                if not self._exchange(lines, CLOSE_S):
                    raise self._error()
            finally:
                self._disconnect()

    def _exchange(self, lines: bytearray, limit_s: float, is_late: bool = False) -> bool:
        """Send lines and take replies until a limit of time; return True if all lines are in the log."""
        limit = time.monotonic() + limit_s
        while (message := self._sender.message(lines)) is not None:
            self._send_if_due(message)
            if self._connected().poll(0 if is_late else POLL_MS):
                is_late, self._unanswered_since = False, None
                if self._sender.receive(_REPLY.decode(self._connected().recv())):
                    self._sent_at = -ANSWER_S
                if self._sender.problem:
                    return False
            elif is_late or time.monotonic() > limit:
                return False
        return True

    def _send_if_due(self, message: AppendEvents) -> None:
        now = time.monotonic()
        if self._unanswered_since is None:
            self._unanswered_since = now
        if now - self._sent_at >= ANSWER_S:
            try:
                self._connected().send(_ENCODER.encode(message), zmq.NOBLOCK)
            except zmq.Again:  # not connected
                return
            self._sent_at = now

    def _silent_s(self) -> float:
        return time.monotonic() - self._unanswered_since if self._unanswered_since is not None else 0.0

    def _error(self) -> LogError:
        silence = f"the coordinator at {self._address} has taken no events for {self._silent_s():.0f} s"
        return LogError(self._sender.problem or silence)

    def _disconnect(self) -> None:
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer, self._sent_at = None, -ANSWER_S

    def _connected(self) -> Any:
        if self._dealer is None:
            self._dealer = side_connection(self._writer.connection, self._address, self._keys, self._failure_timeout_s)
        return self._dealer


@functools.cache
def remote_log(config: WorkerConfig, section: int) -> RemoteLog:
    """Return the log of a section, the same one at each call: it knows which lines were not taken so far."""
    assert config.coordinator is not None
    writer = Writer(config.worker, config.incarnation, config.rank, section)
    return RemoteLog(writer, config.coordinator, worker_keys(config.keys), config.options.failure_timeout_s)
