"""Transport over process groups of torch.distributed: gloo between CPUs, NCCL between GPUs.

The groups are not torch's default group, so a script can use torch.distributed itself, and each generation of workers
connects its own groups.
"""

from __future__ import annotations

import contextlib
import math
import re
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from stretto.collective_ops import AllGather, AllReduceMean, Answer, CollectiveOp, Exchange
from stretto.errors import BrokenTransportError, MemberOutError, NothingCameError, TransportError
from stretto.transport.device_groups import GROUPS, by_host
from stretto.transport.device_memory import use_device
from stretto.transport.gloo_sockets import GroupSockets
from stretto.transport.gloo_sockets import sockets_of_process as _sockets
from stretto.transport.interface import (
    Handle,
    Message,
    PairNumbers,
    Traffic,
    Transport,
    as_bytes,
    check_peer,
    made,
    nbytes,
)
from stretto.transport.nccl_communicator import abortable_group
from stretto.transport.pair_exchange import ExchangeHandle
from stretto.transport.tcp_info import tcp_bytes

FRAME = 256
"""Bytes of the first frame of a message: its length in 8 bytes, then its beginning."""
PIECE_BYTES = 16 << 20
"""Bytes of a piece of longer messages. Each piece has its own time limit, so that a slow link is not a failure."""
LOOK_S = 0.02
"""Seconds between two checks of a wait for an abort."""
LOOK = timedelta(seconds=LOOK_S)
QUIET_S = 0.02
"""Seconds for gloo's threads to finish a computation once no more bytes can arrive."""
SEAL_TAG = 0
"""Tag that no message uses."""
ENDED = 4
"""Number of ended operations that are kept, twice the number of gloo's threads.

A thread of gloo that drops an operation last takes the interpreter for each tensor of it. A process forked in that
moment inherits a lock of CPython 3.11 that is never released, and the child (a DataLoader's worker, say) hangs.
"""


