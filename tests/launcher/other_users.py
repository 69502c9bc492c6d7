"""Commands of tests that run as another user, on a host and with mounts of their own: nothing is shared."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from namespace_hosts import started

USER = 65534
"""Number of the user and the group `nobody`, who has no rights."""
ROOT = Path(__file__).resolve().parents[2]
NEEDED = [Path(sys.base_prefix), Path(sys.prefix), ROOT]
"""Folders that a process of Stretto reads."""
STAGE = ".stage"
TOOLS = ("ip", "unshare", "setpriv", "mount")


def closed_ancestor(path: Path) -> Path | None:
    """Return the first folder on the way to a path that other users cannot enter; None if there is none."""
    folders = [*reversed(path.parents), path]
    return next((folder for folder in folders if not folder.stat().st_mode & 0o001), None)


def mounting(hidden: Path) -> list[str]:
    """Return the commands that put an empty disk of the user over a folder, and give the user what Stretto reads.

    Shared memory is the namespace's own, too.

    A folder that only its owner enters, as the home of the user of the tests may be, becomes an empty one with nothing
    else in it.
    """
    commands = [f"mount -t tmpfs -o mode=0700,uid={USER},gid={USER} none {shlex.quote(str(hidden))}"]
    stage = hidden / STAGE
    for closed in sorted({folder for path in NEEDED if (folder := closed_ancestor(path)) is not None}):
        paths = [path for path in NEEDED if path.is_relative_to(closed)]
        for number, path in enumerate(paths):
            commands += [f"mkdir -p {stage}/{number}", f"mount --rbind {shlex.quote(str(path))} {stage}/{number}"]
        commands.append(f"mount -t tmpfs -o mode=0755 none {shlex.quote(str(closed))}")
        for number, path in enumerate(paths):
            words = shlex.quote(str(path))
            commands += [f"mkdir -p {words}", f"mount --move {stage}/{number} {words}"]
    return [*commands, "mount -t tmpfs -o mode=1777 none /dev/shm", f"rm -rf {stage}"]


def hidden_folder(folder: Path) -> Path:
    """Return the folder to hide so that another user sees nothing of this one. Skip the test without the rights."""
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS):
        pytest.skip(f"processes of other users with mounts of their own need root and {', '.join(TOOLS)}")
    hidden = closed_ancestor(folder) or folder
    words = _as_user(hidden, f"exec {shlex.quote(sys.executable)} -I -c 'import msgspec'")
    tried = subprocess.run(words, env=environment(hidden), capture_output=True, text=True, timeout=150)
    if tried.returncode:
        pytest.skip(f"another user cannot run Python here: {tried.stderr.strip().splitlines()[-1:]}")
    return hidden


def _as_user(hidden: Path, command: str) -> list[str]:
    """Return the words that run a shell command as the user, in a home that only the command's processes see."""
    run = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--inh-caps=-all", "sh", "-c", command]
    return ["unshare", "-m", "sh", "-ec", "; ".join([*mounting(hidden), f"cd {hidden}", f"exec {shlex.join(run)}"])]


def environment(hidden: Path) -> dict[str, str]:
    """Return the environment of the user's processes."""
    return {**os.environ, "HOME": str(hidden), "OMP_NUM_THREADS": "1"}


def joining_as_user(host: str, hidden: Path, key: bytes, *words: str) -> Any:
    """Start `stretto join` as another user on a host, with a copy of the key in the user's home."""
    command = shlex.join([sys.executable, "-m", "stretto.cli", "join", *words, "--key", "join.key"])
    return started(host, _as_user(hidden, f"umask 077; cat > join.key; exec {command}"), environment(hidden), key)
