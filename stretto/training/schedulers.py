"""Facts about torch's learning-rate schedulers: all of an optimizer, position, number of steps, whether it is new."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stretto.runtime.creation_order import SCHEDULERS
from stretto.training.other_libraries import unwrapped

TOTALS = ("total_steps", "T_max")


def schedulers_of(optimizer: Optimizer) -> list[LRScheduler]:
    """Return the schedulers of an optimizer, in the same order at all workers."""
    return [scheduler for scheduler in SCHEDULERS.all() if optimizer_of(scheduler) is optimizer]


def optimizer_of(scheduler: LRScheduler) -> object:
    """Return the optimizer of a scheduler, that within Accelerate's wrapper if it was made with one."""
    found = getattr(scheduler, "optimizer", None)
    return unwrapped(found) if isinstance(found, Optimizer) else found


def is_initial(scheduler: LRScheduler) -> bool:
    """Return True while a scheduler is being made: its first step sets the learning rate."""
    return bool(getattr(scheduler, "_is_initial", False)) or getattr(scheduler, "last_epoch", 0) == -1


def position_of(scheduler: LRScheduler) -> int:
    """Return the number of steps that a scheduler has made; a chained one has those of its first."""
    found = getattr(scheduler, "last_epoch", None)
    if found is None:
        parts = getattr(scheduler, "_schedulers", ())
        return position_of(parts[0]) if parts else 0
    return int(found)


def total_of(scheduler: LRScheduler) -> int | None:
    """Return the number of steps after which a scheduler has no more to do, or turns round; None if that is unknown.

    That of transformers' schedules is an argument of their function.
    """
    for name in TOTALS:
        found: object = getattr(scheduler, name, None)
        if isinstance(found, int):
            return found
    for one in getattr(scheduler, "lr_lambdas", ()):
        steps: object = getattr(one, "keywords", {}).get("num_training_steps")
        if isinstance(steps, int):
            return steps
    return None


def length_of(scheduler: LRScheduler) -> int | None:
    """Return the number of steps until the last change that a scheduler is known to make; None if that is unknown.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    >>> length_of(torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60]))
    60
    """
    found: list[int] = [one for one in (total_of(scheduler), getattr(scheduler, "total_iters", None)) if one]
    milestones: list[int] = [*(getattr(scheduler, "milestones", None) or getattr(scheduler, "_milestones", None) or ())]
    parts = [length_of(one) for one in getattr(scheduler, "_schedulers", ())]
    if len(parts) == len(milestones) + 1 and milestones:
        return milestones[-1] + parts[-1] if parts[-1] else milestones[-1]
    return max([*found, *milestones, *(one for one in parts if one)], default=None)
