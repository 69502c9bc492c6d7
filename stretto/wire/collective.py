"""A wire over torch.distributed's process groups: gloo between CPUs, NCCL between GPUs.

The groups are made directly, not as torch's default group: a script that uses torch.distributed itself is left alone,
and a later generation of workers can form its own.
"""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from stretto.errors import WireError
from stretto.wire.seam import Traffic, as_bytes, nbytes
from stretto.wire.tcp import tcp_bytes
from stretto.words import Answer, Ask, Every, Mean

FRAME = 256
"""Bytes of the first frame of a message: its length in 8 bytes, then as much of it as fits."""


class CollectiveWire:
    """One worker's end of a process group. All waits share one limit, `timeout_s`."""

    def __init__(
        self,
        store: Store,
        worker: int,
        workers: int,
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        self.worker = worker
        self.workers = workers
        self.timeout_s = timeout_s
        before = _sockets()
        self._control = _form(dist.ProcessGroupGloo, store, "control", worker, workers, timeout_s)
        self._tensors = self._control
        self._nccl = device is not None and device.type == "cuda"
        if self._nccl:
            self._tensors = _form(dist.ProcessGroupNCCL, store, "tensors", worker, workers, timeout_s)
        self._opened = _sockets() - before
        self._worked_out = 0
        self._tag = 0
        self._last = Traffic(0, 0, counted=False)

    def start(self, ask: Ask) -> _MeanTicket | _EveryTicket:
        """Begin an all-reduce, or an all-gather of the sizes for messages that may differ in length."""
        self._worked_out += self._cost(ask)
        if isinstance(ask, Mean):
            return _MeanTicket(self, ask.tensor, self._begin("allreduce", [ask.tensor]))
        self._tag += 1
        return _EveryTicket(self, ask, *self._gather_sizes(ask), self._tag)

    def gather(self, message: bytes) -> list[bytes]:
        """The message of every worker; one round when all are short."""
        frames = self._all_frames(_frame(message))
        lengths = [_length(frame) for frame in frames]
        longest = max(lengths)
        if longest <= FRAME - 8:
            return [_head(frame) for frame in frames]
        whole = self._all_frames(_padded(as_bytes(message), longest))
        return [bytes(one[:length].numpy()) for one, length in zip(whole, lengths, strict=True)]

    def tell(self, message: bytes, teller: int = 0) -> bytes:
        """The teller's message; one round when it is short."""
        frame = _frame(message if self.worker == teller else b"")
        self._finish(self._begin("broadcast", frame, teller), "a message")
        length = _length(frame)
        if length <= FRAME - 8:
            return _head(frame)
        whole = as_bytes(message) if self.worker == teller else torch.empty(length, dtype=torch.uint8)
        self._finish(self._begin("broadcast", whole, teller), "a message")
        return bytes(whole.numpy())

    def traffic(self) -> Traffic:
        """The bytes of the group's own sockets, as the kernel counts them; worked out where it does not."""
        counted = None if self._nccl else _counted(self._opened)
        if counted is None:
            self._last = Traffic(self._worked_out, self._worked_out, counted=False)
        elif counted.bytes_sent >= self._last.bytes_sent:
            self._last = counted
        return self._last

    def close(self) -> None:
        """Let go of the groups."""
        self.traffic()
        self._opened = frozenset()
        self._control = self._tensors = None

    def _cost(self, ask: Ask) -> int:
        factor = 2 * (self.workers - 1) / self.workers if isinstance(ask, Mean) else self.workers - 1
        return round(factor * nbytes(ask.tensor))

    def _gather_sizes(self, ask: Every) -> tuple[list[Tensor], Any]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.workers)]
        work = self._begin("allgather", [sizes], [torch.tensor([ask.tensor.numel()])], control=True)
        return sizes, work

    def _all_frames(self, frame: Tensor) -> list[Tensor]:
        frames = [torch.empty_like(frame) for _ in range(self.workers)]
        self._finish(self._begin("allgather", [frames], [frame], control=True), "a message of every worker")
        return frames

    def _begin(self, verb: str, *what: Any, control: bool = False) -> Any:
        """Start an operation of the group; bytes always go over the control group."""
        group = self._control if control or verb == "broadcast" else self._tensors
        if group is None:
            raise WireError("the wire is closed")
        try:
            return getattr(group, verb)(*what)
        except RuntimeError as error:
            raise self._broken(error, verb) from error

    def _finish(self, work: Any, what: str) -> None:
        began = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            raise self._broken(error, what, time.monotonic() - began) from error

    def _broken(self, error: Exception, what: str, waited_s: float = 0.0) -> WireError:
        why = reason(error)
        return WireError(
            f"worker {self.worker} waited {waited_s:.1f} s for {what}; another worker is gone or too late: {why}"
        )


