"""Messages in which the workers tell each other which samples they trained."""

from __future__ import annotations

import numpy as np

from stretto.training.evaluator import _encoded_counts


def test_counts_of_a_worker_that_trained_few_of_many_samples_are_a_short_message() -> None:
    """Every worker holds those of all: with a bit a sample, a thousand workers held 16 GB in one process."""
    counted = np.zeros(1_000_000, np.uint8)
    counted[np.random.default_rng(0).choice(counted.size, 1000, replace=False)] = 1
    assert len(_encoded_counts(counted, {0: 1000})) < 6000
    departed = np.ones_like(counted)
    assert len(_encoded_counts(counted, {0: 1000}, (0, departed, {1: 1_000_000}))) < 7000
