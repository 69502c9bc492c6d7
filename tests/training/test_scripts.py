"""Constructs of a plain training loop: with each, several workers equal one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from combinations import pairwise
from thread_workers import (
    Branching,
    flat,
    regression,
    relative_distance,
    run_one_worker,
    run_single_process,
    run_workers,
    sgd,
    small_net,
    training,
)
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

import stretto
from stretto import api

DOUBLE = torch.float64
CLOSE = 1e-10
EVERY_STEP = ["allreduce", "local_sgd(every=1)"]


def check_equals_one_process(work: Any, recipe: str, workers: int = 3, close: float = CLOSE) -> None:
    found = run_workers(workers, work, recipe)
    assert relative_distance(found[0], run_single_process(work, join=workers)) <= close
    assert all(torch.equal(one, found[0]) for one in found)


def loop(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: TensorDataset,
    batch: int = 8,
    epochs: int = 2,
    set_to_none: bool = True,
    call: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=batch))
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=set_to_none)
            nn.functional.mse_loss((call or net)(x), y).backward()
            optimizer.step()
    return flat(net)


@pytest.mark.parametrize("recipe", EVERY_STEP)
def test_several_parameter_groups_equal_one_process(recipe: str) -> None:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        groups = [{"params": net[0].parameters(), "lr": 0.1}, {"params": net[2].parameters(), "lr": 0.01}]
        return loop(net, torch.optim.SGD(groups, lr=0.5), regression(70, DOUBLE))

    check_equals_one_process(work, recipe)


class Tied(nn.Module):
    def __init__(self, same_object: bool) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6, dtype=DOUBLE)
        self.two = nn.Linear(6, 6, dtype=DOUBLE)
        self.out = nn.Linear(6, 1, dtype=DOUBLE)
        if same_object:
            self.two.weight = self.one.weight
        else:
            self.two.weight.data = self.one.weight.data

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.two(torch.tanh(self.one(x)))))


@pytest.mark.parametrize("same_object", [True, False])
@pytest.mark.parametrize("recipe", EVERY_STEP)
def test_tied_parameters_stay_tied(recipe: str, same_object: bool) -> None:
    torch.manual_seed(5)
    state = Tied(same_object).state_dict()

    def work(worker: int) -> Tensor:
        net = Tied(same_object)
        net.load_state_dict(state)
        found = loop(net, sgd(net.parameters()), regression(70, DOUBLE))
        assert torch.equal(net.one.weight, net.two.weight)
        return found

    check_equals_one_process(work, recipe)


@pytest.mark.parametrize("recipe", EVERY_STEP)
def test_frozen_parameters_keep_their_bits(recipe: str) -> None:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        net[0].weight.requires_grad_(False)
        before = net[0].weight.clone()
        found = loop(net, torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.1), regression(70, DOUBLE))
        assert torch.equal(net[0].weight, before)
        return found

    check_equals_one_process(work, recipe)


def test_a_parameter_unfrozen_between_epochs_is_exchanged_from_then_on() -> None:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        net[0].weight.requires_grad_(False)
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(70, DOUBLE), batch_size=8))
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
            net[0].weight.requires_grad_(True)
        return flat(net)

    for recipe in EVERY_STEP:
        check_equals_one_process(work, recipe)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_parameters_without_gradient_on_some_workers_equal_one_process(set_to_none: bool) -> None:
    """Weight decay and momentum distinguish a gradient of None from one of zero: both must be as in one process."""
    torch.manual_seed(2)
    state = Branching().state_dict()

    def work(worker: int) -> Tensor:
        net = Branching()
        net.load_state_dict(state)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        found = loop(net, optimizer, regression(90, DOUBLE), batch=4, set_to_none=set_to_none)
        assert net.never.grad is None
        assert torch.equal(net.never.detach(), torch.ones(3, dtype=DOUBLE))
        return found

    check_equals_one_process(work, "allreduce")


@pytest.mark.parametrize("recipe", [*EVERY_STEP, "diloco(every=3)"])
def test_models_of_mixed_dtypes_equal_one_process(recipe: str) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = small_net(torch.float32), nn.Linear(1, 1, dtype=DOUBLE)
            nn.init.ones_(self.high.weight)
            nn.init.zeros_(self.high.bias)

        def forward(self, x: Tensor) -> Tensor:
            return self.high(self.low(x).double())

    def work(worker: int) -> Tensor:
        net = Mixed()
        data = regression(70)
        data.tensors = (data.tensors[0], data.tensors[1].double())
        return loop(net, sgd(net.parameters()), data)

    if "diloco" in recipe:
        found = run_workers(3, work, recipe)
        assert all(torch.equal(one, found[0]) for one in found)
    else:
        check_equals_one_process(work, recipe, close=1e-6)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("table", torch.full((5,), 1 / 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)))) + self.table.sum()


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "diloco(every=2)"])
def test_buffers_are_synchronised_with_the_exchange(recipe: str) -> None:
    """Averaged with parameters, worker 0's with gradients; integers are never averaged, constants do not drift."""
    torch.manual_seed(1)
    state = Normed().state_dict()

    def work(worker: int) -> dict[str, Tensor]:
        net = Normed()
        net.load_state_dict(state)
        loop(net, sgd(net.parameters()), regression(96))
        return {name: one.clone() for name, one in net.state_dict().items()}

    found = run_workers(3, work, recipe)
    for one in found:
        assert one["norm.num_batches_tracked"].dtype == torch.int64
        assert one["norm.num_batches_tracked"] == 8
        assert torch.equal(one["table"], torch.full((5,), 1 / 3))
        assert torch.equal(one["norm.running_mean"], found[0]["norm.running_mean"])
        assert not torch.equal(one["norm.running_mean"], state["norm.running_mean"])


