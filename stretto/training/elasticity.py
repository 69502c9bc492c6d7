"""One worker in a changing membership: rest points, state transfer, joining and leaving.

Between two global steps, when no optimizer step waits to be exchanged, a worker is *at rest*. Then other workers may
join, this one may leave, and a checkpoint holds the whole state of the run.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from typing import Any

from msgspec.structs import replace

from stretto.checkpoint import state_transfer
from stretto.checkpoint.storage import State
from stretto.checkpoint.whole_state import without_exchanges
from stretto.data.assignment import BatchAssignment
from stretto.data.shares import Limits, stricter
from stretto.errors import LoaderError, ScriptError, explain
from stretto.loader.epoch_batches import AssignedEpoch, EpochBatches, UncommittedWork
from stretto.loader.epoch_order import EpochOrder, pack, unpack
from stretto.loader.stream_reader import STREAM_PLACE, StreamPlace, Work
from stretto.loader.streamed_epoch import StreamedEpoch
from stretto.membership.epoch_numbers import epoch_of
from stretto.membership.loop_positions import LoopPosition
from stretto.membership.worker_status import status
from stretto.runtime.event_writer import boot_id
from stretto.strategies.model_sync import draw_from
from stretto.training.checkpoint_manager import CheckpointManager
from stretto.training.checkpointed import script_state
from stretto.training.residual_handover import ResidualHandover
from stretto.training.trainer_view import TrainerView
from stretto.training.worker_context import WorkerContext
from stretto.transport.interface import Change, JoinPosition


class ElasticAgent:
    """Membership changes as one worker follows them."""

    def __init__(self, trainer: TrainerView, context: WorkerContext) -> None:
        self._trainer, self._context = trainer, context
        self._taken: State | None = None
        """State to continue from, until its epoch has begun."""
        self._late: tuple[Change, tuple[int, ...], Limits] | None = None
        """Membership change, and members and limits before it, in an epoch that this worker has not begun."""
        self._epochs_over, self._asked = 0, False
        self.left = False
        """True if this worker has left the run gracefully."""
        self.arrivals = int(trainer.transport.arrives and trainer.transport.repeats_attempts)
        """Number of arrivals of workers in this section that this one has seen, its own included; 0 over a server."""
        self.steps_before = 0
        """Number of steps that were made before this worker's script began to count any."""
        self.checkpoints = CheckpointManager(trainer, context)
        self._residuals = ResidualHandover(trainer, context.files)
        self._members, self._share_limits = trainer.transport.members, trainer.transport.share_limits
        self._uncommitted: list[UncommittedWork] = []
        """Work of past epochs that no exchange has carried."""
        self._streamed: list[dict[int, list[Work]]] = []
        """The same of past epochs over streams, by worker."""
        self._last_streamed: EpochBatches | None = None
        """The last epoch whose work is in `_streamed`."""
        self._earlier: list[Work] = []
        """Such work of failed workers, which the next epoch trains."""
        self._earlier_here: list[Work] = []
        """Such work that this epoch trains."""
        self._lost_at_end = Counter[int]()
        """Samples by worker that were lost after the end of an epoch, until an epoch subtracts them."""
        self._is_agreeing = False
        """True while the workers agree on whether the epoch continues."""
        self._lost: list[list[Any]] = []
        """Batches of failed workers, to be assigned again."""
        self._counted = 0
        """Number of samples in `_lost` that still count as trained, until they are assigned again."""
        self._reassigned: tuple[list[list[Any]], int] = [], 0
        """Batches lost in earlier epochs and assigned again in this one, and their samples that were counted."""
        self._script = script_state()
        trainer.transport.attach(self)
        if context.barrier is not None:
            context.barrier.begin(self.operations_begun)

    # --- joining ----------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Load the state of the running workers, or of a checkpoint, if there is one."""
        transport, state = self._trainer.transport, self._trainer.section.take_state()
        if state is not None:
            self._take(state)
        if self._taken is None and not transport.arrives:
            self._trainer.strategy.note_shown()
        if transport.arrives:
            if transport.join_position is not None:
                self._join(transport.join_position)
            draw_from(f"{self._context.seed}:{self._context.worker}:{self._context.incarnation}".encode())
        self._script.is_passing = self._taken is not None or transport.join_position is not None
        self._notify_passed()

    def _notify_passed(self) -> None:
        """Write a notice about the epochs that the script passes, if there are any."""
        trainer = self._trainer
        last = next(number - 1 for number in itertools.count(1) if not self.is_over(number))
        if not last:
            return
        epochs = f"epochs 1 to {last} were" if last > 1 else "epoch 1 was"
        text = (
            f"{epochs} trained before: a loop over such an epoch has no batches, and the code between epochs runs "
            "again, where stretto.save, log, print and evaluate= do nothing until training continues; keep best "
            "values and counters in stretto.checkpointed(...), and write other files there under "
            "`if not stretto.is_resuming():`"
        )
        if trainer.transport.arrives:
            trainer.events.own_notice(f"worker {trainer.transport.number} has joined: {text}")
        else:
            trainer.events.notice(text)

    def _join(self, position: JoinPosition) -> None:
        """Join a run over a server at its current position; the parameters have been read."""
        order = unpack(position.order)
        self._epochs_over, peeks = epoch_of(position.epoch_number) - 1, order.earlier.peeks
        length = self._trainer.batch_source.length() if self._trainer.batch_source.is_counted else 0
        self._trainer.progress.joined(peeks, (self._epochs_over - len(peeks)) * length, order.earlier.samples)
        self._trainer.evaluator.restore([self._epochs_over - len(peeks), None])
        self._trainer.events.join(position.clock_zeros)

    def _take(self, state: State) -> None:
        if not state.facts:
            return
        trainer = self._trainer
        if not trainer.rank_parts.keeps_exchanges and not trainer.transport.arrives:
            state, left_out = without_exchanges(state)
            if left_out:
                trainer.events.notice(
                    f"the checkpoint's {', '.join(left_out)} belong to whole models, and begin again: the processes of "
                    "a worker hold parts of the model"
                )
        self._taken = state = trainer.rank_parts.part_of(state)
        facts = state.facts
        place = self.place_in_stream()
        is_resumed = self._context.resume_stream is None and not trainer.transport.arrives
        if place is not None and place.is_own and not place.is_over and is_resumed:
            _refuse_other_number(place.workers, trainer.transport.workers)
        own = self._load_trained(state)
        trainer.progress.restore(facts)
        self.steps_before = trainer.progress.steps
        if facts.get("returned") is not None:
            lost, self._counted = facts["returned"]
            order = unpack(lost)
            self._lost = order.among(tuple(itertools.pairwise(order.bounds)))
        first_workers = facts.get("first_workers", trainer.batch_source.first_workers)
        earlier_limits: Limits = dict(facts.get("earlier_limits", []))
        if not trainer.transport.arrives:  # those of a running run come with each generation, and end with it
            earlier_limits = stricter(earlier_limits, dict(facts.get("share_limits", [])))
        trainer.batch_source.resume(first_workers, earlier_limits)
        trainer.shares.resume(facts.get("shares", {"paces": facts.get("paces", [])}))
        trainer.evaluator.restore(facts["evaluator"])
        trainer.epochs.restore_lost(facts.get("lost", []))
        self.checkpoints.restore(facts["saved"])
        trainer.events.start_at(facts["t"], facts["zero"] if trainer.transport.arrives else None, facts["boot"])
        if trainer.strategy.state.load(facts["strategy"], state.tensors, own, self._orphans(state)):
            others = trainer.transport.has_others
            trainer.events.notice(
                "the residuals of the checkpoint, which its codec had kept back for later messages, are left out: "
                + ("this run exchanges in another way" if others else "one worker exchanges nothing")
            )

    def _own_of(self, state: State) -> state_transfer.Own | None:
        """Return this worker's own state; None among other members."""
        return state.own.get(self._trainer.transport.number) if self._has_same_members(state) else None

    def _load_trained(self, state: State) -> state_transfer.Own | None:
        """Load model and optimizers, this worker's own if it had some. Return this worker's own state, or None.

        Among other members all have the mean of the models: each may hold work that no other one has.
        """
        own, trainer = self._own_of(state), self._trainer
        own_model = own[1] if own is not None else state_transfer.mean_model(state.own)
        state_transfer.load_model(trainer.model, state.tensors | own_model)
        each_its_own = state.facts["own_optimizer"] and trainer.strategy.keeps_own_optimizer
        state_transfer.load_optimizers(trainer.optimizers, own[1] if own and each_its_own else state.tensors)
        return own

    def _has_same_members(self, state: State) -> bool:
        return sorted(state.own) == sorted(self._trainer.transport.members)

    def _orphans(self, state: State) -> list[state_transfer.Own]:
        """Return the own states of former members: worker 0 adds their residuals to its own."""
        if self._has_same_members(state) or self._trainer.transport.worker:
            return []
        return list(state.own.values())

    # --- epochs -------------------------------------------------------------------------------------------------

    def is_over(self, number: int) -> bool:
        """Return True if an epoch was over before this worker joined."""
        if number <= self._epochs_over:
            return True
        if self._taken is None:
            return False
        epoch = self._taken.facts["epochs"]
        return bool(number < epoch or (number == epoch and not self._is_within_epoch()))

    @property
    def has_state(self) -> bool:
        """True while a state to continue from waits for the end of the epochs that this worker passes."""
        return self._taken is not None

    def pass_on(self) -> None:
        """Pass all epochs that follow, since the others have ended their loops: code between them changes nothing."""
        self._taken = state_transfer.unpack(self.checkpoints.state_for_others(False))
        self._script.take(self._script.saved())
        self._epochs_over, self._script.is_passing = sys.maxsize, True

    def _is_within_epoch(self) -> bool:
        """Return True if the state to continue from was saved before the end of its epoch."""
        place = self.place_in_stream()
        has_order = self._taken is not None and self._taken.facts["order"] is not None
        return has_order or (place is not None and not place.is_over)

    def begun_epoch(self, number: int) -> tuple[EpochOrder, BatchAssignment] | None:
        """Return the order and the batch assignment of an epoch that others have begun; None for another epoch."""
        if self._taken is None or number != self._taken.facts["epochs"] or self._taken.facts["order"] is None:
            return None
        facts, transport = self._taken.facts, self._trainer.transport
        source = self._trainer.batch_source  # a resumed run has the shares of its own options
        limits = source.limits
        if transport.arrives:  # a limit holds until the epoch ends, though its worker has left
            limits = stricter(limits, dict(facts["assignment"].get("limits", [])))
        assignment = BatchAssignment.restored(facts["assignment"], transport.members, source.largest_share, limits)
        if source.shares.is_fixed:
            assignment.move(source.paces, assignment.global_step)
        return unpack(facts["order"]), assignment

    def place_in_stream(self) -> StreamPlace | None:
        """Return the place in a stream at which the state to continue from was saved, that of its own shard or of all.

        None if it was saved elsewhere, or if another epoch has begun since.
        """
        text = self._taken.facts.get("stream") if self._taken is not None else None
        if self._taken is None or text is None:
            return None
        own, _ = self._taken.own.get(self._trainer.transport.number, ({}, {}))
        place = STREAM_PLACE.decode(text)
        if not place.is_own:
            return place
        if "stream" in own:
            return replace(STREAM_PLACE.decode(own["stream"]), is_over=place.is_over)
        count = place.counts.get(self._trainer.transport.number, 0)  # this worker had failed
        return replace(place, trained=[(0, count)] if count else [], proofs=[], start=b"", before_last=b"")

    def members(self) -> tuple[int, ...]:
        """Return the members that a new epoch is assigned to: as those workers did that have begun it already."""
        if self._late is not None and self._late[0].global_step > self._trainer.progress.step_requests:
            return self._late[1]
        return self._trainer.transport.members

    def share_limits(self) -> Limits:
        """Return the limits of the members of a new epoch that have run out of memory."""
        if self._late is not None and self._late[0].global_step > self._trainer.progress.step_requests:
            return self._late[2]
        return self._trainer.transport.share_limits

    def epoch_begun(self) -> None:
        """Apply membership changes from before this epoch's beginning, and a loaded state."""
        self.checkpoints.begin()
        late, self._late = self._late[0] if self._late is not None else None, None
        epoch_batches, progress = self._trainer.epochs.current, self._trainer.progress
        if late is not None and isinstance(epoch_batches, AssignedEpoch):
            ahead = late.global_step - progress.step_requests_before
            if ahead > 0:
                epoch_batches.change_members(late, ahead, 0)
        self._reassign_lost(())
        if isinstance(epoch_batches, StreamedEpoch) and (earlier := self._take_earlier()):
            epoch_batches.deal_earlier(earlier)
        self._uncount_lost(epoch_batches)
        if self._taken is not None and progress.epochs >= self._taken.facts["epochs"]:
            self._continue_from(self._taken)
        self._script.end_passing()

    def returned(self) -> tuple[bytes, int] | None:
        """Return the samples that the next epoch trains for an earlier one, serialised, and how many of them count."""
        return (pack(EpochOrder.of(self._lost)), self._counted) if self._lost else None

    def undo_epoch(self) -> None:
        """Undo the begin of a peeked epoch: batches lost before it are assigned again in the next."""
        (lost, counted), self._reassigned = self._reassigned, ([], 0)
        self._lost, self._counted = lost + self._lost, counted + self._counted
        self._trainer.progress.uncount_lost(-counted)
        self._earlier, self._earlier_here = self._earlier_here + self._earlier, []
        self._trainer.progress.uncount_lost(-sum(samples for *_, samples in self._earlier))
        if isinstance(current := self._trainer.epochs.current, AssignedEpoch | StreamedEpoch):
            self._lost_at_end.subtract(current.departed)

    def epoch_skipped(self) -> None:
        """Continue from a state that was saved at the very end of the skipped epoch, if there is one."""
        taken, epochs = self._taken, self._trainer.progress.epochs
        self._script.give_back()
        if taken is not None and taken.facts["closing_epoch"] and epochs == taken.facts["epochs"]:
            self._continue_from(taken)
            self._script.end_passing()

    def epoch_begins(self) -> None:
        """Continue from a state that was saved after the last epoch: the next order is drawn from its random states."""
        self._reassigned, self._earlier_here = ([], 0), []
        if self._taken is not None and self._trainer.progress.epochs > self._taken.facts["epochs"]:
            self._continue_from(self._taken)

    def section_ends(self) -> None:
        """Restore the state that was saved at the end of this section, if no epoch began since."""
        if self._taken is not None:
            self._continue_from(self._taken)
        self._script.end_passing()
        samples = sum(map(len, self._lost)) - self._counted  # the model of the last epoch's end has the others
        if samples and self._trainer.transport.number == min(self._trainer.transport.members):
            epoch = self._trainer.evaluator.epoch
            self._trainer.events.write("samples_left", epoch=epoch, samples=samples)
            self._trainer.events.own_notice(
                f"{samples:,} samples that a failed worker had were not trained again: the loop ends by its own count, "
                "and no epoch follows that would have them"
            )

    def refuse_to_end_before_state(self) -> None:
        """Raise ScriptError if the script has looped, and never reached the epoch in which the state was saved."""
        if self._taken is None:
            return
        begun, epoch = self._trainer.progress.epochs, self._taken.facts["epochs"]
        if 0 < begun < epoch and self._is_within_epoch():
            raise ScriptError(
                explain(
                    f"the run continues in epoch {epoch}, and the script ended after {begun} loops over the loader",
                    got="a loop that leaves out epochs, such as range(kept.epoch, epochs)",
                    expected="a loop from the first epoch on: the loader gives no batches of epochs that are over",
                    to_type="for epoch in range(epochs):",
                )
            )

    def _continue_from(self, state: State) -> None:
        """Restore model, optimizers, settings and random states as saved, whatever the script did since it started."""
        self._taken = None
        own = self._load_trained(state)
        if own is not None:
            self._trainer.strategy.load_own_parameters(own[1])
        self._trainer.settings.take(state.facts["settings"])
        self._restore_random_states(own)

    def _restore_random_states(self, own: state_transfer.Own | None) -> None:
        if own is not None:
            is_read = isinstance(self._trainer.epochs.current, StreamedEpoch)  # its generators are at its place
            state_transfer.restore_random_states(own, None if is_read else self._trainer.loader)

    # --- leaving ------------------------------------------------------------------------------------------------

    @property
    def can_leave(self) -> bool:
        """True if the others can continue without this worker."""
        return self._trainer.transport.can_leave

    def ask_to_leave(self) -> None:
        """Leave gracefully as soon as possible; a signal handler may call this."""
        self._asked = True
        self._trainer.transport.request_leave()

    def step_assigned(self) -> None:
        """Note that a global step was assigned: the others wait for this worker until the step ends."""
        self.checkpoints.pass_on()
        self.doing("computing")

    def doing(self, text: str) -> None:
        """Publish what this worker does."""
        self._trainer.transport.doing(text, self._trainer.progress.step_requests)

    # --- the loop, as the transport sees it ---------------------------------------------------------------------

    def place(self) -> LoopPosition:
        """Return where the script is in its loop; before a loop, once the section has ended."""
        return self._trainer.progress.place() if not self._trainer.is_over else LoopPosition()

    def counts(self) -> tuple[int, int]:
        """Return the number of assigned global steps, and of committed rounds."""
        progress = self._trainer.progress
        return progress.step_requests, self._trainer.section.rounds + progress.rounds

    def operations_begun(self) -> int:
        """Return a number that grows with each collective operation, or batch, that this worker begins."""
        trainer, progress, begun = self._trainer, self._trainer.progress, self._trainer.transport.begun
        begun = begun if begun is not None else progress.step_requests
        return begun + trainer.section.epochs + progress.epochs if trainer.strategy.asynchronous else begun

    def clock_zero(self) -> tuple[bytes, float]:
        """Return the id of this boot and the zero of the run's clock on it."""
        return boot_id(), self._trainer.events.zero

    # --- barriers of the script ---------------------------------------------------------------------------------

    def mend(self) -> None:
        """Take part in forming the next generation while the script waits outside an exchange."""
        self._trainer.transport.mend()

    def is_catching_up(self) -> bool:
        """True for a worker that came late, until it takes part in an epoch: the others are past its barriers."""
        trainer = self._trainer
        return trainer.transport.arrives and trainer.epochs.current is None and self.is_over(trainer.progress.epochs)

    # --- at rest ------------------------------------------------------------------------------------------------

    def rest(self) -> None:
        """Write a checkpoint if one is due; pause between two global steps if requested, and admit joining workers.

        A worker that pauses here waits for no other one before the next global step, whose number the coordinator
        compares: exchanges of this place come before the pause.
        """
        transport = self._trainer.transport
        if transport.server is not None and transport.server.agreed(self._asked):
            self._trainer.epochs.push_all()
            transport.server.leave(is_asked=True)
            status.leave()
            self.left = True
            raise SystemExit(0)
        if self.checkpoints.is_due():
            self.checkpoints.save()
        while transport.is_to_rest() and self._trainer.global_steps.is_at_rest():
            change = transport.rest(
                lambda: state_transfer.checksum(state_transfer.frozen_tensors(self._trainer.model)),
                self.checkpoints.state_for_others,
            )
            if change is None:
                return
            self._rested(change)
        if self._trainer.global_steps.is_at_rest():
            self._residuals.take()

    def _rested(self, change: Change) -> None:
        number = self._trainer.transport.number
        if number in change.gone and number not in change.members:
            self._leave()
        if _first(change) == number:
            self._residuals.expect(change.gone)
        if change.save:
            self.checkpoints.save()
        if change.came:
            self.arrivals += 1
            with self._trainer.timer.on("waiting"):
                self._trainer.batch_source.admit(self._trainer.epochs.current)

    def _leave(self) -> None:
        """Leave gracefully."""
        self.left = True
        self._residuals.give(self._context.worker)
        raise SystemExit(0)

    # --- membership changes ------------------------------------------------------------------------------------

    def on_generation(self, change: Change) -> None:
        """Apply a membership change. A worker that is a round behind first does that round with the former members."""
        trainer, progress = self._trainer, self._trainer.progress
        if trainer.is_over:
            return
        current, closing = trainer.epochs.current, trainer.epochs.closing
        if current is not None and current is self._last_streamed:
            current, closing = None, current  # its uncommitted work is for the next epoch, and not dealt here
        behind = trainer.section.rounds + progress.rounds < change.rounds
        before, self._members = self._members, change.members
        limits, self._share_limits = self._share_limits, change.share_limits
        back: dict[int, int] = {}
        lost_shards: dict[int, int] = {}
        ahead = change.global_step - progress.step_requests_before
        if isinstance(current, AssignedEpoch) and current.is_over:
            if (
                self._is_agreeing and change.behind
            ):  # the others have closed the epoch with the model that is averaged now
                left = current.uncommitted()
                back = {worker: self._mark_lost(worker, left.take(worker)) for worker in change.gone}
                current.batch_assignment.commit()
            back |= current.change_members_at_end(change)
        elif isinstance(current, AssignedEpoch):
            assignment = current.batch_assignment
            back = current.change_members(
                change, max(ahead, assignment.global_step), assignment.global_step if behind else assignment.committed
            )
        lost = self._lost_of_streams(change.gone, back) if not behind else {}
        if (stream := trainer.batch_source.stream_of(current)) is not None:
            earlier = self._take_earlier() if current is not None else ()
            for worker, samples in stream.change_members(change, behind, earlier).items():
                back[worker] = back.get(worker, 0) + samples
            lost_shards = stream.take_lost_shards()
        if isinstance(closing, AssignedEpoch):
            closing.change_members_at_end(change)
        if current is None and change.global_step > progress.step_requests:
            self._late = (change, before, limits)
        if isinstance(closing, StreamedEpoch):
            closing.depart(change.gone)
        trainer.strategy.on_generation(change, behind)
        progress.uncount_lost(sum(lost.values()))
        self._lost_at_end.update(lost)
        if lost or isinstance(current, StreamedEpoch):
            self._uncount_lost(closing or current)
        if not behind:
            for worker, samples in self._reassign_lost(change.gone).items():
                back[worker] = back.get(worker, 0) + samples
        if isinstance(current, AssignedEpoch | StreamedEpoch):
            progress.follow_assignment(current.assigned_samples)
        is_first = _first(change) == trainer.transport.number
        if is_first:
            self._write_change(change, back)
        for worker, samples in lost.items():
            trainer.epochs.note_lost(
                f"worker {worker} failed before the first exchange after the end of an epoch: {samples:,} samples "
                "that it had trained at the end of the stream",
                writes=is_first,
            )
        for worker, samples in lost_shards.items():
            trainer.epochs.note_lost(
                f"the shard of worker {worker} was lost with it: {samples:,} samples that it had trained since the "
                'last exchange, and the rest of the shard, which no other worker reads (deal="own")',
                writes=is_first,
            )

    def _write_change(self, change: Change, back: dict[int, int]) -> None:
        """Write the new membership, and the reassigned samples, into the event log."""
        events = self._trainer.events
        facts = {"generation": change.generation, "departed": list(change.gone), "joined": list(change.came)}
        if self._trainer.batch_source.assignment == "contiguous" and self._trainer.epochs.current is not None:
            events.notice(
                "the workers have changed: the rest of the epoch is assigned again, and state carried from batch to "
                "batch does not fit its stretches until the next epoch"
            )
        current = self._trainer.epochs.current
        if isinstance(current, AssignedEpoch) and self._context.rule == "global-batch":
            if not current.has_shares:
                events.notice(
                    "the workers have changed, and whole batches are dealt: each worker has one in a step, so the "
                    "steps of this epoch are other ones than len(loader) says"
                )
            elif not current.has_room:
                events.notice(
                    "the workers have changed, and their memory leaves no room for a whole global step: this epoch has "
                    "more steps than len(loader) says"
                )
        events.write("generation_changed", **facts, members=list(change.members))
        for worker, incarnation in zip(change.gone, change.incarnations, strict=True):
            events.write(
                "samples_reassigned", failed_worker=worker, incarnation=incarnation, samples=back.get(worker, 0)
            )
        events.flush()

    # --- uncommitted work of an epoch --------------------------------------------------------------------------

    def keep_uncommitted(self, epoch_batches: EpochBatches | None) -> None:
        """Keep what failed workers had of an ending epoch, for the next, and its work that no exchange has carried.

        The latter is lost if its worker fails before the next exchange.
        """
        if not self._trainer.transport.repeats_attempts:
            return
        if isinstance(epoch_batches, AssignedEpoch):
            self._lost += epoch_batches.leave()
        if self._trainer.strategy.is_carried:
            return
        if isinstance(epoch_batches, StreamedEpoch) and not self._trainer.batch_source.is_iterator:
            self._streamed.append(epoch_batches.uncommitted_work())
            self._last_streamed = epoch_batches
        if isinstance(epoch_batches, AssignedEpoch):
            self._uncommitted.append(epoch_batches.uncommitted())

    def reopens(self, epoch_batches: EpochBatches, left: bool) -> bool:
        """Return True, at all workers alike, if samples are left that failed workers had, and all loops ask for them.

        `left` is True at a worker whose loop has ended by its own count.
        """
        transport, strategy = self._trainer.transport, self._trainer.strategy
        if not isinstance(epoch_batches, AssignedEpoch | StreamedEpoch) or not transport.repeats_attempts:
            return False
        if not strategy.in_rounds and strategy.is_carried and not epoch_batches.is_unfinished():
            return False
        self._is_agreeing = True
        replies = transport.all_gather_bytes(
            lambda: b"left" if left else b"more" if epoch_batches.is_unfinished() else b""
        )
        self._is_agreeing = False
        if b"more" not in replies or b"left" in replies:
            return False
        epoch_batches.reopen()
        self._trainer.progress.reopen()
        return True

    def carried(self) -> None:
        """Note that an exchange has carried all work."""
        self._uncommitted.clear()
        self._streamed.clear()

    def _lost_of_streams(self, gone: tuple[int, ...], back: dict[int, int]) -> dict[int, int]:
        """Keep the failed workers' uncommitted work of past epochs over streams, and add its samples to `back`.

        Returns the samples by worker of what no other worker can read.
        """
        lost = Counter[int]()
        taken = [(worker, epoch.pop(worker, [])) for epoch in self._streamed for worker in gone]
        for worker, (batch, parts, samples) in ((worker, work) for worker, several in taken for work in several):
            if batch is None:
                lost[worker] += samples
            else:
                self._earlier.append((batch, parts, samples))
                self._lost_at_end[worker] += samples
                back[worker] = back.get(worker, 0) + samples
        return dict(+lost)

    def _take_earlier(self) -> list[Work]:
        """Take the work of earlier epochs that the epoch under way trains: it counts there."""
        earlier, self._earlier = self._earlier, []
        self._earlier_here += earlier
        self._trainer.progress.uncount_lost(sum(samples for *_, samples in earlier))
        return earlier

    def unsaved(self) -> list[tuple[int, str]]:
        """Return the losses of a run that is resumed from now: work of an earlier epoch, which no checkpoint has."""
        stream = self._trainer.batch_source.stream_of(self._trainer.epochs.current)
        batches = len(self._earlier) + (stream.earlier_batches() if stream is not None else 0)
        text = f"{batches:,} batches of the end of the epoch before, which a failed worker had"
        return [(self._trainer.evaluator.epoch + 1, text)] if batches else []

    def _uncount_lost(self, epoch_batches: EpochBatches | None) -> None:
        """Subtract samples that were lost after the end of an epoch from the counts of this epoch."""
        if isinstance(epoch_batches, AssignedEpoch | StreamedEpoch):
            epoch_batches.departed.subtract(self._lost_at_end)
            self._lost_at_end.clear()

    def _mark_lost(self, worker: int, pieces: list[list[Any]]) -> int:
        """Mark counted work of a failed worker to be done again; return its samples."""
        samples = sum(map(len, pieces))
        self._lost += pieces
        self._counted += samples
        self._lost_at_end[worker] += samples
        return samples

    def _reassign_lost(self, gone: tuple[int, ...]) -> dict[int, int]:
        """Assign the failed workers' uncommitted work of earlier epochs again, in this epoch or the next.

        Returns the number of samples by worker.
        """
        lost = {
            worker: sum(self._mark_lost(worker, work.take(worker)) for work in self._uncommitted) for worker in gone
        }
        epoch_batches = self._trainer.epochs.current
        if self._lost and isinstance(epoch_batches, AssignedEpoch) and not epoch_batches.is_over:
            epoch_batches.append(self._lost)
            self._reassigned = self._reassigned[0] + self._lost, self._reassigned[1] + self._counted
            self._trainer.progress.uncount_lost(self._counted)
            self._lost, self._counted = [], 0
            self._uncount_lost(epoch_batches)
        return lost


def _refuse_other_number(before: int, now: int) -> None:
    if before != now:
        raise LoaderError(
            explain(
                "each worker of the resumed run was in the middle of a shard of its own",
                got=f"{now} workers",
                expected=f"{before}, each of which continues with its shard",
                to_type=f"-n {before}; or --resume-stream skip, to train what the shards give now as the rest of the "
                "epoch; or --resume-stream restart, to begin the epoch again",
            )
        )


def _first(change: Change) -> int:
    """Return the first member that was one before; joining workers receive no change."""
    return next(worker for worker in change.members if worker not in change.came)
