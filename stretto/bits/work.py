"""Gradient descent over workers in memory: their conversations are held in lock step, and what they say is counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stretto.bits.methods import Method
from stretto.bits.optimum import Optimum
from stretto.bits.outcome import Outcome
from stretto.bits.problem import Problem
from stretto.codecs import CodecContext
from stretto.collective_ops import Answer, CollectiveCoroutine, CollectiveOp, answer
from stretto.errors import LaunchError, NotFiniteError, explain

SENT = torch.float32
"""What is exchanged is of 32 bits a number, in whatever precision the workers compute."""

HOPELESS = 1e6
"""An objective error that has grown so many times over will not come back."""

MOST_ROUNDS = 100_000
LATE, AT_LEAST = 5, 1000

Seen = Callable[[int, float], None]
"""Told after every round: how many there were, and the objective error."""


@dataclass(frozen=True)
class Terms:
    """What holds for every method: so many workers, the objective error that ends a run, the most rounds.

    Where no number of rounds is given, gradient descent may make MOST_ROUNDS, and the others LATE times as many as it
    made, or AT_LEAST so many. With `double` the workers compute in float64, with `live` they are processes.
    """

    workers: int
    target: float
    most: int | None = None
    double: bool = False
    live: bool = False

    def check(self, problem: Problem) -> None:
        """Refuse what can't be run; raises LaunchError."""
        if not 1 <= self.workers <= problem.rows:
            expected = f"a whole number from 1 to the {problem.rows} rows"
            _refuse("the number of workers", self.workers, expected, "--workers 10")
        if not 0 < self.target < math.inf:
            _refuse("the target", self.target, "an objective error above 0", "--target 1e-8")
        if self.most is not None and self.most < 1:
            _refuse("the limit of rounds", self.most, "a whole number, at least 1", "--rounds 20000")

    def after(self, gd: Outcome) -> Terms:
        """The terms of the other methods, now that gradient descent has made its rounds."""
        return self if self.most is not None else replace(self, most=max(LATE * gd.rounds, AT_LEAST))


def _refuse(what: str, got: float, expected: str, to_type: str) -> None:
    raise LaunchError(explain(f"{what} can't be {got:g}", got=f"{got:g}", expected=expected, to_type=to_type))


class Team:
    """Workers that descend together from theta = 0, each on its rows, with steps of 1/L.

    `x_m = (n_m / n) grad f_m(theta)` is what worker m contributes: the mean over all is the gradient of f.
    """

    def __init__(self, problem: Problem, method: Method, workers: int, *, double: bool = False) -> None:
        self._problem, self._recipe = problem, method.recipe
        dtype = torch.float64 if double else torch.float32
        self._x, self._y = problem.x.to(dtype), problem.y.to(dtype)
        self._shards = problem.shards(workers)
        self.theta = torch.zeros(problem.wide, dtype=dtype)
        self._margins = self._x @ self.theta
        scenes = [CodecContext(worker=m, workers=workers, theta=self.theta) for m in range(workers)]
        like = self.theta.to(SENT)
        self._memories = [method.recipe.what.memory(method.recipe.how, like, scene) for scene in scenes]

    def round(self) -> int:
        """One round: exchange gradients and take a step. Returns the bits that the workers said."""
        what, how = self._recipe.what, self._recipe.how
        told = zip(self.contributions(), self._memories, strict=True)
        agreed, bits = hold([what.converse(how, x, memory) for x, memory in told])
        step = 1 / self._problem.smoothness
        self.theta.copy_(self._problem.proximal(self.theta - step * agreed, step))
        self._margins = self._x @ self.theta
        return bits

    def objective(self) -> float:
        """F(theta) in float64, whatever the workers compute in."""
        known = self._margins if self._margins.dtype == torch.float64 else None
        return self._problem.objective(self.theta.double(), known)

    def contributions(self) -> list[Tensor]:
        """What each worker brings to this round, (d,)."""
        problem = self._problem
        slopes = problem.loss.slope(self._margins, self._y) / problem.rows
        return [self._contribution(shard, slopes).to(SENT) for shard in self._shards]

    def _contribution(self, shard: slice, slopes: Tensor) -> Tensor:
        share = (shard.stop - shard.start) / self._problem.rows
        gradient: Tensor = self._x[shard].T @ slopes[shard]
        return gradient.add_(self.theta, alpha=share * self._problem.l2)


def hold(conversations: Sequence[CollectiveCoroutine]) -> tuple[Tensor, int]:
    """Hold the conversations of all workers; what they agree on, and the bits that all of them said."""
    said: Answer | None = None
    bits = 0
    while True:
        turns = [_turn(one, said) for one in conversations]
        asks = [ask for ask, _ in turns if ask is not None]
        if len(asks) < len(turns):
            agreed = turns[0][1]
            assert agreed is not None
            assert not asks, "some workers have ended the conversation and others have not"
            return agreed, bits
        bits += sum(8 * ask.tensor.numel() * ask.tensor.element_size() for ask in asks)
        said = answer(asks)


def _turn(conversation: CollectiveCoroutine, said: Answer | None) -> tuple[CollectiveOp | None, Tensor | None]:
    """What a worker asks next, or what the conversation ended in. A mean is given to each as its own."""
    try:
        if said is None:
            return next(conversation), None
        return conversation.send(said.clone() if isinstance(said, Tensor) else said), None
    except StopIteration as end:
        return None, end.value


def descend(problem: Problem, best: Optimum, method: Method, terms: Terms, seen: Seen | None = None) -> Outcome:
    """Make rounds until `F(theta) - F* <= target`, or the most of them, or it is clear that it never will."""
    most = MOST_ROUNDS if terms.most is None else terms.most
    team = Team(problem, method, terms.workers, double=terms.double)
    errors, bits = [_error(team, best)], [0]
    while errors[-1] > terms.target and len(errors) <= most and errors[-1] < HOPELESS * errors[0]:
        try:
            said = team.round()
        except NotFiniteError:
            break
        errors.append(_error(team, best))
        bits.append(bits[-1] + said)
        if seen is not None:
            seen(len(errors) - 1, errors[-1])
    return Outcome(method.name, terms.workers, tuple(errors), tuple(bits), errors[-1] <= terms.target)


def _error(team: Team, best: Optimum) -> float:
    """F(theta) - F*, infinite where it is no number."""
    error = team.objective() - best.value
    return error if math.isfinite(error) else math.inf
