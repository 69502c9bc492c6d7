"""Optimizers around another one (SAM, Lookahead), and those that decide by the loss of a closure."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from thread_workers import flat, regression, relative_distance, run_single_process, run_workers, small_net
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

import stretto
from stretto.errors import ModelError
from stretto.strategies.optimizers import Optimizers

DOUBLE = torch.float64


class SAM(Optimizer):
    """Sharpness-aware minimisation: a step with the gradient at the parameters plus rho g / |g|."""

    def __init__(self, parameters: Any, base: type[Optimizer], rho: float = 0.05, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([one.grad.norm() for one in held]).norm()
        for one in held:
            self.state[one]["old_p"] = one.data.clone()
            one.add_(one.grad * (self.param_groups[0]["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for one in self.state:
            one.data = self.state[one]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "SAM needs a closure"
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class Lookahead(Optimizer):
    """Slow weights that follow those of another optimizer after every third step."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.optimizer, self.param_groups, self.steps = base, base.param_groups, 0

    def step(self, closure: Any = None) -> None:
        step_and_look_ahead(self)


class BareLookahead(Optimizer):
    """Lookahead as its first version: the class calls no `Optimizer.__init__`, which would make its hooks."""

    def __init__(self, base: Optimizer) -> None:
        self.optimizer, self.param_groups, self.steps, self.state = base, base.param_groups, 0, defaultdict(dict)

    def step(self, closure: Any = None) -> None:
        step_and_look_ahead(self)


