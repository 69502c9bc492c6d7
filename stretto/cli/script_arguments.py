"""Options and the script's arguments on one command line: `stretto run -n 4 train.py --lr 0.1`.

Options stand before the script. Every word after the script is an argument of the script, as with python, torchrun and
accelerate, a `--` too. A `--` before the script ends the options.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from stretto.errors import explain
from stretto.masking import masked


def recipe_names(incomplete: str) -> list[str]:
    """Return the recipe names with a prefix, for shell completion."""
    from stretto.recipe.parser import RECIPES

    return [name for name in RECIPES if name.startswith(incomplete)]


def examples(*lines: str) -> str:
    """Return the last paragraph of a command's help."""
    return "\n\n".join(["Examples:", *lines])


Script = Annotated[
    Path,
    typer.Argument(metavar="SCRIPT", help="Python file, console script, or with -m the name of a module."),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="ARGS", help="Arguments of the script: every word after SCRIPT."),
]
RETYPED = "stretto.retyped"
"""Key in a command's context: the words of the command line that repeat it, without the options for folders."""
SCRIPT_TYPED = "stretto.script_typed"
"""Key in a command's context: True if the command line names the script."""
HELP = "--help"
SHOWN = 3
"""Number of names suggested for an unknown one."""


@dataclass
class Split:
    """Command line in two parts: our options, and the script with its arguments.

    `ended` is True if a `--` ended the options.
    """

    ours: list[str] = field(default_factory=list)
    script: list[str] = field(default_factory=list)
    ended: bool = False


def split(arguments: Sequence[str], options: Mapping[str, bool]) -> Split:
    """Divide a command line at the script. `options` maps each name of ours to True if a value follows it.

    Raises TyperException for an unknown option before the script.
    """
    remaining = list(arguments)
    parts = Split(script=remaining)
    while remaining and remaining[0].startswith("-") and remaining[0] != "-":
        if remaining[0] == "--":
            del remaining[0]
            parts.ended = True
            break
        parts.ours += _taken(remaining, options)
    return parts


def _taken(remaining: list[str], options: Mapping[str, bool]) -> list[str]:
    """Remove and return the option at the front of `remaining`, with its value."""
    name = _name(remaining[0], options)
    if name is None:
        raise _unknown(remaining[0].partition("=")[0], options)
    length = 1 + (options[name] and remaining[0] == name)
    option = remaining[:length]
    del remaining[:length]
    return option


def _name(argument: str, options: Iterable[str]) -> str | None:
    """Return the option of ours that a word names: `--seed`, `--seed=1`, `-n`, `-n4`."""
    long = argument.partition("=")[0]
    if long in options:
        return long
    short = argument[:2]
    follows_number = argument[2:].isdigit()
    return short if short in options and not short.startswith("--") and follows_number else None


def _unknown(got: str, options: Iterable[str]) -> TyperException:
    near = ", ".join(nearest(got, [name for name in options if name.startswith("--")]))
    expected = f"options of stretto before the script (the nearest are {near}), the script's own after it"
    to_type = f"SCRIPT {got} ... if it is the script's; --help before SCRIPT lists those of stretto"
    return TyperException(explain(f"there is no option {got}", got=got, expected=expected, to_type=to_type))


def nearest(got: str, names: Iterable[str]) -> list[str]:
    """Return the three names most like `got`, the nearest first."""
    return difflib.get_close_matches(got, list(names), n=SHOWN, cutoff=0.0)


def hint(command: str, parts: Split, options: Mapping[str, bool]) -> str | None:
    """Return a notice if all options stand after the script and some are ours: they may be misplaced.

    `command` holds the words before the options, such as `stretto run`.
    """
    if parts.ours or parts.ended or not parts.script:
        return None
    script, *remaining = parts.script
    ours: list[str] = []
    script_options: list[str] = []
    while remaining and remaining[0] != "--":
        if _name(remaining[0], options) in (None, HELP):
            script_options.append(remaining.pop(0))
        else:
            ours += _taken(remaining, options)
    if not ours:
        return None
    to_type = shlex.join(masked([*command.split(), *ours, script, *script_options, *remaining]))
    notice = f"arguments after {script} belong to it: {shlex.join(masked(ours))} is given to the script"
    return f"{notice}; options stand before the script: {to_type}"


def without(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return options as typed, without those in `names`, which have values.

    >>> without(["-n", "2", "--out", "here", "--resume=old"], ["--out", "--resume"])
    ['-n', '2']
    """
    remaining, kept = list(words), []
    while remaining:
        word = remaining.pop(0)
        if word in names:
            del remaining[:1]
        elif word.partition("=")[0] not in names:
            kept.append(word)
    return kept


class ScriptCommand(TyperCommand):
    """Command with options, a script, and the script's arguments."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split the command line at the script before parsing it."""
        options = {
            name: not getattr(param, "is_flag", False) and not getattr(param, "count", False)
            for param in self.get_params(ctx)
            if param.param_type_name == "option"
            for name in (*param.opts, *param.secondary_opts)
        }
        if ctx.resilient_parsing:
            return list(super().parse_args(ctx, args))
        parts = split(args, options)
        ended = ["--"] * parts.ended
        ctx.meta[SCRIPT_TYPED] = bool(parts.script)
        ctx.meta[RETYPED] = (*without(parts.ours, ("--out", "--resume")), *ended, *parts.script)
        read: list[str] = super().parse_args(ctx, [*parts.ours, *["--"] * bool(parts.script), *parts.script])
        if (notice := hint(ctx.command_path, parts, options)) is not None:
            print(f"stretto: {notice}", file=sys.stderr, flush=True)
        return read
