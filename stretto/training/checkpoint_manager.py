"""Writes down the state of a run: for checkpoints, and for those who come to it.

Workers that wait for each other are at rest between two hands. Those that do not meet at a cut, or to evaluate, and at
the end of a pass; then all look at what the server has.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

from stretto.checkpoint import state_transfer
from stretto.checkpoint.background_writer import BackgroundWriter, Snapshots
from stretto.checkpoint.storage import Checkpoints, State
from stretto.loader.epoch_batches import AssignedEpoch, members_of
from stretto.loader.epoch_order import pack
from stretto.loader.leased_batches import LeasedEpoch
from stretto.parameter_server.client_types import RollbackRequiredError
from stretto.run_dir import CHECKPOINTS
from stretto.runtime.event_writer import boot_id
from stretto.training.trainer_view import TrainerView
from stretto.training.worker_context import WorkerContext
from stretto.transport.elastic import ElasticTransport

LAST_S = 60.0
"""How long the last checkpoint may take when all else is over."""


class CheckpointManager:
    """Says when a checkpoint is due, and what is in it; the first worker writes it, behind the training."""

    def __init__(self, trainer: TrainerView, seat: WorkerContext) -> None:
        self._trainer = trainer
        self._checkpoints = Checkpoints(seat.run / CHECKPOINTS, seat.keep) if seat.run is not None else None
        self._every = copy.copy(seat.checkpoint)
        self.saved_at = 0
        """The rounds at the last checkpoint."""
        self._writer: BackgroundWriter | None = None
        self._number = 0
        """That of the last checkpoint. Where nobody waits rounds are each worker's own, and another may write."""
        self._snapshots = Snapshots()
        self._notices: SimpleQueue[str] = SimpleQueue()
        """What the writer has to say, in its own thread."""

    # --- when ---------------------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether one is due at a rest by the number of rounds, or of seconds where nobody else must be told."""
        trainer, due = self._trainer, self._every
        if due is None or trainer.replica.server is not None or not trainer.is_at_rest():
            return False
        if due.rounds is not None:
            return trainer.rounds_done - self.saved_at >= due.rounds
        return not isinstance(trainer.wire, ElasticTransport) and due.due(trainer.journal.t(), trainer.rounds_done)

    def cut_made(self) -> None:
        """Workers that do not wait have met, and nothing is under way: a checkpoint is written if one is due."""
        if self.is_told_to_save():
            self._trainer.bring_steps()
            self._trainer.look_together(self.save)

    def is_told_to_save(self) -> bool:
        """Whether the first of the workers that do not wait, and have met, finds that a checkpoint is due."""
        trainer, due = self._trainer, self._every
        if due is None or trainer.replica.server is None:
            return False
        t = trainer.journal.t()
        return trainer.wire.broadcast_bytes(lambda: b"save" if due.due(t, trainer.rounds_done) else b"no") == b"save"

    # --- saving -------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """All tell what they have for themselves; the first writes everything down.

        Those who go on by themselves wait until it has looked at what all have: the server's parameters, and the books.
        """
        trainer = self._trainer
        self.saved_at = trainer.rounds_done
        told = trainer.wire.all_gather_bytes(state_transfer.pack_own(self._own()))
        whose = dict(zip(members_of(trainer.wire), told, strict=True))
        if trainer.replica.server is not None:
            trainer.wire.broadcast_bytes(lambda: self._write(whose))
        elif not trainer.wire.worker:
            self._write(whose)

    def _write(self, told: Mapping[int, bytes]) -> bytes:
        """Have the state written; not if a server was lost meanwhile: what it had is of another moment then."""
        trainer = self._trainer
        if self._checkpoints is None:
            return b"nowhere"
        try:
            state = self.state({worker: state_transfer.unpack_own(one) for worker, one in told.items()})
        except RollbackRequiredError:
            return b"lost"
        kept = State(state_transfer.as_text(state.facts), self._snapshots.copied(state.tensors), state.own)
        if self._writer is None:
            self._writer = BackgroundWriter(self._checkpoints, self._notices.put)
            if left_out := state_transfer.unsaved(trainer.optimizers):
                names = ", ".join(left_out)
                trainer.journal.notice(f"checkpoints can't hold {names} of the optimizer, which starts again after one")
        self._number, before = trainer.rounds_done, self._number
        if trainer.replica.server is not None:
            self._number = max(trainer.rounds_done, before + 1, self._checkpoints.highest() + 1)
        self._writer.submit(kept, self._number)
        trainer.journal.write("checkpoint", step=trainer.steps, round=self._number, samples=trainer.samples)
        return b"written"

    def pass_on(self) -> None:
        """Say what the writer has to say."""
        while not self._notices.empty():
            self._trainer.journal.notice(self._notices.get())

    def finish(self, is_wanted: bool) -> None:
        """The script is over: the last state, whole, if it `is_wanted` and states are kept at all."""
        if self._every is not None and is_wanted:
            self.save()
        if self._writer is not None and not self._writer.close(LAST_S):
            self._trainer.journal.notice(
                f"the checkpoint of round {self._number} was not written within {LAST_S:g} s, and is lost"
            )
        self.pass_on()

    # --- the state ----------------------------------------------------------------------------------------------

    def state(self, own: dict[int, state_transfer.Own]) -> State:
        """Return the state of the run, with each worker's own. Raises RollbackRequiredError when a server was lost."""
        trainer = self._trainer
        hands = trainer.hands if isinstance(trainer.hands, AssignedEpoch | LeasedEpoch) else None
        deal = hands.at_rest() if hands is not None else None
        replica, tensors = trainer.replica.state()
        facts: dict[str, Any] = {
            "section": trainer.section.facts(),
            "recipe": str(trainer.replica.recipe),
            "workers": list(members_of(trainer.wire)),
            "passes": trainer.passes,
            "peeks": trainer.peeks,
            "closing": trainer.closing is not None,
            "order": pack(hands.order) if hands is not None else None,
            "deal": deal.state() if deal is not None else None,
            "steps": trainer.steps,
            "steps_of": trainer.steps_of,
            "turns": trainer.turns,
            "hands": trainer.hands_done,
            "stepless_hands": trainer.stepless_hands,
            "rounds": trainer.rounds_done,
            "samples": trainer.samples_before + deal.assigned_samples if deal is not None else trainer.samples,
            "samples_before": trainer.samples_before,
            "turns_before": trainer.turns if isinstance(hands, LeasedEpoch) else trainer.turns_before,
            "referee": trainer.referee.state(),
            "settings": trainer.settings.state(),
            "replica": replica,
            "own_optimizer": trainer.replica.keeps_own_optimizer,
            "saved": self.saved_at,
            "t": trainer.journal.t(),
            "zero": trainer.journal.zero,
            "boot": boot_id(),
        }
        tensors |= state_transfer.model_tensors(trainer.model) | state_transfer.optimizer_tensors(trainer.optimizers)
        return State(facts, tensors, own)

    def _own(self) -> state_transfer.Own:
        facts, tensors = state_transfer.random_states(self._trainer.loader)
        states, kept = self._trainer.replica.own_state()
        if self._trainer.replica.keeps_own_optimizer:
            tensors |= state_transfer.optimizer_tensors(self._trainer.optimizers)
        return facts | {"states": states}, tensors | kept
