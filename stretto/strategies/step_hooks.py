"""Hooks on the steps of an optimizer, each called once a step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch.optim import Optimizer


class StepHooks:
    """Calls `before` and `after` around each step of an optimizer, with the arguments of torch's hooks.

    For an optimizer whose `step` calls that of its base class, torch calls the hooks a second time within the step, as
    soon as an optimizer of the base class has been created in the process. The inner calls are left out here.
    """

    def __init__(self, optimizer: Optimizer, before: Callable[..., None], after: Callable[..., None]) -> None:
        self._before, self._after = before, after
        self._step: FrameType | None = None
        """Stack frame of torch's that runs the present step. After an error the frame is no longer on the stack."""
        self._hooks = [optimizer.register_step_pre_hook(self._begin), optimizer.register_step_post_hook(self._end)]

    def remove(self) -> None:
        """Remove the hooks from the optimizer."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        caller = sys._getframe(1)
        if self._step is None or not _is_within(caller, self._step):
            self._step = caller
            self._before(optimizer, args, kwargs)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if sys._getframe(1) is self._step:
            self._step = None
            self._after(optimizer, args, kwargs)


def _is_within(call: FrameType, outer: FrameType) -> bool:
    frame: FrameType | None = call
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is not None
