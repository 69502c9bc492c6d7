"""Runs of real processes, from the command line to gloo and back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from run_place import MARK, PATH, Place, config_of, until
from safetensors.torch import load_file

from stretto.events import read_events
from stretto.kernels import is_native
from stretto.process_config import WorkerConfig
from stretto.run_config import RunConfig

LIMIT_S = 240

PLAIN = """
import torch, stretto
torch.manual_seed(0)
x = torch.randn(90, 6)
y = torch.sin(x.sum(1, keepdim=True))
net = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8, shuffle=True)
LINE
for epoch in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        loss = ((net(a) - b) ** 2).mean()
        loss.backward()
        optimizer.step()
torch.save(net.state_dict(), "net.pt")
"""
LINE = 'loader = stretto.distribute(net, optimizer, loader, evaluate=lambda net: {"loss": ((net(x) - y) ** 2).mean()})'


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def call(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def stretto_run(folder: Path, path: Path, workers: int, recipe: str, out: str) -> dict[str, torch.Tensor]:
    command = ["-m", "stretto.cli", "run", "-n", str(workers), "--recipe", recipe, "--out", out, str(path)]
    done = call(folder, sys.executable, *command)
    assert done.returncode == 0, done.stderr
    return load_file(folder / out / "final.safetensors")


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the model of the script without the line."""
    folder = tmp_path_factory.mktemp("plain")
    done = call(folder, sys.executable, str(script(folder, PLAIN.replace("LINE", ""))))
    assert done.returncode == 0, done.stderr
    model: dict[str, torch.Tensor] = torch.load(folder / "net.pt")
    return model


@pytest.mark.plain_processes
def test_plain_python_run_computes_the_same_bits_as_without_stretto(
    plain_model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    done = call(tmp_path, sys.executable, str(script(tmp_path, PLAIN.replace("LINE", LINE))))
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "net.pt")
    assert found.keys() == plain_model.keys()
    assert all(torch.equal(one, plain_model[name]) for name, one in found.items())
    assert "stretto: epoch 2: loss" in done.stderr


WIDE = PLAIN.replace("32", "2000").replace("Adam(net.parameters(), lr=0.01)", "SGD(net.parameters(), lr=0.01)")


def test_worker_without_a_contribution_sends_no_bytes(tmp_path: Path) -> None:
    """Each of three workers contributes in one round of three; it sends its payload to two others, and little more."""
    path = script(tmp_path, WIDE.replace("LINE", "loader = stretto.distribute(net, optimizer, loader)"))
    stretto_run(tmp_path, path, 3, "Recipe(what=gradient_differences(1.0, groups=3), how=top_k(1.0))", "run")
    ends = [one for one in read_events(tmp_path / "run" / "events.jsonl") if one["event"] == "end"]
    assert len(ends) == 3
    for end in ends:
        raw, said, *_ = end["traffic"]["gradient_differences"]
        assert 0 < said < 0.5 * raw, "a third of what it would be"
        assert end["bytes_counted"] != is_native(), "the means of counts go through shared memory"
        assert 2 * said < end["bytes_sent"] < 2.2 * said + 200_000


