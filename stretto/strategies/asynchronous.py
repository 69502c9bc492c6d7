"""A worker's side of an asynchronous parameter server.

Let `theta` be the worker's parameters, and `mark` their values at the last exchange with the server. The update since
then is `theta - mark`. A new version is merged as `theta += version - mark; mark = version`, which keeps the steps that
the worker has done after the push. So a push and its reply can be under way while the worker computes its next round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.optim import SGD

from stretto.codecs import Codec
from stretto.data.leases import Lease
from stretto.errors import ModelError, NotFiniteError, TransportError, explain
from stretto.parameter_server.client import ParameterServerClient
from stretto.parameter_server.client_types import (
    PushHandle,
    PushResult,
    RollbackRequiredError,
    RuleState,
    Update,
)
from stretto.parameter_server.shard import is_finite
from stretto.recipe.recipe import Recipe
from stretto.recipe.then import add, delay_compensated, pull
from stretto.recipe.what import gradients
from stretto.recipe.when import on_arrival
from stretto.strategies.context import ExchangeObserver, StrategyContext
from stretto.strategies.flat_buffers import FlatParameters, in_buffers
from stretto.strategies.optimizers import Optimizers, parameters_of
from stretto.strategies.row_ranges import RowRange
from stretto.strategies.server_ranges import FlatRange, ServerRange, groups_of
from stretto.transport.device_memory import device_copy

P = ParamSpec("P")
Found = TypeVar("Found")
Messages = list[list[Tensor]]
"""For each shard, one message for each flat buffer's range of that shard."""
Outcome = tuple[int, int, int, int]
"""An update that a server has applied: round, version, staleness, samples."""


@dataclass(slots=True)
class _Sent:
    """A push whose reply has not been received, and the leases whose work it carries."""

    ticket: PushHandle
    leases: list[Lease]


def _in_buffers(act: Callable[Concatenate[AsyncServer, P], Found]) -> Callable[Concatenate[AsyncServer, P], Found]:
    """Let the flat buffers hold the values of the parameters while this method runs, which computes no gradients."""

    @functools.wraps(act)
    def run(server: AsyncServer, /, *args: P.args, **kwargs: P.kwargs) -> Found:
        with torch.no_grad(), in_buffers([flat_range.part for flat_range in server.ranges]):
            return act(server, *args, **kwargs)

    return run


