"""A plain loop whose model counts: its embedding says how often each sample was trained, whatever the record says.

The gradient of `count` is exactly 1 for each sample, in the column of the epoch, and its learning rate is 1. At the end
of each epoch, FOLDER has the counts so far with a digest of the model, and the shares that this worker had in the means
of its rounds.
`--strike 1:KILL:stepped:3` sends SIGKILL to worker 1 after its third step, and `--strike 1:KILL:stepped:3:shard` makes
it send that to a shard. `1.2` is process 2 of worker 1. PAUSE is SIGSTOP, and SIGCONT a second later; FILL fills the
disk of the run folder; CUT shuts down all connections of the worker. AHEAD and BACK move the worker's time of day by an
hour, SKIP its other clocks forward by half a minute, as a virtual machine that was paused may find them. SUSPEND stops
all processes of the worker's host for five seconds. `1:KILL:stepped:3:host` kills these, for a run over network
namespaces of `benchmarks/laboratory.py`; DOWN takes the link of that host down, AWAY for four seconds, FLAP for one.
JOIN starts `stretto join` with a worker more.
A launcher is not struck before there is a checkpoint to continue from.
With `--proxy`, the worker's connections to the coordinator and to the shards, and those by which it sends to other
workers, go through a proxy, and `--strike 1:STALL:stepped:3:proxy` begins a trouble there (`benchmarks/proxy.py`).
"""

import argparse
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
from noted_shares import NotedShares, write_counts
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import stretto
from stretto.parameter_server.client import ParameterServerClient
from stretto.process_config import WorkerConfig, worker_config
from stretto.transport.elastic import ElasticTransport
from stretto.transport.secure_connections import Address, SendingConnection

BATCH = 8
CLOCKS: dict[str, tuple[int, *tuple[str, ...]]] = {
    "AHEAD": (3600, "time"),
    "BACK": (-3600, "time"),
    "SKIP": (30, "monotonic", "perf_counter"),
}
"""Faults that move clocks: by how many seconds, and which."""
LINKS = {"DOWN": 0, "AWAY": 4, "FLAP": 1}
"""Faults of a host's link: seconds until it is up again; 0 for never."""
QUIET: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
LISTEN_S = 10.0
"""Limit of the wait for a process that is restarted to listen again."""
parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--samples", type=int, default=240)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--data", choices=("loader", "stream", "list", "numbers"), default="loader")
parser.add_argument("--deal", help="as of stretto.distribute")
parser.add_argument("--divided", action="store_true", help="a model that every layout can divide")
parser.add_argument("--adam", action="store_true", help="step with Adam, under which nothing is counted")
parser.add_argument("--accumulate", type=int, default=1, help="batches in a step")
parser.add_argument("--tail", action="store_true", help="step with the last batches of an epoch, too")
parser.add_argument("--drop", action="store_true", help="drop gradients that an epoch leaves without a step")
parser.add_argument("--best", action="store_true", help="save the model of every epoch, as the best so far")
parser.add_argument("--evaluate", type=int, help="steps between two evaluations; 0 for one at the end of each epoch")
parser.add_argument("--loaders", type=int, default=0, help="processes that load")
parser.add_argument(
    "--strike", action="append", default=[], help="WORKER:SIGNAL:PHASE:AT[:shard|coordinator|launcher|proxy|host]"
)
parser.add_argument("--proxy", help="address of benchmarks/proxy.py")
parser.add_argument("--pause", type=float, default=0.0, help="seconds that a batch takes longer")
parser.add_argument("--until-back", action="store_true", help="pause only until a worker returns or joins")
parser.add_argument("--steps", type=int, help="steps that each process counts itself, after which its loop ends")
arguments = parser.parse_args()
config = worker_config() or WorkerConfig()
passed = dict.fromkeys(("begun", "computed", "stepped", "ended", "exchange", "operation", "commit"), 0)


