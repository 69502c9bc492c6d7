"""Does the simulator predict what the laboratory measures?

4 hosts on one machine, behind links of 100 Mbit/s and 1 Gbit/s: seconds per step, and bytes that each worker sends,
measured, and predicted by `stretto simulate` with the same script and recipe. The simulator's arguments are measured in
the laboratory: the rate that one connection reaches, the latency of a byte, the processor time of a message and of a
megabyte, and the number of processors that the hosts share. A step is one batch of one worker; the first epoch is not
counted, and evaluations are not training.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from benchmarks.laboratory import BURST_BYTES, Laboratory
from benchmarks.measure import save
from benchmarks.pace import ROOT
from benchmarks.unequal import scripts
from stretto.events import read_events
from stretto.parameter_server.embedded import serve_at_rank0
from stretto.simulator.compute import transport_costs
from stretto.simulator.compute.cost_model import AUTO, NAMES
from stretto.simulator.compute.transport_costs import TransportCosts
from stretto.training.worker_context import find_context
from stretto.transport import Transport

QUESTION = "seconds per step and bytes sent that the simulator predicts, against those measured in the laboratory"
WANTED, WANTED_BYTES = 0.15, 0.01
"""Wanted relative error of a prediction."""
HOSTS, BATCH = 4, 32
RATES = (100.0, 1000.0)
RECIPES = ("allreduce", "local_sgd(every=16)", "async_sgd", "power_sgd(rank=2)")
LIMIT_S = 240.0
"""Limit of one run."""
STARTS = 2
"""Runs of each case: a figure is the median over them, since the machine's speed changes from minute to minute."""
REPEATS = 3
"""Repetitions of the exchange measurements, as a multiple of those of `stretto simulate`."""
PROBES = 3
"""Groups of processes that measure exchanges; the medians over the groups are used."""


@dataclass(frozen=True)
class Case:
    """A script under a recipe behind links of a rate in Mbit/s."""

    script: str
    arguments: Sequence[str]
    recipe: str
    mbit: float

    @property
    def name(self) -> str:
        """Name of the case for printing."""
        return f"{self.script.removesuffix('.py')}, {self.recipe}, {self.mbit:g} Mbit/s"


@dataclass(frozen=True)
class Figures:
    """Figures from a run's log: seconds per step after the first epoch, bytes of each worker in the whole run."""

    step_s: float
    bytes_sent: Sequence[int]
    bytes_received: Sequence[int]
    """Without TCP retransmissions, which are received once."""
    splits: Sequence[Mapping[str, float]]
    """Seconds per step in every phase, for each worker."""


@dataclass(frozen=True)
class Link:
    """Properties of a laboratory: rate of a connection, round-trip time of a byte, transport costs, processors."""

    mbit: float
    round_trip_s: float
    costs: TransportCosts
    processors: float

    @property
    def step_time(self) -> str:
        """Argument of `--step-time`: the simulator measures the step; the transport costs are known."""
        named = {field: name for name, field in NAMES.items()}
        return ", ".join([AUTO, *(f"{1e3 * time:.4f}ms {named[of]}" for of, time in asdict(self.costs).items())])

    @property
    def network(self) -> str:
        """Argument of `--network`. The server, if the recipe has one, runs in the process of worker 0."""
        latency_us = 1e6 * self.round_trip_s / 2
        return f"{self.mbit:.2f}Mbit/s {latency_us:.0f}us, burst {BURST_BYTES}B, servers in worker 0"


def run(starts: int | None = None, only: Sequence[Case] = ()) -> dict[str, Any]:
    """Measure all cases, print the figures and write them to the results. `starts`: runs of each case."""
    print(f"simulated: {QUESTION}", flush=True)
    selected = only or cases()
    records: list[dict[str, Any]] = []
    for mbit in dict.fromkeys(one.mbit for one in selected):
        with Laboratory(HOSTS, mbit) as lab:
            link = measure_link(lab)
            print(f"  {mbit:g} Mbit/s: {link.network}; {link.step_time}; {link.processors:.2f} processors", flush=True)
            records += [_case(lab, link, one, starts or STARTS) for one in selected if one.mbit == mbit]
    record = {
        "question": QUESTION,
        "wanted": WANTED,
        "wanted_bytes": WANTED_BYTES,
        "hosts": HOSTS,
        "threads": 1,
        "starts": starts or STARTS,
        "cases": records,
    }
    print(f"  kept in {save('simulated', record, trial=starts is not None or bool(only))}")
    return record


