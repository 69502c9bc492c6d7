"""Runs of several worker processes, whose model and data are on the CPU or on the second device."""

from __future__ import annotations

import contextvars
import hashlib
import importlib
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import child_process

TIMEOUT_S = 60.0
LIMIT_S = 300.0
LIVE, GROUP, SHARING, REFUSING = "live", "group", "sharing", "refusing"
"""Transports: that of a run; with a group of devices; with one that refuses workers that share a device; and one that
takes tensors of the device alone."""
Outcome = dict[str, Any]
"""Facts about a case at one worker: `bits` of its final state, or the `error`."""


def results(
    program: str, workers: int, folder: Path, device: str, cases: Sequence[str], carrier: str = LIVE
) -> list[dict[str, Outcome]]:
    """Return the outcome of each case at each worker, whose processes run the cases one after another.

    `program` is a function of this module that is called with a case and the device.
    """
    folder.mkdir()

    def run(worker: int) -> dict[str, Outcome]:
        arguments = (program, worker, workers, str(folder), device, list(cases), carrier)
        return child_process.call("device_runs", "run_cases", *arguments, limit_s=LIMIT_S)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, range(workers)))


def run_cases(
    program: str, worker: int, workers: int, folder: str, device: str, cases: list[str], carrier: str
) -> dict[str, Outcome]:
    """Run the cases in a worker's process."""
    import torch

    torch.set_num_threads(1)
    if device != "cpu":
        importlib.import_module("second_device")
    found = {}
    for number, case in enumerate(cases):
        run = Run(worker, workers, f"{folder}/{number}", carrier)
        found[case] = contextvars.Context().run(run.outcome, program, case, device)
    return found


@dataclass
class Run:
    """One worker's part in the run of a case; `file` is where the workers meet."""

    worker: int
    workers: int
    file: str
    carrier: str
    has_started: bool = False
    """True if the program trains."""

    def transport(self, device: Any) -> Any:
        """Return the transport for a model on a device; a server is met over one for the CPU."""
        import torch.distributed as dist

        from stretto.transport.process_group import ProcessGroupTransport
        from stretto.transport.shared_memory import over_shared_memory
        from stretto.transport.single_worker import SingleWorkerTransport
        from tests import device_group
        from tests.device_transport import DeviceTransport

        if self.workers == 1:
            alone = SingleWorkerTransport()
            return DeviceTransport(alone) if self.carrier == REFUSING and device.type != "cpu" else alone
        store = dist.FileStore(self.file, self.workers)
        group = ProcessGroupTransport(store, self.worker, self.workers, TIMEOUT_S)
        if self.carrier == REFUSING:
            return DeviceTransport(group) if device.type != "cpu" else group
        if self.carrier in (GROUP, SHARING):
            device_group.register(shares_device=self.carrier == SHARING)
        return over_shared_memory(group, device)

    def start(self, recipe: str, **options: Any) -> None:
        """Let the next call of `stretto.distribute` take part in a run of this recipe."""
        from stretto.training.worker_context import WorkerContext, current_context

        self.has_started, options = True, {"timeout_s": TIMEOUT_S} | options
        current_context.set(WorkerContext(self.worker, self.workers, self.transport, recipe=recipe, **options))

    def outcome(self, program: str, case: str, device: str) -> Outcome:
        """Run a case."""
        from stretto.api import abandon, close

        try:
            state = globals()[program](self, case, device)
            if self.has_started:
                close()
            return {"facts": state} if isinstance(state, dict) else {"bits": bits(state), "tensors": len(state)}
        except Exception:
            abandon()
            return {"error": traceback.format_exc()}


def bits(tensors: Sequence[Any]) -> str:
    """Return a digest of the bits of tensors."""
    digest = hashlib.blake2b(digest_size=8)
    for one in tensors:
        digest.update(f"{one.dtype}{tuple(one.shape)}".encode())
        digest.update(one.detach().cpu().contiguous().flatten().numpy().tobytes())
    return digest.hexdigest()


