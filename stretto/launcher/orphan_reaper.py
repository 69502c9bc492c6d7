"""Process that kills the workers of a launcher that has exited without ending them.

It is started before the workers. The launcher writes the process group of each worker to its stdin: `+123` at the
start, `-123` after the exit. The end of stdin means that the launcher has exited, possibly by SIGKILL; every group that
is left is killed then, with the processes that workers have started. Workers that watch their parent could not do
this for their own children, nor while they are blocked in a call.

It runs as a file without site packages, starts within milliseconds, and imports nothing of Stretto.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Record the groups until the input ends, then kill the remaining ones."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