def pass_phase(phase: str) -> None:
    """Count a phase, and carry out the faults that are due at its number."""
    passed[phase] += 1
    for strike in arguments.strike:
        worker, name, at, number, *who = strike.split(":")
        worker, _, rank = worker.partition(".")
        if (int(worker), int(rank or 0), at) != (config.worker, config.rank, phase):
            continue
        is_due = passed[phase] == int(number)
        if who == ["launcher"] or (who == ["host"] and name == "KILL" and host() == "0"):
            saved = [*Path(config.run or "").glob("checkpoints/[!.]*/manifest.json")]
            is_due = passed[phase] >= int(number) and bool(saved)
        is_due &= who != ["coordinator"] or config.coordinator is not None  # a run of one process has none
        done = arguments.folder / f"sent-{strike}"
        if not is_due or done.exists():
            continue
        done.touch()
        launcher = psutil.Process(os.getppid())
        pid = launcher.pid if who == ["launcher"] else os.getpid()
        if who in (["shard"], ["coordinator"]):
            addresses = {"shard": config.servers[1:], "coordinator": (config.coordinator or "",)}[who[0]]
            pid = listener(launcher, int(addresses[0].rpartition(":")[2]))
        if who == ["proxy"]:
            ask_proxy(trouble=name)
            continue
        if who == ["host"]:
            strike_host(name)
            continue
        if name == "FILL":
            fill_disk(Path(config.run or ""))
            continue
        if name == "CUT":
            cut_connections()
            continue
        if name == "JOIN":
            joining = [sys.executable, "-m", "stretto.cli", "join", config.run or ""]
            subprocess.Popen(joining, start_new_session=True, **QUIET)
            continue
        if name in CLOCKS:
            move_clocks(*CLOCKS[name])
            continue
        if name == "SUSPEND":
            suspend([launcher, *launcher.children(recursive=True)])
            continue
        if name == "PAUSE":
            later(1, f"kill -CONT {pid}")
        os.kill(pid, getattr(signal, f"SIG{name.replace('PAUSE', 'STOP')}"))


def later(seconds: int, command: str) -> None:
    """Run a command of the shell later, also if this worker has ended by then, with its process group."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; {command}"], start_new_session=True, **QUIET)


def ask_proxy(**request: Any) -> list[str]:
    """Return the reply of the proxy to a request of this process."""
    host, _, port = arguments.proxy.rpartition(":")
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rw") as lines:
        lines.write(json.dumps({"worker": f"{config.worker}.{config.rank}", **request}) + "\n")
        lines.flush()
        return list(json.loads(lines.readline()))


connect_directly = SendingConnection.__init__


def connect_through_proxy(connection: SendingConnection, address: Address, *given: Any) -> None:
    """Make a connection to another worker lead through the proxy, unless a relay passes it on."""
    family, place = address
    if family != socket.AF_UNIX:
        host, _, port = ask_proxy(addresses=[f"{place[0]}:{place[1]}"])[0].rpartition(":")
        place = host, int(port), *place[2:]
    connect_directly(connection, (family, place), *given)


def ip(*words: str) -> str:
    """Return what `ip` prints, such as about network namespaces."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout.strip()


def host() -> str:
    """Return the number of this process's host in the laboratory."""
    return ip("netns", "identify").rpartition("-")[2]


def strike_host(name: str) -> None:
    """Kill all processes of this process's host, this one last, or take the link of the host down."""
    namespace = ip("netns", "identify")
    if name == "KILL":
        for pid in sorted(map(int, ip("netns", "pids", namespace).split()), key=os.getpid().__eq__):
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, signal.SIGKILL)
    prefix, _, number = namespace.rpartition("-")
    set_link = ["ip", "-n", f"{prefix}-hub", "link", "set", f"port{number}"]
    subprocess.run([*set_link, "down"], check=True)
    if LINKS[name]:
        later(LINKS[name], f"{' '.join(set_link)} up")


def listener(launcher: psutil.Process, port: int) -> int:
    """Return the process of the run, other than its launcher, that listens at a port; wait while it is restarted.

    A fork server has the socket for a moment, too, in another folder.
    """
    limit = time.monotonic() + LISTEN_S
    while time.monotonic() < limit:
        for child in launcher.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
                listens = any(one.status == "LISTEN" and one.laddr.port == port for one in child.net_connections())
                if listens and child.cwd() == launcher.cwd():
                    return child.pid
        time.sleep(0.02)
    raise ProcessLookupError(f"no process listens at {port}")


def cut_connections() -> None:
    """Shut down the connections of this process to others, which learn of it as of a router that has restarted."""
    for one in psutil.Process().net_connections("tcp"):
        if one.status == "ESTABLISHED":
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)


def move_clocks(by_s: int, *names: str) -> None:
    """Move clocks of this process, for all that reads them through the module `time`."""
    for name, by in [(name, by_s) for name in names] + [(f"{name}_ns", by_s * 10**9) for name in names]:
        setattr(time, name, functools.partial(lambda read, by: read() + by, getattr(time, name), by))


def suspend(run: list[psutil.Process]) -> None:
    """Stop all processes of a run, this one last; they continue five seconds later."""
    others = [one for one in run if one.pid != os.getpid()]
    later(5, f"kill -CONT {' '.join(str(one.pid) for one in run)}")
    for one in others:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            one.suspend()
    os.kill(os.getpid(), signal.SIGSTOP)


