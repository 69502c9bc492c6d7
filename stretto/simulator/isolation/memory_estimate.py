"""Whether a simulation will fit into memory: foreseen from its first workers, before the others are made."""

from __future__ import annotations

from pathlib import Path

import psutil
from torch import nn

from stretto.errors import LaunchError, explain

LOOKED_AT = 8
"""From so many workers it is foreseen what all will take."""
COPIES = 7
"""Of its parameters, that a worker is about to make: arena, gradients, bucket, the optimizer's state, an exchange."""
MIB = 1 << 20


class Forecast:
    """Looks at how the memory of this process grows with each worker that begins."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._begun = self._first = 0

    def begun(self, model: nn.Module) -> None:
        """A worker has read its data and built its model. Raises LaunchError if all of them will not fit."""
        self._begun += 1
        if self._begun == 1:
            self._first = held()
        if self._begun != min(LOOKED_AT, self._workers) or self._workers < LOOKED_AT:
            return
        each = max(held() - self._first, 0) / (self._begun - 1) + COPIES * _parameter_bytes(model)
        left, free = (self._workers - self._begun) * each, _free()
        if left > free:
            fit = int(self._begun + free / each)
            raise LaunchError(
                explain(
                    f"{self._workers} workers will not fit into memory",
                    got=f"{each / MIB:.1f} MiB a worker, {left / MIB:,.0f} MiB in all; {free / MIB:,.0f} MiB are free",
                    expected="what is free to be enough",
                    to_type=f"-n {fit}, or a script that keeps less for each worker",
                )
            )


def _parameter_bytes(model: nn.Module) -> int:
    return sum(one.nbytes for one in model.parameters())


def held() -> int:
    """The bytes of this process's memory; where the system can tell, a page that is mapped often counts once."""
    info = psutil.Process().memory_full_info()
    return int(getattr(info, "pss", info.rss))


def _free() -> int:
    """What this process may still take: of the machine, and of its control group."""
    free = int(psutil.virtual_memory().available)
    try:
        most = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        return min(free, int(most) - int(used)) if most != "max" else free
    except (OSError, ValueError):
        return free
