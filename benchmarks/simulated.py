"""Does the simulator say beforehand what the laboratory then measures?

4 hosts on one machine, behind links of 100 Mbit/s and 1 Gbit/s: seconds per step, and bytes that each worker sends, for
real and by `stretto simulate` with the same script and recipe. The simulator is told what the laboratory is made of, as
measured in it: the rate that one connection reaches, the latency of a byte, what a message and a megabyte take of a
processor, and how many processors the hosts share. A step is one batch of one worker; the first pass is not counted,
evaluations are not training.
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
from stretto.training.worker_context import find_seat
from stretto.transport import Transport

QUESTION = "seconds per step and bytes sent that the simulator predicts, against those measured in the laboratory"
WANTED, WANTED_BYTES = 0.15, 0.01
"""How far a prediction may be off, as a part of what was measured."""
HOSTS, BATCH = 4, 32
RATES = (100.0, 1000.0)
RECIPES = ("allreduce", "local_sgd(every=16)", "async_sgd", "power_sgd(rank=2)")
LIMIT_S = 240.0
"""For one run."""
STARTS = 2
"""How often a case is run: a figure is the mean of two, since the machine is not as fast in each minute."""
MORE = 3
"""Exchanges are measured so often as much as where somebody waits for the simulation."""
PROBES = 3
"""And by so many groups of processes, of whom the medians are taken."""


@dataclass(frozen=True)
class Case:
    """A script under a recipe behind links of a rate in Mbit/s."""

    script: str
    arguments: Sequence[str]
    recipe: str
    mbit: float

    @property
    def name(self) -> str:
        """What a table calls it."""
        return f"{self.script.removesuffix('.py')}, {self.recipe}, {self.mbit:g} Mbit/s"


@dataclass(frozen=True)
class Figures:
    """What a run's log says: seconds per step after the first pass, bytes that each worker moved until its end."""

    step_s: float
    bytes_sent: Sequence[int]
    bytes_received: Sequence[int]
    """Without what TCP sends twice: it comes once."""
    splits: Sequence[Mapping[str, float]]
    """Of each worker, the seconds per step in every phase."""


@dataclass(frozen=True)
class Link:
    """What a laboratory's links are like: the rate of one connection, and a byte's way there and back."""

    mbit: float
    there_and_back_s: float
    costs: TransportCosts
    processors: float

    @property
    def step_time(self) -> str:
        """What `--step-time` is told: the step is measured, the wires have been."""
        named = {field: name for name, field in NAMES.items()}
        return ", ".join([AUTO, *(f"{1e3 * time:.4f}ms {named[of]}" for of, time in asdict(self.costs).items())])

    @property
    def network(self) -> str:
        """What `--network` is told. Worker 0 keeps the server in its process where a recipe has one."""
        latency_us = 1e6 * self.there_and_back_s / 2
        return f"{self.mbit:.2f}Mbit/s {latency_us:.0f}us, burst {BURST_BYTES}B, servers in worker 0"


def run(starts: int | None = None, only: Sequence[Case] = ()) -> dict[str, Any]:
    """Take the figures, print them, keep them. `starts` is how often each case is run."""
    print(f"simulated: {QUESTION}", flush=True)
    asked = only or cases()
    found: list[dict[str, Any]] = []
    for mbit in dict.fromkeys(one.mbit for one in asked):
        with Laboratory(HOSTS, mbit) as lab:
            link = look_at(lab)
            print(f"  {mbit:g} Mbit/s: {link.network}; {link.step_time}; {link.processors:.2f} processors", flush=True)
            found += [_case(lab, link, one, starts or STARTS) for one in asked if one.mbit == mbit]
    record = {
        "question": QUESTION,
        "wanted": WANTED,
        "wanted_bytes": WANTED_BYTES,
        "hosts": HOSTS,
        "threads": 1,
        "starts": starts or STARTS,
        "cases": found,
    }
    print(f"  kept in {save('simulated', record, trial=starts is not None or bool(only))}")
    return record


def cases() -> list[Case]:
    """All of which the data is here."""
    here = scripts()
    every = [(script, recipe, mbit) for mbit in RATES for script in here for recipe in RECIPES]
    return [Case(script, arguments(script, recipe, mbit), recipe, mbit) for script, recipe, mbit in every]


def arguments(script: str, recipe: str, mbit: float) -> tuple[str, ...]:
    """So long that what is counted takes some seconds."""
    if script == "digits.py":
        return ("--epochs", "24")
    slow = mbit < RATES[-1] and recipe != "power_sgd(rank=2)"
    return ("--epochs", "3", "--samples", "2048" if slow else "4096")


