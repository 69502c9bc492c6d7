"""Launchers that joined a run whose coordinator no longer answers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespace_hosts import starts
from run_place import Place, until

from stretto.errors import LaunchError
from stretto.launcher.silence import Silence
from stretto.run_config import RunConfig

OPTIONS = RunConfig(Path("train.py"), failure_timeout_s=3.0, timeout_s=60.0)
SCRIPT = """
import time, torch, stretto
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(160, 8))
loader = stretto.distribute(net, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
for epoch in range(10_000):
    for (a,) in loader:
        optimizer.zero_grad()
        net(a).mean().backward()
        optimizer.step()
        time.sleep(0.02)
"""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def address(listener: socket.socket) -> str:
    return "{}:{}".format(*listener.getsockname())


def test_silence_is_noted_once_and_ends_the_join_after_the_limit(listener: socket.socket) -> None:
    noted = list[str]()
    silence = Silence(address(listener), OPTIONS, noted.append)
    silence.check(1, 0.5)
    for _ in range(110):
        silence.check(1, 0.5)
    (line,) = noted
    assert line.startswith(f"the coordinator at {address(listener)}: no reply since ")
    assert line.endswith(" (--timeout 60s of stretto run)")
    silence.check(2, 0.5)
    assert noted[1:] == [f"the coordinator at {address(listener)} answers again"]
    for _ in range(119):
        silence.check(2, 0.5)
    with pytest.raises(LaunchError, match="does not answer\n  got: no reply since .*\n.*within --timeout 60s"):
        silence.check(2, 0.5)
    assert len(noted) == 3


def test_refused_connections_end_the_join_after_the_failure_timeout(listener: socket.socket) -> None:
    noted = list[str]()
    closed = address(listener)
    silence = Silence(closed, OPTIONS, noted.append)
    listener.close()
    for _ in range(5):
        silence.check(0, 0.5)
    with pytest.raises(LaunchError, match=f"its launcher was killed\n.*{closed} refuses connections"):
        silence.check(0, 0.5)
    assert not noted


def test_join_ends_with_one_error_if_the_launcher_of_the_run_is_killed(place: Place) -> None:
    (place.folder / "train.py").write_text(SCRIPT)
    run, place.recovers = place.folder / "run", True
    options = ["-n", "1", "--recipe", "local_sgd(every=2)", "--listen", "127.0.0.1", "--failure-timeout", "2s"]
    here = place.stretto("run", *options, "--out", "run", "train.py", stderr=subprocess.STDOUT)
    until(lambda: 0 in starts(run))
    place_of_run = json.loads((run / "join.key").read_text())["address"]
    guest = place.stretto("join", place_of_run, "--key", run / "join.key", stderr=subprocess.STDOUT)
    until(lambda: 1 in starts(run))
    os.kill(here.pid, signal.SIGKILL)
    said = guest.communicate(timeout=60)[0].decode()
    assert guest.returncode == 1, said
    assert said.count("the run has ended: its launcher was killed") == 1, said
    assert f"{place_of_run} refuses connections" in said and "Traceback" not in said, said
