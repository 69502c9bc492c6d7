"""Files that are written whole or not at all; what a path may name, and what is replaced, is decided here."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PART = ".part"
"""Suffix of a file that is not complete yet."""
MOST_LINKS = 40
"""Number of symbolic links that are followed in turn."""
RESERVE_BYTES = 1 << 24
"""Room on the disk that files of other machines do not take, for the logs of the run."""


@contextlib.contextmanager
def written_whole(path: Path, synced: bool = False) -> Iterator[Path]:
    """Yield a new path; the file that the block writes there replaces the file `path` when the block ends.

    A reader finds the file from before or the new one, complete; the permissions of a file from before stay. After an
    exception `path` is what it was. A killed process leaves a file `.NAME.*.part`. With `synced` the new file is on the
    disk when the block has ended, whatever happens to the machine then. A symbolic link stays: the file that it names
    is replaced. A device, a pipe, or an open file of this process (`/dev/stdout`) stays, too: the new file is copied
    into it. Raises OSError.

    >>> import tempfile
    >>> with written_whole(Path(tempfile.mkdtemp()) / "notes.txt") as part:
    ...     part.write_text("complete")
    8
    """
    sys.audit("open", str(path), "w", os.O_WRONLY | os.O_CREAT)  # as it is for a file that is opened under its name
    if is_stream(path):
        with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
            yield Path(folder) / path.name
            with (Path(folder) / path.name).open("rb") as source, _opened(path) as stream:
                shutil.copyfileobj(source, stream)
        return
    path = _behind_links(path)
    part = path.with_name(f".{path.name}.{os.urandom(4).hex()}{PART}")
    try:
        yield part
        if path.exists():
            part.chmod(path.stat().st_mode & 0o777)
        if synced:
            sync(part)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    if synced:
        sync(path.parent)


def is_stream(path: Path) -> bool:
    """Return True for a device, a pipe, a socket or an open file of this process, which no other file may replace."""
    try:
        behind = _behind_links(path)
    except OSError:
        return False
    is_special = behind.exists() and not behind.is_file() and not behind.is_dir()
    return is_special or _descriptor(behind) is not None


def _behind_links(path: Path) -> Path:
    """Return the path that symbolic links lead to, or that of the first open file of this process on the way."""
    for _ in range(MOST_LINKS):
        if _descriptor(path) is not None or not path.is_symlink():
            return path
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _descriptor(path: Path) -> int | None:
    """Return the number of the open file that a path such as /dev/fd/1 names, or None."""
    is_open_file = path.name.isdecimal() and os.path.realpath(path.parent) == f"/proc/{os.getpid()}/fd"
    return int(path.name) if is_open_file else None


def _opened(path: Path) -> BinaryIO:
    """Open a stream for writing. An open file of this process continues at its place."""
    path = _behind_links(path)
    number = _descriptor(path)
    if number is None:
        return path.open("wb")
    sys.stdout.flush()
    return open(os.dup(number), "wb")


def free_bytes(file: int) -> int:
    """Return the room for this user on the disk of an open file."""
    disk = os.fstatvfs(file)
    return disk.f_bavail * disk.f_frsize


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
