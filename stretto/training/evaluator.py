"""Evaluates the agreed model, closes a pass's books with the other workers, and keeps states for a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from stretto.checkpoint.final_model import NAME, save_final
from stretto.checkpoint.state_transfer import state_dict_of
from stretto.checkpoint.storage import KINDS
from stretto.data.leases import audit
from stretto.errors import EvaluateError, LogError, explain
from stretto.events import read_events
from stretto.loader.epoch_batches import AssignedEpoch, EpochBatches
from stretto.loader.leased_batches import LeasedEpoch
from stretto.loader.sample_weights import Arrivals
from stretto.runtime.event_writer import EventWriter
from stretto.runtime.phase_timer import Stopwatch
from stretto.strategies.model_replica import Replica
from stretto.training.evaluation import Evaluate, run
from stretto.training.worker_context import WorkerContext
from stretto.transport import Transport

Predicted = NDArray[np.int32] | None


class Doing(Protocol):
    """Says what a worker does."""

    def doing(self, text: str) -> None:
        """What it does now."""


class Judged(Protocol):
    """What the referee sees of a trainer."""

    model: nn.Module
    wire: Transport
    watch: Stopwatch
    journal: EventWriter
    arrivals: Arrivals
    replica: Replica
    presence: Doing
    steps: int
    samples: int
    samples_before: int
    own_samples: int
    hands_done: int

    def training_s(self) -> float:
        """Seconds of training so far."""

    def measured(self) -> dict[str, Any]:
        """This worker's cumulative figures."""


@dataclass(frozen=True)
class Line:
    """What there is to be written of a pass: what all told of themselves, and of each sample."""

    epoch: int
    step: int
    samples: int
    training_s: float
    hands: EpochBatches
    counts: list[bytes] | None
    told: list[bytes]


