"""Reads of the host in a step, each of which waits until a GPU has computed: a bound for each kind of recipe."""

from __future__ import annotations

from pathlib import Path

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
    (first, _) = results("host_reads", 2, tmp_path / "far", "far:0", list(BOUNDS), REFUSING)
    errors = [one["error"] for one in first.values() if "error" in one]
    assert not errors, errors[0]
    reads = {recipe: [sum(step.values()) for step in one["facts"]["steps"]] for recipe, one in first.items()}
    assert not {recipe: found for recipe, found in reads.items() if not _is_within(found, BOUNDS[recipe])}


def _is_within(found: list[int], bounds: list[int]) -> bool:
    """Return True if the steps of each round of three, in any order, stay within the bounds."""
    rounds = [zip(sorted(found[at : at + 3]), sorted(bounds[at : at + 3]), strict=True) for at in range(0, 12, 3)]
    return all(number <= bound for one in rounds for number, bound in one)
