"""All-reduce of gradients: begins while the backward pass runs, and is complete when `backward()` returns.

The hook of each parameter writes its weighted gradient into a flat bucket; full buckets are sent in a fixed order. The
end of the backward pass waits for all buckets, so that gradient clipping, gradient scalers and the optimizer see the
averaged gradients.

An exchange commits at all ranks of a worker or at none. So a rank whose stage trains no parameter takes part with the
counts alone, and a rank of a pipeline begins the exchange even where the backward pass reaches no parameter.

Where another library owns the parameters, as shards of a replica's ranks, all of this happens at the end of the pass:
within it a rank waits for other ranks, which must not wait for other workers. The gradients of an only worker are
already the mean, and are not copied.

A codec that does not encode elementwise gets all gradients of a flat buffer in one bucket. One more all-reduce then
carries, for each parameter, how many workers have a gradient for it, and how many workers have a gradient that is not
finite: such a gradient is not encoded, and all workers get NaN in its place, as they would without an encoding. The
mark of the step and of the learning rates is among the counts: workers in different steps end the run in this exchange.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from stretto.codecs import exact
from stretto.errors import ModelError, NotFiniteError, explain
from stretto.recipe.recipe import Recipe
from stretto.recipe.what import gradient_differences, gradients, momenta
from stretto.strategies.codec_state import CodecStates
from stretto.strategies.collective_runner import CollectiveRunner, finish
from stretto.strategies.context import ExchangeObserver, StrategyContext
from stretto.strategies.flat_buffers import FlatBuffer, FlatParameters, ParameterSlice, hold, let_go, zeros
from stretto.strategies.marks import COUNTS, counts_of, differ
from stretto.strategies.parameter_set import ParameterSet
from stretto.transport.device_memory import Writers

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""Bucket sizes as in DistributedDataParallel: a small one first, so that sending starts early."""

FORWARD = 1 / 3
"""Share of a step's computing time that is over when the backward pass begins: backward costs two forward passes."""


class GradientSlot:
    """The view of a bucket that holds one parameter's gradient."""

    __slots__ = ("_exchanged", "bucket", "slot", "view", "written_in_pass")

    def __init__(self, slot: ParameterSlice, bucket: Bucket, flat: Tensor) -> None:
        self.slot, self.bucket = slot, bucket
        self.view = slot.view(flat)
        self._exchanged: TensorWeakRef | None = None
        """The parameter's gradient as the last exchange has set it; the script may free it."""
        self.written_in_pass = 0
        """Number of the backward pass that wrote the gradient last."""

    def place(self) -> None:
        """Set the parameter's gradient to this view, or to its values."""
        self.slot.source.place_gradient(self.view)
        self.note_exchanged()

    def note_exchanged(self) -> None:
        """Note that the parameter's gradient is the result of an exchange."""
        grad = self.slot.parameter.grad
        self._exchanged = TensorWeakRef(grad) if grad is not None else None

    def has_exchanged(self, grad: Tensor) -> bool:
        """Return True if the last exchange has set this gradient."""
        return self._exchanged is not None and self._exchanged() is grad


class Bucket:
    """A range of a flat buffer's gradients, sent as one message: `gradient_slots`, and a `tail` for counts."""

    def __init__(self, part: FlatBuffer, flat: Tensor, slots: Sequence[ParameterSlice], tail: int = 0) -> None:
        self.part, self.start, self.stop = part, slots[0].start, slots[-1].stop
        self.flat = flat[self.start : self.stop + tail]
        self.tail = flat[self.stop : self.stop + tail]
        self.gradient_slots = [GradientSlot(slot, self, flat) for slot in slots]
        self._padding = _padding(slots).to(flat.device)
        self.writers = Writers(flat.device)
        self.state: Any = None
        self.missing = 0

    def clear_padding(self) -> None:
        """Set the elements between the parameters to zero: a decoded result may have written values there."""
        self.flat.index_fill_(0, self._padding, 0.0)


