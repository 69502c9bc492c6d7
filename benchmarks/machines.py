"""Training on four hosts of a laboratory, started by `stretto run --listen` and `stretto join`; in turns with gloo.

Ours is the encrypted transport, the default between hosts; theirs the same run with `--no-encryption`, over gloo.
A pause is the time between two steps of host 0 that a fault comes between. A host vanishes when its link is cut, and is
declared failed after the failure timeout; in a cut network hosts 2 and 3 lose their links together.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.laboratory import Laboratory, address, name, set_link
from benchmarks.learning_tasks import MNIST
from benchmarks.measure import Spread, save
from benchmarks.pace import ROOT

QUESTION = "4 hosts behind links: time per step and to a test accuracy, pauses at failures, bytes of a join"
OURS, THEIRS = "encrypted", "gloo"
HOSTS = 4
TARGET = 0.95
FAILURE_TIMEOUT_S = 2.0
LIMIT_S = 900.0
PORT = 7878
SCRIPT = ROOT / "benchmarks" / "scripts" / "on_hosts.py"
ENDLESS = ("--epochs", "100000")
STARTS = 3


@dataclass(frozen=True)
class Trace:
    """Moments at which the steps of a process ended, and its evaluations: moment, accuracy, seconds."""

    steps: Sequence[float]
    evaluations: Sequence[tuple[float, float, float]]


class HostsRun:
    """A run on the hosts of a laboratory; `join` adds one, `go` begins the training."""

    def __init__(
        self,
        lab: Laboratory,
        side: str,
        folder: Path,
        recipe: str,
        arguments: Sequence[str],
        hosts: int = HOSTS,
        workers: int = 1,
    ) -> None:
        self._lab, self._folder, self.run, self._hosts = lab, folder, folder / "run", hosts
        self._log = (folder / "log").open("w+b")
        plain = ["--no-encryption"] if side == THEIRS else []
        options = [
            "-n",
            str(workers),
            "--listen",
            f"{address(0)}:{PORT}",
            "--failure-timeout",
            f"{FAILURE_TIMEOUT_S}s",
            "--recipe",
            recipe,
        ]
        self.launcher = self._start(
            0, "run", *options, *plain, "--out", str(self.run), str(SCRIPT), str(folder), *arguments
        )
        self.wait("the key", lambda: (self.run / "join.key").exists())

    def _start(self, host: int, *words: str) -> subprocess.Popen[bytes]:
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "STRETTO_LAB_HOST": str(host)}
        command = ["env", "-C", str(self._folder), sys.executable, "-m", "stretto.cli", *words]
        return self._lab.start(host, command, environment, self._log)

    def join(self, host: int) -> None:
        """Let a host join; it receives the code, and trains once its script has begun."""
        self._start(host, "join", f"{address(0)}:{PORT}", "--key", str(self.run / "join.key"))

    def go(self) -> None:
        """Wait until the scripts of all hosts have begun, and let them train together."""
        self.wait("the scripts", lambda: all(any(self._folder.glob(f"{host}-*")) for host in range(self._hosts)))
        (self._folder / "go").touch()

    def trace(self, host: int) -> Trace:
        """Return what the newest process of a host did."""
        files = sorted(self._folder.glob(f"{host}-*"), key=lambda path: path.stat().st_mtime_ns)
        lines = [line.split() for line in files[-1].read_text().splitlines(keepends=True) if line.endswith("\n")]
        steps = [float(line[0]) for line in lines if line[1] == "step"]
        evaluations = [(float(line[0]), float(line[2]), float(line[3])) for line in lines if line[1] == "accuracy"]
        return Trace(steps, evaluations)

    def wait(self, awaited: str, is_so: Callable[[], bool]) -> None:
        """Wait until something is so. Raises SystemExit after a limit, or if the launcher has exited."""
        limit = time.monotonic() + LIMIT_S
        while not is_so():
            if self.launcher.poll() is not None or time.monotonic() > limit:
                raise SystemExit(f"machines: timed out waiting for {awaited}:\n{self.output()}")
            time.sleep(0.02)

    def wait_until_steady(self, steps: int = 20) -> None:
        """Wait until all hosts have trained for some further steps."""
        before = {host: len(self.trace(host).steps) for host in range(self._hosts)}
        self.wait("steps", lambda: all(len(self.trace(host).steps) > before[host] + steps for host in before))

    def stop(self) -> int:
        """Stop the run; return the exit code of its launcher."""
        for pid in pids(0, "stretto.cli run"):
            os.kill(pid, signal.SIGTERM)  # a shell's background jobs ignore SIGINT
        return self.launcher.wait(30)

    def output(self) -> str:
        """Return the output of all launchers."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")


def pids(host: int, words: str) -> list[int]:
    """Return the processes of a host whose command line has these words."""
    listed = subprocess.run(["ip", "netns", "pids", name(host)], capture_output=True, text=True, check=True, timeout=10)
    lines = {int(pid): Path(f"/proc/{pid}/cmdline") for pid in listed.stdout.split()}
    return [pid for pid, path in lines.items() if path.exists() and words in path.read_text().replace("\0", " ")]


