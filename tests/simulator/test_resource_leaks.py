"""Memory of long and large simulations: nothing of failed incarnations, and no copies of equal data."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
from combinations import mostly_long
from simulator.failures import FREE, THROUGH, TOGETHER, lived
from simulator.harness import simulated

from stretto.loader import epoch_batches
from stretto.simulator.cluster import rpc_channel
from stretto.training.trainer import Trainer
from stretto.training.worker_context import WorkerContext

TENSORS = """
import os, torch, stretto
x, y = torch.randn(2000, 6), torch.randn(2000, 8)
net = torch.nn.Linear(6, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(x, y)
loader = stretto.distribute(net, optimizer, torch.utils.data.DataLoader(data, batch_size=500))
for a, b in loader:
    torch.nn.functional.mse_loss(net(a), b).backward()
    optimizer.step()
    optimizer.zero_grad()
torch.counted.append(len(os.listdir("/dev/fd")))
"""


@pytest.mark.parametrize("recipe", mostly_long([*TOGETHER, *FREE, THROUGH], short=(0, 3, 8)))
def test_failed_incarnations_are_freed(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    born: dict[tuple[int, int], weakref.ref[Trainer]] = {}
    real = Trainer.__init__

    def noted(self: Trainer, seat: WorkerContext, *given: Any) -> None:
        born[seat.worker, seat.incarnation] = weakref.ref(self)
        real(self, seat, *given)

    monkeypatch.setattr(Trainer, "__init__", noted)
    lived(recipe, "kill worker 1 at 30ms, back after 10ms; kill worker 0 at 90ms, back after 10ms")
    gc.collect()
    assert set(born) == {(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)}
    assert born[0, 0]() is born[1, 0]() is None


def test_worker_uses_no_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """File descriptors are limited, and a thousand workers share each tensor of the script."""
    counts: dict[int, int] = {}
    for workers in (2, 12):
        counted: list[int] = []
        monkeypatch.setattr("torch.counted", counted, raising=False)
        gc.collect()  # closes files that earlier tests left open
        simulated(workers, TENSORS, "local_sgd(every=2)")
        counts[workers] = max(counted)
    assert counts[12] <= counts[2]


def test_no_replies_remain_after_a_server_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replies of later shards and of requests in progress are dropped."""
    left: Counter[str] = Counter()
    close = rpc_channel.SimChannel.close

    def counted(self: rpc_channel.SimChannel) -> None:
        left["replies"] += len(self._replies)
        left["unread"] += len(self._on_read)
        close(self)

    monkeypatch.setattr(rpc_channel.SimChannel, "close", counted)
    fault = "; ".join(f"kill server {n % 2} at {40 + 45 * n}ms, back after 5ms" for n in range(6))
    lived("async_sgd(shards=4)", fault, 3, 6)
    assert left == {"replies": 0, "unread": 0}


def test_uncommitted_work_is_listed_for_failed_workers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing the uncommitted work of all workers at each worker would be quadratic."""
    taken: list[int] = []
    real = epoch_batches.UncommittedWork.take
    monkeypatch.setattr(
        epoch_batches.UncommittedWork, "take", lambda self, worker: taken.append(worker) or real(self, worker)
    )
    fault = "kill worker 1 at 190ms, back after 20ms"
    ended = lived("local_sgd(every=60)", fault, 3, 6)
    assert set(taken) == {1}
    assert ended.of("epoch")[-1]["sample_counts"]["once"] == 41
