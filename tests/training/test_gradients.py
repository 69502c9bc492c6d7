"""The all-reduce of gradients with a codec that cannot carry counts, and with several buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from thread_workers import Branching, flat, regression, relative_distance, run_single_process, run_workers, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stretto
from stretto.codecs import SingleRound
from stretto.recipe.recipe import Recipe
from stretto.strategies import gradient_allreduce

DOUBLE = torch.float64


@dataclass(frozen=True, repr=False)
class whole(SingleRound):
    """Codec that sends every tensor unencoded; it would lose counts appended to the numbers."""

    linear = False

    def encode(self, x: Tensor, state: Any) -> Tensor:
        return x.clone()

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        return message


@pytest.mark.parametrize("codec", [whole(), stretto.codecs.exact()], ids=str)
@pytest.mark.parametrize("bucket_bytes", [8, 200, 1 << 20])
def test_gradient_allreduce_equals_one_process_for_all_buckets_and_codecs(
    codec: Any, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_allreduce, "FIRST_BUCKET_BYTES", bucket_bytes)
    monkeypatch.setattr(gradient_allreduce, "BUCKET_BYTES", bucket_bytes)
    states = [Branching().state_dict(), small_net(DOUBLE).state_dict()]

    def work(make: Any, state: dict[str, Tensor]) -> Tensor:
        net = make()
        net.load_state_dict(state)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        loader = DataLoader(regression(90, DOUBLE), batch_size=4)
        for x, y in stretto.distribute(net, optimizer, loader, recipe=Recipe(how=codec)):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        return flat(net)

    for make, state in zip((Branching, lambda: small_net(DOUBLE)), states, strict=True):
        found = run_workers(3, lambda worker, make=make, state=state: work(make, state))
        assert (
            relative_distance(
                found[0], run_single_process(lambda worker, make=make, state=state: work(make, state), join=3)
            )
            <= 1e-10
        )
        assert torch.equal(found[0], found[2])