class ProcessGroupTransport(Transport):
    """One worker's end of a process group. A wait fails after `timeout_s` without data.

    An `elastic` one can be aborted by `abort`, and aborts itself at the first failure, which shuts the connections and
    so notifies the other workers; all waits and later operations raise BrokenTransportError.
    """

    def __init__(
        self,
        store: Store,
        worker: int,
        workers: int,
        timeout_s: float,
        elastic: bool = False,
    ) -> None:
        super().__init__(worker, workers)
        self.timeout_s, self._store = timeout_s, store
        before = _sockets()
        self._control = _form(dist.ProcessGroupGloo, store, "control", worker, workers, timeout_s)
        self._devices: Any = None
        self._device_kind = "cpu"
        self._opened = frozenset(one for one, name in _sockets().items() if before.get(one) != name)
        self._worked_out = 0
        self._tag = 0
        self._pair_numbers = PairNumbers()
        self._last = Traffic(0, 0, counted=False)
        self._broken = threading.Event()
        self._sealed_at = math.inf
        self._under_way: set[Any] = set()
        self._ended: deque[Any] = deque(maxlen=ENDED)
        self._sockets = GroupSockets(PrefixStore("control", store), worker, workers, self._opened) if elastic else None

    def connect_devices(self, device: torch.device, failure_timeout_s: float | None = None) -> None:
        """Form the group of all workers' devices of this kind, which carries their means and all-gathers.

        That of an elastic transport ends its waits after an abort, and the abort after `failure_timeout_s`.
        """
        self._device_kind = device.type
        use_device(device)
        if self._sockets is None:
            kind = getattr(dist, GROUPS[device.type])
            self._devices = _form(kind, self._store, "tensors", self.worker, self.workers, self.timeout_s)
        else:
            store, limit_s = PrefixStore("tensors", self._store), failure_timeout_s or self.timeout_s
            self._devices = abortable_group(store, self.worker, self.workers, device, self.timeout_s, limit_s)
        self.submit(AllReduceMean(torch.zeros(1, device=device))).wait()  # connects now, and not in the first step

    @property
    def is_broken(self) -> bool:
        """True if the transport was aborted."""
        return self._broken.is_set()

    def carries(self, op: CollectiveOp) -> bool:
        """Return True if the tensor of an operation need not be on the CPU. Exchanges are between CPUs."""
        return op.tensor.device.type in ("cpu", self._device_kind if not isinstance(op, Exchange) else "cpu")

    def submit(self, op: CollectiveOp) -> Handle:
        """Start an all-reduce, or for messages of different lengths an all-gather of their sizes."""
        if not self.carries(op):
            return by_host(self.submit, op)
        if isinstance(op, Exchange):
            check_peer(op, self.worker, self.workers)
        self._worked_out += self._cost(op)
        try:
            if isinstance(op, AllReduceMean):
                on_device = op.tensor.device.type != "cpu"
                return _AllReduceHandle(self, op.tensor, self.begin("allreduce", [op.tensor], on_device=on_device))
            if isinstance(op, Exchange):
                return ExchangeHandle(self, op, self._pair_numbers.next(op))
            self._tag += 1
            return _AllGatherHandle(self, op, *self._gather_sizes(op), self._tag)
        except BrokenTransportError as error:
            return _BrokenHandle(str(error))

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the messages of all workers, in one round if all are short."""
        message = made(message)
        frames = self._all_frames(_frame(message))
        lengths = [_length(frame) for frame in frames]
        longest = max(lengths)
        if longest <= FRAME - 8:
            return [_head(frame) for frame in frames]
        whole = self._all_frames(_padded(as_bytes(message), longest))
        return [bytes(one[:length].numpy()) for one, length in zip(whole, lengths, strict=True)]

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the root's message, in one round if it is short."""
        message = made(message) if self.worker == root else b""
        frame = _frame(message)
        self._finish(self.begin("broadcast", frame, root), "a message")
        length = _length(frame)
        if length <= FRAME - 8:
            return _head(frame)
        whole = as_bytes(message) if self.worker == root else torch.empty(length, dtype=torch.uint8, device="cpu")
        for piece in _pieces(whole):
            self._finish(self.begin("broadcast", piece, root), "a message")
        return bytes(whole.numpy())

    def traffic(self) -> Traffic:
        """Return the bytes of the group's sockets as the kernel counts them, or computed if it does not."""
        if self._control is None:
            return self._last
        counted = (
            None if self._devices is not None else self._sockets.traffic() if self._sockets else _counted(self._opened)
        )
        if counted is None:
            self._last = Traffic(self._worked_out, self._worked_out, counted=False)
        elif counted.bytes_sent >= self._last.bytes_sent:
            self._last = counted
        return self._last

    def abort(self) -> None:
        """Abort all operations, now and later. Callable from any thread. Idempotent."""
        if self._sockets is None:
            raise TransportError("only an elastic transport can be aborted")
        self._broken.set()
        if (devices := self._devices) is not None:
            devices.abort()
        self._sockets.shut()

    def close(self) -> None:
        """Close the groups. A group with operations that gloo has not ended is kept for `drop_parked`.

        Raise MemberOutError if a device may still write to tensors: this process can't use it any more.
        """
        self.traffic()
        has_ended = self._devices is None or self._close_devices()
        if self._sockets is not None and self._control is not None:
            self._park(self._broken.is_set())
        self._opened = frozenset()
        self._control = self._devices = None
        self._ended.clear()
        if not has_ended:
            raise MemberOutError(f"the operations of {self._device_kind} could not be aborted; restarting this worker")

    def _close_devices(self) -> bool:
        if self._sockets is not None:
            return bool(self._devices.close())
        self._devices.shutdown()
        return True

    def _park(self, broken: bool) -> None:
        if broken:
            self._let_go()
        self._broken.set()
        self._sealed_at = min(self._sealed_at, time.monotonic())
        if self._sockets is not None:
            self._sockets.close()
        _parked.append(_Parked(self._control, self._under_way))
        if not broken:
            drop_parked()

    def _cost(self, ask: CollectiveOp) -> int:
        if isinstance(ask, Exchange):
            return nbytes(ask.tensor)
        factor = 2 * (self.workers - 1) / self.workers if isinstance(ask, AllReduceMean) else self.workers - 1
        return round(factor * nbytes(ask.tensor))

    def _gather_sizes(self, ask: AllGather) -> tuple[list[Tensor], Any]:
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.workers)]
        work = self.begin("allgather", [sizes], [torch.tensor([ask.tensor.numel()], device="cpu")])
        return sizes, work

    def _all_frames(self, frame: Tensor) -> list[Tensor]:
        frames = [torch.empty_like(frame) for _ in range(self.workers)]
        for mine, *all_of_it in zip(_pieces(frame), *map(_pieces, frames), strict=True):
            self._finish(self.begin("allgather", [all_of_it], [mine]), "a message of every worker")
        return frames

    def begin(self, verb: str, *what: Any, on_device: bool = False) -> Any:
        """Start an operation of gloo, or of the group of the devices."""
        if self._broken.is_set():
            raise self.failure(RuntimeError("it was aborted"), verb)
        try:
            work = getattr(self._group(on_device), verb)(*what)
        except RuntimeError as error:
            raise self.failure(error, verb) from error
        if self._sockets is not None and verb not in ("send", "recv"):
            self._under_way.add(work)
        return work

    def _group(self, on_device: bool) -> Any:
        """Return a group. Do not keep it in a frame that a traceback may hold: the group would not be freed."""
        if self._control is None:
            raise TransportError("the transport is closed")
        return self._devices if on_device else self._control

    def _finish(self, work: Any, what: str) -> None:
        """Wait for an operation. Of devices, unless the transport is elastic, only the current stream waits for it."""
        began = time.monotonic()
        try:
            if self._sockets is None:
                work.wait()
            else:
                self._watch(work)
        except RuntimeError as error:
            raise self.failure(error, what, time.monotonic() - began) from error
        self._ended.append(work)

    def _finish_all(self, works: Sequence[Any], what: str) -> None:
        """Wait for sends and receives.

        Their completion can't be polled, so an elastic transport waits in a thread, which is abandoned on an abort. The
        thread writes only to objects that nothing else uses.
        """
        if self._sockets is None:
            for work in works:
                self._finish(work, what)
            return
        began, errors, over = time.monotonic(), list[str](), threading.Event()
        threading.Thread(target=_wait_apart, args=(works, errors, over), daemon=True).start()
        while not over.wait(LOOK_S):
            if self._broken.is_set() and not over.is_set():
                errors.append("it was aborted")
                break
        if errors:
            raise self.failure(RuntimeError(errors[0]), what, time.monotonic() - began)

    def _watch(self, work: Any) -> None:
        """Wait for an operation, or for an abort."""
        while not work.is_completed():
            if self._broken.is_set():
                raise RuntimeError("it was aborted")
            with contextlib.suppress(RuntimeError):
                work.wait(LOOK)
                break
        else:
            work.wait()
        self._under_way.discard(work)

    def _let_go(self) -> None:
        """Wait until gloo, or a device, can no longer write into the tensors of broken operations.

        Most operations end with an error immediately. Gloo forgets one whose message was cut off until its time-out:
        its thread sleeps and holds the tensor. It is abandoned once nothing more can be read and the thread had time to
        finish a computation.
        """
        if self._devices is not None:
            self._devices.settle()
        self._seal()
        while not all(work.is_completed() for work in self._under_way) and time.monotonic() < self._sealed_at + QUIET_S:
            time.sleep(0.0005)

    def _seal(self) -> None:
        """Make gloo close its open connections: it does not notice the end of one whose message has no receiver.

        Its thread would spin on such a connection. A receive fails at the shut connection, or closes all by timing out.
        """
        if self._sealed_at < math.inf:
            return
        for one in range(self.workers):
            with contextlib.suppress(RuntimeError):
                if one != self.worker:
                    self._control.recv([torch.empty(1, device="cpu")], one, SEAL_TAG).wait(timedelta(milliseconds=1))
        self._sealed_at = time.monotonic()

    def failure(self, error: Exception, what: str, waited_s: float = 0.0) -> TransportError:
        """Return the error of a failed wait. An elastic transport is aborted."""
        text = f"worker {self.worker} waited {waited_s:.1f} s for {what}; another worker failed or is too late"
        if self._sockets is None:
            return TransportError(f"{text}: {reason(error)}")
        self.abort()
        self._let_go()
        kind = NothingCameError if "timed out" in str(error).lower() else BrokenTransportError
        return kind(f"{text}: {reason(error)}")


