"""Rows stay at a rank, column blocks rotate around the ring of ranks; what a rank does not hold is NaN.

    sub-epoch          0            1            2
    rank 0        column block 0    1            2        after each sub-epoch: its column block to rank 2
    rank 1                     1    2            0                                               to rank 0
    rank 2                     2    0            1                                               to rank 1

A column block is the entries of its columns in each table, and in the state that the optimizer keeps of them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer
from torch.utils.data import DataLoader

from stretto.data.assignment import Ranges
from stretto.errors import ModelError, ScriptError, explain
from stretto.loader.arrangement import Batch
from stretto.parallel.block_order import Numbers, blocks_of, loader_length
from stretto.parallel.rank_parts import RankContext, RankParts
from stretto.recipe.layout import as_option, blocks
from stretto.transport.tensor_bytes import Packed, packed, unpacked

_OPTIONS: dict[type[Optimizer], tuple[str, str]] = {
    SGD: ("momentum", "weight_decay"),
    Adagrad: ("lr_decay", "weight_decay"),
}
"""Optimizers of rows, with the options that would make them change other rows."""
_BATCHES = msgspec.msgpack.Decoder(list[list[int]])


class BlockRing(RankParts):
    """One rank of a ring of blocks. The model is whole until the first batch."""

    def __init__(self, layout: blocks, context: RankContext) -> None:
        self._context, self._link = context, context.link
        self.rank = self._link.rank
        _refuse_steps(context.evaluate_every)
        _refuse_optimizers(context.optimizers.each)
        self._rows = _tables(context.model, layout.row_tables, layout)
        self._columns = _tables(context.model, layout.column_tables, layout)
        _refuse_others(context, [*self._rows, *self._columns], layout)
        sizes = len(self._rows[0]), len(self._columns[0])
        self._blocks = blocks_of(context.loader, *sizes, self._link.ranks)
        self._column: int | None = None
        """The column block that this rank holds; None while it holds the whole model."""
        self._is_whole = False
        """True within `whole`."""

    def begin(self, facts: Any) -> None:
        """Let `state_dict()` of the model and of its optimizers return the whole state, at all ranks together."""
        for one in (self._context.model, *self._context.optimizers):
            one.state_dict = functools.partial(self._whole_state, one)

    def close(self) -> None:
        """Gather the whole model at all ranks: the script may use it after the end of the section."""
        self._gather()
        self._column = None
        for one in (self._context.model, *self._context.optimizers):
            vars(one).pop("state_dict", None)

    # --- the order of an epoch ----------------------------------------------------------------------------------

    def arranged(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches of an epoch by blocks, as rank 0 has drawn them."""
        drawn = msgspec.msgpack.encode(self._blocks.arranged(batches)) if self.rank == 0 else b""
        return _BATCHES.decode(self._link.broadcast(drawn))

    def loaded(self, batch: Batch) -> Batch:
        """Return the samples of a batch whose rows this rank holds."""
        return [one for one in batch if self._blocks.row_block[one] == self.rank]

    def length(self, loader: DataLoader[Any]) -> int:
        """Return the number of batches of an epoch."""
        return loader_length(self._blocks, loader)

    def enter(self, flat: Sequence[Any], ranges: Ranges) -> bool:
        """Hold the column block of this batch. Return False if this rank loads none of its samples."""
        batch = [one for start, stop in ranges for one in flat[start:stop]]
        sub_epochs = np.unique(self._blocks.sub_epochs(batch))
        if len(sub_epochs) != 1:
            raise ModelError(_other_order(self._link.ranks))
        column = (self.rank + int(sub_epochs[0])) % self._link.ranks
        if self._column is None:
            self._column = column
            self._hide()
        while self._column != column:
            self._rotate()
        return bool(self.loaded(batch))

    # --- what this rank holds -----------------------------------------------------------------------------------

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Hold the whole model and the whole state of the optimizer within; all ranks call this."""
        if self._is_whole or self._column is None:
            yield
            return
        self._gather()
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            self._hide()

    def _whole_state(self, of: Any, *args: Any, **options: Any) -> Any:
        with self.whole():
            state = type(of).state_dict(of, *args, **options)
            return _copied(state) if self._column is not None else state

    @torch.no_grad()
    def _hide(self) -> None:
        """Set all entries to NaN that this rank does not hold."""
        assert self._column is not None
        for tables, of, held in self._sides(self._column):
            hidden = torch.from_numpy(np.flatnonzero(of != held))
            for table in tables:
                table.index_fill_(0, hidden.to(table.device), float("nan"))

    @torch.no_grad()
    def _gather(self) -> None:
        """Receive the entries that the other ranks hold."""
        if self._column is None:
            return
        own = [
            packed(table[_where(of, held, table)]) for tables, of, held in self._sides(self._column) for table in tables
        ]
        message = msgspec.msgpack.encode((self._column, own))
        for received in self._link.gather(message):
            column, entries = msgspec.msgpack.decode(received, type=tuple[int, list[Packed]])
            rank = (column - self._column + self.rank) % self._link.ranks
            if rank == self.rank:
                continue
            each = iter(entries)
            for tables, of, held in self._sides(column, rank):
                for table in tables:
                    table[_where(of, held, table)] = unpacked(next(each)).to(table.device)

    @torch.no_grad()
    def _rotate(self) -> None:
        """Send the column block to the rank before this one, and receive that of the next."""
        assert self._column is not None
        link, sent, received = self._link, self._column, (self._column + 1) % self._link.ranks
        tables, of = self._state_of(self._columns), self._blocks.of_column
        before, after = (self.rank - 1) % link.ranks, (self.rank + 1) % link.ranks
        # two ranks are each other's neighbour on both sides: each has a channel of its own
        incoming = [link.receive(after, after % 2) for _ in tables]
        for table in tables:
            link.send(table[_where(of, sent, table)], before, self.rank % 2)
        for table, one in zip(tables, incoming, strict=True):
            where = _where(of, received, table)
            table[where] = one.wait(table[where].shape, table.dtype)
        link.flush()
        self._column = received
        self._hide()
        self._context.on_exchange()

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
            found += [table.data, *(one for one in states if isinstance(one, Tensor) and one.shape == table.shape)]
        return found


def _where(of: Numbers, held: int, table: Tensor) -> Tensor:
    return torch.from_numpy(np.flatnonzero(of == held)).to(table.device)


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    if not isinstance(state, dict):
        return state
    made = copy.copy(state)  # a model's has the versions of the modules, too
    made.update((name, _copied(value)) for name, value in state.items())
    return made


def _tables(model: nn.Module, names: Sequence[str], layout: blocks) -> list[nn.Parameter]:
    """Return the parameters of these modules, or of these names, which have equally many entries."""
    found: list[nn.Parameter] = []
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for name in names:
        own = [*modules[name].parameters()] if name in modules else [parameters[name]] if name in parameters else []
        if not own:
            expected = f"one of {', '.join([one for one in modules if one] or parameters)}"
            raise _refused(f"the model has no table {name}", str(layout), expected, as_option(layout))
        found += own
    if len({len(one) if one.dim() else 0 for one in found}) > 1:
        got = ", ".join(f"{name}: {tuple(one.shape)}" for name, one in parameters.items() if _is_in(one, found))
        raise _refused("tables of one side have other numbers of entries", got, "equally many entries", f"{layout}")
    return found


def _refuse_others(context: RankContext, tables: Sequence[nn.Parameter], layout: blocks) -> None:
    """Raise ModelError if the model has trainable parameters that are in no table."""
    named = context.model.named_parameters()
    others = [name for name, one in named if one.requires_grad and not _is_in(one, tables)]
    if others:
        raise _refused(
            "each rank would train its own version of parameters that belong to no row or column",
            f"{', '.join(others[:4])} in no table of {layout}",
            "a model whose trained parameters all have an entry for each row, or for each column",
            f"model.{others[0]}.requires_grad_(False), or its name in the layout",
        )


def _refuse_optimizers(each: Sequence[Optimizer]) -> None:
    """Raise ModelError for optimizers that change entries without a sample, or keep a state of all together."""
    for one in each:
        allowed = _OPTIONS.get(type(one))
        options = [name for name in allowed or () if any(group[name] for group in one.param_groups)]
        if allowed is None or options:
            raise _refused(
                "blocks need an optimizer whose state and step belong to one row each",
                f"{type(one).__name__}{f' with {options[0]}' if options else ''}",
                "SGD without momentum and weight_decay, or Adagrad without lr_decay and weight_decay",
                "torch.optim.Adagrad(model.parameters(), lr=0.05)",
            )


def _refuse_steps(every: int | None) -> None:
    """Raise ScriptError for evaluations by steps: all ranks evaluate together, and have other numbers of steps."""
    if every is not None:
        raise ScriptError(
            explain(
                "each process makes another number of steps in a layout of blocks",
                got=f"evaluate_every={every}",
                expected="an evaluation at the end of each epoch",
                to_type="stretto.distribute(model, optimizer, loader, evaluate=error)",
            )
        )


def _is_in(one: nn.Parameter, several: Sequence[nn.Parameter]) -> bool:
    return any(one is other for other in several)


def _refused(problem: str, got: str, expected: str, to_type: str) -> ModelError:
    return ModelError(explain(problem, got=got, expected=expected, to_type=to_type))


def _other_order(ranks: int) -> str:
    return explain(
        "the epoch was begun with blocks for another number of processes",
        got=f"a batch of several column blocks for {ranks} processes",
        expected="as many processes as the run had whose checkpoint is resumed",
        to_type="stretto run --resume with the -n of that run, or a checkpoint of the end of an epoch",
    )
