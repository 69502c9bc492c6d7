"""Tensors of accelerators among workers: through a group of the devices (NCCL), or through the memory of the hosts.

The workers have a group of their devices if all have a device of one kind, and each its own: NCCL refuses workers that
share a GPU, also as instances of one GPU (MIG). Otherwise a tensor is copied to the host, exchanged there, and copied
back, which works for every kind of device, and where only some hosts have one.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stretto.collective_ops import AllReduceMean, Answer, CollectiveOp
from stretto.notices import say_once
from stretto.transport.device_memory import device_copy, host_copy, write_back
from stretto.transport.interface import Handle

GROUPS = {"cuda": "ProcessGroupNCCL"}
"""Kinds of devices, and the process groups of torch.distributed that connect them."""


def _place_of_gpu(device: torch.device) -> str:
    """Return the host, as NCCL names it, and the bus address of a GPU, which instances of one GPU share."""
    properties: Any = torch.cuda.get_device_properties
    found = properties(device)
    address = [getattr(found, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return f"{host} {found.uuid if None in address else address}"


def _place_of_process(device: torch.device) -> str:  # noqa: ARG001
    return f"{socket.gethostname()} {os.getpid()}"


PLACES: dict[str, Callable[[torch.device], str]] = {"cuda": _place_of_gpu}
"""For each kind of device, the function that returns a text that is equal for one device alone."""


def offered_device(device: torch.device | None) -> str:
    """Return the kind and the place of this worker's device as a text; an empty one for the CPU."""
    if device is None or device.type == "cpu":
        return ""
    return f"{device.type} {PLACES.get(device.type, _place_of_process)(device)}"


def agreed_kind(offers: Sequence[str]) -> tuple[str, str]:
    """Return the kind of the workers' devices if these can form a group; otherwise no kind, and the reason.

    >>> agreed_kind(["cuda a 0", "cuda a 0", "cuda a 1"])
    ('', 'workers 0, 1 share a device, so there are more workers than devices')
    >>> agreed_kind(["cuda a 0", ""])
    ('', 'only worker 0 has a device of kind cuda')
    """
    kinds = [offer.partition(" ")[0] for offer in offers]
    kind = next(filter(None, kinds), "")
    if not kind:
        return "", ""
    having = [worker for worker, one in enumerate(kinds) if one == kind]
    if len(having) < len(kinds):
        workers = _listed(having)
        return "", f"only {workers} {'has' if len(having) == 1 else 'have'} a device of kind {kind}"
    if kind not in GROUPS:
        return "", f"PyTorch has no group of devices of kind {kind} that Stretto uses"
    for offer in offers:
        sharing = [worker for worker, one in enumerate(offers) if one == offer]
        if len(sharing) > 1:
            return "", f"{_listed(sharing)} share a device, so there are more workers than devices"
    return kind, ""


def _listed(workers: Sequence[int]) -> str:
    return f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"


def notice_host_memory(why: str) -> None:
    """Print once that tensors of the workers' devices pass through the memory of the hosts."""
    say_once(f"the tensors of the workers pass through the memory of the hosts, since {why}")


def by_host(submit: Callable[[CollectiveOp], Handle], op: CollectiveOp) -> Handle:
    """Submit an operation on a tensor of a device with a copy of it on the CPU; the result is on the device."""
    return _HostHandle(op, submit(replace(op, tensor=host_copy(op.tensor))))


@dataclass(slots=True)
class _HostHandle:
    op: CollectiveOp
    inner: Handle

    def wait(self) -> Answer:
        answer, tensor = self.inner.wait(), self.op.tensor
        if isinstance(self.op, AllReduceMean):
            assert isinstance(answer, Tensor)
            return write_back(tensor, answer)
        if isinstance(answer, Tensor):
            return device_copy(answer, tensor.device)
        return [device_copy(one, tensor.device) for one in answer]