@dataclass(slots=True)
class _Parked:
    """Groups of a closed transport, and operations that gloo may still be running."""

    control: Any
    under_way: set[Any]

    def idle(self) -> bool:
        return all(work.is_completed() for work in self.under_way)


_parked: list[_Parked] = []


def drop_parked() -> int:
    """Drop the groups of closed transports whose operations have ended; return the number of others.

    Dropping a group blocks until its operations have ended.
    """
    _parked[:] = [one for one in _parked if not one.idle()]
    return len(_parked)


@dataclass(slots=True)
class _BrokenHandle:
    why: str

    def wait(self) -> Answer:
        raise BrokenTransportError(self.why)


@dataclass(slots=True)
class _AllReduceHandle:
    transport: ProcessGroupTransport
    tensor: Tensor
    work: Any

    def wait(self) -> Tensor:
        self.transport._finish(self.work, f"the mean of {self.tensor.numel()} numbers")
        return self.tensor


@dataclass(slots=True)
class _AllGatherHandle:
    transport: ProcessGroupTransport
    ask: AllGather
    sizes: list[Tensor]
    work: Any
    tag: int

    def wait(self) -> Answer:
        self.transport._finish(self.work, "the sizes of every worker's message")
        sizes = [int(size) for size in self.sizes]
        message = self.ask.tensor
        if message.device.type != "cpu":
            return self._padded(sizes)
        found = [message if one == self.transport.worker else message.new_empty(size) for one, size in enumerate(sizes)]
        step = PIECE_BYTES // message.element_size()
        for at in range(0, max(sizes), step):
            pieces = [one[at : at + step] for one in found]
            self.transport._finish_all([*self._sends(pieces), *self._receives(pieces)], "every worker's message")
        return found

    def _sends(self, pieces: Sequence[Tensor]) -> list[Any]:
        """Send this worker's piece to each other worker, unless it is empty."""
        mine = pieces[self.transport.worker]
        others = [one for one in range(self.transport.workers) if one != self.transport.worker] if mine.numel() else []
        return [self.transport.begin("send", [mine], one, self.tag) for one in others]

    def _receives(self, pieces: Sequence[Tensor]) -> list[Any]:
        others = [one for one, into in enumerate(pieces) if one != self.transport.worker and into.numel()]
        return [self.transport.begin("recv", [pieces[one]], one, self.tag) for one in others]

    def _padded(self, sizes: Sequence[int]) -> Answer:
        """Gather messages padded to the longest, as NCCL requires."""
        padded = _padded(self.ask.tensor, max(sizes))
        found = [torch.empty_like(padded) for _ in sizes]
        work = self.transport.begin("allgather", [found], [padded], on_device=True)
        self.transport._finish(work, "every worker's message")
        return [one[:size] for one, size in zip(found, sizes, strict=True)]


def _wait_apart(works: Sequence[Any], errors: list[str], over: threading.Event) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        errors.append(reason(error))
    over.set()


def _pieces(message: Tensor) -> Sequence[Tensor]:
    """Split a message into pieces that are sent one after another."""
    return torch.split(message, PIECE_BYTES // message.element_size())


def _form(kind: Any, store: Store, name: str, worker: int, workers: int, timeout_s: float) -> Any:
    try:
        return kind(PrefixStore(name, store), worker, workers, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TransportError(
            f"worker {worker} of {workers} could not connect with the others within {timeout_s:g} s: {reason(error)}"
        ) from error


def reason(error: Exception) -> str:
    """Return torch's error as one line, without places in its source."""
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


def _counted(sockets: Sequence[int] | frozenset[int]) -> Traffic | None:
    """The bytes that the kernel saw leave and come on these sockets, repeats included; None where it does not tell."""
    pairs = [pair for one in sockets if (pair := tcp_bytes(one)) is not None]
    if not pairs:
        return None
    return Traffic(sum(sent for sent, _ in pairs), sum(received for _, received in pairs), counted=True)
