"""Private files of a run: the script reads the files of its folder, and what it writes is kept in the run folder.

The script works in a tree that mirrors the folders of the machine, so that relative paths, `..` and the folder of
`__file__` lead where they always do:

    RUN/.files/tree/home/ada/project/    the script's working folder
        train.py                         copies of Python files, so that `Path(__file__).resolve().parent` is here,
        settings.json                    and of other small files, so that a library may write them
        data/labels.csv                  folders, and links to files
        data/train/                      a link to a folder with many entries
    RUN/files/                           afterwards: the files that the script has written

A link becomes a copy before Python opens it for writing, and a linked folder becomes a folder of links before
something is written in it. Files that the script reaches by an absolute path are compared with their state before;
those to which a library, or another process, writes through a link have changed since the tree was made.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from stretto.launcher.seeding import after_import

MOST_LINKS = 2000
"""Number of links that are made at the start; further folders are linked as a whole."""
SMALL_BYTES, MOST_COPIED = 1 << 16, 1000
"""Largest size of a file that is copied at the start, and the number of such files."""
MOST_LOOKED_AT = 100_000
"""Number of files in folders linked as a whole that are looked at afterwards."""
MOST_ABOVE = 1000
"""Number of entries of a folder above the working folder that have a link."""
MOST_CHAINED = 40
"""Number of symbolic links that are followed in turn."""
UNUSUAL = (".git", ".hg", ".svn", "node_modules")
"""Names of folders with many files that scripts do not write."""
OF_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")
"""Entries of the folder of a virtual environment."""
NATIVE_WRITERS = {"torch.serialization": ("torch", "save", "f"), "safetensors.torch": (None, "save_file", "filename")}
"""Functions that open the file of their second argument without Python's `open`: by module, the package that has the
same function, its name, and the name of the argument."""
FOLLOW_NO_LINKS = ("_iterate_directories", "select_recursive_step", "walk")
"""Functions of `pathlib` that do not enter folders by links."""
SYSTEM = ("/dev", "/proc", "/sys")
ABSOLUTE = re.compile(r"([^/=]*=)?(/.+)", re.DOTALL)
"""An argument of a script that is an absolute path, or names one: `/data/out`, `--out=/data/out`."""
CACHES = ("__pycache__", "/torchinductor_", "/.triton/")
"""Parts of the paths of files that several processes may write: compiled code of Python and of torch.compile."""
SHOWN = 3
ABOVE = "-above"
"""End of the name of the folder with what a script has written outside of its working folder."""
_WRITES = os.O_WRONLY | os.O_RDWR
_AT_FDCWD, _EXCHANGE = -100, 2
_ENTRIES = {"os.mkdir": 1, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.link": 2, "os.symlink": 2}
"""Audit events of changes in a folder, with the number of their paths."""
_CONTENTS = ("os.truncate", "os.chmod", "os.utime", "sqlite3.connect")
"""Audit events of changes of a file."""


@dataclass(frozen=True)
class Kept:
    """Ends of the names of the folders with what a script has written, and the files outside that it has changed."""

    folders: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __add__(self, other: Kept) -> Kept:
        """Return what two scripts have left, each once."""
        pairs = ((self.folders, other.folders), (self.changed, other.changed))
        return Kept(*(tuple(dict.fromkeys((*mine, *theirs))) for mine, theirs in pairs))

    def sentences(self, folder: str) -> list[str]:
        """Return sentences for the user; `folder` is where the files of the working folder are now."""
        written = " and ".join(f"{folder}{end}" for end in self.folders)
        sentences = [f"files that the script has written: {written}"] if written else []
        if self.changed:
            others = f" and {len(self.changed) - SHOWN} others" if len(self.changed) > SHOWN else ""
            sentences.append(
                f"the script has changed files outside of its private folder: {', '.join(self.changed[:SHOWN])}{others}"
                ". Absolute paths lead there, and libraries that open files themselves: type relative paths, or give "
                "the script the path of a folder as an argument"
            )
        return sentences


class PrivateFiles:
    """A tree below `base` for a script whose working folder is `origin`. The folder that holds `base` is not in it.

    `worker` is the number of the worker that this process is.
    """

    def __init__(self, base: Path, origin: str, worker: int = 0) -> None:
        self._base = str(base.resolve())
        self._excluded = os.path.dirname(self._base)
        self._unwatched = self._excluded, sys.prefix, sys.base_prefix, os.path.expanduser("~/.cache")
        self._tree, self._new = os.path.join(self._base, "tree"), os.path.join(self._base, "new")
        self._before, self._writers = os.path.join(self._base, "before"), os.path.join(self._base, "writers")
        self._worker = worker
        self._claimed: set[str] = set()
        self._origin = origin
        self.here = self._tree + origin
        self._began = os.path.join(self._base, "began")
        self._noted: set[str] = set()
        self._copied = 0
        self._unfolded: set[str] = set()

    def make(self) -> None:
        """Make the tree: at most about MOST_LINKS links, and those of the folders above."""
        os.makedirs(self.here)
        os.mkdir(self._new)
        Path(self._began).touch()
        for above in Path(self._origin).parents:
            with contextlib.suppress(OSError):
                self._fill(self._tree + str(above).rstrip("/"), str(above), MOST_ABOVE, truncates=True)
        linked = deque(os.path.join(self.here, name) for name in self._fill(self.here, self._origin, copies=True) or ())
        room = MOST_LINKS
        while linked:
            link = linked.popleft()
            source = os.readlink(link).rstrip("/")
            leads_to_run = f"{self._excluded}/".startswith(f"{source}/")
            if not leads_to_run and (room <= 0 or _is_unusual(source)):
                continue
            inner = self._unfold(link, None if leads_to_run else room, copies=True)
            if inner is not None:
                linked.extend(os.path.join(link, name) for name in inner)
                room -= len(os.listdir(link))

    def place(self, path: Path) -> Path:
        """Return where the script finds a file: absolute paths within its working folder are in the tree."""
        real = os.path.join(os.path.realpath(path.parent), path.name)
        return Path(self._tree + real) if path.is_absolute() and self._is_inside(real) else path

    def arguments(self, given: Sequence[str]) -> list[str]:
        """Return the script's arguments; absolute paths of folders, and paths without a file yet, are in the tree.

        The path of a file that is there stays: the script reads it.
        """
        return [self._argument(one) for one in given]

    def _argument(self, text: str) -> str:
        found = ABSOLUTE.fullmatch(text)
        if found is None:
            return text
        path = os.path.normpath(found[2])
        above = next(one for one in (path, *map(str, Path(path).parents)) if os.path.lexists(one))
        is_other = above == "/" or not os.path.isdir(above) or f"{path}/".startswith(tuple(f"{one}/" for one in SYSTEM))
        if is_other or not os.path.isdir(self._tree + above):
            return text
        place = self._tree + path
        self.claim(place, content=False)  # `Path.resolve` follows links
        if _is_link(place):
            self._unfold(place, MOST_LINKS)
        return f"{found[1] or ''}{place}"

    def begin(self) -> None:
        """Work in the tree from now on: this process's working folder, its calls that open files, and its errors."""
        _install()
        _active.append(self)
        os.path.islink = _is_link_of_user
        os.chdir(self.here)
        os.environ["PWD"] = self.here

    def end(self) -> None:
        """Leave the tree."""
        _active.remove(self)
        os.path.islink = _is_link
        os.chdir(self._origin)
        os.environ["PWD"] = self._origin

    def hide(self, text: str) -> str:
        """Return a text with the paths that the files have outside of the tree."""
        return text.replace(self._tree, "")

    # --- before something is written ------------------------------------------------------------------------------

    def claim(self, path: str, *, content: bool = True, empty: bool = False) -> None:
        """Make private what is written next at a path: the file, or with `content` False its entry in a folder.

        A file that will be emptied is not copied.
        """
        path = os.path.abspath(path)
        if content and path not in self._claimed:
            self._claimed.add(path)
            with contextlib.suppress(OSError), open(self._writers, "a") as file:
                file.write(json.dumps([self._worker, self.hide(path)]) + "\n")
        for _ in range(MOST_CHAINED):
            if not path.startswith(self._tree + os.sep):
                return self._note(path)
            led_to = self._claim_links(path, content, empty)
            if led_to is None:
                return None
            path = led_to
        return None

    def _claim_links(self, path: str, content: bool, empty: bool) -> str | None:
        """Replace the links in a path that lead out of the tree; return the path that a link within leads to."""
        at, parts = self._tree, path[len(self._tree) + 1 :].split(os.sep)
        for depth, part in enumerate(parts, 1):
            at, is_last = os.path.join(at, part), depth == len(parts)
            if not _is_link(at) or (is_last and not content):
                continue
            target = os.path.normpath(os.path.join(os.path.dirname(at), os.readlink(at)))
            if target.startswith(self._tree + os.sep):
                return os.path.join(target, *parts[depth:])
            if target.startswith(tuple(f"{folder}/" for folder in SYSTEM)):
                return None
            if os.path.isdir(at):
                self._unfold(at)
            elif is_last:
                self._copy(at, empty)
        return None

    def unfold_within(self, folder: str) -> None:
        """Unfold the linked folders in a folder of the tree."""
        folder = os.path.abspath(folder)
        if folder not in self._unfolded and f"{folder}/".startswith(f"{self.here}/"):
            self._unfolded.add(folder)
            with os.scandir(folder) as entries:
                links = [entry.path for entry in entries if entry.is_symlink()]
            for link in links:
                if os.readlink(link).endswith("/"):
                    self._unfold(link)

    def is_made(self, link: str) -> bool:
        """Return True for a link in place of a file or a folder that is no link."""
        link = os.path.abspath(link)
        text = os.readlink(link)
        return link.startswith(self._tree + os.sep) and (text.endswith("/") or text == link[len(self._tree) :])

    def _note(self, path: str) -> None:
        """Record the state of a file outside of the tree before it is written."""
        path = os.path.realpath(path)
        unwatched = tuple(f"{folder}/" for folder in (*SYSTEM, *self._unwatched))
        if path in self._noted or f"{path}/".startswith(unwatched):
            return
        self._noted.add(path)
        with contextlib.suppress(OSError), open(self._before, "a") as file:
            file.write(json.dumps([path, _state(path)]) + "\n")

    def written(self) -> dict[int, list[str]]:
        """Return the paths that each worker has opened for writing so far, or at which it has changed a file."""
        paths: dict[int, list[str]] = {}
        with contextlib.suppress(FileNotFoundError), open(self._writers) as file:
            for line in file:
                worker, path = json.loads(line)
                is_cache = any(part in path for part in CACHES)
                if not is_cache and not f"{path}/".startswith(
                    tuple(f"{each}/" for each in (*SYSTEM, *self._unwatched))
                ):
                    paths.setdefault(worker, []).append(path)
        return paths

    # --- links ----------------------------------------------------------------------------------------------------

    def _fill(
        self, place: str, folder: str, most: int | None = None, *, copies: bool = False, truncates: bool = False
    ) -> list[str] | None:
        """Make the entries of a folder, no more than `most`, and return the names of folders; None if there are more.

        The text of a link to a folder ends with a slash.
        """
        with os.scandir(folder) as scanned:
            entries = list(itertools.islice(scanned, None if most is None else most + 1))
        if most is not None and len(entries) > most and not truncates:
            return None
        folders, present = [], set(os.listdir(place))
        for entry in entries[:most]:
            source, link = os.path.join(folder, entry.name), os.path.join(place, entry.name)
            if source == self._excluded or entry.name in present:
                continue
            if entry.is_symlink():
                os.symlink(self._text(source), link)
            elif entry.is_dir():
                os.symlink(f"{source}/", link)
                folders.append(entry.name)
            elif copies and self._is_copied(entry):
                shutil.copy2(source, link)
            else:
                os.symlink(source, link)
        return folders

    def _is_copied(self, entry: os.DirEntry[str]) -> bool:
        """Return True for a file that is copied at the start."""
        if not entry.is_file() or not os.access(entry.path, os.R_OK):
            return False
        is_small = self._copied < MOST_COPIED and entry.stat().st_size <= SMALL_BYTES
        self._copied += is_small
        return is_small or entry.name.endswith(".py")

    def _text(self, source: str) -> str:
        """Return what a copy of a symbolic link in the tree leads to."""
        text = os.readlink(source)
        target = os.path.normpath(os.path.join(os.path.dirname(source), text))
        if not self._is_inside(target):
            return target
        is_relative = self._is_inside(source) and not os.path.isabs(text)
        return os.path.normpath(text) if is_relative else self._tree + target

    def _is_inside(self, path: str) -> bool:
        """Return True for a path in the script's working folder, as it is outside of the tree."""
        return f"{path}/".startswith(f"{self._origin.rstrip('/')}/")

    def _unfold(self, link: str, most: int | None = None, *, copies: bool = False) -> list[str] | None:
        """Replace a link to a folder by a folder of links; return the folders in it, or None for more entries."""
        part = tempfile.mkdtemp(dir=self._new)
        try:
            with self._locked():
                if not _is_link(link):  # another process was faster
                    return None
                source = os.path.realpath(link)
                folders = self._fill(part, source, most, copies=copies)
                if folders is None:
                    return None
                os.chmod(part, os.stat(source).st_mode & 0o777 | 0o700)
                _exchange(part, link)
            return folders
        except OSError:  # a folder that cannot be read stays a link
            return None
        finally:
            _remove(part)

    def _copy(self, link: str, empty: bool) -> None:
        """Replace a link to a file by a copy, or by an empty file of the same mode."""
        with self._locked():
            source = os.path.realpath(link)
            if not _is_link(link) or (os.path.exists(source) and not os.path.isfile(source)):
                return
            if not os.path.exists(source):
                os.unlink(link)
                return
            part = os.path.join(tempfile.mkdtemp(dir=self._new), "copy")
            try:
                if empty:
                    with open(part, "xb"):
                        shutil.copymode(source, part)
                else:
                    shutil.copy2(source, part)
                os.replace(part, link)
            finally:
                _remove(os.path.dirname(part))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep the other processes of the script from changing links."""
        with open(os.path.join(self._base, "lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    # --- afterwards -----------------------------------------------------------------------------------------------

    def keep(self, folder: Path) -> Kept:
        """Move what the script has written to a folder, and remove the tree."""
        changed, folders = self._changed(), list[str]()
        self._remove_unchanged()
        if os.path.isdir(self.here):
            shutil.move(self.here, folder)
            folders.append("")
        self._remove_unchanged()
        if os.listdir(self._tree):
            shutil.move(self._tree, folder.with_name(f"{folder.name}{ABOVE}"))
            folders.append(ABOVE)
        _remove(self._base)
        return Kept(tuple(folders), tuple(changed))

    def _changed(self) -> list[str]:
        """Return the recorded files whose state differs, and those that are new in the working folder."""
        before: dict[str, Any] = {}
        with contextlib.suppress(FileNotFoundError), open(self._before) as file:
            for line in file:
                path, state = json.loads(line)
                before.setdefault(path, state)
        found = [
            path
            for path, state in before.items()
            if _state(path) != state and (state is not None or self._is_inside(path))
        ]
        return list(dict.fromkeys([*found, *self._changed_through_links()]))

    def _changed_through_links(self) -> Iterator[str]:
        """Yield the files that links in the tree lead to, and that have changed since it was made."""
        began, left = os.stat(self._began).st_mtime_ns, MOST_LOOKED_AT
        for folder, folders, files in os.walk(self.here):
            origin = folder[len(self._tree) :]
            if f"{self._excluded}/".startswith(f"{origin}/") and origin != self._origin:
                continue  # other runs
            for link in [path for name in (*folders, *files) if _is_link(path := os.path.join(folder, name))]:
                if not self.is_made(link):
                    continue
                if not os.readlink(link).endswith("/"):
                    yield from [link[len(self._tree) :]] * _has_changed(link, began)
                elif not _is_unusual(link) and not os.path.exists(os.path.join(link, "run.json")):
                    below = (os.path.join(at, name) for at, _, names in os.walk(link) for name in names)
                    for path in itertools.islice(below, left):
                        left -= 1
                        yield from [path[len(self._tree) :]] * _has_changed(path, began)

    def _remove_unchanged(self) -> None:
        """Remove all that the script has not written."""
        for folder, folders, files in os.walk(self._tree, topdown=False):
            for name in (*folders, *files):
                path = os.path.join(folder, name)
                if _is_link(path):
                    if not self._is_of_script(path):
                        os.unlink(path)
                elif os.path.isdir(path):
                    with contextlib.suppress(OSError):
                        _remove(path) if name == "__pycache__" else os.rmdir(path)
                elif not os.path.isfile(path) or _state(path) == _state(path[len(self._tree) :]):
                    os.unlink(path)

    def _is_of_script(self, link: str) -> bool:
        """Return True for a symbolic link that the script has made, to a file in the tree."""
        target = os.path.normpath(os.path.join(os.path.dirname(link), os.readlink(link)))
        is_inside = not os.path.isabs(os.readlink(link)) and target.startswith(self._tree + os.sep)
        return is_inside and not _is_link(link[len(self._tree) :]) and os.path.exists(link)


@contextlib.contextmanager
def private_files(base: Path, kept: Path, note: Callable[[str], object]) -> Iterator[PrivateFiles]:
    """Let this process work in private files, which are then kept in a folder; `note` is called with sentences."""
    files = PrivateFiles(base, os.getcwd())
    files.make()
    files.begin()
    try:
        yield files
    finally:
        files.end()
        for sentence in files.keep(kept).sentences(str(kept)):
            note(sentence)


def hidden(text: str) -> str:
    """Return a text of this process with the paths that private files have for the user."""
    return _active[-1].hide(text) if _active else text


_is_link = os.path.islink


def _is_link_of_user(path: Any) -> bool:
    """Return True for a symbolic link, but for those that this module makes: `os.walk` enters no folder by a link."""
    return _is_link(path) and not (_active and _active[-1].is_made(os.fsdecode(path)))


_active: list[PrivateFiles] = []
_installed: list[bool] = []
_busy = threading.local()


def _install() -> None:
    """Watch what this process opens. An audit hook cannot be removed."""
    if _installed:
        return
    _installed.append(True)
    sys.addaudithook(_audit)
    for module in NATIVE_WRITERS:
        after_import(module, _wrap_writer)


def _wrap_writer(module: ModuleType) -> None:
    package, name, argument = NATIVE_WRITERS[module.__name__]
    write: Callable[..., Any] = getattr(module, name)

    @functools.wraps(write)
    def claiming(value: object, *args: Any, **named: Any) -> Any:
        path = args[0] if args else named.get(argument)
        if _active and isinstance(path, str | bytes | os.PathLike):
            _active[-1].claim(os.fsdecode(path), empty=True)
        return write(value, *args, **named)

    for owner in (module, sys.modules.get(package or "")):
        if getattr(owner, name, None) is write:
            setattr(owner, name, claiming)


def _audit(event: str, about: tuple[Any, ...]) -> None:
    """Make private what an operation of Python is about to change."""
    if not _active or getattr(_busy, "now", False):
        return
    if event == "open":
        flags = about[2]
        if not (isinstance(flags, int) and flags & _WRITES):
            return
        paths, how = about[:1], {"empty": bool(flags & os.O_TRUNC), "content": not flags & os.O_EXCL}
    elif event in _CONTENTS:
        paths, how = about[:1], {}
    elif event in _ENTRIES:
        paths, how = about[: _ENTRIES[event]], {"content": False}
    elif event == "shutil.rmtree" or (event == "os.scandir" and _follows_no_links()):
        paths, how = about[:1], {}
    else:
        return
    _busy.now = True
    try:
        for path in paths:
            if isinstance(path, str | bytes | os.PathLike):
                name = os.fsdecode(path)
                if event == "os.scandir":
                    _active[-1].unfold_within(name or ".")
                else:
                    _active[-1].claim(name, **how)
    except OSError:
        pass  # the operation itself will fail
    finally:
        _busy.now = False


def _follows_no_links() -> bool:
    """Return True if `pathlib` lists a folder to enter those in it."""
    frame: FrameType | None = sys._getframe(2)
    for _ in range(3):
        if frame is None or not str(frame.f_globals.get("__name__")).startswith(("pathlib", "glob")):
            return False
        if frame.f_code.co_name in FOLLOW_NO_LINKS:
            return True
        frame = frame.f_back
    return False


def _state(path: str) -> list[int] | None:
    """Return the size and the time of the last change of a file; None without, and for a folder."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return None if stat.S_ISDIR(status.st_mode) else [status.st_size, status.st_mtime_ns]


def _has_changed(path: str, since_ns: int) -> bool:
    """Return True for a file whose content or mode was changed after a time, which no program can hide."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_ctime_ns > since_ns


def _is_unusual(folder: str) -> bool:
    is_environment = any(os.path.lexists(os.path.join(folder, name)) for name in OF_ENVIRONMENT)
    return is_environment or os.path.basename(folder) in UNUSUAL


def _exchange(part: str, link: str) -> None:
    """Exchange two names, so that no other process finds neither; where the disk cannot, one after the other."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None or rename(_AT_FDCWD, os.fsencode(part), _AT_FDCWD, os.fsencode(link), _EXCHANGE) != 0:
        os.unlink(link)
        os.rename(part, link)


def _remove(path: str) -> None:
    """Remove a link, or a folder of links and copies."""
    if _is_link(path):
        os.unlink(path)
    else:
        shutil.rmtree(path, ignore_errors=True)
