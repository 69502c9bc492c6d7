"""Transports of workers that share the memory of their hosts: means go through it, all else over the process group.

Where the workers are on several hosts, a mean has three stages, and only the second uses the network:

    host A: workers 0, 1                      host B: workers 2, 3
    0 and 1 add in memory                     2 and 3 add in memory
    worker 0 exchanges the sums <-----------> worker 2 exchanges the sums     (a PeerGroup of the first workers)
    copy from worker 0 to 1                   copy from worker 2 to 3

The second stage of a mean begins when a later operation is submitted, or in a wait, and runs in a thread. It writes
to new memory only, so that nothing changes a tensor after its wait has failed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from stretto.collective_ops import AllReduceMean, CollectiveOp, Exchange
from stretto.errors import TransportError
from stretto.notices import say_once
from stretto.transport.device_groups import agreed_kind, by_host, notice_host_memory, offered_device
from stretto.transport.gloo_ring import all_reduce_bytes
from stretto.transport.host_exchanges import HostExchanges
from stretto.transport.host_memory import KINDS, LOOK_S, HostMemory, Offer, join_memory, offer_memory
from stretto.transport.interface import CHANNELS, Collectives, Handle, Message, Traffic, Transport
from stretto.transport.peer_group import PeerGroup

_OFFER = msgspec.msgpack.Decoder(tuple[Offer, str])
SEGMENT_BYTES = 4 << 20
"""Bytes of a tensor that hosts exchange at a time. Other workers of a host have a time limit for each segment."""

PLAIN = (
    "what workers of different hosts exchange is not encrypted, and a machine that reaches their ports can change it; "
    "stretto run --listen ADDRESS encrypts it"
)


class NetworkTransport(Collectives, Protocol):
    """Transport among all workers that can be aborted: over gloo, or encrypted."""

    @property
    def timeout_s(self) -> float:
        """Seconds without data after which a wait fails."""
        ...

    def connect_devices(self, device: torch.device, failure_timeout_s: float | None = None) -> None:
        """Form the group of all workers' devices."""
        ...

    def failure(self, error: Exception, what: str, waited_s: float = 0.0) -> TransportError:
        """Return the error of a failed wait."""
        ...

    def abort(self) -> None:
        """Abort all operations. Idempotent."""
        ...


Network = TypeVar("Network", bound=NetworkTransport)


