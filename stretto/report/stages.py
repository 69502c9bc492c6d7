"""Stages of a pipeline in a run's log: measured passes beside the predicted ones, and memory of the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean
from typing import Any

from stretto.events import Event, process_name
from stretto.report.run_log import History, number


@dataclass(frozen=True)
class Rank:
    """One rank of a worker: seconds of a pass, those of its waits in it, and bytes by what they hold."""

    name: str
    rank: int
    pass_s: float | None
    waiting_s: float | None
    memory: dict[str, int]

    @property
    def computing_s(self) -> float | None:
        """Seconds of a pass without waits."""
        return None if self.pass_s is None or self.waiting_s is None else self.pass_s - self.waiting_s


def ranks(history: History) -> list[Rank]:
    """Return the ranks that have written figures of their own, in order."""
    pairs = zip(history.processes, history.last_counts_by_process(), strict=True)
    return [_rank(place, event) for place, event in pairs if event.get("memory")]


def _rank(place: tuple[int, int], event: Event) -> Rank:
    stage = event.get("stage") or {}
    passes, seconds, waiting = (number(stage.get(name)) for name in ("passes", "seconds", "waiting"))
    memory = {str(name): int(number(value) or 0) for name, value in event["memory"].items()}
    if not passes or seconds is None or waiting is None:
        return Rank(process_name(*place), place[1], None, None, memory)
    return Rank(process_name(*place), place[1], seconds / passes, waiting / passes, memory)


def prediction(history: History) -> Event | None:
    """Return the event with the predicted pass; None where no split was measured."""
    return next(iter(history.of("stages")), None)


def predicted_computing(history: History, rank: int) -> float | None:
    """Return the predicted seconds for which a stage computes in a pass."""
    return _of_rank(history, "computing", rank)


def activations(history: History, rank: int) -> float | None:
    """Return the bytes that a stage keeps for its backward pass, as measured with the first batch."""
    return _of_rank(history, "activations", rank)


def _of_rank(history: History, field: str, rank: int) -> float | None:
    values = (prediction(history) or {}).get(field) or []
    return number(values[rank]) if rank < len(values) else None


def summary(history: History) -> dict[str, Any] | None:
    """Return the passes of a run in a few figures; None for a run without stages.

    `pass_s` and `predicted_s` are the seconds of a forward and a backward pass, `waiting` and `predicted_waiting` the
    shares of them for which a stage waits on average, the bubble; `balance` is the mean of the stages' computing over
    the slowest one's.
    """
    found = [one for one in ranks(history) if one.pass_s and one.computing_s is not None]
    if not found:
        return None
    pass_s, computing = mean(one.pass_s or 0.0 for one in found), [one.computing_s or 0.0 for one in found]
    event = prediction(history) or {}
    predicted_s, expected = number(event.get("predicted_s")), event.get("computing") or []
    known = predicted_s and expected and all(number(one) is not None for one in expected)
    return {
        "pass_s": pass_s,
        "predicted_s": predicted_s,
        "waiting": mean((one.waiting_s or 0.0) / (one.pass_s or 1.0) for one in found),
        "predicted_waiting": 1 - mean(expected) / predicted_s if predicted_s and known else None,
        "balance": mean(computing) / max(computing) if max(computing) > 0 else None,
        "predicted_balance": number(event.get("balance")),
    }
