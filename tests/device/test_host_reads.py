"""Reads of the host in a step, each of which waits until a GPU has computed: a bound for each kind of recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
from device_runs import REFUSING, results

BOUNDS = {
    "allreduce": [1] * 12,
    'allreduce(how=cast("bf16"))': [1] * 12,
    "power_sgd": [9] * 12,
    "local_sgd(every=3)": [0, 0, 4] * 4,
    "diloco(every=3)": [0, 0, 4] * 4,
    "gossip(every=3)": [0, 0, 4] * 4,
    "downpour(every=3)": [0, 0, 5] * 4,
}
"""Reads in each of twelve steps. Under `allreduce` that of the counts, which tell if a worker trains other parameters.

At the end of a round: is the mean finite, has a worker changed what it trains; at intervals, norms and distances.
"""


def test_a_step_waits_for_the_device_a_bounded_number_of_times(tmp_path: Path) -> None:
    for worker in results("host_reads", 2, tmp_path / "far", "far:0", list(BOUNDS), REFUSING):
        errors = [one["error"] for one in worker.values() if "error" in one]
        assert not errors, errors[0]
        reads = {recipe: [sum(step.values()) for step in one["facts"]["steps"]] for recipe, one in worker.items()}
        assert not {recipe: found for recipe, found in reads.items() if not _is_within(found, BOUNDS[recipe])}


@pytest.mark.parametrize(("step", "done"), [(2, 3), (6, 6)], ids=["in an epoch", "in its last step"])
def test_a_nan_is_reported_with_its_step_after_the_next_one(step: int, done: int, tmp_path: Path) -> None:
    (alone,) = results("not_finite", 1, tmp_path / "far", "far:0", [str(step)], REFUSING)
    assert "facts" in alone[str(step)], alone
    assert f"is not finite at step {step} on worker 0" in alone[str(step)]["facts"]["error text"]
    assert alone[str(step)]["facts"]["steps"] == done


def _is_within(found: list[int], bounds: list[int]) -> bool:
    """Return True if the steps of each round of three, in any order, stay within the bounds.

    A worker that does not wait for the other one may have had fewer than twelve steps.
    """
    rounds = [zip(sorted(found[at : at + 3]), sorted(bounds[:3]), strict=True) for at in range(0, len(found) - 2, 3)]
    return all(number <= bound for one in rounds for number, bound in one)
