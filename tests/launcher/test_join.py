"""Workers of other hosts join a run, and are separated from it: network namespaces stand for the hosts.

Errors of runs with `--host` and of joining hosts are tested without starting processes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from run_place import Place, config_of

from stretto.errors import LaunchError
from stretto.events import read_events
from stretto.launcher.config import check
from stretto.launcher.endpoints import servers_for
from stretto.launcher.join import JOIN_INFO, JoinRequest, plan_of_join, write_join_info
from stretto.process_config import WorkerConfig
from stretto.run_config import RunConfig

SCRIPT = """
import pathlib, time, torch, stretto
torch.manual_seed(0)
x = torch.randn(320, 8); y = x.sum(1, keepdim=True)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
loader = stretto.distribute(net, optimizer, loader)
for epoch in range(60):
    for a, b in loader:
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
        if not pathlib.Path("enough").exists():
            time.sleep(0.06)
"""
PATIENCE_S = 1.0
HUB, *HOSTS = (f"stretto-{os.getpid()}-{name}" for name in ("hub", "here", "there"))


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


@pytest.fixture
def hosts() -> Iterator[None]:
    """Yield two hosts on a bridge: 10.79.0.1 and 10.79.0.2."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    with ExitStack() as stack:
        for name in (HUB, *HOSTS):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        ip("-n", HUB, "link", "add", "bridge", "type", "bridge")
        ip("-n", HUB, "link", "set", "bridge", "up")
        for number, name in enumerate(HOSTS):
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


def events(run: Path) -> list[dict[str, Any]]:
    log = run / "events.jsonl"
    return list(read_events(log)) if log.exists() else []


def generations(run: Path) -> list[list[int]]:
    return [event["members"] for event in events(run) if event["event"] == "membership" and event["what"] == "formed"]


def until(is_so: Callable[[], bool], *processes: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < limit, "it has not come so within 60 s"
        assert all(one.poll() is None for one in processes), [one.communicate()[0] for one in processes]
        time.sleep(0.05)


def test_one_side_of_a_partitioned_network_continues_and_the_other_rejoins(place: Place, hosts: None) -> None:
    (place.folder / "train.py").write_text(SCRIPT)
    run = place.folder / "run"
    options = ["--recipe", "local_sgd(every=2)", "--failure-timeout", f"{PATIENCE_S}s", "--host", "10.79.0.1"]
    here = on(HOSTS[0], "run", "-n", "2", *options, "--out", "run", "train.py")
    until(lambda: generations(run) != [], here)
    there = on(HOSTS[1], "join", "run", "-n", "2")
    both = here, there
    until(lambda: {2, 3} <= {event["worker"] for event in events(run) if event["event"] == "start"}, *both)
    assert [0, 1, 2, 3] in generations(run)

    ip("-n", HUB, "link", "set", "port1", "nomaster")
    before = len(generations(run))
    until(lambda: "worker 3 stops itself" in (run / "events.jsonl").read_text(), *both)
    until(lambda: "worker 2 stops itself" in (run / "events.jsonl").read_text(), *both)
    assert generations(run)[-1] == [0, 1]
    alone = generations(run)[before:]
    assert all(set(members) >= {0, 1} for members in alone), "only the side with the coordinator continues"

    ip("-n", HUB, "link", "set", "port1", "master", "bridge")
    until(lambda: generations(run)[-1] == [0, 1, 2, 3], *both)
    (place.folder / "enough").touch()
    for one in both:
        said, _ = one.communicate(timeout=60)
        assert one.returncode == 0, said
    audits = [event["sample_counts"] for event in events(run) if event["event"] == "epoch"]
    assert len(audits) == 60
    assert all((seen["once"], seen["twice"], seen["never"]) == (320, 0, 0) for seen in audits)
    joined = [(event["worker"], event["incarnation"]) for event in events(run) if event.get("what") == "joined"]
    assert sorted(joined) == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)]


test_one_side_of_a_partitioned_network_continues_and_the_other_rejoins.limit_s = 240  # type: ignore[attr-defined]


def is_open(process: psutil.Process) -> bool:
    """Return True if a stranger can connect to a port of a worker, except the inherited one, where it never accepts."""
    store = ("127.0.0.1", int((config_of(process).get("store") or ":0").rpartition(":")[2]))
    listening = [one.laddr for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    for host, port in {(*one,) for one in listening} - {store}:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), 0.5).close()
            return True
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux filters the packets of one socket")
def test_workers_that_others_may_join_accept_no_connection_of_strangers(place: Place) -> None:
    (place.folder / "train.py").write_text(SCRIPT)
    run = place.folder / "run"
    options = ["--recipe", "local_sgd(every=2)", "--host", "127.0.0.1", "--out", "run"]
    here = local("run", "-n", "2", *options, "train.py")
    until(lambda: {0, 1} <= starts(run).keys(), here)
    workers = [psutil.Process(start["pid"]) for start in starts(run).values()]
    assert all(worker.net_connections("tcp") for worker in workers)
    until(lambda: not any(map(is_open, workers)), here)
    (place.folder / "enough").touch()
    said, _ = here.communicate(timeout=60)
    assert here.returncode == 0, said


test_workers_that_others_may_join_accept_no_connection_of_strangers.limit_s = 100  # type: ignore[attr-defined]


def starts(run: Path) -> dict[int, dict[str, Any]]:
    return {event["worker"]: event for event in events(run) if event["event"] == "start"}


def epochs(run: Path) -> list[dict[str, Any]]:
    return [event for event in events(run) if event["event"] == "epoch"]


def local(*words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "stretto.cli", *words]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def kill_service(launcher: subprocess.Popen[str], kind: str) -> None:
    children = psutil.Process(launcher.pid).children()
    next(child for child in children if config_of(child).get("type") == kind).kill()


