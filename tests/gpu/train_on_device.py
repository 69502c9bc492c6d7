"""A plain loop on a device, for tests on GPUs and, reduced, on machines without one.

Each worker prints a line with its device and a digest of the model's bits. `--kill 1` sends SIGKILL to the last rank of
worker 1 in its second epoch, while the others wait for it; a restarted worker does not get it again. With `--stop` the
signal is SIGSTOP. `--width` is the number of features between the two layers. `far` is the second device of the tests,
with a group of its own. The device `nccl` is the first GPU, at which each worker counts as a host of its own, so that
NCCL accepts several of them. `--loop` changes the loop: `scaled` computes in half precision and scales the loss,
`compiled` calls the model through torch.compile, `meta` builds it without memory, `default` makes the device torch's
default.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.process_config import WorkerConfig, worker_config

SAMPLES = 256


def device_of(name: str) -> torch.device:
    """Return the device, and register that of the tests."""
    if name == "nccl":
        os.environ["NCCL_HOSTID"] = f"process {os.getpid()}"
        return torch.device("cuda", 0)
    if name == "far":
        import device_group
        import second_device  # noqa: F401

        device_group.register()
        return torch.device("far", 0)
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def main() -> None:
    """Train, and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--kill", type=int, default=-1)
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--loop", choices=["plain", "scaled", "compiled", "meta", "default"], default="plain")
    options = parser.parse_args()
    device, config = device_of(options.device), worker_config() or WorkerConfig()
    torch.manual_seed(0)
    if options.loop == "default":
        torch.set_default_device(device)
    generator = torch.Generator(torch.get_default_device()) if device.type != "far" else None
    x = torch.randn(SAMPLES, 16)
    data = TensorDataset(x, x @ torch.randn(16, 4))
    scaled = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=options.loop == "scaled")
    half = torch.autocast(device.type, torch.float16, enabled=options.loop == "scaled")
    with torch.device("meta" if options.loop == "meta" else device):
        net = nn.Sequential(nn.Linear(16, options.width), nn.Tanh(), nn.Linear(options.width, 4))
    call = torch.compile(net) if options.loop == "compiled" else net
    optimizer = torch.optim.SGD(net.parameters(), lr=1.28 / options.width, momentum=0.5, foreach=True)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"loss": float(nn.functional.mse_loss(model(x.to(device)), data.tensors[1].to(device)))}

    is_shuffled = options.loop != "default" or device.type != "far"  # which has no generators of its own
    batches = DataLoader(data, batch_size=options.batch, shuffle=is_shuffled, generator=generator)
    with device:  # of a model that was built without memory
        loader = stretto.distribute(net, optimizer, batches, evaluate=evaluate)
    for epoch in range(options.epochs):
        for step, (inputs, targets) in enumerate(loader):
            place = (config.worker, config.rank, config.incarnation)
            if (epoch, step) == (1, 3) and place == (options.kill, config.ranks - 1, 0):
                os.kill(os.getpid(), signal.SIGSTOP if options.stop else signal.SIGKILL)
            optimizer.zero_grad()
            with half:
                loss = nn.functional.mse_loss(call(inputs.to(device)), targets.to(device))
            scaled.scale(loss).backward()
            scaled.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            scaled.step(optimizer)
            scaled.update()
    state = b"".join(one.detach().cpu().numpy().tobytes() for one in net.state_dict().values())
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    print(f"worker {config.worker} on {place}: state {hashlib.blake2b(state, digest_size=8).hexdigest()}", flush=True)


main()
