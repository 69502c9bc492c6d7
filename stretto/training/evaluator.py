"""Evaluates the averaged model, closes epochs with the other workers, and saves states for a comparison."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from stretto.checkpoint.final_model import save_final, saveable_tensors
from stretto.data.leases import audit
from stretto.errors import EvaluateError, LogError, explain
from stretto.loader.epoch_batches import AssignedEpoch, BatchSource, EpochBatches
from stretto.loader.leased_batches import LeasedEpoch
from stretto.loader.sample_weights import Arrivals
from stretto.loader.streamed_epoch import StreamedEpoch
from stretto.parallel.rank_parts import RankParts
from stretto.runtime.event_writer import EventWriter
from stretto.runtime.phase_timer import Stopwatch
from stretto.strategies.strategy import Strategy
from stretto.training.evaluation import Evaluate, run
from stretto.training.figures import Figures
from stretto.training.last_model import LastModel
from stretto.training.progress import LoopProgress
from stretto.training.speed_shares import SpeedShares
from stretto.training.worker_context import WorkerContext
from stretto.transport import Transport

Predicted = NDArray[np.int32] | None


class StatusPublisher(Protocol):
    """Publishes what a worker does."""

    def doing(self, text: str) -> None:
        """Publish what the worker does now."""


class EvaluatedTrainer(Protocol):
    """The attributes of a trainer that an evaluator uses."""

    model: nn.Module
    transport: Transport
    timer: Stopwatch
    events: EventWriter
    arrivals: Arrivals
    shares: SpeedShares
    strategy: Strategy
    batch_source: BatchSource
    progress: LoopProgress
    figures: Figures
    rank_parts: RankParts
    last_model: LastModel

    @property
    def agent(self) -> StatusPublisher:
        """The worker's part in a changing membership."""


SampleCounts = Callable[[], dict[str, int] | None]
"""Returns how often each sample of an epoch counted, over all workers; None for streams."""


@dataclass(frozen=True)
class EpochSummary:
    """An epoch's event: the figures of all workers, and the counts of each sample."""

    epoch: int
    step: int
    samples: int
    training_s: float
    sample_counts: SampleCounts
    figures: list[bytes]
    trained: Mapping[int, int]
    """Samples of the epoch by worker."""


