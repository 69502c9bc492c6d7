"""The sections of one worker's process: each `distribute` ends the one before it and begins another.

All sections use one transport: the coordinator, the shards and the other workers see one run, whose numbers continue.
The first section writes to the run folder, section k to `section-k` in it, a run folder of its own. A worker that is
started again, and a run that is resumed, find out in which section the others are, or the checkpoint is: the sections
before that one have empty loaders, and their models are read from the run folder.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from stretto.checkpoint import state_transfer
from stretto.checkpoint.file_messages import Kind
from stretto.checkpoint.folder import DamagedError
from stretto.checkpoint.run_files import CheckpointPlace, RunFiles
from stretto.checkpoint.storage import State
from stretto.errors import LaunchError, LoaderError, LogError, ScriptError, StaysOutError, explain
from stretto.loader.data_digest import digest_of, refuse_other_data
from stretto.loader.epoch_order import unpack
from stretto.membership.epoch_numbers import section_of
from stretto.membership.worker_status import status
from stretto.run_dir import section_folder
from stretto.runtime.event_writer import open_folder
from stretto.training.arguments import Arguments
from stretto.training.checkpointed import own_of, script_state
from stretto.training.section import Section, continued
from stretto.training.trainer import Trainer
from stretto.training.worker_context import WorkerContext
from stretto.transport import Transport


class Sections:
    """The sections of one process, and the transport that they share."""

    def __init__(self, context: WorkerContext) -> None:
        self._context, self._script = context, script_state()
        self._transport: Transport | None = None
        self._kind: tuple[int, bool] | None = None
        self._number = 0
        """The section that began last."""
        self._entered = Section()
        """The section of the other workers when this one joined, or of the checkpoint."""
        self._next = Section()
        self._trainer: Trainer | None = None
        """The trainer of the open section; None after its end, and in a section that is skipped."""
        self.last: Trainer | None = None
        """The trainer that was made last, whose section may have ended."""
        self._is_open = False
        """True between the beginning of a section and its end, skipped or not."""
        self._zero = 0.0
        self._is_asked = False
        """True if this worker was asked to leave."""

    @property
    def is_skipped(self) -> bool:
        """True if the section that began last was over before this worker came."""
        return 0 < self._number < self._entered.number

    @property
    def skipped(self) -> tuple[int, int] | None:
        """The number of a section that is skipped, and how many exchanges this worker has begun; None in others."""
        if not self.is_skipped or self._transport is None:
            return None
        return self._number, max(self._transport.operations_begun(), 0)

    def begin(self, arguments: Arguments) -> Trainer | None:
        """End the section before, and begin another. Return None if it was over before this worker came.

        Raises ScriptError for a recipe that needs another kind of connection, and LoaderError for data that differ.
        """
        self.end()
        transport = self._reach(arguments)
        self._number += 1
        self._is_open = self.is_skipped
        if self.is_skipped:
            self._script.is_passing = True
            self._skip(arguments)
            return None
        section, began = self._section(transport), self._context.runtime.clock()
        try:
            context = self._section_context(section, transport, arguments.loader)
            trainer = Trainer(context, transport, arguments, section)
        except BaseException as error:
            transport.abandon(stays_out=isinstance(error, StaysOutError))
            raise
        self._trainer = self.last = trainer
        self._is_open = True
        if section.number == self._entered.number:
            self._zero = trainer.events.zero - section.seconds
        section.seconds = trainer.events.zero - self._zero
        if section.number > self._entered.number and transport.worker == 0:
            name = section_folder(Path(), section.number).name
            self._write("section", began, section=section.number, folder=name)
        if self._is_asked:
            trainer.agent.ask_to_leave()
        return trainer

    @property
    def first_workers(self) -> int:
        """Number of workers that the run first began with, as far as a state says."""
        state = self._entered.state
        return (
            int(state.facts.get("first_workers", self._context.workers)) if state is not None else self._context.workers
        )

    def end(self) -> None:
        """End the section that has begun last, if it has not ended. The transport stays open for the next one.

        All workers continue with the random states of the first, so that the script draws the same numbers on all.
        """
        is_open, self._is_open = self._is_open, False
        if not is_open:
            return
        if self.is_skipped:
            self._take_random_states(self._read_random())
            return
        trainer = self._end()
        transport, files = trainer.transport, self._context.at_section(self._number).files
        if trainer.agent.left:
            return
        random_states = transport.broadcast_bytes(
            lambda: _keep(state_transfer.pack_own(state_transfer.random_states(None)), files)
        )
        if transport.worker:
            self._take_random_states(random_states)

    def close(self) -> None:
        """End the section that has begun last, and let go of the other workers."""
        if self._trainer is not None:
            self._end(is_last=True)
        self._is_open = False
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
            status.finish()

    def write_last_model(self, cause: str) -> Path | None:
        """Write the last model that the workers agreed on in a section that ends without a final one.

        Returns the folder that has it, as far as this worker knows; None without one.
        """
        last = self.last.last_model if self.last is not None else None
        if last is None:
            return None
        try:
            last.write(cause)
        except LogError as error:
            print(f"stretto: {error}", file=sys.stderr, flush=True)
        return Path(last.place) if last.place is not None else None

    def abandon(self, cause: str | None) -> float:
        """Write the rest of a failed section's log; return the seconds since the first section began.

        `cause` is that of the failure; None if the run continues without this worker.
        """
        if cause is not None:
            self.write_last_model(cause)
        trainer = self._trainer
        if trainer is None:
            if self._transport is not None:
                self._transport.abandon()
            return self._context.runtime.clock() - self._zero if self._number else 0.0
        t = trainer.events.t() + trainer.section.seconds
        trainer.abandon()
        return t

    def ask_to_leave(self) -> None:
        """Leave the others gracefully as soon as that is possible; a signal's handler may ask."""
        self._is_asked = True
        if self._trainer is not None:
            self._trainer.agent.ask_to_leave()

    def _end(self, is_last: bool = False) -> Trainer:
        trainer, self._trainer = self._trainer, None
        assert trainer is not None
        trainer.end(is_last)
        self._next = trainer.next_section()
        return trainer

    # --- where the others are -----------------------------------------------------------------------------------

    def _reach(self, arguments: Arguments) -> Transport:
        """Return the transport; the first section creates it, and determines the section of the other workers."""
        recipe = arguments.recipe
        kind = (recipe.shards, recipe.asynchronous) if recipe is not None and recipe.shards else (0, False)
        if self._transport is not None and kind != self._kind:
            raise ScriptError(
                explain(
                    "the recipe needs another kind of connection than the first distribute of this process",
                    got=f"{recipe}: {_in_words(kind)}",
                    expected=_in_words(self._kind or kind),
                    to_type="one recipe for all, with --recipe or in every call of stretto.distribute",
                )
            )
        self._context.runtime.on_distribute(  # before the others are waited for
            arguments.model, arguments.optimizers, arguments.loader, recipe
        )
        if self._transport is None:
            self._kind = kind
            self._transport = self._context.transport_for(recipe, arguments.device)
            if self._context.opens_folder:
                self._context = self._context.with_folder(open_folder(self._transport, self._context.asked(recipe)))
            self._entered = self._where(self._transport, arguments.model)
            self._script.is_looked_up = True
            if (state := self._entered.state) is not None:
                self._script.take(own_of(state, self._transport.number, self._transport.members))
        return self._transport

    def _where(self, transport: Transport, model: nn.Module) -> Section:
        """Return the section that the others are in, or that a checkpoint is of, with its state."""
        if transport.arrives and transport.join_position is not None:
            if kept := unpack(transport.join_position.order).earlier.kept:
                self._script.take(state_transfer.unpack_own(kept))
            return Section(section_of(transport.join_position.epoch_number))
        if transport.arrives:
            frozen = state_transfer.frozen_tensors(model)
            state = state_transfer.unpack(transport.receive_state(lambda: state_transfer.checksum(frozen)))
            state.tensors = frozen | state.tensors
            return continued(state)
        begins_again = transport.begins_again
        if self._context.resume is None and not begins_again:
            return Section()
        with tempfile.TemporaryDirectory(prefix="stretto-") as scratch:
            return self._continued(transport, begins_again, Path(scratch))

    def _continued(self, transport: Transport, begins_again: bool, scratch: Path) -> Section:
        """Return the section of a checkpoint that worker 0 finds, and that each worker reads."""
        notices, found = list[str](), dict[bytes, State]()
        found_by_first = transport.broadcast_bytes(lambda: self._find(begins_again, notices, scratch, found))
        if not found_by_first:
            return continued(State({}, {}), notices)
        state = found.get(found_by_first)
        if state is None:
            of_run, *which = msgspec.msgpack.decode(found_by_first, type=tuple[bool, int, int, int])
            files = self._context.files if of_run else self._context.resumed_files
            assert files is not None
            try:
                state = files.read(CheckpointPlace(*which), scratch)
            except (OSError, DamagedError) as error:
                raise LogError(f"the checkpoint that worker 0 has read cannot be read here: {error}") from error
        return continued(State(state_transfer.from_text(state.facts), state.tensors, state.own), notices)

    def _find(self, begins_again: bool, notices: list[str], scratch: Path, found: dict[bytes, State]) -> bytes:
        """Find the newest whole checkpoint of this run, if it begins again, or else of the run that is resumed.

        Returns the message that says which one it is, b"" if a run begins again that has none.
        """
        resumed = self._context.resumed_files
        for of_run, files in ((True, self._context.files if begins_again else None), (False, resumed)):
            checkpoint = files.newest(scratch, notices.append) if files is not None else None
            if checkpoint is not None:
                notices.append(f"continues from the checkpoint of round {checkpoint.which.round} in {checkpoint.place}")
                message = msgspec.msgpack.encode((of_run, *checkpoint.which))
                found[message] = checkpoint.state
                return message
        if resumed is None:
            return b""
        problem, expected = f"there is no complete checkpoint in {resumed.place}", "a run with --checkpoint-every"
        got, to_type = "no checkpoint to continue from", "stretto run without --resume, with --checkpoint-every"
        raise LaunchError(explain(problem, got=got, expected=expected, to_type=to_type))

    # --- a section that begins ----------------------------------------------------------------------------------

    def _section(self, transport: Transport) -> Section:
        """Return the section that begins. A worker that came late to the section before is in time now."""
        if self._number == self._entered.number:
            return self._entered
        transport.caught_up()
        return self._next

    def _section_context(self, section: Section, transport: Transport, loader: Any) -> WorkerContext:
        """Return the context of this worker in a section, whose folder is created."""
        context = self._context
        if section.number == 1:
            return context
        if section.number > self._entered.number:
            context = context.from_first_section()
        data, folder = digest_of(loader), self._folder(section.number)
        if transport.arrives:
            refuse_other_data(data, _data_of(context.files, section), "comes to a section whose data are not its own")
        else:
            self._agree_on_data(transport, data)
            transport.broadcast_bytes(lambda: self._make(section, transport, data))
        if folder is not None:
            folder.mkdir(exist_ok=True)
        return context.at_section(section.number)

    def _agree_on_data(self, transport: Transport, data: str) -> None:
        digests = transport.all_gather_bytes(data.encode())
        other = next((worker for worker, digest in enumerate(digests) if digest != digests[0]), None)
        if other is not None:
            raise LoaderError(
                explain(
                    f"the data of worker {other} differ from those of worker 0 in section {self._number}",
                    got="data that each worker has drawn with random numbers of its own",
                    expected="the same data, in the same order, at every worker",
                    to_type="stretto.finish() before the data are drawn, or random_split(..., generator="
                    "torch.Generator().manual_seed(fold))",
                )
            )

    def _make(self, section: Section, transport: Transport, data: str) -> bytes:
        """Make the folder of a section, at the first worker."""
        resumed = self._context.resumed_files
        if section.number == self._entered.number:
            refuse_other_data(data, _data_of(resumed, section), "continues with other data than the resumed run had")
        if (files := self._context.files) is not None:
            absent = sorted(set(range(self._context.workers)) - set(transport.members))
            files.begin_section(section.number, data, absent)
        return b"made"

    def _folder(self, number: int) -> Path | None:
        return section_folder(self._context.run, number) if self._context.run is not None else None

    def _write(self, kind: str, at: float, /, **carries: object) -> None:
        """Write an event into the log of the whole run. An event that cannot be written is lost."""
        log = self._context.event_log(self._transport.number) if self._transport is not None else None
        if log is None:
            return
        log.write(kind, at - self._zero, at=round(at, 6), **carries)
        with contextlib.suppress(LogError):
            log.close()

    # --- a section that is skipped --------------------------------------------------------------------------------

    def _ended(self, kind: Kind, scratch: Path) -> Path | None:
        """Return a file of the skipped section, from this run or from the run that is resumed."""
        for files in (self._context.files, self._context.resumed_files):
            with contextlib.suppress(OSError):
                if files is not None and (path := files.find(kind, self._number, scratch)) is not None:
                    return path
        return None

    @torch.no_grad()
    def _skip(self, arguments: Arguments) -> None:
        """Give the model the values that it had at the end of a section that was over before this worker came."""
        arguments.build()
        model = arguments.model
        with tempfile.TemporaryDirectory(prefix="stretto-") as scratch:
            path, tensors = self._ended("final", Path(scratch)), {}
            if path is not None:
                with contextlib.suppress(OSError, SafetensorError):
                    tensors = load_file(path)
        named = state_transfer.state_dict_of(model)
        fits = {name for name, tensor in tensors.items() if name in named and named[name].shape == tensor.shape}
        for name in fits:
            named[name].copy_(tensors[name])
        if not fits:
            text = f"the model that section {self._number} ended with is not here; the script's own stays as it is"
            self._write("warning", self._context.runtime.clock(), text=text)

    def _read_random(self) -> bytes:
        with tempfile.TemporaryDirectory(prefix="stretto-") as scratch:
            path = self._ended("random", Path(scratch))
            return path.read_bytes() if path is not None else b""

    def _take_random_states(self, random_states: bytes) -> None:
        if random_states:
            state_transfer.restore_random_states(state_transfer.unpack_own(random_states), None)


def _data_of(files: RunFiles | None, section: Section) -> str:
    """Return the digest of the data that a section of a run has; "" if it is not known."""
    with contextlib.suppress(LogError, msgspec.DecodeError):
        return files.data_of(section.number) if files is not None else ""
    return ""


def _keep(random_states: bytes, files: RunFiles | None) -> bytes:
    """Keep random states for a worker that comes later; a disk that does not take them costs no more than that."""
    if files is not None:
        with contextlib.suppress(OSError):
            files.write("random", lambda: [memoryview(random_states)])
    return random_states


def _in_words(kind: tuple[int, bool]) -> str:
    shards, asynchronous = kind
    servers = "a server" if shards == 1 else f"{shards} servers"
    if not shards:
        return "workers exchange with each other"
    return f"workers exchange over {servers}, and {'do not wait' if asynchronous else 'wait'} for each other"
