"""A process that is stopped while others wait for it: declared failed after the failure timeout, which is longer than
`--timeout` or shorter, also where the others wait for a server, or in an operation of a library.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from layout_runs import SCRIPT, counts, run

from stretto.events import read_events

STOPPING = SCRIPT.replace("os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 19)")
IN_ROUNDS = "Recipe(what=gradients(), when=together(), whom=server(1), then=step())"


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "victim", "timeout"),
    [
        (("-n", "2", "--recipe", "async_sgd"), ("1", "0"), "5"),
        (("-n", "2", "--recipe", IN_ROUNDS), ("1", "0"), "5"),
        (("-n", "4", "--layout", "pipeline(2)", "--recipe", "async_sgd"), ("1", "1"), "600"),
        (("-n", "4", "--layout", "pipeline(2)", "--recipe", "async_sgd"), ("0", "0"), "5"),
        (("-n", "2", "--layout", "sharded(2)", "--checkpoint-every", "4 rounds"), ("0", "1"), "600"),
        (("-n", "4", "--layout", "sharded(2)", "--recipe", "local_sgd(every=3)"), ("0", "0"), "600"),
        (("-n", "4", "--layout", "sharded(2)", "--recipe", "async_sgd"), ("1", "1"), "600"),
    ],
)
def test_a_stopped_process_costs_its_worker_only_and_no_sample(
    tmp_path: Path, options: tuple[str, ...], victim: tuple[str, str], timeout: str
) -> None:
    limits, saved = ("--failure-timeout", "10s", "--timeout", timeout), ("saved",) * ("--checkpoint-every" in options)
    folder = run(tmp_path, "run", *options, *limits, script=("4", *victim, "7", "before", *saved), text=STOPPING)
    events = list(read_events(folder / "events.jsonl"))
    failed = [event for event in events if event.get("what") == "failed"]
    assert [(str(event["worker"]), str(event.get("rank", 0))) for event in failed] == [victim]
    assert "no heartbeat" in failed[0]["why"]
    assert not any(event["event"] == "error" for event in events)
    assert {(one["once"], one["twice"], one["never"]) for one in counts(folder)} == {(60, 0, 0)}
    assert len(counts(folder)) >= 4
