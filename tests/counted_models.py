"""Models that count how often each sample was trained: a row for each sample, a column for each epoch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor


def assert_none_is_lost(counts: Tensor, epochs: Iterable[Mapping[str, Any]]) -> None:
    """Assert that a model lacks only samples that the epoch after their own has recovered, by the events of epochs."""
    seen = {one["epoch"]: one["sample_counts"] for one in epochs}
    lost = dict(enumerate((counts == 0).sum(0).tolist(), 1))
    recovered = {epoch: seen.get(epoch + 1, {}).get("recovered_samples", 0) for epoch in seen}
    assert all(lost[epoch] <= recovered[epoch] for epoch in seen), (lost, recovered)
