"""Lines about a stopped run, its folder, its page and the command that continues it, and about the continued one."""

from __future__ import annotations

import shlex
from pathlib import Path

from stretto.masking import masked
from stretto.run_config import RunConfig, options
from stretto.run_dir import CHECKPOINTS, read_run
from stretto.units import spelled

DECIDE_WHAT_IS_TRAINED = (
    "recipe",
    "seed",
    "global_batch",
    "shares",
    "max_batch",
    "uneven",
    "lr_scale",
    "on_nan",
    "on_resize",
)


def left_in(folder: Path, config: RunConfig) -> str:
    """Return lines that name the folder of a run, its page, and the command that continues the run.

    Arguments that look like secrets are masked.
    """
    lines = [f"run folder: {folder}", f"page: stretto report {folder} writes {folder / 'report.html'}"]
    if (command := command_to_continue(folder, config)) is not None:
        return "\n".join([*lines, command])
    due, every = config.checkpoints, "5m" if config.subcommand == "run" else "1"
    first = f": the first is due after {spelled((due.seconds or 0) / 60)} minutes" if due and due.follows_cost else ""
    lines.append(
        f"continue: not possible, for no checkpoint was written{first}; --checkpoint-every {every} writes them"
    )
    return "\n".join(lines)


def command_to_continue(folder: Path, config: RunConfig) -> str | None:
    """Return a line with the command that continues a run; None if it has no checkpoint."""
    if not any((folder / CHECKPOINTS).glob("round-*")):
        return None
    words = ["stretto", config.subcommand, "--resume", str(folder), *(masked(config.retyped) or ("...",))]
    return f"continue from the last checkpoint: {shlex.join(words)}"


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
