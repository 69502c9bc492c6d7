"""Servers that are closed after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from parameter_servers import Servers


@pytest.fixture
def servers() -> Iterator[Servers]:
    """Yield an object that starts servers, and close them after the test."""
    servers = Servers()
    yield servers
    servers.close()
