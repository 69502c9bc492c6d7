"""The code of a run as one archive, for machines that do not see the folder of its script.

Sent are the script's folder and all folders in it, except what a `.gitignore` there or above it in its repository
names, hidden files, compiled files, run directories and symbolic links. As in git, the last pattern that matches
counts, those of deeper files after those of higher ones. So a data set in the folder belongs into `.gitignore`, or
beside the folder.

Secrets stay, by what they hold, so that a copy or a link under another name stays, too: the secrets of the run, keys
for joining a run, private keys, and files that fewer users may read than the script. The archive names them.
"""

from __future__ import annotations

import io
import os
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

from pathspec import GitIgnoreSpec
from pathspec.pattern import Pattern

from stretto.errors import LaunchError, explain

LARGEST_BYTES = 32 << 20
"""Largest size of all files together."""
RUN = "run.json"
"""File that each run directory has."""
SKIPPED = GitIgnoreSpec.from_lines(["__pycache__/", "*.py[cod]", ".*"])
"""Files that are never sent."""
Ignored: TypeAlias = list[tuple[str, GitIgnoreSpec]]
"""Contents of `.gitignore` files, higher ones first, with the paths of their folders in the repository."""
PRIVATE_KEY = re.compile(rb"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY-----\s+[\w+/=:,. -]{8}|PuTTY-User-Key-File-\d: ")
"""Beginning of the text of a private key. A text that only names the line is none."""
JOIN_KEY = re.compile(rb'"keys"\s*:\s*\[\s*"[!-~]{40}"')
"""Text of a key for joining a run: three keys in Z85."""
READ_BY_OTHERS = stat.S_IRGRP | stat.S_IROTH
LONGEST_COMMENT = 60_000
"""Largest size of the names of files that stay, in bytes; those beyond it are not named."""


def packed(script: Path, secrets: Sequence[str] = (), largest_bytes: int = LARGEST_BYTES) -> bytes:
    """Return a zip archive of the code in a script's folder, without files that hold one of the secrets.

    Raises LaunchError if it is larger than `largest_bytes`.
    """
    folder, left_out, mode = script.parent, list[str](), script.stat().st_mode
    files = {path: (folder / path).stat() for path in sorted(_files(folder))}
    if (size := sum(status.st_size for status in files.values())) > largest_bytes:
        largest = max(files, key=lambda path: files[path].st_size)
        problem = f"the code in {folder} is too large to be sent to another machine; its largest file is {largest}"
        expected = f"at most {_megabytes(largest_bytes)} of files that no .gitignore names"
        to_type = "--script PATH, for a copy of the script on the joining machine; or name data in a .gitignore"
        raise LaunchError(explain(problem, got=_megabytes(size), expected=expected, to_type=to_type))
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        for path, status in files.items():
            if mode & ~status.st_mode & READ_BY_OTHERS:
                left_out.append(f"{path} (mode {stat.S_IMODE(status.st_mode):o}: fewer may read it than the script)")
                continue
            content = (folder / path).read_bytes()
            if any(secret.encode() in content for secret in secrets) or JOIN_KEY.search(content):
                left_out.append(f"{path} (a secret of a run)")
            elif PRIVATE_KEY.search(content):
                left_out.append(f"{path} (a private key)")
            else:
                about = zipfile.ZipInfo.from_file(folder / path, path, strict_timestamps=False)
                archive.writestr(about, content, zipfile.ZIP_DEFLATED)
        archive.comment = ", ".join(left_out).encode()[:LONGEST_COMMENT]
    return written.getvalue()


def unpack(archive: bytes, folder: Path) -> str:
    """Write the files of an archive into a folder, and return the names of the files left out of it.

    Names that lead out of the folder are changed by `zipfile`.
    """
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        opened.extractall(folder)
        return opened.comment.decode(errors="replace")


def _files(folder: Path) -> Iterator[str]:
    """Yield the files to send, relative to the folder."""
    own, ignored = _above(folder.resolve())
    for here, folders, names in os.walk(folder):
        if RUN in names:
            folders.clear()
            continue
        prefix = "" if here == str(folder) else os.path.relpath(here, folder) + "/"
        if ".gitignore" in names:
            ignored.append((own + prefix, _read(Path(here))))

        def is_sent(path: str) -> bool:
            is_skipped = (folder / path).is_symlink() or SKIPPED.match_file(path)
            return not is_skipped and not _is_ignored(own + path, ignored)

        folders[:] = [name for name in folders if is_sent(f"{prefix}{name}/")]
        yield from (path for name in names if (folder / (path := prefix + name)).is_file() and is_sent(path))


def _above(folder: Path) -> tuple[str, Ignored]:
    """Return the path of a folder in its repository, and the `.gitignore` files above it there.

    The script's folder is sent even if the repository ignores all of it: patterns that name it do not count then.
    """
    top = next((one for one in (folder, *folder.parents) if (one / ".git").exists()), folder)
    names = folder.relative_to(top).parts
    paths = ["".join(f"{name}/" for name in names[:depth]) for depth in range(len(names) + 1)]
    ignored = [(path, _read(top / path)) for path in paths[:-1] if (top / path / ".gitignore").is_file()]
    if any(_is_ignored(path, ignored) for path in paths[1:]):
        ignored = [
            (at, GitIgnoreSpec(one for one in spec.patterns if not _names(one, at, paths))) for at, spec in ignored
        ]
    return paths[-1], ignored


def _names(pattern: Pattern, at: str, paths: Iterable[str]) -> bool:
    return any(path.startswith(at) and pattern.match_file(path.removeprefix(at)) for path in paths)


def _read(folder: Path) -> GitIgnoreSpec:
    return GitIgnoreSpec.from_lines((folder / ".gitignore").read_text(errors="replace").splitlines())


def _is_ignored(path: str, ignored: Ignored) -> bool:
    """Return True if the last pattern that matches a path in the repository does not begin with `!`."""
    found = (_result(spec, path.removeprefix(at)) for at, spec in reversed(ignored) if path.startswith(at))
    return next((result for result in found if result is not None), False)


def _result(spec: GitIgnoreSpec, path: str) -> bool | None:
    """Return False if the last pattern that matches a path begins with `!`, None if no pattern matches.

    For a folder, `GitIgnoreSpec` would rank the `*` before a `!*/` higher.
    """
    if not path.endswith("/"):
        return spec.check_file(path).include
    return next(
        (one.include for one in reversed(list(spec.patterns)) if one.include is not None and one.match_file(path)), None
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
