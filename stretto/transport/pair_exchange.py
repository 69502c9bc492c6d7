"""Exchange of tensors between two workers over gloo, in a thread of each."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.collective_ops import Exchange
from stretto.errors import TransportError
from stretto.transport.interface import CHANNELS, as_bytes

LOOK_S = 0.02
"""Seconds between two checks of a wait for an abort."""
EXCHANGE_FRAME = struct.Struct("<q24s")
"""Frame of an exchange: the number of numbers, and their dtype."""
EXCHANGE_BYTES, AHEAD = 1 << 19, 2
"""Bytes of a piece of an exchange, and pieces that a worker sends before it has received as many.

With more on the way, both directions of one connection fill the queues of a link, and take twice the time.
"""
EXCHANGE_TAG, NUMBERS = 1 << 30, 1 << 25
"""Tags of exchanges: from the first on, two for each channel and for each number, which begin again after the last."""


class PairTransport(Protocol):
    """Transport that carries an exchange."""

    @property
    def worker(self) -> int:
        """Rank of this worker."""
        ...

    @property
    def is_broken(self) -> bool:
        """True if the transport was aborted."""
        ...

    def begin(self, verb: str, *what: Any) -> Any:
        """Start to send or to receive."""
        ...

    def failure(self, error: Exception, what: str, waited_s: float = 0.0) -> TransportError:
        """Return the error of a failed wait."""
        ...


class ExchangeHandle:
    """Exchange in progress, in a thread: it must not need a wait at one of the two workers to continue at the other.

    Frames with the dtypes and lengths are exchanged first, since gloo aborts the process when lengths differ.
    """

    def __init__(self, transport: PairTransport, op: Exchange, number: int) -> None:
        self._transport, self._op, self._began = transport, op, time.monotonic()
        self._tag = EXCHANGE_TAG + 2 * (number % NUMBERS * CHANNELS + op.channel)
        mine, self._frame = (
            op.tensor.detach().reshape(-1),
            torch.empty(EXCHANGE_FRAME.size, dtype=torch.uint8, device="cpu"),
        )
        head = as_bytes(EXCHANGE_FRAME.pack(mine.numel(), str(mine.dtype).encode()))
        self._mine, self._works = mine, [self._begin("recv", self._frame), self._begin("send", head)]
        self._received: Tensor | None = None
        self._error: Exception | None = None
        self._is_over = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self) -> Tensor:
        transport = self._transport
        while not self._is_over.wait(LOOK_S):
            if transport.is_broken:
                break
        if self._received is not None:
            return self._received
        error = self._error or RuntimeError("it was aborted")
        if isinstance(error, TransportError):
            raise error
        what = f"an exchange with worker {self._op.peer}"
        raise transport.failure(error, what, time.monotonic() - self._began)

    def _begin(self, verb: str, piece: Tensor, shift: int = 0) -> Any:
        return self._transport.begin(verb, [piece], self._op.peer, self._tag + shift)

    def _run(self) -> None:
        try:
            for work in self._works:
                work.wait()
            received = self._empty(*EXCHANGE_FRAME.unpack(self._frame.numpy().tobytes()))
            receives = [self._begin("recv", piece, 1) for piece in _pieces(received)]
            sends = list[Any]()
            for number, piece in enumerate(_pieces(self._mine)):
                for work in receives[max(number - AHEAD, 0) : max(number - AHEAD + 1, 0)]:
                    work.wait()
                sends.append(self._begin("send", piece, 1))
            for work in (*receives[max(len(sends) - AHEAD, 0) :], *sends):
                work.wait()
            self._received = received
        except (RuntimeError, TransportError) as error:
            self._error = error
        self._is_over.set()

    def _empty(self, numbers: int, dtype: bytes) -> Tensor:
        """Return the tensor to receive. Raise TransportError if its dtype is not that of this worker's tensor."""
        mine, other = str(self._op.tensor.dtype), dtype.rstrip(b"\0").decode(errors="replace")
        if mine != other:
            workers = f"workers {self._transport.worker} and {self._op.peer}"
            raise TransportError(f"the tensors of {workers} differ in dtype: {mine} and {other}")
        return torch.empty(numbers, dtype=self._op.tensor.dtype, device="cpu")


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    return torch.split(tensor, EXCHANGE_BYTES // tensor.element_size()) if tensor.numel() else ()
