"""Messages in which a worker that does not see the run directory writes and reads files there, through the coordinator.

Every upload has a connection of its own, and so has a series of other requests.

    worker                                     coordinator
      | -- Part(0, "state.safetensors", bytes) -> |   written to a folder in `.incoming` of the run directory
      | -- Part(1, "state.safetensors", bytes) -> |   at most WINDOW parts are under way
      | <- Received(1) -------------------------- |   number of the part that is expected next; others are dropped
      | <- Received(2) -------------------------- |
      | -- Call(1, Publish(2, checkpoint 120)) -> |   synced, checked and renamed, in a thread
      | <- (empty) ------------------------------ |   not done yet: the worker repeats its message
      | -- Call(1, Publish(2, checkpoint 120)) -> |
      | <- Answer(1) ---------------------------- |

A message that is repeated is processed once. A restarted coordinator knows of no upload, and says so: the worker
begins its upload again. No message has a path: the kinds of files are fixed, and so are their names.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec

from stretto.checkpoint.model_file import FINAL, LAST
from stretto.run_dir import CHECKPOINTS, section_folder

PART_BYTES = 60_000
"""Largest number of bytes in a part: messages of members wait for one part at most."""
WINDOW = 16
"""Number of parts that are sent before the first of them is confirmed."""
READ_BYTES = 1 << 20
"""Largest number of bytes of a file in the answer to a request."""
CHECKPOINTS_FOUND = list[tuple[int, int, int]]
"""Section, round, and number among the checkpoints of the same round."""
CONTENT = "content"
"""Name of the file in an upload that is no checkpoint."""
UNKNOWN = -1
"""Number in the reply to a part of an upload that the coordinator does not know."""
LARGEST_NUMBER = 1 << 53
MAX_SECTION = 999

Number = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_NUMBER)]
SectionNumber = Annotated[int, msgspec.Meta(ge=1, le=MAX_SECTION)]
NAMES = r"\A(content|manifest\.json|state\.safetensors|worker-(0|[1-9][0-9]{0,6})\.safetensors)\Z"
FileName = Annotated[str, msgspec.Meta(pattern=NAMES)]
Kind: TypeAlias = Literal["final", "last", "predictions", "random", "residual"]
PATHS: dict[Kind, str] = {
    "final": FINAL,
    "last": LAST,
    "predictions": "final.predictions.npy",
    "random": "final.random",
    "residual": "residuals/worker-{}.safetensors",
}
"""Names of the single files in the folder of a section; that of a residual has the number of the worker that left."""


class _Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    pass


class CheckpointOf(_Message, frozen=True):
    """The checkpoint of a round, as the target of an upload."""

    section: SectionNumber
    round: Number


class FileOf(_Message, frozen=True):
    """A file of a section, as the target of an upload. `number` is the worker that a residual is of."""

    section: SectionNumber
    kind: Kind
    number: Number = 0

    def path(self, run: Path) -> Path:
        """Return the path of the file in a run directory."""
        return section_folder(run, self.section) / PATHS[self.kind].format(self.number)

    def published(self, run: Path) -> None:
        """Remove the file that this one, which is in its place, replaces: the final model replaces the last one."""
        if self.kind == "final":
            FileOf(self.section, "last").path(run).unlink(missing_ok=True)


Target: TypeAlias = CheckpointOf | FileOf


class Part(_Message, frozen=True):
    """Next bytes of a file of the upload; parts are numbered from 0."""

    number: Number
    name: FileName
    data: Annotated[bytes, msgspec.Meta(max_length=PART_BYTES)]


class Publish(_Message, frozen=True):
    """Request to put the files of an upload of this many parts in their place."""

    parts: Number
    target: Target


class HighestRound(_Message, frozen=True):
    """Request for the round of the newest checkpoint of a section; 0 without any."""

    section: SectionNumber


class RemoveOlder(_Message, frozen=True):
    """Request to remove the oldest checkpoint of a section, but not the newest complete one; the result is its name."""

    section: SectionNumber


class CheckpointFile(_Message, frozen=True):
    """A file of a checkpoint: of the checkpoint of this number among several of the same round."""

    section: SectionNumber
    round: Number
    occurrence: Number
    name: FileName


class ListCheckpoints(_Message, frozen=True):
    """Request for section, round and number of all checkpoints, the newest first, as `CHECKPOINTS_FOUND`.

    `resumed`, here and below: of the run that is resumed, instead of this run.
    """

    resumed: bool


class ReadFile(_Message, frozen=True):
    """Request for the bytes of a file from this offset on, at most `READ_BYTES`; none at its end."""

    resumed: bool
    file: CheckpointFile | FileOf
    offset: Number


class DataOf(_Message, frozen=True):
    """Request for the digest of a section's data, from the `run.json` of the section."""

    resumed: bool
    section: SectionNumber


