"""Every codec passes the one table of laws."""

from __future__ import annotations

import pytest
import torch
from combinations import mostly_long, thinned

from stretto import codecs
from stretto.codecs import (
    Codec,
    both_ways,
    by_size,
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
    sign,
    ternary,
    threshold,
    top_k,
    when_it_pays,
)
from stretto.codecs.conformance import check_codec

SELECTORS: list[tuple[Codec, float]] = [
    (top_k(0.01), 1),
    (top_k(0.1, chunk=64), 1),
    (random_k(0.1), 1),
    (random_k(0.5, seed=3), 1),
    (threshold(0.5), 1),
    (threshold(0.1, adaptive=True), 1),
    (chunked(64, 4), 1),
    (chunked(64, 4, bits=4), 1),
    (chunked(64, 4, bits=8), 1),
    (chunked(64, 4, bits=32), 1),
    (difference_threshold(1.0), 1e-6),
    (censored(1.0), 1e-6),
    (chain(top_k(0.1), quantise(8)), 1.01),
    (chain(top_k(0.1), cast("bf16")), 1),
    (chain(random_k(0.1), cast("bf16")), 1.01),
    (chain(random_k(0.1), quantise(4)), 1.2),
    (chain(difference_threshold(1.0), quantise(8)), 0.01),
]
"""Codecs that leave numbers out, and how far they may be off."""
OTHERS: list[tuple[Codec, float]] = [
    (exact(), 1e-6),
    (random_k(0.1, unbiased=True), 9.1),
    (threshold(0.5, clip=2.0), 1),
    (deep_gradient_compression(0.01), 1),
    (deep_gradient_compression(0.01, momentum=0.0, warm_up=1), 1),
    (deep_gradient_compression(0.1, clip=1.0), 1),
    (quantise(8), 0.01),
    (quantise(2, norm="l2"), 40),
    (ternary(), 1.01),
    (sign(), 1.01),
    (low_rank(2), 3),
    (by_size(top_k(0.1)), 1),
    (both_ways(top_k(0.1)), 1),
    (when_it_pays(top_k(0.1)), 1),
]


@pytest.mark.parametrize(("codec", "tolerance"), SELECTORS + OTHERS, ids=str)
def test_every_codec_passes_the_conformance_test(codec: Codec, tolerance: float) -> None:
    doubles = [torch.float64] if (codec, tolerance) in thinned(SELECTORS, 3, first=0) else []
    check_codec(codec, tolerance, dtypes=[torch.float32, *doubles])


INSIDE: list[Codec] = [*(codec for codec, _ in SELECTORS), quantise(8), sign(), ternary(), exact()]


@pytest.mark.parametrize("codec", INSIDE, ids=str)
def test_every_codec_passes_the_conformance_test_inside_error_feedback(codec: Codec) -> None:
    check_codec(error_feedback(codec), dict(SELECTORS + OTHERS)[codec])


@pytest.mark.parametrize("codec", mostly_long(INSIDE, short=(1, 3, 5, 17)), ids=str)
def test_every_codec_passes_the_conformance_test_inside_error_feedback_that_decays(codec: Codec) -> None:
    check_codec(error_feedback(codec, decay=0.9), dict(SELECTORS + OTHERS)[codec])


@pytest.mark.parametrize("case", mostly_long(SELECTORS, short=(0, 2, 5, 8, 10, 12)), ids=str)
def test_a_coarse_dtype_passes_the_conformance_test(case: tuple[Codec, float]) -> None:
    codec, tolerance = case
    check_codec(error_feedback(codec), max(tolerance, 0.02), dtypes=[torch.bfloat16])


@pytest.mark.parametrize(("to", "tolerance"), [("bf16", 2e-2), ("fp16", 2e-3)])
def test_casts_pass_the_conformance_test(to: str, tolerance: float) -> None:
    check_codec(cast(to), tolerance, huge=6e4)  # type: ignore[arg-type]
    check_codec(error_feedback(cast(to)), tolerance, huge=6e4)  # type: ignore[arg-type]


def test_exact_is_exact_in_double_precision() -> None:
    check_codec(exact(), 1e-15, dtypes=[torch.float64])


def test_every_codec_is_tested() -> None:
    tried = {type(codec) for codec, _ in SELECTORS + OTHERS} | {cast, error_feedback}
    there = {
        kind for name in codecs.__all__ if isinstance(kind := getattr(codecs, name), type) and issubclass(kind, Codec)
    }
    assert there - {codecs.Codec, codecs.SingleRound} <= tried


def test_fp16_overflow_is_infinite_not_wrong() -> None:
    x = torch.full((4,), 1e6)
    assert torch.isinf(cast("fp16").decode(cast("fp16").encode(x, None), x.clone())).all()


def test_the_excess_over_the_range_of_fp16_stays_in_the_residual() -> None:
    codec = error_feedback(cast("fp16"))
    state = codec.init_state(torch.zeros(2))
    carried = torch.zeros(2)
    for given in (torch.tensor([1e5, -1.0]), torch.zeros(2)):
        carried += codec.decode(codec.encode(given, state), torch.empty(2))
    assert torch.equal(carried + state.residual, torch.tensor([1e5, -1.0]))
    assert float(state.residual.abs().max()) < 100
