"""Runs of several worker processes, whose model and data are on the CPU or on the second device."""

from __future__ import annotations

import contextvars
import hashlib
import importlib
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import child_process
from thread_pool import thread_pool

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

    with thread_pool(workers) as pool:
        return list(pool.map(run, range(workers)))


def run_cases(
    program: str, worker: int, workers: int, folder: str, device: str, cases: list[str], carrier: str
) -> dict[str, Outcome]:
    """Run the cases in a worker's process."""
    import torch

    torch.set_num_threads(1)
    if device != "cpu":
        _use_streams()
    found = {}
    for number, case in enumerate(cases):
        run = Run(worker, workers, f"{folder}/{number}", carrier)
        found[case] = contextvars.Context().run(run.outcome, program, case, device)
    return found


def _use_streams() -> None:
    """Have copies between the second device and the host end late, as those of a GPU with pinned memory."""
    import torch

    from stretto.checkpoint import background_writer
    from stretto.training import last_model
    from stretto.transport import device_memory

    importlib.import_module("second_device")
    device_memory.STREAMS.append("far")
    for module in (device_memory, background_writer, last_model):  # none can be pinned
        module.host_memory = lambda like, _: torch.empty(like.shape, dtype=like.dtype)


@dataclass
class Run:
    """One worker's part in the run of a case; `file` is where the workers meet."""

    worker: int
    workers: int
    file: str
    carrier: str
    has_started: bool = False
    """True if the program trains."""

    @property
    def folder(self) -> Path:
        """Run directory, created."""
        folder = Path(f"{self.file}.run")
        folder.mkdir(exist_ok=True)
        return folder

    def transport(self, device: Any) -> Any:
        """Return the transport for a model on a device; a server is met over one for the CPU."""
        import torch.distributed as dist

        from stretto.transport.process_group import ProcessGroupTransport
        from stretto.transport.shared_memory import over_shared_memory
        from stretto.transport.single_worker import SingleWorkerTransport
        from tests import device_group

        if self.workers == 1:
            return self._refusing(SingleWorkerTransport(), device)
        store = dist.FileStore(self.file, self.workers)
        group = ProcessGroupTransport(store, self.worker, self.workers, TIMEOUT_S)
        if self.carrier == REFUSING:
            return self._refusing(group, device)
        if self.carrier in (GROUP, SHARING):
            device_group.register(shares_device=self.carrier == SHARING)
        return over_shared_memory(group, device)

    def _refusing(self, transport: Any, device: Any) -> Any:
        if self.carrier != REFUSING or device.type == "cpu":
            return transport
        from tests.device_transport import DeviceTransport

        return DeviceTransport(transport)

    def start(self, recipe: str, **options: Any) -> None:
        """Let the next call of `stretto.distribute` take part in a run of this recipe."""
        from stretto.training.worker_context import WorkerContext, current_context

        self.has_started, options = True, {"timeout_s": TIMEOUT_S} | options
        current_context.set(WorkerContext(self.worker, self.workers, self.transport, recipe=recipe, **options))

    def outcome(self, program: str, case: str, device: str) -> Outcome:
        """Run a case."""
        import torch

        from stretto.api import abandon, close

        torch.manual_seed(0)
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
    import torch

    from tests import device_group

    made: list[Any] = []
    plain = device_group.DeviceGroup.__init__

    def init(group: Any, *args: Any) -> None:
        plain(group, *args)
        made.append((group, _noted(group)))

    device_group.DeviceGroup.__init__ = init  # type: ignore[method-assign]
    operations(run, case, device)
    ((group, names),) = made
    return {"operations": names, "is_shut": group.is_shut, "used": torch.far.used}  # type: ignore[attr-defined]


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
    return {"state": group.state.value, "later": later}


def uses(run: Run, case: str, device: str) -> list[Any]:
    """Train in one of the ways of `device_uses`, a case of which is its name and a recipe."""
    from tests import device_uses

    name, _, recipe = case.partition(": ")
    run.start(recipe, run=run.folder)
    return device_uses.USES[name](device)


def one_device(run: Run, case: str, device: str) -> list[Any]:
    """Train by a recipe, on the CPU at the second worker."""
    return recipe(run, case, "cpu" if run.worker else device)


def simulated_recipes(cases: list[str]) -> dict[str, str]:
    """Return the recipes whose simulated workers do not have the bits of the CPU on the device, and the reason."""
    import second_device  # noqa: F401
    import torch
    from simulator.harness import simulated
    from thread_workers import regression, small_net
    from torch.utils.data import DataLoader

    import stretto
    from tests.device_uses import sgd, train

    def work(device: str) -> Any:
        def run(_: int) -> list[Any]:
            net = small_net().to(device)
            optimizer: Any = sgd(net, momentum=0.0)
            loader = stretto.distribute(net, optimizer, DataLoader(regression(34), batch_size=4))
            return [one.detach().cpu().clone() for one in train(net, optimizer, loader, device, 1)]

        return run

    wrong = {}
    for case in cases:
        try:
            near, far = (simulated(3, work(device), case).found for device in ("cpu", "far:0"))
            equal = all(map(torch.equal, *([one for each in found for one in each] for found in (near, far))))
            wrong |= {} if equal else {case: "other bits"}
        except Exception:
            wrong[case] = traceback.format_exc()
    return wrong


