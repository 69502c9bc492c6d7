"""Communicators in one process, in the place of NCCL: they hang, fail late or at one rank, or complete after an abort.

The numbers are those of an all-reduce or all-gather on the CPU. An operation writes its result in two halves, at two
questions whether it has ended, so that half a result can be seen. An abort ends operations as that of NCCL does: they
look complete, with the half that was written.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Faults:
    """Faults of one rank. Operations are counted from 0; -1 is none."""

    hangs_connecting: bool = False
    fails_connecting: bool = False
    hangs_beginning: int = -1
    hangs_in: int = -1
    """Operation in which the rank never takes part, although it has begun it."""
    fails_in: int = -1
    fails_late_in: int = -1
    """Operation that reports an error after all numbers were written."""
    writes_after_abort: bool = False
    """True if an operation writes its second half after the abort, before the abort returns."""
    hangs_aborting: bool = False
    fails_aborting: bool = False
    hangs_shutting_down: bool = False


@dataclass
class Network:
    """Ranks of one generation, and what each has contributed to each operation."""

    ranks: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    connected: set[int] = field(default_factory=set)
    parts: dict[int, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    stopped: threading.Event = field(default_factory=threading.Event)
    """Set at the end of a test, which frees the threads that hang."""

    def ends(self, faults: Sequence[Faults]) -> list[FakeCommunicator]:
        """Return the communicators of all ranks."""
        return [FakeCommunicator(self, rank, one) for rank, one in enumerate(faults)]


class FakeCommunicator:
    """One rank's end."""

    def __init__(self, network: Network, rank: int, faults: Faults = Faults()) -> None:
        self.network, self.rank, self.faults = network, rank, faults
        self.begun: list[FakeOperation] = []
        self.aborts = self.releases = 0
        self.is_aborted, self.is_shut = threading.Event(), threading.Event()

    def connect(self) -> None:
        """Wait for all ranks."""
        if self.faults.fails_connecting:
            raise RuntimeError("the network is down")
        if not self.faults.hangs_connecting:
            with self.network.lock:
                self.network.connected.add(self.rank)
        while len(self.network.connected) < self.network.ranks:
            self._hang_a_little("connecting")

    def mark(self) -> object:
        """Return None: there are no streams."""
        return None

    def begin(self, verb: str, arguments: Sequence[Any], mark: object) -> FakeOperation:
        """Contribute to an operation."""
        number = len(self.begun)
        while number == self.faults.hangs_beginning:
            self._hang_a_little("beginning")
        if self.is_aborted.is_set():
            raise RuntimeError("the communicator was aborted")
        operation = FakeOperation(self, number, verb, arguments)
        self.begun.append(operation)
        return operation

    def shutdown(self) -> None:
        """Note the end."""
        while self.faults.hangs_shutting_down:
            self._hang_a_little("shutting down")
        self.is_shut.set()

    def abort(self) -> None:
        """End the operations."""
        self.aborts += 1
        if self.faults.fails_aborting:
            raise RuntimeError("the abort has failed")
        if self.faults.writes_after_abort and not self.network.stopped.wait(0.005):
            for one in self.begun:
                one.write_rest()
        while self.faults.hangs_aborting and not self.network.stopped.wait(0.001):
            pass
        self.is_aborted.set()

    def release(self) -> None:
        """Note that nothing uses this end any more."""
        self.releases += 1

    def _hang_a_little(self, what: str) -> None:
        if self.is_aborted.wait(0.001) or self.network.stopped.is_set():
            raise RuntimeError(f"aborted while {what}")


class FakeOperation:
    """Operation of one rank."""

    def __init__(self, end: FakeCommunicator, number: int, verb: str, arguments: Sequence[Any]) -> None:
        self._end, self._number, self._halves = end, number, 0
        self._targets = arguments[0] if verb == "allreduce" else arguments[0][0]
        self._is_sum = verb == "allreduce"
        if number != end.faults.hangs_in:
            mine = arguments[0][0] if self._is_sum else arguments[1][0]
            with end.network.lock:
                end.network.parts[number][end.rank] = mine.clone()

    def is_completed(self) -> bool:
        """Write the next half of the result; return True after both, or after an abort."""
        end = self._end
        if end.is_aborted.is_set() or self._halves == 2:
            return True
        if end.network.stopped.is_set():
            return False
        if self._number == end.faults.fails_in:
            return True
        with end.network.lock:
            if len(end.network.parts[self._number]) == end.network.ranks:
                self._write_half()
        return self._halves == 2

    def wait(self) -> None:
        """Raise the error of this rank, if any. An aborted operation has none."""
        faults = self._end.faults
        if not self._end.is_aborted.is_set() and self._number in (faults.fails_in, faults.fails_late_in):
            raise RuntimeError("the connection to another GPU was lost")

    def write_rest(self) -> None:
        """Write the second half, if the first was written."""
        if self._halves == 1:
            self._write_half()

    def _write_half(self) -> None:
        parts = self._end.network.parts[self._number]
        results = [torch.stack([*parts.values()]).sum(0)] if self._is_sum else [parts[rank] for rank in sorted(parts)]
        for target, result in zip(self._targets, results, strict=True):
            middle = target.numel() // 2
            half = slice(None, middle) if self._halves == 0 else slice(middle, None)
            target[half] = result[half]
        self._halves += 1
