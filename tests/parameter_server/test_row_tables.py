"""Tables at a shard: updates change the rows that they name, as a dense update with zeros elsewhere would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from handlers import replies_to
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from stretto.parameter_server import messages as m
from stretto.parameter_server.client_types import ranges
from stretto.parameter_server.framing import FramingError
from stretto.parameter_server.row_tables import RowChange
from stretto.parameter_server.shard import Shard, Update
from stretto.parameter_server.shard_handler import ShardHandler
from stretto.parameter_server.snapshots import InMemoryStore
from stretto.recipe.parser import parse

ROWS, WIDTH = 9, 3
RECIPES = [
    "async_sgd",
    "staleness_aware(collect=2)",
    "soft_sync(collect=2)",
    "stale_synchronous(bound=2)",
    "Recipe(what=updates(), when=on_arrival(collect=2, bound=1), whom=server(), then=add(exponential(lam=0.5)))",
]
Pushes = list[tuple[int, list[int], int, int]]
"""Worker, rows, samples, and by how many versions the update is older than the newest one."""


def shard_of(recipe: str, workers: int, theta: Sequence[Tensor], widths: Sequence[int] = ()) -> Shard:
    parsed: Any = parse(recipe)
    return Shard(theta, parsed.when, parsed.then, workers, widths)


def newest(shard: Shard) -> list[Tensor]:
    return [flat.clone() for flat in shard.parameters]


@given(
    recipe=st.sampled_from(RECIPES),
    pushes=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.lists(st.integers(0, ROWS - 1), max_size=5, unique=True).map(sorted),
            st.integers(0, 4),
            st.integers(0, 3),
        ),
        max_size=20,
    ),
    seed=st.integers(0, 1000),
)
def test_rows_are_changed_as_by_a_dense_update(recipe: str, pushes: Pushes, seed: int) -> None:
    """Also, a worker reads its rows in the version of its last reply if there is a bound."""
    source = torch.Generator().manual_seed(seed)
    theta = torch.randn(ROWS * WIDTH, generator=source, dtype=torch.float64)
    other = torch.zeros(2, dtype=torch.float64)
    dense = shard_of(recipe, 3, [other.clone(), theta.clone()])
    sparse = shard_of(recipe, 3, [other.clone(), theta.clone()], [0, WIDTH])
    read: dict[int, Tensor] = dict.fromkeys(range(3), theta)
    counts = dict.fromkeys(range(3), 0)
    for worker, rows, samples, age in pushes:
        if dense.members[worker].completed != counts[worker] or dense.members[worker].is_waiting:
            continue
        counts[worker] += 1
        numbers = torch.tensor(rows, dtype=torch.int64)
        changes = torch.randn(len(rows), WIDTH, generator=source, dtype=torch.float64)
        flat = torch.zeros(ROWS, WIDTH, dtype=torch.float64).index_add_(0, numbers, changes).view(-1)
        facts = (worker, counts[worker], max(dense.version - age, 0), samples)
        bias = torch.ones(2, dtype=torch.float64)
        replies = [*dense.push(Update(*facts, [[bias], [flat]])), *dense.pull(worker)]
        sparse.push(Update(*facts, [[bias]], rows=[RowChange(numbers, changes)]))
        sparse.pull(worker)
        for reply in replies:
            read[reply.worker] = reply.version.ranges[1].clone()
        for expected, found in zip(newest(dense), newest(sparse), strict=True):
            torch.testing.assert_close(found, expected)
        for reader in range(3):
            expected = read[reader] if "bound" in recipe else dense.current.ranges[1]
            found = sparse.read_rows(reader, 0, torch.arange(ROWS))
            torch.testing.assert_close(found.view(-1), expected)
    if "bound" not in recipe:
        assert not sparse.tables[0]._overwritten


def test_rows_before_an_update_are_forgotten_when_no_worker_reads_them() -> None:
    shard = shard_of("stale_synchronous(bound=1)", 2, [torch.zeros(ROWS * WIDTH)], [WIDTH])
    for seq in range(1, 30):
        for worker in range(2):
            shard.push(Update(worker, seq, shard.version, 1, [], rows=[RowChange(torch.tensor([1]), torch.ones(1, 3))]))
            shard.pull(worker)
    assert len(shard.tables[0]._overwritten) <= 4


@pytest.mark.parametrize(("length", "width", "shards"), [(7 * 100, 100, 3), (1000 * 32, 32, 7), (5, 5, 4), (33, 3, 2)])
def test_shards_hold_whole_rows(length: int, width: int, shards: int) -> None:
    bounds = ranges(length, shards, width)
    assert [start for start, _ in bounds[1:]] == [stop for _, stop in bounds[:-1]]
    assert (bounds[0][0], bounds[-1][1]) == (0, length)
    assert not any(start % width or stop % width for start, stop in bounds)


def opened(handler: ShardHandler, recipe: str = "async_sgd", widths: tuple[int, ...] = (0, WIDTH)) -> None:
    theta = [torch.zeros(4), torch.zeros(ROWS * WIDTH)]
    replies_to(handler, 0, 1, m.Open(1, recipe, 2, widths=list(widths)), theta)


def pushed(handler: ShardHandler, numbers: Tensor, changes: Tensor) -> m.Body:
    (reply,) = replies_to(handler, 0, 2, m.Push(1, 1, 0, 8, 0.1), [torch.ones(4), numbers, changes])
    return reply.body


def row_numbers(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize(
    ("numbers", "changes"),
    [
        (row_numbers(1, 1), torch.ones(6)),
        (row_numbers(2, 1), torch.ones(6)),
        (row_numbers(-1, 1), torch.ones(6)),
        (row_numbers(1, 9), torch.ones(6)),
        (row_numbers(1, 2), torch.ones(7)),
        (row_numbers(*range(10)), torch.ones(30)),
        (torch.tensor([1, 2]), torch.ones(6)),
        (row_numbers(1, 2), torch.ones(6).double()),
    ],
)
def test_malformed_rows_are_refused(numbers: Tensor, changes: Tensor) -> None:
    handler = ShardHandler(2, lambda: 0.0, "stop")
    opened(handler)
    with pytest.raises(FramingError):
        pushed(handler, numbers, changes)
    if numbers.tolist() != [1, 2] or numbers.dtype != torch.int32:
        with pytest.raises(FramingError):
            replies_to(handler, 0, 3, m.ReadRows(1, 0), [numbers])
    with pytest.raises(FramingError):
        replies_to(handler, 0, 3, m.ReadRows(1, 1), [row_numbers(1)])
    (dense,), (rows,) = (
        replies_to(handler, 0, 4, body, given)
        for body, given in ((m.Read(False), []), (m.ReadRows(1, 0), [row_numbers(*range(ROWS))]))
    )
    assert not any(tensor.any() for tensor in [*dense.tensors, *rows.tensors])
    assert [len(tensor) for tensor in [*dense.tensors, *rows.tensors]] == [4, ROWS * WIDTH]
    assert isinstance(pushed(handler, row_numbers(1, 8), torch.ones(6)), m.PushReply)


@pytest.mark.parametrize(
    ("recipe", "widths"),
    [
        ("elastic_averaging", (0, WIDTH)),
        ("async_sgd(how=top_k(0.1))", (0, WIDTH)),
        ("async_sgd", (4, 0)),
        ("async_sgd", (0, 4)),
        ("async_sgd", (WIDTH,)),
    ],
)
def test_tables_that_do_not_fit_are_refused(recipe: str, widths: tuple[int, ...]) -> None:
    with pytest.raises(FramingError, match="tables of"):
        opened(ShardHandler(2, lambda: 0.0, "stop"), recipe, widths)


def test_a_snapshot_holds_tables() -> None:
    store = InMemoryStore()
    handler = ShardHandler(2, lambda: 0.0, "stop", store)
    opened(handler)
    pushed(handler, row_numbers(2, 5), torch.arange(6.0))
    replies_to(handler, 0, 3, m.Snapshot(7, 0))
    restarted = ShardHandler(2, lambda: 0.0, "stop", store, boot_id=1)
    replies_to(restarted, 0, 1, m.RequestRollback(1, 7, 1, [0, 1]))
    (reply,) = replies_to(restarted, 0, 2, m.ReadRows(1, 0, 1), [row_numbers(2, 3, 5)])
    assert reply.tensors[0].tolist() == [0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 3.0, 4.0, 5.0]
