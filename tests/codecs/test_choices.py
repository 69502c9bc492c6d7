"""A choice among codecs is a codec: by the size of parameters, and by what exchanges are measured to take."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.codecs import Block, Codec, CodecContext, by_size, exact, low_rank, quantise, sign, when_it_pays
from stretto.codecs.conformance import check_codec, hold
from stretto.collective_ops import AllGather
from stretto.errors import NotFiniteError, RecipeError

SHAPES = [(7,), (20, 30), (3,), (30,), (16, 16)]
BLOCKS = [
    Block(str(n), start, start + math.prod(shape), shape)
    for n, (start, shape) in enumerate(zip([0, 7, 610, 613, 700], SHAPES, strict=True))
]
LENGTH = 1000
IN_BLOCKS = torch.cat([torch.arange(block.start, block.stop) for block in BLOCKS])


def drawn(seed: int = 0) -> torch.Tensor:
    x = torch.zeros(LENGTH)
    x[IN_BLOCKS] = torch.randn(len(IN_BLOCKS), generator=torch.Generator().manual_seed(seed))
    return x


def places(*which: int) -> torch.Tensor:
    return torch.cat([torch.arange(BLOCKS[one].start, BLOCKS[one].stop) for one in which])


@dataclass(frozen=True, repr=False)
class of_theta(Codec):
    """Looks at the parameters' own moves."""

    needs_theta = True


@dataclass(frozen=True, repr=False)
class keeper(Codec):
    """Codec whose residual is its whole input."""

    keeps_residual = True

    def init_state(self, like, context=None):
        return like.clone()

    def average(self, x, state, residual=None):
        state.add_(x)
        yield AllGather(x[:0])
        return x.zero_()

    def residual(self, state):
        return state

    def bytes_of(self, x):
        return 0


# --- by_size ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "tolerance"),
    [
        (by_size(exact(), least=64), 1e-6),
        (by_size(quantise(8, 64), least=100), 0.009),
        (by_size(low_rank(2), by_size(quantise(4, 16), least=20), least=200), 3),
        (by_size(sign(bucket=32), quantise(4, 8), least=300), 1.01),
    ],
    ids=str,
)
def test_by_size_has_the_properties_of_every_codec(codec: by_size, tolerance: float) -> None:
    check_codec(codec, tolerance)


@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("large", [quantise(8, 10), low_rank(2), sign(bucket=50)], ids=str)
def test_each_class_is_encoded_as_if_it_were_alone(large: Codec, with_residual: bool) -> None:
    codec, small = by_size(large, quantise(4, 4), least=30), quantise(4, 4)
    first, second = places(1, 3, 4), places(0, 2)
    alone = [
        [Block("1", 0, 600, (20, 30)), Block("3", 600, 630, (30,)), Block("4", 630, 886, (16, 16))],
        [Block("0", 0, 7, (7,)), Block("2", 7, 10, (3,))],
    ]
    contexts = [CodecContext(worker, 2, 3, BLOCKS) for worker in range(2)]
    states = [codec.init_state(drawn(), context) for context in contexts]
    residual = [drawn(50 + worker) if with_residual else None for worker in range(2)]
    debts = [[None if one is None else one[where].clone() for one in residual] for where in (first, second)]
    parts = [
        [by.init_state(drawn()[where], CodecContext(worker, 2, 3, its)) for worker in range(2)]
        for by, where, its in ((large, first, alone[0]), (small, second, alone[1]))
    ]
    for round_ in range(3):
        xs = [drawn(10 * round_ + worker) for worker in range(2)]
        results, _ = hold([codec.average(x.clone(), m, o) for x, m, o in zip(xs, states, residual, strict=True)])
        for by, where, its, due in zip((large, small), (first, second), parts, debts, strict=True):
            found, _ = hold([by.average(x[where], m, o) for x, m, o in zip(xs, its, due, strict=True)])
            assert torch.equal(results[0][where], found[0])
            for all_, part in zip(residual, due, strict=True):
                assert all_ is None or torch.equal(all_[where], part)
        outside = torch.ones(LENGTH, dtype=torch.bool).index_fill_(0, IN_BLOCKS, False)
        assert not results[0][outside].any()


def test_biases_are_exact_where_matrices_are_not_and_bytes_are_counted() -> None:
    codec, x, context = by_size(low_rank(2), least=100), drawn(), CodecContext(blocks=BLOCKS)
    results, turns = hold([codec.average(x.clone(), codec.init_state(x, context))])
    small, large = places(0, 2, 3), places(1, 4)
    assert torch.equal(results[0][small], x[small])
    assert not torch.allclose(results[0][large], x[large], atol=0.1)
    assert (
        codec.bytes_of(x, context) == sum(turn[0].tensor.nbytes for turn in turns) == 4 * (40 + 2 * (20 + 30 + 16 + 16))
    )


