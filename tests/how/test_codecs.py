"""Every codec passes the one table of laws, and the table can fail."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from stretto.how import Codec, SingleRound, cast, exact
from stretto.how.check import check_codec
from stretto.words import Every

CODECS: list[tuple[Codec, float]] = [(exact(), 1e-6), (cast("bf16"), 2e-2), (cast("fp16"), 2e-3)]


@pytest.mark.parametrize(("codec", "tolerance"), CODECS, ids=lambda one: str(one))
def test_every_codec_keeps_the_laws(codec: Codec, tolerance: float) -> None:
    check_codec(codec, tolerance)


def test_exact_is_exact_in_double_precision() -> None:
    check_codec(exact(), 1e-15, dtypes=[torch.float64])


@dataclass(frozen=True, repr=False)
class whole(SingleRound):
    """Right: every message is sent whole and added up by the reader."""

    linear = False

    def encode(self, x, memory):
        return x.clone()

    def decode(self, message, like):
        return message

    def bytes_of(self, x):
        return x.numel() * x.element_size()


class too_cheap(whole):
    """Wrong: declares half of what it sends."""

    def bytes_of(self, x):
        return x.numel() * x.element_size() // 2


class lossy(whole):
    """Wrong: loses a tenth."""

    def encode(self, x, memory):
        return x * 0.9


class shorter(whole):
    """Wrong: another shape comes back."""

    def decode(self, message, like):
        return message[:-1]


class chatty(whole):
    """Wrong: the number of turns depends on the data."""

    def converse(self, x, memory):
        if float(x.abs().sum()) > 0:
            yield Every(x)
        return (yield from super().converse(x, memory))

    def bytes_of(self, x):
        return 2 * x.numel() * x.element_size()


def test_a_codec_that_sends_every_message_whole_passes() -> None:
    check_codec(whole(), 1e-6)


@pytest.mark.parametrize("wrong", [too_cheap(), lossy(), shorter(), chatty()], ids=str)
def test_the_table_can_fail(wrong: Codec) -> None:
    with pytest.raises(AssertionError):
        check_codec(wrong, 1e-6)


def test_fp16_overflow_is_infinite_not_wrong() -> None:
    x = torch.full((4,), 1e6)
    assert torch.isinf(cast("fp16").decode(cast("fp16").encode(x, None), x.clone())).all()
