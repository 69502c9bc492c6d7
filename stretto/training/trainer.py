"""One worker's training: connects the script's loop, by hooks and the loader, to a recipe and a transport."""

from __future__ import annotations

import functools
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from stretto.codecs import CodecContext
from stretto.data.leases import Lease
from stretto.errors import LogError, NotFiniteError, ReplicasDifferError, ScriptError, StaysOutError, explain
from stretto.loader.data_digest import rows_digest
from stretto.loader.epoch_batches import (
    AssignedEpoch,
    BatchSource,
    Division,
    EpochBatches,
    is_leasable,
)
from stretto.loader.global_step import GlobalStep
from stretto.loader.leased_batches import LeasedEpoch
from stretto.loader.sample_weights import Arrivals
from stretto.membership.loop_positions import CLOSED, COMING, LOOP, OVER, LoopPosition
from stretto.membership.worker_status import status
from stretto.runtime.event_writer import ADVICE, EventWriter
from stretto.runtime.phase_timer import Stopwatch
from stretto.runtime.runtime import StopTraining
from stretto.strategies.context import Push, StrategyContext
from stretto.strategies.create import create_strategy
from stretto.strategies.model_sync import (
    SeveralModels,
    agree_on_start,
    part_random_states,
    refuse_all_frozen,
    same_start,
)
from stretto.strategies.outside_optimizers import OutsideOptimizers, refuse_step_outside, unwatch, watch
from stretto.strategies.traffic_counters import Tally
from stretto.training import idle_worker
from stretto.training.arguments import Arguments
from stretto.training.effective_batch import ScaledRate
from stretto.training.elasticity import ElasticAgent
from stretto.training.evaluator import Evaluator
from stretto.training.iterators import EpochStart
from stretto.training.not_finite import has_non_finite_gradient, non_finite_parameter
from stretto.training.recipe_warnings import advice
from stretto.training.schedule import Schedules
from stretto.training.section import Section
from stretto.training.start_event import write_start
from stretto.training.step_record import StepRecord
from stretto.training.worker_context import WorkerContext
from stretto.transport import Transport

CHECK_EVERY_ROUNDS = 100


