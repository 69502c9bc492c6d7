"""Wrappers of other training libraries are unwrapped or refused by name. Stand-ins carry the libraries' names."""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from thread_workers import regression, run_workers, small_net
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto import api
from stretto.api import close
from stretto.errors import LoaderError, ModelError, ScriptError
from stretto.training.other_libraries import TRAINERS, unwrapped
from stretto.training.schedulers import schedulers_of


def of(module: str, name: str, *bases: type, **body: Any) -> type:
    """Return a class as another library would define it."""
    return type(name, bases or (object,), {"__module__": module, **body})


class _Wrapping(torch.optim.Optimizer):
    """An optimizer that delegates its steps, as Accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


Accelerated = of("accelerate.optimizer", "AcceleratedOptimizer", _Wrapping)


def trained(wrap: Any) -> Any:
    def work(worker: int) -> torch.Tensor:
        net = small_net()
        optimizer = wrap(torch.optim.SGD(net.parameters(), lr=0.05))
        loader = stretto.distribute(net, optimizer, DataLoader(regression(24), batch_size=4))
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(net.parameters()).detach()

    return work


def test_steps_of_an_optimizer_that_accelerate_has_wrapped_are_exchanged() -> None:
    plain, wrapped = (run_workers(2, trained(wrap)) for wrap in (lambda one: one, Accelerated))
    assert torch.equal(wrapped[0], wrapped[1])
    assert torch.equal(plain[0], wrapped[0])


def test_scheduler_of_an_optimizer_that_accelerate_has_wrapped_is_that_of_the_optimizer() -> None:
    optimizer = torch.optim.SGD(small_net().parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(Accelerated(optimizer), 3)
    assert schedulers_of(optimizer) == [scheduler]


def test_real_accelerate_is_unwrapped() -> None:
    accelerate = pytest.importorskip("accelerate")
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    prepared, loader = accelerate.Accelerator(cpu=True).prepare(optimizer, DataLoader(regression(8)))
    assert unwrapped(prepared) is optimizer
    with pytest.raises(LoaderError, match="Accelerate"):
        stretto.distribute(net, prepared, loader)


WRAPPED = {
    "loader of accelerate": (LoaderError, "prepared by Accelerate", 2, "accelerate.data_loader", "DataLoaderShard"),
    "model of fabric": (ModelError, "Fabric has set up", 0, "lightning.fabric.wrappers", "_FabricModule"),
    "loader of fabric": (LoaderError, "Fabric has set up", 2, "lightning_fabric.wrappers", "_FabricDataLoader"),
}


@pytest.mark.parametrize("case", WRAPPED)
@pytest.mark.parametrize("live", [False, True])
def test_a_wrapper_that_shards_data_is_refused_with_the_name_of_its_library(case: str, live: bool) -> None:
    error, message, place, module, name = WRAPPED[case]
    given: list[Any] = [small_net(), None, DataLoader(regression(8))]
    given[1] = torch.optim.SGD(given[0].parameters(), lr=0.1)
    given[place].__class__ = of(module, name, type(given[place]))

    def work(worker: int) -> None:
        stretto.distribute(*given)

    with pytest.raises(error, match=message):
        run_workers(2, work) if live else work(0)
    assert api._current.get() is None


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("module", ["lightning.pytorch.loops.fetchers", "transformers.trainer"])
def test_another_librarys_loop_over_the_distributed_loader_is_refused(module: str, live: bool) -> None:
    def loop(loader: Any) -> list[Any]:
        return list(iter(loader))

    theirs = FunctionType(loop.__code__, {"__name__": module, "__builtins__": __builtins__})

    def work(worker: int) -> None:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        theirs(stretto.distribute(net, optimizer, DataLoader(regression(8), batch_size=4)))

    def in_single_process() -> None:
        token = api._current.set(None)
        try:
            work(0)
        finally:
            api._current.reset(token)

    with pytest.raises(ScriptError, match="iterates over the loader") as refused:
        run_workers(2, work) if live else in_single_process()
    assert ("Lightning" in str(refused.value)) == module.startswith("lightning")


def test_the_error_of_a_script_without_distribute_names_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TRAINERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ScriptError, match="expected: one call before the loop"):
        close()
    for name in ("transformers.trainer", "accelerate.accelerator"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ScriptError, match=r"and transformers.Trainer imported(.|\n)*try: python SCRIPT"):
        close()
