"""How fast is the simulator, and what does a worker of it take of memory?

Worker steps per second on one core, one by one, against the same loop without Stretto on the same core: digits and a
perceptron of 5 K parameters (64, 64, 10), batch 32. Sides take turns in one process; each figure is the difference of
a longer run and a shorter one, so that what happens once does not count. Seconds per round stand beside those of
Flower's simulation engine, if it is installed. Memory is the peak of a process that simulates 1,000 workers, and of one
that simulates 1,000 of whom one is killed and restarted.

    STRETTO_FLOWER=/where/python python -m benchmarks simulator
"""

from __future__ import annotations

import io
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Ratio, Spread, save
from benchmarks.pace import ROOT, in_turns
from benchmarks.peers import flower
from benchmarks.peers.processes import Child, say, told_to_end
from stretto.faults import plan
from stretto.launcher.config import RunConfig
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.config import Simulation, check
from stretto.simulator.isolation.memory_estimate import memory_bytes
from stretto.simulator.network.topology import parse
from stretto.simulator.runner import create_run, simulate

QUESTION = "worker steps per second of the simulator on one core, against the plain loop, and its memory"
WANTED_STEPS, WANTED_MIB = 3000.0, 1024.0
SCRIPT = ROOT / "benchmarks" / "scripts" / "small.py"
THE_LINE = "loader = stretto.distribute(model, optimizer, loader)\n"
IMAGES, BATCH = 1797, 32
WORKERS, MANY = 16, 1000
EVERY = 16
RECIPES = ("allreduce", f"local_sgd(every={EVERY})", "async_sgd")
TIMES, SHORT, LONG = 10, 1, 3
DEATH = "kill worker 3 at 10ms, back after 10ms"
STARTS, REPETITIONS = 1, 5
LIMIT_S = 300.0
LOOK_S = 0.2


def run(starts: int | None = None) -> dict[str, Any]:
    """Take the figures, print them, keep them."""
    print(f"simulator: {QUESTION}", flush=True)
    cases = {recipe: _case(recipe, starts or STARTS) for recipe in RECIPES}
    memory = _memory()
    record = {
        "question": QUESTION,
        "wanted_steps": WANTED_STEPS,
        "wanted_mib": WANTED_MIB,
        "workers": WORKERS,
        "every": EVERY,
        "starts": starts or STARTS,
        "threads": 1,
        "cases": cases,
        "memory": memory,
        "rounds": _rounds(cases),
    }
    print(f"  kept in {save('simulator', record, trial=starts is not None)}")
    return record


def _case(recipe: str, starts: int) -> dict[str, Any]:
    return _contest(recipe, ("simulated", "plain"), [_heard("sides", RECIPE=recipe) for _ in range(starts)])


def _contest(name: str, sides: tuple[str, str], taken: list[dict[str, Any]]) -> dict[str, Any]:
    ratio = Ratio.of(*([one[side] for one in taken] for side in sides))
    step_s = {side: Spread.of([second for one in taken for second in one[side]]) for side in sides}
    speeds = {side: 1 / one.median for side, one in step_s.items()}
    ours, theirs = sides
    print(
        f"  {name:22} {speeds[ours]:8.0f} worker steps/s {ours}, {theirs} {speeds[theirs]:8.0f}: {ratio}",
        flush=True,
    )
    return {
        "steps_a_second": speeds,
        "us_a_step": {side: Spread(*(1e6 * x for x in vars(one).values())).record() for side, one in step_s.items()},
        "ratio": ratio.record(),
    }


