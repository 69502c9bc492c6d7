"""Compute speeds of simulated workers: the text of `--speeds`, and the seconds of each step.

A factor is the ratio of a step's time to the measured time: 1 is as measured, 2 is twice as long.
Every draw depends on (seed, worker, step) only, not on the order of calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import lru_cache
from math import exp, expm1, floor, inf, sqrt
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from stretto.call_syntax import SMALLEST, Words
from stretto.errors import LaunchError, explain
from stretto.units import PLAIN, TIMES, spelled

BLOCK = 256
"""Number of steps of one worker that are drawn together."""
STREAM = 1
"""Number of the random stream, which makes these draws independent of others with the same seed."""
MAX_SIGMA = 10.0
"""Largest sigma; beyond it nearly every factor is 0."""

StepTimes = Callable[[int, float, float], float]
"""Function of one worker from (step, virtual time at its start, measured seconds of a step) to the step's seconds."""


class Speeds(ABC):
    """A distribution of compute speeds; its `str` is the text of `--speeds`."""

    @abstractmethod
    def step_times(self, worker: int, workers: int, seed: int) -> StepTimes:
        """Return the step times of one of `workers` workers."""


@dataclass(frozen=True)
class Equal(Speeds):
    """Every step takes the measured time."""

    def __str__(self) -> str:
        """Return the text of `--speeds`."""
        return "equal"

    def step_times(self, worker: int, workers: int, seed: int) -> StepTimes:
        """Return the constant factor 1."""
        return _Constant(1.0)


@dataclass(frozen=True)
class Factors(Speeds):
    """A factor for each worker, in order."""

    factors: tuple[float, ...]

    def __str__(self) -> str:
        """Return the text of `--speeds`."""
        return ",".join(map(spelled, self.factors))

    def step_times(self, worker: int, workers: int, seed: int) -> StepTimes:
        """Return the worker's own factor. Raises LaunchError unless there is one factor per worker."""
        if len(self.factors) != workers:
            problem = f"speeds are given for {len(self.factors)} workers, but there are {workers}"
            example = '--speeds "slow(0.1, 5)"'
            raise LaunchError(explain(problem, got=self, expected=f"{workers} factors", to_type=example))
        return _Constant(self.factors[worker])


@dataclass(frozen=True)
class Lognormal(Speeds):
    """Factors exp(sigma z - sigma^2/2), z standard normal; their mean is 1.

    Each worker has one factor for the whole run, or with `each_step` a new one for each step.
    """

    sigma: float
    each_step: bool = False

    def __str__(self) -> str:
        """Return the text of `--speeds`."""
        return f"lognormal({spelled(self.sigma)}{', each=step' if self.each_step else ''})"

    def step_times(self, worker: int, workers: int, seed: int) -> StepTimes:
        """Return one factor, or a draw for each step."""
        if self.each_step:
            return _Drawn(self._draw, seed, worker)
        return _Constant(self._draw(_rng(seed, worker), 1).item())

    def _draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return np.exp(self.sigma * rng.standard_normal(count) - self.sigma**2 / 2)


