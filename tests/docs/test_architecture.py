"""The files of the sequence diagrams are entered by the runs that the diagrams describe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

from stretto.launcher.reexec import FIXED

PAGE = (ROOT / "docs" / "architecture.md").read_text()

SCRIPT = """
import sys, threading
import torch, stretto
from torch.utils.data import DataLoader, TensorDataset
entered = set()

def enter(frame, event, argument):
    if event == "call":
        entered.add(frame.f_code.co_filename)

threading.setprofile(enter)
torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(96, 8), torch.randint(0, 2, (96,)))
sys.setprofile(enter)
loader = stretto.distribute(model, optimizer, DataLoader(data, batch_size=8), recipe=stretto.parse(sys.argv[2]))
for x, y in loader:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
stretto.finish()
sys.setprofile(None)
with open(sys.argv[1], "a") as out:
    out.write("\\n".join(entered) + "\\n")
"""
ROWS = "Rows of a table through the server"
LOOKS_ROWS_UP = {"Linear(8, 2)": "EmbeddingBag(9, 2, sparse=True)", "randn(96, 8)": "randint(0, 9, (96, 8))"}
"""Replacements in the script for a model that looks rows up."""
RUNS = {
    "A gradient under all-reduce": ("allreduce", ["run", "-n", "2"]),
    "An update through the server": ("async_sgd", ["run", "-n", "2"]),
    ROWS: ("async_sgd", ["run", "-n", "2"]),
    "A simulated step": ("allreduce", ["simulate", "-n", "2", "--step-time", "5ms", "--network", "100Mbit/s 1ms"]),
    "A killed worker": (
        "allreduce",
        ["simulate", "-n", "3", "--step-time", "5ms", "--faults", "kill worker 2 at 7ms, back after 5ms"],
    ),
}
ELSEWHERE = re.compile(
    "launcher/|membership/(server|client|write_ahead_log)|transport/encrypted_|simulator/(runner|engine)|checkpoint/"
)
"""Files that run in other processes than the script's, or before it, or that a simulation replaces."""


def named(title: str) -> set[str]:
    """Return the files that a section lists as entered."""
    section = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("- ")]
    return {path for line in lines for path in re.findall(r"`(stretto/[\w/]+\.py)`", line)}


@pytest.mark.parametrize("title", RUNS)
def test_files_of_a_diagram_are_entered(title: str, tmp_path: Path) -> None:
    recipe, command = RUNS[title]
    script, seen = tmp_path / "script.py", tmp_path / "seen"
    seen.touch()  # a simulation has files of its own where an argument names a file that does not exist
    text = SCRIPT
    for old, new in LOOKS_ROWS_UP.items() if title == ROWS else ():
        text = text.replace(old, new)
    script.write_text(text)
    words = [sys.executable, "-m", "stretto.cli", *command, "--out", str(tmp_path / "run"), "--quiet"]
    words += [str(script), str(seen), recipe]
    subprocess.run(words, cwd=ROOT, env={**os.environ, **FIXED}, check=True, timeout=300)
    entered = {
        str(Path(path).relative_to(ROOT)) for path in seen.read_text().split() if path.startswith(f"{ROOT}/stretto")
    }
    asked = {path for path in named(title) if not ELSEWHERE.search(path)}
    assert len(asked) >= 4
    assert not asked - entered


def test_every_package_is_in_the_table() -> None:
    packages = {path.parent.name for path in (ROOT / "stretto").glob("*/__init__.py")}
    assert not [name for name in packages if f"`stretto/{name}/`" not in PAGE]


def test_classes_and_messages_of_the_diagrams_exist() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "stretto").rglob("*.py"))
    diagrams = "\n".join(re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S))
    names = set(re.findall(r"\b[A-Z][a-z]+(?:[A-Z]\w+)\b", diagrams)) | {"Push", "Shard", "Flows", "Register"}
    assert len(names) > 10
    assert not [name for name in names if not re.search(rf"^class {name}\b", code, re.M)]
