"""Choice between a codec and exact numbers by measured time."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, cast

from stretto.codecs.base import SINGLE_WORKER, Codec, CodecContext, refuse_not_finite
from stretto.codecs.by_size import Placed, bytes_in, conserves
from stretto.collective_ops import AllReduceMean, CollectiveCoroutine
from stretto.errors import RecipeError, explain
from stretto.lazy_torch import torch
from stretto.spec import Range
from stretto.state import Members, State

if TYPE_CHECKING:
    from torch import Tensor

AGREEMENT_BYTES = 12


@dataclass(frozen=True, repr=False)
class when_it_pays(Placed):
    """Encode if encoding, sending and decoding is measured to be faster than sending exact numbers.

    In the first `rounds` rounds exact and encoded exchanges alternate, exact first. Each worker times whole exchanges,
    except the first of each kind. After the last of these rounds the workers average their times, use the faster way
    for `again` rounds, and then measure again. Worker 0 reports the decision with both times. Without a clock every
    round is encoded; either all workers have a clock or none has. An exact round sends a residual whole.

    Cost: at most that of the slower way, and 12 bytes for each decision.
    """

    codec: Codec
    rounds: Annotated[int, Range(least=4)] = 10
    again: Annotated[int, Range(least=1)] = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codec.keeps_residual:
            raise RecipeError(
                explain(
                    f"the residual of {self.codec} would not be sent while rounds are exact",
                    got=str(self),
                    expected="a codec without a residual of its own; an exact round sends that of error_feedback",
                    to_type="error_feedback(when_it_pays(top_k(0.01)))",
                )
            )

    @property
    def fixed_size(self) -> bool:
        return False

    @property
    def needs_theta(self) -> bool:
        return self.codec.needs_theta

    @property
    def conserves(self) -> bool:
        """True if the codec drops nothing on purpose."""
        return conserves(self.codec)

    def sources(self) -> tuple[str, ...]:
        return self.codec.sources()

    def init_state(self, like: Tensor, context: CodecContext = SINGLE_WORKER) -> TrialState:
        return TrialState(self.codec.init_state(like, context), context)

    def average(self, x: Tensor, state: Any, residual: Tensor | None = None) -> CollectiveCoroutine:
        trial: TrialState = state
        refuse_not_finite(x, self)
        position = trial.round % (self.rounds + self.again)
        encoded = trial.encodes if trial.clock is None or position >= self.rounds else position % 2 == 1
        started_s = trial.read()
        result = yield from (self.codec.average(x, trial.inner, residual) if encoded else _exactly(x, residual))
        if 2 <= position < self.rounds:
            trial.seconds[encoded].append(trial.read() - started_s)
        if trial.clock and position == self.rounds - 1:
            self._decide(trial, cast("Tensor", (yield AllReduceMean(trial.times().to(x.device)))))
        trial.round += 1
        return result

    def _decide(self, trial: TrialState, agreed: Tensor) -> None:
        """Choose the faster way. The decision is equal at all workers, since all see one sum of times."""
        exactly, encoded, workers = agreed.tolist()
        trial.encodes = encoded < exactly
        trial.seconds = ([], [])
        choice = "encoding" if trial.encodes else "sending exactly"
        if trial.notice and trial.worker == 0:
            trial.notice(
                f"an exchange took {encoded / workers:.3g} s with {self.codec} and {exactly / workers:.3g} s without: "
                f"{choice} for {self.again} rounds"
            )

    def bytes_of(self, x: Tensor, context: CodecContext = SINGLE_WORKER) -> int:
        return max(x.numel() * x.element_size(), bytes_in(self.codec, x, context)) + AGREEMENT_BYTES


class TrialState(State):
    """State of `when_it_pays`: the codec's state, the rounds so far, the times of both ways, and the decision.

    The rounds and the decision must be equal at all workers.
    """

    transient = ("clock", "notice", "worker")

    def __init__(self, inner: Any, context: CodecContext) -> None:
        self.inner = inner
        self.clock, self.notice, self.worker = context.clock, context.notice, context.worker
        self.round = 0
        self.encodes = True
        self.seconds: tuple[list[float], list[float]] = ([], [])
        """Seconds of whole exchanges, exact and encoded."""

    def reset(self, members: Members) -> None:
        """Measure both ways again: their times depend on the members."""
        super().reset(members)
        self.round, self.encodes, self.seconds = 0, True, ([], [])

    def read(self) -> float:
        """Return the time in seconds; 0 without a clock."""
        return self.clock() if self.clock else 0.0

    def times(self) -> Tensor:
        """Return this worker's contribution to the decision: mean seconds exact and encoded, and the count 1."""
        return torch.tensor([*map(fmean, self.seconds), 1.0], device="cpu")


def _exactly(x: Tensor, residual: Tensor | None) -> CollectiveCoroutine:
    """Send x and the residual exactly."""
    result = cast("Tensor", (yield AllReduceMean(x if residual is None else x.add_(residual))))
    if residual is not None:
        residual.zero_()
    return result
