"""Re-execution of a command with environment variables that Python reads at its start."""

from __future__ import annotations

import os
import sys

FIXED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
"""Fixed order of sets and single-threaded sums: a simulation is the same every time."""


def reexecute() -> None:
    """Replace this process by the same command under these settings, unless they hold already."""
    if all(os.environ.get(name) == value for name, value in FIXED.items()):
        return
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", "stretto.cli", *sys.argv[1:]], {**os.environ, **FIXED})
