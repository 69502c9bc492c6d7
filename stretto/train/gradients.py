"""The exchange of gradients: begun while backward still runs, complete when `backward()` returns.

Each parameter's hook writes its gradient, weighted, into a flat bucket; full buckets set off in a fixed order. The
last act of the backward pass waits for all of them, so that clipping, scalers and the optimizer see agreed gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.variable import Variable
from torch.nn import Parameter

from stretto.errors import ModelError, explain
from stretto.how import Codec, exact
from stretto.train.arena import Arena, Part, Slot
from stretto.train.stopwatch import Stopwatch
from stretto.train.talk import Talk, finish
from stretto.wire import Wire

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""Bucket sizes as in DistributedDataParallel: a small one first, so that sending starts early."""


class Place:
    """Where one parameter's gradient lives: its view of a bucket."""

    __slots__ = ("bucket", "passed", "slot", "view")

    def __init__(self, slot: Slot, bucket: Bucket, flat: Tensor) -> None:
        self.slot, self.bucket = slot, bucket
        self.view = slot.view(flat)
        self.passed = 0
        """The backward pass that wrote it last."""


class Bucket:
    """A range of a part's gradients that is sent as one: its parameters' `places`, and a `tail` for counts."""

    def __init__(self, flat: Tensor, slots: Sequence[Slot], codec: Codec, tail: int = 0) -> None:
        self.flat = flat[slots[0].start : slots[-1].stop + tail]
        self.tail = flat[slots[-1].stop : slots[-1].stop + tail]
        self.places = [Place(slot, self, flat) for slot in slots]
        self.memory = codec.memory(self.flat)
        self.missing = 0


