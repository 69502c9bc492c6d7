"""Comparisons of scripts that train by another library (`make test-trainers`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_runs import ALONE, LIMIT_S, STOCK

pytest.importorskip("transformers")
pytestmark = pytest.mark.trainers


@pytest.mark.parametrize("is_there", [False, True])
def test_trials_of_a_trainer_have_a_folder_each_and_a_verdict_at_equal_samples(is_there: bool, tmp_path: Path) -> None:
    """The script has the absolute path of its folder, in which a user's training may be."""
    project, out = tmp_path / "project", tmp_path / "elsewhere" / "out"
    project.mkdir()
    (out if is_there else out.parent).mkdir(parents=True)
    if is_there:
        (out / "result.json").write_text("mine")
    command = [sys.executable, "-m", "stretto.cli", "compare", "-n", "2", "--recipe", "local_sgd(every=4)"]
    command += ["--threads", "1", "--quiet", "--json", "-", "--out", "found", str(STOCK), str(out)]
    done = subprocess.run(
        command, cwd=project, env=os.environ | ALONE, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    alone, double, local = found["runs"]
    assert alone["samples"] < double["samples"] == local["samples"]
    assert [one["steps"] for one in found["runs"]] == [20, 20, 20]
    assert all([*one["metrics"]] == ["eval_loss"] and len(one["evaluations"]) == 4 for one in found["runs"])
    verdict = found["verdict"]
    assert verdict["by"] is not None, verdict
    assert verdict["sides"][0]["run"] == "single process (global batch ×2)"
    results = sorted((project / "found").glob(f"*/files-above{out}/result.json"))
    assert len({one.read_text() for one in results}) == 3
    assert [one.name for one in out.rglob("*")] == ["result.json"] * is_there
    assert not is_there or (out / "result.json").read_text() == "mine"
    assert "outside of its private folder" not in done.stderr
