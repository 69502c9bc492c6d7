"""A shard's server and its replica: two processes of which one serves, and the other hears all that the first hears.

Who holds a lock serves. It hands on every message before it takes it, over a Unix socket; what has been written there
outlives its writer. So when that socket has ended and the lock is free, the server is dead, and its replica has heard
whatever anybody was answered for: it goes on in its place, and nothing is done again. This is chain replication (van
Renesse and Schneider 2004) with a chain of two whose tail is known to be alive by the kernel, not by its answers.

A file beside the lock says who may follow. A replica that takes too long is given up: it may not.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from stretto.server.doors import log

AWAITED_S = 30.0
"""How long a server waits for its replica before it serves: a process that imports torch takes seconds."""
LOOK_S = 0.005
"""How often a replica whose server fell silent looks whether it is dead."""
STAND_S = 0.1
"""How often who only stands by looks the same."""
STOP_S = 0.2
"""How often a replica that hears nothing looks whether it is to end."""
NOBODY = 0
SAME_S = 2.0
"""The kernel's clock moves by less, and a process number does not come again so soon."""
_NOTE = struct.Struct("<qqqd")
_GREETING = struct.Struct("<dq")
_HEAD = struct.Struct("<dI")
_LENGTH = struct.Struct("<Q")


class GivenUpError(Exception):
    """A replica's server goes on without it."""


class Reading:
    """The server's clock as of the message that is being taken: server and replica see the same.

    >>> clock = Reading(2.5)
    >>> clock()
    2.5
    """

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        """The seconds of `time.monotonic`."""
        return self.now


class Note(NamedTuple):
    """Which process serves, or did last, and which may go on in its place; `NOBODY` where there is none.

    `berth` is that of the one that serves: 0 or 1, for server and replica keep their cuts apart. `born` is when the
    heir was started: another process may have its number later.
    """

    server: int = NOBODY
    heir: int = NOBODY
    berth: int = 0
    born: float = math.nan


class Lock:
    """Who serves a shard. Let go of by the end of the process that has it, and by nothing else."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = _path(folder, name)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.link = folder / f"{name}.link"
        """Where a replica finds the server."""
        self.berth = 0
        """That of this process."""

    def take(self) -> bool:
        """Take it if nobody has it. Who has it takes it again."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    @property
    def noted(self) -> Note:
        """What the file says now."""
        return _read(self._path)

    def note(self, heir: int) -> None:
        """This process serves, and so may that one after it."""
        os.pwrite(self._file, _NOTE.pack(*Note(os.getpid(), heir, self.berth, _born(heir))), 0)

    def leave_to_heir(self) -> bool:
        """Let go of it again if another process is alive that may have it."""
        noted = self.noted
        if not abs(_born(noted.heir) - noted.born) < SAME_S:  # NaN is not, either
            return False
        fcntl.flock(self._file, fcntl.LOCK_UN)
        return True


def noted(folder: Path, name: str) -> Note:
    """What the file beside a lock says."""
    return _read(_path(folder, name))


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.lock"