def over_shared_memory(
    inner: Network,
    device: torch.device | None = None,
    failure_timeout_s: float | None = None,
    notices_hosts: bool = False,
) -> Network | SharedMemoryTransport:
    """Return a transport that computes means in shared memory, or the transport itself if any worker can't do so.

    Workers with a device each, as `device` of the model, connect their devices instead.
    All workers call this at the same time. Workers in different network namespaces count as workers on different hosts,
    so that a network that is limited or measured on purpose is used. If no host has several workers, it is of no use.
    `notices_hosts` prints a notice if there are several, since `inner` does not encrypt.
    """
    if inner.workers == 1:
        return inner
    try:
        with contextlib.ExitStack() as files:
            own_offer = (offer_memory(inner.workers, files), offered_device(device))
            messages = inner.all_gather_bytes(msgspec.msgpack.encode(own_offer))
            decoded = [_OFFER.decode(one) for one in messages]
            offers = [offer for offer, _ in decoded]
            names = [one.host for one in offers]
            if notices_hosts and inner.worker == 0 and len(set(filter(None, names))) > 1:
                say_once(PLAIN)
            if device is not None and _connects_devices(inner, device, [one for _, one in decoded], failure_timeout_s):
                return inner
            hosts = [[rank for rank, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]
            if not all(names) or len(hosts) == len(offers):
                return inner
            own = next(ranks for ranks in hosts if inner.worker in ranks)
            memory = join_memory(offers, own, inner.worker, files) if len(own) > 1 else None
            has_joined = inner.all_gather_bytes(b"" if memory is None and len(own) > 1 else b"joined")
    except TransportError:
        inner.close()
        raise
    if not all(has_joined):
        return inner
    if len(hosts) > 1:
        return HostsTransport(inner, memory, [ranks[0] for ranks in hosts])
    return SharedMemoryTransport(inner, memory)


def _connects_devices(
    inner: NetworkTransport, device: torch.device, offers: Sequence[str], failure_timeout_s: float | None
) -> bool:
    kind, why = agreed_kind(offers)
    if kind:
        inner.connect_devices(device, failure_timeout_s)
    elif why and inner.worker == 0:
        notice_host_memory(why)
    return bool(kind)


class SharedMemoryTransport(Transport):
    """One worker's end on a host with all workers.

    Means and exchanges go through memory; bytes, all-gathers and means of other dtypes go over `inner`, which also
    counts its bytes. A failure raises the errors of `inner`, and ends the waits of all workers. `memory` is None for
    the only worker of a host.
    """

    def __init__(self, inner: NetworkTransport, memory: HostMemory | None) -> None:
        super().__init__(inner.worker, inner.workers)
        self._inner, self._memory = inner, memory
        self._exchanges = HostExchanges(inner, memory)
        self._is_closed = False
        self._pending: deque[_Mean] = deque()
        """Means in progress, whose tensors the kernel writes into."""
        self._sent = self._received = 0

    def submit(self, op: CollectiveOp) -> Handle:
        """Start an operation. A mean continues while later operations are submitted and waited for."""
        tensor = op.tensor
        if tensor.device.type != "cpu":
            return by_host(self.submit, op)
        if isinstance(op, Exchange):
            return self._exchanges.submit(op)
        is_sum = isinstance(op, AllReduceMean) and tensor.dtype in KINDS
        if not is_sum or self._is_closed:
            return self._inner.submit(op)
        mean = _Mean(self, tensor, tensor.contiguous(), [])
        self._pending.append(mean)
        self._begin(mean)
        return mean

    def all_gather_bytes(self, message: Message) -> list[bytes]:
        """Return the messages of all workers."""
        return self._inner.all_gather_bytes(message)

    def broadcast_bytes(self, message: Message, root: int = 0) -> bytes:
        """Return the root's message."""
        return self._inner.broadcast_bytes(message, root)

    def traffic(self) -> Traffic:
        """Return the bytes of the network, and those through memory: of means as gloo would exchange them."""
        counted, exchanges = self._inner.traffic(), self._exchanges
        sent, received = self._sent + exchanges.sent, self._received + exchanges.received
        is_counted = counted.counted and not sent + received
        return Traffic(counted.bytes_sent + sent, counted.bytes_received + received, is_counted)

    def abort(self) -> None:
        """Abort all operations of all workers, now and later. Callable from any thread. Idempotent."""
        if (memory := self._memory) is not None:
            memory.abort()
        self._inner.abort()

    def close(self) -> None:
        """Unmap the memory, and close the process group."""
        if self._memory is not None:
            self._memory.leave()
        self._exchanges.close()
        self._memory, self._is_closed = None, True
        self._pending.clear()
        self._inner.close()

    def _begin(self, mean: _Mean) -> None:
        """Begin the sum of a mean in memory."""
        sent, received = all_reduce_bytes(self.worker, self.workers, mean.tensor.nbytes, mean.tensor.itemsize)
        self._sent, self._received = self._sent + sent, self._received + received
        assert self._memory is not None
        mean.segments.append(_Segment(mean.flat, self._memory.start_sum(mean.flat)))

    def _finish(self, mean: _Mean) -> None:
        """Complete all means up to this one."""
        began, why = time.monotonic(), "it was closed" if self._is_closed else ""
        while not mean.is_done and not why:
            if why := self._advance(self._pending[0]):
                self._abort_memory()
            else:
                self._pending.popleft().take()
        if why:
            what = f"the mean of {mean.tensor.numel()} numbers"
            raise self._inner.failure(RuntimeError(why), what, time.monotonic() - began)

    def _advance(self, mean: _Mean) -> str:
        """Complete a mean, or return the reason of its failure."""
        return self._wait(mean.segments[0].summed)

    def _wait(self, piece: int, timeouts: int = 1) -> str:
        return self._memory.wait(piece, timeouts * self._inner.timeout_s) if self._memory is not None else ""

    def _abort_memory(self) -> None:
        if self._memory is not None:
            self._memory.abort()


class HostsTransport(SharedMemoryTransport):
    """One worker's end on one of several hosts, whose first workers are the `leaders`.

    Its bytes are those of its sockets: workers that do not lead send none for means.
    """

    def __init__(self, inner: NetworkTransport, memory: HostMemory | None, leaders: Sequence[int]) -> None:
        super().__init__(inner, memory)
        leads = inner.worker in leaders
        self._between = _Between(PeerGroup(inner, leaders, channel=CHANNELS // 2 - 1)) if leads else None
        self._unsent: deque[_Segment] = deque()
        """Segments whose sums of this host are not being exchanged yet."""

    def submit(self, op: CollectiveOp) -> Handle:
        """Start an operation, and the exchanges between hosts of earlier means that this host has added."""
        handle = super().submit(op)
        self._send_sums()
        return handle

    def close(self) -> None:
        """Unmap the memory, and close the process group."""
        if self._between is not None:
            self._between.close()
        super().close()

    def _begin(self, mean: _Mean) -> None:
        for part in torch.split(mean.flat.detach().view(-1), SEGMENT_BYTES // mean.flat.itemsize):
            mean.segments.append(_Segment(part, self._memory.start_sum(part) if self._memory is not None else 0))
        self._unsent.extend(mean.segments)

    def _advance(self, mean: _Mean) -> str:
        for segment in mean.segments:
            if why := self._wait(segment.summed) or self._spread(segment):
                return why
        return ""

    def _spread(self, segment: _Segment) -> str:
        """Exchange the sum of this host with the others, and copy the mean to its workers."""
        self._send_sums()
        found = segment.values
        if segment.mean is not None:
            while not futures.wait([segment.mean], LOOK_S).done:
                if self._memory is not None and (why := self._memory.trouble()):
                    return why
            if (error := segment.mean.exception()) is not None:
                self._abort_memory()
                raise error
            found = segment.mean.result()
        timeouts = 2 if self._between is None else 1  # the leader's timeout comes first, and names the late worker
        if self._memory is not None and (why := self._wait(self._memory.start_copy(found), timeouts)):
            return why
        if segment.mean is not None:
            segment.values.copy_(found)
        return ""

    def _send_sums(self) -> None:
        if self._between is None:
            return
        while self._unsent and (self._memory is None or self._memory.done >= self._unsent[0].summed):
            segment = self._unsent.popleft()
            segment.mean = self._between.start(segment.values)


class _Between:
    """Means among the leaders, one after another in a thread, which ends with `close`."""

    def __init__(self, group: PeerGroup) -> None:
        self._group = group
        self._orders: queue.SimpleQueue[tuple[Tensor, futures.Future[Tensor]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def start(self, values: Tensor) -> futures.Future[Tensor]:
        """Start a mean; its result is a new tensor."""
        mean: futures.Future[Tensor] = futures.Future()
        self._orders.put((values, mean))
        return mean

    def close(self) -> None:
        """End the thread after the means that were started."""
        self._orders.put(None)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            values, mean = order
            try:
                found: Any = self._group.submit(AllReduceMean(values)).wait()
                mean.set_result(found)
            except Exception as error:
                mean.set_exception(error)
            del order, values, mean


@dataclass(slots=True)
class _Segment:
    """Part of a mean that hosts exchange at a time."""

    values: Tensor
    summed: int
    """Last piece of the sum of this host."""
    mean: futures.Future[Tensor] | None = None
    """Mean of all hosts at a leader, once it was started."""


@dataclass(slots=True)
class _Mean:
    transport: SharedMemoryTransport
    tensor: Tensor
    flat: Tensor
    """The tensor, or a contiguous copy."""
    segments: list[_Segment]
    is_done: bool = False

    def wait(self) -> Tensor:
        self.transport._finish(self)
        return self.tensor

    def take(self) -> None:
        """Copy the result from the contiguous copy, if there is one."""
        if self.flat is not self.tensor:
            self.tensor.copy_(self.flat)
        self.is_done = True
