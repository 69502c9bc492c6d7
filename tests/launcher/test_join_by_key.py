"""Workers of a host that sees nothing of the launcher's disk join by an address and a key."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from namespace_hosts import (
    HOSTS,
    assert_each_sample_counts_once,
    bridged,
    events,
    generations,
    hosts,
    joining,
    on,
    starts,
    until,
    write_script,
)
from run_place import Place, coordinators

from stretto.checkpoint.model_file import newest
from stretto.errors import LaunchError
from stretto.launcher.endpoints import servers_for
from stretto.launcher.join import JoinRequest, invitation_of, packed_code, plan_of_join, write_join_key
from stretto.membership.coordinator import MembershipCoordinator
from stretto.membership.coordinator_records import rules_of
from stretto.membership.invitations import Invitation, Inviter
from stretto.membership.server import MembershipServer
from stretto.membership.write_ahead_log import WriteAheadLog
from stretto.process_config import WorkerConfig
from stretto.run_config import RunConfig
from stretto.security import run_keys

__all__ = ["hosts"]


@pytest.mark.parametrize("recipe", ["local_sgd(every=2)", pytest.param("async_sgd(shards=2)", marks=pytest.mark.long)])
def test_hosts_without_a_shared_disk_train_each_sample_once_if_workers_and_the_coordinator_are_killed(
    place: Place, hosts: None, recipe: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    enough = write_script(place.folder, tmp_path_factory)
    run = place.folder / "run"
    address = "10.79.0.1:7878"
    options = ["-n", "2", "--recipe", recipe, "--listen", address, "--failure-timeout", "5s", "--out", "run"]
    here = on(HOSTS[0], "run", *options, "train.py", "--lr", "0.01")
    until(lambda: (run / "join.key").exists() and {0, 1} <= starts(run).keys(), here)
    there = joining(HOSTS[1], place.folder, (run / "join.key").read_bytes(), address, "-n", "2")
    until(lambda: {2, 3} <= starts(run).keys(), here, there)
    for worker in (3, 1):  # one there, and one of the launcher
        killed = starts(run)[worker]["pid"]
        os.kill(killed, signal.SIGKILL)
        until(lambda worker=worker, killed=killed: starts(run)[worker]["pid"] != killed, here, there)
    killed = coordinators(place)
    os.kill(*killed, signal.SIGKILL)
    until(lambda: coordinators(place) not in ([], killed), here, there)
    enough.touch()
    said = [one.communicate(timeout=90)[0] for one in (here, there)]
    assert (here.returncode, there.returncode) == (0, 0), said
    assert f"stretto join {address} --key join.key" in said[0] and "is encrypted" in said[0]
    assert_each_sample_counts_once(run)
    ended = {event["worker"] for event in events(run) if event["event"] == "end"}
    assert ended >= {0, 1, 2, 3}
    assert not list(place.folder.glob("runs")), "the guests have written to the disk of the launcher"
    assert "--lr" in json.loads((run / "run.json").read_text())["args"]


@pytest.mark.long
def test_workers_of_two_hosts_train_over_shards_of_a_third(
    place: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    enough, run, address = write_script(place.folder, tmp_path_factory), place.folder / "run", "10.79.0.1:7878"
    options = ["-n", "0", "--min-workers", "2", "--recipe", "async_sgd(shards=2)", "--listen", address, "--out", "run"]
    with bridged(HOSTS):
        here = on(HOSTS[0], "run", *options, "train.py", "--lr", "0.01")
        until(lambda: (run / "coordinator.wal").exists(), here)
        key = (run / "join.key").read_bytes()
        guests = [joining(host, place.folder, key, address) for host in HOSTS[1:]]
        until(lambda: {0, 1} <= starts(run).keys(), here, *guests)
        enough.touch()
        said = [one.communicate(timeout=90)[0] for one in (here, *guests)]
    assert [one.returncode for one in (here, *guests)] == [0, 0, 0], said
    assert_each_sample_counts_once(run)


@pytest.fixture
def options(place: Place) -> RunConfig:
    """Return the options of a run whose script is in a folder of its own."""
    (place.folder / "code").mkdir()
    (place.folder / "code/train.py").write_text("import nets")
    (place.folder / "code/nets.py").write_text("x = 1")
    return RunConfig(place.folder / "code/train.py", ("--fast",), workers=2, host="127.0.0.1", recipe="local_sgd")


@contextmanager
def coordinated(folder: Path, options: RunConfig, **versions: str) -> Iterator[tuple[str, Path]]:
    """Serve invitations to a run; yield the address of its coordinator and its key."""
    stop = threading.Event()
    with servers_for(0, plain=False, coordinated=True) as servers:
        assert servers.coordinator is not None
        key = write_join_key(folder, servers)
        address = servers.coordinator_at or ""
        coordinator = MembershipCoordinator(rules_of(options, asynchronous=False))
        invite = invitation_of(options, (address,), [servers.secret or ""])

        def invite_with_versions(numbers: tuple[int, ...]) -> Invitation:
            invitation = invite(numbers)
            return msgspec.structs.replace(invitation, versions={**invitation.versions, **versions})

        inviter = Inviter(
            invite_with_versions, coordinator.give_numbers, lambda: packed_code(options, [servers.secret or ""])
        )
        server = MembershipServer(
            servers.coordinator,
            coordinator,
            WriteAheadLog(folder / "wal"),
            run_keys([servers.secret or ""], options.workers),
            lambda notices, events: None,
            [inviter],
        )
        thread = threading.Thread(target=server.run, args=(stop,))
        thread.start()
        try:
            yield address, key
        finally:
            stop.set()
            thread.join(60)


def test_joiner_receives_numbers_options_and_code(place: Place, options: RunConfig) -> None:
    with coordinated(place.folder, options) as (address, key):
        first, second = (plan_of_join(JoinRequest(address, count, key, threads=3)) for count in (2, 1))
        own = plan_of_join(JoinRequest(address, 1, key, script=options.script))
    assert (first.joining, second.joining, own.joining) == ((2, 3), (4,), (5,))
    assert (first.config.recipe, first.config.args) == ("local_sgd", ("--fast",))
    assert first.config.script.read_text() == "import nets"
    assert (first.config.script.parent / "nets.py").exists()
    assert first.config.script != options.script and own.config.script == options.script
    part = first.part(2)
    assert isinstance(part.config, WorkerConfig)
    assert (part.config.run, part.config.coordinator, part.config.worker) == (None, address, 2)
    assert part.environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("launched_from", "further", "expected"),
    [
        ("code", {}, "."),
        ("code/data/digits", {}, "data/digits"),
        (".", {}, None),
        ("code", {"workdir": Path("mine")}, "mine"),
        ("code", {"script": Path("code/train.py")}, None),
        ("code", {"script": Path("code/train.py"), "workdir": Path("mine")}, "mine"),
    ],
)
def test_working_folder_of_a_joined_worker_is_the_place_of_the_launchers_in_the_received_code(
    place: Place,
    options: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    launched_from: str,
    further: dict[str, Path],
    expected: str | None,
) -> None:
    (place.folder / "mine").mkdir()
    (place.folder / "code/data/digits").mkdir(parents=True)
    (place.folder / "code/data/one").write_text("1")
    monkeypatch.chdir(place.folder / launched_from)
    with coordinated(place.folder, options) as (address, key):
        invited_from = Path.cwd()
        monkeypatch.chdir(place.folder)
        plan = plan_of_join(JoinRequest(address, 1, key, **further))  # type: ignore[arg-type]
    received = plan.config.script.parent
    assert (received / "data/one").read_text() == "1"
    wanted = {None: None, "mine": place.folder / "mine"}
    workdir = plan.part(2).workdir
    assert workdir == (wanted[expected] if expected in wanted else received / str(expected))
    assert workdir is None or workdir.is_dir()
    assert plan.config.launched_from == str(invited_from)


def test_a_working_folder_that_does_not_exist_is_refused(place: Place, options: RunConfig) -> None:
    with coordinated(place.folder, options) as (address, key), pytest.raises(LaunchError, match="there is no folder"):
        plan_of_join(JoinRequest(address, 1, key, workdir=Path("nowhere")))


def test_code_that_is_too_large_is_refused_at_the_joiner(
    place: Place, options: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stretto.launcher.code_archive.packed.__defaults__", (5,))
    with coordinated(place.folder, options) as (address, key), pytest.raises(LaunchError, match="is too large"):
        plan_of_join(JoinRequest(address, 1, key))


def test_another_version_of_stretto_is_refused_and_others_are_named(
    place: Place, options: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    others = {"stretto": "0.0.1", "torch": "1.0", "python": "2.7.18"}
    refusal = pytest.raises(LaunchError, match="another version of Stretto")
    with coordinated(place.folder, options, **others) as (address, key), refusal:
        plan_of_join(JoinRequest(address, 1, key))
    shown = capsys.readouterr().err
    assert "the run has torch 1.0 and this machine" in shown
    assert f"the run has python 2.7.18 and this machine {platform.python_version()}" in shown


@pytest.mark.parametrize("wrong", [0, 1], ids=["of another run", "of no worker"])
def test_wrong_key_is_refused(place: Place, options: RunConfig, wrong: int) -> None:
    with coordinated(place.folder, options) as (address, path):
        key = msgspec.json.decode(path.read_bytes())
        public, secret = (text.decode() for text in zmq.curve_keypair())
        key["keys"] = [public, *key["keys"][1:]] if wrong == 0 else [key["keys"][0], public, secret]
        path.write_bytes(msgspec.json.encode(key))
        with pytest.raises(LaunchError, match="it refuses the key"):
            plan_of_join(JoinRequest(address, 1, path))


def test_run_without_workers_of_its_own_ends_with_those_that_joined(
    place: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    enough = write_script(place.folder, tmp_path_factory, epochs=6)
    run, place.recovers, together = place.folder / "run", True, {"stderr": subprocess.STDOUT}
    options = ["-n", "0", "--min-workers", "2", "--recipe", "local_sgd(every=2)", "--listen", "127.0.0.1"]
    here = place.stretto("run", *options, "--out", "run", "train.py", "--lr", "0.01", **together)
    until(lambda: (run / "coordinator.wal").exists(), here)
    address = json.loads((run / "join.key").read_text())["address"]
    guests = [place.stretto("join", address, "--key", run / "join.key", **together) for _ in range(2)]
    until(lambda: {0, 1} <= starts(run).keys(), here, *guests)
    enough.touch()
    said = [one.communicate(timeout=90)[0].decode() for one in (here, *guests)]
    assert [one.returncode for one in (here, *guests)] == [0, 0, 0], said
    assert "2 workers (0 here; the run begins when 2 have joined) of train.py" in said[0]
    assert "code in" in said[0] and "code in" in (run / "worker-1.log").read_text(), "the output of worker 0 is shown"
    assert generations(run)[0] == [0, 1]
    audits = [event["sample_counts"] for event in events(run) if event["event"] == "epoch"]
    assert [(seen["once"], seen["twice"], seen["never"]) for seen in audits] == [(160, 0, 0)] * 6
    assert {event["worker"] for event in events(run) if event["event"] == "end"} == {0, 1}


def test_run_that_waits_for_others_begins_with_all_of_them_and_they_find_the_data_that_were_sent(place: Place) -> None:
    code, run, place.recovers = place.folder / "code", place.folder / "run", True
    (code / "data").mkdir(parents=True)
    (code / "data/rate").write_text("0.5")
    (code / "train.py").write_text(
        "import stretto, torch\n"
        "net = torch.nn.Linear(4, 1)\n"
        "first = net.bias.item()\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=float(open('rate').read()))\n"
        "data = torch.utils.data.TensorDataset(torch.ones(24, 4))\n"
        "for _, (x,) in zip(range(99), stretto.distribute(net, optimizer, torch.utils.data.DataLoader(data, 2))):\n"
        "    optimizer.zero_grad(); net(x).mean().backward(); optimizer.step()\n"
        "print('with', stretto.world_size(), 'moved by', round(first - net.bias.item(), 3))\n"
    )
    options = ["-n", "1", "--wait-for", "3", "--lr-scale", "linear", "--recipe", "allreduce", "--listen", "127.0.0.1"]
    together: dict[str, Any] = {"stderr": subprocess.STDOUT}
    here = place.stretto("run", *options, "--out", run, "../train.py", cwd=code / "data", **together)
    until(lambda: (run / "coordinator.wal").exists(), here)
    address = json.loads((run / "join.key").read_text())["address"]
    guests = [place.stretto("join", address, "--key", run / "join.key", "-n", "1", **together) for _ in range(2)]
    said = [one.communicate(timeout=90)[0].decode() for one in (here, *guests)]
    assert [one.returncode for one in (here, *guests)] == [0, 0, 0], said
    assert generations(run)[0] == [0, 1, 2]
    assert "3 workers (1 here; the run begins when 2 have joined)" in said[0]
    for number in range(3):
        assert "with 3 moved by 6.0" in (run / f"worker-{number}.log").read_text(), "4 steps of 3 times the rate"
    assert all("received the code of the run" in one and "in the run: 1 of 1 worker" in one for one in said[1:])


def test_run_without_workers_of_its_own_waits_for_others_after_one_that_failed(place: Place) -> None:
    (place.folder / "train.py").write_text("import stretto, torch\nassert False, 'no good'\n")
    run, place.recovers, together = place.folder / "run", True, {"stderr": subprocess.STDOUT}
    here = place.stretto("run", "-n", "0", "--listen", "127.0.0.1", "--out", "run", "train.py", **together)
    until(lambda: (run / "coordinator.wal").exists(), here)
    address = json.loads((run / "join.key").read_text())["address"]
    guest = place.stretto("join", address, "--key", run / "join.key", **together)
    assert "no good" in guest.communicate(timeout=90)[0].decode()
    assert here.poll() is None
    here.terminate()
    said = here.communicate(timeout=90)[0].decode()
    assert here.returncode == 128 + signal.SIGTERM, said


def test_error_of_the_last_worker_is_shown_once_at_the_launcher_and_its_last_model_is_there(place: Place) -> None:
    (place.folder / "train.py").write_text(
        "import stretto, torch\n"
        "model = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for x in stretto.distribute(model, optimizer, torch.utils.data.DataLoader(torch.ones(8, 1))):\n"
        "    model(x).sum().backward()\n"
        "    optimizer.step()\n"
        "raise KeyError('no such word')\n"
    )
    run, place.recovers, together = place.folder / "run", True, {"stderr": subprocess.STDOUT}
    options = ["-n", "0", "--recipe", "local_sgd(every=2)", "--listen", "127.0.0.1"]
    here = place.stretto("run", *options, "--out", "run", "train.py", **together)
    until(lambda: (run / "coordinator.wal").exists(), here)
    address = json.loads((run / "join.key").read_text())["address"]
    guest = place.stretto("join", address, "--key", run / "join.key", **together)
    said = [process.communicate(timeout=90)[0].decode() for process in (guest, here)]
    assert [guest.returncode, here.returncode] == [1, 1], said
    for text in said:
        assert text.count("Traceback") == 1, text
        assert text.count("KeyError: 'no such word'") == 1, text
    assert said[1].count("the run cannot continue: 0 workers cannot continue, at least 1 are required") == 1, said[1]
    assert (
        said[1]
        .splitlines()[-1]
        .startswith("the last model on which the workers agreed, after epoch 1, step 8: run/las")
    )
    model = newest(run)
    assert model is not None and (model.epoch, model.is_complete) == (1, False)
    assert "the run cannot continue" in str(model.cause)


@pytest.mark.parametrize("fails", ["worker", pytest.param("guest", marks=pytest.mark.long)])
def test_run_whose_workers_all_joined_continues_from_its_checkpoints(
    place: Place, tmp_path_factory: pytest.TempPathFactory, fails: str
) -> None:
    """A worker is started again by its guest; after a guest, the run waits a minute before another one continues it."""
    enough = write_script(place.folder, tmp_path_factory, epochs=16)
    run, again, place.recovers = place.folder / "run", place.folder / "again", True
    options = ["-n", "0", "--recipe", "local_sgd(every=2)", "--checkpoint-every", "4 rounds", "--listen", "127.0.0.1"]
    options += ["--failure-timeout", "5s"]

    def started(folder: Path, *further: str) -> list[subprocess.Popen[bytes]]:
        """Start a run and a guest with a worker."""
        words = [*options, *further, "--out", folder.name, "train.py", "--lr", "0.01"]
        here = place.stretto("run", *words, stderr=subprocess.STDOUT)
        until(lambda: (folder / "coordinator.wal").exists(), here)
        return [here, joined(folder)]

    def joined(folder: Path) -> subprocess.Popen[bytes]:
        address = json.loads((folder / "join.key").read_text())["address"]
        return place.stretto("join", address, "--key", folder / "join.key", stderr=subprocess.STDOUT)

    def warnings(folder: Path) -> str:
        return str([event["text"] for event in events(folder) if event["event"] == "warning"])

    here, guest = started(run)
    until(lambda: any((run / "checkpoints").glob("round-*")), here, guest)
    os.kill(guest.pid if fails == "guest" else starts(run)[0]["pid"], signal.SIGKILL)
    if fails == "guest":
        guest.wait(60)
    until(lambda: any(event.get("what") == "failed" for event in events(run)), here)
    guest = joined(run) if fails == "guest" else guest
    until(lambda: "continues from the checkpoint of round" in warnings(run), here, guest)
    enough.touch()
    said = [one.communicate(timeout=90)[0].decode() for one in (here, guest)]
    assert (here.returncode, guest.returncode) == (0, 0), said
    assert (run / "final.safetensors").exists() and not list(place.folder.glob("runs/*/checkpoints"))
    resumed = started(again, "--resume", "run")
    said = [one.communicate(timeout=90)[0].decode() for one in resumed]
    assert [one.returncode for one in resumed] == [0, 0], said
    assert "continues from the checkpoint of round" in warnings(again)
    counts = {event["epoch"]: event["sample_counts"] for event in events(run) if event["event"] == "epoch"}
    assert len(counts) == 16
    for seen in [*counts.values(), *(event["sample_counts"] for event in events(again) if event["event"] == "epoch")]:
        assert (seen["once"], seen["twice"], seen["never"]) == (160, 0, 0)
    assert (again / "final.safetensors").read_bytes() == (run / "final.safetensors").read_bytes()
