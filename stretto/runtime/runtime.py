"""What a worker stands in: its clock, its log, the process around it. The simulator puts others in their place."""

from __future__ import annotations

import functools
import gc
import os
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.variable import Variable
from torch.utils.data import DataLoader

from stretto.events import EventLog, LogFile
from stretto.runtime.phase_timer import Pace, Stopwatch, Stretch


class StopTraining(BaseException):
    """Whoever runs the script has seen enough of it: the run ends here, in good order. No Exception: nothing failed."""


class _Scalers:
    """All gradient scalers of this process, in the order in which they were made.

    The garbage collector, which is slow, is asked once; those made later tell of themselves.
    """

    def __init__(self) -> None:
        self._known: list[weakref.ref[GradScaler]] | None = None

    def all(self) -> list[GradScaler]:
        """Those that there are now."""
        if self._known is None:
            self._known = [weakref.ref(one) for one in gc.get_referrers(GradScaler) if type(one) is GradScaler]
            self._listen(self._known)
        return [scaler for one in self._known if (scaler := one()) is not None]

    def _listen(self, known: list[weakref.ref[GradScaler]]) -> None:
        make = GradScaler.__init__

        @functools.wraps(make)
        def told(scaler: GradScaler, *given: Any, **named: Any) -> None:
            make(scaler, *given, **named)
            known.append(weakref.ref(scaler))

        GradScaler.__init__ = told  # type: ignore[method-assign, assignment]


_scalers = _Scalers()


class Runtime:
    """Those of a worker that is a process of its own, or a thread."""

    def __init__(self, own_process: bool = False) -> None:
        self.own_process = own_process

    flush_every_s = 0.5
    """Between two progress events."""
    records = True
    """Whether the script's own numbers go into the log."""

    def clock(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def pace(self, watch: Stopwatch, slow: float) -> Pace:
        """What makes computing last as long as it should."""
        return Stretch(slow, watch, time.sleep)

    def after_backward(self, then: Callable[[], None]) -> None:
        """Have something done as the last act of the backward pass that is going on."""
        engine: Any = Variable._execution_engine
        engine.queue_callback(then)

    def log(self, folder: Path, worker: int) -> EventLog:
        """Where this worker's events go."""
        return EventLog(LogFile(folder / "events.jsonl"), worker)

    def facts(self) -> dict[str, Any]:
        """What a start event says of the process."""
        return {"pid": os.getpid(), "host": socket.gethostname()}

    def begins(self, model: nn.Module, loader: Any) -> None:
        """The script has called `distribute` with these."""

    def loads(self, loader: DataLoader[Any]) -> int:
        """In how many processes the batches of this loader are made; 0 for this one."""
        return loader.num_workers

    def scalers(self) -> list[GradScaler]:
        """The gradient scalers of this worker's script, which know nothing of its optimizer."""
        return _scalers.all() if self.own_process else []

    def sees_enough(self, hands: int, samples: int, t: float) -> bool:
        """Whether the run ends before the next hand, after so many hands, samples and seconds."""
        return False

    def has_seen_enough(self) -> bool:
        """Whether a worker that waits for nobody has ended in this pass, whose end all have come to."""
        return False
