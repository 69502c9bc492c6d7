"""Settings and fixtures of all tests."""

from __future__ import annotations

import gc
import signal
import subprocess
from collections.abc import Iterator

import pytest
import torch
from fork_server import ForkingPopen, ForkServer
from hypothesis import HealthCheck, settings

gc.disable()  # until the tests are collected

# A shell starts background jobs with SIGINT ignored, and processes of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Deadlines would make a slow machine a failure. The number of examples is a share of what each test names.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("short", PATIENT, max_examples=25, derandomize=True)
settings.register_profile("long", PATIENT, max_examples=1000)
settings.load_profile("short")


def pytest_collection_finish() -> None:
    """Exclude what imports and the collection of tests have made from all garbage collections.

    A collection that visits these millions of objects takes half a second. Simulations would return them to it.
    """
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    gc.enable()


@pytest.fixture(autouse=True)
def _seed_random_numbers() -> None:
    """Draw the same random numbers in each test, whichever tests ran before it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _forked_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Start Python processes by the fork server, also those of fixtures of modules."""
    server = ForkServer(str(tmp_path_factory.mktemp("processes"))).spawn()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkingPopen, "server", server)
        patch.setattr(subprocess, "Popen", ForkingPopen)
        yield
    server.ours.close()


@pytest.fixture(autouse=True)
def _plain_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the processes of tests marked `plain_processes` without the fork server."""
    if request.node.get_closest_marker("plain_processes") is not None:
        monkeypatch.setattr(ForkingPopen, "server", None)


@pytest.fixture(autouse=True)
def _left_processes() -> Iterator[None]:
    """End the processes that a failed test has left: a later test would fail of the warning about them."""
    before = set(ForkingPopen.started)
    yield
    for process in set(ForkingPopen.started) - before:
        if process.poll() is None:
            process.kill()
            process.wait(timeout=60)
