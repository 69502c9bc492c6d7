"""Lines about a stopped run, its folder, its page and the command that continues it, and about the continued one."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from stretto.masking import masked
from stretto.run_config import RunConfig, options
from stretto.run_dir import CHECKPOINTS, read_run

DECIDE_WHAT_IS_TRAINED = ("recipe", "seed", "global_batch", "lr_scale", "on_nan", "on_resize")


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


def left_out(config: RunConfig) -> str | None:
    """Return a line that names the options of the resumed run that this one leaves out; None if there are none."""
    before = read_run(config.resume) if config.resume is not None else {}
    words = []
    for name in DECIDE_WHAT_IS_TRAINED:
        _, option, default = options()[name]
        if getattr(config, name) == default != before.get(name, default):
            words += [option.names[-1] if option.names else f"--{name.replace('_', '-')}", str(before[name])]
    if not words:
        return None
    return f"the run that is continued had {shlex.join(words)}, which is left out now: add it to continue as before"
