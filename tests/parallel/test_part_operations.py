"""Operations of a script on a tensor in parts, against the same ones on a whole tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from stretto.parallel.part_operations import act_as_whole

RANKS = 2


def some_rows(weight: Tensor) -> None:
    weight[1:6].mul_(2)
    weight[::3] = 0.5
    weight[-2:] = torch.arange(5.0)


def rows_and_columns(weight: Tensor) -> None:
    weight[2:6, 1:3].fill_(7)
    weight[1, 2:4] = 3
    weight[2:, 1] = 4
    weight[:, 3:].add_(1)
    weight.t()[1:3, 2:5].zero_()


def one_row(weight: Tensor) -> None:
    weight[5] = 5
    weight[-1, 2] = 6
    weight[:, 1] = 4


def parts_of_rows(weight: Tensor) -> None:
    weight[1:6][1:3].fill_(8)
    weight[1:6][4].fill_(9)
    weight[2:5].view(-1)[2:9].neg_()
    weight.narrow(0, 3, 2).abs_()


def rows_that_overlap(weight: Tensor) -> None:
    upper, lower = weight[0:4], weight[2:6]
    upper.zero_()
    lower.add_(1)
    torch._foreach_mul_([weight[1:3], weight[5:7]], 2)
    weight.mul_(upper.sum())


def rows_of_rows(weight: Tensor) -> None:
    kept = weight[0:2].clone()
    weight[0:2] = weight[4:6]
    weight[4:6].copy_(kept)


def pieces(weight: Tensor) -> None:
    weight.split(3)[1].zero_()
    weight.split([2, len(weight) - 2])[0].add_(1)
    for number, rows in enumerate(weight.chunk(3)):
        rows.mul_(1 + number)
    for number, row in enumerate(weight):
        row.add_(number)


def drawn(weight: Tensor) -> None:
    weight[1:5].normal_()
    weight[:, 2:4].uniform_(-1, 1)
    weight.mul_(torch.bernoulli(torch.full_like(weight, 0.5)))
    weight.copy_(torch.normal(weight, 1.0))


def diagonals(weight: Tensor) -> None:
    weight.diagonal().fill_(2)
    weight.diagonal(1).mul_(3)


def identity(weight: Tensor) -> None:
    nn.init.eye_(weight)


OPERATIONS: list[Callable[[Tensor], None]] = [
    some_rows,
    rows_and_columns,
    one_row,
    parts_of_rows,
    rows_that_overlap,
    rows_of_rows,
    pieces,
    drawn,
    diagonals,
    identity,
]


def changed(weight: Tensor, change: Callable[[Tensor], None]) -> Tensor:
    """Return a parameter after a change, with drawn numbers that are always the same."""
    torch.manual_seed(5)
    parameter = nn.Parameter(weight)
    with torch.no_grad():
        change(parameter)
    return parameter.detach()


def run_rank(rank: int, folder: str) -> None:
    """Compare all operations, with as many rows at each rank, and with one row more at the first rank."""
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store)
    mesh = init_device_mesh("cpu", (RANKS,))
    act_as_whole()
    wrong = []
    for rows in (7, 8):
        weight = torch.randn(rows, 5, generator=torch.Generator().manual_seed(3))
        for change in OPERATIONS:
            expected = changed(weight.clone(), change)
            found = changed(distribute_tensor(weight.clone(), mesh, [Shard(0)]), change)
            if not found.full_tensor().equal(expected) or expected.equal(weight):  # type: ignore[attr-defined]
                wrong.append(f"{change.__name__}, {rows} rows")
    dist.destroy_process_group()
    Path(folder, f"wrong-{rank}").write_text("\n".join(wrong))


def test_changes_of_a_tensor_in_parts_are_those_of_the_whole_tensor(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run_rank, (str(tmp_path),), RANKS)
    assert [Path(tmp_path, f"wrong-{rank}").read_text() for rank in range(RANKS)] == ["", ""]
