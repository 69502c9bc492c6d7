"""Models and loops that pipeline stages can't run end in one error that names the module and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stage_threads import callbacks, in_threads, split
from staged_net import loss_of, make_net, words
from torch import Tensor, nn

from stretto.errors import ModelError
from stretto.parallel.calls import record_calls
from stretto.parallel.link import Link
from stretto.parallel.rank_parts import RankContext
from stretto.parallel.split import named_split
from stretto.parallel.stages import PipelineStages
from stretto.recipe.layout import pipeline
from stretto.strategies.model_sync import SeveralModels
from stretto.strategies.optimizers import Optimizers


class Skipping(nn.Module):
    """A model with a connection from its first layer to its last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.d(self.c(self.b(first)) + first)


class Branching(nn.Module):
    """A model that skips its second layer for batches that begin with a negative number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(h if float(x[0, 0]) < 0 else self.b(h))


class Reading(Skipping):
    """A model that reads its activations."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) if h.sum() > 0 else self.c(h)


def test_a_model_is_not_cut_under_a_skip_connection() -> None:
    calls = record_calls(Skipping(), [torch.ones(2, 4)], {})
    assert [calls.names[cut] for cut in calls.cuts] == ["b", "d"]
    with pytest.raises(
        ModelError, match=r"begin with the module c: .* skip connection\n(.*\n)*  expected: one of b, d"
    ):
        named_split(calls, ["c"])


def test_a_model_is_not_cut_between_uses_of_a_tied_weight() -> None:
    net = make_net()
    net.head.weight = net.embed.weight
    with pytest.raises(ModelError, match=r"got: embed.weight, which embed and head use(.*\n)*.*whole"):
        record_calls(net, [words(0, 4)[0]], {})
    half = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    half[2].weight = half[0].weight
    calls = record_calls(half, [torch.ones(2, 4)], {})
    assert [calls.names[cut] for cut in calls.cuts] == ["3"]
    with pytest.raises(ModelError, match=r"0.weight is used before it, in 0, and after it, in 2"):
        named_split(calls, ["1"])


def test_names_of_modules_that_are_not_called_are_refused() -> None:
    calls = record_calls(make_net(), [words(0, 4)[0]], {})
    for name in ("nothing", "blocks"):
        with pytest.raises(ModelError, match=r"calls no such module.*\n  got: .*\n  expected: one of blocks.0, "):
            named_split(calls, [name])
    with pytest.raises(ModelError, match="the stage before it begins later"):
        named_split(calls, ["blocks.2", "blocks.1"])


def test_a_model_that_reads_activations_is_refused() -> None:
    with pytest.raises(ModelError, match=r"reads the values of activations(.*\n)*.*torch.where"):
        record_calls(Reading(), [torch.ones(2, 4)], {})


def refused(make: Callable[[], nn.Module], loop: Callable[[nn.Module], object], layout: pipeline, like: Tensor) -> str:
    """Return the error of a loop over a model in two stages."""
    nets = [make() for _ in range(2)]

    def work(link: Link) -> None:
        net = nets[link.rank]
        split(link, net, torch.optim.SGD(net.parameters(), lr=0.1), layout, like)
        loop(net)

    with pytest.raises(ModelError) as raised:
        in_threads(2, work)
    return str(raised.value)


def layers() -> nn.Module:
    """Return a model of layers one after another."""
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))


def normed() -> nn.Module:
    """Return a model with batch normalisation."""
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))


