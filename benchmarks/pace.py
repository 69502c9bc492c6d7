"""Runs a side's loop in segments, in separate processes, so that two sides can take turns.

The processes of all sides of a contest run at the same time, but only one side computes. A worker reports the seconds
of a segment on its standard output and waits for a line on its standard input before the next segment:

    python -m benchmarks.pace benchmarks.ddp "stretto" "0.8 M" 100
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from stretto.process_config import WorkerConfig
from stretto.run_config import RunConfig

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0
"""Limit of every wait."""

T = TypeVar("T")


@dataclass(frozen=True)
class Seconds:
    """Wall-clock seconds and processor seconds of a segment."""

    wall: float
    processor: float

    @classmethod
    def now(cls) -> Seconds:
        """Return the readings of both clocks."""
        return cls(time.perf_counter(), time.process_time())

    def since(self, before: Seconds) -> Seconds:
        """Return the seconds since an earlier reading."""
        return Seconds(self.wall - before.wall, self.processor - before.processor)


class Pace:
    """Divides a side's loop into segments: counts the steps and blocks at the end of each segment.

    `on_word` is called with the word that starts the next segment.
    """

    def __init__(self, segment: int, on_word: Callable[[str], object] = lambda _word: None) -> None:
        self.segment, self._on_word = segment, on_word
        self._left = segment
        self._began = Seconds.now()

    def begin(self) -> None:
        """Wait for the start of the first segment."""
        self._wait()

    def step(self) -> None:
        """Count one step of the loop; at the end of a segment report its seconds and wait for the next one."""
        self._left -= 1
        if not self._left:
            took = Seconds.now().since(self._began)
            print(took.wall, took.processor, flush=True)
            self._left = self.segment
            self._wait()

    def _wait(self) -> None:
        """Wait for the line that starts the next segment; exit when the standard input is closed."""
        if not (line := sys.stdin.readline()):
            sys.stdout.flush()
            os._exit(0)
        self._on_word(line.strip())
        self._began = Seconds.now()


class WorkerGroup:
    """Worker processes of one side."""

    def __init__(self, command: Sequence[str], workers: int) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._folder = tempfile.TemporaryDirectory(prefix="stretto-pace-")
        port = str(free_port())
        common = {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": port, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        base = WorkerConfig(
            options=RunConfig(Path(), workers=workers), store=f"127.0.0.1:{port}", run=self._folder.name
        )
        places = [
            {"RANK": str(rank), "LOCAL_RANK": str(rank), **common, **replace(base, worker=rank).environment()}
            for rank in range(workers)
        ]
        self._workers = [self._start(command, place if workers > 1 else {"OMP_NUM_THREADS": "1"}) for place in places]

    def _start(self, command: Sequence[str], place: Mapping[str, str]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, bufsize=0, stdin=pipe, stdout=pipe, stderr=self._log, env={**os.environ, **place}, cwd=ROOT
        )

    def segment(self) -> Seconds:
        """Let the side run one segment; return the seconds of its slowest worker, and the processor seconds of all."""
        for worker in self._workers:
            assert worker.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has failed: its report says so
                worker.stdin.write(b"go\n")
        seconds = [self._report(worker) for worker in self._workers]
        return Seconds(max(one.wall for one in seconds), sum(one.processor for one in seconds))

    def _report(self, worker: subprocess.Popen[bytes]) -> Seconds:
        assert worker.stdout is not None
        ready, _, _ = select.select([worker.stdout], [], [], LIMIT_S)
        line = worker.stdout.readline() if ready else b""
        try:
            wall, processor = line.split()
            return Seconds(float(wall), float(processor))
        except ValueError:
            raise SystemExit(f"a worker {self._reason(ready)}; the end of its log:\n{self._log_end()}") from None

    def _reason(self, ready: object) -> str:
        return "ended before its result" if ready else f"sent no result for {LIMIT_S:g} s"

    def _log_end(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]

    def close(self) -> None:
        """Kill the workers."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.communicate()
        self._log.close()
        self._folder.cleanup()


@contextmanager
def worker_groups(
    module: str, sides: Sequence[str], case: str, segment: int, workers: int
) -> Iterator[dict[str, WorkerGroup]]:
    """Start the workers of all sides of a contest; they wait for their first segment."""
    with ExitStack() as stack:
        started = {}
        for side in sides:
            command = [sys.executable, "-m", "benchmarks.pace", module, side, case, str(segment)]
            started[side] = WorkerGroup(command, workers)
            stack.callback(started[side].close)
        yield started


def take_turns(worker_groups: Mapping[str, WorkerGroup], repetitions: int) -> dict[str, list[Seconds]]:
    """Return the seconds of each side's segments, measured in turns; the first segment of each side is not counted."""
    return in_turns({side: crew.segment for side, crew in worker_groups.items()}, repetitions)


def in_turns(sides: Mapping[str, Callable[[], T]], repetitions: int) -> dict[str, list[T]]:
    """Return the results of each side, called in turns in alternating order; the first result of each is dropped."""
    for side in sides.values():
        side()
    results: dict[str, list[T]] = {name: [] for name in sides}
    forwards = list(sides)
    for number in range(repetitions):
        for name in forwards if number % 2 else forwards[::-1]:
            results[name].append(sides[name]())
    return results


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


Side = Callable[[str, Pace], None]
"""Runs a case's loop: calls `pace.begin()` before it and `pace.step()` after each step."""


def main() -> None:
    """Run the named side's function of a module as a worker."""
    module, side, case, segment = sys.argv[1:]
    sides: Mapping[str, Side] = importlib.import_module(module).SIDES
    sides[side](case, Pace(int(segment)))


if __name__ == "__main__":
    main()
