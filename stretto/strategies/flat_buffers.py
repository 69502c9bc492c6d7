"""The parameters of a model in flat buffers, one buffer for each dtype and device.

Exchanges work on ranges of a buffer, not on tensors. The parameter objects stay the same and become views of a buffer,
or are copied from and to it where another library owns their memory (see ParameterView): then a buffer holds their
values only inside `in_buffers`.

Every parameter starts at a multiple of 64 bytes, as torch's own allocations do, so that kernels compute the same bits
as for parameters that are not in a flat buffer.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from stretto.strategies.marks import COUNTS
from stretto.strategies.parameter_view import ParameterView, parameter_view

ALIGNMENT_BYTES = 64
SPARE = 1 + COUNTS
"""Number of elements in which flags and marks of an exchange travel with the parameters."""


@dataclass(eq=False)
class ParameterSlice:
    """The range of one parameter in its flat buffer: elements `start` to `stop`."""

    name: str
    source: ParameterView
    start: int
    stop: int
    home: ParameterSlice | None = None
    """The slice that holds this parameter's values, when two parameters share their memory; else None."""

    def __post_init__(self) -> None:
        self.parameter = self.source.parameter

    def view(self, flat: Tensor) -> Tensor:
        """Return the view of this parameter's elements in a flat tensor, in its shape and memory format."""
        local = self.source.local
        return torch.as_strided(flat, local.size(), _dense_stride(local), flat.storage_offset() + self.start)


class FlatBuffer:
    """The parameters of one dtype and device, as one flat tensor `theta`."""

    def __init__(
        self, slots: Sequence[ParameterSlice], length: int, width: int = 0, theta: Tensor | None = None
    ) -> None:
        self.slots = slots
        self.width = width
        """Width of the rows of the one parameter, if its rows are exchanged by themselves; else 0."""
        self.theta = zeros(length, slots) if theta is None else theta
        self._places = [(slot.source, (slot.home or slot).view(self.theta)) for slot in slots]
        with torch.no_grad():
            for slot, (source, view) in zip(slots, self._places, strict=True):
                if slot.home is None and not source.copies and theta is None:
                    view.copy_(source.local)
                source.place(view)
        self._copied = [(source, view) for source, view in self._places if source.copies]
        self.is_loaded = not self._copied
        """True if `theta` holds the values of all parameters."""

    def let_go(self) -> None:
        """Give up the memory of `theta` until it is loaded, if all parameters have their memory elsewhere."""
        if len(self._copied) == len(self.slots):
            let_go(self.theta)

    def in_place(self) -> bool:
        """Return True if all parameters are still in their places (a script may have moved its model)."""
        return all(source.is_at(view) for source, view in self._places)

    @torch.no_grad()
    def lay_back(self) -> None:
        """Bring parameters back that have other memory (`one.data = values`), with their values."""
        for source, view in self._places:
            own = source.local
            if not source.is_at(view) and (own.shape, own.dtype, own.device) == (view.shape, view.dtype, view.device):
                view.copy_(own)
                source.place(view)

    def load(self) -> None:
        """Copy the values of parameters that are not views of this buffer into it."""
        hold(self.theta)
        for source, view in self._copied:
            view.copy_(source.local)

    def store(self) -> None:
        """Copy the values of parameters that are not views of this buffer out of it."""
        for source, view in self._copied:
            source.local.copy_(view)


@contextmanager
def in_buffers(parts: Sequence[FlatBuffer]) -> Iterator[None]:
    """Let these buffers hold the values of all their parameters within, and set the parameters to them at the end.

    Changes nothing for parameters that are views, or within another such block.
    """
    copied = [part for part in parts if not part.is_loaded]
    for part in copied:
        part.load()
        part.is_loaded = True
    try:
        yield
    finally:
        for part in copied:
            part.is_loaded = False
            part.store()


class FlatParameters:
    """All flat buffers of a model. The last parameters come first, as the backward pass reaches them.

    With `spare` the last SPARE elements of every buffer belong to no parameter, and are zero. `tables` are the ids of
    parameters whose rows are exchanged by themselves: each has a buffer of its own, after the others.
    """

    def __init__(
        self, named: Sequence[tuple[str, Parameter]], spare: bool = False, tables: Container[int] = ()
    ) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[tuple[str, Parameter]]] = {}
        for name, parameter in reversed(named):
            if id(parameter) not in tables:
                groups.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
        self.parts = [_flat_buffer(group, spare) for group in groups.values()]
        self.parts += [_table(name, parameter) for name, parameter in named if id(parameter) in tables]
        self.slots = [slot for part in self.parts for slot in part.slots]

    def holds(self, parameters: Sequence[Parameter]) -> bool:
        """Return True if the buffers hold these parameters and no others, and all are still in their places."""
        held = {id(slot.parameter) for slot in self.slots}
        return held == {id(parameter) for parameter in parameters} and all(part.in_place() for part in self.parts)


def zeros(length: int, slots: Sequence[ParameterSlice]) -> Tensor:
    """Return zeros of the dtype and on the device of these parameters."""
    like = slots[0].source.local
    return torch.zeros(length, dtype=like.dtype, device=like.device)


def let_go(flat: Tensor) -> None:
    """Give up the memory of a tensor, which nothing reads or writes before `hold`; its views stay views of it.

    It is kept on devices on which torch resizes no memory.
    """
    with suppress(NotImplementedError):
        flat.untyped_storage().resize_(0)


def hold(flat: Tensor) -> None:
    """Give a tensor without memory its memory again, with zeros."""
    if not flat.untyped_storage().nbytes() and flat.numel():
        flat.untyped_storage().resize_(flat.nbytes)
        flat.zero_()


def _flat_buffer(group: Sequence[tuple[str, Parameter]], spare: bool) -> FlatBuffer:
    slots: list[ParameterSlice] = []
    homes: dict[tuple[int, torch.Size], ParameterSlice] = {}
    start = 0
    for name, parameter in group:
        source = parameter_view(parameter)
        local = source.local
        home = homes.get((local.data_ptr(), local.size())) if local.numel() else None
        slot = ParameterSlice(name, source, start, start + local.numel(), home)
        homes.setdefault((local.data_ptr(), local.size()), slot)
        slots.append(slot)
        start = _aligned(slot.stop, local.element_size())
    last = slots[-1]
    return FlatBuffer(slots, _aligned(last.stop + SPARE, last.source.local.element_size()) if spare else start)


def _table(name: str, parameter: Parameter) -> FlatBuffer:
    """Return the buffer of a table, in the memory that the table has: it may be in a file."""
    slot = ParameterSlice(name, parameter_view(parameter), 0, parameter.numel())
    theta = slot.source.local.contiguous().view(-1)
    return FlatBuffer([slot], parameter.numel(), parameter.shape[1], theta)


def _aligned(index: int, itemsize: int) -> int:
    step = max(ALIGNMENT_BYTES // itemsize, 1)
    return -(-index // step) * step


def _dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """Return the parameter's stride if its elements lie densely in some order of the axes, else a contiguous stride."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.size(), strict=True)):
        if size > 1 and stride != expected:
            return torch.empty(parameter.size(), device="meta").stride()
        expected *= size
    return parameter.stride()
