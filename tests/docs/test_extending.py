"""The examples of docs/extending.md are extracted from the page, and run outside the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text()
FILES = dict(re.findall(r'^```python title="([\w.]+)"\n(.*?)^```', PAGE, re.M | re.S))
TESTS = [name for name in FILES if name.startswith("test_")]
SCRIPTS = [name for name in FILES if name.startswith("train_")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("extending")
    for name, text in FILES.items():
        (made / name).write_text(text)
    return made


def run(folder: Path, *words: str) -> None:
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_has_a_codec_a_recipe_a_strategy_a_topology_a_transport_and_an_engine() -> None:
    assert len(TESTS) == 6
    assert len(SCRIPTS) == 4


@pytest.mark.parametrize("name", TESTS)
def test_conformance_checks_of_the_page_pass(folder: Path, name: str) -> None:
    run(folder, name)


@pytest.mark.parametrize("name", SCRIPTS)
def test_training_of_the_page_runs_simulated(folder: Path, name: str) -> None:
    run(folder, "-m", "stretto.cli", "simulate", "-n", "4", "--step-time", "5ms", "--out", f"run-{name}", name)
