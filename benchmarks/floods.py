"""Floods of a run that listens on a network: steps per second and memory while a stranger without the key attacks.

3 hosts of a laboratory at 1 Gbit/s: the launcher with a worker, a worker that has joined, the attacker. The attacker
holds 1,100 connections to each port of the launcher's host, and makes 1,000 new ones a second where they are closed.
It has the lowest priority, since another machine's processor would cost the workers nothing. Quiet seconds and a
flood follow each other in one run.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.laboratory import Laboratory, address, name
from benchmarks.learning_tasks import MNIST
from benchmarks.machines import ENDLESS, OURS, HostsRun, pids
from benchmarks.measure import save
from benchmarks.pace import ROOT
from benchmarks.scripts.flood import KINDS

QUESTION = "steps per second during a flood of connections beside quiet ones, and memory"
WANTED = 0.9
FLOOD_S, QUIET_S = 60.0, 20.0
TRIAL_S = 10.0
HOSTS, ATTACKER = 2, 2
RECIPES = ("allreduce", "async_sgd")
SCRIPT = ROOT / "benchmarks" / "scripts" / "flood.py"


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all floods, print the figures and write them to the results. A trial has short floods."""
    print(f"floods: {QUESTION}", flush=True)
    MNIST.samples()
    flood_s = TRIAL_S if starts else FLOOD_S
    cases = list[dict[str, Any]]()
    record = {"question": QUESTION, "wanted": WANTED, "seconds": flood_s, "cases": cases}
    for recipe in RECIPES:
        for kind in KINDS:
            cases.append(measure(recipe, kind, flood_s))
            path = save("floods", record, trial=starts is not None)
    print(f"  kept in {path}")
    return record


def measure(recipe: str, kind: str, flood_s: float) -> dict[str, Any]:
    """Run a flood between two quiet times."""
    with tempfile.TemporaryDirectory() as folder, Laboratory(HOSTS + 1, 1000.0) as lab:
        run = HostsRun(lab, OURS, Path(folder), recipe, ENDLESS, hosts=HOSTS, workers=2)
        run.join(1)
        run.go()
        run.wait_until_steady()
        quiet = [_steps_per_s(run, QUIET_S)]
        memory = _memory_mb()
        attacker, ports = _attack(kind, flood_s)
        flooded, peak = _steps_per_s(run, flood_s - 1), _memory_mb()
        made = int(attacker.communicate(timeout=60)[0])
        quiet.append(_steps_per_s(run, QUIET_S))
        code = run.stop()
    ratio = flooded / (sum(quiet) / len(quiet))
    print(
        f"  {recipe}, {kind}: {ratio:.2f} times the quiet steps per second ({quiet[0]:.1f}, {flooded:.1f}, "
        f"{quiet[1]:.1f}); {made} connections to {ports} ports; memory {memory:.0f} MB before, {peak:.0f} MB in it",
        flush=True,
    )
    return {
        "recipe": recipe,
        "flood": kind,
        "ratio": ratio,
        "steps_per_s": {"before": quiet[0], "during": flooded, "after": quiet[1]},
        "connections": made,
        "ports": ports,
        "memory_mb": {"before": memory, "during": peak},
        "exit_code": code,
    }


def _attack(kind: str, seconds: float) -> tuple[subprocess.Popen[str], int]:
    """Start the attacker on all ports that the launcher's host listens on; return their number, too."""
    ports = sorted({str(port) for port in _listening(0)})
    command = [sys.executable, str(SCRIPT), kind, address(0), ",".join(ports), str(seconds)]
    inside = ["ip", "netns", "exec", name(ATTACKER), *command]
    return subprocess.Popen(inside, stdout=subprocess.PIPE, text=True), len(ports)


def _listening(host: int) -> list[int]:
    """Return the ports that processes of a host listen on, at its address in the network."""
    command = ["ip", "netns", "exec", name(host), "ss", "-Hltn"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()
    places = [line.split()[3].rpartition(":") for line in lines]
    return [int(port) for at, _, port in places if at == address(host)]


def _memory_mb() -> float:
    """Return the resident memory of all processes of the launcher's host."""
    return sum(psutil.Process(pid).memory_info().rss for pid in pids(0, "stretto")) / 1e6


def _steps_per_s(run: HostsRun, seconds: float) -> float:
    """Return the steps of host 1, over a time."""
    before, began = len(run.trace(1).steps), time.monotonic()
    time.sleep(seconds)
    return (len(run.trace(1).steps) - before) / (time.monotonic() - began)
