"""The state of a strategy, for checkpoints and for workers that join: replicated state, and each worker's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stretto import state as states_
from stretto.parameter_server.client_types import RuleState
from stretto.strategies.parameter_view import is_held

if TYPE_CHECKING:
    from stretto.strategies.strategy import Strategy

State = tuple[dict[str, Any], dict[str, Tensor]]
"""Facts and tensors."""


class StrategyState:
    """Saves and loads the state of a strategy besides the model and the optimizer."""

    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        self._strategy, self._model = strategy, model

    def replicated(self) -> State:
        """Return the state that is the same at all workers: facts and tensors.

        Includes the state of the servers' rule. Raises RollbackRequiredError if a server failed.
        """
        strategy = self._strategy
        facts: dict[str, Any] = {"moving": strategy.buffers.state(), "shards": strategy.shards}
        facts |= {"what": self._residual_kind, "how": self._codec, "trained": self._trained}
        facts["differs"] = strategy.replicas_differ
        facts["intervals"] = [interval.state() for interval in strategy.intervals]
        tensors: dict[str, Tensor] = {}
        replicated = [states_.replicated(state) for state in strategy.states]
        facts["codec_states"] = states_.pack(replicated, "codec", tensors)
        outer_states = [states_.save(round_range.state) for round_range in strategy.ranges]
        facts["outer_states"] = states_.pack(outer_states, "outer", tensors)
        rule_state = strategy.rule_state()
        if rule_state is not None:
            facts["arrivals"] = rule_state.arrivals
            for name, parts in rule_state.tensors.items():
                tensors |= {f"server/{name}/{index}": part for index, part in enumerate(parts)}
        return facts, tensors

    def own(self) -> State:
        """Return the state that only this worker has: codec states, and buffers that are not exchanged.

        Includes parameters that are only pulled towards the server's.
        """
        facts: dict[str, Any] = {}
        buffers = ((name, buffer) for name, buffer in self._model.named_buffers() if is_held(buffer))
        tensors: dict[str, Tensor] = {f"buffer/{name}": buffer for name, buffer in buffers}
        tensors |= {f"own/{index}": theta for index, theta in enumerate(self._strategy.own_parameters)}
        saved = [states_.save(state) for state in self._strategy.states]
        facts["codec_states"] = states_.pack(saved, "codec", tensors)
        return facts, tensors | self.residuals()

    def load(
        self, facts: dict[str, Any], tensors: Mapping[str, Tensor], own: State | None, orphans: Sequence[State]
    ) -> bool:
        """Load the replicated state, this worker's `own` state if it had one, and the residuals of `orphans`.

        `orphans` are the states of workers that are no longer members. Return True if there are residuals that this
        exchange has no place for.
        """
        strategy = self._strategy
        if facts["trained"] != self._trained:
            strategy.train_like(facts["trained"])
        strategy.load_difference(facts.get("differs", False))
        for interval, kept in zip(strategy.intervals, facts.get("intervals", []), strict=False):
            interval.load(kept)
        strategy.load_rule_state(self._fitting_rule_state(facts, tensors))
        strategy.buffers.restore(facts["moving"])
        is_same_kind = facts["what"] == self._residual_kind
        is_same_encoding = is_same_kind and facts["how"] == self._codec and facts["shards"] == strategy.shards
        if is_same_encoding:
            replicated = states_.unpack(facts["codec_states"], tensors)
            for state, saved in zip(strategy.states, replicated, strict=False):
                states_.load_replicated(state, saved)
        outer_states = states_.unpack(facts["outer_states"], tensors)
        for round_range, saved in zip(strategy.ranges, outer_states, strict=False):
            states_.load_into(round_range.state, saved)
        if own is not None:
            if is_same_encoding:
                own_states = states_.unpack(own[0]["states"]["codec_states"], own[1])
                for state, saved in zip(strategy.states, own_states, strict=False):
                    states_.load_into(state, saved)
            elif is_same_kind:
                self.add_residuals(own[1])
            self._load_own(own[0]["states"] | own[1])
        for _, theirs in orphans if is_same_kind else ():
            self.add_residuals(theirs)
        if is_same_kind and strategy.exchanged is not None and strategy.exchanged.how.keeps_residual:
            return False
        given = (theirs for _, theirs in [*([own] if own is not None else []), *orphans])
        return any(bool(theirs[name].any()) for theirs in given for name in theirs if name.startswith("residual/"))

    @property
    def _trained(self) -> list[list[str]]:
        """Names of the parameters that are exchanged, by set."""
        return [parameter_set.names() for parameter_set in self._strategy.sets]

    def _fitting_rule_state(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RuleState:
        """Return a checkpoint's rule state, without tensors whose lengths differ from this worker's buffers."""
        flat_parameters = self._strategy.sets[0].flat_parameters
        names = sorted({path.split("/")[1] for path in tensors if path.startswith("server/")})
        lengths = [part.theta.numel() for part in flat_parameters.parts] if flat_parameters is not None else []
        states = {name: [tensors.get(f"server/{name}/{index}") for index in range(len(lengths))] for name in names}
        fits = {
            name: [part for part in parts if part is not None]
            for name, parts in states.items()
            if [part.numel() if part is not None else 0 for part in parts] == lengths
        }
        return RuleState(fits, facts.get("arrivals", []) if fits else [])

    def _load_own(self, state: Mapping[str, Any]) -> None:
        """Load the buffers that this worker had, and parameters that are only pulled towards a server's."""
        for name, buffer in self._model.named_buffers():
            if is_held(buffer):
                buffer.copy_(state[f"buffer/{name}"])
        self._strategy.load_own_parameters(state)

    @property
    def _residual_kind(self) -> str:
        """Kind of the residuals: those of gradients differ in sign and size from those of updates."""
        return type(self._strategy.exchanged.what).__name__ if self._strategy.exchanged is not None else ""

    @property
    def _codec(self) -> str:
        """Text of the recipe's codec."""
        return str(self._strategy.exchanged.how) if self._strategy.exchanged is not None else ""

    # --- residuals --------------------------------------------------------------------------------------------------

    def residuals(self) -> dict[str, Tensor]:
        """Return this worker's residuals, by range."""
        return {
            f"residual/{index}": own[0] if len(own) == 1 else torch.cat(own)
            for index, own in enumerate(self._residuals())
            if own
        }

    def add_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        """Add another worker's residuals to this worker's, where the ranges have the same length."""
        for index, own in enumerate(self._residuals()):
            theirs, lengths = residuals.get(f"residual/{index}"), [residual.numel() for residual in own]
            if not own or theirs is None or theirs.numel() != sum(lengths):
                continue
            states = self._strategy.codec_states[index]
            for state, part, residual in zip(states, torch.split(theirs, lengths), own, strict=True):
                assert self._strategy.exchanged is not None
                self._strategy.exchanged.how.add_residual(state, part.to(residual.device))

    def _residuals(self) -> list[list[Tensor]]:
        """Return the residuals of each range, one for each shard; an empty list where the codec keeps none."""
        recipe = self._strategy.exchanged
        if recipe is None:
            return []
        states = [[recipe.how.residual(state) for state in each] for each in self._strategy.codec_states]
        return [[residual for residual in each if residual is not None] for each in states]
