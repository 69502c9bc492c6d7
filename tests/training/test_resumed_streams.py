"""A run that is resumed in the middle of an epoch over a stream trains the rest of the stream, each batch once."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from elastic_workers import WorkerKilled, run_elastic_workers
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import Endless, has_weight
from thread_workers import flat, run_one_worker, run_workers
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import stretto
from stretto import api
from stretto.data.stream_order import StreamOrder, first_untrained
from stretto.errors import LoaderError, StaysOutError
from stretto.events import read_events
from stretto.interval import every
from stretto.loader.stream_reader import SHOWN_S, SLICE_S, StreamPlace, digest_of, excerpt, read_to_place, stateful
from stretto.training.checkpoint_manager import CheckpointManager
from stretto.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("every_checkpoint")
BATCHES = 30


def batch_of(number: int) -> torch.Tensor:
    return torch.tensor([[2.0 * number], [2.0 * number + 1]])


class Stream(IterableDataset):
    """A stream of batches by their numbers."""

    def __init__(self, numbers: Sequence[int] = range(BATCHES), reads: list[int] | None = None):
        self.numbers, self.reads = numbers, reads

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers:
            if self.reads is not None:
                self.reads.append(number)
            yield batch_of(number)


KINDS: dict[str, Callable[[], Any]] = {
    "indices": lambda: DataLoader(torch.arange(2.0 * BATCHES).view(-1, 1), batch_size=2, sampler=Endless(2 * BATCHES)),  # type: ignore[arg-type]
    "generator": lambda: iter(Stream()),
    "iterable": lambda: DataLoader(Stream(), batch_size=None),
    "list": lambda: list(Stream()),
}


def reading(make: Callable[[int], Any], epochs: int = 2, **options: Any) -> Callable[[int], list[list[int]]]:
    """Return a script that trains on a stream, and returns the numbers of the batches in each epoch."""

    def work(worker: int) -> list[list[int]]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
        loader = stretto.distribute(net, optimizer, make(worker), **options)
        found = []
        for _ in range(epochs):
            found.append(numbers := list[int]())
            for x in loader:
                optimizer.zero_grad()
                net(x).mean().backward()
                optimizer.step()
                if has_weight():
                    numbers.append(int(x[0, 0]) // 2)
        return found

    return work


def run_with_checkpoints(workers: int, work: Callable[[int], Any], recipe: str, run: Path, **options: Any) -> Any:
    run.mkdir(exist_ok=True)
    return run_workers(workers, work, recipe, run=run, checkpoint=every("2 rounds"), keep=99, **options)


def place_in(checkpoint: Path) -> StreamPlace | None:
    facts = json.loads((checkpoint / "manifest.json").read_text())["checkpoint"]["facts"]
    return msgspec.json.decode(facts["stream"], type=StreamPlace) if facts["stream"] else None


def only_within(run: Path, part: Path, epoch: int = 1) -> tuple[Path, list[int]]:
    """Copy a checkpoint from the middle of an epoch into a folder as its only one; return the trained positions."""
    found = []
    for checkpoint in sorted((run / "checkpoints").iterdir()):
        facts = json.loads((checkpoint / "manifest.json").read_text())["checkpoint"]["facts"]
        place = place_in(checkpoint)
        if facts["epochs"] == epoch and place is not None and not place.is_over and place.trained:
            found.append((checkpoint, place))
    checkpoint, place = found[(len(found) - 1) // 2]
    shutil.copytree(checkpoint, part / "checkpoints" / checkpoint.name)
    return part, [position for start, stop in place.trained for position in range(start, stop)]


def trained(found: list[list[list[int]]], epoch: int) -> list[int]:
    return sorted(itertools.chain.from_iterable(of_worker[epoch] for of_worker in found))


def notices(run: Path) -> str:
    return "\n".join(event["text"] for event in read_events(run / "events.jsonl") if event["event"] == "warning")


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=4))
def test_each_batch_of_a_stream_is_dealt_once_however_far_workers_are_when_a_run_stops(runs: list[list[int]]) -> None:
    """Each run has its number of workers, which have trained these numbers of batches when it stops."""
    before: list[tuple[int, int]] = []
    done: set[int] = set()
    for counts in runs:
        order = StreamOrder(len(counts), before)
        ahead = [[order.position(worker, number) for number in range(count)] for worker, count in enumerate(counts)]
        dealt = [position for of_worker in ahead for position in of_worker]
        assert all(of_worker == sorted(of_worker) for of_worker in ahead)
        assert len(set(dealt)) == len(dealt) and not done & set(dealt)
        assert min(order.position(worker, 0) for worker in range(len(counts))) == first_untrained(before)
        done |= set(dealt)
        before = order.trained(counts)
        assert {position for start, stop in before for position in range(start, stop)} == done


@pytest.mark.parametrize(
    ("kind", "before", "after", "workers"),
    [
        ("generator", "allreduce", "allreduce", (2, 2)),
        ("list", "local_sgd(every=3)", "local_sgd(every=3)", (2, 2)),
        ("iterable", "gossip(graph='ring')", "gossip(graph='ring')", (3, 3)),
        ("iterable", "local_sgd(every=2)", "allreduce", (2, 3)),
        ("generator", "diloco(every=2)", "diloco(every=2)", (2, 1)),
        ("list", "allreduce", "async_sgd", (1, 2)),
        ("iterable", "async_sgd(shards=2)", "async_sgd", (2, 2)),
        ("generator", "async_sgd", "allreduce", (2, 1)),
        ("list", "stale_synchronous(bound=3)", "local_sgd(every=2)", (2, 3)),
        ("iterable", "elastic_averaging(every=2)", "elastic_averaging(every=2)", (2, 3)),
    ],
)
def test_resumed_run_trains_the_rest_of_a_stream_once(
    kind: str, before: str, after: str, workers: tuple[int, int], tmp_path: Path
) -> None:
    run_with_checkpoints(workers[0], reading(lambda _: KINDS[kind]()), before, tmp_path / "run")
    part, done = only_within(tmp_path / "run", tmp_path / "part")
    assert 0 < len(done) < BATCHES
    is_said = "--resume reads it again to its place, and a digest" in notices(tmp_path / "run")
    assert is_said == (kind != "list")
    found = run_with_checkpoints(workers[1], reading(lambda _: KINDS[kind]()), after, tmp_path / "resumed", resume=part)
    assert trained(found, 0) == sorted(set(range(BATCHES)) - set(done))
    assert trained(found, 1) == (list(range(BATCHES)) if kind != "generator" else [])
    end = next(event for event in read_events(tmp_path / "resumed" / "events.jsonl") if event["event"] == "epoch")
    assert end["samples"] == 2 * BATCHES
    place = next(number for number in range(BATCHES) if number not in done)
    assert f"to batch {place:,}, where the run stopped: a digest proves" in notices(tmp_path / "resumed")


def test_second_resume_continues_after_the_first_with_another_number_of_workers(tmp_path: Path) -> None:
    work = reading(lambda _: KINDS["iterable"](), epochs=1)
    run_with_checkpoints(2, work, "allreduce", tmp_path / "run")
    part, done = only_within(tmp_path / "run", tmp_path / "part")
    run_with_checkpoints(3, work, "allreduce", tmp_path / "resumed", resume=part)
    again, later = only_within(tmp_path / "resumed", tmp_path / "again")
    assert set(done) < set(later)
    found = run_with_checkpoints(1, work, "allreduce", tmp_path / "last", resume=again)
    assert trained(found, 0) == sorted(set(range(BATCHES)) - set(later))


@pytest.mark.parametrize("kind", ["generator", "list"])
def test_checkpoint_at_the_end_of_an_epoch_repeats_nothing(kind: str, tmp_path: Path) -> None:
    """A generator is exhausted then, and the one that the resumed script makes counts as exhausted, too."""
    work = reading(lambda _: KINDS[kind](), epochs=2)
    whole = run_with_checkpoints(2, work, "allreduce", tmp_path / "run")
    found = run_with_checkpoints(2, work, "allreduce", tmp_path / "resumed", resume=tmp_path / "run")
    assert trained(whole, 1) == (list(range(BATCHES)) if kind == "list" else [])
    assert trained(found, 0) == trained(found, 1) == []


def test_epochs_over_one_iterator_that_the_loop_leaves_continue_where_the_last_one_stopped(tmp_path: Path) -> None:
    def work(worker: int) -> list[list[int]]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
        loader = stretto.distribute(net, optimizer, iter(Stream(range(100))))
        found = []
        for _ in range(3):
            found.append(numbers := list[int]())
            for x in loader:
                optimizer.zero_grad()
                net(x).mean().backward()
                optimizer.step()
                if has_weight():
                    numbers.append(int(x[0, 0]) // 2)
                if len(numbers) == 5:
                    break
        return found

    whole = run_with_checkpoints(2, work, "allreduce", tmp_path / "run")
    assert [trained(whole, epoch) for epoch in range(3)] == [[*range(10)], [*range(10, 20)], [*range(20, 30)]]
    part, done = only_within(tmp_path / "run", tmp_path / "part", epoch=2)
    found = run_with_checkpoints(2, work, "allreduce", tmp_path / "resumed", resume=part)
    assert trained(found, 0) == []
    assert trained(found, 1)[0] == len(done)


def test_stream_that_is_another_one_ends_the_resume_with_an_error_that_names_the_option(tmp_path: Path) -> None:
    run_with_checkpoints(2, reading(lambda _: KINDS["iterable"]()), "allreduce", tmp_path / "run")
    part, done = only_within(tmp_path / "run", tmp_path / "part")
    other = reading(lambda _: DataLoader(Stream(range(100, 100 + BATCHES)), batch_size=None), epochs=1)
    short = reading(lambda _: DataLoader(Stream(range(3)), batch_size=None), epochs=1)
    with pytest.raises(LoaderError, match=rf"batch {len(done) - 1} is not the batch .*\n.*\n.*--resume-stream skip"):
        run_with_checkpoints(2, other, "allreduce", tmp_path / "other", resume=part)
    with pytest.raises(LoaderError, match=f"it ended after 3 batches, and {len(done)} of it were trained"):
        run_with_checkpoints(2, short, "allreduce", tmp_path / "short", resume=part)
    for way in ("skip", "restart"):
        found = run_with_checkpoints(2, other, "allreduce", tmp_path / way, resume=part, resume_stream=way)
        assert trained(found, 0) == list(range(100, 100 + BATCHES))
        ended = [event for event in read_events(tmp_path / way / "events.jsonl") if event["event"] == "epoch"]
        assert ended[0]["samples"] == 2 * (len(done) + BATCHES)


class Stateful(Stream):
    """A stream that continues from a state of its own; what it read after the state is read again."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        begins, self.at = self.at, 0
        for number in self.numbers[begins:]:
            if self.reads is not None:
                self.reads.append(number)
            self.at = number + 1
            yield batch_of(number)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@pytest.mark.parametrize("workers", [(2, 2), (1, 1), (2, 3)])
