"""Faults: parsing, error marks, and schedules that are sorted, repeatable and consistent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

import numpy as np
import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import LaunchError
from stretto.faults.plan import (
    At,
    Every,
    Fault,
    FaultEvent,
    Kill,
    Partition,
    Pause,
    Slow,
    Target,
    check,
    parse,
    schedule,
)

WORKERS, SHARDS = 5, 2
Played = list[tuple[float, FaultEvent]]

span = st.floats(0.01, 1e9)
when = st.one_of(st.builds(At, st.floats(0, 1e9)), st.builds(Every, span))
worker = st.builds(Target, st.just("worker"), st.none() | st.integers(0, WORKERS - 1))
server = st.builds(Target, st.just("server"), st.none() | st.integers(0, SHARDS - 1))
anybody = st.one_of(worker, server, st.just(Target("coordinator")))
some = st.sets(st.integers(0, WORKERS - 1), min_size=1, max_size=WORKERS - 1).map(lambda one: tuple(sorted(one)))


def any_faults(
    when: st.SearchStrategy[At | Every], span: st.SearchStrategy[float]
) -> st.SearchStrategy[Sequence[Fault]]:
    one = st.one_of(
        st.builds(Kill, anybody, when, st.none() | span),
        st.builds(Pause, anybody, when, span),
        st.builds(Partition, some, when, span),
        st.builds(Slow, worker | server, when, span, st.floats(1, 1e9)),
    )
    return st.lists(one, min_size=1, max_size=5)


crowded = st.integers(0, 8).map(float)
faults = any_faults(when, span)
close = any_faults(st.builds(At, crowded) | st.builds(Every, crowded.filter(bool)), crowded.filter(bool))
"""Few whole-numbered times, so that faults coincide and overlap."""


def play(faults: Sequence[Fault], seed: int = 0, until: float = 60.0) -> Played:
    """Return the schedule up to a time, with the ends of all faults that have begun by then."""
    return list(takewhile(lambda one: one[0] <= until, schedule(faults, WORKERS, SHARDS, seed)))


@given(faults)
def test_text_round_trips(faults: Sequence[Fault]) -> None:
    assert parse("; ".join(map(str, faults))) == tuple(faults)
    check(faults, WORKERS, SHARDS)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("kill worker 3 at 10s", Kill(Target("worker", 3), At(10))),
        ("kill worker 3 at 10s, back after 5s", Kill(Target("worker", 3), At(10), 5)),
        ("KILL  Worker 3 \n at 10S ,back after 5s", Kill(Target("worker", 3), At(10), 5)),
        ("kill worker every 20s", Kill(Target("worker"), Every(20))),
        ("kill worker every 20s, back after 500ms", Kill(Target("worker"), Every(20), 0.5)),
        ("kill server at 1h", Kill(Target("server"), At(3600))),
        ("kill server 1 at 0s", Kill(Target("server", 1), At(0))),
        ("kill coordinator at 2m", Kill(Target("coordinator"), At(120))),
        ("pause worker 2 for 5s at 30s", Pause(Target("worker", 2), At(30), 5)),
        ("pause worker for 5s every 60s", Pause(Target("worker"), Every(60), 5)),
        ("cut workers 0-3 for 10s at 20s", Partition((0, 1, 2, 3), At(20), 10)),
        ("cut worker 7,0,2,5-7 for 10s at 20s", Partition((0, 2, 5, 6, 7), At(20), 10)),
        ("slow link of worker 1 by 10 for 20s at 5s", Slow(Target("worker", 1), At(5), 20, 10)),
        ("slow link of server by 4.5 for 10s at 5s", Slow(Target("server"), At(5), 10, 4.5)),
    ],
)
def test_valid_texts_are_parsed(text: str, meant: Fault) -> None:
    assert parse(text) == (meant,)
    assert parse(f"{text};{text}") == (meant, meant)


def test_fault_of_several_targets_is_one_fault_each() -> None:
    each = [Kill(Target("worker", one), At(10)) for one in (0, 1, 2, 7)]
    assert parse("kill workers 0-2,7 at 10s") == tuple(each)


@pytest.mark.parametrize(
    ("text", "wrong", "expected"),
    [
        ("kil worker 3 at 10s", "kil", "kill or pause or cut or slow"),
        ("kill 3 at 10s", "3", "worker or server or coordinator"),
        ("kill worker three at 10s", "three", "at or every"),
        ("kill worker -3 at 10s", "-3", "at or every"),
        ("kill worker 3x at 10s", "3x", "numbers"),
        ("kill worker ² at 10s", "²", "numbers"),
        ("kill worker 1234567 at 10s", "1234567", "numbers"),
        ("kill worker 3 in 10s", "in", "at or every"),
        ("kill worker 3 at 10", "10", "a time"),
        ("kill worker 3 at -1s", "-1s", "a time"),
        ("kill worker every 0s", "0s", "at least 0.001ms"),
        ("kill worker 3 at 10s, bak after 5s", "bak", "back"),
        ("kill worker 3 at 10s, back in 5s", "in", "after"),
        ("kill worker 3 at 10s back after 5s", "back", "`;` or the end"),
        ("kill worker 3 at 10s, back after 0s", "0s", "at least 0.001ms"),
        ("kill coordinator 1 at 10s", "1", "at or every"),
        ("kill worker 3 at 10s; pause worker 2 at 30s", "at", "for"),
        ("pause worker 2 for 0s at 30s", "0s", "at least 0.001ms"),
        ("cut server for 5s at 30s", "server", "workers or worker"),
        ("cut workers for 5s at 30s", "for", "numbers"),
        ("cut workers 3-1 for 5s at 30s", "3-1", "numbers"),
        ("cut workers 1,,2 for 5s at 30s", ",", "numbers"),
        ("slow worker 1 by 10 for 20s at 5s", "worker", "link"),
        ("slow link of coordinator by 10 for 20s at 5s", "coordinator", "worker or server"),
        ("slow link of worker 1 by 0.5 for 20s at 5s", "0.5", "at least 1"),
        ("slow link of worker 1 by x for 20s at 5s", "x", "at least 1"),
        (";kill worker 3 at 10s", ";", "kill or pause or cut or slow"),
    ],
)
def test_invalid_text_is_refused_with_its_place_marked(text: str, wrong: str, expected: str) -> None:
    with pytest.raises(LaunchError) as raised:
        parse(text)
    shown, marks, rest = str(raised.value).split("\n")[1:4]
    assert shown == f"  got: {text}"
    assert shown[len("  got: ") :].find(wrong) >= 0
    assert shown[marks.index("^") : marks.rindex("^") + 1] == wrong
    assert expected in rest
    example = str(raised.value).rpartition("try: --faults ")[2]
    assert parse(example.strip('"')), "what is proposed can be typed"


@pytest.mark.parametrize("text", ["", "kill", "kill worker 3 at", "kill worker 3 at 10s;", "kill worker 3 at 10s,"])
def test_missing_part_is_marked(text: str) -> None:
    with pytest.raises(LaunchError, match="missing at the end") as raised:
        parse(text)
    assert str(raised.value).split("\n")[2] == " " * len(f"  got: {text}") + "^"


@pytest.mark.parametrize(
    ("text", "shards", "says"),
    [
        ("kill worker 5 at 1s", 2, "there is no worker 5 of 5"),
        ("kill worker 1 at 1s; pause worker 9 for 1s at 1s", 2, "got: pause worker 9 for 1s at 1s"),
        ("cut workers 3-6 for 1s at 1s", 2, "there is no worker 5 of 5"),
        ("kill server at 1s", 0, "there is no parameter server"),
        ("slow link of server by 2 for 1s at 1s", 0, "there is no parameter server"),
        ("kill server 2 at 1s", 2, "there is no server 2 of 2"),
        ("cut workers 0-4 for 1s at 1s", 2, "all 5 workers"),
    ],
)
def test_faults_without_a_target_are_refused(text: str, shards: int, says: str) -> None:
    with pytest.raises(LaunchError) as raised:
        check(parse(text), WORKERS, shards)
    assert says in str(raised.value)


def test_coordinator_faults_need_no_server() -> None:
    check(parse("kill coordinator at 1s; kill worker 4 at 1s"), WORKERS, 0)


def told(text: str, seed: int = 0, until: float = 60.0) -> list[tuple[float, str, tuple[int, ...]]]:
    return [(time, one.verb, one.numbers) for time, one in play(parse(text), seed, until)]


def test_each_fault_has_a_begin_and_an_end() -> None:
    assert told("kill worker 3 at 10s, back after 5s; cut workers 0,2 for 10s at 8s") == [
        (8, "cut", (0, 2)),
        (10, "kill", (3,)),
        (15, "back", (3,)),
        (18, "heal", (0, 2)),
    ]
    assert play(parse("slow link of server 1 by 4 for 5s at 1s; kill coordinator at 2s")) == [
        (1, FaultEvent("slow", "server", (1,), 4)),
        (2, FaultEvent("kill", "coordinator", (0,))),
        (6, FaultEvent("restore", "server", (1,), 4)),
    ]


def test_ends_precede_begins_at_the_same_time() -> None:
    verbs = [verb for _, verb, _ in told("kill worker 3 at 15s; kill worker 3 at 10s, back after 5s")]
    assert verbs == ["kill", "back", "kill"]


def test_failed_process_gets_no_fault() -> None:
    assert told("kill worker 3 at 1s; kill worker 3 at 2s, back after 1s; pause worker 3 for 1s at 3s") == [
        (1, "kill", (3,))
    ]


def test_paused_process_is_not_paused_again() -> None:
    assert told("pause worker 2 for 5s at 1s; pause worker 2 for 5s at 3s") == [(1, "pause", (2,)), (6, "resume", (2,))]
    twice = parse("pause worker for 1h every 1s")
    assert sorted(one.numbers[0] for _, one in islice(schedule(twice, WORKERS, 0, 0), WORKERS)) == list(range(WORKERS))


def test_pause_ends_when_its_process_is_killed() -> None:
    """The first pause would end at 11 s, within the second, which is of a new process."""
    text = "pause worker 2 for 10s at 1s; kill worker 2 at 2s, back after 1s; pause worker 2 for 10s at 4s"
    assert told(text) == [
        (1, "pause", (2,)),
        (2, "kill", (2,)),
        (3, "back", (2,)),
        (4, "pause", (2,)),
        (14, "resume", (2,)),
    ]


def test_pause_lasts_its_duration_or_until_the_process_ends() -> None:
    text = "pause worker 0 for 10s every 3s; kill worker 0 every 8s, back after 100ms"
    began, whole = 0.0, 0
    for time, verb, _ in told(text, until=2000):
        began = time if verb == "pause" else began
        if verb == "resume":
            assert time == began + 10
            whole += 1
    assert whole > 20


def lived(played: Iterable[tuple[float, FaultEvent]]) -> None:
    """Replay the schedule: no fault strikes a failed process, and no fault ends that has not begun."""
    gone, paused, links = set[object](), set[object](), Counter[object]()
    for _, one in played:
        process = one.kind, one.numbers
        if one.verb in ("kill", "pause"):
            assert process not in gone
        if one.verb == "kill":
            paused.discard(process)
            if one.kind == "worker" or one.back_after_s is not None:
                gone.add(process)  # servers and the coordinator are restarted by the supervisor
        elif one.verb == "back":
            gone.remove(process)
        elif one.verb == "pause":
            assert process not in paused
            paused.add(process)
        elif one.verb == "resume":
            paused.remove(process)
        else:
            link = one.kind, one.numbers, one.factor, one.verb in ("slow", "restore")
            links[link] += 1 if one.verb in ("cut", "slow") else -1
            assert links[link] >= 0


@settings(max_examples=examples(200))
@given(close, st.integers(0, 2**70))
def test_schedule_is_ordered_and_consistent(faults: Sequence[Fault], seed: int) -> None:
    played = list(islice(schedule(faults, WORKERS, SHARDS, seed), 300))
    assert [time for time, _ in played] == sorted(time for time, _ in played)
    assert played == list(islice(schedule(faults, WORKERS, SHARDS, seed), 300))
    lived(played)


@given(any_faults(st.builds(At, crowded), crowded.filter(bool)), st.integers(0, 9))
def test_each_begun_fault_ends(faults: Sequence[Fault], seed: int) -> None:
    """If all faults occur once, only processes killed for good remain affected."""
    verbs = Counter(one.verb for _, one in schedule(faults, WORKERS, SHARDS, seed))
    assert verbs["cut"] == verbs["heal"] == sum(isinstance(one, Partition) for one in faults)
    assert verbs["slow"] == verbs["restore"]
    for_good = sum(isinstance(one, Kill) and one.back_after_s is None for one in faults)
    assert verbs["back"] <= verbs["kill"] <= verbs["back"] + for_good
    assert verbs["pause"] - verbs["kill"] <= verbs["resume"] <= verbs["pause"]


@given(close, close, st.integers(0, 9))
def test_more_faults_do_not_change_the_times_of_the_first(
    first: Sequence[Fault], more: Sequence[Fault], seed: int
) -> None:
    """For faults without kills and pauses, so that no target can be absent."""
    links = [one for one in first if isinstance(one, Partition | Slow)]
    added = [one for one in more if isinstance(one, Partition | Slow)]
    alone, both = play(links, seed), play([*links, *added], seed)
    assert not Counter(alone) - Counter(both)


def test_second_killing_fault_changes_only_failed_targets() -> None:
    text = "slow link of worker by 2 for 1s every 2s"
    alone = [one for one in told(text, until=600) if one[1] == "slow"]
    both = [one for one in told(f"{text}; kill worker 3 at 0s", until=600) if one[1] == "slow"]
    assert [time for time, _, _ in alone] == [time for time, _, _ in both]
    for (_, _, before), (_, _, after) in zip(alone, both, strict=True):
        assert after == before if before != (3,) else after != (3,)


def test_times_between_failures_are_exponential_and_victims_uniform() -> None:
    plan = schedule(parse("kill worker every 20s, back after 0.001ms"), WORKERS, 0, seed=1)
    kills = [(time, one.numbers[0]) for time, one in islice(plan, 20_000) if one.verb == "kill"]
    gaps = np.diff([0.0] + [time for time, _ in kills])
    assert gaps.mean() == pytest.approx(20, rel=0.05)
    assert gaps.std() == pytest.approx(20, rel=0.05)
    assert np.median(gaps) == pytest.approx(20 * np.log(2), rel=0.05)
    counts = np.bincount([victim for _, victim in kills], minlength=WORKERS)
    assert counts == pytest.approx(np.full(WORKERS, len(kills) / WORKERS), rel=0.1)


def test_schedule_depends_on_the_seed() -> None:
    text = "kill worker every 20s, back after 5s"
    assert len({tuple(told(text, seed, until=600)) for seed in range(20)}) == 20
    once = {told("kill server at 1s", seed)[0][2] for seed in range(20)}
    assert once == {(0,), (1,)}


@pytest.mark.parametrize("verb", ["kill worker", "pause worker for 1s", "slow link of worker by 2 for 1s"])
def test_faults_end_without_processes(verb: str) -> None:
    """Otherwise the schedule would search for a target endlessly."""
    played = list(schedule(parse(f"kill worker every 20s; {verb} every 5s"), WORKERS, 0, seed=0))
    assert sum(one.verb == "kill" for _, one in played) == WORKERS
    lived(played)


def test_faults_continue_after_a_restart() -> None:
    plan = schedule(parse("kill worker every 1s, back after 30s"), 2, 0, seed=0)
    assert len(list(islice(plan, 1000))) == 1000
