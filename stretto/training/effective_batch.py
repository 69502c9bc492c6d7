"""The effective batch of a run and the learning rate that goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from stretto.strategies.step_hooks import StepHooks


class ScaledRate:
    """Scaling of an optimizer's learning rate by a factor, during each step only.

    Before and after a step each parameter group holds the script's own object, so that a scheduler computes what it
    would without a factor. Create this object after all other hooks on the optimizer's step that read the rate.
    """

    def __init__(self, optimizer: Optimizer, factor: float) -> None:
        self._optimizer, self._factor = optimizer, factor
        self._own: list[tuple[dict[str, Any], Any]] = []
        self._hooks = StepHooks(optimizer, self._before, self._after)

    def release(self) -> None:
        """Remove the hooks from the optimizer."""
        self._hooks.remove()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the scaled rate in a `with` block, within a step or outside of one."""
        if self._own:
            yield
            return
        self._before(self._optimizer, (), {})
        try:
            yield
        finally:
            self._after(self._optimizer, (), {})

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._own = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
        for group, rate in self._own:
            group["lr"] = rate * self._factor

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        own, self._own = self._own, []
        for group, rate in own:
            group["lr"] = rate


def batch_of(loader: Any) -> int | None:
    """Return the number of samples in the first batch of the script's loader, where the loader knows it."""
    for source in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(source, "batch_size", None)
        if isinstance(size, int) and not isinstance(size, Tensor):
            samples = _length_of(getattr(source, "sampler", None))
            return size if samples is None else min(size, samples)
    return None


def batches_of(loader: Any) -> int | None:
    """Return the number of batches in an epoch of the script's loader, where the loader knows it."""
    return _length_of(loader)


def _length_of(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def describe(
    workers: int,
    batch: int | None,
    *,
    split: bool,
    waits: bool,
    factor: float,
    added: float = 1.0,
    batches: int | None = None,
    first: int | None = None,
    shares: bool = False,
) -> str:
    """Return one line on the samples of a global batch and the learning rate; `added` is the recipe's `step_of_all`.

    The line says nothing of a step: a step may have several batches, or those of one worker. Fewer `batches` in an
    epoch than workers are divided among them in `shares`, or each goes to one worker. A global batch is that of the
    `first` number of workers, if it is given.

    >>> describe(4, 32, split=False, waits=True, factor=1.0)
    '4 workers x 32 = 128 samples a global batch; learning rate as in the script'
    >>> describe(3, 37, split=False, waits=True, factor=1.0, batches=1)
    '1 of 3 workers has a batch: 37 samples a global batch (--batch split shares it); learning rate as in the script'
    >>> describe(3, 1, split=False, waits=True, factor=1.0, batches=1)
    '1 of 3 workers has a batch, the others train nothing: -n 1 is as fast; learning rate as in the script'
    >>> describe(3, 37, split=False, waits=True, factor=1.0, batches=1, shares=True)
    '3 workers share the batch of an epoch; learning rate as in the script'
    >>> describe(4, 32, split=True, waits=True, factor=2.0)
    "4 workers share each batch of 32 samples; learning rate 2 x the script's"
    >>> describe(2, 32, split=False, waits=True, factor=3.0, first=3)
    "2 workers share 3 x 32 = 96 samples a global batch, as the run began; learning rate 3 x the script's"
    """
    rate = "learning rate as in the script" if factor == 1 else f"learning rate {factor:.4g} x the script's"
    samples = f" of {batch} samples" if batch is not None else ""
    training = workers if batches is None or split else min(workers, batches)
    if not waits:
        part = f"1/{workers} of a batch" if split else "a batch"
        each = "each" if training == workers else f"{training} of them at a time"
        sums = f"; the updates of {workers} workers are added: a step of up to {added:.3g} x that rate"
        line = f"{workers} workers that do not wait for each other, {each} with {part}{samples}; {rate}"
        return line + (sums if added > 1 and training > 1 else "")
    if split:
        return f"{workers} workers share each batch{samples}; {rate}"
    size = f"{training} batch{'es' * (training != 1)} of the script's"
    if batch is not None:
        size = f"{training * batch} samples"
    if training < workers and shares:
        return f"{workers} workers share the {'batch' if training == 1 else f'{training} batches'} of an epoch; {rate}"
    if first is not None and first != workers and batch is not None:
        began = f"{first} x {batch} = {first * batch} samples a global batch, as the run began"
        return f"{workers} worker{'s share' if workers > 1 else ' has'} {began}; {rate}"
    if training < workers:
        has = "has a batch" if training == 1 else "have a batch"
        if batch == 1:
            return f"{training} of {workers} workers {has}, the others train nothing: -n {training} is as fast; {rate}"
        return f"{training} of {workers} workers {has}: {size} a global batch (--batch split shares it); {rate}"
    return f"{workers} workers x {'1' if batch is None else batch} = {size} a global batch; {rate}"
