"""The memory of each process of a worker is its part of the model's, the layers that it runs, and the activations."""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_memory import memory

pytestmark = [
    pytest.mark.plain_processes,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="a peak is read from /proc"),
]


@pytest.mark.long
def test_a_process_of_a_sharded_worker_has_its_part_of_the_memory(tmp_path: Path) -> None:
    layout = ("-n", "2", "--layout", "sharded(2)")
    (alone,) = memory(tmp_path, "-n", "1")
    found = memory(tmp_path, *layout)[0]
    peak = found.peak - memory(tmp_path, *layout, width=16)[0].peak  # without what belongs to no model
    activations = alone.peak - 4 * alone.model  # beside parameters, gradients, and two numbers of AdamW for each
    expected = (4 * alone.model + activations) / 2 + 4 * alone.layer  # two layers with their gradients are whole
    print(f"{alone.peak:.0f} MB in one process, {peak:.0f} in each of two; {expected:.0f} expected")
    assert peak < 1.1 * expected


@pytest.mark.long
@pytest.mark.parametrize("stages", [2, 4])
def test_each_process_of_a_pipeline_has_its_part_of_the_memory(tmp_path: Path, stages: int) -> None:
    """From the second step on: in the first each process has had the whole model."""
    layout = ("-n", str(stages), "--layout", f"pipeline({stages})")
    around = memory(tmp_path, *layout, first_step=1, width=16)[0].peak  # what belongs to no model
    (alone,) = memory(tmp_path, "-n", "1", first_step=1, width=1024)
    ranks = memory(tmp_path, *layout, first_step=1, width=1024)
    assert sum(one.held for one in ranks) == pytest.approx(alone.model)
    activations = alone.peak - 4 * alone.model
    for rank, one in enumerate(ranks):
        expected = one.held / alone.model * (4 * alone.model + activations)
        print(f"rank {rank}: {one.peak - around:.0f} MB, {expected:.0f} expected, of {alone.peak:.0f} MB alone")
        assert one.peak - around < 1.1 * expected
