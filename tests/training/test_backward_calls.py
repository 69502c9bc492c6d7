"""Backward passes under recipes of gradients: what is seen of them leaves the script's model as it was."""

from __future__ import annotations

import copy
import io
import pickletools
import threading
import zipfile
from typing import Any

import pytest
import torch
from thread_workers import flat, regression, run_workers, sgd, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stretto
from stretto.errors import ModelError
from stretto.strategies.backward_calls import is_sum

functional = nn.functional
OUTPUT = torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_() * 1.0
LABEL, TARGET = torch.tensor([0, 1, 2, 0]), torch.full((4, 3), 0.5)
POINT = regression(1)[0][0][None]
WEIGHT = nn.Parameter(torch.ones(3))


def in_loop(act: Any, recipe: str = "allreduce") -> list[Any]:
    """Return the results of `act(net, optimizer)`, called by each of two workers after every step."""

    def work(worker: int) -> list[Any]:
        net = small_net()
        optimizer = sgd(net.parameters())
        found = []
        for x, y in stretto.distribute(net, optimizer, DataLoader(regression(24), batch_size=6)):
            optimizer.zero_grad()
            functional.mse_loss(net(x), y).backward()
            optimizer.step()
            found.append(act(net, optimizer))
        return found

    return [one for found in run_workers(2, work, recipe) for one in found]


def _saved(one: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(one, file)
    return file


def _names(file: io.BytesIO) -> set[str]:
    """Return the names of all objects that a file refers to, by pickletools, which runs nothing of it."""
    with zipfile.ZipFile(file) as archive:
        name = next(one for one in archive.namelist() if one.endswith("data.pkl"))
        return {str(argument) for code, argument, _ in pickletools.genops(archive.read(name)) if code.name == "GLOBAL"}


def test_a_file_of_a_model_or_an_optimizer_names_only_what_one_without_the_library_names() -> None:
    plain = small_net()
    expected = _names(_saved(plain)), _names(_saved(torch.optim.SGD(plain.parameters(), lr=0.05)))

    def act(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[io.BytesIO, io.BytesIO, int]:
        hooks = sum(len(one._forward_pre_hooks) + len(one._forward_hooks) for one in copy.deepcopy(net).modules())
        return _saved(net), _saved(optimizer), hooks

    for saved, saved_optimizer, hooks in in_loop(act):
        assert (_names(saved), _names(saved_optimizer), hooks) == (*expected, 0)
        saved.seek(0)
        with torch.serialization.safe_globals([nn.Sequential, nn.Linear, nn.Tanh]):
            assert flat(torch.load(saved, weights_only=True)).isfinite().all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_model_is_scripted_before_the_call_and_within_the_loop() -> None:
    compiling = threading.Lock()

    def work(worker: int, scripted: bool) -> Tensor:
        with compiling:
            net: Any = torch.jit.script(small_net()) if scripted else small_net()
        optimizer = sgd(net.parameters())
        loader = DataLoader(regression(24), batch_size=6)
        for x, y in stretto.distribute(net, optimizer, loader, evaluate=lambda net: {"mean": net(POINT).mean().item()}):
            with compiling:  # torch.jit.script is not made for several threads
                called = net if scripted else torch.jit.script(net)
            optimizer.zero_grad()
            functional.mse_loss(called(x), y).backward()
            optimizer.step()
        return flat(net)

    found = [run_workers(2, lambda worker, one=one: work(worker, one), "allreduce")[0] for one in (True, False)]
    assert torch.allclose(found[0], found[1], atol=1e-6)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_graph_of_gradients_is_refused_where_they_are_exchanged_with_a_way_that_trains() -> None:
    def penalised(worker: int, way: str) -> Tensor:
        net = small_net(torch.float64)
        optimizer = sgd(net.parameters())
        for x, y in stretto.distribute(net, optimizer, DataLoader(regression(24, torch.float64), batch_size=6)):
            optimizer.zero_grad()
            loss = functional.mse_loss(net(x), y)
            if way == "backward":
                loss.backward(create_graph=True)
                gradients = [one.grad for one in net.parameters()]
            else:
                gradients = list(torch.autograd.grad(loss, list(net.parameters()), create_graph=True))
                loss.backward(retain_graph=True)
            sum(one.square().sum() for one in gradients if one is not None).backward()  # type: ignore[union-attr]
            optimizer.step()
        return flat(net)

    with pytest.raises(ModelError, match="records how each gradient was computed"):
        run_workers(2, lambda worker: penalised(worker, "backward"), "allreduce")
    found = run_workers(2, lambda worker: penalised(worker, "grad"), "allreduce")
    assert torch.equal(*found)
    assert torch.equal(*run_workers(2, lambda worker: penalised(worker, "backward"), "local_sgd(every=1)"))


@pytest.mark.parametrize(
    "name",
    ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "soft_margin_loss"],
)
def test_a_sum_of_torchs_losses_is_known_and_a_mean_is_not(name: str) -> None:
    loss = getattr(functional, name)
    assert is_sum(loss(OUTPUT, TARGET, reduction="sum")) and is_sum(loss(OUTPUT, TARGET, reduction="sum") + 1)
    assert is_sum(loss(OUTPUT, TARGET, reduction="none").sum())
    assert not is_sum(loss(OUTPUT, TARGET)) and not is_sum(loss(OUTPUT, TARGET, reduction="sum") / 4)
    assert not is_sum(loss(OUTPUT, TARGET) + WEIGHT.square().sum())


def test_a_sum_that_is_written_out_is_known() -> None:
    numbers = OUTPUT.reshape(2, -1)
    labels = torch.zeros(2, dtype=torch.long)
    logs, each = functional.log_softmax(numbers, 1), functional.cross_entropy(numbers, labels, reduction="none")
    assert is_sum(-logs[range(2), labels].sum()) and is_sum(-logs.gather(1, labels[:, None]).sum())
    assert is_sum(each[torch.tensor([True, False])].sum())
    assert is_sum(functional.mse_loss(OUTPUT, TARGET, reduction="sum") - 0.5 * (1 + OUTPUT - OUTPUT.exp()).sum())
    assert not is_sum(-logs[range(2), labels].mean()) and not is_sum(each.mean() - 0.5 * WEIGHT[[0]].sum())


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_sum_over_the_samples_is_said_once(reduction: str, capsys: pytest.CaptureFixture[str]) -> None:
    def work(worker: int) -> None:
        net = small_net()
        optimizer = sgd(net.parameters())
        for x, y in stretto.distribute(net, optimizer, DataLoader(regression(24), batch_size=6)):
            optimizer.zero_grad()
            functional.mse_loss(net(x), y, reduction=reduction).backward()
            optimizer.step()

    run_workers(2, work, "allreduce")
    assert capsys.readouterr().err.count("the loss is a sum over the samples") == (reduction == "sum")
