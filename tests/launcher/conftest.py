"""Each test in a place of its own, and none for longer than its limit."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from scene import MARK, PATH, Place

LIMIT_S = 20


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """An empty current folder; afterwards nothing that was started there may be left."""
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
        assert place.left() == []
    finally:
        place.end()


@pytest.fixture(autouse=True)
def limited(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test may hang. One whose processes import torch says how long it may take."""
    limit_s = getattr(request.function, "limit_s", LIMIT_S)

    def too_long(_number: int, _frame: object) -> None:
        raise TimeoutError(f"the test took more than {limit_s} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
