"""Makes the benchmarks importable: they are not part of the package, but a folder of the project."""

import fcntl
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


@pytest.fixture(scope="module")
def only_laboratory() -> Iterator[None]:
    """Wait for the tests of other processes that open a laboratory, of which a machine has one."""
    with (Path(tempfile.gettempdir()) / "stretto-tests-of-laboratories").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
