"""One worker's training: connects the script's loop, by hooks and the loader, to a recipe and a transport."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from stretto.checkpoint.state_transfer import pack_own, unpack_own
from stretto.codecs import CodecContext
from stretto.errors import LogError, StaysOutError
from stretto.loader.data_digest import rows_digest
from stretto.loader.epoch_batches import EpochBatches, is_leasable
from stretto.loader.global_step import GlobalStep
from stretto.loader.sample_weights import Arrivals
from stretto.membership.loop_positions import OVER
from stretto.parallel.link import Link
from stretto.parallel.rank_parts import RankContext, RankParts, create_parts
from stretto.runtime.event_writer import EventWriter
from stretto.runtime.phase_timer import Stopwatch
from stretto.strategies.model_sync import agree_on_start, part_random_states, same_start
from stretto.strategies.traffic_counters import Tally
from stretto.training.arguments import Arguments
from stretto.training.elasticity import ElasticAgent
from stretto.training.epochs import Epochs
from stretto.training.evaluator import Evaluator
from stretto.training.figures import Figures
from stretto.training.global_steps import GlobalSteps
from stretto.training.last_model import LastModel
from stretto.training.progress import LoopProgress
from stretto.training.recipe_warnings import advice
from stretto.training.schedule import Schedules
from stretto.training.section import Section
from stretto.training.settings import Settings
from stretto.training.speed_shares import SpeedShares
from stretto.training.start_event import write_start
from stretto.training.worker_context import WorkerContext
from stretto.transport import Transport


class Trainer:
    """The training of one worker between `distribute` and the end of its section."""

    def __init__(self, context: WorkerContext, transport: Transport, arguments: Arguments, section: Section) -> None:
        model, optimizers, recipe, loader = arguments.model, arguments.optimizers, arguments.recipe, arguments.loader
        self.model, self.optimizers, self.recipe, self.loader = model, optimizers, recipe, loader
        self.transport, self.section = transport, section
        self.is_over = False
        """True once the section has ended."""
        if transport.arrives and arguments.assignment == "own":
            raise StaysOutError("a restarted worker cannot rejoin in the middle of a shard of its own")
        log = context.event_log(transport.number)
        self.events = EventWriter(log, transport, context.runtime, transport.number, transport.arrives)
        self.timer = Stopwatch(context.runtime.clock, self.events.zero)
        self._continues = section.state is not None and not transport.arrives
        """True if the section begins with the state of a checkpoint."""
        if not arguments.layout.builds_parts or (self._continues and self._stages(arguments) is None):
            arguments.build()
        self.start_sums: Mapping[str, int] = {}
        """Checksums of the tensors that the script makes alike at each worker, by name."""
        if not transport.arrives:
            is_compared = transport.workers > 1 and section.number == 1 and is_leasable(loader)
            data = rows_digest(loader) if is_compared else ""
            agree_on_start(transport, model, recipe.spelled() if recipe else "", data)
            sums = same_start(transport, model)
            self.start_sums = sums if section.number == 1 else {}
            part_random_states(transport, section.number)
        self.rank_parts = self._begin_parts(arguments, context.ranks_timeout_s)
        self.progress = LoopProgress(len(optimizers), section.step_requests)
        self.epochs = Epochs(self, context, arguments)
        self.batch_source = self.epochs.source
        self.shares = SpeedShares(self)
        self.arrivals = Arrivals(transport)
        self.last_model = LastModel(self, context)
        self.evaluator = Evaluator(self, context, arguments.evaluate, arguments.evaluate_every)
        self.schedules = Schedules(self, optimizers.all, arguments.schedule, context.global_batch_of)
        self.settings = Settings(optimizers, context.runtime.scalers, self.schedules)
        clock, notice = self.events.t, self.events.notice
        tally = Tally(CodecContext(transport.worker, transport.workers, context.seed or 0, clock=clock, notice=notice))
        self.figures = Figures(self, tally)
        self.global_steps = GlobalSteps(self, context, tally)
        self.strategy = self.global_steps.strategy
        self.agent = ElasticAgent(self, context)
        self.agent.arrive()
        self._store_facts()
        for text in section.notices:
            self.events.notice(text)
        source = self.batch_source
        factor = context.lr_factor_of(source.first_workers) if source.keeps_global_batch else context.lr_factor
        self.global_steps.scale_rates(factor)
        write_start(self, context, factor)
        self.evaluator.announce()
        for text in advice(recipe, optimizers) if recipe is not None and transport.workers > 1 else ():
            self.events.notice(text)

    def _begin_parts(self, arguments: Arguments, timeout_s: float) -> RankParts:
        """Return this rank's part of the model, as the layout divides it."""
        transport = self.transport
        if transport.siblings is None:
            return RankParts()
        link = Link(transport.siblings, self._waiting_for_ranks, arguments.device)
        context = RankContext(
            self.model,
            self.optimizers,
            self.loader,
            arguments.evaluate_every,
            self.recipe,
            transport.workers,
            link,
            self._continues,
            transport.all_gather_bytes,
            transport.broadcast_bytes,
            self.events.notice,
            on_split=self._on_split,
            on_exchange=lambda: self.progress.count_round(),
            timeout_s=timeout_s,
            timer=self.timer,
            on_backward=lambda: self.strategy.on_backward(),
            write=lambda kind, **fields: self.events.write(kind, None, **fields),
        )
        parts = create_parts(arguments.layout, context)
        parts.begin(self._stages(arguments))
        return parts

    def _stages(self, arguments: Arguments) -> Any:
        """Return the division of the model by the workers that this one joins, or by those of the checkpoint.

        None where there is none, or the checkpoint is of another layout.
        """
        position = self.transport.join_position
        if position is not None and position.facts:
            return unpack_own(position.facts)[0].get("stages")
        stages = self.section.state.facts.get("stages") if self.section.state is not None else None
        return stages if self.transport.arrives or (stages or {}).get("layout") == str(arguments.layout) else None

    def _on_split(self) -> None:
        """Exchange this rank's part of the model, which has just been split."""
        self.strategy.begin_epoch(True)
        self._store_facts()

    def _store_facts(self) -> None:
        """Let a parameter server keep the division of the model, for workers that join."""
        if self.transport.server is not None and (facts := self.rank_parts.facts()) is not None:
            self.transport.server.store_facts(pack_own(({"stages": facts}, {})))

    @contextmanager
    def _waiting_for_ranks(self, phase: str = "waiting") -> Iterator[None]:
        """Wait for other ranks of this worker; the time counts for this phase, unless it is that of an evaluation."""
        counts = self.timer.phase == "computing"
        with self.timer.on(phase) if counts else nullcontext(), self.transport.waiting():
            yield

    @property
    def epoch_batches(self) -> EpochBatches | None:
        """The epoch under way."""
        return self.epochs.current

    @property
    def global_step(self) -> GlobalStep | None:
        """The global step under way."""
        return self.global_steps.current

    # --- the end of the section ---------------------------------------------------------------------------------

    def next_section(self) -> Section:
        """Return the section that follows this one, which has ended."""
        before, progress, traffic = self.section, self.progress, self.transport.traffic()
        return Section(
            before.number + 1,
            progress.step_requests,
            before.rounds + progress.rounds,
            before.global_steps + progress.global_steps,
            before.samples + progress.samples,
            before.epochs + progress.epochs,
            self.strategy.parameter_sets,
            traffic.bytes_sent,
            traffic.bytes_received,
            checkpoints=self.agent.checkpoints.every,
            lost=self.epochs.lost,
        )

    def end(self, is_last: bool) -> None:
        """End the section: close its epoch, evaluate, write the final state and the end of the log, remove hooks.

        `is_last` is True at the end of the script.
        """
        if is_last:
            self._notice_left_loop()
        if not self.agent.left:
            self.agent.refuse_to_end_before_state()
            self.epochs.end_loops()
            self.agent.section_ends()
            self.rank_parts.take_part()
            self.progress.enter(OVER)
            has_worked = self._has_any_worker_trained()
            if is_last and not self.strategy.asynchronous:
                self.transport.all_gather_bytes(b"")  # a worker whose script fails now never comes here
            if self.strategy.asynchronous and has_worked:
                self.strategy.sync_for_evaluation()
            self.schedules.finish()
            self.evaluator.finish(has_worked)
            self.agent.checkpoints.finish(has_worked)
        else:
            self.last_model.write("the worker has left, as it was asked to")
            self.agent.checkpoints.finish(False)
        self.last_model.give_up()
        self.figures.write("end", training_s=self.figures.training_s())
        self._close_log()
        self.is_over = True
        self.rank_parts.close()
        self.global_steps.close()

    def _notice_left_loop(self) -> None:
        """Say that the workers' models differ since the script has left its last loop, if they do."""
        if self.epochs.current is None or self.epochs.is_stopped or self.agent.left:
            return
        is_left = not self.epochs.is_peek() and self.transport.workers > 1
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
            return bool(self.progress.global_steps)
        return b"some" in self.transport.all_gather_bytes(b"some" if self.progress.global_steps else b"none")

    def abandon(self) -> None:
        """Write the events of a failed script, and close the client, so that no other worker waits for it."""
        self.figures.write_outcomes()
        self.events.flush()
        try:
            self.transport.abandon()
        finally:
            self._close_log()
