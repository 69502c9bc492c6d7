"""Quantizers: their error, mean, residual and bytes."""

from __future__ import annotations

import math

import pytest
import torch
from combinations import each_value
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.codecs import CodecContext, SingleRound, quantise, sign, ternary
from stretto.codecs.conformance import check_codec, hold
from stretto.collective_ops import AllGather
from stretto.errors import NotFiniteError, RecipeError, TransportError

QUANTISERS = [
    quantise(bits, bucket, norm, stochastic)
    for bits, bucket in ((8, 2048), (4, 7), (2, 16))
    for norm in ("max", "l2")
    for stochastic in (True, False)
]
CODECS = [*QUANTISERS, ternary(), ternary(None, 100), ternary(bucket=3), sign(), sign("one", 100), sign(bucket=5)]
UNBIASED = [one for one in QUANTISERS if one.stochastic] + [ternary(None), ternary(None, bucket=10)]
NUMBERS = st.lists(st.floats(-(2.0**126), 2.0**126, width=32), max_size=50).map(
    lambda one: torch.tensor(one, dtype=torch.float32)
)
SMALLEST = 2.0**-149


def carried(codec: SingleRound, x: torch.Tensor, state=None) -> torch.Tensor:
    state = state or codec.init_state(x)
    return codec.decode(codec.encode(x.clone(), state), x.clone())


def rows(x: torch.Tensor, bucket: int) -> list[torch.Tensor]:
    return list(x.double().split(bucket)) if len(x) else []


CHECKED: list[tuple[SingleRound, float]] = [
    (quantise(bucket=64), 1 / 127),
    (quantise(4, 7, "l2"), 7**0.5 / 7),
    (quantise(4, 64, stochastic=False), 0.5 / 7),
    (quantise(2, 16), 1),
    (quantise(2, 16, "l2", stochastic=False), 16**0.5 / 2),
    (ternary(bucket=64), 1),
    (ternary(None, bucket=16), 1),
    (sign(bucket=64), 1),
    (sign("one", bucket=5), 1),
]


@pytest.mark.parametrize(
    ("case", "dtype"), each_value(CHECKED, [torch.float32, torch.float64, torch.bfloat16]), ids=str
)
def test_quantizers_have_the_properties_of_every_codec(case: tuple[SingleRound, float], dtype: torch.dtype) -> None:
    codec, tolerance = case
    check_codec(codec, tolerance + 0.01 if dtype == torch.bfloat16 else tolerance * 1.001, dtypes=[dtype])


