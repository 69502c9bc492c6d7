"""Answers to *what*: which tensors do workers exchange?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from stretto.collective_ops import AllReduceMean
from stretto.lazy_torch import torch
from stretto.spec import Answer, Range
from stretto.state import Members, State

if TYPE_CHECKING:
    from torch import Tensor

    from stretto.collective_ops import CollectiveCoroutine, Encoding


PIECE = 1 << 16
"""Numbers processed at a time, so that the second operation finds them in the processor's cache."""


class What(Answer):
    """Base of the answers to *what*."""

    axis = "what"
    example: ClassVar[str] = "gradients()"

    def init_state(self, how: Encoding, like: Tensor, context: Any) -> Any:
        """Return a new state for exchanges of tensors like this one in this encoding."""
        return how.init_state(like, context)

    def average(self, how: Encoding, x: Tensor, state: Any) -> CollectiveCoroutine:
        """Return the coroutine that computes the mean of all workers' contributions `x`, which may be overwritten."""
        return how.average(x, state)

    def codec_state(self, state: Any) -> Any:
        """Return the codec's part of a state."""
        return state


class OfParameters(What):
    """Base of answers about the parameters, exchanged after local steps.

    They are sent as the change since the parameters last agreed, `theta_i - theta_old`: the sum of n changes loses far
    fewer bits to rounding than the sum of n shares of the parameters, and what no worker changed stays bit for bit.
    """

    strategy = "stretto.strategies.local_strategy.LocalStrategy"

    def bring(self, theta: Tensor, agreed: Tensor, share: float, out: Tensor) -> None:
        """Write this worker's contribution, weighted by its share of the samples, into `out`."""
        flat: tuple[Any, ...] = (theta, agreed, out)
        for theta_piece, agreed_piece, out_piece in zip(*(tensor.split(PIECE) for tensor in flat), strict=True):
            torch.sub(theta_piece, agreed_piece, out=out_piece).mul_(share)


@dataclass(frozen=True, repr=False)
class gradients(What):
    """The gradient of each backward pass, averaged before `backward()` returns.

    `g = sum_i (n_i / n) g_i`, with n_i the samples of worker i. Cost: the bytes of the model a backward pass.
    """

    strategy = "stretto.strategies.gradient_strategy.GradientStrategy"


class DifferencesState(State):
    """State of `gradient_differences`: this worker's h_m, the sum h over all workers, and the codec's state."""

    def __init__(self, like: Tensor, codec: Any, worker: int) -> None:
        self.own = like.new_zeros(like.shape)
        self.all = like.new_zeros(like.shape)
        self.codec = codec
        self.turn = worker

    def reset(self, members: Members) -> None:
        """Set h_m and h to 0: the sum would still contain the h_m of workers that left."""
        super().reset(members)
        self.own.zero_()
        self.all.zero_()


@dataclass(frozen=True, repr=False)
class gradient_differences(gradients):
    """The difference between a worker's gradient and a state of it that all workers keep.

    D_m = g_m - h_m;  h_m += beta * sent_m;  the answer is h + sum_m sent_m;  then h += beta * sum_m sent_m

    g_m is the contribution of worker m (its gradient times its share of the samples), sent_m its decoded message, h
    the sum of all h_m. All states begin at 0. With exact messages the answer is that of `gradients()` for every beta;
    with `error_feedback` around the codec the residual is added to the next difference (GD-SEC's e_m). beta = 1 without
    it is EF21. With `groups` above 1 every `groups`-th worker sends in a round, in turn; other workers send nothing and
    keep their states. Memory: two tensors the size of the gradient.
    """

    beta: Annotated[float, Range(least=0, most=1)] = 1.0
    groups: Annotated[int, Range(least=1)] = 1

    papers = ("Chen, Blum, Takac, Sadler 2022 (2202.02491)", "Fatkhullin et al. 2021 (2110.03294)")

    def init_state(self, how: Encoding, like: Tensor, context: Any) -> DifferencesState:
        return DifferencesState(like, how.init_state(like, context), context.worker)

    def average(self, how: Encoding, x: Tensor, state: DifferencesState) -> CollectiveCoroutine:
        difference = yield from how.exchange(self._message(how, x.sub_(state.own), state), x)
        answer = state.all + difference
        state.all.add_(difference, alpha=self.beta)
        return answer

    def codec_state(self, state: DifferencesState) -> Any:
        return state.codec

    def _message(self, how: Encoding, difference: Tensor, state: DifferencesState) -> Tensor:
        """Return this worker's message, and add it to its state."""
        silent, state.turn = state.turn % self.groups > 0, state.turn + 1
        if silent:
            return _nothing(difference)
        message = how.encode(difference, state.codec)
        state.own.add_(how.decode(message, difference.new_empty(difference.shape)), alpha=self.beta)
        return message


class MomentaState(State):
    """State of `momenta`: the agreed momentum m, the number of rounds, and the codec's state."""

    transient = ("workers",)
    replicated = ("m", "rounds")

    def __init__(self, like: Tensor, codec: Any, workers: int) -> None:
        self.m = like.new_zeros(like.shape)
        self.rounds = 0
        self.workers = workers
        self.codec = codec

    def reset(self, members: Members) -> None:
        """Use the new number of workers."""
        super().reset(members)
        self.workers = members.workers


@dataclass(frozen=True, repr=False)
class momenta(gradients):
    """The momentum of Adam updated with this worker's gradient, after a warm-up with exact gradients.

    m_i = beta m + (1 - beta) g_i;  m = sum_i (n_i / n) m_i

    g_i is the gradient of worker i, m the last mean. `warm_up` rounds exchange g_i exactly and update m;
    `beta` is the optimizer's own beta1. Memory: a tensor the size of the gradient.
    """

    warm_up: Annotated[int, Range(least=1)] = 100
    beta: Annotated[float, Range(least=0, below=1)] = 0.9

    papers = ("Tang et al. 2021 (1-bit Adam, 2102.02888)",)

    def init_state(self, how: Encoding, like: Tensor, context: Any) -> MomentaState:
        return MomentaState(like, how.init_state(like, context), context.workers)

    def codec_state(self, state: MomentaState) -> Any:
        return state.codec

    def average(self, how: Encoding, x: Tensor, state: MomentaState) -> CollectiveCoroutine:
        if state.rounds < self.warm_up:
            gradient = cast("Tensor", (yield AllReduceMean(x)))
            state.m.mul_(self.beta).add_(gradient, alpha=1 - self.beta)
            state.rounds += 1
            return gradient
        x.mul_(1 - self.beta).add_(state.m, alpha=self.beta / state.workers)
        state.m.copy_((yield from how.average(x, state.codec)))
        state.rounds += 1
        return state.m.clone()


def _nothing(like: Tensor) -> Tensor:
    """Return the empty message of a worker that sends nothing in a round."""
    return like.new_empty(0, dtype=torch.uint8)


@dataclass(frozen=True, repr=False)
class updates(OfParameters):
    """The change of the parameters over the local steps, which includes learning rate and momentum.

    `D_i = theta_i - theta_old`, with theta_old the parameters last agreed. The optimizer's state stays local.
    """


@dataclass(frozen=True, repr=False)
class parameters(OfParameters):
    """The parameters themselves: `theta = sum_i (n_i / n) theta_i`, sent as their change (see OfParameters).

    optimizer_state: treatment of the optimizer's state at an exchange: "keep" that of each worker,
    "average" it with the parameters (twice the bytes with momentum, three times with Adam), or "reset" it to zero.
    """

    optimizer_state: Literal["average", "keep", "reset"] = "keep"
