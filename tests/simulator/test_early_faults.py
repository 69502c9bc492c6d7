"""Faults before the scripts call `distribute`, when the recipe is not known yet."""

from __future__ import annotations

import pytest
from combinations import each_value
from simulator.failures import ALL, NET, THROUGH, seen, told
from simulator.harness import Ended, simulated

from stretto.errors import LaunchError

RECIPES = ["allreduce", THROUGH, "async_sgd(shards=2)", "stale_synchronous(bound=1)"]
SLEEPY = """
    import time
    import torch
    from thread_workers import regression, small_net
    from torch import nn
    from torch.utils.data import DataLoader
    import stretto

    time.sleep({nap_s})
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = DataLoader(regression(41), batch_size=4, shuffle=True)
    loader = stretto.distribute(net, optimizer, loader, recipe={recipe!r})
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
"""
"""A script that works for some time before it calls `distribute`."""


def slept(nap_s: float, recipe: str, fault: str, is_ordered: bool = False, **more: object) -> Ended:
    script = SLEEPY.format(nap_s=nap_s, recipe=recipe)
    return simulated(3, script, recipe if is_ordered else None, net=NET, fault=fault, **more)  # type: ignore[arg-type]


def struck(ended: Ended) -> list[tuple[str, str]]:
    """Return the process and the text of each fault."""
    return [(one["process"], one["text"]) for one in ended.of("fault_injected")]


@pytest.mark.parametrize(("recipe", "is_ordered"), each_value(RECIPES, [True, False]))
def test_script_may_start_later_than_the_failure_timeout(recipe: str, is_ordered: bool) -> None:
    ended = slept(15, recipe, "kill worker 1 at 1h", is_ordered)
    assert seen(ended) == [ALL, ALL]
    assert not told(ended, "failed")


@pytest.mark.parametrize(("recipe", "is_ordered"), each_value(RECIPES, [True, False]))
def test_failure_is_handled_as_the_recipe_requires_wherever_it_is_named(recipe: str, is_ordered: bool) -> None:
    """The worker is killed before or after the scripts name the recipe."""
    for at in ("100ms", "540ms"):
        for back in ("", ", back after 20ms"):
            ended = slept(0.5, recipe, f"kill worker 1 at {at}{back}", is_ordered)
            assert seen(ended) == [ALL, ALL]
            assert told(ended, "failed") == [(1, 0)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_each_failed_incarnation_is_reported(recipe: str) -> None:
    ended = slept(0.15, recipe, "kill worker 2 at 10ms, back after 1ms; kill worker 2 at 40ms, back after 1ms")
    assert told(ended, "failed") == [(2, 0), (2, 1)]
    assert seen(ended) == [ALL, ALL]


def test_kill_of_all_workers_before_the_recipe_is_known_ends_with_one_error() -> None:
    with pytest.raises(LaunchError, match="too few workers are left"):
        slept(0.1, "async_sgd", "kill workers 0-2 at 50ms")


@pytest.mark.parametrize("seed", range(4))
def test_server_drawn_before_the_recipe_is_known_exists(seed: int) -> None:
    ended = slept(0.1, "async_sgd(shards=2)", "kill server at 10ms", seed=seed)
    ((process, text),) = struck(ended)
    assert process in ("server 0", "server 1")
    assert text == f"killed: {process}"
    assert told(ended, "failed") == [(process, 0)]
    assert seen(ended) == [ALL, ALL]


@pytest.mark.parametrize(("who", "seed"), each_value(["server", "server 0"], range(4)))
def test_link_slowed_before_the_server_exists_stays_slow(who: str, seed: int) -> None:
    """The link has its full speed again after the fault."""
    slow = f"slow link of {who} by 1000 for {{}} at 10ms; kill worker 1 at 1h"
    faults = "kill worker 1 at 1h", slow.format("200ms"), slow.format("30ms")
    plain, early, late = (slept(0.05, "async_sgd", fault, seed=seed).seconds for fault in faults)
    assert plain + 0.1 < early < plain + 0.2
    assert late == plain


def test_overlapping_pauses_of_a_server_last_until_the_last_ends() -> None:
    """A server drawn while the number of servers was unknown."""
    fault = "pause server for 300ms at 70ms; pause server for 30ms at 80ms"
    both, one = (slept(0.05, "async_sgd", text).seconds for text in (fault, "pause server 0 for 300ms at 70ms"))
    assert both == one
