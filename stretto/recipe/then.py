"""Answers to *then*: how is the mean of an exchange applied?

`theta` are the parameters, flat; `answer` is the mean over workers, of the same length: the mean change since the
parameters last agreed, for answers that change the parameters at an exchange. Under `on_arrival` a server calls
`arrive` instead of `apply`, which computes the next version of the server's parameters from the present one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from stretto.lazy_torch import torch
from stretto.spec import Answer, Range
from stretto.state import State

if TYPE_CHECKING:
    from torch import Tensor


class OuterState(State):
    """State of one flat range between exchanges: the last agreed parameters, and the outer optimizer's velocity."""

    def __init__(self, theta: Tensor) -> None:
        self.agreed = theta.clone()
        self.velocity: Tensor | None = None


PIECE = 1 << 16
"""Numbers processed at a time, so that the second operation finds them in the processor's cache."""


def _add(theta: Tensor, answer: Tensor, agreed: Tensor, weight: float) -> None:
    """`agreed += weight * answer; theta = agreed`."""
    flat: tuple[Any, ...] = (theta, answer, agreed)
    for theta_piece, answer_piece, agreed_piece in zip(*(tensor.split(PIECE) for tensor in flat), strict=True):
        theta_piece.copy_(agreed_piece.add_(answer_piece, alpha=weight))


class Then(Answer):
    """Base of the answers to *then*."""

    axis = "then"
    example: ClassVar[str] = "replace()"


class OnParameters(Then):
    """Base of answers that change the parameters at the exchange."""

    def apply(self, theta: Tensor, answer: Tensor, state: OuterState) -> None:
        """Set `theta` and the state to the new agreed parameters; `answer` is the mean change of all workers."""
        raise NotImplementedError

    def arrive(self, now: Tensor, mean: Tensor, arrived: Arrived, velocity: Velocity | None, out: Tensor) -> None:
        """Write a server's next version into `out`; `mean` is that of the updates, weighted by samples and staleness.

        All are ranges of the same length. `out` may be `mean`; `now` is not modified.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Arrived:
    """Updates that a server applies together: `count` of `collect`, of `workers` workers.

    Fewer than `collect` are applied, with a smaller weight, if no more can arrive.
    """

    count: int
    collect: int
    workers: int

    @property
    def part(self) -> float:
        """Share of `collect` that has arrived."""
        return self.count / self.collect


class Velocity:
    """Outer momentum of a server for one flat range, and the sum of changes since its last update."""

    def __init__(self, like: Tensor) -> None:
        self.v = like.new_zeros(like.shape)
        self.since = like.new_zeros(like.shape)
        self.arrivals = 0


@dataclass(frozen=True, repr=False)
class step(Then):
    """Use the answer as the gradient of the optimizer's step."""


@dataclass(frozen=True, repr=False)
class frozen_variance(step):
    """Step as Adam does until the answer is a momentum; from then on with that momentum and a constant variance.

    theta -= lr * m / (sqrt(v / (1 - beta2^T)) + eps), with v and T those of the end of the warm-up; AdamW's decoupled
    weight decay is kept.
    """

    papers = ("Tang et al. 2021 (1-bit Adam, 2102.02888)",)


@dataclass(frozen=True, repr=False)
class replace(OnParameters):
    """Replace the parameters by their mean: `theta = theta_old + answer`, where the answer is the mean change."""

    papers = ("Su, Chen 2015 (1507.01239)",)

    def apply(self, theta: Tensor, answer: Tensor, state: OuterState) -> None:
        _add(theta, answer, state.agreed, 1.0)

    def arrive(self, now: Tensor, mean: Tensor, arrived: Arrived, velocity: Velocity | None, out: Tensor) -> None:
        out.copy_(mean)


@dataclass(frozen=True, repr=False)
class mix(Then):
    """Mix the worker's parameters with those of its peers, instead of agreeing with all: gossip averaging.

    `x_i = sum_j W_ij x_j`, with W the doubly stochastic mixing matrix that *whom* gives for the round: the mean of all
    workers' parameters stays, to rounding. Where the workers have n_j samples in a round, W_ij is weighted by n_j. The
    mean of all x_i is evaluated, and each of them counts the same in it.
    """

    papers = ("Lian et al. 2017 (1705.09056)",)
    strategy = "stretto.strategies.gossip.GossipStrategy"


