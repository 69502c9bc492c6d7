"""Saving of the trained model at the end of a run, with a fallback to other directories on a full disk."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from stretto.checkpoint.storage import Checkpoints, write_tensors
from stretto.errors import LogError
from stretto.run_dir import CHECKPOINTS
from stretto.whole_files import written_whole

NAME = "final"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk."""
Notice = Callable[[str], object]


def save_final(run: Path, tensors: Mapping[str, Tensor], notice: Notice) -> bool:
    """Save the tensors in the run directory and return True; if that fails, save them elsewhere and return False.

    On a full disk older checkpoints of the run are removed, never the newest complete one. Raises LogError if the
    tensors could not be written anywhere.
    """
    target = run / f"{NAME}.safetensors"
    if not run.exists():
        notice(
            f"the run folder {run} was removed during the run, and its log and its checkpoints with it; "
            f"the trained model goes to a new {target}"
        )
    problem = _try_write(target, tensors)
    removed = []
    older = Checkpoints(run / CHECKPOINTS).older()
    while problem is not None and problem.errno in FULL and (path := next(older, None)) is not None:
        removed.append(path.name)
        problem = _try_write(target, tensors)
    if removed:
        notice(f"the disk is full: checkpoints were removed to make room for the trained model: {', '.join(removed)}")
    if problem is None:
        return True
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        place = _unused(folder / f"{run.name}-{NAME}.safetensors")
        if _try_write(place, tensors) is None:
            notice(f"{target} cannot be written: {problem.strerror}; the trained model is in {place}")
            return False
    raise LogError(
        f"the trained model is lost: {target} cannot be written: {problem.strerror}; "
        f"nor is there room in {Path.cwd()} or {tempfile.gettempdir()}"
    ) from problem


def _try_write(target: Path, tensors: Mapping[str, Tensor]) -> OSError | None:
    """Write a file atomically; return the error that prevented it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(target) as part:
            write_tensors(part, tensors)
    except OSError as error:
        return error
    return None


def _unused(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3, ... that does not exist."""
    return next(candidate for candidate in _names(path) if not os.path.lexists(candidate))


def _names(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_stem(f"{path.stem}-{number}")
        number += 1
