"""Runs of real processes in which workers end at different steps, or otherwise than by the last line of the script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.counting_model import run_counted
from stretto.events import read_events

LIMIT_S = 150

SCRIPT = """
import multiprocessing, os, sys, torch, stretto
torch.manual_seed(0)
x = torch.randn(64, 6)
y = torch.sin(x.sum(1, keepdim=True))
net = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
loader = stretto.distribute(net, optimizer, loader)
mine = int(os.environ["STRETTO_TEST_WORKER"]) == stretto.rank()
epochs = 2
BEFORE
for epoch in range(epochs):
    for step, (a, b) in enumerate(loader, 1):
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
        BODY
"""


def run(
    folder: Path, recipe: str, body: str = "pass", before: str = "pass", worker: int = 1
) -> subprocess.CompletedProcess[str]:
    """Run the script on two workers, of which one is `mine`."""
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("BODY", body).replace("BEFORE", before))
    command = [
        sys.executable,
        "-m",
        "stretto.cli",
        "run",
        "-n",
        "2",
        "--recipe",
        recipe,
        "--out",
        str(folder / "run"),
    ]
    return subprocess.run(
        [*command, str(script)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "STRETTO_TEST_WORKER": str(worker)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


LEAVES = "if mine and step == 3: "


@pytest.mark.parametrize(
    ("recipe", "body", "before", "worker", "said"),
    [
        ("allreduce", LEAVES + "break", "pass", 1, "1 has left the loop in epoch 1 at step 3, worker 0 waits at"),
        ("local_sgd(every=4)", "pass", "epochs -= mine", 0, "0 has ended its script in epoch 1 at step 8, worker 1 wa"),
        ("ef21()", LEAVES + "sys.exit(0)", "pass", 1, "1 has left the loop in epoch 1 at step 3, worker 0 waits at"),
    ],
)  # fmt: skip
def test_worker_that_leaves_the_loop_earlier_than_others_ends_the_run_by_name(
    recipe: str, body: str, before: str, worker: int, said: str, tmp_path: Path
) -> None:
    """The run ends long before --timeout, which is ten minutes."""
    done = run(tmp_path, recipe, body, before, worker)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count(f"UnevenLoopsError: worker {said}") == 1, done.stderr
    assert "stand still" not in done.stderr


def test_workers_that_do_not_wait_may_end_their_loops_in_different_epochs(tmp_path: Path) -> None:
    done = run(tmp_path, "async_sgd", before="epochs += 2 - 2 * mine", worker=0)
    assert done.returncode == 0, done.stderr
    events = list(read_events(tmp_path / "run/events.jsonl"))
    ended = "worker 0 ended its loops before epoch 3, which the other workers train"
    assert len([one for one in events if one["event"] == "warning" and ended in one["text"]]) == 1
    assert [one["sample_counts"]["once"] for one in events if one["event"] == "epoch"] == [64] * 4
    assert (tmp_path / "run/final.safetensors").exists()


def test_workers_that_leave_the_loop_at_the_same_step_continue_with_the_next_epoch(tmp_path: Path) -> None:
    done = run(tmp_path, "local_sgd(every=2)", "if step == 3: break")
    assert done.returncode == 0, done.stderr
    epochs = [one["step"] for one in read_events(tmp_path / "run/events.jsonl") if one["event"] == "epoch"]
    assert epochs == [3, 6]


def test_folder_that_two_workers_make_is_an_error_with_advice(tmp_path: Path) -> None:
    done = run(tmp_path, "allreduce", before=f"os.makedirs({str(tmp_path / 'made')!r})")
    assert done.returncode == 1
    assert done.stderr.count("`with stretto.main_first():` around what makes it") == 1, done.stderr


def test_loop_may_fork_a_pool_of_processes(tmp_path: Path) -> None:
    """The end of a pool sends SIGTERM to children that may have just been forked, and waits for them."""
    pools = "for _ in range(8):\n            with multiprocessing.get_context('fork').Pool(2): pass"
    done = run(tmp_path, "allreduce", f"if step == 3:\n          {pools}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("recipe", "end", "said"),
    [
        ("allreduce", "os._exit(0)", "worker 1 ended with exit code 0 in epoch 1 at step 3 without finishing"),
        (
            "stale_synchronous(bound=1)",
            "os._exit(3)",
            "worker 1 ended with exit code 3 in epoch 1 at step 3 and named no error",
        ),
    ],
)
def test_worker_that_ends_its_own_process_ends_the_run_by_name(
    recipe: str, end: str, said: str, tmp_path: Path
) -> None:
    done = run(tmp_path, recipe, f"if mine and step == 3: {end}")
    assert done.returncode == 1, done.stderr
    assert said in done.stderr
    assert "while starting" not in done.stderr


@pytest.mark.parametrize(
    ("worker", "recipe"),
    [(0, "allreduce"), pytest.param(1, "allreduce", marks=pytest.mark.long), (1, "local_sgd(every=4)")],
)
def test_restarted_worker_whose_script_counts_steps_ends_its_loop_with_the_others(
    worker: int, recipe: str, tmp_path: Path
) -> None:
    """All processes count from 0 and end after 150 steps, which are one and a half epochs of the others."""
    script = ["--samples", "2400", "--steps", "150", "--pause", "0.2", "--until-back"]
    strike = ["--strike", f"{worker}:KILL:stepped:5"]
    run = run_counted(tmp_path, recipe, options=["-n", "3"], script=[*script, *strike])
    assert run.code == 0, run.text
    assert run.text.count(f"worker {worker} ends its loop with the others, in epoch 2 at step 150") == 1, run.text
    assert run.epochs == run.recorded == [{1: 2400}, {0: 1200, 1: 1200}]
    assert len(run.digests) == 3
    assert len({*run.digests.values()}) == (1 if recipe == "allreduce" else 3)  # before the mean of the epoch's end
    assert run.record["failures"]
