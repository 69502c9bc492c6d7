"""Hosts for tests of several machines: network namespaces on a bridge."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from stretto.events import read_events

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


def starts(run: Path) -> dict[int, dict[str, Any]]:
    return {event["worker"]: event for event in events(run) if event["event"] == "start"}


def until(is_so: Callable[[], bool], *processes: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < limit, "it has not come so within 60 s"
        assert all(one.poll() is None for one in processes), [one.communicate()[0] for one in processes]
        time.sleep(0.05)
