"""Estimates from the first workers if a simulation fits into memory, before it creates the others."""

from __future__ import annotations

from pathlib import Path

import psutil
from torch import nn

from stretto.errors import LaunchError, explain

SAMPLED_WORKERS = 8
"""Number of workers from which the memory of all is estimated."""
PARAMETER_COPIES = 7
"""Number of copies of its parameters that a worker will allocate: flat buffers, gradients, bucket, optimizer state,
a collective."""
MIB = 1 << 20


class MemoryEstimate:
    """Memory growth of this process per worker."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._started = self._first_bytes = 0

    def worker_started(self, model: nn.Module) -> None:
        """Count a worker that has loaded its data and model. Raises LaunchError if memory will not suffice for all."""
        self._started += 1
        if self._workers < SAMPLED_WORKERS:
            return
        if self._started == 1:
            self._first_bytes = memory_bytes()
        if self._started != SAMPLED_WORKERS:
            return
        growth = max(memory_bytes() - self._first_bytes, 0)
        per_worker = growth / (self._started - 1) + PARAMETER_COPIES * _parameter_bytes(model)
        needed, free = (self._workers - self._started) * per_worker, _free_bytes()
        if needed > free:
            fit = int(self._started + free / per_worker)
            total = f"{needed / MIB:,.0f} MiB in all; {free / MIB:,.0f} MiB are free"
            raise LaunchError(
                explain(
                    f"{self._workers} workers will not fit into memory",
                    got=f"{per_worker / MIB:.1f} MiB a worker, {total}",
                    expected="at most the free memory",
                    to_type=f"-n {fit}, or a script that needs less memory per worker",
                )
            )


def _parameter_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def memory_bytes() -> int:
    """Return the bytes of this process's memory; where the system can tell, shared pages count once."""
    info = psutil.Process().memory_full_info()
    return int(getattr(info, "pss", info.rss))


def _free_bytes() -> int:
    """Return the bytes that this process may still allocate, limited by the machine and by its control group."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used_bytes_text = Path("/sys/fs/cgroup/memory.current").read_text().strip()
        return min(free, int(limit) - int(used_bytes_text)) if limit != "max" else free
    except (OSError, ValueError):
        return free
