"""Figures of one rank for the event log: its passes, its waits for other ranks within them, and its memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stretto.runtime.phase_timer import Stopwatch
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.parameter_view import is_held, local
from stretto.transport.device_memory import peak_memory


class PassRecord:
    """Seconds of the forward and backward passes of a rank that trains, and of its waits for other ranks in them.

    The first pass does not count: it finds the shapes of other ranks' tensors.
    """

    def __init__(self, timer: Stopwatch | None = None) -> None:
        self._timer = timer or Stopwatch(time.perf_counter)
        self._passes, self._seconds, self._waiting = 0, 0.0, 0.0
        self._is_first = True

    @contextmanager
    def within(self, is_backward: bool = False) -> Iterator[None]:
        """Record a forward pass, or the backward pass that follows it."""
        began, waited = self._now(), self._timer.spent["waiting"]
        yield
        if not self._is_first:
            self._passes += is_backward
            self._seconds += self._now() - began
            self._waiting += self._timer.spent["waiting"] - waited
        self._is_first = self._is_first and not is_backward

    def _now(self) -> float:
        self._timer.switch(self._timer.phase)
        return self._timer.read_at

    def figures(self) -> dict[str, Any]:
        """Return the number of passes, their seconds, and those of them in waits."""
        return {"passes": self._passes, "seconds": round(self._seconds, 6), "waiting": round(self._waiting, 6)}


def memory_figures(model: nn.Module, optimizers: Optimizers, device: torch.device) -> dict[str, int]:
    """Return the bytes that a rank holds of the model, of its gradients and of the state of its optimizers; its peak.

    Each trained parameter counts with a gradient, whether or not the script has just freed it.
    """
    held = [one for one in model.parameters() if is_held(one)]
    state = [
        value
        for optimizer in optimizers
        for one in held
        for value in optimizer.state.get(one, {}).values()
        if isinstance(value, Tensor)
    ]
    return {
        "parameters": _bytes_of(held) + _bytes_of([one for one in model.buffers() if is_held(one)]),
        "gradients": _bytes_of([one for one in held if one.requires_grad]),
        "state": _bytes_of(state),
        "peak": peak_memory(device),
    }


def _bytes_of(tensors: list[Any]) -> int:
    return sum(part.numel() * part.element_size() for part in map(local, tensors))
