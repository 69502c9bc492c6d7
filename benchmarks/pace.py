"""Runs a side's loop in segments, in processes of their own, so that two sides can take turns.

All sides of a contest are alive at once and only one of them computes. A worker reports the seconds of a segment on
its standard output and goes on when it is told to on its standard input:

    python -m benchmarks.pace benchmarks.ddp "stretto" "0.8 M" 100
"""

from __future__ import annotations

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

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300.0
"""Nothing that is waited for may take longer."""

T = TypeVar("T")


@dataclass(frozen=True)
class Seconds:
    """What a segment took by the clock, and of the processor."""

    wall: float
    processor: float

    @classmethod
    def now(cls) -> Seconds:
        """The readings of both clocks."""
        return cls(time.perf_counter(), time.process_time())

    def since(self, before: Seconds) -> Seconds:
        """What has passed."""
        return Seconds(self.wall - before.wall, self.processor - before.processor)


class Pace:
    """Called by a side's loop after each step; holds it at the end of each segment.

    `heed` is given the word that lets it go on.
    """

    def __init__(self, segment: int, heed: Callable[[str], object] = lambda _word: None) -> None:
        self.segment, self._heed = segment, heed
        self._left = segment
        self._began = Seconds.now()

    def begin(self) -> None:
        """All is ready: wait for the first segment."""
        self._wait()

    def step(self) -> None:
        """One step of the loop is done."""
        self._left -= 1
        if not self._left:
            took = Seconds.now().since(self._began)
            print(took.wall, took.processor, flush=True)
            self._left = self.segment
            self._wait()

    def _wait(self) -> None:
        """Until told to go on; the process ends here when nobody will."""
        if not (line := sys.stdin.readline()):
            sys.stdout.flush()
            os._exit(0)
        self._heed(line.strip())
        self._began = Seconds.now()


class Crew:
    """The worker processes of one side."""

    def __init__(self, command: Sequence[str], workers: int) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._folder = tempfile.TemporaryDirectory(prefix="stretto-pace-")
        port = str(free_port())
        common = {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1"}
        common |= {"MASTER_PORT": port, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        base = WorkerConfig(world_size=workers, store=f"127.0.0.1:{port}", run=self._folder.name)
        places = [
            {"RANK": str(rank), "LOCAL_RANK": str(rank), **common, **replace(base, rank=rank).environment()}
            for rank in range(workers)
        ]
        self._workers = [self._start(command, place if workers > 1 else {"OMP_NUM_THREADS": "1"}) for place in places]

    def _start(self, command: Sequence[str], place: Mapping[str, str]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, bufsize=0, stdin=pipe, stdout=pipe, stderr=self._log, env={**os.environ, **place}, cwd=ROOT
        )

    def segment(self) -> Seconds:
        """Let the side run one segment; the seconds of its slowest worker, and of all their processors."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(b"go\n")
        took = [self._report(worker) for worker in self._workers]
        return Seconds(max(one.wall for one in took), sum(one.processor for one in took))

    def _report(self, worker: subprocess.Popen[bytes]) -> Seconds:
        assert worker.stdout is not None
        ready, _, _ = select.select([worker.stdout], [], [], LIMIT_S)
        said = worker.stdout.readline() if ready else b""
        try:
            wall, processor = said.split()
            return Seconds(float(wall), float(processor))
        except ValueError:
            raise SystemExit(f"a worker {self._why(ready)}; its last words:\n{self._last_words()}") from None

    def _why(self, ready: object) -> str:
        return "ended in the middle" if ready else f"said nothing for {LIMIT_S:g} s"

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]

    def close(self) -> None:
        """End the workers: they are not waited for to agree."""
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.communicate()
        self._log.close()
        self._folder.cleanup()


@contextmanager
def crews(module: str, sides: Sequence[str], case: str, segment: int, workers: int) -> Iterator[dict[str, Crew]]:
    """All sides of a contest, started and holding before their first segment."""
    with ExitStack() as stack:
        started = {}
        for side in sides:
            command = [sys.executable, "-m", "benchmarks.pace", module, side, case, str(segment)]
            started[side] = Crew(command, workers)
            stack.callback(started[side].close)
        yield started


def take_turns(crews: Mapping[str, Crew], repetitions: int) -> dict[str, list[Seconds]]:
    """What each side's segments took, in turns, forwards and backwards; one segment before is not counted."""
    return in_turns({side: crew.segment for side, crew in crews.items()}, repetitions)


def in_turns(sides: Mapping[str, Callable[[], T]], repetitions: int) -> dict[str, list[T]]:
    """What each side returns, in turns, forwards and backwards; what it returned first is not counted."""
    for side in sides.values():
        side()
    found: dict[str, list[T]] = {name: [] for name in sides}
    forwards = list(sides)
    for number in range(repetitions):
        for name in forwards if number % 2 else forwards[::-1]:
            found[name].append(sides[name]())
    return found


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


Side = Callable[[str, Pace], None]
"""Runs a case's loop; `pace.begin()` before it, `pace.step()` after each step."""


def main() -> None:
    """A worker: find the side's function in its module and run it."""
    module, side, case, segment = sys.argv[1:]
    sides: Mapping[str, Side] = importlib.import_module(module).SIDES
    sides[side](case, Pace(int(segment)))


if __name__ == "__main__":
    main()
