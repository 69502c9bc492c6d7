"""Embeddings with sparse gradients under an asynchronous server: their rows alone are exchanged, with equal results."""

from __future__ import annotations

import copy
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import each_value
from thread_workers import flat, relative_distance, run_one_worker, run_single_process, run_workers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import stretto
from stretto.errors import ModelError
from stretto.events import Event, read_events
from stretto.interval import every

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
DOUBLE = torch.float64
USERS, ITEMS, WIDTH = 50, 40, 6
Make = Callable[[nn.Module], Any]


def ratings(samples: int = 96) -> TensorDataset:
    """Return users, items and values; few users have most of the samples."""
    source = torch.Generator().manual_seed(samples)
    users = (torch.rand(samples, generator=source) ** 3 * USERS).long()
    items = torch.randint(0, ITEMS, (samples,), generator=source)
    return TensorDataset(users, items, torch.randn(samples, 1, generator=source).to(DOUBLE))


class Factors(nn.Module):
    """Embeddings of users and items, a bias of items, a bag of two tags, and a dense layer."""

    def __init__(self, sparse: bool = True, **options: Any) -> None:
        super().__init__()
        kind: dict[str, Any] = {"sparse": sparse, "dtype": DOUBLE}
        self.users = nn.Embedding(USERS, WIDTH, padding_idx=3, **kind, **options)
        self.items = nn.Embedding(ITEMS, WIDTH, **kind)
        self.bias = nn.Embedding(ITEMS, 1, **kind)
        self.tags = nn.EmbeddingBag(ITEMS, WIDTH, mode="sum", **kind)
        self.head = nn.Linear(2 * WIDTH, 1, dtype=DOUBLE)
        source = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randn(one.shape, generator=source, dtype=DOUBLE) * 0.3)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        tags = self.tags(torch.stack([items, users % ITEMS], 1))
        both = torch.cat([self.users(users) + tags, self.items(items)], 1)
        return self.bias(items) + self.head(both)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.2)


