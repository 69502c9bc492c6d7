"""Fixtures of the training tests."""

from __future__ import annotations

import pytest

from stretto import api


@pytest.fixture(autouse=True)
def _no_run() -> None:
    """Reset the current run before each test: a test that calls `distribute` itself leaves its own run set."""
    api._current.set(None)
    api._sections.set(None)
