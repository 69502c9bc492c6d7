"""Files from before a resumed or restarted run that the script is about to replace: each stays under another name.

A script that is started again may take a worse model for its best one, or begin a log again. The first time that this
process replaces a regular file that is older than the run, or than its restart, the old file becomes
`NAME.before-resume`; where there is one already, `NAME.before-resume-2`, and so on.

What replaces a file is seen where Python opens it for writing from its beginning, renames another one over it (as
`stretto.save` does), or calls `torch.save`.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from stretto.launcher.script_watch import is_watched, unwatched
from stretto.launcher.seeding import after_import
from stretto.process_config import WorkerConfig

SUFFIX = ".before-resume"


class ReplacedFiles:
    """Keeps files from before the time `since`, except those below the folders in `own`; `note` is told of each."""

    def __init__(self, own: Iterable[str | os.PathLike[str]], since: float, note: Callable[[str], object]) -> None:
        self._own, self._since, self._note = unwatched(own), since, note
        self._seen: set[str] = set()
        self._is_busy = False

    def begin(self) -> None:
        """Watch what the script replaces. An audit hook cannot be removed."""
        sys.addaudithook(self._audit)
        after_import("torch.serialization", self._watch_saves)

    def keep(self, path: object, is_emptied: bool) -> None:
        """Keep the file at this path under another name, if it is from before; `is_emptied` if it is written in place.

        Several processes may come to the same file at a time: one of them makes the link, and none writes into it.
        """
        if isinstance(path, os.PathLike | bytes):
            path = os.fsdecode(path)
        if self._is_busy or not isinstance(path, str):
            return
        self._is_busy = True  # what follows opens and renames files, too
        try:
            path = os.path.realpath(path)
            if path in self._seen or not is_watched(path, self._own):
                return
            self._seen.add(path)
            self._keep(path, is_emptied)
        finally:
            self._is_busy = False

    def _keep(self, path: str, is_emptied: bool) -> None:
        try:
            old = os.stat(path)
        except OSError:
            return
        if not stat.S_ISREG(old.st_mode) or not old.st_size or old.st_mtime >= self._since:
            return
        try:
            name = _linked(path, old)
            if name is not None and is_emptied:
                _detach(path, name, old.st_mode)
        except OSError as error:
            self._note(f"{path}, which was there before, is replaced, and could not be kept: {error.strerror}")
            return
        if name is not None:
            self._note(f"{path} was there before this worker was started and is replaced; the old one is {name}")

    def _audit(self, event: str, about: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(about[2], int) and about[2] & os.O_TRUNC:
            self.keep(about[0], is_emptied=True)
        elif event == "os.rename":
            self.keep(about[1], is_emptied=False)

    def _watch_saves(self, module: ModuleType) -> None:
        """Wrap torch.save, which writes files without Python's `open`."""
        save: Callable[..., Any] = module.save

        @functools.wraps(save)
        def keeping(obj: object, f: object, *args: Any, **kwargs: Any) -> Any:
            self.keep(f, is_emptied=True)
            return save(obj, f, *args, **kwargs)

        module.save = keeping  # type: ignore[attr-defined]


def _linked(path: str, old: os.stat_result) -> str | None:
    """Return a new name of this file, or that which another process has given it; None if it was replaced since."""
    for number in itertools.count(1):
        name = f"{path}{SUFFIX}{f'-{number}' if number > 1 else ''}"
        try:
            os.link(path, name)
            return name
        except FileNotFoundError:
            return None
        except FileExistsError:
            now = _status(path)
            if now is None or not os.path.samestat(now, old):
                return None
            if (found := _status(name)) is not None and os.path.samestat(found, old):
                return name
        except OSError:  # the disk, or its owner, allows no links
            try:
                with open(path, "rb") as source, open(name, "xb") as copy:
                    shutil.copyfileobj(source, copy)
            except FileExistsError:
                continue
            shutil.copystat(path, name)
            return name
    return None


def _detach(path: str, name: str, mode: int) -> None:
    """Put an empty file with the same rights in the place of one that is kept under another name."""
    now, kept = _status(path), _status(name)
    if now is None or kept is None or not os.path.samestat(now, kept):
        return
    os.unlink(path)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, stat.S_IMODE(mode)))
    os.chmod(path, stat.S_IMODE(mode))


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None


def began_again_at(config: WorkerConfig, now: float) -> float | None:
    """Return the time before which files are from before: that of the run if it is resumed, or of this restart.

    None for a process of a run that begins from nothing.
    """
    if config.incarnation:
        return now
    if config.options.resume is None:
        return None
    started = _status(str(Path(config.run) / "run.json")) if config.run is not None else None
    return min(now, started.st_mtime) if started is not None else now
