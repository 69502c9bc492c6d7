"""Parameters of a shard in several versions. A published version never changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Version:
    """Parameters of a shard after `number` updates. `readers` counts the readers that have not called `done`."""

    __slots__ = ("number", "ranges", "readers")

    def __init__(self, number: int, ranges: Sequence[Tensor]) -> None:
        self.number, self.ranges, self.readers = number, list(ranges), 0

    def acquire(self) -> Version:
        """Add a reader and return this version."""
        self.readers += 1
        return self

    def release(self) -> None:
        """Note that one reader has finished."""
        self.readers -= 1


class Versions:
    """The newest version, and old ones whose memory is reused once they have no reader."""

    def __init__(self, theta: Sequence[Tensor]) -> None:
        self.newest = Version(0, theta)
        self._retired: list[Version] = []

    def read(self) -> Version:
        """Return the newest version for a reader that calls its `done`."""
        return self.newest.acquire()

    def spare(self) -> Version:
        """Return buffers for the next version: those of an old one without readers, if there is one."""
        spare = next((version for version in self._retired if not version.readers), None)
        if spare is None:
            return Version(-1, [torch.empty_like(version) for version in self.newest.ranges])
        self._retired.remove(spare)
        return spare

    def give_back(self, spare: Version) -> None:
        """Return unused buffers."""
        self._retired.append(spare)

    def publish(self, following: Version) -> None:
        """Make a version the newest one."""
        following.number = self.newest.number + 1
        self._retired.append(self.newest)
        self.newest = following
