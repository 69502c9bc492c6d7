"""The split of a model is the best one, by its measured costs."""

from __future__ import annotations

import errno
import itertools
import tempfile
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stage_threads import in_threads
from staged_net import make_net, words
from torch import Tensor, nn

from stretto.errors import ModelError
from stretto.parallel import measure
from stretto.parallel.calls import Calls, record_calls
from stretto.parallel.link import CPU, Link
from stretto.parallel.mapped_tables import SMALL_BYTES, moved_to_file
from stretto.parallel.measure import PROBE_BYTES, measured_costs, measured_hop, stage_memory
from stretto.parallel.schedule import Hop
from stretto.parallel.split import Costs, best_split, measured_split, next_best


@st.composite
def costs(draw: st.DrawFn) -> tuple[Costs, list[int]]:
    """Return costs of up to 12 calls, and the calls at which they can be cut."""
    calls = draw(st.integers(2, 12))
    seconds = draw(st.lists(st.integers(0, 9).map(float), min_size=calls, max_size=calls))
    held = draw(st.lists(st.integers(0, 3), min_size=calls, max_size=calls))
    cuts = draw(st.lists(st.integers(1, calls - 1), unique=True).map(sorted))
    sending_s = {cut: float(draw(st.integers(0, 12))) for cut in cuts}
    kept = draw(st.lists(st.integers(0, 3), min_size=calls, max_size=calls))
    memory = draw(st.none() | st.lists(st.integers(2, 30), min_size=12, max_size=12))
    return Costs(seconds, sending_s, held, memory, kept, draw(st.integers(1, 3))), cuts


def brute_force(found: Costs, cuts: list[int], stages: int) -> list[tuple[float, tuple[int, ...]]]:
    """Return all possible splits with the times of their slowest stages, the fastest first."""
    splits = []
    for inner in itertools.combinations(cuts, stages - 1):
        ends = (0, *inner, len(found.seconds))
        times = [found.of(number, stage) for number, stage in enumerate(itertools.pairwise(ends))]
        if None not in times:
            splits.append((max(one for one in times if one is not None), (0, *inner)))
    return sorted(splits)


@given(costs(), st.integers(2, 5))
def test_the_best_split_and_the_next_best_are_those_of_brute_force(given: tuple[Costs, list[int]], stages: int) -> None:
    found, cuts = given
    split, all_splits = best_split(found, cuts, stages), brute_force(found, cuts, stages)
    assert (split is None) == (not all_splits)
    if split is None:
        return
    assert split.slowest_s == all_splits[0][0]
    others = [time_s for time_s, begins in all_splits if begins != split.begins]
    other = next_best(found, cuts, split)
    assert (other.slowest_s if other is not None else None) == (others[0] if others else None)


def test_the_split_of_three_hundred_calls_takes_all_cuts_into_account() -> None:
    found = Costs([1.0 + number % 7 for number in range(300)], {}, [1] * 300)
    split = best_split(found, list(range(1, 300)), 4)
    assert split is not None
    assert split.slowest_s < 1.02 * sum(found.seconds) / 4


class Slow(nn.Linear):
    """A layer that computes its result several times."""

    def forward(self, x: Tensor) -> Tensor:
        return sum(super(Slow, self).forward(x) for _ in range(40)) / 40


def test_slow_layers_get_a_stage_of_their_own() -> None:
    width = 64
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)), Slow(width, width), nn.Linear(width, width))
    x = torch.ones(256, width)
    calls = record_calls(net, [x], {})
    split = measured_split(calls, measured_costs(net, calls, [x], {}, 0.0, CPU), 3)
    assert [calls.names[first] for first in split.begins[1:]] == ["3", "4"]


def test_measuring_changes_neither_the_model_nor_the_random_state() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4))
    before, state = {name: one.clone() for name, one in net.state_dict().items()}, torch.get_rng_state()
    calls = record_calls(net, [torch.ones(3, 4)], {})
    measured_costs(net, calls, [torch.ones(3, 4)], {}, 0.0, CPU)
    assert all(torch.equal(before[name], one) for name, one in net.state_dict().items())
    assert all(one.grad is None for one in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any("forward" in vars(module) for module in net.modules())


def test_modules_that_return_their_input_are_measured() -> None:
    net = nn.Sequential(nn.Identity(), nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4))
    calls = record_calls(net, [torch.ones(3, 4)], {})
    assert min(measured_costs(net, calls, [torch.ones(3, 4)], {}, 0.0, CPU).seconds[1:]) > 0


