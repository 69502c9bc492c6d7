"""This worker's copy of the model: laid flat, exchanged as the recipe says, looked at as agreed, compared."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stretto import state as states_
from stretto.data.leases import Lease
from stretto.errors import ModelError, ReplicasDifferError, explain
from stretto.loader.global_step import Parts
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import RuleState
from stretto.recipe.recipe import Recipe
from stretto.recipe.what import gradients, momenta
from stretto.recipe.when import on_arrival, together
from stretto.runtime.event_writer import EventWriter
from stretto.runtime.phase_timer import Pace, Stopwatch
from stretto.runtime.runtime import Runtime
from stretto.strategies.asynchronous import AsyncServer
from stretto.strategies.averaged_model import AveragedModel
from stretto.strategies.carried_state import Piece, add_residuals, carry_over, residuals
from stretto.strategies.collective_runner import finish
from stretto.strategies.consistency_check import compare
from stretto.strategies.flat_buffers import FlatParameters
from stretto.strategies.gradient_allreduce import GradientAllReduce
from stretto.strategies.local_updates import LocalUpdates, RoundRange
from stretto.strategies.model_sync import Named, plain_name, watch_forward
from stretto.strategies.one_bit_adam import FrozenVariance
from stretto.strategies.optimizers import Optimizers, parameters_of, refuse_optimizers
from stretto.strategies.parameter_set import ParameterSet
from stretto.strategies.tensor_sync import FlatTensors, MovingBuffers, OptimizerState
from stretto.strategies.traffic_counters import Tally
from stretto.transport import Transport
from stretto.transport.elastic import attempted, has_others

MEASURE_DRIFT_EVERY_S = 5.0


class Replica:
    """The model as one worker has it. `recipe` is None for a worker that exchanges nothing.

    Each optimizer has a set of parameters of its own where parameters are exchanged after so many of its steps; one
    exchange carries those of all optimizers where gradients are exchanged, or a server has them.

    `on_begin` is called before gradients are exchanged, `on_end` after every exchange, with the seconds blocked by it,
    `on_settled` with the leases whose work a server has. `skips`: an update with NaN is left out.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        recipe: Recipe | None,
        wire: Transport,
        watch: Stopwatch,
        journal: EventWriter,
        tally: Tally,
        around: Runtime,
        pace: Pace,
        on_begin: Callable[[], None],
        on_end: Callable[[float], None],
        on_settled: Callable[[list[Lease]], None],
        skips: bool,
        arenas: int = 0,
    ) -> None:
        self._on_settled, self._skips = on_settled, skips
        self._model, self._optimizers, self._recipe = model, optimizers, recipe
        self._wire, self._watch, self._journal, self._tally = wire, watch, journal, tally
        self._around, self._pace = around, pace
        self._on_begin, self._on_end = on_begin, on_end
        self._buffers = MovingBuffers(model, wire)
        self.in_rounds = recipe is not None and not recipe.asynchronous and not isinstance(recipe.what, gradients)
        """True if the recipe exchanges parameters among workers that wait for each other."""
        each = [[one] for one in optimizers] if self.in_rounds else [list(optimizers)]
        self.sets = [ParameterSet(model, one, wire) for one in each]
        self._exchanging: ParameterSet | None = None
        self.gradients: GradientAllReduce | None = None
        """The exchange of a recipe of gradients."""
        self.arrival: AsyncServer | None = None
        """The exchange of a worker that does not wait for others."""
        joined = wire.join_position if isinstance(wire, ParameterServerClient) else None
        self.arenas = max(joined.parameter_set - 1, 0) if joined is not None else arenas
        """The number of arenas made so far, in all sections: a server knows parameters by this number."""
        self._frozen: FrozenVariance | None = None
        self._hooks: list[RemovableHandle] = []
        self._look: AveragedModel | None = None
        self._is_changed = False
        """True if the script has changed the model at this worker, and the workers have not been compared since."""
        self._drift_at = 0.0
        if recipe is not None and has_others(wire):
            refuse_optimizers(recipe, optimizers, wire.workers)
            if isinstance(recipe.what, momenta):
                self._frozen = FrozenVariance(optimizers.each[0], recipe.what, self._is_warm)
        for one in self.sets if recipe is not None else ():
            self._rebuild(one, one.trainable())
        if recipe is not None and not self.in_rounds and not recipe.asynchronous:
            self._hooks = watch_forward(model, self._follow)

    def prepare(self, together: bool) -> None:
        """Begin an epoch, `together` with all workers: agree on what is trained, and lay it flat if a script moved it.

        A script may freeze, thaw, add, replace and move parameters between two epochs.
        """
        if self._recipe is None:
            return
        if self.arrival is None and together:
            self._settle_changes(at_start=True)
        for one in self.sets:
            if self.arrival is not None and one.has_changed():
                self._rebuild(one, one.trainable())
            elif not one.is_laid() and one.arena is not None:
                self._rebuild(one, [(slot.name, slot.parameter) for slot in reversed(one.arena.slots)])
            elif self.gradients is not None:
                self.gradients.follow(one.trained_parameters())

    def _follow(self) -> None:
        """Notice parameters that began to train since the last step, before backward reaches them."""
        if self.gradients is not None and self.sets[0].has_changed():
            self.gradients.follow(self.sets[0].trained_parameters())

    def before_step(self, index: int, is_carried: bool) -> None:
        """Notice what the optimizer of this number trains for the first time.

        `is_carried` says that gradients were exchanged since its last step. Raises ModelError where no exchange can
        follow.
        """
        if self._recipe is None:
            return
        one = self.sets[index if self.in_rounds else 0]
        if self.gradients is not None and not is_carried and has_others(self._wire):
            self.gradients.refuse_unexchanged(parameters_of(self._optimizers.each[index]))
        if not one.has_changed():
            return
        if self.in_rounds:
            one.keep_values()
        elif has_others(self._wire) and (strangers := one.strangers()):
            raise ModelError(_began_late(self._recipe, self._model, strangers))

    def _is_warm(self) -> bool:
        return self.gradients is not None and self.gradients.is_warm

    def stepped(self, index: int, steps: int) -> bool:
        """The optimizer of this number has done its `steps`-th step; whether an exchange is due now."""
        if self.in_rounds:
            self.sets[index].has_stepped = True
        if self.arrival is not None:
            self.arrival.stepped()
        return self.gradients is None and self.is_due(steps)

    def is_due(self, steps: int) -> bool:
        """True if an exchange is due after so many steps."""
        when = self._recipe.when if self._recipe is not None else None
        return isinstance(when, together | on_arrival) and when.due(steps)

    @property
    def has_stepped(self) -> bool:
        """True if parameters are exchanged, and an optimizer has stepped since the last exchange."""
        return any(one.has_stepped for one in self.sets)

    def exchange(self, index: int) -> None:
        """Do one round of a recipe of parameters, among workers that wait for each other."""
        one = self.sets[index]
        if one.rounds is not None and self._round(one, one.rounds):
            self._follow_changes(one, at_start=False)

    def _round(self, one: ParameterSet, rounds: LocalUpdates) -> bool:
        """One round of these parameters; True if any worker trains others than were agreed on."""
        now = self._journal.t()
        measure = now - self._drift_at >= MEASURE_DRIFT_EVERY_S
        self._exchanging, one.has_stepped = one, False
        has_changed = rounds.run(one.weights.share, measure, one.has_changed())
        if measure:
            self._drift_at = now
        return has_changed

    # --- what is trained ------------------------------------------------------------------------------------------

    def _settle_changes(self, at_start: bool) -> None:
        """If any worker trains other parameters than were agreed on, exchange what is left, and agree."""
        if not has_others(self._wire):
            for one in self.sets if any(one.has_changed() for one in self.sets) else ():
                self._follow_changes(one, at_start)
            return
        mine = (any(one.has_changed() for one in self.sets), self._is_changed)
        told = [struct.unpack("??", one) for one in self._wire.all_gather_bytes(struct.pack("??", *mine))]
        self._is_changed = False
        changed = [worker for worker, (_, model) in enumerate(told) if model]
        if changed and len(changed) < len(told):
            raise ReplicasDifferError(_changed_alone(changed))
        if changed:
            self.check("after the script changed the model")
        if not any(trained for trained, _ in told):
            return
        for one in self.sets:
            if one.has_stepped and one.rounds is not None:
                self._round(one, one.rounds)
            self._follow_changes(one, at_start)

    def _follow_changes(self, one: ParameterSet, at_start: bool, idle: bool = False) -> None:
        """Exchange what the workers train now; what any of them has stepped with is brought to one state first."""
        named, new = one.agree(at_start)
        if not new and {id(parameter) for _, parameter in named} == one.laid:
            one.see()
            return
        late: list[RoundRange] = []
        if new and not at_start and self.in_rounds and self._wire.workers > 1:
            rounds = self._make_rounds(FlatParameters(new, spare=True), one)
            one.agreed_values(rounds)
            rounds.run(one.weights.share)
            late = rounds.ranges
        self._rebuild(one, named, late)
        if self.gradients is not None and not at_start:
            self.gradients.exchange(idle)

    def _rebuild(self, one: ParameterSet, named: Named, late: Sequence[RoundRange] = ()) -> None:
        """Lay these parameters flat and exchange them from now on, keeping what is known of those that were before."""
        assert self._recipe is not None
        if self.arrival is not None and self.arrival.keeps_own:
            self.arrival.read()  # what is not exchanged from now on is the same at all workers
            self._wire.all_gather_bytes(b"read")  # before the first worker gives the server other parameters
        before = residuals(self._recipe.how, self._pieces(one))
        ranges = [*(one.rounds.ranges if one.rounds is not None else ()), *late]
        if named:
            one.lay(named, spare=self.in_rounds)
            self._make_exchange(one)
            carry_over(ranges, one.rounds.ranges if one.rounds is not None else ())
            if self.arrival is None:
                add_residuals(self._recipe.how, before, self._pieces(one))
            return
        if self.gradients is not None:
            self.gradients.release()
        one.arena = one.rounds = self.gradients = None
        one.see()

    # --- looking at the agreed model --------------------------------------------------------------------------------

    def look(self, called: bool = False) -> None:
        """Put the agreed model in place of this worker's own, where the two differ.

        Where nobody waits all meet for it, because they were `called`, or else because it is due.
        """
        if self._look is not None or self._recipe is None:
            return
        if self.arrival is not None:
            self._look_at_server(self.arrival, called)
            return
        self._settle_changes(at_start=False)
        if self.gradients is not None:
            self._buffers.agree()
            self._buffers.follow_lead()
        elif self.has_stepped:
            with self._watch.on("exchanging"):
                sets = [(one.arena.parts, one.weights.share) for one in self.sets if one.arena is not None]
                self._look = AveragedModel(sets, self._buffers, self._wire, self._tally.account("evaluation_sync"))

    def average_buffers(self, samples: int) -> None:
        """Average the buffers that an epoch without an optimizer step has changed, weighted by the workers' samples.

        Such an epoch estimates the statistics of batch-norm, as `torch.optim.swa_utils.update_bn` does.
        """
        if self._recipe is None or self._wire.workers == 1:
            return
        self._buffers.agree()
        flat, account = FlatTensors(self._buffers.floating()), self._tally.account("evaluation_sync")

        def means() -> list[Tensor]:
            total = sum(struct.unpack("<q", one)[0] for one in self._wire.all_gather_bytes(struct.pack("<q", samples)))
            return finish(flat.ask_mean(self._wire, samples / total, account))

        with self._watch.on("exchanging"):
            flat.take(attempted(self._wire, means))

    def _look_at_server(self, arrival: AsyncServer, called: bool) -> None:
        arrival.meet(called)
        with self._watch.on("exchanging"):
            sets = [(one.arena.parts, self._equal_share) for one in self.sets if one.arena is not None]
            self._look = AveragedModel(
                sets, self._buffers, self._wire, self._tally.account("evaluation_sync"), arrival.look
            )

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Have the server's newest version in place of this worker's parameters; no other worker waits."""
        assert self.arrival is not None
        own = self.arrival.read_alone()
        try:
            yield
        finally:
            self.arrival.put_back(own)

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
        is_changed = not look.resume(own)
        if self.arrival is not None:  # a server is given the parameters again by all workers, or by none
            is_changed = any(
                told == b"changed" for told in self._wire.all_gather_bytes(b"changed" if is_changed else b"")
            )
        if is_changed:
            self._is_changed = True
            self._journal.notice("the script changed the model after a pass; training goes on from its values")
            for one in self.sets:
                if one.arena is not None:
                    self._make_exchange(one)
                    one.has_stepped = False

    # --- weights ----------------------------------------------------------------------------------------------------

    def weigh(self, own: int, total: int, parts: Parts | None) -> None:
        """A global step was dealt: so many samples of this worker's, and of all."""
        for one in self.sets:
            one.weights.add(own, total, parts)

    def forget(self, hands: int) -> None:
        """Remove the samples of the last global steps, in which no optimizer stepped, from the weights."""
        for one in self.sets:
            one.weights.forget(hands)

    def lose(self, gone: Sequence[int], behind: bool) -> None:
        """These workers have failed. Of the exchange that others have ended, and this one has not, they were part."""
        for one in self.sets:
            if not behind or (self._exchanging is not None and one is not self._exchanging):
                one.weights.lose(gone)

    def carried(self) -> bool:
        """An exchange was done; returns True if no optimizer has stepped since what was exchanged of it last."""
        (self._exchanging or self.sets[0]).weights.carried()
        if self.in_rounds and any(one.has_stepped for one in self.sets):
            return False
        for one in self.sets:
            one.weights.carried()
        return True

    @property
    def is_carried(self) -> bool:
        """True if exchanges have carried all there is."""
        return all(one.weights.is_carried for one in self.sets)

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
    def _states(self) -> Sequence[Any]:
        if self.arrival is not None:
            return [state for one in self.arrival.ranges for state in one.states]
        return [state for one in self._exchanges for state in one.codec_states.states]

    @property
    def _exchanges(self) -> list[GradientAllReduce | LocalUpdates]:
        """Those of workers that wait for each other."""
        found = [self.gradients, *(one.rounds for one in self.sets)]
        return [one for one in found if one is not None]

    @property
    def _ranges(self) -> list[RoundRange]:
        return [each for one in self.sets if one.rounds is not None for each in one.rounds.ranges]

    def regroup(self, workers: int, joined: bool, later: bool) -> None:
        """Others exchange from now on; see the exchanges."""
        for one in self._exchanges:
            one.regroup(workers, joined, later and (one is self.gradients or self._is_exchanging(one)))

    def _is_exchanging(self, rounds: object) -> bool:
        return self._exchanging is not None and self._exchanging.rounds is rounds

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is the same at all workers besides the model and the optimizer: numbers and tensors.

        With what the servers' rule keeps. Raises AnewError when one of them was lost.
        """
        facts: dict[str, Any] = {"moving": self._buffers.state(), "shards": self._shards}
        facts |= {"what": self._kind_of_debts, "how": self._codec, "trained": self._trained}
        tensors: dict[str, Tensor] = {}
        replicated = [states_.replicated(one) for one in self._states]
        facts["codec_states"] = states_.pack(replicated, "codec", tensors)
        facts["outer_states"] = states_.pack([states_.save(one.state) for one in self._ranges], "outer", tensors)
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
        facts["codec_states"] = states_.pack([states_.save(one) for one in self._states], "codec", tensors)
        return facts, tensors | self.residuals()

    def take(
        self,
        facts: dict[str, Any],
        tensors: Mapping[str, Tensor],
        own: tuple[dict[str, Any], dict[str, Tensor]] | None,
        orphans: Sequence[tuple[dict[str, Any], dict[str, Tensor]]],
    ) -> None:
        """Take over what others have; `own` is what this worker had, `orphans` what those had who are not there."""
        self._train_like(facts["trained"])
        if self.arrival is not None:  # the server is given the parameters that were taken over
            self._make_exchange(self.sets[0], self._kept_rule(facts, tensors))
        self._buffers.restore(facts["moving"])
        is_of_kind = facts["what"] == self._kind_of_debts
        is_alike = is_of_kind and facts["how"] == self._codec and facts["shards"] == self._shards
        if is_alike:
            for state, saved in zip(self._states, states_.unpack(facts["codec_states"], tensors), strict=False):
                states_.load_replicated(state, saved)
        for one, saved in zip(self._ranges, states_.unpack(facts["outer_states"], tensors), strict=False):
            states_.load_into(one.state, saved)
        if own is not None:
            if is_alike:
                for state, saved in zip(
                    self._states, states_.unpack(own[0]["states"]["codec_states"], own[1]), strict=False
                ):
                    states_.load_into(state, saved)
            elif is_of_kind:
                self.add_residuals(own[1])
            self._take_own(own[0]["states"] | own[1])
        for _, theirs in orphans if is_of_kind else ():
            self.add_residuals(theirs)

    @property
    def _trained(self) -> list[list[str]]:
        """The names of the parameters that are exchanged, by set."""
        arenas = [one.arena for one in self.sets]
        return [[slot.name for slot in reversed(arena.slots)] if arena is not None else [] for arena in arenas]

    def _train_like(self, trained: list[list[str]]) -> None:
        """Exchange the parameters that others do: the script on its way here may have frozen or thawed some since."""
        if trained == self._trained:
            return
        named = {plain_name(name): one for name, one in self._model.named_parameters()}
        for one, names in zip(self.sets, trained, strict=True):
            held = {id(each) for optimizer in one.optimizers for each in parameters_of(optimizer)}
            lacking = [name for name in names if name not in named or id(named[name]) not in held]
            if lacking:
                raise ModelError(_cant_follow(lacking))
            self._rebuild(one, [(name, each) for name, each in named.items() if name in set(names)])

    def _kept_rule(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RuleState:
        """What a server's rule kept, if it is of parameters that lie as they do here."""
        assert self.sets[0].arena is not None
        names = sorted({path.split("/")[1] for path in tensors if path.startswith("server/")})
        lengths = [part.theta.numel() for part in self.sets[0].arena.parts]
        found = {name: [tensors.get(f"server/{name}/{index}") for index in range(len(lengths))] for name in names}
        fits = {
            name: [one for one in parts if one is not None]
            for name, parts in found.items()
            if [one.numel() if one is not None else 0 for one in parts] == lengths
        }
        return RuleState(fits, facts.get("arrivals", []) if fits else [])

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

    def residuals(self) -> dict[str, Tensor]:
        """What this worker still owes, by range."""
        found = {}
        for index, mine in enumerate(self._residuals()):
            if mine:
                found[f"residual/{index}"] = mine[0] if len(mine) == 1 else torch.cat(mine)
        return found

    def add_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Take on what another worker owed, as far as what is kept here can hold it."""
        for index, mine in enumerate(self._residuals()):
            theirs, lengths = residuals.get(f"residual/{index}"), [one.numel() for one in mine]
            if not mine or theirs is None or theirs.numel() != sum(lengths):
                continue
            for state, part, one in zip(self._codec_states[index], torch.split(theirs, lengths), mine, strict=True):
                assert self._recipe is not None
                self._recipe.how.add_residual(state, part.to(one.device))

    def _residuals(self) -> list[list[Tensor]]:
        """What is owed of each range, by the shards that it is shared out to; nothing where the codec keeps none."""
        if self._recipe is None:
            return []
        codec = self._recipe.how
        found = [[codec.residual(one) for one in each] for each in self._codec_states]
        return [[one for one in each if one is not None] for each in found]

    @property
    def _codec_states(self) -> list[list[Any]]:
        """What the codec remembers of each range, by the shards that it is shared out to."""
        if self.arrival is not None:
            return [one.states for one in self.arrival.ranges]
        return [[self._codec_state(one)] for one in self._states]

    def _codec_state(self, state: Any) -> Any:
        what = self._recipe.what if self._recipe is not None else None
        return what.codec_state(state) if isinstance(what, gradients) else state

    def _pieces(self, one: ParameterSet) -> list[Piece]:
        """What the codec remembers of each range of a set's parameters."""
        if one.rounds is not None:
            return [Piece(each.codec_state, each.part, 0, each.part.theta.numel()) for each in one.rounds.ranges]
        buckets = self.gradients.buckets if self.gradients is not None and has_others(self._wire) else []
        return [Piece(self._codec_state(each.state), each.part, each.start, each.stop) for each in buckets]

    @property
    def drift(self) -> float | None:
        """How far this worker was from the agreed model when that was last measured, relative to the model."""
        if self._look is not None:
            return self._look.drift
        measured = [one.rounds.drift for one in self.sets if one.rounds is not None and one.rounds.drift is not None]
        return max(measured, default=None)

    def check(self, when: str) -> bool:
        """Compare the replicas of all workers, which must be equal now; False when there is nothing to compare.

        Parameters that no optimizer trains are compared, too: nothing may have changed them at one worker alone. Those
        of an optimizer that has stepped since their last exchange are not, unless all look at the agreed model.
        """
        if self._recipe is None or self._wire.workers == 1:
            return False
        agreed = [one for one in self.sets if self._look is not None or not one.has_stepped]
        parts = [part for one in agreed if one.arena is not None for part in one.arena.parts]
        apart = {id(each) for one in self.sets if one not in agreed for each in one.trained_parameters()}
        named = {plain_name(name): one for name, one in self._model.named_parameters() if id(one) not in apart}
        laid = {id(slot.parameter) for part in parts for slot in part.slots}
        others = {name: one for name, one in named.items() if id(one) not in laid}
        wholes = {f"part {index}": part.theta for index, part in enumerate(parts)}
        compare(self._wire, wholes | others, named, when)
        return True

    def _make_exchange(self, one: ParameterSet, kept: RuleState | None = None) -> None:
        """Make the exchange of a set for its arena as it is; a server's rule has what one has `kept` before."""
        assert self._recipe is not None
        assert one.arena is not None
        self.arenas += 1
        if self._recipe.asynchronous:
            self.arrival = self._make_arrival(one.arena, self._recipe, self.arrival, kept)
        elif self.in_rounds:
            one.rounds = self._make_rounds(one.arena, one)
        else:
            if self.gradients is not None:
                self.gradients.release()
            self.gradients = self._make_gradients(one, one.arena, self._recipe)

    def _make_gradients(self, one: ParameterSet, arena: FlatParameters, recipe: Recipe) -> GradientAllReduce:
        return GradientAllReduce(
            arena,
            recipe,
            self._wire,
            self._watch,
            self._tally,
            one.weights.share,
            self._around,
            self._pace,
            self._on_begin,
            self._on_end,
            one.has_changed,
            lambda idle: self._follow_changes(one, at_start=False, idle=idle),
        )

    def _make_rounds(self, arena: FlatParameters, one: ParameterSet) -> LocalUpdates:
        assert self._recipe is not None
        return LocalUpdates(
            arena,
            self._recipe,
            self._wire,
            self._watch,
            self._tally,
            OptimizerState(one.optimizers[0], self._wire),
            self._buffers,
            self._on_end,
        )

    def release(self) -> None:
        """Take all hooks off the parameters and the optimizer: the section has ended."""
        for hook in self._hooks:
            hook.remove()
        if self.gradients is not None:
            self.gradients.release()
        if self._frozen is not None:
            self._frozen.release()
        if self.arrival is not None:
            self.arrival.release()

    def _make_arrival(
        self, arena: FlatParameters, recipe: Recipe, before: AsyncServer | None, kept: RuleState | None
    ) -> AsyncServer:
        if not isinstance(self._wire, ParameterServerClient):
            raise TypeError(f"{recipe} needs a wire to a server")
        arrival = AsyncServer(
            arena,
            self.arenas,
            recipe,
            self._wire,
            self._watch,
            self._tally,
            self._optimizers,
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


def _changed_alone(workers: Sequence[int]) -> str:
    return explain(
        f"replicas differ: the script changed the model of worker {', '.join(map(str, workers))} alone after an epoch",
        got=f"a change on {len(workers)} of the workers",
        expected="the same change on every worker",
        to_type="load the same file on all workers: model.load_state_dict(torch.load(path)) without a condition",
    )


def _began_late(recipe: Recipe, model: nn.Module, strangers: Sequence[nn.Parameter]) -> str:
    names = {id(one): plain_name(name) for name, one in model.named_parameters()}
    first = names.get(id(strangers[0]), "a parameter outside the model")
    return explain(
        f"{first} began to train in the middle of an epoch, where {recipe} can't follow",
        got=f"{len(strangers)} parameters that the optimizer trains and no exchange carries",
        expected="a change of what is trained before an epoch begins",
        to_type="freeze, thaw and add parameters between two epochs, or use a recipe such as local_sgd(every=16)",
    )


def _cant_follow(lacking: Sequence[str]) -> str:
    return explain(
        "the state that is taken over is of parameters that the optimizer does not hold yet",
        got=f"no {', '.join(lacking[:3])} in the optimizer when stretto.distribute is called",
        expected="all parameters that will ever train in the optimizer from the beginning",
        to_type="give the optimizer all parameters at first, and freeze those that wait with requires_grad_(False)",
    )
