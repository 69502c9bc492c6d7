"""Bad input of every kind raises one clear error: the input, the expected input, and text to type."""

from __future__ import annotations

import math
import queue
import resource
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from thread_workers import flat, regression, run_single_process, run_workers, sgd, small_net
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import stretto
from stretto import errors
from stretto.events import EventLog, LogFile, read_events


def refused(kind: type[Exception], match: str | None, work: Any, workers: int = 2, recipe: str = "allreduce") -> str:
    with pytest.raises(kind, match=match) as caught:
        run_workers(workers, work, recipe)
    return str(caught.value)


def begin(net: nn.Module, optimizer: Any = None, loader: Any = None, **options: Any) -> Any:
    loader = loader if loader is not None else DataLoader(regression(40), batch_size=8)
    return stretto.distribute(net, optimizer or sgd(net.parameters()), loader, **options)


def has_all_parts(text: str) -> bool:
    return all(word in text for word in ("got:", "expected:", "try:"))


def test_a_script_that_never_calls_distribute_is_refused() -> None:
    assert has_all_parts(refused(errors.ScriptError, "without calling stretto.distribute", lambda worker: None))


def test_models_whose_shapes_differ_are_named() -> None:
    def work(worker: int) -> None:
        begin(nn.Sequential(nn.Linear(6, 4 + worker), nn.Linear(4 + worker, 1)))

    found = refused(errors.ModelError, r"differ in 0\.weight", work)
    assert "worker 0: (4, 6)" in found
    assert "worker 1: (5, 6)" in found


def test_models_whose_names_differ_are_named() -> None:
    class Other(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(6, 1))

    found = refused(errors.ModelError, "differ in", lambda worker: begin(Other(f"head{worker}")))
    assert "head0.weight" in found
    assert "not there" in found


def test_an_optimizer_without_the_models_parameters_is_refused() -> None:
    found = refused(
        errors.ModelError, "not the model's", lambda worker: begin(small_net(), sgd(small_net().parameters()))
    )
    assert has_all_parts(found)


@pytest.mark.parametrize(
    "arguments",
    [
        {"net": "no model"},
        {"optimizer": "no optimizer"},
        {"optimizer": object.__new__(torch.optim.SGD)},
        {"net": nn.DataParallel(nn.Linear(6, 1))},
        {"loader": regression(40)},
        {"loader": 5},
        {"evaluate": 3},
        {"evaluate_every": 0},
        {"evaluate_every": 1.5},
        {"recipe": 7},
        {"recipe": "locl_sgd"},
    ],
    ids=lambda arguments: next(f"{name} {type(value).__name__}" for name, value in arguments.items()),
)
def test_arguments_of_the_wrong_type_are_refused(arguments: dict[str, Any]) -> None:
    def work(worker: int) -> None:
        net: Any = small_net()
        given = {"net": net, "optimizer": sgd(net.parameters())} | arguments
        begin(**given)

    assert has_all_parts(refused(errors.StrettoError, None, work))


def test_fewer_samples_than_workers_that_do_not_wait_are_refused() -> None:
    def work(worker: int) -> None:
        for _ in begin(small_net(), loader=DataLoader(regression(2), batch_size=1)):
            pass

    assert "-n 2" in refused(errors.LoaderError, "2 samples for 3 workers", work, workers=3, recipe="async_sgd")


def test_a_loader_that_already_shards_is_refused() -> None:
    sampler = DistributedSampler(range(40), num_replicas=2, rank=0)  # type: ignore[arg-type]
    loader = DataLoader(regression(40), batch_size=8, sampler=sampler)
    assert has_all_parts(
        refused(errors.LoaderError, "already shares", lambda worker: begin(small_net(), loader=loader))
    )


def test_workers_with_different_recipes_are_refused() -> None:
    from stretto.recipe.named import local_sgd

    def work(worker: int) -> None:
        begin(small_net(), recipe=local_sgd(every=worker + 1))

    with pytest.raises(errors.RecipeError, match="different recipes"):
        run_workers(2, work)


def test_an_exception_in_evaluate_ends_the_run() -> None:
    def broken(net: nn.Module) -> dict[str, float]:
        raise KeyError("no such thing")

    def work(worker: int) -> None:
        for _ in begin(small_net(), evaluate=broken):
            pass

    assert "KeyError" in refused(errors.EvaluateError, "evaluate raised", work)


@pytest.mark.parametrize("found", [None, 0.9, {}, {"accuracy": "high"}, [1]], ids=str)
def test_evaluate_that_returns_no_numbers_is_refused(found: Any) -> None:
    def work(worker: int) -> None:
        for _ in begin(small_net(), evaluate=lambda net: found):
            pass

    assert has_all_parts(refused(errors.EvaluateError, "did not return numbers", work))


