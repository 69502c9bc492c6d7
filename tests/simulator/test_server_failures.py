"""Killed and paused servers in the simulator, handled by the live handlers, channels and snapshots."""

from __future__ import annotations

import random
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from combinations import thinned
from example_counts import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simulator.failures import ALSO_THROUGH, FREE, NET, THROUGH, faults, is_whole, lived, told, training
from simulator.harness import simulated

from stretto.parameter_server.client import ParameterServerClient
from stretto.report import incidents
from stretto.report.run_log import read
from stretto.simulator.cluster import rpc_server

RECIPES = [*FREE, "stale_synchronous(bound=1, shards=2)", THROUGH, *ALSO_THROUGH]
SHARDS = {one: 2 if "shards=2" in one else 1 for one in RECIPES}


def hidden(ended: Any) -> bytes:
    """Return the log without the injected faults."""
    lines = ended.log.splitlines(keepends=True)
    return b"".join(one for one in lines if b'"fault_injected"' not in one and b'"worker":-' not in one)


# --- at any time --------------------------------------------------------------------------------------------------


EVERY = [*FREE, THROUGH, *ALSO_THROUGH]


@pytest.mark.parametrize("recipe", EVERY)
def test_every_sample_counts_once_whenever_a_server_is_killed(recipe: str) -> None:
    """Faults in all phases, from before the first request to a server until after the last worker has ended."""
    length = lived(recipe, "kill worker 1 at 1h").seconds
    for number in thinned(range(8), 3, first=EVERY.index(recipe)):
        moment, victim = number * length / 7, number % SHARDS[recipe]
        ended = lived(recipe, f"kill server {victim} at {moment:.6f}s, back after 15ms")
        is_whole(ended, recipe)
        assert None not in ended.found


GIVEN_AGAIN = """kill server 0 at 0s, back after 0.0546875s; kill server 0 at 0.0703125s, back after 0.0625s;
    kill worker 0 at 0.09375s, back after 0.03125s"""
"""Worker 0 fails after it sent the parameters; worker 1 sends them again, to a server that missed the failure."""
MEETS_ALONE = """kill worker 0 at 0.048221s, back after 0.043881s; kill worker 1 at 0.012764s, back after 0.044639s;
    pause worker 2 for 0.026168s at 0.025267s"""
"""Worker 0 fails in a barrier that worker 2 has not reached, while worker 1 is restarted."""
NOBODY_HAS_ASKED = "kill worker 1 at 0s, back after 0.029285s; kill worker 0 at 0s"
"""All fail before the first request to a server, and one is restarted."""
WITHIN_A_BACKWARD = "kill server 0 at 0.0735s, back after 20ms"
"""Worker 0 receives a broadcast within a backward pass, worker 1 outside of one; the reply is lost."""


@settings(max_examples=examples(100))
@given(
    st.sampled_from(sorted(SHARDS)).flatmap(lambda recipe: st.tuples(st.just(recipe), faults(SHARDS[recipe]))),
    st.booleans(),
)
@example(("async_sgd(shards=2)", (3, GIVEN_AGAIN)), False)
@example(("stale_synchronous(bound=1, shards=2)", (3, MEETS_ALONE)), True)
@example(("stale_synchronous(bound=1)", (2, NOBODY_HAS_ASKED)), False)
@example((THROUGH, (2, WITHIN_A_BACKWARD)), False)
def test_every_sample_counts_once_when_workers_fail_too(drawn: tuple[str, tuple[int, str]], often: bool) -> None:
    recipe, (workers, fault) = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rpc_server, "SNAPSHOT_INTERVAL_S", 0.03 if often else 10)
        is_whole(lived(recipe, fault, workers, epochs=3), recipe, 3)


def test_same_seed_gives_the_same_failures_to_the_byte() -> None:
    fault = "kill server every 60ms, back after 20ms; pause server 1 for 30ms at 50ms; kill worker 1 at 70ms"
    recipe = "async_sgd(shards=2)"
    logs = {lived(recipe, fault, 4, order=order).log for order in (None, None, [3, 1, 0, 2])}
    assert len(logs) == 1
    assert logs != {lived(recipe, fault, 4, seed=1).log}


@pytest.mark.parametrize("recipe", [*FREE, THROUGH])
def test_worker_killed_before_the_recipe_is_known_is_not_waited_for(recipe: str) -> None:
    work = training(epochs=3, recipe=recipe)
    ended = simulated(2, work, None, net=NET, fault=NOBODY_HAS_ASKED)
    is_whole(ended, recipe, 3)
    assert told(ended, "failed") == [(0, 0), (1, 0)]


