"""The launcher, the coordinator and workers' companions together, with nothing but membership between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from scene import Place

from stretto.events import read_events

WORKER = """
import os, time
from stretto.membership.messages import GenerationView, ReadyReport
from stretto.security import worker_keys
from stretto.membership.client import MembershipClient
rank, life = config.rank, config.incarnation
companion = MembershipClient(rank, life, config.coordinator, worker_keys(config.keys), config.failure_timeout_s)
hand, until, deadline = 0, 0, time.monotonic() + 40

def here(at_rest):
    return ReadyReport(form.generation if form else 0, commits=hand, hand=hand, at_rest=at_rest)

form = companion.stand(ReadyReport(0))
hand = max(one.here.hand for one in form.members)
while not any(one.life for one in form.members) or hand < until:
    assert time.monotonic() < deadline
    time.sleep(0.01)
    hand += 1
    companion.doing("computing", hand)
    if (rank, life) in {deaths} and hand > 20:
        os.kill(os.getpid(), 9)
    answer = None
    if companion.aborted >= form.generation:
        answer = companion.stand(here(False))
    elif companion.held:
        answer = companion.at_rest(here(True))
    if isinstance(answer, GenerationView):
        form = answer
        hand = max(one.here.hand for one in form.members)
        until = hand + 10
companion.leave()
companion.close()
print("ended at", hand)
"""


def members(folder: Path) -> list[tuple[Any, ...]]:
    """What became of the members, in order."""
    events = list(read_events(folder / "events.jsonl"))
    told = [event for event in events if event["event"] == "membership"]
    return [
        (one["what"], one["members"]) if one["what"] == "formed" else (one["what"], one["worker"], one["incarnation"])
        for one in told
    ]


def test_who_is_killed_is_replaced_while_the_others_go_on(place: Place) -> None:
    place.recovers = True
    script = place.script(WORKER.replace("{deaths}", "[(1, 0)]"))
    process = place.stretto("run", "-n", "3", "--out", "here", "--failure-timeout", "20s", script)
    out, err = process.communicate(timeout=80)
    assert process.returncode == 0, err.decode()
    told = members(Path("here"))
    whole, left = ("formed", [0, 1, 2]), ("formed", [0, 2])
    wanted = [whole, ("failed", 1, 0), left, ("joined", 1, 1), whole]
    assert [one for one in told if one in wanted] == wanted
    assert b"worker 1 failed (killed by SIGKILL)" in err
    assert b"worker 1, at " in out and b"2 workers continued after" in out and b"restarted after" in out


test_who_is_killed_is_replaced_while_the_others_go_on.limit_s = 90  # type: ignore[attr-defined]