def adagrad(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(net.parameters(), lr=0.05, lr_decay=0.01)


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def sparse_adam(net: nn.Module) -> list[torch.optim.Optimizer]:
    dense = [one for name, one in net.named_parameters() if name.startswith("head")]
    tables = [one for name, one in net.named_parameters() if not name.startswith("head")]
    return [torch.optim.SparseAdam(tables, lr=0.01), torch.optim.Adam(dense, lr=0.01)]


def work(
    make: Make, sparse: bool = True, epochs: int = 3, build: Callable[[bool], nn.Module] = Factors, **options: Any
) -> Callable[[int], Tensor]:
    """Return a function of the worker that runs a plain loop and returns the final parameters, flat."""

    def run(worker: int) -> Tensor:
        net = build(sparse)
        made = make(net)
        optimizers = made if isinstance(made, list) else [made]
        loader: Any = DataLoader(ratings(), batch_size=8)
        loader = stretto.distribute(net, made, loader, **options)
        for _ in range(epochs):
            for users, items, values in loader:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                nn.functional.mse_loss(net(users, items), values).backward()
                for optimizer in optimizers:
                    optimizer.step()
        return flat(net)

    return run


def events_of(run: Path, kind: str) -> list[Event]:
    return [event for event in read_events(run / "events.jsonl") if event["event"] == kind]


@pytest.mark.parametrize(
    ("recipe", "make"),
    each_value(
        [
            "async_sgd",
            "async_sgd(overlap=True, shards=3)",
            "downpour(every=3)",
            "soft_sync(shards=2)",
            "stale_synchronous",
            "Recipe(what=updates(), when=on_arrival(collect=2), whom=server(), then=add())",
        ],
        [sgd, adagrad, sparse_adam],
    ),
)
def test_one_worker_computes_the_plain_loop(recipe: str, make: Make) -> None:
    assert relative_distance(run_one_worker(work(make), recipe), run_single_process(work(make))) <= 1e-12


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("make", [sgd, adagrad])
def test_staleness_bound_0_equals_the_dense_recipe(make: Make, shards: int) -> None:
    recipe = f"stale_synchronous(bound=0, shards={shards})"
    for workers in (2, 3):
        sparse, dense = (run_workers(workers, work(make, sparse), recipe)[0] for sparse in (True, False))
        assert relative_distance(sparse, dense) <= 1e-12


def test_staleness_bound_0_equals_all_reduce_with_sgd() -> None:
    sparse = run_workers(2, work(sgd), "stale_synchronous(bound=0)")[0]
    assert relative_distance(sparse, run_workers(2, work(sgd, sparse=False), "allreduce")[0]) <= 1e-12


@pytest.mark.parametrize(
    "recipe",
    [
        "Recipe(what=updates(), when=on_arrival(collect=2, bound=0), whom=server(), then=add())",
        "Recipe(what=gradients(), when=on_arrival(bound=0), whom=server(shards=2), then=add(equal_share()))",
        "Recipe(what=updates(), when=on_arrival(every=2, bound=0), whom=server(), then=add(equal_share()))",
    ],
)
def test_answers_of_recipes_equal_those_of_dense_tables(recipe: str) -> None:
    sparse, dense = (run_workers(2, work(sgd, sparse), recipe)[0] for sparse in (True, False))
    assert relative_distance(sparse, dense) <= 1e-12


def test_only_the_rows_of_a_batch_travel(tmp_path: Path) -> None:
    """Each batch reads its rows and sends their changes: numbers of 4 bytes, and `width` values of 8."""
    run_workers(2, work(sgd, epochs=1), "async_sgd(shards=2)", run=tmp_path)
    sent = received = 0
    head = -(-(2 * WIDTH) // 8) * 64 + 64  # weight and bias, each in whole pieces of 64 bytes
    for users, items, _ in DataLoader(ratings(), batch_size=8):
        for rows, width in ((users, WIDTH), (items, WIDTH), (items, 1), (torch.cat([items, users % ITEMS]), WIDTH)):
            looked_up = rows.unique()
            changed = looked_up[looked_up != 3] if rows is users else looked_up  # 3 is the padding
            sent += 4 * len(looked_up) + len(changed) * (4 + 8 * width)
            received += 8 * width * len(looked_up)
        sent, received = sent + head, received + head
    traffic = [end["traffic"]["updates"] for end in events_of(tmp_path, "end")]
    assert sum(counts[1] for counts in traffic) == sent
    assert sum(counts[3] for counts in traffic) == received
    assert sum(counts[0] for counts in traffic) > 3 * sent
    values, entries = map(sum, zip(*(end["values_sent"] for end in events_of(tmp_path, "end")), strict=True))
    assert values < 0.3 * entries


@pytest.mark.parametrize(
    ("recipe", "make", "reason"),
    [
        ("elastic_averaging(every=2)", sgd, "needs the whole table"),
        ("delay_compensated", sgd, "needs the whole table"),
        ("async_diloco(every=2)", adagrad, "needs the whole table"),
        ("async_sgd(how=error_feedback(top_k(0.1)))", sgd, "needs the whole table"),
        ("async_sgd", momentum, "momentum of SGD changes rows without a gradient"),
    ],
)
def test_tables_that_rows_do_not_describe_are_exchanged_whole_and_a_notice_says_why(
    recipe: str, make: Make, reason: str, tmp_path: Path
) -> None:
    sparse = run_one_worker(work(make), recipe, run=tmp_path)
    assert relative_distance(sparse, run_one_worker(work(make, sparse=False), recipe)) <= 1e-12
    (notice,) = [event["text"] for event in events_of(tmp_path, "warning") if "users.weight" in event["text"]]
    assert reason in notice


class Tied(nn.Module):
    """Factors whose embeddings of users have another use, or a maximal norm."""

    def __init__(self, sparse: bool, max_norm: float | None) -> None:
        super().__init__()
        self.rows = nn.Embedding(USERS, WIDTH, sparse=sparse, dtype=DOUBLE, max_norm=max_norm)
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=sparse, dtype=DOUBLE)
        self.again = nn.Embedding(ITEMS, WIDTH, sparse=sparse, dtype=DOUBLE, _weight=self.items.weight)
        self.again.weight = self.items.weight
        self.head = nn.Linear(WIDTH, USERS, bias=False, dtype=DOUBLE)
        if max_norm is None:
            self.head.weight = self.rows.weight
        source = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randn(one.shape, generator=source, dtype=DOUBLE) * 0.3)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        hidden = self.rows(users) + self.items(items) * self.again(items.flip(0))
        return self.head(hidden).mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("max_norm", "reason"), [(None, "other modules use the weight as well"), (0.5, "max_norm changes rows")]
)
def test_tied_tables_and_tables_with_a_maximal_norm_are_exchanged_whole(
    max_norm: float | None, reason: str, tmp_path: Path
) -> None:
    """A table that two embeddings share is exchanged by rows."""
    run = work(sgd, build=lambda sparse: Tied(sparse, max_norm))
    assert relative_distance(run_one_worker(run, "async_sgd", run=tmp_path), run_single_process(run)) <= 1e-12
    notices = [event["text"] for event in events_of(tmp_path, "warning")]
    assert any("rows.weight is exchanged whole" in notice and reason in notice for notice in notices)
    assert any("only the rows of a batch are exchanged of items.weight (40 rows)" in notice for notice in notices)


