"""Files of the script in a comparison: each trial begins with those of the user, and none of these is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import stretto
from helper import HERE

x = torch.tensor([[float(word)] for word in Path("data/x.txt").read_text().split()])
torch.manual_seed(0)
net = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
assert not os.path.exists("last.pt"), "an earlier trial is continued"
net.load_state_dict(torch.load(HERE / "best.pt"))
for (batch,) in stretto.distribute(net, optimizer, DataLoader(TensorDataset(x), 2)):
    optimizer.zero_grad()
    net(batch).square().mean().backward()
    optimizer.step()
if stretto.is_main():
    torch.save(net.state_dict(), "best.pt")
    stretto.save(net.state_dict(), "last.pt")
    (HERE / "note.txt").write_text("done")
    with open(os.environ["SHARED"], "a") as file:
        file.write("done")
"""
HELPER = "from pathlib import Path\nHERE = Path(__file__).resolve().parent\n"


def test_no_trial_sees_or_changes_files_of_another_one(tmp_path: Path) -> None:
    project, shared = tmp_path / "project", tmp_path / "shared.log"
    (project / "data").mkdir(parents=True)
    (project / "data" / "x.txt").write_text("1 2 3 4 5 6 7 8")
    (project / "train.py").write_text(SCRIPT)
    (project / "helper.py").write_text(HELPER)
    make = "import torch; torch.save(torch.nn.Linear(1, 1).state_dict(), 'best.pt')"
    subprocess.run([sys.executable, "-c", make], cwd=project, check=True, timeout=120)
    shared.write_text("begun ")
    best = (project / "best.pt").read_bytes()
    command = [sys.executable, "-m", "stretto.cli", "compare", "-n", "2", "--recipe", "local_sgd(every=2)"]
    command += ["--batch", "split", "--out", "found", str(project / "train.py")]
    environment = {**os.environ, "SHARED": str(shared)}
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (project / "best.pt").read_bytes() == best
    assert sorted(os.listdir(project)) == ["best.pt", "data", "found", "helper.py", "train.py"]
    trials = ["local_sgd-every-2-n2-seed0", "single-process-seed0"]
    for trial in trials:
        assert sorted(os.listdir(project / "found" / trial / "files")) == ["best.pt", "last.pt", "note.txt"]
    assert done.stderr.count("files that the script has written: found/RUN/files") == 1
    assert done.stderr.count(f"outside of its private folder: {shared}. ") == 1
    assert not (project / "found" / ".files").exists()
