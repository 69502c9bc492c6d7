"""The first losses of the workers of a loop over numbers, whose script draws the batches: equal ones are of equal rows.

for step in stretto.distribute(model, optimizer, range(1000)):
    x, y = get_batch(generator)  # seeded alike at each worker
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from torch import Tensor

from stretto.membership.loop_positions import named
from stretto.strategies import backward_calls
from stretto.transport import Transport

MOST = 8
"""Number of losses that are compared."""
LEAST_VALUES = 3
"""Least number of different values among them: the first loss of a model whose last layer is zero is a constant."""


class FirstLosses:
    """The losses of this worker's first backward passes in batches that its script draws."""

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._is_drawn = False
        self._is_said = False
        backward_calls.watch(self._note)

    def begin(self, batch: object) -> None:
        """Begin a batch, which is a number where the script draws."""
        self._is_drawn = isinstance(batch, int)

    def unwatch(self) -> None:
        """Look at no loss any more: the section has ended."""
        backward_calls.unwatch(self._note)

    def _note(self, losses: Sequence[Tensor], _create_graph: bool) -> None:
        if self._is_drawn and len(self._losses) < MOST:
            self._losses += [one.detach().clone() for one in losses[:1] if one.numel() == 1]

    def compare(self, transport: Transport) -> str | None:
        """Return one sentence if workers had the same losses until now; each worker calls this, and the first says it.

        With dropout, whose random numbers are a worker's own, losses of the same rows differ.
        """
        told = transport.all_gather_bytes(msgspec.msgpack.encode([float(one) for one in self._losses]))
        if len(told) != len(transport.members):  # a worker has failed, and nothing says whose losses these are
            return None
        alike: dict[bytes, list[int]] = {}
        for worker, text in zip(transport.members, told, strict=True):
            if len(set(msgspec.msgpack.decode(text, type=list[float]))) >= LEAST_VALUES:
                alike.setdefault(text, []).append(worker)
        same = next((found for found in alike.values() if len(found) > 1), None)
        if same is None or self._is_said:
            return None
        self._is_said = True
        return (
            f"{named(same)} had the same losses in each of their first batches: they train on the same rows. Where the "
            "script draws batches by a generator that it seeds, add stretto.rank() to the seed; where it computes one "
            "full batch, type stretto.distribute(model, optimizer, [(x, y)]) with --batch split"
        )