def loop(net: Any, loss_of: Callable[[Any, Tensor, Tensor], Tensor], **options: Any) -> None:
    optimizer = sgd(net)
    for users, items, _ in stretto.distribute(net, optimizer, DataLoader(ratings(), batch_size=8), **options):
        optimizer.zero_grad()
        loss_of(net, users, items).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("loss_of", "text"),
    [
        (lambda net, users, items: net(users, items).sum() + net.users.weight.sum(), "a dense gradient"),
        (
            lambda net, users, items: nn.functional.embedding(users, net.users.weight, sparse=True).sum(),
            "looked up without the module",
        ),
    ],
)
def test_uses_of_a_table_without_its_module_are_refused(loss_of: Any, text: str) -> None:
    with pytest.raises(ModelError, match=text) as caught:
        run_one_worker(lambda worker: loop(Factors(), loss_of), "async_sgd")
    assert "users.weight" in str(caught.value)
    assert "sparse=False" in str(caught.value)


def test_rows_may_be_looked_up_for_several_steps_and_steps_may_accumulate_gradients() -> None:
    def run(worker: int) -> Tensor:
        net = Factors()
        optimizer = sgd(net)
        loader = stretto.distribute(net, optimizer, DataLoader(ratings(), batch_size=8), evaluate_every=3)
        for number, (users, items, values) in enumerate(loader):
            if number % 3:
                losses = [net.users(users).square().mean(), net.items(items).square().mean(), net.users(items).mean()]
                for loss in losses:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            else:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(users, items), values).backward()
                (0.1 * net(items, items).square().mean()).backward()
                nn.utils.clip_grad_value_(net.head.parameters(), 0.5)
                optimizer.step()
        return flat(net)

    assert relative_distance(run_one_worker(run, "async_sgd"), run_single_process(run)) <= 1e-12


def test_evaluations_see_whole_tables(tmp_path: Path) -> None:
    """The workers evaluate the same model as with dense tables, whether they look rows up or read the weight."""

    def evaluate(net: Any) -> dict[str, float]:
        users = torch.arange(USERS)
        return {
            "looked_up": float(net(users, users % ITEMS).detach().square().sum()),
            "read": float(net.users.weight.detach().square().sum()),
        }

    found = []
    for sparse in (True, False):
        run = tmp_path / str(sparse)
        run.mkdir()
        train = work(adagrad, sparse, evaluate=evaluate, evaluate_every=4)
        run_workers(2, train, "stale_synchronous(bound=0)", run=run)
        found.append([event["metrics"] for event in events_of(run, "evaluation")])
    assert len(found[0]) == len(found[1]) >= 5
    for sparse_metrics, dense_metrics in zip(*found, strict=True):
        assert sparse_metrics == pytest.approx(dense_metrics, rel=1e-9)


def test_training_continues_from_tables_that_the_script_changes_after_an_epoch() -> None:
    def run(sparse: bool) -> Callable[[int], Tensor]:
        def train(worker: int) -> Tensor:
            net = Factors(sparse)
            optimizer = sgd(net)
            loader = stretto.distribute(net, optimizer, DataLoader(ratings(), batch_size=8))
            for _ in range(3):
                for users, items, values in loader:
                    optimizer.zero_grad()
                    nn.functional.mse_loss(net(users, items), values).backward()
                    optimizer.step()
                with torch.no_grad():
                    net.users.weight.mul_(0.5)
            return flat(net)

        return train

    sparse, dense = (run_workers(2, run(sparse), "stale_synchronous(bound=0)")[0] for sparse in (True, False))
    assert relative_distance(sparse, dense) <= 1e-12
    assert relative_distance(run_one_worker(run(True), "async_sgd"), run_single_process(run(True))) <= 1e-12