def poisoned(wrong: float, log: bool, recipe_worker: int = 1) -> Any:
    def work(worker: int) -> None:
        net = small_net()
        optimizer = sgd(net.parameters())
        for number, (x, y) in enumerate(begin(net, optimizer)):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y) * (wrong if worker == recipe_worker and number == 1 else 1.0)
            if log:
                stretto.log(loss=loss)
            loss.backward()
            optimizer.step()

    return work


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_named_with_step_and_worker(wrong: float) -> None:
    found = refused(errors.NotFiniteError, "loss became", poisoned(wrong, log=True))
    assert "step 2" in found
    assert "worker 1" in found


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "local_sgd(every=50)", "diloco(every=2)"])
def test_a_gradient_that_is_not_finite_is_found_without_a_log(recipe: str) -> None:
    found = refused(errors.NotFiniteError, "not finite", poisoned(math.nan, log=False), recipe=recipe)
    assert "step 2" in found


def test_a_gradient_that_is_not_finite_is_found_in_a_single_process() -> None:
    with pytest.raises(errors.NotFiniteError, match="step 2"):
        run_single_process(poisoned(math.nan, log=False, recipe_worker=0))


def test_an_update_that_overflows_in_the_encoding_is_refused_before_any_change() -> None:
    kept = {}

    def work(worker: int) -> None:
        net = small_net()
        kept[worker] = net
        optimizer = torch.optim.SGD(net.parameters(), lr=1e9)
        for x, y in begin(net, optimizer):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()

    refused(errors.NotFiniteError, "nothing was changed", work, recipe='diloco(every=1, how=cast("fp16"))')
    assert all(torch.isfinite(flat(net)).all() for net in kept.values())


def test_replicas_that_differ_are_named() -> None:
    with pytest.raises(errors.ReplicasDifferError, match=r"0\.bias of worker 2"):
        run_workers(3, _changed_at_worker_2, "allreduce")


def test_workers_that_step_after_different_batches_are_named() -> None:
    """A counter of accumulated batches does this that counts one of the 6 batches of an epoch twice, at one worker."""

    def work(worker: int) -> None:
        net, batches = small_net(), 0
        optimizer = sgd(net.parameters())
        loader = stretto.distribute(net, optimizer, DataLoader(regression(61), batch_size=4))
        for epoch in range(2):
            for x, y in loader:
                nn.functional.mse_loss(net(x), y).backward()
                batches += 2 if (worker, epoch, batches) == (0, 1, 6) else 1
                if batches % 2 == 0:
                    optimizer.step()
                    optimizer.zero_grad()

    named = "worker 0 stepped after batch 1 of epoch 2, workers 1 and 2 did not"
    with pytest.raises(errors.ReplicasDifferError, match=named):
        run_workers(3, work, "allreduce")


def _changed_at_worker_2(worker: int) -> None:
    net = small_net()
    optimizer = sgd(net.parameters())
    for x, y in begin(net, optimizer):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        if worker == 2:
            with torch.no_grad():
                net[0].bias[3] += 1e-3


def test_sparse_gradients_are_refused_by_name() -> None:
    def work(worker: int) -> None:
        net = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
        for _ in begin(net):
            net(torch.arange(4)).sum().backward()

    assert "0.weight" in refused(errors.ModelError, "sparse", work)


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "diloco(every=2)", "ef21()", "async_sgd"])
def test_model_that_is_wholly_frozen_is_refused(recipe: str) -> None:
    def work(worker: int) -> None:
        net = small_net().requires_grad_(False)
        optimizer = sgd(net.parameters())
        for x, _ in begin(net, optimizer):
            net(x)
            optimizer.step()

    assert has_all_parts(refused(errors.ModelError, "all are frozen", work, recipe=recipe))


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)"])
def test_model_unfrozen_after_distribute_trains(recipe: str) -> None:
    def work(worker: int) -> bool:
        net = small_net().requires_grad_(False)
        before, optimizer = flat(net), sgd(net.parameters())
        loader = begin(net, optimizer)
        net.requires_grad_(True)
        for x, y in loader:
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            optimizer.step()
        return bool((flat(net) != before).any())

    assert run_workers(2, work, recipe) == [True, True]


def test_a_full_disk_is_reported_once_and_is_an_error_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(LogFile(Path("/dev/full")), 3)
    for _ in range(3):
        log.write("warning", 0.0, text="something")
        log.flush()
    errors_printed = capsys.readouterr().err
    assert errors_printed.count("worker 3: the event log /dev/full cannot be written: No space left") == 1
    with pytest.raises(errors.LogError, match="/dev/full cannot be written: No space left"):
        log.close()


def test_events_that_wait_for_a_full_disk_are_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(LogFile(Path("/dev/full")), 0, max_buffered=100)
    log.write("warning", 0.0, text="something")
    log.flush()
    log.write("warning", 0.0, text="else" * 100)
    log.flush()
    assert "No space left on device; " in capsys.readouterr().err.splitlines()[-1]
    log.close()  # nothing is left to be written


