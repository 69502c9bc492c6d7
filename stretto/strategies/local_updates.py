"""The exchange of parameters or updates after local steps: one round, committed as a whole or not at all."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stretto.codecs import CodecContext
from stretto.errors import NotFiniteError
from stretto.recipe.recipe import Recipe
from stretto.recipe.then import OnParameters, OuterState
from stretto.recipe.what import OfParameters, parameters
from stretto.runtime.phase_timer import Stopwatch
from stretto.strategies.codec_state import CodecStates
from stretto.strategies.collective_runner import CollectiveRunner, finish
from stretto.strategies.flat_buffers import FlatBuffer, FlatParameters
from stretto.strategies.tensor_sync import FlatTensors, MovingBuffers, OptimizerState
from stretto.strategies.traffic_counters import Tally
from stretto.transport import Transport
from stretto.transport.elastic import ElasticTransport, attempted


class RoundRange:
    """What a worker keeps for one part of the arena between rounds."""

    def __init__(self, part: FlatBuffer, recipe: Recipe, context: CodecContext) -> None:
        self.part = part
        self.state = OuterState(part.theta)
        self.codec_state = recipe.how.init_state(part.theta, context)
        self.scratch = torch.empty_like(part.theta)
        self._other: Tensor | None = None

    def turn(self) -> None:
        """Write the next round elsewhere: the answers of the last one may lie here, and somebody may lack them."""
        other = torch.empty_like(self.scratch) if self._other is None else self._other
        self.scratch, self._other = other, self.scratch


class LocalUpdates:
    """Exchanges what a recipe says about the parameters, and does with the answer what it says.

    Nothing of the model changes before all answers are there and finite: a round commits as a whole or not at all.
    One worker agrees with itself: its rounds change nothing, and it owes nothing for them.
    """

    def __init__(
        self,
        arena: FlatParameters,
        recipe: Recipe,
        wire: Transport,
        watch: Stopwatch,
        tally: Tally,
        optimizer_state: OptimizerState,
        buffers: MovingBuffers,
        on_end: Callable[[float], None],
    ) -> None:
        assert isinstance(recipe.what, OfParameters)
        assert isinstance(recipe.then, OnParameters)
        self._what, self._then, self._how = recipe.what, recipe.then, recipe.how
        self._wire, self._watch, self._on_end = wire, watch, on_end
        self._tally, self._account = tally, tally.account(type(recipe.what).__name__)
        self._optimizer_state, self._buffers = optimizer_state, buffers
        self._flag = None if recipe.how.elementwise else torch.zeros(1)
        """What tells the others of a change beside the parameters; None where the spare number of each part does."""
        self.ranges = [RoundRange(part, recipe, tally.context(part)) for part in arena.parts]
        self.drift: float | None = None
        self._began = 0.0
        self._endures = isinstance(wire, ElasticTransport)
        self.remembered = CodecStates([one.codec_state for one in self.ranges], self._endures)

    def regroup(self, workers: int, joined: bool, later: bool) -> None:
        """Others exchange from now on."""
        self.remembered.regroup(workers, joined, later)

    @property
    def _state_rule(self) -> str:
        return self._what.optimizer_state if isinstance(self._what, parameters) else "keep"

    @torch.no_grad()
    def run(self, share: Callable[[], float], measure_drift: bool = False, changed: bool = False) -> bool:
        """One round. `share` is this worker's part of the samples since the last; all shares sum to 1.

        When a worker is lost on the way, those who are left do the round again from its beginning. Returns True if any
        worker has `changed` what it trains since the workers agreed on that.
        """
        before = self._watch.switch("encoding")
        self._buffers.agree(again=False)
        extras = [FlatTensors(self._buffers.floating())]
        self._mark(changed)
        if self._flag is not None:
            extras.append(FlatTensors([self._flag]))
        if self._state_rule == "average":
            extras.append(self._optimizer_state.to_average())
        self.remembered.begin()
        for one in self.ranges if self._endures else ():
            one.turn()
        answers, extra_answers = attempted(
            self._wire, lambda: self._answers(share(), extras), lambda: self._answers_again(share(), extras)
        )
        self._on_end(self._watch.spent["exchanging"] - self._began)
        self._refuse_not_finite(answers)
        if measure_drift:
            self.drift = _relative_distance(self.ranges, answers)
        self._commit(answers)
        for extra, means in zip(extras, extra_answers, strict=True):
            extra.take(means)
        self.remembered.end()
        self._watch.switch(before)
        return self._is_marked(answers)

    def _mark(self, changed: bool) -> None:
        """Tell the others of a change, in a number of its own or in the one of each part that is no parameter's."""
        if self._flag is not None:
            self._flag.fill_(float(changed))
        elif changed:
            for one in self.ranges:
                one.part.theta[-1] = 1

    def _is_marked(self, answers: list[Tensor]) -> bool:
        if self._flag is not None:
            return bool(self._flag > 0)
        marked = any(bool(one[-1] > 0) for one in answers)
        for one in self.ranges if marked else ():
            one.part.theta[-1] = one.state.agreed[-1] = 0
            if one.state.velocity is not None:
                one.state.velocity[-1] = 0
        return marked

    def _answers(self, share: float, extras: list[FlatTensors]) -> tuple[list[Tensor], list[list[Tensor]]]:
        """What all say to what this worker has learned; one that is alone has nobody to encode it for."""
        state = self._tally.account("state")
        if self._wire.workers == 1:
            self._bring(share)
            return [one.scratch for one in self.ranges], [finish(one.ask_mean(self._wire, share)) for one in extras]
        talks = self._ask(share)
        return self._wait(talks, [extra.ask_mean(self._wire, share, state) for extra in extras])

    def _answers_again(self, share: float, extras: list[FlatTensors]) -> tuple[list[Tensor], list[list[Tensor]]]:
        self.remembered.restore()
        return self._answers(share, extras)

    def _bring(self, share: float) -> None:
        for one in self.ranges:
            self._what.bring(one.part.theta, one.state.agreed, share, one.scratch)

    def _ask(self, share: float) -> list[CollectiveRunner]:
        self._bring(share)
        given = self._tally.norm_of([one.scratch for one in self.ranges])
        try:
            talks = [self._talk(one) for one in self.ranges]
        except NotFiniteError as error:
            raise self._named() or error from None
        self._tally.owes(given, self._how, [one.codec_state for one in self.ranges])
        return talks

    def _talk(self, one: RoundRange) -> CollectiveRunner:
        talk = CollectiveRunner(self._wire, self._how.average(one.scratch, one.codec_state), self._account)
        if self._account is not None and talk.ask is not None:
            self._account.began(one.scratch.nbytes)
            self._tally.spoke(self._how, talk.ask.tensor, one.scratch)
        return talk

    def _named(self) -> NotFiniteError | None:
        """What this worker would have sent that is not finite, by name."""
        for one in self.ranges:
            if not torch.isfinite(one.scratch.sum()):
                return NotFiniteError(_not_finite(one, one.scratch, self._how))
        return None

    def _wait(
        self, talks: list[CollectiveRunner], extras: list[list[CollectiveRunner]]
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        self._watch.switch("exchanging")
        self._began = self._watch.spent["exchanging"]
        answers = finish(talks)
        extra_answers = [finish(one) for one in extras]
        self._watch.switch("encoding")
        return answers, extra_answers

    def _commit(self, answers: list[Tensor]) -> None:
        if self._wire.workers == 1:  # what it has is agreed, for whoever comes
            for one in self.ranges if self._endures else ():
                one.state.agreed.copy_(one.part.theta)
            return
        for one, answer in zip(self.ranges, answers, strict=True):
            self._then.apply(one.part.theta, answer, one.state)
        if self._state_rule == "reset":
            self._optimizer_state.reset()

    def _refuse_not_finite(self, answers: list[Tensor]) -> None:
        for one, answer in zip(self.ranges, answers, strict=True):
            if not torch.isfinite(answer.sum()):
                raise NotFiniteError(_not_finite(one, answer, self._how))


def _not_finite(one: RoundRange, answer: Tensor, how: object) -> str:
    for slot in one.part.slots:
        wrong = answer[slot.start : slot.stop]
        if not torch.isfinite(wrong).all():
            own = one.part.theta[slot.start : slot.stop]
            where = "this worker's own, too" if not torch.isfinite(own).all() else f"not this worker's (how={how})"
            return f"the agreed change of {slot.name} is NaN or infinite; {where}; nothing was changed by this round"
    return "the sum of an exchange is infinite; nothing was changed by this round"


def _relative_distance(ranges: list[RoundRange], answers: list[Tensor]) -> float | None:
    """How far this worker was from the mean of all, relative to the mean."""
    apart = whole = 0.0
    for one, answer in zip(ranges, answers, strict=True):
        mean = one.state.agreed + answer
        apart += float((one.part.theta - mean).norm()) ** 2
        whole += float(mean.norm()) ** 2
    return (apart / whole) ** 0.5 if whole else None
