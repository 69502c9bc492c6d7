"""The exchange of a worker that does not wait for others: its side of a parameter server.

Let theta be the worker's parameters, and mark what they were when it last told the server of them, or heard. What it
has learned since is `theta - mark`; the news of a version is `theta += version - mark; mark = version`, which keeps
what was learned meanwhile. So sending and receiving can go on while the worker computes its next round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
    ranges,
)
from stretto.parameter_server.shard import is_finite
from stretto.recipe.recipe import Recipe
from stretto.recipe.then import add, delay_compensated, pull
from stretto.recipe.what import gradients, parameters
from stretto.recipe.when import on_arrival
from stretto.runtime.phase_timer import Stopwatch
from stretto.state import save
from stretto.strategies.flat_buffers import FlatBuffer, FlatParameters
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.traffic_counters import Tally

Messages = list[list[Tensor]]
"""For each shard a message for each part of its range."""
Outcome = tuple[int, int, int, int]
"""An update that was applied: round, version, staleness, samples."""


class _FlatRange:
    """What a worker keeps for one part of the arena between exchanges."""

    def __init__(self, part: FlatBuffer, how: Codec, shards: int, tally: Tally) -> None:
        self.part = part
        self.mark = part.theta.clone()
        self.change = torch.empty_like(part.theta)
        self.bounds = ranges(part.theta.numel(), shards)
        self.states = [how.init_state(part.theta[a:b], tally.context(part, a, b)) for a, b in self.bounds]
        save(self.states, f"the state of {how}")  # refused here, and not when a checkpoint is due
        self.known = part.theta.clone() if how.reply is not None else None
        """The server's parameters as its encoded replies have told them."""


@dataclass(slots=True)
class _Sent:
    """An exchange under way, and the leases whose work it carries."""

    ticket: PushHandle
    leases: list[Lease]


