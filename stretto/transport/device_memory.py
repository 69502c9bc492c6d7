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

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

STREAMS = ["cuda", "xpu"]
"""Kinds of devices whose operations run in streams, and for which memory of the host is pinned."""


def host_memory(like: Tensor, device: torch.device) -> Tensor:
    """Return new memory of the host for values that are copied from or to a device, pinned for a GPU."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=device.type in STREAMS)


def host_copy(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU with these values: itself if it is on the CPU, else a copy, pinned for a GPU.

    Waits until the values are computed and copied.
    """
    tensor = tensor.detach()
    if tensor.device.type not in STREAMS:
        return tensor.cpu()
    return host_memory(tensor, tensor.device).copy_(tensor)


def device_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the CPU on another device; itself on the CPU. Its memory may be used again afterwards."""
    if device.type in STREAMS and not tensor.is_pinned():
        tensor = host_memory(tensor, device).copy_(tensor)
    return tensor.to(device, non_blocking=device.type in STREAMS)


def write_back(target: Tensor, values: Tensor) -> Tensor:
    """Set a tensor of any device to values of the CPU, which were copied by `host_copy`, and return it."""
    return target.copy_(values, non_blocking=target.device.type in STREAMS)


def accelerator() -> Any:
    """Return torch's module of the accelerator; None without one."""
    device = torch._C._get_accelerator()  # `torch.accelerator` came with PyTorch 2.6
    module = torch.get_device_module(device)
    return module if device.type != "cpu" and module.is_available() else None


def streams_of(device: torch.device) -> Any:
    """Return the module of torch with `current_stream` for a kind of device; None if it has no streams."""
    return torch.get_device_module(device) if device.type in STREAMS else None


def use_device(device: torch.device) -> None:
    """Make a device the current one of this process, so that nothing in it takes memory on another by default."""
    module = streams_of(device)
    if module is not None and device.index is not None:
        module.set_device(device)


def wait_for(device: torch.device) -> None:
    """Wait until a device has computed all that was submitted to it."""
    if (module := streams_of(device)) is not None:
        module.synchronize(device)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has had in a device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(OSError, StopIteration):  # the count of the kernel is also that of the process before its exec
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return int(psutil.Process().memory_info().rss)


class Arriving:
    """A number of a device on its way to the host, for which only `read` waits."""

    def __init__(self, number: Tensor) -> None:
        module = streams_of(number.device)
        self.is_late = module is not None
        """True if `read` may have to wait."""
        self._host, self._copied = number, None
        if module is not None:
            self._host = host_memory(number, number.device).copy_(number, non_blocking=True)
            self._copied = module.current_stream(number.device).record_event()

    def read(self) -> float:
        """Return the number."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._host)


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
