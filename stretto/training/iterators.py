"""Iterators over the shared loader: one is live at a time, and a peeked batch begins no epoch.

`next(iter(loader))` looks at a batch before training. When another iteration follows before an optimizer step, the
epoch has not begun: the later iteration begins the same epoch, and the peeked samples are assigned again. A restarted
worker repeats the script, so the run's state lists which iterations were peeks: there the worker gets a batch of the
script's own loader, which does not count.

An epoch that is passed, or continues at its end, has no batches. A script that asks for the next epoch's first batch
where an iterator ends, `except StopIteration: it = iter(loader); batch = next(it)`, gets a batch of a later epoch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Protocol

from stretto.errors import ScriptError, explain
from stretto.training.epochs import Epochs
from stretto.training.loop_exits import Place
from stretto.training.progress import LoopProgress
from stretto.training.schedule import Schedules


class Iterated(Protocol):
    """The part of a trainer that an iterator uses."""

    progress: LoopProgress
    epochs: Epochs
    loader: Any
    schedules: Schedules


class Batches(Iterator[Any]):
    """One iteration over the shared loader, begun at a `place` of the script: this worker's batches of a common epoch.

    Raises ScriptError at the next batch after a later iteration has begun: one epoch of all workers is under way.
    """

    def __init__(self, trainer: Iterated, place: Place | None = None) -> None:
        self._trainer, self._place = trainer, place
        self._is_over, self._number = False, 0
        self._begin()

    def _begin(self) -> None:
        trainer = self._trainer
        counts = trainer.epochs.begin_epoch(self._place)
        self._number = trainer.progress.iterations
        self._repeated = None if counts else iter(trainer.loader)
        is_continued = trainer.epochs.current is None or trainer.progress.samples_of_epoch > 0
        self._may_be_empty = counts and is_continued

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if self._number != self._trainer.progress.iterations:
            _refuse_outdated()
        batch = self._take()
        while batch is None and self._may_be_empty and isinstance(sys.exception(), StopIteration):
            self._begin()  # `except StopIteration: it = iter(loader); batch = next(it)` must have a batch
            batch = self._take()
        self._may_be_empty = False
        if batch is None:
            self._is_over = True
            self._trainer.schedules.leave_loop()
            raise StopIteration
        return batch

    def _take(self) -> Any:
        return next(self._repeated, None) if self._repeated is not None else self._trainer.epochs.next_batch()

    def __del__(self) -> None:
        """Note that the script has left its loop, unless a later iteration has begun."""
        if not self._is_over and self._number == self._trainer.progress.iterations:
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
