"""What a worker stands in: its clock, its log, the process around it. The simulator puts others in their place."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.variable import Variable
from torch.utils.data import DataLoader

from stretto.events import EventLog, LogFile
from stretto.train.stopwatch import Pace, Stopwatch, Stretch


class Enough(BaseException):
    """Whoever runs the script has seen enough of it: the run ends here, in good order. No Exception: nothing failed."""


class Surroundings:
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
        return [one for one in gc.get_referrers(GradScaler) if type(one) is GradScaler] if self.own_process else []

    def sees_enough(self, hands: int, samples: int, t: float) -> bool:
        """Whether the run ends before the next hand, after so many hands, samples and seconds."""
        return False