def test_code_between_modules_belongs_to_the_stage_before_it() -> None:
    net = make_net()
    calls = record_calls(net, [words(0, 4)[0]], {})
    assert calls.used["place"] == [1, 1]
    blocks = [name for block in range(4) for name in (f"blocks.{block}", f"blocks.{block}.norm", f"blocks.{block}.mlp")]
    assert [calls.names[cut] for cut in calls.cuts] == [*blocks, "norm", "head"]


def test_the_way_between_the_first_two_ranks_is_measured() -> None:
    """With sends that take 1 ms, and 50 ms for large tensors, as the ranks' own clocks have it."""

    class Slow(Link):
        def send(self, tensor: Tensor, rank: int, channel: int) -> None:
            time.sleep(0.05 if tensor.nbytes == PROBE_BYTES else 0.001)
            super().send(tensor, rank, channel)

    found = in_threads(3, lambda link: measured_hop(Slow(link._siblings)))
    assert found[0].latency_s >= 0.001
    assert found[0].latency_s + PROBE_BYTES * found[0].byte_s >= 0.05
    assert found[2] == Hop()


def test_messages_and_tensors_of_all_ranks_are_collected_at_rank_0() -> None:
    def tensors(rank: int) -> list[Tensor]:
        large = torch.arange(SMALL_BYTES // 4 + rank, dtype=torch.float32)
        return [large, large[:10].view(2, 5).t(), torch.tensor(rank), torch.empty(0, 3), torch.ones(3) > rank]

    def work(link: Link) -> list[tuple[bytes, list[Tensor]]]:
        return link.collect(b"rank" + bytes([link.rank]), tensors(link.rank))

    first, *others = in_threads(3, work)
    assert others == [[], []]
    assert [message for message, _ in first] == [b"rank\x01", b"rank\x02"]
    for rank, (_, found) in enumerate(first, 1):
        for one, expected in zip(found, tensors(rank), strict=True):
            assert one.dtype == expected.dtype and one.equal(expected)


@pytest.mark.parametrize("full", [False, True])
def test_a_large_tensor_is_moved_to_a_file_unless_the_disk_is_full(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if full:
        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    one = torch.randn(SMALL_BYTES // 4 + 1)
    assert (moved_to_file(one) is one) == full
    assert moved_to_file(one).equal(one)


def test_a_stage_holds_no_more_than_the_memory_of_its_process() -> None:
    def costs(*memory: int, together: int = 1) -> Costs:
        held, kept = [10 << 20, 10 << 20, 10 << 20, 70 << 20], [0, 0, 0, 5 << 20]
        return Costs([1.0] * 4, {}, held, [one << 20 for one in memory] or None, kept, together)

    calls = Calls(["", "a", "b", "c"], {1: 0, 2: 0, 3: 0}, {}, {}, 0)
    assert measured_split(calls, costs(), 2).begins == (0, 2)
    assert measured_split(calls, costs(75, 75), 2).begins == (0, 3)
    assert measured_split(calls, costs(10, 100), 2).begins == (0, 1)
    assert measured_split(calls, costs(99, 90, together=2), 2).begins == (0, 2)
    assert measured_split(calls, costs(99, 90, together=3), 2).begins == (0, 3)
    with pytest.raises(ModelError, match=r"2 stages with trained parameters, of at most 74 MB each"):
        measured_split(calls, costs(99, 74), 2)


def test_ranks_of_one_host_have_equal_parts_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = {rank: (b"one" if rank < 2 else b"other") for rank in range(3)}
    rank_of = threading.local()
    monkeypatch.setattr(measure, "boot_id", lambda: hosts[rank_of.number])
    monkeypatch.setattr(measure, "free_memory", lambda _device: 100 + rank_of.number)

    def work(link: Link) -> list[int]:
        rank_of.number = link.rank
        return stage_memory(link)

    assert in_threads(3, work) == [[50, 50, 102]] * 3
