"""Gradient descent over workers is gradient descent, and what it says is counted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from bits import made
from torch import Tensor

from stretto.bits.methods import Method, method
from stretto.bits.optimum import Optimum, optimum
from stretto.bits.outcome import GD
from stretto.bits.problem import Kind, Problem
from stretto.bits.work import AT_LEAST, LATE, Team, Terms, descend, hold
from stretto.collective_ops import AllGather, AllReduceMean
from stretto.errors import LaunchError, RecipeError, TransportError

pytest.importorskip("scipy")

SEC = "gd_sec(beta=0.01, xi=100)"


def team(problem: Problem, text: str, workers: int = 4, double: bool = True) -> Team:
    return Team(problem, method(text, problem.smoothness), workers, double=double)


def walk(team: Team, rounds: int) -> tuple[Tensor, list[int]]:
    """The way of theta, and the bits of each round."""
    way, bits = [], []
    for _ in range(rounds):
        bits.append(team.round())
        way.append(team.theta.clone())
    return torch.stack(way), bits


def by_hand(problem: Problem, rounds: int) -> Tensor:
    theta, way = torch.zeros(problem.wide, dtype=torch.float64), []
    for _ in range(rounds):
        theta = problem.proximal(theta - problem.gradient(theta) / problem.smoothness, 1 / problem.smoothness)
        way.append(theta)
    return torch.stack(way)


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("workers", [1, 4, 7])
def test_gd_is_gradient_descent_by_hand(kind: Kind, workers: int) -> None:
    problem = made.problem(kind)
    for double, near in ((True, 1e-6), (False, 1e-5)):  # contributions are rounded to float32 in both
        way, bits = walk(team(problem, GD, workers, double), 50)
        torch.testing.assert_close(way.double(), by_hand(problem, 50), rtol=0, atol=near)
        assert bits == [32 * problem.wide * workers] * 50


@pytest.mark.parametrize("beta", [0.0, 0.01, 0.5, 1.0])
def test_without_a_threshold_gd_sec_is_gd(beta: float) -> None:
    problem = made.problem()
    expected, _ = walk(team(problem, GD), 60)
    way, _ = walk(team(problem, f"gd_sec(beta={beta}, xi=0)"), 60)
    torch.testing.assert_close(way, expected, rtol=0, atol=1e-6)


def test_the_first_round_of_gd_sec_says_everything() -> None:
    problem = made.problem()
    (first, *_), (bits, *later) = walk(team(problem, SEC), 30)
    torch.testing.assert_close(first, by_hand(problem, 1)[0], rtol=0, atol=1e-6)
    assert 32 * problem.wide * 4 <= bits <= (32 * problem.wide + 8 * 4) * 4
    assert sum(later) / len(later) < bits / 2


def test_contributions_sum_to_the_gradient() -> None:
    problem = made.problem()
    begun = team(problem, GD, workers=7)
    begun.round()
    torch.testing.assert_close(sum(begun.contributions()).double(), problem.gradient(begun.theta), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def best() -> Optimum:
    return optimum(made.problem(), 1e-8)


def test_a_run_ends_at_the_target(best: Optimum) -> None:
    problem, seen = made.problem(), []
    terms = Terms(4, 1e-6, 10_000)
    ran = descend(problem, best, method(GD, problem.smoothness), terms, lambda *given: seen.append(given))
    assert ran.reached
    assert ran.errors[-1] <= 1e-6 < ran.errors[-2]
    assert len(ran.errors) == len(ran.bits) == ran.rounds + 1
    assert ran.uplink_bits == 32 * problem.wide * 4 * ran.rounds
    assert seen == list(enumerate(ran.errors))[1:]
    assert ran.errors[0] == pytest.approx(math.log(2) - best.value)


def test_gd_sec_saves_bits() -> None:
    problem, terms = made.problem(l2=0.001), Terms(4, 1e-8, double=True)
    best = optimum(problem, terms.target)
    gd, sec = (descend(problem, best, method(one, problem.smoothness), terms) for one in (GD, SEC))
    assert sec.reached
    assert sec.uplink_bits < 0.2 * gd.uplink_bits
    assert sec.rounds < 2 * gd.rounds


def test_a_run_ends_at_its_limit(best: Optimum) -> None:
    problem = made.problem()
    ran = descend(problem, best, method(GD, problem.smoothness), Terms(4, 1e-12, 5))
    assert (ran.rounds, ran.reached) == (5, False)
    assert Terms(4, 1e-12).after(ran).most == AT_LEAST
    assert Terms(4, 1e-12).after(replace(ran, errors=(1.0,) * 1001)).most == LATE * 1000
    assert Terms(4, 1e-12, 7).after(ran).most == 7


def test_a_run_that_diverges_ends() -> None:
    problem = made.problem("linear")
    best = optimum(problem, 1e-8)
    vars(problem)["smoothness"] = problem.smoothness / 10  # steps far too long
    ran = descend(problem, best, method(GD, 1.0), Terms(4, 1e-6, 10_000))
    assert not ran.reached
    assert ran.rounds < 100


def test_xi_is_in_units_of_the_smoothness() -> None:
    deep = method(
        "Recipe(what=gradient_differences(0.01), how=error_feedback(chain(difference_threshold(3), cast('bf16'))))", 2.0
    )
    assert "difference_threshold(6.0)" in str(deep.recipe)
    assert method(SEC, 0.5).recipe.how == method("gd_sec(beta=0.01, xi=50)", 1.0).recipe.how
    assert method("gd_sec(groups=2)", 1.0).recipe.what.groups == 2  # type: ignore[attr-defined]


def test_an_unsteady_threshold_is_warned_of() -> None:
    warned = method("gd_sec(beta=0.03, xi=100)", 7.0).warning
    assert warned is not None
    assert "alpha * beta * xi = 3 " in warned
    assert method(SEC, 7.0).warning is None
    assert method(GD, 7.0).warning is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("async_sgd", "nobody waits"),
        ("local_sgd(every=4)", "does not exchange gradients"),
        ("gradient_sharing", "does not exchange gradients"),
        ("gdd", "no recipe or answer is called"),
        ("gd_sec(xi=", "not a recipe"),
        ("top_k(0.1)", "not a recipe"),
    ],
)
def test_what_is_no_method_is_refused(text: str, reason: str) -> None:
    with pytest.raises(RecipeError, match=reason) as raised:
        method(text, 1.0)
    assert "--method" in str(raised.value)


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        (Terms(0, 1e-6), "workers can't be 0"),
        (Terms(made.ROWS + 1, 1e-6), f"from 1 to the {made.ROWS} rows"),
        (Terms(1, 0.0), "target can't be 0"),
        (Terms(1, math.nan), "target can't be nan"),
        (Terms(1, math.inf), "target can't be inf"),
        (Terms(1, 1e-6, 0), "rounds can't be 0"),
    ],
)
def test_what_cannot_be_run_is_refused(terms: Terms, reason: str) -> None:
    with pytest.raises(LaunchError, match=reason):
        terms.check(made.problem())
    Terms(made.ROWS, 1e-6, 1).check(made.problem())


def test_a_conversation_is_held_turn_by_turn() -> None:
    def talk(x: Tensor):  # type: ignore[no-untyped-def]
        mean = yield AllReduceMean(x.clone())
        mean += 1  # each has an answer of its own
        told = yield AllGather(x[:1].clone())
        return mean + torch.cat(list(told)).sum()

    agreed, bits = hold([talk(torch.tensor([1.0, 2.0])), talk(torch.tensor([3.0, 4.0]))])
    assert agreed.tolist() == [4 + 1 + 4, 6 + 1 + 4]
    assert bits == 2 * 32 * (2 + 1)


def test_workers_that_say_different_things_are_found() -> None:
    def talk(ask: object):  # type: ignore[no-untyped-def]
        return (yield ask)

    with pytest.raises(TransportError):
        hold([talk(AllReduceMean(torch.ones(1))), talk(AllGather(torch.ones(1)))])


@pytest.mark.parametrize(
    "text", ["ef21(top_k(0.2))", "quantised_gd_sec", "censoring(xi=1)", "power_sgd", "gd_soec(xi=1)"]
)
def test_the_package_s_recipes_run(text: str) -> None:
    problem = made.problem()
    way, bits = walk(team(problem, text), 20)
    assert bool(way.isfinite().all())
    assert problem.objective(way[-1]) < problem.objective(torch.zeros(problem.wide, dtype=torch.float64))
    assert all(isinstance(one, int) for one in bits)
    assert isinstance(method(text, 1.0), Method)