class Evaluator:
    """Evaluates at worker 0 while the others wait, and gathers the workers' figures at the end of an epoch."""

    def __init__(
        self, trainer: EvaluatedTrainer, context: WorkerContext, evaluate: Evaluate | None, every: int | None
    ) -> None:
        self._trainer, self._context = trainer, context
        self._evaluate, self._every = evaluate, every
        self._evaluated_at: int | None = None
        self._predictions: Predicted = None
        self._epoch = 0
        self._newest_at = self._newest_samples = 0
        """The steps at the last evaluation of a server's newest version, and the samples then, estimated."""

    @property
    def epoch(self) -> int:
        """Number of closed epochs."""
        return self._epoch

    def state(self) -> list[int | None]:
        """Return the number of closed epochs and the position of the last evaluation."""
        return [self._epoch, self._evaluated_at]

    def restore(self, state: list[int | None]) -> None:
        """Load a state that `state` returned."""
        self._epoch, self._evaluated_at = state[0] or 0, state[1]

    @property
    def _evaluates_newest(self) -> bool:
        """True if worker 0 evaluates alone: no service counts a stream's batches where workers do not wait."""
        return self._trainer.strategy.asynchronous and not self._trainer.batch_source.is_counted

    def announce(self) -> None:
        """Notify the user if worker 0 evaluates alone."""
        if self._evaluate is not None and self._every is not None and self._evaluates_newest:
            self._trainer.events.notice(
                f"evaluate_every={self._every} over a stream: worker 0 evaluates the server's newest parameters "
                "after this number of its own steps; the samples at these evaluations are estimates"
            )

    def evaluate_if_due(self) -> None:
        """Evaluate if the number of steps that the script asked for has passed; at barriers, if workers do not wait."""
        steps = self._trainer.progress.steps
        if self._evaluates_newest:
            self._evaluate_newest_if_due()
        if self._trainer.strategy.asynchronous or self._every is None:
            return
        if steps // self._every == (self._evaluated_at or 0) // self._every:
            return
        self._trainer.strategy.sync_for_evaluation()
        self.evaluate()
        self._trainer.strategy.resume()

    def _evaluate_newest_if_due(self) -> None:
        """Evaluate a server's newest version at worker 0, when it has made as many steps as the script asked for.

        The other workers do not wait. Their samples since the last meeting are unknown: worker 0 assumes that each has
        trained as many as itself.
        """
        trainer, every, progress = self._trainer, self._every, self._trainer.progress
        if self._evaluate is None or every is None or progress.steps // every == self._newest_at // every:
            return
        self._newest_at = progress.steps
        if trainer.transport.worker:
            return
        estimate = progress.samples_before + progress.samples_of_epoch * trainer.transport.workers
        self._newest_samples = max(estimate, self._newest_samples)
        training_s = trainer.figures.training_s()
        with trainer.timer.on("evaluating"), trainer.strategy.newest():
            self._evaluate_here(training_s, self._newest_samples)
        trainer.events.flush()

    def evaluate(self) -> None:
        """Evaluate the current model at worker 0; the other workers wait."""
        trainer = self._trainer
        at = trainer.progress.steps if not trainer.strategy.asynchronous else trainer.progress.samples
        if self._evaluate is None or (self._evaluated_at == at and not trainer.strategy.asynchronous):
            return
        is_new, self._evaluated_at = self._evaluated_at != at, at
        training_s = trainer.figures.training_s()
        with trainer.timer.on("evaluating"):  # an asynchronous worker may have joined later: the first worker decides
            trainer.rank_parts.of_first(
                trainer.transport.broadcast_by_ranks,
                lambda: self._evaluate_here(training_s) if is_new else b"evaluated",
            )
        trainer.events.flush()

    def _evaluate_here(self, training_s: float, estimated: int | None = None) -> bytes:
        """Evaluate and write the event, at the first worker."""
        trainer = self._trainer
        assert self._evaluate is not None
        trainer.agent.doing("evaluating")
        try:
            with trainer.rank_parts.whole():
                metrics, self._predictions = run(self._evaluate, trainer.model)
        except SystemExit as error:
            problem, expected = "evaluate ended the script", "a function that returns: the other workers wait for it"
            to_type = "return the numbers, and leave the loop on every worker"
            got = f"sys.exit({error.code!r})"
            raise EvaluateError(explain(problem, got=got, expected=expected, to_type=to_type)) from error
        self._write(training_s, metrics, estimated)
        return b"evaluated"

    def _write(self, training_s: float, metrics: Mapping[str, float], estimated: int | None = None) -> None:
        """Write the event of an evaluation, and the state if the run keeps states, at the first worker."""
        trainer = self._trainer
        samples = trainer.progress.samples if estimated is None else estimated
        fields: dict[str, Any] = {"epoch": self._epoch, "step": trainer.progress.steps, "samples": samples}
        if trainer.strategy.asynchronous:
            fields["versions"] = trainer.strategy.versions_read
        trainer.events.write("evaluation", **fields, training_s=training_s, metrics=metrics)
        self._save_state(f"states/{samples:08d}")

    @contextmanager
    def of_library(self) -> Iterator[Callable[[Mapping[str, float]], None]]:
        """Count the block as an evaluation that a library's loop makes; yield a function that writes its numbers.

        The first worker calls the function, with the agreed model in place.
        """
        trainer, training_s = self._trainer, self._trainer.figures.training_s()
        with trainer.timer.on("evaluating"):
            yield functools.partial(self._write, training_s)
        trainer.events.flush()

    def close_epoch(self, epoch_batches: EpochBatches) -> None:
        """Close an epoch: gather the workers' figures and the count of each sample, and write the event."""
        trainer, transport, progress = self._trainer, self._trainer.transport, self._trainer.progress
        self._epoch += 1
        with trainer.timer.on("waiting"):
            counts, trained = self._count(epoch_batches)
        if not trainer.strategy.asynchronous:
            found = trainer.arrivals.settle(trainer.timer, trainer.shares.of_epoch())
            trainer.shares.note_gain(found, epoch_batches)
        training_s = trainer.figures.training_s()
        if self._every is None:
            self.evaluate()
        own: dict[str, Any] = {
            "worker": trainer.events.worker,
            "samples": progress.own_samples,
            "steps": progress.steps,
        }
        own |= {"drift": trainer.strategy.drift, **trainer.figures.measured()}
        figures = transport.all_gather_bytes(msgspec.msgpack.encode(own))
        summary = EpochSummary(self._epoch, progress.steps, progress.samples, training_s, counts, figures, trained)
        with trainer.timer.on("waiting"):  # if the first worker fails here, the next one writes the event again
            transport.broadcast_by_ranks(lambda: self._write_epoch(summary))
        trainer.events.flush()

    def _count(self, epoch_batches: EpochBatches) -> tuple[SampleCounts, Mapping[int, int]]:
        """Gather the counts of each sample, and how many each worker has trained, and set the samples of the run.

        The coordinator has the counts of leases; streams have none.
        """
        transport, progress = self._trainer.transport, self._trainer.progress
        if isinstance(epoch_batches, LeasedEpoch):
            transport.all_gather_bytes(b"")  # all have settled their leases
            message = transport.broadcast_by_ranks(lambda: _audited_counts(epoch_batches))
            progress.count_all(progress.samples_before + int.from_bytes(message[:8]))
            packed, trained = _decoded([message[8:]])
            return functools.partial(_sample_counts, packed, epoch_batches), trained
        own = struct.pack("<qqq", transport.number, progress.own_samples_of_epoch, progress.take_dropped())
        if isinstance(epoch_batches, AssignedEpoch):
            told = transport.all_gather_bytes(lambda: own + _packed_counts(transport.number, epoch_batches))
        else:
            told = transport.all_gather_bytes(own)
        of_workers = [struct.unpack_from("<qqq", one) for one in told]
        if not self._trainer.strategy.asynchronous:
            progress.count_all(progress.samples - sum(dropped for *_, dropped in of_workers))
        if isinstance(epoch_batches, AssignedEpoch):
            packed, trained = _decoded([one[len(own) :] for one in told])
            return functools.partial(_sample_counts, packed, epoch_batches), trained
        assert isinstance(epoch_batches, StreamedEpoch)
        if epoch_batches.is_counted:
            return lambda: None, epoch_batches.trained()
        of_stream = Counter({worker: samples for worker, samples, _ in of_workers})
        of_stream.update(epoch_batches.departed)
        return lambda: None, of_stream

    def finish(self, has_worked: bool) -> None:
        """Evaluate and save the final model; evaluate only if any worker `has_worked`."""
        if has_worked:
            self.evaluate()
        self._trainer.transport.broadcast_by_ranks(self._save_final)

    def _save_final(self) -> bytes:
        """Save the final model, before other files that may not fit on the disk."""
        with self._trainer.rank_parts.whole():
            return self._save_whole()

    def _save_whole(self) -> bytes:
        files, notice = self._context.files, self._trainer.events.notice
        if files is None:
            return b"nowhere"
        tensors = self._whole_tensors()
        if self._trainer.rank_parts.rank:
            return b"saved"
        self._trainer.last_model.give_up()
        save_final(files, tensors, notice)
        if self._predictions is not None:
            try:
                files.write("predictions", functools.partial(_as_file, self._predictions))
            except OSError as error:
                notice(f"the predictions of the trained model could not be saved: {error.strerror}")
        return b"saved"

    def _whole_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the whole model at rank 0 of the worker, for a file; all its ranks call this."""
        return self._trainer.rank_parts.joined_tensors(saveable_tensors(self._trainer.model))

    def _write_epoch(self, summary: EpochSummary) -> bytes:
        figures = [msgspec.msgpack.decode(one) for one in summary.figures]
        drifts = [one.pop("drift") for one in figures]
        self._trainer.events.write(
            "epoch",
            epoch=summary.epoch,
            step=summary.step,
            samples=summary.samples,
            training_s=summary.training_s,
            drift=max((one for one in drifts if one is not None), default=None),
            workers=figures,
            sample_counts=summary.sample_counts(),
            trained=dict(sorted(summary.trained.items())),
        )
        self._save_state(f"states/{summary.samples:08d}")
        self._trainer.events.flush()
        return b"written"

    def _save_state(self, name: str) -> None:
        """Save the current model if the run keeps states."""
        folder = self._context.run
        if folder is not None and self._context.keep_states:
            with self._trainer.rank_parts.whole():
                self._save_whole_state(folder / name)

    def _save_whole_state(self, path: Path) -> None:
        tensors = self._whole_tensors()
        if self._trainer.rank_parts.rank:
            return
        try:
            path.parent.mkdir(exist_ok=True)
            _save(path, tensors, self._predictions)
        except (OSError, SafetensorError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or error
            raise LogError(f"{path} cannot be written: {why}") from error


def _as_file(array: NDArray[Any]) -> list[memoryview]:
    """Return the content of an array's .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return [file.getbuffer()]


