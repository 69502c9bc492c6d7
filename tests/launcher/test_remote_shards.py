"""Shards on the launcher's host, and workers of another host that join, fail and leave while a shard is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from namespace_hosts import (
    HOSTS,
    assert_each_sample_counts_once,
    events,
    hosts,
    joining,
    on,
    starts,
    until,
    write_script,
)
from run_place import Place, config_of

__all__ = ["hosts"]
ADDRESS = "10.79.0.1:7878"


def shard_processes(place: Place) -> list[int]:
    return [one.pid for one in place.left() if config_of(one).get("type") == "shard"]


def happened(run: Path, process: str, what: str) -> bool:
    changes = (event for event in events(run) if event["event"] == "membership")
    return any((event["process"], event["what"]) == (process, what) for event in changes)


def trained_after(run: Path, moment: int) -> set[int]:
    """Return the workers that have written an event of progress after this number of events."""
    return {event["worker"] for event in events(run)[moment:] if event["event"] == "progress"}


def test_guests_reach_the_shards_of_the_launchers_host_which_fail_and_return(
    place: Place, hosts: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    enough, run = write_script(place.folder, tmp_path_factory), place.folder / "run"
    options = ["-n", "2", "--recipe", "async_sgd(shards=2)", "--listen", ADDRESS, "--out", "run"]
    here = on(HOSTS[0], "run", *options, "train.py", "--lr", "0.01")
    until(lambda: (run / "join.key").exists() and {0, 1} <= starts(run).keys(), here)
    there = joining(HOSTS[1], place.folder, (run / "join.key").read_bytes(), ADDRESS, "-n", "2")
    until(lambda: {2, 3} <= starts(run).keys(), here, there)
    seen = len(events(run))
    until(lambda: {2, 3} <= trained_after(run, seen), here, there)
    os.kill(shard_processes(place)[0], signal.SIGKILL)
    until(lambda: any(happened(run, f"server {shard}", "joined") for shard in (0, 1)), here, there)
    seen = len(events(run))
    until(lambda: {0, 1, 2, 3} <= trained_after(run, seen), here, there)
    os.kill(starts(run)[3]["pid"], signal.SIGTERM)
    until(lambda: happened(run, "worker 3", "left"), here, there)
    enough.touch()
    said = [one.communicate(timeout=120)[0] for one in (here, there)]
    assert (here.returncode, there.returncode) == (0, 0), said
    assert_each_sample_counts_once(run)
    services = {process for process in ("server 0", "server 1") if happened(run, process, "failed")}
    assert len(services) == 1
    assert not any(happened(run, f"worker {number}", "failed") for number in range(4)), said