def test_run_with_one_worker_computes_the_same_bits_as_the_plain_script(
    plain_model: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    found = stretto_run(tmp_path, script(tmp_path, PLAIN.replace("LINE", LINE)), 1, "local_sgd(every=3)", "one")
    assert all(torch.equal(tensor, plain_model[name]) for name, tensor in found.items())


AGAINST_DDP = """
import copy, os, sys, torch, torch.distributed as dist, stretto
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.manual_seed(0)
x = torch.randn(200, 6, dtype=torch.float64)
y = torch.sin(x.sum(1, keepdim=True))
net = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
theirs = copy.deepcopy(net)
worker, workers = stretto.rank(), stretto.world_size()
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=worker, world_size=workers)


def train(net, loader):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    if workers > 1 and net is not wrapped:
        loader = stretto.distribute(net, optimizer, loader, recipe="allreduce")
    steps = 0
    for epoch in range(10):
        for a, b in loader:
            optimizer.zero_grad()
            ((net(a) - b) ** 2).mean().backward()
            optimizer.step()
            steps += 1
    return steps


class Dealt(torch.utils.data.Sampler):  # the shards that stretto deals: batch b to worker b mod N
    def __iter__(self):
        return iter([list(range(b * 20, b * 20 + 20)) for b in range(worker, 10, workers)])


data = TensorDataset(x, y)
wrapped = torch.nn.parallel.DistributedDataParallel(theirs)
assert train(wrapped, DataLoader(data, batch_sampler=Dealt())) == 50
assert train(net, DataLoader(data, batch_size=20)) == 50
apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(net.parameters(), theirs.parameters()))
dist.destroy_process_group()
print("apart", apart)
sys.exit(0 if apart < 1e-12 else 3)
"""


def test_allreduce_equals_distributed_data_parallel(tmp_path: Path) -> None:
    path = script(tmp_path, AGAINST_DDP)
    line = ["-n", "2", "--out", "run", str(path), str(tmp_path / "store")]
    done = call(tmp_path, sys.executable, "-m", "stretto.cli", "run", *line)
    assert done.returncode == 0, done.stderr
    assert "apart" in done.stdout


def test_same_script_runs_under_torchrun(tmp_path: Path) -> None:
    """The recipe comes from the environment; the run folder is made by worker 0."""
    path = script(tmp_path, PLAIN.replace("LINE", LINE))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = call(tmp_path, *torchrun, str(path), STRETTO_RECIPE="local_sgd(every=3)", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    events = list(read_events(run / "events.jsonl"))
    assert {one["worker"] for one in events if one["event"] == "start"} == {0, 1}
    assert {one["recipe"] for one in events if one["event"] == "start"} == {"local_sgd(every=3)"}
    assert [one["sample_counts"]["once"] for one in events if one["event"] == "epoch"] == [90, 90]
    assert call(tmp_path, sys.executable, "-m", "stretto.cli", "report", str(run)).returncode == 0
    assert (run / "report.html").stat().st_size > 1000


def test_repeated_run_gives_the_same_bits(tmp_path: Path) -> None:
    """Every sample counts once; the order does not depend on the number of processes that load."""
    text = PLAIN.replace("LINE", LINE).replace("shuffle=True", "shuffle=True, num_workers=COUNT")
    text = text.replace("torch.save", "stretto.log(end=1.0); torch.save")
    states = []
    for count in ("0", "2"):
        path = script(tmp_path, text.replace("COUNT", count))
        states.append(stretto_run(tmp_path, path, 3, "allreduce", f"with{count}"))
        epochs = [one for one in read_events(tmp_path / f"with{count}" / "events.jsonl") if one["event"] == "epoch"]
        assert [one["sample_counts"] for one in epochs] == [{"once": 90, "twice": 0, "never": 0, "dropped": 0}] * 2
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


SCALED = """
import torch, stretto
torch.manual_seed(0)
x = torch.randn(97, 6, dtype=torch.float64)
y = torch.sin(x.sum(1, keepdim=True))
net = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
loader = stretto.distribute(net, optimizer, loader, recipe="allreduce")
for epoch in range(5):
    for a, b in loader:
        optimizer.zero_grad()
        scaler.scale(((net(a) - b) ** 2).mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
assert scaler.get_scale() > 64
"""


def test_gradient_scalers_are_equal_on_idle_workers_too(tmp_path: Path) -> None:
    """A scale that grows at another step on one worker would make its gradient weigh another time as much."""
    path = script(tmp_path, SCALED)
    several = stretto_run(tmp_path, path, 4, "allreduce", "several")
    (tmp_path / "joined").mkdir()
    joined = WorkerConfig(run="joined", options=RunConfig(path, single_process=True, global_batch_of=4)).environment()
    done = call(tmp_path, sys.executable, str(path), **joined)
    assert done.returncode == 0, done.stderr
    one = load_file(tmp_path / "joined" / "final.safetensors")
    assert all(torch.allclose(tensor, one[name], rtol=1e-9, atol=1e-12) for name, tensor in several.items())


FAILING = {
    "raises before": ("LINE", "if RANK == 1: raise RuntimeError('boom before')\nLINE", "RuntimeError: boom before"),
    "raises during": (
        "        optimizer.step()\n",
        "        optimizer.step()\n        if RANK == 1: 1 / 0\n",
        "ZeroDivision",
    ),
    "raises after": ("torch.save", "if RANK == 1: raise KeyError('boom after')\ntorch.save", "KeyError: 'boom after'"),
    "differs": ("Linear(6, 32)", "Linear(6, 32 + RANK)", "models differ"),
}


@pytest.mark.parametrize("kind", FAILING)
def test_failing_script_gives_one_error_with_its_worker(kind: str, tmp_path: Path) -> None:
    before, after, wanted = FAILING[kind]
    text = PLAIN.replace(before, after).replace("LINE", LINE)
    if "differs" in kind:
        text = text.replace("Linear(32, 1)", "Linear(32 + RANK, 1)")
    path = script(tmp_path, "import stretto\nRANK = stretto.rank()\n" + text)
    done = call(tmp_path, sys.executable, "-m", "stretto.cli", "run", "-n", "2", "--out", "run", str(path))
    assert done.returncode == 1, done.stderr
    assert wanted in done.stderr
    assert done.stderr.count(wanted) <= 2
    assert "worker" in done.stderr
    marker = str(tmp_path)
    until(lambda: not subprocess.run(["pgrep", "-f", marker], capture_output=True, check=False).stdout, LIMIT_S)


def test_full_disk_under_the_event_log_loses_events_and_nothing_else(tmp_path: Path) -> None:
    """Workers may write no file larger than 8 KB, as on a full disk."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
    text = limit + PLAIN.replace("LINE", LINE).replace("range(2)", "range(25)")
    models = []
    for number, source in enumerate((text, text.removeprefix(limit))):
        command = ["-m", "stretto.cli", "run", "-n", "2", "--out", str(number), str(script(tmp_path, source))]
        done = call(tmp_path, sys.executable, *command)
        assert done.returncode == 0, done.stderr
        assert ("events.jsonl cannot be written" in done.stdout) == (source is text)
        models.append(load_file(tmp_path / str(number) / "final.safetensors"))
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[1])


# Through a parameter server

FREE = """
import os, pathlib, time, torch, stretto
torch.manual_seed(0)
SAMPLES, BATCH, EPOCHS = 240, 8, 2
x = torch.randn(SAMPLES, 6)
y = torch.sin(x.sum(1, keepdim=True))
net = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
data = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(data, batch_size=BATCH, OPTIONS)
loader = stretto.distribute(net, optimizer, loader, MORE)
for epoch in range(EPOCHS):
    for step, (a, b) in enumerate(loader):
        optimizer.zero_grad()
        ((net(a) - b) ** 2).mean().backward()
        optimizer.step()
        BODY
assert all(bool(torch.isfinite(one).all()) for one in net.state_dict().values())
"""
SAMPLES, BATCH, WITHIN_S = 240, 8, 60.0


def async_script(
    name: str = "free.py", more: str = "", body: str = "pass", options: str = "shuffle=True", epochs: int = 2
) -> Path:
    """Write a script into the current folder."""
    told = FREE.replace("OPTIONS", options).replace("MORE", more).replace("BODY", body)
    path = Path(name)
    path.write_text(told.replace("240, 8, 2", f"240, 8, {epochs}"))
    return path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Yield an empty current folder; check afterwards that no process started from it is left."""
    mark = uuid.uuid4().hex
    for name, value in {MARK: mark, "PYTHONPATH": PATH, "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("STRETTO_RECIPE", raising=False)
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path, mark)
    try:
        yield place
        place.await_ends()
    finally:
        place.end()


def wait_for_success(process: subprocess.Popen[bytes]) -> str:
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err.decode()
    return err.decode()


def run_successfully(
    place: Place, path: Path, *options: str, out: str = "run"
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the record and the events of a run that ends without an error."""
    wait_for_success(place.stretto("run", *options, "--out", out, "--json", f"{out}.json", path))
    return json.loads(Path(f"{out}.json").read_text()), list(read_events(Path(out, "events.jsonl")))


ALL_ONCE = {"once": SAMPLES, "twice": 0, "never": 0, "dropped": 0}
LEAVE = "if epoch == 1 and step == 4: break"


def counts_after_leaving(batches: int) -> dict[str, int]:
    """Return the sample counts of an epoch that was left after some batches."""
    return ALL_ONCE | {"once": batches * BATCH, "never": SAMPLES - batches * BATCH}


def sample_counts(events: list[dict[str, Any]]) -> list[Any]:
    return [one["sample_counts"] for one in events if one["event"] == "epoch"]


def check_staleness(found: dict[str, Any], updates: int) -> None:
    staleness = found["staleness"]
    assert staleness.keys() == {"mean", "max", "histogram"}
    counts = {int(late): count for late, count in staleness["histogram"].items()}
    assert sum(counts.values()) == updates
    assert max(late for late, count in counts.items() if count) == staleness["max"]
    mean = sum(late * count for late, count in counts.items()) / updates
    assert staleness["mean"] == pytest.approx(mean, abs=0.01)


def test_asynchronous_sgd_counts_every_sample_once_and_evaluates_in_time(place: Place) -> None:
    """With batch-norm, three workers and two shards; all evaluate after every 4 batches of each worker, 96 samples."""
    more = "evaluate=lambda net: {'loss': ((net(x) - y) ** 2).mean()}, evaluate_every=4"
    options = ["-n", "3", "--recipe", "async_sgd", "--servers", "2"]
    found, events = run_successfully(place, async_script(more=more), *options)
    check_staleness(found, updates=2 * SAMPLES // BATCH)
    assert found["staleness"]["max"] > 0
    assert sum(found["samples_by_worker"]) == 2 * SAMPLES
    assert sample_counts(events) == [ALL_ONCE] * 2
    evaluations = [one for one in events if one["event"] == "evaluation"]
    assert [one["samples"] for one in evaluations] == [96, 192, 288, 384, 480]
    assert [one["versions"] for one in evaluations] == [[12 * k] * 2 for k in range(1, 6)]
    assert {one["event"]: one["servers"] for one in events if one["event"] == "start"} == {"start": 2}


def test_staleness_bound_with_loader_processes_and_a_loop_left_early(place: Place) -> None:
    """Batches that were prefetched when the second epoch was left are not counted."""
    path = async_script(options="shuffle=True, num_workers=2", body=LEAVE)
    found, events = run_successfully(place, path, "-n", "3", "--recipe", "stale_synchronous(bound=2)", "--servers", "2")
    worked = 3 * 5
    check_staleness(found, updates=SAMPLES // BATCH + worked)
    assert len(found["blocked_seconds"]) == 3
    assert sample_counts(events) == [ALL_ONCE, counts_after_leaving(worked)]


def test_synchronous_recipe_over_a_server(place: Place) -> None:
    found, events = run_successfully(place, async_script(), "-n", "3", "--recipe", "Recipe(whom=server(shards=2))")
    assert found["staleness"] is None
    assert found["samples_by_worker"] == [2 * SAMPLES // 3] * 3
    assert sample_counts(events) == [ALL_ONCE] * 2


def test_two_concurrent_runs_one_with_a_straggler_one_with_an_embedded_server(place: Place) -> None:
    """The recipe of the second run is in its script: worker 0 runs the server. Its loop is left early."""
    slow = async_script("slow.py", body="time.sleep(0.01)")
    own = async_script("own.py", more="recipe='async_sgd(shards=2)'", body=LEAVE)
    first = place.stretto("run", "-n", "2", "--recipe", "async_sgd", "--stragglers", "1:5", "--out", "slow", slow)
    second = place.stretto("run", "-n", "2", "--out", "own", own)
    wait_for_success(first)
    wait_for_success(second)
    events = list(read_events(Path("slow/events.jsonl")))
    by_worker = {one["worker"]: one["samples"] for one in events if one["event"] == "end"}
    assert sample_counts(events) == [ALL_ONCE] * 2
    assert sum(by_worker.values()) == 2 * SAMPLES
    assert by_worker[1] < by_worker[0] / 1.5  # of a straggler that is five times slower
    assert sample_counts(list(read_events(Path("own/events.jsonl")))) == [ALL_ONCE, counts_after_leaving(2 * 5)]
    assert len(list(Path("slow").glob("server-*.log"))) == 1
    assert not list(Path("own").glob("server-*.log"))


def test_asynchronous_recipe_in_the_script_under_torchrun(place: Place) -> None:
    number = "stretto.rank()"
    both = f"mine, other = (f'here{{({number} + by) % 2}}' for by in (0, 1)); pathlib.Path(mine).touch()"
    wait = "while not pathlib.Path(other).exists(): time.sleep(0.01)"
    path = async_script(more="recipe='async_sgd(shards=2)'", body=f"{both}\n        {wait}")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = call(place.folder, *torchrun, str(path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    (run,) = Path("runs").iterdir()
    events = list(read_events(run / "events.jsonl"))
    assert sample_counts(events) == [ALL_ONCE] * 2
    assert {one["worker"] for one in events if one["event"] == "update_applied"} == {0, 1}


def test_update_of_a_left_epoch_is_sent_at_exit_under_torchrun(place: Place) -> None:
    """The rest of a large update is sent while the interpreter is ending."""
    path = async_script(more="recipe='async_sgd'", body="if epoch == 1 and step == 2: break")
    path.write_text(path.read_text().replace("32", "20000").replace("lr=0.02", "lr=1e-6"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = call(place.folder, *torchrun, str(path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    (run,) = Path("runs").iterdir()
    assert [one["event"] for one in read_events(run / "events.jsonl")].count("end") == 2


def test_other_workers_process_the_batches_that_one_worker_leaves(place: Place) -> None:
    path = async_script(body="if stretto.rank() == 1 and step == 2: break", options="")
    _, events = run_successfully(place, path, "-n", "3", "--recipe", "async_sgd")
    assert sample_counts(events) == [ALL_ONCE] * 2


STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(zip(x, y))
data = Stream()
"""


@pytest.mark.plain_processes
def test_iterable_dataset_with_a_loop_left_early(place: Place) -> None:
    """Every worker reads its part of a stream, and leaves the second epoch after its third batch."""
    path = async_script(body="if epoch == 1 and step == 2: break", options="")
    path.write_text(path.read_text().replace("data = torch.utils.data.TensorDataset(x, y)", STREAM))
    found, events = run_successfully(place, path, "-n", "2", "--recipe", "async_sgd")
    assert sample_counts(events) == [None, None]
    assert sum(found["samples_by_worker"]) == SAMPLES + 2 * 3 * BATCH
    assert min(found["samples_by_worker"]) >= 3 * BATCH
    check_staleness(found, updates=SAMPLES // BATCH + 6)


@pytest.mark.parametrize(
    ("victim", "lost"),
    [
        ("worker", ""),
        ("shard", ""),
        ("worker of an iterator", ""),
        ("shard of an iterator", "and which an iterator does not give again"),
    ],
)
def test_stream_over_a_server_is_trained_whole_whatever_is_killed_and_of_an_iterator_the_loss_is_named(
    place: Place, victim: str, lost: str
) -> None:
    """The others keep what a failed worker had of an iterator; what a shard has undone is lost, with an error."""
    path = async_script(body="pathlib.Path(f'at-{stretto.rank()}').touch(); time.sleep(0.01)", options="", epochs=1)
    stream = STREAM.replace(
        "return iter(zip(x, y))", "return itertools.islice(itertools.cycle(zip(x, y)), 20 * len(x))"
    )
    text = path.read_text().replace("data = torch.utils.data.TensorDataset(x, y)", stream)
    text = text.replace("optimizer, loader, )", "optimizer, iter(loader))") if "iterator" in victim else text
    path.write_text("import itertools, time\n" + text)
    restarts = "0" if victim == "worker of an iterator" else "1"
    options = ["-n", "2", "--recipe", "async_sgd", "--restarts", restarts, "--json", "run.json"]
    process = place.stretto("run", *options, path)
    until(lambda: Path("at-0").exists() and Path("at-1").exists(), LIMIT_S)
    kind = victim.partition(" ")[0]
    number = 1 if kind == "worker" else 0
    os.kill(next(one for one in place.left() if config_of(one).get(kind) == number).pid, signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT_S)
    assert Path("run.json").exists(), err.decode()
    record = json.loads(Path("run.json").read_text())
    is_named = "the run has ended, and a part of a stream was not trained" in err.decode()
    assert process.returncode == is_named == bool(lost), err.decode()
    assert lost in err.decode()
    assert record["samples"] == sum(record["samples_by_worker"])
    assert (record["samples"] < 20 * SAMPLES) if lost else (record["samples"] == 20 * SAMPLES)


ENDLESS = """
import itertools, pathlib, time, torch, stretto
from stretto.process_config import worker_config
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (torch.arange(row, row + 4) for row in itertools.count(step=4))
net = torch.nn.Embedding(40_000, 1)
torch.nn.init.zeros_(net.weight)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
config = worker_config()
for rows in stretto.distribute(net, optimizer, torch.utils.data.DataLoader(Stream(), batch_size=None)):
    optimizer.zero_grad()
    net(rows).sum().backward()
    optimizer.step()
    pathlib.Path(f"at-{config.worker}-{config.incarnation}").write_text(str(int(rows[0]) // 4))
    time.sleep(0.05)
    if (last := pathlib.Path("last")).exists() and int(rows[0]) // 4 >= int(last.read_text()):
        break
"""
"""Each worker leaves the stream after its first batch from the number in the file `last` on."""


def end_and_count(process: subprocess.Popen[bytes]) -> torch.Tensor:
    """End a run of this script in a batch that no worker has come to yet; return how often each batch was trained."""
    last = max(int(one.read_text() or 0) for one in Path().glob("at-*")) + 40
    Path("part").write_text(str(last))
    Path("part").replace("last")
    wait_for_success(process)
    record = json.loads(Path("run.json").read_text())
    counts = -load_file("run/final.safetensors")["weight"].flatten().reshape(-1, 4)
    assert torch.equal(counts[:last], torch.ones(last, 4))
    assert counts.max() == 1
    assert int(counts.sum()) == record["samples"] == sum(record["samples_by_worker"])
    return counts


def test_endless_stream_over_a_server_has_as_many_workers_after_five_kills_and_trains_each_batch_once(
    place: Place,
) -> None:
    """Without a gap."""
    path = script(place.folder, ENDLESS)
    options = ["-n", "3", "--recipe", "async_sgd", "--restarts", "2", "--out", "run", "--json", "run.json"]
    process = place.stretto("run", *options, path)
    for round_, victims in enumerate([(0, 1, 2), (1, 2)]):
        until(lambda n=round_, who=victims: all(Path(f"at-{one}-{n}").exists() for one in who), LIMIT_S)
        for one in victims:
            os.kill(next(each for each in place.left() if config_of(each).get("worker") == one).pid, signal.SIGKILL)
    until(lambda: all(Path(f"at-{one}").exists() for one in ("0-1", "1-2", "2-2")), LIMIT_S)
    end_and_count(process)
    events = list(read_events(Path("run", "events.jsonl")))
    assert sorted(one["worker"] for one in events if one["event"] == "end") == [0, 1, 2]


@pytest.mark.parametrize("victim", ["worker", "shard"])
def test_endless_stream_over_a_server_is_trained_whole_after_a_process_was_killed(place: Place, victim: str) -> None:
    """The worker is not restarted; the shard goes back to the beginning of the epoch, since there is no checkpoint."""
    path = script(place.folder, ENDLESS)
    options = ["-n", "3", "--recipe", "async_sgd", "--out", "run", "--json", "run.json"]
    process = place.stretto("run", *options, "--restarts", "0" if victim == "worker" else "1", path)
    until(lambda: all(Path(f"at-{one}-0").exists() for one in range(3)), LIMIT_S)
    until(lambda: int(Path("at-1-0").read_text() or 0) >= 20, LIMIT_S)
    number = 1 if victim == "worker" else 0
    os.kill(next(each for each in place.left() if config_of(each).get(victim) == number).pid, signal.SIGKILL)
    events = Path("run", "events.jsonl")
    until(lambda: any(one.get("what") == "failed" for one in read_events(events)), LIMIT_S)
    end_and_count(process)


def test_worker_that_is_asked_to_leave_a_run_over_a_server_has_its_line_and_its_place_in_the_summary(
    place: Place,
) -> None:
    path = script(place.folder, ENDLESS)
    process = place.stretto("run", "-n", "3", "--recipe", "async_sgd", "--out", "run", path)
    until(lambda: all(Path(f"at-{one}-0").exists() for one in range(3)), LIMIT_S)
    os.kill(next(each for each in place.left() if config_of(each).get("worker") == 1).pid, signal.SIGTERM)
    events = Path("run", "events.jsonl")
    until(lambda: any(one.get("what") == "left" for one in read_events(events)), LIMIT_S)
    Path("part").write_text("0")
    Path("part").replace("last")
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err.decode()
    assert "worker 1 has left, since it was asked to end; continuing with 2 workers" in err.decode()
    assert "left gracefully (it was asked to end); 2 workers continued" in out.decode()
    left = [one for one in read_events(events) if one.get("what") == "left"]
    assert [one["worker"] for one in left if one["why"] == "it was asked to end"] == [1]


@pytest.mark.parametrize("batch", ["keep", "split"])
def test_worker_joins_within_an_endless_stream_over_a_server_in_which_another_one_was_killed(
    place: Place, batch: str
) -> None:
    path = script(place.folder, ENDLESS)
    options = ["-n", "3", "--recipe", "downpour(every=2)", "--batch", batch, "--listen", "127.0.0.1"]
    process = place.stretto("run", *options, "--restarts", "1", "--out", "run", "--json", "run.json", path)
    until(lambda: all(Path(f"at-{one}-0").exists() for one in range(3)), LIMIT_S)
    os.kill(next(each for each in place.left() if config_of(each).get("worker") == 2).pid, signal.SIGKILL)
    guest = place.stretto("join", "run")
    until(lambda: Path("at-3-0").exists() and Path("at-2-1").exists(), LIMIT_S)
    end_and_count(process)
    wait_for_success(guest)
    (event,) = [one for one in read_events(Path("run", "events.jsonl")) if one["event"] == "epoch"]
    assert event["trained"]["3"] > 0


GROWING = """
import pathlib, time, torch, stretto
from stretto.process_config import worker_config
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (row + torch.randperm(4) for row in range(0, 1200, 4))
net = torch.nn.Embedding(1200, 1)
torch.nn.init.zeros_(net.weight)
optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
for rows in stretto.distribute(net, optimizer, torch.utils.data.DataLoader(Stream(), batch_size=None)):
    optimizer.zero_grad()
    net(rows).sum().backward()
    optimizer.step()
    pathlib.Path(f"at-{worker_config().worker}").touch()
    time.sleep(0 if pathlib.Path("at-1").exists() else 0.2)
"""
"""A stream that draws random numbers, and lasts a minute at least unless worker 1 joins."""


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "batch"), [("allreduce", "keep"), ("local_sgd(every=4)", "split")])
def test_worker_joins_within_a_stream_of_a_run_that_began_with_one_worker(
    place: Place, recipe: str, batch: str
) -> None:
    options = ["-n", "1", "--recipe", recipe, "--batch", batch, "--listen", "127.0.0.1"]
    process = place.stretto("run", *options, "--out", "run", "--json", "run.json", script(place.folder, GROWING))
    until(lambda: Path("at-0").exists(), LIMIT_S)
    guest = place.stretto("join", "run")
    for one in (process, guest):
        wait_for_success(one)
    record = json.loads(Path("run.json").read_text())
    counts = -load_file("run/final.safetensors")["weight"].flatten()
    assert set(counts.tolist()) == {0.5, 1.0}
    assert record["samples"] == 1200 == sum(record["samples_by_worker"])
    assert record["samples_by_worker"][1] > 0


@pytest.mark.long
def test_run_ends_without_a_worker_that_waits_outside_until_it_can_join(place: Place) -> None:
    """The only worker draws random numbers in turn with its stream, until the other one is out."""
    text = GROWING.replace("optimizer.step()", "optimizer.step(), torch.rand(1)").replace(
        'pathlib.Path("at-1").exists()', '"stops itself" in pathlib.Path("run/events.jsonl").read_text()'
    )
    process = place.stretto(
        "run", "-n", "1", "--recipe", "allreduce", "--listen", "127.0.0.1", "--out", "run", script(place.folder, text)
    )
    until(lambda: Path("at-0").exists(), LIMIT_S)
    guest = place.stretto("join", "run")
    wait_for_success(process)
    _, err = guest.communicate(timeout=LIMIT_S)
    assert guest.returncode == 3 and "could not join the epoch under way" in err.decode()
    assert "restart 1" not in Path("run/worker-1.log").read_text()


@pytest.mark.parametrize("ended", ["server", "worker", "launcher"])
def test_killed_process_ends_the_run_with_one_error_and_leaves_no_process(
    place: Place, ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has no coordinator, as under other launchers."""
    path = async_script(body="pathlib.Path(f'at-{stretto.rank()}').touch()", epochs=100_000)
    line = ["--no-recovery", "-n", "2", "--recipe", "async_sgd", "--servers", "2", "--out", "run"]
    process = place.stretto("run", *line, path)
    until(lambda: Path("at-0").exists() and Path("at-1").exists(), LIMIT_S)
    name = {"server": "shard", "worker": "worker"}.get(ended)
    victim = next((one for one in place.left() if name and config_of(one).get(name) == 1), None)
    began = time.monotonic()
    process.send_signal(signal.SIGINT) if victim is None else os.kill(victim.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT_S)
    assert time.monotonic() - began < WITHIN_S
    place.await_ends()
    assert process.returncode == (130 if ended == "launcher" else 1)
    if ended != "launcher":
        assert err.decode().count(f"{ended} 1 was killed by SIGKILL") == 1
    assert "Traceback" not in err.decode()
    assert not [one for one in psutil.process_iter() if one.pid == getattr(victim, "pid", -1)]


UNEQUAL_SHARDS = """
import torch, stretto

class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        first, count = (1000, 8) if stretto.rank() else (0, 80)
        return iter([torch.tensor(float(number)) / 1000 for number in range(first, first + count)])

net = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
for x in stretto.distribute(net, optimizer, torch.utils.data.DataLoader(Rows(), batch_size=4), deal="own"):
    optimizer.zero_grad()
    net(x[:, None]).square().mean().backward()
    optimizer.step()
"""


def test_a_worker_whose_shard_is_over_holds_none_back_while_it_waits_for_a_checkpoint(place: Place) -> None:
    options = ("-n", "2", "--recipe", "stale_synchronous(bound=2)", "--checkpoint-every", "2 rounds")
    _, events = run_successfully(place, script(Path(), UNEQUAL_SHARDS), *options)
    (end,) = (one for one in events if one["event"] == "epoch")
    assert end["samples"] == 88
