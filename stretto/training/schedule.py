"""Learning-rate schedulers: how far each is advanced when the script steps it.

A scheduler is written for one process, which takes one batch a step. Among N workers a global step takes N batches, so
a scheduler that is stepped once a batch would come to an N-th of its length. Under "per-sample" such a call advances it
by the batches that the global step took: it is where it would be in one process after as many samples. A scheduler
whose length the script has derived from `len(loader)` after `distribute` counts global steps already, and is advanced
by these. Stepped between two epochs, or with an argument (a metric, an epoch), it is advanced as the script says.

Torch keeps no list of schedulers, and their classes override `step`: so `step` is wrapped in the classes. The wrapper
does nothing to a scheduler whose optimizer was not distributed. The position is counted alike on all workers; newcomers
receive it with the schedulers' states (see `Settings`).
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, Literal, Protocol, get_args
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from stretto.errors import ScriptError, explain
from stretto.recipe.recipe import Recipe
from stretto.runtime.event_writer import EventWriter
from stretto.strategies.consistency_check import Rates
from stretto.training.progress import LoopProgress
from stretto.training.schedulers import is_initial, length_of, optimizer_of, position_of, total_of
from stretto.transport import Transport

Mode = Literal["per-sample", "per-step"]
Both = tuple[float, float]
"""A position in batches of the script, and in global steps."""

CLOSED_FORMS = (LambdaLR, OneCycleLR)
"""Classes whose learning rate follows from the number of steps alone."""
PAST_STEPS = 3
"""Calls past a schedule's end after which a notice says that the script continues."""
ROUNDING = 1e-6
FIELDS = (
    *("divisor", "done", "pending", "base", "window_steps", "last_window_steps", "left", "epoch_steps", "windows"),
    *("is_called", "was_called", "at_call", "is_called_last", "streamed"),
)
"""Attributes of `Schedules` that hold its position, without the underscore."""


class Run(Protocol):
    """The part of a trainer that schedules depend on."""

    recipe: Recipe | None
    transport: Transport
    events: EventWriter
    loader: Any
    batch_source: Any
    progress: LoopProgress

    @property
    def epoch_batches(self) -> Any:
        """The epoch under way."""

    @property
    def global_step(self) -> Any:
        """The global step under way."""


@dataclass
class _Creation:
    """The circumstances in which a scheduler was made after `distribute`."""

    at: Both
    by_length: bool
    """True if the script had asked for the length of the distributed loader."""


@dataclass
class _Stepped:
    """A scheduler that the script has stepped."""

    name: str
    length: int | None
    """Steps until its end; None if that is unknown."""
    position: int = 0
    past: int = 0
    """Calls after its end."""


