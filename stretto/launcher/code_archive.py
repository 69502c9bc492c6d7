"""The code of a run as one archive, for machines that do not see the folder of its script.

Sent are the script's folder and all folders in it, except what a `.gitignore` there names, hidden files, compiled
files, run directories and symbolic links. So a data set in the folder belongs into `.gitignore`, or beside the folder.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator, Sequence
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
    ignored = [("", GitIgnoreSpec.from_lines(SKIPPED.splitlines()))]
    for here, folders, names in os.walk(folder):
        if RUN in names:
            folders.clear()
            continue
        prefix = "" if here == str(folder) else os.path.relpath(here, folder) + "/"
        if ".gitignore" in names:
            text = (Path(here) / ".gitignore").read_text(errors="replace")
            ignored.append((prefix, GitIgnoreSpec.from_lines(text.splitlines())))
        folders[:] = [name for name in folders if _is_sent(folder, f"{prefix}{name}/", ignored)]
        paths = (prefix + name for name in names)
        yield from (path for path in paths if (folder / path).is_file() and _is_sent(folder, path, ignored))


def _is_sent(folder: Path, path: str, ignored: Sequence[tuple[str, GitIgnoreSpec]]) -> bool:
    """Return False for a link, and for a path that the `.gitignore` of a folder above it names."""
    names_it = (spec.match_file(path.removeprefix(prefix)) for prefix, spec in ignored if path.startswith(prefix))
    return not (folder / path).is_symlink() and not any(names_it)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
