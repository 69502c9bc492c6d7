"""Traps of scripts: one script for each is named with its line, and no script of the examples is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent

import pytest

from stretto.launcher import script_check
from stretto.launcher.script_check import in_source

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
HEAD = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stretto

torch.manual_seed(0)
x = torch.randn(56, 4)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = stretto.distribute(model, optimizer, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8))
"""
STEP = """
optimizer.zero_grad()
nn.functional.mse_loss(model(a), b).backward()
optimizer.step()
"""


def script(text: str) -> str:
    """Return a script; STEP in its loop is a step, and TRAP marks the line that is named."""
    lines = dedent(text).splitlines()
    filled = [indent(STEP, line[: -len(line.lstrip())]) if line.strip() == "STEP" else line for line in lines]
    return HEAD + "\n".join(filled) + "\n"


IN_SOURCE = {
    "a counter with a limit": (
        "counter",
        """
        step = 0
        while step < 100:
            for a, b in loader:
                STEP
                step += 1  # TRAP
        """,
    ),
    "a counter that breaks": (
        "counter",
        """
        best, count = 1.0, 0
        for epoch in range(3):
            for a, b in loader:
                STEP
                count += 1  # TRAP
                if count >= 20:
                    break
        """,
    ),
    "a step from the epoch": (
        "counter",
        """
        for epoch in range(3):
            for i, (a, b) in enumerate(loader):
                STEP
                stretto.log(step=epoch * len(loader) + i)  # TRAP
        """,
    ),
    "a step from the epoch in another order": (
        "counter",
        """
        for epoch in range(3):
            for i, (a, b) in enumerate(loader):
                STEP
                stretto.log(step=i + len(loader) * epoch)  # TRAP
        """,
    ),
    "a counter that is an attribute": (
        "counter",
        """
        class Training:
            def __init__(self):
                self.step = 0

            def run(self):
                for epoch in range(3):
                    for a, b in loader:
                        STEP
                        self.step = self.step + 1  # TRAP
                        if self.step >= 20:
                            return

        Training().run()
        """,
    ),
    "the last batch": (
        "counter",
        """
        for epoch in range(3):
            for i, (a, b) in enumerate(loader):
                if i + 1 == len(loader):  # TRAP
                    print("the epoch ends")
                STEP
        """,
    ),
    "an endless loader": (
        "counter",
        """
        for i, (a, b) in enumerate(loader):  # TRAP
            STEP
            if i + 1 >= 300:
                break
        """,
    ),
    "a step by hand": (
        "update by hand",
        """
        for a, b in loader:
            nn.functional.mse_loss(model(a), b).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad  # TRAP
        """,
    ),
    "a step in place": (
        "update by hand",
        """
        for a, b in loader:
            nn.functional.mse_loss(model(a), b).backward()
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.1)  # TRAP
        """,
    ),
    "the best loss": (
        "save-best",
        """
        best = float("inf")
        for epoch in range(3):
            for a, b in loader:
                STEP
            loss = evaluated()
            if loss < best:  # TRAP
                best = loss
                torch.save(model.state_dict(), "best.pt")
        """,
    ),
    "the best loss by min": (
        "save-best",
        """
        best = 1e9
        for epoch in range(3):
            for a, b in loader:
                STEP
            loss = evaluated()
            is_better = loss < best
            best = min(loss, best)
            if is_better:  # TRAP
                stretto.save(model.state_dict(), "best.pt")
        """,
    ),
    "a layer of the forward pass": (
        "unseeded layers",
        """
        class Net(nn.Module):
            def forward(self, x):
                return nn.Linear(4, 1)(x)  # TRAP
        """,
    ),
}
WITHOUT = {
    "values in checkpoints": """
        kept = stretto.checkpointed(best=float("inf"), step=0)
        for epoch in range(3):
            for a, b in loader:
                STEP
                kept.step += 1
            loss = evaluated()
            if loss < kept.best:
                kept.best = loss
                stretto.save(model.state_dict(), "best.pt")
        """,
    "counts of an epoch, and of what is printed": """
        seen = 0
        for epoch in range(3):
            total, right = 0.0, 0
            for i, (a, b) in enumerate(loader):
                STEP
                seen += len(a)
                right += 1
                if i % 100 == 0:
                    print(seen, total / right)
            if epoch >= 2:
                torch.save(model.state_dict(), "last.pt")
        """,
    "gradients that are changed": """
        for a, b in loader:
            loss = nn.functional.mse_loss(model(a), b)
            loss.backward()
            for parameter in model.parameters():
                parameter.grad.data.clamp_(-1, 1)
                parameter.grad += 0.01 * parameter.grad
            for average, parameter in zip(averages, model.parameters()):
                average.mul_(0.9).add_(parameter.detach(), alpha=0.1)
            optimizer.step()
        """,
}


@pytest.mark.parametrize("case", IN_SOURCE)
def test_traps_of_the_source_are_named_with_their_line(case: str, tmp_path: Path) -> None:
    name, text = IN_SOURCE[case]
    (tmp_path / "train.py").write_text(script(text))
    lines = [number for number, line in enumerate(script(text).splitlines(), 1) if "# TRAP" in line]
    found = in_source(tmp_path / "train.py")
    assert [(trap.name, trap.line) for trap in found] == [(name, lines[0])]
    assert found[0].file.endswith("train.py") and found[0].to_type