def _padding(slots: Sequence[ParameterSlice]) -> Tensor:
    """Return the indices of a bucket's elements that belong to no parameter."""
    pairs = itertools.pairwise(slots)
    gaps = [torch.arange(one.stop, following.start, device="cpu") for one, following in pairs]
    return torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *gaps]) - slots[0].start


class GradientBuffers:
    """The buckets of one backward pass, and the gradient slots and counts in them."""

    def __init__(self, flat_parameters: FlatParameters, counts_in_tail: bool) -> None:
        self._flats, self.buckets = split_into_buckets(flat_parameters, counts_in_tail)
        self.gradient_slots = [gradient_slot for bucket in self.buckets for gradient_slot in bucket.gradient_slots]
        self.slot_of = {id(gradient_slot.slot.parameter): gradient_slot for gradient_slot in self.gradient_slots}
        self.copied = [gradient_slot for gradient_slot in self.gradient_slots if gradient_slot.slot.source.copies]
        """Gradients whose memory is not in the buckets, and that get a copy of the result."""
        size, device = len(flat_parameters.slots) + 2 + COUNTS, self._flats[-1].device if self._flats else "cpu"
        self.counts = self.buckets[-1].tail if counts_in_tail else torch.zeros(size, device=device)
        """Counts over the workers, summed by the exchange.

        For each parameter the number of workers that have a gradient for it, then the number of workers whose set of
        trained parameters has changed, then the counts of the workers' marks. Where the codec does not let the counts
        ride with the last bucket, also the number of workers that have a gradient that is not finite.
        """

        self.flags = self.counts[len(flat_parameters.slots) :][: 1 + COUNTS]
        """The counts that follow those of the parameters."""

    def let_go(self) -> None:
        """Give up the memory of the buckets until `hold`; no gradient is in it yet."""
        for flat in self._flats:
            let_go(flat)

    def hold(self) -> None:
        """Have the memory of the buckets."""
        for flat in self._flats:
            hold(flat)


