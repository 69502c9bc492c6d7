"""Codecs that speak of some of the numbers: each does what its equation says, and nothing is lost."""

from __future__ import annotations

import math

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.codecs import (
    Codec,
    CodecContext,
    cast,
    censored,
    chain,
    chunked,
    deep_gradient_compression,
    difference_threshold,
    error_feedback,
    exact,
    low_rank,
    quantise,
    random_k,
    threshold,
    top_k,
)
from stretto.codecs.conformance import hold
from stretto.codecs.random_k import drawn, mixed
from stretto.codecs.sparsifier import share_of
from stretto.collective_ops import AllGather, AllReduceMean
from stretto.errors import NotFiniteError, RecipeError, TransportError
from stretto.recipe.parser import parse

SELECTORS: list[Codec] = [
    top_k(0.1),
    top_k(0.2, chunk=7),
    random_k(0.3),
    threshold(0.7),
    threshold(0.7, adaptive=True),
    chunked(8, 2, bits=32),
    chunked(8, 2),
    chunked(16, 4, bits=4),
    difference_threshold(2.0),
    censored(1.0),
    chain(top_k(0.2), quantise(4)),
    chain(random_k(0.3), cast("bf16")),
]
NUMBERS = st.lists(
    st.one_of(st.floats(-8, 8, width=32), st.sampled_from([0.0, -0.0, 1.0, 1e-42, 1e30, -1e30])), max_size=60
)
few = settings(max_examples=examples(60))


def state_of(codec: Codec, n: int, theta: Tensor | None = None, workers: int = 1):
    return codec.init_state(
        torch.zeros(n), CodecContext(workers=workers, theta=torch.zeros(n) if theta is None else theta)
    )


def said(codec: Codec, x: Tensor, state=None) -> Tensor:
    """Return the decoded part of x."""
    state = state if state is not None else state_of(codec, x.numel())
    return codec.decode(codec.encode(x.clone(), state), torch.full_like(x, 9.0))


# --- laws of all ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", SELECTORS, ids=str)
@few
@given(rounds=st.lists(NUMBERS, min_size=1, max_size=3))
def test_nothing_is_lost(codec: Codec, rounds: list[list[float]]) -> None:
    """In each round carried numbers and residual sum to the input, exactly if values are exact."""
    n = max(map(len, rounds))
    state, residual = state_of(codec, n), torch.zeros(n)
    for numbers in rounds:
        x = torch.tensor(numbers + [0.0] * (n - len(numbers)))
        a = residual + x
        message = codec.encode_with_residual(x.clone(), residual, state)
        carried = codec.decode(message, torch.empty(n))
        apart = (carried.double() + residual.double() - a.double()).abs()
        assert bool((apart <= 2e-7 * (a.abs().double() + carried.abs().double())).all())
        if getattr(codec, "exact_split", False):
            assert torch.equal(carried + residual, a)
            assert bool(((carried == 0) | (residual == 0)).all()), "a number is carried or owed, not both"
        assert message.nbytes <= codec.bytes_of(x)


@pytest.mark.parametrize("codec", [one for one in SELECTORS if not isinstance(one, random_k)], ids=str)
def test_a_worker_that_selects_nothing_sends_no_bytes(codec: Codec) -> None:
    if codec.linear:
        return
    assert codec.encode(torch.zeros(100), state_of(codec, 100)).numel() == 0
    assert torch.equal(codec.decode(torch.empty(0, dtype=torch.uint8), torch.ones(100)), torch.zeros(100))


@pytest.mark.parametrize("codec", SELECTORS, ids=str)
def test_a_message_that_is_cut_off_or_too_long_is_refused(codec: Codec) -> None:
    message = codec.encode(torch.randn(500), state_of(codec, 500))
    for wrong in (message[:-1], torch.cat([message, message[:3]]), message[:1]):
        with pytest.raises(TransportError, match=r"another worker|no message"):
            codec.decode(wrong, torch.empty(500))


@pytest.mark.parametrize("codec", SELECTORS, ids=str)
def test_a_recipe_can_name_it(codec: Codec) -> None:
    assert parse(f"allreduce(how={codec})").how == codec
    assert codec.sources()


