"""The code of a run as one archive, for machines that do not see the folder of its script.

Sent are the script's folder and all folders in it, except what a `.gitignore` there names, hidden files, compiled
files, run directories and symbolic links. So a data set in the folder belongs into `.gitignore`, or beside the folder.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from pathspec import GitIgnoreSpec

from stretto.errors import LaunchError, explain

LARGEST_BYTES = 32 << 20
"""Largest size of all files together."""
RUN = "run.json"
"""File that each run directory has."""
SKIPPED = "__pycache__/\n*.py[cod]\n.*\n"
"""Files that are never sent, in the syntax of `.gitignore`."""


def packed(folder: Path, largest_bytes: int = LARGEST_BYTES) -> bytes:
    """Return a zip archive of the code in a folder. Raises LaunchError if it is larger than `largest_bytes`."""
    files = {path: (folder / path).stat().st_size for path in sorted(_files(folder))}
    if (size := sum(files.values())) > largest_bytes:
        largest = max(files, key=files.__getitem__)
        problem = f"the code in {folder} is too large to be sent to another machine; its largest file is {largest}"
        expected = f"at most {_megabytes(largest_bytes)} of files that no .gitignore there names"
        to_type = "--script PATH, for a copy of the script on the joining machine; or name data in a .gitignore"
        raise LaunchError(explain(problem, got=_megabytes(size), expected=expected, to_type=to_type))
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path in files:
            archive.write(folder / path, path)
    return written.getvalue()


def unpack(archive: bytes, folder: Path) -> None:
    """Write the files of an archive into a folder; names that lead out of it are changed by `zipfile`."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        opened.extractall(folder)


def _files(folder: Path) -> Iterator[str]:
    """Yield the files to send, relative to the folder."""
    specs = {"": GitIgnoreSpec.from_lines(SKIPPED.splitlines())}
    for here, folders, names in os.walk(folder):
        if RUN in names:
            folders.clear()
            continue
        at = os.path.relpath(here, folder)
        if ".gitignore" in names:
            specs[at] = GitIgnoreSpec.from_lines((Path(here) / ".gitignore").read_text(errors="replace").splitlines())

        def is_sent(name: str, end: str = "", at: str = at) -> bool:
            path = os.path.normpath(os.path.join(at, name))
            is_linked = (folder / path).is_symlink()
            return not is_linked and not any(_ignores(spec, path + end, of) for of, spec in specs.items())

        folders[:] = sorted(name for name in folders if is_sent(name, "/"))
        for name in names:
            if is_sent(name) and (Path(here) / name).is_file():
                yield os.path.normpath(os.path.join(at, name))


def _ignores(spec: GitIgnoreSpec, path: str, folder: str) -> bool:
    """Return True if the `.gitignore` of a folder names a path."""
    if folder in ("", "."):
        return spec.match_file(path)
    return path.startswith(folder + "/") and spec.match_file(path.removeprefix(folder + "/"))


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