def test_without_parameters_the_range_is_one() -> None:
    x = drawn()
    for least, expected in ((1000, 1000 + 4 * 100), (1001, 4000)):
        codec = by_size(quantise(8, 10), least=least)
        _, turns = hold([codec.average(x.clone(), codec.init_state(x))])
        assert [turn[0].tensor.nbytes for turn in turns] == [expected] == [codec.bytes_of(x)]


def test_a_class_without_parameters_sends_nothing() -> None:
    codec, x = by_size(quantise(8), least=1), drawn()
    _, turns = hold([codec.average(x.clone(), codec.init_state(x, CodecContext(blocks=BLOCKS)))])
    assert len(turns) == 1


def test_nan_in_a_small_parameter_is_refused_before_anything_is_sent() -> None:
    codec, x, residual = by_size(quantise(8, stochastic=False), least=100), drawn(), torch.zeros(LENGTH)
    x[0] = math.nan
    with pytest.raises(NotFiniteError):
        next(codec.average(x, codec.init_state(drawn(), CodecContext(blocks=BLOCKS)), residual))
    assert not residual.any()


def test_residuals_of_its_codecs_are_returned_at_their_places() -> None:
    codec, x = by_size(keeper(), least=100), drawn()
    state = codec.init_state(torch.zeros(LENGTH), CodecContext(blocks=BLOCKS))
    hold([codec.average(x.clone(), state)])
    residual = codec.residual(state)
    assert codec.keeps_residual
    assert residual.shape == x.shape
    assert torch.equal(residual[places(1, 4)], x[places(1, 4)])
    assert not residual[places(0, 2, 3)].any()
    assert by_size(sign()).residual(by_size(sign()).init_state(x)) is None


def test_its_papers_are_those_of_its_codecs() -> None:
    assert by_size(low_rank(), quantise()).sources() == low_rank.papers + quantise.papers


def test_a_codec_that_looks_at_the_moves_of_all_parameters_is_refused() -> None:
    with pytest.raises(RecipeError, match="expected"):
        by_size(of_theta())
    with pytest.raises(RecipeError, match="expected"):
        by_size(exact(), of_theta())


# --- when_it_pays -----------------------------------------------------------------------------------------------------


class Hands:
    """Clock of a worker, which advances only by the set time of an exchange."""

    def __init__(self, encoded: float, exactly: float) -> None:
        self.encoded, self.exactly, self.now = encoded, exactly, 1e6
        self.told: list[str] = []

    def __call__(self) -> float:
        return self.now


def states_of(codec: when_it_pays, hands: list[Hands]):
    contexts = [CodecContext(worker, len(hands), clock=one, notice=one.told.append) for worker, one in enumerate(hands)]
    return [codec.init_state(torch.zeros(40), context) for context in contexts]


def rounds_of(codec: when_it_pays, hands: list[Hands], rounds: int, states=None):
    """Hold rounds; for each, whether it was encoded, and how many turns it had."""
    states = states or states_of(codec, hands)
    found = []
    for round_ in range(rounds):
        xs = [torch.randn(40, generator=torch.Generator().manual_seed(round_)) for _ in hands]
        talks = [codec.average(x, m) for x, m in zip(xs, states, strict=True)]
        asks = [next(one) for one in talks]
        encoded = isinstance(asks[0], AllGather)
        for one in hands:
            one.now += (one.encoded if encoded else one.exactly) * (100 if round_ < 2 else 1)
        turns, answers = 1, _answers(asks)
        while True:
            sent = [_sent(talk, answers) for talk in talks]
            if sent[0] is None:
                assert set(sent) == {None}
                break
            turns, answers = turns + 1, _answers(sent)
        found.append((encoded, turns))
    return found, states


def _answers(asks):
    assert len({type(ask) for ask in asks}) == 1, "the workers ask different things"
    tensors = [ask.tensor for ask in asks]
    return tensors if isinstance(asks[0], AllGather) else torch.stack(tensors).sum(0)


def _sent(talk, answer):
    try:
        return talk.send(answer)
    except StopIteration:
        return None


def test_when_it_pays_has_the_properties_of_every_codec() -> None:
    check_codec(when_it_pays(quantise(8, 64)), 0.01)
    check_codec(when_it_pays(low_rank(2)), 3)


