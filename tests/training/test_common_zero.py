"""The zero of the clock that all workers share: the moment at which the last one is ready to train."""

from __future__ import annotations

import threading

import pytest
from thread_pool import thread_pool

from stretto.runtime import event_writer
from stretto.transport.in_memory import wires

READY = {0: 100.0, 1: 160.0}
"""Readings of the clock of the first machine when the workers are ready."""


@pytest.mark.parametrize("ahead", [None, 0.0, 5000.0])
@pytest.mark.parametrize("first", [0, 1])
def test_time_before_the_last_worker_is_ready_is_not_that_of_training(
    first: int, ahead: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one machine, or on two whose clocks are apart by `ahead`."""
    here, apart = threading.local(), {first: 0.0, 1 - first: ahead or 0.0}
    monkeypatch.setattr(event_writer, "boot_id", lambda: b"a" if ahead is None else bytes([here.worker]))

    def zero(worker: int) -> float:
        here.worker = worker
        readings = iter([READY[worker != first]])
        return event_writer.common_zero(transports[worker], lambda: apart[worker] + next(readings, READY[1]))

    transports = wires(2)
    with thread_pool(2) as threads:
        assert [*threads.map(zero, range(2))] == [apart[worker] + READY[1] for worker in range(2)]
