"""Tables of rows at a shard, such as embeddings: an update changes the few rows that it names, in place.

A table has no versions as other ranges have, since a new version would copy all rows. Where a recipe has a bound, the
table remembers what each update has overwritten, so that a worker reads its rows in the version of its last reply.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.parameter_server.framing import FramingError

ROW_NUMBERS = "int32"
"""Dtype of the numbers of rows in messages."""
Apply = Callable[[Tensor, Tensor, Tensor], None]
"""Writes the next values of rows, given their values and the mean of the updates, into the third tensor."""


@dataclass(frozen=True, slots=True)
class RowChange:
    """Changes of the rows with these numbers, which ascend."""

    numbers: Tensor
    changes: Tensor


@dataclass(frozen=True, slots=True)
class _Overwritten:
    """Values of rows before the update that made version `version`."""

    version: int
    numbers: Tensor
    values: Tensor


class RowTable:
    """The rows of one table that a shard holds."""

    def __init__(self, flat: Tensor, width: int) -> None:
        self.flat, self.width = flat, width
        self._rows = flat.view(-1, width)
        self._collected: list[RowChange] = []
        self._overwritten: deque[_Overwritten] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def checked(self, numbers: Tensor) -> Tensor:
        """Return the numbers of rows as indices. Raises FramingError unless they ascend, and are of rows of this table.

        The indices are a copy.
        """
        ascends = bool((numbers[1:] > numbers[:-1]).all())
        if numbers.numel() and not (ascends and int(numbers[0]) >= 0 and int(numbers[-1]) < len(self)):
            raise FramingError(f"numbers of rows that do not ascend from 0 to {len(self) - 1}")
        return numbers.long()

    def change_of(self, numbers: Tensor, changes: Tensor) -> RowChange:
        """Return the changes of rows in an update. Raises FramingError if they do not fit."""
        return RowChange(self.checked(numbers), changes.view(-1, self.width))

    def add(self, change: RowChange, weight: float, version: int | None) -> None:
        """Add the weighted changes of one update, and remember the rows before this version; None: do not."""
        self._remember(change.numbers, version)
        self._rows.index_add_(0, change.numbers, change.changes, alpha=weight)

    def collect(self, change: RowChange, weight: float) -> None:
        """Keep the weighted changes of an update for `apply`."""
        self._collected.append(RowChange(change.numbers, change.changes * weight))

    def apply(self, samples: int, act: Apply, version: int | None) -> None:
        """Apply the mean of the collected updates, which are weighted by their samples, to the rows in them."""
        collected, self._collected = self._collected, []
        if not samples or not collected:
            return
        numbers, places = torch.unique(torch.cat([one.numbers for one in collected]), return_inverse=True)
        total = self.flat.new_zeros(len(numbers), self.width)
        total.index_add_(0, places, torch.cat([one.changes for one in collected]))
        self._remember(numbers, version)
        following = torch.empty_like(total)
        act(self._rows[numbers], total.div_(samples), following)
        self._rows[numbers] = following

    def read(self, numbers: Tensor, version: int) -> Tensor:
        """Return a copy of rows as of a version, or their newest values where nothing since then is remembered."""
        found = self._rows[numbers]
        for one in reversed(self._overwritten):
            if one.version <= version or not one.numbers.numel():
                continue
            places = torch.searchsorted(one.numbers, numbers).clamp_(max=len(one.numbers) - 1)
            is_changed = one.numbers[places] == numbers
            found[is_changed] = one.values[places[is_changed]]
        return found

    def forget(self, version: int) -> None:
        """Forget the values that only versions before this one have."""
        while self._overwritten and self._overwritten[0].version <= version:
            self._overwritten.popleft()

    def _remember(self, numbers: Tensor, version: int | None) -> None:
        if version is not None:
            self._overwritten.append(_Overwritten(version, numbers, self._rows[numbers]))


def split_by_width(theta: Sequence[Tensor], widths: Sequence[int]) -> tuple[list[Tensor], list[RowTable]]:
    """Return the ranges without rows, and the tables of those with rows."""
    pairs = list(zip(theta, widths or [0] * len(theta), strict=True))
    return [flat for flat, width in pairs if not width], [RowTable(flat, width) for flat, width in pairs if width]
