"""This worker's speed as it is measured, and the shares on which the workers agree by their speeds."""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Sequence
from typing import Any, Protocol

from stretto.data.shares import Paces, Timed, listed, paces_of, proposed, unlisted
from stretto.loader.epoch_batches import AssignedEpoch, BatchSource, EpochBatches
from stretto.parallel.rank_parts import RankParts
from stretto.recipe.recipe import Recipe, has_shares
from stretto.runtime.event_writer import EventWriter
from stretto.runtime.phase_timer import Stopwatch
from stretto.training.progress import LoopProgress
from stretto.transport import Transport

FEWEST_STEPS, MOST_STEPS = 5, 20
"""Global steps from one agreement to the next; more where the recipe exchanges more rarely."""
SMOOTHED_STEPS = 9
"""Number of last steps of which the median time counts."""
LARGEST_COST = 0.01
"""Part of the time for agreements above which they are rarer."""
CHANGED = 1.25
"""Ratio of two shares from which on the times of both show the part of a step that does not depend on samples."""
NOTED_STEPS, NOTED_S, NOTED_GAIN = 20, 1.0, 1.1
"""Steps and seconds of an epoch from which on a line names the gain of shares by speed, and the least such gain."""
WRITTEN_EVERY_S = 2.0
"""Seconds between events on shares that do not move."""
_MESSAGE = struct.Struct("<q3ddq")


