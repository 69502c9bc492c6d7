"""A restarted dispatcher has the state of the one before, whether its log has inputs, a state, or both."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from handlers import service_replies_to
from torch import Tensor

from stretto.errors import LogError
from stretto.membership.write_ahead_log import WriteAheadLog
from stretto.parameter_server import messages as m
from stretto.parameter_server.dispatcher_handler import DispatcherHandler
from stretto.parameter_server.service import Service
from stretto.parameter_server.state_log import RecordedClock, StateLog

WORKERS = 3


def dispatcher(path: Path, compacted_bytes: int, restarted: bool = False, now: list[float] | None = None) -> Service:
    now = now or [0.0]
    clock = RecordedClock(lambda: now[0])
    handler = DispatcherHandler(WORKERS, clock, snapshot_interval_s=40)
    return Service(handler, StateLog(path, handler, clock, restarted, compacted_bytes))


def conversation(seed: int) -> list[tuple[int, m.Request, list[Tensor]]]:
    """Return requests of workers: two epochs with leases in a random order, barriers, a snapshot, and a leaver."""
    source = random.Random(seed)
    requests: list[tuple[int, m.Request, list[Tensor]]] = []
    for epoch in (1, 2):
        op = 10 * epoch
        order = torch.arange(12, dtype=torch.uint8)
        requests += [(worker, m.BroadcastOrder(op, 0, epoch), [order]) for worker in range(WORKERS)]
        sizes = [torch.full((6,), 2, dtype=torch.int64)]
        requests += [
            (worker, m.BeginEpoch(epoch, None, source.choice(["first-come", "in-turn", "one-each"])), sizes)
            for worker in range(WORKERS)
        ]
        requests += [(worker, m.LeaveBarrier(op), []) for worker in range(WORKERS)]
        for _ in range(12):
            worker = source.randrange(WORKERS)
            requests.append((worker, m.Lease(epoch), []))
            requests.append((worker, m.Settle(epoch, [source.randrange(6)]), []))
        requests += [(worker, m.AwaitEpochEnd(epoch, 0), []) for worker in range(WORKERS)]
        requests += [(worker, m.Barrier(op + 1, 0), []) for worker in range(WORKERS)]
        requests += [(worker, m.Snapshot(op + 1, 0), []) for worker in range(WORKERS)]
        requests += [(worker, m.CountSamples(epoch, 0), []) for worker in range(WORKERS)]
    return [*requests, (2, m.Quit(), []), (0, m.Gather(30, None), [order]), (1, m.Gather(30, None), [order])]


def said(service: Service, numbers: dict[int, int], request: tuple[int, m.Request, list[Tensor]]) -> list[Any]:
    """Return all replies to a request, comparably."""
    worker, body, tensors = request
    numbers[worker] = numbers.get(worker, 0) + 1
    replies = service_replies_to(service, worker, numbers[worker], body, tensors, numbers[worker] - 2)
    return [(one.worker, one.request_id, one.body, [part.tolist() for part in one.tensors]) for one in replies]


@pytest.mark.parametrize("compacted_bytes", [0, 500, 10**6])
@pytest.mark.parametrize("seed", range(5))
def test_a_restarted_dispatcher_replies_as_one_that_was_never_lost(
    tmp_path: Path, seed: int, compacted_bytes: int
) -> None:
    requests = conversation(seed)
    wanted: list[Any] = []
    path, found, numbers, now = tmp_path / "log", [], dict[int, int](), [0.0]
    steady, steady_numbers = dispatcher(tmp_path / "steady", 10**9, now=now), dict[int, int]()
    service = dispatcher(path, compacted_bytes, now=now)
    for place, request in enumerate(requests):
        now[0] = float(place)
        wanted.append(said(steady, steady_numbers, request))
        if place % 7 == seed % 7:
            service.close()
            service = dispatcher(path, compacted_bytes, restarted=True, now=now)
        found.append(said(service, numbers, request))
        if (reply := found[-1]) and reply[0][0] == request[0]:  # the same request again has the same reply
            again = service_replies_to(service, request[0], numbers[request[0]], request[1], request[2])
            assert [(one.worker, one.request_id, one.body) for one in again] == [reply[0][:3]]
    assert found == wanted
    assert any(reply for reply in wanted)
    service.close()
    steady.close()


def test_a_long_log_is_replaced_by_the_state(tmp_path: Path) -> None:
    service, numbers = dispatcher(tmp_path / "log", 3000), dict[int, int]()
    sizes = []
    for round_ in range(300):
        for worker in range(WORKERS):
            said(service, numbers, (worker, m.Gather(1 + round_, None), [torch.zeros(20, dtype=torch.uint8)]))
            sizes.append((tmp_path / "log").stat().st_size)
    assert max(sizes) < 3 * 3000
    service.close()


def test_a_dispatcher_continues_on_a_full_disk_and_a_later_log_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, numbers, is_full = tmp_path / "log", dict[int, int](), [False]
    flush = WriteAheadLog.flush

    def full(log: WriteAheadLog) -> None:
        if is_full[0]:
            raise LogError("the log is full: no space left")
        flush(log)

    monkeypatch.setattr(WriteAheadLog, "flush", full)
    monkeypatch.setattr("stretto.parameter_server.state_log.RETRY_S", -1.0)
    service = dispatcher(path, 10**6)
    order = [torch.zeros(3, dtype=torch.uint8)]
    for worker in range(WORKERS):
        said(service, numbers, (worker, m.BroadcastOrder(1, 0, 1), order))
    is_full[0] = True
    for worker in range(WORKERS):
        said(service, numbers, (worker, m.BeginEpoch(1, None, "first-come"), [torch.ones(4, dtype=torch.int64)]))
    assert not path.exists()
    assert "no space left" in capfd.readouterr().err
    with pytest.raises(LogError, match="lost with the state of the batch dispatcher"):
        dispatcher(path, 10**6, restarted=True)
    path.unlink(missing_ok=True)
    is_full[0] = False
    ((*_, leased, _),) = said(service, numbers, (1, m.Lease(1), []))
    service.close()
    again = dispatcher(path, 10**6, restarted=True)
    ((*_, other, _),) = said(again, numbers, (2, m.Lease(1), []))
    assert (leased.batch, other.batch) == (0, 1), "the log that begins later has all that came before"
    again.close()