def test_a_buffer_that_only_one_worker_changes_is_averaged() -> None:
    def work(worker: int) -> Tensor:
        torch.manual_seed(1)
        net = Normed()

        def count(*_: object) -> None:
            net.table += float(worker == 1)

        net.register_forward_pre_hook(count)
        loop(net, sgd(net.parameters()), regression(96))
        return net.table.clone()

    found = run_workers(3, work, "local_sgd(every=2)")
    assert all(torch.equal(one, found[0]) for one in found)
    assert (found[0] > 1).all()


def test_averaged_statistics_are_the_mean_of_the_workers() -> None:
    """With a learning rate of zero the statistics of every worker are known."""
    torch.manual_seed(1)
    state, data = Normed().state_dict(), regression(48)

    def work(worker: int) -> Tensor:
        net = Normed()
        net.load_state_dict(state)
        loop(net, torch.optim.SGD(net.parameters(), lr=0.0), data, epochs=1)
        return net.norm.running_mean.clone()

    each = []
    for worker in range(3):
        net = Normed()
        net.load_state_dict(state)
        for start in (0, 24):
            net(data.tensors[0][start + 8 * worker : start + 8 * (worker + 1)])
        each.append(net.norm.running_mean)
    assert torch.allclose(run_workers(3, work, "local_sgd(every=50)")[0], torch.stack(each).mean(0), atol=1e-6)
    assert torch.equal(run_workers(3, work, "allreduce")[2], each[0])


@pytest.mark.parametrize("recipe", [None, *EVERY_STEP])
def test_gradient_accumulation_equals_one_batch(recipe: str | None) -> None:
    """Two micro-batches per step, the first without an exchange, equal one batch of the same samples."""
    data = regression(96, DOUBLE)

    def accumulated(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=4))
        for number, (x, y) in enumerate(loader):
            with stretto.no_sync() if number % 2 == 0 else torch.enable_grad():
                (nn.functional.mse_loss(net(x), y) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return flat(net)

    whole = training(data, 8, epochs=1, dtype=DOUBLE)
    workers = 1 if recipe is None else 3
    found = run_single_process(accumulated) if recipe is None else run_workers(workers, accumulated, recipe)[0]
    assert relative_distance(found, run_single_process(whole, join=workers)) <= CLOSE


def test_accumulation_without_no_sync_equals_one_process() -> None:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(96, DOUBLE), batch_size=4))
        for number, (x, y) in enumerate(loader):
            (nn.functional.mse_loss(net(x), y) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        return flat(net)

    check_equals_one_process(work, "allreduce", workers=4)


def test_clipping_receives_the_averaged_gradient() -> None:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(100, DOUBLE), batch_size=8))
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
        return flat(net)

    check_equals_one_process(work, "allreduce")
    check_equals_one_process(work, "allreduce", workers=4)


