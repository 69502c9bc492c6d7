"""What died in a run, and what happened: who was gone and when, who went on, who came back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.events import Event
from stretto.report import formatting
from stretto.report.run_log import History, called

MOST_LINES = 5


@dataclass(frozen=True)
class Fate:
    """What has happened to a process: when, what, what came next, and how many samples were done again for it.

    `back_s` is how long it was away; None for one that has not come back. `ends` says whether it was gone by this.
    """

    t: float
    worker: int
    life: int
    what: str
    next: str
    ends: bool = False
    back_s: float | None = None
    again: int | None = None

    def __str__(self) -> str:
        """In one line."""
        when = f"at {formatting.seconds(self.t)}" if self.t >= 0 else f"{formatting.seconds(-self.t)} before it began"
        return f"{called(self.worker)}, {when}: {self.what}" + f"; {self.next}" * bool(self.next)


def fates(history: History) -> list[Fate]:
    """All that has happened to processes, in order of time."""
    strikes = [event for event in history.of("fault_injected") if event.get("verb") in ("kill", "pause")]
    kills = [one for one in strikes if one["verb"] == "kill"]
    found = [_told(event, history, kills) for event in history.of("membership") if _tells(event)]
    found += [_paused(one, history) for one in strikes if one["verb"] == "pause"]
    return sorted(found, key=lambda fate: fate.t)


SAID = {"failed": "failed", "left": "left in good order", "slow": "slow"}
DONE = "it has left the loop"
"""Why a worker has left that has come to the end of its script."""


def _tells(event: Event) -> bool:
    return event.get("what") in SAID and event.get("why") != DONE


def _told(event: Event, history: History, kills: Sequence[Event]) -> Fate:
    """What the coordinator or the launcher has told of a process."""
    what, why = str(event["what"]), str(event.get("why") or "")
    ends = what == "failed"
    details = [why] * bool(why) + ["on purpose"] * (ends and _was_struck(event, history, kills))
    said = SAID[what] + f" ({', '.join(details)})" * bool(details)
    back_s = _back_s(event, history) if ends else None
    back = f"back after {formatting.seconds(back_s)}" if back_s is not None else "did not come back"
    texts = (_others(event, history) if what != "slow" else "", back if ends else "")
    came = ", ".join(text for text in texts if text)
    again = _again(event, history) if ends else None
    return Fate(event["t"], event["worker"], _life(event), said, came, ends, back_s, again)


def _was_struck(event: Event, history: History, kills: Sequence[Event]) -> bool:
    """Whether a kill on purpose was the last thing to happen to a process before it was gone."""
    before = [one["t"] for one in _of(event["worker"], history) if one["t"] < event["t"] and one is not event]
    return any(one["worker"] == event["worker"] and max(before, default=0.0) <= one["t"] <= event["t"] for one in kills)


def _of(worker: int, history: History) -> Iterator[Event]:
    return (one for one in history.of("membership") if one["worker"] == worker and "what" in one)


def _back_s(event: Event, history: History) -> float | None:
    """How long it was until another life of the same process was in."""
    joins = (one["t"] for one in _of(event["worker"], history) if one["what"] == "joined" and _life(one) > _life(event))
    return next((t - event["t"] for t in joins if t >= event["t"]), None)


def _life(event: Event) -> int:
    return int(event.get("incarnation") or 0)


def _others(event: Event, history: History) -> str:
    """Who went on without it, and how soon."""
    if event["worker"] < 0:
        return ""
    formed = [one for one in history.of("membership") if one.get("what") == "formed" and one["t"] >= event["t"]]
    if not formed:
        return ""
    count, generation = len(formed[0].get("members") or []), formed[0].get("generation")
    after = formatting.seconds(formed[0]["t"] - event["t"])
    went = "began" if generation == 1 else "went on"
    return f"{formatting.plural(count, 'worker')} {went} after {after} as generation {generation}" if count else ""


def _again(event: Event, history: History) -> int | None:
    """Samples that others did again because of it, where the log says so."""
    of = event["worker"], _life(event)
    told = [
        one.get("samples") for one in history.of("samples_reassigned") if (one.get("failed_worker"), _life(one)) == of
    ]
    return sum(int(one or 0) for one in told) if told else None


def _paused(event: Event, history: History) -> Fate:
    """A process that was stopped on purpose, and when it went on."""
    later = (one for one in history.of("fault_injected") if one["worker"] == event["worker"] and one["t"] > event["t"])
    end = next((one for one in later if one.get("verb") in ("go_on", "kill")), None)
    after = formatting.seconds(end["t"] - event["t"]) if end else ""
    next_ = "" if end is None else f"{'went on' if end['verb'] == 'go_on' else 'was killed'} after {after}"
    return Fate(event["t"], event["worker"], 0, "stopped (on purpose)", next_)


def deaths(history: History) -> list[dict[str, Any]]:
    """Who was gone, for a record."""
    return [
        {
            "process": called(one.worker),
            "incarnation": one.life,
            "seconds": one.t,
            "what": one.what,
            "downtime_seconds": one.back_s,
            "samples_redone": one.again,
        }
        for one in fates(history)
        if one.ends
    ]


def in_lines(history: History) -> list[str]:
    """What has happened to processes in a few lines, none where nothing did."""
    found = fates(history)
    more = len(found) - MOST_LINES
    return [*map(str, found[:MOST_LINES]), *([f"and {more} more; all are on the page"] if more > 0 else [])]


def moments(history: History) -> list[tuple[float, str, bool]]:
    """When somebody was gone or stopped (True), and when a generation was formed or somebody is back; with who."""
    lost = [(one.t, called(one.worker), True) for one in fates(history) if one.ends or one.what.startswith("stopped")]
    came = [
        (event["t"], f"{called(event['worker'])} is in", False)
        for event in history.of("membership")
        if event.get("what") == "joined" and _life(event)
    ]
    return sorted([*lost, *came])
