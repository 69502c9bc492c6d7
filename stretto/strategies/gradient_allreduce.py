"""The exchange of gradients: begun while backward still runs, complete when `backward()` returns.

Each parameter's hook writes its gradient, weighted, into a flat bucket; full buckets set off in a fixed order. The
last act of the backward pass waits for all of them, so that clipping, scalers and the optimizer see agreed gradients.

A codec that does not encode each number by itself gets all gradients of a part at once, and one more exchange carries
how many workers have a gradient for each parameter, and how many have one that is not finite: such a gradient is not
encoded, and all workers see NaN in its place, as they would without an encoding.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from stretto.codecs import exact
from stretto.errors import ModelError, NotFiniteError, explain
from stretto.recipe.recipe import Recipe
from stretto.recipe.what import gradient_differences, gradients, momenta
from stretto.runtime.phase_timer import Pace, Stopwatch
from stretto.runtime.runtime import Runtime
from stretto.strategies.codec_state import CodecStates
from stretto.strategies.collective_runner import CollectiveRunner, finish
from stretto.strategies.flat_buffers import FlatBuffer, FlatParameters, ParameterSlice
from stretto.strategies.traffic_counters import Tally
from stretto.transport import Transport
from stretto.transport.elastic import ElasticTransport, attempted, has_others

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""Bucket sizes as in DistributedDataParallel: a small one first, so that sending starts early."""

FORWARD = 1 / 3
"""The share of a step's computing that is over when backward begins: a product forward, and two backward."""


class GradientSlot:
    """Where one parameter's gradient lives: its view of a bucket."""

    __slots__ = ("bucket", "passed", "slot", "view")

    def __init__(self, slot: ParameterSlice, bucket: Bucket, flat: Tensor) -> None:
        self.slot, self.bucket = slot, bucket
        self.view = slot.view(flat)
        self.passed = 0
        """The backward pass that wrote it last."""


class Bucket:
    """A range of a part's gradients that is sent as one: its parameters' `places`, and a `tail` for counts."""

    def __init__(self, part: FlatBuffer, flat: Tensor, slots: Sequence[ParameterSlice], tail: int = 0) -> None:
        self.part, self.start, self.stop = part, slots[0].start, slots[-1].stop
        self.flat = flat[self.start : self.stop + tail]
        self.tail = flat[self.stop : self.stop + tail]
        self.places = [GradientSlot(slot, self, flat) for slot in slots]
        self._padding = _padding(slots).to(flat.device)
        self.state: Any = None
        self.missing = 0

    def clear_padding(self) -> None:
        """An answer may have put numbers between the parameters' places; they are no gradients."""
        self.flat.index_fill_(0, self._padding, 0.0)


def _padding(slots: Sequence[ParameterSlice]) -> Tensor:
    """The numbers of a bucket that belong to no parameter."""
    pairs = itertools.pairwise(slots)
    gaps = [torch.arange(one.stop, following.start) for one, following in pairs]
    return torch.cat([torch.empty(0, dtype=torch.int64), *gaps]) - slots[0].start


class GradientBuffers:
    """Where the gradients of one pass lie: buckets, and the places and counts in them."""

    def __init__(self, arena: FlatParameters, counts_ride: bool) -> None:
        self.buckets = cut(arena, counts_ride)
        self.places = [place for bucket in self.buckets for place in bucket.places]
        self.place_of = {id(place.slot.parameter): place for place in self.places}
        self.counts = self.buckets[-1].tail if counts_ride else torch.zeros(len(arena.slots) + 2)
        """For each parameter, how many workers have a gradient for it, and how many workers train other parameters than
        these; where the codec does not let them ride with the last bucket, how many have a gradient that is not finite.
        """


