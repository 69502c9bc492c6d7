"""A model in pipeline stages trains as the whole model does, in the script's own loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from combinations import pairwise
from stage_threads import in_threads, joined, largest_difference, split
from staged_net import loss_of, make_net, words
from torch import Tensor, nn

from stretto.parallel.link import Link
from stretto.recipe.layout import pipeline
from stretto.strategies.parameter_view import is_held

Loop = Callable[[nn.Module, torch.optim.Optimizer], list[float]]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train for three steps, of which the second has a short batch, and evaluate."""
    losses = []
    for step in range(3):
        x, y = words(step, 5 if step == 1 else 9)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [*losses, evaluated(model)]


def varied(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train with sequences of another length in each batch, and with a single one."""
    losses = []
    for step, (samples, length) in enumerate([(9, 4), (1, 6), (6, 1), (9, 4)]):
        x, y = words(step, samples, length)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def evaluated(model: nn.Module) -> float:
    """Return the loss of a batch, without gradients."""
    x, y = words(7, 4)
    model.eval()
    with torch.no_grad():
        loss = float(loss_of(model(x), y))
    model.train()
    return loss


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Clip the gradients, and change the learning rate by a scheduler."""
    norms = []
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for step in range(3):
        x, y = words(step, 6)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.2)))
        optimizer.step()
        scheduler.step()
    return norms


def clipped_in_parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Clip parts of the model each for itself, and all of it by a norm and a noise of the loop's own."""
    norms, noise = [], torch.Generator().manual_seed(0)
    for step in range(3):
        x, y = words(step, 6)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        for part in (model.blocks, model.head):
            norms.append(float(nn.utils.clip_grad_norm_(part.parameters(), 0.1)))
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        norms.append(sum(one.pow(2).sum().item() for one in gradients) ** 0.5)
        total = sum(one.norm().item() ** 2 for one in gradients) ** 0.5
        for one in gradients:
            assert torch.zeros_like(one).shape == one.shape
            one.mul_(min(1.0, 0.1 / total)).add_(torch.randn(one.shape, generator=noise), alpha=0.01)
        optimizer.step()
    return norms


def bounded(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Clip each number of the gradients."""
    losses = []
    for step in range(3):
        x, y = words(step, 6)
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def closed(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Compute and clip the gradients in a closure."""
    losses = []
    for step in range(3):
        x, y = words(step, 6)

        def closure(x: Tensor = x, y: Tensor = y) -> float:
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return float(loss.detach())

        losses.append(optimizer.step(closure))
    return losses  # type: ignore[return-value]


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Scale the loss; in the first step the gradients of the last layer are not finite, and the step is skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scales, factors = [], [float("inf"), 1.0, 1.0]
    model.get_parameter("head.weight").register_hook(lambda gradient: gradient * factors[len(scales)])
    for step in range(3):
        x, y = words(step, 6)
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x), y)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def several(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Call the model several times before a backward pass, and accumulate the gradients of two."""
    losses = []
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2):
            (x, y), (other, target) = words(4 * step + part, 6), words(4 * step + part + 2, 3)
            loss = loss_of(model(x), y) + 0.5 * loss_of(model(other), target)
            model(x)  # its result is not used
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
    return losses


def trained(layout: pipeline, loop: Loop, make: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest differences of a parameter, and of a result of the loop, from those of the whole model."""
    nets = [make_net().to(dtype) for _ in range(layout.stages + 1)]

    def work(link: Link) -> list[float]:
        optimizer = OPTIMIZERS[make](nets[link.rank].parameters())
        split(link, nets[link.rank], optimizer, layout, words(0, 9)[0])
        return loop(nets[link.rank], optimizer)

    found = in_threads(layout.stages, work)
    expected = loop(nets[-1], OPTIMIZERS[make](nets[-1].parameters()))
    results = max(abs(a - b) for one in found for a, b in zip(one, expected, strict=True))
    return largest_difference(joined(nets[:-1]), joined(nets[-1:])), results


@pytest.mark.parametrize(
    ("stages", "micro_batches", "make", "tolerance"),
    pairwise([2, 3, 4], [1, 4, 7], [*OPTIMIZERS], [1e-12, 1e-6]),
)
def test_stages_train_as_the_whole_model(stages: int, micro_batches: int, make: str, tolerance: float) -> None:
    dtype = torch.float64 if tolerance == 1e-12 else torch.float32
    assert max(trained(pipeline(stages, micro_batches), plain, make, dtype)) < tolerance


@pytest.mark.parametrize("loop", [varied, clipped, clipped_in_parts, bounded, closed, several])
def test_other_loops_compute_what_they_do_with_the_whole_model(loop: Loop) -> None:
    assert max(trained(pipeline(3), loop, "momentum", torch.float64)) < 1e-12


def test_a_scaler_skips_the_step_at_all_stages() -> None:
    assert max(trained(pipeline(2), scaled, "momentum", torch.float32)) < 1e-6


def test_recomputed_activations_give_the_same_gradients() -> None:
    assert max(trained(pipeline(3, recompute=True), plain, "adamw", torch.float64)) < 1e-12


def halved(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Compute in another precision than autocast's usual one on a CPU."""
    x, y = words(0, 6)
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(model(x), y)
    loss.backward()
    optimizer.step()
    return [float(loss.detach())]


def test_recomputed_activations_have_the_precision_of_the_forward_pass() -> None:
    kept, repeated = make_net(), make_net()
    for model, layout in ((kept, pipeline(2)), (repeated, pipeline(2, recompute=True))):
        nets = [copy.deepcopy(model) for _ in range(2)]

        def work(link: Link, nets: list[nn.Module] = nets, layout: pipeline = layout) -> None:
            optimizer = OPTIMIZERS["sgd"](nets[link.rank].parameters())
            split(link, nets[link.rank], optimizer, layout, words(0, 6)[0])
            halved(nets[link.rank], optimizer)

        in_threads(2, work)
        model.load_state_dict(joined(nets))
    assert largest_difference(joined([kept]), joined([repeated])) == 0


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_hooks_that_change_a_gradient_run_once_for_the_whole_batch(micro_batches: int) -> None:
    def gradients(net: nn.Module) -> list[Tensor]:
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: 0.5 * gradient.clamp(-0.01, 0.01))
        loss_of(net(words(0, 8)[0]), words(0, 8)[1]).backward()
        return [one.grad for one in net.parameters() if one.grad is not None and is_held(one)]

    def work(link: Link) -> list[Tensor]:
        net = make_net().double()
        split(link, net, torch.optim.SGD(net.parameters(), lr=0.1), pipeline(2, micro_batches), words(0, 8)[0])
        return gradients(net)

    found = [one for each in in_threads(2, work) for one in each]
    expected = gradients(make_net().double())
    assert len(found) == len(expected)
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(found, expected, strict=True))
    assert max(float(one.abs().max()) for one in found) == 0.005


