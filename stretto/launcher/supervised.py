"""A worker or a service as its supervisor knows it, over all its incarnations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from stretto.launcher.engines.interface import Process

State = Literal["running", "restarting", "lost", "left", "done"]
"""A process runs; failed and will be restarted; failed for good; left as it was asked to; or finished."""

FIRST_S, LONGEST_S = 0.2, 10.0
"""First and longest pause before a restart. The pause doubles with each restart, and starts over when an incarnation
has run longer than the longest one.
"""

SIBLING_S = 0.5
"""Time in which the exit of the rank that failed first follows that of a rank which stopped itself because of it."""


def pause_s(restart: int) -> float:
    """Seconds before the restart of this number, from 0.

    >>> [pause_s(restart) for restart in (0, 1, 2, 5, 9000)]
    [0.2, 0.4, 0.8, 6.4, 10.0]
    """
    return min(FIRST_S * 2.0 ** min(restart, 30), LONGEST_S)


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
    is_declared_failed: bool = False
    """True once the coordinator has declared this incarnation failed, though all its processes are running."""
    finished: set[int] = field(default_factory=set)
    """Ranks that have exited without a failure."""
    stopped_themselves: set[int] = field(default_factory=set)
    """Ranks that have exited since they are no longer members."""
    waits_out: int = 0
    """Number of incarnations that could not join an epoch under way, and count as no restart."""
    share_limit: int = 0
    """Largest share of a global step that it has memory for, after it has run out of it; 0 if it has not."""
    out_of_memory: int = 0
    """Number of incarnations that have run out of memory and were given a smaller share, which count as no restart."""
    faults: int = 0
    """Number of faults that were injected, the ends of pauses apart."""

    def rank_of(self, process: Process | None) -> int | None:
        """Return the rank of a process; None for a process of an earlier incarnation."""
        return next((rank for rank, one in enumerate(self.processes) if one is process), None)

    def struck(self, begins: bool) -> int:
        """Return the rank that a fault is for: the next one if the fault `begins`, else that of the last fault.

        >>> worker = Supervised(0, [None, None], 0.0)
        >>> [worker.struck(begins) for begins in (True, True, False, True)]
        [0, 1, 1, 0]
        """
        self.faults += begins
        return (self.faults - 1) % len(self.processes)

    def next_pause_s(self, now: float) -> float:
        """Return the seconds before its restart, after a failure at this time."""
        self.short_lives = 0 if now - self.began > LONGEST_S else self.short_lives
        return pause_s(self.short_lives) if self.back_after_s is None else self.back_after_s

    def restart(self, now: float) -> None:
        """Begin the next incarnation, whose processes are not there yet."""
        self.incarnation, self.short_lives = self.incarnation + 1, self.short_lives + 1
        self.state, self.began = "running", now
        self.back_after_s, self.stopped_s, self.is_declared_failed = None, 0.0, False
        self.finished, self.stopped_themselves = set(), set()

    def may_follow(self, rank: int) -> bool:
        """Return True, once for each rank that stopped itself, if the failure of another rank may be the reason."""
        is_new = rank not in self.stopped_themselves
        self.stopped_themselves.add(rank)
        return is_new and len(self.processes) > 1

    def declare_failed(self, rank: int) -> None:
        """Note that this rank was declared failed; kill it at the second call, if there are others that wait for it.

        The others end all ranks earlier if they notice it. In an operation of a library or of the script they do not.
        """
        if self.is_declared_failed and len(self.processes) > 1:
            self.processes[rank].kill()
        self.is_declared_failed = True

    def end_ranks(self, exited: Process) -> None:
        """Release the process that has exited, and kill the other ranks: they fail together."""
        exited.release()
        for process in self.processes:
            if process is not exited:
                process.kill()
