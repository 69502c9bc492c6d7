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
rank, incarnation = config.rank, config.incarnation
client = MembershipClient(rank, incarnation, config.coordinator, worker_keys(config.keys), config.failure_timeout_s)
step, until, deadline = 0, 0, time.monotonic() + 40

def report(between_steps):
    return ReadyReport(view.generation if view else 0, commits=step, global_step=step, between_steps=between_steps)

view = client.await_generation(ReadyReport(0))
step = max(member.report.global_step for member in view.members)
while not any(member.incarnation for member in view.members) or step < until:
    assert time.monotonic() < deadline
    time.sleep(0.01)
    step += 1
    client.doing("computing", step)
    if (rank, incarnation) in {deaths} and step > 20:
        os.kill(os.getpid(), 9)
    reply = None
    if client.aborted >= view.generation:
        reply = client.await_generation(report(False))
    elif client.pause_requested:
        reply = client.pause_between_steps(report(True))
    if isinstance(reply, GenerationView):
        view = reply
        step = max(member.report.global_step for member in view.members)
        until = step + 10
client.leave()
client.close()
print("ended at", step)
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