class GradientAllReduce:
    """All-reduces the gradients of a set of parameters in flat buffers.

    `on_changed` is called at all workers when any worker trains other parameters.

    A single worker's gradients are not encoded. Where workers may fail, two sets of buffers are written in turn, since
    another worker may still need the results of the backward pass before, and this worker's own gradients are kept
    until the exchange has ended. Buffers have memory from the first exchange on.
    """

    def __init__(
        self,
        parameter_set: ParameterSet,
        recipe: Recipe,
        context: StrategyContext,
        observer: ExchangeObserver,
        on_changed: Callable[[], object],
    ) -> None:
        flat_parameters, transport, tally = parameter_set.flat_parameters, context.transport, context.tally
        assert flat_parameters is not None
        self._has_changed, self._on_changed = parameter_set.has_changed, on_changed
        self._what, self._codec = recipe.what, recipe.how
        self._transport, self._timer, self._tally = transport, context.timer, tally
        self._runtime, self._pace, self._observer = context.runtime, context.pace, observer
        self._weights = parameter_set.weights
        self._account = tally.account(type(recipe.what).__name__)
        rides = self._codec.elementwise and not isinstance(self._what, gradient_differences | momenta)
        self._counts_in_tail = rides and bool(flat_parameters.parts)
        self._elastic = transport.repeats_attempts
        self._buffer_sets = [
            GradientBuffers(flat_parameters, self._counts_in_tail) for _ in range(2 if self._elastic else 1)
        ]
        self._parts = flat_parameters.parts if self._codec.needs_theta else []
        """Buffers that have to hold the parameters' present values."""
        for part in self._parts:
            part.load()
        for bucket, *others in zip(*(one.buckets for one in self._buffer_sets), strict=True):
            codec_context = tally.context(bucket.part, bucket.start, bucket.stop)
            bucket.state = self._what.init_state(self._codec, bucket.flat, codec_context)
            for other in others:
                other.state = bucket.state
        self.codec_states = CodecStates([bucket.state for bucket in self.buckets], self._elastic)
        self._flags = np.zeros(1 + COUNTS, np.float32)
        """This worker's part of `GradientBuffers.flags`."""
        self._own_gradients: dict[int, Tensor] = {}
        """This worker's own gradients of this backward pass, by the id of their slot, while a retry may need them."""
        self._without_gradient: list[GradientSlot] = []
        self._is_empty = False
        self._hooks: list[Any] = []
        self._hooked: set[int] = set()
        self.follow(parameter_set.held_parameters())
        self._length = sum(bucket.stop - bucket.start for bucket in self.buckets)
        self._copies = any(slot.source.copies for slot in flat_parameters.slots)
        """True if ranks of the replica wait for others in a backward pass: exchanges begin at its end."""
        self._is_late = False
        """True in a backward pass at whose end the exchange begins."""
        self._running = False
        self._pass = 0
        self._has_non_finite = False
        """True if a gradient of this worker is not finite, and was not encoded."""
        self._operations: list[CollectiveRunner] = []
        self._began = 0.0
        self.paused = False
        for part in flat_parameters.parts:
            part.let_go()
        for buffers in self._buffer_sets:
            buffers.let_go()

    @property
    def buckets(self) -> list[Bucket]:
        """Buckets of this backward pass."""
        return self._buffer_sets[0].buckets

    @property
    def is_warm(self) -> bool:
        """True if the last result was a momentum, not a gradient."""
        what = self._what
        if not isinstance(what, momenta) or not self.buckets:
            return False
        return all(one.state.rounds > what.warm_up for one in self.buckets)

    def release(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def follow(self, parameters: Sequence[Parameter]) -> None:
        """Hook the parameters: an exchange begins when backward reaches one of them.

        Frozen ones, too: a script may thaw them before a backward pass, and not call the model itself before it.
        """
        ready = _weakly(self._ready)
        for parameter in parameters:
            if id(parameter) not in self._hooked and parameter.is_floating_point():
                self._hooks.append(_hook(parameter, ready))
                self._hooked.add(id(parameter))

    def refuse_unexchanged(self, parameters: Iterable[Parameter]) -> None:
        """Raise ModelError if a parameter has a gradient that no exchange of a backward pass has averaged."""
        for one in parameters:
            gradient_slot = self._buffer_sets[0].slot_of.get(id(one))
            if one.grad is not None and gradient_slot is not None and not gradient_slot.has_exchanged(one.grad):
                raise ModelError(_not_exchanged(gradient_slot))

    def exchange(self) -> None:
        """Exchange the gradients that are present.

        After a pass of weight 0 they are gradients that the worker has accumulated before and not sent, or zeros.
        """
        self._begin()
        self._after_backward()

    def begin_in_backward(self) -> None:
        """Begin the exchange of the backward pass under way, or have it begin at its end, unless it has begun."""
        if self.paused or self._running:
            return
        has_to_agree = self._weights.is_weighed and not self._runtime.waits_in_backward
        if self._copies or self._is_mean or self._observer.is_weightless or has_to_agree:
            self._running = self._is_late = True
            self._runtime.after_backward(self._exchange_late)
            return
        before = self._timer.switch("encoding")
        self._begin()
        self._runtime.after_backward(self._after_backward)
        self._timer.switch(before)

    def _ready(self, parameter: Parameter) -> None:
        """Write and send a parameter's gradient; the hook that runs when backward has accumulated it."""
        self.begin_in_backward()
        if self.paused or self._is_late:
            return
        before = self._timer.switch("encoding")
        gradient_slot = self._buffer_sets[0].slot_of.get(id(parameter))
        if gradient_slot is None:
            self._timer.switch(before)
            return
        if gradient_slot.written_in_pass == self._pass:
            raise ModelError(_twice(gradient_slot))
        self._write(gradient_slot)
        gradient_slot.written_in_pass = self._pass
        gradient_slot.bucket.missing -= 1
        self._launch_full()
        self._timer.switch(before)

    @property
    def _is_mean(self) -> bool:
        """True if this worker's gradients are the mean of all workers."""
        return self._transport.workers == 1 and (self._what, self._codec) == (gradients(), exact())

    def _exchange_late(self) -> None:
        """Exchange the gradients of the backward pass that ends."""
        self._is_late = False
        self._observer.take_back_pass()
        self._keep_own() if self._is_mean else self.exchange()

    def _keep_own(self) -> None:
        """End a backward pass of the only worker: its gradients are the mean, without copies in the buckets."""
        self._pace.go_on()
        self._transport.attempt(lambda: None)
        for gradient_slot in self._buffer_sets[0].gradient_slots:
            gradient_slot.note_exchanged()
        self._running = False
        self._observer.exchange_ended(0.0)
        if self._has_changed():
            self._on_changed()

    def _begin(self) -> None:
        self._running = True
        self._is_empty = self._observer.is_weightless and not self._weights.has_own
        self._without_gradient = []
        if self._elastic:
            self._buffer_sets.reverse()
            self._own_gradients.clear()
        self._buffer_sets[0].hold()
        self.codec_states.begin()
        self._pass += 1
        self._operations = []
        self._has_non_finite = False
        with self._timer.on("exchanging"):
            self._weights.agree()
        self._weight = self._weights.share()
        for bucket in self.buckets:
            bucket.missing = len(bucket.gradient_slots)
        for part in self._parts:
            part.load()

    def _write(self, gradient_slot: GradientSlot) -> bool:
        """Write the weighted gradient into its bucket, where it becomes that view. Return False without one."""
        source = gradient_slot.slot.source
        grad = source.gradient if not self._is_empty else None
        if grad is None:
            gradient_slot.view.zero_()
            return False
        if grad.layout is not torch.strided:
            raise ModelError(_sparse(gradient_slot))
        self._weigh(grad, gradient_slot.view)
        gradient_slot.bucket.writers.note()
        if self._elastic:
            self._own_gradients[id(gradient_slot)] = grad
        if not source.copies:
            gradient_slot.place()
        return True

    def _weigh(self, grad: Tensor, out: Tensor) -> None:
        """Write the weighted gradient; zeros at weight 0, also for a gradient that is not finite."""
        if self._weight:
            torch.mul(grad, self._weight, out=out)
        else:
            out.zero_()

    def _launch_full(self) -> None:
        """Send the full buckets in order. The last bucket waits for its tail until the backward pass has ended."""
        while len(self._operations) < len(self.buckets) - 1:
            bucket = self.buckets[len(self._operations)]
            if bucket.missing:
                return
            self._pace.go_on(FORWARD + (1 - FORWARD) * bucket.stop / self._length)
            self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        flat, codec = bucket.flat, self._codec
        bucket.writers.join()
        if not self._counts_in_tail:
            bucket.clear_padding()
        norm = None if self._counts_in_tail else self._tally.norm_of([flat])
        try:
            operation = self._start(bucket)
        except NotFiniteError:
            flat.zero_()
            operation = self._start(bucket)
            self._has_non_finite = True
        self._tally.measure_residual_later(norm, codec, [self._what.codec_state(bucket.state)])
        self._operations.append(operation)

    def _start(self, bucket: Bucket) -> CollectiveRunner:
        operation = CollectiveRunner(
            self._transport, self._what.average(self._codec, bucket.flat, bucket.state), self._account
        )
        if self._account is not None and operation.ask is not None:
            self._account.count_raw(bucket.flat.nbytes)
            self._tally.count_values(self._codec, operation.ask.tensor, bucket.flat)
        return operation

    def _after_backward(self) -> None:
        """Send what the backward pass did not reach, then wait for all buckets."""
        before = self._timer.switch("encoding")
        self._pace.go_on()
        late = [
            gradient_slot
            for gradient_slot in self._buffer_sets[0].gradient_slots
            if gradient_slot.written_in_pass != self._pass
        ]
        self._without_gradient = [gradient_slot for gradient_slot in late if not self._write(gradient_slot)]
        self._count()
        self._launch_all()
        self._complete()
        self._timer.switch(before)

    def _count(self) -> None:
        """Write into the counts which parameters have a gradient at this worker; without a sample it has none."""
        counts, gradient_slots = self._buffer_sets[0].counts, self._buffer_sets[0].gradient_slots
        counts.fill_(0.0 if self._is_empty else 1.0)
        self._flags[:] = [float(self._has_changed()), *counts_of(self._observer.mark())]
        self._buffer_sets[0].flags.copy_(torch.from_numpy(self._flags))
        if self._without_gradient and not self._is_empty:
            without = set(map(id, self._without_gradient))
            counted = counts[: len(gradient_slots)]
            counted.copy_(
                torch.tensor(
                    [float(id(gradient_slot) not in without) for gradient_slot in gradient_slots], device="cpu"
                )
            )

    def _write_all(self) -> None:
        """Write and send all buckets: with the gradients of this worker that were kept, and zeros elsewhere."""
        for bucket in self.buckets:
            bucket.flat.zero_()
        for gradient_slot in self._buffer_sets[0].gradient_slots:
            grad = self._own_gradients.get(id(gradient_slot))
            if grad is not None:
                self._weigh(grad, gradient_slot.view)
        self._count()
        self._launch_all()

    def _launch_all(self) -> None:
        """Send the buckets that are not sent yet, then the counts where they do not ride with the last bucket."""
        for bucket in self.buckets[len(self._operations) :]:
            self._launch(bucket)
        if not self._counts_in_tail:
            counts = self._buffer_sets[0].counts
            counts[-1] = float(self._has_non_finite)
            self._operations.append(
                CollectiveRunner(self._transport, exact().average(counts, None), self._tally.account("counts"))
            )

    def _complete(self) -> None:
        """Wait for all buckets, and set the gradients that this worker has none for to the mean of the other workers.

        Such a gradient is None if no worker has one, or zero if all workers with samples have failed.
        """
        self._timer.switch("exchanging")
        self._began = self._timer.spent["exchanging"]
        results = self._transport.attempt(lambda: finish(self._operations), self._retry)
        self._timer.switch("encoding")
        gradient_slots = self._buffer_sets[0].gradient_slots
        without_gradient = gradient_slots if self._is_empty else self._without_gradient
        first = 0 if without_gradient else len(gradient_slots)  # of the counts that are read, all in one read
        numbers = results.pop()[first:].tolist() if not self._counts_in_tail else []
        if numbers and numbers[-1] > 0:
            results = [one.fill_(torch.nan) for one in results]
        for bucket, result in zip(self.buckets, results, strict=True):
            if result.data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(result)
        numbers = numbers or self._buffer_sets[0].counts[first:].tolist()
        for gradient_slot in self._buffer_sets[0].copied:
            if gradient_slot.slot.parameter.grad is not None:
                gradient_slot.place()
        workers_with = dict(zip(map(id, gradient_slots), numbers, strict=False))
        for gradient_slot in without_gradient:
            if workers_with[id(gradient_slot)] > 0 or (self._is_empty and not self._weights.has_any):
                gradient_slot.place()
            else:
                gradient_slot.slot.parameter.grad = None
        has_changed, *marks = numbers[len(gradient_slots) - first :]
        self._running = False
        self._own_gradients.clear()
        self.codec_states.end()
        self._observer.exchange_ended(self._timer.spent["exchanging"] - self._began)
        if differ(marks):
            self._observer.refuse_apart()
        if has_changed > 0:
            self._on_changed()

    def _retry(self) -> list[Tensor]:
        """Repeat the exchange from its beginning, with the weights of the remaining workers."""
        self.codec_states.restore()
        self._operations, self._has_non_finite, self._weight = [], False, self._weights.share()
        self._write_all()
        return finish(self._operations)


def split_into_buckets(flat_parameters: FlatParameters, counts_in_tail: bool) -> tuple[list[Tensor], list[Bucket]]:
    """Return flat gradients, and their buckets: a small one first, then larger ones; the counts follow the last.

    Where the counts can't ride along, the codec is not elementwise and each flat buffer is one bucket: such a codec may
    look for the largest elements of all.
    """
    flats: list[Tensor] = []
    buckets: list[Bucket] = []
    for part in flat_parameters.parts:
        tail = len(flat_parameters.slots) + 1 + COUNTS if part is flat_parameters.parts[-1] and counts_in_tail else 0
        flat = zeros(part.theta.numel() + tail, part.slots)
        flats.append(flat)
        first = FIRST_BUCKET_BYTES if not buckets else BUCKET_BYTES
        runs = _runs(part, first) if counts_in_tail else [list(part.slots)]
        buckets += [Bucket(part, flat, run, tail if run is runs[-1] else 0) for run in runs]
    return flats, buckets


def _runs(part: FlatBuffer, limit: int) -> list[list[ParameterSlice]]:
    """Return the slices of each bucket. A bucket ends with the parameter that reaches the limit: it does not wait."""
    runs: list[list[ParameterSlice]] = [[]]
    for slot in part.slots:
        if runs[-1] and (runs[-1][-1].stop - runs[-1][0].start) * part.theta.element_size() >= limit:
            runs.append([])
            limit = BUCKET_BYTES
        runs[-1].append(slot)
    return runs


def _weakly(method: Callable[[Parameter], None]) -> Callable[[Parameter], None]:
    """Return a function that calls the method while its object exists: torch's hooks keep a strong reference."""
    reference = weakref.WeakMethod(method)

    def call(parameter: Parameter) -> None:
        if (bound := reference()) is not None:
            bound(parameter)

    return call


def _hook(parameter: Any, ready: Callable[[Parameter], None]) -> RemovableHandle:
    """Call `ready` when backward has accumulated a gradient; torch adds such hooks while gradients are required."""
    is_trained = parameter.requires_grad
    parameter.requires_grad_(True)
    hook: RemovableHandle = parameter.register_post_accumulate_grad_hook(ready)
    parameter.requires_grad_(is_trained)
    return hook


def _sparse(gradient_slot: GradientSlot) -> str:
    return explain(
        f"the gradient of {gradient_slot.slot.name} is sparse, which the exchange of gradients can't carry",
        got="a sparse gradient",
        expected="dense gradients",
        to_type="--recipe async_sgd, which exchanges the rows of a batch alone; nn.Embedding(..., sparse=False); or a "
        "recipe that exchanges parameters, as local_sgd()",
    )


def _not_exchanged(gradient_slot: GradientSlot) -> str:
    return explain(
        f"the optimizer is about to step with a gradient of {gradient_slot.slot.name} that was not exchanged",
        got="a gradient that was computed without loss.backward(), or a step in a hook or inside stretto.no_sync()",
        expected="gradients of a backward pass outside stretto.no_sync() before each step",
        to_type="loss.backward(), not torch.autograd.grad, and optimizer.step() after it, or a recipe that exchanges "
        "parameters: local_sgd()",
    )


def _twice(gradient_slot: GradientSlot) -> str:
    return explain(
        f"backward reached {gradient_slot.slot.name} twice in one backward pass",
        got="two gradients of one parameter in one backward pass, as reentrant checkpointing computes them",
        expected="one",
        to_type="torch.utils.checkpoint.checkpoint(..., use_reentrant=False)",
    )