def _memory() -> dict[str, float]:
    """MiB at the peak of a few workers and of many, and of one more worker; and of many of whom one dies."""
    few, many = (_heard("peak", WORKERS=str(workers))["mib"] for workers in (WORKERS, MANY))
    mortal = _heard("peak", WORKERS=str(MANY), FAULTS=DEATH)["mib"]
    each = 1024 * (many - few) / (MANY - WORKERS)
    print(f"  {MANY} workers: {many:.0f} MiB at the peak, {each:.0f} KiB a worker", flush=True)
    print(f"  {MANY} workers, {DEATH}: {mortal:.0f} MiB", flush=True)
    found = {"workers": MANY, "mib": many, "few": WORKERS, "few_mib": few, "kib_a_worker": each}
    return {**found, "death": DEATH, "mortal_mib": mortal}


def _rounds(cases: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a round of local steps of all, ours and Flower's."""
    ours = WORKERS * EVERY / cases[f"local_sgd(every={EVERY})"]["steps_a_second"]["simulated"]
    python = flower.interpreter()
    if python is None:
        print(f"  without Flower. {flower.MISSING}", flush=True)
        return {"stretto": ours}
    theirs = flower.measure(python, WORKERS, EVERY)
    print(f"  a round of {WORKERS} clients, {EVERY} steps each: {ours:.3f} s, Flower {theirs:.3f} s", flush=True)
    return {"stretto": ours, "flower": theirs}


def _heard(function: str, **told: str) -> dict[str, Any]:
    """What a process of its own says."""
    with closing(Child(__spec__.name, function, told)) as child:
        return child.hear(LIMIT_S)


# --- in a process below -----------------------------------------------------------------------------------------------


def sides() -> None:
    """Seconds of a worker's step, simulated and in the plain loop, in turns on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    recipe = os.environ["RECIPE"]
    found = in_turns(
        {
            "simulated": lambda: _step_s(lambda epochs: _simulated(recipe, WORKERS, epochs)),
            "plain": lambda: _step_s(_plain),
        },
        REPETITIONS,
    )
    say(**found)
    told_to_end()


def peak() -> None:
    """The most memory that a simulation of so many workers takes, in MiB; pages that many have mapped count once."""
    torch.set_num_threads(1)
    workers, ended, seen = int(os.environ["WORKERS"]), threading.Event(), [memory_bytes()]

    def look() -> None:
        while not ended.wait(LOOK_S):
            seen.append(memory_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    _simulated(RECIPES[1], workers, 1, 2 * BATCH * workers // IMAGES + 1, faults=os.environ.get("FAULTS", ""))
    ended.set()
    looking.join()
    say(mib=max(seen) / (1 << 20))
    told_to_end()


def _step_s(run: Callable[[int], None], times: int = TIMES, long: int = LONG) -> float:
    steps = (long - SHORT) * -(-IMAGES * times // BATCH)
    seconds = []
    for epochs in (SHORT, long):
        began = time.perf_counter()
        run(epochs)
        seconds.append(time.perf_counter() - began)
    return (seconds[1] - seconds[0]) / steps


def _arguments(epochs: int, times: int = TIMES) -> list[str]:
    return ["--epochs", str(epochs), "--times", str(times)]


def _simulated(
    recipe: str,
    workers: int,
    epochs: int,
    times: int = TIMES,
    *,
    faults: str = "",
) -> None:
    order = RunConfig(SCRIPT, _arguments(epochs, times), workers=workers, recipe=recipe, output="none")
    struck = plan.parse(faults) if faults else ()
    asked = check(Simulation(order, CostModel(0.001), parse("100Mbit/s 1ms"), faults=struck))
    with tempfile.TemporaryDirectory(prefix="stretto-simulator-") as place:
        simulate(asked, create_run(asked, Path(place) / "run"), io.StringIO())


def _plain(epochs: int, times: int = TIMES) -> None:
    """The script without the line."""
    source = SCRIPT.read_text()
    assert THE_LINE in source
    before, sys.argv = sys.argv, [str(SCRIPT), *_arguments(epochs, times)]
    try:
        exec(compile(source.replace(THE_LINE, ""), str(SCRIPT), "exec"), {"__name__": "__main__"})  # noqa: S102
    finally:
        sys.argv = before
