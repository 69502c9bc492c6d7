"""Steps that one worker leaves out because its gradients are not finite, so that its rounds stay those of the others.

A step is counted where an optimizer makes it. One that is left out has no such place: a gradient scaler skips it in
`scaler.step`, or a script clears gradients that are not finite without a step. Both are seen here, and nothing is
guessed from how often a script steps: a loop may accumulate gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from stretto.strategies.model_sync import given
from stretto.strategies.optimizers import Optimizers, parameters_of
from stretto.training.not_finite import has_non_finite_gradient

watching: ContextVar[LeftOutSteps | None] = ContextVar("watching", default=None)
"""The steps of this worker's script; several workers may share a process."""


class LeftOutSteps:
    """Finds the steps that a script leaves out. `on_skip` is called when a gradient scaler skips one."""

    def __init__(self, model: nn.Module, optimizers: Optimizers, on_skip: Callable[[int], None]) -> None:
        models = given(model)
        self._models = models if isinstance(models, list | tuple) else [models]
        self._optimizers, self._on_skip = optimizers, on_skip
        self._begun = [0] * len(optimizers)
        """Number of steps that each optimizer has begun."""
        self._begun_before = list(self._begun)
        """Number of steps that each had begun before this global step."""
        self._stepped_with: list[tuple[TensorWeakRef, int] | None] = [None] * len(optimizers)
        """A gradient of each optimizer's last step, and its version: the script may free it, or add to it."""
        self._cleared: set[int] = set()
        """Optimizers whose gradients were cleared in this global step before a step."""
        self._not_finite: set[int] = set()
        """Optimizers whose gradients were cleared while they were new, and not finite."""

    def watch(self) -> None:
        """Watch the gradient scalers of this worker's script, and where it clears gradients."""
        for owner, name, through in (
            (GradScaler, "step", LeftOutSteps.scaled),
            (Optimizer, "zero_grad", LeftOutSteps.cleared_by_optimizer),
            (nn.Module, "zero_grad", LeftOutSteps.cleared_by_module),
        ):
            if not hasattr(getattr(owner, name), "_stretto_wraps"):
                setattr(owner, name, _wrapped(getattr(owner, name), through))
        watching.set(self)

    def unwatch(self) -> None:
        """Watch no more: the section has ended."""
        watching.set(None)

    def begin_global_step(self) -> None:
        """Begin a global step."""
        self._begun_before = list(self._begun)
        self._cleared.clear()
        self._not_finite.clear()

    def before_step(self, index: int) -> None:
        """Note that an optimizer begins a step."""
        self._begun[index] += 1

    def after_step(self, index: int) -> None:
        """Note the gradient of an optimizer's step."""
        last = self._last_gradient(index)
        self._stepped_with[index] = (TensorWeakRef(last), last._version) if last is not None else None

    def found(self) -> list[int]:
        """Return the optimizers whose step the script has left out in this global step, which ends.

        A script may clear gradients at the beginning of its loop, and then holds those of the step that it left out.
        """
        return [
            index
            for index in sorted(self._cleared)
            if self._begun[index] == self._begun_before[index]
            and (index in self._not_finite or has_non_finite_gradient(self._optimizers.each[index]))
        ]

    def _last_gradient(self, index: int) -> Tensor | None:
        parameters = reversed(parameters_of(self._optimizers.each[index]))
        return next((one.grad for one in parameters if one.grad is not None), None)

    def _index_of(self, optimizer: object) -> int | None:
        each = zip(self._optimizers.each, self._optimizers.around, strict=True)
        return next((index for index, (one, around) in enumerate(each) if optimizer in (one, *around)), None)

    def _clear(self, index: int) -> None:
        if self._begun[index] != self._begun_before[index]:
            return
        self._cleared.add(index)
        last, noted = self._last_gradient(index), self._stepped_with[index]
        is_old = last is None or (noted is not None and noted[0]() is last and noted[1] == last._version)
        if not is_old and has_non_finite_gradient(self._optimizers.each[index]):
            self._not_finite.add(index)

    # --- calls of the script ------------------------------------------------------------------------------------

    def scaled(self, call: Callable[[], Any], _scaler: GradScaler, optimizer: Optimizer, *_: Any, **__: Any) -> Any:
        """Call the step of a gradient scaler, and note whether it skips that of the optimizer."""
        index = self._index_of(optimizer)
        before = self._begun[index] if index is not None else 0
        result = call()
        if index is not None and self._begun[index] == before:
            self._begun[index] += 1
            self._on_skip(index)
        return result

    def cleared_by_optimizer(self, call: Callable[[], Any], optimizer: Optimizer, *_: Any, **__: Any) -> Any:
        """Clear the gradients of an optimizer, after a look at those of a step that was left out."""
        if (index := self._index_of(optimizer)) is not None:
            self._clear(index)
        return call()

    def cleared_by_module(self, call: Callable[[], Any], module: nn.Module, *_: Any, **__: Any) -> Any:
        """Clear the gradients of a model, after a look at those of a step that was left out."""
        for index in range(len(self._optimizers)) if any(module is one for one in self._models) else ():
            self._clear(index)
        return call()


def _wrapped(original: Callable[..., Any], through: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that passes its call through the steps of the worker that calls it, if it is watched."""

    @functools.wraps(original)
    def method(owner: Any, *given: Any, **named: Any) -> Any:
        call = functools.partial(original, owner, *given, **named)
        steps = watching.get()
        return call() if steps is None else through(steps, call, owner, *given, **named)

    method._stretto_wraps = original  # type: ignore[attr-defined]
    return method