def test_a_skipped_update_leaves_its_rows_as_they_were(tmp_path: Path) -> None:
    def train(worker: int) -> Tensor:
        net = Factors()
        optimizer = sgd(net)
        for step, (users, items, values) in enumerate(
            stretto.distribute(net, optimizer, DataLoader(ratings(), batch_size=8))
        ):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(users, items), values)
            (loss * (torch.nan if step == 2 else 1.0)).backward()
            optimizer.step()
            assert bool(torch.isfinite(net.users.weight).all())
        return flat(net)

    found = run_workers(2, train, "async_sgd", run=tmp_path, on_nan="skip")
    assert all(bool(torch.isfinite(one).all()) for one in found)
    with pytest.raises(stretto.errors.NotFiniteError, match="NaN"):
        run_workers(2, train, "async_sgd", on_nan="stop")


def test_unfit_recipes_of_gradients_name_one_that_exchanges_rows() -> None:
    with pytest.raises(ModelError, match="sparse") as caught:
        run_workers(2, work(sgd), "allreduce")
    assert "async_sgd" in str(caught.value)


def test_sparse_momenta_are_averaged_and_saved_as_dense_ones(tmp_path: Path) -> None:
    recipe = "local_sgd(every=2, optimizer_state='average')"
    options: dict[str, Any] = {"checkpoint": every("4 rounds"), "keep": 99}
    (sparse, _), (dense, _) = (
        run_workers(2, work(momentum, sparse), recipe, run=tmp_path / str(sparse), **options)
        for sparse in (True, False)
    )
    assert relative_distance(sparse, dense) <= 1e-12
    checkpoints = sorted((tmp_path / "True" / "checkpoints").iterdir())
    middle, part = checkpoints[len(checkpoints) // 2], tmp_path / "part"
    shutil.copytree(middle, part / "checkpoints" / middle.name)
    again = run_workers(2, work(momentum), recipe, run=tmp_path / "again", resume=part, **options)[0]
    assert relative_distance(again, sparse) <= 1e-12


@pytest.mark.parametrize("make", [sgd, adagrad])
def test_a_run_that_resumes_within_an_epoch_equals_the_uninterrupted_run(make: Make, tmp_path: Path) -> None:
    """A checkpoint holds whole tables by name: a run of dense tables resumes it as well."""
    options: dict[str, Any] = {"checkpoint": every("5 rounds"), "keep": 99}
    whole = run_one_worker(work(make), "async_sgd(shards=2)", run=tmp_path, **options)
    checkpoints = sorted((tmp_path / "checkpoints").iterdir())
    middle, part = checkpoints[len(checkpoints) // 2], tmp_path / "part"
    shutil.copytree(middle, part / "checkpoints" / middle.name)
    for sparse, recipe in ((True, "async_sgd(shards=3)"), (False, "async_sgd"), (True, "local_sgd(every=2)")):
        again = run_one_worker(work(make, sparse), recipe, run=tmp_path / recipe, resume=part, **options)
        assert relative_distance(again, whole) <= 1e-12


class Tables(nn.Module):
    """Embeddings alone."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=sparse, dtype=DOUBLE)
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=sparse, dtype=DOUBLE)
        source = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(torch.randn(one.shape, generator=source, dtype=DOUBLE) * 0.3)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.users(users) * self.items(items)).sum(1, keepdim=True)


@pytest.mark.parametrize("build", [Tables, Factors])
@pytest.mark.parametrize("recipe", ["async_sgd(shards=2)", "downpour(every=3)", "downpour(every=3, overlap=True)"])
def test_evaluations_between_exchanges_change_nothing(build: Any, recipe: str) -> None:
    """A worker continues with the rows that it has changed since its last push."""
    evaluated = work(adagrad, build=build, evaluate=lambda net: {"one": 1.0}, evaluate_every=2)
    expected = run_single_process(work(adagrad, build=build))
    assert relative_distance(run_one_worker(evaluated, recipe), expected) <= 1e-12


@pytest.mark.parametrize("recipe", [None, "async_sgd(shards=2)", "local_sgd(every=2)"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_tables_of_the_meta_device_train_as_those_with_memory(kind: Any, recipe: str | None) -> None:
    """Adagrad makes its sums when it is made, of parameters without memory."""

    def run(device: str) -> Callable[[int], Tensor]:
        def train(worker: int) -> Tensor:
            torch.manual_seed(3)
            with torch.device(device):
                net = nn.Sequential(nn.Embedding(1001, 7, sparse=True, padding_idx=3, dtype=DOUBLE), nn.Flatten())
            optimizer = kind(net.parameters(), lr=0.1)
            numbers = TensorDataset(torch.arange(90) ** 2 % 1001)
            for (number,) in stretto.distribute(net, optimizer, DataLoader(numbers, batch_size=9)):
                optimizer.zero_grad()
                net(number).square().mean().backward()
                optimizer.step()
            return flat(net)

        return train

    expected = run_single_process(run("cpu"))
    found = run_one_worker(run("meta"), recipe) if recipe else run_single_process(run("meta"))
    assert relative_distance(found, expected) <= 1e-12


def test_files_and_copies_of_a_model_and_its_optimizer_are_those_of_the_plain_script(tmp_path: Path) -> None:
    """They are read by a Python that has no Stretto, also without trust in the file."""

    def train(worker: int) -> None:
        net = Factors()
        optimizer = adagrad(net)
        for users, items, values in stretto.distribute(net, optimizer, DataLoader(ratings(), batch_size=8)):
            optimizer.zero_grad()
            nn.functional.mse_loss(net.forward(users, items), values).backward()
            optimizer.step()
            pairs = net.users, optimizer  # the class of the whole model is one of this file
            if not (tmp_path / "safe.pt").exists():
                torch.save(pairs[0], tmp_path / "safe.pt")
                torch.save(pairs, tmp_path / "both.pt")
                (tmp_path / "both.pkl").write_bytes(pickle.dumps(copy.deepcopy(pairs)))

    run_one_worker(train, "async_sgd")
    program = """
import pickle, sys, torch
sys.modules["stretto"] = None
table = torch.nn.Embedding
with torch.serialization.safe_globals([table]):
    safe = torch.load("safe.pt", weights_only=True)
both = *torch.load("both.pt", weights_only=False), *pickle.load(open("both.pkl", "rb"))
for one in (safe, both[0], both[2]):
    assert type(one) is table and not one._forward_pre_hooks and not one._forward_pre_hooks_with_kwargs
    assert one(torch.tensor([0])).isfinite().all()
    assert {*vars(one)} == {*vars(table(2, 2))}, vars(one)
assert {type(one) for one in both[1::2]} == {torch.optim.Adagrad}
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=120)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("is_wrapped", [True, False])
def test_compiled_models_look_rows_up(is_wrapped: bool) -> None:
    def run(is_compiled: bool) -> Callable[[int], Tensor]:
        def train(worker: int) -> Tensor:
            net: Any = Factors()
            optimizer = sgd(net)
            used = torch.compile(net, backend="eager") if is_compiled and is_wrapped else net
            if is_compiled and not is_wrapped:
                net.compile(backend="eager")
            for users, items, values in stretto.distribute(used, optimizer, DataLoader(ratings(), batch_size=8)):
                optimizer.zero_grad()
                nn.functional.mse_loss(used(users, items), values).backward()
                optimizer.step()
            return flat(net)

        return train

    found = run_one_worker(run(True), "async_sgd")
    assert relative_distance(found, run_single_process(run(False))) <= 1e-12


def test_tables_may_be_frozen_and_thawed_between_epochs() -> None:
    def run(sparse: bool) -> Callable[[int], Tensor]:
        def train(worker: int) -> Tensor:
            net: Any = Factors(sparse)
            optimizer = sgd(net)
            loader = stretto.distribute(net, optimizer, DataLoader(ratings(), batch_size=8))
            for epoch in range(4):
                net.users.requires_grad_(epoch != 1)
                net.items.requires_grad_(epoch > 1)
                for users, items, values in loader:
                    optimizer.zero_grad()
                    nn.functional.mse_loss(net(users, items), values).backward()
                    optimizer.step()
            return flat(net)

        return train

    sparse, dense = (run_workers(2, run(sparse), "stale_synchronous(bound=0)")[0] for sparse in (True, False))
    assert relative_distance(sparse, dense) <= 1e-12
