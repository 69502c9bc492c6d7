"""The set of trained parameters may change at any moment, under every recipe: frozen, unfrozen, added and replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import each_value, pairwise
from elastic_workers import WorkerKilled, run_elastic_workers
from thread_workers import (
    flat,
    regression,
    relative_distance,
    run_one_worker,
    run_single_process,
    run_workers,
    sgd,
    small_net,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stretto
from stretto.checkpoint import state_transfer
from stretto.interval import every

DOUBLE = torch.float64
EXACT = ["allreduce", "local_sgd(every=1)"]
SYNCHRONOUS = [
    "allreduce",
    "local_sgd(every=4)",
    "diloco(every=8)",
    "diloco(every=3)",
    'local_sgd(every=4, optimizer_state="average")',
    'allreduce(how=cast("bf16"))',
    "local_sgd(every=4, how=error_feedback(top_k(0.2)))",
    "power_sgd(rank=1)",
    "ef21(how=top_k(0.3))",
]
OVER_A_SERVER = ["async_sgd", "stale_synchronous(bound=2)", "elastic_averaging(every=3)", "async_diloco(every=4)"]
Change = Callable[[nn.Module, torch.optim.Optimizer], None]


def unfreeze(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net[0].requires_grad_(True)


def freeze(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net[2].requires_grad_(False)


def swap(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    unfreeze(net, optimizer)
    freeze(net, optimizer)


def add_group(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net[0].requires_grad_(True)
    optimizer.add_param_group({"params": net[0].parameters(), "lr": 0.02})


def replace_head(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net[2] = nn.Linear(16, 1, dtype=net[2].weight.dtype)
    optimizer.param_groups[0]["params"] = [one for one in net.parameters() if one.requires_grad]


def start(dtype: torch.dtype, change: Change | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = small_net(dtype)
    net[0].requires_grad_(change is freeze)
    held = net[2].parameters() if change is add_group else net.parameters()
    return net, torch.optim.SGD(held, lr=0.05, momentum=0.5)


def call_model(net: nn.Module) -> Callable[[Tensor], Tensor]:
    return net


def call_layers(net: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: net[2](net[1](net[0](x)))


def compile_model(net: nn.Module) -> Callable[[Tensor], Tensor]:
    compiled: Callable[[Tensor], Tensor] = torch.compile(net, backend="aot_eager", fullgraph=True)
    return compiled


def changing(
    change: Change,
    at: int | None,
    samples: int = 100,
    epochs: int = 2,
    forward: Callable[[nn.Module], Callable[[Tensor], Tensor]] = call_model,
    drop_last: bool = False,
) -> Callable[[int], Tensor]:
    """Return a training that calls `change` at the start of epoch 2, or before step number `at`."""

    def work(worker: int) -> Tensor:
        net, optimizer = start(DOUBLE, change)
        run = forward(net)
        data = DataLoader(regression(samples, DOUBLE), batch_size=4, drop_last=drop_last)
        loader = stretto.distribute(net, optimizer, data)
        steps = 0
        for epoch in range(epochs):
            if epoch == 1 and at is None:
                torch.manual_seed(worker)
                change(net, optimizer)
            for x, y in loader:
                if steps == at:
                    torch.manual_seed(worker)
                    change(net, optimizer)
                optimizer.zero_grad()
                nn.functional.mse_loss(run(x), y).backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                steps += 1
        return flat(net)

    return work


@pytest.mark.parametrize(
    ("change", "at", "recipe"),
    pairwise(
        [unfreeze, freeze, swap, add_group],
        [None, 5, 8, 11],
        SYNCHRONOUS,
    ),
)
def test_replicas_are_equal_after_any_change_at_any_step(change: Change, at: int | None, recipe: str) -> None:
    found = run_workers(3, changing(change, at), recipe)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize(("at", "drop_last"), [(None, False), (5, False), (8, True)])
@pytest.mark.parametrize("change", [unfreeze, freeze, swap, add_group])
def test_exchanging_every_step_equals_one_process_under_any_change(
    change: Change, at: int | None, drop_last: bool
) -> None:
    """The last of 25 whole batches is that of the ninth step, in which all three workers change the model."""
    work = changing(change, at, drop_last=drop_last)
    wanted = run_single_process(work, join=3)
    assert relative_distance(run_workers(3, work, "allreduce")[0], wanted) < 1e-12


@pytest.mark.parametrize("forward", [call_layers, compile_model])
def test_parameters_thaw_in_an_epoch_where_no_hook_of_the_model_runs(forward: Any) -> None:
    """All gradients of the next backward pass are of parameters that were frozen."""
    torch.compiler.reset()
    wanted = run_single_process(changing(swap, 5), join=3)
    found = run_workers(3, changing(swap, 5, forward=forward), "allreduce")
    assert relative_distance(found[0], wanted) < 1e-12


def add_head(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Replace the head; the optimizer keeps the parameters of the old head, as scripts leave them there."""
    net[2] = nn.Linear(16, 1, dtype=net[2].weight.dtype)
    with torch.no_grad():
        for one in net[2].parameters():
            one.copy_(torch.linspace(-0.2, 0.3, one.numel()).view_as(one))
    optimizer.add_param_group({"params": net[2].parameters()})


