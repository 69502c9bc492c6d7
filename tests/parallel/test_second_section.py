"""A model in stages that is trained again, by a second `distribute`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from combinations import each_value
from replica_threads import DATA, in_stages, with_momentum
from stage_threads import joined, largest_difference
from staged_net import loss_of, make_net
from thread_workers import run_workers
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stretto


def trained_twice(net: nn.Module, keeps_optimizer: bool) -> list[str]:
    """Train in two sections, the second with a frozen table; return the names in the states of model and optimizer."""
    optimizer = with_momentum(net)
    for section in range(2):
        if section and not keeps_optimizer:
            optimizer = with_momentum(net)
        net.place.requires_grad_(not section)  # type: ignore[operator, union-attr]
        loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6))
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    found = [*net.state_dict(), *map(str, optimizer.state_dict()["state"])]
    stretto.finish()
    return found


@pytest.mark.parametrize(
    ("recipe", "keeps_optimizer"),
    each_value(["allreduce", "diloco(every=2)", "stale_synchronous(bound=0)"], [True, False]),
)
def test_a_model_in_stages_is_trained_again_as_a_whole_one(recipe: str, keeps_optimizer: bool) -> None:
    layout = 'pipeline(2, split="blocks.1")'
    nets, states = in_stages(2, 2, recipe, layout, lambda net: trained_twice(net, keeps_optimizer))
    wholes = [make_net().double() for _ in range(2)]
    expected = run_workers(2, lambda worker: trained_twice(wholes[worker], keeps_optimizer), recipe)
    assert largest_difference(joined(nets), joined(wholes[:1])) < 1e-12
    assert states == [expected[0]] * 2
    assert not any(torch.isnan(one).any() for one in joined(nets).values())


def replace_head(net: nn.Module) -> nn.Module:
    """Replace the last layer, as for another task."""
    head = nn.Linear(8, 11, bias=False).double()
    nn.init.constant_(head.weight, 0.1)
    net.head = head
    return net


def append_layer(net: nn.Module) -> nn.Module:
    """Append a layer to a block."""
    layer = nn.Linear(8, 8).double()
    for one in layer.parameters():
        nn.init.constant_(one, 0.1)
    net.blocks[0].mlp.append(layer)  # type: ignore[index, union-attr, operator]
    return net


def replace_parameter(net: nn.Module) -> nn.Module:
    """Replace a parameter of a layer."""
    layer: Any = net.blocks[2].mix  # type: ignore[index, union-attr]
    layer.weight = nn.Parameter(torch.full((8, 8), 0.1, dtype=torch.float64))
    return net


def initialise(net: Any) -> nn.Module:
    """Change values in place: first values again, rows, noise, a limit.

    Threads share torch's random generator, so the values come from another one.
    """
    source = torch.Generator().manual_seed(5)
    net.embed.padding_idx = 3
    for one in (net.embed, net.blocks[0].mix, net.head):
        one.reset_parameters()
        for parameter in one.parameters():
            nn.init.normal_(parameter, std=0.3, generator=source)
    nn.init.trunc_normal_(net.blocks[1].mix.weight, std=0.1, a=-0.1, b=0.1, generator=source)
    nn.init.orthogonal_(net.blocks[3].mix.weight, generator=source)
    with torch.no_grad():
        net.place.data.clamp_(-0.5, 0.5)
        net.blocks[1].mlp[0].weight[2] = 0.1
        net.blocks[2].mix.weight.add_(0.1 * torch.randn(8, 8, dtype=torch.float64, generator=source))
        net.blocks[2].mix.weight[3:5].mul_(2.0)
        net.norm.bias += float(torch.rand((), generator=source))
    return net  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """Model with the embedding and the blocks of another one, and a new last layer."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = net.embed, net.blocks, nn.Linear(8, 11, bias=False).double()
        nn.init.constant_(self.head.weight, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)  # type: ignore[operator]
        for block in self.blocks:  # type: ignore[union-attr]
            h = block(h)
        found: Tensor = self.head(h)
        return found


def follow(net: nn.Module) -> nn.Module:
    """Return a model of a model and a new last layer."""
    last = nn.Linear(11, 11, bias=False).double()
    nn.init.constant_(last.weight, 0.1)
    return nn.Sequential(net, last)


def trained_after(net: nn.Module, change: Callable[[nn.Module], nn.Module], keeps_optimizer: bool) -> dict[str, Any]:
    """Train in two sections, between which the model changes; return its whole state."""
    optimizer = with_momentum(net)
    for section in range(2):
        if section:
            before = {id(one) for one in net.parameters()}
            net = change(net)
            if keeps_optimizer:
                optimizer.add_param_group({"params": [one for one in net.parameters() if id(one) not in before]})
            else:
                optimizer = with_momentum(net)
        loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6))
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(net(x), y).backward()
            nn.utils.clip_grad_norm_([one for one in net.parameters() if one.grad is not None], 0.5)
            optimizer.step()
    found = {name: one.clone() for name, one in net.state_dict().items()}
    stretto.finish()
    return found


CHANGES = [
    (initialise, False),
    (replace_head, False),
    (append_layer, False),
    (append_layer, True),
    (replace_parameter, False),
    (Classifier, False),
    (follow, False),
]


@pytest.mark.parametrize(("changed", "recipe"), each_value(CHANGES, ["allreduce", "stale_synchronous(bound=0)"]))
def test_a_model_that_changed_between_two_sections_is_split_again(
    changed: tuple[Callable[[nn.Module], nn.Module], bool], recipe: str
) -> None:
    change, keeps_optimizer = changed
    work = functools.partial(trained_after, change=change, keeps_optimizer=keeps_optimizer)
    _, states = in_stages(2, 2, recipe, "pipeline(2)", work)
    expected = run_workers(2, lambda _: work(make_net().double()), recipe)[0]
    assert all(state.keys() == expected.keys() for state in states)
    assert max(float((expected[name] - state[name]).abs().max()) for state in states for name in expected) < 1e-12


@pytest.mark.parametrize("change", [append_layer, replace_parameter])
def test_a_model_that_changed_within_a_section_is_refused(change: Callable[[nn.Module], nn.Module]) -> None:
    def work(net: nn.Module) -> None:
        optimizer = with_momentum(net)
        loader: Any = stretto.distribute(net, optimizer, DataLoader(DATA, batch_size=6))
        for x, y in loader:
            loss_of(net(x), y).backward()
            change(net)

    with pytest.raises(stretto.errors.ModelError, match=r"came to the model after it was split.*\n(.*\n)+.*again"):
        in_stages(1, 2, "allreduce", 'pipeline(2, split="blocks.1")', work)
