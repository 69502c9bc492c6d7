"""Tests of the copy of a run directory at another place."""

from __future__ import annotations

import contextlib
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from stretto.errors import LaunchError
from stretto.events import read_events
from stretto.launcher.run_copy import RunCopy

SCRIPT = """
import torch, stretto
torch.manual_seed(0)
x = torch.randn(320, 8); y = x.sum(1, keepdim=True)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True)
for epoch in range(3):
    if epoch == 0:
        loader = stretto.distribute(net, optimizer, loader)
    for a, b in loader:
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
"""

TOLD = """
processes = psutil.Process(os.getppid()).children(recursive=True)
told = [one.pid for one in processes if "hunter2" in one.environ().get("STRETTO_CONFIG", "")]
print("told", told or "nothing", "of", len(processes), "looked at", flush=True)
"""


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no thread copy beside the test."""
    monkeypatch.setattr("stretto.launcher.run_copy.LOOK_S", 3600.0)


@pytest.fixture
def memory(by_hand: None) -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/", recursive=True)


def run_folder(folder: Path) -> Path:
    folder.mkdir()
    for name in ("run.json", "events.jsonl", "join.key", "coordinator.wal", "worker-0.log"):
        (folder / name).write_text(name)
    (folder / "snapshots").mkdir()
    (folder / "snapshots" / "shard0-1.cut").write_text("x")
    return folder


def checkpoint(run: Path, number: int) -> Path:
    folder = run / "checkpoints" / f"round-{number:08}"
    folder.mkdir(parents=True)
    for name in ("manifest.json", "state.safetensors", "worker-0.safetensors"):
        (folder / name).write_text(f"{number} {name}")
    return folder


def stretto(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stretto.cli", "run", *words]
    return subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=150, check=False)


def names(files: Any, root: str) -> set[str]:
    return {path.removeprefix(f"{root}/") for path in files.find(root)}


def test_copy_has_what_can_be_resumed_and_read_and_no_secret(tmp_path: Path, memory: Any) -> None:
    run = run_folder(tmp_path / "run")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / ".unfinished-7").mkdir()
    (run / "checkpoints" / ".unfinished-7" / "manifest.json").write_text("x")
    with RunCopy(run, "memory://store/copy", print):
        assert names(memory, "/store/copy") == {"run.json"}
        first = checkpoint(run, 1)
        second = checkpoint(run, 2)
    shared = {f"checkpoints/{one.name}/{file.name}" for one in (first, second) for file in one.iterdir()}
    assert names(memory, "/store/copy") == {"run.json", "events.jsonl", "worker-0.log", *shared}
    assert memory.cat("/store/copy/checkpoints/round-00000002/manifest.json") == b"2 manifest.json"


def test_removed_checkpoint_is_removed_from_the_copy(tmp_path: Path, memory: Any) -> None:
    run = run_folder(tmp_path / "run")
    with RunCopy(run, "memory://store/copy", print) as copy:
        first = checkpoint(run, 1)
        copy._copy_checkpoints()
        assert any("round-00000001" in name for name in names(memory, "/store/copy"))
        shutil.rmtree(first)
        checkpoint(run, 2)
    found = {name.split("/")[1] for name in names(memory, "/store/copy") if name.startswith("checkpoints")}
    assert found == {"round-00000002"}


def test_manifest_is_copied_last_and_a_store_that_fails_is_tried_again(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder(tmp_path / "run")
    notes: list[str] = []
    put, done, fails = memory.put_file, list[str](), iter([False, True])

    def put_file(source: str, target: str, **more: Any) -> None:
        if "worker-0.safetensors" in target and next(fails, False):
            raise OSError(28, "No space left on device")
        put(source, target, **more)
        done.append(target.rpartition("/")[2])

    monkeypatch.setattr(memory, "put_file", put_file)
    with RunCopy(run, "memory://store/copy", notes.append) as copy:
        checkpoint(run, 1)
        checkpoint(run, 2)
        while not notes:
            copy._attempt(copy._copy_checkpoints)
    assert "behind: No space left on device" in notes[0]
    assert "complete again" in notes[1]
    assert len(notes) == 2
    copied = [name for name in done if name in ("manifest.json", "worker-0.safetensors")]
    assert copied == ["worker-0.safetensors", "manifest.json"] * 2


def test_run_whose_copy_is_not_complete_fails(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_folder(tmp_path / "run")

    def put_file(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    text = "the run is complete, but its copy is not: No space left"
    with pytest.raises(LaunchError, match=text), RunCopy(run, "memory://store/copy", print):
        monkeypatch.setattr(memory, "put_file", put_file)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("nosuch://store/copy", ("Protocol not known", "got: --copy-to nosuch://store/copy")),
        ("run.json/copy", ("nothing can be copied to it", "expected: a folder")),
        ("", ("there is no name of a place", 'got: --copy-to ""')),
        ("file:///", ("there is no name of a place", "got: --copy-to file:///")),
        ("memory://store/copy", ("a copy in memory is lost at the end", "expected: a folder")),
        ("full", ("there is something at full", "new or empty", "try: --copy-to full-2")),
    ],
)
def test_place_that_cannot_be_used_is_an_error_before_training(
    tmp_path: Path, place: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('it has begun')")
    (tmp_path / "run.json").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    done = stretto(tmp_path, "--copy-to", place, "train.py")
    assert done.returncode == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert "it has begun" not in done.stderr


@pytest.mark.parametrize("place", ["copy", "file://{}/copy", "new/copy"])
def test_copy_in_a_folder_is_as_private_as_the_run(tmp_path: Path, place: str) -> None:
    run = run_folder(tmp_path / "run")
    with contextlib.chdir(tmp_path), RunCopy(run, place.format(tmp_path), print):
        pass
    assert stat.S_IMODE((tmp_path / place.rpartition("{}/")[2]).stat().st_mode) == 0o700


def test_copy_of_a_stopped_run_is_resumed_without_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    half = SCRIPT.replace("range(3)", "range(2)")
    (tmp_path / "half.py").write_text(half)
    copy = ["--checkpoint-every", "10 rounds", "--copy-to", f"file://{tmp_path}/copy", "--out", "first"]
    done = stretto(tmp_path, "-n", "2", *copy, "half.py")
    assert done.returncode == 0, done.stderr
    for name in ("events.jsonl", "run.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    shutil.rmtree(tmp_path / "first")
    done = stretto(tmp_path, "-n", "2", "--resume", "copy", "--out", "second", "train.py")
    assert done.returncode == 0, done.stderr
    epochs = [event for event in read_events(tmp_path / "second" / "events.jsonl") if event["event"] == "epoch"]
    assert epochs[-1]["sample_counts"]["once"] == 320
    assert epochs[0]["epoch"] > 1


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_no_process_of_the_run_is_told_the_place_of_the_copy(tmp_path: Path, recipe: str) -> None:
    """Its words may hold a password, and workers and services may be on other hosts."""
    script = SCRIPT.replace("import torch, stretto", "import os, psutil, torch, stretto") + TOLD
    (tmp_path / "train.py").write_text(script)
    done = stretto(tmp_path, "--recipe", recipe, "-n", "2", "--copy-to", str(tmp_path / "hunter2"), "train.py")
    assert (tmp_path / "hunter2" / "run.json").exists(), done.stderr
    told = {line.split()[1] for line in (done.stdout + done.stderr).splitlines() if "looked at" in line}
    assert done.returncode == 0 and told == {"nothing"}, done.stderr
