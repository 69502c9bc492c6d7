"""Captures the state of a run, for checkpoints and for workers that join.

Workers that wait for each other save at rest, between two global steps. Workers that do not wait save at a barrier for
a snapshot or an evaluation, and at the end of an epoch; then all of them hold the server's parameters.
"""

from __future__ import annotations

import copy
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

from stretto.checkpoint import state_transfer
from stretto.checkpoint.background_writer import BackgroundWriter, Snapshots
from stretto.checkpoint.storage import State
from stretto.checkpoint.whole_state import in_words
from stretto.errors import StrettoError, TransportError
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
LEAST_S = 1e-6
"""Least cost of a checkpoint, since 0 says that the cost is unknown."""
BATCHES_BEFORE_PACE = 16
"""Number of batches up to the next meeting within a stream, while the pace of a worker is not known."""
_NUMBER = struct.Struct("<q")
"""Number of a worker, before its state; -1 before the reason why it has none that can be saved."""
Found = TypeVar("Found")


class CheckpointManager:
    """Decides when a checkpoint is due, and collects its state; the first worker writes it in the background."""

    def __init__(self, trainer: TrainerView, context: WorkerContext) -> None:
        self._trainer, self._script = trainer, script_state()
        self._checkpoints = files.checkpoints(context.keep) if (files := context.files) is not None else None
        self._last_s = LAST_REMOTE_S if context.remote_files is not None else LAST_S
        self.every = trainer.section.checkpoints or copy.copy(context.checkpoint)
        """Interval between checkpoints; None for a run that writes none."""
        self._clock, self._began = context.runtime.clock, 0.0
        self._cost_s: float | None = None
        """Seconds that all waited for a checkpoint whose writing has not ended; None if there is none."""
        self._unsaved = ""
        """Reason why the state of this process cannot be saved, found last; empty if it can."""
        self.saved_at = 0
        """Number of rounds at the last checkpoint."""
        self._met = 0.0, 0
        """Time, and number of this worker's batches, at the last meeting within a stream, or look at the clock."""
        self._meet_at = self.every.seconds or 0.0 if self.every is not None and self.every.follows_cost else 0.0
        """Time before which workers do not meet within a stream."""
        self._writer: BackgroundWriter | None = None
        self._number = 0
        """Number of the last checkpoint; it may be above `rounds_done`, which differs among asynchronous workers."""
        self._snapshots = Snapshots()
        self._notices: SimpleQueue[str] = SimpleQueue()
        """Notices of the writer thread."""

    # --- when ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the first interval, unless it has begun."""
        if self.every is not None:
            self.every.has_passed(self._now(), self._trainer.section.rounds)

    def is_due(self) -> bool:
        """Return True if a checkpoint is due at a rest point, by rounds, or by seconds in a fixed membership."""
        trainer, due = self._trainer, self.every
        if due is None or trainer.strategy.asynchronous:
            return False
        if due.rounds is not None:
            is_at_rest = trainer.global_steps.is_at_rest()
            return trainer.progress.rounds - self.saved_at >= due.rounds and trainer.rank_parts.agreed(is_at_rest)
        if trainer.transport.repeats_attempts:  # the coordinator asks for it
            return False
        has_passed = due.has_passed(self._now(), 0)
        if trainer.transport.workers > 1:  # their clocks differ
            has_passed = trainer.transport.broadcast_bytes(b"due" if has_passed else b"") == b"due"
        if not has_passed or not trainer.global_steps.is_at_rest() or trainer.batch_source.keep_proofs():
            return False
        return due.due(self._now(), 0)

    def _now(self) -> float:
        """Return the seconds since the start of the first section."""
        return self._trainer.section.seconds + self._trainer.events.t()

    def on_snapshot(self) -> None:
        """Write a checkpoint if one is due; asynchronous workers have met, with no update in flight."""
        if self.is_save_requested():
            self._trainer.epochs.push_stepped()
            self._trainer.epochs.run_synced(self.save)

    def is_save_requested(self) -> bool:
        """Return True if the first of the asynchronous workers finds that a checkpoint is due; all must call this."""
        trainer, due = self._trainer, self.every
        if due is None or not trainer.strategy.asynchronous:
            return False
        t, rounds, server = self._now(), trainer.section.rounds + trainer.progress.rounds, trainer.transport.server
        assert server is not None

        def asks() -> bytes:
            is_due = not trainer.rank_parts.rank and due.due(t, rounds)  # the clocks of its other ranks differ
            return b"no" if server.agreed(not is_due) else b"save"

        return trainer.transport.broadcast_bytes(asks) == b"save"

    @property
    def is_asked(self) -> bool:
        """True if the run writes checkpoints."""
        return self.every is not None

    def batches_to_meeting(self, batches: int, has_met: bool) -> int:
        """Return the number of batches up to the next meeting within a stream, of a worker that has trained `batches`.

        Asked for a time, workers meet twice in it: each estimates from its own pace how many batches that takes. If no
        interval was typed, a worker looks at its clock before a meeting, too; 0 if that is due.
        """
        due, recipe, t = self.every, self._trainer.strategy.recipe, self._now()
        if not has_met and (due is None or not due.follows_cost or t >= self._meet_at):
            return 0
        if due is None or due.seconds is None:
            return (due.rounds or 1 if due is not None else 1) * getattr(recipe.when if recipe else None, "every", 1)
        (met_at, before), self._met = self._met, (t, batches)
        if has_met and due.follows_cost:
            self._meet_at = t + (due.shortest_s or 0.0)
        ahead_s = self._meet_at - t if due.follows_cost else due.seconds
        if batches == before:
            return BATCHES_BEFORE_PACE
        return max(round((batches - before) / max(t - met_at, 1e-6) * ahead_s / 2), 1)

    def restore(self, saved_at: int) -> None:
        """Continue after a checkpoint that was written after this number of rounds."""
        self.saved_at = saved_at

    # --- saving -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Gather each worker's own state; the first worker writes everything.

        Asynchronous workers wait until it has read the server's parameters and the sample counts.
        """
        self._began, self._cost_s = self._clock(), None
        self._trainer.transport.checkpoint_took(0.0)
        with self._trainer.rank_parts.whole():
            self._save()

    def _save(self) -> None:
        trainer = self._trainer
        trainer.global_steps.refuse_not_finite()
        self.saved_at = trainer.progress.rounds
        packed = self._savable(lambda: state_transfer.pack_own(self._own()))
        own = _NUMBER.pack(-1) + self._unsaved.encode()
        if packed is not None:
            own = _NUMBER.pack(trainer.transport.number) + packed
        states = trainer.transport.all_gather_bytes(own)
        state_of = {_NUMBER.unpack_from(one)[0]: memoryview(one)[_NUMBER.size :] for one in states}
        if not trainer.rank_parts.agreed(-1 not in state_of):
            self._give_up(bytes(state_of.get(-1, b"")).decode())
        elif trainer.strategy.asynchronous:
            trainer.transport.broadcast_bytes(lambda: self._write(state_of))
        elif trainer.transport.number == next(iter(state_of)):  # the members may have changed since
            self._write(state_of)

    def _write(self, states: Mapping[int, memoryview]) -> bytes:
        """Submit the state to the writer, unless a server failed: its part would be of another moment."""
        trainer = self._trainer
        if self._checkpoints is None:
            return b"nowhere"
        try:
            own_state = self._savable(
                lambda: self.state({worker: state_transfer.unpack_own(one) for worker, one in states.items()})
            )
        except RollbackRequiredError:
            return b"lost"
        if not trainer.rank_parts.agreed(own_state is not None) or own_state is None:
            self._give_up(self._unsaved)
            return b"unsaved"
        state = trainer.rank_parts.joined(own_state)
        if trainer.rank_parts.rank:
            return b"joined"
        if self._writer is None and (lacking := own_state.tensors.keys() - state.tensors.keys()):
            kinds = in_words(lacking)
            trainer.events.notice(f"checkpoints of a shared model leave out {', '.join(kinds)}, which begin again")
        live = {name: one for name, one in state.tensors.items() if one is own_state.tensors.get(name)}
        copies = self._savable(lambda: self._snapshots.copied(live))
        if copies is None:
            self._give_up(self._unsaved)
            return b"unsaved"
        tensors = state.tensors | copies
        kept = State(state_transfer.as_text(state.facts), tensors, state.own, own_state.frozen & tensors.keys())
        if self._writer is None:
            self._writer = BackgroundWriter(self._checkpoints, self._notices.put, self._clock)
            if left_out := state_transfer.unsaved(trainer.optimizers):
                names = ", ".join(left_out)
                trainer.events.notice(f"checkpoints can't hold {names} of the optimizer, which starts again after one")
            if self._stream is not None and (text := trainer.batch_source.resume_notice()):
                trainer.events.notice(text)
        self._number, before = trainer.progress.rounds, self._number
        if trainer.strategy.asynchronous:
            self._number = max(trainer.progress.rounds, before + 1, self._checkpoints.highest() + 1)
        self._writer.submit(kept, self._number)
        self._cost_s = self._clock() - self._began
        progress = trainer.progress
        trainer.events.write("checkpoint", step=progress.steps, round=self._number, samples=progress.samples)
        return b"written"

    def _savable(self, make: Callable[[], Found]) -> Found | None:
        """Return a part of the state; None, with `_unsaved`, if it can't be saved and no interval was typed."""
        try:
            return make()
        except TransportError:
            raise
        except Exception as error:
            if self.every is None or not self.every.follows_cost:
                raise
            text = str(error).partition("\n")[0]
            self._unsaved = text if isinstance(error, StrettoError) else f"{type(error).__name__}: {text}"
            return None

    def _give_up(self, why: str) -> None:
        """Say that no checkpoint can be written, and let none be due any more."""
        trainer = self._trainer
        trainer.events.notice(
            f"no checkpoints are written, and training continues: {why or 'not all processes have a state to save'}"
        )
        trainer.transport.checkpoint_took(math.inf)
        if self.every is not None:
            self.every.cost_s = math.inf

    def pass_on(self) -> None:
        """Write the writer's notices into the event log, and let the next checkpoint be due by the cost of the last."""
        if self._cost_s is not None and self._writer is not None and (took_s := self._writer.took_s) is not None:
            cost_s, self._cost_s = max(self._cost_s + took_s, LEAST_S), None
            self._trainer.transport.checkpoint_took(cost_s)
            if self.every is not None:
                self.every.cost_s = cost_s
        while not self._notices.empty():
            self._trainer.events.notice(self._notices.get())

    def finish(self, is_wanted: bool) -> None:
        """Write the last state if it `is_wanted` and an interval was typed, and wait for the writer."""
        if self.every is not None and is_wanted and not self.every.follows_cost:
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
        unsaved = trainer.agent.unsaved() if own else ()
        facts: dict[str, Any] = {
            "section": trainer.section.facts(),
            "recipe": str(trainer.strategy.recipe),
            "workers": list(trainer.transport.members),
            **counts,
            "first_workers": trainer.batch_source.first_workers,
            "earlier_limits": [*trainer.batch_source.earlier_limits.items()],
            "share_limits": [*trainer.transport.share_limits.items()],
            "shares": trainer.shares.state(),
            "closing_epoch": trainer.epochs.closing is not None,
            "order": pack(epoch_batches.order) if epoch_batches is not None else None,
            "assignment": assignment.state() if assignment is not None else None,
            "stream": self._place_in_stream([facts["stream"] for facts, _ in own.values() if "stream" in facts]),
            "returned": trainer.agent.returned(),
            "lost": sorted(
                {
                    *trainer.epochs.lost,
                    *unsaved,
                    *((one, text) for kept, _ in own.values() for one, text in kept["lost"]),
                }
            ),
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
        return State(facts, tensors, own, frozenset(state_transfer.frozen_tensors(trainer.model)))

    def state_for_others(self, has_frozen: bool) -> bytes:
        """Return the state for workers that arrive, without the frozen tensors if they have the same."""
        state = self.state({})
        if has_frozen:
            state.tensors = {name: one for name, one in state.tensors.items() if name not in state.frozen}
        return state_transfer.pack(state)

    @property
    def _stream(self) -> StreamedEpoch | None:
        return self._trainer.batch_source.stream_of(self._trainer.epochs.current)

    def _place_in_stream(self, reports: Sequence[str]) -> str | None:
        stream = self._stream
        return stream.place(reports, is_over=self._trainer.epochs.current is None) if stream is not None else None

    def _own(self) -> state_transfer.Own:
        facts, tensors = state_transfer.random_states(self._trainer.loader)
        facts["lost"] = self._trainer.epochs.lost
        if (stream := self._stream) is not None:
            facts["stream"] = stream.report()
        states, own = self._trainer.strategy.state.own()
        if self._trainer.strategy.keeps_own_optimizer:
            tensors |= state_transfer.optimizer_tensors(self._trainer.optimizers)
        if self._trainer.strategy.keeps_own_model:
            tensors |= state_transfer.model_tensors(self._trainer.model)
        kept, kept_tensors = self._script.saved()
        return facts | {"states": states} | kept, tensors | own | kept_tensors