def trained_by_guests(run: Path, count: int) -> bool:
    """Return True if guests have trained in an epoch after the first `count`, or if epochs do not name workers."""
    later = epochs(run)[count + 1 :]
    return any("trained" not in epoch or {"2", "3"} <= epoch["trained"].keys() for epoch in later)


@pytest.mark.parametrize(
    "recipe",
    [
        "async_sgd(shards=2)",
        "stale_synchronous(bound=1)",
        "elastic_averaging(every=2)",
        "local_sgd(every=2) over a server",
    ],
)
def test_run_over_a_server_is_joined_and_left(place: Place, recipe: str) -> None:
    (place.folder / "train.py").write_text(SCRIPT)
    run = place.folder / "run"
    recipe, _, over_server = recipe.partition(" over ")
    options = ["--recipe", recipe, *(["--servers", "1"] if over_server else []), "--host", "127.0.0.1"]
    here = local("run", "-n", "2", *options, "--failure-timeout", "5s", "--out", "run", "train.py")
    until(lambda: (run / JOIN_INFO).exists() and {0, 1} <= starts(run).keys(), here)
    guests = local("join", "run", "-n", "2")
    until(lambda: {2, 3} <= starts(run).keys(), here, guests)
    killed = starts(run)[3]["pid"]
    os.kill(killed, signal.SIGKILL)
    until(lambda: starts(run)[3]["pid"] != killed, here, guests)
    for kind in ("shard", "coordinator"):
        count = len(epochs(run))
        kill_service(here, kind)
        until(lambda count=count: trained_by_guests(run, count), here, guests)  # type: ignore[misc]
    guests.terminate()
    said, _ = guests.communicate(timeout=60)
    assert guests.returncode == 128 + signal.SIGTERM, said
    (place.folder / "enough").touch()
    said, _ = here.communicate(timeout=90)
    assert here.returncode == 0, said
    audits = [epoch["sample_counts"] for epoch in epochs(run)]
    assert len(audits) == 60
    assert all((seen["once"], seen["twice"], seen["never"]) == (320, 0, 0) for seen in audits)
    assert over_server or epochs(run)[-1]["trained"].keys() <= {"0", "1"}


test_run_over_a_server_is_joined_and_left.limit_s = 200  # type: ignore[attr-defined]


def invitation_without_coordinator(place: Place, **order: Any) -> Path:
    """Return a run folder with an invitation to a coordinator that does not run."""
    (place.folder / "train.py").write_text("")
    folder = place.folder / "run"
    folder.mkdir()
    with servers_for(0, plain=False, coordinated=True) as servers:
        write_join_info(folder, RunConfig(Path("train.py"), workers=2, host="127.0.0.1", **order), servers)
    return folder


def test_invitation_is_private_and_complete(place: Place) -> None:
    (place.folder / "train.py").write_text("")
    asked = RunConfig(
        Path("train.py"), ("--fast",), workers=2, host="127.0.0.1", recipe="local_sgd", seed=3, failure_timeout_s=2.0
    )
    with servers_for(0, plain=False, coordinated=True) as servers:
        write_join_info(place.folder, asked, servers)
        assert stat.S_IMODE((place.folder / JOIN_INFO).stat().st_mode) == 0o600
        one, other = plan_of_join(JoinRequest(place.folder, 2)), plan_of_join(JoinRequest(place.folder, threads=3))
        assert (one.joining, other.joining) == ((2, 3), (4,)), "each joins with numbers of its own"
        assert (other.config.recipe, other.config.seed, other.config.args) == ("local_sgd", 3, ("--fast",))
        assert other.config.script == place.folder / "train.py"
        part = other.part(4)
        config = part.config
        assert isinstance(config, WorkerConfig)
        assert config.coordinator == "{}:{}".format(*servers.coordinator.getsockname())  # type: ignore[union-attr]
        assert config.keys == servers.worker_keys
        assert (config.worker, config.world_size, part.environment["OMP_NUM_THREADS"]) == (4, 2, "3")
        assert [part.number for part in one.all()] == [2, 3]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda run: shutil.rmtree(run), "there is no run"),
        (lambda run: (run / JOIN_INFO).unlink(), "cannot be joined"),
        (lambda run: (run / JOIN_INFO).write_bytes(b'{"coordinator": 3}'), "does not describe a run to join"),
        (lambda run: None, "the run has ended, or this machine cannot reach it"),
    ],
)
def test_refused_join_states_the_reason(place: Place, spoil: Callable[[Path], None], told: str) -> None:
    folder = invitation_without_coordinator(place)
    spoil(folder)
    with pytest.raises(LaunchError, match=told) as caught:
        plan_of_join(JoinRequest(folder))
    assert all(word in str(caught.value) for word in ("got:", "expected:", "try:")), caught.value


def test_join_with_no_workers_is_refused(place: Place) -> None:
    with pytest.raises(LaunchError, match="0 workers cannot join"):
        plan_of_join(JoinRequest(invitation_without_coordinator(place), 0))


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ({"recipe": "async_sgd", "workers": 1}, "one worker over a parameter server cannot be joined"),
        ({"single_process": True}, "the host of a run alone"),
    ],
)
def test_runs_that_cannot_be_joined_refuse_host(place: Place, order: dict[str, Any], told: str) -> None:
    (place.folder / "train.py").write_text("")
    with pytest.raises(LaunchError, match=told):
        check(RunConfig(Path("train.py"), host="127.0.0.1", **order))


@pytest.mark.parametrize("host", ["192.0.2.77", "no such host"])
def test_address_of_another_machine_is_refused(host: str) -> None:
    with pytest.raises(LaunchError, match="is not an address of this machine"), servers_for(0, False, True, host):
        pass
