"""Models whose `forward`, or that of a layer, a script has replaced in the object."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from replica_threads import DATA, in_stages
from stage_threads import in_threads, joined, largest_difference, split
from staged_net import loss_of, make_net, replace_forward
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto.errors import ModelError
from stretto.parallel.link import Link
from stretto.recipe.layout import pipeline


def patched() -> nn.Module:
    net = make_net().double()
    replace_forward(net)
    replace_forward(net.blocks[2].mlp[2])  # type: ignore[index, union-attr]
    replace_forward(net.blocks[2])
    return net


def train(net: nn.Module) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=12))
    assert (copy.deepcopy(net)(DATA[:2][0]) - net(DATA[:2][0])).abs().max() < 1e-12
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(net(x), y).backward()
        optimizer.step()
    stretto.finish()


def test_stages_run_the_forward_passes_of_the_script() -> None:
    nets, _ = in_stages(1, 2, "allreduce", 'pipeline(2, split="blocks.1")', train, make=patched)
    whole = patched()
    train(whole)
    assert largest_difference(joined(nets), joined([whole])) < 1e-12


def layers() -> nn.Sequential:
    """Return the same network at each call."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.arange(16.0).view(4, 4)).square().mean().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_train_in_stages() -> None:
    nets = [layers() for _ in range(2)]

    def work(link: Link) -> None:
        net = nets[link.rank]
        net[0] = torch.compile(net[0], backend="eager")
        optimizer = sgd(net)
        split(link, net, optimizer, pipeline(2, 1), torch.ones(4, 4))
        step(net, optimizer)

    in_threads(2, work)
    whole = layers()
    step(whole, sgd(whole))
    found = {name.replace("_orig_mod.", ""): one for name, one in joined(nets).items()}
    assert largest_difference(found, joined([whole])) < 1e-6


def test_layers_compiled_in_place_are_refused_where_stages_begin() -> None:
    def work(link: Link) -> None:
        net = layers()
        net[1].compile(backend="eager")
        split(link, net, sgd(net), pipeline(2), torch.ones(4, 4))

    with pytest.raises(ModelError, match=r"model\.1 is compiled in place(.*\n)*.*= torch.compile\(model\.1\)"):
        in_threads(2, work)
