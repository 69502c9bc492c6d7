"""A loader made anew gives what torch's would, and draws what torch's draws."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from stretto.train.batches import rebuilt

KINDS = [torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex64]


def rows(count: int, kind: torch.dtype) -> torch.Tensor:
    return torch.arange(3 * count).remainder(251).view(count, 3).to(kind)


@given(
    st.lists(st.lists(st.integers(-20, 19), min_size=1, max_size=9), min_size=1, max_size=5),
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
)
def test_rows_of_a_tensor_data_set_are_those_taken_one_by_one(batches: list, kinds: list) -> None:
    data = TensorDataset(*(rows(20, kind) for kind in kinds))
    plain = DataLoader(data, batch_sampler=batches)
    again = rebuilt(plain, batches, 0)  # type: ignore[arg-type]
    for one, other in zip(plain, again, strict=True):
        assert type(one) is type(other)
        assert len(one) == len(other)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_as_much_is_drawn_as_torch_draws(generator: torch.Generator | None) -> None:
    data = TensorDataset(torch.arange(20))
    plain = DataLoader(data, batch_size=5, shuffle=True, generator=generator)
    drawn, states = generator or torch.default_generator, []
    for loader in (plain, rebuilt(plain, BatchSampler(SequentialSampler(data), 5, False), 0)):
        drawn.manual_seed(3)
        iter(loader)
        states.append(drawn.get_state())
    assert torch.equal(*states)


def test_a_batch_is_the_scripts_own() -> None:
    data = TensorDataset(torch.zeros(4, 2))
    loader = rebuilt(DataLoader(data), [[0, 1]], 0)  # type: ignore[arg-type]
    next(iter(loader))[0].fill_(1)
    assert not data.tensors[0].any()
