"""Events of workers that do not see the run directory: the coordinator appends their lines. State machines of both
sides.

The number of a line is its place among the lines of its process in the event log, from 0. A restarted coordinator
counts the lines in the file, so a line that is sent again is written once.

    worker                                 coordinator
      | -- AppendEvents(-1, nothing) -------> |   its first message; every message is repeated until there is a reply
      | <- EventsAppended(12) --------------- |   the log has 12 lines of this process, of all its incarnations
      | -- AppendEvents(12, 3 lines) -------> |   appended
      | <- EventsAppended(15) --------------- |
      | -- AppendEvents(15, 3 lines) -------> |
      | <- EventsAppended(16, disk full) ---- |   one line was appended: the others are sent again, later

A worker has one message under way. Its processes write all their events over this way, or none: lines that a process
appends to the file itself would be counted by a restarted coordinator only.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from stretto.errors import LogError
from stretto.events import Event, LogFile, of_process, process_name
from stretto.run_dir import section_folder

CHUNK_BYTES = 60_000
"""Largest number of bytes of the lines in a message. A longer line is replaced by a warning."""
UNKNOWN = -1
"""Number in the first message of a process, which has no lines."""
LARGEST_NUMBER = 1 << 53

Kind = Literal[
    "start",
    "warning",
    "log",
    "progress",
    "update_applied",
    "evaluation",
    "epoch",
    "check",
    "error",
    "end",
    "samples_reassigned",
    "batches_lost",
    "samples_left",
    "generation_changed",
    "shares",
    "written",
    "checkpoint",
    "section",
]
"""Kinds of events that a worker writes. Only these are counted: others write the rest, in the names of workers too."""


class AppendEvents(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Whole lines for the event log, and the number of the first."""

    number: Annotated[int, msgspec.Meta(ge=UNKNOWN, le=LARGEST_NUMBER)]
    lines: bytes = b""


