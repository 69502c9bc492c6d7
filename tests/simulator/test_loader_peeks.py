"""Workers that peek at a batch before each epoch, with failures: every sample counts once."""

from __future__ import annotations

import pytest
from simulator.failures import FREE, NET, is_whole, training
from simulator.harness import simulated

PEEKING = training(3, peeks=True)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", *FREE[:1]])
def test_restarted_worker_repeats_its_peeks(recipe: str) -> None:
    length = simulated(3, PEEKING, recipe, net=NET).seconds
    for part in (1, 5, 8, 12):
        who = part % 2
        at = 1000 * length * part / 16
        ended = simulated(3, PEEKING, recipe, net=NET, fault=f"kill worker {who} at {at:.3f}ms, back after 9ms")
        is_whole(ended, recipe, 3)
        assert len(ended.of("epoch")) == 3
