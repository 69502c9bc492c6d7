"""Rank, barriers, and work that one worker does for all: single process, simulated, live."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from simulator.harness import simulated
from thread_workers import flat, regression, small_net
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto.errors import LaunchError, ScriptError

RECIPES = ["allreduce", "local_sgd(every=3)", "async_sgd(shards=2)", "stale_synchronous(bound=1)"]
LIMIT_S = 240


def test_a_single_process_is_rank_0_of_1_and_main_and_never_waits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (stretto.rank(), stretto.world_size(), stretto.is_main()) == (0, 1, True)
    stretto.barrier()
    with stretto.main_first():
        stretto.print("one", 2, sep="-")
    assert capsys.readouterr().out == "one-2\n"
    stretto.save({"x": torch.ones(2)}, tmp_path / "a" / "b" / "model.pt")
    assert torch.load(tmp_path / "a/b/model.pt")["x"].tolist() == [1, 1]


def test_a_failed_save_keeps_the_previous_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "best.pt"
    stretto.save(1, path)
    path.chmod(0o640)
    stretto.save(2, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(Exception, match="pickle"):
        stretto.save(lambda: None, path)
    assert torch.load(path) == 2
    assert [one.name for one in tmp_path.iterdir()] == ["best.pt"]


def trained(folder: Path, recipe: str, before: Any = None, after: Any = None, epochs: int = 2) -> Any:
    """Return a script that makes its data first, and in each epoch saves at all workers and loads again."""

    def work(worker: int) -> list[int]:
        assert (stretto.rank(), stretto.is_main()) == (worker, worker == 0)
        with stretto.main_first():
            (before or made)(worker)
            assert (folder / "data").exists()
        stretto.barrier()
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(41), batch_size=4), recipe=recipe)
        found = []
        for epoch in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
            if stretto.is_main():
                stretto.save(epoch, folder / "only.pt")
            stretto.save({"epoch": epoch, **net.state_dict()}, folder / "best.pt")
            loaded = torch.load(folder / "best.pt")
            net.load_state_dict({name: one for name, one in loaded.items() if name != "epoch"})
            found.append(loaded["epoch"])
            stretto.barrier()
        (after or (lambda worker: None))(worker)
        return found

    def made(worker: int) -> None:
        assert (folder / "data").exists() == (worker > 0)
        (folder / "data").touch()

    return work


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_main_runs_first_and_a_saved_file_exists_for_all_workers(
    tmp_path: Path, recipe: str, order: tuple[int, ...]
) -> None:
    ended = simulated(3, trained(tmp_path, recipe), recipe, order=order, speed="1,2,3")
    assert ended.found == [[0, 1]] * 3
    assert torch.load(tmp_path / "only.pt") == 1


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd(shards=2)"])
@pytest.mark.parametrize("at", ["35ms", "60ms", "95ms", "130ms"])
@pytest.mark.parametrize("worker", [0, 2])
def test_barriers_end_when_a_worker_fails_and_restarts(tmp_path: Path, recipe: str, at: str, worker: int) -> None:
    fault = f"kill worker {worker} at {at}, back after 20ms"

    def made(worker: int) -> None:
        (tmp_path / "data").touch()

    ended = simulated(3, trained(tmp_path, recipe, made, epochs=4), recipe, fault=fault)
    assert ended.of("fault_injected")
    assert ended.seconds < 20
    assert [one["sample_counts"]["once"] for one in ended.of("epoch")] == [41] * 4


def test_workers_wait_for_a_main_worker_killed_in_main_first() -> None:
    """The restarted main worker runs the block again."""
    script = """
        import pathlib, time
        import stretto
        from thread_workers import regression, small_net
        import torch
        from torch.utils.data import DataLoader
        place = pathlib.Path(__file__).with_name("made")
        with stretto.main_first():
            if stretto.is_main():
                time.sleep(1)
                place.touch()
            assert place.exists()
        net = small_net()
        loader = DataLoader(regression(16), batch_size=4)
        loader = stretto.distribute(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
        for x, y in loader:
            pass
    """
    ended = simulated(3, script, "allreduce", fault="kill worker 0 at 500ms, back after 200ms")
    assert ended.seconds == pytest.approx(1.7, abs=0.2)


def test_a_main_worker_that_raises_in_main_first_ends_the_run(tmp_path: Path) -> None:
    def raises(worker: int) -> None:
        raise OSError("no network")

    with pytest.raises(LaunchError, match="worker 0 failed"):
        simulated(3, trained(tmp_path, "allreduce", raises), "allreduce")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("is_saved", [True, False])
def test_next_worker_writes_the_file_in_whose_writing_main_is_killed(
    tmp_path: Path, recipe: str, is_saved: bool
) -> None:
    script = f"""
        import pathlib, time
        import stretto, torch
        from thread_workers import regression, small_net, sgd
        from torch import nn
        from torch.utils.data import DataLoader

        class Slow:
            def __reduce__(self):
                if stretto.rank() == 0:
                    time.sleep(1000)
                return int, (stretto.rank(),)

        net = small_net()
        optimizer = sgd(net.parameters())
        best = pathlib.Path({str(tmp_path)!r}) / "best.pt"
        for epoch in range(3):
            if not epoch:
                loader = stretto.distribute(net, optimizer, DataLoader(regression(24), batch_size=4))
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
            if epoch < 2:
                stretto.save(epoch if epoch == 0 else Slow() if {not is_saved} else "whole", best)
                assert epoch == 0 or torch.load(best, weights_only=False) in (1, "whole")
            if epoch and stretto.rank() == 0:
                time.sleep(1000)
    """
    ended = simulated(3, script, recipe, fault="kill worker 0 at 100s", asks={"timeout_s": 500.0})
    assert len(ended.of("epoch")) == 3
    assert torch.load(tmp_path / "best.pt", weights_only=False) == ("whole" if is_saved else 1)
    assert [one.name for one in tmp_path.iterdir() if one.suffix != ".part"] == ["best.pt"]


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", "async_sgd(shards=2)"])
def test_save_at_other_workers_does_not_wait_for_a_call_by_main(tmp_path: Path, recipe: str) -> None:
    def work(worker: int) -> None:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(41), batch_size=4), recipe=recipe)
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                if worker == 1:
                    stretto.save(1, tmp_path / "never.pt")
            if worker == 2:
                stretto.save(1, tmp_path / "never.pt")

    assert simulated(3, work, recipe).seconds < 20
    assert not (tmp_path / "never.pt").exists()


def test_a_barrier_in_evaluate_is_refused() -> None:
    """The other workers wait for the numbers of the evaluation, and would come to no barrier."""

    def evaluate(_net: Any) -> dict[str, float]:
        stretto.barrier()
        return {"loss": 0.0}

    def work(_worker: int) -> None:
        net = small_net()
        loader = DataLoader(regression(12), batch_size=4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for x, y in stretto.distribute(net, optimizer, loader, recipe="allreduce", evaluate=evaluate):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()

    with pytest.raises(stretto.StrettoError, match=r"stretto\.barrier inside evaluate"):
        simulated(2, work)


def test_a_barrier_in_the_loop_is_refused_where_workers_take_unequal_numbers_of_batches() -> None:
    def work(worker: int) -> None:
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for _ in stretto.distribute(net, optimizer, DataLoader(regression(41), batch_size=4)):
            stretto.barrier()

    with pytest.raises(stretto.StrettoError, match="unequal numbers of batches"):
        simulated(3, work, "async_sgd")
    assert simulated(3, work, "local_sgd(every=2)").found == [None] * 3


def test_a_barrier_that_one_worker_skips_fails_with_its_number() -> None:
    script = """
        import time
        import stretto
        if stretto.rank():
            stretto.barrier()
        else:
            time.sleep(1000)
            stretto.save(1, __file__ + ".pt")
    """
    with pytest.raises(LaunchError, match="waited 60 s at a barrier .* for worker 0"):
        simulated(3, script, "allreduce", asks={"timeout_s": 60.0})


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)", "async_sgd(shards=2)"])
@pytest.mark.parametrize("at", [None, "35ms", "70ms"])
@pytest.mark.parametrize("worker", [0, 2])
def test_all_workers_have_the_value_of_main_also_where_one_fails_and_restarts(
    recipe: str, at: str | None, worker: int
) -> None:
    def work(worker: int) -> list[Any]:
        found = [stretto.broadcast({"folder": f"version_{worker}", "of": [worker, None, 1.5]}) for _ in range(2)]
        net = small_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        loader = stretto.distribute(net, optimizer, DataLoader(regression(41), batch_size=4), recipe=recipe)
        for epoch in range(3):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
            found.append(stretto.broadcast([epoch, flat(net).sum().item()]))
        stretto.finish()
        found.append(stretto.broadcast(flat(net).sum().item()))
        return found

    fault = f"kill worker {worker} at {at}, back after 20ms" if at else None
    ended = simulated(3, work, recipe, fault=fault)
    assert bool(ended.of("fault_injected")) == (at is not None)
    always = [{"folder": "version_0", "of": [0, None, 1.5]}] * 2
    assert all(one[:2] == always for one in ended.found)
    steady = [one for one in range(3) if at is None or one != worker]
    assert all(ended.found[one] == ended.found[steady[0]] for one in steady)
    assert [one for one, _ in ended.found[steady[0]][2:5]] == [0, 1, 2]
    assert ended.found[worker][4:] == ended.found[steady[0]][4:], "a restarted worker has the later values"


def test_next_worker_gives_the_value_if_main_fails_in_training(tmp_path: Path) -> None:
    script = f"""
        import pathlib, time
        import stretto
        from thread_workers import regression, small_net, sgd
        from torch import nn
        from torch.utils.data import DataLoader

        net = small_net()
        optimizer = sgd(net.parameters())
        for x, y in stretto.distribute(net, optimizer, DataLoader(regression(24), batch_size=4)):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
            if stretto.steps() == 1:
                if stretto.rank() == 0:
                    time.sleep(1000)
                found = stretto.broadcast(stretto.rank())
                pathlib.Path({str(tmp_path)!r}, str(stretto.rank())).write_text(str(found))
    """
    simulated(3, script, "allreduce", fault="kill worker 0 at 100s", asks={"timeout_s": 500.0})
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {"1": "1", "2": "1"}


def test_what_cannot_be_broadcast_is_named() -> None:
    assert stretto.broadcast((1, "two", {"three": b"4"})) == [1, "two", {"three": b"4"}]
    with pytest.raises(ScriptError, match=r"a Tensor(.*\n)*.*numbers, text"):
        stretto.broadcast(torch.ones(2))
    with pytest.raises(ScriptError, match="at most 1,048,576 bytes"):
        stretto.broadcast("x" * (1 << 20))


LIVE = """
import json, os, pathlib, sys
from stretto.process_config import worker_config
with open(f"names-{worker_config().worker}.json", "w") as file:
    json.dump(sorted(os.environ), file)
import torch, stretto
from torch.utils.data import DataLoader, TensorDataset

with stretto.main_first():
    if stretto.is_main():
        torch.save(torch.arange(48.0).reshape(12, 4), "data.pt")
    x = torch.load("data.pt")
stretto.print("seen once by", stretto.world_size())
assert stretto.broadcast(f"logs/{stretto.rank()}") == "logs/0"
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
loader = stretto.distribute(net, optimizer, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2))
for epoch in range(3):
    for a, b in loader:
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
    stretto.save({"epoch": epoch, "state": net.state_dict()}, "models/best.pt")
    found = torch.load("models/best.pt")
    assert found["epoch"] == epoch, (found["epoch"], epoch)
    net.load_state_dict(found["state"])
    stretto.barrier()
    assert stretto.broadcast(stretto.rank()) == 0
pathlib.Path(f"here-{stretto.rank()}").touch()
"""


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_live_workers_synchronise_before_and_during_training(tmp_path: Path, recipe: str) -> None:
    (tmp_path / "train.py").write_text(LIVE)
    command = [
        sys.executable,
        "-m",
        "stretto.cli",
        "run",
        "-n",
        "2",
        "--recipe",
        recipe,
        "--output",
        "all",
        "train.py",
    ]
    inherited = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=inherited, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("seen once by 2") == 1
    assert sorted(one.name for one in tmp_path.glob("here-*")) == ["here-0", "here-1"]
    names = set(json.loads((tmp_path / "names-1.json").read_text()))
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} & names
