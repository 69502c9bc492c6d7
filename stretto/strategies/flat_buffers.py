"""The parameters of a model in flat buffers, one for each dtype and device: exchange works on ranges, not on tensors.

The parameters stay the objects that they are and become views. Every parameter starts at a multiple of 64 bytes, as
torch's own allocations do, so that kernels compute the same bits as without an arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

ALIGNMENT_BYTES = 64


@dataclass(eq=False)
class ParameterSlice:
    """One parameter's place in its part: numbers `start` to `stop`."""

    name: str
    parameter: Parameter
    start: int
    stop: int
    home: ParameterSlice | None = None
    """The slot whose numbers it shows instead, when two parameters share their memory."""

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's numbers in a flat tensor, in its shape and memory format."""
        size, stride = self.parameter.size(), _dense_stride(self.parameter)
        return torch.as_strided(flat, size, stride, flat.storage_offset() + self.start)


class FlatBuffer:
    """The parameters of one dtype and device, flat."""

    def __init__(self, slots: Sequence[ParameterSlice], length: int) -> None:
        self.slots = slots
        self.theta = torch.zeros(length, dtype=slots[0].parameter.dtype, device=slots[0].parameter.device)
        with torch.no_grad():
            for slot in slots:
                if slot.home is None:
                    slot.view(self.theta).copy_(slot.parameter)
                slot.parameter.data = (slot.home or slot).view(self.theta)

    def in_place(self) -> bool:
        """Whether all parameters still are views of this part (a script may have moved its model)."""
        base, item = self.theta.data_ptr(), self.theta.element_size()
        return all(
            slot.parameter.data_ptr() == base + (slot.home or slot).start * item
            and slot.parameter.dtype == self.theta.dtype
            for slot in self.slots
        )


class FlatParameters:
    """All parts. The last parameters come first, as backward reaches them.

    With `spare` the last number of every part belongs to no parameter.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], spare: bool = False) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[tuple[str, Parameter]]] = {}
        for name, parameter in reversed(named):
            groups.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
        self.parts = [_part(group, spare) for group in groups.values()]
        self.slots = [slot for part in self.parts for slot in part.slots]

    def holds(self, parameters: Sequence[Parameter]) -> bool:
        """Whether these, and only these, parameters lie in the arena."""
        mine = {id(slot.parameter) for slot in self.slots}
        return mine == {id(one) for one in parameters} and all(part.in_place() for part in self.parts)


def _part(group: Sequence[tuple[str, Parameter]], spare: bool) -> FlatBuffer:
    slots: list[ParameterSlice] = []
    homes: dict[tuple[int, torch.Size], ParameterSlice] = {}
    at = 0
    for name, parameter in group:
        home = homes.get((parameter.data_ptr(), parameter.size())) if parameter.numel() else None
        slot = ParameterSlice(name, parameter, at, at + parameter.numel(), home)
        homes.setdefault((parameter.data_ptr(), parameter.size()), slot)
        slots.append(slot)
        at = _aligned(slot.stop, parameter.element_size())
    last = slots[-1]
    return FlatBuffer(slots, _aligned(last.stop + 1, last.parameter.element_size()) if spare else at)


def _aligned(index: int, item: int) -> int:
    step = max(ALIGNMENT_BYTES // item, 1)
    return -(-index // step) * step


def _dense_stride(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own stride when its numbers lie densely in some order of the axes, else the plain one."""
    wanted = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.size(), strict=True)):
        if size > 1 and stride != wanted:
            return torch.empty(parameter.size(), device="meta").stride()
        wanted *= size
    return parameter.stride()
