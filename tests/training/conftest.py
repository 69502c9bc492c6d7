"""Fixtures of the training tests."""

from __future__ import annotations

import pytest

from stretto import api
from stretto.checkpoint.background_writer import BackgroundWriter
from stretto.checkpoint.storage import State


@pytest.fixture(autouse=True)
def _no_run() -> None:
    """Reset the current run before each test: a test that calls `distribute` itself leaves its own run set."""
    api._current.set(None)
    api._sections.set(None)


@pytest.fixture
def every_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write every checkpoint: no checkpoint that waits to be written is replaced by a newer one."""
    submit = BackgroundWriter.submit

    def submit_and_settle(writer: BackgroundWriter, state: State, number: int) -> None:
        submit(writer, state, number)
        assert writer.settle(60.0)

    monkeypatch.setattr(BackgroundWriter, "submit", submit_and_settle)
