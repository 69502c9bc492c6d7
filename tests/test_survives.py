"""Real processes are struck, and the run goes on: some of the cases of `python -m benchmarks survival`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.survival import SCRIPT, Case, one
from stretto.checkpoint.storage import Checkpoints
from stretto.events import read_events

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
CASES = [
    Case("allreduce", "worker 0", "exchanging", "STOP"),
    Case("local_sgd(every=4)", "another worker", "epoch end", "TERM"),
    Case("async_sgd(shards=2)", "server", "computing", "KILL"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_run_goes_on(case: Case, tmp_path: Path) -> None:
    outcome = one(case, case.recipe, tmp_path / "run", ENVIRONMENT)
    assert outcome.code == 0, outcome.told
    assert outcome.once
    assert outcome.equal
    assert outcome.accuracy > 0.6
    assert outcome.deaths or case.signal == "TERM" or case.who in ("server", "coordinator")


def test_a_whole_run_is_killed_in_the_middle_of_a_pass_and_goes_on(tmp_path: Path) -> None:
    """Over a server, where nobody waits: every process dies at once, and other workers do what is left of the pass."""
    command = [sys.executable, "-m", "stretto.cli", "run", "--recipe", "async_sgd(shards=2)"]
    slow = [str(SCRIPT), "--epochs", "3", "--pause", "0.06"]
    saves = ["-n", "3", "--checkpoint-every", "500ms", "--out", str(tmp_path / "one")]
    run = subprocess.Popen([*command, *saves, *slow], env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    try:
        limit = time.monotonic() + 90
        while not (found := in_the_middle(tmp_path / "one" / "checkpoints")):
            assert run.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.02)
    finally:
        everyone = [*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)]
        for one_of_them in everyone:
            one_of_them.kill()
        run.wait()
        psutil.wait_procs(everyone, 10)
    again = [*command, "-n", "2", "--resume", str(tmp_path / "one"), "--out", str(tmp_path / "two"), *slow]
    subprocess.run(again, env=ENVIRONMENT, stdout=subprocess.DEVNULL, timeout=120, check=True)
    epochs = [event for event in read_events(tmp_path / "two" / "events.jsonl") if event["event"] == "epoch"]
    assert [event["epoch"] for event in epochs] == list(range(found, 4))
    for event in epochs:
        assert event["sample_counts"] == {"once": 1200, "twice": 0, "never": 0, "dropped": 0}


def in_the_middle(folder: Path) -> int:
    """The pass that the newest checkpoint is in the middle of; 0 if it is of none."""
    newest = Checkpoints(folder).newest() if folder.is_dir() else None
    if newest is None or newest[1].facts["deal"] is None:
        return 0
    return int(newest[1].facts["passes"])
