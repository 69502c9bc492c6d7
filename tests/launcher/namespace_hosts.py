"""Hosts for tests of several machines: network namespaces on a bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from counted_models import assert_none_is_lost
from fork_server import OWN_DISK
from safetensors.torch import load_file

from stretto.events import read_events

HUB, *HOSTS = (f"stretto-{os.getpid()}-{name}" for name in ("hub", "here", "there", "elsewhere"))
EPOCHS, LIMIT_S = 60, 120
SCRIPT = """
import pathlib, sys, time, torch, stretto, nets
assert sys.argv[1:] == ["--lr", "0.01"]
torch.manual_seed(0)
x = torch.randn(160, 8); y = x.sum(1, keepdim=True)
net = nets.net()
optimizer = torch.optim.SGD(net.parameters(), lr=float(sys.argv[2]))
data = torch.utils.data.TensorDataset(x, y, torch.arange(160))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
loader = stretto.distribute(net, optimizer, loader)
print("code in", nets.__file__, flush=True)
epochs = EPOCHS
for epoch in range(epochs):
    for a, b, numbers in loader:
        optimizer.zero_grad()
        (((net(a) - b) ** 2).mean() + nets.counted(net, numbers, epoch)).backward()
        optimizer.step()
        for _ in range(1 if epoch < epochs - 1 else 100):  # a busy machine needs longer than all epochs take
            if not pathlib.Path(ENOUGH).exists():
                time.sleep(0.12)
""".replace("EPOCHS", str(EPOCHS))
"""A script that trains slowly until there is a file, and slower still in its last epoch."""
COUNTING = """
from torch.nn import *
class Net(Linear):
    def __init__(self):
        super().__init__(8, 1)
        self.count = Embedding(160, EPOCHS)
        init.zeros_(self.count.weight)
def net():
    return Net()
def counted(net, numbers, epoch):
    return net.count(numbers)[:, epoch].sum()
"""
"""A model that counts: the gradient of a number is 1 where its sample is trained in its epoch."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Yield two hosts on a bridge: 10.79.0.1 and 10.79.0.2."""
    with bridged(HOSTS[:2]):
        yield


@pytest.fixture
def three_hosts() -> Iterator[None]:
    """Yield three hosts on a bridge: 10.79.0.1 to 10.79.0.3."""
    with bridged(HOSTS):
        yield


@pytest.fixture
def apart_hosts() -> Iterator[None]:
    """Yield three hosts, 10.79.0.1 to 10.79.0.3, of which the last two reach the first and not each other."""
    with bridged(HOSTS):
        for port in ("port1", "port2"):
            ip("-n", HUB, "link", "set", port, "type", "bridge_slave", "isolated", "on")
        yield


@pytest.fixture
def one_port_hosts() -> Iterator[None]:
    """Yield two hosts, 10.79.0.1 and 10.79.0.2; what the second one sends reaches port 7878 of the first one alone."""
    with bridged(HOSTS[:2]):
        for ports in ("1-7877", "7879-65534"):
            ip("-n", HOSTS[1], "rule", "add", "to", "10.79.0.1", "ipproto", "tcp", "dport", ports, "prohibit")
        yield


@contextmanager
def bridged(hosts: Sequence[str]) -> Iterator[None]:
    """Make hosts on a bridge."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    with ExitStack() as stack:
        for name in (HUB, *hosts):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        ip("-n", HUB, "link", "add", "bridge", "type", "bridge")
        ip("-n", HUB, "link", "set", "bridge", "up")
        for number, name in enumerate(hosts):
            port = f"port{number}"
            ip("-n", HUB, "link", "add", port, "type", "veth", "peer", "name", "uplink", "netns", name)
            ip("-n", HUB, "link", "set", port, "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.79.0.{number + 1}/24", "dev", "uplink")
            for device in ("lo", "uplink"):
                ip("-n", name, "link", "set", device, "up")
        yield


def on(host: str, *words: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "stretto.cli", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def joining(host: str, folder: Path, key: bytes, *words: str) -> Any:
    """Start `stretto join` on a host, where `folder` is empty; the key comes from standard input."""
    command = [sys.executable, "-m", "stretto.cli", "join", *words, "--key", "-"]
    hidden = [*OWN_DISK, "50%", str(folder), *command]
    return started(host, hidden, {**os.environ, "OMP_NUM_THREADS": "1"}, key)


def started(host: str, command: Sequence[str], environment: Mapping[str, str], text: bytes) -> subprocess.Popen[bytes]:
    """Start a command on a host, with this text as its standard input."""
    process = subprocess.Popen(
        ["ip", "netns", "exec", host, *command],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdin is not None
    process.stdin.write(text)
    process.stdin.close()
    process.stdin = None
    return process


def write_script(folder: Path, outside: pytest.TempPathFactory, net: str = "", epochs: int = EPOCHS) -> Path:
    """Write a script, which trains slowly until there is a file, whose path is returned.

    Its model is a `net`; the default one counts.
    """
    enough = outside.mktemp("both") / "enough"
    text = SCRIPT.replace("ENOUGH", repr(str(enough))).replace(f"epochs = {EPOCHS}", f"epochs = {epochs}")
    (folder / "train.py").write_text(text)
    counting = COUNTING.replace("EPOCHS", str(epochs))
    plain = f"from torch.nn import *\ndef net():\n    return {net}\ndef counted(*_):\n    return 0\n"
    (folder / "nets.py").write_text(plain if net else counting)
    return enough


def assert_each_sample_counts_once(run: Path, epochs: int = EPOCHS, *, by_model: bool = True) -> None:
    """Assert that the record, and a model that counts, have each sample of each epoch."""
    ended = [event for event in events(run) if event["event"] == "epoch" and not event.get("rank")]
    audits = [event["sample_counts"] for event in ended]
    assert len(audits) == epochs
    assert all((seen["once"] + seen["never"], seen["twice"]) == (160, 0) for seen in audits)
    # what a worker had that fails at the end of an epoch, or soon after it, is trained in the next one
    again = [*(seen.get("recovered_samples", 0) for seen in audits[1:]), 0]
    assert all(seen["never"] <= recovered for seen, recovered in zip(audits, again, strict=True)), audits
    if by_model:
        assert_none_is_lost(load_file(run / "final.safetensors")["count.weight"], ended)


def events(run: Path) -> list[dict[str, Any]]:
    log = run / "events.jsonl"
    return list(read_events(log)) if log.exists() else []


def generations(run: Path) -> list[list[int]]:
    return [event["members"] for event in events(run) if event["event"] == "membership" and event["what"] == "formed"]


def starts(run: Path) -> dict[int, dict[str, Any]]:
    return {event["worker"]: event for event in events(run) if event["event"] == "start"}


def until(is_so: Callable[[], bool], *processes: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < limit, f"it has not come so within {LIMIT_S} s"
        assert all(one.poll() is None for one in processes), [one.communicate()[0] for one in processes]
        time.sleep(0.05)
