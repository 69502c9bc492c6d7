"""Workers that do not wait, some of which leave a pass early: the others do what is left of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from crew import flat, regression, small_net
from sim.dying import FREE, NET, SAMPLES
from sim.simulated import Ended, simulated
from torch import nn
from torch.utils.data import DataLoader

import stretto

EVERY = [*FREE, "stale_synchronous(bound=0)"]


def leaving(leaves: Callable[[int, int], bool], **more: Any) -> Callable[[int], Any]:
    """Two passes; a worker that `leaves` after so many steps does so before the next."""

    def work(worker: int) -> Any:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader: Any = DataLoader(regression(SAMPLES), batch_size=4, shuffle=True)
        loader = stretto.distribute(net, optimizer, loader, **more)
        for _ in range(2):
            for steps, (x, y) in enumerate(loader):
                if leaves(worker, steps):
                    break
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
        return flat(net)

    return work


def seen(ended: Ended) -> list[tuple[int, int, int]]:
    return [tuple(one["seen"][name] for name in ("once", "twice", "never")) for one in ended.of("epoch")]


@pytest.mark.parametrize("recipe", EVERY)
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("who", [0, 1])
def test_what_one_leaves_the_others_do(recipe: str, after: int, who: int) -> None:
    ended = simulated(3, leaving(lambda worker, steps: worker == who and steps == after), recipe, net=NET)
    assert seen(ended) == [(SAMPLES, 0, 0)] * 2
    own = {one["worker"]: one["samples"] for one in ended.of("end")}
    assert own[who] == 2 * 4 * after


@pytest.mark.parametrize("recipe", EVERY)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_what_all_leave_nobody_does(recipe: str, after: int) -> None:
    ended = simulated(3, leaving(lambda _, steps: steps == after), recipe, net=NET)
    assert seen(ended) == [(12 * after, 0, SAMPLES - 12 * after)] * 2


@pytest.mark.parametrize("every", [1, 2])
def test_who_has_left_comes_to_the_meetings_of_all(every: int) -> None:
    def judged(net: nn.Module) -> dict[str, float]:
        return {"norm": float(flat(net).norm())}

    work = leaving(lambda worker, steps: worker == 1 and steps == 1, evaluate=judged, evaluate_every=every)
    ended = simulated(3, work, "async_sgd", net=NET)
    assert seen(ended) == [(SAMPLES, 0, 0)] * 2
    assert len(ended.of("evaluation")) >= 2 * (SAMPLES // 4 // 3 // every)


@pytest.mark.parametrize("at", range(20, 240, 20))
def test_who_has_left_stays_out_when_a_server_dies(at: int) -> None:
    work = leaving(lambda worker, steps: worker == 1 and steps == 1)
    ended = simulated(3, work, "async_sgd", net=NET, fault=f"kill server 0 at {at}ms, back after 10ms")
    assert seen(ended)[-1] == (SAMPLES, 0, 0)
    assert [once for once, _, _ in seen(ended)] == [SAMPLES] * 2