class HookedLookahead(BareLookahead):
    """Lookahead with the attributes of hooks that no step calls, as in timm."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base)
        self.defaults = base.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    def step(self, closure: Any = None) -> None:
        step_and_look_ahead(self)


@torch.no_grad()
def step_and_look_ahead(optimizer: Any) -> None:
    optimizer.optimizer.step()
    optimizer.steps += 1
    for one in [one for group in optimizer.param_groups for one in group["params"]]:
        slow = optimizer.state[one].setdefault("slow", one.detach().clone())
        if optimizer.steps % 3 == 0:
            slow.add_(one - slow, alpha=0.5)
            one.copy_(slow)


def sam(parameters: Any) -> SAM:
    return SAM(parameters, SGD, lr=0.05, momentum=0.9)


def with_closure(optimizer: Any, loss: Callable[[], Tensor]) -> None:
    def closure() -> Tensor:
        found = loss()
        found.backward()
        return found

    closure()
    optimizer.step(closure)


def in_two_passes(optimizer: Any, loss: Callable[[], Tensor]) -> None:
    loss().backward()
    optimizer.first_step()
    loss().backward()
    optimizer.second_step()


def ascending_alone(optimizer: Any, loss: Callable[[], Tensor]) -> None:
    with stretto.no_sync():
        loss().backward()
    optimizer.step(lambda: loss().backward())


def plainly(optimizer: Any, loss: Callable[[], Tensor]) -> None:
    for one in [one for group in optimizer.param_groups for one in group["params"]]:
        one.grad = None  # optimizer.zero_grad() would give the step of a class its hooks
    loss().backward()
    optimizer.step()


def minimising(optimizer: Any, loss: Callable[[], Tensor]) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        found = loss()
        found.backward()
        return found

    optimizer.step(closure)


def loop(
    step: Any, make: Any = sam, samples: int = 96, give: Any = lambda one: one, batch: int = 8, whole: bool = False
) -> Any:
    """Return a training of two epochs whose optimizer `make` makes, and of which `give` gives a part to the call.

    Its batches are divided into shares unless they are `whole`.
    """

    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = make(net.parameters())
        data = DataLoader(regression(samples, DOUBLE), batch_size=batch, drop_last=whole)
        loader = stretto.distribute(net, give(optimizer), data)
        for _ in range(2):
            for x, y in loader:
                step(optimizer, lambda x=x, y=y: nn.functional.mse_loss(net(x), y))
        return flat(net)

    return work


def assert_equals_one_process(work: Any, workers: int = 2, recipe: str = "allreduce") -> None:
    one, found = run_single_process(work, join=workers), run_workers(workers, work, recipe)
    assert all((other - one).abs().max() < 1e-9 for other in found)


@pytest.mark.parametrize("step", [with_closure, in_two_passes])
@pytest.mark.parametrize("samples", [96, 90])
def test_sam_equals_one_process(step: Any, samples: int) -> None:
    assert_equals_one_process(loop(step, samples=samples), workers=3)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "gossip(every=1)", "async_sgd"])
@pytest.mark.parametrize("step", [with_closure, in_two_passes, ascending_alone])
def test_sam_trains_under_every_family(step: Any, recipe: str) -> None:
    before, found = flat(small_net(DOUBLE)), run_workers(2, loop(step), recipe)
    assert (found[0] - before).norm() > 0.1
    assert torch.equal(*found) or (recipe == "gossip(every=1)" and (found[0] - found[1]).norm() < 0.1)


def test_sam_and_the_optimizer_in_it_are_one() -> None:
    both = loop(in_two_passes, give=lambda one: [one, one.base_optimizer])
    assert torch.equal(run_workers(2, both, "allreduce")[0], run_workers(2, loop(in_two_passes), "allreduce")[0])


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=1)"])
def test_the_optimizer_in_sam_alone_is_refused_with_the_call_that_trains(recipe: str) -> None:
    with pytest.raises(ModelError, match="with the SAM as the optimizer"):
        run_workers(2, loop(with_closure, give=lambda one: one.base_optimizer), recipe)


@pytest.mark.parametrize("kind", [Lookahead, BareLookahead, HookedLookahead])
@pytest.mark.parametrize("samples", [96, 90])
def test_an_exchange_follows_what_lookahead_does_after_the_step_in_it(samples: int, kind: Any) -> None:
    work = loop(plainly, lambda parameters: kind(SGD(parameters, lr=0.05)), samples)
    assert_equals_one_process(work, workers=3)
    first, second = run_workers(2, work, "local_sgd(every=3)")
    assert torch.equal(first, second)
    usual = loop(plainly, lambda parameters: Lookahead(SGD(parameters, lr=0.05)), samples)
    assert torch.equal(first, run_workers(2, usual, "local_sgd(every=3)")[0])


def test_state_of_both_optimizers_is_kept() -> None:
    def stepped() -> tuple[nn.Module, Lookahead]:
        net = small_net()
        optimizer = Lookahead(SGD(net.parameters(), lr=0.1, momentum=0.9))
        for one in net.parameters():
            one.grad = torch.ones_like(one)
        optimizer.step()
        return net, optimizer

    net, optimizer = stepped()
    states = [state for _, state in Optimizers([optimizer]).states()]
    assert all(set(state) == {"momentum_buffer", "around0 slow"} for state in states)
    other_net, other = stepped()
    with torch.no_grad():
        for one in [*other.state.values(), *other.optimizer.state.values()]:
            for tensor in one.values():
                tensor.zero_()
    Optimizers([other]).replace_states(list(zip(other_net.parameters(), states, strict=True)))
    for one, same in zip(net.parameters(), other_net.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["slow"], other.state[same]["slow"])
        assert torch.equal(
            optimizer.optimizer.state[one]["momentum_buffer"], other.optimizer.state[same]["momentum_buffer"]
        )


@pytest.mark.parametrize("line_search", ["strong_wolfe", None])
def test_lbfgs_decides_alike_everywhere_and_equals_one_process(line_search: str | None) -> None:
    def make(parameters: Any) -> Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn=line_search)

    assert_equals_one_process(loop(minimising, make))


def test_a_step_chosen_by_the_loss_is_the_same_everywhere() -> None:
    class Polyak(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            loss = float(closure().detach())
            norm = sum(float(one.grad.square().sum()) for one in self.param_groups[0]["params"])
            self.param_groups[0]["lr"] = min(loss / norm, 0.1)
            super().step()

    assert_equals_one_process(loop(minimising, lambda parameters: Polyak(parameters, lr=0.1)))


def test_lbfgs_ends_equal_where_workers_have_no_batch_in_the_last_step() -> None:
    work = loop(minimising, functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=4), samples=32, whole=True)
    assert relative_distance(run_workers(3, work, "allreduce")[2], run_single_process(work, join=3)) < 1e-12
    assert torch.equal(*run_workers(3, work, "local_sgd(every=1)")[1:])


def test_an_optimizer_around_another_one_that_is_none_itself_is_named() -> None:
    class Around:
        def __init__(self, base: Optimizer) -> None:
            self.base = base

    net = nn.Linear(2, 1)
    around: Any = Around(SGD(net.parameters(), lr=0.1))
    with pytest.raises(ModelError, match=r"which holds an optimizer(?s:.*)class Around\(torch.optim.Optimizer\)"):
        stretto.distribute(net, around, [torch.ones(1, 2)])
