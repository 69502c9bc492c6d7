"""The parameters of a model in flat buffers, one buffer for each dtype and device.

Exchanges work on ranges of a buffer, not on tensors. The parameter objects stay the same and become views of a buffer.
Every parameter starts at a multiple of 64 bytes, as torch's own allocations do, so that kernels compute the same bits
as for parameters that are not in a flat buffer.
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
    """The range of one parameter in its flat buffer: elements `start` to `stop`."""

    name: str
    parameter: Parameter
    start: int
    stop: int
    home: ParameterSlice | None = None
    """The slice that holds this parameter's values, when two parameters share their memory; else None."""

    def view(self, flat: Tensor) -> Tensor:
        """Return the view of this parameter's elements in a flat tensor, in its shape and memory format."""
        size, stride = self.parameter.size(), _dense_stride(self.parameter)
        return torch.as_strided(flat, size, stride, flat.storage_offset() + self.start)


class FlatBuffer:
    """The parameters of one dtype and device, as one flat tensor `theta`."""

    def __init__(self, slots: Sequence[ParameterSlice], length: int) -> None:
        self.slots = slots
        self.theta = torch.zeros(length, dtype=slots[0].parameter.dtype, device=slots[0].parameter.device)
        with torch.no_grad():
            for slot in slots:
                if slot.home is None:
                    slot.view(self.theta).copy_(slot.parameter)
                slot.parameter.data = (slot.home or slot).view(self.theta)

    def in_place(self) -> bool:
        """Return True if all parameters are still views of this buffer (a script may have moved its model)."""
        base, itemsize = self.theta.data_ptr(), self.theta.element_size()
        return all(
            slot.parameter.data_ptr() == base + (slot.home or slot).start * itemsize
            and slot.parameter.dtype == self.theta.dtype
            for slot in self.slots
        )


class FlatParameters:
    """All flat buffers of a model. The last parameters come first, as the backward pass reaches them.

    With `spare` the last element of every buffer belongs to no parameter.
    """

    def __init__(self, named: Sequence[tuple[str, Parameter]], spare: bool = False) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[tuple[str, Parameter]]] = {}
        for name, parameter in reversed(named):
            groups.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
        self.parts = [_flat_buffer(group, spare) for group in groups.values()]
        self.slots = [slot for part in self.parts for slot in part.slots]

    def holds(self, parameters: Sequence[Parameter]) -> bool:
        """Return True if the buffers hold these parameters and no others, and all are still views of them."""
        held = {id(slot.parameter) for slot in self.slots}
        return held == {id(parameter) for parameter in parameters} and all(part.in_place() for part in self.parts)


def _flat_buffer(group: Sequence[tuple[str, Parameter]], spare: bool) -> FlatBuffer:
    slots: list[ParameterSlice] = []
    homes: dict[tuple[int, torch.Size], ParameterSlice] = {}
    start = 0
    for name, parameter in group:
        home = homes.get((parameter.data_ptr(), parameter.size())) if parameter.numel() else None
        slot = ParameterSlice(name, parameter, start, start + parameter.numel(), home)
        homes.setdefault((parameter.data_ptr(), parameter.size()), slot)
        slots.append(slot)
        start = _aligned(slot.stop, parameter.element_size())
    last = slots[-1]
    return FlatBuffer(slots, _aligned(last.stop + 1, last.parameter.element_size()) if spare else start)


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
