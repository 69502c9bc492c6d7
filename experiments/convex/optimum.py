"""Optimum of a convex problem, by solvers of scipy, with an upper bound of its error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.convex.problem import Problem
from stretto.errors import LaunchError, explain

TOLERANCE = 1e-2
"""Largest error of the optimal value, as a share of the target."""

SMALL_GRADIENT = 1e-9
"""Largest norm of the gradient where no bound is known, as a share of its norm at theta = 0."""

MAX_STEPS = 100_000
CHECK_EVERY = 200
NEWTON_STEPS = 8


@dataclass(frozen=True, eq=False)
class Optimum:
    """Minimiser of the objective, its value, and an upper bound of the value minus F*."""

    theta: Tensor
    value: float
    slack: float
    """Bound by strong convexity or duality; NaN where neither gives one and only the gradient was checked."""


def optimum(problem: Problem, target: float) -> Optimum:
    """Return the optimum to a hundredth of the target. Raises LaunchError without scipy, or if the solver misses it."""
    found = _lasso(problem, target) if problem.l1 else _smooth(problem)
    if math.isnan(found.slack):
        start = problem.gradient(torch.zeros_like(found.theta)).norm()
        good = float(problem.gradient(found.theta).norm() / start) <= SMALL_GRADIENT
    else:
        good = found.slack <= TOLERANCE * target
    if good:
        return found
    message = f"the optimum of {problem.name} was not found to the needed precision"
    off = (
        "a gradient that does not vanish"
        if math.isnan(found.slack)
        else f"a value that may be off by {found.slack:.1e}"
    )
    expected = f"at most a hundredth of the target {target:g}"
    raise LaunchError(explain(message, got=off, expected=expected, to_type="--l2 0.01, or a larger --target"))


def _scipy(module: str) -> Any:
    """Import a module of scipy, an optional dependency."""
    import importlib

    try:
        return importlib.import_module(f"scipy.{module}")
    except ImportError as error:
        text = explain(
            "the optimum is computed by scipy, which is not installed",
            got=error,
            expected="scipy",
            to_type="pip install 'stretto[experiments]'",
        )
        raise LaunchError(text) from error


# Smooth problems: L-BFGS, then Newton's method


def _smooth(problem: Problem) -> Optimum:
    """Minimise f; `f(theta) - f* <= |grad f(theta)|^2 / (2 l2)`, since f is l2-strongly convex."""
    optimize = _scipy("optimize")
    options = {"maxiter": 20_000, "maxfun": 40_000, "ftol": 0.0, "gtol": 1e-14}
    start = np.zeros(problem.features)
    found = optimize.minimize(
        lambda theta: problem.smooth(torch.from_numpy(theta)),
        start,
        jac=lambda theta: problem.gradient(torch.from_numpy(theta)).numpy(),
        method="L-BFGS-B",
        options=options,
    )
    theta = _polished(problem, torch.from_numpy(found.x))
    squared = float(problem.gradient(theta).square().sum())
    slack = squared / (2 * problem.l2) if problem.l2 else math.nan
    return Optimum(theta, problem.objective(theta), slack)


def _polished(problem: Problem, theta: Tensor) -> Tensor:
    """Apply steps of Newton's method while they make the gradient smaller."""
    for _ in range(NEWTON_STEPS):
        gradient = problem.gradient(theta)
        closer = theta - _newton_step(problem, theta, gradient)
        if not float(problem.gradient(closer).norm()) < float(gradient.norm()):
            break
        theta = closer
    return theta


def _newton_step(problem: Problem, theta: Tensor, gradient: Tensor) -> Tensor:
    linalg = _scipy("sparse.linalg")
    count = problem.features

    def times(v: np.ndarray[Any, Any]) -> Any:
        return problem.curvature(theta, torch.from_numpy(v.ravel())).numpy()

    hessian = linalg.LinearOperator((count, count), matvec=times, dtype=np.float64)
    step, _ = linalg.cg(hessian, gradient.numpy(), rtol=1e-8, atol=0.0, maxiter=10 * count)
    return torch.from_numpy(step)


# The lasso: accelerated proximal steps find the support, a linear solver the values on it


def _lasso(problem: Problem, target: float) -> Optimum:
    """Minimise the lasso; the bound of `F(theta) - F*` is the duality gap."""
    theta = before = problem.x.new_zeros(problem.features)
    ahead, t, best = theta, 1.0, theta
    step = 1 / problem.smoothness
    for number in range(1, MAX_STEPS + 1):
        before, theta = theta, problem.proximal(ahead - step * problem.gradient(ahead), step)
        if float((ahead - theta) @ (theta - before)) > 0:
            t = 1.0  # the momentum points uphill: restart it
        grown = (1 + math.sqrt(1 + 4 * t * t)) / 2
        ahead, t = theta + (t - 1) / grown * (theta - before), grown
        if number % CHECK_EVERY == 0:
            best = min((best, theta, _on_support(problem, theta)), key=lambda candidate: gap(problem, candidate))
            if gap(problem, best) <= TOLERANCE * TOLERANCE * target:
                break
    return Optimum(best, problem.objective(best), gap(problem, best))


def _on_support(problem: Problem, theta: Tensor) -> Tensor:
    """Return the solution on the support of theta; exact if the support and signs are the optimum's."""
    places = theta.nonzero().ravel()
    if not len(places):
        return theta
    x, count = problem.x[:, places], len(places)
    gram = x.T @ x / problem.rows + problem.l2 * torch.eye(count, dtype=x.dtype)
    wanted = x.T @ problem.y / problem.rows - problem.l1 * theta[places].sign()
    solved, *_ = _scipy("linalg").lstsq(gram.numpy(), wanted.numpy())
    return torch.zeros_like(theta).index_copy_(0, places, torch.from_numpy(solved))


def gap(problem: Problem, theta: Tensor) -> float:
    """Return the duality gap of the lasso at theta, an upper bound of F(theta) - F*.

    With r = y - X theta and s = min(1, l1 / |X'r/n - l2 theta|_inf) the dual value is
    `(|y|^2 - |y - s r|^2 - n l2 s^2 |theta|^2) / (2 n)`.
    """
    residual = problem.y - problem.x @ theta
    steepest = float(problem.gradient(theta).abs().max())
    s = min(1.0, problem.l1 / steepest) if steepest else 1.0
    squares = problem.y.square().sum() - (problem.y - s * residual).square().sum()
    dual = squares / (2 * problem.rows) - problem.l2 / 2 * s * s * theta.square().sum()
    return max(0.0, problem.objective(theta) - float(dual))
