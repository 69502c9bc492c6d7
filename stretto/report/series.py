"""Curves from a log: a quantity against training time, samples and bytes."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.events import Event
from stretto.report.history import History, Point, interpolate, number, split_of

MOST_POINTS = 150


@dataclass(frozen=True)
class Sample:
    """One value, and where the run was when it was taken. Megabytes are those a worker sent, on average."""

    seconds: float
    samples: float
    megabytes: float
    value: float


@dataclass(frozen=True)
class Curve:
    """Samples in order; each stands for the mean of `steps` steps."""

    samples: tuple[Sample, ...]
    steps: int = 1


def metric(history: History, name: str) -> Curve:
    """A metric at each evaluation; of very many, some, the last among them."""
    place = _places(history)
    found = ((event, number((event.get("metrics") or {}).get(name))) for event in history.of("evaluation"))
    samples = [place(event, value) for event, value in found if value is not None]
    return Curve(tuple(samples[:: -_size(samples)][::-1]))


def loss(history: History) -> Curve:
    """The logged loss: the mean over workers at each step, thinned to means over several steps."""
    name = _loss_name(history)
    by_step: dict[int, list[tuple[Event, float]]] = defaultdict(list)
    for event in history.of("log"):
        value = number((event.get("values") or {}).get(name))
        if value is not None:
            by_step[int(event.get("step") or 0)].append((event, value))
    place = _places(history)
    steps = [_over_workers(place, by_step[step]) for step in sorted(by_step)]
    return _thinned(steps)


def _loss_name(history: History) -> str | None:
    names = dict.fromkeys(name for event in history.of("log") for name in (event.get("values") or {}))
    return next(iter(sorted((name for name in names if "loss" in name.lower()), key=len)), None)


def _over_workers(place: Callable[[Event, float], Sample], found: Sequence[tuple[Event, float]]) -> Sample:
    last = max((event for event, _ in found), key=lambda event: event["t"])
    return place(last, statistics.fmean(value for _, value in found))


def _thinned(samples: Sequence[Sample]) -> Curve:
    size = _size(samples)
    chunks = (samples[start : start + size] for start in range(0, len(samples), size))
    return Curve(tuple(_mean(chunk) for chunk in chunks), size)


def _size(samples: Sequence[Sample]) -> int:
    return max(1, math.ceil(len(samples) / MOST_POINTS))


def _mean(chunk: Sequence[Sample]) -> Sample:
    columns = ("seconds", "samples", "megabytes", "value")
    return Sample(*(statistics.fmean(getattr(sample, name) for sample in chunk) for name in columns))


def _places(history: History) -> Callable[[Event, float], Sample]:
    """Where an event with a value belongs on the three axes."""
    clock, sent = _clock(history), _sent(history)

    def place(event: Event, value: float) -> Sample:
        trained = number(event.get("training_s"))
        seconds = clock(event["t"]) if trained is None else trained
        return Sample(seconds, float(event.get("samples") or 0), sent(event["t"]), value)

    return place


def _clock(history: History) -> Callable[[float], float]:
    """From the time of an event to training time, which stands still during evaluations."""
    points = {0.0: 0.0}
    points |= {event["t"]: event["t"] - split_of(event)["evaluating"] for event in history.counts(0)}
    for event in (*history.of("evaluation"), *history.of("epoch")):
        trained = number(event.get("training_s"))
        if trained is not None:
            points[event["t"]] = trained
    return interpolate(sorted(points.items()))


def _sent(history: History) -> Callable[[float], float]:
    """From the time of an event to the megabytes that a worker had sent, mean over workers."""
    lines = [interpolate(_sent_by(history, worker)) for worker in range(history.workers)]
    return lambda t: statistics.fmean(line(t) for line in lines) / 1e6


def _sent_by(history: History, worker: int) -> list[Point]:
    points = {0.0: 0.0}
    points |= {event["t"]: float(event.get("bytes_sent") or 0) for event in history.counts(worker)}
    return sorted(points.items())


def not_finite(history: History) -> int:
    """How many logged or evaluated values were no finite numbers; the log writes those as null."""
    logged = [event.get("values") or {} for event in history.of("log")]
    evaluated = [event.get("metrics") or {} for event in history.of("evaluation")]
    return sum(number(value) is None for values in (*logged, *evaluated) for value in values.values())
