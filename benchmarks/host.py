"""Program of one host in the laboratory.

python -m benchmarks.host lab "torch DDP" FOLDER TARGET SEED
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from benchmarks.race import Race
from benchmarks.ways import CONTESTS


def main() -> None:
    """Train the way that is named."""
    _end_with_the_laboratory()
    contest, name, folder, target, seed = sys.argv[1:]
    torch.set_num_threads(1)
    way = CONTESTS[contest][name]
    way.train(Race(way, Path(folder), float(target), int(seed)))


def _end_with_the_laboratory() -> None:
    """Be killed when the process that started this one ends (Linux)."""
    import ctypes

    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL


if __name__ == "__main__":
    main()
