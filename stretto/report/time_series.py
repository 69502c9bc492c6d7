"""Curves from a log: a quantity against training time, samples and bytes."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.events import Event
from stretto.report import incidents, traffic
from stretto.report import staleness as late
from stretto.report.run_log import History, Point, interpolate, number, split_of
from stretto.report.staleness import Update

MOST_POINTS = 150
Logged = tuple[Event, float]


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
    """The logged loss: the mean over workers at each step, thinned to means over several steps.

    Workers that do not keep step with each other log the same step at different times; of theirs, the mean is taken
    of what was logged one after the other.
    """
    found, place = _logged(history, _loss_name(history)), _places(history)
    together = _by_time(found, history.workers) if history.of("update_applied") else _by_step(found)
    return _thinned([_over_workers(place, some) for some in together])


def _logged(history: History, name: str | None) -> list[Logged]:
    found = ((event, number((event.get("values") or {}).get(name))) for event in history.of("log"))
    return [(event, value) for event, value in found if value is not None]


def _by_step(found: Sequence[Logged]) -> list[Sequence[Logged]]:
    by_step: dict[int, list[Logged]] = defaultdict(list)
    for event, value in found:
        by_step[int(event.get("step") or 0)].append((event, value))
    return [by_step[step] for step in sorted(by_step)]


def _by_time(found: Sequence[Logged], workers: int) -> list[Sequence[Logged]]:
    ordered = sorted(found, key=lambda one: one[0]["t"])
    return [ordered[start : start + workers] for start in range(0, len(ordered), workers)]


def _loss_name(history: History) -> str | None:
    names = dict.fromkeys(name for event in history.of("log") for name in (event.get("values") or {}))
    return next(iter(sorted((name for name in names if "loss" in name.lower()), key=len)), None)


def _over_workers(place: Callable[[Event, float], Sample], found: Sequence[Logged]) -> Sample:
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


UPDATES_A_POINT = 4
FEWEST_POINTS, OF_THE_SLOWEST = 10, 2


def staleness(history: History) -> tuple[Curve, Curve]:
    """The mean and the largest staleness of the updates, over stretches of equal length."""
    place, found = _places(history), _stretches(late.updates(history), history.workers)
    ends = [(some, {"t": statistics.fmean(one.t for one in some)}) for some in found]
    mean = (place(event, statistics.fmean(one.staleness for one in some)) for some, event in ends)
    largest = (place(event, max(one.staleness for one in some)) for some, event in ends)
    return Curve(tuple(mean)), Curve(tuple(largest))


def _stretches(found: Sequence[Update], workers: int) -> list[list[Update]]:
    """So few that each holds updates of the slowest worker too, as far as that leaves enough; empty ones left out."""
    slowest = min(Counter(update.worker for update in found).values(), default=0)
    most = min(MOST_POINTS, max(FEWEST_POINTS, slowest // OF_THE_SLOWEST))
    count = min(most, max(1, len(found) // (UPDATES_A_POINT * workers)))
    whole = found[-1].t if found else 0.0
    stretches: list[list[Update]] = [[] for _ in range(count)]
    for update in found:
        stretches[min(int(update.t / whole * count), count - 1) if whole else 0].append(update)
    return [some for some in stretches if some]


def exchanged(history: History, way: str) -> Curve:
    """Megabytes in one of `accounts.WAYS` until then, looks left out: the mean over workers."""
    return _counted(history, lambda event: float(traffic.total([traffic.accounts(event)], way)))


def on_wire(history: History) -> Curve:
    """Megabytes that had left a worker, by its wire: the mean over workers."""
    return _counted(history, _bytes_sent)


def _bytes_sent(event: Event) -> float:
    return float(event.get("bytes_sent") or 0)


def _counted(history: History, count: Callable[[Event], float]) -> Curve:
    """A running count at the times that worker 0 gave its own, from the first that is above zero."""
    lines = [interpolate(_counted_by(history, worker, count)) for worker in range(history.workers)]
    place, own = _places(history), history.counts(0)
    means = ((event, statistics.fmean(line(event["t"]) for line in lines) / 1e6) for event in own)
    samples = [place(event, value) for event, value in means if value > 0]
    return Curve(tuple(samples[:: -_size(samples)][::-1]))


def _counted_by(history: History, worker: int, count: Callable[[Event], float]) -> list[Point]:
    return sorted(({0.0: 0.0} | {event["t"]: count(event) for event in history.counts(worker)}).items())


def owed(history: History) -> Curve:
    """The norm of what is owed over that of what was given, over all workers, each time that they were measured."""
    measured = [found for worker in range(history.workers) if (found := _measured(history, worker))]
    lines = [[interpolate([(t, both[part]) for t, both in one]) for part in (0, 1)] for one in measured]
    place, times = _places(history), [t for t, _ in measured[0]] if measured else []
    shares = ((t, traffic.residual_share([(given(t), owed(t)) for given, owed in lines])) for t in times)
    samples = [place({"t": t}, share) for t, share in shares if share is not None]
    return Curve(tuple(samples[:: -_size(samples)][::-1]))


def _measured(history: History, worker: int) -> list[tuple[float, tuple[float, float]]]:
    """The norms of one worker where they are new: events repeat them until they are measured again."""
    found: list[tuple[float, tuple[float, float]]] = []
    for event in history.counts(worker):
        both = traffic.measured(event)
        if both is not None and (not found or found[-1][1] != both):
            found.append((event["t"], both))
    return found


@dataclass(frozen=True)
class Moment:
    """When somebody was lost, or came: in seconds of training."""

    seconds: float
    who: str
    lost: bool


def moments(history: History) -> tuple[Moment, ...]:
    """When somebody was gone or stopped, and when somebody came back."""
    clock = _clock(history)
    return tuple(Moment(clock(max(t, 0.0)), who, lost) for t, who, lost in incidents.moments(history))


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
    lines = [interpolate(_counted_by(history, worker, _bytes_sent)) for worker in range(history.workers)]
    return lambda t: statistics.fmean(line(t) for line in lines) / 1e6


def not_finite(history: History) -> int:
    """How many logged or evaluated values were no finite numbers; the log writes those as null."""
    logged = [event.get("values") or {} for event in history.of("log")]
    evaluated = [event.get("metrics") or {} for event in history.of("evaluation")]
    return sum(number(value) is None for values in (*logged, *evaluated) for value in values.values())
