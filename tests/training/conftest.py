"""Fixtures of the training tests."""

from __future__ import annotations

import pytest

from stretto import api


@pytest.fixture(autouse=True)
def _no_run() -> None:
    """Start each test without a run: one that calls `distribute` itself leaves its own behind."""
    api._current.set(None)
    api._sections.set(None)
