"""Saving of a model at the end of a run, with a fallback to other directories on a full disk."""

from __future__ import annotations

import errno
import functools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from stretto.checkpoint.file_messages import PATHS
from stretto.checkpoint.model_file import CAUSE_BYTES
from stretto.checkpoint.run_files import Chunks, RunFiles
from stretto.checkpoint.state_transfer import state_dict_of
from stretto.checkpoint.storage import KINDS, tensor_chunks, write_synced
from stretto.errors import LogError
from stretto.whole_files import written_whole

NAME: Literal["final"] = "final"
LAST: Literal["last"] = "last"
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk."""
Notice = Callable[[str], object]


def saveable_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors for the model's `load_state_dict`, except for dtypes that safetensors can't hold."""
    return {name: one for name, one in state_dict_of(model).items() if one.dtype in KINDS}


def save_final(files: RunFiles, tensors: Mapping[str, Tensor], notice: Notice) -> bool:
    """Save the final model in the run directory and return True; if that fails, save it elsewhere and return False.

    On a full disk older checkpoints of the run are removed, never the newest complete one. Raises LogError if the
    tensors could not be written anywhere.
    """
    return _save(files, NAME, "the trained model", lambda: tensor_chunks(tensors), notice)


def save_last(files: RunFiles, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], notice: Notice) -> bool:
    """Save the last model of a run that fails, as `save_final` saves the final one."""
    content = functools.partial(tensor_chunks, tensors, metadata, CAUSE_BYTES)
    return _save(files, LAST, "the last model on which the workers agreed", content, notice)


def _save(files: RunFiles, kind: Literal["final", "last"], what: str, content: Chunks, notice: Notice) -> bool:
    target = f"{files.place}/{PATHS[kind]}"
    if not files.exists:
        notice(
            f"the run folder {files.place} was removed during the run, and its log and its checkpoints with it; "
            f"{what} goes to a new {target}"
        )

    def write() -> None:
        files.write(kind, content)

    problem = _problem_of(write)
    removed = []
    older = files.checkpoints().older()
    while problem is not None and problem.errno in FULL and (path := next(older, None)) is not None:
        removed.append(path.name)
        problem = _problem_of(write)
    if removed:
        notice(f"the disk is full: checkpoints were removed to make room for {what}: {', '.join(removed)}")
    if problem is None:
        return True
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        place = _unused(folder / f"{files.name}-{kind}.safetensors")
        if _problem_of(functools.partial(_write_whole, place, content)) is None:
            notice(f"{target} cannot be written: {problem.strerror}; {what} is in {place}")
            return False
    raise LogError(
        f"{what} is lost: {target} cannot be written: {problem.strerror}; "
        f"nor is there room in {Path.cwd()} or {tempfile.gettempdir()}"
    ) from problem


def _problem_of(write: Callable[[], None]) -> OSError | None:
    """Write a file; return the error that prevented it."""
    try:
        write()
    except OSError as error:
        return error
    return None


def _write_whole(target: Path, content: Chunks) -> None:
    with written_whole(target) as part:
        write_synced(part, content())


def _unused(path: Path) -> Path:
    """Return the path, or the first of path-2, path-3, ... that does not exist."""
    return next(candidate for candidate in _names(path) if not os.path.lexists(candidate))


def _names(path: Path) -> Iterator[Path]:
    yield path
    number = 2
    while True:
        yield path.with_stem(f"{path.stem}-{number}")
        number += 1
