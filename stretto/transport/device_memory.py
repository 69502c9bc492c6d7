"""Memory of accelerators and of the host: copies between them, and the order of the streams that write a buffer.

PyTorch's rules, which hold for CUDA and XPU, and for all of Stretto:

- A collective operation of NCCL waits for the stream that is current when it is submitted, and the stream that is
  current in its `wait` waits for the operation. So does a copy to the host. A buffer that hooks have written in
  several streams is submitted after the current stream waits for all of them: see `Writers`.
- Pinned memory of the host is copied from and to without a copy of the driver in between. PyTorch reuses pinned memory
  only after the copies from it have ended.
- A tensor that another stream than its own uses would need `record_stream`. The tensors here are used in the streams
  that are current, or belong to an operation of torch.distributed, which keeps them until its end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PINNED = ("cuda",)
"""Kinds of devices for which memory of the host is pinned."""
STREAMS = ("cuda", "xpu")
"""Kinds of devices whose operations run in streams."""


def host_memory(like: Tensor) -> Tensor:
    """Return new memory of the host for the values of a tensor, pinned for a GPU."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type in PINNED)


def host_copy(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU with these values: itself if it is on the CPU, else a copy, pinned for a GPU.

    Waits until the values are computed and copied.
    """
    tensor = tensor.detach()
    if tensor.device.type not in PINNED:
        return tensor.cpu()
    return host_memory(tensor).copy_(tensor)


def device_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on another device; itself on the CPU. Its memory may be used again afterwards."""
    if device.type in PINNED and not tensor.is_pinned():
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=device.type in PINNED)


def write_back(target: Tensor, values: Tensor) -> Tensor:
    """Set a tensor of any device to values of the CPU, which were copied by `host_copy`, and return it."""
    return target.copy_(values, non_blocking=target.device.type in PINNED)


def streams_of(device: torch.device) -> Any:
    """Return the module of torch with `current_stream` for a kind of device; None if it has no streams."""
    return torch.get_device_module(device) if device.type in STREAMS else None


class Writers:
    """Streams that have written a buffer. Backward passes run hooks in the streams of the forward operations."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, streams_of(device)
        self._streams: list[Any] = []

    def note(self) -> None:
        """Note that the current stream has written."""
        if self._module is not None and (stream := self._module.current_stream(self._device)) not in self._streams:
            self._streams.append(stream)

    def join(self) -> None:
        """Let the current stream wait for what the other streams have written, and forget them."""
        if self._module is None:
            return
        current = self._module.current_stream(self._device)
        for stream in self._streams:
            if stream != current:
                current.wait_stream(stream)
        self._streams.clear()