class RemoveResidual(_Message, frozen=True):
    """Request to remove the residual of a worker that left, since another worker has added it to its own."""

    section: SectionNumber
    worker: Number


class BeginSection(_Message, frozen=True):
    """Request to make the folder of a section, with these facts in its `run.json`."""

    section: SectionNumber
    data: Annotated[str, msgspec.Meta(max_length=1000)]
    absent: Annotated[list[Number], msgspec.Meta(max_length=10_000)]


Request: TypeAlias = (
    Publish | HighestRound | RemoveOlder | BeginSection | RemoveResidual | ListCheckpoints | ReadFile | DataOf
)


class Call(_Message, frozen=True):
    """A request; those of a connection are numbered from 1. It is repeated until there is an Answer."""

    number: Number
    request: Request


class Received(_Message, frozen=True):
    """Number of the part that is expected next, or the problem that ended the upload."""

    number: int
    problem: str = ""
    errno: int = 0


class Answer(_Message, frozen=True):
    """Result of a request, or the reason why it could not be done."""

    number: int
    result: bytes = b""
    problem: str = ""
    errno: int = 0


_SENDER = re.compile(rb"files (0|[1-9]\d{0,6})\.(0|[1-9]\d{0,6}) ([0-9a-f]{16})")


class Sender(NamedTuple):
    """Incarnation of a worker that sends files, and the random number of the connection."""

    worker: int
    incarnation: int
    connection: str

    @property
    def name(self) -> bytes:
        """Name of the connection.

        >>> Sender(3, 1, "00112233aabbccdd").name
        b'files 3.1 00112233aabbccdd'
        """
        return f"files {self.worker}.{self.incarnation} {self.connection}".encode()


def sender_of(name: bytes) -> Sender | None:
    """Return the sender whose connection has this name; None for the connection of another service."""
    match = _SENDER.fullmatch(name)
    return Sender(int(match[1]), int(match[2]), match[3].decode()) if match is not None else None


def checkpoint_folder(run: Path, section: int) -> Path:
    """Return the folder of the checkpoints of a section."""
    return section_folder(run, section) / CHECKPOINTS


class SendWindow:
    """A worker's side of an upload: the parts that are under way, without the connection that carries them."""

    def __init__(self, parts: Iterator[tuple[str, memoryview]]) -> None:
        self._parts = _numbered(parts)
        self._under_way: deque[Part] = deque()
        self._is_over = False
        self.confirmed = 0
        """Number of parts that the coordinator has."""

    def new_parts(self) -> list[Part]:
        """Return the parts to send now: as many as the window has room for."""
        new: list[Part] = []
        while not self._is_over and len(self._under_way) < WINDOW:
            part = next(self._parts, None)
            self._is_over = part is None
            if part is not None:
                self._under_way.append(part)
                new.append(part)
        return new

    @property
    def under_way(self) -> list[Part]:
        """Parts that are sent and not confirmed, to be sent again when no reply comes."""
        return list(self._under_way)

    def receive(self, reply: Received) -> bool:
        """Take a reply; return True if it confirms further parts."""
        is_news = reply.number > self.confirmed
        while self._under_way and self._under_way[0].number < reply.number:
            self._under_way.popleft()
        self.confirmed = max(self.confirmed, reply.number)
        return is_news


def _numbered(chunks: Iterator[tuple[str, memoryview]]) -> Iterator[Part]:
    """Yield the parts of files; an empty file has one part."""
    number = 0
    for name, chunk in chunks:
        for start in range(0, max(len(chunk), 1), PART_BYTES):
            yield Part(number, name, bytes(chunk[start : start + PART_BYTES]))
            number += 1