def scaled(worker: int, data: TensorDataset, poison: int | None = None) -> Tensor:
    """Train with autocast and a gradient scaler; the second batch of worker `poison` overflows."""
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=8))
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = net(x)
        loss = nn.functional.mse_loss(out.float(), y)
        scaler.scale(loss * float("inf") if worker == poison and number == 1 else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return flat(net)


@pytest.mark.parametrize("recipe", EVERY_STEP)
def test_scaler_and_autocast_agree_with_one_process(recipe: str) -> None:
    """Autocast rounds to 8 bits, so batches of other sizes agree to that precision; replicas agree to the bit."""
    data = regression(100)
    found = run_workers(3, lambda worker: scaled(worker, data), recipe)
    assert all(torch.equal(one, found[0]) for one in found)
    assert relative_distance(found[0], run_single_process(lambda worker: scaled(worker, data), join=3)) <= 2e-2


@pytest.mark.parametrize("recipe", [*EVERY_STEP, "local_sgd(every=3)"])
def test_a_step_that_the_scaler_skips_on_one_worker_blocks_no_other_worker(recipe: str) -> None:
    data = regression(100)
    found = run_workers(3, lambda worker: scaled(worker, data, poison=1), recipe)
    assert torch.isfinite(found[0]).all()
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize(("samples", "drop_last"), [(96, False), (97, False), (112, True)])
@pytest.mark.parametrize("recipe", EVERY_STEP)
def test_schedulers_are_those_of_one_process(recipe: str, samples: int, drop_last: bool) -> None:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9 if recipe == "allreduce" else 0.0)
        loader = stretto.distribute(
            net, optimizer, DataLoader(regression(samples, DOUBLE), batch_size=8, drop_last=drop_last)
        )
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * len(loader))
        scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, decay], [5])
        for _ in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                scheduler.step()
        return torch.cat([flat(net), torch.tensor([optimizer.param_groups[0]["lr"], scheduler.last_epoch])])

    check_equals_one_process(work, recipe, workers=4)


@pytest.mark.parametrize("recipe", [*EVERY_STEP, "local_sgd(every=4)"])
def test_closures_equal_one_process(recipe: str) -> None:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(97, DOUBLE), batch_size=8))
        for x, y in loader:

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(net(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return flat(net)

    if "4" in recipe:
        found = run_workers(4, work, recipe)
        assert all(torch.equal(one, found[0]) for one in found)
    else:
        check_equals_one_process(work, recipe, workers=4)


def test_two_backward_passes_per_step_equal_one_process() -> None:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(97, DOUBLE), batch_size=8))
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            nn.functional.l1_loss(net(x), y).backward()
            optimizer.step()
        return flat(net)

    check_equals_one_process(work, "allreduce")


@pytest.mark.parametrize("recipe", EVERY_STEP)
def test_zeroed_gradients_equal_one_process(recipe: str) -> None:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        return loop(net, sgd(net.parameters()), regression(70, DOUBLE), set_to_none=False)

    check_equals_one_process(work, recipe)


@pytest.mark.parametrize("state", ["average", "keep", "reset"])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.RMSprop])
def test_every_treatment_of_the_optimizer_state_keeps_replicas_equal(make: Any, state: str) -> None:
    optimizers = {}

    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizers[worker] = make(net.parameters(), lr=0.01)
        return loop(net, optimizers[worker], regression(49, DOUBLE), epochs=2)

    found = run_workers(3, work, f'local_sgd(every=3, optimizer_state="{state}")')
    assert all(torch.equal(one, found[0]) for one in found)
    assert torch.isfinite(found[0]).all()


