"""Properties of barriers as the coordinator keeps them, without sockets."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from stretto.errors import TransportError
from stretto.membership.barrier_client import StoreBarrier
from stretto.membership.barriers import EVERYBODY, NOBODY, Arrive, Awaited, Barriers, FirstValues, Missing, Position
from stretto.membership.coordinator import MembershipCoordinator
from stretto.membership.coordinator_records import Started
from stretto.membership.messages import Heartbeat, Leave, ReadyReport, Register


class Known:
    """Attendees that a test sets."""

    def __init__(self, awaited: Mapping[int, Awaited]) -> None:
        self.now = dict(awaited)

    def awaited(self, in_training: bool, now: float) -> Mapping[int, Awaited]:
        return self.now


def at(place: int, index: int = 1, label: str = "barrier", section: int = 1) -> Position:
    return Position(section, place, label, index)


def missing(
    barriers: Barriers, worker: int, position: Position, of: int = EVERYBODY, incarnation: int = 0
) -> list[int]:
    return barriers.receive(worker, incarnation, Arrive(position, of), 0.0).workers


def test_a_barrier_opens_when_all_workers_have_arrived_in_any_order() -> None:
    barriers = Barriers(Known({one: Awaited(0, 4) for one in range(3)}), FirstValues())
    assert missing(barriers, 2, at(4)) == [0, 1]
    assert missing(barriers, 0, at(4)) == [1]
    assert missing(barriers, 0, at(4)) == [1]
    assert missing(barriers, 1, at(4)) == []
    assert missing(barriers, 2, at(4)) == missing(barriers, 0, at(4)) == []
    assert missing(barriers, 0, at(4, 2)) == [1, 2], "the next call is another barrier"


def test_calls_that_some_workers_leave_out_do_not_shift_the_others() -> None:
    """`if is_main(): save(...)` is a call of worker 0 only."""
    barriers = Barriers(Known({one: Awaited(0, 4) for one in range(2)}), FirstValues())
    missing(barriers, 0, at(4, label="save only.pt"), NOBODY)
    assert missing(barriers, 1, at(4)) == [0]
    assert missing(barriers, 1, at(4, label="save all.pt"), of=0) == [0]


def test_a_worker_that_has_begun_a_further_exchange_is_past() -> None:
    known = Known({0: Awaited(0, 4), 1: Awaited(0, 4)})
    barriers = Barriers(known, FirstValues())
    assert missing(barriers, 1, at(4)) == [0]
    known.now[0] = Awaited(0, 5)
    assert missing(barriers, 1, at(4)) == []


def test_a_failed_worker_is_not_waited_for_and_its_next_incarnation_arrives_again() -> None:
    known = Known({0: Awaited(0, 9), 1: Awaited(0, 9)})
    barriers = Barriers(known, FirstValues())
    assert missing(barriers, 0, at(9), NOBODY) == []
    del known.now[0]
    assert missing(barriers, 1, at(9, 2)) == []
    known.now = {0: Awaited(1, 3), 1: Awaited(1, 3)}  # all workers restarted from a checkpoint
    assert missing(barriers, 1, at(3), incarnation=1) == [0], "what an earlier life has passed does not count"
    assert missing(barriers, 0, at(3), incarnation=0) == []
    assert missing(barriers, 1, at(3), incarnation=1) == [0], "nor what it still says"


def test_first_of_the_others_acts_once_for_a_worker_that_failed_before_it_had_acted() -> None:
    known = Known({one: Awaited(0, 4) for one in range(4)})
    barriers, save = Barriers(known, FirstValues()), at(4, label="save best.pt")
    assert missing(barriers, 1, save, of=0) == missing(barriers, 3, save, of=0) == [0]
    del known.now[0]
    assert missing(barriers, 3, save, of=0) == [1], "worker 1 acts, and has not yet"
    assert missing(barriers, 1, save, of=0) == [1]
    missing(barriers, 1, save, NOBODY)
    known.now[1] = Awaited(0, 5)
    assert missing(barriers, 3, save, of=0) == missing(barriers, 2, save, of=0) == []


def test_nobody_acts_for_a_worker_that_has_acted_or_is_past_the_call() -> None:
    known = Known({one: Awaited(0, 4) for one in range(2)})
    barriers, save = Barriers(known, FirstValues()), at(4, label="save best.pt")
    missing(barriers, 0, save, NOBODY)
    del known.now[0]
    assert missing(barriers, 1, save, of=0) == []
    known.now[0] = Awaited(0, 5)
    assert missing(barriers, 1, at(4, label="save other.pt"), of=0) == []


def test_restarted_worker_that_has_passed_a_position_has_not_acted_there() -> None:
    known = Known({0: Awaited(1, 9), 1: Awaited(0, 4)})
    barriers = Barriers(known, FirstValues())
    assert missing(barriers, 1, at(4, label="save best.pt"), of=0) == [1]
    missing(barriers, 0, at(9, label="save best.pt"), NOBODY, incarnation=1)
    known.now[1] = Awaited(0, 9)
    assert missing(barriers, 1, at(9, label="save best.pt"), of=0) == []


@pytest.mark.parametrize("returns", [True, False])
def test_before_training_a_restarted_worker_is_waited_for_and_a_lost_one_is_not(returns: bool) -> None:
    coordinator = MembershipCoordinator(Started(2, 10.0))
    barriers = Barriers(coordinator.workers, coordinator)
    first = at(0, label="main_first", section=0)
    assert missing(barriers, 1, first, of=0) == [0]
    coordinator.process_exited(0, 0, 1.0, will_restart=returns)
    assert missing(barriers, 1, first, of=0) == ([0] if returns else [])
    missing(barriers, 0, first, NOBODY, incarnation=1)
    assert missing(barriers, 1, first, of=0) == []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_restarted_worker_neither_blocks_the_others_nor_is_blocked(asynchronous: bool) -> None:
    coordinator = MembershipCoordinator(Started(2, 10.0, asynchronous=asynchronous))
    barriers = Barriers(coordinator.workers, coordinator)
    for worker in (0, 1):
        for said in (Register("here", 1), ReadyReport(0), Heartbeat(1, "computing", 0.0, 1, 5)):
            coordinator.receive(worker, 0, said, 1.0)
    assert missing(barriers, 0, at(5)) == [1]
    coordinator.process_exited(1, 0, 2.0, will_restart=True)
    assert missing(barriers, 0, at(5)) == []
    early = at(0, section=0)
    assert missing(barriers, 1, early, incarnation=1) == [], "the other workers train"
    coordinator.receive(1, 1, Register("here", 2), 2.5)
    coordinator.receive(1, 1, Heartbeat(0, "starting", 0.0, 0), 2.5)
    coordinator.receive(1, 1, ReadyReport(0), 2.6)
    assert missing(barriers, 0, at(5, 2)) == [], "it is no member yet"


def test_a_paused_or_finished_worker_is_not_waited_for() -> None:
    coordinator = MembershipCoordinator(Started(3, 10.0))
    barriers = Barriers(coordinator.workers, coordinator)
    for worker in range(3):
        coordinator.receive(worker, 0, Register("here", 1), 1.0)
        coordinator.receive(worker, 0, ReadyReport(0), 1.0)
    for worker in range(3):
        coordinator.receive(worker, 0, Heartbeat(1, "computing", 0.0, 7, 5), 1.0)
    coordinator.save(1.0)
    coordinator.receive(1, 0, ReadyReport(1, 5, 7, between_steps=True), 1.1)
    assert missing(barriers, 0, at(5)) == [2]
    coordinator.receive(2, 0, Leave(), 1.2)
    assert missing(barriers, 0, at(5)) == []
    for finished in (1, 2):
        assert missing(barriers, 0, at(5, label="save best.pt"), of=finished) == [], "nor does another act for it"


def test_first_value_of_a_position_is_that_of_all_workers_also_after_a_restart_of_the_coordinator() -> None:
    coordinator = MembershipCoordinator(Started(3, 10.0))
    barriers, here = Barriers(coordinator.workers, coordinator), at(0, label="broadcast", section=0)
    assert missing(barriers, 1, here, of=0) == [0]
    assert barriers.receive(0, 0, Arrive(here, NOBODY, b"first"), 0.0).value == b"first"
    assert barriers.receive(1, 0, Arrive(here, 0), 0.0) == Missing([], b"first")
    again = MembershipCoordinator.restored(coordinator.records(), 1.0)
    restored = Barriers(again.workers, again)
    assert restored.receive(0, 1, Arrive(here, NOBODY, b"second"), 1.0).value == b"first", "of a restarted main worker"
    assert restored.receive(2, 0, Arrive(here, 0), 1.0) == Missing([], b"first")
    later = at(0, 2, label="broadcast", section=0)
    assert restored.receive(1, 0, Arrive(later, 0), 1.0).value is None
    assert again.records() == [], "a value is recorded once"


def test_value_of_a_worker_is_read_from_a_store() -> None:
    store = dist.HashStore()
    ends = [StoreBarrier(worker, 3, lambda: store, 30.0) for worker in range(3)]
    here = at(0, label="broadcast", section=0)
    with ThreadPoolExecutor(3) as pool:
        given = [pool.submit(end.give, here, 1, b"\x00of %d\xff" % worker, list) for worker, end in enumerate(ends)]
        assert [one.result() for one in given] == [b"\x00of 1\xff"] * 3
    ends[0] = StoreBarrier(0, 3, lambda: store, 0.1)
    with pytest.raises(TransportError, match="waited 0.1 s at a barrier"):
        ends[0].give(at(0, 2, label="broadcast", section=0), 1, b"", list)