class Weight(Answer):
    """Base of the weights of `add`. Staleness is the number of versions since the one an update was computed on."""

    axis = "weight"
    example: ClassVar[str] = "constant(1.0)"

    def of(self, staleness: int, workers: int) -> float:
        """Return the weight of an update of this staleness, with this number of workers."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class constant(Weight):
    """The same weight c for every answer."""

    c: Annotated[float, Range(above=0)]

    def of(self, staleness: int, workers: int) -> float:
        return self.c


@dataclass(frozen=True, repr=False)
class equal_share(Weight):
    """`1 / N` with N workers, so that one update of each worker adds up to their mean, as after a barrier."""

    def of(self, staleness: int, workers: int) -> float:
        return 1.0 / workers


@dataclass(frozen=True, repr=False)
class inverse_staleness(Weight):
    """`1 / t` for an update of staleness t above 0, and 1 for a fresh one.

    >>> [inverse_staleness().of(t, workers=4) for t in (0, 1, 2, 4)]
    [1.0, 1.0, 0.5, 0.25]
    """

    papers = ("Zhang, Gupta, Lian, Liu 2015 (1511.05950)",)

    def of(self, staleness: int, workers: int) -> float:
        return 1.0 / max(staleness, 1)


@dataclass(frozen=True, repr=False)
class exponential(Weight):
    """`exp(-lam * t)` for an update of staleness t."""

    lam: Annotated[float, Range(least=0)]

    def of(self, staleness: int, workers: int) -> float:
        return math.exp(-self.lam * staleness)


@dataclass(frozen=True, repr=False)
class delay_compensated(Weight):
    """Correct each number for the parameters' move since, with a first-order Taylor term of the gradient.

    theta -= lr * (g + lambda * g * g * (theta - theta_old)), with theta_old the parameters of the update
    ms = m * ms + (1 - m) * g * g;  lambda = lam / sqrt(ms + 1e-7)      adaptive
    lambda = lam                                                        otherwise

    g is the update divided by -lr: the gradient itself with plain SGD. Memory: for each worker the version that it
    has, and with `adaptive` ms.
    """

    lam: Annotated[float, Range(least=0)] = 2.0
    m: Annotated[float, Range(least=0, below=1)] = 0.95
    adaptive: bool = True

    papers = ("Zheng et al. 2016 (1609.08326)",)

    def of(self, staleness: int, workers: int) -> float:
        return 1.0

    def compensate(self, update: Tensor, lr: float, now: Tensor, old: Tensor, ms: Tensor | None) -> Tensor:
        """Return the update corrected to first order for the parameters `now`, and update `ms`."""
        g = update / -lr
        strength: Tensor | float = self.lam
        if ms is not None:
            ms.mul_(self.m).addcmul_(g, g, value=1 - self.m)
            strength = self.lam / (ms + 1e-7).sqrt()
        return update.addcmul(g * g * strength, now - old, value=-lr)


@dataclass(frozen=True, repr=False)
class add(OnParameters):
    """Add the answer to the parameters last agreed: `theta = theta_old + c * answer`.

    At a server each update has its own weight: `theta += (1/s) sum_l w(t_l) D_l` over the s that are collected.
    """

    weight: Weight = constant(1.0)

    def sources(self) -> tuple[str, ...]:
        """Return the papers of the weight."""
        return self.weight.sources()

    def apply(self, theta: Tensor, answer: Tensor, state: OuterState) -> None:
        assert isinstance(self.weight, constant)
        _add(theta, answer, state.agreed, self.weight.c)

    def arrive(self, now: Tensor, mean: Tensor, arrived: Arrived, velocity: Velocity | None, out: Tensor) -> None:
        torch.add(now, mean, alpha=arrived.part, out=out)


@dataclass(frozen=True, repr=False)
class pull(OnParameters):
    """Pull each worker towards the server's parameters c, and those towards the worker's (elastic averaging).

    e = alpha * (x_i - c);  x_i -= e;  c += e
    """

    alpha: Annotated[float, Range(above=0, most=1)] = 0.5

    papers = ("Zhang, Choromanska, LeCun 2015 (elastic averaging SGD)",)

    def arrive(self, now: Tensor, mean: Tensor, arrived: Arrived, velocity: Velocity | None, out: Tensor) -> None:
        torch.lerp(now, mean, min(self.alpha * arrived.count, 1.0), out=out)


@dataclass(frozen=True, repr=False)
class outer(OnParameters):
    """Step an outer SGD with the outer gradient `d = -answer`, as DiLoCo does.

    v = momentum * v + d;  theta = theta_old - lr * (d + momentum * v)   with nesterov
                           theta = theta_old - lr * v                    without
    Memory: the parameters last agreed and v.

    At a server, where updates are stale, v is updated only with every n-th application, n = N / collect, by the mean
    d of these n (delayed Nesterov, Liu et al. 2024, 2401.09135; n = 1 is the rule above):

    theta -= lr * d / n,  and with every n-th:  v = momentum * v + mean(d);  theta -= lr * momentum * v
    """

    lr: Annotated[float, Range(above=0)] = 0.7
    momentum: Annotated[float, Range(least=0, below=1)] = 0.9
    nesterov: bool = True

    papers = ("Douillard et al. 2023 (2311.08105)", "Sutskever et al. 2013 (Nesterov momentum)")

    def apply(self, theta: Tensor, answer: Tensor, state: OuterState) -> None:
        if state.velocity is None:
            state.velocity = answer.new_zeros(answer.shape)
        state.velocity.mul_(self.momentum).sub_(answer)
        if self.nesterov:
            state.agreed.add_(answer, alpha=self.lr).sub_(state.velocity, alpha=self.lr * self.momentum)
        else:
            state.agreed.sub_(state.velocity, alpha=self.lr)
        theta.copy_(state.agreed)

    def arrive(self, now: Tensor, mean: Tensor, arrived: Arrived, velocity: Velocity | None, out: Tensor) -> None:
        assert velocity is not None
        n = max(arrived.workers // arrived.collect, 1)
        velocity.since.sub_(mean, alpha=arrived.part / n)
        torch.add(now, mean, alpha=self.lr * arrived.part / n if self.nesterov else 0.0, out=out)
        velocity.arrivals += 1
        if velocity.arrivals % n == 0:
            velocity.v.mul_(self.momentum).add_(velocity.since)
            velocity.since.zero_()
            out.sub_(velocity.v, alpha=self.lr * (self.momentum if self.nesterov else 1.0))