def cases() -> list[Case]:
    """Return all cases whose data is on this machine."""
    here = scripts()
    every = [(script, recipe, mbit) for mbit in RATES for script in here for recipe in RECIPES]
    return [Case(script, arguments(script, recipe, mbit), recipe, mbit) for script, recipe, mbit in every]


def arguments(script: str, recipe: str, mbit: float) -> tuple[str, ...]:
    """Return script arguments with which the counted part takes some seconds."""
    if script == "digits.py":
        return ("--epochs", "24")
    slow = mbit < RATES[-1] and recipe != "power_sgd(rank=2)"
    return ("--epochs", "3", "--samples", "2048" if slow else "4096")


def _case(lab: Laboratory, link: Link, case: Case, starts: int) -> dict[str, Any]:
    """Simulate and measure in turns, since the machine's speed changes from minute to minute."""
    print(f"  {case.name}", flush=True)
    pairs = [_pair(lab, link, case) for _ in range(starts)]
    ratios = [prediction_run.step_s / measured_run.step_s for prediction_run, measured_run in pairs]
    sent = [sum(prediction_run.bytes_sent) / sum(measured_run.bytes_sent) for prediction_run, measured_run in pairs]
    received = [
        sum(prediction_run.bytes_received) / sum(measured_run.bytes_received) for prediction_run, measured_run in pairs
    ]
    prediction, measurement = pairs[-1]
    print(
        f"    {1e3 * prediction.step_s:8.2f} ms a step simulated, {1e3 * measurement.step_s:8.2f} measured: "
        f"{statistics.median(ratios):.3f}; bytes sent {statistics.median(sent):.4f}, "
        f"received {statistics.median(received):.4f}",
        flush=True,
    )
    return {
        "script": case.script,
        "arguments": list(case.arguments),
        "recipe": case.recipe,
        "link_mbit": case.mbit,
        "network": link.network,
        "step_time": link.step_time,
        "time_ratio": statistics.median(ratios),
        "bytes_ratio": statistics.median(sent),
        "received_ratio": statistics.median(received),
        "runs": [
            {"simulated": _record(prediction_run), "measured": _record(measured_run)}
            for prediction_run, measured_run in pairs
        ],
    }


def _pair(lab: Laboratory, link: Link, case: Case) -> tuple[Figures, Figures]:
    """Simulate with the processors that are free now, and measure."""
    return simulated(case, replace(link, processors=free_processors())), measured(lab, case)


def _record(figures: Figures) -> dict[str, Any]:
    moved = {"bytes_sent": list(figures.bytes_sent), "bytes_received": list(figures.bytes_received)}
    return {"ms_a_step": 1e3 * figures.step_s, **moved, "split_s_a_step": list(figures.splits)}


