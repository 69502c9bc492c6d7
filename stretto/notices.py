"""Notices of Stretto on the standard error of a script's process."""

from __future__ import annotations

import functools
import sys


def say(text: str) -> None:
    """Print a line that begins with the library's name. Progress bars of tqdm are cleared first and redrawn."""
    bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
    if bars is not None:
        bars.write(f"stretto: {text}", file=sys.stderr)
        sys.stderr.flush()
    else:
        print(f"stretto: {text}", file=sys.stderr, flush=True)


@functools.cache
def say_once(text: str) -> None:
    """Print a line as `say` does, unless this process has printed it before."""
    say(text)