@dataclass(frozen=True)
class Exponential(Speeds):
    """Each step's factor is shift + (1 - shift) Exp(1), with mean 1.

    Without a shift this is the model under which K-sync and K-async have closed forms.
    Source: Dutta et al. 2018, Slow and Stale Gradients Can Win the Race.
    """

    shift: float = 0.0

    def __str__(self) -> str:
        """Return the text of `--speeds`."""
        return f"shifted_exponential({spelled(self.shift)})" if self.shift else "exponential"

    def step_times(self, worker: int, workers: int, seed: int) -> StepTimes:
        """Return a draw for each step."""
        return _Drawn(self._draw, seed, worker)

    def _draw(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return self.shift + (1 - self.shift) * rng.standard_exponential(count)


@dataclass(frozen=True)
class Slow(Speeds):
    """A fraction of the workers (rounded, at least one, drawn with the seed) takes `factor` times as long."""

    fraction: float
    factor: float

    def __str__(self) -> str:
        """Return the text of `--speeds`."""
        return f"slow({spelled(self.fraction)}, {spelled(self.factor)})"

    def step_times(self, worker: int, workers: int, seed: int) -> StepTimes:
        """Return the factor, or 1."""
        count = max(1, floor(self.fraction * workers + 0.5))
        return _Constant(self.factor if worker in _slow_workers(seed, workers, count) else 1.0)


@dataclass(frozen=True)
class Drifting(Speeds):
    """Each worker's log factor is a mean-reverting random walk in virtual time t; the factor's stationary mean is 1.

    factor = exp(x - sigma^2/2),  x(t + d) = x(t) e^(-d/tau) + sigma sqrt(1 - e^(-2d/tau)) z,  x(0) = sigma z
    This is the exact step of the Ornstein-Uhlenbeck process, however far apart the steps are (Gillespie 1996).
    """

    sigma: float
    tau_s: float

    def __str__(self) -> str:
        """Return the text of `--speeds`."""
        return f"drifting({spelled(self.sigma)}, {spelled(self.tau_s)}s)"

    def step_times(self, worker: int, workers: int, seed: int) -> StepTimes:
        """Return an independent random walk."""
        return _Walk(self, seed, worker)


@dataclass(frozen=True)
class Trace(Speeds):
    """Measured seconds of steps, replayed in order and cyclically.

    Worker w replays worker w mod n of the n workers in the file. `times` holds their steps in order of worker numbers.
    """

    file: str
    times: tuple[tuple[float, ...], ...] = field(repr=False)

    def __str__(self) -> str:
        """Return the text of `--speeds`."""
        return f"trace({self.file})"

    def step_times(self, worker: int, workers: int, seed: int) -> StepTimes:
        """Return the measured seconds, independent of the step time of the simulation."""
        return _Replayed(self.times[worker % len(self.times)])


class Pace:
    """Virtual seconds of each step of each worker.

    >>> pace = Pace(parse("1,1,2"), workers=3, seed=0)
    >>> pace.step_s(worker=2, step=0, now=0.0, step_time_s=0.005)
    0.01

    Determined by the seed, independent of the order of calls. Raises LaunchError if the speeds do not fit the number of
    workers.
    """

    def __init__(self, speeds: Speeds, workers: int, seed: int) -> None:
        self._step_times = [speeds.step_times(worker, workers, seed) for worker in range(workers)]

    def step_s(self, worker: int, step: int, now: float, step_time_s: float) -> float:
        """Return the seconds of a worker's step that starts at virtual time `now`, which never decreases per worker."""
        return self._step_times[worker](step, now, step_time_s)

    def mean_factor(self, worker: int) -> float | None:
        """Return the factor of a worker whose factor is constant, else None."""
        step_times = self._step_times[worker]
        return step_times.factor if isinstance(step_times, _Constant) else None


class _Constant:
    """A worker with the same factor in every step."""

    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, step: int, now: float, step_time_s: float) -> float:
        return self.factor * step_time_s


class _Drawn:
    """A worker with a draw for each step; the current block of draws is cached."""

    __slots__ = ("_block", "_draw", "_number", "_seed", "_worker")

    def __init__(self, draw: Callable[[np.random.Generator, int], NDArray[np.float64]], seed: int, worker: int) -> None:
        self._draw, self._seed, self._worker = draw, seed, worker
        self._number = -1

    def value(self, step: int) -> float:
        number, offset = divmod(step, BLOCK)
        if number != self._number:
            self._block = self._draw(_rng(self._seed, self._worker, number), BLOCK)
            self._number = number
        return self._block.item(offset)

    def __call__(self, step: int, now: float, step_time_s: float) -> float:
        return self.value(step) * step_time_s


class _Replayed:
    """A worker that replays measured steps."""

    __slots__ = ("_times",)

    def __init__(self, times: tuple[float, ...]) -> None:
        self._times = times

    def __call__(self, step: int, now: float, step_time_s: float) -> float:
        return self._times[step % len(self._times)]


class _Walk:
    """A worker whose log factor is a random walk."""

    __slots__ = ("_last_time", "_normal", "_speeds", "_x")

    def __init__(self, speeds: Drifting, seed: int, worker: int) -> None:
        self._speeds = speeds
        self._normal = _Drawn(np.random.Generator.standard_normal, seed, worker)
        self._last_time, self._x = -inf, 0.0

    def __call__(self, step: int, now: float, step_time_s: float) -> float:
        sigma, elapsed = self._speeds.sigma, (self._last_time - now) / self._speeds.tau_s
        self._x = self._x * exp(elapsed) + sigma * sqrt(-expm1(2 * elapsed)) * self._normal.value(step)
        self._last_time = now
        return exp(self._x - sigma**2 / 2) * step_time_s


def _rng(seed: int, worker: int, block: int = 0) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(STREAM, worker, block)))


@lru_cache(maxsize=1)
def _slow_workers(seed: int, workers: int, count: int) -> frozenset[int]:
    return frozenset(_rng(seed, 0).permutation(workers)[:count].tolist())


