"""This worker's copy of the model: in flat buffers, exchanged by the recipe, averaged for evaluation, compared."""

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
    """The model of one worker. `recipe` is None for a worker that exchanges nothing.

    Where parameters are exchanged after a number of local steps, each optimizer has a set of parameters of its own.
    Where gradients are exchanged, or a server holds the parameters, one exchange carries those of all optimizers.

    `on_begin` is called before gradients are exchanged, `on_end` after every exchange, with the seconds blocked by it,
    `on_settled` with the leases whose work a server has applied. `skips`: an update with NaN is left out.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        recipe: Recipe | None,
        transport: Transport,
        timer: Stopwatch,
        events: EventWriter,
        tally: Tally,
        runtime: Runtime,
        pace: Pace,
        on_begin: Callable[[], None],
        on_end: Callable[[float], None],
        on_settled: Callable[[list[Lease]], None],
        skips: bool,
        parameter_sets: int = 0,
    ) -> None:
        self._on_settled, self._skips = on_settled, skips
        self._model, self._optimizers, self._recipe = model, optimizers, recipe
        self._transport, self._timer, self._events, self._tally = transport, timer, events, tally
        self._runtime, self._pace = runtime, pace
        self._on_begin, self._on_end = on_begin, on_end
        self._buffers = MovingBuffers(model, transport)
        self.in_rounds = recipe is not None and not recipe.asynchronous and not isinstance(recipe.what, gradients)
        """True if the recipe exchanges parameters among workers that wait for each other."""
        each = [[one] for one in optimizers] if self.in_rounds else [list(optimizers)]
        self.sets = [ParameterSet(model, one, transport) for one in each]
        self._exchanging: ParameterSet | None = None
        self.gradients: GradientAllReduce | None = None
        """The exchange of a recipe that exchanges gradients; None for other recipes."""
        self.server: AsyncServer | None = None
        """The exchange of a worker that does not wait for others; None for other recipes."""
        joined = transport.join_position if isinstance(transport, ParameterServerClient) else None
        self.parameter_sets = max(joined.parameter_set - 1, 0) if joined is not None else parameter_sets
        """Number of parameter sets laid out so far, in all sections: a server knows a set by this number."""
        self._frozen: FrozenVariance | None = None
        self._hooks: list[RemovableHandle] = []
        self._averaged: AveragedModel | None = None
        self._is_changed = False
        """True if the script has changed the model at this worker, and the workers have not been compared since."""
        self._drift_at = 0.0
        if recipe is not None and has_others(transport):
            refuse_optimizers(recipe, optimizers, transport.workers)
            if isinstance(recipe.what, momenta):
                self._frozen = FrozenVariance(optimizers.each[0], recipe.what, self._is_warm)
        for one in self.sets if recipe is not None else ():
            self._rebuild(one, one.trainable())
        if recipe is not None and not self.in_rounds and not recipe.asynchronous:
            self._hooks = watch_forward(model, self._follow)

    def prepare(self, together: bool) -> None:
        """Begin an epoch; with `together`, agree with all workers on the parameters that are trained.

        Lay parameters flat again that a script has moved. A script may freeze, thaw, add, replace and move parameters
        between two epochs.
        """
        if self._recipe is None:
            return
        if self.server is None and together:
            self._agree_on_changes(at_start=True)
        for one in self.sets:
            if self.server is not None and one.has_changed():
                self._rebuild(one, one.trainable())
            elif not one.is_laid() and one.flat_parameters is not None:
                self._rebuild(one, [(slot.name, slot.parameter) for slot in reversed(one.flat_parameters.slots)])
            elif self.gradients is not None:
                self.gradients.follow(one.trained_parameters())

    def _follow(self) -> None:
        """Hook parameters that began to train since the last step, before the backward pass reaches them."""
        if self.gradients is not None and self.sets[0].has_changed():
            self.gradients.follow(self.sets[0].trained_parameters())

    def before_step(self, index: int, is_carried: bool) -> None:
        """Notice parameters that the optimizer with this number trains for the first time.

        `is_carried` is True if gradients were exchanged since its last step. Raises ModelError if the recipe's exchange
        can't include such parameters.
        """
        if self._recipe is None:
            return
        one = self.sets[index if self.in_rounds else 0]
        if self.gradients is not None and not is_carried and has_others(self._transport):
            self.gradients.refuse_unexchanged(parameters_of(self._optimizers.each[index]))
        if not one.has_changed():
            return
        if self.in_rounds:
            one.keep_values()
        elif has_others(self._transport) and (strangers := one.strangers()):
            raise ModelError(_began_late(self._recipe, self._model, strangers))

    def _is_warm(self) -> bool:
        return self.gradients is not None and self.gradients.is_warm

    def stepped(self, index: int, steps: int) -> bool:
        """Note that the optimizer with this number has done its `steps`-th step. Return True if an exchange is due."""
        if self.in_rounds:
            self.sets[index].has_stepped = True
        if self.server is not None:
            self.server.stepped()
        return self.gradients is None and self.is_due(steps)

    def is_due(self, steps: int) -> bool:
        """Return True if an exchange is due after this number of steps."""
        when = self._recipe.when if self._recipe is not None else None
        return isinstance(when, together | on_arrival) and when.due(steps)

    @property
    def has_stepped(self) -> bool:
        """True if parameters are exchanged, and an optimizer has stepped since the last exchange."""
        return any(one.has_stepped for one in self.sets)

    def exchange(self, index: int) -> None:
        """Do one round of a recipe that exchanges parameters, among workers that wait for each other."""
        one = self.sets[index]
        if one.rounds is not None and self._round(one, one.rounds):
            self._follow_changes(one, at_start=False)

    def _round(self, one: ParameterSet, rounds: LocalUpdates) -> bool:
        """Do one round of these parameters. Return True if any worker's trained parameters have changed."""
        now = self._events.t()
        measure = now - self._drift_at >= MEASURE_DRIFT_EVERY_S
        self._exchanging, one.has_stepped = one, False
        has_changed = rounds.run(one.weights.share, measure, one.has_changed())
        if measure:
            self._drift_at = now
        return has_changed

    # --- trained parameters ---------------------------------------------------------------------------------------

    def _agree_on_changes(self, at_start: bool) -> None:
        """If any worker's trained parameters have changed, do the round that is under way, and agree on the new set."""
        if not has_others(self._transport):
            for one in self.sets if any(one.has_changed() for one in self.sets) else ():
                self._follow_changes(one, at_start)
            return
        mine = (any(one.has_changed() for one in self.sets), self._is_changed)
        flags = [struct.unpack("??", one) for one in self._transport.all_gather_bytes(struct.pack("??", *mine))]
        self._is_changed = False
        changed = [worker for worker, (_, model) in enumerate(flags) if model]
        if changed and len(changed) < len(flags):
            raise ReplicasDifferError(_changed_alone(changed))
        if changed:
            self.check("after the script changed the model")
        if not any(trained for trained, _ in flags):
            return
        for one in self.sets:
            if one.has_stepped and one.rounds is not None:
                self._round(one, one.rounds)
            self._follow_changes(one, at_start)

    def _follow_changes(self, one: ParameterSet, at_start: bool, idle: bool = False) -> None:
        """Exchange the parameters that are trained now; first average parameters stepped before any exchange."""
        by_name, new = one.agree(at_start)
        if not new and {id(parameter) for _, parameter in by_name} == one.laid:
            one.see()
            return
        late: list[RoundRange] = []
        if new and not at_start and self.in_rounds and self._transport.workers > 1:
            rounds = self._create_rounds(FlatParameters(new, spare=True), one)
            one.agreed_values(rounds)
            rounds.run(one.weights.share)
            late = rounds.ranges
        self._rebuild(one, by_name, late)
        if self.gradients is not None and not at_start:
            self.gradients.exchange(idle)

    def _rebuild(self, one: ParameterSet, by_name: Named, late: Sequence[RoundRange] = ()) -> None:
        """Lay these parameters flat and exchange them from now on, keeping the state of those exchanged before."""
        assert self._recipe is not None
        if self.server is not None and self.server.keeps_own_parameters:
            self.server.read()  # parameters that are not exchanged from now on are the same at all workers
            self._transport.all_gather_bytes(b"read")  # before the first worker gives the server other parameters
        before = residuals(self._recipe.how, self._pieces(one))
        ranges = [*(one.rounds.ranges if one.rounds is not None else ()), *late]
        if by_name:
            one.lay(by_name, spare=self.in_rounds)
            self._create_exchange(one)
            carry_over(ranges, one.rounds.ranges if one.rounds is not None else ())
            if self.server is None:
                add_residuals(self._recipe.how, before, self._pieces(one))
            return
        if self.gradients is not None:
            self.gradients.release()
        one.flat_parameters = one.rounds = self.gradients = None
        one.see()

    # --- the averaged model ----------------------------------------------------------------------------------------

    def sync_for_evaluation(self, called: bool = False) -> None:
        """Replace this worker's parameters by the averaged model, or by the server's, if they differ.

        Workers that do not wait for each other meet at a barrier first, because they were `called`, or because it is
        due.
        """
        if self._averaged is not None or self._recipe is None:
            return
        if self.server is not None:
            self._read_from_server(self.server, called)
            return
        self._agree_on_changes(at_start=False)
        if self.gradients is not None:
            self._buffers.agree()
            self._buffers.follow_lead()
        elif self.has_stepped:
            with self._timer.on("exchanging"):
                sets = [
                    (one.flat_parameters.parts, one.weights.share)
                    for one in self.sets
                    if one.flat_parameters is not None
                ]
                self._averaged = AveragedModel(
                    sets, self._buffers, self._transport, self._tally.account("evaluation_sync")
                )

    def average_buffers(self, samples: int) -> None:
        """Average the buffers that an epoch without an optimizer step has changed, weighted by the workers' samples.

        Such an epoch estimates the statistics of batch-norm, as `torch.optim.swa_utils.update_bn` does.
        """
        if self._recipe is None or self._transport.workers == 1:
            return
        self._buffers.agree()
        flat, account = FlatTensors(self._buffers.floating()), self._tally.account("evaluation_sync")

        def means() -> list[Tensor]:
            total = sum(
                struct.unpack("<q", one)[0] for one in self._transport.all_gather_bytes(struct.pack("<q", samples))
            )
            return finish(flat.ask_mean(self._transport, samples / total, account))

        with self._timer.on("exchanging"):
            flat.take(attempted(self._transport, means))

    def _read_from_server(self, server: AsyncServer, called: bool) -> None:
        server.wait_at_barrier(called)
        with self._timer.on("exchanging"):
            sets = [
                (one.flat_parameters.parts, self._equal_share) for one in self.sets if one.flat_parameters is not None
            ]
            self._averaged = AveragedModel(
                sets, self._buffers, self._transport, self._tally.account("evaluation_sync"), server.read_for_evaluation
            )

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Set the parameters to the server's newest version in a `with` block; no other worker waits."""
        assert self.server is not None
        own = self.server.read_alone()
        try:
            yield
        finally:
            self.server.put_back(own)

    def _equal_share(self) -> float:
        return 1 / self._transport.workers

    def resume(self, own: bool = True) -> None:
        """Continue training after an evaluation sync, with the worker's own parameters or a server's version."""
        averaged, self._averaged = self._averaged, None
        own = own or self.server is None or self.server.keeps_own_parameters
        if averaged is None:
            return
        if not own and self.server is not None:
            self.server.start_from_read()
        is_changed = not averaged.resume(own)
        if self.server is not None:  # all workers send a server the parameters again, or none does
            is_changed = any(
                flags == b"changed" for flags in self._transport.all_gather_bytes(b"changed" if is_changed else b"")
            )
        if is_changed:
            self._is_changed = True
            self._events.notice("the script changed the model after an epoch; training continues from its values")
            for one in self.sets:
                if one.flat_parameters is not None:
                    self._create_exchange(one)
                    one.has_stepped = False

    # --- weights ----------------------------------------------------------------------------------------------------

    def weigh(self, own: int, total: int, parts: Parts | None) -> None:
        """Add the samples of a global step to the weights: those of this worker, and of all."""
        for one in self.sets:
            one.weights.add(own, total, parts)

    def forget(self, global_steps: int) -> None:
        """Remove the samples of the last global steps, in which no optimizer stepped, from the weights."""
        for one in self.sets:
            one.weights.forget(global_steps)

    def lose(self, gone: Sequence[int], behind: bool) -> None:
        """Remove failed workers from the weights.

        If this worker is a round `behind`, the failed workers were part of that round, and stay in its weights.
        """
        for one in self.sets:
            if not behind or (self._exchanging is not None and one is not self._exchanging):
                one.weights.remove_failed(gone)

    def carried(self) -> bool:
        """Note that an exchange has ended. Return True if no optimizer has stepped since its last exchange."""
        (self._exchanging or self.sets[0]).weights.carried()
        if self.in_rounds and any(one.has_stepped for one in self.sets):
            return False
        for one in self.sets:
            one.weights.carried()
        return True

    @property
    def is_carried(self) -> bool:
        """True if exchanges have carried all samples."""
        return all(one.weights.is_carried for one in self.sets)

    # --- state transfer -----------------------------------------------------------------------------------------

    @property
    def recipe(self) -> Recipe | None:
        """Recipe of the exchanges."""
        return self._recipe

    @property
    def keeps_own_optimizer(self) -> bool:
        """True if the optimizer's state differs from worker to worker."""
        return self.gradients is None

    @property
    def _states(self) -> Sequence[Any]:
        if self.server is not None:
            return [state for one in self.server.ranges for state in one.states]
        return [state for one in self._exchanges for state in one.codec_states.states]

    @property
    def _exchanges(self) -> list[GradientAllReduce | LocalUpdates]:
        """Exchanges of workers that wait for each other."""
        states = [self.gradients, *(one.rounds for one in self.sets)]
        return [one for one in states if one is not None]

    @property
    def _ranges(self) -> list[RoundRange]:
        return [each for one in self.sets if one.rounds is not None for each in one.rounds.ranges]

    def regroup(self, workers: int, joined: bool, later: bool) -> None:
        """Adapt the exchanges to a changed membership; with `later`, after an exchange that is under way."""
        for one in self._exchanges:
            one.regroup(workers, joined, later and (one is self.gradients or self._is_exchanging(one)))

    def _is_exchanging(self, rounds: object) -> bool:
        return self._exchanging is not None and self._exchanging.rounds is rounds

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the state that is the same at all workers, besides the model and the optimizer: facts and tensors.

        Includes the state of the servers' rule. Raises RollbackRequiredError if a server failed.
        """
        facts: dict[str, Any] = {"moving": self._buffers.state(), "shards": self._shards}
        facts |= {"what": self._residual_kind, "how": self._codec, "trained": self._trained}
        tensors: dict[str, Tensor] = {}
        replicated = [states_.replicated(one) for one in self._states]
        facts["codec_states"] = states_.pack(replicated, "codec", tensors)
        facts["outer_states"] = states_.pack([states_.save(one.state) for one in self._ranges], "outer", tensors)
        if self.server is not None:
            kept = self.server.rule_state()
            facts["arrivals"] = kept.arrivals
            for name, parts in kept.tensors.items():
                tensors |= {f"server/{name}/{index}": one for index, one in enumerate(parts)}
        return facts, tensors

    def own_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the state that only this worker has: codec states, and buffers that are not exchanged.

        Includes parameters that are only pulled towards the server's.
        """
        facts: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {f"buffer/{name}": one for name, one in self._model.named_buffers()}
        if self.server is not None and self.server.keeps_own_parameters and self._averaged is not None:
            tensors |= {f"own/{index}": one for index, one in enumerate(self._averaged.own_parameters)}
        facts["codec_states"] = states_.pack([states_.save(one) for one in self._states], "codec", tensors)
        return facts, tensors | self.residuals()

    def take(
        self,
        facts: dict[str, Any],
        tensors: Mapping[str, Tensor],
        own: tuple[dict[str, Any], dict[str, Tensor]] | None,
        orphans: Sequence[tuple[dict[str, Any], dict[str, Tensor]]],
    ) -> None:
        """Load the replicated state, this worker's `own` state if it had one, and the residuals of `orphans`.

        `orphans` are the states of workers that are no longer members.
        """
        self._train_like(facts["trained"])
        if self.server is not None:  # sends the loaded parameters to the server
            self._create_exchange(self.sets[0], self._fitting_rule_state(facts, tensors))
        self._buffers.restore(facts["moving"])
        is_same_kind = facts["what"] == self._residual_kind
        is_same_encoding = is_same_kind and facts["how"] == self._codec and facts["shards"] == self._shards
        if is_same_encoding:
            for state, saved in zip(self._states, states_.unpack(facts["codec_states"], tensors), strict=False):
                states_.load_replicated(state, saved)
        for one, saved in zip(self._ranges, states_.unpack(facts["outer_states"], tensors), strict=False):
            states_.load_into(one.state, saved)
        if own is not None:
            if is_same_encoding:
                for state, saved in zip(
                    self._states, states_.unpack(own[0]["states"]["codec_states"], own[1]), strict=False
                ):
                    states_.load_into(state, saved)
            elif is_same_kind:
                self.add_residuals(own[1])
            self._take_own(own[0]["states"] | own[1])
        for _, theirs in orphans if is_same_kind else ():
            self.add_residuals(theirs)

    @property
    def _trained(self) -> list[list[str]]:
        """Names of the parameters that are exchanged, by set."""
        parameter_sets = [one.flat_parameters for one in self.sets]
        return [
            [slot.name for slot in reversed(flat_parameters.slots)] if flat_parameters is not None else []
            for flat_parameters in parameter_sets
        ]

    def _train_like(self, trained: list[list[str]]) -> None:
        """Exchange the parameters that the loaded state names: the script may have frozen or thawed some since."""
        if trained == self._trained:
            return
        by_name = {plain_name(name): one for name, one in self._model.named_parameters()}
        for one, names in zip(self.sets, trained, strict=True):
            held = {id(each) for optimizer in one.optimizers for each in parameters_of(optimizer)}
            lacking = [name for name in names if name not in by_name or id(by_name[name]) not in held]
            if lacking:
                raise ModelError(_cant_follow(lacking))
            self._rebuild(one, [(name, each) for name, each in by_name.items() if name in set(names)])

    def _fitting_rule_state(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RuleState:
        """Return a checkpoint's rule state, without tensors whose lengths differ from this worker's buffers."""
        assert self.sets[0].flat_parameters is not None
        names = sorted({path.split("/")[1] for path in tensors if path.startswith("server/")})
        lengths = [part.theta.numel() for part in self.sets[0].flat_parameters.parts]
        states = {name: [tensors.get(f"server/{name}/{index}") for index in range(len(lengths))] for name in names}
        fits = {
            name: [one for one in parts if one is not None]
            for name, parts in states.items()
            if [one.numel() if one is not None else 0 for one in parts] == lengths
        }
        return RuleState(fits, facts.get("arrivals", []) if fits else [])

    def _take_own(self, kept: Mapping[str, Any]) -> None:
        """Load the buffers that this worker had, and parameters that are only pulled towards a server's."""
        for name, buffer in self._model.named_buffers():
            buffer.copy_(kept[f"buffer/{name}"])
        if self.server is not None and self.server.keeps_own_parameters:
            for index, one in enumerate(self.server.ranges):
                mine = kept.get(f"own/{index}")
                if mine is not None and mine.shape == one.part.theta.shape:
                    one.part.theta.copy_(mine)

    @property
    def _residual_kind(self) -> str:
        """Kind of the residuals: those of gradients differ in sign and size from those of updates."""
        return type(self._recipe.what).__name__ if self._recipe is not None else ""

    @property
    def _codec(self) -> str:
        """Text of the recipe's codec."""
        return str(self._recipe.how) if self._recipe is not None else ""

    @property
    def _shards(self) -> int:
        """Number of shards that hold the parameters; 0 without a server."""
        return self.server.shards if self.server is not None else 0

    def residuals(self) -> dict[str, Tensor]:
        """Return this worker's residuals, by range."""
        states = {}
        for index, mine in enumerate(self._residuals()):
            if mine:
                states[f"residual/{index}"] = mine[0] if len(mine) == 1 else torch.cat(mine)
        return states

    def add_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Add another worker's residuals to this worker's, where the ranges have the same length."""
        for index, mine in enumerate(self._residuals()):
            theirs, lengths = residuals.get(f"residual/{index}"), [one.numel() for one in mine]
            if not mine or theirs is None or theirs.numel() != sum(lengths):
                continue
            for state, part, one in zip(self._codec_states[index], torch.split(theirs, lengths), mine, strict=True):
                assert self._recipe is not None
                self._recipe.how.add_residual(state, part.to(one.device))

    def _residuals(self) -> list[list[Tensor]]:
        """Return the residuals of each range, one for each shard; an empty list where the codec keeps none."""
        if self._recipe is None:
            return []
        codec = self._recipe.how
        states = [[codec.residual(one) for one in each] for each in self._codec_states]
        return [[one for one in each if one is not None] for each in states]

    @property
    def _codec_states(self) -> list[list[Any]]:
        """Codec states of each range, one for each shard."""
        if self.server is not None:
            return [one.states for one in self.server.ranges]
        return [[self._codec_state(one)] for one in self._states]

    def _codec_state(self, state: Any) -> Any:
        what = self._recipe.what if self._recipe is not None else None
        return what.codec_state(state) if isinstance(what, gradients) else state

    def _pieces(self, one: ParameterSet) -> list[Piece]:
        """Return the codec states of a parameter set, with the ranges that they belong to."""
        if one.rounds is not None:
            return [Piece(each.codec_state, each.part, 0, each.part.theta.numel()) for each in one.rounds.ranges]
        buckets = self.gradients.buckets if self.gradients is not None and has_others(self._transport) else []
        return [Piece(self._codec_state(each.state), each.part, each.start, each.stop) for each in buckets]

    @property
    def drift(self) -> float | None:
        """Last measured distance of this worker's parameters from the mean, relative to the norm of the mean."""
        if self._averaged is not None:
            return self._averaged.drift
        measured = [one.rounds.drift for one in self.sets if one.rounds is not None and one.rounds.drift is not None]
        return max(measured, default=None)

    def check(self, when: str) -> bool:
        """Compare the replicas of all workers, which must be equal now. Return False if there is nothing to compare.

        Parameters that no optimizer trains are compared, too: none may have changed at one worker alone. The parameters
        of an optimizer that has stepped since their last exchange are compared only while the averaged model is in
        place.
        """
        if self._recipe is None or self._transport.workers == 1:
            return False
        agreed = [one for one in self.sets if self._averaged is not None or not one.has_stepped]
        parts = [part for one in agreed if one.flat_parameters is not None for part in one.flat_parameters.parts]
        excluded = {id(each) for one in self.sets if one not in agreed for each in one.trained_parameters()}
        by_name = {plain_name(name): one for name, one in self._model.named_parameters() if id(one) not in excluded}
        compared = {id(slot.parameter) for part in parts for slot in part.slots}
        others = {name: one for name, one in by_name.items() if id(one) not in compared}
        buffers = {f"part {index}": part.theta for index, part in enumerate(parts)}
        compare(self._transport, buffers | others, by_name, when)
        return True

    def _create_exchange(self, one: ParameterSet, kept: RuleState | None = None) -> None:
        """Create the exchange of a parameter set for its flat buffers; `kept` is the rule state for a server."""
        assert self._recipe is not None
        assert one.flat_parameters is not None
        self.parameter_sets += 1
        if self._recipe.asynchronous:
            self.server = self._create_server(one.flat_parameters, self._recipe, self.server, kept)
        elif self.in_rounds:
            one.rounds = self._create_rounds(one.flat_parameters, one)
        else:
            if self.gradients is not None:
                self.gradients.release()
            self.gradients = self._create_gradients(one, one.flat_parameters, self._recipe)

    def _create_gradients(
        self, one: ParameterSet, flat_parameters: FlatParameters, recipe: Recipe
    ) -> GradientAllReduce:
        return GradientAllReduce(
            flat_parameters,
            recipe,
            self._transport,
            self._timer,
            self._tally,
            one.weights.share,
            self._runtime,
            self._pace,
            self._on_begin,
            self._on_end,
            one.has_changed,
            lambda idle: self._follow_changes(one, at_start=False, idle=idle),
        )

    def _create_rounds(self, flat_parameters: FlatParameters, one: ParameterSet) -> LocalUpdates:
        assert self._recipe is not None
        return LocalUpdates(
            flat_parameters,
            self._recipe,
            self._transport,
            self._timer,
            self._tally,
            OptimizerState(one.optimizers[0], self._transport),
            self._buffers,
            self._on_end,
        )

    def release(self) -> None:
        """Remove all hooks from the parameters and the optimizer when the section has ended."""
        for hook in self._hooks:
            hook.remove()
        if self.gradients is not None:
            self.gradients.release()
        if self._frozen is not None:
            self._frozen.release()
        if self.server is not None:
            self.server.release()

    def _create_server(
        self, flat_parameters: FlatParameters, recipe: Recipe, before: AsyncServer | None, kept: RuleState | None
    ) -> AsyncServer:
        if not isinstance(self._transport, ParameterServerClient):
            raise TypeError(f"{recipe} needs a transport to a server")
        server = AsyncServer(
            flat_parameters,
            self.parameter_sets,
            recipe,
            self._transport,
            self._timer,
            self._tally,
            self._optimizers,
            self._on_settled,
            self._on_end,
            self._skips,
            kept,
        )
        if before is not None:
            server.blocked_s, server.outcomes = before.blocked_s, before.outcomes
            server.read()
            server.start_from_read()
        return server


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
        got=f"{len(strangers)} parameters that the optimizer trains and no exchange includes",
        expected="a change of what is trained before an epoch begins",
        to_type="freeze, thaw and add parameters between two epochs, or use a recipe such as local_sgd(every=16)",
    )


def _cant_follow(lacking: Sequence[str]) -> str:
    return explain(
        "the loaded state has parameters that the optimizer does not hold yet",
        got=f"no {', '.join(lacking[:3])} in the optimizer when stretto.distribute is called",
        expected="all parameters that will ever train in the optimizer from the beginning",
        to_type="give the optimizer all parameters at first, and freeze those that wait with requires_grad_(False)",
    )
