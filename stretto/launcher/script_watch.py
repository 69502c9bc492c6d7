"""Notices about a script: optimizer steps before `distribute`, and files that several workers write.

Each is detected where it happens, at negligible cost, and reported once.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.events import Event
from stretto.launcher.private_files import CACHES, hidden
from stretto.launcher.seeding import after_import

MOST_FILES = 200
"""Number of files that a worker remembers."""
SHOWN = 3
TENSORBOARD = "events.out.tfevents."
"""Beginning of the names of TensorBoard's files: it draws all that lie in one folder as one run."""
_WRITES = os.O_WRONLY | os.O_RDWR
_NEW = os.O_EXCL | os.O_DIRECTORY
_NOT_FILES = ("/dev/", "/proc/", "/sys/")


def notice_steps_alone(workers: int) -> None:
    """Print one line if an optimizer of this process steps before `distribute` was called."""
    after_import("torch.optim.optimizer", lambda module: _watch_steps(module, workers))


def _watch_steps(module: ModuleType, workers: int) -> None:
    seen: list[bool] = []

    def stepped(_optimizer: object, _args: object, _named: object) -> None:
        if seen:
            return
        seen.append(True)
        api = sys.modules.get("stretto.api")
        if api is None or not api.is_distributed():
            text = (
                f"an optimizer steps, but stretto.distribute was not called yet: until then each of the {workers} "
                "workers trains alone"
            )
            print(f"stretto: {text}", file=sys.stderr, flush=True)

    module.register_optimizer_step_post_hook(stepped)


class Written:
    """Files that this process has opened for writing, except those below the folders in `own`."""

    def __init__(self, own: Iterable[str | os.PathLike[str]]) -> None:
        self._own = unwatched(own)
        self.paths: dict[str, None] = {}

    def begin(self) -> None:
        """Start recording. An audit hook cannot be removed."""
        sys.addaudithook(self._audit)
        after_import("torch.serialization", self._watch_saves)

    def note(self, path: object) -> None:
        """Record a path if other workers could write the same file."""
        if isinstance(path, os.PathLike | bytes):
            path = os.fsdecode(path)
        if not isinstance(path, str) or len(self.paths) >= MOST_FILES:
            return
        path = hidden(os.path.abspath(path))
        if is_watched(path, self._own):
            self.paths[path] = None

    def _audit(self, event: str, about: tuple[Any, ...]) -> None:
        if is_writing(event, about):
            self.note(about[0])

    def _watch_saves(self, module: ModuleType) -> None:
        """Wrap torch.save, which writes files without Python's `open`."""
        save: Callable[..., Any] = module.save

        @functools.wraps(save)
        def noted(obj: object, f: object, *args: Any, **kwargs: Any) -> Any:
            self.note(f)
            return save(obj, f, *args, **kwargs)

        module.save = noted  # type: ignore[attr-defined]


def unwatched(own: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return the beginnings of the paths below these folders, whose files are not watched."""
    return tuple(str(Path(folder).resolve()) + os.sep for folder in own)


def is_watched(path: str, own: tuple[str, ...]) -> bool:
    """Return True for the path of a file that is the script's: no device, no cache, and in no folder of `own`."""
    return not path.startswith((*own, *_NOT_FILES)) and not any(cache in path for cache in CACHES)


def is_writing(event: str, about: tuple[Any, ...]) -> bool:
    """Return True for the audit event of a file that is opened for writing, and may be there before.

    A temporary file without a name opens its folder.
    """
    return event == "open" and isinstance(about[2], int) and bool(about[2] & _WRITES) and not about[2] & _NEW


def own_folders(run: str | None) -> list[str]:
    """Return the directories whose files are not watched: the run directory, Python's own, and caches."""
    common = [sys.prefix, sys.base_prefix, os.path.join(os.path.expanduser("~"), ".cache")]
    return [run, *common] if run is not None else common


def _of_all_workers(path: str) -> str:
    """Return the path; for a file of TensorBoard, whose name is a process's own, that of all such files beside it.

    >>> _of_all_workers("/logs/events.out.tfevents.1700000000.host.42.0"), _of_all_workers("/logs/a.txt")
    ('/logs/events.out.tfevents.*', '/logs/a.txt')
    """
    folder, name = os.path.split(path)
    return os.path.join(folder, TENSORBOARD + "*") if name.startswith(TENSORBOARD) else path


def several_write(events: Iterable[Event]) -> str | None:
    """Return one sentence on the files that several workers have written, or None if there are none."""
    writers: dict[tuple[str, str], set[int]] = {}
    for event in events:
        if event.get("event") == "written":
            for path in event["paths"]:
                writers.setdefault((event["host"], _of_all_workers(path)), set()).add(event["worker"])
    shared = [(path, sorted(workers)) for (_, path), workers in writers.items() if len(workers) > 1]
    if not shared:
        return None
    listed = "; ".join(f"{path} (workers {', '.join(map(str, workers[:8]))})" for path, workers in shared[:SHOWN])
    others = f"; and {len(shared) - SHOWN} others" if len(shared) > SHOWN else ""
    return (
        f"several workers wrote the same file: {listed}{others}. Use stretto.save(obj, path), "
        "`if stretto.is_main():`, or a name with stretto.rank()"
    )
