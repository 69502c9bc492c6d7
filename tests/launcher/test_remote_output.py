"""Output, exit codes and errors of workers that joined a run by a key reach the launcher of the run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from namespace_hosts import events, starts
from run_place import Place, coordinators, until

SCRIPT = """
import os, pathlib, sys, time, torch, stretto
here = pathlib.Path(os.environ["BESIDE"])
torch.manual_seed(0)
x = torch.randn(64, 8); y = x.sum(1, keepdim=True)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(x, y)
loader = stretto.distribute(net, optimizer, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
print("worker", stretto.rank(), "\\x1b[2J", flush=True)
def step(a, b):
    optimizer.zero_grad()
    ((net(a) - b) ** 2).mean().backward()
    optimizer.step()
    if (here / "fail").exists() and stretto.rank() == 1:
        raise ValueError("boom \\x1b[2J")
for epoch in range(200):
    print("epoch", epoch, "of", stretto.rank(), flush=True)
    for a, b in loader:
        step(a, b)
        if (here / "slow").exists():
            time.sleep(0.02)
if (here / "long").exists():
    print("." * 600_000 + "end", flush=True)
"""
TOGETHER: dict[str, Any] = {"stderr": subprocess.STDOUT}


@pytest.fixture
def beside(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for signals to the scripts, which begin slowly."""
    folder = tmp_path_factory.mktemp("beside")
    monkeypatch.setenv("BESIDE", str(folder))
    (folder / "slow").touch()
    return folder


def joined(place: Place, *options: str) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """Start a run of one worker, and a worker that joins it."""
    place.recovers = True
    (place.folder / "train.py").write_text(SCRIPT)
    words = ["-n", "1", "--recipe", "local_sgd(every=2)", "--listen", "127.0.0.1", "--out", "run", *options]
    here = place.stretto("run", *words, "train.py", **TOGETHER)
    until(lambda: Path("run/coordinator.wal").exists() and 0 in starts(Path("run")), limit_s=90)
    address = json.loads(Path("run/join.key").read_text())["address"]
    guest = place.stretto("join", address, "--key", "run/join.key", **TOGETHER)
    until(lambda: 1 in starts(Path("run")), limit_s=90)
    return here, guest


def test_log_of_a_joined_worker_is_in_the_run_folder_and_its_output_on_the_terminal(place: Place, beside: Path) -> None:
    here, guest = joined(place, "--output", "all")
    (killed,) = coordinators(place)
    os.kill(killed, signal.SIGKILL)
    until(lambda: coordinators(place) not in ([], [killed]), limit_s=60)
    (beside / "slow").unlink()
    said = [one.communicate(timeout=90)[0] for one in (here, guest)]
    assert (here.returncode, guest.returncode) == (0, 0), said
    lines = Path("run/worker-1.log").read_text().splitlines()
    (own,) = Path("runs").glob("*/worker-1.log")
    assert "worker 1 \x1b[2J" in own.read_text() and "worker 1 ?[2J" in lines
    assert own.read_text().replace("\x1b", "?").splitlines() == lines
    epochs = [line for line in lines if line.startswith("epoch")]
    assert epochs[-1] == "epoch 199 of 1" and len(set(epochs)) == len(epochs)
    shown = [line.split("] ")[1] for line in said[0].decode().splitlines() if line.startswith("[1] epoch")]
    assert shown == epochs
    assert b"\x1b[2J" not in b"".join(line for line in said[0].splitlines() if b"[1]" in line)
    assert b"epoch 199 of 1" not in said[1]


def test_last_output_of_a_joined_worker_is_in_the_run_folder_before_the_run_ends(place: Place, beside: Path) -> None:
    """The output is longer than several messages, so that its end is still on its way when the worker exits."""
    here, guest = joined(place)
    (beside / "long").touch()
    (beside / "slow").unlink()
    said = [one.communicate(timeout=90)[0] for one in (here, guest)]
    assert (here.returncode, guest.returncode) == (0, 0), said
    assert Path("run/worker-1.log").read_text().endswith("." * 600_000 + "end\n")


def test_error_of_a_joined_worker_is_shown_at_the_launcher_with_its_traceback(place: Place, beside: Path) -> None:
    here, guest = joined(place)
    (beside / "fail").touch()
    said_there = guest.communicate(timeout=90)[0].decode()
    assert guest.returncode == 1 and "worker 1 failed: ValueError: boom" in said_there
    until(lambda: any(event.get("what") == "failed" for event in events(Path("run"))), limit_s=60)
    (beside / "slow").unlink()
    said = here.communicate(timeout=90)[0].decode()
    assert here.returncode == 0, said
    assert "worker 1 failed (ValueError: boom ?[2J)" in said and "continuing with 1 worker" in said
    assert 'raise ValueError("boom' in said and "boom \x1b" not in said + said_there
    (failed,) = [event for event in events(Path("run")) if event.get("what") == "failed"]
    assert failed["why"] == "ValueError: boom \x1b[2J"
    log = Path("run/coordinator.log").read_text()
    assert "worker 1 failed (ValueError: boom" in log and 'raise ValueError("boom' in log


def test_signal_that_killed_a_joined_worker_is_named_at_the_launcher(place: Place, beside: Path) -> None:
    here, guest = joined(place)
    os.kill(starts(Path("run"))[1]["pid"], signal.SIGKILL)
    until(lambda: any(event.get("what") == "failed" for event in events(Path("run"))), limit_s=60)
    log = Path("run/worker-1.log")
    until(lambda: log.exists() and "stretto: restart 1 of worker 1" in log.read_text(), limit_s=60)
    (beside / "slow").unlink()
    said = [one.communicate(timeout=90)[0].decode() for one in (here, guest)]
    assert (here.returncode, guest.returncode) == (0, 0), said
    assert "worker 1 failed (killed by SIGKILL)" in said[0]
