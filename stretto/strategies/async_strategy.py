"""The strategy of recipes whose workers push updates to a parameter server, and do not wait for each other."""

from __future__ import annotations

import struct
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stretto.checkpoint.state_transfer import Own, load_some, pack_own, unpack_own
from stretto.errors import ModelError, explain
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import RuleState
from stretto.recipe.recipe import Recipe
from stretto.recipe.when import on_arrival
from stretto.strategies.asynchronous import AsyncServer, Outcome
from stretto.strategies.averaged_model import AveragedModel
from stretto.strategies.context import ExchangeObserver, StrategyContext
from stretto.strategies.flat_buffers import in_buffers
from stretto.strategies.local_updates import RoundRange
from stretto.strategies.model_sync import Named, refuse_other_start, state_of
from stretto.strategies.optimizers import Optimizers, refuse_optimizers
from stretto.strategies.parameter_set import ParameterSet
from stretto.strategies.recipe_strategy import RecipeStrategy
from stretto.strategies.sparse_tables import SparseTable, notice_of, sparse_tables, stop_watching, watch_lookups
from stretto.strategies.tensor_sync import crc


class AsyncStrategy(RecipeStrategy):
    """Exchanges the parameters of all optimizers with a server as one set.

    The steps of several optimizers are pushed as one update at the end of a global step.
    """

    asynchronous = True
    _server: AsyncServer | None = None
    """The exchange; None if no parameter was ever trained."""
    _steps = 0
    """Number of global steps with a step of any of several optimizers."""
    _noted_in = 0
    """Recovery epoch of the last look at the parameters."""
    _joined: Own | None = None
    """State that the server does not hold, of a run that this worker joins, until its first epoch begins."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        recipe: Recipe,
        context: StrategyContext,
        observer: ExchangeObserver,
        parameter_sets: int = 0,
    ) -> None:
        if context.transport.server is None:
            raise TypeError(f"{recipe} needs a transport to a server")
        assert isinstance(recipe.when, on_arrival)
        self._when = recipe.when
        if context.transport.join_position is not None:
            parameter_sets = max(context.transport.join_position.parameter_set - 1, 0)
        super().__init__(model, optimizers, recipe, context, observer, parameter_sets)
        self._client: ParameterServerClient = context.transport.server
        self._start_sums = context.start_sums
        self._row_tables: list[SparseTable] = []
        """Tables whose rows are exchanged by themselves."""
        self._watched: list[SparseTable] = []

    @property
    def server(self) -> AsyncServer:
        """The exchange of the parameters that are trained."""
        assert self._server is not None
        return self._server

    # --- the training loop ----------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Create the exchange; a worker that joins does so in its first epoch, after what its script changes before."""
        position = self._client.join_position
        if position is None or not position.facts or self._transport.siblings is not None:
            super().attach()
            return
        refuse_optimizers(self.recipe, self._optimizers, self._transport.workers)
        self._joined = unpack_own(position.facts)
        self._start_sums = self._joined[0]["sums"]
        refuse_other_start(self._model, self._start_sums)

    def begin_epoch(self, together: bool) -> None:
        """Exchange the parameters that any worker trains now, all ranks together; lay moved ones flat again."""
        parameter_set = self.sets[0]
        if self._joined is not None:
            (facts, tensors), self._joined = self._joined, None
            load_some(self._model, tensors)
            self.train_like([facts["trained"]])
            return
        is_same = self._client.agreed(not parameter_set.has_changed() and parameter_set.is_laid())
        is_shown = self._client.agreed(not self._has_changed_shown())
        if together:  # a worker without a step has no gradients, and a frozen parameter is trained while it has one
            replies = self._transport.all_gather_bytes(struct.pack("??", is_same, is_shown))
            is_same, is_shown = map(all, zip(*(struct.unpack("??", reply) for reply in replies), strict=True))
            if not is_shown:
                self._continue_changed()
        if not is_same:
            by_name = parameter_set.agree(at_start=True).by_name if together else parameter_set.trainable()
            self._rebuild(parameter_set, by_name)

    def before_step(self, index: int, is_carried: bool) -> None:
        """Raise ModelError if the optimizer steps parameters that no exchange includes."""
        self._refuse_late(self.sets[0])
        if self._server is not None:
            self._server.before_step(index)

    def look_for_redraws(self) -> None:
        """Raise ModelError if the script has drawn a layer again: the server would add the change of each worker."""
        parameter_set, since = self.sets[0], self._noted_in
        self._noted_in = self._client.recovery_epoch
        super().look_for_redraws()
        redrawn, parameter_set.redrawn = parameter_set.redrawn, {}
        if redrawn and since == self._noted_in:  # else the parameters are those of a snapshot
            raise ModelError(
                explain(
                    f"a layer was drawn again in the middle of an epoch, where {self.recipe} can't follow: "
                    f"{', '.join(sorted(redrawn)[:4])}",
                    got="new values, which the server adds as the update of each worker",
                    expected="a layer that is drawn again between two epochs, alike at all workers",
                    to_type="torch.manual_seed(0) and the layer drawn again before an epoch begins; or a recipe whose "
                    "workers wait for each other, such as local_sgd(every=16)",
                )
            )

    def after_step(self, index: int, steps: int) -> bool:
        """Push an update if it is due. Return False: the parameters of the workers differ."""
        self.server.stepped()
        if len(self._optimizers) == 1 and self._when.due(steps):
            self._observer.push(self.server.run)
        return False

    def end_global_step(self, has_stepped: bool) -> None:
        """Push the steps of several optimizers if that is due, and merge a reply that has arrived."""
        if not has_stepped:
            return
        if len(self._optimizers) > 1:
            self._steps += 1
            if self._when.due(self._steps):
                self._observer.push(self.server.run)
        self.server.merge_if_arrived()

    def undo(self) -> None:
        """Undo the steps since the server has rolled back."""
        self.server.undo()

    def push_all(self) -> None:
        """Push the remaining update, and wait until it is applied."""
        if self._server is not None:
            self._observer.push(self._server.finish)

    def close(self) -> None:
        """Detach from the client, and remove the hooks from the optimizer."""
        super().close()
        self._stop_watching()
        if self._server is not None:
            self._server.release()

    # --- the server's model ---------------------------------------------------------------------------------------

    def sync_for_evaluation(self, called: bool = False) -> None:
        """Put the server's newest version in place, with all workers at a barrier."""
        if self._averaged is not None:
            return
        self._client.snapshot_barrier(called)
        if self._server is None:
            return
        with self._context.timer.on("exchanging"):
            self._average(lambda _: lambda: 1 / self._transport.workers, self.server.read_for_evaluation)

    def resume(self, own: bool = True) -> None:
        """Continue from the server's version, or the own parameters; before the first epoch `begin_epoch` does."""
        if self._averaged is not None:
            super().resume(own)

    def _put_back(self, averaged: AveragedModel, own: bool) -> bool:
        """Put the own parameters back, or continue from the server's version.

        All workers send a server the parameters again, or none does.
        """
        own = own or self.server.keeps_own_parameters
        is_as_shown = self.server.has_tables_as_shown()
        if not own:
            self.server.start_from_read()
        is_changed = not self._client.agreed(is_as_shown and not averaged.is_changed())
        if own and not is_changed:
            averaged.put_back()
            self.server.put_back_rows()
        replies = self._transport.all_gather_bytes(b"changed" if is_changed else b"")
        return any(reply == b"changed" for reply in replies)

    @contextmanager
    def newest(self) -> Iterator[None]:
        """Set the parameters to the server's newest version in a `with` block; no other worker waits."""
        own = self.server.read_alone()
        try:
            yield
        finally:
            self.server.put_back(own)

    def _rebuild(self, parameter_set: ParameterSet, by_name: Named, late: Sequence[RoundRange] = ()) -> None:
        if self._server is not None and self._server.keeps_own_parameters:
            self._server.read()  # parameters that are not exchanged from now on are the same at all workers
            self._transport.all_gather_bytes(b"read")  # before the first worker gives the server other parameters
        super()._rebuild(parameter_set, by_name, late)

    def _is_unused(self, parameter_set: ParameterSet, by_name: Named) -> bool:
        """Return True if no rank of this worker has parameters to exchange; each calls this."""
        return self._client.agreed(not by_name)

    def _tables(self, by_name: Named) -> Container[int]:
        if self._transport.siblings is not None:
            return ()  # a table is looked up by one rank of a worker, and all of them speak to the server together
        found = sparse_tables(self._model, by_name, self._optimizers, self.recipe)
        for line in notice_of(found):
            self._context.events.notice(line)
        self._row_tables = [table for table in found if not table.reason]
        return {id(table.parameter) for table in self._row_tables}

    def _watch_lookups(self, server: AsyncServer) -> None:
        """Let the modules of tables read the rows that they look up."""
        self._stop_watching()
        modules = {id(table.parameter): table for table in self._row_tables}
        for each in server.tables:
            self._watched.append(modules[id(each.parameter)])
            watch_lookups(self._watched[-1], each.look_up)

    def _stop_watching(self) -> None:
        stop_watching(self._watched)
        self._watched = []

    def _create_exchange(self, parameter_set: ParameterSet, rule_state: RuleState | None = None) -> None:
        assert parameter_set.flat_parameters is not None
        server = AsyncServer(
            self._client,
            parameter_set.flat_parameters,
            self.parameter_sets,
            self.recipe,
            self._optimizers,
            self._context,
            self._observer,
        )
        server.open(rule_state)
        self._store_for_joining(parameter_set)
        if self._server is not None:
            server.continue_counts(self._server)
            server.read()
            server.start_from_read()
        self._server = server
        self._watch_lookups(server)

    def _store_for_joining(self, parameter_set: ParameterSet) -> None:
        """Store what workers that join need at the first worker: also what neither the server nor a script holds."""
        if self._transport.worker or self._transport.siblings is not None or not self._client.admits_workers:
            return
        trained = parameter_set.names()
        others = {name: one for name, one in state_of(self._model).items() if name not in trained}
        start = self._start_sums.items()
        sums = {name: value for name, value in start if name in others and crc(others[name]) == value}
        missing = {name: one for name, one in others.items() if name not in sums}
        self._client.store_facts(pack_own(({"trained": trained, "sums": sums}, missing)))

    # --- figures and state ----------------------------------------------------------------------------------------

    @property
    def blocked_s(self) -> float | None:
        """Seconds for which the staleness bound has blocked this worker; None without a bound."""
        is_bounded = getattr(self.recipe.when, "bound", None) is not None
        return self._server.blocked_s if self._server is not None and is_bounded else None

    @property
    def versions_read(self) -> Sequence[int]:
        """Version of each shard at the last read."""
        return self._server.versions_read if self._server is not None else []

    def take_outcomes(self) -> list[Outcome]:
        """Return the updates of this worker that the server has applied since the last call."""
        return self._server.take_outcomes() if self._server is not None else []

    @property
    def shards(self) -> int:
        """Number of shards that hold the parameters."""
        return self._client.shards

    @property
    def states(self) -> Sequence[Any]:
        """Codec states of all ranges and shards."""
        return [state for each in self.codec_states for state in each]

    @property
    def codec_states(self) -> list[list[Any]]:
        """Codec states of each range, one for each shard."""
        return [each.states for each in self._server.ranges] if self._server is not None else []

    @property
    def own_parameters(self) -> Sequence[Tensor]:
        """This worker's own parameters while the server's version is in place, if it keeps them."""
        if self._averaged is None or not self.server.keeps_own_parameters:
            return []
        return self._averaged.own_parameters

    def load_own_parameters(self, state: Mapping[str, Any]) -> None:
        """Load parameters of this worker that are only pulled towards the server's."""
        if self._server is None or not self._server.keeps_own_parameters:
            return
        with in_buffers(self._parts):
            for index, each in enumerate(self._server.ranges):
                theta = state.get(f"own/{index}")
                if theta is not None and theta.shape == each.part.theta.shape:
                    each.part.theta.copy_(theta)

    def rule_state(self) -> RuleState | None:
        """Return the state of the server's rule, after a barrier. Raises RollbackRequiredError."""
        return self._server.rule_state() if self._server is not None else None

    def load_rule_state(self, rule_state: RuleState) -> None:
        """Send the loaded parameters, and the state of its rule, to the server."""
        if self._server is not None:
            self.parameter_sets += 1
            self._create_exchange(self.sets[0], rule_state)
