"""The last to leave: ends the workers when their launcher is gone without having done it.

A process of its own, started before the workers. It is told each worker's process group on its standard
input: `+123` when it begins, `-123` when it has ended. The end of that input means that the launcher has
ended, be it by SIGKILL; whatever group is left then is killed, processes that workers have started included.
A process that only watched its parent could not do that for its own children, nor while it is stuck in a
call.

Run as a file, without site packages, so that it is up within a few milliseconds; it imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Remember the groups until the input ends, then kill those that are left."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