@pytest.mark.parametrize("codec", QUANTISERS, ids=str)
@given(x=NUMBERS)
@settings(max_examples=examples(60))
def test_a_number_is_off_by_less_than_a_level(codec: quantise, x: torch.Tensor) -> None:
    for a, found in zip(rows(x, codec.bucket), rows(carried(codec, x), codec.bucket), strict=True):
        norm = float(a.abs().max() if codec.norm == "max" else a.norm())
        most = norm / codec.levels if codec.stochastic else norm / codec.levels / 2
        assert float((found - a).abs().max()) <= most * (1 + 1e-5) + codec.levels * SMALLEST


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_carried_numbers_and_residual_sum_to_the_input(codec: SingleRound, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(3)
    given_ = [torch.randn(101, generator=source).to(dtype) for _ in range(20)]
    residual, total, state = torch.zeros(101, dtype=dtype), torch.zeros(101).double(), codec.init_state(given_[0])
    largest = 0.0
    for x in given_:
        message = codec.encode_with_residual(x.clone(), residual, state)
        said = codec.decode(message, x.clone()).double()
        total += said
        largest = max(largest, float(said.abs().max()), float(residual.abs().max()))
    apart = total + residual.double() - torch.stack(given_).double().sum(0)
    assert float(apart.abs().max()) <= 40 * torch.finfo(dtype).eps * largest
    assert float(residual.abs().max()) > 0.005


@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(x=NUMBERS, residual=NUMBERS)
@settings(max_examples=examples(40))
def test_the_fused_pass_does_what_two_passes_do(codec: SingleRound, x: torch.Tensor, residual: torch.Tensor) -> None:
    length = min(len(x), len(residual))
    x, residual = x[:length], residual[:length]
    fused, plain = residual.clone(), residual + x
    message = codec.encode_with_residual(x.clone(), fused, codec.init_state(x))
    assert torch.equal(message, codec.encode(plain.clone(), codec.init_state(x)))
    assert torch.equal(fused, plain - codec.decode(message, x.clone()))


@pytest.mark.parametrize("codec", UNBIASED, ids=str)
def test_the_mean_over_many_rounds_is_the_number(codec: SingleRound) -> None:
    x, rounds = torch.randn(60, generator=torch.Generator().manual_seed(7)), 1500
    state = codec.init_state(x)
    found = torch.stack([carried(codec, x, state) for _ in range(rounds)]).double()
    level = float((found.amax(0) - found.amin(0)).max())
    most = level * math.sqrt(math.log(2 / 1e-9) / (2 * rounds))  # Hoeffding: beyond it once in 1e9 times
    assert bool(((found.mean(0) - x).abs() <= most + 1e-6).all())
    assert level > 0.01


def test_the_nearest_level_is_biased() -> None:
    codec = quantise(2, stochastic=False)
    assert carried(codec, torch.tensor([1.0, 0.4, 0.6, -0.4, -0.6])).tolist() == [1, 0, 1, 0, -1]


def test_rounds_and_workers_draw_apart_and_the_seed_repeats_them() -> None:
    codec, x = quantise(2), torch.linspace(-1, 1, 500)

    def said(seed: int, worker: int) -> list[bytes]:
        state = codec.init_state(x, CodecContext(worker=worker, seed=seed))
        return [bytes(codec.encode(x.clone(), state).tolist()) for _ in range(3)]

    assert len({*said(1, 0), *said(1, 1), *said(2, 0)}) == 9
    assert said(1, 0) == said(1, 0)


@pytest.mark.parametrize("codec", [ternary(1.0), ternary(2.5), ternary(2.5, bucket=100)], ids=str)
def test_the_clipped_part_stays_in_the_residual(codec: ternary) -> None:
    x = torch.ones(1000)
    x[::100] = 50
    cut = codec.clip * math.sqrt(float((x[:100] ** 2).mean()))
    found = carried(codec, x)
    assert found.abs().unique().tolist() == pytest.approx([0.0, cut], rel=1e-6)
    residual = torch.zeros(1000)
    codec.encode_with_residual(x.clone(), residual, codec.init_state(x))
    assert torch.allclose(residual[::100], torch.full((10,), 50 - cut))


@pytest.mark.parametrize("size", [1e-40, 1e-25, 1.0, 1e25, 3e38])
@pytest.mark.parametrize("length", [1, 7, 100])
def test_nothing_is_clipped_if_all_numbers_are_equal(size: float, length: int) -> None:
    x = torch.full((length,), size)
    x[::3] *= -1
    assert torch.equal(carried(ternary(1.01, bucket=10), x), x)


def test_signs_stand_for_the_means_of_their_sides() -> None:
    x = torch.tensor([1.0, 3, -1, -5, 0, 8, 2, -0.0])
    assert carried(sign(bucket=4), x).tolist() == [2, 2, -3, -3, 2.5, 2.5, 2.5, 2.5]
    assert carried(sign("one", bucket=4), x).tolist() == [2.5, 2.5, -2.5, -2.5, 2.5, 2.5, 2.5, 2.5]


@pytest.mark.parametrize("codec", [sign(bucket=6), sign("one", bucket=6), quantise(2, 6, stochastic=False)], ids=str)
@given(x=NUMBERS)
@settings(max_examples=examples(50))
def test_a_contraction_leaves_less_than_its_input(codec: SingleRound, x: torch.Tensor) -> None:
    for a, found in zip(rows(x, 6), rows(carried(codec, x), 6), strict=True):
        if float(a.abs().max()) > 1e-36:
            assert float((a - found).norm()) ** 2 <= (1 - 1 / 6) * float(a.norm()) ** 2 * (1 + 1e-5)


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (quantise(8, 100), 4 * 11 + 1001),
        (quantise(4, 100), 4 * 11 + 501),
        (quantise(2, 100), 4 * 11 + 201),
        (ternary(bucket=100), 4 * 11 + 201),
        (sign(bucket=100), 8 * 11 + 126),
        (sign("one", bucket=100), 4 * 11 + 126),
    ],
    ids=str,
)
def test_a_message_has_its_scales_and_its_codes_and_no_more(codec: SingleRound, expected: int) -> None:
    x = torch.randn(1001, generator=torch.Generator().manual_seed(1))
    assert codec.encode(x.clone(), codec.init_state(x)).nbytes == codec.bytes_of(x) == expected


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_message_of_another_length_is_refused_and_an_empty_one_is_zero(codec: SingleRound) -> None:
    like = torch.ones(40)
    right = codec.bytes_of(like)
    for wrong in (1, right - 1, right + 1):
        with pytest.raises(TransportError, match="not in the encoding"):
            codec.decode(torch.zeros(wrong, dtype=torch.uint8), like.clone())
    with pytest.raises(TransportError, match="float32"):
        codec.decode(torch.zeros(right), like.clone())
    nothing = torch.empty(0, dtype=torch.uint8)
    assert not codec.decode(nothing, like.clone()).any()
    assert (codec.values_sent(nothing, like), codec.values_sent(torch.zeros(right, dtype=torch.uint8), like)) == (0, 40)