class AsyncServer:
    """Pushes this worker's updates and merges the server's newest version, blocking or while the worker computes.

    An update that holds NaN or infinity is left out if the context says so, else it raises NotFiniteError. With one
    worker the server applies each update unchanged. `parameter_set` is the number of the set at the server.
    """

    def __init__(
        self,
        transport: ParameterServerClient,
        flat_parameters: FlatParameters,
        parameter_set: int,
        recipe: Recipe,
        optimizers: Optimizers,
        context: StrategyContext,
        observer: ExchangeObserver,
    ) -> None:
        tally = context.tally
        assert isinstance(recipe.when, on_arrival)
        self._recipe, self._when, self._how = recipe, recipe.when, recipe.how
        self._transport, self._timer, self._optimizers = transport, context.timer, optimizers
        self._observer = observer
        self._tally, self._account = tally, tally.account(type(recipe.what).__name__)
        self._sync_account = tally.account("evaluation_sync")
        self._skips = context.skips_non_finite
        self._parameter_set = parameter_set
        self._groups = groups_of(optimizers)
        self._is_elastic_averaging = isinstance(recipe.then, pull) and transport.expected > 1
        with in_buffers(flat_parameters.parts):
            self.ranges = [
                FlatRange(part, recipe.how, transport.shards, tally) for part in flat_parameters.parts if not part.width
            ]
        tables = [part for part in flat_parameters.parts if part.width]
        self.tables = [
            RowRange(part, recipe.how, transport.shards, tally, functools.partial(self._rows, index, part.theta))
            for index, part in enumerate(tables)
        ]
        """Tables whose rows are exchanged by themselves."""
        self._all: list[ServerRange] = [*self.ranges, *self.tables]
        self._reply_buffers = (
            [torch.empty_like(flat_range.mark, device="cpu") for flat_range in self.ranges]
            if self._is_elastic_averaging
            else []
        )
        """CPU buffers that hold a reply until it is complete, for a recipe that must not merge a part of one."""
        self._lengths = [each.part.theta.numel() for each in self.ranges]
        self._nbytes = sum(part.theta.nbytes for part in flat_parameters.parts)
        self._reply_nbytes = sum(each.part.theta.nbytes for each in self.ranges)
        """Bytes of the server's replies, which have no tables."""
        self.versions = self._computed_on = [0] * transport.shards
        self.versions_read = self.versions
        """Version of each shard at the last read."""
        self._outcomes: list[Outcome] = []
        """Applied updates of this worker that were not taken yet."""
        self.blocked_s = 0.0
        self._sent: _Sent | None = None
        self._seq, self._recovery_epoch = 0, transport.recovery_epoch
        self._is_open = False
        """False while the parameters are sent to the server: a rollback must not overwrite them."""
        self._no_steps_since_exchange = True
        """True if no step was done since the last exchange."""
        _refuse_optimizer(recipe, optimizers)

    @_in_buffers
    def open(self, rule_state: RuleState | None = None) -> None:
        """Set the server's parameters at the first worker; no worker pushes before that.

        `rule_state` is the state of the server's rule in another run. A worker that joins later reads the parameters
        instead.
        """
        self._transport.follow(self)
        self._set_parameters(rule_state)
        self._recovery_epoch, self._is_open = self._transport.recovery_epoch, True

    def _set_parameters(self, rule_state: RuleState | None) -> None:
        joined = self._transport.join_position
        if joined is not None and joined.parameter_set == self._parameter_set:
            self.read()
            self.start_from_read()
            return
        is_open = False
        while not is_open:
            first = self._transport.worker == 0
            if first:
                parts = [each.part.theta for each in self._all]
                widths = [each.part.width for each in self._all] if self.tables else []
                self._transport.open(self._parameter_set, self._recipe.spelled(), parts, rule_state, widths)
            is_open = b"open" in self._transport.all_gather_bytes(b"open" if first else b"")

    # --- exchanges ----------------------------------------------------------------------------------------------

    def take_outcomes(self) -> list[Outcome]:
        """Return the updates of this worker that the server has applied since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def continue_counts(self, before: AsyncServer) -> None:
        """Continue the counts of the exchange before this one."""
        self.blocked_s, self._outcomes = before.blocked_s, before.take_outcomes()

    def before_step(self, index: int) -> None:
        """Remember the rows of tables that a step of the optimizer with this number is about to change."""
        held = set(map(id, parameters_of(self._optimizers.each[index]))) if self.tables else ()
        for table in self.tables:
            if id(table.parameter) in held:
                table.before_step()

    def stepped(self) -> None:
        """Note that the optimizer has done a step."""
        self._no_steps_since_exchange = False

    @_in_buffers
    def run(self, samples: int, leases: list[Lease]) -> bool:
        """Push the update since the last exchange, the work on these leases. Return False if it was left out."""
        before = self._timer.switch("encoding")
        began = self._timer.spent["exchanging"]
        self._transport.leave_barrier()
        is_pushed = not self._merge_reply() or self._push_valid(samples, leases)
        if not self._when.ahead:
            self._merge_reply()
        self._observer.exchange_ended(self._timer.spent["exchanging"] - began)
        self._timer.switch(before)
        return is_pushed

    def merge_if_arrived(self) -> None:
        """Merge the reply to the last push if it has arrived; never waits."""
        if self._sent is not None and self._sent.ticket.poll():
            self._merge_arrived()

    @_in_buffers
    def _merge_arrived(self) -> None:
        before = self._timer.switch("encoding")
        self._merge_reply()
        self._timer.switch(before)

    @_in_buffers
    def finish(self, samples: int, leases: list[Lease]) -> bool:
        """Push the remaining update and wait until a server has applied it. Return False if it was left out."""
        before = self._timer.switch("encoding")
        is_pushed, is_valid = True, self._merge_reply()
        if is_valid and (not self._no_steps_since_exchange or leases):
            is_pushed = self._push_valid(samples, leases)
            self._observer.exchange_ended(0.0)
        self._merge_reply()
        self._timer.switch(before)
        return is_pushed

    @_in_buffers
    def wait_at_barrier(self, called: bool = False) -> bool:
        """Wait at a barrier with no update of any worker in flight. Return True if the epoch was over then.

        The workers come because they were `called`, or else because each of them knows that the barrier is due.
        """
        with self._timer.on("encoding"):
            self._merge_reply()
        with self._timer.on("waiting"):
            return self._transport.wait_at_barrier(self._seq, called)

    @_in_buffers
    def rolled_back(self) -> None:
        """Continue from the snapshot that the servers rolled back to; the updates since then are computed again.

        Accumulated gradients are set to zero, too.
        """
        if not self._is_open:
            return
        if self._sent is not None:
            self._sent.ticket.discard()
        self._sent, self._seq, self._recovery_epoch, self._no_steps_since_exchange = (
            None,
            0,
            self._transport.recovery_epoch,
            True,
        )
        self._zero_gradients()
        self._read()
        self.start_from_read()

    @_in_buffers
    def undo(self) -> None:
        """Undo the steps since the last exchange, and set the gradients to zero."""
        for each in self._all:
            each.undo()
        self._no_steps_since_exchange = True
        self._zero_gradients()

    def _zero_gradients(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=False)  # not None: a gradient scaler needs them

    @_in_buffers
    def read(self) -> list[int]:
        """Set the parameters to the server's newest version, and return its number at each shard.

        All workers do so after a barrier, so all have the same parameters.
        """
        while True:
            try:
                return self._read()
            except RollbackRequiredError:
                self._transport.roll_back()

    @_in_buffers
    def read_alone(self) -> list[Tensor]:
        """Set the parameters to the server's newest version, and return this worker's own parameters.

        No other worker takes part: an incomplete group of updates stays collected at the server.
        """
        self._merge_reply()
        while True:
            own = [flat_range.part.theta.clone() for flat_range in self.ranges]
            try:
                self._read(flush=False)
            except RollbackRequiredError:
                self._transport.roll_back()
            else:
                return own

    @_in_buffers
    def put_back(self, own: Sequence[Tensor]) -> None:
        """Set the parameters to this worker's own again, after `read_alone`."""
        for flat_range, theta in zip(self.ranges, own, strict=True):
            flat_range.part.theta.copy_(theta)
        self.put_back_rows()

    def put_back_rows(self) -> None:
        """Restore the rows of tables that this worker has changed, after the tables were read."""
        for table in self.tables:
            table.put_back()

    def has_tables_as_shown(self) -> bool:
        """Return True if the script has changed no table since the last evaluation began."""
        found = [table.is_as_shown() for table in self.tables]  # each forgets what it was
        return all(found)

    def read_for_evaluation(self) -> bool:
        """Read the newest version. Return False if the servers rolled back: older parameters are void then."""
        recovery_epoch = self._recovery_epoch
        self.read()
        for table in self.tables:
            table.note_shown()
        return self._recovery_epoch == recovery_epoch

    def _read(self, flush: bool = True) -> list[int]:
        """Read the newest version without a retry. Raises RollbackRequiredError if a server failed."""
        for each in self._all:
            each.before_read()
        with self._timer.on("exchanging"):
            result = self._transport.read(self._lengths, flush).wait(self._copy_piece)
        for table in self.tables:
            table.read_whole()
        if self._sync_account is not None:
            self._sync_account.received += self._reply_nbytes
            self._sync_account.raw_received += self._nbytes
        for each in self._all:
            each.was_read()
        self._note_outcomes(result)
        self.versions_read = result.versions
        return result.versions

    def release(self) -> None:
        """Detach from the client, which stays open: the section has ended, and its parameters must no longer change."""
        self._transport.follow(None)

    @property
    def shards(self) -> int:
        """Number of shards that hold the parameters."""
        return self._transport.shards

    def rule_state(self) -> RuleState:
        """Return the servers' rule state, after a barrier. Raises RollbackRequiredError."""
        return self._transport.read_rule_state(len(self.ranges))

    @property
    def keeps_own_parameters(self) -> bool:
        """True if a worker keeps its own parameters, which are only pulled towards the server's."""
        return self._is_elastic_averaging

    @_in_buffers
    def start_from_read(self) -> None:
        """Continue from the version that was read, which the parameters hold."""
        self.versions = self._computed_on = self.versions_read
        for each in self._all:
            each.start_from_read()

    # --- push and reply -----------------------------------------------------------------------------------------

    def _push_valid(self, samples: int, leases: list[Lease]) -> bool:
        """Push the update, unless its work was done on leases of before a rollback."""
        if all(lease.recovery_epoch == self._recovery_epoch for lease in leases):
            return self._push(samples, leases)
        self.undo()
        return True

    def _push(self, samples: int, leases: list[Lease]) -> bool:
        self._seq += 1
        lr = self._compute_change()
        messages = self._encode_finite()
        is_left_out = messages is None
        if messages is None:
            samples, leases = 0, []
            self._compute_empty_change()
            messages = self._encode()
        batches = [lease.batch for lease in leases]
        update = Update(self._seq, self._computed_on, samples, lr, messages, batches)
        self._count_traffic(update)
        self._sent = _Sent(self._transport.push(self._parameter_set, update, self._lengths), leases)
        for each in self._all:
            each.sent()
        self._computed_on, self._no_steps_since_exchange = self.versions, True
        return not is_left_out

    def _encode_finite(self) -> Messages | None:
        """Return the messages to the shards; None if the update is left out because it holds NaN or infinity."""
        changes = [each.change for each in self._all]
        if not self._is_skipped(changes):
            norm = self._tally.norm_of(changes)
            messages = self._encode()
            if not self._is_skipped([tensor for part in messages for tensor in part if tensor.is_floating_point()]):
                self._tally.measure_residual_later(
                    norm, self._how, [state for flat_range in self.ranges for state in flat_range.states]
                )
                return messages
        return None

    def _encode(self) -> Messages:
        """Encode a message to each shard for its range of every flat buffer."""
        shards = range(self._transport.shards)
        self._messages = [[each.encode(shard) for shard in shards] for each in self._all]
        return [[message for each in self._messages for message in each[shard]] for shard in shards]

    def _count_traffic(self, update: Update) -> None:
        if self._account is None:
            return
        self._account.count_raw(self._nbytes)
        self._account.sent += update.nbytes
        for each, messages in zip(self._all, self._messages, strict=True):
            each.count_values(messages)

    def _compute_empty_change(self) -> None:
        """Set `change` to an update without effect: the server must learn that the round has ended."""
        for each in self._all:
            each.compute_empty_change(self._recipe.what)

    def _compute_change(self) -> float:
        """Compute the update. Return the learning rate, or 0.0 if the parameter groups have several."""
        for each in self._all:
            each.compute_change(self._recipe.what, self._groups)
        rates = {float(group["lr"]) for group in self._optimizers.param_groups if "lr" in group}
        return rates.pop() if len(rates) == 1 else 0.0

    def _merge_reply(self) -> bool:
        """Wait for the reply to the last push, if none was received yet, and merge it as it arrives.

        Returns False if the servers rolled back in that time.
        """
        recovery_epoch, sent, self._sent = self._recovery_epoch, self._sent, None
        if sent is not None:
            try:
                self._receive_and_merge(sent)
            except RollbackRequiredError:
                self._transport.roll_back()
        return self._recovery_epoch == recovery_epoch

    def _receive_and_merge(self, sent: _Sent) -> None:
        with self._timer.on("exchanging"):
            result = self._receive(sent)
        self._timer.move("exchanging", "waiting", result.blocked_s)
        self.blocked_s += result.blocked_s
        self._note_outcomes(result)
        self._observer.settle(sent.leases)
        self.versions = result.versions
        if self._no_steps_since_exchange:
            self._computed_on = result.versions

    def _receive(self, sent: _Sent) -> PushResult:
        try:
            if self._how.reply is not None:
                return self._receive_encoded(self._how.reply, sent.ticket)
            result = (
                self._receive_whole(sent.ticket) if self._is_elastic_averaging else sent.ticket.wait(self._merge_piece)
            )
        except RollbackRequiredError:
            raise
        except TransportError as error:
            raise self._not_finite() or error from None
        if self._account is not None:
            self._account.received += self._reply_nbytes
        return result

    def _rows(self, table: int, like: Tensor, numbers: list[Tensor], is_sync: bool) -> Tensor:
        """Return rows of a table, by their numbers at each shard; repeat the request after a rollback.

        In an evaluation sync raise RollbackRequiredError instead.
        """
        while True:
            try:
                with self._timer.on("exchanging"):
                    rows = self._transport.read_rows(self._parameter_set, table, numbers, like)
            except RollbackRequiredError:
                if is_sync:
                    raise
                self._transport.roll_back()
            else:
                break
        account = self._sync_account if is_sync else self._account
        if account is not None:
            account.sent += sum(one.nbytes for one in numbers)
            account.received += rows.nbytes
        return rows

    def _receive_whole(self, ticket: PushHandle) -> PushResult:
        """Merge a reply when it is complete: a reply that breaks off is sent again, and no part may be merged twice."""

        def copy(part: int, at: int, piece: Tensor) -> None:
            self._reply_buffers[part][at : at + piece.numel()].copy_(piece)

        result = ticket.wait(copy)
        for part, version in enumerate(self._reply_buffers):
            self._merge_piece(part, 0, version)
        return result

    def _receive_encoded(self, reply: Codec, ticket: PushHandle) -> PushResult:
        """Decode the server's replies, which hold the difference to the parameters known here, and merge the result."""
        result, messages = ticket.messages()
        for shard, parts in enumerate(messages):
            for part, (flat_range, message) in enumerate(zip(self.ranges, parts, strict=True)):
                start, stop = flat_range.bounds[shard]
                assert flat_range.known is not None
                known = flat_range.known[start:stop]
                if message.numel():
                    reply.add_to(known, device_copy(message, known.device))
                self._merge_piece(part, start, known)
                if self._account is not None:
                    self._account.received += message.nbytes
        return result

    def _note_outcomes(self, result: PushResult) -> None:
        self._outcomes += result.applied

    def _copy_piece(self, part: int, at: int, version: Tensor) -> None:
        """Copy a piece of a version into the parameters."""
        self.ranges[part].part.theta[at : at + version.numel()].copy_(version)

    def _merge_piece(self, part: int, at: int, version: Tensor) -> None:
        """Merge a piece of a version, keeping the steps since the last exchange."""
        flat_range, stop = self.ranges[part], at + version.numel()
        theta, mark = flat_range.part.theta[at:stop], flat_range.mark[at:stop]
        version = device_copy(version, theta.device)
        if self._is_elastic_averaging:
            assert isinstance(self._recipe.then, pull)
            theta.sub_(mark.sub_(version), alpha=self._recipe.then.alpha)
        elif self._no_steps_since_exchange:
            theta.copy_(version)
            mark.copy_(version)
        else:
            theta.add_(version - mark)
            mark.copy_(version)

    # --- NaN and infinity ---------------------------------------------------------------------------------------

    def _is_skipped(self, parts: Sequence[Tensor]) -> bool:
        """Return True if an update with NaN or infinity is left out; raise NotFiniteError if it must not be.

        It is left out whole, with the parts of other ranks.
        """
        finite = is_finite(parts)
        if self._transport.agreed(finite) if self._skips else finite:
            return False
        if not self._skips:
            raise self._not_finite() or NotFiniteError("an update is infinite in the encoding of the recipe")
        for each in self._all:
            each.undo()
        for _, state in self._optimizers.states():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim():
                    value.zero_()
        return True

    def _not_finite(self) -> NotFiniteError | None:
        """Return the error that names the parameter whose pushed update is not finite; None if all are finite."""
        names = (each.not_finite() for each in self._all)
        name = next((one for one in names if one is not None), None)
        return NotFiniteError(f"the update of {name} is NaN or infinite; it was not sent") if name else None


