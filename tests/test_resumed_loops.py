"""Loops that count steps, as makemore and nanoGPT have them: worker 0 or the launcher is killed, and the schedule, the
number of steps, the best value and its file are those of a run that is not interrupted.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from combinations import mostly_long

LIMIT_S = 240
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

HEAD = """
import json, math, os, signal, sys, time
from pathlib import Path
import torch, stretto
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

def kill(at):
    \"\"\"Kill worker 0 or the launcher at this place, once; the launcher when a checkpoint is there.\"\"\"
    if at == sys.argv[2] and stretto.rank() == 0 and not Path("killed").exists():
        limit = time.monotonic() + 60
        while sys.argv[1] == "launcher" and not list(Path("run/checkpoints").glob("*/manifest.json")):
            assert time.monotonic() < limit
            time.sleep(0.01)
        Path("killed").touch()
        os.kill(os.getpid() if sys.argv[1] == "worker 0" else os.getppid(), signal.SIGKILL)
        time.sleep(60)

def note(**values):
    with open(f"notes-{stretto.rank()}", "a") as file:
        file.write(json.dumps(values) + "\\n")

def noisy(step):
    return [5.0, 3.0, 2.0, 6.0, 4.0, 7.0][step % 6] + 4 * (step > 2)  # the third is the best
torch.manual_seed(1337)
"""

MAKEMORE = """
words = torch.randint(0, 27, (512, 3))
data = TensorDataset(words, words.sum(1) % 27)
model = nn.Sequential(nn.Embedding(27, 8), nn.Flatten(), nn.Linear(24, 27))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
kept = stretto.checkpointed(best=None, best_step=0)

def draws():
    while True:
        yield data[torch.randint(0, 512, (16,))]

if sys.argv[3] == "infinite":
    sampler = RandomSampler(data, replacement=True, num_samples=10**10)
    batches = stretto.distribute(model, optimizer, DataLoader(data, batch_size=16, sampler=sampler))
else:
    batches = stretto.distribute(model, optimizer, draws(), deal="own")
