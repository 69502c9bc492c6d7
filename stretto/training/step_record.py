"""Records after which batches a worker has stepped, to name the cause where workers are in different steps.

A script that leaves out a batch at one worker, or accumulates gradients by a number that differs among workers, steps
after other batches at each, though all exchange the same gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from stretto.errors import explain
from stretto.membership.loop_positions import named
from stretto.transport import Transport

MOST = 4096
"""Number of batches that are recorded: the last ones since a comparison."""


class StepRecord:
    """The batches since the last comparison of the replicas, as (epoch, batch, True if the worker stepped after it)."""

    def __init__(self) -> None:
        self._batches: deque[tuple[int, int, bool]] = deque(maxlen=MOST)

    def note(self, epoch: int, batch: int, has_stepped: bool) -> None:
        """Record a batch of this worker; numbers count from 1."""
        self._batches.append((epoch, batch, has_stepped))

    def clear(self) -> None:
        """Forget all batches: the replicas are equal."""
        self._batches.clear()

    def difference(self, transport: Transport, workers: Sequence[int]) -> str | None:
        """Return the error text for workers that stepped after different batches, or None. Every worker calls it."""
        encoded = transport.all_gather_bytes(msgspec.msgpack.encode(list(self._batches)))
        return difference(
            {
                worker: msgspec.msgpack.decode(one, type=list[tuple[int, int, bool]])
                for worker, one in zip(workers, encoded, strict=True)
            }
        )


def difference(records: dict[int, list[tuple[int, int, bool]]]) -> str | None:
    """Return the error text for the first batch after which only some workers stepped, or None.

    >>> difference({0: [(1, 1, True)], 1: [(1, 1, True)], 2: []}) is None
    True
    >>> print(difference({0: [(2, 1, True)], 1: [(2, 1, False)], 2: [(2, 1, False)]}).splitlines()[0])
    the workers step after different batches: worker 0 stepped after batch 1 of epoch 2, workers 1 and 2 did not
    """
    stepped: dict[tuple[int, int], dict[bool, list[int]]] = {}
    for worker, batches in records.items():
        for epoch, batch, has_stepped in batches:
            stepped.setdefault((epoch, batch), {}).setdefault(has_stepped, []).append(worker)
    apart = min((place for place, workers in stepped.items() if len(workers) == 2), default=None)
    if apart is None:
        return None
    epoch, batch = apart
    some, others = stepped[apart][True], stepped[apart][False]
    return _explained(
        f"the workers step after different batches: {named(some)} stepped after batch {batch} of epoch {epoch}, "
        f"{named(others)} did not"
    )


def in_different_batches(epoch: int, batches: Mapping[int, int]) -> str:
    """Return the error text for workers that take part in one exchange in these batches of an epoch.

    >>> print(in_different_batches(2, {1: 9, 0: 8, 2: 8}).splitlines()[0])
    the workers step after different batches: one exchange of epoch 2 is in batch 8 at workers 0 and 2, 9 at worker 1
    """
    workers: dict[int, list[int]] = {}
    for worker in sorted(batches):
        workers.setdefault(batches[worker], []).append(worker)
    each = ", ".join(f"{batch} at {named(workers[batch])}" for batch in sorted(workers))
    return _explained(f"the workers step after different batches: one exchange of epoch {epoch} is in batch {each}")


def _explained(problem: str) -> str:
    return explain(
        problem,
        got="a step that a worker leaves out, or a counter of batches that differs among workers",
        expected="a step after the same batches at every worker; only a step with gradients that are not finite may be "
        "left out",
        to_type="if (stretto.epoch_step() + 1) % k == 0 or stretto.is_last_batch(): optimizer.step(); for a batch "
        "that is left out, (0 * loss).backward() and a step",
    )