class AsyncServer:
    """Pushes what this worker learned and takes up the server's newest version, at once or while it computes on.

    `on_settled` is called with the leases whose work has become part of the server's parameters, `on_end` after every
    exchange with the seconds blocked by it. An update that holds NaN or infinity is left out if this worker `skips`
    such, and else ends the run. With one worker the server takes what the worker learned as it is.
    """

    def __init__(
        self,
        arena: FlatParameters,
        arena_number: int,
        recipe: Recipe,
        wire: ParameterServerClient,
        watch: Stopwatch,
        tally: Tally,
        optimizers: Optimizers,
        on_settled: Callable[[list[Lease]], None],
        on_end: Callable[[float], None],
        skips: bool,
        kept: RuleState | None = None,
    ) -> None:
        assert isinstance(recipe.when, on_arrival)
        self._recipe, self._when, self._how = recipe, recipe.when, recipe.how
        self._wire, self._watch, self._optimizers = wire, watch, optimizers
        self._on_settled, self._on_end = on_settled, on_end
        self._tally, self._account = tally, tally.account(type(recipe.what).__name__)
        self._looks = tally.account("evaluation_sync")
        self._skips = skips
        self._arena_number = arena_number
        self._groups = _groups(optimizers)
        self._elastic = isinstance(recipe.then, pull) and wire.expected > 1
        self.ranges = [_FlatRange(part, recipe.how, wire.shards, tally) for part in arena.parts]
        self._whole = [torch.empty_like(one.mark, device="cpu") for one in self.ranges] if self._elastic else []
        """Where a reply lies until it is whole, if nothing of it may be taken up before."""
        self._lengths = [part.theta.numel() for part in arena.parts]
        self._nbytes = sum(part.theta.nbytes for part in arena.parts)
        self.versions = self._computed_on = [0] * wire.shards
        self.versions_read = self.versions
        """The version at each shard that was looked at last."""
        self.outcomes: list[Outcome] = []
        """What became of this worker's updates; whoever reads it clears it."""
        self.held_s = 0.0
        self._sent: _Sent | None = None
        self._seq, self._age = 0, wire.recovery_epoch
        self._fresh = True
        """Whether nothing was computed since the last exchange."""
        _refuse_optimizer(recipe, optimizers)
        wire.on_snapshot_barrier, wire.on_rolled_back = (
            self.meet,
            _stay,
        )  # what is given to the server is not read from it meanwhile
        self._open(kept)
        self._age = wire.recovery_epoch
        wire.on_rolled_back = self._follow

    def _open(self, kept: RuleState | None) -> None:
        """The first worker gives the parameters to the server; nobody pushes before they are there.

        With what the rule has `kept` in another run. A worker that came later reads them.
        """
        joined = self._wire.join_position
        if joined is not None and joined.parameter_set == self._arena_number:
            self.read()
            self.start_from_read()
            return
        is_open = False
        while not is_open:
            first = self._wire.worker == 0
            if first:
                parts = [one.part.theta for one in self.ranges]
                self._wire.open(self._arena_number, self._recipe.spelled(), parts, kept)
            is_open = b"open" in self._wire.all_gather_bytes(b"open" if first else b"")

    # --- exchanging ---------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """The optimizer has done a step."""
        self._fresh = False

    @torch.no_grad()
    def run(self, samples: int, leases: list[Lease]) -> bool:
        """Push what was learned since the last exchange, the work on these leases; False when it was left out."""
        before = self._watch.switch("encoding")
        began = self._watch.spent["exchanging"]
        self._wire.leave_barrier()
        is_sent = not self._hear() or self._push_valid(samples, leases)
        if not self._when.ahead:
            self._hear()
        self._on_end(self._watch.spent["exchanging"] - began)
        self._watch.switch(before)
        return is_sent

    @torch.no_grad()
    def glance(self) -> None:
        """Take up the news if they are there; never waits."""
        if self._sent is not None and self._sent.ticket.poll():
            before = self._watch.switch("encoding")
            self._hear()
            self._watch.switch(before)

    @torch.no_grad()
    def finish(self, samples: int, leases: list[Lease]) -> bool:
        """Exchange what is left, and wait until it is the server's; False when it was left out."""
        before = self._watch.switch("encoding")
        is_sent, went_on = True, self._hear()
        if went_on and (not self._fresh or leases):
            is_sent = self._push_valid(samples, leases)
            self._on_end(0.0)
        self._hear()
        self._watch.switch(before)
        return is_sent

    @torch.no_grad()
    def meet(self, called: bool = False) -> bool:
        """Wait until nothing of any worker is under way; whether the pass was over then.

        All come because they were `called` to it, or else because each knows by itself that it is due.
        """
        with self._watch.on("encoding"):
            self._hear()
        with self._watch.on("waiting"):
            return self._wire.wait_at_barrier(self._seq, called)

    @torch.no_grad()
    def _follow(self) -> None:
        """The servers went back to a cut: go on from there, what was learned since is done again.

        That is in the gradients, too, where they are accumulated.
        """
        if self._sent is not None:
            self._sent.ticket.discard()
        self._sent, self._seq, self._age, self._fresh = None, 0, self._wire.recovery_epoch, True
        for one in self._optimizers:
            one.zero_grad(set_to_none=False)  # a scaler looks for them
        self._read()
        self.start_from_read()

    @torch.no_grad()
    def read(self) -> list[int]:
        """Put the server's newest version in place of the parameters; returns its number at each shard.

        All workers do it, after they have met: so all have the same.
        """
        while True:
            try:
                return self._read()
            except RollbackRequiredError:
                self._wire.roll_back()

    @torch.no_grad()
    def read_alone(self) -> list[Tensor]:
        """Put the server's newest version in place of the parameters, and return this worker's own.

        No other worker takes part: an incomplete group of updates stays collected at the server.
        """
        self._hear()
        while True:
            own = [one.part.theta.clone() for one in self.ranges]
            try:
                self._read(flush=False)
            except RollbackRequiredError:
                self._wire.roll_back()
            else:
                return own

    @torch.no_grad()
    def put_back(self, own: Sequence[Tensor]) -> None:
        """Put this worker's own parameters in place again after `read_alone`."""
        for one, theta in zip(self.ranges, own, strict=True):
            one.part.theta.copy_(theta)

    def look(self) -> bool:
        """The same; False when the servers went back to a cut meanwhile: what this worker had before is void."""
        age = self._age
        self.read()
        return self._age == age

    def _read(self, flush: bool = True) -> list[int]:
        """The same, once. Raises RollbackRequiredError when a server was lost."""
        with self._watch.on("exchanging"):
            news = self._wire.read(self._lengths, flush=flush).wait(self._put)
        if self._looks is not None:
            self._looks.received += self._nbytes
            self._looks.raw_received += self._nbytes
        for one in self.ranges:
            if one.known is not None:
                one.known.copy_(one.part.theta)
        self._note(news)
        self.versions_read = news.versions
        return news.versions

    def release(self) -> None:
        """Let go of the wire, which stays: the section has ended, and servers that go back give nothing to this one."""
        self._wire.on_snapshot_barrier, self._wire.on_rolled_back = (lambda _called: True), _stay

    @property
    def shards(self) -> int:
        """How many servers the parameters are shared out to."""
        return self._wire.shards

    def rule_memory(self) -> RuleState:
        """What the servers' rule keeps besides the parameters, when all have met. Raises RollbackRequiredError."""
        return self._wire.read_rule_state(len(self.ranges))

    @property
    def keeps_own(self) -> bool:
        """Whether a worker's parameters stay its own, and are only pulled towards the server's."""
        return self._elastic

    @torch.no_grad()
    def start_from_read(self) -> None:
        """Go on from the version that was read, which lies in the parameters' place."""
        self.versions = self._computed_on = self.versions_read
        for one in self.ranges:
            one.mark.copy_(one.part.theta)

    # --- the two halves -----------------------------------------------------------------------------------------

    def _push_valid(self, samples: int, leases: list[Lease]) -> bool:
        """Push what was learned, unless it was learned before the servers went back to a cut."""
        valid = [lease for lease in leases if lease.recovery_epoch == self._age]
        if len(valid) < len(leases):
            samples = sum(lease.samples for lease in valid)
        if valid or not leases:
            return self._push(samples, valid)
        for one in self.ranges:
            one.part.theta.copy_(one.mark)
        self._fresh = True
        return True

    def _push(self, samples: int, leases: list[Lease]) -> bool:
        self._seq += 1
        lr = self._bring()
        messages = self._encoded()
        is_left_out = messages is None
        if messages is None:
            samples, leases = 0, []
            self._bring_nothing()
            messages = self._encode()
        batches = [lease.batch for lease in leases]
        update = Update(self._seq, self._computed_on, samples, lr, messages, batches)
        self._count(update)
        self._sent = _Sent(self._wire.push(self._arena_number, update, self._lengths), leases)
        for one in self.ranges:
            one.mark.copy_(one.part.theta)
        self._computed_on, self._fresh = self.versions, True
        return not is_left_out

    def _encoded(self) -> Messages | None:
        """What this worker says to each shard; None when it is left out, for a NaN or an infinity in it."""
        changes = [one.change for one in self.ranges]
        if not self._is_skipped(changes):
            given = self._tally.norm_of(changes)
            messages = self._encode()
            if not self._is_skipped([one for each in messages for one in each if one.is_floating_point()]):
                self._tally.owes(given, self._how, [state for one in self.ranges for state in one.states])
                return messages
        return None

    def _encode(self) -> Messages:
        """A message to each shard about its range of every part."""
        return [
            [self._how.encode(one.change[slice(*one.bounds[shard])], one.states[shard]) for one in self.ranges]
            for shard in range(self._wire.shards)
        ]

    def _count(self, update: Update) -> None:
        if self._account is None:
            return
        self._account.began(self._nbytes)
        self._account.sent += update.nbytes
        for shard, messages in enumerate(update.messages):
            for one, message in zip(self.ranges, messages, strict=True):
                self._tally.spoke(self._how, message, one.change[slice(*one.bounds[shard])])

    def _bring_nothing(self) -> None:
        """What is sent in place of an update that is left out: the round must be known to have ended."""
        for one in self.ranges:
            if isinstance(self._recipe.what, parameters):
                one.change.copy_(one.part.theta)
            else:
                one.change.zero_()

    def _bring(self) -> float:
        """Write what is pushed into `change`; returns the learning rate in it, if there is one."""
        what = self._recipe.what
        for one in self.ranges:
            if isinstance(what, parameters):
                one.change.copy_(one.part.theta)
            elif isinstance(what, gradients):
                _descent(one, self._groups)
            else:
                torch.sub(one.part.theta, one.mark, out=one.change)
        rates = {float(group["lr"]) for group in self._optimizers.param_groups if "lr" in group}
        return rates.pop() if len(rates) == 1 else 0.0

    def _hear(self) -> bool:
        """Wait for the reply to the last push, if there was none yet, and take it up as it comes.

        False when the servers went back to a cut meanwhile.
        """
        age, sent, self._sent = self._age, self._sent, None
        if sent is not None:
            try:
                self._take_news(sent)
            except RollbackRequiredError:
                self._wire.roll_back()
        return self._age == age

    def _take_news(self, sent: _Sent) -> None:
        with self._watch.on("exchanging"):
            news = self._news(sent)
        self._watch.move("exchanging", "waiting", news.blocked_s)
        self.held_s += news.blocked_s
        self._note(news)
        self._on_settled(sent.leases)
        self.versions = news.versions
        if self._fresh:
            self._computed_on = news.versions

    def _news(self, sent: _Sent) -> PushResult:
        try:
            if self._how.reply is not None:
                return self._decoded_news(self._how.reply, sent.ticket)
            news = self._whole_news(sent.ticket) if self._elastic else sent.ticket.wait(self._take_up)
        except RollbackRequiredError:
            raise
        except TransportError as error:
            raise self._not_finite() or error from None
        if self._account is not None:
            self._account.received += self._nbytes
        return news

    def _whole_news(self, ticket: PushHandle) -> PushResult:
        """Take up a reply once it is whole: of one that is cut off, and comes again, nothing may be taken up twice."""

        def put(part: int, at: int, piece: Tensor) -> None:
            self._whole[part][at : at + piece.numel()].copy_(piece)

        news = ticket.wait(put)
        for part, version in enumerate(self._whole):
            self._take_up(part, 0, version)
        return news

    def _decoded_news(self, reply: Codec, ticket: PushHandle) -> PushResult:
        """Take up what the server's encoded replies say of the difference to what is known of its parameters."""
        news, messages = ticket.messages()
        for shard, found in enumerate(messages):
            for part, (one, message) in enumerate(zip(self.ranges, found, strict=True)):
                start, stop = one.bounds[shard]
                assert one.known is not None
                known = one.known[start:stop]
                if message.numel():
                    reply.add_to(known, message.to(known.device))
                self._take_up(part, start, known)
                if self._account is not None:
                    self._account.received += message.nbytes
        return news

    def _note(self, news: PushResult) -> None:
        self.outcomes += news.applied

    def _put(self, part: int, at: int, version: Tensor) -> None:
        """Put a piece of a version in place of the parameters."""
        self.ranges[part].part.theta[at : at + version.numel()].copy_(version)

    def _take_up(self, part: int, at: int, version: Tensor) -> None:
        """Take up a piece of a version, and keep what was learned since the last exchange."""
        one, stop = self.ranges[part], at + version.numel()
        theta, mark = one.part.theta[at:stop], one.mark[at:stop]
        version = version.to(theta.device)
        if self._elastic:
            assert isinstance(self._recipe.then, pull)
            theta.sub_(mark.sub_(version), alpha=self._recipe.then.alpha)
        elif self._fresh:
            theta.copy_(version)
            mark.copy_(version)
        else:
            theta.add_(version - mark)
            mark.copy_(version)

    # --- what is not finite -------------------------------------------------------------------------------------

    def _is_skipped(self, parts: Sequence[Tensor]) -> bool:
        """Whether an update is left out because of a NaN or an infinity in it. Raises NotFiniteError if it may not."""
        if is_finite(parts):
            return False
        if not self._skips:
            raise self._not_finite() or NotFiniteError("an update is infinite in the encoding of the recipe")
        for one in self.ranges:
            one.part.theta.copy_(one.mark)
        for _, state in self._optimizers.states():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim():
                    value.zero_()
        return True

    def _not_finite(self) -> NotFiniteError | None:
        """What a server's refusal was about, by name, if this worker pushed NaN or an infinity."""
        for one in self.ranges:
            for slot in one.part.slots:
                if not bool(torch.isfinite(one.change[slot.start : slot.stop]).all()):
                    return NotFiniteError(f"the update of {slot.name} is NaN or infinite; it was not sent")
        return None


