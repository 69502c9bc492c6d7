"""Hooks on the steps of an optimizer and of those around it, each called once a step."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch.optim import Optimizer


class StepHooks:
    """Calls `before` and `after` around each step of an optimizer, with the arguments of torch's hooks.

    For an optimizer whose `step` calls that of its base class, torch calls the hooks a second time within the step, as
    soon as an optimizer of the base class has been created in the process. The inner calls are left out here.

    The step of an optimizer `around` this one ends this one's step: it may change the parameters until then. What it
    does before this one steps, as the passes of SAM, is no step. `mean_loss` replaces what a closure returns.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        before: Callable[..., None],
        after: Callable[..., None],
        around: Sequence[Optimizer] = (),
        mean_loss: Callable[[Any], Any] | None = None,
    ) -> None:
        self._optimizer, self._before, self._after, self._mean_loss = optimizer, before, after, mean_loss
        self._step: FrameType | None = None
        """Stack frame of torch's that runs the present step. After an error the frame is no longer on the stack."""
        self._has_begun = False
        """True if the optimizer itself steps, or has stepped, in the present step."""
        family = (*around, optimizer)
        self._hooks = [one.register_step_pre_hook(self._begin) for one in family]
        self._hooks += [one.register_step_post_hook(self._end) for one in family]

    def remove(self) -> None:
        """Remove the hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        caller, replaced = sys._getframe(1), None
        if self._step is None or not _is_within(caller, self._step):
            self._step, self._has_begun = caller, False
            replaced = self._with_mean_loss(args, kwargs) if self._mean_loss is not None else None
        if optimizer is self._optimizer and not self._has_begun:
            self._has_begun = True
            self._before(optimizer, args, kwargs)
        return replaced

    def _with_mean_loss(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Return the arguments of a step with a closure that returns the mean loss; None without a closure."""
        closure, mean_loss = closure_of(args, kwargs), self._mean_loss
        if closure is None or mean_loss is None:
            return None
        averaged = functools.wraps(closure)(lambda: mean_loss(closure()))
        return (
            (args, kwargs | {"closure": averaged}) if "closure" in kwargs else ((args[0], averaged, *args[2:]), kwargs)
        )

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if sys._getframe(1) is self._step:
            self._step = None
            if self._has_begun:
                self._after(optimizer, args, kwargs)


def closure_of(args: Any, kwargs: Any) -> Any:
    """Return the closure among the arguments of torch's hooks, whose first is the optimizer; None without one."""
    found = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return found if callable(found) else None


def _is_within(call: FrameType, outer: FrameType) -> bool:
    frame: FrameType | None = call
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is not None
