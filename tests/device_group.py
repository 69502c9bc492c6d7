"""A group of second devices for tests, in the place of NCCL: tensors of the device alone, of one length at all workers.

A result is in the tensor once `wait` was called. A wait with a limit ends the group at the limit, as that of NCCL does.
An abort makes the operations look complete, unless the device hangs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from stretto.transport import device_groups

NAME = "ProcessGroupOfTests"


def register(shares_device: bool = False, hangs: bool = False) -> None:
    """Have the workers' devices connected by this group; or not, if they share one device.

    A device that `hangs` is not stopped by an abort.
    """
    DeviceGroup.hangs = hangs
    device_groups.GROUPS["far"] = NAME
    device_groups.PLACES["far"] = lambda _: "the only device" if shares_device else f"device of process {os.getpid()}"
    setattr(dist, NAME, DeviceGroup)


class DeviceGroup:
    """One worker's end."""

    hangs = False

    def __init__(self, store: Any, worker: int, workers: int, timeout: timedelta) -> None:
        self._inner = dist.ProcessGroupGloo(store, worker, workers, timeout)
        self.is_aborted = self.is_shut = False

    def allreduce(self, tensors: Sequence[Tensor]) -> Work:
        """Start a sum."""
        near = _near(tensors)
        return Work(self, self._inner.allreduce(near), tensors, near)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor]) -> Work:
        """Start an all-gather of tensors of one length."""
        near = _near(outputs[0])
        return Work(self, self._inner.allgather([near], _near(tensors)), outputs[0], near)

    def abort(self) -> None:
        """Note that the group was aborted."""
        self.is_aborted = True

    def shutdown(self) -> None:
        """Note that the group was closed."""
        self.is_shut = True


class Work:
    """An operation in progress."""

    def __init__(self, group: DeviceGroup, inner: Any, tensors: Sequence[Tensor], near: Sequence[Tensor]) -> None:
        self._group, self._inner, self._tensors, self._near = group, inner, tensors, near

    def is_completed(self) -> bool:
        """Return True if a wait would not block."""
        return not self._group.hangs if self._group.is_aborted else bool(self._inner.is_completed())

    def wait(self, limit: timedelta | None = None) -> None:
        """Wait for the result."""
        if limit is not None:
            self._group.abort()
            raise RuntimeError(f"the operation has not ended within {limit}: the group was aborted")
        self._inner.wait()
        for tensor, near in zip(self._tensors, self._near, strict=True):
            tensor.copy_(near)


def _near(tensors: Sequence[Tensor]) -> list[Tensor]:
    wrong = [one for one in tensors if one.device.type != "far"]
    if wrong:
        raise RuntimeError(f"No backend type associated with device type {wrong[0].device.type}")
    return [one.cpu() for one in tensors]
