"""Iterators over the shared loader: one is live at a time, and a peeked batch begins no epoch.

`next(iter(loader))` looks at a batch before training. When another iteration follows before an optimizer step, the
epoch has not begun: the later iteration begins the same epoch, and the peeked samples are assigned again. A restarted
worker repeats the script, so the run's state lists which iterations were peeks: there the worker gets a batch of the
script's own loader, which does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from stretto.errors import ScriptError, explain
from stretto.training.schedule import Schedules


class Iterated(Protocol):
    """The part of a trainer that an iterator uses."""

    iterations: int
    loader: Any
    schedules: Schedules

    def begin_epoch(self) -> bool:
        """Begin an iteration; return False if it repeats a peek of an earlier life."""

    def next_batch(self) -> Any:
        """Return this worker's next batch, or None at the end of the epoch."""


class Batches(Iterator[Any]):
    """One iteration over the shared loader: this worker's batches of a common epoch.

    Raises ScriptError at the next batch after a later iteration has begun: one epoch of all workers is under way.
    """

    def __init__(self, trainer: Iterated) -> None:
        self._trainer = trainer
        self._is_over, self._number = False, 0
        counts = trainer.begin_epoch()
        self._number = trainer.iterations
        self._repeated = None if counts else iter(trainer.loader)

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if self._number != self._trainer.iterations:
            _refuse_outdated()
        batch = next(self._repeated, None) if self._repeated is not None else self._trainer.next_batch()
        if batch is None:
            self._is_over = True
            self._trainer.schedules.leave_loop()
            raise StopIteration
        return batch

    def __del__(self) -> None:
        """Note that the script has left its loop, unless a later iteration has begun."""
        if not self._is_over and self._number == self._trainer.iterations:
            self._trainer.schedules.leave_loop()


def _refuse_outdated() -> None:
    raise ScriptError(
        explain(
            "a later iterator of the loader has replaced this one, whose epoch has ended",
            got="two iterators of the distributed loader at a time, as in nested loops or zip(loader, loader)",
            expected="one iterator at a time, since all workers share one epoch",
            to_type="keep the script's own loader under another name, and use that one for the inner loop",
        )
    )


@dataclass(frozen=True)
class EpochStart:
    """The state of a worker's counters when its epoch began."""

    steps: int
    counted: int
    """Steps with those that are only counted because a gradient scaler may have skipped them."""
    global_steps: int
    own_samples: int
    whole: bool
    """True if this worker takes part from the epoch's first global step."""

    def is_stepless(self, steps: int, global_steps: int) -> bool:
        """Return True if batches were given since, and the optimizer made no step."""
        return self.whole and steps == self.steps and global_steps > self.global_steps

    def is_peek(self, steps: int, global_steps: int) -> bool:
        """Return True if one batch was given since, or none, and the optimizer made no step."""
        return self.whole and steps == self.steps and global_steps <= self.global_steps + 1