# --- top_k ------------------------------------------------------------------------------------------------------------


@few
@given(NUMBERS, st.sampled_from([0.05, 0.2, 1.0]))
def test_top_k_sends_the_largest(numbers: list[float], ratio: float) -> None:
    x = torch.tensor(numbers)
    k = share_of(ratio, len(numbers))
    order = sorted(range(len(numbers)), key=lambda i: (-abs(float(x[i])), i))[:k]
    expected = torch.zeros(len(numbers))
    expected[order] = x[order]
    assert torch.equal(said(top_k(ratio), x), expected)


@pytest.mark.parametrize(
    ("ratio", "n", "k"), [(0.01, 1000, 10), (0.01, 5, 1), (0.07, 100, 7), (1.0, 9, 9), (0.5, 0, 0)]
)
def test_a_share_is_rounded_up(ratio: float, n: int, k: int) -> None:
    assert share_of(ratio, n) == k


def test_top_k_costs_what_its_docstring_says() -> None:
    message = top_k(0.01).encode(torch.randn(1_000_000), None)
    assert 0.0120 < message.nbytes / 4_000_000 < 0.0127
    assert top_k(0.01).values_sent(message, torch.empty(1_000_000)) == 10_000


def test_one_spike_does_not_take_the_other_chunks_share() -> None:
    x = torch.ones(64)
    x[:16] = 1000.0
    assert (said(top_k(0.25), x) != 0).nonzero().view(-1).tolist() == list(range(16))
    assert (said(top_k(0.25, chunk=16), x) != 0).view(4, 16).sum(1).tolist() == [4, 4, 4, 4]


# --- random_k ---------------------------------------------------------------------------------------------------------


def test_random_k_under_all_reduce_is_the_mean_of_the_same_entries() -> None:
    codec, n = random_k(0.1, seed=4), 200
    states = [state_of(codec, n) for _ in range(3)]
    seen = torch.zeros(n)
    for _ in range(5):
        given_ = [torch.randint(-9, 9, (n,)).float() for _ in range(3)]
        results, turns = hold([codec.average(x.clone(), state) for x, state in zip(given_, states, strict=True)])
        assert [type(asks[0]) for asks in turns] == [AllReduceMean]
        assert turns[0][0].tensor.numel() == 20
        places = results[0] != 0
        assert int(places.sum()) <= 20
        assert torch.equal(results[0][places], sum(given_)[places])
        seen += places
    assert 50 < int((seen > 0).sum()) < 100, "each round has places of its own"


def test_random_k_sends_a_server_what_it_sends_to_all() -> None:
    codec = random_k(0.2, seed=4)
    x = torch.randn(50)
    alone, _ = hold([codec.average(x.clone(), state_of(codec, 50))])
    state = state_of(codec, 50)
    assert torch.equal(said(codec, x, state), alone[0])
    assert not torch.equal(said(codec, x, state), alone[0])


@pytest.mark.parametrize(("n", "k"), [(200, 20), (40, 30)])
def test_every_index_is_drawn_equally_often(n: int, k: int) -> None:
    counts = torch.zeros(n)
    for seed in range(2000):
        places = drawn(n, k, mixed(5, seed))
        assert places.unique().numel() == k
        assert torch.equal(places, places.sort().values)
        counts[places] += 1
    spread = math.sqrt(2000 * k / n * (1 - k / n))
    assert bool(((counts - 2000 * k / n).abs() < 5 * spread).all())


def test_seeds_near_each_other_are_mixed_far_apart() -> None:
    seeds = {mixed(run, worker, round_) for run in range(8) for worker in range(8) for round_ in range(8)}
    assert len(seeds) == 512
    assert all(0 <= seed < 1 << 63 for seed in seeds)


# --- threshold --------------------------------------------------------------------------------------------------------


def test_strom_sends_tau_and_keeps_the_rest() -> None:
    codec = threshold(0.5)
    residual = torch.tensor([0.4, 0.0, 0.0, -0.3, 0.0])
    message = codec.encode_with_residual(torch.tensor([0.2, 0.1, 1.75, -0.3, -0.5]), residual, state_of(codec, 5))
    carried = codec.decode(message, torch.empty(5))
    assert carried.tolist() == [0.5, 0.0, 0.5, -0.5, -0.5]
    assert torch.allclose(residual, torch.tensor([0.1, 0.1, 1.25, -0.1, 0.0]))