class Evaluator:
    """Judges a trainer's work: worker 0 evaluates, all wait; at the end of a pass all tell what they know."""

    def __init__(self, trainer: Judged, seat: WorkerContext, evaluate: Evaluate | None, every: int | None) -> None:
        self._trainer, self._seat = trainer, seat
        self._evaluate, self._every = evaluate, every
        self._evaluated_at: int | None = None
        self._predictions: Predicted = None
        self.is_final_elsewhere = False
        """Whether the run folder did not take the model that the script ends with."""
        self._epoch = 0
        self._newest_at = self._newest_samples = 0
        """The steps at the last evaluation of a server's newest version, and the samples then, estimated."""

    @property
    def epoch(self) -> int:
        """Number of epochs whose books are closed."""
        return self._epoch

    def state(self) -> list[int | None]:
        """How far it has come: passes closed, and where it evaluated last."""
        return [self._epoch, self._evaluated_at]

    def restore(self, state: list[int | None]) -> None:
        """Go on from there."""
        self._epoch, self._evaluated_at = state[0] or 0, state[1]

    def evaluate_if_due(self) -> None:
        """Evaluate when so many steps have passed as the script asked for."""
        steps = self._trainer.steps
        if self._every is None or steps // self._every == (self._evaluated_at or 0) // self._every:
            return
        self._trainer.replica.sync_for_evaluation()
        self.evaluate()
        self._trainer.replica.resume()

    def evaluate_newest_if_due(self) -> None:
        """Evaluate a server's newest version at worker 0, when it has made as many steps as the script asked for.

        The other workers do not wait. Their samples since the last meeting are unknown: worker 0 assumes that each has
        trained as many as itself.
        """
        trainer, every = self._trainer, self._every
        if self._evaluate is None or every is None or trainer.steps // every == self._newest_at // every:
            return
        self._newest_at = trainer.steps
        if trainer.wire.worker:
            return
        since = trainer.samples - trainer.samples_before
        estimate = trainer.samples_before + since * trainer.wire.workers
        self._newest_samples = max(estimate, self._newest_samples)
        training_s = trainer.training_s()
        with trainer.watch.on("evaluating"), trainer.replica.newest():
            self._judge(training_s, self._newest_samples)
        trainer.journal.flush()

    def evaluate(self) -> None:
        """Evaluate the model as it is now; worker 0 does, the others wait for it."""
        trainer = self._trainer
        at = trainer.steps if trainer.replica.server is None else trainer.samples
        if self._evaluate is None or (self._evaluated_at == at and trainer.replica.server is None):
            return
        is_new, self._evaluated_at = self._evaluated_at != at, at
        training_s = trainer.training_s()
        with trainer.watch.on("evaluating"):  # where nobody waits one may have come later; who judges knows
            trainer.wire.broadcast_bytes(lambda: self._judge(training_s) if is_new else b"evaluated")
        trainer.journal.flush()

    def _judge(self, training_s: float, estimated: int | None = None) -> bytes:
        """The first worker's part of an evaluation."""
        trainer = self._trainer
        assert self._evaluate is not None
        trainer.presence.doing("evaluating")
        try:
            metrics, self._predictions = run(self._evaluate, trainer.model)
        except SystemExit as error:
            problem, expected = "evaluate ended the script", "a function that returns: the other workers wait for it"
            to_type = "return the numbers, and leave the loop on every worker"
            got = f"sys.exit({error.code!r})"
            raise EvaluateError(explain(problem, got=got, expected=expected, to_type=to_type)) from error
        samples = trainer.samples if estimated is None else estimated
        carries: dict[str, Any] = {"epoch": self._epoch, "step": trainer.steps, "samples": samples}
        if trainer.replica.server is not None:
            carries["versions"] = trainer.replica.server.versions_read
        trainer.journal.write("evaluation", **carries, training_s=training_s, metrics=metrics)
        self._keep(f"states/{samples:08d}")
        return b"evaluated"

    def close_pass(self, hands: EpochBatches) -> None:
        """The books of a pass: who did what, how long it took, and how often each sample counted."""
        trainer, samples = self._trainer, self._trainer.samples
        self._epoch += 1
        with trainer.watch.on("waiting"):
            trainer.wire.all_gather_bytes(b"")
        if trainer.replica.server is None:
            trainer.arrivals.settle(trainer.watch)
        training_s = trainer.training_s()
        if self._every is None:
            self.evaluate()
        mine: dict[str, Any] = {
            "worker": trainer.journal.worker,
            "samples": trainer.own_samples,
            "steps": trainer.steps,
        }
        mine |= {"drift": trainer.replica.drift, **trainer.measured()}
        told = trainer.wire.all_gather_bytes(msgspec.msgpack.encode(mine))
        asked = hands.samples and not isinstance(
            hands, LeasedEpoch
        )  # of streams nobody knows, else the coordinator all
        counts = trainer.wire.all_gather_bytes(lambda: _books(hands)) if asked else None
        line = Line(self._epoch, trainer.steps, samples, training_s, hands, counts, told)
        was_first = trainer.wire.worker == 0
        with trainer.watch.on("waiting"):
            trainer.wire.broadcast_bytes(lambda: self._put_down(line, was_first))
        trainer.journal.flush()

    def _put_down(self, line: Line, was_first: bool) -> bytes:
        """The first worker writes of a pass; if it dies while the others wait for it, the first of these does."""
        run = self._seat.run
        if not was_first and run is not None:
            written = (one for one in read_events(run / "events.jsonl") if one.get("event") == "epoch")
            if any(one.get("epoch") == line.epoch for one in written):
                return b"written"
        self._write_epoch(line)
        self._trainer.journal.flush()
        return b"written"

    def finish(self, has_worked: bool) -> None:
        """A last evaluation of the model that the script ends with, if anybody `has_worked`, and its state."""
        if has_worked:
            self.evaluate()
        self.is_final_elsewhere = self._trainer.wire.broadcast_bytes(self._keep_final) == b"elsewhere"

    def _keep_final(self) -> bytes:
        """Save the model that the script ends with, before anything else that may find no room."""
        folder, notice = self._seat.run, self._trainer.journal.notice
        if folder is None:
            return b"nowhere"
        is_there = save_final(folder, _kept(self._trainer.model), notice)
        if self._predictions is not None:
            try:
                np.save(folder / f"{NAME}.predictions.npy", self._predictions)
            except OSError as error:
                notice(f"the predictions of the trained model could not be saved: {error.strerror}")
        return b"kept" if is_there else b"elsewhere"

    def _write_epoch(self, line: Line) -> None:
        counts, trained = line.counts, {}
        if isinstance(line.hands, LeasedEpoch):
            counted, by_worker = line.hands.audited()
            counts, trained = [np.packbits(counted).tobytes()], {"trained": by_worker}
        told = [msgspec.msgpack.decode(one) for one in line.told]
        drifts = [one.pop("drift") for one in told]
        self._trainer.journal.write(
            "epoch",
            epoch=line.epoch,
            step=line.step,
            samples=line.samples,
            training_s=line.training_s,
            sample_counts=_audited(counts, line.hands) if counts is not None else None,
            drift=max((one for one in drifts if one is not None), default=None),
            workers=told,
            **trained,
        )
        self._keep(f"states/{line.samples:08d}")

    def _keep(self, name: str) -> None:
        """Save the model as it is, when there is a folder for it and somebody wants it."""
        folder = self._seat.run
        if folder is None or not self._seat.keep_states:
            return
        path = folder / name
        try:
            path.parent.mkdir(exist_ok=True)
            _save(path, self._trainer.model, self._predictions)
        except (OSError, SafetensorError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or error
            raise LogError(f"{path} cannot be written: {why}") from error


def _books(hands: EpochBatches) -> bytes:
    """How often each sample was settled by this worker, and by those who are gone."""
    counted = hands.counted()
    assert counted is not None
    return np.packbits(counted).tobytes() + (hands.departed_counts() if isinstance(hands, AssignedEpoch) else b"")


def _audited(told: Sequence[bytes], hands: EpochBatches) -> dict[str, int]:
    """How often each sample of the pass counted, over all workers.

    Of those who are not there any more the worker that has been there longest knows.
    """
    assert isinstance(hands, AssignedEpoch | LeasedEpoch)
    size = hands.order.bounds[-1]
    length = -(-size // 8)
    books = [one[length:] for one in told if one[length:]]
    packed = [*(one[:length] for one in told), *([min(books)[8:]] if books else [])]
    counts = [np.unpackbits(np.frombuffer(one, np.uint8), count=size) for one in packed]
    found, late = audit(one[: hands.samples] for one in counts), audit(one[hands.samples :] for one in counts)
    facts = {"once": found.once, "twice": found.twice + late.twice, "never": found.never + late.never}
    recovered_samples = {"recovered_samples": late.once} if size > hands.samples else {}
    return {**facts, "dropped": hands.dropped, **recovered_samples}


def _kept(model: nn.Module) -> dict[str, Tensor]:
    """What the model's `load_state_dict` takes, but for what safetensors has no room for."""
    return {name: one for name, one in state_dict_of(model).items() if one.dtype in KINDS}


def _save(path: Path, model: nn.Module, predictions: Predicted) -> None:
    tensors = {name: one.cpu().contiguous().clone() for name, one in _kept(model).items()}
    save_file(tensors, f"{path}.safetensors")
    if predictions is not None:
        np.save(f"{path}.predictions.npy", predictions)
