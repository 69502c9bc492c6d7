"""Exchange of single rows of a table, such as an embedding with sparse gradients, with an asynchronous server.

A worker reads the rows of a batch when its module looks them up, and sends the rows that its steps have changed:

    worker: embedding(numbers)    RowRange                      shard: RowTable
      |-- forward pre-hook -------->| rows that it has not read
      |                             |   since its last push       |
      |                             |-- ReadRows(numbers) ------->|
      |                             |<-- Rows --------------------|
      | backward(), step()          |                             |
      |-- before the step --------->| remember the rows in .grad  |
      |                             |-- Push(numbers, changes) -->| add to these rows

All other rows keep the values that the worker had last, until the whole table is read: for an evaluation, a
checkpoint, and at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from stretto.codecs import Codec
from stretto.errors import ModelError, explain
from stretto.parameter_server.client_types import ranges
from stretto.recipe.what import What, gradients
from stretto.strategies.flat_buffers import FlatBuffer
from stretto.strategies.server_ranges import Groups
from stretto.strategies.tensor_sync import crc
from stretto.strategies.traffic_counters import Tally
from stretto.transport.device_memory import device_copy, host_copy

Read = Callable[[list[Tensor], bool], Tensor]
"""Returns rows, by their numbers at each shard; the flag is True in an evaluation sync."""
BLOCK_BYTES = 1 << 22
"""Bytes of the rows that are read together where all are."""


class RowRange:
    """State of one table between exchanges."""

    def __init__(self, part: FlatBuffer, how: Codec, shards: int, tally: Tally, read: Read) -> None:
        self.part, self._how, self._tally, self._read = part, how, tally, read
        (self._slot,) = part.slots
        self.parameter = self._slot.parameter
        self._table = part.theta.view(-1, part.width)
        bounds = ranges(part.theta.numel(), shards, part.width)
        self._bounds = [(start // part.width, stop // part.width) for start, stop in bounds]
        self._reads = self._last_step = self._step_before = 1
        """Number of times that all rows had to be read again, counted from 1: now, at the last step, and before it."""
        self._read_in = _counts(len(self._table))
        """`_reads` when each row was read last."""
        self._round = 1
        """Number of pushes, counted from 1."""
        self._changed_in = _counts(len(self._table))
        """Round in which a step has changed each row last."""
        self._changed: list[tuple[Tensor, Tensor]] = []
        """Numbers of rows that steps have changed since the last push, and their values before."""
        self._own: list[tuple[Tensor, Tensor]] | None = None
        """Numbers and values of the rows this worker has changed, while all rows have the values that were read."""
        self._shown: int | None = None
        """Checksum of the table as it was read for an evaluation."""
        self._numbers = torch.empty(0, dtype=torch.int64, device="cpu")
        self.change = part.theta.new_empty(0)
        """Changes of the rows with these numbers, flat."""

    # --- reading ------------------------------------------------------------------------------------------------

    def look_up(self, numbers: Tensor) -> None:
        """Read these rows from the server, except rows that were read since the last push."""
        if self._own is not None:
            return
        rows = torch.unique(numbers.detach().cpu())
        rows = rows[(rows >= 0) & (rows < len(self._table))]  # the module itself refuses others
        rows = rows[self._read_in[rows] < self._reads].long()
        if rows.numel():
            self._set(rows, self._read(self._by_shard(rows), False))
            self._read_in[rows] = self._reads

    def read_whole(self) -> None:
        """Set all rows to the server's newest version, a block at a time: a table may be larger than memory."""
        block = max(BLOCK_BYTES // (self.part.width * self.part.theta.element_size()), 1)
        for start in range(0, len(self._table), block):
            rows = torch.arange(start, min(start + block, len(self._table)), device="cpu")
            self._set(rows, self._read(self._by_shard(rows), True))

    def _by_shard(self, rows: Tensor) -> list[Tensor]:
        """Return the numbers of these rows, which ascend, at each shard."""
        return [
            rows[(rows >= start) & (rows < stop)].sub(start).to(torch.int32, copy=True) for start, stop in self._bounds
        ]

    @torch.no_grad()
    def _set(self, rows: Tensor, values: Tensor) -> None:
        device = self._table.device
        self._table[rows.to(device)] = device_copy(values, device).view(-1, self.part.width)

    @torch.no_grad()
    def before_step(self) -> None:
        """Remember the rows that a step is about to change; read them again if there was a push since their look-up.

        Raises ModelError for rows that were not looked up since the step before the last one.
        """
        gradient = self._slot.source.gradient
        if gradient is None:
            return
        if not gradient.is_sparse:
            raise ModelError(_dense(self._slot.name))
        rows = torch.unique(gradient._indices()[0].cpu())
        if bool((self._read_in[rows] < self._step_before).any()):
            raise ModelError(_not_looked_up(self._slot.name))
        self._step_before, self._last_step = self._last_step, self._reads
        self.look_up(rows)
        rows = rows[self._changed_in[rows] < self._round]
        self._changed_in[rows] = self._round
        self._changed.append((rows, self._table[rows.to(self._table.device)]))

    # --- exchanges ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def compute_change(self, what: What, groups: Groups) -> None:
        """Compute the changes of the rows that steps have changed."""
        device = self._table.device
        if isinstance(what, gradients):
            self._descend(float(groups[id(self.parameter)]["lr"]))
            return
        self.compute_empty_change(what)
        if not self._changed:
            return
        rows, order = torch.cat([numbers for numbers, _ in self._changed]).sort()
        before = torch.cat([values for _, values in self._changed])[order.to(device)]
        self._numbers, self.change = rows, (self._table[rows.to(device)] - before).flatten()

    def _descend(self, lr: float) -> None:
        """Set the update to the gradient step of the rows, `-lr * g`."""
        gradient = self._slot.source.gradient
        if gradient is None or not self._changed:
            self._numbers, self.change = self._numbers[:0], self.change[:0]
            return
        gradient = gradient.coalesce()
        self._numbers, self.change = gradient.indices()[0].cpu(), gradient.values().mul(-lr).flatten()

    def compute_empty_change(self, what: What) -> None:
        """Set the update to one of no rows."""
        self._numbers, self.change = self._numbers[:0], self.change[:0]

    def encode(self, shard: int) -> list[Tensor]:
        """Return the message to a shard: the numbers of its rows, and their changes."""
        start, stop = (int(torch.searchsorted(self._numbers, bound)) for bound in self._bounds[shard])
        numbers = self._numbers[start:stop].sub(self._bounds[shard][0]).to(torch.int32)
        return [numbers, host_copy(self.change[start * self.part.width : stop * self.part.width])]

    def count_values(self, messages: list[list[Tensor]]) -> None:
        """Count the values in the messages to all shards."""
        for (_, changes), (start, stop) in zip(messages, self._bounds, strict=True):
            self._tally.count_values(self._how, changes, self._table[start:stop])

    def sent(self) -> None:
        """Begin the next update: all rows have to be read again."""
        self._reads += 1
        self._round += 1
        self._changed = []

    def undo(self) -> None:
        """Restore the rows as they were before the steps of an update that is not sent."""
        for rows, before in self._changed:
            self._set(rows, before)
        self.sent()

    @torch.no_grad()
    def before_read(self) -> None:
        """Remember the rows that this worker has changed, before the whole table is set to a version of the server."""
        if self._own is None:
            device = self._table.device
            self._own = [(rows, self._table[rows.to(device)]) for rows, _ in self._changed]

    def was_read(self) -> None:
        """Note that the whole table was read; `before_read` has noted it."""

    def note_shown(self) -> None:
        """Remember the table as it was read, for `is_as_shown`."""
        self._shown = crc(self.part.theta)

    def is_as_shown(self) -> bool:
        """Return True if the script has not changed the table since it was read for an evaluation."""
        shown, self._shown = self._shown, None
        return shown is None or shown == crc(self.part.theta)

    def start_from_read(self) -> None:
        """Continue from the version that was read."""
        self._own = None
        self.sent()

    def put_back(self) -> None:
        """Restore the rows that this worker has changed; all others have to be read again."""
        own, self._own = self._own or [], None
        self._reads += 1
        for rows, values in own:
            self._set(rows, values)
            self._read_in[rows] = self._reads

    def not_finite(self) -> str | None:
        """Return the table's name if its update is not finite."""
        return None if bool(torch.isfinite(self.change).all()) else self._slot.name


def _counts(rows: int) -> Tensor:
    """Return a zero for each row; it takes no memory before it is used."""
    return torch.from_numpy(np.zeros(rows, np.int32))


def _dense(name: str) -> str:
    return explain(
        f"only the rows of a batch of {name} are exchanged, and its gradient is that of the whole table",
        got="a dense gradient: the loop uses the weight outside of its nn.Embedding(sparse=True) as well",
        expected="a table whose rows are looked up by the module alone",
        to_type="nn.Embedding(..., sparse=False), which exchanges the whole table",
    )


def _not_looked_up(name: str) -> str:
    return explain(
        f"the optimizer is about to step rows of {name} that this worker has not read since its last exchange",
        got="gradients of rows that were looked up without the module, as by F.embedding, or before an exchange",
        expected="a forward pass of the module, and its backward pass, between two exchanges",
        to_type="model.embedding(numbers), or nn.Embedding(..., sparse=False), which exchanges the whole table",
    )
