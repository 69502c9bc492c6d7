"""Programs on the second device, which tests run in child processes. Importing this module registers the device."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import second_device
import torch
from torch import Tensor, nn

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 1e-2),
}


def _net(autocast: bool) -> nn.Module:
    if autocast:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    convolution = [nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3), nn.Flatten()]
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), *convolution, nn.Linear(9, 2))


def _trained(device: str, optimizer: str, clips: bool, scales: bool, autocast: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net = _net(autocast).to(device)
    made = OPTIMIZERS[optimizer](net.parameters())
    for group in made.param_groups:
        group["foreach"] = not group.get("fused")  # the default differs between devices
    scaler = torch.amp.GradScaler(device.partition(":")[0], enabled=scales)
    source = torch.Generator().manual_seed(1)
    for _ in range(4):
        x = torch.randn(4, 6, generator=source).to(device)
        y = torch.randint(0, 2, (4,), generator=source).to(device)
        made.zero_grad()
        with torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(net(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(made)
        if clips:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(made)
        scaler.update()
    state = [value for one in made.state.values() for value in one.values()]
    return [one.detach().cpu() for one in (*net.state_dict().values(), *state)]


def trains_alike(optimizer: str, clips: bool, scales: bool, autocast: bool) -> bool:
    """Return True if a network and its optimizer have the same bits after training on the CPU and on the device."""
    near, far = (_trained(device, optimizer, clips, scales, autocast) for device in ("cpu", "far:0"))
    return len(near) == len(far) and all(map(torch.equal, near, far))


def crossings() -> dict[str, str]:
    """Return the error of each operation that must refuse a CPU tensor beside one of the device."""
    far, near = torch.zeros(3, device="far"), torch.ones(3)
    acts: dict[str, Callable[[], Any]] = {
        "sum": lambda: far + near,
        "in place": lambda: near.add_(far),
        "number in place": lambda: torch.tensor(1.0).add_(far.sum()),
        "out": lambda: torch.mul(far, 2.0, out=near),
        "cat": lambda: torch.cat([far, near]),
        "index": lambda: far[torch.tensor([0, 1])],
        "matmul": lambda: far @ near,
        "layer": lambda: nn.Linear(3, 1)(far),
        "foreach": lambda: torch._foreach_add_([far], [near]),
        "numpy": lambda: far.numpy(),
    }
    errors = dict.fromkeys(acts, "")
    for name, act in acts.items():
        try:
            act()
        except (RuntimeError, TypeError) as error:
            errors[name] = str(error)
    return errors


def allowed() -> dict[str, bool]:
    """Return, for operations of one device and copies between two, whether the result is right."""
    far = torch.arange(6.0, device="far").view(2, 3)
    near = torch.arange(6.0).view(2, 3)
    flat = torch.zeros(6, device="far")
    parameter = nn.Parameter(torch.zeros(2, 3, device="far"))
    parameter.data = flat.view(2, 3)
    flat += 1.0
    file = io.BytesIO()
    torch.save(far, file)
    file.seek(0)
    return {
        "number of the CPU": bool(torch.equal((far * torch.tensor(2.0)).cpu(), near * 2)),
        "to and back": bool(torch.equal(near.to("far").cpu(), near)),
        "copy": bool(torch.equal(torch.empty(2, 3).copy_(far), near)),
        "views share memory": bool(torch.equal(parameter.detach().cpu(), torch.ones(2, 3))),
        "empty out": bool(torch.equal(torch.add(far, far, out=torch.empty(0, device="far")).cpu(), near + near)),
        "resize": far.clone().resize_(3, 3).shape == (3, 3),
        "module": next(copy.deepcopy(nn.Linear(2, 2)).to("far").parameters()).device.type == "far",
        "saved": bool(torch.equal(torch.load(file, map_location="cpu"), near)),
        "shown": "device='far:0'" in repr(far),
        "pinned": bool(torch.equal(near.pin_memory(), near)),
    }


def random_numbers() -> list[bool]:
    """Return if the device has random numbers of its own, which `torch.manual_seed` and its state set."""
    torch.manual_seed(3)
    near = torch.rand(4)
    state = torch.far.get_rng_state()  # type: ignore[attr-defined]
    first = torch.rand(4, device="far").cpu()
    torch.far.set_rng_state(state)  # type: ignore[attr-defined]
    again = torch.rand(4, device="far").cpu()
    return [bool(torch.equal(near, first)), bool(torch.equal(first, again))]


def host_reads() -> dict[str, int]:
    """Return the counted reads of the host, of one of each kind."""
    far = torch.ones(3, device="far")
    second_device.HOST_READS.clear()
    far.sum().item()
    far.cpu()
    bool(far[0] > 0)
    torch.equal(far, far)
    far.add_(1.0)
    torch.zeros(3).to("far")
    return dict(second_device.HOST_READS)


def backward_thread() -> bool:
    """Return True if a backward pass runs hooks in another thread, as on a GPU."""
    import threading

    seen = list[int]()
    parameter = nn.Parameter(torch.ones(3, device="far"))
    parameter.register_post_accumulate_grad_hook(lambda _: seen.append(threading.get_ident()))
    parameter.sum().backward()
    return seen != [threading.get_ident()]
