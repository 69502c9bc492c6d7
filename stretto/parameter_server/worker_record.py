"""A shard's record of one worker."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from stretto.parameter_server.versioned_buffers import Version

OWN_VERSIONS_KEPT = 256
"""Number of a worker's own versions that are stored to compute its staleness."""


@dataclass(frozen=True, slots=True)
class Applied:
    """An applied update: it became part of version `version`, and was `staleness` versions old."""

    seq: int
    version: int
    staleness: int
    samples: int


@dataclass(slots=True)
class Draft:
    """The next version with one update applied, written while the update arrives."""

    seq: int
    base: Version
    weight: float
    following: Version
    finite: bool = True


@dataclass(slots=True)
class WorkerRecord:
    """A shard's record of one worker."""

    draft: Draft | None = None
    completed: int = 0
    """Sequence number up to which all updates have arrived: the rounds that the worker has completed."""
    received_ahead: set[int] = field(default_factory=set)
    own_versions: deque[int] = field(default_factory=lambda: deque(maxlen=OWN_VERSIONS_KEPT))
    """Versions that consist of its updates alone: the worker had their content before."""
    applied: list[Applied] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    read: dict[int, Version] = field(default_factory=dict)
    """Versions that the worker computes on, if the weight of updates needs them."""
    version: int = 0
    """Version that the worker has read last."""
    previous: Version | None = None
    """Version before its last update, if the rule moves worker and server by the same difference."""
    is_waiting: bool = False
    at_barrier: bool = False
    """True if the worker is at a barrier, and holds no worker back until its end."""
    barrier: int = -1
    """Last barrier that the worker has come to."""
    exempt: bool = False
    """True if the worker holds no worker back, and is not held back, until its next update."""
    rounds_at_barrier: int = 0
    """Its rounds at the last barrier, from which the bound counts."""

    @property
    def clock(self) -> int:
        """Rounds completed since the last barrier."""
        return self.completed - self.rounds_at_barrier

    def has_received(self, seq: int) -> bool:
        """Return True if this update has arrived before."""
        return seq <= self.completed or seq in self.received_ahead

    def note(self, seq: int) -> None:
        """Note that this update has arrived."""
        self.received_ahead.add(seq)
        while self.completed + 1 in self.received_ahead:
            self.completed += 1
            self.received_ahead.remove(self.completed)