@pytest.mark.parametrize("share", [0.001, 0.01, 0.2, 0.5, 0.9, 1.0])
def test_threshold_costs_at_most_two_bits_a_number(share: float) -> None:
    x = (torch.rand(10_000) < share).float()
    message = threshold(1.0).encode(x.clone(), state_of(threshold(1.0), 10_000))
    assert message.nbytes <= 2 * 10_000 / 8 + 5
    k = float(x.sum())
    if share < 0.1:
        assert 8 * message.nbytes < k * (math.log2(10_000 / k) + 3) + 80


@pytest.mark.parametrize("tau", [1e-3, 30.0])
def test_an_adaptive_tau_finds_its_band(tau: float) -> None:
    codec = threshold(tau, adaptive=True, least=1e-3, most=1e-2)
    state, residual = state_of(codec, 5000), torch.zeros(5000)
    shares = []
    for _ in range(500):
        shares.append(
            codec.values_sent(codec.encode_with_residual(torch.randn(5000), residual, state), residual) / 5000
        )
    assert sum(share <= 0.012 for share in shares[-100:]) > 80
    assert sum(share >= 0.0008 for share in shares[-100:]) > 80


def test_an_adaptive_tau_survives_rounds_without_messages() -> None:
    codec = threshold(1e-3, adaptive=True)
    state = state_of(codec, 10)
    for _ in range(5000):
        assert codec.encode(torch.zeros(10), state).numel() == 0
    assert state.tau > 0


def test_the_residual_is_clipped_every_fifth_round() -> None:
    codec = threshold(0.5, clip=3.0)
    state, residual = state_of(codec, 4), torch.zeros(4)
    largest = []
    for _ in range(10):
        codec.encode_with_residual(torch.full((4,), 1.5), residual, state)
        largest.append(float(residual.max()))
    assert largest == [1.0, 2.0, 3.0, 4.0, 1.5, 2.5, 3.5, 4.5, 5.5, 1.5]


def test_a_threshold_without_room_is_refused() -> None:
    with pytest.raises(RecipeError, match="try: threshold"):
        threshold(0.1, adaptive=True, least=0.5, most=0.1)


# --- chunked ----------------------------------------------------------------------------------------------------------


def test_two_bits_are_a_sign_and_one_of_two_magnitudes() -> None:
    x = torch.zeros(16)
    x[[1, 3, 4, 9, 10, 12]] = torch.tensor([8.0, -4.75, 2.25, 1.0, -1.0, 0.5])
    carried = said(chunked(8, 3), x)
    assert carried[[1, 3, 4]].tolist() == [8.0, -3.5, 3.5]
    assert carried[[9, 10, 12]].tolist() == [1.0, -1.0, 0.5]
    assert int((carried != 0).sum()) == 6


@pytest.mark.parametrize(("bits", "levels"), [(4, 7), (8, 127)])
def test_levels_are_the_nearest_ones(bits: int, levels: int) -> None:
    x = torch.randn(1000)
    carried = said(chunked(100, 10, bits=bits), x)  # type: ignore[arg-type]
    for chunk, found in zip(x.split(100), carried.split(100), strict=True):
        sent = chunk.abs().topk(10).indices
        assert set((found != 0).nonzero().view(-1).tolist()) == set(sent.tolist())
        assert float((found - chunk)[sent].abs().max()) <= 0.5001 / levels * float(chunk.abs().max())


def test_sparse_loco_costs_half_a_percent() -> None:
    n = 1 << 20
    message = chunked().encode(torch.randn(n), None)
    assert message.nbytes / (4 * n) < 0.0053
    assert chunked().values_sent(message, torch.empty(n)) == n // 64


def test_tiny_and_huge_magnitudes_survive_two_bits() -> None:
    for size in (1e-30, 1e-9, 1e30, 3e38):
        x = torch.tensor([size, -size, 0.0, 0.0])
        assert torch.allclose(said(chunked(4, 2), x), x, rtol=0.01)


