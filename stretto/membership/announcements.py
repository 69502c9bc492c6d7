"""Announcements of the coordinator: notices for the user, and membership events for the event log."""

from __future__ import annotations

from stretto.events import Event, of_process
from stretto.membership.replica import Rank, Replica


class Announcements:
    """Notices and events since they were last taken."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.events: list[Event] = []

    def take(self) -> tuple[list[str], list[Event]]:
        """Return the notices and events, each once."""
        taken = self.notices, self.events
        self.notices, self.events = [], []
        return taken

    def changed(
        self, change: str, process: Event, incarnation: int, generation: int, why: str, **further: object
    ) -> None:
        """Add the event of a change; `process` are the fields that name the process."""
        fields = {"what": change, "incarnation": incarnation, "generation": generation, "why": why}
        self.events.append({"event": "membership", **process, **fields, **further})

    def failed(self, replica: Replica, generation: int, remaining: int, restart_note: str, now: float) -> None:
        """Announce that a replica has failed, and that the others, `remaining` in number, continue."""
        rank = replica.ranks[replica.failed_rank]
        activity = rank.described_activity(now)
        doing = f" while {activity}" if activity else ""
        failed = f"{replica.name_of(rank)} failed ({replica.why}){doing}"
        self.notices.append(f"{failed}{_continuing(remaining)}{restart_note}")
        cause = {"rank": rank.number} if len(replica.ranks) > 1 else {}
        self.changed("failed", of_process(replica.worker), replica.incarnation, generation, replica.why, **cause)

    def left(self, replica: Replica, generation: int, remaining: int) -> None:
        """Announce that a replica has left the run, which others, `remaining` in number, continue."""
        self.notices.append(f"worker {replica.worker} has left, since {replica.why}{_continuing(remaining)}")
        self.changed("left", of_process(replica.worker), replica.incarnation, generation, replica.why)

    def slow(self, replica: Replica, rank: Rank, generation: int, silent: float, limit_s: float, now: float) -> None:
        """Announce a rank without a heartbeat for `silent` seconds, which fails after `limit_s`."""
        activity = rank.described_activity(now - silent)
        doing = f" It was {activity}." if activity else ""
        why, left_s = f"no heartbeat for {silent:.1f} s", max(limit_s - silent, 0.0)
        self.notices.append(f"{replica.name_of(rank)} has sent {why}.{doing} In {left_s:.1f} s it is declared failed")
        self.changed("slow", of_process(replica.worker, rank.number), replica.incarnation, generation, why)


def _continuing(workers: int) -> str:
    return f"; continuing with {workers} {'worker' if workers == 1 else 'workers'}" if workers else ""
