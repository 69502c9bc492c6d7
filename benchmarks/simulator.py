"""Speed of the simulator, and memory of one of its workers.

Worker steps per second on one core, one worker at a time, against the same loop without Stretto on the same core:
digits and a perceptron of 5 K parameters (64, 64, 10), batch 32. Sides take turns in one process; each figure is the
difference of a longer run and a shorter one, so that one-time costs do not count. Seconds per round are compared with
Flower's simulation engine, if it is installed. Memory is the peak of a process that simulates 1,000 workers, and of a
process that simulates 1,000 workers, one of which is killed and restarted.

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
from benchmarks.peers.processes import Child, send_result, wait_until_closed
from stretto.faults import plan
from stretto.run_config import RunConfig
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.config import Simulation, check
from stretto.simulator.isolation.memory_estimate import memory_bytes
from stretto.simulator.network.topology import parse
from stretto.simulator.runner import create_run, simulate

QUESTION = "worker steps per second of the simulator on one core, against the plain loop, and its memory"
WANTED_STEPS, WANTED_MIB = 3000.0, 1024.0
SCRIPT = ROOT / "benchmarks" / "scripts" / "small.py"
DISTRIBUTE_CALL = "loader = stretto.distribute(model, optimizer, loader)\n"
IMAGES, BATCH = 1797, 32
WORKERS, MANY = 16, 1000
EVERY = 16
RECIPES = ("allreduce", f"local_sgd(every={EVERY})", "async_sgd")
TIMES, SHORT, LONG = 10, 1, 3
FAULT = "kill worker 3 at 10ms, back after 10ms"
STARTS, REPETITIONS = 1, 5
LIMIT_S = 300.0
POLL_S = 0.2


def run(starts: int | None = None) -> dict[str, Any]:
    """Measure all cases, print the figures and write them to the results."""
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
    return _contest(recipe, ("simulated", "plain"), [_result_of("sides", RECIPE=recipe) for _ in range(starts)])


def _contest(name: str, sides: tuple[str, str], results: list[dict[str, Any]]) -> dict[str, Any]:
    ratio = Ratio.of(*([one[side] for one in results] for side in sides))
    step_s = {side: Spread.of([second for one in results for second in one[side]]) for side in sides}
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
    """Return the peak MiB with few workers, many, and many of which one fails; and the KiB of one more worker."""
    few, many = (_result_of("peak", WORKERS=str(workers))["mib"] for workers in (WORKERS, MANY))
    with_failure = _result_of("peak", WORKERS=str(MANY), FAULTS=FAULT)["mib"]
    each = 1024 * (many - few) / (MANY - WORKERS)
    print(f"  {MANY} workers: {many:.0f} MiB at the peak, {each:.0f} KiB a worker", flush=True)
    print(f"  {MANY} workers, {FAULT}: {with_failure:.0f} MiB", flush=True)
    record = {"workers": MANY, "mib": many, "few": WORKERS, "few_mib": few, "kib_a_worker": each}
    return {**record, "death": FAULT, "mortal_mib": with_failure}


def _rounds(cases: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a round of local steps of all workers, ours and Flower's."""
    ours = WORKERS * EVERY / cases[f"local_sgd(every={EVERY})"]["steps_a_second"]["simulated"]
    python = flower.interpreter()
    if python is None:
        print(f"  without Flower. {flower.MISSING}", flush=True)
        return {"stretto": ours}
    theirs = flower.measure(python, WORKERS, EVERY)
    print(f"  a round of {WORKERS} clients, {EVERY} steps each: {ours:.3f} s, Flower {theirs:.3f} s", flush=True)
    return {"stretto": ours, "flower": theirs}


def _result_of(function: str, **environment: str) -> dict[str, Any]:
    """Return the result of a function in a process of its own."""
    with closing(Child(__spec__.name, function, environment)) as child:
        return child.receive(LIMIT_S)


# --- child process ----------------------------------------------------------------------------------------------------


def sides() -> None:
    """Print the seconds of a worker's step, simulated and in the plain loop, measured in turns on one core."""
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
    send_result(**found)
    wait_until_closed()


def peak() -> None:
    """Print the peak memory of a simulation in MiB; pages shared by several processes count once."""
    torch.set_num_threads(1)
    workers, ended, samples = int(os.environ["WORKERS"]), threading.Event(), [memory_bytes()]

    def sample() -> None:
        while not ended.wait(POLL_S):
            samples.append(memory_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    _simulated(RECIPES[1], workers, 1, 2 * BATCH * workers // IMAGES + 1, faults=os.environ.get("FAULTS", ""))
    ended.set()
    sampler.join()
    send_result(mib=max(samples) / (1 << 20))
    wait_until_closed()


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
    config = RunConfig(SCRIPT, _arguments(epochs, times), workers=workers, recipe=recipe, output="none")
    fault_plan = plan.parse(faults) if faults else ()
    simulation = check(Simulation(config, CostModel(0.001), parse("100Mbit/s 1ms"), faults=fault_plan))
    with tempfile.TemporaryDirectory(prefix="stretto-simulator-") as place:
        simulate(simulation, create_run(simulation, Path(place) / "run"), io.StringIO())


def _plain(epochs: int, times: int = TIMES) -> None:
    """Run the script without Stretto."""
    source = SCRIPT.read_text()
    assert DISTRIBUTE_CALL in source
    before, sys.argv = sys.argv, [str(SCRIPT), *_arguments(epochs, times)]
    try:
        exec(compile(source.replace(DISTRIBUTE_CALL, ""), str(SCRIPT), "exec"), {"__name__": "__main__"})  # noqa: S102
    finally:
        sys.argv = before
