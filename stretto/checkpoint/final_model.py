"""Saving of the trained model at the end of a run, with a fallback to other directories on a full disk."""

from __future__ import annotations

import errno
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from stretto.checkpoint.file_messages import PATHS
from stretto.checkpoint.run_files import RunFiles
from stretto.checkpoint.storage import tensor_chunks, write_tensors
from stretto.errors import LogError
from stretto.whole_files import written_whole

NAME = "final"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk."""
Notice = Callable[[str], object]


def save_final(files: RunFiles, tensors: Mapping[str, Tensor], notice: Notice) -> bool:
    """Save the tensors in the run directory and return True; if that fails, save them elsewhere and return False.

    On a full disk older checkpoints of the run are removed, never the newest complete one. Raises LogError if the
    tensors could not be written anywhere.
    """
    target = f"{files.place}/{PATHS['final']}"
    if not files.exists:
        notice(
            f"the run folder {files.place} was removed during the run, and its log and its checkpoints with it; "
            f"the trained model goes to a new {target}"
        )

    def write() -> None:
        files.write("final", lambda: tensor_chunks(tensors))

    problem = _problem_of(write)
    removed = []
    older = files.checkpoints().older()
    while problem is not None and problem.errno in FULL and (path := next(older, None)) is not None:
        removed.append(path.name)
        problem = _problem_of(write)
    if removed:
        notice(f"the disk is full: checkpoints were removed to make room for the trained model: {', '.join(removed)}")
    if problem is None:
        return True
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        place = _unused(folder / f"{files.name}-{NAME}.safetensors")
        if _problem_of(functools.partial(_write_whole, place, tensors)) is None:
            notice(f"{target} cannot be written: {problem.strerror}; the trained model is in {place}")
            return False
    raise LogError(
        f"the trained model is lost: {target} cannot be written: {problem.strerror}; "
        f"nor is there room in {Path.cwd()} or {tempfile.gettempdir()}"
    ) from problem


def _problem_of(write: Callable[[], None]) -> OSError | None:
    """Write a file; return the error that prevented it."""
    try:
        write()
    except OSError as error:
        return error
    return None


def _write_whole(target: Path, tensors: Mapping[str, Tensor]) -> None:
    with written_whole(target) as part:
        write_tensors(part, tensors)


def _unused(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3, ... that does not exist."""
    return next(candidate for candidate in _names(path) if not os.path.lexists(candidate))


def _names(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_stem(f"{path.stem}-{number}")
        number += 1