# --- examples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "recipe"), list(enumerate(["async_sgd", "async_sgd(shards=2)"])))
def test_all_roll_back_to_the_snapshot_once(number: int, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with several requests when a server fails receives several refusals."""
    backs: Counter[tuple[int, int]] = Counter()
    recover = ParameterServerClient.roll_back

    def counted(wire: ParameterServerClient) -> None:
        backs[wire.number, wire.recovery_epoch] += 1
        recover(wire)

    monkeypatch.setattr(ParameterServerClient, "roll_back", counted)
    for at in thinned(range(60, 220, 8), 3, first=number):
        backs.clear()
        is_whole(lived(recipe, f"kill server 0 at {at}ms, back after 20ms", 4, 3), recipe, 3)
        assert {age for _, age in backs} <= {0}, f"killed at {at} ms"
        assert set(backs.values()) <= {1}


def test_rollback_is_not_nested_when_servers_fail_again(monkeypatch: pytest.MonkeyPatch) -> None:
    depth, most, draw = Counter[int](), 0, random.Random(0)
    recover = ParameterServerClient.roll_back

    def counted(wire: ParameterServerClient) -> None:
        nonlocal most
        depth[wire.number] += 1
        most = max(most, depth[wire.number])
        recover(wire)
        depth[wire.number] -= 1

    monkeypatch.setattr(ParameterServerClient, "roll_back", counted)
    moments = accumulate((draw.uniform(60, 400) for _ in range(60)), initial=60.0)
    fault = "; ".join(f"kill server 0 at {at:.3f}ms, back after 10ms" for at in moments)
    ended = simulated(2, training(1), "async_sgd", net="1Gbit/s 30ms", fault=fault)
    is_whole(ended, "async_sgd", 1)
    assert most == 1


def test_work_since_the_snapshot_is_redone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first epoch ends at a snapshot, so a later failure costs work since then; frequent snapshots cost less."""

    def steps(every_s: float) -> int:
        monkeypatch.setattr(rpc_server, "SNAPSHOT_INTERVAL_S", every_s)
        ended = lived("async_sgd", "kill server 0 at 150ms, back after 20ms", samples=400)
        assert ended.of("epoch")[-1]["sample_counts"]["once"] == 400
        return sum(int(one["step"]) for one in ended.of("end"))

    assert steps(10) > steps(0.03) >= 2 * 400 / 4


def test_log_and_report_show_the_rollback(tmp_path: Path) -> None:
    ended = lived("async_sgd(shards=2)", "kill server 1 at 95ms, back after 30ms", folder=tmp_path)
    assert [
        (one["process"], one["what"], one["incarnation"], one["t"])
        for one in ended.of("membership")
        if one["process"] == "server 1"
    ] == [
        ("server 1", "failed", 0, 0.095),
        ("server 1", "joined", 1, 0.125),
    ]
    assert [(one["process"], one["verb"]) for one in ended.of("fault_injected")] == [("server 1", "kill")]
    assert any("server 1" in line for line in incidents.in_lines(read(tmp_path / "run")))


def test_repeatedly_killed_server_restarts_each_time() -> None:
    ended = lived("async_sgd", "kill server 0 every 100ms, back after 5ms", epochs=6)
    assert len([one for one in told(ended, "joined") if one[0] == "server 0"]) >= 2
    is_whole(ended, "async_sgd", 6)


def test_killed_server_restarts_without_back_after() -> None:
    ended = lived("async_sgd", "kill server 0 at 95ms")
    ours = [(one["what"], one["t"]) for one in ended.of("membership") if one["process"] == "server 0"]
    assert ours == [("failed", 0.095), ("joined", 0.295)]
    is_whole(ended, "async_sgd")


def test_messages_to_a_paused_server_wait() -> None:
    plain = simulated(2, training(), "async_sgd", net=NET)
    paused = simulated(2, training(), "async_sgd", net=NET, fault="pause server 0 for 1s at 60ms")
    assert paused.seconds == pytest.approx(plain.seconds + 1, abs=0.02)
    is_whole(paused, "async_sgd")
    early = simulated(2, training(), "async_sgd", net=NET, fault="pause server 0 for 1s at 0s")
    assert early.seconds == pytest.approx(plain.seconds + 1, abs=0.02)


def test_server_killed_while_paused_does_not_resume() -> None:
    fault = "pause server 0 for 1h at 60ms; kill server 0 at 80ms, back after 20ms"
    ended = lived("async_sgd", fault)
    assert ended.seconds < 1
    is_whole(ended, "async_sgd")


def test_restarted_server_learns_the_members() -> None:
    """The server missed the generation that was formed while it was down, and must learn it from the workers."""
    fault = "kill server 0 at 60ms, back after 80ms; kill worker 2 at 70ms"
    is_whole(lived(THROUGH, fault), THROUGH)


def test_late_messages_have_no_effect() -> None:
    plain = lived("async_sgd", "kill worker 1 at 1h")
    late = lived("async_sgd", "kill worker 1 at 1h; kill server 0 at 10s")
    assert hidden(late) == hidden(plain)


def test_server_drawn_before_the_recipe_is_known_is_remapped() -> None:
    """The script names the recipe; of two simultaneous faults of the only server one takes effect."""
    work = training(recipe="async_sgd")
    for seed in range(4):
        fault = "pause server for 10ms at 60ms; pause server for 30ms at 61ms"
        ended = simulated(2, work, net=NET, fault=fault, seed=seed)
        assert {one["process"] for one in ended.of("fault_injected")} == {"server 0"}
        is_whole(ended, "async_sgd")
