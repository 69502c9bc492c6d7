"""Ctrl-C ends a comparison and all its processes quickly, and leaves finished runs readable."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stretto.report import html_report

SCRIPT = """
import os, pathlib, time
pathlib.Path("private").write_text("yes")
pathlib.Path(os.environ["BEGAN"]).write_text("yes")
time.sleep(600)
"""


@pytest.mark.plain_processes
def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-c", "from stretto.cli.main import main; main()", "compare", "-n", "2"]
    command += ["--recipe", "allreduce", "--out", "found", "train.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"BEGAN": str(tmp_path / "began")}, stderr=subprocess.PIPE, text=True
    ) as process:
        _wait_for(tmp_path / "began", process)
        workers = psutil.Process(process.pid).children(recursive=True)
        began = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=120)
        took = time.monotonic() - began
    assert process.returncode == 130
    assert took < 60
    assert workers
    assert not psutil.wait_procs(workers, timeout=60)[1]
    assert "0 of 3 runs are done" in said
    assert not (tmp_path / "private").exists()
    assert (tmp_path / "found/single-process-seed0/files/private").read_text() == "yes"
    assert json.loads((tmp_path / "found/compare.json").read_text())["runs"] == []
    assert "No run has finished yet" in html_report.write(tmp_path / "found").read_text()


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not path.exists() and time.monotonic() < until:
        assert process.poll() is None
        time.sleep(0.05)
    assert path.exists()