class Schedules:
    """Advances the schedulers of the distributed optimizers. `global_batch_of` batches of the script make one here."""

    def __init__(
        self, run: Run, optimizers: Sequence[Optimizer], mode: Mode = "per-sample", global_batch_of: int = 1
    ) -> None:
        self._run, self._optimizers, self._mode, self._global_batch_of = run, optimizers, mode, global_batch_of
        self._creations: WeakKeyDictionary[LRScheduler, _Creation] = WeakKeyDictionary()
        self._records: dict[LRScheduler, _Stepped] = {}
        """Held until the end: the last checkpoint is written when the script's own names may be gone."""
        self._by_number: list[LRScheduler] = []
        """Schedulers that the script has stepped with a number."""
        self._inside = self._has_notified = False
        self.is_left = False
        """True if the script has left its loop since the last global step began."""
        self._divisor = 0
        """Batches a global step when the script asked for the length of the loader; 0 before."""
        self._done: Both = (0.0, 0.0)
        """Position when the window began: the global steps since the optimizer has stepped last."""
        self._pending: Both = (0.0, 0.0)
        """Batches of the window in earlier epochs."""
        self._base: Both = (0.0, 0.0)
        """Batches of this epoch before the window."""
        self._window_steps = self._last_window_steps = 0
        """Global steps of the window, and of the one before."""
        self._left = 0
        """Global steps of the window that are of earlier epochs."""
        self._epoch_steps = 0
        self._windows = 0
        """Windows of this epoch that are over."""
        self._is_called = self._was_called = False
        """True if a scheduler was stepped in this window, and in an earlier one of this epoch."""
        self._at_call: Both = (0.0, 0.0)
        """Batches of this epoch at that time."""
        self._is_called_last = False
        """True if that was in the last global step of an epoch."""
        self._streamed = 0

    # --- the position -------------------------------------------------------------------------------------------

    def asked_length(self) -> None:
        """Note that the script has asked for the number of global steps of an epoch."""
        if not self._divisor:
            self._divisor = self._run.batch_source.batches_per_step
            self._base = self._counted(self._base[0])

    def trust_lengths(self) -> None:
        """Write no notices about lengths: a library has derived them from the number of global steps."""
        self._has_notified = True

    def begin_global_step(self, has_stepped: bool, streamed: int) -> None:
        """Begin a global step. `has_stepped` is True if the optimizer has stepped in the one before.

        `streamed` is the number of batches in it, where they come from a stream.
        """
        if self._window_steps and (has_stepped or self._is_called):
            self._close()
        if not self._epoch_steps:
            self._windows, self._was_called = 0, False
        self._window_steps += 1
        self._epoch_steps += 1
        self._streamed += streamed
        self.is_left = False

    def end_epoch(self) -> None:
        """End an epoch. What others have got since this worker's last step belongs to its next."""
        if self._is_called:
            self._close()
        now = self._now()
        self._pending = tuple(map(float.__add__, self._pending, _minus(now, self._base)))  # type: ignore[assignment]
        self._base, self._streamed = (0.0, 0.0), 0
        self._epoch_steps, self._left = 0, self._window_steps

    def skip_epoch(self) -> None:
        """Count an epoch that was over before this worker came; a stream may not know its length."""
        try:
            batches, steps = self._counted(len(self._run.loader))
        except TypeError:
            return
        self._pending = self._pending[0] + batches, self._pending[1] + steps

    def leave_loop(self) -> None:
        """Note that the script iterates no longer: what it steps now is stepped once an epoch."""
        self.is_left = True

    def state(self) -> dict[str, Any]:
        """Return the position as plain values: the same on all workers that wait for each other."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in self._fields()}

    def take(self, state: dict[str, Any]) -> None:
        """Continue from the position of another worker, or of a checkpoint."""
        for name, _ in self._fields():
            value = state.get(name, getattr(self, f"_{name}"))
            setattr(self, f"_{name}", tuple(value) if isinstance(value, list) else value)

    def _fields(self) -> Iterator[tuple[str, Any]]:
        return ((name, getattr(self, f"_{name}")) for name in FIELDS)

    def _close(self) -> None:
        now = self._at_call if self._is_called else self._now()
        is_last = self._is_called and self._is_called_last
        self._done = self._position(now, is_last)
        self._pending = 0.0, 0.0
        self._base = max(now[0], self._base[0]), max(now[1], self._base[1])  # a rollback assigns batches again
        self._was_called = self._was_called or self._is_called
        self._is_called = self._is_called_last = False
        self._windows += 1
        self._last_window_steps, self._window_steps, self._left = self._accumulated(is_last), 0, 0

    def _accumulated(self, is_last: bool) -> int:
        """Return the batches that one process accumulates for the step of this window, as far as that is known."""
        if self._is_left_over_dropped():
            return self._window_steps - self._left
        return max(self._window_steps, self._last_window_steps) if is_last else self._window_steps

    def _is_left_over_dropped(self) -> bool:
        """True if the step is made with the batches of this epoch alone, and not with those left over before."""
        return bool(self._left) and self._window_steps - self._left == self._last_window_steps

    def _position(self, now: Both | None = None, is_last: bool = False) -> Both:
        """Return the steps of one process up to now. In an epoch's last window it makes one with fewer batches."""
        window_steps, gained = max(self._accumulated(is_last), 1), _minus(now or self._now(), self._base)
        before = [done + pending / window_steps for done, pending in zip(self._done, self._pending, strict=True)]
        if self._is_left_over_dropped():
            before = [floor(position + ROUNDING) for position in before]
        batches, steps = (position + gain / window_steps for position, gain in zip(before, gained, strict=True))
        if is_last and window_steps > self._window_steps:
            return float(ceil(batches - ROUNDING)), float(ceil(steps - ROUNDING))
        return batches, steps

    def _now(self) -> Both:
        """The batches of the script that all workers have got in this epoch."""
        run = self._run
        samples, order = run.progress.samples_of_epoch, getattr(run.epoch_batches, "order", None)
        if order is None:
            return self._counted(self._streamed * self._global_batch_of)
        size = getattr(run.loader, "batch_size", None)
        if size is not None:
            return self._counted(min(ceil(samples / size), len(run.loader)))
        batches_drawn, begun = len(order.bounds) - 1, bisect_left(order.bounds, samples)
        length = self._length() or batches_drawn * self._global_batch_of
        return self._counted(min(ceil(begun / max(batches_drawn / length, 1)) * self._global_batch_of, length))

    def _counted(self, batches: float) -> Both:
        return float(batches), float(ceil(batches / self._divisor)) if self._divisor else 0.0

    # --- calls --------------------------------------------------------------------------------------------------

    def call(self, scheduler: LRScheduler, step: Callable[[], Any], has_arguments: bool) -> Any:
        """Step a scheduler of a distributed optimizer as often as a call of its `step` stands for."""
        own = optimizer_of(scheduler)
        if self._inside or not any(own is optimizer for optimizer in self._optimizers):
            return step()
        if is_initial(scheduler):
            self._creations[scheduler] = _Creation(self._position(), bool(self._divisor))
            return step()
        self._inside = True
        try:
            return self._step_by_number(scheduler, step) if has_arguments else self._advance(scheduler, step)
        finally:
            self._inside = False

    def _step_by_number(self, scheduler: LRScheduler, step: Callable[[], Any]) -> Any:
        if scheduler not in self._by_number:
            self._by_number.append(scheduler)
        return step()

    def rates(self) -> Rates:
        """Return the learning rates, and those of schedulers that the script has stepped with a number."""
        return Rates(_rates_of(self._optimizers), _rates_of(one.optimizer for one in self._by_number))

    def _advance(self, scheduler: LRScheduler, step: Callable[[], Any]) -> Any:
        record = self._record(scheduler)
        if self._mode == "per-step":
            return self._as_called(scheduler, record, step)
        is_single = self._run.transport.workers * max(self._global_batch_of, self._divisor) == 1
        counts = not (is_single or self._run.global_step is None or self.is_left or self._is_once_an_epoch())
        if self._run.global_step is not None:
            self._is_called, self._at_call, self._is_called_last = True, self._now(), self._is_last()
        times = self._until_end(scheduler, record, self._times(scheduler)) if counts else 1
        if counts:
            self._notify_once(scheduler, record, times)
        if type(scheduler) in CLOSED_FORMS and times > 1:
            scheduler.last_epoch += times - 1
            scheduler._step_count += times - 1
            times = 1
        result = None
        for _ in range(times):
            result = step()
        record.position = position_of(scheduler)
        return result

    def _times(self, scheduler: LRScheduler) -> int:
        """Return the number of steps that one call in a global step stands for."""
        made = self._creation_of(scheduler)
        unit = int(made.by_length and not self._counts_batches(scheduler))
        before = max(self._done[unit], made.at[unit])
        return max(floor(self._position(is_last=self._is_last())[unit] + ROUNDING) - floor(before + ROUNDING), 0)

    def _is_once_an_epoch(self) -> bool:
        """True for the first call in an epoch of several steps, if that is at its end."""
        ends = self._is_last() or (self._divisor and self._epoch_steps >= self._counted(self._length() or 0)[1] > 0)
        return bool(ends) and self._windows > 0 and not self._was_called

    def _is_last(self) -> bool:
        run = self._run
        return bool(0 < run.epoch_batches.samples <= run.progress.samples_of_epoch)

    def _length(self) -> int | None:
        """Batches of an epoch in one process; None for a stream that does not know it."""
        try:
            return len(self._run.loader)
        except TypeError:
            return None

    def _creation_of(self, scheduler: LRScheduler) -> _Creation:
        """Return the circumstances in which a scheduler was made: of a composed scheduler, those of its last part."""
        parts = [self._creation_of(part) for part in getattr(scheduler, "_schedulers", ())]
        if own := self._creations.get(scheduler):
            parts.append(own)
        return max(
            parts,
            key=lambda creation: (creation.by_length, creation.at),
            default=_Creation((0.0, 0.0), by_length=False),
        )

    def _counts_batches(self, scheduler: LRScheduler) -> bool:
        """True if its length shows that it counts batches, though `len(loader)` was asked before it was made."""
        length, epoch = total_of(scheduler), self._length()
        if not length or not epoch or length % epoch:
            return False
        return bool(length % self._counted(epoch)[1])

    def _until_end(self, scheduler: LRScheduler, record: _Stepped, times: int) -> int:
        """Return the steps up to the end of a scheduler that raises past it; write a notice for any scheduler."""
        total = total_of(scheduler)
        if total is None:
            return times
        left = max(total - position_of(scheduler), 0)
        if times > 0 and left == 0:
            self._notify_past_end(record, total)
        return min(times, left) if hasattr(scheduler, "total_steps") else times

    def _notify_past_end(self, record: _Stepped, total: int) -> None:
        record.past += 1
        if record.past == PAST_STEPS:
            self._run.events.notice(
                f"{record.name} has made its {total} steps, and the script continues: all workers together have "
                f'got more batches than the schedule has steps (schedule="per-step" advances it once a call)'
            )

    # --- as the script calls it ---------------------------------------------------------------------------------

    def _as_called(self, scheduler: LRScheduler, record: _Stepped, step: Callable[[], Any]) -> Any:
        self._notify_once(scheduler, record, 1)
        total, recipe = total_of(scheduler), self._run.recipe
        try:
            result = step()
        except ValueError as error:
            if recipe is None or not recipe.asynchronous or total is None or position_of(scheduler) <= total:
                raise
            raise ScriptError(
                explain(
                    f"{record.name} has run out: under {recipe} workers take unequal numbers of steps",
                    got=f"step {position_of(scheduler)} of worker {self._run.transport.worker}",
                    expected=f"at most the {total} steps that the schedule has",
                    to_type='stretto.distribute(..., schedule="per-sample")',
                )
            ) from error
        record.position = position_of(scheduler)
        return result

    def finish(self) -> None:
        """Say which schedules have not come to their end because they were advanced once a call."""
        if self._mode != "per-step" or self._has_notified or self._run.transport.workers == 1:
            return
        for record in self._records.values():
            if record.length is not None and record.position < record.length:
                self._notify_short(record, f"made {record.position}")
                return

    def _notify_once(self, scheduler: LRScheduler, record: _Stepped, times: int) -> None:
        workers, length = self._run.transport.workers, total_of(scheduler)
        if self._has_notified or workers == 1 or self._run.global_step is None:
            return
        epoch = self._length()
        epochs, rest = divmod(length, epoch) if length and epoch else (0, 1)
        made = epochs * ceil(epoch / (workers * self._global_batch_of)) if epoch and not rest else None
        if self._mode == "per-sample" and times > 1:
            self._has_notified = True
            fits = f" has {length} steps, and each of {workers} workers makes {made} in {_epochs(epochs)}: it"
            accumulates = max(self._window_steps, self._last_window_steps) > 1
            end = "close to where it ends" if accumulates else "as"
            self._run.events.notice(
                f"{record.name}{fits if made else ''} is advanced by the batches that all workers get, {times} in this "
                f'step, so that it ends {end} in one process (schedule="per-step" advances it once a call)'
            )
        elif self._mode == "per-step" and made and length and made < length:
            self._notify_short(record, f"makes {made} in {_epochs(epochs)}")

    def _notify_short(self, record: _Stepped, makes: str) -> None:
        self._has_notified = True
        self._run.events.notice(
            f"{record.name} has {record.length} steps, and each of {self._run.transport.workers} workers {makes}: it "
            f'does not come to its end; schedule="per-sample" advances it by the batches that all workers get'
        )

    def _record(self, scheduler: LRScheduler) -> _Stepped:
        if scheduler not in self._records:
            self._records[scheduler] = _Stepped(type(scheduler).__name__, length_of(scheduler))
        return self._records[scheduler]


