"""Files that the scripts of simulated workers write: several workers would overwrite each other's."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from stretto.launcher.script_watch import Written, is_writing, several_write

MOST_WORKERS = 16
"""Number of workers whose files are recorded."""
_recorders: list[WrittenFiles] = []
_installed: list[bool] = []


class WrittenFiles:
    """Records the files that each worker opens for writing, except those below the folders in `own`.

    `current` returns the number of the worker that runs, or None.
    """

    def __init__(self, own: Iterable[str | os.PathLike[str]], current: Callable[[], int | None]) -> None:
        self._own, self._current = list(own), current
        self._written: dict[int, Written] = {}
        self._save: Callable[..., Any] = torch.save

    def begin(self) -> None:
        """Start recording."""
        if not _installed:  # an audit hook cannot be removed
            _installed.append(True)
            sys.addaudithook(_audit)
        _recorders.append(self)
        self._save = torch.save

        def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> Any:
            self.note(f)  # torch writes files without Python's `open`
            return original(obj, f, *args, **kwargs)

        original, torch.save = self._save, save

    def end(self) -> None:
        """Stop recording."""
        _recorders.remove(self)
        torch.save = self._save

    def note(self, path: object) -> None:
        """Record a path for the worker that runs."""
        worker = self._current()
        if worker is not None and worker < MOST_WORKERS:
            if worker not in self._written:
                self._written[worker] = Written(self._own)
            self._written[worker].note(path)

    def several(self) -> str | None:
        """Return one sentence on the files that several workers have written, or None if there are none."""
        by_worker = sorted(self._written.items())
        return several_write(
            {"event": "written", "host": "", "worker": worker, "paths": list(written.paths)}
            for worker, written in by_worker
        )


def _audit(event: str, about: tuple[Any, ...]) -> None:
    if _recorders and is_writing(event, about):
        _recorders[-1].note(about[0])