def host_reads(run: Run, case: str, device: str) -> dict[str, Any]:
    """Return the reads of the host in each of 12 steps of a plain loop, the first steps of an epoch left out."""
    import torch
    from second_device import HOST_READS
    from thread_workers import regression, small_net
    from torch import nn
    from torch.utils.data import DataLoader

    import stretto

    run.start(case)
    net = small_net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5, foreach=True)
    found = []
    for x, y in stretto.distribute(net, optimizer, DataLoader(regression(400), batch_size=8)):
        near, far = x.to(device), y.to(device)
        HOST_READS.clear()
        optimizer.zero_grad()
        nn.functional.mse_loss(net(near), far).backward()
        optimizer.step()
        found.append(dict(HOST_READS))
    return {"steps": found[-13:-1]}


def random_numbers(run: Run, case: str, device: str) -> list[Any]:
    """Return numbers drawn on the device in each of two epochs."""
    import torch
    from thread_workers import regression, small_net
    from torch.utils.data import DataLoader

    import stretto
    from tests.device_uses import sgd, train

    run.start("allreduce", run=run.folder)
    net = small_net().to(device)

    def evaluate(_: Any) -> dict[str, float]:
        torch.rand(5 if case == "evaluates" else 0, device=device)
        return {"zero": 0.0}

    optimizer, drawn = sgd(net), []
    loader = stretto.distribute(net, optimizer, DataLoader(regression(34), batch_size=8), evaluate=evaluate)
    for _ in range(2):
        drawn.append(torch.rand(2, device=device))
        train(net, optimizer, loader, device, 1)
    return drawn


def not_finite(run: Run, case: str, device: str) -> dict[str, Any]:
    """Train with a NaN in the loss of step 3, or of the last step; return the error and the steps that were done."""
    import torch
    from thread_workers import regression, small_net
    from torch import nn
    from torch.utils.data import DataLoader

    import stretto
    from stretto.errors import NotFiniteError

    run.start("local_sgd(every=100)")
    net, steps = small_net().to(device), 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, foreach=True)
    try:
        for x, y in stretto.distribute(net, optimizer, DataLoader(regression(48), batch_size=8)):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x.to(device)), y.to(device))
            steps += 1
            (loss * (torch.nan if steps == int(case) else 1.0)).backward()
            optimizer.step()
    except NotFiniteError as error:
        run.has_started = False
        return {"error text": str(error), "steps": steps}
    return {"error text": "", "steps": steps}


def restores_random_states() -> list[bool]:
    """Return if restored random states give the same numbers on the device, also after a message."""
    import second_device  # noqa: F401
    import torch

    from stretto.checkpoint import state_transfer

    own = state_transfer.random_states(None)
    drawn = torch.rand(3, device="far").cpu()
    found = []
    for states in (own, state_transfer.unpack_own(state_transfer.pack_own(own))):
        state_transfer.restore_random_states(states, None)
        found.append(bool(torch.equal(drawn, torch.rand(3, device="far").cpu())))
    return found


def counters_after_loading(options: dict[str, bool]) -> list[list[str]]:
    """Return the devices of Adam's state on the device, before it was saved and loaded, and afterwards."""
    import second_device  # noqa: F401
    import torch
    from thread_workers import small_net

    from stretto.checkpoint.state_transfer import load_optimizers, optimizer_tensors
    from stretto.strategies.optimizers import Optimizers

    net = small_net().to("far")
    optimizer = torch.optim.Adam(net.parameters(), foreach=not options.get("fused"), **options)
    if options.get("capturable"):  # steps of such optimizers are for CUDA alone
        optimizer.state.update({one: {"step": torch.zeros((), device="far")} for one in net.parameters()})
    else:
        net(torch.ones(2, 6, device="far")).sum().backward()
        optimizer.step()
    found = []
    for _ in range(2):
        found.append(
            [f"{name} {one.device}" for state in optimizer.state.values() for name, one in sorted(state.items())]
        )
        tensors = {name: one.cpu().clone() for name, one in optimizer_tensors(Optimizers([optimizer])).items()}
        optimizer.state = {} if not optimizer.state else optimizer.state
        load_optimizers(Optimizers([optimizer]), tensors)
    return found


def failed_operations(run: Run, case: str, device: str) -> dict[str, Any]:
    """Wait at worker 0 for a mean that worker 1 does not take part in, until an abort; return the errors.

    The device hangs in a case of this name.
    """
    import threading

    import torch
    import torch.distributed as dist

    from stretto.collective_ops import AllReduceMean
    from stretto.errors import StrettoError
    from stretto.transport.process_group import ProcessGroupTransport
    from stretto.transport.shared_memory import over_shared_memory
    from tests import device_group

    device_group.register(hangs=case == "hangs")
    store = dist.FileStore(run.file, run.workers)
    transport: Any = ProcessGroupTransport(store, run.worker, run.workers, TIMEOUT_S, elastic=True)
    transport = over_shared_memory(transport, torch.device(device), 0.5 if case == "hangs" else TIMEOUT_S)
    raised: list[str] = []

    def note(act: Any) -> None:
        try:
            act()
        except StrettoError as error:
            raised.append(type(error).__name__)

    if run.worker == 0:
        mean = transport.submit(AllReduceMean(torch.ones(3, device=device)))
        threading.Timer(0.1, transport.abort).start()
        note(mean.wait)
    else:
        note(lambda: transport.all_gather_bytes(b""))
    note(transport.close)
    return {"raised": raised}