@given(st.floats(1e-4, 10), st.floats(1e-4, 10), st.integers(4, 9), st.integers(1, 7))
@settings(max_examples=examples(40))
def test_the_faster_way_is_taken_then_measured_again(encoded: float, exactly: float, rounds: int, again: int) -> None:
    codec, hands = when_it_pays(sign(), rounds, again), [Hands(encoded, exactly)]
    found, _ = rounds_of(codec, hands, 2 * (rounds + again))
    cycle = [(now % 2 == 1, 2 if now == rounds - 1 else 1) for now in range(rounds)]
    if abs(encoded - exactly) > 1e-6 * exactly:
        assert found == 2 * (cycle + again * [(encoded < exactly, 1)])


@pytest.mark.parametrize(("then", "encodes"), [((1.0, 0.1), False), ((1.0, 2.0), True), ((3.0, 2.0), False)])
def test_a_decision_rests_on_the_times_measured_for_it(then: tuple[float, float], encodes: bool) -> None:
    codec, hands = when_it_pays(sign(), rounds=8, again=3), [Hands(1.0, 2.0), Hands(1.0, 2.0)]
    states = states_of(codec, hands)
    rounds_of(codec, hands, 8, states)
    for one in hands:
        one.encoded = 1000.0
    assert [encoded for encoded, _ in rounds_of(codec, hands, 3, states)[0]] == [True] * 3
    for one in hands:
        one.encoded, one.exactly = then
    rounds_of(codec, hands, 8, states)
    assert [state.encodes for state in states] == [encodes] * 2


@pytest.mark.parametrize(
    ("times", "encodes"),
    [([(1, 2), (1, 2)], True), ([(9, 2), (1, 8)], False), ([(1, 50), (9, 2)], True), ([(2, 1), (2, 1)], False)],
)
def test_all_workers_decide_alike_whatever_their_clocks(times, encodes: bool) -> None:
    hands = [Hands(*one) for one in times]
    found, states = rounds_of(when_it_pays(sign(), rounds=6, again=5), hands, 11)
    assert found[6:] == [(encodes, 1)] * 5
    assert [state.encodes for state in states] == [encodes] * 2


def test_worker_0_reports_the_decision_with_both_times() -> None:
    hands = [Hands(0.25, 0.5), Hands(0.75, 1.5)]
    rounds_of(when_it_pays(sign(), rounds=6, again=5), hands, 11)
    (told,) = hands[0].told
    assert told == "an exchange took 0.5 s with sign() and 1 s without: encoding for 5 rounds"
    assert hands[1].told == []


def test_without_a_clock_everything_is_encoded() -> None:
    codec, x = when_it_pays(sign(), rounds=4, again=2), torch.ones(40)
    state = codec.init_state(x)
    for _ in range(12):
        _, turns = hold([codec.average(x.clone(), state)])
        assert [type(turn[0]) for turn in turns] == [AllGather]


def test_an_exact_round_sends_the_whole_residual() -> None:
    codec, residual = when_it_pays(sign(), rounds=4, again=2), torch.zeros(40)
    state = codec.init_state(residual, CodecContext(clock=lambda: 0.0))
    given_, carried = torch.zeros(40), torch.zeros(40)
    for round_ in range(6):
        x = torch.randn(40, generator=torch.Generator().manual_seed(round_))
        given_ += x
        results, _ = hold([codec.average(x, state, residual)])
        carried += results[0]
        assert torch.allclose(carried + residual, given_, atol=1e-5)
        assert bool(residual.any()) == (round_ in (1, 3))


def test_bytes_are_at_most_those_declared_in_every_round() -> None:
    codec, x = when_it_pays(low_rank(2), rounds=4, again=2), drawn()
    context = CodecContext(blocks=BLOCKS, clock=lambda: 0.0)
    state = codec.init_state(x, context)
    said = []
    for _ in range(6):
        _, turns = hold([codec.average(x.clone(), state)])
        said.append(sum(turn[0].tensor.nbytes for turn in turns))
    assert max(said) <= codec.bytes_of(x, context) == 4012
    assert said[1] == low_rank(2).bytes_of(x, context)


def test_nan_is_refused_and_the_round_is_not_counted() -> None:
    codec, residual = when_it_pays(sign()), torch.zeros(3)
    state = codec.init_state(residual, CodecContext(clock=lambda: 0.0))
    with pytest.raises(NotFiniteError):
        next(codec.average(torch.tensor([1, math.nan, 2]), state, residual))
    assert state.round == 0
    assert not residual.any()


def test_a_codec_with_a_residual_of_its_own_is_refused() -> None:
    with pytest.raises(RecipeError, match="expected"):
        when_it_pays(keeper())


def test_it_needs_the_parameters_if_its_codec_does() -> None:
    assert when_it_pays(of_theta()).needs_theta
    assert when_it_pays(sign()).sources() == sign().sources()
