"""This worker's copy of the model: laid flat, exchanged as the recipe says, looked at as agreed, compared."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer

from stretto.members.ledger import Lease
from stretto.recipe import Recipe
from stretto.train.agreement import Look
from stretto.train.arena import Arena
from stretto.train.arrival import ArrivalExchange
from stretto.train.exchange import Weights
from stretto.train.frozen import FrozenVariance
from stretto.train.gradients import GradientExchange
from stretto.train.journal import Journal
from stretto.train.model import trainable
from stretto.train.replicas import compare
from stretto.train.rounds import RoundExchange
from stretto.train.state import MovingBuffers, OptimizerState
from stretto.train.stopwatch import Pace, Stopwatch
from stretto.train.surroundings import Surroundings
from stretto.train.tally import Tally
from stretto.what import gradients, momenta
from stretto.when import on_arrival, together
from stretto.wire import Wire
from stretto.wire.server import ServerWire

MEASURE_DRIFT_EVERY_S = 5.0


class Replica:
    """The model as one worker has it. `recipe` is None for a worker that exchanges nothing.

    `on_begin` is called before gradients are exchanged, `on_end` after every exchange, with the seconds blocked by it,
    `on_settled` with the leases whose work a server has. `skips`: an update with NaN is left out.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        recipe: Recipe | None,
        wire: Wire,
        watch: Stopwatch,
        journal: Journal,
        tally: Tally,
        weights: Weights,
        around: Surroundings,
        pace: Pace,
        on_begin: Callable[[], None],
        on_end: Callable[[float], None],
        on_settled: Callable[[list[Lease]], None],
        skips: bool,
    ) -> None:
        self._on_settled, self._skips = on_settled, skips
        self._model, self._optimizer, self._recipe = model, optimizer, recipe
        self._wire, self._watch, self._journal, self._tally, self._weights = wire, watch, journal, tally, weights
        self._around, self._pace = around, pace
        self._on_begin, self._on_end = on_begin, on_end
        self._optimizer_state = OptimizerState(optimizer, wire)
        self._buffers = MovingBuffers(model, wire)
        self._arena: Arena | None = None
        self.gradients: GradientExchange | None = None
        """The exchange of a recipe of gradients."""
        self.rounds: RoundExchange | None = None
        """The exchange of a recipe of parameters."""
        self.arrival: ArrivalExchange | None = None
        """The exchange of a worker that does not wait for others."""
        self._arenas = 0
        self._look: Look | None = None
        self._apart = False
        self._drift_at = 0.0
        if recipe is not None and isinstance(recipe.what, momenta) and wire.workers > 1:
            self._frozen = FrozenVariance(optimizer, recipe.what, self._is_warm)
        self.prepare()

    def prepare(self) -> None:
        """Lay the parameters into an arena, unless they lie there; a script may freeze, thaw or move them."""
        if self._recipe is None:
            return
        named = trainable(self._model, self._optimizer)
        if named and (self._arena is None or not self._arena.holds([one for _, one in named])):
            self._arena = Arena(named)
            self._rebuild()

    def _is_warm(self) -> bool:
        return self.gradients is not None and self.gradients.is_warm

    def stepped(self, steps: int) -> bool:
        """The optimizer has done its `steps`-th step; whether an exchange is due now."""
        self._apart = True
        if self.arrival is not None:
            self.arrival.stepped()
        when = self._recipe.when if self._recipe is not None else None
        return self.gradients is None and isinstance(when, together | on_arrival) and when.due(steps)

    def exchange(self) -> None:
        """One round of a recipe of parameters, among workers that wait for each other."""
        assert self.rounds is not None
        now = self._journal.t()
        measure = now - self._drift_at >= MEASURE_DRIFT_EVERY_S
        self.rounds.run(self._weights.share(), measure)
        if measure:
            self._drift_at = now
        self._apart = False

    def look(self) -> None:
        """Put the agreed model in place of this worker's own, where the two differ."""
        if self._look is not None:
            return
        if self.arrival is not None:
            self._look_at_server(self.arrival)
        elif self.gradients is not None:
            self._buffers.agree()
            self._buffers.follow_lead()
        elif self._arena is not None and self._apart:
            with self._watch.on("exchanging"):
                account = self._tally.account("looks")
                self._look = Look(self._arena, self._buffers, self._wire, self._weights.share(), account)

    def _look_at_server(self, arrival: ArrivalExchange) -> None:
        assert self._arena is not None
        arrival.meet()
        share = 1 / self._wire.workers
        with self._watch.on("exchanging"):
            account = self._tally.account("looks")
            self._look = Look(self._arena, self._buffers, self._wire, share, account, arrival.read)

    def resume(self, own: bool = True) -> None:
        """Go on after a look with this worker's own parameters, or else from what a server had."""
        look, self._look = self._look, None
        own = own or self.arrival is None or self.arrival.keeps_own
        if look is None:
            return
        if not own and self.arrival is not None:
            self.arrival.start_from_read()
        if self._is_changed(not look.resume(own)):
            self._journal.notice("the script changed the model after a pass; training goes on from its values")
            self._rebuild()

    def _is_changed(self, here: bool) -> bool:
        """Whether the script has changed the model; a server's parameters are given anew by all or by none."""
        if self.arrival is None:
            return here
        return any(told == b"changed" for told in self._wire.gather(b"changed" if here else b""))

    @property
    def drift(self) -> float | None:
        """How far this worker was from the agreed model when that was last measured, relative to the model."""
        if self._look is not None:
            return self._look.drift
        return self.rounds.drift if self.rounds is not None else None

    def check(self, when: str) -> bool:
        """Compare the replicas of all workers, which must be equal now; False when there is nothing to compare."""
        if self._arena is None or self._wire.workers == 1:
            return False
        wholes = {f"part {index}": part.theta for index, part in enumerate(self._arena.parts)}
        compare(self._wire, wholes, {slot.name: slot.parameter for slot in self._arena.slots}, when)
        return True

    def _rebuild(self) -> None:
        """Make the exchange anew for the arena as it is."""
        assert self._recipe is not None
        assert self._arena is not None
        if self.gradients is not None:
            self.gradients.release()
        if self._arenas and self._recipe.how.keeps_residual and self._wire.workers > 1:
            self._journal.notice(
                f"the parameters that train have changed: what was owed under {self._recipe} is dropped"
            )
        self._arenas += 1
        if self._recipe.asynchronous:
            self.arrival = self._make_arrival(self._arena, self._recipe, self.arrival)
        elif isinstance(self._recipe.what, gradients):
            self.gradients = GradientExchange(
                self._arena,
                self._recipe,
                self._wire,
                self._watch,
                self._tally,
                self._weights.share,
                self._around,
                self._pace,
                self._on_begin,
                self._on_end,
            )
        else:
            self.rounds = RoundExchange(
                self._arena,
                self._recipe,
                self._wire,
                self._watch,
                self._tally,
                self._optimizer_state,
                self._buffers,
                self._on_end,
            )

    def _make_arrival(self, arena: Arena, recipe: Recipe, before: ArrivalExchange | None) -> ArrivalExchange:
        if not isinstance(self._wire, ServerWire):
            raise TypeError(f"{recipe} needs a wire to a server")
        arrival = ArrivalExchange(
            arena,
            self._arenas,
            recipe,
            self._wire,
            self._watch,
            self._tally,
            self._optimizer,
            self._on_settled,
            self._on_end,
            self._skips,
        )
        if before is not None:
            arrival.held_s, arrival.outcomes = before.held_s, before.outcomes
            arrival.read()
            arrival.start_from_read()
        return arrival
