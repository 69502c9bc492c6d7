"""The order of an epoch: what torch's loader draws, sent to other workers as the state of a random generator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace as changed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from stretto.errors import LoaderError
from stretto.loader.epoch_order import EpochOrder, Permutation, draw, pack, parted, unpack
from stretto.transport.single_worker import SingleWorkerTransport


class _Named(Sampler[Any]):
    """Indices that are no numbers."""

    def __iter__(self) -> Iterator[Any]:
        return iter([3, ("a", 1), ("b", (2, 3)), "c", 1 << 63])


class _Arrays(Sampler[Any]):
    """Indices of NumPy and of torch."""

    def __iter__(self) -> Iterator[Any]:
        return iter([*np.random.permutation(11), *torch.randperm(5)])


LOADERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "shuffled": lambda _: {"shuffle": True, "batch_size": 8},
    "drop_last": lambda _: {"shuffle": True, "batch_size": 8, "drop_last": True},
    "in order": lambda _: {"batch_size": 3},
    "without batches": lambda _: {"batch_size": None, "shuffle": True},
    "own generator": lambda _: {"shuffle": True, "batch_size": 3, "generator": torch.Generator().manual_seed(1)},
    "replacement": lambda data: {"batch_size": 4, "sampler": RandomSampler(data, replacement=True)},
    "more than once": lambda data: {"batch_size": 4, "sampler": RandomSampler(data, num_samples=3 * len(data))},
    "weighted": lambda data: {"batch_size": 4, "sampler": WeightedRandomSampler([1.0] * len(data), len(data))},
    "subset": lambda data: {"batch_size": 4, "sampler": SubsetRandomSampler(range(0, len(data), 2))},
    "arrays": lambda _: {"batch_size": 4, "sampler": _Arrays()},
    "names": lambda _: {"batch_size": 2, "sampler": _Named()},
    "lists": lambda _: {"batch_sampler": [[0, 0], [0]]},
    "batches of a sampler": lambda data: {"batch_sampler": BatchSampler(RandomSampler(data), 5, drop_last=False)},
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("samples", [1, 5, 64, 67])
def test_order_is_what_torch_draws_and_so_are_the_random_states_afterwards(kind: str, samples: int) -> None:
    data = TensorDataset(torch.arange(samples))

    def loader() -> DataLoader[Any]:
        torch.manual_seed(3)
        np.random.seed(3)
        return DataLoader(data, **LOADERS[kind](data))

    def states(of: DataLoader[Any]) -> list[Any]:
        own = of.generator.get_state().tolist() if of.generator is not None else None
        return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), own]  # type: ignore[union-attr]

    torchs = loader()
    batches: Any = torchs.batch_sampler if torchs.batch_sampler is not None else torchs.sampler
    expected = [list(batch) if isinstance(batch, list) else [batch] for batch in batches]
    expected_states = states(torchs)
    ours = loader()
    order = draw(ours, SingleWorkerTransport(), 1)
    assert states(ours) == expected_states
    for found in (order, unpack(pack(order))):
        assert [found.batch(number) for number in range(len(found.sizes))] == expected
        assert {type(index) for index in found.indices(0, found.bounds[-1])} <= {int, str, tuple}


def test_millions_of_samples_are_drawn_again_in_place_of_being_sent() -> None:
    samples = 4_000_000
    loader = DataLoader(range(samples), batch_size=32, shuffle=True)  # type: ignore[arg-type]
    order = draw(loader, SingleWorkerTransport(), 1)
    message = pack(order)
    assert len(message) < 6_000
    received = unpack(message)
    assert received.flat.nbytes == 4 * samples and (received.flat == order.flat).all()
    assert (received.bounds, received.dropped) == (order.bounds, 0)


def test_another_draw_of_another_version_of_torch_is_refused() -> None:
    order = draw(DataLoader(range(10), shuffle=True), SingleWorkerTransport(), 1)  # type: ignore[arg-type]
    assert order.permutation is not None
    other = changed(order.permutation, checksum=order.permutation.checksum ^ 1)
    with pytest.raises(LoaderError, match="another order of the samples"):
        other.repeated()


@pytest.mark.parametrize("flat", [list(range(10)), list("abcdefghij")])
def test_samples_that_are_appended_and_batches_that_are_parted_stay_in_order(flat: list[Any]) -> None:
    order = EpochOrder.of([flat[:4], flat[4:8], flat[8:]])
    further = order.appended([flat[0], flat[9]])
    assert further.indices(0, 12) == [*flat, flat[0], flat[9]] and further.sizes == [4, 4, 2, 2]
    found, done = parted(order, ((1, 4), (6, 8)))
    assert [found.batch(number) for number in range(5)] == [flat[:1], flat[1:4], flat[4:6], flat[6:8], flat[8:]]
    assert done == [0, 2, 4]


def test_order_after_more_samples_holds_what_no_worker_can_draw() -> None:
    order = draw(DataLoader(range(10), shuffle=True), SingleWorkerTransport(), 1)  # type: ignore[arg-type]
    assert isinstance(order.permutation, Permutation)
    further = unpack(pack(order.appended([3, 4])))
    assert further.permutation is None and further.indices(0, 12) == [*order.indices(0, 10), 3, 4]
