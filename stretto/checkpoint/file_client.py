"""A worker's connections for its files, where it does not see the run directory."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import zmq

from stretto.checkpoint.file_messages import (
    Answer,
    Call,
    CheckpointFile,
    FileOf,
    Part,
    Publish,
    ReadFile,
    Received,
    Request,
    Sender,
    SendWindow,
    Target,
)
from stretto.membership.client import side_connection
from stretto.security import WorkerKeys

ANSWER_MS = 1000
"""Time in ms after which messages without a reply are sent again."""
FIRST_MS, DONE_MS = 1, 50
"""First and longest time in ms after which the coordinator is asked again whether it has processed a request."""
SILENT_S = 60.0
"""Time in seconds without a reply, or with none that confirms anything, after which an upload or request fails."""
ATTEMPTS = 3
"""Number of times that an upload is begun, since a restarted coordinator has lost it."""

_ENCODER = msgspec.msgpack.Encoder()
_RECEIVED, _ANSWER = msgspec.msgpack.Decoder(Received), msgspec.msgpack.Decoder(Answer)
Parts = Iterable[tuple[str, memoryview]]


@dataclass(frozen=True)
class FileClient:
    """Address and keys with which this incarnation of a worker connects to the coordinator, for each of its uploads."""

    worker: int
    incarnation: int
    address: str
    keys: WorkerKeys | None
    failure_timeout_s: float

    def upload(self, target: Target, parts: Callable[[], Parts]) -> None:
        """Send files; they are in the run directory, whole, when this returns. Raises OSError.

        `parts` is called once more where the coordinator has lost an upload.
        """
        for attempt in range(ATTEMPTS):
            try:
                with self._connect() as connection:
                    connection.send(iter(parts()), target)
                    return
            except ConnectionResetError:
                if attempt + 1 == ATTEMPTS:
                    raise

    def request(self, request: Request, limit_s: float = SILENT_S) -> bytes:
        """Return the result of a request. Raises OSError; a TimeoutError if the coordinator is silent for the limit."""
        with self._connect() as connection:
            return connection.call(request, limit_s)

    def download(self, resumed: bool, file: CheckpointFile | FileOf, path: Path) -> None:
        """Copy a file of the run directory, or of that of the run that is resumed, to a path here. Raises OSError."""
        with self._connect() as connection, path.open("xb") as copy:
            while data := connection.call(ReadFile(resumed, file, copy.tell())):
                copy.write(data)

    def _connect(self) -> _Connection:
        sender = Sender(self.worker, self.incarnation, os.urandom(8).hex())
        return _Connection(side_connection(sender.name, self.address, self.keys, self.failure_timeout_s))


class _Connection:
    """One connection, for one upload or for requests."""

    def __init__(self, dealer: Any) -> None:
        self._dealer = dealer
        self._calls = 0

    def __enter__(self) -> _Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._dealer.close(linger=0)

    def send(self, chunks: Iterator[tuple[str, memoryview]], target: Target) -> None:
        """Send all parts, and publish them."""
        window, progress_at = SendWindow(chunks), time.monotonic()
        unsent = window.new_parts()
        while unsent or window.under_way:
            self._send(unsent)
            unsent = []
            if (data := self._received(ANSWER_MS)) is None:
                unsent = window.under_way
            elif data:
                reply = _RECEIVED.decode(data)
                _raise_problem(reply)
                if window.receive(reply):
                    progress_at = time.monotonic()
                unsent = window.new_parts()
            _check_silence(progress_at)
        self.call(Publish(window.confirmed, target))

    def call(self, request: Request, limit_s: float = SILENT_S) -> bytes:
        """Return the result of a request, which is repeated until it has been processed."""
        self._calls += 1
        reply_at, wait_ms = time.monotonic(), FIRST_MS
        while True:
            self._send([Call(self._calls, request)])
            data = self._received(ANSWER_MS)
            if data is not None:
                reply_at = time.monotonic()
            if data and (answer := _ANSWER.decode(data)).number == self._calls:
                _raise_problem(answer)
                return answer.result
            if data is not None:
                self._dealer.poll(wait_ms)
                wait_ms = min(2 * wait_ms, DONE_MS)
            _check_silence(reply_at, limit_s)

    def _send(self, messages: Iterable[Part | Call]) -> None:
        for message in messages:
            try:
                self._dealer.send(_ENCODER.encode(message), zmq.NOBLOCK)
            except zmq.Again:  # not connected: the message is repeated
                return

    def _received(self, limit_ms: int) -> bytes | None:
        """Return the next reply, or None if there is none in time."""
        return bytes(self._dealer.recv()) if self._dealer.poll(limit_ms) else None


def _raise_problem(reply: Received | Answer) -> None:
    """Raise the error that a reply names."""
    if reply.problem:
        raise OSError(reply.errno or errno.EIO, reply.problem)
    if reply.number < 0:
        raise ConnectionResetError(errno.ECONNRESET, "the coordinator was restarted and lost the upload")


def _check_silence(since: float, limit_s: float = SILENT_S) -> None:
    if (silent_s := time.monotonic() - since) > limit_s:
        raise TimeoutError(errno.ETIMEDOUT, f"the coordinator has taken nothing for {silent_s:.0f} s")
