"""The coordinator's log and messages of workers of one rank, written out, so that an older log stays readable."""

from __future__ import annotations

from typing import Any

import msgspec

from stretto.membership.coordinator import MembershipCoordinator, Outgoing
from stretto.membership.coordinator_records import Started
from stretto.membership.messages import GenerationView, Leave, Quit, ReadyReport, Register

FAILURE_TIMEOUT_S = 10.0


def member(worker: int, incarnation: int, *report: Any) -> list[Any]:
    return [worker, incarnation, ["ReadyReport", *report, None]]


FIRST = ["GenerationView", 1, [member(worker, 0, 0, 0, 0, False, "here:1", 0) for worker in range(3)], [], "", False]
FAILED = "worker 2 failed (killed by SIGKILL)"
SECOND = ["GenerationView", 2, [member(0, 0, 1, 4, 2, False, "", 2), member(1, 0, 1, 5, 2, False, "", 2)], [2], FAILED]
THIRD = [member(0, 0, 2, 7, 6, True, "", 0), member(1, 0, 2, 7, 6, True, "", 0), member(2, 1, 0, 0, 0, False, "", 0)]
FOURTH = [member(0, 0, 3, 9, 8, True, "", 0), member(2, 1, 3, 9, 8, True, "", 0)]
LOG: list[Any] = [
    ["Started", 3, 10.0, 2, 3, False, None],
    ["Formed", FIRST, []],
    ["Ended", 2, 0, "gone", "killed by SIGKILL", True],
    ["Formed", [*SECOND, False], []],
    ["ContinuedTo", 6],
    ["Formed", ["GenerationView", 3, THIRD, [], "worker 2 joined", False], []],
    ["Formed", ["GenerationView", 4, FOURTH, [1], "worker 1 leaves gracefully", False], [1]],
    ["Ended", 0, 0, "left", "it has left the loop", False],
    ["Ended", 2, 1, "gone", "killed by SIGTERM", False],
    ["Stopped", "0 workers cannot continue, at least 2 are required", False],
]
"""Records of the scenario, as any version has written them."""
NOTICES = [
    f"{FAILED}; continuing with 2 workers, worker 2 is restarted",
    "worker 1 has left, since it was asked to end; continuing with 2 workers",
    "worker 2 failed (killed by SIGTERM)",
]
CHANGES = [
    *[("joined", f"worker {worker}") for worker in range(3)],
    ("formed", "coordinator"),
    ("failed", "worker 2"),
    ("formed", "coordinator"),
    ("joined", "worker 2"),
    ("formed", "coordinator"),
    ("left", "worker 1"),
    ("formed", "coordinator"),
    ("left", "worker 0"),
    ("failed", "worker 2"),
]


def plain(value: object) -> Any:
    """Return a message or record as the nested lists that are encoded, without an element more or less."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def scenario(log: list[bytes], posts: list[Outgoing]) -> MembershipCoordinator:
    """Run three workers: one fails and joins again, one quits, one finishes, and one fails for good."""
    coordinator = MembershipCoordinator(Started(3, FAILURE_TIMEOUT_S, 2, max_workers=3))

    def follow(sent: list[Outgoing]) -> None:
        log.extend(coordinator.records())
        posts.extend(sent)

    for worker in range(3):
        follow(coordinator.receive(worker, 0, Register("here", 1), 0.0))
        follow(coordinator.receive(worker, 0, ReadyReport(0, address="here:1"), 0.0))
    follow(coordinator.process_exited(2, 0, 1.0, will_restart=True, why="killed by SIGKILL"))
    for worker in range(2):
        follow(coordinator.receive(worker, 0, ReadyReport(1, 4 + worker, 2, rounds=2), 1.0))
    follow(coordinator.receive(2, 1, ReadyReport(0), 2.0))
    follow(coordinator.receive(0, 0, ReadyReport(2, 6, 5, True), 2.0))
    follow(coordinator.receive(1, 0, ReadyReport(2, 7, 6, True), 2.0))
    follow(coordinator.receive(0, 0, ReadyReport(2, 7, 6, True), 2.0))
    follow(coordinator.receive(1, 0, Quit(), 3.0))
    for worker, incarnation in ((0, 0), (1, 0), (2, 1)):
        follow(coordinator.receive(worker, incarnation, ReadyReport(3, 9, 8, True), 3.0))
    follow(coordinator.receive(0, 0, Leave(), 4.0))
    follow(coordinator.process_exited(2, 1, 5.0, why="killed by SIGTERM"))
    return coordinator


def test_workers_of_one_rank_are_logged_and_answered_as_by_any_version() -> None:
    log: list[bytes] = []
    posts: list[Outgoing] = []
    coordinator = scenario(log, posts)
    without_checkpoints = [*LOG[0], False]  # the rule of the checkpoint before the last workers leave is newer
    assert log == [msgspec.msgpack.encode(record) for record in (without_checkpoints, *LOG[1:])]
    assert coordinator.announcements.notices == NOTICES
    assert [(event["what"], event["process"]) for event in coordinator.announcements.events] == CHANGES
    assert not [event for event in coordinator.announcements.events if "rank" in event]
    views = [plain(post.message) for post in posts if isinstance(post.message, GenerationView)]
    logged = [plain(record[1]) for record in LOG if record[0] == "Formed"]
    assert [logged.index(view) for view in views] == [0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 3]


def test_coordinator_continues_from_the_written_out_log() -> None:
    records = [msgspec.msgpack.encode(record) for record in LOG]
    coordinator = MembershipCoordinator.restored(records[:4], 5.0)
    assert (coordinator.generation, coordinator.members) == (2, {0: 0, 1: 0})
    assert coordinator.failures.is_recovered(2, 0)
    assert MembershipCoordinator.restored(records, 5.0).phase == "stopped"