def _case(lab: Laboratory, link: Link, case: Case, starts: int) -> dict[str, Any]:
    """In turns: simulated beside measured, since the machine is not as fast in each minute."""
    print(f"  {case.name}", flush=True)
    pairs = [_pair(lab, link, case) for _ in range(starts)]
    ratios = [here.step_s / there.step_s for here, there in pairs]
    sent = [sum(here.bytes_sent) / sum(there.bytes_sent) for here, there in pairs]
    received = [sum(here.bytes_received) / sum(there.bytes_received) for here, there in pairs]
    one, other = pairs[-1]
    print(
        f"    {1e3 * one.step_s:8.2f} ms a step simulated, {1e3 * other.step_s:8.2f} measured: "
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
        "runs": [{"simulated": _record(here), "measured": _record(there)} for here, there in pairs],
    }


def _pair(lab: Laboratory, link: Link, case: Case) -> tuple[Figures, Figures]:
    """Simulated with the processors that are free now, and measured."""
    return simulated(case, replace(link, processors=free_processors())), measured(lab, case)


def _record(one: Figures) -> dict[str, Any]:
    moved = {"bytes_sent": list(one.bytes_sent), "bytes_received": list(one.bytes_received)}
    return {"ms_a_step": 1e3 * one.step_s, **moved, "split_s_a_step": list(one.splits)}


def simulated(case: Case, link: Link) -> Figures:
    """What the simulator says; it measures a step of the script first."""
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
    """What four hosts do, each started as on a machine of its own."""
    with tempfile.TemporaryDirectory(prefix="stretto-simulated-") as place:
        folder = Path(place)
        command = [sys.executable, str(ROOT / "examples" / case.script), *case.arguments]
        _see_out(lab, command, folder, folder, case.recipe)
        return figures(folder / "events.jsonl")


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def figures(log: Path) -> Figures:
    """What a log says of its run, measured or simulated alike."""
    events = list(read_events(log))
    passes = [event for event in events if event["event"] == "epoch"]
    ends = {event["worker"]: event for event in events if event["event"] == "end"}
    first, last = passes[0], passes[-1]
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


def _see_out(
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
        for one in started:
            stack.callback(one.wait)
            stack.callback(one.kill)
        while any(one.poll() is None for one in started):
            late = time.monotonic() > limit
            failed = [host for host, one in enumerate(started) if one.poll()]
            if late or failed:
                said = (folder / f"host-{(failed or [0])[0]}.log").read_text(errors="replace")[-3000:]
                raise SystemExit(f"{command}: {f'host {failed[0]} failed' if failed else 'took too long'}\n{said}")
            time.sleep(0.02)


def look_at(lab: Laboratory) -> Link:
    """What a laboratory is made of."""
    processors = free_processors()
    told = [_probed(lab, processors) for _ in range(PROBES)]
    costs = {name: statistics.median(one[name] for one in told) for name in told[0]}
    return Link(lab.measure_mbit(), lab.measure_round_trip_s(), TransportCosts(**costs), processors)


def _probed(lab: Laboratory, processors: float) -> dict[str, float]:
    """What the wires take, as four hosts find."""
    with tempfile.TemporaryDirectory(prefix="stretto-simulated-") as place:
        folder = Path(place)
        _see_out(lab, [sys.executable, "-m", "benchmarks.simulated", place, str(processors)], folder)
        found: dict[str, float] = json.loads((folder / "wires.json").read_text())
    return found


def free_processors() -> float:
    """How many processors as many busy processes as there are hosts have; fewer than are here if others are at work."""
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
    """What one host does to learn what the wires take, where all hosts have so many processors."""
    torch.set_num_threads(1)
    seat = find_seat()
    assert seat is not None
    wire = seat.wire(torch.device("cpu"))

    def passing() -> float:
        return time.perf_counter() * min(processors / HOSTS, 1.0)

    collective = _means(wire, transport_costs.of_collective(wire, lambda: busy_s() / HOSTS, passing, MORE))
    served = serve_at_rank0(wire, 1, "stop", LIMIT_S, seat.lead_host)
    parcels = _means(served, transport_costs.of_server(served, lambda: HOSTS * passing(), busy_s, MORE))
    if served.worker == 0:
        (folder / "wires.json").write_text(json.dumps(asdict(TransportCosts(*collective, *parcels))))
    served.close()


def busy_s() -> float:
    """How long the machine's processors have been at work: queues and bridges are no process's."""
    now = psutil.cpu_times()
    return float(now.user + now.nice + now.system + now.irq + now.softirq)


def _means(wire: Transport, values: Sequence[float]) -> list[float]:
    """Of what all hosts found."""
    told = [
        msgspec.msgpack.decode(one, type=list[float]) for one in wire.all_gather_bytes(msgspec.msgpack.encode(values))
    ]
    return [statistics.mean(column) for column in zip(*told, strict=True)]


if __name__ == "__main__":
    probe(Path(sys.argv[1]), float(sys.argv[2]))
