"""The newest model on which the workers have agreed, kept for a run that ends without its final model.

    first worker, its script                 its writer thread            launcher
      | end of an epoch: replicas compared       |                            |
      | -- copy in memory ---------------------> | writes it when it is due   |
      | (the script raises: writes the copy)     |                            |
      |                                          | <- asks for the copy ----- | another worker has failed, or Ctrl-C
      |                                          | writes it                  | notes the cause in the file, names it
      | (the script ends: writes the final model, which replaces the last one)

A model is kept at the end of each epoch. Within an epoch it is kept, if that is due, where replicas were compared and,
where workers do not wait, as the server has it. Keeping there and writing take at most `interval.SHARE` of the time
each, by what they took before; the first model is written immediately. A file that the launcher finds after a kill is
therefore older than the copy by little.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn

from stretto.checkpoint.background_writer import lower_priority
from stretto.checkpoint.final_model import save_last, saveable_tensors
from stretto.checkpoint.model_file import CAUSE_BYTES, UNKNOWN
from stretto.checkpoint.storage import tensor_chunks
from stretto.interval import pause_after
from stretto.membership.worker_status import KeptModel, status
from stretto.parallel.mapped_tables import moved_to_file
from stretto.parallel.rank_parts import RankParts
from stretto.runtime.event_writer import EventWriter
from stretto.training.progress import LoopProgress
from stretto.training.worker_context import WorkerContext
from stretto.transport import Transport
from stretto.transport.device_memory import host_memory

LOOK_S = 0.05
"""Interval at which the writer looks if the launcher asks for the model."""


class KeptTrainer(Protocol):
    """The attributes of a trainer whose model is kept."""

    model: nn.Module
    transport: Transport
    events: EventWriter
    progress: LoopProgress
    rank_parts: RankParts


class LastModel:
    """The newest agreed model, at rank 0 of the first worker. Memory: one copy of the model, two while one is written.

    Of a worker of several processes, and of embeddings with sparse gradients, large tensors are copied to files without
    a name in the folder of temporary files.
    """

    def __init__(self, trainer: KeptTrainer, context: WorkerContext) -> None:
        self._trainer, self._files, self._clock = trainer, context.files, context.runtime.clock
        self._in_background = context.runtime.own_process
        self._condition = threading.Condition()
        self._kept: dict[str, Tensor] = {}
        self._metadata: dict[str, str] = {}
        """Epoch and step of the kept model; empty without one."""
        self._is_unwritten = self._is_writing = self._is_given_up = False
        self._keep_at = self._write_at = 0.0
        """Times from which keeping within an epoch, and writing, are due."""
        self._is_noticed = False
        self._thread: threading.Thread | None = None

    # --- keeping ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def keep(self, epochs: int, if_due: bool = False, agreed: AbstractContextManager[None] | None = None) -> None:
        """Keep the model, on which all workers agree now, or within `agreed`, after this number of complete epochs.

        All ranks of all workers call this. A model with a NaN, or with an infinite parameter, is not kept: the one
        before stays, as it does if the ranks of a worker leave the model divided. `if_due`: only if that is due, and
        workers are of one process.
        """
        trainer, began = self._trainer, self._clock()
        if self._files is None or not trainer.rank_parts.is_whole:
            return
        if trainer.transport.worker:  # another worker is the first, and keeps newer models
            self.give_up()
            return
        parts = trainer.rank_parts
        if if_due and (began < self._keep_at or trainer.transport.siblings is not None):
            return
        with agreed or nullcontext(), parts.whole():
            own = saveable_tensors(trainer.model)
            tensors = parts.joined_tensors(own)
            if not parts.rank and self._is_finite(tensors):
                self._copy(tensors, own, {"epoch": str(epochs), "step": str(trainer.progress.steps)})
        now = self._clock()
        self._keep_at = now + pause_after(now - began)

    def _is_finite(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return True if no parameter is NaN or infinite and no buffer is NaN: masks hold infinities."""
        parameters = {name for name, _ in self._trainer.model.named_parameters(remove_duplicate=False)}
        return all(_has_no_nan(one, name in parameters) for name, one in tensors.items() if one.is_floating_point())

    def _copy(self, tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        """Copy tensors that the model still changes, its `own`; the others were gathered from other ranks."""
        trainer = self._trainer
        in_files = _looked_up(trainer.model) if trainer.transport.siblings is None else tensors.keys()
        with self._condition:
            memory = {} if self._is_writing else self._kept
            self._is_unwritten, self._kept, self._metadata = False, {}, {}
        copies = {}
        for name, tensor in tensors.items():
            if tensor is not own.get(name):
                copies[name] = tensor
                continue
            here = tensor.detach().cpu() if name in in_files else tensor
            moved = moved_to_file(here) if name in in_files else here
            if moved is here:
                target = memory.get(name)
                is_alike = target is not None and (target.shape, target.dtype) == (tensor.shape, tensor.dtype)
                target = target if is_alike and target is not None else host_memory(tensor, tensor.device)
                moved = target.copy_(tensor)
            copies[name] = moved
        with self._condition:
            self._kept, self._metadata = copies, metadata
            self._is_unwritten, self._is_given_up = True, False
            status.keep(KeptModel.WRITING if self._is_writing else KeptModel.UNWRITTEN)
            if self._thread is None and self._in_background:
                self._thread = threading.Thread(target=self._work, name="last model", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    # --- writing ------------------------------------------------------------------------------------------------

    def write(self, cause: str) -> None:
        """Write the kept model if it is not on the disk yet, since the run ends without a final one.

        Raises LogError if it cannot be written anywhere.
        """
        with self._condition:
            self._condition.wait_for(lambda: not self._is_writing)
            is_unwritten, self._is_unwritten = self._is_unwritten, False
            self._is_writing = is_unwritten
        if is_unwritten and self._files is not None:
            status.keep(KeptModel.WRITING)
            metadata = {**self._metadata, "cause": cause[:CAUSE_BYTES]}
            try:
                save_last(self._files, self._kept, metadata, self._trainer.events.notice)
            finally:
                self._note_written()

    def give_up(self) -> None:
        """Forget the kept model, since another one replaces it, and end the thread; a write under way is broken off."""
        with self._condition:
            self._is_unwritten, self._is_given_up = False, True
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._is_writing)
            self._kept, self._metadata = {}, {}
            status.keep(KeptModel.WRITTEN)

    @property
    def place(self) -> str | None:
        """The folder that the last model is in; None if none was kept."""
        return self._files.place if self._files is not None and self._metadata else None

    def _work(self) -> None:
        lower_priority()
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_unwritten or self._is_given_up)
                if self._is_given_up:
                    self._thread = None
                    return
                while self._is_unwritten and self._clock() < self._write_at and not status.is_model_asked_for:
                    self._condition.wait(LOOK_S)
                if not self._is_unwritten:
                    continue
                self._is_unwritten, self._is_writing = False, True
                status.keep(KeptModel.WRITING)
                kept, metadata = self._kept, self._metadata
            began = self._clock()
            problem = self._write(kept, {**metadata, "cause": UNKNOWN})
            now = self._clock()
            self._write_at = now + pause_after(now - began)
            self._note_written()
            if problem is not None and not self._is_given_up and not self._is_noticed:
                self._is_noticed = True
                self._trainer.events.say(f"the last model could not be written: {problem.strerror}; training continues")

    def _write(self, kept: Mapping[str, Tensor], metadata: Mapping[str, str]) -> OSError | None:
        def chunks() -> Iterator[memoryview]:
            for chunk in tensor_chunks(kept, metadata, CAUSE_BYTES):
                if self._is_given_up:
                    raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
                yield chunk

        assert self._files is not None
        try:
            self._files.write("last", chunks)
        except OSError as error:
            return error
        return None

    def _note_written(self) -> None:
        with self._condition:
            self._is_writing = False
            status.keep(KeptModel.UNWRITTEN if self._is_unwritten else KeptModel.WRITTEN)
            self._condition.notify_all()


def _has_no_nan(tensor: Tensor, or_infinity: bool) -> bool:
    if bool(torch.isfinite(tensor.sum(dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32))):
        return True  # for finite numbers the sum may overflow, and be infinite
    return not bool(((~tensor.isfinite()) if or_infinity else tensor.isnan()).any())


def _looked_up(model: nn.Module) -> set[str]:
    """Return the names of tables of embeddings with sparse gradients, which may be larger than memory."""
    tables = {id(module.weight) for module in model.modules() if getattr(module, "sparse", False) is True}
    return {name for name, one in model.named_parameters(remove_duplicate=False) if id(one) in tables}
