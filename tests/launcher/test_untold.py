"""Notices of what scripts do beside the run, with real processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from scene import Place

from stretto.events import read_events
from stretto.launcher import script_watch, worker_main
from stretto.launcher.script_watch import Written, several_write
from stretto.launcher.worker_main import failure

WRITES = """
import os
number = str(config.rank)
open(f"mine-{number}", "w").close()
with open("theirs.txt", "a") as file:
    file.write(number)
if number == "0":
    open("only.txt", "w").close()
open("theirs.txt").close()
open(config.run + "/known.txt", "w").close()
"""


def test_a_file_that_several_workers_write_is_named_once_and_others_are_not(place: Place) -> None:
    place.script(WRITES)
    command = place.stretto("run", "-n", "2", "--out", "run", "train.py")
    _, told = command.communicate(timeout=15)
    assert command.returncode == 0, told
    said = [line for line in told.decode().splitlines() if "several workers wrote" in line]
    assert len(said) == 1
    assert f"{place.folder / 'theirs.txt'} (workers 0, 1). Use stretto.save" in said[0]
    paths = {
        path for one in read_events(Path("run/events.jsonl")) if one["event"] == "written" for path in one["paths"]
    }
    assert {Path(one).name for one in paths} == {"mine-0", "mine-1", "theirs.txt", "only.txt"}


def test_one_worker_is_not_watched(place: Place) -> None:
    folder = place.run(WRITES)
    assert not (folder / "events.jsonl").exists()


def test_equal_names_on_two_hosts_are_two_files() -> None:
    def told(worker: int, host: str) -> dict[str, Any]:
        return {"event": "written", "worker": worker, "host": host, "paths": ["/data/best.pt"]}

    assert several_write([told(0, "a"), told(1, "b")]) is None
    assert "(workers 0, 2)" in (several_write([told(0, "a"), told(1, "b"), told(2, "a")]) or "")


def test_what_torch_saves_is_noted_and_a_temporary_file_is_not(tmp_path: Path) -> None:
    module: Any = ModuleType("torch.serialization")
    module.save = lambda obj, f: obj
    written = Written([tmp_path / "run"])
    written._watch_saves(module)
    assert module.save(1, tmp_path / "a.pt") == 1
    module.save(2, f=str(tmp_path / "run" / "b.pt"))
    written._audit("open", (str(tmp_path / "c"), None, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    written._audit("open", (str(tmp_path / "d"), "r", os.O_RDONLY))
    assert list(written.paths) == [str(tmp_path / "a.pt")]


@pytest.mark.parametrize("distributed", [True, False])
def test_steps_before_distribute_are_said_once(
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
    """Their files have names of their own, and are drawn as one run."""

    def written(worker: int) -> dict[str, Any]:
        name = f"/logs/events.out.tfevents.17.host.{worker}.0"
        return {"event": "written", "t": 0.0, "worker": worker, "host": "here", "paths": [name]}

    assert "/logs/events.out.tfevents.* (workers 0, 1)" in (several_write([written(0), written(1)]) or "")
    assert several_write([written(0)]) is None
