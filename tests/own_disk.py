"""Commands of tests that run on a small disk of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from fork_server import OWN_DISK


def own_disk(size: str, folder: Path) -> list[str]:
    """Return the words before a command that runs in `folder`, an empty disk; skip the test if none can be mounted."""
    words = [*OWN_DISK, size, str(folder)]
    if os.geteuid() != 0 or subprocess.run([*words, "true"], check=False).returncode != 0:
        pytest.skip("no disk of its own can be mounted here")
    return words
