"""Texts of errors that end a worker."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from stretto.launcher import worker_main
from stretto.process_config import WorkerConfig
from stretto.run_config import RunConfig


@pytest.mark.parametrize("is_joined", [False, True])
def test_missing_file_at_a_joined_worker_names_both_working_folders(
    monkeypatch: pytest.MonkeyPatch, is_joined: bool
) -> None:
    options = RunConfig(Path("train.py"), launched_from="/there/project" if is_joined else None)
    monkeypatch.setattr(worker_main, "worker_config", lambda: WorkerConfig(options=options))
    with pytest.raises(FileNotFoundError) as missing:
        Path("numbers.csv").read_text()
    text = worker_main.failure(missing.value)
    words = (f"on {socket.gethostname()} is {os.getcwd()}", "launcher /there/project", "stretto join --workdir PATH")
    assert all((word in text) == is_joined for word in words), text
    assert "'numbers.csv'" in text
