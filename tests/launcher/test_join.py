"""Workers of other hosts join a run, and are separated from it: network namespaces stand for the hosts.

Errors of runs with `--listen` and of joining hosts are tested without starting processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from namespace_hosts import HOSTS, HUB, events, generations, hosts, ip, on, starts, until
from run_place import Place, config_of

from stretto.errors import LaunchError, LogError
from stretto.launcher.config import check
from stretto.launcher.endpoints import servers_for
from stretto.launcher.join import JOIN_KEY, JoinRequest, invited, plan_of_join, write_join_key
from stretto.run_config import RunConfig

__all__ = ["hosts"]

SCRIPT = """
import pathlib, time, torch, stretto
torch.manual_seed(0)
x = torch.randn(160, 8); y = x.sum(1, keepdim=True)
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
        for _ in range(1 if epoch < 59 else 100):  # a busy machine needs longer than all epochs take
            if not pathlib.Path("enough").exists():
                time.sleep(0.12)
"""
PATIENCE_S = 3.0
OTHER_USER = 12345
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")


def test_one_side_of_a_partitioned_network_continues_and_the_other_rejoins(place: Place, hosts: None) -> None:
    (place.folder / "train.py").write_text(SCRIPT)
    run = place.folder / "run"
    options = ["--recipe", "local_sgd(every=2)", "--failure-timeout", f"{PATIENCE_S}s", "--listen", "10.79.0.1"]
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
        said, _ = one.communicate(timeout=90)
        assert one.returncode == 0, said
    audits = [event["sample_counts"] for event in events(run) if event["event"] == "epoch"]
    assert len(audits) == 60
    assert all((seen["once"], seen["twice"], seen["never"]) == (160, 0, 0) for seen in audits)
    joined = [(event["worker"], event["incarnation"]) for event in events(run) if event.get("what") == "joined"]
    assert sorted(joined) == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (3, 1)]


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
@pytest.mark.parametrize("listen", [["--listen", "127.0.0.1"], []])
def test_workers_accept_no_connection_of_strangers(place: Place, listen: list[str]) -> None:
    """Neither of other hosts nor, where all workers are on one machine, of other users of it."""
    (place.folder / "train.py").write_text(SCRIPT)
    run = place.folder / "run"
    options = ["--recipe", "local_sgd(every=2)", *listen, "--out", "run"]
    here = local("run", "-n", "2", *options, "train.py")
    until(lambda: {0, 1} <= starts(run).keys(), here)
    workers = [psutil.Process(start["pid"]) for start in starts(run).values()]
    assert all(worker.net_connections("tcp") for worker in workers)
    until(lambda: not any(map(is_open, workers)), here)
    (place.folder / "enough").touch()
    said, _ = here.communicate(timeout=90)
    assert here.returncode == 0, said


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
        pytest.param("stale_synchronous(bound=1)", marks=pytest.mark.long),
        pytest.param("elastic_averaging(every=2)", marks=pytest.mark.long),
        "local_sgd(every=2) over a server",
    ],
)
def test_run_over_a_server_is_joined_and_left(place: Place, recipe: str) -> None:
    (place.folder / "train.py").write_text(SCRIPT)
    run = place.folder / "run"
    recipe, _, over_server = recipe.partition(" over ")
    options = ["--recipe", recipe, *(["--servers", "1"] if over_server else []), "--listen", "127.0.0.1"]
    here = local("run", "-n", "2", *options, "--failure-timeout", "5s", "--out", "run", "train.py")
    until(lambda: (run / JOIN_KEY).exists() and {0, 1} <= starts(run).keys(), here)
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
    said, _ = guests.communicate(timeout=90)
    assert guests.returncode == 128 + signal.SIGTERM, said
    (place.folder / "enough").touch()
    said, _ = here.communicate(timeout=90)
    assert here.returncode == 0, said
    audits = [epoch["sample_counts"] for epoch in epochs(run)]
    assert len(audits) == 60
    assert all((seen["once"], seen["twice"], seen["never"]) == (160, 0, 0) for seen in audits)
    assert over_server or epochs(run)[-1]["trained"].keys() <= {"0", "1"}


def test_script_error_of_a_guest_is_reported_immediately(place: Place) -> None:
    """The failure timeout is longer than the limit of the test."""
    (place.folder / "train.py").write_text(SCRIPT)
    (place.folder / "fails.py").write_text(
        SCRIPT.replace("    for a, b in loader:", "    assert epoch < 1\n    for a, b in loader:")
    )
    run = place.folder / "run"
    options = ["--recipe", "local_sgd(every=2)", "--listen", "127.0.0.1", "--failure-timeout", "500s", "--out", "run"]
    here = local("run", "-n", "2", *options, "train.py")
    until(lambda: (run / JOIN_KEY).exists() and {0, 1} <= starts(run).keys(), here)
    guest = local("join", "run", "--script", "fails.py")
    said, _ = guest.communicate(timeout=90)
    assert guest.returncode == 1 and "AssertionError" in said, said
    members = len(generations(run))
    until(lambda: generations(run)[-1] == [0, 1], here)
    (place.folder / "enough").touch()
    said, _ = here.communicate(timeout=90)
    assert here.returncode == 0, said
    audits = [epoch["sample_counts"] for epoch in epochs(run)]
    assert len(audits) == 60 and members
    assert all((seen["once"], seen["twice"], seen["never"]) == (160, 0, 0) for seen in audits)


@pytest.mark.parametrize("ending", ["signal", "error"])
def test_joined_workers_end_with_the_run_and_say_why(place: Place, ending: str) -> None:
    """The timeout of the run is longer than the limit of the test."""
    fails = "    if stretto.world_size() > 1 and stretto.is_main():\n        raise ValueError('no good')\n" * (
        ending == "error"
    )
    (place.folder / "train.py").write_text(SCRIPT.replace("    for a, b in loader:", f"{fails}    for a, b in loader:"))
    run = place.folder / "run"
    here = local(
        "run", "-n", "1", "--recipe", "local_sgd(every=2)", "--listen", "127.0.0.1", "--out", "run", "train.py"
    )
    until(lambda: (run / JOIN_KEY).exists(), here)
    guest = local("join", "run")
    if ending == "signal":
        until(lambda: {0, 1} <= starts(run).keys(), here, guest)
        here.terminate()
    why = {"signal": "stopped by SIGTERM", "error": "ValueError: no good"}[ending]
    said, _ = guest.communicate(timeout=90)
    assert guest.returncode == 1 and f"the run has ended: {why}" in said, said
    told, _ = here.communicate(timeout=90)
    assert here.returncode == {"signal": 128 + signal.SIGTERM, "error": 1}[ending] and why in told, told


def key_without_coordinator(place: Place) -> Path:
    """Return a run folder with a key to a coordinator that does not run."""
    folder = place.folder / "run"
    folder.mkdir(mode=0o700)
    with servers_for(0, plain=False, coordinated=True) as servers:
        write_join_key(folder, servers)
    return folder


def test_key_is_private_and_complete(place: Place) -> None:
    with servers_for(0, plain=False, coordinated=True) as servers:
        path = write_join_key(place.folder, servers)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert msgspec.json.decode(path.read_bytes())["keys"] == list(servers.keys_of(b"joining") or ())


def test_lines_about_joining_say_that_nothing_is_encrypted(place: Place) -> None:
    with servers_for(0, plain=True, coordinated=True) as servers:
        command, note = invited(write_join_key(place.folder, servers), servers)
        assert f"stretto join {servers.coordinator_at} --key join.key" in command
    assert note == "no traffic is encrypted, and a host that reaches the ports can change or end the run"


def test_key_that_the_disk_does_not_take_leaves_no_file(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(path: Path, text: bytes) -> int:
        with path.open("wb") as file:
            file.write(text[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    with servers_for(0, plain=False, coordinated=True) as servers, pytest.raises(LogError, match="No space left"):
        write_join_key(place.folder, servers)
    assert not (place.folder / JOIN_KEY).exists()


def replace_by_link(path: Path) -> None:
    """Move a file elsewhere, and put a link to it in its place."""
    path.symlink_to(path.rename(path.with_name("elsewhere")))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda run: shutil.rmtree(run), "there is no run"),
        (lambda run: (run / JOIN_KEY).unlink(), "cannot be joined"),
        (lambda run: (run / JOIN_KEY).write_bytes(b'{"address": 3}'), "is not a key of a run"),
        (lambda run: (run / JOIN_KEY).chmod(0o640), "may be known to others"),
        (lambda run: (run / JOIN_KEY).chmod(0o604), r"owner \d+, mode 604"),
        pytest.param(
            lambda run: os.chown(run / JOIN_KEY, OTHER_USER, -1), f"owner {OTHER_USER}, mode 600", marks=AS_ROOT
        ),
        (lambda run: run.chmod(0o777), r"got: stretto join .*run, owner \d+, mode 777"),
        (lambda run: run.chmod(0o770), r"owner \d+, mode 770"),
        pytest.param(lambda run: os.chown(run, OTHER_USER, -1), f"owner {OTHER_USER}, mode 700", marks=AS_ROOT),
        (lambda run: replace_by_link(run / JOIN_KEY), "is a link"),
        (lambda run: None, "the run has ended, or this machine cannot reach it"),
    ],
)
def test_refused_join_states_the_reason(place: Place, spoil: Callable[[Path], None], told: str) -> None:
    folder = key_without_coordinator(place)
    spoil(folder)
    with pytest.raises(LaunchError, match=told) as caught:
        plan_of_join(JoinRequest(str(folder)))
    assert all(word in str(caught.value) for word in ("got:", "expected:", "try:")), caught.value


@pytest.mark.parametrize(
    ("run", "key", "told"),
    [
        ("127.0.0.1:7878", None, "an address is joined with a key"),
        ("127.0.0.1:7878", Path("none"), "there is no key none"),
        ("run", Path("run/join.key"), "the run is named by its address"),
    ],
)
def test_address_and_key_belong_together(place: Place, run: str, key: Path | None, told: str) -> None:
    key_without_coordinator(place)
    with pytest.raises(LaunchError, match=told) as caught:
        plan_of_join(JoinRequest(run, key=key))
    assert all(word in str(caught.value) for word in ("got:", "expected:", "try:")), caught.value


def test_join_with_no_workers_is_refused(place: Place) -> None:
    with pytest.raises(LaunchError, match="0 workers cannot join"):
        plan_of_join(JoinRequest(str(key_without_coordinator(place)), 0))


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