@given(st.lists(st.tuples(st.integers(0, 700), st.booleans()), min_size=1, max_size=5))
def test_each_event_is_written_once_when_a_full_disk_has_room_again(rooms: list[tuple[int, bool]]) -> None:
    """Two logs write; the disk takes some bytes, then none, then more. A truncated line becomes a warning."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        path.touch()
        logs = [EventLog(LogFile(path), worker) for worker in range(2)]
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        for turn, (room, swapped) in enumerate([*rooms, (-1, not rooms[0][1])]):
            size = path.stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + room if room >= 0 else limits[0], limits[1]))
            try:
                for log in reversed(logs) if swapped else logs:
                    log.write("log", float(turn), text="x" * 100 * log.worker)
                    log.flush()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        for log in logs:
            log.close()
        found = [event for event in read_events(path) if event["event"] == "log"]
    for worker in range(2):
        assert [one["t"] for one in found if one["worker"] == worker] == [float(n) for n in range(len(rooms) + 1)]


def test_a_log_that_cannot_be_opened_or_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(errors.LogError, match="cannot be written: No such file"):
        LogFile(tmp_path / "no" / "such" / "folder").append(b"{}\n")
    with pytest.raises(errors.LogError, match="cannot be read"):
        list(read_events(tmp_path / "none"))
    (tmp_path / "torn").write_bytes(b'{"event":"end","t":1.0,"worker":0}\n{"event":"st')
    assert [one["event"] for one in read_events(tmp_path / "torn")] == ["end"]
    (tmp_path / "torn within").write_bytes(
        b'{"event":"end","t":1.0,"worker":0}\n{"ev\n{"event":"end","t":2.0,"worker":1}\n'
    )
    assert [one["event"] for one in read_events(tmp_path / "torn within")] == ["end", "warning", "end"]
    (tmp_path / "damaged").write_bytes(b'{"event"\n{"ev')
    with pytest.raises(errors.LogError, match="line 1"):
        list(read_events(tmp_path / "damaged"))


def test_script_that_exits_within_evaluate_is_refused() -> None:
    def evaluate(net: nn.Module) -> dict[str, float]:
        raise SystemExit(0)

    def work(worker: int) -> None:
        net = small_net()
        optimizer = sgd(net.parameters())
        for x, y in begin(net, optimizer, evaluate=evaluate):
            (net(x) - y).square().mean().backward()
            optimizer.step()

    assert has_all_parts(refused(errors.EvaluateError, "evaluate ended the script", work))


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "async_sgd"])
def test_step_without_a_batch_of_the_distributed_loader_is_refused(recipe: str) -> None:
    """`stretto.distribute(...)` without `loader =`: every worker would train on all data."""

    def work(worker: int) -> None:
        net, loader = small_net(), DataLoader(regression(40), batch_size=8)
        optimizer = sgd(net.parameters())
        begin(net, optimizer, loader)
        for x, y in loader:
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()

    assert has_all_parts(refused(errors.ScriptError, "no batch of the loader", work, recipe=recipe))


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "async_sgd"])
def test_batches_taken_in_another_thread_than_the_steps_are_refused(recipe: str) -> None:
    def work(worker: int) -> None:
        net = small_net()
        optimizer = sgd(net.parameters())
        loader = begin(net, optimizer)
        batches: queue.Queue[Any] = queue.Queue(1)
        threading.Thread(target=lambda: batches.put(next(iter(loader))), daemon=True).start()
        x, y = batches.get(timeout=90)
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()

    assert has_all_parts(refused(errors.ScriptError, "in another thread", work, recipe=recipe))


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=2)", "async_sgd", "diloco(every=4)"])
@pytest.mark.parametrize("how", ["a list", "reads ahead", "left over"])
def test_steps_after_the_end_of_the_loader_are_refused(how: str, recipe: str) -> None:
    def work(worker: int) -> None:
        net = small_net()
        optimizer = sgd(net.parameters())
        loader = begin(net, optimizer)
        ahead: Any = list(loader) if how == "a list" else loader
        before = None
        for x, y in ahead:
            if how == "left over" or before is not None or how == "a list":
                nn.functional.mse_loss(net(x), y).backward()
            if how != "left over" and (before is not None or how == "a list"):
                optimizer.step()
            before = x
        optimizer.step()

    assert has_all_parts(
        refused(errors.ScriptError, "after the distributed loader has come to its end", work, recipe=recipe)
    )


def test_steps_between_two_sections_are_accepted() -> None:
    def work(worker: int) -> None:
        net = small_net()
        optimizer = sgd(net.parameters())
        for x, y in begin(net, optimizer):
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        stretto.finish()
        optimizer.step()

    run_workers(2, work, "local_sgd(every=2)")


def test_lazy_module_without_shapes_is_refused() -> None:
    def work(worker: int) -> None:
        net = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
        begin(net, sgd(net.parameters()))

    assert has_all_parts(refused(errors.ModelError, "without a shape", work))
