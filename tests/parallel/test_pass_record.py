"""Figures of a rank: seconds of its passes and of its waits, what it keeps and what it holds."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from stage_threads import in_threads, split
from torch import nn

from stretto.parallel import measure
from stretto.parallel.calls import record_calls
from stretto.parallel.link import CPU, Link
from stretto.parallel.measure import TIMES, TOGETHER, measured_costs
from stretto.parallel.pass_record import PassRecord, memory_figures
from stretto.recipe.layout import pipeline
from stretto.runtime.phase_timer import Stopwatch
from stretto.strategies.optimizers import Optimizers


def test_waits_within_passes_count_but_for_the_first_one_and_others_do_not() -> None:
    now = [0.0]
    timer = Stopwatch(lambda: now[0])
    record = PassRecord(timer)
    timer.switch("computing")
    for is_backward, waits in ((False, 20.0), (True, 30.0), (False, 1.0), (True, 2.0)):
        with record.within(is_backward):
            now[0] += 3.0
            with timer.on("waiting"):
                now[0] += waits
        with timer.on("waiting"):
            now[0] += 10.0
    assert record.figures() == {"passes": 1, "seconds": 9.0, "waiting": 3.0}


def test_what_modules_keep_is_what_autograd_saves_besides_parameters() -> None:
    net, x = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), torch.ones(3, 4)
    calls = record_calls(net, [x], {})
    found = measured_costs(net, calls, [x], {}, 0.0, CPU).kept
    assert dict(zip(calls.names, found, strict=True)) == {"": 0, "0": 4 * 3 * 4, "1": 4 * 3 * 6, "2": 4 * 3 * 6}


class Slow(nn.Module):
    """A model with slow code between its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), 0
        self.layers[0].register_forward_pre_hook(self.note)

    def note(self, *_: object) -> None:
        self.calls += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            time.sleep(0.005)
            x = layer(x) + x
        return x


def test_code_between_modules_is_timed_without_the_modules() -> None:
    net, x = Slow(), torch.ones(3, 4)
    calls = record_calls(net, [x], {})
    noted = net.calls
    found = measured_costs(net, calls, [x], {}, 0.0, CPU)
    assert found.between_s >= 0.01
    assert max(found.seconds) > 0
    assert net.calls == noted + 1 + 1 + TIMES  # one pass with modules, one for shapes, and those between modules


class Alive(torch.autograd.Function):
    """Counts the forward passes whose backward passes are to come, and the most of them at a backward pass."""

    now = most = 0

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        Alive.now += 1
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        Alive.most = max(Alive.most, Alive.now)
        Alive.now -= 1
        return gradients[0]


class Counted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        clock[0] += 1.0
        found: torch.Tensor = Alive.apply(super().forward(x))
        return found


clock = [0.0]


@pytest.mark.parametrize(("micro_batches", "together"), [(1, 1), (3, 3), (9, TOGETHER)])
def test_modules_are_timed_with_the_activations_of_several_micro_batches_in_memory(
    micro_batches: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = nn.Sequential(Counted(4, 4), nn.Linear(4, 4)), torch.ones(3, 4)
    calls = record_calls(net, [x], {})
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    Alive.now = Alive.most = 0
    found = measured_costs(net, calls, [x], {}, 0.0, CPU, micro_batches)
    assert found.seconds == [0.0, 1.0, 0.0]
    assert Alive.most == together
    assert all(one.grad is None for one in net.parameters())


def test_ranks_hold_the_parameters_and_the_state_of_their_stage() -> None:
    def work(link: Link) -> dict[str, int]:
        net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        optimizer = torch.optim.AdamW(net.parameters())
        split(link, net, optimizer, pipeline(2, 2), torch.ones(2, 4))
        net(torch.ones(4, 4)).sum().backward()
        optimizer.step()
        return memory_figures(net, Optimizers([optimizer]), CPU)

    for numbers, tensors, found in zip((4 * 6 + 6, 6 * 2 + 2), (2, 2), in_threads(2, work), strict=True):
        assert found["parameters"] == found["gradients"] == 4 * numbers
        assert found["state"] == 2 * 4 * numbers + 4 * tensors  # moments, and a count of steps of each parameter
        assert found["peak"] > 10**7
