"""What one worker writes down about its run: events with a clock that all workers share."""

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
from stretto.events import read_events
from stretto.notices import say
from stretto.run_dir import make_folder, write_run
from stretto.runtime.runtime import Runtime
from stretto.transport import Transport


class EventWriter:
    """Stamps events with the seconds since the start of training; without a run folder nothing is written."""

    def __init__(self, folder: Path | None, wire: Transport, around: Runtime, number: int, comes_late: bool) -> None:
        self._around, self._clock, self._wire = around, around.clock, wire
        self.worker = number
        self._log = around.log(folder, number) if folder is not None else None
        self.zero = around.clock() if comes_late else common_zero(wire, around.clock)
        self._progressed = 0.0
        self._late: list[tuple[float, int, int, dict[str, Any]]] = []

    def start_at(self, t: float, zero: float | None, boot: bytes) -> None:
        """Take over the clock of a run that is at `t`: of the same machine by its zero, which is exact."""
        self.zero = zero if zero is not None and boot == boot_id() else self._clock() - t

    def t(self) -> float:
        """Seconds since the start of training, on the clock that all workers share."""
        return self._clock() - self.zero

    def write(self, kind: str, /, **carries: object) -> None:
        """Write an event."""
        if kind == "progress":
            self._progressed = self.t()
        if self._log is not None:
            self._log.write(kind, self.t(), **carries)

    def notice(self, text: str) -> None:
        """Say something to the user, once: the first worker on its terminal and in the log."""
        if self._wire.worker == 0:
            self.say(text)
            self.write("warning", text=text)

    def say(self, text: str) -> None:
        """Print a line on the first worker's terminal; the log of events does not hold it."""
        if self._wire.worker == 0:
            say(text)

    def record(self, step: int, samples: int, values: dict[str, Any]) -> None:
        """Take down the script's own numbers. A number on an accelerator is read at the next flush, not waited for."""
        on_device = any(isinstance(value, Tensor) and value.device.type != "cpu" for value in values.values())
        late = {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
        self._late.append((self.t(), step, samples, late))
        if not on_device:
            self._write_records()

    def due(self) -> bool:
        """Whether it is time for a progress event."""
        return self.t() - self._progressed >= self._around.flush_every_s

    def flush(self) -> None:
        """Bring what there is to the disk."""
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
        late, self._late = self._late, []
        for t, step, samples, values in late:
            numbers = {name: float(value) for name, value in values.items()}
            if self._log is not None and self._around.records:
                self._log.write("log", t, step=step, samples=samples, values=numbers)
            for name, number in numbers.items():
                if not math.isfinite(number):
                    if self._log is not None:
                        self._log.flush()
                    raise NotFiniteError(f"{name} became {number} at step {step} on worker {self.worker}; {ADVICE}")


def open_folder(wire: Transport, asked: Mapping[str, Any]) -> Path:
    """Make a run folder at worker 0, and one of the same name where another worker does not see that one."""

    def made() -> bytes:
        now = datetime.now()
        here = make_folder(Path(sys.argv[0]).stem or "train", None, now).absolute()
        write_run(here, {"script": sys.argv[0], "args": sys.argv[1:], **asked}, now)
        return str(here).encode()

    folder = Path(wire.broadcast_bytes(made).decode())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LogError(f"the run folder {folder} cannot be made: {error.strerror}") from error
    return folder


ADVICE = "the usual causes are a learning rate that is too large, or data with NaN in it"


def common_zero(wire: Transport, clock: Callable[[], float]) -> float:
    """The reading of this worker's clock at a moment that all workers call zero.

    Workers of one boot of one machine share the system's clock; others compare theirs as they leave a common exchange,
    five times, and take the median, which is good to about the latency of the network.
    """
    told = wire.all_gather_bytes(boot_id() + struct.pack("<d", clock()))
    if all(one[:-8] == told[0][:-8] for one in told):
        return float(struct.unpack("<d", told[0][-8:])[0])
    offsets = []
    for _ in range(5):
        wire.all_gather_bytes(b"")
        mine = clock()
        lead: float = struct.unpack("<d", wire.all_gather_bytes(struct.pack("<d", mine))[0])[0]
        offsets.append(mine - lead)
    there: float = struct.unpack("<d", told[0][-8:])[0]
    return there + statistics.median(offsets)


def zero_of(folder: Path) -> float | None:
    """The zero of a run on this machine, as the start of one of its workers tells it."""
    starts = (one for one in read_events(folder / "events.jsonl") if one["event"] == "start" and "at" in one)
    first = next(starts, None)
    return None if first is None else first["at"] - first["t"]


@functools.cache
def boot_id() -> bytes:
    """What tells this start of this machine from all others; workers that share it share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return os.urandom(16)