@dataclass(slots=True)
class _MeanTicket:
    wire: CollectiveWire
    tensor: Tensor
    work: Any

    def wait(self) -> Tensor:
        self.wire._finish(self.work, f"the mean of {self.tensor.numel()} numbers")
        return self.tensor


@dataclass(slots=True)
class _EveryTicket:
    wire: CollectiveWire
    ask: Every
    sizes: list[Tensor]
    work: Any
    tag: int

    def wait(self) -> Answer:
        self.wire._finish(self.work, "the sizes of every worker's message")
        sizes = [int(size) for size in self.sizes]
        message = self.ask.tensor
        found = [message if one == self.wire.worker else message.new_empty(size) for one, size in enumerate(sizes)]
        if self.wire._nccl:
            return self._padded(sizes)
        for work in [*self._sends(message), *self._receives(found)]:
            self.wire._finish(work, "every worker's message")
        return found

    def _sends(self, message: Tensor) -> list[Any]:
        """This worker's message to each of the others, as long as it is; nothing where it is empty."""
        others = [one for one in range(self.wire.workers) if one != self.wire.worker] if message.numel() else []
        return [self.wire._begin("send", [message], one, self.tag) for one in others]

    def _receives(self, found: Sequence[Tensor]) -> list[Any]:
        others = [one for one, into in enumerate(found) if one != self.wire.worker and into.numel()]
        return [self.wire._begin("recv", [found[one]], one, self.tag) for one in others]

    def _padded(self, sizes: Sequence[int]) -> Answer:
        """All messages as long as the longest, which is what NCCL can gather."""
        padded = _padded(self.ask.tensor, max(sizes))
        found = [torch.empty_like(padded) for _ in sizes]
        self.wire._finish(self.wire._begin("allgather", [found], [padded]), "every worker's message")
        return [one[:size] for one, size in zip(found, sizes, strict=True)]


def _form(kind: Any, store: Store, name: str, worker: int, workers: int, timeout_s: float) -> Any:
    try:
        return kind(PrefixStore(name, store), worker, workers, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise WireError(
            f"worker {worker} of {workers} could not meet the others within {timeout_s:g} s: {reason(error)}"
        ) from error


def reason(error: Exception) -> str:
    """What an engine says went wrong, in one line, without the places in its own source."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^(\[[^\]]*\]\s*)+", "", lines[0]).partition(". This ")[0]


def _frame(message: bytes) -> Tensor:
    head = struct.pack("<q", len(message)) + message[: FRAME - 8]
    return _padded(as_bytes(head), FRAME)


def _length(frame: Tensor) -> int:
    return int(struct.unpack("<q", bytes(frame[:8].numpy()))[0])


def _head(frame: Tensor) -> bytes:
    return bytes(frame[8 : 8 + _length(frame)].numpy())


def _padded(message: Tensor, length: int) -> Tensor:
    """The message with zeros behind it; gloo aborts the process when lengths differ."""
    if message.numel() == length:
        return message
    padded = message.new_zeros(length)
    padded[: message.numel()] = message
    return padded


def _sockets() -> frozenset[int]:
    """The descriptors of this process that are sockets; none where the system does not list them."""
    try:
        entries = os.listdir("/proc/self/fd")
    except OSError:
        return frozenset()
    return frozenset(int(entry) for entry in entries if _is_socket(entry))


def _is_socket(entry: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{entry}").startswith("socket:")
    except OSError:
        return False


def _counted(sockets: Sequence[int] | frozenset[int]) -> Traffic | None:
    """The bytes that the kernel saw leave and come on these sockets, repeats included; None where it does not tell."""
    pairs = [pair for one in sockets if (pair := tcp_bytes(one)) is not None]
    if not pairs:
        return None
    return Traffic(sum(sent for sent, _ in pairs), sum(received for _, received in pairs), counted=True)