@pytest.mark.parametrize("at", [None, 0, 5])
@pytest.mark.parametrize("recipe", [*SYNCHRONOUS, "async_sgd"])
def test_parameters_that_were_replaced_may_stay_in_the_optimizer(recipe: str, at: int | None) -> None:
    if recipe == "async_sgd" and at is not None:
        pytest.skip("recipes that do not wait follow changes between two epochs")
    found = run_workers(3, changing(add_head, at), recipe)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("at", [None, 5])
def test_replaced_parameters_that_stay_in_the_optimizer_train_as_in_one_process(at: int | None) -> None:
    wanted = run_single_process(changing(add_head, at), join=3)
    assert relative_distance(run_workers(3, changing(add_head, at), "allreduce")[0], wanted) < 1e-12


def plain_sgd(change: Change, at: int | None) -> Callable[[int], Tensor]:
    def work(worker: int) -> Tensor:
        net, _ = start(DOUBLE, change)
        held = net[2].parameters() if change is add_group else net.parameters()
        optimizer = torch.optim.SGD(held, lr=0.05)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(100, DOUBLE), batch_size=4))
        steps = 0
        for epoch in range(3):
            if epoch == 1 and at is None:
                change(net, optimizer)
            for x, y in loader:
                if steps == at:
                    change(net, optimizer)
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                steps += 1
        return flat(net)

    return work


@pytest.mark.parametrize("at", [None, 5])
@pytest.mark.parametrize("change", [unfreeze, freeze, swap, add_group])
def test_averaging_every_step_equals_one_process_under_any_change(change: Change, at: int | None) -> None:
    wanted = run_single_process(plain_sgd(change, at), join=3)
    assert relative_distance(run_workers(3, plain_sgd(change, at), "local_sgd(every=1)")[0], wanted) < 1e-12


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=4)", "diloco(every=8)"])
def test_a_head_replaced_between_epochs_starts_as_that_of_the_first_worker(recipe: str) -> None:
    found = run_workers(3, changing(replace_head, None), recipe)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=4)"])
def test_a_head_that_differs_and_is_replaced_in_an_epoch_is_refused_by_name(recipe: str) -> None:
    with pytest.raises(stretto.errors.ModelError, match=r"2\.(weight|bias) began to train in the middle of an epoch"):
        run_workers(3, changing(replace_head, 11), recipe)


@pytest.mark.parametrize("recipe", [*EXACT, "local_sgd(every=4)"])
def test_a_worker_without_a_last_batch_may_unfreeze_later_than_the_others(recipe: str) -> None:
    """13 batches for 3 workers: two workers have none in the last global step, so their own step counts are lower."""

    def work(worker: int) -> Tensor:
        return changing(unfreeze, 7, samples=52)(worker)

    found = run_workers(3, work, recipe)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("recipe", OVER_A_SERVER)
@pytest.mark.parametrize("change", [unfreeze, freeze, swap, add_group, replace_head])
def test_over_a_server_trained_parameters_may_change_between_epochs(change: Change, recipe: str) -> None:
    found = run_workers(3, changing(change, None, samples=60), recipe)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("recipe", OVER_A_SERVER)
@pytest.mark.parametrize("change", [freeze, swap])
def test_over_a_server_workers_without_a_batch_see_other_changes_than_the_one_with_it(
    change: Change, recipe: str
) -> None:
    """A frozen parameter is trained while it has a gradient, and at workers without a step it never had one."""
    found = run_workers(3, changing(change, None, samples=4, epochs=4), recipe)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("recipe", OVER_A_SERVER)
def test_over_a_server_parameters_unfrozen_in_an_epoch_are_refused_by_name(recipe: str) -> None:
    with pytest.raises(stretto.errors.ModelError, match=r"0\.(weight|bias) began to train in the middle of an epoch"):
        run_workers(2, changing(unfreeze, 5, samples=60), recipe)


@pytest.mark.parametrize(
    ("change", "recipe"), each_value([unfreeze, freeze, swap, add_group, replace_head], SYNCHRONOUS)
)
def test_one_worker_computes_the_bits_of_the_plain_loop(change: Change, recipe: str) -> None:
    wanted = run_single_process(changing(change, 5))
    assert torch.equal(run_one_worker(changing(change, 5), recipe), wanted)


def test_a_model_changed_at_one_worker_alone_is_named() -> None:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(52, DOUBLE), batch_size=4))
        for epoch in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
            if epoch == 0 and worker == 1:
                with torch.no_grad():
                    net[0].weight.mul_(0.5)
        return flat(net)

    for recipe in ("local_sgd(every=4)", "diloco(every=8)", "allreduce"):
        with pytest.raises(stretto.errors.ReplicasDifferError, match=r"of worker 1 "):
            run_workers(3, work, recipe)


