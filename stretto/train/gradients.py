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


class Bucket:
    """A range of a part's gradients that is sent as one."""

    def __init__(self, flat: Tensor, slots: Sequence[Slot], codec: Codec) -> None:
        self.flat = flat[slots[0].start : slots[-1].stop]
        self.slots = slots
        self.views = {id(slot.parameter): slot.view(flat) for slot in slots}
        self.memory = codec.memory(self.flat)
        self.missing: set[int] = set()


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
        self.buckets = [bucket for part in arena.parts for bucket in cut(part, self._codec)]
        self._bucket_of = {id(slot.parameter): bucket for bucket in self.buckets for slot in bucket.slots}
        parameters: list[Any] = [slot.parameter for slot in arena.slots]
        self._hooks = [one.register_post_accumulate_grad_hook(self._ready) for one in parameters]
        self._running = False
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
        self._complete(dict.fromkeys(self._bucket_of, False))

    def _ready(self, parameter: Parameter) -> None:
        """A parameter's gradient of this backward pass is there."""
        if self.paused:
            return
        if not self._running:
            self._begin()
            engine: Any = Variable._execution_engine
            engine.queue_callback(self._after_backward)
        bucket = self._bucket_of[id(parameter)]
        if id(parameter) not in bucket.missing:
            raise ModelError(_twice(bucket, parameter))
        with self._watch.on("encoding"):
            self._write(bucket, parameter)
            bucket.missing.discard(id(parameter))
            self._launch_full()

    def _begin(self) -> None:
        self._on_begin()
        self._running = True
        self._launched = []
        self._weight = self._share()
        for bucket in self.buckets:
            bucket.missing = {id(slot.parameter) for slot in bucket.slots}

    @torch.no_grad()
    def _write(self, bucket: Bucket, parameter: Parameter) -> None:
        """Put the gradient, weighted, into its place in the bucket, and let it live there."""
        view, grad = bucket.views[id(parameter)], parameter.grad
        if grad is None:
            view.zero_()
            return
        if grad.layout is not torch.strided:
            raise ModelError(_sparse(bucket, parameter))
        torch.mul(grad.detach(), self._weight, out=view)
        parameter.grad = view

    def _launch_full(self) -> None:
        while len(self._launched) < len(self.buckets):
            bucket = self.buckets[len(self._launched)]
            if bucket.missing:
                return
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        self._launched.append(Talk(self._wire, self._codec.converse(bucket.flat, bucket.memory)))

    def _after_backward(self) -> None:
        """Send what backward did not reach, then wait for everything."""
        present = {
            id(slot.parameter): slot.parameter.grad is not None for bucket in self.buckets for slot in bucket.slots
        }
        with self._watch.on("encoding"):
            for bucket in self.buckets[len(self._launched) :]:
                for slot in bucket.slots:
                    if id(slot.parameter) in bucket.missing:
                        self._write(bucket, slot.parameter)
                self._launch(bucket)
        self._complete(present)

    def _complete(self, present: dict[int, bool]) -> None:
        """Wait for all buckets; a parameter that no worker has a gradient for keeps None."""
        asked = Talk(self._wire, exact().converse(torch.tensor([float(one) for one in present.values()]), None))
        before = self._watch.switch("exchanging")
        results = finish([*self._launched, asked])
        blocked_s = -self._watch.spent["exchanging"]
        self._watch.switch("encoding")
        blocked_s += self._watch.spent["exchanging"]
        anyone = dict(zip(present, results.pop().tolist(), strict=True))
        for bucket, result in zip(self.buckets, results, strict=True):
            if result.data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(result)
            for slot in bucket.slots:
                held = anyone[id(slot.parameter)] > 0
                slot.parameter.grad = bucket.views[id(slot.parameter)] if held else None
        self._running = False
        self._on_end(blocked_s)
        self._watch.switch(before)


def cut(part: Part, codec: Codec) -> list[Bucket]:
    """Cut a part into buckets: a small one first, then larger ones."""
    flat = torch.zeros_like(part.theta)
    runs: list[list[Slot]] = [[]]
    limit = FIRST_BUCKET_BYTES
    for slot in part.slots:
        run = runs[-1]
        if run and (slot.stop - run[0].start) * flat.element_size() > limit:
            runs.append([slot])
            limit = BUCKET_BYTES
        else:
            run.append(slot)
    return [Bucket(flat, run, codec) for run in runs]


def _name(bucket: Bucket, parameter: Parameter) -> str:
    return next(slot.name for slot in bucket.slots if slot.parameter is parameter)


def _sparse(bucket: Bucket, parameter: Parameter) -> str:
    return explain(
        f"the gradient of {_name(bucket, parameter)} is sparse, which the exchange of gradients can't carry",
        got="a sparse gradient",
        expected="dense gradients",
        to_type="nn.Embedding(..., sparse=False), or a recipe that exchanges parameters, as local_sgd()",
    )


def _twice(bucket: Bucket, parameter: Parameter) -> str:
    return explain(
        f"backward reached {_name(bucket, parameter)} twice in one pass",
        got="two gradients of one parameter in one backward pass, as reentrant checkpointing makes them",
        expected="one",
        to_type="torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    )
