"""Transport of workers on one host: means go through memory that they share, all else over their process group.

Each worker has a memory file, which all workers map: it writes the slots in its own, and reads those of the others. The
control block is in the file of worker 0; each worker writes its own line there, and one word that aborts the group.
The kernel (kernels/shared_memory.cpp) cuts a sum into pieces, and each piece into one chunk for each worker:

    worker 0                               worker 1
    copies chunk 1 into its slot           copies chunk 0 into its slot
    posted = 1  <-- each waits for both --> posted = 1
    chunk 0 = own + worker 1's slot        chunk 1 = worker 0's slot + own
    into its tensor and its slot           into its tensor and its slot
    summed = 1  <-- each waits for both --> summed = 1
    copies chunk 1 from worker 1's slot    copies chunk 0 from worker 0's slot
    done = 1 (the slot can be used again when all are done)

There is no lock. The counters of a worker that is killed between two stages stay, and the waits of the others end when
they see its exit, an abort or the time limit. A worker that is stopped and continues later reads the numbers that
were posted for it: no slot is used again before all workers are done with it, and the next generation has other memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from stretto.collective_ops import AllReduceMean, CollectiveOp
from stretto.errors import TransportError
from stretto.kernels import is_native
from stretto.transport.gloo_ring import all_reduce_bytes
from stretto.transport.interface import Handle, Message, Traffic, Transport
from stretto.transport.process_group import ProcessGroupTransport

if TYPE_CHECKING:
    from stretto.kernels import _native

SUMMED = (torch.float32, torch.float64)
"""Dtypes that the kernel adds; others go over the process group."""
LOOK_S = 0.02
"""Seconds between two checks of a wait for exited workers and the time limit."""
SPIN_S = 0.00003
"""Seconds for which a wait polls, and lets other processes run, before it sleeps."""
DONE, LATE, ABORTED, LEFT, DIFFERENT = range(5)
"""Outcomes of a wait of the kernel."""


class Offer(msgspec.Struct, frozen=True, array_like=True):
    """A worker's memory file, which other processes of its host can open; `host` is empty without one."""

    host: str = ""
    pid: int = 0
    file: int = -1
    name: bytes = b""
    """Random first bytes of the file, which show that another process has opened this one and no other."""


def over_shared_memory(
    inner: ProcessGroupTransport, device: torch.device | None = None
) -> ProcessGroupTransport | SharedMemoryTransport:
    """Return a transport that computes means in shared memory, or the process group if any worker can't do so.

    All workers call this at the same time. Workers in different network namespaces count as workers on different hosts,
    so that a network that is limited or measured on purpose is used.
    """
    if inner.workers == 1 or (device is not None and device.type == "cuda"):
        return inner
    try:
        with contextlib.ExitStack() as files:
            offer = msgspec.msgpack.encode(_offer(inner.workers, files))
            offers = [msgspec.msgpack.decode(one, type=Offer) for one in inner.all_gather_bytes(offer)]
            if not offers[0].host or len({one.host for one in offers}) > 1:
                return inner
            group = _joined(offers, inner.worker, files)
            has_joined = inner.all_gather_bytes(b"" if group is None else b"joined")
    except TransportError:
        inner.close()
        raise
    return SharedMemoryTransport(inner, group, offers) if group is not None and all(has_joined) else inner


def _offer(workers: int, files: contextlib.ExitStack) -> Offer:
    """Create this worker's memory file, with all of its memory."""
    if sys.platform != "linux" or not is_native():
        return Offer()
    name = secrets.token_bytes(16)
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            host = f"{boot.read().strip()} {os.readlink('/proc/self/ns/net')}"
        file = os.memfd_create("stretto")
        files.callback(os.close, file)
        os.posix_fallocate(file, 0, _kernel().bytes(workers))
        os.pwrite(file, name, 0)
    except OSError:
        return Offer()
    return Offer(host, os.getpid(), file, name)


def _joined(offers: Sequence[Offer], worker: int, files: contextlib.ExitStack) -> _native.SharedGroup | None:
    """Map the memory of all workers; return None if this process can't."""
    try:
        opened = []
        for rank, offer in enumerate(offers):
            writes = rank in (0, worker)
            opened.append(os.open(f"/proc/{offer.pid}/fd/{offer.file}", os.O_RDWR if writes else os.O_RDONLY))
            files.callback(os.close, opened[-1])
            if os.pread(opened[-1], len(offer.name), 0) != offer.name:
                return None
        group: _native.SharedGroup = _kernel()(opened, worker, SPIN_S)
    except (OSError, RuntimeError):
        return None
    return group