def _stay() -> None:
    """Keep the parameters."""


def _groups(optimizers: Optimizers) -> dict[int, dict[str, Any]]:
    return {id(one): group for group in optimizers.param_groups for one in group["params"]}


def _descent(one: _FlatRange, groups: dict[int, dict[str, Any]]) -> None:
    """The step down the gradient, `-lr * g`, of every parameter."""
    one.change.zero_()
    for slot in one.part.slots:
        gradient = slot.parameter.grad
        if gradient is not None and slot.home is None:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            slot.view(one.change).copy_(dense).mul_(-float(groups[id(slot.parameter)]["lr"]))


def _refuse_optimizer(recipe: Recipe, optimizers: Optimizers) -> None:
    """A gradient says nothing of momentum, nor of any optimizer but plain SGD; some weights need one learning rate."""
    keys = ("momentum", "weight_decay", "nesterov", "maximize")
    groups = optimizers.param_groups
    plain = all(type(one) is SGD for one in optimizers) and not any(group.get(key) for group in groups for key in keys)
    if isinstance(recipe.what, gradients) and not plain:
        problem = f"{recipe} sends gradients to a server that steps with the learning rate alone"
        names = ", ".join(dict.fromkeys(type(one).__name__ for one in optimizers))
        raise ModelError(
            explain(
                problem,
                got=f"{names}{_settings(groups[0], keys)}",
                expected="torch.optim.SGD without momentum and weight decay",
                to_type=f"what=updates(), which holds whatever the optimizer does: {_with_updates(recipe)}",
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
