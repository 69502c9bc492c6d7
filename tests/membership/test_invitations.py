"""Numbers of joining workers: each given once, the same ones to a launcher that asks again, also after a restart."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.launcher.coordinator_main import _inviter
from stretto.membership.coordinator import MembershipCoordinator
from stretto.membership.coordinator_records import Started, StartedOnCluster, rules_of
from stretto.membership.invitations import PART_BYTES, AskToJoin, CodePart, GetCode, Invitation, Inviter
from stretto.membership.messages import ReadyReport, Register
from stretto.process_config import CoordinatorConfig
from stretto.run_config import RunConfig

NAME = b"joining " + b"a" * 32
INVITATION = Invitation((), ("10.0.0.1:1",), b"{}", {})


@given(asked=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 5), st.booleans()), max_size=20))
def test_no_number_is_given_twice_and_asking_again_gives_the_same(asked: list[tuple[str, int, bool]]) -> None:
    coordinator = MembershipCoordinator(Started(3, 1.0))
    log, found = list(coordinator.records()), dict[str, tuple[int, ...]]()
    for launcher, count, is_killed in asked:
        numbers = coordinator.give_numbers(launcher, count)
        log += coordinator.records()
        assert found.setdefault(launcher, numbers) == numbers
        if is_killed:
            coordinator = MembershipCoordinator.restored(log, 0.0)
    given = [number for numbers in found.values() for number in numbers]
    assert sorted(given) == list(range(3, 3 + len(given)))


def test_reserved_numbers_are_given_once_and_only_those_that_the_run_begins_with() -> None:
    coordinator = MembershipCoordinator(Started(6, 1.0))
    assert coordinator.give_numbers("a", 2, 2) == (2, 3)
    assert coordinator.give_numbers("by hand", 2) == (6, 7)
    assert coordinator.give_numbers("a", 2, 2) == (2, 3)
    assert coordinator.give_numbers("again", 2, 3) == (8, 9)
    assert coordinator.give_numbers("too many", 3, 4) == (10, 11, 12)
    coordinator = MembershipCoordinator.restored([*coordinator.records()], 0.0)
    assert coordinator.give_numbers("b", 2, 4) == (4, 5)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_run_without_workers_of_its_own_begins_when_enough_have_joined(asynchronous: bool) -> None:
    coordinator = MembershipCoordinator(Started(0, 1.0, min_workers=2, asynchronous=asynchronous))
    coordinator.tick(100.0)
    assert coordinator.give_numbers("a", 1) == (0,)
    joined: set[int] = set()
    for worker, now in ((0, 101.0), (1, 101.5)):
        coordinator.receive(worker, 0, Register("host", 1), now)
        coordinator.receive(worker, 0, ReadyReport(0), now)
        coordinator.tick(now)
        joined |= {worker}
        assert not coordinator.view(0).stopped
        assert coordinator.members.keys() == (joined if asynchronous or len(joined) == 2 else set())
    for worker in joined:
        coordinator.process_exited(worker, 0, 102.0)
    assert "at least 2 are required" in coordinator.view(0).stopped


def test_launcher_that_replaces_a_lost_one_has_its_numbers_and_a_newer_incarnation() -> None:
    coordinator = MembershipCoordinator(Started(3, 1.0))
    assert coordinator.give_numbers("lost", 1, 2) == (2,)
    assert coordinator.workers.next_incarnation([2]) == 0
    coordinator.process_exited(2, 0, 1.0, will_restart=True, why="its actor was lost")
    for incarnation, name in enumerate(("first", "second"), 1):
        assert coordinator.workers.next_incarnation([2]) == incarnation
        assert coordinator.give_numbers(name, 1, 2, replaces=True) == (2,)
        coordinator.receive(2, incarnation, Register("host", 1), 2.0)
    assert coordinator.view(0).incarnations == {2: 2}
    assert coordinator.give_numbers("by hand", 1, 3, replaces=True) == (3,)


def test_invitation_of_a_replacement_holds_the_incarnation() -> None:
    inviter = Inviter(invite, numbers, bytes, lambda given: 10 * given[0])
    replaced = reply(inviter, AskToJoin(1, 4, True), b"agent " + b"a" * 32)
    assert replaced == msgspec.structs.replace(INVITATION, numbers=(4,), incarnation=40)
    assert reply(inviter, AskToJoin(1, 4)) == msgspec.structs.replace(INVITATION, numbers=(4,))


def test_a_copy_of_the_joining_key_gets_neither_a_number_nor_a_key_of_another_worker() -> None:
    """The launcher has workers 0 and 1, one of its agents worker 2; worker 3 is reserved for another agent."""
    options = RunConfig(Path("train.py"), workers=2, hosts="b,c", host="127.0.0.1")
    config = CoordinatorConfig(options=options, listen_fd=0, services=("127.0.0.1:1",), keys=("0" * 64,))
    coordinator = MembershipCoordinator(rules_of(options, asynchronous=False))
    inviter = _inviter(config, coordinator)
    agent = reply(inviter, AskToJoin(1, 2), b"agent " + b"a" * 32)
    assert isinstance(agent, Invitation) and agent.numbers == (2,)
    with pytest.raises(ValueError, match="only an agent of the launcher"):
        inviter.reply(NAME, msgspec.msgpack.encode(AskToJoin(1, 2, True)))
    for place, first in enumerate((0, 1, 2, None)):
        copied = reply(inviter, AskToJoin(1, first), b"joining %032x" % place)
        assert isinstance(copied, Invitation) and copied.numbers == (4 + place,)
        assert copied.keys.keys() == {"relay", f"launcher {4 + place}", f"worker {4 + place}"}


def numbers(launcher: str, count: int, first: int | None, replaces: bool) -> tuple[int, ...]:
    return tuple(range(4, 4 + count))


def invite(numbers: tuple[int, ...]) -> Invitation:
    return msgspec.structs.replace(INVITATION, numbers=numbers)


def reply(inviter: Inviter, request: AskToJoin | GetCode, name: bytes = NAME) -> Invitation | CodePart:
    message, limit = msgspec.msgpack.encode(request), time.monotonic() + 90
    while not (found := inviter.reply(name, message)):  # the code is being packed
        assert found is not None and time.monotonic() < limit
    return msgspec.msgpack.decode(found, type=Invitation | CodePart)


def test_invitation_and_code_arrive_whole() -> None:
    code = bytes(range(256)) * (PART_BYTES // 100)
    inviter = Inviter(invite, numbers, lambda: code)
    invitation = reply(inviter, AskToJoin(2))
    assert invitation == msgspec.structs.replace(INVITATION, numbers=(4, 5))
    received = b""
    while isinstance(part := reply(inviter, GetCode(len(received))), CodePart) and part.part:
        received += part.part
    assert received == code


def test_code_that_cannot_be_packed_is_explained() -> None:
    def refuse() -> bytes:
        raise ValueError("too large")

    assert reply(Inviter(invite, numbers, refuse), GetCode(0)) == CodePart(0, problem="too large")


@pytest.mark.parametrize("request_", [AskToJoin(0), AskToJoin(10**6), b"garbage", ["Other", 1]])
def test_other_requests_are_refused(request_: object) -> None:
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        Inviter(invite, numbers, bytes).reply(NAME, msgspec.msgpack.encode(request_))
    assert Inviter(invite, numbers, bytes).reply(b"worker 1.0", b"") is None


def test_no_reply_waits_for_the_code_to_be_packed() -> None:
    may_end, packed = threading.Event(), []

    def pack() -> bytes:
        assert may_end.wait(90)
        packed.append("once")
        return b"code"

    inviter = Inviter(invite, numbers, pack)
    assert [inviter.reply(NAME, msgspec.msgpack.encode(GetCode(0))) for _ in range(3)] == [b"", b"", b""]
    assert reply(inviter, AskToJoin(1)) == msgspec.structs.replace(INVITATION, numbers=(4,))
    may_end.set()
    assert (reply(inviter, GetCode(0)), packed) == (CodePart(0, b"code"), ["once"])


def test_numbers_that_a_cluster_reserves_are_given_to_its_agents_only() -> None:
    coordinator = MembershipCoordinator(StartedOnCluster(2, 1.0, reserved_numbers=4))
    assert coordinator.give_numbers("by hand", 1) == (4,)
    assert [coordinator.give_numbers(f"agent {first}", 1, first) for first in (3, 0)] == [(3,), (0,)]
    assert coordinator.give_numbers("again", 1, 3) == (5,)
    assert coordinator.give_numbers("its replacement", 1, 3, True) == (3,)
    assert coordinator.workers.may_report(None, 3) and not coordinator.workers.may_report(None, 4)
    coordinator = MembershipCoordinator.restored([*coordinator.records()], 0.0)
    assert coordinator.give_numbers("by hand later", 1) == (6,)


@pytest.mark.parametrize(
    "rules",
    [
        StartedOnCluster(1, 1.0, return_s=60.0, reserved_numbers=1),
        rules_of(RunConfig(Path("train.py"), workers=1, failure_timeout_s=1.0), asynchronous=False),
    ],
)
def test_a_run_waits_longer_for_its_last_worker_than_a_failure_lasts(rules: Started) -> None:
    coordinator = MembershipCoordinator(rules)
    coordinator.receive(0, 0, Register("host", 1), 1.0)
    coordinator.receive(0, 0, ReadyReport(0), 1.0)
    assert coordinator.members == {0: 0}
    coordinator.process_exited(0, 0, 2.0, True, "its node has vanished")
    coordinator.tick(50.0)
    assert not coordinator.view(0).stopped
    coordinator.receive(0, 1, Register("host", 1), 51.0)
    coordinator.receive(0, 1, ReadyReport(0), 51.0)
    assert coordinator.members == {0: 1}
