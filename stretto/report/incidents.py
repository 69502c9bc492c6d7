"""Incidents of a run: processes that failed, left, were slow or were paused, and how the run recovered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.events import Event
from stretto.report import formatting
from stretto.report.run_log import History

MOST_LINES = 5


@dataclass(frozen=True)
class Incident:
    """Incident of a process at `t` seconds: its description, its consequence, and the number of samples redone.

    `ends` is True if the process failed. `downtime_s` is the time until its next incarnation joined; None for a process
    that was not restarted.
    """

    t: float
    process: str
    incarnation: int
    description: str
    consequence: str
    ends: bool = False
    downtime_s: float | None = None
    samples_redone: int | None = None

    def __str__(self) -> str:
        seconds = formatting.seconds(abs(self.t))
        time_text = f"at {seconds}" if self.t >= 0 else f"{seconds} before training started"
        return f"{self.process}, {time_text}: {self.description}" + f"; {self.consequence}" * bool(self.consequence)


def incidents(history: History) -> list[Incident]:
    """Return all incidents of a run, in order of time."""
    faults = [event for event in history.of("fault_injected") if event.get("verb") in ("kill", "pause")]
    kills = [fault for fault in faults if fault["verb"] == "kill"]
    result = [_membership_incident(event, history, kills) for event in history.of("membership") if _is_incident(event)]
    result += [_pause_incident(fault, history) for fault in faults if fault["verb"] == "pause"]
    return sorted(result, key=lambda incident: incident.t)


DESCRIPTIONS = {"failed": "failed", "left": "left gracefully", "slow": "slow"}
DONE = "it has left the loop"
"""Reason that the membership event of a worker gives when its training loop has ended."""


def _is_incident(event: Event) -> bool:
    return event.get("what") in DESCRIPTIONS and event.get("why") != DONE


def _membership_incident(event: Event, history: History, kills: Sequence[Event]) -> Incident:
    """Return the incident that the coordinator or the launcher has recorded."""
    change, reason = str(event["what"]), str(event.get("why") or "")
    ends = change == "failed"
    rank = [f"rank {event['rank']}"] if ends and "rank" in event else []
    details = rank + [reason] * bool(reason) + ["injected"] * (ends and _is_injected(event, history, kills))
    description = DESCRIPTIONS[change] + f" ({', '.join(details)})" * bool(details)
    downtime_s = _downtime_s(event, history) if ends else None
    absent = "did not rejoin" if "worker" in event else "not restarted"
    restart = f"restarted after {formatting.seconds(downtime_s)}" if downtime_s is not None else absent
    consequence = _consequence(event, history, restart if ends else "") if change != "slow" else ""
    redone = _samples_redone(event, history) if ends else None
    return Incident(
        event["t"], event["process"], _incarnation(event), description, consequence, ends, downtime_s, redone
    )


def _is_injected(event: Event, history: History, kills: Sequence[Event]) -> bool:
    """Return True if an injected kill was the last event of a process before it failed."""
    process, t = event["process"], event["t"]
    earlier = [past["t"] for past in _membership_of(process, history) if past["t"] < t and past is not event]
    return any(kill["process"] == process and max(earlier, default=0.0) <= kill["t"] <= t for kill in kills)


def _membership_of(process: str, history: History) -> Iterator[Event]:
    return (event for event in history.of("membership") if event["process"] == process and "what" in event)


def _downtime_s(event: Event, history: History) -> float | None:
    """Return the seconds until a later incarnation of the process joined, or None if none did."""
    later = (
        later_event
        for later_event in _membership_of(event["process"], history)
        if _incarnation(later_event) > _incarnation(event)
    )
    joins = (later_event["t"] for later_event in later if later_event["what"] == "joined")
    return next((t - event["t"] for t in joins if t >= event["t"]), None)


def _incarnation(event: Event) -> int:
    return int(event.get("incarnation") or 0)


def _consequence(event: Event, history: History, restart: str) -> str:
    """Return how many workers continued after an incident, and after how long, and the `restart` of its own worker."""
    if "worker" not in event:
        return restart
    formations = (
        formation
        for formation in history.of("membership")
        if formation.get("what") == "formed" and formation["t"] >= event["t"]
    )
    formed = next(formations, {})
    members, generation = formed.get("members") or [], formed.get("generation")
    if not members:
        return restart
    delay = formatting.seconds(formed["t"] - event["t"])
    who = f"{formatting.plural(len(members), 'worker')} {'started' if generation == 1 else 'continued'}"
    if restart and event["worker"] in members:
        return f"{restart}, then {who} as generation {generation}"
    return f"{who} after {delay} as generation {generation}" + f", {restart}" * bool(restart)


def _samples_redone(event: Event, history: History) -> int | None:
    """Return the number of samples of a failed worker that were reassigned, or None if the log has no record of it."""
    failed = event.get("worker"), _incarnation(event)
    reassigned = history.of("samples_reassigned")
    counts = [
        reassignment.get("samples")
        for reassignment in reassigned
        if (reassignment.get("failed_worker"), _incarnation(reassignment)) == failed
    ]
    return sum(int(count or 0) for count in counts) if counts else None


def _pause_incident(event: Event, history: History) -> Incident:
    """Return the incident of an injected pause, with its end."""
    faults = (fault for fault in history.of("fault_injected") if fault["process"] == event["process"])
    end = next((fault for fault in faults if fault["t"] > event["t"] and fault.get("verb") in ("resume", "kill")), None)
    delay = formatting.seconds(end["t"] - event["t"]) if end else ""
    consequence = "" if end is None else f"{'continued' if end['verb'] == 'resume' else 'killed'} after {delay}"
    return Incident(event["t"], event["process"], 0, "paused (injected)", consequence)


def failures(history: History) -> list[dict[str, Any]]:
    """Return the failures of processes as a run record has them."""
    return [
        {
            "process": incident.process,
            "incarnation": incident.incarnation,
            "seconds": incident.t,
            "description": incident.description,
            "downtime_seconds": incident.downtime_s,
            "samples_redone": incident.samples_redone,
        }
        for incident in incidents(history)
        if incident.ends
    ]


def in_lines(history: History) -> list[str]:
    """Return the first incidents, one per line, and the number of further ones; empty for a run without any."""
    all_incidents = incidents(history)
    further = len(all_incidents) - MOST_LINES
    return [
        *map(str, all_incidents[:MOST_LINES]),
        *([f"and {further} more; the page lists all"] if further > 0 else []),
    ]


def moments(history: History) -> list[tuple[float, str, bool]]:
    """Return (seconds, text, True) of each failure or pause, and (seconds, text, False) of each restarted process."""
    interrupting = [
        incident for incident in incidents(history) if incident.ends or incident.description.startswith("paused")
    ]
    interruptions = [(incident.t, incident.process, True) for incident in interrupting]
    restarted = [
        (event["t"], f"{event['process']} joined", False)
        for event in history.of("membership")
        if event.get("what") == "joined" and _incarnation(event)
    ]
    return sorted([*interruptions, *restarted])
