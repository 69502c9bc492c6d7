"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

PART = ".part"
"""Suffix of a file that is not complete yet."""
RESERVE_BYTES = 1 << 24
"""Room on the disk that files of other machines do not take, for the logs of the run."""


@contextlib.contextmanager
def written_whole(path: Path, synced: bool = False) -> Iterator[Path]:
    """Yield a new path beside `path`; the file that the block writes there replaces `path` when the block ends.

    A reader finds the file from before or the new one, complete; the permissions of a file from before stay. After an
    exception `path` is what it was. A killed process leaves a file `.NAME.*.part`. With `synced` the new file is on the
    disk when the block has ended, whatever happens to the machine then. Raises OSError.

    >>> import tempfile
    >>> with written_whole(Path(tempfile.mkdtemp()) / "notes.txt") as part:
    ...     part.write_text("complete")
    8
    """
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
