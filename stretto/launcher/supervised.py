"""A worker or a service as its supervisor knows it, over all its incarnations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stretto.launcher.engines.interface import Process

State = Literal["running", "restarting", "lost", "left", "done"]
"""A process runs; failed and will be restarted; failed for good; left as it was asked to; or finished."""


@dataclass
class Supervised:
    """A worker or a service of the run, over all its incarnations; `processes` are the ranks of the newest one.

    `back_after_s` is the pause before its restart where a fault asks for one, `short_lives` the number of short
    incarnations in a row, `stopped_s` the time that it was seen stopped before it registered.
    """

    number: int
    processes: list[Process]
    began: float
    incarnation: int = 0
    short_lives: int = 0
    state: State = "running"
    back_after_s: float | None = None
    stopped_s: float = 0.0
    finished: set[int] = field(default_factory=set)
    """Ranks that have exited without a failure."""

    def rank_of(self, process: Process | None) -> int | None:
        """Return the rank of a process; None for a process of an earlier incarnation."""
        return next((rank for rank, one in enumerate(self.processes) if one is process), None)

    def end_ranks(self, exited: Process) -> None:
        """Release the process that has exited, and kill the other ranks: they fail together."""
        exited.release()
        for process in self.processes:
            if process is not exited:
                process.kill()