def simulated(case: Case, link: Link) -> Figures:
    """Return the simulator's prediction; the simulator measures a step of the script first."""
    with tempfile.TemporaryDirectory(prefix="stretto-simulated-") as place:
        folder = Path(place) / "run"
        about = ["-n", str(HOSTS), "--recipe", case.recipe, "--network", link.network]
        about += ["--step-time", link.step_time, "--processors", f"{link.processors:.2f}"]
        command = [sys.executable, "-m", "stretto.cli", "simulate", *about, "--quiet", "--out", str(folder)]
        asked = [*command, str(ROOT / "examples" / case.script), *case.arguments]
        done = subprocess.run(asked, env=_environment(), capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise SystemExit(f"{case.name} could not be simulated:\n{done.stderr[-2000:]}")
        return figures(folder / "events.jsonl")


def measured(lab: Laboratory, case: Case) -> Figures:
    """Return the figures of four hosts, each started as on a machine of its own."""
    with tempfile.TemporaryDirectory(prefix="stretto-simulated-") as place:
        folder = Path(place)
        command = [sys.executable, str(ROOT / "examples" / case.script), *case.arguments]
        _run_on_hosts(lab, command, folder, folder, case.recipe)
        return figures(folder / "events.jsonl")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def figures(log: Path) -> Figures:
    """Return the figures from a log, of a measured or a simulated run."""
    events = list(read_events(log))
    epochs = [event for event in events if event["event"] == "epoch"]
    ends = {event["worker"]: event for event in events if event["event"] == "end"}
    first, last = epochs[0], epochs[-1]
    steps = (last["samples"] - first["samples"]) / (BATCH * HOSTS)
    return Figures(
        step_s=(last["training_s"] - first["training_s"]) / steps,
        bytes_sent=[ends[worker]["bytes_sent"] for worker in sorted(ends)],
        bytes_received=[ends[worker]["bytes_received"] for worker in sorted(ends)],
        splits=[
            _less(one["time_breakdown"], before["time_breakdown"], steps)
            for one, before in zip(last["workers"], first["workers"], strict=True)
        ],
    )


def _less(now: Mapping[str, float], before: Mapping[str, float], steps: float) -> dict[str, float]:
    return {phase: (now[phase] - before[phase]) / steps for phase in now}


def _run_on_hosts(
    lab: Laboratory, command: Sequence[str], folder: Path, run: Path | None = None, recipe: str | None = None
) -> None:
    """Run the command on all hosts, as workers of a `run`, until it has ended on each or failed on one."""
    limit = time.monotonic() + LIMIT_S
    with ExitStack() as stack:
        logs = [stack.enter_context((folder / f"host-{host}.log").open("w+b")) for host in range(HOSTS)]
        started = [
            lab.start(host, command, {**_environment(), **lab.place(host, HOSTS, run, recipe)}, log)
            for host, log in enumerate(logs)
        ]
        for process in started:
            stack.callback(process.wait)
            stack.callback(process.kill)
        while any(process.poll() is None for process in started):
            late = time.monotonic() > limit
            failed = [host for host, process in enumerate(started) if process.poll()]
            if late or failed:
                log_end = (folder / f"host-{(failed or [0])[0]}.log").read_text(errors="replace")[-3000:]
                raise SystemExit(f"{command}: {f'host {failed[0]} failed' if failed else 'took too long'}\n{log_end}")
            time.sleep(0.02)


def measure_link(lab: Laboratory) -> Link:
    """Measure the properties of a laboratory."""
    processors = free_processors()
    samples = [_probed(lab, processors) for _ in range(PROBES)]
    costs = {name: statistics.median(one[name] for one in samples) for name in samples[0]}
    return Link(lab.measure_mbit(), lab.measure_round_trip_s(), TransportCosts(**costs), processors)


def _probed(lab: Laboratory, processors: float) -> dict[str, float]:
    """Return the transport costs that one group of four hosts measures."""
    with tempfile.TemporaryDirectory(prefix="stretto-simulated-") as place:
        folder = Path(place)
        _run_on_hosts(lab, [sys.executable, "-m", "benchmarks.simulated", place, str(processors)], folder)
        found: dict[str, float] = json.loads((folder / "wires.json").read_text())
    return found


def free_processors() -> float:
    """Return the number of processors that HOSTS busy processes get in total; other load on the machine lowers it."""
    command = [sys.executable, "-c", _BUSY]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(HOSTS)]
    return sum(float(one.communicate(timeout=LIMIT_S)[0]) for one in started)


_BUSY = """
import time

while time.time() % 2 > 0.1:
    time.sleep(0.01)
began, worked = time.perf_counter(), time.process_time()
while time.perf_counter() - began < 1.5:
    pass
print((time.process_time() - worked) / (time.perf_counter() - began))
"""


def probe(folder: Path, processors: float) -> None:
    """Measure the transport costs in one host's process, where `processors` are shared by all hosts."""
    torch.set_num_threads(1)
    seat = find_context()
    assert seat is not None
    wire = seat.transport(torch.device("cpu"))

    def passing() -> float:
        return time.perf_counter() * min(processors / HOSTS, 1.0)

    collective = _means(wire, transport_costs.of_collective(wire, lambda: busy_s() / HOSTS, passing, REPEATS))
    served = serve_at_rank0(wire, 1, "stop", LIMIT_S, seat.lead_host)
    parcels = _means(served, transport_costs.of_server(served, lambda: HOSTS * passing(), busy_s, REPEATS))
    if served.worker == 0:
        (folder / "wires.json").write_text(json.dumps(asdict(TransportCosts(*collective, *parcels))))
    served.close()


def busy_s() -> float:
    """Return the busy seconds of all processors: the time of queues and bridges belongs to no process."""
    now = psutil.cpu_times()
    return float(now.user + now.nice + now.system + now.irq + now.softirq)


def _means(wire: Transport, values: Sequence[float]) -> list[float]:
    """Return the means over all hosts."""
    samples = [
        msgspec.msgpack.decode(one, type=list[float]) for one in wire.all_gather_bytes(msgspec.msgpack.encode(values))
    ]
    return [statistics.mean(column) for column in zip(*samples, strict=True)]


if __name__ == "__main__":
    probe(Path(sys.argv[1]), float(sys.argv[2]))