def fill_disk(folder: Path) -> None:
    """Write zeros until the disk is full."""
    with (folder / "fill").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def count_calls(owner: Any, name: str, before: str = "", after: str = "") -> None:
    """Count the calls of a method as phases, before and after."""
    call = getattr(owner, name)

    def counted(*given: Any, **named: Any) -> Any:
        if before:
            pass_phase(before)
        found = call(*given, **named)
        if after:
            pass_phase(after)
        return found

    setattr(owner, name, counted)


if arguments.proxy and config.coordinator is not None:
    coordinator, *servers = ask_proxy(addresses=[config.coordinator, *config.servers])
    proxied = msgspec.structs.replace(config, coordinator=coordinator, servers=tuple(servers), keys=None)
    os.environ.update(proxied.environment())
    SendingConnection.__init__ = connect_through_proxy  # type: ignore[method-assign]
count_calls(ElasticTransport, "attempt", before="exchange", after="commit")
count_calls(ParameterServerClient, "push", before="exchange")
count_calls(ParameterServerClient, "settle", after="commit")
for transport in (ElasticTransport, ParameterServerClient):
    count_calls(transport, "submit", before="operation")

torch.manual_seed(1)
inputs, numbers = torch.randn(arguments.samples, 4), torch.arange(arguments.samples)


class Sum(nn.Module):
    """Its input, and a line of it that has no part in the input's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(arguments.epochs, arguments.epochs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum: (batch, epochs)."""
        return x + 1e-3 * self.line(x.detach())


count = nn.Embedding(arguments.samples, arguments.epochs)
nn.init.zeros_(count.weight)
body = Sum() if arguments.divided else nn.Linear(4, 2)
model: Any = nn.Sequential()
model.add_module("count", count)
model.add_module("body", body)
optimizer: Any = torch.optim.Adam(model.parameters()) if arguments.adam else torch.optim.SGD(model.parameters(), lr=1.0)
epoch = 0
back = arguments.folder / "back"
"""File that is there once a killed or joining worker is in the loop."""
noted = NotedShares(arguments.folder, config.worker)
data = TensorDataset(inputs, numbers)


class Stream(IterableDataset[Any]):
    """The samples one after another; with `deal="own"` those of this worker alone."""

    def __iter__(self) -> Iterator[Any]:
        first, step = (config.worker, config.world_size) if arguments.deal == "own" else (0, 1)
        return iter([data[number] for number in range(first, arguments.samples, step)])


batches = [data[first : first + BATCH] for first in range(0, arguments.samples, BATCH)]
sources: dict[str, Any] = {  # a divided model weighs a sample by BATCH: its batches are whole
    "loader": DataLoader(
        data, batch_size=BATCH, shuffle=True, num_workers=arguments.loaders, drop_last=arguments.divided
    ),
    "stream": DataLoader(Stream(), batch_size=BATCH),
    "list": batches,
    "numbers": range(len(batches)),
}


def evaluate(evaluated: nn.Module) -> dict[str, float]:
    """Return the mean of all counts."""
    return {"mean": -float(evaluated.get_parameter("count.weight").detach().mean())}


best = stretto.checkpointed(epoch=-1)
loader = stretto.distribute(
    model,
    optimizer,
    sources[arguments.data],
    deal=arguments.deal,
    evaluate=evaluate if arguments.evaluate is not None else None,
    evaluate_every=arguments.evaluate or None,
)
for epoch in range(arguments.epochs):
    for number, batch in enumerate(loader, 1):
        x, indices = batches[batch] if arguments.data == "numbers" else batch
        noted.add(epoch, indices.tolist())
        pass_phase("begun")
        is_step = number % arguments.accumulate == 0 or (arguments.tail and stretto.is_last_batch())
        if arguments.divided:
            loss = model(indices)[:, epoch].mean() * BATCH
        else:
            loss = 0.01 * body(x).square().mean() + count(indices)[:, epoch].sum()
        if is_step:
            loss.backward()
        else:
            with stretto.no_sync():
                loss.backward()
        pass_phase("computed")
        if is_step:
            optimizer.step()
            optimizer.zero_grad()
            pass_phase("stepped")
        if config.joins:
            back.touch()
        if not (arguments.until_back and back.exists()):
            time.sleep(arguments.pause)
        if passed["stepped"] == arguments.steps:
            break
    pass_phase("ended")
    if arguments.drop:
        optimizer.zero_grad()
    if not stretto.is_resuming():
        state = model.state_dict()
        if arguments.best and epoch > best.epoch:
            best.epoch = epoch
            stretto.save({"epoch": epoch, "counts": state["count.weight"]}, arguments.folder / "best.pt")
        if config.rank == 0:
            write_counts(arguments.folder, epoch + 1, config.worker, state)
