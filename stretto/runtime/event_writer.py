"""Event writer of one worker, with a clock that all workers share."""

from __future__ import annotations

import functools
import math
import os
import statistics
import struct
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from stretto.errors import LogError, NotFiniteError
from stretto.events import EventLog
from stretto.notices import say
from stretto.run_dir import make_folder, write_run
from stretto.runtime.runtime import Runtime
from stretto.transport import Transport


class EventWriter:
    """Writer of events with the seconds since the start of training. Without a log it writes nothing."""

    def __init__(self, log: EventLog | None, wire: Transport, runtime: Runtime, number: int, joined_late: bool) -> None:
        self._runtime, self._clock, self._wire = runtime, runtime.clock, wire
        self.worker = number
        self._log = log
        self.zero = runtime.clock() if joined_late else common_zero(wire, runtime.clock)
        self._progressed = 0.0
        self._pending: list[tuple[float, int, int, dict[str, Any]]] = []

    def start_at(self, t: float, zero: float | None, boot: bytes) -> None:
        """Adopt the clock of a run that is at `t`; on the same boot of the same machine by its zero, which is exact."""
        self.zero = zero if zero is not None and boot == boot_id() else self._clock() - t

    def join(self, zeros: Mapping[bytes, float]) -> None:
        """Adopt the zero of a run's clock on this boot, if it is among these."""
        self.zero = zeros.get(boot_id(), self.zero)

    def t(self) -> float:
        """Return the seconds since the start of training, on the clock that all workers share."""
        return self._clock() - self.zero

    def write(self, kind: str, at: float | None = None, /, **fields: object) -> None:
        """Write an event that happened at this reading of the clock, by default now."""
        t = self.t() if at is None else at - self.zero
        if kind == "progress":
            self._progressed = t
        if self._log is not None:
            self._log.write(kind, t, **fields)

    def notice(self, text: str) -> None:
        """Warn the user once: the first worker prints the text and writes it to the log."""
        if self._is_first:
            self._warn(text)

    def own_notice(self, text: str) -> None:
        """Warn the user of what happened at this worker, and perhaps at no other."""
        if self._runtime.rank == 0:
            self._warn(text)

    def _warn(self, text: str) -> None:
        say(text)
        self.write("warning", text=text)

    def say(self, text: str) -> None:
        """Print a line on the terminal of the first worker, without an event."""
        if self._is_first:
            say(text)

    @property
    def _is_first(self) -> bool:
        """True at rank 0 of the first worker."""
        return self._wire.worker == 0 and self._runtime.rank == 0

    def record(self, step: int, samples: int, values: dict[str, Any]) -> None:
        """Record metrics of the script. A number on an accelerator is read at the next flush, without a wait."""
        on_device = any(isinstance(value, Tensor) and value.device.type != "cpu" for value in values.values())
        pending = {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
        self._pending.append((self.t(), step, samples, pending))
        if not on_device:
            self._write_records()

    def due(self) -> bool:
        """Return True if a progress event is due."""
        return self.t() - self._progressed >= self._runtime.progress_interval_s

    def flush(self) -> None:
        """Write pending events to the disk."""
        self._write_records()
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        """Flush and close the log."""
        self._write_records()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _write_records(self) -> None:
        pending, self._pending = self._pending, []
        for t, step, samples, values in pending:
            numbers = {name: float(value) for name, value in values.items()}
            if self._log is not None and self._runtime.writes_metrics:
                self._log.write("log", t, step=step, samples=samples, values=numbers)
            for name, number in numbers.items():
                if not math.isfinite(number):
                    if self._log is not None:
                        self._log.flush()
                    raise NotFiniteError(f"{name} became {number} at step {step} on worker {self.worker}; {ADVICE}")


def open_folder(wire: Transport, options: Mapping[str, Any]) -> Path:
    """Create the run directory at worker 0, and one of the same name where another worker does not see it."""

    def create() -> bytes:
        now = datetime.now()
        created = make_folder(Path(sys.argv[0]).stem or "train", None, now).absolute()
        write_run(created, {"script": sys.argv[0], "args": sys.argv[1:], **options}, now)
        return str(created).encode()

    folder = Path(wire.broadcast_bytes(create).decode())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LogError(f"the run directory {folder} cannot be created: {error.strerror}") from error
    return folder


ADVICE = "the usual causes are a learning rate that is too large, or data with NaN in it"


def common_zero(wire: Transport, clock: Callable[[], float]) -> float:
    """Return the reading of this worker's clock at a moment that is zero for all workers: the last one is here.

    Workers on the same boot of one machine share the system's clock. Others compare their clocks after a common
    exchange, five times, and take the median, which is exact to about the latency of the network.
    """
    readings = wire.all_gather_bytes(boot_id() + struct.pack("<d", clock()))
    if all(reading[:-8] == readings[0][:-8] for reading in readings):
        return max(float(struct.unpack("<d", reading[-8:])[0]) for reading in readings)
    roots, offsets = list[float](), list[float]()
    for _ in range(5):
        wire.all_gather_bytes(b"")
        own_reading = clock()
        roots += struct.unpack("<d", wire.all_gather_bytes(struct.pack("<d", own_reading))[0])
        offsets.append(own_reading - roots[-1])
    return roots[0] + statistics.median(offsets)


@functools.cache
def boot_id() -> bytes:
    """Return the id of this boot of this machine; workers with the same id share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return os.urandom(16)
