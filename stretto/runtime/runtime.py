"""Runtime of a worker: its clock, its log and its process. The simulator has an implementation of its own."""

from __future__ import annotations

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
from stretto.runtime.creation_order import SCALERS
from stretto.runtime.phase_timer import Pace, Stopwatch, Stretch


class StopTraining(BaseException):
    """Ends the script gracefully at a limit of the simulation.

    Not an Exception, so that `except Exception` in a script does not catch it.
    """


class Runtime:
    """Runtime of a worker that is a process of its own, or a thread; or of one of the `ranks` of a worker."""

    def __init__(self, own_process: bool = False, rank: int = 0, ranks: int = 1) -> None:
        self.own_process = own_process
        """True if the script is the only one in this process, so that the state of the process is its own."""
        self.rank, self.ranks = rank, ranks

    progress_interval_s = 0.5
    """Seconds between progress events."""
    waits_in_backward = True
    """True if this worker may wait for others within a backward pass."""
    writes_metrics = True
    """True if metrics of the script are written to the log."""

    def clock(self) -> float:
        """Return the seconds since an arbitrary moment."""
        return time.perf_counter()

    def pace(self, watch: Stopwatch, slowdown: float) -> Pace:
        """Return the Pace that prolongs the computation by the factor `slowdown`."""
        return Stretch(slowdown, watch, time.sleep)

    def after_backward(self, callback: Callable[[], None]) -> None:
        """Call a function at the end of the current backward pass."""
        engine: Any = Variable._execution_engine
        engine.queue_callback(callback)

    def log(self, folder: Path, worker: int) -> EventLog:
        """Return the event log of this worker."""
        return EventLog(LogFile(folder / "events.jsonl"), worker, rank=self.rank)

    def process_info(self) -> dict[str, Any]:
        """Return facts about the process for the start event."""
        place = {"rank": self.rank, "ranks": self.ranks} if self.ranks > 1 else {}
        return {"pid": os.getpid(), "host": socket.gethostname(), **place}

    def on_distribute(self, model: nn.Module, optimizers: Any, loader: Any, recipe: Any) -> None:
        """Note that the script has called `distribute` with these arguments."""

    def loader_processes(self, loader: DataLoader[Any]) -> int:
        """Return the number of processes that load the batches of this loader; 0 for this process."""
        return loader.num_workers

    def scalers(self) -> list[GradScaler]:
        """Return the gradient scalers of this worker's script, which have no reference to its optimizer."""
        return SCALERS.all() if self.own_process else []

    def ends_before_step(self, global_steps: int, samples: int, t: float) -> bool:
        """Return False: only the simulator limits a run, to a number of samples or `t` virtual seconds."""
        return False

    def ended_within_epoch(self) -> bool:
        """Return False: only the simulator limits a run."""
        return False