def _read(path: Path) -> Note:
    try:
        return Note(*_NOTE.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return Note()


def _born(process: int) -> float:
    """When a process was started; NaN if it is none."""
    try:
        return psutil.Process(process).create_time() if process != NOBODY else math.nan
    except psutil.NoSuchProcess:
        return math.nan


@dataclass
class Line:
    """What one service of a server says to that of its replica, or hears."""

    lock: Lock
    link: socket.socket | None
    clock: Reading
    follows: bool = False
    """Whether this is the replica's end."""

    def hand_on(self, name: bytes, frames: Sequence[Any]) -> None:
        """Before a message is taken: the replica has it, too. One that takes too long, or is gone, is done without."""
        self.clock.now = time.monotonic()
        if self.link is None:
            return
        parts: list[Any] = [name, *(memoryview(one) for one in frames)]
        head = [_HEAD.pack(self.clock.now, len(parts)), *(_LENGTH.pack(len(one)) for one in parts)]
        try:
            self.link.sendall(b"".join(head))
            for one in parts:
                self.link.sendall(one)
        except OSError as error:
            self.lock.note(NOBODY)  # before the link ends: the replica looks then
            log(f"goes on without its replica ({error})")
            self.link.close()
            self.link = None

    def follow(self, stop: threading.Event) -> Iterator[tuple[bytes, list[bytearray]]]:
        """What the server hears, until it is dead and this process serves. Raises GivenUpError when it may not."""
        if not self.follows:
            return
        assert self.link is not None
        with contextlib.suppress(EOFError, ConnectionError):
            while not stop.is_set():
                at, count = _HEAD.unpack(_exactly(self.link, _HEAD.size, stop))
                lengths = _LENGTH.iter_unpack(_exactly(self.link, count * _LENGTH.size, stop))
                name, *frames = [_exactly(self.link, one, stop) for (one,) in lengths]
                self.clock.now = at
                yield bytes(name), frames
        self.link.close()
        self.link = None
        self._succeed(stop)

    def _succeed(self, stop: threading.Event) -> None:
        while not stop.is_set():
            noted = self.lock.noted
            if os.getpid() not in (noted.server, noted.heir):
                raise GivenUpError("was given up by its server, for it took too long")
            if self.lock.take():
                if self.lock.noted.heir == os.getpid():
                    self.lock.note(NOBODY)
                    log("goes on in the place of the server, which is dead")
                return
            time.sleep(LOOK_S)


def _exactly(link: socket.socket, length: int, stop: threading.Event | None = None) -> bytearray:
    """So many bytes. Raises EOFError at the end, or when told to stop; without that TimeoutError."""
    octets = bytearray(length)
    view, at = memoryview(octets), 0
    while at < length:
        try:
            got = link.recv_into(view[at:])
        except TimeoutError:
            if stop is None:
                raise
            if not stop.is_set():
                continue
            got = 0
        if not got:
            raise EOFError
        at += got
    return octets


# --- how they meet --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """What server and replica have in common: a line for each service, and the number of the pair's birth."""

    lines: Sequence[Line]
    birth: int


def meet(lock: Lock, services: int, patience_s: float) -> Pair:
    """Serve, or follow who does. Returns once it is known which; who came too late to follow waits to serve alone."""
    while not lock.take() or lock.leave_to_heir():
        found = _join(lock, services)
        if found is not None:
            return found
        time.sleep(STAND_S)
    before = lock.noted
    is_first, lock.berth = before.server == NOBODY, before.berth
    lock.note(NOBODY)
    birth = time.monotonic_ns()
    lines = _await_replica(lock, services, birth, patience_s) if is_first else []
    return Pair(lines or [Line(lock, None, Reading(time.monotonic())) for _ in range(services)], birth)


def _await_replica(lock: Lock, services: int, birth: int, patience_s: float) -> list[Line]:
    """Lines to the replica, one a service; none if it does not come."""
    lock.link.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener, _near(lock.link) as near:
        listener.bind(near)
        listener.listen(services)
        listener.settimeout(AWAITED_S)
        lines: list[Line] = []
        try:
            for _ in range(services):
                link, _ = listener.accept()
                link.settimeout(patience_s)
                lines.append(Line(lock, link, Reading(time.monotonic())))
                link.sendall(_GREETING.pack(lines[-1].clock.now, birth))
            (heir,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
        except (OSError, EOFError) as error:
            log(f"serves without a replica ({error or 'it has ended'})")
            return []
        finally:
            lock.link.unlink(missing_ok=True)
    lock.note(heir)
    return lines


def _join(lock: Lock, services: int) -> Pair | None:
    """Follow who serves; None where nobody waits for a replica."""
    lines: list[Line] = []
    try:
        for _ in range(services):
            link = socket.socket(socket.AF_UNIX)
            lines.append(Line(lock, link, Reading(0.0), follows=True))
            with _near(lock.link) as near:
                link.connect(near)
            link.settimeout(AWAITED_S)
            lines[-1].clock.now, birth = _GREETING.unpack(_exactly(link, _GREETING.size))
            link.settimeout(STOP_S)
        link.sendall(_LENGTH.pack(os.getpid()))
    except (OSError, EOFError):
        for line in lines:
            if line.link is not None:
                line.link.close()
        return None
    lock.berth = 1
    return Pair(lines, birth)


@contextlib.contextmanager
def _near(path: Path) -> Iterator[str]:
    """A short name of a path: the address of a Unix socket holds some hundred bytes."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        short = Path(f"/proc/self/fd/{folder}")
        yield str(short / path.name if short.exists() else path)
    finally:
        os.close(folder)
