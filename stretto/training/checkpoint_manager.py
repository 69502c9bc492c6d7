"""Captures the state of a run, for checkpoints and for workers that join.

Workers that wait for each other save at rest, between two global steps. Workers that do not wait save at a barrier for
a snapshot or an evaluation, and at the end of an epoch; then all of them hold the server's parameters.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any

from stretto.checkpoint import state_transfer
from stretto.checkpoint.background_writer import BackgroundWriter, Snapshots
from stretto.checkpoint.storage import State
from stretto.checkpoint.whole_state import in_words
from stretto.loader.epoch_batches import AssignedEpoch
from stretto.loader.epoch_order import pack
from stretto.loader.leased_batches import LeasedEpoch
from stretto.loader.streamed_epoch import StreamedEpoch
from stretto.parameter_server.client_types import RollbackRequiredError
from stretto.runtime.event_writer import boot_id
from stretto.training.checkpointed import script_state
from stretto.training.trainer_view import TrainerView
from stretto.training.worker_context import WorkerContext

LAST_S, LAST_REMOTE_S = 60.0, 3600.0
"""Seconds that the last checkpoint may take after the script has ended, on a disk here and at the launcher.

Sending ends earlier if the coordinator takes nothing."""
BATCHES_BEFORE_PACE = 16
"""Number of batches up to the next meeting within a stream, while the pace of a worker is not known."""
_NUMBER = struct.Struct("<q")
"""Number of a worker, before its state."""


class CheckpointManager:
    """Decides when a checkpoint is due, and collects its state; the first worker writes it in the background."""

    def __init__(self, trainer: TrainerView, context: WorkerContext) -> None:
        self._trainer, self._script = trainer, script_state()
        self._checkpoints = files.checkpoints(context.keep) if (files := context.files) is not None else None
        self._last_s = LAST_REMOTE_S if context.remote_files is not None else LAST_S
        self._every = copy.copy(context.checkpoint)
        self.saved_at = 0
        """Number of rounds at the last checkpoint."""
        self._met = 0.0, 0
        """Time, and number of this worker's batches, at the last meeting within a stream."""
        self._writer: BackgroundWriter | None = None
        self._number = 0
        """Number of the last checkpoint; it may be above `rounds_done`, which differs among asynchronous workers."""
        self._snapshots = Snapshots()
        self._notices: SimpleQueue[str] = SimpleQueue()
        """Notices of the writer thread."""

    # --- when ---------------------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Return True if a checkpoint is due at a rest point, by rounds, or by seconds in a fixed membership."""
        trainer, due = self._trainer, self._every
        if due is None or trainer.strategy.asynchronous:
            return False
        is_at_rest = trainer.global_steps.is_at_rest()
        if due.rounds is not None:
            return trainer.progress.rounds - self.saved_at >= due.rounds and trainer.rank_parts.agreed(is_at_rest)
        t, rounds = trainer.events.t(), trainer.progress.rounds
        return is_at_rest and not trainer.transport.repeats_attempts and due.due(t, rounds)

    def on_snapshot(self) -> None:
        """Write a checkpoint if one is due; asynchronous workers have met, with no update in flight."""
        if self.is_save_requested():
            self._trainer.epochs.push_stepped()
            self._trainer.epochs.run_synced(self.save)

    def is_save_requested(self) -> bool:
        """Return True if the first of the asynchronous workers finds that a checkpoint is due; all must call this."""
        trainer, due = self._trainer, self._every
        if due is None or not trainer.strategy.asynchronous:
            return False
        t, rounds, server = trainer.events.t(), trainer.progress.rounds, trainer.transport.server
        assert server is not None

        def asks() -> bytes:
            is_due = not trainer.rank_parts.rank and due.due(t, rounds)  # the clocks of its other ranks differ
            return b"no" if server.agreed(not is_due) else b"save"

        return trainer.transport.broadcast_bytes(asks) == b"save"

    @property
    def is_asked(self) -> bool:
        """True if the run writes checkpoints."""
        return self._every is not None

    def batches_to_meeting(self, batches: int) -> int:
        """Return the number of batches up to the next meeting within a stream, of a worker that has trained `batches`.

        Asked for a time, workers meet twice in it: each estimates from its own pace how many batches that takes.
        """
        due, recipe, t = self._every, self._trainer.strategy.recipe, self._trainer.events.t()
        (met_at, before), self._met = self._met, (t, batches)
        if due is None or due.seconds is None:
            return (due.rounds or 1 if due is not None else 1) * getattr(recipe.when if recipe else None, "every", 1)
        if batches == before:
            return BATCHES_BEFORE_PACE
        return max(round((batches - before) / max(t - met_at, 1e-6) * due.seconds / 2), 1)

    def restore(self, saved_at: int) -> None:
        """Continue after a checkpoint that was written after this number of rounds."""
        self.saved_at = saved_at

    # --- saving -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Gather each worker's own state; the first worker writes everything.

        Asynchronous workers wait until it has read the server's parameters and the sample counts.
        """
        with self._trainer.rank_parts.whole():
            self._save()

    def _save(self) -> None:
        trainer = self._trainer
        trainer.global_steps.refuse_not_finite()
        self.saved_at = trainer.progress.rounds
        own = _NUMBER.pack(trainer.transport.number) + state_transfer.pack_own(self._own())
        states = trainer.transport.all_gather_bytes(own)
        state_of = {_NUMBER.unpack_from(one)[0]: memoryview(one)[_NUMBER.size :] for one in states}
        if trainer.strategy.asynchronous:
            trainer.transport.broadcast_bytes(lambda: self._write(state_of))
        elif trainer.transport.number == next(iter(state_of)):  # the members may have changed since
            self._write(state_of)

    def _write(self, states: Mapping[int, memoryview]) -> bytes:
        """Submit the state to the writer, unless a server failed: its part would be of another moment."""
        trainer = self._trainer
        if self._checkpoints is None:
            return b"nowhere"
        try:
            own_state = self.state({worker: state_transfer.unpack_own(one) for worker, one in states.items()})
        except RollbackRequiredError:
            return b"lost"
        state = trainer.rank_parts.joined(own_state)
        if trainer.rank_parts.rank:
            return b"joined"
        if self._writer is None and (lacking := own_state.tensors.keys() - state.tensors.keys()):
            kinds = in_words(lacking)
            trainer.events.notice(f"checkpoints of a shared model leave out {', '.join(kinds)}, which begin again")
        live = {name: one for name, one in state.tensors.items() if one is own_state.tensors.get(name)}
        tensors = state.tensors | self._snapshots.copied(live)
        kept = State(state_transfer.as_text(state.facts), tensors, state.own)
        if self._writer is None:
            self._writer = BackgroundWriter(self._checkpoints, self._notices.put)
            if left_out := state_transfer.unsaved(trainer.optimizers):
                names = ", ".join(left_out)
                trainer.events.notice(f"checkpoints can't hold {names} of the optimizer, which starts again after one")
            if self._stream() is not None and (text := trainer.batch_source.resume_notice()):
                trainer.events.notice(text)
        self._number, before = trainer.progress.rounds, self._number
        if trainer.strategy.asynchronous:
            self._number = max(trainer.progress.rounds, before + 1, self._checkpoints.highest() + 1)
        self._writer.submit(kept, self._number)
        progress = trainer.progress
        trainer.events.write("checkpoint", step=progress.steps, round=self._number, samples=progress.samples)
        return b"written"

    def pass_on(self) -> None:
        """Write the writer's notices into the event log."""
        while not self._notices.empty():
            self._trainer.events.notice(self._notices.get())

    def finish(self, is_wanted: bool) -> None:
        """Write the last state if it `is_wanted` and checkpoints are kept, and wait for the writer."""
        if self._every is not None and is_wanted:
            self.save()
        if self._writer is not None and not self._writer.close(self._last_s):
            self._trainer.events.notice(
                f"the checkpoint of round {self._number} was not written within {self._last_s:g} s, and is lost"
            )
        self.pass_on()

    # --- the state ----------------------------------------------------------------------------------------------

    def state(self, own: dict[int, state_transfer.Own]) -> State:
        """Return the state of the run, with each worker's own; without any, the script's values are of this worker.

        Raises RollbackRequiredError when a server was lost.
        """
        trainer = self._trainer
        current, progress = trainer.epochs.current, trainer.progress
        epoch_batches = current if isinstance(current, AssignedEpoch | LeasedEpoch) else None
        assignment = epoch_batches.at_rest() if epoch_batches is not None else None
        counts = progress.facts()
        if assignment is not None:
            counts["samples"] = progress.samples_before + assignment.assigned_samples
        if isinstance(epoch_batches, LeasedEpoch):
            counts["step_requests_before"] = progress.step_requests
        strategy, tensors = trainer.strategy.state.replicated()
        facts: dict[str, Any] = {
            "section": trainer.section.facts(),
            "recipe": str(trainer.strategy.recipe),
            "workers": list(trainer.transport.members),
            **counts,
            "closing_epoch": trainer.epochs.closing is not None,
            "order": pack(epoch_batches.order) if epoch_batches is not None else None,
            "assignment": assignment.state() if assignment is not None else None,
            "stream": self._place_in_stream([facts["stream"] for facts, _ in own.values() if "stream" in facts]),
            "evaluator": trainer.evaluator.state(),
            "settings": trainer.settings.state(),
            "stages": trainer.rank_parts.facts(),
            "strategy": strategy,
            "own_optimizer": trainer.strategy.keeps_own_optimizer,
            "saved": self.saved_at,
            "t": trainer.events.t(),
            "zero": trainer.events.zero,
            "boot": boot_id(),
        }
        tensors |= state_transfer.model_tensors(trainer.model) | state_transfer.optimizer_tensors(trainer.optimizers)
        if not own:
            kept, kept_tensors = self._script.saved()
            facts, tensors = facts | kept, tensors | kept_tensors
        return State(facts, tensors, own)

    def _stream(self) -> StreamedEpoch | None:
        """Return the epoch over a stream that is under way, or that an iterator will continue after; None elsewhere."""
        current, source = self._trainer.epochs.current, self._trainer.batch_source
        if isinstance(current, StreamedEpoch):
            return current
        return source.streamed if source.is_iterator and current is None else None

    def _place_in_stream(self, reports: Sequence[str]) -> str | None:
        stream = self._stream()
        return stream.place(reports, is_over=self._trainer.epochs.current is None) if stream is not None else None

    def _own(self) -> state_transfer.Own:
        facts, tensors = state_transfer.random_states(self._trainer.loader)
        if (stream := self._stream()) is not None:
            facts["stream"] = stream.report()
        states, own = self._trainer.strategy.state.own()
        if self._trainer.strategy.keeps_own_optimizer:
            tensors |= state_transfer.optimizer_tensors(self._trainer.optimizers)
        if self._trainer.strategy.keeps_own_model:
            tensors |= state_transfer.model_tensors(self._trainer.model)
        kept, kept_tensors = self._script.saved()
        return facts | {"states": states} | kept, tensors | own | kept_tensors
