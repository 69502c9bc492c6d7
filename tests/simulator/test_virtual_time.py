"""A script that divides by the difference of two clock readings runs in a simulation and its measurement."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from simulator.harness import STEP_S, simulated

from stretto.run_config import RunConfig
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.compute.step_time import measure
from stretto.simulator.compute.wall_clock import seconds
from stretto.simulator.config import Simulation, check

SCRIPT = """
    import sys
    import time

    import stretto
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    clock, unit = getattr(time, sys.argv[1]), 1e9 if sys.argv[1].endswith("_ns") else 1.0
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(48, 2), torch.ones(48, 1)), batch_size=4)
    loader = stretto.distribute(net, optimizer, loader)
    before, began = clock(), clock()
    print("at rest", 100 / (clock() - before) > 0)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        now = clock()
        print(f"{unit * len(x) / (now - began):.3f} samples/s, {now / unit:.9f}")
        began = now
    later = [clock() for _ in range(100)]
    assert later == sorted(set(later))
"""
CLOCKS = ["time", "perf_counter", "monotonic", "process_time", "time_ns", "perf_counter_ns"]


def ran(clock: str, **more: object) -> str:
    said = simulated(2, SCRIPT, "allreduce", args=(clock,), asks={"output": "all"}, **more)  # type: ignore[arg-type]
    assert "at rest True" in said.said
    return said.said


@pytest.mark.parametrize("clock", CLOCKS)
def test_readings_of_a_clock_differ_in_a_simulation(clock: str) -> None:
    assert ran(clock) == ran(clock, order=[1, 0])


def test_clock_readings_take_no_step_time() -> None:
    """Six steps take six step times."""
    lines = [one for one in ran("time").splitlines() if "samples/s" in one]
    assert max(float(one.rsplit(" ", 1)[1]) for one in lines) == pytest.approx(6 * STEP_S, abs=1e-4)
    assert float(lines[-1].split()[-3]) == pytest.approx(4 / STEP_S, rel=1e-3)


@pytest.mark.parametrize("clock", CLOCKS)
def test_clock_advances_while_a_step_is_measured(clock: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(dedent(SCRIPT))
    order = RunConfig(script=script, workers=2, recipe="allreduce", args=(clock,))
    assert measure(check(Simulation(order, CostModel(0.0))), seconds, lambda: None).cost_model.step_of(1) > 0


@pytest.mark.parametrize("recipe", ["async_sgd", "stale_synchronous(bound=4)"])
def test_every_worker_has_batches_in_each_epoch_that_is_measured(recipe: str, tmp_path: Path) -> None:
    """A script may use the loop's variables after the loop."""
    script = tmp_path / "train.py"
    loop = "for epoch in range(3):\n    for k, (x, y) in enumerate(loader):\n        pass\n    print(k)\n    del k\n"
    step = "optimizer.zero_grad(); torch.nn.functional.mse_loss(net(x), y).backward(); optimizer.step()"
    script.write_text(dedent(SCRIPT).partition("before, began")[0] + loop.replace("pass", step))
    order = RunConfig(script=script, workers=3, recipe=recipe, args=("time",))
    assert measure(check(Simulation(order, CostModel(0.0))), seconds, lambda: None).cost_model.step_of(1) > 0