# --- programs ---------------------------------------------------------------------------------------------------------


def recipe(run: Run, case: str, device: str) -> list[Any]:
    """Train by a recipe."""
    import torch
    from thread_workers import regression, small_net
    from torch import nn
    from torch.utils.data import DataLoader

    import stretto

    run.start(case)
    net = small_net().to(device)
    if "one_bit" in case:
        optimizer: Any = torch.optim.Adam(net.parameters(), lr=0.02, foreach=True)
    else:
        momentum = 0.0 if "deep_gradient" in case else 0.5
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=momentum, foreach=True)
    loader = stretto.distribute(net, optimizer, DataLoader(regression(34), batch_size=8))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x.to(device)), y.to(device)).backward()
            optimizer.step()
    return [*net.state_dict().values()]


def operations(run: Run, case: str, device: str) -> list[Any]:
    """Return the results of operations on tensors of the device."""
    import torch

    from stretto.collective_ops import AllGather, AllReduceMean, Exchange

    rank, transport = run.worker, run.transport(torch.device(device))
    mean = torch.arange(5.0, device=device) * (rank + 1)
    found = transport.submit(AllReduceMean(mean)).wait()
    gathered = transport.submit(AllGather(torch.full((2 + rank,), rank, dtype=torch.uint8, device=device))).wait()
    pair = transport.submit(Exchange(1 - rank, torch.full((3 - rank,), 2.0, device=device))).wait()
    counts = transport.submit(AllReduceMean(torch.ones(2).to(device if run.carrier == REFUSING else "cpu"))).wait()
    assert [one.device.type for one in (found, *gathered, pair)] == ["far"] * 4
    assert torch.equal(found.cpu(), torch.arange(5.0) * 3)
    assert torch.equal(mean.cpu(), found.cpu())
    assert pair.numel() == 2 + rank
    transport.all_gather_bytes(b"")
    transport.close()
    return [found, *gathered, pair[:2], counts]


def _noted(group: Any) -> list[str]:
    """Return a list to which the names of the group's operations are added."""
    names: list[str] = []
    for name in ("allreduce", "allgather"):
        act = getattr(group, name)
        setattr(group, name, lambda *args, act=act, name=name: (names.append(name), act(*args))[1])
    return names


def group_operations(run: Run, case: str, device: str) -> dict[str, Any]:
    """Return which operations the group of the devices has carried."""
    from tests import device_group

    made: list[Any] = []
    plain = device_group.DeviceGroup.__init__

    def init(group: Any, *args: Any) -> None:
        plain(group, *args)
        made.append((group, _noted(group)))

    device_group.DeviceGroup.__init__ = init  # type: ignore[method-assign]
    operations(run, case, device)
    ((group, names),) = made
    return {"operations": names, "is_shut": group.is_shut}


def elastic_operations(run: Run, case: str, device: str) -> dict[str, Any]:
    """Abort an elastic transport with a group of devices, after a mean; return what later operations raise."""
    import torch
    import torch.distributed as dist

    from stretto.collective_ops import AllReduceMean
    from stretto.errors import BrokenTransportError
    from stretto.transport.process_group import ProcessGroupTransport
    from stretto.transport.shared_memory import over_shared_memory
    from tests import device_group

    device_group.register()
    store = dist.FileStore(run.file, run.workers)
    transport: Any = ProcessGroupTransport(store, run.worker, run.workers, TIMEOUT_S, elastic=True)
    assert over_shared_memory(transport, torch.device(device)) is transport
    mean = torch.ones(3, device=device)
    transport.submit(AllReduceMean(mean)).wait()
    assert torch.equal(mean.cpu(), torch.full((3,), 2.0))
    transport.all_gather_bytes(b"")
    group, later = transport._devices, ""
    transport.abort()
    try:
        transport.submit(AllReduceMean(mean)).wait()
    except BrokenTransportError:
        later = "BrokenTransportError"
    transport.close()
    return {"is_aborted": group.is_aborted, "later": later}
