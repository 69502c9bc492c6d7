"""Curves of a run: quantities against training time, samples and bytes."""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.events import Event
from stretto.report import incidents, traffic
from stretto.report import staleness as staleness_of_updates
from stretto.report.run_log import History, Point, interpolate, number, split_of
from stretto.report.staleness import Update

MOST_POINTS = 150
Logged = tuple[Event, float]


@dataclass(frozen=True)
class Sample:
    """Value of a quantity, and the progress of the run at that moment; `megabytes` were sent per worker on average."""

    seconds: float
    samples: float
    megabytes: float
    value: float


@dataclass(frozen=True)
class Curve:
    """Samples in order; each is the mean over `steps` steps."""

    samples: tuple[Sample, ...]
    steps: int = 1


def metric(history: History, name: str) -> Curve:
    """Return a metric at each evaluation; of many, at most MOST_POINTS, including the last."""
    locate = _locator(history)
    values = ((event, number((event.get("metrics") or {}).get(name))) for event in history.of("evaluation"))
    samples = [locate(event, value) for event, value in values if value is not None]
    return Curve(tuple(samples[:: -_size(samples)][::-1]))


def loss(history: History) -> Curve:
    """Return the logged loss: the mean over workers at each step, and over several steps if there are many.

    Asynchronous workers log the same step at different times: their mean is over consecutive values, one per worker on
    average.
    """
    logged, locate = _logged(history, _loss_name(history)), _locator(history)
    batches = _by_time(logged, history.workers) if history.of("update_applied") else _by_step(logged)
    return _thinned([_over_workers(locate, batch) for batch in batches])


def _logged(history: History, name: str | None) -> list[Logged]:
    values = ((event, number((event.get("values") or {}).get(name))) for event in history.of("log"))
    return [(event, value) for event, value in values if value is not None]


def _by_step(logged: Sequence[Logged]) -> list[Sequence[Logged]]:
    by_step: dict[int, list[Logged]] = defaultdict(list)
    for event, value in logged:
        by_step[int(event.get("step") or 0)].append((event, value))
    return [by_step[step] for step in sorted(by_step)]


def _by_time(logged: Sequence[Logged], workers: int) -> list[Sequence[Logged]]:
    ordered = sorted(logged, key=lambda pair: pair[0]["t"])
    return [ordered[start : start + workers] for start in range(0, len(ordered), workers)]


def _loss_name(history: History) -> str | None:
    names = dict.fromkeys(name for event in history.of("log") for name in (event.get("values") or {}))
    return next(iter(sorted((name for name in names if "loss" in name.lower()), key=len)), None)


def _over_workers(locate: Callable[[Event, float], Sample], logged: Sequence[Logged]) -> Sample:
    last = max((event for event, _ in logged), key=lambda event: event["t"])
    return locate(last, statistics.fmean(value for _, value in logged))


def _thinned(samples: Sequence[Sample]) -> Curve:
    size = _size(samples)
    chunks = (samples[start : start + size] for start in range(0, len(samples), size))
    return Curve(tuple(_mean(chunk) for chunk in chunks), size)


def _size(samples: Sequence[Sample]) -> int:
    return max(1, math.ceil(len(samples) / MOST_POINTS))


def _mean(chunk: Sequence[Sample]) -> Sample:
    columns = ("seconds", "samples", "megabytes", "value")
    return Sample(*(statistics.fmean(getattr(sample, name) for sample in chunk) for name in columns))


UPDATES_PER_POINT = 4
FEWEST_POINTS, UPDATES_OF_THE_SLOWEST = 10, 2


def staleness(history: History) -> tuple[Curve, Curve]:
    """Return the mean and the largest staleness of updates, over intervals of equal length."""
    locate, intervals = _locator(history), _intervals(staleness_of_updates.updates(history), history.workers)
    centres = [(updates, {"t": statistics.fmean(update.t for update in updates)}) for updates in intervals]
    mean = (locate(event, statistics.fmean(update.staleness for update in updates)) for updates, event in centres)
    largest = (locate(event, max(update.staleness for update in updates)) for updates, event in centres)
    return Curve(tuple(mean)), Curve(tuple(largest))


