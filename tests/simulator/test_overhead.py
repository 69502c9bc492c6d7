"""Rounds as rare as keeps the time of exchanges below a fraction: simulated workers of unequal speed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from simulator.harness import Ended, simulated
from thread_workers import regression, training

from stretto.report import interval_section, run_log
from stretto.report.html_report import write
from stretto.simulator.engine import CostModel

NET = "100Mbit/s 5ms"
STEPS = 240


def trained(recipe: str, step_s: float, speed: str = "1,1,2", **more: Any) -> Ended:
    work = training(regression(2 * 3 * STEPS), 2, epochs=1, shuffle=True)
    return simulated(3, work, recipe, net=NET, speed=speed, cost_model=CostModel(step_s), **more)


def rounds_of(ended: Ended) -> int:
    """Return the number of exchanges, which is the same at all workers."""
    (rounds,) = {one["rounds"] for one in ended.of("end")}
    return int(rounds)


@pytest.mark.parametrize(("step_s", "fraction"), [(0.01, 0.1), (0.01, 0.3), (0.1, 0.1), (0.003, 0.5)])
@pytest.mark.parametrize("recipe", ["local_sgd(every={})", "diloco(every={})"])
def test_exchanges_take_the_fraction_of_the_slowest_worker(recipe: str, step_s: float, fraction: float) -> None:
    """No larger number of steps than that is chosen: one round less in each ten would keep the fraction, too."""
    ended = trained(recipe.format(f"overhead({fraction})"), step_s)
    spent = max((one["time_breakdown"] for one in ended.of("end")), key=lambda one: one["computing"])
    assert spent["computing"] == pytest.approx(STEPS * 2 * step_s)
    part = spent["exchanging"] / (spent["exchanging"] + spent["computing"])
    assert part < 1.3 * fraction  # the first rounds follow each other sooner
    assert rounds_of(ended) == STEPS or part > 0.6 * fraction
    assert all(torch.equal(one, ended.found[0]) for one in ended.found)


def test_the_page_names_the_local_steps_on_which_the_workers_have_agreed(tmp_path: Path) -> None:
    ended = trained("local_sgd(every=overhead(0.1))", 0.005, folder=tmp_path)
    agreed = [one["local_steps"] for one in ended.of("interval")]
    assert {one["process"] for one in ended.of("interval")} == {"worker 0"}
    assert all(before != after for before, after in itertools.pairwise([1, *agreed]))
    (sheet,) = interval_section.sheets(run_log.read(tmp_path / "run"))
    assert [row[2].text for row in sheet.rows] == list(map(str, agreed[-len(sheet.rows) :]))
    assert float(sheet.rows[-1][5].text.rstrip("%")) <= 10
    assert interval_section.INTERVAL in write(tmp_path / "run").read_text()


def test_rounds_are_rarer_on_a_slower_network_and_more_frequent_with_slower_steps() -> None:
    often, seldom = (rounds_of(trained("local_sgd(every=overhead(0.1))", step_s)) for step_s in (0.1, 0.005))
    assert seldom < often / 3


def test_a_round_of_equal_length_is_as_typed_and_repeatable() -> None:
    """The numbers of steps follow from what the workers have sent each other, so a simulation repeats them."""
    first, second = (trained("local_sgd(every=overhead(0.1))", 0.01, "lognormal(0.3, each=step)") for _ in range(2))
    assert first.log == second.log
    assert first.final == second.final


@pytest.mark.parametrize("fault", ["kill worker 1 at 0.9s", "kill worker 0 at 1.4s, back after 40ms"])
def test_workers_that_fail_and_join_keep_to_the_rounds_of_the_others(fault: str) -> None:
    ended = trained("local_sgd(every=overhead(0.1))", 0.01, fault=fault)
    (counts,) = (one["sample_counts"] for one in ended.of("epoch"))
    assert (counts["once"], counts["twice"]) == (2 * 3 * STEPS, 0)
    found = [one for one in ended.found if one is not None]
    assert all(torch.equal(one, found[0]) for one in found)