class EventsAppended(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Number of lines of the process in the log, and the reason why lines of the message are not among them."""

    count: int
    problem: str = ""


_WRITER = re.compile(rb"events (0|[1-9]\d{0,6})\.(0|[1-9]\d{0,6}) rank (0|[1-9]\d{0,2}) section ([1-9]\d{0,2})")
"""Names of the connections of a `Writer`."""
_DECODER = msgspec.msgpack.Decoder(AppendEvents)
_ENCODER = msgspec.msgpack.Encoder()


class Writer(NamedTuple):
    """A process that sends events, and the section of the script that the events are of."""

    worker: int
    incarnation: int
    rank: int = 0
    section: int = 1

    @property
    def process(self) -> str:
        """Name of the process in its events."""
        return process_name(self.worker, self.rank)

    @property
    def connection(self) -> bytes:
        """Name of the connection.

        >>> Writer(3, 1).connection
        b'events 3.1 rank 0 section 1'
        """
        return b"events %d.%d rank %d section %d" % self


class _Head(msgspec.Struct):
    """Fields that every event of a worker has."""

    event: Kind
    t: float
    process: str
    worker: int
    rank: int = 0


class LineSender:
    """A worker's side: the lines that were sent last, until the coordinator has appended them."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._number = UNKNOWN
        self._chunk = b""
        self.problem = ""
        """Reason why lines could not be written, by the last reply."""

    def message(self, lines: bytearray) -> AppendEvents | None:
        """Return the message that is due, if there is one; further lines for it are removed from `lines`."""
        if self._number == UNKNOWN:
            return AppendEvents(UNKNOWN) if lines else None
        if not self._chunk and lines:
            self._chunk = self._taken(lines)
        return AppendEvents(self._number, self._chunk) if self._chunk else None

    def receive(self, reply: EventsAppended) -> bool:
        """Take a reply; return False if it was sent before, so that nothing follows from it."""
        is_new = reply.count > self._number
        if is_new and self._number != UNKNOWN:
            self._chunk = b"".join(_lines(self._chunk)[reply.count - self._number :])
        self._number = max(self._number, reply.count)
        self.problem = reply.problem
        return is_new or bool(reply.problem)

    def _taken(self, lines: bytearray) -> bytes:
        """Remove and return whole lines of at most `CHUNK_BYTES`."""
        size = lines.find(b"\n") + 1
        if size > CHUNK_BYTES:
            del lines[:size]
            return _refusal(self._writer, f"got {size} bytes, expected at most {CHUNK_BYTES}")
        end = lines.rfind(b"\n", 0, CHUNK_BYTES) + 1
        chunk = bytes(lines[:end])
        del lines[:end]
        return chunk


class EventAppender:
    """The coordinator's side: appends lines to the event logs of a run, each once, however often it is sent."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._logs: dict[int, _CountedLog] = {}
        self._newest: dict[tuple[int, int], int] = {}

    needs_log = False

    def reply(self, name: bytes, message: bytes) -> bytes | None:
        """Append the lines of a message and return the reply; None if the connection is not a writer's."""
        match = _WRITER.fullmatch(name)
        if match is None:
            return None
        writer = Writer(*(int(number) for number in match.groups()))
        return _ENCODER.encode(self.receive(writer, _DECODER.decode(message)))

    def receive(self, writer: Writer, message: AppendEvents) -> EventsAppended:
        """Append the lines that the log does not have yet. Raises ValueError for a message that no worker sends.

        A line that is not an event of the sender is replaced by a warning.
        """
        process = writer.worker, writer.rank
        if writer.incarnation < (newest := self._newest.get(process, 0)):
            raise ValueError(f"got events of incarnation {writer.incarnation}, expected those of {newest}")
        if not message.lines.endswith(b"\n") and message.lines:
            raise ValueError("got a part of a line, expected whole lines")
        self._newest[process] = writer.incarnation
        try:
            return self._log(writer.section).append(writer, message)
        except OSError as error:
            return EventsAppended(UNKNOWN, f"the event log {error.filename} cannot be read: {error.strerror}")

    def _log(self, section: int) -> _CountedLog:
        if section not in self._logs:
            self._logs[section] = _CountedLog(section_folder(self._run, section) / "events.jsonl")
        return self._logs[section]


class _CountedLog:
    """Event log of a section, and the number of lines of each process in it."""

    def __init__(self, path: Path) -> None:
        self._file, self._counts = LogFile(path), _counted(path)

    def append(self, writer: Writer, message: AppendEvents) -> EventsAppended:
        """Append the lines of a message that are new."""
        count = self._counts[writer.process]
        new = [_checked(writer, line) for line in _lines(message.lines)[max(count - message.number, 0) :]]
        unwritten, problem = bytearray(b"".join(new)), ""
        try:
            self._file.drain(unwritten)
        except LogError as error:
            problem = str(error)
        count = max(count, message.number) + len(new) - unwritten.count(b"\n")
        self._counts[writer.process] = count
        return EventsAppended(count, problem)


def _counted(path: Path) -> Counter[str]:
    """Return the number of lines of each process in a file, of the kinds that workers write."""
    counts: Counter[str] = Counter()
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if (head := _head(line)) is not None:
                    counts[head.process] += 1
    return counts


def _head(line: bytes) -> _Head | None:
    try:
        return msgspec.json.decode(line, type=_Head)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _checked(writer: Writer, line: bytes) -> bytes:
    """Return the line, or a warning that it was refused. Readers decode lines in the same way."""
    try:
        head = msgspec.convert(msgspec.json.decode(line, type=Event), _Head)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        return _refusal(writer, str(error))
    if (head.process, head.worker, head.rank) != (writer.process, writer.worker, writer.rank):
        return _refusal(writer, f"got an event of {head.process[:20]!r}, expected one of {writer.process!r}")
    return line


def _refusal(writer: Writer, why: str) -> bytes:
    text = f"an event of {writer.process} is lost, since the coordinator does not take it: {why}"
    event = {"event": "warning", "t": 0.0, **of_process(writer.worker, writer.rank), "text": text}
    return msgspec.json.encode(event) + b"\n"


def _lines(data: bytes) -> list[bytes]:
    return [line + b"\n" for line in data.split(b"\n")[:-1]]
