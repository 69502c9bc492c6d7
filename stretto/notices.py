"""Notices of Stretto on the standard error of a script's process."""

from __future__ import annotations

import functools
import sys


def printable(text: str) -> str:
    """Return a text without the characters that control a terminal: a part of it may come from another machine.

    >>> printable("worker 2 failed (" + chr(27) + "[2Jgone)")
    'worker 2 failed (?[2Jgone)'
    """
    return "".join(one if one.isprintable() or one in "\n\t" else "?" for one in text)


def say(text: str) -> None:
    """Print a line that begins with the library's name. Progress bars of tqdm are cleared first and redrawn."""
    line = f"stretto: {printable(text)}"
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is not None:
        bars.write(line, file=sys.stderr)
        sys.stderr.flush()
    else:
        print(line, file=sys.stderr, flush=True)


@functools.cache
def say_once(text: str) -> None:
    """Print a line as `say` does, unless this process has printed it before."""
    say(text)
