"""The counts of one worker's training loop: epochs, global steps, steps, exchanges and samples.

The parts of a trainer read the counts, and report what happened; only `LoopProgress` changes them. Samples are counted
when they are assigned. Those of an epoch without any optimizer step do not count: a peek at one batch, an evaluation,
an epoch that estimates the statistics of batch-norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stretto.membership.loop_positions import COMING, LOOP, LoopPosition

NEVER = -(2**31)
"""Number of a step long before the first one."""


@dataclass(frozen=True, slots=True)
class _EpochStart:
    """The counts when the epoch began."""

    steps: int = 0
    """Number of steps of all optimizers."""
    global_steps: int = 0
    own_samples: int = 0
    whole: bool = False
    """True if this worker takes part from the epoch's first global step."""


class LoopProgress:
    """The counts of one worker's training loop in its section."""

    def __init__(self, optimizers: int, step_requests: int) -> None:
        self.epochs = 0
        self.iterations = 0
        """Number of iterations over the loader that the script has begun."""
        self.peeks: list[int] = []
        """Numbers of the iterations that were peeks: at most one batch and no optimizer step."""
        self.global_steps = 0
        self.step_requests = self.step_requests_before = step_requests
        """Number of requests for a global step, including those at the end of an epoch, which return none; and their
        number before this epoch."""
        self.steps_of = [0] * optimizers
        """Number of steps of each optimizer, those included that a worker left out for gradients that are not finite.

        Equal at all workers that wait for each other.
        """
        self.steps = 0
        """Number of steps of the optimizer that has made most."""
        self.rounds = 0
        """Number of exchanges."""
        self.compared_at = NEVER
        """Number of global steps when whole replicas were last compared; equal at all workers that wait."""
        self.samples = self.samples_before = self.own_samples = 0
        """Samples of all workers, those before this epoch, and those of this worker."""
        self._dropped = 0
        """Own samples of batches that the script has left without a step."""
        self.samples_resumed = 0
        """Samples of the checkpoint that the run continues from."""
        self.unstepped_here = 0
        """This worker's part of the samples of this epoch that do not count."""
        self.unstepped = 0
        """Number of samples assigned in this epoch that do not count, since no step was made."""
        self.global_batches_before = self.global_batches = 0
        """Global batches of the epochs before this one, and those that have begun in this one, by any worker."""
        self.has_just_joined = False
        """True from this worker's join within an epoch to its first batch there."""
        self._phase, self._steps_before = COMING, 0
        self._repeats_epoch = False
        """True if the next epoch has the number of the last one, which was only peeked."""
        self._start = _EpochStart()

    def place(self) -> LoopPosition:
        """Return where the script is in its loop: the step under way, or the last one of a loop that it has left."""
        step = self._steps_before + 1 if self._phase == LOOP else self.steps
        return LoopPosition(self._phase, self.epochs, step)

    # --- epochs -------------------------------------------------------------------------------------------------

    def enter(self, phase: int) -> None:
        """Enter a phase of the script."""
        self._phase = phase

    def enter_loop(self) -> None:
        """Enter the loop of an epoch before its first global step."""
        self._phase, self._steps_before = LOOP, self.steps

    def begin_iteration(self, asynchronous: bool) -> bool:
        """Count an iteration over the loader. Return False if it repeats a peek of an earlier incarnation."""
        self.iterations += 1
        if self.iterations in self.peeks:
            self.epochs += asynchronous
            return False
        self.epochs += not self._repeats_epoch
        self._repeats_epoch = False
        return True

    def begin_epoch(self) -> None:
        """Begin an epoch with all workers."""
        self.samples_before, self.step_requests_before = self.samples, self.step_requests
        self.global_batches_before, self.global_batches = self.global_batches_before + self.global_batches, 0

    def begin_loop(self, whole: bool) -> None:
        """Begin the loop of an epoch; `whole` if this worker takes part from the first global step."""
        self._start = _EpochStart(sum(self.steps_of), self.global_steps, self.own_samples, whole)

    @property
    def samples_of_epoch(self) -> int:
        """Number of samples of all workers in this epoch."""
        return self.samples - self.samples_before

    @property
    def own_samples_of_epoch(self) -> int:
        """Number of samples of this worker in this epoch."""
        return self.own_samples - self._start.own_samples

    @property
    def global_steps_of_epoch(self) -> int:
        """Number of global steps since the epoch began, or since they were last found to be without a step."""
        return self.global_steps - self._start.global_steps

    @property
    def has_stepped_in_epoch(self) -> bool:
        """True if an optimizer has stepped since the epoch began."""
        return sum(self.steps_of) != self._start.steps

    def is_peek(self) -> bool:
        """Return True if one batch was given in this epoch, or none, and the optimizer made no step."""
        return self._start.whole and not self.has_stepped_in_epoch and self.global_steps_of_epoch <= 1

    def is_stepless(self) -> bool:
        """Return True if batches were given in this epoch, and the optimizer made no step."""
        return self._start.whole and not self.has_stepped_in_epoch and self.global_steps_of_epoch > 0

    def end_peek(self) -> None:
        """Undo an epoch that all workers have only peeked at; the next one has its number."""
        self._uncount(only_own=False)
        self.global_batches = 0
        self._repeats_epoch = True
        self.note_peek()

    def note_peek(self) -> None:
        """Note that the iteration that ends was a peek of all workers."""
        self.peeks.append(self.iterations)

    def _uncount(self, only_own: bool) -> int:
        """Remove this epoch's samples and global steps. Return the number of samples, `only_own` or of all workers."""
        counted = self.own_samples - self._start.own_samples if only_own else self.samples_of_epoch
        self.global_steps, self.own_samples = self._start.global_steps, self._start.own_samples
        self.samples = self.samples_before
        return counted

    def uncount_stepless(self, only_own: bool) -> None:
        """Remove the samples of this epoch, in which no step was made; its global steps stay."""
        done, begun = self.global_steps, self._start
        self.unstepped_here += self.own_samples - begun.own_samples
        self.unstepped += self._uncount(only_own)
        self.global_steps = done
        self._start = replace(begun, global_steps=done)

    def take_unstepped(self) -> int:
        """Return the number of samples of the ending epoch that do not count, and reset it."""
        samples, self.unstepped, self.unstepped_here = self.unstepped, 0, 0
        return samples

    def count_all(self, samples: int) -> None:
        """Set the samples of all workers, on which they have agreed."""
        self.samples = samples

    # --- global steps -------------------------------------------------------------------------------------------

    def count_global_batch(self, begun: int) -> None:
        """Note that this number of global batches of the epoch have begun."""
        self.global_batches = begun

    def request_step(self) -> None:
        """Count a request for a global step."""
        self.step_requests += 1

    def begin_global_step(self, own: int, assigned_samples: int) -> None:
        """Begin a global step with `own` samples of this worker. Of the epoch `assigned_samples` are assigned."""
        self.global_steps += 1
        self.own_samples += own
        self.follow_assignment(assigned_samples)
        self._steps_before = self.steps

    def drop_samples(self, own: int) -> None:
        """Remove `own` samples of batches that the script has left without a step."""
        self.own_samples -= own
        self._dropped += own

    def take_dropped(self) -> int:
        """Return the number of samples that were removed since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    def count_step(self, index: int) -> None:
        """Count a step of an optimizer."""
        self.steps_of[index] += 1
        self.steps = max(self.steps_of)

    def count_round(self) -> None:
        """Count an exchange."""
        self.rounds += 1

    # --- membership ---------------------------------------------------------------------------------------------

    def follow_assignment(self, assigned_samples: int) -> None:
        """Set the samples by those of this epoch that are assigned to all workers."""
        self.samples = self.samples_before + assigned_samples

    def uncount_lost(self, samples: int) -> None:
        """Remove samples of earlier epochs, which are assigned again; a negative number adds them."""
        self.samples -= samples
        self.samples_before -= samples

    def reopen(self) -> None:
        """Continue an epoch that had ended: its end was no global step."""
        self.step_requests_before += 1

    def joined(self, peeks: Sequence[int], global_batches_before: int, samples_before: int) -> None:
        """Take the peeks of a run over a server that this worker has joined, and what it has trained before."""
        self.peeks, self.global_batches_before, self.samples = list(peeks), global_batches_before, samples_before
        self.has_just_joined = True

    def facts(self) -> dict[str, Any]:
        """Return the counts for a state of the run."""
        return {
            "epochs": self.epochs,
            "peeks": self.peeks,
            "steps": self.steps,
            "steps_of": self.steps_of,
            "step_requests": self.step_requests,
            "step_requests_before": self.step_requests_before,
            "global_steps": self.global_steps,
            "global_batches": [self.global_batches_before, self.global_batches],
            "rounds": self.rounds,
            "compared_at": self.compared_at,
            "samples": self.samples,
            "samples_before": self.samples_before,
        }

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continue from the counts of a state. The script counts its epochs itself."""
        self.steps, self.steps_of, self.rounds = facts["steps"], list(facts["steps_of"]), facts["rounds"]
        self.step_requests, self.step_requests_before = facts["step_requests"], facts["step_requests_before"]
        self.global_steps = facts["global_steps"]
        self.compared_at = facts.get("compared_at", NEVER)
        self.global_batches_before, self.global_batches = facts.get("global_batches", [self.global_steps, 0])
        self.samples, self.samples_before = facts["samples"], facts["samples_before"]
        self.samples_resumed = self.samples
        self.peeks = list(facts["peeks"])
