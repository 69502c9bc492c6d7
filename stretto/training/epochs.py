"""The epochs of one worker's loop: how each begins, gives batches, and ends with the other workers."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from stretto.checkpoint.state_transfer import pack_own
from stretto.data.shares import EVEN, Limits
from stretto.errors import ScriptError, UnevenLoopsError, explain
from stretto.loader.epoch_batches import AssignedEpoch, BatchSource, Division, EpochBatches
from stretto.loader.epoch_order import Earlier
from stretto.loader.leased_batches import LeasedEpoch
from stretto.loader.streamed_epoch import StreamedEpoch
from stretto.membership.loop_positions import BETWEEN, CLOSED, COMING, LOOP, OVER, LoopPosition, explained, named
from stretto.membership.worker_status import status
from stretto.parallel.rank_parts import RankParts
from stretto.recipe.recipe import Recipe, refuse_shares
from stretto.runtime.event_writer import EventWriter
from stretto.runtime.phase_timer import Stopwatch
from stretto.runtime.runtime import StopTraining
from stretto.strategies.consistency_check import check_rates
from stretto.strategies.model_sync import refuse_all_frozen
from stretto.strategies.strategy import Strategy
from stretto.training.arguments import Arguments
from stretto.training.checkpointed import script_state
from stretto.training.elasticity import ElasticAgent
from stretto.training.evaluator import Evaluator
from stretto.training.global_steps import GlobalSteps
from stretto.training.last_model import LastModel
from stretto.training.loop_exits import Place, has_way_out, is_repeated_by_range
from stretto.training.progress import LoopProgress
from stretto.training.schedule import Schedules
from stretto.training.section import Section
from stretto.training.worker_context import WorkerContext
from stretto.transport import Transport


class LoopingTrainer(Protocol):
    """The attributes of a trainer that its epochs use."""

    model: nn.Module
    recipe: Recipe | None
    loader: Any
    transport: Transport
    section: Section
    timer: Stopwatch
    events: EventWriter
    progress: LoopProgress
    schedules: Schedules
    rank_parts: RankParts
    evaluator: Evaluator
    last_model: LastModel
    global_steps: GlobalSteps
    strategy: Strategy
    agent: ElasticAgent
    is_over: bool


class Epochs:
    """Begins and ends epochs with all workers, and gives this worker's batches to the script's loop."""

    def __init__(self, trainer: LoopingTrainer, context: WorkerContext, arguments: Arguments) -> None:
        self._trainer, self._runtime = trainer, context.runtime
        self._progress, self._transport, self._timer = trainer.progress, trainer.transport, trainer.timer
        evaluates, workers = bool(arguments.evaluate_every and arguments.evaluate), trainer.transport.workers
        if trainer.recipe is not None and context.shares != EVEN:
            refuse_shares(trainer.recipe, f"--shares {context.shares}")
        if trainer.recipe is not None and context.limits:
            refuse_shares(trainer.recipe, "--max-batch")
        division = Division(
            trainer.recipe.when if trainer.recipe else None,
            context.global_batch_of,
            (arguments.evaluate_every or 0) * workers if evaluates else None,
            context.rule,
            context.workers,
            arguments.assignment,
            context.split,
            context.shares,
            context.resume_stream,
            context.drops_uneven,
            context.limits,
            context.checkpoint is not None and not context.checkpoint.follows_cost,
        )
        self.source = BatchSource(
            trainer.loader, trainer.transport, self, division, context.runtime, trainer.rank_parts
        )
        self._resume_stream = context.resume_stream
        self.current: EpochBatches | None = None
        """The epoch under way."""
        self.closing: EpochBatches | None = None
        """The epoch that is being closed; None at other times."""
        self._has_peeked = self._all_peeked = False
        """True if this worker has left the epoch after a peek; and if all had at their last exchange of counts."""
        self._has_left = self._all_left = False
        """True if the loop of this worker has left the epoch; and if all had at their last exchange of counts."""
        self._has_named_left = False
        """True once a line has named samples of an epoch for which no loop has asked."""
        self._has_just_come = trainer.transport.arrives
        """True at a worker that came late, until it has its first batch: the others know that their loops continue."""
        self._counts_itself = True
        """True if the script may count steps itself, False if a worker that comes late has their number."""
        self._place: Place | None = None
        """Place of the script at which the iteration of this epoch began."""
        self._whole: tuple[int, int] | None = None
        """Epoch and number of arrivals in which all loops were seen to take all batches."""
        self._has_named_late = False
        """True once a line has said that no worker is left that has counted all steps."""
        self._looping: list[int] = []
        """Workers whose loops have asked for the last epoch that all began together, where they do not wait."""
        self._has_named_ended = False
        """True once a line has named workers whose loops have ended before those of others."""
        self._schedules_before: dict[str, Any] = {}
        """The schedules' state at the beginning of this epoch."""
        self._batches_to_meeting = 0
        """Number of batches before the next meeting in an epoch over a stream, of workers that do not wait."""
        self._recovery_epoch = self._samples_at_meeting = 0
        """Number of rollbacks of the server that were noted, and this worker's samples at the last snapshot."""
        self.lost = [*trainer.section.lost]
        """Losses of streams that this worker knows, also those of earlier sections: the epoch, and a text."""
        self.is_stopped = False
        """True if the run ends before the script does."""

    # --- for the source of batches ------------------------------------------------------------------------------

    @property
    def events(self) -> EventWriter:
        """The events of this worker."""
        return self._trainer.events

    def members(self) -> Sequence[int]:
        """Return the members that an epoch which begins is assigned to."""
        return self._trainer.agent.members()

    def share_limits(self) -> Limits:
        """Return the largest share of each of these members that has run out of memory."""
        return self._trainer.agent.share_limits()

    def earlier(self) -> Earlier:
        """Return what a worker that joins within the epoch under way receives with its order."""
        progress = self._progress
        own = script_state().saved() if self._trainer.strategy.asynchronous else ({}, {})
        return Earlier(progress.peeks, progress.samples_before, pack_own(own) if own[0] else b"")

    def push_all(self) -> None:
        """Push the remaining update to a server, and wait until it is applied."""
        self._uncount_stepless()
        self._trainer.strategy.push_all()

    def wait_at_barriers(self, times: int) -> None:
        """Meet the other workers this number of times; evaluate the server's model, and save it if that is due."""
        for _ in range(times):
            self.run_synced(self._trainer.evaluator.evaluate, called=True)
            self.on_snapshot()

    def on_snapshot(self) -> None:
        """Save the server's model if that is due: all workers have met."""
        self._trainer.agent.checkpoints.on_snapshot()

    # --- begin --------------------------------------------------------------------------------------------------

    def begin_epoch(self, place: Place | None) -> bool:
        """Begin an epoch, at this place of the script; first end the epoch before, if the script left it early.

        An epoch that was over before this worker joined is empty. An epoch of which only one batch was peeked begins
        again. Returns False for an iteration that was a peek in an earlier incarnation of this worker, and is one
        again.
        """
        self._refuse_if_over()
        self.end_peek() or self.end_epoch()
        if self._trainer.strategy.asynchronous:
            self._is_asked_for(by_this=True)
        else:
            self._pass_if_ended(place)
        if not self._progress.begin_iteration(self._trainer.strategy.asynchronous):
            return False
        self._has_peeked, self._place = False, place
        self._enter_epoch()
        return True

    def _enter_epoch(self) -> None:
        trainer, progress = self._trainer, self._progress
        strategy, agent, steps = trainer.strategy, trainer.agent, trainer.global_steps
        steps.begin_epoch()
        self._schedules_before = trainer.schedules.state()
        if agent.is_over(progress.epochs):
            trainer.schedules.skip_epoch()
            agent.epoch_skipped()
            return
        progress.enter_loop()
        if trainer.recipe is not None and not progress.global_steps:
            refuse_all_frozen(trainer.model)
        strategy.resume(own=False)
        begun, number = agent.begun_epoch(progress.epochs), trainer.section.epoch_number(progress.epochs)
        place = agent.place_in_stream()
        is_continued = begun is not None or (place is not None and not place.is_over)
        if not is_continued:
            self._divide_model()
        strategy.begin_epoch(together=not is_continued and not self._is_under_way(progress.epochs))
        if not is_continued or (self._resume_stream == "restart" and not self._transport.arrives):
            progress.begin_epoch()
        agent.epoch_begins()
        with self._timer.on("loading"):
            steps.pace.begin_epoch()
            self.current = self.source.begin_epoch(number, begun, place, progress.samples_of_epoch)
        agent.epoch_begun()
        self._samples_at_meeting = progress.own_samples
        is_at_start = not begun[1].global_step if begun is not None else not (place is not None and place.trained)
        progress.begin_loop(whole=not is_continued or is_at_start)

    def _divide_model(self) -> None:
        """Divide the model with workers that call it before this epoch, which are where their last loop ended."""
        self._progress.enter(COMING)
        self._trainer.rank_parts.settle()
        self._trainer.rank_parts.take_part()
        self._progress.enter_loop()

    def _is_under_way(self, epoch: int) -> bool:
        """Return True if this worker joins in the middle of this epoch."""
        server = self._transport.server
        return server is not None and server.order[0] == self._trainer.section.epoch_number(epoch)

    def _is_asked_for(self, by_this: bool) -> bool:
        """Return True if any worker's loop asks for the next epoch, or has asked before this worker came.

        Workers that do not wait for each other meet here: before each epoch, and when their loops have ended.
        """
        epoch = self._progress.epochs + 1
        if self._trainer.agent.is_over(epoch) or self._is_under_way(epoch):
            return True
        self._progress.enter(COMING)
        self._trainer.rank_parts.take_part()
        replies = self._transport.all_gather_bytes(b"more" if by_this else b"over")
        members = self._transport.members
        self._looping = [worker for worker, reply in zip(members, replies, strict=False) if reply == b"more"]
        ended = [worker for worker in members if worker not in self._looping]
        if ended and self._looping and self._transport.number == members[0] and not self._has_named_ended:
            self._has_named_ended = True
            self._trainer.events.own_notice(
                f"{named(ended)} ended {'its' if len(ended) == 1 else 'their'} loops before epoch {epoch}, which the "
                "other workers train"
            )
        return bool(self._looping)

    @property
    def main(self) -> int:
        """The first of the workers whose loops have not ended."""
        members = self._transport.members
        return next((worker for worker in members if worker in self._looping), members[0])

    # --- batches ------------------------------------------------------------------------------------------------

    @property
    def has_batch(self) -> bool:
        """True while the script's loop has a batch."""
        return self._trainer.global_steps.current is not None and not self._trainer.schedules.is_left

    def global_batches(self, of_epoch: bool) -> int:
        """Return the number of global batches of this epoch, or of all, before the one that the script's loop has."""
        progress = self._progress
        before = 0 if of_epoch else progress.global_batches_before
        return before + progress.global_batches - self.has_batch

    def is_last_batch(self) -> bool:
        """Return True if the script's loop has a batch of the last global step of its epoch."""
        return self.has_batch and self.current is not None and self.current.is_last()

    def next_batch(self) -> Any:
        """End the last global step, and return this worker's next batch; None when the epoch is over."""
        self._refuse_if_over()
        agent, steps = self._trainer.agent, self._trainer.global_steps
        steps.take_batch()
        if self.current is None:
            return None
        while True:
            has_just_come, self._has_just_come = self._has_just_come, False
            if not has_just_come and steps.stepped_last and self._is_left_by_others():
                self.end_epoch(is_known=True)
                return None
            agent.rest()
            self._note_rollback()
            self._meet_within_stream()
            if self._is_limit_reached():
                self.is_stopped = True
                raise StopTraining
            self._timer.switch("loading")
            self._progress.request_step()  # before the workers exchange what they have of the step
            global_step = self.current.next()
            agent.step_assigned()
            if global_step is None:
                self._timer.switch("other")
                if not self.end_epoch(left=False):
                    continue
                if self._runtime.ended_within_epoch():
                    raise StopTraining
                return None
            steps.begin(global_step)
            if not global_step.is_at_other_ranks:
                steps.pace.begin(global_step.own)
                self._timer.switch("computing")
                return global_step.batch
            self._timer.switch("waiting")
            steps.end()

    def _pass_if_ended(self, place: Place | None) -> None:
        """Pass this epoch and all later ones if this worker came late, and the others have ended their loops.

        Raises UnevenLoopsError unless the source shows that the loop over the epochs ends without a batch.
        """
        agent, progress = self._trainer.agent, self._progress
        if agent.has_state or not self._is_left_by_others(between=True):
            return
        if not is_repeated_by_range(place):
            ended = {worker: LoopPosition(OVER, progress.epochs, progress.steps) for worker in self._transport.members}
            raise UnevenLoopsError(
                explained(ended | {self._transport.number: LoopPosition(LOOP, progress.epochs + 1, progress.steps)})
            )
        agent.pass_on()
        self._trainer.events.own_notice(
            f"worker {self._transport.number} passes the epochs after {progress.epochs}: the others have ended their "
            "loops"
        )

    def note_counter(self, is_own: bool) -> None:
        """Note whether the script counts the steps of its loop itself, so that a worker that comes late begins at 0."""
        self._counts_itself = is_own

    def _is_left_by_others(self, left: bool = False, between: bool = False) -> bool:
        """Return True if this worker, which came late, ends its loop here, since all others have left theirs.

        If `between` two epochs, the loop is that over the epochs.

        The workers that have counted most steps decide. Once a worker has come late, all ask before each step, and
        where they have `left` the loop: a message more in each step, unless all loops are seen to take all batches.
        Raises UnevenLoopsError if some of those workers leave the loop, or only others.
        """
        agent, transport, progress = self._trainer.agent, self._transport, self._progress
        now = progress.epochs, agent.arrivals
        if not self._counts_itself or not agent.arrivals or (self._whole == now and not between):
            return False
        may_leave = left or between or has_way_out(self._place)
        progress.enter(BETWEEN)
        with self._timer.on("waiting"):
            own = struct.pack("<??qq", left, may_leave, progress.steps, agent.steps_before)
            answers = [struct.unpack("<??qq", reply) for reply in transport.all_gather_bytes(own)]
        progress.enter(CLOSED if between else LOOP)
        if not any(may_leave for _, may_leave, *_ in answers):
            self._whole = now
            return False
        uncounted = min(before for *_, before in answers)
        has_limit = not between or not is_repeated_by_range(self._place)
        if uncounted and has_limit and not self._has_named_late and transport.number == transport.members[0]:
            self._has_named_late = True
            self._trainer.events.own_notice(
                f"no worker is left whose script has counted the first {uncounted:,} steps: a limit of steps that it "
                f"counts itself comes {uncounted:,} steps too late; stretto.steps() counts all"
            )
        if isinstance(self.current, AssignedEpoch) and self.current.is_last():
            return False  # a loop that counts to len(loader) ends here, and one over the loader finds no batch
        have_all_left = all(has_left for has_left, _, _, before in answers if before == uncounted)
        if any(has_left for has_left, *_ in answers) and not have_all_left:
            raise UnevenLoopsError(
                explained(
                    {
                        worker: LoopPosition(CLOSED if has_left else LOOP, progress.epochs, step + (not has_left))
                        for worker, (has_left, _, step, _) in zip(transport.members, answers, strict=False)
                    }
                )
            )
        if have_all_left and not left and not between:
            self._trainer.events.own_notice(
                f"worker {transport.number} ends its loop with the others, in epoch {progress.epochs} at step "
                f"{progress.steps}: its script counts steps itself, and from 0 since the worker came late; "
                "stretto.steps() counts those of before, too (if stretto.steps() + 1 >= max_steps: break)"
            )
        return have_all_left and not left

    def _meet_within_stream(self, has_ended: bool = False) -> None:
        """Meet the other workers for checkpoints within a stream, if they do not wait for each other.

        No service leases a stream's batches, so each worker counts its own up to the next meeting. One that has ended
        its epoch meets the others until all have.
        """
        checkpoints, strategy = self._trainer.agent.checkpoints, self._trainer.strategy
        if not isinstance(self.current, StreamedEpoch) or not strategy.asynchronous or not checkpoints.is_asked:
            return
        self._batches_to_meeting -= 1
        if self._batches_to_meeting >= 0 and not has_ended:
            return
        if not has_ended and (ahead := self._count_to_meeting(has_met=False)):
            self._batches_to_meeting = ahead
            return
        is_proved = not self.source.keep_proofs()
        all_have_ended = False
        while not all_have_ended:
            with self._timer.on("waiting"):
                if self._transport.server is not None:  # others may need more rounds to it than a bound allows
                    self._transport.server.hold_none_back()
                replies = self._transport.all_gather_bytes(struct.pack("??", has_ended, is_proved))
            found = [struct.unpack("??", reply) for reply in replies]
            all_have_ended = all(ended for ended, _ in found)
            if not all_have_ended and all(proved for _, proved in found):
                self.on_snapshot()
            if not has_ended:
                break
        self._batches_to_meeting = self._count_to_meeting(has_met=True)

    def _count_to_meeting(self, has_met: bool) -> int:
        """Return the number of batches up to the next meeting within a stream, which rank 0 of this worker decides."""
        own = self._trainer.agent.checkpoints.batches_to_meeting(self._progress.global_steps, has_met)
        return int(self._trainer.rank_parts.gathered(str(own).encode())[0])

    def note_lost(self, text: str, writes: bool) -> None:
        """Note that batches of a stream were lost in this epoch; one worker `writes`: the exit code is not 0 then.

        All workers that know of a loss keep it for later checkpoints, since the worker that writes may fail.
        """
        epoch = self._trainer.evaluator.epoch + 1
        self.lost.append((epoch, text))
        if writes:
            self._write_lost(epoch, text)
            self._trainer.events.own_notice(f"lost in epoch {epoch}: {text}")

    def restore_lost(self, lost: Sequence[tuple[int, str]]) -> None:
        """Take the losses of a state; write those of before a resume, whose batches this run has not trained either."""
        self.lost = [(epoch, text) for epoch, text in lost]
        if not self._transport.arrives and self._transport.number == min(self._transport.members):
            for epoch, text in self.lost:
                self._write_lost(epoch, text)

    def _write_lost(self, epoch: int, text: str) -> None:
        self._trainer.events.write("batches_lost", epoch=epoch, text=text)
        self._trainer.events.flush()

    def _note_rollback(self) -> None:
        """Write what this worker has trained of a stream and a rollback of the server has undone, if there was one."""
        server = self._transport.server
        if server is None or server.recovery_epoch == self._recovery_epoch:
            return
        self._recovery_epoch = server.recovery_epoch
        undone = self._progress.own_samples - self._samples_at_meeting
        if isinstance(self.current, StreamedEpoch) and undone > 0 and not self.current.is_leased:
            self.note_lost(
                f"a part of the server was lost: at least {undone:,} samples of a stream that worker "
                f"{self._transport.number} had trained since the last snapshot",
                writes=True,
            )

    def _has_pieces(self, stream: EpochBatches, is_left: bool) -> bool:
        """Return True if pieces of a stream are left that workers which do not wait have to lease again.

        All have met, and the server has the work of all. A script that `is_left` early asks for none.
        """
        if not isinstance(stream, StreamedEpoch) or not stream.is_leased:
            return False
        is_stepless = not self._progress.has_stepped_in_epoch and self._progress.unstepped_here > 0
        pieces, is_left, is_rolled_back = stream.left(is_left or is_stepless)
        if pieces and is_left and is_rolled_back:
            self.note_lost(
                f"a part of the server was lost, and with it up to {pieces:,} batches: the loop was left before they "
                "were trained again",
                writes=self._transport.number == min(self._transport.members),
            )
        elif pieces and is_left:
            self._trainer.events.notice(
                f"the loop was left before {pieces:,} batches of the stream, which a failed worker had, were trained"
            )
        return pieces > 0 and not is_left

    def _note_absent(self) -> None:
        """Write the shares of workers that failed or left within a stream, where workers do not wait for each other."""
        if not isinstance(self.current, StreamedEpoch) or not self._progress.has_stepped_in_epoch:
            return
        if self.current.is_leased:
            return
        for worker, batches in self.current.share_of_absent().items():
            self.note_lost(
                f"worker {worker} failed or left within the stream: of its share, {batches:,} batches, no other worker "
                "has trained the rest",
                writes=self._transport.number == min(self._transport.members),
            )

    def _is_limit_reached(self) -> bool:
        """Return True if the run ends before the next global step; all sections count."""
        before, progress = self._trainer.section, self._progress
        global_steps, samples = before.global_steps + progress.global_steps, before.samples + progress.samples
        return self._runtime.ends_before_step(global_steps, samples, before.seconds + self._trainer.events.t())

    def _refuse_if_over(self) -> None:
        """Raise ScriptError if the section has ended: its loader has no batches any more."""
        if self._trainer.is_over:
            raise ScriptError(
                explain(
                    "the run that this loader is of has ended",
                    got="a loop over its batches after stretto.finish(), or after another stretto.distribute",
                    expected="the loader that the last stretto.distribute returned",
                    to_type="loader = stretto.distribute(model, optimizer, loader) before the loop",
                )
            )

    # --- epochs without a step ----------------------------------------------------------------------------------

    def is_peek(self) -> bool:
        """Return True if this epoch has given one batch, or none, and the optimizer made no step."""
        return self.current is not None and self._trainer.global_steps.may_be_peek() and self._progress.is_peek()

    def end_peek(self) -> bool:
        """Undo an epoch that the script has only peeked at, where all workers do the same. Return True if it was one.

        Workers that do not wait for each other agree on it when they end the epoch.
        """
        trainer = self._trainer
        if trainer.strategy.asynchronous or not self.is_peek():
            return False
        trainer.global_steps.abandon()
        trainer.global_steps.forget_epoch()
        self._progress.end_peek()
        trainer.agent.undo_epoch()
        self.current = None
        trainer.schedules.take(self._schedules_before)
        return True

    def _uncount_stepless(self) -> None:
        """Remove the samples of an epoch without any optimizer step from the counts."""
        if self.current is not None and self._progress.is_stepless():
            self._trainer.global_steps.forget_epoch()
            self._progress.uncount_stepless(only_own=self._trainer.strategy.asynchronous)
            self.current.uncount()

    def _notice_unstepped(self) -> None:
        """Write a notice about samples of the ending epoch that do not count, if there are any."""
        trainer = self._trainer
        if samples := self._progress.take_unstepped():
            alone = trainer.strategy.asynchronous
            notice = trainer.events.own_notice if alone else trainer.events.notice
            whose = f"worker {self._transport.worker} in epoch" if alone else "epoch"
            notice(
                f"{whose} {trainer.evaluator.epoch + 1} made no optimizer step: its {samples} samples are not counted "
                "as trained; evaluate, and call update_bn for an averaged model, with another loader: this one gives "
                "each worker a part of the data"
            )

    # --- end ----------------------------------------------------------------------------------------------------

    def end_loops(self) -> None:
        """End the epoch under way; where workers do not wait, take part in later epochs while other loops ask for any.

        A loop that counts over several epochs may end in an earlier one than the loops of slower workers. This worker
        leaves each later epoch before its first batch, so that the others train on all of it.
        """
        self.end_peek() or self.end_epoch()
        if not self._trainer.strategy.asynchronous and not self._trainer.agent.has_state:
            self._is_left_by_others(left=True, between=True)
        while self._trainer.strategy.asynchronous and self._is_asked_for(by_this=False):
            if self._progress.begin_iteration(asynchronous=True):
                self._enter_epoch()
                self.end_epoch()

    def end_epoch(self, left: bool = True, is_known: bool = False) -> bool:
        """End the epoch: average the model, compare the replicas, evaluate, and share the workers' counts.

        Returns False if the epoch continues, since a worker failed with work that was not exchanged; never if the
        script has `left` the epoch. `is_known` is True if the workers have asked each other whether they leave it.
        """
        if self.current is None:
            return True
        trainer, progress = self._trainer, self._progress
        strategy, agent, steps = trainer.strategy, trainer.agent, trainer.global_steps
        trainer.rank_parts.take_part()
        steps.end(left=True)
        if left and not is_known:
            self._is_left_by_others(left=True)
        self._has_left, self._has_peeked = left and not self.is_stopped, left and self.is_peek()
        strategy.lay_back()
        self.push_all()
        if left and isinstance(self.current, LeasedEpoch):
            self.current.leave()
        self._meet_within_stream(has_ended=True)
        progress.enter(CLOSED)
        status.note(progress.place())
        is_early = left and isinstance(self.current, AssignedEpoch) and not self.current.is_last()
        trainer.rank_parts.end_epoch(is_early, progress.epochs)
        check_rates(trainer.rank_parts.gathered(trainer.schedules.rates().packed()), "process of a worker")
        if is_early:
            # a worker that has not left waits in an all-gather: gloo fails on a different operation
            self._transport.broadcast_bytes(b"left")
        if progress.unstepped and not strategy.asynchronous:
            strategy.average_buffers(progress.unstepped_here)
        strategy.sync_for_evaluation()
        if agent.reopens(self.current, left) or self._has_pieces(self.current, left):
            progress.enter(LOOP)
            strategy.resume()
            return False
        if left and isinstance(self.current, StreamedEpoch) and (untrained := self.current.untrained_batches()):
            trainer.events.notice(
                f"the loop was left before {untrained:,} batches of the stream, which a failed worker had, were trained"
                " again" + (": the next epoch trains them" if self.source.is_iterator else "")
            )
        if strategy.asynchronous and self._end_asynchronous(self.current):
            return True
        if not strategy.asynchronous:
            self._note_absent()
        if isinstance(self.current, LeasedEpoch):
            progress.count_global_batch(self.source.length())
        agent.keep_uncommitted(self.current)
        if strategy.is_carried or not isinstance(self.current, StreamedEpoch):
            steps.settle_leases()
        steps.drop_unstepped()
        if progress.unstepped:
            trainer.schedules.take(self._schedules_before)
        self._notice_unstepped()
        if not left:
            steps.notice_unstepped()
        trainer.schedules.end_epoch()
        steps.check("at the end of an epoch")
        trainer.last_model.keep(trainer.evaluator.epoch + 1)
        self.closing, self.current = self.current, None
        trainer.evaluator.close_epoch(self.closing)
        if isinstance(self.closing, LeasedEpoch) and self._all_left:
            self._note_left(self.closing)
        if agent.checkpoints.is_save_requested():
            agent.checkpoints.save()
        self.closing = None
        if strategy.exchanges_gradients:
            strategy.note_shown()  # a layer that a worker draws again before the next epoch is found when that begins
        return True

    def _note_left(self, epoch_batches: LeasedEpoch) -> None:
        """Write how much of an epoch is trained by no worker, since each loop ends by its own count."""
        trainer = self._trainer
        if self._transport.number != min(self._transport.members):
            return
        counted = epoch_batches.audited()[0]
        samples, bounds = int((counted == 0).sum()), epoch_batches.order.bounds
        if not samples:
            return
        batches, epoch = sum(not counted[start] for start in bounds[:-1]), trainer.evaluator.epoch
        trainer.events.write("samples_left", epoch=epoch, samples=samples, batches=batches)
        if not self._has_named_left:
            self._has_named_left = True
            how_many = f"{batches:,} batch{'es' * (batches != 1)} of {samples:,} sample{'s' * (samples != 1)}"
            trainer.events.own_notice(
                f"no loop has asked for {how_many} of epoch {epoch}: each worker's loop ends by its own count; the "
                "record lists them by epoch (samples_left), and a loop over the loader asks for all"
            )

    def _end_asynchronous(self, epoch_batches: EpochBatches) -> bool:
        """Agree on the samples of workers that do not wait for each other. Return True if all have only peeked."""
        self._note_rollback()
        self._note_absent()
        self._count_all_samples()
        if self._all_peeked:
            self._progress.note_peek()
            self._progress.take_unstepped()
            self._progress.count_global_batch(0)
            self.current = None
            self._trainer.schedules.take(self._schedules_before)
        return self._all_peeked

    def push_stepped(self) -> None:
        """Push the remaining update, unless gradients are accumulated: a lease settles with its step."""
        if self._trainer.global_steps.stepped_last:
            self.push_all()

    def run_synced(self, then: Callable[[], None], called: bool = False) -> None:
        """Replace the model by the server's, with all workers at a barrier, call `then`, and continue."""
        self._timer.switch("other")
        if self._trainer.strategy.asynchronous:
            self._trainer.strategy.sync_for_evaluation(called)
        self._count_all_samples()
        self._note_rollback()  # a checkpoint keeps the losses of before
        self._samples_at_meeting = self._progress.own_samples
        then()
        self._trainer.strategy.resume()
        self._trainer.rank_parts.settle()

    def _count_all_samples(self) -> None:
        """Set the sample count to the largest of all workers', which the worker with the last lease knows."""
        is_counted = self.source.is_counted
        own = self._progress.samples if is_counted else self._progress.own_samples
        stream = self.source.streamed if self.source.streamed is not None and self.source.streamed.is_counted else None
        counts = [
            struct.unpack("<q??", count)
            for count in self._transport.all_gather_bytes(struct.pack("<q??", own, self._has_peeked, self._has_left))
        ]
        samples = [count for count, *_ in counts]
        if stream is None:
            self._progress.count_all(max(samples) if is_counted else self._progress.samples_resumed + sum(samples))
        elif self.current is not None:
            trained = stream.samples_resumed + sum(stream.trained().values())
            self._progress.count_all(self._progress.samples_before + trained)
        self._all_peeked = all(peeked for _, peeked, _ in counts)
        self._all_left = all(left for *_, left in counts)
