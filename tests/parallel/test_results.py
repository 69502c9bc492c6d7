"""Results of modules and models: dataclasses are seen into, and shapes depend on all arguments of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from stage_threads import in_threads, joined, largest_difference
from torch import Tensor, nn

from stretto.errors import ModelError
from stretto.parallel.calls import record_calls
from stretto.parallel.link import Link
from stretto.parallel.pipeline import Pipeline
from stretto.parallel.split import named_split
from stretto.recipe.layout import pipeline
from stretto.strategies.optimizers import Optimizers


@dataclass
class Hidden:
    hidden: Tensor
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Scores:
    scores: Tensor
    inner: dict[str, Hidden]


class Block(nn.Module):
    """Layer that returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Hidden:
        return Hidden(self.layer(x).tanh(), tuple(x.shape))


class Wrapped(nn.Module):
    """Layers that return dataclasses, as the model does; the input of a layer is used after it again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Scores:
        first = self.a(x)
        second = first.hidden + self.b(first.hidden).hidden
        return Scores(self.c(second), {"last": Hidden(second, first.sizes)})


class Narrowing(nn.Module):
    """Layer of which a call takes some outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, count: int) -> Tensor:
        return self.layer(x)[:, :count]


class Resized(nn.Module):
    """Model whose inner size is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Narrowing(), nn.GRU(1, 3, batch_first=True)

    def forward(self, x: Tensor, count: int) -> Tensor:
        return self.b(self.a(x, count).unsqueeze(2))[0][:, -1]  # type: ignore[no-any-return]


class Bag:
    """Result of a class of its own."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Bagging(nn.Sequential):
    """Model that returns such a result."""

    def forward(self, x: Tensor) -> Any:
        return Bag(super().forward(x))


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[nn.Module, int], Tensor]) -> None:
    for step in range(3):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def wrapped_loss(model: nn.Module, step: int) -> Tensor:
    found = model(torch.arange(32.0).view(8, 4).sin() + step)
    assert isinstance(found, Scores)
    assert len(found.inner["last"].hidden) == 8
    return found.scores.square().mean() + found.inner["last"].hidden.std()


def resized_loss(model: nn.Module, step: int) -> Tensor:
    return model(torch.arange(32.0).view(8, 4).sin(), 2 + step % 2).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("make", "loss", "args"), [(Wrapped, wrapped_loss, ()), (Resized, resized_loss, (2,))])
def test_a_model_in_stages_returns_what_the_whole_model_does(
    make: Callable[[], nn.Module], loss: Callable[[nn.Module, int], Tensor], args: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    whole, nets = make(), [make() for _ in range(2)]
    for net in nets:
        net.load_state_dict(whole.state_dict())

    def work(link: Link) -> None:
        net = nets[link.rank]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        calls = record_calls(net, (torch.ones(2, 4), *args), {})
        Pipeline(net, Optimizers([optimizer]), pipeline(2), link, calls, named_split(calls, ["b"]).begins)
        losses_of(net, optimizer, loss)

    in_threads(2, work)
    losses_of(whole, torch.optim.SGD(whole.parameters(), lr=0.1), loss)
    assert largest_difference(joined(nets), joined([whole])) < 1e-6


def test_results_of_other_classes_with_tensors_are_refused() -> None:
    with pytest.raises(ModelError, match=r"cannot be seen, .*\n  got: an object of the class Bag(.*\n)*.*dataclass"):
        record_calls(Bagging(nn.Linear(4, 4), nn.Linear(4, 4)), [torch.ones(2, 4)], {})