def _refuse_optimizer(recipe: Recipe, optimizers: Optimizers) -> None:
    """Raise ModelError for an optimizer that the recipe's server can't stand in for.

    A server that receives gradients steps as plain SGD without momentum; delay compensation needs one learning rate.
    """
    keys = ("momentum", "weight_decay", "nesterov", "maximize")
    groups = optimizers.param_groups
    plain = all(type(optimizer) is SGD for optimizer in optimizers) and not any(
        group.get(key) for group in groups for key in keys
    )
    if isinstance(recipe.what, gradients) and not plain:
        problem = f"{recipe} sends gradients to a server that steps with the learning rate alone"
        names = ", ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in optimizers))
        raise ModelError(
            explain(
                problem,
                got=f"{names}{_settings(groups[0], keys)}",
                expected="torch.optim.SGD without momentum and weight decay",
                to_type=f"what=updates(), which works with any optimizer: {_with_updates(recipe)}",
            )
        )
    rates = {group.get("lr") for group in groups}
    compensated = isinstance(recipe.then, add) and isinstance(recipe.then.weight, delay_compensated)
    if compensated and len(rates) != 1:
        problem, expected = f"{recipe.then} needs to know the learning rate", "one for all parameter groups"
        raise ModelError(explain(problem, got=f"{sorted(map(str, rates))}", expected=expected, to_type="async_sgd"))


def _settings(group: dict[str, Any], keys: Sequence[str]) -> str:
    shown = [f"{key}={group[key]}" for key in keys if group.get(key)]
    return f"({', '.join(shown)})" if shown else ""


def _with_updates(recipe: Recipe) -> str:
    return f"Recipe(what=updates(), when={recipe.when}, whom={recipe.whom}, then={recipe.then})"