class StepTimes:
    """Times of this worker's last steps with shares of one size, and the part that does not depend on samples.

    A worker becomes slower or faster in both parts of a step alike, so the last steps scale both. Their ratio is found
    where the share changes.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[int, float]] = []
        """Samples and seconds of the last steps, whose shares are of about one size."""
        self._before: tuple[float, float] | None = None
        """The median samples and seconds of earlier steps with another share, until the two are compared."""
        self.fixed = math.nan
        """Number of samples that take as long as the part of a step that does not depend on samples; NaN if unknown."""
        self._widest = 0.0
        """Largest difference of two shares that were compared."""

    def note(self, samples: int, seconds: float) -> None:
        """Note a step."""
        if self._steps and abs(samples - self._steps[-1][0]) > 1 + self._steps[-1][0] / 16:
            self._before = self.last() or self._before
            self._steps.clear()
        self._steps = [*self._steps[1 - SMOOTHED_STEPS :], (samples, seconds)]
        if len(self._steps) == FEWEST_STEPS and self._before is not None:
            self._compare(self._before)

    def last(self) -> tuple[float, float] | None:
        """Return the median samples and seconds of the last steps, which belong together; None if they are too few."""
        if len(self._steps) < FEWEST_STEPS - 2:
            return None
        samples, seconds = zip(*self._steps, strict=True)
        return statistics.median(samples), statistics.median(seconds)

    def _compare(self, before: tuple[float, float]) -> None:
        now = self.last()
        self._before = None
        if now is None or max(now[0], before[0]) < CHANGED * min(now[0], before[0]):
            return
        most = min(now[1] / now[0], before[1] / before[0])
        each = min(max((now[1] - before[1]) / (now[0] - before[0]), most / 100), most)
        found, width = max(now[1] / each - now[0], 0.0), abs(now[0] - before[0])
        self._widest = max(width, self._widest)
        if not math.isnan(self.fixed):  # the mean part of a step's time; shares that differ much show it best
            size, weight = (now[0] + before[0]) / 2, width / self._widest / 2
            part = weight * found / (found + size) + (1 - weight) * self.fixed / (self.fixed + size)
            found = part * size / (1 - part)
        self.fixed = found


class SharingTrainer(Protocol):
    """The attributes of a trainer that its shares use."""

    recipe: Recipe | None
    transport: Transport
    timer: Stopwatch
    events: EventWriter
    progress: LoopProgress
    rank_parts: RankParts
    batch_source: BatchSource

    @property
    def epoch_batches(self) -> EpochBatches | None:
        """The epoch under way."""


class SpeedShares:
    """Measures this worker's steps. With `--shares speed` the workers agree on their speeds, and move the shares.

    They do it in an all-gather right after an exchange, where all are, every few steps: each computes the same shares
    from it. These apply after the last step of which any loader has loaded a batch ahead.

        worker 0   | step 5, exchange | all-gather: speeds, loaded up to 8 | 6 | 7 | 8 | 9 with the new shares
        worker 1   | step 5, exchange | all-gather: speeds, loaded up to 7 | 6 | 7 | 8 | 9 with the new shares
    """

    def __init__(self, trainer: SharingTrainer) -> None:
        self._trainer, self._times = trainer, StepTimes()
        self._is_by_speed = trainer.batch_source.shares.is_by_speed
        self._own_s: float | None = None
        """Seconds of this worker's own work until the end of the last step; None where the next one is left out."""
        self._steps, self._interval, self._cost_s = 0, FEWEST_STEPS, 0.0
        self._of_epoch = 0, 0, 0.0
        """Steps of this epoch, and their samples and seconds."""
        self._has_noted, self._written_at = False, -math.inf

    def begin_epoch(self) -> None:
        """Leave out the first step of an epoch, in which the loader starts."""
        self._own_s = None
        self._of_epoch = 0, 0, 0.0

    def state(self) -> dict[str, Any]:
        """Return the speeds on which the workers have agreed last, and when they do next; equal at all workers."""
        return {"paces": listed(self._trainer.batch_source.paces), "steps": self._steps, "interval": self._interval}

    def resume(self, state: dict[str, Any]) -> None:
        """Continue from the state of another worker, or of a checkpoint."""
        source = self._trainer.batch_source
        if source.shares.is_fixed:
            return
        paces = source.paces = unlisted(state.get("paces", []))
        self._steps, self._interval = state.get("steps", 0), state.get("interval", FEWEST_STEPS)
        fixed, each = paces.get(self._trainer.transport.number, (0.0, 0.0))
        self._times.fixed = fixed / each if each else math.nan

    def end_step(self, samples: int) -> None:
        """Note the time of a global step in which this worker had some samples."""
        spent = self._trainer.timer.spent
        before, self._own_s = self._own_s, spent["computing"] + spent["loading"]
        self._steps += 1
        if before is not None and samples:
            self._times.note(samples, self._own_s - before)
            steps, given, took_s = self._of_epoch
            self._of_epoch = steps + 1, given + samples, took_s + self._own_s - before

    def agree_if_due(self, has_exchanged: bool) -> None:
        """Agree on the speeds at the end of a global step, and move the shares if that gains enough."""
        trainer, epoch = self._trainer, self._trainer.epoch_batches
        is_due = self._is_by_speed and has_exchanged and self._steps >= self._interval
        if not is_due or trainer.transport.workers == 1 or not isinstance(epoch, AssignedEpoch) or not epoch.has_shares:
            return
        self._steps = 0
        samples, seconds = self._times.last() or (math.nan, math.nan)
        own = _MESSAGE.pack(
            trainer.transport.number, samples, seconds, self._times.fixed, self._cost_s, epoch.loaded_ahead()
        )
        own = max(trainer.rank_parts.gathered(own), key=lambda one: _seconds(one))  # as fast as its slowest rank
        began = trainer.events.t()
        with trainer.timer.on("waiting"):
            received = [_MESSAGE.unpack(one) for one in trainer.transport.all_gather_bytes(own)]
        self._cost_s = trainer.events.t() - began
        timed = {worker: Timed(*times) for worker, *times, _, _ in received}
        self._space(timed, min(one[-2] for one in received))
        self._move(epoch, paces_of(timed, trainer.batch_source.paces), timed, max(one[-1] for one in received))

    def _space(self, timed: dict[int, Timed], cost_s: float) -> None:
        """Set the number of steps until the next agreement, so that all of them take little time."""
        step_s = max((one.seconds for one in timed.values() if not math.isnan(one.seconds)), default=0.0)
        steps = math.ceil(cost_s / (LARGEST_COST * step_s)) if step_s else FEWEST_STEPS
        self._interval = min(max(steps, FEWEST_STEPS), MOST_STEPS)

    def _move(self, epoch: AssignedEpoch, measured: Paces, timed: dict[int, Timed], ahead: int) -> None:
        source, members = self._trainer.batch_source, self._trainer.transport.members
        if epoch.has_moves or any(math.isnan(one.seconds) for one in timed.values()):
            return  # the last move has no measured steps yet
        proposal = proposed(source.paces, measured, members, epoch.step_samples, source.limits)
        if proposal.paces is not None:
            source.paces = proposal.paces
            epoch.move(proposal.paces, ahead)
        is_due = proposal.paces is not None or self._trainer.events.t() - self._written_at >= WRITTEN_EVERY_S
        if self._trainer.transport.number == min(members) and is_due:
            # the gain of a move is written when it is measured
            self._written_at = self._trainer.events.t() if proposal.paces is None else -math.inf
            self._trainer.events.write(
                "shares",
                epoch=self._trainer.progress.epochs,
                after=ahead if proposal.paces is not None else None,
                paces=listed(source.paces),
                members=list(members),
                shares=proposal.shares,
                speeds=listed(measured),
                measured_s=max(one.seconds for one in timed.values()),
                predicted_s=proposal.predicted_s,
                even_s=proposal.even_s,
            )

    def of_epoch(self) -> bytes:
        """Return this worker's number, and its steps, samples and seconds in the epoch that ends, for `note_gain`."""
        return struct.pack("<qqqd", self._trainer.transport.number, *self._of_epoch)

    def note_gain(self, messages: Sequence[bytes], epoch: EpochBatches) -> None:
        """Write a line, once, if shares by speed would make a run with even shares much faster."""
        source, members = self._trainer.batch_source, self._trainer.transport.members
        recipe, is_even = self._trainer.recipe, source.shares.is_fixed and not source.shares.paces
        if self._has_noted or not is_even or recipe is None or not has_shares(recipe):
            return
        if not isinstance(epoch, AssignedEpoch) or not epoch.has_shares:
            return
        found = [struct.unpack("<qqqd", one) for one in messages]
        if len(found) < 2 or min(one[1] for one in found) < NOTED_STEPS or max(one[3] for one in found) < NOTED_S:
            return
        each = {worker: seconds / samples for worker, _, samples, seconds in found if seconds > 0}
        if len(each) < len(found):
            return
        slowest = max(each, key=lambda worker: each[worker])
        gain = each[slowest] * sum(1 / one for one in each.values()) / len(each)
        if gain < NOTED_GAIN:
            return
        self._has_noted = True
        times = each[slowest] / min(each.values())
        self._trainer.events.notice(
            f"worker {slowest} is {times:.1f} times slower than the fastest of {len(members)} workers: "
            f"--shares speed would train up to {gain:.1f} times as fast"
        )


def _seconds(message: bytes) -> float:
    """Return the seconds of a message for a comparison; NaN is the largest."""
    seconds = _MESSAGE.unpack(message)[2]
    return math.inf if math.isnan(seconds) else float(seconds)
