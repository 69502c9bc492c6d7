"""Parameters of other stages: reads of them end in an error, and whole states are loaded by parts."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_threads import callbacks, in_threads, joined, largest_difference, split
from staged_net import loss_of, make_net, words
from torch import Tensor, nn

from stretto.errors import ModelError
from stretto.parallel.link import Link
from stretto.parallel.rank_parts import RankContext
from stretto.parallel.stages import PipelineStages
from stretto.recipe.layout import pipeline
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.parameter_view import is_held


def averaged(model: nn.Module) -> None:
    average = torch.optim.swa_utils.AveragedModel(make_net())
    average.update_parameters(model)


def by_hand(model: nn.Module) -> None:
    with torch.no_grad():
        for mine, one in zip(make_net().parameters(), model.parameters(), strict=True):
            mine.mul_(0.9).add_(one.data, alpha=0.1)


def penalty(model: nn.Module) -> None:
    sum(one.pow(2).sum() for one in model.parameters()).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize("read", [averaged, by_hand, penalty])
def test_reads_of_values_that_another_stage_holds_end_in_an_error(read: Callable[[nn.Module], Any]) -> None:
    def work(link: Link) -> str:
        net = make_net()
        split(link, net, torch.optim.SGD(net.parameters(), lr=0.1), pipeline(2), words(0, 8)[0])
        net(words(0, 8)[0])
        with pytest.raises(ModelError, match=r"at another stage(.*\n)*  got: \w+ of a parameter of shape") as error:
            read(net)
        return str(error.value)

    in_threads(2, work)


@pytest.mark.parametrize("read", [copy.deepcopy, pickle.dumps, lambda net: torch.save(net, io.BytesIO())])
def test_copies_and_files_of_a_model_in_stages_end_in_an_error(read: Callable[[nn.Module], Any]) -> None:
    def work(link: Link) -> None:
        net = make_net()
        split(link, net, torch.optim.SGD(net.parameters(), lr=0.1), pipeline(2), words(0, 8)[0])
        with pytest.raises(ModelError, match=r"would lack parts(.*\n)*  try: stretto.save\(model.state_dict\(\)"):
            read(net)

    in_threads(2, work)


def test_shapes_and_settings_of_other_stages_parameters_are_there() -> None:
    def work(link: Link) -> None:
        net = make_net()
        split(link, net, torch.optim.SGD(net.parameters(), lr=0.1), pipeline(2), words(0, 8)[0])
        other = next(one for one in net.parameters() if not is_held(one))
        plain = next(mine for mine, one in zip(make_net().parameters(), net.parameters(), strict=True) if one is other)
        assert (other.shape, other.numel(), other.dtype, other.device) == (plain.shape, plain.numel(), *kind(plain))
        other.requires_grad = False
        assert "another stage" in repr(other)
        assert isinstance(other.to("cpu"), Tensor)
        assert net.to("cpu") is net

    def kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
        return tensor.dtype, tensor.device

    in_threads(2, work)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x, y = words(step, 8)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


def there_and_back(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Train, return to the best state and train again; return the optimizer's state."""
    train(model, optimizer, range(2))
    best = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, range(2, 4))
    model.load_state_dict(best[0])
    optimizer.load_state_dict(best[1])
    train(model, optimizer, range(4, 6))
    return optimizer.state_dict()


def test_a_script_returns_to_its_best_state_in_the_middle_of_the_training() -> None:
    nets = [make_net() for _ in range(2)]

    def work(link: Link) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(nets[link.rank].parameters(), lr=0.01)
        split(link, nets[link.rank], optimizer, pipeline(2), words(0, 8)[0])
        state = there_and_back(nets[link.rank], optimizer)
        assert all(is_held(one) for one in optimizer.state)
        return state

    plain = make_net()
    expected = there_and_back(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    for found in in_threads(2, work):
        for index, state in expected["state"].items():
            assert all(torch.allclose(found["state"][index][name], value, atol=1e-6) for name, value in state.items())
    assert largest_difference(joined(nets), joined([plain])) < 1e-3  # other states would move them by 0.01


def test_a_copy_that_is_made_before_the_first_call_is_a_model_of_its_own() -> None:
    def work(link: Link) -> None:
        net = make_net()
        optimizers = Optimizers([torch.optim.SGD(net.parameters(), lr=0.1)])
        context = RankContext(net, optimizers, None, None, None, 1, link, False, *callbacks(), 20.0)
        PipelineStages(pipeline(2, 4, "blocks.2"), context).begin(None)
        other = copy.deepcopy(net)
        x = words(0, 8)[0]
        with torch.no_grad():
            other.head.weight.zero_()
            assert not other(x).any()
            assert torch.allclose(net(x), make_net()(x), atol=1e-5)

    in_threads(2, work)
