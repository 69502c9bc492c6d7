"""Settings and fixtures of all tests."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest
import torch
from fork_server import ForkingPopen, ForkServer
from hypothesis import HealthCheck, settings

# A shell starts background jobs with SIGINT ignored, and processes of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Deadlines would make a slow machine a failure. The number of examples is a share of what each test names.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("short", PATIENT, max_examples=25, derandomize=True)
settings.register_profile("long", PATIENT, max_examples=1000)
settings.load_profile("short")


@pytest.fixture(autouse=True)
def _seed_random_numbers() -> None:
    """Draw the same random numbers in each test, whichever tests ran before it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    server = ForkServer(str(tmp_path_factory.mktemp("processes"))).spawn()
    yield server
    server.ours.close()


@pytest.fixture(autouse=True)
def _forked_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start Python processes by the fork server, except in tests marked `plain_processes`."""
    if request.node.get_closest_marker("plain_processes") is None:
        monkeypatch.setattr(ForkingPopen, "server", request.getfixturevalue("_fork_server"))
        monkeypatch.setattr(subprocess, "Popen", ForkingPopen)