def test_averaged_momentum_is_equal_everywhere_and_kept_momentum_is_not() -> None:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        loop(net, optimizer, regression(72, DOUBLE), epochs=1)
        return torch.cat([optimizer.state[one]["momentum_buffer"].reshape(-1) for one in net.parameters()])

    averaged, kept, reset = (
        run_workers(3, work, f'local_sgd(every=3, optimizer_state="{state}")') for state in ("average", "keep", "reset")
    )
    assert torch.equal(averaged[0], averaged[1])
    assert not torch.equal(kept[0], kept[1])
    assert torch.equal(reset[0], torch.zeros_like(reset[0]))


@pytest.mark.parametrize("way", ["in place", "given", "beside"])
def test_a_compiled_model_computes_the_plain_loop(way: str) -> None:
    """Two of the ways compile one graph, and nothing that Stretto adds to the model is in it."""
    torch.compiler.reset()

    def work(worker: int) -> Tensor:
        net: Any = small_net(DOUBLE)
        if way == "in place":
            net.compile(backend="aot_eager")
            return loop(net, sgd(net.parameters()), regression(64, DOUBLE))
        compiled: Any = torch.compile(net, backend="aot_eager", fullgraph=True)
        given = compiled if way == "given" else net
        return loop(given, sgd(net.parameters()), regression(64, DOUBLE), call=compiled)

    one = run_one_worker(work, "allreduce")
    assert relative_distance(one, run_single_process(training(regression(64, DOUBLE), 8, dtype=DOUBLE))) <= CLOSE


def test_a_channels_last_model_keeps_its_memory_format() -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 1))
        return net.to(memory_format=torch.channels_last)

    state = make().state_dict()

    def work(worker: int) -> Tensor:
        net = make()
        net.load_state_dict(state)
        data = TensorDataset(torch.linspace(-1, 1, 12 * 108).view(12, 3, 6, 6), torch.ones(12, 1))
        found = loop(net, sgd(net.parameters()), data, batch=2)
        assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
        return found

    check_equals_one_process(work, "local_sgd(every=1)", workers=2, close=1e-6)
    check_equals_one_process(work, "allreduce", workers=2, close=1e-6)


def test_a_change_of_the_model_between_epochs_is_kept() -> None:
    """The script loads other values after an epoch in which the workers' models diverged."""

    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(48, DOUBLE), batch_size=8))
        for epoch in range(2):
            optimizer.param_groups[0]["lr"] = 0.0 if epoch else 0.1
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
            if epoch == 0:
                with torch.no_grad():
                    for one in net.parameters():
                        one.fill_(0.25)
        return flat(net)

    for recipe in ("local_sgd(every=100)", "diloco(every=100)", "local_sgd(every=2)", "diloco(every=2)", "allreduce"):
        assert torch.equal(run_workers(2, work, recipe)[1], torch.full_like(flat(small_net()), 0.25))


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "async_sgd"])
def test_the_object_of_a_model_is_copied_and_saved_without_the_library(recipe: str) -> None:
    def work(worker: int) -> None:
        net = nn.Sequential(nn.Embedding(9, 2, sparse=recipe != "allreduce"), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        numbers = torch.arange(16) % 9
        for (number,) in stretto.distribute(net, optimizer, DataLoader(TensorDataset(numbers), batch_size=4)):
            optimizer.zero_grad()
            net(number).mean().backward()
            optimizer.step()
        saved = io.BytesIO()
        torch.save(net, saved)
        assert b"stretto" not in saved.getvalue()
        saved.seek(0)
        for one in (torch.load(saved, weights_only=False), copy.deepcopy(net)):
            assert torch.equal(one(numbers), net(numbers))

    run_workers(2, work, recipe)


def test_leaving_an_epoch_early_equals_one_process() -> None:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(96, DOUBLE), batch_size=8))
        for _ in range(2):
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                if number == 1:
                    break
        return flat(net)

    for recipe in EVERY_STEP:
        check_equals_one_process(work, recipe)
    run_workers(3, work, "local_sgd(every=3)")