def test_hooks_of_a_parameter_see_one_gradient_in_each_backward_pass() -> None:
    nets = [make_net() for _ in range(2)]

    def work(link: Link) -> int:
        net, fired = nets[link.rank], list[Tensor]()
        split(link, net, torch.optim.SGD(net.parameters(), lr=0.1), pipeline(2), words(0, 8)[0])
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(fired.append)
        loss_of(net(words(0, 8)[0]), words(0, 8)[1]).backward()
        return len(fired)

    assert sum(in_threads(2, work)) == len(list(make_net().parameters()))


def test_parameters_of_other_stages_have_no_memory_and_no_state() -> None:
    nets = [make_net() for _ in range(2)]

    def work(link: Link) -> tuple[int, int]:
        net = nets[link.rank]
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        split(link, net, optimizer, pipeline(2), words(0, 8)[0])
        plain(net, optimizer)
        memory = sum(one.untyped_storage().nbytes() for one in net.parameters())
        return memory, sum(value.numel() for state in optimizer.state.values() for value in state.values())

    found = in_threads(2, work)
    whole = make_net()
    parameters = sum(one.numel() for one in whole.parameters())
    others = 2 * len(list(whole.parameters()))
    assert sum(memory for memory, _ in found) <= 4 * (parameters + others)
    assert sum(state for _, state in found) == 2 * parameters + len(list(whole.parameters()))


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x, y = words(step, 6)
    optimizer.zero_grad()
    loss_of(model(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["momentum", "adamw"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_states_that_a_script_saves_are_whole_and_continue_in_one_process(ranks: int, name: str) -> None:
    origin = make_net()

    def work(link: Link) -> tuple[dict[str, Tensor], dict[str, Any]]:
        model = copy.deepcopy(origin)
        optimizer = OPTIMIZERS[name](model.parameters())
        split(link, model, optimizer, pipeline(link.ranks), words(0, 6)[0])
        for step in range(2):
            stepped(model, optimizer, step)
        return model.state_dict(), optimizer.state_dict()

    plain_model = copy.deepcopy(origin)
    plain_optimizer = OPTIMIZERS[name](plain_model.parameters())
    for step in range(2):
        stepped(plain_model, plain_optimizer, step)
    for saved, saved_optimizer in in_threads(ranks, work):
        assert [*saved] == [*plain_model.state_dict()]
        assert [*saved_optimizer["state"]] == [*plain_optimizer.state_dict()["state"]]
        continued = make_net()
        continued.load_state_dict(saved)
        optimizer = OPTIMIZERS[name](continued.parameters())
        optimizer.load_state_dict(saved_optimizer)
        reference = copy.deepcopy(plain_model)
        reference_optimizer = OPTIMIZERS[name](reference.parameters())
        reference_optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
        stepped(continued, optimizer, 2)
        stepped(reference, reference_optimizer, 2)
        assert largest_difference(joined([continued]), joined([reference])) < 1e-5