def _minus(one: Both, other: Both) -> Both:
    return max(one[0] - other[0], 0.0), max(one[1] - other[1], 0.0)


def _epochs(number: int) -> str:
    return f"{number} epoch{'s' * (number != 1)}"


def _rates_of(optimizers: Iterable[Optimizer]) -> list[float]:
    return [float(group["lr"]) for one in optimizers for group in one.param_groups if "lr" in group]


def check_mode(mode: object) -> None:
    """Raise ScriptError for a `schedule=` that there is not."""
    if mode not in get_args(Mode):
        raise ScriptError(
            explain(
                "schedule= says how learning-rate schedulers are advanced",
                got=f"{mode!r:.100}",
                expected='"per-sample" (by the batches of all workers) or "per-step" (once a call)',
                to_type='schedule="per-sample"',
            )
        )


def intercept(current: Callable[[], Schedules | None]) -> None:
    """Wrap `step` in all classes of schedulers, each class once.

    `current` returns the schedules of the worker that calls, or None.
    """
    for scheduler_class in _classes(LRScheduler):
        if "step" in vars(scheduler_class) and not hasattr(scheduler_class.step, "_stretto_wraps"):
            scheduler_class.step = _wrapped(scheduler_class.step, current)  # type: ignore[method-assign]


def _classes(parent: type[LRScheduler]) -> Iterator[type[LRScheduler]]:
    yield parent
    for child in parent.__subclasses__():
        yield from _classes(child)


def _wrapped(original: Any, current: Callable[[], Schedules | None]) -> Any:
    @functools.wraps(original)
    def step(scheduler: LRScheduler, *given: Any, **named: Any) -> Any:
        schedules = current()
        if schedules is None:
            return original(scheduler, *given, **named)
        return schedules.call(scheduler, lambda: original(scheduler, *given, **named), bool(given or named))

    step._stretto_wraps = original  # type: ignore[attr-defined]
    return step
