"""Telling our options from the script's: `stretto run train.py -n 4 --lr 0.1` has one of each.

Ours may stand before or after the script. What we don't know goes to the script, unless it looks like a
misspelt one of ours. Everything after `--` goes to the script untouched.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from typer.core import TyperCommand
from typer.exceptions import TyperException

from stretto.errors import explain

NEAR = 0.75
"""How alike two names are, by difflib's ratio, for one to be taken for a slip of the other."""


@dataclass
class Split:
    """A command line in two: our options, and the script with its arguments."""

    ours: list[str] = field(default_factory=list)
    script: list[str] = field(default_factory=list)


def split(arguments: Sequence[str], options: dict[str, bool]) -> Split:
    """Divide a command line. `options` tells of each name of ours whether a value follows.

    Raises TyperException for a near miss, and for an option before the script that is not ours.
    """
    parts, rest = Split(), iter(arguments)
    for argument in rest:
        name = _name(argument, options)
        if argument == "--":
            parts.script += rest
        elif name is not None:
            parts.ours.append(argument)
            if options[name] and argument == name:
                parts.ours += [value for value in (next(rest, None),) if value is not None]
        else:
            _refuse_slip(argument, options, before=not parts.script)
            parts.script.append(argument)
    return parts


def _name(argument: str, options: Iterable[str]) -> str | None:
    """Which option of ours is meant: `--seed`, `--seed=1`, `-n`, `-n4`."""
    long = argument.partition("=")[0]
    if long in options:
        return long
    short = argument[:2]
    follows_number = argument[2:].isdigit()
    return short if short in options and not short.startswith("--") and follows_number else None


def _refuse_slip(argument: str, options: Iterable[str], before: bool) -> None:
    if not argument.startswith("-") or argument == "-" or _is_number(argument):
        return
    got = argument.partition("=")[0]
    near = _nearest(got, options)
    if near is not None:
        problem, expected = f"there is no option {got}", f"{near}, or {got} for the script after --"
        to_type = f"{near}; everything after -- goes to the script untouched"
    elif before:
        problem, expected = f"there is no option {got}", "one of ours, or the script before its own options"
        to_type = f"stretto run SCRIPT {got} ...   (stretto run --help lists ours)"
    else:
        return
    raise TyperException(explain(problem, got=argument, expected=expected, to_type=to_type))


def _nearest(got: str, options: Iterable[str]) -> str | None:
    """The long option of ours that is likest to what was typed, if it is like enough."""
    long = [name for name in options if name.startswith("--")] if got.startswith("--") else []
    names = difflib.get_close_matches(got[2:], [name[2:] for name in long], n=1, cutoff=NEAR)
    return f"--{names[0]}" if names else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class ScriptCommand(TyperCommand):
    """A command that takes a script and hands on what is not its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Sort the command line before it is read."""
        options = {
            name: not getattr(param, "is_flag", False) and not getattr(param, "count", False)
            for param in self.get_params(ctx)
            if param.param_type_name == "option"
            for name in (*param.opts, *param.secondary_opts)
        }
        parts = split(args, options)
        return super().parse_args(ctx, [*parts.ours, "--", *parts.script])
