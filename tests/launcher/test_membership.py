"""The launcher, the coordinator and the workers' membership clients together, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from run_place import Place

from stretto.events import read_events

WORKER = """
import os, pathlib, time
from stretto.membership.messages import GenerationView, ReadyReport
from stretto.security import worker_keys
from stretto.membership.client import MembershipClient
rank, incarnation = config.worker, config.incarnation
keys, limit_s = worker_keys(config.keys), config.options.failure_timeout_s
client = MembershipClient(rank, incarnation, config.coordinator, keys, limit_s)
step, until, deadline = 0, 0, time.monotonic() + 120

def report(between_steps):
    return ReadyReport(view.generation if view else 0, commits=step, global_step=step, between_steps=between_steps)

def is_formed_without_it():
    log = pathlib.Path(config.run, "events.jsonl")
    return '"members":[0,2]' in log.read_text()
while incarnation and not is_formed_without_it():  # a busy machine may restart a worker before the others continue
    assert time.monotonic() < deadline
    time.sleep(0.01)
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


def membership_events(folder: Path) -> list[tuple[Any, ...]]:
    """Return the membership events in order."""
    events = list(read_events(folder / "events.jsonl"))
    told = [event for event in events if event["event"] == "membership"]
    return [
        (one["what"], one["members"]) if one["what"] == "formed" else (one["what"], one["worker"], one["incarnation"])
        for one in told
    ]


def test_killed_worker_is_replaced_while_the_others_continue(place: Place) -> None:
    place.recovers = True
    script = place.script(WORKER.replace("{deaths}", "[(1, 0)]"))
    process = place.stretto("run", "-n", "3", "--out", "here", "--failure-timeout", "20s", script)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err.decode()
    told = membership_events(Path("here"))
    whole, left = ("formed", [0, 1, 2]), ("formed", [0, 2])
    wanted = [whole, ("failed", 1, 0), left, ("joined", 1, 1), whole]
    assert [one for one in told if one in wanted] == wanted
    assert b"worker 1 failed (killed by SIGKILL)" in err
    assert b"worker 1, at " in out and b"2 workers continued after" in out and b"restarted after" in out
