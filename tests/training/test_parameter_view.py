"""Parameters whose memory another library owns are trained as plain parameters are, and keep their memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from thread_workers import flat, regression, run_workers, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stretto
from stretto.errors import ModelError, ReplicasDifferError
from stretto.strategies import gradient_allreduce
from stretto.strategies.flat_buffers import FlatParameters, in_buffers
from stretto.strategies.parameter_view import parameter_view
from stretto.transport.in_memory import InMemoryTransport

RECIPES = (
    "allreduce",
    "gd_sec(xi=1.0, beta=0.1)",
    "local_sgd(every=2)",
    'local_sgd(every=2, optimizer_state="average")',
    "Recipe(what=updates(), when=together(every=2), how=error_feedback(top_k(0.1)), then=add())",
    "diloco(every=2)",
)


class Owned(nn.Parameter):
    """A parameter of another library: exchanges may read and write its memory, but not replace it."""

    def to_local(self) -> Tensor:
        """Return the memory of this process."""
        return self.detach()

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        raise AssertionError("the memory of this parameter was replaced")


def owned(net: nn.Module) -> nn.Module:
    """Replace all parameters of a network by owned ones."""
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, Owned(parameter.detach().clone()))
    return net


def train(recipe: str, is_owned: bool, workers: int = 2) -> list[list[Tensor]]:
    """Return for each worker the parameters at each evaluation and at the end."""

    def work(worker: int) -> list[Tensor]:
        net = owned(small_net()) if is_owned else small_net()
        if worker:
            with torch.no_grad():
                next(net.parameters()).add_(1.0)  # the workers begin with the parameters of the first
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        before = [one.data_ptr() for one in net.parameters()]
        seen: list[Tensor] = []

        def evaluate(model: nn.Module) -> dict[str, float]:
            seen.append(flat(model))
            return {"evaluations": float(len(seen))}

        loader: Any = DataLoader(regression(40), batch_size=4)
        loader = stretto.distribute(net, optimizer, loader, evaluate=evaluate)
        for _epoch in range(2):
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad(set_to_none=step % 2 == 0)
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
        assert not is_owned or before == [one.data_ptr() for one in net.parameters()]
        return [*seen, flat(net)]

    return run_workers(workers, work, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_owned_parameters_are_trained_as_plain_ones_to_the_bit(recipe: str) -> None:
    torch.testing.assert_close(train(recipe, is_owned=True), train(recipe, is_owned=False), rtol=0, atol=0)


@pytest.mark.parametrize(("recipe", "workers"), [("stale_synchronous(bound=0)", 2), ("elastic_averaging(every=2)", 1)])
def test_owned_parameters_are_trained_with_a_server_as_plain_ones(recipe: str, workers: int) -> None:
    """Two workers push to the server in any order, so that their results are equal to rounding."""
    found, expected = train(recipe, is_owned=True, workers=workers), train(recipe, is_owned=False, workers=workers)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * (workers - 1))


def test_flat_buffers_hold_the_values_of_owned_parameters_within_a_block_alone() -> None:
    plain, own = nn.Parameter(torch.ones(3)), Owned(torch.ones(2, 2))
    parameters = FlatParameters([("plain", plain), ("own", own)])
    (part,) = parameters.parts
    with torch.no_grad():
        own.fill_(2.0)
        with in_buffers(parameters.parts):
            with in_buffers(parameters.parts):
                part.theta.mul_(10.0)
            part.theta.mul_(10.0)
    assert plain.tolist() == [100.0] * 3
    assert own.tolist() == [[200.0] * 2] * 2
    assert parameters.holds([plain, own])


def test_owned_parameters_may_have_no_elements_here() -> None:
    (part,) = FlatParameters([("empty", Owned(torch.ones(0, 2)))]).parts
    assert part.theta.shape == (0,)


class Watching(torch.autograd.Function):
    """The identity, which calls a function in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, act: Callable[[], None]) -> Tensor:
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.act()
        return gradient, None


@pytest.mark.parametrize("is_owned", [True, False])
def test_exchanges_of_owned_gradients_begin_when_the_backward_pass_has_ended(
    is_owned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within it the ranks of a replica wait for each other, which must not wait for another replica then."""
    monkeypatch.setattr(gradient_allreduce, "FIRST_BUCKET_BYTES", 1)
    monkeypatch.setattr(gradient_allreduce, "BUCKET_BYTES", 1)
    submit = InMemoryTransport.submit
    submitted: list[int] = []

    def noted(transport: InMemoryTransport, op: Any) -> Any:
        submitted.append(threading.get_ident())
        return submit(transport, op)

    def count() -> int:
        return submitted.count(threading.get_ident())

    monkeypatch.setattr(InMemoryTransport, "submit", noted)

    def work(_worker: int) -> tuple[bool, bool]:
        net = owned(small_net()) if is_owned else small_net()
        loader: Any = stretto.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(regression(4)))
        x, y = next(iter(loader))
        before, within = count(), []
        h = Watching.apply(net[:2](x), lambda: within.append(count()))
        nn.functional.mse_loss(net[2:](h), y).backward()
        return within == [before], count() > before

    assert run_workers(2, work, "allreduce") == [(is_owned, True)] * 2


def test_owned_gradients_that_the_script_frees_are_freed() -> None:
    def work(_worker: int) -> bool:
        net = owned(small_net())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader: Any = stretto.distribute(net, optimizer, DataLoader(regression(8)))
        for x, y in loader:
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            freed = weakref.ref(next(net.parameters()).grad)
            optimizer.zero_grad()
        return freed() is None

    assert run_workers(2, work, "allreduce") == [True, True]


def test_owned_parameters_that_differ_between_replicas_are_found() -> None:
    def work(worker: int) -> None:
        net = owned(small_net())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader: Any = stretto.distribute(net, optimizer, DataLoader(regression(8), batch_size=4))
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                next(net.parameters()).add_(worker)

    with pytest.raises(ReplicasDifferError, match=r"0\.weight of worker 1|0\.weight of worker 0"):
        run_workers(2, work, "allreduce")


class Placed(torch.Tensor):
    """A tensor that is placed like a distributed one."""

    placements: tuple[str, ...] = ()


def test_a_gradient_that_is_not_placed_as_its_parameter_is_refused() -> None:
    parameter = Owned(torch.ones(2))
    parameter.placements = ("Shard(dim=0)",)
    parameter.grad = torch.ones(2).as_subclass(Placed)
    parameter.grad.placements = ("Partial(sum)",)
    with pytest.raises(ModelError, match=r"got: a gradient with placements \('Partial\(sum\)',\)"):
        _ = parameter_view(parameter).gradient
