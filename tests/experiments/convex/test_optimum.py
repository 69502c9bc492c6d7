"""Optimality conditions and bounds of the solvers."""

from __future__ import annotations

import builtins
import importlib
from typing import get_args

import pytest
import small_problems as made
import torch

from experiments.convex.optimum import gap, optimum
from experiments.convex.problem import Kind
from stretto.errors import LaunchError

pytest.importorskip("scipy")


@pytest.mark.parametrize("kind", ["logistic", "linear"])
@pytest.mark.parametrize("l2", [0.0, 0.01, 1.0])
def test_gradient_vanishes_at_the_optimum(kind: Kind, l2: float) -> None:
    problem = made.problem(kind, l2)
    best = optimum(problem, 1e-12)
    assert float(problem.gradient(best.theta).norm()) < 1e-10
    assert best.value == problem.objective(best.theta)


def test_linear_regression_equals_lstsq() -> None:
    problem = made.problem("linear", 0.0)
    solved = torch.linalg.lstsq(problem.x, problem.y[:, None]).solution[:, 0]
    torch.testing.assert_close(optimum(problem, 1e-12).theta, solved, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("l2", [0.0, 0.1])
@pytest.mark.parametrize("l1", [0.001, 0.05])
def test_the_lasso_satisfies_its_subgradient_conditions(l1: float, l2: float) -> None:
    problem = made.problem("lasso", l2, l1)
    best = optimum(problem, 1e-10)
    gradient, on = problem.gradient(best.theta), best.theta != 0
    torch.testing.assert_close(gradient[on], -l1 * best.theta[on].sign(), rtol=0, atol=1e-8)
    assert bool((gradient.abs() <= l1 + 1e-8).all())
    assert on.any()


def test_duality_gap_bounds_the_error() -> None:
    for l2 in (0.0, 0.1):
        problem = made.problem("lasso", l2, 0.05)
        best = optimum(problem, 1e-10)
        for scale in (0.0, 0.5, 0.99, 1.5):
            theta = scale * best.theta
            assert gap(problem, theta) >= problem.objective(theta) - best.value - 1e-12
        assert gap(problem, best.theta) < 1e-12


@pytest.mark.parametrize("kind", get_args(Kind))
def test_no_point_nearby_is_lower(kind: Kind) -> None:
    problem = made.problem(kind)
    best = optimum(problem, 1e-10)
    source = torch.Generator().manual_seed(1)
    for _ in range(20):
        near = best.theta + 1e-3 * torch.randn(made.FEATURES, generator=source, dtype=torch.float64)
        assert problem.objective(near) >= best.value


def test_missing_scipy_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str, *given: object) -> object:
        if name.startswith("scipy"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *given)

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(LaunchError, match=r"pip install 'stretto\[experiments\]'"):
        optimum(made.problem(), 1e-8)
    assert builtins.__import__("scipy")
