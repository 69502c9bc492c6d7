"""A folder of its own and a time limit for each test."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_server import ForkingPopen
from run_place import MARK, PATH, Place

LIMIT_S = 300


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Yield an empty current folder; check afterwards that no process started from it is left."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("PYTHONPATH", PATH)
    for name in ("STRETTO_RECIPE", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path, mark)
    place.recovers = False
    try:
        yield place
        place.await_ends()
    finally:
        place.end()


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """Let each test fail at the time limit."""

    def fail_at_limit(_number: int, _frame: object) -> None:
        raise TimeoutError(f"the test took more than {LIMIT_S} s")

    if ForkingPopen.server is not None:
        ForkingPopen.server.await_ready()
    before = signal.signal(signal.SIGALRM, fail_at_limit)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