def _intervals(updates: Sequence[Update], workers: int) -> list[list[Update]]:
    """Return updates by interval, without empty intervals.

    The intervals are long enough to hold updates of the slowest worker, unless fewer than FEWEST_POINTS would be left.
    """
    slowest = min(Counter(update.worker for update in updates).values(), default=0)
    max_points = min(MOST_POINTS, max(FEWEST_POINTS, slowest // UPDATES_OF_THE_SLOWEST))
    count = min(max_points, max(1, len(updates) // (UPDATES_PER_POINT * workers)))
    duration = updates[-1].t if updates else 0.0
    intervals: list[list[Update]] = [[] for _ in range(count)]
    for update in updates:
        intervals[min(int(update.t / duration * count), count - 1) if duration else 0].append(update)
    return [interval for interval in intervals if interval]


def traffic_curve(history: History, direction: str) -> Curve:
    """Return the megabytes so far in one of `traffic.DIRECTIONS`, without evaluation syncs: the mean over workers."""
    return _counted(history, lambda event: float(traffic.total([traffic.accounts(event)], direction)))


def on_wire(history: History) -> Curve:
    """Return the megabytes so far that the transport has sent: the mean over workers."""
    return _counted(history, _bytes_sent)


def _bytes_sent(event: Event) -> float:
    return float(event.get("bytes_sent") or 0)


def _counted(history: History, count: Callable[[Event], float]) -> Curve:
    """Return a total at the times of worker 0's progress events, from the first above zero: the mean over workers."""
    lines = [interpolate(_counted_by(history, place, count)) for place in history.processes]
    locate, events = _locator(history), history.counts(0)
    means = ((event, math.fsum(line(event["t"]) for line in lines) / history.workers / 1e6) for event in events)
    samples = [locate(event, value) for event, value in means if value > 0]
    return Curve(tuple(samples[:: -_size(samples)][::-1]))


def _counted_by(history: History, place: tuple[int, int], count: Callable[[Event], float]) -> list[Point]:
    return sorted(({0.0: 0.0} | {event["t"]: count(event) for event in history.counts(*place)}).items())


def residual(history: History) -> Curve:
    """Return the norm of all residuals over that of all inputs of codecs, at the measurements of the first worker."""
    measured = [norms for place in history.processes if (norms := _norms(history, place))]
    lines = [[interpolate([(t, norms[index]) for t, norms in of_worker]) for index in (0, 1)] for of_worker in measured]
    locate, times = _locator(history), [t for t, _ in measured[0]] if measured else []
    shares = (
        (t, traffic.residual_share([(input_norm(t), residual_norm(t)) for input_norm, residual_norm in lines]))
        for t in times
    )
    samples = [locate({"t": t}, share) for t, share in shares if share is not None]
    return Curve(tuple(samples[:: -_size(samples)][::-1]))


def _norms(history: History, place: tuple[int, int]) -> list[tuple[float, tuple[float, float]]]:
    """Return the norms of one process at each measurement; events repeat them until the next one."""
    measured: list[tuple[float, tuple[float, float]]] = []
    for event in history.counts(*place):
        norms = traffic.norms(event)
        if norms is not None and (not measured or measured[-1][1] != norms):
            measured.append((event["t"], norms))
    return measured


@dataclass(frozen=True)
class Moment:
    """Training time in seconds at which a process failed or was paused (`lost`), or a restarted process joined."""

    seconds: float
    text: str
    lost: bool


def moments(history: History) -> tuple[Moment, ...]:
    """Return the moments of failures, pauses and restarts."""
    clock = _clock(history)
    return tuple(Moment(clock(max(t, 0.0)), text, is_failure) for t, text, is_failure in incidents.moments(history))


def _locator(history: History) -> Callable[[Event, float], Sample]:
    """Return a function from an event and a value to a sample with the progress of the run at the event."""
    clock, sent = _clock(history), _sent(history)

    def locate(event: Event, value: float) -> Sample:
        trained = number(event.get("training_s"))
        seconds = clock(event["t"]) if trained is None else trained
        return Sample(seconds, float(event.get("samples") or 0), sent(event["t"]), value)

    return locate


def _clock(history: History) -> Callable[[float], float]:
    """Return the function from the time of an event to training time, which does not advance during evaluations."""
    points = {0.0: 0.0}
    points |= {event["t"]: event["t"] - split_of(event)["evaluating"] for event in history.counts(0)}
    for event in (*history.of("evaluation"), *history.of("epoch")):
        trained = number(event.get("training_s"))
        if trained is not None:
            points[event["t"]] = trained
    return interpolate(sorted(points.items()))


def _sent(history: History) -> Callable[[float], float]:
    """Return the function from the time of an event to the megabytes sent per worker, mean over workers."""
    lines = [interpolate(_counted_by(history, place, _bytes_sent)) for place in history.processes]
    return lambda t: math.fsum(line(t) for line in lines) / history.workers / 1e6


def not_finite(history: History) -> int:
    """Return the number of logged or evaluated values that were not finite; they are null in the log."""
    logged = [event.get("values") or {} for event in history.of("log")]
    evaluated = [event.get("metrics") or {} for event in history.of("evaluation")]
    return sum(number(value) is None for values in (*logged, *evaluated) for value in values.values())