def parse(text: str) -> Speeds:
    """Parse the text of `--speeds`; `str` is the inverse. Raises LaunchError with the invalid place marked.

    >>> parse("lognormal(0.5, each=step)")
    Lognormal(sigma=0.5, each_step=True)
    >>> str(parse("drifting(.3, 2m)"))
    'drifting(0.3, 120s)'
    """
    words = Words(text, "--speeds", "1,1,2,4", ANY)
    if not words.next.isidentifier():
        return Factors(tuple(words.quantity(least=SMALLEST) for _ in words.listed(",")))
    form = FORMS[words.choose({name: form.example for name, form in FORMS.items()})]
    words.expected = form.syntax
    values: list[object] = []
    if words.skip("("):
        for read in form.readers:
            if values:
                words.take(",", expected=form.syntax)
            values.append(read(words))
            if words.next == ")" and len(values) >= form.needs:
                break
        words.take(")", expected=form.syntax)
    elif form.needs:
        raise words.refused()
    words.end()
    return form.make(*values)


class _Form(NamedTuple):
    """One form of the text; `make` takes the values of `readers`, the first `needs` of which must be given."""

    syntax: str
    example: str
    make: Callable[..., Speeds] = Equal
    readers: tuple[Callable[[Words], object], ...] = ()
    needs: int = 0


def _number(least: float, most: float = inf, units: Mapping[str, Decimal] = PLAIN) -> Callable[[Words], float]:
    return lambda words: words.quantity(units, least, most)


def _each_step(words: Words) -> bool:
    return bool(words.take("each") and words.take("=") and words.take("step"))


def _file(words: Words) -> str:
    file = words.within()
    if not file:
        raise words.refused()
    return file


class _Measured(msgspec.Struct):
    """One line of a trace file."""

    worker: Annotated[int, msgspec.Meta(ge=0)]
    step_s: Annotated[float, msgspec.Meta(gt=0)]


def _trace(file: str) -> Trace:
    times: dict[int, list[float]] = {}
    try:
        lines = Path(file).read_bytes().splitlines()
    except (OSError, ValueError) as error:
        raise _bad_trace(file, str(error)) from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            measured = _line(file, number, line)
            times.setdefault(measured.worker, []).append(measured.step_s)
    if not times:
        raise _bad_trace(file, "no lines")
    return Trace(file, tuple(tuple(times[worker]) for worker in sorted(times)))


def _line(file: str, number: int, line: bytes) -> _Measured:
    try:
        return msgspec.json.decode(line, type=_Measured)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _bad_trace(file, f"line {number}: {error}") from None


def _bad_trace(file: str, got: str) -> LaunchError:
    expected = 'lines such as {"worker": 0, "step_s": 0.0123}, with step_s above 0'
    problem = f"no measured steps can be read from {file}"
    return LaunchError(explain(problem, got=got, expected=expected, to_type='--speeds "trace(FILE)"'))


FORMS = {
    "equal": _Form("equal, without values", "equal"),
    "lognormal": _Form(
        f"lognormal(SIGMA) or lognormal(SIGMA, each=step), SIGMA from 0 to {spelled(MAX_SIGMA)}",
        "lognormal(0.5)",
        Lognormal,
        (_number(0, MAX_SIGMA), _each_step),
        needs=1,
    ),
    "exponential": _Form("exponential, without values", "exponential", Exponential),
    "shifted_exponential": _Form(
        "shifted_exponential(SHIFT), SHIFT from 0 to 1",
        "shifted_exponential(0.5)",
        Exponential,
        (_number(0, 1),),
        needs=1,
    ),
    "slow": _Form(
        "slow(FRACTION, FACTOR), FRACTION above 0 and up to 1, FACTOR at least 1",
        "slow(0.1, 5)",
        Slow,
        (_number(SMALLEST, 1), _number(1)),
        needs=2,
    ),
    "drifting": _Form(
        f"drifting(SIGMA, TIME), SIGMA from 0 to {spelled(MAX_SIGMA)}, TIME such as 500ms, 60s, 2m, 1h",
        "drifting(0.3, 60s)",
        Drifting,
        (_number(0, MAX_SIGMA), _number(SMALLEST, units=TIMES)),
        needs=2,
    ),
    "trace": _Form(
        'trace(FILE), lines of {"worker": 0, "step_s": 0.0123} in it', "trace(steps.jsonl)", _trace, (_file,), needs=1
    ),
}
"""Forms of the text by name."""
ANY = "a factor above 0 for each worker, commas between, or one of " + ", ".join(FORMS)
