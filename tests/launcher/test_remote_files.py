"""Runs whose workers do not see the run directory: checkpoints and the trained model reach it, whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from own_disk import own_disk
from run_place import Place, config_of, until
from safetensors.torch import load_file

from stretto.checkpoint.folder import DamagedError, checked
from stretto.checkpoint.model_file import newest
from stretto.checkpoint.storage import Checkpoints
from stretto.events import read_events

BEFORE = """
import msgspec
import stretto.launcher.process_specs as specs
make = specs.ProcessPlan._worker_config
def without_run(plan, *given):
    return msgspec.structs.replace(make(plan, *given), run=None)
specs.ProcessPlan._worker_config = without_run
"""
"""Hides the run directory from all workers."""
SCRIPT = """
import os, pathlib, sys, time, torch, stretto
from stretto.checkpoint.file_messages import SendWindow
here = pathlib.Path(os.environ["BESIDE"])
new_parts = SendWindow.new_parts
def held(window):
    if window.confirmed > 100 and (here / "hold").exists():
        (here / "sending").write_text(str(os.getpid()))
        while (here / "hold").exists():
            time.sleep(0.01)
    return new_parts(window)
SendWindow.new_parts = held
torch.manual_seed(0)
x = torch.randn(64, 8); y = x.sum(1, keepdim=True)
net = torch.nn.Sequential(torch.nn.Linear(8, 100_000), torch.nn.Linear(100_000, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=1e-7)
data = torch.utils.data.TensorDataset(x, y)
loader = stretto.distribute(net, optimizer, torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))
for epoch in range(int(sys.argv[1])):
    for a, b in loader:
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
        (here / f"trained-{stretto.rank()}-{os.getpid()}").touch()
        while (here / "stop").exists() and epoch == int(sys.argv[1]) - 1:
            time.sleep(0.01)
"""
"""Training whose uploads stop in the middle while there is a file `hold`, and whose last epoch waits for `stop`."""
COPIED = f"""{BEFORE}
import os, shutil
import stretto.cli.main as cli
os.chdir("..")
try:
    cli.main()
finally:
    shutil.copytree("disk/run", "copy")
"""
"""Runs the command in the folder above the current one, and copies the run directory of the disk."""
LAST = "final.safetensors"
WAIT = """
        while (here / "stop").exists() and epoch == int(sys.argv[1]) - 1:
            time.sleep(0.01)
"""
SLOW = """
        if (here / "stop").exists():
            time.sleep(0.05)
"""
SAVED = """
from safetensors.torch import save_file
stretto.finish()
save_file(kept.state_dict(), here / f"kept-{stretto.rank()}")
"""


@pytest.fixture
def remote_place(place: Place, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a place with a script, whose runs have a coordinator."""
    place.recovers = True
    (place.folder / "train.py").write_text(SCRIPT)
    monkeypatch.setenv("BESIDE", str(tmp_path_factory.mktemp("beside")))
    return place


def beside(name: str) -> Path:
    return Path(os.environ["BESIDE"], name)


def start(place: Place, epochs: int, *options: str, before: str = BEFORE, out: str = "here") -> subprocess.Popen[bytes]:
    return place.stretto("run", "-n", "2", "--out", out, *options, "train.py", str(epochs), before=before)


def check_ended(run: subprocess.Popen[bytes]) -> str:
    _, err = run.communicate(timeout=120)
    assert run.returncode == 0, err.decode()
    return err.decode()


def events(out: str, kind: str) -> list[dict[str, Any]]:
    return [one for one in read_events(Path(out, "events.jsonl")) if one["event"] == kind]


def warnings(out: str = "here") -> str:
    return "\n".join(one["text"] for one in events(out, "warning"))


def whole(out: str = "here") -> list[str]:
    """Return the names of the checkpoints, which are all whole, unless one is removed while it is read."""
    folder, names = Path(out, "checkpoints"), []
    for path in sorted(folder.glob("round-*")):
        try:
            checked(path)
        except DamagedError:
            assert not path.exists(), f"{path} is not whole"
        else:
            names.append(path.name)
    return names


def sending() -> int:
    """Return the pid of the worker whose upload is held."""
    until(lambda: beside("sending").exists() and beside("sending").read_text(), limit_s=90)
    return int(beside("sending").read_text())


def process_of(place: Place, kind: str) -> list[int]:
    return [one.pid for one in place.left() if config_of(one).get("type") == kind]


