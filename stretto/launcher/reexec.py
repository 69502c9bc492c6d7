"""Starting a command again with an environment that must be there before Python begins."""

from __future__ import annotations

import os
import sys

SETTLED = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
"""Sets are walked through in one order, and sums are made by one thread: so a simulation is the same every time."""


def begin_anew() -> None:
    """Replace this process by the same command under these settings, unless it is."""
    if all(os.environ.get(name) == value for name, value in SETTLED.items()):
        return
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-P", "-m", "stretto.cli", *sys.argv[1:]], {**os.environ, **SETTLED})
