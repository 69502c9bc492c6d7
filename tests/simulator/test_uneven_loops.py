"""Workers whose loops are of unequal length end a simulation with the sentence of a live run."""

from __future__ import annotations

import pytest
from simulator.harness import simulated
from thread_workers import regression, sgd, small_net
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto.errors import LaunchError

ENDS = {
    "leaves the loop": "worker 1 has left the loop in epoch 2 at step 6, workers 0 and 2 wait at step 7",
    "ends its script": "worker 1 has ended its script in epoch 1 at step 4, workers 0 and 2 wait in epoch 2 at step 5",
}


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=4)", "ef21()"])
@pytest.mark.parametrize("how", ENDS)
def test_loops_of_unequal_length_are_named(how: str, recipe: str) -> None:
    def work(worker: int) -> None:
        net = small_net()
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(48), batch_size=4))
        for epoch in range(3):
            if how == "ends its script" and worker == 1 and epoch == 1:
                return
            for step, (x, y) in enumerate(loader):
                if how == "leaves the loop" and worker == 1 and (epoch, step) == (1, 2):
                    break
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()

    with pytest.raises(LaunchError) as caught:
        simulated(3, work, recipe)
    said = str(caught.value)
    assert said.startswith("the run failed at ") and "UnevenLoopsError: worker 1 has" in said
    if recipe == "allreduce":
        assert ENDS[how] in said
