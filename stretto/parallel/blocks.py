"""Rows stay at a rank, column blocks rotate around the ring of ranks; what a rank does not hold is NaN.

    sub-epoch          0            1            2
    rank 0        column block 0    1            2        after each sub-epoch: its column block to rank 2
    rank 1                     1    2            0                                               to rank 0
    rank 2                     2    0            1                                               to rank 1

A column block is the entries of its columns in each table, and in the state that the optimizer keeps of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from stretto.data.assignment import Ranges
from stretto.data.balance import Numbers
from stretto.loader.arrangement import Batch
from stretto.parallel.block_order import blocks_of, loader_length
from stretto.parallel.block_refusals import (
    refuse_evaluations_by_steps,
    refuse_idle_ranks,
    refuse_left_epochs,
    refuse_optimizers,
    refuse_other_order,
    refuse_others,
    refuse_some_steps,
    refuse_tables_elsewhere,
    tables_of,
)
from stretto.parallel.mapped_tables import MappedTables
from stretto.parallel.rank_parts import RankContext, RankParts
from stretto.parallel.read_guard import ReadGuard
from stretto.recipe.layout import blocks

PART = 4 << 20
"""Bytes of a message with entries of tables, about."""
_BATCHES = msgspec.msgpack.Decoder(list[list[int]])


class BlockRing(RankParts):
    """One rank of a ring of blocks. The model is whole at every rank before and after each epoch."""

    divides_batches = True

    def __init__(self, layout: blocks, context: RankContext) -> None:
        self._context, self._link = context, context.link
        self.rank = self._link.rank
        refuse_evaluations_by_steps(context.evaluate_every)
        refuse_optimizers(context.optimizers.each)
        self._rows = tables_of(context.model, layout.row_tables, layout)
        self._columns = tables_of(context.model, layout.column_tables, layout)
        refuse_others(context.model, [*self._rows, *self._columns], layout)
        sizes = len(self._rows[0]), len(self._columns[0])
        self._blocks = blocks_of(context.loader, *sizes, self._link.ranks, layout.column_blocks)
        self._mapped = self._in_files() if layout.column_blocks > 1 else MappedTables()
        self._whole_every = layout.whole_every
        self._piece = 0
        """The piece of its column block that this rank trains."""
        self._column: int | None = None
        """The column block that this rank trains; None between two epochs."""
        self._is_hidden = False
        """True while entries that other ranks hold are NaN at this one."""
        self._has_stepped: bool | None = None
        """True if the batches of this epoch so far had a step each; None before the first has ended."""
        self._checked: Sequence[Any] = ()
        """The last order of samples that was found to be one of these blocks."""
        self._guard = ReadGuard([*context.model.modules(), *context.optimizers])
        self._hooks = [one.register_step_pre_hook(self._before_step) for one in context.optimizers]

    def close(self) -> None:
        """Hold the whole model: the script may use it after the end of the section."""
        self._hold_all()
        for hook in self._hooks:
            hook.remove()

    # --- the order of an epoch ----------------------------------------------------------------------------------

    def arranged(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches of an epoch by blocks, as rank 0 has drawn them."""
        drawn = msgspec.msgpack.encode(self._blocks.arranged(batches)) if self.rank == 0 else b""
        found = _BATCHES.decode(self._link.broadcast(drawn))
        refuse_idle_ranks(found[:1], self._blocks.row_block, self._link.ranks)
        return found

    def loaded(self, batch: Batch) -> Batch:
        """Return the samples of a batch whose rows this rank holds."""
        own: list[int] = np.asarray(batch)[self._blocks.row_block[batch] == self.rank].tolist()
        return own

    def length(self, loader: DataLoader[Any]) -> int:
        """Return the number of batches of an epoch."""
        return loader_length(self._blocks, loader)

    def enter(self, flat: Sequence[Any], ranges: Ranges) -> bool:
        """Hold the column block of this batch. Return False if this rank loads none of its samples.

        The model stays whole until the first step or the second batch: a script may look at one before it trains.
        """
        batch = [one for start, stop in ranges for one in flat[start:stop]]
        column = (self.rank + self._sub_epoch_of(flat, batch)) % self._link.ranks
        if self._column is None:
            self._column = column
        elif not self._is_hidden:
            self._hide()
        while self._column != column:
            self._rotate()
        own = self.loaded(batch)
        if own and self._blocks.piece[own[0]] != self._piece:
            self._piece = int(self._blocks.piece[own[0]])
            self._mapped.release()
        return bool(own)

    def _sub_epoch_of(self, flat: Sequence[Any], batch: Batch) -> int:
        """Return the sub-epoch of a batch. Raise ModelError in an epoch whose order is not that of these blocks."""
        if flat is not self._checked:
            self._checked = flat
            refuse_other_order((np.diff(self._blocks.sub_epochs(flat)) >= 0).all(), self._link.ranks)
        sub_epochs = self._blocks.sub_epochs(batch)
        refuse_other_order(len(batch) > 0 and (sub_epochs == sub_epochs[0]).all(), self._link.ranks)
        return int(sub_epochs[0])

    def _before_step(self, *_: Any) -> None:
        if self._column is not None and not self._is_hidden:
            self._hide()

    def end_batch(self, has_stepped: bool) -> None:
        """Note a batch with a step, or without one. Raise ScriptError if an epoch has both."""
        refuse_some_steps(self._has_stepped in (None, has_stepped))
        self._has_stepped = has_stepped

    def end_epoch(self, is_left: bool, number: int) -> None:
        """Hold the whole model, if it is due. Raise ScriptError if the script has left the epoch early."""
        refuse_left_epochs(is_left)
        self._has_stepped = None
        if number % self._whole_every == 0:
            self._hold_all()

    def gathered(self, own: bytes) -> Sequence[bytes]:
        """Return the messages of all ranks; they call this together."""
        return self._link.gather(own)

    def agreed(self, is_so: bool) -> bool:
        """Return True if all ranks pass True; they call this together, also those without a part of a batch."""
        return all(one == b"yes" for one in self._link.gather(b"yes" if is_so else b"no"))

    # --- what this rank holds -----------------------------------------------------------------------------------

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold the whole model and the whole state of the optimizer within; all ranks call this."""
        was_hidden = self._is_hidden
        if self._column is not None:
            self._gather()
        try:
            yield
        finally:
            if was_hidden:
                self._hide()
            self._mapped.release()

    @property
    def is_whole(self) -> bool:
        """True if each rank holds the whole model."""
        return self._column is None

    def _hold_all(self) -> None:
        """Hold the whole model, and do not belong to a column block any more."""
        if self._column is not None:
            self._gather()
        self._column = None

    @torch.no_grad()
    def _in_files(self) -> MappedTables:
        """Move the tables, and what the optimizers keep of their entries, to files."""
        made = MappedTables()
        kept = {id(one): state for one, state in self._context.optimizers.states()}
        for table in [*self._rows, *self._columns]:
            refuse_tables_elsewhere(table)
            table.data = made.moved(table.data)
            state = kept.get(id(table), {})
            state.update((name, made.moved(one)) for name, one in state.items() if _is_of_entries(one, table))
        made.release()
        return made

    @torch.no_grad()
    def _hide(self) -> None:
        """Set all entries to NaN that this rank does not hold."""
        assert self._column is not None
        self._is_hidden = True
        self._guard.shut()
        for tables, of, held in self._sides(self._column):
            _fill(tables, np.flatnonzero(of != held))
        self._mapped.release()

    @torch.no_grad()
    def _gather(self) -> None:
        """Receive the entries that the other ranks hold, in parts."""
        assert self._column is not None
        link, shift = self._link, self._column - self.rank
        held = [self._sides((rank + shift) % link.ranks, rank) for rank in range(link.ranks)]
        for side, (tables, _, _) in enumerate(held[0]):
            entries = [np.flatnonzero(of == block) for _, of, block in (one[side] for one in held)]
            size = max(1, PART // sum(table[:1].nbytes for table in tables))
            for start in range(0, max(map(len, entries)), size):
                parts = [one[start : start + size] for one in entries]
                others = {rank: part for rank, part in enumerate(parts) if rank != self.rank}
                self._exchange(tables, dict.fromkeys(others, parts[self.rank]), others)
        self._is_hidden = False
        self._guard.open()
        self._mapped.release()

    @torch.no_grad()
    def _rotate(self) -> None:
        """Send the column block to the rank before this one, and receive that of the next, piece by piece."""
        assert self._column is not None
        ranks, sent, received = self._link.ranks, self._column, (self._column + 1) % self._link.ranks
        tables = self._state_of(self._columns)
        for piece in range(self._blocks.pieces):
            gone, come = self._columns_of(sent, piece), self._columns_of(received, piece)
            self._exchange(tables, {(self.rank - 1) % ranks: gone}, {(self.rank + 1) % ranks: come})
            if self._is_hidden:
                _fill(tables, gone)
        self._column = received
        self._mapped.release()
        self._context.on_exchange()

    def _exchange(self, tables: Sequence[Tensor], sent: Mapping[int, Numbers], received: Mapping[int, Numbers]) -> None:
        """Exchange entries of tables with other ranks: `sent` to each, and `received` from each."""
        none = np.empty(0, np.int64)
        begun = []
        for rank in sorted({*sent, *received}):
            own, come = (one.get(rank, none) for one in (sent, received))
            for table in tables:
                place = _entries(table, come) if _follow(come) else None
                begun.append((table, come, place, self._link.exchange(_entries(table, own), rank, 0, place)))
        for table, come, place, incoming in begun:
            found = incoming.wait(torch.Size([len(come), *table.shape[1:]]), table.dtype)
            if place is None or found.data_ptr() != place.data_ptr():
                table[come] = found

    def _columns_of(self, column: int, piece: int) -> Numbers:
        return np.flatnonzero((self._blocks.of_column == column) & (self._blocks.piece_of == piece))

    def _sides(self, column: int, rank: int | None = None) -> list[tuple[list[Tensor], Numbers, int]]:
        """Return the tables of rows and of columns, the block of each entry, and the block that a rank holds."""
        rows, columns = self._state_of(self._rows), self._state_of(self._columns)
        held = self.rank if rank is None else rank
        return [(rows, self._blocks.of_row, held), (columns, self._blocks.of_column, column)]

    def _state_of(self, tables: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the values of these tables, and what the optimizers keep of each entry."""
        kept = {id(one): state for one, state in self._context.optimizers.states()}
        found: list[Tensor] = []
        for table in tables:
            states = [value for _, value in sorted(kept.get(id(table), {}).items())]
            found += [table.data, *(one for one in states if _is_of_entries(one, table))]
        return found


def _follow(entries: Numbers) -> bool:
    """Return True for numbers of entries, in order, that follow each other."""
    return len(entries) > 0 and bool(entries[-1] - entries[0] + 1 == len(entries))


def _entries(table: Tensor, entries: Numbers) -> Tensor:
    """Return entries of a table: a view if they follow each other, otherwise a copy."""
    return table[entries[0] : entries[-1] + 1] if _follow(entries) else table[entries]


def _is_of_entries(state: Any, table: Tensor) -> bool:
    """Return True for a state that an optimizer keeps of each entry of a table."""
    return isinstance(state, Tensor) and state.shape == table.shape


def _fill(tables: Sequence[Tensor], entries: Numbers) -> None:
    """Set these entries to NaN."""
    for table in tables:
        table.index_fill_(0, torch.from_numpy(entries).to(table.device), float("nan"))