def _kernel() -> Any:
    return import_module("stretto.kernels._native").SharedGroup


class SharedMemoryTransport(Transport):
    """One worker's end. Bytes, all-gathers, other dtypes and devices go over `inner`, which also counts its bytes.

    A failure raises the errors of `inner`, and ends the waits of all workers.
    """

    def __init__(self, inner: ProcessGroupTransport, group: _native.SharedGroup, offers: Sequence[Offer]) -> None:
        super().__init__(inner.worker, inner.workers)
        self._inner = inner
        self._group: _native.SharedGroup | None = group
        self._pending: deque[_MeanHandle] = deque()
        """Operations in progress, whose tensors the kernel writes into."""
        self._sent = self._received = 0
        self._processes = {file: rank for rank, one in enumerate(offers) if (file := _process(one.pid)) is not None}
        self._exits = select.poll()
        for file in self._processes:
            self._exits.register(file, select.POLLIN)

    def submit(self, op: CollectiveOp) -> Handle:
        """Start an operation. A mean continues while later operations are submitted and waited for."""
        tensor, group = op.tensor, self._group
        if not isinstance(op, AllReduceMean) or tensor.dtype not in SUMMED or tensor.device.type != "cpu" or not group:
            return self._inner.submit(op)
        sent, received = all_reduce_bytes(self.worker, self.workers, tensor.nbytes, tensor.itemsize)
        self._sent, self._received = self._sent + sent, self._received + received
        flat = tensor.contiguous()
        handle = _MeanHandle(self, tensor, flat)
        self._pending.append(handle)
        handle.end = group.submit(flat.data_ptr(), flat.numel(), flat.element_size())
        return handle

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the messages of all workers."""
        return self._inner.all_gather_bytes(message)

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the root's message."""
        return self._inner.broadcast_bytes(message, root)

    def traffic(self) -> Traffic:
        """Return the bytes of the process group, and those of means, computed as gloo would exchange them."""
        counted = self._inner.traffic()
        sent, received = counted.bytes_sent + self._sent, counted.bytes_received + self._received
        return Traffic(sent, received, counted.counted and not self._sent)

    def abort(self) -> None:
        """Abort all operations of all workers, now and later. Callable from any thread. Idempotent."""
        if (group := self._group) is not None:
            group.abort()
        self._inner.abort()

    def close(self) -> None:
        """Unmap the memory, and close the process group."""
        if self._group is not None:
            self._group.leave()
        self._group = None
        self._pending.clear()
        while self._processes:
            os.close(self._processes.popitem()[0])
        self._inner.close()

    def _finish(self, handle: _MeanHandle) -> None:
        group, began = self._group, time.monotonic()
        why = "it was closed" if group is None else self._wait(group, handle.end)
        if why:
            what = f"the mean of {handle.tensor.numel()} numbers"
            raise self._inner.failure(RuntimeError(why), what, time.monotonic() - began)
        while self._pending and self._pending[0].end <= handle.end:
            self._pending.popleft().take()

    def _wait(self, group: _native.SharedGroup, end: int) -> str:
        """Wait until all pieces up to this one are complete. Otherwise abort the group and return the reason."""
        done, since, why = group.done, time.monotonic(), ""
        while (outcome := group.wait(end, LOOK_S)) == LATE and not why:
            if group.done != done:
                done, since = group.done, time.monotonic()
            if exited := [self._processes[file] for file, _ in self._exits.poll(0)]:
                why = f"worker {_listed(exited)} has exited"  # unless its last contribution is complete
            elif time.monotonic() > since + self._inner.timeout_s:
                why = f"worker {_listed(group.missing())} has not contributed"
        if outcome == DONE:
            return ""
        missing = _listed(group.missing())
        group.abort()
        if outcome == DIFFERENT:
            raise TransportError("the workers submit means of tensors that differ in shape or dtype")
        return why or (f"worker {missing} has left" if outcome == LEFT else "it was aborted")


@dataclass(slots=True)
class _MeanHandle:
    transport: SharedMemoryTransport
    tensor: Tensor
    flat: Tensor
    """The tensor, or a contiguous copy."""
    end: int = 0
    """Number of its last piece."""

    def wait(self) -> Tensor:
        self.transport._finish(self)
        return self.tensor

    def take(self) -> None:
        """Copy the result from the contiguous copy, if there is one."""
        if self.flat is not self.tensor:
            self.tensor.copy_(self.flat)


def _process(pid: int) -> int | None:
    """Return a descriptor of another process, which becomes readable when it exits; None where there is none."""
    if pid == os.getpid():
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _listed(workers: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(workers)))
