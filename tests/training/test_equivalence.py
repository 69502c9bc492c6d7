"""Several workers equal one process with the global batch, wherever the mathematics says so."""

from __future__ import annotations

import pytest
import torch
from combinations import pairwise
from thread_workers import regression, relative_distance, run_one_worker, run_single_process, run_workers, sgd, training

EVERY_STEP = {
    "parameters": "local_sgd(every=1)",
    "updates": "Recipe(what=updates(), when=together(every=1), then=add())",
    "gradients": "allreduce",
}
OPTIMIZERS = {
    "sgd": sgd,
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


@pytest.mark.parametrize(
    ("what", "dtype", "workers", "samples"), pairwise([*EVERY_STEP], [*TOLERANCE], [2, 3, 4], [96, 96 * 4 + 5, 97])
)
def test_exchanging_every_step_with_sgd_equals_one_process_with_the_global_batch(
    what: str, dtype: torch.dtype, workers: int, samples: int
) -> None:
    batch = 8
    global_steps = -(-samples // (batch * workers))
    work = training(regression(samples, dtype), batch, epochs=-(-100 // global_steps), dtype=dtype)
    found = run_workers(workers, work, EVERY_STEP[what])
    wanted = run_single_process(work, join=workers)
    assert relative_distance(found[0], wanted) <= TOLERANCE[dtype]
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_allreduce_equals_one_process_under_every_optimizer(make) -> None:
    work = training(regression(101, torch.float64), 8, epochs=5, make=make, dtype=torch.float64)
    assert relative_distance(run_workers(3, work, "allreduce")[0], run_single_process(work, join=3)) <= 1e-10


@pytest.mark.parametrize("every", [2, 5])
def test_averaging_parameters_or_updates_is_the_same(every: int) -> None:
    work = training(regression(200, torch.float64), 8, epochs=3, dtype=torch.float64)
    updates = f"Recipe(what=updates(), when=together(every={every}), then=add())"
    parameters = f"local_sgd(every={every})"
    assert relative_distance(run_workers(3, work, updates)[0], run_workers(3, work, parameters)[0]) <= 1e-12


def test_averaging_every_k_steps_equals_an_explicit_loop() -> None:
    """Three models trained in turn on their batches, averaged explicitly every 4 steps and at the end."""
    workers, every, batch, data = 3, 4, 8, regression(240, torch.float64)
    found = run_workers(workers, training(data, batch, epochs=3, dtype=torch.float64), f"local_sgd(every={every})")
    assert relative_distance(found[0], _explicit_loop(data, workers, batch, every, epochs=3)) <= 1e-12


def _explicit_loop(data, workers: int, batch: int, every: int, epochs: int) -> torch.Tensor:
    from thread_workers import flat, small_net

    nets = [small_net(torch.float64) for _ in range(workers)]
    optimizers = [sgd(net.parameters()) for net in nets]
    x, y = data.tensors
    step = 0
    for _ in range(epochs):
        for start in range(0, len(x), batch * workers):
            for worker, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                mine = slice(start + worker * batch, start + (worker + 1) * batch)
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(net(x[mine]), y[mine]).backward()
                optimizer.step()
            step += 1
            if step % every == 0:
                _average(nets)
    _average(nets)
    return flat(nets[0])


@torch.no_grad()
def _average(nets) -> None:
    for parameters in zip(*(net.parameters() for net in nets), strict=True):
        mean = torch.stack(list(parameters)).mean(0)
        for parameter in parameters:
            parameter.copy_(mean)


def test_local_sgd_averages_every_step_until_step_after() -> None:
    work = training(regression(240, torch.float64), 8, epochs=1, dtype=torch.float64)
    until_the_end = run_workers(3, work, "local_sgd(every=1000, after=1000)")[0]
    assert relative_distance(until_the_end, run_workers(3, work, "local_sgd(every=1)")[0]) == 0


def test_the_outer_optimizer_equals_torch_sgd() -> None:
    """DiLoCo's outer step equals that of torch.optim.SGD on the outer gradient."""
    from stretto.recipe.then import OuterState, outer

    for nesterov in (True, False):
        theta = torch.linspace(-1, 1, 50, dtype=torch.float64)
        state, reference = OuterState(theta), torch.nn.Parameter(theta.clone())
        optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=nesterov)
        for round_ in range(5):
            update = torch.sin(torch.arange(50, dtype=torch.float64) + round_)
            reference.grad = -update
            optimizer.step()
            outer(0.7, 0.9, nesterov).apply(theta, update, state)
            assert torch.allclose(theta, reference.detach(), rtol=1e-12, atol=1e-14)


def test_diloco_with_a_plain_outer_step_is_parameter_averaging() -> None:
    work = training(regression(240, torch.float64), 8, epochs=2, dtype=torch.float64)
    plain = "diloco(every=5, outer_lr=1.0, outer_momentum=0.0)"
    assert relative_distance(run_workers(3, work, plain)[0], run_workers(3, work, "local_sgd(every=5)")[0]) <= 1e-12


ALL_RECIPES = [
    "allreduce",
    "local_sgd(every=3)",
    'local_sgd(every=3, optimizer_state="reset")',
    'local_sgd(every=3, optimizer_state="keep", after=4)',
    "diloco(every=4)",
    "Recipe(what=updates(), when=together(every=2), then=add(weight=constant(0.5)))",
    'allreduce(how=cast("bf16"))',
    'diloco(every=4, how=cast("fp16"))',
]


@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_one_worker_computes_the_bits_of_the_plain_loop(recipe: str) -> None:
    make = OPTIMIZERS["momentum"]
    work = training(regression(50), 8, make=make, shuffle=True)
    torch.manual_seed(3)
    wanted = _plain_loop(make)
    torch.manual_seed(3)
    found = run_one_worker(work, recipe)
    assert torch.equal(found, wanted)


def _plain_loop(make) -> torch.Tensor:
    """Return the model of the loop of `training` without `distribute`."""
    from thread_workers import flat, small_net

    net = small_net()
    optimizer = make(net.parameters())
    loader = torch.utils.data.DataLoader(regression(50), batch_size=8, shuffle=True)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
    return flat(net)
