"""The global steps of one worker's loop: its optimizers' steps, its exchanges, and the work that they carry."""

from __future__ import annotations

import functools
import struct
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from stretto.data.leases import Lease
from stretto.errors import ModelError, NotFiniteError, ReplicasDifferError, explain
from stretto.loader.epoch_batches import AssignedEpoch, BatchSource, EpochBatches
from stretto.loader.global_step import GlobalStep
from stretto.loader.leased_batches import LeasedEpoch
from stretto.loader.sample_weights import Arrivals
from stretto.loader.streamed_epoch import StreamedEpoch
from stretto.membership.worker_status import status
from stretto.parallel.rank_parts import RankParts
from stretto.recipe.recipe import Recipe
from stretto.runtime.event_writer import ADVICE, EventWriter
from stretto.runtime.phase_timer import Stopwatch
from stretto.strategies.consistency_check import check_rates
from stretto.strategies.context import Push, StrategyContext
from stretto.strategies.create import create_strategy
from stretto.strategies.marks import mark_of
from stretto.strategies.optimizers import Optimizers, parameters_of
from stretto.strategies.outside_optimizers import OutsideOptimizers, refuse_step_outside, unwatch, watch
from stretto.strategies.parameter_view import local
from stretto.strategies.step_hooks import StepHooks, closure_of
from stretto.strategies.traffic_counters import Tally
from stretto.training.effective_batch import ScaledRate
from stretto.training.evaluator import Evaluator
from stretto.training.figures import Figures
from stretto.training.first_losses import FirstLosses
from stretto.training.last_model import LastModel
from stretto.training.left_out import LeftOutSteps
from stretto.training.not_finite import GradientCheck
from stretto.training.progress import LoopProgress
from stretto.training.schedule import Schedules
from stretto.training.section import Section
from stretto.training.settings import Settings
from stretto.training.speed_shares import SpeedShares
from stretto.training.step_record import StepRecord, in_different_batches
from stretto.training.weightless_pass import WeightlessPass
from stretto.training.worker_context import WorkerContext
from stretto.transport import Transport

COMPARE_EVERY = 100
"""Number of global steps after which the next exchange within an epoch compares the replicas."""
STEP_AT_END = "Step at its end, too: if (stretto.epoch_step() + 1) % k == 0 or stretto.is_last_batch(): ..."
"""Advice for gradients that an epoch's end leaves without a step."""


class ExchangeListener(Protocol):
    """The part of a trainer that keeps work until an exchange has carried it."""

    def carried(self) -> None:
        """Note that an exchange has carried all work."""


class SteppedTrainer(Protocol):
    """The attributes of a trainer that its global steps use."""

    model: nn.Module
    optimizers: Optimizers
    recipe: Recipe | None
    transport: Transport
    section: Section
    timer: Stopwatch
    events: EventWriter
    arrivals: Arrivals
    progress: LoopProgress
    schedules: Schedules
    settings: Settings
    evaluator: Evaluator
    figures: Figures
    rank_parts: RankParts
    last_model: LastModel
    start_sums: Mapping[str, int]
    loader: Any
    batch_source: BatchSource
    shares: SpeedShares

    @property
    def agent(self) -> ExchangeListener:
        """The worker's part in a changing membership."""

    @property
    def epoch_batches(self) -> EpochBatches | None:
        """The epoch under way."""