class GradientAllReduce:
    """Exchanges the gradients of an arena's parameters. `share` gives this worker's weight in the mean.

    What one worker says to itself is not encoded. Where workers may die two boards are written in turn, since somebody
    may lack the answers of the pass before, and this worker's own gradients are kept until the exchange has ended.
    """

    def __init__(
        self,
        arena: FlatParameters,
        recipe: Recipe,
        wire: Transport,
        watch: Stopwatch,
        tally: Tally,
        share: Callable[[], float],
        around: Runtime,
        pace: Pace,
        on_begin: Callable[[], None],
        on_end: Callable[[float], None],
        has_changed: Callable[[], bool],
        on_changed: Callable[[bool], None],
    ) -> None:
        self._has_changed, self._on_changed = has_changed, on_changed
        self._what, self._codec = (recipe.what, recipe.how) if has_others(wire) else (gradients(), exact())
        self._wire, self._watch, self._tally, self._share = wire, watch, tally, share
        self._around, self._pace = around, pace
        self._on_begin, self._on_end = on_begin, on_end
        self._account = tally.account(type(recipe.what).__name__)
        self._counts_ride = self._codec.elementwise and not isinstance(self._what, gradient_differences | momenta)
        self._endures = isinstance(wire, ElasticTransport)
        self._boards = [GradientBuffers(arena, self._counts_ride) for _ in range(2 if self._endures else 1)]
        for bucket, *others in zip(*(one.buckets for one in self._boards), strict=True):
            context = tally.context(bucket.part, bucket.start, bucket.stop)
            bucket.state = self._what.init_state(self._codec, bucket.flat, context)
            for other in others:
                other.state = bucket.state
        self.remembered = CodecStates([bucket.state for bucket in self.buckets], self._endures)
        self._kept: dict[int, Tensor] = {}
        """This worker's own gradients in this pass, by their place, as long as they may be needed again."""
        self._absent: list[GradientSlot] = []
        self._idle = False
        self._hooks: list[Any] = []
        self._hooked: set[int] = set()
        self.follow([slot.parameter for slot in arena.slots])
        self._length = sum(bucket.stop - bucket.start for bucket in self.buckets)
        self._running = False
        self._pass = 0
        self._wild = False
        """Whether a gradient of this worker's is not finite, and was not encoded."""
        self._launched: list[CollectiveRunner] = []
        self._began = 0.0
        self.paused = False

    @property
    def buckets(self) -> list[Bucket]:
        """Those of this pass."""
        return self._boards[0].buckets

    @property
    def is_warm(self) -> bool:
        """Whether the last answer was a momentum, not a gradient."""
        what = self._what
        return isinstance(what, momenta) and all(one.state.rounds > what.warm_up for one in self.buckets)

    def regroup(self, workers: int, joined: bool, later: bool) -> None:
        """Others exchange from now on."""
        self.remembered.regroup(workers, joined, later)

    def release(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def follow(self, parameters: Sequence[Parameter]) -> None:
        """Begin an exchange when backward reaches one of these; what is not trained can't be followed yet."""
        ready = _weakly(self._ready)
        found: list[Any] = [one for one in parameters if one.requires_grad and id(one) not in self._hooked]
        self._hooks += [one.register_post_accumulate_grad_hook(ready) for one in found]
        self._hooked.update(map(id, found))

    def refuse_past(self, parameters: Iterable[Parameter]) -> None:
        """Raise ModelError if a gradient is about to be stepped with that came to be past the backward pass."""
        for one in parameters:
            place = self._boards[0].place_of.get(id(one))
            if one.grad is not None and place is not None and one.grad is not place.view:
                raise ModelError(_past(place))

    def take_part(self) -> None:
        """Join an exchange without a gradient of one's own: with zeros that weigh nothing."""
        self._on_begin()
        self._begin(idle=True)
        self._write_all()
        self._complete()

    def exchange(self, idle: bool) -> None:
        """Exchange the gradients that there are, where all workers do so behind another exchange."""
        self._begin(idle)
        self._after_backward()

    def _ready(self, parameter: Parameter) -> None:
        """A parameter's gradient of this backward pass is there."""
        if self.paused:
            return
        before = self._watch.switch("encoding")
        if not self._running:
            self._on_begin()
            self._begin()
            self._around.after_backward(self._after_backward)
        place = self._boards[0].place_of.get(id(parameter))
        if place is None:
            self._watch.switch(before)
            return
        if place.passed == self._pass:
            raise ModelError(_twice(place))
        self._write(place)
        place.passed = self._pass
        place.bucket.missing -= 1
        self._launch_full()
        self._watch.switch(before)

    def _begin(self, idle: bool = False) -> None:
        self._running, self._idle = True, idle
        self._absent = []
        if self._endures:
            self._boards.reverse()
            self._kept.clear()
        self.remembered.begin()
        self._pass += 1
        self._launched = []
        self._wild = False
        self._weight = self._share()
        for bucket in self.buckets:
            bucket.missing = len(bucket.places)

    def _write(self, place: GradientSlot) -> bool:
        """Put the gradient, weighted, into its place, and let it live there. False when there is none."""
        parameter = place.slot.parameter
        grad = parameter.grad
        if grad is None:
            place.view.zero_()
            return False
        if grad.layout is not torch.strided:
            raise ModelError(_sparse(place))
        grad = grad.detach() if grad.requires_grad else grad
        torch.mul(grad, self._weight, out=place.view)
        if self._endures:
            self._kept[id(place)] = grad
        parameter.grad = place.view
        return True

    def _launch_full(self) -> None:
        """Send the buckets that are full, in their order; the last one goes with its tail, after the backward pass."""
        while len(self._launched) < len(self.buckets) - 1:
            bucket = self.buckets[len(self._launched)]
            if bucket.missing:
                return
            self._pace.go_on(FORWARD + (1 - FORWARD) * bucket.stop / self._length)
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        flat, codec = bucket.flat, self._codec
        if not self._counts_ride:
            bucket.clear_padding()
        given = None if self._counts_ride else self._tally.norm_of([flat])
        try:
            talk = self._talk(bucket)
        except NotFiniteError:
            flat.zero_()
            talk = self._talk(bucket)
            self._wild = True
        self._tally.owes(given, codec, [self._what.codec_state(bucket.state)])
        self._launched.append(talk)

    def _talk(self, bucket: Bucket) -> CollectiveRunner:
        talk = CollectiveRunner(self._wire, self._what.average(self._codec, bucket.flat, bucket.state), self._account)
        if self._account is not None and talk.ask is not None:
            self._account.began(bucket.flat.nbytes)
            self._tally.spoke(self._codec, talk.ask.tensor, bucket.flat)
        return talk

    def _after_backward(self) -> None:
        """Send what backward did not reach, then wait for everything."""
        before = self._watch.switch("encoding")
        self._pace.go_on()
        late = [place for place in self._boards[0].places if place.passed != self._pass]
        self._absent = [place for place in late if not self._write(place)]
        self._count()
        self._launch_all()
        self._complete()
        self._watch.switch(before)

    def _count(self) -> None:
        """Say which parameters have a gradient here; an idle worker has none."""
        counts, places = self._boards[0].counts, self._boards[0].places
        counts.fill_(0.0 if self._idle else 1.0)
        counts[len(places)] = float(self._has_changed())
        if self._absent and not self._idle:
            without = set(map(id, self._absent))
            counted = counts[: len(places)]
            counted.copy_(torch.tensor([float(id(place) not in without) for place in places]))

    def _write_all(self) -> None:
        """Write and send all buckets: with what this worker has kept of its gradients, and zeros elsewhere."""
        for bucket in self.buckets:
            bucket.flat.zero_()
        for place in self._boards[0].places:
            grad = self._kept.get(id(place))
            if grad is not None:
                torch.mul(grad, self._weight, out=place.view)
        self._count()
        self._launch_all()

    def _launch_all(self) -> None:
        """Send the buckets that have not been sent, and behind them what does not ride with the last one."""
        for bucket in self.buckets[len(self._launched) :]:
            self._launch(bucket)
        if not self._counts_ride:
            counts = self._boards[0].counts
            counts[-1] = float(self._wild)
            self._launched.append(
                CollectiveRunner(self._wire, exact().average(counts, None), self._tally.account("counts"))
            )

    def _complete(self) -> None:
        """Wait for all buckets. A parameter that this worker has no gradient for takes that of the others, or none."""
        self._watch.switch("exchanging")
        self._began = self._watch.spent["exchanging"]
        results = attempted(self._wire, lambda: finish(self._launched), self._again)
        self._watch.switch("encoding")
        counts = self._boards[0].counts
        if not self._counts_ride:
            counts = results.pop()
            if counts[-1] > 0:
                results = [one.fill_(torch.nan) for one in results]
        for bucket, result in zip(self.buckets, results, strict=True):
            if result.data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(result)
        places = self._boards[0].places
        if alone_with := places if self._idle else self._absent:
            anyone = dict(zip(map(id, places), counts[: len(places)].tolist(), strict=True))
            for place in alone_with:
                place.slot.parameter.grad = place.view if anyone[id(place)] > 0 else None
        has_changed = bool(counts[len(places)] > 0)
        self._running = False
        self._kept.clear()
        self.remembered.end()
        self._on_end(self._watch.spent["exchanging"] - self._began)
        if has_changed:
            self._on_changed(self._idle)

    def _again(self) -> list[Tensor]:
        """The exchange from its beginning, with the weights of those who are left."""
        self.remembered.restore()
        self._launched, self._wild, self._weight = [], False, self._share()
        self._write_all()
        return finish(self._launched)


def cut(arena: FlatParameters, counts_ride: bool) -> list[Bucket]:
    """Cut the gradients of an arena into buckets: a small one first, then larger ones, counts behind the last.

    Where counts can't ride along numbers are not encoded one by one, and a part is one bucket: its largest are sought.
    """
    last = arena.parts[-1]
    buckets: list[Bucket] = []
    for part in arena.parts:
        tail = len(arena.slots) + 1 if part is last and counts_ride else 0
        flat = part.theta.new_zeros(part.theta.numel() + tail)
        first = FIRST_BUCKET_BYTES if not buckets else BUCKET_BYTES
        runs = _runs(part, first) if counts_ride else [list(part.slots)]
        buckets += [Bucket(part, flat, run, tail if run is runs[-1] else 0) for run in runs]
    return buckets


def _runs(part: FlatBuffer, limit: int) -> list[list[ParameterSlice]]:
    """The slots of each bucket; the one that reaches the limit is the bucket's last, so that it does not wait."""
    runs: list[list[ParameterSlice]] = [[]]
    for slot in part.slots:
        if runs[-1] and (runs[-1][-1].stop - runs[-1][0].start) * part.theta.element_size() >= limit:
            runs.append([])
            limit = BUCKET_BYTES
        runs[-1].append(slot)
    return runs


def _weakly(method: Callable[[Parameter], None]) -> Callable[[Parameter], None]:
    """Calls a method as long as its object lives: what torch's hooks refer to is never collected."""
    found = weakref.WeakMethod(method)

    def call(parameter: Parameter) -> None:
        if (there := found()) is not None:
            there(parameter)

    return call


def _sparse(place: GradientSlot) -> str:
    return explain(
        f"the gradient of {place.slot.name} is sparse, which the exchange of gradients can't carry",
        got="a sparse gradient",
        expected="dense gradients",
        to_type="nn.Embedding(..., sparse=False), or a recipe that exchanges parameters, as local_sgd()",
    )


def _past(place: GradientSlot) -> str:
    return explain(
        f"the optimizer is about to step with a gradient of {place.slot.name} that was not exchanged",
        got="a gradient that was made without loss.backward(), or a step inside stretto.no_sync()",
        expected="gradients of a backward pass outside stretto.no_sync() before each step",
        to_type="loss.backward() in place of torch.autograd.grad, or a recipe that exchanges parameters: local_sgd()",
    )


def _twice(place: GradientSlot) -> str:
    return explain(
        f"backward reached {place.slot.name} twice in one pass",
        got="two gradients of one parameter in one backward pass, as reentrant checkpointing makes them",
        expected="one",
        to_type="torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    )