def _packed_counts(number: int, epoch_batches: AssignedEpoch) -> bytes:
    """Return the counts of each sample by this worker, which has this number, and those of departed workers."""
    counted = epoch_batches.counted()
    return _encoded_counts(counted, {number: int(counted.sum())}, epoch_batches.departed_counts())


def _audited_counts(epoch_batches: LeasedEpoch) -> bytes:
    """Return the number of trained samples, in an earlier run, too, and the coordinator's counts of each."""
    counted, trained = epoch_batches.audited()
    return int(counted.sum()).to_bytes(8) + _encoded_counts(counted, trained)


def _encoded_counts(
    counted: NDArray[np.uint8],
    trained: dict[int, int],
    departed: tuple[int, NDArray[np.uint8], dict[int, int]] | None = None,
) -> bytes:
    """Encode counts of 0 and 1, compressed: every worker receives those of all, and each has few ones.

    `trained` is the number of samples by worker.
    """
    since, counts, before = departed or (-1, np.zeros(0, np.uint8), {})
    packed = (zlib.compress(np.packbits(one).tobytes(), 1) for one in (counted, counts))
    return msgspec.msgpack.encode([since, *packed, trained, before])


_COUNTS = msgspec.msgpack.Decoder(tuple[int, bytes, bytes, dict[int, int], dict[int, int]])


