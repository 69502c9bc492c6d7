"""Options of runs on several hosts, and explanations of how their agents have ended."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from run_place import Place, until

from stretto.cli.main import USAGE, command
from stretto.errors import LaunchError
from stretto.host_list import Host
from stretto.launcher.config import check, described, with_hosts
from stretto.launcher.endpoints import servers_for
from stretto.launcher.engines.agents import AgentSpec
from stretto.launcher.engines.ssh import AgentLines, ssh_command
from stretto.launcher.engines.ssh_errors import explained
from stretto.launcher.process_specs import ProcessPlan
from stretto.launcher.remote_workers import agent_specs
from stretto.run_config import GlobalBatch, LrScale, RunConfig


def config(place: Place, **fields: Any) -> RunConfig:
    (place.folder / "train.py").write_text("")
    return RunConfig(Path("train.py"), **fields)


@pytest.mark.parametrize(
    ("fields", "cause", "to_type"),
    [
        ({"hosts": "a:2"}, "--hosts needs --listen", "--hosts a:2 --listen "),
        ({"workers": 0}, "the number of workers cannot be 0", "-n 0 --listen"),
        ({"workers": -1, "host": "127.0.0.1"}, "the number of workers cannot be -1", "-n 4"),
        ({"hosts": "a", "host": "127.0.0.1", "recovery": False}, "workers join through the coordinator", "--listen"),
        ({"workers": 0, "host": "127.0.0.1", "recipe": "async_sgd"}, "cannot be joined", "-n 0 --wait-for 2"),
        ({"hosts": "a:3", "host": "127.0.0.1", "min_workers": 5}, "cannot be 5", "--min-workers 4"),
        ({"hosts": "a:3", "host": "127.0.0.1", "max_workers": 3}, "cannot be 3", "--max-workers 4"),
        ({"wait_for": 3}, "no others could join", "--listen 10.0.0.1:7878 --wait-for 3"),
        ({"workers": 3, "host": "127.0.0.1", "wait_for": 2}, "wait for cannot be 2", "--wait-for 4"),
        ({"host": "127.0.0.1", "wait_for": 4, "max_workers": 3}, "cannot be 3", "--max-workers 4"),
        ({"host": "127.0.0.1", "recipe": "async_sgd"}, "cannot be joined", "-n 1 --wait-for 2 --listen"),
        ({"workers": 0, "host": "127.0.0.1", "faults": "kill worker at 1s"}, "no worker runs on the launcher", "--f"),
    ],
)
def test_options_that_contradict_hosts_are_refused(
    place: Place, fields: dict[str, Any], cause: str, to_type: str
) -> None:
    (place.folder / "run/checkpoints").mkdir(parents=True)
    with pytest.raises(LaunchError, match=cause) as caught:
        check(config(place, **fields))
    assert to_type in str(caught.value).partition("try:")[2]


def test_hosts_and_a_host_file_exclude_each_other(place: Place) -> None:
    (place.folder / "hosts").write_text("b slots=4\n")
    with pytest.raises(LaunchError, match="the hosts are given twice"):
        with_hosts(config(place, hosts="a", hostfile=Path("hosts")))
    assert with_hosts(config(place, hostfile=Path("hosts"))).hosts == "b:4"


@pytest.mark.parametrize("batch", ["keep", "split"])
def test_workers_that_are_awaited_count_for_the_batch_and_the_rate(place: Place, batch: GlobalBatch) -> None:
    scale: LrScale = "linear" if batch == "keep" else "none"
    found = config(place, host="127.0.0.1", wait_for=3, lr_scale=scale, global_batch=batch, recipe="async_sgd")
    check(found)
    assert (found.initial_workers, found.lr_factor) == (3, 3.0 if batch == "keep" else 1.0)
    assert described(found).startswith("3 workers (1 here; the run begins when 2 have joined) of train.py")


def test_listen_has_no_second_name(capsys: pytest.CaptureFixture[str]) -> None:
    """`--host` beside `--hosts` was taken for it."""
    assert command(["run", "--host", "10.0.0.1", "train.py"]) == USAGE
    said = capsys.readouterr().err
    assert "there is no option --host\n" in said and "the nearest are --hosts" in said


def test_number_of_workers_counts_those_of_all_hosts(place: Place) -> None:
    found = config(place, workers=2, hosts="a:2,b:4", host="127.0.0.1", lr_scale="linear", max_workers=8)
    check(found)
    assert (found.initial_workers, found.lr_factor) == (8, 8.0)
    assert described(found).startswith("8 workers (2 here, 2 on a, 4 on b) of train.py")
    by_hand = config(place, workers=0, host="127.0.0.1", min_workers=3)
    check(by_hand)
    assert by_hand.initial_workers == 3


def test_workers_of_hosts_have_the_numbers_after_those_of_the_launcher(place: Place) -> None:
    with servers_for(0, plain=False, coordinated=True) as servers:
        found = config(place, workers=2, hosts="a:2,b:4", host="127.0.0.1", threads=3, output="none")
        specs, address = agent_specs(ProcessPlan(found, place.folder, None, servers)), servers.coordinator_at
    assert [(spec.host, spec.numbers) for spec in specs] == [(Host("a", 2), range(2, 4)), (Host("b", 4), range(4, 8))]
    words = " ".join(specs[1].words)
    assert words == f"join {address} --key - -n 4 --output none --threads 3"
    assert [msgspec.json.decode(spec.key)["first"] for spec in specs] == [2, 4]
    assert not any(secret in word for secret in servers.keys_of(b"agent") or () for word in (words, repr(specs)))


def test_lines_of_an_agent_are_shown_except_an_error_at_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.launcher.engines.ssh.HELD_S", 0.0)
    shown: list[str] = []
    reading, writing = os.pipe()
    lines = AgentLines(shown.append)
    with open(reading, "rb", buffering=0) as pipe:
        reader = threading.Thread(target=lines.read, args=(pipe,))
        reader.start()
        with open(writing, "wb", buffering=0) as end:
            end.write(b"Welcome\r\nto b\nstretto: starting 2 workers\n")
            until(lambda: shown == ["Welcome", "to b", "starting 2 workers"])
            end.write(b"stretto: worker 2 failed\nTraceback\n")
            end.write(b"the whole log: x")
        reader.join(60)
    assert shown == ["Welcome", "to b", "starting 2 workers"]
    lines.flush()
    assert shown[3:] == ["worker 2 failed", "Traceback", "the whole log: x"]


@pytest.mark.parametrize(
    ("code", "printed", "cause", "to_type"),
    [
        (255, "ssh: Could not resolve hostname b: Name or service not known\r\n", "host b is not found", "ssh b true"),
        (255, "ssh: connect to host b port 22: No route to host\n", "host b cannot be reached", "ssh b true"),
        (255, "Timeout, server b not responding.\n", "the connection to host b has ended", "ssh b true"),
        (255, "stretto: starting 2 workers\n", "the connection to host b has ended\n  got: no reason", "ssh b true"),
        (255, "u@b: Permission denied (publickey).\n", "host b refuses the keys of this user", "ssh-copy-id b"),
        (127, "bash: stretto: command not found\n", "host b has no command stretto", "--remote-stretto"),
        (126, "sh: ./stretto: Permission denied\n", "host b has no command stretto", "--remote-stretto"),
        (1, "Traceback\nImportError: no torch\n", "ended with exit code 1", "ssh b 'stretto --version'"),
        (1, "stretto: starting\nstretto: no\n  got: 1\n  try: x\n", "host b: no\n  got: 1", "x"),
    ],
)
def test_end_of_an_agent_is_explained(code: int, printed: str, cause: str, to_type: str) -> None:
    text = explained("b", code, printed, "stretto")
    assert cause in text
    assert text.partition("try: ")[2].startswith(to_type)


def test_ssh_asks_no_question_forwards_nothing_and_leaves_no_connection_open() -> None:
    command = ssh_command(AgentSpec(Host("b", 2), range(2), ("join", "10.0.0.1:7878"), b"secret"), "stretto", 9.0)
    options = {word for before, word in itertools.pairwise(command) if before == "-o"}
    assert options >= {
        "BatchMode=yes",
        "ForwardAgent=no",
        "ForwardX11=no",
        "ClearAllForwardings=yes",
        "ControlMaster=no",
    }
    assert not any("secret" in word for word in command)
