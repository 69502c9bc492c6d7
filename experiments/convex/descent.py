"""Distributed gradient descent on a convex problem, with workers in memory and every encoded message counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experiments.convex.methods import Method
from experiments.convex.optimum import Optimum
from experiments.convex.problem import Problem
from stretto.codecs import CodecContext
from stretto.collective_ops import Answer, CollectiveCoroutine, CollectiveOp, answer
from stretto.errors import LaunchError, NotFiniteError, explain

MESSAGE_DTYPE = torch.float32
"""Precision of every message, whatever the precision of the computation."""

DIVERGED = 1e6
"""A run ends when its objective error has grown by this factor."""

MAX_ROUNDS = 100_000
ROUNDS_FACTOR, MIN_ROUNDS_LIMIT = 5, 1000

OnRound = Callable[[int, float], None]
"""Receives the number of rounds so far and the objective error, after every round."""


@dataclass(frozen=True)
class Outcome:
    """Course of one method: objective error and cumulative uplink bits before each round and after the last one."""

    method: str
    workers: int
    errors: tuple[float, ...]
    bits: tuple[int, ...]
    reached: bool
    """True if the last error is at most the target."""

    @property
    def rounds(self) -> int:
        """Number of rounds."""
        return len(self.errors) - 1

    @property
    def uplink_bits(self) -> int:
        """Bits sent by all workers in all rounds."""
        return self.bits[-1]

    @property
    def error(self) -> float:
        """Objective error after the last round."""
        return self.errors[-1]


@dataclass(frozen=True)
class Settings:
    """Settings of every method: number of workers, target of the objective error, limit of rounds, precision.

    Without `max_rounds`, gradient descent may take MAX_ROUNDS, and each other method ROUNDS_FACTOR times the rounds of
    gradient descent, but at least MIN_ROUNDS_LIMIT.
    """

    workers: int
    target: float
    max_rounds: int | None = None
    float64: bool = False

    def check(self, problem: Problem) -> None:
        """Raise LaunchError for settings that cannot be run on `problem`."""
        if not 1 <= self.workers <= problem.rows:
            expected = f"a whole number from 1 to the {problem.rows} rows"
            _refuse("the number of workers", self.workers, expected, "--workers 10")
        if not 0 < self.target < math.inf:
            _refuse("the target", self.target, "an objective error above 0", "--target 1e-8")
        if self.max_rounds is not None and self.max_rounds < 1:
            _refuse("the limit of rounds", self.max_rounds, "a whole number, at least 1", "--rounds 20000")

    def after(self, gd: Outcome) -> Settings:
        """Return the settings of the other methods, given the rounds of gradient descent."""
        if self.max_rounds is not None:
            return self
        return replace(self, max_rounds=max(ROUNDS_FACTOR * gd.rounds, MIN_ROUNDS_LIMIT))


def _refuse(what: str, got: float, expected: str, to_type: str) -> None:
    raise LaunchError(explain(f"{what} can't be {got:g}", got=f"{got:g}", expected=expected, to_type=to_type))


class Workers:
    """Workers in memory that descend together from theta = 0, each on its rows, with steps of 1/L.

    Worker m contributes `x_m = (n_m / n) grad f_m(theta)`, so that the sum over all workers is the gradient of f.
    """

    def __init__(self, problem: Problem, method: Method, workers: int, *, float64: bool = False) -> None:
        self._problem, self._recipe = problem, method.recipe
        dtype = torch.float64 if float64 else torch.float32
        self._x, self._y = problem.x.to(dtype), problem.y.to(dtype)
        self._shards = problem.shards(workers)
        self.theta = torch.zeros(problem.features, dtype=dtype)
        self._margins = self._x @ self.theta
        contexts = [CodecContext(worker=m, workers=workers, theta=self.theta) for m in range(workers)]
        like = self.theta.to(MESSAGE_DTYPE)
        self._states = [method.recipe.what.init_state(method.recipe.how, like, context) for context in contexts]

    def round(self) -> int:
        """Exchange gradients, take one step, and return the bits that all workers sent."""
        what, how = self._recipe.what, self._recipe.how
        pairs = zip(self.contributions(), self._states, strict=True)
        gradient, bits = run_lockstep([what.average(how, x, state) for x, state in pairs])
        step = 1 / self._problem.smoothness
        self.theta.copy_(self._problem.proximal(self.theta - step * gradient, step))
        self._margins = self._x @ self.theta
        return bits

    def objective(self) -> float:
        """Return F(theta), computed in float64."""
        margins = self._margins if self._margins.dtype == torch.float64 else None
        return self._problem.objective(self.theta.double(), margins)

    def contributions(self) -> list[Tensor]:
        """Return the contribution x_m of each worker to this round, each of shape (d,)."""
        problem = self._problem
        slopes = problem.loss.slope(self._margins, self._y) / problem.rows
        return [self._contribution(shard, slopes).to(MESSAGE_DTYPE) for shard in self._shards]

    def _contribution(self, shard: slice, slopes: Tensor) -> Tensor:
        share = (shard.stop - shard.start) / self._problem.rows
        gradient: Tensor = self._x[shard].T @ slopes[shard]
        return gradient.add_(self.theta, alpha=share * self._problem.l2)


def run_lockstep(coroutines: Sequence[CollectiveCoroutine]) -> tuple[Tensor, int]:
    """Run the collective coroutines of all workers to their end; return their common result and the bits sent."""
    result: Answer | None = None
    bits = 0
    while True:
        turns = [_advance(coroutine, result) for coroutine in coroutines]
        ops = [op for op, _ in turns if op is not None]
        if len(ops) < len(turns):
            value = turns[0][1]
            assert value is not None
            assert not ops, "some coroutines have ended and others have not"
            return value, bits
        bits += sum(8 * op.tensor.numel() * op.tensor.element_size() for op in ops)
        result = answer(ops)


def _advance(coroutine: CollectiveCoroutine, result: Answer | None) -> tuple[CollectiveOp | None, Tensor | None]:
    """Return the next operation of a worker, or the value its coroutine returned. Each worker gets its own mean."""
    try:
        if result is None:
            return next(coroutine), None
        return coroutine.send(result.clone() if isinstance(result, Tensor) else result), None
    except StopIteration as end:
        return None, end.value


def descend(
    problem: Problem, best: Optimum, method: Method, settings: Settings, on_round: OnRound | None = None
) -> Outcome:
    """Run rounds until `F(theta) - F* <= target`, the limit of rounds is reached, or the error diverges."""
    limit = MAX_ROUNDS if settings.max_rounds is None else settings.max_rounds
    workers = Workers(problem, method, settings.workers, float64=settings.float64)
    errors, bits = [_error(workers, best)], [0]
    while errors[-1] > settings.target and len(errors) <= limit and errors[-1] < DIVERGED * errors[0]:
        try:
            sent = workers.round()
        except NotFiniteError:
            break
        errors.append(_error(workers, best))
        bits.append(bits[-1] + sent)
        if on_round is not None:
            on_round(len(errors) - 1, errors[-1])
    return Outcome(method.name, settings.workers, tuple(errors), tuple(bits), errors[-1] <= settings.target)


def _error(workers: Workers, best: Optimum) -> float:
    """Return F(theta) - F*, or infinity if it is not finite."""
    error = workers.objective() - best.value
    return error if math.isfinite(error) else math.inf
