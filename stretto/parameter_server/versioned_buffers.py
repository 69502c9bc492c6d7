"""The numbers of a shard, version after version. What is there once never changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Version:
    """The numbers of a shard as they were after `number` applications. `held` counts those who still read them."""

    __slots__ = ("held", "number", "ranges")

    def __init__(self, number: int, ranges: Sequence[Tensor]) -> None:
        self.number, self.ranges, self.held = number, list(ranges), 0

    def kept(self) -> Version:
        """The same, for one reader more."""
        self.held += 1
        return self

    def done(self) -> None:
        """One reader has read it."""
        self.held -= 1


class Versions:
    """The newest version, and old ones whose memory is written again when nobody reads them any more."""

    def __init__(self, theta: Sequence[Tensor]) -> None:
        self.newest = Version(0, theta)
        self._retired: list[Version] = []

    def read(self) -> Version:
        """The newest version, for a reader that calls its `done`."""
        return self.newest.kept()

    def spare(self) -> Version:
        """Numbers to write the next version into: those of an old one that nobody reads, if there is one."""
        free = next((one for one in self._retired if not one.held), None)
        if free is None:
            return Version(-1, [torch.empty_like(one) for one in self.newest.ranges])
        self._retired.remove(free)
        return free

    def give_back(self, spare: Version) -> None:
        """What was written into it is not wanted."""
        self._retired.append(spare)

    def publish(self, following: Version) -> None:
        """Make it the newest version."""
        following.number = self.newest.number + 1
        self._retired.append(self.newest)
        self.newest = following
