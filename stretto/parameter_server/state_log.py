"""Log of a service's inputs on disk: a restarted process restores the state by processing them again.

A log begins with a state and continues with the inputs since. It outlives the process and not the machine: records are
not synced. When the disk is full the log is removed and the service continues without it; a restarted process that
finds none refuses its clients. As soon as there is space again a new log begins with the state.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec

from stretto.errors import LogError, explain
from stretto.membership.write_ahead_log import WriteAheadLog, read
from stretto.parameter_server import messages as m
from stretto.parameter_server.framing import Chunks, blobs_of, chunks_of
from stretto.whole_files import written_whole

if TYPE_CHECKING:
    from stretto.parameter_server.service import Service

COMPACTED_BYTES = 4 << 20
"""Number of bytes of a log after which a new one begins with the state, so that a restart processes few inputs."""
RETRY_S = 1.0
"""Seconds between two attempts to begin a new log on a full disk."""


class RecordedClock:
    """A clock that advances before each message only, so that each is processed again in the same way."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self.now = read()

    def __call__(self) -> float:
        """Return the time at which the present message arrived."""
        return self.now

    def advance(self) -> float:
        """Set the clock to the present time, and return it."""
        self.now = self._read()
        return self.now


class DurableHandler(Protocol):
    """A request handler whose state can be stored."""

    def state(self) -> Any:
        """Return the state as plain values; None while an operation is in progress, whose state is not stored."""
        ...

    def load_state(self, state: Any) -> None:
        """Load a state."""
        ...


class Received(msgspec.Struct, array_like=True, tag=True):
    """A message of a worker, with the bytes of its tensors."""

    now: float
    worker: int
    incarnation: int
    header: m.Header
    tensors: list[bytes]


class Ended(msgspec.Struct, array_like=True, tag=True):
    """The end of an incarnation."""

    now: float
    notice: m.IncarnationEnded


class SessionState(msgspec.Struct, array_like=True):
    """A worker's session: its stored replies, each with the position of its tensors in `State.results`."""

    last: int
    replies: list[tuple[m.Header, int]]


class State(msgspec.Struct, array_like=True, tag=True):
    """The state of a service after all inputs before: of its handler, incarnations and sessions."""

    now: float
    handler: Any
    incarnations: tuple[dict[int, int], list[int], list[int]]
    sessions: dict[int, SessionState]
    results: list[list[bytes]]


Record: TypeAlias = Received | Ended | State
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


class StateLog:
    """The log of one service. Raises LogError if it is `restarted` and the earlier process has removed the log."""

    def __init__(
        self,
        path: Path,
        handler: DurableHandler,
        clock: RecordedClock,
        restarted: bool = False,
        compacted_bytes: int = COMPACTED_BYTES,
    ) -> None:
        self._path, self._handler, self._clock, self._compacted_bytes = path, handler, clock, compacted_bytes
        if restarted and not path.exists():
            problem = "the coordinator was lost with the state of the batch dispatcher, which it could not write"
            got, expected = f"no {path}", "space on the disk of the run directory"
            raise LogError(explain(problem, got=got, expected=expected, to_type="stretto run --resume RUN ..."))
        self._log: WriteAheadLog | None = WriteAheadLog(path, synced=False)
        self._size = 0
        self._retry_at = 0.0

    def restore(self, service: Service) -> None:
        """Load the state at the beginning of the log and process the inputs since. A new log begins with the state."""
        texts = read(self._path)
        if not texts:
            self._append(service.state(self._clock.now, self._handler.state()))
        for text in texts:
            record = _DECODER.decode(text)
            self._clock.now, self._size = record.now, self._size + len(text)
            match record:
                case State():
                    self._handler.load_state(record.handler)
                    service.load_state(record)
                case Received(_, worker, incarnation, header, blobs):
                    service.process(worker, incarnation, header, chunks_of(header, blobs))
                case Ended(_, notice):
                    service.process_end(notice)

    def received(self, worker: int, incarnation: int, header: m.Header, tensors: list[Chunks]) -> None:
        """Append a message."""
        now = self._clock.advance()
        if self._log is not None:
            self._append(Received(now, worker, incarnation, header, blobs_of(tensors)))

    def ended(self, notice: m.IncarnationEnded) -> None:
        """Append the end of an incarnation."""
        self._append(Ended(self._clock.advance(), notice))

    def compact(self, service: Service) -> None:
        """Begin a new log with the state of the service if this one is long, or was removed."""
        is_due = self._size > self._compacted_bytes if self._log is not None else self._clock.now > self._retry_at
        if not is_due or (state := self._handler.state()) is None:
            return
        try:
            with written_whole(self._path) as part:
                log = WriteAheadLog(part, synced=False)
                text = _ENCODER.encode(service.state(self._clock.now, state))
                log.append(text)
                log.flush()
        except (OSError, LogError):
            self._retry_at = self._clock.now + RETRY_S
            return
        if self._log is not None:
            self._log.abandon()
        self._log, self._size = log, 0

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._log is not None:
            self._log.abandon()
        self._log, self._retry_at = None, math.inf

    def _append(self, record: Record) -> None:
        if self._log is None:
            return
        text = _ENCODER.encode(record)
        try:
            self._log.append(text)
            self._log.flush()
            self._size += len(text)
        except LogError as error:
            problem = f"{error}; the batch dispatcher continues without it"
            print(problem, file=sys.stderr, flush=True)
            self._log.abandon()
            self._path.unlink(missing_ok=True)  # it lacks this input
            self._log, self._retry_at = None, self._clock.now + RETRY_S
