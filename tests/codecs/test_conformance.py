"""The table of laws can fail: a codec for each law that it breaks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from stretto.codecs import Codec, SingleRound, State
from stretto.codecs.base import refuse_not_finite
from stretto.codecs.conformance import check_codec, hold
from stretto.collective_ops import AllGather, AllReduceMean
from stretto.errors import TransportError


@dataclass(frozen=True, repr=False)
class whole(SingleRound):
    """Right: every message is sent whole and added up by the reader."""

    def init_state(self, like, context=None):
        return {"rounds": 0}

    def encode(self, x, state):
        refuse_not_finite(x, self)
        state["rounds"] += 1
        return x.clone().view(torch.uint8)

    def decode(self, message, like):
        if message.numel() != like.nbytes:
            raise TransportError("no message of mine")
        return like.copy_(message.clone().view(like.dtype))

    def bytes_of(self, x):
        return x.numel() * x.element_size()


class too_cheap(whole):
    """Wrong: declares half of what it sends."""

    def bytes_of(self, x):
        return x.numel() * x.element_size() // 2


class too_dear(whole):
    """Wrong: declares more than it sends, and says that it is just that."""

    def bytes_of(self, x):
        return x.numel() * x.element_size() + 1


class lossy(whole):
    """Wrong: loses a tenth."""

    def encode(self, x, state):
        return super().encode(x * 0.9, state)


class shorter(whole):
    """Wrong: another shape comes back."""

    def average(self, x, state, residual=None):
        return (yield from super().average(x, state, residual))[:-1]


class chatty(whole):
    """Wrong: the number of turns depends on the data."""

    def average(self, x, state, residual=None):
        if float(x.abs().sum()) > 0:
            yield AllGather(x)
        return (yield from super().average(x, state, residual))

    def bytes_of(self, x):
        return 2 * x.numel() * x.element_size()


class forgetful(whole):
    """Wrong: the residual is lost."""

    def encode_with_residual(self, x, residual, state):
        message = self.encode(x, state)
        residual.zero_().add_(0.01)
        return message


class careless(whole):
    """Wrong: NaN is sent."""

    def encode(self, x, state):
        return x.clone().view(torch.uint8)


class hasty(whole):
    """Wrong: NaN is refused, but the round was counted."""

    def encode(self, x, state):
        state["rounds"] += 1
        refuse_not_finite(x, self)
        return x.clone().view(torch.uint8)


class trusting(whole):
    """Wrong: bytes are taken for a message whatever they are."""

    def decode(self, message, like):
        return like.copy_(message.clone().view(like.dtype))


class talkative(whole):
    """Wrong: a message speaks of more numbers than there are."""

    def values_sent(self, message, like):
        return like.numel() + 1


class selfish(whole):
    """Wrong: every worker ends with a result of its own."""

    conserves = False

    def average(self, x, state, residual=None):
        mine = x.clone()
        found = yield from super().average(x, state, residual)
        return found + 1e-3 * mine


class boastful(whole):
    """Wrong: half of the numbers are left out, and it promises to leave out less."""

    def encode(self, x, state):
        return super().encode(torch.where(torch.arange(x.numel()) % 2 == 0, x, 0), state)

    def contraction(self, n):
        return 0.9


class one_sided(whole):
    """Wrong: promises to be right in the mean."""

    unbiased = True

    def encode(self, x, state):
        return super().encode(x * 1.01, state)


class rounding(whole):
    """Wrong: promises that every number is carried exactly or left whole in the residual."""

    exact_split = True

    def encode(self, x, state):
        return super().encode(x * 0.3, state)


class noisy(whole):
    """Wrong: something comes of nothing."""

    def encode(self, x, state):
        return super().encode(x + 1e-9, state)


class lost_state(whole):
    """Wrong: the state is an object that can't be saved."""

    def init_state(self, like, context=None):
        return _Lost()

    def encode(self, x, state):
        return super().encode(x, vars(state))


class _Lost:
    def __init__(self):
        self.rounds = 0


class half_saved(whole):
    """Wrong: a part of what the result depends on is not in the state."""

    def init_state(self, like, context=None):
        state = _Half()
        state.rounds = 0
        return state

    def encode(self, x, state):
        return super().encode(x * (1 + 0.1 * (state.rounds % 3)), vars(state))


class _Half(State):
    transient = ("rounds",)


WRONG = {
    lost_state: "can't be saved: it is a _Lost",
    half_saved: "after a saved state was restored in the same object differ|in another process differ",
    too_cheap: "at most",
    too_dear: "declared",
    lossy: "off by",
    shorter: "shape",
    chatty: "different things|depend on the data",
    forgetful: "lost",
    careless: "not refused",
    hasty: "state has changed",
    talkative: "contains",
    selfish: "results differ",
    boastful: "is left",
    one_sided: "biased",
    rounding: "to the bit",
    noisy: "nonzero",
}


def test_a_codec_that_sends_every_message_whole_passes() -> None:
    check_codec(whole(), 1e-6, dtypes=[torch.float32, torch.float64])
    check_codec(whole(), 0.02, dtypes=[torch.bfloat16])


@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: one.__name__)
def test_the_conformance_test_finds_each_defect(wrong: type[Codec]) -> None:
    tolerance = 1e-6 if wrong in (too_cheap, too_dear, lossy, shorter) else 1.0
    with pytest.raises(AssertionError, match=WRONG[wrong]):
        check_codec(wrong(), tolerance)


def test_a_codec_that_trusts_bytes_fails() -> None:
    with pytest.raises(RuntimeError, match="size"):
        check_codec(trusting(), 1e-6)


def test_hold_computes_the_results_of_collective_operations() -> None:
    def talk(mine: float):
        summed = yield AllReduceMean(torch.tensor([mine]))
        every = yield AllGather(torch.full((int(mine),), mine))
        return torch.cat([summed, *every])

    results, turns = hold([talk(1.0), talk(2.0)])
    assert [one.tolist() for one in results] == [[3.0, 1.0, 2.0, 2.0]] * 2
    assert [type(asks[0]) for asks in turns] == [AllReduceMean, AllGather]
    assert turns[1][1].tensor.tolist() == [2.0, 2.0]
