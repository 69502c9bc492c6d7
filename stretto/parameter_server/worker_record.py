"""What a shard knows of one worker."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from stretto.parameter_server.versioned_buffers import Version

REMEMBERED = 256
"""How many of a worker's own versions are remembered to tell its staleness."""


@dataclass(frozen=True, slots=True)
class Applied:
    """One update has become part of version `version`; it was `staleness` versions old."""

    seq: int
    version: int
    staleness: int
    samples: int


@dataclass(slots=True)
class Draft:
    """The next version as it would be with one update, written while that is still coming in."""

    seq: int
    base: Version
    weight: float
    following: Version
    finite: bool = True


@dataclass(slots=True)
class WorkerRecord:
    """What a shard knows of one worker."""

    draft: Draft | None = None
    done: int = 0
    """All its updates up to this number have come: the rounds that it has ended."""
    beyond: set[int] = field(default_factory=set)
    own: deque[int] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Versions made of its updates alone: it had those before they were made."""
    applied: list[Applied] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    read: dict[int, Version] = field(default_factory=dict)
    """The versions that it computes on, if the weight of updates asks for them."""
    before: Version | None = None
    """The version before its last update, if the rule moves worker and server by the same difference."""
    waits: bool = False
    rests: bool = False
    """It has come to a meeting of all, and holds nobody back until that is over."""
    meeting: int = -1
    """The last meeting that it has come to."""
    outside: bool = False
    """It holds nobody back, and nobody holds it back, until it sends its next update."""
    since: int = 0
    """Its rounds at the last meeting; the bound counts from there."""

    @property
    def clock(self) -> int:
        """The rounds that it has ended since the last meeting."""
        return self.done - self.since

    def knows(self, seq: int) -> bool:
        """Whether this update has come before."""
        return seq <= self.done or seq in self.beyond

    def note(self, seq: int) -> None:
        """This update has come."""
        self.beyond.add(seq)
        while self.done + 1 in self.beyond:
            self.done += 1
            self.beyond.remove(self.done)