class Counted(IterableDataset):
    """A stream of the numbers 0 to n."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Any:
        return iter(torch.arange(float(self.n)).view(-1, 1))


def read(loader: Any, epochs: int = 2) -> list[list[float]]:
    """Train on the loader's batches, and return the numbers in them by epoch, without those of passes of weight 0."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    loader = stretto.distribute(net, optimizer, loader)
    epochs_read = []
    for _ in range(epochs):
        seen: list[float] = []
        for batch in loader:
            x = batch[0] if isinstance(batch, list | tuple) else batch
            optimizer.zero_grad()
            net(x.view(-1, 1)).mean().backward()
            optimizer.step()
            trainer = api.training()
            seen += x.view(-1).tolist() if trainer is None or not trainer.global_steps.is_weightless else []
        epochs_read.append(seen)
    return epochs_read


def numbers(n: int) -> TensorDataset:
    return TensorDataset(torch.arange(float(n)).view(-1, 1))


LOADERS = {
    "plain": lambda n: DataLoader(numbers(n), batch_size=4),
    "shuffled": lambda n: DataLoader(numbers(n), batch_size=4, shuffle=True),
    "batch sampler": lambda n: DataLoader(
        numbers(n), batch_sampler=BatchSampler(SequentialSampler(range(n)), 3, drop_last=False)
    ),
    "no batches": lambda n: DataLoader(numbers(n), batch_size=None),
    "stream": lambda n: DataLoader(Counted(n), batch_size=4),
    "list of batches": lambda n: list(torch.arange(float(n)).split(4)),
}


@pytest.mark.parametrize(
    ("kind", "workers", "samples", "recipe"),
    pairwise([*LOADERS], [1, 2, 3, 4, 5], [5, 23, 48], ["allreduce", "local_sgd(every=3)"]),
)
def test_every_sample_is_seen_exactly_once(kind: str, workers: int, samples: int, recipe: str) -> None:
    found = run_workers(workers, lambda worker: read(LOADERS[kind](samples)), recipe)
    for epoch in range(2):
        assert sorted(x for epochs in found for x in epochs[epoch]) == list(range(samples))


@pytest.mark.parametrize("kind", ["plain", "list of batches"])
@pytest.mark.parametrize("recipe", ["allreduce", "gossip(every=1)", "async_sgd"])
def test_one_batch_for_all_workers_may_be_divided(kind: str, recipe: str) -> None:
    found = run_workers(2, lambda worker: read(LOADERS[kind](4)), recipe, split=True)
    assert sorted(x for epochs in found for x in epochs[0]) == list(range(4))


def test_drop_last_drops_the_incomplete_batch_of_the_loader() -> None:
    found = run_workers(3, lambda worker: read(DataLoader(numbers(23), batch_size=4, drop_last=True)), "allreduce")
    assert sorted(x for epochs in found for x in epochs[0]) == list(range(20))


@pytest.mark.parametrize("indices", [np.arange(3, 60), torch.arange(3, 60)], ids=["numpy", "torch"])
def test_a_sampler_over_an_array_of_indices_equals_one_process(indices: Any) -> None:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = sgd(net.parameters())
        sampler = torch.utils.data.SubsetRandomSampler(indices, generator=torch.Generator().manual_seed(3))
        loader = DataLoader(regression(60, DOUBLE), batch_size=4, sampler=sampler)
        for x, y in stretto.distribute(net, optimizer, loader):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        return flat(net)

    check_equals_one_process(work, "allreduce")


def test_samples_of_a_sampler_of_tuples_are_seen_once() -> None:
    class Named(torch.utils.data.Dataset):
        def __getitem__(self, key: tuple[str, int]) -> Tensor:
            assert isinstance(key, tuple)
            return torch.tensor([float(key[1])])

        def __len__(self) -> int:
            return 9

    keys = [("it", number) for number in range(9)]
    found = run_workers(2, lambda worker: read(DataLoader(Named(), batch_size=2, sampler=keys)), "allreduce")
    assert sorted(x for epochs in found for x in epochs[0]) == list(range(9))
