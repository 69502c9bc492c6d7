"""A replica as the coordinator knows it: the newest incarnation of a worker, and its ranks, which fail together.

A rank is one process of a replica. The replica is ready once all its ranks have reported that they are paused, and it
has state only if all of them have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from stretto.events import process_name
from stretto.membership.loop_positions import Waits
from stretto.membership.messages import ReadyReport

State: TypeAlias = Literal["new", "in", "gone", "left"]
ASKED = "it was asked to end"


@dataclass(slots=True)
class Rank:
    """Last known state of one process of a replica."""

    number: int
    last_message: float | None = None
    """Time of its last message; None before its first one."""
    report: ReadyReport | None = None
    """Its report that it is paused; None while it runs."""
    global_step: int = 0
    """Furthest global step that it is known to have been assigned in this generation."""
    place: int = -1
    """Number of collective operations that it has begun, from its heartbeats; -1 before its first generation."""
    doing: str = ""
    waits: Waits | None = None
    """Last collective operation of this generation that it is known to have waited in."""
    since: float = 0.0
    slow: bool = False

    @property
    def is_between_steps(self) -> bool:
        """True if it is paused between two steps."""
        return self.report is not None and self.report.between_steps

    @property
    def has_history(self) -> bool:
        """True if it is paused and has state."""
        return self.report is not None and self.report.has_history

    def is_behind(self, global_step: int) -> bool:
        """Return True if it is paused before this global step."""
        return self.report is not None and self.report.global_step < global_step

    def described_activity(self, now: float) -> str:
        """Return its activity and the seconds for which it has lasted; empty if it is not known."""
        return f"{self.doing} for {max(now - self.since, 0.0):.1f} s" if self.doing else ""


class Replica:
    """Last known incarnation of a worker, in state `new` until it is a member, with this number of ranks."""

    def __init__(self, worker: int, incarnation: int, ranks: int, heard_at: float | None = None) -> None:
        self.worker, self.incarnation = worker, incarnation
        self.ranks = [Rank(number, heard_at) for number in range(ranks)]
        self.state: State = "new"
        self.is_leaving = False
        self.last_generation = 0
        """Last generation that it was a member of."""
        self.ended_at = 0.0
        self.will_restart = self.is_unreachable = False
        self.why = ""
        self.failed_rank = 0
        """Rank whose failure has ended the replica."""

    @property
    def is_running(self) -> bool:
        """True if the replica runs, as far as is known."""
        return self.state in ("new", "in")

    @property
    def has_finished(self) -> bool:
        """True if its script has ended, and not since the replica was asked to."""
        return self.state == "left" and self.why != ASKED

    @property
    def place(self) -> int:
        """Number of collective operations that it has begun; -1 before its first generation. Its rank 0 counts them."""
        return self.ranks[0].place

    @property
    def is_ready(self) -> bool:
        """True if all ranks are paused."""
        return all(rank.report is not None for rank in self.ranks)

    @property
    def is_any_ready(self) -> bool:
        """True if a rank is paused."""
        return any(rank.report is not None for rank in self.ranks)

    @property
    def is_between_steps(self) -> bool:
        """True if all ranks are paused between two steps."""
        return all(rank.is_between_steps for rank in self.ranks)

    @property
    def has_history(self) -> bool:
        """True if all ranks are paused and have state."""
        return all(rank.has_history for rank in self.ranks)

    @property
    def is_divided(self) -> bool:
        """True if only some of its ranks have state."""
        return self.is_ready and not self.has_history and any(rank.has_history for rank in self.ranks)

    @property
    def waits(self) -> Waits | None:
        """Collective operation that it waits in: that of its lowest rank that waits."""
        return next((rank.waits for rank in self.ranks if rank.waits is not None), None)

    def name_of(self, rank: Rank) -> str:
        """Return the name of one of its processes."""
        return process_name(self.worker, rank.number)

    def running_ranks(self) -> Iterator[Rank]:
        """Yield the ranks that are not paused."""
        return (rank for rank in self.ranks if rank.report is None)

    def silent_ranks(self, seconds: float, now: float) -> Iterator[tuple[Rank, float]]:
        """Yield the ranks without a message for longer than this, with the time in seconds."""
        for rank in self.ranks:
            if rank.last_message is not None and now - rank.last_message > seconds:
                yield rank, now - rank.last_message

    def reports(self) -> list[ReadyReport]:
        """Return the reports of all ranks, which are paused."""
        return [rank.report for rank in self.ranks if rank.report is not None]

    def enter(self, generation: int) -> None:
        """Make it a member of a generation: its ranks run."""
        self.state, self.last_generation = "in", generation
        for rank in self.ranks:
            rank.waits, rank.report, rank.global_step = None, None, 0