@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(data=st.data())
@settings(max_examples=examples(20))
def test_any_bytes_of_the_right_length_decode(codec: SingleRound, data: st.DataObject) -> None:
    like = torch.ones(40)
    length = codec.bytes_of(like)
    drawn = data.draw(st.binary(min_size=length, max_size=length))
    assert codec.decode(torch.tensor(list(drawn), dtype=torch.uint8), like).shape == (40,)


def test_a_message_may_begin_at_any_offset_of_a_buffer() -> None:
    codec, x = quantise(8, 10), torch.linspace(-1, 1, 33)
    message = codec.encode(x.clone(), codec.init_state(x))
    received = torch.cat([torch.zeros(3, dtype=torch.uint8), message])
    assert torch.equal(codec.decode(received[3:], x.clone()), codec.decode(message, x.clone()))


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_is_refused_before_any_state_changes(codec: SingleRound, bad: float) -> None:
    x, residual = torch.tensor([1.0, bad, 2.0]), torch.ones(3)
    with pytest.raises(NotFiniteError):
        codec.encode(x.clone(), codec.init_state(x))
    with pytest.raises(NotFiniteError):
        codec.encode_with_residual(x.clone(), residual, codec.init_state(x))
    assert residual.tolist() == [1, 1, 1]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_result_is_the_sum_of_decoded_messages(codec: SingleRound) -> None:
    xs = [torch.randn(77, generator=torch.Generator().manual_seed(worker)) for worker in range(3)]
    contexts = [CodecContext(worker=worker, workers=3) for worker in range(3)]
    results, turns = hold(
        [codec.average(x.clone(), codec.init_state(x, context)) for x, context in zip(xs, contexts, strict=True)]
    )
    alone = [codec.decode(ask.tensor, torch.empty(77)) for ask in turns[0]]
    assert all(isinstance(ask, AllGather) for ask in turns[0])
    for result in results:
        assert torch.allclose(result, torch.stack(alone).sum(0), atol=1e-6)


def test_each_variant_of_signs_has_its_own_paper() -> None:
    assert sign().sources() == ("Seide et al. 2014",)
    assert sign("one").sources() == ("Karimireddy et al. 2019 (1901.09847)",)


@pytest.mark.parametrize(
    "wrong", [lambda: quantise(3), lambda: quantise(bucket=0), lambda: ternary(0.5), lambda: sign("three")]
)
def test_invalid_options_are_refused(wrong) -> None:
    with pytest.raises(RecipeError, match="expected"):
        wrong()
