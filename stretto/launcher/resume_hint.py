"""Lines about a stopped run: its folder, its page, and the command that continues it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from stretto.masking import masked
from stretto.run_dir import CHECKPOINTS


def left_in(folder: Path, retyped: Sequence[str], command: str = "run") -> str:
    """Return lines that name the run folder, its page, and the command that continues the run.

    `retyped` are the words of the `command` after `--resume FOLDER`; arguments that look like secrets are masked.
    """
    lines = [f"run folder: {folder}", f"page: stretto report {folder} writes {folder / 'report.html'}"]
    if any((folder / CHECKPOINTS).glob("round-*")):
        resume_command = shlex.join(["stretto", command, "--resume", str(folder), *(masked(retyped) or ("...",))])
        return "\n".join([*lines, f"continue from the last checkpoint: {resume_command}"])
    every = "5m" if command == "run" else "1"
    lines.append(f"continue: not possible, for no checkpoint was written; --checkpoint-every {every} writes them")
    return "\n".join(lines)