@pytest.mark.parametrize("recipe", ["local_sgd(every=2)", pytest.param("async_sgd", marks=pytest.mark.long)])
def test_checkpoints_and_model_of_workers_without_the_run_directory_are_in_it(remote_place: Place, recipe: str) -> None:
    options = ["--recipe", recipe, "--checkpoint-every", "4 rounds", "--keep", "2"]
    check_ended(start(remote_place, 3, *options))
    assert len(whole()) in (1, 2), "a newer one may have replaced one that waited"
    model = load_file(Path("here", LAST))
    assert model["0.weight"].shape == (100_000, 8)
    left = {path.name for path in Path.cwd().iterdir()}
    assert left <= {"here", "train.py", "__pycache__"}, "the workers have written on their own disk"
    assert ".incoming" not in os.listdir("here")
    if recipe.startswith("local"):
        check_ended(start(remote_place, 3, *options, before="", out="seen"))
        seen = load_file(Path("seen", LAST))
        assert all(seen[name].equal(tensor) for name, tensor in model.items())
        assert sorted(os.listdir("here")) == sorted(os.listdir("seen"))
    check_ended(start(remote_place, 5, "--recipe", recipe, "--resume", "here", before="", out="again"))
    check_ended(start(remote_place, 5, "--recipe", recipe, "--resume", "here", out="there"))
    for out in ("again", "there"):
        assert "continues from the checkpoint of round" in warnings(out)
    if recipe.startswith("local"):
        again, there = (load_file(Path(out, LAST)) for out in ("again", "there"))
        assert all(again[name].equal(tensor) for name, tensor in there.items())


def test_last_model_of_a_stopped_run_is_in_it(remote_place: Place) -> None:
    beside("stop").touch()
    run = start(remote_place, 3, "--recipe", "local_sgd(every=2)")
    until(lambda: len(events("here", "epoch")) == 2 if Path("here/events.jsonl").exists() else False, limit_s=90)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=120)
    model = newest(Path("here"))
    assert model is not None and (model.epoch, model.cause) == (2, "stopped by SIGINT"), err.decode()
    assert load_file(model.path)["0.weight"].shape == (100_000, 8)
    assert err.decode().splitlines()[-1].startswith("the last model on which the workers agreed, after epoch 2")


def test_checkpoint_of_a_killed_sender_is_not_there_and_the_next_one_is(remote_place: Place) -> None:
    beside("hold").touch()
    run = start(remote_place, 30, "--recipe", "local_sgd(every=2)", "--checkpoint-every", "4 rounds")
    os.kill(sending(), signal.SIGKILL)
    assert whole() == []
    until(lambda: "failed" in str(events("here", "membership")), limit_s=60)
    beside("hold").unlink()
    until(whole, limit_s=90)
    check_ended(run)
    assert whole() and Path("here", LAST).exists()
    assert ".incoming" not in os.listdir("here")


def test_killed_coordinator_receives_the_checkpoint_again(remote_place: Place) -> None:
    beside("hold").touch()
    run = start(remote_place, 3, "--recipe", "local_sgd(every=2)", "--checkpoint-every", "4 rounds")
    sending()
    assert os.listdir("here/.incoming") and whole() == []
    (killed,) = process_of(remote_place, "coordinator")
    os.kill(killed, signal.SIGKILL)
    until(lambda: process_of(remote_place, "coordinator") not in ([], [killed]), limit_s=60)
    beside("hold").unlink()
    check_ended(run)
    assert whole() and Path("here", LAST).exists()
    assert "could not be written" not in warnings()
    assert ".incoming" not in os.listdir("here")