def _decoded(messages: Sequence[bytes]) -> tuple[list[bytes], Mapping[int, int]]:
    """Return the packed counts of each sample, and how many samples each worker has trained.

    The counts of departed workers are from the worker that has been a member for the longest time.
    """
    decoded = [_COUNTS.decode(one) for one in messages]
    longest = min((one for one in decoded if one[0] >= 0), key=lambda one: one[:3], default=None)
    packed = [*(own for _, own, *_ in decoded), *([longest[2]] if longest is not None else [])]
    trained: Counter[int] = Counter()
    for by_worker in (*(one[3] for one in decoded), longest[4] if longest is not None else {}):
        trained.update(by_worker)
    return packed, trained


def _sample_counts(packed: Sequence[bytes], epoch_batches: AssignedEpoch | LeasedEpoch) -> dict[str, int]:
    """Return how often each sample of the epoch counted, over all workers."""
    size = epoch_batches.order.bounds[-1]
    counts = [np.unpackbits(np.frombuffer(zlib.decompress(one), np.uint8), count=size) for one in packed]
    found, late = (
        audit(one[: epoch_batches.samples] for one in counts),
        audit(one[epoch_batches.samples :] for one in counts),
    )
    facts = {"once": found.once, "twice": found.twice + late.twice, "never": found.never + late.never}
    recovered_samples = {"recovered_samples": late.once} if size > epoch_batches.samples else {}
    return facts | {"dropped": epoch_batches.dropped, **recovered_samples}


def _save(path: Path, tensors: Mapping[str, Tensor], predictions: Predicted) -> None:
    tensors = {name: one.cpu().contiguous().clone() for name, one in tensors.items()}
    save_file(tensors, f"{path}.safetensors")
    if predictions is not None:
        np.save(f"{path}.predictions.npy", predictions)
