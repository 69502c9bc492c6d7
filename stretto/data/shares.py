"""Division of a global step's samples among its members, by the time that each takes for a step and for a sample.

`parse` reads `--shares`: even, in ratios, or by speed; or the moves of a run, which are repeated. `parse_limits` reads
`--max-batch`, the largest shares of some workers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

from stretto.errors import LaunchError, explain

EVEN, SPEED = "even", "speed"
MOVES = "moves "
"""Begin of the text of moves that are repeated."""
LARGEST_MOVE = 3.0
"""Factor by which a move changes a share at most: the time of a step with a much other share is a guess."""
LEAST_GAIN = 1.05
"""Factor by which a move has to make a step faster; twice as much to leave even shares."""

Pace: TypeAlias = tuple[float, float]
"""Seconds of a worker for a step, whatever its size, and for each sample of it."""

Paces: TypeAlias = Mapping[int, Pace]
"""Pace of each worker, by its number."""

Limits: TypeAlias = Mapping[int, int]
"""Largest share of some workers, by their numbers."""

SMALLEST_SHARE = 2
"""Fewest samples of a share: a variance over the samples of a batch needs two."""
UNLIMITED = 2**62
"""Limit of a worker that has none."""


class Move(NamedTuple):
    """Paces that apply in an epoch after one of its global steps, and in the epochs after it."""

    epoch: int
    after: int
    paces: Paces


@dataclass(frozen=True)
class Shares:
    """Division of global steps among the workers: evenly, by these paces, by speed, or as a run did."""

    paces: Paces
    is_by_speed: bool = False
    moves: tuple[Move, ...] = ()

    @property
    def is_fixed(self) -> bool:
        """True if the paces of all epochs are the same."""
        return not self.is_by_speed and not self.moves

    def of_epoch(self, epoch: int) -> tuple[Paces, list[Move]]:
        """Return the paces with which an epoch begins where moves are repeated, and its own moves."""
        earlier = [move.paces for move in self.moves if move.epoch < epoch]
        return (earlier or [{}])[-1], [move for move in self.moves if move.epoch == epoch]


def parse(text: str) -> Shares:
    """Return the division that `--shares` asks for. Raises LaunchError.

    >>> parse("1:1:0.5").paces, parse("even").paces
    ({0: (0.0, 1.0), 1: (0.0, 1.0), 2: (0.0, 2.0)}, {})
    """
    if text in (EVEN, SPEED):
        return Shares({}, text == SPEED)
    if text.startswith(MOVES):
        moves = [Move(epoch, after, unlisted(paces)) for epoch, after, paces in json.loads(text.removeprefix(MOVES))]
        return Shares({}, moves=tuple(moves))
    try:
        ratios = [float(word) for word in text.split(":")]
    except ValueError:
        ratios = []
    if len(ratios) < 2 or not all(1e-6 <= ratio <= 1e6 for ratio in ratios):
        problem, expected = f"--shares cannot be {text}", "even, speed, a number above 0 for each worker, or a run"
        raise LaunchError(explain(problem, got=text, expected=expected, to_type="--shares 1:1:0.2"))
    return Shares({worker: (0.0, 1 / ratio) for worker, ratio in enumerate(ratios)})


def parse_limits(text: str | None) -> Limits:
    """Return the largest shares that `--max-batch` allows. Raises LaunchError.

    >>> parse_limits("0:64,1:16")
    {0: 64, 1: 16}
    """
    limits = dict[int, int]()
    for word in text.split(",") if text else ():
        worker, _, samples = word.partition(":")
        is_pair = worker.strip().isdecimal() and samples.strip().isdecimal() and int(worker) not in limits
        if not is_pair or int(samples) <= SMALLEST_SHARE:
            expected = f"WORKER:SAMPLES for each worker that has a limit, of more than {SMALLEST_SHARE} samples"
            problem = f"--max-batch cannot be {text}"
            raise LaunchError(explain(problem, got=word, expected=expected, to_type="--max-batch 0:64,1:16"))
        limits[int(worker)] = int(samples)
    return limits


def spelled(moves: Sequence[Move]) -> str:
    """Return the text of moves, which `parse` reads."""
    return MOVES + json.dumps([(move.epoch, move.after, listed(move.paces)) for move in moves])


def listed(paces: Paces) -> list[tuple[int, float, float]]:
    """Return paces as numbers alone: worker, seconds a step, seconds a sample."""
    return [(worker, *pace) for worker, pace in paces.items()]


def unlisted(rows: Iterable[tuple[int, float, float]]) -> Paces:
    """Return the paces of such numbers."""
    return {worker: (fixed, each) for worker, fixed, each in rows}


def of_members(paces: Paces, members: Sequence[int]) -> tuple[Pace, ...]:
    """Return the paces of these workers, in order; a worker without a pace has the mean of the others."""
    known = [paces[worker] for worker in members if worker in paces]
    if not known:
        return ()
    mean = sum(one[0] for one in known) / len(known), sum(one[1] for one in known) / len(known)
    return tuple(paces.get(worker, mean) for worker in members)


def step_s(sizes: Sequence[int], paces: Sequence[Pace]) -> float:
    """Return the seconds of a global step with these shares: those of its slowest worker."""
    return max(fixed + each * size for size, (fixed, each) in zip(sizes, paces, strict=True))


def portion(samples: int, part: int, parts: int) -> tuple[int, int]:
    """Return the first position of one even part among several, and the position after its last; the first are larger.

    >>> [portion(10, part, 3) for part in range(3)]
    [(0, 4), (4, 7), (7, 10)]
    """
    each, over = divmod(samples, parts)
    start = each * part + min(part, over)
    return start, start + each + (part < over)


@lru_cache(maxsize=64)
def cuts(samples: int, paces: tuple[Pace, ...], limits: tuple[int, ...]) -> tuple[int, ...]:
    """Return where each share begins, and the end: of all divisions one with the least time of a step.

    With seconds a_i a step and b_i a sample, the shares s_i minimise `max_i (a_i + b_i s_i)`, where `sum_i s_i` is the
    number of samples and no share is below `SMALLEST_SHARE` or above its limit. Shares in proportion to speeds would
    run away where a_i matters: a smaller share makes a worker look slower. Among equals the first have the larger
    shares. `samples` is at least the smallest share for each worker, and at most the sum of the limits.

    >>> free = (UNLIMITED,) * 3
    >>> cuts(16, ((0.0, 1.0), (0.0, 1.0), (0.0, 5.0)), free), cuts(16, ((1.0, 1.0), (5.0, 1.0)), free[:2])
    ((0, 7, 14, 16), (0, 10, 16))
    >>> cuts(16, ((0.0, 1.0), (0.0, 1.0), (0.0, 1.0)), (UNLIMITED, 4, UNLIMITED))
    (0, 6, 10, 16)
    """

    def within(seconds: float) -> list[int]:
        """Return the largest shares with which each worker has done its step within this time."""
        return [
            min(max(SMALLEST_SHARE, int((seconds - fixed) / each)), limit)
            for (fixed, each), limit in zip(paces, limits, strict=True)
        ]

    low, high = 0.0, max(fixed + each * (samples + 1) for fixed, each in paces)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(within(middle)) <= samples else (low, middle)
    shares = within(low)
    ends = [
        (fixed + each * (shares[rank] + 1) if shares[rank] < limits[rank] else math.inf, rank)
        for rank, (fixed, each) in enumerate(paces)
    ]
    heapify(ends)
    for _ in range(samples - sum(shares)):
        end, rank = ends[0]
        shares[rank] += 1
        heapreplace(ends, (end + paces[rank][1] if shares[rank] < limits[rank] else math.inf, rank))
    return tuple(accumulate(shares, initial=0))


class Timed(NamedTuple):
    """A worker's last steps: their samples and seconds, NaN if unknown.

    `fixed` is the number of samples that take as long as the part of a step that does not depend on samples; NaN if
    unknown.
    """

    samples: float
    seconds: float
    fixed: float


def paces_of(timed: Mapping[int, Timed], before: Paces) -> Paces:
    """Return the paces of workers by their last steps; a worker without steps keeps its pace of before.

    A worker whose fixed part is unknown has the mean of the others; if no worker has had different shares, all time
    counts as that of samples.
    """
    fixed = [one.fixed for one in timed.values() if not math.isnan(one.fixed)]
    mean = sum(fixed) / len(fixed) if fixed else 0.0
    found = dict(before)
    for worker, (samples, seconds, own) in timed.items():
        if not math.isnan(seconds):
            besides = mean if math.isnan(own) else own
            each = max(seconds, 1e-9) / (besides + samples)
            found[worker] = besides * each, each
    return {worker: found[worker] for worker in timed if worker in found}


def smaller_share(samples: int, largest: int) -> int:
    """Return the limit of a worker that has run out of memory with this share; 0 if it can't be smaller.

    If the share has grown, the limit is the `largest` one before, which had room; else it is half of the share.

    >>> smaller_share(26, 20), smaller_share(20, 20), smaller_share(5, 0)
    (20, 10, 0)
    """
    limit = largest if SMALLEST_SHARE < largest < samples else samples // 2
    return limit if limit > SMALLEST_SHARE else 0


def stricter(limits: Limits, others: Limits) -> Limits:
    """Return the limits of both, the smaller one of a worker that both have.

    >>> stricter({0: 64, 1: 16}, {1: 8, 2: 4})
    {0: 64, 1: 8, 2: 4}
    """
    return {**limits, **{worker: min(limit, limits.get(worker, limit)) for worker, limit in others.items()}}


def limits_of(limits: Limits, members: Sequence[int]) -> tuple[int, ...]:
    """Return the limits of these workers, in order; none if no worker has one."""
    return tuple(limits.get(worker, UNLIMITED) for worker in members) if limits else ()


def share_cuts(
    samples: int, members: int, paces: tuple[Pace, ...] = (), limits: tuple[int, ...] = ()
) -> Sequence[int] | None:
    """Return where each share begins, and the end; None for even shares of any size, or of too few samples."""
    if not (paces or limits) or samples < SMALLEST_SHARE * members:
        return None
    return cuts(samples, paces or ((0.0, 1.0),) * members, limits or (UNLIMITED,) * members)


def shares_of(samples: int, members: int, paces: tuple[Pace, ...], limits: tuple[int, ...]) -> list[int]:
    """Return the shares of members; even ones without paces and limits, or where there are too few samples."""
    found = share_cuts(samples, members, paces, limits)
    ranges = pairwise(found) if found else [portion(samples, rank, members) for rank in range(members)]
    return [stop - start for start, stop in ranges]


class Proposal(NamedTuple):
    """A move of shares; `paces` is None if the shares stay. Seconds of a step are predicted from measured speeds."""

    paces: Paces | None
    shares: list[int]
    predicted_s: float
    even_s: float


def proposed(now: Paces, measured: Paces, members: Sequence[int], samples: int, limited: Limits) -> Proposal:
    """Return the move from the present shares to shares that fit the measured paces better.

    No share changes by more than a factor of `LARGEST_MOVE`. The shares stay if the move gains little: measured times
    vary, and shares that follow each variation would never be at rest.
    """
    count, paces, limits = len(members), of_members(measured, members), limits_of(limited, members)
    present = shares_of(samples, count, of_members(now, members), limits)
    even = shares_of(samples, count, (), limits)
    if not paces or samples < SMALLEST_SHARE * count:
        return Proposal(None, present, math.nan, math.nan)
    present_s, even_s = step_s(present, paces), step_s(even, paces)
    target = shares_of(samples, count, paces, limits)
    moved: Paces = dict(zip(members, paces, strict=True))
    if even_s <= LEAST_GAIN * step_s(target, paces):
        target, moved = even, {}
    part = 1.0
    for before, after in zip(present, target, strict=True):
        if after > before * LARGEST_MOVE:
            part = min(part, before * (LARGEST_MOVE - 1) / (after - before))
        elif after * LARGEST_MOVE < before:
            part = min(part, before * (1 - 1 / LARGEST_MOVE) / (before - after))
    if part < 1.0:
        between = [before + part * (after - before) for before, after in zip(present, target, strict=True)]
        moved = {worker: (0.0, 1 / share) for worker, share in zip(members, between, strict=True)}
        target = shares_of(samples, count, of_members(moved, members), limits)
    target_s = step_s(target, paces)
    needed = LEAST_GAIN if now else LEAST_GAIN**2
    if target == present or present_s < needed * target_s:
        return Proposal(None, present, present_s, even_s)
    return Proposal(moved, target, target_s, even_s)
