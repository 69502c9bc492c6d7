"""A rebuilt loader gives the batches of torch's loader, and draws the same random numbers."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from stretto.loader.epoch_order import rebuilt

KINDS = [torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex64]


def rows(count: int, kind: torch.dtype) -> torch.Tensor:
    return torch.arange(3 * count).remainder(251).view(count, 3).to(kind)


@given(
    st.lists(st.lists(st.integers(-20, 19), min_size=1, max_size=9), min_size=1, max_size=5),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
)
def test_rows_of_a_tensor_data_set_equal_rows_taken_one_by_one(batches: list, kinds: list) -> None:
    data = TensorDataset(*(rows(20, kind) for kind in kinds))
    plain = DataLoader(data, batch_sampler=batches)
    again = rebuilt(plain, batches, 0)  # type: ignore[arg-type]
    for one, other in zip(plain, again, strict=True):
        assert type(one) is type(other)
        assert len(one) == len(other)
        assert all(alike(a, b) for a, b in zip(one, other, strict=True))


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors are equal in dtype, values and strides."""
    return one.dtype == other.dtype and torch.equal(one, other) and one.stride() == other.stride()


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int64, torch.tensor, lambda row: slice(row, row + 2)])
def test_indices_of_other_types_are_handled_as_by_torch(kind: Callable[[int], object]) -> None:
    data, batches = TensorDataset(rows(20, torch.float32)), [[kind(row) for row in (3, 0, 7)]]
    plain = DataLoader(data, batch_sampler=batches)  # type: ignore[arg-type]
    ((one,), (other,)) = next(iter(plain)), next(iter(rebuilt(plain, batches, 0)))  # type: ignore[arg-type]
    assert alike(one, other)


def test_rows_of_a_permuted_tensor_are_stacked() -> None:
    data = TensorDataset(torch.randn(6, 4, 5, 3).permute(0, 3, 1, 2))
    plain = DataLoader(data, batch_size=2)
    ((one,), (other,)) = next(iter(plain)), next(iter(rebuilt(plain, [[0, 1]], 0)))  # type: ignore[arg-type]
    assert alike(one, other)


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_as_many_random_numbers_are_drawn_as_by_torch(generator: torch.Generator | None) -> None:
    data = TensorDataset(torch.arange(20))
    plain = DataLoader(data, batch_size=5, shuffle=True, generator=generator)
    drawn, states = generator or torch.default_generator, []
    for loader in (plain, rebuilt(plain, BatchSampler(SequentialSampler(data), 5, False), 0)):
        drawn.manual_seed(3)
        iter(loader)
        states.append(drawn.get_state())
    assert torch.equal(*states)


def test_a_batch_shares_no_memory_with_the_data_set() -> None:
    data = TensorDataset(torch.zeros(4, 2))
    loader = rebuilt(DataLoader(data), [[0, 1]], 0)  # type: ignore[arg-type]
    next(iter(loader))[0].fill_(1)
    assert not data.tensors[0].any()
