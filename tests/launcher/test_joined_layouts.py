"""Workers of several processes on several hosts: the ranks of a worker are on one host, and connect encrypted."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from namespace_hosts import (
    HOSTS,
    assert_each_sample_counts_once,
    events,
    hosts,
    joining,
    on,
    until,
    write_script,
)
from run_place import Place, coordinators
from ssh_hosts import SshHosts, ssh_hosts
from test_hosts import Run

from stretto.errors import LaunchError
from stretto.launcher.config import check
from stretto.run_config import RunConfig

__all__ = ["hosts", "ssh_hosts"]

NET = "Sequential(Linear(8, 16), Tanh(), Linear(16, 1))"
ADDRESS = "10.79.0.1:7878"


def ranks(run: Path) -> dict[tuple[int, int], int]:
    """Return the newest process of each rank."""
    found = [event for event in events(run) if event["event"] == "start"]
    return {(event["worker"], event.get("rank", 0)): event["pid"] for event in found}


@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        ("pipeline(stages=2)", "local_sgd(every=2)"),
        pytest.param("pipeline(stages=2)", "allreduce", marks=pytest.mark.long),
        pytest.param("sharded(over=2)", "diloco(every=2)", marks=pytest.mark.long),
    ],
)
def test_workers_of_two_ranks_join_and_survive_kills_of_a_rank_and_of_the_coordinator(
    place: Place, hosts: None, layout: str, recipe: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    enough, run = write_script(place.folder, tmp_path_factory, NET, 10), place.folder / "run"
    options = ["-n", "2", "--layout", layout, "--recipe", recipe, "--listen", ADDRESS, "--failure-timeout", "20s"]
    here = on(HOSTS[0], "run", *options, "--out", "run", "train.py", "--lr", "0.01")
    until(lambda: (run / "join.key").exists() and {(0, 0), (0, 1)} <= ranks(run).keys(), here)
    key = (run / "join.key").read_bytes()
    refused = joining(HOSTS[1], place.folder, key, ADDRESS, "-n", "3")
    assert "3 processes cannot be divided into workers of 2" in refused.communicate(timeout=90)[0].decode()
    assert refused.returncode == 1
    there = joining(HOSTS[1], place.folder, key, ADDRESS, "-n", "2")
    until(lambda: {(1, 0), (1, 1)} <= ranks(run).keys(), here, there)
    killed = ranks(run)[1, 1]
    os.kill(killed, signal.SIGKILL)
    until(lambda: ranks(run)[1, 1] != killed, here, there)
    before = coordinators(place)
    os.kill(*before, signal.SIGKILL)
    until(lambda: coordinators(place) not in ([], before), here, there)
    enough.touch()
    said = [one.communicate(timeout=180)[0] for one in (here, there)]
    assert (here.returncode, there.returncode) == (0, 0), said
    assert_each_sample_counts_once(run, 10, by_model=False)
    failed = [event for event in events(run) if event.get("what") == "failed" and "worker" in event]
    assert {(event["worker"], event.get("rank", 0)) for event in failed} == {(1, 1)}


@pytest.mark.long
def test_hosts_start_whole_workers_of_several_ranks(
    place: Place, ssh_hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    layout = ("--layout", "pipeline(stages=2)")
    run = Run(place, tmp_path_factory.mktemp("both"), "-n", "2", "--hosts", "a:2,b:4", *layout, "--threads", "1")
    run.until_started(0, 1, 2, 3)
    said = run.end()
    assert run.process.returncode == 0, said
    assert "4 workers (1 here, 1 on a, 2 on b) of 2 processes each" in said
    assert set(run.sample_counts()) == {(96, 0, 0)}


@pytest.mark.parametrize(
    ("options", "expected", "typed"),
    [
        ({"hosts": "a:3"}, "3 processes cannot be divided into workers of 2", "--hosts a:4 --layout"),
        ({"workers": 3}, "3 processes cannot be divided into workers of 2", "-n 4 --layout"),
    ],
)
def test_processes_that_are_no_workers_are_refused(
    place: Place, options: dict[str, Any], expected: str, typed: str
) -> None:
    given = {"workers": 2, "host": "127.0.0.1", "layout": "pipeline(stages=2)", "recipe": "local_sgd"} | options
    with pytest.raises(LaunchError, match=expected) as error:
        check(RunConfig(place.script(""), **given))
    assert f"try: {typed}" in str(error.value)
