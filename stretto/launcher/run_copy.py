"""Copy of a run directory at a place that outlives this machine: a folder of a shared disk, or an object store.

    run directory                                     place (any URI that fsspec knows)
      run.json                    -- at once -------->  run.json
      checkpoints/round-120       -- once complete -->  its files, and its manifest last
      (removed: an older one)     ------------------->  removed
      events.jsonl, logs, model   -- at the end ----->  the same names

A checkpoint without its manifest is none, so the copy can be resumed from whatever happens in between.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stretto.checkpoint.folder import MANIFEST, CheckpointFolder
from stretto.errors import LaunchError, explain
from stretto.masking import masked
from stretto.run_dir import CHECKPOINTS, section_folders

LOOK_S = 1.0
"""Seconds between two looks for new checkpoints."""
PLACE, TO_TYPE = "a folder, or a URI that fsspec can write to", "--copy-to s3://bucket/name, with pip install s3fs"
LEFT_OUT = ("join.key", "snapshots", "residuals", "coordinator.wal", "dispatcher.wal")
"""Files and folders that are of no use without the running processes, or secret."""


class RunCopy:
    """Copies a run directory to a place during the run. A context manager; `note` shows a line.

    Raises LaunchError if the place cannot be written or is not empty. What fails later is tried again, and training
    continues; if the last try fails, too, at the end of a run, LaunchError is raised.
    """

    def __init__(self, folder: Path, to: str, note: Callable[[str], None]) -> None:
        self._folder, self._note = folder, note
        (self._to,) = masked([to])
        self._files, self._root = _opened(to)
        self._copied: set[Path] = set()
        """Checkpoints that are in the copy, relative to the run directory."""
        self._trouble = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="copy of the run", daemon=True)

    def __enter__(self) -> RunCopy:
        try:
            if self._files.exists(self._root) and self._files.ls(self._root):
                problem, expected = f"there is something at {self._to}", "a place that is new or empty"
                to_type = f"--copy-to {self._to.rstrip('/')}-2"
                raise LaunchError(explain(problem, got=f"--copy-to {self._to}", expected=expected, to_type=to_type))
            if "file" in self._files.protocol:
                Path(self._root).mkdir(0o700, parents=True, exist_ok=True)  # as private as the folder of the run
            self._put(self._folder / "run.json")
        except LaunchError:
            raise
        except Exception as error:  # each store has its own
            raise _unusable(self._to, error) from error
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._attempt(self._copy_all)
        if self._trouble and kind is None:
            to_type = f"copy {self._folder} there"
            problem = f"the run is complete, but its copy is not: {self._trouble}"
            raise LaunchError(explain(problem, got=f"--copy-to {self._to}", expected="room", to_type=to_type))

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            self._attempt(self._copy_checkpoints)

    def _attempt(self, copy: Callable[[], None]) -> None:
        """Copy new files. A failure is reported when it begins and when it has ended."""
        try:
            copy()
        except Exception as error:  # each store has its own
            if not self._trouble:
                self._note(f"the copy at {self._to} is behind: {_reason(error)}; trying again, training continues")
            self._trouble = _reason(error)
            return
        if self._trouble:
            self._note(f"the copy at {self._to} is complete again")
        self._trouble = ""

    def _copy_all(self) -> None:
        self._copy_checkpoints()
        for path in self._others():
            self._put(path)

    def _copy_checkpoints(self) -> None:
        for folder in (self._folder, *section_folders(self._folder)):
            for path in CheckpointFolder(folder / CHECKPOINTS).paths():
                if path.relative_to(self._folder) not in self._copied:
                    self._copy_checkpoint(path)
        for gone in [one for one in self._copied if not (self._folder / one).exists()]:
            self._files.rm(f"{self._root}/{gone}", recursive=True)
            self._copied.discard(gone)

    def _copy_checkpoint(self, path: Path) -> None:
        """Copy a checkpoint, unless it is removed while it is being copied."""
        self._copied.add(path.relative_to(self._folder))  # also removed if it is copied in part
        try:
            for file in sorted(path.iterdir(), key=lambda file: file.name == MANIFEST):
                self._put(file)
        except Exception:
            if path.exists():
                self._copied.discard(path.relative_to(self._folder))
                raise

    def _others(self) -> Iterator[Path]:
        """Yield the files of the run directory that are not in checkpoints."""
        for path in sorted(self._folder.rglob("*")):
            parts = path.relative_to(self._folder).parts
            is_other = CHECKPOINTS not in parts and not any(part.startswith(".") for part in parts)
            if is_other and parts[0] not in LEFT_OUT and path.is_file():
                yield path

    def _put(self, path: Path) -> None:
        target = f"{self._root}/{path.relative_to(self._folder).as_posix()}"
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(path), target)


def copying(
    folder: Path, to: str | None, note: Callable[[str], None]
) -> contextlib.AbstractContextManager[RunCopy | None]:
    """Return a context in which a run directory is copied, if there is a place."""
    return RunCopy(folder, to, note) if to is not None else contextlib.nullcontext()


def check_place(to: str) -> None:
    """Raise LaunchError if nothing here can write to a place, or the place ends with this process."""
    files, _ = _opened(to)
    named = to.rpartition("://")[2].strip("/")
    if not named or files.protocol == "memory":
        got = f"--copy-to {masked([to])[0]}" if to else '--copy-to ""'
        problem = "a copy in memory is lost at the end" if named else "there is no name of a place"
        raise LaunchError(explain(problem, got=got, expected=PLACE, to_type=TO_TYPE))


def _opened(to: str) -> tuple[Any, str]:
    """Return the file system of a place, and the path in it."""
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(to)
    except Exception as error:  # of fsspec, or of the package for such a store
        raise _unusable(to, error) from error
    return files, root.rstrip("/")


def _unusable(to: str, error: Exception) -> LaunchError:
    problem = f"nothing can be copied to it: {_reason(error)}"
    return LaunchError(explain(problem, got=f"--copy-to {masked([to])[0]}", expected=PLACE, to_type=TO_TYPE))


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(masked([str(text)])[0].split())