class InPlace(nn.Module):
    """A model with a residual connection that changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h += self.second(h)
        return h


class Loss(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean()


def twice(net: nn.Module) -> None:
    """Compute the gradients of one forward pass twice."""
    loss = net(torch.ones(4, 4)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def largest(net: nn.Module) -> None:
    """Clip by the largest gradient."""
    net(torch.ones(4, 4)).sum().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0, norm_type=float("inf"))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], pipeline, str]] = {
    "batch norm": (
        normed,
        lambda net: net(torch.ones(4, 4)),
        pipeline(2),
        "batch normalisation 1 .*(\n.*)*micro_batches=1",
    ),
    "in place": (
        InPlace,
        lambda net: net(torch.ones(4, 4)),
        pipeline(2),
        r"operation add_(.*\n)*.*h = h \+ block\(h\)",
    ),
    "loss": (Loss, lambda net: net(torch.ones(4, 4)), pipeline(2), r"shape \(\) for .* samples"),
    "second backward": (layers, twice, pipeline(2), "a second time"),
    "other norm": (layers, largest, pipeline(2), "only its 2-norm is known here"),
    "create_graph": (
        layers,
        lambda net: torch.autograd.grad(net(torch.ones(4, 4)).sum(), list(net.parameters()), create_graph=True),
        pipeline(2),
        "no second derivatives",
    ),
    "input": (layers, lambda net: net(torch.ones(4, 4, requires_grad=True)), pipeline(2), "requires a gradient"),
    "part": (layers, lambda net: net[1](torch.ones(4, 4)), pipeline(2), "module 1 .* called on its own"),
    "branch": (Branching, lambda net: net(-torch.ones(4, 4)), pipeline(2), "calls c where it called b"),
}


@pytest.mark.parametrize("case", CASES)
def test_loops_that_stages_cannot_run_are_refused(case: str) -> None:
    make, loop, layout, pattern = CASES[case]
    error = refused(make, loop, layout, torch.ones(2, 4))
    assert re.search(pattern, error), error
    assert "\n  try: " in error


def test_one_micro_batch_trains_with_batch_normalisation_and_a_loss_in_the_model() -> None:
    for make in (normed, Loss):
        nets = [make() for _ in range(2)]

        def work(link: Link, nets: list[nn.Module] = nets) -> None:
            net = nets[link.rank]
            split(link, net, torch.optim.SGD(net.parameters(), lr=0.1), pipeline(2, 1), torch.ones(2, 4))
            net(torch.ones(4, 4)).sum().backward()

        in_threads(2, work)


def stages(model: nn.Module, optimizers: Optimizers, count: int, link: Link) -> PipelineStages:
    return PipelineStages(
        pipeline(count), RankContext(model, optimizers, None, None, None, 1, link, False, *callbacks(), 20.0)
    )


def test_a_step_without_a_call_of_the_model_is_refused() -> None:
    def work(link: Link) -> None:
        net = layers()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        made = stages(net, Optimizers([optimizer]), 2, link)
        made.begin(None)
        for layer in net.children():  # in place of net(x)
            layer(torch.ones(2, 4)).sum().backward()
        with pytest.raises(ModelError, match=r"the model was not called(.*\n)*  expected: model\(x\)"):
            optimizer.step()
        made.close()
        optimizer.step()

    in_threads(2, work)


def test_compiled_models_several_models_and_lbfgs_are_refused() -> None:
    def begin(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Link], object]:
        return lambda link: stages(model, Optimizers([optimizer]), 2, link)

    net = layers()
    with pytest.raises(ModelError, match="a compiled model"):
        in_threads(2, begin(torch.compile(net, backend="eager"), torch.optim.SGD(net.parameters())))
    with pytest.raises(ModelError, match="a model without a forward pass cannot be split into stages"):
        in_threads(2, begin(nn.ModuleList([net]), torch.optim.SGD(net.parameters())))
    with pytest.raises(ModelError, match="a list of 2 models"):
        in_threads(2, begin(SeveralModels([net, layers()]), torch.optim.SGD(net.parameters())))
    with pytest.raises(ModelError, match="L-BFGS"):
        in_threads(2, begin(net, torch.optim.LBFGS(net.parameters())))


def test_other_numbers_of_ranks_than_stages_are_refused() -> None:
    net = layers()
    optimizers = Optimizers([torch.optim.SGD(net.parameters())])
    with pytest.raises(ModelError, match=r"3 stages, and this worker has 2 ranks(.*\n)*.*stretto run -n 3"):
        in_threads(2, lambda link: stages(net, optimizers, 3, link))


def test_the_loss_of_a_batch_is_equal_at_all_ranks() -> None:
    nets = [make_net() for _ in range(3)]

    def work(link: Link) -> float:
        net = nets[link.rank]
        split(link, net, torch.optim.SGD(net.parameters(), lr=0.1), pipeline(3), words(0, 4)[0])
        return float(loss_of(net(words(1, 5)[0]), words(1, 5)[1]).detach())

    assert len(set(in_threads(3, work))) == 1
