"""Objectives, derivatives and constants, by hand and by autograd."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import small_problems as made
import torch

from experiments.convex.problem import Kind, build
from stretto.errors import LaunchError

KINDS = get_args(Kind)


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_equal_autograd(kind: Kind) -> None:
    problem = made.problem(kind, l2=0.03)
    theta = torch.linspace(-1, 1, made.FEATURES, dtype=torch.float64, requires_grad=True)
    value = problem.loss.value(problem.x @ theta, problem.y).mean() + 0.03 / 2 * (theta**2).sum()
    (gradient,) = torch.autograd.grad(value, theta)
    assert problem.smooth(theta.detach()) == pytest.approx(float(value.detach()), rel=1e-14)
    torch.testing.assert_close(problem.gradient(theta.detach()), gradient, rtol=1e-12, atol=1e-14)
    rows = [problem.curvature(theta.detach(), one) for one in torch.eye(made.FEATURES, dtype=torch.float64)]

    def smooth(at: torch.Tensor) -> torch.Tensor:
        return problem.loss.value(problem.x @ at, problem.y).mean() + 0.03 / 2 * (at**2).sum()

    hessian = torch.autograd.functional.hessian(smooth, theta.detach())
    torch.testing.assert_close(torch.stack(rows), hessian, rtol=1e-12, atol=1e-14)


def test_losses_by_hand() -> None:
    logistic, linear = made.problem("logistic", l2=0.0), made.problem("linear", l2=0.0)
    zero = torch.zeros(made.FEATURES, dtype=torch.float64)
    assert logistic.smooth(zero) == pytest.approx(math.log(2))
    assert linear.smooth(zero) == pytest.approx(0.5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [made.ROWS, 5])
def test_smoothness_is_the_largest_eigenvalue_of_the_steepest_hessian(kind: Kind, rows: int) -> None:
    problem = build(kind, made.data(rows), l2=0.02)
    zero = torch.zeros(made.FEATURES, dtype=torch.float64)  # where the bend of the logistic loss is largest
    hessian = torch.stack([problem.curvature(zero, one) for one in torch.eye(made.FEATURES, dtype=torch.float64)])
    assert problem.smoothness == pytest.approx(float(torch.linalg.eigvalsh(hessian)[-1]), rel=1e-12)


def test_objective_of_the_lasso_includes_l1() -> None:
    problem, theta = made.problem("lasso", l1=0.25), torch.full((made.FEATURES,), -2.0, dtype=torch.float64)
    assert problem.objective(theta) == pytest.approx(problem.smooth(theta) + 0.25 * 2 * made.FEATURES)
    assert problem.l2 == 0
    shrunk = problem.proximal(torch.tensor([3.0, -0.2, -1.0]), 4.0)
    assert shrunk.tolist() == [2.0, 0.0, 0.0]


@pytest.mark.parametrize("workers", [1, 7, 8, made.ROWS])
def test_shards_are_consecutive_and_equal(workers: int) -> None:
    shards = made.problem().shards(workers)
    lengths = [one.stop - one.start for one in shards]
    assert [place for one in shards for place in range(one.start, one.stop)] == list(range(made.ROWS))
    assert len(shards) == workers and max(lengths) - min(lengths) <= 1


def test_degenerate_problems_are_refused() -> None:
    with pytest.raises(LaunchError, match="--l2 can't be -1"):
        build("linear", made.data(), l2=-1)
    with pytest.raises(LaunchError, match="--l1 can't be nan"):
        build("lasso", made.data(), l1=math.nan)
    with pytest.raises(LaunchError, match="the optimum is theta = 0"):
        build("lasso", made.data(), l1=100)
    data = made.data()
    data.x.zero_()
    with pytest.raises(LaunchError, match="do not depend on its features"):
        build("logistic", data)