@contextmanager
def started(
    mbit: float, side: str, recipe: str = "allreduce", arguments: Sequence[str] = ENDLESS, first: int = HOSTS
) -> Iterator[tuple[Laboratory, HostsRun]]:
    """Yield a run in a laboratory of its own, with the `first` hosts."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lab = stack.enter_context(Laboratory(HOSTS, mbit))
        run = HostsRun(lab, side, folder, recipe, arguments, first)
        for host in range(1, first):
            run.join(host)
        yield lab, run


# Questions


def to_target(mbit: float, side: str) -> dict[str, float]:
    """Return the milliseconds of a step, and the seconds of training until the accuracy is reached."""
    with started(mbit, side, arguments=("--evaluate-every", "32")) as (_, run):
        run.go()
        run.wait("the accuracy", lambda: any(value >= TARGET for _, value, _ in run.trace(0).evaluations))
        trace = run.trace(0)
        run.stop()
    began = trace.steps[0]
    reached = next(index for index, (_, value, _) in enumerate(trace.evaluations) if value >= TARGET)
    moment = trace.evaluations[reached][0]
    evaluating = sum(seconds for _, _, seconds in trace.evaluations[: reached + 1])
    ms = 1e3 * median(after - before for before, after in pairwise(trace.steps))
    return {"ms_a_step": ms, "seconds_to_target": moment - began - evaluating}


def _kill_worker() -> None:
    (worker,) = pids(3, "worker_main")
    os.kill(worker, signal.SIGKILL)


def _cut(*hosts: int) -> None:
    for host in hosts:
        set_link(host, "down")


FAULTS: dict[str, Callable[[], None]] = {
    "worker killed": _kill_worker,
    "host vanished": lambda: _cut(3),
    "network cut": lambda: _cut(2, 3),
}


def pause(fault: str, side: str, mbit: float = 1000.0) -> float:
    """Return the seconds for which a fault stops host 0, less a step."""
    with started(mbit, side) as (_, run):
        run.go()
        run.wait_until_steady()
        usual = median(after - before for before, after in pairwise(run.trace(0).steps[-20:]))
        moment = time.monotonic()
        FAULTS[fault]()
        run.wait("the others", lambda: sum(step > moment + usual for step in run.trace(0).steps) > 5)
        steps = run.trace(0).steps
        run.stop()
    around = [after - before for before, after in pairwise(steps) if after > moment]
    return max(around[:5]) - usual


def join_bytes(mbit: float = 1000.0) -> dict[str, float]:
    """Return the bytes that a joining host receives and sends from the start of `stretto join` to its first step.

    The workers average every 100 steps, so there is hardly anything else on its link.
    """
    with started(mbit, OURS, "local_sgd(every=100)", first=HOSTS - 1) as (lab, run):
        run.go()
        run.wait("steps", lambda: len(run.trace(0).steps) > 50)
        before = lab.traffic(HOSTS - 1)
        run.join(HOSTS - 1)
        run.wait("the joining host", lambda: any(run.run.parent.glob(f"{HOSTS - 1}-*")))
        run.wait("its steps", lambda: len(run.trace(HOSTS - 1).steps) > 0)
        traffic = lab.traffic(HOSTS - 1).since(before)
        run.stop()
    numbers = sum(parameter.numel() for parameter in MNIST.network().parameters())
    return {"received": traffic.received, "sent": traffic.sent, "state": 2 * 4 * numbers}


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all, print the figures and write them to the results."""
    print(f"machines: {QUESTION}", flush=True)
    MNIST.samples()  # the hosts have no access to the network outside
    count = starts or STARTS
    record = {
        "question": QUESTION,
        "starts": count,
        "target": TARGET,
        "failure_timeout_s": FAILURE_TIMEOUT_S,
        "training": [_training(mbit, count) for mbit in (100.0, 1000.0)],
        "pauses": [_pauses(fault, count) for fault in FAULTS],
        "join": _joined(),
    }
    print(f"  kept in {save('machines', record, trial=starts is not None)}")
    return record


def _training(mbit: float, starts: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {OURS: [], THEIRS: []}
    for start in range(starts):
        for side in (OURS, THEIRS) if start % 2 else (THEIRS, OURS):
            found[side].append(to_target(mbit, side))
    sides = {side: {key: median(one[key] for one in runs) for key in runs[0]} for side, runs in found.items()}
    speed = sides[THEIRS]["ms_a_step"] / sides[OURS]["ms_a_step"]
    shown = "; ".join(
        f"{side} {one['ms_a_step']:.1f} ms a step, {one['seconds_to_target']:.1f} s to {TARGET:.0%}"
        for side, one in sides.items()
    )
    print(f"  {mbit:g} Mbit/s: {shown}; {speed:.3f} times the steps per second", flush=True)
    return {"mbit": mbit, "sides": sides, "ratio": speed}


def _pauses(fault: str, starts: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {OURS: [], THEIRS: []}
    for start in range(starts):
        for side in (OURS, THEIRS) if start % 2 else (THEIRS, OURS):
            found[side].append(pause(fault, side))
    shown = "; ".join(f"{side} {median(one):.3f} s ({min(one):.3f} to {max(one):.3f})" for side, one in found.items())
    print(f"  {fault}: {shown}", flush=True)
    return {"fault": fault, "seconds": {side: Spread.of(one).record() for side, one in found.items()}}


def _joined() -> dict[str, float]:
    found = join_bytes()
    received, state = found["received"] / 1e6, found["state"] / 1e6
    print(f"  a join: {received:.2f} MB received, {found['sent'] / 1e6:.2f} MB sent; the state has {state:.2f} MB")
    return found
