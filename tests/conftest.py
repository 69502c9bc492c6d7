"""Settings and fixtures of all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

LIGHT = str(Path(__file__).parent / "light")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), LIGHT]))

# A shell starts background jobs with SIGINT ignored, and processes of tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# a slow machine is not a failure
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(autouse=True)
def _seed_random_numbers() -> None:
    """Draw the same random numbers in each test, whichever tests ran before it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