for x, y in batches:
    step = stretto.steps()
    kill(str(step))
    optimizer.zero_grad(set_to_none=True)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    note(step=step)
    if step % 5 == 0:
        loss = noisy(step // 5)
        if kept.best is None or loss < kept.best:
            kept.best, kept.best_step = loss, step
            stretto.save({"step": step, "loss": loss, **model.state_dict()}, "best.pt")
    if step % 10 == 0:
        stretto.print(step, model(words[:2]).argmax(1).tolist())
    if step + 1 >= 30:
        break
note(steps=stretto.steps(), best=kept.best, best_step=kept.best_step)
"""

NANOGPT = """
MAX_ITERS, WARMUP, EVAL_INTERVAL, ACCUMULATE = 24, 5, 4, 3

def get_lr(it):
    if it < WARMUP:
        return 0.05 * (it + 1) / (WARMUP + 1)
    ratio = (it - WARMUP) / (MAX_ITERS - WARMUP)
    return 0.005 + 0.5 * (1 + math.cos(math.pi * ratio)) * 0.045

tokens = torch.arange(2000) * 7 % 31
model = nn.Sequential(nn.Embedding(31, 8), nn.Dropout(0.1), nn.Linear(8, 31))
optimizer = torch.optim.AdamW(model.parameters())
kept = stretto.checkpointed(best=1e9, best_step=0)

def get_batch():
    at = torch.randint(0, 1990, (8,))
    return torch.stack([tokens[i : i + 8] for i in at]), torch.stack([tokens[i + 1 : i + 9] for i in at])

for micro_step in stretto.distribute(model, optimizer, range(MAX_ITERS * ACCUMULATE * 2)):
    iter_num = stretto.steps() // ACCUMULATE
    kill(str(stretto.steps()))
    if stretto.epoch_step() % ACCUMULATE == 0:
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        note(step=iter_num, lr=optimizer.param_groups[0]["lr"])
        if iter_num % EVAL_INTERVAL == 0:
            loss = noisy(iter_num // EVAL_INTERVAL)
            if loss < kept.best:
                kept.best, kept.best_step = loss, iter_num
                found = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                stretto.save(found | {"step": iter_num, "loss": loss}, "best.pt")
    x, y = get_batch()
    (nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / ACCUMULATE).backward()
    if (stretto.epoch_step() + 1) % ACCUMULATE == 0 or stretto.is_last_batch():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
note(steps=stretto.steps() // ACCUMULATE, best=kept.best, best_step=kept.best_step)
"""

SAVE_BEST = """
class Killing:
    def __reduce__(self):
        kill("within the save")
        return str, ("whole",)

x = torch.randn(96, 8)
data = TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
kept = stretto.checkpointed(best=1e9, best_step=0)
loader = stretto.distribute(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
for epoch in range(6):
    for a, b in loader:
        if (epoch, stretto.epoch_step()) >= (4, 2):  # a worker that does not wait need not get each batch
            kill("4:2")
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(a), b).backward()
        optimizer.step()
    loss = noisy(epoch)
    if loss < kept.best:
        kept.best, kept.best_step = loss, epoch
        stretto.save({"step": epoch, "loss": loss, "x": Killing() if epoch == 2 else ""}, "best.pt")
    if not stretto.is_resuming():
        note(step=epoch, found=torch.load("best.pt", weights_only=False)["step"])
note(steps=6, best=kept.best, best_step=kept.best_step)
"""

STEPS = {MAKEMORE: 30, NANOGPT: 24, SAVE_BEST: 6}
BEST_STEP = {MAKEMORE: 10, NANOGPT: 8, SAVE_BEST: 2}
RECIPES = ["allreduce", "local_sgd(every=4)", "async_sgd"]
LOOPS = {
    "makemore, infinite sampler": (MAKEMORE, ["infinite"], ["17"]),
    "makemore, drawn batches": (MAKEMORE, ["drawn"], ["17"]),
    "nanoGPT": (NANOGPT, [], ["37"]),
    "save-best": (SAVE_BEST, [], ["within the save", "4:2"]),
}
CASES = [
    (loop, place, victim, recipe)
    for loop, (_, _, places) in LOOPS.items()
    for place in places
    for victim in ("worker 0", "launcher", "nobody")
    for recipe in RECIPES
]
SHORT = [
    ("makemore, infinite sampler", "17", "launcher", "local_sgd(every=4)"),
    ("nanoGPT", "37", "launcher", "allreduce"),
    ("nanoGPT", "37", "worker 0", "local_sgd(every=4)"),
    ("save-best", "within the save", "worker 0", "allreduce"),
]


@pytest.mark.parametrize("case", mostly_long(CASES, short=map(CASES.index, SHORT)), ids=", ".join)
def test_steps_rates_and_best_file_are_those_of_a_run_that_is_not_interrupted(
    case: tuple[str, str, str, str], tmp_path: Path
) -> None:
    loop, place, victim, recipe = case
    text, arguments, _ = LOOPS[loop]
    (tmp_path / "train.py").write_text(HEAD + text)
    command = [sys.executable, "-m", "stretto.cli", "run", "-n", "2", "--recipe", recipe]
    command += ["--checkpoint-every", "2 rounds"]
    words = ["train.py", victim, place if victim != "nobody" else "never", *arguments]
    code, written = finished([*command, "--out", "run", *words], tmp_path)
    if victim == "launcher":
        assert code == -9
        code, written = finished([*command, "--resume", "run", "--out", "resumed", *words], tmp_path)
    is_alone = victim == "worker 0" and loop != "save-best"  # the other worker, to the end of the stream
    loses = is_alone and "drawn" in arguments  # a shard of its own
    assert code == int(loses), written
    assert ("a part of a stream was not trained" in written) == loses
    assert (tmp_path / "killed").exists() == (victim != "nobody")

    notes = [[json.loads(line) for line in (tmp_path / f"notes-{rank}").read_text().splitlines()] for rank in (0, 1)]
    steps, best_step = STEPS[text], BEST_STEP[text]
    begun = len({note["step"] for note in notes[1] if "step" in note})
    if is_alone and text == NANOGPT and not loses:  # the rest of the 144 numbers, alone until worker 0 is back
        together = 37 if recipe == "allreduce" else 36  # each backward pass is an exchange, or the last step is
        steps = notes[1][-1]["steps"]
        assert 24 <= steps <= (144 - together) // 3
        assert begun - steps in (0, 1)
    else:
        assert begun == steps
    best = {"steps": steps, "best": 2.0, "best_step": best_step}
    assert notes[1][-1] == best
    assert notes[0][-1] == best or victim == "worker 0"  # the run may end before it is back
    trained = [note for of_worker in notes for note in of_worker if "step" in note]
    assert {note["step"] for note in notes[1] if "step" in note} == set(range(begun))
    assert all(note["lr"] == pytest.approx(rate(note["step"]), abs=1e-12) for note in trained if "lr" in note)
    assert all(note["found"] == min(note["step"], best_step) for note in trained if "found" in note)
    file = torch.load(tmp_path / "best.pt", weights_only=False)
    assert (file["step"], file["loss"], file.get("x", "whole")) == (best_step, 2.0, "whole")


def rate(it: int) -> float:
    """Return the rate that nanoGPT's schedule has in an uninterrupted run of one process."""
    if it < 5:
        return 0.05 * (it + 1) / 6
    return 0.005 + 0.5 * (1 + math.cos(math.pi * (it - 5) / 19)) * 0.045


def finished(command: list[str], folder: Path) -> tuple[int, str]:
    """Run a command until all its processes have ended; return its exit code and what it wrote."""
    with (folder / "output").open("w") as output:
        run = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=output, stderr=output)
        try:
            run.wait(LIMIT_S)
        finally:
            run.kill()
            left = [one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(folder)]
            psutil.wait_procs(left, 60)
    return run.returncode, (folder / "output").read_text()
