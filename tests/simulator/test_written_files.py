"""Files that several simulated workers write are named, as in a live run; notices of a script are shown once."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulator.harness import simulated

from stretto.run_config import RunConfig
from stretto.simulator.compute.cost_model import CostModel
from stretto.simulator.compute.step_time import measure
from stretto.simulator.compute.wall_clock import seconds
from stretto.simulator.config import Simulation, check

SCRIPT = """
    import sys
    import time
    from pathlib import Path

    import stretto
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    here = Path(__file__).parent
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(48, 2), torch.ones(48, 1)), batch_size=4)
    loader = stretto.distribute(net, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        time.time()
    WRITE
"""
ALL = "several workers wrote the same file: {} (workers 0, 1, 2)"


@pytest.mark.parametrize(
    ("write", "is_named"),
    [
        ("(here / 'x.pt').write_text('x')", True),
        ("torch.save(net.state_dict(), here / 'x.pt')", True),
        ("stretto.save(net.state_dict(), here / 'x.pt')", False),
        ("(here / f'{stretto.rank()}.pt').write_text('x')", False),
        ("(here / 'x.pt').exists()", False),
    ],
)
@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_files_that_several_workers_write_are_named(
    recipe: str, write: str, is_named: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    simulated(3, SCRIPT.replace("WRITE", write), recipe, folder=tmp_path)
    said = capsys.readouterr().err
    assert (ALL.format(tmp_path / "x.pt") in said) == is_named, said
    assert ("wrote the same file" in said) == is_named


def test_notices_are_left_to_the_simulation_that_follows_a_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("\n".join(line[4:] for line in SCRIPT.replace("WRITE", "").splitlines()))
    measure(check(Simulation(RunConfig(script=script, workers=2), CostModel(0.0))), seconds, lambda: None)
    assert capsys.readouterr().err == ""