# --- deep gradient compression ----------------------------------------------------------------------------------------


def test_momentum_is_corrected_and_masked() -> None:
    """Against the five lines of the paper."""
    codec, n = deep_gradient_compression(0.1, momentum=0.8), 30
    state = state_of(codec, n)
    u, v = torch.zeros(n), torch.zeros(n)
    for _ in range(6):
        x = torch.randn(n)
        u = 0.8 * u + x
        v = v + u
        chosen = v.abs().topk(3).indices
        expected = torch.zeros(n)
        expected[chosen] = v[chosen]
        assert torch.allclose(said(codec, x, state), expected)
        u[chosen], v[chosen] = 0, 0
        assert torch.allclose(codec.residual(state), v)


def test_without_momentum_it_is_error_feedback_of_top_k() -> None:
    codecs = [deep_gradient_compression(0.1, momentum=0.0), error_feedback(top_k(0.1))]
    states = [state_of(codec, 50) for codec in codecs]
    for _ in range(5):
        x = torch.randn(50)
        one, other = (said(codec, x, state) for codec, state in zip(codecs, states, strict=True))
        assert torch.equal(one, other)


def test_warm_up_goes_down_in_stages() -> None:
    codec = deep_gradient_compression(0.001, warm_up=2)
    state = state_of(codec, 10_000)
    sent = [codec.values_sent(codec.encode(torch.randn(10_000), state), torch.empty(10_000)) for _ in range(10)]
    assert sent == [2500, 2500, 625, 625, 156, 156, 40, 40, 10, 10]
    codec = deep_gradient_compression(0.1, warm_up=1)
    state = state_of(codec, 100)
    assert codec.max_values(100) == 25
    sent = [codec.values_sent(codec.encode(torch.randn(100), state), torch.empty(100)) for _ in range(3)]
    assert sent == [25, 10, 10], "no stage sends less than the ratio"


def test_clipping_is_of_the_share_of_the_norm() -> None:
    codec = deep_gradient_compression(1.0, clip=2.0)
    x = torch.randn(100)
    carried = said(codec, x, state_of(codec, 100, workers=4))
    assert math.isclose(float(carried.norm()), 2.0 / math.sqrt(4), rel_tol=1e-5)
    assert torch.allclose(carried / carried.norm(), x / x.norm(), atol=1e-6)
    small = 0.01 * x
    assert torch.equal(said(codec, small, state_of(codec, 100, workers=4)), small)


# --- differences ------------------------------------------------------------------------------------------------------


@few
@given(st.lists(st.floats(-4, 4, width=32), min_size=5, max_size=30), st.sampled_from([0.0, 0.5, 3.0]))
def test_gd_sec_sends_what_is_large_beside_the_move(numbers: list[float], xi: float) -> None:
    n, workers = len(numbers), 3
    theta = torch.linspace(-1, 1, n)
    codec = difference_threshold(xi)
    state = state_of(codec, n, theta, workers)
    x = torch.tensor(numbers)
    assert torch.equal(said(codec, x, state), x), "at first nothing has moved"
    move = torch.linspace(-4, 4, n)
    theta += move
    moved = theta - (theta - move)
    kept = x.abs() > torch.tensor(xi / workers) * moved.abs()
    found = said(codec, x, state)
    clear = (x.abs() - xi / workers * moved.abs()).abs() > 1e-5
    assert torch.equal(found[clear], torch.where(kept, x, 0)[clear])
    assert torch.equal(said(codec, x, state), x), "and since the last encoding nothing has moved again"


def test_censoring_is_all_or_nothing() -> None:
    theta = torch.zeros(10)
    codec = censored(2.0)
    state = state_of(codec, 10, theta, workers=4)
    x = torch.ones(10)
    sent = []
    for step in (0.0, 1.9, 2.1, 0.0):
        theta += step
        message = codec.encode(x.clone(), state)
        sent.append(message.numel())
    assert sent == [41, 41, 0, 41]
    residual = torch.ones(10)
    assert codec.encode_with_residual(x.clone(), residual, state).numel() == 41
    assert not residual.any()


