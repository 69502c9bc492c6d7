"""Runs all tests in parts, side by side: `python tests/parts.py`.

Each part is about as much work: training, what else computes, whole runs of several processes, and all the rest. They
wait a good deal, so that there may be more of them than processors.
"""

from __future__ import annotations

import subprocess
import sys

LEARNING = ["tests/training/test_accuracy.py", "tests/training/test_recipes.py"]
PARTS = (
    ["tests/training"],
    ["tests/codecs", "tests/kernels", "tests/simulator", "tests/parameter_server"],
    ["tests/test_live.py", "tests/test_survives.py", "tests/launcher", *LEARNING],
)


def main() -> int:
    """1 if a part failed. Ctrl-C is heard by all, and waits until they have cleaned up."""
    rest = ["tests", *(f"--ignore={path}" for part in PARTS for path in part)]
    training, *others = PARTS
    training = [*training, *(f"--ignore={path}" for path in LEARNING)]
    running = [subprocess.Popen([sys.executable, "-m", "pytest", *part]) for part in (training, *others, rest)]
    failed = 0
    while running:
        try:
            failed |= running[-1].wait() != 0
            running.pop()
        except KeyboardInterrupt:
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
