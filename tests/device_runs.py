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
Outcome = dict[str, Any]
"""Facts about a case at one worker: `bits` of its final state, or the `error`."""


def results(
    program: str, workers: int, folder: Path, device: str, cases: Sequence[str], refuses: bool = False
) -> list[dict[str, Outcome]]:
    """Return the outcome of each case at each worker, whose processes run the cases one after another.

    `program` is a function of this module that is called with a case and the device. A transport that `refuses` takes
    tensors of the device alone; else it is the one that a run would have.
    """
    folder.mkdir()

    def run(worker: int) -> dict[str, Outcome]:
        arguments = (program, worker, workers, str(folder), device, list(cases), refuses)
        return child_process.call("device_runs", "run_cases", *arguments, limit_s=LIMIT_S)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run, range(workers)))


def run_cases(
    program: str, worker: int, workers: int, folder: str, device: str, cases: list[str], refuses: bool
) -> dict[str, Outcome]:
    """Run the cases in a worker's process."""
    import torch

    torch.set_num_threads(1)
    if device != "cpu":
        importlib.import_module("second_device")
    found = {}
    for number, case in enumerate(cases):
        run = Run(worker, workers, f"{folder}/{number}", refuses)
        found[case] = contextvars.Context().run(run.outcome, program, case, device)
    return found


@dataclass
class Run:
    """One worker's part in the run of a case; `file` is where the workers meet."""

    worker: int
    workers: int
    file: str
    refuses: bool

    def transport(self, device: Any) -> Any:
        """Return the transport for a model on a device; a server is met over one for the CPU."""
        import torch.distributed as dist

        from stretto.transport.process_group import ProcessGroupTransport
        from stretto.transport.shared_memory import over_shared_memory
        from stretto.transport.single_worker import SingleWorkerTransport
        from tests.device_transport import DeviceTransport

        if self.workers == 1:
            inner: Any = SingleWorkerTransport()
        else:
            store = dist.FileStore(self.file, self.workers)
            of = None if self.refuses else device
            inner = ProcessGroupTransport(store, self.worker, self.workers, TIMEOUT_S, of)
        if self.refuses:
            return DeviceTransport(inner) if device.type != "cpu" else inner
        return over_shared_memory(inner, device)

    def start(self, recipe: str, **options: Any) -> None:
        """Let the next call of `stretto.distribute` take part in a run of this recipe."""
        from stretto.training.worker_context import WorkerContext, current_context

        options = {"timeout_s": TIMEOUT_S} | options
        current_context.set(WorkerContext(self.worker, self.workers, self.transport, recipe=recipe, **options))

    def outcome(self, program: str, case: str, device: str) -> Outcome:
        """Run a case."""
        from stretto.api import abandon, close

        try:
            state = globals()[program](self, case, device)
            close()
            return {"bits": bits(state), "tensors": len(state)}
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