def test_frozen_parameters_that_one_worker_changed_are_named() -> None:
    def work(worker: int) -> Any:
        net, optimizer = start(DOUBLE, None)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(52, DOUBLE), batch_size=4))
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                net[0].weight.add_(float(worker == 2))

    for recipe in ("local_sgd(every=4)", "diloco(every=8)", "allreduce"):
        with pytest.raises(stretto.errors.ReplicasDifferError, match=r"0\.weight of worker 2"):
            run_workers(3, work, recipe)


def test_a_gradient_that_the_script_drops_moves_no_parameter_of_a_worker_without_a_batch() -> None:
    def work(worker: int) -> Any:
        net, optimizer = start(DOUBLE, None)
        data = DataLoader(regression(20, DOUBLE), batch_size=4, drop_last=True)
        for x, y in stretto.distribute(net, optimizer, data):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            net[2].bias.grad = None
            optimizer.step()
        return flat(net)

    found = run_workers(3, work, "allreduce")
    assert all(torch.equal(one, found[0]) for one in found)


# --- arrival with frozen parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_same", [True, False])
@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=4)", "gossip"])
def test_a_restarted_worker_is_sent_frozen_parameters_only_if_its_own_differ(
    recipe: str, is_same: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes, starts, pack = list[int](), iter(range(9)), state_transfer.pack

    def counted(state: Any) -> bytes:
        packed = pack(state)
        sizes.append(len(packed))
        return packed

    monkeypatch.setattr(state_transfer, "pack", counted)

    def work(worker: int) -> dict[str, Tensor]:
        start = next(starts) if worker == 2 else 0
        model = nn.Sequential(nn.Linear(4, 5000), nn.Linear(5000, 1)).requires_grad_(False)
        for one in model.parameters():
            nn.init.constant_(one, 0.01 * start if not is_same else 0.1)
        model[1].bias.requires_grad_(True)
        optimizer = torch.optim.SGD([model[1].bias], 0.01)
        data = torch.utils.data.TensorDataset(torch.linspace(0, 1, 384).view(96, 4), torch.ones(96, 1))
        loader = stretto.distribute(model, optimizer, DataLoader(data, 4))
        for _ in range(60):
            for number, (x, y) in enumerate(loader):
                if worker == 2 and not start and number == 3:
                    raise WorkerKilled
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        return {name: one.clone() for name, one in model.state_dict().items()}

    found, _ = run_elastic_workers(3, work, recipe, tmp_path / "run", again=1)
    assert [size > 4 * 5000 for size in sizes] == [not is_same]
    for other in found[1:]:
        for name, one in found[0].items():
            assert torch.equal(one, other[name]) or (recipe == "gossip" and name == "1.bias"), name


@pytest.mark.usefixtures("every_checkpoint")
def test_checkpoints_share_the_file_of_frozen_parameters_and_a_resumed_run_has_them(tmp_path: Path) -> None:
    def work(base: float, epochs: int = 4) -> Callable[[int], dict[str, Tensor]]:
        def of_worker(worker: int) -> dict[str, Tensor]:
            model = nn.Sequential(nn.Linear(4, 50_000, bias=False), nn.Linear(50_000, 1, bias=False))
            for one in model.parameters():
                nn.init.constant_(one, base)
            model[0].requires_grad_(False)
            optimizer = torch.optim.Adam(model[1].parameters(), 1e-4)
            data = torch.utils.data.TensorDataset(torch.linspace(0, 1, 64).view(16, 4), torch.ones(16, 1))
            loader = stretto.distribute(model, optimizer, DataLoader(data, 4))
            for _ in range(epochs):
                for x, y in loader:
                    optimizer.zero_grad()
                    nn.functional.mse_loss(model(x), y).backward()
                    optimizer.step()
            return model.state_dict()

        return of_worker

    kept = {"checkpoint": every("2 rounds"), "keep": 99}
    for run in ("whole", "half"):
        (tmp_path / run).mkdir()
    whole = run_workers(2, work(0.1), "allreduce", run=tmp_path / "whole", **kept)[0]
    run_workers(2, work(0.1, 2), "allreduce", run=tmp_path / "half", **kept)
    found = sorted((tmp_path / "half" / "checkpoints").iterdir())
    assert len({path.joinpath("frozen.safetensors").stat().st_ino for path in found}) == 1 < len(found)
    trained = 4 * 50_000
    assert all((path / "state.safetensors").stat().st_size < 3.1 * trained for path in found)
    resumed = run_workers(2, work(0.7), "allreduce", resume=tmp_path / "half")[0]
    assert all(torch.equal(one, resumed[name]) for name, one in whole.items())