def test_stream_with_a_state_continues_from_it(workers: tuple[int, int], tmp_path: Path) -> None:
    reads: list[int] = []
    make = lambda reads=None: reading(lambda _: DataLoader(Stateful(reads=reads), batch_size=None))  # noqa: E731
    run_with_checkpoints(workers[0], make(), "allreduce", tmp_path / "run")
    part, done = only_within(tmp_path / "run", tmp_path / "part")
    found = run_with_checkpoints(workers[1], make(reads), "allreduce", tmp_path / "resumed", resume=part)
    assert trained(found, 0) == sorted(set(range(BATCHES)) - set(done))
    assert trained(found, 1) == list(range(BATCHES))
    assert min(reads[: len(reads) // 3]) >= len(done) - workers[0]
    assert "continued from its state" in notices(tmp_path / "resumed")


class Lasting(Stream):
    """A stream whose state is in force for each iteration, as in `datasets`."""

    at = 0
    _starting_state_dict: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        for number in self.numbers[(self._starting_state_dict or {"at": 0})["at"] :]:
            self.at = number + 1
            yield batch_of(number)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._starting_state_dict = state


def test_epoch_after_a_resumed_one_begins_at_the_beginning_of_a_stream_whose_state_stays_in_force(
    tmp_path: Path,
) -> None:
    work = reading(lambda _: DataLoader(Lasting(), batch_size=None))
    run_with_checkpoints(2, work, "allreduce", tmp_path / "run")
    part, done = only_within(tmp_path / "run", tmp_path / "part")
    found = run_with_checkpoints(2, work, "allreduce", tmp_path / "resumed", resume=part)
    assert trained(found, 0) == sorted(set(range(BATCHES)) - set(done))
    assert trained(found, 1) == list(range(BATCHES))


class Shifted(Lasting):
    """A stream whose state leaves out a batch."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"at": state["at"] + 1})


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_stream_whose_state_gives_other_batches_is_read_again(recipe: str, tmp_path: Path) -> None:
    work = reading(lambda _: DataLoader(Shifted(), batch_size=None))
    run_with_checkpoints(2, work, recipe, tmp_path / "run")
    part, done = only_within(tmp_path / "run", tmp_path / "part")
    found = run_with_checkpoints(2, work, recipe, tmp_path / "resumed", resume=part)
    assert trained(found, 0) == sorted(set(range(BATCHES)) - set(done))
    assert trained(found, 1) == list(range(BATCHES))
    assert "gives other batches than were trained: it is read again" in notices(tmp_path / "resumed")


@pytest.mark.parametrize("library", ["torchdata", "datasets", "torchdata over datasets"])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.filterwarnings("ignore")
def test_streams_of_libraries_continue_from_their_state(library: str, workers: int, tmp_path: Path) -> None:
    def make(_: int) -> Any:
        data: Any = Stream() if library == "torchdata" else None
        if data is None:
            pytest.importorskip("datasets.table", exc_type=ImportError)  # other tests have a module of this name
            import datasets

            table = datasets.table.InMemoryTable.from_pydict({"x": torch.arange(2.0 * BATCHES).tolist()})
            data = datasets.Dataset(table, fingerprint="stream").to_iterable_dataset().with_format("torch")
        options: dict[str, Any] = {"batch_size": None}
        if library != "torchdata":
            options = {"batch_size": 2, "collate_fn": lambda rows: torch.stack([row["x"] for row in rows])[:, None]}
        if library == "datasets":
            return DataLoader(data, **options)
        return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(data, **options)

    make(0)
    run_with_checkpoints(2, reading(make), "local_sgd(every=2)", tmp_path / "run")
    part, done = only_within(tmp_path / "run", tmp_path / "part")
    found = run_with_checkpoints(workers, reading(make), "local_sgd(every=2)", tmp_path / "resumed", resume=part)
    assert trained(found, 0) == sorted(set(range(BATCHES)) - set(done))
    assert trained(found, 1) == list(range(BATCHES))
    assert "continued from its state" in notices(tmp_path / "resumed")


def test_state_of_a_data_set_that_other_processes_read_or_whose_buffer_it_leaves_out_is_not_used() -> None:
    shuffled = Stateful()
    shuffled._ex_iterable = SimpleNamespace(ex_iterable=type("BufferShuffledExamplesIterable", (), {})())  # type: ignore[attr-defined]
    assert stateful(DataLoader(Stateful())) is not None
    assert stateful(Stateful()) is not None
    assert stateful(DataLoader(Stateful(), num_workers=1)) is None
    assert stateful(DataLoader(shuffled)) is stateful(DataLoader(Stream())) is stateful([1]) is None


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)"])
def test_own_shards_continue_with_the_same_number_of_workers_and_are_refused_with_another(
    recipe: str, tmp_path: Path
) -> None:
    def shard(worker: int) -> Any:
        return DataLoader(Stream(range(worker, 20 + 7 * worker, 2)), batch_size=None)

    work = reading(shard, deal="own")
    whole = run_with_checkpoints(2, work, recipe, tmp_path / "run")
    part, _ = only_within(tmp_path / "run", tmp_path / "part")
    found = run_with_checkpoints(2, work, recipe, tmp_path / "resumed", resume=part)
    for worker in range(2):
        assert 0 < len(found[worker][0]) < len(whole[worker][0])
        assert found[worker][0] == whole[worker][0][-len(found[worker][0]) :]
        assert found[worker][1] == whole[worker][1]
    with pytest.raises(LoaderError, match=r"got: 3 workers\n.*expected: 2.*\n.*-n 2; or --resume-stream skip"):
        run_with_checkpoints(3, work, recipe, tmp_path / "three", resume=part)
    run_with_checkpoints(3, work, recipe, tmp_path / "skipped", resume=part, resume_stream="skip")


def losses(run: Path) -> list[Any]:
    return [event["text"] for event in read_events(run / "events.jsonl") if event["event"] == "batches_lost"]


def test_a_loss_before_the_checkpoint_is_named_by_the_resumed_run_too(tmp_path: Path) -> None:
    def work(worker: int) -> None:
        net, shard = nn.Linear(1, 1), list(Stream(range(worker, BATCHES, 2)))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
        for step, x in enumerate(stretto.distribute(net, optimizer, shard, deal="own")):
            if (worker, step) == (1, 5) and not (tmp_path / "killed").exists():
                (tmp_path / "killed").touch()
                raise WorkerKilled
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()

    run, options = tmp_path / "run", {"checkpoint": every("2 rounds"), "keep": 99}
    run_elastic_workers(2, work, "allreduce", run, **options)
    newest = max((run / "checkpoints").iterdir())
    shutil.copytree(newest, tmp_path / "part" / "checkpoints" / newest.name)
    run_elastic_workers(1, work, "allreduce", tmp_path / "resumed", resume=tmp_path / "part", **options)
    assert len(losses(run)) == 1
    assert losses(tmp_path / "resumed") == losses(run)


@pytest.mark.parametrize("again", [0, 1])
def test_a_loss_is_named_by_a_resumed_run_although_the_worker_that_named_it_has_failed(
    again: int, tmp_path: Path
) -> None:
    """All workers know the loss; worker 0, which names it, fails later."""
    incarnations = dict.fromkeys(range(3), -1)

    def work(worker: int) -> int:
        net, batches = nn.Linear(1, 1), list(torch.ones(4 * 42, 1).split(4))
        incarnations[worker] += 1
        optimizer, step = torch.optim.SGD(net.parameters(), lr=1e-9), 0
        loader = stretto.distribute(net, optimizer, batches)
        for _ in range(3):
            for x in loader:
                if not incarnations[worker] and step == 15:
                    trainer = api._current.get()
                    assert isinstance(trainer, Trainer)
                    trainer.epochs.note_lost("a batch", writes=worker == 0)
                if not incarnations[worker] and (worker, step) == (0, 20):
                    raise WorkerKilled
                step += 1
                optimizer.zero_grad()
                net(x).mean().backward()
                optimizer.step()
        return step

    run, options = tmp_path / "run", {"checkpoint": every("2 rounds"), "keep": 99}
    run_elastic_workers(3, work, "local_sgd(every=4)", run, again, **options)
    newest = max((run / "checkpoints").iterdir())
    shutil.copytree(newest, tmp_path / "part" / "checkpoints" / newest.name)
    run_elastic_workers(1, work, "local_sgd(every=4)", tmp_path / "resumed", resume=tmp_path / "part", **options)
    assert len(losses(run)) == 1
    assert losses(tmp_path / "resumed") == losses(run)


def test_run_that_stops_before_batches_of_the_epoch_before_are_trained_names_them_when_it_is_resumed(
    tmp_path: Path,
) -> None:
    """An epoch has 15 steps, of which three are exchanged with the first of the next one, in which a worker fails."""

    def work(worker: int) -> list[list[int]]:
        net, batches = nn.Linear(1, 1), list(torch.ones(3 * 15, 4, 1))
        optimizer, step = torch.optim.SGD(net.parameters(), lr=1e-9), 0
        loader = stretto.distribute(net, optimizer, batches)
        for _ in range(2):
            for x in loader:
                if fails and (worker, step) == (1, 15):
                    raise WorkerKilled
                step += 1
                optimizer.zero_grad()
                net(x).mean().backward()
                optimizer.step()
        return [[step]]

    fails, run = True, tmp_path / "run"
    options = {"checkpoint": every("1 rounds"), "keep": 99}
    run_elastic_workers(3, work, "local_sgd(every=4)", run, **options)
    assert not losses(run)
    fails, found = False, []
    for checkpoint in sorted((run / "checkpoints").iterdir())[3:5]:
        part = tmp_path / checkpoint.name
        shutil.copytree(checkpoint, part / "checkpoints" / checkpoint.name)
        run_elastic_workers(2, work, "local_sgd(every=4)", part / "resumed", resume=part, **options)
        events = read_events(part / "resumed" / "events.jsonl")
        found.append(
            (losses(part / "resumed"), [event["samples"] for event in events if event["event"] == "epoch"][-1])
        )
    named = ["3 batches of the end of the epoch before, which a failed worker had"]
    assert found == [(named, 360 - 3 * 4), ([], 360)]


def test_batches_that_all_workers_split_continue(tmp_path: Path) -> None:
    work = reading(lambda _: KINDS["iterable"](), epochs=1)
    run_with_checkpoints(2, work, "allreduce", tmp_path / "run", split=True)
    part, done = only_within(tmp_path / "run", tmp_path / "part")
    found = run_with_checkpoints(2, work, "allreduce", tmp_path / "resumed", resume=part, split=True)
    assert found[0][0] == found[1][0] == list(range(len(done), BATCHES))


@pytest.mark.parametrize("recipe", ["allreduce", "local_sgd(every=3)"])
def test_run_of_one_worker_draws_the_same_random_numbers_after_a_resume(recipe: str, tmp_path: Path) -> None:
    """The stream and the model's dropout draw from one generator in turn."""

    class Noise(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            order = torch.randperm(12).tolist()
            return (torch.randn(4, 3) + place for place in order)

    def work(worker: int) -> Any:
        torch.manual_seed(5)
        net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        loader = stretto.distribute(net, optimizer, DataLoader(Noise(), batch_size=None))
        for _ in range(2):
            for x in loader:
                optimizer.zero_grad()
                net(x).square().mean().backward()
                optimizer.step()
                x.zero_()  # what a script does with its batch is no concern of the digest
        return flat(net)

    run = tmp_path / "run"
    run.mkdir()
    whole = run_one_worker(work, recipe, run=run, checkpoint=every("1 rounds"), keep=99)
    for epoch in (1, 2):
        part, _ = only_within(run, tmp_path / f"part{epoch}", epoch)
        assert torch.equal(run_one_worker(work, recipe, resume=part), whole)


@pytest.mark.parametrize("workers", [2, 3, 1])
def test_parts_that_some_workers_have_trained_ahead_of_others_are_not_trained_again(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, counts = torch.arange(6.0 * BATCHES).view(BATCHES, 6, 1), [3, 1, 2]
    monkeypatch.setattr(
        CheckpointManager,
        "batches_to_meeting",
        lambda self, _, has_met: counts[self._trainer.transport.number] if has_met else 0,
    )

    def work(worker: int) -> list[int]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
        found = []
        for x in stretto.distribute(net, optimizer, list(batches)):
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()
            found += x.flatten().int().tolist()
        return found

    (tmp_path / "run").mkdir()
    often = {"run": tmp_path / "run", "checkpoint": every("1 rounds"), "keep": 999}
    run_workers(2, work, "async_sgd", split=True, **often)
    places = {one: place_in(one) for one in sorted((tmp_path / "run" / "checkpoints").iterdir())}
    within = {one: place for one, place in places.items() if place is not None and not place.is_over}
    newest, place = max(within.items(), key=lambda found: len(found[1].parts))
    assert place.parts
    shutil.copytree(newest, tmp_path / "part" / "checkpoints" / newest.name)
    again = tmp_path / "again"
    again.mkdir()
    found = run_workers(workers, work, "async_sgd", split=True, resume=tmp_path / "part", **(often | {"run": again}))
    halves = batches.int().view(BATCHES, 2, 3)
    positions = [position for start, stop in place.trained for position in range(start, stop)]
    done = [halves[one, half] for one in positions for half in range(2) if (one, ((half, 2),)) not in place.parts]
    samples = [*torch.cat(done).tolist(), *itertools.chain.from_iterable(found)]
    assert sorted(samples) == list(range(6 * BATCHES))


def test_workers_exchange_at_least_once_in_a_slice_while_one_reads_its_stream_again() -> None:
    """A worker that is at its place waits for less than the time limit, however long another one reads."""
    goal, batch_s, now = 400, 0.1, [0.0]
    exchanges: list[float] = []
    reader, sentences = SimpleNamespace(position=0, problem=""), list[str]()

    def skip() -> bool:
        now[0] += batch_s
        reader.position += 1
        return True

    def gather(status: bytes) -> list[bytes]:
        exchanges.append(now[0])
        return [status, msgspec.msgpack.encode((goal, ""))]

    reader.skip = skip
    transport = SimpleNamespace(all_gather_bytes=gather)
    events = SimpleNamespace(say=sentences.append, notice=sentences.append)
    place = StreamPlace(2, False, [(0, goal)], {}, [], b"", b"", None)
    read_to_place(reader, place, transport, lambda: now[0], events)  # type: ignore[arg-type]
    assert now[0] == pytest.approx(goal * batch_s)
    assert all(after - before <= SLICE_S + batch_s for before, after in itertools.pairwise([0.0, *exchanges]))
    *shown, last = sentences
    assert now[0] / SHOWN_S - 2 <= len(shown) <= now[0] / SHOWN_S
    assert f"was read again to batch {goal}" in last


@pytest.mark.parametrize(("run_s", "batches", "joins"), [(100.0, 500, True), (100.0, 700, False), (3000.0, 700, True)])
def test_all_wait_for_a_worker_that_joins_a_stream_for_a_small_part_of_the_time_only(
    run_s: float, batches: int, joins: bool
) -> None:
    """It needs 0.1 s for a batch, and may take a minute, or 3% of the run."""
    now, reader, sentences = [0.0], SimpleNamespace(position=0, problem=""), list[str]()

    def skip() -> bool:
        now[0] += 0.1
        reader.position += 1
        return True

    def gather(status: bytes) -> list[bytes]:
        return [status, msgspec.msgpack.encode((batches, ""))]

    reader.skip = skip
    events = SimpleNamespace(say=sentences.append, own_notice=sentences.append, t=lambda: run_s)
    place = StreamPlace(2, False, [(0, batches)], {}, [], b"", b"", None)
    others: Any = (SimpleNamespace(all_gather_bytes=gather, number=1), lambda: now[0], events, True)
    if joins:
        read_to_place(reader, place, *others)  # type: ignore[arg-type]
        assert reader.position == batches
    else:
        with pytest.raises(StaysOutError, match="takes longer than 60 s;"):
            read_to_place(reader, place, *others)  # type: ignore[arg-type]
        assert now[0] < 3.0


def test_run_whose_worker_has_failed_resumes_with_what_the_others_had_not_trained(tmp_path: Path) -> None:
    def work(worker: int) -> list[list[int]]:
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
        loader = stretto.distribute(net, optimizer, KINDS["list"]())
        found: list[int] = []
        for x in loader:
            if fails and worker == 1 and len(found) == 4:
                raise WorkerKilled
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()
            if has_weight():
                found.append(int(x[0, 0]) // 2)
        return [found]

    fails = True
    options = {"checkpoint": every("1 rounds"), "keep": 99}
    whole, _ = run_elastic_workers(3, work, "allreduce", tmp_path / "run", **options)
    assert whole[1] is None
    after = [one for one in sorted((tmp_path / "run" / "checkpoints").iterdir()) if place_in(one) is not None][4 + 3]
    shutil.copytree(after, tmp_path / "part" / "checkpoints" / after.name)
    fails = False
    place = place_in(after)
    assert place is not None
    done = {position for start, stop in place.trained for position in range(start, stop)}
    assert 1 + 4 * 3 in done  # the failed worker's, which the others have trained by then
    found, _ = run_elastic_workers(2, work, "allreduce", tmp_path / "resumed", resume=tmp_path / "part")
    assert trained(found, 0) == sorted(set(range(BATCHES)) - done)


def test_section_continues_its_stream(tmp_path: Path) -> None:
    def work(worker: int) -> list[list[int]]:
        first = reading(lambda _: KINDS["list"](), epochs=1)(worker)
        return [*first, *reading(lambda _: KINDS["generator"](), epochs=1)(worker)]

    run_with_checkpoints(2, work, "allreduce", tmp_path / "run")
    within = sorted((tmp_path / "run" / "section-2" / "checkpoints").iterdir())
    found = [one for one in within if (place := place_in(one)) is not None and not place.is_over]
    place = place_in(found[5])
    assert place is not None
    done = place.trained[0][1]
    shutil.copytree(tmp_path / "run", part := tmp_path / "part")
    for one in within:
        if one != found[5]:
            shutil.rmtree(part / "section-2" / "checkpoints" / one.name)
    resumed = run_with_checkpoints(2, work, "allreduce", tmp_path / "resumed", resume=part)
    assert trained(resumed, 0) == []
    assert trained(resumed, 1) == list(range(done, BATCHES))


def test_digest_depends_on_all_kinds_of_content_and_on_both_ends_of_long_tensors() -> None:
    long = torch.arange(100_000.0)
    changed = [long.clone(), long.clone()]
    changed[0][0], changed[1][-1] = 5, 5
    batches: list[Any] = [
        *(long, *changed, long.view(10, -1)),
        *({"x": long}, {"y": long}, [long, "one"], [long, "two"], (torch.ones(2), 1), (torch.ones(2), 2)),
        *(long.numpy(), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bool)),
    ]
    assert len({digest_of(excerpt(batch)) for batch in batches}) == len(batches)
    assert digest_of(excerpt(long)) == digest_of(excerpt(long.clone()))


def test_restarted_worker_joins_a_resumed_stream(tmp_path: Path) -> None:
    def make() -> Any:
        return DataLoader(Stream(range(200)), batch_size=None)

    run_with_checkpoints(3, reading(lambda _: make(), epochs=1), "allreduce", tmp_path / "run")
    part, done = only_within(tmp_path / "run", tmp_path / "part")
    numbers, starts = list[int](), [0, 0]

    def work(worker: int) -> int:
        starts[worker] += 1
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
        for step, x in enumerate(stretto.distribute(net, optimizer, make())):
            if (worker, starts[worker], step) == (1, 1, 3):
                raise WorkerKilled
            optimizer.zero_grad()
            net(x).mean().backward()
            optimizer.step()
            if has_weight():
                numbers.append(int(x[0, 0]) // 2)
        return worker

    (tmp_path / "resumed").mkdir()
    found, coordinator = run_elastic_workers(2, work, "allreduce", tmp_path / "resumed", again=1, resume=part)
    assert (found, starts) == ([0, 1], [1, 2])
    assert len(coordinator.generations[-1].members) == 2
    assert sorted(numbers) == sorted(set(range(200)) - set(done))