class Trainer:
    """The training of one worker between `distribute` and the end of its section."""

    def __init__(self, context: WorkerContext, transport: Transport, arguments: Arguments, section: Section) -> None:
        model, optimizers, recipe = arguments.model, arguments.optimizers, arguments.recipe
        loader, evaluate, evaluate_every = arguments.loader, arguments.evaluate, arguments.evaluate_every
        self.model, self.optimizers, self.recipe = model, optimizers, recipe
        self.transport, self.section = transport, section
        self.is_over = False
        """True once the section has ended."""
        is_late = transport.arrives or (transport.server is not None and context.incarnation > 0)
        if is_late and not is_leasable(loader):
            raise StaysOutError("a restarted worker cannot rejoin in the middle of an iterable dataset")
        self.loader = loader
        self.events = EventWriter(
            context.run, self.transport, context.runtime, transport.number, transport.arrives
        )
        self.timer = Stopwatch(context.runtime.clock, self.events.zero)
        if not transport.arrives:
            is_compared = self.transport.workers > 1 and section.number == 1 and is_leasable(loader)
            data = rows_digest(loader) if is_compared else ""
            agree_on_start(self.transport, model, recipe.spelled() if recipe else "", data)
            same_start(self.transport, model)
            part_random_states(self.transport, section.number)
        meet = evaluate_every * self.transport.workers if evaluate_every and evaluate else None
        when = recipe.when if recipe else None
        division = Division(
            when, context.global_batch_of, meet, context.rule, context.workers, arguments.assignment, context.split
        )
        self.batch_source = BatchSource(loader, transport, self, division, context.runtime)
        self.arrivals = Arrivals(self.transport)
        self.evaluator = Evaluator(self, context, evaluate, evaluate_every)
        self.steps_of = [0] * len(optimizers)
        self._stepped_at = [0] * len(optimizers)
        """Number of exchanges at each optimizer's last step."""
        self._exchanges_before = 0
        self._accumulated_batches: int | None = 0
        """Successive batches whose gradients were exchanged without a step; None once the notice was written."""
        self._phase = COMING
        self.steps = self.global_steps_done = self.rounds_done = self.epochs = 0
        self._is_stopped = False
        """True if the run ends before the script does."""
        self.stepless_global_steps = 0
        """Global steps of epochs in which no step was made or counted."""
        self.samples = self.own_samples = self.samples_before = 0
        self.step_requests = self.step_requests_before = section.step_requests
        """Number of requests for a global step, including those at the end of an epoch, which return none."""
        self.epoch_batches: EpochBatches | None = None
        self.closing_epoch: EpochBatches | None = None
        """The epoch that is being closed; None at other times."""
        self.global_step: GlobalStep | None = None
        self.iterations = 0
        """Number of iterations over the loader that the script has begun."""
        self._thread = threading.get_ident()
        """The thread that took the last batch."""
        self.peeks: list[int] = []
        """Numbers of the iterations that were peeks: at most one batch and no optimizer step."""
        self._epoch_start = EpochStart(0, 0, 0, 0, whole=False)
        self._repeats_epoch = False
        """True if the next epoch has the number of the last one, which was only peeked."""
        self._has_peeked = self._all_peeked = False
        """True if this worker has left the epoch after a peek; and if all had at their last exchange of counts."""
        self._schedules_before: dict[str, Any] = {}
        """The schedules' state at the beginning of this epoch."""
        self._optimizer_steps = 0
        """Number of steps without those that are only counted because a gradient scaler may have skipped them."""
        self._unstepped_here = 0
        """This worker's part of the samples that do not count."""
        self._unstepped = 0
        """Number of samples assigned in this epoch that do not count, since no step was done."""
        self._untrained = 0
        """Number of samples of epochs in which no worker did a step."""
        self._leases: list[Any] = []
        self._worked = 0
        """Number of these leases whose work an optimizer step includes."""
        self.schedules = Schedules(self, list(optimizers), arguments.schedule, context.global_batch_of)
        self.settings = idle_worker.Settings(optimizers, context.runtime.scalers, self.schedules)
        self.idle_workers = idle_worker.IdleWorkers(self.transport, optimizers, self.settings, self.timer)
        self._accumulated = False
        self._stepped_last = True
        """True if the optimizer stepped in the last global step."""
        self._step_record = StepRecord()
        self._stepped_here: set[int] = set()
        """The optimizers that have stepped in this global step."""
        self._samples_sent = 0
        self._runtime = context.runtime
        self._pace = context.runtime.pace(self.timer, context.slow)
        self._skips = context.on_nan == "skip" and recipe is not None and recipe.asynchronous
        self.tally = Tally(self._codec_context(context))
        strategy_context = StrategyContext(
            self.transport, self.timer, self.events, self.tally, context.runtime, self._pace, self._skips
        )
        self.strategy = create_strategy(model, optimizers, recipe, strategy_context, self, section.parameter_sets)
        self._outside = OutsideOptimizers(
            model, optimizers, lambda: self.global_steps_done if self.global_step is not None else None
        )
        watch(self._outside.before_step)
        self._is_held = False
        """True if every trainable parameter was found in an optimizer, in this epoch."""
        self._hooks = [
            hook
            for index, optimizer in enumerate(optimizers)
            for hook in (
                optimizer.register_step_pre_hook(functools.partial(self._before_step, index)),
                optimizer.register_step_post_hook(functools.partial(self._after_step, index)),
            )
        ]
        # after the hooks above, which send updates of the scaled rate
        self._rates = (
            [ScaledRate(optimizer, context.lr_factor) for optimizer in optimizers] if context.lr_factor != 1 else []
        )
        self.agent = ElasticAgent(self, context)
        self.agent.arrive()
        for text in section.notices:
            self.events.notice(text)
        write_start(self, context)
        if evaluate is not None and evaluate_every is not None and self._evaluates_newest:
            self.events.notice(
                f"evaluate_every={evaluate_every} over a stream: worker 0 evaluates the server's newest parameters "
                "after this number of its own steps; the samples at these evaluations are estimates"
            )
        for text in advice(recipe, optimizers) if recipe is not None and self.transport.workers > 1 else ():
            self.events.notice(text)

    def _codec_context(self, context: WorkerContext) -> CodecContext:
        transport, events = self.transport, self.events
        return CodecContext(
            transport.worker, transport.workers, context.seed or 0, clock=events.t, notice=events.notice
        )

    @property
    def _evaluates_newest(self) -> bool:
        """True if worker 0 evaluates alone: no service counts a stream's batches where workers do not wait."""
        return self.recipe is not None and self.recipe.asynchronous and not self.batch_source.is_counted

    # --- epochs -----------------------------------------------------------------------------------------------

    def begin_epoch(self) -> bool:
        """Begin an epoch; first end one that the script left early.

        An epoch that was over before this worker joined is empty. An epoch of which only one batch was peeked begins
        again. Returns False for an iteration that was a peek in an earlier incarnation of this worker, and is one
        again.
        """
        self._refuse_if_over()
        self.end_peek() or self.end_epoch()
        self.iterations += 1
        if self.iterations in self.peeks:
            self.epochs += self.strategy.asynchronous
            return False
        self.epochs += not self._repeats_epoch
        self._repeats_epoch = self._has_peeked = False
        self._enter_epoch()
        return True

    def _enter_epoch(self) -> None:
        self._is_held = False
        self._schedules_before = self.schedules.state()
        if self.agent.is_over(self.epochs):
            self.schedules.skip_epoch()
            self.agent.epoch_skipped()
            return
        self._phase, self._steps_before = LOOP, self.steps
        if self.recipe is not None and not self.global_steps_done:
            refuse_all_frozen(self.model)
        self.strategy.resume(own=False)
        begun = self.agent.begun_epoch(self.epochs)
        self.strategy.begin_epoch(together=begun is None)
        if begun is None:
            self.samples_before, self.step_requests_before = self.samples, self.step_requests
        self.agent.epoch_begins()
        with self.timer.on("loading"):
            self._pace.begin_epoch()
            self.epoch_batches = self.batch_source.begin_epoch(self.section.epoch_number(self.epochs), begun)
        if isinstance(self.epoch_batches, LeasedEpoch):
            self.samples_before = (self.epochs - 1) * self.epoch_batches.samples - self._untrained
        self.agent.epoch_begun()
        whole = begun is None or not begun[1].global_step
        self._epoch_start = EpochStart(
            self._optimizer_steps, self.steps, self.global_steps_done, self.own_samples, whole
        )

    def next_batch(self) -> Any:
        """End the last global step, and return this worker's next batch; None when the epoch is over."""
        self._refuse_if_over()
        self._thread = threading.get_ident()
        self.end_global_step()
        if self.epoch_batches is None:
            return None
        while True:
            self.agent.rest()
            if self._is_limit_reached():
                self._is_stopped = True
                raise StopTraining
            self.timer.switch("loading")
            global_step = self.epoch_batches.next()
            self.step_requests += 1
            self.agent.step_assigned()
            self.wait_at_barriers(self.epoch_batches.barriers_due())
            if global_step is None:
                self.timer.switch("other")
                if not self.end_epoch(left=False):
                    continue
                if self._runtime.has_reached_limit():
                    raise StopTraining
                return None
            self._begin_global_step(global_step)
            if not global_step.idle:
                self._pace.begin()
                self.timer.switch("computing")
                return global_step.batch
            self.timer.switch("waiting")
            self.idle_workers.follow(global_step, self.strategy, self._count_step)
            self.end_global_step()

    def _is_peek(self) -> bool:
        """True if this epoch has given one batch, or none, and the optimizer made no step."""
        if (
            self.epoch_batches is None
            or (self.global_step is not None and self.global_step.incomplete)
            or self._accumulated
        ):
            return False
        return self._epoch_start.is_peek(self._optimizer_steps, self.global_steps_done)

    def end_peek(self) -> bool:
        """Undo an epoch that the script has only peeked at, where all workers do the same. Return True if it was one.

        Workers that do not wait for each other agree on it when they end the epoch.
        """
        if self.strategy.asynchronous or not self._is_peek():
            return False
        self.timer.switch("other")
        self._pace.go_on()
        self.global_step = None
        self._uncount()
        self.agent.undo_epoch()
        self.peeks.append(self.iterations)
        self.epoch_batches, self._repeats_epoch = None, True
        self.schedules.take(self._schedules_before)
        return True

    def _uncount(self) -> int:
        """Remove this epoch's samples from the counts, since no step was done. Return the samples that had counted."""
        begun, own = self._epoch_start, self.own_samples - self._epoch_start.own_samples
        counted = own if self.strategy.asynchronous else self.samples - self.samples_before
        self.strategy.forget(self.global_steps_done - begun.global_steps)
        self.global_steps_done, self.own_samples = begun.global_steps, begun.own_samples
        self.samples = self.samples_before
        self._leases, self._worked = [], 0
        return counted

    def _uncount_stepless(self) -> None:
        """Remove the samples of an epoch without any optimizer step from the counts."""
        if self.epoch_batches is None or not self._epoch_start.is_stepless(
            self._optimizer_steps, self.global_steps_done
        ):
            return
        done = self.global_steps_done
        self._unstepped_here += self.own_samples - self._epoch_start.own_samples
        self._unstepped += self._uncount()
        self.global_steps_done = done
        self.stepless_global_steps += done - self._epoch_start.global_steps - (self.steps - self._epoch_start.counted)
        self._epoch_start = replace(self._epoch_start, global_steps=done, counted=self.steps)
        self.epoch_batches.uncount()

    def _notice_unstepped(self) -> None:
        """Write a notice about samples of the ending epoch that do not count, if there are any."""
        samples, self._unstepped, self._unstepped_here = self._unstepped, 0, 0
        if samples:
            whose = f"worker {self.transport.worker} in epoch" if self.strategy.asynchronous else "epoch"
            self.events.notice(
                f"{whose} {self.evaluator.epoch + 1} made no optimizer step: its {samples} samples are not counted as "
                "trained; evaluate, and call update_bn for an averaged model, with another loader: this one gives each "
                "worker a part of the data"
            )

    def end_epoch(self, left: bool = True) -> bool:
        """End the epoch: average the model, compare the replicas, evaluate, and share the workers' counts.

        Returns False if the epoch continues, since a worker failed with work that was not exchanged; never if the
        script has `left` the epoch.
        """
        if self.epoch_batches is None:
            return True
        self.end_global_step(left=True)
        self._has_peeked = left and self._is_peek()
        self._uncount_stepless()
        self.push_all()
        if left and isinstance(self.epoch_batches, LeasedEpoch):
            self.epoch_batches.leave()
        self._phase = CLOSED
        status.note(self.place())
        if left and isinstance(self.epoch_batches, AssignedEpoch) and self.epoch_batches.has_more:
            self.transport.broadcast_bytes(
                b"left"
            )  # a worker that has not left waits in an all-gather: gloo fails on a different operation
        if self._unstepped and not self.strategy.asynchronous:
            self.strategy.average_buffers(self._unstepped_here)
        self.strategy.sync_for_evaluation()
        if self.agent.reopens(self.epoch_batches) and not left:
            self._phase = LOOP
            self.strategy.resume()
            return False
        if self.strategy.asynchronous:
            self._count_all_samples()
            if self.epoch_batches.samples and self.samples == self.samples_before:
                self._untrained += self.epoch_batches.samples
            if self._all_peeked:
                self.peeks.append(self.iterations)
                self.epoch_batches, self._unstepped = None, 0
                self.schedules.take(self._schedules_before)
                return True
        if not self.strategy.is_carried:
            self.agent.keep_uncommitted(self.epoch_batches)
        self._settle_leases()
        if self._unstepped:
            self.schedules.take(self._schedules_before)
        self._notice_unstepped()
        self.schedules.end_epoch()
        self.check("at the end of an epoch")
        self.closing_epoch, self.epoch_batches = self.epoch_batches, None
        self.evaluator.close_epoch(self.closing_epoch)
        if self.agent.checkpoints.is_save_requested():
            self.agent.checkpoints.save()
        self.closing_epoch = None
        return True

    def push_all(self) -> None:
        """Push the remaining update to a server, and wait until it is applied."""
        self._uncount_stepless()
        self.strategy.push_all()

    def push_stepped(self) -> None:
        """Push the remaining update, unless gradients are accumulated: a lease settles with its step."""
        if self._stepped_last:
            self.push_all()

    def members(self) -> Sequence[int]:
        """Return the members that an epoch which begins is assigned to."""
        return self.agent.members()

    def on_snapshot(self) -> None:
        """Write a checkpoint if one is due: all workers have met for a snapshot."""
        self.agent.checkpoints.on_snapshot()

    def wait_at_barriers(self, times: int) -> None:
        """Meet the other workers this number of times; evaluate the server's model, and save it if that is due."""
        for _ in range(times):
            self.run_synced(self.evaluator.evaluate, called=True)
            self.agent.checkpoints.on_snapshot()

    def run_synced(self, then: Callable[[], None], called: bool = False) -> None:
        """Replace the model by the server's, with all workers at a barrier, call `then`, and continue."""
        self.timer.switch("other")
        if self.strategy.asynchronous:
            self.strategy.sync_for_evaluation(called)
        self._count_all_samples()
        then()
        self.strategy.resume()

    def _count_all_samples(self) -> None:
        """Set the sample count to the largest of all workers', which the worker with the last lease knows."""
        own = self.samples if self.batch_source.is_counted else self.own_samples
        counts = [
            struct.unpack("<q?", count)
            for count in self.transport.all_gather_bytes(struct.pack("<q?", own, self._has_peeked))
        ]
        samples = [count for count, _ in counts]
        self.samples = max(samples) if self.batch_source.is_counted else sum(samples)
        self._all_peeked = all(peeked for _, peeked in counts)

    def _is_limit_reached(self) -> bool:
        """Return True if the run ends before the next global step; all sections count."""
        before = self.section
        global_steps, samples = before.global_steps + self.global_steps_done, before.samples + self.samples
        return self._runtime.is_limit_reached(global_steps, samples, before.seconds + self.events.t())

    def _refuse_if_over(self) -> None:
        """Raise ScriptError if the section has ended: its loader has no batches any more."""
        if self.is_over:
            raise ScriptError(
                explain(
                    "the run that this loader is of has ended",
                    got="a loop over its batches after stretto.finish(), or after another stretto.distribute",
                    expected="the loader that the last stretto.distribute returned",
                    to_type="loader = stretto.distribute(model, optimizer, loader) before the loop",
                )
            )

    def next_section(self) -> Section:
        """Return the section that follows this one, which has ended."""
        before, traffic = self.section, self.transport.traffic()
        return Section(
            before.number + 1,
            self.step_requests,
            before.rounds + self.rounds_done,
            before.global_steps + self.global_steps_done,
            before.samples + self.samples,
            before.epochs + self.epochs,
            self.strategy.parameter_sets,
            traffic.bytes_sent,
            traffic.bytes_received,
        )

    def end(self, is_last: bool) -> None:
        """End the section: close its epoch, evaluate, write the final state and the end of the log, remove hooks.

        `is_last` is True at the end of the script.
        """
        if is_last:
            self._notice_left_loop()
        if not self.agent.left:
            self.end_peek() or self.end_epoch()
            self._phase = OVER
            has_worked = self._has_any_worker_trained()
            if self.strategy.asynchronous and has_worked:
                self.strategy.sync_for_evaluation()
            self.schedules.finish()
            self.evaluator.finish(has_worked)
            self.agent.checkpoints.finish(has_worked)
        self._write_outcomes()
        self.events.write(
            "end", step=self.steps, samples=self.own_samples, training_s=self.training_s(), **self.measured()
        )
        self._close_log()
        self.is_over = True
        unwatch()
        for hook in self._hooks:
            hook.remove()
        for rate in self._rates:
            rate.release()
        self.strategy.close()

    def _notice_left_loop(self) -> None:
        """Say that the workers' models differ since the script has left its last loop, if they do."""
        if self.epoch_batches is None or self._is_stopped or self.agent.left:
            return
        is_left = not self._is_peek() and self.transport.workers > 1
        if is_left and (self.strategy.asynchronous or self.strategy.has_stepped):
            self.events.notice(
                "the last loop was left before its end: the models of the workers differ after it, and what the script "
                "evaluates or saves there is one worker's own; stretto.finish() after the loop gives all workers the "
                "agreed model, which the run saves in any case"
            )

    def _close_log(self) -> None:
        """Write the rest of the log; an error does not fail the run."""
        try:
            self.events.close()
        except LogError as error:
            print(f"stretto: worker {self.events.worker}: {error}: its end is lost", file=sys.stderr, flush=True)

    def _has_any_worker_trained(self) -> bool:
        """Return True if any worker has trained on a batch; an asynchronous worker may have got none."""
        if not self.strategy.asynchronous:
            return bool(self.global_steps_done)
        return b"some" in self.transport.all_gather_bytes(b"some" if self.global_steps_done else b"none")

    def abandon(self) -> None:
        """Write the events of a failed script, and close the client, so that no other worker waits for it."""
        self._write_outcomes()
        self.events.flush()
        self.transport.abandon()

    def place(self) -> LoopPosition:
        """Return where the script is in its loop: the step under way, or the last one of a loop that it has left."""
        step = self._steps_before + 1 if self._phase == LOOP else self.steps
        return LoopPosition(self._phase, self.epochs, step)

    # --- global steps ------------------------------------------------------------------------------------------------

    def _begin_global_step(self, global_step: GlobalStep) -> None:
        self.schedules.begin_global_step(bool(self._stepped_here), global_step.streamed)
        self.global_step = global_step
        self.global_steps_done += 1
        if global_step.total:
            self.strategy.add_samples(global_step.own, global_step.total, global_step.parts)
        self.samples = self.samples_before + global_step.assigned_samples
        self.own_samples += global_step.own
        self._stepped_here.clear()
        self._exchanges_before = self.rounds_done
        self._steps_before = self.steps
        status.note(self.place())
        self._accumulated = False
        if global_step.lease is not None:
            self._leases.append(global_step.lease)

    def end_global_step(self, left: bool = False) -> None:
        """End a global step: notify idle workers, evaluate if due, and write progress.

        `left` is True if the script has left its epoch in the middle of the step.
        """
        if self.global_step is None:
            return
        self.timer.switch("other")
        self._pace.go_on()
        global_step, self.global_step = self.global_step, None
        self._stepped_last = global_step.idle or bool(self._stepped_here)
        if self.strategy.exchanges_gradients and not global_step.idle:
            self._step_record.note(
                self.epochs, self.global_steps_done - self._epoch_start.global_steps, bool(self._stepped_here)
            )
        if not global_step.idle:
            if left and len(self._leases) > self._worked:  # the script left without a step with these batches
                self.own_samples -= global_step.own
                del self._leases[self._worked :]
            if not left:
                self._count_skipped_step(global_step)
            self.idle_workers.end(global_step)
            self._notice_accumulation()
        if self.recipe is None:
            self._settle_leases()
        with self._naming_step():
            self.strategy.end_global_step(bool(self._stepped_here))
        if self.strategy.exchanges_gradients and self.rounds_done % CHECK_EVERY_ROUNDS == 1:
            self.check(f"after exchange {self.rounds_done}")
        if not self.strategy.asynchronous:
            self.evaluator.evaluate_if_due()
        elif self._evaluates_newest:
            self.evaluator.evaluate_newest_if_due()
        if self.events.due():
            self._write_outcomes()
            self.events.write("progress", step=self.steps, samples=self.own_samples, **self.measured())
            self.events.flush()

    def _notice_accumulation(self) -> None:
        """Write a notice, once, if gradients are accumulated and each batch's gradients are exchanged."""
        if not self.strategy.exchanges_gradients or self._accumulated_batches is None or self.transport.workers == 1:
            return
        if not self._stepped_here and self.rounds_done > self._exchanges_before:
            self._accumulated_batches += 1
        elif self._stepped_here and self._accumulated_batches:
            batches, self._accumulated_batches = self._accumulated_batches + 1, None
            self.events.notice(
                f"the gradients of {batches} batches are accumulated for a step and exchanged {batches} times: "
                f"all but the last backward pass in `with stretto.no_sync():` would send 1/{batches} of the bytes"
            )

    def accumulate(self, on: bool) -> None:
        """Suspend the exchange of gradients, or resume it: the script accumulates gradients."""
        self._accumulated = True
        self.strategy.accumulate(on)

    def is_at_rest(self) -> bool:
        """Return True if no computed gradient or update waits for an exchange or a step."""
        return self.strategy.is_carried and (self.global_step is None) and self._stepped_last

    # --- steps and exchanges ----------------------------------------------------------------------------------

    def _before_step(self, index: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Check and prepare a step; hook before an optimizer's step."""
        if self.transport.workers > 1:
            refuse_step_outside(self.iterations, self._thread == threading.get_ident(), self.epoch_batches is not None)
        if not self._is_held:
            self._outside.check_held()
            self._is_held = True
        before, self._stepped_at[index] = self._stepped_at[index], self.rounds_done
        self.strategy.before_step(index, self.idle_workers.is_following or self.rounds_done > before)

    def _after_step(self, index: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count a step and exchange if due; hook after an optimizer's step."""
        before = self.timer.switch("other")
        self._pace.go_on()
        if getattr(optimizer, "found_inf", None) is None and not self._skips:
            self._refuse_not_finite(optimizer)
        self.idle_workers.announce_step(self.global_step, index, self.strategy.exchanges_gradients)
        self._count_step(index)
        self.timer.switch(before)

    def _count_step(self, index: int, is_done: bool = True) -> None:
        self.steps_of[index] += 1
        self.steps = max(self.steps_of)
        self._optimizer_steps += is_done
        self._stepped_here.add(index)
        self._worked = len(self._leases)
        if self.epoch_batches is not None:
            self.epoch_batches.ask_ahead()
        with self._naming_step():
            is_equal = self.strategy.after_step(index, self.steps_of[index])
        if is_equal and self.rounds_done % CHECK_EVERY_ROUNDS == 1:
            self.check(f"after exchange {self.rounds_done}")

    @contextmanager
    def _naming_step(self) -> Iterator[None]:
        """Add this step and worker to a NotFiniteError of the block."""
        try:
            yield
        except NotFiniteError as error:
            raise NotFiniteError(f"{error}; step {self.steps}, worker {self.transport.worker}; {ADVICE}") from None

    def push(self, push: Push) -> None:
        """Push the work that no exchange has carried yet to a server."""
        samples, leases = self._unsent()
        with ExitStack() as scaled:
            for rate in self._rates:
                scaled.enter_context(rate.applied())
            is_sent = push(samples, leases)
        if not is_sent:
            worker = self.transport.worker
            text = f"worker {worker} left out an update with NaN or infinity: {samples} samples do not count"
            self.events.write("warning", text=text)
            self.events.flush()

    def _unsent(self) -> tuple[int, list[Lease]]:
        """Return the samples and the leases whose work no exchange has carried yet."""
        samples, self._samples_sent = self.own_samples - self._samples_sent, self.own_samples
        return samples, self._take_leases()

    def _take_leases(self) -> list[Lease]:
        """Return the leases of the work since the last exchange, and clear them."""
        leases, self._leases, self._worked = self._leases, [], 0
        return leases

    def exchange_begins(self) -> None:
        """Notify idle workers that an exchange of gradients begins."""
        self.idle_workers.announce(self.global_step, idle_worker.EXCHANGE)

    def exchange_ended(self, blocked_s: float) -> None:
        """Count an exchange, and settle the work that it has carried."""
        self.rounds_done += 1
        if self.strategy.asynchronous:
            return
        self.arrivals.note(self.events.t(), blocked_s)
        if self.strategy.carried():
            self.agent.carried()
            self._settle_leases()

    def _count_skipped_step(self, global_step: GlobalStep) -> None:
        """Count a step that a gradient scaler skipped at this worker only: the others would wait for its exchange."""
        if not self.strategy.in_rounds or self._accumulated or self._is_evaluating():
            return
        trained_steps = self.global_steps_done - self.stepless_global_steps
        for index in [other for other in range(len(self.optimizers)) if other not in self._stepped_here]:
            steps_each_time = self.steps_of[index] > 0 and self.steps_of[index] == trained_steps - 1
            is_non_finite = has_non_finite_gradient(self.optimizers.each[index])
            if (steps_each_time and len(self.optimizers) == 1) or is_non_finite:
                action = idle_worker.step_of(index) if is_non_finite else idle_worker.COUNT
                self.idle_workers.announce(global_step, action)
                self._count_step(index, is_done=is_non_finite)

    def _is_evaluating(self) -> bool:
        """True in an epoch without a step so far whose loop computes no gradients, or has the model in eval mode."""
        models = self.model.given if isinstance(self.model, SeveralModels) else [self.model]
        is_training = torch.is_grad_enabled() and any(model.training for model in models)
        return self._optimizer_steps == self._epoch_start.steps and not is_training

    def _refuse_not_finite(self, optimizer: Optimizer) -> None:
        """Raise NotFiniteError if the last parameter's gradient is not finite: a NaN in the loss reaches it first."""
        name = non_finite_parameter(self.model, optimizer)
        if name is None:
            return
        self.events.flush()
        raise NotFiniteError(
            f"the loss became NaN or infinite: the gradient of {name} is not finite "
            f"at step {self.steps + 1} on worker {self.transport.worker}; {ADVICE}"
        )

    # --- figures ----------------------------------------------------------------------------------------

    def check(self, when: str) -> None:
        """Compare the replicas of all workers, which must be equal now."""
        try:
            is_compared = self.strategy.check(when)
        except ReplicasDifferError as error:
            raise ReplicasDifferError(
                self._step_record.difference(self.transport, self.transport.members) or str(error)
            ) from None
        if is_compared:
            self._step_record.clear()
        if is_compared and self.transport.worker == 0:
            self.events.write("check", step=self.steps, round=self.rounds_done, equal=True)

    def training_s(self) -> float:
        """Return the seconds since the start, without evaluations."""
        return round(self.events.t() - self.timer.split()["evaluating"], 6)

    def measured(self) -> dict[str, Any]:
        """Return this worker's cumulative figures."""
        traffic, before = self.transport.traffic(), self.section
        blocked_s = self.strategy.blocked_s
        return {
            **({"blocked_s": round(blocked_s, 6)} if blocked_s is not None else {}),
            "rounds": self.rounds_done,
            "time_breakdown": self.timer.split(),
            "bytes_sent": traffic.bytes_sent - before.sent,
            "bytes_received": traffic.bytes_received - before.received,
            "bytes_counted": traffic.counted,
            **self.tally.figures(),
        }

    def _settle_leases(self) -> None:
        self.settle(self._take_leases())

    def settle(self, leases: list[Lease]) -> None:
        """Count the work on these leases as trained."""
        if self.epoch_batches is not None:
            self.epoch_batches.settle(leases)

    def _write_outcomes(self) -> None:
        """Write an event with this worker's applied updates and their staleness."""
        if outcomes := self.strategy.take_outcomes():
            self.events.write("update_applied", updates=outcomes)