class GlobalSteps:
    """Hooks the optimizers, and carries out the recipe's strategy in the global steps of a loop."""

    def __init__(self, trainer: SteppedTrainer, context: WorkerContext, tally: Tally) -> None:
        optimizers, recipe, transport = trainer.optimizers, trainer.recipe, trainer.transport
        self._trainer, self._optimizers, self._progress = trainer, optimizers, trainer.progress
        self._transport, self._timer, self._events = transport, trainer.timer, trainer.events
        self.current: GlobalStep | None = None
        """The global step under way."""
        self._thread = threading.get_ident()
        """The thread that took the last batch."""
        self._rounds_at_step = [0] * len(optimizers)
        """Number of exchanges at each optimizer's last step."""
        self._rounds_before = 0
        self._accumulated_batches: int | None = 0
        """Successive batches whose gradients were exchanged without a step; None once the notice was written."""
        self._leases: list[Any] = []
        self._worked = 0
        """Number of these leases whose work an optimizer step includes."""
        self._accumulated = False
        self.stepped_last = True
        """True if the optimizer stepped in the last global step."""
        self._unstepped: int | None = 0
        """Number of batches since this worker's gradients were stepped last; None once the notice was written."""
        self._stepped_here: set[int] = set()
        """The optimizers that have stepped in this global step."""
        self._step_record = StepRecord()
        self._gradient_check = GradientCheck(trainer.model)
        self._samples_sent = 0
        self._is_held = False
        """True if every trainable parameter was found in an optimizer, in this epoch."""
        self._has_values = False
        """True if the values of the parameters were noted in this epoch, or an optimizer has stepped before it."""
        self.pace = context.runtime.pace(trainer.timer, context.slow)
        self._skips = context.on_nan == "skip" and recipe is not None and recipe.asynchronous
        tools = trainer.timer, trainer.events, tally, context.runtime, self.pace
        strategy_context = StrategyContext(transport, *tools, self._skips, trainer.start_sums)
        parameter_sets = trainer.section.parameter_sets
        self.strategy = create_strategy(trainer.model, optimizers, recipe, strategy_context, self, parameter_sets)
        self._outside = OutsideOptimizers(
            trainer.model, optimizers, lambda: self._progress.global_steps if self.current is not None else None
        )
        watch(self._outside.before_step)
        self._first_losses = FirstLosses()
        self._weightless = WeightlessPass(trainer.model, optimizers, self.strategy.in_rounds)
        self._own_samples_at_step = [0] * len(optimizers)
        """Number of this worker's samples at each optimizer's last step."""
        self._left_out: LeftOutSteps | None = None
        """The steps that this worker leaves out, where the rounds of the others count them."""
        if self.strategy.in_rounds:
            self._left_out = LeftOutSteps(trainer.model, optimizers, self._count_left_out)
            self._left_out.watch()
        self._hooks = [
            StepHooks(
                optimizer,
                functools.partial(self._before_step, index),
                functools.partial(self._after_step, index),
                optimizers.around[index],
                functools.partial(self._mean_loss, index) if transport.has_others else None,
            )
            for index, optimizer in enumerate(optimizers)
        ]
        self._rates = list[ScaledRate]()

    def scale_rates(self, factor: float) -> None:
        """Scale the learning rates in each step, after the hooks of this object, which send updates of scaled rates."""
        self._rates = [ScaledRate(optimizer, factor) for optimizer in self._optimizers] if factor != 1 else []

    def close(self) -> None:
        """Remove all hooks when the section has ended."""
        unwatch()
        self._first_losses.unwatch()
        self._weightless.close()
        if self._left_out is not None:
            self._left_out.unwatch()
        for hook in self._hooks:
            hook.remove()
        for rate in self._rates:
            rate.release()
        self.strategy.close()

    # --- global steps -------------------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Look at the trainable parameters again in the epoch that begins."""
        self._is_held = False
        self._trainer.shares.begin_epoch()
        self._has_values = self._progress.steps > 0 or self._transport.workers == 1

    def take_batch(self) -> None:
        """End the last global step, and note the thread that takes the next batch."""
        self._thread = threading.get_ident()
        self.end()

    def begin(self, global_step: GlobalStep) -> None:
        """Begin a global step."""
        self._trainer.schedules.begin_global_step(bool(self._stepped_here), global_step.streamed)
        self.current = global_step
        if not self._has_values:
            self._outside.note_values()
            self._has_values = True
        if global_step.total:
            self.strategy.add_samples(global_step.own, global_step.total, global_step.parts)
        self._progress.begin_global_step(global_step.own, global_step.assigned_samples)
        self._progress.count_global_batch(self._global_batches())
        self._stepped_here.clear()
        self._first_losses.begin(global_step.batch if global_step.own else None)
        if global_step.is_weightless:
            self._weightless.begin()
        if self._left_out is not None:
            self._left_out.begin_global_step()
        self._rounds_before = self._progress.rounds
        current = self._trainer.epoch_batches
        has_share = isinstance(current, AssignedEpoch) and current.has_shares
        status.note(self._progress.place(), global_step.own if has_share else 0)
        self._accumulated = False
        self._drop_void()
        if global_step.lease is not None:
            self._leases.append(global_step.lease)
        self.strategy.note_values(has_stepped=False)

    def _global_batches(self) -> int:
        """Return the number of global batches that have begun in this epoch, by the samples that all workers lease."""
        trainer, progress, current = self._trainer, self._progress, self._trainer.epoch_batches
        samples, before, size = (
            progress.samples_of_epoch,
            progress.global_batches,
            getattr(trainer.loader, "batch_size", 0),
        )
        is_counted = not isinstance(current, LeasedEpoch) or (current.is_in_turn and not progress.has_just_joined)
        progress.has_just_joined = False
        if not isinstance(current, LeasedEpoch) or is_counted:
            return before + 1
        if not size:  # the batches have lengths of their own
            return max(before, -(-bisect_left(current.order.bounds, samples) // self._transport.workers))
        return max(before, -(-samples // (int(size) * trainer.batch_source.batches_per_step)))

    def end(self, left: bool = False) -> None:
        """End a global step: evaluate if due, and write progress.

        `left` is True if the script has left its epoch in the middle of the step.
        """
        if left:
            self.refuse_not_finite()
        if self.current is None:
            return
        self._timer.switch("other")
        self.pace.go_on()
        self._trainer.shares.end_step(self.current.own)
        self._weightless.end(bool(self._stepped_here))
        if not self.current.is_at_other_ranks:
            self.strategy.look_for_redraws()
        if self._left_out is not None and not left and not self.current.is_at_other_ranks:
            for index in self._left_out.found():
                self._count_left_out(index)
        global_step, self.current = self.current, None
        progress, has_stepped = self._progress, bool(self._stepped_here)
        self.stepped_last = global_step.is_at_other_ranks or has_stepped
        if global_step.is_at_other_ranks and global_step.lease:
            self._worked = len(self._leases)
        if self._unstepped is not None and not global_step.is_at_other_ranks:
            self._unstepped = 0 if has_stepped else self._unstepped + (global_step.own > 0)
        if (self.strategy.exchanges_gradients or self.strategy.in_rounds) and not global_step.is_at_other_ranks:
            self._step_record.note(progress.epochs, progress.global_steps_of_epoch, has_stepped)
        if not global_step.is_at_other_ranks:
            self._notice_accumulation()
            self._trainer.rank_parts.end_batch(has_stepped)
        if self._trainer.recipe is None:
            self.settle_leases()
        with self._naming_step():
            if self._drop_void():
                self.strategy.undo()
            self.strategy.end_global_step(has_stepped)
        if self.strategy.exchanges_gradients and progress.rounds > self._rounds_before:
            self._check_if_due()
        self._trainer.shares.agree_if_due(progress.rounds > self._rounds_before)
        self._keep_uncompared(has_stepped)
        self._trainer.evaluator.evaluate_if_due()
        if self._events.due():
            self._trainer.figures.write("progress")
            self._events.flush()

    def drop_unstepped(self) -> None:
        """Drop the leases of batches that the ending epoch leaves without a step: their samples do not count."""
        for lease in self._leases[self._worked :]:
            is_leased = isinstance(lease, Lease)
            self._progress.drop_samples(lease.samples if is_leased else sum(stop - start for start, stop in lease))
        del self._leases[self._worked :]

    def abandon(self) -> None:
        """Drop the global step under way: the script has only peeked at it."""
        self._timer.switch("other")
        self.pace.go_on()
        self._weightless.end(has_stepped=False)
        self.current = None

    def accumulate(self, on: bool) -> None:
        """Suspend the exchange of gradients, or resume it: the script accumulates gradients."""
        self._accumulated = True
        self.strategy.accumulate(on)

    def weigh(self, number: float | None, is_sum: bool) -> None:
        """Give the batch of this global step a weight in the mean of the next exchange, or have gradients added."""
        if self.current is None and number is not None:
            raise ModelError(_weighed_outside(number))
        self.strategy.weigh(number, is_sum)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Put the agreed model in place in a `with` block; between two epochs it is."""
        if self.current is None:
            yield
        elif self.strategy.asynchronous:
            with self.strategy.newest():
                yield
        else:
            self.strategy.sync_for_evaluation()
            try:
                yield
            finally:
                self.strategy.resume()

    def may_be_peek(self) -> bool:
        """Return True unless gradients are accumulated in this global step."""
        return not self._accumulated

    def is_at_rest(self) -> bool:
        """Return True if no computed gradient or update waits for an exchange or a step."""
        return self.strategy.is_carried and self.current is None and self.stepped_last

    def notice_unstepped(self) -> None:
        """Write a notice, once, if the epoch that ends leaves accumulated gradients without a step."""
        batches = self._unstepped
        if not batches or not self._progress.has_stepped_in_epoch:
            return
        gradients = (one.grad for each in self._optimizers for one in parameters_of(each) if one.grad is not None)
        if not any(bool(local(gradient).any()) for gradient in gradients):
            return
        self._unstepped = None
        left = f"{batches} batch{'es' * (batches != 1)} and no step after them"
        self._events.own_notice(
            f"worker {self._transport.number} ends epoch {self._progress.epochs} with gradients of {left}: the first "
            "step of the next epoch has them, unless zero_grad() drops them; nothing has them after the last. "
            + STEP_AT_END
        )

    def _notice_accumulation(self) -> None:
        """Write a notice, once, if gradients are accumulated and each batch's gradients are exchanged."""
        if not self.strategy.exchanges_gradients or self._accumulated_batches is None or self._transport.workers == 1:
            return
        if not self._stepped_here and self._progress.rounds > self._rounds_before:
            self._accumulated_batches += 1
        elif self._stepped_here and self._accumulated_batches:
            batches, self._accumulated_batches = self._accumulated_batches + 1, None
            self._events.notice(
                f"the gradients of {batches} batches are accumulated for a step and exchanged {batches} times: "
                f"all but the last backward pass in `with stretto.no_sync():` would send 1/{batches} of the bytes"
            )

    # --- optimizer steps ----------------------------------------------------------------------------------------

    def _before_step(self, index: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check and prepare a step; hook before an optimizer's step."""
        progress = self._progress
        if self._transport.workers > 1 or self._trainer.rank_parts.divides_batches:
            is_in_epoch = self._trainer.epoch_batches is not None
            refuse_step_outside(progress.iterations, self._thread == threading.get_ident(), is_in_epoch)
        if not self._is_held:
            self._outside.check_held()
            self._is_held = True
        if self._left_out is not None:
            self._left_out.before_step(index)
        self.strategy.look_for_redraws()
        before, self._rounds_at_step[index] = self._rounds_at_step[index], progress.rounds
        self.strategy.before_step(index, progress.rounds > before or closure_of(args, kwargs) is not None)
        if self._weightless.is_on and self._is_without_samples(index):
            self._weightless.before_step(index)

    def _is_without_samples(self, index: int) -> bool:
        """Return True if the step of this optimizer has no sample: of this worker, or of any where all step alike."""
        if self.strategy.exchanges_gradients:
            return not self.strategy.sets[0].weights.has_any
        return self._progress.own_samples == self._own_samples_at_step[index]

    def _after_step(self, index: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step and exchange if due; hook after an optimizer's step."""
        before = self._timer.switch("other")
        self.pace.go_on()
        if getattr(optimizer, "found_inf", None) is None and not self._skips:
            self._raise_not_finite(self._gradient_check.after_step(optimizer, self._progress.steps + 1))
        if self._left_out is not None:
            self._left_out.after_step(index)
        self.strategy.lay_back()
        self._weightless.after_step()
        self._count_step(index)
        self._weightless.keep_buffers()
        self.strategy.note_values(has_stepped=True)
        self._timer.switch(before)

    def _mean_loss(self, index: int, loss: Any) -> Any:
        """Return what a closure gives its optimizer: the mean of all workers under recipes of gradients."""
        if not self.strategy.exchanges_gradients or self._transport.workers == 1:
            return loss
        self.strategy.before_step(index, is_carried=self._progress.rounds > self._rounds_at_step[index])
        return self.strategy.mean_loss(loss)

    def _count_step(self, index: int) -> None:
        self._progress.count_step(index)
        self._own_samples_at_step[index] = self._progress.own_samples
        self._stepped_here.add(index)
        self._worked = len(self._leases)
        if self._trainer.epoch_batches is not None:
            self._trainer.epoch_batches.ask_ahead()
        with self._naming_step():
            is_equal = self.strategy.after_step(index, self._progress.steps_of[index])
        if is_equal:
            self._check_if_due()

    def _count_left_out(self, index: int) -> None:
        """Count a step that this worker leaves out since gradients are not finite: the others would wait for it."""
        before = self._timer.switch("other")
        self.pace.go_on()
        self.strategy.look_for_redraws()
        self._count_step(index)
        self.strategy.note_values(has_stepped=True)
        self._timer.switch(before)

    def refuse_not_finite(self) -> None:
        """Raise NotFiniteError if a gradient of the last step was not finite: on a device it is found one step late."""
        self._raise_not_finite(self._gradient_check.settle())

    def _raise_not_finite(self, found: tuple[str, int] | None) -> None:
        """Raise NotFiniteError if a gradient was not finite, given its parameter and its step."""
        if found is None:
            return
        self._events.flush()
        raise NotFiniteError(
            f"the loss became NaN or infinite: the gradient of {found[0]} is not finite "
            f"at step {found[1]} on worker {self._transport.worker}; {ADVICE}"
        )

    @contextmanager
    def _naming_step(self) -> Iterator[None]:
        """Add this step and worker to a NotFiniteError of the block."""
        try:
            yield
        except NotFiniteError as error:
            where = f"step {self._progress.steps}, worker {self._transport.worker}"
            raise NotFiniteError(f"{error}; {where}; {ADVICE}") from None

    # --- exchanges, as the strategy reports them ----------------------------------------------------------------

    @property
    def is_weightless(self) -> bool:
        """True while this worker makes a pass of weight 0."""
        return self._weightless.is_on

    def take_back_pass(self) -> None:
        """Take back the gradients of a backward pass of weight 0, before an exchange at its end."""
        self._weightless.take_back_gradients()

    def exchange_ended(self, blocked_s: float) -> None:
        """Count an exchange, and settle the work that it has carried."""
        self._progress.count_round()
        if self.strategy.asynchronous:
            return
        self._trainer.arrivals.note(self._events.t(), blocked_s)
        if self.strategy.carried():
            self._trainer.agent.carried()
            self.settle_leases()

    def mark(self, index: int | None = None) -> int:
        """Return the mark of the step of this optimizer, or of the gradients of all with the learning rates."""
        progress = self._progress
        if index is not None:
            return mark_of(progress.global_steps, index, progress.steps_of[index])
        rates = [one for group in self._optimizers.param_groups if isinstance(one := group.get("lr"), int | float)]
        return mark_of(progress.global_steps, progress.steps_of, rates)

    def batch(self) -> int:
        """Return the number of the global step that this worker is in."""
        return self._progress.global_steps

    def refuse_apart(self, batches: Mapping[int, int] | None = None) -> None:
        """Raise the error that names workers that are in different steps, or have different learning rates."""
        progress, transport = self._progress, self._transport
        epoch, batch = progress.epochs, progress.global_steps_of_epoch
        text = None
        if batches is None:
            if self.strategy.exchanges_gradients:
                when = f" at batch {batch} of epoch {epoch}"
                check_rates(transport.all_gather_bytes(self._trainer.schedules.rates().packed()), "worker", when)
            if self.current is not None and self._stepped_here:
                self._step_record.note(epoch, batch, has_stepped=True)
            text = self._step_record.difference(transport, transport.members)
            told = transport.all_gather_bytes(struct.pack("<q", progress.global_steps))
            batches = {rank: struct.unpack("<q", one)[0] for rank, one in enumerate(told)}
        before = progress.global_steps - batch
        places = {transport.members[rank]: other - before for rank, other in batches.items()}
        raise ReplicasDifferError(text or in_different_batches(epoch, {transport.number: batch} | places))

    def push(self, push: Push) -> None:
        """Push the work that no exchange has carried yet to a server."""
        samples, self._samples_sent = self._progress.own_samples - self._samples_sent, self._progress.own_samples
        leases = self._take_leases()
        current = self._trainer.epoch_batches
        if isinstance(current, LeasedEpoch) or (isinstance(current, StreamedEpoch) and current.is_counted):
            samples = sum(lease.samples for lease in leases)
        with ExitStack() as scaled:
            for rate in self._rates:
                scaled.enter_context(rate.applied())
            is_sent = push(samples, leases)
        if not is_sent:
            worker = self._transport.worker
            text = f"worker {worker} left out an update with NaN or infinity: {samples} samples do not count"
            self._events.write("warning", text=text)
            self._events.flush()

    def settle(self, leases: Sequence[Lease]) -> None:
        """Count the work on these leases as trained."""
        if self._trainer.epoch_batches is not None:
            self._trainer.epoch_batches.settle(leases)

    def _drop_void(self) -> bool:
        """Drop the leases of before a rollback of the server, which leases their batches again. Return True if any are.

        Done before a batch and after it, so that leases are void together: a rollback within a batch makes all so.
        """
        server = self._transport.server
        is_void = server is not None and any(
            isinstance(one, Lease) and one.recovery_epoch != server.recovery_epoch for one in self._leases
        )
        if is_void:
            self._leases, self._worked = [], 0
        return is_void

    def settle_leases(self) -> None:
        """Count the work since the last exchange as trained."""
        self.settle(self._take_leases())

    def _take_leases(self) -> list[Lease]:
        """Remove and return the leases of the work since the last exchange; those without a step stay."""
        leases, self._leases, self._worked = self._leases[: self._worked], self._leases[self._worked :], 0
        return leases

    def forget_epoch(self) -> None:
        """Forget the work of this epoch, in which no step was made.

        Raises ScriptError if the script has trained the model by hand.
        """
        if not self._progress.steps:
            self._outside.refuse_updates_by_hand()
        self.strategy.forget(self._progress.global_steps_of_epoch)
        self._leases, self._worked = [], 0

    # --- comparison of the replicas -----------------------------------------------------------------------------

    def _check_if_due(self) -> None:
        """Compare the replicas if that is due, and still if the last exchange was that of one optimizer of several."""
        if self._progress.global_steps - self._progress.compared_at < COMPARE_EVERY:
            return
        if self.check(f"after exchange {self._progress.rounds}") and not self.strategy.has_stepped:
            self._trainer.last_model.keep(self._trainer.evaluator.epoch, if_due=True)

    def _keep_uncompared(self, has_stepped: bool) -> None:
        """Keep the model of the only worker, or of the server of workers that do not wait, within an epoch."""
        trainer, is_alone = self._trainer, self._transport.workers == 1
        if self._progress.global_steps % COMPARE_EVERY:
            return
        if is_alone:
            trainer.last_model.keep(trainer.evaluator.epoch, if_due=True)
        elif self.strategy.asynchronous and has_stepped and not self._transport.worker:
            trainer.last_model.keep(trainer.evaluator.epoch, if_due=True, agreed=self.strategy.newest())

    def check(self, when: str) -> bool:
        """Compare the replicas of all workers, which must be equal now. Return False if nothing is to be compared."""
        try:
            steps = [] if self.strategy.asynchronous else self._progress.steps_of
            is_compared = self.strategy.check(when, self._trainer.schedules.rates(), steps)
        except ReplicasDifferError as error:
            if not self._progress.steps:
                self._outside.refuse_updates_by_hand(self._transport.all_gather_bytes)
            raise ReplicasDifferError(
                self._step_record.difference(self._transport, self._transport.members) or str(error)
            ) from None
        if is_compared:
            self._step_record.clear()
            if not self.strategy.has_stepped:
                self._progress.compared_at = self._progress.global_steps
            is_listed = isinstance(self._trainer.loader, list | tuple | range)  # else the loader has the rows
            if is_listed and self._transport.siblings is None:  # one process of a worker of several may have the loss
                same = self._first_losses.compare(self._transport)
                if same is not None:
                    self._events.notice(same)
        if is_compared and self._transport.worker == 0:
            self._events.write("check", step=self._progress.steps, round=self._progress.rounds, equal=True)
        return is_compared


def _weighed_outside(number: float) -> str:
    return explain(
        "stretto.weight was called outside a loop over the distributed batches",
        got=f"stretto.weight({number:g}) without a batch",
        expected="a call in each batch, before its backward pass",
        to_type="for batch in loader: stretto.weight(n); ...",
    )
