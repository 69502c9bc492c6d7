"""This worker's copy of the model: laid flat, exchanged as the recipe says, looked at as agreed, compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stretto.members.ledger import Lease
from stretto.recipe import Recipe
from stretto.train import memories
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
from stretto.wire.enduring import has_others
from stretto.wire.server import ServerWire
from stretto.wire.shards import RuleMemory

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
        joined = wire.joined if isinstance(wire, ServerWire) else None
        self._arenas = max(joined.arena - 1, 0) if joined is not None else 0
        self._look: Look | None = None
        self._apart = False
        self._drift_at = 0.0
        if recipe is not None and isinstance(recipe.what, momenta) and has_others(wire):
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
        self.rounds.run(self._weights.share, measure)
        if measure:
            self._drift_at = now
        self._apart = False

    def look(self, called: bool = False) -> None:
        """Put the agreed model in place of this worker's own, where the two differ.

        Where nobody waits all meet for it, because they were `called`, or else because it is due.
        """
        if self._look is not None:
            return
        if self.arrival is not None:
            self._look_at_server(self.arrival, called)
        elif self.gradients is not None:
            self._buffers.agree()
            self._buffers.follow_lead()
        elif self._arena is not None and self._apart:
            with self._watch.on("exchanging"):
                account = self._tally.account("looks")
                self._look = Look(self._arena, self._buffers, self._wire, self._weights.share, account)

    def _look_at_server(self, arrival: ArrivalExchange, called: bool) -> None:
        assert self._arena is not None
        arrival.meet(called)
        with self._watch.on("exchanging"):
            account = self._tally.account("looks")
            self._look = Look(self._arena, self._buffers, self._wire, self._equal_share, account, arrival.look)

    def _equal_share(self) -> float:
        return 1 / self._wire.workers

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

    # --- what others take over ----------------------------------------------------------------------------------

    @property
    def recipe(self) -> Recipe | None:
        """The recipe that it is exchanged by."""
        return self._recipe

    @property
    def keeps_own_optimizer(self) -> bool:
        """Whether the optimizer's state differs from worker to worker."""
        return self.gradients is None

    @property
    def _memories(self) -> Sequence[Any]:
        if self.arrival is not None:
            return [memory for one in self.arrival.ranges for memory in one.memories]
        exchange = self.gradients or self.rounds
        return exchange.remembered.memories if exchange is not None else []

    def regroup(self, workers: int, joined: bool, later: bool) -> None:
        """Others exchange from now on; see the exchanges."""
        exchange = self.gradients or self.rounds
        if exchange is not None:
            exchange.regroup(workers, joined, later)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is the same at all workers besides the model and the optimizer: numbers and tensors.

        With what the servers' rule keeps. Raises AnewError when one of them was lost.
        """
        facts: dict[str, Any] = {"moving": self._buffers.state(), "common": {}, "shards": self._shards}
        facts |= {"what": self._kind_of_debts, "how": self._codec}
        tensors: dict[str, Tensor] = {}
        for index, memory in enumerate(self._memories):
            _sort(memories.common(memory), f"common/{index}", facts["common"], tensors)
        for index, one in enumerate(self.rounds.ranges if self.rounds is not None else ()):
            _sort(memories.leaves(one.memory), f"agreed/{index}", facts["common"], tensors)
        if self.arrival is not None:
            kept = self.arrival.rule_memory()
            facts["arrivals"] = kept.arrivals
            for name, parts in kept.tensors.items():
                tensors |= {f"server/{name}/{index}": one for index, one in enumerate(parts)}
        return facts, tensors

    def own_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What this worker has for itself: what its codecs remember, and buffers that are not exchanged.

        And parameters that are only pulled towards the server's.
        """
        facts: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {f"buffer/{name}": one for name, one in self._model.named_buffers()}
        if self.arrival is not None and self.arrival.keeps_own and self._look is not None:
            tensors |= {f"own/{index}": one for index, one in enumerate(self._look.own_parameters)}
        for index, memory in enumerate(self._memories):
            _sort(memories.leaves(memory), f"memory/{index}", facts, tensors)
        return facts, tensors | self.owed()

    def take(
        self,
        facts: dict[str, Any],
        tensors: Mapping[str, Tensor],
        own: tuple[dict[str, Any], dict[str, Tensor]] | None,
        orphans: Sequence[tuple[dict[str, Any], dict[str, Tensor]]],
    ) -> None:
        """Take over what others have; `own` is what this worker had, `orphans` what those had who are not there."""
        if self.arrival is not None:  # the server is given the parameters that were taken over
            self._make_exchange(self._kept_rule(facts, tensors))
        self._buffers.restore(facts["moving"])
        found: dict[str, Any] = facts["common"] | dict(tensors)
        is_of_kind = facts["what"] == self._kind_of_debts
        is_alike = is_of_kind and facts["how"] == self._codec and facts["shards"] == self._shards
        for index, memory in enumerate(self._memories if is_alike else ()):
            memories.put(memory, _under(found, f"common/{index}"))
        for index, one in enumerate(self.rounds.ranges if self.rounds is not None else ()):
            memories.put(one.memory, _under(found, f"agreed/{index}"))
        if own is not None:
            kept = own[0]["memories"] | own[1]
            for index, memory in enumerate(self._memories if is_alike else ()):
                memories.put(memory, _under(kept, f"memory/{index}"))
            if not is_alike and is_of_kind:
                self.add_owed(own[1])
            self._take_own(kept)
        for _, theirs in orphans if is_of_kind else ():
            self.add_owed(theirs)

    def _kept_rule(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RuleMemory:
        """What a server's rule kept, if it is of parameters that lie as they do here."""
        assert self._arena is not None
        names = sorted({path.split("/")[1] for path in tensors if path.startswith("server/")})
        lengths = [part.theta.numel() for part in self._arena.parts]
        found = {name: [tensors.get(f"server/{name}/{index}") for index in range(len(lengths))] for name in names}
        fits = {
            name: [one for one in parts if one is not None]
            for name, parts in found.items()
            if [one.numel() if one is not None else 0 for one in parts] == lengths
        }
        return RuleMemory(fits, facts.get("arrivals", []) if fits else [])

    def _take_own(self, kept: Mapping[str, Any]) -> None:
        """Buffers as this worker had them, and parameters that are only pulled towards a server's."""
        for name, buffer in self._model.named_buffers():
            buffer.copy_(kept[f"buffer/{name}"])
        if self.arrival is not None and self.arrival.keeps_own:
            for index, one in enumerate(self.arrival.ranges):
                mine = kept.get(f"own/{index}")
                if mine is not None and mine.shape == one.part.theta.shape:
                    one.part.theta.copy_(mine)

    @property
    def _kind_of_debts(self) -> str:
        """What is owed: gradients are no updates, and have another sign and size."""
        return type(self._recipe.what).__name__ if self._recipe is not None else ""

    @property
    def _codec(self) -> str:
        """How it is encoded, as it can be typed."""
        return str(self._recipe.how) if self._recipe is not None else ""

    @property
    def _shards(self) -> int:
        """How many servers the parameters are shared out to."""
        return self.arrival.shards if self.arrival is not None else 0

    def owed(self) -> dict[str, Tensor]:
        """What this worker still owes, by range."""
        found = {}
        for index, mine in enumerate(self._residuals()):
            if mine:
                found[f"owed/{index}"] = mine[0] if len(mine) == 1 else torch.cat(mine)
        return found

    def add_owed(self, owed: Mapping[str, Tensor]) -> None:
        """Take on what another worker owed, as far as what is kept here can hold it."""
        for index, mine in enumerate(self._residuals()):
            theirs, lengths = owed.get(f"owed/{index}"), [one.numel() for one in mine]
            if not mine or theirs is None or theirs.numel() != sum(lengths):
                continue
            for memory, part, one in zip(self._codec_memories[index], torch.split(theirs, lengths), mine, strict=True):
                assert self._recipe is not None
                self._recipe.how.take_on(memory, part.to(one.device))

    def _residuals(self) -> list[list[Tensor]]:
        """What is owed of each range, by the shards that it is shared out to; nothing where the codec keeps none."""
        if self._recipe is None:
            return []
        codec = self._recipe.how
        found = [[codec.residual(one) for one in each] for each in self._codec_memories]
        return [[one for one in each if one is not None] for each in found]

    @property
    def _codec_memories(self) -> list[list[Any]]:
        """What the codec remembers of each range, by the shards that it is shared out to."""
        if self.arrival is not None:
            return [one.memories for one in self.arrival.ranges]
        return [[self._codec_memory(one)] for one in self._memories]

    def _codec_memory(self, memory: Any) -> Any:
        what = self._recipe.what if self._recipe is not None else None
        return what.codec_memory(memory) if isinstance(what, gradients) else memory

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
        """The parameters lie otherwise, or have been changed."""
        assert self._recipe is not None
        if self._arenas and self._recipe.how.keeps_residual and self._wire.workers > 1:
            self._journal.notice(
                f"the parameters that train have changed: what was owed under {self._recipe} is dropped"
            )
        self._make_exchange()

    def _make_exchange(self, kept: RuleMemory | None = None) -> None:
        """Make the exchange anew for the arena as it is; a server's rule has what one has `kept` before."""
        assert self._recipe is not None
        assert self._arena is not None
        if self.gradients is not None:
            self.gradients.release()
        self._arenas += 1
        if self._recipe.asynchronous:
            self.arrival = self._make_arrival(self._arena, self._recipe, self.arrival, kept)
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

    def _make_arrival(
        self, arena: Arena, recipe: Recipe, before: ArrivalExchange | None, kept: RuleMemory | None
    ) -> ArrivalExchange:
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
            kept,
        )
        if before is not None:
            arrival.held_s, arrival.outcomes = before.held_s, before.outcomes
            arrival.read()
            arrival.start_from_read()
        return arrival


def _sort(leaves: Mapping[str, Any], where: str, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Numbers to the facts, tensors to the tensors."""
    for path, value in leaves.items():
        if isinstance(value, Tensor):
            tensors[where + path] = value
        else:
            facts[where + path] = value


def _under(found: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {path.removeprefix(where): value for path, value in found.items() if path.startswith(f"{where}/")}