class GradientExchange:
    """Exchanges the gradients of an arena's parameters. `share` gives this worker's weight in the mean.

    What one worker says to itself is not encoded.
    """

    def __init__(
        self,
        arena: Arena,
        wire: Wire,
        codec: Codec,
        watch: Stopwatch,
        share: Callable[[], float],
        on_begin: Callable[[], None],
        on_end: Callable[[float], None],
    ) -> None:
        self._codec = codec if wire.workers > 1 else exact()
        self._wire, self._watch, self._share = wire, watch, share
        self._on_begin, self._on_end = on_begin, on_end
        self.buckets = cut(arena, self._codec)
        self._counts = self.buckets[-1].tail if self._codec.elementwise else torch.zeros(len(arena.slots))
        """For each parameter, how many workers have a gradient for it; with the last bucket, if the codec lets it."""
        self._places = [place for bucket in self.buckets for place in bucket.places]
        self._place_of = {id(place.slot.parameter): place for place in self._places}
        parameters: list[Any] = [slot.parameter for slot in arena.slots]
        self._hooks = [one.register_post_accumulate_grad_hook(self._ready) for one in parameters]
        self._engine: Any = Variable._execution_engine
        self._running = False
        self._pass = 0
        self._launched: list[Talk] = []
        self.paused = False

    def release(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def take_part(self) -> None:
        """Join an exchange without a gradient of one's own: with zeros that weigh nothing."""
        self._begin()
        for bucket in self.buckets:
            bucket.flat.zero_()
            self._launch(bucket)
        self._counts.zero_()
        self._complete(alone_with=self._places)

    def _ready(self, parameter: Parameter) -> None:
        """A parameter's gradient of this backward pass is there."""
        if self.paused:
            return
        before = self._watch.switch("encoding")
        if not self._running:
            self._begin()
            self._engine.queue_callback(self._after_backward)
        place = self._place_of[id(parameter)]
        if place.passed == self._pass:
            raise ModelError(_twice(place))
        self._write(place)
        place.passed = self._pass
        place.bucket.missing -= 1
        self._launch_full()
        self._watch.switch(before)

    def _begin(self) -> None:
        self._on_begin()
        self._running = True
        self._pass += 1
        self._launched = []
        self._weight = self._share()
        for bucket in self.buckets:
            bucket.missing = len(bucket.places)

    def _write(self, place: Place) -> bool:
        """Put the gradient, weighted, into its place, and let it live there. False when there is none."""
        parameter = place.slot.parameter
        grad = parameter.grad
        if grad is None:
            place.view.zero_()
            return False
        if grad.layout is not torch.strided:
            raise ModelError(_sparse(place))
        torch.mul(grad.detach() if grad.requires_grad else grad, self._weight, out=place.view)
        parameter.grad = place.view
        return True

    def _launch_full(self) -> None:
        """Send the buckets that are full, in their order; the last one goes with its tail, after the backward pass."""
        while len(self._launched) < len(self.buckets) - 1:
            bucket = self.buckets[len(self._launched)]
            if bucket.missing:
                return
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        self._launched.append(Talk(self._wire, self._codec.converse(bucket.flat, bucket.memory)))

    def _after_backward(self) -> None:
        """Send what backward did not reach, then wait for everything."""
        before = self._watch.switch("encoding")
        late = [place for place in self._places if place.passed != self._pass]
        absent = [place for place in late if not self._write(place)]
        self._counts.fill_(1.0)
        if absent:
            without = set(map(id, absent))
            self._counts.copy_(torch.tensor([float(id(place) not in without) for place in self._places]))
        for bucket in self.buckets[len(self._launched) :]:
            self._launch(bucket)
        self._complete(absent)
        self._watch.switch(before)

    def _complete(self, alone_with: Sequence[Place]) -> None:
        """Wait for all buckets. A parameter that this worker has no gradient for takes that of the others, or none."""
        if not self._codec.elementwise:
            self._launched.append(Talk(self._wire, exact().converse(self._counts, None)))
        self._watch.switch("exchanging")
        began = self._watch.spent["exchanging"]
        results = finish(self._launched)
        self._watch.switch("encoding")
        if not self._codec.elementwise:
            self._counts = results.pop()
        for bucket, result in zip(self.buckets, results, strict=True):
            if result.data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(result)
        if alone_with:
            anyone = dict(zip(map(id, self._places), self._counts.tolist(), strict=True))
            for place in alone_with:
                place.slot.parameter.grad = place.view if anyone[id(place)] > 0 else None
        self._running = False
        self._on_end(self._watch.spent["exchanging"] - began)


def cut(arena: Arena, codec: Codec) -> list[Bucket]:
    """Cut the gradients of an arena into buckets: a small one first, then larger ones, counts behind the last."""
    last = arena.parts[-1]
    buckets: list[Bucket] = []
    for part in arena.parts:
        tail = len(arena.slots) if part is last and codec.elementwise else 0
        flat = part.theta.new_zeros(part.theta.numel() + tail)
        runs = _runs(part, FIRST_BUCKET_BYTES if not buckets else BUCKET_BYTES)
        buckets += [Bucket(flat, run, codec, tail if run is runs[-1] else 0) for run in runs]
    return buckets


def _runs(part: Part, limit: int) -> list[list[Slot]]:
    """The slots of each bucket; the one that reaches the limit is the bucket's last, so that it does not wait."""
    runs: list[list[Slot]] = [[]]
    for slot in part.slots:
        if runs[-1] and (runs[-1][-1].stop - runs[-1][0].start) * part.theta.element_size() >= limit:
            runs.append([])
            limit = BUCKET_BYTES
        runs[-1].append(slot)
    return runs


def _sparse(place: Place) -> str:
    return explain(
        f"the gradient of {place.slot.name} is sparse, which the exchange of gradients can't carry",
        got="a sparse gradient",
        expected="dense gradients",
        to_type="nn.Embedding(..., sparse=False), or a recipe that exchanges parameters, as local_sgd()",
    )


def _twice(place: Place) -> str:
    return explain(
        f"backward reached {place.slot.name} twice in one pass",
        got="two gradients of one parameter in one backward pass, as reentrant checkpointing makes them",
        expected="one",
        to_type="torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    )