@pytest.mark.parametrize(
    "codec", [difference_threshold(1.0), censored(1.0), chain(censored(1.0), cast("bf16"))], ids=str
)
def test_moves_need_parameters(codec: Codec) -> None:
    assert codec.needs_theta
    assert error_feedback(codec).needs_theta
    with pytest.raises(RecipeError, match="there are no parameters"):
        codec.init_state(torch.zeros(3))


# --- error feedback ---------------------------------------------------------------------------------------------------


def test_an_old_residual_decays() -> None:
    codec = error_feedback(top_k(0.1), decay=0.5)
    state = state_of(codec, 10)
    e = torch.zeros(10)
    for _ in range(5):
        x = torch.randn(10)
        a = 0.5 * e + x
        e = a - said(codec, x, state)
        assert torch.allclose(codec.residual(state), e)
        assert int((e == 0).sum()) == 1


@pytest.mark.parametrize(
    "inner",
    [error_feedback(top_k(0.1)), deep_gradient_compression(), random_k(0.1, unbiased=True)],
    ids=str,
)
def test_error_feedback_refuses_codecs_with_residuals_or_overshoot(inner: Codec) -> None:
    with pytest.raises(RecipeError, match=r"(?s)error_feedback can't be around .*got.*expected.*try"):
        error_feedback(inner)


def test_a_codec_that_is_no_pair_stays_none() -> None:
    assert not error_feedback(low_rank(1)).pair
    assert error_feedback(cast("bf16")).linear
    assert error_feedback(quantise(8)).fixed_size
    assert not error_feedback(top_k(0.1)).fixed_size


def test_a_refused_gradient_leaves_the_residual() -> None:
    codec = error_feedback(top_k(0.1), decay=0.5)
    state = state_of(codec, 10)
    codec.encode(torch.randn(10), state)
    before = state.residual.clone()
    with pytest.raises(NotFiniteError, match="top_k"):
        codec.encode(torch.full((10,), float("nan")), state)
    assert torch.equal(state.residual, before)


# --- chain ------------------------------------------------------------------------------------------------------------


def test_the_residual_of_a_chain_has_what_either_codec_leaves_out() -> None:
    codec = chain(top_k(0.2), cast("bf16"))
    x, residual = torch.randn(50), torch.zeros(50)
    carried = codec.decode(codec.encode_with_residual(x.clone(), residual, state_of(codec, 50)), torch.empty(50))
    chosen = carried != 0
    assert int(chosen.sum()) == 10
    assert torch.equal(carried[chosen], x[chosen].bfloat16().float())
    assert torch.equal(residual, x - carried)


def test_a_chain_with_exact_is_the_selector() -> None:
    x = torch.randn(300)
    one, other = top_k(0.1), chain(top_k(0.1), exact())
    assert torch.equal(one.encode(x.clone(), None), other.encode(x.clone(), state_of(other, 300)))


def test_random_indices_in_few_bits_still_use_an_all_reduce() -> None:
    codec = chain(random_k(0.1), cast("bf16"))
    states = [state_of(codec, 100) for _ in range(2)]
    results, turns = hold([codec.average(torch.ones(100), state) for state in states])
    assert [(type(asks[0]), asks[0].tensor.dtype, asks[0].tensor.numel()) for asks in turns] == [
        (AllReduceMean, torch.bfloat16, 10)
    ]
    assert sorted(results[0].unique().tolist()) == [0.0, 2.0]
    other = chain(random_k(0.1), quantise(8))
    assert not other.linear
    _, turns = hold([other.average(torch.ones(100), state_of(other, 100))])
    assert isinstance(turns[0][0], AllGather)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (exact(), quantise(8)),
        (quantise(8), cast("bf16")),
        (chunked(), cast("bf16")),
        (deep_gradient_compression(), quantise(8)),
        (chain(top_k(0.1), exact()), cast("bf16")),
        (top_k(0.1), low_rank(2)),
        (top_k(0.1), top_k(0.1)),
        (top_k(0.1), error_feedback(quantise(8))),
    ],
    ids=str,
)
def test_a_chain_of_unfit_codecs_is_refused(first: Codec, second: Codec) -> None:
    with pytest.raises(RecipeError, match=r"(?s)got: chain\(.*expected: .*try: "):
        chain(first, second)