def test_full_disk_of_the_launcher_is_reported_and_training_continues(remote_place: Place) -> None:
    Path("disk").mkdir()
    options = ["--recipe", "local_sgd(every=2)", "--checkpoint-every", "4 rounds", "--out", "disk/run"]
    command = [sys.executable, "-P", "-c", COPIED, "run", "-n", "2", *options, "train.py", "3"]
    line = [*own_disk("18m", Path("disk").absolute()), *command]
    done = subprocess.run(line, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    said = warnings("copy")
    assert "the checkpoint could not be written: No space left on device" in said
    assert "training continues; there is no complete one yet" in said
    assert "the trained model is in" in said
    assert len(list(Path.cwd().glob("*-final.safetensors"))) == 1
    assert [one["epoch"] for one in events("copy", "epoch")] == [1, 2, 3], "the log has room"
    assert Checkpoints(Path("copy/checkpoints")).newest() is None


def test_further_section_has_its_files_in_its_own_folder(remote_place: Place) -> None:
    train = remote_place.folder / "train.py"
    train.write_text(SCRIPT + "net =" + SCRIPT.partition("\nnet =")[2])
    check_ended(start(remote_place, 2, "--checkpoint-every", "8 rounds"))
    for folder in ("here", "here/section-2"):
        assert whole(folder) and load_file(Path(folder, LAST))["0.weight"].shape == (100_000, 8)
    assert Path("here/final.random").stat().st_size > 0
    assert '"section": 2' in Path("here/section-2/run.json").read_text()


def test_workers_without_the_run_directory_that_all_fail_continue_from_its_last_checkpoint(remote_place: Place) -> None:
    beside("stop").touch()
    run = start(remote_place, 4, "--recipe", "local_sgd(every=2)", "--checkpoint-every", "4 rounds")
    until(lambda: whole() and len(process_of(remote_place, "worker")) == 2, limit_s=90)
    for pid in process_of(remote_place, "worker"):
        os.kill(pid, signal.SIGKILL)
    until(lambda: "continues from the checkpoint of round" in warnings(), limit_s=90)
    beside("stop").unlink()
    check_ended(run)
    assert Path("here", LAST).exists()


def test_restarted_worker_receives_the_model_of_an_earlier_section(remote_place: Place) -> None:
    first, _, rest = SCRIPT.replace("100_000", "100").partition("\nnet =")
    slow = rest.replace(WAIT, SLOW).replace("int(sys.argv[1])", "150")
    (remote_place.folder / "train.py").write_text(
        f"{first}\nnet ={rest.replace(WAIT, '')}\nkept = net\nnet ={slow}{SAVED}"
    )
    beside("stop").touch()
    run = start(remote_place, 2, "--recipe", "local_sgd(every=2)")
    begun = Path("here/section-2/events.jsonl")
    until(lambda: begun.exists() and len(events("here/section-2", "start")) == 2, limit_s=90)
    killed = next(one["pid"] for one in events("here/section-2", "start") if one["worker"] == 1)
    os.kill(killed, signal.SIGKILL)
    until(lambda: any(one["pid"] != killed for one in events("here/section-2", "start")[2:]), limit_s=90)
    beside("stop").unlink()
    check_ended(run)
    first_model = load_file(Path("here", LAST))
    kept = [load_file(path) for path in beside("kept").parent.glob("kept-*")]
    assert len(kept) == 2
    for model in kept:
        assert all(model[name].equal(tensor) for name, tensor in first_model.items())


LEAVING = """
from stretto.strategies.strategy_state import StrategyState
from stretto.training.residual_handover import ResidualHandover
def total(residuals):
    return repr(sum(one.double().sum().item() for one in residuals.values()))
add, give = StrategyState.add_residuals, ResidualHandover.give
def adding(state, residuals):
    add(state, residuals)
    (here / "added").write_text(total(residuals))
def giving(handover, worker):
    (here / "given").write_text(total(handover._trainer.strategy.state.residuals()))
    while (here / "stop").exists():
        time.sleep(0.01)
    give(handover, worker)
StrategyState.add_residuals, ResidualHandover.give = adding, giving
"""
"""Notes residuals that are given and added, and lets a worker that leaves wait with its own while there is `stop`."""


@pytest.mark.parametrize("before", [BEFORE, ""], ids=["not seen", "seen"])
def test_residual_of_a_worker_that_leaves_reaches_the_others_though_they_have_continued(
    remote_place: Place, before: str
) -> None:
    script = SCRIPT.replace("100_000", "1000").replace(WAIT, SLOW).replace('"stop"', '"slow"')
    head, _, rest = script.partition("torch.manual_seed(0)\n")
    (remote_place.folder / "train.py").write_text(f"{head}{LEAVING}torch.manual_seed(0)\n{rest}")
    beside("stop").touch()
    beside("slow").touch()
    recipe = "local_sgd(every=1, how=error_feedback(top_k(0.01)))"
    run = start(remote_place, 100, "--recipe", recipe, before=before)
    until(lambda: len(list(beside("x").parent.glob("trained-*"))) == 2, limit_s=90)
    left = next(one["pid"] for one in events("here", "start") if one["worker"] == 1)
    os.kill(left, signal.SIGTERM)
    until(beside("given").exists, limit_s=60)
    until(lambda: [one["members"] for one in events("here", "generation_changed")] == [[0]], limit_s=60)
    assert not beside("added").exists()
    beside("stop").unlink()
    until(beside("added").exists, limit_s=60)
    beside("slow").unlink()
    check_ended(run)
    assert beside("added").read_text() == beside("given").read_text() != "0.0"
    assert os.listdir("here/residuals") == []
    assert "residual" not in warnings()
