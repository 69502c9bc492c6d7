"""Snapshots of a request handler in files."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from stretto.parameter_server.snapshots import DiskStore, InMemoryStore


def test_a_full_disk_loses_only_the_new_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Earlier snapshots remain, one warning is printed, and the next snapshot is stored when there is space."""
    folder, theta = DiskStore(tmp_path, "shard0"), [torch.arange(10_000.0)]
    folder.put(1, {"version": 1}, theta)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
    try:
        folder.put(2, {"version": 2}, theta)
        folder.put(3, {"version": 3}, theta)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        capsys.readouterr().err.count("shard0: a snapshot could not be written: File too large; training continues")
        == 1
    )
    assert folder.snapshots() == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["shard0-1.cut"]
    folder.put(4, {"version": 4}, theta)
    assert folder.snapshots() == [1, 4]


def test_a_rollback_removes_only_the_snapshots_after_it(tmp_path: Path) -> None:
    for store in (DiskStore(tmp_path, "shard0"), InMemoryStore()):
        for number in range(1, 4):
            store.put(number, {}, [torch.ones(1)])
        store.discard_after(2)
        assert store.snapshots() == [1, 2]
