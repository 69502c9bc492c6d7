"""Runs with a worker that does not see the run directory: its events reach the log through the coordinator."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from run_place import Place, config_of, until

from stretto.events import read_events

BEFORE = """
import msgspec
import stretto.launcher.process_specs as specs
make = specs.ProcessPlan._worker_config
def without_run(plan, number, *given):
    config = make(plan, number, *given)
    return msgspec.structs.replace(config, run=None) if number == 1 else config
specs.ProcessPlan._worker_config = without_run
"""
"""Hides the run directory from worker 1."""
SCRIPT = """
import os, pathlib, sys, time, msgspec, torch, stretto, stretto.events
write = stretto.events.EventLog.write
def noting(log, kind, t, /, **fields):
    event = {"event": kind, "t": round(t, 6), **log._process, **fields}
    with open(f"lines-{log.worker}", "ab") as file:
        file.write(msgspec.json.encode(event) + b"\\n")
    write(log, kind, t, **fields)
stretto.events.EventLog.write = noting
torch.manual_seed(0)
x = torch.randn(64, 8); y = x.sum(1, keepdim=True)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(x, y)
loader = stretto.distribute(net, optimizer, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
for epoch in range(int(sys.argv[1])):
    for a, b in loader:
        optimizer.zero_grad()
        loss = ((net(a) - b) ** 2).mean()
        loss.backward()
        optimizer.step()
        stretto.log(loss=loss.detach())
        pathlib.Path(f"training-{stretto.rank()}").write_text(str(os.getpid()))
        if pathlib.Path("fail").exists() and stretto.rank() == 1:
            raise ValueError("boom")
        if pathlib.Path("slow").exists():
            time.sleep(0.1)
"""
"""Training that notes the lines that each worker has written, in a file of its own."""
OF_OTHERS = ("membership", "fault_injected", "written", "error")


@pytest.fixture
def remote_place(place: Place) -> Place:
    """Return a place with a script, whose runs have a coordinator."""
    place.recovers = True
    (place.folder / "train.py").write_text(SCRIPT)
    return place


def start(place: Place, epochs: int, *options: str, before: str = BEFORE, out: str = "here") -> subprocess.Popen[bytes]:
    return place.stretto("run", "-n", "2", "--out", out, *options, "train.py", str(epochs), before=before)


def check_ended(run: subprocess.Popen[bytes], code: int = 0) -> str:
    _, err = run.communicate(timeout=120)
    assert run.returncode == code, err.decode()
    return err.decode()


def in_log(worker: int, folder: str = "here") -> list[dict[str, Any]]:
    """Return the events in the log that a worker's trainer has written."""
    path = Path(folder, "events.jsonl")
    events = read_events(path) if path.exists() else iter(())
    return [one for one in events if one.get("worker") == worker and one["event"] not in OF_OTHERS]


def noted(worker: int) -> list[dict[str, Any]]:
    """Return the events that a worker has noted."""
    return [json.loads(line) for line in Path(f"lines-{worker}").read_text().splitlines()]


def pid_in_training(worker: int, other_than: int = 0) -> int:
    path = Path(f"training-{worker}")
    until(lambda: path.exists() and path.read_text() not in ("", str(other_than)), limit_s=90)
    return int(path.read_text())


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_log_has_each_event_of_a_worker_without_run_directory_once_and_in_order(
    remote_place: Place, recipe: str
) -> None:
    check_ended(start(remote_place, 3, "--recipe", recipe))
    for worker in range(2):
        assert in_log(worker) == noted(worker)
    assert [one["event"] for one in in_log(1)][-1] == "end"


def test_log_equals_that_of_a_run_whose_workers_all_see_the_directory(remote_place: Place) -> None:
    check_ended(start(remote_place, 2, before="", out="seen"))
    check_ended(start(remote_place, 2))

    def facts(folder: str) -> list[Any]:
        """Return what does not depend on time."""
        kept = ("event", "process", "worker", "step", "samples", "values", "epoch", "sample_counts", "recipe", "text")
        kinds = ("progress", "warning")
        return [
            [{name: one.get(name) for name in kept} for one in in_log(worker, folder) if one["event"] not in kinds]
            for worker in range(2)
        ]

    assert facts("here") == facts("seen")
    assert {path.name for path in Path("here").iterdir()} == {path.name for path in Path("seen").iterdir()}
    written = [
        {one["worker"] for one in read_events(Path(folder, "events.jsonl")) if one["event"] == "written"}
        for folder in ("here", "seen")
    ]
    assert written == [{0, 1}] * 2


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_killed_coordinator_loses_and_repeats_no_event(remote_place: Place, recipe: str) -> None:
    Path("slow").touch()
    run = start(remote_place, 40, "--recipe", recipe)
    pid_in_training(1)
    killed: list[int] = []
    for _ in range(2):
        seen = len(in_log(1))
        until(lambda seen=seen: len(in_log(1)) > seen, limit_s=60)
        killed += coordinators(remote_place, killed)
        os.kill(killed[-1], signal.SIGKILL)
        until(lambda killed=killed: coordinators(remote_place, killed), limit_s=60)
    Path("slow").unlink()
    check_ended(run)
    for worker in range(2):
        assert in_log(worker) == noted(worker)


def coordinators(place: Place, killed: list[int]) -> list[int]:
    """Return the pid of the coordinator in a list, which is empty after it was killed."""
    return [one.pid for one in place.left() if config_of(one).get("type") == "coordinator" and one.pid not in killed]


def test_further_section_has_a_log_of_its_own(remote_place: Place) -> None:
    train = remote_place.folder / "train.py"
    train.write_text(SCRIPT + SCRIPT.partition("noting\n")[2])
    check_ended(start(remote_place, 2))
    for worker in range(2):
        sections = in_log(worker) + in_log(worker, "here/section-2")
        assert sorted(sections, key=str) == sorted(noted(worker), key=str)
        assert len(in_log(worker, "here/section-2")) > len(sections) / 3


def test_restarted_worker_continues_in_the_log(remote_place: Place) -> None:
    Path("slow").touch()
    run = start(remote_place, 40)
    killed = pid_in_training(1)
    until(lambda: in_log(1), limit_s=60)
    os.kill(killed, signal.SIGKILL)
    pid_in_training(1, other_than=killed)
    Path("slow").unlink()
    check_ended(run)
    there, wrote = in_log(1), noted(1)
    (_, second) = [place for place, one in enumerate(wrote) if one["event"] == "start"]
    count = len(wrote) - second
    assert there[-count:] == wrote[second:]
    assert there[:-count] == wrote[: len(there) - count], "the killed process has lost its last events only"


def test_error_of_a_worker_without_run_directory_is_in_the_log(remote_place: Place) -> None:
    run = start(remote_place, 4000)
    pid_in_training(1)
    Path("fail").touch()
    assert "worker 1 failed: ValueError: boom" in check_ended(run, 1)
    errors = [one for one in read_events(Path("here/events.jsonl")) if one["event"] == "error" and one["worker"] == 1]
    assert [one["text"] for one in errors] == ["boom"]
    assert in_log(1) == noted(1)
