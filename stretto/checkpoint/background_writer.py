"""Checkpoint writing in the background: reusable copies of tensors, and a thread that writes them."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from stretto.checkpoint.run_files import CheckpointStore
from stretto.checkpoint.storage import State
from stretto.errors import LogError
from stretto.transport.device_memory import host_memory

Notice = Callable[[str], object]
NICENESS = 10


class Snapshots:
    """Copies of tensors in reused memory, so that a snapshot costs one copy and no allocation.

    Two copies of each tensor are kept. A returned copy stays unchanged while the returned tensor itself is referenced
    (a view of it is not enough). With both in use a snapshot takes new memory, which is not kept.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[Tensor, weakref.ref[Tensor]]]] = {}

    @torch.no_grad()
    def copied(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors on the CPU."""
        return {name: self._memory(name, tensor).copy_(tensor) for name, tensor in tensors.items()}

    def _memory(self, name: str, tensor: Tensor) -> Tensor:
        """Return memory for a tensor that is not in use."""
        entries = [entry for entry in self._kept.get(name, ()) if _alike(entry[0], tensor)]
        free = next((entry for entry in entries if entry[1]() is None), None)
        memory = free[0] if free is not None else host_memory(tensor, tensor.device)
        copy = memory.detach()
        entries = [entry for entry in entries if entry is not free]
        self._kept[name] = [*entries, (memory, weakref.ref(copy))] if len(entries) < 2 else entries
        return copy


def _alike(memory: Tensor, tensor: Tensor) -> bool:
    return memory.shape == tensor.shape and memory.dtype == tensor.dtype


class BackgroundWriter:
    """Thread that writes checkpoints: one is being written, one waits, and a newer one replaces the waiting one.

    A disk that does not take a checkpoint never stops training: a notice reports the failure, and another one the first
    success after it. `notice` is called in this thread; when it raises, it is repeated at the next failure.
    """

    def __init__(self, checkpoints: CheckpointStore, notice: Notice, clock: Callable[[], float]) -> None:
        self._checkpoints, self._notice, self._clock = checkpoints, notice, clock
        self._condition = threading.Condition()
        self._waiting: tuple[State, int] | None = None
        self._busy = self._closed = self._failing = False
        self.took_s: float | None = None
        """Seconds that the last submitted state has taken; None until it is processed."""
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def submit(self, state: State, number: int) -> None:
        """Queue the state of a round. It is not copied and must not be changed any more."""
        with self._condition:
            if self._closed:
                raise RuntimeError("the writer of checkpoints is closed")
            self._waiting, self.took_s = (state, number), None
            self._condition.notify_all()

    def settle(self, limit_s: float) -> bool:
        """Wait until everything submitted is processed. Return False if that took longer than the limit."""
        with self._condition:
            return self._condition.wait_for(lambda: self._waiting is None and not self._busy, limit_s)

    def close(self, limit_s: float) -> bool:
        """Refuse further states and wait as `settle` does."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        return self.settle(limit_s)

    def _work(self) -> None:
        lower_priority()
        while self._wanted():
            began = self._clock()
            self._write()
            with self._condition:
                self._busy = False
                self.took_s = self._clock() - began if self._waiting is None else None
                self._condition.notify_all()

    def _wanted(self) -> bool:
        """Wait for a state; return False when none will come any more."""
        with self._condition:
            self._condition.wait_for(lambda: self._waiting is not None or self._closed)
            self._busy = self._waiting is not None
            return self._busy

    def _write(self) -> None:
        """Write the waiting state and drop all references to it."""
        with self._condition:
            assert self._waiting is not None
            (state, number), self._waiting = self._waiting, None
        try:
            self._checkpoints.write(state, number)
            self._checkpoints.prune()
        except Exception as error:
            self._failed(error)
        else:
            self._worked(number)

    def _failed(self, error: Exception) -> None:
        if self._failing:
            return
        why = (error.strerror if isinstance(error, OSError) else None) or error
        self._failing = self._send_notice(
            f"the checkpoint could not be written: {why}; training continues; {self._last()}"
        )

    def _worked(self, number: int) -> None:
        if self._failing:
            self._failing = not self._send_notice(f"checkpoints are written again: that of round {number} is complete")

    def _last(self) -> str:
        try:
            last = self._checkpoints.last()
        except LogError as error:
            return str(error)
        return f"the last complete one is round {last}" if last is not None else "there is no complete one yet"

    def _send_notice(self, text: str) -> bool:
        """Return True if the notice was accepted; a log on the same full disk may not accept it."""
        with contextlib.suppress(Exception):
            self._notice(text)
            return True
        return False


def lower_priority() -> None:
    """Lower the priority of this thread; on Linux each thread has its own niceness."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
