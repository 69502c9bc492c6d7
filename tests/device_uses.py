"""Ways in which scripts train on a device: each returns the tensors whose bits must be those of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from thread_workers import regression, small_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto

Use = Callable[[str], list[Tensor]]
USES: dict[str, Use] = {}
MSE = nn.functional.mse_loss


def use(name: str) -> Callable[[Use], Use]:
    """Return a decorator that adds a way of training."""
    return lambda train: USES.setdefault(name, train)


def sgd(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(net.parameters(), **({"lr": 0.05, "momentum": 0.5, "foreach": True} | options))


def train(net: nn.Module, optimizer: Any, loader: Any, device: str, epochs: int = 2) -> list[Tensor]:
    """Run a plain loop, with data moved to the device, and return the state of the model and the optimizer."""
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            MSE(net(x.to(device)), y.to(device)).backward()
            optimizer.step()
    return state(net, optimizer)


def state(net: nn.Module, optimizer: Any) -> list[Tensor]:
    """Return the tensors of a model and its optimizer."""
    found = [one for each in optimizer.state.values() for one in each.values() if isinstance(one, Tensor)]
    return [*net.state_dict().values(), *found]


def normalised(device: str) -> nn.Module:
    """Return a network with statistics, and a buffer of integers."""
    net = small_net()
    net = nn.Sequential(net[0], nn.BatchNorm1d(16), *net[1:])
    net.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
    return net.to(device)


@use("clipping")
def _(device: str) -> list[Tensor]:
    net = small_net().to(device)
    optimizer = sgd(net)
    for x, y in stretto.distribute(net, optimizer, DataLoader(regression(34), batch_size=8)):
        optimizer.zero_grad()
        MSE(net(x.to(device)), y.to(device)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
    return state(net, optimizer)


@use("scaler")
def _(device: str) -> list[Tensor]:
    net = small_net().to(device)
    optimizer, kind = sgd(net), device.partition(":")[0]
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**100, growth_interval=2)
    for number, (x, y) in enumerate(stretto.distribute(net, optimizer, DataLoader(regression(66), batch_size=8))):
        optimizer.zero_grad()
        with torch.autocast(kind, torch.bfloat16):
            loss = MSE(net(x.to(device)).float(), y.to(device))
        scaler.scale(loss * (1e30 if number == 1 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update(2.0**10)
    return [*state(net, optimizer), torch.tensor(scaler.get_scale())]


@use("buffers")
def _(device: str) -> list[Tensor]:
    net = normalised(device)
    optimizer = sgd(net)
    return train(net, optimizer, stretto.distribute(net, optimizer, DataLoader(regression(34), batch_size=8)), device)


@use("data on the device")
def _(device: str) -> list[Tensor]:
    net = small_net().to(device)
    optimizer = sgd(net)
    data = TensorDataset(*(one.to(device) for one in regression(34).tensors))
    return train(
        net, optimizer, stretto.distribute(net, optimizer, DataLoader(data, batch_size=8, shuffle=True)), device
    )


@use("pinned data")
def _(device: str) -> list[Tensor]:
    net = small_net().to(device)
    optimizer = sgd(net)
    loader = DataLoader(regression(34), batch_size=8, shuffle=True, pin_memory=device != "cpu")
    return train(net, optimizer, stretto.distribute(net, optimizer, loader), device)


class TwoDevices(nn.Module):
    """A network whose first layer is on the CPU."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.first, _, last = small_net()
        self.last, self.device = last.to(device), device

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x.cpu()).tanh().to(self.device))


@use("two devices")
def _(device: str) -> list[Tensor]:
    net = TwoDevices(device)
    optimizer = sgd(net)
    return train(net, optimizer, stretto.distribute(net, optimizer, DataLoader(regression(34), batch_size=8)), device)


@use("Adam")
def _(device: str) -> list[Tensor]:
    net = small_net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, foreach=True)
    return train(net, optimizer, stretto.distribute(net, optimizer, DataLoader(regression(34), batch_size=8)), device)


@use("evaluation")
def _(device: str) -> list[Tensor]:
    net, found = normalised(device), []
    optimizer, data = sgd(net), regression(34)

    def evaluate(model: nn.Module) -> dict[str, float]:
        model.eval()
        with torch.no_grad():
            loss = MSE(model(data.tensors[0].to(device)), data.tensors[1].to(device))
        found.append(loss.detach().cpu())
        torch.rand(1, device=device)
        return {"loss": loss}

    loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=8), evaluate=evaluate, evaluate_every=2)
    return [*train(net, optimizer, loader, device), *found]


@use("frozen, then thawed")
def _(device: str) -> list[Tensor]:
    net = small_net().to(device)
    net[0].requires_grad_(False)
    optimizer = sgd(net)
    loader = stretto.distribute(net, optimizer, DataLoader(regression(34), batch_size=8))
    train(net, optimizer, loader, device, 1)
    net[0].requires_grad_(True)
    return train(net, optimizer, loader, device, 1)


@use("logged")
def _(device: str) -> list[Tensor]:
    net = small_net().to(device)
    optimizer = sgd(net)
    for x, y in stretto.distribute(net, optimizer, DataLoader(regression(34), batch_size=8)):
        optimizer.zero_grad()
        loss = MSE(net(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        stretto.log(loss=loss)
    return state(net, optimizer)


@use("accumulation")
def _(device: str) -> list[Tensor]:
    net = small_net().to(device)
    optimizer = sgd(net)
    for x, y in stretto.distribute(net, optimizer, DataLoader(regression(34), batch_size=8)):
        optimizer.zero_grad()
        with stretto.no_sync():
            MSE(net(x.to(device)), y.to(device)).backward()
        MSE(net(x.to(device)) * 0.5, y.to(device)).backward()
        optimizer.step()
    return state(net, optimizer)


@use("moved in memory")
def _(device: str) -> list[Tensor]:
    """Give the parameters other memory between two epochs."""
    net = small_net().to(device)
    optimizer = sgd(net, momentum=0.0)
    loader = stretto.distribute(net, optimizer, DataLoader(regression(34), batch_size=8))
    train(net, optimizer, loader, device, 1)
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()
    return train(net, optimizer, loader, device, 1)


@use("several optimizers")
def _(device: str) -> list[Tensor]:
    net = small_net().to(device)
    optimizers = [torch.optim.SGD(net[0].parameters(), 0.05), torch.optim.Adam(net[2].parameters(), 0.01, foreach=True)]
    loader = stretto.distribute(net, optimizers, DataLoader(regression(34), batch_size=8))
    for x, y in loader:
        for optimizer in optimizers:
            optimizer.zero_grad()
        MSE(net(x.to(device)), y.to(device)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [*net.state_dict().values()]


@use("unused parameter")
def _(device: str) -> list[Tensor]:
    from thread_workers import Branching

    net = Branching().to(device)
    optimizer = sgd(net)
    data = TensorDataset(*(one.double() for one in regression(34).tensors))
    return train(net, optimizer, stretto.distribute(net, optimizer, DataLoader(data, batch_size=8)), device)


@use("averaged state of a fused optimizer")
def _(device: str) -> list[Tensor]:
    """Train with an optimizer whose counters are on the device; the second worker adopts them before its first step."""
    net = small_net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, fused=True)
    return train(net, optimizer, stretto.distribute(net, optimizer, DataLoader(regression(34), batch_size=8)), device)
