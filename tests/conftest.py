"""What all tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Each test draws the same random numbers, whatever ran before it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
