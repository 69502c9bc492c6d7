"""Several models and several optimizers: each optimizer has steps and rounds of its own, under one recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from thread_workers import (
    flat,
    regression,
    relative_distance,
    run_one_worker,
    run_single_process,
    run_workers,
    small_net,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stretto
from stretto.errors import ModelError

DOUBLE = torch.float64
WAITING = ["allreduce", "local_sgd(every=4)", "diloco(every=5)", 'local_sgd(every=3, optimizer_state="average")']
SERVED = ["async_sgd", "stale_synchronous(bound=2)", "soft_sync(collect=2)", "elastic_averaging(every=3)"]


def models() -> tuple[nn.Module, nn.Module]:
    generator, source = nn.Linear(6, 6, dtype=DOUBLE), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for one in generator.parameters():
            one.copy_(torch.randn(one.shape, generator=source) * 0.3)
    return generator, small_net(DOUBLE)


def gan(critic_steps: int = 1, optimizer: Any = torch.optim.SGD, samples: int = 60) -> Callable[[int], Tensor]:
    """Return an adversarial training: the critic steps for every batch, the generator every `critic_steps` batches."""

    def work(worker: int) -> Tensor:
        generator, critic = models()
        opt_g = optimizer(generator.parameters(), lr=0.02)
        opt_c = optimizer(critic.parameters(), lr=0.05)
        data = DataLoader(regression(samples, DOUBLE), batch_size=4)
        loader = stretto.distribute([generator, critic], [opt_g, opt_c], data)
        for _ in range(2):
            for step, (x, y) in enumerate(loader):
                fake = generator(x)
                opt_c.zero_grad()
                nn.functional.mse_loss(critic(x) - critic(fake.detach()), y).backward()
                opt_c.step()
                if step % critic_steps == 0:
                    opt_g.zero_grad()
                    critic(fake).square().mean().backward()
                    opt_g.step()
        return torch.cat([flat(generator), flat(critic)])

    return work


@pytest.mark.parametrize("critic_steps", [1, 3])
@pytest.mark.parametrize("samples", [60, 52])
@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=1)"])
def test_exchanging_every_step_equals_one_process(recipe: str, critic_steps: int, samples: int) -> None:
    if samples == 52 and recipe != "allreduce":
        samples = 48
    found = run_workers(3, gan(critic_steps, samples=samples), recipe)
    assert relative_distance(found[0], run_single_process(gan(critic_steps, samples=samples), join=3)) < 1e-12
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("recipe", WAITING + SERVED)
@pytest.mark.parametrize("critic_steps", [1, 3])
def test_replicas_are_equal_at_the_end(recipe: str, critic_steps: int) -> None:
    found = run_workers(3, gan(critic_steps, torch.optim.Adam, samples=52), recipe)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("recipe", [*WAITING, "local_sgd(every=1)", "gossip", *SERVED])
def test_statistics_between_the_passes_of_the_generator_are_left_alone(recipe: str) -> None:
    """The critic's rounds fall between the generator's forward and backward pass, which needs its statistics."""

    def work(worker: int) -> list[Tensor]:
        torch.manual_seed(1)
        generator = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
        critic = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        opt_c, opt_g = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (critic, generator))
        data = DataLoader(regression(48, torch.float32), batch_size=4)
        loader: Any = stretto.distribute([critic, generator], [opt_c, opt_g], data)
        for _ in range(2):
            for x, y in loader:
                fake = generator(x)
                opt_c.zero_grad()
                nn.functional.mse_loss(critic(x) - critic(fake.detach()), y).backward()
                opt_c.step()
                opt_g.zero_grad()
                critic(fake).square().mean().backward()
                opt_g.step()
        states = [one for model in (generator, critic) for one in model.state_dict().values()]
        return [one.clone() for one in states if one.is_floating_point()]

    found = run_workers(3, work, recipe)
    assert all(bool(torch.isfinite(one).all()) for one in found[0])
    assert all(torch.equal(one, other) for each in found for one, other in zip(each, found[0], strict=True))


@pytest.mark.parametrize("recipe", WAITING + SERVED[:3])
def test_one_worker_computes_the_bits_of_the_plain_loop(recipe: str) -> None:
    wanted = run_single_process(gan(2, torch.optim.Adam))
    assert torch.equal(run_one_worker(gan(2, torch.optim.Adam), recipe), wanted)


def test_each_optimizer_has_rounds_of_its_own() -> None:
    """local_sgd(every=2): each model is averaged after the 2nd, 4th ... step of its own optimizer."""

    def explicit_loop(workers: int, samples: int, critic_steps: int, every: int) -> Tensor:
        replicas = [models() for _ in range(workers)]
        steps = {0: 0, 1: 0}
        batches = list(DataLoader(regression(samples, DOUBLE), batch_size=4))

        def step(which: int, loss_of: Callable[[Any, Tensor, Tensor], Tensor], lr: float, batch: list[Any]) -> None:
            for pair, (x, y) in zip(replicas, batch, strict=True):
                parameters = list(pair[which].parameters())
                grads = torch.autograd.grad(loss_of(pair, x, y), parameters)
                with torch.no_grad():
                    for one, grad in zip(parameters, grads, strict=True):
                        one.sub_(grad, alpha=lr)
            steps[which] += 1
            if steps[which] % every == 0:
                with torch.no_grad():
                    for group in zip(*(pair[which].parameters() for pair in replicas), strict=True):
                        mean = torch.stack(list(group)).mean(0)
                        for one in group:
                            one.copy_(mean)

        for at in range(0, len(batches), workers):
            batch = batches[at : at + workers]
            number = at // workers
            step(1, lambda p, x, y: nn.functional.mse_loss(p[1](x) - p[1](p[0](x).detach()), y), 0.05, batch)
            if number % critic_steps == 0:
                step(0, lambda p, x, y: p[1](p[0](x)).square().mean(), 0.02, batch)
        ends = [torch.cat([flat(one), flat(other)]) for one, other in replicas]
        return torch.stack(ends).mean(0)

    def once(worker: int) -> Tensor:
        generator, critic = models()
        optimizers = [torch.optim.SGD(generator.parameters(), lr=0.02), torch.optim.SGD(critic.parameters(), lr=0.05)]
        data = DataLoader(regression(60, DOUBLE), batch_size=4)
        for step, (x, y) in enumerate(stretto.distribute([generator, critic], optimizers, data)):
            fake = generator(x)
            optimizers[1].zero_grad()
            nn.functional.mse_loss(critic(x) - critic(fake.detach()), y).backward()
            optimizers[1].step()
            if step % 3 == 0:
                optimizers[0].zero_grad()
                critic(fake).square().mean().backward()
                optimizers[0].step()
        return torch.cat([flat(generator), flat(critic)])

    found = run_workers(3, once, "local_sgd(every=2)")
    assert relative_distance(found[0], explicit_loop(3, 60, 3, 2)) < 1e-12


def test_evaluate_receives_the_list_of_models() -> None:
    seen: list[Any] = []

    def work(worker: int) -> None:
        generator, critic = models()
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (generator, critic)]

        def evaluate(both: Any) -> dict[str, float]:
            seen.append([one is other for one, other in zip(both, (generator, critic), strict=True)])
            return {"loss": 1.0}

        data = DataLoader(regression(24, DOUBLE), batch_size=4)
        for x, y in stretto.distribute([generator, critic], optimizers, data, evaluate=evaluate):
            for one in optimizers:
                one.zero_grad()
            nn.functional.mse_loss(critic(generator(x)), y).backward()
            for one in optimizers:
                one.step()

    run_workers(2, work, "allreduce")
    assert seen == [[True, True]]


@pytest.mark.parametrize("recipe", ["power_sgd(rank=1)", "ef21(how=top_k(0.1))", "one_bit"])
def test_recipes_with_a_state_of_gradients_refuse_two_optimizers(recipe: str) -> None:
    with pytest.raises(ModelError, match="can't tell those of 2 optimizers apart"):
        run_workers(2, gan(), recipe)


def loop(held: Callable[[nn.Module], Any], outside: Callable[[nn.Module], Any], recipe: str) -> None:
    """Run a loop with one optimizer that is passed to `distribute`, and another that is not."""

    def work(worker: int) -> None:
        net = small_net(DOUBLE)
        given, other = torch.optim.SGD(held(net), lr=0.1), torch.optim.SGD(outside(net), lr=0.1)
        for x, y in stretto.distribute(net, given, DataLoader(regression(24, DOUBLE), batch_size=4)):
            given.zero_grad()
            other.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            other.step()
            given.step()

    run_workers(2, work, recipe)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "async_sgd"])
def test_an_optimizer_outside_the_call_that_moves_the_model_is_refused(recipe: str) -> None:
    with pytest.raises(ModelError, match=r"not given is about to change 2\.weight"):
        loop(lambda net: net[0].parameters(), lambda net: net[2].parameters(), recipe)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "async_sgd"])
def test_an_optimizer_outside_the_call_that_trains_another_model_is_refused(recipe: str) -> None:
    with pytest.raises(ModelError, match="trains another model in the loop"):
        loop(lambda net: net.parameters(), lambda net: nn.Linear(2, 2).parameters(), recipe)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "async_sgd"])
def test_trainable_parameters_in_no_optimizer_are_named_at_the_first_step(recipe: str) -> None:
    def work(worker: int) -> None:
        net = small_net(DOUBLE)
        given = torch.optim.SGD(net[2].parameters(), lr=0.1)
        for x, y in stretto.distribute(net, given, DataLoader(regression(24, DOUBLE), batch_size=4)):
            given.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            given.step()

    with pytest.raises(ModelError, match=r"0\.weight has a gradient, and no optimizer"):
        run_workers(2, work, recipe)


def test_an_optimizer_over_the_input_of_one_batch_is_accepted() -> None:
    def work(worker: int) -> None:
        net = small_net(DOUBLE)
        given = torch.optim.SGD(net.parameters(), lr=0.1)
        for x, y in stretto.distribute(net, given, DataLoader(regression(24, DOUBLE), batch_size=4)):
            noise = nn.Parameter(torch.zeros_like(x))
            adversary = torch.optim.SGD([noise], lr=0.1)
            (-nn.functional.mse_loss(net(x + noise), y)).backward()
            adversary.step()
            adversary.step()
            given.zero_grad()
            nn.functional.mse_loss(net(x + noise.detach()), y).backward()
            given.step()

    run_workers(2, work, "allreduce")


def test_gradients_made_without_a_backward_pass_are_refused_where_gradients_are_exchanged() -> None:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for x, y in stretto.distribute(net, optimizer, DataLoader(regression(24, DOUBLE), batch_size=4)):
            grads = torch.autograd.grad(nn.functional.mse_loss(net(x), y), list(net.parameters()))
            for one, grad in zip(net.parameters(), grads, strict=True):
                one.grad = grad
            optimizer.step()
        return flat(net)

    with pytest.raises(ModelError, match=r"a gradient of 0\.weight that was not exchanged"):
        run_workers(2, work, "allreduce")
    found = run_workers(2, work, "local_sgd(every=2)")
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("batches", [1, 3])
def test_accumulation_without_no_sync_is_reported_once_with_the_saving(
    batches: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(worker: int) -> None:
        net = small_net(DOUBLE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = DataLoader(regression(72, DOUBLE), batch_size=4)
        for step, (x, y) in enumerate(stretto.distribute(net, optimizer, data), 1):
            nn.functional.mse_loss(net(x), y).backward()
            if step % batches == 0:
                optimizer.step()
                optimizer.zero_grad()

    run_workers(2, work, "allreduce")
    assert capsys.readouterr().err.count("would send 1/3 of the bytes") == (batches == 3)


def sharing(distribute: bool) -> Callable[[int], Tensor]:
    """Return a training whose two optimizers hold the same layer, as an actor's and a critic's do with one trunk."""

    def work(worker: int) -> Tensor:
        net = small_net()
        each = [torch.optim.SGD(held, lr=0.1) for held in (net.parameters(), net[0].parameters())]
        loader: Any = DataLoader(regression(24), batch_size=4)
        if distribute:
            loader = stretto.distribute(net, each, loader)
        for x, y in loader:
            net.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            for one in each:
                one.step()
        return flat(net)

    return work


def test_two_optimizers_over_the_same_parameters_are_refused() -> None:
    with pytest.raises(ModelError, match="two optimizers hold the same parameters") as caught:
        run_workers(2, sharing(distribute=True), "allreduce")
    assert "0.weight, 0.bias in more than one optimizer" in str(caught.value)


def test_two_optimizers_over_the_same_parameters_train_in_a_plain_process() -> None:
    assert torch.equal(sharing(distribute=True)(0), sharing(distribute=False)(0))


@pytest.mark.parametrize("recipe", ["async_sgd", "downpour(every=2)", "staleness_aware", "delay_compensated"])
@pytest.mark.parametrize("line_search", ["strong_wolfe", None])
def test_lbfgs_is_refused_where_a_server_adds_whole_updates(recipe: str, line_search: str | None) -> None:
    def work(worker: int) -> None:
        net = small_net()
        optimizer = torch.optim.LBFGS(net.parameters(), line_search_fn=line_search)
        stretto.distribute(net, optimizer, DataLoader(regression(24), batch_size=4))

    with pytest.raises(ModelError, match="adds the steps of 2 workers"):
        run_workers(2, work, recipe)


AVERAGED = ["local_sgd(every=2)", "stale_synchronous(bound=2)", "soft_sync(collect=2)", "elastic_averaging(every=2)"]


@pytest.mark.parametrize("recipe", AVERAGED)
def test_a_line_search_is_accepted_where_parameters_are_exchanged(recipe: str) -> None:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = torch.optim.LBFGS(net.parameters(), line_search_fn="strong_wolfe", max_iter=3)
        for x, y in stretto.distribute(net, optimizer, DataLoader(regression(48, DOUBLE), batch_size=8)):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(net(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return flat(net)

    found = run_workers(2, work, recipe)
    assert torch.equal(found[0], found[1])
