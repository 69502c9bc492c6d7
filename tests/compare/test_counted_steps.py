"""A comparison of real runs of a script that counts its steps: N workers train on N times the samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

STEPS, BATCH = 24, 8
SCRIPT = f"""
import torch, stretto
torch.manual_seed(0)
x = torch.randn(512, 8)
y = x.sum(1, keepdim=True)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(x, y)
draws = torch.utils.data.RandomSampler(data, replacement=True, num_samples=10**10)
loader = torch.utils.data.DataLoader(data, batch_size={BATCH}, sampler=draws)
loader = stretto.distribute(
    net, optimizer, loader, evaluate=lambda net: {{"error": (net(x) - y).square().mean().item()}}, evaluate_every=4
)
for step, (a, b) in enumerate(loader):
    optimizer.zero_grad()
    (net(a) - b).square().mean().backward()
    optimizer.step()
    if step + 1 >= {STEPS}:
        break
"""


def test_baseline_of_workers_that_count_steps_is_the_single_process_with_as_many_samples(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "stretto.cli", "compare", "-n", "2", "--recipe", "local_sgd(every=4)"]
    done = subprocess.run(
        [*command, "--quiet", "--json", "-", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    alone, double, _ = found["runs"]
    assert [run["samples"] for run in found["runs"]] == [STEPS * BATCH, 2 * STEPS * BATCH, 2 * STEPS * BATCH]
    assert (alone["global_batch_of"], double["global_batch_of"]) == (1, 2)
    verdict = found["verdict"]
    assert verdict["by"] == "metric at equal samples" and verdict["worth"] is False
    assert [(side["run"], side["samples"]) for side in verdict["sides"]] == [
        ("single process (global batch ×2)", 2 * STEPS * BATCH),
        ("local_sgd(every=4)", 2 * STEPS * BATCH),
    ]
    assert "for the same data" not in verdict["sentence"]
