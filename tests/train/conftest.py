"""What tests of training share."""

from __future__ import annotations

import pytest

from stretto.train import face


@pytest.fixture(autouse=True)
def _no_run() -> None:
    """Start each test without a run: one that calls `distribute` itself leaves its own behind."""
    face._current.set(None)
    face._sections.set(None)
