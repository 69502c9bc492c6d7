"""Tests marked `gpu` are skipped, with a reason, where there are too few GPUs."""

from __future__ import annotations

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test if it needs more GPUs than there are."""
    marker = item.get_closest_marker("gpu")
    needed = 0 if marker is None else marker.kwargs.get("count", 1)
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < needed:
        pytest.skip(f"needs {needed} GPU{'s' * (needed > 1)}, and this machine has {found or 'none'}")
