"""Memory that the workers of one host share, in which they add and copy tensors.

Each worker has a memory file, which all workers map: it writes the slots in its own, and reads those of the others. The
control block is in the file of the first worker; each worker writes its own line there, and one word that aborts the
group. The kernel (kernels/shared_memory.cpp) cuts a sum into pieces, and each piece into one chunk for each worker:

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
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from stretto.errors import TransportError
from stretto.kernels import is_native

if TYPE_CHECKING:
    from stretto.kernels import _native

KINDS = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""Dtypes that the kernel adds. Half precision is added in float32 and rounded once."""
COPY = 4
"""Kind of a copy, which is counted in bytes."""
ROOM_BYTES = 64 << 20
"""Bytes for tensors that a worker exchanges with another one, after those of sums. They take memory once written."""
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


def host_name() -> str:
    """Return the host and its network, which is another one in a network namespace. Raises OSError if unknown."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()} {os.readlink('/proc/self/ns/net')}"


def open_offer(offer: Offer, flags: int) -> int | None:
    """Open an offered file; return None if another file is there. Raises OSError if this process can't."""
    file = os.open(f"/proc/{offer.pid}/fd/{offer.file}", flags)
    if os.pread(file, len(offer.name), 0) == offer.name:
        return file
    os.close(file)
    return None


def create_file(nbytes: int, room: int = 0) -> Offer:
    """Create a memory file of this many bytes, with all of its memory, and offer it. Raises OSError.

    After them it has `room` without memory. The caller closes `Offer.file`, and may seal it.
    """
    host, name = host_name(), secrets.token_bytes(16)
    file = os.memfd_create("stretto", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(file, 0, nbytes)
        os.ftruncate(file, nbytes + room)
        os.pwrite(file, name, 0)
    except OSError:
        os.close(file)
        raise
    return Offer(host, os.getpid(), file, name)


def offer_memory(workers: int, files: contextlib.ExitStack) -> Offer:
    """Create this worker's memory file, with all of its memory for a host of this number of workers."""
    if sys.platform != "linux" or not is_native():
        return Offer()
    try:
        offer = create_file(_kernel().bytes(workers), ROOM_BYTES)
    except OSError:
        return Offer()
    files.callback(os.close, offer.file)
    return offer


def join_memory(
    offers: Sequence[Offer], ranks: Sequence[int], worker: int, files: contextlib.ExitStack
) -> HostMemory | None:
    """Map the memory of the workers of a host, given by their ranks; return None if this process can't."""
    try:
        opened = []
        for rank in ranks:
            offer, writes = offers[rank], rank in (ranks[0], worker)
            if (file := open_offer(offer, os.O_RDWR if writes else os.O_RDONLY)) is None:
                return None
            opened.append(file)
            files.callback(os.close, file)
        group: _native.SharedGroup = _kernel()(opened, ranks.index(worker), SPIN_S, ROOM_BYTES)
    except (OSError, RuntimeError):
        return None
    return HostMemory(group, ranks, [offers[rank].pid for rank in ranks])


def _kernel() -> Any:
    return import_module("stretto.kernels._native").SharedGroup


class HostMemory:
    """One worker's end of the memory of its host. `ranks` are the host's workers, whose processes are `pids`."""

    def __init__(self, group: _native.SharedGroup, ranks: Sequence[int], pids: Sequence[int]) -> None:
        self._group, self.ranks = group, ranks
        self._processes = {
            file: rank for rank, pid in zip(ranks, pids, strict=True) if (file := _process(pid)) is not None
        }
        self._exits = select.poll()
        for file in self._processes:
            self._exits.register(file, select.POLLIN)

    def start_sum(self, tensor: Tensor) -> int:
        """Add a contiguous tensor of all workers of the host, in place; return the number of its last piece."""
        return self._group.submit(tensor.data_ptr(), tensor.numel(), KINDS[tensor.dtype])

    def start_copy(self, tensor: Tensor) -> int:
        """Copy a contiguous tensor from the first worker of the host to the others; return its last piece."""
        return self._group.submit(tensor.data_ptr(), tensor.nbytes, COPY)

    def write(self, start: int, tensor: Tensor) -> bool:
        """Copy a contiguous tensor into this worker's room; return False if there is no memory for it."""
        return self._group.write(start, tensor.data_ptr(), tensor.nbytes)

    def read(self, rank: int, start: int, into: Tensor) -> bool:
        """Copy a contiguous tensor from the room of a worker of this host; return False if it is not all in it."""
        return self._group.read(self.ranks.index(rank), start, into.data_ptr(), into.nbytes)

    @property
    def done(self) -> int:
        """Number of pieces that are complete at this worker."""
        return self._group.done

    def wait(self, end: int, timeout_s: float) -> str:
        """Wait until all pieces up to this one are complete. Otherwise abort the group and return the reason."""
        group = self._group
        done, since, why = group.done, time.monotonic(), ""
        while (outcome := group.wait(end, LOOK_S)) == LATE and not why:
            if group.done != done:
                done, since = group.done, time.monotonic()
            why = self._exited()  # unless the last contribution of an exited worker is complete
            if not why and time.monotonic() > since + timeout_s:
                why = f"worker {self._missing()} has not contributed"
        if outcome == DONE:
            return ""
        missing = self._missing()
        group.abort()
        if outcome == DIFFERENT:
            raise TransportError("the workers submit means of tensors that differ in shape or dtype")
        return why or (f"worker {missing} has left" if outcome == LEFT else "it was aborted")

    def trouble(self) -> str:
        """Return the reason for which no further piece will be complete, without waiting; empty if there is none."""
        if self._group.wait(self._group.done + 1, 0.0) == ABORTED:
            return "it was aborted"
        return self._exited()

    def abort(self) -> None:
        """End all waits of all workers. Callable from any thread. Idempotent."""
        self._group.abort()

    def leave(self) -> None:
        """Announce that this worker contributes no more."""
        self._group.leave()
        while self._processes:
            os.close(self._processes.popitem()[0])

    def _exited(self) -> str:
        exited = [self._processes[file] for file, _ in self._exits.poll(0)]
        return f"worker {_listed(exited)} has exited" if exited else ""

    def _missing(self) -> str:
        return _listed([self.ranks[index] for index in self._group.missing()])


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
