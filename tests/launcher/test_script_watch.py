"""Warnings about files that a script writes and torch calls it makes beside the run, with real processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from run_place import Place

from stretto.events import read_events
from stretto.launcher import script_watch, worker_main
from stretto.launcher.script_watch import Written, several_write
from stretto.launcher.worker_main import failure

WRITES = """
import os
number = str(config.worker)
open(f"mine-{number}", "w").close()
with open("theirs.txt", "a") as file:
    file.write(number)
if number == "0":
    open("only.txt", "w").close()
open("theirs.txt").close()
open(config.run + "/known.txt", "w").close()
"""


def test_file_written_by_several_workers_is_named_once(place: Place) -> None:
    place.script(WRITES)
    command = place.stretto("run", "-n", "2", "--out", "run", "train.py")
    _, written_files = command.communicate(timeout=90)
    assert command.returncode == 0, written_files
    said = [line for line in written_files.decode().splitlines() if "several workers wrote" in line]
    assert len(said) == 1
    assert f"{place.folder / 'theirs.txt'} (workers 0, 1). Use stretto.save" in said[0]
    paths = {
        path for one in read_events(Path("run/events.jsonl")) if one["event"] == "written" for path in one["paths"]
    }
    assert {Path(one).name for one in paths} == {"mine-0", "mine-1", "theirs.txt", "only.txt"}


def test_single_worker_is_not_watched(place: Place) -> None:
    folder = place.run(WRITES)
    assert not (folder / "events.jsonl").exists()


def test_equal_names_on_two_hosts_are_two_files() -> None:
    def written_files(worker: int, host: str) -> dict[str, Any]:
        return {"event": "written", "worker": worker, "host": host, "paths": ["/data/best.pt"]}

    assert several_write([written_files(0, "a"), written_files(1, "b")]) is None
    assert "(workers 0, 2)" in (
        several_write([written_files(0, "a"), written_files(1, "b"), written_files(2, "a")]) or ""
    )


def test_files_saved_by_torch_are_noted_and_temporary_files_are_not(tmp_path: Path) -> None:
    module: Any = ModuleType("torch.serialization")
    module.save = lambda obj, f: obj
    write_events = Written([tmp_path / "run"])
    write_events._watch_saves(module)
    assert module.save(1, tmp_path / "a.pt") == 1
    module.save(2, f=str(tmp_path / "run" / "b.pt"))
    write_events._audit("open", (str(tmp_path / "c"), None, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    write_events._audit("open", (str(tmp_path / "d"), "r", os.O_RDONLY))
    assert list(write_events.paths) == [str(tmp_path / "a.pt")]


@pytest.mark.parametrize("distributed", [True, False])
def test_steps_before_distribute_give_one_warning(
    distributed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hooks: list[Any] = []
    module: Any = ModuleType("torch.optim.optimizer")
    module.register_optimizer_step_post_hook = hooks.append
    face: Any = ModuleType("stretto.api")
    face.is_distributed = lambda: distributed
    monkeypatch.setitem(sys.modules, "stretto.api", face)
    script_watch._watch_steps(module, 4)
    for _ in range(3):
        hooks[0](None, (), {})
    assert capsys.readouterr().err.count("each of the 4 workers trains alone") == (not distributed)


@pytest.mark.parametrize("workers", [1, 2])
def test_torn_file_that_torch_loads_is_an_error_with_advice(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_main, "worker_config", lambda: SimpleNamespace(world_size=workers))
    file = tmp_path / "model.pt"
    torch.save({"weight": torch.zeros(1000)}, file)
    whole = file.read_bytes()
    for size in (0, 100, len(whole) // 2):
        file.write_bytes(whole[:size])
        with pytest.raises(Exception) as found:  # noqa: PT011 - torch raises one of several
            torch.load(file)
        assert failure(found.value).count("write it with stretto.save(obj, path)") == (workers == 2)


def test_tensorboard_folder_of_several_workers_is_named() -> None:
    """The files have different names, but TensorBoard shows them as one run."""

    def write_events(worker: int) -> dict[str, Any]:
        name = f"/logs/events.out.tfevents.17.host.{worker}.0"
        return {"event": "written", "t": 0.0, "worker": worker, "host": "here", "paths": [name]}

    assert "/logs/events.out.tfevents.* (workers 0, 1)" in (several_write([write_events(0), write_events(1)]) or "")
    assert several_write([write_events(0)]) is None
    named_in_bytes = Written([])
    named_in_bytes.note(b"/logs/events.out.tfevents.17.host.0.0")
    assert list(named_in_bytes.paths) == ["/logs/events.out.tfevents.17.host.0.0"]


@pytest.mark.parametrize("cache", ["__pycache__", "torchinductor_me", ".triton"])
def test_files_of_compilers_are_written_by_several_without_a_notice(tmp_path: Path, cache: str) -> None:
    written = Written([])
    written.note(tmp_path / cache / "locks" / "a.lock")
    assert not written.paths
    written.note(tmp_path / "a.lock")
    assert [*written.paths] == [str(tmp_path / "a.lock")]
