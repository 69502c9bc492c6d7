"""Gradient descent by hand, bits of every message, ends of a run, refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import small_problems as made
import torch
from torch import Tensor

from experiments.convex.descent import MIN_ROUNDS_LIMIT, ROUNDS_FACTOR, Settings, Workers, descend, run_lockstep
from experiments.convex.methods import GD, Method, method
from experiments.convex.optimum import Optimum, optimum
from experiments.convex.problem import Kind, Problem
from stretto.collective_ops import AllGather, AllReduceMean
from stretto.errors import LaunchError, RecipeError, TransportError

pytest.importorskip("scipy")

SEC = "gd_sec(beta=0.01, xi=100)"


def make_workers(problem: Problem, text: str, workers: int = 4, float64: bool = True) -> Workers:
    return Workers(problem, method(text, problem.smoothness), workers, float64=float64)


def walk(team: Workers, rounds: int) -> tuple[Tensor, list[int]]:
    """Return theta after each round, and the bits of each round."""
    way, bits = [], []
    for _ in range(rounds):
        bits.append(team.round())
        way.append(team.theta.clone())
    return torch.stack(way), bits


def by_hand(problem: Problem, rounds: int) -> Tensor:
    theta, way = torch.zeros(problem.features, dtype=torch.float64), []
    for _ in range(rounds):
        theta = problem.proximal(theta - problem.gradient(theta) / problem.smoothness, 1 / problem.smoothness)
        way.append(theta)
    return torch.stack(way)


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("workers", [1, 4, 7])
def test_gd_is_gradient_descent_by_hand(kind: Kind, workers: int) -> None:
    problem = made.problem(kind)
    for float64, near in ((True, 1e-6), (False, 1e-5)):  # contributions are rounded to float32 in both
        way, bits = walk(make_workers(problem, GD, workers, float64), 50)
        torch.testing.assert_close(way.double(), by_hand(problem, 50), rtol=0, atol=near)
        assert bits == [32 * problem.features * workers] * 50


@pytest.mark.parametrize("beta", [0.0, 0.01, 0.5, 1.0])
def test_without_a_threshold_gd_sec_is_gd(beta: float) -> None:
    problem = made.problem()
    expected, _ = walk(make_workers(problem, GD), 60)
    way, _ = walk(make_workers(problem, f"gd_sec(beta={beta}, xi=0)"), 60)
    torch.testing.assert_close(way, expected, rtol=0, atol=1e-6)


def test_first_round_of_gd_sec_sends_everything() -> None:
    problem = made.problem()
    (first, *_), (bits, *later) = walk(make_workers(problem, SEC), 30)
    torch.testing.assert_close(first, by_hand(problem, 1)[0], rtol=0, atol=1e-6)
    assert 32 * problem.features * 4 <= bits <= (32 * problem.features + 8 * 4) * 4
    assert sum(later) / len(later) < bits / 2


def test_contributions_sum_to_the_gradient() -> None:
    problem = made.problem()
    begun = make_workers(problem, GD, workers=7)
    begun.round()
    torch.testing.assert_close(sum(begun.contributions()).double(), problem.gradient(begun.theta), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def best() -> Optimum:
    return optimum(made.problem(), 1e-8)


def test_run_ends_at_the_target(best: Optimum) -> None:
    problem, seen = made.problem(), []
    settings = Settings(4, 1e-6, 10_000)
    ran = descend(problem, best, method(GD, problem.smoothness), settings, lambda *given: seen.append(given))
    assert ran.reached
    assert ran.errors[-1] <= 1e-6 < ran.errors[-2]
    assert len(ran.errors) == len(ran.bits) == ran.rounds + 1
    assert ran.uplink_bits == 32 * problem.features * 4 * ran.rounds
    assert seen == list(enumerate(ran.errors))[1:]
    assert ran.errors[0] == pytest.approx(math.log(2) - best.value)


def test_gd_sec_saves_bits() -> None:
    problem, settings = made.problem(l2=0.001), Settings(4, 1e-8, float64=True)
    best = optimum(problem, settings.target)
    gd, sec = (descend(problem, best, method(one, problem.smoothness), settings) for one in (GD, SEC))
    assert sec.reached
    assert sec.uplink_bits < 0.2 * gd.uplink_bits
    assert sec.rounds < 2 * gd.rounds


def test_run_ends_at_its_limit_of_rounds(best: Optimum) -> None:
    problem = made.problem()
    ran = descend(problem, best, method(GD, problem.smoothness), Settings(4, 1e-12, 5))
    assert (ran.rounds, ran.reached) == (5, False)
    assert Settings(4, 1e-12).after(ran).max_rounds == MIN_ROUNDS_LIMIT
    assert Settings(4, 1e-12).after(replace(ran, errors=(1.0,) * 1001)).max_rounds == ROUNDS_FACTOR * 1000
    assert Settings(4, 1e-12, 7).after(ran).max_rounds == 7


def test_diverging_run_ends() -> None:
    problem = made.problem("linear")
    best = optimum(problem, 1e-8)
    vars(problem)["smoothness"] = problem.smoothness / 10  # steps far too long
    ran = descend(problem, best, method(GD, 1.0), Settings(4, 1e-6, 10_000))
    assert not ran.reached
    assert ran.rounds < 100


def test_xi_is_in_units_of_the_smoothness() -> None:
    deep = method(
        "Recipe(what=gradient_differences(0.01), how=error_feedback(chain(difference_threshold(3), cast('bf16'))))",
        2.0,
    )
    assert "difference_threshold(6.0)" in str(deep.recipe)
    assert method(SEC, 0.5).recipe.how == method("gd_sec(beta=0.01, xi=50)", 1.0).recipe.how
    assert method("gd_sec(groups=2)", 1.0).recipe.what.groups == 2  # type: ignore[attr-defined]


def test_unstable_threshold_gives_a_warning() -> None:
    warned = method("gd_sec(beta=0.03, xi=100)", 7.0).warning
    assert warned is not None
    assert "alpha * beta * xi = 3 " in warned
    assert method(SEC, 7.0).warning is None
    assert method(GD, 7.0).warning is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("async_sgd", "workers do not wait"),
        ("local_sgd(every=4)", "does not exchange gradients"),
        ("gradient_sharing", "does not exchange gradients"),
        ("gdd", "no recipe or answer is called"),
        ("gd_sec(xi=", "cannot be read: something is missing at the end"),
        ("top_k(0.1)", "not a recipe"),
    ],
)
def test_unsuitable_recipe_is_refused(text: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason) as raised:
        method(text, 1.0)
    assert "--method" in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (Settings(0, 1e-6), "workers can't be 0"),
        (Settings(made.ROWS + 1, 1e-6), f"from 1 to the {made.ROWS} rows"),
        (Settings(1, 0.0), "target can't be 0"),
        (Settings(1, math.nan), "target can't be nan"),
        (Settings(1, math.inf), "target can't be inf"),
        (Settings(1, 1e-6, 0), "rounds can't be 0"),
    ],
)
def test_bad_settings_are_refused(settings: Settings, reason: str) -> None:
    with pytest.raises(LaunchError, match=reason):
        settings.check(made.problem())
    Settings(made.ROWS, 1e-6, 1).check(made.problem())


def test_coroutines_run_in_lockstep() -> None:
    def coroutine(x: Tensor):  # type: ignore[no-untyped-def]
        mean = yield AllReduceMean(x.clone())
        mean += 1  # each worker gets a mean of its own
        told = yield AllGather(x[:1].clone())
        return mean + torch.cat(list(told)).sum()

    agreed, bits = run_lockstep([coroutine(torch.tensor([1.0, 2.0])), coroutine(torch.tensor([3.0, 4.0]))])
    assert agreed.tolist() == [4 + 1 + 4, 6 + 1 + 4]
    assert bits == 2 * 32 * (2 + 1)


def test_different_operations_in_one_step_are_refused() -> None:
    def coroutine(ask: object):  # type: ignore[no-untyped-def]
        return (yield ask)

    with pytest.raises(TransportError):
        run_lockstep([coroutine(AllReduceMean(torch.ones(1))), coroutine(AllGather(torch.ones(1)))])


@pytest.mark.parametrize(
    "text", ["ef21(top_k(0.2))", "quantised_gd_sec", "censoring(xi=1)", "power_sgd", "gd_soec(xi=1)"]
)
def test_recipes_of_the_package_make_progress(text: str) -> None:
    problem = made.problem()
    way, bits = walk(make_workers(problem, text), 20)
    assert bool(way.isfinite().all())
    assert problem.objective(way[-1]) < problem.objective(torch.zeros(problem.features, dtype=torch.float64))
    assert all(isinstance(one, int) for one in bits)
    assert isinstance(method(text, 1.0), Method)
