"""Convex problems: logistic regression, linear regression and the lasso, split into shards of equal size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softplus

from experiments.convex.data import Data, Labels, evened, signs
from stretto.errors import LaunchError, explain

Kind = Literal["logistic", "linear", "lasso"]
DEFAULT_L2 = {"logistic": 0.01, "linear": 0.01, "lasso": 0.0}
DEFAULT_L1 = 0.01


@dataclass(frozen=True)
class Loss:
    """A loss of the margin z = x . theta and the label y, its first two derivatives by z, and a bound of the second."""

    value: Callable[[Tensor, Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    bend: Callable[[Tensor], Tensor]
    largest_bend: float


def _logistic_bend(z: Tensor) -> Tensor:
    p = torch.sigmoid(z)
    return p * (1 - p)


LOGISTIC = Loss(
    value=lambda z, y: softplus(-y * z),
    slope=lambda z, y: -y * torch.sigmoid(-y * z),
    bend=_logistic_bend,
    largest_bend=0.25,
)
SQUARES = Loss(
    value=lambda z, y: (z - y) ** 2 / 2,
    slope=lambda z, y: z - y,
    bend=torch.ones_like,
    largest_bend=1.0,
)


@dataclass(frozen=True, eq=False)
class Problem:
    """A mean loss with a quadratic term, and an l1 term in the lasso.

    `F(theta) = f(theta) + l1 |theta|_1;  f(theta) = (1/n) sum_i loss(x_i . theta, y_i) + l2/2 |theta|^2`

    The loss is `log(1 + exp(-y z))` in logistic regression (y is +1 or -1) and `(z - y)^2 / 2` otherwise; l1 is 0
    except in the lasso. There is no intercept. x: (n, d), y: (n,), both float64.
    """

    kind: Kind
    name: str
    x: Tensor
    y: Tensor
    l2: float
    l1: float = 0.0

    @property
    def loss(self) -> Loss:
        """Loss of one example."""
        return LOGISTIC if self.kind == "logistic" else SQUARES

    @property
    def rows(self) -> int:
        """Number of examples, n."""
        return len(self.x)

    @property
    def features(self) -> int:
        """Number of parameters, d."""
        return self.x.shape[1]

    @cached_property
    def smoothness(self) -> float:
        """Smoothness L: Lipschitz constant of the gradient of f, from the bound of the loss's second derivative.

        `L = c lambda_max(X'X) / n + l2`, with c = 1/4 in logistic regression and 1 otherwise.
        """
        gram = self.x.T @ self.x if self.features <= self.rows else self.x @ self.x.T
        largest = float(torch.linalg.eigvalsh(gram)[-1])
        return self.loss.largest_bend * max(largest, 0.0) / self.rows + self.l2

    def smooth(self, theta: Tensor, margins: Tensor | None = None) -> float:
        """Return f(theta), without the l1 term; `margins` is X theta if it is known already."""
        z = self.x @ theta if margins is None else margins
        return float(self.loss.value(z, self.y).mean() + self.l2 / 2 * theta.square().sum())

    def objective(self, theta: Tensor, margins: Tensor | None = None) -> float:
        """Return F(theta)."""
        return self.smooth(theta, margins) + self.l1 * float(theta.abs().sum())

    def gradient(self, theta: Tensor) -> Tensor:
        """Return the gradient of f, (d,)."""
        return self.x.T @ self.loss.slope(self.x @ theta, self.y) / self.rows + self.l2 * theta

    def curvature(self, theta: Tensor, direction: Tensor) -> Tensor:
        """Return the Hessian of f at theta times a direction, (d,)."""
        bend = self.loss.bend(self.x @ theta)
        return self.x.T @ (bend * (self.x @ direction)) / self.rows + self.l2 * direction

    def proximal(self, theta: Tensor, step: float) -> Tensor:
        """Return the minimiser of `|. - theta|^2 / 2 + step l1 |.|_1`: theta itself without an l1 term."""
        return torch.nn.functional.softshrink(theta, step * self.l1) if self.l1 else theta

    def shards(self, workers: int) -> list[slice]:
        """Return the rows of each worker: consecutive ranges whose lengths differ by at most one."""
        bounds = [self.rows * worker // workers for worker in range(workers + 1)]
        return [slice(start, stop) for start, stop in pairwise(bounds)]


def build(
    kind: Kind, data: Data, *, labels: Labels | None = None, l2: float | None = None, l1: float = DEFAULT_L1
) -> Problem:
    """Return the problem of the data and options. Raises LaunchError for options that define none."""
    for name, value in (("--l2", l2), ("--l1", l1)):
        if value is not None and not 0 <= value < float("inf"):
            raise LaunchError(
                explain(f"{name} can't be {value}", got=value, expected="0 or more", to_type=f"{name} 0.01")
            )
    y = signs(data, labels) if kind == "logistic" else evened(data.y) if labels else data.y
    strength = DEFAULT_L2[kind] if l2 is None else l2
    problem = Problem(kind, data.name, data.x, y, strength, l1 if kind == "lasso" else 0.0)
    _check_solvable(problem)
    return problem


def _check_solvable(problem: Problem) -> None:
    """Raise LaunchError if theta = 0, where all methods start, is the optimum."""
    steepest = float(problem.gradient(problem.x.new_zeros(problem.features)).abs().max())
    if steepest > problem.l1:
        return
    if problem.l1:
        got, expected = f"--l1 {problem.l1:g}", f"less than {steepest:.3g}"
        to_type = f"--l1 {steepest / 10:.2g}"
        raise LaunchError(explain("with this l1 the optimum is theta = 0", got=got, expected=expected, to_type=to_type))
    got = "a gradient of 0 at theta = 0"
    raise LaunchError(
        explain(
            f"the labels of {problem.name} do not depend on its features",
            got=got,
            expected="labels that depend on the features",
            to_type="--rows with more of the file",
        )
    )
