"""Servers that are closed after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served import Serving


@pytest.fixture
def serving() -> Iterator[Serving]:
    """Servers for one test."""
    serving = Serving()
    yield serving
    serving.end()