@pytest.mark.parametrize("case", WITHOUT)
def test_scripts_without_a_trap_have_none_in_the_source(case: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(script(WITHOUT[case]))
    assert in_source(tmp_path / "train.py") == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_have_no_trap_in_the_source(example: Path) -> None:
    assert in_source(example) == []


IN_RUN = {
    "uneven batches": """
        batches = {}
        for epoch in range(9):
            for a, b in loader:
                STEP
                batches[len(batches)] = len(a)
                if len(batches) == 5 + stretto.rank():
                    raise SystemExit(0)
        """,
    "shared files": """
        for epoch in range(3):
            for a, b in loader:
                STEP
            torch.save(model.state_dict(), "last.pt")  # TRAP
        """,
    "unseeded layers": """
        for epoch in range(3):
            for i, (a, b) in enumerate(loader):
                if i == 2:
                    model.weight = nn.Parameter(torch.randn(1, 4))
                    optimizer.add_param_group({"params": [model.weight]})
                STEP
        """,
}
ENDLESS = """
from helper import NAME
for epoch in range(10**9):
    for a, b in loader:
        STEP
    stretto.save(model.state_dict(), NAME)
"""


def checked(folder: Path, text: str, *options: str) -> tuple[int, list[dict[str, object]], str]:
    """Return the exit code, the traps and the other output of a check."""
    (folder / "train.py").write_text(script(text))
    return checked_file(folder, *options, "train.py")


def checked_file(folder: Path, *words: str) -> tuple[int, list[dict[str, object]], str]:
    command = [sys.executable, "-m", "stretto.cli", "check", "--json", "-", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    return done.returncode, json.loads(done.stdout or "[]"), done.stderr


@pytest.mark.parametrize("name", IN_RUN)
def test_traps_of_the_run_are_named(name: str, tmp_path: Path) -> None:
    code, traps, output = checked(tmp_path, IN_RUN[name])
    assert ([trap["name"] for trap in traps], code) == ([name], 1), output
    lines = [number for number, line in enumerate(script(IN_RUN[name]).splitlines(), 1) if "# TRAP" in line]
    assert not lines or traps[0]["line"] == lines[0]
    assert traps[0]["file"] == "train.py" and traps[0]["to_type"]
    assert os.listdir(tmp_path) == ["train.py"]


def test_check_ends_after_two_epochs_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("NAME = 'last.pt'\n")
    (tmp_path / "last.pt").write_text("a model of the user")
    code, traps, output = checked(tmp_path, ENDLESS)
    assert (code, traps) == (0, []), output
    assert "train.py: no trap was found" in output
    assert sorted(os.listdir(tmp_path)) == ["helper.py", "last.pt", "train.py"]
    assert (tmp_path / "last.pt").read_text() == "a model of the user"


ROWS = """
rows = nn.Embedding(56, 4, sparse=True)
optimizer = torch.optim.SGD(rows.parameters(), lr=0.01)
loader = stretto.distribute(rows, optimizer, DataLoader(torch.arange(56), 8))
for number in loader:
    optimizer.zero_grad()
    rows(number).square().sum().backward()
    optimizer.step()
"""
CLOSURE = """
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)
loader = stretto.distribute(model, optimizer, loader, recipe="async_sgd")
def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(a), b)
    loss.backward()
    return loss
for a, b in loader:
    optimizer.step(closure)
"""


@pytest.mark.parametrize(
    ("text", "recipe"),
    [(CLOSURE, "local_sgd(every=16)"), pytest.param(ROWS, "async_sgd", marks=pytest.mark.long)],
    ids=["quoted", "plain"],
)
def test_a_script_that_needs_another_recipe_is_checked_under_the_one_that_its_error_names(
    text: str, recipe: str, tmp_path: Path
) -> None:
    own = "loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8)"
    (tmp_path / "train.py").write_text(HEAD.rpartition("loader = ")[0] + own + text)
    code, traps, output = checked_file(tmp_path, "train.py")
    assert (code, traps) == (0, []), output
    assert output.count(f"checked with --recipe {recipe}, since without") == 1


def test_a_layout_is_checked_with_two_workers_of_all_their_processes(tmp_path: Path) -> None:
    text = script("for a, b in loader:\n    STEP").replace(
        "nn.Linear(4, 1)", "nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))"
    )
    (tmp_path / "train.py").write_text(text + "print('of', stretto.world_size())")
    code, traps, output = checked_file(tmp_path, "--layout", "pipeline(2)", "train.py")
    assert (code, traps) == (0, []), output
    code, traps, output = checked_file(tmp_path, "--layout", "pipeline(3)", "train.py")
    assert code == 1 and [trap["name"] for trap in traps] == ["error"], output


RUNS = [
    ["digits.py"],
    ["gan.py"],
    ["kfold.py"],
    ["lstm.py"],
    ["mnist.py"],
    ["recommender.py"],
    ["shakespeare.py"],
    ["thaw.py"],
]


@pytest.mark.long
@pytest.mark.parametrize("words", [*RUNS, ["-m", "package.train"]], ids=" ".join)
def test_checks_of_the_examples_find_no_trap(words: list[str]) -> None:
    code, traps, output = checked_file(ROOT / "examples", *words)
    assert (code, traps) == (0, []), output


def test_modules_beside_the_script_are_read(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "train.py").write_text("from package import loop\nimport os, missing\n")
    (tmp_path / "package" / "loop.py").write_text("from . import more\n")
    (tmp_path / "package" / "more.py").write_text("")
    found = {str(file.relative_to(tmp_path)) for file in script_check._sources(tmp_path / "train.py")}
    assert found == {"train.py", "package/loop.py", "package/more.py"}
